"""What can be known of a recipe before it runs: its files, this machine, and all options again.

>>> check_recipe(Recipe.load("recipes/sentiment.yaml"))
RecipeError: recipes/sentiment.yaml:18: data 'recipes/reviews.csv': expected a file with texts …

Nothing runs and nothing is written: files are opened as the stages will open them, tables up to
their first text. What only the exported graph knows is left to the stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginery.core.data import IMAGE_SUFFIXES, list_images, require_texts
from enginery.core.errors import (
    ArtifactError,
    EngineryError,
    InputError,
    OptionError,
    RecipeError,
    ShapeError,
    SourceError,
    nearest,
)
from enginery.core.feeds import FeedLimits
from enginery.core.model_files import ModelConfig
from enginery.core.shapes import Profile
from enginery.core.source import find_local
from enginery.core.staging import refuse_foreign
from enginery.export.config import check_task
from enginery.recipe.model import Recipe, Step
from enginery.recipe.stages import BenchStage, PredictStage, PublishStage, check_stage, wishes_of
from enginery.runtime.tasks import answered_tasks, task_of

_TEXTS = ("text-classification", "token-classification", "fill-mask", "question-answering")
_IMAGES = ("image-classification",)
_DIMS = {
    **dict.fromkeys(_TEXTS, ("batch", "sequence")),
    **dict.fromkeys(_IMAGES, ("batch", "channels", "height", "width")),
}
"""The dims of tasks that have the same ones whatever the model."""


@dataclass(frozen=True)
class _Model:
    """What is known of the model before it is exported."""

    task: str
    """As the recipe says it; empty where it is inferred."""
    is_onnx: bool
    limits: dict[str, int]
    """The largest sizes of its dims, where its config.json is on this machine."""


def check_recipe(recipe: Recipe) -> None:
    """Check everything that can be known before a recipe runs.

    Raises:
        RecipeError: `file:line: …` for what would fail.
        EngineryError: the same of a value that no file names: it was made in Python, or is an
            option of the command line.
    """
    with _noted(recipe, "model"):
        model = _read_model(recipe)
    with _noted(recipe, "out"):
        if recipe.out:
            refuse_foreign(Path(recipe.out))
    export = recipe.steps[0]
    with _noted(recipe, "task", step=export if "task" in export.lines else None):
        if not model.is_onnx:  # which is imported, whatever it is for
            check_task(export.options.task)
    outputs: set[str] = set()
    for step in recipe.steps:
        with _noted(recipe, step=step):
            check_stage(step.stage, step.options)
            _check_profiles(step, model)
            _check_providers(step.options)
            if step.stage == "build":
                _check_build(step.options, model)
            elif step.stage == "quantize":
                _check_quantize(step.options)
            elif isinstance(step.options, PredictStage):
                with _noted(recipe, "input", step=step):
                    _check_predict(step.options, model, outputs)
                outputs.add(step.options.output)
            elif isinstance(step.options, PublishStage):
                _check_address(step.options)
            _check_files(recipe, step, model, outputs)


@contextmanager
def _noted(recipe: Recipe, name: str = "", *, step: Step | None = None) -> Iterator[None]:
    """Put file and line before what is wrong, where the recipe has it from a file.

    Args:
        recipe: knows the file.
        name: the key or the option that it is about; empty for the one that the message mentions.
        step: the stage, unless it is about the whole recipe.
    """
    try:
        yield
    except RecipeError:
        raise
    except EngineryError as error:
        lines = step.lines if step else recipe.lines
        line = lines.get(name, 0)
        if step:
            # A file's problem is of the option that names it; other options name themselves.
            named = (
                option
                for option in lines
                if option.endswith("column")
                and f"no column '{getattr(step.options, option)}'" in error.message
            )
            file = name if isinstance(error, InputError | SourceError) else ""
            line = lines.get(next(named, file)) or step.line_of(error.message)
        if not line:
            raise
        do = error.do or f"Name another {name or 'value'}; paths start from the recipe's directory."
        raise RecipeError(f"{recipe.name}:{line}: {error.message}", do=do) from error


def _read_model(recipe: Recipe) -> _Model:
    named = recipe.steps[0].options.task
    task = "" if named == "auto" else named
    path = find_local(recipe.model)
    if path is None or path.is_file():
        return _Model(task, is_onnx=path is not None, limits={})
    if not (path / "config.json").is_file():
        raise SourceError(
            f"model '{recipe.model}': {path} has no config.json, so it is not a Hugging Face "
            "model.",
            do="Name the directory that save_pretrained wrote.",
        )
    settings = ModelConfig.read(path, error=SourceError)
    return _Model(task, is_onnx=False, limits=FeedLimits.from_config(settings).ends)


def _check_profiles(step: Step, model: _Model) -> None:
    """Hold profiles to the dims of the task and the positions of the model."""
    known = () if model.is_onnx else _DIMS.get(model.task, ())
    for text in getattr(step.options, "profile", ()):
        profile = Profile.parse(text)
        for name in profile.dims if known else ():
            if name not in known:
                raise ShapeError(
                    f"profile '{text}': the model has no dynamic dim '{name}'"
                    f"{nearest(name, known)}",
                    do=f"Dims of {model.task}: {', '.join(known)}.",
                )
        profile.check_limits(model.limits)
    if isinstance(step.options, BenchStage) and "sequence" in model.limits:
        longest, limit = step.options.sequence, model.limits["sequence"]
        for size in longest.split(",") if longest != "auto" else ():
            if int(size) > limit:
                raise ShapeError(
                    f"option 'sequence' has {size.strip()}, but the model's positions end at "
                    f"{limit}.",
                    do=f"Measure up to {limit}.",
                )


def _check_providers(options: Any) -> None:
    """Say why a provider cannot be had, before anything runs for nothing."""
    if not hasattr(options, "provider_option"):
        return
    wishes = wishes_of(options)
    if [wish.name for wish in wishes] != ["cpu"]:
        from enginery.runtime.providers import choose_providers

        choose_providers(wishes, allow_fallback=options.allow_fallback)


def _check_build(options: Any, model: _Model) -> None:
    from enginery.runtime.tensorrt_capability import resolve_capabilities
    from enginery.runtime.tensorrt_library import require_tensorrt
    from enginery.runtime.tensorrt_options import flavor_named

    if not (options.profile or options.min_shapes or options.profiles_from or model.is_onnx):
        raise ShapeError(
            "build has no profile, and an exported graph has dynamic dims.",
            do="Add one: profile: batch=1:8:32,sequence=8:128:512",
        )
    flavor = flavor_named(options.flavor)
    require_tensorrt("Building an engine", flavor)
    resolve_capabilities(flavor, options.capability)


def _check_quantize(options: Any) -> None:
    from enginery.quantize.config import capabilities_of
    from enginery.quantize.recorded import find_ranges
    from enginery.runtime.tensorrt_library import require_tensorrt

    if options.ranges:
        find_ranges(options.ranges)
    if options.scheme != "dynamic" and capabilities_of(options):
        require_tensorrt("Building a trial engine (without capabilities: [] none is built)")


def _check_predict(options: PredictStage, model: _Model, outputs: set[str]) -> None:
    from enginery.predict.asking import column_names, read_options
    from enginery.predict.columns import AnswerColumns
    from enginery.predict.reading import STDIN, input_format, open_input, require_format

    path = Path(options.input)
    kind = None
    if options.input == STDIN:
        require_format(options)
    elif options.input not in outputs:
        kind = input_format(path, options)
    if path.resolve() == Path(options.output).resolve():
        raise InputError(f"output '{options.output}' is the input, which is never overwritten.",
                         do="Name another output.")  # fmt: skip
    if not model.task:
        return
    task = task_of(model.task, takes_images=model.task in _IMAGES or kind == "images")
    if task is None:
        if model.task in answered_tasks():
            raise InputError(f"input '{path}' is images, but the model does {model.task} of texts.",
                             do="Name a file of texts.")  # fmt: skip
        raise ArtifactError(
            f"predict follows an export for {model.task}; it answers "
            f"{', '.join(answered_tasks())}.",
            do="Leave predict out, or export for another task.",
        )
    of_task = read_options(task, options)
    if kind:
        reader = open_input(path, column_names(task, options), options, raw_lines=False)
        AnswerColumns.of(task, of_task, reader.schema, reader.names, prefix=options.prefix, dim=1)


def _check_address(options: PublishStage) -> None:
    from enginery.publish.destination import open_destination, scheme_of
    from enginery.publish.folder_address import path_of
    from enginery.publish.folder_address import refuse_foreign as refuse_no_registry

    open_destination(options.url, options)
    if scheme_of(options.url) == "file":
        refuse_no_registry(path_of(options.url))


def _check_files(recipe: Recipe, step: Step, model: _Model, outputs: set[str]) -> None:
    """Open the files of texts and images that a stage will read."""
    options = step.options
    for name in ("data", "calibration", "profiles_from"):
        given = getattr(options, name, "")
        if given and given not in outputs:
            labels = options.label_column if name == "calibration" else ""
            with _noted(recipe, name, step=step):
                _check_data(Path(given).expanduser(), options.column, labels, model)
    if images := getattr(options, "images", ""):
        with _noted(recipe, "images", step=step):
            list_images(Path(images).expanduser(), rows=1)
    if reference := getattr(options, "reference", ""):
        with _noted(recipe, "reference", step=step):
            find_local(reference)
    if getattr(options, "timing_cache_fixed", False) and not Path(options.timing_cache).is_file():
        raise OptionError(
            f"option 'timing_cache' names '{options.timing_cache}', which is not there, and "
            "timing_cache_fixed leaves it as it is.",
            do="Build once without timing_cache_fixed.",
        )


def _check_data(path: Path, column: str, label_column: str, model: _Model) -> None:
    looks_like_images = path.is_dir() or path.suffix.lower() in IMAGE_SUFFIXES
    if model.task in _IMAGES or (looks_like_images and model.task not in _TEXTS):
        list_images(path, rows=1)
    else:
        require_texts(path, column, label_column=label_column)

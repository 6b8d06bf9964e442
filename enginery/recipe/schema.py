"""The JSON schema of a recipe: what an editor completes and checks a recipe with.

Takes the stages' options, with the texts below their fields; leaves JSON:

    $ python -m enginery.recipe.schema > docs/recipe.schema.json
    >>> recipe_schema()["definitions"]["export"]["properties"]["opset"]["default"]
    20

A recipe is read as text, and what a value means is said by its option (`core/yaml_lines.py`). An
editor reads YAML 1.2, where `8.9` is a number and `no` is text. So an option takes here whatever
YAML may make of a value that the recipe's reader takes, an environment variable included. What a
schema cannot say is left to the reader: which values go together, and what a number may be.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import sys
import textwrap
from collections.abc import Mapping
from itertools import pairwise
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from enginery.recipe.model import STAGES, Recipe
from enginery.runtime.cuda_provider_options import CudaOptions
from enginery.runtime.provider_names import CPU, CUDA, SHORT_NAMES, TENSORRT, TENSORRT_RTX
from enginery.runtime.rtx_provider_options import TensorrtRtxOptions
from enginery.runtime.tensorrt_provider_options import TensorrtOptions

Schema = dict[str, Any]

DRAFT = "http://json-schema.org/draft-07/schema#"
"""yaml-language-server, which most editors run, reads draft 7 and older ones (its README)."""

_TEXT: Schema = {"type": ["string", "number", "boolean"]}
"""Whatever is written: YAML takes a task called `no`, or the capability 8.9, for something else."""
_VARIABLE: Schema = {"type": "string", "pattern": r"\$\{[A-Za-z_]"}
_QUOTED: dict[type, str] = {
    bool: r"^([Tt]rue|TRUE|[Ff]alse|FALSE|[Yy]es|YES|[Nn]o|NO|[Oo]n|ON|[Oo]ff|OFF)$",
    int: r"^[+-]?[0-9][0-9_]*(\.0+)?$",
    float: r"^[+-]?([0-9][0-9_]*\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$",
}
"""Values that YAML 1.2 has as text, and the option as its own type."""
_JSON_TYPES = {bool: "boolean", int: "integer", float: "number"}

_PROVIDER, _PROVIDERS = "provider", "providers"
"""An option, and another name of it that recipes have."""
_TYPED = {CUDA: CudaOptions, TENSORRT: TensorrtOptions, TENSORRT_RTX: TensorrtRtxOptions}


def recipe_schema() -> Schema:
    """The schema of a recipe, in draft 7 of JSON Schema."""
    texts = field_texts(Recipe)
    return {
        "$schema": DRAFT,
        "title": "enginery recipe",
        "description": "The model, what to make of it, and what to ask it at the end.",
        "type": "object",
        "required": ["model", "stages"],
        "additionalProperties": False,
        "properties": {
            "model": {"description": texts["model"], **_TEXT, "minLength": 1},
            "out": {"description": texts["out"], **_TEXT},
            "stages": {"description": f"In order, {texts['steps']}", **_stages()},
            "ask": {"description": texts["ask"], **_one_or_several(_TEXT)},
        },
        "definitions": {
            **{stage: _options(stage, kind) for stage, kind in STAGES.items()},
            **{name: _provider_options(name) for name in dict.fromkeys(SHORT_NAMES.values())},
            "providers": _providers(),
        },
    }


def field_texts(kind: type[Any]) -> dict[str, str]:
    """What is written below each field of a dataclass, its bases' fields included, in one line.

    Raises:
        OSError: the source is not there to be read.
    """
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if dataclasses.is_dataclass(base):
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            for field, text in pairwise(getattr(definition, "body", ())):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    texts[ast.unparse(field.target)] = " ".join(
                        ast.literal_eval(text.value).split()
                    )
    return texts


def schema_json() -> str:
    """The JSON schema of a recipe, as `docs/recipe.schema.json` holds it."""
    return json.dumps(recipe_schema(), indent=2, ensure_ascii=False) + "\n"


def _stages() -> Schema:
    """A list whose first item is `export`, and no other is."""
    first, *later = STAGES
    return {
        "type": "array",
        "minItems": 1,
        "items": [_steps(first)],
        "additionalItems": _steps(*later),
    }


def _steps(*stages: str) -> Schema:
    """One of these stages: its name, or its name with options."""
    names = [{"const": stage, "description": _summary(STAGES[stage])} for stage in stages]
    with_options = {
        "type": "object",
        "minProperties": 1,
        "maxProperties": 1,
        "additionalProperties": False,
        "properties": {stage: _reference(stage) for stage in stages},
    }
    return {"anyOf": [*names, with_options]}


def _options(stage: str, kind: type[Any]) -> Schema:
    """A stage's options; nothing at all stands for the defaults."""
    texts, hints = field_texts(kind), get_type_hints(kind)
    properties: dict[str, Schema] = {}
    for field in dataclasses.fields(kind):
        said = {"description": texts[field.name], "default": _default(field.default)}
        if field.name == _PROVIDER:
            for name in (_PROVIDER, _PROVIDERS):
                properties[name] = {**said, "allOf": [_reference("providers")]}
        else:
            properties[field.name] = {**said, **_value(f"{stage}.{field.name}", hints[field.name])}
    one: Schema = {}
    if _PROVIDER in properties:  # what is no mapping has all keys that are required of one
        one = {"not": {"type": "object", "required": [_PROVIDER, _PROVIDERS]}}
    return {"description": _summary(kind), **_mapping(properties), **one}


def _value(name: str, hint: Any) -> Schema:
    """What may be written for an option of a type."""
    if hint is str:
        return dict(_TEXT)
    if hint in _JSON_TYPES:
        quoted = {"type": "string", "pattern": _QUOTED[hint]}
        return {"anyOf": [{"type": _JSON_TYPES[hint]}, quoted, _VARIABLE]}
    if hint == tuple[str, ...]:
        return _one_or_several(_TEXT)
    if get_origin(hint) is Literal:
        return {"anyOf": [{"enum": list(get_args(hint))}, _VARIABLE]}
    if get_origin(hint) in (Union, UnionType):
        return {"anyOf": [_value(name, part) for part in get_args(hint)]}
    raise TypeError(f"{name} is of the type {hint}, for which recipes have no schema yet")


def _providers() -> Schema:
    """Providers as text, as a list, or as a mapping with their options."""
    named = {
        "type": "object",
        "minProperties": 1,
        "additionalProperties": False,
        "properties": {
            name: _reference(full)
            for short, full in SHORT_NAMES.items()
            for name in (short, full)
        },
    }  # fmt: skip
    name = {"type": "string", "examples": [*SHORT_NAMES]}
    return {"anyOf": [name, named, {"type": "array", "items": {"anyOf": [name, named]}}]}


def _provider_options(name: str) -> Schema:
    """A provider's options: typed, free, or none for the CPU."""
    kind = _TYPED.get(name)
    if kind is None:
        free = {} if name == CPU else {"additionalProperties": _TEXT}
        return {"description": f"Options of {name}.", **_mapping({}), **free}
    texts, hints = field_texts(kind), get_type_hints(kind)
    properties: dict[str, Schema] = {}
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        # A number may be a size or a calculation, `2 GiB` or `2 * 1024`.
        taken = {"type": ["integer", "string"]} if hint is int else _value(field.name, hint)
        properties[field.name] = {
            "description": texts[field.name], "default": _default(field.default), **taken,
        }  # fmt: skip
    return {"description": _summary(kind), **_mapping(properties)}


def _mapping(properties: Mapping[str, Schema]) -> Schema:
    """These keys and no other; or nothing, as YAML has it behind a key alone."""
    return {
        "type": ["object", "null"],
        "additionalProperties": False,
        "properties": dict(properties),
    }


def _one_or_several(item: Schema) -> Schema:
    return {"anyOf": [item, {"type": "array", "items": item}]}


def _reference(name: str) -> Schema:
    return {"$ref": f"#/definitions/{name}"}


def _summary(kind: type[Any]) -> str:
    """The first paragraph of a docstring, in one line."""
    return " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())


def _default(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


if __name__ == "__main__":
    sys.stdout.write(schema_json())

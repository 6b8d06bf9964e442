"""The JSON schema of a recipe: what an editor completes and checks a recipe with.

Takes the model of a recipe; leaves JSON:

    $ python -m enginery.recipe.schema > docs/recipe.schema.json
    >>> recipe_schema()["definitions"]["ExportConfig"]["properties"]["opset"]["default"]
    20

A recipe is read as text, and what a value means is said by its option (`loading.py`). An editor
reads YAML 1.2, where `8.9` is a number and `no` is text. So an option takes here whatever YAML may
make of a value that the recipe's reader takes, an environment variable included. What a schema
cannot say is left to the reader: which values go together, and what a number may be.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from pydantic import ConfigDict, TypeAdapter, create_model
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from enginery.recipe.model import RecipeFile
from enginery.recipe.stages import STAGES
from enginery.runtime.cuda_provider_options import CudaOptions
from enginery.runtime.provider_names import CPU, CUDA, SHORT_NAMES, TENSORRT, TENSORRT_RTX
from enginery.runtime.rtx_provider_options import TensorrtRtxOptions
from enginery.runtime.tensorrt_provider_options import TensorrtOptions

Schema = dict[str, Any]

DRAFT = "http://json-schema.org/draft-07/schema#"
"""yaml-language-server, which most editors run, reads draft 7 and older ones (its README)."""
_REFERENCE = "#/definitions/{model}"

_TEXT: Schema = {"type": ["string", "number", "boolean"]}
"""Whatever is written: YAML takes a task called `no`, or the capability 8.9, for something else."""
_VARIABLE: Schema = {"type": "string", "pattern": r"\$\{[A-Za-z_]"}
_TYPED = {CUDA: CudaOptions, TENSORRT: TensorrtOptions, TENSORRT_RTX: TensorrtRtxOptions}


def _or_quoted(kind: str, pattern: str) -> Schema:
    """Describe a value that YAML 1.2 may have as text, and the option as its own type."""
    return {"anyOf": [{"type": kind}, {"type": "string", "pattern": pattern}, _VARIABLE]}


class _RecipeJsonSchema(GenerateJsonSchema):
    """What recipes allow beyond the types: numbers in quotes, variables, one text for a list."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002  pydantic's signature
        return False

    def str_schema(self, schema: core_schema.StringSchema) -> Schema:
        return {**super().str_schema(schema), **_TEXT}

    def bool_schema(self, schema: core_schema.BoolSchema) -> Schema:  # noqa: ARG002
        words = "[Tt]rue|TRUE|[Ff]alse|FALSE|[Yy]es|YES|[Nn]o|NO|[Oo]n|ON|[Oo]ff|OFF"
        return _or_quoted("boolean", f"^({words})$")

    def int_schema(self, schema: core_schema.IntSchema) -> Schema:  # noqa: ARG002
        return _or_quoted("integer", r"^[+-]?[0-9][0-9_]*(\.0+)?$")

    def float_schema(self, schema: core_schema.FloatSchema) -> Schema:  # noqa: ARG002
        return _or_quoted("number", r"^[+-]?([0-9][0-9_]*\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$")

    def literal_schema(self, schema: core_schema.LiteralSchema) -> Schema:
        return {"anyOf": [{"enum": list(schema["expected"])}, _VARIABLE]}

    def tuple_schema(self, schema: core_schema.TupleSchema) -> Schema:
        item = self.generate_inner(schema["items_schema"][0])
        return {"anyOf": [item, {"type": "array", "items": item}]}

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> Schema:
        found = super().dataclass_schema(schema)
        found.pop("title")
        required = found.pop("required", [])
        # Nothing at all, as YAML has it behind a key alone, stands for the defaults.
        found["type"] = "object" if required else ["object", "null"]
        return found | ({"required": required} if required else {})


class _ProviderJsonSchema(_RecipeJsonSchema):
    """The options of an execution provider, where a number may be a size or a calculation."""

    def int_schema(self, schema: core_schema.IntSchema) -> Schema:  # noqa: ARG002  as above
        return {"type": ["integer", "string"]}


def recipe_schema() -> Schema:
    """Return the schema of a recipe, in draft 7 of JSON Schema."""
    found = _schema_of(RecipeFile, _RecipeJsonSchema)
    definitions = found.pop("$defs")
    stages = definitions.pop("_Stage")["properties"]
    for kind in STAGES.values():
        _complete(definitions, kind)
    first, *later = STAGES
    written = found["properties"]
    written["stages"] = {
        "description": written["stages"]["description"],
        "type": "array",
        "minItems": 1,
        "items": [_steps(stages, definitions, first)],
        "additionalItems": _steps(stages, definitions, *later),
    }
    written["ask"].pop("default")
    return {
        "$schema": DRAFT,
        **found,
        "title": "enginery recipe",
        "definitions": {
            **definitions,
            **{name: _provider_options(name) for name in dict.fromkeys(SHORT_NAMES.values())},
            "providers": _providers(),
        },
    }


def schema_json() -> str:
    """Return the JSON schema of a recipe, as `docs/recipe.schema.json` holds it."""
    return json.dumps(recipe_schema(), indent=2, ensure_ascii=False) + "\n"


def _schema_of(kind: type, generator: type[GenerateJsonSchema]) -> Schema:
    found: Schema = TypeAdapter(kind).json_schema(
        ref_template=_REFERENCE, schema_generator=generator
    )
    return dict(_in_one_line(found))


def _in_one_line(value: Any) -> Any:
    """Put every description into one line, of a docstring its first paragraph."""
    if isinstance(value, list):
        return [_in_one_line(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: " ".join(item.partition("\n\n")[0].split())
        if key == "description" and isinstance(item, str)
        else _in_one_line(item)
        for key, item in value.items()
    }


def _complete(definitions: dict[str, Schema], kind: type) -> None:
    """Add what pydantic does not read of a stage: what a base's fields mean, and `providers`."""
    definition = definitions[kind.__name__]
    properties = definition["properties"]
    for base in kind.__mro__[1:]:
        if dataclasses.is_dataclass(base):
            for name, option in _options(base, _RecipeJsonSchema)["properties"].items():
                properties[name] = {**option, **properties[name]}
    if "provider_option" in properties:
        said = {key: properties["provider"][key] for key in ("description", "default")}
        properties["provider"] = {**said, "allOf": [_reference("providers")]}
        properties["providers"] = properties["provider"]
        # What is no mapping has all keys that are required of one.
        definition["not"] = {"type": "object", "required": ["provider", "providers"]}


def _options(kind: type, generator: type[GenerateJsonSchema]) -> Schema:
    """Describe a dataclass of options alone; its texts are read where a model holds it."""
    config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    holder = create_model("Holder", __config__=config, options=(kind, ...))
    return dict(_schema_of(holder, generator)["$defs"][kind.__name__])


def _steps(stages: Schema, definitions: Schema, *names: str) -> Schema:
    """Describe one of these stages: its name, or its name with options."""
    alone = []
    for name in names:
        definition = definitions[stages[name]["$ref"].rpartition("/")[2]]
        if "required" not in definition:
            alone.append({"const": name, "description": definition["description"]})
    with_options = {
        "type": "object",
        "minProperties": 1,
        "maxProperties": 1,
        "additionalProperties": False,
        "properties": {name: {"$ref": stages[name]["$ref"]} for name in names},
    }
    return {"anyOf": [*alone, with_options]}


def _providers() -> Schema:
    """Describe providers as text, as a list, or as a mapping with their options."""
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
    """Describe a provider's options: typed, free, or none for the CPU."""
    if kind := _TYPED.get(name):
        return _options(kind, _ProviderJsonSchema)
    free = False if name == CPU else _TEXT
    return {
        "description": f"Options of {name}.",
        "type": ["object", "null"],
        "additionalProperties": free,
    }


def _reference(name: str) -> Schema:
    return {"$ref": _REFERENCE.format(model=name)}


if __name__ == "__main__":
    sys.stdout.write(schema_json())

"""The JSON schema of a recipe, with which editors complete and check recipes.

    $ python -m enginery.recipe.schema > docs/recipe.schema.json

>>> recipe_schema()["$defs"]["QuantizeConfig"]["properties"]["rows"]["default"]
512

Recipes are read as text, and the type of the option decides (`loading.py`). Editors read YAML 1.2,
where `8.9` is a number and `no` is text. So the schema allows every type that YAML may make of a
valid value, environment variables included. Ranges of numbers and combinations of options are not
in the schema.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pydantic import create_model
from pydantic.json_schema import CoreRef, GenerateJsonSchema
from pydantic_core import core_schema

from enginery.recipe.model import RecipeFile
from enginery.recipe.steps import ARTIFACT_STAGES, STAGES
from enginery.runtime.providers.known import SHORT_NAMES
from enginery.runtime.providers.options import CHECKED_OPTIONS, OptionKind

Schema = dict[str, Any]

DRAFT = "http://json-schema.org/draft-07/schema#"
"""The newest draft that yaml-language-server, which most editors run, supports (its README). This
draft ignores keywords next to `$ref`, so only descriptions and defaults may be there."""

_BASES = dict.fromkeys(base for options in STAGES.values() for base in options.__mro__[1:-1])
"""The base classes of the options. pydantic reads docstrings of a class, not of its bases."""

_VARIABLE: Schema = {"type": "string", "pattern": r"\$\{[A-Za-z_]"}
_BOOLEANS = r"^([Tt]rue|TRUE|[Ff]alse|FALSE|[Yy]es|YES|[Nn]o|NO|[Oo]n|ON|[Oo]ff|OFF)$"
_NUMBERS = r"^[+-]?([0-9][0-9_]*\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"


class _RecipeJsonSchema(GenerateJsonSchema):
    """Allow what recipes take beyond the types: quoted numbers, variables, one text for a list."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002  pydantic's signature
        return False

    def str_schema(self, schema: core_schema.StringSchema) -> Schema:
        # YAML reads the task `no` as a boolean and the capability 8.9 as a number.
        text = self._defined("text", {"type": ["string", "number", "boolean"]})
        limits = {"minLength": schema["min_length"]} if "min_length" in schema else {}
        return {"allOf": [text], **limits} if limits else text

    def bool_schema(self, schema: core_schema.BoolSchema) -> Schema:  # noqa: ARG002
        return self._or_quoted("boolean", _BOOLEANS)

    def int_schema(self, schema: core_schema.IntSchema) -> Schema:  # noqa: ARG002
        return self._or_quoted("integer", r"^[+-]?[0-9][0-9_]*(\.0+)?$")

    def float_schema(self, schema: core_schema.FloatSchema) -> Schema:  # noqa: ARG002
        return self._or_quoted("number", _NUMBERS)

    def literal_schema(self, schema: core_schema.LiteralSchema) -> Schema:
        variable = self._defined("variable", _VARIABLE)
        return {"anyOf": [{"enum": list(schema["expected"])}, variable]}

    def tuple_schema(self, schema: core_schema.TupleSchema) -> Schema:
        item_schema = schema["items_schema"][0]
        item = self.generate_inner(item_schema)
        several = {"anyOf": [item, {"type": "array", "items": item}]}
        return self._defined(f"{item_schema['type']}_list", several)

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> Schema:
        json_schema = super().dataclass_schema(schema)
        del json_schema["title"]
        if not json_schema.get("required"):
            # A key without a value is null in YAML, and stands for the defaults.
            json_schema["type"] = ["object", "null"]
        return json_schema

    def _or_quoted(self, json_type: str, pattern: str) -> Schema:
        """Allow a type, and its values as quoted text."""
        quoted = {"type": "string", "pattern": pattern}
        return self._defined(json_type, {"anyOf": [{"type": json_type}, quoted, _VARIABLE]})

    def _defined(self, name: str, schema: Schema) -> Schema:
        """Add a schema to the definitions and return a reference to it."""
        definition, reference = self.get_cache_defs_ref_schema(CoreRef(name))
        self.definitions[definition] = schema
        return reference


def recipe_schema() -> Schema:
    """Return the schema of a recipe, in draft 7 of JSON Schema."""
    classes = (RecipeFile, *STAGES.values(), *_BASES)
    fields: dict[str, Any] = {
        option_class.__name__: (option_class, ...) for option_class in classes
    }
    every = create_model("Every", __config__=RecipeFile.model_config, **fields)
    document = every.model_json_schema(schema_generator=_RecipeJsonSchema)
    definitions = json.loads(json.dumps(document["$defs"]), object_hook=_in_one_line)
    for option_class in STAGES.values():
        properties = definitions[option_class.__name__]["properties"]
        for base in option_class.__mro__[1:-1]:
            for name, option in definitions[base.__name__]["properties"].items():
                properties[name] = {**option, **properties[name]}
        if "provider_option" in properties:
            properties["providers"]["$ref"] = "#/$defs/providers"
    first_stage, *later_stages = STAGES
    for name in STAGES:
        definitions[STAGES[name].__name__]["properties"] |= _step_keys(name, first_stage)
    recipe = definitions.pop("RecipeFile")
    recipe["properties"]["stages"] = {
        "description": recipe["properties"]["stages"]["description"],
        "type": "array",
        "minItems": 1,
        "items": [_steps(definitions, first_stage)],
        "additionalItems": _steps(definitions, *later_stages),
    }
    recipe["title"] = "enginery recipe"
    for base in _BASES:
        definitions.pop(base.__name__, None)
    return {"$schema": DRAFT, **recipe, "$defs": definitions | _providers()}


def schema_json() -> str:
    """Return the JSON schema of a recipe, as `docs/recipe.schema.json` holds it."""
    return json.dumps(recipe_schema(), indent=2, ensure_ascii=False) + "\n"


def _in_one_line(schema: Schema) -> Schema:
    """Reduce a description to its first paragraph, in one line."""
    if isinstance(text := schema.get("description"), str):
        schema["description"] = " ".join(text.partition("\n\n")[0].split())
    return schema


def _step_keys(stage: str, first_stage: str) -> Schema:
    """Describe the keys of a stage that are not options: the artifact it takes, and a copy."""
    stage_name = {"anyOf": [{"enum": list(ARTIFACT_STAGES)}, {"$ref": "#/$defs/variable"}]}
    source = {"description": "The stage whose artifact this one takes; the one before by default."}
    copy = {"description": "Where a copy of the artifact goes.", "$ref": "#/$defs/text"}
    keys: Schema = {} if stage == first_stage else {"from": {**source, **stage_name}}
    return {**keys, "out": copy} if stage in ARTIFACT_STAGES else keys


def _steps(definitions: Schema, *names: str) -> Schema:
    """Describe one of these stages: its name, or its name with options."""
    alone = []
    for name in names:
        definition = definitions[STAGES[name].__name__]
        if "required" not in definition:
            alone.append({"const": name, "description": definition["description"]})
    with_options = {
        "type": "object",
        "minProperties": 1,
        "maxProperties": 1,
        "additionalProperties": False,
        "properties": {name: {"$ref": f"#/$defs/{STAGES[name].__name__}"} for name in names},
    }
    return {"anyOf": [*alone, with_options]}


def _providers() -> Schema:
    """Describe providers as text, as a list, or as a mapping with their options."""
    by_name: Schema = {}
    checked: Schema = {}
    for short, full in SHORT_NAMES.items():
        options: Schema = {
            "type": ["object", "null"],
            "additionalProperties": {"$ref": "#/$defs/text"},
        }
        if kinds := CHECKED_OPTIONS.get(full):
            checked[full] = options | {
                "additionalProperties": False,
                "properties": {name: _provider_option(kind) for name, kind in kinds.items()},
            }
            options = {"$ref": f"#/$defs/{full}"}
        by_name[short] = by_name[full] = options
    mapping = {
        "type": "object",
        "minProperties": 1,
        "additionalProperties": False,
        "properties": by_name,
    }
    item = {"anyOf": [{"type": "string", "examples": [*SHORT_NAMES]}, {"$ref": "#/$defs/provider"}]}
    return {
        **checked,
        "provider": mapping,
        "providers": {"anyOf": [*item["anyOf"], {"type": "array", "items": item}]},
    }


def _provider_option(kind: OptionKind) -> Schema:
    """Describe the values of an option of a provider."""
    if isinstance(kind, tuple):
        return {"anyOf": [{"enum": list(kind)}, {"$ref": "#/$defs/variable"}]}
    if kind is bool:
        return {"$ref": "#/$defs/boolean"}
    if kind is str:
        return {"$ref": "#/$defs/text"}
    return {"type": ["integer", "string"]}  # a number may be a size: 2 GiB


if __name__ == "__main__":
    sys.stdout.write(schema_json())

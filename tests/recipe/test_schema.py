"""`docs/recipe.schema.json`: it is the code's own, and takes what the recipe's reader takes."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema_rs
import pytest
from ruamel.yaml import YAML

from enginery.core.errors import RecipeError
from enginery.recipe import STAGES, Recipe
from enginery.recipe.model import RecipeFile
from enginery.recipe.schema import recipe_schema
from enginery.runtime.providers.known import SHORT_NAMES
from enginery.runtime.providers.options import CHECKED_OPTIONS

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT / "docs" / "recipe.schema.json"
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
PAGES = sorted((ROOT / "docs").glob("*.md"))


@pytest.fixture(scope="module")
def validator():
    return jsonschema_rs.Draft7Validator(recipe_schema())


def as_editors_read(text):
    """YAML 1.2's core schema; chapter 10.3.2 of its specification."""
    return YAML(typ="safe", pure=True).load(text)


def errors(validator, text):
    return [error.message for error in validator.iter_errors(as_editors_read(text))]


def with_options(stage, options):
    first = "" if stage == "export" else "  - export\n"
    return f"model: m\nstages:\n{first}  - {stage}: {options}\n"


# What is generated


def test_the_schema_in_the_documentation_is_the_codes_own():
    """Made by: make schema"""
    text = SCHEMA.read_text(encoding="utf-8")
    words = [sys.executable, "-m", "enginery.recipe.schema"]
    made = subprocess.run(words, capture_output=True, text=True, check=True)
    assert made.stdout == text
    assert json.loads(text) == recipe_schema()


def test_the_schema_is_one():
    assert jsonschema_rs.meta.is_valid(recipe_schema())
    assert jsonschema_rs.meta.is_valid({**recipe_schema(), "type": 3}) is False


def test_every_option_is_there_with_its_meaning_and_default():
    definitions = recipe_schema()["$defs"]
    for kind in STAGES.values():
        definition = definitions[kind.__name__]
        known = definition["properties"]
        fields = dataclasses.fields(kind)
        assert set(known) - {"from", "out"} == {field.name for field in fields} - {"out"}
        assert ("from" in known) == (kind is not STAGES["export"])
        assert ("providers" in known) == ("provider_option" in known)
        for field in fields:
            is_needed = field.default is field.default_factory is dataclasses.MISSING
            assert is_needed == (field.name in definition.get("required", ()))
            if field.default is not dataclasses.MISSING:
                is_list = isinstance(field.default, tuple)
                default = list(field.default) if is_list else field.default
                assert known[field.name]["default"] == default
            assert len(known[field.name]["description"]) > 10, field.name
    assert set(recipe_schema()["properties"]) == set(RecipeFile.model_fields)
    for provider in ("cuda", "tensorrt", "tensorrt-rtx"):
        named = definitions["provider"]["properties"]
        assert named[provider] == named[SHORT_NAMES[provider]]
        options = definitions[named[provider]["$ref"].removeprefix("#/$defs/")]["properties"]
        assert list(options) == list(CHECKED_OPTIONS[SHORT_NAMES[provider]])


def test_the_meaning_is_what_is_written_below_the_field():
    build = recipe_schema()["$defs"]["BuildConfig"]["properties"]
    assert build["count"]["description"] == "Maximum number of profiles from `data`."
    assert build["tf32"]["description"], "of the class that it inherits from"
    assert not any("\n" in option["description"] for option in build.values())


# Recipes


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_recipe_of_the_repository_is_valid_and_names_its_schema(path, validator):
    text = path.read_text(encoding="utf-8")
    assert errors(validator, text) == []
    first = text.splitlines()[0]
    named = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", first)
    assert named, first
    assert (path.parent / named[1]).resolve() == SCHEMA


def documented():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for number, block in enumerate(re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)):
            if re.search(r"^stages:", block, re.MULTILINE):
                yield pytest.param(block, id=f"{page.name} {number}")


@pytest.mark.parametrize("block", list(documented()))
def test_recipes_of_the_documentation_are_valid(block, validator):
    whole = block if "model:" in block else f"model: m\n{block}"
    assert errors(validator, whole) == []


SAME = [
    # both take it
    ("export", "{opset: 20}", True),
    ("export", "{opset: 020}", True),
    ("export", "{opset: '17'}", True),
    ("export", "{opset: 17.0}", True),
    ("export", "{opset: 1_8}", True),
    ("export", "{opset: '${OPSET}'}", True),
    ("export", "{revision: no}", True),
    ("export", "{task: fill-mask, revision: 2024}", True),
    ("export", "{allow_pickle: no, trust_remote_code: off}", True),
    ("export", "{dtype: fp16}", True),
    ("export", "{dtype: '${DTYPE:-fp16}'}", True),
    ("export", "", True),
    ("export", "{out: build/name}", True),
    ("quantize", "{from: export, out: '${OUT:-a}', scheme: dynamic}", True),
    ("lint", "{from: export}", True),
    ("validate", "", True),
    ("lint", "", True),
    ("bench", "{batch: 8, sequence: '16,128', providers: [cpu], precision: 1e-2}", True),
    ("predict", "{input: a.csv, out: b.csv, top_k: 2}", True),
    ("predict", "{input: 2024, out: '${OUTPUT:-b}.csv'}", True),
    ("publish", "{url: build/registry, allow_failed: yes}", True),
    ("export-triton", "{out: build/triton, max_batch_size: 8}", True),
    ("export-kserve", "{out: out, storage_uri: 's3://a/b', provider: cpu, image: i}", True),
    ("build", "", True),
    ("quantize", "{allow_random: true}", True),
    ("validate", "{profile: batch=1}", True),
    ("validate", "{profile: [batch=1, batch=8]}", True),
    ("validate", "{max_abs_error: noise-floor}", True),
    ("validate", "{max_abs_error: 1e-3, min_cosine: .5}", True),
    ("validate", "{max_abs_error: '1e-3'}", True),
    ("validate", "{providers: 'cuda,cpu'}", True),
    ("validate", "{providers: [{cuda: {device_id: 0, gpu_mem_limit: 2 GiB}}, cpu]}", True),
    ("validate", "{providers: {CUDAExecutionProvider: {use_tf32: off}, cpu: }}", True),
    ("validate", "{providers: [{openvino: {device_type: CPU, num_streams: 2}}]}", True),
    ("quantize", "{capability: 8.9, allow_random: yes}", True),
    (
        "quantize",
        "{capability: [8.9, 12.0], smoothing: 0.5, exclude: '*/layer.0/*'}",
        True,
    ),
    ("quantize", "{smoothing: search, accuracy_budget: 0.5%, data: a.csv}", True),
    ("build", "{capability: 8.9, workspace_bytes: 1000}", True),
    ("build", "{flavor: tensorrt, optimization_level: 5, engine_per_profile: on}", True),
    # neither
    ("validate", "{from: exprot}", False),
    ("validate", "{from: [export]}", False),
    ("validate", "{out: a}", False),
    ("optimize", "{out: [a]}", False),
    ("export", "{from: export}", False),
    ("export", "{opsets: 20}", False),
    ("export", "{opset: new}", False),
    ("export", "{opset: yes}", False),
    ("export", "{opset: [17]}", False),
    ("export", "{opset: 17.5}", False),
    ("export", "{opset: }", False),
    ("export", "{task: null}", False),
    ("export", "{task: [a]}", False),
    ("export", "{dtype: fp8}", False),
    ("export", "{allow_pickle: maybe}", False),
    ("export", "{allow_pickle: 2}", False),
    ("export", "20", False),
    ("export", "[opset]", False),
    ("export", "{providers: [cpu]}", False),
    ("validate", "{profile: [[batch=1]]}", False),
    ("validate", "{profile: {batch: 1}}", False),
    ("validate", "{max_abs_error: small}", False),
    ("validate", "{providers: [{cuda: {devise_id: 0}}]}", False),
    ("validate", "{providers: [{cudaa: {device_id: 0}}]}", False),
    ("validate", "{providers: [{cuda: {cudnn_conv_algo_search: FAST}}]}", False),
    ("validate", "{providers: [{cpu: {device_id: 0}}]}", False),
    ("validate", "{providers: [cpu], provider: cpu}", False),
    ("validate", "{provders: [cpu]}", False),
    ("build", "{capability: 8.9, allow_random: yes}", False),
    ("build", "{optimization_level: some}", False),
    ("vaildate", "{rows: 8}", False),
    ("predict", "", False),
    ("predict", "{input: a.csv}", False),
    ("publish", "{}", False),
    ("export-triton", "{out: d, max_batch_size: many}", False),
    ("export-kserve", "{out: d}", False),
    ("lint", "{target: cpu}", False),
]


@pytest.mark.parametrize(("stage", "options", "valid"), SAME, ids=str)
def test_the_schema_says_of_options_what_the_reader_says(
    stage, options, valid, validator, monkeypatch
):
    monkeypatch.setenv("OPSET", "17")
    monkeypatch.delenv("DTYPE", raising=False)
    text = with_options(stage, options)
    try:
        Recipe.parse(text)
        read = True
    except RecipeError:
        read = False
    assert read is valid
    assert (errors(validator, text) == []) is valid


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("model: m\nstages: [export]", True),
        ("model: m\nstages: [export: , validate]\nask: Hello.\nout: 2024", True),
        ("model: m\nstages: [export, validate]\nask: [Hello., 3]", True),
        ("model: 'm'\nstages: [export]\nasks: Hello.", False),
        ("stages: [export]", False),
        ("model: m", False),
        ("model: ''\nstages: [export]", False),
        ("model:\nstages: [export]", False),
        ("model: [m]\nstages: [export]", False),
        ("model: m\nstages: []", False),
        ("model: m\nstages: export", False),
        ("model: m\nstages: {export: }", False),
        ("model: m\nstages: [validate]", False),
        ("model: m\nstages: [export, export]", False),
        ("model: m\nstages: [export, export: {opset: 19}]", False),
        ("model: m\nstages: [export, [validate]]", False),
        ("model: m\nstages: [export, {}]", False),
        ("model: m\nstages: [{export: , opset: 20}]", False),
        ("model: m\nstages: [export, {validate: , build: }]", False),
        ("model: m\nstages: [export]\nask: [{What: a}]", False),
        ("model: m\nstages: [export]\nask:", False),
        ("- export", False),
    ],
)
def test_the_schema_says_of_recipes_what_the_reader_says(text, valid, validator):
    try:
        Recipe.parse(text)
        read = True
    except RecipeError:
        read = False
    assert read is valid
    assert (errors(validator, text) == []) is valid

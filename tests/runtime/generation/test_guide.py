"""Texts that are JSON of a schema, with any model and search."""

from __future__ import annotations

import json

import jsonschema_rs
import pytest

from enginery.core.errors import InputError
from enginery.runtime.generation import guide
from enginery.runtime.generation.options import GenerationOptions
from enginery.runtime.model import load_model
from tests.tiny import tiny_artifact

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"enum": ["small", "large"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "size", "count"],
    "additionalProperties": False,
}
PROMPTS = ["The engine is", "Who built", "A cat"]


@pytest.fixture(scope="module")
def writer(tmp_path_factory):
    root = tmp_path_factory.mktemp("guided")
    with load_model(tiny_artifact("gpt2", "text-generation-with-past", root / "writer")) as model:
        yield model


@pytest.fixture
def guided(writer, monkeypatch):
    pytest.importorskip("llguidance", reason="pip install 'enginery[guided]'")
    # A model of random weights would fill its positions with as much space as it may write.
    monkeypatch.setattr(guide, "_WHITESPACE", " ?")
    return writer


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True, "seed": 5, "temperature": 2.0, "num_return_sequences": 3},
        {"num_beams": 3, "num_return_sequences": 2},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "top_logprobs": 2},
    ],
    ids=["greedy", "draws", "beams", "others"],
)
def test_texts_are_of_the_schema(guided, options):
    """A model of random weights writes it, too."""
    found = guided.generate(PROMPTS, max_new_tokens=100, json_schema=SCHEMA, **options)
    valid = jsonschema_rs.validator_for(SCHEMA)
    for one in found:
        assert one.finish == "stop", one.text
        assert valid.is_valid(json.loads(one.text)), one.text


def test_texts_of_a_batch_are_those_of_each_alone(guided):
    options = {"max_new_tokens": 100, "json_schema": SCHEMA}
    together = guided.generate(PROMPTS, **options)
    alone = [guided.generate([prompt], **options)[0] for prompt in PROMPTS]
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    assert "".join(guided.stream(PROMPTS[0], **options)) == alone[0].text


def test_text_at_the_largest_length_is_a_beginning(guided):
    (found,) = guided.generate(PROMPTS[:1], max_new_tokens=4, json_schema=SCHEMA)
    assert (found.finish, found.text.lstrip()[:1]) == ("length", "{")


def test_text_ends_where_nothing_can_follow(guided):
    """The least number of tokens excludes the token that would end it."""
    options = {"json_schema": {"enum": ["small"]}, "min_new_tokens": 60, "max_new_tokens": 80}
    (result,) = guided.generate(PROMPTS[:1], **options)
    assert (result.finish, json.loads(result.text)) == ("stop", "small")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "strin"}, "json_schema: Invalid type: strin"),
        ({"not": {"type": "string"}}, "Unimplemented keys"),
        ({"$ref": "http://example.com/other.json"}, "json_schema: "),
        ({"type": "string", "pattern": "("}, "json_schema: "),
    ],
)
def test_schemas_that_cannot_be_kept_to_are_errors(guided, schema, message):
    with pytest.raises(InputError, match=message):
        guided.generate(PROMPTS[:1], json_schema=schema)


def test_options_that_exclude_every_token_are_an_error(guided):
    with pytest.raises(InputError, match="the other options exclude every token"):
        guided.generate(
            PROMPTS[:1], json_schema=SCHEMA, suppress_tokens=list(range(600)), max_new_tokens=9
        )


def test_large_schemas_are_refused_before_they_are_compiled():
    with pytest.raises(InputError, match="expected at most 65536 characters"):
        GenerationOptions().with_arguments(json_schema={"enum": ["x" * 70_000]})
    with pytest.raises(InputError, match="json_schema: found 'x'"):
        GenerationOptions().with_arguments(json_schema="x")


def test_missing_package_is_named_with_its_extra(writer, monkeypatch):
    monkeypatch.setattr(guide, "_PACKAGE", "a_package_that_is_missing")
    writer.definition.__dict__.pop("_grammars", None)  # what another test has opened
    with pytest.raises(InputError, match="not installed") as caught:
        writer.generate(PROMPTS[:1], json_schema=SCHEMA)
    assert caught.value.do == "Install it with: pip install 'enginery[guided]'"

"""JSON objects from files, and JSON that any reader takes."""

import json
import math
import os

import pytest

from enginery.core import json_file
from enginery.core.errors import SourceError
from enginery.core.json_file import MAX_DEPTH, json_bytes, parse_json, read_json


def test_object_is_read_and_an_absent_file_is_empty(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert read_json(tmp_path / "config.json") == {"model_type": "bert"}
    assert read_json(tmp_path / "none.json") == {}


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff"])
def test_value_that_is_not_an_object_is_an_error_with_the_file(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(SourceError, match=r"config\.json"):
        read_json(tmp_path / "config.json")


def test_numbers_that_json_lacks_are_null_at_any_depth():
    document = {"a": math.nan, "b": [1.5, (math.inf, {"c": -math.inf})], "d": "Ä\u2028"}
    written = json_bytes(document)
    assert json.loads(written) == {"a": None, "b": [1.5, [None, {"c": None}]], "d": "Ä\u2028"}
    assert b"NaN" not in written
    assert b"Infinity" not in written
    assert written.endswith(b"}\n")
    assert "Ä".encode() in written


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_named_pipe_is_an_error_and_does_not_block(tmp_path, kind):
    path = tmp_path / "config.json"
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    with pytest.raises(SourceError, match=r"config\.json cannot be read: it is a named pipe, a so"):
        read_json(path)


def test_a_pipe_that_takes_a_files_place_is_not_waited_for(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "config.json")
    monkeypatch.setattr(json_file, "require_regular_file", lambda path: None)
    with pytest.raises(SourceError, match="is not valid JSON"):
        read_json(tmp_path / "config.json")


def test_a_document_of_gigabytes_is_not_read_whole(tmp_path):
    with (tmp_path / "config.json").open("wb") as stream:
        stream.truncate(2**36)
    with pytest.raises(SourceError, match=r"config\.json cannot be read: it has more than 64 MiB"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 500, 200_000])
def test_too_deep_nesting_is_an_error_with_the_file(tmp_path, depth):
    """Python itself reads 900 levels, and whoever walks through them runs out of its stack."""
    (tmp_path / "config.json").write_text('{"a": ' + "[" * depth + "]" * depth + "}")
    with pytest.raises(SourceError, match=r"config\.json is not valid JSON: .* nested too deeply"):
        read_json(tmp_path / "config.json")


def test_deepest_allowed_nesting_is_read(tmp_path):
    assert parse_json("[" * MAX_DEPTH + "]" * MAX_DEPTH)

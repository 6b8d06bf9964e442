"""Kinds and types of vectors in files."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from enginery.core.errors import OptionError
from enginery.runtime.model import load_model
from tests.tolerances import LARGER, OUTPUTS

TEXTS = ["The engine is warm.", "Nobody knows."]
STORED = {
    "float16": "fixed_size_list<element: halffloat>[32]",
    "int8": "fixed_size_list<element: int8>[32]",
    "binary": "fixed_size_list<element: int8>[4]",
    "ubinary": "fixed_size_list<element: uint8>[4]",
}


@pytest.fixture
def source(tmp_path):
    """A table with an empty text between two others."""
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in (TEXTS[0], "", TEXTS[1])))
    return path


@pytest.mark.parametrize("dtype", STORED)
def test_columns_have_the_type_of_the_vectors(tiny, predict, rows, source, tmp_path, dtype):
    artifact = tiny("bert", "feature-extraction")
    predict(artifact, source, "out.parquet", dtype=dtype)
    predict(artifact, source, "out.jsonl", dtype=dtype)
    field = pq.read_schema(tmp_path / "out.parquet").field("embedding")
    assert str(field.type) == STORED[dtype]
    assert (field.metadata or {}).get(b"enginery.scale") == (b"127" if dtype == "int8" else None)
    with load_model(artifact) as model:
        expected = model.embed(TEXTS, dtype=dtype).astype(np.float32)
    # Another batch may round to the next number.
    step = {"float16": 2e-3, "int8": 1}.get(dtype, 0)
    for name in ("out.parquet", "out.jsonl"):
        first, bad, last = (row["embedding"] for row in rows(name))
        assert bad is None
        np.testing.assert_allclose([first, last], expected, atol=step)


def test_vectors_of_tokens(tiny, predict, rows, source, tmp_path):
    artifact = tiny("bert", "feature-extraction")
    predict(artifact, source, "out.parquet", vectors="tokens")
    predict(artifact, source, "out.jsonl", vectors="tokens")
    kind = pq.read_schema(tmp_path / "out.parquet").field("embedding").type
    assert str(kind) == "list<element: fixed_size_list<element: float>[32]>"
    with load_model(artifact) as model:
        expected = model.embed_tokens(TEXTS)
    for name in ("out.parquet", "out.jsonl"):
        first, bad, last = (row["embedding"] for row in rows(name))
        assert bad is None
        for found, vectors in zip((first, last), expected, strict=True):
            np.testing.assert_allclose(found, vectors, atol=OUTPUTS, rtol=LARGER)


def test_sparse_vectors(tiny, predict, rows, source):
    artifact = tiny("bert", "fill-mask")
    predict(artifact, source, "out.parquet", vectors="sparse")
    predict(artifact, source, "out.jsonl", vectors="sparse")
    with load_model(artifact) as model:
        expected = model.embed_sparse(TEXTS)
    for name in ("out.parquet", "out.jsonl"):
        first, bad, last = rows(name)
        assert (bad["indices"], bad["values"], bad["error"]) == (None, None, "text is empty")
        for found, vector in zip((first, last), expected, strict=True):
            assert found["indices"] == vector.indices.tolist()
            np.testing.assert_allclose(found["values"], vector.values, atol=OUTPUTS, rtol=LARGER)


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("text-classification", {"vectors": "tokens"}, "but the model classifies texts"),
        ("feature-extraction", {"vectors": "sparse"}, "but the model embeds texts"),
        ("text-classification", {"dtype": "int8"}, "option 'dtype' is given"),
        (
            "feature-extraction",
            {"vectors": "tokens", "dtype": "int8"},
            "but the model embeds the tokens of texts",
        ),
    ],
)
def test_options_have_to_fit_the_model(tiny, predict, source, task, options, message):
    with pytest.raises(OptionError, match=message):
        predict(tiny("bert", task), source, **options)

"""Fixtures: tiny artifacts, each exported once, and a run of predict."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest

from enginery.predict.config import PredictConfig
from enginery.predict.stage import run
from tests.tiny import tiny_artifact


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Return a function that exports a tiny artifact: `tiny("bert", "fill-mask")`."""
    root = tmp_path_factory.mktemp("predict-models")
    made = {}

    def make(kind, task):
        if (kind, task) not in made:
            made[kind, task] = tiny_artifact(kind, task, root / f"{kind}-{task}")
        return made[kind, task]

    return make


@pytest.fixture
def predict(tmp_path):
    """Return a function that runs predict: `predict(artifact, source, "out.parquet", top_k=2)`."""

    def go(artifact, source, output="out.parquet", *, force=False, **options):
        return run(
            artifact,
            str(source),
            tmp_path / output,
            PredictConfig(**options),
            force=force,
        )

    return go


@pytest.fixture
def rows(tmp_path):
    """Return a function that reads the rows of an output as dicts: `rows("out.parquet")`."""

    def read(output="out.parquet"):
        path = tmp_path / output
        if path.suffix == ".parquet":
            return pq.read_table(path).to_pylist()
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    return read


@pytest.fixture
def reviews(tmp_path):
    """Write a CSV file with 40 texts of different lengths and a column that looks like a number."""
    path = tmp_path / "reviews.csv"
    lines = [f'00{index},"{text_of(index)}"\n' for index in range(40)]
    path.write_text("id,text\n" + "".join(lines), encoding="utf-8")
    return path


def text_of(index):
    """Return a text that is unique among the 40; lengths go up and down."""
    return f"the pump, {'is warm again ' * (index * 7 % 11)}number {index}"

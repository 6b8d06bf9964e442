"""Tiny artifacts, each made once, and a run of predict over them."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest

from enginery.predict.config import PredictConfig
from enginery.predict.stage import run
from tests.tiny import tiny_artifact


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """`tiny("bert", "fill-mask")`: an artifact."""
    root = tmp_path_factory.mktemp("predict-models")
    made = {}

    def make(kind, task):
        if (kind, task) not in made:
            made[kind, task] = tiny_artifact(kind, task, root / f"{kind}-{task}")
        return made[kind, task]

    return make


@pytest.fixture
def predict(tmp_path):
    """`predict(artifact, source, "out.parquet", top_k=2)`: the report."""

    def go(artifact, source, output="out.parquet", *, force=False, stdin=None, **options):
        return run(
            artifact,
            str(source),
            tmp_path / output,
            PredictConfig(**options),
            force=force,
            stdin=stdin,
        )

    return go


@pytest.fixture
def rows(tmp_path):
    """`rows("out.parquet")`: the output's rows, as dicts."""

    def read(output="out.parquet"):
        path = tmp_path / output
        if path.suffix == ".parquet":
            return pq.read_table(path).to_pylist()
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    return read


@pytest.fixture
def reviews(tmp_path):
    """A CSV of 40 texts of many lengths, with a column that looks like a number."""
    path = tmp_path / "reviews.csv"
    lines = [f'00{index},"{text_of(index)}"\n' for index in range(40)]
    path.write_text("id,text\n" + "".join(lines), encoding="utf-8")
    return path


def text_of(index):
    """A text like no other of the 40; lengths go up and down."""
    return f"the pump, {'is warm again ' * (index * 7 % 11)}number {index}"

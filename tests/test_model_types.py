"""The table of model types: what it says is what the stages do."""

import json
import subprocess
import sys

import pytest

from benchmarks.model_types import (
    COLUMNS,
    FAMILIES,
    HEADER,
    count_rows,
    model_types,
    read_results,
    read_table,
    table_rows,
    tasks_of,
    worse_cells,
    write_table,
)
from enginery.core.versions import OPTIMUM, TRANSFORMERS5
from tests.environments import needs_transformers5
from tests.test_readme import ROOT

TABLE = ROOT / "docs" / "model-types.csv"
PASSED = {"state": "passed"}
FAILED = {"state": "failed", "why": "3 of 20 outputs differ from /tmp/a/b PyTorch"}


def result(family=OPTIMUM, **stages):
    found = {stage: dict(PASSED) for stage in COLUMNS} | {
        name.replace("_", " "): value for name, value in stages.items()
    }
    row = {"family": family, "type": "bert", "task": "fill-mask", "stages": found}
    return {("bert", "fill-mask"): row}


def test_a_cell_that_got_worse_is_named():
    before = table_rows(result().values())
    (row,) = before
    assert [row[name] for name in HEADER[3:]] == ["yes", "yes", "yes", "yes", "yes", ""]
    assert worse_cells(before, result()) == []
    (line,) = worse_cells(before, result(fp16_validate=FAILED))
    assert line == "bert fill-mask, FP16: 3 of 20 outputs differ from b PyTorch"


def test_a_cell_that_says_no_cannot_get_worse():
    before = table_rows(result(validate=FAILED).values())
    assert before[0]["validate"] == "no"
    assert before[0]["why not"] == "validate: 3 of 20 outputs differ from b PyTorch"
    assert worse_cells(before, result(validate=FAILED)) == []


def test_the_last_result_of_a_task_counts(tmp_path):
    file = tmp_path / "results.jsonl"
    lines = [next(iter(result(validate=FAILED).values())), next(iter(result().values()))]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_results(file, OPTIMUM) == result()
    assert read_results(file, TRANSFORMERS5) == {}


def test_rows_are_written_beside_those_of_the_other_family(tmp_path):
    optimum, newer = result(), result(TRANSFORMERS5, validate=FAILED)
    both = table_rows([*optimum.values(), *newer.values()])
    assert [row["transformers"] for row in both] == ["4.57", "5"]
    assert table_rows(newer.values(), table_rows(optimum.values())) == both
    assert table_rows(optimum.values(), both) == both
    write_table(tmp_path / "table.csv", both)
    assert read_table(tmp_path / "table.csv") == both


def test_cells_are_compared_with_the_table_of_their_family():
    written = table_rows([*result().values(), *result(TRANSFORMERS5, validate=FAILED).values()])
    assert worse_cells(written, result(TRANSFORMERS5, validate=FAILED)) == []
    assert len(worse_cells(written, result(validate=FAILED))) == 1


@needs_transformers5
def test_tasks_are_those_of_the_file():
    bert = model_types()["bert"]
    assert tasks_of("bert", bert, "main") == ["text-classification"]
    assert tasks_of("bert", bert, "all")[1:] == bert["tasks"]
    assert tasks_of("bert", bert, "fill-mask,question-answering") == ["question-answering"]


@pytest.mark.parametrize("family", [OPTIMUM, TRANSFORMERS5])
def test_the_table_has_every_configuration(family):
    known = model_types(family)
    rows = [row for row in read_table(TABLE) if row["transformers"] == FAMILIES[family]]
    listed = {(row["type"], row["task"]) for row in rows}
    assert {(kind, entry["task"]) for kind, entry in known.items()} - listed == set()
    # The page says how many of its rows say yes.
    assert count_rows(rows) in (ROOT / "docs" / "support.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_no_cell_of_the_table_got_worse(tmp_path):
    """Takes an hour on two cores."""
    command = [sys.executable, "-m", "benchmarks.model_types", "--work", tmp_path, "--jobs", "2"]
    stages = ["--stages", "export,validate,fp16,int8,engine", "--check", TABLE]
    done = subprocess.run(
        [*command, *stages], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr

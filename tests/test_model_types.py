"""The page of model types: what it says is what the stages do."""

import json
import subprocess
import sys

import pytest

from benchmarks.model_types import COLUMNS, model_types, page, read_results, tasks_of, worse_cells
from enginery.core.versions import OPTIMUM, TRANSFORMERS5
from tests.environments import needs_transformers5
from tests.test_readme import ROOT

PAGE = ROOT / "docs" / "support-models.md"
PASSED = {"state": "passed"}
FAILED = {"state": "failed", "why": "3 of 20 outputs differ from /tmp/a/b PyTorch"}


def result(family=OPTIMUM, **stages):
    found = {stage: dict(PASSED) for stage in COLUMNS} | {
        name.replace("_", " "): value for name, value in stages.items()
    }
    row = {"family": family, "type": "bert", "task": "fill-mask", "stages": found}
    return {("bert", "fill-mask"): row}


def test_a_cell_that_got_worse_is_named():
    before = page(result().values())
    assert "| bert | fill-mask | yes | yes | yes | yes | yes |" in before
    assert worse_cells(before, result()) == []
    (line,) = worse_cells(before, result(fp16_validate=FAILED))
    assert line == "bert fill-mask, FP16: 3 of 20 outputs differ from b PyTorch"


def test_a_cell_that_says_no_cannot_get_worse():
    before = page(result(validate=FAILED).values())
    assert "| no | yes | yes | yes | validate: 3 of 20 outputs differ" in before
    assert worse_cells(before, result(validate=FAILED)) == []


def test_the_last_result_of_a_task_counts(tmp_path):
    file = tmp_path / "results.jsonl"
    lines = [next(iter(result(validate=FAILED).values())), next(iter(result().values()))]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_results(file, OPTIMUM) == result()
    assert read_results(file, TRANSFORMERS5) == {}


def test_a_table_is_written_beside_that_of_the_other_family():
    optimum, newer = result(), result(TRANSFORMERS5, validate=FAILED)
    both = page([*optimum.values(), *newer.values()])
    assert page(newer.values(), page(optimum.values())) == both
    assert page(optimum.values(), both) == both
    assert both.count("| bert | fill-mask |") == 2


def test_cells_are_compared_with_the_table_of_their_family():
    written = page([*result().values(), *result(TRANSFORMERS5, validate=FAILED).values()])
    assert worse_cells(written, result(TRANSFORMERS5, validate=FAILED)) == []
    assert len(worse_cells(written, result(validate=FAILED))) == 1


@needs_transformers5
def test_tasks_are_those_of_the_file():
    bert = model_types()["bert"]
    assert tasks_of("bert", bert, "main") == ["text-classification"]
    assert tasks_of("bert", bert, "all")[1:] == bert["tasks"]
    assert tasks_of("bert", bert, "fill-mask,question-answering") == ["question-answering"]


@pytest.mark.parametrize("family", [OPTIMUM, TRANSFORMERS5])
def test_the_page_has_every_configuration(family):
    known = model_types(family)
    _, table = PAGE.read_text().split("\n## Optimum")
    table = table.split("\n## ")[family == TRANSFORMERS5]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    listed = {(row[0], row[1]) for row in rows if len(row) > 3}
    missing = {(kind, entry["task"]) for kind, entry in known.items()} - listed
    assert not missing


@pytest.mark.slow
def test_no_cell_of_the_page_got_worse(tmp_path):
    """Takes an hour on two cores."""
    command = [sys.executable, "-m", "benchmarks.model_types", "--work", tmp_path, "--jobs", "2"]
    stages = ["--stages", "export,validate,fp16,int8,engine", "--check", PAGE]
    done = subprocess.run(
        [*command, *stages], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr

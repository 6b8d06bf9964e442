"""What the terminal, the page and the card show of reports, held against stored texts.

$ python -m tests.reports.test_rendering    # after a deliberate change, writes the texts anew
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from enginery.bench.report import page
from enginery.cli import render
from enginery.cli.console import Console
from enginery.publish.card.figures import Reports
from enginery.publish.card.model_card import CardFacts, model_card
from enginery.publish.publication import Rights
from enginery.reports.artifact import file_rows, interface_rows, summary_rows
from enginery.reports.engines import (
    built_engine,
    engine_facts,
    engine_rows,
    layer_count_rows,
    layer_rows,
)
from tests.reports import samples

GOLDEN = Path(__file__).parent / "golden"


def printed(show, *, terminal: bool = False) -> str:
    """Return what a function prints on a console: in a pipe, or on a terminal of 100 columns."""
    out = io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        mock.patch.dict(os.environ, {"COLUMNS": "100"}),
        mock.patch.object(Console, "is_terminal", terminal),
    ):
        show(Console())
    return out.getvalue()


def show_artifact(console):
    artifact = samples.sample_artifact(Path("minilm"))
    engines = samples.engines(artifact)
    render.show_new_artifact(console, artifact, "Quantized")
    console.table("Inputs and outputs", interface_rows(artifact.manifest))
    render.show_stages(console, artifact)
    console.table("Files", file_rows(artifact.manifest))
    console.table("Engines", engine_rows([built_engine(engine) for engine in engines]))
    for engine in engines:
        console.table("engine", engine_facts(engine))
        console.table("Layers by kind and precision", layer_count_rows(engine.record.layers))
        console.table("Layers", layer_rows(engine, every=True))


def show_run(console):
    result = samples.run_result(samples.sample_artifact(Path("minilm")))
    console.table("Made", summary_rows(result.artifact))
    console.table("Stages", render.run_rows(result))
    console.table("Stages", render.run_rows(replace(result, stages=result.stages[:1])))


def show_validation(console, *, every):
    for report in (samples.validation(), samples.passed_validation()):
        render.show(console, report.rows(every=every))


def show_results(console):
    for output in samples.stage_outputs():
        render.show(console, output.rows())


def show_summaries(console):
    for output in samples.stage_outputs():
        render.show_output(console, output)


def show_doctor(console):
    render.show(console, samples.doctor_report().tables())


def page_text() -> str:
    artifact = samples.reported_artifact(Path("minilm"))
    with mock.patch.object(page, "can_draw", return_value=False):
        text = page.write_report(artifact.path).read_text()
    head, _, rest = text.partition("<style>")
    return head + rest.partition("</style>")[2]


def card_text() -> str:
    artifact = samples.reported_artifact(Path("minilm"))
    engines = tuple(engine.record for engine in render.open_engines(artifact))
    return model_card(CardFacts(artifact, "minilm", Rights(), Reports.of(artifact), engines))


TEXTS = {
    "artifact.txt": lambda: printed(show_artifact),
    "run.txt": lambda: printed(show_run),
    "validation.txt": lambda: printed(lambda console: show_validation(console, every=True)),
    "validation-terminal.txt": lambda: printed(
        lambda console: show_validation(console, every=False), terminal=True
    ),
    "results.txt": lambda: printed(show_results),
    "results-terminal.txt": lambda: printed(show_results, terminal=True),
    "summaries-terminal.txt": lambda: printed(show_summaries, terminal=True),
    "doctor.txt": lambda: printed(show_doctor),
    "page.html": page_text,
    "card.md": card_text,
}


@pytest.mark.parametrize("name", TEXTS)
def test_reports_look_as_before(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert TEXTS[name]() == (GOLDEN / name).read_text(encoding="utf-8")


def test_outputs_of_stages_are_json():
    documents = [json.loads(json.dumps(output.as_json())) for output in samples.stage_outputs()]
    benchmark, lint, prediction, published, triton, kserve = documents
    assert benchmark == json.loads(samples.benchmark().to_json())
    assert [len(graph["findings"]) for graph in lint["graphs"]] == [3, 0]
    assert (prediction["counts"]["rows"], prediction["rows_per_second"]) == (2000, 190.0)
    url = "file:///srv/models/minilm/1"
    assert published == {"url": url, "version": "1", "is_new": True, "notes": ["a note"]}
    assert triton == {
        "path": "models",
        "name": "minilm",
        "models": ["minilm-graph", "minilm"],
        "max_batch_size": 8,
        "notes": ["a hint"],
    }
    assert kserve["path"] == "out/inferenceservice.yaml"


if __name__ == "__main__":
    os.environ.setdefault("ENGINERY_HOME", tempfile.mkdtemp())
    for name, make_text in TEXTS.items():
        with tempfile.TemporaryDirectory() as directory:
            os.chdir(directory)
            (GOLDEN / name).write_text(make_text(), encoding="utf-8")
            sys.stdout.write(f"{GOLDEN / name}\n")

"""Reports of stages, as they are written and as they come back from a stranger's artifact."""

import json
import math
import os
import re
from dataclasses import replace

import pytest

from enginery.core.accuracy import AccuracyMetrics
from enginery.core.errors import ArtifactError
from enginery.core.table import Table, html_of
from enginery.reports.benchmark import BenchResult
from enginery.reports.engines import BuildReport
from enginery.reports.quantization import QuantizationReport
from enginery.reports.validation import (
    EmbeddingMetrics,
    OutputMetrics,
    ValidationCaseResult,
    ValidationReport,
)
from enginery.reports.weights import WeightMetrics
from tests.bench.sample_results import make_backend_record, make_case, make_result
from tests.reports import samples


def output(name="logits", max_abs=1e-6, limit=1e-5, problem=""):
    return OutputMetrics(
        name, (1, 2), max_abs, max_abs, 0.1, 1.0, 1.0, 0, 1e-7, limit, 0.9, problem
    )


def case(name, *outputs, graph="model.onnx"):
    return ValidationCaseResult(graph, name, "sweep", {"input_ids": [1, 2]}, list(outputs), "")


VALIDATION = ValidationReport(
    passed=True,
    summary="fine",
    precision="fp32",
    providers=[{"name": "CPUExecutionProvider", "reason": "asked for", "options": {"a": "1"}}],
    reference={"as": "PyTorch FP32"},
    tolerance={"floor_factor": 8.0},
    cases=[case("one", output())],
    embeddings=EmbeddingMetrics(8, 0.99999, 1.0, 1.0),
    weights=WeightMetrics(0, 0, {}, [], [], []),
    effort="normal",
    coverage=[],
    notes=[],
    tools={},
    seconds=1.0,
)
QUANTIZATION = QuantizationReport(
    "fine", "int8", [], {}, accuracy=AccuracyMetrics(8, 1, 1, None, None, 1)
)
ENGINE = {
    "directory": "tensorrt-rtx-sm89-00",
    "capabilities": ["8.9"],
    "profiles": [],
    "layers": {"gemm int8": 50},
    "plan_size_bytes": 10,
    "key": "0",
}
BUILD = BuildReport("1 engine", [], [ENGINE])
BENCHMARK = make_result(
    contenders=[make_backend_record("enginery")],
    cases=[
        make_case({"batch": 1}, {"enginery": 1.0, "pytorch": 2.0}, pairs=[("enginery", "pytorch")])
    ],
)
ALL = (VALIDATION, QUANTIZATION, BUILD, BENCHMARK)


@pytest.mark.parametrize("report", ALL, ids=lambda report: report.FILE)
def test_written_report_is_read_back(report, tmp_path):
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / report.FILE).write_bytes(report.to_json())
    found = type(report).below(tmp_path)
    assert type(found) is type(report)
    assert json.loads(found.to_json()) == json.loads(report.to_json())
    assert type(report).below(tmp_path / "reports") is None


def test_numbers_that_json_has_not_are_null_and_come_back_as_nan():
    far = replace(VALIDATION, cases=[case("one", output(max_abs=math.nan, limit=math.inf))])
    text = far.to_json()
    assert b"NaN" not in text
    assert b"Infinity" not in text
    (found,) = ValidationReport.from_json(text).cases[0].outputs
    assert math.isnan(found.max_abs)
    assert math.isnan(found.limit)
    assert found.limit_ratio == math.inf


def test_members_that_a_later_version_writes_are_ignored():
    document = json.loads(VALIDATION.to_json())
    document |= {"carbon": 3, "embeddings": {**document["embeddings"], "carbon": 3}}
    assert ValidationReport.from_json(json.dumps(document).encode()) == VALIDATION


WRONG = [
    (VALIDATION, {"passed": "yes"}, 'passed: found "yes", expected a valid boolean'),
    (VALIDATION, {"seconds": "1"}, 'seconds: found "1", expected a valid number'),
    (VALIDATION, {"cases": {}}, "cases: found {}, expected a valid array"),
    (VALIDATION, {"providers": [3]}, "providers.0: found 3, expected an object"),
    (VALIDATION, {"tools": {"torch": 2}}, "tools.torch: found 2, expected a valid string"),
    (QUANTIZATION, {"summary": None}, "summary: found null, expected a valid string"),
    (QUANTIZATION, {"accuracy": {}}, "accuracy.rows is missing"),
    (
        QUANTIZATION,
        {"layers": {"quantized": -1, "all": 2}},
        "layers.quantized: found -1, expected greater than or equal to 0",
    ),
    (BUILD, {"engines": [{}]}, "engines.0.directory is missing"),
    (BUILD, {"engines": [{**ENGINE, "plan_size_bytes": 2**70}]}, "engines.0.plan_size_bytes"),
    (BENCHMARK, {"schema_version": 9}, "schema_version: found 9, expected 1"),
    (BENCHMARK, {"machine": {"gpus": 3}}, "machine.cpu is missing"),
    (BENCHMARK, {"contenders": ["x" * 10**6]}, 'contenders.0: found "xxx'),
]


@pytest.mark.parametrize(("report", "change", "said"), WRONG, ids=[said for _, _, said in WRONG])
def test_wrong_type_names_file_key_found_and_expected(report, change, said, tmp_path):
    file = tmp_path / report.FILE
    file.write_text(json.dumps(json.loads(report.to_json()) | change))
    with pytest.raises(ArtifactError, match=re.escape(f"{file} cannot be read: {said}")) as raised:
        type(report).read(file)
    assert len(raised.value.message) < 400


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff",
        b'"\\ud800"',
        b"[" * 200_000,
        b'{"a":' * 700 + b"1" + b"}" * 700,
        b'{"summary": ' + b"1" * 10_000 + b"}",
    ],
    ids=lambda content: content[:12].decode(errors="replace"),
)
def test_invalid_report_is_an_error(content, tmp_path):
    file = tmp_path / "report.json"
    file.write_bytes(content)
    for kind in (ValidationReport, QuantizationReport, BuildReport, BenchResult):
        with pytest.raises(ArtifactError, match=r"report\.json cannot be read: "):
            kind.read(file)


def test_named_pipe_in_the_place_of_a_report_is_an_error(tmp_path):
    os.mkfifo(tmp_path / "report.json")
    with pytest.raises(ArtifactError, match="expected a regular file"):
        ValidationReport.read(tmp_path / "report.json")


def test_report_behind_a_link_that_leads_outside_is_not_read(tmp_path):
    (tmp_path / "outside.json").write_bytes(VALIDATION.to_json())
    (tmp_path / "artifact/reports").mkdir(parents=True)
    (tmp_path / "artifact/reports/validation.json").symlink_to(tmp_path / "outside.json")
    with pytest.raises(ArtifactError):
        ValidationReport.below(tmp_path / "artifact")


def test_worst_case_of_each_output_is_the_one_farthest_beyond_its_limit():
    cases = [
        case("near", output("a", 1e-6), output("b", 1e-7)),
        case("far", output("a", 9e-6), output("b", 1e-8)),
        case("failed", output("a", 1e-9, problem="NaN"), graph="decoder.onnx"),
    ]
    model, decoder = replace(VALIDATION, cases=cases).tables()
    worst = [(row["worst input"], row["output"], row["verdict"]) for row in model.rows]
    assert worst == [("sweep: far", "a", "ok"), ("sweep: near", "b", "ok")]
    assert (decoder.title, decoder.rows[0]["verdict"]) == ("decoder.onnx against PyTorch", "NaN")


def test_report_in_a_notebook_is_short_and_has_its_tables():
    report = samples.validation()
    assert repr(report) == f"<ValidationReport: {report.summary}>"
    shown = report._repr_html_()
    (first, *_) = report.tables()
    assert f"<caption>{first.title}</caption>" in shown
    assert shown.count("<td>") >= len(first.rows) * len(first.rows[0])


def test_html_of_a_table_is_escaped():
    shown = html_of([Table("<i>", [{"a&b": "<script>"}]), "x < y"])
    assert "<script>" not in shown
    assert "<th>a&amp;b</th>" in shown
    assert "<td>&lt;script&gt;</td>" in shown
    assert "<p>x &lt; y</p>" in shown
    assert "<caption>&lt;i&gt;</caption>" in shown

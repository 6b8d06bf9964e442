"""Measurements of tiny models. No test depends on the measured times."""

from __future__ import annotations

import json
import shutil

import pytest

from enginery import load_model
from enginery.bench.backends.process import BenchmarkProcess
from enginery.bench.config import BenchConfig
from enginery.bench.stage import run
from enginery.bench.target import Target
from enginery.core.artifact.fingerprint import Fingerprint
from enginery.core.artifact.manifest import Verdict
from enginery.core.errors import (
    ArtifactError,
    InputError,
    OptionError,
    RejectedArtifactError,
    ShapeError,
    SourceError,
)
from enginery.reports.benchmark import BenchResult
from tests.bench.sample_results import QUICK, save_detector, save_photographs
from tests.validate.faults import edits as faults


def rows_by_title(result):
    return {table.title: table.rows for table in result.tables()}


def bench(*models, out="", **options):
    return run(models, BenchConfig(**{**QUICK, **options}), out=out)


@pytest.fixture
def bert(exported, copied):
    return copied(exported("bert", "feature-extraction"))


@pytest.mark.slow
def test_backends_run_and_the_artifact_keeps_the_result(bert):
    before = bert.manifest
    result = bench(bert, batch="1,2", sequence="8", against="onnxruntime,pytorch")
    names = ["enginery", "onnxruntime", "pytorch"]
    assert [record.name for record in result.contenders] == names
    for case, batch in zip(result.cases, (1, 2), strict=True):
        assert case.sizes == {"batch": batch, "sequence": 8}
        assert [found.contender for found in case.measurements] == names
        assert (case.rows, case.tokens, case.problems) == (batch, 8 * batch, {})
        for found in case.measurements:
            times = found.latency
            assert 0 < times.p50_ms <= times.p90_ms
            assert found.tokens_per_second == pytest.approx(8 * found.inputs_per_second)
            assert found.first_ms > 0
        rounds = {found.latency.rounds for found in case.measurements}
        assert len(rounds) == 1  # the same rounds for all
        pairs = {(c.contender, c.base) for c in case.comparisons}
        assert {("enginery", "pytorch"), ("onnxruntime", "enginery")} <= pairs
    by_name = {record.name: record for record in result.contenders}
    assert by_name["pytorch"].peak_rss_bytes > 1.5 * by_name["enginery"].peak_rss_bytes
    assert by_name["pytorch"].notes[0].startswith("attention: sdpa")
    assert set(result.unknown) == {"device memory", "energy"}
    assert all(found.joules_per_run is None for found in result.cases[0].measurements)
    assert any("energy: nothing ran on an NVIDIA GPU" in line for line in result.lines())
    placed = by_name["enginery"].facts["placement"]
    (part,) = placed["providers"]
    assert (placed["head"], part["name"]) == ("CPUExecutionProvider",) * 2
    assert part["multiply_adds"] > 0  # counted on the smallest inputs
    assert placed["counted_on"]["input_ids"] == [1, 8]
    assert 0 < part["for_shapes"] < part["nodes"]
    stored = (bert.path / "reports" / "benchmark.json").read_bytes()
    assert BenchResult.from_json(stored) == result
    assert (bert.path / "reports" / "report.html").is_file()
    # The measurement changes neither the files nor the verdicts of the artifact.
    after = type(bert).open(bert.path, verify=True).manifest
    assert (after.files, after.verdicts) == (before.files, before.verdicts)
    assert "reports/benchmark.json" in after.reports


@pytest.mark.slow
def test_two_artifacts_are_compared(bert, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(bert.path, other)
    result = bench(bert.path, other, batch="1", sequence="8", against="none")
    assert [record.name for record in result.contenders] == ["copy: enginery", "other: enginery"]
    (comparison,) = result.cases[0].comparisons
    assert (comparison.contender, comparison.base) == ("other: enginery", "copy: enginery")
    stored = [
        json.loads((path / "reports" / "benchmark.json").read_text()) for path in (bert.path, other)
    ]
    assert stored[0] == stored[1]


@pytest.mark.slow
def test_backend_that_fails_to_start_is_an_error_if_named_and_left_out_by_auto(bert):
    source = bert.manifest.source.model_copy(update={"id": "/gone", "sha256": "0" * 64})
    broken = type(bert)(bert.path, bert.manifest.model_copy(update={"source": source}))
    with pytest.raises(SourceError, match="/gone"):
        bench(broken, batch="1", sequence="8", against="pytorch")
    result = bench(broken, batch="1", sequence="8")
    assert "/gone" in result.left_out["pytorch"]
    assert [record.name for record in result.contenders] == ["enginery", "onnxruntime", "optimum"]


@pytest.mark.slow
def test_padding_of_texts(bert, tmp_path):
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(["warm", "the engine is warm and the pump runs again " * 4] * 8))
    result = bench(bert, batch="1,8", sequence="8", against="none", data=str(texts))
    assert [padding.batch for padding in result.padding] == [1, 8]
    assert result.padding[1].in_order > 0.3 > result.padding[1].sorted


@pytest.mark.more
def test_onnx_file_on_images_of_several_sizes(tmp_path):
    model = save_detector(tmp_path / "detector.onnx")
    folder = save_photographs(tmp_path / "photos", (64, 64), (96, 60), (130, 97))
    result = bench(model, images=str(folder), out=tmp_path / "out")
    images = result.images
    assert [image.shape for image in images.images] == [
        [1, 3, 64, 64],
        [1, 3, 64, 96],
        [1, 3, 96, 128],
    ]
    assert images.shapes == 3
    assert set(images.totals) == {"enginery", "onnxruntime"}
    for name, total in images.totals.items():
        assert images.first_total_ms[name] == sum(image.first_ms[name] for image in images.images)
        assert total.rounds == images.passes
    assert result.contender("onnxruntime").facts["provider_options"]["CPUExecutionProvider"] == {}
    found = rows_by_title(result)
    assert [row["image"] for row in found["Images"]] == ["0.png", "1.png", "2.png"]
    assert [row["backend"] for row in found["All images"]] == ["enginery", "onnxruntime"]
    assert (tmp_path / "out" / "reports" / "report.html").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["detector.onnx", "out", "photos"]


@pytest.mark.slow
def test_images_are_preprocessed_by_the_artifacts_processor(exported, copied, tmp_path):
    vit = copied(exported("vit", "image-classification"))
    folder = save_photographs(tmp_path / "photos", (64, 64), (96, 60))
    result = bench(vit, images=str(folder), against="pytorch")
    assert [image.shape for image in result.images.images] == [[1, 3, 32, 32]] * 2
    assert set(result.images.totals) == {"enginery", "pytorch"}


def test_model_must_take_images_or_texts(bert, tmp_path):
    folder = save_photographs(tmp_path / "photos", (64, 64))
    with pytest.raises(OptionError, match="expected a single image input"):
        bench(bert, images=str(folder))
    model = save_detector(tmp_path / "detector.onnx")
    with pytest.raises(OptionError, match="detector does not take texts"):
        bench(model, shape=("height=32,width=32",), data=str(tmp_path / "texts.txt"))
    with pytest.raises(InputError, match="no such file or folder"):
        bench(model, images=str(tmp_path / "absent"))


def test_error_names_a_damaged_image(tmp_path):
    model = save_detector(tmp_path / "detector.onnx")
    folder = save_photographs(tmp_path / "photos", (64, 64))
    (folder / "9.png").write_bytes(b"no picture")
    with pytest.raises(InputError, match=r"9\.png"):
        bench(model, images=str(folder))


def test_graph_with_a_fixed_batch_cannot_run_images(tmp_path):
    model = save_detector(tmp_path / "detector.onnx", dims=(2, 3, 32, 32))
    folder = save_photographs(tmp_path / "photos", (64, 64))
    with pytest.raises(ShapeError, match="fixed batch of 2, expected 1"):
        bench(model, images=str(folder))


def test_failed_artifact_is_measured_only_with_allow_failed(bert):
    key = Fingerprint("validate", {})
    verdict = Verdict.of(key, passed=False, summary="far off", report="reports/validation.json")
    failed = bert.annotate(verdict, b"{}")
    with pytest.raises(RejectedArtifactError, match="far off"):
        bench(failed, batch="1", sequence="8", against="none")
    assert Target.open(failed, "", allow_failed=True)


@pytest.mark.slow
def test_crash_of_an_optional_backend_is_reported_and_the_others_continue(
    bert, tmp_path, monkeypatch
):
    real = BenchmarkProcess.request
    turns = []

    def request(self, command, **values):
        if self.plan.kind == "onnxruntime" and command == "turn":
            turns.append(values)
            if len(turns) == 2:
                self._process.kill()
        return real(self, command, **values)

    monkeypatch.setattr(BenchmarkProcess, "request", request)
    monkeypatch.setattr("enginery.bench.backends.plan.BACKENDS", ("onnxruntime",))
    result = bench(bert, batch="1,2", sequence="8")
    for case in result.cases:
        assert [found.contender for found in case.measurements] == ["enginery"]
        assert "the process" in case.problems["onnxruntime"]
    assert "after loading" in result.contender("onnxruntime").notes[-1]
    turns.clear()
    images = save_photographs(tmp_path / "photos", (64, 64), (96, 60))
    found = bench(save_detector(tmp_path / "d.onnx"), images=str(images)).images
    assert set(found.totals) == {"enginery"}
    assert "the process" in found.problems["onnxruntime"]


@pytest.mark.more
def test_fallback_is_in_the_result_on_the_terminal_and_on_the_page(bert):
    result = bench(
        bert,
        batch="1",
        sequence="8",
        against="onnxruntime",
        providers="cuda,cpu",
        allow_fallback=True,
    )
    reason = result.contender("enginery").providers[0]["reason"]
    assert reason.startswith("cuda requested, but")
    assert f"enginery, onnxruntime on cpu: {reason}" in result.notes
    assert f"note: enginery, onnxruntime on cpu: {reason}" in result.lines()
    assert reason[:30] in (bert.path / "reports" / "report.html").read_text()


def test_missing_model_is_an_error(tmp_path):
    with pytest.raises(OptionError, match="no model is given"):
        bench()
    with pytest.raises(ArtifactError, match="is not an artifact"):
        bench(tmp_path)


@pytest.mark.slow
def test_accuracy_stands_beside_the_latency_of_each_artifact(exported, copied, tmp_path):
    artifact = copied(exported("bert", "text-classification"))
    texts = ["The engine is warm.", "Nobody knows.", "A small cat sleeps.", "The rain is cold."]
    answers = [found.label for found in load_model(artifact).classify(texts)]
    data = tmp_path / "rows.csv"
    lines_of = [f"{text},{label}" for text, label in zip(texts, answers, strict=True)]
    data.write_text("\n".join(["text,label", *lines_of]))
    other = artifact.copy_to(tmp_path / "other")
    faults.break_graph(other, faults.scale("logits", -1))
    result = bench(
        artifact,
        other.path,
        batch="1",
        sequence="8",
        against="onnxruntime",
        data=str(data),
        label_column="label",
    )
    sound, broken = result.labels.accuracies
    assert (sound.name, sound.right, sound.rows) == ("copy", 4, 4)
    assert (broken.name, broken.right) == ("other", 0)
    assert [(c.name, c.base, c.broken) for c in result.labels.changes] == [("other", "copy", 4)]
    shown = {row["backend"]: row["accuracy"] for row in rows_by_title(result)["Latency"]}
    assert shown["copy: enginery"] == sound.describe()
    assert shown["other: enginery"] == broken.describe()
    assert shown["copy: onnxruntime"] == "–", "it was only timed"
    assert [row["model"] for row in rows_by_title(result)["Accuracy"]] == ["copy", "other"]
    stored = BenchResult.from_json((artifact.path / "reports" / "benchmark.json").read_bytes())
    assert stored == result
    assert "right → wrong" in (artifact.path / "reports" / "report.html").read_text()


def test_labels_of_a_model_that_does_not_classify_are_an_error_before_anything_runs(
    bert, monkeypatch
):
    monkeypatch.setattr("enginery.bench.stage.BenchmarkProcess", None)
    with pytest.raises(OptionError, match="is feature-extraction, expected text-classification"):
        bench(bert, data="rows.csv", label_column="label")
    with pytest.raises(OptionError, match="but there are no data"):
        bench(bert, label_column="label")

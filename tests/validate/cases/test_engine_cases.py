"""Engines are compared on inputs that fit their profiles. The CPU replaces their sessions here."""

import numpy as np
import pytest

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import ProviderError
from enginery.core.shapes import Profile, TensorSpec
from enginery.runtime.engines import selection as engines
from enginery.runtime.onnxruntime import runner as ort_runner
from enginery.runtime.onnxruntime.runner import open_session
from enginery.runtime.providers import selection
from enginery.runtime.providers.gpus import CudaGpu
from enginery.runtime.providers.known import CPU
from enginery.runtime.providers.selection import Provider
from enginery.validate.cases.engines import split_by_profiles
from enginery.validate.cases.sweep import ValidationCase
from enginery.validate.config import ValidateConfig
from enginery.validate.stage import run
from tests.engine.made import with_engines


@pytest.fixture
def gpu(monkeypatch):
    """Simulate a GPU for which every provider is available."""

    def open_engine(engine, given, **_):
        artifact = Artifact.open(engine.path.parent.parent)
        return open_session(artifact.path / engine.record.graph, [Provider(CPU, "a double")])

    monkeypatch.setattr(ort_runner, "open_engine", open_engine)
    monkeypatch.setattr(
        ort_runner, "device_of", lambda session: type("Device", (), {"kind": "cpu"})
    )
    monkeypatch.setattr(engines, "visible_gpus", lambda: (CudaGpu("NVIDIA L4", "8.9", 1),))
    monkeypatch.setattr(engines, "loaded_version", lambda flavor: "1.7.1")
    monkeypatch.setattr(selection, "unavailable_reason", lambda name, options: None)
    monkeypatch.setattr(selection, "provider_warning", lambda name: "")


def shapes(report, kind):
    return {
        case.name: tuple(case.shapes["input_ids"])
        for case in report.cases
        if case.kind == kind and not case.skipped
    }


@pytest.mark.more
def test_engine_is_compared_at_its_corners_and_on_inputs_that_fit(gpu, exported, tmp_path):
    profile = "batch=2:2:3,sequence=8:32:64"
    artifact = with_engines(
        exported("bert", "text-classification"), tmp_path / "made", {"profiles": (profile,)}
    )
    report = run(artifact, ValidateConfig(providers="tensorrt-rtx"))
    assert report.passed, report.summary
    assert report.providers[0]["name"] == "NvTensorRTRTXExecutionProvider"
    corners = shapes(report, "profile")
    assert set(corners.values()) == {(2, 8), (2, 64), (3, 8), (3, 64), (2, 32)}
    sweep = shapes(report, "sweep")
    usual = {name: sizes for name, sizes in sweep.items() if not name.startswith("decision")}
    assert usual == {"small": (2, 8), "odd": (3, 17)}
    assert all(2 <= rows <= 3 and 8 <= tokens <= 64 for rows, tokens in sweep.values())
    left_out = {
        case.name: case.skipped
        for case in report.cases
        if case.skipped and not case.name.startswith("decision")
    }
    # One sentence has more than 64 tokens; the others of its batch are compared without it.
    assert set(left_out) == {"one", "ragged", "longest", "sentences 1–16, row 15"}
    assert left_out["longest"].startswith(
        "outside the profiles of all engines: batch 1, sequence 128"
    )
    assert " inputs skipped that fit no engine" in report.summary
    real = shapes(report, "real")
    assert all(2 <= rows <= 3 and 8 <= tokens <= 64 for rows, tokens in real.values())
    assert len({tokens for _, tokens in real.values()}) > 1  # none is as long as the longest
    assert len([name for name in real if name.startswith("sentences 1–16")]) == 15


@pytest.mark.more
def test_requested_corner_outside_all_engines_fails(gpu, exported, tmp_path):
    artifact = with_engines(exported("bert", "text-classification"), tmp_path / "made", {})
    report = run(
        artifact, ValidateConfig(providers="tensorrt-rtx", profile=("batch=1:2:8,sequence=16",))
    )
    assert not report.passed
    failed = [case for case in report.cases if case.problem]
    assert [case.name for case in failed] == [
        "batch 8, sequence 16",
        "batch 8, sequence 16, padded",
    ]
    assert all("batch 8 is above its maximum 4 by 4" in case.problem for case in failed)


def test_artifact_without_a_matching_engine_is_rejected_before_pytorch_runs(
    gpu, exported, tmp_path, monkeypatch
):
    artifact = with_engines(
        exported("bert", "text-classification"), tmp_path / "made", {"capabilities": ("8.0",)}
    )
    monkeypatch.setattr("enginery.validate.context.run_reference", None)
    with pytest.raises(ProviderError, match=r"it is not for compute capability 8\.9"):
        run(artifact, ValidateConfig(providers="tensorrt-rtx"))


RECORD = GraphRecord(
    file="model.onnx",
    opset=18,
    outputs=(),
    data_files=(),
    inputs=tuple(
        TensorSpec(name, "int64", ("batch", "sequence")) for name in ("input_ids", "attention_mask")
    ),
)
LENGTHS = [3, 5, 2, 9]


def texts(*, left=False, mask=True):
    """Make a batch of four texts; each token encodes its text and position."""
    ids, kept = np.zeros((4, 9), np.int64), np.zeros((4, 9), np.int64)
    for row, length in enumerate(LENGTHS):
        places = slice(9 - length, 9) if left else slice(0, length)
        ids[row, places] = 10 * row + np.arange(1, length + 1)
        kept[row, places] = 1
    feeds = {"input_ids": ids, "attention_mask": kept}
    return ValidationCase("texts 1–4", "real", lambda: feeds if mask else {"input_ids": ids})


def fitted(case, *profiles, record=RECORD):
    taken, left_out = split_by_profiles([case], record, [Profile.parse(p) for p in profiles])
    return [(part.name, part.make()) for part in taken], left_out


@pytest.mark.parametrize("left", [False, True], ids=["padded right", "padded left"])
def test_texts_are_split_without_the_padding_of_others(left):
    parts, left_out = fitted(texts(left=left), "batch=1:1:2,sequence=1:4:9")
    assert left_out == []
    assert [name for name, _ in parts] == ["texts 1–4, rows 1–2", "texts 1–4, rows 3–4"]
    first = parts[0][1]
    assert first["input_ids"].shape == first["attention_mask"].shape == (2, 5)
    for row, (_, feeds) in zip((0, 2), parts, strict=True):
        for index in range(2):
            kept = feeds["attention_mask"][index].astype(bool)
            expected = 10 * (row + index) + np.arange(1, LENGTHS[row + index] + 1)
            assert feeds["input_ids"][index, kept].tolist() == expected.tolist()


def test_only_the_text_that_fits_no_engine_is_skipped():
    parts, left_out = fitted(texts(), "batch=1:1:4,sequence=1:4:8")
    assert [name for name, _ in parts] == [f"texts 1–4, row {row}" for row in (1, 2, 3)]
    (alone,) = left_out
    assert (alone.name, alone.kind) == ("texts 1–4, row 4", "real")
    assert alone.shapes["input_ids"] == [1, 9]
    assert "sequence 9 is above its maximum 8 by 1" in alone.skipped
    assert alone.passed  # it does not count


def test_inputs_below_the_minimum_are_padded_and_masked():
    ((name, feeds),), left_out = fitted(texts(), "batch=6:6:8,sequence=12:16:16")
    assert (name, left_out) == ("texts 1–4", [])
    assert feeds["input_ids"].shape == (6, 12)
    assert feeds["attention_mask"].sum(axis=1).tolist() == [*LENGTHS, LENGTHS[-1], LENGTHS[-1]]
    assert feeds["input_ids"][5].tolist() == feeds["input_ids"][3].tolist()


def test_without_a_mask_nothing_is_padded():
    bare = RECORD.model_copy(update={"inputs": RECORD.inputs[:1]})
    parts, (whole,) = fitted(texts(mask=False), "batch=1:1:4,sequence=12", record=bare)
    assert parts == []
    assert "sequence 9 is below its minimum 12 by 3" in whole.skipped


def test_graph_with_a_fixed_batch_is_not_split():
    inputs = tuple(TensorSpec(s.name, s.dtype, (4, "sequence")) for s in RECORD.inputs)
    fixed = RECORD.model_copy(update={"inputs": inputs})
    parts, left_out = fitted(texts(), "sequence=12:16:16", record=fixed)
    assert left_out == []
    assert [feeds["input_ids"].shape for _, feeds in parts] == [(4, 12)]


def test_images_are_split_into_rows():
    record = GraphRecord(
        file="model.onnx",
        opset=18,
        outputs=(),
        data_files=(),
        inputs=(TensorSpec("pixel_values", "float32", ("batch", 3, 8, 8)),),
    )
    pixels = np.arange(5 * 192, dtype="float32").reshape(5, 3, 8, 8)
    case = ValidationCase("images 1–5", "real", lambda: {"pixel_values": pixels})
    parts, left_out = fitted(case, "batch=2:2:2", record=record)
    assert left_out == []
    found = [feeds["pixel_values"] for _, feeds in parts]
    assert [len(part) for part in found] == [2, 2, 2]
    np.testing.assert_array_equal(np.concatenate(found)[:5], pixels)


def test_without_engines_cases_are_unchanged():
    case = texts()
    assert split_by_profiles([case], RECORD, []) == ([case], [])

"""Correct models pass on all inputs, and the verdict is stored and enforced."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from PIL import Image

from enginery import Artifact, export_model, load_model, validate_model
from enginery.core.artifact.manifest import Verdict
from enginery.core.errors import (
    ArtifactError,
    EngineryError,
    InputError,
    OptionError,
    ProviderError,
    RejectedArtifactError,
    ShapeError,
    SourceError,
)
from enginery.reports.validation import OutputMetrics, ValidationCaseResult, ValidationReport
from enginery.validate.config import ValidateConfig
from enginery.validate.stage import fingerprint
from enginery.validate.verdict import all_passed
from tests.progress import Said
from tests.sounds import chirp, wav
from tests.validate.faults import edits as faults

TEXT = ("bert", "text-classification")


def names(report, kind):
    return [case.name for case in report.cases if case.kind == kind]


def case_of(graph, *, ran):
    output = OutputMetrics("y", (1,), 0, 0, 0, 1, 1, 0, 0, 1, -1, "")
    return ValidationCaseResult(graph, "1 × 8", "sweep", {}, [output] if ran else [], "")


def test_every_graph_has_to_be_compared_on_an_input():
    both = [case_of("encoder.onnx", ran=True), case_of("decoder.onnx", ran=True)]
    assert all_passed(both)
    assert not all_passed([both[0], case_of("decoder.onnx", ran=False)])
    assert not all_passed([])


@pytest.mark.more
@pytest.mark.parametrize(
    ("model", "sweep", "real"),
    [
        (TEXT, ["one", "small", "odd", "ragged", "longest"], ["sentences 1–16"]),
        pytest.param(
            ("bert", "question-answering"),
            ["one", "small", "odd", "ragged", "longest"],
            ["questions 1–16", "questions 17"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("gpt2", "text-generation"),
            ["one", "small", "odd", "ragged", "longest"],
            ["sentences 1–16"],
            marks=pytest.mark.slow,
        ),
        (
            ("resnet", "image-classification"),
            ["one", "small", "odd", "largest"],
            ["images 1–4", "images 5–6"],
        ),
        pytest.param(
            ("wav2vec2", "audio-classification"),
            ["one", "small", "odd", "ragged", "longest"],
            [
                "sounds of 16000, 1–2",
                "sounds of 64000, 1",
                "sounds of 32000, 1",
                "sounds of 80000, 1",
                "sounds of 48000, 1",
            ],
            marks=pytest.mark.slow,
        ),
        (("gpt2", "text-generation-with-past"), ["one", "small", "odd", "ragged", "longest"], []),
    ],
)
def test_correct_model_passes_on_all_sizes_and_real_inputs(exported, model, sweep, real):
    report = validate_model(exported(*model), effort="quick")
    assert report.passed, report.summary
    swept = names(report, "sweep")
    assert [name for name in swept if not name.startswith("decision at ")] == sweep
    assert names(report, "real") == real
    assert not [case.name for case in report.cases if case.skipped]
    graphs = [case for case in report.cases if case.kind != "generation"]  # texts have no tensors
    assert all(case.outputs for case in graphs)


@pytest.mark.more
def test_sequence_to_sequence_model_passes_in_every_graph(exported):
    report = validate_model(exported("t5", "text2text-generation-with-past"), effort="quick")
    assert report.passed, report.summary
    graphs = [case for case in report.cases if case.kind != "generation"]  # texts have no tensors
    later = [case for case in graphs if case.graph == "decoder_with_past_model.onnx"]
    assert {case.name for case in later} >= {"ragged", "longest"}
    assert names(report, "real") == ["sentences 1–16"], "the encoder takes texts"
    logits = [o for case in later for o in case.outputs if o.output == "logits"]
    assert len(logits) == len(later)


@pytest.mark.slow
def test_fp16_tolerance_follows_the_noise_of_fp16(exported):
    noise_floors = {}
    for dtype in ("fp16", "fp32"):
        report = validate_model(exported(*TEXT, dtype=dtype), effort="quick")
        assert report.passed, report.summary
        (noise_floors[dtype],) = {o.noise_floor for case in report.cases for o in case.outputs}
    assert 1e-4 < noise_floors["fp16"] < 0.1
    assert noise_floors["fp32"] < noise_floors["fp16"] / 100


@pytest.mark.more
def test_minilm_is_as_close_as_promised(minilm, tmp_path):
    artifact = export_model(minilm, out=tmp_path / "minilm")
    report = validate_model(artifact)
    assert report.passed, report.summary
    real = [o for case in report.cases if case.kind == "real" for o in case.outputs]
    assert real
    assert max(o.max_abs for o in real) <= 1e-4
    assert min(o.cosine for o in real) >= 0.99999
    assert report.embeddings.sentences == 16
    assert report.embeddings.neighbour_agreement == 1.0
    assert report.embeddings.min_cosine >= 0.9999999


# Profiles


@pytest.mark.more
def test_every_profile_corner_runs_once(exported, copied):
    profiles = ("batch=1:2:4,sequence=2:8:16", "sequence=16:20:24,batch=4")
    report = validate_model(copied(exported(*TEXT)), profile=profiles)
    assert report.passed, report.summary
    assert names(report, "profile") == [
        "batch 1, sequence 2",
        "batch 1, sequence 16",
        "batch 4, sequence 2",
        "batch 4, sequence 2, padded",
        "batch 4, sequence 16",
        "batch 4, sequence 16, padded",
        "batch 2, sequence 8",  # the second profile starts at 4 × 16
        "batch 2, sequence 8, padded",
        "batch 4, sequence 24",
        "batch 4, sequence 24, padded",
        "batch 4, sequence 20",
        "batch 4, sequence 20, padded",
    ]
    corner = next(case for case in report.cases if case.name == "batch 4, sequence 24")
    assert corner.shapes["input_ids"] == [4, 24]


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        ("batch=1:2", "has 2 numbers"),
        ("batch=1,sequense=8", r"no dynamic dim 'sequense'; did you mean 'sequence'"),
        ("batch=1", r"lacks the dim 'sequence'.*Add sequence=min:opt:max"),
        ("batch=1,sequence=1:64:129", r"positions end at 128.*Lower the maximum of sequence to"),
    ],
)
def test_profile_that_does_not_fit_says_what_to_do(exported, copied, profile, message):
    artifact = copied(exported(*TEXT))
    with pytest.raises(ShapeError, match=message):
        validate_model(artifact, profile=(profile,))
    assert Artifact.open(artifact.path).manifest.verdicts == ()


@pytest.mark.slow
def test_models_without_a_hard_limit_take_longer_profiles(exported, copied, tmp_path):
    artifact = copied(exported("deberta-v2", "feature-extraction"))
    report = validate_model(artifact, profile=("batch=1,sequence=140",))
    assert report.passed, report.summary
    audio = exported("wav2vec2", "audio-classification").copy_to(tmp_path / "audio")
    sounds = tmp_path / "sounds"
    sounds.mkdir()
    (sounds / "short.wav").write_bytes(wav(chirp(0.2)))  # faster than the built-in ones
    assert validate_model(audio, profile=("batch=1,sequence=8000",), data=str(sounds)).passed


@pytest.mark.slow
def test_profile_applies_to_the_graphs_it_fits(exported, copied):
    artifact = copied(exported("t5", "text2text-generation-with-past"))
    profile = "batch=1:2:2,encoder_sequence=4"
    report = validate_model(artifact, profile=(profile,))
    assert report.passed, report.summary
    assert {case.graph for case in report.cases if case.kind == "profile"} == {"encoder_model.onnx"}
    with pytest.raises(ShapeError, match="no dynamic dim 'encoder_sequense'"):
        validate_model(artifact, profile=("batch=1,encoder_sequense=4",))


@pytest.mark.more
def test_corner_that_pytorch_rejects_fails(exported, copied):
    """All corners of a profile must work; past and present together exceed GPT-2's positions."""
    artifact = copied(exported("gpt2", "text-generation-with-past"))
    profile = ("batch=1,sequence=100,past_sequence=100",)
    report = validate_model(artifact, profile=profile, effort="quick")
    assert not report.passed
    assert "profile 'batch 1, sequence 100, past_sequence 100': PyTorch rejects" in report.summary


@pytest.mark.more
def test_size_of_the_sweep_that_pytorch_rejects_is_skipped_and_listed(exported, tmp_path):
    """The config declares more positions than the weights have."""
    artifact = exported(*TEXT).copy_to(tmp_path / "copy")
    config = json.loads((artifact.path / "config.json").read_text())
    config["max_position_embeddings"] = 200
    (artifact.path / "config.json").write_text(json.dumps(config))
    faults.break_graph(artifact, lambda model: None)
    report = validate_model(artifact.path)
    assert all(case.passed for case in report.cases)
    assert [case.name for case in report.cases if case.skipped] == ["longest"]
    assert "PyTorch rejects the inputs" in next(c.skipped for c in report.cases if c.skipped)
    assert "skipped: 1 inputs that PyTorch rejects or no engine takes" in report.lines()
    assert [d.key for d in report.side_files.differences] == ["max_position_embeddings"]
    assert not report.passed


# Real inputs


@pytest.mark.more
def test_column_of_a_file_is_compared_in_batches(exported, copied, tmp_path):
    lines = "".join(f'{{"review": "pump {"again " * (i % 5)}{i}"}}\n' for i in range(40))
    (tmp_path / "a.jsonl").write_text(lines)
    report = validate_model(
        copied(exported(*TEXT)), data=str(tmp_path / "a.jsonl"), column="review", rows=20
    )
    assert report.passed, report.summary
    assert names(report, "real") == ["rows 1–16", "rows 17–20"]


def test_folder_of_images_is_compared(exported, copied, tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for index in range(5):
        pixels = np.random.default_rng(index).integers(0, 255, (40 + index, 50, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
    artifact = copied(exported("vit", "image-classification"))
    report = validate_model(artifact, data=str(folder))
    assert report.passed, report.summary
    assert names(report, "real") == ["images 1–4", "images 5"]

    (folder / "5.png").write_bytes((folder / "0.png").read_bytes()[:60])
    with pytest.raises(InputError, match=r"5\.png.*not a complete image"):
        validate_model(artifact, data=str(folder))
    verdict = Artifact.open(artifact.path).manifest.verdict("validate")
    assert verdict.passed, "damaged data are no fault of the artifact"


@pytest.mark.more
def test_images_of_different_sizes_are_all_compared(exported, copied):
    artifact = copied(exported("resnet", "image-classification"))
    path = artifact.path / "preprocessor_config.json"
    settings = {"image_processor_type": "ViTImageProcessor", "do_resize": False}
    path.write_text(json.dumps(settings))
    faults.break_graph(artifact, lambda model: None)
    report = validate_model(artifact.path)
    # The source's processor resizes, so that its answers are others.
    compared = [case for case in report.cases if case.kind != "answer"]
    assert all(case.passed for case in compared), report.summary
    assert {d.file for d in report.side_files.differences} == {"preprocessor_config.json"}
    assert names(report, "real") == [
        f"images of {96 + 40 * i} × {160 - 12 * i}, 1" for i in range(6)
    ]


def test_data_that_cannot_be_used_are_an_error(exported, copied, tmp_path):
    text = copied(exported(*TEXT))
    with pytest.raises(InputError, match="no such file or folder"):
        validate_model(text, data=str(tmp_path / "none.csv"))
    audio = exported("wav2vec2", "audio-classification").copy_to(tmp_path / "audio")
    with pytest.raises(InputError, match="expected a folder of audio; no such file"):
        validate_model(audio, data=str(tmp_path / "none.csv"))


@pytest.mark.more
def test_damaged_tokenizer_is_noted_and_answers_nothing(exported, copied):
    artifact = copied(exported(*TEXT))
    (artifact.path / "tokenizer.json").write_text("{}")
    faults.break_graph(artifact, lambda model: None)
    report = validate_model(artifact.path)
    assert any("no real inputs were compared" in note for note in report.notes)
    (failed,) = [case for case in report.cases if not case.passed]
    assert failed.kind == "answer"
    assert failed.problem.startswith("load_model cannot answer: ")
    assert failed.problem in report.summary


# Verdicts


def said_by(run):
    said = Said()
    run(said)
    return " ".join(said.messages)


def test_second_validation_uses_the_verdict_until_something_changes(exported, copied, tmp_path):
    artifact = copied(exported(*TEXT))
    data = tmp_path / "a.txt"
    data.write_text("the pump\n")

    def again(**options):
        return said_by(lambda progress: validate_model(artifact.path, progress=progress, **options))

    assert "has no verdict yet" in again(data=str(data))
    assert "nothing to do" in again(data=str(data))
    assert "seed: 0 → 1" in again(data=str(data), seed=1)
    data.write_text("the engine\n")
    assert "data: txt " in again(data=str(data), seed=1)
    faults.break_graph(Artifact.open(artifact.path), faults.flip_sign)
    assert "artifact: " in again(data=str(data), seed=1)
    report = artifact.path / "reports" / "validation.json"
    report.unlink()
    assert "its report is missing or from another machine" in again(data=str(data), seed=1)
    assert ValidationReport.from_json(report.read_bytes()).passed is False


@pytest.mark.more
def test_verdict_from_elsewhere_is_not_trusted(exported, copied, tmp_path, monkeypatch):
    """Its author knows every field of the fingerprint and can write any report."""
    artifact = copied(exported(*TEXT))
    path = artifact.path
    validate_model(path)
    assert "nothing to do" in said_by(lambda listener: validate_model(path, progress=listener))
    faults.break_graph(Artifact.open(path), faults.flip_sign)
    forged = Artifact.open(path)
    key = fingerprint(forged, ValidateConfig())
    old = ValidationReport.from_json((path / "reports" / "validation.json").read_bytes())
    verdict = Verdict.of(key, passed=True, summary=old.summary, report="reports/validation.json")
    forged.annotate(verdict, dataclasses.replace(old, seconds=0.0).to_json())
    assert Artifact.open(path).manifest.verdict("validate").passed
    assert validate_model(path).passed is False
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "another machine"))
    said = said_by(lambda listener: validate_model(path, progress=listener))
    assert "from another machine" in said


@pytest.mark.more
def test_report_on_disk_is_the_one_returned(exported, copied):
    artifact = copied(exported(*TEXT))
    report = validate_model(artifact)
    assert (artifact.path / "reports" / "validation.json").read_bytes() == report.to_json()
    assert validate_model(artifact.path) == report


@pytest.mark.more
def test_failed_artifact_is_rejected_until_it_passes(exported, copied):
    artifact = copied(exported(*TEXT))
    sound = artifact.model.read_bytes()
    faults.break_graph(artifact, faults.flip_sign)
    assert not validate_model(artifact.path).passed
    broken = Artifact.open(artifact.path)
    with pytest.raises(
        RejectedArtifactError, match=r"failed its validation: .*logits on .*--allow"
    ):
        load_model(broken)
    assert load_model(broken, allow_failed=True).classify(["the pump"])

    artifact.model.write_bytes(sound)
    faults.break_graph(Artifact(artifact.path, broken.manifest), lambda model: None)
    assert validate_model(artifact.path).passed
    assert load_model(Artifact.open(artifact.path)).classify(["the pump"])


def test_source_that_has_changed_is_an_error_that_names_the_file(tiny_model, tmp_path):
    source = tmp_path / "model"
    shutil.copytree(tiny_model(*TEXT), source)
    artifact = export_model(str(source), task=TEXT[1], out=tmp_path / "out")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "layer_norm_eps": 1e-3}))
    with pytest.raises(SourceError, match=r"changed since the export: config\.json"):
        validate_model(artifact)
    shutil.rmtree(source)
    with pytest.raises(SourceError, match="no such directory"):
        validate_model(artifact)


@pytest.mark.more
def test_imported_graph_can_be_compared_with_pytorch(exported, tiny_model, tmp_path):
    original = exported(*TEXT)
    artifact = export_model(str(original.model), task=TEXT[1], out=tmp_path / "out")
    report = validate_model(artifact, reference=str(tiny_model(*TEXT)))
    assert report.passed, report.summary
    assert "agree with PyTorch" in report.summary
    other = tmp_path / "other"
    shutil.copytree(tiny_model(*TEXT), other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "layer_norm_eps": 0.5}))
    assert not validate_model(artifact, reference=str(other)).passed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_abs_error": "nan"}, "'max_abs_error' is nan, expected a finite number"),
        ({"max_abs_error": -1}, "'max_abs_error' is -1"),
        ({"max_abs_error": "inf"}, "'max_abs_error' is inf"),
        ({"min_cosine": "nan"}, "'min_cosine' is nan"),
        ({"min_cosine": 1.5}, "'min_cosine' is 1.5, expected -1 to 1"),
        ({"rows": 0}, "'rows' is 0, expected 1 or more"),
        ({"seed": -1}, "'seed' is -1, expected 0 or more"),
    ],
)
def test_invalid_options_are_rejected(exported, options, message):
    with pytest.raises(OptionError, match=message):
        validate_model(exported(*TEXT), **options)


def test_unavailable_provider_is_an_error_without_a_verdict(exported, copied):
    artifact = copied(exported(*TEXT))
    with pytest.raises(ProviderError):
        validate_model(artifact, providers="nonsense")
    artifact.model.write_bytes(b"no graph")
    broken = Artifact(artifact.path, artifact.manifest)
    from enginery.core.artifact.artifact import commit_artifact

    commit_artifact(artifact.path, artifact.manifest)
    with pytest.raises(ArtifactError, match="is not an ONNX model, or a damaged one"):
        validate_model(broken.path)
    assert Artifact.open(artifact.path).manifest.verdicts == ()


def test_full_disk_is_an_error_with_a_remedy(exported, copied, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(EngineryError, match=r"No space left on device\..*TMPDIR"):
        validate_model(copied(exported(*TEXT)))


@pytest.mark.more
def test_memory_mapped_outputs_give_the_same_result(exported, copied, monkeypatch):
    from enginery.validate import reference

    before = validate_model(exported(*TEXT), effort="quick")
    monkeypatch.setattr(reference, "_IN_MEMORY_BYTES", 0)
    after = validate_model(copied(exported(*TEXT)), effort="quick")
    assert [case.outputs for case in after.cases] == [case.outputs for case in before.cases]

"""Graphs for CUDA end in the task's answer; what needs the raw outputs still gets them."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from enginery import export_model, load_model, validate_model
from enginery.core.artifact.artifact import commit_artifact
from enginery.optimize import stage
from enginery.optimize.config import OptimizeConfig
from enginery.runtime.onnxruntime.runner import OrtRunner

TEXTS = ["The engine is warm.", "A cat sleeps on the boat, under the tree.", "Rain."]


@pytest.fixture
def for_cuda(exported, tmp_path):
    """Return a function that optimizes a tiny model for CUDA."""

    def make(kind, task, **options):
        config = OptimizeConfig(target="cuda", **options)
        return stage.run(exported(kind, task), config, tmp_path / f"{kind}-{task}")

    return make


def watch_outputs(monkeypatch):
    """Return a list that receives the names of the outputs of each run."""
    names = []
    run = OrtRunner.__call__

    def watched(self, feeds, outputs=()):
        found = run(self, feeds, outputs)
        names.append(tuple(found))
        return found

    monkeypatch.setattr(OrtRunner, "__call__", watched)
    return names


@pytest.mark.parametrize("io_dtype", ["fp32", pytest.param("same", marks=pytest.mark.more)])
def test_vectors_are_pooled_in_the_graph(for_cuda, exported, monkeypatch, io_dtype):
    artifact = for_cuda("bert", "feature-extraction", io_dtype=io_dtype)
    *_, last = artifact.manifest.graphs[0].outputs
    assert str(last) == "sentence_embedding: float32 (batch, 32)"
    assert any("pooled by mean" in note for note in artifact.manifest.stages[-1].notes)
    expected = load_model(exported("bert", "feature-extraction")).embed(TEXTS)
    names = watch_outputs(monkeypatch)
    with load_model(artifact) as model:
        vectors = model.embed(TEXTS)
        units = model.embed(TEXTS, normalize=True)
    assert set(names) == {("sentence_embedding",)}
    np.testing.assert_allclose(vectors, expected, atol=2e-2)
    np.testing.assert_allclose(np.linalg.norm(units, axis=1), 1, rtol=1e-5)


def test_vectors_that_are_not_normalized_come_from_the_tokens(for_cuda, exported, monkeypatch):
    artifact = for_cuda("bert", "feature-extraction", precision="fp32")
    plain = load_model(exported("bert", "feature-extraction")).embed(TEXTS)
    names = watch_outputs(monkeypatch)
    with load_model(artifact) as model:
        # As if modules.json ended in a Normalize module.
        model.definition.pooling = replace(model.definition.pooling, normalize=True)
        raw = model.embed(TEXTS, normalize=False)
        assert set(names) == {("last_hidden_state",)}
    np.testing.assert_allclose(raw, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_validation_compares_the_pooling_of_the_graph(tiny_model, home, tmp_path):
    source = shutil.copytree(tiny_model("bert", "feature-extraction"), tmp_path / "source")
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    package = "sentence_transformers.models"
    listed = [{"path": path, "type": f"{package}.{kind}"} for path, kind in kinds.items()]
    (source / "modules.json").write_text(json.dumps(listed))
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling/config.json").write_text('{"pooling_mode_cls_token": true}')
    config = OptimizeConfig(target="cuda", precision="fp32")
    artifact = stage.run(export_model(str(source)), config, tmp_path / "pooled")
    report = validate_model(artifact.path, providers="cpu")
    assert report.passed, report.summary
    compared = {output.output for case in report.cases for output in case.outputs}
    assert compared == {"last_hidden_state", "sentence_embedding"}
    settings = artifact.path / "1_Pooling/config.json"
    settings.write_text('{"pooling_mode_mean_tokens": true}')
    commit_artifact(artifact.path, artifact.manifest)
    report = validate_model(artifact.path, providers="cpu")
    assert not report.passed
    assert "sentence_embedding" in report.summary


def test_scores_are_computed_in_the_graph(for_cuda, exported, monkeypatch):
    artifact = for_cuda("bert", "text-classification")
    *_, last = artifact.manifest.graphs[0].outputs
    assert str(last) == "scores: float32 (batch, 3)"
    expected = load_model(exported("bert", "text-classification"))
    names = watch_outputs(monkeypatch)
    with load_model(artifact) as model:
        for options, output in (({}, "scores"), ({"activation": "none"}, "logits")):
            wanted = expected.classify(TEXTS, **options)
            names.clear()
            results = model.classify(TEXTS, **options)
            assert set(names) == {(output,)}
            for mine, theirs in zip(results, wanted, strict=True):
                assert mine.label == theirs.label
                assert mine.score == pytest.approx(theirs.score, abs=2e-2)


@pytest.mark.more
@pytest.mark.parametrize("task", ["token-classification", "question-answering"])
def test_other_tasks_keep_their_outputs(for_cuda, exported, task):
    before = exported("bert", task).manifest.graphs[0].outputs
    assert for_cuda("bert", task).manifest.graphs[0].outputs == before


@pytest.mark.more
def test_the_artifact_opens_in_optimum(for_cuda):
    from optimum.onnxruntime import (
        ORTModelForFeatureExtraction,
        ORTModelForSequenceClassification,
    )
    from transformers import AutoTokenizer

    for task, kind, output in (
        ("feature-extraction", ORTModelForFeatureExtraction, "last_hidden_state"),
        ("text-classification", ORTModelForSequenceClassification, "logits"),
    ):
        path = for_cuda("bert", task).path
        model = kind.from_pretrained(path)
        inputs = AutoTokenizer.from_pretrained(path)(TEXTS, padding=True, return_tensors="pt")
        assert len(model(**inputs)[output]) == len(TEXTS)

"""Views of a task: the vectors of tokens, and sparse vectors over the vocabulary."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from enginery.core.artifact.artifact import Artifact
from enginery.core.errors import ArtifactError, InputError
from enginery.core.model.files import ModelConfig
from enginery.export.tasks import inferred_task
from enginery.runtime.model import load_model
from enginery.runtime.onnxruntime.runner import OrtRunner
from enginery.runtime.tasks.batch_runner import BatchRunner
from enginery.runtime.tasks.fill import Fill
from enginery.runtime.tasks.views import EmbedSparse, EmbedTokens
from tests.tiny import tiny_artifact
from tests.tolerances import LARGER, OUTPUTS

TEXTS = ["The engine is warm and the pump runs again.", "", "Nobody knows."]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return tiny_artifact("bert", "feature-extraction", tmp_path_factory.mktemp("views") / "encoder")


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    return tiny_artifact("bert", "fill-mask", tmp_path_factory.mktemp("views") / "masked")


def torch_outputs(artifact, kind, name):
    """The output of transformers' own model for each text by itself: (tokens, …)."""
    import torch
    import transformers

    source = artifact.manifest.source.id
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    model = getattr(transformers, kind).from_pretrained(source).eval()
    with torch.no_grad():
        return [model(**tokenizer(text, return_tensors="pt"))[name][0] for text in TEXTS]


def dense(vector, size=600):
    values = np.zeros(size, np.float32)
    values[vector.indices] = vector.values
    return values


def with_modules(masked, tmp_path, *modules, **pooling):
    """A copy of an artifact with the files of a SparseEncoder."""
    copy = tmp_path / "sparse"
    shutil.copytree(masked.path, copy)
    described = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}", "type": f"sentence_transformers.{kind}"}
        for i, kind in enumerate(modules)
    ]
    (copy / "modules.json").write_text(json.dumps(described))
    (copy / "1_SpladePooling").mkdir()
    (copy / "1_SpladePooling" / "config.json").write_text(json.dumps(pooling))
    return copy


def test_tokens_are_those_of_transformers(encoder):
    expected = torch_outputs(encoder, "AutoModel", "last_hidden_state")
    with load_model(encoder) as model:
        found = model.embed_tokens(TEXTS)
        dtypes = {vectors.dtype for vectors in found}
        with pytest.raises(InputError, match=r"embed_sparse\(\) was called"):
            model.embed_sparse(TEXTS)
    assert dtypes == {np.dtype(np.float32)}
    for vectors, tokens in zip(found, expected, strict=True):
        np.testing.assert_allclose(vectors, tokens.numpy(), atol=OUTPUTS, rtol=LARGER)


def test_tokens_of_ids_and_of_no_texts(encoder):
    with load_model(encoder) as model:
        (vectors,) = model.embed_tokens([[5, 6, 7]])
        assert vectors.shape == (5, 32)  # with the special tokens
        assert model.embed_tokens([]) == []


@pytest.mark.parametrize(
    ("strategy", "activation"), [("max", "relu"), ("sum", "relu"), ("max", "log1p_relu")]
)
def test_sparse_vectors_are_splades(masked, tmp_path, strategy, activation):
    """The formula is that of sentence-transformers' SpladePooling."""
    import torch

    weights = []
    for logits in torch_outputs(masked, "AutoModelForMaskedLM", "logits"):
        each = torch.log1p(torch.relu(logits))
        if activation == "log1p_relu":
            each = torch.log1p(each)
        weights.append((each.amax(0) if strategy == "max" else each.sum(0)).numpy())
    pooling = {"pooling_strategy": strategy, "activation_function": activation}
    path = with_modules(masked, tmp_path, "Transformer", "SpladePooling", **pooling)
    record = masked.manifest.graphs[0]
    task = Fill.open(Artifact(path, masked.manifest), record)
    view = EmbedSparse.over(task, masked)
    options = EmbedSparse.Options()
    with OrtRunner(masked, providers="cpu") as runner:
        work = view.preprocess(TEXTS, options)
        outputs = BatchRunner(task, runner).run_all(work.rows)
    for vector, expected in zip(view.postprocess(work, outputs, options), weights, strict=True):
        np.testing.assert_allclose(dense(vector), expected, atol=OUTPUTS, rtol=LARGER)
        assert (np.diff(vector.indices) > 0).all()
        assert (vector.values > 0).all()
        assert 0 < len(vector.indices) < 600


def test_only_the_largest_weights_are_kept(masked):
    with load_model(masked) as model:
        (whole,) = model.embed_sparse(TEXTS[:1])
        (kept,) = model.embed_sparse(TEXTS[:1], max_active_dims=7)
        assert model.fill(["The [MASK] is warm."])  # the task itself is as before
    assert len(kept.indices) == 7
    assert set(kept.values) == set(np.sort(whole.values)[-7:])
    assert (np.diff(kept.indices) > 0).all()


def test_modules_of_another_kind_make_no_sparse_vectors(masked, tmp_path):
    path = with_modules(masked, tmp_path, "Transformer", "Pooling")
    task = Fill.open(Artifact(path, masked.manifest), masked.manifest.graphs[0])
    view = EmbedSparse.over(task, masked)
    with pytest.raises(InputError, match=r"modules\.json has no SpladePooling"):
        view.preprocess(TEXTS, view.Options())


def test_unknown_pooling_is_an_error(masked, tmp_path):
    path = with_modules(masked, tmp_path, "Transformer", "SpladePooling", pooling_strategy="mean")
    with pytest.raises(ArtifactError, match="pooling_strategy is 'mean', expected max or sum"):
        Fill.open(Artifact(path, masked.manifest), masked.manifest.graphs[0])


def test_graph_that_pools_has_no_tokens(encoder):
    record = encoder.manifest.graphs[0]
    spec = record.outputs[0].__class__("sentence_embedding", "float32", ("batch", 32))
    pools = record.model_copy(update={"outputs": (spec,)})
    task = EmbedTokens.of.open(encoder, pools)
    view = EmbedTokens.over(task, encoder)
    with pytest.raises(InputError, match="has the outputs sentence_embedding, and none"):
        view.preprocess(TEXTS, view.Options())


def test_splade_models_are_for_fill_mask():
    assert inferred_task(ModelConfig(), ["Transformer", "SpladePooling"]) == "fill-mask"

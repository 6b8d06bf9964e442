"""Twelve architectures pass through every stage where transformers 5 is installed.

$ make test-transformers5
"""

import numpy as np
import pytest
from filelock import FileLock

from enginery import (
    build_engine,
    export_model,
    load_model,
    optimize_model,
    quantize_model,
    validate_model,
)
from enginery.core.artifact.engine_record import engine_directories
from enginery.runtime.tensorrt.library import has_tensorrt
from tests.environments import needs_transformers5
from tests.speech import save_whisper
from tests.tiny import TEXT

pytestmark = needs_transformers5

MODELS = {
    "bert": "text-classification",
    "distilbert": "feature-extraction",
    "roberta": "question-answering",
    "modernbert": "fill-mask",
    "deberta-v2": "token-classification",
    "gpt2": "text-generation-with-past",
    "qwen3": "text-generation",
    "t5": "text2text-generation-with-past",
    "whisper": "automatic-speech-recognition-with-past",
    "vit": "image-classification",
    "resnet": "image-classification",
    "audio-spectrogram-transformer": "audio-classification",
}
VALIDATED = ("bert", "modernbert", "deberta-v2", "qwen3", "vit", "audio-spectrogram-transformer")
"""Those that are compared as exported. The others are compared once they are optimized, served or
generate; tests/export/native compares all of them."""


IMAGES = np.random.default_rng(0).integers(0, 256, (16, 32, 32, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def graphs(tiny_model, shared_directory):
    """`graphs("bert")`: the artifact of an architecture, which the store keeps."""

    def make(kind):
        if kind == "whisper":
            source = shared_directory / "transformers5-whisper"
            with FileLock(f"{source}.lock"):
                if not source.is_dir():
                    save_whisper(source)
        else:
            source = tiny_model(kind, MODELS[kind].removesuffix("-with-past"))
        return export_model(str(source), task=MODELS[kind])

    return make


@pytest.mark.parametrize("kind", VALIDATED)
def test_graph_equals_pytorch(graphs, kind):
    artifact = graphs(kind)
    export = artifact.manifest.stages[0]
    assert export.options["exporter"] == "transformers"
    report = validate_model(artifact, effort="quick")
    assert report.passed, report.summary


@pytest.mark.parametrize("kind", ["modernbert", "whisper", "resnet"])
def test_graph_is_optimized(graphs, kind):
    artifact = optimize_model(graphs(kind), target="tensorrt", precision="fp16")
    assert artifact.manifest.precision == "fp16"


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_graph_generates(graphs, kind):
    with load_model(graphs(kind).path) as model:
        results = model.generate(list(TEXT[:2]), max_new_tokens=4)
    assert all(result.tokens for result in results)


def test_graph_is_fused_for_the_cpu(graphs):
    artifact = optimize_model(graphs("roberta"), target="cpu", precision="fp32")
    report = validate_model(artifact, effort="quick")
    assert report.passed, report.summary


@pytest.mark.skipif(not has_tensorrt(), reason="pip install 'enginery[tensorrt-rtx]'")
@pytest.mark.parametrize(
    ("kind", "rows", "profile"),
    [
        ("bert", TEXT, "batch=1:2:4,sequence=8:16:32"),
        ("vit", list(IMAGES), "batch=1:2:4"),
    ],
)
def test_graph_is_quantized_and_built(graphs, kind, rows, profile):
    quantized = quantize_model(graphs(kind), rows, min_cosine=0.9)
    assert quantized.manifest.is_quantized
    built = build_engine(quantized, profile=[profile], capability="8.9")
    assert len(engine_directories(built.path)) == 1


def test_graphs_are_served(graphs):
    pytest.importorskip("httpx")
    from enginery.serve.config import ServeConfig
    from tests.serve.conftest import Running

    names = ("bert", "distilbert", "gpt2")
    with Running(
        {name: graphs(name).path for name in names}, ServeConfig(access_log="off")
    ) as server:
        texts = list(TEXT[:3])
        answers = {
            "bert": server("POST", "/predict/bert", {"inputs": texts}),
            "distilbert": server(
                "POST", "/models/distilbert/embed", {"inputs": texts, "normalize": False}
            ),
            "gpt2": server("POST", "/generate/gpt2", {"inputs": texts[0]}),
        }
    assert {answer.status for answer in answers.values()} == {200}, answers
    with load_model(graphs("distilbert").path) as model:
        np.testing.assert_allclose(answers["distilbert"].json, model.embed(texts), atol=1e-5)

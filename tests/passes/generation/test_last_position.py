"""The logits of the last position."""

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from enginery import export_model
from enginery.core.model.feeds import FeedLimits, make_feeds
from enginery.passes.generation.last_position import keep_last_position
from enginery.passes.ir.graph_file import read_graph, write_graph
from enginery.passes.ir.nodes import infer_types


def run(path, feeds, names=None):
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = names or [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


@pytest.mark.more
@pytest.mark.parametrize(
    "kind",
    ["gpt2", "llama", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("opt", "qwen3"))],
)
def test_a_decoder_keeps_its_cache_and_the_last_logits(tiny_model, home, tmp_path, kind):
    source = str(tiny_model(kind, "text-generation"))
    artifact = export_model(source, task="text-generation-with-past", layout="optimum")
    model = read_graph(artifact.model)
    infer_types(model)
    assert keep_last_position(model)
    write_graph(model, tmp_path / "model.onnx")
    limits = FeedLimits.from_artifact(artifact)
    sizes = {"batch": 3, "sequence": 5, "past_sequence": 4}
    feeds = make_feeds(artifact.manifest.graphs[0].inputs, sizes, limits, seed=0)
    wanted = run(artifact.model, feeds)
    found = run(tmp_path / "model.onnx", feeds)
    last = wanted.pop("logits")[:, -1]
    np.testing.assert_allclose(found["logits"][:, 0], last, atol=1e-5)
    for name, cache in wanted.items():
        np.testing.assert_allclose(found[name], cache, atol=1e-5)


HEAD = """<ir_version: 9, opset_import: ["" : 20]>
g (float[b, s, 2] x) => (float[b, s, 3] logits) <
  float[2, 3] w = {1, -2, 3, -4, 5, -6}, float[3] bias = {1, 2, 3}, float cap = {2}>
"""


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("{ logits = MatMul (x, w) }", True),
        ("{ h = MatMul (x, w)  logits = Add (bias, h) }", True),
        ("{ h = MatMul (x, w)  d = Div (h, cap)  t = Tanh (d)  logits = Mul (t, cap) }", True),
        ("{ h = MatMul (x, w)  logits = Softmax <axis = 1> (h) }", False),
        ("{ h = MatMul (x, w)  logits = Add (h, h) }", False),
    ],
)
def test_heads_are_found_through_what_treats_positions_alike(tmp_path, body, found):
    model = ir.from_onnx_text(HEAD + body)
    write_graph(model, tmp_path / "before.onnx")
    infer_types(model)
    assert keep_last_position(model) == found
    write_graph(model, tmp_path / "after.onnx")
    feeds = {"x": np.random.default_rng(0).normal(size=(2, 4, 2)).astype(np.float32)}
    wanted = run(tmp_path / "before.onnx", feeds)["logits"][:, -1:]
    np.testing.assert_allclose(run(tmp_path / "after.onnx", feeds)["logits"], wanted, atol=1e-6)
    assert str(model.graph.outputs[0].shape) == "[b,1,3]"

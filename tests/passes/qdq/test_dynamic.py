"""Dynamic quantization of graphs that ONNX Runtime's quantizer rejects."""

import numpy as np
import onnx
import onnxruntime as ort

from enginery.passes.qdq.dynamic import count_integer_nodes, quantize_dynamically

GRAPH = """<ir_version: 10, opset_import: ["" : 20]>
g (float[1, 2, 8] x) => (float[1, 2, 8] y) <float[2, 2, 1] w, float[2] b, float[2, 1, 1] size> {
    computed = Mul(w, size)
    first = Conv(x, w, b)
    y = Conv(first, computed, b)
}"""


def test_a_convolution_with_computed_weights_stays_fp32(tmp_path):
    model = onnx.parser.parse_model(GRAPH)
    draw = np.random.default_rng(0)
    del model.graph.initializer[:]
    for name, shape in (("w", (2, 2, 1)), ("b", (2,)), ("size", (2, 1, 1))):
        values = draw.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    for index, node in enumerate(model.graph.node):
        node.name = f"node-{index}"
    onnx.save(model, tmp_path / "fp32.onnx")
    quantize_dynamically(tmp_path / "fp32.onnx", tmp_path / "int8.onnx")
    assert count_integer_nodes(tmp_path / "int8.onnx") == {"ConvInteger": 1}
    x = draw.standard_normal((1, 2, 8)).astype(np.float32)
    expected, found = (
        ort.InferenceSession(tmp_path / name).run(None, {"x": x})[0]
        for name in ("fp32.onnx", "int8.onnx")
    )
    np.testing.assert_allclose(found, expected, atol=0.05 * np.abs(expected).max())

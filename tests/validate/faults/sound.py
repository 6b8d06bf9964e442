"""Graphs that compute the same as the sound one in another way: none may fail the verdict."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper, version_converter

from tests.validate.faults.fault import ALL, FLOATS, cast_through
from tests.validate.faults.graph_editor import GraphEditor, set_attribute
from tests.validate.faults.quantized import activations, unsigned
from tests.validate.faults.text import mask_of
from tests.validate.faults.transformer import EVERY, attention, erf_gelu, layer_norm, manual_softmax

Change = Callable[[onnx.ModelProto], onnx.ModelProto | None]
EVERY_MODEL = ("text", "vit", "resnet")
TRANSFORMERS = ("text", "vit")
HEAD_WIDTH = 32
"""Features of a head, in both transformers."""


@dataclass(frozen=True)
class SoundGraph:
    """One rewriting of a graph that keeps what it computes."""

    name: str
    change: Change
    precisions: tuple[str, ...] = ALL
    models: tuple[str, ...] = EVERY_MODEL
    external_data: bool = False


def edited(*edits: Callable[[GraphEditor], object]) -> Change:
    def change(model: onnx.ModelProto) -> None:
        editor = GraphEditor(model)
        for edit in edits:
            edit(editor)
        editor.finish()

    return change


def optimized(level: ort.GraphOptimizationLevel) -> Change:
    """Save what ONNX Runtime makes of the graph for the CPU."""

    def change(model: onnx.ModelProto) -> onnx.ModelProto:
        options = ort.SessionOptions()
        options.graph_optimization_level = level
        options.log_severity_level = 4
        with tempfile.TemporaryDirectory() as folder:
            options.optimized_model_filepath = str(Path(folder, "optimized.onnx"))
            ort.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
            return onnx.load(options.optimized_model_filepath)

    return change


def newer_opset(version: int) -> Change:
    return lambda model: version_converter.convert_version(model, version)


def older_opset(version: int) -> Change:
    """Write the graph with the operators of an older opset."""

    def change(model: onnx.ModelProto) -> None:
        g = GraphEditor(model)
        _erf_everywhere(g)
        if version < 17:
            _norms_from_formula(g)
        g.finish()
        for node in model.graph.node:
            if version < 18 and node.op_type == "ReduceMean" and len(node.input) == 2:
                axes = g.array(node.input[1])
                del node.input[1:]
                set_attribute(node, "axes", axes.tolist())
        for entry in model.opset_import:
            if not entry.domain:
                entry.version = version

    return change


def _erf_everywhere(g: GraphEditor) -> None:
    for node in g.nodes(op="Gelu"):
        result = erf_gelu(g, node.input[0])
        g.replace(node.output[0], lambda _, result=result: result)


def _norms_from_formula(g: GraphEditor) -> None:
    for name in [node.name for node in g.nodes(op="LayerNormalization")]:
        layer_norm(g, f"^{name}")


def _norms_in_float32(g: GraphEditor) -> None:
    for node in g.nodes(op="LayerNormalization"):
        for index, name in enumerate(node.input):
            node.input[index] = g.op("Cast", name, to=TensorProto.FLOAT)
        g.replace(node.output[0], lambda x: g.op("Cast", x, to=TensorProto.FLOAT16))


def commuted(operation: str) -> Callable[[GraphEditor], None]:
    def edit(g: GraphEditor) -> None:
        for node in g.nodes(op=operation):
            node.input[0], node.input[1] = node.input[1], node.input[0]

    return edit


def around(operation: str, build: Callable[[GraphEditor, str], str]):
    """Pass the outputs of all nodes of one operator through something that changes nothing."""

    def edit(g: GraphEditor) -> None:
        for node in g.nodes(op=operation):
            g.replace(node.output[0], lambda x: build(g, x))

    return edit


def _there_and_back(g: GraphEditor, x: str) -> str:
    order = [1, 0]
    rank_2 = g.op("Reshape", x, g.op("Concat", g.constant(np.int64([-1])), _width(g, x), axis=0))
    swapped = g.op("Transpose", rank_2, perm=order)
    return g.op("Reshape", g.op("Transpose", swapped, perm=order), g.op("Shape", x))


def _width(g: GraphEditor, x: str) -> str:
    return g.op("Slice", g.op("Shape", x), np.int64([-1]), np.int64([np.iinfo(np.int64).max]))


def renamed_nodes(model: onnx.ModelProto) -> None:
    for index, node in enumerate(model.graph.node):
        node.name = f"node_{index}"


def renamed_values(model: onnx.ModelProto) -> None:
    ends = {value.name for value in (*model.graph.input, *model.graph.output)}
    names: dict[str, str] = {"": ""}

    def new(name: str) -> str:
        return name if name in ends else names.setdefault(name, f"v{len(names)}")

    for tensor in model.graph.initializer:
        tensor.name = new(tensor.name)
    for node in model.graph.node:
        node.input[:] = [new(name) for name in node.input]
        node.output[:] = [new(name) for name in node.output]
    del model.graph.value_info[:]


def initializers_reversed(model: onnx.ModelProto) -> None:
    tensors = list(reversed([_copy(tensor) for tensor in model.graph.initializer]))
    del model.graph.initializer[:]
    model.graph.initializer.extend(tensors)


def _copy(tensor: TensorProto) -> TensorProto:
    held = TensorProto()
    held.CopyFrom(tensor)
    return held


def initializers_as_constants(model: onnx.ModelProto) -> None:
    nodes = [
        helper.make_node("Constant", [], [tensor.name], value=tensor)
        for tensor in model.graph.initializer
        if len(tensor.raw_data) < 1 << 20
    ]
    names = {node.output[0] for node in nodes}
    kept = [_copy(tensor) for tensor in model.graph.initializer if tensor.name not in names]
    others = [helper.make_node("Identity", ["x"], ["y"]) for _ in model.graph.node]
    for other, node in zip(others, model.graph.node, strict=True):
        other.CopyFrom(node)
    del model.graph.node[:]
    model.graph.node.extend([*nodes, *others])
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)


def constants_as_initializers(model: onnx.ModelProto) -> None:
    for node in [node for node in model.graph.node if node.op_type == "Constant"]:
        array = numpy_helper.to_array(node.attribute[0].t)
        model.graph.initializer.append(numpy_helper.from_array(array, node.output[0]))
        model.graph.node.remove(node)


def described(model: onnx.ModelProto) -> None:
    model.producer_name = "another exporter"
    model.doc_string = "the same graph"
    model.graph.name = "main"
    helper.set_model_props(model, {"note": "none"})


def _key_bias_dropped(g: GraphEditor) -> None:
    for node in g.nodes(attention("key/Add", EVERY)):
        bias = next(name for name in node.input if g.array(name) is not None)
        g.change_array(bias, np.zeros_like)


def _scaled_scores(g: GraphEditor) -> None:
    """Scale the scores alone, in place of query and key."""
    for layer in _layers(g):
        query, key = (g.node(attention(name, layer)) for name in ("Mul", "Mul_1"))
        scale_1, scale_2 = query.input[1], key.input[1]
        g.replace(query.output[0], lambda _, node=query: node.input[0])
        g.replace(key.output[0], lambda _, node=key: node.input[0])
        g.replace(
            g.node(attention("MatMul", layer)).output[0],
            lambda x, a=scale_1, b=scale_2: g.op("Mul", x, g.op("Mul", a, b)),
        )


def _scaled_query(g: GraphEditor) -> None:
    """Scale the query alone, by both factors."""
    for layer in _layers(g):
        query, key = (g.node(attention(name, layer)) for name in ("Mul", "Mul_1"))
        query.input[1] = g.op("Mul", query.input[1], key.input[1])
        g.replace(key.output[0], lambda _, node=key: node.input[0])


def _layers(g: GraphEditor) -> range:
    return range(len(g.nodes(attention("Softmax", EVERY))))


def _transposed_weights(g: GraphEditor) -> None:
    for node in g.nodes(op="MatMul"):
        matrix = g.array(node.input[1])
        if matrix is not None:
            node.input[1] = g.op("Transpose", g.constant(matrix.T.copy()), perm=[1, 0])


def _as_gemm(g: GraphEditor) -> None:
    for node in g.nodes(op="MatMul"):
        matrix = g.array(node.input[1])
        if matrix is None:
            continue
        x = node.input[0]
        flat = g.op("Reshape", x, np.int64([-1, matrix.shape[0]]))
        product = g.op("Gemm", flat, g.constant(matrix.T.copy()), transB=1)
        lead = g.op("Slice", g.op("Shape", x), np.int64([0]), np.int64([-1]))
        shape = g.op("Concat", lead, g.constant(np.int64([matrix.shape[1]])), axis=0)
        result = g.op("Reshape", product, shape)
        g.replace(node.output[0], lambda _, result=result: result)


def _one_product_for_three(g: GraphEditor) -> None:
    """Multiply with the weights of query, key and value in one MatMul."""
    for layer in _layers(g):
        nodes = [g.node(attention(f"{n}/MatMul", layer)) for n in ("query", "key", "value")]
        joined = g.constant(np.concatenate([g.array(node.input[1]) for node in nodes], axis=1))
        parts = g.op(
            "Split", g.op("MatMul", nodes[0].input[0], joined), outputs=3, axis=-1, num_outputs=3
        )
        for node, part in zip(nodes, parts, strict=True):
            g.replace(node.output[0], lambda _, part=part: part)


def _two_sums(g: GraphEditor) -> None:
    """Add up two halves of each product of the feed-forward layers."""
    for node in g.nodes(r"layer\.\d+/output/dense/MatMul"):
        matrix = g.array(node.input[1])
        halves = np.array_split(np.arange(matrix.shape[0]), 2)
        first, second = (
            g.op("MatMul", g.op("Gather", node.input[0], h, axis=-1), g.constant(matrix[h]))
            for h in halves
        )
        g.replace(node.output[0], lambda _, a=first, b=second: g.op("Add", a, b))


def _scale_in_weights(g: GraphEditor) -> None:
    """Fold the scale of the scores into the query's weight and bias."""
    for layer in _layers(g):
        for name in (attention("query/MatMul", layer), attention("query/Add", layer)):
            node = g.node(name)
            constant = next(n for n in node.input if g.array(n) is not None)
            g.change_array(constant, lambda a: a / np.sqrt(HEAD_WIDTH))
        for name in ("Mul", "Mul_1"):
            g.bypass(attention(name, layer))


def _bias_added_apart(g: GraphEditor) -> None:
    for node in g.nodes(op="Conv"):
        bias = g.array(node.input[2])
        del node.input[2]
        column = bias.reshape(1, -1, 1, 1)
        name = g.constant(column)
        g.replace(node.output[0], lambda x, name=name: g.op("Add", x, name))


def _padded_apart(g: GraphEditor) -> None:
    for node in g.nodes(op="Conv"):
        pads = next((list(a.ints) for a in node.attribute if a.name == "pads"), [0] * 4)
        if any(pads):
            wide = np.int64([0, 0, *pads[:2], 0, 0, *pads[2:]])
            node.input[0] = g.op("Pad", node.input[0], g.constant(wide))
            set_attribute(node, "pads", [0, 0, 0, 0])


def _mean_for_pool(g: GraphEditor) -> None:
    node = g.node("GlobalAveragePool")
    mean = g.op("ReduceMean", node.input[0], np.int64([2, 3]))
    g.replace(node.output[0], lambda _: mean)


def _maximum_for_relu(g: GraphEditor) -> None:
    for node in g.nodes(op="Relu"):
        result = g.op("Max", node.input[0], 0.0)
        g.replace(node.output[0], lambda _, result=result: result)


def _product_for_gemm(g: GraphEditor) -> None:
    node = g.node("classifier.*/Gemm")
    product = g.op("MatMul", node.input[0], g.op("Transpose", node.input[1], perm=[1, 0]))
    result = g.op("Add", product, node.input[2])
    g.replace(node.output[0], lambda _: result)


def _one_dequantize_each(g: GraphEditor) -> None:
    for quantize in activations(g):
        for node in g.consumers(quantize.output[0]):
            for reader in g.consumers(node.output[0])[1:]:
                own = g.op("DequantizeLinear", *node.input)
                reader.input[list(reader.input).index(node.output[0])] = own


def _smoothing_divided(g: GraphEditor) -> None:
    """Divide by the inverse of each smoothing vector."""
    for node in g.nodes(".*/scale_channels"):
        factors = g.array(node.input[1])
        inverse = g.constant((1 / factors.astype(np.float32)).astype(factors.dtype))
        result = g.op("Div", node.input[0], inverse)
        g.replace(node.output[0], lambda _, result=result: result)


def _unused_node(g: GraphEditor) -> None:
    g.finish()
    g.op("Shape", g.graph.input[0].name)


def _in_double(g: GraphEditor, x: str) -> str:
    return cast_through(TensorProto.DOUBLE)(g, x)


_LEVELS = ort.GraphOptimizationLevel

SOUND_GRAPHS: list[SoundGraph] = [
    SoundGraph("saved again", lambda model: None),
    SoundGraph("external data", lambda model: None, external_data=True),
    SoundGraph("optimized by ONNX Runtime, basic", optimized(_LEVELS.ORT_ENABLE_BASIC)),
    SoundGraph("optimized by ONNX Runtime, extended", optimized(_LEVELS.ORT_ENABLE_EXTENDED)),
    *[SoundGraph(f"opset {version}", newer_opset(version)) for version in (21, 22, 23)],
    SoundGraph("opset 19", older_opset(19)),
    *[SoundGraph(f"opset {v}", older_opset(v), FLOATS) for v in (18, 17)],
    *[SoundGraph(f"opset {v}", older_opset(v), FLOATS, TRANSFORMERS) for v in (16, 15)],
    SoundGraph("nodes renamed", renamed_nodes),
    SoundGraph("values renamed", renamed_values),
    SoundGraph("initializers reversed", initializers_reversed),
    SoundGraph("initializers as constants", initializers_as_constants),
    SoundGraph("constants as initializers", constants_as_initializers),
    SoundGraph("nodes in another order", edited()),
    SoundGraph("another producer", described),
    SoundGraph("a node that nothing reads", edited(_unused_node)),
    SoundGraph("sums commuted", edited(commuted("Add"))),
    SoundGraph("products commuted", edited(commuted("Mul")), models=TRANSFORMERS),
    SoundGraph("identities", edited(around("Add", lambda g, x: g.op("Identity", x)))),
    SoundGraph("dropout at inference", edited(around("Add", lambda g, x: g.op("Dropout", x)))),
    SoundGraph("through double precision", edited(around("Add", _in_double)), ("fp32",)),
    SoundGraph(
        "sums of nothing",
        edited(around("Add", lambda g, x: g.op("Add", x, 0.0))),
        models=EVERY_MODEL,
    ),
    SoundGraph(
        "products by one",
        edited(around("MatMul", lambda g, x: g.op("Mul", x, 1.0))),
        models=TRANSFORMERS,
    ),
    SoundGraph(
        "reshaped there and back", edited(around("Gelu", _there_and_back)), models=TRANSFORMERS
    ),
    SoundGraph("norms from their formula", edited(_norms_from_formula), ("fp32",), TRANSFORMERS),
    SoundGraph("norms in FP32", edited(_norms_in_float32), ("fp16",), TRANSFORMERS),
    SoundGraph("GELU from its formula", edited(_erf_everywhere), models=TRANSFORMERS),
    SoundGraph(
        "softmax from its formula",
        edited(lambda g: manual_softmax(g, attention("Softmax", EVERY), subtract=True)),
        models=TRANSFORMERS,
    ),
    SoundGraph("key bias dropped", edited(_key_bias_dropped), models=TRANSFORMERS),
    SoundGraph("scores scaled", edited(_scaled_scores), models=TRANSFORMERS),
    SoundGraph("query scaled", edited(_scaled_query), models=TRANSFORMERS),
    SoundGraph("scale folded into weights", edited(_scale_in_weights), FLOATS, TRANSFORMERS),
    SoundGraph("weights transposed", edited(_transposed_weights), FLOATS, TRANSFORMERS),
    SoundGraph("Gemm for MatMul", edited(_as_gemm), FLOATS, TRANSFORMERS),
    SoundGraph("one product for three", edited(_one_product_for_three), FLOATS, TRANSFORMERS),
    SoundGraph("sums of two halves", edited(_two_sums), FLOATS, TRANSFORMERS),
    SoundGraph("mask of -10000", edited(mask_of(-1e4)), models=("text",)),
    SoundGraph("mask of -30000", edited(mask_of(-3e4)), models=("text",)),
    SoundGraph("mask of -1e9", edited(mask_of(-1e9)), ("fp32",), ("text",)),
    SoundGraph("mask not expanded", edited(lambda g: g.bypass("^/Expand")), models=("text",)),
    SoundGraph("bias of convolutions apart", edited(_bias_added_apart), models=("vit", "resnet")),
    SoundGraph("padding apart", edited(_padded_apart), FLOATS, models=("resnet",)),
    SoundGraph("mean for the average pool", edited(_mean_for_pool), models=("resnet",)),
    SoundGraph("maximum for ReLU", edited(_maximum_for_relu), models=("resnet",)),
    SoundGraph("MatMul for Gemm", edited(_product_for_gemm), models=("vit", "resnet")),
    SoundGraph("one DequantizeLinear each", edited(_one_dequantize_each), ("int8",)),
    SoundGraph("activation in uint8", edited(unsigned(128)), ("int8",)),
    SoundGraph("smoothing divided", edited(_smoothing_divided), ("int8",), TRANSFORMERS),
]

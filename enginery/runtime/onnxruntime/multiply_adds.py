"""Count the multiply-adds of a graph's nodes on one input.

    work = profile_multiply_adds(artifact.model, feeds)
    sum(node.multiply_adds for node in work.values())    # 1327104

The graph runs once on the CPU without fusions, under ONNX Runtime's profiler, which reports the
shape of every tensor. So dynamic dims need no shape inference. Matrix products, convolutions and
attention are counted; elementwise ops have no multiply-adds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from enginery.core.artifact.external_data import load_graph
from enginery.core.errors import InputError
from enginery.core.scratch import temporary_directory
from enginery.core.trust.resource_limits import ResourceLimits, limited_call
from enginery.runtime.onnxruntime.capture_lock import CAPTURE_LOCK

Shape = tuple[int, ...]

# Largest tensor that ONNX Runtime's GPU providers compute on the CPU. Source:
# kSmallInitializerThreshold in core/framework/fallback_cpu_capability.cc.
_SMALL = 100
_WHOLE = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")

SHAPE_OPS = frozenset(
    {
        "Add",
        "And",
        "Cast",
        "Ceil",
        "Concat",
        "Constant",
        "ConstantOfShape",
        "Div",
        "Equal",
        "Expand",
        "Flatten",
        "Floor",
        "Gather",
        "GatherElements",
        "GatherND",
        "Greater",
        "GreaterOrEqual",
        "Identity",
        "Less",
        "LessOrEqual",
        "Max",
        "Min",
        "Mod",
        "Mul",
        "Neg",
        "Not",
        "Or",
        "Range",
        "ReduceMax",
        "ReduceMin",
        "ReduceProd",
        "ReduceSum",
        "Reshape",
        "Shape",
        "Size",
        "Slice",
        "Split",
        "Squeeze",
        "Sub",
        "Tile",
        "Transpose",
        "Unsqueeze",
        "Where",
        "Xor",
    }
)
"""Ops that compute shapes, if their outputs are small and of an integer type.

ONNX Runtime places such nodes on the CPU on purpose, although a GPU provider could run them
(onnxruntime issue 17930; `GetCpuPreferredNodes`). The CPU needs their results to allocate memory,
and would have to wait for the GPU otherwise.
"""


@dataclass(frozen=True)
class NodeWork:
    """The work of one node."""

    op_type: str
    multiply_adds: int
    for_shapes: bool
    """True if it is one of `SHAPE_OPS` and all outputs are small and of an integer type."""


def profile_multiply_adds(model: Path, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NodeWork]:
    """Return the work of each node on these feeds, by name; an unnamed node is `unnamed_7`.

    ONNX Runtime's placement does not list such names, so their work belongs to no provider. Only
    the last iteration of a loop counts.

    Raises:
        InputError: the CPU cannot run the graph on the feeds: it lacks a kernel (bfloat16, an
            engine), or the feeds are wrong.
    """
    graph = load_graph(model)
    for number, node in enumerate(_nodes(graph.graph, {})):
        # The profiler reports nodes by name only.
        node.name = node.name or f"unnamed_{number}"
    types, shapes = _profiled(graph.SerializeToString(), model.parent, feeds)
    tensor_shapes: dict[str, Shape] = {name: array.shape for name, array in feeds.items()}
    nodes = list(_nodes(graph.graph, tensor_shapes))
    # An input's shape is known from the output that it comes from.
    for node in nodes:
        names = (name for name in node.output if name)
        tensor_shapes.update(zip(names, shapes.get(node.name, ()), strict=False))
    work = {}
    for node in nodes:
        # Nodes of a branch that was not taken have no shapes, and no work.
        if node.name not in shapes:
            continue
        outputs = shapes[node.name]
        small = all(math.prod(shape) <= _SMALL for shape in outputs)
        integral = all(dtype in _WHOLE for dtype in types[node.name])
        work[node.name] = NodeWork(
            node.op_type,
            multiply_adds(
                node.op_type, [tensor_shapes.get(name, ()) for name in node.input], outputs
            ),
            node.op_type in SHAPE_OPS and small and integral,
        )
    return work


def multiply_adds(op_type: str, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Return the multiply-adds of a node with these shapes; 0 for an op that is not counted."""
    count = _COUNTED.get(op_type)
    if count is None or not inputs or not outputs:
        return 0
    try:
        return count(list(inputs), outputs[0])
    except (IndexError, ZeroDivisionError):  # an unusual optional input
        return 0


def _matmul(inputs: list[Shape], output: Shape) -> int:
    """Count output elements times the summed dim, whichever operand is transposed."""
    left, right = inputs[0], inputs[1] if len(inputs) > 1 else ()
    if len(left) < 2:
        return math.prod(output) * math.prod(left)
    if len(right) == 1:
        return math.prod(output) * right[0]
    # The left operand may be transposed, so the summed dim is what remains of its elements.
    inner = math.prod(left) // (math.prod(left[:-2]) * output[-2])
    return math.prod(output) * inner


def _quantized_matmul(inputs: list[Shape], output: Shape) -> int:
    """Count QLinearMatMul and QGemm, in which a scale and a zero point follow each operand."""
    return _matmul([inputs[0], inputs[3]], output)


def _convolution(weight: int) -> Callable[[list[Shape], Shape], int]:
    """Count output elements times the size of the kernel over the channels of a group."""
    # Weights are (output channels, input channels of a group, kernel …).
    return lambda inputs, output: math.prod(output) * math.prod(inputs[weight][1:])


def _transposed_convolution(inputs: list[Shape], _output: Shape) -> int:
    """Count input elements times the size of the kernel over the output channels of a group."""
    # Weights are (input channels, output channels of a group, kernel …).
    return math.prod(inputs[0]) * math.prod(inputs[1][1:])


def _projected_attention(inputs: list[Shape], output: Shape) -> int:
    """Count com.microsoft::Attention: projection of (B, S, H) by (H, 3H), then attention."""
    batch, sequence, hidden = inputs[0]
    projection = batch * sequence * hidden * inputs[1][1]
    return projection + 2 * batch * sequence * sequence * output[-1]


def _attention(inputs: list[Shape], _output: Shape) -> int:
    """Count queries times keys and weights times values, (B, S, H) or (B, heads, S, H / heads).

    A packed query contains its keys. Past keys in separate inputs are not counted.
    """
    query = inputs[0]
    keys = inputs[1] if len(inputs) > 1 and inputs[1] else query
    if len(query) == 5:  # packed: (B, S, heads, 3, H / heads)
        batch, sequence, heads, _, size = query
        return 2 * batch * sequence * sequence * heads * size
    length = keys[-2]
    return 2 * math.prod(query) * length


_COUNTED: dict[str, Callable[[list[Shape], Shape], int]] = {
    **dict.fromkeys(
        (
            "MatMul",
            "Gemm",
            "FusedMatMul",
            "FusedGemm",
            "TransposeMatMul",
            "FusedMatMulActivation",
            "MatMulInteger",
            "MatMulIntegerToFloat",
            "DynamicQuantizeMatMul",
            "MatMulNBits",
        ),
        _matmul,
    ),
    **dict.fromkeys(("QLinearMatMul", "QGemm"), _quantized_matmul),
    **dict.fromkeys(
        ("Conv", "FusedConv", "NhwcFusedConv", "NhwcConv", "ConvInteger"), _convolution(1)
    ),
    "QLinearConv": _convolution(3),
    "ConvTranspose": _transposed_convolution,
    # ONNX and com.microsoft both have an Attention: the second input of the latter is a matrix of
    # weights, and that of the former the keys, of rank 3 or 4.
    "Attention": lambda i, o: _attention(i, o) if len(i[1]) > 2 else _projected_attention(i, o),
    "QAttention": _projected_attention,
    **dict.fromkeys(
        ("MultiHeadAttention", "GroupQueryAttention", "PackedMultiHeadAttention"), _attention
    ),
}


def _profiled(
    model: bytes, directory: Path, feeds: Mapping[str, NDArray[Any]]
) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[Shape, ...]]]:
    """Return the types and the shapes of each node's outputs, by node name."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4  # errors come back as exceptions
    # Without optimization the nodes are those of the file, by their names.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    # A model that is passed as bytes has no folder, where its external data would be found.
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(directory.resolve())
    )

    def limits() -> ResourceLimits:
        files = sum(file.stat().st_size for file in directory.iterdir() if file.is_file())
        return ResourceLimits.of_run(len(model) + files, feeds)

    with temporary_directory("profile") as scratch:
        try:
            events = profiled_run(
                lambda: ort.InferenceSession(model, options, providers=["CPUExecutionProvider"]),
                options,
                feeds,
                scratch,
                limits=limits,
            )
        except Exception as error:  # ONNX Runtime raises many unrelated types
            raise InputError(f"the CPU does not run the graph: {error}") from error
    types, shapes = {}, {}
    for name, event in events:
        typed = [
            (dtype, tuple(shape))
            for entry in event.get("output_type_shape", ())
            for dtype, shape in entry.items()
        ]
        types[name] = tuple(dtype for dtype, _ in typed)
        shapes[name] = tuple(shape for _, shape in typed)
    return types, shapes


def profiled_run(
    open_session: Callable[[], Any],
    options: Any,
    feeds: Mapping[str, NDArray[Any]],
    scratch: Path,
    *,
    limits: Callable[[], ResourceLimits],
) -> list[tuple[str, dict[str, Any]]]:
    """Run once under ONNX Runtime's profiler; return (node name, arguments) of each kernel event.

    Args:
        open_session: opens the session with `options`, after profiling is switched on in them.
        options: an `onnxruntime.SessionOptions`.
        feeds: an array for each input.
        scratch: empty directory for the profile.
        limits: returns what the run may take.
    """
    options.enable_profiling = True
    options.profile_file_prefix = str(scratch / "run")
    session = open_session()
    with (
        CAPTURE_LOCK.running(),
        limited_call("the graph", limits),
    ):
        session.run(None, dict(feeds))
    events = json.loads(Path(session.end_profiling()).read_bytes())
    return [
        (event["name"].removesuffix("_kernel_time"), event["args"])
        for event in events
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")
    ]


def _nodes(graph: Any, shapes: dict[str, Shape]) -> Iterator[Any]:
    """Yield all nodes, including subgraphs, and add the shapes of stored tensors to `shapes`."""
    for tensor in graph.initializer:
        shapes[tensor.name] = tuple(tensor.dims)
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _nodes(inner, shapes)
            # The profiler does not report constants, which have become initializers.
            if node.op_type == "Constant" and attribute.name == "value":
                shapes[node.output[0]] = tuple(attribute.t.dims)

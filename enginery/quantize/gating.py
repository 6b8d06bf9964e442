"""One graph in which each layer runs in FP32 or quantized, as a switch of its own says.

Takes an FP32 model with the layers' ranges; leaves an ONNX Runtime session on a graph with one
boolean input more for each layer.

    >>> with GatedModel(artifact.model, layers, ranges, deltas) as gated:
    ...     gated(feeds, ["/encoder/layer.0/output/dense/MatMul"])["last_hidden_state"].shape
    (8, 17, 384)

So that the effect of any mix on the final answers is one run, without another session. The
quantized layers are simulated: weights and activations are rounded and multiplied in FP32.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from enginery.core.closing import Closing
from enginery.core.errors import InputError
from enginery.core.feeds import Feeds
from enginery.passes.graph_file import read_graph, write_graph
from enginery.passes.layers import Layer, operands
from enginery.passes.nodes import infer_types
from enginery.passes.qdq import (
    ActivationQuantParams,
    bias_shift,
    fake_quantize_weight,
    scale_weight,
)
from enginery.passes.scheme import INT8, Scheme, Vector
from enginery.runtime.providers.selection import choose_providers
from enginery.runtime.tracing import open_in_memory


class GatedModel(Closing):
    """The session. A context manager; closing frees it and its temporary files."""

    def __init__(
        self,
        model: Path,
        layers: Sequence[Layer],
        ranges: Mapping[str, ActivationQuantParams],
        bias_deltas: Mapping[str, Vector],
        scheme: Scheme = INT8,
    ) -> None:
        """Opens the session.

        Args:
        model: the FP32 graph's file.
        layers: those with a switch.
        ranges: by activation.
        bias_deltas: by layer, what its bias gets beside its offset when the layer is quantized.
        scheme: the type of quantized numbers.
        """
        self._scratch = tempfile.TemporaryDirectory(prefix="enginery-gated-")
        self._gates = {layer.name: f"gate_{index}" for index, layer in enumerate(layers)}
        graph = read_graph(model)
        infer_types(graph)
        self.outputs = [value.name or "" for value in graph.graph.outputs]
        _gate(graph, layers, ranges, bias_deltas, self._gates, scheme)
        path = Path(self._scratch.name, "gated.onnx")
        write_graph(graph, path, max_inline_bytes=0)
        self._session: Any = open_in_memory(
            path.read_bytes(),
            path.parent,
            choose_providers(["cpu"]),
            optimized=scheme.supports_fusions,
        )

    def __call__(self, feeds: Feeds, quantized: Collection[str]) -> dict[str, NDArray[Any]]:
        """The graph's outputs with the layers named quantized and all others in FP32."""
        switches = {gate: np.asarray(name in quantized) for name, gate in self._gates.items()}
        try:
            values = self._session.run(self.outputs, {**feeds, **switches})
        except Exception as error:  # ONNX Runtime raises many unrelated types
            raise InputError(f"the graph fails on the calibration inputs: {error}") from error
        return dict(zip(self.outputs, values, strict=True))

    def close(self) -> None:
        """Frees the session and its files."""
        self._session = None
        self._scratch.cleanup()


def _gate(
    model: ir.Model,
    layers: Sequence[Layer],
    ranges: Mapping[str, ActivationQuantParams],
    bias_deltas: Mapping[str, Vector],
    gates: Mapping[str, str],
    scheme: Scheme,
) -> None:
    """Replaces each layer by an If with the layer as it is and the layer quantized."""
    nodes = {node.name: node for node in model.graph}
    for layer in layers:
        node, ready = nodes[layer.name], ranges[layer.activation]
        gate = ir.Value(name=gates[layer.name], shape=ir.Shape([]), type=_type(ir.DataType.BOOL))
        model.graph.inputs.append(gate)
        weight = scale_weight(layer, operands(node)[1], ready)
        rounded = fake_quantize_weight(layer, weight, scheme)
        delta = bias_shift(layer, weight, ready)
        if layer.name in bias_deltas:
            delta = delta + bias_deltas[layer.name]
        delta = delta.reshape((-1, 1, 1) if layer.op_type == "Conv" else (-1,))
        stem = gates[layer.name]
        branches = {
            "then_branch": _quantized_branch(stem, node, ready, rounded, delta, scheme),
            "else_branch": _branch(f"{stem}_fp32", [_copy(node, node.inputs)]),
        }
        made = ir.node("If", [gate], attributes=branches, name=f"{stem}_if")
        output = node.outputs[0]
        made.outputs[0].name = f"{stem}_output"
        made.outputs[0].type, made.outputs[0].shape = output.type, output.shape
        model.graph.insert_before(node, made)
        for use in list(output.uses()):
            use.node.replace_input_with(use.idx, made.outputs[0])
        for index, value in enumerate(model.graph.outputs):
            if value is output:
                made.outputs[0].name, output.name = output.name, f"{stem}_replaced"
                model.graph.outputs[index] = made.outputs[0]
        model.graph.remove(node, safe=True)


def _quantized_branch(
    stem: str,
    node: ir.Node,
    ready: ActivationQuantParams,
    weight: Vector,
    delta: Vector,
    scheme: Scheme,
) -> ir.Graph:
    made: list[ir.Node] = []

    def constant(name: str, array: NDArray[Any]) -> ir.Value:
        tensor = ir.tensor(np.asarray(array, order="C"), name=f"{stem}_{name}")
        constants.append(
            ir.Value(name=f"{stem}_{name}", shape=ir.Shape(array.shape),
                     type=_type(tensor.dtype), const_value=tensor)
        )  # fmt: skip
        return constants[-1]

    def add(op_type: str, inputs: Sequence[ir.Value]) -> ir.Value:
        made.append(ir.node(op_type, inputs, name=f"{stem}_{len(made)}_{op_type}"))
        made[-1].outputs[0].name = f"{stem}_{len(made)}"
        return made[-1].outputs[0]

    constants: list[ir.Value] = []
    value, _ = operands(node)
    if ready.multiplier is not None:
        value = add("Mul", [value, constant("multiplier", ready.multiplier)])
    if ready.offset is not None:
        value = add("Add", [value, constant("offset", ready.offset)])
    scale = constant("scale", np.asarray(ready.scale, dtype=np.float32))
    zero = constant("zero", scheme.zeros(()))
    value = add("DequantizeLinear", [add("QuantizeLinear", [value, scale, zero]), scale, zero])
    made.append(_copy(node, [value, constant("weight", weight), *node.inputs[2:]]))
    made[-1].outputs[0].name = f"{stem}_product"
    if np.any(delta):
        add("Add", [made[-1].outputs[0], constant("delta", delta)])
    return _branch(stem, made, constants)


def _copy(node: ir.Node, inputs: Sequence[ir.Value | None]) -> ir.Node:
    copy = ir.node(
        node.op_type, inputs, attributes=dict(node.attributes), name=f"{node.name}/gated"
    )
    copy.outputs[0].type = node.outputs[0].type
    return copy


def _branch(stem: str, nodes: Sequence[ir.Node], constants: Sequence[ir.Value] = ()) -> ir.Graph:
    output = nodes[-1].outputs[0]
    output.name = f"{stem}_result"
    output.type = _type(ir.DataType.FLOAT)
    return ir.Graph([], [output], nodes=nodes, initializers=constants, name=stem)


def _type(dtype: ir.DataType) -> ir.TensorType:
    return ir.TensorType(dtype)

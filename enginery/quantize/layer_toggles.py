"""A model in which each layer can be switched between FP32 and quantized at run time.

The search measures many combinations of quantized layers. One graph with a boolean input for each
layer measures any combination without building another session: each layer becomes an ONNX `If`
between its FP32 and its quantized form. Quantization is simulated: weights and activations are
rounded, and multiplied in FP32.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from enginery.core.closing import Closeable
from enginery.core.errors import InputError
from enginery.core.model.feeds import Feeds
from enginery.core.scratch import temporary_directory
from enginery.passes.ir.graph_file import read_graph, write_graph
from enginery.passes.ir.nodes import infer_types
from enginery.passes.qdq.layers import Layer, operands
from enginery.passes.qdq.scales import (
    ActivationQuantParams,
    bias_shift,
    fake_quantize_weight,
    scale_weight,
)
from enginery.passes.qdq.scheme import INT8, Scheme, Vector
from enginery.runtime.onnxruntime.tracing import open_in_memory
from enginery.runtime.providers.selection import choose_providers


class LayerToggleModel(Closeable):
    """An ONNX Runtime session over the graph with toggles. A context manager."""

    def __init__(
        self,
        model: Path,
        layers: Sequence[Layer],
        ranges: Mapping[str, ActivationQuantParams],
        bias_deltas: Mapping[str, Vector],
        scheme: Scheme = INT8,
    ) -> None:
        """Open the session.

        Args:
            model: file of the FP32 graph.
            layers: layers that get a toggle.
            ranges: activation name -> range.
            bias_deltas: layer name -> correction added to its bias when it is quantized.
            scheme: the quantized type.
        """
        self._scratch = ExitStack()
        directory = self._scratch.enter_context(temporary_directory("toggles"))
        self._toggles = {layer.name: f"toggle_{index}" for index, layer in enumerate(layers)}
        graph = read_graph(model)
        infer_types(graph)
        self.outputs = [value.name or "" for value in graph.graph.outputs]
        _insert_toggles(graph, layers, ranges, bias_deltas, self._toggles, scheme)
        path = directory / "toggles.onnx"
        # With external weights, a session holds the weights in memory once.
        write_graph(graph, path, max_inline_bytes=0)
        self._session: Any = open_in_memory(
            path.read_bytes(),
            path.parent,
            choose_providers(["cpu"]),
            # ONNX Runtime's CPU kernels lack FP8 fusions.
            optimized=scheme.supports_fusions,
        )

    def __call__(self, feeds: Feeds, quantized: Collection[str]) -> dict[str, NDArray[Any]]:
        """Run the graph with the named layers quantized and all others in FP32.

        Raises:
            InputError: ONNX Runtime fails on the inputs.
        """
        switches = {toggle: np.asarray(name in quantized) for name, toggle in self._toggles.items()}
        try:
            values = self._session.run(self.outputs, {**feeds, **switches})
        except Exception as error:  # ONNX Runtime raises many unrelated types
            raise InputError(f"the graph fails on the calibration inputs: {error}") from error
        return dict(zip(self.outputs, values, strict=True))

    def close(self) -> None:
        """Free the session and its temporary files."""
        self._session = None
        self._scratch.close()


def _insert_toggles(
    model: ir.Model,
    layers: Sequence[Layer],
    ranges: Mapping[str, ActivationQuantParams],
    bias_deltas: Mapping[str, Vector],
    toggles: Mapping[str, str],
    scheme: Scheme,
) -> None:
    """Replace each layer by an If whose branches are the quantized and the FP32 layer."""
    nodes = {node.name: node for node in model.graph}
    for layer in layers:
        node = nodes[layer.name]
        # A graph input, so that one session measures every combination of layers.
        toggle = ir.Value(
            name=toggles[layer.name], shape=ir.Shape([]), type=_type(ir.DataType.BOOL)
        )
        model.graph.inputs.append(toggle)
        stem = toggles[layer.name]
        branches = {
            "then_branch": _quantized_branch(
                stem, node, layer, ranges, bias_deltas.get(layer.name), scheme
            ),
            "else_branch": _branch(f"{stem}_fp32", [_copy(node, node.inputs)]),
        }
        switch = ir.node("If", [toggle], attributes=branches, name=f"{stem}_if")
        output = node.outputs[0]
        switch.outputs[0].name = f"{stem}_output"
        switch.outputs[0].type, switch.outputs[0].shape = output.type, output.shape
        model.graph.insert_before(node, switch)
        # A copy, because a use that is replaced leaves the collection.
        for use in list(output.uses()):
            use.node.replace_input_with(use.idx, switch.outputs[0])
        for index, value in enumerate(model.graph.outputs):
            if value is output:
                # The graph's output keeps its name.
                switch.outputs[0].name, output.name = output.name, f"{stem}_replaced"
                model.graph.outputs[index] = switch.outputs[0]
        model.graph.remove(node, safe=True)


def _quantized_branch(
    stem: str,
    node: ir.Node,
    layer: Layer,
    ranges: Mapping[str, ActivationQuantParams],
    bias_delta: Vector | None,
    scheme: Scheme,
) -> ir.Graph:
    """Return the quantized layer.

    What a ReLU behind the layer removes is outside the range of its output, so that quantizing
    before it is the same as behind it.
    """
    params = ranges[layer.activation]
    value, weight = operands(node)
    weight = scale_weight(layer, weight, params)
    delta = bias_shift(layer, weight, params)
    if bias_delta is not None:
        delta = delta + bias_delta
    if layer.op_type == "Conv":
        # The channels of a convolution's output are on axis 1.
        delta = delta.reshape((-1,) + (1,) * (weight.ndim - 2))
    nodes: list[ir.Node] = []

    def constant(name: str, array: NDArray[Any]) -> ir.Value:
        tensor = ir.tensor(np.asarray(array, order="C"), name=f"{stem}_{name}")
        constants.append(
            ir.Value(
                name=f"{stem}_{name}",
                shape=ir.Shape(array.shape),
                type=_type(tensor.dtype),
                const_value=tensor,
            )
        )
        return constants[-1]

    def add(op_type: str, inputs: Sequence[ir.Value]) -> ir.Value:
        nodes.append(ir.node(op_type, inputs, name=f"{stem}_{len(nodes)}_{op_type}"))
        nodes[-1].outputs[0].name = f"{stem}_{len(nodes)}"
        return nodes[-1].outputs[0]

    def fake_quantize(value: ir.Value, name: str, params: ActivationQuantParams) -> ir.Value:
        scale = constant(f"{name}_scale", np.asarray(params.scale, dtype=np.float32))
        zero = constant(f"{name}_zero", params.stored_zero_point(scheme))
        return add("DequantizeLinear", [add("QuantizeLinear", [value, scale, zero]), scale, zero])

    constants: list[ir.Value] = []
    if params.multiplier is not None:
        value = add("Mul", [value, constant("multiplier", params.multiplier)])
    if params.offset is not None:
        value = add("Add", [value, constant("offset", params.offset)])
    value = fake_quantize(value, "input", params)
    # The weight is rounded already; the product is computed in FP32.
    rounded = constant("weight", fake_quantize_weight(layer, weight, scheme))
    nodes.append(_copy(node, [value, rounded, *node.inputs[2:]]))
    value = nodes[-1].outputs[0]
    value.name = f"{stem}_product"
    if np.any(delta):
        value = add("Add", [value, constant("delta", delta)])
    # As in `insert_qdq`: on the CPU, a convolution multiplies between quantized tensors only.
    if scheme.unsigned and not layer.linear:
        # `_branch` returns what the last node computes.
        fake_quantize(value, "output", ranges[layer.activated_output])
    return _branch(stem, nodes, constants)


def _copy(node: ir.Node, inputs: Sequence[ir.Value | None]) -> ir.Node:
    copy = ir.node(node.op_type, inputs, attributes=dict(node.attributes), name=f"{node.name}/copy")
    copy.outputs[0].type = node.outputs[0].type
    return copy


def _branch(stem: str, nodes: Sequence[ir.Node], constants: Sequence[ir.Value] = ()) -> ir.Graph:
    output = nodes[-1].outputs[0]
    output.name = f"{stem}_result"
    output.type = _type(ir.DataType.FLOAT)
    return ir.Graph([], [output], nodes=nodes, initializers=constants, name=stem)


def _type(dtype: ir.DataType) -> ir.TensorType:
    return ir.TensorType(dtype)

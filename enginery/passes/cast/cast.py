"""Cast an FP32 graph to strongly typed FP16 or BF16, with standard ops only.

Weights and activations become FP16 or BF16, except at the nodes that stay FP32. All consumers that
read a value in another type share one Cast.

>>> model = ir.from_onnx_text('''<ir_version: 9, opset_import: ["" : 20]>
... g (float[n] x) => (float[n] y) { a = Exp (x)  b = Sin (a)  y = Relu (b) }''')
>>> result = cast_graph(model, "fp16", keep_fp32={"Sin_1"})
>>> result.low_nodes, result.casts, result.kept
(2, 4, {'Sin_1': 'listed in keep_fp32'})

Q and DQ nodes accept FP16 scales from opset 19 on; before, they stay FP32. INT8 weights are not
changed. A weight that is read in both types is stored twice. Weights are converted one at a time,
when the model is saved.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass, LiftConstantsToInitializersPass

from enginery.passes.cast.low_precision import cast_tensor, low_precision_type, overflow_limits
from enginery.passes.cast.plan import CastPlan, plan_cast
from enginery.passes.ir.nodes import (
    NameAllocator,
    all_graphs,
    all_nodes,
    infer_types,
    raise_opset_for_bf16,
)
from enginery.passes.ir.op_types import FLOAT


@dataclass(frozen=True)
class CastResult:
    """A summary of one cast."""

    precision: str
    low_nodes: int
    """The number of nodes that compute in the low precision."""
    kept: dict[str, str] = field(default_factory=dict)
    """The nodes that stay FP32, with the reason."""
    casts: int = 0
    """The number of Cast nodes added, those at inputs and outputs included."""
    clamped: tuple[str, ...] = ()
    """Constants with values beyond FP16's range, which became its largest or lowest value."""
    shared: tuple[str, ...] = ()
    """Weights that are stored in both types."""


def cast_graph(
    model: ir.Model,
    precision: Literal["fp16", "bf16"],
    *,
    keep_fp32: Collection[str] = (),
    io_dtype: Literal["fp32", "same"] = "fp32",
) -> CastResult:
    """Cast the graph in place.

    Args:
        model: an FP32 model; its subgraphs and functions are cast too.
        precision: the type to cast to.
        keep_fp32: names of nodes that stay FP32.
        io_dtype: `fp32` keeps the types of the graph's inputs and outputs; `same` casts them too.

    Raises:
        OptionError: the precision is neither `fp16` nor `bf16`.
    """
    low = low_precision_type(precision)
    if model.functions:
        InlinePass()(model)
    # A Constant node has one type; an initializer can be stored in both.
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    if low == ir.DataType.BFLOAT16:
        raise_opset_for_bf16(model)
    infer_types(model)
    low_io = io_dtype == "same"
    plan = plan_cast(model, low, keep=frozenset(keep_fp32), low_io=low_io)
    return _GraphCaster(model, low, precision, plan, low_io=low_io).run()


class _GraphCaster:
    """Applies a cast plan to one model."""

    def __init__(
        self, model: ir.Model, low: ir.DataType, precision: str, plan: CastPlan, *, low_io: bool
    ) -> None:
        self.model, self.low, self.precision, self.plan = model, low, precision, plan
        self.low_io = low_io
        self.new_name = NameAllocator(model)
        self.cast_values: dict[tuple[ir.Value, ir.DataType, ir.Graph], ir.Value] = {}
        self.lowered: set[ir.Value] = set()
        self.casts = 0
        self.clamped: list[str] = []
        self.shared: list[str] = []

    def run(self) -> CastResult:
        graphs = list(all_graphs(self.model.graph))
        if self.low_io:
            for value in self.model.graph.inputs:
                if value.dtype == FLOAT:
                    self._lower(value)
        # Types before Casts: a Cast belongs where the type of a value and that of its reader
        # differ.
        for node in all_nodes(self.model):
            self._retype(node)
        for graph in graphs:
            # Before Casts are added: a constant in the type of its reader needs none.
            self._convert_initializers(graph)
        for graph in graphs:
            for node in list(graph):
                self._cast_inputs(node, graph)
        for graph in graphs:
            self._cast_outputs(graph)
        _remove_redundant_casts(graphs)
        return CastResult(
            self.precision,
            sum(ports.any for ports in self.plan.ports.values()),
            self.plan.kept,
            self.casts,
            tuple(self.clamped),
            tuple(self.shared),
        )

    def _lower(self, value: ir.Value) -> None:
        self.lowered.add(value)
        value.dtype = self.low

    def _retype(self, node: ir.Node) -> None:
        """Change the types of a low-precision node's outputs, and the attributes that name them."""
        ports = self.plan.ports[node]
        # Not strict: the ports of a node that stays FP32 are empty.
        for value, follows in zip(node.outputs, ports.outputs, strict=False):
            if follows:
                self._lower(value)
        if not any(ports.outputs):
            return
        # Cast names its output type in `to`; Q and DQ of opset 23 in `output_dtype`.
        for name in ("to", "output_dtype"):
            attribute = node.attributes.get(name)
            if attribute is not None and attribute.as_int() == FLOAT:
                node.attributes[name] = ir.AttrInt64(name, int(self.low))
        if node.op_type == "ConstantOfShape":
            default = node.attributes.get("value")
            # The default value in ONNX is 0.
            tensor = default.as_tensor() if default is not None else ir.tensor([0.0], dtype=FLOAT)
            self._note_clamped(tensor, node.name or "")
            node.attributes["value"] = ir.AttrTensor("value", cast_tensor(tensor, self.low))

    def _convert_initializers(self, graph: ir.Graph) -> None:
        """Store every initializer in the type of its consumers, or in both types."""
        for value in list(graph.initializers.values()):
            tensor, name = value.const_value, value.name or ""
            if value.dtype != FLOAT or value.is_graph_input() or tensor is None:
                continue
            low_uses = [use for use in value.uses() if self.plan.is_low_input(use.node, use.idx)]
            if not low_uses:
                continue
            self._note_clamped(tensor, name)
            if len(low_uses) == len(value.uses()) and not value.is_graph_output():
                value.const_value = cast_tensor(tensor, self.low)
                self._lower(value)
                continue
            # Nodes of both types read it, so it is stored twice.
            self.shared.append(name)
            copy = ir.Value(
                name=self.new_name(f"{name}_{self.precision}"),
                shape=value.shape,
                type=ir.TensorType(self.low),
                const_value=cast_tensor(tensor, self.low),
            )
            graph.register_initializer(copy)
            for use in low_uses:
                use.node.replace_input_with(use.idx, copy)

    def _note_clamped(self, tensor: ir.TensorProtocol, name: str) -> None:
        if self.low == ir.DataType.FLOAT16 and overflow_limits(tensor):
            self.clamped.append(name)

    def _cast_inputs(self, node: ir.Node, graph: ir.Graph) -> None:
        """Insert a Cast before each input of a node that has the other type."""
        for index, value in enumerate(node.inputs):
            if value is None:
                continue
            if self.plan.is_low_input(node, index) and value.dtype == FLOAT:
                node.replace_input_with(index, self._cast_value(value, self.low, graph))
            elif value in self.lowered and not self.plan.is_low_input(node, index):
                node.replace_input_with(index, self._cast_value(value, FLOAT, graph))

    def _cast_value(self, value: ir.Value, dtype: ir.DataType, graph: ir.Graph) -> ir.Value:
        """Return the value in another type; its consumers in one graph share one Cast."""
        # One for each graph: what a branch computes is not visible outside of it.
        key = (value, dtype, graph)
        if key not in self.cast_values:
            suffix = "fp32" if dtype == FLOAT else self.precision
            output = ir.Value(
                name=self.new_name(f"{value.name}_{suffix}"),
                shape=value.shape,
                type=ir.TensorType(dtype),
            )
            name = self.new_name(f"{value.name}_to_{suffix}")
            cast = ir.node("Cast", [value], {"to": int(dtype)}, outputs=[output], name=name)
            producer = value.producer()
            if producer is not None and producer.graph is graph:
                graph.insert_after(producer, cast)
            # The value is an input, or belongs to an outer graph.
            elif len(graph):
                graph.insert_before(graph[0], cast)
            else:
                graph.append(cast)
            self.cast_values[key] = output
            self.casts += 1
        return self.cast_values[key]

    def _cast_outputs(self, graph: ir.Graph) -> None:
        """Cast the graph's outputs to their types; they keep their names."""
        low = self.low_io and graph is self.model.graph
        for index, value in enumerate(graph.outputs):
            wrong = value.dtype == FLOAT if low else value in self.lowered
            if not wrong:
                continue
            result = self._cast_value(value, self.low if low else FLOAT, graph)
            graph.outputs[index] = result
            # An input that is returned as it is keeps its name, by which callers feed it.
            if value.graph is graph and value.producer() is not None:
                name, suffix = value.name, "fp32" if low else self.precision
                value.name = self.new_name(f"{name}_{suffix}")
                result.name = name


def _remove_redundant_casts(graphs: list[ir.Graph]) -> None:
    """Remove the model's own Casts whose input now has their output type."""
    for node in [node for graph in graphs for node in graph if node.op_type == "Cast"]:
        source, result, graph = node.inputs[0], node.outputs[0], node.graph
        idle = source is not None and source.dtype is not None and source.dtype == result.dtype
        # A graph output needs a node of its own, which gives it its name.
        if idle and source is not None and not result.is_graph_output() and graph is not None:
            result.replace_all_uses_with(source)
            graph.remove(node, safe=True)

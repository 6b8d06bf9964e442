"""Compute a decoder's cross-attention keys and values in its encoder.

The keys and values of an encoder's states are the same at every step. An exporter computes them in
a second decoder graph, which runs the first step, and so holds all of the decoder's weights twice.
With them at the end of the encoder, one decoder graph with a cache runs all steps.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from enginery.passes.ir.nodes import NameAllocator, constant_numbers

_PREFIX = "cross_attention"


class UnknownPathError(Exception):
    """A value depends on more than the encoder's states and weights; the message names a node."""


def add_cross_attention(
    encoder: ir.Model, decoder: ir.Model, outputs: list[str], *, states: str
) -> None:
    """Add outputs of a decoder that depend only on the encoder's states to the encoder.

    Args:
        encoder: the encoder, whose first output is its states; it is changed in place.
        decoder: the decoder; its weights are shared with the encoder, not copied.
        outputs: names of the decoder's outputs, such as `present.0.encoder.key`.
        states: name of the decoder's input for the states.

    Raises:
        UnknownPathError: an output depends on something else.
    """
    copy = _Copy(encoder, states)
    by_name = {value.name: value for value in decoder.graph.outputs}
    added_outputs = []
    for name in outputs:
        value = copy.value(by_name[name])
        # The new name would take the states' own away.
        if value.is_graph_output():
            raise UnknownPathError(f"{name} is the encoder's states themselves")
        value.name, value.type, value.shape = name, by_name[name].type, by_name[name].shape
        added_outputs.append(value)
    encoder.graph.outputs.extend(added_outputs)


class _Copy:
    """Copies the nodes behind values of a decoder to the end of its encoder."""

    def __init__(self, encoder: ir.Model, states: str) -> None:
        self._graph = encoder.graph
        self._states = states
        self._names = NameAllocator(encoder)
        self._copied: dict[ir.Value, ir.Value] = {}

    def value(self, value: ir.Value) -> ir.Value:
        """Return the encoder's counterpart of a value, and add the nodes that compute it."""
        if value not in self._copied:
            self._copied[value] = self._copy(value)
        return self._copied[value]

    def _copy(self, value: ir.Value) -> ir.Value:
        if value.name == self._states and value.is_graph_input():
            # The states, which the decoder takes as an input, are the encoder's first output.
            return self._graph.outputs[0]
        if value.const_value is not None and value.is_initializer():
            return self._initializer(value)
        node = value.producer()
        if node is None:
            raise UnknownPathError(f"the input {value.name}")
        # Its shape may be computed from other inputs of the decoder, which the encoder does not
        # have.
        if node.op_type == "Reshape" and (shape := node.inputs[1]) is not None:
            copied = [self.value(node.inputs[0]), self._shape(node, shape)]
        else:
            copied = [None if operand is None else self.value(operand) for operand in node.inputs]
        twin = ir.Node(
            node.domain,
            node.op_type,
            copied,
            list(node.attributes.values()),
            num_outputs=len(node.outputs),
            name=self._names(f"{_PREFIX}/{node.name or node.op_type}"),
        )
        self._graph.append(twin)
        for old, new in zip(node.outputs, twin.outputs, strict=True):
            new.name = self._names(f"{_PREFIX}/{old.name}")
            new.type, new.shape = old.type, old.shape
            self._copied[old] = new
        return self._copied[value]

    def _initializer(self, value: ir.Value) -> ir.Value:
        name = self._names(f"{_PREFIX}/{value.name}")
        twin = ir.Value(
            name=name, type=value.type, shape=value.shape, const_value=value.const_value
        )
        self._graph.register_initializer(twin)
        return twin

    def _shape(self, node: ir.Node, shape: ir.Value) -> ir.Value:
        """Return the shape of a Reshape without the sizes that a decoder reads elsewhere.

        What is reshaped is (batch, positions, features), and heads come out of the features: sizes
        that are computed are those of the first two dims, which stay as they are (0).
        """
        sizes: list[int | None] | None = constant_numbers(shape)
        if sizes is None:
            sizes = _parts(shape)
        if None in sizes[2:]:
            raise UnknownPathError(f"{node.name}, whose shape has unknown sizes")
        numbers = np.array([0 if size is None else size for size in sizes], np.int64)
        name = self._names(f"{_PREFIX}/{node.name or node.op_type}_shape")
        twin = ir.Value(name=name, const_value=ir.tensor(numbers, name=name))
        twin.type, twin.shape = ir.TensorType(ir.DataType.INT64), ir.Shape(numbers.shape)
        self._graph.register_initializer(twin)
        return twin


def _parts(shape: ir.Value) -> list[int | None]:
    """Return the sizes that a Concat joins; None for those that are computed."""
    node = shape.producer()
    if node is None or node.op_type != "Concat":
        raise UnknownPathError(f"the shape {shape.name}")
    sizes: list[int | None] = []
    for part in node.inputs:
        numbers = constant_numbers(part)
        sizes += [None] if numbers is None else numbers
    return sizes

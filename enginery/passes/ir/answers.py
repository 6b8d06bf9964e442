"""Append the last step of a task to a graph: pooling, or the activation of a classifier.

>>> pooling = Pooling(("mean",), normalize=True, include_prompt=True, note="")
>>> model = ir.from_onnx_text('''<ir_version: 9, opset_import: ["" : 20]>
... g (int64[b, s] attention_mask, float[b, s, 2] x) => (float[b, s, 2] last_hidden_state)
... { last_hidden_state = Relu (x) }''')
>>> append_pooling(model, pooling, tokens="last_hidden_state")
>>> [(value.name, str(value.shape)) for value in model.graph.outputs]
[('last_hidden_state', '[b,s,2]'), ('sentence_embedding', '[b,2]')]

The result is one more output, `sentence_embedding` or `scores`, so that a runtime copies a vector
from the GPU and not the vectors of all tokens. The formulas are those of sentence-transformers, as
in `runtime/text/pooling.py`, and of transformers' pipelines, in FP32 at any precision of the graph.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from enginery.core.errors import ArtifactError
from enginery.passes.ir.nodes import NameAllocator
from enginery.runtime.tasks.classify import SCORES, Activation
from enginery.runtime.tasks.embed import SENTENCE_OUTPUT
from enginery.runtime.text.pooling import (
    NORM_EPSILON,
    TINY_COUNT,
    TINY_NORM,
    Layer,
    Pooling,
    Vectors,
)

_MASK = "attention_mask"
_MODES = ("mean", "cls", "lasttoken", "mean_sqrt_len_tokens", "weightedmean")
_ACTIVATIONS = {"Tanh": "Tanh", "ReLU": "Relu", "Sigmoid": "Sigmoid", "GELU": "Gelu"}
"""Name of PyTorch's class -> operator."""
# Since this opset, ReduceSum and Unsqueeze take their axes as an input.
_MIN_OPSET = 13
# Since this one, ReduceL2 does, too.
_AXES_INPUT_OPSET = 18


def append_pooling(model: ir.Model, pooling: Pooling, *, tokens: str) -> None:
    """Add the output `sentence_embedding`: float32 (batch, dim), after the other outputs.

    Args:
        model: the graph, which is changed in place.
        pooling: the pooling, of one mode other than `max`.
        tokens: name of the output with the token vectors, (batch, sequence, dim).

    Raises:
        ArtifactError: the pooling is not supported in a graph, or the graph has no attention mask.
    """
    graph = model.graph
    vectors = next(value for value in graph.outputs if value.name == tokens)
    mask = next((value for value in graph.inputs if value.name == _MASK), None)
    _check(model, pooling, mask)
    nodes = _Nodes(model)
    op, constant = nodes.op, nodes.constant

    def positions() -> ir.Value:
        # Made from the mask, because shapes are computed on the CPU.
        ones = op("Add", op("Mul", weights, constant(0.0)), constant(1.0))
        return op("CumSum", ones, constant(1))  # from 1: (batch, sequence)

    def at(position: ir.Value) -> ir.Value:
        """Return weights that are 1 at a position of each row, an index from 0: (batch, 1)."""
        index = op("Cast", op("Add", position, constant([1])), to=ir.DataType.FLOAT)
        return op("Cast", op("Equal", positions(), index), to=ir.DataType.FLOAT)

    weights = op("Cast", mask, to=ir.DataType.FLOAT)  # (batch, sequence)
    if vectors.dtype != ir.DataType.FLOAT:
        vectors = op("Cast", vectors, to=ir.DataType.FLOAT)
    (mode,) = pooling.modes
    # One token is taken by a sum as well: GatherND copies from the host, which a CUDA graph cannot
    # repeat. With padding on the left, the first token is not at position 0.
    if mode == "cls":
        # Of equal values, ArgMax takes the first.
        weights = at(op("ArgMax", weights, axis=1, keepdims=1))
    elif mode == "lasttoken":
        # The running count of tokens reaches its maximum at the last one.
        last = op("ArgMax", op("CumSum", weights, constant(1)), axis=1, keepdims=1)
        weights = op("Mul", weights, at(last))
    elif mode == "weightedmean":
        # The running count of tokens is their position, wherever the padding is.
        weights = op("Mul", weights, op("CumSum", weights, constant(1)))
    # Kernels may leave anything at padding, NaN as well, and 0 times NaN is NaN.
    counts = op("Cast", op("Unsqueeze", weights, constant([2])), to=ir.DataType.BOOL)
    vectors = op("Where", counts, vectors, constant(0.0))
    # A matrix product is one kernel on a GPU, and needs no second array of the vectors' size.
    total = op("MatMul", op("Unsqueeze", weights, constant([1])), vectors)
    pooled = op("Squeeze", total, constant([1]))
    if mode not in ("cls", "lasttoken"):
        count = op("ReduceSum", weights, constant([1]), keepdims=1)
        count = op("Max", count, constant(TINY_COUNT))
        pooled = op("Div", pooled, op("Sqrt", count) if mode == "mean_sqrt_len_tokens" else count)
    for layer in pooling.layers:
        pooled = nodes.apply(layer, pooled)
    if pooling.normalize:
        pooled = nodes.unit(pooled)
    pooled.name = SENTENCE_OUTPUT
    pooled.type = ir.TensorType(ir.DataType.FLOAT)
    shape = next(value for value in graph.outputs if value.name == tokens).shape
    if shape is not None:
        dim = shape[2]
        pooled.shape = ir.Shape([shape[0], pooling.size(dim) if isinstance(dim, int) else dim])
    graph.outputs.append(pooled)


class _Nodes:
    """Append nodes to a graph, named `pooling/…`."""

    def __init__(self, model: ir.Model) -> None:
        self._names = NameAllocator(model)
        self._tape = Tape(model.graph)
        self._opset = model.opset_imports[""]

    def op(
        self, op_type: str, *inputs: ir.Value | None, **attributes: int | float | list[int]
    ) -> ir.Value:
        """Append a node with one output."""
        name = self._names(f"pooling/{op_type}")
        value = self._tape.op(op_type, inputs, attributes, name=name)
        value.name = self._names(f"{name}_output")
        return value

    def constant(self, value: float | list[int] | Vectors) -> ir.Value:
        """Add an initializer: int64 for integers, else float32."""
        array = np.array(value, np.int64 if isinstance(value, int | list) else np.float32)
        return self._tape.initializer(ir.tensor(array), name=self._names("pooling/constant"))

    def unit(self, rows: ir.Value) -> ir.Value:
        """Append nodes that scale rows to length 1."""
        if self._opset >= _AXES_INPUT_OPSET:
            lengths = self.op("ReduceL2", rows, self.constant([1]), keepdims=1)
        else:
            lengths = self.op("ReduceL2", rows, axes=[1], keepdims=1)
        return self.op("Div", rows, self.op("Max", lengths, self.constant(TINY_NORM)))

    def apply(self, layer: Layer, rows: ir.Value) -> ir.Value:
        """Append a module behind the pooling."""
        if layer.weight is None:
            return self.unit(rows)
        bias = None if layer.bias is None else self.constant(layer.bias)
        if layer.kind == "LayerNorm":
            weight = self.constant(layer.weight)
            return self.op("LayerNormalization", rows, weight, bias, epsilon=NORM_EPSILON)
        rows = self.op("MatMul", rows, self.constant(np.ascontiguousarray(layer.weight.T)))
        if bias is not None:
            rows = self.op("Add", rows, bias)
        if layer.activation == "SiLU":
            return self.op("Mul", rows, self.op("Sigmoid", rows))
        if layer.activation == "Identity":
            return rows
        return self.op(_ACTIVATIONS[layer.activation], rows)


def append_scores(model: ir.Model, activation: Activation, *, logits: str) -> None:
    """Add the output `scores`: float32, of the shape of the logits, after the other outputs.

    >>> model = ir.from_onnx_text('''<ir_version: 9, opset_import: ["" : 20]>
    ... g (float[b, 2] x) => (float[b, 2] logits) { logits = Relu (x) }''')
    >>> append_scores(model, "softmax", logits="logits")
    >>> [value.name for value in model.graph.outputs]
    ['logits', 'scores']

    Args:
        model: the graph, which is changed in place.
        activation: `softmax` over the last axis, or `sigmoid`.
        logits: name of the output with the logits.
    """
    graph = model.graph
    values = next(value for value in graph.outputs if value.name == logits)
    names = NameAllocator(model)
    tape = Tape(graph)
    shape = values.shape
    if values.dtype != ir.DataType.FLOAT:
        name = names("scores/Cast")
        values = tape.op("Cast", [values], {"to": ir.DataType.FLOAT}, name=name)
        values.name = names(f"{name}_output")
    if activation == "softmax":
        scores = tape.op("Softmax", [values], {"axis": -1}, name=names("scores/Softmax"))
    else:
        scores = tape.op("Sigmoid", [values], name=names("scores/Sigmoid"))
    scores.name, scores.shape, scores.type = SCORES, shape, ir.TensorType(ir.DataType.FLOAT)
    graph.outputs.append(scores)


def _opset_of_layers(pooling: Pooling) -> int:
    """Return the first opset that has the operators of the layers."""
    opsets = [17 for layer in pooling.layers if layer.kind == "LayerNorm"]
    opsets += [20 for layer in pooling.layers if layer.activation == "GELU"]
    return max(opsets, default=_MIN_OPSET)


def _check(model: ir.Model, pooling: Pooling, mask: ir.Value | None) -> None:
    """Raise ArtifactError unless the pooling can be computed in the graph."""
    opset = model.opset_imports.get("", 1)
    if len(pooling.modes) != 1 or pooling.modes[0] not in _MODES:
        problem = (
            f"it pools by {' and '.join(pooling.modes)}, supported: one of {', '.join(_MODES)}"
        )
    elif not pooling.include_prompt:
        problem = "it leaves a prompt's tokens out, and a graph does not know their number"
    elif mask is None:
        problem = f"the graph has no input {_MASK}"
    elif opset < _MIN_OPSET:
        problem = f"the graph has opset {opset}, expected {_MIN_OPSET} or later"
    elif opset < (needed := _opset_of_layers(pooling)):
        kinds = " and ".join(layer.kind for layer in pooling.layers)
        problem = f"the graph has opset {opset}, and {kinds} need {needed} or later"
    else:
        return
    raise ArtifactError(
        f"the model's pooling cannot be computed in the graph: {problem}.",
        do="Readers then pool by the model's own settings.",
    )

"""Append sentence-transformers' pooling to a graph, as the output `sentence_embedding`.

>>> pooling = Pooling(("mean",), normalize=True, include_prompt=True, note="")
>>> model = ir.from_onnx_text('''<ir_version: 9, opset_import: ["" : 20]>
... g (int64[b, s] attention_mask, float[b, s, 2] x) => (float[b, s, 2] last_hidden_state)
... { last_hidden_state = Relu (x) }''')
>>> append_pooling(model, pooling, tokens="last_hidden_state")
>>> [(value.name, str(value.shape)) for value in model.graph.outputs]
[('last_hidden_state', '[b,s,2]'), ('sentence_embedding', '[b,2]')]

The formulas are those of `runtime/text/pooling.py`, in FP32 whatever the precision of the graph.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from enginery.core.errors import ArtifactError
from enginery.passes.ir.nodes import NameAllocator
from enginery.runtime.tasks.embed import SENTENCE_OUTPUT
from enginery.runtime.text.pooling import TINY_COUNT, TINY_NORM, Pooling

_MASK = "attention_mask"
_MODES = ("mean", "cls")
# Since this opset, ReduceSum and Unsqueeze take their axes as an input.
_MIN_OPSET = 13


def append_pooling(model: ir.Model, pooling: Pooling, *, tokens: str) -> None:
    """Add the output `sentence_embedding`: float32 (batch, dim), after the other outputs.

    Args:
        model: the graph, which is changed in place.
        pooling: the pooling, by `mean` or `cls`.
        tokens: name of the output with the token vectors, (batch, sequence, dim).

    Raises:
        ArtifactError: the pooling is not supported in a graph, or the graph has no attention mask.
    """
    graph = model.graph
    vectors = next(value for value in graph.outputs if value.name == tokens)
    mask = next((value for value in graph.inputs if value.name == _MASK), None)
    _check(model, pooling, mask)
    names = NameAllocator(model)
    tape = Tape(graph)

    def op(op_type: str, *inputs: ir.Value | None, **attributes: int) -> ir.Value:
        name = names(f"pooling/{op_type}")
        value = tape.op(op_type, inputs, attributes, name=name)
        value.name = names(f"{name}_output")
        return value

    def constant(value: float | list[int]) -> ir.Value:
        array = np.array(value, np.int64 if isinstance(value, list) else np.float32)
        return tape.initializer(ir.tensor(array), name=names("pooling/constant"))

    weights = op("Cast", mask, to=ir.DataType.FLOAT)  # (batch, sequence)
    if vectors.dtype != ir.DataType.FLOAT:
        vectors = op("Cast", vectors, to=ir.DataType.FLOAT)
    if pooling.modes == ("cls",):
        # The first real token: with padding on the left, it is not at position 0.
        first = op("ArgMax", weights, axis=1, keepdims=1)
        pooled = op("GatherND", vectors, first, batch_dims=1)
    else:
        weighted = op("Mul", vectors, op("Unsqueeze", weights, constant([2])))
        count = op("ReduceSum", weights, constant([1]), keepdims=1)
        total = op("ReduceSum", weighted, constant([1]), keepdims=0)
        pooled = op("Div", total, op("Max", count, constant(TINY_COUNT)))
    if pooling.normalize:
        squares = op("ReduceSum", op("Mul", pooled, pooled), constant([1]), keepdims=1)
        pooled = op("Div", pooled, op("Max", op("Sqrt", squares), constant(TINY_NORM)))
    pooled.name = SENTENCE_OUTPUT
    pooled.type = ir.TensorType(ir.DataType.FLOAT)
    shape = next(value for value in graph.outputs if value.name == tokens).shape
    pooled.shape = None if shape is None else ir.Shape([shape[0], shape[2]])
    graph.outputs.append(pooled)


def _check(model: ir.Model, pooling: Pooling, mask: ir.Value | None) -> None:
    """Raise ArtifactError unless the pooling can be computed in the graph."""
    opset = model.opset_imports.get("", 1)
    if len(pooling.modes) != 1 or pooling.modes[0] not in _MODES:
        problem = f"it pools by {' and '.join(pooling.modes)}, supported: {' or '.join(_MODES)}"
    elif not pooling.include_prompt:
        problem = "it leaves a prompt's tokens out, and a graph does not know their number"
    elif mask is None:
        problem = f"the graph has no input {_MASK}"
    elif opset < _MIN_OPSET:
        problem = f"the graph has opset {opset}, expected {_MIN_OPSET} or later"
    else:
        return
    raise ArtifactError(
        f"the model's pooling cannot be computed in the graph: {problem}.",
        do="Leave out --pooling-in-graph: readers then pool by the model's own settings.",
    )

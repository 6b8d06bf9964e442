"""Append nodes to a graph, with names and constants."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.tape import Tape

from enginery.passes.ir.nodes import NameAllocator, add_initializer
from enginery.passes.ir.op_types import MICROSOFT


class Builder:
    """Appends nodes to the end of a graph, which is to be sorted afterwards.

    >>> model = ir.from_onnx_text('''<ir_version: 9, opset_import: ["" : 20]>
    ... g (float[b, s] x) => (float[b, s] y) { y = Relu (x) }''')
    >>> build = Builder(model, "example")
    >>> build("Unsqueeze", model.graph.inputs[0], build.ints(1)).name
    'example/Unsqueeze_output'
    """

    def __init__(self, model: ir.Model, prefix: str) -> None:
        self.names = NameAllocator(model)
        self.added: set[ir.Node] = set()
        """The nodes that were appended."""
        self.origins: dict[str, frozenset[str]] = {}
        """The names of the nodes that an appended node stands for, by its name."""
        self._model, self._prefix = model, prefix
        self._tape = Tape(model.graph)
        self._constants: dict[tuple[Any, ...], ir.Value] = {}

    def __call__(self, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """Append a node of ONNX's own operators with one output."""
        (output,) = self.node(op_type, inputs, attributes)
        return output

    def node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Any],
        *,
        domain: str = "",
        outputs: int = 1,
    ) -> Sequence[ir.Value]:
        """Append a node and return its outputs."""
        name = self.names(f"{self._prefix}/{op_type}")
        values: Sequence[ir.Value] = self._tape.op_multi_out(
            op_type,
            inputs,
            dict(attributes),
            num_outputs=outputs,
            domain=domain,
            name=name,
        )
        for value in values:
            value.name = self.names(f"{name}_output")
        producer = values[0].producer()
        if producer is not None:
            self.added.add(producer)
        # ONNX requires an opset for each domain of a model's operators.
        if domain == MICROSOFT:
            self._model.opset_imports.setdefault(MICROSOFT, 1)
        return values

    def note_origins(self, value: ir.Value, names: Iterable[str | None]) -> None:
        """Record the names of the nodes that the node of a value stands for."""
        node = value.producer()
        if node is not None:
            origins = {origin for name in names for origin in self.origins.get(name or "", {name})}
            self.origins[node.name or ""] = frozenset(name for name in origins if name)

    def constant(self, array: NDArray[Any]) -> ir.Value:
        """Return an initializer; equal arrays share one."""
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            name = self.names(f"{self._prefix}/constant")
            self._constants[key] = add_initializer(self._model.graph, name, array)
        return self._constants[key]

    def ints(self, *numbers: int) -> ir.Value:
        """Return an initializer of int64 (count,)."""
        return self.constant(np.array(numbers, np.int64))

    def merge_heads(self, value: ir.Value, hidden: int) -> ir.Value:
        """Return (batch, heads, sequence, head_dim) as (batch, sequence, hidden)."""
        by_position = self("Transpose", value, perm=(0, 2, 1, 3))
        # 0 keeps a dim, so that no shape has to be computed.
        return self("Reshape", by_position, self.ints(0, 0, hidden))

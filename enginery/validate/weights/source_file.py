"""The weights of an .onnx file, as the reference for an artifact that was imported from it.

A weight has the name of its initializer or Constant. It is there a second time under the path of a
node that reads it and its role, `encoder.layer.0.output.dense.weight`, as PyTorch would name it, so
that a weight is traced by its nodes, too, and one that a later stage has renamed or joined with
others is found. A path that stands for several weights, or is the name of another one, names none.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from enginery.core.closing import Closeable
from enginery.passes.cast.low_precision import read_values
from enginery.passes.ir.graph_file import read_graph
from enginery.runtime.pytorch.reference import TorchWeight, TorchWeights, sample_positions
from enginery.validate.weights.stored import Use, find_uses, is_counted, stored_tensors

_EPSILON = 1e-5
"""ONNX's default for a BatchNormalization."""


class SourceFileWeights(Closeable):
    """The weights of an .onnx file. A context manager."""

    def __init__(self, path: Path) -> None:
        """Read the graph; external weights stay on disk.

        Raises:
            SourceError: the file is not ONNX, or its external data is missing.
        """
        self._tensors: dict[str, ir.TensorProtocol] = {}
        self._uses: dict[str, list[Use]] = {}
        by_path: dict[str, set[str]] = defaultdict(set)
        for value, tensor in stored_tensors(read_graph(path)):
            if not is_counted(tensor) or not value.name:
                continue
            self._tensors[value.name] = tensor
            self._uses[value.name] = list(find_uses(value))
            for use in self._uses[value.name]:
                if use.path and use.role:
                    by_path[f"{use.path}.{use.role}"].add(value.name)
        self._by_path = {path: sorted(names) for path, names in by_path.items()}
        only = {path: names[0] for path, names in self._by_path.items() if len(names) == 1}
        self._names = only | {name: name for name in self._tensors}
        """Every name of a weight -> the name of its tensor."""

    def weights(self) -> TorchWeights:
        """Describe every weight under each of its names."""
        described = {}
        for name in self._tensors:
            array = self._read(name)
            described[name] = (array.shape, array[sample_positions(array.shape)])
        layouts = {
            name: {use.inputs_first for use in uses if use.inputs_first is not None}
            for name, uses in self._uses.items()
        }
        # A BatchNormalization can be folded into the convolution before it only with its epsilon.
        norms = {
            use.path: use.node.attributes.get_float("epsilon", _EPSILON)
            for uses in self._uses.values()
            for use in uses
            if use.node.op_type == "BatchNormalization" and use.path
        }
        roles = ("weight", "bias", "running_mean", "running_var")
        return TorchWeights(
            weights={n: TorchWeight(n, *described[tensor]) for n, tensor in self._names.items()},
            # A weight that two products read in different layouts is left out of both sets.
            linear=frozenset(
                name.rpartition(".")[0]
                for name, tensor in self._names.items()
                if layouts[tensor] == {False}
            ),
            batch_norms={
                module: epsilon
                for module, epsilon in norms.items()
                if all(f"{module}.{role}" in self._names for role in roles)
            },
            inputs_first=frozenset(
                n for n, tensor in self._names.items() if layouts[tensor] == {True}
            ),
            by_path=self._by_path,
        )

    def weight(self, name: str) -> NDArray[Any]:
        """Return all elements of a weight."""
        return self._read(self._names[name])

    def close(self) -> None:
        """Free the graph."""
        self._tensors, self._uses, self._names = {}, {}, {}

    def _read(self, name: str) -> NDArray[Any]:
        values = read_values(self._tensors[name])
        low = self._tensors[name].dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
        return values.astype(np.float32) if low else values

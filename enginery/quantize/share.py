"""How much of a graph's arithmetic is in INT8, counted on one real input.

    >>> work = count_multiply_adds(artifact.model, layers, feeds)
    >>> work.share(int8_names), work.share(int8_names, with_attention=True)
    (0.97, 0.94)

The input is the calibration row whose length is nearest to the mean. Counted are the multiply-adds
of the layers, MatMul, Gemm and Conv with stored weights: output elements times K. Products of two
activations (attention's) are counted apart.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from enginery.core.feeds import Feeds
from enginery.core.manifest import GraphRecord
from enginery.passes.layers import Layer, constant_tensor
from enginery.quantize.data import Batch
from enginery.runtime.real_inputs import fixed_batch
from enginery.runtime.tracing import GraphTracer


@dataclass(frozen=True)
class Arithmetic:
    """Multiply-adds of one input."""

    by_layer: dict[str, int]
    attention: int
    """Of all products of two activations."""
    rows_by_layer: dict[str, int]
    """Rows of each layer's product for one input of the batch; 1 is a matrix-vector product."""
    positions: int
    """The sequence length, or 1."""

    def share(self, int8: Collection[str], *, with_attention: bool = False) -> float:
        """The part of the multiply-adds that the layers named make up, 0 to 1."""
        total = sum(self.by_layer.values()) + (self.attention if with_attention else 0)
        done = sum(count for name, count in self.by_layer.items() if name in int8)
        return done / total if total else 0.0


def mean_length_feeds(batches: Sequence[Batch], record: GraphRecord) -> Feeds:
    """One row of the batch whose sequence is nearest to the rows' mean length.

    Of a graph with a fixed batch, as many rows as it takes.
    """
    loaded = []
    for batch in batches:
        feeds = batch.load()
        mask = feeds.get("attention_mask")
        lengths = mask.sum(axis=1) if mask is not None else [1] * len(batch.rows)
        loaded.append((float(np.mean(lengths)), len(batch.rows), batch))
        if mask is None:
            break  # without a mask all inputs are of one size
    mean = np.average([length for length, _, _ in loaded], weights=[n for _, n, _ in loaded])
    nearest = min(loaded, key=lambda entry: abs(entry[0] - mean))[2]
    found = nearest.load()
    if fixed_batch(record):
        return found
    return {name: value[:1] if value.ndim else value for name, value in found.items()}


def count_multiply_adds(
    model_path: Path, model: ir.Model, layers: Sequence[Layer], feeds: Feeds
) -> Arithmetic:
    """Counts on the shapes that the feeds give the graph; raises InputError where it fails."""
    products = [node for node in model.graph if node.op_type == "MatMul" and _between(node)]
    operands = {node.name: (node.inputs[0], node.outputs[0]) for node in products}
    # By tensors and not through `runtime.multiply_adds`, which goes by the names of the file's
    # nodes: they may have none there, and those in memory have been given some.
    wanted = [layer.output for layer in layers]
    wanted += [value.name or "" for pair in operands.values() for value in pair if value]
    with GraphTracer(model_path, wanted, optimized=True) as tracer:
        shapes = {name: value.shape for name, value in tracer(feeds).items()}
    batch = next(iter(feeds.values())).shape[0]
    attention = 0
    for source, output in operands.values():
        if source is not None:
            inner = shapes[source.name or ""][-1]
            attention += int(np.prod(shapes[output.name or ""])) * inner // batch
    mask = feeds.get("attention_mask")
    rows = {x.name: int(np.prod(shapes[x.output])) // x.out_channels // batch for x in layers}
    return Arithmetic(
        by_layer={x.name: rows[x.name] * x.out_channels * x.reduction_size for x in layers},
        attention=attention,
        rows_by_layer=rows,
        positions=1 if mask is None else int(mask.shape[1]),
    )


def _between(node: ir.Node) -> bool:
    return all(constant_tensor(value) is None for value in node.inputs)

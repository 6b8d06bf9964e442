"""Count multiply-adds, and the share of them that is quantized.

They are counted for one calibration row of mean length: for products and convolutions with
constant weights, the number of output elements times K. Products of two activations, as in
attention, are counted separately, because they are not quantized.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from enginery.core.artifact.manifest import GraphRecord
from enginery.core.model.feeds import Feeds
from enginery.passes.qdq.layers import Layer, constant_tensor
from enginery.quantize.calibration.data import Batch
from enginery.runtime.decoder_graphs import is_past
from enginery.runtime.onnxruntime.tracing import GraphTracer
from enginery.runtime.sample_inputs import fixed_batch


@dataclass(frozen=True)
class MultiplyAddCounts:
    """Multiply-adds for one input row."""

    by_layer: dict[str, int]
    """Layer name -> multiply-adds."""
    attention: int
    """Multiply-adds of all products of two activations."""
    rows_by_layer: dict[str, int]
    """Layer name -> rows of its matrix product; 1 means a matrix-vector product."""
    positions: int
    """Sequence length, or 1 without a sequence."""

    def share(self, names: Collection[str], *, with_attention: bool = False) -> float:
        """Return the share of the multiply-adds in the named layers, 0 to 1.

        >>> counts = MultiplyAddCounts({"query": 60, "key": 40}, 100, {"query": 8, "key": 8}, 8)
        >>> counts.share(["query"]), counts.share(["query"], with_attention=True)
        (0.6, 0.3)
        """
        total = sum(self.by_layer.values()) + (self.attention if with_attention else 0)
        done = sum(count for name, count in self.by_layer.items() if name in names)
        return done / total if total else 0.0


def mean_length_feeds(batches: Sequence[Batch], record: GraphRecord) -> Feeds:
    """Return one row whose sequence length is close to the mean; of a decoder, a prompt.

    For a graph with a fixed batch size, return a whole batch.
    """
    loaded: list[tuple[float, int, Batch]] = []
    for batch in batches:
        feeds = batch.load()
        if loaded and any(is_past(name) and value.size for name, value in feeds.items()):
            continue  # a step behind a prompt: its matrix products have one row
        mask = feeds.get("attention_mask")
        lengths = mask.sum(axis=1) if mask is not None else [1] * len(batch.rows)
        loaded.append((float(np.mean(lengths)), len(batch.rows), batch))
        if mask is None:
            break  # without a mask all inputs have the same size
    mean = np.average([length for length, _, _ in loaded], weights=[n for _, n, _ in loaded])
    nearest = min(loaded, key=lambda entry: abs(entry[0] - mean))[2]
    whole_batch = nearest.load()
    if fixed_batch(record):
        return whole_batch
    return {name: value[:1] if value.ndim else value for name, value in whole_batch.items()}


def count_multiply_adds(
    model_path: Path, model: ir.Model, layers: Sequence[Layer], feeds: Feeds
) -> MultiplyAddCounts:
    """Count from the shapes that the feeds give the graph.

    Raises:
        InputError: the graph fails on the feeds.
    """
    products = [
        node for node in model.graph if node.op_type == "MatMul" and _multiplies_activations(node)
    ]
    operands = {node.name: (node.inputs[0], node.outputs[0]) for node in products}
    # Not with `runtime.multiply_adds`, which goes by the node names in the file. Nodes there may
    # have no names; the graph in memory has been given some.
    tensor_names = [layer.output for layer in layers]
    tensor_names += [value.name or "" for pair in operands.values() for value in pair if value]
    with GraphTracer(model_path, tensor_names, optimized=True) as tracer:
        shapes = {name: value.shape for name, value in tracer(feeds).items()}
    batch = next(iter(feeds.values())).shape[0]
    attention = 0
    for source, output in operands.values():
        if source is not None:
            inner = shapes[source.name or ""][-1]
            # (…, M, K) times (…, K, N) takes M * N * K, here per row: a graph with a fixed batch
            # size has several.
            attention += int(np.prod(shapes[output.name or ""])) * inner // batch
    mask = feeds.get("attention_mask")
    # Output elements by channels: the positions of a text, the pixels of a feature map.
    rows = {x.name: int(np.prod(shapes[x.output])) // x.out_channels // batch for x in layers}
    return MultiplyAddCounts(
        by_layer={x.name: rows[x.name] * x.out_channels * x.reduction_size for x in layers},
        attention=attention,
        rows_by_layer=rows,
        positions=1 if mask is None else int(mask.shape[1]),
    )


def _multiplies_activations(node: ir.Node) -> bool:
    return all(constant_tensor(value) is None for value in node.inputs)

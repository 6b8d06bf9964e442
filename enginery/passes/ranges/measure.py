"""Measure the range of every float tensor of a graph on real inputs.

All inner tensors of a graph can take far more memory than the model. So the graph runs in segments
(`passes/ranges/segments.py`), whose tensors have a bounded total size. Each tensor is reduced to a
`TensorRange` of fixed size as soon as it is computed. The ranges of all batches are merged.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import ShapeInferencePass

from enginery.core.artifact.external_data import load_graph
from enginery.core.errors import InputError
from enginery.passes.ir.graph_file import read_graph
from enginery.passes.ir.nodes import NameAllocator, all_graphs, all_nodes, infer_types
from enginery.passes.ir.op_types import FLOAT, has_subgraph
from enginery.passes.ranges.segments import Segment, peak_live_bytes, segment_model, split_graph
from enginery.passes.ranges.tensor_range import TensorRange, array_range
from enginery.runtime.onnxruntime.tracing import open_in_memory
from enginery.runtime.providers.selection import choose_providers

Feeds = Mapping[str, NDArray[Any]]
_FetchKey = tuple[str, int, str]
"""The name of a tensor, the index of its segment, and the output from which it was fetched."""

GROUP_BYTES = 256 << 20
"""The limit for the inner tensors that are fetched in one run. The values that pass from one
segment to the next take at most as much again."""
_UNKNOWN_ELEMENTS = 1 << 20


def measure_ranges(
    path: Path,
    tensors: Sequence[ir.Value],
    batches: Sequence[Feeds],
    *,
    mask_floor: float = -math.inf,
    group_bytes: int = GROUP_BYTES,
) -> dict[str, TensorRange]:
    """Run the graph on every batch and record the range of each tensor.

    Args:
        path: the FP32 graph.
        tensors: values of the graph, see `float_tensors`.
        batches: feeds; the largest determines the segments.
        mask_floor: values at or below it come from an attention mask.
        group_bytes: the limit for the tensors fetched in one run; a single tensor may exceed it.

    Returns:
        The range of each tensor over all batches, by name.

    Raises:
        InputError: the graph fails on a batch.
        ProviderError: the graph cannot be loaded.
    """
    proto = load_graph(path)
    largest = max(batches, key=lambda feeds: sum(array.size for array in feeds.values()))
    types, sizes = _types_and_sizes(path, largest)
    names = dict.fromkeys(value.name or "" for value in tensors)
    # Values of one name and different types in two branches cannot be fetched.
    fetchable = [name for name in names if types.get(name) != ir.DataType.UNDEFINED]
    segments = split_graph(
        proto.graph,
        {name: sizes.get(name, 4 * _UNKNOWN_ELEMENTS) for name in fetchable},
        typed_values=types,
        max_bytes=group_bytes,
    )
    # The values between two segments are kept for every batch of a run.
    batches_per_run = max(1, group_bytes // max(1, peak_live_bytes(segments, sizes)))
    ranges: dict[_FetchKey, TensorRange] = {}
    for start in range(0, len(batches), batches_per_run):
        part = batches[start : start + batches_per_run]
        for key, array in _run_segments(path, proto, segments, types, part):
            tensor_range = array_range(array, mask_floor=mask_floor)
            ranges[key] = ranges[key].merge(tensor_range) if key in ranges else tensor_range
        for feeds in part:
            # The graph's own inputs are measured here: no segment computes them.
            for name in names.keys() & feeds.keys():
                tensor_range = array_range(feeds[name], mask_floor=mask_floor)
                key = (name, -1, "")
                ranges[key] = ranges[key].merge(tensor_range) if key in ranges else tensor_range
    return _merge_by_name(ranges, names)


def float_tensors(graph: ir.Graph) -> list[ir.Value]:
    """Return the float32 inputs of the graph and the float32 outputs of its nodes, in order.

    Values in the branches of an If are included. Those inside a Loop or a Scan are not: they are
    computed anew in each iteration and cannot be fetched from outside.
    """
    return [value for value in (*graph.inputs, *_node_outputs(graph)) if value.dtype == FLOAT]


def make_value_names_unique(model: ir.Model) -> bool:
    """Give every value a unique name, in place; return True if any name was changed.

    ONNX allows the two branches of an If to use the same names, but ranges and errors are recorded
    by name.
    """
    new_name = NameAllocator(model)
    seen: set[str] = set()
    changed = False
    for graph in all_graphs(model.graph):
        node_outputs = [value for node in graph for value in node.outputs if value.name]
        for value in (*graph.inputs, *graph.initializers.values(), *node_outputs):
            # An input with a default value is both, and comes twice.
            if value.name in seen and not (value.is_graph_input() and value.is_initializer()):
                value.name = new_name(value.name)
                changed = True
            seen.add(value.name or "")
    return changed


def _node_outputs(graph: ir.Graph) -> Iterator[ir.Value]:
    for node in graph:
        if node.op_type == "If" and has_subgraph(node):
            for attribute in node.attributes.values():
                yield from _node_outputs(attribute.as_graph())
        yield from (value for value in node.outputs if value.name)


def _merge_by_name(
    ranges: Mapping[_FetchKey, TensorRange], names: Iterable[str]
) -> dict[str, TensorRange]:
    """Merge the ranges of each name; unknown if one of two branches with the name never ran."""
    by_name: dict[str, list[TensorRange]] = {}
    for (name, _, _), measured in ranges.items():
        by_name.setdefault(name, []).append(measured)
    return {
        name: TensorRange(0.0, 0.0, 0.0, 0)
        if name not in by_name or not all(branch.elements for branch in by_name[name])
        else functools.reduce(TensorRange.merge, by_name[name])
        for name in names
    }


def _types_and_sizes(path: Path, feeds: Feeds) -> tuple[dict[str, int], dict[str, int]]:
    """Return the element types (as ONNX's numbers) and the sizes in bytes of all values, by name.

    ONNX's shape inference derives nearly all of them from the shapes of the feeds.
    """
    model = read_graph(path)
    infer_types(model)
    values = [value for node in all_nodes(model) for value in node.outputs]
    for value in values:
        value.shape = None  # the file's shapes contain names instead of numbers
    for value in model.graph.inputs:
        if value.name in feeds:
            value.shape = ir.Shape(feeds[value.name].shape)
    logger = logging.getLogger("onnx_ir")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns about ops without a schema
    try:
        ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(model)
    finally:
        logger.setLevel(level)
    rows = max((array.shape[0] for array in feeds.values() if array.ndim), default=1)
    longest = max((int(n) for array in feeds.values() for n in array.shape), default=1)
    types: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for value in (*model.graph.inputs, *values):
        name = value.name or ""
        if value.dtype is not None and isinstance(value.type, ir.TensorType):
            first_type = types.setdefault(name, int(value.dtype))
            # Two branches of an If may give one name to values of different types.
            if first_type != value.dtype:
                types[name] = int(ir.DataType.UNDEFINED)
            size = math.ceil(_elements(value, rows, longest) * value.dtype.itemsize)
            sizes[name] = max(size, sizes.get(name, 0))
    return types, sizes


def _run_segments(
    path: Path,
    proto: Any,
    segments: Sequence[Segment],
    types: Mapping[str, int],
    batches: Sequence[Feeds],
) -> Iterator[tuple[_FetchKey, NDArray[Any]]]:
    """Run the batches through one segment after the other; yield the tensors to measure."""
    provider = choose_providers("cpu")
    alive: list[dict[str, NDArray[Any]]] = [dict(feeds) for feeds in batches]
    last_read = {name: index for index, segment in enumerate(segments) for name in segment.inputs}
    for index, segment in enumerate(segments):
        for number, group in enumerate(segment.groups):
            # Each group runs the nodes again; what later segments read is fetched in the first run.
            passed_on: Sequence[str] = ()
            if number == 0:
                passed_on = segment.outputs
            fetch = tuple(dict.fromkeys((*group, *passed_on)))
            if not fetch:
                continue
            ranks = {name: alive[0][name].ndim for name in segment.inputs}
            model, sources = segment_model(proto, segment, fetch, types, ranks)
            session = open_in_memory(
                model.SerializeToString(),
                path.parent,
                provider,
                optimized=False,
                keep_memory=False,
            )
            outputs = [output.name for output in model.graph.output]
            for held, feeds in zip(alive, batches, strict=True):
                inputs = {name: held[name] for name in segment.inputs}
                results = _run(session, outputs, inputs, feeds)
                for name in group:
                    for source in sources[name]:
                        yield (name, index, source), results[source]
                held |= {name: results[name] for name in passed_on}
        for held in alive:
            # No later segment reads these.
            for name in [name for name in held if last_read.get(name, -1) <= index]:
                del held[name]


def _run(session: Any, outputs: list[str], inputs: Feeds, feeds: Feeds) -> dict[str, NDArray[Any]]:
    try:
        return dict(zip(outputs, session.run(outputs, dict(inputs)), strict=True))
    except Exception as error:  # ONNX Runtime raises many unrelated types
        shapes = ", ".join(f"{name} {array.shape}" for name, array in feeds.items())
        raise InputError(f"the graph fails on {shapes}: {error}") from error


def _elements(value: ir.Value, rows: int, longest: int) -> int:
    """Estimate the number of elements; an unknown first dim is the batch, others are `longest`."""
    if value.shape is None:
        return _UNKNOWN_ELEMENTS
    return math.prod(
        dim if isinstance(dim, int) else (rows if axis == 0 else longest)
        for axis, dim in enumerate(value.shape)
    )

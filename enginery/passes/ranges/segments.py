"""Split a graph into consecutive segments, to read all its inner tensors in bounded memory.

The model of a segment takes values that earlier segments computed (`inputs`) and returns the
tensors of one group. Each node runs once. Fetching the groups from the whole graph would run the
graph once for each group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from enginery.runtime.onnxruntime.tracing import expose_branches


@dataclass(frozen=True)
class Segment:
    """Consecutive nodes of a graph."""

    start: int
    """The index of the first node."""
    stop: int
    """The index after the last node."""
    inputs: tuple[str, ...]
    """Graph inputs and values of earlier segments that the nodes read."""
    outputs: tuple[str, ...]
    """Values computed here that later segments read."""
    groups: tuple[tuple[str, ...], ...]
    """The tensors to fetch, one run for each group. There are several groups only if one node
    computes more than a group holds, as an If does with the tensors of its branches."""


def split_graph(
    graph: Any,
    sizes: Mapping[str, int],
    *,
    typed_values: Collection[str],
    max_bytes: int,
) -> list[Segment]:
    """Split a graph so that the tensors to fetch from each segment take at most `max_bytes`.

    The nodes are taken in order. A new segment starts at the first node whose tensors would exceed
    the limit, unless a value that cannot be passed between models (of unknown type, or no tensor)
    is alive there: its producer and its consumers must be in one segment.

    Args:
        graph: an `onnx.GraphProto`, its nodes in topological order.
        sizes: bytes of each tensor to fetch, those in branches of If nodes included.
        typed_values: values that can be passed from one segment to the next. The others have an
            unknown type or are not tensors, so no cut separates their producer from a consumer.
        max_bytes: the limit of one segment; a single node may exceed it.
    """
    reads = [input_names(node) for node in graph.node]
    last_use = {name: index for index, names in enumerate(reads) for name in names}
    no_cut = _no_cut_before(graph, last_use, typed_values)
    starts, total = [0], 0
    tensors = [[name for name in output_names(node) if name in sizes] for node in graph.node]
    for index, names in enumerate(tensors):
        size = sum(sizes[name] for name in names)
        # Only tensors of a known type can pass from one model to the next.
        if total and total + size > max_bytes and index not in no_cut:
            starts.append(index)
            total = 0
        total += size
    stored = {tensor.name for tensor in graph.initializer}
    segments = []
    for start, stop in zip(starts, [*starts[1:], len(graph.node)], strict=True):
        produced = [name for node in graph.node[start:stop] for name in node.output if name]
        consumed = dict.fromkeys(name for names in reads[start:stop] for name in names)
        # Weights are not among the inputs: the segment's model holds those that it reads.
        outside = consumed.keys() - set(produced) - stored
        fetched = (name for names in tensors[start:stop] for name in names)
        segment = Segment(
            start,
            stop,
            tuple(name for name in consumed if name in outside),
            tuple(name for name in produced if last_use.get(name, -1) >= stop),
            tuple(_fetch_groups(fetched, sizes, max_bytes)),
        )
        segments.append(segment)
    return segments


def peak_live_bytes(segments: Sequence[Segment], sizes: Mapping[str, int]) -> int:
    """Return the most bytes that must be kept between two segments, for one batch."""
    last_reader = {name: index for index, segment in enumerate(segments) for name in segment.inputs}
    alive = peak = 0
    freed = [0] * (len(segments) + 1)
    for index, segment in enumerate(segments):
        for name in segment.outputs:
            alive += sizes.get(name, 0)
            # A value is kept until the last segment that reads it has run.
            freed[last_reader[name]] += sizes.get(name, 0)
        peak = max(peak, alive)
        alive -= freed[index]
    return peak


def segment_model(
    proto: Any,
    segment: Segment,
    fetch: Sequence[str],
    types: Mapping[str, int],
    ranks: Mapping[str, int],
) -> tuple[Any, dict[str, list[str]]]:
    """Build a model of the segment's nodes, with the weights that they read.

    Args:
        proto: the `onnx.ModelProto` that was split; it is not changed.
        segment: the nodes.
        fetch: names of tensors computed in the segment.
        types: the ONNX element type of each value, as a number.
        ranks: the number of dims of the segment's inputs. Without them, ONNX takes a slice of a
            `Shape` for an empty one, and rejects a Resize to it.

    Returns:
        An `onnx.ModelProto`, and for each tensor the names of the outputs that carry its values
        (see `expose_branches`).
    """
    import onnx

    model = onnx.ModelProto(
        ir_version=proto.ir_version, opset_import=proto.opset_import, functions=proto.functions
    )
    graph = model.graph
    graph.name = proto.graph.name
    graph.node.extend(proto.graph.node[segment.start : segment.stop])
    needed = {name for node in graph.node for name in input_names(node)} - set(segment.inputs)
    graph.initializer.extend(t for t in proto.graph.initializer if t.name in needed)
    for name in segment.inputs:
        value = graph.input.add()
        value.name = name
        value.type.tensor_type.elem_type = types[name]
        value.type.tensor_type.shape.dim.extend(
            onnx.TensorShapeProto.Dimension() for _ in range(ranks[name])
        )
    produced = {name for node in graph.node for name in node.output}
    # Tensors in the branches of an If are not outputs of the segment's own nodes.
    sources = expose_branches(graph, {*fetch} - produced)
    sources |= {name: [name] for name in fetch if name in produced}
    for name in dict.fromkeys(source for names in sources.values() for source in names):
        graph.output.add().name = name
    return model, sources


def input_names(node: Any) -> set[str]:
    """Return the values that a node reads from its graph, also through its subgraphs."""
    names = {name for name in node.input if name}
    for graph in _subgraphs(node):
        # What a subgraph defines itself, it does not read from outside.
        local = {value.name for value in graph.input} | {
            tensor.name for tensor in graph.initializer
        }
        local |= {name for inner in graph.node for name in inner.output}
        inner_reads = {name for inner in graph.node for name in input_names(inner)}
        names |= (inner_reads | {value.name for value in graph.output}) - local
    return names


def output_names(node: Any) -> Iterator[str]:
    """Yield the outputs of a node; for an If, those of the nodes in its branches first."""
    if node.op_type == "If" and node.domain in ("", "ai.onnx"):
        for graph in _subgraphs(node):
            for inner in graph.node:
                yield from output_names(inner)
    yield from (name for name in node.output if name)


def _subgraphs(node: Any) -> Iterator[Any]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _no_cut_before(
    graph: Any, last_use: Mapping[str, int], typed_values: Collection[str]
) -> set[int]:
    """Return the indices of the nodes at which no segment may start."""
    return {
        index
        for producer, node in enumerate(graph.node)
        for name in node.output
        if name and name not in typed_values
        for index in range(producer + 1, last_use.get(name, producer) + 1)
    }


def _fetch_groups(
    names: Iterable[str], sizes: Mapping[str, int], max_bytes: int
) -> Iterator[tuple[str, ...]]:
    group: dict[str, None] = {}
    total = 0
    for name in names:
        if group and total + sizes[name] > max_bytes:
            yield tuple(group)
            group, total = {}, 0
        group[name] = None
        total += sizes[name]
    yield tuple(group)

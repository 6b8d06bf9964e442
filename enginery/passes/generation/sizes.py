"""Learn how the sizes of a decoder's tensors follow from those of its inputs.

Exporters compute masks and shapes by dozens of nodes, in another way for each model. What they
compute is read off from runs: a size that is 10 for 4 new tokens after 6, and 5 for 5 after none,
is that of past and new tokens together. With the sizes known, whatever depends on them alone is a
small graph of its own, which runs for any number of tokens without the rest of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from enginery.core.model.feeds import FeedLimits
from enginery.passes.ir.graph_file import read_graph
from enginery.passes.ir.nodes import infer_types
from enginery.runtime.decoder_graphs import is_cross_attention, is_past
from enginery.runtime.onnxruntime.tracing import GraphTracer, open_in_memory
from enginery.runtime.providers.selection import choose_providers

Array = NDArray[Any]
Arrays = dict[str, Array]


class UnsuitableGraphError(Exception):
    """A decoder is not built as expected; the message names the node."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of one run of a decoder."""

    batch: int
    sequence: int
    past: int
    encoder: int

    @property
    def total(self) -> int:
        """The number of past and new tokens."""
        return self.past + self.sequence


# All sizes of a run differ, and so do those of two runs in their ratios.
RUNS = (Sizes(2, 5, 0, 7), Sizes(3, 4, 6, 11))
LONE_STEP = Sizes(1, 1, 9, 5)

_FACTORS: dict[str, Callable[[Sizes], int]] = {
    "batch": lambda sizes: sizes.batch,
    "sequence": lambda sizes: sizes.sequence,
    "past": lambda sizes: sizes.past,
    "total": lambda sizes: sizes.total,
    "encoder": lambda sizes: sizes.encoder,
    "new tokens": lambda sizes: sizes.batch * sizes.sequence,
    "tokens": lambda sizes: sizes.batch * sizes.total,
}


@dataclass(frozen=True)
class Size:
    """A size as a number, or as a multiple of one of the sizes of a run."""

    factor: int
    of: str = ""

    def at(self, sizes: Sizes) -> int:
        """Return the number for one run."""
        return self.factor * (_FACTORS[self.of](sizes) if self.of else 1)


def solve_size(values: Sequence[int], runs: Sequence[Sizes] = RUNS) -> Size | None:
    """Return the size that has these values in these runs; None if there is none.

    >>> solve_size([5, 10]), solve_size([8, 8]), solve_size([10, 15])
    (Size(factor=1, of='total'), Size(factor=8, of=''), Size(factor=5, of='batch'))
    """
    if len(set(values)) == 1:
        return Size(int(values[0]))
    for name, of in _FACTORS.items():
        units = [of(sizes) for sizes in runs]
        pairs = list(zip(values, units, strict=True))
        ratios = {value / unit for value, unit in pairs if unit}
        # A run without a past has no ratio to it, but a multiple of the past is 0 there.
        if len(ratios) == 1 and all(unit or not value for value, unit in pairs):
            (ratio,) = ratios
            if ratio == int(ratio) and ratio > 0:
                return Size(int(ratio), name)
    return None


def solve_sizes(
    values: Sequence[Sequence[int]], runs: Sequence[Sizes] = RUNS
) -> tuple[Size | None, ...]:
    """Return the size of each dim; None for one that does not follow from the inputs."""
    if len({len(sizes) for sizes in values}) > 1:
        return (None,)
    return tuple(solve_size(dim, runs) for dim in zip(*values, strict=True))


class DecoderSizes:
    """The sizes of one decoder graph, and whatever follows from them."""

    def __init__(self, path: Path, limits: FeedLimits, tensors: Sequence[str] = ()) -> None:
        """Run the graph for two different sizes.

        Args:
            path: an FP32 decoder that takes its cache.
            limits: the token ids that it takes.
            tensors: names of tensors whose dims are needed.

        Raises:
            UnsuitableGraphError: the graph has an unknown input.
            InputError: the graph fails.
        """
        self._path = path
        self._limits = limits
        model = read_graph(path)
        infer_types(model)
        self._inputs = list(model.graph.inputs)
        shapes = [node.outputs[0].name or "" for node in model.graph if node.op_type == "Shape"]
        reshaped = [
            node.inputs[0].name or ""
            for node in model.graph
            if node.op_type == "Reshape" and _is_computed(node.inputs[1])
        ]
        reshaped += tensors
        names = list(dict.fromkeys((*shapes, *reshaped)))
        with GraphTracer(path, names) as trace:
            traces = [trace(self.feeds(sizes)) for sizes in RUNS]
        self._shapes = {name: solve_sizes([t[name].tolist() for t in traces]) for name in shapes}
        self.dims = {
            name: solve_sizes([list(traced[name].shape) for traced in traces]) for name in reshaped
        }
        """The dims of `tensors` and of all that is reshaped to a computed shape, by name."""

    def feeds(self, sizes: Sizes, *, names: Collection[str] | None = None, seed: int = 0) -> Arrays:
        """Return inputs of the decoder: rows of full length, a random cache.

        Args:
            sizes: the sizes of the run.
            names: names of the inputs; None for all.
            seed: of the token ids and the cache.
        """
        random = np.random.default_rng(seed)
        ids = self.token_ids((sizes.batch, sizes.sequence), seed=seed)
        positions = np.tile(np.arange(sizes.past, sizes.total), (sizes.batch, 1))
        feeds: Arrays = {}
        for value in self._inputs:
            name = value.name or ""
            if names is not None and name not in names:
                continue
            dtype = np.dtype(np.float32) if value.dtype is None else value.dtype.numpy()
            if name == "input_ids":
                array: Array = ids
            elif name == "position_ids":
                array = positions
            # All ones: rows without padding show which sizes follow from the inputs.
            elif name == "attention_mask":
                array = np.ones((sizes.batch, sizes.total))
            elif name == "encoder_attention_mask":
                array = np.ones((sizes.batch, sizes.encoder))
            elif is_past(name) and value.shape is not None and len(value.shape) == 4:
                length = sizes.encoder if is_cross_attention(name) else sizes.past
                heads, width = value.shape[1], value.shape[3]
                array = random.standard_normal((sizes.batch, heads, length, width))
            elif name == "encoder_hidden_states" and value.shape is not None:
                array = random.standard_normal((sizes.batch, sizes.encoder, value.shape[2]))
            else:
                raise UnsuitableGraphError(f"the input {name}")
            feeds[name] = array.astype(dtype)
        return feeds

    def token_ids(self, shape: tuple[int, int], *, seed: int = 0) -> NDArray[np.int64]:
        """Return random tokens, without padding."""
        limits = self._limits
        special = {limits.pad_token_id, *limits.special_ids}
        allowed = [token for token in range(min(limits.vocab_size, 4096)) if token not in special]
        return np.random.default_rng(seed).choice(allowed or [0], shape).astype(np.int64)

    def evaluate(
        self, names: Sequence[str], sizes: Sizes, extra: Mapping[str, Array] | None = None
    ) -> Arrays:
        """Compute tensors that depend on sizes, masks, positions and token ids alone.

        Args:
            names: names of tensors.
            sizes: the sizes to compute them for.
            extra: inputs that differ from those of `feeds`.

        Raises:
            UnsuitableGraphError: a tensor depends on the cache or on the encoder.
        """
        model = self._part(names, sizes)
        input_names = [value.name or "" for value in model.graph.inputs]
        feeds = self.feeds(sizes, names=input_names)
        if extra:
            feeds |= {name: array for name, array in extra.items() if name in input_names}
        ir.external_data.load_to_model(model)
        session = open_in_memory(
            ir.to_proto(model).SerializeToString(),
            self._path.parent,
            choose_providers("cpu"),
            optimized=False,
        )
        try:
            arrays = session.run(list(names), feeds)
        except Exception as error:  # ONNX Runtime raises many unrelated types
            raise UnsuitableGraphError(f"what computes {names[0]} and fails: {error}") from error
        return dict(zip(names, arrays, strict=True))

    def _part(self, names: Sequence[str], sizes: Sizes) -> ir.Model:
        """Return the part of the graph that computes tensors, with numbers in place of shapes."""
        model = read_graph(self._path)
        infer_types(model)
        graph = model.graph
        by_name = {value.name: value for node in graph for value in node.outputs}
        for node in list(graph):
            if node.op_type != "Shape":
                continue
            old = node.outputs[0]
            dims = self._shapes[old.name or ""]
            # It does not follow from the sizes of the inputs, so it is computed.
            if None in dims:
                continue
            numbers = np.array([size.at(sizes) for size in dims if size], np.int64)
            old.name = f"{old.name}/traced"
            new = ir.Value(name=f"{old.name}/numbers", const_value=ir.tensor(numbers))
            new.type, new.shape = ir.TensorType(ir.DataType.INT64), ir.Shape(numbers.shape)
            graph.register_initializer(new)
            old.replace_all_uses_with(new)
        graph.outputs.clear()
        for name in names:
            if (value := by_name.get(name)) is None:
                raise UnsuitableGraphError(f"{name}, which no node computes")
            value.shape = None
            graph.outputs.append(value)
        RemoveUnusedNodesPass()(model)
        used = {value for value in graph.inputs if value.uses()}
        # What follows from sizes alone runs without the rest of the model.
        for value in used:
            if is_past(value.name or "") or value.name == "encoder_hidden_states":
                raise UnsuitableGraphError(f"{names[0]}, which depends on {value.name}")
        for value in [value for value in graph.inputs if value not in used]:
            graph.inputs.remove(value)
        return model


def _is_computed(value: ir.Value | None) -> bool:
    return value is not None and ir.convenience.get_const_tensor(value) is None

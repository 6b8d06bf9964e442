"""Export a decoder with its cache of keys and values, in one graph.

The graph has the names of Optimum's: it takes the past of each layer as `past_key_values.0.key`, …
and returns the longer one as `present.0.key`, …, each (batch, heads, positions, width). A prompt is
a run with a past of no positions.

The model gets a cache of transformers whose layers hold all positions. A layer of a sliding window
counts its tokens in Python, which a trace would turn into a constant; without it the mask applies
the window, and the result is the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from enginery.core.errors import ExportError
from enginery.core.model.feeds import FeedLimits
from enginery.core.shapes import Dim, TensorSpec
from enginery.export.generation import arrange_decoder, replace_graphs
from enginery.export.graphs import TracedInputs
from enginery.export.native.inputs import ModelInputs
from enginery.export.native.lowering import Lowered, Route, Signature, lower
from enginery.passes.generation.linear import remove_idle_reshapes
from enginery.passes.generation.unattended import keep_unattended_rows
from enginery.passes.ir.graph_file import read_graph
from enginery.runtime.decoder_graphs import LOGITS, is_past, present_name
from enginery.runtime.pytorch.answers import first_line
from enginery.runtime.pytorch.decoder import cache_argument

DECODER = "model.onnx"
_PARTS = ("key", "value")
_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
"""Layers of a cache that hold keys and values, and nothing else."""
_TEXT_INPUTS = ("attention_mask", "position_ids")
_TOTAL = "past_sequence + sequence"

EXAMPLE_SIZES = {"batch": 3, "sequence": 2, "past_sequence": 5}
"""Sizes to trace at. These and their sum, the length of the mask, are different primes."""

Tensors = Mapping[str, torch.Tensor]
Forward = Callable[..., dict[str, torch.Tensor]]
"""Takes tensors by the names of a graph's inputs, and returns those of its outputs."""


@dataclass(frozen=True)
class TracedGraph:
    """A graph that was written, and how."""

    file: str
    lowered: Lowered
    traced: TracedInputs


@dataclass(frozen=True)
class GraphInterface:
    """A graph's inputs with examples, and its outputs."""

    file: str
    inputs: ModelInputs
    outputs: tuple[TensorSpec, ...]


def export_decoder(
    model: Any, limits: FeedLimits, out: Path, *, opset: int, routes: Sequence[Route] = ()
) -> TracedGraph:
    """Write `model.onnx`, a decoder that takes its past, to `out`.

    Args:
        model: a language model, in evaluation mode.
        limits: limits on its inputs.
        out: the staging directory.
        opset: the ONNX operator set.
        routes: the exporters to try; empty for all of this environment.

    Raises:
        ExportError: the model's cache has more than keys and values, or it cannot be lowered.
    """
    cache = _run_once(model)
    tokens: tuple[Dim, ...] = ("batch", "sequence")
    accepted = inspect.signature(model.forward).parameters
    texts = [
        TensorSpec("attention_mask", "int64", ("batch", _TOTAL)),
        TensorSpec("position_ids", "int64", tokens),
    ]
    past = past_specs(cache, "", "past_sequence")
    inputs = (
        TensorSpec("input_ids", "int64", tokens),
        *past,
        *(spec for spec in texts if spec.name in accepted),
    )
    logits = TensorSpec(LOGITS, past[0].dtype, (*tokens, "vocabulary"))
    interface = GraphInterface(
        DECODER,
        ModelInputs(inputs, limits, EXAMPLE_SIZES),
        (logits, *(as_present(spec, _TOTAL) for spec in past)),
    )
    original, cache_name = model.forward, cache_argument(model)
    layers = list(cache.layers)

    def forward(**tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        filled = fill_cache(layers, tensors, "")
        arguments: dict[str, Any] = {n: t for n, t in tensors.items() if not is_past(n)}
        arguments[cache_name] = filled
        output = original(**arguments, use_cache=True, return_dict=True)
        return {LOGITS: output.logits, **read_presents(filled, "")}

    traced = write_graph(model, forward, interface, out, opset=opset, routes=routes)
    finish_graph(out, interface, _TEXT_INPUTS)
    return traced


def _run_once(model: Any) -> Any:
    """Return the cache of a model after two tokens.

    Raises:
        ExportError: the model has none, or one with other layers, or it returns no logits.
    """
    ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    try:
        with torch.no_grad():
            output = model(input_ids=ids, use_cache=True, return_dict=True)
    except Exception as error:  # a model of any class may fail in any way
        raise ExportError(f"PyTorch rejects two tokens: {first_line(error)}") from error
    if LOGITS not in output:
        raise ExportError(
            f"{type(model).__name__} returns no logits, from which a decoder's tokens are chosen.",
            do="Use the task without -with-past.",
            option="task",
        )
    cache = output.get(cache_argument(model))
    require_keys_and_values(model, cache)
    return cache


def require_keys_and_values(model: Any, cache: Any) -> None:
    """Raise ExportError unless each layer of a cache holds keys and values, or shares them."""
    model_type = model.config.model_type
    name = type(cache).__name__
    if cache is None:
        problem = f"{model_type} returns no cache"
    elif not isinstance(cache, DynamicCache):
        problem = f"{model_type} keeps a {name}"
    else:
        # A layer that reads the keys and values of another has none of its own.
        layers = [layer for layer in cache.layers if type(layer).__name__ != "DummyLayer"]
        others = [type(layer).__name__ for layer in layers if type(layer) not in _LAYERS]
        if layers and not others:
            return
        problem = f"{model_type}'s cache has a {others[0] if others else name}"
    raise ExportError(
        f"{problem}, where a graph of a decoder passes on keys and values alone: a recurrent or "
        "convolutional state is not supported.",
        do="Use --task text-generation, which exports the model without a cache.",
        option="task",
    )


def past_specs(cache: Any, part: str, positions: str) -> list[TensorSpec]:
    """Return the inputs that hold a cache, two for each layer that has keys and values.

    Args:
        cache: a cache after a run.
        part: what is between a layer's number and `.key`: nothing, `.decoder` or `.encoder`.
        positions: the name of the dim that counts positions.
    """
    specs = []
    for index, layer in enumerate(cache.layers):
        if type(layer) not in _LAYERS:
            continue
        for name, tensor in zip(_PARTS, (layer.keys, layer.values), strict=True):
            # (batch, heads, positions, width); heads and width may differ between layers.
            _, heads, _, width = tensor.shape
            dtype = str(tensor.dtype).removeprefix("torch.")
            dims: tuple[Dim, ...] = ("batch", heads, positions, width)
            specs.append(TensorSpec(f"past_key_values.{index}{part}.{name}", dtype, dims))
    return specs


def as_present(past: TensorSpec, positions: str) -> TensorSpec:
    """Return the output that is fed back as an input of the cache."""
    batch, heads, _, width = past.dims
    return TensorSpec(present_name(past.name), past.dtype, (batch, heads, positions, width))


def fill_cache(layers: Sequence[Any], tensors: Tensors, part: str) -> Any:
    """Return a cache with a graph's past.

    Args:
        layers: the layers of a cache after a run; those without keys and values are kept.
        tensors: the graph's inputs.
        part: see `past_specs`.
    """
    cache = DynamicCache()
    for index, layer in enumerate(layers):
        if type(layer) not in _LAYERS:
            cache.layers.append(layer)
            continue
        keys, values = (tensors[f"past_key_values.{index}{part}.{name}"] for name in _PARTS)
        filled: Any = DynamicLayer()
        # Not with the past as an update: a trace would join it to an empty tensor.
        filled.keys, filled.values = keys, values
        filled.dtype, filled.device, filled.is_initialized = keys.dtype, keys.device, True
        cache.layers.append(filled)
    return cache


def read_presents(cache: Any, part: str) -> dict[str, torch.Tensor]:
    """Return the keys and values of a cache by the names of a graph's outputs."""
    return {
        f"present.{index}{part}.{name}": tensor
        for index, layer in enumerate(cache.layers)
        if type(layer) in _LAYERS
        for name, tensor in zip(_PARTS, (layer.keys, layer.values), strict=True)
    }


def write_graph(
    model: Any,
    forward: Forward,
    interface: GraphInterface,
    out: Path,
    *,
    opset: int,
    routes: Sequence[Route],
) -> TracedGraph:
    """Write the graph of a function of the model's weights.

    The model itself is traced, so that the graph's weights have its names.
    """
    feeds = interface.inputs.feeds(model)
    with _forward_replaced(model, forward):
        lowered = lower(
            model,
            Signature(feeds, interface.inputs.dims(), [spec.name for spec in interface.outputs]),
            out / interface.file,
            opset=opset,
            routes=routes,
        )
    shapes = {name: tuple(tensor.shape) for name, tensor in feeds.items()}
    return TracedGraph(interface.file, lowered, TracedInputs(shapes))


def finish_graph(
    out: Path, interface: GraphInterface, optional: Sequence[str] = (), *, scope: str = ""
) -> None:
    """Name the dims of a graph's outputs, arrange it if it is a decoder, and drop unread inputs.

    Args:
        out: the directory of the graph.
        interface: its inputs and outputs.
        optional: inputs that a model may take and not read.
        scope: what to begin the names of its nodes with, and of what they compute.
    """
    graph = read_graph(out / interface.file)
    outputs = {spec.name: spec.dims for spec in interface.outputs}
    for value in graph.graph.outputs:
        dims = outputs[value.name or ""]
        declared = value.shape or ir.Shape([None] * len(dims))
        # What the exporter has found to be constant stays: the vocabulary, an encoder's patches.
        value.shape = ir.Shape(
            [old if isinstance(old, int) else new for old, new in zip(declared, dims, strict=True)]
        )
    for value in list(graph.graph.inputs):
        if value.name in optional and not value.uses():
            graph.graph.inputs.remove(value)
    if LOGITS in outputs:
        keep_unattended_rows(graph)
        remove_idle_reshapes(graph)
        arrange_decoder(graph)
    if scope:
        _rename_computed(graph.graph, scope)
    replace_graphs(out, {interface.file: graph}, [interface.file])


def _rename_computed(graph: ir.Graph, scope: str) -> None:
    """Begin the names of a graph's nodes, and of all that is no output or weight, with a scope."""
    for node in graph:
        node.name = f"{scope}{node.name}"
        for value in node.outputs:
            if value.name and not value.is_graph_output():
                value.name = f"{scope}{value.name}"


@contextmanager
def _forward_replaced(model: Any, forward: Forward) -> Iterator[None]:
    model.forward = forward
    try:
        yield
    finally:
        del model.forward

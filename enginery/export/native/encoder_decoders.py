"""Export an encoder-decoder with its caches of keys and values, in two graphs.

`encoder_model.onnx` computes the encoder's states, and the keys and values of the cross-attention.
`decoder_with_past_model.onnx` takes these and the decoder's own past, and runs every step, the
first with a past of no positions. No weight is in both. These are the files, names and dims that
`export.generation` makes of Optimum's graphs.

Both are traced through the model's own `forward`. What it computes beyond the outputs of a graph is
not in the graph: the encoder is traced with one token of a decoder whose logits nobody reads, and
the decoder with states that are zero, since their keys and values come from the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache

from enginery.core.errors import ExportError
from enginery.core.shapes import Dim, TensorSpec
from enginery.export.generation import ENCODER, STEP
from enginery.export.native.decoders import (
    EXAMPLE_SIZES,
    GraphInterface,
    TracedGraph,
    as_present,
    fill_cache,
    finish_graph,
    past_specs,
    read_presents,
    require_keys_and_values,
    write_graph,
)
from enginery.export.native.inputs import ModelInputs
from enginery.export.native.lowering import Route
from enginery.runtime.decoder_graphs import LOGITS, of_encoder
from enginery.runtime.pytorch.answers import first_line
from enginery.runtime.pytorch.decoder import EncoderStates, cache_argument

_STATES = "last_hidden_state"
_MASK = "attention_mask"
_SEQUENCE = "encoder_sequence"
_TOKENS: tuple[Dim, ...] = ("batch", "decoder_sequence")
_PAST = "past_decoder_sequence"
_TOTAL = "past_decoder_sequence + decoder_sequence"
_OWN, _CROSS = ".decoder", ".encoder"
_SCOPE = "encoder/"
"""Prefix of names in the encoder's graph. The exporters call a product `linear` in every graph, and
what is calibrated or pinned by name is so in both of a model."""
_ENCODER_LENGTH = 13
"""Example length of an encoder whose inputs are no tokens."""


def export_encoder_decoder(
    model: Any, inputs: ModelInputs, out: Path, *, opset: int, routes: Sequence[Route] = ()
) -> list[TracedGraph]:
    """Write the graphs of the encoder and the decoder to `out`.

    Args:
        model: a model with an encoder and a decoder, in evaluation mode.
        inputs: those of the encoder.
        out: the staging directory.
        opset: the ONNX operator set.
        routes: the exporters to try; empty for all of this environment.

    Raises:
        ExportError: the model's caches have more than keys and values, or it cannot be lowered.
    """
    encoder_inputs = _with_encoder_dims(inputs)
    output = _run_once(model, encoder_inputs)
    encoder = _encoder(model, encoder_inputs, output, out, opset=opset, routes=routes)
    decoder = _decoder(model, encoder_inputs, output, out, opset=opset, routes=routes)
    return [encoder, decoder]


def _with_encoder_dims(inputs: ModelInputs) -> ModelInputs:
    """Return the inputs with the name of the encoder's length that a decoder knows it by."""
    names = {"sequence": _SEQUENCE}
    specs = tuple(
        replace(spec, dims=tuple(names.get(str(dim), dim) for dim in spec.dims))
        for spec in inputs.specs
    )
    sizes = {names.get(name, name): size for name, size in inputs.sizes.items()}
    return replace(inputs, specs=specs, sizes=sizes)


def _start(model: Any, rows: Any) -> torch.Tensor:
    """Return one token for each row: any will do where the decoder's result is not read."""
    return torch.zeros(rows, 1, dtype=torch.long, device=model.device)


def _run_once(model: Any, inputs: ModelInputs) -> Any:
    """Return the outputs of a model for examples and one token.

    Raises:
        ExportError: the model rejects them, or keeps other caches than those of keys and values.
    """
    feeds = inputs.feeds(model)
    rows = next(iter(feeds.values())).shape[0]
    try:
        with torch.no_grad():
            output = model(
                **feeds, decoder_input_ids=_start(model, rows), use_cache=True, return_dict=True
            )
    except Exception as error:  # a model of any class may fail in any way
        raise ExportError(f"PyTorch rejects the example inputs: {first_line(error)}") from error
    cache = output.get(cache_argument(model))
    if not isinstance(cache, EncoderDecoderCache):
        raise ExportError(
            f"{model.config.model_type} returns a {type(cache).__name__}, expected a cache of the "
            "decoder's keys and values and one of the encoder's.",
            option="task",
        )
    for part in (cache.self_attention_cache, cache.cross_attention_cache):
        require_keys_and_values(model, part)
    return output


def _encoder(
    model: Any,
    inputs: ModelInputs,
    output: Any,
    out: Path,
    *,
    opset: int,
    routes: Sequence[Route],
) -> TracedGraph:
    """Write the encoder, with the keys and values of the cross-attention."""
    states: torch.Tensor = output.encoder_last_hidden_state
    cache_name = cache_argument(model)
    cross = past_specs(output[cache_name].cross_attention_cache, _CROSS, _SEQUENCE)
    state_spec = TensorSpec(
        _STATES, str(states.dtype).removeprefix("torch."), ("batch", _SEQUENCE, states.shape[-1])
    )
    interface = GraphInterface(
        ENCODER, inputs, (state_spec, *(as_present(spec, _SEQUENCE) for spec in cross))
    )
    original = model.forward

    def forward(**tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        rows = next(iter(tensors.values())).shape[0]
        result = original(
            **tensors, decoder_input_ids=_start(model, rows), use_cache=True, return_dict=True
        )
        presents = read_presents(result[cache_name].cross_attention_cache, _CROSS)
        return {_STATES: result.encoder_last_hidden_state, **presents}

    traced = write_graph(model, forward, interface, out, opset=opset, routes=routes)
    finish_graph(out, interface, scope=_SCOPE)
    return traced


def _decoder(
    model: Any,
    encoder_inputs: ModelInputs,
    output: Any,
    out: Path,
    *,
    opset: int,
    routes: Sequence[Route],
) -> TracedGraph:
    """Write the decoder, which reads the encoder through keys and values."""
    cache_name = cache_argument(model)
    caches: EncoderDecoderCache = output[cache_name]
    own_cache, cross_cache = caches.self_attention_cache, caches.cross_attention_cache
    own = past_specs(own_cache, _OWN, _PAST)
    pasts = {spec.name: spec for spec in (*own, *past_specs(cross_cache, _CROSS, _SEQUENCE))}
    mask = of_encoder(_MASK)
    specs = [TensorSpec("input_ids", "int64", _TOKENS), *(pasts[name] for name in sorted(pasts))]
    if any(spec.name == _MASK for spec in encoder_inputs.specs):
        specs.insert(0, TensorSpec(mask, "int64", ("batch", _SEQUENCE)))
    sizes = {
        "batch": EXAMPLE_SIZES["batch"],
        "decoder_sequence": EXAMPLE_SIZES["sequence"],
        _PAST: EXAMPLE_SIZES["past_sequence"],
        _SEQUENCE: encoder_inputs.sizes.get(_SEQUENCE, _ENCODER_LENGTH),
    }
    logits = TensorSpec(LOGITS, own[0].dtype, (*_TOKENS, "vocabulary"))
    interface = GraphInterface(
        STEP,
        ModelInputs(tuple(specs), encoder_inputs.limits, sizes),
        (logits, *(as_present(spec, _TOTAL) for spec in own)),
    )
    original = model.forward
    own_layers, cross_layers = list(own_cache.layers), list(cross_cache.layers)
    width = output.encoder_last_hidden_state.shape[-1]

    def forward(**tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        own_past = fill_cache(own_layers, tensors, _OWN)
        cross = fill_cache(cross_layers, tensors, _CROSS)
        rows, _, length, _ = cross.layers[0].keys.shape
        cache = EncoderDecoderCache(own_past, DynamicCache())
        # The cache itself would compare the length with 0, which a trace takes for a condition.
        cache.cross_attention_cache = cross
        cache.is_updated = dict.fromkeys(range(len(cross_layers)), True)
        states = cross.layers[0].keys.new_zeros(rows, length, width)
        arguments: dict[str, Any] = {cache_name: cache}
        if mask in tensors:
            arguments[_MASK] = tensors[mask]
        result = original(
            **arguments,
            encoder_outputs=EncoderStates(last_hidden_state=states),
            decoder_input_ids=tensors["input_ids"],
            use_cache=True,
            return_dict=True,
        )
        return {LOGITS: result.logits, **read_presents(own_past, _OWN)}

    traced = write_graph(model, forward, interface, out, opset=opset, routes=routes)
    finish_graph(out, interface, (mask,))
    return traced

"""Run a transformers model as its decoder graphs do, with transformers' own cache.

    decoder = TorchDecoder(model, record)
    outputs = decoder.run({"input_ids": ids, "attention_mask": mask, "past_key_values.0.key": …})

The model is called as its users call it: `forward` of its class, with a `DynamicCache` or an
`EncoderDecoderCache` that holds the graph's past. Nothing of the exporter takes part, so that what
an exporter changes in a model shows.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from enginery.core.artifact.manifest import GraphRecord
from enginery.runtime.decoder_graphs import (
    ENCODER_STATES,
    LOGITS,
    is_cross_attention,
    is_past,
    is_present,
    present_name,
)

Tensors = Mapping[str, Any]
"""Tensors by the graph's names."""

_OLD_CACHE = "past_key_values"


@dataclass
class EncoderStates(BaseModelOutput):  # type: ignore[misc]  # transformers has no types
    """What an encoder returns; Moonshine's decoder reads a mask of the states from it, too."""

    attention_mask: torch.Tensor | None = None


class TorchDecoder:
    """A transformers model with the inputs and outputs of one of its decoder graphs."""

    def __init__(self, model: Any, record: GraphRecord) -> None:
        """Take the model as it is.

        Args:
            model: a model with a decoder, with or without an encoder.
            record: the graph.
        """
        self._model = model
        self._names = [spec.name for spec in record.outputs]
        # Such a graph returns the logits of the last position alone.
        self._last_logits = any(s.name == LOGITS and s.dims[1:2] == (1,) for s in record.outputs)
        self._has_encoder = "decoder_input_ids" in inspect.signature(model.forward).parameters
        self._cache_argument = cache_argument(model)
        self._cache: Any = None
        self._encoder_outputs: Any = None

    def run(self, tensors: Tensors) -> dict[str, Any]:
        """Return what the graph returns for its inputs: the past is part of them."""
        past = {name: t for name, t in tensors.items() if is_past(name)}
        arguments = {
            self._argument(name): tensor
            for name, tensor in tensors.items()
            if not is_past(name) and name != ENCODER_STATES
        }
        if self._has_encoder:
            states = tensors.get(ENCODER_STATES)
            states = self._unread_states(tensors) if states is None else states
            arguments["encoder_outputs"] = EncoderStates(last_hidden_state=states)
        arguments[self._cache_argument] = _make_cache(past) if past else None
        output = self._model(
            **arguments, use_cache=any(map(is_present, self._names)), return_dict=True
        )
        outputs = self._with_last_logits(dict(output.items()))
        for name in filter(is_present, self._names):
            outputs[name] = _read_cache(output.get(self._cache_argument), name)
        return outputs

    def decode(self, tensors: Tensors, *, resume: bool) -> dict[str, Any]:
        """Run the next tokens, while the model keeps a cache of its own choice.

        Args:
            tensors: the graph's inputs without the past. Those of the encoder graph follow with the
                prefix `encoder_`: `encoder_input_ids`, `encoder_attention_mask`.
            resume: continue after the tokens of the last call; otherwise start anew.

        Returns:
            The model's outputs. Those of the cache are not among them.

        Raises:
            ValueError: the model returns no cache, or there is nothing to continue.
        """
        if not resume:
            self._cache = self._encoder_outputs = None
        elif self._cache is None:
            raise ValueError("the tokens before were rejected")
        arguments = {self._argument(name): tensor for name, tensor in tensors.items()}
        # The encoder runs in the first call; its states serve the others.
        if self._encoder_outputs is not None:
            arguments["encoder_outputs"] = self._encoder_outputs
        # Without a cache during the run: a call that fails may have added positions to it.
        arguments[self._cache_argument], self._cache = self._cache, None
        output = self._model(**arguments, use_cache=True, return_dict=True)
        if output.get(self._cache_argument) is None:
            raise ValueError(f"{type(self._model).__name__} returns no {self._cache_argument}")
        self._cache = output[self._cache_argument]
        if self._has_encoder and self._encoder_outputs is None:
            self._encoder_outputs = EncoderStates(
                last_hidden_state=output.encoder_last_hidden_state
            )
        return self._with_last_logits(
            {name: value for name, value in output.items() if name != self._cache_argument}
        )

    def encode(self, tensors: Tensors) -> dict[str, Any]:
        """Return the encoder's states, and the keys and values that the decoder makes of them.

        Args:
            tensors: the inputs of the encoder graph.
        """
        # Any token will do: keys and values of cross-attention depend on the encoder's states
        # alone.
        rows = next(iter(tensors.values())).shape[0]
        start = torch.zeros(rows, 1, dtype=torch.long, device=self._model.device)
        output = self._model(**tensors, decoder_input_ids=start, use_cache=True, return_dict=True)
        cache = output.get(self._cache_argument)
        return {
            "last_hidden_state": output.encoder_last_hidden_state,
            **{name: _read_cache(cache, name) for name in self._names if is_present(name)},
        }

    def check_cache(self, tensors: Tensors) -> None:
        """Check that the model takes the graph's past as it is, and returns it with new positions.

        Args:
            tensors: any inputs of the graph.

        Raises:
            ValueError: the model's cache has another layout.
            Exception: PyTorch fails.
        """
        outputs = self.run(tensors)
        for name, past in tensors.items():
            if is_past(name) and not is_cross_attention(name):
                expected = [*past.shape]
                # Keys and values are (rows, heads, positions, width).
                expected[-2] += tensors["input_ids"].shape[1]
                actual = [*outputs[present_name(name)].shape]
                if actual != expected:
                    raise ValueError(
                        f"the cache has the shape {actual} after {name}, not {expected}"
                    )

    def _with_last_logits(self, outputs: dict[str, Any]) -> dict[str, Any]:
        """Return the logits of the last position alone if the graph returns no others."""
        if self._last_logits:
            outputs[LOGITS] = outputs[LOGITS][:, -1:]
        return outputs

    def _argument(self, name: str) -> str:
        """Return the name of an input in `forward`."""
        if not self._has_encoder:
            return name
        of_encoder = name.startswith("encoder_")
        return name.removeprefix("encoder_") if of_encoder else f"decoder_{name}"

    def _unread_states(self, tensors: Tensors) -> Any:
        """Return states of the encoder for a graph that takes its keys and values from the past.

        They are not read, but `forward` would run the encoder without them.
        """
        past = next(t for name, t in tensors.items() if is_cross_attention(name))
        mask = tensors.get("encoder_attention_mask")
        length = past.shape[-2] if mask is None else mask.shape[1]
        width = self._model.get_encoder().config.hidden_size
        return torch.zeros(past.shape[0], length, width, dtype=past.dtype, device=past.device)


def cache_argument(model: Any) -> str:
    """Return the name that the cache has in a model's `forward` and among its outputs.

    It is `past_key_values` in transformers 4, and `cache` in the later versions of 5.
    """
    return "cache" if "cache" in inspect.signature(model.forward).parameters else _OLD_CACHE


def _make_cache(past: Tensors) -> Any:
    """Return a cache with these keys and values."""
    own, cross = DynamicCache(), DynamicCache()
    for name, keys in past.items():
        # Each key comes with the value of the same layer.
        if name.endswith(".key"):
            cache = cross if is_cross_attention(name) else own
            values = past[f"{name.removesuffix('.key')}.value"]
            cache.update(keys, values, int(name.split(".")[1]))
    return EncoderDecoderCache(own, cross) if len(cross) else own


def _read_cache(cache: Any, name: str) -> Any:
    """Return the tensor of a cache that the graph calls `name`.

    Raises:
        ValueError: the cache has another class, or the name has other parts.
    """
    if not isinstance(cache, Cache):
        raise ValueError(f"the cache is a {type(cache).__name__}, not a Cache")
    if isinstance(cache, EncoderDecoderCache):
        crossed = is_cross_attention(name)
        cache = cache.cross_attention_cache if crossed else cache.self_attention_cache
    _, layer, *_, part = name.split(".")
    if part not in ("key", "value"):
        raise ValueError(f"{name} is neither a key nor a value")
    layer_cache = cache.layers[int(layer)]
    return layer_cache.keys if part == "key" else layer_cache.values

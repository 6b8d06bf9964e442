"""Recognize decoders with a cache of keys and values among a model's graphs, by their names.

A graph takes the cache as `past_key_values.0.key`, `past_key_values.0.value`, … and returns the
longer one as `present.0.key`, …, each of shape (batch, heads, positions, head_dim). A decoder that
attends to an encoder takes its states as `encoder_hidden_states`, and its names may have one more
part: `past_key_values.0.decoder.key` for its own positions, `past_key_values.0.encoder.key` for the
encoder's. Those are the same at every step: the decoder's first graph returns them, or the encoder
does.

A graph with a fixed cache has the same names, but each past is a buffer that the run itself writes
to, and it chooses the next tokens, its output `next_ids`; see `FixedCacheDecoder`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import ArtifactError
from enginery.core.shapes import TensorSpec

ENCODER_STATES = "encoder_hidden_states"
LOGITS = "logits"
NEXT_IDS = "next_ids"

# Decoders without position ids whose embeddings of positions count from the first column.
_COUNT_PADDING = (
    "bart",
    "bigbird_pegasus",
    "blenderbot",
    "blenderbot-small",
    "marian",
    "mbart",
    "pegasus",
)

_PAST, _PRESENT = "past_key_values.", "present."


def is_past(name: str) -> bool:
    """Return True for an input that is a part of the cache."""
    return name.startswith(_PAST)


def is_present(name: str) -> bool:
    """Return True for an output that is a part of the cache."""
    return name.startswith(_PRESENT)


def is_cross_attention(name: str) -> bool:
    """Return True for a part of the cache that holds the encoder's positions."""
    return ".encoder." in name


def present_name(past: str) -> str:
    """Return the name of the output that is fed back as this input.

    >>> present_name("past_key_values.0.decoder.key")
    'present.0.decoder.key'
    """
    return past.replace(_PAST, _PRESENT, 1)


def of_encoder(name: str) -> str:
    """Return the name that a decoder gives to an input of its encoder, such as the mask.

    >>> of_encoder("attention_mask")
    'encoder_attention_mask'
    """
    return f"encoder_{name}"


def has_fixed_cache(record: GraphRecord) -> bool:
    """Return True for a graph whose cache is a buffer of fixed size."""
    return any(spec.name == NEXT_IDS for spec in record.outputs)


def is_decoder(record: GraphRecord) -> bool:
    """Return True if a graph takes a cache or the states of an encoder."""
    return any(is_past(spec.name) or spec.name == ENCODER_STATES for spec in record.inputs)


@dataclass(frozen=True)
class DecoderGraphs:
    """The graphs that decode together."""

    first: GraphRecord
    """Runs the prompt."""
    later: GraphRecord
    """Runs the tokens after it with the cache; often the same graph."""
    encoder: GraphRecord | None
    """Computes what the decoder attends to: its states, or their keys and values; None if the
    decoder has no encoder."""
    counts_padding: bool = False
    """Whether padding before a prompt shifts its positions, which changes what is generated."""
    fixed: GraphRecord | None = None
    """Runs prompts and tokens with a cache of fixed size; None if the model has no such graph."""

    def batches(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return the indices of the prompts that may run together, given their lengths."""
        if not self.counts_padding:
            return [list(range(len(lengths)))]
        groups: dict[int, list[int]] = {}
        for index, length in enumerate(lengths):
            groups.setdefault(length, []).append(index)
        return list(groups.values())

    @classmethod
    def find_all(cls, graphs: Sequence[GraphRecord]) -> list[DecoderGraphs]:
        """Return one for each graph with a growing cache among its inputs."""
        fixed = next(filter(has_fixed_cache, graphs), None)
        graphs = [record for record in graphs if record is not fixed]
        cached = [record for record in graphs if any(map(is_past, _names(record.inputs)))]
        without_past = [
            record
            for record in graphs
            if record not in cached and any(map(_is_own_present, _names(record.outputs)))
        ]
        encoder = next((record for record in graphs if not is_decoder(record)), None)
        decoders = []
        for later in cached:
            # Some exports have a graph of their own for the prompt, which takes no past.
            first = without_past[0] if without_past else later
            input_names = _names((*first.inputs, *later.inputs))
            attends = ENCODER_STATES in input_names or any(map(is_cross_attention, input_names))
            decoders.append(cls(first, later, encoder if attends else None, fixed=fixed))
        return decoders


def find_encoder_decoder(graphs: Sequence[GraphRecord]) -> DecoderGraphs | None:
    """Return an encoder and one decoder for every step if these are all graphs, else None.

    A further graph with a fixed cache does not count.
    """
    decoders = DecoderGraphs.find_all(graphs)
    growing = [record for record in graphs if not has_fixed_cache(record)]
    if len(growing) != 2 or len(decoders) != 1 or decoders[0].first is not decoders[0].later:
        return None
    return decoders[0] if decoders[0].encoder is not None else None


def find_generating(artifact: Artifact) -> DecoderGraphs:
    """Return the graphs of an artifact that generate.

    Raises:
        ArtifactError: no graph takes a cache.
    """
    decoders = DecoderGraphs.find_all(artifact.manifest.graphs)
    if len(decoders) != 1:
        names = ", ".join(record.file for record in artifact.manifest.graphs)
        raise ArtifactError(
            f"{artifact.path} does not generate: expected one decoder with a cache, found {names}.",
            do="Export the model for a task that ends in -with-past.",
        )
    counts_padding = decoders[0].encoder is None and artifact.manifest.model_type in _COUNT_PADDING
    return replace(decoders[0], counts_padding=counts_padding)


def _is_own_present(name: str) -> bool:
    return is_present(name) and not is_cross_attention(name)


def _names(specs: Sequence[TensorSpec]) -> list[str]:
    return [spec.name for spec in specs]

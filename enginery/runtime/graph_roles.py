"""Tell which of a model's graphs takes its inputs, and which computes its answers, by their names.

A model that generates has an encoder and a decoder; see `decoder_graphs`. A model that segments has
a graph that encodes images, and one that answers prompts about them, which takes points in an image
beside what the first has computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from enginery.core.artifact.manifest import GraphRecord
from enginery.runtime.decoder_graphs import find_encoder_decoder

POINTS, LABELS = "input_points", "input_labels"
"""Inputs of prompts: points in pixels, and whether each is in the object or beside it."""


@dataclass(frozen=True)
class SegmenterGraphs:
    """The graphs of a model that segments what points in an image belong to."""

    images: GraphRecord
    """Encodes images."""
    prompts: GraphRecord
    """Takes all outputs of `images`, and points."""


def find_segmenter(graphs: Sequence[GraphRecord]) -> SegmenterGraphs | None:
    """Return the graphs of images and of prompts if these are all graphs, else None."""
    if len(graphs) != 2:
        return None
    images, prompts = sorted(
        graphs, key=lambda record: any(spec.name == POINTS for spec in record.inputs)
    )
    embeddings = {spec.name for spec in images.outputs}
    if {spec.name for spec in prompts.inputs} != {*embeddings, POINTS, LABELS}:
        return None
    return SegmenterGraphs(images, prompts)


def input_graph(graphs: Sequence[GraphRecord]) -> GraphRecord:
    """Return the graph that takes a model's own inputs: the encoder, or else the first graph."""
    if segmenter := find_segmenter(graphs):
        return segmenter.images
    decoder = find_encoder_decoder(graphs)
    return graphs[0] if decoder is None or decoder.encoder is None else decoder.encoder


def answer_graph(graphs: Sequence[GraphRecord]) -> GraphRecord:
    """Return the graph that computes a model's answers: the decoder, or else the first graph."""
    if segmenter := find_segmenter(graphs):
        return segmenter.prompts
    decoder = find_encoder_decoder(graphs)
    return graphs[0] if decoder is None else decoder.later

"""Arrange the graphs of a model with a cache for generation.

A decoder computes the logits of the last position alone, and its linear layers without reshaping
to rows. Of an encoder-decoder there are two graphs in place of three: the encoder also computes the
cross-attention's keys and values, and one decoder runs every step, the first with an empty cache.
No weight is in two graphs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import onnx_ir as ir

from enginery.core.artifact.external_data import external_data_files
from enginery.export.graphs import list_graphs
from enginery.passes.generation.cross_attention import UnknownPathError, add_cross_attention
from enginery.passes.generation.last_position import keep_last_position
from enginery.passes.generation.linear import remove_row_reshapes
from enginery.passes.ir.graph_file import read_graph, write_graph
from enginery.passes.ir.nodes import infer_types
from enginery.runtime.decoder_graphs import ENCODER_STATES, is_cross_attention, is_present

ENCODER, STEP = "encoder_model.onnx", "decoder_with_past_model.onnx"
"""The graphs of an encoder-decoder that generates."""
_FIRST = "decoder_model.onnx"


def arrange_for_generation(directory: Path) -> list[str]:
    """Edit the graphs of a model that Optimum has exported with a cache.

    Returns:
        Notes: why the graphs of an encoder-decoder stay as they are.
    """
    files = list_graphs(directory)
    if len(files) == 1:
        model = read_graph(directory / files[0])
        arrange_decoder(model)
        replace_graphs(directory, {files[0]: model}, files)
        return []
    if files != sorted((ENCODER, _FIRST, STEP)):
        return [f"graphs are Optimum's: expected an encoder and decoders, found {', '.join(files)}"]
    encoder, first, step = (read_graph(directory / name) for name in (ENCODER, _FIRST, STEP))
    cross = [
        value.name
        for value in first.graph.outputs
        if is_present(value.name or "") and is_cross_attention(value.name or "")
    ]
    try:
        if cross:
            add_cross_attention(encoder, first, cross, states=ENCODER_STATES)
    except UnknownPathError as error:
        return [f"graphs are Optimum's: the keys of the cross-attention depend on {error}"]
    keep_last_position(step)
    replace_graphs(directory, {ENCODER: encoder, STEP: step}, files)
    return []


def arrange_decoder(model: ir.Model) -> None:
    """Let a decoder compute the logits of the last position alone, without reshaping to rows."""
    infer_types(model)
    keep_last_position(model)
    remove_row_reshapes(model)


def replace_graphs(directory: Path, models: Mapping[str, ir.Model], old: Iterable[str]) -> None:
    """Write graphs in place of old ones, from which weights may still be read."""
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        for name, model in models.items():
            write_graph(model, Path(folder) / name)
        for name in old:
            for file in (name, *external_data_files(directory / name)):
                (directory / file).unlink()
        for path in Path(folder).iterdir():
            path.rename(directory / path.name)

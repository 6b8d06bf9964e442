"""Export a model that segments what points in an image belong to, in two graphs.

`vision_encoder.onnx` encodes images, and `prompt_encoder_mask_decoder.onnx` answers prompts about
them. These are the files, names and dims of Optimum's graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from enginery.core.errors import ExportError
from enginery.core.shapes import TensorSpec
from enginery.export.native.decoders import GraphInterface, TracedGraph, finish_graph, write_graph
from enginery.export.native.inputs import ModelInputs
from enginery.export.native.lowering import Route
from enginery.runtime.graph_roles import LABELS, POINTS
from enginery.runtime.pytorch.answers import first_line
from enginery.runtime.pytorch.segmenter import (
    IMAGE_ENCODER,
    PROMPT_DECODER,
    decode_prompts,
    encode_image,
)

_OBJECTS, _POINTS = "point_batch", "nb_points_per_image"
_SIZES = {_OBJECTS: 5, _POINTS: 7}
"""Example sizes: torch takes equal ones for one dim."""

_SCOPE = "image_encoder/"
"""Prefix of names in the graph of images: what is calibrated or pinned by name is so in both."""

Run = Callable[[Any, Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]


def export_segmenter(
    model: Any, inputs: ModelInputs, out: Path, *, opset: int, routes: Sequence[Route] = ()
) -> list[TracedGraph]:
    """Write the graphs of the image encoder and of the prompts to `out`.

    Args:
        model: the model, in evaluation mode.
        inputs: those of the image encoder, of one size: the embeddings of positions have one.
        out: the staging directory.
        opset: the ONNX operator set.
        routes: the exporters to try; empty for all of this environment.

    Raises:
        ExportError: the model rejects the example inputs, or cannot be lowered.
    """

    def write(run: Run, interface: GraphInterface, scope: str = "") -> TracedGraph:
        def forward(**tensors: torch.Tensor) -> dict[str, torch.Tensor]:
            return run(model, tensors)

        traced = write_graph(model, forward, interface, out, opset=opset, routes=routes)
        finish_graph(out, interface, scope=scope)
        return traced

    image_specs = _output_specs(encode_image, model, inputs)
    images = write(encode_image, GraphInterface(IMAGE_ENCODER, inputs, image_specs), _SCOPE)
    points = ("batch", _OBJECTS, _POINTS)
    floats = image_specs[0].dtype
    prompts = ModelInputs(
        (
            *image_specs,
            TensorSpec(POINTS, floats, (*points, 2)),
            TensorSpec(LABELS, "int64", points),
        ),
        inputs.limits,
        {**inputs.sizes, **_SIZES},
    )
    mask_specs = _output_specs(decode_prompts, model, prompts)
    return [images, write(decode_prompts, GraphInterface(PROMPT_DECODER, prompts, mask_specs))]


def _output_specs(run: Run, model: Any, inputs: ModelInputs) -> tuple[TensorSpec, ...]:
    """Return the outputs of a part of the model; the dims of prompts are known by their size.

    Raises:
        ExportError: the part rejects the example inputs.
    """
    try:
        with torch.no_grad():
            outputs = run(model, inputs.feeds(model))
    except Exception as error:  # a model of any class may fail in any way
        raise ExportError(f"PyTorch rejects the example inputs: {first_line(error)}") from error
    has_prompts = _OBJECTS in inputs.sizes
    return tuple(
        TensorSpec(
            name,
            str(tensor.dtype).removeprefix("torch."),
            ("batch", _OBJECTS, *tensor.shape[2:]) if has_prompts else ("batch", *tensor.shape[1:]),
        )
        for name, tensor in outputs.items()
    )

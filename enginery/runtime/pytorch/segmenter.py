"""Run a model that segments what points in an image belong to, in its two parts.

SAM encodes an image once, and then answers any number of prompts. The names of both parts' inputs
and outputs are those of Optimum's graphs, and for SAM 2, which Optimum does not know, those of the
graphs that transformers.js reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginery.runtime.graph_roles import LABELS, POINTS

IMAGE_ENCODER, PROMPT_DECODER = "vision_encoder.onnx", "prompt_encoder_mask_decoder.onnx"
EMBEDDINGS, POSITIONS = "image_embeddings", "image_positional_embeddings"

_TYPES = ("sam", "sam2")
_MASKS = ("iou_scores", "pred_masks", "object_score_logits")

Tensors = Mapping[str, Any]
"""Tensors by the graphs' names."""


def is_segmenter(model: Any) -> bool:
    """Return True for a model of images and prompts, which `encode_image` and the like run."""
    return model.config.model_type in _TYPES


def encode_image(model: Any, tensors: Tensors) -> dict[str, Any]:
    """Return what a model keeps of images for any prompts.

    Args:
        model: the model.
        tensors: `pixel_values`, (batch, channels, height, width).

    Returns:
        SAM: `image_embeddings` and `image_positional_embeddings`, both (batch, channels, rows,
        columns). SAM 2, whose decoder also reads finer feature maps: `image_embeddings.0`, ….
    """
    pixels = tensors["pixel_values"]
    embeddings = model.get_image_embeddings(pixels)
    if isinstance(embeddings, list):
        return {f"{EMBEDDINGS}.{level}": tensor for level, tensor in enumerate(embeddings)}
    positions = model.get_image_wide_positional_embeddings()
    return {EMBEDDINGS: embeddings, POSITIONS: positions.repeat(pixels.shape[0], 1, 1, 1)}


def decode_prompts(model: Any, tensors: Tensors) -> dict[str, Any]:
    """Return the masks of the objects that points belong to.

    Args:
        model: the model.
        tensors: what `encode_image` returns, `input_points` (batch, objects, points, 2) in pixels,
            and `input_labels` (batch, objects, points).

    Returns:
        `iou_scores` (batch, objects, masks), `pred_masks` (batch, objects, masks, height, width),
        and of SAM 2 `object_score_logits` (batch, objects, 1).
    """
    prompts = {POINTS: tensors[POINTS], LABELS: tensors[LABELS]}
    if POSITIONS not in tensors:
        levels = sorted(name for name in tensors if name.startswith(f"{EMBEDDINGS}."))
        # The class's own: the instance's may be replaced for a trace.
        output = type(model).forward(
            model, image_embeddings=[tensors[name] for name in levels], **prompts, return_dict=True
        )
        return {name: output[name] for name in _MASKS}
    sparse, dense = model.prompt_encoder(**prompts, input_boxes=None, input_masks=None)
    masks, scores, *_ = model.mask_decoder(
        image_embeddings=tensors[EMBEDDINGS],
        image_positional_embeddings=tensors[POSITIONS],
        sparse_prompt_embeddings=sparse,
        dense_prompt_embeddings=dense,
        multimask_output=True,
    )
    return dict(zip(_MASKS, (scores, masks), strict=False))

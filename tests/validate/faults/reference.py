"""Faults of a reference: what a forward may change of a model, so that its next answer is another.

Each is done to a BERT after a forward, as a careless model does it to itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

Change = Callable[[Any], None]


def _attribute(model: Any) -> None:
    model.embeddings.position_embedding_type = "none"


def _training(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.9
    model.train()


def _epsilon(model: Any) -> None:
    model.embeddings.LayerNorm.eps *= 1e9


def _buffer_in_place(model: Any) -> None:
    model.embeddings.position_ids.copy_(model.embeddings.position_ids.flip(1))


def _buffer_replaced(model: Any) -> None:
    positions = model.embeddings.position_ids
    model.embeddings.register_buffer("position_ids", positions.flip(1), persistent=False)


def _weight_replaced(model: Any) -> None:
    table = model.embeddings.word_embeddings
    table.weight = torch.nn.Parameter(table.weight.detach().flip(0), requires_grad=False)


def _part_replaced(model: Any) -> None:
    model.encoder.layer[1].attention = copy.deepcopy(model.encoder.layer[0].attention)


def _part_removed(model: Any) -> None:
    model.encoder.layer = model.encoder.layer[:1]


def _parts_exchanged(model: Any) -> None:
    layers = model.encoder.layer
    layers[0], layers[1] = layers[1], layers[0]


def _hook_added(model: Any) -> None:
    forward = model.embeddings.forward
    model.embeddings.forward = lambda *args, **options: 2 * forward(*args, **options)


CHANGES: dict[str, Change] = {
    "attribute": _attribute,
    "training": _training,
    "epsilon": _epsilon,
    "buffer in place": _buffer_in_place,
    "buffer replaced": _buffer_replaced,
    "weight replaced": _weight_replaced,
    "part replaced": _part_replaced,
    "part removed": _part_removed,
    "parts exchanged": _parts_exchanged,
    "forward replaced": _hook_added,
}

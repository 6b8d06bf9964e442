"""Tiny models that find objects in images or segment them, with the processors of real ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks import model_types
from enginery.core.json_file import json_bytes
from enginery.core.model.files import PreprocessorConfig
from tests.answers import inputs

LABELS = ("cat", "boat", "tree")
_SIDES = {"shortest_edge": 64, "longest_edge": 96}


def save_vision_model(
    kind: str, task: str, directory: Path, processor: Mapping[str, Any] | None = None
) -> Path:
    """Write a tiny model whose labels have names.

    Args:
        kind: the model type, of `tests/model_types.json`.
        task: the task.
        directory: where it goes.
        processor: keys of preprocessor_config.json beside those of the type.
    """
    model_types.save_model(kind, task, directory)
    config = directory / "config.json"
    values = json.loads(config.read_text())
    count = len(values.get("id2label") or "01")  # two labels are the default of transformers
    names = [*LABELS, *(f"thing {index}" for index in range(len(LABELS), count))][:count]
    values["id2label"] = {str(index): name for index, name in enumerate(names)}
    values["label2id"] = {name: index for index, name in enumerate(names)}
    config.write_bytes(json_bytes(values))
    file = directory / PreprocessorConfig.FILE
    known = json.loads(file.read_text()) if file.exists() else {}
    if "longest_edge" in known.get("size", ()):
        known["size"] = _SIDES
    if settings := {**known, **(processor or {})}:
        file.write_bytes(json_bytes(settings))
    return directory


def opened_images(folder: Path) -> list[Image.Image]:
    """Return the pictures of `tests.answers.inputs`, files opened by Pillow.

    transformers leaves files open, which is a warning.
    """
    return [
        Image.open(BytesIO(Path(item).read_bytes())) if isinstance(item, str) else item
        for item in inputs.images(folder)
    ]


def encoded_picture(size: tuple[int, int], seed: int = 1) -> bytes:
    """Return the content of a PNG file."""
    content = BytesIO()
    inputs._picture(size, seed).save(content, "png")
    return content.getvalue()

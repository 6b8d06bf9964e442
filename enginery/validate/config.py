"""The options of the validate stage. They import nothing, so that `enginery --help` is quick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ValidateConfig:
    """What an artifact is compared on, where, and how strictly."""

    provider: str = "cpu"
    """Execution providers in order of preference: tensorrt,cuda,cpu."""
    allow_fallback: bool = False
    """Take the next provider where the first cannot be had, and say so."""
    profile: tuple[str, ...] = ()
    """Shape profiles, `batch=1:8:32,sequence=8:128:512`; every corner of each is run."""
    data: str = ""
    """Real inputs: a CSV, TSV, JSONL, Parquet or text file, or a folder of images.
    Empty: built-in sentences or images."""
    column: str = "text"
    """The column of `data` that holds the text."""
    rows: int = 64
    """How many rows of `data` are read, evenly spread over the file."""
    reference: str = ""
    """The PyTorch model to compare with, for an artifact that was imported from .onnx.
    Empty: the artifact's own source."""
    max_abs_error: float | Literal["noise-floor"] = "noise-floor"
    """The largest absolute error of an output. `noise-floor`: scaled from PyTorch's own error
    at the artifact's precision on the same inputs."""
    min_cosine: float | Literal["by-precision"] = "by-precision"
    """The smallest cosine between an output and the reference."""
    seed: int = 0
    """For the made-up inputs of the shape sweep."""

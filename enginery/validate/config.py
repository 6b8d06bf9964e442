"""The options of the validate stage; importing them is quick, as `enginery --help` is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from enginery.core.errors import OptionError


@dataclass(frozen=True)
class ValidateConfig:
    """What an artifact is compared on, where, and how strictly."""

    provider: str = ""
    """Execution providers in order of preference: tensorrt,cuda,cpu. Empty: what the variable
    `ENGINERY_PROVIDERS` says, and else cpu."""
    provider_option: tuple[str, ...] = ()
    """An option of a provider, `cuda.gpu_mem_limit=2GiB`; repeat it for several."""
    allow_fallback: bool = False
    """Take the next provider where the first cannot be had, and say so."""
    profile: tuple[str, ...] = ()
    """Shape profiles, `batch=1:8:32,sequence=8:128:512`; every corner of each is run."""
    data: str = ""
    """Real inputs: a CSV, TSV, JSONL, Parquet or text file, a folder of images,
    or arrays of the graph's own inputs, `.npz` or `.npy`.
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
    at the artifact's precision on the same inputs; any, for a quantized artifact."""
    min_cosine: float | Literal["by-precision"] = "by-precision"
    """The smallest cosine between an output and the reference. `by-precision`: for a quantized
    artifact, by the budget that it was made with."""
    seed: int = 0
    """For the made-up inputs of the shape sweep."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model, in PyTorch. Only for authors you trust."""
    allow_pickle: bool = False
    """Load pickled weights into PyTorch. Only for authors you trust."""


def check_options(config: ValidateConfig) -> None:
    """Raises OptionError for a value that no comparison can be made with.

    A limit of NaN is one: no error is larger than NaN, so everything would pass.
    """
    error, cosine = config.max_abs_error, config.min_cosine
    if not isinstance(error, str) and not (math.isfinite(error) and error >= 0):
        raise OptionError(
            f"option 'max_abs_error' is {error}, expected a finite number from 0 on.",
            option="max_abs_error",
        )
    if not isinstance(cosine, str) and not -1 <= cosine <= 1:
        raise OptionError(
            f"option 'min_cosine' is {cosine}, expected -1 to 1.", option="min_cosine"
        )
    if config.rows < 1:
        raise OptionError(f"option 'rows' is {config.rows}, expected 1 or more.", option="rows")
    if config.seed < 0:
        raise OptionError(f"option 'seed' is {config.seed}, expected 0 or more.", option="seed")

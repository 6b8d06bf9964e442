"""Options of the validate stage. Imports are light, so that `enginery --help` is fast."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from enginery.core.errors import OptionError
from enginery.core.options import LabelReading, by_content, not_in_key

Effort = Literal["quick", "normal", "thorough"]


@dataclass(frozen=True)
class ValidateConfig:
    """Options of the validation: providers, inputs and tolerances."""

    providers: str = by_content()
    """Execution providers in order of preference, such as tensorrt,cuda,cpu; or a YAML or JSON
    file of them. If empty, the environment variable `ENGINERY_PROVIDERS`, or cpu."""
    provider_option: tuple[str, ...] = not_in_key(())  # part of the content of `providers`
    """Option of a provider, such as `cuda.gpu_mem_limit=2GiB`. Can be repeated."""
    allow_fallback: bool = False
    """Use the next provider if the first is not available, and report it."""
    profile: tuple[str, ...] = ()
    """Shape profile, such as `batch=1:8:32,sequence=8:128:512`; all its corners are compared.
    Can be repeated."""
    data: str = by_content()
    """Real inputs: a CSV, TSV, JSONL, Parquet or text file, a folder of images, or
    arrays of the graph's own inputs, `.npz`, `.npy` or a folder of `.npz` files. If empty, built-in
    sentences or images."""
    column: str = "text"
    """Column of `data` with the texts."""
    label_column: str = ""
    """Column of `data` with the correct labels of a text classifier: report the accuracy of the
    reference and of the artifact. It does not decide the verdict."""
    label_values: LabelReading = "auto"
    """What the labels are: `names` of the model's classes, or `indices`. `auto` reads the whole
    column in one of the two ways; that both are possible is an error."""
    rows: int = 64
    """Number of rows to read from `data`, evenly spread over the file."""
    reference: str = by_content()
    """Model to compare with: one in PyTorch, or an .onnx file. If empty, the artifact's own source,
    which is the .onnx file itself for an imported one."""
    max_abs_error: float | Literal["noise-floor"] = "noise-floor"
    """Largest absolute error of an output. `noise-floor` derives it from the reference's own error
    at the artifact's precision on the same inputs; a quantized artifact has no such limit."""
    min_cosine: float | Literal["by-precision"] = "by-precision"
    """Smallest cosine between an output and the reference. `by-precision` derives it from the
    artifact's precision, or from the budget of a quantized artifact."""
    effort: Effort = "normal"
    """How many batch sizes and lengths to run: `quick`, `normal` or `thorough`, which runs every
    length."""
    python: str = not_in_key()  # the versions of its packages are
    """The interpreter of another environment that runs the model in PyTorch, such as
    ~/transformers5/bin/python; empty for the variable `ENGINERY_EXPORT_PYTHON`, or this one."""
    seed: int = 0
    """Random seed for the inputs of the shape sweep."""
    trust_remote_code: bool = not_in_key(False)  # a permission, like the next
    """Run Python code that comes with the model. Only for authors you trust."""
    allow_pickle: bool = not_in_key(False)
    """Load pickled weights. Only for authors you trust."""


def check_options(config: ValidateConfig) -> None:
    """Check the options.

    Raises:
        OptionError: a value is out of range. NaN is rejected as a limit: no error is larger than
            NaN, so everything would pass.
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
    if config.label_column and not config.data:
        raise OptionError(
            f"option 'label_column' is '{config.label_column}', but there are no data.",
            do="Name the file with that column: --data reviews.csv",
            option="label_column",
        )
    if config.rows < 1:
        raise OptionError(f"option 'rows' is {config.rows}, expected 1 or more.", option="rows")
    if config.seed < 0:
        raise OptionError(f"option 'seed' is {config.seed}, expected 0 or more.", option="seed")

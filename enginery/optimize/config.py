"""The options of the optimize stage. The module imports little, to keep `enginery --help` fast."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from enginery.core.errors import OptionError
from enginery.core.options import by_content, not_in_key


@dataclass(frozen=True)
class OptimizeConfig:
    """The target and precision of an optimized graph, and how its FP16 ranges are checked."""

    target: Literal["cuda", "tensorrt", "cpu"] = "tensorrt"
    """What will run the graph. `tensorrt` gets standard ops only; `cuda` and `cpu` get ONNX
    Runtime's fused ops, which TensorRT cannot parse."""
    precision: Literal["auto", "fp32", "fp16", "bf16"] = "auto"
    """The type of weights and activations; `auto` is FP32 for the target cpu, else FP16. TensorRT
    follows the types in the graph."""
    io_dtype: Literal["fp32", "same"] = "fp32"
    """The type of float inputs and outputs: `fp32`, or `same` for that of `precision`."""
    level: Literal["O1", "O2", "O3", "O4"] | None = None
    """The level of fusions, named as Optimum's, for cuda and cpu; O2 by default. O1: basic
    optimizations such as constant folding. O2: also fused attention, LayerNorm and GELU. O3: also
    the tanh approximation of GELU. O4: O3 in FP16."""
    data: str = by_content()
    """Real inputs to measure ranges on: a CSV, TSV, JSONL, Parquet or text file, a folder of
    images, or arrays of the graph's own inputs, `.npz`, `.npy` or a folder of `.npz` files. Empty:
    built-in sentences or images, or generated numbers."""
    column: str = "text"
    """The column of `data` that holds the text."""
    rows: int = 64
    """The number of rows read from `data`, evenly spread over the file or folder."""
    keep_fp32: tuple[str, ...] = ()
    """Names of nodes that stay FP32, besides those whose ranges require it."""
    max_error: float | Literal["by-precision"] = "by-precision"
    """The largest error of an output against FP32, relative to its largest magnitude.
    `by-precision`: 16 unit roundoffs, 0.78 % for FP16."""
    max_rounds: int = 6
    """How many times the check may keep more nodes in FP32 before the stage fails."""
    allow_failed: bool = not_in_key(False)  # a permission
    """Accept an artifact whose validation failed."""

    def resolved(self) -> OptimizeConfig:
        """Return the options with the precision that `auto` means for the target."""
        if self.precision != "auto":
            return self
        return replace(self, precision="fp32" if self.target == "cpu" else "fp16")

    @property
    def low_precision(self) -> Literal["fp16", "bf16"] | None:
        """What the graph is cast to; None for FP32."""
        match self.resolved().precision:
            case "fp16" | "bf16" as precision:
                return precision
        return None


def check_options(config: OptimizeConfig) -> None:
    """Raise OptionError for invalid values, and for options that contradict each other."""
    config = config.resolved()
    if config.target == "cpu" and config.precision != "fp32":
        raise OptionError(
            f"option 'precision' is {config.precision} for the target cpu, where ONNX Runtime "
            "would compute in FP32 and only add casts.",
            do="Leave out --precision. For INT8: enginery quantize --target cpu",
            option="target",
        )
    if config.target == "tensorrt" and config.level:
        raise OptionError(
            f"option 'level' is {config.level} for the target tensorrt, which does not use ONNX "
            "Runtime's fusions.",
            do="Add --target cuda or --target cpu, or omit --level.",
            option="level",
        )
    if config.level == "O4" and (config.target != "cuda" or config.precision != "fp16"):
        raise OptionError(
            f"option 'level' is O4, which means O3 in FP16 on CUDA, but the target is "
            f"{config.target} and the precision is {config.precision}.",
            do="Use --level O3, or --target cuda --precision fp16.",
            option="level",
        )
    if config.rows < 1:
        raise OptionError(f"option 'rows' is {config.rows}, expected 1 or more.", option="rows")
    if config.max_rounds < 0:
        raise OptionError(
            f"option 'max_rounds' is {config.max_rounds}, expected 0 or more.", option="max_rounds"
        )
    error = config.max_error
    if not isinstance(error, str) and not (math.isfinite(error) and error > 0):
        raise OptionError(
            f"option 'max_error' is {error}, expected a number above 0.", option="max_error"
        )

"""The options of the optimize stage. They import next to nothing: `enginery --help` is quick."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from enginery.core.errors import OptionError


@dataclass(frozen=True)
class OptimizeConfig:
    """What a graph is made ready for, and in which precision."""

    target: Literal["cuda", "tensorrt", "cpu"] = "tensorrt"
    """Who will run it. `tensorrt` keeps to standard ops; `cuda` and `cpu` get ONNX Runtime's own
    fused ops, which TensorRT cannot parse."""
    precision: Literal["fp32", "fp16", "bf16"] = "fp16"
    """The type of weights and activations. TensorRT takes it from the graph."""
    io_dtype: Literal["fp32", "same"] = "fp32"
    """Inputs and outputs: `fp32` leaves them as they are, `same` makes them of the precision."""
    level: Literal["O1", "O2", "O3", "O4"] = "O2"
    """Optimum's level, for cuda and cpu. O1: constant folding and the like. O2: fused attention,
    LayerNorm and GELU too. O3: GELU by its tanh approximation. O4: O3 in FP16."""
    quantize: Literal["none", "dynamic"] = "none"
    """`dynamic`: INT8 weights, and activations quantized as they come; for cpu only."""
    data: str = ""
    """Real inputs to measure ranges on: a CSV, TSV, JSONL, Parquet or text file, or a folder of
    images. Empty: built-in sentences or images."""
    column: str = "text"
    """The column of `data` that holds the text."""
    rows: int = 64
    """How many rows of `data` are read, evenly spread over the file."""
    keep_fp32: tuple[str, ...] = ()
    """Names of nodes that stay FP32 besides those that the ranges say."""
    max_error: float | Literal["by-precision"] = "by-precision"
    """The largest error of an output against FP32, relative to its largest magnitude.
    `by-precision`: 16 unit roundoffs, 0.78 % for FP16."""
    max_rounds: int = 6
    """How often FP32 islands may grow before the stage gives up."""


def check_options(config: OptimizeConfig) -> None:
    """Raises OptionError for values that contradict each other or mean nothing."""
    if config.quantize == "dynamic" and config.target != "cpu":
        raise OptionError(
            f"option 'quantize' is dynamic for the target {config.target}: scales that are "
            "computed as inputs come run on the CPU alone; TensorRT wants them in the graph.",
            do="Use: enginery quantize ARTIFACT --calibration FILE",
            option="quantize",
        )
    if config.target == "cpu" and config.precision != "fp32":
        raise OptionError(
            f"option 'precision' is {config.precision} for the target cpu, where ONNX Runtime "
            "computes in FP32 and would only add casts.",
            do="Leave it at --precision fp32; --quantize dynamic makes it smaller and faster.",
            option="target",
        )
    if config.target == "tensorrt" and config.level != OptimizeConfig.level:
        raise OptionError(
            f"option 'level' is {config.level} for the target tensorrt, which gets no fusions of "
            "ONNX Runtime's.",
            do="Leave it out; levels are for cuda and cpu.",
            option="level",
        )
    if config.level == "O4" and (config.target != "cuda" or config.precision != "fp16"):
        raise OptionError(
            f"option 'level' is O4, which is O3 in FP16 on CUDA; found target {config.target} and "
            f"precision {config.precision}.",
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

"""The options of the quantize stage; importing them is quick, as `enginery --help` is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from enginery.core.errors import OptionError

Method = Literal["percentile", "minmax", "moving-average", "entropy", "mse"]


@dataclass(frozen=True)
class QuantizeConfig:
    """How a model's matrix products become INT8, and how far its answers may move."""

    calibration: str = ""
    """Real inputs: a CSV, TSV, JSONL, Parquet or text file, or a folder of images."""
    column: str = "text"
    """The column of `calibration` that holds the text."""
    label_column: str = ""
    """The column that holds the right label. Then accuracy is what the budget is about."""
    rows: int = 512
    """How many rows are read, evenly spread over the file. A quarter of them, at most 128, measure
    the accuracy and calibrate nothing."""
    method: Method = "percentile"
    """What the range of an activation is taken from."""
    percentile: float = 99.999
    """The share of values, in percent, inside the range; for `method` percentile."""
    smoothing: float | Literal["search", "none"] = "search"
    """How much of the activations' outlier channels moves into the weights, 0 to 1.
    `search` takes for each activation what errs least in its own layers' outputs."""
    shift: bool = True
    """Centre the channels of an activation where that errs less; the bias takes it up."""
    bias_correction: bool = True
    """Subtract the mean error of each output channel from its bias."""
    residual: Literal["fp16", "fp32"] = "fp16"
    """The precision of everything that is not INT8."""
    min_cosine: float = 0.998
    """The least mean cosine between the answers and the FP32 model's. Layers are left out of INT8,
    the most harmful first, until it holds."""
    max_accuracy_drop: float = 0.01
    """With `label_column`, in place of `min_cosine`: how much accuracy may fall, 0.01 for one
    percentage point."""
    exclude: tuple[str, ...] = ()
    """Layers that stay as they are: node names, or patterns such as `*/layer.0/*`."""
    ranges: str = ""
    """The `reports/ranges.json` of an earlier run, or its artifact: nothing is calibrated anew."""
    scheme: Literal["int8", "dynamic"] = "int8"
    """`int8`: static ranges. `dynamic` is refused: TensorRT has no such thing."""
    symmetric: bool = True
    """Zero points are 0. Without, it is refused: TensorRT takes nothing else."""
    capabilities: tuple[str, ...] = ("8.9",)
    """GPU generations that an engine is built for before anything is saved, as CUDA numbers them.
    Without any, no engine is built, and the report says so."""
    profile: tuple[str, ...] = ()
    """The shapes of that build, `batch=1:8:32,sequence=8:128:512`.
    Empty: made from the calibration inputs."""
    allow_random: bool = False
    """Calibrate on made-up inputs where none are given. Fit for trying things out, not for use."""
    allow_failed: bool = False
    """Take an artifact whose validation failed."""
    seed: int = 0
    """For the sample of rows that errors are measured on."""


def check_options(config: QuantizeConfig) -> None:
    """Raises OptionError for a value that cannot be used, or that TensorRT cannot run."""
    if config.scheme == "dynamic":
        raise OptionError(
            "option 'scheme' is dynamic, but TensorRT and CUDA run no dynamic INT8: TensorRT's "
            "scales are constants of the graph, and ONNX Runtime's CUDA provider has no kernels "
            "for DynamicQuantizeLinear's integer products, so they would run on the CPU.",
            do="Take int8, with --calibration FILE.",
        )
    if not config.symmetric:
        raise OptionError(
            "option 'symmetric' is false, but TensorRT takes zero points of 0 alone: its parser "
            "refuses any other (`shiftIsAllZeros(zeroPoint)`).",
            do="Leave it on. One-sided activations are centred by 'shift', at no loss of range.",
        )
    _require("rows", config.rows, 1, float("inf"))
    _require("percentile", config.percentile, 50, 100)
    _require("min_cosine", config.min_cosine, -1, 1)
    _require("max_accuracy_drop", config.max_accuracy_drop, 0, 1)
    _require("seed", config.seed, 0, float("inf"))
    if not isinstance(config.smoothing, str):
        _require("smoothing", config.smoothing, 0, 1)


def _require(name: str, value: float, low: float, high: float) -> None:
    # NaN lies between nothing.
    if not low <= value <= high:
        expected = f"{low} or more" if high == float("inf") else f"{low} to {high}"
        raise OptionError(f"option '{name}' is {value}, expected {expected}.")

"""The options of the quantize stage; importing them is quick, as `enginery --help` is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from enginery.core.errors import OptionError

Method = Literal["percentile", "minmax", "moving-average", "entropy", "mse"]


@dataclass(frozen=True)
class QuantizeConfig:
    """How a model's matrix products are quantized, and how far its answers may move."""

    calibration: str = ""
    """Real inputs: a CSV, TSV, JSONL, Parquet or text file, a folder of images,
    or arrays of the graph's own inputs, `.npz` or `.npy`."""
    column: str = "text"
    """The column of `calibration` that holds the text."""
    label_column: str = ""
    """The column that holds the right label, for `accuracy_budget`."""
    rows: int = 512
    """How many rows are read, evenly spread over the file. A quarter of them, at most 128 and 1024
    for `accuracy_budget`, measure the accuracy and calibrate nothing."""
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
    """The precision of everything that is not quantized."""
    min_cosine: float = 0.9985
    """The least mean cosine between the answers and the FP32 model's. Layers are left out, the most
    harmful first, until it holds."""
    accuracy_budget: str = ""
    """In place of `min_cosine`, for a model that classifies: how much of its accuracy may be lost,
    `0.5%`. With `label_column`, right labels; without, answers that FP32 gives too."""
    curve: bool = True
    """Measure how accuracy falls with the quantized share, for the report, even where every layer
    can be quantized."""
    exclude: tuple[str, ...] = ()
    """Layers that stay as they are: node names, or patterns such as `*/layer.0/*`."""
    ranges: str = ""
    """The `reports/ranges.json` of an earlier run, or its artifact: nothing is calibrated anew, and
    nothing is measured."""
    scheme: Literal["int8", "fp8", "dynamic"] = "int8"
    """`int8` and `fp8` (E4M3, for 8.9, 12.0 and later): static ranges. `dynamic`: INT8 weights and
    activations quantized as they come, for the target cpu, without calibration."""
    target: Literal["tensorrt", "cuda", "cpu"] = "tensorrt"
    """Who will run it. `cuda` is refused: ONNX Runtime multiplies no INT8 there."""
    per_channel: bool = True
    """A scale for each output channel of a weight; else one for the whole weight."""
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
    """Raises OptionError for a value that cannot be used, or that its target cannot run."""
    if config.target == "cuda":
        raise OptionError(
            "option 'target' is cuda, where ONNX Runtime multiplies no INT8: it has no kernels for "
            "dynamic INT8's integer products, which then run on the CPU, and multiplies what lies "
            "between Q and DQ in floating point.",
            do="Quantize for TensorRT, or make FP16: enginery optimize --target cuda",
            option="target",
        )
    if config.scheme == "dynamic" and config.target == "tensorrt":
        raise OptionError(
            "option 'scheme' is dynamic, but TensorRT runs no dynamic INT8: its scales are "
            "constants of the graph.",
            do="Take int8, with --calibration FILE; or --scheme dynamic --target cpu.",
            option="scheme",
        )
    if config.scheme != "dynamic" and config.target == "cpu":
        raise OptionError(
            f"option 'scheme' is {config.scheme} for the target cpu; static Q/DQ are placed here "
            "as TensorRT fuses them, and ONNX Runtime's CPU fuses others.",
            do="Take --scheme dynamic --target cpu, which needs no calibration.",
            option="target",
        )
    if not config.symmetric:
        raise OptionError(
            "option 'symmetric' is false, but TensorRT takes zero points of 0 alone: its parser "
            "refuses any other (`shiftIsAllZeros(zeroPoint)`).",
            do="Leave it on. One-sided activations are centred by 'shift', at no loss of range.",
            option="symmetric",
        )
    if config.scheme == "fp8" and config.method == "entropy":
        raise OptionError(
            "option 'method' is entropy, which compares distributions over INT8's equal steps; "
            "FP8 has none.",
            do="Take percentile, minmax, moving-average or mse.",
            option="method",
        )
    if config.ranges and (config.calibration or config.accuracy_budget):
        given = "calibration" if config.calibration else "accuracy_budget"
        raise OptionError(
            f"options 'ranges' and '{given}' are both given, but with ranges nothing is measured.",
            do="Leave one out: ranges make the same graph again, a calibration makes a new one.",
            option="ranges",
        )
    if config.scheme == "fp8":
        for capability in capabilities_of(config):
            if not _has_fp8(capability):
                raise OptionError(
                    f"option 'scheme' is fp8 and 'capabilities' has {capability}, a GPU that "
                    "multiplies no FP8.",
                    do="FP8 is for 8.9, 12.0 and later; take int8 for older GPUs.",
                    option="capabilities",
                )
    if config.label_column and not config.accuracy_budget:
        raise OptionError(
            "option 'label_column' is given without 'accuracy_budget', so labels decide nothing.",
            do="Say how much accuracy may be lost: --accuracy-budget 0.5%",
            option="label_column",
        )
    if config.accuracy_budget:
        lost_accuracy(config.accuracy_budget)
        if config.min_cosine != QuantizeConfig.min_cosine:
            raise OptionError(
                "options 'accuracy_budget' and 'min_cosine' are both given; one is in place of the "
                "other.",
                do="Leave one out.",
                option="accuracy_budget",
            )
    _require("rows", config.rows, 1, float("inf"))
    _require("percentile", config.percentile, 50, 100)
    _require("min_cosine", config.min_cosine, -1, 1)
    _require("seed", config.seed, 0, float("inf"))
    if not isinstance(config.smoothing, str):
        _require("smoothing", config.smoothing, 0, 1)


def require_calibration(config: QuantizeConfig) -> None:
    """Raise OptionError where static ranges are asked for and nothing says what they are."""
    named = config.calibration or config.ranges or config.allow_random
    if not named and config.scheme != "dynamic":
        raise OptionError(
            "there are no calibration inputs. Ranges from random token ids are of no use: they "
            "are not those of texts.",
            do="Name real ones: --calibration reviews.csv --column text",
        )


def capabilities_of(config: QuantizeConfig) -> list[str]:
    """Each of `capabilities`, which may be written with commas."""
    words = (word.strip() for text in config.capabilities for word in text.split(","))
    return [word for word in words if word]


def _has_fp8(capability: str) -> bool:
    major, _, minor = capability.partition(".")
    if not (major.isdigit() and minor.isdigit()):
        return True  # no capability at all; TensorRT says which there are
    return (int(major), int(minor)) >= (8, 9)


def lost_accuracy(budget: str) -> float:
    """The part of all answers in an `accuracy_budget`: `0.5%` is 0.005.

    Raises:
        OptionError: it is no percentage; a number alone could mean either.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*", budget)
    part = float(found[1]) / 100 if found else -1.0
    if not 0 <= part <= 1:
        raise OptionError(
            f"option 'accuracy_budget' is '{budget}', expected a percentage, such as 0.5%.",
            option="accuracy_budget",
        )
    return part


def _require(name: str, value: float, low: float, high: float) -> None:
    # NaN lies between nothing.
    if not low <= value <= high:
        expected = f"{low} or more" if high == float("inf") else f"{low} to {high}"
        raise OptionError(f"option '{name}' is {value}, expected {expected}.", option=name)

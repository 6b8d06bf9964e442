"""Options of the quantize stage. Imports are light, so that `enginery --help` is fast."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from enginery.core.errors import OptionError
from enginery.core.options import LabelReading, by_content, not_in_key
from enginery.runtime.tensorrt.options import capability_name

MAX_HELD_OUT = 128

Method = Literal["percentile", "minmax", "entropy"]


@dataclass(frozen=True)
class QuantizeConfig:
    """Options of quantization: calibration data, scheme, target and accuracy budget."""

    data: str = by_content()
    """Calibration data: a CSV, TSV, JSONL, Parquet or text file, a folder of images or audio files,
    or arrays of the graph's own inputs, `.npz`, `.npy` or a folder of `.npz` files."""
    column: str = "text"
    """Column of `data` with the texts."""
    label_column: str = ""
    """Column with the correct labels, for `accuracy_budget`."""
    label_values: LabelReading = "auto"
    """What the labels are: `names` of the model's classes, or `indices`. `auto` reads the whole
    column in one of the two ways; that both are possible is an error."""
    rows: int = 512
    """Number of rows to read, evenly spread over the file. A quarter of them is held out to measure
    the accuracy: at most 128 rows, or 1024 with `accuracy_budget`."""
    held_out: str = by_content()
    """Other rows to measure the accuracy on, in a file like `data`, whose rows all calibrate then.
    At most 128 are read, or 1024 with `accuracy_budget`, evenly spread over the file."""
    method: Method = "percentile"
    """Method that derives the range of an activation from its histogram."""
    percentile: float = 99.999
    """Percentage of values inside the range, for the method `percentile`."""
    smoothing: float | Literal["search", "none"] = "search"
    """SmoothQuant's migration strength, 0 to 1: how much of the activations' outliers moves into
    the weights. `search` chooses for each activation the strength with the smallest error in the
    outputs of its layers."""
    shift: bool = True
    """Center the channels of an activation where that reduces the error. The bias compensates."""
    bias_correction: bool = True
    """Correct each bias by the mean error of its output channel."""
    residual: Literal["auto", "fp16", "fp32"] = "auto"
    """Precision of everything that is not quantized. `auto` is fp16 for TensorRT and fp32 for the
    CPU."""
    min_cosine: float = 0.9985
    """Minimum mean cosine between the outputs and the FP32 model's. If it is not met, the most
    harmful layers stay in floating point."""
    accuracy_budget: str = ""
    """Accuracy that may be lost, such as `0.5%`; replaces `min_cosine`. Of a classifier, the share
    of correct labels with `label_column`, otherwise of answers equal to FP32's; of a detector, the
    F1 of its boxes to FP32's."""
    curve: bool = True
    """Measure accuracy against the quantized share for the report, even if every layer can be
    quantized."""
    exclude: tuple[str, ...] = ()
    """Layers not to quantize: node names, or patterns such as `*/layer.0/*`."""
    scheme: Literal["int8", "fp8", "dynamic"] = "int8"
    """`int8` and `fp8` (E4M3, for compute capabilities 8.9, 12.0 and later) use static ranges.
    `dynamic` is INT8 with activation scales computed at run time, for the target cpu; it needs no
    calibration, and is less accurate."""
    target: Literal["tensorrt", "cuda", "cpu"] = "tensorrt"
    """Runtime that the graph is made for. `cpu` is ONNX Runtime's CPU provider, without a trial
    engine. `cuda` is refused: ONNX Runtime has no INT8 matrix products there."""
    per_channel: bool = True
    """One scale for each output channel of a weight instead of one for the whole weight."""
    capability: tuple[str, ...] = ("8.9",)
    """Compute capabilities that a trial engine is built for before anything is saved, such as
    `8.0,8.9`. With `none`, no engine is built, and the report says so."""
    profile: tuple[str, ...] = ()
    """Shape profiles of the trial engine, such as `batch=1:8:32,sequence=8:128:512`. If empty,
    batches of 1 to 32 and sequences up to the model's limit."""
    allow_random: bool = False
    """Calibrate on random inputs if no data are given. For trying things out, not for use."""
    allow_failed: bool = not_in_key(False)  # a permission
    """Accept an artifact whose validation failed."""
    seed: int = 0
    """Random seed for the sample of rows that errors are measured on."""


def check_options(config: QuantizeConfig) -> None:
    """Check the options.

    Raises:
        OptionError: a value is invalid, options contradict each other, or the target cannot run
            the scheme.
    """
    if config.target == "cuda":
        raise OptionError(
            "option 'target' is cuda, but ONNX Runtime has no INT8 matrix products there: those of "
            "dynamic INT8 would run on the CPU, and those between Q and DQ in floating point.",
            do="Quantize for TensorRT, or use FP16: enginery optimize --target cuda",
            option="target",
        )
    if config.scheme == "dynamic" and config.target == "tensorrt":
        raise OptionError(
            "option 'scheme' is dynamic, but TensorRT does not support dynamic INT8: it expects "
            "scales that are constants of the graph.",
            do="Use --scheme int8 with --data FILE, or --scheme dynamic --target cpu.",
            option="scheme",
        )
    if config.scheme == "fp8" and config.target == "cpu":
        raise OptionError(
            "option 'scheme' is fp8, but ONNX Runtime has no FP8 matrix products on the CPU.",
            do="Use --scheme int8 --target cpu.",
            option="scheme",
        )
    if config.residual == "fp16" and config.target == "cpu":
        raise OptionError(
            "option 'residual' is fp16, but ONNX Runtime has no FP16 kernels on most CPUs: every "
            "node would be computed in FP32, between casts.",
            do="Leave it out.",
            option="residual",
        )
    if config.scheme == "fp8" and config.method == "entropy":
        raise OptionError(
            "option 'method' is entropy, but FP8 has unequal steps; expected a method for them.",
            do="Use percentile or minmax; entropy is for INT8.",
            option="method",
        )
    # Here rather than in the trial build, which comes after the calibration.
    if config.scheme == "fp8":
        for capability in list_capabilities(config):
            if not _has_fp8(capability):
                raise OptionError(
                    f"option 'scheme' is fp8, but GPUs of compute capability {capability} have no "
                    "FP8 matrix products.",
                    do="FP8 needs 8.9, 12.0 or later; use int8 for older GPUs.",
                    option="capability",
                )
    if config.held_out and not config.data:
        raise OptionError(
            "option 'held_out' is set, but there are no data.",
            do="Name the rows to calibrate on: --data reviews.csv. To measure only: --data alone.",
            option="held_out",
        )
    if config.label_column and not config.accuracy_budget:
        raise OptionError(
            "option 'label_column' is set without 'accuracy_budget', so the labels have no effect.",
            do="Set the accuracy that may be lost: --accuracy-budget 0.5%",
            option="label_column",
        )
    if config.accuracy_budget:
        parse_accuracy_budget(config.accuracy_budget)
        # The default does not count as set.
        if config.min_cosine != QuantizeConfig.min_cosine:
            raise OptionError(
                "options 'accuracy_budget' and 'min_cosine' are both set; expected one of them.",
                do="Remove one.",
                option="accuracy_budget",
            )
    _require("rows", config.rows, 1, float("inf"))
    _require("percentile", config.percentile, 50, 100)
    _require("min_cosine", config.min_cosine, -1, 1)
    _require("seed", config.seed, 0, float("inf"))
    if not isinstance(config.smoothing, str):
        _require("smoothing", config.smoothing, 0, 1)


def require_calibration(config: QuantizeConfig) -> None:
    """Check that there are inputs to calibrate with.

    Raises:
        OptionError: a static scheme has none, and random inputs are not allowed.
    """
    if not (config.data or config.allow_random or config.scheme == "dynamic"):
        raise OptionError(
            "there are no calibration inputs. Ranges from random token ids are of no use: they "
            "are not those of texts.",
            do="Name real ones: --data reviews.csv --column text",
        )


def require_no_budget(config: QuantizeConfig) -> None:
    """Check that no budget is set, for there are no inputs to measure the accuracy on.

    Raises:
        OptionError: one is, other than a cosine of -1, which any output has.
    """
    name = "accuracy_budget" if config.accuracy_budget else "min_cosine"
    if getattr(config, name) not in (getattr(QuantizeConfig, name), -1):
        raise OptionError(
            f"option '{name}' is {getattr(config, name)}, but there are no inputs to measure the "
            "accuracy on.",
            do="Name some: --data reviews.csv --column text",
            option=name,
        )


def max_held_out(config: QuantizeConfig) -> int:
    """Return how many rows the accuracy is measured on at most.

    A budget in accuracy counts right answers, which takes more rows than a cosine.
    """
    return 1024 if config.accuracy_budget else MAX_HELD_OUT


def residual_precision(config: QuantizeConfig) -> Literal["fp16", "fp32"]:
    """Return the precision of what is not quantized, which `auto` takes from the target."""
    if config.residual == "auto":
        return "fp32" if config.target == "cpu" else "fp16"
    return config.residual


def list_capabilities(config: QuantizeConfig) -> list[str]:
    """Return the compute capabilities of trial engines; each option may list several, with commas.

    There are none for the target cpu.
    """
    if config.target == "cpu":
        return []
    words = (word.strip() for text in config.capability for word in text.split(","))
    return [capability_name(word) for word in words if word and word != "none"]


def _has_fp8(capability: str) -> bool:
    major, _, minor = capability.partition(".")
    if not (major.isdigit() and minor.isdigit()):
        return True  # not a number: TensorRT's own check lists those that exist
    return (int(major), int(minor)) >= (8, 9)


def parse_accuracy_budget(budget: str) -> float:
    """Return the fraction that an `accuracy_budget` allows to lose.

    >>> parse_accuracy_budget("0.5%")
    0.005

    Raises:
        OptionError: the text is not a percentage. A bare number could mean either.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*", budget)
    part = float(match[1]) / 100 if match else -1.0
    if not 0 <= part <= 1:
        raise OptionError(
            f"option 'accuracy_budget' is '{budget}', expected a percentage, such as 0.5%.",
            option="accuracy_budget",
        )
    return part


def _require(name: str, value: float, low: float, high: float) -> None:
    # NaN fails this comparison.
    if not low <= value <= high:
        expected = f"{low} or more" if high == float("inf") else f"{low} to {high}"
        raise OptionError(f"option '{name}' is {value}, expected {expected}.", option=name)

"""The options of the build stage; importing them is quick, as `enginery --help` is."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal  # noqa: F401  cyclopts reads the types of inherited options here

from enginery.core.errors import OptionError
from enginery.runtime.tensorrt.options import (
    BuildOptions,
    FlavorName,
    HardwareCompatibility,  # noqa: F401  as above
)


@dataclass(frozen=True)
class BuildConfig(BuildOptions):
    """For which GPUs and shapes engines are built, and everything of `BuildOptions`."""

    flavor: FlavorName = "tensorrt-rtx"
    """The library. `tensorrt-rtx` builds ahead of time, without a GPU; `tensorrt`, version 10,
    builds on the GPU that will run the engine, and for that one."""
    capability: str = "current"
    """The GPUs: compute capabilities as CUDA numbers them, `8.0,8.9,12.0`, in one engine;
    `current`, this machine's GPU; `portable`, every GPU from Ampere (8.0) on."""
    profile: tuple[str, ...] = ()
    """A profile: the sizes of the graph's dynamic dims as min:opt:max, `batch=1:8:32,
    sequence=8:128:512`; a single number is fixed. Repeat it for several. Of a model with several
    graphs, a profile is for those whose dims it names."""
    min_shapes: str = ""
    """The smallest shapes in TensorRT's notation, `input_ids:1x8,attention_mask:1x8`; inputs named
    again begin another profile. In place of `profile`."""
    opt_shapes: str = ""
    """The shapes to tune for, in TensorRT's notation."""
    max_shapes: str = ""
    """The largest shapes, in TensorRT's notation."""
    profiles_from: str = ""
    """A CSV, TSV, JSONL, Parquet or text file: profiles are made from its token lengths, so that
    padding is least. In place of `profile`."""
    column: str = "text"
    """The column of `profiles_from` that holds the text."""
    count: int = 3
    """How many profiles are made from `profiles_from`, at most."""
    batch: str = "1:8:32"
    """The batch sizes of the profiles made from `profiles_from`, min:opt:max."""
    engine_per_profile: bool = True
    """An engine for each profile, each with the weights: ONNX Runtime reaches the first profile of
    an engine alone. Off, one engine holds all of them, for runtimes that choose among them."""
    allow_partitions: bool = False
    """Go on where TensorRT takes some graphs of a model and not all. Those keep their ONNX file
    and get no engine: ONNX Runtime would partition them as it loads them, and build then."""
    allow_failed: bool = False
    """Take an artifact whose validation failed."""

    @property
    def options(self) -> BuildOptions:
        """What TensorRT's builder is told, alone."""
        return BuildOptions(**{f.name: getattr(self, f.name) for f in fields(BuildOptions)})


def check_config(config: BuildConfig) -> None:
    """Raises OptionError where profiles are asked for in two ways, or a number cannot be used."""
    shapes = {name: getattr(config, name) for name in ("min_shapes", "opt_shapes", "max_shapes")}
    ways = {
        "profile": bool(config.profile),
        "min_shapes": any(shapes.values()),
        "profiles_from": bool(config.profiles_from),
    }
    if sum(ways.values()) > 1:
        found = " and ".join(f"'{name}'" for name, given in ways.items() if given)
        raise OptionError(
            f"options {found} both name profiles.",
            do="Name them in one way: the engine's profiles and their order are part of what it is "
            "cached by.",
            option=next(name for name, given in ways.items() if given),
        )
    if config.count < 1:
        raise OptionError(f"option 'count' is {config.count}, expected 1 or more.", option="count")
    if not config.capability.strip():
        raise OptionError(
            "option 'capability' is empty, expected 8.0,8.9,12.0 or current or portable.",
            option="capability",
        )

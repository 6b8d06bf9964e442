"""Options of the build stage. Imports are light, so that `enginery --help` is fast."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal  # noqa: F401  cyclopts reads the types of inherited options here

from enginery.core.errors import OptionError
from enginery.core.options import by_content, not_in_key
from enginery.runtime.tensorrt.options import (
    BuildOptions,
    FlavorName,
    HardwareCompatibility,  # noqa: F401  as above
)


@dataclass(frozen=True)
class BuildConfig(BuildOptions):
    """GPUs and shapes that engines are built for, in addition to `BuildOptions`.

    Engines have keys of their own, with the GPUs and the shapes that these options stand for. The
    same ones, written in another way, are the same engines.
    """

    flavor: FlavorName = not_in_key("tensorrt-rtx")
    """TensorRT library. `tensorrt-rtx` builds ahead of time, without a GPU. `tensorrt`, version 10,
    builds on the GPU that runs the engine, and only for that one."""
    capability: str = not_in_key("current")
    """Target GPUs of the engine: compute capabilities such as `8.0,8.9,12.0`; `current`, this
    machine's GPU; or `portable`, every GPU from Ampere (8.0) on."""
    profile: tuple[str, ...] = not_in_key(())
    """Shape profile: min:opt:max of each dynamic dim, such as `batch=1:8:32,sequence=8:128:512`. A
    single number is a fixed size. Can be repeated. In a model with several graphs, a profile
    applies to those whose dims it names."""
    min_shapes: str = not_in_key()
    """Minimum shapes in TensorRT's notation, such as `input_ids:1x8,attention_mask:1x8`; replaces
    `profile`. Repeat the inputs to start another profile."""
    opt_shapes: str = not_in_key()
    """Optimum shapes, which the engine is tuned for, in TensorRT's notation."""
    max_shapes: str = not_in_key()
    """Maximum shapes in TensorRT's notation."""
    data: str = by_content()
    """CSV, TSV, JSONL, Parquet or text file whose token lengths give the profiles with the least
    padding; replaces `profile`."""
    column: str = "text"
    """Column of `data` with the texts."""
    count: int = not_in_key(3)
    """Maximum number of profiles from `data`."""
    batch: str = not_in_key("1:8:32")
    """Batch sizes min:opt:max of the profiles from `data`."""
    engine_per_profile: bool = not_in_key(True)
    """Build one engine for each profile, each with its own weights, because ONNX Runtime uses only
    the first profile of an engine. Otherwise one engine holds all profiles, for other runtimes."""
    allow_partitions: bool = False
    """Continue if TensorRT does not support some graphs of a model. These get no engine: ONNX
    Runtime partitions them when it loads their ONNX files, and builds engines then."""
    allow_failed: bool = not_in_key(False)  # a permission
    """Accept an artifact whose validation failed."""

    @property
    def options(self) -> BuildOptions:
        """Return only the options of TensorRT's builder."""
        return BuildOptions(**{f.name: getattr(self, f.name) for f in fields(BuildOptions)})


def check_config(config: BuildConfig) -> None:
    """Check the options.

    Raises:
        OptionError: profiles are given in two ways, or a value is invalid.
    """
    shapes = {name: getattr(config, name) for name in ("min_shapes", "opt_shapes", "max_shapes")}
    ways = {
        "profile": bool(config.profile),
        "min_shapes": any(shapes.values()),
        "data": bool(config.data),
    }
    if sum(ways.values()) > 1:
        options = ", ".join(f"'{name}'" for name, is_set in ways.items() if is_set)
        raise OptionError(
            f"several options set profiles: {options}.",
            do="Use one of them: the profiles and their order are part of the engine's cache key.",
            option=next(name for name, is_set in ways.items() if is_set),
        )
    if config.count < 1:
        raise OptionError(f"option 'count' is {config.count}, expected 1 or more.", option="count")
    if not config.capability.strip():
        raise OptionError(
            "option 'capability' is empty, expected compute capabilities (8.0,8.9,12.0), current "
            "or portable.",
            option="capability",
        )

"""TensorRT for RTX as a library: its module, its one logger, the capabilities that it builds for.

Takes nothing; needs no GPU.

    >>> with trt_messages() as messages:
    ...     trt.Builder(messages.logger)
    >>> capability_names(load_tensorrt())
    ['7.5', '8.0', '8.6', '8.9', '12.0', '12.1']
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from enginery.core.errors import MissingPackageError, OptionError

MODULE = "tensorrt_rtx_bindings"
"""What the wheel `tensorrt-rtx-cu13-bindings` installs."""

_CAPABILITY = re.compile(r"^SM(?P<major>\d+)(?P<minor>\d)$")
_LEVELS = ("internal error", "error", "warning", "info", "verbose")


def require_tensorrt(purpose: str) -> None:
    """Raises MissingPackageError where TensorRT for RTX is not installed; loads nothing."""
    if not has_tensorrt():
        raise MissingPackageError(
            "tensorrt-rtx-cu13-bindings", extra="tensorrt-rtx", purpose=purpose
        )


def has_tensorrt() -> bool:
    """Whether TensorRT for RTX is installed."""
    return importlib.util.find_spec(MODULE) is not None


def load_tensorrt(purpose: str = "Building an engine") -> Any:
    """The module of TensorRT for RTX; it ships no types.

    Raises:
        MissingPackageError: the package or one of its libraries is missing.
    """
    try:
        return importlib.import_module(MODULE)
    except (ImportError, OSError) as error:  # OSError: the wheel with the libraries is missing
        raise MissingPackageError(
            "tensorrt-rtx-cu13-bindings", extra="tensorrt-rtx", purpose=purpose
        ) from error


def capability_names(trt: Any) -> list[str]:
    """The compute capabilities that this TensorRT builds for: `8.9` for what it calls SM89."""
    found = [match for name in dir(trt.ComputeCapability) if (match := _CAPABILITY.match(name))]
    names = [(int(match["major"]), int(match["minor"])) for match in found]
    return [f"{major}.{minor}" for major, minor in sorted(names)]


def capability_value(trt: Any, capability: str) -> Any:
    """TensorRT's value for `8.9`.

    Raises:
        OptionError: this TensorRT builds for no such GPU.
    """
    known = capability_names(trt)
    if capability not in known:
        raise OptionError(
            f"TensorRT for RTX {trt.__version__} does not build for compute capability "
            f"'{capability}'.",
            do=f"It builds for {', '.join(known)}.",
        )
    return getattr(trt.ComputeCapability, f"SM{capability.replace('.', '')}")


@dataclass
class Messages:
    """What TensorRT said during one call."""

    logger: Any
    entries: list[tuple[str, str]] = field(default_factory=list)
    """Level (`error`, `warning`, `info`, `verbose`) and text."""

    def texts(self, *levels: str) -> list[str]:
        """The texts of some levels, each once, in order."""
        return list(dict.fromkeys(text for level, text in self.entries if level in levels))

    def warnings(self) -> list[str]:
        """TensorRT's warnings, without the reminder that an INT64 input takes INT64."""
        return [text.strip() for text in self.texts("warning") if "Int64 binding" not in text]

    def errors(self) -> list[str]:
        """What went wrong, without the noise of a machine that has no GPU."""
        return [
            text.strip()
            for text in self.texts("internal error", "error")
            if "catchCudaError" not in text
        ]


Sink = Callable[[str, str], None]

_lock = threading.RLock()
_sinks: list[Sink] = []


@contextmanager
def trt_messages(follow: Sequence[Sink] = ()) -> Iterator[Messages]:
    """Collects what TensorRT says while the block runs; one block at a time in a process.

    TensorRT keeps the first logger that a process gives it and ignores all later ones, so that
    there is one, and its messages belong to whoever holds the lock.

    Args:
        follow: called with each level and text as they come, for a log that outlives a crash.
    """
    with _lock:
        messages = Messages(_logger())
        before = list(_sinks)
        _sinks[:] = [lambda level, text: messages.entries.append((level, text)), *follow]
        try:
            yield messages
        finally:
            _sinks[:] = before


@cache
def _logger() -> Any:
    base: Any = load_tensorrt().ILogger

    class Logger(base):  # type: ignore[misc]  # the bindings ship no types
        def __init__(self) -> None:
            base.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            for sink in _sinks:
                sink(_LEVELS[min(int(severity), len(_LEVELS) - 1)], text)

    return Logger()

"""TensorRT as a library, of either flavor: its module, its version, its one logger.

Takes a flavor; needs no GPU.

    >>> trt = load_tensorrt(RTX)
    >>> with trt_messages(trt) as messages:
    ...     trt.Builder(messages.logger)
    >>> capability_names(trt), tensorrt_version(RTX)
    (['7.5', '8.0', '8.6', '8.9', '12.0', '12.1'], '1.7.1.116')
"""

from __future__ import annotations

import importlib
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from enginery.core.errors import (
    EngineryError,
    MissingPackageError,
    OptionError,
    ProviderError,
)
from enginery.runtime.tensorrt.options import CLASSIC, RTX, Flavor

_CAPABILITY = re.compile(r"^SM(?P<major>\d+)(?P<minor>\d)$")
_VERSION = re.compile(r"^__version__\s*=\s*['\"]([\w.]+)['\"]", re.MULTILINE)
_LEVELS = ("internal error", "error", "warning", "info", "verbose")


def has_tensorrt(flavor: Flavor = RTX) -> bool:
    """Whether the flavor is installed; loads nothing."""
    name = flavor.module
    return sys.modules.get(name) is not None or find_spec(name) is not None


def require_tensorrt(purpose: str, flavor: Flavor = RTX) -> None:
    """Whether the flavor is there and fit, as an error where it is not; loads nothing.

    Raises:
        MissingPackageError: TensorRT for RTX is not installed.
        ProviderError: classic TensorRT is not installed, or ONNX Runtime loads no engines of the
            version that is.
    """
    if not has_tensorrt(flavor):
        raise _missing(purpose, flavor)
    require_version(tensorrt_version(flavor), flavor)


def load_tensorrt(purpose: str = "Building an engine", flavor: Flavor = RTX) -> Any:
    """The flavor's module; it ships no types.

    Raises:
        MissingPackageError: TensorRT for RTX is not installed.
        ProviderError: classic TensorRT is not installed, or a library cannot be loaded.
    """
    try:
        return importlib.import_module(flavor.module)
    except ModuleNotFoundError as error:
        raise _missing(purpose, flavor) from error
    except (ImportError, OSError) as error:
        raise ProviderError(
            f"{purpose}: {flavor.title} is installed and cannot be loaded: {error}.",
            do=f"Install it with its libraries: {flavor.install}",
        ) from error


def tensorrt_version(flavor: Flavor = RTX) -> str:
    """The installed version and build, `1.7.1.116`; empty where the flavor is not installed.

    Read from the module's text, as loading TensorRT maps a library of 234 MB.
    """
    loaded = sys.modules.get(flavor.module)
    if loaded is not None:
        return str(loaded.__version__)
    spec = find_spec(flavor.module)
    if spec is None or not spec.origin:
        return ""
    found = _VERSION.search(Path(spec.origin).read_text(encoding="utf-8", errors="replace"))
    return found[1] if found else str(load_tensorrt(flavor=flavor).__version__)


def require_version(version: str, flavor: Flavor) -> None:
    """Raises ProviderError for a major version whose engines ONNX Runtime does not load."""
    if version.split(".", maxsplit=1)[0] != str(flavor.major):
        raise ProviderError(
            f"{flavor.title} {version} is installed, and {flavor.major} is needed: an engine runs "
            f"with the version that built it, and {flavor.provider} of ONNX Runtime 1.31 links "
            f"{flavor.library}.",
            do=f"Run: pip uninstall -y tensorrt {flavor.package} && {flavor.install}"
            if flavor is CLASSIC
            else f"Install it: {flavor.install}",
        )


def _missing(purpose: str, flavor: Flavor) -> EngineryError:
    if flavor.extra:
        return MissingPackageError(flavor.package, extra=flavor.extra, purpose=purpose)
    return ProviderError(
        f"{purpose} needs the package '{flavor.package}', which is not installed.",
        do=f"Install it with: {flavor.install}",
    )


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
            f"{RTX.title} {trt.__version__} does not build for compute capability '{capability}'.",
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
def trt_messages(trt: Any, follow: Sequence[Sink] = ()) -> Iterator[Messages]:
    """Collects what TensorRT says while the block runs; one block at a time in a process.

    TensorRT keeps the first logger that a process gives it and ignores all later ones, so that
    there is one, and its messages belong to whoever holds the lock.

    Args:
        trt: the module of a flavor; each has a logger of its own.
        follow: called with each level and text as they come, for a log that outlives a crash.
    """
    with _lock:
        messages = Messages(_logger(trt))
        before = list(_sinks)
        _sinks[:] = [lambda level, text: messages.entries.append((level, text)), *follow]
        try:
            yield messages
        finally:
            _sinks[:] = before


@cache
def _logger(trt: Any) -> Any:
    base: Any = trt.ILogger

    class Logger(base):  # type: ignore[misc]  # the bindings ship no types
        def __init__(self) -> None:
            base.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            for sink in _sinks:
                sink(_LEVELS[min(int(severity), len(_LEVELS) - 1)], text)

    return Logger()

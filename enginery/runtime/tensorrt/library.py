"""Load TensorRT, classic or for RTX: its module, its version and its logger. Needs no GPU.

trt = load_tensorrt(flavor=RTX)
with trt_messages(trt) as messages:
trt.Builder(messages.logger)
capability_names(trt)     # ['7.5', '8.0', '8.6', '8.9', '12.0', '12.1']
tensorrt_version(RTX)     # '1.7.1.116'
"""

from __future__ import annotations

import importlib
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from enginery.core.errors import EngineryError, OptionError, ProviderError
from enginery.core.extras import is_installed, missing_packages
from enginery.runtime.tensorrt.options import CLASSIC, RTX, Flavor

_CAPABILITY = re.compile(r"^SM(?P<major>\d+)(?P<minor>\d)$")
_VERSION = re.compile(r"^__version__\s*=\s*['\"]([\w.]+)['\"]", re.MULTILINE)
_MAX_MESSAGES = 100_000
_MAX_CHARACTERS = 1 << 24
"""Of one message: the list of an engine's layers is one."""
_LEVELS = ("internal error", "error", "warning", "info", "verbose")


def has_tensorrt(flavor: Flavor = RTX) -> bool:
    """Return True if the flavor is installed, without loading it."""
    return is_installed(flavor.module)


def require_tensorrt(purpose: str, flavor: Flavor = RTX) -> None:
    """Check that the flavor is installed in a supported version, without loading it.

    Raises:
        MissingPackageError: TensorRT for RTX is not installed.
        ProviderError: classic TensorRT is not installed, or ONNX Runtime cannot load engines of the
            installed version.
    """
    if not has_tensorrt(flavor):
        raise _missing(purpose, flavor)
    require_version(tensorrt_version(flavor), flavor)


def load_tensorrt(purpose: str = "Building an engine", flavor: Flavor = RTX) -> Any:
    """Import and return the flavor's Python module, which has no type hints.

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
            f"{purpose}: {flavor.title} is installed, but cannot be loaded: {error}.",
            do=f"Install it with its libraries: {flavor.install}",
        ) from error


def tensorrt_version(flavor: Flavor = RTX) -> str:
    """Return the installed version and build, `1.7.1.116`; empty if the flavor is not installed.

    It is read from the module's source, because importing TensorRT loads a library of 234 MB.
    """
    loaded = sys.modules.get(flavor.module)
    if loaded is not None:
        return str(loaded.__version__)
    spec = find_spec(flavor.module)
    if spec is None or not spec.origin:
        return ""
    match = _VERSION.search(Path(spec.origin).read_text(encoding="utf-8", errors="replace"))
    return match[1] if match else str(load_tensorrt(flavor=flavor).__version__)


def require_version(version: str, flavor: Flavor) -> None:
    """Raise ProviderError for a major version whose engines ONNX Runtime cannot load."""
    if version.split(".", maxsplit=1)[0] != str(flavor.major):
        raise ProviderError(
            f"{flavor.title} {version} is installed, but {flavor.major} is required: an engine "
            f"runs only with the version that built it, and {flavor.provider} of ONNX Runtime 1.31 "
            f"links {flavor.library}.",
            do=f"Run: pip uninstall -y tensorrt {flavor.package} && {flavor.install}"
            if flavor is CLASSIC
            else f"Install it: {flavor.install}",
        )


def _missing(purpose: str, flavor: Flavor) -> EngineryError:
    if flavor.extra:
        return missing_packages(purpose, [flavor.module], extra=flavor.extra)
    return ProviderError(
        f"{purpose} needs the package '{flavor.package}', which is not installed.",
        do=f"Install it with: {flavor.install}",
    )


def capability_names(trt: Any) -> list[str]:
    """Return the compute capabilities that this TensorRT can build for: `8.9` for SM89."""
    matches = [match for name in dir(trt.ComputeCapability) if (match := _CAPABILITY.match(name))]
    names = [(int(match["major"]), int(match["minor"])) for match in matches]
    return [f"{major}.{minor}" for major, minor in sorted(names)]


def capability_value(trt: Any, capability: str) -> Any:
    """Return TensorRT's enum value of a compute capability such as `8.9`.

    Raises:
        OptionError: this TensorRT cannot build for it.
    """
    supported = capability_names(trt)
    if capability not in supported:
        raise OptionError(
            f"{RTX.title} {trt.__version__} does not build for compute capability '{capability}'.",
            do=f"It builds for {', '.join(supported)}.",
        )
    return getattr(trt.ComputeCapability, f"SM{capability.replace('.', '')}")


@dataclass
class Messages:
    """Messages of TensorRT during one call."""

    logger: Any
    entries: deque[tuple[str, str]] = field(default_factory=lambda: deque(maxlen=_MAX_MESSAGES))
    """(level, text) of the last messages, because a graph may have one for each node.

    Levels are `internal error`, `error`, `warning`, `info` and `verbose`.
    """

    def add(self, level: str, text: str) -> None:
        """Keep a message."""
        self.entries.append((level, text[:_MAX_CHARACTERS]))

    def texts(self, *levels: str) -> list[str]:
        """Return the distinct texts of some levels, in order."""
        return list(dict.fromkeys(text for level, text in self.entries if level in levels))

    def warnings(self) -> list[str]:
        """Return the warnings, except the one that an INT64 input takes INT64."""
        return [text.strip() for text in self.texts("warning") if "Int64 binding" not in text]

    def errors(self) -> list[str]:
        """Return the errors, except those that only report a missing GPU."""
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
    """Collect TensorRT's messages during the block; only one block runs at a time in a process.

    TensorRT keeps the first logger of a process and ignores later ones, so all blocks share one
    logger under a lock.

    Args:
        trt: module of a flavor; each has its own logger.
        follow: called with the level and text of each message, for a log that survives a crash.
    """
    with _lock:
        messages = Messages(_logger(trt))
        before = list(_sinks)
        _sinks[:] = [messages.add, *follow]
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

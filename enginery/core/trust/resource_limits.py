"""Limit the memory and the time of processes that load a graph or a model of unknown origin.

    limits = ResourceLimits.of_graph(file_bytes=1400)
    limits.memory_bytes >> 20     # 1280
    with watching(child.pid, limits, child.kill) as watch:
        child.wait()
    watch.exceeded                # 'it needed more than 1.25 GiB of memory'

A thread of the parent reads how much memory the child occupies, and kills it above the limit. The
kernel's own limits would not do: RLIMIT_AS counts addresses that CUDA and allocators only reserve,
and an allocation that fails ends in a crash without a reason. Pages of mapped files are not
counted, because the kernel can drop them.

The command line watches its own process in the same way while ONNX Runtime loads or runs a graph
in it (`watching_own_calls`, `limited_call`). A server and a program that imports enginery are never
ended: there `limited_call` does nothing.

The limits follow from the size of the files and of the inputs. `ENGINERY_MEMORY_LIMIT_GIB` and
`ENGINERY_TIME_LIMIT_SECONDS` replace them; 0 is no limit.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from enginery.core.errors import ArtifactError, EngineryError, OptionError

if TYPE_CHECKING:
    from numpy.typing import NDArray

MEMORY_VARIABLE = "ENGINERY_MEMORY_LIMIT_GIB"
TIME_VARIABLE = "ENGINERY_TIME_LIMIT_SECONDS"
_RAISE = (
    f"If you trust its author, raise the limit: set {MEMORY_VARIABLE} or {TIME_VARIABLE} (0 is no "
    "limit)."
)

_HAS_PROC = Path("/proc/self/statm").is_file()
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096

_INTERVAL_SECONDS = 0.02
"""Time between two looks at a process. Fresh memory is written at 2 to 4 GB a second, so that a
process passes its limit by less than 100 MB."""
_TIME_EVERY = 25
"""Looks at the memory for each look at the time."""

_GRAPH_MEMORY = 5 << 28
"""1.25 GiB: the packages of a child take 0.3 GiB, and a small graph on small inputs little more."""
_GRAPH_COPIES = 10
"""Largest number of copies of a file in memory: the file itself, its protobuf message, the weights
of the session, packed and converted ones, and some of them again while they are made."""
_GRAPH_SECONDS = 30.0
_GRAPH_BYTES_A_SECOND = 2_000_000

_CHECKPOINT_MEMORY = 4 << 30
_CHECKPOINT_COPIES = 16
"""A checkpoint in half precision doubles as it is loaded, and the exporter holds several copies."""

_BUILD_MEMORY = 8 << 30
_BUILD_SECONDS = 900.0
_BUILD_BYTES_A_SECOND = 20_000
"""TensorRT measures kernels for a minute per megabyte at worst."""

_PULL_SECONDS = 600.0
_PULL_BYTES_A_SECOND = 50_000
_PULL_LONGEST_SECONDS = 7 * 24 * 3600.0

_TOKEN_BYTES = 256
"""Bytes of attention for a pair of positions: 64 heads of FP32."""
_SMALLEST_MATRIX = 32
"""A token's logits have the file's size, divided by the least hidden size that a model has."""
_INTEGERS = (6, 7)
"""INT32 and INT64 of ONNX's TensorProto.DataType."""
_SMALL_SIZES = (2, 16)
"""Rows, and the size of other dims, of the inputs that an export makes."""
_FEED_COPIES = 64
"""Feature maps of a convolution for each input channel."""


@dataclass(frozen=True)
class ResourceLimits:
    """What a process may use before it is ended."""

    memory_bytes: float = math.inf
    """Resident memory without the pages of files."""
    seconds: float = math.inf
    """The shorter of elapsed time and processor time, so that neither a busy machine nor many
    threads use it up."""
    do: str = field(default="", compare=False)
    """What a user can do about it."""

    @classmethod
    def of_graph(cls, *, file_bytes: int, activation_bytes: int = 0) -> Self:
        """Return the limits of a process that loads an ONNX file and runs it on small inputs.

        Args:
            file_bytes: size of the file with its external data.
            activation_bytes: result of `activation_bytes`.

        Raises:
            OptionError: an environment variable is not a number.
        """
        return cls._set_by_user(
            _GRAPH_MEMORY + _GRAPH_COPIES * file_bytes + activation_bytes,
            _GRAPH_SECONDS + file_bytes / _GRAPH_BYTES_A_SECOND + activation_bytes / 100e6,
        )

    @classmethod
    def of_graph_file(cls, path: Path, *, error: type[EngineryError] = ArtifactError) -> Self:
        """Return the limits of a process that loads an ONNX file and runs it on small inputs.

        Raises:
            EngineryError: the file is damaged; the class is `error`.
            OptionError: an environment variable is not a number.
        """
        file_bytes, inputs = read_sizes(path, error=error)
        return cls.of_graph(
            file_bytes=file_bytes, activation_bytes=activation_bytes(file_bytes, inputs)
        )

    @classmethod
    def of_run(cls, file_bytes: int, arrays: Mapping[str, NDArray[Any]]) -> Self:
        """Return the limits of one run of a graph of this size on these inputs."""
        inputs = [(array.dtype.kind in "iu", array.shape) for array in arrays.values()]
        return cls.of_graph(
            file_bytes=file_bytes, activation_bytes=activation_bytes(file_bytes, inputs)
        )

    @classmethod
    def of_checkpoint(cls, *, file_bytes: int) -> Self:
        """Return the limits of a process that loads a model in PyTorch and exports it."""
        return cls._set_by_user(_CHECKPOINT_MEMORY + _CHECKPOINT_COPIES * file_bytes, math.inf)

    @classmethod
    def of_build(cls, *, file_bytes: int) -> Self:
        """Return the limits of a process that builds an engine from an ONNX file."""
        return cls._set_by_user(
            _BUILD_MEMORY + _CHECKPOINT_COPIES * file_bytes,
            _BUILD_SECONDS + file_bytes / _BUILD_BYTES_A_SECOND,
        )

    @classmethod
    def of_pull(cls, *, size_bytes: int) -> Self:
        """Return the limits of a download of this size: its time alone."""
        limits = cls._set_by_user(
            math.inf, _PULL_SECONDS + min(size_bytes / _PULL_BYTES_A_SECOND, _PULL_LONGEST_SECONDS)
        )
        return replace(limits, memory_bytes=math.inf)

    @classmethod
    def _set_by_user(cls, memory_bytes: float, seconds: float) -> Self:
        gib, limit = _variable(MEMORY_VARIABLE), _variable(TIME_VARIABLE)
        return cls(
            memory_bytes if gib is None else gib * 2**30,
            seconds if limit is None else limit,
            _RAISE,
        )


NO_LIMITS = ResourceLimits()


def _variable(name: str) -> float | None:
    """Return the number in an environment variable: infinity for 0, None without the variable."""
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value >= 0:
        raise OptionError(f"{name} is '{text}', expected a number of at least 0; 0 is no limit.")
    return value or math.inf


def read_sizes(
    path: Path, *, error: type[EngineryError] = ArtifactError
) -> tuple[int, list[tuple[bool, tuple[int, ...]]]]:
    """Return the size of an ONNX file with its external data, and the kinds and shapes of inputs.

    Dynamic dims have the sizes of small inputs.

    Raises:
        EngineryError: the file is damaged; the class is `error`.
    """
    # `enginery --help` imports this module, and pydantic takes a tenth of a second.
    from enginery.core.trust.onnx_structure import read_structure

    structure = read_structure(path, error=error)
    file_bytes = 0
    for name in (path.name, *structure.external_files()):
        with suppress(OSError, ValueError):  # missing data is reported where it is read
            file_bytes += (path.parent / name).stat().st_size
    inputs = [
        (
            value.data_type in _INTEGERS,
            tuple(
                size if size >= 0 else _SMALL_SIZES[min(axis, 1)]
                for axis, size in enumerate(value.dims)
            ),
        )
        for value in structure.graph.computed_inputs
    ]
    return file_bytes, inputs


def activation_bytes(file_bytes: int, inputs: Iterable[tuple[bool, Sequence[int]]]) -> int:
    """Return the memory that a model of this size may take to compute on such inputs.

    Attention grows with the square of a text's length, logits with the vocabulary, which the size
    of the file bounds, and feature maps with the pixels.

    Args:
        file_bytes: size of the graph with its weights.
        inputs: for each input, whether its elements are integers (tokens), and its shape.

    Returns:
        At most half of the machine's memory.
    """
    import psutil

    total = 0
    for are_tokens, shape in inputs:
        elements = math.prod(shape)
        if are_tokens and len(shape) <= 2:
            attention = _TOKEN_BYTES * max(shape, default=1)
            total += elements * (attention + file_bytes // _SMALLEST_MATRIX)
        else:
            total += elements * 4 * _FEED_COPIES
    return min(total, psutil.virtual_memory().total // 2)


@dataclass
class Watch:
    """What a watched process has done."""

    exceeded: str = ""
    """The limit that it has passed, as the end of a sentence; empty if none."""


@contextmanager
def watching(pid: int, limits: ResourceLimits, end: Callable[[], object]) -> Iterator[Watch]:
    """Watch a process during the block, and call `end` once when it passes a limit."""
    watch = Watch()
    if limits == NO_LIMITS:
        yield watch
        return
    stopped = threading.Event()
    thread = threading.Thread(
        target=_observe,
        args=(pid, limits, end, watch, stopped),
        name="resource limits",
        daemon=True,
    )
    thread.start()
    try:
        yield watch
    finally:
        stopped.set()
        thread.join()


def _observe(
    pid: int,
    limits: ResourceLimits,
    end: Callable[[], object],
    watch: Watch,
    stopped: threading.Event,
) -> None:
    meter = _Meter(pid)
    while not stopped.wait(_INTERVAL_SECONDS):
        watch.exceeded = meter.exceeded(limits)
        if watch.exceeded:
            end()
            return


class _Meter:
    """The memory and the time of a process since this object was created."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._looks = 0
        self._started = time.monotonic()
        self._cpu_before = _cpu_seconds(pid)

    def exceeded(self, limits: ResourceLimits, *, memory_before: int = 0) -> str:
        """Return which limit is passed, as the end of a sentence; empty if none is."""
        self._looks += 1
        if memory_bytes(self.pid) - memory_before > limits.memory_bytes:
            return f"it needed more than {limits.memory_bytes / 2**30:.4g} GiB of memory"
        if self._looks % _TIME_EVERY == 0 and limits.seconds < math.inf:
            elapsed = time.monotonic() - self._started
            if elapsed > limits.seconds and (
                _cpu_seconds(self.pid) - self._cpu_before > limits.seconds
            ):
                return f"it took longer than {limits.seconds:g} seconds"
        return ""


def memory_bytes(pid: int) -> int:
    """Return the resident memory of a process without pages of files; 0 if it has ended."""
    if _HAS_PROC:
        with suppress(OSError, ValueError, IndexError):
            _, resident, shared = Path(f"/proc/{pid}/statm").read_bytes().split()[:3]
            return (int(resident) - int(shared)) * _PAGE_BYTES
        return 0
    import psutil

    with suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss)
    return 0


def _cpu_seconds(pid: int) -> float:
    import psutil

    with suppress(psutil.Error):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    return 0.0


@dataclass
class _Call:
    name: str
    limits: Callable[[], ResourceLimits]
    is_running: bool = True


@dataclass
class _OwnCalls:
    """The calls of this process that are limited now."""

    end: Callable[[str], object]
    is_watched: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    has_calls: threading.Event = field(default_factory=threading.Event)
    calls: dict[int, _Call] = field(default_factory=dict)


_own_calls: _OwnCalls | None = None


@contextmanager
def watching_own_calls(end: Callable[[str], object]) -> Iterator[None]:
    """Watch the limited calls of this process during the block.

    Args:
        end: called in another thread with a message when a call passes its limit; it should end the
            process, because native code cannot be interrupted.
    """
    global _own_calls  # noqa: PLW0603  there is one process
    _own_calls = _OwnCalls(end)
    try:
        yield
    finally:
        _own_calls = None


@contextmanager
def limited_call(name: object, limits: Callable[[], ResourceLimits]) -> Iterator[None]:
    """Limit what the block may take in addition, if this process is watched.

    A call that is over before the watching thread looks costs two microseconds.

    Args:
        name: what the message starts with, such as the path of the graph.
        limits: called in the watching thread, for a call that takes longer.
    """
    own = _own_calls
    if own is None:
        yield
        return
    call = _Call(str(name), limits)
    with own.lock:
        if not own.is_watched:
            threading.Thread(
                target=_observe_calls, args=(own,), name="resource limits", daemon=True
            ).start()
            own.is_watched = True
        own.calls[id(call)] = call
        own.has_calls.set()
    try:
        yield
    finally:
        call.is_running = False
        with own.lock:
            del own.calls[id(call)]
            if not own.calls:
                own.has_calls.clear()


def _observe_calls(own: _OwnCalls) -> None:
    pid = os.getpid()
    seen: dict[int, tuple[_Call, ResourceLimits, _Meter, int]] = {}
    while True:
        own.has_calls.wait()
        with own.lock:
            calls = dict(own.calls)
        # What a call takes before it is seen for the first time does not count: 20 ms at most.
        seen = {key: entry for key, entry in seen.items() if calls.get(key) is entry[0]}
        for key, call in calls.items():
            if key not in seen:
                seen[key] = (call, _limits_of(call), _Meter(pid), memory_bytes(pid))
            _, limits, meter, before = seen[key]
            exceeded = meter.exceeded(limits, memory_before=before)
            if exceeded and call.is_running:
                own.end(f"{call.name}: {exceeded}, the limit for files of this size. {_RAISE}")
                return
        time.sleep(_INTERVAL_SECONDS)


def _limits_of(call: _Call) -> ResourceLimits:
    try:
        return call.limits()
    except EngineryError:  # a file that is gone is reported where it is read
        return NO_LIMITS

"""Run work in a child process, which frees its memory, may crash, and never outlives its parent.

    run_in_subprocess("enginery.export.worker", request, log=log, description="exporting minilm",
                      error_classes=(ExportError,))

The child reads its request from one JSON file and writes its result or its error into another. What
it prints goes to the log, except the phases that it reports:

    $ python -m enginery.export.worker request.json result.json

Parent and child hold the two ends of a pipe. When the parent ends, even by SIGKILL, the kernel
closes its end, and the child exits at once. `parent_death_pipe` creates this pipe for a child that
is started in another way.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from enginery.core import errors, module_runner
from enginery.core.closing import Closeable
from enginery.core.errors import (
    ArtifactError,
    EngineryError,
    ExportError,
    InputError,
    MissingPackageError,
    is_system_error,
    os_errors_as,
)
from enginery.core.extras import missing_package
from enginery.core.scratch import temporary_directory
from enginery.core.trust.resource_limits import NO_LIMITS, ResourceLimits, watching

_PIPE = "ENGINERY_PARENT_PIPE"
"""Environment variable with the descriptor of the pipe whose other end the parent holds."""

_PHASE = "\x1ephase "
"""The prefix of a line in a child's output that names its current phase."""

_LINE = 300
"""Characters of a log's last line that a message has."""

_READ_CHARACTERS = 1 << 16
"""Longest part of a line that is read at once; a native library may write lines of a gigabyte."""

_LOG_CHARACTERS = 1 << 24
"""Length of a log; what a child prints after that is left out."""

WorkerResult = dict[str, Any]


@dataclass(frozen=True)
class Supervision:
    """How the parent starts and watches a child."""

    on_phase: Callable[[str], object] = lambda _: None
    """Called with each phase that the child reports; see `report_phase`."""
    limits: ResourceLimits = NO_LIMITS
    """Memory and time at which the child is ended."""
    python: str = ""
    """The interpreter of another environment that runs the child; empty for this one's."""


_UNLIMITED = Supervision()


def run_in_subprocess(
    module: str,
    request: Mapping[str, Any],
    *,
    log: Path,
    description: str,
    error_classes: Sequence[type[EngineryError]],
    supervision: Supervision = _UNLIMITED,
) -> WorkerResult:
    """Run `python -m module` on a request and return its result.

    Args:
        module: a module whose `__main__` calls `worker_main`.
        request: values that JSON can hold.
        log: file for the child's standard output and standard error.
        description: start of the message if the child ends without a result: `exporting minilm`.
        error_classes: classes of errors that are raised as the child raised them, besides
            MissingPackageError. The first one replaces all others, and is raised for a crash.
        supervision: its interpreter, its limits, and the callback for phases that it reports.

    Raises:
        EngineryError: the child failed, crashed or passed a limit; one of `error_classes`, with the
            child's message.
    """
    log.parent.mkdir(parents=True, exist_ok=True)

    last_line = "none"
    free = _LOG_CHARACTERS

    def on_line(line: str) -> None:
        nonlocal last_line, free
        if line.startswith(_PHASE):
            supervision.on_phase(line.removeprefix(_PHASE).strip())
            return
        if free > 0:
            stream.write(line if len(line) < free else "[the log is full]\n")
        free -= len(line)
        last_line = line[: 2 * _LINE].strip() or last_line

    with temporary_directory("child") as scratch:
        request_file, result_file = scratch / "request.json", scratch / "result.json"
        request_file.write_text(json.dumps(request), encoding="utf-8")
        with log.open("w", encoding="utf-8") as stream:
            try:
                status = run_module(
                    module,
                    str(request_file),
                    str(result_file),
                    on_line=on_line,
                    limits=supervision.limits,
                    python=supervision.python,
                )
            except LimitError as error:
                raise error_classes[0](
                    f"{description}: {error}", do=supervision.limits.do
                ) from None
        result: WorkerResult = {}
        if status == 0 and result_file.is_file():
            result = json.loads(result_file.read_text(encoding="utf-8"))
    if not result:
        raise error_classes[0](
            f"{description}: the process {describe_exit(status)}.",
            do=f"The last line of its log: {last_line[:_LINE]} The whole log: {log}",
        )
    if "error" in result:
        details = result["error"]
        kinds: tuple[type[EngineryError], ...] = (
            EngineryError,
            MissingPackageError,
            *error_classes,
        )
        error_class = {kind.__name__: kind for kind in kinds}.get(details["type"], error_classes[0])
        raise error_class(details["message"], do=details["do"] or f"The whole log: {log}")
    return result


class LimitError(Exception):
    """A child was ended because it passed a limit."""

    def __init__(self, exceeded: str) -> None:
        super().__init__(f"the process was ended because {exceeded}, its limit.")


def run_module(
    module: str,
    *arguments: str,
    on_line: Callable[[str], object],
    limits: ResourceLimits = NO_LIMITS,
    python: str = "",
) -> int:
    """Run `python -m module arguments…` and return its exit status; it ends with this process.

    Args:
        module: the module.
        arguments: its arguments.
        on_line: called with each line of its standard output and standard error; very long lines
            come in parts. An exception in it, or an interrupt, kills the child.
        limits: memory and time at which the child is ended.
        python: the interpreter of another environment; empty for this one's.

    Raises:
        LimitError: the child has passed a limit.
    """
    with (
        parent_death_pipe() as (environment, descriptors),
        subprocess.Popen(
            _command(python, module, *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            # Unbuffered, so that the log is complete if the child crashes.
            env={**child_environment(python), **environment, "PYTHONUNBUFFERED": "1"},
            pass_fds=descriptors,
        ) as child,
        watching(child.pid, limits, child.kill) as watch,
    ):
        try:
            stdout = child.stdout
            while stdout and (line := stdout.readline(_READ_CHARACTERS)):
                on_line(line)
            status = child.wait()
        except BaseException:
            child.kill()
            raise
    if watch.exceeded:
        raise LimitError(watch.exceeded)
    return status


def _command(python: str, module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module; `python` is empty for this environment."""
    if python:
        return interpreter_command(python, module, *arguments)
    return python_command(module, *arguments)


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module in this environment."""
    return interpreter_command(sys.executable, module, *arguments)


def interpreter_command(python: str, module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module with an interpreter, and with this enginery.

    With `-P` nothing is imported from the working directory, which may be a model's directory
    with a file `torch.py` in it.
    """
    return [python, "-P", module_runner.__file__, module, *arguments]


def child_environment(python: str) -> dict[str, str]:
    """Return the environment variables of a child.

    Variables that name places of this environment's packages are left out for another's.
    """
    own_places = ("PYTHONHOME", "PYTHONPATH") if python else ()
    return {name: value for name, value in os.environ.items() if name not in own_places}


class WorkerProcess(Closeable):
    """A child process that handles JSON requests, one line each, until it is closed.

    It also ends when this process ends. The child calls `serve_requests`.
    """

    def __init__(
        self,
        module: str,
        *,
        log: Path | None = None,
        description: str,
        error: type[EngineryError],
        environment: Mapping[str, str] | None = None,
        python: str = "",
    ) -> None:
        """Start `python -m module`.

        Args:
            module: a module whose `__main__` calls `serve_requests`.
            log: file for the child's standard error, and for what its libraries print; None for one
                in a temporary directory, which is removed with the process.
            description: start of the message if the child ends without a result.
            error: class of the error to raise if the child raises an exception that is not an
                EngineryError, or passes a limit.
            environment: environment variables in addition to those of this process.
            python: the interpreter of another environment; empty for this one's.
        """
        self._description, self._error = description, error
        with ExitStack() as stack:
            self._log = log or stack.enter_context(temporary_directory("worker")) / "log"
            self._log.parent.mkdir(parents=True, exist_ok=True)
            stream = stack.enter_context(self._log.open("w", encoding="utf-8"))
            pipe, descriptors = stack.enter_context(parent_death_pipe())
            self._process = subprocess.Popen(
                _command(python, module),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                encoding="utf-8",
                env={**child_environment(python), **pipe, **(environment or {})},
                pass_fds=descriptors,
            )
            self._held = stack.pop_all()

    @property
    def is_alive(self) -> bool:
        """True until the process ends."""
        return self._process.poll() is None

    def request(
        self, command: str, *, limits: ResourceLimits = NO_LIMITS, **values: Any
    ) -> WorkerResult:
        """Send one request and return its result.

        Args:
            command: what to do.
            limits: memory of the child, and time for the request, at which the child is ended.
            values: further values of the request.

        Raises:
            EngineryError: the child crashed, which says nothing about what was asked; or it raised
                an error, which has the child's class, or `error`; or it passed a limit (`error`).
        """
        requests, results = self._process.stdin, self._process.stdout
        line = ""
        with watching(self._process.pid, limits, self._process.kill) as watch:
            if requests and results:
                with suppress(BrokenPipeError):  # the child has ended; its status is reported below
                    requests.write(json.dumps({"do": command, **values}) + "\n")
                    requests.flush()
                    line = results.readline()
        if watch.exceeded:
            self._process.wait()
            raise self._error(f"{self._description}: {LimitError(watch.exceeded)}", do=limits.do)
        if not line:
            status = self._process.wait()
            raise EngineryError(
                f"{self._description}: the process {describe_exit(status)}.",
                do=f"The last line of its log: {_last_line(self._log)}",
            )
        result: WorkerResult = json.loads(line)
        if "error" in result:
            details = result["error"]
            error_class = _error_class(details["type"], default=self._error)
            raise error_class(details["message"], do=details["do"])
        return result

    def close(self) -> None:
        """End the process; closing twice is fine."""
        # It may be in the middle of a long run, and holds nothing that has to be saved.
        self._process.kill()
        self._process.wait()
        self._held.close()
        for stream in (self._process.stdin, self._process.stdout):
            if stream:
                with suppress(BrokenPipeError):
                    stream.close()


def serve_requests(handle: Callable[[WorkerResult], WorkerResult]) -> NoReturn:
    """Handle the requests of a `WorkerProcess` until standard input closes, then exit."""
    exit_with_parent()
    # Libraries print to standard output, so results get a descriptor of their own.
    results = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        try:
            answer = handle(json.loads(line))
        except Exception as error:
            answer = _error(error, "it")
        with suppress(BrokenPipeError):  # the parent has ended, and so will this process
            results.write(json.dumps(answer) + "\n")
            results.flush()
    os._exit(0)  # unloading large modules takes time, and TensorRT may crash in it


def _error_class(name: str, *, default: type[EngineryError]) -> type[EngineryError]:
    """Return the class of that name in `core.errors`, or the default if there is none."""
    candidate = getattr(errors, name, None)
    if isinstance(candidate, type) and issubclass(candidate, EngineryError):
        return candidate
    return default


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:_LINE] if lines else "none"


@contextmanager
def parent_death_pipe() -> Iterator[tuple[dict[str, str], tuple[int, ...]]]:
    """Open a pipe that makes a child exit when the context, or this process, ends.

    Yields the environment variables and the descriptors (`pass_fds`) to start the child with. The
    child calls `exit_with_parent`. Does nothing on Windows.
    """
    if sys.platform == "win32":  # descriptors are not inherited there
        yield {}, ()
        return
    child_end, own_end = os.pipe()
    try:
        yield {_PIPE: str(child_end)}, (child_end,)
    finally:
        os.close(own_end)
        os.close(child_end)


def exit_with_parent() -> None:
    """Make this process exit when its parent closes the pipe; see `parent_death_pipe`.

    The kernel sends SIGIO when the pipe closes, and the default action of SIGIO is to end the
    process. A thread could not do it: it would need the GIL, which an exporter's C++ code may hold
    for minutes. Does nothing on Windows, or if the process was started without a pipe.
    """
    pipe = int(os.environ.pop(_PIPE, "-1"))
    if pipe >= 0 and sys.platform != "win32":
        exit_when_closed(pipe)


def exit_when_closed(pipe: int) -> None:
    """Make this process exit when the last writer of the pipe closes it; not on Windows."""
    import fcntl  # not on Windows

    signal.signal(signal.SIGIO, signal.SIG_DFL)
    # Children inherit the signal mask of the parent's thread, which may block every signal.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGIO})
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([pipe], [], [], 0)[0]:  # closed before O_ASYNC was set
        signal.raise_signal(signal.SIGIO)


def report_phase(name: str) -> None:
    """Report the current phase to the parent process, whose `on_phase` gets it."""
    print(f"{_PHASE}{name}", flush=True)  # noqa: T201  the parent reads this line


def worker_main(handle: Callable[[Any], Mapping[str, Any]], *, description: str) -> NoReturn:
    """Read the request, handle it, write the result and exit.

    Errors are written to the result file, under `error`. An exception that is not an
    EngineryError prints its traceback, and its message starts with `description`, which is
    formatted with the request: `{path}: TensorRT` gives `m.onnx: TensorRT failed in ValueError: …`.
    If a file cannot be read or written, the error is the last line of the log, and the status is 1.
    """
    exit_with_parent()
    request_file, result_file = (Path(word) for word in sys.argv[1:3])
    status = 0
    try:
        with os_errors_as(EngineryError, f"{request_file} cannot be read"):
            request = json.loads(request_file.read_text(encoding="utf-8"))
        result = _result(handle, request, description)
        with os_errors_as(EngineryError, f"{result_file} cannot be written"):
            result_file.write_text(json.dumps(result), encoding="utf-8")
    except EngineryError as error:
        print(error)  # noqa: T201  the parent reads this line
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # unloading large modules takes time, and TensorRT may crash in it


def _result(
    handle: Callable[[Any], Mapping[str, Any]], request: Mapping[str, Any], description: str
) -> Mapping[str, Any]:
    """Return what `handle` returns, or its error."""
    try:
        return handle(request)
    except Exception as error:
        return _error(error, description.format_map(request))


def _error(error: Exception, description: str) -> WorkerResult:
    """Return the result of a request that failed; print the traceback of an unexpected error."""
    if isinstance(error, ImportError):
        error = missing_package(error, description) or error
    if isinstance(error, EngineryError):
        kind = type(error)
        if kind in (ArtifactError, ExportError, InputError) and is_system_error(error):
            # A file that the system denies says nothing about the model or its inputs: no caller
            # may take it for their refusal.
            kind = EngineryError
        values = {"type": kind.__name__, "message": error.message, "do": error.do}
    else:
        traceback.print_exc()
        first = next(iter(str(error).strip().splitlines()), "")
        message = f"{description} failed in {type(error).__name__}: {first}"
        values = {"type": "", "message": message, "do": ""}
    return {"error": values}


def describe_exit(status: int) -> str:
    """Describe a child's exit status.

    >>> describe_exit(-11)
    'crashed with signal 11'
    """
    if status == -signal.SIGKILL:
        return "was killed (signal 9); the usual cause is that memory ran out"
    return f"crashed with signal {-status}" if status < 0 else f"ended with status {status}"


def peak_rss_bytes() -> int:
    """Return the peak resident set size of this process, in bytes.

    On Linux `ru_maxrss` survives exec, so a child would report its parent's size. `VmHWM` starts
    anew with each program.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource  # not on Windows

    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage if sys.platform == "darwin" else usage * 1024

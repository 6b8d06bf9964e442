"""Work in a child process: its memory comes back, a crash is an answer, and it ends with us.

Takes a module and a request; leaves a log with everything that the child said.

    >>> with log.open("w") as stream:
    ...     found = ask_child("enginery.export.worker", request, log=log, error=ExportError)

The child reads the request from a JSON file, writes its answer or its error into another, and says
what it likes on standard output:

    $ python -m enginery.export.worker request.json result.json

It holds one end of a pipe, and this process the other. However this process ends (SIGTERM and
SIGKILL leave no time for anything), the kernel closes the pipe, and the child ends at once. A child
that is started in another way is given the same pipe by `held_pipe`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from enginery.core import errors
from enginery.core.closing import Closing
from enginery.core.errors import EngineryError

_PIPE = "ENGINERY_PARENT_PIPE"
"""The number of the file descriptor that the parent's death closes."""

Answer = dict[str, Any]


def ask_child(
    module: str,
    request: Mapping[str, Any],
    *,
    log: Path,
    what: str,
    error: type[EngineryError],
    kinds: tuple[type[EngineryError], ...] = (),
    heard: Callable[[str], bool] = lambda _: False,
) -> Answer:
    """Runs `python -m module` on a request and returns its answer.

    Args:
        module: one whose `__main__` calls `answer_parent`.
        request: what JSON can hold.
        log: where everything goes that the child says.
        what: starts the message where the child ends without an answer: `exporting minilm`.
        error: what is raised then, and for every error of the child's but `kinds`.
        kinds: errors that are raised as the child raised them.
        heard: is given each line of the child's output; a line that it takes is not logged.

    Raises:
        EngineryError: `error` or one of `kinds`, with the child's own words.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="enginery-child-") as scratch:
        request_file, result_file = Path(scratch, "request.json"), Path(scratch, "result.json")
        request_file.write_text(json.dumps(request), encoding="utf-8")
        with log.open("w", encoding="utf-8") as stream:
            status = run_child(
                module,
                str(request_file),
                str(result_file),
                heard=lambda line: heard(line) or stream.write(line),
            )
        found: Answer = {}
        if status == 0 and result_file.is_file():
            found = json.loads(result_file.read_text(encoding="utf-8"))
    if not found:
        raise error(
            f"{what}: the process {how_it_ended(status)}.", do=f"Its last words are in {log}."
        )
    if "error" in found:
        said = found["error"]
        kind = {k.__name__: k for k in kinds}.get(said["type"], error)
        raise kind(said["message"], do=said["do"] or f"The whole log: {log}")
    return found


def run_child(module: str, *words: str, heard: Callable[[str], object]) -> int:
    """Runs `python -m module words…`, which ends when this process does; returns its status.

    `heard` is given each line of what it says, errors included. An exception there, or an
    interrupt, ends the child too.
    """
    with (
        held_pipe() as (environment, descriptors),
        subprocess.Popen(
            python_command(module, *words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            # Unbuffered, so that the log has its last words if it crashes.
            env={**os.environ, **environment, "PYTHONUNBUFFERED": "1"},
            pass_fds=descriptors,
        ) as child,
    ):
        try:
            for line in child.stdout or ():
                heard(line)
            return child.wait()
        except BaseException:
            child.kill()
            raise


def python_command(module: str, *words: str) -> list[str]:
    """Return the command of a Python module, which imports nothing from the working directory.

    `-P`: the working directory may be a model's, with a file `torch.py` in it.
    """
    return [sys.executable, "-P", "-m", module, *words]


class ChildWorker(Closing):
    """A child process that answers JSON requests, one line each; closing it ends the process.

    So does the end of this process, however it comes. The child calls `answer_requests`.
    """

    def __init__(
        self,
        module: str,
        *,
        log: Path,
        what: str,
        error: type[EngineryError],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start `python -m module`.

        Args:
            module: one whose `__main__` calls `answer_requests`.
            log: where everything goes that the child says.
            what: starts the message where the child ends without an answer.
            error: what is raised then, and for an error of the child's that nobody expected.
            environment: variables beside those of this process.
        """
        self._log, self._what, self._error = log, what, error
        log.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack, log.open("w", encoding="utf-8") as stream:
            held, descriptors = stack.enter_context(held_pipe())
            self._process = subprocess.Popen(
                python_command(module),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                encoding="utf-8",
                env={**os.environ, **held, **(environment or {})},
                pass_fds=descriptors,
            )
            self._held = stack.pop_all()

    @property
    def is_alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def ask(self, does: str, **values: Any) -> Answer:
        """Send one request and return its answer.

        Raises:
            EngineryError: as the child raised it, or `error` where the child died.
        """
        requests, answers = self._process.stdin, self._process.stdout
        line = ""
        if requests and answers:
            with suppress(BrokenPipeError):  # it has died; what follows says how
                requests.write(json.dumps({"do": does, **values}) + "\n")
                requests.flush()
                line = answers.readline()
        if not line:
            status = self._process.wait()
            raise self._error(
                f"{self._what}: the process {how_it_ended(status)}.",
                do=f"Its last words: {_last_words(self._log)}",
            )
        found: Answer = json.loads(line)
        if "error" in found:
            said = found["error"]
            raise _kind_of(said["type"], self._error)(said["message"], do=said["do"])
        return found

    def close(self) -> None:
        """End the process; closing twice is fine."""
        # It may be in the middle of a long run, and there is nothing in it to keep.
        self._process.kill()
        self._process.wait()
        self._held.close()
        for stream in (self._process.stdin, self._process.stdout):
            if stream:
                with suppress(BrokenPipeError):
                    stream.close()


def answer_requests(answer: Callable[[Answer], Answer]) -> NoReturn:
    """Be the child of a `ChildWorker`: answer until standard input ends, or the parent does."""
    end_with_parent()
    # Libraries print what they like; answers have a descriptor of their own.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        try:
            found = answer(json.loads(line))
        except EngineryError as error:
            found = _error(type(error).__name__, error.message, error.do)
        except Exception as error:
            traceback.print_exc()
            first = next(iter(str(error).strip().splitlines()), "")
            found = _error("", f"it failed in {type(error).__name__}: {first}", "")
        with suppress(BrokenPipeError):  # the parent has gone; so does this process
            answers.write(json.dumps(found) + "\n")
            answers.flush()
    os._exit(0)  # taking down large modules one by one takes time, and TensorRT may crash in it


def _kind_of(name: str, otherwise: type[EngineryError]) -> type[EngineryError]:
    """Return the class of an error that a child names, or `otherwise` for none of ours."""
    kind = getattr(errors, name, None)
    # The constructor of MissingPackageError takes a package's name in place of a message.
    if not isinstance(kind, type) or kind is errors.MissingPackageError:
        return otherwise
    return kind if issubclass(kind, EngineryError) else otherwise


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "none"


@contextmanager
def held_pipe() -> Iterator[tuple[dict[str, str], tuple[int, ...]]]:
    """A pipe whose one end is open here, and nowhere else, for as long as the context is.

    Gives what a child is started with to hold the other end: variables of its environment, and
    descriptors to pass on (`pass_fds`). The child calls `end_with_parent`, and ends when the
    context does.
    """
    if sys.platform == "win32":  # descriptors are not handed on there
        yield {}, ()
        return
    theirs, ours = os.pipe()
    try:
        yield {_PIPE: str(theirs)}, (theirs,)
    finally:
        os.close(ours)
        os.close(theirs)


def end_with_parent() -> None:
    """Ends this process as soon as the one that holds its pipe is gone: see `held_pipe`.

    The kernel sends SIGIO when the pipe closes, and the default for SIGIO is to end the process.
    No thread watches: one would need the interpreter's lock, which an exporter's C++ code may hold
    for minutes. Does nothing in a process that was started in another way, or on Windows.
    """
    pipe = int(os.environ.pop(_PIPE, "-1"))
    if pipe >= 0 and sys.platform != "win32":
        end_when_closed(pipe)


def end_when_closed(pipe: int) -> None:
    """End this process as soon as nobody can write to the pipe any more; not on Windows."""
    import fcntl  # not on Windows

    signal.signal(signal.SIGIO, signal.SIG_DFL)
    # A parent's thread may have had every signal blocked, and children inherit that.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGIO})
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([pipe], [], [], 0)[0]:  # gone before we asked
        signal.raise_signal(signal.SIGIO)


def answer_parent(answer: Callable[[Any], Mapping[str, Any]], *, what: str) -> NoReturn:
    """The whole of a child: reads its request, answers, and ends.

    Errors go into the result file, too, under `error`. Those that nobody expected leave their
    traceback in the log and start with `what`: `exporting failed in ValueError: …`. It may name
    values of the request: `{path}: TensorRT`.
    """
    end_with_parent()
    request_file, result_file = (Path(word) for word in sys.argv[1:3])
    request = json.loads(request_file.read_text(encoding="utf-8"))
    found: Mapping[str, Any]
    try:
        found = answer(request)
    except EngineryError as error:
        found = _error(type(error).__name__, error.message, error.do)
    except Exception as error:
        traceback.print_exc()
        first = (str(error).strip().splitlines() or [""])[0]
        where = what.format_map(request)
        found = _error("", f"{where} failed in {type(error).__name__}: {first}", "")
    result_file.write_text(json.dumps(found), encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # taking down large modules one by one takes time, and TensorRT may crash in it


def _error(kind: str, message: str, do: str) -> Answer:
    return {"error": {"type": kind, "message": message, "do": do}}


def how_it_ended(status: int) -> str:
    """A child's exit status in words: `crashed with signal 11`."""
    if status == -signal.SIGKILL:
        return "was killed (signal 9); the usual cause is that memory ran out"
    return f"crashed with signal {-status}" if status < 0 else f"ended with status {status}"


def peak_rss_bytes() -> int:
    """The largest resident set of this process so far, in bytes.

    Linux's `ru_maxrss` survives exec, so a child would report its parent's size;
    `VmHWM` belongs to the program that runs.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource  # not on Windows

    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage if sys.platform == "darwin" else usage * 1024

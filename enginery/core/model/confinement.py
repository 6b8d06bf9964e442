"""A Python process that may not do what no model has a use for.

An audit hook (PEP 578) sees every import, open file, process and connection that Python code makes
in its process, and stops those that a model being loaded or traced never needs:

>>> with confined(model=Path("downloaded-model"), writable=[Path("staging")]):
...     export(...)

It is the second line: `screening` has refused what is known to make a loader run foreign code, and
pickled weights are read by PyTorch's restricted unpickler. It stops code that got through by a way
that nobody knew of. It does not stop native code (a crafted file that exploits a parser in C++ or
Rust), which Python's audit events do not see: that takes a container or a virtual machine.

A hook cannot be removed, so it belongs in a child process.
"""

from __future__ import annotations

import os
import site
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from enginery.core.errors import UntrustedModelError

# Code is known by its suffix, and data are never opened as code.
_CODE = (".py", ".pyc", ".pyo", ".so", ".pyd", ".dll", ".dylib")

_WEIGHTS = (".safetensors", ".bin")

_PROCESSES = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "os.forkpty",
    "os.startfile",
    "pty.spawn",
    "webbrowser.open",
)
_CONNECTIONS = (
    "socket.connect",
    "socket.bind",
    "socket.sendto",
    "socket.sendmsg",
    "socket.getaddrinfo",
    "socket.gethostbyname",
    "socket.gethostbyaddr",
    "urllib.Request",
    "http.client.connect",
    "ftplib.connect",
    "smtplib.connect",
)
_UNPICKLING = ("pickle.find_class",)

# Event -> the positions of the paths that it changes, with the positions of their directories.
_CHANGES: dict[str, tuple[tuple[int, int | None], ...]] = {
    "os.chflags": ((0, None),),
    "os.chmod": ((0, 2),),
    "os.chown": ((0, 3),),
    "os.lchown": ((0, None),),
    "os.link": ((1, 3),),
    "os.mkdir": ((0, 2),),
    "os.remove": ((0, 1),),
    "os.removexattr": ((0, None),),
    "os.rename": ((0, 2), (1, 3)),
    "os.rmdir": ((0, 1),),
    "os.setxattr": ((0, None),),
    "os.symlink": ((1, 2),),
    "os.truncate": ((0, None),),
    "os.utime": ((0, 3),),
    "sqlite3.connect": ((0, None),),
}

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

# Where systems keep what programs read: libraries, fonts, time zones, facts about the machine.
_SYSTEM = (
    "/usr",
    "/lib",
    "/lib64",
    "/opt",
    "/nix",
    "/proc",
    "/sys",
    "/dev",
    "/System",
    "/Library",
    "/etc/localtime",
    "/etc/mime.types",
    "/etc/os-release",
    "/etc/timezone",
)
_DEVICES = ("/dev/null", "/dev/shm", "/proc/self")  # noqa: S108  shared memory of torch's threads


class Confinement:
    """What a process may touch while it handles one model, and what it was stopped from doing."""

    def __init__(self, *, model: Path, writable: Iterable[Path]) -> None:
        """Find out where the interpreter, its packages and the system lie.

        Args:
            model: the model's directory: data, never code.
            writable: where the process may write, beside the temporary directory.
        """
        temporary = Path(tempfile.gettempdir())
        outputs = [temporary, *writable]
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        hub = Path(os.environ.get("HF_HOME") or f"{cache}/huggingface").expanduser()
        # transformers copies a model's code there before it is imported.
        modules = os.environ.get("HF_MODULES_CACHE") or hub / "modules"
        self._data = _real([model, *outputs, modules])
        self._code = _real(
            [
                sys.prefix,
                sys.base_prefix,
                sys.exec_prefix,
                *site.getsitepackages(),
                *filter(None, sys.path),
                *_homes_of_modules(),
            ]
        )
        self._writable = _real([*outputs, *_DEVICES])
        # A snapshot's files are links into the folder `blobs` of its repository.
        blobs = [model.parent.parent / "blobs"] if model.parent.name == "snapshots" else []
        # People keep weights on other disks, and leave links to them.
        weights = [path for path in model.glob("*") if path.suffix in _WEIGHTS]
        self._readable = _real(
            [model, *self._code, *self._writable, hub, *blobs, *weights, *_SYSTEM]
        )
        self.stopped: list[str] = []
        """What the process tried, in words; the first is the cause of the others."""
        self.denied: list[str] = []
        """Files that it was not given to read. Libraries look for settings, so this is no alarm."""

    def error(self) -> UntrustedModelError:
        """Return the error that names the first thing that was stopped."""
        return UntrustedModelError(
            f"the model tried {self.stopped[0]}, which no model has a use for; it was stopped.",
            do="Do not use this model. If you trust its author and know why it does that, pass "
            "--trust-remote-code.",
        )

    def _stop(self, what: str) -> None:
        self.stopped.append(what)
        raise self.error()

    def check_open(self, _: str, arguments: tuple[Any, ...]) -> None:
        """Refuse to write outside, to read another's files, and to open data as code."""
        path, mode, flags = arguments
        if isinstance(path, int):
            return
        place = _resolved(path)
        writes = isinstance(flags, int) and flags & _WRITING
        if writes or (isinstance(mode, str) and set(mode) & set("wax+")):
            if not _below(place, self._writable):
                self._stop(f"to write {place}")
        elif place.endswith(_CODE) and self._is_data(place):
            self._stop(f"to run {place}")
        elif not _below(place, self._readable):
            self.denied.append(place)
            raise PermissionError(f"{place} is not a file of the model")

    def check_change(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Refuse to rename, remove or change files outside of what may be written."""
        for position, of_directory in _CHANGES[event]:
            path = arguments[position] if position < len(arguments) else None
            handle = -1
            if of_directory is not None and of_directory < len(arguments):
                handle = arguments[of_directory]
            if path is None or isinstance(path, int) or path in (":memory:", ""):
                continue
            place = _resolved(path, handle)
            if not _below(place, self._writable):
                self._stop(f"to change {place} ({event})")

    def check_code(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Refuse to run or load a file of the model's directory or of a module cache."""
        if event == "exec":
            file = getattr(arguments[0], "co_filename", "")
        else:  # compile has (source, file), import (module, file, …), dlopen (file,)
            file = arguments[0] if event == "ctypes.dlopen" else arguments[1]
        if isinstance(file, str | bytes | os.PathLike) and os.sep in os.fsdecode(file):
            place = _resolved(file)
            if self._is_data(place):
                self._stop(f"to run {place}")

    def refuse(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Refuse a process, a connection or an object from a pickle."""
        kind = "to start a process" if event in _PROCESSES else "to open a connection"
        kind = "to load an object from a pickle" if event in _UNPICKLING else kind
        said = ", ".join(repr(argument)[:80] for argument in arguments[:2])
        self._stop(f"{kind} ({event}: {said})")

    def _is_data(self, place: str) -> bool:
        """Return whether a file belongs to the model and not to an installed package.

        A package may lie in a model's directory (a virtual environment in the working directory),
        and a model in a package: the longer path decides.
        """
        data, code = _below(place, self._data), _below(place, self._code)
        return bool(data) and len(data) >= len(code)


_CHECKS: dict[str, Callable[[Confinement, str, tuple[Any, ...]], None]] = {
    "open": Confinement.check_open,
    **dict.fromkeys(_CHANGES, Confinement.check_change),
    **dict.fromkeys(("exec", "compile", "import", "ctypes.dlopen"), Confinement.check_code),
    **dict.fromkeys((*_PROCESSES, *_CONNECTIONS, *_UNPICKLING), Confinement.refuse),
}

_active: list[Confinement] = []
"""The confinement in force: the hook itself stays for the life of the process."""
_installed: list[bool] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    check = _CHECKS.get(event) if _active else None
    if check is not None:
        check(_active[-1], event, arguments)


@contextmanager
def confined(*, model: Path, writable: Iterable[Path] = ()) -> Iterator[Confinement]:
    """Confine this process to loading and running one model without its code.

    Enter it behind the imports that the process needs. On leaving, whatever was stopped is raised,
    even where the model hid the error or another one came of it.

    Args:
        model: the model's directory.
        writable: where the process writes its results, beside the temporary directory.

    Raises:
        UntrustedModelError: the model tried what no model has a use for.
    """
    if not _installed:
        sys.addaudithook(_audit)
        _installed.append(True)
    confinement = Confinement(model=model, writable=writable)
    # Bytecode would be written beside the sources of packages.
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    _active.append(confinement)
    try:
        yield confinement
    except Exception as error:
        if confinement.stopped and not isinstance(error, UntrustedModelError):
            raise confinement.error() from error
        raise
    finally:
        _active.remove(confinement)
        sys.dont_write_bytecode = before
    if confinement.stopped:
        raise confinement.error()


def _resolved(path: Any, handle: Any = -1) -> str:
    """Return the absolute path that links lead to; `handle` is what a relative one starts from."""
    text = os.fsdecode(path)
    if isinstance(handle, int) and handle >= 0 and not text.startswith(os.sep):
        try:
            text = f"{os.readlink(f'/proc/self/fd/{handle}')}/{text}"  # noqa: PTH115
        except OSError:
            return text
    return os.path.realpath(text)


def _real(places: Iterable[Any]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(os.path.realpath(os.fsdecode(place)) for place in places))


def _below(place: str, roots: tuple[str, ...]) -> str:
    """Return the longest root that a place lies in; empty where it lies in none."""
    found = [r for r in roots if place == r or place.startswith(r.rstrip(os.sep) + os.sep)]
    return max(found, key=len, default="")


def _homes_of_modules() -> list[str]:
    """Return the folders of imported top-level modules: editable installs are on no path."""
    files = [
        getattr(module, "__file__", None)
        for name, module in list(sys.modules.items())
        if "." not in name
    ]
    return [str(Path(file).parent) for file in files if isinstance(file, str)]

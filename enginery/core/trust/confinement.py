"""Confine a Python process: block what loading or tracing a model never needs.

An audit hook (PEP 578) sees every import, opened file, process and connection of Python code in its
process, and raises for those that a model does not need:

    with confined(Path("downloaded-model"), writable=[Path("staging")]):
        export(...)

This is the second line of defense. The first are `screening`, which rejects files that are known to
make a loader run foreign code, and PyTorch's restricted unpickler. The hook stops code that runs in
a way that nobody knew of. It does not stop native code (a crafted file that exploits a parser in
C++ or Rust), which causes no audit events: that needs a container or a virtual machine.

A hook cannot be removed, so it belongs in a child process.
"""

from __future__ import annotations

import os
import site
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from enginery.core.errors import UntrustedModelError

# Files with code are recognized by their suffix.
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
_UNPICKLING = "pickle.find_class"
_TOKENIZER_PARTS = ("tokenizers.pre_tokenizers", "tokenizers.decoders")
"""Modules whose classes may be unpickled: the tokenizers of Bloom and Cohere in transformers copy
these parts so, and each is made of plain data."""

# Event -> (index of the argument with the changed path, index of its directory descriptor or None).
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

# System directories that programs read: libraries, fonts, time zones, data about the machine.
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


def stay_offline() -> None:
    """Keep the libraries of this process away from the Hub; call it before they are imported.

    transformers 5 replaces layers of some models by kernels of the Hub if the package `kernels` is
    installed.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["USE_HUB_KERNELS"] = "0"


class Confinement:
    """The files that a process may access, and the actions that were blocked."""

    def __init__(self, models: Sequence[Path], *, writable: Iterable[Path]) -> None:
        """Collect the directories of the interpreter, its packages and the system.

        Args:
            models: directories of the models; their files are never run as code.
            writable: directories that the process may write to, besides the temporary directory.
        """
        temporary = Path(tempfile.gettempdir())
        outputs = [temporary, *writable]
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        hub = Path(os.environ.get("HF_HOME") or f"{cache}/huggingface").expanduser()
        # transformers copies the code of a model there before importing it.
        modules = os.environ.get("HF_MODULES_CACHE") or hub / "modules"
        self._data = _real([*models, *outputs, modules])
        self._code = _real(
            [
                sys.prefix,
                sys.base_prefix,
                sys.exec_prefix,
                *site.getsitepackages(),
                *filter(None, sys.path),
                *_module_folders(),
            ]
        )
        self._writable = _real([*outputs, *_DEVICES])
        # In the Hub cache, the files of a snapshot are links into `blobs`.
        blobs = [m.parent.parent / "blobs" for m in models if m.parent.name == "snapshots"]
        # Weights may be links to files on other disks.
        weights = [path for m in models for path in m.glob("*") if path.suffix in _WEIGHTS]
        self._readable = _real(
            [*models, *self._code, *self._writable, hub, *blobs, *weights, *_SYSTEM]
        )
        self.blocked: list[str] = []
        """Descriptions of blocked actions; the first one causes the others."""
        self.denied: list[str] = []
        """Files that could not be read. Libraries search for settings, so this is allowed."""

    def error(self) -> UntrustedModelError:
        """Return an error with the first blocked action."""
        return UntrustedModelError(
            f"the model tried {self.blocked[0]}, which no model needs; this was blocked.",
            do="Do not use this model. If you trust its author and know why it does this, pass "
            "--trust-remote-code.",
        )

    def _block(self, action: str) -> None:
        self.blocked.append(action)
        raise self.error()

    def check_open(self, _: str, arguments: tuple[Any, ...]) -> None:
        """Block writing to, and reading from, other directories, and opening data as code."""
        path, mode, flags = arguments
        if isinstance(path, int):
            return
        target = _resolved(path)
        writes = isinstance(flags, int) and flags & _WRITING
        if writes or (isinstance(mode, str) and set(mode) & set("wax+")):
            if not _below(target, self._writable):
                self._block(f"to write {target}")
        elif target.endswith(_CODE) and self._is_data(target):
            self._block(f"to run {target}")
        elif not _below(target, self._readable):
            self.denied.append(target)
            raise PermissionError(f"{target} is outside the model's directory")

    def check_change(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Block changes of files outside the writable directories."""
        for position, of_directory in _CHANGES[event]:
            path = arguments[position] if position < len(arguments) else None
            handle = -1
            if of_directory is not None and of_directory < len(arguments):
                handle = arguments[of_directory]
            if path is None or isinstance(path, int) or path in (":memory:", ""):
                continue
            target = _resolved(path, handle)
            if not _below(target, self._writable):
                self._block(f"to change {target} ({event})")

    def check_code(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Block running or loading a file from the model's directory or a module cache."""
        if event == "exec":
            file = getattr(arguments[0], "co_filename", "")
        else:  # compile has (source, file), import (module, file, …), dlopen (file,)
            file = arguments[0] if event == "ctypes.dlopen" else arguments[1]
        if isinstance(file, str | bytes | os.PathLike) and os.sep in os.fsdecode(file):
            # torch.fx compiles `<eval_with_key>.0 from /path/of/the/caller.py:17`. As a relative
            # path it would be a file of a model whose directory is the working directory.
            if event not in ("import", "ctypes.dlopen") and os.fsdecode(file).startswith("<"):
                return
            code_file = _resolved(file)
            if self._is_data(code_file):
                self._block(f"to run {code_file}")

    def block_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Block starting a process or opening a connection."""
        kind = "to start a process" if event in _PROCESSES else "to open a connection"
        self._block_with_arguments(kind, event, arguments)

    def check_unpickling(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Block loading an object from a pickle, unless it is a part of a tokenizer."""
        module, name = arguments
        # A name with dots would lead from the class to what it imports.
        parts = vars(sys.modules[module]) if module in _TOKENIZER_PARTS else {}
        if not isinstance(parts.get(name), type):
            self._block_with_arguments("to load an object from a pickle", event, arguments)

    def _block_with_arguments(self, kind: str, event: str, arguments: tuple[Any, ...]) -> None:
        arguments_shown = ", ".join(repr(argument)[:80] for argument in arguments[:2])
        self._block(f"{kind} ({event}: {arguments_shown})")

    def _is_data(self, path: str) -> bool:
        """Return True if a file belongs to the model and not to an installed package.

        A package may be inside a model's directory (a virtual environment in the working
        directory), and a model inside a package, so the longer path decides.
        """
        data, code = _below(path, self._data), _below(path, self._code)
        return bool(data) and len(data) >= len(code)


_CHECKS: dict[str, Callable[[Confinement, str, tuple[Any, ...]], None]] = {
    "open": Confinement.check_open,
    **dict.fromkeys(_CHANGES, Confinement.check_change),
    **dict.fromkeys(("exec", "compile", "import", "ctypes.dlopen"), Confinement.check_code),
    **dict.fromkeys((*_PROCESSES, *_CONNECTIONS), Confinement.block_event),
    _UNPICKLING: Confinement.check_unpickling,
}

_active: list[Confinement] = []
"""The active confinement. The hook itself cannot be removed from the process."""


def is_confined() -> bool:
    """Return True within a block of `confined`, where no process can be started."""
    return bool(_active)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    check = _CHECKS.get(event) if _active else None
    if check is not None:
        check(_active[-1], event, arguments)


@cache
def _install_hook() -> None:
    """Add the audit hook to this process, once."""
    sys.addaudithook(_audit)


@contextmanager
def confined(*models: Path, writable: Iterable[Path] = ()) -> Iterator[Confinement]:
    """Confine this process to loading and running models without their code.

    Enter the block after all imports. The first blocked action raises an error at the end of the
    block, even if the model suppressed that error or the block raised another one.

    Args:
        models: directories of the models.
        writable: directories for the results, besides the temporary directory.

    Raises:
        UntrustedModelError: the model tried an action that was blocked.
    """
    _install_hook()
    confinement = Confinement(models, writable=writable)
    # Python would write bytecode into the directories of packages.
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    # With PYTHONPYCACHEPREFIX, Python would run bytecode from a directory that anything may write
    # to, such as the temporary one. Without it, bytecode lies beside its source.
    prefix, sys.pycache_prefix = sys.pycache_prefix, None
    _active.append(confinement)
    try:
        yield confinement
    except Exception as error:
        if confinement.blocked and not isinstance(error, UntrustedModelError):
            raise confinement.error() from error
        raise
    finally:
        _active.remove(confinement)
        sys.dont_write_bytecode = before
        sys.pycache_prefix = prefix
    if confinement.blocked:
        raise confinement.error()


def _resolved(path: Any, handle: Any = -1) -> str:
    """Return the absolute path without links; `handle` is the base directory of a relative path."""
    text = os.fsdecode(path)
    if isinstance(handle, int) and handle >= 0 and not text.startswith(os.sep):
        try:
            text = f"{os.readlink(f'/proc/self/fd/{handle}')}/{text}"  # noqa: PTH115
        except OSError:
            return text
    return os.path.realpath(text)


def _real(paths: Iterable[Any]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(os.path.realpath(os.fsdecode(path)) for path in paths))


def _below(path: str, roots: tuple[str, ...]) -> str:
    """Return the longest root that contains a path; empty if there is none."""
    enclosing = [
        root for root in roots if path == root or path.startswith(root.rstrip(os.sep) + os.sep)
    ]
    return max(enclosing, key=len, default="")


def _module_folders() -> list[str]:
    """Return the folders of imported top-level modules; editable installs are not in sys.path."""
    files = [
        getattr(module, "__file__", None)
        for name, module in list(sys.modules.items())
        if "." not in name
    ]
    return [str(Path(file).parent) for file in files if isinstance(file, str)]

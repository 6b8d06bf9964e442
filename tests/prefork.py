"""Fork the children of stages from a process that has imported PyTorch, Optimum and TensorRT.

    $ python -P -m tests.prefork SOCKET                   the server, one for each test process
    $ python -I -S tests/prefork.py SOCKET MODULE …       in place of `python -P -m MODULE …`

Hundreds of tests export a tiny model, or build its engine, in a child process, which spends nine
tenths of its time on imports. The second command hands its arguments, environment, directory and
descriptors to the server, which forks: the forked process runs the module as `__main__`. The
command ends as that process ends, with its status or by the same signal; if the command is killed,
the server kills that process.

Linux only. `pytest --prefork` turns it on, which `make test` does; `make test-all` starts every
child anew. `benchmarks/model_types.py` uses it, too.
"""

import array
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path

# Others are imported where they are needed: the second command runs for every child.

MODULES = (
    "benchmarks.model_types",
    "enginery.export.worker",
    "enginery.optimize.worker",
    "enginery.runtime.tensorrt.worker",
    "enginery.runtime.pytorch.worker",
    "tests.faults.child",
)
"""The modules of such children."""

_PRELOADED = (
    "transformers.models.auto.modeling_auto",
    "enginery.export.native.export",
    "enginery.export.graphs",
    "enginery.runtime.pytorch.runner",
    "enginery.runtime.tensorrt.worker",
    "tests.faults.file_operations",
)
_OF_ONE_FAMILY = (
    "optimum.exporters.onnx",
    "enginery.export.optimum",
    "transformers.exporters",
    "tensorrt_rtx_bindings",
)
"""Modules that not every environment has."""


@contextmanager
def forked_children(path: Path):
    """Have this process fork its children from a server at this path.

    The server starts with the first of these children, because few tests have any. Children that
    are started until it is there import PyTorch themselves.
    """
    from subprocess import Popen

    from enginery.core.subprocess import python_command

    paths = filter(None, [os.environ.get("PYTHONPATH"), str(Path(__file__).parents[1])])
    # Taken now, since a test may have changed them when the server starts.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command, directory = python_command("tests.prefork", str(path)), Path.cwd()
    servers: list[Popen] = []

    def start() -> None:
        if not servers:
            servers.append(Popen(command, env=environment, cwd=directory))

    try:
        with children_of(path, start=start):
            yield
        assert all(server.poll() is None for server in servers), "the server that forks has ended"
    finally:
        for server in servers:
            server.kill()
            server.wait()


@contextmanager
def children_of(path: Path, *, start: Callable[[], None] = lambda: None):
    """Have this process fork its children from a server.

    Args:
        path: the server's socket, which may exist later.
        start: called before each child, to start the server.
    """
    from unittest import mock

    from enginery.core import subprocess as children

    started = children.python_command

    def command(module: str, *arguments: str) -> list[str]:
        if module in MODULES:
            start()
        if module not in MODULES or not path.exists():
            return started(module, *arguments)
        return [sys.executable, "-I", "-S", __file__, str(path), module, *arguments]

    with mock.patch.object(children, "python_command", command):
        yield


def serve(path: str) -> None:
    """Fork a process for each connection, until the process that started this one ends."""
    import gc
    import importlib
    import selectors

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for name in _PRELOADED:
        importlib.import_module(name)
    for name in _OF_ONE_FAMILY:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()
    selector = selectors.DefaultSelector()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path + ".new")
    listener.listen()
    Path(path + ".new").rename(path)
    parent = os.pidfd_open(os.getppid())
    selector.register(parent, selectors.EVENT_READ)
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is parent:
                return
            if key.fileobj is listener:
                connection, _ = listener.accept()
                pid = _fork(connection, listener, selector)
                child = os.pidfd_open(pid)
                selector.register(child, selectors.EVENT_READ, (pid, child, connection))
                selector.register(connection, selectors.EVENT_READ, (pid, child, connection))
            elif key.data[1] in selector.get_map():
                pid, child, connection = key.data
                if key.fileobj is connection:
                    os.kill(pid, signal.SIGKILL)  # the command was killed
                _, status = os.waitpid(pid, 0)
                selector.unregister(child)
                selector.unregister(connection)
                os.close(child)
                with suppress(BrokenPipeError):
                    connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
                connection.close()


def _fork(connection: socket.socket, listener: socket.socket, selector) -> int:
    descriptors = array.array("i")
    size = int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "little")
    data, ancillary, *_ = connection.recvmsg(1, socket.CMSG_LEN(64 * descriptors.itemsize))
    descriptors.frombytes(ancillary[0][2])
    while len(data) < size:
        data += connection.recv(size - len(data))
    request = json.loads(data)
    pid = os.fork()
    if pid:
        for descriptor in descriptors:
            os.close(descriptor)
        return pid
    selector.close()
    listener.close()
    connection.close()
    _run(request, descriptors)
    raise AssertionError("not reached")


def _run(request: dict, descriptors) -> None:
    """Become the module: with the command's descriptors, under the same numbers."""
    import io
    import runpy

    # Numbers of the received descriptors may be those that others should have: move them away.
    moved = [os.dup(descriptor) for descriptor in descriptors]
    high = max([*moved, *request["descriptors"]]) + 1
    moved = [_dup_above(descriptor, high) for descriptor in moved]
    for descriptor, number in zip(moved, request["descriptors"], strict=True):
        os.dup2(descriptor, number, inheritable=number <= 2)
        os.close(descriptor)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [entry for entry in paths if entry and entry not in sys.path]
    sys.argv = [request["module"], *request["arguments"]]
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), "utf-8")
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "wb", closefd=False), "utf-8", write_through=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "wb", closefd=False), "utf-8", write_through=True)
    status = 1
    try:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(bool(error.code))
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _dup_above(descriptor: int, least: int) -> int:
    import fcntl

    return fcntl.fcntl(descriptor, fcntl.F_DUPFD, least)


def attach(path: str, module: str, *arguments: str) -> None:
    """Have the server fork, and end as the forked process ends."""
    listed = [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
    descriptors = sorted(number for number in listed if _is_open(number))
    request = {
        "module": module,
        "arguments": arguments,
        "directory": str(Path.cwd()),
        "environment": dict(os.environ),
        "descriptors": descriptors,
    }
    data = json.dumps(request).encode()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    connection.sendall(len(data).to_bytes(4, "little"))
    rights = array.array("i", descriptors)
    sent = connection.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    connection.sendall(data[sent:])
    for descriptor in descriptors:
        os.close(descriptor)
    status = int(connection.recv(16) or b"1")
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:  # that of the listing itself
        return False
    return True


if __name__ == "__main__":
    if __package__:
        serve(sys.argv[1])
    else:
        attach(*sys.argv[1:])

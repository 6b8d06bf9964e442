"""uvicorn's worker processes: their options, their parent, and what they say.

    options = uvicorn_config(make_application, config, log_config=log_config())
    status = run(options, bind("127.0.0.1", 8000), config)

The parent holds the listening sockets, so that connections wait while a dead worker is replaced. It
imports nothing heavy: no onnxruntime, no numpy and no event loop is in it. On Linux workers are
forked: they share its memory, and start without importing everything again.
"""

from __future__ import annotations

import functools
import gc
import json
import logging
import mmap
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import uvicorn
from uvicorn.supervisors.multiprocess import SIGNALS, Multiprocess, Process

from enginery.core.errors import printable
from enginery.serve.config import ServeConfig, check_options, named_paths, require_packages
from enginery.serve.http_sockets import bind, urls
from enginery.serve.keys import ApiKeys
from enginery.serve.lifecycle import (
    CLOSE_SECONDS,
    INTERRUPTED,
    REPLACE,
    STARTUP_FAILURE,
    ProcessLifecycle,
)

if TYPE_CHECKING:
    from starlette.applications import Starlette

CANNOT_START = 2
HEALTHY_SECONDS = 60.0
"""A worker that lived for so long was well: the next one starts at once again."""
MAX_RESTART_DELAY_SECONDS = 30.0
HANG_SECONDS = 300.0
"""A worker that does not answer its parent for so long is killed. A provider's code may hold the
interpreter for minutes while it builds or loads an engine."""
_KILL_AFTER_SECONDS = CLOSE_SECONDS + 10.0
"""Beyond `drain_delay` and `grace`, until a worker that does not end is killed."""
_OPEN_FILES = 16_384
"""What the limit of open files is raised to, where the system allows it: each connection is one."""
# On macOS the system's own libraries are not safe to use after a fork.
_START_METHOD = "fork" if sys.platform == "linux" else "spawn"

_log = logging.getLogger("enginery.serve")


def serve_models(
    artifacts: Sequence[str | Path],
    config: ServeConfig,
    *,
    as_json: bool = False,
    quiet: bool = False,
) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status, as `run` gives it.

    Args:
        artifacts: directories, each `path` or `name=path`; the name of a bare path is its last
            part.
        config: where to listen, how to batch, what to refuse.
        as_json: what is said on standard error is a JSON document a line.
        quiet: errors alone are said.

    Raises:
        OptionError: an option does not fit, or two artifacts have one name.
        ProviderError: no execution provider has a name that is asked for.
        ArtifactError: a directory is not an artifact.
        MissingPackageError: a package of the extra `serve` is not installed.
        EngineryError: the address cannot be listened on.
    """
    check_options(config)
    require_packages()
    paths = named_paths(artifacts)
    from enginery.runtime.provider_wish import parse_wishes
    from enginery.serve.observability.tracing import trace_endpoint

    # These are checked before anything starts; whether a provider can be had is for the worker to
    # see, which imports it.
    ApiKeys.from_config(config, os.environ)
    parse_wishes(config.provider, config.provider_option, default="cpu")
    trace_endpoint(os.environ)
    sockets = bind(config.host, config.port)
    options = uvicorn_config(
        functools.partial(worker_application, paths, config),
        config,
        log_config=log_config(as_json=as_json, quiet=quiet),
    )
    return run(options, sockets, config)


def worker_application(
    paths: Mapping[str, Path], config: ServeConfig, lifecycle: ProcessLifecycle
) -> Starlette:
    """Return the application of a worker process; its lifespan loads the models."""
    # Modules are no garbage, and until the models are loaded there is little else to look through.
    # `app.load` turns it on.
    gc.disable()
    # pydantic reads the metadata of all installed packages for plugins, which we have none of.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    from enginery.serve.app import make_app

    return make_app(paths, config, lifecycle)


def run(
    server_config: uvicorn.Config, sockets: Sequence[socket.socket], config: ServeConfig
) -> int:
    """Run an application in `config.processes` worker processes.

    Without `config.restart` it runs in this process, and ends it.

    Args:
        server_config: its `app` is a factory, called in the worker with its ProcessLifecycle.
        sockets: listening ones, from `http_sockets.bind`.
        config: `restart`, `grace` and `drain_delay`.

    Returns:
        0 after SIGTERM or SIGINT, 130 after a second SIGINT, 2 where the application cannot start,
        128 and the signal where a worker had to be killed at the end.
    """
    _allow_open_files()
    addresses = ", ".join(urls(sockets))
    if not config.restart or not hasattr(os, "fork"):
        server = uvicorn.Server(server_config)
        lifecycle = ProcessLifecycle(
            server, sockets, config, supervised=False, startup_status=CANNOT_START
        )
        _log.info("listening on %s", addresses)
        _run_worker(server, lifecycle)
    supervisor = Supervisor(server_config, list(sockets), config)
    _log.info("listening on %s", addresses)
    with _shared_metrics(config.processes):
        return supervisor.serve()


def uvicorn_config(
    application: Callable[[ProcessLifecycle], Any],
    config: ServeConfig,
    *,
    log_config: dict[str, Any] | None = None,
) -> uvicorn.Config:
    """Return uvicorn's options for ours; logging is configured with it."""
    return uvicorn.Config(
        application,
        factory=True,
        workers=config.processes,
        lifespan="on",
        http="httptools",
        ws="none",
        log_config=log_config,
        access_log=False,
        server_header=False,
        timeout_keep_alive=config.idle_timeout,  # type: ignore[arg-type]  # any number will do
        timeout_worker_healthcheck=HANG_SECONDS,  # type: ignore[arg-type]
    )


def _run_worker(server: uvicorn.Server, lifecycle: ProcessLifecycle) -> NoReturn:
    make_application: Any = server.config.app
    server.config.app = functools.partial(make_application, lifecycle)
    lifecycle.run()


class Worker(Process):
    """A process that serves, as its parent sees it; `target` runs in the process itself."""

    def __init__(
        self,
        server_config: uvicorn.Config,
        sockets: list[socket.socket],
        config: ServeConfig,
        ending: mmap.mmap | None,
        *,
        failures: int = -1,
    ) -> None:
        """Start nothing yet.

        Args:
            server_config: of uvicorn.
            sockets: listening ones.
            config: the options of the server.
            ending: a byte that the parent shares, 1 once the server ends; None with `spawn`.
            failures: how many of its predecessors in a row died young; -1 for one without any.
        """
        super().__init__(server_config, sockets)
        self.failures = failures
        self._config, self._sockets, self._shutdown_flag = config, sockets, ending
        self._started_at = 0.0
        self._pinged_at: float | None = None
        # uvicorn's own is spawned: the parent's and each worker's modules would be there twice, and
        # a process that tracks what they share beside them.
        context: Any = multiprocessing.get_context(_START_METHOD)
        self.process = context.Process(target=self.target, args=(sockets,))

    def start(self) -> None:
        """Start the process, with the signals that it is to handle blocked until it does."""
        handled = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
        gc.freeze()  # else the worker's collector would touch, and so copy, every page of ours
        signal.pthread_sigmask(signal.SIG_BLOCK, handled)
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
        self._started_at = time.monotonic()

    def target(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until the process ends."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        # In a group of its own, or Ctrl-C would count twice: from the terminal, and handed on.
        os.setpgid(0, 0)
        from enginery.core.child import end_when_closed

        if parent := multiprocessing.parent_process():
            end_when_closed(parent.sentinel)
        self.config.configure_logging()
        threading.Thread(target=self.always_pong, daemon=True).start()
        # A worker that replaces one which served is tried again where it cannot start.
        status = STARTUP_FAILURE if self.failures < 0 else CANNOT_START
        lifecycle = ProcessLifecycle(
            self.server, sockets or [], self._config, supervised=True, startup_status=status,
            server_ends=lambda: self._shutdown_flag is not None and self._shutdown_flag[0] == 1,
        )  # fmt: skip
        _run_worker(self.server, lifecycle)

    def is_alive(self, timeout: float = HANG_SECONDS) -> bool:
        """Whether the process runs and has answered within `timeout`; waits for nothing."""
        if not self.process.is_alive():
            return False
        try:
            if self._pinged_at is None:
                self.parent_conn.send(b"ping")
                self._pinged_at = time.monotonic()
            elif self.parent_conn.poll():
                self.parent_conn.recv()
                self._pinged_at = None
        except (OSError, EOFError):  # it has just ended
            return False
        return self._pinged_at is None or time.monotonic() - self._pinged_at < timeout

    def send(self, number: int) -> None:
        """Send the process a signal, if it runs."""
        if self.process.is_alive() and self.pid:
            os.kill(self.pid, number)

    def replacement(self) -> Worker:
        """Return the worker that takes the place of this one, which has died."""
        lived = time.monotonic() - self._started_at
        again = self.failures >= 0 and lived < HEALTHY_SECONDS
        failures = self.failures + 1 if again else 0
        return Worker(
            self.config, self._sockets, self._config, self._shutdown_flag, failures=failures
        )


class Supervisor(Multiprocess):
    """The small parent: it starts workers, replaces those that die, and hands signals on."""

    def __init__(
        self, server_config: uvicorn.Config, sockets: list[socket.socket], config: ServeConfig
    ) -> None:
        super().__init__(server_config, sockets)
        self._config = config
        self._interrupted = False
        self._shutdown_flag = mmap.mmap(-1, 1) if _START_METHOD == "fork" else None
        self._restarts: dict[int, tuple[float, Worker]] = {}
        self.processes: list[Worker] = []  # type: ignore[assignment]
        for number in set(SIGNALS) - {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}:
            signal.signal(number, signal.SIG_DFL)

    def serve(self) -> int:
        """Run until the end; return the exit status."""
        self.run()
        # One that waits to be replaced has ended before; why does not matter any more.
        statuses = [
            process.exitcode or 0
            for index, process in enumerate(self.processes)
            if index not in self._restarts
        ]
        if STARTUP_FAILURE in statuses:
            return CANNOT_START
        if self._interrupted and INTERRUPTED in statuses:
            return INTERRUPTED
        status = next(filter(None, statuses), 0)
        return status if status >= 0 else 128 - status

    def init_processes(self) -> None:
        """Start the workers."""
        for _ in range(self.processes_num):
            self.processes.append(
                Worker(self.config, self.sockets, self._config, self._shutdown_flag)
            )
            self.processes[-1].start()

    def keep_subprocess_alive(self) -> None:
        """Replace workers that have died or hang; stop where the first ones cannot start."""
        for index, process in enumerate(self.processes):
            if index in self._restarts:
                due, new = self._restarts[index]
                if time.monotonic() >= due:
                    del self._restarts[index]
                    new.start()
                    self.processes[index] = new
                continue
            if process.is_alive(self.config.timeout_worker_healthcheck):
                continue
            hangs = process.process.is_alive()
            process.kill()
            process.join()
            if process.exitcode == STARTUP_FAILURE:
                self.should_exit.set()
                return
            new = process.replacement()
            pause = restart_delay_seconds(new.failures)
            _log.warning(
                "worker process %s %s; another one is started %s.",
                process.pid,
                f"did not answer for {HANG_SECONDS:g} seconds"
                if hangs
                else describe_exit(process.exitcode or 0),
                f"in {pause:g} seconds" if pause else "at once",
            )
            self._restarts[index] = (time.monotonic() + pause, new)

    def terminate_all(self) -> None:
        """Begin the end: from here on the workers alone decide for how long they listen."""
        for each in self.sockets:
            each.close()
        if self._shutdown_flag is not None:
            self._shutdown_flag[0] = 1
        super().terminate_all()

    def join_all(self) -> None:
        """Wait for the workers; those that do not end in time are killed."""
        until = (
            time.monotonic() + self._config.drain_delay + self._config.grace + _KILL_AFTER_SECONDS
        )
        while alive := [process for process in self.processes if process.process.is_alive()]:
            self.handle_signals()
            if (
                self._interrupted
            ):  # each time: to a worker that has not heard of the first, it is one
                self._forward(signal.SIGINT)
            if time.monotonic() >= until:
                for process in alive:
                    _log.error("worker process %s does not end; it is killed.", process.pid)
                    process.process.kill()
                until = float("inf")
            connection.wait([process.process.sentinel for process in alive], 0.1)
        super().join_all()

    def handle_int(self) -> None:
        """End the server; the second time without waiting for what runs."""
        self._interrupted = self.should_exit.is_set()
        self.should_exit.set()

    def handle_hup(self) -> None:
        """Have each worker reload its models in place."""
        self._forward(signal.SIGHUP)

    def _forward(self, number: int) -> None:
        for process in self.processes:
            process.send(number)


def restart_delay_seconds(failures: int) -> float:
    """Return how long to wait after so many failures in a row: 0, 0.5, 1, 2 … 30 seconds."""
    return min(MAX_RESTART_DELAY_SECONDS, 2.0 ** (failures - 2)) if failures > 0 else 0.0


def describe_exit(status: int) -> str:
    """Return in words how a worker ended, from its exit code."""
    if status == REPLACE:
        return "ended itself, because it was stuck"
    from enginery.core import child  # brings modules that a parent seldom needs

    return child.how_it_ended(status)


def log_config(*, as_json: bool = False, quiet: bool = False) -> dict[str, Any]:
    """Return what the server writes to standard error, for `logging.config.dictConfig`."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"()": LineFormatter, "as_json": as_json}},
        "handlers": {
            "stderr": {
                "class": "logging.StreamHandler",
                "formatter": "line",
                "level": "ERROR" if quiet else "NOTSET",
            }
        },
        "loggers": {
            "enginery": {"level": "INFO"},
            # Set on the logger itself: uvicorn looks at `level`, and would trace where it is unset.
            "uvicorn.error": {"level": "WARNING"},
        },
        "root": {"level": "WARNING", "handlers": ["stderr"]},
    }


class LineFormatter(logging.Formatter):
    """A line for each record: `draining`, `error: …`, or a JSON document with its time."""

    _prefixes = ((logging.ERROR, "error: "), (logging.WARNING, "warning: "))

    def __init__(self, *, as_json: bool = False) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, a traceback included, without control characters."""
        prefix = next((text for level, text in self._prefixes if record.levelno >= level), "")
        line = prefix + super().format(record)
        if not self._as_json:
            return printable(line)
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        return json.dumps({"time": at, "message": line}).replace("\x7f", "\\u007f")


@contextmanager
def _shared_metrics(processes: int) -> Iterator[None]:
    """Give several workers a directory in which prometheus_client adds their counts up."""
    if processes == 1:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="enginery-metrics-") as directory:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = directory
        try:
            yield
        finally:
            del os.environ["PROMETHEUS_MULTIPROC_DIR"]


def _allow_open_files() -> None:
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))

"""Run uvicorn's worker processes: configuration, supervisor and logging.

    options = uvicorn_config(make_application, config, log_config=log_config())
    status = run(options, bind("127.0.0.1", 8000), config)

The parent process holds the listening sockets, so that connections wait while a dead worker is
replaced. It is small: it imports neither onnxruntime nor numpy and has no event loop. On Linux
workers are forked, so they share its memory and do not import everything again.
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
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import uvicorn
from uvicorn.supervisors.multiprocess import SIGNALS, Multiprocess, Process

from enginery.core.errors import EngineryError, OptionError, printable
from enginery.core.temporary import temporary_directory
from enginery.serve.config import (
    ServeConfig,
    check_options,
    generates,
    gpu_ids,
    named_paths,
    require_packages,
)
from enginery.serve.http.lifecycle import (
    CLOSE_SECONDS,
    INTERRUPTED,
    REPLACE,
    STARTUP_FAILURE,
    ProcessLifecycle,
    Supervision,
)
from enginery.serve.http.sockets import bind_each, close, urls
from enginery.serve.keys import ApiKeys
from enginery.serve.observability.line_writer import MessageHandler, RepeatFilter

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from enginery.runtime.providers.specification import ProviderSpec

CANNOT_START = 2
"""Exit status of the server if it cannot start."""
HEALTHY_SECONDS = 60.0
"""Uptime after which the failure of a worker no longer delays its replacement."""
MAX_RESTART_DELAY_SECONDS = 30.0
HANG_SECONDS = 300.0
"""Time without an answer to the parent's ping after which a worker is killed. A provider's code may
hold the GIL for minutes while it builds or loads an engine."""
_KILL_AFTER_SECONDS = CLOSE_SECONDS + 10.0
"""Time beyond `drain_delay` and `grace` after which a worker that does not exit is killed."""
_MAX_SOCKET_PATH = 103
"""Longest path of a Unix socket, of macOS; Linux allows 107 bytes."""
_OPEN_FILES = 16_384
"""Target for the limit of open files, if the system allows it: each connection is an open file."""
# On macOS system libraries are not safe to use after a fork.
_START_METHOD = "fork" if sys.platform == "linux" else "spawn"

_log = logging.getLogger("enginery.serve")


def serve_models(
    artifacts: Sequence[str | Path],
    config: ServeConfig,
    *,
    as_json: bool = False,
    quiet: bool = False,
) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status, see `run`.

    Args:
        artifacts: directories, each `path` or `name=path`; without a name, the last part of the
            path is the name.
        config: the options of the server.
        as_json: log one JSON document per line.
        quiet: log only errors.

    Raises:
        OptionError: an option is invalid, or two artifacts have the same name.
        ProviderError: an execution provider of that name does not exist.
        ArtifactError: a directory is not an artifact.
        MissingPackageError: a package of the extra `serve` is not installed.
        EngineryError: the server cannot listen on the address.
    """
    check_options(config)
    paths = named_paths(artifacts)
    require_packages(paths.values())
    from enginery.runtime.providers.specification import parse_providers
    from enginery.serve.observability.tracing import trace_endpoint

    # Check these before anything starts. Whether a provider is available is checked by the worker,
    # which imports onnxruntime.
    ApiKeys.from_config(config, os.environ)
    providers = parse_providers(config.providers, config.provider_option, default="cpu")
    trace_endpoint(os.environ)
    devices = plan_devices(config, providers, paths)
    if devices:
        config = replace(config, fronts=config.fronts or default_fronts(), processes=0)
    sockets = bind_each(config.host, config.port, config.fronts if devices else 1)
    with _device_sockets(len(devices)) as device_sockets:
        options = uvicorn_config(
            functools.partial(worker_application, paths, config, device_sockets),
            config,
            log_config=log_config(as_json=as_json, quiet=quiet),
        )
        runs = [
            functools.partial(
                run_device_process,
                paths,
                replace(config, provider_option=(*config.provider_option, *device)),
                socket,
            )
            for device, socket in zip(devices, device_sockets, strict=True)
        ]
        return run(options, sockets, config, devices=runs)


def plan_devices(
    config: ServeConfig, providers: Sequence[ProviderSpec], paths: Mapping[str, Path]
) -> list[tuple[str, ...]]:
    """Return the provider options of each device process; an empty list for none.

    Models that generate texts are run by the process that answers.

    Raises:
        OptionError: fronts or GPUs are named that cannot be used.
    """
    from enginery.runtime.providers.known import NVIDIA

    on_nvidia = [spec.name for spec in providers if spec.full_name in NVIDIA]
    on_gpu = providers[0].name in on_nvidia
    if config.gpus and not on_gpu:
        raise OptionError(
            f"option 'gpus' is {config.gpus!r}, but the provider is {providers[0].name}.",
            do="Remove --gpus, or set --providers cuda.",
        )
    generating = [name for name, path in paths.items() if generates(path)]
    if generating and (config.fronts or config.gpus):
        raise OptionError(
            f"option '{'fronts' if config.fronts else 'gpus'}' is set, but {generating[0]} "
            "generates texts, which fronts do not serve.",
            do="Serve it from a server of its own, without the option.",
        )
    if not hasattr(os, "fork"):  # the server is one process
        if config.fronts or config.gpus:
            raise OptionError(
                f"option '{'fronts' if config.fronts else 'gpus'}' is set, but a server on this "
                "operating system is one process.",
                do="Remove it; --provider-option cuda.device_id=N chooses a GPU.",
            )
        return []
    if config.processes or generating or not (config.fronts or (on_gpu and config.restart)):
        return []
    ids = gpu_ids(config)
    if not ids:
        return [()]
    return [tuple(f"{name}.device_id={number}" for name in on_nvidia) for number in ids]


def default_fronts() -> int:
    """Return the number of fronts for this machine: 9 of 16 cores.

    The rest is for the device processes, their drivers and, on the same machine, for clients.
    """
    from enginery.runtime.machine import usable_cpus

    return max(1, usable_cpus() * 9 // 16)


@contextmanager
def _device_sockets(count: int) -> Iterator[list[Path]]:
    """Yield the path of a Unix socket for each device process, in a directory of this user."""
    if not count:
        yield []
        return
    with temporary_directory("serve") as directory:
        paths = [directory / f"device-{number}" for number in range(count)]
        if len(os.fsencode(paths[-1])) > _MAX_SOCKET_PATH:
            raise EngineryError(
                f"the path of a socket would be too long: {paths[-1]}, expected at most "
                f"{_MAX_SOCKET_PATH} bytes.",
                do="Set TMPDIR to a directory with a shorter path.",
            )
        yield paths


def run_device_process(
    paths: Mapping[str, Path], config: ServeConfig, socket_path: Path, **options: Any
) -> NoReturn:
    """Run the models for the fronts, in a device process, until it exits."""
    gc.disable()
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    from enginery.serve.device.process import DeviceProcess

    loop_factory = options.pop("loop_factory")
    DeviceProcess(paths, config, socket_path, fronts=config.fronts, **options).run(loop_factory)


def worker_application(
    paths: Mapping[str, Path],
    config: ServeConfig,
    devices: Sequence[Path],
    lifecycle: ProcessLifecycle,
) -> Starlette:
    """Return the application of a worker process or front; its lifespan loads the models."""
    # Until the models are loaded, a garbage collection would find only modules. `app.load` enables
    # it again.
    gc.disable()
    # pydantic would read the metadata of all installed packages to find plugins; we use none.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    from enginery.serve.app import make_app

    return make_app(paths, config, lifecycle, devices=devices)


def run(
    server_config: uvicorn.Config,
    sockets: Sequence[list[socket.socket]],
    config: ServeConfig,
    *,
    devices: Sequence[Callable[..., NoReturn]] = (),
) -> int:
    """Run an application in `config.processes` worker processes, or in fronts.

    Without `config.restart`, run it in this process, which then exits with the server.

    Args:
        server_config: uvicorn's options; `app` is a factory, called with the ProcessLifecycle.
        sockets: listening sockets from `sockets.bind_each`, of each front; without fronts of
            all processes.
        config: the options of the server.
        devices: runs a device process each; then the application runs in `config.fronts` fronts.

    Returns:
        0 after SIGTERM or SIGINT, 130 after a second SIGINT, 2 if the application cannot start,
        128 plus the signal's number if a worker had to be killed.
    """
    _raise_open_files_limit()
    addresses = ", ".join(urls(sockets[0]))
    if not config.restart or not hasattr(os, "fork"):
        server = uvicorn.Server(server_config)
        lifecycle = ProcessLifecycle(
            server,
            sockets[0],
            config,
            Supervision(supervised=False, startup_status=CANNOT_START),
        )
        _log.info("listening on %s", addresses)
        _run_worker(server, lifecycle)
    supervisor = Supervisor(server_config, sockets, config, devices)
    _log.info("listening on %s", addresses)
    with _shared_metrics(server_config.workers + len(devices)):
        return supervisor.serve()


def uvicorn_config(
    application: Callable[[ProcessLifecycle], Any],
    config: ServeConfig,
    *,
    log_config: dict[str, Any] | None = None,
) -> uvicorn.Config:
    """Convert the options of the server to uvicorn's; this also configures logging."""
    return uvicorn.Config(
        application,
        factory=True,
        workers=config.fronts or config.processes or 1,
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
    # Imported here, since the parent does without httptools.
    from enginery.serve.http.protocol import LimitedProtocol

    server.config.http = LimitedProtocol
    make_application: Any = server.config.app
    server.config.app = functools.partial(make_application, lifecycle)
    lifecycle.run()


class Worker(Process):
    """A worker process, seen from its parent; only `target` runs in the process itself."""

    def __init__(
        self,
        server_config: uvicorn.Config,
        sockets: list[socket.socket],
        config: ServeConfig,
        ending: mmap.mmap | None,
        *,
        others: Sequence[socket.socket] = (),
        is_first: bool = True,
    ) -> None:
        """Create the process without starting it.

        Args:
            server_config: uvicorn's options.
            sockets: the listening sockets.
            config: the options of the server.
            others: listening sockets of other processes, which this one closes.
            is_first: the process answers health routes while the models of all load.
            ending: two bytes in memory shared with the parent, 1 once the server shuts down and
                once the first process has loaded its models; None with `spawn`.
        """
        super().__init__(server_config, sockets)
        self.failures = -1
        """Number of consecutive predecessors that died within `HEALTHY_SECONDS`; -1 for a first
        worker."""
        self._config, self._sockets, self._shutdown_flag = config, sockets, ending
        self._others, self._is_first = others, is_first
        self._started_at = 0.0
        self._pinged_at: float | None = None
        # uvicorn spawns its processes. Forked ones share the parent's modules and need no resource
        # tracker process.
        context: Any = multiprocessing.get_context(_START_METHOD)
        self.process = context.Process(target=self.target, args=(sockets,))

    def start(self) -> None:
        """Start the process, with SIGTERM, SIGINT and SIGHUP blocked until it can handle them."""
        handled = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
        gc.freeze()  # else the worker's garbage collector would write to, and copy, shared pages
        signal.pthread_sigmask(signal.SIG_BLOCK, handled)
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
        self._started_at = time.monotonic()

    def target(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until the process exits."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        close(self._others)
        # In its own process group: otherwise Ctrl-C would arrive twice, from the terminal and from
        # the parent.
        os.setpgid(0, 0)
        from enginery.core.subprocess import exit_when_closed

        if parent := multiprocessing.parent_process():
            exit_when_closed(parent.sentinel)
        self.config.configure_logging()
        threading.Thread(target=self.always_pong, daemon=True).start()
        # If a replacement cannot start, the parent tries again.
        self._serve(sockets or [], STARTUP_FAILURE if self.failures < 0 else CANNOT_START)

    def _serve(self, sockets: list[socket.socket], startup_status: int) -> NoReturn:
        lifecycle = ProcessLifecycle(
            self.server,
            sockets,
            self._config,
            Supervision(
                supervised=True,
                startup_status=startup_status,
                # Until the first process is ready it answers 503, and so would the server to some
                # requests if others were ready before it.
                loads_first=self._config.processes > 1
                and not (self._is_first and self.failures < 0),
                may_listen=self._first_is_ready,
                on_loaded=self._report_loaded,
                server_ends=self._server_ends,
            ),
        )
        _run_worker(self.server, lifecycle)

    def _first_is_ready(self) -> bool:
        """Return True if the first process has loaded its models, or is this one."""
        return self._is_first or self._shutdown_flag is None or self._shutdown_flag[1] == 1

    def _report_loaded(self) -> None:
        if self._is_first and self._shutdown_flag is not None:
            self._shutdown_flag[1] = 1

    def _server_ends(self) -> bool:
        """Return True if the whole server shuts down."""
        return self._shutdown_flag is not None and self._shutdown_flag[0] == 1

    def is_alive(self, timeout: float = HANG_SECONDS) -> bool:
        """Return True if the process runs and answered the last ping in `timeout`; do not block."""
        if not self.process.is_alive():
            return False
        try:
            if self._pinged_at is None:
                self.parent_conn.send(b"ping")
                self._pinged_at = time.monotonic()
            elif self.parent_conn.poll():
                self.parent_conn.recv()
                self._pinged_at = None
        except (OSError, EOFError):  # the process has just exited
            return False
        return self._pinged_at is None or time.monotonic() - self._pinged_at < timeout

    def send(self, number: int) -> None:
        """Send a signal to the process if it runs."""
        if self.process.is_alive() and self.pid:
            os.kill(self.pid, number)

    def replacement(self) -> Worker:
        """Return a worker to replace this one, which has died."""
        lived = time.monotonic() - self._started_at
        again = self.failures >= 0 and lived < HEALTHY_SECONDS
        worker = self._again()
        worker.failures = self.failures + 1 if again else 0
        return worker

    def _again(self) -> Worker:
        """Return another process of this kind."""
        return Worker(
            self.config,
            self._sockets,
            self._config,
            self._shutdown_flag,
            others=self._others,
            is_first=self._is_first,
        )


class DeviceWorker(Worker):
    """A device process, seen from its parent; only `_serve` runs in the process itself."""

    def __init__(
        self,
        run_process: Callable[..., NoReturn],
        server_config: uvicorn.Config,
        config: ServeConfig,
        ending: mmap.mmap | None,
        *,
        others: Sequence[socket.socket],
    ) -> None:
        """Create the process without starting it; see `Worker`.

        Args:
            run_process: runs the device process.
            server_config: uvicorn's options, of which logging and the kind of event loop are used.
            config: the options of the server.
            ending: see `Worker`.
            others: the listening sockets of the fronts, which this process closes.
        """
        super().__init__(server_config, [], config, ending, others=others)
        self._run_process = run_process

    def _serve(self, _sockets: list[socket.socket], startup_status: int) -> NoReturn:
        self._run_process(
            loop_factory=self.config.get_loop_factory(),
            startup_status=startup_status,
            server_ends=self._server_ends,
        )

    def _server_ends(self) -> bool:
        """Return True if the whole server shuts down, or may do so: then the fronts end first."""
        return self._shutdown_flag is None or super()._server_ends()

    def _again(self) -> Worker:
        return DeviceWorker(
            self._run_process,
            self.config,
            self._config,
            self._shutdown_flag,
            others=self._others,
        )


class Supervisor(Multiprocess):
    """The parent process: starts workers, replaces those that die, and forwards signals."""

    def __init__(
        self,
        server_config: uvicorn.Config,
        sockets: Sequence[list[socket.socket]],
        config: ServeConfig,
        devices: Sequence[Callable[..., NoReturn]] = (),
    ) -> None:
        listening = list(
            dict.fromkeys(listener for process_sockets in sockets for listener in process_sockets)
        )
        super().__init__(server_config, listening)
        self._config, self._devices, self._own_sockets = config, devices, sockets
        self._interrupted = False
        self._shutdown_flag = mmap.mmap(-1, 2) if _START_METHOD == "fork" else None
        self._restarts: dict[int, tuple[float, Worker]] = {}
        self.processes: list[Worker] = []  # type: ignore[assignment]
        for number in set(SIGNALS) - {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}:
            signal.signal(number, signal.SIG_DFL)

    def serve(self) -> int:
        """Run until shutdown; return the exit status."""
        self.run()
        # Skip workers that have died and are waiting to be replaced.
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
        """Start the device processes and the workers."""
        ending = self._shutdown_flag
        self.processes += [
            DeviceWorker(run_process, self.config, self._config, ending, others=self.sockets)
            for run_process in self._devices
        ]
        for index in range(self.processes_num):
            worker_sockets = self._own_sockets[index % len(self._own_sockets)]
            other_sockets = [
                listener for listener in self.sockets if listener not in worker_sockets
            ]
            worker = Worker(
                self.config,
                worker_sockets,
                self._config,
                ending,
                others=other_sockets,
                is_first=index == 0,
            )
            self.processes.append(worker)
        for process in self.processes:
            process.start()

    def keep_subprocess_alive(self) -> None:
        """Replace workers that have died or hang; stop if a first worker cannot start."""
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
                "worker process %s %s; it is replaced %s.",
                process.pid,
                f"did not answer for {HANG_SECONDS:g} seconds"
                if hangs
                else describe_exit(process.exitcode or 0),
                f"in {pause:g} seconds" if pause else "immediately",
            )
            self._restarts[index] = (time.monotonic() + pause, new)

    def terminate_all(self) -> None:
        """Start the shutdown; each worker closes its own copies of the sockets when it drains."""
        for listener in self.sockets:
            listener.close()
        if self._shutdown_flag is not None:
            self._shutdown_flag[0] = 1
        super().terminate_all()

    def join_all(self) -> None:
        """Wait for the workers to exit; kill those that do not exit in time."""
        until = (
            time.monotonic() + self._config.drain_delay + self._config.grace + _KILL_AFTER_SECONDS
        )
        while alive := [process for process in self.processes if process.process.is_alive()]:
            self.handle_signals()
            # Repeated, because a worker may have missed the first SIGINT.
            if self._interrupted:
                self._forward(signal.SIGINT)
            if time.monotonic() >= until:
                for process in alive:
                    process.process.kill()
                for process in alive:
                    _log.error("worker process %s did not exit in time; killing it.", process.pid)
                until = float("inf")
            connection.wait([process.process.sentinel for process in alive], 0.1)
        super().join_all()

    def handle_int(self) -> None:
        """Shut the server down; at the second call without waiting for running requests."""
        self._interrupted = self.should_exit.is_set()
        self.should_exit.set()

    def handle_hup(self) -> None:
        """Forward SIGHUP, so that the processes that run models reload them."""
        for process in self.processes[: len(self._devices) or None]:
            process.send(signal.SIGHUP)

    def _forward(self, number: int) -> None:
        for process in self.processes:
            process.send(number)


def restart_delay_seconds(failures: int) -> float:
    """Return the delay after a number of consecutive failures: 0, 0.5, 1, 2, 4, … 30 seconds.

    >>> [restart_delay_seconds(failures) for failures in (0, 1, 2, 3, 10)]
    [0.0, 0.5, 1.0, 2.0, 30.0]
    """
    return min(MAX_RESTART_DELAY_SECONDS, 2.0 ** (failures - 2)) if failures > 0 else 0.0


def describe_exit(status: int) -> str:
    """Describe how a worker ended, from its exit status."""
    if status == REPLACE:
        return "exited because it was stuck"
    # Imported here because it imports modules that the parent rarely needs.
    from enginery.core.subprocess import describe_exit

    return describe_exit(status)


def log_config(*, as_json: bool = False, quiet: bool = False) -> dict[str, Any]:
    """Return the configuration of the server's log, for `logging.config.dictConfig`."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"()": LineFormatter, "as_json": as_json}},
        "filters": {"repeats": {"()": RepeatFilter}},
        "handlers": {
            "stderr": {
                "()": MessageHandler,
                "formatter": "line",
                "level": "ERROR" if quiet else "NOTSET",
            }
        },
        "loggers": {
            "enginery": {"level": "INFO"},
            # Set on the logger itself: uvicorn reads `level`, and an unset one (0) enables tracing.
            "uvicorn.error": {"level": "WARNING", "filters": ["repeats"]},
        },
        "root": {"level": "WARNING", "handlers": ["stderr"]},
    }


class LineFormatter(logging.Formatter):
    """A formatter that writes one line per record: `draining`, `error: …`, or a JSON document."""

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
    """Create the directory in which prometheus_client adds up the counts of several workers."""
    if processes == 1:
        yield
        return
    with temporary_directory("metrics") as directory:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(directory)
        try:
            yield
        finally:
            del os.environ["PROMETHEUS_MULTIPROC_DIR"]


def _raise_open_files_limit() -> None:
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))

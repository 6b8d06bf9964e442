"""Start the server: check its options, listen, and run its processes; configure its log.

options = uvicorn_config(make_application, config, log_config=log_config())
status = run(options, [bind("127.0.0.1", 8000)], config)
"""

from __future__ import annotations

import functools
import gc
import json
import logging
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import uvicorn

from enginery.core.errors import EngineryError, OptionError, printable
from enginery.core.scratch import temporary_directory
from enginery.serve.config import (
    ServeConfig,
    check_options,
    generates,
    gpu_ids,
    named_paths,
    require_packages,
)
from enginery.serve.http.lifecycle import ProcessLifecycle, Supervision, block_signals
from enginery.serve.http.listener import Listener
from enginery.serve.http.parent import START_METHOD, Parent, ServerProcess
from enginery.serve.http.sockets import bind_each, urls
from enginery.serve.keys import ApiKeys
from enginery.serve.observability.line_writer import MessageHandler, RepeatFilter

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from enginery.runtime.providers.specification import ProviderSpec

_MAX_SOCKET_PATH = 103
"""Longest path of a Unix socket, of macOS; Linux allows 107 bytes."""
_OPEN_FILES = 16_384
"""Target for the limit of open files, if the system allows it: each connection is an open file."""

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
                path,
                options,
            )
            for device, path in zip(devices, device_sockets, strict=True)
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
    paths: Mapping[str, Path],
    config: ServeConfig,
    socket_path: Path,
    server_config: uvicorn.Config,
) -> NoReturn:
    """Run the models for the fronts, in a device process, until it exits."""
    gc.disable()
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    from enginery.serve.device.process import DeviceProcess

    DeviceProcess(paths, config, socket_path, fronts=config.fronts).run(
        server_config.get_loop_factory()
    )


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
    devices: Sequence[Callable[[], NoReturn]] = (),
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
        block_signals()
        _log.info("listening on %s", addresses)
        _run_worker(server_config, sockets[0], config, Supervision())
    flag = multiprocessing.get_context(START_METHOD).RawValue("b", 0)
    workers = []
    for index in range(config.fronts or config.processes or 1):
        listening = sockets[index % len(sockets)]
        supervision = Supervision(
            is_supervised=True,
            is_first=index == 0,
            first_is_loaded=flag if config.processes > 1 else None,
        )
        serve = functools.partial(_run_worker, server_config, listening, config, supervision)
        workers.append(ServerProcess(serve, listening))
    parent = Parent(
        workers, [ServerProcess(run) for run in devices], config, server_config.configure_logging
    )
    _log.info("listening on %s", addresses)
    with _shared_metrics(len(workers) + len(devices)):
        return parent.run()


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
        lifespan="on",
        http="httptools",
        ws="none",
        log_config=log_config,
        access_log=False,
        server_header=False,
        timeout_keep_alive=config.idle_timeout,  # type: ignore[arg-type]  # any number will do
    )


def _run_worker(
    server_config: uvicorn.Config,
    sockets: Sequence[socket.socket],
    config: ServeConfig,
    supervision: Supervision,
) -> NoReturn:
    # Imported here, since the parent does without httptools.
    from enginery.serve.http.protocol import LimitedProtocol

    server = uvicorn.Server(server_config)
    listener = Listener(server, sockets)
    lifecycle = ProcessLifecycle(server, listener, config, supervision)
    make_protocol: Any = functools.partial(LimitedProtocol, on_connection=listener.pause_if_full)
    make_application: Any = server_config.app
    server_config.http = make_protocol
    server_config.app = functools.partial(make_application, lifecycle)
    lifecycle.run()


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

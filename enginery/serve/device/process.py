"""A device process: it has the sessions of one GPU and runs the rows that fronts send.

The event loop's thread reads frames and sends outputs; the workers' threads run batches of whatever
waits when they are free. The process listens once its models are loaded and warmed up, so a front
that is connected can send rows. If the process ends, its fronts answer the requests in progress
with 503, and its parent starts another.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn, cast

from enginery.core.errors import EngineryError
from enginery.serve.batching.queue import QueueEntry
from enginery.serve.batching.scheduler import BatchResult, BatchScheduler
from enginery.serve.config import ServeConfig
from enginery.serve.device import wire
from enginery.serve.http.lifecycle import (
    CANNOT_START,
    CLOSE_SECONDS,
    INTERRUPTED,
    REPLACE,
    block_signals,
    exit_after,
    exit_process,
    log_errors,
    log_failed_startup,
)
from enginery.serve.models.loading import load, reload
from enginery.serve.models.registry import ModelRegistry
from enginery.serve.models.served_model import LocalModel, UnavailableError
from enginery.serve.observability.metrics import Metrics

_log = logging.getLogger("enginery.serve")

_SWITCH_SECONDS = 0.0001
"""Interval after which a thread that holds the GIL yields it to one that waits. With Python's 5 ms,
a worker whose batch is done could wait that long while frames are read."""
_OPEN_AFTER_SECONDS = 10.0
"""Time after which the server is open even if some of its fronts are not prepared."""
_PREPARE_SECONDS = 60.0
"""Maximum time that a replaced model waits for fronts to prepare its successor, in addition to the
time that they have to send the rest of their requests to it."""
_TICK_SECONDS = 0.02
_QUIET_TICKS = 5
"""Ticks without a row after which a process that ends alone has answered what was begun."""


@dataclass(slots=True, eq=False)
class RowGroup:
    """Rows that one front sent in one frame."""

    front: FrontConnection
    model: DeviceModel
    arrived: float
    """When they arrived, by `time.perf_counter`."""
    backlog_seconds: float
    """The backlog at that time; 0 if the rest of their request was admitted before."""
    left: int
    """Number of rows that have not run."""


class DeviceScheduler(BatchScheduler):
    """The queue and workers of a model, whose rows come from fronts."""

    def deliver(self, result: BatchResult) -> None:
        """Send the outputs of a batch to the fronts, in one frame for each."""
        done: dict[FrontConnection, tuple[list[int], list[Any]]] = {}
        try:
            for entry, output in zip(result.batch, result.outputs, strict=True):
                group: RowGroup = entry.request
                group.left -= 1
                if not group.left:
                    self.queue.observe_wait(group.backlog_seconds, result.started - group.arrived)
                if isinstance(output, BaseException):
                    self.fail_entry(entry, output)
                elif group.front.waiting.pop(entry.index, None) is not None:
                    numbers, outputs = done.setdefault(group.front, ([], []))
                    numbers.append(entry.index)
                    outputs.append(output)
            model = result.batch[0].request.model.number
            for front, (numbers, outputs) in done.items():
                try:
                    frame = wire.outputs_frame(
                        numbers,
                        outputs,
                        model=model,
                        started=result.started,
                        seconds=result.seconds,
                    )
                except Exception as error:  # a bug, which must not leave rows without an answer
                    _log.exception("the outputs of %d rows could not be sent", len(numbers))
                    frame = [wire.failed_frame(numbers, error, model=model)]
                front.send(frame)
        finally:
            self._loop.call_soon(self._report_batch, result)

    def fail_entry(self, entry: QueueEntry, error: BaseException) -> None:
        """Tell the front why a row has no output."""
        group: RowGroup = entry.request
        if group.front.waiting.pop(entry.index, None) is not None:
            group.front.send([wire.failed_frame([entry.index], error, model=group.model.number)])

    def fail_all(self, error: Exception) -> None:
        """Tell all fronts that none of the model's rows will have an output."""
        for front in list(self.fronts):
            for entry in [e for e in front.waiting.values() if e.request.model.scheduler is self]:
                self.fail_entry(entry, error)

    fronts: set[FrontConnection]
    """The connected fronts."""


class DeviceModel(LocalModel):
    """A model of a device process, known to fronts by its number."""

    scheduler_type: ClassVar[type[BatchScheduler]] = DeviceScheduler
    number: int
    registry: DeviceRegistry

    def load(self) -> None:
        """Open the artifact, run it once, and start its workers; see `ServedModel.load`."""
        super().load()
        cast("DeviceScheduler", self.scheduler).fronts = self.registry.fronts

    def describe(self) -> dict[str, Any]:
        """Return what a front needs to prepare and answer requests, as JSON."""
        described = {
            "name": self.name,
            "number": self.number,
            "state": self.state,
            "reason": self.reason,
        }
        if self.is_loaded:
            described |= {
                "content": self.artifact.content_sha256(),
                "graph": self.backend.record.file,
                "info": self.info(),
            }
        return described

    def accept(self, front: FrontConnection, frame: wire.Frame) -> None:
        """Queue the rows of a frame, or tell the front why not."""
        rows = wire.read_rows(frame)
        numbers = range(frame.number, frame.number + len(rows))
        try:
            if not self.is_serving:
                raise UnavailableError(f"{self.name}: {self.reason}.")
            admitted = bool(frame.flags & wire.ADMITTED)
            if self.registry.refuses_requests and not admitted:
                raise UnavailableError(f"model '{self.name}' is being restarted.")
            backend, queue = self.backend, self.scheduler.queue
            task = backend.task
            if task is None or frame.flags & wire.RAW:
                entries = backend.entries(backend.tensors, rows)
            else:
                entries = backend.entries(task, rows)
            now = time.perf_counter()
            group = RowGroup(front, self, now, 0.0, len(entries))
            for number, entry in zip(numbers, entries, strict=True):
                entry.request, entry.index = group, number
            backlog_seconds = queue.put(entries, now=now, admitted=admitted)
            group.backlog_seconds = 0.0 if admitted else backlog_seconds
        except Exception as error:
            if not isinstance(error, EngineryError):  # a bug, which must not end the connection
                _log.exception("%s: %d rows could not be queued", self.name, len(rows))
            front.send([wire.failed_frame(numbers, error, model=self.number)])
            return
        for entry in entries:
            front.waiting[entry.index] = entry

    async def retire(self, *, timeout_seconds: float) -> None:
        """Close a model that was replaced, once all fronts use its successor, and only that."""
        ends = time.perf_counter() + _PREPARE_SECONDS + timeout_seconds
        registry = self.registry
        while (
            not registry.all_prepared or self.number in registry.used_numbers
        ) and time.perf_counter() < ends:
            await asyncio.sleep(_TICK_SECONDS)
        await super().retire(timeout_seconds=timeout_seconds)

    async def close(self, *, drain: bool = True, timeout_seconds: float = 30.0) -> None:
        """Close the model, which fronts can no longer name then; see `ServedModel.close`."""
        await super().close(drain=drain, timeout_seconds=timeout_seconds)
        self.registry.by_number.pop(self.number, None)


class DeviceRegistry(ModelRegistry):
    """The models of a device process."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Create the registry without loading anything; see `ModelRegistry`."""
        self.fronts: set[FrontConnection] = set()
        self.by_number: dict[int, DeviceModel] = {}
        self._numbers = itertools.count(1)
        self.refuses_requests = False
        """True if this process alone ends: rows are accepted of requests that were begun only."""
        super().__init__(*args, **options)

    @property
    def all_prepared(self) -> bool:
        """True if every front that is connected can send rows to the present models."""
        present = {cast("DeviceModel", model).number for model in self}
        return all(front.prepared >= present for front in self.fronts)

    @property
    def used_numbers(self) -> set[int]:
        """Numbers of the models that fronts send rows to, replaced ones included."""
        return {number for front in self.fronts for number in front.prepared}

    def _new(self, name: str, path: Path) -> DeviceModel:
        model = DeviceModel(name, path, self._config, self._loop, on_batch=self._on_batch)
        # A number is in two bytes of a frame, and at most two models of a name exist at a time.
        model.registry, model.number = self, next(self._numbers) % 2**16
        self.by_number[model.number] = model
        return model


class FrontConnection(wire.FrameConnection):
    """The connection of one front."""

    def __init__(self, process: DeviceProcess) -> None:
        super().__init__(process.loop)
        self._process = process
        self.waiting: dict[int, QueueEntry] = {}
        """The rows that wait or run, by their number."""
        self.prepared: frozenset[int] = frozenset()
        """Numbers of the models that the front can send rows to."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Tell the front which models there are."""
        super().connection_made(transport)
        self._process.registry.fronts.add(self)
        self.send([self._process.models_frame()])

    def connection_lost(self, error: Exception | None) -> None:
        """Drop the rows of a front that has ended."""
        self._process.registry.fronts.discard(self)
        super().connection_lost(error)
        by_model: dict[DeviceModel, list[QueueEntry]] = {}
        for entry in self.waiting.values():
            by_model.setdefault(entry.request.model, []).append(entry)
        self.waiting.clear()
        for model, entries in by_model.items():
            model.scheduler.queue.cancel(entries)

    def handle(self, frame: wire.Frame) -> None:
        """Do what the front asks for."""
        registry = self._process.registry
        if frame.kind == wire.ROWS:
            model = registry.by_number.get(frame.model)
            if model is not None:
                model.accept(self, frame)
                return
            gone = UnavailableError("the model was replaced.")
            sent = range(frame.number, frame.number + len(wire.read_rows(frame)))
            self.send([wire.failed_frame(sent, gone, model=frame.model)])
        elif frame.kind == wire.CANCEL:
            numbers = wire.read_cancelled(frame)
            entries = [e for n in numbers if (e := self.waiting.pop(n, None)) is not None]
            if entries:
                entries[0].request.model.scheduler.queue.cancel(entries)
        elif frame.kind == wire.PREPARED:
            self.prepared = frozenset(frame.json())
            self._process.open_if_prepared()
        elif frame.kind == wire.ASK:
            self._process.spawn(self._answer(frame.number, frame.json()))

    async def _answer(self, number: int, question: dict[str, Any]) -> None:
        registry = self._process.registry
        answer: dict[str, Any]
        try:
            if question["ask"] == "reload":
                outcomes = await registry.reload(question["name"])
                self._process.tell_fronts()
                answer = {
                    "outcomes": {
                        name: {"swapped": outcome.swapped, "message": outcome.message}
                        for name, outcome in outcomes.items()
                    }
                }
            else:
                answer = {"models": {model.name: model.info() for model in registry}}
        except EngineryError as error:
            answer = {"error": error.message, "do": error.do}
        except Exception as error:  # a bug, which must not leave the front without an answer
            _log.exception("a front's question failed")
            answer = {"error": f"the device process failed: {error}", "do": ""}
        self.send([wire.json_frame(wire.ANSWER, answer, number=number)])


class DeviceProcess:
    """The process of one device, from its start to its exit."""

    def __init__(
        self,
        paths: Mapping[str, Path],
        config: ServeConfig,
        socket: Path,
        *,
        fronts: int,
    ) -> None:
        """Create the process without starting anything.

        Args:
            paths: directories of artifacts, by model name.
            config: the options of the server.
            socket: path of the Unix socket that fronts connect to.
            fronts: number of fronts.
        """
        self._paths, self._config, self._socket = paths, config, socket
        self._fronts = fronts
        self._is_open = False
        self._server: asyncio.Server | None = None
        self._ending: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.registry: DeviceRegistry
        self.loop: asyncio.AbstractEventLoop

    def run(self, loop_factory: Callable[[], asyncio.AbstractEventLoop] | None) -> NoReturn:
        """Serve fronts until the process exits."""
        sys.setswitchinterval(_SWITCH_SECONDS)
        try:
            with asyncio.Runner(loop_factory=loop_factory) as runner:
                runner.run(self._serve())
        except BaseException:
            _log.exception("the device process failed")
        exit_process(1)

    async def _serve(self) -> None:
        self._handle_signals()
        try:
            await self.open()
        except Exception as error:
            log_failed_startup(error)
            exit_process(CANNOT_START)
        await asyncio.Event().wait()

    async def open(self) -> None:
        """Load the models, then accept fronts.

        Raises:
            EngineryError: a model cannot be loaded.
        """
        self.loop = asyncio.get_running_loop()
        metrics = Metrics()
        self.registry = DeviceRegistry(
            self._paths,
            self._config,
            self.loop,
            on_batch=metrics.observe_batch,
            on_broken=self._replace,
        )
        metrics.watch_models(lambda: self.registry)
        await load(self.registry)
        self._socket.unlink(missing_ok=True)  # of a process that was killed
        self._server = await self.loop.create_unix_server(
            lambda: FrontConnection(self), str(self._socket)
        )
        self.loop.call_later(_OPEN_AFTER_SECONDS, self._open)

    async def close(self) -> None:
        """End the connections, and free the models."""
        if self._server is not None:
            self._server.close()
        for front in list(self.registry.fronts):
            front.close()
        with suppress(TimeoutError):  # a model may hang
            await asyncio.wait_for(self.registry.close(), CLOSE_SECONDS)
        self._socket.unlink(missing_ok=True)

    def models_frame(self) -> bytes:
        """Return the frame that says which models there are and whether all fronts are ready."""
        models = [cast("DeviceModel", model).describe() for model in self.registry]
        return wire.json_frame(wire.MODELS, {"open": self._is_open, "models": models})

    def tell_fronts(self) -> None:
        """Send the state of the models to every front."""
        frame = self.models_frame()
        for front in self.registry.fronts:
            front.send([frame])

    def open_if_prepared(self) -> None:
        """Tell the fronts that the server is ready, once all of them are prepared."""
        registry = self.registry
        if len(registry.fronts) >= self._fronts and registry.all_prepared:
            self._open()

    def _open(self) -> None:
        if not self._is_open:
            self._is_open = True
            self.tell_fronts()

    def spawn(self, work: Any) -> asyncio.Task[None]:
        """Start a background task, and keep a reference to it until it ends."""
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _reload(self) -> None:
        if self._server is None:
            _log.error("not reloaded: the models are still being loaded.")
            return
        await log_errors(reload(self.registry))
        self.tell_fronts()

    # -- ending -------------------------------------------------------------------------------

    def _handle_signals(self) -> None:
        """Handle the signals that the parent has blocked."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._handle_sigterm)
        loop.add_signal_handler(signal.SIGINT, self._handle_sigint)
        loop.add_signal_handler(signal.SIGHUP, lambda: self.spawn(self._reload()))
        block_signals(block=False)

    def _handle_sigterm(self) -> None:
        if self._ending is None:
            exit_after(self._config.drain_delay + self._config.grace, lambda: 0)
            self._ending = self.spawn(self._drain())

    def _handle_sigint(self) -> None:
        if self._ending is None:
            self._handle_sigterm()
        else:
            exit_process(INTERRUPTED)

    async def _drain(self) -> None:
        """Run what fronts have begun, then exit; if the server ends, they have ended before."""
        if self._server is None:  # the models are being loaded
            exit_process(0)
        self.registry.begin_drain()
        self.registry.refuses_requests = True
        quiet = 0  # a front may be about to send the next part of a request
        while self.registry.fronts and quiet < _QUIET_TICKS:
            await asyncio.sleep(_TICK_SECONDS)
            quiet = 0 if any(front.waiting for front in self.registry.fronts) else quiet + 1
        await self.close()
        exit_process(0)

    def _replace(self, reason: str) -> None:
        """Fail what runs, and exit, so that the parent starts another process."""
        _log.warning("ending at once: %s", reason)
        exit_after(0.0, lambda: REPLACE)
        self.registry.refuse_all()
        self.loop.call_later(_TICK_SECONDS, exit_process, REPLACE)  # after the frames are sent

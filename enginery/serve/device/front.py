"""A front's side: its connections to the device processes, and the models that run there.

A front has no sessions. It opens the artifacts' files (tokenizer, processor, labels), prepares
requests, sends their rows to the device process with the fewest rows of this front in progress, and
makes responses from the outputs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from enginery.core.artifact.artifact import Artifact
from enginery.core.errors import EngineryError
from enginery.core.shapes import Profile
from enginery.runtime.providers.selection import Provider
from enginery.runtime.tasks.task import Row, RowTask, TaskOptions
from enginery.serve.batching.queue import LIST_SHARE, ClosedError, OverloadedError, QueueEntry
from enginery.serve.batching.scheduler import BatchResult, RowScheduler, Timings
from enginery.serve.config import ServeConfig
from enginery.serve.device import wire
from enginery.serve.models.backend import ModelFiles, open_task
from enginery.serve.models.registry import ModelRegistry, ReloadResult, free_memory
from enginery.serve.models.served_model import InferenceResult, ServedModel, UnavailableError

_log = logging.getLogger("enginery.serve")

_CONNECT_SECONDS = 0.05
"""Time between two attempts to connect to a device process."""
_ANSWER_SECONDS = 1.0
"""Time to wait for a device process to say what it is doing."""
_OPEN_SECONDS = 2.0
"""Maximum time that a request waits until the server is ready."""
_FOLLOW_SECONDS = 30.0
"""Maximum time for this front to open models that were reloaded."""
_RETRY_SECONDS = 1.0
"""Time until the files of a model that could not be opened are opened again."""
_MAX_UNSENT_BYTES = 64 * 1024**2
"""Bytes of rows that may wait for a device process to read them; further requests are rejected."""


@dataclass(slots=True, eq=False)
class SentRow(QueueEntry):
    """A row that is sent to a device process."""

    link: DeviceLink | None = None
    """The connection that it was sent over; None before that."""
    number: int = 0
    """Its number on that connection."""


class DeviceQueue:
    """What stands in a front for a model's queue, which is in the device processes."""

    def __init__(self, model: FrontModel, config: ServeConfig) -> None:
        self._model = model
        self.max_rows, self.max_tokens = config.queue_inputs, config.queue_tokens
        self.rows = 0
        """Number of rows that were sent and have no output yet."""

    def observe_wait(self, backlog_seconds: float, waited: float) -> None:
        """Do nothing, because the device process observes how long requests wait."""

    def put(self, entries: Sequence[SentRow], *, now: float, admitted: bool = False) -> float:  # noqa: ARG002  as `BatchQueue`
        """Send rows of a request; the device process may still reject them.

        Returns:
            0: the device process observes how long requests wait.

        Raises:
            OverloadedError: this front already has too many rows in progress.
            InputError: a row cannot be sent.
            UnavailableError: no device process is connected.
        """
        # The rest is for single inputs, as in `BatchQueue`, which knows more about their size.
        max_rows = self.max_rows if len(entries) == 1 else int(self.max_rows * LIST_SHARE)
        if self.rows and not admitted and self.rows + len(entries) > max_rows:
            raise OverloadedError(
                f"the queue is full: {self.rows} inputs wait, expected at most {max_rows}.",
                retry_after_seconds=1.0,
            )
        link, number = self._model.choose_link(admitted=admitted)
        link.send_rows(entries, model=number, admitted=admitted)
        self.rows += len(entries)
        return 0.0

    def cancel(self, entries: Sequence[SentRow]) -> int:
        """Cancel the rows that have no output yet; return their number."""
        by_link: dict[DeviceLink, list[int]] = {}
        for entry in entries:
            if entry.link is not None and entry.link.sent.pop(entry.number, None) is not None:
                by_link.setdefault(entry.link, []).append(entry.number)
        for link, numbers in by_link.items():
            link.send(wire.cancel_frame(numbers))
        cancelled = sum(map(len, by_link.values()))
        self.rows -= cancelled
        return cancelled


class FrontModel(ServedModel):
    """A model that device processes run."""

    def __init__(
        self, name: str, path: Path, config: ServeConfig, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Create the model without opening it; see `ServedModel`."""
        super().__init__(name, path, config, loop)
        self._scheduler = RowScheduler(DeviceQueue(self, config), loop)
        self._is_ready = asyncio.Event()
        self.content = ""
        """Content hash of the artifact that was opened."""
        self.numbers: dict[DeviceLink, int] = {}
        """The model's number in each device process where it can be asked."""
        self.followed: dict[DeviceLink, int] = {}
        """Its number in each device process that runs this content, whatever its state is."""
        self._info: dict[DeviceLink, dict[str, Any]] = {}
        """What each device process last said about the model."""

    @property
    def scheduler(self) -> RowScheduler:
        """What sends rows and collects their outputs."""
        return self._scheduler

    @property
    def is_serving(self) -> bool:
        """True if requests are accepted; those that come before `state` is ready wait for it."""
        return bool(self.numbers) and self.state in ("ready", "loading")

    async def infer(
        self,
        task: RowTask,
        inputs: Any,
        options: TaskOptions,
        timings: Timings | None = None,
    ) -> InferenceResult:
        """Run inference on the inputs of a request; see `ServedModel.infer`.

        A front that is still loading waits for its device instead of refusing: other fronts may
        have become ready some milliseconds earlier, and clients take them for one server.
        """
        if self.state == "loading" and self.numbers:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_ready.wait(), _OPEN_SECONDS)
            if self.state == "loading":
                raise UnavailableError(f"{self.name}: {self.reason}.")
        return await super().infer(task, inputs, options, timings)

    @property
    def queued_rows(self) -> int:
        """Number of inputs of this front that wait or run."""
        rows: int = self._scheduler.queue.rows
        return rows

    def entries(self, task: RowTask, rows: Sequence[Row]) -> list[QueueEntry]:
        """Convert rows of a task to entries; the device process chooses their batches."""
        raw = task is self.backend.tensors
        return [
            SentRow(None, index, raw, row.tokens, row, self, row.tokens)
            for index, row in enumerate(rows)
        ]

    def choose_link(self, *, admitted: bool = False) -> tuple[DeviceLink, int]:
        """Return the connection with the fewest rows in progress, and the model's number there.

        Args:
            admitted: earlier rows of the request were accepted, so these are not rejected.

        Raises:
            UnavailableError: no device process runs the model.
            OverloadedError: the device process does not read what is sent.
        """
        if len(self.numbers) == 1:
            ((link, number),) = self.numbers.items()
        elif self.numbers:
            link, number = min(self.numbers.items(), key=lambda item: len(item[0].sent))
        else:
            raise UnavailableError(f"{self.name}: {self.reason}.")
        if link.unsent_bytes > _MAX_UNSENT_BYTES and not admitted:
            raise OverloadedError(
                f"{link.unsent_bytes} bytes of other requests wait to be sent to the device.",
                retry_after_seconds=1.0,
            )
        return link, number

    def info(self) -> dict[str, Any]:
        """Return the properties that the device processes sent, with their queues added up."""
        described = [*self._info.values()]
        queues = [device_info["queue"] for device_info in described]
        queue = {
            "inputs": self._pool.inputs + sum(device_queue["inputs"] for device_queue in queues),
            "tokens": sum(device_queue["tokens"] for device_queue in queues),
            "wait_seconds": max(
                (device_queue["wait_seconds"] for device_queue in queues), default=0.0
            ),
            **self._queue_limits(),
        }
        current = {"name": self.name, "state": self.state, "reason": self.reason, "queue": queue}
        if not described:
            return current
        return {
            **described[0],
            **current,
            "devices": [device_info["providers"] for device_info in described],
        }

    def load(self) -> None:
        """Raise AssertionError: the files are opened when a device process says which."""
        raise AssertionError("a front opens a model when a device process has loaded it")

    def open_files(self, described: Mapping[str, Any]) -> None:
        """Open the artifact's files for a model that a device process runs.

        Args:
            described: see `DeviceModel.describe`.

        Raises:
            EngineryError: a file cannot be read, or the directory now has another content.
        """
        artifact = Artifact.open(self.path)
        content = artifact.content_sha256()
        if content != described["content"]:
            raise UnavailableError(f"{self.path} has been replaced since it was loaded.")
        info = described["info"]
        record = artifact.graph(described["graph"])
        self._files = ModelFiles(
            artifact,
            record,
            open_task(artifact, record, self._config, self._pool.encode_in_parallel),
            self._config,
            providers=[Provider(**provider) for provider in info["providers"]],
            profiles=[Profile.parse(engine["profile"]) for engine in info["engines"]],
        )
        self._files.dim = info.get("dim", 0)
        self.content = content

    def follow(self, link: DeviceLink, described: Mapping[str, Any]) -> None:
        """Take over what a device process says about the model."""
        self.observe(link, described["info"])
        self.followed[link] = described["number"]
        if described["state"] == "ready":
            self.numbers[link] = described["number"]
        else:
            self.numbers.pop(link, None)

    def observe(self, link: DeviceLink, info: dict[str, Any]) -> None:
        """Take over a device process' figures."""
        self._info[link] = info

    def lose(self, link: DeviceLink) -> None:
        """Forget a device process that has ended."""
        self.numbers.pop(link, None)
        self.followed.pop(link, None)
        self._info.pop(link, None) if len(self._info) > 1 else None

    def update_state(self, *, was_open: bool) -> None:
        """Set `state` to `ready` if the model can be asked in every front, else to `loading`.

        Args:
            was_open: the server has been ready.
        """
        if self.state not in ("loading", "ready"):
            return
        self._is_ready.clear()
        if was_open and any(link.is_open for link in self.numbers):
            self.state, self.reason = "ready", ""
            self._is_ready.set()
        elif self.numbers:
            self.state, self.reason = "loading", "other processes of the server are starting"
        else:
            self.state, self.reason = "loading", "its device process is starting"

    def running_seconds(self) -> float:
        """Return 0: the device process observes its batches."""
        return 0.0

    async def _close_sessions(self, *, drain: bool, timeout_seconds: float) -> None:  # noqa: ARG002
        self._scheduler.fail_all(ClosedError("the model is shutting down."))


class DeviceLink(wire.FrameConnection):
    """The connection of a front to one device process, made again whenever it is lost."""

    def __init__(
        self, path: Path, registry: FrontRegistry, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Create the link without connecting.

        Args:
            path: the device process' Unix socket.
            registry: the models, which are told what the device process says.
            loop: the event loop of the requests.
        """
        super().__init__(loop)
        self._path, self._registry = path, registry
        self._lost = asyncio.Event()
        self._next_number = 1
        self._questions: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.sent: dict[int, SentRow] = {}
        """The rows without output, by their number."""
        self.is_open = False
        """True if the device process says that all fronts are ready."""

    @property
    def is_connected(self) -> bool:
        """True if the device process can be reached."""
        return self.transport is not None

    @property
    def unsent_bytes(self) -> int:
        """Number of bytes that the device process has not read yet."""
        return self.transport.get_write_buffer_size() if self.transport is not None else 0

    async def stay_connected(self) -> None:
        """Connect, and connect again whenever the device process was replaced."""
        while True:
            while not await self.connect():
                await asyncio.sleep(_CONNECT_SECONDS)
            await self._lost.wait()

    async def connect(self) -> bool:
        """Return True if the device process has accepted a connection, or did so before."""
        if self.transport is not None:
            return True
        self._lost.clear()
        try:
            await self.loop.create_unix_connection(lambda: self, str(self._path))
        except OSError:  # it is starting
            return False
        return True

    # -- sending ------------------------------------------------------------------------------

    def send_rows(self, entries: Sequence[SentRow], *, model: int, admitted: bool) -> None:
        """Send rows of one request to a model of the device process.

        Raises:
            InputError: a row cannot be sent; none is.
        """
        first = self._next_numbers(len(entries))
        frames = wire.rows_frames(
            [entry.row for entry in entries],
            first=first,
            model=model,
            admitted=admitted,
            raw=bool(entries[0].key),
        )
        for number, entry in enumerate(entries, first):
            entry.link, entry.number = self, number
            self.sent[number] = entry
        self.send(frames)

    async def ask(self, question: Mapping[str, Any], *, seconds: float = 0.0) -> dict[str, Any]:
        """Return the device process' answer to a question.

        Args:
            question: see `FrontConnection`.
            seconds: maximum time to wait; 0 for any time.

        Raises:
            UnavailableError: the device process has ended or does not answer.
        """
        number = self._next_numbers(1)
        answer = self._questions[number] = self.loop.create_future()
        try:
            if self.transport is None:
                raise UnavailableError("the device process is starting.")
            self.send([wire.json_frame(wire.ASK, question, number=number)])
            return await asyncio.wait_for(answer, seconds or None)
        except TimeoutError:
            raise UnavailableError("the device process does not answer.") from None
        finally:
            del self._questions[number]

    def _next_numbers(self, count: int) -> int:
        """Return the first of `count` consecutive numbers; after the largest they start again."""
        if self._next_number + count - 1 > wire.MAX_NUMBER:
            self._next_number = 1
        first = self._next_number
        self._next_number += count
        return first

    # -- receiving ----------------------------------------------------------------------------

    def connection_lost(self, error: Exception | None) -> None:
        """Answer the requests whose rows were sent with 503, since the device process has ended."""
        super().connection_lost(error)
        self.is_open = False
        self._lost.set()
        self._registry.on_lost(self)
        lost, self.sent = self.sent, {}
        for entry in lost.values():
            model = cast("FrontModel", entry.runner)
            model.scheduler.queue.rows -= 1
            model.scheduler.fail_entry(
                entry, UnavailableError(f"model '{model.name}' is being restarted.")
            )
        for answer in self._questions.values():
            if not answer.done():
                answer.set_exception(UnavailableError("the device process has ended."))

    def handle(self, frame: wire.Frame) -> None:
        """Take over what the device process says."""
        if frame.kind == wire.OUTPUTS:
            self._deliver(wire.read_outputs(frame))
        elif frame.kind == wire.FAILED:
            numbers, error = wire.read_failure(frame)
            for number in numbers:
                entry = self.sent.pop(number, None)
                if entry is not None:
                    model = cast("FrontModel", entry.runner)
                    model.scheduler.queue.rows -= 1
                    model.scheduler.fail_entry(entry, error)
        elif frame.kind == wire.ANSWER:
            question = self._questions.get(frame.number)
            if question is not None and not question.done():
                question.set_result(frame.json())
        elif frame.kind == wire.MODELS:
            self._registry.on_models(self, frame.json())

    def _deliver(self, message: wire.BatchOutputs) -> None:
        """Pass outputs to their requests, unless these were cancelled."""
        batch: list[SentRow] = []
        outputs: list[Any] = []
        for number, output in zip(message.numbers, message.outputs, strict=True):
            entry = self.sent.pop(number, None)
            if entry is not None:
                batch.append(entry)
                outputs.append(output)
        if batch:
            model = cast("FrontModel", batch[0].runner)
            model.scheduler.queue.rows -= len(batch)
            model.scheduler.deliver(BatchResult(batch, outputs, message.started, message.seconds))


class FrontRegistry(ModelRegistry):
    """The models of a front, which follow those of the device processes."""

    def __init__(
        self,
        paths: Mapping[str, Path],
        config: ServeConfig,
        loop: asyncio.AbstractEventLoop,
        *,
        sockets: Sequence[Path],
        on_broken: Callable[[str], None] | None = None,
    ) -> None:
        """Create the registry without connecting.

        Args:
            paths: directories of artifacts, by model name.
            config: the options of the server.
            loop: the event loop of the requests.
            sockets: the Unix sockets of the device processes.
            on_broken: called with the reason if a text is tokenized for too long.
        """
        super().__init__(paths, config, loop, on_broken=on_broken)
        self._links = [DeviceLink(socket, self, loop) for socket in sockets]
        self._told: dict[DeviceLink, dict[str, Any]] = {}
        """What each device process said last and has not been followed yet."""
        self._was_open: set[DeviceLink] = set()
        """The device processes that have said that all fronts are ready."""
        self._heard: set[DeviceLink] = set()
        """The device processes that have said anything."""
        self._failures: dict[str, str] = {}
        """Why the files of models could not be opened, by name."""
        self._retiring: set[FrontModel] = set()
        """The models that were replaced and still have requests."""
        self._news = asyncio.Event()
        """Set if there is something to follow."""
        self._progress = asyncio.Event()
        """Set whenever something was followed."""
        self._following: asyncio.Task[None] | None = None
        self._connecting: list[asyncio.Task[None]] = []

    async def connect(self) -> bool:
        """Try to connect to the device processes; return True if one accepts connections."""
        return any([await link.connect() for link in self._links])

    async def load(self) -> None:
        """Wait until a device process has loaded all models, and open their files."""
        self._connecting = [self._loop.create_task(link.stay_connected()) for link in self._links]
        self._following = self._loop.create_task(self._follow_all())
        self._watching = self._loop.create_task(self._watch())
        await self._wait_until(lambda: any(self._is_prepared(link) for link in self._links))

    async def refresh(self) -> None:
        """Ask the device processes for their present figures."""
        await asyncio.gather(*(self._refresh(link) for link in self._links if link.is_connected))

    async def close(self) -> None:
        """Answer the requests in progress, then end the connections."""
        await super().close()
        for task in (*self._connecting, self._following):
            if task is not None:
                task.cancel()
        for link in self._links:
            link.close()

    async def _reload_all(self, names: Sequence[str]) -> dict[str, ReloadResult]:
        """Have every device process reload, and follow them; return the first failure of each."""
        results: dict[str, ReloadResult] = {}
        async with self._reloading:
            for link in self._links:
                name = names[0] if len(names) == 1 else ""
                answer = await link.ask({"ask": "reload", "name": name})
                if "error" in answer:
                    raise UnavailableError(answer["error"], do=answer["do"])
                for model, outcome in answer["outcomes"].items():
                    if model not in results or results[model].swapped:
                        results[model] = ReloadResult(**outcome)
            # They told which models they have before they answered.
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wait_until(lambda: not self._told), _FOLLOW_SECONDS)
        return results

    async def _wait_until(self, is_true: Callable[[], bool]) -> None:
        while not is_true():
            self._progress.clear()
            await self._progress.wait()

    def on_models(self, link: DeviceLink, message: dict[str, Any]) -> None:
        """Store the message of a device process about its models."""
        self._told[link] = message
        if message["open"]:
            # At first only to a front that replaces another one: then the server has been ready.
            self._was_open.update([link] if link in self._heard else self._links)
        self._heard.add(link)
        link.is_open = message["open"]
        self._news.set()

    def on_lost(self, link: DeviceLink) -> None:
        """Note that a device process has ended."""
        self._told.pop(link, None)
        for model in (*self._models.values(), *self._retiring):
            cast("FrontModel", model).lose(link)
        self._update_states()

    async def _follow_all(self) -> None:
        """Follow what the device processes say, one message at a time."""
        while True:
            await self._news.wait()
            self._news.clear()
            for link, message in list(self._told.items()):
                try:
                    await self._follow(link, message)
                except Exception:  # a bug, which must not end the following of later messages
                    _log.exception("what a device process said could not be followed")

    async def _follow(self, link: DeviceLink, message: dict[str, Any]) -> None:
        """Open what has changed, then take over the state of all models at once."""
        opened = await self._open_changed(message["models"])
        if self._told.get(link) is not message:
            return  # it has said something else meanwhile, or has ended
        is_complete = True
        for described in message["models"]:
            model = opened.get(described["name"]) or self._of_name(described["name"])
            if "content" not in described:
                model.lose(link)  # it runs nowhere there
            elif model.content == described["content"]:
                self._replace(model)
                model.follow(link, described)
            else:  # the one before it goes on, as long as the device process runs that
                is_complete = False
        if is_complete:
            del self._told[link]
            self._failures.clear()
        else:
            self._loop.call_later(_RETRY_SECONDS, self._news.set)
        self._report(link)
        self._update_states()

    async def _open_changed(self, models: Sequence[Mapping[str, Any]]) -> dict[str, FrontModel]:
        """Open the files of models whose content has changed.

        Args:
            models: see `DeviceModel.describe`.

        Returns:
            Those that could be opened, by name.
        """
        changed: dict[str, FrontModel] = {}
        opening = []
        for described in models:
            name = described["name"]
            model = self._of_name(name)
            if described.get("content", model.content) != model.content:
                changed[name] = self._new(name, model.path) if model.is_loaded else model
                opening.append(
                    self._loop.run_in_executor(None, changed[name].open_files, described)
                )
        results = await asyncio.gather(*opening, return_exceptions=True)
        for (name, _), result in zip(list(changed.items()), results, strict=True):
            if not isinstance(result, BaseException):
                continue
            del changed[name]
            if self._failures.get(name) != str(result):  # tried again often, and said once
                is_expected = isinstance(result, EngineryError | OSError)
                _log.error(
                    "%s: not opened: %s", name, result, exc_info=None if is_expected else result
                )
            self._failures[name] = str(result)
        return changed

    def _of_name(self, name: str) -> FrontModel:
        return cast("FrontModel", self._models[name])

    def _replace(self, model: FrontModel) -> None:
        """Let a model that was opened take the requests from now on."""
        old = self._of_name(model.name)
        if old is not model:
            self._models[model.name] = model
            self._retiring.add(old)
            self._spawn(self._retire(old))

    async def _retire(self, model: FrontModel) -> None:
        """Close a model that was replaced, and tell the device processes to close theirs."""
        try:
            await model.retire(timeout_seconds=max(self._config.grace, 30.0))
        finally:
            self._retiring.discard(model)
            for link in list(model.followed):
                self._report(link)
            del model
            await self._loop.run_in_executor(None, free_memory)

    def _report(self, link: DeviceLink) -> None:
        """Tell a device process which of its models this front sends rows to."""
        models = cast("Sequence[FrontModel]", (*self._models.values(), *self._retiring))
        numbers = [model.followed[link] for model in models if link in model.followed]
        link.send([wire.json_frame(wire.PREPARED, numbers)])

    async def _refresh(self, link: DeviceLink) -> None:
        with suppress(UnavailableError):
            answer = await link.ask({"ask": "info"}, seconds=_ANSWER_SECONDS)
            for name, info in answer.get("models", {}).items():
                model = cast("FrontModel", self._models[name])
                if link in model.numbers:
                    model.observe(link, info)

    def _is_prepared(self, link: DeviceLink) -> bool:
        return all(link in cast("FrontModel", model).numbers for model in self)

    def _update_states(self) -> None:
        """Set the state of each model: ready once all device processes have been open."""
        was_open = len(self._was_open) == len(self._links)
        for model in self._models.values():
            cast("FrontModel", model).update_state(was_open=was_open)
        self._progress.set()

    def _new(self, name: str, path: Path) -> FrontModel:
        return FrontModel(name, path, self._config, self._loop)

"""The frames between fronts and device processes: a header of 12 bytes, then the content.

A front sends rows (token ids, pixels or tensors), each with a number of its own. The device process
sends the outputs of a whole batch in one frame: numbers first, then one array for all rows if their
outputs have the same shape. Token ids and this array are sent as they are, other values pickled,
and rare messages as JSON. Both ends are processes of one server, forked from the same parent, and
the socket is in a directory that only their user can enter. So there is no version and no check of
types, and pickles are trusted: what clients send is in them as values alone.

    front   → device    ROWS, CANCEL, ASK, PREPARED
    device  → front     OUTPUTS, FAILED, ANSWER, MODELS
"""

from __future__ import annotations

import asyncio
import pickle
import struct
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import orjson

from enginery.core.errors import EngineryError, InputError, ProviderError, ShapeError
from enginery.runtime.tasks.task import Row
from enginery.runtime.text.tokenizer import TokenArray
from enginery.serve.batching.queue import ClosedError, OverloadedError
from enginery.serve.models.served_model import UnavailableError

ROWS, CANCEL, ASK, PREPARED, OUTPUTS, FAILED, ANSWER, MODELS = range(1, 9)
"""Kinds of frames.

    ROWS        rows of one request for a model, numbered from the header's number on
    CANCEL      the numbers of rows whose outputs nobody waits for
    ASK         JSON for the device process, which answers with the same number
    PREPARED    the front can take requests for the model of this number
    OUTPUTS     the outputs of a batch
    FAILED      JSON: why rows have no output
    ANSWER      JSON: the answer to ASK
    MODELS      JSON: the state of all models, whenever it changes
"""

ADMITTED = 1
"""Flag of ROWS: earlier rows of the request were accepted, so these are not rejected."""
RAW = 2
"""Flag of ROWS: tensors for the graph itself instead of rows of the model's task."""

MAX_NUMBER = 2**32 - 1
"""Largest number of a row or question."""
FRAME_BYTES = 1024**2
"""Size after which further rows of a request go into a frame of their own, so that frames of other
requests pass between them."""

_HEADER = struct.Struct("<IBBHI")
"""Size of the payload in bytes, kind, flags, number of the model, number."""
_ROW = struct.Struct("<BBIIIII")
"""Kind of the content, flags, tokens of the prompt, tokens, and the sizes in bytes of the ids, the
type ids and further fields."""
_BATCH = struct.Struct("<dfI3sB")
"""When the batch started, by `time.perf_counter`; its seconds; rows; dtype of one array of all
outputs, or nothing; its number of dims."""
_IDS16, _IDS32, _VALUE = range(3)
_IDS_DTYPES = (np.dtype(np.uint16), np.dtype(np.int32))
_TRUNCATED = 1
_ROW_FIELDS = frozenset({"content", "tokens", "prompt_tokens", "truncated"})
_FURTHER = tuple(name for name in Row.__dataclass_fields__ if name not in _ROW_FIELDS)
"""Fields of a row that are sent only if they are not at their default."""
_FURTHER_DEFAULTS = {name: Row.__dataclass_fields__[name].default for name in _FURTHER}

_ERRORS: Mapping[str, Callable[..., EngineryError]] = {
    kind.__name__: kind
    for kind in (InputError, ShapeError, ProviderError, ClosedError, OverloadedError)
} | {"UnavailableError": UnavailableError}


class Frame(NamedTuple):
    """A frame that was received; its payload is `data[start:end]`."""

    kind: int
    flags: int
    model: int
    number: int
    data: bytes
    start: int
    end: int

    def json(self) -> Any:
        """Return the payload of a frame with JSON."""
        return orjson.loads(memoryview(self.data)[self.start : self.end])


class FrameReader:
    """Splits what a socket receives into frames."""

    def __init__(self, handle: Callable[[Frame], object]) -> None:
        """Create a reader that passes every complete frame to `handle`."""
        self._handle = handle
        self._rest = bytearray()
        self._needed = 0

    def feed(self, data: bytes) -> None:
        """Handle the frames that `data` completes."""
        if self._rest:
            self._rest += data
            if len(self._rest) < self._needed:
                return
            data, self._rest = bytes(self._rest), bytearray()
        at, size = 0, len(data)
        header = _HEADER.size
        while size - at >= header:
            length, kind, flags, model, number = _HEADER.unpack_from(data, at)
            start = at + header
            end = start + length
            if end > size:
                self._needed = end - at
                break
            self._handle(Frame(kind, flags, model, number, data, start, end))
            at = end
        else:
            self._needed = header
        if at < size:
            self._rest += memoryview(data)[at:]


class FrameConnection(asyncio.Protocol):
    """One end of a connection, which sends and receives frames."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.transport: asyncio.Transport | None = None
        self._reader = FrameReader(self.handle)
        self._unsent: list[Any] = []

    def handle(self, frame: Frame) -> None:
        """Handle a frame that was received."""
        raise NotImplementedError

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note that frames can be sent."""
        self._reader = FrameReader(self.handle)
        self.transport = cast("asyncio.Transport", transport)

    def connection_lost(self, _: Exception | None) -> None:
        """Forget what was not sent."""
        self.transport, self._unsent = None, []

    def data_received(self, data: bytes) -> None:
        """Handle the frames that have arrived."""
        self._reader.feed(data)

    def send(self, parts: list[Any]) -> None:
        """Send a frame, together with those of the same turn of the event loop."""
        if not self._unsent:
            self.loop.call_soon(self._flush)
        self._unsent += parts

    def close(self) -> None:
        """End the connection."""
        if self.transport is not None:
            self.transport.close()

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(b"".join(unsent))


def frame(kind: int, *parts: Any, flags: int = 0, model: int = 0, number: int = 0) -> list[Any]:
    """Return a frame as a list of bytes-like parts, for one `b"".join` of many frames."""
    size = sum(len(part) if isinstance(part, bytes) else part.nbytes for part in parts)
    return [_HEADER.pack(size, kind, flags, model, number), *parts]


def json_frame(kind: int, value: Any, *, model: int = 0, number: int = 0) -> bytes:
    """Return a frame whose payload is JSON."""
    body = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
    return b"".join(frame(kind, body, model=model, number=number))


# -- rows ----------------------------------------------------------------------------------------


def rows_frames(
    rows: Sequence[Row], *, first: int, model: int, admitted: bool, raw: bool
) -> list[Any]:
    """Return the frames of rows of one request, numbered from `first` on, as bytes-like parts.

    Raises:
        InputError: a row has an id or a type id that cannot be sent.
    """
    frames: list[Any] = []
    parts: list[Any] = []
    flags, size, number = (ADMITTED if admitted else 0) | (RAW if raw else 0), 0, first
    for index, row in enumerate(rows, first):
        if size >= FRAME_BYTES:
            frames += frame(ROWS, *parts, flags=flags, model=model, number=number)
            parts, size, number = [], 0, index
            flags |= ADMITTED
        try:
            size += _add_row(parts, row)
        except (OverflowError, ValueError) as error:
            raise InputError(
                f"an input cannot be passed to the model: {error}.",
                do="Token ids are below 2147483648, and token type ids below 256.",
            ) from error
    return frames + frame(ROWS, *parts, flags=flags, model=model, number=number)


def read_rows(received: Frame) -> list[Row]:
    """Return the rows of a frame."""
    data, at, end = received.data, received.start, received.end
    rows = []
    while at < end:
        kind, flags, prompt, tokens, size, type_size, further = _ROW.unpack_from(data, at)
        at += _ROW.size
        if kind == _VALUE:
            content = _unpickled(data, at, at + size)
        else:
            dtype = _IDS_DTYPES[kind]
            ids = np.frombuffer(data, dtype, size // dtype.itemsize, at)
            types = np.frombuffer(data, np.uint8, type_size, at + size) if type_size else None
            content = TokenArray(ids, types)
        at += size + type_size
        row = Row(content, tokens, prompt, bool(flags & _TRUNCATED))
        if further:
            for name, value in orjson.loads(memoryview(data)[at : at + further]).items():
                setattr(row, name, value)
            at += further
        rows.append(row)
    return rows


def _add_row(parts: list[Any], row: Row) -> int:
    """Append the parts of a row; return their size in bytes."""
    content, types = row.content, b""
    ids = getattr(content, "ids", None)
    if ids is None:
        kind = _VALUE
        body = pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
    else:
        try:
            kind, body = _IDS16, array("H", ids).tobytes()
        except OverflowError:
            kind, body = _IDS32, array("i", ids).tobytes()
        type_ids = content.type_ids
        if any(type_ids):
            types = bytes(type_ids)
    further = b""
    if _FURTHER:
        changed = {
            name: value
            for name in _FURTHER
            if (value := getattr(row, name)) != _FURTHER_DEFAULTS[name]
        }
        further = orjson.dumps(changed) if changed else b""
    flags = _TRUNCATED if row.truncated else 0
    sizes = (len(body), len(types), len(further))
    parts.append(_ROW.pack(kind, flags, row.prompt_tokens, row.tokens, *sizes))
    parts.append(body)
    if types:
        parts.append(types)
    if further:
        parts.append(further)
    return _ROW.size + sum(sizes)


# -- outputs -------------------------------------------------------------------------------------


def outputs_frame(
    numbers: Sequence[int], outputs: Sequence[Any], *, model: int, started: float, seconds: float
) -> list[Any]:
    """Return the frame of the outputs of a batch's rows, as `RowTask.split` returned them."""
    first = outputs[0]
    as_one = isinstance(first, np.ndarray) and first.dtype.kind in "fiub"
    as_one = as_one and all(
        isinstance(output, np.ndarray)
        and output.shape == first.shape
        and output.dtype is first.dtype
        for output in outputs
    )
    if as_one:
        values = np.stack(outputs) if len(outputs) > 1 else first[None]
        dtype, shape, body = values.dtype.str.encode(), values.shape, values.tobytes()
    else:
        dtype, shape = b"", ()
        body = pickle.dumps(list(outputs), pickle.HIGHEST_PROTOCOL)
    batch = _BATCH.pack(started, seconds, len(outputs), dtype, len(shape))
    head = struct.pack(f"<{len(shape)}Q", *shape)
    sent = np.array(numbers, np.uint32).tobytes()
    return frame(OUTPUTS, batch, sent, head, body, model=model)


class BatchOutputs(NamedTuple):
    """The outputs of the rows of a batch that one front sent."""

    numbers: list[int]
    outputs: Sequence[Any]
    started: float
    """When the batch started, by `time.perf_counter`, which all processes of a machine share."""
    seconds: float


def read_outputs(received: Frame) -> BatchOutputs:
    """Return the outputs of a frame."""
    data, at = received.data, received.start
    started, seconds, count, dtype, ndim = _BATCH.unpack_from(data, at)
    at += _BATCH.size
    numbers = np.frombuffer(data, np.uint32, count, at).tolist()
    at += 4 * count
    outputs: Sequence[Any]
    if ndim:
        shape = struct.unpack_from(f"<{ndim}Q", data, at)
        content = memoryview(data)[at + 8 * ndim : received.end]
        values: Any = np.frombuffer(content, dtype.decode()).reshape(shape)
        outputs = values if values.flags.aligned else values.copy()
    else:
        outputs = _unpickled(data, at, received.end)
    return BatchOutputs(numbers, outputs, started, seconds)


def _unpickled(data: bytes, start: int, end: int) -> Any:
    return pickle.loads(memoryview(data)[start:end])  # noqa: S301  what this server has pickled


# -- errors --------------------------------------------------------------------------------------


def failed_frame(numbers: Iterable[int], error: BaseException, *, model: int) -> bytes:
    """Return the frame that says why rows have no output."""
    described: dict[str, Any] = {"numbers": list(numbers)}
    if isinstance(error, EngineryError):
        kind = next(
            (base.__name__ for base in type(error).__mro__ if base.__name__ in _ERRORS),
            "UnavailableError",
        )
        message = error.message.encode(errors="backslashreplace").decode()  # as JSON requires
        described |= {"kind": kind, "message": message, "do": error.do}
        described["retry_after_seconds"] = getattr(error, "retry_after_seconds", 1.0)
    else:
        described |= {"kind": "", "message": f"{type(error).__name__}: {error}"}
    return json_frame(FAILED, described, model=model)


def read_failure(received: Frame) -> tuple[list[int], Exception]:
    """Return the numbers of the rows and the error of a frame."""
    described = received.json()
    message, name = described["message"], described["kind"]
    error: EngineryError
    if not name:
        return described["numbers"], RuntimeError(f"the device process: {message}")
    if name in ("OverloadedError", "UnavailableError"):
        error = _ERRORS[name](message, retry_after_seconds=described["retry_after_seconds"])
        error.do = described["do"]
    else:
        error = _ERRORS[name](message, do=described["do"])
    return described["numbers"], error


# -- cancelling ----------------------------------------------------------------------------------


def cancel_frame(numbers: Sequence[int]) -> list[Any]:
    """Return the frame that cancels rows."""
    return frame(CANCEL, np.array(numbers, np.uint32).tobytes())


def read_cancelled(received: Frame) -> list[int]:
    """Return the numbers of the cancelled rows."""
    numbers: list[int] = np.frombuffer(
        received.data, np.uint32, (received.end - received.start) // 4, received.start
    ).tolist()
    return numbers

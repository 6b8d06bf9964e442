"""Choose tokens and reorder a cache on the device that holds them.

    operators = Operators(device)
    log_probs, tokens = operators.best(logits, 8)
    cache = operators.take(cache, rows)
    operators.row_copy(buffers, buffers).run([(0, 3), (1, 2)])    # in place

Each is a small graph that ONNX Runtime runs between two steps of a decoder, built when it is first
needed. On the CPU they take a tenth of numpy's time; from a GPU nothing is copied to the host but
the chosen tokens.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from enginery.core.extras import require_packages
from enginery.runtime.onnxruntime.binding import run_options
from enginery.runtime.onnxruntime.capture_lock import CAPTURE_LOCK
from enginery.runtime.onnxruntime.device_values import ELEMENTS, Device, dtype_of, new_buffer
from enginery.runtime.onnxruntime.runner import run_values
from enginery.runtime.onnxruntime.session import silence_warnings
from enginery.runtime.providers.known import CPU, CUDA
from enginery.runtime.providers.specification import CUDA_GRAPH_OPTIONS

_log = logging.getLogger(__name__)

Values = dict[str, Any]
"""`onnxruntime.OrtValue` by name."""

_OPSET, _IR_VERSION = 20, 9
_FLOAT, _INT64, _BOOL = (ELEMENTS[name] for name in ("float32", "int64", "bool"))
_TWO_BYTES = (ELEMENTS["float16"], ELEMENTS["bfloat16"])


class Operators:
    """The graphs, and their sessions on one device."""

    def __init__(self, device: Device | None = None) -> None:
        """Take the device of the values; None for the CPU.

        Raises:
            MissingPackageError: the package onnx, which builds the graphs, is not installed.
        """
        require_packages("Generating", "onnx", extra="generate")
        import onnxruntime as ort

        self._device = device or Device()
        self._on_gpu = self._device.kind == "cuda" and CUDA in ort.get_available_providers()
        self._sessions: dict[tuple[Any, ...], Any] = {}
        self._graphs = 0

    def best(self, logits: Any, count: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return the log-probabilities of the best tokens at the last position, and the tokens.

        Args:
            logits: (rows, positions, vocabulary), or of the last position alone (rows, vocabulary).
            count: the number of tokens, at most the vocabulary.

        Returns:
            Two arrays of (rows, count), the best first.
        """
        session = self._session(_best_graph, ELEMENTS[dtype_of(logits)], len(logits.shape()))
        values = {"logits": logits, "count": ortvalue(np.array([count], np.int64))}
        outputs = run_values(session, self._placed(values), ["log_probs", "tokens"])
        with self._device_work():
            return outputs["log_probs"].numpy(), outputs["tokens"].numpy()

    def take(self, values: Values, rows: Sequence[int]) -> Values:
        """Return values that consist of these rows, on the same device.

        Args:
            values: values whose first dim is the row, not empty.
            rows: index of each row; rows may occur several times or not at all.
        """
        session = self._session(_take_graph, *_kinds(values))
        feeds = {f"{name}.from": value for name, value in values.items()}
        feeds["rows"] = ortvalue(np.asarray(rows, np.int64))
        return run_values(session, self._placed(feeds), list(values))

    def join(self, above: Values, below: Values, shifts: tuple[int, int]) -> Values:
        """Return the rows of two caches as one.

        Args:
            above: keys and values of (rows, heads, positions, width) by name.
            below: the same of other rows.
            shifts: for each, the number of positions that are put in front of its own, of zeros, or
                taken away there if negative.
        """
        session = self._session(_join_graph, *_kinds(above))
        feeds = {f"{name}.above": value for name, value in above.items()}
        feeds |= {f"{name}.below": value for name, value in below.items()}
        # What Pad takes for one axis: the positions in front, and none behind.
        for name, shift in zip(("above", "below"), shifts, strict=True):
            feeds[name] = ortvalue(np.array([shift, 0], np.int64))
        return run_values(session, self._placed(feeds), list(above))

    def row_copy(self, source: Values, target: Values, *, records: bool = False) -> RowCopy:
        """Return a bound graph that copies rows of values to rows of others, in place.

        Args:
            source: values whose first dim is the row, by name.
            target: values of the same names, whose other dims are as large or larger; their
                elements beyond the source's become zero. Their types may be others. It may be
                `source` itself.
            records: on a GPU, record the copy as a CUDA graph, for one that is run many times.
        """
        # The graph depends on these alone, so that one session serves all sizes.
        kinds = [
            _CopyKind(
                name,
                *_copied_types(value, target[name]),
                len(value.shape()),
                value.shape()[1:] != target[name].shape()[1:],
            )
            for name, value in source.items()
        ]
        session, graph_id = self._repeated(_copy_graph, *kinds, records=records)
        with self._device_work():
            return RowCopy(session, source, target, self._device, graph_id)

    def best_tokens(self, logits: Any, count: int) -> BestTokens:
        """Return a bound graph that chooses the best tokens of logits in a buffer; see `best`.

        Args:
            logits: (rows, vocabulary).
            count: the number of tokens, at most the vocabulary.
        """
        element = ELEMENTS[dtype_of(logits)]
        session, graph_id = self._repeated(_best_graph, element, 2, records=True)
        with self._device_work():
            return BestTokens(session, logits, count, self._device, graph_id)

    def _repeated(
        self, make: Callable[..., Any], *arguments: Any, records: bool
    ) -> tuple[Any, str]:
        """Return the session of a graph, and the number of a CUDA graph; empty for none."""
        session = None
        if records and self._on_gpu:
            session = self._session(make, *arguments, records=True)
        if session is None:
            return self._session(make, *arguments), ""
        self._graphs += 1
        return session, str(self._graphs)

    def clear(self, values: Values) -> None:
        """Fill values with zeros, in place."""
        kinds = [(name, _copied_types(v, v)[0], len(v.shape())) for name, v in values.items()]
        session = self._session(_clear_graph, *kinds)
        bound = session.io_binding()
        for name, element, _ in kinds:
            shape = ortvalue(np.array(_copied_shape(values[name], element), np.int64))
            bound.bind_ortvalue_input(f"{name}.shape", shape)
            _bind(bound.bind_output, name, values[name], self._device, element)
        with self._device_work():
            session.run_with_iobinding(bound)

    def _device_work(self) -> AbstractContextManager[None]:
        """Hold back captures of CUDA graphs, during which no thread may copy or allocate."""
        return CAPTURE_LOCK.running() if self._on_gpu else nullcontext()

    def _session(self, make: Callable[..., Any], *arguments: Any, records: bool = False) -> Any:
        """Return the session of a graph, made by the first call with these arguments.

        Args:
            make: builds the graph.
            arguments: its arguments.
            records: the session records its runs as CUDA graphs; None is returned if ONNX Runtime
                refuses that.
        """
        key = (make, *arguments, records)
        if key not in self._sessions:
            try:
                self._sessions[key] = self._open(make(*arguments), records=records)
            except Exception as error:  # ONNX Runtime raises many unrelated types
                if not records:
                    raise
                _log.warning("copies of the cache are not recorded as CUDA graphs: %s", error)
                self._sessions[key] = None
        return self._sessions[key]

    def _open(self, graph: Any, *, records: bool = False) -> Any:
        import onnxruntime as ort
        from onnx import helper

        options = ort.SessionOptions()
        options.log_severity_level = 4
        # More threads would spin beside those of the decoder.
        options.intra_op_num_threads = 1
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION
        )
        provider: tuple[str, dict[str, str]] = (CPU, {})
        if self._on_gpu:
            provider = (CUDA, {"device_id": str(self._device.index)})
            if records:
                option, value = CUDA_GRAPH_OPTIONS[CUDA]
                provider[1][option] = value
            silence_warnings()
        with self._device_work():
            return ort.InferenceSession(
                model.SerializeToString(), options, providers=[provider], enable_fallback=0
            )

    def _placed(self, values: Values) -> Values:
        """Return values on the host if only the CPU runs the graphs."""
        if self._device.kind == "cpu" or self._on_gpu:
            return values
        return {name: ortvalue(value.numpy()) for name, value in values.items()}


class _BoundGraph:
    """A graph whose inputs and outputs are bound, and which may be recorded as a CUDA graph."""

    def __init__(self, session: Any, device: Device, graph_id: str) -> None:
        """Take the session, and the number of the CUDA graph; empty for none."""
        self._session, self._on_gpu = session, device.kind != "cpu"
        self._bound = session.io_binding()
        self._options = run_options({"gpu_graph_id": graph_id} if graph_id else {})
        self._graph_id, self._recorded = graph_id, RecordedGraphs("")

    def _lock(self) -> AbstractContextManager[None]:
        """Return the lock that a run holds, also while its inputs are copied."""
        return self._recorded.lock(self._graph_id) if self._on_gpu else nullcontext()

    def _run(self) -> None:
        try:
            self._session.run_with_iobinding(self._bound, self._options)
        except Exception as error:  # ONNX Runtime raises many unrelated types
            if not self._graph_id:
                raise
            _log.warning("a run is not recorded as a CUDA graph: %s", error)
            self._graph_id, self._options = "", run_options({"gpu_graph_id": "-1"})
            self._session.run_with_iobinding(self._bound, self._options)
        self._recorded.add(self._graph_id)


class BestTokens(_BoundGraph):
    """The choice of the best tokens of logits in a buffer."""

    def __init__(
        self, session: Any, logits: Any, count: int, device: Device, graph_id: str = ""
    ) -> None:
        """Bind the values; see `Operators.best_tokens`."""
        super().__init__(session, device, graph_id)
        shape = (logits.shape()[0], count)
        self._best = [new_buffer(dtype, shape, device) for dtype in ("float32", "int64")]
        self._bound.bind_ortvalue_input("logits", logits)
        self._bound.bind_ortvalue_input("count", ortvalue(np.array([count], np.int64)))
        for name, value in zip(("log_probs", "tokens"), self._best, strict=True):
            self._bound.bind_ortvalue_output(name, value)

    def run(self) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return copies of the log-probabilities and the tokens, (rows, count) each."""
        with self._lock():
            self._run()
            log_probs, tokens = (value.numpy() for value in self._best)
        return np.array(log_probs), np.array(tokens)


class RowCopy(_BoundGraph):
    """A copy of rows with all that it needs, to be run many times.

    Each run reads and writes all rows of the target: ONNX Runtime's ScatterND on CUDA, which would
    write a few, has one thread for each index, which copies a whole row.
    """

    def __init__(
        self, session: Any, source: Values, target: Values, device: Device, graph_id: str = ""
    ) -> None:
        """Bind the values; see `Operators.row_copy`.

        Args:
            session: the session of the graph for these values.
            source: what is read.
            target: what is written.
            device: where the values are.
            graph_id: the number of the CUDA graph that the copy is recorded as; empty for none.
        """
        super().__init__(session, device, graph_id)
        self._held = (source, target)
        self._count = count = next(iter(target.values())).shape()[0]
        self._rows = new_buffer("int64", (count,), device)
        self._is_copied = new_buffer("bool", (count,), device)
        bound = self._bound
        bound.bind_ortvalue_input("rows", self._rows)
        for rank in {len(value.shape()) for value in target.values()}:
            # The same memory is bound once for each rank, as (count, 1, …), so that it is broadcast
            # over the values of that rank.
            address = self._is_copied.data_ptr()
            shape = [count, *[1] * (rank - 1)]
            name = f"is_copied.{rank}"
            bound.bind_input(name, device.kind, device.index, _BOOL, shape, address)
        for name, value in source.items():
            read, written = _copied_types(value, target[name])
            _bind(bound.bind_input, f"{name}.from", value, device, read)
            _bind(bound.bind_input, f"{name}.into", target[name], device, written)
            _bind(bound.bind_output, name, target[name], device, written)
            longer = np.subtract(target[name].shape(), value.shape())
            if longer[1:].any():
                # Pad's order: in front of each axis, then behind each. The rows, axis 0, are never
                # padded.
                pads = [*[0] * (len(longer) + 1), *longer[1:]]
                bound.bind_ortvalue_input(f"{name}.pads", ortvalue(np.array(pads, np.int64)))

    def run(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy rows.

        Args:
            pairs: the row that is read and the one that is written.
        """
        # Where keeps each row of the target that is not written.
        rows, is_copied = np.zeros(self._count, np.int64), np.zeros(self._count, np.bool_)
        for read, written in pairs:
            rows[written], is_copied[written] = read, True
        with self._lock():
            self._rows.update_inplace(rows)
            self._is_copied.update_inplace(is_copied)
            self._run()


class RecordedGraphs(threading.local):
    """The CUDA graphs of one session that the current thread has recorded.

    ONNX Runtime keeps those of each thread separately.
    """

    def __init__(self, *unrecorded: str) -> None:
        """Take the numbers of runs that are not recorded."""
        self._ids = set(unrecorded)

    def add(self, graph_id: str) -> None:
        """Note that a run is recorded."""
        self._ids.add(graph_id)

    def lock(self, graph_id: str) -> AbstractContextManager[None]:
        """Return the lock of a run: a recording runs alone, others wait only for recordings."""
        return CAPTURE_LOCK.running() if graph_id in self._ids else CAPTURE_LOCK.capturing()


def ortvalue(array: NDArray[Any]) -> Any:
    """Return an array as an `onnxruntime.OrtValue` on the host."""
    from onnxruntime import OrtValue

    return OrtValue.ortvalue_from_numpy(array)


def _bind(bind: Callable[..., None], name: str, value: Any, device: Device, element: int) -> None:
    """Bind the memory of a value as a type."""
    bind(name, device.kind, device.index, element, _copied_shape(value, element), value.data_ptr())


def _copied_types(source: Any, target: Any) -> tuple[int, int]:
    """Return the numbers of the types that a value is read and written as.

    Pairs of types of two bytes are copied as float32: CUDA's Pad and Expand of ONNX Runtime 1.31 do
    not take bfloat16, and the CPU has hardly any operator for float16.
    """
    read, written = ELEMENTS[dtype_of(source)], ELEMENTS[dtype_of(target)]
    # Two numbers make one float32, so the last dims have to be even.
    is_even = not source.shape()[-1] % 2 and not target.shape()[-1] % 2
    if read == written and read in _TWO_BYTES and is_even:
        return _FLOAT, _FLOAT
    return read, written


def _copied_shape(value: Any, element: int) -> list[int]:
    """Return the shape of a value that is copied as a type."""
    *dims, last = value.shape()
    is_paired = element == _FLOAT and ELEMENTS[dtype_of(value)] in _TWO_BYTES
    return [*dims, last // 2 if is_paired else last]


class _CopyKind(NamedTuple):
    """What the graph of a copy has to know of a value."""

    name: str
    read: int
    written: int
    rank: int
    is_longer: bool
    """Whether what is written is longer than what is read."""


def _kinds(values: Values) -> list[tuple[str, int, int]]:
    """Return the name, the type and the rank of values."""
    return [(name, ELEMENTS[dtype_of(v)], len(v.shape())) for name, v in values.items()]


def _best_graph(element: int, rank: int) -> Any:
    from onnx import helper

    dims = ["rows", *["positions"] * (rank - 2), "vocabulary"]
    inputs = [
        helper.make_tensor_value_info("logits", element, dims),
        helper.make_tensor_value_info("count", _INT64, [1]),
    ]
    outputs = [
        helper.make_tensor_value_info("log_probs", _FLOAT, ["rows", "best"]),
        helper.make_tensor_value_info("tokens", _INT64, ["rows", "best"]),
    ]
    last = helper.make_tensor("last", _INT64, [], [-1])
    at_last = "logits" if rank == 2 else "at_last"
    nodes = [
        helper.make_node("Gather", ["logits", "last"], ["at_last"], axis=1),
        # In FP32, whatever the type of the logits: beam search adds up log-probabilities over a
        # sequence.
        helper.make_node("Cast", [at_last], ["scores"], to=_FLOAT),
        helper.make_node("LogSoftmax", ["scores"], ["all"], axis=-1),
        helper.make_node("TopK", ["all", "count"], ["log_probs", "tokens"], axis=-1),
    ]
    if rank == 2:
        return helper.make_graph(nodes[1:], "best", inputs, outputs)
    return helper.make_graph(nodes, "best", inputs, outputs, [last])


def _info(name: str, element: int, rank: int) -> Any:
    from onnx import helper

    return helper.make_tensor_value_info(name, element, [f"{name}.{axis}" for axis in range(rank)])


def _take_graph(*values: tuple[str, int, int]) -> Any:
    """Return the graph for values of these names, types and ranks."""
    from onnx import helper

    inputs = [_info(f"{name}.from", element, rank) for name, element, rank in values]
    nodes = [
        helper.make_node("Gather", [f"{name}.from", "rows"], [name], axis=0) for name, *_ in values
    ]
    inputs.append(helper.make_tensor_value_info("rows", _INT64, ["rows"]))
    return helper.make_graph(nodes, "take", inputs, [_info(*value) for value in values])


def _join_graph(*values: tuple[str, int, int]) -> Any:
    """Return the graph for caches of these names, types and ranks."""
    from onnx import helper

    parts = ("above", "below")
    inputs = [_info(f"{name}.{part}", *kind) for name, *kind in values for part in parts]
    inputs += [helper.make_tensor_value_info(part, _INT64, [2]) for part in parts]
    nodes = []
    for name, *_ in values:
        shifted = [f"{name}.{part}.shifted" for part in parts]
        nodes += [
            helper.make_node("Pad", [f"{name}.{part}", part, "", "axis"], [output])
            for part, output in zip(parts, shifted, strict=True)
        ]
        nodes.append(helper.make_node("Concat", shifted, [name], axis=0))
    # Axis 2 has the positions.
    axis = helper.make_tensor("axis", _INT64, [1], [2])
    return helper.make_graph(nodes, "join", inputs, [_info(*value) for value in values], [axis])


def _copy_graph(*kinds: _CopyKind) -> Any:
    """Return the graph that writes rows of values into others, and leaves their other rows."""
    from onnx import helper

    inputs = [helper.make_tensor_value_info("rows", _INT64, ["count"])]
    for rank in sorted({kind.rank for kind in kinds}):
        dims = ["count", *[1] * (rank - 1)]
        inputs.append(helper.make_tensor_value_info(f"is_copied.{rank}", _BOOL, dims))
    nodes, outputs = [], []
    for name, read, written, rank, is_longer in kinds:
        inputs.append(_info(f"{name}.from", read, rank))
        inputs.append(_info(f"{name}.into", written, rank))
        outputs.append(_info(name, written, rank))
        rows = f"{name}.rows"
        nodes.append(helper.make_node("Gather", [f"{name}.from", "rows"], [rows], axis=0))
        if is_longer:
            inputs.append(helper.make_tensor_value_info(f"{name}.pads", _INT64, [2 * rank]))
            nodes.append(helper.make_node("Pad", [rows, f"{name}.pads"], [f"{name}.padded"]))
            rows = f"{name}.padded"
        if read != written:
            nodes.append(helper.make_node("Cast", [rows], [f"{name}.cast"], to=written))
            rows = f"{name}.cast"
        condition = f"is_copied.{rank}"
        nodes.append(helper.make_node("Where", [condition, rows, f"{name}.into"], [name]))
    return helper.make_graph(nodes, "copy", inputs, outputs)


def _clear_graph(*values: tuple[str, int, int]) -> Any:
    """Return the graph that fills values of these names, types and ranks with zeros."""
    from onnx import helper

    inputs = [helper.make_tensor_value_info(f"{name}.shape", _INT64, [r]) for name, _, r in values]
    zeros = [
        helper.make_tensor(f"zero.{kind}", kind, [], [0]) for kind in {k for _, k, _ in values}
    ]
    nodes = [
        helper.make_node("Expand", [f"zero.{element}", f"{name}.shape"], [name])
        for name, element, _ in values
    ]
    return helper.make_graph(nodes, "clear", inputs, [_info(*value) for value in values], zeros)

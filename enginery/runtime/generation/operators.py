"""Choose tokens and reorder a cache on the device that holds them.

    operators = Operators(device)
    log_probs, tokens = operators.best(logits, 8)
    cache = operators.take(cache, rows)

Each is a small graph that ONNX Runtime runs between two steps of a decoder, built when it is first
needed. On the CPU they take a tenth of numpy's time; from a GPU nothing is copied to the host but
the chosen tokens. No GPU has run them yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.errors import MissingPackageError
from enginery.runtime.onnxruntime.device_values import ELEMENTS, Device, dtype_of
from enginery.runtime.onnxruntime.runner import run_values
from enginery.runtime.providers.known import CPU, CUDA

Values = dict[str, Any]
"""`onnxruntime.OrtValue` by name."""

_OPSET, _IR_VERSION = 20, 9
_FLOAT, _INT64 = ELEMENTS["float32"], ELEMENTS["int64"]


class Operators:
    """The graphs, and their sessions on one device."""

    def __init__(self, device: Device | None = None) -> None:
        """Take the device of the values; None for the CPU.

        Raises:
            MissingPackageError: the package onnx, which builds the graphs, is not installed.
        """
        if find_spec("onnx") is None:
            raise MissingPackageError("onnx", extra="generate", purpose="Generating")
        import onnxruntime as ort

        self._device = device or Device()
        self._on_gpu = self._device.kind == "cuda" and CUDA in ort.get_available_providers()
        self._sessions: dict[tuple[Any, ...], Any] = {}

    def best(self, logits: Any, count: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return the log-probabilities of the best tokens at the last position, and the tokens.

        Args:
            logits: (rows, positions, vocabulary).
            count: the number of tokens, at most the vocabulary.

        Returns:
            Two arrays of (rows, count), the best first.
        """
        session = self._session(_best_graph, ELEMENTS[dtype_of(logits)])
        values = {"logits": logits, "count": self._value(np.array([count], np.int64))}
        found = run_values(session, self._placed(values), ["log_probs", "tokens"])
        return found["log_probs"].numpy(), found["tokens"].numpy()

    def take(self, values: Values, rows: Sequence[int]) -> Values:
        """Return values that consist of these rows, on the same device.

        Args:
            values: values whose first dim is the row, not empty.
            rows: index of each row; rows may occur several times or not at all.
        """
        session = self._session(_take_graph, *_kinds(values))
        feeds = {f"{name}.from": value for name, value in values.items()}
        feeds["rows"] = self._value(np.asarray(rows, np.int64))
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
        for name, shift in zip(("above", "below"), shifts, strict=True):
            feeds[name] = self._value(np.array([shift, 0], np.int64))
        return run_values(session, self._placed(feeds), list(above))

    def _session(self, make: Callable[..., Any], *arguments: Any) -> Any:
        """Return the session of a graph, made by the first call with these arguments."""
        key = (make, *arguments)
        if key not in self._sessions:
            self._sessions[key] = self._open(make(*arguments))
        return self._sessions[key]

    def _open(self, graph: Any) -> Any:
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
        return ort.InferenceSession(
            model.SerializeToString(), options, providers=[provider], enable_fallback=0
        )

    def _placed(self, values: Values) -> Values:
        """Return values on the host if only the CPU runs the graphs."""
        if self._device.kind == "cpu" or self._on_gpu:
            return values
        return {name: self._value(value.numpy()) for name, value in values.items()}

    def _value(self, array: NDArray[Any]) -> Any:
        from onnxruntime import OrtValue

        return OrtValue.ortvalue_from_numpy(array)


def _kinds(values: Values) -> list[tuple[str, int, int]]:
    """Return the name, the type and the rank of values."""
    return [(name, ELEMENTS[dtype_of(v)], len(v.shape())) for name, v in values.items()]


def _best_graph(element: int) -> Any:
    from onnx import helper

    inputs = [
        helper.make_tensor_value_info("logits", element, ["rows", "positions", "vocabulary"]),
        helper.make_tensor_value_info("count", _INT64, [1]),
    ]
    outputs = [
        helper.make_tensor_value_info("log_probs", _FLOAT, ["rows", "best"]),
        helper.make_tensor_value_info("tokens", _INT64, ["rows", "best"]),
    ]
    last = helper.make_tensor("last", _INT64, [], [-1])
    nodes = [
        helper.make_node("Gather", ["logits", "last"], ["at_last"], axis=1),
        helper.make_node("Cast", ["at_last"], ["scores"], to=_FLOAT),
        helper.make_node("LogSoftmax", ["scores"], ["all"], axis=-1),
        helper.make_node("TopK", ["all", "count"], ["log_probs", "tokens"], axis=-1),
    ]
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
    axis = helper.make_tensor("axis", _INT64, [1], [2])
    return helper.make_graph(nodes, "join", inputs, [_info(*value) for value in values], [axis])

"""The smallest model that proves a provider: y = x + x for two floats, in 68 bytes.

    >>> onnxruntime.InferenceSession(one_op_model()).run(None, {"x": FEED})
    [array([2., 5.], dtype=float32)]

Encoded by hand, as the bare install has no `onnx` package. Field numbers: onnx/onnx.proto.
"""

from __future__ import annotations

import numpy as np

FEED = np.array([1.0, 2.5], dtype=np.float32)
EXPECTED = np.array([2.0, 5.0], dtype=np.float32)

_FLOAT = 1  # TensorProto.DataType
_IR_VERSION = 8
_OPSET = 17


def one_op_model() -> bytes:
    """A serialized ModelProto: input x and output y, float32 (2,)."""
    node = _text(1, "x") + _text(1, "x") + _text(2, "y") + _text(4, "Add")
    graph = (
        _message(1, node)
        + _text(2, "one_op")
        + _message(11, _value("x", len(FEED)))
        + _message(12, _value("y", len(FEED)))
    )
    opset = _text(1, "") + _number(2, _OPSET)
    return _number(1, _IR_VERSION) + _message(7, graph) + _message(8, opset)


def _value(name: str, size: int) -> bytes:
    """A ValueInfoProto: a float tensor of one dim."""
    shape = _message(1, _number(1, size))
    tensor = _number(1, _FLOAT) + _message(2, shape)
    return _text(1, name) + _message(2, _message(1, tensor))


def _number(field: int, value: int) -> bytes:
    """A varint field; all numbers of this model are below 128, so one byte."""
    return bytes([field << 3, value])


def _message(field: int, content: bytes) -> bytes:
    """A length-delimited field; all of this model are below 128 bytes."""
    return bytes([field << 3 | 2, len(content)]) + content


def _text(field: int, value: str) -> bytes:
    return _message(field, value.encode())

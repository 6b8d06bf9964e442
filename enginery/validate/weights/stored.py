"""The weights that a graph stores, as its nodes use them.

A quantized weight is dequantized, and the smoothing that the activation undoes is taken out of it:
`values` are those of the FP32 layer, and `tolerance` is what rounding may have changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from enginery.passes.cast.low_precision import LOW_TYPES, read_values

Array = NDArray[Any]

_PASS_ON = frozenset(
    {
        "Identity",
        "Cast",
        "CastLike",
        "DequantizeLinear",
        "Transpose",
        "Reshape",
        "Unsqueeze",
        "Squeeze",
    }
)
"""Operators behind which a weight is still the same weight."""
_NAME_SUFFIX = re.compile(r"(_merged_\d+|_fp16|_bf16|_fp32|_quantized)+$")
"""What merging decoders, casting and quantizing append to the names of initializers."""
_PRECISIONS = {
    ir.DataType.FLOAT16: "fp16",
    ir.DataType.BFLOAT16: "bf16",
    ir.DataType.INT8: "int8",
    ir.DataType.UINT8: "int8",
    ir.DataType.FLOAT8E4M3FN: "fp8",
}
_FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_INTEGERS = (ir.DataType.INT64, ir.DataType.INT32)
_SMALL = 4
"""Elements of constants that may be limits, or shapes."""
_LARGEST_SIZE = 1 << 16
_TABLE = 16
"""Smallest number of integers that are a table, such as position ids."""

_ROLES = {
    **{(op, 1): "weight" for op in ("MatMul", "MatMulInteger", "FusedMatMul", "Gemm", "PRelu")},
    **{(op, 1): "weight" for op in ("Conv", "ConvInteger", "ConvTranspose")},
    **{(op, 2): "bias" for op in ("Conv", "ConvTranspose", "Gemm", "LayerNormalization")},
    **{(op, 1): "weight" for op in ("LayerNormalization", "SimplifiedLayerNormalization")},
    ("BatchNormalization", 1): "weight",
    ("BatchNormalization", 2): "bias",
    ("BatchNormalization", 3): "running_mean",
    ("BatchNormalization", 4): "running_var",
    ("Gather", 0): "weight",
    ("MatMul", 0): "weight",
    ("Mul", 0): "weight",
    ("Mul", 1): "weight",
    ("Add", 0): "bias",
    ("Add", 1): "bias",
}
"""Operator and input -> the parameter of the node's module that the input must be."""


@dataclass(frozen=True)
class Use:
    """A node that reads a weight."""

    node: ir.Node
    index: int
    """Which of its inputs the weight is."""
    transposed: bool = False
    """True if a Transpose of two dims lies between."""

    @property
    def path(self) -> str:
        """The path of the module that the node belongs to: `encoder.layer.0.output.dense`."""
        scopes = self.node.metadata_props.get("pkg.torch.onnx.name_scopes")
        if scopes:  # torch's dynamo exporter: ['', 'model', 'model.encoder', 'linear_3']
            words = re.findall(r"'([^']*)'", scopes)
            return words[-2] if len(words) > 1 else ""
        path = ""
        for word in (self.node.name or "").split("/")[1:-1]:
            parent, _, last = path.rpartition(".")
            # A Sequential is in the path twice: /classifier/classifier.1/Gemm
            if last and word.startswith(f"{last}."):
                path = parent
            path = f"{path}.{word}" if path else word
        return path

    @property
    def role(self) -> str:
        """The parameter of the module that the input must be: `weight`, `bias`; '' if unknown."""
        return _ROLES.get((self.node.op_type, self.index), "")

    @property
    def inputs_first(self) -> bool | None:
        """True if the node needs the weight as (inputs, outputs), None for another operator."""
        op, node = self.node.op_type, self.node
        if self.index != 1 or op not in _PRODUCTS:
            return None
        flipped = bool(node.attributes.get_int("transB", 0)) != self.transposed
        return not flipped


_PRODUCTS = ("MatMul", "Gemm", "FusedMatMul", "MatMulInteger", "Attention", "QAttention")


@dataclass
class StoredWeight:
    """A weight of a graph."""

    name: str
    precision: str
    """fp32, fp16, bf16, int8, fp8 or another type."""
    raw: Array
    """As it is stored."""
    values: Array
    """As the FP32 layer would have it: dequantized, and without smoothing."""
    tolerance: Array | None = None
    """Largest difference that rounding explains, for each element; None for exact values."""
    uses: list[Use] = field(default_factory=list)
    problem: str = ""
    """What is wrong with the scales themselves."""

    @property
    def parameter_name(self) -> str:
        """The name without the suffixes of later stages."""
        return _NAME_SUFFIX.sub("", self.name)


def find_uses(value: ir.Value, *, transposed: bool = False) -> Iterator[Use]:
    """Yield the nodes that read a weight, past those that only move or convert it."""
    for use in value.uses():
        if use.node.op_type in _PASS_ON and use.idx == 0:
            flips = use.node.op_type == "Transpose" and len(value.shape or ()) == 2
            # Two Transposes cancel out.
            yield from find_uses(use.node.outputs[0], transposed=transposed != flips)
        else:
            yield Use(use.node, use.idx, transposed)


def stored_tensors(model: ir.Model) -> Iterator[tuple[ir.Value, ir.TensorProtocol]]:
    """Yield every initializer and Constant of the model, subgraphs included."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield value, value.const_value
        for node in graph:
            if node.op_type == "Constant" and "value" in node.attributes:
                yield node.outputs[0], node.attributes["value"].as_tensor()


def find_sizes(model: ir.Model, *, shapes: bool = True) -> set[int]:
    """Return the whole numbers from 2 on among the small constants of a graph.

    A graph that treats some lengths or batch sizes differently holds the number where it begins.

    Args:
        model: the graph.
        shapes: False to leave out numbers that are only the shape of a Reshape. They cannot make it
            treat that size differently, other than by failing at every other one.
    """
    sizes = set()
    for value, tensor in stored_tensors(model):
        if not shapes and _is_shape(value):
            continue
        if tensor.size <= _SMALL and tensor.dtype in (*_FLOATS, *_INTEGERS):
            values = read_values(tensor).astype(np.float64).reshape(-1)
            sizes |= {int(v) for v in values if 2 <= v <= _LARGEST_SIZE and v == int(v)}
    return sizes


def _is_shape(value: ir.Value) -> bool:
    """Return True if a constant is nothing but the shape of a Reshape, or part of one."""
    uses: list[Any] = []  # onnx_ir has no public name for a use
    for use in value.uses():
        # A shape is often put together from its parts.
        is_part = use.node.op_type == "Concat"
        uses += use.node.outputs[0].uses() if is_part else [use]
    return bool(uses) and all((use.node.op_type, use.idx) == ("Reshape", 1) for use in uses)


def constant_past_casts(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Return the tensor of an initializer or Constant, past Casts and Identities."""
    while value is not None and (producer := value.producer()) is not None:
        if producer.op_type not in ("Cast", "CastLike", "Identity"):
            break
        value = producer.inputs[0]
    return None if value is None else ir.convenience.get_const_tensor(value)


def read_plain(value: ir.Value, tensor: ir.TensorProtocol) -> StoredWeight:
    """Return a weight that is not quantized."""
    raw = read_values(tensor)
    precision = _PRECISIONS.get(tensor.dtype, "fp32")
    values = raw.astype(np.float32) if precision in ("fp16", "bf16") else raw
    return StoredWeight(value.name or "", precision, raw, values, uses=list(find_uses(value)))


def as_rounded(stored: StoredWeight, precision: str) -> StoredWeight:
    """Return an FP32 weight as one of a lower precision, if all its values are numbers of that.

    Exporters of FP16 models store the weights of nodes that compute in FP32 so.
    """
    low = LOW_TYPES.get(precision)
    if low is None or stored.precision != "fp32" or stored.values.dtype != np.float32:
        return stored
    with np.errstate(over="ignore"):
        raw = stored.values.astype(low.numpy())
    if not np.array_equal(raw.astype(np.float32), stored.values):
        return stored
    return replace(stored, precision=precision, raw=raw)


def is_counted(tensor: ir.TensorProtocol) -> bool:
    """Return True for weights and tables, and False for shapes, axes and single numbers."""
    if tensor.dtype in _INTEGERS or quantized_precision(tensor):
        return bool(tensor.size >= _TABLE)
    return tensor.dtype in _FLOATS and bool(tensor.size > 1)


def is_table(stored: StoredWeight) -> bool:
    """Return True if inputs read single rows of a weight, as of an embedding."""
    return any(use.node.op_type.startswith("Gather") for use in stored.uses)


_TO_PRODUCT = frozenset(
    {"Reshape", "Transpose", "Identity", "Cast", "Mul", "Div", "QuantizeLinear", "DequantizeLinear"}
)
_TO_SOFTMAX = frozenset({"Mul", "Div", "Add", "Where", "Cast", "Reshape", "Identity"})


def is_key_bias(use: Use) -> bool:
    """Return True if a bias is added to the keys of an attention, and to nothing else.

    It adds the same number to the scores of all keys, which the softmax cancels. Not so if
    positions are rotated into the keys.
    """
    if use.node.op_type not in ("Add", "Gemm"):
        return False
    products = list(_behind(use.node, _TO_PRODUCT))
    return bool(products) and all(
        product is not None
        and product.op_type == "MatMul"
        and index == 1
        and all(
            end is not None and end.op_type == "Softmax" for end, _ in _behind(product, _TO_SOFTMAX)
        )
        for product, index in products
    )


def _behind(
    node: ir.Node, passing: frozenset[str], depth: int = 12
) -> Iterator[tuple[ir.Node | None, int]]:
    """Yield the nodes, and which input it is, that read a node's output past some operators.

    None stands for an output of the graph, or for a way that is too long.
    """
    if node.outputs[0].is_graph_output() or not depth:
        yield None, 0
    for use in node.outputs[0].uses():
        if use.node.op_type == "Shape":
            continue
        if use.node.op_type in passing:
            yield from _behind(use.node, passing, depth - 1)
        else:
            yield use.node, use.idx


def paths_behind(node: ir.Node, depth: int = 8) -> Iterator[str]:
    """Yield the paths of the modules that read a node's outputs, the nearest first."""
    level = [node]
    for _ in range(depth):
        # Bounded, because very many nodes may read one value.
        level = [use.node for reader in level for out in reader.outputs for use in out.uses()][:32]
        for reader in level:
            if path := Use(reader, 0).path:
                yield path


def quantized_precision(tensor: ir.TensorProtocol) -> str:
    """Return int8 or fp8, or '' for another type."""
    precision = _PRECISIONS.get(tensor.dtype, "")
    return precision if precision in ("int8", "fp8") else ""


@dataclass(frozen=True)
class QuantizedValues:
    """The numbers of a quantized weight, with what turns them into the values they stand for."""

    raw: Array
    """The stored numbers."""
    scales: Array
    """One, or one for each index of `axis`."""
    zero_point: Array
    """Like `scales`."""
    axis: int
    """The axis of the output channels."""


def dequantize(
    name: str,
    precision: str,
    quantized: QuantizedValues,
    *,
    factors: Array | None = None,
    unsmooth: Array | None = None,
) -> StoredWeight:
    """Return a quantized weight with what rounding may have changed.

    Args:
        name: the initializer's name.
        precision: int8 or fp8.
        quantized: the stored numbers, scales and zero points.
        factors: what multiplies each output channel of the product; None for nothing.
        unsmooth: the multiplier of each input channel, which the weights were divided by; None
            without smoothing.
    """
    raw, axis, scales = quantized.raw, quantized.axis, quantized.scales
    shape = [1] * raw.ndim
    shape[axis] = -1
    scale = np.asarray(scales, np.float32).reshape(shape if np.size(scales) > 1 else [1] * raw.ndim)
    zero = quantized.zero_point.astype(np.float32)
    zero = zero.reshape(shape if zero.size > 1 else [1] * raw.ndim)
    numbers = raw.astype(np.float32) - zero
    step = scale if factors is None else scale * factors.astype(np.float32).reshape(shape)
    problem = _range_problem(precision, numbers, step, zero, axis if step.size > 1 else None)
    # Scales are rounded to FP16 before they quantize, so the largest number may have been clipped.
    clipped = _fp16_rounding(step)
    if unsmooth is not None:
        other = [1] * raw.ndim
        # The input channels are on the matrix's other axis.
        other[1 - axis] = -1
        step = step * unsmooth.reshape(other)
    values = numbers * step
    size = np.abs(values)
    if precision == "int8":
        tolerance = 0.5 * np.abs(step) + size * (clipped + 2.0**-20)
    else:  # E4M3: three significand bits, subnormal numbers in steps of 2**-9
        tolerance = np.maximum(size * 2.0**-4, np.abs(step) * 2.0**-10) + size * (clipped + 2e-3)
    tolerance += np.abs(step) * 1e-4
    return StoredWeight(name, precision, raw, values, tolerance, problem=problem)


def _fp16_rounding(step: Array) -> Array:
    """Return the relative rounding of scales in FP16, which has fewer bits below 2**-14."""
    with np.errstate(over="ignore", invalid="ignore"):
        spacing = np.spacing(np.abs(step).astype(np.float16)).astype(np.float32)
    magnitude = np.maximum(np.abs(step), 2.0**-24)
    return np.asarray(np.where(np.isfinite(spacing), spacing, 0) / magnitude, np.float32)


def _range_problem(
    precision: str, numbers: Array, step: Array, zero: Array, axis: int | None
) -> str:
    """Return what is wrong if the largest number of a channel is far below the type's range."""
    # With a zero point, a range need not reach both ends of the type.
    if np.any(zero):
        return ""
    axes = tuple(i for i in range(numbers.ndim) if i != axis) if axis is not None else None
    largest = np.abs(numbers).max(axis=axes, keepdims=axis is not None)
    # A scale is made from the largest magnitude, so that one number of its channel is at the end of
    # the type's range. E4M3's numbers there are 448, 416 and 384.
    range_end, least = (127, 120) if precision == "int8" else (448, 384)
    # The smallest scale is for channels that are all zero.
    low = (largest < least * (1 - _fp16_rounding(step))) & (np.abs(step) > 2.0**-19) & (largest > 0)
    if not np.any(low):
        return ""
    channel = int(np.argmax(low.reshape(-1)))
    where = f"channel {channel}" if axis is not None else "the weight"
    used_levels = float(np.reshape(largest, -1)[channel])
    return f"its scale is too large: {where} uses {used_levels:g} of {range_end} levels"

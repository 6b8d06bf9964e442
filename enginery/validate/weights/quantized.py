"""The layers that `quantize` made: weights, scales, smoothing and corrected biases.

Names of nodes and initializers are those of `passes/qdq/insert.py`. What calibration chose, the
smoothing of each activation and the correction of each bias, is in the artifact's `ranges.json`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from enginery.core.artifact.artifact import REPORTS, Artifact
from enginery.core.errors import raise_system_error
from enginery.core.json_file import parse_json, read_document
from enginery.passes.cast.low_precision import read_values
from enginery.passes.qdq.scales import ActivationQuantParams, fp16_scale
from enginery.validate.weights.stored import (
    QuantizedValues,
    StoredWeight,
    constant_past_casts,
    dequantize,
    find_uses,
    quantized_precision,
    read_plain,
)

Array = NDArray[Any]
Vector = NDArray[np.float32]

_RANGES = f"{REPORTS}/ranges.json"
_MIDDLE = 128
"""The number of uint8 that 0 of a symmetric range is quantized to."""


@dataclass(frozen=True)
class Calibration:
    """What calibration recorded in the artifact."""

    ranges: dict[str, ActivationQuantParams] = field(default_factory=dict)
    """By activation."""
    bias_deltas: dict[str, Vector] = field(default_factory=dict)
    """By layer."""

    @classmethod
    def of(cls, artifact: Artifact) -> Calibration | None:
        """Return what the artifact records, or None if it records nothing, or nothing valid."""
        try:
            document = parse_json(read_document(artifact.path / _RANGES))
            ranges = {
                name: ActivationQuantParams.from_json(record)
                for name, record in document["ranges"].items()
            }
            deltas = {n: np.asarray(d, np.float32) for n, d in document["bias_deltas"].items()}
        except Exception as error:  # no such file, or whatever else is in it
            raise_system_error(error)
            return None
        return cls(ranges, deltas)


@dataclass
class QuantizedLayer:
    """A MatMul, Gemm or Conv whose weight is quantized."""

    node: ir.Node
    weight: StoredWeight
    bias: StoredWeight | None
    """What is added to its output; None for nothing."""
    params: ActivationQuantParams
    delta: Vector
    """The recorded correction of the bias, (N,) or (1,)."""
    recorded: bool
    """True if calibration recorded this layer; `delta` and `params` mean nothing without."""
    names: list[str]
    """The other initializers of the layer: scales, zero points, smoothing."""
    problem: str
    """What is wrong with the activation's scale and smoothing."""
    factors: Vector | None
    """What multiplies each output channel of the product; None for nothing."""
    weight_dequantizer: ir.Node
    dequantizer: ir.Node | None
    """The DequantizeLinear of the activation; None if the activation is not quantized."""
    bias_value: ir.Value | None
    """The initializer or the Constant's output that holds the bias."""
    source: ir.Value | None
    """The activation before it is smoothed and quantized; None if it is not quantized."""
    output: ir.Value
    """The layer's output with the bias."""
    name: str
    """The name that quantize gave it. Other tools rename nodes, but not the weights that they do
    not change."""

    @property
    def output_axis(self) -> int:
        """The axis of the weight's output channels."""
        return _output_axis(self.node)

    def uncorrected_bias(self, weight: Array, roundings: float) -> StoredWeight:
        """Return the bias as it was before smoothing and its correction; zeros if there is none.

        Smoothing adds -offset @ (W / multiplier), as `bias_shift` of `passes/qdq/insert.py`
        computes it.

        Args:
            weight: the FP32 weight as the graph would have it.
            roundings: relative error of a sum in FP32.
        """
        change = np.broadcast_to(self.delta, weight.shape[_output_axis(self.node)])
        if self.params.offset is not None and self.node.op_type != "Conv":
            matrix = weight.T if _output_axis(self.node) == 0 else weight
            if self.params.multiplier is not None:
                matrix = np.asarray(matrix / self.params.multiplier[:, None], np.float32)
            shift = self.params.offset.astype(np.float64) @ matrix
            change = change - shift.astype(np.float32)
        zeros = np.zeros(change.shape, np.float32)
        stored = self.bias or StoredWeight(f"{self.node.name}/bias", "fp32", zeros, zeros)
        plain = stored.values - change
        # The unit roundoffs: half a step of the type, relative to the number.
        step = {"fp16": 2.0**-11, "bf16": 2.0**-8}.get(stored.precision, 0.0)
        # FP16 has subnormal numbers, in steps of 2**-24.
        tolerance = np.abs(stored.values) * step + (2.0**-25 if step else 0.0)
        tolerance += (np.abs(plain) + 2 * np.abs(change)) * roundings
        if stored.tolerance is not None:
            tolerance += stored.tolerance
        return replace(stored, values=plain, tolerance=tolerance)


def quantized_layers(model: ir.Model, calibration: Calibration | None) -> Iterator[QuantizedLayer]:
    """Yield every layer of the main graph with a weight behind a DequantizeLinear."""
    tensors = _tensors(model)
    for node in model.graph:
        if node.op_type in ("MatMul", "Gemm", "Conv") and len(node.inputs) > 1:
            dequantizer = _maker(node.inputs[1])
            if dequantizer is not None and dequantizer.op_type == "DequantizeLinear":
                layer = _read_layer(node, dequantizer, calibration, tensors)
                if layer is not None:
                    yield layer


def _tensors(model: ir.Model) -> dict[str, ir.Value]:
    outputs = (value for node in model.graph for value in node.outputs)
    return {value.name or "": value for value in (*model.graph.inputs, *outputs)}


def _read_layer(
    node: ir.Node,
    weight_dequantizer: ir.Node,
    calibration: Calibration | None,
    tensors: Mapping[str, ir.Value],
) -> QuantizedLayer | None:
    inputs = weight_dequantizer.inputs
    stored, scale = constant_past_casts(inputs[0]), constant_past_casts(inputs[1])
    zero = constant_past_casts(inputs[2]) if len(inputs) > 2 else None
    if stored is None or scale is None or not quantized_precision(stored):
        return None
    if len(stored.shape) < 2:
        return None
    raw, scales = read_values(stored), read_values(scale).astype(np.float32)
    names = [inputs[1].name or ""]
    if zero is not None:
        names.append(inputs[2].name or "")
    dequantizer = _dequantizer(node.inputs[0])
    recorded, params, problem, more, source = _activation(
        node, dequantizer, calibration, raw.shape, tensors
    )
    factors, factors_name = _output_factors(node)
    # A single scale has no axis; the output channels are then where the operator has them.
    axis = weight_dequantizer.attributes.get_int("axis", 1) if scales.ndim else _output_axis(node)
    weight = dequantize(
        inputs[0].name or "",
        quantized_precision(stored),
        QuantizedValues(
            raw,
            scales,
            read_values(zero) if zero is not None else np.zeros((), raw.dtype),
            int(axis or 0) % raw.ndim,
        ),
        factors=factors,
        # Smoothing multiplies activations of products alone, never those of convolutions.
        unsmooth=params.multiplier if node.op_type != "Conv" else None,
    )
    weight.uses = list(find_uses(inputs[0]))
    deltas = calibration.bias_deltas if calibration is not None else {}
    # quantize names a weight's initializer after its layer, see passes/qdq/insert.py.
    stem = (inputs[0].name or "").removesuffix("/weight")
    name = stem if stem != inputs[0].name else node.name or ""
    delta = deltas.get(name, np.zeros(1, np.float32))
    recorded = recorded and delta.shape in ((1,), (raw.shape[_output_axis(node)],))
    bias, bias_value, output = _bias(node, raw.shape[_output_axis(node)], params.scale * scales)
    return QuantizedLayer(
        node,
        weight,
        bias,
        params,
        delta,
        recorded,
        [*names, *more, factors_name],
        problem,
        factors,
        weight_dequantizer,
        dequantizer,
        bias_value,
        source,
        output,
        name,
    )


def _dequantizer(value: ir.Value | None) -> ir.Node | None:
    """Return the DequantizeLinear of an activation that a QuantizeLinear has quantized."""
    node = _maker(value)
    quantizer = _maker(_input_of(node, "DequantizeLinear"))
    return node if quantizer is not None and quantizer.op_type == "QuantizeLinear" else None


def _activation(
    node: ir.Node,
    dequantizer: ir.Node | None,
    calibration: Calibration | None,
    shape: tuple[int, ...],
    tensors: Mapping[str, ir.Value],
) -> tuple[bool, ActivationQuantParams, str, list[str], ir.Value | None]:
    """Read how a layer's activation is quantized.

    Returns:
        Whether calibration recorded it, its parameters, what differs from the record, the names of
        its initializers, and the activation before smoothing; None if it is not quantized.
    """
    quantizer = _maker(dequantizer.inputs[0]) if dequantizer is not None else None
    if dequantizer is None or quantizer is None:
        return False, ActivationQuantParams(1.0), "", [], None
    names = [_behind_casts(value).name or "" for value in quantizer.inputs[1:] if value is not None]
    tensor = constant_past_casts(quantizer.inputs[1])
    scale = np.zeros(()) if tensor is None else read_values(tensor).astype(np.float32)
    # quantize names the scale after the tensor whose range it calibrated.
    activation = names[0].removesuffix("/scale") if names else ""
    record = calibration.ranges.get(activation) if calibration is not None else None
    channels = shape[1 - _output_axis(node)]
    # A record of other shapes is that of another layer, so the graph's own vectors are taken.
    if record is None or not all(
        vector is None or vector.shape == (channels,)
        for vector in (record.multiplier, record.offset)
    ):
        vectors, more, _, source = _smoothing(quantizer.inputs[0], None)
        plain = ActivationQuantParams(float(scale.max()), vectors["multiplier"], vectors["offset"])
        return False, plain, _pair_problem(quantizer, dequantizer), [*names, *more], source
    _, more, problems, source = _smoothing(quantizer.inputs[0], record)
    problems += _differences(quantizer, dequantizer, record)
    problems += _other_tensor(activation, source, tensors)
    problem = f"activation {activation}: {'; '.join(problems)}" if problems else ""
    return True, record, problem, [*names, *more], source


@dataclass
class JoiningPair:
    """A QuantizeLinear and a DequantizeLinear that no layer reads, such as behind a convolution."""

    dequantizer: ir.Node
    names: list[str]
    """The initializers of both."""
    problem: str
    """How scale and zero point differ from what calibration recorded."""
    recorded: bool
    """True if calibration recorded the tensor."""


def joining_pairs(
    model: ir.Model, calibration: Calibration | None, layers: Sequence[QuantizedLayer]
) -> Iterator[JoiningPair]:
    """Yield the QuantizeLinear and DequantizeLinear pairs that no layer of the graph reads."""
    layer_dequantizers, tensors = {id(layer.dequantizer) for layer in layers}, _tensors(model)
    for node in model.graph:
        quantizer = _maker(_input_of(node, "DequantizeLinear"))
        if (
            quantizer is None
            or quantizer.op_type != "QuantizeLinear"
            or id(node) in layer_dequantizers
        ):
            continue
        values = (*quantizer.inputs[1:], *node.inputs[1:])
        names = [_behind_casts(value).name or "" for value in values if value is not None]
        tensor = names[0].removesuffix("/scale") if names else ""
        record = calibration.ranges.get(tensor) if calibration is not None else None
        if record is None:
            problem = _pair_problem(quantizer, node)
        else:
            problems = _differences(quantizer, node, record)
            problems += _other_tensor(tensor, quantizer.inputs[0], tensors)
            problem = "; ".join(problems)
        problem = f"activation {tensor}: {problem}" if problem else ""
        yield JoiningPair(node, names, problem, record is not None)


def _other_tensor(name: str, source: ir.Value | None, tensors: Mapping[str, ir.Value]) -> list[str]:
    """Return what is wrong if a pair has the calibration of another tensor of the graph.

    A tensor that has been renamed is not in the graph by its calibrated name.
    """
    calibrated, quantized = (_origin(value) for value in (tensors.get(name), source))
    if calibrated is None or quantized is None or calibrated is quantized:
        return []
    if quantized.name == f"{name}/product":  # an output of the graph that is quantized
        return []
    return [f"quantizes '{quantized.name}', calibrated for '{name}'"]


def _origin(value: ir.Value | None) -> ir.Value | None:
    """Return the value that enters the nodes that only pass its elements on, in any shape."""
    while value is not None and (producer := value.producer()) is not None:
        if producer.op_type not in (*_PASS_ON, *_REARRANGE):
            break
        value = producer.inputs[0]
    return value


def _differences(
    quantizer: ir.Node, dequantizer: ir.Node, record: ActivationQuantParams
) -> list[str]:
    """Return how scale and zero point of a pair differ from the calibrated ones."""
    problems = []
    calibrated = 0 if record.zero_point is None else record.zero_point - _MIDDLE
    if pair := _pair_problem(quantizer, dequantizer):
        problems.append(pair)
    elif (zero := _zero_point(quantizer)) != calibrated:
        problems.append(f"zero point {zero:g}, calibrated {calibrated}")
    tensor = constant_past_casts(quantizer.inputs[1])
    scale = np.zeros(()) if tensor is None else read_values(tensor).astype(np.float32)
    expected = fp16_scale(record.scale)
    if scale.size != 1:
        problems.append(f"{scale.size} scales, calibrated one")
    elif scale.item() != expected:
        problems.append(f"scale {scale.item():g}, calibrated {float(expected):g}")
    return problems


def _pair_problem(quantizer: ir.Node, dequantizer: ir.Node) -> str:
    """Return how the numbers that dequantize differ from those that quantized, or an empty text."""
    for index, label in ((1, "scale"), (2, "zero point")):
        ours, theirs = (_number(node, index) for node in (quantizer, dequantizer))
        if not np.array_equal(ours, theirs):
            return f"{label} {_first(ours)} quantizes, but {_first(theirs)} dequantizes"
    return ""


def _number(node: ir.Node, index: int) -> Array:
    tensor = constant_past_casts(node.inputs[index]) if len(node.inputs) > index else None
    return np.zeros(()) if tensor is None else read_values(tensor).astype(np.float32).reshape(-1)


def _first(values: Array) -> str:
    return f"{values.reshape(-1)[0]:g}" if values.size else "none"


def _zero_point(quantizer: ir.Node) -> float:
    """Return the zero point of a QuantizeLinear, as if it quantized to signed numbers."""
    tensor = constant_past_casts(quantizer.inputs[2]) if len(quantizer.inputs) > 2 else None
    if tensor is None:  # without one, numbers are uint8, and 0 is 0
        return float(-_MIDDLE)
    middle = _MIDDLE if tensor.dtype == ir.DataType.UINT8 else 0
    return float(np.max(read_values(tensor).astype(np.float32), initial=0.0)) - middle


_SMOOTHING = (
    ("offset", {"Add": 1, "Sub": -1}, "/shift_channels"),
    ("multiplier", {"Mul": 1, "Div": -1}, "/scale_channels"),
)
"""What `quantize` puts before a QuantizeLinear, the last first: operators, and the node's name."""


def _smoothing(
    value: ir.Value | None, record: ActivationQuantParams | None
) -> tuple[dict[str, Vector | None], list[str], list[str], ir.Value | None]:
    """Read the vectors that smooth an activation before it is quantized.

    Args:
        value: the input of the QuantizeLinear.
        record: the calibrated vectors. Without them, nodes are recognized by their names.

    Returns:
        The vectors, the names of their initializers, what differs from the record, and the
        activation before it is smoothed.
    """
    vectors: dict[str, Vector | None] = {"multiplier": None, "offset": None}
    names, problems = [], []
    for kind, operators, suffix in _SMOOTHING:
        maker = _maker(value)
        named = maker is not None and (maker.name or "").endswith(suffix)
        expected = None if record is None else getattr(record, kind)
        # Other nodes before a QuantizeLinear are the model's own, and may look the same.
        if record is not None and expected is None:
            if named:
                problems.append(f"{kind} not calibrated")
            continue
        constants: dict[int, ir.TensorProtocol] = {}
        if maker is not None and maker.op_type in operators and (named or expected is not None):
            tensors = enumerate(map(constant_past_casts, maker.inputs))
            constants = {index: tensor for index, tensor in tensors if tensor is not None}
        if maker is None or not constants:
            if expected is not None:
                problems.append(f"{kind} missing")
            continue
        index, tensor = next(iter(constants.items()))
        values = read_values(tensor).astype(np.float32).reshape(-1)
        # The graph may divide by the vector, or subtract it.
        if operators[maker.op_type] < 0:
            with np.errstate(divide="ignore"):
                values = -values if kind == "offset" else np.float32(1) / values
        if expected is not None and not _is_rounded(values, expected):
            problems.append(f"{kind} differs from the calibrated one")
        vectors[kind] = values
        operand = maker.inputs[index]
        names.append("" if operand is None else _behind_casts(operand).name or "")
        value = maker.inputs[1 - index]
    return vectors, names, problems, value


def _is_rounded(values: Vector, expected: Vector) -> bool:
    """Return True if values are the wanted ones, rounded to FP16 or less."""
    if values.shape != expected.shape:
        return False
    smallest = 2.0**-24  # the step of FP16's subnormal numbers
    # 2**-10 is twice FP16's unit roundoff.
    return bool(np.all(np.abs(values - expected) <= np.abs(expected) * 2.0**-10 + smallest))


def _bias(
    node: ir.Node, channels: int, step: Array
) -> tuple[StoredWeight | None, ir.Value | None, ir.Value]:
    """Return the constant that is added to a layer's output, also after its factors; and the sum.

    `step` is that of the product. When ONNX Runtime optimizes a quantized convolution, it adds
    nodes that round the bias to such steps.
    """
    if node.op_type in ("Gemm", "Conv") and len(node.inputs) > 2 and node.inputs[2] is not None:
        product, add, values = node, node, [node.inputs[2]]
    else:
        scaled = _only_user(node)
        product = scaled if scaled is not None and _is_output_scaling(scaled) else node
        add = _only_user(product)
        values = list(add.inputs) if add is not None and add.op_type == "Add" else []
    for added in values:
        value, rounded = added, False
        while (producer := _maker(value)) and producer.op_type in (
            "DequantizeLinear",
            "Round",
            "Div",
        ):
            value, rounded = producer.inputs[0], True
        tensor = constant_past_casts(value)
        # Other constants may be added, such as a mask; a bias has one number for each channel.
        if value is not None and tensor is not None and tensor.size == channels:
            value = _behind_casts(value)
            bias = read_plain(value, tensor)
            bias.raw, bias.values = bias.raw.reshape(-1), bias.values.reshape(-1)
            # ONNX Runtime divides in the precision of the floats.
            bias.tolerance = step * 0.5 + np.abs(bias.values) * 2.0**-10 if rounded else None
            return bias, value, (add or product).outputs[0]
    return None, None, product.outputs[0]


def _behind_casts(value: ir.Value) -> ir.Value:
    while (producer := value.producer()) is not None and producer.op_type in (
        "Cast",
        "CastLike",
        "Identity",
    ):
        if producer.inputs[0] is None:
            break
        value = producer.inputs[0]
    return value


def _output_axis(node: ir.Node) -> int:
    transposed = node.op_type == "Gemm" and bool(node.attributes.get_int("transB", 0))
    return 0 if node.op_type == "Conv" or transposed else 1


def _output_factors(node: ir.Node) -> tuple[Vector | None, str]:
    user = _only_user(node)
    if not _is_output_scaling(user) or user is None:
        return None, ""
    tensor = constant_past_casts(user.inputs[1])
    factors = None if tensor is None else read_values(tensor).astype(np.float32)
    return factors, user.inputs[1].name or ""


def _is_output_scaling(node: ir.Node | None) -> bool:
    return node is not None and (node.name or "").endswith("/scale_output")


_PASS_ON = ("Cast", "CastLike", "Identity", "Dropout")
_REARRANGE = ("Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze")
"""Operators whose output has the same elements, and so the same range."""


def _only_user(node: ir.Node) -> ir.Node | None:
    """Return the only node that reads a node's output, past those that do not change it."""
    while len(users := [use.node for use in node.outputs[0].uses() if _reads_values(use)]) == 1:
        user = users[0]
        if user.op_type not in _PASS_ON and _unchanged_input(user) is not node.outputs[0]:
            return user
        node = user
    return None


def _reads_values(use: Any) -> bool:
    """Return False for uses of a value's shape or dtype alone."""
    return (use.node.op_type, use.idx) not in (("Shape", 0), ("CastLike", 1))


def _maker(value: ir.Value | None) -> ir.Node | None:
    """Return the node that computes a value, past those that do not change it."""
    while value is not None and (producer := value.producer()) is not None:
        if producer.op_type in _PASS_ON:
            value = producer.inputs[0]
        elif (unchanged := _unchanged_input(producer)) is not None:
            value = unchanged
        else:
            return producer
    return None


_NEUTRAL = {"Add": 0.0, "Sub": 0.0, "Mul": 1.0, "Div": 1.0}
"""Operator -> the number that changes nothing as its second operand."""


def _unchanged_input(node: ir.Node) -> ir.Value | None:
    """Return the operand of a sum with nothing but zeros, or of a product with ones, or None."""
    if node.op_type in _NEUTRAL and len(node.inputs) == 2:
        tensor = constant_past_casts(node.inputs[1])
        if tensor is not None and np.all(read_values(tensor) == _NEUTRAL[node.op_type]):
            return node.inputs[0]
    return None


def _input_of(node: ir.Node | None, op_type: str) -> ir.Value | None:
    return node.inputs[0] if node is not None and node.op_type == op_type else None

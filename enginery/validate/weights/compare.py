"""Trace every weight of an artifact's graphs to PyTorch's parameters, and compare it in full.

A weight is traced by its name, which exporters keep unless they transpose or fold it, and by the
path of each node that reads it: `/encoder/layer.0/output/dense/MatMul` must read the weight of
`encoder.layer.0.output.dense`. So a weight that has another layer's values, or damaged ones, is
compared with the one that it should be. Only a weight without both, of a fused operator or folded
from others, is searched by its content.

How far a weight may differ depends on how it is stored:

- FP32: every bit is equal. Folded with a batch normalization: a few roundings.
- FP16, BF16: the nearest number of the type.
- INT8, FP8: half a step of its scale, plus the rounding of the scale.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.reports import UntracedWeight, WeightDifference, WeightMetrics
from enginery.core.model.source import ModelSource
from enginery.core.progress import SILENT, Progress
from enginery.passes.cast.low_precision import LOW_TYPES, cast_array, read_values
from enginery.passes.ir.graph_file import read_graph
from enginery.runtime.torch_reference import TorchReference
from enginery.validate.weights.difference import describe_difference
from enginery.validate.weights.parameters import BatchNorm, Parameters, sample_distance
from enginery.validate.weights.quantized import Calibration, QuantizedLayer, quantized_layers
from enginery.validate.weights.stored import (
    StoredWeight,
    Use,
    dequantize,
    find_uses,
    quantized_precision,
    read_plain,
    stored_tensors,
)

Array = NDArray[Any]

_LISTED = 20
"""Weights that the report lists as not traced, the largest first."""
_FEW = 16
"""Constants of integers below this size are shapes and axes, and not counted."""
_ROUNDINGS = 8
"""FP32 roundings of a folded weight: w * (g / sqrt(v + eps)) has four, in two orders."""
_ROUNDOFF = 2.0**-24
_SAME = {"fp16": 1e-3, "bf16": 8e-3, "int8": 0.03, "fp8": 0.05, "fp32": 0.0}
"""Mean relative difference of a sample at which a weight has the values of a parameter."""

_ROLES = {
    **{(op, 1): "weight" for op in ("MatMul", "Gemm", "Conv", "ConvTranspose", "PRelu")},
    **{(op, 2): "bias" for op in ("Gemm", "Conv", "ConvTranspose")},
    **{(op, 1): "weight" for op in ("MatMulInteger", "ConvInteger", "FusedMatMul")},
    **{(op, 1): "weight" for op in ("LayerNormalization", "SimplifiedLayerNormalization")},
    ("LayerNormalization", 2): "bias",
    **{
        ("BatchNormalization", i): name
        for i, name in enumerate(("weight", "bias", "running_mean", "running_var"), start=1)
    },
    ("Gather", 0): "weight",
    ("MatMul", 0): "weight",
    **{("Mul", i): "weight" for i in (0, 1)},
    **{("Add", i): "bias" for i in (0, 1)},
}
"""Operator and input -> the module's parameter that the input must be."""

_FUSED_ATTENTION = {
    ("Attention", 1): "weight",
    ("QAttention", 1): "weight",
    ("Attention", 2): "bias",
    ("QAttention", 2): "bias",
    ("MultiHeadAttention", 3): "bias",
    ("DecoderMaskedMultiHeadAttention", 3): "bias",
}
"""Inputs of ONNX Runtime's attention that hold query, key and value, side by side."""


def compare_weights(
    artifact: Artifact,
    source: ModelSource,
    *,
    trust_remote_code: bool = False,
    progress: Progress = SILENT,
) -> WeightMetrics:
    """Compare every weight of every graph with the PyTorch model's parameters.

    Args:
        artifact: the artifact that is validated.
        source: the PyTorch model.
        trust_remote_code: run Python code that comes with the model.
        progress: receives progress messages.

    Raises:
        SourceError: a graph cannot be read.
        ExportError: PyTorch cannot load the source.
        UntrustedModelError: the source needs a permission that was not given, or is malicious.
        EngineryError: a weight cannot be written to the temporary directory.
    """
    graphs = artifact.manifest.graphs
    calibration = Calibration.of(artifact)
    comparisons = []
    with (
        tempfile.TemporaryDirectory(prefix="enginery-weights-") as scratch,
        TorchReference(source, artifact.manifest, trust_remote_code=trust_remote_code) as reference,
        progress.task("weights", total=len(graphs)) as advance,
    ):
        parameters = Parameters(reference, Path(scratch))
        for record in graphs:
            model = read_graph(artifact.path / record.file)
            comparison = _GraphComparison(record.file, parameters, calibration)
            comparison.run(model)
            comparisons.append(comparison)
            advance()
    return _metrics(comparisons, parameters)


def _metrics(comparisons: Sequence[_GraphComparison], parameters: Parameters) -> WeightMetrics:
    untraced = [weight for found in comparisons for weight in found.untraced]
    elements = sum(found.compared + found.not_compared for found in comparisons)
    kinds: dict[str, int] = {}
    for found in comparisons:
        for kind, count in found.kinds.items():
            kinds[kind] = kinds.get(kind, 0) + count
    seen = {name for found in comparisons for name in found.seen}
    return WeightMetrics(
        elements=elements,
        compared=sum(found.compared for found in comparisons),
        kinds=kinds,
        differences=[difference for found in comparisons for difference in found.differences],
        untraced=sorted(untraced, key=lambda weight: -prod(weight.shape))[:_LISTED],
        unused=parameters.without(seen),
    )


@dataclass(frozen=True)
class _Expectation:
    """What a weight should be: one of several parameters, or a part of the model has no such."""

    names: list[str]
    transposed: bool | None = None
    """Whether a matrix must be transposed; None if either is fine."""
    use: Use | None = None
    """The node whose path says so; None if the weight's name does."""


class _GraphComparison:
    """The comparison of one graph."""

    def __init__(self, graph: str, parameters: Parameters, calibration: Calibration | None) -> None:
        self.graph, self.parameters, self.calibration = graph, parameters, calibration
        self.compared = self.not_compared = 0
        self.kinds: dict[str, int] = {}
        self.differences: list[WeightDifference] = []
        self.untraced: list[UntracedWeight] = []
        self.seen: set[str] = set()
        self._handled: set[str] = set()
        self._norms: dict[ir.Node, tuple[BatchNorm, str] | None] = {}

    def run(self, model: ir.Model) -> None:
        """Compare all weights of the graph and its subgraphs."""
        for layer in quantized_layers(model, self.calibration):
            self._compare_layer(layer)
        tensors = {value.name or "": (value, tensor) for value, tensor in stored_tensors(model)}
        dynamic = [
            name
            for name in tensors
            if f"{name}_scale" in tensors
            or (
                name.endswith("_quantized")
                and f"{name.removesuffix('_quantized')}_scale" in tensors
            )
        ]
        for name in dynamic:
            if name not in self._handled and quantized_precision(tensors[name][1]):
                self._compare_dynamic(name, tensors)
        for name, (value, tensor) in tensors.items():
            if name not in self._handled and tensor.size > 1 and _holds_numbers(tensor):
                self._compare_weight(read_plain(value, tensor))

    # One weight

    def _compare_weight(self, stored: StoredWeight) -> str:
        """Compare a weight; return the name of its parameter, or ''."""
        if stored.problem:
            self._add_difference(stored, "", stored.problem, count=stored.values.size)
        expectations = list(self._expectations(stored))
        if not expectations:
            return self._compare_by_content(stored)
        name = ""
        for expectation in expectations:
            name, kind, difference = self._check(stored, expectation)
            if difference is not None:
                self._add(stored, "different", difference)
                return name
        self._add(stored, kind)
        return name

    def _expectations(self, stored: StoredWeight) -> Iterator[_Expectation]:
        """Yield what the weight must be, by its name and by the path of every node that reads it."""
        size = stored.values.size
        names = self._of_size(self.parameters.named(stored.parameter_name), size)
        if names:
            # ONNX Runtime keeps the name when it transposes a weight that it quantizes.
            yield _Expectation(names, transposed=None if stored.tolerance is not None else False)
        for use in stored.uses:
            role = _ROLES.get((use.node.op_type, use.index))
            if role is None or not use.path:
                continue
            names = self._of_size(self.parameters.of_module(use.path, role), size)
            if names:
                first = use.inputs_first
                linear = self.parameters.is_linear(names[0])
                yield _Expectation(names, first if linear else None, use)

    def _of_size(self, names: list[str], size: int) -> list[str]:
        return [name for name in names if prod(self.parameters.weights[name].shape) == size]

    def _check(
        self, stored: StoredWeight, expectation: _Expectation
    ) -> tuple[str, str, WeightDifference | None]:
        """Compare a weight with what it should be: return the parameter, how they are related, and
        the difference, if there is one."""
        parameters = self.parameters
        options = [
            (name, turned)
            for name in expectation.names
            for turned in _orientations(
                stored.values.shape, parameters.weights[name].shape, expectation.transposed
            )
        ]
        name, turned = min(options, key=lambda option: self._distance(stored, *option))
        self.seen.add(name)
        expected = parameters.read(name)
        found = _turn(stored, turned, expected.shape)
        wrong = _mismatches(found, expected, roundings=self._rounding(name, expected))
        kind = _kind(stored, turned)
        if not np.any(wrong):
            return name, kind, None
        use = expectation.use
        if use is not None and use.node.op_type == "Conv":
            norm = self._norm(use, found.values if use.index == 1 else None, name)
            if norm is not None:
                folded = (
                    _scaled(expected, norm.scale)
                    if use.index == 1
                    else (expected - norm.mean) * norm.scale + norm.shift
                )
                wrong_folded = _mismatches(
                    found, folded, roundings=_folding_error(expected, norm, use.index)
                )
                self._see_norm(norm)
                if np.count_nonzero(wrong_folded) < np.count_nonzero(wrong):
                    if not np.any(wrong_folded):
                        return name, "folded", None
                    expected, wrong = folded, wrong_folded
        if use is not None and (kind := _explained(found, expected)):
            return name, kind, None
        return name, "different", self._difference(found, name, expected, wrong)

    def _rounding(self, name: str, expected: Array) -> Array | float:
        """Return the error of a weight that PyTorch computes from its parameters; 0 for others."""
        if not self.parameters.is_computed(name):
            return 0.0
        return np.asarray(np.abs(expected) * _ROUNDINGS * _ROUNDOFF)

    def _distance(self, stored: StoredWeight, name: str, turned: str) -> float:
        weight = self.parameters.weights[name]
        view = _turn_array(stored.values, turned, weight.shape)
        return self.parameters.nearest([weight], {weight.shape: [view]})[0]

    def _compare_by_content(self, stored: StoredWeight) -> str:
        """Compare a weight with the parameters of its size that are nearest to it."""
        for use in stored.uses:
            role = _FUSED_ATTENTION.get((use.node.op_type, use.index))
            if role is not None:
                return self._compare_attention(stored, use, role)
            if use.node.op_type == "Conv" and use.index == 2 and self._compare_folded_bias(stored):
                return ""
        return self._compare_content(stored, damaged=stored.values.size >= _FEW)

    def _compare_content(self, stored: StoredWeight, *, damaged: bool) -> str:
        """Compare a weight with the parameter that is most similar.

        `damaged` is True if one with fewer than half its elements changed is a difference, and not
        another weight.
        """
        name, turned, distance = self._nearest(stored)
        if name and distance < 0.5:
            expected = self.parameters.read(name)
            found = _turn(stored, turned, expected.shape)
            wrong = _mismatches(found, expected, roundings=self._rounding(name, expected))
            share = np.count_nonzero(wrong) / max(1, wrong.size)
            if not share or (damaged and share < 0.5):
                self.seen.add(name)
                difference = self._difference(found, name, expected, wrong) if share else None
                self._add(stored, "different" if share else _kind(stored, turned), difference)
                return name
        self._skip(stored)
        return ""

    def _skip(self, stored: StoredWeight) -> None:
        self.not_compared += stored.values.size
        self.untraced.append(UntracedWeight(self.graph, stored.name, stored.values.shape))

    def _nearest(self, stored: StoredWeight) -> tuple[str, str, float]:
        """Return the parameter that is most similar, how it is turned, and the distance."""
        best = ("", "", np.inf)
        for weight in self.parameters.of_size(stored.values.size):
            for turned in _orientations(stored.values.shape, weight.shape, None):
                distance = self._distance(stored, weight.name, turned)
                if distance < best[2]:
                    best = (weight.name, turned, distance)
        return best

    # Folded and fused weights

    def _norm(self, use: Use, weight: Array | None, name: str) -> BatchNorm | None:
        """Return the batch normalization that was folded into a convolution, by its scales."""
        if use.node not in self._norms:
            if weight is None:
                names = self.parameters.of_module(use.path, "weight")
                tensor = ir.convenience.get_const_tensor(use.node.inputs[1])
                if not names or tensor is None:
                    return None
                name, weight = names[0], read_values(tensor)
            expected = self.parameters.read(name)
            if weight.shape != expected.shape:
                return None
            axes = tuple(range(1, expected.ndim))
            wide = expected.astype(np.float64)
            with np.errstate(divide="ignore", invalid="ignore"):
                scale = (weight.astype(np.float64) * wide).sum(axes) / (wide * wide).sum(axes)
            norm = self.parameters.batch_norm(np.nan_to_num(scale, posinf=0, neginf=0))
            self._norms[use.node] = None if norm is None else (norm, name)
        found = self._norms[use.node]
        return found[0] if found else None

    def _see_norm(self, norm: BatchNorm) -> None:
        roles = ("weight", "bias", "running_mean", "running_var")
        self.seen |= {f"{norm.module}.{role}" for role in roles}

    def _compare_folded_bias(self, stored: StoredWeight) -> bool:
        """Compare the bias of convolutions that had none before normalizations were folded in."""
        for use in stored.uses:
            norm = self._norm(use, None, "") if use.node.op_type == "Conv" else None
            if norm is None or norm.scale.shape != stored.values.shape:
                return False
            self._see_norm(norm)
            expected = norm.shift - norm.mean * norm.scale
            error = _folding_error(np.zeros_like(expected), norm, 2)
            wrong = _mismatches(stored, expected, roundings=error)
            if np.any(wrong):
                name = f"{norm.module}.bias"
                self._add(stored, "different", self._difference(stored, name, expected, wrong))
                return True
        self._add(stored, "folded")
        return True

    def _compare_attention(self, stored: StoredWeight, use: Use, role: str) -> str:
        """Compare query, key and value, which are side by side in one weight."""
        width = stored.values.shape[-1] // 3
        names = self._attention_names(use.node, role, width)
        if not names or stored.values.shape[-1] % 3:
            self._skip(stored)
            return ""
        different = None
        for index, name in enumerate(names):
            part = _part(stored, slice(index * width, (index + 1) * width))
            if not name:  # this model has no such bias
                wrong = part.values != 0
                if np.any(wrong):
                    zeros = np.zeros_like(part.values)
                    different = self._difference(part, stored.name, zeros, wrong)
                continue
            if prod(self.parameters.weights[name].shape) != part.values.size:
                continue
            linear = self.parameters.is_linear(name)
            _, _, found = self._check(part, _Expectation([name], linear))
            different = different or found
        self._add(stored, "different" if different else "joined", different)
        return ""

    def _attention_names(self, node: ir.Node, role: str, width: int) -> list[str]:
        """Return the parameters of query, key and value; '' for a bias that does not exist.

        The operator has no path, but the layer that reads its output has: it is a neighbour of
        query, key and value in the same module.
        """
        for path in _paths_behind(node):
            words = path.split(".")
            for end in range(len(words) - 1, 0, -1):
                module = ".".join(words[:end])
                for full in self._modules(module):
                    names = self._query_key_value(full, role)
                    if names:
                        return names
        return []

    def _modules(self, module: str) -> Iterator[str]:
        yield module
        if not any(True for _ in self.parameters.below(module)):
            for name in self.parameters.weights:
                at = f".{name}".find(f".{module}.")
                if at >= 0:
                    yield name[: at + len(module)]
                    return

    def _query_key_value(self, module: str, role: str) -> list[str]:
        weights = [n for n in self.parameters.below(module) if n.endswith(".weight")]
        found = []
        for letter in "qkv":
            fit = [n for n in weights if n.split(".")[-2].startswith(letter)]
            if len(fit) != 1:
                return []
            found.append(fit[0])
        if role == "weight":
            return found
        biases = [f"{name.removesuffix('.weight')}.bias" for name in found]
        return [name if name in self.parameters.weights else "" for name in biases]

    # Quantized weights

    def _compare_layer(self, layer: QuantizedLayer) -> None:
        """Compare a layer that `quantize` made."""
        self._handled |= {layer.weight.name, *layer.names}
        name = self._compare_weight(layer.weight)
        if layer.problem:
            self._add_difference(layer.weight, name, layer.problem)
        if layer.delta is None or not name:
            if layer.bias is not None:  # nothing says how quantizing has changed it
                self._handled.add(layer.bias.name)
                self._compare_content(layer.bias, damaged=False)
            return
        weight = self.parameters.read(name)
        turned = _best_turn(layer.weight.values, weight)
        matrix = _turn_back(weight, turned, layer.weight.values.shape)
        norm = self._norms.get(layer.node)
        bias_name = f"{name.removesuffix('.weight')}.bias"
        channels = layer.weight.values.shape[layer.output_axis]
        bias = np.zeros(channels, np.float32)
        if bias_name in self.parameters.weights:
            bias = self.parameters.read(bias_name).reshape(-1).astype(np.float32)
        if norm is not None and norm[0].scale.shape == bias.shape:
            folded = layer.weight.values.astype(np.float64)
            wide = _scaled(weight, norm[0].scale)
            if np.abs(folded - wide).sum() < np.abs(folded - weight).sum():
                bias = (bias - norm[0].mean) * norm[0].scale + norm[0].shift
        shift = layer.bias_shift(matrix)
        expected = bias + shift + layer.delta
        stored = layer.bias or StoredWeight(
            f"{layer.node.name}/bias", "fp32", np.zeros(channels), np.zeros(channels)
        )
        if stored.values.shape != expected.shape:
            return
        magnitude = np.abs(bias) + np.abs(shift) + np.abs(layer.delta)
        wrong = _mismatches(stored, expected, roundings=_ROUNDINGS * _ROUNDOFF * magnitude)
        if not np.any(wrong):
            if layer.bias is not None:
                self._handled.add(layer.bias.name)
                self.seen.add(bias_name)
                self._add(layer.bias, "corrected")
            return
        if layer.bias is not None:
            other, _, distance = self._nearest(
                replace(stored, values=stored.values - shift - layer.delta)
            )
            if bias_name not in self.parameters.weights and distance < 1e-3:
                self._handled.add(layer.bias.name)
                self.seen.add(other)
                self._add(layer.bias, "corrected")
                return
            self._handled.add(layer.bias.name)
        difference = self._difference(stored, bias_name, expected, wrong)
        correction = "its calibrated correction included"
        self._add(
            stored, "different", replace(difference, problem=f"{difference.problem}, {correction}")
        )

    def _compare_dynamic(
        self, name: str, tensors: dict[str, tuple[ir.Value, ir.TensorProtocol]]
    ) -> None:
        """Compare a weight that ONNX Runtime quantized, with its scale and zero point."""
        base = name.removesuffix("_quantized")
        value, tensor = tensors[name]
        scale = read_values(tensors[f"{base}_scale"][1])
        zero = tensors.get(f"{base}_zero_point")
        raw = read_values(tensor)
        uses = list(find_uses(value))
        last = any(use.inputs_first is not None for use in uses)
        stored = dequantize(
            name,
            quantized_precision(tensor),
            raw,
            scale,
            read_values(zero[1]) if zero else np.zeros((), raw.dtype),
            raw.ndim - 1 if last else 0,
        )
        stored.uses = uses
        self._handled |= {name, f"{base}_scale", f"{base}_zero_point"}
        self._compare_weight(stored)

    # Results

    def _add(
        self, stored: StoredWeight, kind: str, difference: WeightDifference | None = None
    ) -> None:
        self.compared += stored.values.size
        self.kinds[kind] = self.kinds.get(kind, 0) + stored.values.size
        if difference is not None:
            self.differences.append(difference)

    def _add_difference(
        self, stored: StoredWeight, name: str, problem: str, count: int = 0
    ) -> None:
        self.differences.append(
            WeightDifference(
                graph=self.graph,
                weight=stored.name,
                parameter=name,
                elements=stored.values.size,
                differing=count,
                max_abs=float("nan"),
                cosine=float("nan"),
                problem=problem,
            )
        )

    def _difference(
        self, found: StoredWeight, name: str, expected: Array, wrong: Array
    ) -> WeightDifference:
        other, turned, distance = self._nearest(found)
        same = other if other != name and distance <= _SAME[found.precision] else ""
        return describe_difference(self.graph, found, name, expected, wrong, holds=same)


# Orientation and exact comparison


def _orientations(
    stored: tuple[int, ...], parameter: tuple[int, ...], transposed: bool | None
) -> list[str]:
    """Return how a weight may have to be turned to get the parameter's shape."""
    if len(parameter) == 2 and len(stored) == 2:
        options = []
        if stored == parameter and not transposed:
            options.append("as is")
        if stored == parameter[::-1] and (transposed is not False or stored != parameter):
            options.append("transposed")
        if options:
            return options
    return ["as is"] if stored == parameter else ["reshaped"]


def _turn_array(array: Array, turned: str, shape: tuple[int, ...]) -> Array:
    if turned == "transposed":
        return array.T
    return array if array.shape == shape else array.reshape(shape)


def _turn(stored: StoredWeight, turned: str, shape: tuple[int, ...]) -> StoredWeight:
    """Return a weight with the parameter's shape."""
    tolerance = stored.tolerance
    if tolerance is not None:
        tolerance = np.broadcast_to(tolerance, stored.values.shape)
        tolerance = _turn_array(tolerance, turned, shape)
    return replace(
        stored,
        raw=_turn_array(stored.raw, turned, shape),
        values=_turn_array(stored.values, turned, shape),
        tolerance=tolerance,
    )


def _best_turn(values: Array, weight: Array) -> str:
    options = _orientations(values.shape, weight.shape, None)
    return min(
        options,
        key=lambda turned: sample_distance(_turn_array(values, turned, weight.shape), weight),
    )


def _turn_back(weight: Array, turned: str, shape: tuple[int, ...]) -> Array:
    return weight.T if turned == "transposed" else weight.reshape(shape)


def _part(stored: StoredWeight, columns: slice) -> StoredWeight:
    """Return some columns of a weight."""
    tolerance = stored.tolerance
    if tolerance is not None:
        tolerance = np.broadcast_to(tolerance, stored.values.shape)[..., columns]
    return replace(
        stored,
        raw=stored.raw[..., columns],
        values=stored.values[..., columns],
        tolerance=tolerance,
    )


def _mismatches(stored: StoredWeight, expected: Array, *, roundings: Array | float = 0.0) -> Array:
    """Return which elements differ by more than their type explains.

    Args:
        stored: the weight, with the shape of `expected`.
        expected: the values that it should have.
        roundings: absolute error of `expected` itself.
    """
    exact = not np.any(roundings)
    if stored.tolerance is not None:
        with np.errstate(invalid="ignore"):
            return ~(np.abs(stored.values - expected) <= stored.tolerance + roundings)
    if stored.precision in LOW_TYPES and expected.dtype.kind == "f":
        rounded = cast_array(expected, LOW_TYPES[stored.precision])
        with np.errstate(over="ignore"):
            plain = expected.astype(stored.raw.dtype)
        wrong = ~(_equal(stored.raw, rounded) | _equal(stored.raw, plain))
        if not exact:
            step = np.spacing(np.abs(rounded)).astype(np.float32)
            wrong &= ~(np.abs(stored.values - expected) <= step + roundings)
        return wrong
    if exact:
        return ~_equal(stored.raw, expected)
    return ~(np.abs(stored.values - expected) <= roundings)


def _equal(one: Array, other: Array) -> Array:
    with np.errstate(invalid="ignore"):
        return (one == other) | ((one != one) & (other != other))  # NaN equals NaN


def _scaled(weight: Array, scale: Array) -> Array:
    return np.asarray(weight * scale.reshape(-1, *[1] * (weight.ndim - 1)))


def _folding_error(expected: Array, norm: BatchNorm, index: int) -> Array:
    """Return the rounding error of a weight or bias with a batch normalization folded in."""
    if index == 1:
        return np.abs(_scaled(expected, norm.scale)) * _ROUNDINGS * _ROUNDOFF
    terms = (np.abs(expected) + np.abs(norm.mean)) * np.abs(norm.scale) + np.abs(norm.shift)
    return np.asarray(terms * _ROUNDINGS * _ROUNDOFF)


def _explained(found: StoredWeight, expected: Array) -> str:
    """Return how the exporter changed a weight before it stored it, or ''.

    Modules may scale a weight by channel (weight standardization) or add 1 to it (Gemma's norms),
    and exporters compute that in advance.
    """
    values = found.values.astype(np.float64)
    wide = expected.astype(np.float64)
    tolerance = 0.0 if found.tolerance is None else found.tolerance
    if found.precision in LOW_TYPES:
        tolerance = np.abs(values) * 2.0**-8
    if wide.ndim == 1:
        error = np.abs(values - (1.0 + wide))
        return "folded" if np.all(error <= tolerance + 2.0**-22 * (1 + np.abs(wide))) else ""
    flat, other = wide.reshape(len(wide), -1), values.reshape(len(wide), -1)
    if flat.shape[1] < 3 or wide.ndim < 3:
        return ""
    mean, other_mean = flat.mean(1, keepdims=True), other.mean(1, keepdims=True)
    norm = ((flat - mean) ** 2).sum(1, keepdims=True)
    if not np.all(norm):
        return ""
    slope = ((flat - mean) * (other - other_mean)).sum(1, keepdims=True) / norm
    if np.count_nonzero(np.abs(slope - 1) < 1e-4) * 2 > len(slope):
        return ""  # most channels are as they were: the others are damaged
    fit = (flat - mean) * slope + other_mean
    slack = np.reshape(np.broadcast_to(tolerance, values.shape), fit.shape)
    scale = np.abs(other).max()
    return "scaled" if np.all(np.abs(other - fit) <= slack + 1e-5 * scale) else ""


def _kind(stored: StoredWeight, turned: str) -> str:
    if stored.tolerance is not None:
        return "quantized"
    return f"{stored.precision}" if stored.precision in LOW_TYPES else turned


def _holds_numbers(tensor: ir.TensorProtocol) -> bool:
    kind = tensor.dtype
    if kind in (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE):
        return True
    return kind in (ir.DataType.INT64, ir.DataType.INT32) and tensor.size >= _FEW


def _paths_behind(node: ir.Node, depth: int = 8) -> Iterator[str]:
    """Yield the paths of modules that read a node's outputs, the nearest first."""
    level = [node]
    for _ in range(depth):
        level = [use.node for one in level for out in one.outputs for use in out.uses()][:32]
        for one in level:
            if path := Use(one, 0).path:
                yield path

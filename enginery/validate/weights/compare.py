"""Trace every weight of an artifact's graphs to the reference's, and compare it in full.

The reference's weights are PyTorch's parameters, or those of the .onnx file that was imported.

A weight is traced by its name, which exporters keep unless they transpose or fold it, and by the
path of each node that reads it: `/encoder/layer.0/output/dense/MatMul` must read the weight of
`encoder.layer.0.output.dense`. So a weight with another layer's values, or damaged ones, is
compared with the one that it should be. Only a weight without both is searched by its content.

How far a weight may differ depends on how it is stored:

- FP32: every element is equal. With a batch normalization folded in: eight roundings.
- FP16, BF16: the nearest number of the type.
- INT8, FP8: half a step of its scale, and what rounding the scale to FP16 has clipped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import nan, prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from enginery.core.artifact.artifact import Artifact
from enginery.core.progress import SILENT, Progress
from enginery.passes.cast.low_precision import LOW_TYPES, read_values
from enginery.passes.ir.graph_file import read_graph, write_graph
from enginery.passes.qdq.layer_errors import FloatLayer, add_float_layers
from enginery.reports.weights import UntracedWeight, WeightDifference, WeightMetrics
from enginery.runtime.decoder_graphs import has_fixed_cache
from enginery.validate.weights.difference import describe_difference
from enginery.validate.weights.elements import (
    columns,
    explain,
    mismatches,
    orientations,
    turn,
    turn_array,
)
from enginery.validate.weights.parameters import (
    BatchNorm,
    Parameters,
    WeightSource,
    sample_distance,
)
from enginery.validate.weights.quantized import (
    Calibration,
    QuantizedLayer,
    joining_pairs,
    quantized_layers,
)
from enginery.validate.weights.stored import (
    QuantizedValues,
    StoredWeight,
    Use,
    as_rounded,
    constant_past_casts,
    dequantize,
    find_uses,
    is_counted,
    is_key_bias,
    paths_behind,
    quantized_precision,
    read_plain,
    stored_tensors,
)
from enginery.validate.weights.unrounded import (
    ExactLayer,
    ExactTable,
    write_in_fp32,
    write_unquantized,
)

Array = NDArray[Any]
Tensors = dict[str, tuple[ir.Value, ir.TensorProtocol]]

_LISTED = 20
"""Weights that the report lists as not traced, the largest first."""
_FEW = 16
"""Elements from which on a weight without name and path is damaged, and not another constant, if
most of its elements are those of a parameter."""
_ROUNDINGS = 8 * 2.0**-24
"""Relative error of a folded weight: w * (g / sqrt(v + eps)) has four roundings, in PyTorch and
here."""
_NOT_EXACT = ("different", "scaled")
"""Kinds of weights whose values are not the reference's."""
_MOST = 0.99
"""Share of the elements that must be the reference's, so that the others' rounding means little."""
_SAME = {"fp16": 1e-3, "bf16": 8e-3, "int8": 0.03, "fp8": 0.05, "fp32": 0.0}
"""Mean relative difference of a sample up to which a weight has the values of a parameter."""

_CONVOLUTION_BIASES = (("Conv", 2), ("Add", 0), ("Add", 1))
"""Where a bias may be that folding a batch normalization has added. ONNX Runtime adds it with an
Add when it quantizes a convolution."""

_FUSED_ATTENTION = {
    ("Attention", 1): "weight",
    ("QAttention", 1): "weight",
    ("Attention", 2): "bias",
    ("QAttention", 2): "bias",
    ("MultiHeadAttention", 3): "bias",
}
"""Inputs of ONNX Runtime's operators that hold query, key and value side by side."""


def compare_weights(
    artifact: Artifact,
    open_weights: Callable[[], WeightSource],
    *,
    unrounded: Path | None = None,
    layers: Path | None = None,
    progress: Progress = SILENT,
) -> WeightMetrics:
    """Compare every weight of every graph with the reference's.

    Args:
        artifact: the artifact that is validated.
        open_weights: opens the reference's weights.
        unrounded: directory to write each graph to without the rounding of its precision, under the
            graph's file name. It is left out if that precision is FP32, or if weights were not
            traced. Quantized layers that the calibration did not record stay as they are.
        layers: directory to write each statically quantized graph to with `add_float_layers`.
        progress: receives progress messages.

    Raises:
        SourceError: a graph cannot be read.
        ExportError: PyTorch cannot load the source.
        UntrustedModelError: the source needs a permission that was not given, or is malicious.
        EngineryError: a weight cannot be written to the temporary directory.
    """
    # One with a cache of fixed size has the weights of the decoder beside it, and tables made of
    # them; it is compared by what it decodes.
    graphs = [record for record in artifact.manifest.graphs if not has_fixed_cache(record)]
    calibration = Calibration.of(artifact)
    comparisons = []
    with (
        open_weights() as reference,
        progress.task("weights", total=len(graphs)) as advance,
    ):
        parameters = Parameters(reference)
        for record in graphs:
            comparison = _GraphComparison(
                record.file, artifact.manifest.float_precision, parameters, calibration
            )
            model = read_graph(artifact.path / record.file)
            comparison.run(model)
            if layers is not None:
                comparison.write_layers(model, layers / record.file)
            if unrounded is not None:
                comparison.write_unrounded(model, unrounded / record.file)
            comparisons.append(comparison)
            advance()
    return _metrics(comparisons, parameters)


def _metrics(comparisons: Sequence[_GraphComparison], parameters: Parameters) -> WeightMetrics:
    kinds = sum((comparison.kinds for comparison in comparisons), Counter[str]())
    untraced = [weight for comparison in comparisons for weight in comparison.untraced]
    untraced_elements = sum(prod(weight.shape) for weight in untraced)
    unused = parameters.without({name for comparison in comparisons for name in comparison.seen})
    absent = parameters.absent(unused)
    return WeightMetrics(
        elements=kinds.total() + untraced_elements,
        compared=kinds.total(),
        kinds=dict(kinds),
        differences=[
            difference for comparison in comparisons for difference in comparison.differences
        ],
        untraced=sorted(untraced, key=lambda weight: -prod(weight.shape))[:_LISTED],
        unused=unused,
        absent=sorted(absent)[:_LISTED],
        absent_elements=sum(absent.values()),
        lost=list(parameters.lost),
    )


@dataclass(frozen=True)
class _Expectation:
    """What a weight must be, because of its name, or because of a node that reads it."""

    names: list[str]
    """The parameters that can be meant. Empty for the bias of a convolution without one, which
    folding a batch normalization has added."""
    transposed: bool | None = None
    """Whether a square matrix is transposed; None if both may be."""
    use: Use | None = None
    """The node; None if the weight's name says it, unless it is a convolution's."""


@dataclass(frozen=True)
class _Match:
    """What the comparison of one weight has found."""

    name: str = ""
    """The parameter; empty if the weight was not traced, or a normalization has added it."""
    kind: str = ""
    """How an equal weight is stored."""
    difference: WeightDifference | None = None
    exact: Callable[[], Array] | None = None
    """Read the reference's FP32 values, with the shape that the weight is stored in."""


class _GraphComparison:
    """The comparison of one graph."""

    def __init__(
        self, graph: str, precision: str, parameters: Parameters, calibration: Calibration | None
    ) -> None:
        self.graph, self.precision = graph, precision
        self.parameters, self.calibration = parameters, calibration
        self.kinds: Counter[str] = Counter()
        """Elements that were compared, by how they are stored."""
        self.differences: list[WeightDifference] = []
        self.untraced: list[UntracedWeight] = []
        self.seen: set[str] = set()
        """The parameters that the graph has."""
        self.exact: dict[str, Callable[[], Array]] = {}
        """Name of a weight in FP16 or BF16 -> its FP32 values."""
        self.layers: list[ExactLayer] = []
        """The quantized layers whose weight and calibration are known."""
        self.float_layers: dict[str, FloatLayer] = {}
        """The quantized layers whose weight and bias in FP32 are known, by name."""
        self.joining: list[ir.Node] = []
        """DequantizeLinear nodes that no layer reads, and whose calibration is known."""
        self.tables: list[ExactTable] = []
        """The quantized embedding tables whose parameter is known."""
        self.untraced_layers = 0
        """The number of quantized layers whose weight is not known."""
        self.quantized = False
        self._handled: set[str] = set()
        self._dequantized: dict[str, Array] = {}
        """Weights of quantized convolutions by the module's path."""
        self._norms: dict[str, BatchNorm | None] = {}

    def run(self, model: ir.Model) -> None:
        """Compare all weights of the graph and its subgraphs."""
        tensors = {value.name or "": (value, tensor) for value, tensor in stored_tensors(model)}
        self.quantized = any(quantized_precision(tensor) for _, tensor in tensors.values())
        for name, (value, tensor) in tensors.items():
            if quantized_precision(tensor) and self.parameters.has_integers(name):
                self._handled.add(name)  # the source file is quantized itself
                self._compare(read_plain(value, tensor))
        # Layers and pairs first: their scales, zero points and smoothing would be untraced weights.
        layers = list(quantized_layers(model, self.calibration))
        for layer in layers:
            if layer.weight.name not in self._handled:
                self._compare_layer(layer)
        for pair in joining_pairs(model, self.calibration, layers):
            self._handled |= set(pair.names)
            if pair.problem:
                self.differences.append(
                    WeightDifference(self.graph, pair.names[0], "", 1, 0, nan, nan, pair.problem)
                )
            elif pair.recorded:
                self.joining.append(pair.dequantizer)
        for name, (_, tensor) in tensors.items():
            scaled = f"{name.removesuffix('_quantized')}_scale" in tensors
            if scaled and name not in self._handled and quantized_precision(tensor):
                self._compare_dynamic(name, tensors)
        for name, (value, tensor) in tensors.items():
            if name in self._handled or not is_counted(tensor):
                continue
            if quantized_precision(tensor):  # its scale is not known
                self._leave(name, tuple(tensor.shape.numpy()), tensor.dtype.numpy().name)
            else:
                self._compare(as_rounded(read_plain(value, tensor), self.precision))

    def write_layers(self, model: ir.Model, path: Path) -> None:
        """Write the graph with each quantized layer in FP32 beside it, if some are known.

        Args:
            model: the graph that was compared; nodes that nothing reads are added.
            path: where to write the ONNX file.
        """
        if self.float_layers:
            add_float_layers(model, list(self.float_layers.values()))
            path.parent.mkdir(parents=True, exist_ok=True)
            write_graph(model, path, max_inline_bytes=0)

    def write_unrounded(self, model: ir.Model, path: Path) -> None:
        """Write the graph without the rounding of its precision, if its weights are known.

        Args:
            model: the graph that was compared; it is changed.
            path: where to write the ONNX file.
        """
        exact = self.kinds.total() - sum(self.kinds[kind] for kind in _NOT_EXACT)
        every = self.kinds.total() + sum(prod(weight.shape) for weight in self.untraced)
        # A layer that stayed quantized would hide the faults of the others.
        if self.layers and not self.untraced_layers:
            write_unquantized(model, self.layers, self.joining, self.tables, path)
        elif self.precision in LOW_TYPES and not self.quantized and exact >= _MOST * every:
            write_in_fp32(model, LOW_TYPES[self.precision], self.exact, path)

    def _compare(self, stored: StoredWeight) -> _Match:
        """Compare one weight, and count it."""
        expectations = list(self._expectations(stored))
        if not expectations:
            return self._compare_content(stored, damaged=stored.values.size >= _FEW)
        match = _Match()
        for expectation in expectations:
            match = self._check(stored, expectation)
            if match.difference is not None:
                break
        self._count(stored, match)
        return match

    def _expectations(self, stored: StoredWeight) -> Iterator[_Expectation]:
        """Yield what a weight must be: by its name, and by every node that reads it."""
        if names := self._of_size(self.parameters.named(stored.parameter_name), stored):
            # ONNX Runtime keeps the name when it transposes a weight that it quantizes, and torch's
            # dynamo exporter when it folds a batch normalization into a convolution.
            conv = next((use for use in stored.uses if use.node.op_type == "Conv"), None)
            yield _Expectation(names, None if stored.tolerance is not None else False, conv)
        for use in stored.uses:
            op = (use.node.op_type, use.index)
            if op in _FUSED_ATTENTION:
                continue
            module = self._module(use)
            role = use.role if module else ""
            names = self._of_size(self.parameters.of_module(module, role), stored)
            if role and names:
                yield _Expectation(
                    names, self.parameters.is_transposed(names[0], use.inputs_first), use
                )
            elif op in _CONVOLUTION_BIASES and self._norm(use) is not None:
                yield _Expectation([], use=use)

    def _of_size(self, names: list[str], stored: StoredWeight) -> list[str]:
        weights = self.parameters.weights
        return [name for name in names if prod(weights[name].shape) == stored.values.size]

    def _check(self, stored: StoredWeight, expectation: _Expectation) -> _Match:
        """Compare a weight with the parameter that its name or its node requires."""
        use, shape = expectation.use, stored.values.shape
        if not expectation.names and use is not None:
            self._see(self._norm(use))
            return self._check_folded(stored, use, "", np.zeros(shape, np.float32), "as is")
        name, turned = self._best(stored, expectation.names, expectation.transposed)
        expected = self.parameters.read(name)
        self.seen.add(name)
        actual = turn(stored, turned, expected.shape)
        wrong = mismatches(actual, expected, self._error(name, expected))
        exact = partial(self._read_turned, name, turned, shape)
        fits = not np.any(wrong)
        if use is not None and self._norm(use) is not None and not _is_normalized(use.node):
            # A weight that is rounded may fit both with and without a normalization near 1.
            folded = self._check_folded(actual, use, name, expected, turned)
            # Whichever explains more of the elements.
            if folded.difference is None or folded.difference.differing < np.count_nonzero(wrong):
                self._see(self._norm(use))
                return folded
        if fits:
            return _Match(name, _kind(actual, turned), exact=exact)
        pointwise = use is not None and use.node.op_type in ("Mul", "Add")
        frozen = self._check_frozen(actual, name, turned, shape) if pointwise else None
        if frozen is not None:
            return frozen
        # Exporters fold factors of channels into weights; they are not known, the direction is.
        if use is not None and (kind := explain(actual, expected)):
            return _Match(name, kind)
        # The softmax cancels a bias of an attention's keys.
        if np.all(np.isfinite(actual.values)) and any(is_key_bias(use) for use in actual.uses):
            return _Match(name, "of no effect")
        return _Match(name, "different", self._difference(actual, name, expected, wrong), exact)

    def _read_turned(self, name: str, turned: str, shape: tuple[int, ...]) -> Array:
        """Read a parameter, and turn it as a weight is stored."""
        return turn_array(self.parameters.read(name), turned, shape)

    def _best(
        self, stored: StoredWeight, names: Sequence[str], transposed: bool | None
    ) -> tuple[str, str]:
        """Return the most similar of some parameters, and how to turn the weight."""
        weights = self.parameters.weights
        options = [
            (name, turned)
            for name in names
            for turned in orientations(stored.values.shape, weights[name].shape, transposed)
        ]
        return min(options, key=lambda option: self._distance(stored, *option))

    def _distance(self, stored: StoredWeight, name: str, turned: str) -> float:
        weight = self.parameters.weights[name]
        return sample_distance(turn_array(stored.values, turned, weight.shape), weight)

    def _error(self, name: str, expected: Array) -> Array | None:
        """Return the error of a weight that PyTorch computes from its parameters, or None."""
        return np.abs(expected) * _ROUNDINGS if self.parameters.is_computed(name) else None

    def _compare_content(self, stored: StoredWeight, *, damaged: bool) -> _Match:
        """Compare a weight with the parameter that is most similar, and count it.

        With `damaged`, a weight of which less than half differs is a difference; without, it is
        another one, and not traced.
        """
        for use in stored.uses:
            if role := _FUSED_ATTENTION.get((use.node.op_type, use.index)):
                return self._compare_attention(stored, use.node, role)
        if names := [weight.name for weight in self.parameters.of_size(stored.values.size)]:
            name, turned = self._best(stored, names, None)
            expected = self.parameters.read(name)
            actual = turn(stored, turned, expected.shape)
            wrong = mismatches(actual, expected, self._error(name, expected))
            count = np.count_nonzero(wrong)
            if not count or (damaged and 2 * count < wrong.size):
                self.seen.add(name)
                difference = self._difference(actual, name, expected, wrong) if count else None
                kind = "different" if count else _kind(actual, turned)
                exact = partial(self._read_turned, name, turned, stored.values.shape)
                return self._count(stored, _Match(name, kind, difference, exact))
        self._leave(stored.name, stored.values.shape, stored.raw.dtype.name)
        return _Match()

    # Batch normalizations, folded into convolutions

    def _check_folded(
        self, actual: StoredWeight, use: Use, name: str, expected: Array, turned: str
    ) -> _Match:
        """Compare the weight or the bias of a convolution with a normalization folded into it."""
        norm = self._norm(use)
        assert norm is not None  # noqa: S101  the callers have checked it
        fold = norm.fold_weight if expected.ndim > 1 else norm.fold_bias
        folded, error = fold(expected)
        wrong = mismatches(actual, folded, error * np.float32(_ROUNDINGS))

        def exact() -> Array:
            plain = (
                self.parameters.read(name) if name else np.zeros(actual.values.shape, np.float32)
            )
            return turn_array(fold(plain)[0], turned, actual.values.shape)

        if np.any(wrong):
            parameter = name or f"{norm.module}.bias"
            return _Match(
                parameter, "different", self._difference(actual, parameter, folded, wrong), exact
            )
        return _Match(name, "folded", exact=exact)

    def _check_frozen(
        self, actual: StoredWeight, name: str, turned: str, shape: tuple[int, ...]
    ) -> _Match | None:
        """Compare with the factor or the summand that a frozen normalization amounts to.

        Returns:
            None if the parameter is not of a batch normalization, or the values differ.
        """
        module, _, role = name.rpartition(".")
        norm = self.parameters.norm(module)
        if norm is None or role not in ("weight", "bias"):
            return None
        scale = (norm.scale, np.abs(norm.scale))
        folded, error = scale if role == "weight" else norm.fold_bias(np.zeros_like(norm.mean))
        if np.any(mismatches(actual, folded, error * np.float32(_ROUNDINGS))):
            return None
        self._see(norm)
        return _Match(name, "folded", exact=lambda: turn_array(folded, turned, shape))

    def _see(self, norm: BatchNorm | None) -> None:
        roles = ("weight", "bias", "running_mean", "running_var")
        self.seen |= {f"{norm.module}.{role}" for role in roles} if norm is not None else set()

    def _norm(self, use: Use) -> BatchNorm | None:
        """Return the batch normalization that was folded into a convolution, by its scales."""
        path, node = self._module(use), use.node
        if path not in self._norms:
            values = self._dequantized.get(path)
            if values is None and node.op_type == "Conv":
                tensor = constant_past_casts(node.inputs[1])
                values = None if tensor is None else read_values(tensor)
            if values is None:
                return None
            names = self.parameters.of_module(path, "weight")
            norm = self.parameters.batch_norm(values, names[0]) if names else None
            self._norms[path] = norm
        return self._norms[path]

    def _module(self, use: Use) -> str:
        """Return the path of the module that a node belongs to.

        A convolution into which torch's dynamo exporter has folded a batch normalization has the
        path of the normalization, but its weight keeps its name.
        """
        if use.node.op_type == "Conv" and use.node.inputs[1] is not None:
            name = use.node.inputs[1].name or ""
            if name.endswith(".weight") and self.parameters.named(name):
                return name.removesuffix(".weight")
        return use.path

    # Query, key and value in one weight

    def _compare_attention(self, stored: StoredWeight, node: ir.Node, role: str) -> _Match:
        """Compare the parts of a weight of a fused attention.

        The operator has no path, but the layer behind it has: it is a neighbour of query, key and
        value in the same module.
        """
        width, remainder = divmod(stored.values.shape[-1], 3)
        names: list[str] = []
        for path in paths_behind(node):
            if names := self.parameters.query_key_value(path, role):
                break
        if not names or remainder:
            self._leave(stored.name, stored.values.shape, stored.raw.dtype.name)
            return _Match()
        parts = [
            self._compare_part(columns(stored, index * width, (index + 1) * width), name)
            for index, name in enumerate(names)
        ]
        different = next((part.difference for part in parts if part.difference), None)
        if different is not None:
            return self._count(stored, _Match(kind="different", difference=different))
        readers = [part.exact for part in parts if part.exact]

        def exact() -> Array:
            return np.concatenate([read() for read in readers], axis=-1)

        every = exact if len(readers) == len(parts) else None
        return self._count(stored, _Match(kind="joined", exact=every))

    def _compare_part(self, part: StoredWeight, name: str) -> _Match:
        """Compare the query, the key or the value of a fused attention."""
        shape = part.values.shape
        if name in self.parameters.weights:
            if self._of_size([name], part):
                return self._check(part, _Expectation([name], self.parameters.is_linear(name)))
            # A parameter of another size: nothing equals NaN, so every element differs.
            expected = np.full(shape, nan)
        else:  # this layer has no bias
            expected = np.zeros(shape, np.float32)
        if np.any(wrong := mismatches(part, expected)):
            return _Match(name, difference=self._difference(part, name, expected, wrong))
        return _Match(name, exact=lambda: np.zeros(shape, np.float32))

    # Quantized weights

    def _compare_layer(self, layer: QuantizedLayer) -> None:
        """Compare a layer that `quantize` made, with its scales and its corrected bias."""
        self._handled |= {layer.weight.name, *layer.names}
        if layer.node.op_type == "Conv":
            self._dequantized[Use(layer.node, 1).path] = layer.weight.values
        match = self._compare_dequantized(layer.weight)
        if layer.problem:
            self._report(layer.weight, match.name, layer.problem)
        # Without both the exact weight and the calibration, there is nothing to compute in FP32.
        if match.exact is None:
            self.untraced_layers += 1
        elif layer.recorded:
            self.layers.append(ExactLayer(layer, match.exact))
        if layer.bias is not None:
            self._handled.add(layer.bias.name)
        if not layer.recorded or not match.name:
            if layer.bias is not None:  # nothing says how quantizing has changed it
                self._compare_content(layer.bias, damaged=False)
            return
        bias = self._compare_bias(layer, match.name)
        if match.exact is not None and bias.exact is not None and layer.source is not None:
            self.float_layers[layer.name] = FloatLayer(
                layer.name,
                layer.node,
                layer.source,
                layer.output,
                layer.weight.values.shape,
                match.exact,
                bias.exact(),
            )

    def _compare_bias(self, layer: QuantizedLayer, parameter: str) -> _Match:
        """Compare the corrected bias of a layer that has the weight of a parameter, and count it.

        The reference's bias is zero if there is none.
        """
        _, turned = self._best(layer.weight, [parameter], None)
        weight = self._read_turned(parameter, turned, layer.weight.values.shape)
        bias = layer.uncorrected_bias(weight, _ROUNDINGS)
        bias_name = f"{parameter.removesuffix('.weight')}.bias"
        named = self._of_size([bias_name] if bias_name in self.parameters.weights else [], bias)
        zeros = np.zeros(bias.values.shape, np.float32)
        use = Use(layer.node, 2)
        if named:
            expectation = _Expectation(named, use=use)
        elif self._norm(use) is not None:
            expectation = _Expectation([], use=use)
        elif not np.any(mismatches(bias, zeros)):
            return self._count(bias, _Match(kind="quantized", exact=lambda: zeros))
        else:
            return self._compare_content(bias, damaged=True)
        match = self._check(bias, expectation)
        if difference := match.difference:
            problem = f"{difference.problem}, without its calibrated correction"
            match = replace(match, difference=replace(difference, problem=problem))
        return self._count(bias, match)

    def _compare_dynamic(self, name: str, tensors: Tensors) -> None:
        """Compare a weight that ONNX Runtime quantized, with its scale and zero point."""
        base = name.removesuffix("_quantized")
        value, tensor = tensors[name]
        raw = read_values(tensor)
        zero = tensors.get(f"{base}_zero_point")
        uses = list(find_uses(value))
        is_product = any(use.inputs_first is not None for use in uses)
        # One scale for each column of a product, channel of a convolution, or row of a table.
        axis = raw.ndim - 1 if is_product else 0
        scales = read_values(tensors[f"{base}_scale"][1])
        zeros = read_values(zero[1]) if zero else np.zeros((), raw.dtype)
        if not {scales.size, zeros.size} <= {1, raw.shape[axis] if raw.ndim else 1}:
            return  # another tensor, of a similar name
        stored = dequantize(
            name, quantized_precision(tensor), QuantizedValues(raw, scales, zeros, axis)
        )
        stored.uses = uses
        if raw.ndim > 2:
            self._dequantized |= {use.path: stored.values for use in uses}
        self._handled |= {name, f"{base}_scale", f"{base}_zero_point"}
        match = self._compare_dequantized(stored)
        if match.exact is not None and all(use.node.op_type == "Gather" for use in uses):
            self.tables.append(ExactTable(value, tensors[f"{base}_scale"][0], match.exact))

    def _compare_dequantized(self, stored: StoredWeight) -> _Match:
        match = self._compare(stored)
        if stored.problem:
            self._report(stored, match.name, stored.problem)
        return match

    # Results

    def _count(self, stored: StoredWeight, match: _Match) -> _Match:
        self.kinds[match.kind] += stored.values.size
        if match.difference is not None:
            self.differences.append(match.difference)
        # Quantized weights are restored layer by layer, see `layers`.
        elif match.exact is not None and stored.tolerance is None:
            self.exact[stored.name] = match.exact
        return match

    def _leave(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        self.untraced.append(UntracedWeight(self.graph, name, shape, dtype))

    def _report(self, stored: StoredWeight, name: str, problem: str) -> None:
        """Add a difference that is not one of elements."""
        size = stored.values.size
        self.differences.append(
            WeightDifference(self.graph, stored.name, name, size, 0, nan, nan, problem)
        )

    def _difference(
        self, actual: StoredWeight, name: str, expected: Array, wrong: Array
    ) -> WeightDifference:
        holds = ""
        if names := [weight.name for weight in self.parameters.of_size(actual.values.size)]:
            other, turned = self._best(actual, names, None)
            if self._distance(actual, other, turned) <= _SAME[actual.precision] and other != name:
                holds = other
        return describe_difference(self.graph, actual, name, expected, wrong, holds=holds)


def _is_normalized(node: ir.Node) -> bool:
    """Return True if a batch normalization reads a node's output, so that none was folded in."""
    return any(use.node.op_type == "BatchNormalization" for use in node.outputs[0].uses())


def _kind(actual: StoredWeight, turned: str) -> str:
    """Return how an equal weight is stored: quantized, fp16, as is, transposed."""
    if actual.tolerance is not None:
        return "quantized"
    return turned if actual.precision == "fp32" else actual.precision

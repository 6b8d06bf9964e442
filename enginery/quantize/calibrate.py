"""Calibration: ranges, smoothing and bias corrections, and the layers that stay in floating point.

Two passes over the calibration batches collect statistics of the FP32 graph's activations. Then
the search measures mixed-precision graphs on the held-out rows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from enginery.core.accuracy import AccuracyMetrics
from enginery.core.errors import CheckFailedError, InputError, OptionError, nearest
from enginery.passes.cast.cast import cast_graph
from enginery.passes.cast.overflow import find_fp32_nodes, mask_floor
from enginery.passes.ir.cleanup import make_pools_global
from enginery.passes.ir.graph_file import write_graph
from enginery.passes.ir.nodes import clear_shapes
from enginery.passes.qdq.embeddings import quantize_embeddings
from enginery.passes.qdq.insert import insert_qdq, quantize_residuals
from enginery.passes.qdq.joining import joining_tensors
from enginery.passes.qdq.layers import Layer, operands, quantized_tensors
from enginery.passes.qdq.scales import ActivationQuantParams, fp16_scale
from enginery.passes.qdq.scheme import Scheme, Vector
from enginery.passes.ranges.measure import float_tensors, measure_ranges
from enginery.quantize.accuracy import AccuracyBudget, AccuracyEvaluator, measure_file
from enginery.quantize.calibration.activation_statistics import (
    ChannelStatistics,
    collect_channel_means,
    collect_channel_statistics,
    collect_histograms,
)
from enginery.quantize.calibration.data import Batch, make_batches
from enginery.quantize.calibration.ranges import choose_range
from enginery.quantize.calibration.result import Calibration, SmoothQuantParams
from enginery.quantize.calibration.smoothing import (
    choose_smoothing,
    mean_convolution_error,
    mean_output_error,
    with_observed_range,
)
from enginery.quantize.config import QuantizeConfig, max_held_out, residual_precision
from enginery.quantize.job import QuantizeJob, scheme_from_config
from enginery.quantize.layer_toggles import LayerToggleModel
from enginery.quantize.multiply_adds import (
    MultiplyAddCounts,
    count_multiply_adds,
    mean_length_feeds,
)
from enginery.quantize.search import SearchResult, search_mixed_precision
from enginery.quantize.source_graph import SourceGraph

_FP8_CHANNELS = 16
"""Minimum. TensorRT for RTX 1.7 ran an FP8 convolution with 3 input channels in FP16, and one
with 16 in FP8."""
_FEW_CHANNELS, _FEW_PRODUCTS = 4, 32
"""Input channels, and products of one output element, of a convolution that gains nothing."""
_LITTLE = 0.5
"""Share of the multiply-adds below which the layers are also searched by themselves."""
_EFFECT_ROWS = 32
"""Rows that measure the effect of a single layer; mixed-precision graphs are measured on all."""
_RANGE_BATCHES = 4
"""Batches on which the graph is checked for FP16 overflow, from the longest to the shortest."""
_RANGE_ROWS = 4
"""Rows of each of these batches: every tensor of the graph is read back."""
_RANGE_BYTES = 32 << 20
"""Tensors that are read back at a time, so that memory does not grow with the longest row."""


@dataclass(frozen=True)
class AccuracySearch:
    """Result of the search for layers to leave in floating point."""

    result: SearchResult
    multiply_adds: MultiplyAddCounts
    budget: AccuracyBudget
    evaluator: AccuracyEvaluator
    beyond_layers: bool
    """True if what `BeyondLayers` names is to be quantized as well."""


@dataclass(frozen=True)
class BeyondLayers:
    """Names of what is quantized besides the layers of a graph."""

    additions: Sequence[str] = ()
    """Residual additions after convolutions, for TensorRT."""
    joining: Sequence[str] = ()
    """Tensors between convolutions, for the CPU."""
    tables: Sequence[str] = ()
    """Embedding tables, for the CPU."""

    def __bool__(self) -> bool:
        return bool(self.additions or self.joining or self.tables)

    def notes(self) -> list[str]:
        """Say what was quantized."""
        names_by_note = {
            f"{len(self.additions)} residual additions after convolutions read their input in "
            "INT8, so that TensorRT keeps it in one byte": self.additions,
            f"{len(self.joining)} tensors between convolutions are in INT8, too, so that ONNX "
            "Runtime does not convert them": self.joining,
            f"embedding tables in INT8: {', '.join(self.tables)}": self.tables,
        }
        return [note for note, names in names_by_note.items() if names]


def quantize_graph(
    model: ir.Model,
    layers: Sequence[Layer],
    calibration: Calibration,
    config: QuantizeConfig,
    *,
    beyond_layers: bool = False,
) -> BeyondLayers:
    """Quantize layers in place, and cast the rest if `residual` says so.

    Args:
        model: the FP32 graph.
        layers: the layers to quantize.
        calibration: ranges, corrections of biases and nodes that are not cast.
        config: the options.
        beyond_layers: also quantize what `BeyondLayers` names.

    Returns:
        What was quantized besides the layers.
    """
    scheme = scheme_from_config(config)
    more = BeyondLayers()
    if beyond_layers and scheme.unsigned:
        joining = joining_tensors(model, layers)  # a tensor of zeros has no range
        more = BeyondLayers(joining=[name for name in joining if name in calibration.ranges])
    insert_qdq(
        model,
        layers,
        calibration.ranges,
        scheme=scheme,
        bias_deltas=calibration.bias_deltas,
        joining=more.joining,
    )
    if beyond_layers and scheme.unsigned:
        more = replace(more, tables=quantize_embeddings(model))
    elif beyond_layers:
        more = BeyondLayers(additions=quantize_residuals(model))
    # Removes the FP32 weights, too, which nothing reads any more.
    RemoveUnusedNodesPass()(model)
    # TensorRT limits the elements of a pool's window.
    make_pools_global(model)
    if scheme.unsigned:
        # With known shapes, ONNX Runtime fuses residuals to a kernel that is slower than its parts.
        clear_shapes(model)
    if residual_precision(config) == "fp16":
        cast_graph(model, "fp16", keep_fp32=set(calibration.fp32_nodes))
    return more


def calibrate(
    job: QuantizeJob, source: SourceGraph, model: ir.Model, layers: Sequence[Layer]
) -> tuple[Calibration, AccuracySearch]:
    """Calibrate the layers and search for those to leave in floating point.

    Args:
        job: options and calibration inputs.
        source: the FP32 graph.
        model: the same graph, in memory.
        layers: all layers that could be quantized.

    Raises:
        OptionError: there are no calibration inputs.
        InputError: an input cannot be used, or an activation is not finite.
        CheckFailedError: no set of quantized layers meets the accuracy budget.
    """
    config, data = job.config, job.require_data()
    batches, held_out = make_batches(
        source.artifact,
        source.record,
        data,
        seed=config.seed,
        max_held_out=max_held_out(config),
    )
    rows = sum(len(batch.rows) for batch in held_out)
    for note in AccuracyBudget.notes(config, source.record, rows):
        job.progress.say(f"quantize: {note}")
    multiply_adds = count_multiply_adds(
        source.path, model, layers, mean_length_feeds(batches, source.record)
    )
    # The rows of a step are those of the batch: each input and each beam is one.
    counted = None if source.is_step else multiply_adds
    left_out = excluded_layers(layers, config.exclude, counted, job.scheme)
    candidates = [layer for layer in layers if layer.name not in left_out]
    if not candidates:
        raise InputError(
            "no layer of the graph can be quantized: "
            + "; ".join(sorted(set(left_out.values())))
            + "."
        )
    observed, zeros = _observe_activations(job, source, model, candidates, batches)
    ranges, smoothed = _choose_smoothing(job, observed)
    # So far, ranges cover all values that were seen.
    if config.method != "minmax":
        ranges = _ranges_by_method(job, observed, ranges)
    # A tensor whose numbers are only moved has the range of the one that they come from.
    ranges |= {name: ranges[origin] for name, origin in observed.origins.items()}
    # The graph stores scales in FP16: round them before anything is measured.
    ranges = {
        name: replace(params, scale=float(fp16_scale(params.scale)))
        for name, params in ranges.items()
    }
    calibration = Calibration(
        ranges=ranges,
        bias_deltas=_correct_biases(job, observed, ranges) if config.bias_correction else {},
        left_out=left_out | zeros,
        smoothed=smoothed,
        fp32_nodes=_fp32_nodes(source, model, batches),
    )
    measured = _search(job, source, calibration, observed.layers, held_out, multiply_adds)
    calibration = replace(
        calibration,
        left_out=calibration.left_out | measured.result.left_out,
        beyond_layers=measured.beyond_layers,
    )
    return calibration, measured


def check_patterns(names: Sequence[str], patterns: Sequence[str]) -> None:
    """Check that every pattern of `exclude` matches the name of a layer.

    Raises:
        OptionError: one matches none.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise OptionError(
                f"option 'exclude': no layer is named '{pattern}'{nearest(pattern, names)}"
            )


def excluded_layers(
    layers: Sequence[Layer],
    patterns: Sequence[str],
    multiply_adds: MultiplyAddCounts | None,
    scheme: Scheme,
) -> dict[str, str]:
    """Return the layers that are never quantized, with reasons: by shape or by `exclude`."""
    reasons = {}
    for layer in layers:
        named = next((p for p in patterns if fnmatchcase(layer.name, p)), "")
        # A product with one row reads each weight once: memory limits it, not arithmetic.
        vector = multiply_adds is not None and multiply_adds.rows_by_layer[layer.name] <= 1
        on_cpu = scheme.unsigned and not layer.linear
        # A small size matters to tensor cores alone.
        if layer.skip_reason and not (on_cpu and layer.too_small):
            reasons[layer.name] = layer.skip_reason
        elif named:
            reasons[layer.name] = f"excluded by '{named}'"
        elif on_cpu and _reads_few_channels(layer):
            channels = f"{layer.in_channels} input channel{'s' if layer.in_channels > 1 else ''}"
            reasons[layer.name] = (
                f"{channels}, K = {layer.reduction_size}: INT8 gains nothing on the CPU"
            )
        elif vector and layer.linear:
            reasons[layer.name] = "one row per input: a matrix-vector product does not get faster"
        elif scheme.name == "fp8" and layer.in_channels < _FP8_CHANNELS:
            reasons[layer.name] = (
                f"{layer.in_channels} input channels; TensorRT's FP8 needs {_FP8_CHANNELS} or more"
            )
    return reasons


def _reads_few_channels(layer: Layer) -> bool:
    """Return True for a convolution of images that gains nothing from INT8 on the CPU.

    Measured on one thread of an Intel Xeon with AVX-512 VNNI: two convolutions with kernels of
    3 × 3, of an image's 3 channels and of the 16 to 64 channels that the first one writes, were
    0.86 to 2.22 times as fast in INT8 as in FP32; with only the second in INT8, 1.19 to 2.10 times.
    Depthwise convolutions are excepted: a chain of 1 × 1 and depthwise ones was 0.8 to 2.6 times as
    fast in INT8; with the depthwise ones in FP32, 0.6 to 1.9 times.
    """
    few = layer.in_channels <= _FEW_CHANNELS
    return few and layer.in_channels < layer.reduction_size < _FEW_PRODUCTS and layer.groups == 1


@dataclass(frozen=True)
class _Observations:
    """Layers to quantize, and what the calibration batches show of the tensors around them."""

    source: SourceGraph
    batches: Sequence[Batch]
    layers: Sequence[Layer]
    weights: Mapping[str, Vector]
    """Layer -> its weight."""
    tensors: Mapping[str, bool]
    """Tensor that needs a range -> whether its channels are told apart; see `quantized_tensors`."""
    origins: Mapping[str, str]
    """Tensor whose numbers are only moved -> the one that they come from."""
    statistics: Mapping[str, ChannelStatistics]


def _observe_activations(
    job: QuantizeJob,
    source: SourceGraph,
    model: ir.Model,
    layers: Sequence[Layer],
    batches: Sequence[Batch],
) -> tuple[_Observations, dict[str, str]]:
    """Run the FP32 graph; return what was seen, and the layers that cannot have a range.

    Raises:
        InputError: an activation is not finite, or no layer can have a range.
    """
    scheme = job.scheme
    tensors, _ = _quantized_tensors(model, layers, scheme)
    with job.progress.task("calibrating: channels", total=len(batches)) as advance:
        statistics = collect_channel_statistics(
            source.path, tensors, batches, seed=job.config.seed, advance=advance
        )
    # A range of zero has no scale.
    zeros = {name for name, channels in statistics.items() if not channels.largest_magnitude}
    left_out = {}
    for layer in layers:
        reads_zeros, writes_zeros = layer.activation in zeros, layer.activated_output in zeros
        # On the CPU, the output of a convolution is quantized as well.
        if reads_zeros or (writes_zeros and scheme.unsigned and not layer.linear):
            tensor = "its input" if reads_zeros else "its output"
            left_out[layer.name] = f"{tensor} is zero on all calibration inputs, so it has no range"
    layers = [layer for layer in layers if layer.name not in left_out]
    if not layers:
        raise InputError("every layer's input or output is zero on all calibration inputs.")
    # Once more, without the layers that were just left out.
    tensors, origins = _quantized_tensors(model, layers, scheme)
    tensors = {name: by_channel for name, by_channel in tensors.items() if name not in zeros}
    nodes = {node.name: node for node in model.graph}
    observed = _Observations(
        source=source,
        batches=batches,
        layers=layers,
        weights={layer.name: operands(nodes[layer.name])[1] for layer in layers},
        tensors=tensors,
        origins={name: origin for name, origin in origins.items() if origin in tensors},
        statistics={name: channels for name, channels in statistics.items() if name in tensors},
    )
    return observed, left_out


def _choose_smoothing(
    job: QuantizeJob, observed: _Observations
) -> tuple[dict[str, ActivationQuantParams], dict[str, SmoothQuantParams]]:
    """Return the parameters of each activation, with ranges that cover all values, and why."""
    config, scheme = job.config, job.scheme
    ranges: dict[str, ActivationQuantParams] = {}
    smoothed: dict[str, SmoothQuantParams] = {}
    total = len(observed.statistics)
    with job.progress.task("calibrating: smoothing", total=total) as advance:
        for name, channels in observed.statistics.items():
            # All layers that read an activation share its scales, so they choose together.
            group = [(x, observed.weights[x.name]) for x in observed.layers if x.activation == name]
            choice = choose_smoothing(
                channels, group, scheme, strength=config.smoothing, shift=config.shift
            )
            ranges[name] = choice.params
            smoothed[name] = SmoothQuantParams(choice.strength, choice.shifted, choice.error)
            advance()
    return ranges, smoothed


def _ranges_by_method(
    job: QuantizeJob, observed: _Observations, ranges: Mapping[str, ActivationQuantParams]
) -> dict[str, ActivationQuantParams]:
    """Return the ranges that `method` derives from the histograms of the activations."""
    config, scheme, statistics = job.config, job.scheme, observed.statistics
    with job.progress.task("calibrating: ranges", total=len(observed.batches)) as advance:
        # A second pass: the first one found the upper edges, so that the bins never change.
        histograms = collect_histograms(
            observed.source.path,
            observed.tensors,
            observed.batches,
            statistics,
            ranges,
            advance=advance,
        )

    chosen = {}
    for name, params in ranges.items():
        limit = choose_range(histograms[name], config.method, scheme, percentile=config.percentile)
        chosen[name] = with_observed_range(statistics[name], params, scheme, limit=limit)
    return chosen


def _correct_biases(
    job: QuantizeJob, observed: _Observations, ranges: Mapping[str, ActivationQuantParams]
) -> dict[str, Vector]:
    """Return the mean error of each output channel, which is added to the bias, by layer."""
    scheme, weights, statistics = job.scheme, observed.weights, observed.statistics
    deltas = {
        x.name: mean_output_error(
            statistics[x.activation].sample, x, weights[x.name], ranges[x.activation], scheme
        )
        for x in observed.layers
        # A sample of width 1 holds single numbers: there are no rows to multiply by the weight.
        if x.linear and statistics[x.activation].width > 1
    }
    convolutions = [x for x in observed.layers if not x.linear]
    if convolutions:
        # A third pass: a convolution's mean output follows from the means of its input channels.
        with job.progress.task("calibrating: biases", total=len(observed.batches)) as advance:
            means = collect_channel_means(
                observed.source.path,
                convolutions,
                observed.batches,
                ranges,
                scheme,
                advance=advance,
            )
        deltas |= {
            x.name: mean_convolution_error(means[x.activation], x, weights[x.name], scheme)
            for x in convolutions
        }
    return deltas


def _quantized_tensors(
    model: ir.Model, layers: Sequence[Layer], scheme: Scheme
) -> tuple[dict[str, bool], dict[str, str]]:
    """Return the tensors that need ranges, see `quantized_tensors`, and `joining_tensors`."""
    if not scheme.unsigned:
        return quantized_tensors(layers, outputs=False), {}
    joining = joining_tensors(model, layers)
    return quantized_tensors(layers, outputs=True) | dict.fromkeys(joining, False), joining


def _search(
    job: QuantizeJob,
    source: SourceGraph,
    calibration: Calibration,
    layers: Sequence[Layer],
    held_out: Sequence[Batch],
    multiply_adds: MultiplyAddCounts,
) -> AccuracySearch:
    """Search for the layers to leave in floating point, of those that were calibrated."""
    config, scheme = job.config, job.scheme
    total = sum(multiply_adds.by_layer.values())
    weights = {layer.name: multiply_adds.by_layer[layer.name] / total for layer in layers}
    effect_batches = _batches_for_effects(held_out)
    with (
        LayerToggleModel(
            source.path, layers, calibration.ranges, calibration.bias_deltas, scheme
        ) as toggled,
        job.progress.task("measuring mixed precision") as advance,
    ):
        evaluator = AccuracyEvaluator.of(
            source,
            held_out,
            lambda feeds: toggled(feeds, ()),
            scratch=job.scratch,
            labels=job.require_data().labels,
        )
        budget = AccuracyBudget.of(config, evaluator.measure_reference())

        def confirm(beyond_layers: bool, quantized: Collection[str]) -> AccuracyMetrics:
            graph = source.read()
            chosen = [layer for layer in layers if layer.name in quantized]
            quantize_graph(graph, chosen, calibration, config, beyond_layers=beyond_layers)
            with tempfile.TemporaryDirectory(dir=job.scratch) as folder:
                path = Path(folder, "model.onnx")
                write_graph(graph, path)
                # ONNX Runtime's CPU kernels lack FP8 fusions.
                return measure_file(path, evaluator, fused=scheme.supports_fusions)

        measured: dict[tuple[frozenset[str], bool], AccuracyMetrics] = {}

        def measure(quantized: Collection[str], part: bool) -> AccuracyMetrics:
            key = frozenset(quantized), part
            # For the CPU, the search may run twice, on the same simulations.
            if key not in measured:
                measured[key] = evaluator.measure(
                    lambda feeds: toggled(feeds, quantized), batches=effect_batches if part else 0
                )
            return measured[key]

        def search(beyond_layers: bool) -> SearchResult:
            return search_mixed_precision(
                weights,
                measure,
                budget,
                curve=config.curve,
                confirm=partial(confirm, beyond_layers),
                advance=advance,
            )

        # For the CPU, rounding what joins convolutions costs accuracy, so it is part of the search.
        # For TensorRT, residual additions are tried on what the search has chosen.
        if scheme.unsigned:
            result, beyond_layers = _search_for_cpu(search, weights)
        else:
            result, beyond_layers = search(False), True
    for name, reason in result.left_out.items():
        job.progress.say(f"quantize: {name} is not quantized: {reason}")
    return AccuracySearch(result, multiply_adds, budget, evaluator, beyond_layers)


def _search_for_cpu(
    search: Callable[[bool], SearchResult], weights: Mapping[str, float]
) -> tuple[SearchResult, bool]:
    """Search with tensors beyond the layers quantized, and without if little is left in INT8.

    Args:
        search: searches with or without them, see `BeyondLayers`.
        weights: layer -> its share of the multiply-adds.

    Returns:
        The result, and whether tensors beyond the layers are quantized.

    Raises:
        CheckFailedError: no combination meets the budget either way.
    """

    def share(result: SearchResult) -> float:
        return sum(weights[name] for name in weights.keys() - result.left_out.keys())

    try:
        beyond = search(True)
    except CheckFailedError:
        # The layers alone may still meet the budget.
        return search(False), False
    if share(beyond) >= _LITTLE:
        return beyond, True
    try:
        layers_only = search(False)
    except CheckFailedError:
        return beyond, True
    # With layers alone, ONNX Runtime dequantizes what a convolution writes, and quantizes it again
    # for the next one: that has to buy twice as much INT8.
    return (layers_only, False) if share(layers_only) > 2 * share(beyond) else (beyond, True)


def _fp32_nodes(source: SourceGraph, model: ir.Model, batches: Sequence[Batch]) -> dict[str, str]:
    """Return the nodes whose tensors would overflow in FP16, with reasons."""
    fixed = isinstance(source.record.inputs[0].dims[0], int)
    # Spread from the longest batch to the shortest.
    feeds = [batch.load() for batch in batches[:: -(-len(batches) // _RANGE_BATCHES)]]
    # A graph with a fixed batch size takes whole batches only.
    if not fixed:
        feeds = [{name: a[:_RANGE_ROWS] for name, a in part.items()} for part in feeds]
    ranges = measure_ranges(
        source.path,
        float_tensors(model.graph),
        feeds,
        mask_floor=mask_floor(model),
        group_bytes=_RANGE_BYTES,
    )
    return {name: node.reason for name, node in find_fp32_nodes(model.graph, ranges).items()}


def _batches_for_effects(batches: Sequence[Batch]) -> int:
    """Return how many of the first batches hold `_EFFECT_ROWS` rows."""
    rows = np.cumsum([len(batch.rows) for batch in batches])
    # The index of the batch with which the rows are enough; the number of batches is one more.
    return int(np.searchsorted(rows, _EFFECT_ROWS)) + 1

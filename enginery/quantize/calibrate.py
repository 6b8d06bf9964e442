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
from enginery.core.artifact.fingerprint import sha256_of
from enginery.core.errors import CheckFailedError, InputError, OptionError, nearest
from enginery.core.progress import SILENT, Progress
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
from enginery.passes.qdq.scheme import FP8, INT8, Scheme, Vector
from enginery.passes.ranges.measure import float_tensors, measure_ranges
from enginery.quantize.accuracy import AccuracyEvaluator, measure_file
from enginery.quantize.calibration.activation_statistics import (
    ChannelStatistics,
    collect_channel_means,
    collect_channel_statistics,
    collect_histograms,
)
from enginery.quantize.calibration.batches import MAX_HELD_OUT
from enginery.quantize.calibration.cache import CalibrationCache, SmoothQuantParams
from enginery.quantize.calibration.data import Batch, CalibrationData, make_batches
from enginery.quantize.calibration.ranges import choose_range
from enginery.quantize.calibration.smoothing import (
    choose_smoothing,
    mean_convolution_error,
    mean_output_error,
    with_observed_range,
)
from enginery.quantize.config import QuantizeConfig, residual_precision
from enginery.quantize.layer_toggles import LayerToggleModel
from enginery.quantize.multiply_adds import (
    MultiplyAddCounts,
    count_multiply_adds,
    mean_length_feeds,
)
from enginery.quantize.search import AccuracyBudget, SearchResult, search_mixed_precision
from enginery.quantize.source_graph import SourceGraph

_MAX_COUNTED_ROWS = 1024
"""Held-out rows for a budget in accuracy, which counts right answers; a cosine needs fewer rows."""
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
    """True if what is no layer is to be quantized as well."""


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


def scheme_from_config(config: QuantizeConfig) -> Scheme:
    """Return the quantization scheme that the options select."""
    kind = FP8 if config.scheme == "fp8" else INT8
    return replace(kind, per_channel=config.per_channel, unsigned=config.target == "cpu")


def quantize_graph(
    model: ir.Model,
    layers: Sequence[Layer],
    config: QuantizeConfig,
    ranges: Mapping[str, ActivationQuantParams],
    bias_deltas: Mapping[str, Vector],
    fp32_nodes: Collection[str],
    *,
    beyond_layers: bool = False,
) -> BeyondLayers:
    """Quantize layers in place, and cast the rest if `residual` says so.

    Args:
        model: the FP32 graph.
        layers: the layers to quantize.
        config: the options.
        ranges: the parameters of each activation, by name.
        bias_deltas: layer -> correction of its bias.
        fp32_nodes: nodes that are not cast.
        beyond_layers: also quantize what is no layer, see `BeyondLayers`.

    Returns:
        What was quantized besides the layers.
    """
    scheme = scheme_from_config(config)
    more = BeyondLayers()
    if beyond_layers and scheme.unsigned:
        joining = joining_tensors(model, layers)  # a tensor of zeros has no range
        more = BeyondLayers(joining=[name for name in joining if name in ranges])
    insert_qdq(model, layers, ranges, scheme=scheme, bias_deltas=bias_deltas, joining=more.joining)
    if beyond_layers and scheme.unsigned:
        more = replace(more, tables=quantize_embeddings(model))
    elif beyond_layers:
        more = BeyondLayers(additions=quantize_residuals(model))
    RemoveUnusedNodesPass()(model)
    # TensorRT limits the elements of a pool's window.
    make_pools_global(model)
    if scheme.unsigned:
        # With known shapes, ONNX Runtime fuses residuals to a kernel that is slower than its parts.
        clear_shapes(model)
    if residual_precision(config) == "fp16":
        cast_graph(model, "fp16", keep_fp32=set(fp32_nodes))
    return more


def calibrate(
    source: SourceGraph,
    model: ir.Model,
    layers: Sequence[Layer],
    data: CalibrationData,
    config: QuantizeConfig,
    *,
    scratch: Path,
    progress: Progress = SILENT,
) -> tuple[CalibrationCache, AccuracySearch]:
    """Calibrate the layers and search for those to leave in floating point.

    Args:
        source: the FP32 graph.
        model: the same graph, in memory.
        layers: all layers that could be quantized.
        data: the calibration inputs.
        config: the options.
        scratch: directory for FP32's outputs, see `AccuracyEvaluator`.
        progress: receives progress messages.

    Raises:
        InputError: an input cannot be used, or an activation is not finite.
        CheckFailedError: no set of quantized layers meets the accuracy budget.
    """
    scheme = scheme_from_config(config)
    # A budget in accuracy counts right answers, which takes more rows than a cosine.
    max_held_out = _MAX_COUNTED_ROWS if config.accuracy_budget else MAX_HELD_OUT
    batches, held_out = make_batches(
        source.artifact, source.record, data, seed=config.seed, max_held_out=max_held_out
    )
    counts_rows = "logits" in source.outputs and "pred_boxes" not in source.outputs
    for note in AccuracyBudget.notes(config, sum(len(batch.rows) for batch in held_out)):
        if counts_rows:  # an image has several boxes
            progress.say(f"quantize: {note}")
    multiply_adds = count_multiply_adds(
        source.path, model, layers, mean_length_feeds(batches, source.record)
    )
    # The rows of a step are those of the batch: each input and each beam is one.
    counted = None if source.is_step else multiply_adds
    left_out = excluded_layers(layers, config.exclude, counted, scheme)
    candidates = [layer for layer in layers if layer.name not in left_out]
    if not candidates:
        raise InputError(
            "no layer of the graph can be quantized: "
            + "; ".join(sorted(set(left_out.values())))
            + "."
        )
    tensors, _ = _quantized_tensors(model, candidates, scheme)
    with progress.task("calibrating: channels", total=len(batches)) as advance:
        statistics = collect_channel_statistics(
            source.path, tensors, batches, seed=config.seed, advance=advance
        )
    zeros = {name for name, channels in statistics.items() if not channels.largest_magnitude}
    for layer in list(candidates):
        reads_zeros, writes_zeros = layer.activation in zeros, layer.activated_output in zeros
        # On the CPU, the output of a convolution is quantized as well.
        if reads_zeros or (writes_zeros and scheme.unsigned and not layer.linear):
            tensor = "its input" if reads_zeros else "its output"
            left_out[layer.name] = f"{tensor} is zero on all calibration inputs, so it has no range"
            candidates.remove(layer)
    if not candidates:
        raise InputError("every layer's input or output is zero on all calibration inputs.")
    # Once more, without the layers that were just left out.
    tensors, sources = _quantized_tensors(model, candidates, scheme)
    tensors = {name: by_channel for name, by_channel in tensors.items() if name not in zeros}
    sources = {name: source for name, source in sources.items() if source in tensors}
    statistics = {name: channels for name, channels in statistics.items() if name in tensors}
    weights = _weights(model, candidates)
    ranges, smoothed = _choose_smoothing(candidates, weights, statistics, config, scheme, progress)
    # So far, ranges cover all values that were seen.
    if config.method != "minmax":
        ranges = _ranges_by_method(
            source, tensors, batches, statistics, ranges, config, scheme, progress
        )
    # A tensor whose numbers are only moved has the range of the one that they come from.
    ranges |= {name: ranges[source] for name, source in sources.items()}
    # The graph stores scales in FP16: round them before anything is measured.
    ranges = {
        name: replace(params, scale=float(fp16_scale(params.scale)))
        for name, params in ranges.items()
    }
    deltas = {
        x.name: mean_output_error(
            statistics[x.activation].sample, x, weights[x.name], ranges[x.activation], scheme
        )
        for x in candidates
        if config.bias_correction and x.linear and statistics[x.activation].width > 1
    }
    convolutions = [x for x in candidates if config.bias_correction and not x.linear]
    if convolutions:
        with progress.task("calibrating: biases", total=len(batches)) as advance:
            means = collect_channel_means(
                source.path, convolutions, batches, ranges, scheme, advance=advance
            )
        deltas |= {
            x.name: mean_convolution_error(means[x.activation], x, weights[x.name], scheme)
            for x in convolutions
        }
    # Needed for an FP32 residual as well: the cache may be reused for FP16.
    fp32_nodes = _fp32_nodes(source, model, batches)
    measured = _search(
        source,
        candidates,
        ranges,
        deltas,
        held_out,
        data,
        config,
        multiply_adds,
        scheme,
        fp32_nodes,
        scratch,
        progress,
    )
    cache = CalibrationCache(
        graph_sha256=sha256_of(source.path),
        scheme=scheme.title,
        ranges=ranges,
        bias_deltas=deltas,
        left_out={**left_out, **measured.result.left_out},
        smoothed=smoothed,
        fp32_nodes=fp32_nodes,
        beyond_layers=measured.beyond_layers,
    )
    return cache, measured


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


def _weights(model: ir.Model, layers: Sequence[Layer]) -> dict[str, Vector]:
    nodes = {node.name: node for node in model.graph}
    return {layer.name: operands(nodes[layer.name])[1] for layer in layers}


def _choose_smoothing(
    layers: Sequence[Layer],
    weights: Mapping[str, Vector],
    statistics: Mapping[str, ChannelStatistics],
    config: QuantizeConfig,
    scheme: Scheme,
    progress: Progress,
) -> tuple[dict[str, ActivationQuantParams], dict[str, SmoothQuantParams]]:
    ranges: dict[str, ActivationQuantParams] = {}
    smoothed: dict[str, SmoothQuantParams] = {}
    with progress.task("calibrating: smoothing", total=len(statistics)) as advance:
        for name, channels in statistics.items():
            # All layers that read an activation share its scales, so they choose together.
            group = [(x, weights[x.name]) for x in layers if x.activation == name]
            choice = choose_smoothing(
                channels, group, scheme, strength=config.smoothing, shift=config.shift
            )
            ranges[name] = choice.params
            smoothed[name] = SmoothQuantParams(choice.strength, choice.shifted, choice.error)
            advance()
    return ranges, smoothed


def _ranges_by_method(
    source: SourceGraph,
    tensors: Mapping[str, bool],
    batches: Sequence[Batch],
    statistics: Mapping[str, ChannelStatistics],
    ranges: Mapping[str, ActivationQuantParams],
    config: QuantizeConfig,
    scheme: Scheme,
    progress: Progress,
) -> dict[str, ActivationQuantParams]:
    with progress.task("calibrating: ranges", total=len(batches)) as advance:
        # A second pass: the first one found the upper edges, so that the bins never change.
        histograms = collect_histograms(
            source.path, tensors, batches, statistics, ranges, advance=advance
        )

    def chosen(name: str) -> ActivationQuantParams:
        def params_of(limit: float) -> ActivationQuantParams:
            return with_observed_range(statistics[name], ranges[name], scheme, limit=limit)

        return params_of(
            choose_range(
                histograms[name], config.method, params_of, scheme, percentile=config.percentile
            )
        )

    return {name: chosen(name) for name in ranges}


def _quantized_tensors(
    model: ir.Model, layers: Sequence[Layer], scheme: Scheme
) -> tuple[dict[str, bool], dict[str, str]]:
    """Return the tensors that need ranges, see `quantized_tensors`, and `joining_tensors`."""
    if not scheme.unsigned:
        return quantized_tensors(layers, outputs=False), {}
    joining = joining_tensors(model, layers)
    return quantized_tensors(layers, outputs=True) | dict.fromkeys(joining, False), joining


def _search(
    source: SourceGraph,
    layers: Sequence[Layer],
    ranges: Mapping[str, ActivationQuantParams],
    deltas: Mapping[str, Vector],
    held_out: Sequence[Batch],
    data: CalibrationData,
    config: QuantizeConfig,
    multiply_adds: MultiplyAddCounts,
    scheme: Scheme,
    fp32_nodes: Collection[str],
    scratch: Path,
    progress: Progress,
) -> AccuracySearch:
    total = sum(multiply_adds.by_layer.values())
    weights = {layer.name: multiply_adds.by_layer[layer.name] / total for layer in layers}
    effect_batches = _batches_for_effects(held_out)
    with (
        LayerToggleModel(source.path, layers, ranges, deltas, scheme) as toggled,
        progress.task("measuring mixed precision") as advance,
    ):
        evaluator = AccuracyEvaluator.of(
            source,
            held_out,
            lambda feeds: toggled(feeds, ()),
            scratch=scratch,
            labels=data.labels,
        )
        budget = AccuracyBudget.of(config, evaluator.measure_reference())

        def confirm(beyond_layers: bool, quantized: Collection[str]) -> AccuracyMetrics:
            graph = source.read()
            chosen = [layer for layer in layers if layer.name in quantized]
            quantize_graph(
                graph, chosen, config, ranges, deltas, fp32_nodes, beyond_layers=beyond_layers
            )
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
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
                list(weights),
                weights,
                measure,
                budget,
                curve=config.curve,
                confirm=partial(confirm, beyond_layers),
                advance=advance,
            )

        if scheme.unsigned:
            result, beyond_layers = _search_for_cpu(search, weights)
        else:  # additions are tried on what the search has found
            result, beyond_layers = search(False), True
    for name, reason in result.left_out.items():
        progress.say(f"quantize: {name} is not quantized: {reason}")
    return AccuracySearch(result, multiply_adds, budget, evaluator, beyond_layers)


def _search_for_cpu(
    search: Callable[[bool], SearchResult], weights: Mapping[str, float]
) -> tuple[SearchResult, bool]:
    """Search with what is no layer quantized, and without it if little is left in INT8.

    Args:
        search: searches with or without it.
        weights: layer -> its share of the multiply-adds.

    Returns:
        The result, and whether what is no layer is quantized.

    Raises:
        CheckFailedError: no combination meets the budget either way.
    """

    def share(result: SearchResult) -> float:
        return sum(weights[name] for name in weights.keys() - result.left_out.keys())

    try:
        beyond = search(True)
    except CheckFailedError:
        return search(False), False
    if share(beyond) >= _LITTLE:
        return beyond, True
    try:
        layers_only = search(False)
    except CheckFailedError:
        return beyond, True
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
    return int(np.searchsorted(rows, _EFFECT_ROWS)) + 1

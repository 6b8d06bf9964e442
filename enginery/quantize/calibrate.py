"""From data to everything that Q/DQ need: ranges, smoothing, bias corrections, and what stays out.

    >>> recorded, measured = calibrate(artifact, model, layers, data, config)
    >>> len(recorded.ranges), measured.accuracy.cosine
    (24, 0.9985)

Two passes over the data with the FP32 graph; then mixes are measured on rows held out from both.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np
import onnx_ir as ir

from enginery.core.artifact import Artifact
from enginery.core.errors import InputError, OptionError, nearest
from enginery.core.fingerprint import sha256_of
from enginery.core.progress import SILENT, Progress
from enginery.core.reports import Accuracy
from enginery.passes.layers import Layer, operands
from enginery.passes.overflow import find_fp32_nodes, mask_floor
from enginery.passes.qdq import ActivationQuantParams, fp16_scale
from enginery.passes.ranges import float_tensors, measure_ranges
from enginery.passes.scheme import FP8, INT8, Scheme, Vector
from enginery.quantize.accuracy import Judge
from enginery.quantize.batches import MOST_HELD_OUT
from enginery.quantize.calibration import Channels, observe_channels, observe_magnitudes
from enginery.quantize.config import QuantizeConfig
from enginery.quantize.data import Batch, CalibrationData, make_batches
from enginery.quantize.gating import GatedModel
from enginery.quantize.ranges import choose_range
from enginery.quantize.recorded import Recorded, Smoothed
from enginery.quantize.search import Budget, SearchResult, search_mix
from enginery.quantize.share import Arithmetic, count_multiply_adds, mean_length_feeds
from enginery.quantize.smoothing import choose_smoothing, mean_error

_MOST_ANSWERS = 1024
"""Rows that measure a budget in answers, which are counted one by one; a cosine needs fewer."""
_FP8_CHANNELS = 16
"""TensorRT for RTX 1.7 built an FP8 convolution of 3 input channels in FP16, of 16 in FP8."""
_EFFECT_ROWS = 32
"""Rows that tell harmful layers from harmless ones; the mixes are measured on all."""
_RANGE_BATCHES = 4
"""Batches that FP16's range is checked on, from the longest to the shortest."""
_RANGE_ROWS = 4
"""Of each, as every tensor of the graph is looked at."""
_RANGE_BYTES = 32 << 20
"""Of inner tensors at once, so that memory does not follow the longest row."""


@dataclass(frozen=True)
class Measured:
    """What the held-out rows said of the mixes."""

    search: SearchResult
    arithmetic: Arithmetic
    budget: Budget
    judge: Judge


def scheme_of(config: QuantizeConfig) -> Scheme:
    """The quantized type that the options name."""
    return replace(FP8 if config.scheme == "fp8" else INT8, per_channel=config.per_channel)


def calibrate(
    artifact: Artifact,
    model: ir.Model,
    layers: Sequence[Layer],
    data: CalibrationData,
    config: QuantizeConfig,
    *,
    progress: Progress = SILENT,
) -> tuple[Recorded, Measured]:
    """Calibrates the layers and searches for those to leave out.

    Args:
        artifact: with the FP32 graph.
        model: the same graph.
        layers: all that were found.
        data: the inputs.
        config: the options.
        progress: who is told what happens.

    Raises:
        InputError: an input cannot be used, or an activation is not finite.
        OptionError: a pattern of `exclude` matches no layer.
        CheckFailedError: no mix holds the budget.
    """
    record, scheme = artifact.manifest.graphs[0], scheme_of(config)
    most = _MOST_ANSWERS if config.accuracy_budget else MOST_HELD_OUT
    batches, held_out = make_batches(artifact, record, data, seed=config.seed, most_held_out=most)
    arithmetic = count_multiply_adds(
        artifact.model, model, layers, mean_length_feeds(batches, record)
    )
    left_out = excluded_layers(layers, config.exclude, arithmetic, scheme)
    candidates = [layer for layer in layers if layer.name not in left_out]
    if not candidates:
        raise InputError(
            "no layer of the graph can be quantized: "
            + "; ".join(sorted(set(left_out.values())))
            + "."
        )
    with progress.task("calibrating: channels", total=len(batches)) as advance:
        seen = observe_channels(
            artifact.model, candidates, batches, seed=config.seed, advance=advance
        )
    silent = {name for name, found in seen.items() if not found.reach}
    for layer in [x for x in candidates if x.activation in silent]:
        left_out[layer.name] = "its input is zero on all calibration inputs, so it has no range"
        candidates.remove(layer)
    seen = {name: found for name, found in seen.items() if name not in silent}
    if not candidates:
        raise InputError("every layer's input is zero on all calibration inputs.")
    weights = _weights(model, candidates)
    ranges, smoothed = _smooth(candidates, weights, seen, config, scheme, progress)
    if config.method != "minmax":
        ranges = _with_method(artifact, candidates, batches, seen, ranges, config, scheme, progress)
    # The graph stores scales in FP16, so everything from here on is measured with those.
    ranges = {
        name: ActivationQuantParams(float(fp16_scale(r.scale)), r.multiplier, r.offset)
        for name, r in ranges.items()
    }
    deltas = {
        x.name: mean_error(
            seen[x.activation].sample, x, weights[x.name], ranges[x.activation], scheme
        )
        for x in candidates
        if config.bias_correction and x.linear and seen[x.activation].width > 1
    }
    measured = _search(artifact, candidates, ranges, deltas, held_out, data, config, arithmetic,
                       scheme, progress)  # fmt: skip
    recorded = Recorded(
        graph_sha256=sha256_of(artifact.model),
        scheme=scheme.name,
        ranges=ranges,
        bias_deltas=deltas,
        left_out={**left_out, **measured.search.left_out},
        smoothed=smoothed,
        # Also where the rest stays FP32: the ranges may be used again for FP16.
        fp32_nodes=_fp32_nodes(artifact, model, batches),
    )
    return recorded, measured


def excluded_layers(
    layers: Sequence[Layer],
    patterns: Sequence[str],
    arithmetic: Arithmetic | None,
    scheme: Scheme,
) -> dict[str, str]:
    """Layers that are never quantized, with reasons: by shape, or by the option `exclude`."""
    for pattern in patterns:
        if not any(fnmatchcase(layer.name, pattern) for layer in layers):
            names = [layer.name for layer in layers]
            raise OptionError(
                f"option 'exclude': no layer is named '{pattern}'{nearest(pattern, names)}"
            )
    reasons = {}
    for layer in layers:
        named = next((p for p in patterns if fnmatchcase(layer.name, p)), "")
        vector = arithmetic is not None and arithmetic.rows_by_layer[layer.name] <= 1
        if layer.skip_reason:
            reasons[layer.name] = layer.skip_reason
        elif named:
            reasons[layer.name] = f"excluded by '{named}'"
        elif vector and layer.linear:
            reasons[layer.name] = "one row an input: a matrix-vector product gains nothing"
        elif scheme.name == "fp8" and layer.in_channels < _FP8_CHANNELS:
            reasons[layer.name] = (
                f"{layer.in_channels} input channels: TensorRT multiplies FP8 of "
                f"{_FP8_CHANNELS} or more"
            )
    return reasons


def _weights(model: ir.Model, layers: Sequence[Layer]) -> dict[str, Vector]:
    nodes = {node.name: node for node in model.graph}
    return {layer.name: operands(nodes[layer.name])[1] for layer in layers}


def _smooth(
    layers: Sequence[Layer],
    weights: Mapping[str, Vector],
    seen: Mapping[str, Channels],
    config: QuantizeConfig,
    scheme: Scheme,
    progress: Progress,
) -> tuple[dict[str, ActivationQuantParams], dict[str, Smoothed]]:
    ranges: dict[str, ActivationQuantParams] = {}
    smoothed: dict[str, Smoothed] = {}
    with progress.task("calibrating: smoothing", total=len(seen)) as advance:
        for name, channels in seen.items():
            group = [(x, weights[x.name]) for x in layers if x.activation == name]
            found = choose_smoothing(
                channels, group, scheme, strength=config.smoothing, shift=config.shift
            )
            ranges[name] = found.ready
            smoothed[name] = Smoothed(found.strength, found.shifted, found.error)
            advance()
    return ranges, smoothed


def _with_method(
    artifact: Artifact,
    layers: Sequence[Layer],
    batches: Sequence[Batch],
    seen: Mapping[str, Channels],
    ranges: Mapping[str, ActivationQuantParams],
    config: QuantizeConfig,
    scheme: Scheme,
    progress: Progress,
) -> dict[str, ActivationQuantParams]:
    with progress.task("calibrating: ranges", total=len(batches)) as advance:
        histograms = observe_magnitudes(
            artifact.model, layers, batches, seen, ranges, advance=advance
        )
    tops = {
        name: choose_range(histogram, config.method, scheme, percentile=config.percentile)
        for name, histogram in histograms.items()
    }
    return {
        name: ActivationQuantParams(tops[name] / scheme.largest, ready.multiplier, ready.offset)
        for name, ready in ranges.items()
    }


def _search(
    artifact: Artifact,
    layers: Sequence[Layer],
    ranges: Mapping[str, ActivationQuantParams],
    deltas: Mapping[str, Vector],
    held_out: Sequence[Batch],
    data: CalibrationData,
    config: QuantizeConfig,
    arithmetic: Arithmetic,
    scheme: Scheme,
    progress: Progress,
) -> Measured:
    total = sum(arithmetic.by_layer.values())
    weights = {layer.name: arithmetic.by_layer[layer.name] / total for layer in layers}
    few = _few(held_out)
    with (
        GatedModel(artifact.model, layers, ranges, deltas, scheme) as gated,
        progress.task("measuring mixes") as advance,
    ):
        judge = Judge.of(artifact, held_out, lambda feeds: gated(feeds, ()), labels=data.labels)
        budget = Budget.of(config, judge.measure_reference())

        def measure(quantized: Collection[str], part: bool) -> Accuracy:
            return judge.measure(lambda feeds: gated(feeds, quantized), batches=few if part else 0)

        names = [layer.name for layer in layers]
        found = search_mix(names, weights, measure, budget, curve=config.curve, advance=advance)
    for name, reason in found.left_out.items():
        progress.say(f"quantize: {name} stays as it is: {reason}")
    return Measured(found, arithmetic, budget, judge)


def _fp32_nodes(artifact: Artifact, model: ir.Model, batches: Sequence[Batch]) -> dict[str, str]:
    """Nodes that FP16 would break, by what the graph's tensors reach; with reasons."""
    fixed = isinstance(artifact.manifest.graphs[0].inputs[0].dims[0], int)
    feeds = [batch.load() for batch in batches[:: -(-len(batches) // _RANGE_BATCHES)]]
    if not fixed:
        feeds = [{name: a[:_RANGE_ROWS] for name, a in part.items()} for part in feeds]
    found = measure_ranges(
        artifact.model, float_tensors(model.graph), feeds,
        mask_floor=mask_floor(model), group_bytes=_RANGE_BYTES,
    )  # fmt: skip
    return {name: node.reason for name, node in find_fp32_nodes(model.graph, found).items()}


def _few(batches: Sequence[Batch]) -> int:
    """How many of the first batches hold `_EFFECT_ROWS` rows."""
    rows = np.cumsum([len(batch.rows) for batch in batches])
    return int(np.searchsorted(rows, _EFFECT_ROWS)) + 1

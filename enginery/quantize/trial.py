"""Trial engines: build the quantized graph with TensorRT before it is saved.

A layer counts as quantized only if the engine really multiplies it in INT8 or FP8: TensorRT may
choose another precision despite Q/DQ nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import ProviderError
from enginery.core.model.feeds import FeedLimits
from enginery.core.shapes import (
    PAST,
    Profile,
    dynamic_dims,
    is_batch,
    profiles_by_graph,
    share_of_positions,
)
from enginery.passes.lint.lint import lint_onnx
from enginery.passes.qdq.layers import Layer
from enginery.quantize.config import QuantizeConfig, list_capabilities
from enginery.quantize.source_graph import SourceGraph
from enginery.reports.quantization import EngineTrial
from enginery.runtime.tensorrt.build import BuildRequest
from enginery.runtime.tensorrt.capabilities import resolve_capabilities
from enginery.runtime.tensorrt.library import require_tensorrt
from enginery.runtime.tensorrt.options import RTX
from enginery.runtime.tensorrt.process import build_plan, parse_onnx

_BATCH = (1, 8, 32)


def check_trial_options(artifact: Artifact, config: QuantizeConfig) -> None:
    """Check capabilities and profiles before the calibration starts, which takes long.

    Raises:
        OptionError: TensorRT does not support a compute capability.
        ShapeError: a profile does not fit the graph.
        MissingPackageError: TensorRT is not installed.
    """
    if not list_capabilities(config):
        return
    require_tensorrt("Building a trial engine (--capability none builds none)")
    resolve_capabilities(RTX, list_capabilities(config))
    _read_profiles(artifact, config)


def build_trials(
    graph: Path, source: SourceGraph, config: QuantizeConfig, quantized: Sequence[Layer]
) -> list[EngineTrial]:
    """Lint and parse the graph, then build an engine for each compute capability.

    Raises:
        ProviderError: TensorRT does not support the graph, or cannot build it.
        MissingPackageError: TensorRT is not installed.
        ShapeError: a profile does not fit the graph.
    """
    # The rules check every node; the parser may stop at the first error.
    faults = lint_onnx(graph, parser=False).errors
    if faults:
        raise ProviderError(
            f"TensorRT does not support the quantized graph, so it was not saved: "
            f"{faults[0].node}: {faults[0].problem}",
            do=faults[0].remedy,
        )
    if not list_capabilities(config):
        return []
    report = parse_onnx(graph)
    if not report.accepted:
        more = "".join(f"; {refusal}" for refusal in report.refusals[1:3])
        raise ProviderError(
            f"TensorRT {report.tensorrt} rejected the quantized graph, so it was not saved: "
            f"{report.refusals[0]}{more}",
            do="Exclude the layer with --exclude NODE.",
        )
    limits = FeedLimits.from_artifact(source.artifact)
    profiles = _read_profiles(source.artifact, config)[source.record.file]
    profiles = profiles or trial_profiles(source.record, limits)
    trials = []
    for capability in list_capabilities(config):
        built = build_plan(
            graph, BuildRequest(profiles, capabilities=[capability], limits=limits.max_sizes)
        )
        # A fused layer lists its nodes. The kernel that quantizes may list the matrix product as
        # well, so only products are counted.
        multiplied = {
            node
            for layer in built.layers
            if layer.kind in ("gemm", "convolution") and layer.precision == config.scheme
            for node in layer.nodes
        }
        missing = tuple(layer.name for layer in quantized if layer.name not in multiplied)
        trials.append(
            EngineTrial(
                capability=capability,
                tensorrt=built.tensorrt,
                profiles=tuple(str(profile) for profile in profiles),
                layers=built.counts(),
                quantized_layers=len(quantized) - len(missing),
                not_quantized=missing,
                fused_attentions=built.fused_attentions,
                plan_bytes=built.plan_bytes,
                seconds=built.seconds,
                graph=source.record.file,
            )
        )
    return trials


def _read_profiles(artifact: Artifact, config: QuantizeConfig) -> dict[str, list[Profile]]:
    limits = FeedLimits.from_artifact(artifact)
    inputs = {record.file: record.inputs for record in artifact.manifest.graphs}
    return profiles_by_graph(inputs, config.profile, limits.max_sizes)


def trial_profiles(record: GraphRecord, limits: FeedLimits) -> list[Profile]:
    """Return one profile over all dynamic dims: batches of 1 to 32, sequences up to the limit."""
    names = dynamic_dims(record.inputs)
    positions = limits.position_limit or limits.max_positions
    parts = []
    for name in names:
        if is_batch(name):
            low, opt, high = _BATCH
        elif name in limits.sizes:
            low = opt = high = limits.sizes[name]
        else:
            high = share_of_positions(name, names, positions)
            low, opt = min(limits.min_sequence, high), min(max(high // 4, 1), 128)
            if name.startswith(PAST):  # a prompt has none
                low = 0
        parts.append(f"{name}={low}:{max(low, opt)}:{high}")
    return [Profile.parse(",".join(parts))] if parts else []

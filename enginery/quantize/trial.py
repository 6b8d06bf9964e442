"""What TensorRT and ONNX Runtime make of the quantized graph, before anything is saved.

    >>> (trial,) = build_trials(path, artifact, config, layers)
    >>> trial.quantized_layers, trial.layers
    (36, {'gemm int8': 24, 'attention fp16': 6, 'other fp16': 44})

What the builder did not do is not claimed: a layer counts when the engine multiplies it in INT8 or
FP8.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from enginery.core.artifact import Artifact
from enginery.core.errors import ProviderError
from enginery.core.feeds import FeedLimits
from enginery.core.manifest import GraphRecord
from enginery.core.model_files import ModelConfig
from enginery.core.reports import EngineTrial
from enginery.core.shapes import Profile, dynamic_dims
from enginery.passes.layers import Layer
from enginery.passes.lint import lint_onnx
from enginery.quantize.config import QuantizeConfig, capabilities_of
from enginery.runtime.tensorrt.library import require_tensorrt
from enginery.runtime.tensorrt.process import RTX, build_plan, parse_onnx, resolve_capabilities

_BATCH = (1, 8, 32)


def check_trial(artifact: Artifact, config: QuantizeConfig) -> None:
    """Looks at what engines are to be built for, before the calibration takes its time.

    Raises:
        OptionError: TensorRT builds for no such GPU.
        ShapeError: a profile does not fit.
        MissingPackageError: TensorRT is not installed.
    """
    if not capabilities_of(config):
        return
    require_tensorrt("Building a trial engine (--empty-capabilities builds none)")
    resolve_capabilities(RTX, capabilities_of(config))
    limits = FeedLimits.from_config(ModelConfig.read(artifact.path))
    for profile in config.profile:
        Profile.parse(profile).check(artifact.manifest.graphs[0].inputs, limits.ends)


def build_trials(
    graph: Path, artifact: Artifact, config: QuantizeConfig, quantized: Sequence[Layer]
) -> list[EngineTrial]:
    """Looks the graph over, parses it and builds an engine of it for every capability asked for.

    Raises:
        ProviderError: TensorRT refuses the graph, or cannot build it.
        MissingPackageError: TensorRT is not installed.
        ShapeError: a profile does not fit.
    """
    faults = lint_onnx(graph, parser=False).errors
    if faults:
        raise ProviderError(
            f"TensorRT takes no such graph, so it is not saved: {faults[0].node}: "
            f"{faults[0].problem}",
            do=faults[0].remedy,
        )
    if not capabilities_of(config):
        return []
    record = artifact.manifest.graphs[0]
    report = parse_onnx(graph)
    if not report.accepted:
        more = "".join(f"; {refusal}" for refusal in report.refusals[1:3])
        raise ProviderError(
            f"TensorRT {report.tensorrt} refuses the quantized graph, so it is not saved: "
            f"{report.refusals[0]}{more}",
            do="Leave the layer out with --exclude NODE.",
        )
    limits = FeedLimits.from_config(ModelConfig.read(artifact.path))
    profiles = [Profile.parse(text) for text in config.profile] or trial_profiles(record, limits)
    trials = []
    for capability in capabilities_of(config):
        built = build_plan(graph, profiles=profiles, capabilities=[capability], limits=limits.ends)
        # A fused layer names the nodes in it; the kernel that quantizes may name the product, too.
        multiplied = {
            node for layer in built.layers
            if layer.kind in ("gemm", "convolution") and layer.precision == config.scheme
            for node in layer.nodes
        }  # fmt: skip
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
            )
        )
    return trials


def trial_profiles(record: GraphRecord, limits: FeedLimits) -> list[Profile]:
    """One profile over every dynamic dim: batches of 1 to 32, sequences up to the model's own."""
    parts = []
    for name in dynamic_dims(record.inputs):
        if name == "batch":
            low, opt, high = _BATCH
        elif name in limits.sizes:
            low = opt = high = limits.sizes[name]
        else:
            high = limits.hard_limit or limits.max_positions
            low, opt = min(limits.min_sequence, high), min(max(high // 4, 1), 128)
        parts.append(f"{name}={low}:{max(low, opt)}:{high}")
    return [Profile.parse(",".join(parts))] if parts else []

"""Build an engine with TensorRT in this process.

    profiles = [Profile.parse("batch=1:8:32,sequence=8:128:512")]
    built = build_in_process(Path("model.onnx"), BuildRequest(profiles, capabilities=["8.9"]))
    built.plan_bytes          # 226900123
    built.fused_attentions    # 12

TensorRT may crash on unusual graphs, and does not free all its memory after a build, so
`tensorrt.process` calls this in a child process.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from enginery.core.artifact.engine_record import LayerRecord
from enginery.core.errors import OptionError, ProviderError, ShapeError
from enginery.core.scratch import write_atomically
from enginery.core.shapes import Profile, TensorSpec, dynamic_dims
from enginery.core.subprocess import peak_rss_bytes
from enginery.runtime.tensorrt.inspector import inspect_plan
from enginery.runtime.tensorrt.library import (
    Messages,
    Sink,
    capability_value,
    load_tensorrt,
    trt_messages,
)
from enginery.runtime.tensorrt.log import memory_bytes, read_layers
from enginery.runtime.tensorrt.options import CLASSIC, RTX, BuildOptions, Flavor, get_flavor
from enginery.runtime.tensorrt.parse import (
    MERGED_CONDITION,
    MERGED_REMEDY,
    last_error,
    make_builder,
    network_inputs,
    network_outputs,
    open_parser,
    parse_into,
    require_file,
)
from enginery.runtime.tensorrt.reports import BuiltPlan, ParseReport


@dataclass(frozen=True)
class BuildRequest:
    """What an engine is built for: shapes, GPUs and options."""

    profiles: Sequence[Profile]
    """Ranges of the graph's named dims; empty for a graph with fixed shapes."""
    capabilities: str | Sequence[str] = ("8.9",)
    """Compute capabilities to build for (8.9, 12.0, …) or `current`; empty for a portable plan; see
    `resolve_capabilities`. Classic TensorRT accepts only `current`."""
    flavor: Flavor = RTX
    options: BuildOptions = field(default_factory=BuildOptions)
    limits: Mapping[str, int] = field(default_factory=dict)
    """Largest size of each dim that the model allows, `{"sequence": 512}`. TensorRT would build for
    longer sequences, and read memory outside of the position embeddings."""

    def as_json(self) -> dict[str, Any]:
        """Return the request for the child process."""
        return {
            "profiles": [str(profile) for profile in self.profiles],
            "capabilities": list(self.capabilities),
            "flavor": self.flavor.name,
            "options": asdict(self.options),
            "limits": dict(self.limits),
        }

    @classmethod
    def from_json(cls, request: Mapping[str, Any]) -> BuildRequest:
        """Return the request that `as_json` was called on."""
        return cls(
            [Profile.parse(text) if text else Profile({}) for text in request["profiles"]],
            capabilities=request["capabilities"],
            flavor=get_flavor(request["flavor"]),
            options=BuildOptions(**request["options"]),
            limits=request["limits"],
        )


def build_in_process(
    path: Path,
    request: BuildRequest,
    *,
    plan_path: Path | None = None,
    follow: Sequence[Sink] = (),
) -> BuiltPlan:
    """Build an engine for resolved capabilities; see `process.build_plan` for the errors."""
    flavor, options = request.flavor, request.options
    profiles, capabilities = request.profiles, tuple(request.capabilities)
    trt = load_tensorrt(flavor=flavor)
    require_file(path)
    started = time.monotonic()
    with trt_messages(trt, follow) as messages:
        builder = make_builder(trt, flavor, messages)
        network, parser = open_parser(trt, builder, flavor, messages)
        if refusals := parse_into(network, parser, path, messages):
            ParseReport(str(path), trt.__version__, False, refusals, (), ()).require_accepted()
        config = builder.create_builder_config()
        # With this verbosity, both the log and the engine have the layers and their types.
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_bytes)
        if flavor is CLASSIC:
            _configure_classic(trt, config, capabilities, options)
        else:
            # TensorRT for RTX builds for GPUs that this machine need not have.
            targets = [capability_value(trt, capability) for capability in capabilities]
            config.num_compute_capabilities = len(targets)
            for index, target in enumerate(targets):
                config.set_compute_capability(target, index)
        inputs = network_inputs(network)
        _add_profiles(builder, config, network, inputs, profiles, request.limits)
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise ProviderError(
                f"{path}: {flavor.title} {trt.__version__} built no engine for "
                f"{', '.join(capabilities) or 'any GPU'}: {last_error(messages)}",
                do=_build_remedy(messages, inputs),
            )
        layers, memory = _layers_and_memory(trt, flavor, plan, messages)
        if not layers:
            raise ProviderError(
                f"{path}: an engine was built, but {flavor.title} {trt.__version__} did not list "
                "its layers.",
                do="Another logger was created first in this process; build in a child process.",
            )
        if plan_path is not None:
            write_atomically(plan_path, plan)
        return BuiltPlan(
            held=b"" if plan_path else bytes(plan),
            plan_path=str(plan_path or ""),
            plan_bytes=int(plan.nbytes),
            flavor=flavor.name,
            layers=layers,
            tensorrt=trt.__version__,
            capabilities=capabilities,
            profiles=tuple(str(profile) for profile in profiles),
            inputs=inputs,
            outputs=network_outputs(network),
            seconds=round(time.monotonic() - started, 3),
            peak_rss_bytes=peak_rss_bytes(),
            activation_bytes=memory.get("activation", 0),
            weights_bytes=memory.get("weights", 0),
            warnings=tuple(messages.warnings()),
        )


def _configure_classic(
    trt: Any, config: Any, capabilities: Sequence[str], options: BuildOptions
) -> None:
    """Set the options that only classic TensorRT has."""
    config.builder_optimization_level = options.optimization_level
    if not options.tf32:  # it is on by default
        config.clear_flag(trt.BuilderFlag.TF32)
    level = options.hardware_compatibility
    if level == "ampere-plus" and capabilities[0].startswith("7."):
        raise OptionError(
            f"option 'hardware_compatibility' is {level}, but this GPU has compute capability "
            f"{capabilities[0]}, expected 8.0 or newer.",
            do="Build the engine on a newer GPU, or set hardware_compatibility to "
            "same-compute-capability.",
        )
    name = level.upper().replace("-", "_")
    config.hardware_compatibility_level = getattr(trt.HardwareCompatibilityLevel, name)


def _layers_and_memory(
    trt: Any, flavor: Flavor, plan: Any, messages: Messages
) -> tuple[tuple[LayerRecord, ...], dict[str, int]]:
    """Return the engine's layers, and its device memory in bytes."""
    memory = memory_bytes(messages.texts("info"))
    if flavor is RTX:
        return read_layers(messages.texts("verbose")), memory
    layers, activation_bytes = inspect_plan(trt, plan, messages)
    return layers, {"activation": activation_bytes, **memory}


def _build_remedy(messages: Messages, inputs: Sequence[TensorSpec]) -> str:
    errors = " ".join(messages.errors())
    if any(spec.name == MERGED_CONDITION for spec in inputs):
        return MERGED_REMEDY
    if "FP32 GEMM is not supported" in errors:
        return (
            "GPUs of compute capability 7.5 multiply matrices only in FP16 and INT8; convert the "
            "graph to FP16 first: enginery optimize --target tensorrt --precision fp16"
        )
    if "Attention operation was not supported" in errors:
        return (
            "TensorRT builds the Attention operator only in FP16 and BF16; convert the graph to "
            "FP16 first, or export with opset 20."
        )
    if "violate shape constraints" in errors:
        return "The graph cannot run at the profile's sizes; choose sizes that the model allows."
    return ""


def _add_profiles(
    builder: Any,
    config: Any,
    network: Any,
    inputs: Sequence[TensorSpec],
    profiles: Sequence[Profile],
    limits: Mapping[str, int],
) -> None:
    """Check the profiles, because TensorRT misses most mistakes, and add them."""
    for index, spec in enumerate(inputs):
        if -1 in spec.dims:
            raise ShapeError(
                f"input {spec.name}: dim {spec.dims.index(-1)} is dynamic, but has no name.",
                do="Import the model with `enginery export`, which names the dims, or fix it.",
            )
        if network.get_input(index).is_shape_tensor:
            raise ShapeError(
                f"input {spec.name} holds a shape: the graph computes the sizes of tensors from "
                "its values, which a profile of named dims cannot limit.",
                do="Make it a constant of the graph.",
            )
    names = dynamic_dims(inputs)
    if names and not profiles:
        example = ",".join(f"{name}=1:8:32" for name in names)
        raise ShapeError(
            f"the graph has the dynamic dims {', '.join(names)}, but no profile was given.",
            do=f"Pass a profile, for example {example}.",
        )
    for profile in profiles:
        # Beyond the model's own limits, TensorRT would build an engine that reads memory outside of
        # the position embeddings.
        profile.check(inputs, limits)
    if not names:  # the shapes are fixed, and a profile would say nothing
        return
    for number, profile in enumerate(profiles):
        ranges = builder.create_optimization_profile()
        for spec in inputs:
            ranges.set_shape(spec.name, *profile_shapes(spec, profile))
        if config.add_optimization_profile(ranges) != number:
            raise ShapeError(f"TensorRT rejects the profile '{profile}'.")


def profile_shapes(spec: TensorSpec, profile: Profile) -> tuple[tuple[int, ...], ...]:
    """Return the input's shapes at the profile's minimum, optimum and maximum."""
    return tuple(
        spec.shape({name: getattr(sizes, end) for name, sizes in profile.dims.items()})
        for end in ("min", "opt", "max")
    )

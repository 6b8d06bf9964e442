"""Parsing and building in this process.

Takes the path of an ONNX file; leaves nothing on disk.

    >>> built = build_here(Path("model.onnx"), [Profile.parse("batch=1:8:32,sequence=8:128:512")])
    >>> len(built.plan), built.fused_attentions
    (226900123, 12)

TensorRT may end the process on a graph that it does not expect, and keeps memory after a build:
`runtime.tensorrt` calls these functions in a child process.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from enginery.core.errors import ProviderError, ShapeError, SourceError
from enginery.core.memory import peak_rss_bytes
from enginery.core.shapes import Profile, TensorSpec, canonical_dim, dynamic_dims
from enginery.runtime.tensorrt_library import (
    Messages,
    Sink,
    capability_value,
    load_tensorrt,
    trt_messages,
)
from enginery.runtime.tensorrt_log import memory_bytes, read_layers
from enginery.runtime.tensorrt_reports import BuiltPlan, ParseReport, Refusal

# One word for each: TensorRT names the C++ type, the rest of this package numpy's.
_DTYPES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT8": "int8",
           "INT32": "int32", "INT64": "int64", "BOOL": "bool", "UINT8": "uint8"}  # fmt: skip

# TensorRT looks for a device now and then; without one it says so inside other errors.
_NO_DEVICE = re.compile(r"^\[?checkMacros\.cpp::catchCudaError.*$", re.MULTILINE)


def parse_here(path: Path, *, follow: Sequence[Sink] = ()) -> ParseReport:
    """Asks TensorRT's parser about a graph.

    Raises:
        SourceError: there is no such file.
        MissingPackageError: TensorRT for RTX is not installed.
    """
    trt = load_tensorrt("Parsing a graph with TensorRT")
    _require_file(path)
    with trt_messages(follow) as messages:
        network, parser = _parser(trt, messages)
        refusals = _parse(parser, network, path, messages)
        return ParseReport(
            path=str(path),
            tensorrt=trt.__version__,
            accepted=not refusals,
            refusals=refusals,
            inputs=_inputs(network),
            warnings=tuple(messages.warnings()),
        )


def build_here(
    path: Path,
    profiles: Sequence[Profile],
    *,
    capabilities: Sequence[str],
    workspace_bytes: int,
    limits: Mapping[str, int],
    follow: Sequence[Sink] = (),
) -> BuiltPlan:
    """Builds an engine; the arguments and errors are those of `tensorrt.build_plan`."""
    trt = load_tensorrt()
    _require_file(path)
    targets = [capability_value(trt, capability) for capability in capabilities]
    started = time.monotonic()
    with trt_messages(follow) as messages:
        builder = trt.Builder(messages.logger)
        network, parser = _parser(trt, messages, builder)
        if refusals := _parse(parser, network, path, messages):
            ParseReport(str(path), trt.__version__, False, refusals, (), ()).require_accepted()
        config = builder.create_builder_config()
        # The layers are in the log, and in the engine for who inspects it, with their types.
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace_bytes)
        config.num_compute_capabilities = len(targets)
        for index, target in enumerate(targets):
            config.set_compute_capability(target, index)
        inputs = _inputs(network)
        _add_profiles(builder, config, network, inputs, profiles, limits)
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise ProviderError(
                f"{path}: TensorRT {trt.__version__} built no engine for "
                f"{', '.join(capabilities) or 'any GPU'}: {_last_error(messages)}",
                do=_build_remedy(messages),
            )
        layers = read_layers(messages.texts("verbose"))
        if not layers:
            raise ProviderError(
                f"{path}: an engine was built, but TensorRT {trt.__version__} did not list its "
                "layers in the build log.",
                do="Another logger came first in this process; build in a child process.",
            )
        memory = memory_bytes(messages.texts("info"))
        return BuiltPlan(
            plan=bytes(plan),
            layers=layers,
            tensorrt=trt.__version__,
            capabilities=tuple(capabilities),
            profiles=tuple(str(profile) for profile in profiles),
            inputs=inputs,
            outputs=tuple(_spec(network.get_output(i)) for i in range(network.num_outputs)),
            seconds=round(time.monotonic() - started, 3),
            peak_rss_bytes=peak_rss_bytes(),
            activation_bytes=memory.get("activation", 0),
            weights_bytes=memory.get("weights", 0),
            warnings=tuple(messages.warnings()),
        )


def _parser(trt: Any, messages: Messages, builder: Any = None) -> tuple[Any, Any]:
    network = (builder or trt.Builder(messages.logger)).create_network(0)
    return network, trt.OnnxParser(network, messages.logger)


def _parse(parser: Any, network: Any, path: Path, messages: Messages) -> tuple[Refusal, ...]:
    """Parses the file into the network; why TensorRT does not take it, or nothing."""
    if not parser.parse_from_file(str(path)):
        return _refusals(parser) or (Refusal("", "", _last_error(messages)),)
    # A file that is no ONNX at all is "parsed", too.
    if not network.num_outputs:
        raise SourceError(f"{path} is not an ONNX model: TensorRT finds no outputs in it.")
    return ()


def _refusals(parser: Any) -> tuple[Refusal, ...]:
    found = []
    for error in (parser.get_error(index) for index in range(parser.num_errors)):
        name = error.node_name() or (f"#{error.node()}" if error.node() >= 0 else "")
        reason = " ".join(_NO_DEVICE.sub("", error.desc()).split())
        found.append(Refusal(name, error.node_operator(), reason))
    return tuple(dict.fromkeys(found))


def _last_error(messages: Messages) -> str:
    return next(reversed(messages.errors()), "no reason given.")


def _build_remedy(messages: Messages) -> str:
    errors = " ".join(messages.errors())
    if "FP32 GEMM is not supported" in errors:
        return (
            "Compute capability 7.5 multiplies matrices in FP16 and INT8 alone; make the graph "
            "FP16 first: enginery optimize --target tensorrt --precision fp16"
        )
    if "Attention operation was not supported" in errors:
        return (
            "TensorRT builds the Attention operator in FP16 and BF16 alone; make the graph FP16 "
            "first, or export at opset 20."
        )
    if "violate shape constraints" in errors:
        return "The graph cannot run at the profile's sizes; give sizes that the model allows."
    return ""


def _require_file(path: Path) -> None:
    if not path.is_file():
        raise SourceError(f"{path} is not a file; expected an ONNX model.")


def _inputs(network: Any) -> tuple[TensorSpec, ...]:
    return tuple(_spec(network.get_input(index)) for index in range(network.num_inputs))


def _spec(tensor: Any) -> TensorSpec:
    """Dims by the names that profiles use: Optimum's `batch_size` is batch.

    A dynamic dim without a name is -1; those of outputs have none.
    """
    dtype = tensor.dtype.name
    sizes = [int(size) for size in tensor.shape] if len(tensor.shape) >= 0 else []
    names = [tensor.get_dimension_name(axis) or "" for axis in range(len(sizes))]
    dims = (
        size if size >= 0 else canonical_dim(name) or -1
        for size, name in zip(sizes, names, strict=True)
    )
    return TensorSpec(tensor.name, _DTYPES.get(dtype, dtype.lower()), tuple(dims))


def _add_profiles(
    builder: Any,
    config: Any,
    network: Any,
    inputs: Sequence[TensorSpec],
    profiles: Sequence[Profile],
    limits: Mapping[str, int],
) -> None:
    """Checks the profiles and hands them to TensorRT, which would let most mistakes through."""
    for index, spec in enumerate(inputs):
        if -1 in spec.dims:
            raise ShapeError(
                f"input {spec.name}: dim {spec.dims.index(-1)} is dynamic and has no name.",
                do="Import the model with `enginery export`, which names the dims, or fix it.",
            )
        if network.get_input(index).is_shape_tensor:
            raise ShapeError(
                f"input {spec.name} holds a shape: the graph computes the sizes of tensors from "
                "its values, and a profile of named dims cannot bound those.",
                do="Make it a constant of the graph.",
            )
    names = dynamic_dims(inputs)
    if names and not profiles:
        example = ",".join(f"{name}=1:8:32" for name in names)
        raise ShapeError(
            f"the graph has the dynamic dims {', '.join(names)} and no profile was given.",
            do=f"Give one, for example {example}.",
        )
    for profile in profiles:
        profile.check(inputs, limits)
    for number, profile in enumerate(profiles if names else ()):
        ranges = builder.create_optimization_profile()
        for spec in inputs:
            ranges.set_shape(spec.name, *profile_shapes(spec, profile))
        if config.add_optimization_profile(ranges) != number:
            raise ShapeError(f"profile '{profile}' is not one that TensorRT takes.")


def profile_shapes(spec: TensorSpec, profile: Profile) -> tuple[tuple[int, ...], ...]:
    """The input's shapes at the profile's minimum, optimum and maximum."""
    return tuple(
        spec.shape({name: getattr(sizes, end) for name, sizes in profile.dims.items()})
        for end in ("min", "opt", "max")
    )

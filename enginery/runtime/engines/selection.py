"""Choose the engines of an artifact that this machine's GPU can run.

    engines, reason = choose_engines(artifact, artifact.manifest.graphs[0], RTX)
    wrapper_path(engines[0]).name                # 'model_ctx.onnx'
    str(reachable_profile(engines[0].record))    # 'batch=1:8:32,sequence=8:128:512'

There is one engine for each profile, because ONNX Runtime reaches only the first profile of an
engine. Nothing is built here, and incompatible engines are rejected before ONNX Runtime loads them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.engine import Engine
from enginery.core.artifact.engine_record import EngineRecord
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import ProviderError
from enginery.core.shapes import Profile, dynamic_dims
from enginery.runtime.engines.compatibility import incompatibility, loaded_version
from enginery.runtime.providers.gpus import CudaGpu, visible_gpus
from enginery.runtime.providers.known import CPU, short_name
from enginery.runtime.providers.selection import REQUESTED, Provider, choose_providers
from enginery.runtime.providers.specification import Providers, parse_providers
from enginery.runtime.tensorrt.options import CLASSIC, FLAVORS, Flavor


def wrapper_path(engine: Engine) -> Path:
    """Return the path of the ONNX model that a session opens."""
    return engine.path / engine.record.wrapper


def reachable_profile(record: EngineRecord) -> Profile:
    """Return the first profile, which inputs must fit; without dims if all shapes are fixed.

    A session over an EPContext node always uses profile 0. This holds for TensorRT's provider in
    ONNX Runtime 1.31 (github.com/microsoft/onnxruntime/pull/31624 will change it) and for the
    provider of TensorRT for RTX: its `nv_profile_index` applies only to engines that the provider
    builds.
    """
    return Profile.parse(record.profiles[0]) if record.profiles else Profile({})


def flavor_for_provider(provider: str) -> Flavor | None:
    """Return the flavor whose engines a provider loads; None if it needs no engine."""
    return next((flavor for flavor in FLAVORS.values() if flavor.provider == provider), None)


def choose_engines(
    artifact: Artifact, graph: GraphRecord, flavor: Flavor, *, device_id: int = 0
) -> tuple[list[Engine], str]:
    """Return the engines of a graph that a GPU can run, one for each profile, and the reason.

    If two engines have the same profile, one built for this GPU is preferred to a portable one.

    Args:
        artifact: artifact with the engines.
        graph: the graph.
        flavor: flavor of the execution provider that loads the engines.
        device_id: index of the visible GPU.

    Raises:
        ProviderError: no engine is compatible (the message lists the engines with the reasons, and
            the GPU), or there is no such GPU.
        ArtifactError: a file of an engine is missing or altered.
    """
    gpu = get_gpu(device_id)
    version = loaded_version(flavor)
    fitting: dict[str, Engine] = {}
    refused = []
    # Engines for fewer GPUs are faster and come first, and the first one of a profile is chosen.
    for engine in sorted(artifact.engines(), key=_generality):
        if engine.record.graph != graph.file:
            continue
        if problem := incompatibility(artifact, graph, engine, flavor, gpu, version):
            refused.append(f"{_describe(engine)}: {problem}")
        else:
            fitting.setdefault(str(reachable_profile(engine.record)), engine)
    if not fitting:
        raise _no_engine(artifact, graph, flavor, gpu, refused, device_id)
    chosen = list(fitting.values())
    return chosen, _reason(chosen, gpu, version)


def choose_with_engines(
    artifact: Artifact,
    graph: GraphRecord,
    providers: Providers,
    *,
    allow_fallback: bool = False,
    allow_build: bool = False,
) -> tuple[list[Provider], list[Engine]]:
    """Return the providers for a graph's sessions, and the engines to load (none without TensorRT).

    Args:
        artifact: artifact with the engines.
        graph: the graph.
        providers: requested providers, see `choose_providers`.
        allow_fallback: use a later provider if an earlier one, or an engine for it, is unavailable.
        allow_build: if no engine is compatible, let ONNX Runtime build one.

    Raises:
        ProviderError: a provider is unavailable, or no engine runs on this GPU.
        ArtifactError: a file of an engine is missing or altered.
    """
    specs = parse_providers(providers)
    missed: list[str] = []
    while True:
        head, *below = choose_providers(specs, allow_fallback=allow_fallback)
        flavor = flavor_for_provider(head.name)
        if flavor is None:
            return [_add_reasons(head, *missed), *below], []
        later = specs[[spec.full_name for spec in specs].index(head.name) + 1 :]
        try:
            device_id = int(head.options.get("device_id", "0"))
            engines, reason = choose_engines(artifact, graph, flavor, device_id=device_id)
        except ProviderError as error:
            # The provider stays the first without an engine, and its reason says why.
            if allow_build:
                built = "ONNX Runtime builds an engine while it loads (allow_build)"
                return [_add_reasons(head, *missed, error.message, built), *below], []
            if not allow_fallback or not later:
                raise
            missed.append(f"{short_name(head.name)} requested, but {error.message}")
            specs = later
        else:
            # An engine leaves no nodes to CUDA, so that of the others only the CPU stays.
            explanation = "ONNX Runtime adds it; an engine contains all operations"
            cpu = Provider(CPU, explanation, below[-1].options)
            return [_add_reasons(head, *missed, reason), cpu], engines


def get_gpu(device_id: int) -> CudaGpu:
    """Return the visible GPU of a provider's `device_id`.

    Raises:
        ProviderError: there is no such GPU.
    """
    gpus = visible_gpus()
    if device_id >= len(gpus):
        names = ", ".join(f"{index} {gpu.name}" for index, gpu in enumerate(gpus))
        raise ProviderError(
            f"device_id is {device_id}, but this process sees the GPUs {names}.",
            do="Choose one of them, or make more visible: CUDA_VISIBLE_DEVICES.",
        )
    return gpus[device_id]


def _add_reasons(provider: Provider, *reasons: str) -> Provider:
    stated = [reason.rstrip(".") for reason in (*reasons, provider.reason) if reason != REQUESTED]
    return replace(provider, reason="; ".join(stated) or provider.reason)


def _describe(engine: Engine) -> str:
    record = engine.record
    targets = ", ".join(record.capabilities) or "all GPUs that it supports"
    return f"{engine.name} (TensorRT {record.tensorrt} for {targets})"


def _generality(engine: Engine) -> tuple[int, str]:
    """Return a sort key: engines for fewer GPUs, which are faster, come first; then by name."""
    record = engine.record
    wide = record.hardware_compatibility != "none"
    return (100 if wide or not record.capabilities else len(record.capabilities)), engine.name


def _reason(engines: Sequence[Engine], gpu: CudaGpu, version: str) -> str:
    parts = []
    for engine in engines:
        more = len(engine.record.profiles) - 1
        unreached = f", the first of {more + 1}: ONNX Runtime cannot use others" if more else ""
        profile = reachable_profile(engine.record)
        shapes = f"the profile {profile}{unreached}" if profile.dims else "one shape"
        parts.append(f"{_describe(engine)} with {shapes}")
    checked = "" if version else "; the version of TensorRT could not be read"
    names = "; ".join(parts)
    return f"{gpu.name} ({gpu.compute_capability}) runs the engine {names}{checked}"


def _no_engine(
    artifact: Artifact,
    graph: GraphRecord,
    flavor: Flavor,
    gpu: CudaGpu,
    refused: Sequence[str],
    device_id: int,
) -> ProviderError:
    ending = f": {'; '.join(refused)}" if refused else ", it has none"
    message = (
        f"{artifact.path} has no engine of {graph.file} that {flavor.title} runs on this GPU, "
        f"{gpu.name} of compute capability {gpu.compute_capability}{ending}."
    )
    # No build helps where the flavor does not know the GPU.
    if not flavor.supports(gpu.compute_capability):
        supported = ", ".join(flavor.capabilities)
        return ProviderError(
            message,
            do=f"{flavor.title} supports {supported}. On this GPU use --providers "
            f"{CLASSIC.name} with an engine of that flavor, or --providers cuda.",
        )
    profile = ",".join(f"{name}=1:8:32" for name in dynamic_dims(graph.inputs))
    shapes = f" --profile {profile}" if profile else ""
    line = f"enginery build {artifact.path} --flavor {flavor.name} --capability current{shapes}"
    if device_id:
        # A build uses the first visible GPU.
        line = f"CUDA_VISIBLE_DEVICES={_outer_number(device_id)} {line}"
    return ProviderError(message, do=f"Build one: {line}")


def _outer_number(device_id: int) -> str:
    """Return the entry of a visible GPU in CUDA_VISIBLE_DEVICES."""
    visible = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return visible[device_id] if device_id < len(visible) else str(device_id)

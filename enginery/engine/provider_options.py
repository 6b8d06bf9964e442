"""Options of ONNX Runtime's TensorRT providers for an artifact, for Optimum and plain sessions.

With these options the provider builds an engine on its first run, for the GPU of the machine, and
caches it. ONNX Runtime keys its cache by the model's file name, not by its weights, so each
artifact, provider and set of profiles gets its own cache directory here. An engine that was built
ahead of time needs none of this: see `runtime.engines`.

The option names are documented in
onnxruntime.ai/docs/execution-providers/TensorRT-ExecutionProvider.html and in NVIDIA's
github.com/NVIDIA/TensorRT-RTX-EP-ABI.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.engine import Engine
from enginery.core.artifact.engine_record import engine_directories, graph_sha256
from enginery.core.artifact.fingerprint import Fingerprint, runtime_version, tool_versions
from enginery.core.artifact.manifest import GraphRecord, Manifest
from enginery.core.errors import OptionError, ShapeError
from enginery.core.home import enginery_home
from enginery.core.model.feeds import FeedLimits
from enginery.core.shapes import Profile, enclosing_profile, profile_shapes
from enginery.engine.profiles.check import check_profiles, read_profiles
from enginery.runtime.engines.selection import flavor_for_provider
from enginery.runtime.providers.known import full_name, short_name
from enginery.runtime.tensorrt.options import CLASSIC, RTX, Flavor


def provider_options(
    artifact: Artifact,
    provider: str,
    *,
    graph: str = "",
    profiles: Sequence[str] = (),
    fp16: bool = False,
    save_context: bool = False,
) -> dict[str, str]:
    """Return the provider options for a session with one graph of the artifact.

    Args:
        artifact: has the graph, and possibly engines with profiles.
        provider: `tensorrt` or `tensorrt-rtx`, or ONNX Runtime's name.
        graph: file of the graph; empty for the first.
        profiles: texts such as `batch=1:8:32,sequence=8:128:512`. If empty, the profiles of the
            artifact's engines.
        fp16: let TensorRT 10 choose FP16 for an FP32 graph. Otherwise the graph's own dtypes hold.
        save_context: also write the engine's ONNX wrapper to the cache directory
            (`trt_ep_context_*`); only for classic TensorRT.

    Returns:
        Option name -> value, both strings.

    Raises:
        OptionError: the provider is not TensorRT's, or does not have an option.
        ShapeError: a profile does not fit the graph, there is none for its dynamic dims, or there
            are several but the provider runs only the first.
        ArtifactError: the artifact has no such graph.
    """
    flavor = _flavor(provider)
    record = artifact.graph(graph) if graph else artifact.manifest.graphs[0]
    _check_typing(artifact.manifest, flavor, fp16=fp16, save_context=save_context)
    chosen = _profiles(artifact, record, flavor, profiles)
    fields = {
        "graph": graph_sha256(record, artifact.manifest.files),
        "profiles": ";".join(str(profile) for profile in chosen),
        "fp16": str(fp16),
        "save_context": str(save_context),
        **runtime_version(),
        **tool_versions(["tensorrt-cu13-libs", "tensorrt-rtx-cu13-libs"]),
    }
    key = Fingerprint(f"provider-{flavor.name}", fields).key[:16]
    cache = enginery_home() / "providers" / f"{flavor.name}-{Path(record.file).stem}-{key}"
    cache.mkdir(parents=True, exist_ok=True)  # TensorRT's provider creates only the last level
    if flavor is RTX:
        options = {"nv_runtime_cache_path": str(cache)}
        if len(chosen) > 1:
            options["nv_multi_profile_enable"] = "1"
        return {**options, **profile_shapes("nv", record.inputs, chosen)}
    options = {
        "trt_engine_cache_enable": "True",
        "trt_engine_cache_path": str(cache),
        "trt_engine_cache_prefix": Path(record.file).stem,
        "trt_timing_cache_enable": "True",
        "trt_timing_cache_path": str(cache),
    }
    if fp16:
        options["trt_fp16_enable"] = "True"
    if save_context:
        # With a context path, the cache path must be relative (onnxruntime issue 22131). Without
        # one, the provider uses the directory of the context.
        del options["trt_engine_cache_path"]
        options |= {
            "trt_dump_ep_context_model": "True",
            "trt_ep_context_file_path": str(cache),
            "trt_ep_context_embed_mode": "0",
        }
    return {**options, **profile_shapes("trt", record.inputs, chosen)}


def to_python(provider: str, options: Mapping[str, str]) -> str:
    """Format the options as Python code for `onnxruntime.InferenceSession(…, providers=…)`.

    Optimum takes the same dict as `provider_options`, and the full provider name as `provider`.
    """
    lines = "".join(f"    {name!r}: {value!r},\n" for name, value in options.items())
    return f"providers = [({full_name(provider)!r}, {{\n{lines}}})]\n"


def to_json(provider: str, options: Mapping[str, str]) -> str:
    """Format the options as JSON with Optimum's arguments `provider` and `provider_options`."""
    arguments = {"provider": full_name(provider), "provider_options": dict(options)}
    return json.dumps(arguments, indent=2) + "\n"


def _flavor(provider: str) -> Flavor:
    name = full_name(provider)
    flavor = flavor_for_provider(name)
    if flavor is None:
        raise OptionError(
            f"provider '{short_name(name)}' builds no engines, so it needs no such options.",
            do=f"Use one of: {CLASSIC.name}, {RTX.name}.",
        )
    return flavor


def _check_typing(manifest: Manifest, flavor: Flavor, *, fp16: bool, save_context: bool) -> None:
    for name, enabled in (("fp16", fp16), ("save_context", save_context)):
        if enabled and flavor is RTX:
            raise OptionError(
                f"option '{name}' is set, but the provider of {RTX.title} does not have it.",
                do="Convert the graph to FP16: enginery optimize --target tensorrt --precision fp16"
                if name == "fp16"
                else "Build the engine with its wrapper: enginery build --flavor tensorrt-rtx",
            )
    if fp16 and manifest.precision != "fp32":
        raise OptionError(
            f"option 'fp16' is set, but the graph is already {manifest.precision}, and its own "
            "dtypes hold.",
            do="Remove the option.",
        )


def _profiles(
    artifact: Artifact, record: GraphRecord, flavor: Flavor, profile_texts: Sequence[str]
) -> list[Profile]:
    texts = list(profile_texts) or _built_profiles(artifact, record, flavor)
    profiles = read_profiles(texts, record.inputs)
    limits = FeedLimits.from_artifact(artifact)
    check_profiles(profiles, record.inputs, limits.max_sizes)
    if flavor is CLASSIC and len(profiles) > 1:
        raise ShapeError(
            f"found {len(profiles)} profiles, but TensorRT's provider in ONNX Runtime 1.31 uses "
            "only the first (github.com/microsoft/onnxruntime/pull/31624).",
            do="Use one that covers them all: --profile " + str(enclosing_profile(profiles)),
        )
    return profiles


def _built_profiles(artifact: Artifact, record: GraphRecord, flavor: Flavor) -> list[str]:
    """Return the distinct profiles of the graph's engines of this flavor."""
    engines = (Engine.open(path).record for path in engine_directories(artifact.path))
    return list(
        dict.fromkeys(
            profile
            for engine in engines
            if engine.flavor == flavor.name and engine.graph == record.file
            for profile in engine.profiles
        )
    )

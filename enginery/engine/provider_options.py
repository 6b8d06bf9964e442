"""Options of ONNX Runtime's TensorRT providers for an artifact, for Optimum and plain sessions.

Takes an artifact and the name of a provider; leaves a dict of strings, and an empty directory for
what the provider caches.

    >>> options = provider_options(artifact, "tensorrt", profiles=["batch=1,sequence=1:1:64"])
    >>> ORTModelForCausalLM.from_pretrained(
    ...     artifact.path, use_cache=False, provider="TensorrtExecutionProvider",
    ...     provider_options=options,
    ... )

With these the provider builds an engine when it first runs, on the GPU that is there, and keeps it.
ONNX Runtime's own cache is keyed by the name of the model's file, not by its weights: so each
artifact, provider and set of profiles has a directory of its own here. An engine built ahead
of time needs none of this: see `runtime.engines`. The names of the options are those in
onnxruntime.ai/docs/execution-providers/TensorRT-ExecutionProvider.html and in NVIDIA's
github.com/NVIDIA/TensorRT-RTX-EP-ABI; no GPU has been given them by this project yet.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from enginery.core.artifact import Artifact
from enginery.core.engine import Engine
from enginery.core.engine_record import engine_directories, graph_sha256
from enginery.core.errors import OptionError, ShapeError
from enginery.core.feeds import FeedLimits
from enginery.core.fingerprint import Fingerprint, runtime_version, tool_versions
from enginery.core.home import enginery_home
from enginery.core.manifest import GraphRecord, Manifest
from enginery.core.model_files import ModelConfig
from enginery.core.shapes import Profile, dim_terms
from enginery.engine.profiles import check_profiles, read_profiles
from enginery.runtime.engines import flavor_of
from enginery.runtime.providers.known import full_name, short_name
from enginery.runtime.tensorrt.options import CLASSIC, RTX, Flavor

_ENDS = ("min", "opt", "max")


def provider_options(
    artifact: Artifact,
    provider: str,
    *,
    graph: str = "",
    profiles: Sequence[str] = (),
    fp16: bool = False,
    save_context: bool = False,
) -> dict[str, str]:
    """What a session over one graph of the artifact is to be given.

    Args:
        artifact: whose graph; its engines, where it has some, say the profiles.
        provider: `tensorrt` or `tensorrt-rtx`, or ONNX Runtime's name.
        graph: which of several graphs; empty for the first.
        profiles: `batch=1:8:32,sequence=8:128:512`; none for those of the artifact's engines.
        fp16: let TensorRT 10 choose FP16 for an FP32 graph by itself. Without it, the types are
            those of the graph.
        save_context: the engine's ONNX wrapper is left in the cache's directory, too
            (`trt_ep_context_*`); of classic TensorRT alone.

    Returns:
        Option -> value, all strings.

    Raises:
        OptionError: the provider is not TensorRT's, or has no such option.
        ShapeError: a profile does not fit the graph, none is known for its dynamic dims, or there
            are several for a provider that runs the first alone.
        ArtifactError: there is no such graph.
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
    cache.mkdir(parents=True, exist_ok=True)  # TensorRT's provider makes its last part alone
    if flavor is RTX:
        options = {"nv_runtime_cache_path": str(cache)}
        if len(chosen) > 1:
            options["nv_multi_profile_enable"] = "1"
        return {**options, **_shapes("nv", record, chosen)}
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
        # Beside a context's own path the cache's has to be relative (onnxruntime issue 22131): it
        # is taken from there when it is left out.
        del options["trt_engine_cache_path"]
        options |= {
            "trt_dump_ep_context_model": "True",
            "trt_ep_context_file_path": str(cache),
            "trt_ep_context_embed_mode": "0",
        }
    return {**options, **_shapes("trt", record, chosen)}


def to_python(provider: str, options: Mapping[str, str]) -> str:
    """The options as a Python list for `onnxruntime.InferenceSession(…, providers=…)`.

    Optimum takes the same dict as `provider_options`, with `provider` by its full name.
    """
    lines = "".join(f"    {name!r}: {value!r},\n" for name, value in options.items())
    return f"providers = [({full_name(provider)!r}, {{\n{lines}}})]\n"


def to_json(provider: str, options: Mapping[str, str]) -> str:
    """`{"provider": …, "provider_options": {…}}`, the names of Optimum's own arguments."""
    found = {"provider": full_name(provider), "provider_options": dict(options)}
    return json.dumps(found, indent=2) + "\n"


def _flavor(provider: str) -> Flavor:
    name = full_name(provider)
    flavor = flavor_of(name)
    if flavor is None:
        raise OptionError(
            f"provider '{short_name(name)}' builds no engines, so there are no options to give.",
            do=f"Name one of: {CLASSIC.name}, {RTX.name}.",
        )
    return flavor


def _check_typing(manifest: Manifest, flavor: Flavor, *, fp16: bool, save_context: bool) -> None:
    for name, given in (("fp16", fp16), ("save_context", save_context)):
        if given and flavor is RTX:
            raise OptionError(
                f"option '{name}' is set, and the provider of {RTX.title} has no such option.",
                do="Make the graph FP16: enginery optimize --target tensorrt --precision fp16"
                if name == "fp16"
                else "Build the engine with its wrapper: enginery build --flavor tensorrt-rtx",
            )
    quantized = any(stage.stage == "quantize" for stage in manifest.stages)
    if fp16 and (quantized or manifest.precision != "fp32"):
        found = "quantized" if quantized else manifest.precision
        raise OptionError(
            f"option 'fp16' is set, and the graph is {found} already: its own types hold.",
            do="Leave it out.",
        )


def _profiles(
    artifact: Artifact, record: GraphRecord, flavor: Flavor, given: Sequence[str]
) -> list[Profile]:
    texts = list(given) or _built_profiles(artifact, record, flavor)
    profiles = read_profiles(texts, record.inputs)
    limits = FeedLimits.from_config(ModelConfig.read(artifact.path))
    check_profiles(profiles, record.inputs, limits.ends)
    if flavor is CLASSIC and len(profiles) > 1:
        raise ShapeError(
            f"{len(profiles)} profiles were found, and TensorRT's provider in ONNX Runtime 1.31 "
            "runs the first alone (github.com/microsoft/onnxruntime/pull/31624).",
            do="Give one that spans them: --profile " + str(_spanning(profiles)),
        )
    return profiles


def _built_profiles(artifact: Artifact, record: GraphRecord, flavor: Flavor) -> list[str]:
    """Those of the graph's engines of the flavor, each once."""
    engines = (Engine.open(path).record for path in engine_directories(artifact.path))
    return list(
        dict.fromkeys(
            profile
            for engine in engines
            if engine.flavor == flavor.name and engine.graph == record.file
            for profile in engine.profiles
        )
    )


def _spanning(profiles: Sequence[Profile]) -> Profile:
    """The smallest profile that takes all that these take, tuned as the first."""
    parts = []
    for name, sizes in profiles[0].dims.items():
        low = min(profile.dims[name].min for profile in profiles)
        high = max(profile.dims[name].max for profile in profiles)
        parts.append(f"{name}={low}:{sizes.opt}:{high}")
    return Profile.parse(",".join(parts))


def _shapes(prefix: str, record: GraphRecord, profiles: Sequence[Profile]) -> dict[str, str]:
    """`trt_profile_min_shapes` and its like: `input_ids:1x1,attention_mask:1x1`.

    An input is named again for each further profile, as ParseProfileShapes of both providers reads
    it. Inputs of fixed shape are left out.
    """
    inputs = [spec for spec in record.inputs if any(dim_terms(dim) for dim in spec.dims)]
    if not profiles:
        return {}
    shapes = {}
    for end in _ENDS:
        parts = []
        for profile in profiles:
            sizes = {name: getattr(range_, end) for name, range_ in profile.dims.items()}
            parts += [f"{spec.name}:{'x'.join(map(str, spec.shape(sizes)))}" for spec in inputs]
        shapes[f"{prefix}_profile_{end}_shapes"] = ",".join(parts)
    return shapes

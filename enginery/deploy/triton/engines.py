"""Select an artifact's TensorRT engines for Triton, and compute their maximum batch size.

Triton's backends load plans of classic TensorRT, but not those of TensorRT for RTX.
"""

from __future__ import annotations

from collections.abc import Sequence

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.engine import Engine
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import ArtifactError, OptionError, ShapeError, nearest
from enginery.core.shapes import Profile
from enginery.deploy.triton.options import TritonConfig
from enginery.runtime.tensorrt.options import CLASSIC


def select_engines(artifact: Artifact, graph: GraphRecord, config: TritonConfig) -> list[Engine]:
    """Return the engines for Triton: one, or one per compute capability.

    Without `backend` tensorrt or `engine`, the result may be empty: the server can build one.

    Raises:
        ArtifactError: there is no suitable engine, engines for several capabilities have different
            profiles, or a file of an engine was changed.
        OptionError: no engine has the given name, or several engines are suitable.
    """
    engines = artifact.engines()
    if config.engine:
        names = [engine.name for engine in engines]
        if config.engine not in names:
            raise OptionError(
                f"{artifact.path} has no engine '{config.engine}'{nearest(config.engine, names)}",
                do=f"Its engines: {', '.join(names) or 'none'}.",
            )
        engines = [engine for engine in engines if engine.name == config.engine]
    fitting = [
        engine
        for engine in engines
        if engine.record.flavor == CLASSIC.name and engine.record.graph == graph.file
    ]
    if not fitting and (config.backend == "tensorrt" or config.engine):
        raise _no_engine_error(artifact, graph, engines)
    if config.backend == "onnxruntime" and len(fitting) > 1:
        raise _ambiguous_error(artifact, fitting, "ONNX Runtime's backend loads only one")
    if fitting:
        _check_shared_config(artifact, fitting)
    return fitting


def parse_profiles(engines: Sequence[Engine]) -> list[Profile]:
    """Return the profiles that the engines share, in order; none for fixed shapes."""
    return [Profile.parse(text) for text in engines[0].record.profiles] if engines else []


def largest_batch(profiles: Sequence[Profile], batch: str) -> int:
    """Return the largest `max_batch_size` with which every batch fits into a profile.

    Triton's batcher does not know the profiles. So for each profile's other dims, all batch sizes
    from 1 to the limit must be covered: by this profile, and by profiles whose other dims contain
    its own. Their batch ranges are sorted and joined from 1 on until there is a gap. The result is
    the smallest limit of all profiles.

    >>> largest_batch([Profile.parse("batch=1:8:32,sequence=8:64:128")], "batch")
    32

    Args:
        profiles: profiles of one plan, or the one that a session uses.
        batch: name of the first dim; empty for a fixed dim, for which the result is 0.

    Raises:
        ShapeError: a profile does not cover a batch of one row.
    """
    if not batch or any(batch not in profile.dims for profile in profiles):
        return 0
    limits = []
    for profile in profiles:
        ranges = sorted(
            (other.dims[batch].min, other.dims[batch].max)
            for other in profiles
            if _covers(other, profile, batch)
        )
        reached = 0
        for low, high in ranges:
            if low <= reached + 1:
                reached = max(reached, high)
        if not reached:
            raise ShapeError(
                f"profile '{profile}' needs at least {ranges[0][0]} rows, but requests to Triton "
                "may have one.",
                do=f"Build the engine with {batch}=1:{profile.dims[batch].opt}:"
                f"{profile.dims[batch].max}.",
            )
        limits.append(reached)
    return min(limits, default=0)


def _covers(outer: Profile, inner: Profile, batch: str) -> bool:
    """Return True if all dims of `inner` except the batch are within those of `outer`."""
    return all(
        outer.dims[name].min <= sizes.min and sizes.max <= outer.dims[name].max
        for name, sizes in inner.dims.items()
        if name != batch
    )


def _check_shared_config(artifact: Artifact, engines: Sequence[Engine]) -> None:
    """Raise an error unless the engines have equal profiles, and one engine per GPU type.

    They share one configuration in Triton.
    """
    seen: dict[str, Engine] = {}
    for engine in engines:
        if engine.record.profiles != engines[0].record.profiles:
            raise ArtifactError(
                f"{artifact.path}: {engine.name} has other profiles than {engines[0].name}, but "
                "they share one configuration in Triton.",
                do="Build one engine with all profiles, enginery build --no-engine-per-profile. Or "
                f"choose one: --engine {engines[0].name}",
            )
        if len(engines) > 1 and not engine.record.capabilities:
            raise _ambiguous_error(artifact, engines, "one is for every compute capability")
        for capability in engine.record.capabilities:
            if capability in seen:
                raise _ambiguous_error(
                    artifact, [seen[capability], engine], f"two are for {capability}"
                )
            seen[capability] = engine


def _ambiguous_error(artifact: Artifact, engines: Sequence[Engine], why: str) -> OptionError:
    names = " or ".join(engine.name for engine in engines)
    return OptionError(
        f"{artifact.path} has several engines of one graph, but {why}.",
        do=f"Choose one: --engine {names}",
    )


def _no_engine_error(
    artifact: Artifact, graph: GraphRecord, engines: Sequence[Engine]
) -> ArtifactError:
    engine_names = ", ".join(f"{e.name} of {e.record.graph}" for e in engines) or "none"
    return ArtifactError(
        f"{artifact.path} has no engine of {graph.file} for Triton: found {engine_names}, expected "
        f"one of {CLASSIC.title} {CLASSIC.major}.",
        do=f"Build one on the server's GPU: enginery build {artifact.path} --flavor "
        f"{CLASSIC.name} --capability current",
    )

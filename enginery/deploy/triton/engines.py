"""Classic TensorRT engines for Triton: which of an artifact's, and the batches that they take.

    >>> engines = select_engines(artifact, artifact.manifest.graphs[0], TritonConfig(…))
    >>> {engine.record.capabilities: engine.plan.name for engine in engines}
    {('8.9',): 'model.plan'}
    >>> largest_batch([Profile.parse("batch=1:8:32,sequence=8:64:128")], "batch")
    32

Triton's backends load plans of classic TensorRT; those of TensorRT for RTX they do not. None of
this has been run by a Triton server yet.
"""

from __future__ import annotations

from collections.abc import Sequence

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.engine import Engine
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import ArtifactError, OptionError, ShapeError, nearest
from enginery.core.shapes import Profile
from enginery.deploy.triton.options import TritonConfig
from enginery.runtime.engines.selection import read_engines
from enginery.runtime.tensorrt.options import CLASSIC


def select_engines(artifact: Artifact, graph: GraphRecord, config: TritonConfig) -> list[Engine]:
    """The engines that Triton is to load: one, or one for each compute capability.

    Raises:
        ArtifactError: there is none, or those of several capabilities differ in their profiles; or
            a file of one was altered.
        OptionError: there is no engine of the name, or several would do.
    """
    found = read_engines(artifact)
    if config.engine:
        names = [engine.name for engine in found]
        if config.engine not in names:
            raise OptionError(
                f"{artifact.path} has no engine '{config.engine}'{nearest(config.engine, names)}",
                do=f"Its engines: {', '.join(names) or 'none'}.",
            )
        found = [engine for engine in found if engine.name == config.engine]
    fitting = [
        engine
        for engine in found
        if engine.record.flavor == CLASSIC.name and engine.record.graph == graph.file
    ]
    if not fitting:
        raise _no_engine_error(artifact, graph, found)
    if config.backend == "onnxruntime" and len(fitting) > 1:
        raise _ambiguous_error(artifact, fitting, "ONNX Runtime's backend opens one")
    _check_shared_config(artifact, fitting)
    return fitting


def parse_profiles(engines: Sequence[Engine]) -> list[Profile]:
    """The profiles that engines share, in their order; none for fixed shapes."""
    return [Profile.parse(text) for text in engines[0].record.profiles] if engines else []


def largest_batch(profiles: Sequence[Profile], batch: str) -> int:
    """The largest batch that Triton may make of any requests that the profiles take.

    Its batcher knows one number, `max_batch_size`, and no profiles: whatever other dims a request
    has, each number of rows up to that must be in a profile.

    Args:
        profiles: of one plan, or the one that a session reaches.
        batch: the name of the first dim; empty for a fixed one, which is never batched: 0.

    Raises:
        ShapeError: a profile takes shapes of which no single row can run.
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
        for least, most in ranges:
            if least <= reached + 1:
                reached = max(reached, most)
        if not reached:
            raise ShapeError(
                f"profile '{profile}' takes {ranges[0][0]} rows at least, and requests of Triton's "
                "clients may have one.",
                do=f"Build the engine with {batch}=1:{profile.dims[batch].opt}:"
                f"{profile.dims[batch].max}.",
            )
        limits.append(reached)
    return min(limits, default=0)


def _covers(outer: Profile, inner: Profile, batch: str) -> bool:
    """Whether all other dims of one profile are within those of another."""
    return all(
        outer.dims[name].min <= sizes.min and sizes.max <= outer.dims[name].max
        for name, sizes in inner.dims.items()
        if name != batch
    )


def _check_shared_config(artifact: Artifact, engines: Sequence[Engine]) -> None:
    """Engines that share one configuration have the same profiles, and each GPU has one."""
    seen: dict[str, Engine] = {}
    for engine in engines:
        if engine.record.profiles != engines[0].record.profiles:
            raise ArtifactError(
                f"{artifact.path}: {engine.name} has other profiles than {engines[0].name}, and "
                "Triton has one configuration for both.",
                do="Build one engine with all profiles, enginery build --no-engine-per-profile, or "
                f"name one: --engine {engines[0].name}",
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
        f"{artifact.path} has several engines of one graph, and {why}.",
        do=f"Name it: --engine {names}",
    )


def _no_engine_error(
    artifact: Artifact, graph: GraphRecord, found: Sequence[Engine]
) -> ArtifactError:
    there = ", ".join(f"{e.name} of {e.record.graph}" for e in found) or "none"
    return ArtifactError(
        f"{artifact.path} has no engine of {graph.file} that Triton loads, which is one of "
        f"{CLASSIC.title} {CLASSIC.major}; found {there}.",
        do=f"Build one on the server's GPU: enginery build {artifact.path} --flavor "
        f"{CLASSIC.name} --capability current",
    )

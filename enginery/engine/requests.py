"""Engine requests: the graph, profiles and GPUs of each engine of a build, and its cache key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.engine_record import graph_sha256
from enginery.core.artifact.fingerprint import Fingerprint
from enginery.core.artifact.inputs import note_input
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import OptionError, ShapeError
from enginery.core.model.feeds import FeedLimits
from enginery.core.shapes import Profile, dynamic_dims
from enginery.core.store.store import ENGINES, Store
from enginery.engine.config import BuildConfig, check_config
from enginery.engine.profiles.buckets import LengthBuckets
from enginery.engine.profiles.check import ProfileReport, check_profiles, read_profiles
from enginery.engine.profiles.lengths import profiles_from_data
from enginery.runtime.tensorrt.capabilities import resolve_capabilities
from enginery.runtime.tensorrt.engine_key import key_fields
from enginery.runtime.tensorrt.library import require_tensorrt
from enginery.runtime.tensorrt.options import check_options, get_flavor

ENGINE_VERSION = "1"
"""Incremented when the same inputs give a different engine; part of the cache key."""


@dataclass(frozen=True)
class EngineRequest:
    """Request for one engine of one graph."""

    graph: GraphRecord
    profiles: tuple[Profile, ...]
    checked: ProfileReport
    """Warnings and notes about the graph's profiles."""
    capabilities: tuple[str, ...]
    """Compute capabilities; empty for a portable engine."""
    graph_sha256: str
    """Digest of the file, its name and its external data."""
    fingerprint: Fingerprint
    """The engine's cache key."""

    @property
    def targets(self) -> str:
        """`sm80-sm89`, or `portable`; see `EngineRecord.directory_name`."""
        names = (f"sm{capability.replace('.', '')}" for capability in self.capabilities)
        return "-".join(names) or "portable"

    @property
    def directory(self) -> str:
        """Name of the engine's directory in the store and in `engines/` of an artifact."""
        return Store().path_for(ENGINES, self.fingerprint, self.targets).name


@dataclass(frozen=True)
class RequestedEngines:
    """Requests for all engines of one build."""

    requests: tuple[EngineRequest, ...]
    buckets: LengthBuckets | None
    """Buckets of the lengths in `data`, or None."""
    force: bool
    """Build even if the store has the engines."""


def resolve_requests(
    artifact: Artifact, config: BuildConfig, *, force: bool = False
) -> RequestedEngines:
    """Resolve the options of a build into engine requests, in the order of the graphs.

    Raises:
        OptionError: an option is invalid.
        ShapeError: a profile does not fit, or a graph with dynamic dims has none.
        InputError: `data` cannot be read.
        ProviderError: `capability` is current, but the machine has no supported GPU.
        MissingPackageError: the flavor is not installed.
    """
    check_config(config)
    flavor = get_flavor(config.flavor)
    check_options(flavor, config.options)
    require_tensorrt("Building an engine", flavor)
    capabilities = resolve_capabilities(flavor, config.capability)
    limits = size_limits(artifact)
    profiles, buckets = _profiles(artifact, config)
    requests = []
    for graph in artifact.manifest.graphs:
        graph_profiles = profiles[graph.file]
        checked = _check_graph_profiles(graph, graph_profiles, limits, several=len(profiles) > 1)
        digest = graph_sha256(graph, artifact.manifest.files)
        engine_profiles = [graph_profiles]
        if config.engine_per_profile and len(graph_profiles) > 1:
            engine_profiles = [[profile] for profile in graph_profiles]
        for group in engine_profiles:
            fields = {
                "graph": digest,
                **key_fields(flavor, config.options, capabilities, group),
                "engine version": ENGINE_VERSION,
            }
            key = Fingerprint(flavor.name, fields)
            requests.append(EngineRequest(graph, tuple(group), checked, capabilities, digest, key))
    return RequestedEngines(tuple(requests), buckets, force)


def size_limits(artifact: Artifact) -> dict[str, int]:
    """Return the maximum size per dim, from the position embeddings; empty for no limit."""
    return FeedLimits.from_artifact(artifact).max_sizes


def _profiles(
    artifact: Artifact, config: BuildConfig
) -> tuple[dict[str, list[Profile]], LengthBuckets | None]:
    """Return the profiles by graph file, and the buckets they come from."""
    graphs = artifact.manifest.graphs
    if config.data:
        if len(graphs) > 1:
            files = ", ".join(graph.file for graph in graphs)
            raise OptionError(
                f"option 'data' expects an artifact with one graph, found {files}: only "
                "one of these graphs has the length of a text as a dim.",
                do="Set the profiles of each graph with --profile.",
            )
        note_input(Path(config.data).expanduser())  # it is hashed after it was read
        text_profiles, buckets = profiles_from_data(
            artifact,
            graphs[0],
            Path(config.data).expanduser(),
            column=config.column,
            count=config.count,
            batch=config.batch,
        )
        return {graphs[0].file: text_profiles}, buckets
    shapes = (config.min_shapes, config.opt_shapes, config.max_shapes)
    if len(graphs) == 1:
        return {graphs[0].file: _read_profiles(config.profile, shapes, graphs[0])}, None
    profiles: dict[str, list[Profile]] = {graph.file: [] for graph in graphs}
    for text in config.profile:
        _add_to_matching_graphs(profiles, graphs, (text,), ("", "", ""))
    if any(shapes):
        _add_to_matching_graphs(profiles, graphs, (), shapes)
    return profiles, None


def _add_to_matching_graphs(
    profiles: dict[str, list[Profile]],
    graphs: tuple[GraphRecord, ...],
    texts: tuple[str, ...],
    shapes: tuple[str, str, str],
) -> None:
    """Add a profile to the graphs that it fits, as encoders and decoders have different dims.

    Raises:
        ShapeError: it fits no graph. The error is about the graph that shares most dims with it.
    """
    problems: list[tuple[int, ShapeError]] = []
    for graph in graphs:
        try:
            profiles[graph.file] += _read_profiles(texts, shapes, graph)
        except ShapeError as error:
            named = Profile.parse(texts[0]).dims if texts else {}
            problems.append((len(set(dynamic_dims(graph.inputs)) ^ set(named)), error))
    if len(problems) == len(graphs):
        raise min(problems, key=lambda pair: pair[0])[1]


def _read_profiles(
    texts: tuple[str, ...], shapes: tuple[str, str, str], graph: GraphRecord
) -> list[Profile]:
    low, opt, high = shapes
    return read_profiles(texts, graph.inputs, min_shapes=low, opt_shapes=opt, max_shapes=high)


def _check_graph_profiles(
    graph: GraphRecord, profiles: list[Profile], limits: Mapping[str, int], *, several: bool
) -> ProfileReport:
    try:
        return check_profiles(profiles, graph.inputs, limits)
    except ShapeError as error:
        if not several:
            raise
        raise ShapeError(f"{graph.file}: {error.message}", do=error.do) from error

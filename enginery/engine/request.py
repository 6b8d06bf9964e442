"""Which engines are asked for: a graph, its profiles, the GPUs, and what the engine is cached by.

Takes an artifact and the options; leaves a request an engine, before TensorRT sees anything.

    >>> asked = read_requests(artifact, BuildConfig(profile=("batch=1,sequence=64",)))
    >>> [request.directory for request in asked.requests]
    ['tensorrt-rtx-sm89-3f2a91c04be7d815']
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from enginery.core.artifact import Artifact
from enginery.core.engine_record import graph_sha256
from enginery.core.errors import OptionError, ShapeError
from enginery.core.feeds import FeedLimits
from enginery.core.fingerprint import Fingerprint, data_sha256
from enginery.core.manifest import GraphRecord
from enginery.core.model_files import ModelConfig
from enginery.core.shapes import Profile, dynamic_dims
from enginery.core.store import ENGINES, Store
from enginery.engine.buckets import Buckets
from enginery.engine.config import BuildConfig, check_config
from enginery.engine.lengths import profiles_from_data
from enginery.engine.profiles import ProfileReport, check_profiles, read_profiles
from enginery.runtime.tensorrt.library import require_tensorrt
from enginery.runtime.tensorrt.options import check_options, flavor_named
from enginery.runtime.tensorrt.process import key_fields, resolve_capabilities

ENGINE_VERSION = "1"
"""Raised when the same inputs would give another engine; part of what it is cached by."""


@dataclass(frozen=True)
class EngineRequest:
    """One engine of one graph."""

    graph: GraphRecord
    profiles: tuple[Profile, ...]
    checked: ProfileReport
    """What is to be said of the profiles of the graph."""
    capabilities: tuple[str, ...]
    """None for a portable engine."""
    graph_sha256: str
    """Over the file, its name and its external data."""
    fingerprint: Fingerprint
    """What the engine is cached by."""

    @property
    def targets(self) -> str:
        """`sm80-sm89`, or `portable`; see `EngineRecord.directory_name`."""
        names = (f"sm{capability.replace('.', '')}" for capability in self.capabilities)
        return "-".join(names) or "portable"

    @property
    def directory(self) -> str:
        """The engine's directory, in the store and below `engines/` of an artifact."""
        return Store().path_for(ENGINES, self.fingerprint, self.targets).name


@dataclass(frozen=True)
class Requested:
    """All engines of one build."""

    requests: tuple[EngineRequest, ...]
    buckets: Buckets | None
    """How the lengths of `profiles_from` fall into the profiles."""
    data_sha256: str
    """Of `profiles_from`; empty where there is none."""


def read_requests(artifact: Artifact, config: BuildConfig) -> Requested:
    """The engines that a build of this artifact makes, in the order of its graphs.

    Raises:
        OptionError: an option cannot be used.
        ShapeError: a profile does not fit, or a graph with dynamic dims has none.
        InputError: `profiles_from` cannot be read.
        ProviderError: `capability` is current, and there is no GPU that the flavor builds for.
        MissingPackageError: the flavor is not installed.
    """
    check_config(config)
    flavor = flavor_named(config.flavor)
    check_options(flavor, config.options)
    require_tensorrt("Building an engine", flavor)
    capabilities = resolve_capabilities(flavor, config.capability)
    limits = size_limits(artifact)
    profiles, buckets = _profiles(artifact, config)
    requests = []
    for graph in artifact.manifest.graphs:
        found = profiles[graph.file]
        checked = _check(graph, found, limits, several=len(profiles) > 1)
        digest = graph_sha256(graph, artifact.manifest.files)
        apart = config.engine_per_profile and len(found) > 1
        for together in [[one] for one in found] if apart else [found]:
            fields = {
                "graph": digest,
                **key_fields(flavor, config.options, capabilities, together),
                "engine version": ENGINE_VERSION,
            }
            key = Fingerprint(flavor.name, fields)
            requests.append(
                EngineRequest(graph, tuple(together), checked, capabilities, digest, key)
            )
    data = data_sha256(Path(config.profiles_from).expanduser()) if config.profiles_from else ""
    return Requested(tuple(requests), buckets, data)


def size_limits(artifact: Artifact) -> dict[str, int]:
    """The largest sequence that the model's position embeddings cover; empty where nothing ends."""
    return FeedLimits.from_config(ModelConfig.read(artifact.path)).ends


def _profiles(
    artifact: Artifact, config: BuildConfig
) -> tuple[dict[str, list[Profile]], Buckets | None]:
    """The profiles of each graph, by its file."""
    graphs = artifact.manifest.graphs
    if config.profiles_from:
        if len(graphs) > 1:
            files = ", ".join(graph.file for graph in graphs)
            raise OptionError(
                f"option 'profiles_from': the artifact has the graphs {files}, and a text's length "
                "is a dim of one graph alone.",
                do="Name the profiles: --profile for each graph.",
            )
        found, buckets = profiles_from_data(
            artifact, graphs[0], Path(config.profiles_from).expanduser(), column=config.column,
            count=config.count, batch=config.batch,
        )  # fmt: skip
        return {graphs[0].file: found}, buckets
    shapes = (config.min_shapes, config.opt_shapes, config.max_shapes)
    if len(graphs) == 1:
        return {graphs[0].file: _read(config.profile, shapes, graphs[0])}, None
    profiles: dict[str, list[Profile]] = {graph.file: [] for graph in graphs}
    for text in config.profile:
        _share(profiles, graphs, (text,), ("", "", ""))
    if any(shapes):
        _share(profiles, graphs, (), shapes)
    return profiles, None


def _share(
    profiles: dict[str, list[Profile]],
    graphs: tuple[GraphRecord, ...],
    texts: tuple[str, ...],
    shapes: tuple[str, str, str],
) -> None:
    """Adds a profile to the graphs that it fits.

    The graphs of one model (an encoder, decoders) have different dims. Raises the error of the
    graph whose dims it names most of, where it fits none.
    """
    problems: list[tuple[int, ShapeError]] = []
    for graph in graphs:
        try:
            profiles[graph.file] += _read(texts, shapes, graph)
        except ShapeError as error:
            named = Profile.parse(texts[0]).dims if texts else {}
            problems.append((len(set(dynamic_dims(graph.inputs)) ^ set(named)), error))
    if len(problems) == len(graphs):
        raise min(problems, key=lambda pair: pair[0])[1]


def _read(
    texts: tuple[str, ...], shapes: tuple[str, str, str], graph: GraphRecord
) -> list[Profile]:
    low, opt, high = shapes
    return read_profiles(texts, graph.inputs, min_shapes=low, opt_shapes=opt, max_shapes=high)


def _check(
    graph: GraphRecord, profiles: list[Profile], limits: Mapping[str, int], *, several: bool
) -> ProfileReport:
    try:
        return check_profiles(profiles, graph.inputs, limits)
    except ShapeError as error:
        if not several:
            raise
        raise ShapeError(f"{graph.file}: {error.message}", do=error.do) from error

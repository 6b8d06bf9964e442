"""Build the Triton model of an artifact's graph: batch sizes, labels, warm-up and files.

>>> config = TritonConfig(provider="cpu")
>>> info, notes = read_graph_info(artifact, artifact.manifest.graphs[0], [], config)
>>> list(build_graph_model(artifact, info, config, "minilm-graph").files)
['1/model.onnx']
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.engine import Engine
from enginery.core.artifact.engine_record import graph_sha256
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import ArtifactError, OptionError, ShapeError, join_problems
from enginery.core.model.feeds import FeedLimits
from enginery.core.model.files import ModelConfig
from enginery.core.shapes import (
    DimRange,
    Profile,
    canonical_dim,
    dynamic_dims,
    enclosing_profile,
)
from enginery.deploy.triton.engines import largest_batch, parse_profiles
from enginery.deploy.triton.models import VERSION, GraphInfo, TritonModel, graph_model, plan_file
from enginery.deploy.triton.options import TritonConfig
from enginery.deploy.triton.tensors import batch_dim, has_batch_dim
from enginery.deploy.triton.warmup import warmup_samples
from enginery.runtime.engines.selection import wrapper_path
from enginery.runtime.tasks import manifest_task
from enginery.runtime.tasks.classify import LabelResults, label_names
from enginery.runtime.tensorrt.options import CLASSIC

_USUAL_BATCH, _USUAL_SEQUENCE = 8, 128
"""Optimum of an engine that the server builds, if no profile is given."""


def select_graph(artifact: Artifact, config: TritonConfig) -> GraphRecord:
    """Return the graph that the options name, or the only one.

    Raises:
        ArtifactError: no graph has this name.
        OptionError: there are several graphs, and the options name none.
    """
    graphs = artifact.manifest.graphs
    if not config.graph and len(graphs) > 1:
        files = ", ".join(graph.file for graph in graphs)
        raise OptionError(
            f"{artifact.path} has the graphs {files}, but a Triton model has one.",
            do=f"Export each graph under its own name: --graph {graphs[0].file} --name NAME",
        )
    return artifact.graph(config.graph or graphs[0].file)


def read_graph_info(
    artifact: Artifact, record: GraphRecord, engines: list[Engine], config: TritonConfig
) -> tuple[GraphInfo, list[str]]:
    """Return the facts about the graph, and messages for the user.

    Raises:
        OptionError: an option is for an engine that the server builds although the artifact has
            one, or there are several profiles for it.
        ShapeError: a profile does not fit the graph, or the server builds an engine and the largest
            size of a dim is unknown.
    """
    settings = ModelConfig.read(artifact.path)
    limits = FeedLimits.from_artifact(artifact)
    builds = config.backend == "onnxruntime" and config.provider == "tensorrt" and not engines
    notes = [f"{engine.name} is {engine.record.hardware_target}" for engine in engines]
    if engines and (config.profile or config.engine_cache):
        raise join_problems(_engine_conflicts(engines[0], config))
    profiles = parse_profiles(engines)
    if engines and config.backend == "onnxruntime" and len(profiles) > 1:
        notes.append(f"ONNX Runtime uses only the first profile, {profiles[0]}")
        profiles = profiles[:1]
    for text in config.profile:
        profile = Profile.parse(text)
        profile.check(record.inputs, limits.max_sizes)
        profiles.append(profile)
    if builds:
        profiles = _server_profiles(artifact, record, profiles, limits, config)
        notes.append(_describe_server_build(artifact, profiles, config))
    batch, max_batch_size = batch_dim(record), 0
    if has_batch_dim(record):
        ends = [profile.dims[batch].max for profile in profiles if batch in profile.dims]
        has_profiles = engines or builds
        limit = largest_batch(profiles, batch) if has_profiles else max(ends, default=0)
        max_batch_size = min(config.max_batch_size, limit or config.max_batch_size)
        if max_batch_size < config.max_batch_size:
            notes.append(f"batches have at most {max_batch_size} rows, because of the profiles")
    else:
        notes.append(
            "Triton cannot batch requests: the first dims of the tensors are not the same dynamic "
            "dim"
        )
    logits = next((spec for spec in record.outputs if spec.name == "logits"), None)
    labels: list[str] = []
    task = manifest_task(artifact.manifest, record)
    classifies = task is not None and issubclass(task, LabelResults)
    if classifies and logits and len(logits.dims) == 2:
        count = logits.dims[1] if isinstance(logits.dims[1], int) else 0
        labels = label_names(settings, count or len(settings.id2label))
    plain = tuple(" ".join(label.split()) for label in labels)
    sha256 = graph_sha256(record, artifact.manifest.files)
    info = GraphInfo(record, max_batch_size, tuple(profiles), tuple(engines), sha256, builds, plain)
    return info, notes


def _engine_conflicts(engine: Engine, config: TritonConfig) -> Iterator[OptionError]:
    """Yield the problems of options for an engine that the server builds, if there is one."""
    if config.profile:
        yield OptionError(
            f"option 'profile' is set, but the engine {engine.name} has its own profiles.",
            do="Leave out --profile.",
            option="profile",
        )
    if config.engine_cache:
        yield OptionError(
            f"option 'engine_cache' is set, but the artifact has the engine {engine.name}, and the "
            "server builds none.",
            do="Leave out --engine-cache.",
            option="engine_cache",
        )


def _server_profiles(
    artifact: Artifact,
    record: GraphRecord,
    profiles: Sequence[Profile],
    limits: FeedLimits,
    config: TritonConfig,
) -> list[Profile]:
    """Return the profile of an engine that the server builds; none for fixed shapes.

    Without a profile, ONNX Runtime would build the engine again, while a request waits, for each
    shape outside of those so far. The default covers every request.

    Raises:
        OptionError: there are several profiles, of which ONNX Runtime uses only the first.
        ShapeError: the largest size of a dim is unknown.
    """
    if len(profiles) > 1:
        raise OptionError(
            f"option 'profile' is set {len(profiles)} times, but ONNX Runtime's TensorRT provider "
            "uses only the first for an engine that it builds.",
            do=f"Use one that covers them all: --profile {enclosing_profile(profiles)}",
            option="profile",
        )
    names = [canonical_dim(name) for name in dynamic_dims(record.inputs)]
    if profiles or not names:
        return list(profiles)
    max_sizes = {batch_dim(record): config.max_batch_size, **limits.max_sizes}
    if unknown := [name for name in names if name not in max_sizes]:
        example = ",".join(f"{name}=min:opt:max" for name in names)
        raise ShapeError(
            f"{artifact.path}: the server builds the engine for one profile, but the largest size "
            f"of the dim '{unknown[0]}' is unknown.",
            do=f"Pass a profile: --profile {example}",
        )
    usual = {batch_dim(record): _USUAL_BATCH}
    return [
        Profile(
            {
                name: DimRange(
                    1, min(usual.get(name, _USUAL_SEQUENCE), max_sizes[name]), max_sizes[name]
                )
                for name in names
            }
        )
    ]


def _describe_server_build(
    artifact: Artifact, profiles: Sequence[Profile], config: TritonConfig
) -> str:
    shapes = f" for {profiles[0]}" if profiles else ""
    chosen = "" if config.profile or not profiles else " (--profile sets other shapes)"
    when = (
        f"at its first load, and keeps it in {config.engine_cache}"
        if config.engine_cache
        else "at every load (--engine-cache FOLDER keeps it)"
    )
    return (
        f"no engine of {CLASSIC.title} {CLASSIC.major} is exported: the server builds one{shapes}"
        f"{chosen} {when}; to ship it instead, copy the artifact {artifact.name} to a machine with "
        f"the server's GPU, and run: enginery build {artifact.name} --flavor {CLASSIC.name} "
        f"--capability current{f' --profile {profiles[0]}' if profiles else ''} "
        f"--out {artifact.name}"
    )


def build_graph_model(
    artifact: Artifact, info: GraphInfo, config: TritonConfig, name: str
) -> TritonModel:
    """Return the model that runs the graph, with the files for its backend.

    Raises:
        ArtifactError: weights are not in the folder of their graph.
        ShapeError: no warm-up request can be generated for a profile.
    """
    limits = FeedLimits.from_artifact(artifact)
    samples, contents = warmup_samples(
        info.record, info.profiles, limits, max_batch_size=info.max_batch_size
    )
    files = _graph_files(artifact, info, config)
    below = {f"{VERSION}/{file}": path for file, path in files.items()}
    return graph_model(info, config, name, files=below, warmup=samples, contents=contents)


def _graph_files(artifact: Artifact, info: GraphInfo, config: TritonConfig) -> dict[str, Path]:
    """Return the files for the backend by their path below the version's folder."""
    if config.backend == "tensorrt":
        if len(info.engines) == 1:
            return {"model.plan": info.engines[0].plan}
        return {plan_file(engine): engine.plan for engine in info.engines}
    if info.engines:
        engine = info.engines[0]
        return {
            "model.onnx/model.onnx": wrapper_path(engine),
            f"model.onnx/{engine.record.plan}": engine.plan,
        }
    record = info.record
    graph = artifact.path / record.file
    if not record.data_files:
        return {"model.onnx": graph}
    # Triton needs a folder for a graph of several files (docs/user_guide/model_repository.md).
    beside = PurePosixPath(record.file).parent
    files = {"model.onnx/model.onnx": graph}
    for data in record.data_files:
        inside = PurePosixPath(data)
        if not inside.is_relative_to(beside) or f"model.onnx/{inside.relative_to(beside)}" in files:
            raise ArtifactError(
                f"{artifact.path}: {data} is not in the folder of its graph {record.file}."
            )
        files[f"model.onnx/{inside.relative_to(beside)}"] = artifact.path / data
    return files

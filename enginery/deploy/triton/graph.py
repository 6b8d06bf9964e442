"""The graph of an artifact as a model of Triton: its batches, labels, warm-up and files.

Takes an artifact and the options; leaves what the repository is to have of the graph.

    >>> parts, notes = graph_parts(artifact, artifact.manifest.graphs[0], [], TritonConfig())
    >>> exported_graph(artifact, parts, TritonConfig(), "minilm-graph").files
    {'1/model.onnx': PosixPath('minilm/model.onnx')}
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.engine import Engine
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import ArtifactError, OptionError
from enginery.core.model.feeds import FeedLimits
from enginery.core.model.files import ModelConfig
from enginery.core.shapes import Profile
from enginery.deploy.triton.engines import largest_batch, profiles_of
from enginery.deploy.triton.models import GraphParts, TritonModel, graph_model, plan_file
from enginery.deploy.triton.options import TritonConfig
from enginery.deploy.triton.tensors import batch_dim, has_batch_dim
from enginery.deploy.triton.warmup import warmup_samples
from enginery.runtime.engines.selection import wrapper_path
from enginery.runtime.tasks import manifest_task
from enginery.runtime.tasks.classify import LabelResults, label_names

_NO_BATCH = "not every tensor starts with the same dynamic dim"


def chosen_graph(artifact: Artifact, config: TritonConfig) -> GraphRecord:
    """The graph that the options name, or the only one.

    Raises:
        ArtifactError: there is none of that name.
        OptionError: there are several, and none is named.
    """
    graphs = artifact.manifest.graphs
    if not config.graph and len(graphs) > 1:
        files = ", ".join(graph.file for graph in graphs)
        raise OptionError(
            f"{artifact.path} has the graphs {files}, and a model of Triton has one.",
            do=f"Name one, and export each under a name: --graph {graphs[0].file} --name NAME",
        )
    return artifact.graph(config.graph or graphs[0].file)


def graph_parts(
    artifact: Artifact, record: GraphRecord, engines: list[Engine], config: TritonConfig
) -> tuple[GraphParts, list[str]]:
    """What is known of the graph, and what of it should be told.

    Raises:
        OptionError: a profile is given beside those of an engine, or a preferred batch is larger
            than any that there can be.
        ShapeError: a profile does not fit the graph.
    """
    settings = ModelConfig.read(artifact.path)
    notes = [f"{engine.name} is {engine.record.hardware_target}" for engine in engines]
    if engines and config.profile:
        raise OptionError(
            f"option 'profile' is given, and {engines[0].name} has profiles of its own.",
            do="Leave it out.",
        )
    profiles = profiles_of(engines)
    if engines and config.backend == "onnxruntime" and len(profiles) > 1:
        notes.append(f"ONNX Runtime reaches the first profile alone, {profiles[0]}")
        profiles = profiles[:1]
    for text in config.profile:
        profile = Profile.parse(text)
        profile.check(record.inputs, FeedLimits.from_config(settings).max_sizes)
        profiles.append(profile)
    batch, most = batch_dim(record), 0
    if has_batch_dim(record):
        ends = [profile.dims[batch].max for profile in profiles if batch in profile.dims]
        limit = largest_batch(profiles, batch) if engines else max(ends, default=0)
        most = min(config.max_batch_size, limit or config.max_batch_size)
        if most < config.max_batch_size:
            notes.append(f"batches have {most} rows at most, as the profiles have it")
    else:
        notes.append(f"Triton makes no batches: {_NO_BATCH}")
    _require_possible(config.preferred_batch_size, most)
    logits = next((spec for spec in record.outputs if spec.name == "logits"), None)
    labels: list[str] = []
    task = manifest_task(artifact.manifest, record)
    classifies = task is not None and issubclass(task, LabelResults)
    if classifies and logits and len(logits.dims) == 2:
        count = logits.dims[1] if isinstance(logits.dims[1], int) else 0
        labels = label_names(settings, count or len(settings.id2label))
    plain = tuple(" ".join(label.split()) for label in labels)
    return GraphParts(record, most, tuple(profiles), tuple(engines), plain), notes


def exported_graph(
    artifact: Artifact, parts: GraphParts, config: TritonConfig, name: str
) -> TritonModel:
    """The model that runs the graph, with the files that its backend loads.

    Raises:
        ArtifactError: weights do not lie beside their graph.
        ShapeError: a warm-up cannot be made up for a profile.
    """
    limits = FeedLimits.from_config(ModelConfig.read(artifact.path))
    samples, texts = warmup_samples(
        parts.record, parts.profiles, limits, max_batch_size=parts.max_batch_size
    )
    files = _graph_files(artifact, parts, config)
    below = {f"{config.version}/{file}": path for file, path in files.items()}
    return graph_model(parts, config, name, files=below, warmup=samples, texts=texts)


def _require_possible(preferred: Sequence[int], most: int) -> None:
    """Triton does not load a model that prefers a batch larger than its largest."""
    too_large = [size for size in preferred if size > most]
    if not too_large:
        return
    raise OptionError(
        f"option 'preferred_batch_size' has {too_large[0]}, and "
        + (f"batches have {most} rows at most." if most else f"there are no batches: {_NO_BATCH}."),
        do=f"Name sizes up to {most}, or leave it out." if most else "Leave it out.",
    )


def _graph_files(artifact: Artifact, parts: GraphParts, config: TritonConfig) -> dict[str, Path]:
    """What the backend loads, by its name below the version's folder."""
    if config.backend == "tensorrt":
        if len(parts.engines) == 1:
            return {"model.plan": parts.engines[0].plan}
        return {plan_file(engine): engine.plan for engine in parts.engines}
    if parts.engines:
        engine = parts.engines[0]
        return {
            "model.onnx/model.onnx": wrapper_path(engine),
            f"model.onnx/{engine.record.plan}": engine.plan,
        }
    record = parts.record
    graph = artifact.path / record.file
    if not record.data_files:
        return {"model.onnx": graph}
    # A graph of several files is a folder (Triton's docs/user_guide/model_repository.md).
    beside = PurePosixPath(record.file).parent
    files = {"model.onnx/model.onnx": graph}
    for data in record.data_files:
        inside = PurePosixPath(data)
        if not inside.is_relative_to(beside) or f"model.onnx/{inside.relative_to(beside)}" in files:
            raise ArtifactError(f"{artifact.path}: {data} does not lie beside {record.file}.")
        files[f"model.onnx/{inside.relative_to(beside)}"] = artifact.path / data
    return files

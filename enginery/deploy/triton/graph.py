"""Build the Triton model of an artifact's graph: batch sizes, labels, warm-up and files.

>>> config = TritonConfig(provider="cpu")
>>> info, notes = read_graph_info(artifact, artifact.manifest.graphs[0], [], config)
>>> list(build_graph_model(artifact, info, config, "minilm-graph").files)
['1/model.onnx']
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
from enginery.deploy.triton.engines import largest_batch, parse_profiles
from enginery.deploy.triton.models import GraphInfo, TritonModel, graph_model, plan_file
from enginery.deploy.triton.options import TritonConfig
from enginery.deploy.triton.tensors import batch_dim, has_batch_dim
from enginery.deploy.triton.warmup import warmup_samples
from enginery.runtime.engines.selection import wrapper_path
from enginery.runtime.tasks import manifest_task
from enginery.runtime.tasks.classify import LabelResults, label_names

_NO_BATCH = "the first dims of the tensors are not the same dynamic dim"


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
        OptionError: a profile is given although an engine has profiles, or a preferred batch size
            is larger than the maximum.
        ShapeError: a profile does not fit the graph.
    """
    settings = ModelConfig.read(artifact.path)
    notes = [f"{engine.name} is {engine.record.hardware_target}" for engine in engines]
    if engines and config.profile:
        raise OptionError(
            f"option 'profile' is set, but the engine {engines[0].name} has its own profiles.",
            do="Leave out --profile.",
        )
    profiles = parse_profiles(engines)
    if engines and config.backend == "onnxruntime" and len(profiles) > 1:
        notes.append(f"ONNX Runtime uses only the first profile, {profiles[0]}")
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
            notes.append(f"batches have at most {most} rows, because of the profiles")
    else:
        notes.append(f"Triton cannot batch requests: {_NO_BATCH}")
    _check_preferred(config.preferred_batch_size, most)
    logits = next((spec for spec in record.outputs if spec.name == "logits"), None)
    labels: list[str] = []
    task = manifest_task(artifact.manifest, record)
    classifies = task is not None and issubclass(task, LabelResults)
    if classifies and logits and len(logits.dims) == 2:
        count = logits.dims[1] if isinstance(logits.dims[1], int) else 0
        labels = label_names(settings, count or len(settings.id2label))
    plain = tuple(" ".join(label.split()) for label in labels)
    return GraphInfo(record, most, tuple(profiles), tuple(engines), plain), notes


def build_graph_model(
    artifact: Artifact, info: GraphInfo, config: TritonConfig, name: str
) -> TritonModel:
    """Return the model that runs the graph, with the files for its backend.

    Raises:
        ArtifactError: weights are not in the folder of their graph.
        ShapeError: no warm-up request can be generated for a profile.
    """
    limits = FeedLimits.from_config(ModelConfig.read(artifact.path))
    samples, contents = warmup_samples(
        info.record, info.profiles, limits, max_batch_size=info.max_batch_size
    )
    files = _graph_files(artifact, info, config)
    below = {f"{config.version}/{file}": path for file, path in files.items()}
    return graph_model(info, config, name, files=below, warmup=samples, contents=contents)


def _check_preferred(preferred: Sequence[int], most: int) -> None:
    """Raise OptionError if a preferred batch size exceeds the maximum; Triton rejects the model."""
    too_large = [size for size in preferred if size > most]
    if not too_large:
        return
    raise OptionError(
        f"option 'preferred_batch_size' contains {too_large[0]}, but "
        + (f"batches have at most {most} rows." if most else f"there are no batches: {_NO_BATCH}."),
        do=f"Use sizes up to {most}, or leave it out." if most else "Leave it out.",
    )


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

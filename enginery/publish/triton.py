"""An artifact as models of NVIDIA Triton: the graph, and before and behind it texts and answers.

Takes an artifact; leaves folders in a model repository, each whole, or nothing.

    >>> exported = run(Artifact.open("minilm"), Path("models"), TritonConfig(provider="cpu"))
    >>> exported.name, exported.models
    ('minilm', ('minilm-graph', 'minilm-tokenizer', 'minilm-answers', 'minilm'))

Configurations are checked with Triton's own model_config.proto, and the Python models are run by a
double of its Python backend. No Triton server has loaded them yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from enginery import __version__
from enginery.core.artifact import MANIFEST, Artifact
from enginery.core.engine import Engine
from enginery.core.engine_record import ENGINES
from enginery.core.errors import ArtifactError, OptionError
from enginery.core.feeds import FeedLimits
from enginery.core.json_file import read_json
from enginery.core.manifest import GraphRecord
from enginery.core.progress import SILENT, Progress
from enginery.core.shapes import Profile
from enginery.publish.engine_bond import bound_to
from enginery.publish.package import registry_name
from enginery.publish.triton_engines import largest_batch, profiles_of, triton_engines
from enginery.publish.triton_models import (
    ANSWERS,
    GRAPH,
    TOKENIZER,
    GraphParts,
    TritonModel,
    ensemble_model,
    graph_model,
    plan_file,
    step_model,
)
from enginery.publish.triton_options import TritonConfig
from enginery.publish.triton_repository import place
from enginery.publish.triton_steps import FILES
from enginery.publish.triton_tasks import TASKS
from enginery.publish.triton_tensors import batch_dim, check_types, has_batch_dim
from enginery.publish.triton_warmup import warmup_samples
from enginery.runtime.classification import label_names
from enginery.runtime.engines import wrapper_of
from enginery.runtime.text_rows import TextRows

_MODEL_PY = Path(__file__).with_name("triton_python_model.py")
_TOKENIZER_FILE = "tokenizer.json"
_CLASSIFICATION = ("text-classification", "image-classification")


@dataclass(frozen=True)
class TritonExport:
    """What was made."""

    path: Path
    """The model repository."""
    name: str
    """The model that clients ask."""
    models: tuple[str, ...]
    """All folders, that one last."""
    max_batch_size: int
    """Of the graph; 0 where it takes no batches."""
    notes: tuple[str, ...]
    """What whoever runs the server should know."""


def run(
    artifact: Artifact, out: Path, config: TritonConfig, *, progress: Progress = SILENT
) -> TritonExport:
    """Leaves an artifact's models in a Triton model repository.

    Args:
        artifact: what to export. It stays as it is.
        out: the repository's folder; models of others in it stay.
        config: the options.
        progress: who is told what happens.

    Raises:
        OptionError: an option does not fit the artifact.
        ArtifactError: a file was altered, Triton has no such tensors, there is no engine that it
            loads, or a folder in the repository is somebody else's.
        RejectedArtifactError: the artifact's validation failed.
        ShapeError: a profile does not fit the graph.
    """
    with progress.task(f"checking {artifact.name}"):
        opened = Artifact.open(artifact.path, verify=True)
    opened.require_passed(allow_failed=config.allow_failed)
    record = _graph(opened, config)
    check_types(record, config.backend)
    engines = triton_engines(opened, record, config) if config.needs_engine else []
    parts, notes = _parts(opened, record, engines, config)
    name = config.name or registry_name(opened.manifest.source.name)
    if config.tokenizer and (lacking := _no_texts(opened)):
        notes.append(f"the graph alone: {lacking}")
    with_texts = config.tokenizer and not _no_texts(opened)
    graph = _graph_model(opened, parts, config, f"{name}-{GRAPH}" if with_texts else name)
    models = [graph, *(_text_models(opened, parts, config, name) if with_texts else ())]
    if with_texts:
        notes.append(
            f"the Python backend needs enginery {__version__}: install it in the server's Python, "
            "or name an environment with --execution-env"
        )
    with progress.task(f"writing {name}"):
        place(out, name, models, version=config.version, made_from=opened.content_sha256())
    for note in notes:
        progress.say(f"export-triton: {note}")
    return TritonExport(
        out, name, tuple(model.name for model in models), parts.max_batch_size, tuple(notes)
    )


def _graph(artifact: Artifact, config: TritonConfig) -> GraphRecord:
    graphs = artifact.manifest.graphs
    if not config.graph and len(graphs) > 1:
        files = ", ".join(graph.file for graph in graphs)
        raise OptionError(
            f"{artifact.path} has the graphs {files}, and a model of Triton has one.",
            do=f"Name one, and export each under a name: --graph {graphs[0].file} --name NAME",
        )
    return artifact.graph(config.graph or graphs[0].file)


def _parts(
    artifact: Artifact, record: GraphRecord, engines: list[Engine], config: TritonConfig
) -> tuple[GraphParts, list[str]]:
    """What is known of the graph, and what of it should be told."""
    settings = read_json(artifact.path / "config.json")
    notes = [f"{engine.name} is {bound_to(engine.record)}" for engine in engines]
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
        profile.check(record.inputs, FeedLimits.from_config(settings).ends)
        profiles.append(profile)
    batch, most = batch_dim(record), 0
    if has_batch_dim(record):
        ends = [profile.dims[batch].max for profile in profiles if batch in profile.dims]
        limit = largest_batch(profiles, batch) if engines else max(ends, default=0)
        most = min(config.max_batch_size, limit or config.max_batch_size)
        if most < config.max_batch_size:
            notes.append(f"batches have {most} rows at most, as the profiles have it")
    else:
        notes.append("Triton makes no batches: not every tensor starts with the same dynamic dim")
    logits = next((spec for spec in record.outputs if spec.name == "logits"), None)
    labels: list[str] = []
    if artifact.manifest.task in _CLASSIFICATION and logits and len(logits.dims) == 2:
        count = logits.dims[1] if isinstance(logits.dims[1], int) else 0
        labels = label_names(settings, count or len(settings.get("id2label") or {}))
    plain = tuple(" ".join(label.split()) for label in labels)
    return GraphParts(record, most, tuple(profiles), tuple(engines), plain), notes


def _no_texts(artifact: Artifact) -> str:
    """Why texts cannot be answered; empty where they can."""
    manifest = artifact.manifest
    if manifest.task not in TASKS:
        return f"texts are answered for {', '.join(TASKS)}, and this is for {manifest.task}"
    if any(spec.name == "pixel_values" for graph in manifest.graphs for spec in graph.inputs):
        return "it takes images"
    if _TOKENIZER_FILE not in manifest.files:
        return f"the artifact has no {_TOKENIZER_FILE}"
    return ""


def _graph_model(
    artifact: Artifact, parts: GraphParts, config: TritonConfig, name: str
) -> TritonModel:
    limits = FeedLimits.from_config(read_json(artifact.path / "config.json"))
    samples, texts = warmup_samples(
        parts.record, parts.profiles, limits, max_batch_size=parts.max_batch_size
    )
    files = _graph_files(artifact, parts, config)
    below = {f"{config.version}/{file}": path for file, path in files.items()}
    return graph_model(parts, config, name, files=below, warmup=samples, texts=texts)


def _graph_files(artifact: Artifact, parts: GraphParts, config: TritonConfig) -> dict[str, Path]:
    """What the backend loads, by its name below the version's folder."""
    if config.backend == "tensorrt":
        if len(parts.engines) == 1:
            return {"model.plan": parts.engines[0].plan}
        return {plan_file(engine): engine.plan for engine in parts.engines}
    if parts.engines:
        engine = parts.engines[0]
        return {
            "model.onnx/model.onnx": wrapper_of(engine),
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


def _text_models(
    artifact: Artifact, parts: GraphParts, config: TritonConfig, name: str
) -> list[TritonModel]:
    """Tokenizer, answers and ensemble."""
    task = TASKS[artifact.manifest.task]
    # Read here as the server will read it: what is wrong with the files is said now.
    rows = TextRows.read(artifact, parts.record)
    dim = _dim(rows, parts.record) if artifact.manifest.task == "feature-extraction" else 0
    names = [MANIFEST, *_side_files(artifact)]
    files = {f"{config.version}/{FILES}/{file}": artifact.path / file for file in names}
    files[f"{config.version}/model.py"] = _MODEL_PY
    steps = [
        step_model(step, task, parts, config, f"{name}-{step}", dim=dim, files=files)
        for step in (TOKENIZER, ANSWERS)
    ]
    return [*steps, ensemble_model(task, parts, name, dim=dim)]


def _side_files(artifact: Artifact) -> list[str]:
    """Tokenizer and configuration: all but graphs and engines."""
    manifest = artifact.manifest
    graphs = {file for graph in manifest.graphs for file in (graph.file, *graph.data_files)}
    return [
        file for file in manifest.files if file not in graphs and not file.startswith(f"{ENGINES}/")
    ]


def _dim(rows: TextRows, record: GraphRecord) -> int:
    """The size of a vector where the graph says it; 0 where it does not."""
    (output,) = TASKS["feature-extraction"].graph_outputs(record)
    last = next(spec.dims[-1] for spec in record.outputs if spec.name == output)
    modes = len(rows.pooling.modes) if rows.pooling else 1
    return last * modes if isinstance(last, int) else 0

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
from pathlib import Path

from enginery import __version__
from enginery.core.artifact.artifact import MANIFEST, Artifact
from enginery.core.artifact.engine_record import ENGINES
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.paths import portable_name
from enginery.core.progress import SILENT, Progress
from enginery.deploy.triton.engines import triton_engines
from enginery.deploy.triton.graph import chosen_graph, exported_graph, graph_parts
from enginery.deploy.triton.models import (
    ANSWERS,
    GRAPH,
    TOKENIZER,
    GraphParts,
    TritonModel,
    ensemble_model,
    step_model,
)
from enginery.deploy.triton.options import TritonConfig
from enginery.deploy.triton.repository import place
from enginery.deploy.triton.steps import FILES, open_text_task
from enginery.deploy.triton.tensors import check_types
from enginery.runtime.tasks import TASKS, manifest_task
from enginery.runtime.tasks.text import TextTask

_MODEL_PY = Path(__file__).with_name("python_model.py")
_TOKENIZER_FILE = "tokenizer.json"


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
    """Write an artifact's models into a Triton model repository.

    Args:
        artifact: what to export. It stays as it is.
        out: the repository's folder; models of others in it stay.
        config: the options.
        progress: receives progress messages.

    Raises:
        OptionError: an option does not fit the artifact, or the repository has a newer version.
        ArtifactError: a file was altered, Triton has no such tensors, there is no engine that it
            loads, or a folder in the repository is somebody else's.
        RejectedArtifactError: the artifact's validation failed.
        ShapeError: a profile does not fit the graph.
    """
    with progress.task(f"checking {artifact.name}"):
        opened = Artifact.open(artifact.path, verify=True)
    opened.require_passed(allow_failed=config.allow_failed)
    record = chosen_graph(opened, config)
    check_types(record, config.backend)
    engines = triton_engines(opened, record, config) if config.needs_engine else []
    parts, notes = graph_parts(opened, record, engines, config)
    name = config.name or portable_name(opened.manifest.source.name)
    lacking = _no_texts(opened, record)
    if config.tokenizer and lacking:
        notes.append(f"the graph alone: {lacking}")
    with_texts = config.tokenizer and not lacking
    graph = exported_graph(opened, parts, config, f"{name}-{GRAPH}" if with_texts else name)
    models = [graph, *(_text_models(opened, parts, config, name) if with_texts else ())]
    if with_texts:
        notes.append(
            f"the Python backend needs enginery {__version__}: install it in the server's Python, "
            "or name an environment with --execution-env"
        )
    with progress.task(f"writing {name}"):
        notes += place(out, name, models, version=config.version, made_from=opened.content_sha256())
    for note in notes:
        progress.say(f"export-triton: {note}")
    return TritonExport(
        out, name, tuple(model.name for model in models), parts.max_batch_size, tuple(notes)
    )


def _no_texts(artifact: Artifact, record: GraphRecord) -> str:
    """Return why texts cannot be answered; empty where they can."""
    manifest = artifact.manifest
    task = manifest_task(manifest, record)
    if task is not None and task.takes_images:
        return "it takes images"
    if task is None or not issubclass(task, TextTask):
        of_texts = (each for each in TASKS.values() if issubclass(each, TextTask))
        known = ", ".join(name for each in of_texts for name in each.tasks)
        return f"texts are answered for {known}, and this is for {manifest.task}"
    if _TOKENIZER_FILE not in manifest.files:
        return f"the artifact has no {_TOKENIZER_FILE}"
    return ""


def _text_models(
    artifact: Artifact, parts: GraphParts, config: TritonConfig, name: str
) -> list[TritonModel]:
    """Return tokenizer, answers and ensemble."""
    # Opened here as the server will open it: what is wrong with the files is said now.
    task = open_text_task(artifact, parts.record)
    names = [MANIFEST, *_side_files(artifact)]
    files = {f"{config.version}/{FILES}/{file}": artifact.path / file for file in names}
    files[f"{config.version}/model.py"] = _MODEL_PY
    steps = [
        step_model(step, task, parts, config, f"{name}-{step}", files=files)
        for step in (TOKENIZER, ANSWERS)
    ]
    return [*steps, ensemble_model(task, parts, name)]


def _side_files(artifact: Artifact) -> list[str]:
    """Return tokenizer and configuration: all but graphs and engines."""
    manifest = artifact.manifest
    graphs = {file for graph in manifest.graphs for file in (graph.file, *graph.data_files)}
    return [
        file for file in manifest.files if file not in graphs and not file.startswith(f"{ENGINES}/")
    ]

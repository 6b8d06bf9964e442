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
from enginery.core.artifact import MANIFEST, Artifact
from enginery.core.engine_record import ENGINES
from enginery.core.manifest import GraphRecord
from enginery.core.progress import SILENT, Progress
from enginery.publish.package import registry_name
from enginery.publish.triton_engines import triton_engines
from enginery.publish.triton_graph import chosen_graph, exported_graph, graph_parts
from enginery.publish.triton_models import (
    ANSWERS,
    GRAPH,
    TOKENIZER,
    GraphParts,
    TritonModel,
    ensemble_model,
    step_model,
)
from enginery.publish.triton_options import TritonConfig
from enginery.publish.triton_repository import place
from enginery.publish.triton_steps import FILES
from enginery.publish.triton_tasks import TASKS
from enginery.publish.triton_tensors import check_types
from enginery.runtime.text_rows import TextRows

_MODEL_PY = Path(__file__).with_name("triton_python_model.py")
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
    """Leaves an artifact's models in a Triton model repository.

    Args:
        artifact: what to export. It stays as it is.
        out: the repository's folder; models of others in it stay.
        config: the options.
        progress: who is told what happens.

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
    name = config.name or registry_name(opened.manifest.source.name)
    if config.tokenizer and (lacking := _no_texts(opened)):
        notes.append(f"the graph alone: {lacking}")
    with_texts = config.tokenizer and not _no_texts(opened)
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

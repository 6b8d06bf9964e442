"""Export an artifact to a Triton model repository: the graph, and the task's models around it.

For a text task, the export adds models for preprocessing and postprocessing, and an ensemble that
takes texts and returns results.

>>> exported = run(artifact, tmp_path, TritonConfig(name="minilm", provider="cpu"))
>>> exported.name, exported.models
('minilm', ('minilm-graph', 'minilm-tokenizer', 'minilm-answers', 'minilm'))
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from enginery.core.artifact.artifact import MANIFEST, Artifact
from enginery.core.artifact.engine_record import ENGINES
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.options import options_dict
from enginery.core.paths import portable_name
from enginery.core.progress import SILENT, Progress
from enginery.core.table import Table
from enginery.core.version import __version__
from enginery.deploy.providers import resolve_provider
from enginery.deploy.triton.engines import select_engines
from enginery.deploy.triton.graph import build_graph_model, read_graph_info, select_graph
from enginery.deploy.triton.models import (
    ANSWERS,
    GRAPH,
    TOKENIZER,
    VERSION,
    GraphInfo,
    TritonModel,
    ensemble_model,
    step_model,
)
from enginery.deploy.triton.options import TritonConfig
from enginery.deploy.triton.repository import install_models
from enginery.deploy.triton.steps import FILES, open_text_task
from enginery.deploy.triton.tensors import check_types
from enginery.runtime.tasks import TASKS, manifest_task
from enginery.runtime.tasks.task import PLURALS
from enginery.runtime.tasks.text import TextTask
from enginery.runtime.tasks.two_towers import has_two_towers

_MODEL_PY = Path(__file__).with_name("python_model.py")
_TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True)
class TritonExport:
    """Models written to a repository."""

    path: Path
    """Path of the model repository."""
    name: str
    """Name of the model for clients."""
    models: tuple[str, ...]
    """Names of all models, the one for clients last."""
    max_batch_size: int
    """Maximum batch size of the graph; 0 if it has no batches."""
    notes: tuple[str, ...]
    """Requirements and hints for running the server."""

    def rows(self) -> list[Table | str]:
        """Return a line with the path and the models."""
        return [f"wrote {self.path}: {', '.join(self.models)}"]

    def as_json(self) -> dict[str, Any]:
        """Return the export as JSON values."""
        return options_dict(self)


def run(
    artifact: Artifact, out: Path, config: TritonConfig, *, progress: Progress = SILENT
) -> TritonExport:
    """Write an artifact's models into a Triton model repository.

    Args:
        artifact: the artifact, which is not changed.
        out: folder of the repository; other models in it are not changed.
        config: the options.
        progress: receives progress messages.

    Raises:
        OptionError: an option does not fit the artifact.
        ArtifactError: a file was changed, Triton does not support a data type, there is no suitable
            engine, or a folder of the repository was not written by this command.
        RejectedArtifactError: the artifact's validation failed.
        ShapeError: a profile does not fit the graph.
    """
    with progress.task(f"checking {artifact.name}"):
        opened = Artifact.open(artifact.path, verify=True)
    opened.require_passed(allow_failed=config.allow_failed)
    record = select_graph(opened, config)
    check_types(record, config.backend)
    config = _with_provider(opened, config)
    uses_tensorrt = "tensorrt" in (config.backend, config.provider)
    engines = select_engines(opened, record, config) if uses_tensorrt else []
    info, notes = read_graph_info(opened, record, engines, config)
    notes += _cpu_notes(opened, config)
    name = config.name or portable_name(opened.manifest.source.name)
    lacking = _why_graph_only(opened, record)
    if config.tokenizer and lacking:
        notes.append(f"exported only the graph: {lacking}")
    with_texts = config.tokenizer and not lacking
    graph = build_graph_model(opened, info, config, f"{name}-{GRAPH}" if with_texts else name)
    models = [graph]
    if with_texts:
        models += _text_models(opened, info, config, name)
        notes.append(
            f"the Python backend needs enginery {__version__}: install it in the server's Python, "
            "or pass an environment with --execution-env"
        )
    with progress.task(f"writing {name}"):
        notes += install_models(out, name, models, made_from=opened.content_sha256())
    for note in notes:
        progress.say(f"export-triton: {note}")
    return TritonExport(
        out, name, tuple(model.name for model in models), info.max_batch_size, tuple(notes)
    )


def _with_provider(artifact: Artifact, config: TritonConfig) -> TritonConfig:
    """Return the options with the provider that `auto` means.

    Raises:
        OptionError: the provider does not fit the artifact.
    """
    if config.backend == "tensorrt":
        return config
    manifest = artifact.manifest
    provider = resolve_provider(
        "tensorrt" if config.engine else config.provider,
        precision=manifest.precision,
        target=manifest.target,
        kind=manifest.describe_precision(),
    )
    return replace(config, provider=provider)


def _cpu_notes(artifact: Artifact, config: TritonConfig) -> list[str]:
    """Return what differs on the CPU from what a quantized artifact promises."""
    manifest = artifact.manifest
    if config.provider != "cpu" or manifest.precision != "int8":
        return []
    if manifest.residual == "fp16":
        return [
            "ONNX Runtime's CPU provider multiplies INT8 with FP16 elsewhere in floating point, "
            "because it fuses no Q/DQ nodes there"
        ]
    return [
        "on x86 processors without VNNI, ONNX Runtime's INT8 products saturate, and Triton cannot "
        "set session.x64quantprecision as enginery does"
    ]


def _why_graph_only(artifact: Artifact, record: GraphRecord) -> str:
    """Return why only the graph can be exported; empty if the task's models can be, too."""
    manifest = artifact.manifest
    task = manifest_task(manifest, record)
    if has_two_towers(manifest, record):
        return "the model takes texts and images in one graph"
    if task is not None and task.modality != "text":
        return f"the model takes {PLURALS[task.modality]}"
    if task is None or not issubclass(task, TextTask):
        of_texts = (task_class for task_class in TASKS.values() if issubclass(task_class, TextTask))
        supported = ", ".join(name for task_class in of_texts for name in task_class.tasks)
        return f"the task is {manifest.task}, expected one of {supported}"
    if _TOKENIZER_FILE not in manifest.files:
        return f"the artifact has no {_TOKENIZER_FILE}"
    return ""


def _text_models(
    artifact: Artifact, info: GraphInfo, config: TritonConfig, name: str
) -> list[TritonModel]:
    """Return the models for preprocessing and postprocessing, and the ensemble."""
    # Open the task as the server will, so that problems of the files are found now.
    task = open_text_task(artifact, info.record)
    names = [MANIFEST, *_processor_files(artifact)]
    files = {f"{VERSION}/{FILES}/{file}": artifact.path / file for file in names}
    files[f"{VERSION}/model.py"] = _MODEL_PY
    steps = [
        step_model(step, task, info, config, f"{name}-{step}", files=files)
        for step in (TOKENIZER, ANSWERS)
    ]
    return [*steps, ensemble_model(task, info, name)]


def _processor_files(artifact: Artifact) -> list[str]:
    """Return the model's files except graphs and engines: tokenizer and configuration."""
    manifest = artifact.manifest
    graphs = {file for graph in manifest.graphs for file in (graph.file, *graph.data_files)}
    return [
        file for file in manifest.files if file not in graphs and not file.startswith(f"{ENGINES}/")
    ]

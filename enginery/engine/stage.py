"""The build stage: add TensorRT engines to an artifact.

The new artifact has everything of the old one, including engines of earlier builds. Each engine is
a directory `engines/<flavor>-<sm>-<key>/` with the plan, its ONNX wrapper, `engine.json` and
`layers.json`. The report is `reports/engines.json`.

The graphs do not change, so their verdicts stay valid. Engines are cached in the store by content:
the same graph for the same GPUs and shapes is built once, for all artifacts.
"""

from __future__ import annotations

import time
from pathlib import Path

from enginery.core.artifact.artifact import (
    REPORTS,
    Artifact,
    commit_artifact,
    copy_file,
    link_or_copy,
)
from enginery.core.artifact.engine import Engine
from enginery.core.artifact.engine_record import ENGINE_FILE, ENGINES, engine_directories
from enginery.core.artifact.fingerprint import (
    Fingerprint,
    combined_sha256,
    option_fields,
    runtime_version,
    stage_fingerprint,
    tool_versions,
)
from enginery.core.artifact.manifest import StageRecord
from enginery.core.artifact.staging import CARD, LISTING, staging
from enginery.core.progress import SILENT, Progress
from enginery.core.subprocess import peak_rss_bytes
from enginery.engine.build import (
    GraphCoverage,
    find_coverage,
    find_engine,
    obtain_engine,
    place_engine,
)
from enginery.engine.config import BuildConfig
from enginery.engine.report import make_report, save_length_figure
from enginery.engine.requests import RequestedEngines, resolve_requests
from enginery.reports.engines import BuildReport
from enginery.runtime.tensorrt.options import get_flavor

STAGE = "build"
STAGE_VERSION = "2"
"""Incremented when the same engines give a different artifact; part of the fingerprint."""

REPORT = f"{REPORTS}/{BuildReport.FILE}"
FIGURE = f"{REPORTS}/lengths.svg"


def fingerprint(source: Artifact, config: BuildConfig, requested: RequestedEngines) -> Fingerprint:
    """Return the cache key: the source with its other engines, and the requested engines.

    Fields that differ between the graphs of an artifact are labeled with the graph.
    """
    directories = {request.directory for request in requested.requests}
    others = {_engine_directory(name) for name in source.manifest.files} - directories - {""}
    names = dict.fromkeys(n for r in requested.requests for n in r.fingerprint.fields)
    engines: dict[str, str] = {}
    for name in names:
        values = [r.fingerprint.fields.get(name, "none") for r in requested.requests]
        if len(set(values)) == 1:
            engines[name] = values[0]
            continue
        for request, value in zip(requested.requests, values, strict=True):
            label = f"{name} of {request.graph.file}"
            engines[label] = f"{engines[label]}; {value}" if label in engines else value
    return stage_fingerprint(
        STAGE,
        STAGE_VERSION,
        {
            "artifact": source.content_sha256(),
            # Verdicts are part of the new artifact.
            "verdicts": ", ".join(
                f"{v.stage} {v.key[:16]} {v.passed}" for v in source.manifest.verdicts
            )
            or "none",
            "reports": _reports_sha256(source),
            "other engines": ", ".join(sorted(others)) or "none",
            **engines,
        },
        option_fields(config),
        runtime_version(),  # that of TensorRT is in the engines' keys
    )


def _reports_sha256(source: Artifact) -> str:
    """Return a digest of all reports except those that this stage writes."""
    others = {n: r.sha256 for n, r in source.manifest.reports.items() if n not in (REPORT, FIGURE)}
    return combined_sha256(others) if others else "none"


def find_finished(source: Artifact, requested: RequestedEngines) -> Artifact | None:
    """Return the artifact itself if it has every requested engine already, or None."""
    records = (f"{ENGINES}/{r.directory}/{ENGINE_FILE}" for r in requested.requests)
    return source if all(record in source.manifest.files for record in records) else None


def engines_lost(source: Artifact, requested: RequestedEngines, out: Path) -> list[str]:
    """Return the engines at `out` that the new artifact will not have."""
    present = {path.name for path in engine_directories(out)}
    source_engines = {path.name for path in engine_directories(source.path)}
    return sorted(present - source_engines - {request.directory for request in requested.requests})


def run(
    source: Artifact,
    config: BuildConfig,
    out: Path,
    *,
    requested: RequestedEngines | None = None,
    key: Fingerprint | None = None,
    progress: Progress = SILENT,
) -> Artifact:
    """Build the engines, or take them from the store, and write the new artifact to `out`.

    Args:
        source: an artifact whose graphs TensorRT supports.
        config: the options.
        out: directory of the new artifact.
        requested: result of `resolve_requests` for `source` and `config`; computed if None.
        key: result of `fingerprint`; computed if None.
        progress: receives progress messages.

    Raises:
        OptionError: an option is invalid.
        ShapeError: a profile does not fit.
        InputError: the data for profiles cannot be read.
        RejectedArtifactError: the artifact's validation failed.
        ProviderError: TensorRT does not support a graph, cannot build an engine, or crashed.
            Nothing is written then.
        MissingPackageError: the flavor is not installed.
    """
    started = time.monotonic()
    source.require_passed(allow_failed=config.allow_failed)
    requested = requested or resolve_requests(source, config)
    key = key or fingerprint(source, config, requested)
    left_out = _find_unsupported_graphs(source, config, requested, progress)
    refused = {graph.graph for graph in left_out}
    engines: dict[str, tuple[Engine, bool]] = {}
    for request in requested.requests:
        if request.graph.file not in refused:
            engines[request.directory] = obtain_engine(
                source, request, config, force=requested.force, progress=progress
            )
    earlier = [
        Engine.open(path) for path in engine_directories(source.path) if path.name not in engines
    ]
    key.inputs.check()  # before hard links change the times of its files
    with staging(out, key.inputs) as directory:
        _copy(source, directory)
        for engine, _ in engines.values():
            place_engine(engine, directory)
        report = make_report(list(engines.values()), earlier, left_out, requested, key.fields)
        (directory / REPORTS).mkdir(exist_ok=True)
        (directory / REPORT).write_bytes(report.to_json())
        if requested.buckets:
            save_length_figure(directory / FIGURE, requested.buckets)
        record = StageRecord.of(
            key,
            config,
            started=started,
            tools=tool_versions([get_flavor(config.flavor).package]),
            peak_rss_bytes=max(
                [
                    peak_rss_bytes(),
                    *(e.record.peak_rss_bytes for e, built in engines.values() if built),
                ]
            ),
            notes=(report.summary, *report.notes),
        )
        others = [stage for stage in source.manifest.stages if stage.key != key.key]
        manifest = source.manifest.model_copy(update={"stages": (*others, record)})
        commit_artifact(directory, manifest)
    progress.say(f"build: {report.summary}")
    return Artifact.open(out)


def _find_unsupported_graphs(
    source: Artifact, config: BuildConfig, requested: RequestedEngines, progress: Progress
) -> list[GraphCoverage]:
    """Return the graphs with unsupported nodes; graphs whose engines are stored are not checked.

    Raises:
        ProviderError: there are such graphs and `allow_partitions` is off, or all graphs are.
    """
    graphs = dict.fromkeys(request.graph.file for request in requested.requests)
    missing = [
        request.graph.file
        for request in requested.requests
        if requested.force or find_engine(request) is None
    ]
    refused = []
    for graph in dict.fromkeys(missing):
        with progress.task(f"checking TensorRT's support of {graph}"):
            coverage = find_coverage(source.path / graph, graph, get_flavor(config.flavor))
        if not coverage.complete:
            refused.append(coverage)
    if refused and not config.allow_partitions:
        raise refused[0].error(several=len(graphs) > 1)
    if refused and len(refused) == len(graphs):
        raise refused[0].error(several=False)
    return refused


def _copy(source: Artifact, directory: Path) -> None:
    """Copy the artifact without its manifest. Large files are hard-linked, reports are copied."""
    external = source.external_data()
    for name in source.manifest.files:
        link_or_copy(source.path / name, directory / name, linked=name not in external)
    for name in (*source.manifest.reports, CARD, LISTING):
        if (source.path / name).is_file():
            copy_file(source.path / name, directory / name)


def _engine_directory(file: str) -> str:
    """Return the name of the engine directory that a file is in; empty for other files."""
    first, _, below = file.partition("/")
    return below.partition("/")[0] if first == ENGINES else ""

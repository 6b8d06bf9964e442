"""The build stage: an artifact -> the same artifact with TensorRT engines of its graphs.

Takes an artifact; leaves all that it had, engines of earlier builds included, and
`engines/<flavor>-<sm>-<key>/` for each engine with the plan, its ONNX wrapper, `engine.json` and
`layers.json`; and `reports/engines.json`.

    >>> config = BuildConfig(profile=("batch=1:8:32,sequence=8:128:512",), capability="8.9")
    >>> artifact = run(Artifact.open("minilm"), config, Path("minilm-engines"))
    >>> [directory.name for directory in engine_directories(artifact.path)]
    ['tensorrt-rtx-sm89-3f2a91c04be7d815']

The graphs do not change, so that verdicts about them hold. Engines are kept in the store by what
they are made from: the same graph for the same GPUs and shapes is built once, whatever artifact it
is in. No engine of this package has been run on a GPU yet.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

from enginery.core.artifact import (
    REPORTS,
    Artifact,
    commit_artifact,
    copy_file,
    link_or_copy,
)
from enginery.core.engine import Engine
from enginery.core.engine_record import ENGINE_FILE, ENGINES, engine_directories
from enginery.core.fingerprint import Fingerprint, combined_sha256, tool_versions
from enginery.core.manifest import StageRecord
from enginery.core.memory import peak_rss_bytes
from enginery.core.options import options_dict
from enginery.core.progress import SILENT, Progress
from enginery.core.reports import BuildReport
from enginery.core.staging import CARD, LISTING, staging
from enginery.engine.build import (
    GraphCoverage,
    cover_graph,
    find_engine,
    obtain_engine,
    place_engine,
)
from enginery.engine.config import BuildConfig
from enginery.engine.length_figure import save_length_figure
from enginery.engine.report import make_report
from enginery.engine.request import Requested, read_requests
from enginery.runtime.tensorrt.options import flavor_named

STAGE = "build"
STAGE_VERSION = "1"
"""Raised when the same engines would make another artifact; part of the fingerprint."""

REPORT = f"{REPORTS}/{BuildReport.FILE}"
FIGURE = f"{REPORTS}/lengths.svg"


def fingerprint(source: Artifact, config: BuildConfig, requested: Requested) -> Fingerprint:
    """What the artifact depends on: the source with its other engines, and the engines asked for.

    What differs between the graphs of one artifact is named with its graph.
    """
    asked = {request.directory for request in requested.requests}
    others = {_engine_of(name) for name in source.manifest.files} - asked - {""}
    names = dict.fromkeys(n for r in requested.requests for n in r.fingerprint.fields)
    engines: dict[str, str] = {}
    for name in names:
        found = [r.fingerprint.fields.get(name, "none") for r in requested.requests]
        if len(set(found)) == 1:
            engines[name] = found[0]
            continue
        for request, value in zip(requested.requests, found, strict=True):
            label = f"{name} of {request.graph.file}"
            engines[label] = f"{engines[label]}; {value}" if label in engines else value
    return Fingerprint(
        STAGE,
        {
            "artifact": source.content_sha256(),
            # They go along with the artifact, so that one with others is another.
            "verdicts": ", ".join(f"{v.stage} {v.key[:16]} {v.passed}" for v in
                                  source.manifest.verdicts) or "none",
            "reports": _reports_sha256(source),
            "other engines": ", ".join(sorted(others)) or "none",
            **engines,
            "profiles from": f"{requested.data_sha256} {config.column}" if requested.buckets
            else "none",
            "allow partitions": str(config.allow_partitions).lower(),
            "stage version": STAGE_VERSION,
        },
    )  # fmt: skip


def _reports_sha256(source: Artifact) -> str:
    """Return one digest over the reports, but for those that this stage writes itself."""
    others = {n: r.sha256 for n, r in source.manifest.reports.items() if n not in (REPORT, FIGURE)}
    return combined_sha256(others) if others else "none"


def has_engines(source: Artifact, requested: Requested) -> bool:
    """Whether every engine that is asked for is in the artifact already."""
    records = (f"{ENGINES}/{r.directory}/{ENGINE_FILE}" for r in requested.requests)
    return all(record in source.manifest.files for record in records)


def engines_lost(source: Artifact, requested: Requested, out: Path) -> list[str]:
    """Engines at `out` that the artifact which replaces it there will not have."""
    present = {path.name for path in engine_directories(out)}
    kept = {path.name for path in engine_directories(source.path)}
    return sorted(present - kept - {request.directory for request in requested.requests})


def run(
    source: Artifact,
    config: BuildConfig,
    out: Path,
    *,
    requested: Requested | None = None,
    force: bool = False,
    progress: Progress = SILENT,
) -> Artifact:
    """Builds the engines, or takes them from the store, and leaves the new artifact at `out`.

    Args:
        source: any artifact whose graphs TensorRT takes.
        config: the options.
        out: where the artifact goes.
        requested: what `read_requests` gave for the two.
        force: build although the store has the engines.
        progress: who is told what happens.

    Raises:
        OptionError: an option cannot be used.
        ShapeError: a profile does not fit.
        InputError: the data for profiles cannot be read.
        RejectedArtifactError: the artifact's validation failed.
        ProviderError: TensorRT refuses a graph, builds no engine, or crashed. Nothing is left then.
        MissingPackageError: the flavor is not installed.
    """
    started = time.monotonic()
    source.require_passed(allow_failed=config.allow_failed)
    requested = requested or read_requests(source, config)
    key = fingerprint(source, config, requested)
    left_out = _left_out(source, config, requested, force=force, progress=progress)
    refused = {graph.graph for graph in left_out}
    engines: dict[str, tuple[Engine, bool]] = {}
    for request in requested.requests:
        if request.graph.file not in refused:
            found = obtain_engine(source, request, config, force=force, progress=progress)
            engines[request.directory] = found
    earlier = [Engine.open(path) for path in engine_directories(source.path)
               if path.name not in engines]  # fmt: skip
    with staging(out) as directory:
        _copy(source, directory)
        for engine, _ in engines.values():
            place_engine(engine, directory)
        report = make_report(list(engines.values()), earlier, left_out, requested, key.fields)
        (directory / REPORTS).mkdir(exist_ok=True)
        (directory / REPORT).write_bytes(report.to_json())
        if requested.buckets:
            save_length_figure(directory / FIGURE, requested.buckets)
        record = StageRecord(
            stage=STAGE,
            key=key.key,
            fields=key.fields,
            options=options_dict(config),
            tools=tool_versions([flavor_named(config.flavor).package]),
            finished=datetime.now(UTC).isoformat(timespec="seconds"),
            seconds=round(time.monotonic() - started, 3),
            peak_rss_bytes=max(
                [peak_rss_bytes(), *(e.record.peak_rss_bytes for e, built in engines.values()
                                     if built)]
            ),
            notes=(report.summary, *report.notes),
        )  # fmt: skip
        others = [stage for stage in source.manifest.stages if stage.key != key.key]
        manifest = source.manifest.model_copy(update={"stages": (*others, record)})
        commit_artifact(directory, manifest)
    progress.say(f"build: {report.summary}")
    return Artifact.open(out)


def _left_out(
    source: Artifact,
    config: BuildConfig,
    requested: Requested,
    *,
    force: bool,
    progress: Progress,
) -> list[GraphCoverage]:
    """The graphs that TensorRT does not take whole; those of a stored engine are not asked about.

    Raises ProviderError for them, unless others are taken and `allow_partitions` is on.
    """
    graphs = dict.fromkeys(request.graph.file for request in requested.requests)
    missing = [
        request.graph.file
        for request in requested.requests
        if force or find_engine(request) is None
    ]
    refused = []
    for graph in dict.fromkeys(missing):
        with progress.task(f"asking TensorRT about {graph}"):
            found = cover_graph(source.path / graph, graph, flavor_named(config.flavor))
        if not found.complete:
            refused.append(found)
    if refused and not config.allow_partitions:
        raise refused[0].error(several=len(graphs) > 1)
    if refused and len(refused) == len(graphs):
        raise refused[0].error(several=False)
    return refused


def _copy(source: Artifact, directory: Path) -> None:
    """Copy the artifact but its manifest; large files are linked, reports are not."""
    external = source.external_data()
    for name in source.manifest.files:
        link_or_copy(source.path / name, directory / name, linked=name not in external)
    for name in (*source.manifest.reports, CARD, LISTING):
        if (source.path / name).is_file():
            copy_file(source.path / name, directory / name)


def _engine_of(file: str) -> str:
    """The engine's directory that a file of an artifact is in; empty for other files."""
    first, _, rest = file.partition("/")
    return rest.partition("/")[0] if first == ENGINES else ""

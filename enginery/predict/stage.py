"""Predict: a file's rows in, the same rows with the model's answers out.

Takes an artifact and a table, lines, a folder of images or standard input; leaves a Parquet, CSV or
JSONL file, and its report beside it as `OUTPUT.json`.

    >>> report = run(artifact, "reviews.csv", Path("out.parquet"), PredictConfig())
    >>> report.counts.rows, report.counts.bad_rows
    (10000, 0)

Rows come out in their order. Finished parts outlive a killed run, and the same command goes on
after them; memory does not follow the file.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Literal

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.fingerprint import (
    Fingerprint,
    data_sha256,
    option_fields,
    runtime_version,
    sha256_of,
    tool_versions,
)
from enginery.core.datasets.batches import DatasetReader, ReadOptions
from enginery.core.datasets.delimited import LineReader
from enginery.core.datasets.images import ImageReader
from enginery.core.datasets.parquet import ParquetReader
from enginery.core.datasets.reader import detect_format, open_dataset
from enginery.core.errors import EngineryError, InputError, OptionError
from enginery.core.options import options_dict
from enginery.core.progress import SILENT, Progress
from enginery.core.subprocess import peak_rss_bytes
from enginery.predict.answering import Answerer
from enginery.predict.asking import column_names, providers_of, require_task
from enginery.predict.columns import AnswerColumns
from enginery.predict.config import WITHOUT_EFFECT, PredictConfig
from enginery.predict.journal import (
    STDIN_COPY,
    Journal,
    is_whole,
    only_run,
    parts_directory,
    remove_parts,
)
from enginery.predict.ray.executor import RayAnswerer
from enginery.predict.report import PredictReport, sidecar
from enginery.predict.writing import OutputFormat, assemble, output_format
from enginery.runtime.machine import usable_cores

STAGE = "predict"
STAGE_VERSION = "3"
STDIN = "-"


def fingerprint(artifact: Artifact, path: Path, kind: str, config: PredictConfig) -> Fingerprint:
    """What an output depends on: the input's content, the artifact, the options, the tools."""
    options = {k: v for k, v in options_dict(config).items() if k not in WITHOUT_EFFECT}
    return Fingerprint(
        STAGE,
        {
            "stage_version": STAGE_VERSION,
            "input": data_sha256(path),
            "artifact": artifact.content_sha256(),
            "output_format": kind,
            "providers": "; ".join(f"{spec.name} {spec.options}" for spec in providers_of(config)),
            **option_fields(options),
            **runtime_version(),
            **tool_versions(["tokenizers"]),
        },
    )


def run(
    artifact: Artifact,
    source: str,
    output: Path,
    config: PredictConfig,
    *,
    force: bool = False,
    progress: Progress = SILENT,
    stdin: IO[bytes] | None = None,
) -> PredictReport:
    """Answers every row of the input, or finds that this is done.

    Args:
        artifact: a model that answers: vectors, labels, spans, answers, fillings.
        source: a file, a folder of images, or `-`.
        output: a .parquet, .csv or .jsonl file.
        config: how rows are read, answered and written.
        force: replace an output that is there.
        progress: receives progress messages.
        stdin: read in place of standard input.

    Returns:
        The report. Bad rows are counted in it and are no error.

    Raises:
        InputError: the input cannot be read, is empty or lacks a column; the output is there and
            of something else, or cannot be written; with `fail_fast`, the first bad row.
        OptionError: an option does not fit the input or the task.
        ArtifactError, ProviderError: the artifact cannot answer.
    """
    started = time.perf_counter()
    kind = output_format(output)
    _make_folder(output)
    with only_run(output), on_disk(source, output, config, stdin) as path:
        options = input_options(config, keep="lines" if kind == "jsonl" else "columns")
        detect_format(path, options)
        if path.resolve() == output.resolve():
            raise InputError(f"output '{output}' is the input, which is never overwritten.")
        key = fingerprint(artifact, path, kind, config)
        if done := finished_report(output, key, force=force):
            progress.say(f"predict: {output} is there, whole and of the same: nothing to do")
            remove_parts(output)  # of a run that was killed after it had put them together
            return done
        with ExitStack() as opened:
            # The session loads while the input is looked at; neither waits for the other.
            side = opened.enter_context(ThreadPoolExecutor(1))
            base = path if path.is_dir() else path.parent
            loading = side.submit(_open, artifact, config, base)
            try:
                columns = column_names(require_task(artifact, config), config)
                reader = open_dataset(path, columns, options)
                _require_texts(reader, columns, path)
            except BaseException:
                _drop(loading)
                raise
            answerer = loading.result()
            opened.enter_context(answerer)
            _require_shape(reader, columns, artifact.manifest.task, answerer)
            written = answerer.columns(reader.schema, reader.names)
            journal = Journal.open(output, key, str(written.schema))
            resumed = journal.counts.rows
            if journal.damage:
                progress.say(
                    f"predict: of an earlier run {parts_directory(output).name}: "
                    f"{journal.damage}; its rows are answered anew"
                )
            if resumed:
                progress.say(f"predict: going on after {resumed:,} rows of an earlier run")
            if not journal.whole:
                # Closed here and not when the error of a run is forgotten: it holds the workers.
                with closing(answerer.stream(reader, written, skip=resumed)) as windows:
                    journal.write_parts(windows, written, config, kind=kind, progress=progress)
            first_run = answerer.first_run or started
            providers, notes = tuple(answerer.providers), answerer.notes
            workers = answerer.workers
        # The session is gone by now: its memory is free for the row groups.
        report = PredictReport(
            output=str(output),
            task=artifact.manifest.task,
            worked=True,
            counts=journal.counts,
            resumed_rows=resumed,
            first_bad=journal.first_bad,
            workers=workers,
            providers=providers,
            notes=notes,
            boot_seconds=max(first_run - started, 0.0),
            total_seconds=0.0,
            peak_rss_bytes=0,
            fingerprint=key.fields,
            key=key.key,
            size_bytes=0,
            sha256="",
        )
        return _deliver(report, journal, written, output, kind, started)


def _deliver(
    report: PredictReport,
    journal: Journal,
    written: AnswerColumns,
    output: Path,
    kind: OutputFormat,
    started: float,
) -> PredictReport:
    """The output from its parts, then its report, then no parts: in this order, each at once."""
    # From here on the output may be of this run and its report of another: never the other way.
    sidecar(output).unlink(missing_ok=True)
    digest = assemble(journal.paths(), output, kind, written.schema)
    complete = replace(
        report,
        total_seconds=time.perf_counter() - started,
        peak_rss_bytes=peak_rss_bytes(),
        size_bytes=output.stat().st_size,
        sha256=digest,
    )
    journal.write_report(complete)
    remove_parts(output)
    return complete


def finished_report(output: Path, key: Fingerprint, *, force: bool) -> PredictReport | None:
    """The report of an output that is there and of the same; None where there is work to do.

    Raises:
        InputError: the output is there and of something else, or was changed since, and `force`
            is not said.
    """
    if not output.exists() or force:
        return None
    if output.is_dir():
        raise InputError(f"output '{output}' is a folder, expected the name of a file.")
    do = "Pass --force to replace it, or name another --output."
    unknown = InputError(
        f"output '{output}' exists, and no {sidecar(output).name} says what it was made from.",
        do=do,
    )
    try:
        report = json.loads(sidecar(output).read_bytes())
        changes = key.changes(report["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        if is_whole(output, key):
            return None  # killed before it had its report: the parts are put together again
        raise unknown from None
    if changes:
        raise InputError(f"output '{output}' was made from something else: {changes[0]}.", do=do)
    try:
        found = PredictReport.from_json(report, worked=False)
    except (KeyError, TypeError):
        raise unknown from None
    if (digest := sha256_of(output)) != found.sha256:
        raise InputError(
            f"output '{output}' has the sha256 {digest[:12]}…, its report says "
            f"{found.sha256[:12]}…: it was changed.",
            do=do,
        )
    return found


def _open(artifact: Artifact, config: PredictConfig, base: Path) -> Answerer | RayAnswerer:
    """What answers windows of rows; raises what opening it raises."""
    if config.engine == "ray":
        return RayAnswerer(artifact, config, base=base)
    return Answerer(artifact, config, workers=config.workers or usable_cores(), base=base)


def _require_shape(
    reader: DatasetReader, columns: tuple[str, ...], task: str, answerer: Answerer | RayAnswerer
) -> None:
    """Raise InputError for lines or images where the model wants something else."""
    if isinstance(reader, ImageReader) and not answerer.takes_images:
        raise InputError(f"the input is images, but the model does {task} of texts.")
    if isinstance(reader, LineReader) and (len(columns) > 1 or answerer.takes_images):
        wanted = " and ".join(f"'{column}'" for column in columns)
        raise InputError(
            f"the input is lines of text, but {task} needs the columns {wanted}.",
            do="Give it a CSV, JSONL or Parquet file.",
        )


def _require_texts(reader: DatasetReader, columns: tuple[str, ...], path: Path) -> None:
    """Raise InputError for a Parquet column that can hold no text in any row."""
    import pyarrow as pa

    for column in columns if isinstance(reader, ParquetReader) else ():
        found = kind = reader.schema.field(column).type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        texts = (pa.string(), pa.large_string(), pa.string_view(), pa.null())
        if kind not in texts:
            raise InputError(f"data '{path}': column '{column}' holds {found}, expected text.")


def _make_folder(output: Path) -> None:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"output '{output}' cannot be written: {error.strerror}.") from error


def input_options(
    config: PredictConfig, *, keep: Literal["columns", "lines", "nothing"] = "nothing"
) -> ReadOptions:
    """Return how the input is read; `keep` is what stays of a row besides the model's inputs."""
    return ReadOptions(
        config.format, config.delimiter, config.encoding, rows=config.window, keep=keep
    )


def require_format(config: PredictConfig) -> None:
    """Raise OptionError unless the options say what standard input is."""
    if config.format in ("auto", "images"):
        raise OptionError(
            f"standard input has no suffix, and its format is {config.format}.",
            do="Name it: --format csv, tsv, jsonl, parquet or text.",
        )


@contextmanager
def on_disk(
    source: str, output: Path, config: PredictConfig, stream: IO[bytes] | None = None
) -> Iterator[Path]:
    """Yield the input as a file: standard input is copied beside the parts first.

    So it can be looked at before anything runs, and an interrupted run goes on when the same bytes
    come again.

    Args:
        source: a path, or `-`.
        output: of the run.
        config: names the format, which standard input has no suffix for.
        stream: read in place of standard input.

    Raises:
        OptionError: standard input without a format.
    """
    if source != STDIN:
        yield Path(source)
        return
    require_format(config)
    if stream is None and sys.stdin is None:
        raise InputError("standard input is closed.")
    given: Any = stream or sys.stdin.buffer
    copied = parts_directory(output) / STDIN_COPY
    try:
        copied.parent.mkdir(exist_ok=True)
        with copied.open("wb") as copy:
            shutil.copyfileobj(given, copy, 1 << 20)
        yield copied
    finally:
        copied.unlink(missing_ok=True)
        with suppress(OSError):  # parts stay
            copied.parent.rmdir()


def _drop(loading: Future[Answerer | RayAnswerer]) -> None:
    """Closes what was loaded for nothing; its own error is not the one to show."""
    with suppress(EngineryError):
        loading.result().close()

r"""Predict stage: write the rows of a data set together with the model's predictions.

The input is a table, a text file, a folder of images or audio, or standard input. The output is a
Parquet, CSV or JSONL file with the rows in their order, and a report beside it, `OUTPUT.json`.

>>> _ = (tmp_path / "reviews.csv").write_text("text\nIt works.\nIt does not.\n")
>>> source, output = str(tmp_path / "reviews.csv"), tmp_path / "out.parquet"
>>> report = run(artifact, source, output, PredictConfig())
>>> report.counts.rows, report.counts.bad_rows
(2, 0)

The output is written in parts. If a run is killed, the same command continues after the last
finished part. Memory use does not depend on the size of the input.
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.fingerprint import (
    Fingerprint,
    combined_sha256,
    data_content,
    option_fields,
    sha256_of,
    stage_fingerprint,
    stage_tools,
)
from enginery.core.artifact.inputs import InputFiles
from enginery.core.datasets.batches import DatasetReader, ReadOptions
from enginery.core.datasets.delimited import LineReader
from enginery.core.datasets.folders import FolderReader
from enginery.core.datasets.parquet import ParquetReader
from enginery.core.datasets.reader import detect_format, open_dataset
from enginery.core.errors import EngineryError, InputError, OptionError, os_errors_as
from enginery.core.json_file import json_bytes
from enginery.core.progress import SILENT, Progress
from enginery.core.scratch import (
    Scratch,
    make_directory,
    replace_synced,
    sync,
    write_atomically,
)
from enginery.core.subprocess import peak_rss_bytes
from enginery.predict.batch_predictor import BatchPredictor
from enginery.predict.config import WINDOW_TEXTS, PredictConfig
from enginery.predict.journal import (
    Journal,
    is_complete,
    lock_output,
    other_files,
    parts_directory,
    remove_parts,
)
from enginery.predict.report import Counts, PredictReport, sidecar
from enginery.predict.task_inputs import (
    column_names,
    find_input_problem,
    provider_specs,
    require_task,
    window_rows,
)
from enginery.predict.tensors import NPZ, write_tensors
from enginery.predict.writer import Assembly, output_format
from enginery.runtime.providers.specification import format_providers
from enginery.runtime.tasks.task import PLURALS
from enginery.runtime.tasks.two_towers import has_two_towers

STAGE = "predict"
STAGE_VERSION = "4"
STDIN = "-"
PART_ROWS, GPU_PART_ROWS = 4096, 65_536
"""Default number of rows of a part: each is synced to the disk, which takes as long as 4096 rows
take a GPU."""


def fingerprint(
    artifact: Artifact, path: Path, output: Path, output_format: str, config: PredictConfig
) -> Fingerprint:
    """Compute the fingerprint of an output from its input, artifact, options and tools.

    It knows the files, so that a change while they are read is noticed. The output may lie in the
    folder of the input, which it is then no part of.

    Raises:
        ArtifactError: a file of the artifact was altered since it was opened.
        InputError: the table cannot be read for the names of its images or sounds.
    """
    with InputFiles().recording():
        artifact.check_files()
        inputs = {
            "input": data_content(path, other_files(path, output)),
            "artifact": artifact.content_sha256(),
            "output_format": output_format,
        }
        if named := _named_files(artifact, path, output_format, config):
            inputs["named files"] = named
        return stage_fingerprint(
            STAGE,
            STAGE_VERSION,
            inputs,
            option_fields(config, providers=format_providers(provider_specs(config))),
            stage_tools(["tokenizers"]),
        )


def _named_files(artifact: Artifact, path: Path, output_format: str, config: PredictConfig) -> str:
    """Return a digest of the images or sounds that a table names; empty if it names none."""
    if output_format == NPZ:
        return ""
    task, options = require_task(artifact, config), input_options(config)
    if task.modality == "text" or detect_format(path, options) in ("images", "audio", "text"):
        return ""
    columns = column_names(task, config)
    digests: dict[str, str] = {}
    for batch in open_dataset(path, columns, options).read(0):
        for row, values in enumerate(batch.values):
            if row in batch.errors or find_input_problem(values, columns) or values[0] in digests:
                continue
            try:
                digests[values[0]] = sha256_of(path.parent / values[0])
            except (OSError, ValueError):  # a bad row, until somebody adds the file
                digests[values[0]] = "missing"
    return combined_sha256(digests)


def require_input(source: str) -> None:
    """Raise InputError if the input does not exist, before anything takes long."""
    if source != STDIN and not Path(source).exists():
        raise InputError(f"data '{source}': no such file or folder.")


def run(
    artifact: Artifact,
    source: str,
    output: Path,
    config: PredictConfig,
    *,
    force: bool = False,
    progress: Progress = SILENT,
) -> PredictReport:
    """Predict every row of the input, unless the output is already up to date.

    Args:
        artifact: a model for a task of `runtime.tasks`.
        source: a file, a folder of images or audio, or `-` for standard input.
        output: a .parquet, .csv or .jsonl file; or .npz for the graph's own outputs, for a model
            of any task, see `predict.tensors`.
        config: the options.
        force: replace an existing output.
        progress: receives progress messages.

    Returns:
        The report. Bad rows are counted in it; they are not an error.

    Raises:
        InputError: the input cannot be read, is empty or lacks a column; the output exists and was
            made from something else, or cannot be written; with `fail_fast`, a row is bad.
        OptionError: an option does not fit the input or the task.
        ArtifactError: the artifact's task is not supported, or a file of it cannot be used.
        ProviderError: the provider is not available.
    """
    started = time.perf_counter()
    require_input(source)
    if output.suffix.lower() == NPZ:
        return _run_tensors(artifact, Path(source), output, config, force=force, progress=progress)
    kind = output_format(output)
    _make_output_directory(output)
    with (
        os_errors_as(InputError, f"output '{output}' cannot be written"),
        lock_output(output),
        input_file(source, output, config) as path,
    ):
        task = require_task(artifact, config)
        config = replace(config, window=window_rows(task, config))
        options = input_options(config, keep="lines" if kind == "jsonl" else "columns")
        if detect_format(path, options) == "images" and has_two_towers(artifact.manifest):
            config = replace(config, format="images")  # of a folder the images, else texts
        if path.resolve() == output.resolve():
            raise InputError(f"output '{output}' is the input, which is never overwritten.")
        key = fingerprint(artifact, path, output, kind, config)
        if report := find_finished(output, key, force=force):
            progress.say(f"predict: nothing to do, {output} is up to date")
            remove_parts(output)  # of a run that was killed after it had assembled them
            return report
        with key.inputs.explained(), ExitStack() as joining:
            with ExitStack() as opened:
                # The session loads while the input is checked.
                loader = opened.enter_context(ThreadPoolExecutor(1))
                base = path if path.is_dir() else path.parent
                loading = loader.submit(BatchPredictor, artifact, config, base=base)
                try:
                    columns = column_names(task, config)
                    reader = open_dataset(path, columns, options)
                    _check_text_columns(reader, columns, path)
                except BaseException:
                    _close_unused(loading)
                    raise
                predictor = loading.result()
                opened.enter_context(predictor)
                _check_input_kind(reader, columns, artifact.manifest.task, predictor)
                output_columns = predictor.columns(reader.schema, reader.names)
                journal = Journal.open(output, key, str(output_columns.schema))
                resumed = journal.counts.rows
                for note in journal.notes:
                    progress.say(f"predict: {note}")
                if resumed:
                    progress.say(f"predict: resuming after {resumed:,} rows from an earlier run")
                scratch = joining.enter_context(Scratch.beside(output))
                assembly = joining.enter_context(
                    Assembly(
                        scratch.path, kind, output_columns.schema, own_process=predictor.on_gpu
                    )
                )
                for part in journal.parts:
                    assembly.add(part)
                if not journal.has_all_rows:
                    part_rows = config.part_rows or (
                        GPU_PART_ROWS if predictor.on_gpu else PART_ROWS
                    )
                    with (
                        _saying_what_is_kept(journal, progress),
                        _showing_share(progress) as show,
                        # Closed here, not by the garbage collector: it holds the workers.
                        closing(
                            predictor.stream(reader, output_columns, skip=resumed, show=show)
                        ) as windows,
                    ):
                        journal.write_parts(
                            windows,
                            output_columns,
                            replace(config, part_rows=part_rows),
                            assembly,
                            show=show,
                        )
                first_run = predictor.first_run or started
                providers, notes = tuple(predictor.providers), predictor.notes
                workers = predictor.workers
            # The session is closed now, so its memory is free for the row groups.
            report = PredictReport(
                output=str(output),
                task=artifact.manifest.task,
                counts=journal.counts,
                resumed_rows=resumed,
                first_bad=journal.first_bad,
                workers=workers,
                providers=providers,
                notes=notes,
                start_seconds=max(first_run - started, 0.0),
                fingerprint=key.fields,
                key=key.key,
            )
            return _write_output(report, assembly, key, started)


@contextmanager
def _showing_share(progress: Progress) -> Iterator[Callable[[float], None]]:
    """Yield a function that shows the share of the input that is predicted, in any thread."""
    lock, percent = threading.Lock(), 0
    with progress.task("predicting", total=100) as advance:

        def show(share: float) -> None:
            nonlocal percent
            with lock:
                while percent < int(share * 100):
                    advance()
                    percent += 1

        yield show


@contextmanager
def _saying_what_is_kept(journal: Journal, progress: Progress) -> Iterator[None]:
    """If the run is interrupted, say that its finished parts are not lost."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if rows := journal.counts.rows:
            kept = f"{rows:,} rows are finished and kept; the same command continues after them"
        else:
            kept = "no part was finished yet, so that the same command starts again"
        progress.say(f"predict: {kept}")
        raise


def _run_tensors(
    artifact: Artifact,
    source: Path,
    output: Path,
    config: PredictConfig,
    *,
    force: bool,
    progress: Progress,
) -> PredictReport:
    """Write the graph's own outputs for every row, unless they are already up to date."""
    started = time.perf_counter()
    if str(source) == STDIN:
        raise InputError("standard input cannot be read for .npz output; name a file or a folder.")
    if source.resolve() == output.resolve():
        raise InputError(f"output '{output}' is the input, which is never overwritten.")
    _make_output_directory(output)
    with (
        os_errors_as(InputError, f"output '{output}' cannot be written"),
        lock_output(output),
        Scratch.beside(output) as scratch,
    ):
        key = fingerprint(artifact, source, output, NPZ, config)
        if report := find_finished(output, key, force=force):
            progress.say(f"predict: nothing to do, {output} is up to date")
            return report
        with key.inputs.unchanged():
            tensors = write_tensors(artifact, source, scratch.path, config)
        report = PredictReport(
            output=str(output),
            task=artifact.manifest.task,
            counts=Counts(rows=tensors.rows, run_seconds=tensors.run_seconds),
            providers=tensors.providers,
            start_seconds=tensors.start_seconds,
            fingerprint=key.fields,
            key=key.key,
        )
        report = _complete(report, tensors.path, sha256_of(tensors.path), started)
        # First the report: without its output, the next run writes both again, and beside an
        # earlier output its digest is another.
        write_atomically(sidecar(output), json_bytes(report.as_json()))
        replace_synced(tensors.path, output)
        return report


def _complete(report: PredictReport, path: Path, sha256: str, started: float) -> PredictReport:
    """Return the report with the properties of the finished file and of this run."""
    return replace(
        report,
        total_seconds=time.perf_counter() - started,
        peak_rss_bytes=peak_rss_bytes(),
        size_bytes=path.stat().st_size,
        sha256=sha256,
    )


def _write_output(
    report: PredictReport,
    assembly: Assembly,
    key: Fingerprint,
    started: float,
) -> PredictReport:
    """Assemble the output, write its report, then remove the parts. Each step is atomic."""
    output = Path(report.output)
    digest = assembly.finish()
    if assembly.rows != report.counts.rows:
        raise InputError(
            f"output '{output}' would have {assembly.rows:,} rows, expected {report.counts.rows:,} "
            "as in the journal of its parts.",
            do=f"Remove {parts_directory(output)}, and run the command again.",
        )
    try:
        key.inputs.check()
    except InputError:
        remove_parts(output)  # of many input files, not all were looked at after each part
        raise
    # The earlier report is removed first, so that it is never beside the new output.
    sidecar(output).unlink(missing_ok=True)
    sync(output.parent)
    assembly.deliver(output)
    report = _complete(report, output, digest, started)
    write_atomically(sidecar(output), json_bytes(report.as_json()))
    remove_parts(output)
    return report


def find_finished(output: Path, key: Fingerprint, *, force: bool) -> PredictReport | None:
    """Return the report of an output that is up to date; None if there is work to do.

    Raises:
        InputError: the output exists, and it was made from something else or changed later, and
            `force` is False.
    """
    if not output.exists() or force:
        return None
    if output.is_dir():
        raise InputError(f"output '{output}' is a folder, expected a file.")
    do = "Pass --force to replace it, or choose another --out."
    unknown = InputError(
        f"output '{output}' exists, but its report {sidecar(output).name} is missing or cannot be "
        "read.",
        do=do,
    )
    try:
        document = json.loads(sidecar(output).read_bytes())
        changes = key.changes(document["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        if is_complete(output, key):
            return None  # killed before the report was written: assemble the parts again
        raise unknown from None
    if changes:
        raise InputError(f"output '{output}' was made from something else: {changes[0]}.", do=do)
    try:
        report = PredictReport.from_json(document, worked=False)
    except (KeyError, TypeError):
        raise unknown from None
    if (digest := sha256_of(output)) != report.sha256:
        raise InputError(
            f"output '{output}' was changed: its sha256 is {digest[:12]}…, expected "
            f"{report.sha256[:12]}… as in its report.",
            do=do,
        )
    return report


def _check_input_kind(
    reader: DatasetReader,
    columns: tuple[str, ...],
    task: str,
    predictor: BatchPredictor,
) -> None:
    """Raise InputError if the input is a folder or lines of text, but the model needs another."""
    plural = PLURALS[predictor.modality]
    if isinstance(reader, FolderReader) and reader.kind != plural:
        raise InputError(
            f"the input is {reader.kind}, but the model's task is {task}, which takes {plural}.",
            do="" if plural == "texts" else f"If it has {plural}, too, pass --format {plural}.",
        )
    if isinstance(reader, LineReader) and (len(columns) > 1 or predictor.modality != "text"):
        names = " and ".join(f"'{column}'" for column in columns)
        raise InputError(
            f"the input is lines of text, but {task} needs the columns {names}.",
            do="Use a CSV, JSONL or Parquet file.",
        )


def _check_text_columns(reader: DatasetReader, columns: tuple[str, ...], path: Path) -> None:
    """Raise InputError if a Parquet column is not of a text type."""
    import pyarrow as pa

    if not isinstance(reader, ParquetReader):
        return
    text_types = (pa.string(), pa.large_string(), pa.string_view(), pa.null())
    for column in columns:
        dtype = reader.schema.field(column).type
        value_type = dtype.value_type if pa.types.is_dictionary(dtype) else dtype
        if value_type not in text_types:
            raise InputError(f"data '{path}': column '{column}' holds {dtype}, expected text.")


def _make_output_directory(output: Path) -> None:
    with os_errors_as(InputError, f"output '{output}' cannot be written"):
        make_directory(output.parent)


def input_options(
    config: PredictConfig, *, keep: Literal["columns", "lines", "nothing"] = "nothing"
) -> ReadOptions:
    """Return the reader's options; `keep` is what it keeps of a row for the output."""
    return ReadOptions(
        config.format,
        config.delimiter,
        config.encoding,
        rows=config.window or WINDOW_TEXTS,
        keep=keep,
    )


def check_stdin_format(config: PredictConfig) -> None:
    """Raise OptionError unless the options give the format of standard input."""
    if config.format in ("auto", "images", "audio"):
        raise OptionError(
            f"option 'format' is {config.format}, but standard input has no suffix to tell its "
            "format.",
            do="Set --format to csv, tsv, jsonl, parquet or text.",
        )


@contextmanager
def input_file(source: str, output: Path, config: PredictConfig) -> Iterator[Path]:
    """Yield the path of the input. Standard input is copied to a file beside the output first.

    The copy can be checked before anything runs, and its hash tells whether an interrupted run can
    be resumed.

    Args:
        source: a path, or `-` for standard input.
        output: the output of the run.
        config: the options; they give the format of standard input.

    Raises:
        InputError: standard input is closed.
        OptionError: the format of standard input is not given.
    """
    if source != STDIN:
        yield Path(source)
        return
    check_stdin_format(config)
    if sys.stdin is None:
        raise InputError("standard input is closed.")
    with Scratch.beside(output) as scratch:
        path = scratch.path / "stdin"
        with path.open("wb") as copy:
            shutil.copyfileobj(sys.stdin.buffer, copy, 1 << 20)
        yield path


def _close_unused(loading: Future[BatchPredictor]) -> None:
    """Close a predictor that is not needed; ignore its own error."""
    with suppress(EngineryError):
        loading.result().close()

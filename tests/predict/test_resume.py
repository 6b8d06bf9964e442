"""Resuming runs that were killed."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from enginery.cli import main
from enginery.core.artifact.fingerprint import Fingerprint
from enginery.core.errors import EngineryError, InputError
from enginery.core.home import enginery_home
from enginery.core.scratch import Scratch
from enginery.predict import stage, writer
from enginery.predict.config import PredictConfig
from enginery.predict.journal import Journal, lock_output, parts_directory, remove_leftovers
from enginery.predict.stage import run
from enginery.predict.token_batches import WindowRunner
from enginery.predict.writer import Assembly, FinishedPart, PartWriter
from tests.progress import Said

ROWS = 200
_PROGRAM = """
import sys, time
from pathlib import Path
from enginery.core.artifact.artifact import Artifact
from enginery.predict.config import PredictConfig
from enginery.predict.stage import run
from enginery.runtime.onnxruntime.runner import OrtRunner
plain = OrtRunner.__call__
def slowly(self, feeds, outputs=()):
    time.sleep(0.05)
    return plain(self, feeds, outputs)
OrtRunner.__call__ = slowly
config = PredictConfig(window=8, part_rows=16)
run(Artifact.open(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), config)
"""


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "in.csv"
    lines = [f"{n},{'' if n % 50 == 7 else f'the pump {n} is warm'}\n" for n in range(ROWS)]
    path.write_text("id,text\n" + "".join(lines))
    return path


@pytest.fixture(autouse=True)
def own_home(monkeypatch, tmp_path_factory):
    """Use an empty store, without the outputs of other tests."""
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path_factory.mktemp("home")))


@pytest.fixture
def asked(monkeypatch):
    """Return a list that collects the texts that the model gets from now on."""
    texts = []
    finish = WindowRunner.finish

    def noting(self, window, stats):
        texts.extend(window.inputs)
        return finish(self, window, stats)

    monkeypatch.setattr(WindowRunner, "finish", noting)
    return texts


def kill_midway(artifact, data, output):
    """Start a run, kill it once some parts are finished, and return the number of their rows."""
    words = [sys.executable, "-c", _PROGRAM, str(artifact.path), str(data), str(output)]
    journal = output.with_name(f"{output.name}.parts") / "journal.jsonl"
    with subprocess.Popen(words) as child:
        until = time.monotonic() + 120
        while not journal.is_file() or journal.read_bytes().count(b"\n") < 4:
            assert child.poll() is None, "ended before it was killed"
            assert time.monotonic() < until
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
        child.wait()
    lines = journal.read_bytes().split(b"\n")[1:-1]
    return sum(json.loads(line)["counts"]["rows"] for line in lines)


@pytest.mark.parametrize("name", ["out.parquet", "out.csv", "out.jsonl"])
def test_killed_run_is_resumed_without_lost_or_repeated_rows(
    predict, tmp_path, tiny, data, asked, name
):
    artifact = tiny("bert", "text-classification")
    predict(artifact, data, f"whole-{name}", window=8)
    asked.clear()
    finished = kill_midway(artifact, data, tmp_path / name)
    assert 0 < finished < ROWS
    assert not (tmp_path / name).exists()
    # An unfinished part of the killed run.
    parts = tmp_path / f"{name}.parts"
    (parts / f"part-{finished // 16:06d}").write_bytes(b"half a part")
    report = predict(artifact, data, name, window=8, part_rows=16)
    assert report.resumed_rows == finished
    good = [n for n in range(finished, ROWS) if n % 50 != 7]
    assert asked == [f"the pump {n} is warm" for n in good]
    assert (report.counts.rows, report.bad_rows) == (ROWS, 4)
    assert report.first_bad == "row 8: text is empty"
    if name == "out.parquet":
        found, whole = (pq.read_table(tmp_path / n) for n in (name, f"whole-{name}"))
        assert found.equals(whole)
    else:
        assert (tmp_path / name).read_bytes() == (tmp_path / f"whole-{name}").read_bytes()
    assert not parts.exists()
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".tmp-")]


def stop_after(predict, monkeypatch, artifact, data, parts):
    """Run predict and let it fail once this number of parts is finished."""
    write = Journal._write_part

    def ending(journal, number, *others):
        if number == parts:
            raise InputError("stopped")
        return write(journal, number, *others)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "_write_part", ending)
        with pytest.raises(InputError, match="stopped"):
            predict(artifact, data, window=8, part_rows=16)


def test_an_interrupted_run_says_what_is_kept_and_goes_on(
    tiny, data, tmp_path, monkeypatch, rows, predict
):
    finish, calls = WindowRunner.finish, []

    def interrupted(self, window, stats):
        calls.append(window)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return finish(self, window, stats)

    artifact, said = tiny("bert", "feature-extraction"), Said()
    config = PredictConfig(window=8, part_rows=16)
    with monkeypatch.context() as patch:
        patch.setattr(WindowRunner, "finish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(artifact, str(data), tmp_path / "out.parquet", config, progress=said)
    (kept,) = [message for message in said.messages if "are finished and kept" in message]
    number = int(re.match(r"predict: (\d+) rows", kept)[1])
    assert number in (16, 32)
    report = run(artifact, str(data), tmp_path / "out.parquet", config)
    assert report.resumed_rows == number
    assert [row["id"] for row in rows()] == [str(index) for index in range(ROWS)]


def test_incomplete_journal_line_and_missing_part_are_ignored(
    predict, rows, tmp_path, tiny, data, monkeypatch
):
    artifact = tiny("bert", "text-classification")
    stop_after(predict, monkeypatch, artifact, data, 4)
    parts = tmp_path / "out.parquet.parts"
    (parts / "part-000002").unlink()
    with (parts / "journal.jsonl").open("ab") as stream:
        stream.write(b'{"part": 4, "byt')
    report = predict(artifact, data, window=8, part_rows=16)
    assert report.resumed_rows == 32
    assert [row["id"] for row in rows()] == [str(n) for n in range(ROWS)]


def test_parts_of_another_input_are_not_used(predict, rows, tiny, data, monkeypatch):
    artifact = tiny("bert", "text-classification")
    stop_after(predict, monkeypatch, artifact, data, 4)
    data.write_text(data.read_text().replace("pump", "engine"))
    assert predict(artifact, data).resumed_rows == 0
    assert rows()[0]["text"] == "the engine 0 is warm"


def test_run_killed_before_its_report_is_assembled_again(
    predict, rows, tmp_path, tiny, data, monkeypatch, asked
):
    artifact = tiny("bert", "text-classification")
    with monkeypatch.context() as patch:
        patch.setattr(stage, "write_atomically", killed)
        with pytest.raises(KeyboardInterrupt):
            predict(artifact, data)
    assert (tmp_path / "out.parquet").exists()
    asked.clear()
    report = predict(artifact, data)
    assert (report.resumed_rows, asked) == (ROWS, [])
    assert len(rows()) == ROWS
    assert not predict(artifact, data).worked


LINE = pa.schema([("text", pa.string())])


def write_part(path, *texts):
    """Write a part with these texts, and return it."""
    with PartWriter(path, LINE) as part:
        part.write(pa.record_batch([list(texts)], schema=LINE))
    return FinishedPart.of(path, len(texts))


def test_failed_assembly_keeps_the_old_output(tmp_path, monkeypatch):
    part = write_part(tmp_path / "part", "a")
    (tmp_path / "out.jsonl").write_bytes(b"old\n")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with Assembly(tmp_path, "jsonl", LINE) as assembly:
        assembly.add(part)
        assembly.finish()
        with pytest.raises(OSError, match="No space left on device"):
            assembly.deliver(tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == b"old\n"


@pytest.mark.parametrize("own_process", [False, True])
def test_output_is_replaced_atomically(tmp_path, own_process, monkeypatch):
    monkeypatch.setattr(writer, "_BACKGROUND_BYTES", 0 if own_process else 1 << 30)
    part = write_part(tmp_path / "part", "new")
    (tmp_path / "out.jsonl").write_bytes(b"old\n")
    with (tmp_path / "out.jsonl").open("rb") as reader:
        assembly = Assembly(tmp_path, "jsonl", LINE, own_process=own_process)
        assembly.add(part)
        assert assembly.finish() == hashlib.sha256(b'{"text": "new"}\n').hexdigest()
        assembly.deliver(tmp_path / "out.jsonl")
        assert reader.read() == b"old\n"
    assert (tmp_path / "out.jsonl").read_bytes() == b'{"text": "new"}\n'


def test_output_that_lacks_rows_of_the_journal_is_not_delivered(
    predict, tmp_path, tiny, data, monkeypatch
):
    add = Assembly.add
    first_parts = []

    def add_but_the_first(assembly, part):
        if not first_parts:
            first_parts.append(part)
        else:
            add(assembly, part)

    monkeypatch.setattr(Assembly, "add", add_but_the_first)
    artifact = tiny("bert", "text-classification")
    with pytest.raises(InputError, match=r"would have \d+ rows, expected \d+ as in the journal"):
        predict(artifact, data, "out.jsonl", part_rows=16)
    assert not (tmp_path / "out.jsonl").exists()


def test_changed_part_is_named_and_its_rows_are_predicted_again(
    predict, rows, tmp_path, tiny, data, monkeypatch
):
    artifact = tiny("bert", "text-classification")
    predict(artifact, data, "whole.parquet", window=8)
    stop_after(predict, monkeypatch, artifact, data, 4)
    flip_byte(tmp_path / "out.parquet.parts" / "part-000001")
    said = Said()
    report = run(
        artifact,
        str(data),
        tmp_path / "out.parquet",
        PredictConfig(window=8, part_rows=16),
        progress=said,
    )
    assert report.resumed_rows == 16
    assert [line for line in said.messages if "part-000001 was changed since" in line]
    assert rows() == rows("whole.parquet")


def test_run_killed_while_assembling_leaves_only_its_parts(
    predict, rows, tmp_path, tiny, data, monkeypatch
):
    artifact = tiny("bert", "text-classification")
    kill_while_assembling(predict, monkeypatch, artifact, data)
    (assembled,) = tmp_path.glob(".tmp-out.parquet-*/assembled")
    left = [assembled.parent.name, ".tmp-out.parquet-lock", "in.csv", "out.parquet.parts"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left
    assert predict(artifact, data).resumed_rows == ROWS
    assert len(rows()) == ROWS
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "in.csv",
        "out.parquet",
        "out.parquet.json",
    ]


def test_prune_removes_files_that_no_run_can_resume_from(
    predict, rows, tmp_path, tiny, data, monkeypatch, capsys
):
    artifact = tiny("bert", "text-classification")
    kill_while_assembling(predict, monkeypatch, artifact, data)
    parts = tmp_path / "out.parquet.parts"
    (parts / "part-000777").write_bytes(b"half a part")
    with lock_output(tmp_path / "out.parquet"):
        assert remove_leftovers() == 0  # a run writes it
    (tmp_path / ".tmp-out.parquet-0123456789ab").mkdir()
    (tmp_path / ".tmp-out.parquet-0123456789ab" / "assembled").write_bytes(b"half an output")
    # The part that was started at the end of the input has no rows.
    left = [parts / "part-000001", parts / "part-000777", *tmp_path.glob(".tmp-*/assembled")]
    assert len(left) == 3
    size = sum(path.stat().st_size for path in left)
    with pytest.raises(SystemExit) as end:
        main(["store", "prune", "--max-size", "1TB", "--json"])
    assert not end.value.code
    assert json.loads(capsys.readouterr().out)["freed_bytes"] == size
    assert sorted(path.name for path in parts.iterdir()) == ["journal.jsonl", "part-000000"]
    assert predict(artifact, data).resumed_rows == ROWS
    assert remove_leftovers() == 0
    assert not list((enginery_home() / "predict").iterdir())


@pytest.mark.parametrize("how", ["next run", "prune"])
def test_parts_of_a_finished_output_are_removed(
    predict, rows, tmp_path, tiny, data, monkeypatch, how
):
    artifact = tiny("bert", "text-classification")
    with monkeypatch.context() as patch:
        patch.setattr(stage, "remove_parts", killed)
        with pytest.raises(KeyboardInterrupt):
            predict(artifact, data)
    assert (tmp_path / "out.parquet.parts").exists()
    if how == "prune":
        assert remove_leftovers() > 0
    else:
        assert not predict(artifact, data).worked
    assert not (tmp_path / "out.parquet.parts").exists()


def test_directory_with_other_files_is_kept(predict, tmp_path, tiny, data):
    mine = tmp_path / "out.parquet.parts" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    artifact = tiny("bert", "text-classification")
    with pytest.raises(InputError, match=r"out\.parquet\.parts contains mine\.txt"):
        predict(artifact, data)
    remove_leftovers()
    assert mine.read_text() == "mine"


def kill_while_assembling(predict, monkeypatch, artifact, data):
    """Run predict and kill it after assembling, before the output is renamed."""
    with monkeypatch.context() as patch:
        patch.setattr(writer.Assembly, "deliver", killed)
        # The kernel releases the lock, and nothing is removed.
        patch.setattr(Scratch, "close", lambda scratch: os.close(scratch._descriptor))
        with pytest.raises(KeyboardInterrupt):
            predict(artifact, data)


def test_output_where_nothing_can_be_written_needs_no_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    with lock_output(tmp_path / "out"), lock_output(tmp_path / "out"):
        assert list(tmp_path.iterdir()) == []


def killed(*_):
    raise KeyboardInterrupt


def flip_byte(path):
    """Change a byte in the middle of a file without changing its size."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_parts_of_a_large_output_are_joined_while_others_are_written(tmp_path, monkeypatch, kind):
    batches = [pa.record_batch({"text": [f"{n}"], "score": [n / 4]}) for n in range(6)]
    schema = batches[0].schema
    contents = []
    for threshold, own_process in ((1 << 30, False), (0, False), (0, True)):
        monkeypatch.setattr(writer, "_BACKGROUND_BYTES", threshold)
        monkeypatch.setattr(writer, "_SYNCED_BYTES", 1)
        with Assembly(tmp_path, kind, schema, own_process=own_process) as assembly:
            for number, batch in enumerate(batches):
                path = tmp_path / f"part-{number}"
                with PartWriter(path, schema) as part:
                    part.write(batch)
                assembly.add(FinishedPart.of(path, batch.num_rows))
            threads = {thread.name for thread in threading.enumerate()}
            assert ("enginery-assemble" in threads) == (threshold == 0)
            digest = assembly.finish()
            assembly.deliver(tmp_path / "out")
        assert digest == hashlib.sha256((tmp_path / "out").read_bytes()).hexdigest()
        contents.append((tmp_path / "out").read_bytes())
    assert contents[0] == contents[1] == contents[2]
    assert not (tmp_path / "assembled").exists()


def test_run_that_fails_leaves_no_thread_that_joins_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "_BACKGROUND_BYTES", 0)
    part = write_part(tmp_path / "part", "a")
    with Assembly(tmp_path, "jsonl", LINE) as assembly:
        assembly.add(part)
    assert not [t for t in threading.enumerate() if t.name == "enginery-assemble"]


def test_failure_of_the_thread_that_joins_parts_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "_BACKGROUND_BYTES", 0)
    part = write_part(tmp_path / "part", "a")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(writer, "_SYNCED_BYTES", 1)
    with Assembly(tmp_path, "jsonl", LINE) as assembly:
        assembly.add(part)
        assembly._thread.join(30)
        with pytest.raises(OSError, match="No space left on device"):
            assembly.add(part)


def test_errors_of_the_process_that_writes_are_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "_BACKGROUND_BYTES", 0)
    part = write_part(tmp_path / "part", "a")
    with Assembly(tmp_path / "gone", "jsonl", LINE, own_process=True) as assembly:
        assembly.add(part)
        with pytest.raises(InputError, match="the output cannot be written: No such file"):
            assembly.finish()


def test_process_that_writes_is_killed(tmp_path):
    part = write_part(tmp_path / "part", "a")
    process = writer.OutputProcess(tmp_path / "assembled", "jsonl", LINE)
    with process:
        process.add(part)
        process._process.kill()
        with pytest.raises(EngineryError, match=r"writing .*assembled: the process was killed"):
            process.finish()


def test_parts_of_lines_from_an_earlier_version_are_not_used(
    predict, rows, tmp_path, tiny, data, monkeypatch
):
    artifact = tiny("bert", "text-classification")
    with monkeypatch.context() as patch:
        patch.setattr(stage, "write_atomically", killed)
        with pytest.raises(KeyboardInterrupt):
            predict(artifact, data)
    journal = tmp_path / "out.parquet.parts" / "journal.jsonl"
    journal.write_bytes(journal.read_bytes().replace(b', "parts": "arrow"', b"", 1))
    assert predict(artifact, data, force=True).resumed_rows == 0
    assert len(rows()) == ROWS


def test_part_that_cannot_be_synced_ends_the_run_and_those_after_it(
    predict, rows, tmp_path, tiny, data, monkeypatch
):
    artifact = tiny("bert", "text-classification")
    sync, synced = os.fsync, []

    def fail_once(descriptor):
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        synced.append(name)
        if name == "part-000001":
            raise OSError(28, "No space left on device")
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail_once)
        with pytest.raises(InputError, match="cannot be written: No space left on device"):
            predict(artifact, data, window=8, part_rows=16)
    assert "part-000001" in synced
    # Parts that were written meanwhile are not in the journal, which has no gaps.
    lines = (tmp_path / "out.parquet.parts" / "journal.jsonl").read_text().splitlines()
    assert [json.loads(line).get("part") for line in lines[1:]] == [0]
    assert predict(artifact, data, window=8, part_rows=16).resumed_rows == 16
    assert len(rows()) == ROWS


def test_parts_on_a_gpu_are_larger(predict, tmp_path, tiny, data, monkeypatch):
    from enginery.predict.batch_predictor import BatchPredictor

    sizes = []
    write = Journal.write_parts

    def spy(journal, windows, columns, config, assembly, **options):
        sizes.append(config.part_rows)
        return write(journal, windows, columns, config, assembly, **options)

    monkeypatch.setattr(Journal, "write_parts", spy)
    artifact = tiny("bert", "text-classification")
    predict(artifact, data)
    monkeypatch.setattr(BatchPredictor, "on_gpu", True)
    predict(artifact, data, "gpu.jsonl")  # a process of its own writes it
    assert sizes == [4096, 65_536]
    assert len((tmp_path / "gpu.jsonl").read_text().splitlines()) == ROWS


def test_notes_and_parts_of_others_are_kept(predict, tmp_path, tiny, data, monkeypatch):
    notes = enginery_home() / "predict"
    notes.mkdir(parents=True)
    (notes / "table.csv").write_text("mine")
    artifact = tiny("bert", "text-classification")
    stop_after(predict, monkeypatch, artifact, data, 2)
    parts = tmp_path / "out.parquet.parts"
    (parts / "part-list.txt").write_text("mine")
    remove_leftovers()
    with pytest.raises(InputError, match=r"contains part-list\.txt, expected only parts"):
        predict(artifact, data)
    assert (parts / "part-list.txt").read_text() == "mine"
    assert (notes / "table.csv").read_text() == "mine"
    (parts / "part-list.txt").unlink()
    assert predict(artifact, data).resumed_rows == 32


@pytest.mark.more
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda lines: lines, ""),
        (lambda lines: [lines[0].replace(b"key", b"kex"), *lines[1:]], "damaged in line 1"),
        (lambda lines: [], "missing or damaged in line 1"),
        (lambda lines: [b'{"key": "k", "schema": "s", "parts": "arrow"}\n'], "another version of"),
        (lambda lines: [*lines[:2], lines[2].replace(b'"rows": 16', b'"rows": 61')], "in line 3"),
        (lambda lines: [*lines[:2], *lines[3:]], "journal.jsonl is damaged in line 3"),
    ],
)
def test_what_is_not_used_of_an_earlier_run_is_said(
    rows, predict, tmp_path, tiny, data, monkeypatch, change, reason
):
    artifact = tiny("bert", "text-classification")
    stop_after(predict, monkeypatch, artifact, data, 4)
    journal = tmp_path / "out.parquet.parts" / "journal.jsonl"
    journal.write_bytes(b"".join(change(journal.read_bytes().splitlines(keepends=True))))
    notes = Journal.open(tmp_path / "out.parquet", *opened_with(journal)).notes
    assert reason in "".join(notes)
    assert len(notes) == bool(reason)
    assert predict(artifact, data, window=8).counts.rows == ROWS
    assert [row["id"] for row in rows()] == [str(n) for n in range(ROWS)]


def test_removed_parts_of_another_run_are_said(predict, tmp_path, tiny, data, monkeypatch):
    stop_after(predict, monkeypatch, tiny("bert", "text-classification"), data, 4)
    output = tmp_path / "out.parquet"
    key, schema = opened_with(tmp_path / "out.parquet.parts" / "journal.jsonl")
    other = Fingerprint("predict", {**key.fields, "top_k": "2"})
    (note,) = Journal.open(output, other, schema).notes
    assert "are removed, because they were made from something else: top_k: 1 → 2" in note
    assert Journal.open(output, other, schema).notes == []


def opened_with(journal):
    """Return the key and the schema of the run that wrote a journal, whatever it has become."""
    return KEYS[journal]


KEYS = {}


@pytest.fixture(autouse=True)
def keys(monkeypatch):
    """Remember what journals are opened with."""
    real = Journal.open.__func__

    def noting(cls, output, fingerprint, schema):
        KEYS[parts_directory(output) / "journal.jsonl"] = (fingerprint, schema)
        return real(cls, output, fingerprint, schema)

    monkeypatch.setattr(Journal, "open", classmethod(noting))


def test_part_that_another_process_changes_is_not_joined(tmp_path):
    part = write_part(tmp_path / "part", "a", "b")
    for kind in ("csv", "jsonl", "parquet"):
        for content in (b"", part.path.read_bytes()[:-9] + b"123456789"):
            (tmp_path / "changed").write_bytes(content)
            changed = FinishedPart(tmp_path / "changed", part.sha256, 2)
            with Assembly(tmp_path, kind, LINE) as assembly:
                assembly.add(changed)
                with pytest.raises(InputError, match="changed was changed by another process"):
                    assembly.finish()
    with Assembly(tmp_path, "csv", LINE) as assembly:
        assembly.add(FinishedPart(part.path, part.sha256, 3))
        with pytest.raises(InputError, match="was changed by another process"):
            assembly.finish()

"""Campaigns: nothing is lost between two writers, nothing is stored under another one's key.

    $ pytest -m slow tests/faults/test_lost_or_mixed.py -s
    $ FAULTS_SHARE=0.1 pytest -m slow tests/faults/test_lost_or_mixed.py -s    # a tenth of each

Two runs of predict with homes of their own write one output, at random distances; inputs of every
stage are replaced at random times, in place or by a rename, for good or for a while; journals are
changed. An error is right each time, if it is one of enginery. Wrong are an output of status 0 with
other rows than an undisturbed run's, and an entry of the store under the key of another content.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from enginery import (
    build_engine,
    export_model,
    optimize_model,
    quantize_model,
    validate_model,
)
from enginery.core.artifact.artifact import Artifact, commit_artifact, staging
from enginery.core.artifact.engine import Engine
from enginery.core.artifact.engine_record import engine_directories
from enginery.core.artifact.manifest import GraphRecord, Manifest
from enginery.core.errors import EngineryError
from enginery.core.shapes import TensorSpec
from enginery.predict.config import PredictConfig
from enginery.predict.journal import Journal, parts_directory
from enginery.predict.report import sidecar
from enginery.predict.stage import run as predict
from enginery.runtime.pytorch import reference as torch_reference
from tests.core.artifacts import manifest
from tests.faults.scenarios import linear_artifact
from tests.prefork import forked_children

SHARE = float(os.environ.get("FAULTS_SHARE", "1"))
SEED = int(os.environ.get("FAULTS_OFFSET", "0"))
CONFIG = PredictConfig(window=8, part_rows=16, workers=1)
ROWS = 400
WIDTH = 32


def rounds(count: int) -> range:
    return range(max(1, round(count * SHARE)))


def write_table(path: Path, noun: str, rows: int = ROWS) -> Path:
    path.write_text("id,text\n" + "".join(f"{n},the {noun} {n} is warm\n" for n in range(rows)))
    return path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(autouse=True, scope="module")
def forked(tmp_path_factory):
    """Fork the children of stages: thousands import PyTorch otherwise."""
    with tempfile.TemporaryDirectory() as folder, forked_children(Path(folder, "socket")):
        yield


# Two homes, one output.


def run_in_child(home: Path, artifact: Path, table: Path, output: Path, delay: float) -> int:
    """Run predict in a forked process with a home of its own; return its id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns about threads of other tests
        child = os.fork()
    if child:
        return child
    status = 9
    try:
        os.environ["ENGINERY_HOME"] = str(home)
        time.sleep(delay)
        predict(Artifact.open(artifact), str(table), output, CONFIG)
        status = 0
    except EngineryError:
        status = 2
    finally:
        os._exit(status)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_two_homes_write_one_output(tmp_path, classifier, suffix):
    chance, ends = random.Random(SEED), Counter()
    table = write_table(tmp_path / "in.csv", "pump")
    right = tmp_path / f"right{suffix}"
    started = time.monotonic()
    predict(Artifact.open(classifier), str(table), right, CONFIG)
    seconds = time.monotonic() - started
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for number in rounds(20):
        output = tmp_path / "real" / f"out{suffix}"
        paths = (output, tmp_path / "link" / f"out{suffix}")
        children = [
            run_in_child(
                tmp_path / f"home-{index}", classifier, table, path, chance.uniform(0, seconds)
            )
            for index, path in enumerate(paths)
        ]
        if number % 3 == 0:
            time.sleep(chance.uniform(0, seconds))
            os.kill(children[0], signal.SIGKILL)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert set(statuses) <= {0, 2, -signal.SIGKILL}, f"round {number}: {statuses}"
        ends[tuple(sorted(statuses))] += 1
        if 0 not in statuses:  # the one was killed while the other was refused
            predict(Artifact.open(classifier), str(table), output, CONFIG)
        assert sha256(output) == sha256(right), f"round {number}: rows were lost"
        assert json.loads(sidecar(output).read_bytes())["counts"]["rows"] == ROWS
        left = {path.name for path in output.parent.iterdir()} - {output.name, sidecar(output).name}
        assert not left or -signal.SIGKILL in statuses, f"round {number}: left over {left}"
        shutil.rmtree(output.parent)
        output.parent.mkdir()
    print(f"\n{suffix}: {sum(ends.values())} double runs, ends {dict(ends)}, 0 rows lost")  # noqa: T201


# Inputs that are replaced while a stage reads them.


class Stage:
    """A stage, and a folder of inputs in two states."""

    name = ""

    def write(self, folder: Path, *, other: bool) -> None:
        """Write the inputs."""
        raise NotImplementedError

    def run(self, folder: Path) -> str:
        """Run the stage; return what its result is, for comparisons."""
        raise NotImplementedError

    def check(self, folder: Path) -> None:
        """Assert that nothing wrong was written into the inputs themselves."""


class ExportFile(Stage):
    name = "export of an .onnx file"

    def write(self, folder: Path, *, other: bool) -> None:
        artifact = linear_artifact(folder / "made")
        (folder / "made" / "model.onnx").replace(folder / "mine.onnx")
        shutil.rmtree(artifact.path)
        if other:
            scale(folder / "mine.onnx")
        else:
            scale(folder / "mine.onnx", 1)

    def run(self, folder: Path) -> str:
        return export_model(str(folder / "mine.onnx")).content_sha256()


class Export(Stage):
    name = "export"

    def __init__(self, classifier: Path) -> None:
        self.source = Path(Artifact.open(classifier).manifest.source.id)

    def write(self, folder: Path, *, other: bool) -> None:
        import safetensors.torch

        shutil.copytree(self.source, folder, dirs_exist_ok=True)
        if other:
            weights = safetensors.torch.load_file(folder / "model.safetensors")
            scaled = {name: weight * 3 for name, weight in weights.items()}
            safetensors.torch.save_file(scaled, folder / "model.safetensors", {"format": "pt"})

    def run(self, folder: Path) -> str:
        return export_model(str(folder), task="text-classification").content_sha256()


class Optimize(Stage):
    name = "optimize"

    def write(self, folder: Path, *, other: bool) -> None:
        linear_artifact(folder)
        if other:
            scale(folder / "model.onnx")
            record_again(folder)

    def run(self, folder: Path) -> str:
        return optimize_model(folder, target="tensorrt", precision="fp16").content_sha256()


class Quantize(Stage):
    name = "quantize"

    def write(self, folder: Path, *, other: bool) -> None:
        chance = np.random.default_rng(0)
        weight = chance.normal(size=(WIDTH, WIDTH)).astype(np.float32)
        dims = ("batch", 8, WIDTH)
        graph = GraphRecord(
            file="model.onnx",
            opset=20,
            inputs=(TensorSpec("x", "float32", dims),),
            outputs=(TensorSpec("logits", "float32", dims),),
            data_files=(),
        )
        with staging(folder / "artifact") as directory:
            made = helper.make_graph(
                [helper.make_node("MatMul", ["x", "w"], ["logits"], name="matmul")],
                "wide",
                [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, dims)],
                [helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, dims)],
                [numpy_helper.from_array(weight * (3 if other else 1), "w")],
            )
            opset = [helper.make_opsetid("", 20)]
            model = helper.make_model(made, opset_imports=opset, ir_version=10)
            onnx.save(model, directory / "model.onnx")
            (directory / "config.json").write_text("{}")
            commit_artifact(directory, manifest().model_copy(update={"graphs": (graph,)}))
        rows = chance.normal(size=(64, 8, WIDTH)).astype(np.float32)
        np.savez(folder / "rows.npz", x=rows * (5 if other else 1))

    def run(self, folder: Path) -> str:
        made = quantize_model(
            folder / "artifact", folder / "rows.npz", min_cosine=0.1, capability=("none",), rows=64
        )
        return made.content_sha256()


class Build(Optimize):
    name = "build"

    def write(self, folder: Path, *, other: bool) -> None:
        super().write(folder, other=other)
        if other:  # plans of one graph differ; another number of nodes tells two graphs apart
            model = onnx.load(folder / "model.onnx")
            model.graph.node[0].output[0] = "product"
            model.graph.node.append(helper.make_node("Softmax", ["product"], ["logits"]))
            onnx.save(model, folder / "model.onnx")
            record_again(folder)

    def run(self, folder: Path) -> str:
        made = build_engine(folder, profile=["batch=1:4:8"], capability="8.9")
        (path,) = engine_directories(made.path)
        record = Engine.open(path).record
        return f"{made.content_sha256()} {sorted(record.layers.items())}"


class Validate(Export):
    name = "validate"

    def write(self, folder: Path, *, other: bool) -> None:
        super().write(folder / "model", other=other)
        artifact = export_model(str(folder / "model"), task="text-classification")
        artifact.copy_to(folder / "artifact")

    def run(self, folder: Path) -> str:
        try:
            return str(validate_model(folder / "artifact").passed)
        finally:
            torch_reference._end_all_workers()

    def check(self, folder: Path) -> None:
        with suppress(EngineryError):
            verdict = Artifact.open(folder / "artifact").manifest.verdict("validate")
            assert verdict is None or verdict.passed  # both artifacts are right


class Predict(Stage):
    name = "predict"

    def __init__(self, classifier: Path) -> None:
        self.model = classifier

    def write(self, folder: Path, *, other: bool) -> None:
        shutil.copytree(self.model, folder / "model")
        write_table(folder / "in.csv", "boat" if other else "pump")
        if other:
            scale(folder / "model" / "model.onnx")
            record_again(folder / "model")

    def run(self, folder: Path) -> str:
        output = folder.parent / "made" / "out.jsonl"
        artifact = Artifact.open(folder / "model")
        try:
            predict(artifact, str(folder / "in.csv"), output, CONFIG)
        except EngineryError as error:
            if "made from something else" not in error.message:
                raise
            predict(artifact, str(folder / "in.csv"), output, CONFIG, force=True)
        return sha256(output)


def scale(path: Path, factor: float = 3) -> None:
    """Multiply the weights of a graph."""
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            values = numpy_helper.to_array(tensor) * np.float32(factor)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    onnx.save(model, path)


def record_again(folder: Path) -> None:
    """Let the manifest record the changed files, as another artifact's does."""
    recorded = Manifest.from_bytes((folder / "manifest.json").read_bytes())
    (folder / "manifest.json").unlink()
    commit_artifact(folder, recorded)


def files_of(folder: Path) -> list[Path]:
    return [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]


def differing(folder: Path, other: Path) -> list[Path]:
    return [
        name
        for name in files_of(other)
        if (folder / name).read_bytes() != (other / name).read_bytes()
    ]


def replace_files(folder: Path, other: Path, hold: Callable[[], None]) -> None:
    """Rename other files over these, as editors and downloads do; in the end nothing is back."""
    for name in differing(folder, other):
        shutil.copy2(other / name, folder / ".new")
        (folder / ".new").replace(folder / name)


def replace_files_for_a_while(folder: Path, other: Path, hold: Callable[[], None]) -> None:
    """Rename other files over these, and put the same files back."""
    names = differing(folder, other)
    for index, name in enumerate(names):
        shutil.copy2(other / name, folder / f".new{index}")
        (folder / name).rename(folder / f".old{index}")
        (folder / f".new{index}").replace(folder / name)
    hold()
    for index, name in enumerate(names):
        (folder / f".old{index}").replace(folder / name)


def write_in_place(folder: Path, other: Path, hold: Callable[[], None]) -> None:
    """Write the other bytes into these files."""
    for name in differing(folder, other):
        (folder / name).write_bytes((other / name).read_bytes())


def write_in_place_for_a_while(folder: Path, other: Path, hold: Callable[[], None]) -> None:
    """Write the other bytes, then these again, with the time that they had."""
    before = {
        name: ((folder / name).read_bytes(), (folder / name).stat())
        for name in differing(folder, other)
    }
    write_in_place(folder, other, hold)
    hold()
    for name, (content, stat) in before.items():
        (folder / name).write_bytes(content)
        os.utime(folder / name, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def exchange_folders_for_a_while(folder: Path, other: Path, hold: Callable[[], None]) -> None:
    """Exchange the folder by another one, and put it back."""
    folder.rename(folder.with_name("aside"))
    other.rename(folder)
    hold()
    folder.rename(other)
    folder.with_name("aside").rename(folder)


CHANGES = [
    replace_files,
    replace_files_for_a_while,
    write_in_place,
    write_in_place_for_a_while,
    exchange_folders_for_a_while,
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [ExportFile, Export, Optimize, Quantize, Build, Validate, Predict], ids=lambda k: k.name
)
def test_inputs_are_replaced_at_random_times(tmp_path, home, classifier, kind):
    stage = kind(classifier) if kind in (Export, Validate, Predict) else kind()
    chance, ends = random.Random(SEED), Counter()
    kept = {False: tmp_path / "kept" / "good", True: tmp_path / "kept" / "other"}
    folder = tmp_path / "work" / "input"
    right, seconds = {}, 1.0
    for is_other, copy in kept.items():
        copy.mkdir(parents=True)
        stage.write(copy, other=is_other)
    for is_other in (True, False):
        fresh(folder, kept[is_other], home)
        started = time.monotonic()
        right[is_other] = stage.run(folder)
        seconds = time.monotonic() - started
    assert kind is Validate or right[True] != right[False]
    for number in rounds(40):
        fresh(folder, kept[False], home)
        other = folder.with_name("other")
        shutil.copytree(kept[True], other)
        change, delay = CHANGES[number % len(CHANGES)], chance.uniform(0, seconds * 1.1)
        held = chance.uniform(0, seconds)

        def strike(change=change, delay=delay, held=held, other=other):
            time.sleep(delay)
            change(folder, other, lambda: time.sleep(held))

        thread = threading.Thread(target=strike)
        thread.start()
        try:
            stage.run(folder)
            ends["status 0"] += 1
        except EngineryError as error:
            ends["said" if "while it was read" in str(error) else "other errors"] += 1
        finally:
            thread.join()
        stage.check(folder)
        # What is stored under the key of each content is what that content gives.
        for is_other in (False, True):
            write_again(folder, kept[is_other])
            assert stage.run(folder) == right[is_other], f"round {number}: {change.__name__}"
    print(f"\n{stage.name}: {len(rounds(40))} replacements, {dict(ends)}, 0 wrong entries")  # noqa: T201


def fresh(folder: Path, kept: Path, home: Path) -> None:
    """Write the inputs, with an empty store and no output."""
    shutil.rmtree(home, ignore_errors=True)
    shutil.rmtree(folder.parent, ignore_errors=True)
    shutil.copytree(kept, folder)


def write_again(folder: Path, kept: Path) -> None:
    """Write the inputs anew; the store and the parts of an output stay."""
    shutil.rmtree(folder)
    shutil.copytree(kept, folder)


# Journals.


def flip(lines: list[bytes], chance: random.Random) -> bytes:
    content = bytearray(b"".join(lines))
    content[chance.randrange(len(content))] ^= chance.randrange(1, 256)
    return bytes(content)


def digit(lines: list[bytes], chance: random.Random) -> bytes:
    content = bytearray(b"".join(lines))
    places = [index for index, byte in enumerate(content) if chr(byte).isdigit()]
    content[chance.choice(places)] = ord(chance.choice("0123456789"))
    return bytes(content)


def cut(lines: list[bytes], chance: random.Random) -> bytes:
    content = b"".join(lines)
    return content[: chance.randrange(len(content))]


def drop(lines: list[bytes], chance: random.Random) -> bytes:
    gone = chance.randrange(len(lines))
    return b"".join(lines[:gone] + lines[gone + 1 :])


def repeat(lines: list[bytes], chance: random.Random) -> bytes:
    index = chance.randrange(len(lines))
    return b"".join(lines[: index + 1] + lines[index:])


def shuffle(lines: list[bytes], chance: random.Random) -> bytes:
    return b"".join(chance.sample(lines, len(lines)))


def insert(lines: list[bytes], chance: random.Random) -> bytes:
    content = b"".join(lines)
    place = chance.randrange(len(content) + 1)
    added = [b"\n", b"{}\n", b"\xff\x00", b'{"whole": true}\n', b"[" * 9000 + b"\n", b"null\n"]
    return content[:place] + chance.choice(added) + content[place:]


def append(lines: list[bytes], chance: random.Random) -> bytes:
    added = [b'{"whole": true, "digest": "0123456789abcdef"}\n', lines[-1], b'{"part": 9}\n', b"x"]
    return b"".join(lines) + chance.choice(added)


JOURNAL_CHANGES = [flip, digit, cut, drop, repeat, shuffle, insert, append]


@pytest.fixture
def interrupted(tmp_path, classifier, monkeypatch):
    """Return a function that writes the parts of an interrupted run, and the right output."""
    table = write_table(tmp_path / "in.csv", "pump", 96)
    artifact = Artifact.open(classifier)
    output = tmp_path / "made" / "out.csv"
    predict(artifact, str(table), tmp_path / "right.csv", CONFIG)
    write = Journal._write_part

    def ending(journal, number, *others):
        if number == 4:
            raise KeyboardInterrupt
        return write(journal, number, *others)

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(Journal, "_write_part", ending)
        predict(artifact, str(table), output, CONFIG)
    shutil.copytree(output.parent, tmp_path / "template")

    def prepare():
        shutil.rmtree(output.parent)
        shutil.copytree(tmp_path / "template", output.parent)
        return output

    prepare.resume = lambda: predict(artifact, str(table), output, CONFIG)
    prepare.right = (tmp_path / "right.csv").read_bytes()
    return prepare


def change_journals(interrupted, count: int, seed: int) -> Counter[int]:
    """Change a journal in many ways, and resume; return how often how many rows were kept."""
    chance, resumed = random.Random(seed), Counter()
    for number in range(count):
        output = interrupted()
        journal = parts_directory(output) / "journal.jsonl"
        change = JOURNAL_CHANGES[number % len(JOURNAL_CHANGES)]
        journal.write_bytes(change(journal.read_bytes().splitlines(keepends=True), chance))
        report = interrupted.resume()
        resumed[report.resumed_rows] += 1
        assert output.read_bytes() == interrupted.right, f"{number}: {change.__name__}"
        assert report.counts.rows == 96
        assert not parts_directory(output).exists()
    return resumed


def test_eight_changes_of_a_journal(interrupted):
    assert sum(change_journals(interrupted, 8, SEED).values()) == 8


@pytest.mark.slow
def test_changes_of_journals(interrupted):
    count = len(rounds(500))
    resumed = change_journals(interrupted, count, SEED)
    print(f"\n{count} changes of journals, 0 wrong; rows resumed {dict(resumed)}")  # noqa: T201

"""Small files whose graphs need gigabytes or hours end within a limit of memory and of time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from enginery import export_model
from enginery.core import subprocess as children
from enginery.core.artifact.artifact import commit_artifact
from enginery.core.errors import ExportError, SourceError
from enginery.core.trust.resource_limits import MEMORY_VARIABLE, TIME_VARIABLE
from tests.growing_graphs import growing_graphs

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads memory from /proc")

GRAPHS = dict(growing_graphs())
ROOT = Path(__file__).parents[2]
MOST_BYTES = 2 * 10**9


@pytest.fixture(autouse=True)
def own_processes(monkeypatch):
    """Start every child anew: the limits do not see a process that was forked elsewhere."""
    monkeypatch.setattr(
        children,
        "python_command",
        lambda module, *arguments: [sys.executable, "-P", "-m", module, *arguments],
    )


def saved(folder, name):
    path = folder / f"{name}.onnx"
    path.write_bytes(GRAPHS[name])
    return path


@pytest.mark.more
def test_graph_that_grows_is_refused_with_limit_and_option(tmp_path, monkeypatch):
    monkeypatch.setenv(MEMORY_VARIABLE, "0.25")
    with pytest.raises(ExportError, match=rf"more than 0\.25 GiB of memory.*{MEMORY_VARIABLE}"):
        export_model(str(saved(tmp_path, "concat-1d-27")), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.more
@pytest.mark.parametrize("key", ["num_labels", "num_hidden_layers"])
def test_config_that_asks_for_a_billion_is_refused_with_limit_and_option(
    tiny_model, tmp_path, monkeypatch, key
):
    monkeypatch.setenv(MEMORY_VARIABLE, "1.25")
    model = tmp_path / "model"
    shutil.copytree(tiny_model("bert", "text-classification"), model)
    config = json.loads((model / "config.json").read_text())
    config.pop("id2label")
    (model / "config.json").write_text(json.dumps({**config, key: 10**9}))
    with pytest.raises(ExportError, match=rf"more than 1\.25 GiB of memory.*{MEMORY_VARIABLE}"):
        export_model(str(model), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.more
def test_graph_that_runs_for_ever_is_refused_with_limit_and_option(tmp_path, monkeypatch):
    monkeypatch.setenv(TIME_VARIABLE, "4")
    with pytest.raises(ExportError, match=rf"longer than 4 seconds.*{TIME_VARIABLE}"):
        export_model(str(saved(tmp_path, "loop-of-2^62-steps")), out=tmp_path / "out")


def test_functions_are_refused_before_a_child_expands_them(tmp_path):
    with pytest.raises(SourceError, match="its functions expand to"):
        export_model(str(saved(tmp_path, "functions-30")), out=tmp_path / "out")


def measured(words, scratch):
    """Run a command; return its status, errors, seconds, and peak memory with its children."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "ENGINERY_HOME": str(scratch / "home"),
        "OMP_NUM_THREADS": "1",
    }
    begun, peak, ended = time.monotonic(), 0, threading.Event()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "enginery", *map(str, words)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )

    def watch():
        nonlocal peak
        whole = psutil.Process(process.pid)
        while not ended.wait(0.02):
            total = 0
            try:
                for one in (whole, *whole.children(recursive=True)):
                    memory = one.memory_info()
                    total += memory.rss - memory.shared
            except psutil.Error:
                continue
            peak = max(peak, total)

    watcher = threading.Thread(target=watch)
    watcher.start()
    _, err = process.communicate(timeout=600)
    ended.set()
    watcher.join()
    return process.returncode, err, time.monotonic() - begun, peak


def unchecked_artifact(folder, path):
    """Return an artifact of a graph as its author would make it: no export has seen the graph."""
    from enginery.core.artifact.manifest import GraphRecord, Manifest, SourceRecord
    from enginery.core.trust.onnx_structure import read_structure

    inputs, outputs = read_structure(path).interface()
    folder.mkdir()
    (folder / "model.onnx").write_bytes(path.read_bytes())
    record = GraphRecord(file="model.onnx", opset=17, inputs=inputs, outputs=outputs, data_files=())
    source = SourceRecord(
        kind="onnx", id=str(path), revision="", sha256="0" * 64, files={path.name: "0" * 64}
    )
    commit_artifact(
        folder,
        Manifest(
            source=source,
            task="unknown",
            model_type="unknown",
            library="onnx",
            precision="fp32",
            target="onnx",
            graphs=(record,),
            stages=(),
            files={},
        ),
    )
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAPHS)
def test_export_stays_within_two_gigabytes_and_a_minute(tmp_path, name):
    """`pytest -m slow -s` prints the figures."""
    status, err, seconds, peak = measured(
        ["export", saved(tmp_path, name), tmp_path / "out"], tmp_path
    )
    last = err.strip().splitlines()[-1][:160]
    print(f"\n{name}: status {status}, {seconds:.1f} s, {peak / 1e6:.0f} MB: {last}")  # noqa: T201
    assert "Traceback" not in err
    assert peak < MOST_BYTES
    assert status in (0, 2), err
    if status == 2:
        assert "error: " in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("lint", "functions-34"),
        ("lint", "concat-1d-34"),
        ("inspect", "concat-1d-34"),
        ("inspect", "loop-of-2^62-steps"),
        ("bench", "concat-1d-34"),
    ],
)
def test_commands_that_load_the_graph_themselves_do_too(tmp_path, command, name):
    path = saved(tmp_path, name)
    target = unchecked_artifact(tmp_path / "a", path) if command == "inspect" else path
    more = ["--placement"] if command == "inspect" else []
    status, err, seconds, peak = measured([command, target, *more], tmp_path)
    figures = f"status {status}, {seconds:.1f} s, {peak / 1e6:.0f} MB"
    print(f"\n{command} {name}: {figures}: {err.strip()[-200:]}")  # noqa: T201
    assert "Traceback" not in err
    assert peak < MOST_BYTES
    # lint runs no graph, so one that grows only when it runs has no findings.
    assert status in ((0, 2) if command == "lint" else (1, 2)), err

"""Environments without some extras: every command and function names the extra that it lacks."""

import json
import os
import re
import shutil
import subprocess
import sys
import wave

import pytest

import enginery
from enginery import api
from enginery.cli import COMMANDS
from tests import every_call
from tests.environments import ROOT, linked_environment

WORKS = ""
UNREACHABLE = "http://127.0.0.1:9"

BARE = {
    "enginery export": "gpu,export",
    "enginery optimize": "gpu,export",
    "enginery quantize": "gpu,export,tensorrt-rtx",
    "enginery build": "export,tensorrt-rtx",
    "enginery init": WORKS,
    "enginery run": "gpu,export",
    "enginery validate": "gpu,export",
    "enginery lint": "export",
    "enginery inspect": "gpu",
    "enginery doctor": WORKS,
    "enginery bench": "gpu",
    "enginery report": WORKS,
    "enginery predict": "gpu,data",
    "enginery serve": "gpu,serve",
    "enginery try": "gpu",
    "enginery publish": UNREACHABLE,
    "enginery pull": UNREACHABLE,
    "enginery export-triton": WORKS,
    "enginery export-kserve": WORKS,
    "enginery store": WORKS,
    "Artifact": WORKS,
    "EngineryError": WORKS,
    "OrtRunner": "gpu",
    "Recipe": WORKS,
    "RunnerOptions": WORKS,
    "__version__": WORKS,
    "bench_model": "gpu",
    "build_engine": "export,tensorrt-rtx",
    "export_kserve": WORKS,
    "export_model": "gpu,export",
    "export_triton": WORKS,
    "length_buckets": "data",
    "lint_model": "export",
    "load_model": "gpu",
    "load_model, audio": "gpu",
    "load_model, texts": "gpu,generate",
    "optimize_model": "gpu,export",
    "predict_file": "gpu,data",
    "publish_model": UNREACHABLE,
    "pull_model": UNREACHABLE,
    "quantize_model": "gpu,export,tensorrt-rtx",
    "run_recipe": "gpu,export",
    "validate_model": "gpu,export",
    "write_report": WORKS,
}
"""What is missing in the bare install; or the address that nothing answers at."""

SERVE = {
    **{name: extras.removeprefix("gpu,") for name, extras in BARE.items()},
    "enginery inspect": WORKS,
    "enginery bench": "torch is not installed (pip install 'enginery[export]')",
    "enginery try": WORKS,
    "enginery serve": "option 'host' is 'nowhere.invalid'",
    "OrtRunner": WORKS,
    "bench_model": "torch is not installed (pip install 'enginery[export]')",
    "load_model": WORKS,
    "load_model, audio": "audio",
}
"""What is missing with an ONNX Runtime and the extra `serve`."""


@pytest.fixture
def folder(tmp_path):
    """Where the calls write; with the files that they read."""
    folder = tmp_path / "calls"
    folder.mkdir()
    (folder / "rows.csv").write_text("text\nThe engine is warm.\n")
    with wave.open(str(folder / "sound.wav"), "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(bytes(16000))
    return folder


@pytest.fixture
def artifacts(exported):
    """Artifacts of three tasks, on which the calls work: name -> directory."""
    kinds = {
        "vectors": ("bert", "feature-extraction"),
        "texts": ("gpt2", "text-generation-with-past"),
        "audio": ("wav2vec2", "audio-classification"),
    }
    return {name: exported(*kind).path for name, kind in kinds.items()}


def environment_of(folder):
    """Return the variables of the calls: nothing of this process, and no Hub."""
    removed = ("PYTHONPATH", "ENGINERY_PROVIDERS", "HF_HUB_OFFLINE", "HF_TOKEN")
    kept = {name: value for name, value in os.environ.items() if name not in removed}
    own = {"HF_ENDPOINT": UNREACHABLE, "HF_HOME": str(folder / "hub"), "COLUMNS": "1000"}
    return {**kept, **own, "ENGINERY_HOME": str(folder / "home")}


def answers_of(python, artifacts, folder):
    """Return name -> (status, what was printed) of every call in an environment."""
    others = [f"{name}={path}" for name, path in artifacts.items() if name != "vectors"]
    script = ROOT / "tests" / "every_call.py"
    done = subprocess.run(
        [str(python), "-P", str(script), str(artifacts["vectors"]), str(folder), *others],
        env=environment_of(folder),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check(answers, expected):
    """Check that every call works, or that its only problem is the expected one."""
    assert set(answers) == set(expected)
    wrong = {}
    for name, (status, printed) in answers.items():
        wanted = expected[name]
        extras = re.findall(r"'enginery\[([\w,-]*)\]'", printed)
        if wanted == WORKS:
            fits = status == 0
        elif re.fullmatch(r"[a-z,-]+", wanted):
            names = {wanted, re.sub("^gpu", "cpu", wanted)}
            fits = status == 2 and set(extras) == names and "which " in printed
        else:
            fits = status == 2 and wanted in printed
        if not fits or "Traceback" in printed or "Error:" in printed:
            wrong[name] = (wanted, status, printed)
    assert wrong == {}


def test_every_command_and_function_is_called():
    public = {
        name
        for name, value in vars(api).items()
        if callable(value) and value.__module__ == api.__name__ and not name.startswith("_")
    }
    names = set(BARE)
    assert names >= {f"enginery {name}" for name in COMMANDS}
    assert names >= public - {"RunResult"} | set(enginery.__all__)
    assert set(every_call.command_lines("artifact", ".")) == set(COMMANDS)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        pytest.param("enginery", BARE, id="bare"),
        pytest.param("enginery[gpu,serve]", SERVE, id="serve", marks=pytest.mark.slow),
    ],
)
@pytest.mark.more
def test_missing_extra_is_named_by_every_command_and_function(
    wanted, expected, artifacts, folder, tmp_path
):
    python = linked_environment(tmp_path / "environment", wanted)
    check(answers_of(python, artifacts, folder), expected)


@pytest.mark.slow
@pytest.mark.parametrize("hub", ["huggingface-hub>=0.36,<1", "huggingface-hub>=2,<3"])
@pytest.mark.parametrize(
    ("extras", "expected"), [("", BARE), ("[cpu,serve]", SERVE)], ids=["bare", "cpu,serve"]
)
def test_environment_that_pip_makes_without_constraints(
    wheel, hub, extras, expected, artifacts, folder, tmp_path
):
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "environment")], check=True)
    programs = tmp_path / "environment" / "bin"
    install = [programs / "python", "-m", "pip", "install", "--quiet", f"{wheel}{extras}", hub]
    subprocess.run(install, check=True)
    check(answers_of(programs / "python", artifacts, folder), expected)

    again = tmp_path / "again"
    again.mkdir()
    shutil.copy(folder / "rows.csv", again)
    commands = every_call.command_lines(artifacts["vectors"], again)
    answers = {}
    for name, words in commands.items():  # each in a process of its own, as users run it
        done = subprocess.run(
            [programs / "enginery", *words],
            env=environment_of(folder),
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        answers[f"enginery {name}"] = (done.returncode, done.stdout + done.stderr)
    check(answers, {name: expected[name] for name in answers})

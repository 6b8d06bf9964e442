"""The installation on a machine without a GPU: what it has, what it lacks, what it says."""

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from enginery import load_model
from enginery.runtime.providers.availability import reinstall

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

EMBED = """
import json, sys
from enginery import load_model
with load_model(sys.argv[1]) as model:
    print(json.dumps(model.embed(["The engine is warm."]).tolist()))
"""


def test_onnxruntime_is_chosen_by_an_extra():
    extras = PROJECT["optional-dependencies"]
    assert not any("onnxruntime" in each for each in PROJECT["dependencies"])
    assert any(each.startswith("onnxruntime-gpu") for each in extras["gpu"])
    assert [each.split(">")[0] for each in extras["cpu"]] == ["onnxruntime"]
    assert [each.split(">")[0] for each in extras["openvino"]] == ["onnxruntime-openvino"]
    for name in ("all", "dev"):
        assert "gpu" in extras[name][0].partition("[")[2]
        assert "cpu" not in extras[name][0]
        assert "openvino" not in extras[name][0]


@pytest.mark.parametrize("extra", ["gpu", "openvino"])
def test_error_messages_name_the_version_of_onnxruntime_that_the_extra_has(extra):
    bound = PROJECT["optional-dependencies"][extra][0].partition(";")[0]
    assert f"pip install '{bound}'" in reinstall(f"onnxruntime-{extra}")


def install(interpreter, wheel, folder):
    """Install `enginery[cpu,serve]` into an environment of an interpreter; return its Python."""
    subprocess.run([interpreter, "-m", "venv", str(folder)], check=True)
    python = folder / "bin/python"
    command = [python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
    subprocess.run([*command, f"{wheel}[cpu,serve]"], check=True)
    return python


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    return install(sys.executable, wheel, tmp_path_factory.mktemp("install"))


def find_interpreter(version):
    """Return the path of a Python of another version; skip the test if there is none."""
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        pytest.skip("the tests run on this version")
    named = shutil.which(f"python{version}")
    for path in (*Path.home().glob(f".pyenv/versions/{version}.*/bin/python"), named):
        # pyenv has a command for every version that it knows, and some of them start nothing.
        if path and run(path, "-m", "venv", "-h").returncode == 0:
            return path
    return pytest.skip(f"there is no Python {version}")


def run(python, *words):
    command = [str(python), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")


@pytest.mark.parametrize(
    "version",
    [
        pytest.param("3.12", marks=pytest.mark.slow),
        pytest.param("3.13", marks=pytest.mark.more),
        pytest.param("3.14", marks=pytest.mark.more),
    ],
)
def test_other_versions_of_python_run_artifacts(version, wheel, exported, tmp_path):
    artifact = exported("bert", "feature-extraction")
    python = install(find_interpreter(version), wheel, tmp_path / "environment")
    answered = run(python, "-W", "error::SyntaxWarning", "-c", EMBED, artifact.path)
    assert answered.returncode == 0, answered.stderr
    with load_model(artifact) as model:
        expected = model.embed(["The engine is warm."])
    np.testing.assert_allclose(json.loads(answered.stdout), expected, atol=1e-5)
    for words in (["inspect", artifact.path], ["doctor", "--json"], ["serve", "--help"]):
        ended = run(python, "-m", "enginery", *words)
        assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_cpu_install_runs_artifacts_and_names_what_it_lacks(python, exported, tmp_path):
    artifact = exported("bert", "feature-extraction")
    listed = json.loads(run(python, "-m", "pip", "list", "--format", "json").stdout)
    names = {each["name"].lower() for each in listed}
    assert "onnxruntime" in names
    lacking = {"onnxruntime-gpu", "pyarrow", "torch", "transformers", "optimum", "onnx"}
    assert not names & lacking
    answered = run(python, "-c", EMBED, artifact.path)
    assert answered.returncode == 0, answered.stderr
    with load_model(artifact) as model:
        expected = model.embed(["The engine is warm."])
    np.testing.assert_allclose(json.loads(answered.stdout), expected, atol=1e-5)

    texts = tmp_path / "texts.txt"
    texts.write_text("The engine is warm.\n")
    predict = ("-m", "enginery", "predict", artifact.path, "-i", texts, "-o", tmp_path / "a.csv")
    refused = run(python, *predict)
    assert refused.returncode == 2
    assert "needs the package 'pyarrow'" in refused.stderr
    assert "pip install 'enginery[data]'" in " ".join(refused.stderr.split())

    assert run(python, "-m", "pip", "uninstall", "-y", "onnxruntime").returncode == 0
    refused = run(python, *predict[:2], "serve", artifact.path, "--port", 0)
    assert refused.returncode == 2
    said = " ".join(refused.stderr.split())
    assert "needs the package 'onnxruntime', which is not installed" in said
    assert "pip install 'enginery[gpu]', or 'enginery[cpu]'" in said

"""Another environment is described by its own interpreter, or refused in one sentence."""

import json
import subprocess
import sys

import pytest

from enginery.core.errors import MissingPackageError, OptionError
from enginery.core.python_environment import OWN_ENVIRONMENT, VARIABLE, PythonEnvironment
from enginery.core.subprocess import interpreter_command
from enginery.core.versions import OPTIMUM, TRANSFORMERS5
from tests.environments import linked_environment


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """The interpreter of an environment without PyTorch."""
    return linked_environment(tmp_path_factory.mktemp("bare") / "environment", "enginery")


def script(folder, *lines):
    path = folder / "python"
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return str(path)


def install(python, name, version):
    """Write the metadata of a package."""
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    directory = site / f"{name.replace('-', '_')}-{version}.dist-info"
    directory.mkdir()
    directory.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    )


def test_nothing_named_is_this_environment(monkeypatch):
    assert PythonEnvironment.find() == OWN_ENVIRONMENT
    assert PythonEnvironment.find(sys.executable).is_own
    monkeypatch.setenv(VARIABLE, sys.executable)
    assert PythonEnvironment.find().is_own


def test_packages_are_those_of_the_interpreter(bare, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    environment = PythonEnvironment.find(str(bare))
    assert environment.python == str(bare)
    assert environment.version == ".".join(map(str, sys.version_info[:3]))
    assert environment.version_of("numpy") == OWN_ENVIRONMENT.version_of("numpy")
    assert environment.versions(["torch", "huggingface_hub"]) == {
        "torch": "none",
        "huggingface_hub": OWN_ENVIRONMENT.version_of("huggingface_hub"),
    }
    assert environment.family == ""


def test_option_is_taken_before_the_variable(bare, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nothing"))
    assert PythonEnvironment.find(str(bare)).python == str(bare)
    with pytest.raises(OptionError, match=rf"{VARIABLE} is .*nothing, which does not exist"):
        PythonEnvironment.find()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["echo 3.9.2"], r"which is Python 3\.9\.2, expected 3\.11 or newer"),
        (["echo hello"], "which does not run as Python: hello"),
        (["exit 3"], "which does not run as Python: it ended with status 3"),
        (["echo out of order >&2", "exit 1"], "which does not run as Python: out of order"),
    ],
)
def test_other_programs_are_refused(tmp_path, lines, message):
    with pytest.raises(OptionError, match=message) as raised:
        PythonEnvironment.find(script(tmp_path, *lines))
    assert raised.value.option == "python"


def test_environment_without_any_package_is_described(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "empty"], check=True)
    environment = PythonEnvironment.find(str(tmp_path / "empty" / "bin" / "python"))
    assert (environment.packages, environment.runtimes) == ({}, {})
    with pytest.raises(MissingPackageError, match="'torch', 'pydantic', 'psutil', "):
        environment.require("Exporting a model", ["torch"])


def test_a_folder_is_no_interpreter(tmp_path):
    with pytest.raises(OptionError, match=r"which is a folder\. Name the interpreter"):
        PythonEnvironment.find(str(tmp_path))


def test_missing_packages_are_named_with_the_environment(bare):
    environment = PythonEnvironment.find(str(bare))
    with pytest.raises(
        MissingPackageError,
        match=r"needs the packages 'torch' and 'onnxruntime', which are not installed in the "
        r"environment of \S+python\. .*python -m pip install 'enginery\[cpu,export\]'",
    ):
        environment.require("Exporting a model", ["torch", "onnxruntime"])


def test_packages_that_are_installed_meanwhile_are_seen(tmp_path):
    python = linked_environment(tmp_path / "environment", "enginery")
    assert PythonEnvironment.find(str(python)).family == ""
    install(python, "transformers", "4.40.0")
    install(python, "optimum-onnx", "0.1.0")
    environment = PythonEnvironment.find(str(python))
    assert environment.family == OPTIMUM
    with pytest.raises(MissingPackageError, match=r"transformers>=4\.57, found 4\.40\.0 in the"):
        environment.require("Validating a model", ["transformers"])


def test_family_is_that_of_the_other_environment(tmp_path):
    python = linked_environment(tmp_path / "environment", "enginery")
    install(python, "transformers", "5.24.0")
    environment = PythonEnvironment.find(str(python))
    assert environment.family == TRANSFORMERS5
    assert "transformers 5.24.0" in environment.describe()
    with pytest.raises(MissingPackageError, match=r"'enginery\[cpu,transformers5\]'"):
        environment.require("Exporting a model", ["torch"])


def test_child_has_enginery_from_here_and_nothing_else(bare):
    (site,) = bare.parents[1].glob("lib/python*/site-packages")
    (site / "enginery").unlink()
    environment = PythonEnvironment.find(str(bare))
    assert environment.version_of("numpy")
    command = interpreter_command(str(bare), "enginery.core.environment_probe")
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(answer.stdout)["packages"] == dict(environment.packages)

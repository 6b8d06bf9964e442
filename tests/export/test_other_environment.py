"""Export and the PyTorch reference run in the environment that `--python` names."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig

import pytest

from enginery import export_model, validate_model
from enginery.core.errors import MissingPackageError, OptionError
from enginery.core.python_environment import VARIABLE
from enginery.core.versions import installed_version
from tests.environments import linked_environment, needs_optimum

TRANSFORMERS5 = os.environ.get("TRANSFORMERS5_PYTHON", "")


@pytest.fixture
def other(tmp_path):
    """An environment with the packages of this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "other"], check=True)
    (site,) = tmp_path.glob("other/lib/python*/site-packages")
    # A path of a .pth file, whose own .pth files do not count: that of an editable enginery.
    (site / "packages.pth").write_text(sysconfig.get_path("purelib"))
    return str(tmp_path / "other" / "bin" / "python")


def other_notes(notes):
    return [note for note in notes if "in another environment" in note]


def test_model_is_exported_and_proved_in_another_environment(
    tiny_model, other, monkeypatch, tmp_path
):
    # A model of its own, which no other test has put into the store.
    source = shutil.copytree(tiny_model("bert", "text-classification"), tmp_path / "model")
    settings = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**settings, "note": "of this test"}))
    artifact = export_model(str(source), python=other)
    (stage,) = artifact.manifest.stages
    (note,) = other_notes(stage.notes)
    assert f"transformers {installed_version('transformers')}" in note
    assert stage.options["python"] == other
    # The same packages make the same graph, wherever they are.
    assert export_model(str(source)).path == artifact.path
    monkeypatch.setenv(VARIABLE, other)
    report = validate_model(artifact, effort="quick")
    assert report.passed, report.summary
    assert report.tools["torch"] == installed_version("torch")
    assert len(other_notes(report.notes)) == 1


def test_environment_that_cannot_export_is_refused_before_anything_runs(tiny_model, tmp_path):
    source = str(tiny_model("bert", "text-classification"))
    bare = str(linked_environment(tmp_path / "bare", "enginery"))
    with pytest.raises(MissingPackageError, match=rf"'torch'.* in the environment of {bare}"):
        export_model(source, python=bare)
    with pytest.raises(OptionError, match="which does not exist"):
        export_model(source, python=str(tmp_path / "nothing"))
    artifact = export_model(source)
    with pytest.raises(MissingPackageError, match=rf"'torch'.* in the environment of {bare}"):
        validate_model(artifact, python=bare)


@pytest.mark.slow
@needs_optimum
@pytest.mark.skipif(not TRANSFORMERS5, reason="TRANSFORMERS5_PYTHON names no environment")
def test_graphs_of_one_family_are_proved_against_the_other(tiny_model):
    source = str(tiny_model("bert", "text-classification"))
    older = export_model(source)
    newer = export_model(source, python=TRANSFORMERS5)
    exporters = [a.manifest.stages[0].options["exporter"] for a in (older, newer)]
    assert exporters == ["optimum", "transformers"]
    for artifact, python in ((older, TRANSFORMERS5), (newer, "")):
        report = validate_model(artifact, effort="quick", python=python)
        assert report.passed, report.summary
        (reason,) = report.side_files.not_compared
        assert "makes another state of it" in reason

"""Names for the examples in docstrings: `artifact`, `tmp_path`, `np` and `Path`."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Each worker has a core to itself: more threads would wait for one another.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser):
    parser.addoption(
        "--prefork", action="store_true", help="fork the children that import PyTorch; see tests"
    )


collect_ignore = ["enginery/deploy/triton/python_model.py"]  # runs inside Triton alone


@pytest.fixture(scope="session")
def _example_artifact(tmp_path_factory):
    from tests.tiny import tiny_artifact

    return tiny_artifact("bert", "feature-extraction", tmp_path_factory.mktemp("example") / "bert")


@pytest.fixture(autouse=True)
def _example_names(request, doctest_namespace):
    if not isinstance(request.node, pytest.DoctestItem):
        return
    import numpy as np

    monkeypatch = request.getfixturevalue("monkeypatch")
    tmp_path = request.getfixturevalue("tmp_path")
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "home"))
    doctest_namespace.update(np=np, Path=Path, tmp_path=tmp_path)
    if any("artifact" in example.source for example in request.node.dtest.examples):
        doctest_namespace["artifact"] = request.getfixturevalue("_example_artifact")

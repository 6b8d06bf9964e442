"""Give every test of the core its own store."""

import pytest


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch):
    directory = tmp_path_factory.mktemp("store") / "home"
    monkeypatch.setenv("ENGINERY_HOME", str(directory))
    return directory

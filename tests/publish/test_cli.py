"""The commands publish and pull."""

import json

import pytest

from enginery.core.artifact.artifact import Artifact
from tests.core.artifacts import publishable, validated
from tests.terminal import in_pipe


@pytest.fixture
def artifact(tmp_path):
    made = validated(publishable(tmp_path / "artifact"))
    return made.path


@pytest.mark.more
def test_publish_prints_the_address_that_pull_takes(artifact, tmp_path):
    done = in_pipe("publish", artifact, tmp_path / "registry")
    assert (done.status, done.out) == (0, f"{(tmp_path / 'registry/name/1').as_uri()}\n")
    done = in_pipe("pull", done.out.strip(), tmp_path / "out")
    assert done.status == 0
    assert Artifact.open(tmp_path / "out").manifest == Artifact.open(artifact).manifest
    again = in_pipe("publish", artifact, tmp_path / "registry", "--json")
    said = json.loads(again.out)
    assert (said["version"], said["is_new"]) == ("1", False)
    assert "same content" in again.err

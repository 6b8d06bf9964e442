"""Faults of detectors and segmenters that answers to raw images show."""

import json
import shutil

import pytest

from enginery.core.artifact.artifact import Artifact, commit_artifact
from tests import tiny
from tests.tiny_vision import save_vision_model
from tests.validate.test_answers import compared

pytestmark = pytest.mark.more

MODELS = {"detr": "object-detection", "segformer": "semantic-segmentation"}


@pytest.fixture(scope="module", params=MODELS)
def artifact(request, tmp_path_factory):
    task, folder = MODELS[request.param], tmp_path_factory.mktemp(request.param)
    source = save_vision_model(request.param, task, folder / "source")
    return tiny.tiny_artifact("", task, folder / "artifact", source=source)


def swap_labels(config):
    names = config["id2label"]
    ids = sorted(names, key=int)
    config["id2label"] = {key: names[other] for key, other in zip(ids, ids[::-1], strict=True)}


def change_mean(processor):
    processor["image_mean"] = [0.1, 0.2, 0.9]


def test_sound_models_pass(artifact, tmp_path):
    result = compared(artifact, tmp_path / "scratch")
    assert (result.cases, result.notes) == ((), ())
    assert result.answers.compared == result.answers.inputs == 3


@pytest.mark.parametrize(
    ("file", "change"), [("config", swap_labels), ("preprocessor_config", change_mean)]
)
def test_faults_are_noticed(artifact, file, change, tmp_path):
    changed = tmp_path / "changed"
    shutil.copytree(artifact.path, changed)
    path = changed / f"{file}.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    commit_artifact(changed, artifact.manifest)
    result = compared(Artifact.open(changed), tmp_path / "scratch")
    assert result.cases


def test_an_unknown_processor_leaves_the_tensors(artifact, tmp_path):
    changed = tmp_path / "changed"
    shutil.copytree(artifact.path, changed)
    path = changed / "preprocessor_config.json"
    settings = {"image_processor_type": "ViTImageProcessor", "size": {"height": 64, "width": 64}}
    path.write_text(json.dumps(settings))
    commit_artifact(changed, artifact.manifest)
    result = compared(Artifact.open(changed), tmp_path / "scratch")
    assert result.answers.reference == "the model and its processor in transformers"

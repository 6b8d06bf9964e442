"""Tasks on images over HTTP in the forms of Hugging Face's clients, and for a folder of images."""

import base64
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.utils import reset_sessions

from enginery import export_model, load_model, predict_file
from enginery.core.errors import OptionError
from enginery.runtime.tasks.results import to_plain
from enginery.runtime.tasks.segment import Segment
from enginery.serve.config import ServeConfig
from enginery.serve.models.backend import open_task
from tests import tiny
from tests.runtime.tasks.test_zero_shot_images import save_model as save_chooser
from tests.serve.conftest import Running
from tests.tiny_vision import encoded_picture, save_vision_model

PICTURE = encoded_picture((90, 70))


def text(content):
    return base64.b64encode(content).decode()


OTHER = encoded_picture((40, 64))


@pytest.fixture(scope="module")
def detector(tmp_path_factory):
    folder = tmp_path_factory.mktemp("detector")
    source = save_vision_model("detr", "object-detection", folder / "source")
    return tiny.tiny_artifact("", "object-detection", folder / "artifact", source=source)


@pytest.fixture(scope="module")
def segmenter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("segmenter")
    source = save_vision_model("segformer", "semantic-segmentation", folder / "source")
    return tiny.tiny_artifact("", "semantic-segmentation", folder / "artifact", source=source)


@pytest.fixture(scope="module")
def chooser(tiny_model, tmp_path_factory, session_home):
    folder = tmp_path_factory.mktemp("chooser")
    source = save_chooser("CLIPModel", tiny_model("bert", "fill-mask"), folder / "source")
    return export_model(str(source), task="zero-shot-image-classification", out=folder / "artifact")


@pytest.fixture(scope="module")
def running(detector, segmenter, chooser, tiny_paths):
    with Running(
        {
            "clip": chooser.path,
            "cars": detector.path,
            "roads": segmenter.path,
            **tiny_paths("photos"),
        },
        ServeConfig(access_log="off", max_inputs=4),
    ) as server:
        yield server


@pytest.fixture
def client_of(running, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # the server is here
    reset_sessions()
    yield lambda path: InferenceClient(model=f"{running.url}{path}")
    reset_sessions()


@pytest.fixture(scope="module")
def expected(detector):
    with load_model(detector) as model:
        return to_plain(model.detect([PICTURE, OTHER], threshold=0.0))


def post(running, path, content, kind="image/png"):
    path, _, query = path.partition("?")
    return running("POST", path, content, headers={"content-type": kind}, query=query)


def near(detections):
    return [{**item, "score": pytest.approx(item["score"], abs=1e-5)} for item in detections]


def test_a_client_of_hugging_face_gets_objects(client_of, expected):
    client = client_of("/models/cars/object-detection")
    objects = client.object_detection(PICTURE, threshold=0.0)
    assert [json.loads(json.dumps(item)) for item in objects] == near(expected[0])
    assert client.object_detection(PICTURE) == []  # without parameters the image itself is sent


def test_objects_of_one_image_and_of_several(running, expected):
    path = "/object-detection?threshold=0.0"  # the only detector
    assert post(running, path, PICTURE).json == near(expected[0])
    body = {"inputs": [text(PICTURE), text(OTHER)], "parameters": {"threshold": 0.0}}
    answers = running("POST", "/models/cars/object-detection", body).json
    assert answers == [near(item) for item in expected]
    plain = running("POST", "/predict/cars", body).json
    assert plain["outputs"] == answers


def test_objects_over_the_open_inference_protocol(running, expected):
    tensor = {"name": "image", "datatype": "BYTES", "shape": [1], "data": [text(PICTURE)]}
    body = {"inputs": [tensor], "parameters": {"threshold": 0.0}}
    (output,) = running("POST", "/v2/models/cars/infer", body).json["outputs"]
    assert output["name"] == "detections"
    assert [json.loads(item) for item in output["data"]] == [near(expected[0])]


def test_a_client_of_hugging_face_gets_segments(client_of, segmenter, running):
    with load_model(segmenter) as model:
        (expected,) = model.segment([PICTURE])
    client = client_of("/models/roads/image-segmentation")
    for options in ({}, {"threshold": 0.5}):
        segments = client.image_segmentation(PICTURE, **options)
        assert [(item.label, item.score) for item in segments] == [
            (item.label, None) for item in expected
        ]
        for item, wanted in zip(segments, expected, strict=True):
            assert (np.asarray(item.mask) == wanted.pixels * 255).all()
    answer = running("POST", "/predict/roads", {"inputs": text(PICTURE)}).json
    assert answer["outputs"] == to_plain(expected)


def test_a_client_of_hugging_face_chooses_labels(client_of, chooser, running):
    names = ["cat", "two boats"]
    with load_model(chooser) as model:
        (expected,) = model.zero_shot_images([PICTURE], names)
    wanted = [(label.label, pytest.approx(label.score, abs=1e-5)) for label in expected.labels]
    client = client_of("/models/clip/zero-shot-image-classification")
    answer = client.zero_shot_image_classification(PICTURE, candidate_labels=names)
    assert [(item.label, item.score) for item in answer] == wanted
    body = {"inputs": [text(PICTURE)] * 2, "parameters": {"candidate_labels": names}}
    answers = running("POST", "/zero-shot-image-classification", body).json
    assert [[(item["label"], item["score"]) for item in items] for items in answers] == [wanted] * 2


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("cars/object-detection", {"inputs": ["AAAA"] * 5}, 413, "found 5 inputs"),
        ("cars/object-detection", {"inputs": "AAAA"}, 422, "not an image"),
        ("cars/object-detection", {"inputs": []}, 400, "inputs"),
        (
            "cars/object-detection",
            {"inputs": "AAAA", "parameters": {"threshold": 2}},
            422,
            "parameters.threshold: found the number 2, expected a number from 0 to 1",
        ),
        (
            "cars/object-detection",
            {"inputs": "AAAA", "parameters": {"treshold": 1}},
            422,
            "did you mean 'threshold'",
        ),
        (
            "roads/image-segmentation",
            {"inputs": text(PICTURE), "parameters": {"subtask": "panoptic"}},
            422,
            "it is semantic",
        ),
        (
            "roads/image-segmentation",
            {"inputs": text(PICTURE), "parameters": {"subtask": "instance"}},
            422,
            "expected auto or panoptic or semantic",
        ),
        (
            "clip/zero-shot-image-classification",
            {"inputs": text(PICTURE)},
            422,
            "candidate_labels is missing",
        ),
        (
            "clip/zero-shot-image-classification",
            {"inputs": text(PICTURE), "parameters": {"candidate_labels": ["a"] * 5}},
            413,
            "found 5 inputs",
        ),
        ("photos/object-detection", {"inputs": "AAAA"}, 422, "detects objects in images"),
        ("none/object-detection", {"inputs": "AAAA"}, 404, "none"),
    ],
)
def test_bad_requests(running, path, body, status, message):
    answer = running("POST", f"/models/{path}", body)
    assert (answer.status, message in json.dumps(answer.json)) == (status, True), answer.json


def test_labels_of_an_image_in_the_form_of_the_client(running, client_of):
    labels = client_of("/models/photos/image-classification").image_classification(PICTURE)
    plain = post(running, "/predict/photos", PICTURE).json["outputs"]["labels"]
    assert [(item.label, item.score) for item in labels] == [
        (item["label"], pytest.approx(item["score"], abs=1e-6)) for item in plain
    ]


def test_a_folder_becomes_a_table_of_objects(detector, expected, tmp_path):
    from pyarrow import parquet

    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(PICTURE)
    (tmp_path / "images" / "b.png").write_bytes(OTHER)
    (tmp_path / "images" / "c.png").write_bytes(b"no image")
    out = tmp_path / "out.parquet"
    predict_file(detector, str(tmp_path / "images"), out, threshold=0.0)
    rows = parquet.read_table(out).to_pylist()
    assert [near(row["detections"]) for row in rows[:2]] == expected
    assert rows[2]["detections"] is None
    assert "not a complete image" in rows[2]["error"]
    with pytest.raises(OptionError, match=r"threshold: found the number 2, .* from 0 to 1"):
        predict_file(detector, str(tmp_path / "images"), out, threshold=2.0)


def test_a_folder_becomes_a_table_of_masks(segmenter, tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(PICTURE)
    out = tmp_path / "out.jsonl"
    predict_file(segmenter, str(tmp_path / "images"), out)
    (row,) = [json.loads(line) for line in out.read_text().splitlines()]
    segments = [Segment(**item) for item in row["segments"]]
    assert segments[0].pixels.shape == (70, 90)
    with load_model(segmenter) as model:
        assert segments == model.segment([PICTURE])[0]
    with pytest.raises(OptionError, match="subtask is panoptic"):
        predict_file(segmenter, str(tmp_path / "images"), out, subtask="panoptic", force=True)


def test_of_a_processor_without_a_rule_the_server_has_tensors(detector, tmp_path, caplog):
    settings = {"image_processor_type": "ViTImageProcessor", "size": 64}
    shutil.copytree(detector.path, tmp_path / "artifact")
    (tmp_path / "artifact" / "preprocessor_config.json").write_text(json.dumps(settings))
    copied = replace(detector, path=tmp_path / "artifact")
    assert open_task(copied, detector.manifest.graphs[0], ServeConfig()) is None
    assert "not known for ViTImageProcessor" in caplog.text

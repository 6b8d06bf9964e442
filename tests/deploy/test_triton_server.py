"""Exports in a real Triton server: configurations that it loads, and answers of load_model."""

import json
import urllib.request

import numpy as np
import pytest
from tritonclient.http import InferRequestedOutput
from tritonclient.utils import InferenceServerException

from enginery import load_model
from enginery.api import export_triton
from tests.deploy.triton_answers import ASKED, answers, check_answers, close, expected
from tests.deploy.triton_repository import texts
from tests.deploy.triton_server import triton_server
from tests.engine.made import with_engines
from tests.tiny import TEXT_TASKS, tiny_artifact
from tests.tolerances import OUTPUTS, SCORES

pytestmark = pytest.mark.more

MOOD = "text-classification"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with triton_server(tmp_path_factory.mktemp("triton")) as running:
        yield running


@pytest.fixture(scope="module")
def ensemble(server, tmp_path_factory):
    """`ensemble("fill-mask")`: an artifact, which the server has loaded under its task's name."""
    artifacts = {}

    def make(task):
        if task not in artifacts:
            directory = tmp_path_factory.mktemp("artifacts") / task
            artifacts[task] = tiny_artifact("bert", task, directory)
            load(server, artifacts[task], task)
        return artifacts[task]

    return make


@pytest.fixture(scope="module")
def mood(ensemble):
    return ensemble(MOOD)


def load(server, artifact, name, **options):
    """Export an artifact for the CPU, and load it."""
    options = {"provider": "cpu", "tokenizer_instances": 1} | options
    export_triton(artifact, server.repository, name=name, **options)
    server.load(name)


# Texts in, answers out


@pytest.mark.parametrize("task", TEXT_TASKS)
def test_ensemble_has_the_results_of_load_model(server, ensemble, task):
    check_answers(ensemble(task), lambda inputs: server.infer(task, inputs))
    if task == "question-answering":
        assert server.batches(f"{task}-graph")[-1][0] > 3, "a long context is several rows"


def test_pairs_of_texts_are_an_optional_input(server, mood):
    first, second = ASKED[:2], ASKED[1:]
    both = {"text": texts(first), "text_pair": texts(second)}
    results = answers(MOOD, server.infer(MOOD, both))
    with load_model(mood) as model:
        pairs = list(zip(first, second, strict=True))
        assert close(results, expected(MOOD, model, pairs))
        assert not close(results, expected(MOOD, model, first))
    with pytest.raises(InferenceServerException, match=r"in length: text 2, text_pair 1"):
        server.infer(MOOD, {"text": texts(first), "text_pair": texts(second[:1])})


def test_parameters_work_as_in_the_library(server, mood):
    one = {"text": texts(ASKED[:1])}
    outputs = server.infer(MOOD, one, {"top_k": 2, "activation": "none"}, timeout=10**8)
    with load_model(mood) as model:
        (wanted,) = model.classify(ASKED[:1], top_k=2, activation="none")
    assert [text.decode() for text in outputs["label"][0]] == [x.label for x in wanted.labels]
    np.testing.assert_allclose(outputs["score"][0], [x.score for x in wanted.labels], atol=OUTPUTS)
    long = {"text": texts([" ".join(ASKED * 30)])}
    assert server.infer(MOOD, long)["score"].shape == (1, 3)
    with pytest.raises(
        InferenceServerException, match=r"input 0 is too long: expected at most 128"
    ):
        server.infer(MOOD, long, {"truncate": False})


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"top_kk": 1}, "unknown option 'parameters.top_kk'; did you mean 'top_k'?"),
        ({"top_k": "two"}, "parameters.top_k: found the string 'two', expected a whole number"),
        ({"top_k": True}, "parameters.top_k: found true, expected a whole number from 0 to 10000"),
        ({"truncate": 1}, "parameters.truncate: found the number 1, expected true or false"),
    ],
)
def test_invalid_parameter_is_a_client_error(server, mood, parameters, message):
    with pytest.raises(InferenceServerException) as error:
        server.infer(MOOD, {"text": texts(ASKED)}, parameters)
    assert message in error.value.message()
    assert error.value.status() == "400"


def test_invalid_texts_are_client_errors(server, mood):
    broken = texts(ASKED)
    broken[1] = b"\xff\xfe"
    for values, message in (
        (broken, "text 1 is not UTF-8: byte 0 of 2"),
        (texts([]), "text is empty"),
        (texts(ASKED * 11), "33 rows, expected at most 32 in one request"),
    ):
        with pytest.raises(InferenceServerException, match=message) as error:
            server.infer(MOOD, {"text": values})
        assert error.value.status() == "400"
    assert server.infer(MOOD, {"text": texts(ASKED)})["score"].shape == (3, 3)


def test_request_of_the_documentation_is_answered_in_json(server, mood):
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ASKED[:1]}
    body = json.dumps({"inputs": [tensor]}).encode()
    with urllib.request.urlopen(f"{server.address}/v2/models/{MOOD}/infer", body) as response:
        outputs = {output["name"]: output for output in json.load(response)["outputs"]}
    with load_model(mood) as model:
        (wanted,) = model.classify(ASKED[:1])
    assert outputs["label"]["data"] == [label.label for label in wanted.labels]
    assert outputs["score"]["shape"] == [1, 3]
    assert outputs["score"]["data"] == pytest.approx([x.score for x in wanted.labels], abs=SCORES)


# The graph


def test_graph_of_an_image_model_has_the_scores_of_load_model(server, tmp_path):
    artifact = tiny_artifact("vit", "image-classification", tmp_path / "artifact")
    load(server, artifact, "photos")
    generator = np.random.default_rng(0)
    images = [generator.integers(0, 256, (40, 50, 3), np.uint8) for _ in range(2)]
    with load_model(artifact) as model:
        results = model.classify_images(images, activation="softmax")
    pixels = np.stack([preprocessed(artifact, image) for image in images])
    logits = server.infer("photos", {"pixel_values": pixels})["logits"]
    powers = np.exp(logits)
    scores = powers / powers.sum(axis=1, keepdims=True)
    labels = (server.repository / "photos/labels.txt").read_text().split()
    for row, result in zip(scores, results, strict=True):
        by_label = {found.label: found.score for found in result.labels}
        np.testing.assert_allclose(row, [by_label[label] for label in labels], atol=SCORES)
    asked = [InferRequestedOutput("logits", class_count=1)]
    best = server.infer("photos", {"pixel_values": pixels}, outputs=asked)["logits"]
    named = [value.decode().split(":")[2] for (value,) in best]
    assert named == [result.labels[0].label for result in results]


def preprocessed(artifact, image):
    """Return an image as the graph takes it: float32 (channels, height, width)."""
    from enginery.runtime.tasks import require_task

    graph = artifact.manifest.graphs[0]
    task = require_task(artifact.manifest, graph).open(artifact, graph)
    work = task.preprocess([image], task.Options())
    return task.collate(work.rows, 0)["pixel_values"][0]


def test_requests_of_equal_shapes_share_a_batch(server, tmp_path):
    artifact = tiny_artifact("bert", MOOD, tmp_path / "artifact")
    # The batch is run when it is full, long before the delay is over.
    options = {"max_batch_size": 4, "max_queue_delay_us": 60_000_000}
    load(server, artifact, "batched", queue_timeout_us=0, pad_multiple=48, **options)
    asked = [ASKED[0], ASKED[2], ASKED[1], "A cat."]
    outputs = server.infer_together("batched", [{"text": texts([text])} for text in asked])
    results = [answers(MOOD, output)[0] for output in outputs]
    with load_model(artifact) as model:
        assert close(results, expected(MOOD, model, asked))
    assert server.batches("batched-graph")[-1] == (4, 48)


def test_graph_is_warmed_up_at_the_optimum_of_each_profile(server, tmp_path):
    artifact = tiny_artifact("bert", MOOD, tmp_path / "artifact")
    profiles = ("batch=1:4:16,sequence=8:32:64", "batch=1:8:8,sequence=64:96:128")
    load(server, artifact, "warm", tokenizer=False, threads=2, profile=profiles)
    assert server.batches("warm") == [(4, 32), (8, 96)]


@pytest.mark.parametrize("options", [{}, {"provider": "tensorrt"}, {"backend": "tensorrt"}])
def test_configuration_for_a_gpu_is_valid(server, tmp_path, options):
    """But for the kind of the instances, since this server has no GPU."""
    artifact = tiny_artifact("bert", MOOD, tmp_path / "artifact")
    if "backend" in options:
        engine = {
            "flavor": "tensorrt",
            "tensorrt": "10.16.1.11",
            "profiles": ("batch=1:8:32,sequence=8:64:128", "batch=1:2:4,sequence=128"),
        }
        artifact = with_engines(artifact, tmp_path / "built", engine)
    name = "-".join(["gpu", *options.values(), *options])
    export_triton(artifact, server.repository, name=name, tokenizer=False, **options)
    config = server.repository / name / "config.pbtxt"
    text = config.read_text()
    assert "KIND_GPU" in text
    config.write_text(text.replace("KIND_GPU", "KIND_CPU"))
    server.load(name)
    assert server.batches(name), "it is warmed up"

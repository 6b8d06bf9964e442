"""POST /predict/{model}: every task, and images and audio in every way they come."""

import base64
import io
import json
import shutil

import httpx
import numpy as np
import pytest
from PIL import Image

from enginery import load_model
from enginery.core.artifact.artifact import Artifact, commit_artifact
from enginery.runtime.tasks import TASKS
from enginery.runtime.tasks.audio import example_wav
from enginery.runtime.tasks.zero_shot import TEMPLATE
from enginery.serve.config import ServeConfig
from tests.runtime.count_task import Count
from tests.serve.conftest import Running
from tests.serve.doubles import StandInModel, application, ask
from tests.sounds import silence, speech, wav
from tests.tolerances import OUTPUTS, SCORES

TEXTS = ["The engine is warm.", "Marie Curie lived in Paris."]
CONTEXT = "Marie Curie lived in Paris, not far from the Seine."


@pytest.fixture(scope="module")
def images():
    found = []
    for colour, size in (((200, 30, 30), (50, 40)), ((20, 90, 210), (32, 64))):
        file = io.BytesIO()
        Image.effect_noise(size, 90).convert("RGB").point(
            lambda v, c=colour: (v + c[0]) % 256
        ).save(file, "PNG")
        found.append(file.getvalue())
    return found


def coded(image):
    return base64.b64encode(image).decode()


def same(found, wanted):
    """The plain form of an answer, numbers within rounding."""
    if isinstance(wanted, dict):
        assert set(found) == set(wanted)
        for name, value in wanted.items():
            same(found[name], value)
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            same(one, other)
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, abs=SCORES)
    else:
        assert found == wanted


def plain(answer):
    return [plain(item) for item in answer] if isinstance(answer, list) else answer.to_dict()


CASES = {
    "mood": ([TEXTS[0], TEXTS[1]], TEXTS, {}),
    "names": (TEXTS, TEXTS, {}),
    "filler": (["The [MASK] is warm."] * 2, ["The [MASK] is warm."] * 2, {"top_k": 2}),
    "reader": (
        [{"question": "Who?", "context": CONTEXT}, ["Where?", CONTEXT]],
        [("Who?", CONTEXT), ("Where?", CONTEXT)],
        {"top_k": 2},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_list_has_a_list_of_the_models_answers(running, tiny_paths, name):
    inputs, given, parameters = CASES[name]
    with load_model(tiny_paths(name)[name]) as model:
        wanted = plain(getattr(model, model.method)(given, **parameters))
    body = {"inputs": inputs, "parameters": parameters}
    found = running("POST", f"/predict/{name}", body)
    assert found.status == 200, found.json
    same(found.json["outputs"], wanted)
    assert (found.json["model"], found.json["truncated"]) == (name, 0)
    single = running("POST", f"/predict/{name}", {**body, "inputs": inputs[0]}).json
    same(single["outputs"], wanted[0])


def test_vectors_are_the_models_own(running, tiny_paths):
    with load_model(tiny_paths("vectors")["vectors"]) as model:
        wanted = model.embed(TEXTS)
    found = running("POST", "/predict/vectors", {"inputs": TEXTS}).json["outputs"]
    np.testing.assert_allclose(found, wanted, atol=OUTPUTS)
    one = running(
        "POST",
        "/predict/vectors",
        {"inputs": TEXTS[0], "parameters": {"normalize": True, "dimensions": 4}},
    ).json["outputs"]
    np.testing.assert_allclose(one, wanted[0, :4] / np.linalg.norm(wanted[0, :4]), atol=OUTPUTS)
    ids = running("POST", "/predict/vectors", {"inputs": [5, 6]}).json["outputs"]
    assert len(ids) == 32
    assert len(running("POST", "/predict/vectors", {"inputs": [[5, 6], "a"]}).json["outputs"]) == 2


def test_pairs_are_objects_or_lists_of_two(running):
    as_object = {"text": "a", "text_pair": "b"}
    one = running("POST", "/predict/mood", {"inputs": as_object}).json["outputs"]
    several = running("POST", "/predict/mood", {"inputs": [["a", "b"], as_object, "a"]}).json
    same(several["outputs"][0], one)
    same(several["outputs"][1], one)
    assert several["outputs"][2] != one
    alone = running("POST", "/predict/mood", {"inputs": {"text": "a"}}).json["outputs"]
    same(alone, several["outputs"][2])


def test_cut_texts_are_counted(running):
    body = {"inputs": ["warm " * 300, "warm"]}
    assert running("POST", "/predict/mood", body).json["truncated"] == 1
    body["parameters"] = {"truncate": False}
    assert running("POST", "/predict/mood", body).status == 413


def test_every_parameter_reaches_the_model():
    model = StandInModel(verb="answer")
    parameters = {"top_k": 3, "max_tokens": 4, "allow_none": True}
    body = {"inputs": {"question": "a", "context": "b"}, "parameters": parameters}
    ask(application(model), "POST", "/predict/minilm", body)
    ((inputs, options),) = model.calls
    assert (inputs, options.model_dump()) == ([("a", "b")], parameters)
    model = StandInModel(verb="tag")
    body = {"inputs": "a", "parameters": {"aggregation": "max", "truncate": False}}
    ask(application(model), "POST", "/predict/minilm", body)
    assert model.calls[0][1].model_dump() == {"aggregation": "max", "truncate": False}
    model = StandInModel(verb="classify")
    parameters = {"top_k": 1, "activation": "sigmoid", "instruction": "Judge."}
    body = {"inputs": "a", "parameters": parameters}
    ask(application(model), "POST", "/predict/minilm", body)
    others = {"truncate": None, "candidate_labels": None, "multi_label": False}
    wanted = {**parameters, **others, "hypothesis_template": TEMPLATE}
    assert model.calls[0][1].model_dump() == wanted


# Images


def test_images_come_as_base64_as_files_and_as_the_body(running, tiny_paths, images, tmp_path):
    paths = []
    for index, image in enumerate(images):
        paths.append(tmp_path / f"{index}.png")
        paths[-1].write_bytes(image)
    with load_model(tiny_paths("photos")["photos"]) as model:
        wanted = plain(model.classify_images(paths))
    url = f"{running.url}/predict/photos"
    with httpx.Client(timeout=30) as client:
        listed = client.post(url, json={"inputs": [coded(image) for image in images]})
        single = client.post(url, json={"inputs": f"data:image/png;base64,{coded(images[0])}"})
        files = [("image", (f"{i}.png", image, "image/png")) for i, image in enumerate(images)]
        form = client.post(url, files=files)
        one_form = client.post(url, files=files[:1], data={"parameters": '{"top_k": 1}'})
        png = {"content-type": "image/png"}
        raw = client.post(f"{url}?top_k=1", content=images[0], headers=png)
    same(listed.json()["outputs"], wanted)
    same(form.json()["outputs"], wanted)
    same(single.json()["outputs"], wanted[0])
    best = {"labels": wanted[0]["labels"][:1]}
    same(one_form.json()["outputs"], best)
    same(raw.json()["outputs"], best)


@pytest.mark.parametrize(
    "kind",
    [
        "application/x-www-form-urlencoded",
        "application/octet-stream",
        "application/json",
        "text/plain",
        None,
    ],
)
def test_image_is_recognized_with_any_content_type(running, images, kind):
    headers = {} if kind is None else {"content-type": kind}
    jpeg = io.BytesIO()
    Image.open(io.BytesIO(images[0])).save(jpeg, "JPEG")
    for image in (images[0], jpeg.getvalue()):
        found = running("POST", "/predict/photos", image, headers=headers, query="top_k=1")
        assert found.status == 200, found.json
        assert len(found.json["outputs"]["labels"]) == 1
    listed = json.dumps({"inputs": [coded(images[0])]}).encode()
    assert len(running("POST", "/predict/photos", listed, headers=headers).json["outputs"]) == 1


def test_images_are_embedded(running, tiny_paths, images, tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(images[0])
    with load_model(tiny_paths("pictures")["pictures"]) as model:
        wanted = model.embed_images([path])
    found = running("POST", "/predict/pictures", {"inputs": coded(images[0])}).json["outputs"]
    np.testing.assert_allclose(found, wanted[0], atol=OUTPUTS)


def test_base64_may_have_lines(running, images):
    lines = base64.encodebytes(images[0]).decode()
    assert running("POST", "/predict/photos", {"inputs": lines}).status == 200


# Audio


@pytest.fixture(scope="module")
def recordings():
    pytest.importorskip("soundfile", reason="pip install 'enginery[audio]'")
    return [example_wav(), wav(speech(0.5))]


@pytest.mark.parametrize(
    ("name", "method", "parameters"),
    [("sounds", "classify_audio", {"top_k": 1}), ("calls", "transcribe", {})],
)
def test_audio_comes_as_base64_as_files_and_as_the_body(
    running, tiny_paths, recordings, name, method, parameters
):
    with load_model(tiny_paths(name)[name]) as model:
        wanted = plain(getattr(model, method)(recordings, **parameters))
    url = f"{running.url}/predict/{name}"
    with httpx.Client(timeout=30) as client:
        coded_all = {"inputs": [coded(each) for each in recordings], "parameters": parameters}
        listed = client.post(url, json=coded_all)
        url_of_data = f"data:audio/wav;base64,{coded(recordings[0])}"
        single = client.post(url, json={"inputs": url_of_data, "parameters": parameters})
        files = [("audio", (f"{i}.wav", each, "audio/wav")) for i, each in enumerate(recordings)]
        form = client.post(url, files=files, data={"parameters": json.dumps(parameters)})
        headers = {"content-type": "audio/wav"}
        raw = client.post(url, params=parameters, content=recordings[0], headers=headers)
    same(listed.json()["outputs"], wanted)
    same(form.json()["outputs"], wanted)
    same(single.json()["outputs"], wanted[0])
    same(raw.json()["outputs"], wanted[0])


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
def test_audio_is_recognized_with_any_content_type(running, kind):
    soundfile = pytest.importorskip("soundfile", reason="pip install 'enginery[audio]'")
    soundfile.write(file := io.BytesIO(), speech(0.5), 16_000, format=kind)
    for content_type in ("application/x-www-form-urlencoded", "application/octet-stream"):
        headers = {"content-type": content_type}
        found = running("POST", "/predict/calls", file.getvalue(), headers=headers)
        assert found.status == 200, found.json
        assert set(found.json["outputs"]) == {"text", "score"}


@pytest.mark.parametrize(
    ("body", "headers", "status", "message"),
    [
        (b"", {"content-type": "audio/wav"}, 400, "the body is empty, expected an audio file"),
        (b"abc", {"content-type": "audio/wav"}, 422, "audio 0 is not an audio file"),
        (b"abc", {"content-type": "image/png"}, 400, "takes audio, found a body of 'image/png'"),
        (b"RIFF\0\0\0\0WAVE", {}, 422, "audio 0 is not a complete audio file"),
        (b"", {}, 400, "To send an audio file itself, set its content type, such as audio/wav"),
        (b'{"inputs": "abc?"}', {}, 422, "inputs is not valid base64"),
        (b'{"inputs": ""}', {}, 400, "inputs is empty, expected an audio file"),
        (b'{"inputs": "https://example.org/a.wav"}', {}, 422, "does not download anything"),
        (b'{"inputs": [0.5, 0.1]}', {}, 422, "inputs[0]: found the number 0.5"),
    ],
)
def test_invalid_audio_is_rejected(running, recordings, body, headers, status, message):
    found = running("POST", "/predict/sounds", body, headers=headers)
    assert (found.status, message in found.json["error"]) == (status, True), found.json


def test_long_audio_is_not_decoded(running):
    found = running("POST", "/predict/sounds", wav(silence(61)))
    assert found.status == 422
    assert "audio 0 is 61.0 seconds long, expected at most 60" in found.json["error"]


def test_audio_is_no_image(running, recordings):
    found = running("POST", "/predict/photos", recordings[0], headers={"content-type": "audio/wav"})
    assert (found.status, "takes images, found a body" in found.json["error"]) == (400, True)


BOUNDARY = {"content-type": "multipart/form-data; boundary=x"}
PART = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n'


# python-multipart and Starlette leave the file of a form that is cut off to the collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("body", "headers", "status", "message"),
    [
        (b"--x\r\n", BOUNDARY, 400, "has no file"),
        (PART + b"\r\nabc", BOUNDARY, 400, "has no file"),
        (b"abc", BOUNDARY, 400, ""),
        (b"abc", {"content-type": "multipart/form-data"}, 400, "boundary"),
        (PART + b"\r\n\r\n--x--\r\n", BOUNDARY, 400, "'image' is empty"),
        (PART + b"\r\nabc\r\n--x--\r\n", BOUNDARY, 422, "image"),
        (
            b'--x\r\nContent-Disposition: form-data; name="y"\r\n\r\nabc\r\n--x--\r\n',
            BOUNDARY,
            422,
            "unknown field 'y'",
        ),
        (b"--x\r\nContent-Disposition: form-data\r\n\r\nabc\r\n--x--\r\n", BOUNDARY, 400, "name"),
        (
            b'--x\r\nContent-Disposition: form-data; name="parameters"\r\n\r\n{}\r\n--x--\r\n',
            BOUNDARY,
            400,
            "has no file",
        ),
        (
            PART + b"\r\nabc\r\n--x--\r\n",
            {"content-type": "multipart/form-data; boundary=x; charset=undefined"},
            400,
            "be read",
        ),
        (b"", {"content-type": "image/png"}, 400, "the body is empty"),
        (b"abc", {"content-type": "image/png"}, 422, "image 0"),
        (b"abc", {}, 422, "image 0 is not an image"),
        (b"", {}, 400, "send an image file itself, set its content type"),
        (b"[1, 2]", {}, 400, "expected a JSON object. To send an image file itself"),
        (b"{cat.png", {}, 400, "not valid JSON"),
        (b'{"inputs": "abc?"}', {}, 422, "inputs is not valid base64"),
        (b'{"inputs": "YWJj?"}', {}, 422, "inputs is not valid base64"),
        (b'{"inputs": ["YQ==", "\\u00e9"]}', {}, 422, "inputs[1] is not valid base64"),
        (b'{"inputs": ""}', {}, 400, "inputs is empty"),
        (b'{"inputs": "https://example.org/a.png"}', {}, 422, "does not download anything"),
        (b'{"inputs": "data:image/png,abc"}', {}, 422, "without base64"),
    ],
)
def test_invalid_images_are_rejected(running, body, headers, status, message):
    found = running("POST", "/predict/photos", body, headers=headers)
    assert (found.status, message in found.json["error"]) == (status, True), found.json


def test_file_with_the_boundary_inside_is_whole(running):
    model = StandInModel(verb="classify_images")
    image = b"a\r\n--xy\r\n--\r\nb" * 3
    ask(
        application(model),
        "POST",
        "/predict/minilm",
        PART + b"\r\n" + image + b"\r\n--x--\r\n",
        BOUNDARY,
    )
    assert model.calls[0][0] == [image]


def test_texts_are_not_images(running, images):
    found = running("POST", "/predict/mood", images[0], headers={"content-type": "image/png"})
    assert (found.status, "takes texts" in found.json["error"]) == (400, True)


# What is refused


@pytest.mark.parametrize(
    ("name", "body", "message"),
    [
        ("mood", {"input": "a"}, "unknown field 'input'; did you mean 'inputs'?"),
        ("mood", {"inputs": "a", "parameters": {"topk": 1}}, "did you mean 'parameters.top_k'"),
        ("mood", {"inputs": "a", "parameters": {"top_k": -1}}, "parameters.top_k"),
        ("mood", {"inputs": "a", "parameters": {"top_k": True}}, "found true"),
        ("mood", {"inputs": "a", "parameters": {"activation": "relu"}}, "expected auto or softmax"),
        ("mood", {"inputs": "a", "parameters": "top_k"}, "parameters: found the string"),
        ("mood", {"inputs": {"text": "a", "pair": "b"}}, "unknown field 'inputs.pair'"),
        ("mood", {"inputs": {"text_pair": "b"}}, "inputs.text is missing"),
        ("mood", {"inputs": [["a", "b", "c"]]}, "inputs[0]: found a list of 3"),
        ("mood", {"inputs": 3}, "inputs: found the number 3, expected a text, a pair"),
        ("mood", {"inputs": []}, "inputs is empty"),
        ("names", {"inputs": {"text": "a"}}, "inputs: found an object"),
        ("names", {"inputs": "a", "parameters": {"aggregation": "most"}}, "aggregation"),
        ("reader", {"inputs": "who?"}, "expected {question, context}"),
        ("reader", {"inputs": {"question": "who?"}}, "inputs.context is missing"),
        ("reader", {"inputs": ["who?", "context"]}, "inputs[0]: found the string"),
        ("reader", {"inputs": {"question": "", "context": "a"}}, "is empty"),
        ("filler", {"inputs": "no mask"}, "has no [MASK]"),
        (
            "vectors",
            {"inputs": "a", "parameters": {"dimensions": 99}},
            "found 99, expected at most 32",
        ),
        ("pictures", {"inputs": "YQ==", "parameters": {"dimensions": 0}}, "dimensions"),
    ],
)
def test_predict_refuses(running, name, body, message):
    found = running("POST", f"/predict/{name}", body)
    assert found.status in (400, 422)
    message = message.replace("'parameters.top_k'", "'top_k'")
    assert message in found.json["error"], found.json


def test_unknown_model_names_the_nearest(running):
    found = running("POST", "/predict/moot", {"inputs": "a"})
    assert (found.status, "did you mean 'mood'?" in found.json["error"]) == (404, True)


def test_unsupported_task_refers_to_the_tensor_route():
    found = ask(application(StandInModel(verb="")), "POST", "/predict/minilm", {"inputs": "a"})
    assert (found.status, "/v2/models/minilm/infer" in found.json["error"]) == (422, True)


# A task that is one module


def test_new_task_works_on_task_independent_routes(tiny_paths, tmp_path, monkeypatch):
    source = Artifact.open(tiny_paths("vectors")["vectors"])
    shutil.copytree(source.path, tmp_path / "counting")
    counted = source.manifest.model_copy(update={"task": "token-counting"})
    commit_artifact(tmp_path / "counting", counted)
    monkeypatch.setitem(TASKS, Count.verb, Count)
    with Running({"counting": tmp_path / "counting"}, ServeConfig(access_log="off")) as server:
        body = {"inputs": ["The engine is warm.", "a"], "parameters": {"vowels": "e"}}
        found = server("POST", "/predict/counting", body)
        assert found.status == 200, found.json
        assert [each["vowels"] for each in found.json["outputs"]] == [3, 0]
        wrong = server("POST", "/predict/counting", {"inputs": "a", "parameters": {"vowel": "e"}})
        assert "did you mean 'vowels'?" in wrong.json["error"]
        text = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["The engine is warm."]}
        infer = server("POST", "/v2/models/counting/infer", {"inputs": [text]}).json
        assert {each["name"]: each["data"] for each in infer["outputs"]} == {
            "tokens": [found.json["outputs"][0]["tokens"]],
            "vowels": [6],
        }
        outputs = server("GET", "/v2/models/counting").json["outputs"]
        assert [each["name"] for each in outputs[:2]] == ["tokens", "vowels"]
        assert server("GET", "/models/counting/info").json["method"] == "count"
        refused = server("POST", "/embed", {"inputs": "a"}).json["error"]
        assert "It counts tokens and vowels: POST /predict/counting." in refused

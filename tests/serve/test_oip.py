"""The Open Inference Protocol, with Triton's own client."""

import base64
import io
import json
import struct
import time

import numpy as np
import pytest
import tritonclient.http as triton
from google.protobuf.json_format import ParseDict
from PIL import Image
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from enginery import load_model
from enginery.runtime.tasks.audio import example_wav
from enginery.serve.api.errors import HTTPError
from enginery.serve.api.oip_tensors import (
    DATATYPES,
    BinaryData,
    InferTensor,
    RequestTensor,
    read_tensor,
)
from tests.deploy.triton_repository import PROTO
from tests.tolerances import OUTPUTS, SCORES

TEXTS = ["The engine is warm.", "Où est la clé du bateau ?"]


@pytest.fixture(scope="module")
def client(running):
    client = triton.InferenceServerClient(f"127.0.0.1:{running.port}")
    yield client
    client.close()


def bytes_input(name, values, *, binary=True):
    array = np.array(values, dtype=object)
    tensor = triton.InferInput(name, list(array.shape), "BYTES")
    tensor.set_data_from_numpy(array, binary_data=binary)
    return tensor


def numbers_input(name, array, *, binary=True):
    tensor = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    tensor.set_data_from_numpy(array, binary_data=binary)
    return tensor


def ids(rows=2, *, binary=True):
    array = np.arange(5, 5 + rows * 3, dtype=np.int64).reshape(rows, 3)
    feeds = {
        "input_ids": array,
        "attention_mask": np.ones_like(array),
        "token_type_ids": np.zeros_like(array),
    }
    return [numbers_input(name, value, binary=binary) for name, value in feeds.items()], feeds


# The server and its models


def test_client_finds_server_and_models_ready(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("mood")
    assert client.is_model_ready("mood", "1")
    assert not client.is_model_ready("mood", "2")
    assert not client.is_model_ready("nobody")
    metadata = client.get_server_metadata()
    assert (metadata["name"], "binary_tensor_data" in metadata["extensions"]) == ("enginery", True)


def test_model_metadata_has_the_tasks_tensors_and_the_graphs(client):
    found = client.get_model_metadata("mood")
    inputs = {tensor["name"]: tensor for tensor in found["inputs"]}
    assert (inputs["text"]["datatype"], inputs["text"]["shape"]) == ("BYTES", [-1])
    assert (inputs["input_ids"]["datatype"], inputs["input_ids"]["shape"]) == ("INT64", [-1, -1])
    outputs = {tensor["name"]: tensor for tensor in found["outputs"]}
    assert set(outputs) == {"label", "score", "logits"}
    assert outputs["logits"]["shape"] == [-1, 3]
    assert found["versions"] == ["1"]
    vectors = client.get_model_metadata("vectors")["outputs"]
    assert vectors[0]["shape"] == [-1, 32]


# Triton's extensions


def test_configuration_is_one_of_tritons(client):
    found = client.get_model_config("mood")
    config = ParseDict(found, PROTO.ModelConfig())
    assert (config.name, config.platform, config.backend) == (
        "mood",
        "onnxruntime_onnx",
        "onnxruntime",
    )
    metadata = client.get_model_metadata("mood")
    for tensors, described in (
        (config.input, metadata["inputs"]),
        (config.output, metadata["outputs"]),
    ):
        assert [(each.name, list(each.dims)) for each in tensors] == [
            (each["name"], each["shape"]) for each in described
        ], "max_batch_size is 0, so that dims are whole shapes"
    assert config.max_batch_size == 0
    types = {each.name: PROTO.DataType.Name(each.data_type) for each in config.input}
    assert (types["text"], types["input_ids"]) == ("TYPE_STRING", "TYPE_INT64")
    assert all(each.optional for each in config.input), "those of the task or of the graph"
    assert client.get_model_config("mood", "1") == found
    for model, version in (("mood", "2"), ("nobody", "")):
        with pytest.raises(InferenceServerException, match="404"):
            client.get_model_config(model, version)


def stats_of(client, model, version=""):
    (found,) = client.get_inference_statistics(model, version)["model_stats"]
    return found


def test_statistics_count_requests_inputs_and_time(client, running):
    before = stats_of(client, "mood")
    client.infer("mood", [bytes_input("text", TEXTS * 20)])
    with pytest.raises(InferenceServerException):
        client.infer("mood", [bytes_input("text", TEXTS)], parameters={"top_k": -1})
    after = stats_of(client, "mood", "1")
    assert (after["name"], after["version"]) == ("mood", "1")
    assert after["inference_count"] - before["inference_count"] == 40
    assert 1 <= after["execution_count"] - before["execution_count"] < 40
    assert 0 <= time.time() * 1e3 - after["last_inference"] < 60_000
    for part, more in {
        "success": 1,
        "fail": 1,
        "queue": 1,
        "compute_input": 1,
        "compute_infer": 1,
    }.items():
        old, new = before["inference_stats"][part], after["inference_stats"][part]
        assert new["count"] - old["count"] == more, part
        assert new["ns"] > old["ns"], part
    spent = {part: after["inference_stats"][part]["ns"] for part in after["inference_stats"]}
    assert spent["compute_infer"] < spent["success"]
    # Neither metadata nor tokenizing is an inference.
    client.get_model_metadata("mood")
    running("POST", "/models/mood/tokenize", {"inputs": TEXTS})
    assert stats_of(client, "mood")["inference_stats"] == after["inference_stats"]


def test_statistics_are_of_all_models_without_a_name(client, running):
    found = client.get_inference_statistics()["model_stats"]
    assert [each["name"] for each in found] == list(running.models.names)
    assert running("GET", "/v2/models/nobody/stats").status == 404


def test_index_has_the_state_of_every_model(client, running, monkeypatch):
    found = client.get_model_repository_index()
    assert found == [
        {"name": name, "version": "1", "state": "READY", "reason": ""}
        for name in running.models.names
    ]
    mood = running.models.get("mood")
    monkeypatch.setattr(mood, "state", "failed")
    monkeypatch.setattr(mood, "reason", "a worker thread has ended")
    (entry,) = (each for each in client.get_model_repository_index() if each["name"] == "mood")
    assert (entry["state"], entry["reason"]) == ("UNAVAILABLE", "a worker thread has ended")
    ready = running("POST", "/v2/repository/index", {"ready": True}).json
    assert [each["name"] for each in ready] == [n for n in running.models.names if n != "mood"]
    assert running("POST", "/v2/repository/index", {"ready": "yes"}).status == 422


def test_extensions_are_those_that_have_routes(client):
    found = client.get_server_metadata()["extensions"]
    assert {"model_configuration", "statistics", "model_repository(index)"} <= set(found)
    with pytest.raises(InferenceServerException, match="404"):
        client.load_model("mood")


# Tasks


@pytest.mark.parametrize("binary", [True, False])
def test_text_is_embedded(client, tiny_paths, binary):
    with load_model(tiny_paths("vectors")["vectors"]) as model:
        wanted = model.embed(TEXTS)
    asked = [triton.InferRequestedOutput("embedding", binary_data=binary)]
    found = client.infer(
        "vectors", [bytes_input("text", TEXTS, binary=binary)], outputs=asked, request_id="r-7"
    )
    np.testing.assert_allclose(found.as_numpy("embedding"), wanted, atol=OUTPUTS)
    assert found.get_response()["id"] == "r-7"


@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_text_is_classified(client, tiny_paths, shape):
    with load_model(tiny_paths("mood")["mood"]) as model:
        wanted = model.classify(TEXTS)
    found = client.infer("mood", [bytes_input("text", np.reshape(TEXTS, shape))])
    labels = found.as_numpy("label")
    assert labels.shape == (2, 3)
    assert [row[0].decode() for row in labels] == [answer.label for answer in wanted]
    np.testing.assert_allclose(
        found.as_numpy("score")[:, 0], [answer.score for answer in wanted], atol=SCORES
    )


def test_top_k_comes_as_parameter_or_as_tritons_classification(client):
    text = [bytes_input("text", TEXTS)]
    assert client.infer("mood", text, parameters={"top_k": 1}).as_numpy("label").shape == (2, 1)
    asked = [triton.InferRequestedOutput("label", class_count=2)]
    assert client.infer("mood", text, outputs=asked).as_numpy("label").shape == (2, 2)


def test_duplicate_output_is_rejected(client):
    twice = [triton.InferRequestedOutput("label"), triton.InferRequestedOutput("label")]
    with pytest.raises(InferenceServerException, match="'label' occurs twice"):
        client.infer("mood", [bytes_input("text", TEXTS)], outputs=twice)


def test_pairs_are_classified(client, tiny_paths):
    with load_model(tiny_paths("mood")["mood"]) as model:
        wanted = model.classify([("a", "b")])
    found = client.infer("mood", [bytes_input("text_pair", ["b"]), bytes_input("text", ["a"])])
    np.testing.assert_allclose(found.as_numpy("score")[0, 0], wanted[0].score, atol=SCORES)


def test_image_comes_as_bytes_or_in_base64(client, running):
    file = io.BytesIO()
    Image.new("RGB", (40, 30), (200, 30, 30)).save(file, "PNG")
    array = np.array([file.getvalue()], dtype=object)
    found = client.infer("photos", [bytes_input("image", array)]).as_numpy("score")
    tensor = {
        "name": "image",
        "datatype": "BYTES",
        "shape": [1],
        "data": [base64.b64encode(file.getvalue()).decode()],
    }
    other = running("POST", "/v2/models/photos/infer", {"inputs": [tensor]}).json
    np.testing.assert_allclose(other["outputs"][1]["data"], found[0], atol=SCORES)
    broken = {**tensor, "data": [base64.b64encode(file.getvalue()[:50]).decode()]}
    assert running("POST", "/v2/models/photos/infer", {"inputs": [broken]}).status == 422


def test_audio_comes_as_bytes_or_in_base64(client, running):
    pytest.importorskip("soundfile", reason="pip install 'enginery[audio]'")
    content = example_wav()
    array = np.array([content], dtype=object)
    found = client.infer("calls", [bytes_input("audio", array)])
    tensor = {
        "name": "audio",
        "datatype": "BYTES",
        "shape": [1],
        "data": [base64.b64encode(content).decode()],
    }
    other = running("POST", "/v2/models/calls/infer", {"inputs": [tensor]}).json
    text, score = (output["data"] for output in other["outputs"])
    assert text == [found.as_numpy("text")[0].decode()]
    np.testing.assert_allclose(score, found.as_numpy("score"), atol=SCORES)


# The graph's own tensors


@pytest.mark.parametrize("binary", [True, False])
def test_graph_inputs_return_graph_outputs(client, running, binary):
    inputs, feeds = ids(binary=binary)
    found = client.infer("mood", inputs).as_numpy("logits")
    direct = running.models.get("mood").backend.runner(feeds)["logits"]
    np.testing.assert_allclose(found, direct, atol=OUTPUTS)


def test_classification_of_a_graphs_output_is_tritons(client):
    inputs, _ = ids()
    logits = client.infer("mood", inputs).as_numpy("logits")
    asked = [triton.InferRequestedOutput("logits", class_count=2)]
    best = client.infer("mood", inputs, outputs=asked).as_numpy("logits")
    assert best.shape == (2, 2)
    score, index, label = best[1, 0].decode().split(":")
    assert int(index) == logits[1].argmax()
    assert float(score) == pytest.approx(logits[1].max(), abs=OUTPUTS)
    assert label == ("calm", "angry", "glad")[int(index)]


def test_outputs_are_as_chosen(running):
    text = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"]}
    body = {"inputs": [text], "outputs": [{"name": "score"}]}
    found = running("POST", "/v2/models/mood/infer", body).json
    assert [output["name"] for output in found["outputs"]] == ["score"]
    assert found["model_version"] == "1"
    assert "id" not in found


def test_binary_and_json_outputs_share_an_answer(running):
    text = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"]}
    outputs = [{"name": "label"}, {"name": "score", "parameters": {"binary_data": True}}]
    found = running("POST", "/v2/models/mood/infer", {"inputs": [text], "outputs": outputs})
    length = int(found.headers["inference-header-content-length"])
    head = json.loads(found.body[:length])
    assert found.content_type == "application/octet-stream"
    assert head["outputs"][0]["data"][0] == "glad"
    assert head["outputs"][1]["parameters"]["binary_data_size"] == len(found.body) - length == 12


# What is refused

TEXT = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"]}
IDS = {"name": "input_ids", "datatype": "INT64", "shape": [1, 2], "data": [1, 2]}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "inputs is missing"),
        ({"inputs": []}, "inputs is empty"),
        ({"inputs": [3]}, "inputs[0]: found the number 3"),
        ({"inputs": [TEXT, TEXT]}, "'text' occurs twice"),
        ({"inputs": [{**TEXT, "name": "txet"}]}, "no input 'txet'; did you mean 'text'?"),
        ({"inputs": [{**TEXT, "shape": [2]}]}, "found 1 element, expected 2"),
        ({"inputs": [{**TEXT, "shape": [0], "data": []}]}, "has no elements"),
        (
            {"inputs": [{**TEXT, "shape": [-1]}]},
            "inputs[0].shape[0]: found the number -1, expected at least 0.",
        ),
        ({"inputs": [{**TEXT, "shape": [1, "2"]}]}, "inputs[0].shape[1]: found the string '2'"),
        ({"inputs": [{**TEXT, "shape": 1}]}, "inputs[0].shape: found the number 1"),
        (
            {"inputs": [{**TEXT, "shape": [1] * 9}]},
            "inputs[0].shape: found a list, expected at most 8 items",
        ),
        (
            {"inputs": [{**TEXT, "shape": [2, 10**12]}]},
            "inputs[0].shape[1]: found the number 1000000000000, expected",
        ),
        ({"inputs": [{**TEXT, "datatype": "TEXT"}]}, "unknown datatype 'TEXT'"),
        ({"inputs": [{**TEXT, "data": [3]}]}, "data[0]: found the number 3, expected strings"),
        ({"inputs": [{**TEXT, "parameters": {"shared_memory_region": "x"}}]}, "unknown field"),
        ({"inputs": [{**TEXT, "parameters": {"binary_data_size": 5}}]}, "expected one of them"),
        (
            {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1]}]},
            "data is null, expected a list",
        ),
        (
            {"inputs": [{"name": "text", "datatype": "INT8", "shape": [1], "data": [1]}]},
            "has the datatype INT8, expected BYTES",
        ),
        (
            {
                "inputs": [
                    {"name": "text", "datatype": "BYTES", "shape": [1, 2], "data": ["a", "b"]}
                ]
            },
            "expected [n] or [n, 1]",
        ),
        ({"inputs": [TEXT], "outputs": [{"name": "scores"}]}, "did you mean 'score'?"),
        ({"inputs": [TEXT], "outputs": "score"}, "outputs: found the string"),
        ({"inputs": [TEXT], "outputs": [{}]}, "outputs[0].name is missing."),
        # Of a hundred thousand invalid items the first is reported, and the others are not read.
        ({"inputs": [1] * 100_000}, "inputs[0]: found the number 1, expected an object"),
        ({"inputs": [TEXT], "outputs": [{}] * 1000}, "outputs[0].name is missing."),
        (
            {"inputs": [TEXT], "outputs": [{"name": "score"}] * 2},
            "outputs: 'score' occurs twice",
        ),
        (
            {"inputs": [TEXT], "outputs": [{"name": "score", "parameters": {"binary_date": True}}]},
            "unknown field 'outputs[0].parameters.binary_date'; did you mean 'binary_data'?",
        ),
        (
            {
                "inputs": [TEXT],
                "outputs": [{"name": "score", "parameters": {"classification": -1}}],
            },
            "outputs[0].parameters.classification: found the number -1, expected at least 0",
        ),
        ({"inputs": [TEXT], "parameters": {"topk": 1}}, "did you mean 'top_k'?"),
        ({"inputs": [TEXT], "parameters": {"top_k": "1"}}, "parameters.top_k: found the string"),
        ({"inputs": [TEXT], "id": 7}, "id: found the number 7"),
        ({"inputs": [{**TEXT, "name": "text_pair"}]}, "input 'text' is missing"),
        (
            {"inputs": [TEXT, {**TEXT, "name": "text_pair", "shape": [2], "data": ["a", "b"]}]},
            "differ in length: text 1, text_pair 2",
        ),
        ({"inputs": [IDS]}, "input 'attention_mask' is missing"),
        ({"inputs": [IDS, TEXT]}, "no input 'text'"),
        ({"inputs": [{**IDS, "datatype": "INT32"}]}, "has the datatype INT32, expected INT64"),
        ({"inputs": [{**IDS, "shape": [2]}]}, "has the shape [2], expected (batch, sequence)"),
        (
            {"inputs": [IDS, {**IDS, "name": "attention_mask", "shape": [2, 1]}]},
            "has the shape [2, 1]",
        ),
        ({"inputs": [{**IDS, "data": [1, 2.5]}]}, "data[1]: found the number 2.5"),
        ({"inputs": [{**IDS, "data": [True, False]}]}, "expected whole numbers"),
        ({"inputs": [{**IDS, "data": [[1], [2]]}]}, "the nesting of data"),
        ({"inputs": [{**IDS, "data": [[1, 2], 3]}]}, "the nesting of data"),
        ({"inputs": [{**IDS, "data": [[[1, 2]]]}]}, "the nesting of data"),
        ({"inputs": [IDS], "parameters": {"top_k": 1}}, "unknown field 'parameters.top_k'"),
    ],
)
def test_infer_refuses(running, body, message):
    found = running("POST", "/v2/models/mood/infer", body)
    assert found.status in (400, 422), found.json
    assert set(found.json) == {"error"}
    assert message in found.json["error"]


def test_errors_arrive_as_the_clients_exception(client):
    with pytest.raises(InferenceServerException, match="no model 'nobody'") as caught:
        client.infer("nobody", [bytes_input("text", ["a"])])
    assert caught.value.status() == "404"
    with pytest.raises(InferenceServerException, match="no version '3'"):
        client.infer("mood", [bytes_input("text", ["a"])], model_version="3")
    with pytest.raises(InferenceServerException, match="is not UTF-8"):
        client.infer("mood", [bytes_input("text", np.array([b"\xff"], dtype=object))])


def test_ids_outside_the_vocabulary_are_the_clients_error(client):
    inputs, feeds = ids()
    inputs[0] = numbers_input("input_ids", feeds["input_ids"] + 100_000)
    with pytest.raises(InferenceServerException) as caught:
        client.infer("mood", inputs)
    assert caught.value.status() == "422"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_pixels_are_rejected(client, value):
    pixels = np.zeros((1, 3, 32, 32), np.float32)
    pixels[0, 0, 0, 5] = value
    with pytest.raises(InferenceServerException, match="element 5 is") as caught:
        client.infer("photos", [numbers_input("pixel_values", pixels)])
    assert caught.value.status() == "422"


@pytest.mark.parametrize(
    ("length", "tail", "message"),
    [
        ("x", b"", "expected a whole number"),
        ("99999", b"", "expected a whole number"),
        ("-1", b"", "expected a whole number"),
        (None, b"abc", "left of the body"),
        (None, b"\x01\x00\x00\x00ab", "belong to no input"),
    ],
)
def test_binary_bodies_are_counted(running, length, tail, message):
    tensor = {
        "name": "text",
        "datatype": "BYTES",
        "shape": [1],
        "parameters": {"binary_data_size": 5},
    }
    head = json.dumps({"inputs": [tensor]}).encode()
    headers = {"inference-header-content-length": length or str(len(head))}
    found = running("POST", "/v2/models/mood/infer", head + tail, headers=headers)
    assert (found.status, message in found.json["error"]) == (400, True), found.json


# Every datatype


def tensor_of(datatype, shape, raw=None, data=None):
    fields = {"name": "x", "datatype": datatype, "shape": list(shape)}
    if raw is not None:
        fields["parameters"] = {"binary_data_size": len(raw)}
    else:
        fields["data"] = data
    return read_tensor(RequestTensor(**fields), BinaryData(raw or b""), "inputs[0]")


@pytest.mark.parametrize("datatype", DATATYPES)
def test_every_datatype_is_the_same_as_bytes_and_as_json(datatype):
    dtype = DATATYPES[datatype]
    if datatype == "BYTES":
        values = ["", "é", "long " * 100, "x"]
    elif datatype == "BOOL":
        values = [True, False, False, True]
    elif dtype.startswith(("int", "uint")):
        limits = np.iinfo(dtype)
        values = [int(limits.min), 0, 1, int(limits.max)]
    else:
        values = [0.5, -1.25, 0.0, 384.0]  # exact in all of them
    from_json = tensor_of(datatype, (2, 2), data=values)
    raw = from_json.raw()
    from_bytes = tensor_of(datatype, (2, 2), raw=raw)
    assert list(from_bytes.plain()) == list(from_json.plain()) == values
    nested = tensor_of(datatype, (2, 2), data=[values[:2], values[2:]])
    assert nested.raw() == raw
    with pytest.raises(HTTPError):
        tensor_of(datatype, (2, 2), raw=raw[:-1])
    with pytest.raises(HTTPError):
        tensor_of(datatype, (2, 3), raw=raw)


@pytest.mark.parametrize("datatype", [name for name in DATATYPES if "INT" in name])
def test_whole_numbers_beyond_a_datatype_are_refused(datatype):
    limits = np.iinfo(DATATYPES[datatype])
    for value in (int(limits.max) + 1, int(limits.min) - 1):
        with pytest.raises(HTTPError, match="expected"):
            tensor_of(datatype, (1,), data=[value])


@pytest.mark.parametrize(("datatype", "value"), [("FP16", 1e6), ("FP32", 1e39), ("BF16", 3.4e39)])
def test_number_that_overflows_its_datatype_is_refused(datatype, value):
    with pytest.raises(HTTPError, match="expected finite numbers"):
        tensor_of(datatype, (1,), data=[value])


def test_bf16_rounds_to_the_nearest_and_ties_to_even():
    torch = pytest.importorskip("torch")
    values = np.array([1.0, 1.00390625, 1.01171875, -3.14159, 1e-30], np.float32)
    wanted = torch.tensor(values).to(torch.bfloat16)
    raw = InferTensor("x", "BF16", (5,), values).raw()
    assert raw == wanted.view(torch.uint16).numpy().astype("<u2").tobytes()
    np.testing.assert_array_equal(
        tensor_of("BF16", (5,), raw=raw).values, wanted.to(torch.float32).numpy()
    )


def test_wrong_lengths_of_bytes_elements_are_rejected():
    for raw in (struct.pack("<I", 9) + b"abc", b"\x01\x00", struct.pack("<I", 2**32 - 1)):
        with pytest.raises(HTTPError, match="input 'x'"):
            tensor_of("BYTES", (1,), raw=raw)

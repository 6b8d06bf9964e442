"""OpenAI's own client against the server."""

import base64
import json
from datetime import datetime

import numpy as np
import openai
import pytest

from enginery import load_model
from enginery.serve.batching.queue import OverloadedError
from enginery.serve.config import ServeConfig
from tests.serve.conftest import Running
from tests.serve.doubles import StandInModel, application, ask
from tests.tolerances import OUTPUTS, SCORES

TEXTS = ["The engine is warm.", "A small cat sleeps on the boat under the tree.", ""]


def client_of(server, key="none"):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=30)


@pytest.fixture(scope="module")
def client(running):
    with client_of(running) as client:
        yield client


@pytest.fixture(scope="module")
def expected(tiny_paths):
    with load_model(tiny_paths("vectors")["vectors"]) as model:
        vectors = model.embed(TEXTS)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_client_gets_the_models_vectors_in_base64_and_as_numbers(client, expected):
    packed = client.embeddings.create(model="vectors", input=TEXTS)  # base64 by default
    plain = client.embeddings.create(model="vectors", input=TEXTS, encoding_format="float")
    for found in (packed, plain):
        assert [item.index for item in found.data] == [0, 1, 2]
        np.testing.assert_allclose([item.embedding for item in found.data], expected, atol=SCORES)
        assert found.model == "vectors"
    assert packed.usage.prompt_tokens == packed.usage.total_tokens > len(TEXTS)


def test_one_text_token_ids_and_lists_of_them_are_inputs(client, expected):
    one = client.embeddings.create(model="vectors", input=TEXTS[0])
    np.testing.assert_allclose(one.data[0].embedding, expected[0], atol=SCORES)
    ids = client.embeddings.create(model="vectors", input=[5, 6, 7])
    several = client.embeddings.create(model="vectors", input=[[5, 6, 7], [8]])
    assert (len(ids.data), len(several.data)) == (1, 2)
    np.testing.assert_allclose(several.data[0].embedding, ids.data[0].embedding, atol=SCORES)


def test_dimensions_cut_and_normalize_again(client, expected):
    found = client.embeddings.create(model="vectors", input=TEXTS[0], dimensions=3)
    wanted = expected[0, :3] / np.linalg.norm(expected[0, :3])
    np.testing.assert_allclose(found.data[0].embedding, wanted, atol=OUTPUTS)


def test_base64_is_little_endian_float32(running, expected):
    body = {"model": "vectors", "input": TEXTS[0], "encoding_format": "base64", "user": "me"}
    packed = running("POST", "/v1/embeddings", body).json["data"][0]["embedding"]
    found = np.frombuffer(base64.b64decode(packed, validate=True), "<f4")
    np.testing.assert_allclose(found, expected[0], atol=SCORES)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"input": 3}, "input", "input: found the number 3, expected a string"),
        ({}, "input", "input is missing"),
        ({"input": []}, "input", "input is empty"),
        ({"input": ["a", None]}, "input[1]", "input[1]: found null, expected a string or a list"),
        ({"input": [1, 600]}, None, "token id 600, expected whole numbers from 0 to 599"),
        ({"input": "a", "dimensions": 33}, "dimensions", "found 33, expected at most 32"),
        ({"input": "a", "dimensions": "3"}, "dimensions", "found the string '3'"),
        (
            {"input": "a", "encoding_format": "hex"},
            "encoding_format",
            "expected 'float' or 'base64'",
        ),
        ({"input": "a", "user": 3}, "user", "expected a string"),
    ],
)
def test_wrong_field_is_named_in_openais_shape(running, body, param, message):
    found = running("POST", "/v1/embeddings", {"model": "vectors", **body})
    assert found.status == 400
    error = found.json["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert message in error["message"]


def test_errors_arrive_as_the_clients_own(client, running_one):
    with pytest.raises(openai.BadRequestError, match="found the number 3") as caught:
        client.embeddings.create(model="vectors", input=3)
    assert caught.value.param == "input"
    with pytest.raises(openai.NotFoundError, match="no model 'vektors'; did you mean") as caught:
        client.embeddings.create(model="vektors", input="a")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="exported for text-classification"):
        client.embeddings.create(model="mood", input="a")
    stranger = client_of(running_one, "wrong")
    with stranger, pytest.raises(openai.AuthenticationError, match="the API key is invalid"):
        stranger.embeddings.create(model="vectors", input="a")
    with client_of(running_one, "s3cret") as known:
        assert len(known.embeddings.create(model="vectors", input="a").data) == 1


def test_overload_arrives_as_rate_limit(running, monkeypatch):
    model = running.models.get("vectors")

    async def full(*_, **__):
        raise OverloadedError("the queue is full.", retry_after_seconds=7)

    monkeypatch.setattr(model, "infer", full)
    client = client_of(running)
    with client, pytest.raises(openai.RateLimitError, match="the queue is full") as caught:
        client.embeddings.create(model="vectors", input="a")
    assert caught.value.response.headers["retry-after"] == "7"


def test_more_than_2048_inputs_are_too_many():
    found = ask(application(), "POST", "/v1/embeddings", {"input": ["a"] * 2049})
    assert (found.status, found.json["error"]["param"]) == (413, None)
    assert "at most 2048" in found.json["error"]["message"]


@pytest.mark.parametrize(
    "name", ["", "minilm", "sentence-transformers/all-MiniLM-L6-v2", "all-MiniLM-L6-v2"]
)
def test_model_is_found_by_name_and_by_source(name):
    body = {"input": "a", **({"model": name} if name else {})}
    found = ask(application(), "POST", "/v1/embeddings", body)
    assert (found.status, found.json["model"]) == (200, "minilm")


def test_ids_of_another_tokenizer_are_an_error_that_names_the_cause(running):
    body = {"model": "vectors", "input": [[5, 6], [100_256]]}
    found = running("POST", "/v1/embeddings", body)
    assert found.status == 400
    message = found.json["error"]["message"]
    assert message.startswith("input 1 has the token id 100256, expected whole numbers from 0 to ")
    assert "LangChain's OpenAIEmbeddings does" in message


@pytest.mark.parametrize(
    ("path", "field", "status"), [("/v1/embeddings", "input", 400), ("/embed", "inputs", 422)]
)
def test_token_ids_are_rejected_if_the_server_takes_none(path, field, status, tiny_paths):
    config = ServeConfig(access_log="off", token_ids=False)
    with Running(tiny_paths("vectors"), config) as server:
        found = server("POST", path, {field: ["a", [5, 6]]})
        assert found.status == status
        words = json.dumps(found.json)
        assert "input 1 is a list of token ids, which this server does not take" in words
        assert server("POST", path, {field: ["a", "b"]}).status == 200


def test_unknown_model_is_not_replaced_by_the_only_one():
    body = {"input": "a", "model": "text-embedding-3-small"}
    found = ask(application(), "POST", "/v1/embeddings", body)
    assert found.status == 404
    assert found.json["error"]["message"].endswith("Models: minilm.")


def test_several_embedding_models_require_a_name(running):
    assert running("POST", "/v1/embeddings", {"input": "a"}).json["model"] == "vectors"
    app = application(StandInModel("a"), StandInModel("b"), StandInModel("c", "classify"))
    found = ask(app, "POST", "/v1/embeddings", {"input": "a"})
    assert found.status == 400
    assert "the request names none. Name one of a, b." in found.json["error"]["message"]


def test_models_are_listed_and_found(client):
    listed = client.models.list().data
    assert "mood" in [model.id for model in listed]
    found = client.models.retrieve("mood")
    assert found.owned_by == "enginery"
    assert found.created == int(datetime.fromisoformat("2026-01-01T00:00:00+00:00").timestamp())
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_model_of_a_source_with_a_slash_is_retrieved():
    app = application()
    assert (
        ask(app, "GET", "/v1/models/sentence-transformers/all-MiniLM-L6-v2").json["id"] == "minilm"
    )

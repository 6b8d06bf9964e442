"""Text generation over HTTP: the texts of `generate`, alone, together, streamed, abandoned."""

import asyncio
import base64
import io
import json
import random
import shutil
import threading
import time
from collections import defaultdict
from contextlib import ExitStack, contextmanager

import httpx
import openai
import pytest
from PIL import Image

from enginery import export_model, load_model
from enginery.core.errors import InputError
from enginery.runtime.generation import guide
from enginery.serve.config import ServeConfig
from tests import sounds
from tests.serve.conftest import Running
from tests.speech import save_whisper
from tests.tiny_generators import save_image_reader, save_translator
from tests.tolerances import OUTPUTS

TEXTS = ["The engine", "Who built the bridge over the river in", "A"]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if messages[0]['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
WAIT = 60


TASKS = {
    "writer": "text-generation-with-past",
    "chatter": "text-generation-with-past",
    "translator": "text2text-generation-with-past",
    "m2m100": "text2text-generation-with-past",
    "reader": "image-to-text-with-past",
    "listener": "automatic-speech-recognition-with-past",
}


class Artifacts:
    """Directories of artifacts by name, each exported when it is first asked for."""

    def __init__(self, root, tiny_model, slow_tokenizer):
        self._root, self._tiny_model, self._slow_tokenizer = root, tiny_model, slow_tokenizer

    def __getitem__(self, name):
        out, source = self._root / name, self._root / f"{name}-source"
        if not out.exists():
            self._save(name, source)
            export_model(str(source), task=TASKS[name], out=out)
        return out

    def _save(self, name, source):
        if name == "m2m100":
            save_translator("m2m_100", self._slow_tokenizer(name), source)
        elif name == "reader":
            save_image_reader(source)
        elif name == "listener":
            save_whisper(source)
        else:
            kind = {"writer": "gpt2", "chatter": "llama", "translator": "t5"}
            task = TASKS[name].removesuffix("-with-past")
            shutil.copytree(self._tiny_model(kind[name], task), source)
        if name == "chatter":
            (source / "chat_template.jinja").write_text(TEMPLATE)


@pytest.fixture(scope="module")
def artifacts(tiny_model, slow_tokenizer, tmp_path_factory):
    return Artifacts(tmp_path_factory.mktemp("generators"), tiny_model, slow_tokenizer)


@pytest.fixture(scope="module")
def serve():
    """Return a function that serves models until the end of this module."""
    with ExitStack() as stack:

        def start(paths):
            return stack.enter_context(Running(paths, ServeConfig(access_log="off", max_inputs=64)))

        yield start


@pytest.fixture(scope="module")
def server(serve, artifacts, tiny_paths):
    paths = {name: artifacts[name] for name in ("writer", "chatter", "translator")}
    return serve({**paths, **tiny_paths("vectors")})


@pytest.fixture(scope="module")
def server_of_others(serve, artifacts):
    """A server of the models that few tests need."""
    return serve({name: artifacts[name] for name in ("m2m100", "reader", "listener")})


@contextmanager
def openai_client(server):
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=WAIT
    ) as client:
        yield client


@pytest.fixture(scope="module")
def client(server):
    with openai_client(server) as client:
        yield client


@pytest.fixture(scope="module")
def client_of_others(server_of_others):
    with openai_client(server_of_others) as client:
        yield client


@pytest.fixture
def writer(artifacts):
    with load_model(artifacts["writer"]) as model:
        yield model


def wait_until(happens):
    ends = time.monotonic() + WAIT
    while not happens():
        assert time.monotonic() < ends
        time.sleep(0.005)


def scheduler_of(server, name="writer"):
    return server.models.get(name)._schedulers[-1]


class Gate:
    """Steps of a decoder that run one by one, as the test lets them."""

    def __init__(self, server, monkeypatch, name="writer"):
        decoder = server.models.get(name).backend.rows.decoder
        self._step, self._allowed = decoder.step, threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        self.rows = []
        self.open = False
        self.failing = None
        monkeypatch.setattr(decoder, "step", self.step)

    def step(self, state, tokens, parents, need):
        self.rows.append(len(tokens))
        self.entered.release()
        if not self.open:
            assert self._allowed.acquire(timeout=WAIT)
        if self.failing is not None:
            error, self.failing = self.failing, None
            raise error
        return self._step(state, tokens, parents, need)

    def allow(self):
        self._allowed.release()

    def stay_open(self):
        self.open = True
        self.allow()

    def wait_entered(self):
        assert self.entered.acquire(timeout=WAIT)


@pytest.fixture
def gate(server, monkeypatch):
    gate = Gate(server, monkeypatch)
    yield gate
    gate.stay_open()


def events(text):
    """The events of a stream."""
    found = [event.removeprefix("data: ") for event in text.strip().split("\n\n")]
    return [json.loads(event) if event != "[DONE]" else event for event in found]


# -- plain routes -------------------------------------------------------------------------------


@pytest.mark.more
@pytest.mark.parametrize("name", ["writer", "translator"])
@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 9},
        {"max_new_tokens": 9, "num_beams": 3, "num_return_sequences": 2},
        {"max_new_tokens": 9, "do_sample": True, "seed": 4, "num_return_sequences": 2},
        {"max_new_tokens": 20, "stop_strings": ["r", "ber"]},
        {},
    ],
    ids=str,
)
def test_texts_are_those_of_generate(server, artifacts, name, options):
    with load_model(artifacts[name]) as model:
        wanted = model.generate(TEXTS, **options)
    body = {"inputs": TEXTS, "parameters": options, "model": name}
    found = server("POST", "/generate", body)
    assert found.status == 200
    flat = [x for each in found.json for x in (each if isinstance(each, list) else [each])]
    assert [each["generated_text"] for each in flat] == [each.text for each in wanted]
    details = [each["details"] for each in flat]
    assert [each["finish_reason"] for each in details] == [each.finish for each in wanted]
    assert [each["generated_tokens"] for each in details] == [len(each.tokens) for each in wanted]
    assert found.headers["x-compute-tokens"] != "0"
    one = server("POST", f"/generate/{name}", {**body, "inputs": TEXTS[0]}).json
    assert one == found.json[0]
    predicted = server("POST", f"/predict/{name}", {"inputs": TEXTS, "parameters": options}).json
    assert predicted["outputs"] == found.json


def test_pieces_of_a_stream_are_the_text(server):
    for name in ("writer", "translator"):
        body = {"inputs": TEXTS[1], "parameters": {"max_new_tokens": 30}, "model": name}
        found = server("POST", "/generate_stream", body)
        assert found.content_type == "text/event-stream; charset=utf-8"
        sent = events(found.body.decode())
        whole = server("POST", "/generate", body).json
        assert "".join(event["token"]["text"] for event in sent) == whole["generated_text"]
        assert [event["index"] for event in sent] == list(range(len(sent)))
        assert len(sent) > 5
        last = {name: sent[-1][name] for name in ("generated_text", "details")}
        assert last == whole
        assert not any(event["generated_text"] for event in sent[:-1])


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/generate", {"inputs": []}, 400, "inputs is empty"),
        ("/generate", {"inputs": 3}, 422, "inputs: found the number 3, expected a string"),
        ("/generate", {"inputs": ["a", 3]}, 422, "inputs[1]: found the number 3"),
        ("/generate", {"inputs": "a", "options": {}}, 422, "unknown field 'options'"),
        ("/generate", {"inputs": "pump " * 200}, 422, "tokens, and the model's limit is 128"),
        ("/generate", {"inputs": ["a"] * 65}, 413, "found 65 inputs, expected at most 64"),
        ("/generate_stream", {"inputs": ["a", "b"]}, 422, "expected one for a stream"),
    ],
)
def test_bad_requests_are_errors_in_words(server, path, body, status, message):
    found = server("POST", path, {**body, "model": "writer"})
    assert found.status == status
    assert message in found.json["error"]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"max_tokens": 3}, "unknown option"),
        ({"temperature": 0, "do_sample": True}, "temperature"),
        ({"target_language": "fr"}, "unknown option"),
        ({"num_beams": 17}, "at most 16"),
        (
            {"num_beams": 1, "do_sample": True, "num_return_sequences": 20},
            "20 beams or sequences for each input",
        ),
        ({"max_new_tokens": 1025}, "most 1024"),
        ({"eos_token_id": [7] * 60_000}, "found 60000 items, expected at most 1024"),
        (
            {"length_penalty": 1e308},
            "length_penalty: found 1e+308, expected at most 10",
        ),
    ],
)
def test_bad_parameters_are_errors_in_words(server, parameters, message):
    body = {"inputs": "a", "parameters": {"num_beams": 2, **parameters}, "model": "writer"}
    for path in ("/generate", "/generate_stream"):
        found = server("POST", path, body)
        assert found.status == 422
        assert message in found.json["error"]


def test_a_stream_is_of_one_text(server):
    parameters = {"num_beams": 2, "num_return_sequences": 2}
    body = {"inputs": "a", "parameters": parameters, "model": "writer"}
    assert "expected 1 for a stream" in server("POST", "/generate_stream", body).json["error"]


def test_models_of_other_tasks_name_the_route_that_they_have(server):
    found = server("POST", "/generate", {"inputs": "a", "model": "vectors"})
    assert found.status == 422
    assert "expected a model that generates text" in found.json["error"]
    assert "POST /predict/vectors" in found.json["error"]
    found = server("POST", "/embed", {"inputs": "a", "model": "writer"})
    assert "It generates text: POST /predict/writer" in found.json["error"]
    found = server("POST", "/generate", {"inputs": "a"})
    assert "Name one of writer, chatter, translator" in found.json["error"]


@pytest.mark.more
def test_languages_of_translation_models_are_parameters(
    server_of_others, client_of_others, artifacts
):
    server, client = server_of_others, client_of_others
    languages = {"source_language": "en", "target_language": "fr"}
    with load_model(artifacts["m2m100"]) as model:
        wanted = model.generate(TEXTS, max_new_tokens=8, **languages)
        others = model.generate(TEXTS, max_new_tokens=8, **{**languages, "target_language": "de"})
    body = {"inputs": TEXTS, "parameters": {"max_new_tokens": 8, **languages}}
    found = server("POST", "/generate/m2m100", body).json
    assert [each["generated_text"] for each in found] == [each.text for each in wanted]
    german = {**languages, "target_language": "de"}
    completed = client.completions.create(
        model="m2m100", prompt=TEXTS, max_tokens=8, extra_body=german
    )
    assert [choice.text for choice in completed.choices] == [each.text for each in others]
    for parameters, message in (
        ({"target_language": "fx"}, "'fx' is not one of the tokenizer's"),
        ({}, "no target language is given"),
        ({"target_language": 3}, "target_language: found the number 3, expected a string"),
    ):
        bad = server("POST", "/generate/m2m100", {"inputs": "a", "parameters": parameters})
        assert bad.status == 422
        assert message in bad.json["error"]
    with pytest.raises(openai.BadRequestError, match="'fx' is not one of"):
        client.completions.create(
            model="m2m100", prompt="a", extra_body={"target_language": "fx"}, stream=True
        )


@pytest.mark.more
def test_images_are_read_from_base64_and_files(server_of_others, artifacts):
    server = server_of_others
    content = io.BytesIO()
    Image.effect_noise((48, 40), 90).convert("RGB").save(content, "png")
    with load_model(artifacts["reader"]) as model:
        (wanted,) = model.generate([content.getvalue()], max_new_tokens=6)
    body = {
        "inputs": base64.b64encode(content.getvalue()).decode(),
        "parameters": {"max_new_tokens": 6},
        "model": "reader",
    }
    assert server("POST", "/generate", body).json["generated_text"] == wanted.text
    sent = events(server("POST", "/generate_stream", body).body.decode())
    assert sent[-1]["generated_text"] == wanted.text
    png = {"content-type": "image/png"}
    sent = content.getvalue()
    found = server("POST", "/predict/reader", sent, headers=png, query="max_new_tokens=6")
    assert found.json["outputs"]["generated_text"] == wanted.text
    for inputs, message in (
        ("/etc/hostname", "is not valid base64"),
        ("https://example.com/a.png", "is a URL"),
        (base64.b64encode(b"text").decode(), "image 0"),
    ):
        bad = server("POST", "/generate", {"inputs": inputs, "model": "reader"})
        assert bad.status == 422
        assert message in bad.json["error"]
    bad = server("POST", "/v1/completions", {"prompt": "a", "model": "reader"})
    assert "takes images" in bad.json["error"]["message"]


@pytest.mark.more
def test_speech_is_read_from_base64_and_files(server_of_others, artifacts):
    server = server_of_others
    heard = [sounds.wav(sounds.speech(2, seed=seed)) for seed in range(2)]
    options = {"max_new_tokens": 6, "language": "french"}
    with load_model(artifacts["listener"]) as model:
        wanted = [each.text for each in model.generate(heard, **options)]
        assert len(set(wanted)) == 2
    inputs = [base64.b64encode(content).decode() for content in heard]
    body = {"inputs": inputs, "parameters": options, "model": "listener"}
    found = server("POST", "/generate", body)
    assert [each["generated_text"] for each in found.json] == wanted
    sent = events(server("POST", "/generate_stream", {**body, "inputs": inputs[0]}).body.decode())
    assert "".join(event["token"]["text"] for event in sent if "token" in event) == wanted[0]
    audio, query = {"content-type": "audio/wav"}, "max_new_tokens=6&language=french"
    found = server("POST", "/predict/listener", heard[1], headers=audio, query=query)
    assert found.json["outputs"]["generated_text"] == wanted[1]
    for change, message in (
        ({"inputs": "/etc/hostname"}, "is not valid base64"),
        ({"inputs": base64.b64encode(b"text").decode()}, "audio 0 is not an audio file"),
        ({"parameters": {"language": "klingon"}}, "not one of the model's 4"),
        ({"parameters": {"language": 3}}, "language is a int, expected a code"),
        ({"parameters": {"max_new_tokens": 100_000}}, "max_new_tokens is 100000"),
    ):
        bad = server("POST", "/generate", {**body, **change})
        assert bad.status == 422
        assert message in bad.json["error"]


# -- OpenAI -------------------------------------------------------------------------------------


def test_openais_client_gets_the_texts_whole_and_streamed(client, writer):
    wanted = writer.generate(TEXTS, max_new_tokens=12)
    found = client.completions.create(model="writer", prompt=TEXTS, max_tokens=12)
    assert [choice.text for choice in found.choices] == [each.text for each in wanted]
    assert {choice.finish_reason for choice in found.choices} == {"length"}
    assert found.usage.completion_tokens == 36
    assert found.usage.total_tokens == found.usage.prompt_tokens + 36
    asked = {"model": "writer", "prompt": TEXTS, "max_tokens": 12, "stream": True}
    chunks = list(client.completions.create(**asked, stream_options={"include_usage": True}))
    texts = ["", "", ""]
    ends = [None] * 3
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        ends[choice.index] = choice.finish_reason
    assert texts == [each.text for each in wanted]
    assert ends == ["length"] * 3
    assert chunks[-1].choices == []
    assert chunks[-1].usage == found.usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_temperature_and_seed_draw_and_zero_is_greedy(client, writer):
    drawn = {"do_sample": True, "temperature": 0.7, "seed": 5, "num_return_sequences": 3}
    wanted = writer.generate(TEXTS[:1], max_new_tokens=8, top_p=0.9, **drawn)
    asked = {"model": "writer", "prompt": TEXTS[0], "max_tokens": 8}
    sampled = {**asked, "temperature": 0.7, "top_p": 0.9, "seed": 5, "n": 3}
    found = client.completions.create(**sampled)
    assert [choice.text for choice in found.choices] == [each.text for each in wanted]
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    greedy = client.completions.create(**asked, temperature=0)
    assert greedy.choices[0].text == writer.generate(TEXTS[:1], max_new_tokens=8)[0].text
    streamed = ["", "", ""]
    for chunk in client.completions.create(**sampled, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == [each.text for each in wanted]


def test_text_ends_before_a_stop_string(client, writer):
    (whole,) = writer.generate(TEXTS[:1], max_new_tokens=30)
    stop = whole.text[10:12]
    asked = {"model": "writer", "prompt": TEXTS[0], "max_tokens": 30, "stop": [stop, "zzz"]}
    (choice,) = client.completions.create(**asked).choices
    assert choice.text == whole.text[: whole.text.index(stop)]
    assert choice.finish_reason == "stop"
    pieces = [chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)]
    assert "".join(pieces) == choice.text


def test_echo_puts_the_prompt_in_front(client):
    asked = {"model": "writer", "prompt": TEXTS[0], "max_tokens": 5}
    plain = client.completions.create(**asked).choices[0].text
    echoed = client.completions.create(**asked, echo=True).choices[0].text
    pieces = [
        chunk.choices[0].text
        for chunk in client.completions.create(**asked, echo=True, stream=True)
    ]
    assert echoed == "".join(pieces) == TEXTS[0] + plain


def test_completions_have_16_tokens_unless_the_model_says_otherwise(client):
    found = client.completions.create(model="writer", prompt=TEXTS[0])
    assert found.usage.completion_tokens == 16


def test_encoder_decoders_complete_with_the_text_of_the_prompt(client, artifacts):
    with load_model(artifacts["translator"]) as model:
        wanted = model.generate(TEXTS, max_new_tokens=10)
    found = client.completions.create(model="translator", prompt=TEXTS, max_tokens=10)
    assert [choice.text for choice in found.choices] == [each.text for each in wanted]


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Is it warm?"}]


def test_chat_answers_the_prompt_of_the_template(client, artifacts):
    prompt = "system: Be brief.\nuser: Is it warm?\nassistant:"
    with load_model(artifacts["chatter"]) as model:
        ids = model.definition.tokenizer.encode_untruncated([prompt], special=False)[0].ids
        (wanted,) = model.generate([prompt], max_new_tokens=12)
        special = model.definition.tokenizer.encode_untruncated([prompt], special=True)[0].ids
    found = client.chat.completions.create(model="chatter", messages=MESSAGES, max_tokens=12)
    assert found.usage.prompt_tokens == len(ids)
    if ids == special:  # the tokenizer adds none of its own
        assert found.choices[0].message.content == wanted.text
    parts = [{"type": "text", "text": "Is it "}, {"type": "text", "text": "warm?"}]
    messages = [MESSAGES[0], {"role": "user", "content": parts}]
    asked = {"model": "chatter", "messages": messages, "max_completion_tokens": 12}
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == (
        found.choices[0].message.content
    )
    assert chunks[-1].choices[0].finish_reason == found.choices[0].finish_reason == "length"


def test_chat_without_a_length_ends_at_the_models_or_servers_limit(client):
    found = client.chat.completions.create(model="chatter", messages=MESSAGES)
    assert found.usage.total_tokens == 128 or found.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"prompt": 3}, "prompt", "expected a string or a list"),
        ({}, "prompt", "prompt is missing, expected a string or a list"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "max_tokens: found the number 0"),
        ({"prompt": "a", "max_tokens": 2000}, "max_tokens", "expected at most 1024"),
        ({"prompt": "a", "temperature": 3}, "temperature", "temperature: found the number 3"),
        ({"prompt": "a", "top_p": 0}, "top_p", "top_p"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "expected at most 20"),
        ({"prompt": "a", "logprobs": True}, "logprobs", "logprobs: found true"),
        ({"prompt": "a", "logprobs": 2, "echo": True}, "logprobs", "the tokens of a prompt"),
        ({"prompt": "a", "presence_penalty": 2.5}, "presence_penalty", "expected at most 2.0"),
        ({"prompt": "a", "n": 2**63}, "n", "expected at most 64"),
        ({"prompt": "a", "best_of": True}, "best_of", "found true, which is not supported"),
        ({"prompt": "a", "stop": ["b", *[1] * 1000]}, "stop[1]", "found the number 1, expected"),
        ({"prompt": "a", "logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias", "1024 items"),
        ({"prompt": "a", "frequency_penalty": "x"}, "frequency_penalty", "expected a number"),
        (
            {"prompt": "a", "min_p": 0.1},
            "min_p",
            "found the number 0.1, which is not supported",
        ),
        ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty", "expected at least 0.01"),
        ({"prompt": "a", "n": 2, "temperature": 0}, "n", "greedy search has one text"),
        ({"prompt": "a", "n": 20, "temperature": 1}, None, "20 beams or sequences"),
        ({"prompt": "a", "stop": 3}, "stop", "stop"),
        ({"prompt": "a", "stop": ["a"] * 60_000}, None, "found 60000 items, expected at most 16"),
        ({"prompt": "a", "logit_bias": {"7": 101}}, None, "logit_bias.7: found 101"),
        ({"prompt": "a", "logit_bias": {"600": 1}}, "logit_bias", "less than 600"),
        ({"prompt": "a", "logit_bias": [7]}, "logit_bias", "expected an object"),
        (
            {"prompt": ["a"] * 64, "logprobs": 20, "max_tokens": 1000},
            None,
            "1344000 log-probabilities, expected at most 524288",
        ),
        ({"prompt": "pump " * 200}, None, "the model's limit is 128"),
        ({"prompt": ["a", ""], "target_language": "fr"}, None, "target_language"),
    ],
)
def test_wrong_field_is_named_in_openais_format(server, body, param, message):
    for stream in (False, True):
        asked = {"model": "writer", "stream": stream, **body}
        found = server("POST", "/v1/completions", asked)
        assert found.status == 400, found.body
        error = found.json["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert message in error["message"]


@pytest.mark.parametrize(
    ("model", "body", "message"),
    [
        ("writer", {}, "the model has no chat template"),
        ("translator", {}, "which does not chat"),
        ("vectors", {}, "expected a model that generates text"),
        ("chatter", {"messages": []}, "messages is empty"),
        ("chatter", {"messages": [1] * 10_000}, "messages[0]: found the number 1"),
        ("chatter", {"messages": [{"role": "tool", "content": "x"}]}, "no tools"),
        (
            "chatter",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]: found an object, expected a part of the type text",
        ),
        (
            "chatter",
            {"tools": [{"type": "function"}]},
            "tools: found a list, which is not supported",
        ),
        ("chatter", {"logprobs": 3}, "logprobs: found the number 3, expected true or false"),
        ("chatter", {"top_logprobs": 3}, "top_logprobs is 3, but logprobs is not true"),
        ("chatter", {"logprobs": True, "top_logprobs": 21}, "expected at most 20"),
        ("chatter", {"max_tokens": 3, "max_completion_tokens": 4}, "expected one of them"),
    ],
)
def test_chat_that_cannot_be_is_an_error(server, model, body, message):
    found = server("POST", "/v1/chat/completions", {"messages": MESSAGES, "model": model, **body})
    assert found.status == 400
    assert message in found.json["error"]["message"]


def test_fields_that_ask_for_nothing_are_taken(server):
    body = {"logprobs": None, "presence_penalty": 0, "best_of": 1, "min_p": 0, "suffix": ""}
    body |= {"user": "me", "stop": []}
    found = server("POST", "/v1/completions", {"model": "writer", "prompt": "a", **body})
    assert found.status == 200


@pytest.fixture(scope="module")
def chatter(artifacts):
    with load_model(artifacts["chatter"]) as model:
        yield model


def test_completions_have_logprobs(client, writer):
    """They are those of the tokens of the text, alone and in pieces."""
    (wanted,) = writer.generate(TEXTS[:1], max_new_tokens=12, top_logprobs=2)
    asked = {"model": "writer", "prompt": TEXTS[0], "max_tokens": 12, "temperature": 0}
    choice = client.completions.create(**asked, logprobs=2).choices[0]
    found, offsets = choice.logprobs, choice.logprobs.text_offset
    assert choice.text == wanted.text
    assert len(found.tokens) == len(wanted.tokens)
    is_whole = ["\N{REPLACEMENT CHARACTER}" not in token for token in found.tokens]
    assert sum(is_whole) > 3  # others are parts of characters
    for token, offset, whole in zip(found.tokens, offsets, is_whole, strict=True):
        assert not whole or choice.text.startswith(token, offset)
    assert offsets == sorted(offsets)
    assert found.token_logprobs == pytest.approx(
        [entry.logprob for entry in wanted.logprobs], abs=OUTPUTS
    )
    for top, token, entry in zip(found.top_logprobs, found.tokens, wanted.logprobs, strict=True):
        assert top[token] == max(top.values()) == pytest.approx(entry.logprob, abs=OUTPUTS)
        assert 0 < len(top) <= 2
    pieces = [
        chunk.choices[0] for chunk in client.completions.create(**asked, logprobs=2, stream=True)
    ]
    assert [token for piece in pieces for token in piece.logprobs.tokens] == found.tokens
    assert [at for piece in pieces for at in piece.logprobs.text_offset] == offsets
    assert client.completions.create(**asked).choices[0].logprobs is None


def test_chat_has_logprobs(client, chatter):
    wanted = chatter.chat(MESSAGES, max_new_tokens=12, top_logprobs=3)
    asked = {"model": "chatter", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    asked |= {"logprobs": True, "top_logprobs": 3}
    choice = client.chat.completions.create(**asked).choices[0]
    content = choice.logprobs.content
    joined = b"".join(bytes(entry.bytes) for entry in content).decode(errors="replace")
    assert joined.strip() == choice.message.content.strip()
    assert len(content) == len(wanted.logprobs)
    for entry, expected in zip(content, wanted.logprobs, strict=True):
        assert entry.logprob == pytest.approx(expected.logprob, abs=OUTPUTS)
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(
            [logprob for _, logprob in expected.top], abs=OUTPUTS
        )
        assert entry.top_logprobs[0].token == entry.token  # greedy
    chunks = list(client.chat.completions.create(**asked, stream=True))
    streamed = [
        entry
        for chunk in chunks
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]


def test_tokens_behind_a_stop_string_have_no_logprobs(client, writer):
    (whole,) = writer.generate(TEXTS[:1], max_new_tokens=12)
    stop = whole.text[5:8]
    asked = {"model": "writer", "prompt": TEXTS[0], "max_tokens": 12, "temperature": 0}
    choice = client.completions.create(**asked, stop=[stop], logprobs=0).choices[0]
    assert choice.finish_reason == "stop"
    assert max(choice.logprobs.text_offset) < len(choice.text) < len(whole.text)
    assert len(choice.logprobs.tokens) < 12
    pieces = client.completions.create(**asked, stop=[stop], logprobs=0, stream=True)
    tokens = [token for chunk in pieces for token in chunk.choices[0].logprobs.tokens]
    assert tokens == choice.logprobs.tokens


def test_penalties_and_biases_reach_the_model(client, writer):
    options = {"frequency_penalty": 1.5, "presence_penalty": 0.5, "logit_bias": {7: 3}}
    options["repetition_penalty"] = 1.2
    (wanted,) = writer.generate(TEXTS[:1], max_new_tokens=12, **options)
    (plain,) = writer.generate(TEXTS[:1], max_new_tokens=12)
    asked = {"model": "writer", "prompt": TEXTS[0], "max_tokens": 12, "temperature": 0}
    asked |= {"frequency_penalty": 1.5, "presence_penalty": 0.5, "logit_bias": {"7": 3}}
    extra = {"repetition_penalty": 1.2, "top_k": -1}
    found = client.completions.create(**asked, extra_body=extra)
    assert found.choices[0].text == wanted.text != plain.text


def test_answers_keep_to_a_json_schema(client, monkeypatch):
    pytest.importorskip("llguidance", reason="pip install 'enginery[guided]'")
    monkeypatch.setattr(guide, "_WHITESPACE", " ?")  # random weights would write nothing else
    schema = {
        "type": "object",
        "properties": {"warm": {"type": "boolean"}, "place": {"enum": ["Paris", "London"]}},
        "required": ["warm", "place"],
        "additionalProperties": False,
    }
    described = {"type": "json_schema", "json_schema": {"name": "pump", "schema": schema}}
    asked = {"messages": MESSAGES, "model": "chatter", "max_tokens": 60, "temperature": 0}
    found = client.chat.completions.create(**asked, response_format=described)
    text = found.choices[0].message.content
    answer = json.loads(text)
    assert (answer["warm"] in (True, False), answer["place"] in ("Paris", "London")) == (True, True)
    assert found.choices[0].finish_reason == "stop"
    chunks = client.chat.completions.create(**asked, response_format=described, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    found = client.chat.completions.create(**asked, response_format={"type": "json_object"})
    assert found.choices[0].message.content.lstrip().startswith("{")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"type": "json_schema"}, "response_format.json_schema.schema is null"),
        ({"type": "json_schema", "json_schema": {"schema": 3}}, "found the number 3"),
        ({"type": "grammar"}, "response_format.type: found the string 'grammar'"),
        (
            {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 70_000]}}},
            "expected at most 65536 characters",
        ),
    ],
)
def test_response_format_that_cannot_be_is_an_error(server, body, message):
    asked = {"model": "chatter", "messages": MESSAGES, "response_format": body}
    found = server("POST", "/v1/chat/completions", asked)
    assert found.status == 400
    assert message in found.json["error"]["message"]


def test_generate_has_the_tokens_of_text_generation_inference(server, writer):
    (wanted,) = writer.generate(TEXTS[:1], max_new_tokens=5, top_logprobs=2)
    body = {"model": "writer", "inputs": TEXTS[0]}
    for path, options in (("/generate", {}), ("/generate_stream", {})):
        parameters = {"max_new_tokens": 5, "top_logprobs": 2, **options}
        found = server("POST", path, {**body, "parameters": parameters})
        last = found.json or json.loads(found.body.decode().strip().split("data: ")[-1])
        details = last["details"]
        assert [token["id"] for token in details["tokens"]] == list(wanted.tokens)
        assert [len(top) for top in details["top_tokens"]] == [2] * len(wanted.tokens)
        assert details["top_tokens"][0][0]["logprob"] == details["tokens"][0]["logprob"]


# -- together -----------------------------------------------------------------------------------


def test_clients_that_join_and_leave_get_what_they_get_alone(server, writer):
    """Sixteen clients with prompts and lengths of their own; some leave in the middle."""
    chance = random.Random(3)
    prompts = [f"{text} {'pump ' * chance.randrange(8)}" for text in TEXTS * 6][:16]
    lengths = [chance.randrange(5, 60) for _ in prompts]
    leaves = [chance.random() < 0.25 for _ in prompts]
    delays = [chance.random() * 0.3 for _ in prompts]
    wanted = [
        writer.generate([prompt], max_new_tokens=length)[0].text
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    scheduler, most = scheduler_of(server), 0

    async def one(client, place):
        nonlocal most
        await asyncio.sleep(delays[place])
        text = ""
        async with await client.completions.create(
            model="writer", prompt=prompts[place], max_tokens=lengths[place], stream=True
        ) as stream:
            async for chunk in stream:
                text += chunk.choices[0].text
                most = max(most, scheduler.rows)
                if leaves[place] and len(text) > 3:
                    break
        return text

    async def everyone():
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=WAIT
        ) as client:
            return await asyncio.gather(*(one(client, place) for place in range(16)))

    for place, found in enumerate(asyncio.run(everyone())):
        if leaves[place]:
            assert wanted[place].startswith(found)
        else:
            assert found == wanted[place]
    assert most > 4  # they have run together
    wait_until(lambda: scheduler.rows == 0)


def test_inputs_of_an_encoder_decoder_run_in_groups(server, artifacts, monkeypatch):
    with load_model(artifacts["translator"]) as model:
        wanted = {text: model.generate([text], max_new_tokens=6)[0].text for text in TEXTS}
    gate = Gate(server, monkeypatch, "translator")
    found = {}

    def ask(text):
        body = {"inputs": text, "model": "translator", "parameters": {"max_new_tokens": 6}}
        found[text] = server("POST", "/generate", body).json["generated_text"]

    first, *others = [threading.Thread(target=ask, args=(text,)) for text in TEXTS]
    first.start()
    gate.wait_entered()
    for each in others:
        each.start()
    scheduler = scheduler_of(server, "translator")
    wait_until(lambda: scheduler.queue.rows == 2)
    gate.stay_open()
    for each in (first, *others):
        each.join(WAIT)
    assert found == wanted
    assert gate.rows[0] == 1
    assert max(gate.rows) == 2  # those that came later have run together


def test_client_that_disconnects_frees_its_rows(server, gate):
    scheduler = scheduler_of(server)
    body = {"inputs": "A", "model": "writer", "parameters": {"max_new_tokens": 100}}
    with server.client.stream("POST", "/generate_stream", json=body) as response:
        gate.wait_entered()
        assert next(response.iter_lines()).startswith("data: ")
        assert scheduler.rows == 1
        assert (
            'enginery_running_rows{model="writer"} 1.0' in server("GET", "/metrics").body.decode()
        )
    other = threading.Thread(target=server, args=("POST", "/generate", {**body, "inputs": TEXTS}))
    other.start()
    wait_until(lambda: scheduler.queue.rows == 3)
    wait_until(lambda: len(scheduler._requests) == 1)  # the first one has gone
    gate.allow()
    gate.wait_entered()
    assert gate.rows[-1] == 3  # only those of the other
    gate.stay_open()
    other.join(WAIT)


def test_client_that_leaves_the_queue_is_not_run(server, gate):
    scheduler = scheduler_of(server)
    body = {"inputs": ["A"] * 16, "model": "writer", "parameters": {"max_new_tokens": 3}}
    first = threading.Thread(target=server, args=("POST", "/generate", body))
    first.start()
    gate.wait_entered()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/generate", json={**body, "inputs": "B"}, timeout=0.5)
    wait_until(lambda: scheduler.queue.rows == 0)
    assert len(scheduler._requests) == 1
    gate.stay_open()
    first.join(WAIT)
    assert set(gate.rows) == {16}


def test_failing_step_fails_its_requests_and_the_server_goes_on(server, gate, writer):
    body = {"inputs": "A", "model": "writer", "parameters": {"max_new_tokens": 5}}
    found = []

    def ask():
        found.append(server("POST", "/generate", body))

    asking = [threading.Thread(target=ask) for _ in range(3)]
    asking[0].start()
    gate.wait_entered()
    for each in asking[1:]:
        each.start()
    scheduler = scheduler_of(server)
    wait_until(lambda: scheduler.queue.rows == 2)
    gate.allow()
    gate.wait_entered()  # they run together now
    gate.failing = InputError("the graph fails on purpose.")
    gate.stay_open()
    for each in asking:
        each.join(WAIT)
    assert gate.rows[:2] == [1, 3]
    assert [each.status for each in found] == [503] * 3
    message = "generating several texts together failed: the graph fails on purpose."
    assert all(message in each.json["error"] for each in found)
    answer = server("POST", "/generate", body).json
    assert answer["generated_text"] == writer.generate(["A"], max_new_tokens=5)[0].text


def test_error_in_the_middle_of_a_stream_is_an_event(server, gate, client):
    stream = client.completions.create(model="writer", prompt="A", max_tokens=20, stream=True)
    gate.wait_entered()
    gate.failing = InputError("the graph fails on purpose.")
    gate.stay_open()
    with pytest.raises(openai.APIError, match="the graph fails on purpose"):
        list(stream)
    assert server.models.ready


def test_provider_that_is_lost_fails_the_model(artifacts, monkeypatch):
    with Running({"writer": artifacts["writer"]}, ServeConfig(access_log="off")) as server:
        runner = server.models.get("writer").backend.runner

        def lost(*_):
            raise InputError("the device is lost.")

        monkeypatch.setattr(runner, "run_values", lost)
        found = server("POST", "/generate", {"inputs": "A"})
        assert found.status == 503
        assert "the provider can no longer run the model" in found.json["error"]
        assert server("GET", "/health").status == 503


def test_prompts_that_fail_together_run_one_by_one(server, monkeypatch, writer):
    decoder = server.models.get("writer").backend.rows.decoder
    begin, sizes = decoder.begin, []

    def begin_one(prompts, need, inputs=None):
        sizes.append(len(prompts))
        if len(prompts) > 1:
            raise InputError("not enough memory.")
        return begin(prompts, need, inputs)

    monkeypatch.setattr(decoder, "begin", begin_one)
    body = {"inputs": TEXTS, "model": "writer", "parameters": {"max_new_tokens": 5}}
    found = server("POST", "/generate", body)
    assert [each["generated_text"] for each in found.json] == [
        each.text for each in writer.generate(TEXTS, max_new_tokens=5)
    ]
    assert sizes == [3, 1, 1, 1]


# -- limits, and their errors -------------------------------------------------------------------


def test_full_queue_is_429(artifacts, monkeypatch):
    config = ServeConfig(access_log="off", queue_inputs=1, generation_rows=1)
    with Running({"writer": artifacts["writer"]}, config) as server:
        gate, scheduler = Gate(server, monkeypatch), scheduler_of(server)
        body = {"prompt": "A", "max_tokens": 3}
        asking = [
            threading.Thread(target=server, args=("POST", "/v1/completions", body))
            for _ in range(2)
        ]
        asking[0].start()
        gate.wait_entered()
        asking[1].start()
        wait_until(lambda: scheduler.queue.rows == 1)
        assert scheduler.waiting == 1
        metrics = server("GET", "/metrics").body.decode()
        assert 'enginery_waiting_requests{model="writer"} 1.0' in metrics
        for stream in (False, True):
            found = server("POST", "/v1/completions", {**body, "stream": stream})
            assert found.status == 429
            assert found.json["error"]["code"] == "rate_limit_exceeded"
            assert "retry-after" in found.headers
        gate.stay_open()
        for each in asking:
            each.join(WAIT)


def test_models_own_length_is_cut_to_the_servers_limit(artifacts):
    config = ServeConfig(access_log="off", max_new_tokens=7)
    with Running({"writer": artifacts["writer"]}, config) as server:
        (found,) = server("POST", "/generate", {"inputs": ["A"]}).json
        assert found["details"]["generated_tokens"] == 7
        long = server("POST", "/generate", {"inputs": "A", "parameters": {"max_length": 100}}).json
        assert long["details"]["generated_tokens"] == 7


@pytest.mark.more
def test_step_that_hangs_makes_the_model_stuck(artifacts, monkeypatch):
    config = ServeConfig(access_log="off", stuck_after=0.2)
    with Running({"writer": artifacts["writer"]}, config) as server:
        gate, model = Gate(server, monkeypatch), server.models.get("writer")
        asking = threading.Thread(target=server, args=("POST", "/generate", {"inputs": "A"}))
        asking.start()
        gate.wait_entered()
        wait_until(lambda: model.state == "stuck")
        assert server("POST", "/generate", {"inputs": "A"}).status == 503
        gate.stay_open()
        asking.join(WAIT)
        wait_until(lambda: model.state == "ready")


def test_stream_goes_on_while_its_model_is_replaced(artifacts, monkeypatch, writer):
    with Running({"writer": artifacts["writer"]}, ServeConfig(access_log="off")) as server:
        gate, old = Gate(server, monkeypatch), server.models.get("writer")
        body = {"inputs": "A", "parameters": {"max_new_tokens": 30}}
        found = []
        asking = threading.Thread(
            target=lambda: found.append(server("POST", "/generate_stream", body))
        )
        asking.start()
        gate.wait_entered()
        reloading = asyncio.run_coroutine_threadsafe(
            server.models.reload("writer"), server.models._loop
        )
        assert reloading.result(WAIT)["writer"].swapped
        assert server("POST", "/generate", body).status == 200
        gate.stay_open()
        asking.join(WAIT)
        (wanted,) = writer.generate(["A"], max_new_tokens=30)
        assert events(found[0].body.decode())[-1]["generated_text"] == wanted.text
        wait_until(lambda: old.state == "closed" and not old._schedulers[-1].alive)


def test_metrics_count_tokens_and_the_time_to_the_first(server):
    def read():
        lines = server("GET", "/metrics").body.decode().splitlines()
        pairs = [line.rpartition(" ") for line in lines if not line.startswith("#")]
        return defaultdict(float, {name: float(value) for name, _, value in pairs})

    before = read()
    body = {"inputs": TEXTS, "model": "writer", "parameters": {"max_new_tokens": 5}}
    server("POST", "/generate", body)
    server("POST", "/generate_stream", {**body, "inputs": "A"})
    tokens = 'enginery_generated_tokens_total{model="writer"}'
    wait_until(lambda: read()[tokens] - before[tokens] == 20)
    after = read()
    count = 'enginery_first_token_seconds_count{model="writer"}'
    assert after[count] - before[count] == 2
    inputs = 'enginery_inputs_total{model="writer"}'
    assert after[inputs] - before[inputs] == 4
    assert 'enginery_running_rows{model="writer"}' in after
    assert after['enginery_running_rows{model="writer"}'] == 0
    assert 'enginery_running_rows{model="vectors"}' not in after


def test_info_has_what_a_form_needs(server):
    info = server("GET", "/models/writer/info").json
    assert info["method"] == "generate"
    assert info["generation"] == {"max_rows": 16, "max_new_tokens": 1024}
    assert info["fields"] == [{"name": "text", "optional": False}]
    assert info["options"]["temperature"]["type"] == "number"
    assert server("POST", "/predict/writer", info["example"]).status == 200
    assert server("GET", "/health").status == 200
    assert server("GET", "/v2/models/writer").json["inputs"][0]["name"] == "input_ids"

"""Texts that a tokenizer fails on, panics on or never comes back from, sent to a real server."""

import threading

import httpx
import pytest

from tests.hostile_tokenizers import ENDLESS, PANIC, spoiled_copy
from tests.serve.test_service import WAIT, serving

LIST = ["the pump is warm"] * 200
"""Long enough to be spread over threads."""


@pytest.fixture
def spoiled(exported, tmp_path):
    """`spoiled("panics")`: the path of a model that embeds, with such a tokenizer."""

    def make(kind):
        artifact = exported("bert", "feature-extraction")
        return spoiled_copy(artifact, tmp_path / kind, kind).path

    return make


class Sent:
    """A request that is on its way, in a thread."""

    def __init__(self, server, path, body):
        self.answer = None
        self._request = server.url + path, body
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def _send(self):
        url, body = self._request
        try:
            self.answer = httpx.post(url, json=body, timeout=10 * WAIT)
        except httpx.TransportError as error:
            self.answer = error

    def wait(self):
        self._thread.join(WAIT)
        return self.answer


def require_answers(server, name):
    """One text and a list get their vectors."""
    for inputs in ("the pump", LIST):
        answer = server.client.post(f"/predict/{name}", json={"inputs": inputs})
        assert answer.status_code == 200, answer.text


@pytest.mark.more
def test_text_that_cannot_be_tokenized_is_refused_on_every_route(spoiled):
    bytes_of = {"name": "text", "datatype": "BYTES", "shape": [2], "data": ["the pump", PANIC]}
    asked = [
        ("/embed", {"inputs": ["the pump", PANIC]}, 422, "text 1"),
        ("/embed", {"inputs": PANIC}, 422, "text 0"),
        ("/embed", {"inputs": [*LIST, PANIC]}, 422, "text 200"),
        ("/tokenize", {"inputs": [PANIC]}, 422, "text 0"),
        ("/predict/m", {"inputs": PANIC}, 422, "text 0"),
        ("/v1/embeddings", {"model": "m", "input": PANIC}, 400, "text 0"),
        ("/v2/models/m/infer", {"inputs": [bytes_of]}, 422, "text 1"),
    ]
    with serving(f"m={spoiled('panics')}") as server:
        for path, body, status, which in asked:
            answer = server.client.post(path, json=body)
            assert answer.status_code == status, (path, answer.text)
            assert f"{which} cannot be tokenized" in answer.text, path
            assert "retry-limit-in-match over" in answer.text, path
        require_answers(server, "m")
        assert server.client.get("/health/ready").status_code == 200
        server.process.terminate()
        assert server.process.wait(WAIT) == 0
        assert not any("Traceback" in line for line in server.lines)


@pytest.mark.more
def test_texts_that_hang_block_neither_others_nor_shutdown(spoiled, exported):
    plain = exported("bert", "feature-extraction").path
    models = f"endless={spoiled('never_returns')}", f"plain={plain}"
    with serving(*models, options=("--stuck-after", "600", "--grace", "1")) as server:
        one = Sent(server, "/predict/endless", {"inputs": ENDLESS})
        # More of them than the machine has cores would fill the threads of `tokenizers`.
        several = Sent(server, "/predict/endless", {"inputs": [ENDLESS] * 20})
        for _ in range(3):
            require_answers(server, "plain")
            require_answers(server, "endless")
            tokens = server.client.post("/models/endless/tokenize", json={"inputs": "the pump"})
            assert tokens.status_code == 200
        assert (one.answer, several.answer) == (None, None)
        server.process.terminate()
        assert server.process.wait(WAIT) == 0
        assert one.wait().status_code == several.wait().status_code == 503
        assert not any("does not end" in line for line in server.lines)


@pytest.mark.more
def test_text_that_hangs_replaces_the_process(spoiled):
    endless = spoiled("never_returns")
    with serving(f"m={endless}", options=("--stuck-after", "1")) as server:
        sent = Sent(server, "/predict/m", {"inputs": [*LIST, ENDLESS]})
        assert server.says("exited because it was stuck; it is replaced")
        assert server.says("m is stuck: tokenizing a text has been running for")
        assert sent.wait().status_code == 503
        server.wait_ready()
        require_answers(server, "m")

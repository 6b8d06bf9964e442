"""The clients of `make gpu-check`, which check what a server answers."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.gpu_check.load import compare
from benchmarks.gpu_check.parts import generate
from benchmarks.gpu_check.server import Server

TEXTS = ["a", "b", "c"]
VECTORS = {text: np.eye(4)[index].tolist() for index, text in enumerate(TEXTS)}


class Handler(BaseHTTPRequestHandler):
    """Answers texts with their vectors, and what the server's `fails` returns otherwise."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        answer = self.server.answer(body["inputs"])
        if answer is None:
            self.close_connection = True
            return
        status, document = answer
        self.send_response(status)
        if self.path == "/generate_stream":
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for event in document:
                content = f"data: {event}\n\n".encode()
                self.wfile.write(b"%x\r\n%b\r\n" % (len(content), content))
            self.wfile.write(b"0\r\n\r\n")
            return
        content = json.dumps(document).encode()
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@contextmanager
def answering(answer):
    """Serve in threads of this process; yield a `Server`."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.answer = answer
        threading.Thread(target=server.serve_forever, daemon=True).start()
        process = SimpleNamespace(pid=0, poll=lambda: None)
        try:
            yield Server(process, server.server_address[1])
        finally:
            server.shutdown()


def vectors_of(inputs):
    texts = [inputs] if isinstance(inputs, str) else inputs
    return [VECTORS[text] for text in texts]


def run_load(answer, *, connections=2, route="/embed", bodies=None, **options):
    bodies = bodies or [{"inputs": text} for text in TEXTS]
    expected = np.concatenate([vectors_of(body["inputs"]) for body in bodies])
    with answering(answer) as server:
        return server.load(
            bodies,
            connections=connections,
            seconds=0.3,
            route=route,
            expected=None if options.get("streamed") else expected,
            check_every=1,
            **options,
        )


def test_every_answer_that_is_checked_is_right():
    result = run_load(lambda inputs: (200, vectors_of(inputs)))
    assert result.answered == result.checked == len(result.latencies_ms) > 6
    assert (result.wrong, result.refused, result.lost) == (0, 0, ())
    assert result.least_cosine == pytest.approx(1.0)
    assert 0 < result.percentile(50) <= result.percentile(99)
    assert result.per_second == pytest.approx(result.answered / result.seconds)


def test_answers_of_other_texts_are_wrong():
    result = run_load(lambda inputs: (200, vectors_of("a" if inputs == "b" else inputs)))
    assert 0 < result.wrong < result.checked
    assert result.least_cosine == pytest.approx(0.0)


def test_answers_of_other_shapes_and_numbers_are_wrong():
    one = np.eye(4)[:1]
    for document in ([[1.0, 0.0]], [[float("nan")] * 4], [], [[0.0] * 4]):
        assert compare([(0, json.dumps(document).encode())], one, 1)["wrong"] == 1
    assert compare([(0, b"[[2.0, 0, 0, 0]]")], one, 1)["wrong"] == 0


def test_refused_requests_are_counted_by_their_status():
    calls = iter(range(10**6))

    def sometimes(inputs):
        status = (200, 503, 429)[next(calls) % 3]
        return status, vectors_of(inputs)

    result = run_load(sometimes, connections=1)
    assert result.refused > result.server_errors > 0
    assert result.statuses["429"] > 0
    assert result.answered == len(result.latencies_ms)


def test_lost_connections_are_counted_and_the_others_go_on():
    lock = threading.Lock()
    dead = []

    def closes_one(inputs):
        with lock:
            if not dead:
                dead.append(inputs)
                return None
        return 200, vectors_of(inputs)

    result = run_load(closes_one, connections=4)
    assert len(result.lost) == 1
    assert "ConnectionResetError" in result.lost[0]
    assert result.answered > 10


def test_large_requests_and_their_answers_come_whole():
    many = {"inputs": TEXTS * 30_000}
    result = run_load(
        lambda inputs: (200, vectors_of(inputs)),
        connections=1,
        bodies=[many, {"inputs": ["c"] * 90_000}],
    )
    assert result.answered > 0
    assert result.wrong == 0
    assert result.checked == result.answered


def test_streams_are_read_to_their_end():
    result = run_load(lambda inputs: (200, [inputs] * 5), route="/generate_stream", streamed=True)
    assert result.answered > 2
    assert result.events == 5 * result.answered


def test_load_has_begun_when_during_is_called():
    began = []
    result = run_load(
        lambda inputs: (200, vectors_of(inputs)), during=lambda: began.append(time.perf_counter())
    )
    assert len(began) == 1
    assert result.seconds >= 0.3


def test_first_difference_of_each_row():
    assert generate.first_differences([[1, 2, 3], [1, 9, 3], [7, 7, 7]], [[1, 2, 3]] * 3) == [
        3,
        1,
        0,
    ]
    assert generate.first_differences([[1, 2]], [[1, 2, 3]]) == [3]


def test_tokens_are_judged_by_the_logits_after_the_tokens_before_them():
    torch = pytest.importorskip("torch")
    exact = torch.zeros(1, 2, 4)
    exact[0, :, 1], exact[0, :, 2] = 5.0, 4.0
    wide = SimpleNamespace(logits=lambda rows, tokens: exact)
    narrow = SimpleNamespace(logits=lambda rows, tokens: exact + 0.25)
    assert generate.distances(wide, narrow, [[0]], [[1, 1]]) == (0.0, 0.25)
    assert generate.distances(wide, narrow, [[0]], [[1, 2]]) == (1.0, 0.25)


def test_prompts_are_the_same_for_each_number_of_rows():
    assert generate.prompts(200, 3)[:2] == generate.prompts(200, 2)
    assert all(10 <= token < 200 for row in generate.prompts(200, 3) for token in row)
    assert generate.case_name(1, 1) == "1 row"
    assert generate.case_name(8, 4) == "8 rows, 4 beams"

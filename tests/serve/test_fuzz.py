"""Malformed requests to every route of the whole server, while a good client is served."""

import http.client
import json
import random
import re
import socket
import threading
import time
from collections import Counter

import pytest

from enginery.serve.app import ENDPOINTS

MODELS = ("vectors", "mood", "ranker", "names", "reader", "filler", "photos", "pictures", "nobody")
TEXT = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["warm"]}
IDS = {"name": "input_ids", "datatype": "INT64", "shape": [1, 2], "data": [5, 6]}
BODIES = (
    {"inputs": ["a"] * 70},
    {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1},
    {"inputs": "a", "parameters": {"candidate_labels": ["b", "c"], "multi_label": True}},
    {"inputs": "The pump runs.", "normalize": True, "truncate": False, "dimensions": 4},
    {"inputs": ["a", [5, 6, 7]], "prompt_name": "", "model": "vectors"},
    {"inputs": [["a"], ["a", "b"]], "raw_scores": True, "model": "mood"},
    {"query": "who?", "texts": ["a", "b"], "return_text": True},
    {"inputs": {"source_sentence": "a", "sentences": ["b", "c"]}, "parameters": {"truncate": True}},
    {"input": ["a", "b"], "encoding_format": "base64", "dimensions": 3, "model": "vectors"},
    {"inputs": {"question": "who?", "context": "Ada"}, "parameters": {"top_k": 2}},
    {"inputs": "the [MASK] runs", "parameters": {"top_k": 3}},
    {"ids": [[5, 6], [7]], "skip_special_tokens": False},
    {"inputs": [TEXT], "id": "7", "outputs": [{"name": "score"}], "parameters": {"top_k": 1}},
    {"inputs": [IDS, {**IDS, "name": "attention_mask"}, {**IDS, "name": "token_type_ids"}]},
    {"inputs": "iVBORw0KGgo=", "parameters": {"top_k": 1}},
    {"inputs": ["a"] * 70, "model": "vectors"},
    {"inputs": "a", "parameters": {"max_new_tokens": 4, "num_beams": 2}, "model": "writer"},
    {"prompt": ["a"], "max_tokens": 3, "temperature": 0.5, "n": 2, "stop": "x", "model": "writer"},
    {"prompt": "a", "stream": True, "echo": True, "seed": 1, "model": "writer"},
    {"messages": [{"role": "user", "content": "a"}], "stream": True, "model": "writer"},
    {"model": "mood"},
)
VALUES = (
    *(None, True, -1, 0, 3, 2**31, 10**30, 1.5, 1e308, "", "x", "é" * 50, "\x00"),
    *("../../etc/passwd", [], [[]], {}, [None], ["a"] * 70, {"a": {}}, "[MASK] " * 200),
    *([5] * 600,),
)
HEADERS = (
    *({}, {}, {}, {"content-type": "application/json"}, {"content-type": "image/png"}),
    *({"content-type": "multipart/form-data; boundary=x"}, {"content-encoding": "gzip"}),
    *({"inference-header-content-length": "20"}, {"x-request-id": "r" * 200}),
    *({"accept": "application/openmetrics-text"}, {"traceparent": "00-zz-1-1"}),
)
PIECES = (
    *(b"\r\n", b"\0", b" ", b"%", b"\xff\xfe", b"Content-Length: 7\r\n"),
    *(b"Content-Length: -1\r\n", b"Transfer-Encoding: chunked\r\n"),
    *(b"Upgrade: websocket\r\nConnection: upgrade\r\n", b"Expect: 100-continue\r\n", b"HTTP/2.0"),
    *(b"0\r\n\r\n", b"X" * 9000, b"X: y\r\n" * 120, b"\x16\x03\x01"),
    *(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",),
)


def mutated(rng, value):
    """A copy of a JSON value with some of its parts changed."""
    if rng.random() < 0.15:
        return rng.choice(VALUES)
    if isinstance(value, dict):
        found = {key: mutated(rng, each) for key, each in value.items() if rng.random() > 0.05}
        if rng.random() < 0.1:
            found[rng.choice(("inputs", "model", "parameters", "x"))] = rng.choice(VALUES)
        return found
    return [mutated(rng, each) for each in value] if isinstance(value, list) else value


def wounded(rng, data):
    """Bytes with some of them changed, cut or put in."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(3)
        if kind == 0:
            del data[at : at + rng.randint(1, 12)]
        elif kind == 1:
            data[at:at] = rng.choice(PIECES)
        else:
            data[at : at + 4] = rng.randbytes(4)
    return bytes(data)


def request_of(rng):
    """Method, path, headers and body of a request."""
    endpoint = rng.choice(ENDPOINTS)
    path = endpoint.pattern.replace("{model}", rng.choice(MODELS)).replace("{version}", "1")
    body = json.dumps(mutated(rng, rng.choice(BODIES))).encode()
    if rng.random() < 0.1:
        body = wounded(rng, body)
    method = endpoint.method if rng.random() > 0.03 else rng.choice(("PUT", "OPTIONS", "HEAD"))
    if endpoint.path == "/admin/reload":  # off without a key
        body = b""
    return method, path, dict(rng.choice(HEADERS)), body if method != "HEAD" else b""


def send(connection, rng):
    """Send one request; return its status."""
    method, path, headers, body = request_of(rng)
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    answer = response.read()
    if response.status >= 400 and method != "HEAD":
        assert json.loads(answer)["error"], (method, path, answer)
    return response.status, (method, path, headers, body)


def send_raw(address, rng):
    """Send bytes that are hardly HTTP; return the statuses that come back."""
    method, path, headers, body = request_of(rng)
    lines = [f"{method} {path} HTTP/1.1", "Host: a", *(f"{k}: {v}" for k, v in headers.items())]
    head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode()
    with socket.create_connection(address, timeout=30) as connection:
        try:
            connection.sendall(wounded(rng, head) + body)
            connection.shutdown(socket.SHUT_WR)
            heard = b""
            while part := connection.recv(65536):
                heard += part
        except OSError:
            return []
    return [int(found) for found in re.findall(rb"HTTP/1\.1 (\d+) ", heard)]


def strike(running, rng, count, results):
    """Send so many requests; add how often each status came, and faults, to the results."""
    statuses, faults = Counter(), []
    address = ("127.0.0.1", running.port)
    connection = http.client.HTTPConnection(*address, timeout=60)
    for number in range(count):
        if number % 8 == 7:
            for status in send_raw(address, rng):
                statuses[status] += 1
                if status >= 500 and status != 503:
                    faults.append((status, "raw"))
            continue
        status, request = send(connection, rng)
        statuses[status] += 1
        if status >= 500 and status != 503:
            faults.append((status, request))
    connection.close()
    results.append((statuses, faults))


@pytest.mark.more
@pytest.mark.parametrize("count", [2000, pytest.param(30_000, marks=pytest.mark.slow)])
def test_no_request_is_a_fault_and_a_good_client_is_served_meanwhile(running, count):
    body = {"inputs": ["The pump runs.", "a"], "model": "vectors"}
    wanted = running("POST", "/embed", body).json
    over, served = threading.Event(), []

    def good():
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
        while not over.is_set():
            connection.request("POST", "/embed", json.dumps(body))
            response = connection.getresponse()
            found = json.loads(response.read())
            served.append(response.status == 200 and _near(found, wanted))
            time.sleep(0.005)
        connection.close()

    client = threading.Thread(target=good)
    client.start()
    try:
        statuses, faults = Counter(), []
        threads, found = [], []
        for seed in range(4):
            arguments = (running, random.Random(seed), count // 4, found)
            threads.append(threading.Thread(target=strike, args=arguments))
            threads[-1].start()
        for thread in threads:
            thread.join()
    finally:
        over.set()
        client.join()
    assert len(found) == 4, "a thread ended with an error"
    for each, wrong in found:
        statuses += each
        faults += wrong
    assert not faults, faults[:3]
    assert len(served) > 20
    assert all(served)
    assert {200, 400, 404, 405, 413, 422} <= set(statuses), statuses
    assert sum(statuses.values()) > 0.8 * count


def _near(found, wanted):
    return all(
        abs(a - b) < 1e-4
        for row, known in zip(found, wanted, strict=True)
        for a, b in zip(row, known, strict=True)
    )

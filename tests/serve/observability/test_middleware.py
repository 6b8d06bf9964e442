"""What the outermost layer adds to a response, counts, and reports."""

import asyncio

import pytest

from enginery.serve.app import answer_shutting_down
from enginery.serve.http.lifecycle import Activity
from enginery.serve.observability.middleware import ObservabilityMiddleware
from tests.serve.observability.application import TIMINGS, App, ask, scope


class Log:
    def __init__(self):
        self.records = []

    def put(self, record):
        self.records.append(record)


def wrapped(app):
    return ObservabilityMiddleware(app, activity=Activity(), shutting_down=answer_shutting_down)


@pytest.fixture
def log():
    return Log()


def test_record_is_filled_and_reported_after_the_response(log):
    app = App(known={"route": "/embed", "model": "minilm", "timings": TIMINGS, "inputs": 2})
    response = ask(app, observed={"access_log": log})
    (record,) = log.records
    assert record is app.record
    assert (record.method, record.path, record.client) == ("POST", "/embed", "10.0.0.7:51234")
    assert (record.status, record.sent_bytes) == (200, 8)
    assert record.ended > record.started
    assert response.body == b"[[0.25]]"


def test_answer_of_a_model_has_the_times_of_text_embeddings_inference():
    app = App(known={"timings": TIMINGS, "characters": 21, "compute_type": "gpu"})
    headers = ask(app).headers
    assert headers["x-compute-type"] == "gpu"
    assert headers["x-compute-characters"] == "21"
    assert headers["x-compute-tokens"] == "7"
    assert headers["x-tokenization-time"] == "0.250"
    assert headers["x-queue-time"] == "1.000"
    assert headers["x-inference-time"] == "2.500"
    assert headers["x-total-time"] == headers["x-compute-time"]
    assert float(headers["x-total-time"]) > 0


@pytest.mark.parametrize("app", [App(), App(status=503, known={"timings": TIMINGS})])
def test_other_answers_have_no_times(app):
    assert set(ask(app).headers) == {"x-request-id"}


@pytest.mark.parametrize("given", [b"abc", b"x" * 128, b"a b~!"])
def test_request_id_of_the_client_is_kept(given):
    assert ask(App(), headers=[(b"x-request-id", given)]).headers["x-request-id"] == given.decode()


@pytest.mark.parametrize("given", [b"", b"x" * 129, b"a\nb", b"a\x7fb", b"\xe9", b"a\tb"])
def test_request_id_that_could_end_a_line_is_replaced(given):
    app = App()
    found = ask(app, headers=[(b"x-request-id", given)]).headers["x-request-id"]
    assert found == app.record.request_id != given.decode("latin-1")
    assert found.isascii()
    assert found


async def test_request_ids_are_unique():
    app, seen = App(), []
    middleware = wrapped(app)

    async def receive():
        return {"type": "http.request", "body": b""}

    async def send(_):
        return

    for _ in range(3):
        await middleware(scope(), receive, send)
        seen.append(app.record.request_id)
    assert len(set(seen)) == 3


def test_activity_counts_what_runs():
    activity, seen = Activity(), []

    async def look():
        seen.append((activity.in_flight, activity.last_request_at))

    app = App(before=look)
    ask(app, activity=activity)
    assert seen == [(1, app.record.started)]
    assert activity.in_flight == 0


def test_draining_server_closes_the_connection_once():
    activity = Activity(draining=True)
    app = App(headers=((b"Connection", b"keep-alive"),))
    found = [pair for pair in ask(app, activity=activity).all_headers if pair[0] == "connection"]
    assert found == [("connection", "close")]
    assert "connection" not in ask(App()).headers


def test_disconnected_client_is_499(log):
    async def application(scope, receive, send):  # which has seen http.disconnect
        scope["state"]["record"].timings = TIMINGS

    assert ask(application, observed={"access_log": log}) is None
    (record,) = log.records
    assert (record.status, record.timings) == (499, None)


def cancel():
    raise asyncio.CancelledError


async def cancelled():
    raise asyncio.CancelledError


def test_request_that_is_cancelled_with_its_client_is_499(log):
    activity = Activity()
    with pytest.raises(asyncio.CancelledError):
        ask(App(before=cancelled), observed={"access_log": log}, activity=activity)
    assert [record.status for record in log.records] == [499]
    assert activity.in_flight == 0


def test_request_cancelled_at_shutdown_is_503(log):
    app = App(before=cancelled, known={"timings": TIMINGS})
    response = ask(app, observed={"access_log": log}, activity=Activity(draining=True))
    assert (response.status, response.headers["connection"]) == (503, "close")
    assert response.body == b'{"error":"the server is shutting down."}'
    assert [(record.status, record.timings) for record in log.records] == [(503, None)]


def test_response_at_shutdown_has_the_format_of_the_protocol():
    other = App(status=503, body=b'{"message":"ending"}')
    observed = {"shutting_down": other}
    activity = Activity(draining=True)
    assert ask(App(before=cancelled), observed=observed, activity=activity).body == other.body


def test_bug_is_500_and_goes_on_to_the_server(log):
    async def bug():
        raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError):
        ask(App(before=bug), observed={"access_log": log})
    assert [record.status for record in log.records] == [500]


def test_body_of_an_answer_to_head_is_not_counted_as_sent(log):
    ask(App(), observed={"access_log": log}, method="HEAD")
    assert log.records[0].sent_bytes == 0


@pytest.mark.parametrize(
    ("client", "seen"), [(("::1", 5), "[::1]:5"), (None, ""), (("10.0.0.7", 0), "10.0.0.7")]
)
def test_client_is_host_and_port(client, seen):
    app = App()
    ask(app, client=client)
    assert app.record.client == seen


def test_state_of_the_server_is_kept():
    app = App()
    ask(app, state={"models": 1})
    assert app.scope["state"] == {"models": 1, "record": app.record}


def test_lifespan_is_passed_on():
    app = App()
    asked = {"type": "lifespan"}
    asyncio.run(wrapped(app)(asked, None, None))
    assert app.scope is asked

"""The page: its policy, and what a person sees of it in a browser."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from enginery.runtime.tasks import find_task
from enginery.serve.page import page_headers, page_html, page_response
from tests.bench.chromium import _WIDEST, Chromium, find_chromium

EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
TASKS = {
    "mood": "text-classification",
    "minilm": "feature-extraction",
    "reader": "question-answering",
    "photos": "image-classification",
    "calls": "automatic-speech-recognition",
    "raw": "audio-xvector",
}
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJg"
    "gg=="
)
EXAMPLES = {
    "question-answering": {"question": "Who?", "context": "Ada."},
    "image-classification": PIXEL,
    "automatic-speech-recognition": "UklGRg==",
    "audio-xvector": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [0.5, -1.0]}],
}
LABELS = {"labels": [{"label": "glad", "score": 0.9}, {"label": EVIL, "score": 0.1}]}
VECTOR = [0.6, -0.8, 0.0, 0.0]


# Without a browser


def test_policy_allows_the_pages_own_script_and_style_alone():
    policy = dict(
        part.split(" ", 1) for part in dict(page_headers())["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert "unsafe" not in str(policy)
    for tag, source in (("script", "script-src"), ("style", "style-src")):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page_html().decode(), re.DOTALL)
        digest = hashlib.sha256(inside.encode()).digest()
        assert policy[source] == f"'sha256-{base64.b64encode(digest).decode()}'"


def test_page_needs_nothing_from_elsewhere():
    text = page_html().decode()
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert not re.search(r"<script\s|<link(?! rel=\"icon\" href=\"data:,\")|@import|url\(", text)


def test_page_writes_no_html_and_no_inline_style_or_handler():
    text = page_html().decode()
    for way in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "srcdoc"):
        assert way not in text
    assert not re.search(r"<[^>]+\s(style|on\w+)=", text)
    assert '"style"' not in text


def test_page_is_sent_as_html_that_nothing_may_frame_or_guess():
    response = page_response()
    headers = dict(response.headers)
    assert (response.status_code, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"


# In a browser


class Server:
    """The routes that the page asks, with answers that are known."""

    def __init__(self):
        self.key, self.health, self.asked = "", 200, []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                response = page_response()
                if self.path == "/":
                    self.answer(200, response.body, "text/html", page_headers())
                elif self.path == "/health":
                    self.answer(stub.health, b"{}", "application/json")
                elif stub.key and self.headers.get("authorization") != f"Bearer {stub.key}":
                    self.answer(401, b'{"error":"an API key is required."}', "application/json")
                elif self.path == "/info":
                    models = [described(name, task) for name, task in TASKS.items()]
                    self.answer(200, json.dumps({"models": models}).encode(), "application/json")
                else:
                    self.answer(404, b'{"error":"no route"}', "application/json")

            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                name = self.path.split("?")[0].removeprefix("/predict/")
                name = name.removeprefix("/v2/models/").removesuffix("/infer")
                stub.asked.append((name, body, self.headers["content-type"]))
                stub.path = self.path
                if b"too long" in body:
                    error = json.dumps({"error": f"inputs: {EVIL} is too long."}).encode()
                    return self.answer(413, error, "application/json")
                times = (
                    ("x-total-time", "10"),
                    ("x-tokenization-time", "0.5"),
                    ("x-queue-time", "1"),
                    ("x-inference-time", "7.5"),
                )
                outputs = VECTOR if name == "minilm" else LABELS
                found = {"model": name, "outputs": outputs, "truncated": 0}
                return self.answer(200, json.dumps(found).encode(), "application/json", times)

            def answer(self, status, body, content_type, headers=()):
                self.send_response(status)
                for header in (
                    ("content-type", content_type),
                    ("content-length", str(len(body))),
                    *headers,
                ):
                    self.send_header(*header)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self):
        if not self._thread.is_alive():
            return
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def described(name, task):
    """What the real server's /info says about a model."""
    definition = find_task(task, modality={"photos": "image", "calls": "audio"}.get(name, "text"))
    return {
        "name": name,
        "state": "ready",
        "task": task,
        "precision": "fp32",
        "provider": "CPUExecutionProvider",
        "fields": [asdict(part) for part in definition.inputs] if definition else [],
        "options": definition.Options.schemas() if definition else {},
        "example": {"inputs": EXAMPLES.get(task, "The engine's warm.")},
    }


class Page:
    """The page in a browser, by what a person does and reads."""

    def __init__(self, browser, server):
        self.browser, self.server = browser, server

    def open(self, *, width=1280, dark=False):
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.browser.ask("Emulation.setEmulatedMedia", session=True, features=[scheme])
        self.browser._resize(width, 800)
        self.browser.events.clear()
        self.browser.ask("Page.navigate", session=True, url=self.server.url)
        self.until("document.readyState === 'complete' && document.querySelector('#model option')")

    def run(self, expression):
        found = self.browser.ask(
            "Runtime.evaluate", session=True, expression=expression, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression):
        ends = time.monotonic() + 60
        while not self.run(f"Boolean({expression})"):
            assert time.monotonic() < ends, (expression, self.run("document.body.innerText"))
            time.sleep(0.05)

    def choose(self, name):
        self.run(f"$('model').value = {name!r}; $('model').dispatchEvent(new Event('change'))")

    def type(self, field, text):
        self.run(f"$({field!r}).focus(); $({field!r}).value = ''")
        self.browser.ask("Input.insertText", session=True, text=text)

    def press(self):
        self.run("$('result').hidden = $('error').hidden = true; $('send').click()")
        self.until("!$('result').hidden || !$('error').hidden")

    def answer(self):
        return self.run("$('answer').innerText")

    def shown(self, identity):
        return self.run(f"Boolean($({identity!r})?.offsetParent)")

    def picture(self, path, width):
        seen = json.loads(self.run(_WIDEST))
        self.browser._resize(width, seen["height"])
        shot = self.browser.ask("Page.captureScreenshot", session=True, format="png")
        path.write_bytes(base64.b64decode(shot["data"]))
        return seen

    def complaints(self):
        """What the browser refused or the script raised."""
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [e["params"] for e in self.browser.events if e["method"] in kinds]


browser_only = pytest.mark.skipif(
    not find_chromium(), reason="no Chromium is installed (apt install chromium)"
)


@pytest.fixture
def server():
    made = Server()
    yield made
    made.close()


@pytest.fixture
def page(server, tmp_path):
    with Chromium(find_chromium(), tmp_path) as browser:
        yield Page(browser, server)


@browser_only
@pytest.mark.parametrize(("width", "dark"), [(1280, True), (360, False)])
def test_text_is_sent_and_its_result_shown(page, server, tmp_path, width, dark):
    """The pictures stay in pytest's temporary directory."""
    page.open(width=width, dark=dark)
    page.type("text", "The pump runs again.")
    page.press()
    assert server.asked[-1][:2] == ("mood", b'{"inputs":"The pump runs again."}')
    assert json.loads(page.answer()) == LABELS
    times = "tokenization 0.5 ms, queue 1 ms, inference 7.5 ms, total 10 ms"
    assert page.run("$('timings').innerText") == times
    assert page.run("$('state').innerText") == "ready"
    assert "provider: CPUExecutionProvider" in page.run("$('facts').innerText")
    picture = tmp_path / f"page-{width}-{'dark' if dark else 'light'}.png"
    seen = page.picture(picture, width)
    assert (seen["page"], seen["wide"], seen["ids"]) == (0, [], [])
    assert picture.stat().st_size > 10_000
    assert page.complaints() == []
    asked = [
        e["params"]["request"]["url"]
        for e in page.browser.events
        if e["method"] == "Network.requestWillBeSent"
    ]
    assert all(url.startswith((server.url, "data:")) for url in asked)


@browser_only
def test_fields_and_options_of_a_task_are_sent(page, server):
    page.open()
    page.choose("reader")
    assert page.shown("question")
    page.type("question", "Where?")
    page.type("context", "Marie in Paris.")
    page.press()
    sent = json.loads(server.asked[-1][1])
    assert sent == {"inputs": {"question": "Where?", "context": "Marie in Paris."}}
    page.choose("mood")
    page.type("text", "One.")
    page.run("$('more').open = true")
    page.type("text_pair", "Two.")
    page.type("option-top_k", "2")
    page.run("$('option-truncate').value = 'false'")
    page.press()
    assert json.loads(server.asked[-1][1]) == {
        "inputs": {"text": "One.", "text_pair": "Two."},
        "parameters": {"top_k": 2, "truncate": False},
    }
    page.choose("raw")
    page.press()
    assert server.path == "/v2/models/raw/infer"
    assert page.complaints() == []


@browser_only
@pytest.mark.parametrize("name", TASKS)
def test_example_of_every_task_can_be_sent_as_it_is(page, server, name):
    page.open()
    page.choose(name)
    page.press()
    assert page.shown("result"), page.run("$('error').innerText")
    asked, body, kind = server.asked[-1]
    assert (asked, kind) == (name, "application/json")
    assert json.loads(body)["inputs"] == EXAMPLES.get(TASKS[name], "The engine's warm.")
    assert json.loads(page.answer()) == (VECTOR if name == "minilm" else LABELS)


@browser_only
def test_only_what_a_person_needs_is_unfolded(page):
    def visible():
        return page.run(
            "[...document.querySelectorAll('form :is(input, textarea, select)')]"
            ".filter(e => e.checkVisibility()).map(e => e.id)"
        )

    page.open()
    for name, fields in {
        "minilm": ["text"],
        "mood": ["text"],
        "reader": ["question", "context"],
        "photos": ["image"],
        "calls": ["audio"],
        "raw": ["tensors"],
    }.items():
        page.choose(name)
        assert visible() == ["model", *fields]
    page.choose("minilm")
    page.run("$('more').open = true")
    assert set(visible()) == {
        "model",
        "text",
        *(f"option-{n}" for n in ("normalize", "dimensions", "dtype", "truncate", "prompt_name")),
        "key",
    }


@browser_only
@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
@pytest.mark.parametrize("name", TASKS)
def test_curl_line_of_the_page_works_as_it_is(page, server, name):
    page.open()
    page.choose(name)
    if name == "mood":
        page.type("text", 'It\'s "odd" $HOME `x` \\ \n é')
        page.run("$('more').open = true")
        page.type("option-top_k", "1")
    page.press()
    sent = server.asked[-1]
    line = page.run("$('curl').textContent")
    found = subprocess.run(
        ["sh", "-c", f"{line} --silent --fail"], capture_output=True, check=True, timeout=60
    )
    assert server.asked[-1] == sent
    assert json.loads(found.stdout)["model"] == name


@browser_only
def test_curl_line_has_the_name_of_the_key_and_not_the_key(page, server):
    page.open()
    page.run("$('more').open = true")
    page.type("key", "s3cret")
    line = page.run("$('curl').textContent")
    assert '-H "Authorization: Bearer $ENGINERY_API_KEY"' in line
    assert "s3cret" not in line


@browser_only
def test_image_is_sent_as_it_is(page, server, tmp_path):
    file = tmp_path / "cat.png"
    file.write_bytes(b"\x89PNG\r\n\x1a\n not looked at here")
    page.open()
    page.choose("photos")
    assert (page.shown("image"), page.shown("text")) == (True, False)
    assert page.run("$('picture').naturalWidth") == 1
    root = page.browser.ask("DOM.getDocument", session=True)["root"]["nodeId"]
    node = page.browser.ask("DOM.querySelector", session=True, nodeId=root, selector="#image")
    page.browser.ask("DOM.setFileInputFiles", session=True, files=[str(file)], **node)
    page.press()
    assert server.asked[-1] == ("photos", file.read_bytes(), "image/png")
    assert not page.shown("picture")
    assert page.run("$('curl').textContent").endswith("--data-binary '@cat.png'")
    page.run("$('more').open = true")
    page.type("option-top_k", "1")
    page.press()
    assert server.path == "/predict/photos?top_k=1"
    assert json.loads(page.answer()) == LABELS


@browser_only
def test_audio_is_sent_as_it_is(page, server, tmp_path):
    file = tmp_path / "call.flac"
    file.write_bytes(b"fLaC not looked at here")
    page.open()
    page.choose("calls")
    page.press()
    assert json.loads(server.asked[-1][1]) == {"inputs": "UklGRg=="}
    root = page.browser.ask("DOM.getDocument", session=True)["root"]["nodeId"]
    node = page.browser.ask("DOM.querySelector", session=True, nodeId=root, selector="#audio")
    page.browser.ask("DOM.setFileInputFiles", session=True, files=[str(file)], **node)
    page.press()
    name, content, kind = server.asked[-1]
    assert (name, content) == ("calls", file.read_bytes())
    assert kind.startswith("audio/")


@browser_only
def test_text_of_models_and_errors_is_never_html(page):
    page.open()
    page.type("text", "The pump runs again.")
    page.press()
    assert json.loads(page.answer())["labels"][1]["label"] == EVIL
    page.type("text", "too long")
    page.press()
    assert page.run("$('error').innerText") == f"413: inputs: {EVIL} is too long."
    assert not page.shown("result")
    assert page.run("document.title") == "enginery serve"
    assert page.run("document.querySelectorAll('img, script').length") == 1


@browser_only
def test_policy_blocks_injected_scripts(page):
    page.open()
    page.run("""
        const bad = document.createElement('script');
        bad.textContent = "document.title = 'owned'";
        document.body.append(bad);
        document.body.insertAdjacentHTML('beforeend', '<img src=x onerror="document.title=1">');
    """)
    time.sleep(0.2)
    assert page.run("document.title") == "enginery serve"


@browser_only
def test_key_is_sent_and_kept_nowhere(page, server):
    server.key = "s3cret"
    page.browser.ask("Page.navigate", session=True, url=server.url)
    page.until("document.readyState === 'complete' && !$('live').hidden")
    assert "401: an API key is required." in page.run("$('live').innerText")
    page.type("key", "s3cret")
    page.run("$('key').dispatchEvent(new Event('change'))")
    page.until("document.querySelector('#model option')")
    assert page.run("localStorage.length + sessionStorage.length + document.cookie.length") == 0
    page.browser.ask("Page.reload", session=True)
    page.until("document.readyState === 'complete' && !$('live').hidden")
    assert page.run("$('key').value") == ""


@browser_only
def test_page_reports_a_server_that_is_not_ready_or_unreachable(page, server):
    page.open()
    server.health = 503
    page.until("$('state').innerText === 'not ready'")
    server.close()
    page.until("$('state').innerText === 'unreachable'")


class Process:
    """The real server."""

    def __init__(self, artifact):
        words = [
            sys.executable,
            "-m",
            "enginery",
            "serve",
            f"mood={artifact.path}",
            "--port",
            "0",
            "--max-body-bytes",
            "2000",
        ]
        self._process = subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        lines = iter(self._process.stderr.readline, "")
        self.url = next(line for line in lines if line.startswith("listening")).split()[-1] + "/"
        assert next(line for line in lines if line.startswith("ready: mood"))

    def close(self):
        self._process.terminate()
        self._process.communicate(timeout=60)


@browser_only
def test_page_and_the_real_server_agree(exported, tmp_path):
    server = Process(exported("bert", "text-classification"))
    try:
        with Chromium(find_chromium(), tmp_path) as browser:
            page = Page(browser, server)
            page.open()
            page.type("text", "The pump runs again.")
            page.press()
            labels = json.loads(page.answer())["labels"]
            assert {label["label"] for label in labels} == {"calm", "angry", "glad"}
            assert re.search(r"inference [\d.]+ ms", page.run("$('timings').innerText"))
            facts = page.run("$('facts').innerText")
            assert "CPUExecutionProvider" in facts
            assert "fp32" in facts
            assert not page.shown("model")
            line = page.run("$('curl').textContent")
            found = subprocess.run(
                ["sh", "-c", f"{line} --silent --fail"], capture_output=True, check=True
            )
            assert len(json.loads(found.stdout)["outputs"]["labels"]) == 3
            page.type("text", "long " * 1000)
            page.press()
            assert page.run("$('error').innerText").startswith("413: ")
            complaints = json.dumps(page.complaints())
            assert "Content Security Policy" not in complaints
            page.picture(tmp_path / "real.png", 1280)
    finally:
        server.close()

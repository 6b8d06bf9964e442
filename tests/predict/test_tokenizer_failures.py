"""Rows on which the tokenizer fails, panics or hangs."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest

from enginery.core.errors import ArtifactError, InputError
from enginery.predict import tokenizer_watchdog
from enginery.predict.tokenizer_watchdog import TokenizerWatchdog
from enginery.runtime.model import load_model
from tests.hostile_tokenizers import ENDLESS, PANIC, spoiled_copy

WAIT = 300
GOOD = ["the pump is warm", "is the pump warm again", "warm"] * 5


def write(path, texts, **more):
    """Write a JSONL file with one row per text and return its path."""
    path.write_text("".join(json.dumps({"text": text, **more}) + "\n" for text in texts))
    return path


@pytest.mark.more
def test_only_the_row_that_cannot_be_tokenized_is_bad(tiny, predict, rows, tmp_path):
    artifact = spoiled_copy(tiny("bert", "text-classification"), tmp_path / "panics", "panics")
    texts = [*GOOD, PANIC, *GOOD, PANIC]
    report = predict(artifact, write(tmp_path / "in.jsonl", texts))
    found = rows()
    assert report.bad_rows == 2
    for place in (len(GOOD), len(texts) - 1):
        assert found[place]["error"].startswith("the text cannot be tokenized: ")
        assert "retry-limit-in-match over" in found[place]["error"]
    answered = [row for row in found if row["error"] is None]
    assert [row["text"] for row in answered] == GOOD * 2
    with load_model(artifact) as model:
        labels = [answer.labels[0].label for answer in model.classify(GOOD)]
    assert [row["label"] for row in answered] == labels * 2


@pytest.mark.more
def test_row_on_which_the_tokenizer_hangs_is_bad_and_the_command_ends(tiny, tmp_path):
    endless = spoiled_copy(tiny("bert", "feature-extraction"), tmp_path / "it", "never_returns")
    source = write(tmp_path / "in.jsonl", [*GOOD, ENDLESS, *GOOD])
    script = (
        "import sys; from enginery.predict import tokenizer_watchdog; "
        "tokenizer_watchdog.TIMEOUT_SECONDS = 3.0; from enginery.cli import main; main()"
    )
    command = ["predict", str(endless.path), "-i", str(source), "-o", str(tmp_path / "out.jsonl")]
    ended = subprocess.run(
        [sys.executable, "-c", script, *command],
        check=False,
        capture_output=True,
        text=True,
        timeout=WAIT,
    )
    assert ended.returncode == 3, ended.stderr
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    bad = found.pop(len(GOOD))
    assert bad["text"] == ENDLESS
    assert bad["error"] == ("the text cannot be tokenized within 3 seconds: the tokenizer hangs.")
    assert [row["text"] for row in found] == GOOD * 2
    assert all(len(row["embedding"]) == 32 and row["error"] is None for row in found)


class Stubborn:
    """An encoder that hangs on some texts until it is released."""

    def __init__(self, *texts):
        self.texts, self.calls, self.released = texts, [], threading.Event()

    def __call__(self, texts):
        self.calls.append(list(texts))
        if any(text in self.texts for text in texts):
            self.released.wait(WAIT)
        return [text.upper() for text in texts]


@pytest.fixture
def stubborn(monkeypatch):
    """Return a function that makes encoders: `stubborn("b")` hangs on "b"."""
    monkeypatch.setattr(tokenizer_watchdog, "TIMEOUT_SECONDS", 1.0)
    made = []

    def make(*texts):
        made.append(Stubborn(*texts))
        return made[-1]

    yield make
    for each in made:
        each.released.set()


@pytest.mark.more
def test_stuck_text_is_found_once_and_refused_from_then_on(stubborn):
    encode, watchdog = stubborn("c"), TokenizerWatchdog()
    assert watchdog(encode, ["a", "b"]) == ["A", "B"]
    assert encode.calls == [["a", "b"]]
    with pytest.raises(InputError, match=r"text 2 cannot be tokenized within 1 seconds"):
        watchdog(encode, ["a", "b", "c", "d"])
    calls = len(encode.calls)
    with pytest.raises(InputError, match="text 1 cannot be tokenized"):
        watchdog(encode, ["a", "c"])
    assert len(encode.calls) == calls
    assert watchdog(encode, ["a", "b", "d"]) == ["A", "B", "D"]
    assert encode.calls[calls:] == [["a"], ["b"], ["d"]]  # a list may wait for threads that it has


def test_errors_of_texts_come_through(stubborn):
    def fails(_):
        raise InputError("text 0 cannot be tokenized: no.")

    watchdog = TokenizerWatchdog()
    with pytest.raises(InputError, match=r"text 0 cannot be tokenized: no\."):
        watchdog(fails, ["a"])


@pytest.mark.slow
def test_run_ends_where_too_many_texts_are_stuck(stubborn):
    encode, watchdog = stubborn(*"abcd"), TokenizerWatchdog()
    for text in "abc":
        with pytest.raises(InputError):
            watchdog(encode, [text])
    with pytest.raises(ArtifactError, match=r"hangs on 4 texts: .* starts with 'd'"):
        watchdog(encode, ["d"])

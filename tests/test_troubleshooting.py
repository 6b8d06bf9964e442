"""`docs/troubleshooting.md`: the messages are the code's."""

import ast
import re
from pathlib import Path

import pytest

from enginery.core.errors import ProviderError
from enginery.runtime.providers import availability, libraries, specification
from enginery.runtime.tensorrt import timing
from enginery.runtime.tensorrt.options import FLAVORS

ROOT = Path(__file__).parents[1]
TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")


def said_about(where):
    with pytest.raises(ProviderError) as caught, specification._about(where):
        raise ProviderError("unknown execution provider 'cudaa'.")
    return caught.value.message


SAID_BY_PARTS = {
    "ENGINERY_PROVIDERS: …": lambda: said_about(specification.ENVIRONMENT),
    "… was not found": lambda: availability.describe_missing(
        {"libnvinfer.so.10": "libnvinfer.so.10: cannot open shared object file: No such file"}
    ),
    "… were not found": lambda: availability.describe_missing(
        {name: f"{name}: cannot open shared object file" for name in ("liba.so.1", "libb.so.2")}
    ),
    "convolutions and other cuDNN operations will fail (…)": lambda: availability.provider_warning(
        "CUDAExecutionProvider"
    ),
    "…, and the installed onnxruntime (…) is built without it": lambda: (
        availability._not_compiled("NnapiExecutionProvider").reason
    ),
    "the timing cache … is invalid or belongs to another TensorRT or GPU; it was neither used "
    "nor changed.": lambda: f"{timing._unfit(Path('timing.cache'))}.",
}
"""Messages that the code puts together of variables; each is made here."""


def texts_of_the_code():
    """Return the texts in the modules of the runtime, with `…` for what an f-string fills in."""
    texts = set()
    for path in sorted((ROOT / "enginery" / "runtime").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "…" for p in node.values]
                texts.add("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(node.value)
    return {text for text in texts if len(re.sub("[^a-z]", "", text)) > len("and")}


def may_be(text, message):
    """Return True if a message is a text of the code whose `…` are filled in."""
    first, *parts = text.split("…")
    if not message.startswith(first) or not message.endswith(text.rpartition("…")[2]):
        return False
    if len(text) < 0.7 * len(message):  # almost any message is "…: found …"
        return False
    position = len(first)
    for part in parts:
        position = message.find(part, position)
        if position < 0:
            return False
        position += len(part)
    return True


def test_page_has_no_message_that_the_code_has_not():
    messages = re.findall(r"^### `(.*)`$", TROUBLESHOOTING, re.MULTILINE)
    assert len(set(messages)) == len(messages) > 50
    texts = texts_of_the_code()
    whole = "\n".join(texts)
    unknown = {
        message
        for message in messages
        if not any(may_be(text, message) for text in texts)
        and any(part not in whole for part in message.split("…"))
    }
    assert unknown - set(SAID_BY_PARTS) == set()


@pytest.mark.parametrize("message", SAID_BY_PARTS)
def test_message_of_parts_is_what_the_code_says(message, monkeypatch):
    monkeypatch.setattr(libraries, "wheel_directories", list)
    monkeypatch.setattr(libraries, "load_error", lambda *_: "libcudnn.so.9: cannot open it")
    pattern = ".+".join(re.escape(part) for part in message.split("…"))
    assert re.fullmatch(pattern, SAID_BY_PARTS[message]())


def test_every_message_of_the_page_is_followed_by_what_to_do():
    parts = re.split(r"^#{2,3} .*$", TROUBLESHOOTING, flags=re.MULTILINE)
    titles = re.findall(r"^#{2,3} .*$", TROUBLESHOOTING, flags=re.MULTILINE)
    for title, text in zip(titles, parts[1:], strict=True):
        assert text.strip() or title.startswith("## "), title


def test_page_has_the_commands_that_the_errors_name():
    said = re.sub(r"\s+", " ", TROUBLESHOOTING)
    for line in (*availability.INSTALL.values(), *(flavor.install for flavor in FLAVORS.values())):
        assert line in said
    assert f"version {availability.MIN_DRIVER} or newer" in said

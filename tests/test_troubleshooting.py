"""`docs/troubleshooting.md`: the messages are the code's, all of them and no other."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from enginery.core.errors import ProviderError
from enginery.runtime.providers import availability, libraries, specification
from enginery.runtime.tensorrt import timing
from enginery.runtime.tensorrt.options import FLAVORS

ROOT = Path(__file__).parents[1]
TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")

RUNTIME = ROOT / "enginery" / "runtime"
MODULES = {
    path.relative_to(RUNTIME).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted(RUNTIME.rglob("*.py"))
}
FUNCTIONS = {
    node.name: node
    for tree in MODULES.values()
    for node in tree.body
    if isinstance(node, ast.FunctionDef)
}
CONSTANTS = {
    (name, node.targets[0].id): node.value.value
    for name, tree in MODULES.items()
    for node in tree.body
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
}


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


def wordings(node, module, scope):
    """The texts that an expression may be, `…` for what is known when it runs alone."""
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.JoinedStr):
        found = [""]
        for part in node.values:
            inner = part.value if isinstance(part, ast.FormattedValue) else part
            name = inner.id if isinstance(inner, ast.Name) else ""
            known = CONSTANTS.get((module, name), "…")
            text = inner.value if isinstance(inner, ast.Constant) else known
            found = [before + str(text) for before in found]
        return found
    if isinstance(node, ast.IfExp):
        return wordings(node.body, module, scope) + wordings(node.orelse, module, scope)
    if isinstance(node, ast.Name):
        values = [
            other.value
            for other in ast.walk(scope)
            if isinstance(other, ast.Assign)
            for target in other.targets
            if isinstance(target, ast.Name) and target.id == node.id
        ]
        return [text for value in values for text in wordings(value, module, scope)] or ["…"]
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in FUNCTIONS:
        called = FUNCTIONS[node.func.id]
        returned = [other.value for other in ast.walk(called) if isinstance(other, ast.Return)]
        return [
            text
            for value in returned
            if not isinstance(value, ast.Call)
            for text in wordings(value, module, called)
        ] or ["…"]
    return ["…"]


def is_about_providers(call, module):
    name = getattr(call.func, "id", "")
    options = name == "OptionError" and module.startswith("providers/")
    return name in ("ProviderError", "Unavailable", "CudaDriver") or options


@cache
def messages_of_the_code():
    found = set()
    for module, tree in MODULES.items():
        for scope in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            for call in ast.walk(scope):
                if not isinstance(call, ast.Call) or not is_about_providers(call, module):
                    continue
                given = call.args[:1]
                if call.func.id == "CudaDriver":  # version, GPUs, problem
                    given = call.args[2:] + [k.value for k in call.keywords if k.arg == "problem"]
                found |= {text for node in given for text in wordings(node, module, scope)}
    found = {re.sub("…+", "…", text) for text in found}
    # What is left of letters in the others is not theirs: they hand on a message or join two.
    return {text for text in found if len(re.sub(r"[^a-zA-Z]", "", text)) > len("and")}


def messages_of_the_page():
    return re.findall(r"^### `(.*)`$", TROUBLESHOOTING, re.MULTILINE)


def test_page_has_every_message_about_providers():
    assert len(messages_of_the_code()) > 50
    assert messages_of_the_code() - set(messages_of_the_page()) == set()


def test_page_has_no_message_that_the_code_has_not():
    found = messages_of_the_page()
    assert len(set(found)) == len(found)
    assert set(found) - messages_of_the_code() == set(SAID_BY_PARTS)


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

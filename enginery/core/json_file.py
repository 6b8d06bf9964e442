"""JSON objects from files, as a model's config.json, and for files, as a stage's report.

A sealed file ends with the sha256 of what comes before, so that it says itself whether a byte of it
has changed. That is for accidents; whoever changes a file on purpose can seal it again.

>>> read_json(Path("minilm/config.json"))["model_type"]
'bert'
>>> json.loads(json_bytes({"largest error": math.nan}))
{'largest error': None}
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

from enginery.core.errors import EngineryError, SourceError


def read_json(path: Path, *, error: type[EngineryError] = SourceError) -> dict[str, Any]:
    """Read a JSON object from a file; empty where there is no file.

    Raises:
        EngineryError: the file cannot be read or is not a JSON object; an error of the class
            `error`.
    """
    if not path.is_file():
        return {}
    found = load_json(path, error=error)
    if not isinstance(found, dict):
        raise error(f"{path} holds a {type(found).__name__}, expected a JSON object.")
    return found


def load_json(path: Path, *, error: type[EngineryError] = SourceError) -> Any:
    """Read any JSON value from a file; raises what `read_json` raises."""
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text)
        if "\\u" in text:  # half of an escaped pair is JSON, but no text that can be written
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except UnicodeEncodeError:
        raise error(f"{path} is not valid JSON: it escapes half of a surrogate pair.") from None
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror}.") from problem
    except RecursionError:
        raise error(f"{path} is not valid JSON: lists or objects are nested too deeply.") from None
    except ValueError as problem:  # what decodes bytes, JSON and numbers of thousands of digits
        raise error(f"{path} is not valid JSON: {problem}.") from problem


def json_bytes(document: Any) -> bytes:
    """Indented JSON in UTF-8, without NaN and infinities, which JSON does not have: they are null.

    Tuples become lists, as they do in JSON.
    """
    text = json.dumps(_finite(document), indent=2, ensure_ascii=False, allow_nan=False)
    return f"{text}\n".encode()


SEAL = "self_sha256"
"""The last member of a sealed JSON object."""
_SEALED = re.compile(rb',\n  "' + SEAL.encode() + rb'": "([0-9a-f]{64})"\n\}\n\Z')


class UnsealedError(ValueError):
    """A JSON file has no hash of itself, or another one than its content."""


def sealed_bytes(document: str) -> bytes:
    """Return the text of an indented JSON object with its sha256 as the last member."""
    body = document.rstrip().encode()
    digest = hashlib.sha256(body).hexdigest()
    return body.removesuffix(b"\n}") + f',\n  "{SEAL}": "{digest}"\n}}\n'.encode()


def unsealed_bytes(content: bytes) -> bytes:
    """Return the JSON object that `sealed_bytes` was given.

    Raises:
        UnsealedError: the hash is missing or does not match.
    """
    seal = _SEALED.search(content)
    if seal is None:
        raise UnsealedError(f"it does not end with {SEAL}, the sha256 of its own content")
    body = content[: seal.start()] + b"\n}"
    digest = hashlib.sha256(body).hexdigest()
    if digest != seal[1].decode():
        raise UnsealedError(
            f"it was altered: the sha256 of its content is {digest[:12]}…, "
            f"{SEAL} says {seal[1].decode()[:12]}…"
        )
    return body


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

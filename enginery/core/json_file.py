"""JSON objects from files, as a model's config.json, and for files, as a stage's report.

A sealed file ends with the sha256 of what comes before, so that it says itself whether a byte of it
has changed. That is for accidents; whoever changes a file on purpose can seal it again.

>>> read_json(Path("minilm/config.json"))["model_type"]
'bert'
>>> json.loads(json_bytes({"largest error": math.nan}))
{'largest error': None}
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from enginery.core.errors import EngineryError, SourceError

MAX_DEPTH = 100
"""Lists and objects inside each other in what is read; a configuration has five, a report ten."""
MAX_DOCUMENT_BYTES = 2**26
"""Of a configuration, a manifest or a report; the largest have a few MB."""


def require_regular(path: Path) -> None:
    """Raise OSError unless there is a regular file, or a link to one.

    Opening a named pipe waits for somebody who writes, and a device may have no end.
    """
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a directory, expected a file", str(path))
    if not stat.S_ISREG(mode):
        found = "it is a named pipe, a socket or a device, expected a regular file"
        raise OSError(errno.EINVAL, found, str(path))


def document_bytes(path: Path, *, most_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
    """Read a document that came with a model or an artifact.

    Raises:
        OSError: it cannot be read, is not a regular file, or is larger; 64 MiB unless said.
    """
    require_regular(path)
    with open(path, "rb", opener=_open_at_once) as stream:
        if os.fstat(stream.fileno()).st_size > most_bytes:
            found = f"it has more than {most_bytes >> 20} MiB"
            raise OSError(errno.EFBIG, found, str(path))
        return stream.read()


def _open_at_once(name: str, flags: int) -> int:
    """Open a file without waiting, should a named pipe have taken its place meanwhile."""
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))


def read_json(path: Path, *, error: type[EngineryError] = SourceError) -> dict[str, Any]:
    """Read a JSON object from a file; empty where there is no file.

    Raises:
        EngineryError: the file cannot be read, is not a regular one, has more than 64 MiB, or is
            not a JSON object; an error of the class `error`.
    """
    if not path.exists():
        return {}
    found = load_json(path, error=error)
    if not isinstance(found, dict):
        raise error(f"{path} holds a {type(found).__name__}, expected a JSON object.")
    return found


def load_json(path: Path, *, error: type[EngineryError] = SourceError) -> Any:
    """Read any JSON value from a file; raises what `read_json` raises."""
    try:
        text = document_bytes(path).decode()
        found = parse_json(text)
        if "\\u" in text:  # half of an escaped pair is JSON, but no text that can be written
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except UnicodeEncodeError:
        raise error(f"{path} is not valid JSON: it escapes half of a surrogate pair.") from None
    except OSError as problem:
        raise error(
            f"{path} cannot be read: {problem.strerror}.", do="Put the file itself in its place."
        ) from problem
    except ValueError as problem:  # what decodes bytes, JSON and numbers of thousands of digits
        raise error(f"{path} is not valid JSON: {problem}.") from problem


def parse_json(content: str | bytes) -> Any:
    """Return any JSON value.

    Raises:
        ValueError: it is no JSON, or lists and objects are nested deeper than `MAX_DEPTH`. Python
            alone would raise a RecursionError, and at that only from 1,000 on: whoever walks
            through the value afterwards would run into it earlier.
    """
    try:
        found = json.loads(content)
    except RecursionError:
        raise ValueError("lists or objects are nested too deeply") from None
    level = [found]
    for _ in range(MAX_DEPTH + 1):
        level = [inner for outer in level for inner in _inner(outer)]
        if not level:
            return found
    raise ValueError("lists or objects are nested too deeply")


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


def _inner(value: Any) -> Iterable[Any]:
    """The members of a list or an object; none of anything else."""
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

"""Read and write JSON files safely: a model's config.json, a manifest, a stage's report.

>>> read_json(artifact.path / "config.json")["model_type"]
'bert'
>>> json.loads(json_bytes({"largest error": math.nan}))
{'largest error': None}

A file with a checksum ends with the sha256 of what comes before, so that accidental changes are
found. Deliberate changes are not: anybody can compute the checksum again.
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
from typing import TYPE_CHECKING, Any

from enginery.core.errors import EngineryError, SourceError

if TYPE_CHECKING:
    from pydantic import ValidationError

MAX_DEPTH = 100
"""Maximum nesting of lists and objects; a configuration has 5 levels, a report 10."""
MAX_DOCUMENT_BYTES = 2**26
"""Maximum size of a configuration, a manifest or a report; the largest have a few MB."""


def require_regular_file(path: Path) -> None:
    """Raise OSError unless the path is a regular file, or a link to one.

    Opening a named pipe blocks until another process writes to it, and a device may be endless.
    """
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a directory, expected a file", str(path))
    if not stat.S_ISREG(mode):
        problem = "it is a named pipe, a socket or a device, expected a regular file"
        raise OSError(errno.EINVAL, problem, str(path))


def read_document(path: Path, *, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
    """Read a small file that comes with a model or an artifact.

    Raises:
        OSError: the file cannot be read, is not a regular file, or has more than `max_bytes`.
    """
    require_regular_file(path)
    with open(path, "rb", opener=_open_at_once) as stream:
        if os.fstat(stream.fileno()).st_size > max_bytes:
            problem = f"it has more than {max_bytes >> 20} MiB"
            raise OSError(errno.EFBIG, problem, str(path))
        return stream.read()


def _open_at_once(name: str, flags: int) -> int:
    """Open a file without blocking, even if it was replaced by a named pipe."""
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))


def read_json(path: Path, *, error: type[EngineryError] = SourceError) -> dict[str, Any]:
    """Read a JSON object from a file; return an empty dict if the file does not exist.

    Raises:
        EngineryError: the file cannot be read, is not a regular file, has more than 64 MiB, or is
            not a JSON object; the class is `error`.
    """
    if not path.exists():
        return {}
    value = load_json(path, error=error)
    if not isinstance(value, dict):
        raise error(f"{path} holds a {type(value).__name__}, expected a JSON object.")
    return value


def load_json(path: Path, *, error: type[EngineryError] = SourceError) -> Any:
    """Read any JSON value from a file; raise the same errors as `read_json`."""
    try:
        text = read_document(path).decode()
        value = parse_json(text)
        if "\\u" in text:  # JSON may escape half of a surrogate pair, which cannot be encoded
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError:
        raise error(f"{path} is not valid JSON: it escapes half of a surrogate pair.") from None
    except OSError as problem:
        raise error(
            f"{path} cannot be read: {problem.strerror}.", do="Put the file itself in its place."
        ) from problem
    except ValueError as problem:  # not UTF-8, not JSON, or a number of thousands of digits
        raise error(f"{path} is not valid JSON: {problem}.") from problem


def parse_json(content: str | bytes) -> Any:
    """Parse any JSON value.

    Without the limit, `json.loads` would raise a RecursionError from about 1,000 levels on, and
    functions that walk through the value afterwards would raise one earlier.

    Raises:
        ValueError: the content is not JSON, or nested deeper than `MAX_DEPTH`.
    """
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError("lists or objects are nested too deeply") from None
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [inner for outer in level for inner in _inner(outer)]
        if not level:
            return value
    raise ValueError("lists or objects are nested too deeply")


def first_problem(error: ValidationError) -> str:
    """Describe the first problem of a document that pydantic rejected: `files.0.size: …`."""
    problem = error.errors()[0]
    return f"{'.'.join(map(str, problem['loc'])) or 'the document'}: {problem['msg']}"


def json_bytes(document: Any) -> bytes:
    """Return indented JSON in UTF-8, with null in place of NaN and infinities."""
    text = json.dumps(_finite(document), indent=2, ensure_ascii=False, allow_nan=False)
    return f"{text}\n".encode()


CHECKSUM_KEY = "self_sha256"
"""Name of the last member of a JSON object with a checksum."""
_CHECKSUM = re.compile(rb',\n  "' + CHECKSUM_KEY.encode() + rb'": "([0-9a-f]{64})"\n\}\n\Z')


class ChecksumError(ValueError):
    """A JSON file has no checksum, or one that does not match its content."""


def append_checksum(document: str) -> bytes:
    """Return an indented JSON object with its sha256 as the last member."""
    body = document.rstrip().encode()
    digest = hashlib.sha256(body).hexdigest()
    return body.removesuffix(b"\n}") + f',\n  "{CHECKSUM_KEY}": "{digest}"\n}}\n'.encode()


def verify_checksum(content: bytes) -> bytes:
    """Return the JSON object that `append_checksum` was given.

    Raises:
        ChecksumError: the checksum is missing or does not match.
    """
    checksum = _CHECKSUM.search(content)
    if checksum is None:
        raise ChecksumError(f"it does not end with {CHECKSUM_KEY}, the sha256 of its own content")
    body = content[: checksum.start()] + b"\n}"
    digest = hashlib.sha256(body).hexdigest()
    if digest != checksum[1].decode():
        raise ChecksumError(
            f"it was altered: the sha256 of its content is {digest[:12]}…, "
            f"{CHECKSUM_KEY} says {checksum[1].decode()[:12]}…"
        )
    return body


def _inner(value: Any) -> Iterable[Any]:
    """Return the members of a list or an object; nothing for other values."""
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

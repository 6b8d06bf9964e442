"""JSON objects from files, as a model's config.json, and for files, as a stage's report.

>>> read_json(Path("minilm/config.json"))["model_type"]
'bert'
>>> json.loads(json_bytes({"largest error": math.nan}))
{'largest error': None}
"""

from __future__ import annotations

import json
import math
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


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

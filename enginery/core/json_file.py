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

from enginery.core.errors import SourceError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty where there is no file.

    Raises:
        SourceError: the file is not a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise SourceError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(found, dict):
        raise SourceError(f"{path} holds a {type(found).__name__}, expected a JSON object.")
    return found


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

"""JSON objects from files: a model's config.json and its like.

>>> read_json(Path("minilm/config.json"))["model_type"]
'bert'
"""

from __future__ import annotations

import json
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

"""Names of models, versions and aliases that every registry and file system takes."""

from __future__ import annotations

import re

_PORTABLE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,126}[A-Za-z0-9_-])?")
# With any extension, whatever the case: "Naming Files, Paths, and Namespaces" of Windows.
_DEVICE = re.compile(r"(?:con|prn|aux|nul|com[0-9]|lpt[0-9])(?:\..*)?", re.IGNORECASE)


def is_portable_name(text: str) -> bool:
    """Return True if a text can be a name in every registry and file system."""
    return _PORTABLE.fullmatch(text) is not None and not _DEVICE.fullmatch(text)


def portable_name(text: str) -> str:
    """Return a name for every registry: anything but letters, digits, `.`, `_`, `-` becomes `-`."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:128].rstrip(".") or "model"
    return name if is_portable_name(name) else f"model-{name}"[:128].rstrip(".")

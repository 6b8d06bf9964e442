"""Read the records of units and cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def rows(parts: Mapping[str, Any], key: str) -> list[Any]:
    """Return the rows of this name of all cases."""
    cases = (case for part in parts.values() for case in part["cases"].values())
    return [row for case in cases for row in case.get(key, [])]


def failures(parts: Mapping[str, Any]) -> list[str]:
    """Return every failed check and every unit that ended with a problem."""
    found = []
    for name, part in parts.items():
        if part["problem"] and part["status"] != "unfinished":
            found.append(f"{name}: {part['problem']}")
        found += [
            f"{check['check']}: {check['found']}"
            for case in part["cases"].values()
            for check in case["checks"]
            if not check["passed"]
        ]
    return found

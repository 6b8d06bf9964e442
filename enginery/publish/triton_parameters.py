"""The parameters of a request to Triton: read by type, and none left unread.

>>> given = Parameters({"top_k": 3})
>>> given.whole("top_k", default=0, least=0)
3
>>> given.end()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from enginery.core.errors import InputError, nearest

# What Triton's clients and front ends send for themselves.
_IGNORED = ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout",
            "binary_data_output", "triton_enable_empty_final_response")  # fmt: skip


@dataclass
class Parameters:
    """What a client sent; each read marks a name as known."""

    values: Mapping[str, Any]
    _known: list[str] = field(default_factory=list)

    def whole(self, name: str, *, default: int, least: int, most: int = 10_000) -> int:
        """A whole number from `least` to `most`; raises InputError for anything else."""
        value = self._take(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise InputError(
                f"parameter '{name}' is {value!r}, expected a whole number from {least} to {most}."
            )
        return value

    def flag(self, name: str, *, default: bool | None) -> bool | None:
        """True or false, or the default; raises InputError for anything else."""
        value = self._take(name, default)
        if name in self.values and not isinstance(value, bool):
            raise InputError(f"parameter '{name}' is {value!r}, expected true or false.")
        return default if name not in self.values else bool(value)

    def word(self, name: str, *, default: str = "", known: Sequence[str] = ()) -> str:
        """A text, one of `known` where that is given; raises InputError for anything else."""
        value = self._take(name, default)
        if not isinstance(value, str):
            raise InputError(f"parameter '{name}' is {value!r}, expected a text.")
        if known and value not in known:
            raise InputError(
                f"parameter '{name}' is '{value}'{nearest(value, known)}",
                do=f"Known: {', '.join(known)}.",
            )
        return value

    def end(self) -> None:
        """Raises InputError for a parameter that nothing has read."""
        for name in self.values:
            if name not in self._known and name not in _IGNORED:
                raise InputError(
                    f"unknown parameter '{name}'{nearest(name, self._known)}",
                    do=f"Known: {', '.join(self._known)}.",
                )

    def _take(self, name: str, default: Any) -> Any:
        self._known.append(name)
        return self.values.get(name, default)

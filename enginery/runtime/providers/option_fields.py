"""Fields of provider options: whole numbers in a range, sizes in bytes, addresses.

    >>> parse_whole("2 * 1024 * 1024 * 1024"), parse_size("2 GiB")
    (2147483648, 2147483648)

Numbers may be written as a calculation with whole numbers, as configuration files of RapidOCR do.
Nothing is evaluated as Python.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import field
from typing import Any

MAX_SIZE = (1 << 64) - 1
"""The largest size_t: no limit."""

_UNITS: dict[str, int] = {
    **{unit: 1 << (10 * n) for n, unit in enumerate(("b", "kib", "mib", "gib", "tib"))},
    **{unit: 1000**n for n, unit in enumerate(("kb", "mb", "gb", "tb"), 1)},
}
_SIZE = re.compile(r"^(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kmgt]?i?b)$", re.IGNORECASE)
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.LShift: operator.lshift,
    ast.Pow: operator.pow,
}
_LONGEST = 100
_LARGEST_POWER = 64


def number(default: int, *, least: int, most: int = (1 << 31) - 1) -> Any:
    """A field of a whole number between `least` and `most`."""
    return field(default=default, metadata={"least": least, "most": most})


def size(default: int, *, least: int = 0) -> Any:
    """A field of a size in bytes, which may be written with a unit."""
    return field(default=default, metadata={"least": least, "most": MAX_SIZE, "size": True})


def address() -> Any:
    """A field of an address in this process's memory; 0 for none."""
    return field(default=0, metadata={"least": 0, "most": MAX_SIZE})


def parse_size(text: str) -> int:
    """Bytes from `2GiB`, `2 GiB`, `500 MB`, `2147483648` or `2 * 1024 * 1024 * 1024`.

    Units of 1024 end in `iB`, as IEC 80000-13 has them; those of 1000 in `B`.

    Raises:
        ValueError: it is none of these, or not a whole number of bytes.
    """
    found = _SIZE.match(text.strip())
    if not found:
        return parse_whole(text)
    amount = str(found["number"])
    unit = _UNITS[str(found["unit"]).lower()]
    whole, _, fraction = amount.partition(".")
    scaled = int(whole + fraction) * unit
    count, rest = divmod(scaled, int(f"1{'0' * len(fraction)}"))
    if rest:
        raise ValueError(text)
    return count


def parse_whole(text: str) -> int:
    """A whole number from digits, or from a calculation with `+ - * // << **` and parentheses.

    Raises:
        ValueError: it is neither, or its numbers are beyond 64 bits.
    """
    if len(text) > _LONGEST:
        raise ValueError(text[:_LONGEST])
    try:
        tree = ast.parse(text.strip(), mode="eval")
        return _value(tree.body)
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError) as error:
        raise ValueError(text) from error


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant):
        value = node.value
        if isinstance(value, int) and not isinstance(value, bool):
            return _bounded(value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left), _value(node.right)
        # A power of a large number would take all memory before its size could be checked.
        if isinstance(node.op, ast.Pow | ast.LShift) and not 0 <= right <= _LARGEST_POWER:
            raise ValueError(right)
        return _bounded(_OPERATORS[type(node.op)](left, right))
    raise ValueError(ast.dump(node))


def _bounded(value: int) -> int:
    if abs(value) > MAX_SIZE:
        raise ValueError(value)
    return value

"""Operators that draw random numbers, and the inputs that take their place."""

from __future__ import annotations

from collections.abc import Iterable

RANDOM_OPS = frozenset(
    (
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
        "Bernoulli",
        "Multinomial",
    )
)
_RANDOM_INPUT = "enginery.random"


def random_notes(op_types: Iterable[str], name: str) -> list[str]:
    """Return a note if a graph with these op types draws random numbers.

    Args:
        op_types: op types of ONNX's own domain.
        name: what the note calls the file.
    """
    ops = ", ".join(sorted(RANDOM_OPS.intersection(op_types)))
    note = f"{name} draws random numbers ({ops}), so its outputs differ from run to run"
    return [note] if ops else []


def random_input(index: int, distribution: str) -> str:
    """Return the name of a graph's input that takes the place of random numbers.

    Args:
        index: how many were drawn before.
        distribution: `normal` or `uniform`, both the standard one.
    """
    return f"{_RANDOM_INPUT}.{index}.{distribution}"


def is_random_input(name: str) -> bool:
    """Return True for a name that `random_input` returns."""
    return name.startswith(f"{_RANDOM_INPUT}.")

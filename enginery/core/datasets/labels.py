"""Map the labels of a data set to the model's class indices, to measure its accuracy.

>>> index_labels(["glad", "0", 1], {"calm": 0, "glad": 1}, where="data 'reviews.csv'")
[1, 0, 1]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from enginery.core.errors import InputError, nearest


def index_labels(
    labels: Sequence[Any], label2id: Mapping[str, Any], *, where: str, names: Sequence[str] = ()
) -> list[int]:
    """Return the model's class index of each label.

    Args:
        labels: class names or indices.
        label2id: the mapping in the model's config.json.
        where: the source of the labels, for error messages.
        names: class names of the data set (a Dataset's ClassLabel). If the model knows one of
            them, labels are matched by name, because the two may order their classes differently.

    Raises:
        InputError: the model has no such label.
    """
    known = {str(name): int(index) for name, index in label2id.items()}
    by_name = any(name in known for name in names)
    return [_index(_named(label, names) if by_name else label, known, where) for label in labels]


def _named(label: Any, names: Sequence[str]) -> Any:
    place = _whole(label)
    return label if place is None or place >= len(names) else names[place]


def _index(label: Any, known: Mapping[str, int], where: str) -> int:
    if str(label) in known:
        return known[str(label)]
    index = _whole(label)
    if index is not None and (not known or index in known.values()):
        return index
    raise InputError(
        f"{where}: the label {label!r} is not one of the model's{nearest(str(label), known)}",
        do=f"Its labels: {', '.join(known) or 'indices from 0 on'}.",
    )


def _whole(label: Any) -> int | None:
    """Return a label as an index, or None.

    `1.0` is an index, too: pandas turns an integer column with gaps into floats.
    """
    text = str(int(label)) if isinstance(label, bool) else str(label).removesuffix(".0")
    return int(text) if text.isascii() and text.isdigit() else None

"""Read labelled texts, and map their labels to the model's class indices, to measure its accuracy.

>>> index_labels(["glad", "calm"], {"calm": 0, "glad": 1}, where="data 'reviews.csv'")
[1, 0]
>>> index_labels([1.0, 0.0], {"calm": 0, "glad": 1}, where="data 'reviews.csv'")
[1, 0]
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from enginery.core.artifact.artifact import Artifact
from enginery.core.datasets.samples import holds_arrays, read_text_rows
from enginery.core.errors import InputError, OptionError, nearest
from enginery.core.model.files import ModelConfig
from enginery.core.options import LabelReading

_MANY_LABELS = ("multi_label_classification", "regression")


def require_classifier(artifact: Artifact, data: str, label_column: str) -> None:
    """Check that labels in a column of a file can be compared with an artifact's results.

    Raises:
        OptionError: the model does not choose one class for each text, or the file has no
            columns.
    """
    manifest = artifact.manifest
    problem = ""
    if manifest.task == "image-classification":
        problem = "a folder of images has no columns"
    elif manifest.task != "text-classification":
        problem = f"the task of {artifact.path} is {manifest.task}, expected text-classification"
    elif (kind := ModelConfig.read(artifact.path).problem_type) in _MANY_LABELS:
        problem = f"{artifact.path} is for {kind.replace('_', ' ')}, which has no single best class"
    elif any(spec.name == "logits" and spec.dims[-1:] == (1,) for spec in _outputs(artifact)):
        problem = f"{artifact.path} gives one score for each text, not one for each class"
    elif holds_arrays(Path(data)):
        problem = "arrays have no columns"
    if problem:
        raise OptionError(
            f"option 'label_column' is '{label_column}', but {problem}.",
            do="Leave it out.",
            option="label_column",
        )


def require_answer_per_row(artifact: Artifact, label_column: str) -> None:
    """Check that a model gives one answer for each row, which a label can be compared with.

    Raises:
        OptionError: it labels tokens, for example, or has no logits.
    """
    logits = [
        spec
        for graph in artifact.manifest.graphs
        for spec in graph.outputs
        if spec.name == "logits" and len(spec.dims) <= 2
    ]
    if not logits:
        task = artifact.manifest.task
        raise OptionError(
            f"option 'label_column' is '{label_column}', but the task of {artifact.path} is "
            f"{task}, whose rows have no label.",
            do="Leave it out: answers are then compared with those of FP32.",
            option="label_column",
        )


def _outputs(artifact: Artifact) -> Sequence[Any]:
    return artifact.manifest.graphs[0].outputs


def read_labelled_texts(
    artifact: Artifact,
    path: Path,
    column: str,
    label_column: str,
    *,
    rows: int,
    reading: LabelReading = "auto",
) -> tuple[list[str], list[int]]:
    """Return up to `rows` texts, at even intervals from a file, and the class index of each.

    `reading` says what the labels are, see `index_labels`.

    Raises:
        InputError: the file or a column is missing, cannot be read, or has no text; or the model
            has no such label.
    """
    sample = read_text_rows(path, column, rows=rows, label_column=label_column)
    label2id = ModelConfig.read(artifact.path).label2id
    labels = index_labels(
        sample.labels,
        label2id,
        where=f"data '{path}': column '{label_column}'",
        reading=reading,
        column=sample.label_values,
    )
    return list(sample.items), labels


def index_labels(
    labels: Sequence[Any],
    label2id: Mapping[str, Any],
    *,
    where: str,
    names: Sequence[str] = (),
    reading: LabelReading = "auto",
    column: Collection[Any] = (),
) -> list[int]:
    """Return the model's class index of each label; all labels are read in one way.

    Args:
        labels: class names or indices. `4.0` is 4: pandas turns whole numbers with gaps into
            floats.
        label2id: the mapping in the model's config.json.
        where: the source of the labels, for error messages.
        names: class names of the data set (a Dataset's ClassLabel). If the model knows one of
            them, labels are matched by name, because the two may order their classes differently.
        reading: what the labels are. `auto` finds out from the whole column.
        column: all labels of the column, of which `labels` may be a sample; empty for `labels`.

    Raises:
        InputError: the model has no such label, or the labels can be both names and indices.
    """
    indices = {str(name): int(index) for name, index in label2id.items()}
    if any(name in indices for name in names):
        labels, column, reading = [_named(label, names) for label in labels], (), "names"
    if reading == "auto":
        reading = _only_reading(column or labels, indices, where)
    index_of = _index_by_name if reading == "names" else _index
    read = [index_of(label, indices) for label in labels]
    if None in read:
        label = labels[read.index(None)]
        read_otherwise = _index if reading == "names" else _index_by_name
        # A name among indices is spelled right.
        is_known = read_otherwise(label, indices) is not None
        hint = "." if is_known else nearest(str(label), indices)
        raise InputError(
            f"{where}: the label {reprlib.repr(label)} is not one of the model's{hint}",
            do=(f"The column is read as {reading}. " if is_known else "")
            + f"The model's labels: {', '.join(indices) or 'indices from 0 on'}.",
        )
    return [index for index in read if index is not None]


def _only_reading(
    column: Collection[Any], indices: Mapping[str, int], where: str
) -> Literal["names", "indices"]:
    """Return whether a column has names or indices.

    Raises:
        InputError: it can have both, and the two say different things.
    """
    # Booleans equal numbers, so text tells values apart.
    distinct = list({str(label): label for label in column}.values())
    by_name = [_index_by_name(label, indices) for label in distinct]
    by_index = [_index(label, indices) for label in distinct]
    if None in by_name:
        # If some labels are neither, the kind that most labels are is in the message.
        named, counted = (len(read) - read.count(None) for read in (by_name, by_index))
        return "names" if None in by_index and named > counted else "indices"
    if None in by_index or by_name == by_index:
        return "names"
    label, index, other = next(
        case for case in zip(distinct, by_index, by_name, strict=True) if case[1] != case[2]
    )
    names = {index: name for name, index in indices.items()}
    raise InputError(
        f"{where}: the labels can be names and indices: {label!r} is the name of class {other}, "
        f"and class {index} is named {names.get(index or 0, index)!r}.",
        do="Say which they are: --label-values names, or --label-values indices.",
    )


def _named(label: Any, names: Sequence[str]) -> Any:
    index = _whole(label)
    return label if index is None or index >= len(names) else names[index]


def _index_by_name(label: Any, indices: Mapping[str, int]) -> int | None:
    if str(label) in indices:
        return indices[str(label)]
    plain = _without_fraction(str(label))
    return next((i for name, i in indices.items() if _without_fraction(name) == plain), None)


def _index(label: Any, indices: Mapping[str, int]) -> int | None:
    index = _whole(label)
    return index if index is not None and (not indices or index in indices.values()) else None


def _whole(label: Any) -> int | None:
    """Return a label as an index, or None."""
    text = str(int(label)) if isinstance(label, bool) else _without_fraction(str(label))
    return int(text) if text.isascii() and text.isdigit() else None


def _without_fraction(text: str) -> str:
    """Return `4.0` as `4`: pandas turns an integer column with gaps into floats."""
    return text.removesuffix(".0") if re.fullmatch(r"-?[0-9]+\.0", text) else text

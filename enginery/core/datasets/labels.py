"""Read labelled texts, and map their labels to the model's class indices, to measure its accuracy.

>>> index_labels(["glad", "0", 1], {"calm": 0, "glad": 1}, where="data 'reviews.csv'")
[1, 0, 1]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from enginery.core.artifact.artifact import Artifact
from enginery.core.datasets.samples import holds_arrays, read_text_rows
from enginery.core.errors import InputError, OptionError, nearest
from enginery.core.model.files import ModelConfig

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


def _outputs(artifact: Artifact) -> Sequence[Any]:
    return artifact.manifest.graphs[0].outputs


def read_labelled_texts(
    artifact: Artifact, path: Path, column: str, label_column: str, *, rows: int
) -> tuple[list[str], list[int]]:
    """Return up to `rows` texts, at even intervals from a file, and the class index of each.

    Raises:
        InputError: the file or a column is missing, cannot be read, or has no text; or the model
            has no such label.
    """
    sample = read_text_rows(path, column, rows=rows, label_column=label_column)
    label2id = ModelConfig.read(artifact.path).label2id
    return list(sample.items), index_labels(sample.labels, label2id, where=f"data '{path}'")


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
    indices = {str(name): int(index) for name, index in label2id.items()}
    by_name = any(name in indices for name in names)
    return [_index(_named(label, names) if by_name else label, indices, where) for label in labels]


def _named(label: Any, names: Sequence[str]) -> Any:
    index = _whole(label)
    return label if index is None or index >= len(names) else names[index]


def _index(label: Any, indices: Mapping[str, int], where: str) -> int:
    if str(label) in indices:
        return indices[str(label)]
    index = _whole(label)
    if index is not None and (not indices or index in indices.values()):
        return index
    raise InputError(
        f"{where}: the label {label!r} is not one of the model's{nearest(str(label), indices)}",
        do=f"Its labels: {', '.join(indices) or 'indices from 0 on'}.",
    )


def _whole(label: Any) -> int | None:
    """Return a label as an index, or None.

    `1.0` is an index, too: pandas turns an integer column with gaps into floats.
    """
    text = str(int(label)) if isinstance(label, bool) else str(label).removesuffix(".0")
    return int(text) if text.isascii() and text.isdigit() else None

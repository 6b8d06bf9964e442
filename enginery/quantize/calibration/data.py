"""Read and check calibration inputs: files, folders or Python iterables.

    data = read_data(artifact, QuantizeConfig(data="reviews.csv"), None)
    data.kind, data.description    # ('texts', "reviews.csv: 512 rows of 'text'")

Files and iterables are streamed: at most `rows` inputs are in memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.fingerprint import combined_sha256, data_content, sha256_of
from enginery.core.artifact.inputs import note_input
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.datasets.folders import list_media
from enginery.core.datasets.labels import index_labels, require_answer_per_row
from enginery.core.datasets.samples import (
    holds_arrays,
    iterate,
    read_arrays,
    read_text_rows,
    sample_rows,
    select_columns,
)
from enginery.core.errors import InputError, OptionError
from enginery.core.model.files import ModelConfig
from enginery.quantize.calibration.batches import Batch, CalibrationData, Kind, make_batches
from enginery.quantize.calibration.prompts import takes_prompts
from enginery.quantize.config import QuantizeConfig, max_held_out, require_calibration
from enginery.runtime.decoder_graphs import find_encoder_decoder
from enginery.runtime.graph_roles import input_graph
from enginery.runtime.image.processor import load_image
from enginery.runtime.sample_inputs import (
    takes_audio,
    takes_images,
    takes_sounds,
    takes_texts,
)
from enginery.runtime.text.tokenizer import check_texts

__all__ = ["Batch", "CalibrationData", "make_batches", "read_data"]

_RANDOM_ROWS = 32


def read_data(
    artifact: Artifact, config: QuantizeConfig, inputs: Iterable[Any] | None
) -> CalibrationData:
    """Read the calibration inputs.

    Args:
        artifact: the artifact to calibrate.
        config: the options, with the file or the permission to generate inputs.
        inputs: inputs from Python, in place of a file: texts, images, mappings with a `column` of
            either (such as a Hugging Face Dataset), or dicts of the graph's own inputs.

    Raises:
        InputError: the file or an item cannot be used, or there are none.
        OptionError: there are no inputs, and made-up ones are not allowed; or there is no column
            of labels to read.
    """
    if config.label_column:
        require_answer_per_row(artifact, config.label_column)
    if inputs is not None or config.data:
        data = _from_file(artifact, config) if inputs is None else _given(artifact, config, inputs)
        if not config.held_out:
            return data
        held_out = replace(config, data=config.held_out, rows=max_held_out(config))
        return data.with_held_out(_from_file(artifact, held_out))
    require_calibration(config)
    return CalibrationData(
        "random",
        tuple(range(_RANDOM_ROWS)),
        (),
        f"seed {config.seed}",
        f"{_RANDOM_ROWS} made-up inputs",
    )


def _given(artifact: Artifact, config: QuantizeConfig, inputs: Iterable[Any]) -> CalibrationData:
    _require_iterable(inputs)
    record = input_graph(artifact.manifest.graphs)
    columns = [name for name in (config.column, config.label_column) if name]
    inputs = select_columns(inputs, columns)
    stream = iterate(inputs, config.rows)
    # The first item says of what kind the others have to be; an iterator gives it only once.
    first = list(islice(stream, 1))
    if not first:
        raise InputError("the calibration inputs are empty.")
    stream = chain(first, stream)
    graph_inputs = {spec.name for spec in record.inputs}
    # Dicts of exactly the graph's inputs are arrays, all others are rows with columns.
    if isinstance(first[0], Mapping) and set(first[0]) != graph_inputs:
        return _from_rows(artifact, config, inputs, stream)
    if takes_audio(record) and not isinstance(first[0], Mapping):
        raise InputError(
            "calibration inputs cannot be sounds in Python.",
            do="Write them to a folder of .wav or .flac files: quantize_model(…, 'FOLDER', …).",
        )
    items = list(islice(stream, config.rows))
    kinds = {_kind(index, item, record) for index, item in enumerate(items)}
    if len(kinds) != 1:
        raise InputError(f"calibration inputs are of several kinds: {', '.join(sorted(kinds))}.")
    kind = kinds.pop()
    # Only rows with columns have labels.
    if config.label_column:
        raise OptionError(
            f"option 'label_column' is '{config.label_column}', but the inputs are {kind}.",
            do="Hand over rows: a Dataset, or dicts with both columns.",
        )
    if kind == "texts":
        check_texts(items)
    return CalibrationData(kind, tuple(items), (), _content(kind, items), f"{len(items)} {kind}")


def _require_iterable(inputs: Any) -> None:
    name = type(inputs).__name__
    if name == "DataFrame":  # it iterates over the names of its columns
        raise InputError(
            "calibration is a DataFrame, expected an iterable of rows.",
            do="Hand over its rows: frame.to_dict('records').",
        )
    if isinstance(inputs, str | bytes | Mapping) or not isinstance(inputs, Iterable):
        raise InputError(
            f"calibration is one {name}, expected an iterable of inputs.",
            do="Hand over one split: dataset['train']." if name.endswith("DatasetDict") else "",
        )


def _from_rows(
    artifact: Artifact, config: QuantizeConfig, rows: Any, stream: Iterable[Any]
) -> CalibrationData:
    record = input_graph(artifact.manifest.graphs)
    images = takes_images(record)
    if not images and not takes_texts(record) and not takes_prompts(record):
        names = ", ".join(spec.name for spec in record.inputs)
        raise InputError(
            f"calibration rows cannot be used: the graph takes {names}.",
            do=f"Hand over dicts with exactly these arrays: {names}.",
        )
    sample = sample_rows(
        rows, stream, config.column, config.label_column, rows=config.rows, images=images
    )
    # Labels may be names or numbers; the model's answers are indices.
    labels = index_labels(
        sample.labels,
        _label2id(artifact),
        where=f"calibration column '{config.label_column}'",
        names=sample.label_names,
        reading=config.label_values,
    )
    # An image is checked when it is decoded.
    if not images:
        check_texts(sample.items)
    described = _described(
        type(rows).__name__,
        len(sample.items),
        config.column,
        sample.left_out,
        "image" if images else "text",
    )
    kind: Kind = "images" if images else "texts"
    content = _content(kind, sample.items, labels)
    return CalibrationData(kind, sample.items, tuple(labels), content, described)


def _described(source: str, count: int, column: str, left_out: int, noun: str) -> str:
    without = f", {left_out} without {'an' if noun == 'image' else 'a'} {noun} left out"
    return f"{source}: {count} rows of '{column}'{without if left_out else ''}"


def _label2id(artifact: Artifact) -> dict[str, int]:
    return ModelConfig.read(artifact.path).label2id


def _kind(index: int, item: Any, record: GraphRecord) -> Kind:
    """Return the kind of an item; a string is a text, or the path of an image.

    Raises:
        InputError: the graph takes no images, and the item is neither a text nor a dict.
    """
    images = takes_images(record)
    if isinstance(item, Mapping):
        return "feeds"
    if isinstance(item, str) or images:
        return "images" if images else "texts"
    raise InputError(
        f"calibration input {index} is a {type(item).__name__}, expected a text or a dict of "
        "arrays."
    )


def _content(kind: Kind, items: Iterable[Any], labels: Sequence[int] = ()) -> str:
    """Return what the items are, and the digest of their content and labels."""
    digest = hashlib.sha256()
    for index, item in enumerate(items):
        if kind == "texts":
            digest.update(json.dumps(item).encode() + b"\0")
        elif kind == "feeds":
            digest.update(_feed_bytes(item))
        else:
            if isinstance(item, str | Path):
                note_input(Path(item))  # it is read again
            image = load_image(item, name=f"image {index}")
            digest.update(json.dumps([image.mode, image.size]).encode() + image.tobytes())
    if labels:
        digest.update(json.dumps(list(labels)).encode())
    return f"{kind} {digest.hexdigest()}"


def _feed_bytes(item: Mapping[str, Any]) -> bytes:
    arrays = {name: np.asarray(array) for name, array in sorted(item.items())}
    # With types and shapes, because the same bytes may be other numbers.
    head = json.dumps([[n, a.dtype.str, a.shape] for n, a in arrays.items()]).encode()
    return head + b"".join(np.ascontiguousarray(a).tobytes() for a in arrays.values())


def _from_file(artifact: Artifact, config: QuantizeConfig) -> CalibrationData:
    path = Path(config.data).expanduser()
    note_input(path)  # it is hashed after it was read
    record = input_graph(artifact.manifest.graphs)
    # Arrays fit any graph, so they are tried before what the graph takes.
    if holds_arrays(path):
        if config.label_column:
            raise OptionError(
                f"option 'label_column' is '{config.label_column}', but arrays have no columns.",
                do="Leave it out, or hand over rows in Python: quantize_model(…, rows, …).",
            )
        feeds = read_arrays(path, [spec.name for spec in record.inputs], rows=config.rows)
        described = f"{path.name}: {len(feeds)} rows of arrays"
        return CalibrationData("feeds", tuple(feeds), (), data_content(path), described)
    # Of models that generate, only those whose encoder takes spectrograms are calibrated.
    generates = find_encoder_decoder(artifact.manifest.graphs) is not None
    hears = takes_sounds(record) if generates else takes_audio(record)
    if takes_images(record) or hears:
        if config.label_column:
            raise OptionError(
                f"option 'label_column' is '{config.label_column}', but a folder of files has no "
                "columns.",
                do="Hand over rows in Python: quantize_model(…, dataset, column='image', …).",
            )
        kind: Kind = "images" if takes_images(record) else "sounds"
        files = list_media(path, "images" if kind == "images" else "audio", rows=config.rows)
        # Of a folder, only the files that are read count.
        digest = combined_sha256({f.relative_to(path).as_posix(): sha256_of(f) for f in files})
        content = f"{kind} {digest}"
        return CalibrationData(kind, tuple(files), (), content, f"{path.name}: {kind}")
    if not takes_texts(record) and not takes_prompts(record):
        names = ", ".join(sorted(spec.name for spec in record.inputs))
        raise InputError(
            f"calibration '{path}' cannot be used: the graph takes {names}.",
            do="Save an array for each of them as .npz, or hand dicts of arrays to "
            "quantize_model(…, data).",
        )
    text_rows = read_text_rows(
        path, config.column, rows=config.rows, label_column=config.label_column
    )
    labels = index_labels(
        text_rows.labels,
        _label2id(artifact),
        where=f"data '{path}': column '{config.label_column}'",
        reading=config.label_values,
        column=text_rows.label_values,
    )
    described = _described(
        path.name, len(text_rows.items), config.column, text_rows.left_out, "text"
    )
    return CalibrationData(
        "texts", tuple(text_rows.items), tuple(labels), data_content(path), described
    )

"""What a task takes and answers, as tensors.

>>> [tensor.name for tensor in answer_tensors(model, values)]
['label', 'score']

task                         inputs                   outputs
embeddings of texts, images  text; image              embedding FP32 (n, dim)
classification               text [text_pair]; image  label BYTES, score FP32 (n, k)
token classification         text                     entities BYTES (n,): JSON
question answering           question, context        answer BYTES, score FP32, start, end INT64
                                                      (n, k), best first, filled up with ""
fill-mask                    text                     fillings BYTES (n,): JSON
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from enginery.core.errors import nearest
from enginery.core.shapes import TensorSpec
from enginery.serve.reading import FieldError, shown
from enginery.serve.rooms import HostedModel
from enginery.serve.routes.forms import image_from_base64
from enginery.serve.routes.oip_binary import DATATYPE_OF, DATATYPES, Tensor

_TEXT = (("text", False),)
_INPUTS: dict[str, tuple[tuple[str, bool], ...]] = {
    "embed": _TEXT, "classify": (("text", False), ("text_pair", True)), "tag": _TEXT,
    "answer": (("question", False), ("context", False)), "fill": _TEXT,
    "classify_images": (("image", False),), "embed_images": (("image", False),),
}  # fmt: skip
"""The names of the inputs, and whether each may be left out."""

_EMBEDDING = (("embedding", "FP32", 2),)
_LABELS = (("label", "BYTES", 2), ("score", "FP32", 2))
_OUTPUTS: dict[str, tuple[tuple[str, str, int], ...]] = {
    "embed": _EMBEDDING, "embed_images": _EMBEDDING,
    "classify": _LABELS, "classify_images": _LABELS, "tag": (("entities", "BYTES", 1),),
    "answer": (
        ("answer", "BYTES", 2), ("score", "FP32", 2), ("start", "INT64", 2), ("end", "INT64", 2),
    ),
    "fill": (("fillings", "BYTES", 1),),
}  # fmt: skip
"""Name, datatype and rank."""


def task_metadata(model: HostedModel) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Inputs and outputs of the model's task; none where it has no answer in words."""
    inputs = [
        {
            "name": name, "datatype": "BYTES", "shape": [-1],
            "parameters": {"of": "task", "optional": optional},
        }
        for name, optional in _INPUTS.get(model.method, ())
    ]  # fmt: skip
    outputs = []
    for name, datatype, rank in _OUTPUTS.get(model.method, ()):
        size = (model.dim or -1) if name == "embedding" else -1
        shape = [-1] if rank == 1 else [-1, size]
        entry = {"name": name, "datatype": datatype, "shape": shape, "parameters": {"of": "task"}}
        outputs.append(entry)
    return inputs, outputs


def tensor_metadata(spec: TensorSpec) -> dict[str, Any]:
    """An input or output of the graph; -1 for a dim that varies."""
    shape = [dim if isinstance(dim, int) else -1 for dim in spec.dims]
    datatype = DATATYPE_OF.get(spec.dtype, "BYTES")
    return {
        "name": spec.name, "datatype": datatype, "shape": shape, "parameters": {"of": "graph"}
    }  # fmt: skip


def task_inputs(tensors: Sequence[Tensor], model: HostedModel) -> list[Any]:
    """What the model's method takes, one item an input.

    Raises:
        FieldError: a tensor is missing, unknown, no list of BYTES, or no text.
    """
    slots = _INPUTS[model.method]
    names = [name for name, _ in slots]
    graph = [spec.name for spec in model.record.inputs]
    columns: dict[str, list[Any]] = {}
    for tensor in tensors:
        if tensor.name not in names:
            close = nearest(tensor.name[:100], names + graph)
            raise FieldError(
                f"there is no input {shown(tensor.name)}{close}",
                field="inputs",
                do=f"Send {' and '.join(names)}; or the graph's own: {', '.join(graph)}.",
            )
        columns[tensor.name] = _column(tensor, model)
    for name, optional in slots:
        if name not in columns and not optional:
            raise FieldError(f"input '{name}' is missing.", field="inputs")
    sizes = {name: len(column) for name, column in columns.items()}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise FieldError(f"inputs differ in length: {listed}.", field="inputs")
    if len(columns) == 1:
        return next(iter(columns.values()))
    return list(zip(*(columns[name] for name in names), strict=True))


def _column(tensor: Tensor, model: HostedModel) -> list[Any]:
    where = f"input '{tensor.name}'"
    if not isinstance(tensor.values, list):
        raise FieldError(
            f"{where} has the datatype {tensor.datatype}, expected BYTES.", field="inputs"
        )
    if tensor.shape and len(tensor.values) != tensor.shape[0]:
        raise FieldError(
            f"{where} has the shape {list(tensor.shape)}, expected [n] or [n, 1].", field="inputs"
        )
    if model.takes_images:
        return [_image(item, f"{where}[{i}]") for i, item in enumerate(tensor.values)]
    texts = []
    for index, item in enumerate(tensor.values):
        try:
            texts.append(item.decode())
        except UnicodeDecodeError as error:
            raise FieldError(
                f"{where}[{index}] is not UTF-8: {error.reason} at byte {error.start}.",
                field="inputs",
            ) from None
    return texts


# How PNG, JPEG, GIF, WebP, TIFF, BMP and AVIF begin; none of it is base64.
_IMAGE_STARTS = (b"\x89PNG", b"\xff\xd8", b"GIF8", b"RIFF", b"II*\0", b"MM\0*", b"BM", b"\0\0\0")


def _image(item: bytes, where: str) -> bytes:
    """An image file; from JSON, which holds no bytes, in base64."""
    # "RIFF", "GIF8" and "BM" are letters of base64, in which an image begins otherwise.
    if item.startswith(_IMAGE_STARTS) or not item.isascii():
        return item
    return image_from_base64(item.decode("ascii"), where)


def feeds_of(tensors: Sequence[Tensor], model: HostedModel) -> dict[str, NDArray[Any]]:
    """The graph's feeds.

    Raises:
        FieldError: an input is missing or unknown, or has another datatype or shape.
    """
    specs = {spec.name: spec for spec in model.record.inputs}
    feeds: dict[str, NDArray[Any]] = {}
    sizes: dict[str, tuple[int, str]] = {}
    for tensor in tensors:
        spec = specs.get(tensor.name)
        if spec is None:
            raise FieldError(
                f"there is no input {shown(tensor.name)}{nearest(tensor.name[:100], specs)}",
                field="inputs",
                do=f"The graph takes: {'; '.join(map(str, specs.values()))}.",
            )
        feeds[spec.name] = _fitting(tensor, spec)
        _check_dims(tensor, spec, sizes)
    if missing := [name for name in specs if name not in feeds]:
        raise FieldError(
            f"input '{missing[0]}' is missing.",
            field="inputs",
            do=f"The graph takes: {'; '.join(map(str, specs.values()))}.",
        )
    return feeds


def _fitting(tensor: Tensor, spec: TensorSpec) -> NDArray[Any]:
    # BF16 is part of FP32: nothing is lost on the way.
    widens = tensor.datatype == "BF16" and spec.dtype in ("float32", "bfloat16")
    if isinstance(tensor.values, list) or (DATATYPES[tensor.datatype] != spec.dtype and not widens):
        raise FieldError(
            f"input '{spec.name}' has the datatype {tensor.datatype}, "
            f"expected {DATATYPE_OF.get(spec.dtype, spec.dtype)}.",
            field="inputs",
        )
    return tensor.values


def _check_dims(tensor: Tensor, spec: TensorSpec, sizes: dict[str, tuple[int, str]]) -> None:
    """Raises FieldError where a fixed dim, or one that another input has too, differs."""
    expected = f"expected ({', '.join(map(str, spec.dims))})"
    where = f"input '{spec.name}' has the shape {list(tensor.shape)}"
    if len(tensor.shape) != len(spec.dims):
        raise FieldError(f"{where}, {expected}.", field="inputs")
    for size, dim in zip(tensor.shape, spec.dims, strict=True):
        if isinstance(dim, int):
            if dim != size:
                raise FieldError(f"{where}, {expected}.", field="inputs")
            continue
        known, of = sizes.setdefault(dim, (size, spec.name))
        if known != size:
            raise FieldError(f"{where}: {dim} is {size}, but {known} in '{of}'.", field="inputs")


def graph_tensors(values: Mapping[str, NDArray[Any]], model: HostedModel) -> list[Tensor]:
    """The graph's outputs."""
    dtypes = {spec.name: spec.dtype for spec in model.record.outputs}
    tensors = []
    for name, value in values.items():
        array = np.asarray(value)
        if dtypes.get(name) == "bfloat16":
            tensors.append(Tensor(name, "BF16", array.shape, array.astype(np.float32)))
        elif array.dtype == object:
            items = [str(item).encode() for item in array.reshape(-1)]
            tensors.append(Tensor(name, "BYTES", array.shape, items))
        else:
            tensors.append(Tensor(name, DATATYPE_OF[array.dtype.name], array.shape, array))
    return tensors


def answer_tensors(model: HostedModel, values: Sequence[Any]) -> list[Tensor]:
    """The answers of the model's method."""
    rows = len(values)
    if model.method in ("embed", "embed_images"):
        vectors = np.stack(values)
        return [Tensor("embedding", "FP32", vectors.shape, vectors)]
    if model.method in ("classify", "classify_images"):
        return _labels(values)
    if model.method == "answer":
        return _answers(values)
    name = "entities" if model.method == "tag" else "fillings"
    return [Tensor(name, "BYTES", (rows,), [orjson.dumps(value) for value in values])]


def _labels(values: Sequence[Any]) -> list[Tensor]:
    shape = (len(values), len(values[0].labels))
    labels = [label for value in values for label in value.labels]
    scores = np.array([label.score for label in labels], np.float32).reshape(shape)
    return [
        Tensor("label", "BYTES", shape, [label.label.encode() for label in labels]),
        Tensor("score", "FP32", shape, scores),
    ]


def _answers(values: Sequence[Any]) -> list[Tensor]:
    most = max(len(value) for value in values)
    none = (b"", 0.0, 0, 0)
    filled = [
        row
        for value in values
        for row in (
            *((one.text.encode(), one.score, one.start, one.end) for one in value),
            *[none] * (most - len(value)),
        )
    ]
    texts, scores, starts, ends = zip(*filled, strict=True)
    shape = (len(values), most)
    return [
        Tensor("answer", "BYTES", shape, list(texts)),
        Tensor("score", "FP32", shape, np.array(scores, np.float32).reshape(shape)),
        Tensor("start", "INT64", shape, np.array(starts, np.int64).reshape(shape)),
        Tensor("end", "INT64", shape, np.array(ends, np.int64).reshape(shape)),
    ]

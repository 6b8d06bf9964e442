"""Derive columns, tensors and JSON values from the type of a task's result.

A result is a dataclass, a list of dataclasses, or a vector. What the type alone does not say is an
annotation: `Ranked`, `Nested` or `Alternatives` for a list, `ColumnName` for a field.

>>> from enginery.runtime.tasks.answer import ContextAnswer
>>> Answers = Annotated[list[ContextAnswer], Ranked("answers")]
>>> [field.name for field in arrow_fields(Answers)]
['answer', 'score', 'start', 'end', 'answers']
>>> output_tensors(Answers)[0]
OutputTensor(name='answer', dtype='string', rank=2)
>>> result_tensors(Answers, [[ContextAnswer("London", 0.75, 13, 19)]])["start"]
array([[13]])
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from enginery.core.errors import InputError
from enginery.runtime.text.pooling import Vectors
from enginery.runtime.text.vector_dtypes import ARRAY_DTYPES, INT8_SCALE, VectorDtype

Dtype = Literal["float32", "int64", "string"]

TokenVectors = list[NDArray[np.float32]]
"""The type of results with a vector for each token: float32 (tokens, dim) each."""

VECTOR = "embedding"
"""Name of the column and the tensor of vectors."""
_DTYPES: Mapping[Any, Dtype] = {str: "string", float: "float32", int: "int64"}


class Result:
    """Base of results that are dataclasses."""

    def to_dict(self) -> dict[str, Any]:
        """Return the result as dicts, lists, strings and numbers."""
        plain: dict[str, Any] = to_plain(self)
        return plain


@dataclass(frozen=True)
class ColumnName:
    """Annotates a field: the name of its column and tensor, if it is not the field's."""

    name: str
    """Empty for a field that has no column and no tensor."""


@dataclass(frozen=True)
class Ranked:
    """Annotates a list of dataclasses, best first.

    The columns are the fields of the best item and, unless only one is asked for, a list of all.
    The tensors are the fields of all items: (results, items), padded with empty ones.
    """

    column: str
    """Name of the column of all items."""


@dataclass(frozen=True)
class Nested:
    """Annotates a list of any length, or lists of lists: one column, and one tensor of JSON."""

    column: str
    tensor: str


@dataclass(frozen=True)
class Alternatives:
    """Annotates a list of dataclasses: columns of their fields, of lists if several are asked for.

    They have no tensors.
    """


@dataclass(frozen=True)
class OutputTensor:
    """The name and type of a result tensor, for the Open Inference Protocol and Triton."""

    name: str
    dtype: Dtype
    rank: int


@dataclass(frozen=True)
class _Format:
    """What the type of a result says, unless it is a vector."""

    layout: Ranked | Nested | Alternatives | None
    """None for a single dataclass."""
    kind: Any
    """The type of the list, or the dataclass, without its annotation."""
    list_field: str
    """Name of the result's field with the list; empty if the result itself is the list."""
    columns: Mapping[str, Any]
    """Type of each column that is a field of the dataclass; empty for `Nested`."""
    fields: tuple[str, ...] = ()
    """Names of these fields."""

    def items(self, result: Any) -> Sequence[Any]:
        """Return the list of a result; a single dataclass is one item."""
        if self.layout is None:
            return (result,)
        items: Sequence[Any] = getattr(result, self.list_field) if self.list_field else result
        return items

    def cells(self, item: Any) -> tuple[Any, ...]:
        """Return a dataclass's values in the order of the columns."""
        values = (getattr(item, name) for name in self.fields)
        # The parts of a result, such as what was said when, are structs.
        return tuple(to_plain(v) if isinstance(v, tuple | list) else v for v in values)

    def row(self, result: Any) -> tuple[Any, ...]:
        """Return a result's values in the order of a table's columns."""
        items = self.items(result)
        if isinstance(self.layout, Nested):
            return (to_plain(items),)
        if isinstance(self.layout, Ranked):
            return (*self.cells(items[0]), to_plain(items))
        rows = [self.cells(item) for item in items]
        return rows[0] if len(rows) == 1 else tuple(map(list, zip(*rows, strict=True)))


@cache
def _format_of(result_type: Any) -> _Format:
    layout, kind, list_field = _annotation(result_type), bare_type(result_type), ""
    if layout is None:
        for name, hint in _field_types(kind).items():
            mark = _annotation(hint)
            if isinstance(mark, Ranked | Nested | Alternatives):
                layout, kind, list_field = mark, bare_type(hint), name
    if isinstance(layout, Nested):
        return _Format(layout, kind, list_field, {})
    record = kind if layout is None else get_args(kind)[0]
    columns, names = {}, []
    for name, hint in _field_types(record).items():
        mark = _annotation(hint)
        column = mark.name if isinstance(mark, ColumnName) else name
        if column:
            columns[column] = bare_type(hint)
            names.append(name)
    return _Format(layout, kind, list_field, columns, tuple(names))


def bare_type(hint: Any) -> Any:
    """Return a type without its annotations and without None."""
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    return kinds[0] if NoneType in get_args(hint) else hint


def arrow_fields(
    result_type: Any, *, items: int = 0, dim: int = 0, dtype: VectorDtype = "float32"
) -> list[Any]:
    """Return the `pyarrow.Field` of each column of a table of results.

    Args:
        result_type: the type of a result.
        items: maximum number of items of a result that were asked for; 0 for all.
        dim: size of vectors; not used by other results.
        dtype: type of vectors; the field of int8 has its scale as metadata.
    """
    import pyarrow as pa

    if result_type in (Vectors, TokenVectors):
        vector = pa.list_(pa.from_numpy_dtype(ARRAY_DTYPES[dtype]), dim)
        kind = vector if result_type is Vectors else pa.list_(vector)
        scale = {"enginery.scale": str(INT8_SCALE)} if dtype == "int8" else None
        return [pa.field(VECTOR, kind, metadata=scale)]
    form = _format_of(result_type)
    if isinstance(form.layout, Nested):
        return [pa.field(form.layout.column, _arrow_type(form.kind))]
    columns = {column: _arrow_type(kind) for column, kind in form.columns.items()}
    if items != 1 and isinstance(form.layout, Alternatives):
        columns = {name: pa.list_(kind) for name, kind in columns.items()}
    if items != 1 and isinstance(form.layout, Ranked):
        columns[form.layout.column] = _arrow_type(form.kind)
    return [pa.field(name, kind) for name, kind in columns.items()]


def arrow_rows(result_type: Any, results: Sequence[Any | None]) -> list[tuple[Any, ...]]:
    """Return the values of each result in the order of `arrow_fields`; further ones are ignored.

    Args:
        result_type: the type of a result.
        results: the results; None for a row without one, whose values are None.
    """
    form = None if result_type in (Vectors, TokenVectors) else _format_of(result_type)
    empty = (None,) * (len(form.columns) + 1 if form else 1)
    return [
        empty if result is None else form.row(result) if form else (result,) for result in results
    ]


def output_tensors(result_type: Any) -> tuple[OutputTensor, ...]:
    """Return the names and types of the tensors of results, in the order of `result_tensors`."""
    if result_type is Vectors:
        return (OutputTensor(VECTOR, "float32", 2),)
    form = _format_of(result_type)
    if isinstance(form.layout, Alternatives):
        return ()
    if isinstance(form.layout, Nested):
        return (OutputTensor(form.layout.tensor, "string", 1),)
    rank = 1 if form.layout is None else 2
    return tuple(OutputTensor(name, _DTYPES[kind], rank) for name, kind in form.columns.items())


def result_tensors(result_type: Any, results: Sequence[Any]) -> dict[str, NDArray[Any]]:
    """Return results as the tensors of `output_tensors`; strings as UTF-8 bytes.

    Raises:
        InputError: vectors are of whole numbers.
    """
    if result_type is Vectors:
        vectors = np.stack(results)
        if vectors.dtype.kind != "f":
            raise InputError(
                f"dtype: the tensor {VECTOR} is float32, found vectors of {vectors.dtype}.",
                do="Leave dtype out, or send texts to /embed or /v1/embeddings.",
            )
        return {VECTOR: vectors.astype(np.float32, copy=False)}
    form, outputs = _format_of(result_type), output_tensors(result_type)
    if isinstance(form.layout, Nested):
        texts = [json.dumps(to_plain(result), ensure_ascii=False) for result in results]
        return {outputs[0].name: _tensor(texts, "string", (len(texts),))}
    lists = [form.items(result) for result in results]
    width = max(map(len, lists))
    shape = (len(lists),) if form.layout is None else (len(lists), width)
    empty = tuple("" if output.dtype == "string" else 0 for output in outputs)
    rows: list[tuple[Any, ...]] = []
    for items in lists:
        rows += [form.cells(item) for item in items] + [empty] * (width - len(items))
    return {
        output.name: _tensor(values, output.dtype, shape)
        for output, values in zip(outputs, zip(*rows, strict=True), strict=True)
    }


def is_finite(result: Any) -> bool:
    """Return True if every number of a result, or of results, is finite."""
    if isinstance(result, np.ndarray):
        return bool(np.isfinite(result).all())
    if isinstance(result, list | tuple):
        return all(map(is_finite, result))
    if result is None or isinstance(result, float):
        return result is None or math.isfinite(result)
    record: Any = type(result)
    return all(is_finite(getattr(result, name)) for name in _float_fields(record))


def to_plain(value: Any) -> Any:
    """Return a result as dicts, lists, strings and numbers; arrays stay."""
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if is_dataclass(value):
        return {name: to_plain(part) for name, part in vars(value).items()}
    return value


def named_values(result_type: Any, result: Any) -> dict[str, Any]:
    """Return a result other than a vector as plain values by name; a list has its column's name."""
    plain = to_plain(result)
    layout = _format_of(result_type).layout
    if isinstance(plain, list) and isinstance(layout, Ranked | Nested):
        return {layout.column: plain}
    values: dict[str, Any] = plain
    return values


def _annotation(hint: Any) -> Any:
    """Return the annotation of a type; None if it has none."""
    return get_args(hint)[1] if get_origin(hint) is Annotated else None


@cache
def _field_types(record: Any) -> dict[str, Any]:
    """Return the type of each field of a dataclass, with its annotation."""
    hints = get_type_hints(record, include_extras=True)
    return {field.name: hints[field.name] for field in fields(record)}


def _arrow_type(kind: Any) -> Any:
    import pyarrow as pa

    kind = bare_type(kind)
    if kind in _DTYPES:
        return pa.type_for_alias(_DTYPES[kind])
    if get_origin(kind) is np.ndarray:
        return pa.list_(pa.from_numpy_dtype(_element_type(kind)))
    if get_origin(kind) in (list, tuple):
        return pa.list_(_arrow_type(get_args(kind)[0]))
    types = _field_types(kind).items()
    return pa.struct([(name, _arrow_type(bare_type(hint))) for name, hint in types])


@cache
def _float_fields(record: Any) -> tuple[str, ...]:
    """Return the names of the fields of a dataclass that are or contain floats."""
    types = _field_types(record).items()
    return tuple(name for name, hint in types if _has_floats(bare_type(hint)))


def _element_type(kind: Any) -> Any:
    """Return the numpy type of the elements of `NDArray[…]`."""
    return get_args(get_args(kind)[1])[0]


def _has_floats(kind: Any) -> bool:
    kind = bare_type(kind)
    if get_origin(kind) is np.ndarray:
        return bool(np.issubdtype(_element_type(kind), np.floating))
    if get_origin(kind) in (list, tuple):
        return _has_floats(get_args(kind)[0])
    return kind is float or (kind not in _DTYPES and bool(_float_fields(kind)))


def _tensor(values: Sequence[Any], dtype: Dtype, shape: tuple[int, ...]) -> NDArray[Any]:
    if dtype != "string":
        return np.array(values, dtype).reshape(shape)
    # np.array would make bytes of a fixed size, which lose trailing zeros.
    array = np.empty(len(values), dtype=object)
    array[:] = [text.encode() for text in values]
    return array.reshape(shape)

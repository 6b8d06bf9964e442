"""The columns of the output: names, types, and record batches built from results.

>>> import pyarrow as pa
>>> from enginery.runtime.tasks.classify import Classify
>>> kept = pa.schema({"id": pa.int64(), "text": pa.string()})
>>> options = Classify.Options(top_k=1)
>>> OutputColumns.of(Classify, options, kept, kept.names, prefix="", dim=0).schema
id: int64
text: string
label: string
score: float
error: string
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from enginery.core.datasets.arrow_arrays import to_arrow
from enginery.core.errors import InputError
from enginery.runtime.tasks.results import arrow_fields, arrow_rows
from enginery.runtime.tasks.task import RowValues, Task, TaskOptions

ERROR = "error"


@dataclass(frozen=True)
class OutputColumns:
    """Columns of the output."""

    schema: Any
    """`pyarrow.Schema`: the kept columns, those of the prediction, and `error`."""
    result_type: Any
    """The type of the task's results."""
    predicted: tuple[str, ...]
    """Names of the prediction's columns and of `error`."""

    @classmethod
    def of(
        cls,
        task: type[Task],
        options: TaskOptions,
        kept: Any,
        input_names: Sequence[str],
        *,
        prefix: str,
        dim: int,
    ) -> OutputColumns:
        """Return the columns of a task.

        Args:
            task: the model's task.
            options: options of the task.
            kept: `pyarrow.Schema` of the columns that are kept of the input.
            input_names: names of the input's columns.
            prefix: prefix of the names of the prediction's columns; empty for `predicted_` where
                the input has a column of the same name.
            dim: length of an embedding; not used by other tasks.

        Raises:
            InputError: a column of the input has the name of a column of the prediction.
        """
        import pyarrow as pa

        result_type = task.result_type_for(options)
        columns = arrow_fields(
            result_type,
            items=options.max_items,
            dim=dim,
            dtype=getattr(options, "dtype", "float32"),
        )
        columns.append(pa.field(ERROR, pa.string()))
        names = tuple(_output_name(field.name, input_names, prefix) for field in columns)
        fields = [field.with_name(name) for field, name in zip(columns, names, strict=True)]
        return cls(pa.schema([*kept, *fields], metadata=kept.metadata), result_type, names)

    def batch(self, kept: Any, answers: RowValues, errors: Mapping[int, str]) -> Any:
        """Return a `pyarrow.RecordBatch` of the schema.

        Args:
            kept: `pyarrow.RecordBatch` with the kept columns.
            answers: the task's result for each row, None for a bad row; or vectors without bad
                rows, as an array (rows, dim).
            errors: index of a bad row -> its problem.
        """
        import pyarrow as pa

        offset = kept.num_columns
        fields = [self.schema.field(offset + index) for index in range(len(self.predicted))]
        if isinstance(answers, np.ndarray):
            arrays = [to_arrow(answers, field.type) for field in fields[:-1]]
        else:
            rows = arrow_rows(self.result_type, answers)
            arrays = [
                to_arrow([row[index] for row in rows], field.type)
                for index, field in enumerate(fields[:-1])
            ]
        arrays.append(to_arrow([errors.get(row) for row in range(len(answers))], fields[-1].type))
        return pa.RecordBatch.from_arrays([*kept.columns, *arrays], schema=self.schema)


def _output_name(name: str, input_names: Sequence[str], prefix: str) -> str:
    """Return the name of a column of the prediction that the input has no column of."""
    prefixed = prefix + name
    if prefixed in input_names and not prefix:
        prefixed = f"predicted_{name}"
    if prefixed in input_names:
        raise InputError(
            f"the input has a column '{prefixed}', and the prediction would have one, too.",
            do=f"Give the prediction's columns another prefix: --prefix model_{prefix}",
        )
    return prefixed

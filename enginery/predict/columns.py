"""The columns of results: their names, their types, and results as values of them.

>>> options = read_options(Classify, config)
>>> AnswerColumns.of(Classify, options, kept, kept.names, prefix="", dim=0).schema
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

from enginery.core.datasets.arrow_arrays import to_arrow
from enginery.core.errors import InputError
from enginery.runtime.tasks.task import Task, TaskOptions

ERROR = "error"


@dataclass(frozen=True)
class AnswerColumns:
    """What is written of each row."""

    schema: Any
    """`pyarrow.Schema`: the kept columns, the answer's, and `error`."""
    task: type[Task]
    answers: tuple[str, ...]
    """The names of the answer's columns, with `error`."""

    @classmethod
    def of(
        cls,
        task: type[Task],
        options: TaskOptions,
        kept: Any,
        taken: Sequence[str],
        *,
        prefix: str,
        dim: int,
    ) -> AnswerColumns:
        """Return the columns of a task.

        Args:
            task: what the model does.
            options: of the task.
            kept: the schema of what is kept of the input.
            taken: the names of the input's columns.
            prefix: what the names of the answer's columns begin with.
            dim: the length of a vector, where the task gives vectors.

        Raises:
            InputError: the input has a column of such a name already.
        """
        import pyarrow as pa

        found = [*task.arrow_fields(options, dim), pa.field(ERROR, pa.string())]
        fields = [field.with_name(prefix + field.name) for field in found]
        names = tuple(field.name for field in fields)
        require_free(names, taken, prefix)
        return cls(pa.schema([*kept, *fields], metadata=kept.metadata), task, names)

    def batch(self, kept: Any, answers: Sequence[Any], errors: Mapping[int, str]) -> Any:
        """Return a `pyarrow.RecordBatch` of the schema.

        Args:
            kept: a batch with the kept columns.
            answers: a result of the task for each row; None for a bad row.
            errors: by row, why it has no answer.
        """
        import pyarrow as pa

        first = kept.num_columns
        fields = [self.schema.field(first + index) for index in range(len(self.answers))]
        values = self.task.arrow_values
        rows = [None if answer is None else values(answer) for answer in answers]
        arrays = [
            to_arrow([None if row is None else row[index] for row in rows], field.type)
            for index, field in enumerate(fields[:-1])
        ]
        arrays.append(to_arrow([errors.get(row) for row in range(len(answers))], fields[-1].type))
        return pa.RecordBatch.from_arrays([*kept.columns, *arrays], schema=self.schema)


def require_free(answers: Sequence[str], names: Sequence[str], prefix: str) -> None:
    """Raise InputError where the input has a column that the answer is to have."""
    if taken := [name for name in answers if name in names]:
        raise InputError(
            f"the input has a column '{taken[0]}' already, which the answer is to have.",
            do=f"Give the answer's columns a prefix: --prefix predicted_{prefix}",
        )

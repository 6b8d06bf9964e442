"""The answer's columns: their names, their types, and answers as values of them.

>>> AnswerColumns.of("text-classification", PredictConfig(), kept, kept.names, dim=0).schema
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

from enginery.core.errors import InputError
from enginery.predict.arrays import array_of
from enginery.predict.config import PredictConfig

ERROR = "error"


@dataclass(frozen=True)
class AnswerColumns:
    """What is written of each row."""

    schema: Any
    """`pyarrow.Schema`: the kept columns, the answer's, and `error`."""
    kind: str
    """vector, labels, spans, answers or fillings."""
    answers: tuple[str, ...]
    """The names of the answer's columns, with `error`."""

    @classmethod
    def of(
        cls, task: str, config: PredictConfig, kept: Any, taken: Sequence[str], *, dim: int
    ) -> AnswerColumns:
        """The columns of a task.

        Args:
            task: what the model does.
            config: how many labels or answers, and the names' prefix.
            kept: the schema of what is kept of the input.
            taken: the names of the input's columns.
            dim: the length of a vector, where the task has one.

        Raises:
            InputError: the input has a column of such a name already.
        """
        import pyarrow as pa

        kind, found = _fields(task, config, dim)
        fields = [f.with_name(config.prefix + f.name) for f in found]
        fields.append(pa.field(config.prefix + ERROR, pa.string()))
        names = tuple(field.name for field in fields)
        require_free(names, taken, config)
        return cls(pa.schema([*kept, *fields], metadata=kept.metadata), kind, names)

    def batch(self, kept: Any, answers: Sequence[Any], errors: Mapping[int, str]) -> Any:
        """A `pyarrow.RecordBatch` of the schema.

        Args:
            kept: a batch with the kept columns.
            answers: one a row; None for a bad row.
            errors: by row, why it has no answer.
        """
        import pyarrow as pa

        first = kept.num_columns
        fields = [self.schema.field(first + index) for index in range(len(self.answers))]
        if self.kind == "vector":
            arrays = [array_of(answers, fields[0].type)]
        else:
            rows = [_VALUES[self.kind](answer) if answer is not None else None
                    for answer in answers]  # fmt: skip
            arrays = [
                array_of([None if row is None else row[index] for row in rows], field.type)
                for index, field in enumerate(fields[:-1])
            ]
        arrays.append(array_of([errors.get(row) for row in range(len(answers))], fields[-1].type))
        return pa.RecordBatch.from_arrays([*kept.columns, *arrays], schema=self.schema)


def require_free(answers: Sequence[str], names: Sequence[str], config: PredictConfig) -> None:
    """Raises InputError where the input has a column that the answer is to have."""
    if taken := [name for name in answers if name in names]:
        raise InputError(
            f"the input has a column '{taken[0]}' already, which the answer is to have.",
            do=f"Give the answer's columns a prefix: --prefix predicted_{config.prefix}",
        )


def _fields(task: str, config: PredictConfig, dim: int) -> tuple[str, list[Any]]:
    import pyarrow as pa

    label, score = pa.field("label", pa.string()), pa.field("score", pa.float32())
    place = [pa.field("start", pa.int64()), pa.field("end", pa.int64())]
    several = config.top_k != 1
    if task == "feature-extraction":
        return "vector", [pa.field("embedding", pa.list_(pa.float32(), dim))]
    if task in ("text-classification", "image-classification"):
        scores = pa.field("scores", pa.list_(pa.struct([label, score])))
        return "labels", [label, score, *([scores] if several else [])]
    if task == "token-classification":
        span = pa.struct([label, score, *place, pa.field("text", pa.string())])
        return "spans", [pa.field("spans", pa.list_(span))]
    if task == "question-answering":
        found = pa.struct([pa.field("text", pa.string()), score, *place])
        answers = pa.field("answers", pa.list_(found))
        one = [pa.field("answer", pa.string()), score, *place]
        return "answers", [*one, *([answers] if several else [])]
    filling = pa.struct([
        pa.field("token", pa.string()), pa.field("token_id", pa.int64()), score,
        pa.field("sequence", pa.string()),
    ])  # fmt: skip
    return "fillings", [pa.field("masks", pa.list_(pa.list_(filling)))]


def _labels(answer: Any) -> tuple[Any, ...]:
    return answer.label, answer.score, [vars(label) for label in answer.labels]


def _spans(answer: Any) -> tuple[Any, ...]:
    return ([vars(span) for span in answer],)


def _found(answer: Any) -> tuple[Any, ...]:
    best = answer[0]
    return best.text, best.score, best.start, best.end, [vars(found) for found in answer]


def _fillings(answer: Any) -> tuple[Any, ...]:
    return ([[vars(filling) for filling in mask] for mask in answer.masks],)


_VALUES = {"labels": _labels, "spans": _spans, "answers": _found, "fillings": _fillings}

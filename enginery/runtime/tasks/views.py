"""Views: other results of a task's graph, for the same texts.

    views = task_views(task, artifact)
    work = views["embed_tokens"].preprocess(["The engine is warm."], PromptOptions())
    outputs = BatchRunner(task, runner).run_all(work.rows)    # the task splits rows of its views
    (vectors,) = views["embed_tokens"].postprocess(work, outputs, PromptOptions())

A view prepares rows with its verb as their `form`, and makes results of what the task's `split`
returns for them. So its rows run in the sessions, queues and processes of the task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import override

from enginery.core.artifact.artifact import Artifact
from enginery.core.errors import InputError
from enginery.runtime.tasks.embed import (
    TOKEN_OUTPUTS,
    TOKENS,
    Embed,
    PromptedTask,
    PromptOptions,
)
from enginery.runtime.tasks.fill import SPARSE, Fill
from enginery.runtime.tasks.results import Result, TokenVectors
from enginery.runtime.tasks.task import Arrays, ModelInputs, Row, RowValues, Task, TaskOptions
from enginery.runtime.tasks.text import TextTask, scan_cost

_MAX_DESCRIBED = 3


@dataclass(frozen=True, eq=False)
class SparseVector(Result):
    """The weights of one text, each for a token of the vocabulary; the others are 0."""

    indices: NDArray[np.int64]
    """Indices of the tokens, ascending: int64 (weights,)."""
    values: NDArray[np.float32]
    """Their weights, above 0: float32 (weights,)."""


class SparseOptions(PromptOptions):
    """Options of `embed_sparse`."""

    max_active_dims: Annotated[int, Field(ge=1)] | None = None
    """Keep only this many largest weights of a vector; null for all."""


@dataclass
class View(PromptedTask):
    """Base of the views of tasks on texts."""

    of: ClassVar[type[TextTask]]
    """The task."""
    tasks = ()  # an artifact is of the task, not of its view
    base: TextTask = field(kw_only=True)
    """The opened task, which splits the outputs."""

    @classmethod
    def over(cls, base: TextTask, artifact: Artifact) -> Self:
        """Return the view of an opened task, with its tokenizer.

        Raises:
            ArtifactError: a file is malformed.
        """
        shared = {f.name: getattr(base, f.name) for f in fields(TextTask) if f.init}
        _, settings = cls._read_settings(artifact, base.record)
        takes_token_ids = base.takes_token_ids if isinstance(base, PromptedTask) else True
        return cls(**shared, **settings, takes_token_ids=takes_token_ids, base=base)

    def preprocess(
        self, inputs: Sequence[str | Sequence[int]], options: PromptOptions
    ) -> ModelInputs:
        """Tokenize texts into rows of this form."""
        work = super().preprocess(inputs, options)
        for row in work.rows:
            row.form = self.verb
        work.postprocess_cost = scan_cost(work.rows)
        return work

    def split(
        self, rows: Sequence[Row], feeds: Mapping[str, NDArray[Any]], outputs: Arrays
    ) -> RowValues:
        """Split the graph's outputs by row, as the task does for this form."""
        return self.base.split(rows, feeds, outputs)


@dataclass
class EmbedTokens(View):
    """Embed each token of texts: the model's token vectors, as they are before the pooling."""

    verb = TOKENS
    purpose = "embeds the tokens of texts"
    of = Embed
    result_type = TokenVectors

    def preprocess(
        self, inputs: Sequence[str | Sequence[int]], options: PromptOptions
    ) -> ModelInputs:
        """Tokenize texts into rows; raise InputError if the graph has no vectors of tokens."""
        if not self.base.outputs_read(raw=True):
            outputs = ", ".join(spec.name for spec in self.record.outputs)
            raise InputError(
                f"the graph has the outputs {outputs}, and none of the vectors of tokens: "
                f"{' or '.join(TOKEN_OUTPUTS)}.",
                do="It pools by itself. Export the encoder below the pooling.",
            )
        work = super().preprocess(inputs, options)
        for row in work.rows:
            row.reads_raw = True
        work.numbers = self._dim * sum(row.tokens for row in work.rows)
        return work

    @property
    def _dim(self) -> int:
        """The size of a token's vector as the graph or config.json declares it."""
        (name,) = self.base.outputs_read(raw=True)
        dim = next(spec.dims[-1] for spec in self.record.outputs if spec.name == name)
        return dim if isinstance(dim, int) else self.config.hidden_size

    def postprocess(
        self, work: ModelInputs, outputs: Sequence[Any], options: PromptOptions
    ) -> list[NDArray[np.float32]]:
        """Return float32 (tokens, dim) for each text, with its special tokens."""
        return [tokens.astype(np.float32, copy=False) for tokens in outputs]

    def probe(self, tokens: int) -> Row:
        """Return a row of `tokens` token ids; see `TextTask.probe`."""
        row = super().probe(tokens)
        row.form, row.reads_raw = self.verb, True
        return row

    @override
    def describe(self, result: NDArray[np.float32]) -> str:
        """Return the number of tokens and of dims."""
        return f"{len(result)} tokens of {result.shape[-1]} dims"


@dataclass
class EmbedSparse(View):
    """Embed texts as sparse vectors over the vocabulary, with a SPLADE model."""

    verb = SPARSE
    purpose = "embeds texts as sparse vectors"
    of = Fill
    result_type = SparseVector
    Options: ClassVar[type[TaskOptions]] = SparseOptions

    def preprocess(
        self, inputs: Sequence[str | Sequence[int]], options: PromptOptions
    ) -> ModelInputs:
        """Tokenize texts into rows; raise InputError if modules.json has no SpladePooling."""
        if isinstance(self.base, Fill) and self.base.splade is None:
            raise InputError(
                "the model's modules.json has no SpladePooling, so that it makes no sparse vectors."
            )
        work = super().preprocess(inputs, options)
        dims = next(spec.dims for spec in self.record.outputs if spec.name == "logits")
        vocabulary = dims[-1] if isinstance(dims[-1], int) else self.tokenizer.vocabulary_size
        largest = getattr(options, "max_active_dims", None) or vocabulary
        work.numbers = len(work.rows) * min(largest, vocabulary)
        return work

    def postprocess(
        self, work: ModelInputs, outputs: Sequence[Any], options: SparseOptions
    ) -> list[SparseVector]:
        """Return a `SparseVector` for each text."""
        count = options.max_active_dims
        return [
            SparseVector(*(_largest(indices, values, count) if count else (indices, values)))
            for indices, values in outputs
        ]

    @override
    def describe(self, result: SparseVector) -> str:
        """Return the tokens of the largest weights."""
        indices, values = _largest(result.indices, result.values, _MAX_DESCRIBED)
        tokens = [self.tokenizer.decode([int(index)], skip_special=False) for index in indices]
        pairs = zip(tokens, values, strict=True)
        return "; ".join(f"{token} {value:.2f}" for token, value in pairs)


def _largest(
    indices: NDArray[np.int64], values: NDArray[np.float32], count: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the `count` largest weights, in the order of their indices."""
    if len(values) <= count:
        return indices, values
    largest = np.sort(np.argsort(-values, kind="stable")[:count])
    return indices[largest], values[largest]


VIEWS: dict[str, type[View]] = {view.verb: view for view in (EmbedTokens, EmbedSparse)}
"""The views by verb."""


def task_views(task: Task, artifact: Artifact) -> dict[str, View]:
    """Return the views of an opened task, by verb; most tasks have none.

    Raises:
        ArtifactError: a file is malformed.
    """
    # Not of classes derived from a task, which run other inputs beside the texts.
    return {
        verb: view.over(task, artifact)
        for verb, view in VIEWS.items()
        if isinstance(task, TextTask) and type(task) is view.of
    }

"""Fill-mask: predict the tokens behind the masks of a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import ArtifactError, InputError
from enginery.runtime.tasks.results import Nested, Result
from enginery.runtime.tasks.task import (
    Arrays,
    InputField,
    ModelInputs,
    Row,
)
from enginery.runtime.tasks.text import TextOptions, TextTask, softmax
from enginery.runtime.text.splade import SpladePooling, read_splade_pooling

SPARSE = "embed_sparse"
"""The form of rows whose sparse vectors are wanted; the verb of that view."""
_MAX_DESCRIBED = 3
_LIGHT_TOKENS = 2000


@dataclass(frozen=True)
class Filling(Result):
    """A token that replaces one mask."""

    token: str
    token_id: int
    score: float
    sequence: str
    """The whole text with this token in place of the mask, as the tokenizer decodes it."""


@dataclass(frozen=True)
class MaskFillings(Result):
    """The best tokens for each mask of one text, in the order of the masks."""

    masks: Annotated[tuple[tuple[Filling, ...], ...], Nested("masks", "fillings")]


class FillOptions(TextOptions):
    """Options of `fill`."""

    top_k: Annotated[int, Field(ge=1, le=1000)] = 5
    """Number of tokens per mask, best first."""


@dataclass
class Fill(TextTask):
    """Predict the most probable tokens for each mask of each text."""

    verb = "fill"
    purpose = "fills masks"
    tasks = ("fill-mask",)
    inputs = (InputField("text", "The engine is {mask}."),)
    graph_outputs: ClassVar[Mapping[str, int]] = {"logits": 3}
    result_type = MaskFillings
    Options = FillOptions

    splade: SpladePooling | None = field(default_factory=SpladePooling, kw_only=True)
    """How logits become sparse vectors; None if the model's modules say nothing of it."""

    @classmethod
    def _read_settings(
        cls, artifact: Artifact, record: GraphRecord
    ) -> tuple[list[str], dict[str, Any]]:
        return [], {"splade": read_splade_pooling(artifact.path)}

    def preprocess(self, inputs: Sequence[str], options: FillOptions) -> ModelInputs:
        """Tokenize each text into one row; raise InputError for a text without a mask."""
        work = super().preprocess(inputs, options)
        mask, mask_id = self.tokenizer.mask_token, self._mask_id()
        for index, row in enumerate(work.rows):
            masks = row.content.ids.count(mask_id)
            work.decoded += options.top_k * masks
            if not masks:
                where = f" in its first {row.tokens} tokens" if row.truncated else ""
                raise InputError(f"text {index} has no {mask}{where}.", do=f"Write {mask} in it.")
        # Never light, because a tokenizer's decoder is untrusted.
        tokens = options.top_k * sum(row.tokens for row in work.rows)
        work.postprocess_cost = "medium" if tokens <= _LIGHT_TOKENS else "heavy"
        return work

    def split(
        self, rows: Sequence[Row], feeds: Mapping[str, NDArray[Any]], outputs: Arrays
    ) -> list[Any]:
        """Return the logits at the masks of each row: (masks, vocabulary).

        Of rows with the form `embed_sparse`, return the weights of each; see `SpladePooling`. The
        logits of all tokens would take megabytes per row.
        """
        if rows[0].form == SPARSE and self.splade is not None:
            return [self.splade(logits) for logits in self.token_outputs(rows, outputs, "logits")]
        mask_id = self._mask_id()
        return [
            logits[[index for index, token in enumerate(row.content.ids) if token == mask_id]]
            for row, logits in zip(rows, self.token_outputs(rows, outputs, "logits"), strict=True)
        ]

    def postprocess(
        self, work: ModelInputs, outputs: Sequence[Any], options: FillOptions
    ) -> list[MaskFillings]:
        """Return a `MaskFillings` for each text."""
        return [
            self._fillings(row.content.ids, logits, options.top_k)
            for row, logits in zip(work.rows, outputs, strict=True)
        ]

    def _mask_id(self) -> int:
        mask = self.tokenizer.mask_token
        mask_id = self.tokenizer.backend.token_to_id(mask) if mask else None
        if mask_id is None:
            raise ArtifactError(
                "the tokenizer has no mask token, which fill-mask needs.",
                do="Set mask_token in tokenizer_config.json and export the model again.",
            )
        return int(mask_id)

    def _fillings(self, ids: Sequence[int], logits: NDArray[Any], top_k: int) -> MaskFillings:
        """Return the fillings of the masks among `ids`; `logits` is (masks, vocabulary)."""
        mask_id = self._mask_id()
        positions = [position for position, token in enumerate(ids) if token == mask_id]
        masks = []
        for position, row_logits in zip(positions, logits, strict=True):
            scores = softmax(row_logits.astype(np.float32, copy=False))
            best = np.argsort(-scores, kind="stable")[:top_k]
            row = []
            for token_id in best.tolist():
                filled = [*ids[:position], token_id, *ids[position + 1 :]]
                # With several masks, keep special tokens, so that the other masks stay visible.
                sequence = self.tokenizer.decode(filled, skip_special=len(positions) == 1)
                token = self.tokenizer.decode([token_id], skip_special=False)
                row.append(Filling(token, token_id, float(scores[token_id]), sequence))
            masks.append(tuple(row))
        return MaskFillings(tuple(masks))

    def describe(self, result: MaskFillings) -> str:
        """Describe the best fillings of each mask."""
        return " | ".join(
            "; ".join(f"{filling.token} {filling.score:.2f}" for filling in mask[:_MAX_DESCRIBED])
            for mask in result.masks
        )

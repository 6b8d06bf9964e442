"""Texts through a graph, in batches, and what its outputs say of them.

    >>> texts = TextModel.open(artifact, runner)
    >>> texts.classify(["The pump runs again."], top_k=1)[0].label
    'glad'

Inputs are sorted by length into batches; answers come in the order of the inputs.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact import Artifact
from enginery.core.errors import ArtifactError, InputError, nearest
from enginery.core.json_file import read_json
from enginery.runtime.answers import (
    Classification,
    ContextAnswer,
    Filling,
    MaskFillings,
    TokenSpan,
)
from enginery.runtime.batching import MAX_ROWS, MAX_TOKENS, plan_batches
from enginery.runtime.classification import (
    Activation,
    Aggregation,
    classify_logits,
    label_names,
    softmax,
    spans_from_logits,
)
from enginery.runtime.ort import OrtRunner, Outputs
from enginery.runtime.pooling import Pooling, read_pooling
from enginery.runtime.question_answering import Window, best_answers
from enginery.runtime.tokenizer import TextTokenizer, check_texts

_TOKEN_OUTPUTS = ("last_hidden_state", "token_embeddings")
SENTENCE_OUTPUT = "sentence_embedding"


@dataclass
class TextModel:
    """A graph over tokens, with its tokenizer and the model's own settings."""

    runner: OrtRunner
    tokenizer: TextTokenizer
    config: dict[str, Any]
    pooling: Pooling | None
    """None where the graph pools by itself, or the task needs no pooling."""
    prompts: dict[str, str]
    """sentence-transformers' prompts by name."""
    default_prompt: str
    notes: tuple[str, ...]
    truncated: int = 0
    """How many texts were cut to the tokenizer's limit so far."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @classmethod
    def open(cls, artifact: Artifact, runner: OrtRunner) -> TextModel:
        """Reads the model's files beside the graph.

        Raises:
            ArtifactError: a file is missing, or the graph has no output to make vectors from.
        """
        tokenizer = TextTokenizer.open(artifact.path)
        notes = [f"texts are cut at {tokenizer.limit} tokens: {tokenizer.limit_source}"]
        pooling: Pooling | None = None
        outputs = [spec.name for spec in runner.record.outputs]
        if artifact.manifest.task == "feature-extraction":
            if SENTENCE_OUTPUT in outputs:
                notes.append("the graph makes the vectors itself (sentence_embedding)")
            elif any(name in outputs for name in _TOKEN_OUTPUTS):
                pooling = read_pooling(artifact.path)
                notes.append(pooling.note)
            else:
                raise ArtifactError(
                    f"{artifact.path}: the graph has the outputs {', '.join(outputs)}; vectors "
                    f"are made from {' or '.join((SENTENCE_OUTPUT, *_TOKEN_OUTPUTS))}."
                )
        sentence = read_json(artifact.path / "config_sentence_transformers.json")
        return cls(
            runner=runner,
            tokenizer=tokenizer,
            config=read_json(artifact.path / "config.json"),
            pooling=pooling,
            prompts=dict(sentence.get("prompts") or {}),
            default_prompt=str(sentence.get("default_prompt_name") or ""),
            notes=tuple(notes),
        )

    def embed(self, texts: Sequence[str], *, prompt_name: str) -> NDArray[np.float32]:
        """float32 (len(texts), dim)."""
        check_texts(texts)
        prompt, prompt_tokens = self._prompt(prompt_name)
        encodings = self._encode([self.tokenizer.prepare(prompt + text) for text in texts])
        rows: list[NDArray[np.float32]] = [np.empty(0, np.float32)] * len(texts)
        for batch, feeds, outputs in self._run(encodings):
            if self.pooling is None:
                vectors = outputs[SENTENCE_OUTPUT].astype(np.float32, copy=False)
            else:
                tokens = next(outputs[name] for name in _TOKEN_OUTPUTS if name in outputs)
                mask = feeds.get("attention_mask", np.ones(tokens.shape[:2], np.int64))
                vectors = self.pooling(tokens, mask[: len(tokens)], prompt=prompt_tokens)
            for index, vector in zip(batch, vectors, strict=True):
                rows[index] = vector
        return np.stack(rows) if rows else np.empty((0, self._dim()), np.float32)

    def classify(
        self,
        texts: Sequence[str | tuple[str, str]],
        *,
        top_k: int,
        activation: Activation,
    ) -> list[Classification]:
        """One classification a text or a pair of texts."""
        encodings = self._encode(texts)
        answers: list[Any] = [None] * len(encodings)
        for batch, _, outputs in self._run(encodings):
            found = classify_logits(outputs["logits"], self.config, activation, top_k=top_k)
            for index, answer in zip(batch, found, strict=True):
                answers[index] = answer
        return answers

    def tag(self, texts: Sequence[str], *, aggregation: Aggregation) -> list[list[TokenSpan]]:
        """The labelled stretches of each text."""
        check_texts(texts)
        encodings = self._encode(texts)
        answers: list[Any] = [None] * len(encodings)
        for batch, _, outputs in self._run(encodings):
            names = label_names(self.config, outputs["logits"].shape[-1])
            for index, row in zip(batch, outputs["logits"], strict=True):
                answers[index] = spans_from_logits(
                    texts[index],
                    encodings[index],
                    self.tokenizer.unpadded(row, encodings[index]),
                    names,
                    self.tokenizer,
                    aggregation=aggregation,
                )
        return answers

    def answer(
        self, pairs: Sequence[tuple[str, str]], *, top_k: int, max_tokens: int, allow_none: bool
    ) -> list[list[ContextAnswer]]:
        """The best answers to each (question, context)."""
        for part, what in enumerate(("question", "context")):
            check_texts([pair[part] for pair in pairs], what=what)
            for index, pair in enumerate(pairs):
                if not pair[part].strip():
                    raise InputError(f"{what} {index} is empty.")
        encodings = self.tokenizer.encode_pairs(pairs)
        parts = [(i, part) for i, e in enumerate(encodings) for part in (e, *e.overflowing)]
        windows: list[Any] = [None] * len(parts)
        for batch, _, outputs in self._run([part for _, part in parts]):
            starts, ends = outputs["start_logits"], outputs["end_logits"]
            for index, start, end in zip(batch, starts, ends, strict=True):
                encoding = parts[index][1]
                windows[index] = Window(
                    encoding,
                    self.tokenizer.unpadded(start, encoding),
                    self.tokenizer.unpadded(end, encoding),
                    self.tokenizer.cls_id,
                )
        by_pair: list[list[Window]] = [[] for _ in pairs]
        for (pair_index, _), window in zip(parts, windows, strict=True):
            by_pair[pair_index].append(window)
        return [
            best_answers(context, found, top_k=top_k, max_tokens=max_tokens, allow_none=allow_none)
            for (_, context), found in zip(pairs, by_pair, strict=True)
        ]

    def fill(self, texts: Sequence[str], *, top_k: int) -> list[MaskFillings]:
        """The best tokens for each mask of each text."""
        check_texts(texts)
        mask = self.tokenizer.mask_token
        encodings = self._encode(texts)
        mask_id = self.tokenizer.texts.token_to_id(mask) if mask else None
        if mask_id is None:
            raise ArtifactError("the tokenizer names no mask token, so there is nothing to fill.")
        for index, encoding in enumerate(encodings):
            if mask_id not in encoding.ids:
                where = f" in its first {len(encoding.ids)} tokens" if encoding.overflowing else ""
                raise InputError(f"text {index} has no {mask}{where}.", do=f"Write {mask} in it.")
        answers: list[Any] = [None] * len(encodings)
        for batch, _, outputs in self._run(encodings):
            for index, row in zip(batch, outputs["logits"], strict=True):
                logits = self.tokenizer.unpadded(row, encodings[index])
                answers[index] = self._fillings(encodings[index].ids, logits, mask_id, top_k)
        return answers

    def _fillings(
        self, ids: Sequence[int], logits: NDArray[Any], mask_id: int, top_k: int
    ) -> MaskFillings:
        positions = [position for position, token in enumerate(ids) if token == mask_id]
        masks = []
        for position in positions:
            scores = softmax(logits[position].astype(np.float32, copy=False))
            best = np.argsort(-scores, kind="stable")[: top_k or None]
            row = []
            for token_id in best.tolist():
                filled = [*ids[:position], token_id, *ids[position + 1 :]]
                # With several masks the others stay visible, and so do all special tokens.
                sequence = self.tokenizer.decode(filled, skip_special=len(positions) == 1)
                token = self.tokenizer.decode([token_id], skip_special=False)
                row.append(Filling(token, token_id, float(scores[token_id]), sequence))
            masks.append(tuple(row))
        return MaskFillings(tuple(masks))

    def _encode(self, texts: Sequence[str | tuple[str, str]]) -> list[Any]:
        encodings = self.tokenizer.encode(texts)
        cut = sum(bool(encoding.overflowing) for encoding in encodings)
        if cut:
            with self._lock:
                self.truncated += cut
        return encodings

    def _prompt(self, name: str) -> tuple[str, int]:
        """A prompt's text, and how many tokens at the start of a text belong to it."""
        name = name or self.default_prompt
        if not name:
            return "", 0
        if name not in self.prompts:
            raise InputError(
                f"the model has no prompt '{name}'{nearest(name, self.prompts)}",
                do=f"Its prompts: {', '.join(self.prompts) or 'none'}.",
            )
        prompt = self.prompts[name]
        encoding = self.tokenizer.encode([self.tokenizer.prepare(prompt)])[0]
        # The end-of-text token of the prompt alone is not part of it.
        ends_special = bool(encoding.special_tokens_mask and encoding.special_tokens_mask[-1])
        return prompt, len(encoding.ids) - ends_special

    def _run(
        self, encodings: Sequence[Any]
    ) -> Iterator[tuple[list[int], dict[str, NDArray[Any]], Outputs]]:
        """The graph over all encodings: indices, feeds and outputs of each batch."""
        inputs = self.runner.record.inputs
        fixed = next((s.dims[0] for s in inputs if isinstance(s.dims[0], int)), 0)
        lengths = [len(encoding.ids) for encoding in encodings]
        for batch in plan_batches(
            lengths,
            max_rows=fixed or (self._most_rows if self.runner.profiles else MAX_ROWS),
            max_tokens=sys.maxsize if self.runner.profiles else MAX_TOKENS,
            equal_lengths=not self.tokenizer.can_pad(inputs),
        ):
            longest = max(lengths[index] for index in batch)
            rows, width = self.runner.padded_shape(inputs[0], (len(batch), max(longest, 1)))
            feeds = self.tokenizer.feeds([encodings[i] for i in batch], inputs, width=width)
            outputs = self.runner(fill_rows(feeds, fixed or rows))
            yield batch, feeds, {name: values[: len(batch)] for name, values in outputs.items()}

    def _most_rows(self, tokens: int) -> int:
        """The most texts of a batch whose longest has so many tokens, by the engines' profiles."""
        return self.runner.most_rows(self.runner.record.inputs[0], (tokens,)) or 1

    def _dim(self) -> int:
        """The size of a vector where the graph says it; 0 where it does not."""
        wanted = (SENTENCE_OUTPUT, *_TOKEN_OUTPUTS)
        dims = [s.dims[-1] for s in self.runner.record.outputs if s.name in wanted]
        modes = len(self.pooling.modes) if self.pooling else 1
        return dims[0] * modes if dims and isinstance(dims[0], int) else 0


def fill_rows(feeds: dict[str, NDArray[Any]], rows: int) -> dict[str, NDArray[Any]]:
    """The feeds with their last row repeated up to a batch that the graph takes; never cut."""
    return {
        name: np.concatenate([array, np.repeat(array[-1:], rows - len(array), axis=0)])
        if rows > len(array)
        else array
        for name, array in feeds.items()
    }

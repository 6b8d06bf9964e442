"""Texts into rows of a graph, and what the graph's outputs say of the rows.

    >>> texts = TextRows.read(artifact, record)
    >>> asked = texts.ask_classify(["The pump runs again."], top_k=1, activation="auto")
    >>> rows = texts.rows(asked.encodings, feeds, outputs)
    >>> asked.finish(rows)[0].label
    'glad'

Between the two anything may run the rows: in batches, beside rows of other calls, in other threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact import Artifact
from enginery.core.errors import ArtifactError, InputError, nearest
from enginery.core.manifest import GraphRecord
from enginery.core.model_files import ModelConfig, SentenceTransformersConfig
from enginery.runtime.answers import (
    Classification,
    ContextAnswer,
    Filling,
    MaskFillings,
    TokenSpan,
)
from enginery.runtime.classification import (
    Activation,
    Aggregation,
    classify_logits,
    label_names,
    softmax,
    spans_from_logits,
)
from enginery.runtime.ort import Outputs
from enginery.runtime.pooling import Pooling, read_pooling
from enginery.runtime.question_answering import Window, best_answers
from enginery.runtime.tokenizer import TextTokenizer, check_texts

_OUTPUT_RANKS = {
    "text-classification": {"logits": 2},
    "image-classification": {"logits": 2},
    "token-classification": {"logits": 3},
    "fill-mask": {"logits": 3},
    "question-answering": {"start_logits": 2, "end_logits": 2},
}
"""The outputs that a task is answered from, with their ranks."""

TOKEN_OUTPUTS = ("last_hidden_state", "token_embeddings")
SENTENCE_OUTPUT = "sentence_embedding"


@dataclass(frozen=True)
class Asked:
    """A call's inputs as rows of the graph, and what their outputs make of them.

    The rows may run in any batches, beside those of other calls.
    """

    encodings: list[Any]
    """`tokenizers.Encoding` or `TokenIds`, one a row."""
    finish: Callable[[Sequence[Any]], Any]
    """The answers to the call, from what `TextRows.rows` gave for each row."""
    prompt_tokens: tuple[int, ...] = ()
    """How many tokens at the start of each row belong to a prompt; none where no row has one."""

    def parts(self) -> Iterator[tuple[Any, int]]:
        """Each row with the tokens of its prompt."""
        prompts = self.prompt_tokens or (0,) * len(self.encodings)
        return zip(self.encodings, prompts, strict=True)


@dataclass
class TextRows:
    """What a model's own files say of its texts: tokenizer, labels, prompts, pooling."""

    task: str
    tokenizer: TextTokenizer
    config: ModelConfig
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
    def read(cls, artifact: Artifact, record: GraphRecord, **more: Any) -> Self:
        """Reads the model's files beside the graph.

        Args:
            artifact: what to read.
            record: the graph that the texts are for.
            more: further fields of a subclass.

        Raises:
            ArtifactError: a file is missing or malformed, or the graph lacks an output that the
                task is answered from.
        """
        require_outputs(artifact.manifest.task, record)
        tokenizer = TextTokenizer.open(artifact.path)
        notes = [f"texts are cut at {tokenizer.limit} tokens: {tokenizer.limit_source}"]
        pooling: Pooling | None = None
        outputs = [spec.name for spec in record.outputs]
        if artifact.manifest.task == "feature-extraction":
            if SENTENCE_OUTPUT in outputs:
                notes.append("the graph makes the vectors itself (sentence_embedding)")
            elif any(name in outputs for name in TOKEN_OUTPUTS):
                pooling = read_pooling(artifact.path)
                notes.append(pooling.note)
            else:
                raise ArtifactError(
                    f"{artifact.path}: the graph has the outputs {', '.join(outputs)}; vectors "
                    f"are made from {' or '.join((SENTENCE_OUTPUT, *TOKEN_OUTPUTS))}."
                )
        sentence = SentenceTransformersConfig.read(artifact.path)
        return cls(
            task=artifact.manifest.task,
            tokenizer=tokenizer,
            config=ModelConfig.read(artifact.path),
            pooling=pooling,
            prompts={name: prompt or "" for name, prompt in sentence.prompts.items()},
            default_prompt=sentence.default_prompt_name,
            notes=tuple(notes),
            **more,
        )

    def ask_embed(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        prompt_name: str,
        normalize: bool | None = None,
    ) -> Asked:
        """The rows that make vectors of texts, or of token ids, before which no prompt goes.

        With `normalize` they are of length 1, without as they were pooled; None as the model says.
        """

        def finish(rows: Sequence[Any]) -> list[NDArray[np.float32]]:
            if not rows or self.pooling is None:
                return list(rows)
            return self.pooling.finish_rows(rows, normalize=normalize)

        given = [text for text in texts if isinstance(text, str)]
        if len(given) == len(texts) or isinstance(texts, str | bytes):
            check_texts(texts)
            prompt, tokens = self._prompt(prompt_name)
            encodings = self._encode([self.tokenizer.prepare(prompt + text) for text in given])
            return Asked(encodings, finish, (tokens,) * len(encodings))
        asked = iter(self.ask_embed(given, prompt_name=prompt_name).parts())
        parts = [
            next(asked) if isinstance(text, str) else (self.tokenizer.encode_ids(text, index), 0)
            for index, text in enumerate(texts)
        ]
        return Asked([encoding for encoding, _ in parts], finish, tuple(n for _, n in parts))

    def ask_classify(
        self, texts: Sequence[str | tuple[str, str]], *, top_k: int, activation: Activation
    ) -> Asked:
        """The rows that label texts or pairs of texts."""

        def finish(rows: Sequence[Any]) -> list[Classification]:
            if not rows:
                return []
            return classify_logits(np.stack(rows), self.config, activation, top_k=top_k)

        return Asked(self._encode(texts), finish)

    def ask_tag(self, texts: Sequence[str], *, aggregation: Aggregation) -> Asked:
        """The rows that label stretches of texts."""
        check_texts(texts)
        encodings = self._encode(texts, offsets=True)

        def finish(rows: Sequence[Any]) -> list[list[TokenSpan]]:
            names = label_names(self.config, rows[0].shape[-1]) if rows else []
            return [
                spans_from_logits(
                    text, encoding, row, names, self.tokenizer, aggregation=aggregation
                )
                for text, encoding, row in zip(texts, encodings, rows, strict=True)
            ]

        return Asked(encodings, finish)

    def ask_answer(
        self, pairs: Sequence[tuple[str, str]], *, top_k: int, max_tokens: int, allow_none: bool
    ) -> Asked:
        """The rows that answer questions: a window of a context each."""
        for part, what in enumerate(("question", "context")):
            check_texts([pair[part] for pair in pairs], what=what)
            for index, pair in enumerate(pairs):
                if not pair[part].strip():
                    raise InputError(f"{what} {index} is empty.")
        encodings = self.tokenizer.encode_pairs(pairs)
        parts = [(i, part) for i, e in enumerate(encodings) for part in (e, *e.overflowing)]

        def finish(rows: Sequence[Any]) -> list[list[ContextAnswer]]:
            by_pair: list[list[Window]] = [[] for _ in pairs]
            for (pair_index, encoding), (start, end) in zip(parts, rows, strict=True):
                by_pair[pair_index].append(Window(encoding, start, end, self.tokenizer.cls_id))
            return [
                best_answers(
                    context, found, top_k=top_k, max_tokens=max_tokens, allow_none=allow_none
                )
                for (_, context), found in zip(pairs, by_pair, strict=True)
            ]

        return Asked([part for _, part in parts], finish)

    def ask_fill(self, texts: Sequence[str], *, top_k: int) -> Asked:
        """The rows that fill masks."""
        check_texts(texts)
        mask = self.tokenizer.mask_token
        mask_id = self._mask_id()
        encodings = self._encode(texts)
        for index, encoding in enumerate(encodings):
            if mask_id not in encoding.ids:
                where = f" in its first {len(encoding.ids)} tokens" if encoding.overflowing else ""
                raise InputError(f"text {index} has no {mask}{where}.", do=f"Write {mask} in it.")

        def finish(rows: Sequence[Any]) -> list[MaskFillings]:
            return [
                self._fillings(encoding.ids, row, mask_id, top_k)
                for encoding, row in zip(encodings, rows, strict=True)
            ]

        return Asked(encodings, finish)

    def rows(
        self,
        encodings: Sequence[Any],
        feeds: Mapping[str, NDArray[Any]],
        outputs: Outputs,
        *,
        prompt_tokens: Sequence[int] = (),
    ) -> list[Any]:
        """What a batch's outputs say of each of its rows, for `Asked.finish`.

        Args:
            encodings: the rows of the batch, from whichever calls.
            feeds: what the graph was given.
            outputs: what it gave, without rows that only filled the batch.
            prompt_tokens: of each row; none where no row has a prompt.
        """
        if self.task == "feature-extraction":
            for name in (SENTENCE_OUTPUT, *TOKEN_OUTPUTS):
                if name in outputs:
                    _rows_of(outputs, name, encodings, tokens=name in TOKEN_OUTPUTS)
            return list(self._vectors(feeds, outputs, prompt_tokens))
        if self.task == "text-classification":
            return list(_rows_of(outputs, "logits", encodings))
        unpadded = self.tokenizer.unpadded
        if self.task == "question-answering":
            starts = _rows_of(outputs, "start_logits", encodings, tokens=True)
            ends = _rows_of(outputs, "end_logits", encodings, tokens=True)
            triples = zip(encodings, starts, ends, strict=True)
            return [(unpadded(start, e), unpadded(end, e)) for e, start, end in triples]
        logits = _rows_of(outputs, "logits", encodings, tokens=True)
        rows = [unpadded(row, e) for e, row in zip(encodings, logits, strict=True)]
        if self.task == "fill-mask":
            # A row is a score for each token of the vocabulary at each place: megabytes.
            mask_id = self._mask_id()
            rows = [
                row[[place for place, token in enumerate(e.ids) if token == mask_id]]
                for e, row in zip(encodings, rows, strict=True)
            ]
        return rows

    def _vectors(
        self, feeds: Mapping[str, NDArray[Any]], outputs: Outputs, prompt_tokens: Sequence[int]
    ) -> NDArray[np.float32]:
        if self.pooling is None:
            return outputs[SENTENCE_OUTPUT].astype(np.float32, copy=False)
        tokens = next(outputs[name] for name in TOKEN_OUTPUTS if name in outputs)
        mask = feeds.get("attention_mask", np.ones(tokens.shape[:2], np.int64))
        return self.pooling.pool(tokens, mask[: len(tokens)], prompt=prompt_tokens)

    def _mask_id(self) -> int:
        mask = self.tokenizer.mask_token
        found = self.tokenizer.texts.token_to_id(mask) if mask else None
        if found is None:
            raise ArtifactError("the tokenizer names no mask token, so there is nothing to fill.")
        return int(found)

    def _fillings(
        self, ids: Sequence[int], logits: NDArray[Any], mask_id: int, top_k: int
    ) -> MaskFillings:
        """The fillings of the masks among `ids`; `logits` has a row for each."""
        positions = [position for position, token in enumerate(ids) if token == mask_id]
        masks = []
        for position, row_logits in zip(positions, logits, strict=True):
            scores = softmax(row_logits.astype(np.float32, copy=False))
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

    def _encode(
        self, texts: Sequence[str | tuple[str, str]], *, offsets: bool = False
    ) -> list[Any]:
        encodings = self.tokenizer.encode(texts, offsets=offsets)
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
        try:
            (encoding,) = self.tokenizer.encode([self.tokenizer.prepare(prompt)])
        except InputError as error:
            message = error.message.replace("text 0", f"prompt '{name}'", 1)
            raise InputError(message) from error
        # The end-of-text token of the prompt alone is not part of it.
        ends_special = bool(encoding.special_tokens_mask and encoding.special_tokens_mask[-1])
        return prompt, len(encoding.ids) - ends_special


def require_outputs(task: str, record: GraphRecord) -> None:
    """Raise ArtifactError unless the graph has the outputs that the task is answered from.

    An output of unknown rank, which a record has without dims, is taken.
    """
    specs = {spec.name: spec for spec in record.outputs}
    for name, rank in _OUTPUT_RANKS.get(task, {}).items():
        if name not in specs:
            raise ArtifactError(
                f"{record.file} has the outputs {', '.join(specs)}; {task} is answered from {name}."
            )
        if len(specs[name].dims) not in (0, rank):
            raise ArtifactError(
                f"{record.file} has the output {specs[name]}; {task} is answered from {rank} dims."
            )


def _rows_of(
    outputs: Outputs, name: str, encodings: Sequence[Any], *, tokens: bool = False
) -> NDArray[Any]:
    """Return an output that has a row for each encoding, and with `tokens` a place for each token.

    Raises:
        ArtifactError: it has not.
    """
    found = outputs[name]
    least = (len(encodings), *([max(map(len, encodings), default=0)] if tokens else []))
    if found.ndim < len(least) or any(a < b for a, b in zip(found.shape, least, strict=False)):
        raise ArtifactError(
            f"the graph gave {name} with the shape {found.shape} for {len(encodings)} texts, "
            f"expected {' × '.join(map(str, least))} or more.",
            do="The graph does not keep to the dims that manifest.json names; export it again.",
        )
    return found

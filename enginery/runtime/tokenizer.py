"""Texts into the inputs of a graph, with the `tokenizers` package alone.

Takes the tokenizer files of an artifact; behaves as transformers' fast tokenizer on the same files.

    >>> tokenizer = TextTokenizer.open(artifact.path)
    >>> encodings = tokenizer.encode(["The engine is warm.", ""])
    >>> tokenizer.feeds(encodings, graph.inputs)["input_ids"].shape
    (2, 7)

Padding and truncation saved in tokenizer.json are dropped: all-MiniLM-L6-v2, for one, ships a fixed
padding to 128. Texts are cut at the smallest of the limits that the model's own files name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.errors import ArtifactError, InputError
from enginery.core.model_files import (
    ModelConfig,
    SentenceBertConfig,
    SpecialTokensMap,
    TokenizerConfig,
)
from enginery.core.shapes import TensorSpec
from enginery.runtime.tokenizer_files import (
    apply_settings,
    failure_reason,
    length_limit,
    load_tokenizer,
    special_token_id,
)

# As transformers' question-answering pipeline cuts a long context.
_WINDOW = 384
_WINDOW_OVERLAP = 128

_CHARACTERS_PER_TOKEN = 32
"""A text is first looked at up to so many letters for each token that the model takes."""
_MAX_CHARACTERS_PER_TOKEN = 1024
"""What comes later of a text is not looked at."""
_MARGIN = 64
"""Tokens beyond the limit which show that the place of the cut, within a word, is of no effect."""
_MAX_ADDED_TOKENS, _MAX_ADDED_CHARACTERS = 1000, 2**14
"""Tokens beside the vocabulary that Python looks for in a text, and their letters together."""
_TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")


@dataclass(frozen=True)
class TokenIds:
    """Ids in place of a `tokenizers.Encoding`, of which no text is known."""

    ids: list[int]
    overflowing: tuple[Any, ...] = ()
    """Not empty where ids were cut."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def attention_mask(self) -> list[int]:
        """1 for each."""
        return [1] * len(self.ids)

    @property
    def type_ids(self) -> list[int]:
        """0 for each, as a single text has."""
        return [0] * len(self.ids)


@dataclass(frozen=True)
class FastEncoder:
    """Token ids as `encode_batch` gives them, without offsets and in less time.

    BERT's normalizer takes a third of the time, and only lowercases plain ASCII, which Python does
    at once: such texts go past it.
    """

    tokenizer: Any
    """`tokenizers.Tokenizer`, with its truncation set."""
    plain: Any
    """The same without normalizer and added tokens; None where plain texts need no less."""
    added: tuple[str, ...]
    """The added tokens in lower case; empty without `plain`."""

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> FastEncoder:
        """Build it, sharing the tokenizer's vocabulary, of which there may be megabytes."""
        from tokenizers import Tokenizer, normalizers

        normalizer = tokenizer.normalizer
        if not (isinstance(normalizer, normalizers.BertNormalizer) and normalizer.lowercase):
            return cls(tokenizer, None, ())
        added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        # Python looks for them one by one and holds the interpreter's lock; `tokenizers` looks for
        # all at once, without the lock, and knows what its normalizer makes of other letters.
        is_short = len(added) <= _MAX_ADDED_TOKENS and sum(map(len, added)) <= _MAX_ADDED_CHARACTERS
        if not (is_short and all(text.isascii() and text.isprintable() for text in added)):
            return cls(tokenizer, None, ())
        plain = Tokenizer(tokenizer.model)
        plain.pre_tokenizer = tokenizer.pre_tokenizer
        plain.post_processor = tokenizer.post_processor
        if tokenizer.truncation:
            plain.enable_truncation(**tokenizer.truncation)
        return cls(tokenizer, plain, tuple(text.lower() for text in added))

    def encode(self, texts: Sequence[str | tuple[str, str]]) -> list[Any]:
        """Return a `tokenizers.Encoding` for each text or pair; its offsets have no meaning."""
        if self.plain is None:
            return list(self.tokenizer.encode_batch_fast(list(texts)))
        places = [place for place, text in enumerate(texts) if self._is_plain(text)]
        lowercased = [str(texts[place]).lower() for place in places]
        found: list[Any] = self.plain.encode_batch_fast(lowercased)
        if len(places) == len(texts):
            return found
        encodings: list[Any] = [None] * len(texts)
        for place, encoding in zip(places, found, strict=True):
            encodings[place] = encoding
        others = [place for place, encoding in enumerate(encodings) if encoding is None]
        full = self.tokenizer.encode_batch_fast([texts[place] for place in others])
        for place, encoding in zip(others, full, strict=True):
            encodings[place] = encoding
        return encodings

    def _is_plain(self, text: str | tuple[str, str]) -> bool:
        """Whether BERT's normalizer would only lowercase a text, and no token was added."""
        if not (isinstance(text, str) and text.isascii() and text.isprintable()):
            return False
        lowercased = text.lower()
        return not any(token in lowercased for token in self.added)


Encode = Callable[[list[Any]], list[Any]]
"""One `tokenizers.Encoding` for each text or pair of a list."""


@dataclass(frozen=True)
class TextTokenizer:
    """The tokenizer of one model, with what its config files say of it."""

    backend: Any
    """`tokenizers.Tokenizer` that cuts single texts at `limit`."""
    load_pair_backend: Callable[[], Any]
    """The same for (question, context), read when it is asked for: a long context becomes
    overlapping windows."""
    limit: int
    """The most tokens of one input, special tokens included."""
    limit_source: str
    """The file that set the limit."""
    pad_id: int | None
    """None: no padding token, so texts of different length cannot share a batch."""
    pad_type_id: int
    pad_left: bool
    unk_id: int | None
    cls_id: int | None
    mask_token: str
    """Empty where the tokenizer has none."""
    lower_case: bool
    """sentence-transformers' own lower-casing, before the tokenizer's."""
    strip: bool
    """sentence-transformers strips texts."""
    clean_up: bool
    """Decoded text loses the spaces before punctuation."""
    parallel_encode: Callable[[Encode, list[Any]], list[Any]] | None = None
    """Runs an encoding of a list of texts, in pieces and in other threads perhaps; None to run it
    as it is, where a list goes through the threads that all tokenizers of the process share."""

    @classmethod
    def open(cls, directory: Path) -> TextTokenizer:
        """Read tokenizer.json and the configs beside it.

        Raises:
            ArtifactError: there is no tokenizer.json, it or a config file cannot be read, or it
                does not take the settings that the config files have for it.
        """
        backend = load_tokenizer(directory)
        settings = TokenizerConfig.read(directory)
        config = ModelConfig.read(directory)
        sentence = SentenceBertConfig.read(directory)
        special = settings.with_map(SpecialTokensMap.read(directory))
        limit, limit_source = length_limit(config, settings, sentence)

        def configure(tokenizer: Any, **truncation: Any) -> None:
            try:
                apply_settings(tokenizer, settings)
                tokenizer.enable_truncation(**truncation)
            except BaseException as error:
                raise ArtifactError(
                    f"{directory / 'tokenizer.json'} does not take the settings of "
                    f"tokenizer_config.json and a limit of {truncation['max_length']} tokens: "
                    f"{failure_reason(error)}."
                ) from error

        configure(backend, max_length=limit, direction=settings.truncation_side)

        @cache
        def load_pair_backend() -> Any:
            tokenizer = load_tokenizer(directory)
            window = min(limit, _WINDOW)
            stride = min(window // 2, _WINDOW_OVERLAP)
            configure(tokenizer, max_length=window, stride=stride, strategy="only_second")
            return tokenizer

        return cls(
            backend=backend,
            load_pair_backend=load_pair_backend,
            limit=limit,
            limit_source=limit_source,
            pad_id=special_token_id(backend, special.pad_token),
            pad_type_id=settings.pad_token_type_id,
            pad_left=settings.padding_side == "left",
            unk_id=special_token_id(backend, special.unk_token),
            cls_id=special_token_id(backend, special.cls_token),
            mask_token=special.mask_token or "",
            lower_case=sentence.do_lower_case,
            strip=(directory / "modules.json").is_file(),
            clean_up=settings.clean_up_tokenization_spaces,
        )

    def encode(self, texts: Sequence[str | tuple[str, str]], *, offsets: bool = True) -> list[Any]:
        """One `tokenizers.Encoding` a text, cut at `limit`; a cut one has `overflowing` parts.

        A pair of texts becomes one encoding, as the model's template joins them. Without `offsets`
        the ids are the same, and where in the text they are is not known.

        Raises:
            InputError: `texts` is one string, or an item of it is neither a string nor a pair, or
                cannot be tokenized; the message has its index.
        """
        check_texts(texts, pairs=True)
        encode_batch = self.backend.encode_batch if offsets else self._fast_encoder.encode
        most = self.limit * _CHARACTERS_PER_TOKEN

        def encode(items: Sequence[Any]) -> list[Any]:
            cut = [
                self._cut(text) if isinstance(text, str) and len(text) > most else text
                for text in items
            ]
            return encode_batch(cut) if len(cut) == 1 else self._run(encode_batch, cut)

        try:
            return encode(texts)
        except BaseException as error:
            failure_reason(error)  # raises what is not the tokenizer's
            return _encode_each(encode, texts)  # finds the text that fails

    def encode_untruncated(self, texts: Sequence[str], *, special: bool) -> list[Any]:
        """One `tokenizers.Encoding` a text, not cut; with special tokens around it or without.

        Raises:
            InputError: as `encode`.
        """
        check_texts(texts)

        def encode(items: list[Any]) -> list[Any]:
            encodings: list[Any] = self._untruncated.encode_batch(items, add_special_tokens=special)
            return encodings

        return _encode_each(lambda items: self._run(encode, items), texts)

    def encode_ids(self, ids: Sequence[int], index: int = 0) -> TokenIds:
        """Ids that another tokenizer made, between the special tokens of this model.

        Args:
            ids: with the model's special tokens around them, or without.
            index: which input it is, for messages.

        Raises:
            InputError: an id is none of this tokenizer.
        """
        before, after = self._special_tokens_around
        inner = list(ids)
        ends = len(inner) - len(after)
        if before + after and inner[: len(before)] == before and inner[ends:] == after:
            inner = inner[len(before) : ends]
        room = max(self.limit - len(before) - len(after), 0)
        cut = len(inner) > room
        left = self.backend.truncation["direction"] == "left"
        inner = inner[len(inner) - room :] if cut and left else inner[:room]
        size = self.backend.get_vocab_size(with_added_tokens=True)
        for found in inner:
            if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < size:
                raise InputError(
                    f"input {index} has the token id {found!r}, expected whole numbers from 0 to "
                    f"{size - 1}."
                )
        return TokenIds([*before, *inner, *after], ("cut",) if cut else ())

    def _run(self, encode: Encode, texts: list[Any]) -> list[Any]:
        """Encode a list of texts; other Python threads run meanwhile.

        `encode_batch` lets go of the interpreter and `Tokenizer.encode` does not. It takes a
        single text in this thread, and a list through threads that the whole process shares.
        """
        return (
            encode(texts) if self.parallel_encode is None else self.parallel_encode(encode, texts)
        )

    @cached_property
    def _fast_encoder(self) -> FastEncoder:
        return FastEncoder.from_tokenizer(self.backend)

    @cached_property
    def _untruncated(self) -> Any:
        """A copy of the tokenizer that does not cut texts."""
        copy = type(self.backend).from_str(self.backend.to_str())
        copy.no_truncation()
        return copy

    @cached_property
    def _special_tokens_around(self) -> tuple[list[int], list[int]]:
        """The special tokens that the model has before a text and after it."""
        try:
            (encoding,) = self.backend.encode_batch(["a"])
        except BaseException as error:
            raise InputError(
                "token ids cannot be taken: the special tokens around a text are found with the "
                f"text 'a', which cannot be tokenized: {failure_reason(error)}.",
                do="Send texts.",
            ) from error
        mask = encoding.special_tokens_mask
        first = mask.index(0) if 0 in mask else len(mask)
        last = len(mask) - mask[::-1].index(0) if 0 in mask else len(mask)
        return encoding.ids[:first], encoding.ids[last:]

    def _cut(self, text: str) -> str:
        """The beginning of a text that has the same first tokens, and more than the limit.

        A text that has fewer in so many letters, of blanks or of words without end, is cut there.
        """
        letters = self.limit * _CHARACTERS_PER_TOKEN
        truncation = self.backend.truncation
        if len(text) <= letters or not truncation or truncation["direction"] != "right":
            return text
        most = self.limit * _MAX_CHARACTERS_PER_TOKEN
        while letters < min(len(text), most):
            beginning = text[:letters]
            (encoding,) = self.backend.encode_batch([beginning])
            if len(encoding) + sum(len(e) for e in encoding.overflowing) > self.limit + _MARGIN:
                return beginning
            letters *= 4
        return text[:most]

    def prepare(self, text: str) -> str:
        """The text as sentence-transformers hands it to the tokenizer."""
        stripped = text.strip() if self.strip else text
        return stripped.lower() if self.lower_case else stripped

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[Any]:
        """One encoding a (question, context); further windows of it are its `overflowing` parts.

        Raises:
            InputError: a question leaves no room for its context, or a pair cannot be tokenized;
                the message has its index.
            ArtifactError: the tokenizer cannot cut contexts into windows.
        """
        tokenizer = self.load_pair_backend()
        try:
            return self._run(tokenizer.encode_batch, list(pairs))
        except BaseException as error:
            reason = failure_reason(error)
            for index, pair in enumerate(pairs):
                self._require_pair(tokenizer, pair, index)
            raise InputError(f"the questions cannot be tokenized together: {reason}.") from error

    def _require_pair(self, tokenizer: Any, pair: tuple[str, str], index: int) -> None:
        """Raise InputError where a (question, context) cannot be tokenized."""
        for what, text in zip(("question", "context"), pair, strict=True):
            try:
                self.encode([text])
            except InputError as error:
                message = error.message.replace("text 0", f"{what} {index}", 1)
                raise InputError(message) from error
        try:
            tokenizer.encode_batch([pair])
        except BaseException as error:
            raise InputError(
                f"question {index} is too long: in windows of {min(self.limit, _WINDOW)} tokens it "
                f"leaves no room for its context ({failure_reason(error)}).",
                do="Ask a shorter question.",
            ) from error

    def feeds(
        self, encodings: Sequence[Any], inputs: Iterable[TensorSpec], *, width: int = 1
    ) -> dict[str, NDArray[Any]]:
        """Encodings padded to the longest, as exactly the inputs that the graph has.

        Where the graph's sequence is fixed, rows are padded to that; else to `width` at least.

        Returns:
            input_ids, attention_mask, …: (len(encodings), sequence), of the graph's dtype.

        Raises:
            ArtifactError: the graph wants an input that is not made from texts.
            InputError: an encoding is longer than the graph's fixed sequence, or a row would
                have to be padded and cannot be.
        """
        specs = {spec.name: spec for spec in inputs}
        if unknown := next((name for name in specs if name not in _TEXT_INPUTS), None):
            raise ArtifactError(
                f"the graph wants the input {specs[unknown]}, which is not made from texts; "
                f"known are {', '.join(_TEXT_INPUTS)}."
            )
        longest = max(map(len, encodings))
        width = fixed_sequence(specs.values()) or max(longest, width)
        if longest > width:
            raise InputError(f"a text has {longest} tokens, but the graph takes exactly {width}.")
        padded = any(len(encoding) != width for encoding in encodings)
        if padded and not self.can_pad(specs.values()):
            lacking = "tokenizer has no padding token"
            if self.pad_id is not None:
                lacking = "graph has no attention_mask"
            raise InputError(
                f"a text would have to be padded to {width} tokens, but the {lacking}."
            )
        return {
            name: self._column(name, encodings, width, spec.dtype) for name, spec in specs.items()
        }

    def can_pad(self, inputs: Iterable[TensorSpec]) -> bool:
        """Whether texts of different length can share a batch of the graph."""
        return self.pad_id is not None and any(spec.name == "attention_mask" for spec in inputs)

    def strip_padding(self, row: NDArray[Any], encoding: Any) -> NDArray[Any]:
        """The part of one output row, (sequence, …), that belongs to the encoding's tokens."""
        length = len(encoding.ids)
        return row[len(row) - length :] if self.pad_left else row[:length]

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """Ids as text, as transformers decodes them.

        Raises:
            InputError: they cannot be decoded.
        """
        try:  # `decode_batch` lets other Python threads run, and `decode` does not
            text: str
            (text,) = self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special)
        except BaseException as error:
            raise InputError(f"token ids cannot be decoded: {failure_reason(error)}.") from error
        return _clean_up_tokenization(text) if self.clean_up else text

    def _column(self, name: str, encodings: Sequence[Any], width: int, dtype: str) -> NDArray[Any]:
        """Return one input of the graph, padded: (len(encodings), width)."""
        padding = 0
        if name == "input_ids":
            rows, padding = [encoding.ids for encoding in encodings], self.pad_id or 0
        elif name == "token_type_ids":
            rows, padding = [encoding.type_ids for encoding in encodings], self.pad_type_id
        else:
            rows = [[1] * len(encoding) for encoding in encodings]
        if all(len(row) == width for row in rows):
            column = np.array(rows, dtype=dtype)
        else:
            column = np.full((len(rows), width), padding, dtype=dtype)
            for padded, row in zip(column, rows, strict=True):
                start = width - len(row) if self.pad_left else 0
                padded[start : start + len(row)] = row
        if name == "position_ids":
            column = np.maximum(np.cumsum(column, axis=1, dtype=dtype) - 1, 0).astype(dtype)
        return column


def _encode_each(encode: Encode, texts: Sequence[Any], *, first: int = 0) -> list[Any]:
    """Encode all texts at once; where that fails, find the text that cannot be tokenized.

    Args:
        encode: encodes a list of texts; raises what `tokenizers` raises.
        texts: what to encode.
        first: the index of the first of them, for messages.

    Raises:
        InputError: a text cannot be tokenized; the message has its index.
    """
    try:
        return encode(list(texts))
    except BaseException as error:
        reason = failure_reason(error)
        if len(texts) == 1:
            raise InputError(f"text {first} cannot be tokenized: {reason}.") from error
        for index, text in enumerate(texts):
            _encode_each(encode, [text], first=index)
        raise InputError(f"the texts cannot be tokenized together: {reason}.") from error


def check_texts(texts: Sequence[Any], *, what: str = "text", pairs: bool = False) -> None:
    """Raise InputError unless `texts` is a list of strings; the message has the index.

    With `pairs`, a tuple of two strings is as good as a string.
    """
    if isinstance(texts, str | bytes):
        raise InputError(f"found one {what}, expected a list of them.", do=f"Send [{what}].")
    for index, item in enumerate(texts):
        is_pair = pairs and isinstance(item, tuple) and len(item) == 2
        for text in item if is_pair else (item,):
            if not isinstance(text, str):
                raise InputError(f"{what} {index} is a {type(text).__name__}, expected a string.")
            if not text.isascii():
                try:
                    text.encode()
                except UnicodeEncodeError:
                    raise InputError(
                        f"{what} {index} holds a lone surrogate, which is no character.",
                        do="Decode the text as what it is, UTF-8 or Latin-1, before sending it.",
                    ) from None


def fixed_sequence(inputs: Iterable[TensorSpec]) -> int | None:
    """The graph's sequence length where it is fixed."""
    dims = next((spec.dims for spec in inputs if spec.name == "input_ids"), ())
    return dims[1] if len(dims) == 2 and isinstance(dims[1], int) else None


def _clean_up_tokenization(text: str) -> str:
    """What transformers calls clean_up_tokenization, in its order."""
    for spaced, joined in (
        (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"),
        (" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
    ):  # fmt: skip
        text = text.replace(spaced, joined)
    return text

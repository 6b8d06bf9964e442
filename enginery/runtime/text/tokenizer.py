"""Tokenize texts into the inputs of a graph, using only the `tokenizers` package.

Reads the tokenizer files of an artifact and behaves as transformers' fast tokenizer does with them.

    tokenizer = TextTokenizer.open(artifact.path)
    encodings = tokenizer.encode(["The engine is warm.", ""])
    tokenizer.feeds(encodings, graph.inputs)["input_ids"].shape    # (2, 7)

Padding and truncation settings in tokenizer.json are ignored, because they are often unsuitable:
all-MiniLM-L6-v2, for example, pads every text to 128 tokens. Texts are truncated to the smallest of
the limits in the model's own files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact.manifest import GraphRecord, read_length_limit
from enginery.core.errors import ArtifactError, InputError
from enginery.core.model.files import ModelConfig, SentenceBertConfig, SpecialTokens
from enginery.core.shapes import TensorSpec
from enginery.runtime.text.chat_template import PairTemplate
from enginery.runtime.text.languages import Languages, Placement
from enginery.runtime.text.tokenizer_files import (
    HIDDEN,
    LENGTH_LIMIT,
    TokenizerFiles,
    failure_reason,
    length_limit,
    load_tokenizer,
    special_token_id,
)

# Window size and overlap with which transformers' question-answering pipeline splits a context.
WINDOW = 384
_WINDOW_OVERLAP = 128

_CHARACTERS_PER_TOKEN = 32
"""Number of characters, per token of the limit, that are tokenized of a long text at first."""
_MAX_CHARACTERS_PER_TOKEN = 1024
"""Number of characters, per token of the limit, after which a text is ignored."""
_MARGIN = 64
"""Number of tokens beyond the limit after which a cut within a word no longer affects the tokens
up to the limit."""
_MAX_ADDED_TOKENS, _MAX_ADDED_CHARACTERS = 1000, 2**14
"""Maximum number of added tokens, and of their characters in total, that Python searches for."""
EQUAL_LENGTHS = "only texts of one length share a batch: the model's outputs depend on padding"
"""A note on a graph whose texts cannot be padded."""
_TYPES = "token_type_ids"
TEXT_INPUTS = ("input_ids", "attention_mask", _TYPES, "position_ids")
"""Graph inputs that a tokenizer produces."""
OTHER_TOKENIZER = (
    "Clients made for OpenAI's models may send ids of theirs: LangChain's OpenAIEmbeddings does, "
    "unless check_embedding_ctx_length is False."
)
"""The usual cause of ids that are not the model's, for error messages."""
_PADDED_TO_LIMIT = ("siglip", "siglip2", "siglip_text_model", "siglip2_text_model")


@dataclass(frozen=True)
class TokenIds:
    """Token ids from a client, with the attributes of `tokenizers.Encoding` that are used here."""

    ids: list[int]
    overflowing: tuple[Any, ...] = ()
    """Not empty if ids were truncated."""
    types: tuple[int, ...] = ()
    """The type of each token; empty if all are 0."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def attention_mask(self) -> list[int]:
        """1 for each token."""
        return [1] * len(self.ids)

    @property
    def type_ids(self) -> list[int]:
        """The type of each token."""
        return list(self.types) or [0] * len(self.ids)


@dataclass(frozen=True, slots=True)
class TokenArray:
    """Token ids as an array, with the attributes of `tokenizers.Encoding` that a batch needs."""

    ids: NDArray[Any]
    types: NDArray[Any] | None = None
    """The type of each token; None if all are 0."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def type_ids(self) -> NDArray[Any]:
        """The type of each token."""
        return np.zeros(len(self.ids), np.uint8) if self.types is None else self.types


@dataclass(frozen=True)
class FastEncoder:
    """An encoder that returns the same ids as `encode_batch`, faster and without offsets.

    BERT's normalizer takes a third of the time, but all it does to ASCII text is to lowercase it.
    Python's `str.lower` is much faster, so ASCII texts skip the normalizer.
    """

    tokenizer: Any
    """`tokenizers.Tokenizer`, with its truncation set."""
    plain: Any
    """The same tokenizer without normalizer and added tokens, for ASCII texts; None if ASCII texts
    need the full tokenizer."""
    added: tuple[str, ...]
    """The added tokens in lower case; empty if `plain` is None."""

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> FastEncoder:
        """Build an encoder that shares the tokenizer's vocabulary, which may take megabytes."""
        from tokenizers import Tokenizer, normalizers

        normalizer = tokenizer.normalizer
        # Other normalizers change ASCII texts in ways that `str.lower` does not know.
        if not (isinstance(normalizer, normalizers.BertNormalizer) and normalizer.lowercase):
            return cls(tokenizer, None, ())
        added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        # With many added tokens, or ones that are not ASCII, use the full tokenizer: Python has to
        # search for them one by one while holding the GIL; `tokenizers` searches for all at once,
        # without the GIL and after normalization.
        is_short = len(added) <= _MAX_ADDED_TOKENS and sum(map(len, added)) <= _MAX_ADDED_CHARACTERS
        if not (is_short and all(text.isascii() and text.isprintable() for text in added)):
            return cls(tokenizer, None, ())
        # The model, with its vocabulary, is shared and not copied.
        plain = Tokenizer(tokenizer.model)
        plain.pre_tokenizer = tokenizer.pre_tokenizer
        plain.post_processor = tokenizer.post_processor
        if tokenizer.truncation:
            plain.enable_truncation(**tokenizer.truncation)
        return cls(tokenizer, plain, tuple(text.lower() for text in added))

    def encode(self, texts: Sequence[str | tuple[str, str]]) -> list[Any]:
        """Return a `tokenizers.Encoding` for each text or pair; its offsets are meaningless."""
        if self.plain is None:
            return self._encode_fully(texts)
        lowercased = [self._lowercase(text) for text in texts]
        if None not in lowercased:
            return list(self.plain.encode_batch_fast(lowercased))
        encodings: list[Any] = [None] * len(texts)
        plain = [index for index, text in enumerate(lowercased) if text is not None]
        others = [index for index, text in enumerate(lowercased) if text is None]
        # Texts of both kinds are encoded in two lists, and come back in their places.
        for indices, encoded in (
            (plain, self.plain.encode_batch_fast([lowercased[index] for index in plain])),
            (others, self._encode_fully([texts[index] for index in others])),
        ):
            for index, encoding in zip(indices, encoded, strict=True):
                encodings[index] = encoding
        return encodings

    def _encode_fully(self, texts: Sequence[str | tuple[str, str]]) -> list[Any]:
        """Encode texts with the full tokenizer."""
        fast = self._types_pairs or not any(isinstance(text, tuple) for text in texts)
        encode = self.tokenizer.encode_batch_fast if fast else self.tokenizer.encode_batch
        return list(encode(list(texts)))

    @cached_property
    def _types_pairs(self) -> bool:
        """True if the fast encoding of a pair has the tokenizer's types, not zeros.

        It has them from a template of pairs alone.
        """
        tokenizer, pair = self.tokenizer, [("a", "a")]
        fast, full = tokenizer.encode_batch_fast(pair)[0], tokenizer.encode_batch(pair)[0]
        return bool(fast.type_ids == full.type_ids)

    def _lowercase(self, text: str | tuple[str, str]) -> str | None:
        """Return the text in lower case; None if it needs the full tokenizer.

        That is a pair, or a text that is not ASCII, or has control characters or added tokens.
        """
        # A control character or a line break is not printable; BERT's normalizer removes it or
        # makes it a space.
        if not (isinstance(text, str) and text.isascii() and text.isprintable()):
            return None
        lowercased = text.lower()
        # Most texts have no character with which an added token begins: one search is enough.
        if self._first_characters.search(lowercased) is None:
            return lowercased
        return None if any(token in lowercased for token in self.added) else lowercased

    @cached_property
    def _first_characters(self) -> re.Pattern[str]:
        """Matches the first character of any added token."""
        return re.compile("|".join({re.escape(token[:1]) for token in self.added}) or "(?!)")


Encode = Callable[[list[Any]], list[Any]]
"""Returns one `tokenizers.Encoding` for each text or pair of a list."""


@dataclass(frozen=True)
class TextTokenizer:
    """The tokenizer of one model, with the settings of its config files."""

    backend: Any
    """`tokenizers.Tokenizer` that truncates single texts to `limit` tokens."""
    load_pair_backend: Callable[[], Any]
    """Returns the `tokenizers.Tokenizer` for (question, context), which splits a long context into
    overlapping windows; loaded on the first call."""
    limit: int
    """Maximum number of tokens of an input, including special tokens."""
    limit_source: str
    """The setting and file that `limit` comes from."""
    pad_id: int | None
    """Id of the padding token; None if there is none, so that only texts of equal length can share
    a batch."""
    pad_type_id: int
    sends_types: bool
    """False if the tokenizer gives no token types, so that those of each token are 0."""
    pad_left: bool
    unk_id: int | None
    cls_id: int | None
    mask_token: str
    """The mask token; empty if the tokenizer has none."""
    lower_case: bool
    """Lowercase texts before tokenizing, as sentence_bert_config.json specifies."""
    clean_up: bool
    """Remove spaces before punctuation from decoded text."""
    context_first: bool = False
    """Put the context before the question: transformers does, where it pads on the left."""
    pads_to_limit: bool = False
    """Pad every text to `limit` tokens: SigLIP, which has no mask, was trained so, and reads a
    text's vector at the last position of the row."""
    pair_template: PairTemplate | None = None
    """Turns a pair of texts into the prompt of a language model; None if the tokenizer joins it."""
    load_languages: Callable[[], Languages] = Languages
    """Returns the languages of a translation model; read on the first call."""
    parallel_encode: Callable[[Encode, list[Any]], list[Any]] | None = None
    """Runs the encoding of a list of texts, for example in chunks on several threads; None for the
    threads of `tokenizers`, which all tokenizers of the process share."""
    special: SpecialTokens = field(default_factory=SpecialTokens)
    """The special tokens that the tokenizer's class and files name."""
    pads: bool = True
    """False if the outputs of a text depend on padding, so that no text may be padded."""

    @classmethod
    def open(cls, directory: Path) -> TextTokenizer:
        """Read tokenizer.json and the configs beside it.

        Raises:
            ArtifactError: tokenizer.json is missing, it or a config file cannot be read, or the
                tokenizer rejects the settings of the config files.
        """
        backend, stored = load_tokenizer(directory)
        files = TokenizerFiles.read(directory, stored)
        settings, config, special = files.settings, files.config, files.special
        sentence = SentenceBertConfig.read(directory)
        limit, limit_source = length_limit(
            config.merged(), settings, sentence, read_length_limit(directory)
        )

        def configure(tokenizer: Any, **truncation: Any) -> None:
            try:
                files.configure(tokenizer)
                tokenizer.enable_truncation(**truncation)
            # A panic of `tokenizers` is raised as an exception that derives from BaseException.
            except BaseException as error:
                raise ArtifactError(
                    f"{directory / 'tokenizer.json'} rejects the settings of "
                    f"tokenizer_config.json and a limit of {truncation['max_length']} tokens: "
                    f"{failure_reason(error)}."
                ) from error

        configure(backend, max_length=limit, direction=settings.truncation_side)
        context_first = settings.padding_side == "left"

        @cache
        def load_pair_backend() -> Any:
            tokenizer, _ = load_tokenizer(directory)
            # Truncation is a setting of the whole tokenizer, so the windows of pairs need one of
            # their own, which only question answering loads.
            window = min(limit, WINDOW)
            # The overlap is at most half of a window, so that each window advances.
            stride = min(window // 2, _WINDOW_OVERLAP)
            # Only the context is split: each window has the whole question.
            configure(
                tokenizer,
                max_length=window,
                stride=stride,
                strategy="only_first" if context_first else "only_second",
                direction=settings.truncation_side,
            )
            return tokenizer

        return cls(
            backend=backend,
            load_pair_backend=load_pair_backend,
            limit=limit,
            limit_source=limit_source,
            pad_id=_pad_id(special_token_id(backend, special.pad_token), config.merged()),
            pad_type_id=files.kind.pad_token_type_id,
            sends_types=_TYPES in settings.input_names,
            pad_left=settings.padding_side == "left",
            unk_id=special_token_id(backend, special.unk_token),
            cls_id=special_token_id(backend, special.cls_token),
            mask_token=special.mask_token or "",
            lower_case=sentence.do_lower_case,
            clean_up=settings.clean_up_tokenization_spaces,
            context_first=context_first,
            pads_to_limit=config.model_type in _PADDED_TO_LIMIT,
            pair_template=PairTemplate.open(directory),
            load_languages=cache(lambda: Languages.read(backend, settings, config, special)),
            special=special,
        )

    def for_graph(self, record: GraphRecord) -> TextTokenizer:
        """Return a tokenizer that pads as was measured for a graph."""
        padding = record.padding
        if padding is None:
            return self
        if padding.side == "none":
            return replace(self, pads=False)
        return replace(self, pad_id=padding.token_id, pad_left=padding.side == "left")

    def state(self) -> str:
        """Return the tokenizer as tokenizer.json has it, with all settings but truncation."""
        state: str = self._untruncated.to_str()
        return state

    @property
    def refuses_longer(self) -> bool:
        """True if a text above the limit may not be cut in silence: the model would read it all."""
        return self.limit_source == LENGTH_LIMIT

    def encode(
        self,
        texts: Sequence[str | tuple[str, str]],
        *,
        offsets: bool = True,
        instruction: str = "",
    ) -> list[Any]:
        """Encode texts, truncated to `limit` tokens.

        Args:
            texts: texts or pairs of texts; a pair becomes one encoding, joined by the model's
                template.
            offsets: compute the character offsets of tokens; without them encoding is faster.
            instruction: the instruction of a model with a `pair_template`; empty for its own.

        Returns:
            A `tokenizers.Encoding` per text; `overflowing` is not empty for a truncated one.

        Raises:
            InputError: `texts` is one string, or an item is neither a string nor a pair, or cannot
                be tokenized; the message has its index.
        """
        check_texts(texts, pairs=True)
        if self.pair_template and any(isinstance(item, tuple) for item in texts):
            return self._encode_prompts(self.pair_template, texts, instruction)
        encode_batch = self.backend.encode_batch if offsets else self._fast_encoder.encode
        max_characters = self.limit * _CHARACTERS_PER_TOKEN

        def encode(items: Sequence[Any]) -> list[Any]:
            shortened = [
                self._shorten(text)
                if isinstance(text, str) and len(text) > max_characters
                else text
                for text in items
            ]
            # A single text is encoded in the calling thread in any case, so no other threads are
            # asked.
            return (
                encode_batch(shortened)
                if len(shortened) == 1
                else self._encode_list(encode_batch, shortened)
            )

        try:
            return encode(texts)
        except BaseException as error:
            failure_reason(error)  # re-raises errors that do not come from `tokenizers`
            return _encode_each(encode, texts)  # finds the text that fails

    def _encode_prompts(
        self, template: PairTemplate, texts: Sequence[str | tuple[str, str]], instruction: str
    ) -> list[Any]:
        """Encode pairs as prompts. A long document is cut, and what follows it stays."""
        singles = iter(self.encode([item for item in texts if isinstance(item, str)]))
        prompts = template.render_all(
            [
                (self._shorten(item[0]), self._shorten(item[1]))
                for item in texts
                if not isinstance(item, str)
            ],
            instruction=instruction,
        )
        *ids, suffix = (
            encoding.ids
            for encoding in _encode_each(
                lambda items: self._encode_list(self._encode_bare, items),
                [*prompts, template.suffix],
            )
        )
        # The end of the prompt asks the question, so it stays, and the document before it is cut.
        max_body = max(self.limit - len(suffix), 0)
        pairs = (
            TokenIds(prompt)
            if len(prompt) <= self.limit
            else TokenIds([*prompt[:max_body], *suffix], ("cut",))
            for prompt in ids
        )
        return [next(singles if isinstance(item, str) else pairs) for item in texts]

    def _encode_bare(self, texts: list[Any]) -> list[Any]:
        """Encode texts with all their tokens, and without the model's special ones around them."""
        encodings: list[Any] = self._untruncated.encode_batch(texts, add_special_tokens=False)
        return encodings

    def encode_untruncated(self, texts: Sequence[str], *, special: bool) -> list[Any]:
        """Encode texts without truncating them.

        Args:
            texts: the texts.
            special: add the model's special tokens.

        Returns:
            A `tokenizers.Encoding` per text.

        Raises:
            InputError: see `encode`.
        """
        check_texts(texts)

        def encode(items: list[Any]) -> list[Any]:
            encodings: list[Any] = self._untruncated.encode_batch(items, add_special_tokens=special)
            return encodings

        return _encode_each(lambda items: self._encode_list(encode, items), texts)

    @property
    def languages(self) -> Mapping[str, int]:
        """The codes of a translation model's languages and their token ids; empty for others."""
        return self.load_languages().tokens

    def encode_source(
        self,
        texts: Sequence[str],
        *,
        source_language: str | None = None,
        target_language: str | None = None,
    ) -> list[Any]:
        """Encode texts for an encoder-decoder, with special tokens and without truncation.

        Args:
            texts: the texts to translate, summarize, ….
            source_language: the language of the texts; None for the model's default.
            target_language: the language to translate to. Only Marian's tokenizers need it here;
                for the others, see `Languages.first_tokens`.

        Returns:
            An object with `ids` and `attention_mask` per text.

        Raises:
            InputError: the model does not have a language, or see `encode`.
            ArtifactError: the model does not have its default source language.
        """
        check_texts(texts)
        languages = self.load_languages()
        language_id = languages.source_id(source_language)
        if target_language is not None:
            languages.target_id(target_language)
            if languages.placement is Placement.TEXT:
                # Marian's texts name the target language; others name the source by a token.
                texts = [f">>{target_language}<< {text}" for text in texts]
        if language_id is None:
            return [
                self._with_hidden(encoding)
                for encoding in self.encode_untruncated(texts, special=True)
            ]
        before, after = languages.around(language_id)
        encodings = self.encode_untruncated(texts, special=False)
        return [TokenIds([*before, *encoding.ids, *after]) for encoding in encodings]

    def _with_hidden(self, encoding: Any) -> Any:
        """Replace unknown tokens that are hidden tokens as a whole, as Marian's tokenizer does."""
        if self.unk_id is None or self.unk_id not in encoding.ids:
            return encoding
        ids = list(encoding.ids)
        # Every unknown token has the same id, so the text of the token says which one it is.
        for index, token in enumerate(encoding.tokens):
            if ids[index] == self.unk_id:
                hidden = self.backend.token_to_id(HIDDEN + token)
                ids[index] = self.unk_id if hidden is None else hidden
        return TokenIds(ids)

    def encode_ids(self, ids: Sequence[int] | NDArray[Any], index: int = 0) -> TokenIds:
        """Add the model's special tokens around a client's token ids and truncate to `limit`.

        Args:
            ids: token ids, with or without the model's special tokens around them.
            index: index of the input, for error messages.

        Raises:
            InputError: an id is not in the vocabulary.
        """
        before, after, types = self._special_tokens_around
        inner: list[Any] = list(ids) if isinstance(ids, Sequence) else ids.tolist()
        ends = len(inner) - len(after)
        # Ids from the model's own tokenizer have the special tokens already; they are not added
        # twice.
        if before + after and inner[: len(before)] == before and inner[ends:] == after:
            inner = inner[len(before) : ends]
        max_inner = max(self.limit - len(before) - len(after), 0)
        is_cut = len(inner) > max_inner
        keeps_end = self.backend.truncation["direction"] == "left"
        # As the tokenizer truncates texts: only what is beside the special tokens is cut.
        inner = inner[len(inner) - max_inner :] if is_cut and keeps_end else inner[:max_inner]
        size = self.vocabulary_size
        for token_id in inner:
            # bool is a subclass of int, but True is no token id.
            if (
                isinstance(token_id, bool)
                or not isinstance(token_id, int | np.integer)
                or not 0 <= token_id < size
            ):
                raise InputError(
                    f"input {index} has the token id {token_id!r}, expected whole numbers from "
                    f"0 to {size - 1}.",
                    do=f"Send texts, or ids of this model's own tokenizer. {OTHER_TOKENIZER}",
                )
        # XLNet's and Funnel's classification token has a type of its own.
        first, own, last = types
        return TokenIds(
            [*before, *inner, *after],
            ("cut",) if is_cut else (),
            (*first, *own * len(inner), *last) if any(chain(*types)) else (),
        )

    def _encode_list(self, encode: Encode, texts: list[Any]) -> list[Any]:
        """Encode a list of texts without blocking other Python threads.

        `encode_batch` releases the GIL; `Tokenizer.encode` does not. `encode_batch` encodes a
        single text in the calling thread, and a list in a thread pool that the process shares.
        """
        return (
            encode(texts) if self.parallel_encode is None else self.parallel_encode(encode, texts)
        )

    def _has_type_0(self, encoding: Any) -> bool:
        """Return True if every token of an encoding is known to have the type 0."""
        if type(encoding) is TokenArray:
            return encoding.types is None
        return self._singles_have_type_0 and getattr(encoding, "n_sequences", 0) == 1

    @cached_property
    def _singles_have_type_0(self) -> bool:
        """True if every token of a single text has the type 0: its template gives the types."""
        try:
            (encoding,) = self.backend.encode_batch(["a"])
        except BaseException as error:
            failure_reason(error)  # re-raises errors that do not come from `tokenizers`
            return False
        return not any(encoding.type_ids)

    @cached_property
    def vocabulary_size(self) -> int:
        """Number of tokens, added ones included; `tokenizers` takes milliseconds to count them."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    @cached_property
    def _fast_encoder(self) -> FastEncoder:
        return FastEncoder.from_tokenizer(self.backend)

    @cached_property
    def _untruncated(self) -> Any:
        """A copy of the tokenizer without truncation."""
        copy = type(self.backend).from_str(self.backend.to_str())
        copy.encode_special_tokens = self.backend.encode_special_tokens  # no part of the text
        copy.no_truncation()
        return copy

    @cached_property
    def _special_tokens_around(self) -> tuple[list[int], list[int], list[list[int]]]:
        """The ids of the special tokens that the model adds before and after a text.

        Then the types of those before, of a token of the text, and of those after.
        """
        try:
            # Any text of one plain token would do: all that comes around it is special.
            (encoding,) = self.backend.encode_batch(["a"])
        except BaseException as error:
            raise InputError(
                "token ids cannot be used: to find the model's special tokens, the text 'a' is "
                f"tokenized, which failed: {failure_reason(error)}.",
                do="Send texts instead.",
            ) from error
        mask = encoding.special_tokens_mask
        first = mask.index(0) if 0 in mask else len(mask)
        last = len(mask) - mask[::-1].index(0) if 0 in mask else len(mask)
        ids, types = encoding.ids, encoding.type_ids
        inner = types[first:last][:1] or [0]
        return ids[:first], ids[last:], [types[:first], inner, types[last:]]

    def _shorten(self, text: str) -> str:
        """Return the beginning of a long text, enough of it to fill the limit with the same tokens.

        A text of megabytes would take long to tokenize, only to be truncated afterwards. So try a
        short beginning, and a four times longer one until its tokens exceed the limit by a margin.
        A text that has too few tokens even then (whitespace, one endless word) is cut there.
        """
        characters = self.limit * _CHARACTERS_PER_TOKEN
        truncation = self.backend.truncation
        if len(text) <= characters or not truncation or truncation["direction"] != "right":
            return text
        max_characters = self.limit * _MAX_CHARACTERS_PER_TOKEN
        while characters < min(len(text), max_characters):
            beginning = text[:characters]
            (encoding,) = self.backend.encode_batch([beginning])
            # The overflowing tokens belong to the same beginning.
            if len(encoding) + sum(len(e) for e in encoding.overflowing) > self.limit + _MARGIN:
                return beginning
            characters *= 4
        return text[:max_characters]

    def prepare(self, text: str) -> str:
        """Lowercase a text if sentence_bert_config.json says so."""
        return text.lower() if self.lower_case else text

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[Any]:
        """Encode (question, context) pairs.

        Returns:
            A `tokenizers.Encoding` per pair, of the first window of the context; `overflowing` has
            the other windows.

        Raises:
            InputError: a question is so long that no token of its context fits beside it, or a
                pair cannot be tokenized; the message has its index.
            ArtifactError: the tokenizer cannot split contexts into windows.
        """
        tokenizer = self.load_pair_backend()
        texts = [pair[::-1] for pair in pairs] if self.context_first else list(pairs)
        try:
            return self._encode_list(tokenizer.encode_batch, texts)
        except BaseException as error:
            # Usually one pair is the cause, and its own error names it.
            reason = failure_reason(error)
            for index, pair in enumerate(pairs):
                self._require_pair(tokenizer, pair, index)
            raise InputError(f"the questions cannot be tokenized together: {reason}.") from error

    def _require_pair(self, tokenizer: Any, pair: tuple[str, str], index: int) -> None:
        """Raise InputError if a (question, context) pair cannot be tokenized."""
        for role, text in zip(("question", "context"), pair, strict=True):
            try:
                self.encode([text])
            except InputError as error:
                message = error.message.replace("text 0", f"{role} {index}", 1)
                raise InputError(message) from error
        try:
            tokenizer.encode_batch([pair[::-1] if self.context_first else pair])
        except BaseException as error:
            raise InputError(
                f"question {index} is too long: in windows of {min(self.limit, WINDOW)} tokens no "
                f"token of its context fits beside it ({failure_reason(error)}).",
                do="Shorten the question.",
            ) from error

    def feeds(
        self, encodings: Sequence[Any], inputs: Iterable[TensorSpec], *, width: int = 1
    ) -> dict[str, NDArray[Any]]:
        """Pad encodings into the inputs that the graph declares.

        Args:
            encodings: encodings of texts.
            inputs: the graph's inputs.
            width: minimum number of tokens to pad to; ignored if the graph's sequence is fixed.

        Returns:
            input_ids, attention_mask, …: (len(encodings), sequence), of the graph's dtypes.

        Raises:
            ArtifactError: the graph has an input that does not come from a tokenizer.
            InputError: an encoding is longer than the graph's fixed sequence, or needs padding but
                the tokenizer or graph cannot pad.
        """
        specs = {spec.name: spec for spec in inputs}
        if unknown := next((name for name in specs if name not in TEXT_INPUTS), None):
            raise ArtifactError(
                f"the graph has the input {specs[unknown]}, which no tokenizer produces; "
                f"expected only {', '.join(TEXT_INPUTS)}."
            )
        lengths = list(map(len, encodings))
        longest = max(lengths)
        width = max(width, self.limit if self.pads_to_limit else 1)
        # A graph of fixed length takes nothing else, so `width` is ignored.
        width = fixed_sequence(specs.values()) or max(longest, width)
        if longest > width:
            raise InputError(f"a text has {longest} tokens, but the graph takes exactly {width}.")
        # Padding is refused only where it is needed: texts of one length run on any graph.
        is_padded = min(lengths) < width
        if is_padded and not self.can_pad(specs.values()):
            obstacle = "the tokenizer has no padding token"
            if not self.pads:
                obstacle = "the model's outputs depend on padding"
            elif self.pad_id is not None:
                obstacle = "the graph has no attention_mask"
            raise InputError(f"a text must be padded to {width} tokens, but {obstacle}.")
        if is_padded:
            positions, counts = np.arange(width), np.array(lengths)[:, None]
            mask = positions >= width - counts if self.pad_left else positions < counts
        else:
            mask = np.ones((len(lengths), width), np.bool_)
        tokens = sum(lengths)
        return {
            name: self._padded_input(name, encodings, mask, tokens, spec.dtype)
            for name, spec in specs.items()
        }

    def can_pad(self, inputs: Iterable[TensorSpec]) -> bool:
        """Return True if texts of different lengths can share a batch of the graph."""
        has_mask = self.pads_to_limit or any(spec.name == "attention_mask" for spec in inputs)
        return self.pads and self.pad_id is not None and has_mask

    def strip_padding(self, row: NDArray[Any], encoding: Any) -> NDArray[Any]:
        """Strip the padding from one output row: (sequence, …) to (tokens, …)."""
        length = len(encoding.ids)
        return row[len(row) - length :] if self.pad_left else row[:length]

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids of special tokens."""
        tokens = self.backend.get_added_tokens_decoder().items()
        return frozenset(token_id for token_id, token in tokens if token.special)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token; None if the vocabulary does not have it."""
        token_id: int | None = self.backend.token_to_id(token)
        return token_id

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """Decode token ids to text as transformers does.

        Raises:
            InputError: the ids cannot be decoded.
        """
        try:  # `decode_batch` releases the GIL; `decode` does not
            text: str
            (text,) = self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special)
        except BaseException as error:
            raise InputError(f"token ids cannot be decoded: {failure_reason(error)}.") from error
        return clean_up_tokenization(text) if self.clean_up else text

    def _padded_input(
        self,
        name: str,
        encodings: Sequence[Any],
        mask: NDArray[np.bool_],
        tokens: int,
        dtype: str,
    ) -> NDArray[Any]:
        """Return one input of the graph, padded: (len(encodings), width).

        Args:
            name: name of the input.
            encodings: encodings of texts.
            mask: True for tokens, False for padding: (len(encodings), width).
            tokens: number of tokens without padding.
            dtype: dtype of the input.
        """
        if name == "attention_mask":
            return np.array(mask, dtype)
        if name == "position_ids":
            # Positions count real tokens only: with padding on the left, the first has position 0.
            return np.asarray(np.maximum(np.cumsum(mask, axis=1) - 1, 0), dtype)
        if name == _TYPES:
            if not self.sends_types:
                return np.zeros(mask.shape, dtype)
            if not self.pad_type_id and all(map(self._has_type_0, encodings)):
                return np.zeros(mask.shape, dtype)
            rows, padding = [encoding.type_ids for encoding in encodings], self.pad_type_id
        else:
            rows, padding = [encoding.ids for encoding in encodings], self.pad_id or 0
        # The usual request of a server: one text, which needs no padding.
        if len(rows) == 1 and tokens == mask.size:
            return np.array(rows, dtype)
        # One array of all tokens: an array for each row would take longer.
        if all(isinstance(row, np.ndarray) for row in rows):
            values = np.concatenate(rows).astype(dtype, copy=False)
        else:
            values = np.fromiter(chain.from_iterable(rows), dtype, tokens)
        if tokens == mask.size:
            return values.reshape(mask.shape)
        padded = np.full(mask.shape, padding, dtype)
        padded[mask] = values
        return padded


def _pad_id(token_id: int | None, config: ModelConfig) -> int | None:
    """Return the id to pad with: that of config.json, because models look for it.

    Classifiers of decoders read the last token that is not this one, and RoBERTa counts positions
    without it. The ids of a mask's padding have no other effect.

    Args:
        token_id: the tokenizer's padding token; None if it has none.
        config: config.json with its text part.
    """
    if token_id is None or config.pad_token_id is None:
        return token_id
    is_valid = 0 <= config.pad_token_id < config.vocab_size
    return config.pad_token_id if is_valid else token_id


def _encode_each(encode: Encode, texts: Sequence[Any], *, first: int = 0) -> list[Any]:
    """Encode all texts at once; if that fails, find the text that cannot be tokenized.

    Args:
        encode: encodes a list of texts with `tokenizers`.
        texts: the texts.
        first: index of the first text, for error messages.

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


def require_list(items: Any, what: str) -> None:
    """Raise InputError unless inputs are a list, or a container like one, of any items.

    An iterator is not: it would be empty after the items were checked.
    """
    if isinstance(items, str | bytes):
        raise InputError(f"found one {what}, expected a list of them.", do=f"Pass [{what}].")
    is_list = isinstance(items, Iterable) and isinstance(items, Sized)
    if not is_list or isinstance(items, Mapping):
        raise InputError(
            f"found {describe_type(items)}, expected a list of {what}s.", do=f"Pass [{what}, …]."
        )


def describe_type(value: Any) -> str:
    """Return what a value is, for an error message."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[:1] in 'aeio' else 'a'} {name}"


def check_texts(texts: Sequence[Any], *, what: str = "text", pairs: bool = False) -> None:
    """Raise InputError, with the index of the item, unless `texts` is a list of strings.

    Args:
        texts: the inputs to check.
        what: what error messages call an item.
        pairs: also accept tuples of two strings.
    """
    require_list(texts, what)
    for index, item in enumerate(texts):
        parts: Sequence[Any] = (item,)
        if pairs and isinstance(item, tuple) and len(item) == 2:
            parts = item
        for text in parts:
            if not isinstance(text, str):
                raise InputError(f"{what} {index} is {describe_type(text)}, expected a string.")
            if not text.isascii():
                try:
                    text.encode()
                except UnicodeEncodeError:
                    raise InputError(
                        f"{what} {index} contains a lone surrogate, which is not a character.",
                        do="Decode the text with its own encoding first, such as UTF-8 or Latin-1.",
                    ) from None


def fixed_sequence(inputs: Iterable[TensorSpec]) -> int | None:
    """Return the graph's sequence length if it is fixed, else None."""
    dims = next((spec.dims for spec in inputs if spec.name == "input_ids"), ())
    return dims[-1] if len(dims) > 1 and isinstance(dims[-1], int) else None


def clean_up_tokenization(text: str) -> str:
    """Remove spaces before punctuation, as transformers' `clean_up_tokenization` does."""
    for spaced, joined in (
        (" .", "."),
        (" ?", "?"),
        (" !", "!"),
        (" ,", ","),
        (" ' ", "'"),
        (" n't", "n't"),
        (" 'm", "'m"),
        (" 's", "'s"),
        (" 've", "'ve"),
        (" 're", "'re"),
    ):
        text = text.replace(spaced, joined)
    return text

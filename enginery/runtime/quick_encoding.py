"""Texts into token ids where nobody asks where in the text a token is.

    >>> quick = QuickEncoder.of(tokenizer)
    >>> [encoding.ids for encoding in quick.encode(["The pump runs."])]
    [[101, 1996, 15856, 3216, 1012, 102]]

The ids are those of `encode_batch`. BERT's normalizer takes a third of the time, and of plain ASCII
it only makes small letters, which Python does at once: such texts go past it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class QuickEncoder:
    """A tokenizer without offsets."""

    tokenizer: Any
    """`tokenizers.Tokenizer`, with its truncation set."""
    plain: Any
    """The same without normalizer and added tokens; None where plain texts need no less."""
    added: re.Pattern[str]
    """Finds an added token in a text, whatever its case."""

    @classmethod
    def of(cls, tokenizer: Any) -> QuickEncoder:
        """Shares the tokenizer's vocabulary, of which there may be megabytes."""
        from tokenizers import Tokenizer, normalizers

        contents = [added.content for added in tokenizer.get_added_tokens_decoder().values()]
        found = re.compile("|".join(map(re.escape, contents)) or r"(?!)", re.IGNORECASE)
        normalizer = tokenizer.normalizer
        if not (isinstance(normalizer, normalizers.BertNormalizer) and normalizer.lowercase):
            return cls(tokenizer, None, found)
        plain = Tokenizer(tokenizer.model)
        plain.pre_tokenizer = tokenizer.pre_tokenizer
        plain.post_processor = tokenizer.post_processor
        if tokenizer.truncation:
            plain.enable_truncation(**tokenizer.truncation)
        return cls(tokenizer, plain, found)

    def encode(self, texts: Sequence[str | tuple[str, str]]) -> list[Any]:
        """One `tokenizers.Encoding` a text or pair, its offsets without meaning."""
        if self.plain is None:
            return list(self.tokenizer.encode_batch_fast(list(texts)))
        places = [place for place, text in enumerate(texts) if self._is_plain(text)]
        lower = [text.lower() for text in (texts[place] for place in places)
                 if isinstance(text, str)]  # fmt: skip
        found: list[Any] = self.plain.encode_batch_fast(lower)
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
        """Whether BERT's normalizer would only make small letters of it, and no token was added."""
        return (
            isinstance(text, str)
            and text.isascii()
            and text.isprintable()
            and not self.added.search(text)
        )

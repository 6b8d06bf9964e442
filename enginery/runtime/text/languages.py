"""Read the languages of a translation model from its tokenizer's files, and encode for them.

transformers' tokenizers of translation models put the token of the source language in front of a
text or behind it, and generation starts with that of the target language. Marian's texts name the
target language instead:

| class | codes | texts |
|-|-|-|
| M2M100Tokenizer | `fr` | `__fr__` tokens `</s>` |
| NllbTokenizer | `fra_Latn` | `fra_Latn` tokens `</s>`; if legacy, as MBartTokenizer |
| MBartTokenizer | `fr_XX` | tokens `</s>` `fr_XX` |
| MBart50Tokenizer | `fr_XX` | `fr_XX` tokens `</s>` |
| MarianTokenizer | `fra` | `>>fra<<` tokens `</s>`, which is the target language |
"""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

from enginery.core.errors import ArtifactError, InputError
from enginery.core.model.files import ModelConfig, SpecialTokens, TokenizerConfig
from enginery.runtime.text.tokenizer_files import HIDDEN

_EOS = "</s>"
"""The end token of all these classes if no file names another one."""
_shown = reprlib.repr
_LONGEST_CODE = 32
"""Characters of an unknown code that are compared with the known ones."""


class Placement(Enum):
    """Where the token of a language goes."""

    FRONT = auto()
    """The source language: in front of the text's tokens."""
    BACK = auto()
    """The source language: behind the end token."""
    TEXT = auto()
    """The target language: in front of the text."""
    NONE = auto()
    """The model has no languages."""


class _Convention(NamedTuple):
    """How a class of tokenizers names its languages."""

    token: re.Pattern[str]
    """Pattern of a language's token, with the code as its group."""
    placement: Placement
    source: str
    """The source language if tokenizer_config.json has none."""


_FAIRSEQ = re.compile(r"([a-z]{2}_[A-Z]{2})")
_CONVENTIONS = {
    "M2M100Tokenizer": _Convention(re.compile(r"__([a-z]{2,3})__"), Placement.FRONT, "en"),
    "NllbTokenizer": _Convention(
        re.compile(r"([a-z]{3}_[A-Z][a-z]{3})"), Placement.FRONT, "eng_Latn"
    ),
    "MBartTokenizer": _Convention(_FAIRSEQ, Placement.BACK, "en_XX"),
    "MBart50Tokenizer": _Convention(_FAIRSEQ, Placement.FRONT, "en_XX"),
    "MarianTokenizer": _Convention(re.compile(r">>([\w-]+)<<"), Placement.TEXT, ""),
}
# The tokenizers that transformers uses if no file names a class. Source: TOKENIZER_MAPPING_NAMES.
_CLASS_OF_TYPE = {
    "m2m_100": "M2M100Tokenizer",
    "marian": "MarianTokenizer",
    "mbart": "MBartTokenizer",
    "nllb-moe": "NllbTokenizer",
}


@dataclass(frozen=True)
class Languages:
    """The languages of a model, empty for one that does not translate."""

    tokens: Mapping[str, int] = field(default_factory=dict)
    """Code -> token id."""
    placement: Placement = Placement.NONE
    source: str = ""
    """The source language of texts for which none is named."""
    eos_id: int = 0
    """The end token."""
    replaces_start: bool = False
    """A translation starts with its language alone, not with the start token before it."""

    @classmethod
    def read(
        cls,
        tokenizer: Any,
        settings: TokenizerConfig,
        config: ModelConfig,
        special: SpecialTokens,
    ) -> Languages:
        """Find the languages in a vocabulary.

        Args:
            tokenizer: a `tokenizers.Tokenizer`.
            settings: tokenizer_config.json.
            config: config.json.
            special: the special tokens of the model's files.

        Raises:
            ArtifactError: the vocabulary has languages, but not the end token.
        """
        class_name = settings.tokenizer_class or config.tokenizer_class
        name = class_name.removesuffix("Fast") or _CLASS_OF_TYPE.get(config.model_type, "")
        if not (convention := _CONVENTIONS.get(name)):
            return cls()
        # transformers has the list of languages in code; the vocabulary shows the same ones.
        matches = (
            (convention.token.fullmatch(token.removeprefix(HIDDEN)), token_id)
            for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items()
        )
        tokens = {match[1]: token_id for match, token_id in matches if match}
        if not tokens:
            return cls()
        eos = special.eos_token or _EOS
        if (eos_id := tokenizer.token_to_id(eos)) is None:
            raise ArtifactError(f"the tokenizer of a translation model has no end token {eos!r}.")
        placement = convention.placement
        if name == "NllbTokenizer" and settings.legacy_behaviour:
            # As MBartTokenizer does.
            placement = Placement.BACK
        source = settings.src_lang or convention.source
        # mBART's translations start with the language; the other classes force it as the first
        # token after the start token.
        starts = name == "MBartTokenizer"
        return cls(dict(sorted(tokens.items())), placement, source, eos_id, starts)

    def source_id(self, code: str | None) -> int | None:
        """Return the token that tells a text's language; None if the model needs none.

        Args:
            code: the language; None for the model's default.

        Raises:
            InputError: the model does not have the language, or takes no source language.
            ArtifactError: the model does not have its default language.
        """
        if self.placement in (Placement.TEXT, Placement.NONE):
            if code is None:
                return None
            raise InputError(
                f"source language {_shown(code)} is given, but the tokenizer has "
                + ("only target languages." if self.tokens else "no languages."),
                do="Leave it out.",
            )
        if code is None and self.source not in self.tokens:
            raise ArtifactError(
                f"the tokenizer has no token for its own source language {_shown(self.source)}.",
                do="Name the source language.",
            )
        return self._token_id("source", self.source if code is None else code)

    def around(self, source_id: int) -> tuple[list[int], list[int]]:
        """Return the tokens in front of a text's and behind them."""
        if self.placement is Placement.BACK:
            return [], [self.eos_id, source_id]
        return [source_id], [self.eos_id]

    def first_tokens(self, target: str) -> dict[str, int]:
        """Return the options of generation that make it translate to a language.

        Empty for Marian, whose texts name the language.

        Raises:
            InputError: the model does not have the language.
        """
        token_id = self.target_id(target)
        if self.placement is Placement.TEXT:
            return {}
        return {
            "decoder_start_token_id" if self.replaces_start else "forced_bos_token_id": token_id
        }

    def require_target(self, start: int | None, forced: int | None) -> None:
        """Raise InputError if neither token of a translation is a language.

        Args:
            start: the decoder's first token.
            forced: the token that is forced after it.
        """
        if self.placement in (Placement.TEXT, Placement.NONE):
            return
        if start not in self.tokens.values() and forced not in self.tokens.values():
            codes = list(self.tokens)
            raise InputError(
                f"no target language is given, and the model has {len(codes)}: "
                f"{', '.join(codes[:6])}{', …' if len(codes) > 6 else ''}.",
                do="Name it: target_language.",
            )

    def target_id(self, code: str) -> int:
        """Return the token of a target language.

        Raises:
            InputError: the model does not have the language.
        """
        if not self.tokens:
            raise InputError(
                f"target language {_shown(code)} is given, but the tokenizer has no languages.",
                do="Leave it out.",
            )
        return self._token_id("target", code)

    def _token_id(self, role: str, code: str) -> int:
        if isinstance(code, str) and code in self.tokens:
            return self.tokens[code]
        closest = difflib.get_close_matches(str(code)[:_LONGEST_CODE], self.tokens, n=3, cutoff=0.0)
        raise InputError(
            f"{role} language {_shown(code)} is not one of the tokenizer's {len(self.tokens)}; "
            f"the nearest are {', '.join(closest)}."
        )

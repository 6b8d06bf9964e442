"""Decode the output of connectionist temporal classification (CTC) into text.

    decoder = open_decoder(artifact.path)       # reads vocab.json and tokenizer_config.json
    decoder.decode(logits.argmax(axis=-1))      # "the engine is warm"

A CTC model gives a token for each frame. Repeated tokens are one letter, and the padding token is
the blank between two equal letters. As `Wav2Vec2CTCTokenizer` of transformers 4.57 decodes, or
`ParakeetTokenizer` of version 5 with the word pieces of a tokenizer.json; a language model beside
it, which only `Wav2Vec2ProcessorWithLM` reads, is not used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from enginery.core.errors import ArtifactError
from enginery.core.json_file import read_json
from enginery.core.model.files import SpecialTokensMap, TokenizerConfig
from enginery.core.trust.bounds import MAX_COUNT
from enginery.runtime.text.tokenizer import TextTokenizer, clean_up_tokenization

_VOCABULARY, _ADDED, _TOKENIZER = "vocab.json", "added_tokens.json", "tokenizer.json"
_WORD_PIECES = "ParakeetTokenizer"
_CLASSES = ("", "Wav2Vec2CTCTokenizer", "Wav2Vec2Tokenizer")
_DEFAULTS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
"""Tokens of roles that no file names, in the order in which transformers adds them."""


def open_decoder(directory: Path) -> CtcDecoder | WordPieceDecoder:
    """Open the decoder that a model's files are for.

    Raises:
        ArtifactError: the files of its tokenizer are missing or malformed, or it is of another
            class.
    """
    class_name = TokenizerConfig.read(directory).tokenizer_class
    is_unnamed = not class_name and not (directory / _VOCABULARY).is_file()
    has_pieces = is_unnamed and (directory / _TOKENIZER).is_file()
    if has_pieces or class_name.startswith(_WORD_PIECES):
        return WordPieceDecoder.open(directory)
    return CtcDecoder.open(directory)


@dataclass(frozen=True)
class WordPieceDecoder:
    """The tokenizer of a CTC model whose tokens are pieces of words, such as Parakeet's."""

    tokenizer: TextTokenizer

    @classmethod
    def open(cls, directory: Path) -> WordPieceDecoder:
        """Read the model's tokenizer.json.

        Raises:
            ArtifactError: it is missing or malformed, or has no padding token, which is the blank.
        """
        tokenizer = TextTokenizer.open(directory)
        if tokenizer.pad_id is None:
            raise ArtifactError(
                f"{directory} names no padding token, which is the blank of a CTC model.",
                do="Save the model's tokenizer in its directory and export again.",
            )
        return cls(tokenizer)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the most likely token of each frame."""
        tokens = [token for token, _ in groupby(map(int, ids)) if token != self.tokenizer.pad_id]
        return self.tokenizer.decode(tokens, skip_special=False)


@dataclass(frozen=True)
class FrameSpan:
    """A text in a half-open range of frames."""

    text: str
    start: int
    end: int


@dataclass(frozen=True)
class CtcDecoder:
    """The vocabulary of a CTC model, and how its tokens become text."""

    tokens: Mapping[int, str]
    """The tokens by id; other ids are `unknown`."""
    blank: str
    unknown: str
    delimiter: str
    """The token between words, which becomes `space`."""
    space: str
    lowercase: bool
    clean_up: bool

    @classmethod
    def open(cls, directory: Path) -> CtcDecoder:
        """Read the model's vocabulary and the settings of its tokenizer.

        Raises:
            ArtifactError: vocab.json is missing or malformed, or the tokenizer is of another class.
        """
        settings = TokenizerConfig.read(directory)
        if settings.tokenizer_class not in _CLASSES:
            raise ArtifactError(
                f"{directory / TokenizerConfig.FILE}: tokenizer '{settings.tokenizer_class}' is "
                "not supported for transcribing, expected Wav2Vec2CTCTokenizer."
            )
        file = directory / _VOCABULARY
        if not file.is_file():
            raise ArtifactError(
                f"{directory} has no {_VOCABULARY}, which is needed to write what was said.",
                do="Save the model's tokenizer in its directory and export again.",
            )
        vocabulary = read_json(file, error=ArtifactError)
        if settings.target_lang:
            vocabulary = _language(file, vocabulary, settings.target_lang)
        tokens = _by_id(file, vocabulary)
        added = {
            token_id: value.content for token_id, value in settings.added_tokens_decoder.items()
        }
        tokens |= added or _by_id(directory / _ADDED, read_json(directory / _ADDED))
        special_tokens = settings.with_map(SpecialTokensMap.read(directory))
        specials = {role: getattr(special_tokens, role) or text for role, text in _DEFAULTS.items()}
        # transformers gives ids to special tokens that the files lack.
        missing = [text for text in specials.values() if text not in set(tokens.values())]
        tokens |= dict(enumerate(dict.fromkeys(missing), start=len(set(tokens.values()))))
        return cls(
            tokens=tokens,
            blank=specials["pad_token"],
            unknown=specials["unk_token"],
            delimiter=settings.word_delimiter_token or "|",
            space=settings.replace_word_delimiter_char,
            # The default of other tokenizers is True.
            lowercase=settings.do_lower_case and "do_lower_case" in settings.model_fields_set,
            clean_up=settings.clean_up_tokenization_spaces,
        )

    def letters(self, ids: Iterable[int]) -> list[FrameSpan]:
        """Return the letters of the most likely token of each frame, and where they are."""
        tokens = (self.tokens.get(int(token_id), self.unknown) for token_id in ids)
        spans, start = [], 0
        # Repeats are joined before blanks are dropped, so that a blank between two equal letters
        # keeps both.
        for token, repeats in groupby(tokens):
            end = start + sum(1 for _ in repeats)
            if token != self.blank:
                letter = self.space if token == self.delimiter else token
                spans.append(FrameSpan(letter, start, end))
            start = end
        return spans

    def words(self, letters: Iterable[FrameSpan]) -> list[FrameSpan]:
        """Return the words of letters, without the spaces between them."""
        words = []
        for is_space, group in groupby(letters, lambda letter: letter.text == self.space):
            if not is_space:
                word = list(group)
                text = "".join(letter.text for letter in word)
                words.append(FrameSpan(text, word[0].start, word[-1].end))
        return words

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the most likely token of each frame."""
        text = "".join(letter.text for letter in self.letters(ids)).strip()
        text = text.lower() if self.lowercase else text
        return clean_up_tokenization(text) if self.clean_up else text


def _language(file: Path, vocabulary: Mapping[str, Any], language: str) -> dict[str, Any]:
    """Return the vocabulary of one language of several."""
    tokens = vocabulary.get(language)
    if not isinstance(tokens, dict):
        raise ArtifactError(
            f"{file} has no vocabulary for the language '{language}', which "
            f"{TokenizerConfig.FILE} names as target_lang."
        )
    return tokens


def _by_id(file: Path, vocabulary: Mapping[str, Any]) -> dict[int, str]:
    for token, index in vocabulary.items():
        if type(index) is not int or not 0 <= index <= MAX_COUNT:
            raise ArtifactError(
                f"{file}: the id of {token[:60]!r} is {index!r:.60}, expected an integer from 0 to "
                f"{MAX_COUNT}."
            )
    return {index: token for token, index in vocabulary.items()}

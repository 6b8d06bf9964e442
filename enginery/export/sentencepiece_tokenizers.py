"""Build tokenizers of Marian and M2M100, for which transformers has no fast tokenizer.

Both segment texts with a sentencepiece model, and read the ids of its pieces from vocab.json. The
tokenizers built here give the ids and the texts that transformers' classes give:

- Normalization is that of the sentencepiece model, as a sequence of normalizers.
- What only vocab.json has, such as words of the target language, is part of no segmentation: it is
  stored as a hidden token (see `HIDDEN`).
- Marian takes a language code in front of a text, `>>fra<<`, as one token; a code that vocab.json
  does not have is an unknown token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from enginery.runtime.text.tokenizer_files import HIDDEN

_SPACE = "▁"
"""What sentencepiece writes for a space."""
_KNOWN_CODE, _UNKNOWN_CODE = "\ue000", "\ue001"
"""What a text with a language code starts with while it is normalized. Characters for private use,
which normalization does not change."""
_CODE = re.compile(r">>[\w-]+<<")

# Values of the enumerations in sentencepiece_model.proto.
_UNIGRAM, _BPE = 1, 2
_NORMAL, _UNKNOWN, _CONTROL, _UNUSED = 1, 2, 3, 5


class UnsupportedTokenizerError(Exception):
    """A tokenizer cannot be written as tokenizer.json; the message says why."""


def marian_tokenizer(slow: Any) -> Any:
    """Build the `tokenizers.Tokenizer` of a `MarianTokenizer`.

    Raises:
        UnsupportedTokenizerError: it cannot be built.
    """
    if slow.separate_vocabs:
        raise UnsupportedTokenizerError("it has a vocabulary for each language")
    codes = [token for token in slow.encoder if token.startswith(">>") and token.endswith("<<")]
    if odd := next((code for code in codes if not _CODE.fullmatch(code)), None):
        raise UnsupportedTokenizerError(f"vocab.json has the language code {odd!r}")
    tokenizer = _build(slow, slow.spm_source, slow.encoder, codes=codes)
    eos = str(slow.eos_token)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["$A", eos], pair=["$A", "$B", eos], special_tokens=[(eos, slow.eos_token_id)]
    )
    return tokenizer


def m2m100_tokenizer(slow: Any) -> Any:
    """Build the `tokenizers.Tokenizer` of an `M2M100Tokenizer`, for its source language.

    Raises:
        UnsupportedTokenizerError: it cannot be built.
    """
    tokenizer = _build(slow, slow.sp_model, {**slow.encoder, **slow.lang_token_to_id})
    eos, language = str(slow.eos_token), slow.get_lang_token(slow.src_lang)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[language, "$A", eos],
        pair=[language, "$A", "$B", eos],
        special_tokens=[(eos, slow.eos_token_id), (language, slow.get_lang_id(slow.src_lang))],
    )
    return tokenizer


def missing_pieces(slow: Any) -> int:
    """Return the number of pieces of the sentencepiece model that vocab.json lacks.

    transformers makes an unknown token of such a piece. Here, texts are segmented without it.
    """
    pieces = _read_pieces(_proto(slow.spm_source if hasattr(slow, "spm_source") else slow.sp_model))
    return sum(piece not in slow.encoder for piece in pieces)


def _build(
    slow: Any, processor: Any, ids: Mapping[str, int], codes: Sequence[str] | None = None
) -> Any:
    """Build a tokenizer that segments texts as a sentencepiece model does.

    Args:
        slow: the tokenizer of transformers, for its special tokens.
        processor: the `SentencePieceProcessor` of source texts.
        ids: token -> id.
        codes: the language codes that may be in front of a text; None if none may.
    """
    proto = _proto(processor)
    pieces = _read_pieces(proto)
    added = slow.added_tokens_decoder
    hidden = {i: token if token in pieces else HIDDEN + token for token, i in ids.items()}
    names = hidden | {i: token.content for i, token in added.items()}
    tokens = [names.get(i, "") for i in range(len(names))]
    if len(hidden) < len(ids) or len({*tokens} - {""}) < len(tokens):
        raise UnsupportedTokenizerError("the ids of its tokens are not 0, 1, 2, …, each once")
    if proto.trainer_spec.model_type == _UNIGRAM:
        model = _unigram(tokens, pieces, unk_id=slow.unk_token_id)
    else:
        model = _bpe(tokens, pieces, unk_token=str(slow.unk_token))
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = _normalizer(proto.normalizer_spec, processor, codes)
    if _SPACE in pieces and not any(_SPACE in piece[1:] for piece in pieces):
        # No piece reaches into the next word, so words can be segmented, and cached, one by one.
        tokenizer.pre_tokenizer = pre_tokenizers.Split(_SPACE, "merged_with_next")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(Regex(rf"\A{HIDDEN}"), ""),
            decoders.Replace(_SPACE, " "),
            decoders.Fuse(),
            # What Python's `str.strip` removes.
            decoders.Replace(Regex(r"\A[\s\x1c-\x1f]+|[\s\x1c-\x1f]+\z"), ""),
        ]
    )
    # transformers searches texts for these before it normalizes them.
    tokenizer.add_tokens(
        [
            AddedToken(
                token.content,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=False,
                special=token.special,
            )
            for _, token in sorted(added.items())
        ]
    )
    return tokenizer


def _proto(processor: Any) -> Any:
    from sentencepiece import sentencepiece_model_pb2

    return sentencepiece_model_pb2.ModelProto.FromString(processor.serialized_model_proto())


def _read_pieces(proto: Any) -> dict[str, float]:
    """Return the pieces that texts are segmented into, with their scores.

    Raises:
        UnsupportedTokenizerError: the model is of another kind, or has unusual options.
    """
    trained, spec = proto.trainer_spec, proto.normalizer_spec
    types = {piece.type for piece in proto.pieces}
    if trained.model_type not in (_UNIGRAM, _BPE):
        raise UnsupportedTokenizerError("its sentencepiece model is neither Unigram nor BPE")
    unused = {_UNUSED} if trained.model_type == _UNIGRAM else set()
    if not types <= {_NORMAL, _UNKNOWN, _CONTROL, *unused}:
        raise UnsupportedTokenizerError(
            "its sentencepiece model has bytes, user-defined symbols or unused pieces"
        )
    if not spec.escape_whitespaces or trained.treat_whitespace_as_suffix:
        raise UnsupportedTokenizerError("its sentencepiece model has no ▁ in front of words")
    if any(HIDDEN in piece.piece for piece in proto.pieces):
        raise UnsupportedTokenizerError("its sentencepiece model has a piece with a space")
    return {piece.piece: piece.score for piece in proto.pieces if piece.type == _NORMAL}


def _unigram(tokens: Sequence[str], pieces: Mapping[str, float], *, unk_id: int) -> Any:
    """Return the model that segments a text into its most probable pieces."""
    # Special tokens in a text are found before it is segmented, but normalization can yield one:
    # `＜/s＞`. It must be less probable than its characters.
    special = 10 * min([-10.0, *pieces.values()])
    scores = [0.0 if token.startswith(HIDDEN) else pieces.get(token, special) for token in tokens]
    return models.Unigram(list(zip(tokens, scores, strict=True)), unk_id, False)


def _bpe(tokens: Sequence[str], pieces: Mapping[str, float], *, unk_token: str) -> Any:
    """Return the model that joins neighbours, those first whose piece has the highest score."""
    scores = {token: pieces[token] for token in tokens if token in pieces}
    merges = [
        (piece[:end], piece[end:])
        for piece in sorted(scores, key=lambda piece: -scores[piece])
        for end in range(1, len(piece))
        if piece[:end] in scores and piece[end:] in scores
    ]
    ids = {token: i for i, token in enumerate(tokens)}
    return models.BPE(ids, merges, unk_token=unk_token, fuse_unk=True)


def _normalizer(spec: Any, processor: Any, codes: Sequence[str] | None) -> Any:
    """Return sentencepiece's normalization as a sequence of normalizers."""
    before = [normalizers.Prepend(" ")] if spec.add_dummy_prefix else []
    after = []
    if codes is not None:
        if not (spec.add_dummy_prefix and spec.remove_extra_whitespaces):
            raise UnsupportedTokenizerError("its sentencepiece model keeps spaces as they are")
        # The space put in front of a text tells whether it starts with a code. Each pattern matches
        # a character at least: `Replace` breaks the alignment with the text if it only inserts.
        code_names = "|".join(code.strip("<>") for code in codes)
        before += [
            normalizers.Replace(
                Regex(rf"\A >>(?!(?:{code_names})<<)(?m:.*?)<<"), f"{_UNKNOWN_CODE} "
            ),
            normalizers.Replace(Regex(rf"\A (?=>>(?:{code_names})<<)"), _KNOWN_CODE),
            normalizers.Replace(Regex(rf"\A{_KNOWN_CODE}>>(?:{code_names})\K<<"), "<< "),
        ]
        # That of a known code makes it a hidden token, and a lone one is an unknown token.
        after.append(normalizers.Replace(Regex(rf"\A[{_KNOWN_CODE}{_UNKNOWN_CODE}]"), HIDDEN))
    mapping = []
    if spec.precompiled_charsmap:
        # `Precompiled` finds only one mark of a letter, and none of a halfwidth kana.
        composes = processor.normalize("e\u0301").endswith("é")
        nfc = [normalizers.NFC()] if composes else []
        mapping = [*nfc, normalizers.Precompiled(spec.precompiled_charsmap), *nfc]
    if spec.remove_extra_whitespaces:
        mapping += [
            normalizers.Replace(Regex(" {2,}"), " "),
            normalizers.Replace(Regex(rf"[ {_SPACE}]+\z"), ""),
        ]
    return normalizers.Sequence([*before, *mapping, normalizers.Replace(" ", _SPACE), *after])

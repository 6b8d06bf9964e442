"""Write tokenizer.json for a model that has only the files of a slow tokenizer.

The runtime tokenizes with `tokenizers`, which reads tokenizer.json. transformers converts most
slow tokenizers; those of Marian and M2M100 are built by `sentencepiece_tokenizers`. Either way, the
result is compared with the slow tokenizer, and removed if it differs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers

from enginery.core.errors import ArtifactError, SourceError
from enginery.core.extras import missing_packages_as_errors
from enginery.export.sentencepiece_tokenizers import (
    UnsupportedTokenizerError,
    m2m100_tokenizer,
    marian_tokenizer,
    missing_pieces,
)
from enginery.runtime.text.tokenizer import TextTokenizer
from enginery.runtime.text.tokenizer_files import failure_reason

_VOCABULARIES = {"tokenizer_config.json", "vocab.txt", "vocab.json"}
_SENTENCEPIECE = ("spiece.model", "sentencepiece.bpe.model", "spm.model")
"""Names of sentencepiece models, besides `*.spm`. Other `*.model` files may have another format."""

_BUILDERS: dict[str, Callable[[Any], Any]] = {
    "MarianTokenizer": marian_tokenizer,
    "M2M100Tokenizer": m2m100_tokenizer,
}
"""Classes of transformers without a fast tokenizer -> what builds one."""

_SAMPLED_IDS, _IDS_AT_ONCE = 4000, 50
"""Token ids that are decoded, of the whole vocabulary, and how many together."""

_SAMPLES = (
    "The engine is warm, and the pump runs again.",
    "Who built the bridge? Nobody knows; but (in 1843) Ada Lovelace wrote about it!",
    "It's 12:30, 3.5% of £1,000 is £35 – isn't it? Write to ada@example.com.",
    "Der Motor ist warm. Über die Brücke in Köln fährt kein Zug, sagt Jürgen.",
    "Où est la clé du bateau ? Elle est tombée à l'eau, hélas. « Ça alors ! »",
    "¿Quién construyó el puente? Nadie lo sabe, señor.",
    "Kdo postavil most? Łódź, Şişli, Ångström, Đà Nẵng.",
    "Двигатель прогрет, насос снова работает.",
    "Ο κινητήρας είναι ζεστός και η αντλία δουλεύει.",
    "المحرك دافئ والمضخة تعمل.",
    "המנוע חם והמשאבה פועלת.",
    "इंजन गर्म है।",
    "เครื่องยนต์อุ่นแล้ว",
    "引擎已经热了，泵又开始运转。",
    "エンジンは暖かいです。",
    "엔진이 따뜻합니다.",
    "ＦＵＬＬ ｗｉｄｔｈ, ﬁne, ½ and x².",
    "Thanks 🙂🎉 ❤️",
    "a",
    "",
)
_UNUSUAL = ("  Two  spaces,\ta tab and\na new line. ", "De\u0301ja\u0300 vu, Vie\u0323\u0302t Nam.")
"""Texts for which fast tokenizers of transformers may differ from the slow ones: many spaces, and
letters with separate marks."""


def write_tokenizer(source: Path, out: Path, *, trust_remote_code: bool) -> list[str]:
    """Write tokenizer.json to `out` if the model has none, but files of a slow tokenizer.

    Call this inside `guarded`, when the config and the side files are in `out`.

    Args:
        source: the model directory.
        out: the staging directory.
        trust_remote_code: run a tokenizer's Python code that comes with the model.

    Returns:
        Notes for the manifest: why the file was not written, or how it differs.

    Raises:
        SourceError: a sentencepiece model cannot be read.
        MissingPackageError: the package sentencepiece is not installed.
    """
    names = {path.name for path in source.iterdir()}
    models = sorted(name for name in names if name.endswith((".spm", ".model")))
    if "tokenizer.json" in names or not (models or names & _VOCABULARIES):
        return []
    for name in models:
        if name.endswith(".spm") or name in _SENTENCEPIECE:
            _require_sentencepiece_model(source / name)
    written: list[Path] = []
    try:
        slow, fast = (
            transformers.AutoTokenizer.from_pretrained(
                str(source), use_fast=use_fast, trust_remote_code=trust_remote_code
            )
            for use_fast in (False, True)
        )
        tokenizer, notes = _fast_tokenizer(slow, fast)
        written.append(out / "tokenizer.json")
        tokenizer.save(str(written[0]))
        special = out / "special_tokens_map.json"
        if not special.is_file():
            written.append(special)
            special.write_text(json.dumps(slow.special_tokens_map, indent=2), encoding="utf-8")
        notes += _compare(slow, TextTokenizer.open(out))
    except (UnsupportedTokenizerError, ArtifactError) as error:
        notes = [f"no tokenizer.json: {error}"]
    except BaseException as error:
        reason = " ".join(failure_reason(error).split())
        notes = [f"no tokenizer.json: the tokenizer cannot be read: {reason}"]
    else:
        return notes
    for path in written:
        path.unlink(missing_ok=True)
    return notes


def _fast_tokenizer(slow: Any, fast: Any) -> tuple[Any, list[str]]:
    """Return the `tokenizers.Tokenizer` of a slow tokenizer, and notes.

    Args:
        slow: transformers' slow tokenizer.
        fast: its fast one; a slow one if there is none.

    Raises:
        UnsupportedTokenizerError: there is none, and none can be built.
    """
    name = type(slow).__name__
    if fast.is_fast:
        return fast.backend_tokenizer, []
    if name not in _BUILDERS:
        raise UnsupportedTokenizerError(f"transformers has no fast tokenizer for {name}.")
    count = missing_pieces(slow)
    note = (
        f"tokenizer.json: {count} pieces of the sentencepiece model are not in vocab.json; texts "
        "are segmented without them"
    )
    return _BUILDERS[name](slow), [note] if count else []


def _compare(slow: Any, tokenizer: TextTokenizer) -> list[str]:
    """Compare a tokenizer with the slow one on samples; return notes on what is tolerated.

    What is built here must be equal. transformers' own fast tokenizers may differ for unusual
    texts, and for those with characters that the model does not know. Decoded texts of these are
    not compared, because they differ in spaces.

    Raises:
        UnsupportedTokenizerError: they differ.
    """
    if slow.is_fast:
        return []
    name, built = type(slow).__name__, type(slow).__name__ in _BUILDERS
    codes = [*getattr(slow, "supported_language_codes", ()), ">>no-language<<"]
    texts = [*_SAMPLES, *_UNUSUAL, *(f"{code} {_SAMPLES[0]}" for code in codes)]
    encodings = tokenizer.encode_source(texts)
    expected_ids = [slow(text).input_ids for text in texts]
    tolerated = []
    for text, encoding, ids in zip(texts, encodings, expected_ids, strict=True):
        if encoding.ids == ids:
            continue
        if built or not (text in _UNUSUAL or slow.unk_token_id in ids):
            raise UnsupportedTokenizerError(f"it would differ from {name} for {text!r}.")
        tolerated.append(text)
    if built:
        _compare_decoded(slow, tokenizer)
    if not tolerated:
        return []
    shown = f"{tolerated[0]!r}" + (f" and {len(tolerated) - 1} more" if tolerated[1:] else "")
    return [f"tokenizer.json: transformers' fast tokenizer differs from {name} for {shown}"]


def _compare_decoded(slow: Any, tokenizer: TextTokenizer) -> None:
    """Compare the texts that both decode from ids spread over the vocabulary.

    Raises:
        UnsupportedTokenizerError: they differ.
    """
    step = max(len(slow) // _SAMPLED_IDS, 1)
    for start in range(0, len(slow), step * _IDS_AT_ONCE):
        ids = list(range(start, len(slow), step))[:_IDS_AT_ONCE]
        # M2M100 leaves the ▁ in pieces that its sentencepiece model does not have.
        decoded = slow.decode(ids, skip_special_tokens=True).replace("▁", " ").strip()
        if tokenizer.decode(ids, skip_special=True) != decoded:
            raise UnsupportedTokenizerError(
                f"it would differ from {type(slow).__name__} for the ids {ids}."
            )


def _require_sentencepiece_model(path: Path) -> None:
    """Raise SourceError unless sentencepiece can read the file."""
    with missing_packages_as_errors("Reading the model's tokenizer"):
        import sentencepiece

    try:
        model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        model.id_to_piece(list(range(len(model))))  # raises UnicodeDecodeError, a ValueError
    except (OSError, RuntimeError, ValueError) as error:
        raise SourceError(
            f"{path} is not a sentencepiece model, or is damaged.",
            do="Download the model again. Without this file, it is exported without a tokenizer.",
        ) from error

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

from enginery.core.errors import ArtifactError, MissingPackageError, SourceError
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
    "  Two  spaces,\ta tab and\na new line. ",
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
        _require_equal(slow, TextTokenizer.open(out))
    except (UnsupportedTokenizerError, ArtifactError) as error:
        notes = [f"no tokenizer.json: {error}"]
    except BaseException as error:
        reason = " ".join(failure_reason(error).split())
        notes = [f"no tokenizer.json: transformers cannot read the tokenizer: {reason}"]
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


def _require_equal(slow: Any, tokenizer: TextTokenizer) -> None:
    """Raise UnsupportedTokenizerError if the tokenizer differs from the slow one on samples.

    Texts are decoded only by those that are built here. For others, transformers' slow and fast
    tokenizers differ in spaces.
    """
    if slow.is_fast:
        return
    name = type(slow).__name__
    codes = [*getattr(slow, "supported_language_codes", ()), ">>no-language<<"]
    texts = [*_SAMPLES, *(f"{code} {_SAMPLES[0]}" for code in codes)]
    for text, encoding in zip(texts, tokenizer.encode_source(texts), strict=True):
        if encoding.ids != slow(text).input_ids:
            raise UnsupportedTokenizerError(f"it would differ from {name} for the text {text!r}.")
    step = max(len(slow) // _SAMPLED_IDS, 1)
    for first in range(0, len(slow) if name in _BUILDERS else 0, step * _IDS_AT_ONCE):
        ids = list(range(first, len(slow), step))[:_IDS_AT_ONCE]
        # M2M100 leaves the ▁ in pieces that its sentencepiece model does not have.
        wanted = slow.decode(ids, skip_special_tokens=True).replace("▁", " ").strip()
        if tokenizer.decode(ids, skip_special=True) != wanted:
            raise UnsupportedTokenizerError(f"it would differ from {name} for the token ids {ids}.")


def _require_sentencepiece_model(path: Path) -> None:
    """Raise SourceError unless sentencepiece can read the file."""
    try:
        import sentencepiece
    except ImportError as error:
        raise MissingPackageError(
            "sentencepiece", extra="export", purpose="Reading the model's tokenizer"
        ) from error
    try:
        sentencepiece.SentencePieceProcessor().Load(str(path))
    except (OSError, RuntimeError, ValueError) as error:
        raise SourceError(
            f"{path} is not a sentencepiece model, or is damaged.",
            do="Download the model again. Without this file, it is exported without a tokenizer.",
        ) from error

"""Write a tokenizer.json that gives the token ids of transformers' `AutoTokenizer`.

The runtime tokenizes with `tokenizers`, which reads tokenizer.json and the settings beside it. A
model's own file is copied and compared with what transformers builds from all files of the model.
Where that differs, transformers' tokenizer is written in its place; where the answers differ even
then, the model is refused.

For a model that has only the files of a slow tokenizer, transformers converts most of them; those
of Marian and M2M100 are built by `sentencepiece_tokenizers`. Either way, the result is compared
with the slow tokenizer, and removed if it differs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers

from enginery.core.errors import ArtifactError, InputError, SourceError, raise_system_error
from enginery.core.extras import missing_packages_as_errors
from enginery.export.sentencepiece_tokenizers import (
    UnsupportedTokenizerError,
    m2m100_tokenizer,
    marian_tokenizer,
    missing_pieces,
)
from enginery.runtime.pytorch.tokenizer import (
    describe_tokenizer,
    load_reference_tokenizer,
    missing_library,
)
from enginery.runtime.text.chat_template import PairTemplate
from enginery.runtime.text.tokenizer import TextTokenizer
from enginery.runtime.text.tokenizer_comparison import TEXTS, UNUSUAL, compare_tokenizer
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


def write_tokenizer(source: Path, out: Path, *, trust_remote_code: bool) -> list[str]:
    """Compare the model's tokenizer.json with transformers, or write one if it has none.

    Call this inside `guarded`, when the config and the side files are in `out`.

    Args:
        source: the model directory.
        out: the staging directory.
        trust_remote_code: run a tokenizer's Python code that comes with the model.

    Returns:
        Notes for the manifest: why the file was not written, or how it differs.

    Raises:
        SourceError: a sentencepiece model cannot be read, or texts would get other token ids than
            with transformers.
        MissingPackageError: the package sentencepiece is not installed.
    """
    names = {path.name for path in source.iterdir()}
    models = sorted(name for name in names if name.endswith((".spm", ".model")))
    if "tokenizer.json" in names:
        return _compare_own(source, out, trust_remote_code=trust_remote_code)
    if not (models or names & _VOCABULARIES):
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
        opened = TextTokenizer.open(out)
        notes += _compare(slow, opened)
        if fast.is_fast:
            # What transformers itself gives by default, with all settings.
            expected = describe_tokenizer(fast, limit=opened.limit)
            if problem := compare_tokenizer(out, opened, expected).problem:
                raise UnsupportedTokenizerError(f"it would differ: {problem}.")
    except (UnsupportedTokenizerError, ArtifactError) as error:
        raise_system_error(error)
        notes = [f"no tokenizer.json: {error}"]
    except BaseException as error:
        raise_system_error(error)
        reason = " ".join(failure_reason(error).split())
        notes = [f"no tokenizer.json: the tokenizer cannot be read: {reason}"]
    else:
        return notes
    for path in written:
        path.unlink(missing_ok=True)
    return notes


def _compare_own(source: Path, out: Path, *, trust_remote_code: bool) -> list[str]:
    """Compare the model's own tokenizer.json with transformers; write it anew if settings need it.

    Raises:
        SourceError: texts would get other token ids than with transformers, or the chat template of
            a reranker renders no pair.
    """
    file = out / "tokenizer.json"
    try:
        PairTemplate.open(out)
    except ArtifactError as error:
        message = error.message.replace(f"{out}/", f"{source}/")  # `out` is gone after an error
        raise SourceError(message, do=error.do or "Correct it in a copy of the model.") from error
    try:
        reference = load_reference_tokenizer(source, trust_remote_code=trust_remote_code)
    except ImportError as error:
        library = missing_library(error)
        raise SourceError(
            f"the model's tokenizer needs the package {library}, which is not installed, and texts "
            f"would get other token ids without it: {' '.join(str(error).split())[:200]}",
            do="A tokenizer with parts in another library cannot be served. To export the model "
            "for token ids alone, remove tokenizer.json and the vocabulary from a copy of it.",
        ) from error
    except InputError as error:
        raise_system_error(error)
        return [f"tokenizer.json was not compared: {error.message}"]
    problem = ""
    try:
        tokenizer = TextTokenizer.open(out)
    except ArtifactError as error:
        problem = error.message
    else:
        expected = describe_tokenizer(reference, limit=tokenizer.limit)
        differences = compare_tokenizer(out, tokenizer, expected)
        if not differences.state and not differences.problem:
            return []
        problem = differences.problem or ", ".join(differences.state)
    own = file.read_bytes()
    if reference.is_fast:
        try:
            reference.backend_tokenizer.save(str(file))
            tokenizer = TextTokenizer.open(out)
        except BaseException as error:  # a pre-tokenizer in Python code, for instance
            if isinstance(error, ArtifactError):
                problem = error.message
            else:
                failure_reason(error)
            file.write_bytes(own)
        else:
            expected = describe_tokenizer(reference, limit=tokenizer.limit)
            differences = compare_tokenizer(out, tokenizer, expected)
            if not differences.problem and not differences.state:
                return [
                    f"tokenizer.json is that of {expected.name}, which transformers makes of all "
                    f"files of the model; with the model's own, {problem}"
                ]
            problem = differences.problem or f"in tokenizer.json, {', '.join(differences.state)}"
    raise SourceError(
        f"the model's texts would get other token ids than with transformers, so that its answers "
        f"would differ: {problem}.",
        do="Change the setting in a copy of the model, or save the tokenizer there: "
        "AutoTokenizer.from_pretrained(MODEL).save_pretrained(COPY).",
    )


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
    texts = [*TEXTS, *UNUSUAL, *(f"{code} {TEXTS[0]}" for code in codes)]
    encodings = tokenizer.encode_source(texts)
    expected_ids = [slow(text).input_ids for text in texts]
    tolerated = []
    for text, encoding, ids in zip(texts, encodings, expected_ids, strict=True):
        if encoding.ids == ids:
            continue
        if built or not (text in UNUSUAL or slow.unk_token_id in ids):
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

"""Find out whether short texts can be tokenized in the event loop's thread.

A tokenizer.json is untrusted: some of its rules take exponential time, and some never end. So texts
are tokenized in threads that may hang, see `PreprocessPool`; to pass a text to a thread and its
tokens back takes longer than to tokenize it. A tokenizer made only of parts whose time is bounded
by the length of the text needs no thread for a short one. These parts have no regular expression of
the file's own, and no rule that makes a text longer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import orjson

from enginery.core.errors import InputError
from enginery.runtime.tasks.classify import Classify
from enginery.runtime.tasks.embed import Embed
from enginery.runtime.tasks.task import Task
from enginery.runtime.text.tokenizer import TextTokenizer

QUICK_CHARACTERS = 512
"""Number of characters of a short request, which take about 60 µs."""
_MAX_SECONDS = 0.002
"""Processor time that a text of this length may take to tokenize."""
_MAX_WORD_CHARACTERS = 200
"""WordPiece takes the square of the length of a word, up to its own limit for words."""
_MAX_PARTS = 8
_NORMALIZERS = frozenset(
    {
        "BertNormalizer",
        "Lowercase",
        "NFC",
        "NFD",
        "NFKC",
        "NFKD",
        "Nmt",
        "Strip",
        "StripAccents",
    }
)
_PRE_TOKENIZERS = frozenset(
    {
        "BertPreTokenizer",
        "ByteLevel",
        "Digits",
        "Metaspace",
        "Punctuation",
        "UnicodeScripts",
        "Whitespace",
        "WhitespaceSplit",
    }
)
_POST_PROCESSORS = frozenset({"BertProcessing", "ByteLevel", "RobertaProcessing"})
_MODELS = frozenset({"BPE", "Unigram", "WordLevel", "WordPiece"})
_TEMPLATE_PIECES = 16
_PROBES = ("the engine is warm, and the valve is open. ", "x", "0", "é", "界", "-")


def quick_characters(task: Task | None) -> int:
    """Return the length of requests that are tokenized in the event loop; 0 for none."""
    if not isinstance(task, Embed | Classify) or task.tokenizer.pair_template:
        return 0
    if isinstance(task, Embed) and task.prompts:
        return 0  # a prompt is as long as the model's files say
    tokenizer = task.tokenizer
    return QUICK_CHARACTERS if _is_bounded(tokenizer.backend) and _is_fast(tokenizer) else 0


def _is_bounded(tokenizer: Any) -> bool:
    """Return True if all parts are known to take time in proportion to a short text's length."""
    model = type(tokenizer.model).__name__
    if model not in _MODELS:
        return False
    if model == "WordPiece" and tokenizer.model.max_input_chars_per_word > _MAX_WORD_CHARACTERS:
        return False
    return (
        _are_known(tokenizer.normalizer, "normalizers", _NORMALIZERS)
        and _are_known(tokenizer.pre_tokenizer, "pretokenizers", _PRE_TOKENIZERS)
        and _are_known(tokenizer.post_processor, "processors", _POST_PROCESSORS)
    )


def _are_known(component: Any, parts_name: str, names: frozenset[str]) -> bool:
    """Return True if a component, or each part of a sequence, is one of the known kinds."""
    if component is None:
        return True
    described = orjson.loads(component.__getstate__())
    parts = described[parts_name] if described["type"] == "Sequence" else [described]
    return len(parts) <= _MAX_PARTS and all(
        part["type"] in names or _is_short_template(part) for part in parts
    )


def _is_short_template(part: dict[str, Any]) -> bool:
    """Return True for a template that adds a few special tokens."""
    if part["type"] != "TemplateProcessing":
        return False
    special = part["special_tokens"].values()
    pieces = [*part["single"], *part["pair"], *(i for token in special for i in token["ids"])]
    return len(pieces) <= _TEMPLATE_PIECES


def _is_fast(tokenizer: TextTokenizer) -> bool:
    """Return True if texts of the maximum length take little of the processor's time."""
    texts: Sequence[str] = [(probe * QUICK_CHARACTERS)[:QUICK_CHARACTERS] for probe in _PROBES]
    try:
        return all(_least_seconds(tokenizer, text) <= _MAX_SECONDS for text in texts)
    except InputError:  # requests will report it
        return False


def _least_seconds(tokenizer: TextTokenizer, text: str) -> float:
    """Return the time of this thread in which a text is tokenized, the least of three."""
    seconds = []
    for _ in range(3):
        started = time.thread_time()
        tokenizer.encode([text], offsets=False)
        seconds.append(time.thread_time() - started)
    return min(seconds)

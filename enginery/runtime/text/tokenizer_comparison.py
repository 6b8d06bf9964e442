"""Compare a `TextTokenizer` with the tokenizer that transformers builds from a model's files.

Two `tokenizers` of equal state answer equally to every text, so states are compared first: that
needs no samples. What the state does not hold is compared beside it: settings, the ids of texts
that are truncated, and prompts of chats. Without a state (a tokenizer in Python code, or one that
was built here) only samples are compared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from enginery.core.errors import EngineryError
from enginery.core.model.files import ModelConfig
from enginery.runtime.text.chat_template import ChatTemplate
from enginery.runtime.text.languages import Placement
from enginery.runtime.text.tokenizer import TextTokenizer

TEXTS = (
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
"""Ordinary texts of many languages."""
UNUSUAL = (
    "  Two  spaces,\ta tab and\na new line. ",
    "De\u0301ja\u0300 vu, Vie\u0323\u0302t Nam.",
)
"""Texts for which fast tokenizers of transformers may differ from the slow ones: many spaces, and
letters with separate marks."""
PAIRS = (
    ("Who built the bridge?", "Ada Lovelace built it, in 1843."),
    ("", "Nobody knows."),
    ("Où est la clé ?", ""),
)
CHATS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Is it <warm> & dry?\n"}],
    [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": " Is it warm? "},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Où est la clé ?"},
    ],
)

_COMPONENTS = {
    "normalizer": "do_lower_case, strip_accents, tokenize_chinese_chars",
    "pre_tokenizer": "add_prefix_space",
    "post_processor": "add_bos_token, add_eos_token, trim_offsets",
    "decoder": "add_prefix_space",
    "added_tokens": "added_tokens_decoder and the special tokens",
    "model": "the vocabulary",
}
"""Parts of tokenizer.json -> the settings of other files that change them."""


@dataclass(frozen=True)
class Answer:
    """What a tokenizer of transformers makes of a text or a pair of texts."""

    texts: Sequence[str]
    ids: Sequence[int] = ()
    types: Sequence[int] = ()
    offsets: Sequence[Sequence[int]] = ()
    error: str = ""


@dataclass(frozen=True)
class TokenizerDescription:
    """A tokenizer of transformers."""

    name: str
    """Its class."""
    backend: str
    """tokenizer.json without padding and truncation; empty for a tokenizer in Python code."""
    settings: Mapping[str, Any]
    """By the keys of tokenizer_config.json; token ids in place of tokens."""
    answers: Sequence[Answer]
    chats: Sequence[str] = ()
    """The prompts of `CHATS`; empty where the template rejects one, and without a template."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TokenizerDescription:
        """Read a description from JSON data."""
        answers = [Answer(**answer) for answer in values["answers"]]
        return cls(**{**values, "answers": answers})


@dataclass
class TokenizerDifferences:
    """Where a tokenizer differs from transformers'."""

    state: list[str] = field(default_factory=list)
    """Parts of tokenizer.json."""
    settings: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    unusual: list[str] = field(default_factory=list)
    """Answers to texts of which `UNUSUAL` says that transformers' own tokenizers differ."""
    offsets: list[str] = field(default_factory=list)
    """Texts whose tokens are the same and begin or end elsewhere."""

    @property
    def problem(self) -> str:
        """The first difference with an effect, in words; empty if there is none."""
        return next(iter([*self.settings, *self.answers, *self.unusual, *self.offsets]), "")

    def problem_of_version(self, *, spans: bool) -> str:
        """Return the first difference that counts between two major versions of transformers.

        They make equal tokenizers of unequal state, and count white space before a token
        differently.

        Args:
            spans: the model's answers are spans of the text.
        """
        offsets = self.offsets if spans else []
        return next(iter([*self.settings, *self.answers, *self.unusual, *offsets]), "")


def compare_tokenizer(
    directory: Path, tokenizer: TextTokenizer, expected: TokenizerDescription
) -> TokenizerDifferences:
    """Compare a tokenizer with transformers'.

    Args:
        directory: the directory that it was opened in.
        tokenizer: the tokenizer.
        expected: transformers', whose long texts are truncated to the tokenizer's limit.
    """
    differences = TokenizerDifferences()
    # The tokens of languages are put around texts at run time, not by tokenizer.json's template.
    names_language = tokenizer.load_languages().placement is not Placement.NONE
    if expected.backend and expected.backend != tokenizer.state():
        differences.state = _compare_states(
            tokenizer, json.loads(expected.backend), skipped=("post_processor",) * names_language
        )
    config = ModelConfig.read(directory).merged()
    differences.settings = _compare_settings(tokenizer, expected.settings, config)
    for answer in expected.answers:
        if answer.error or (names_language and len(answer.texts) > 1):
            continue
        if not expected.backend and not _is_comparable(answer, expected):
            continue
        if tokenizer.pair_template and len(answer.texts) > 1:
            continue  # such models join pairs by a chat template
        problem, moved = _compare_answer(
            tokenizer, answer, expected.name, names_language=names_language
        )
        if problem:
            unusual = answer.texts[0] in UNUSUAL
            (differences.unusual if unusual else differences.answers).append(problem)
        if moved:
            differences.offsets.append(moved)
    differences.settings += _compare_chats(directory, expected)
    return differences


def _is_comparable(answer: Answer, expected: TokenizerDescription) -> bool:
    """Return True if a tokenizer in Python code and tokenizer.json have to agree on a text.

    As export tolerates it, they may differ in unknown characters, and in how they join pairs.
    """
    unknown = expected.settings["unk_token"] in answer.ids and len(answer.ids) > 1
    return len(answer.texts) == 1 and answer.texts[0] in TEXTS and not unknown


def _compare_states(
    tokenizer: TextTokenizer, expected: Mapping[str, Any], *, skipped: Sequence[str]
) -> list[str]:
    state = json.loads(tokenizer.state())
    return [
        f"{part} (set by {keys})"
        for part, keys in _COMPONENTS.items()
        if part not in skipped and not equal_parts(state.get(part), expected.get(part))
    ]


def equal_parts(first: Any, second: Any) -> bool:
    """Return True if two parts of tokenizer.json are equal, but for the last digits of scores."""
    if isinstance(first, dict) and first.get("type") == "Unigram" and isinstance(second, dict):
        scores = [dict(part.get("vocab", ())) for part in (first, second)]
        rest = [
            {**part, "vocab": list(tokens)}
            for part, tokens in zip((first, second), scores, strict=True)
        ]
        # Writing and reading a score again moves its last bit.
        return rest[0] == rest[1] and all(
            math.isclose(score, scores[1][token], rel_tol=1e-9)
            for token, score in scores[0].items()
        )
    return bool(first == second)


def _compare_settings(
    tokenizer: TextTokenizer, expected: Mapping[str, Any], config: ModelConfig
) -> list[str]:
    settings = {
        "pad_token": tokenizer.pad_id,
        "unk_token": tokenizer.unk_id,
        "cls_token": tokenizer.cls_id,
        "mask_token": tokenizer.mask_token or None,
        "padding_side": "left" if tokenizer.pad_left else "right",
        "truncation_side": tokenizer.backend.truncation["direction"],
        "pad_token_type_id": tokenizer.pad_type_id,
        "split_special_tokens": tokenizer.backend.encode_special_tokens,
        "clean_up_tokenization_spaces": tokenizer.clean_up,
    }
    problems = [
        f"{key} is {value!r} here and {expected[key]!r} in transformers"
        for key, value in settings.items()
        # Some models find the end of a text by the padding of config.json.
        if value != expected[key] and (key, value) != ("pad_token", config.pad_token_id)
    ]
    longest = expected["model_max_length"]
    if longest and tokenizer.limit > longest:
        problems.append(f"model_max_length is {tokenizer.limit} here and {longest} in transformers")
    return problems


def _compare_answer(
    tokenizer: TextTokenizer, answer: Answer, name: str, *, names_language: bool
) -> tuple[str, str]:
    """Return how the tokens of a text differ, and how their offsets do; empty if they do not."""
    item: Any = answer.texts[0] if len(answer.texts) == 1 else tuple(answer.texts)
    shown = repr(item) if len(repr(item)) < 80 else f"{repr(item)[:80]}…"
    try:
        if names_language:
            encodings = tokenizer.encode_source([item])
            if len(encodings[0].ids) > tokenizer.limit:
                return "", ""  # its caller truncates
        else:
            encodings = [*tokenizer.encode([item]), *tokenizer.encode([item], offsets=False)]
    except EngineryError as error:
        return f"{shown} is refused, but {name} of transformers takes it: {error.message}", ""
    for encoding in encodings:
        if list(encoding.ids) != list(answer.ids):
            return (
                f"{shown} has the token ids {_first(encoding.ids)}, but {_first(answer.ids)} with "
                f"{name} of transformers"
            ), ""
        if answer.types and list(encoding.type_ids) != list(answer.types):
            return f"{shown} has other token types than with {name} of transformers", ""
    offsets = getattr(encodings[0], "offsets", None)
    # The tokens around a text of a language are put there without offsets.
    if names_language or offsets is None or not answer.offsets:
        return "", ""
    if [list(pair) for pair in offsets] != [list(pair) for pair in answer.offsets]:
        return "", f"{shown} has other offsets of its tokens than with {name} of transformers"
    return "", ""


def _first(ids: Sequence[int]) -> str:
    shown = ", ".join(str(token_id) for token_id in list(ids)[:12])
    return f"{shown}{', …' if len(ids) > 12 else ''} ({len(ids)} in all)"


def _compare_chats(directory: Path, expected: TokenizerDescription) -> list[str]:
    """Compare the prompts of chats that transformers' template renders."""
    for chat, prompt in zip(CHATS, expected.chats, strict=False):
        if not prompt:
            continue
        try:
            template = ChatTemplate.open(directory)
            if template is None:
                return ["chat_template: transformers has one, and the artifact has none"]
            rendered = template.render(chat, add_generation_prompt=True)
        except EngineryError as error:
            return [f"chat_template: {error.message}"]
        if rendered != prompt:
            return [f"chat_template gives {rendered!r:.200}, but {prompt!r:.200} in transformers"]
    return []

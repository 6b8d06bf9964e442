"""Describe the tokenizer that transformers builds from all files of a model, and what it answers.

It imports transformers, and runs in the child processes of `export` and `validate`;
`runtime/text/tokenizer_comparison.py` compares the description with a `TextTokenizer`.
"""

from __future__ import annotations

import json
import re
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import transformers

from enginery.core.errors import InputError
from enginery.core.model.files import TOKENIZERS_BACKEND, TokenizerConfig
from enginery.runtime.text.tokenizer_comparison import (
    CHATS,
    PAIRS,
    TEXTS,
    UNUSUAL,
    Answer,
    TokenizerDescription,
)
from enginery.runtime.text.tokenizer_files import failure_reason

_MAX_ADDED = 64
"""Added tokens that stand in sample texts; a model may have thousands."""


def load_tokenizer(directory: Path, **options: Any) -> Any:
    """Load a tokenizer as `AutoTokenizer` does, in version 4 also one of version 5's own class.

    Version 4 has that class as `PreTrainedTokenizerFast`, with other inputs by default.

    Args:
        directory: the model's directory.
        options: further arguments of `from_pretrained`.
    """
    settings = TokenizerConfig.read(directory)
    if settings.tokenizer_class != TOKENIZERS_BACKEND or hasattr(transformers, TOKENIZERS_BACKEND):
        return transformers.AutoTokenizer.from_pretrained(str(directory), **options)
    return transformers.PreTrainedTokenizerFast.from_pretrained(
        str(directory), model_input_names=list(settings.input_names), **options
    )


def load_reference_tokenizer(directory: Path, *, trust_remote_code: bool) -> Any:
    """Load a tokenizer as `AutoTokenizer` does. Call this inside `guarded`.

    Raises:
        ImportError: its class needs a package that is not installed.
        InputError: transformers cannot load it.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tokenizer = load_tokenizer(
                directory, trust_remote_code=trust_remote_code, local_files_only=True
            )
    except ImportError:
        raise
    except BaseException as error:  # bad files can cause any error, and panics
        reason = " ".join(failure_reason(error).split())
        raise InputError(f"transformers cannot load the tokenizer: {reason}") from error
    if not isinstance(tokenizer, transformers.PreTrainedTokenizerBase):
        raise InputError("transformers cannot load the tokenizer: its vocabulary cannot be read")
    return tokenizer


def describe_tokenizer(reference: Any, *, limit: int) -> TokenizerDescription:
    """Describe a tokenizer of transformers: its settings, its state, and answers to samples.

    Args:
        reference: the tokenizer, from `load_reference_tokenizer`.
        limit: the length in tokens at which long texts are truncated.
    """
    added = [str(token) for token in reference.added_tokens_encoder][:_MAX_ADDED]
    around = [f"a {token} b" for token in added] + ([f"The{added[-1]}END é"] if added else [])
    long = "The Engine of Köln runs warm. " * (limit // 4 + 4)
    longest = min(limit, reference.model_max_length)
    texts = [*TEXTS, *UNUSUAL, *around]
    pairs = [*PAIRS, (long, "short"), ("short", long)]
    maximum = reference.model_max_length
    return TokenizerDescription(
        name=type(reference).__name__,
        backend=_state(reference),
        settings={
            "pad_token": reference.pad_token_id,
            "unk_token": reference.unk_token_id,
            "cls_token": reference.cls_token_id,
            "mask_token": reference.mask_token,
            "padding_side": reference.padding_side,
            "truncation_side": reference.truncation_side,
            "pad_token_type_id": reference.pad_token_type_id,
            "split_special_tokens": bool(reference.split_special_tokens),
            "model_max_length": int(maximum) if maximum < 2**31 else 0,
            "clean_up_tokenization_spaces": bool(reference.clean_up_tokenization_spaces),
        },
        answers=[
            *(_answer(reference, text, limit=longest) for text in [*texts, long]),
            *(_answer(reference, *pair, limit=longest) for pair in pairs),
        ],
        chats=_render_chats(reference),
    )


def _state(reference: Any) -> str:
    """Return the tokenizer as tokenizer.json has it, without padding and truncation; or nothing."""
    if not reference.is_fast:
        return ""
    backend = reference.backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    try:
        state: str = backend.to_str()
    except BaseException as error:  # a pre-tokenizer in Python code
        failure_reason(error)
        return ""
    return state


def _answer(reference: Any, *texts: str, limit: int) -> Answer:
    """Return the tokens of a text or a pair, truncated to the limit; an error's message, too."""
    options: dict[str, Any] = {"return_offsets_mapping": True} if reference.is_fast else {}
    try:
        # As a batch: alone, a text beside an empty one is no pair to transformers.
        encoding = reference(
            *([text] for text in texts),
            truncation=True,
            max_length=limit,
            **options,
        )
    except BaseException as error:
        return Answer(texts, error=failure_reason(error))
    return Answer(
        texts,
        ids=list(encoding["input_ids"][0]),
        types=list(encoding.get("token_type_ids", [()])[0]),
        offsets=[list(pair) for pair in encoding.get("offset_mapping", [()])[0]],
    )


def _render_chats(reference: Any) -> list[str]:
    """Return the prompts of sample chats; an empty one where the template rejects the chat."""
    template = reference.chat_template
    # What a template makes of the time differs from one second to the next.
    if not template or "strftime_now" in json.dumps(template):
        return []
    prompts = []
    for chat in CHATS:
        prompt = ""
        with suppress(Exception):
            prompt = reference.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        prompts.append(prompt)
    return prompts


def missing_library(error: ImportError) -> str:
    """Return the name of the package that a tokenizer's class needs."""
    names = re.findall(
        r"install (?:the )?`?([\w-]+)`?", str(error).replace("pip install ", "install ")
    )
    return error.name or (names[0] if names else "a package that is not installed")

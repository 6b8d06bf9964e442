"""Load a model's tokenizer and apply the settings of its config files, as transformers does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from enginery.core.errors import ArtifactError, EngineryError
from enginery.core.model.files import (
    MAX_POSITIONS,
    ModelConfig,
    SentenceBertConfig,
    TokenizerConfig,
)

HIDDEN = " "
"""First character of the tokens in tokenizer.json that texts are not segmented into. No normalized
text contains it. `enginery.export.sentencepiece_tokenizers` writes such tokens."""

LENGTH_LIMIT = "the length_limit of manifest.json, beyond which the graph answers otherwise"
"""Source of a limit that is the graph's own: the model itself takes longer texts."""

_MAX_REASON_CHARACTERS = 300
"""Maximum length of a reason in an error message: a panic may quote the whole text."""

# transformers' classes that take the normalizer's settings from tokenizer_config.json instead of
# tokenizer.json.
_BERT_CLASSES = (
    "Bert",
    "DistilBert",
    "Electra",
    "MPNet",
    "MobileBert",
    "ConvBert",
    "Funnel",
    "LayoutLM",
    "Lxmert",
    "SqueezeBert",
    "RetriBert",
)


def load_tokenizer(directory: Path) -> Any:
    """Load tokenizer.json as a `tokenizers.Tokenizer`, without its padding and truncation.

    Raises:
        ArtifactError: the file is missing or cannot be read.
    """
    import tokenizers

    file = directory / "tokenizer.json"
    if not file.is_file():
        raise ArtifactError(
            f"{directory} has no tokenizer.json, which is needed to tokenize texts.",
            do="If the model has a tokenizer, enginery inspect shows why. "
            "Save one in the model's directory and export again: "
            "AutoTokenizer.from_pretrained(MODEL).save_pretrained(MODEL).",
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
        tokenizer.no_padding()
        tokenizer.no_truncation()
    except BaseException as error:
        reason = failure_reason(error)
        raise ArtifactError(f"{file} cannot be read by tokenizers: {reason}.") from error
    return tokenizer


def is_panic(error: BaseException) -> bool:
    """Return True if `error` is a panic of Rust code.

    PyO3 raises panics as `PanicException`, which derives from BaseException. Every extension module
    has its own class of that name, and none exports it.
    """
    return not isinstance(error, Exception) and type(error).__name__ == "PanicException"


def failure_reason(error: BaseException) -> str:
    """Return the message of an error from `tokenizers`, without a full stop.

    `tokenizers` raises bare `Exception`s, and panics.

    Raises:
        BaseException: `error` itself, if it is an interrupt, an exit or an EngineryError.
    """
    if isinstance(error, EngineryError) or not (isinstance(error, Exception) or is_panic(error)):
        raise error
    reason = str(error).strip().rstrip(".")[:_MAX_REASON_CHARACTERS]
    return reason or type(error).__name__


def apply_settings(tokenizer: Any, settings: TokenizerConfig) -> None:
    """Apply tokenizer_config.json to a tokenizer, in place, as transformers' classes do."""
    from tokenizers import AddedToken, normalizers, pre_tokenizers

    name = settings.tokenizer_class.removesuffix("Fast")
    normalizer, splitter = tokenizer.normalizer, tokenizer.pre_tokenizer
    if name.removesuffix("Tokenizer") in _BERT_CLASSES and isinstance(
        normalizer, normalizers.BertNormalizer
    ):
        tokenizer.normalizer = normalizers.BertNormalizer(
            clean_text=normalizer.clean_text,
            lowercase=settings.do_lower_case,
            strip_accents=settings.strip_accents,
            handle_chinese_chars=settings.tokenize_chinese_chars,
        )
    if isinstance(splitter, pre_tokenizers.ByteLevel) and settings.add_prefix_space is not None:
        splitter.add_prefix_space = settings.add_prefix_space
        tokenizer.pre_tokenizer = splitter
    for _, token in sorted(settings.added_tokens_decoder.items()):
        if tokenizer.token_to_id(token.content) is None:
            flags = token.model_dump(exclude={"content"})
            tokenizer.add_tokens([AddedToken(token.content, **flags)])


def length_limit(
    config: ModelConfig,
    settings: TokenizerConfig,
    sentence: SentenceBertConfig,
    faithful: int | None = None,
) -> tuple[int, str]:
    """Return the smallest of the model's limits on tokens per input, and where it comes from.

    Args:
        config: config.json.
        settings: tokenizer_config.json.
        sentence: sentence_bert_config.json.
        faithful: `length_limit` of manifest.json.
    """
    limits = [
        (sentence.max_seq_length, "max_seq_length of sentence_bert_config.json"),
        (int(settings.model_max_length), "model_max_length of tokenizer_config.json"),
    ]
    if config.positions:
        limits.append((config.position_limit(), "the positions of config.json"))
    # transformers writes 1e30 if a tokenizer has no limit.
    usable = [(n, name) for n, name in limits if 0 < n <= MAX_POSITIONS]
    # Nearly every text encoder is trained with 512 positions.
    limit = min(usable, default=(512, "default, because no file has a limit"))
    if faithful is not None and faithful < limit[0]:
        return faithful, LENGTH_LIMIT
    return limit


def special_token_id(tokenizer: Any, token: str | None) -> int | None:
    """Return the id of a special token; None if the tokenizer does not have it."""
    token_id: int | None = tokenizer.token_to_id(token) if token else None
    return token_id

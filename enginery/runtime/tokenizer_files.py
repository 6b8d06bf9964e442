"""What a model's own files say of its tokenizer, as transformers reads them.

>>> tokenizer = load_tokenizer(artifact.path)
>>> settings = TokenizerConfig.read(artifact.path)
>>> apply_settings(tokenizer, settings)
>>> length_limit(config, settings, sentence)
(256, 'max_seq_length of sentence_bert_config.json')
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from enginery.core.errors import ArtifactError, EngineryError
from enginery.core.model_files import (
    MAX_POSITIONS,
    ModelConfig,
    SentenceBertConfig,
    TokenizerConfig,
)

_MAX_REASON_CHARACTERS = 300
"""Characters of a failure's reason; a panic may quote the whole text."""

# transformers' classes whose normalizer follows tokenizer_config.json, not tokenizer.json.
_BERT_CLASSES = (
    "Bert", "DistilBert", "Electra", "MPNet", "MobileBert", "ConvBert", "Funnel", "LayoutLM",
    "Lxmert", "SqueezeBert", "RetriBert",
)  # fmt: skip


def load_tokenizer(directory: Path) -> Any:
    """`tokenizers.Tokenizer` of tokenizer.json, without the padding and truncation it may hold.

    Raises:
        ArtifactError: there is no such file, or it cannot be read.
    """
    import tokenizers

    file = directory / "tokenizer.json"
    if not file.is_file():
        raise ArtifactError(
            f"{directory} has no tokenizer.json, so texts cannot be tokenized.",
            do="Save one in the model's directory and export again: "
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
    """Tell whether `error` is a panic of Rust code.

    pyo3 raises it as `PanicException`, which is no Exception. Every extension module has its own,
    and none exports it.
    """
    return not isinstance(error, Exception) and type(error).__name__ == "PanicException"


def failure_reason(error: BaseException) -> str:
    """Return the reason of a failure inside `tokenizers`, without a full stop.

    `tokenizers` raises bare `Exception`, and panics.

    Raises:
        BaseException: `error` itself, where it is an interrupt, an exit or an error of ours.
    """
    if isinstance(error, EngineryError) or not (isinstance(error, Exception) or is_panic(error)):
        raise error
    reason = str(error).strip().rstrip(".")[:_MAX_REASON_CHARACTERS]
    return reason or type(error).__name__


def apply_settings(tokenizer: Any, settings: TokenizerConfig) -> None:
    """Change a tokenizer as transformers' classes do after reading tokenizer.json."""
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
    config: ModelConfig, settings: TokenizerConfig, sentence: SentenceBertConfig
) -> tuple[int, str]:
    """Return the fewest tokens that a file allows an input, and which file it is.

    Args:
        config: config.json.
        settings: tokenizer_config.json.
        sentence: sentence_bert_config.json.
    """
    limits = [
        (sentence.max_seq_length, "max_seq_length of sentence_bert_config.json"),
        (int(settings.model_max_length), "model_max_length of tokenizer_config.json"),
    ]
    if config.positions:
        limits.append((config.position_limit(), "the positions of config.json"))
    # transformers writes 1e30 where a tokenizer has no limit.
    known = [(n, name) for n, name in limits if 0 < n <= MAX_POSITIONS]
    # 512 is what nearly every text encoder is trained with.
    return min(known, default=(512, "no file, so 512"))


def special_token_id(tokenizer: Any, token: str | None) -> int | None:
    """Return the id of a special token; None where there is none."""
    found: int | None = tokenizer.token_to_id(token) if token else None
    return found

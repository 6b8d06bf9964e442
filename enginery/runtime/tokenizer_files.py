"""What a model's own files say of its tokenizer, as transformers reads them.

>>> tokenizer = load_tokenizer(artifact.path)
>>> follow_settings(tokenizer, read_json(artifact.path / "tokenizer_config.json"))
>>> length_limit(config, settings, sentence)
(256, 'max_seq_length of sentence_bert_config.json')
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from enginery.core.errors import ArtifactError, EngineryError
from enginery.core.feeds import position_limit

_NO_LIMIT = 10**20
"""transformers writes 1e30 where a tokenizer has no limit."""
_LONGEST_REASON = 300
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
        reason = tokenizer_failure(error)
        raise ArtifactError(f"{file} cannot be read by tokenizers: {reason}.") from error
    return tokenizer


def is_panic(error: BaseException) -> bool:
    """Tell whether `error` is a panic of Rust code.

    pyo3 raises it as `PanicException`, which is no Exception. Every extension module has its own,
    and none exports it.
    """
    return not isinstance(error, Exception) and type(error).__name__ == "PanicException"


def tokenizer_failure(error: BaseException) -> str:
    """Return the reason of a failure inside `tokenizers`, without a full stop.

    `tokenizers` raises bare `Exception`, and panics.

    Raises:
        BaseException: `error` itself, where it is an interrupt, an exit or an error of ours.
    """
    if isinstance(error, EngineryError) or not (isinstance(error, Exception) or is_panic(error)):
        raise error
    reason = str(error).strip().rstrip(".")[:_LONGEST_REASON]
    return reason or type(error).__name__


def follow_settings(tokenizer: Any, settings: dict[str, Any]) -> None:
    """What transformers' classes change in a tokenizer after reading tokenizer.json."""
    from tokenizers import AddedToken, normalizers, pre_tokenizers

    name = str(settings.get("tokenizer_class") or "").removesuffix("Fast")
    normalizer, splitter = tokenizer.normalizer, tokenizer.pre_tokenizer
    if name.removesuffix("Tokenizer") in _BERT_CLASSES and isinstance(
        normalizer, normalizers.BertNormalizer
    ):
        tokenizer.normalizer = normalizers.BertNormalizer(
            clean_text=normalizer.clean_text,
            lowercase=settings.get("do_lower_case", True),
            strip_accents=settings.get("strip_accents"),
            handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
        )
    if isinstance(splitter, pre_tokenizers.ByteLevel) and "add_prefix_space" in settings:
        splitter.add_prefix_space = bool(settings["add_prefix_space"])
        tokenizer.pre_tokenizer = splitter
    added = settings.get("added_tokens_decoder") or {}
    for _, token in sorted(added.items(), key=lambda item: int(item[0])):
        if tokenizer.token_to_id(token["content"]) is None:
            flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
            tokenizer.add_tokens(
                [AddedToken(token["content"], **{f: bool(token.get(f)) for f in flags})]
            )


def length_limit(
    config: dict[str, Any], settings: dict[str, Any], sentence: dict[str, Any]
) -> tuple[int, str]:
    """The fewest tokens that a file allows an input, and which it is.

    Args:
        config: config.json.
        settings: tokenizer_config.json.
        sentence: sentence_bert_config.json.
    """
    limits = [
        (sentence.get("max_seq_length"), "max_seq_length of sentence_bert_config.json"),
        (settings.get("model_max_length"), "model_max_length of tokenizer_config.json"),
    ]
    if config.get("max_position_embeddings") or config.get("n_positions"):
        limits.append((position_limit(config), "the positions of config.json"))
    known = [(int(n), name) for n, name in limits if n and 0 < n < _NO_LIMIT]
    # 512 is what nearly every text encoder is trained with.
    return min(known, default=(512, "no file, so 512"))


def special_token(special: dict[str, Any], role: str) -> str:
    """The text of `pad_token` and the like; empty where there is none."""
    found = special.get(role)
    return str((found.get("content") if isinstance(found, dict) else found) or "")


def special_id(tokenizer: Any, special: dict[str, Any], role: str) -> int | None:
    """The id of `pad_token` and the like."""
    token = special_token(special, role)
    found: int | None = tokenizer.token_to_id(token) if token else None
    return found

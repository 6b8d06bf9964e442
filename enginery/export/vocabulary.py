"""Compare the tokens of a tokenizer with those that the model has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from enginery.core.errors import ExportError
from enginery.core.model.files import SpecialTokens
from enginery.runtime.pytorch.config import load_config
from enginery.runtime.pytorch.tokenizer import load_tokenizer
from enginery.runtime.text.tokenizer import TextTokenizer

_REMEDY = (
    "Resize the table and save the model again: model.resize_token_embeddings(len(tokenizer)). Its "
    "new rows are random numbers until they are trained."
)


def embedding_rows(model: Any) -> int:
    """Return the number of tokens of a model that takes texts; 0 for other models."""
    if getattr(model, "main_input_name", "") != "input_ids":
        return 0
    try:
        return int(model.get_input_embeddings().weight.shape[0])
    except (AttributeError, NotImplementedError):  # such as CANINE, which hashes characters
        return 0


def check_vocabulary(directory: Path, rows: int) -> list[str]:
    """Return a note on tokens without a row of the embedding table.

    Such a token in a text is an error in PyTorch and in ONNX Runtime.

    Args:
        directory: the staging directory, with its tokenizer.
        rows: number of rows of the embedding table; 0 if the model has none.

    Raises:
        ExportError: it is a token that the tokenizer itself adds to texts or pads them with.
        ArtifactError: a file of the tokenizer cannot be read.
    """
    if not rows or not (directory / "tokenizer.json").is_file():
        return []
    tokenizer = TextTokenizer.open(directory)
    vocabulary = tokenizer.backend.get_vocab(with_added_tokens=True)
    beyond = sorted((token_id, token) for token, token_id in vocabulary.items() if token_id >= rows)
    if not beyond:
        return []
    listed = ", ".join(f"{token!r} ({token_id})" for token_id, token in beyond[:4])
    problem = (
        f"the tokenizer has {len(beyond)} token{'s' if len(beyond) > 1 else ''} beyond the model's "
        f"embedding table of {rows} rows: {listed}{', …' if len(beyond) > 4 else ''}"
    )
    names = {token for _, token in beyond}
    roles = [r for r in SpecialTokens.model_fields if getattr(tokenizer.special, r) in names]
    if roles:
        raise ExportError(f"{problem}. One is the {roles[0]}.", do=_REMEDY)
    return [f"{problem}; a text with such a token is an error"]


def require_padding_token(model: Any, source: Path, *, trust_remote_code: bool) -> None:
    """Raise ExportError if a classifier has no padding token, or its texts end with it.

    Without a `pad_token_id` in config.json, transformers reads the last token of a text alone, and
    the classifier of a graph the last one that is not the tokenizer's padding token.
    """
    if getattr(model.config, "pad_token_id", None) is None:
        raise ExportError(
            f"a text classifier needs a padding token, but neither config.json nor the tokenizer "
            f"of {source} has one.",
            do="Set pad_token_id in config.json.",
        )
    loaded = load_config(source, trust_remote_code=trust_remote_code)
    if getattr(loaded.config, "pad_token_id", None) is not None:
        return
    tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code, local_files_only=True)
    if tokenizer.pad_token_id in tokenizer("a").input_ids[-1:]:
        raise ExportError(
            f"config.json of a text classifier has no pad_token_id, and the tokenizer of {source} "
            f"ends each text with its padding token {tokenizer.pad_token}: in a batch, the "
            "classifier would read another token than alone.",
            do="Set pad_token_id in config.json to a token that no text ends with.",
        )

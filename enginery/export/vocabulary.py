"""Find tokens of the tokenizer that the model's embedding table does not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from enginery.core.errors import ExportError
from enginery.core.model.files import SpecialTokens
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

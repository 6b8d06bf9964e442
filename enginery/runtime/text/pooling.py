"""Pool token vectors into one vector per text, as sentence-transformers does.

    pooling = read_pooling(artifact.path)           # reads modules.json and the folders it lists
    vectors = pooling(tokens, attention_mask)       # float32 (batch, dim)

The formulas are those of sentence-transformers (`models/Pooling.py`, `models/Normalize.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.errors import ArtifactError
from enginery.core.model.files import PoolingConfig, read_modules

Vectors = NDArray[np.float32]

# In the order in which sentence-transformers concatenates the pooled vectors.
_MODES = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
TINY_COUNT = 1e-9
"""Lower bound of the number of tokens in sentence-transformers' divisions."""
TINY_NORM = 1e-12
"""Lower bound of a vector's length in torch.nn.functional.normalize."""


@dataclass(frozen=True)
class Pooling:
    """The pooling of one model."""

    modes: tuple[str, ...]
    """Pooling modes, whose vectors are concatenated."""
    normalize: bool
    """Scale vectors to length 1."""
    include_prompt: bool
    """Include the tokens of a prompt."""
    note: str
    """The file that the pooling comes from, for users."""

    def __call__(
        self, tokens: NDArray[Any], mask: NDArray[Any], *, prompt: int | Sequence[int] = 0
    ) -> Vectors:
        """Pool one batch and normalize the vectors if the model does.

        Args:
            tokens: (batch, sequence, dim).
            mask: (batch, sequence), 1 for tokens and 0 for padding.
            prompt: number of leading tokens that belong to a prompt; one number for all texts, or
                one per text.

        Returns:
            float32 (batch, dim * len(modes)).
        """
        vectors = self.pool(tokens, mask, prompt=prompt)
        if not self.normalize:
            return vectors
        # In float64, because squares of numbers above 1e19 overflow float32.
        wide = vectors.astype(np.float64)
        norms = np.linalg.norm(wide, axis=1, keepdims=True)
        with np.errstate(invalid="ignore"):  # infinity becomes NaN
            return np.asarray(wide / np.maximum(norms, TINY_NORM), dtype=np.float32)

    def pool(
        self, tokens: NDArray[Any], mask: NDArray[Any], *, prompt: int | Sequence[int] = 0
    ) -> Vectors:
        """Pool one batch without normalizing; see `__call__`."""
        tokens = tokens.astype(np.float32, copy=False)
        # Count real tokens only: with padding on the left, a text does not start at position 0.
        positions = np.cumsum(mask != 0, axis=1)
        if not self.include_prompt:
            first = np.asarray(prompt or 0).reshape(-1, 1)
            mask = mask * (positions > first)
        pooled = [_pool(mode, tokens, mask, positions) for mode in self.modes]
        return pooled[0] if len(pooled) == 1 else np.concatenate(pooled, axis=1)


def read_pooling(directory: Path) -> Pooling:
    """Read the pooling of a model from its directory.

    Raises:
        ArtifactError: modules.json has an unsupported module, or a file is missing or malformed.
    """
    # The choice of sentence-transformers for a directory that it has not written.
    if not (directory / "modules.json").is_file():
        return Pooling(
            modes=("mean",),
            normalize=False,
            include_prompt=True,
            note="no modules.json: the mean of the token vectors, not normalized, as "
            "sentence-transformers does for a plain transformer",
        )
    pooling: Pooling | None = None
    normalize = False
    for module in read_modules(directory):
        kind = module.kind
        if kind == "Pooling":
            pooling = _read_pooling_config(directory / module.path)
        elif kind == "Normalize":
            normalize = True
        elif kind not in ("Transformer", "Dropout"):  # dropout does nothing outside training
            raise ArtifactError(
                f"{directory / 'modules.json'} has the module {kind or '(no type)'}, which is not "
                "supported; supported: Transformer, Pooling, Normalize and Dropout.",
                do="Run the graph with OrtRunner, and apply the module to its outputs.",
            )
    if pooling is None:
        raise ArtifactError(
            f"{directory / 'modules.json'} has no Pooling module, which is needed to embed texts."
        )
    return Pooling(pooling.modes, normalize, pooling.include_prompt, pooling.note)


def _read_pooling_config(directory: Path) -> Pooling:
    file = directory / PoolingConfig.FILE
    if not file.is_file():
        raise ArtifactError(
            f"{file} is missing, which specifies the pooling.", do="Export the model again."
        )
    config = PoolingConfig.read(directory)
    # Old files have a switch for each mode, new ones a name.
    modes = tuple(
        mode for mode, key in _MODES.items() if getattr(config, key) or mode in config.pooling_mode
    )
    unknown = [
        *config.unknown_modes(),
        *(mode for mode in config.pooling_mode if mode not in _MODES),
    ]
    if unknown or not modes:
        raise ArtifactError(
            f"{file}: {f'unknown pooling {unknown[0]!r}' if unknown else 'no pooling is chosen'}; "
            f"supported: {', '.join(_MODES)}."
        )
    return Pooling(
        modes=modes,
        normalize=False,
        include_prompt=config.include_prompt,
        note=f"pooling from {directory.name}/config.json: {', '.join(modes)}",
    )


def _pool(mode: str, tokens: Vectors, mask: NDArray[Any], positions: NDArray[Any]) -> Vectors:
    """Pool token vectors.

    Args:
        mode: the pooling mode.
        tokens: (batch, sequence, dim).
        mask: (batch, sequence), 1 for the tokens that count.
        positions: (batch, sequence), the position of each token in its text, from 1.
    """
    weights = mask.astype(np.float32)
    if mode == "cls":
        # The first 1 of the mask is the first real token, also with padding on the left.
        return _at(tokens, np.argmax(mask, axis=1))
    if mode == "lasttoken":
        width = mask.shape[1]
        last = width - 1 - np.argmax(mask[:, ::-1], axis=1)
        # Multiplied with the mask as in sentence-transformers: a text without tokens gives zeros.
        return _at(tokens * weights[:, :, None], last)
    if mode == "max":
        # -1e9 for padding, as in sentence-transformers, and not infinity.
        return np.asarray(np.where(weights[:, :, None] > 0, tokens, np.float32(-1e9)).max(axis=1))
    if mode == "weightedmean":
        # Weights are 1, 2, 3, … by position, as in sentence-transformers for a text alone. It
        # counts padding on the left, too, so that its vectors depend on the batch.
        weights = weights * positions.astype(np.float32)
    # A matrix product needs no second array of the size of `tokens`.
    total = np.matmul(weights[:, None, :], tokens)[:, 0]
    count = np.maximum(weights.sum(axis=1, keepdims=True), TINY_COUNT)
    return np.asarray(total / (np.sqrt(count) if mode == "mean_sqrt_len_tokens" else count))


def _at(tokens: Vectors, positions: NDArray[Any]) -> Vectors:
    """Return the token vector at one position of each row: (batch, dim)."""
    return np.asarray(tokens[np.arange(len(tokens)), positions])

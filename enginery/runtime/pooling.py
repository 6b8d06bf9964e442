"""Token vectors to one vector a text, as the model's sentence-transformers modules say.

Takes `modules.json` and the folders that it names; leaves float32 (batch, dim).

    >>> pooling = read_pooling(artifact.path)
    >>> pooling.modes, pooling.normalize
    (('mean',), True)

Formulas and their order are sentence-transformers' (`models/Pooling.py`, `models/Normalize.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.errors import ArtifactError
from enginery.core.model_files import PoolingConfig, read_modules

Vectors = NDArray[np.float32]

# In the order in which sentence-transformers concatenates them.
_MODES = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
_TINY = 1e-9
"""sentence-transformers' floor under the number of tokens."""


@dataclass(frozen=True)
class Pooling:
    """How token vectors become one vector."""

    modes: tuple[str, ...]
    normalize: bool
    include_prompt: bool
    """Whether the tokens of a prompt take part."""
    note: str
    """Where this comes from."""

    def __call__(
        self, tokens: NDArray[Any], mask: NDArray[Any], *, prompt: int | Sequence[int] = 0
    ) -> Vectors:
        """Pool one batch.

        Args:
            tokens: (batch, sequence, dim).
            mask: (batch, sequence), 1 for tokens and 0 for padding.
            prompt: tokens at the start of each text that belong to its prompt; a sequence where
                the texts have different ones.

        Returns:
            float32 (batch, dim * len(modes)).
        """
        vectors = self.pool(tokens, mask, prompt=prompt)
        if not self.normalize:
            return vectors
        # In float64: squares of 1e20 are beyond float32.
        wide = vectors.astype(np.float64)
        norms = np.linalg.norm(wide, axis=1, keepdims=True)
        with np.errstate(invalid="ignore"):  # infinity is answered with NaN
            # torch.nn.functional.normalize has this floor.
            return np.asarray(wide / np.maximum(norms, 1e-12), dtype=np.float32)

    def pool(
        self, tokens: NDArray[Any], mask: NDArray[Any], *, prompt: int | Sequence[int] = 0
    ) -> Vectors:
        """As calling it, before the vectors are made of length 1."""
        tokens = tokens.astype(np.float32, copy=False)
        if not self.include_prompt:
            # Counted over real tokens: with padding on the left a row does not start at 0.
            first = np.asarray(prompt or 0).reshape(-1, 1)
            mask = mask * (np.cumsum(mask, axis=1) > first)
        pooled = [_pool(mode, tokens, mask) for mode in self.modes]
        return pooled[0] if len(pooled) == 1 else np.concatenate(pooled, axis=1)


def read_pooling(directory: Path) -> Pooling:
    """The pooling of a model's directory.

    Raises:
        ArtifactError: a module is one that is not run here, or a file of it is missing or
            malformed.
    """
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
                f"{directory / 'modules.json'} has a module {kind or '(no type)'}, which is not "
                "part of the exported graph and not run here; known are Transformer, Pooling, "
                "Normalize and Dropout.",
                do="Run the graph yourself with OrtRunner, and the module after it.",
            )
    if pooling is None:
        raise ArtifactError(
            f"{directory / 'modules.json'} has no Pooling module, so no vector can be made."
        )
    return Pooling(pooling.modes, normalize, pooling.include_prompt, pooling.note)


def _read_pooling_config(directory: Path) -> Pooling:
    file = directory / PoolingConfig.FILE
    if not file.is_file():
        raise ArtifactError(
            f"{file} is missing, so the pooling is not known.", do="Export the model again."
        )
    config = PoolingConfig.read(directory)
    modes = tuple(
        mode for mode, key in _MODES.items() if getattr(config, key) or mode in config.pooling_mode
    )
    unknown = [
        *config.unknown_modes(), *(mode for mode in config.pooling_mode if mode not in _MODES),
    ]  # fmt: skip
    if unknown or not modes:
        raise ArtifactError(
            f"{file}: {f'unknown pooling {unknown[0]!r}' if unknown else 'no pooling is chosen'}; "
            f"known are {', '.join(_MODES)}."
        )
    return Pooling(
        modes=modes,
        normalize=False,
        include_prompt=config.include_prompt,
        note=f"pooling from {directory.name}/config.json: {', '.join(modes)}",
    )


def _pool(mode: str, tokens: Vectors, mask: NDArray[Any]) -> Vectors:
    weights = mask.astype(np.float32)
    if mode == "cls":
        return _at(tokens, np.argmax(mask, axis=1))
    if mode == "lasttoken":
        width = mask.shape[1]
        last = width - 1 - np.argmax(mask[:, ::-1], axis=1)
        return _at(tokens * weights[:, :, None], last)
    if mode == "max":
        return np.asarray(np.where(weights[:, :, None] > 0, tokens, np.float32(-1e9)).max(axis=1))
    if mode == "weightedmean":
        positions = np.arange(1, mask.shape[1] + 1, dtype=np.float32)
        weights = weights * positions[None, :]
    # As a product, which makes no second array of the tokens' size.
    total = np.matmul(weights[:, None, :], tokens)[:, 0]
    count = np.maximum(weights.sum(axis=1, keepdims=True), _TINY)
    return np.asarray(total / (np.sqrt(count) if mode == "mean_sqrt_len_tokens" else count))


def _at(tokens: Vectors, positions: NDArray[Any]) -> Vectors:
    """The token at one position of each row."""
    return np.asarray(tokens[np.arange(len(tokens)), positions])

"""Pool the logits of a masked language model into one sparse vector, as SPLADE models do.

    pooling = read_splade_pooling(artifact.path)
    indices, values = pooling(logits)     # of one text: (tokens, vocabulary)

The formula is that of sentence-transformers' `SpladePooling`: log(1 + relu(logits)), and the
maximum over the tokens of the text (arXiv:2109.10086), or their sum (arXiv:2107.05720).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.errors import ArtifactError
from enginery.core.model.files import SpladePoolingConfig, read_modules

_STRATEGIES = ("max", "sum")
_ACTIVATIONS = ("relu", "log1p_relu")


@dataclass(frozen=True)
class SpladePooling:
    """How the weights of a text's tokens become one vector."""

    strategy: str = "max"
    """`max` or `sum` over the tokens."""
    activation: str = "relu"
    """`log1p_relu` takes the logarithm once more."""

    def __call__(self, logits: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the weights above 0 of one text, by the index of their token in the vocabulary.

        Args:
            logits: (tokens, vocabulary), without padding.

        Returns:
            The indices, ascending, and the weights. A NaN stays, so that callers can see it.
        """
        wide = logits.astype(np.float32, copy=False)
        # The maximum comes first: the functions after it rise with their argument.
        pooled = wide.max(axis=0) if self.strategy == "max" else wide
        weights = np.log1p(np.maximum(pooled, np.float32(0)))
        if self.activation == "log1p_relu":
            weights = np.log1p(weights)
        if self.strategy == "sum":
            weights = weights.sum(axis=0)
        indices = np.flatnonzero(weights)
        return indices.astype(np.int64), weights[indices]


def read_splade_pooling(directory: Path) -> SpladePooling | None:
    """Read the SpladePooling module of a model; without modules.json, the maximum and relu.

    Returns:
        None if modules.json has no such module.

    Raises:
        ArtifactError: a file is malformed, or has a setting that is not supported.
    """
    if not (directory / "modules.json").is_file():
        return SpladePooling()
    modules = read_modules(directory)
    paths = [module.path for module in modules if module.kind == "SpladePooling"]
    if not paths:
        return None
    config = SpladePoolingConfig.read(directory / paths[0])
    for name, value, known in (
        ("pooling_strategy", config.pooling_strategy, _STRATEGIES),
        ("activation_function", config.activation_function, _ACTIVATIONS),
    ):
        if value not in known:
            raise ArtifactError(
                f"{directory / paths[0] / config.FILE}: {name} is {value!r}, expected "
                f"{' or '.join(known)}."
            )
    return SpladePooling(config.pooling_strategy, config.activation_function)

"""Pool token vectors into one vector per text, as sentence-transformers does.

    pooling = read_pooling(artifact.path)           # reads modules.json and the folders it lists
    vectors = pooling(tokens, attention_mask)       # float32 (batch, dim)

The formulas are those of sentence-transformers (`models/Pooling.py`, `models/Dense.py`,
`models/LayerNorm.py`, `models/Normalize.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.errors import ArtifactError, EngineryError
from enginery.core.model.files import (
    DenseConfig,
    LayerNormConfig,
    ModelConfig,
    PoolingConfig,
    read_modules,
)
from enginery.core.model.tensor_file import read_tensors
from enginery.core.model.weights import MODULE_WEIGHTS

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
NORM_EPSILON = 1e-5
"""Of torch.nn.LayerNorm, by default."""
TINY_NORM = 1e-12
"""Lower bound of a vector's length in torch.nn.functional.normalize."""


def _sigmoid(x: Vectors) -> NDArray[Any]:
    return (1 + np.tanh(x / 2)) / 2  # exp(-x) overflows


_erf = np.vectorize(math.erf, otypes=[np.float64])
_ACTIVATIONS: dict[str, Callable[[Vectors], Vectors]] = {
    "Identity": lambda x: x,
    "Tanh": np.tanh,
    "ReLU": lambda x: np.maximum(x, np.float32(0)),
    "Sigmoid": lambda x: np.asarray(_sigmoid(x), np.float32),
    "SiLU": lambda x: np.asarray(x * _sigmoid(x), np.float32),
    "GELU": lambda x: np.asarray(x / 2 * (1 + _erf(x / math.sqrt(2))), np.float32),
}
"""Activations of Dense modules, by the name of PyTorch's class."""


@dataclass(frozen=True, eq=False)
class Layer:
    """A module of sentence-transformers after the pooling: Dense, LayerNorm or Normalize."""

    kind: str
    weight: Vectors | None = None
    """Of Dense (out, in), of LayerNorm (dim,)."""
    bias: Vectors | None = None
    activation: str = "Identity"

    def __call__(self, vectors: Vectors) -> Vectors:
        """Apply the module to float32 (batch, dim)."""
        if self.weight is None:
            return _unit(vectors)
        if self.kind == "LayerNorm":
            centred = vectors - vectors.mean(axis=1, keepdims=True)
            variance = np.mean(centred * centred, axis=1, keepdims=True)
            vectors = centred / np.sqrt(variance + NORM_EPSILON) * self.weight
        else:
            vectors = vectors @ self.weight.T
        if self.bias is not None:
            vectors = vectors + self.bias
        return np.asarray(_ACTIVATIONS[self.activation](vectors), np.float32)


@dataclass(frozen=True)
class Pooling:
    """The pooling of one model, with the modules after it."""

    modes: tuple[str, ...]
    """Pooling modes, whose vectors are concatenated."""
    normalize: bool
    """Scale vectors to length 1."""
    include_prompt: bool
    """Include the tokens of a prompt."""
    note: str
    """The file that the pooling comes from, for users."""
    layers: tuple[Layer, ...] = ()
    """The modules between the pooling and the last Normalize."""

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
            float32 (batch, size), see `size`.
        """
        vectors = self.pool(tokens, mask, prompt=prompt)
        return _unit(vectors) if self.normalize else vectors

    def size(self, dim: int) -> int:
        """Return the size of a vector that is made of token vectors of size `dim`."""
        sizes = [len(layer.weight) for layer in self.layers if layer.weight is not None]
        return sizes[-1] if sizes else dim * len(self.modes)

    def pool(
        self, tokens: NDArray[Any], mask: NDArray[Any], *, prompt: int | Sequence[int] = 0
    ) -> Vectors:
        """Pool one batch and apply the layers, without normalizing; see `__call__`."""
        tokens = tokens.astype(np.float32, copy=False)
        counted = mask
        if not self.include_prompt and np.any(prompt):
            counted = mask * (_positions(mask) > np.asarray(prompt).reshape(-1, 1))
        pooled = [_pool(mode, tokens, counted, mask) for mode in self.modes]
        vectors = pooled[0] if len(pooled) == 1 else np.concatenate(pooled, axis=1)
        for layer in self.layers:
            vectors = layer(vectors)
        return vectors


def read_pooling(directory: Path) -> Pooling:
    """Read the pooling of a model from its directory.

    Raises:
        ArtifactError: modules.json has an unsupported module, or a file is missing or malformed.
    """
    # The choice of sentence-transformers for a directory that it has not written.
    if not (directory / "modules.json").is_file():
        is_decoder = ModelConfig.read(directory).names_causal_decoder
        vector = "the last token's vector" if is_decoder else "the mean of the token vectors"
        return Pooling(
            modes=("lasttoken" if is_decoder else "mean",),
            normalize=False,
            include_prompt=True,
            note=f"no modules.json: {vector}, not normalized, as sentence-transformers does for a "
            "plain transformer",
        )
    pooling: Pooling | None = None
    layers: list[Layer] = []
    supported = ("Transformer", "Pooling", "Dense", "LayerNorm", "Normalize", "Dropout")
    for module in read_modules(directory):
        kind, folder = module.kind, directory / module.path
        if kind == "Pooling" and pooling is None:
            pooling = _read_pooling_config(folder)
        elif kind in ("Dense", "LayerNorm", "Normalize") and pooling is not None:
            layers.append(_read_layer(kind, folder))
        # Dropout does nothing outside training.
        elif kind not in ("Transformer", "Dropout") or (kind == "Transformer" and pooling):
            order = " without a Pooling before it" if pooling is None else " after its Pooling"
            raise ArtifactError(
                f"{directory / 'modules.json'} has the module {kind or '(no type)'}"
                f"{order if kind in supported else ''}, which is not supported; supported, in "
                f"this order: {', '.join(supported)}.",
                do="Run the graph with OrtRunner, and apply the module to its outputs.",
            )
    if pooling is None:
        raise ArtifactError(
            f"{directory / 'modules.json'} has no Pooling module, which is needed to embed texts."
        )
    normalize = bool(layers) and layers[-1].kind == "Normalize"
    between = tuple(layers[:-1] if normalize else layers)
    note = pooling.note + "".join(f", {layer.kind}" for layer in between)
    return replace(pooling, normalize=normalize, note=note, layers=between)


def _read_layer(kind: str, directory: Path) -> Layer:
    """Read a module after the pooling.

    Raises:
        ArtifactError: a file is missing or damaged, or a setting is not supported.
    """
    if kind == "Normalize":
        return Layer(kind)
    file = directory / MODULE_WEIGHTS[0]
    tensors = read_tensors(file)
    prefix = "linear" if kind == "Dense" else "norm"
    weight, bias = tensors.get(f"{prefix}.weight"), tensors.get(f"{prefix}.bias")
    activation = "Identity"
    if kind == "Dense":
        dense = DenseConfig.read(directory)
        activation = dense.activation
        require_dense(directory / DenseConfig.FILE, dense)
        shape: tuple[int, ...] = (dense.out_features, dense.in_features)
        has_bias = dense.bias
    else:
        shape, has_bias = (LayerNormConfig.read(directory).dimension,), True
    if weight is None or weight.shape != shape or (bias is not None) != has_bias:
        shapes = ", ".join(f"{name} {tensor.shape}" for name, tensor in tensors.items())
        raise ArtifactError(
            f"{file} has {shapes or 'no tensors'}; expected {prefix}.weight {shape}"
            f"{f' and {prefix}.bias' if has_bias else ' alone'}, as config.json beside it says.",
            do="Export the model again.",
        )
    return Layer(kind, weight, bias, activation)


def require_dense(
    file: Path, config: DenseConfig, *, error: type[EngineryError] = ArtifactError
) -> None:
    """Raise `error` for a setting of a Dense module that is not supported."""
    problem = ""
    if config.activation not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        problem = f"activation_function {config.activation_function!r}, expected one of {known}"
    elif config.module_input_name != "sentence_embedding":
        problem = f"module_input_name {config.module_input_name!r}, expected 'sentence_embedding'"
    elif config.module_output_name != "sentence_embedding":
        problem = f"module_output_name {config.module_output_name!r}, expected 'sentence_embedding'"
    elif config.use_residual:
        problem = "use_residual, which is not supported"
    if problem:
        raise error(f"{file} has {problem}.")


def _read_pooling_config(directory: Path) -> Pooling:
    file = directory / PoolingConfig.FILE
    if not file.is_file():
        raise ArtifactError(
            f"{file} is missing, which specifies the pooling.", do="Export the model again."
        )
    config = PoolingConfig.read(directory)
    # New files name the modes in their order, old ones have a switch for each.
    modes = config.pooling_mode or tuple(
        mode for mode, key in _MODES.items() if getattr(config, key)
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


def _unit(vectors: Vectors) -> Vectors:
    """Return vectors of length 1, as torch.nn.functional.normalize makes them."""
    # In float64, because squares of numbers above 1e19 overflow float32.
    wide = vectors.astype(np.float64)
    norms = np.linalg.norm(wide, axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):  # infinity becomes NaN
        return np.asarray(wide / np.maximum(norms, TINY_NORM), dtype=np.float32)


def _positions(mask: NDArray[Any]) -> NDArray[Any]:
    """Return the position of each token in its text, from 1; padding may be on the left."""
    return np.cumsum(mask != 0, axis=1)


def _pool(mode: str, tokens: Vectors, counted: NDArray[Any], mask: NDArray[Any]) -> Vectors:
    """Pool token vectors.

    Args:
        mode: the pooling mode.
        tokens: (batch, sequence, dim).
        counted: (batch, sequence), 1 for the tokens that count.
        mask: (batch, sequence), 1 for tokens, those of a prompt too.
    """
    if mode == "cls":
        # The first 1 of the mask is the first real token, also with padding on the left.
        return _at(tokens, np.argmax(counted, axis=1))
    weights = counted.astype(np.float32)
    if mode == "lasttoken":
        width = counted.shape[1]
        last = width - 1 - np.argmax(counted[:, ::-1], axis=1)
        # Multiplied with the mask as in sentence-transformers: a text without tokens gives zeros.
        return _at(tokens, last) * _at(weights, last)[:, None]
    if mode == "max":
        # A number, so that a text without tokens has a vector that JSON can hold.
        return np.asarray(np.where(weights[:, :, None] > 0, tokens, np.float32(-1e9)).max(axis=1))
    if mode == "weightedmean":
        # Weights are 1, 2, 3, … by position in the text.
        weights = weights * _positions(mask).astype(np.float32)
    # A matrix product needs no second array of the size of `tokens`.
    total = np.matmul(weights[:, None, :], tokens)[:, 0]
    count = np.maximum(weights.sum(axis=1, keepdims=True), TINY_COUNT)
    return np.asarray(total / (np.sqrt(count) if mode == "mean_sqrt_len_tokens" else count))


def _at(tokens: Vectors, positions: NDArray[Any]) -> Vectors:
    """Return what one position of each row has: (batch, dim), or (batch,)."""
    return np.asarray(tokens[np.arange(len(tokens)), positions])

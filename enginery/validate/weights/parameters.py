"""The reference's weights, found by name, by a module's path, or by content.

    parameters = Parameters(reference)
    parameters.named("embeddings.word_embeddings.weight")    # as exporters keep names
    parameters.of_module("encoder.layer.0.output.dense", "bias")
    parameters.read("encoder.layer.0.output.dense.bias")     # all elements

They are a PyTorch model's parameters and buffers, or an .onnx file's weights. All are described at
once; their elements are read one weight at a time, from the confined process in which PyTorch runs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from enginery.runtime.pytorch.reference import TorchWeight, TorchWeights, sample_positions

Array = NDArray[Any]

_CALL_NUMBER = re.compile(r"_\d+$")
"""The exporter's suffix of the second and later calls of one module."""


@dataclass(frozen=True)
class BatchNorm:
    """What a batch normalization in evaluation mode does: multiply by `scale`, add `shift`."""

    module: str
    scale: Array
    """weight / sqrt(running_var + eps), (channels,)."""
    mean: Array
    shift: Array
    """The bias, (channels,)."""

    def fold_weight(self, weight: Array) -> tuple[Array, Array]:
        """Return a convolution's weight with this folded in, and its magnitudes for the error."""
        folded = weight * self.scale.reshape(-1, *[1] * (weight.ndim - 1))
        return folded, np.abs(folded)

    def fold_bias(self, bias: Array) -> tuple[Array, Array]:
        """Return a convolution's bias with this folded in, and its magnitudes for the error."""
        # Rounding errors go by the summands, which may cancel in the sum.
        terms = (np.abs(bias) + np.abs(self.mean)) * np.abs(self.scale) + np.abs(self.shift)
        return (bias - self.mean) * self.scale + self.shift, terms


class WeightSource(Protocol):
    """The weights of a PyTorch model or of an .onnx file. A context manager."""

    def weights(self) -> TorchWeights:
        """Describe all weights."""

    def weight(self, name: str) -> Array:
        """Return all elements of a weight."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class Parameters:
    """All weights of the reference."""

    def __init__(self, reference: WeightSource) -> None:
        torch_weights = reference.weights()
        self._reference = reference
        self.weights: dict[str, TorchWeight] = torch_weights.weights
        self._linear = torch_weights.linear
        self._inputs_first = torch_weights.inputs_first
        self._by_path = torch_weights.by_path
        self._epsilons = torch_weights.batch_norms
        self._stored = torch_weights.stored
        self.lost = torch_weights.lost
        """Tensors of the checkpoint that no weight took, and that change answers."""
        self._no_weight = torch_weights.unused
        self._batch_norms: list[BatchNorm] | None = None
        self._by_tail: dict[str, list[str]] = defaultdict(list)
        self._by_size: dict[int, list[TorchWeight]] = defaultdict(list)
        for name, weight in self.weights.items():
            self._by_size[prod(weight.shape)].append(weight)
            words = name.split(".")
            for start in range(len(words)):
                self._by_tail[".".join(words[start:])].append(name)
        self._last: tuple[str, Array] = ("", np.zeros(0))

    def read(self, name: str) -> Array:
        """Return all elements; the last weight is kept, because graphs read some of them twice."""
        if self._last[0] != name:
            self._last = ("", np.zeros(0))  # free the memory first
            self._last = (name, self._reference.weight(name))
        return self._last[1]

    def is_linear(self, name: str) -> bool:
        """Return True for the weight (outputs, inputs) of a linear layer."""
        module, _, last = name.rpartition(".")
        return last == "weight" and module in self._linear

    def is_transposed(self, name: str, inputs_first: bool | None) -> bool | None:
        """Return True if a product stores a weight transposed; None if that is unknown.

        Args:
            name: the weight of the reference.
            inputs_first: True if the product needs (inputs, outputs), None for another operator.
        """
        if name in self._inputs_first:
            return None if inputs_first is None else not inputs_first
        return inputs_first if self.is_linear(name) else None

    def has_integers(self, name: str) -> bool:
        """Return True if the reference has integers under this very name."""
        return name in self.weights and self.weights[name].sample.dtype.kind in "iu"

    def is_computed(self, name: str) -> bool:
        """Return True for a parametrized weight, which PyTorch computes from other parameters."""
        module, _, last = name.rpartition(".")
        return f"{module}.parametrizations.{last}.original0" in self.weights

    def named(self, name: str) -> list[str]:
        """Return the weights that a name from a graph can mean; several if it is a part.

        A graph of a part of the model lacks the first words of the names, and one of a wrapped
        model has more.
        """
        if name in self.weights:
            return [name]
        if "." in name and name in self._by_tail:
            return self._by_tail[name]
        words = name.split(".")
        tails = (".".join(words[start:]) for start in range(1, len(words) - 1))
        return [tail for tail in tails if tail in self.weights][:1]

    def of_module(self, path: str, role: str) -> list[str]:
        """Return the weights that a module's path in a graph and a role (`bias`) can mean."""
        once = ".".join(_CALL_NUMBER.sub("", word) for word in path.split("."))
        for module in dict.fromkeys((path, once)):
            name = f"{module}.{role}"
            if names := list(self._by_path.get(name, ())) or self.named(name):
                return names
        return []

    def query_key_value(self, neighbour: str, role: str) -> list[str]:
        """Return the parameters of query, key and value near a module of the same attention.

        Args:
            neighbour: the path of a module, such as the one that projects the output.
            role: `weight` or `bias`; a bias that is returned need not exist.
        """
        words = neighbour.split(".")
        # Outwards from the neighbour, to the first module with one query, one key and one value.
        for end in range(len(words) - 1, 0, -1):
            inside = f"{'.'.join(words[:end])}."
            weights = [
                name
                for name in self.weights
                if name.endswith(".weight") and f".{name}".find(f".{inside}") >= 0
            ]
            fits = [
                [name for name in weights if name.split(".")[-2].startswith(letter)]
                for letter in "qkv"
            ]
            if all(len(names) == 1 for names in fits):
                return [f"{name.removesuffix('weight')}{role}" for [name] in fits]
        return []

    def of_size(self, size: int) -> list[TorchWeight]:
        """Return the weights with this number of elements."""
        return self._by_size.get(size, [])

    def batch_norm(self, weight: Array, name: str) -> BatchNorm | None:
        """Return the batch normalization that is most likely folded into a convolution's weight.

        Args:
            weight: the weight with it.
            name: the weight without it.
        """
        expected = self.read(name).astype(np.float64)
        if weight.shape != expected.shape or not self._epsilons:
            return None
        if self._batch_norms is None:
            self._batch_norms = [self._read_batch_norm(module) for module in self._epsilons]
        axes = tuple(range(1, expected.ndim))
        with np.errstate(divide="ignore", invalid="ignore"):
            # By least squares, the factor of each output channel.
            scale = (weight * expected).sum(axes) / (expected * expected).sum(axes)
        same = [norm for norm in self._batch_norms if norm.scale.shape == scale.shape]
        # The median: channels of zeros have no factor, and a damaged one has another.
        return min(same, key=lambda n: float(np.nanmedian(np.abs(n.scale - scale))), default=None)

    def norm(self, module: str) -> BatchNorm | None:
        """Return the batch normalization of a module's path; None if it is none."""
        return self._read_batch_norm(module) if module in self._epsilons else None

    def without(self, seen: set[str]) -> list[str]:
        """Return the float parameters and buffers that `seen` lacks, also by value."""
        known = {(w.shape, w.sample.tobytes()) for n, w in self.weights.items() if n in seen}
        return [
            name
            for name, weight in self.weights.items()
            if weight.sample.dtype.kind == "f"
            and name not in seen
            and (weight.shape, weight.sample.tobytes()) not in known
        ]

    def absent(self, unused: Sequence[str]) -> dict[str, int]:
        """Return the checkpoint's tensors that no graph has -> their number of elements.

        Args:
            unused: the result of `without`.
        """
        weights = {name: prod(self.weights[name].shape) for name in unused if name in self._stored}
        return {**weights, **self._no_weight}

    def _read_batch_norm(self, module: str) -> BatchNorm:
        mean = self.read(f"{module}.running_mean")
        variance = self.read(f"{module}.running_var")
        has = f"{module}.weight" in self.weights
        weight = self.read(f"{module}.weight") if has else np.ones_like(mean)
        shift = self.read(f"{module}.bias") if has else np.zeros_like(mean)
        scale = weight / np.sqrt(variance + np.float32(self._epsilons[module]))
        return BatchNorm(module, scale, mean, shift)


def sample_distance(array: Array, weight: TorchWeight) -> float:
    """Return the mean difference of an array from a weight's sample, relative to its magnitude."""
    expected = weight.sample.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(array[sample_positions(weight.shape)].astype(np.float64) - expected).mean()
    magnitude = np.abs(expected).mean()
    ratio = float(error / magnitude) if magnitude else float(error)
    return ratio if np.isfinite(ratio) else np.inf

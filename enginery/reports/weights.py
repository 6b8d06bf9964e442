"""Comparison of the weights and the layers of an artifact's graphs with the reference's."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from enginery.core.accuracy import Number
from enginery.core.artifact.manifest import Count
from enginery.core.table import Row

_NAMED = 3
"""Tensors that a sentence names."""


@dataclass(frozen=True)
class WeightDifference:
    """A weight of a graph that is not what the reference's makes it."""

    graph: str
    weight: str
    """Its name in the graph."""
    parameter: str
    """The reference's name; empty if unknown."""
    elements: Count
    differing: Count
    max_abs: Number
    """Largest absolute difference of an element."""
    cosine: Number
    """Between the rows that differ and the reference's."""
    problem: str
    """Where it differs, by how much, and what that means."""
    factor: Number = math.nan
    """The one number that the whole parameter is multiplied by; NaN if there is none."""

    @property
    def may_be_undone(self) -> bool:
        """True if the graph may undo the difference elsewhere, which its outputs then show.

        An exporter may multiply the query's weight by the scale of the attention. A table of
        embeddings does not count, because most inputs read few of its rows; a factor near 1 does
        not either, because the outputs may not show it.
        """
        return abs(math.log(self.factor)) > math.log(1.9) if self.factor > 0 else False


@dataclass(frozen=True)
class UntracedWeight:
    """A weight of a graph that could not be traced to a parameter, such as a constant mask."""

    graph: str
    weight: str
    shape: tuple[Count, ...]
    dtype: str
    """As numpy names it."""


@dataclass(frozen=True)
class WeightMetrics:
    """Comparison of all weights of all graphs with the reference's, without running them."""

    elements: Count
    """Of all weights and float constants."""
    compared: Count
    """Elements of those that were traced to a parameter, and compared one by one."""
    kinds: dict[str, Count]
    """Elements by what was expected: as is, transposed, fp16, quantized, folded, …"""
    differences: list[WeightDifference]
    untraced: list[UntracedWeight]
    """The largest of those that were not traced."""
    unused: list[str]
    """Parameters that no graph has."""
    absent: list[str] = field(default_factory=list)
    """Tensors of the source's checkpoint that no graph has: poolers, heads of other tasks."""
    absent_elements: Count = 0
    """Elements of all of those."""
    lost: list[str] = field(default_factory=list)
    """Tensors of the checkpoint that the reference itself did not load, though they change its
    answers: adapters, more layers."""

    def without_undone(self) -> WeightMetrics:
        """Return the metrics of a graph whose outputs agree with the reference's.

        A difference that it undoes elsewhere is then none.
        """
        kept = [weight for weight in self.differences if not weight.may_be_undone]
        undone = sum(weight.elements for weight in self.differences if weight.may_be_undone)
        kinds = {**self.kinds, "different": self.kinds.get("different", 0) - undone}
        if not undone:
            return self
        kinds["scaled"] = kinds.get("scaled", 0) + undone
        return replace(self, differences=kept, kinds=kinds)

    @property
    def problem(self) -> str:
        """Describe what the reference did not load; empty if it is nothing."""
        if not self.lost:
            return ""
        more = f", … ({len(self.lost)} tensors)" if len(self.lost) > _NAMED else ""
        return (
            "the checkpoint has tensors that no model was compared with: "
            f"{', '.join(self.lost[:_NAMED])}{more}"
        )

    def describe(self) -> str:
        """Return `99.8 % of 22.6 M elements compared in full`, and what no graph has."""
        share = self.compared / self.elements if self.elements else 0.0
        # Not 100 % if anything is left.
        shown = 100.0 if share == 1 else min(99.99, 100 * share)
        text = f"{shown:.4g} % of {self.elements / 1e6:.3g} M elements compared in full"
        if not self.absent:
            return text
        more = ", …" if len(self.absent) > _NAMED else ""
        return (
            f"{text}; {self.absent_elements / 1e6:.3g} M of the source's are in no graph "
            f"({', '.join(self.absent[:_NAMED])}{more})"
        )

    def different_rows(self) -> list[Row]:
        """Return a row for each weight that differs."""
        return [
            {
                "graph": weight.graph,
                "parameter": weight.parameter or weight.weight,
                "how": weight.problem,
            }
            for weight in self.differences
        ]

    def untraced_rows(self) -> list[Row]:
        """Return a row for each listed weight that was not traced."""
        return [
            {
                "graph": weight.graph,
                "name": weight.weight,
                "shape": " × ".join(map(str, weight.shape)),
                "share of all elements": f"{math.prod(weight.shape) / max(1, self.elements):.2%}",
            }
            for weight in self.untraced
        ]


@dataclass(frozen=True)
class LayerComparison:
    """Error of one quantized layer beside the error that quantize has measured."""

    layer: str
    error: Number
    expected: Number
    """Measured by quantize: on the same inputs, or on held-out rows of the calibration data."""
    limit: Number
    """Largest error that passes."""

    @property
    def passed(self) -> bool:
        return self.error <= self.limit

    @property
    def limit_ratio(self) -> float:
        """Error as a multiple of its limit; infinite if it is not finite."""
        ratio = self.error / self.limit if self.limit else math.inf
        return ratio if math.isfinite(ratio) else math.inf

    def describe(self) -> str:
        """Return `1.9 % off FP32, 1.1 % when quantized, at most 1.2 % expected`."""
        error = f"{100 * self.error:.2g} %" if math.isfinite(self.error) else "no finite error"
        return (
            f"{error} off FP32, {100 * self.expected:.2g} % measured by quantize, at most "
            f"{100 * self.limit:.2g} % expected"
        )


@dataclass(frozen=True)
class LayerMetrics:
    """The outputs of a statically quantized graph's layers, each with FP32's on the same input."""

    rows: Count
    """Of real inputs."""
    layers: list[LayerComparison]
    missing: list[str]
    """Layers that quantize has measured, but whose weight or bias was not traced."""

    @property
    def worst(self) -> LayerComparison | None:
        """The layer with the largest error in units of its limit."""
        return max(self.layers, key=lambda layer: layer.limit_ratio, default=None)

    @property
    def problem(self) -> str:
        """Describe the layers that fail, with the worst of them; empty if all pass."""
        failed = [layer for layer in self.layers if not layer.passed]
        if not failed or self.worst is None:
            return ""
        more = f" ({len(failed)} of {len(self.layers)} layers fail)" if len(failed) > 1 else ""
        return f"{self.worst.layer}: {self.worst.describe()}{more}"

    def with_graph(self, other: LayerMetrics) -> LayerMetrics:
        """Return the layers of two graphs as one."""
        layers, missing = [*self.layers, *other.layers], [*self.missing, *other.missing]
        return LayerMetrics(max(self.rows, other.rows), layers, missing)

    def describe(self) -> str:
        """Describe the comparison in one line."""
        every = len(self.layers) + len(self.missing)
        if self.worst is None:
            return f"0 of {every} compared with FP32"
        return (
            f"{len(self.layers)} of {every} compared with FP32 over {self.rows} rows; nearest to "
            f"its limit: {self.worst.layer}, {self.worst.describe()}"
        )

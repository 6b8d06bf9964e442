"""Counters and histograms that every request pays for: a number each, and no lock of their own.

    >>> seconds = Histograms("request_seconds", "Of requests.", ("route",), (0.1, 1.0))
    >>> seconds.of("/embed").add(0.25)
    >>> [sample.value for sample in seconds.metric().samples]    # buckets, count, sum
    [0, 1, 1, 1, 0.25]

Whoever adds from several threads holds a lock, once for all that a request adds.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


class Count:
    """One series of a counter."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


class Histogram:
    """One series of a histogram."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Of each bucket by itself; the last has no bound."""
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Counts a value into its bucket, which holds its own bound."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Counts:
    """A counter by its labels."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...]) -> None:
        self.name, self.text, self.labels = name, text, labels
        self._series: dict[tuple[str, ...], Count] = {}

    def of(self, *values: str) -> Count:
        """The series of these values of the labels."""
        return self._series.setdefault(values, Count())

    def metric(self) -> Metric:
        """As Prometheus' client writes it."""
        from prometheus_client.metrics_core import CounterMetricFamily

        family = CounterMetricFamily(self.name, self.text, labels=self.labels)
        for values, series in self._series.items():
            family.add_metric(values, series.value)
        return family


class Histograms:
    """A histogram by its labels."""

    def __init__(
        self, name: str, text: str, labels: tuple[str, ...], bounds: tuple[float, ...]
    ) -> None:
        self.name, self.text, self.labels, self.bounds = name, text, labels, bounds
        self._series: dict[tuple[str, ...], Histogram] = {}

    def of(self, *values: str) -> Histogram:
        """The series of these values of the labels."""
        return self._series.setdefault(values, Histogram(self.bounds))

    def metric(self) -> Metric:
        """As Prometheus' client writes it: each bucket holds those below it, too."""
        from prometheus_client.metrics_core import HistogramMetricFamily
        from prometheus_client.utils import floatToGoString

        family = HistogramMetricFamily(self.name, self.text, labels=self.labels)
        bounds = [*map(floatToGoString, self.bounds), "+Inf"]
        for values, series in self._series.items():
            buckets = list(zip(bounds, accumulate(series.counts), strict=True))
            family.add_metric(values, buckets, series.sum)
        return family

"""What the server measures of itself, as Prometheus reads it.

Takes what happened, one call each; leaves the text of `/metrics`.

    >>> metrics = Metrics()
    >>> metrics.request(route="/embed", model="minilm", status=200, seconds=0.0041)
    >>> metrics.exposition()[0].decode()
    '# HELP enginery_request_duration_seconds …'

Base units, and names as prometheus.io/docs/practices/naming has them. Each server has its own,
though two of them be in one process. The labels are bounded: route patterns, never paths, and the
names of hosted models, never what a client calls one. Every call may come from any thread. Counting
is ours, because every request pays for it; what Prometheus reads is written by its own client,
which is imported when somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from enginery.serve.replies import Timings
from enginery.serve.series import Count, Counts, Histogram, Histograms

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from enginery.serve.rooms import HostedModel

SECONDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
    10.0, 30.0, 60.0,
)  # fmt: skip
"""Upper bounds of the buckets of times: from tokenizing a phrase to a client's patience."""
INPUTS = tuple(float(1 << n) for n in range(11))
TOKENS = tuple(float(1 << n) for n in range(3, 18))
RATIOS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75)

NO_MODEL = ""
"""The label of a request that names no hosted model: none of the client's words get in."""


class Metrics:
    """Counters, histograms, and gauges that are read when somebody asks."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._families: list[Histograms | Counts] = []
        self._models: Callable[[], Iterable[HostedModel]] = tuple
        self._dropped: Callable[[], int] = int
        self._requests: dict[tuple[str, str, int], Histogram] = {}
        self._replies: dict[str, _Reply] = {}
        self._batches: dict[str, _Batch] = {}
        by_model = ("model",)
        self._duration = self._histograms(
            "request_duration_seconds", "From the first byte of a request to its answer.",
            ("route", "model", "status"), SECONDS,
        )  # fmt: skip
        self._tokenize = self._histograms(
            "tokenize_seconds", "Tokenizing, or decoding.", by_model, SECONDS
        )
        self._queue = self._histograms("queue_seconds", "Waiting for a worker.", by_model, SECONDS)
        self._inference = self._histograms(
            "inference_seconds", "In a worker, per request.", by_model, SECONDS
        )
        self._inputs = self._counts("inputs", "Texts, images or rows that were answered.", by_model)
        self._tokens = self._counts(
            "input_tokens", "Their tokens, special ones included.", by_model
        )
        self._truncated = self._counts(
            "truncated", "Texts that were cut to what the model takes.", by_model
        )
        self._batch = (
            self._histograms("batch_inputs", "Inputs of a batch.", by_model, INPUTS),
            self._histograms("batch_tokens", "Its tokens without padding.", by_model, TOKENS),
            self._histograms(
                "batch_padding_ratio", "Padding as a share of a batch's padded tokens.",
                by_model, RATIOS,
            ),
            self._histograms("batch_seconds", "One batch in a worker.", by_model, SECONDS),
        )  # fmt: skip
        self._refused = self._counts(
            "refused", "Requests that were not answered.", ("model", "reason")
        )

    def request(self, *, route: str, model: str, status: int, seconds: float) -> None:
        """A request was answered or refused.

        Args:
            route: the pattern, `/v2/models/{model}/infer`, never the path.
            model: a hosted model's name; anything else counts as no model.
            status: of HTTP.
            seconds: from the first byte read to the answer.
        """
        child = self._requests.get((route, model, status))
        if child is None:
            known = self._known(model)
            with self._lock:
                child = self._duration.of(route, known, str(status))
            if known == model:  # else a client could fill the memory with names
                self._requests[route, model, status] = child
        with self._lock:
            child.add(seconds)

    def reply(self, model: str, timings: Timings, *, inputs: int) -> None:
        """A model answered a request of so many inputs."""
        children = self._replies.get(model)
        if children is None:
            known = self._known(model)
            with self._lock:
                children = _Reply(
                    self._tokenize.of(known), self._queue.of(known), self._inference.of(known),
                    self._inputs.of(known), self._tokens.of(known), self._truncated.of(known),
                )  # fmt: skip
            if known == model:
                self._replies[model] = children
        with self._lock:
            children.tokenize.add(timings.tokenize_seconds)
            children.queue.add(timings.queue_seconds)
            children.inference.add(timings.inference_seconds)
            children.inputs.value += inputs
            children.tokens.value += timings.tokens
            children.truncated.value += timings.truncated

    def batch(
        self, model: str, *, rows: int, tokens: int, padded_tokens: int, seconds: float
    ) -> None:
        """A worker ran a batch.

        Args:
            model: a hosted model's name.
            rows: inputs of the batch.
            tokens: of all of them, without padding; 0 where there are none, as for images.
            padded_tokens: rows times the longest of them.
            seconds: padding, the graph, and its outputs into rows.
        """
        children = self._batches.get(model)
        if children is None:
            known = self._known(model)
            with self._lock:
                children = _Batch(*(family.of(known) for family in self._batch))
            if known == model:
                self._batches[model] = children
        with self._lock:
            children.inputs.add(rows)
            children.seconds.add(seconds)
            if padded_tokens > 0:
                children.tokens.add(tokens)
                children.padding.add(max(0.0, 1 - tokens / padded_tokens))

    def refused(self, model: str, reason: str) -> None:
        """A request was not answered.

        Args:
            model: a hosted model's name; anything else counts as no model.
            reason: one of a few words of ours, `overloaded` or `too_large`.
        """
        known = self._known(model)
        with self._lock:
            self._refused.of(known, reason).value += 1

    def watch_models(self, models: Callable[[], Iterable[HostedModel]]) -> None:
        """Says which models are hosted: their names are labels, and their states are gauges.

        Until then every request counts as one without a model.
        """
        self._models = models

    def watch_dropped_lines(self, dropped: Callable[[], int]) -> None:
        """Says how many lines the access log has dropped so far."""
        self._dropped = dropped

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """The body of `/metrics` and its content type.

        Args:
            accept: the request's header: Prometheus' text 0.0.4, or OpenMetrics where it asks.
        """
        from prometheus_client import ProcessCollector
        from prometheus_client.exposition import choose_encoder

        encode, content_type = choose_encoder(accept)
        with self._lock:
            families = [family.metric() for family in self._families]
        process = ProcessCollector(registry=None)
        found = [*families, *self._looked_at(), *process.collect()]
        return encode(_Found(found)), content_type

    def _looked_at(self) -> Iterator[Metric]:
        """What is not counted but looked at: the models and their queues."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        by_model = ("model",)
        ready = GaugeMetricFamily(
            "enginery_model_ready", "1 where the model answers, else 0.", labels=by_model
        )
        inputs = GaugeMetricFamily(
            "enginery_queue_inputs", "Inputs that wait for a worker.", labels=by_model
        )
        tokens = GaugeMetricFamily(
            "enginery_queue_tokens", "Tokens that wait for a worker.", labels=by_model
        )
        about = GaugeMetricFamily(
            "enginery_model_info", "What runs the model; always 1.",
            labels=("model", "task", "provider", "precision", "engine"),
        )  # fmt: skip
        for model in self._models():
            name, state = model.name, model.state
            ready.add_metric([name], 1.0 if state == "ready" else 0.0)
            if state not in ("ready", "stuck"):  # there is no session to ask
                continue
            info = model.info()
            queue = info["queue"]
            inputs.add_metric([name], queue["inputs"])
            tokens.add_metric([name], queue["tokens"])
            engines = ",".join(str(engine["key"]) for engine in info["engines"])
            # ONNX Runtime asks the first; those behind it take what it leaves.
            provider = str(info["providers"][0]["name"])
            about.add_metric([name, model.task, provider, str(info["precision"]), engines], 1.0)
        yield from (ready, inputs, tokens, about)
        yield CounterMetricFamily(
            "enginery_access_log_dropped", "Lines that the access log had no room for.",
            value=self._dropped(),
        )  # fmt: skip

    def _known(self, model: str) -> str:
        return model if any(m.name == model for m in self._models()) else NO_MODEL

    def _histograms(
        self, name: str, text: str, labels: tuple[str, ...], bounds: tuple[float, ...]
    ) -> Histograms:
        family = Histograms(f"enginery_{name}", text, labels, bounds)
        self._families.append(family)
        return family

    def _counts(self, name: str, text: str, labels: tuple[str, ...]) -> Counts:
        family = Counts(f"enginery_{name}", text, labels)
        self._families.append(family)
        return family


class _Reply(NamedTuple):
    """What one model's replies are counted by, looked up once."""

    tokenize: Histogram
    queue: Histogram
    inference: Histogram
    inputs: Count
    tokens: Count
    truncated: Count


class _Batch(NamedTuple):
    """What one model's batches are counted by, looked up once."""

    inputs: Histogram
    tokens: Histogram
    padding: Histogram
    seconds: Histogram


class _Found:
    """What an encoder of Prometheus' client takes for a registry."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics

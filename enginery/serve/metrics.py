"""What the server measures of itself, as Prometheus reads it.

Takes what happened, one call each; leaves the text of `/metrics`.

    >>> metrics = Metrics()
    >>> metrics.request(route="/embed", model="minilm", status=200, seconds=0.0041)
    >>> metrics.exposition()[0].decode()
    '# HELP enginery_request_duration_seconds …'

Base units, and names as prometheus.io/docs/practices/naming has them. The metrics are in a registry
of their own, so that two servers in one process share none. The labels are bounded: route patterns,
never paths, and the names of hosted models, never what a client calls one. Every call may come from
any thread; those of a request together cost a few microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from enginery.serve.replies import Timings

if TYPE_CHECKING:
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
    """Counters, histograms, and gauges that are read when somebody asks.

    Args:
        restarts: how often the serving process was started anew before this one.
    """

    def __init__(self, *, restarts: int = 0) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._watched = _AtScrape()
        self._requests: dict[tuple[str, str, int], Histogram] = {}
        self._replies: dict[str, _ReplyChildren] = {}
        self._batches: dict[str, _BatchChildren] = {}
        by_model = ("model",)
        self._duration = self._histogram(
            "request_duration_seconds", "From the first byte of a request to its answer.",
            ("route", "model", "status"), SECONDS,
        )  # fmt: skip
        self._reply = (
            self._histogram("tokenize_seconds", "Tokenizing, or decoding.", by_model, SECONDS),
            self._histogram("queue_seconds", "Waiting for a worker.", by_model, SECONDS),
            self._histogram("inference_seconds", "In a worker, per request.", by_model, SECONDS),
            self._counter("inputs", "Texts, images or rows that were answered.", by_model),
            self._counter("input_tokens", "Their tokens, special ones included.", by_model),
            self._counter("truncated", "Texts that were cut to what the model takes.", by_model),
        )  # fmt: skip
        self._batch = (
            self._histogram("batch_inputs", "Inputs of a batch.", by_model, INPUTS),
            self._histogram("batch_tokens", "Its tokens without padding.", by_model, TOKENS),
            self._histogram(
                "batch_padding_ratio", "Padding as a share of a batch's padded tokens.",
                by_model, RATIOS,
            ),
            self._histogram("batch_seconds", "One batch in a worker.", by_model, SECONDS),
        )  # fmt: skip
        self._refused = self._counter(
            "refused", "Requests that were not answered.", ("model", "reason")
        )
        self._restarts = self._counter(
            "restarts", "Times that the serving process was started anew.", ()
        )
        self._restarts.inc(restarts)
        self.registry.register(self._watched)
        ProcessCollector(registry=self.registry)

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
            child = self._duration.labels(route, known, str(status))
            if known == model:  # else a client could fill the memory with names
                self._requests[route, model, status] = child
        child.observe(seconds)

    def reply(self, model: str, timings: Timings, *, inputs: int) -> None:
        """A model answered a request of so many inputs."""
        children = self._replies.get(model)
        if children is None:
            known = self._known(model)
            children = _ReplyChildren(*(metric.labels(known) for metric in self._reply))
            if known == model:
                self._replies[model] = children
        children.tokenize.observe(timings.tokenize_seconds)
        children.queue.observe(timings.queue_seconds)
        children.inference.observe(timings.inference_seconds)
        children.inputs.inc(inputs)
        children.tokens.inc(timings.tokens)
        if timings.truncated:
            children.truncated.inc(timings.truncated)

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
            children = _BatchChildren(*(metric.labels(known) for metric in self._batch))
            if known == model:
                self._batches[model] = children
        children.inputs.observe(rows)
        children.seconds.observe(seconds)
        if padded_tokens > 0:
            children.tokens.observe(tokens)
            children.padding.observe(max(0.0, 1 - tokens / padded_tokens))

    def refused(self, model: str, reason: str) -> None:
        """A request was not answered.

        Args:
            model: a hosted model's name; anything else counts as no model.
            reason: one of a few words of ours, `overloaded` or `too_large`.
        """
        self._refused.labels(self._known(model), reason).inc()

    def watch_models(self, models: Callable[[], Iterable[HostedModel]]) -> None:
        """Says which models are hosted: their names are labels, and their states are gauges.

        Until then every request counts as one without a model.
        """
        self._watched.models = models

    def watch_dropped_lines(self, dropped: Callable[[], int]) -> None:
        """Says how many lines the access log has dropped so far."""
        self._watched.dropped = dropped

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """The body of `/metrics` and its content type.

        Args:
            accept: the request's header: Prometheus' text 0.0.4, or OpenMetrics where it asks.
        """
        encode, content_type = choose_encoder(accept)
        return encode(_WithoutCreated(self.registry)), content_type

    def _known(self, model: str) -> str:
        return model if any(m.name == model for m in self._watched.models()) else NO_MODEL

    def _histogram(
        self, name: str, text: str, labels: tuple[str, ...], buckets: tuple[float, ...]
    ) -> Histogram:
        return Histogram(f"enginery_{name}", text, labels, registry=self.registry, buckets=buckets)

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        return Counter(f"enginery_{name}", text, labels, registry=self.registry)


class _ReplyChildren(NamedTuple):
    """The metrics of one model's replies, looked up once."""

    tokenize: Any
    queue: Any
    inference: Any
    inputs: Any
    tokens: Any
    truncated: Any


class _BatchChildren(NamedTuple):
    """The metrics of one model's batches, looked up once."""

    inputs: Any
    tokens: Any
    padding: Any
    seconds: Any


class _AtScrape(Collector):
    """What is not counted but looked at: the models and their queues."""

    def __init__(self) -> None:
        self.models: Callable[[], Iterable[HostedModel]] = tuple
        self.dropped: Callable[[], int] = int

    def collect(self) -> Iterator[Metric]:
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
        for model in self.models():
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
            value=self.dropped(),
        )  # fmt: skip


class _WithoutCreated(Collector):
    """A registry without the time that each series began, which doubles the text for nothing."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [s for s in family.samples if not s.name.endswith("_created")]
            yield family

"""The server's metrics for Prometheus.

    metrics = Metrics()
    metrics.observe(record)
    body, content_type = metrics.exposition()

Names and units follow prometheus.io/docs/practices/naming. Each server has its own registry, even
if two of them run in one process. The number of label values is bounded: labels are route patterns
instead of paths, and names of served models instead of names from requests. All methods are
thread-safe.

With several worker processes, prometheus_client adds up their counts through files in the directory
`PROMETHEUS_MULTIPROC_DIR`, which must be set before it is imported. Gauges and `process_*` are
those of the worker that answers the request.
"""

from __future__ import annotations

import asyncio
import os
from bisect import bisect_left
from collections import Counter as Counts
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from enginery.core.errors import ProviderError
from enginery.runtime.nvml import Nvml
from enginery.runtime.providers.known import NVIDIA
from enginery.serve.batching.scheduler import BatchStatistics
from enginery.serve.observability.record import RequestRecord, refusal_reason

if TYPE_CHECKING:
    from enginery.serve.models.served_model import ServedModel

MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"
"""prometheus_client's variable for the directory that worker processes share."""
SECONDS = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)
"""Upper bounds of the buckets of times, from tokenizing a phrase to a client's timeout."""
INPUTS = tuple(float(1 << n) for n in range(11))
TOKENS = tuple(float(1 << n) for n in range(3, 18))
RATIOS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75)

_COUNT_TOGETHER = 64
"""Maximum number of requests that are counted together."""
_COUNT_SECONDS = 0.05
"""Time after which a request is counted even if others are in progress."""

NO_MODEL = ""
"""Label of requests that name no served model; names from requests never become labels."""
_BY_MODEL = ("model",)
_LOADED = ("ready", "stuck")
"""States of a model that has providers and a queue."""


@dataclass(slots=True)
class Duration:
    """Number and total duration of something ($duration_stat of the Open Inference Protocol)."""

    count: int = 0
    ns: int = 0


@dataclass(slots=True)
class InferenceStatistics:
    """Durations of a model's requests ($inference_stats in the protocol)."""

    success: Duration = field(default_factory=Duration)
    """Requests that were answered."""
    fail: Duration = field(default_factory=Duration)
    """Requests that were rejected or failed."""
    queue: Duration = field(default_factory=Duration)
    compute_input: Duration = field(default_factory=Duration)
    """Tokenizing texts, or decoding images."""
    compute_infer: Duration = field(default_factory=Duration)


@dataclass(slots=True)
class ModelTotals:
    """What a model has done since the server started, in all worker processes."""

    last_inference: int = 0
    """Unix time of the last answer, in milliseconds; 0 if there is none."""
    inference_count: int = 0
    """Inputs that were answered."""
    execution_count: int = 0
    """Batches that ran."""
    inference_stats: InferenceStatistics = field(default_factory=InferenceStatistics)


class _Histogram(Histogram):
    """A histogram that takes many amounts at once."""

    def observe_all(self, amounts: Sequence[float]) -> None:
        """Observe amounts; each bucket is updated once."""
        self._sum.inc(sum(amounts))
        for index, count in Counts(bisect_left(self._upper_bounds, x) for x in amounts).items():
            self._buckets[index].inc(count)


class Metrics:
    """The server's counters and histograms, and gauges that are read at each scrape."""

    def __init__(self) -> None:
        # Else each counter and histogram has a further series, with the time of its creation.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._models = _ModelCollector()
        self._registry.register(self._models)
        self._registry.register(_GpuCollector(self._models.gpus))
        ProcessCollector(registry=self._registry)
        self._requests: dict[tuple[str, str, int], _Histogram] = {}
        self._uncounted: list[RequestRecord] = []
        self._timer: asyncio.TimerHandle | None = None
        self._is_busy: Callable[[], bool] = bool
        self._by_model: dict[str, _ModelMetrics] = {}
        self._counts = self._registry
        if MULTIPROCESS in os.environ:
            # The counts are in files, which `_registry` adds up.
            self._counts = CollectorRegistry()
            collect_files: Any = MultiProcessCollector
            collect_files(self._registry)
        self._duration = self._histogram(
            "request_duration_seconds",
            "Time from a request's first byte to its response.",
            SECONDS,
            ("route", "model", "status"),
        )
        self._model_metrics = _ModelMetrics(
            self._histogram(
                "tokenize_seconds",
                "Time to tokenize texts or decode images, per request.",
                SECONDS,
            ),
            self._histogram("queue_seconds", "Time in the queue, per request.", SECONDS),
            self._histogram("inference_seconds", "Time in a worker, per request.", SECONDS),
            self._counter("inputs", "Texts, images or rows that were answered."),
            self._counter("input_tokens", "Tokens of inputs, special ones included."),
            self._counter("truncated", "Texts that were truncated."),
            self._histogram("batch_inputs", "Inputs per batch.", INPUTS),
            self._histogram("batch_tokens", "Tokens per batch, without padding.", TOKENS),
            self._histogram(
                "batch_padding_ratio", "Padding as a share of a batch's padded tokens.", RATIOS
            ),
            self._histogram("batch_seconds", "Time of a batch in a worker.", SECONDS),
        )
        self._last_inference = Gauge(
            "enginery_last_inference_timestamp_seconds",
            "Unix time of the last answer of the model.",
            _BY_MODEL,
            registry=self._counts,
            multiprocess_mode="max",
        )
        self._first_token = self._histogram(
            "first_token_seconds",
            "Time from a request's first byte to its first generated token.",
            SECONDS,
        )
        self._generated = self._counter("generated_tokens", "Tokens that were generated.")
        self._refused = self._counter(
            "refused", "Requests that were rejected or failed.", ("model", "reason")
        )

    def observe(self, record: RequestRecord) -> None:
        """Count a request whose response has been sent.

        While other requests are in progress, it is counted together with them, soon after.
        """
        self._uncounted.append(record)
        if not self._is_busy() or len(self._uncounted) >= _COUNT_TOGETHER:
            self.count()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_COUNT_SECONDS, self.count)

    def count(self) -> None:
        """Count the requests that were observed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        records, self._uncounted = self._uncounted, []
        seconds: dict[tuple[str, str, int], list[float]] = {}
        inferences: dict[str, list[RequestRecord]] = {}
        for record in records:
            seconds.setdefault((record.route, record.model, record.status), []).append(
                record.seconds
            )
            if record.timings is not None:
                inferences.setdefault(record.model, []).append(record)
            if record.generated:
                model = self._model_label(record.model)
                self._first_token.labels(model).observe(record.first_token_at - record.started)
                self._generated.labels(model).inc(record.generated)
            if reason := refusal_reason(record):
                self._refused.labels(self._model_label(record.model), reason).inc()
        for key, amounts in seconds.items():
            self._request_histogram(key).observe_all(amounts)
        for model, inferred in inferences.items():
            self._count_inferences(model, inferred)

    def _request_histogram(self, key: tuple[str, str, int]) -> _Histogram:
        child = self._requests.get(key)
        if child is None:
            route, model, status = key
            label = self._model_label(model)
            child = self._duration.labels(route, label, str(status))
            if label == model:  # else clients could fill the memory with names
                self._requests[key] = child
        return child

    def observe_batch(self, model: str, batch: BatchStatistics) -> None:
        """Count a batch that ran.

        Args:
            model: name of the served model.
            batch: size and duration of the batch.
        """
        metrics = self._metrics_of(model)
        metrics.batch_inputs.observe(batch.rows)
        metrics.batch_seconds.observe(batch.seconds)
        if batch.padded_tokens > 0:
            metrics.batch_tokens.observe(batch.tokens)
            metrics.batch_padding.observe(max(0.0, 1 - batch.tokens / batch.padded_tokens))

    def watch_models(self, models: Callable[[], Iterable[ServedModel]]) -> None:
        """Set the function that returns the served models, for labels and gauges.

        Before this call, every request counts as one without a model.
        """
        self._models.models = models

    def watch_activity(self, is_busy: Callable[[], bool]) -> None:
        """Set the function that returns True while requests are in progress."""
        self._is_busy = is_busy

    def watch_dropped_lines(self, dropped: Callable[[], int]) -> None:
        """Set the function that returns the number of lines that the access log has dropped."""
        self._models.dropped = dropped

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """Return the body of `/metrics` and its content type.

        Args:
            accept: the request's Accept header, which chooses between Prometheus' text format
                0.0.4 and OpenMetrics.
        """
        self.count()
        try:
            encode, content_type = choose_encoder(accept)
        except (ValueError, TypeError):  # a malformed version in the header
            encode, content_type = choose_encoder("")
        return encode(self._registry), content_type

    def totals(self, routes: Collection[str]) -> dict[str, ModelTotals]:
        """Return what each model has done, by its name.

        Args:
            routes: patterns of the routes that run models, for the numbers of requests.
        """
        self.count()
        totals_by_model: defaultdict[str, ModelTotals] = defaultdict(ModelTotals)
        for metric in self._registry.collect():
            for sample in metric.samples:
                if model := sample.labels.get("model"):
                    _add_sample(totals_by_model[model], sample, routes)
        return dict(totals_by_model)

    def _count_inferences(self, model: str, records: Sequence[RequestRecord]) -> None:
        metrics = self._metrics_of(model)
        timings = [record.timings for record in records if record.timings is not None]
        metrics.tokenize.observe_all([timing.tokenize_seconds for timing in timings])
        metrics.queue.observe_all([timing.queue_seconds for timing in timings])
        metrics.inference.observe_all([timing.inference_seconds for timing in timings])
        metrics.inputs.inc(sum(record.inputs for record in records))
        metrics.tokens.inc(sum(timing.tokens for timing in timings))
        metrics.truncated.inc(sum(timing.truncated for timing in timings))
        # It has no value before the first answer.
        self._last_inference.labels(self._model_label(model)).set_to_current_time()

    def _metrics_of(self, model: str) -> _ModelMetrics:
        metrics = self._by_model.get(model)
        if metrics is None:
            label = self._model_label(model)
            families: tuple[Any, ...] = self._model_metrics
            metrics = _ModelMetrics(*(family.labels(label) for family in families))
            if label == model:  # else clients could fill the memory with names
                self._by_model[model] = metrics
        return metrics

    def _model_label(self, model: str) -> str:
        return model if any(served.name == model for served in self._models.models()) else NO_MODEL

    def _histogram(
        self, name: str, text: str, bounds: tuple[float, ...], labels: tuple[str, ...] = _BY_MODEL
    ) -> _Histogram:
        return _Histogram(f"enginery_{name}", text, labels, buckets=bounds, registry=self._counts)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = _BY_MODEL) -> Counter:
        return Counter(f"enginery_{name}", text, labels, registry=self._counts)


_TOTALS = {
    "enginery_tokenize_seconds": "compute_input",
    "enginery_queue_seconds": "queue",
    "enginery_inference_seconds": "compute_infer",
}


def _add_sample(totals: ModelTotals, sample: Sample, routes: Collection[str]) -> None:
    """Add a sample to the totals of its model, if it is a part of them."""
    name, _, suffix = sample.name.rpartition("_")
    stats = totals.inference_stats
    if sample.name == "enginery_inputs_total":
        totals.inference_count = int(sample.value)
    elif sample.name == "enginery_batch_inputs_count":
        totals.execution_count = int(sample.value)
    elif sample.name == "enginery_last_inference_timestamp_seconds":
        totals.last_inference = round(sample.value * 1e3)
    elif name in _TOTALS:
        _add(getattr(stats, _TOTALS[name]), suffix, sample.value)
    elif name == "enginery_request_duration_seconds" and sample.labels["route"] in routes:
        answered = sample.labels["status"] == "200"
        _add(stats.success if answered else stats.fail, suffix, sample.value)


def _add(total: Duration, suffix: str, value: float) -> None:
    if suffix == "count":
        total.count += int(value)
    elif suffix == "sum":
        total.ns += round(value * 1e9)


class _ModelMetrics(NamedTuple):
    """The metrics with the label of a model alone; looked up once for each model."""

    tokenize: _Histogram
    queue: _Histogram
    inference: _Histogram
    inputs: Counter
    tokens: Counter
    truncated: Counter
    batch_inputs: Histogram
    batch_tokens: Histogram
    batch_padding: Histogram
    batch_seconds: Histogram


_MODEL_GAUGES = (
    (GaugeMetricFamily, "queue_inputs", "Inputs that wait for a worker.", "queue", "inputs"),
    (GaugeMetricFamily, "queue_tokens", "Tokens that wait for a worker.", "queue", "tokens"),
    (GaugeMetricFamily, "running_rows", "Texts and beams being generated.", "running", "rows"),
    (GaugeMetricFamily, "waiting_requests", "Requests of waiting texts.", "running", "waiting"),
    (GaugeMetricFamily, "cuda_graphs", "CUDA graphs of the model.", "cuda_graphs", "recorded"),
    (
        CounterMetricFamily,
        "unrecorded_batches",
        "Batches that ran without a CUDA graph, if the model has any.",
        "cuda_graphs",
        "unrecorded_runs",
    ),
)
"""Type, name and description of a metric, and where `ServedModel.info` has it."""


class _ModelCollector(Collector):
    """The gauges of models and queues, which are read at each scrape."""

    def __init__(self) -> None:
        self.models: Callable[[], Iterable[ServedModel]] = tuple
        self.dropped: Callable[[], int] = int

    def gpus(self) -> list[int]:
        """Return the CUDA device ids of the providers of all loaded models."""
        infos = [model.info() for model in self.models() if model.state in _LOADED]
        providers = [
            provider
            for info in infos
            for device in info.get("devices", [info["providers"]])
            for provider in device
            if provider["name"] in NVIDIA
        ]
        return sorted({int(provider["options"].get("device_id", 0)) for provider in providers})

    def collect(self) -> Iterator[Metric]:
        """Yield the current gauges."""
        ready = GaugeMetricFamily(
            "enginery_model_ready", "1 if the model is ready, else 0.", labels=_BY_MODEL
        )
        about = GaugeMetricFamily(
            "enginery_model_info",
            "Task, provider, precision and engines of the model; always 1.",
            labels=("model", "task", "provider", "precision", "engine"),
        )
        infos: dict[str, dict[str, Any]] = {}
        for model in self.models():
            ready.add_metric([model.name], 1.0 if model.state == "ready" else 0.0)
            if model.state not in _LOADED:
                continue
            info = infos[model.name] = model.info()
            engines = ",".join(str(engine["key"]) for engine in info["engines"])
            # ONNX Runtime assigns nodes to the first provider, and the rest to those after it.
            provider = str(info["providers"][0]["name"])
            about.add_metric(
                [model.name, str(info["task"]), provider, str(info["precision"]), engines], 1.0
            )
        yield from (ready, about)
        for kind, metric, text, section, key in _MODEL_GAUGES:
            family = kind(f"enginery_{metric}", text, labels=_BY_MODEL)
            for name, info in infos.items():
                if section in info:
                    family.add_metric([name], info[section][key])
            if family.samples:
                yield family
        yield CounterMetricFamily(
            "enginery_access_log_dropped",
            "Lines of the access log that were dropped.",
            value=self.dropped(),
        )


class _GpuCollector(Collector):
    """The load of the GPUs that served models run on, read from NVML at each scrape.

    There is nothing without a GPU, and nothing of what a GPU does not report.
    """

    def __init__(self, devices: Callable[[], Iterable[int]]) -> None:
        self._devices = devices
        self._opened: dict[int, Nvml | None] = {}

    def collect(self) -> Iterator[Metric]:
        """Yield the current gauges."""
        statuses = {
            str(device): nvml.status() for device in self._devices() if (nvml := self._open(device))
        }
        for name, text in _GPU_GAUGES.items():
            gauge = GaugeMetricFamily(f"enginery_gpu_{name}", text, labels=("device",))
            for device, status in statuses.items():
                value = getattr(status, name)
                if value is not None:
                    gauge.add_metric([device], value)
            if gauge.samples:
                yield gauge

    def _open(self, device: int) -> Nvml | None:
        """Return the GPU, which stays open; None if NVML cannot be used here."""
        if device not in self._opened:
            try:
                self._opened[device] = Nvml.open(device)
            except ProviderError:
                self._opened[device] = None
        return self._opened[device]


_GPU_GAUGES = {
    "memory_used_bytes": "Memory of the GPU that all processes use.",
    "memory_total_bytes": "Memory of the GPU.",
    "utilization_ratio": "Share of the last sample period in which a kernel ran on the GPU.",
    "temperature_celsius": "Temperature of the GPU.",
    "power_watts": "Power that the GPU draws.",
}
"""Fields of `GpuStatus`, with their descriptions."""

"""What `/metrics` says, and what it never has as a label."""

import os
import subprocess
import sys
import threading
import time

import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as open_metrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from enginery.core.errors import ProviderError
from enginery.runtime.nvml import Nvml
from enginery.serve.batching.scheduler import BatchStatistics, Timings
from enginery.serve.observability.metrics import Metrics
from tests.runtime.fake_nvml import FakeNvml
from tests.serve.observability.application import record


class Hosted:
    """What metrics read of a hosted model."""

    def __init__(self, name, state="ready", engines=(), provider="CPUExecutionProvider", **options):
        self.name, self.task, self.state = name, "feature-extraction", state
        self.engines = engines
        self.provider = {"name": provider, "reason": "requested", "options": options}

    def info(self):
        assert self.state != "loading", "there is nothing to ask yet"
        return {
            "providers": [self.provider],
            "precision": "fp32",
            "task": self.task,
            "engines": [{"key": key} for key in self.engines],
            "queue": {"inputs": 3, "tokens": 57},
        }


@pytest.fixture
def metrics():
    made = Metrics()
    made.watch_models(lambda: [Hosted("minilm"), Hosted("other")])
    return made


def samples(metrics):
    """(name, labels) -> value, of everything that is exposed."""
    body, content_type = metrics.exposition()
    assert content_type.startswith("text/plain; version=0.0.4")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def value(metrics, name, **labels):
    return samples(metrics)[f"enginery_{name}", tuple(sorted(labels.items()))]


def test_request_is_counted_by_route_model_and_status(metrics):
    metrics.observe(record(status=200, ended=0.004))
    metrics.observe(record(status=200, ended=0.0001))
    metrics.observe(record(status=429, ended=0.001))
    labels = {"route": "/embed", "model": "minilm", "status": "200"}
    assert value(metrics, "request_duration_seconds_count", **labels) == 2
    assert value(metrics, "request_duration_seconds_sum", **labels) == pytest.approx(0.0041)
    # A bucket holds its own bound.
    assert value(metrics, "request_duration_seconds_bucket", le="0.0001", **labels) == 1
    assert value(metrics, "request_duration_seconds_bucket", le="0.0025", **labels) == 1
    assert value(metrics, "request_duration_seconds_bucket", le="0.005", **labels) == 2
    labels["status"] = "429"
    assert value(metrics, "request_duration_seconds_count", **labels) == 1


def test_reply_fills_times_inputs_tokens_and_truncated(metrics):
    timings = Timings(0.001, 0.02, 0.3, tokens=42, truncated=3)
    metrics.observe(record(timings=timings, inputs=3))
    metrics.observe(record(timings=timings, inputs=2))
    found = {
        name: value(metrics, name, model="minilm")
        for name in (
            "tokenize_seconds_sum",
            "queue_seconds_sum",
            "inference_seconds_sum",
            "inputs_total",
            "input_tokens_total",
            "truncated_total",
        )
    }
    assert found == pytest.approx(
        {
            "tokenize_seconds_sum": 0.002,
            "queue_seconds_sum": 0.04,
            "inference_seconds_sum": 0.6,
            "inputs_total": 5,
            "input_tokens_total": 84,
            "truncated_total": 6,
        }
    )


def test_batch_fills_size_tokens_and_the_share_of_padding(metrics):
    metrics.observe_batch("minilm", BatchStatistics(8, 150, 200, 0.05))
    assert value(metrics, "batch_inputs_sum", model="minilm") == 8
    assert value(metrics, "batch_tokens_sum", model="minilm") == 150
    assert value(metrics, "batch_padding_ratio_sum", model="minilm") == pytest.approx(0.25)
    assert value(metrics, "batch_seconds_sum", model="minilm") == pytest.approx(0.05)


def test_batch_of_images_has_no_tokens_and_no_padding(metrics):
    metrics.observe_batch("minilm", BatchStatistics(4, 0, 0, 0.05))
    assert value(metrics, "batch_inputs_count", model="minilm") == 1
    assert value(metrics, "batch_padding_ratio_count", model="minilm") == 0


def test_refusals_are_counted_by_reason(metrics):
    metrics.observe(record(status=429))
    metrics.observe(record(status=429))
    metrics.observe(record(status=413))
    for status in (200, 304, 500):  # a bug is none
        metrics.observe(record(status=status))
    metrics.observe(record(status=499))
    metrics.observe(record(status=418))
    metrics.observe(record(status=422))
    assert value(metrics, "refused_total", model="minilm", reason="overloaded") == 2
    assert value(metrics, "refused_total", model="minilm", reason="too_large") == 1
    reasons = {
        dict(labels)["reason"]
        for name, labels in samples(metrics)
        if name == "enginery_refused_total"
    }
    assert reasons == {"overloaded", "too_large", "cancelled", "http", "invalid"}


def test_a_model_without_an_answer_has_no_time_of_the_last_one(metrics):
    metrics.observe_batch("minilm", BatchStatistics(3, 42, 48, 0.3))
    names = {name for name, _ in samples(metrics)}
    assert "enginery_batch_inputs_count" in names
    assert "enginery_last_inference_timestamp_seconds" not in names


def test_totals_are_of_routes_that_run_models(metrics):
    timings = Timings(0.001, 0.02, 0.3, tokens=42)
    metrics.observe(record(timings=timings, inputs=3, ended=0.4))
    metrics.observe(record(status=429, ended=0.001))
    metrics.observe(record(status=499, ended=0.002))
    metrics.observe(record(route="/tokenize", ended=9.0))
    metrics.observe_batch("minilm", BatchStatistics(3, 42, 48, 0.3))
    found = metrics.totals({"/embed"})["minilm"]
    assert (found.inference_count, found.execution_count) == (3, 1)
    assert 0 <= time.time() - found.last_inference / 1e3 < 60
    stats = found.inference_stats
    parts = (stats.success, stats.fail, stats.compute_input, stats.queue, stats.compute_infer)
    assert [part.count for part in parts] == [1, 2, 1, 1, 1]
    seconds = [part.ns / 1e9 for part in parts]
    assert seconds == pytest.approx([0.4, 0.003, 0.001, 0.02, 0.3])
    assert Metrics().totals({"/embed"}) == {}


@pytest.mark.more
def test_totals_are_of_all_worker_processes(tmp_path):
    code = (
        "from tests.serve.observability.test_metrics import *\n"
        "made = Metrics(); made.watch_models(lambda: [Hosted('minilm')])\n"
        "made.observe(record(timings=Timings(0.001, 0.02, 0.3, tokens=42), inputs=3, ended=0.4))\n"
        "found = made.totals({'/embed'})['minilm']\n"
        "stats = found.inference_stats\n"
        "print(found.inference_count, stats.success.count, stats.queue.ns, "
        "found.last_inference > 1e12)\n"
    )
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    said = [
        subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for _ in range(2)
    ]
    assert said == ["3 1 20000000 True", "6 2 40000000 True"]


def test_gauges_are_read_at_each_scrape():
    hosted = [
        Hosted("minilm", engines=("abc", "def")),
        Hosted("late", state="loading"),
        Hosted("hung", state="stuck"),
    ]
    metrics = Metrics()
    metrics.watch_models(lambda: hosted)
    assert value(metrics, "model_ready", model="minilm") == 1
    assert value(metrics, "model_ready", model="late") == 0
    assert value(metrics, "model_ready", model="hung") == 0
    assert value(metrics, "queue_inputs", model="minilm") == 3
    assert value(metrics, "queue_tokens", model="hung") == 57
    labels = {
        "model": "minilm",
        "task": "feature-extraction",
        "precision": "fp32",
        "provider": "CPUExecutionProvider",
        "engine": "abc,def",
    }
    assert value(metrics, "model_info", **labels) == 1
    hosted[1].state = "ready"
    assert value(metrics, "model_ready", model="late") == 1


def test_dropped_log_lines():
    metrics = Metrics()
    metrics.watch_dropped_lines(lambda: 12)
    assert value(metrics, "access_log_dropped_total") == 12


def test_process_metrics_exist_and_created_series_do_not(metrics):
    metrics.observe(record(status=200, ended=0.004))
    names = {name for name, _ in samples(metrics)}
    assert "process_resident_memory_bytes" in names
    assert not [name for name in names if name.endswith("_created")]


def test_cuda_graphs_are_counted_only_for_models_that_have_any():
    class Recorded(Hosted):
        def info(self):
            return {**super().info(), "cuda_graphs": {"recorded": 75, "unrecorded_runs": 2}}

    metrics = Metrics()
    metrics.watch_models(lambda: [Recorded("minilm"), Hosted("other")])
    assert value(metrics, "cuda_graphs", model="minilm") == 75
    assert value(metrics, "unrecorded_batches_total", model="minilm") == 2
    names = [name for name, labels in samples(metrics) if labels == (("model", "other"),)]
    assert "enginery_cuda_graphs" not in names


def test_text_from_clients_never_becomes_a_label(metrics):
    for number in range(1000):
        name = f"no-such-model-{number}"
        metrics.observe(
            record(route="/predict/{model}", model=name, status=404, timings=Timings(), inputs=1)
        )
        metrics.observe_batch(name, BatchStatistics(1, 1, 1, 0.1))
    body = metrics.exposition()[0].decode()
    assert "no-such-model" not in body
    assert len(metrics._requests) + len(metrics._by_model) == 0
    labels = {"route": "/predict/{model}", "model": "", "status": "404"}
    assert value(metrics, "request_duration_seconds_count", **labels) == 1000


def test_name_of_a_model_is_escaped():
    metrics = Metrics()
    odd = 'a"b\\c\nd'
    metrics.watch_models(lambda: [Hosted(odd)])
    metrics.observe(record(model=odd))
    assert value(metrics, "model_ready", model=odd) == 1


def test_openmetrics_if_the_accept_header_requests_it(metrics):
    metrics.observe(record(timings=Timings(0.001, 0.02, 0.3, tokens=42), inputs=3))
    asked = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
    body, content_type = metrics.exposition(asked)
    assert content_type.startswith("application/openmetrics-text")
    families = {family.name for family in open_metrics_families(body.decode())}
    assert {"enginery_inputs", "enginery_tokenize_seconds", "enginery_model_info"} <= families


def test_two_servers_in_one_process_share_nothing():
    first, second = Metrics(), Metrics()
    first.observe(record(model=""))
    labels = {"route": "/embed", "model": "", "status": "200"}
    assert value(first, "request_duration_seconds_count", **labels) == 1
    assert ("enginery_request_duration_seconds_count", tuple(sorted(labels.items()))) not in (
        samples(second)
    )


def test_nothing_is_lost_between_threads_and_scrapes(metrics):
    def work():
        for _ in range(500):
            metrics.observe_batch("minilm", BatchStatistics(2, 9, 10, 0.01))
            metrics.observe(record(status=200, ended=0.004))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        samples(metrics)
    for thread in threads:
        thread.join()
    assert value(metrics, "batch_inputs_sum", model="minilm") == 8000
    labels = {"route": "/embed", "model": "minilm", "status": "200"}
    assert value(metrics, "request_duration_seconds_count", **labels) == 4000


def on_gpus():
    return [
        Hosted("minilm", provider="CUDAExecutionProvider", device_id="1"),
        Hosted("other", provider="CUDAExecutionProvider", device_id="1"),
        Hosted("waits", "loading", provider="CUDAExecutionProvider", device_id="0"),
        Hosted("cpu"),
    ]


def test_load_of_the_gpus_of_loaded_models_is_shown(metrics, monkeypatch):
    opened = []

    def open_gpu(device):
        opened.append(device)
        return Nvml(FakeNvml(failing=["nvmlDeviceGetTemperature"]), b"")

    monkeypatch.setattr(Nvml, "open", open_gpu)
    metrics.watch_models(on_gpus)
    for _ in range(2):
        found = {key: value for key, value in samples(metrics).items() if "_gpu_" in key[0]}
    device = (("device", "1"),)
    assert found == {
        ("enginery_gpu_memory_used_bytes", device): 3 << 30,
        ("enginery_gpu_memory_total_bytes", device): 80 << 30,
        ("enginery_gpu_utilization_ratio", device): 0.63,
        ("enginery_gpu_power_watts", device): 213.5,
    }
    assert opened == [1]


def test_nothing_is_said_of_gpus_without_nvml_or_without_a_model_on_one(metrics, monkeypatch):
    monkeypatch.setattr(Nvml, "open", lambda device: pytest.fail(f"{device} was opened"))
    assert not any("_gpu_" in name for name, _ in samples(metrics))

    def missing(device):
        raise ProviderError("libnvidia-ml.so.1 was not found.")

    monkeypatch.setattr(Nvml, "open", missing)
    metrics.watch_models(on_gpus)
    assert not any("_gpu_" in name for name, _ in samples(metrics))


async def test_requests_are_counted_together_while_others_run(metrics):
    import asyncio

    busy = True
    metrics.watch_activity(lambda: busy)

    def counted():
        """Without the scrape's own count."""
        found = [
            sample.value
            for metric in metrics._counts.collect()
            for sample in metric.samples
            if sample.name == "enginery_request_duration_seconds_count"
        ]
        return sum(found)

    metrics.observe(record())
    assert counted() == 0
    await asyncio.sleep(0.1)  # nobody has ended meanwhile
    assert counted() == 1
    for _ in range(64):
        metrics.observe(record(ended=0.2))
    assert counted() == 65
    metrics.observe(record())
    busy = False
    metrics.observe(record())
    assert counted() == 67
    busy = True
    metrics.observe(record(status=503, ended=70.0))
    metrics.exposition()
    assert counted() == 68
    labels = {"route": "/embed", "model": "minilm", "status": "200"}
    name = "request_duration_seconds"
    assert value(metrics, f"{name}_bucket", le="0.005", **labels) == 3
    assert value(metrics, f"{name}_bucket", le="0.25", **labels) == 67
    assert value(metrics, f"{name}_sum", **labels) == pytest.approx(3 * 0.0041 + 64 * 0.2)
    labels["status"] = "503"
    assert value(metrics, f"{name}_bucket", le="60.0", **labels) == 0
    assert value(metrics, f"{name}_bucket", le="+Inf", **labels) == 1

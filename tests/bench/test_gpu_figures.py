"""Memory and energy of a GPU, with a fake driver."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from enginery.bench.backends import worker
from enginery.bench.measurement.shapes import _measure_energy
from enginery.core.errors import ProviderError
from enginery.runtime.nvml import Nvml, _bus_id
from tests.bench.sample_results import CPU, CUDA


class NvmlDouble:
    """Stand-in for the class Nvml that returns one memory value after another."""

    def __init__(self, *values):
        self._values = list(values)

    def open(self, device_id):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def memory_bytes(self, pid):
        found = self._values.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


def test_gpu_memory_is_the_largest_after_a_turn_and_excludes_that_of_the_facts(monkeypatch):
    events = []
    backend = SimpleNamespace(providers=[CUDA], facts=lambda: events.append("facts") or {})
    first = worker.BenchmarkWorker()
    first._backend, first._run = backend, lambda: events.append("run")
    monkeypatch.setattr(worker, "Nvml", NvmlDouble(3 << 30, 5 << 30, 4 << 30))
    first.turn({"runs": 1})
    first.turn({"runs": 1, "cold": True})
    found = first.memory({})
    assert (found["device_memory_bytes"], events[-1]) == (5 << 30, "facts")
    # A driver that does not report it is read once, and the reason is kept.
    other = worker.BenchmarkWorker()
    other._backend, other._run = backend, lambda: None
    monkeypatch.setattr(worker, "Nvml", NvmlDouble(ProviderError("a container hides it.")))
    other.turn({"runs": 1})
    other.turn({"runs": 1})
    assert other.memory({})["device_memory"] == "a container hides it."


def test_machine_without_a_gpu_is_an_error():
    with pytest.raises(ProviderError, match=r"NVIDIA driver|libnvidia-ml"):
        Nvml.open()


class FakeProcess:
    """A BenchmarkProcess that answers requests with given values."""

    def __init__(self, provider, answers):
        self.plan = SimpleNamespace(kind="onnxruntime", device="cpu")
        self.loaded = {"providers": [provider]}
        self.requested = []
        self._answers = answers

    def request(self, what, **values):
        self.requested.append(what)
        answer = self._answers.get(what, ProviderError(f"{what} is unknown."))
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_energy_that_the_gpu_does_not_report_has_a_reason():
    unknown = {}
    assert _measure_energy(FakeProcess(CUDA, {"energy": {"joules": 0.5}}), unknown) == 0.5
    assert _measure_energy(FakeProcess(CUDA, {}), unknown) is None
    assert unknown == {"energy": "energy is unknown."}


def test_nothing_is_requested_without_a_gpu():
    process, unknown = FakeProcess(CPU, {}), {}
    assert _measure_energy(process, unknown) is None
    assert (process.requested, unknown) == ([], {})


def test_device_id_selects_the_measured_gpu():
    indices = []
    names = {
        "cuDeviceGet": lambda device, index: indices.append(index),
        "cuDeviceGetPCIBusId": lambda *_: None,
    }
    _bus_id(SimpleNamespace(**names), 1)
    assert indices == [1]

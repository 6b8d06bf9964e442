"""Memory, energy and copies of a GPU, with a fake driver."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from enginery.bench.backends import worker
from enginery.bench.backends.copies import Copies, measure_copies
from enginery.bench.measurement.shapes import _gpu_of, _measure_on_gpu
from enginery.core.errors import ProviderError
from enginery.runtime.nvml import Nvml, _bus_id
from tests.bench.sample_results import CPU, CUDA, save_detector


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


def test_measurement_that_the_gpu_lacks_has_a_reason():
    process, unknown = FakeProcess(CUDA, {"energy": {"joules": 0.5}}), {}
    assert _measure_on_gpu(process, "energy", unknown) == {"joules": 0.5}
    assert _measure_on_gpu(process, "copies", unknown, device="cuda") is None
    assert unknown == {"host copies": "copies is unknown."}


def test_nothing_is_requested_without_a_gpu():
    process, unknown = FakeProcess(CPU, {}), {}
    assert _measure_on_gpu(process, "energy", unknown) is None
    assert (process.requested, unknown) == ([], {})


def test_copies_through_iobinding_have_three_parts(tmp_path):
    """On the CPU nothing is copied, but the same calls are made."""
    import onnxruntime as ort

    model = save_detector(tmp_path / "d.onnx")
    session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    feeds = {"x": np.zeros((1, 3, 64, 64), "float32")}
    found = measure_copies(session, feeds, device="cpu", seconds=0.0)
    assert min(found.in_ms, found.device_ms, found.out_ms) > 0


def test_each_part_of_a_run_is_timed_separately():
    class Session:
        def io_binding(self):
            return self

        def __getattr__(self, name):
            return lambda *_: None

        def get_outputs(self):
            return []

    ticks = iter(range(10**6))
    steps = {0: 0.0, 1: 2.0, 2: 7.0, 3: 8.0}

    def clock():  # start, copied, computed, done, loop condition
        tick = next(ticks)
        return 0.0 if tick == 0 else steps[(tick - 1) % 4]

    found = measure_copies(Session(), {}, device="cuda", seconds=-1, clock=clock)
    assert found == Copies(2000.0, 5000.0, 1000.0)
    assert found.share == pytest.approx(3 / 8)


def test_device_id_selects_the_measured_gpu():
    process = FakeProcess({**CUDA, "options": {"device_id": "1"}}, {})
    assert (_gpu_of(process), _gpu_of(FakeProcess(CUDA, {}))) == ("cuda:1", "cuda:0")
    indices = []
    names = {
        "cuDeviceGet": lambda device, index: indices.append(index),
        "cuDeviceGetPCIBusId": lambda *_: None,
    }
    _bus_id(SimpleNamespace(**names), 1)
    assert indices == [1]


def test_copies_are_measured_on_the_selected_gpu(monkeypatch):
    import onnxruntime as ort

    placed = []

    class Binding:
        def bind_ortvalue_input(self, name, value):
            placed.append(value)

        def bind_output(self, name, kind, index):
            placed.append((kind, index))

        def __getattr__(self, name):
            return lambda *_: None

    session = SimpleNamespace(
        io_binding=Binding,
        run_with_iobinding=lambda binding: None,
        get_outputs=lambda: [SimpleNamespace(name="y")],
    )
    monkeypatch.setattr(
        ort.OrtValue, "ortvalue_from_numpy", lambda array, kind, index: (kind, index)
    )
    measure_copies(session, {"x": np.zeros(1)}, device="cuda:1", seconds=0.0)
    assert set(placed) == {("cuda", 1)}

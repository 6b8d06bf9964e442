"""Memory, energy and copies of a GPU, on doubles of the driver: none of it has run on a GPU."""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace

import numpy as np
import pytest

from enginery.bench.backends import worker as contestant
from enginery.bench.backends.copies import Copies, measure_copies
from enginery.bench.backends.nvml import Nvml, _bus_id, _Process
from enginery.bench.measurement.shapes import _gpu_of, _told
from enginery.core.errors import ProviderError
from tests.bench.made import CPU, CUDA, save_detector


class Function:
    def __init__(self, call):
        self._call = call
        self.restype = None

    def __call__(self, *arguments):
        return self._call(*arguments)


class Driver:
    """What NVML answers; `refuses` are functions that return an error."""

    def __init__(self, *, refuses=(), pids=()):
        self.refuses = refuses
        self.pids = pids
        self.millijoules = 5_000
        self.shut = 0
        self.nvmlErrorString = Function(lambda code: b"Not Supported")

    def __getattr__(self, name):
        if not name.startswith("nvml"):
            raise AttributeError(name)
        return Function(lambda *arguments: self._do(name, arguments))

    def _do(self, name, arguments):
        if name in self.refuses:
            return 3
        if name == "nvmlShutdown":
            self.shut += 1
        if name == "nvmlDeviceGetTotalEnergyConsumption":
            arguments[1]._obj.value = self.millijoules
        if name == "nvmlDeviceGetComputeRunningProcesses_v3":
            room = arguments[1]._obj
            many = len(self.pids) > room.value
            room.value = len(self.pids)
            if many:
                return 7
            for index, (pid, size) in enumerate(self.pids):
                arguments[2][index] = _Process(pid, size, 0, 0)
        return 0


def test_energy_is_in_joules():
    with Nvml(Driver(), b"0000:65:00.0") as nvml:
        assert nvml.energy_joules() == 5.0


def test_memory_is_that_of_the_process_among_many():
    others = [(pid, 1 << 20) for pid in range(2, 102)]
    with Nvml(Driver(pids=[*others, (os.getpid(), 3 << 30)]), b"") as nvml:
        assert nvml.memory_bytes(os.getpid()) == 3 << 30


@pytest.mark.parametrize("pids", [[], [(1, 2**64 - 1)]], ids=["hidden", "not told"])
def test_memory_that_is_not_told_is_an_error_and_not_zero(pids):
    with Nvml(Driver(pids=pids), b"") as nvml, pytest.raises(ProviderError, match="not list"):
        nvml.memory_bytes(1)


@pytest.mark.parametrize("refused", ["nvmlInit_v2", "nvmlDeviceGetHandleByPciBusId_v2"])
def test_driver_that_refuses_is_quoted(refused):
    with pytest.raises(ProviderError, match="Not Supported"):
        Nvml(Driver(refuses=[refused]), b"")


def test_energy_of_a_gpu_that_tells_none():
    driver = Driver(refuses=["nvmlDeviceGetTotalEnergyConsumption"])
    with Nvml(driver, b"") as nvml, pytest.raises(ProviderError, match="tells no energy"):
        nvml.energy_joules()


def test_closing_lets_go_once():
    driver = Driver()
    nvml = Nvml(driver, b"")
    nvml.close()
    nvml.close()
    assert driver.shut == 1


def test_layout_of_a_process_is_nvmls():
    # nvml.h: unsigned int, 4 bytes of padding, unsigned long long, two unsigned ints.
    assert ctypes.sizeof(_Process) == 24


class Gpu:
    """NVML as a contestant opens it, which tells one figure after another."""

    def __init__(self, *told):
        self._told = list(told)

    def open(self, device_id):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def memory_bytes(self, pid):
        found = self._told.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


def test_memory_of_a_gpu_is_the_most_seen_after_a_turn_and_not_what_looking_takes(monkeypatch):
    events = []
    held = SimpleNamespace(providers=[CUDA], facts=lambda: events.append("facts") or {})
    given = contestant.Contestant()
    given._opened, given._run = held, lambda: events.append("run")
    monkeypatch.setattr(contestant, "Nvml", Gpu(3 << 30, 5 << 30, 4 << 30))
    given.turn({"runs": 1})
    given.turn({"runs": 1, "cold": True})
    found = given.memory({})
    assert (found["device_memory_bytes"], events[-1]) == (5 << 30, "facts")
    # What the driver does not tell is asked once, and has its reason.
    other = contestant.Contestant()
    other._opened, other._run = held, lambda: None
    monkeypatch.setattr(contestant, "Nvml", Gpu(ProviderError("a container hides it.")))
    other.turn({"runs": 1})
    other.turn({"runs": 1})
    assert other.memory({})["device_memory"] == "a container hides it."


def test_no_gpu_is_said():
    with pytest.raises(ProviderError, match=r"NVIDIA driver|libnvidia-ml"):
        Nvml.open()


class Stub:
    """A contender that answers what a GPU tells."""

    def __init__(self, provider, answers):
        self.plan = SimpleNamespace(kind="onnxruntime", device="cpu")
        self.loaded = {"providers": [provider]}
        self.asked = []
        self._answers = answers

    def ask(self, what, **values):
        self.asked.append(what)
        answer = self._answers.get(what, ProviderError(f"{what} is not told."))
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_what_a_gpu_tells_is_kept_and_what_not_has_its_reason():
    told, unknown = Stub(CUDA, {"energy": {"joules": 0.5}}), {}
    assert _told(told, "energy", unknown) == {"joules": 0.5}
    assert _told(told, "copies", unknown, device="cuda") is None
    assert unknown == {"host copies": "copies is not told."}


def test_nothing_is_asked_of_a_gpu_that_is_not_there():
    stub, unknown = Stub(CPU, {}), {}
    assert _told(stub, "energy", unknown) is None
    assert (stub.asked, unknown) == ([], {})


def test_copies_through_iobinding_give_all_three_parts(tmp_path):
    """On the CPU there is nothing to copy, and the same calls are made."""
    import onnxruntime as ort

    model = save_detector(tmp_path / "d.onnx")
    session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    feeds = {"x": np.zeros((1, 3, 64, 64), "float32")}
    found = measure_copies(session, feeds, device="cpu", seconds=0.0)
    assert min(found.in_ms, found.device_ms, found.out_ms) > 0


def test_copies_are_told_apart_by_their_clock():
    class Session:
        def io_binding(self):
            return self

        def __getattr__(self, name):
            return lambda *_: None

        def get_outputs(self):
            return []

    ticks = iter(range(10**6))
    steps = {0: 0.0, 1: 2.0, 2: 7.0, 3: 8.0}

    def clock():  # start, copied, computed, done, and then whether to go on
        tick = next(ticks)
        return 0.0 if tick == 0 else steps[(tick - 1) % 4]

    found = measure_copies(Session(), {}, device="cuda", seconds=-1, clock=clock)
    assert found == Copies(2000.0, 5000.0, 1000.0)
    assert found.share == pytest.approx(3 / 8)


def test_the_gpu_that_is_asked_for_is_the_one_that_is_measured():
    told = Stub({**CUDA, "options": {"device_id": "1"}}, {})
    assert (_gpu_of(told), _gpu_of(Stub(CUDA, {}))) == ("cuda:1", "cuda:0")
    asked = []
    names = {
        "cuDeviceGet": lambda device, index: asked.append(index),
        "cuDeviceGetPCIBusId": lambda *_: None,
    }
    _bus_id(SimpleNamespace(**names), 1)
    assert asked == [1]


def test_copies_are_measured_on_the_gpu_that_is_asked_for(monkeypatch):
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

"""The model of one operation, and probes in a process that may crash."""

import ctypes
import subprocess
import sys
from types import SimpleNamespace

import pytest

from enginery.core.errors import ProviderError
from enginery.doctor import probe
from enginery.doctor.probe import ONE_OP_MODEL, examine_provider, run_probe
from enginery.runtime.providers import gpus
from enginery.runtime.providers.availability import Unavailable
from enginery.runtime.providers.known import CPU, CUDA, TENSORRT


def test_one_op_model_equals_the_one_written_with_onnx():
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2]) for name in "xy"]
    node = helper.make_node("Add", ["x", "x"], ["y"])
    expected = helper.make_model(
        helper.make_graph([node], "one_op", values[:1], values[1:]),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    model = onnx.load_from_string(ONE_OP_MODEL)
    onnx.checker.check_model(model, full_check=True)
    assert model == expected


def test_cpu_runs_the_model_and_files_of_the_working_directory_are_not_imported(
    tmp_path, monkeypatch
):
    (tmp_path / "onnxruntime.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    result = run_probe("provider", CPU, timeout_seconds=120)
    assert result == {"state": "runs", "reason": "", "remedy": ""}


def test_unavailable_providers_of_this_machine_have_a_reason_and_a_remedy():
    answer = run_probe("machine", timeout_seconds=120)
    assert CPU not in answer["unavailable"]
    for status in answer["unavailable"].values():
        assert status["reason"]
        assert status["remedy"]
        assert status["state"] in ("unavailable", "not built in")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "import os, signal; print('{}', flush=True); os.kill(os.getpid(), 11)",
            "crashed with signal 11",
        ),
        ("raise OSError('libgone.so')", r"ended with status 1 \(OSError: libgone.so\)"),
        ("import time; time.sleep(600)", "no result after 5 seconds"),
        ("", "ended with status 0"),
        ("print('not json')", "ended with status 0"),
        ("print([1])", "ended with status 0"),
    ],
)
def test_process_without_a_result_is_an_error(monkeypatch, code, words):
    run = subprocess.run

    def run_code(command, **options):
        return run([sys.executable, "-c", code], **options)

    monkeypatch.setattr(probe.subprocess, "run", run_code)
    with pytest.raises(ProviderError, match=words):
        run_probe("machine", timeout_seconds=5)


def test_output_before_the_result_is_ignored(monkeypatch):
    done = SimpleNamespace(stdout=b'banner\n{"a": 1}\n', stderr=b"", returncode=0)
    monkeypatch.setattr(probe.subprocess, "run", lambda *_, **__: done)
    assert run_probe("machine", timeout_seconds=1) == {"a": 1}


class Session:
    """A session that accepts the model but may compute something else."""

    def __init__(self, providers=(CUDA, CPU), placed=(CUDA,), answer=(2.0, 5.0)):
        self.providers, self.placed, self.answer = list(providers), placed, list(answer)

    def get_providers(self):
        return self.providers

    def get_provider_graph_assignment_info(self):
        return [SimpleNamespace(ep_name=name) for name in self.placed]

    def run(self, names, feeds):
        return [SimpleNamespace(tolist=lambda: self.answer)]


@pytest.mark.parametrize(
    ("session", "reason"),
    [
        (Session(), ""),
        (Session(providers=[CPU]), "ONNX Runtime left it out of the session"),
        (Session(placed=[CPU]), "the operation ran on CPUExecutionProvider instead"),
        (Session(answer=[1.0, 2.5]), "wrong result: found [1.0, 2.5], expected [2.0, 5.0]"),
    ],
    ids=["runs", "does not register", "leaves the operation to the CPU", "wrong result"],
)
def test_a_provider_runs_if_it_computes_the_operation_itself(monkeypatch, session, reason):
    monkeypatch.setattr(probe.availability, "unavailable_reason", lambda name: None)
    monkeypatch.setattr(probe.availability, "provider_warning", lambda name: "")
    monkeypatch.setattr(probe, "_session", lambda name: session)
    status = examine_provider(CUDA)
    assert status["reason"] == reason
    assert status["state"] == ("fails to run" if reason else "runs")


def test_missing_libraries_are_named_beside_a_missing_driver(monkeypatch):
    lost = {
        name: f"{name}: cannot open shared object file: No such file or directory"
        for name in ("libcuda.so.1", "libnvinfer.so.10")
    }
    driver = Unavailable("there is no NVIDIA driver: libcuda.so.1 was not found", "Install it.")
    monkeypatch.setattr(probe.availability, "unavailable_reason", lambda name: driver)
    monkeypatch.setattr(probe.availability, "missing_for", lambda name: lost)
    status = examine_provider(TENSORRT)
    assert status["reason"] == (
        "there is no NVIDIA driver: libcuda.so.1 was not found; libnvinfer.so.10 was not found"
    )
    assert status["remedy"].startswith("Install it. Then: pip install 'onnxruntime-gpu[cuda,cudnn]")
    assert "'tensorrt-cu13>=10,<11'" in status["remedy"]


def test_a_broken_onnxruntime_is_the_cpus_reason_too(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    status = examine_provider(CPU)
    assert status["state"] != "runs"
    assert "onnxruntime" in status["reason"]
    assert "pip uninstall -y" in status["remedy"]


class FakeCuda:
    """Simulate the driver API with two GPUs."""

    names = (b"NVIDIA L4", b"Tesla T4")
    capabilities = ((8, 9), (7, 5))

    def cuDeviceGetCount(self, out):  # noqa: N802
        out._obj.value = 2

    def cuDeviceGet(self, out, index):  # noqa: N802
        out._obj.value = index

    def cuDeviceGetName(self, buffer, size, device):  # noqa: N802
        assert size == len(buffer)
        buffer.value = self.names[device.value]

    def cuDeviceTotalMem_v2(self, out, device):  # noqa: N802
        assert isinstance(out._obj, ctypes.c_size_t)
        out._obj.value = 16 << 30

    def cuDeviceGetAttribute(self, out, attribute, device):  # noqa: N802
        out._obj.value = self.capabilities[device.value][attribute - 75]


def test_gpus_come_from_the_driver(monkeypatch):
    monkeypatch.setattr(gpus, "cuda_driver", lambda: gpus.CudaDriver((13, 0), 2))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeCuda())
    monkeypatch.setattr(probe, "_library_versions", dict)
    monkeypatch.setattr(probe, "_free_bytes", lambda device_id: 8 << 30)
    monkeypatch.setattr(probe.availability, "preload_nvidia", lambda: None)
    monkeypatch.setattr(probe.availability, "unavailable_reason", lambda name: None)
    nvidia = probe.examine_machine()["nvidia"]
    assert nvidia["driver_cuda"] == "13.0"
    assert nvidia["gpus"] == [
        {
            "name": name,
            "compute_capability": capability,
            "memory_total_bytes": 16 << 30,
            "memory_free_bytes": 8 << 30,
        }
        for name, capability in [("NVIDIA L4", "8.9"), ("Tesla T4", "7.5")]
    ]

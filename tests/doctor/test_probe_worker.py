"""The model of one operation, and probes in a subprocess that may crash."""

import sys

import numpy as np
import pytest

from enginery.doctor import probe_worker
from enginery.doctor.probe_worker import EXPECTED, FEED, one_op_model
from enginery.doctor.subprocess_probe import ProbeResult, last_error, run_probe
from enginery.runtime.providers.availability import Unavailable
from enginery.runtime.providers.known import CPU, CUDA, TENSORRT


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write the module `answering`, which a subprocess runs."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(code):
        (tmp_path / "answering.py").write_text(code)
        return "answering"

    return write


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
    model = onnx.load_from_string(one_op_model())
    onnx.checker.check_model(model, full_check=True)
    assert model == expected
    np.testing.assert_array_equal(FEED + FEED, EXPECTED)


def test_cpu_runs_the_model_in_a_subprocess():
    answer = run_probe(["provider", CPU], timeout_seconds=120)
    assert answer.values["registers"]
    assert answer.values["runs"]
    assert answer.values["reason"] == ""


def test_compiled_providers_are_those_of_onnxruntime():
    import onnxruntime

    answer = run_probe(["compiled"], timeout_seconds=120)
    assert answer.values["providers"] == onnxruntime.get_available_providers()


def test_unknown_probe_fails():
    answer = run_probe(["weather"], timeout_seconds=120)
    assert (answer.values, answer.reason) == ({}, "the process ended with status 1")


def test_crash_is_a_result(module):
    code = "import os, signal; print('{}'); os.kill(os.getpid(), signal.SIGSEGV)"
    answer = run_probe([], timeout_seconds=120, module=module(code))
    assert answer == ProbeResult(reason="the process died of SIGSEGV")


def test_probe_that_hangs_is_ended(module):
    answer = run_probe([], timeout_seconds=0.5, module=module("import time; time.sleep(600)"))
    assert answer.reason == "no answer within 0.5 seconds"


def test_failed_probe_has_the_end_of_its_traceback(module):
    answer = run_probe([], timeout_seconds=120, module=module("raise OSError('libgone.so')"))
    assert answer.reason == "the process ended with status 1"
    assert answer.log == "OSError: libgone.so"


@pytest.mark.parametrize("output", ["", "not json", "[1]"])
def test_output_that_is_not_json_has_no_values(module, output):
    assert not run_probe([], timeout_seconds=120, module=module(f"print({output!r})")).values


def test_output_before_the_result_is_ignored(module):
    answer = run_probe(
        [], timeout_seconds=120, module=module("print('banner'); print('{\"a\": 1}')")
    )
    assert answer.values == {"a": 1}


def test_files_of_the_working_directory_are_not_imported(tmp_path, monkeypatch):
    (tmp_path / "onnxruntime.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    assert run_probe(["provider", CPU], timeout_seconds=120).values["runs"]


def test_onnxruntimes_last_error_is_found_in_its_log():
    log = (
        "\x1b[1;31m2026-11-21 09:20:26.8 [E:onnxruntime:Default, provider_bridge_ort.cc:2458 "
        "operator()] /src/provider_bridge_ort.cc:2043 Get() [ONNXRuntimeError] : 1 : FAIL : "
        "Failed to load library x.so with error: libcublasLt.so.13: cannot open\n\x1b[m\n"
        "2026-11-21 09:20:26.9 [W:onnxruntime:Default, x.cc:1 f] Failed to create\n"
    )
    assert last_error(log) == (
        "Failed to load library x.so with error: libcublasLt.so.13: cannot open"
    )
    assert last_error("a banner\n") == ""


class Session:
    """A session that accepts the model but computes something else."""

    def __init__(self, providers=(CUDA, CPU), placed=(CUDA,), answer=EXPECTED):
        self.providers, self.placed, self.answer = list(providers), placed, answer

    def get_providers(self):
        return self.providers

    def run(self, names, feeds):
        return [self.answer]


@pytest.fixture
def examined(monkeypatch):
    """Examines CUDA on a machine where nothing is missing, with the session given."""

    def examine(session):
        monkeypatch.setattr(probe_worker.availability, "unavailable_reason", lambda name: None)
        monkeypatch.setattr(probe_worker.availability, "provider_warning", lambda name: "")
        monkeypatch.setattr(probe_worker, "_session", lambda name: session)
        monkeypatch.setattr(probe_worker, "_placement", lambda session: set(session.placed))
        return probe_worker.examine_provider(CUDA)

    return examine


def test_a_provider_that_runs_the_operation_itself_runs(examined):
    assert examined(Session())["runs"]


def test_a_provider_that_onnxruntime_leaves_out_does_not_register(examined):
    status = examined(Session(providers=[CPU]))
    assert (status["registers"], status["runs"]) == (False, False)
    assert "left it out" in status["reason"]


def test_a_provider_that_leaves_the_operation_to_the_cpu_does_not_run(examined):
    status = examined(Session(placed=[CPU]))
    assert (status["registers"], status["runs"]) == (True, False)
    assert status["reason"] == "the operation ran on CPUExecutionProvider instead"


def test_wrong_result_does_not_count_as_running(examined):
    status = examined(Session(answer=FEED))
    assert not status["runs"]
    assert status["reason"] == "wrong result: found [1.0, 2.5], expected [2.0, 5.0]"


def test_placement_is_read_from_onnxruntime():
    assert probe_worker._placement(probe_worker._session(CPU)) == {CPU}


def test_missing_libraries_are_named_beside_a_missing_driver(monkeypatch):
    lost = {
        name: f"{name}: cannot open shared object file: No such file or directory"
        for name in ("libcuda.so.1", "libnvinfer.so.10")
    }
    driver = Unavailable("there is no NVIDIA driver: libcuda.so.1 was not found", "Install it.")
    monkeypatch.setattr(probe_worker.availability, "unavailable_reason", lambda name: driver)
    monkeypatch.setattr(probe_worker.availability, "missing_for", lambda name: lost)
    status = probe_worker.examine_provider(TENSORRT)
    assert status["missing"] == list(lost)
    assert status["reason"] == (
        "there is no NVIDIA driver: libcuda.so.1 was not found; libnvinfer.so.10 was not found"
    )
    assert status["remedy"].startswith("Install it. Then: pip install 'onnxruntime-gpu[cuda,cudnn]")
    assert "'tensorrt-cu13>=10,<11'" in status["remedy"]


@pytest.mark.parametrize("built_in", [True, False])
def test_missing_cudnn_is_named_for_a_cuda_that_is_built_in(monkeypatch, built_in):
    availability = probe_worker.availability
    driver = Unavailable("there is no NVIDIA driver: libcuda.so.1 was not found", "Install it.")
    monkeypatch.setattr(availability, "unavailable_reason", lambda name: driver)
    monkeypatch.setattr(availability, "missing_for", lambda name: {})
    monkeypatch.setattr(availability, "compiled_providers", lambda: [CUDA] if built_in else [])
    monkeypatch.setattr(
        availability.libraries, "load_error", lambda name, *_: f"{name}: cannot open shared object"
    )
    status = probe_worker.examine_provider(CUDA)
    words = "; convolutions and other cuDNN operations will fail (libcudnn.so.9 was not found)"
    assert status["reason"] == driver.reason + (words if built_in else "")
    assert ("nvidia-cublas" in status["remedy"]) == built_in


def test_a_broken_onnxruntime_is_the_cpus_reason_too(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    status = probe_worker.examine_provider(CPU)
    assert not status["runs"]
    assert "onnxruntime" in status["reason"]
    assert "pip uninstall -y" in status["remedy"]

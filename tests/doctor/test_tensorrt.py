"""Findings about the installed TensorRT packages."""

import pytest

from enginery.doctor import tensorrt
from enginery.doctor.report import Gpu, NvidiaStatus
from enginery.doctor.tensorrt import tensorrt_findings


def machine(name, capability):
    return NvidiaStatus(
        driver="580.65.06",
        driver_cuda="13.0",
        problem="",
        gpus=(Gpu(name, capability, 1 << 34, 1 << 33),),
        libraries={},
        onnxruntime_cuda="13",
    )


@pytest.fixture(autouse=True)
def _rtx_installed(monkeypatch):
    monkeypatch.setattr(tensorrt, "has_tensorrt", lambda flavor: True)


def test_gpu_without_tensorrt_rtx_support_is_a_note_with_a_remedy():
    (finding,) = tensorrt_findings(machine("NVIDIA H200", "9.0"))
    assert finding.severity == "note"
    assert finding.evidence == (
        "NVIDIA H200 has compute capability 9.0, but TensorRT for RTX has no support for 9.0: "
        "it supports 7.5, 8.0, 8.6, 8.9, 12.0, 12.1."
    )
    assert "--flavor tensorrt (pip install 'tensorrt-cu13>=10,<11')" in finding.remedy
    assert "--providers cuda" in finding.remedy


@pytest.mark.parametrize("capability", ["8.9", ""])
def test_supported_or_unknown_gpu_has_no_finding(capability):
    assert list(tensorrt_findings(machine("NVIDIA L4", capability))) == []


def test_without_tensorrt_rtx_its_gpus_are_not_checked(monkeypatch):
    monkeypatch.setattr(tensorrt, "has_tensorrt", lambda flavor: False)
    assert list(tensorrt_findings(machine("NVIDIA H200", "9.0"))) == []


@pytest.mark.parametrize("name", ["tensorrt_cu12", "tensorrt-cu12-libs"])
def test_tensorrt_for_another_cuda_than_onnxruntimes_is_an_error(monkeypatch, tmp_path, name):
    monkeypatch.setattr(tensorrt, "cuda_major", lambda: 13)
    folder = tmp_path / f"{name.replace('-', '_')}-10.16.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 10.16.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    (finding,) = tensorrt_findings(machine("NVIDIA L4", "8.9"))
    assert finding.severity == "error"
    assert finding.problem.endswith("10.16.0 is for CUDA 12, onnxruntime for CUDA 13")
    assert finding.remedy.endswith("pip install 'tensorrt-cu13>=10,<11'")

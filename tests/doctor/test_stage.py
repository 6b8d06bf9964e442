"""The examination of this machine, and findings for simulated ones."""

import json
from dataclasses import replace

import pytest

from enginery.core.errors import CheckFailedError, ProviderError
from enginery.doctor import stage
from enginery.doctor.config import DoctorConfig
from enginery.doctor.report import Gpu, NvidiaStatus, PackageStatus, ProviderStatus
from enginery.doctor.stage import (
    examine,
    examine_machine,
    free_bytes,
    gpu_findings,
    machine_findings,
    provider_findings,
)
from enginery.runtime.providers.gpus import cuda_driver
from enginery.runtime.providers.known import CPU, CUDA, SHORT_NAMES, TENSORRT

GIB = 1 << 30
WITH_GPU = NvidiaStatus("580.65.06", "13.0", "", (Gpu("NVIDIA L4", "8.9", 0, 0),), {}, "13")
WITHOUT = replace(WITH_GPU, driver="", problem="there is no NVIDIA driver", gpus=())
LOST = ProviderStatus(CUDA, "unavailable", "libcublas.so.13 was not found", "pip install")
RUNS = [ProviderStatus(name, "runs", "", "") for name in (CPU, CUDA)]
MACHINE = examine_machine()


@pytest.fixture(scope="module")
def report():
    return examine(DoctorConfig())


def test_examination_of_this_machine(report):
    assert report.runs("cpu")
    report.require("CPUExecutionProvider")
    assert [status.name for status in report.providers] == list(SHORT_NAMES.values())
    plain = json.loads(json.dumps(report.as_json()))
    providers = {provider["short_name"]: provider for provider in plain["providers"]}
    assert providers["cpu"]["state"] == "runs"
    assert providers["openvino"]["package"] == "onnxruntime-openvino"
    for provider in providers.values():
        assert provider["runs"] or (provider["reason"] and provider["remedy"])
    assert plain["machine"]["memory_total_bytes"] > 0
    assert {package["name"] for package in plain["packages"]} >= {"numpy", "onnxruntime-gpu"}
    order = [["error", "warning", "note"].index(finding.severity) for finding in report.findings]
    assert order == sorted(order)
    for table in report.tables():
        for row in table.rows:
            assert list(row) == list(table.rows[0])
            assert all(isinstance(cell, str) for cell in row.values())
    rows = {row[0]: row for row in table_rows(report, "Execution providers")}
    assert rows["cuda"][2] == "onnxruntime-gpu"
    assert rows["cpu"][1:3] == ("runs", "onnxruntime")


@pytest.mark.skipif(not cuda_driver().problem, reason="this machine has an NVIDIA driver")
def test_without_a_gpu_only_a_required_cuda_is_an_error(report):
    with pytest.raises(CheckFailedError) as caught:
        report.require("cuda")
    assert caught.value.exit_code == 1
    assert "libcuda.so.1 was not found" in caught.value.message
    assert "Install the NVIDIA driver" in caught.value.do
    # Where PyTorch's CUDA build is installed, its libraries are there and only the driver is not.
    if "libcublas.so.13" in caught.value.message:
        assert "pip install 'onnxruntime-gpu[cuda,cudnn]" in caught.value.do
    notes = [finding.problem for finding in report.findings if finding.severity == "note"]
    assert "no GPU can be used; models run on the CPU" in notes
    assert not [finding for finding in report.findings if "cuda does not run" in finding.problem]


def test_unknown_required_provider_is_an_error_before_the_examination(monkeypatch):
    monkeypatch.setattr(stage, "run_probe", None)
    with pytest.raises(ProviderError, match="did you mean 'cuda'"):
        examine(DoctorConfig(require="cudaa"))


def test_a_provider_that_was_not_examined_cannot_be_required(report):
    with pytest.raises(CheckFailedError, match="it was not examined"):
        replace(report, providers=()).require("rocm")


def test_a_crashed_probe_is_the_reason(monkeypatch):
    def crash(*words, timeout_seconds):
        raise ProviderError("the process crashed with signal 11")

    monkeypatch.setattr(stage, "run_probe", crash)
    report = examine(DoctorConfig())
    assert report.nvidia.problem == "the process crashed with signal 11"
    assert {(s.state, s.reason) for s in report.providers} == {
        ("fails to run", "the process crashed with signal 11")
    }


# GPUs


def only(status, **options):
    (finding,) = gpu_findings(status, **{"cpu_runs": True, **options})
    return finding


def test_working_gpu_has_no_findings(monkeypatch):
    assert list(gpu_findings(WITH_GPU, cpu_runs=True)) == []


def test_missing_driver_is_a_note():
    finding = only(WITHOUT)
    assert (finding.severity, finding.evidence) == ("note", "there is no NVIDIA driver")
    assert finding.problem == "no GPU can be used; models run on the CPU"
    assert only(WITHOUT, cpu_runs=False).problem == "no GPU can be used"


def test_a_driver_without_a_gpu_is_an_error():
    finding = only(replace(WITH_GPU, gpus=(), problem="the NVIDIA driver sees no GPU"))
    assert (finding.severity, finding.evidence) == ("error", "the NVIDIA driver sees no GPU")
    assert "CUDA_VISIBLE_DEVICES" in finding.remedy


def test_a_gpu_before_turing_is_too_old_for_cuda_13():
    old = replace(WITH_GPU, gpus=(Gpu("Tesla V100", "7.0", 16 * GIB, 15 * GIB),))
    assert only(old).problem.startswith("Tesla V100 is not supported by CUDA 13")
    assert list(gpu_findings(replace(old, onnxruntime_cuda="12"), cpu_runs=True))[:-1] == []


@pytest.mark.parametrize("is_installed", [True, False])
def test_gpu_without_tensorrt_rtx_support_is_a_note_with_a_remedy(monkeypatch, is_installed):
    monkeypatch.setattr(stage, "has_tensorrt", lambda flavor: is_installed)
    hopper = replace(WITH_GPU, gpus=(Gpu("NVIDIA H200", "9.0", 0, 0),))
    findings = list(gpu_findings(hopper, cpu_runs=True))
    assert len(findings) == is_installed
    for finding in findings:
        assert finding.severity == "note"
        assert finding.evidence.startswith("NVIDIA H200 has compute capability 9.0, but TensorRT")
        assert "--flavor tensorrt (pip install 'tensorrt-cu13>=10,<11')" in finding.remedy


# Providers


def found(*, providers=(RUNS[0], LOST), nvidia=WITHOUT, required="", variable=""):
    environment = {"ENGINERY_PROVIDERS": variable} if variable else {}
    return list(provider_findings(providers, nvidia, required, environment))


def test_cuda_that_does_not_run_is_an_error_with_a_gpu():
    assert found() == []
    (finding,) = found(nvidia=WITH_GPU)
    assert (finding.severity, finding.problem) == ("error", "cuda does not run: unavailable")
    assert (finding.evidence, finding.remedy) == ("libcublas.so.13 was not found", "pip install")


def test_tensorrt_that_is_not_installed_is_a_note_unless_it_is_required():
    lost = replace(LOST, name=TENSORRT)
    for required, severities in (("", ["note"]), (TENSORRT, ["error"])):
        findings = found(
            providers=(*RUNS, lost), nvidia=WITH_GPU, required=required, variable="cuda"
        )
        assert [finding.severity for finding in findings] == severities
    absent = replace(lost, state="not built in")
    assert found(providers=(*RUNS, absent), nvidia=WITH_GPU, variable="cuda") == []


def test_provider_that_runs_with_limitations_is_a_warning():
    limited = replace(RUNS[1], reason="no convolutions")
    (finding,) = found(providers=(RUNS[0], limited))
    assert (finding.severity, finding.evidence) == ("warning", "no convolutions")


def test_gpu_that_no_setting_names_is_noted():
    (finding,) = found(nvidia=WITH_GPU, providers=RUNS)
    assert finding.severity == "note"
    assert finding.evidence == "NVIDIA L4, which cuda can use; ENGINERY_PROVIDERS is not set"
    assert finding.remedy == "Set ENGINERY_PROVIDERS=cuda, or pass --providers cuda."
    (finding,) = found(nvidia=WITH_GPU, providers=RUNS, variable="cpu,cuda")
    assert finding.evidence.endswith("ENGINERY_PROVIDERS is cpu,cuda")
    assert found(nvidia=WITH_GPU, providers=RUNS, variable="cuda,cpu") == []


@pytest.mark.parametrize(
    ("names", "words"),
    [({"required": CUDA}, ""), ({"variable": "cuda,cpu"}, "; ENGINERY_PROVIDERS names it")],
)
def test_a_named_provider_that_does_not_run_here_is_an_error(names, words):
    (finding,) = found(**names)
    problem = f"cuda does not run: unavailable{words}"
    assert (finding.severity, finding.problem) == ("error", problem)
    assert (finding.evidence, finding.remedy) == ("libcublas.so.13 was not found", "pip install")


@pytest.mark.parametrize(
    ("text", "evidence"),
    [
        ("cudaa", "unknown execution provider 'cudaa'; did you mean 'cuda'?"),
        ("cuda; cuda.gpu_mem_limit=much", "option 'gpu_mem_limit' for cuda: found 'much'"),
    ],
)
def test_a_variable_that_cannot_be_read_is_an_error(text, evidence):
    (finding,) = found(variable=text)
    assert (finding.severity, finding.problem) == ("error", "ENGINERY_PROVIDERS cannot be used")
    assert finding.evidence.startswith(evidence)
    assert finding.remedy


# The machine


def test_this_machine_has_a_processor_memory_and_disk(tmp_path):
    assert MACHINE.cpu
    assert MACHINE.usable_cpus >= 1
    assert 0 < MACHINE.memory_available_bytes <= MACHINE.memory_total_bytes
    assert free_bytes(tmp_path / "not" / "yet") == pytest.approx(free_bytes(tmp_path), rel=0.05)


def test_little_disk_and_memory_are_warnings():
    plenty = replace(
        MACHINE,
        store_free_bytes=100 * GIB,
        temporary_free_bytes=100 * GIB,
        memory_available_bytes=16 * GIB,
    )
    assert list(machine_findings(plenty)) == []
    little = replace(plenty, temporary_free_bytes=GIB, memory_available_bytes=GIB)
    disk, memory = machine_findings(little)
    assert disk.problem.startswith("little disk space at ")
    assert "1.0 GiB free" in disk.evidence
    assert memory.problem == "little memory"
    # Where psutil is missing the memory is unknown, which is not little.
    assert list(machine_findings(replace(plenty, memory_available_bytes=0))) == []


def test_store_that_is_not_writable_is_an_error(monkeypatch):
    monkeypatch.setattr(stage.os, "access", lambda path, mode: False)
    finding = next(iter(machine_findings(MACHINE)))
    assert (finding.severity, finding.problem) == ("error", "the store is not writable")
    assert "ENGINERY_HOME" in finding.remedy


# Tables


def test_providers_of_other_builds_are_counted(report):
    providers = [ProviderStatus(name, "not built in", "", "") for name in SHORT_NAMES.values()]
    rows = table_rows(replace(report, providers=tuple(providers)), "Execution providers")
    shown = [row[0] for row in rows[:-1]]
    assert shown == ["cpu", "cuda", "tensorrt", "tensorrt-rtx", "openvino"]
    assert rows[-1][0] == f"and {len(SHORT_NAMES) - len(shown)} more"
    # What is built in has a row, whoever built it; the endpoint of Azure runs nothing.
    providers = [replace(status, state="unavailable") for status in providers]
    rows = table_rows(replace(report, providers=tuple(providers)), "Execution providers")
    assert len(rows) == len(SHORT_NAMES)
    assert rows[-1][0] == "and 1 more"


def test_packages_that_are_not_installed_are_no_faults(report):
    packages = (
        PackageStatus("numpy", "2.4.6", ">=2", "", fits=True),
        PackageStatus("onnx", "1.0", ">=1.21", "export", fits=False),
        PackageStatus("torch", "", ">=2.9", "export", fits=False),
        PackageStatus("onnxruntime", "", ">=1.31", "cpu", False, "onnxruntime-gpu"),
        PackageStatus("oras", "", ">=0.2", "oci", fits=False),
        PackageStatus("sphinx", "", ">=8", "docs", fits=False),
        PackageStatus("furo", "", ">=2025", "docs", fits=False),
    )
    rows = table_rows(replace(report, packages=packages), "Packages")
    assert [(row[0], *row[3:]) for row in rows] == [
        ("numpy", "", "yes"),
        ("onnx", "export", "no"),
        ("torch", "export", "not installed"),
        ("onnxruntime", "cpu", "not needed beside onnxruntime-gpu"),
        ("extras without packages", "oci, docs", "not installed"),
    ]


def table_rows(report, title):
    (table,) = [table for table in report.tables() if table.title == title]
    return [tuple(row.values()) for row in table.rows]

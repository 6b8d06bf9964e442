"""The examination of this machine, and findings for simulated ones."""

import json
from dataclasses import asdict, replace

import pytest

from enginery.core.errors import CheckFailedError, ProviderError
from enginery.doctor import stage
from enginery.doctor.config import DoctorConfig
from enginery.doctor.machine import machine_findings
from enginery.doctor.report import Gpu, NvidiaStatus, PackageStatus, ProviderStatus
from enginery.doctor.stage import (
    absent_statuses,
    examine,
    provider_findings,
    provider_status,
)
from enginery.doctor.subprocess_probe import ProbeResult
from enginery.runtime.providers.gpus import cuda_driver
from enginery.runtime.providers.known import CPU, CUDA, KNOWN_PROVIDERS, TENSORRT, TENSORRT_RTX

GIB = 1 << 30
WITH_GPU = NvidiaStatus("580.65.06", "13.0", "", (Gpu("NVIDIA L4", "8.9", 0, 0),), {}, "13")
WITHOUT = replace(WITH_GPU, driver="", problem="there is no NVIDIA driver", gpus=())
LOST = ProviderStatus(
    CUDA, True, ("libcublas.so.13",), False, False, "libcublas.so.13 was not found", "pip install"
)


@pytest.fixture(scope="module")
def report():
    return examine(DoctorConfig())


@pytest.mark.more
def test_this_machine_runs_the_cpu_provider(report):
    assert report.runs("cpu")
    report.require("CPUExecutionProvider")
    assert {CPU, CUDA, TENSORRT, TENSORRT_RTX} <= {status.name for status in report.providers}


def test_the_report_is_plain_json(report):
    plain = json.loads(json.dumps(report.as_json()))
    states = {provider["name"]: provider["state"] for provider in plain["providers"]}
    assert states[CPU] == "runs"
    assert plain["machine"]["memory_total_bytes"] > 0
    assert {package["name"] for package in plain["packages"]} >= {"numpy", "onnxruntime-gpu"}


def test_the_tables_are_rectangular_text(report):
    titles = [table.title for table in report.tables()]
    assert titles == ["Machine", "NVIDIA", "Packages", "Execution providers", "Findings"]
    for table in report.tables():
        for row in table.rows:
            assert list(row) == list(table.rows[0])
            assert all(isinstance(cell, str) for cell in row.values())


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
    problems = [f.problem for f in report.findings if f.severity == "note"]
    assert "no GPU can be used; models run on the CPU" in problems
    assert not [f for f in report.findings if "cuda does not run" in f.problem]


@pytest.mark.more
def test_a_required_provider_is_examined_and_its_absence_is_an_error():
    report = examine(DoctorConfig(require="openvino"))
    with pytest.raises(CheckFailedError, match="openvino does not run on this machine"):
        report.require("openvino")
    assert "openvino does not run: not built in" in [
        finding.problem for finding in report.findings if finding.severity == "error"
    ]


def test_unknown_required_provider_is_an_error_before_the_examination(monkeypatch):
    monkeypatch.setattr(stage, "run_probe", None)
    with pytest.raises(ProviderError, match="did you mean 'cuda'"):
        examine(DoctorConfig(require="cudaa"))


def test_a_provider_that_was_not_examined_cannot_be_required(report):
    with pytest.raises(CheckFailedError, match="it was not examined"):
        replace(report, providers=()).require("rocm")


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "libraries missing"),
        ({"compiled": False}, "not built in"),
        ({"missing": ()}, "cannot register"),
        ({"missing": (), "registers": True}, "fails to run"),
        ({"missing": (), "registers": True, "runs": True}, "runs"),
    ],
)
def test_state_is_the_last_stage_reached(changes, state):
    assert replace(LOST, **changes).state == state


def test_a_provider_that_kills_its_process_is_reported():
    status = provider_status(
        CUDA, ProbeResult(reason="the process died of SIGSEGV", log="bad driver")
    )
    assert (status.runs, status.reason) == (False, "the process died of SIGSEGV (bad driver)")


def test_log_has_the_reason_why_a_provider_is_missing():
    values = asdict(replace(LOST, missing=(), reason="left out", remedy=""))
    assert provider_status(CUDA, ProbeResult(values, log="CUDA failure 803")).reason == (
        "left out: CUDA failure 803"
    )


def test_with_a_gpu_a_cuda_that_does_not_run_is_an_error():
    (finding,) = provider_findings([LOST], WITH_GPU, "")
    assert (finding.severity, finding.evidence) == ("error", "libcublas.so.13 was not found")
    assert list(provider_findings([LOST], WITHOUT, "")) == []


def test_tensorrt_that_is_not_installed_is_a_note_unless_it_is_required():
    lost = replace(LOST, name=TENSORRT)
    assert [f.severity for f in provider_findings([lost], WITH_GPU, "")] == ["note"]
    assert [f.severity for f in provider_findings([lost], WITH_GPU, TENSORRT)] == ["error"]


def test_provider_that_runs_with_limitations_is_a_warning():
    runs = replace(LOST, missing=(), registers=True, runs=True, reason="no convolutions", remedy="")
    (finding,) = provider_findings([runs], WITH_GPU, "")
    assert (finding.severity, finding.evidence) == ("warning", "no convolutions")


def test_little_disk_and_memory_are_warnings(report):
    plenty = replace(
        report.machine,
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


def test_store_that_is_not_writable_is_an_error(report, monkeypatch):
    monkeypatch.setattr(stage.os, "access", lambda path, mode: False)
    finding = next(iter(machine_findings(report.machine)))
    assert (finding.severity, finding.problem) == ("error", "the store is not writable")
    assert "ENGINERY_HOME" in finding.remedy


def test_findings_are_ordered_by_severity(report):
    order = ["error", "warning", "note"]
    found = [order.index(finding.severity) for finding in report.findings]
    assert found == sorted(found)


@pytest.mark.more
def test_the_doctor_has_a_row_for_every_provider_with_what_brings_it():
    report = examine(DoctorConfig())
    assert {status.name for status in report.providers} == {row.name for row in KNOWN_PROVIDERS}
    plain = {provider["short_name"]: provider for provider in report.as_json()["providers"]}
    assert plain["openvino"]["package"] == "onnxruntime-openvino"
    assert "gpu_mem_limit" in plain["cuda"]["options"]
    for provider in plain.values():
        assert provider["state"] == "runs" or (provider["reason"] and provider["remedy"])
    rows = {row[0].split(" (")[0]: row for row in table_rows(report, "Execution providers")}
    assert rows["cuda"][2:4] == ("onnxruntime-gpu", "23 checked")
    assert rows["cpu"][1:4] == ("runs", "onnxruntime", "1 checked")


@pytest.mark.parametrize(
    ("platform", "hidden"),
    [("linux", {"directml", "coreml"}), ("win32", {"coreml", "cann"}), ("darwin", {"directml"})],
)
def test_providers_that_cannot_be_had_on_this_system_are_counted(
    report, monkeypatch, platform, hidden
):
    monkeypatch.setattr(f"{ProviderStatus.__module__}.sys.platform", platform)
    absent = ProviderStatus("", False, (), False, False, "not built in", "")
    providers = [replace(absent, name=row.name) for row in KNOWN_PROVIDERS]
    rows = table_rows(replace(report, providers=tuple(providers)), "Execution providers")
    shown = {row[0].split(" (")[0] for row in rows[:-1]}
    assert {"cpu", "cuda", "tensorrt", "tensorrt-rtx", "webgpu"} <= shown
    assert not shown & (hidden | {"webnn", "js", "azure", "nnapi", "rknpu", "xnnpack"})
    assert rows[-1][0] == f"and {len(KNOWN_PROVIDERS) - len(shown)} more"
    # What is built in has a row, whoever built it; the endpoint of Azure runs nothing.
    providers = [replace(status, compiled=True) for status in providers]
    rows = table_rows(replace(report, providers=tuple(providers)), "Execution providers")
    assert len(rows) == len(KNOWN_PROVIDERS)
    assert rows[-1][0] == "and 1 more"


def test_packages_that_are_not_installed_are_no_faults(report):
    packages = (
        PackageStatus("numpy", "2.4.6", ">=2", "", fits=True),
        PackageStatus("onnx", "1.0", ">=1.21", "export", fits=False),
        PackageStatus("torch", "", ">=2.9", "export", fits=False),
        PackageStatus("onnxruntime", "", ">=1.31", "cpu", False, "onnxruntime-gpu"),
        PackageStatus("ray", "", ">=2.50", "ray", fits=False),
        PackageStatus("sphinx", "", ">=8", "docs", fits=False),
        PackageStatus("furo", "", ">=2025", "docs", fits=False),
    )
    rows = table_rows(replace(report, packages=packages), "Packages")
    assert [(row[0], *row[3:]) for row in rows] == [
        ("numpy", "", "yes"),
        ("onnx", "export", "no"),
        ("torch", "export", "not installed"),
        ("onnxruntime", "cpu", "not needed beside onnxruntime-gpu"),
        ("extras without packages", "ray, docs", "not installed"),
    ]


def table_rows(report, title):
    (table,) = [table for table in report.tables() if table.title == title]
    return [tuple(row.values()) for row in table.rows]


def test_those_that_are_not_here_have_no_answer_where_the_child_died():
    (status,) = absent_statuses(["CoreMLExecutionProvider"], ProbeResult(reason="the process died"))
    assert (status.runs, status.reason) == (False, "the process died")

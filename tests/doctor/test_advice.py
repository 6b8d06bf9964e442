"""Settings that slow models down, found without measuring."""

from dataclasses import replace

import pytest

from enginery.doctor.advice import check_settings
from enginery.doctor.config import DoctorConfig
from enginery.doctor.report import Gpu, MachineStatus, NvidiaStatus, ProviderStatus
from enginery.doctor.stage import examine
from enginery.runtime.providers.known import CPU, CUDA

MACHINE = MachineStatus(
    python="3.12",
    platform="Linux",
    cpu="A processor",
    physical_cores=4,
    usable_cpus=8,
    cpu_features=(),
    memory_total_bytes=1,
    memory_available_bytes=1,
    store="/s",
    store_free_bytes=1,
    temporary="/t",
    temporary_free_bytes=1,
)
WITH_GPU = NvidiaStatus("580.65.06", "13.0", "", (Gpu("NVIDIA L4", "8.9", 0, 0),), {}, "13")
WITHOUT = replace(WITH_GPU, driver="", problem="there is no NVIDIA driver", gpus=())
RUNS = tuple(
    ProviderStatus(name, True, (), registers=True, runs=True, reason="", remedy="")
    for name in (CPU, CUDA)
)
LOST = (
    RUNS[0],
    replace(RUNS[1], runs=False, reason="libcublas.so.13 was not found", remedy="Install it."),
)


def found(environment, *, machine=MACHINE, nvidia=WITHOUT, providers=LOST):
    return list(check_settings(environment, machine, nvidia, providers))


def test_a_machine_without_settings_or_a_gpu_needs_no_advice():
    assert found({}) == []


def test_gpu_that_no_setting_names_is_noted():
    (finding,) = found({}, nvidia=WITH_GPU, providers=RUNS)
    assert finding.severity == "note"
    assert finding.evidence == "NVIDIA L4, which cuda can use; ENGINERY_PROVIDERS is not set"
    assert finding.remedy == "Set ENGINERY_PROVIDERS=cuda, or pass --providers cuda."
    (finding,) = found({"ENGINERY_PROVIDERS": "cpu,cuda"}, nvidia=WITH_GPU, providers=RUNS)
    assert finding.evidence.endswith("ENGINERY_PROVIDERS is cpu,cuda")
    assert found({"ENGINERY_PROVIDERS": "cuda,cpu"}, nvidia=WITH_GPU, providers=RUNS) == []
    # One that does not run has findings of its own.
    assert found({}, nvidia=WITH_GPU, providers=LOST) == []


def test_variable_that_is_not_set_is_not_named():
    no_onnxruntime = replace(RUNS[0], runs=False, reason="onnxruntime is not installed")
    assert found({}, providers=(no_onnxruntime, LOST[1])) == []
    (finding,) = found({"ENGINERY_PROVIDERS": "cpu"}, providers=(no_onnxruntime, LOST[1]))
    assert finding.problem == "ENGINERY_PROVIDERS names cpu, which does not run here"


def test_a_named_provider_that_does_not_run_here_is_an_error():
    (finding,) = found({"ENGINERY_PROVIDERS": "cuda,cpu"})
    assert finding.severity == "error"
    assert finding.problem == "ENGINERY_PROVIDERS names cuda, which does not run here"
    assert (finding.evidence, finding.remedy) == ("libcublas.so.13 was not found", "Install it.")


@pytest.mark.parametrize(
    ("text", "evidence"),
    [
        ("cudaa", "unknown execution provider 'cudaa'; did you mean 'cuda'?"),
        ("cuda; cuda.gpu_mem_limit=much", "option 'gpu_mem_limit' for cuda: found 'much'"),
    ],
)
def test_a_variable_that_cannot_be_read_is_an_error(text, evidence):
    (finding,) = found({"ENGINERY_PROVIDERS": text})
    assert (finding.severity, finding.problem) == ("error", "ENGINERY_PROVIDERS cannot be used")
    assert finding.evidence.startswith(evidence)
    assert finding.remedy


@pytest.mark.parametrize(
    ("search", "fires"), [("EXHAUSTIVE", True), ("HEURISTIC", False), ("DEFAULT", False)]
)
def test_an_exhaustive_search_that_is_requested(search, fires):
    text = f"cuda; cuda.cudnn_conv_algo_search={search}"
    findings = found({"ENGINERY_PROVIDERS": text}, nvidia=WITH_GPU, providers=RUNS)
    assert len(findings) == fires
    for finding in findings:
        assert "cuda.cudnn_conv_algo_search=EXHAUSTIVE" in finding.evidence
        assert "HEURISTIC" in finding.remedy


@pytest.mark.parametrize(
    ("value", "fires"), [("5", True), ("5,2", True), ("4", False), ("", False), ("many", False)]
)
@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_more_threads_than_cores(name, value, fires):
    findings = found({name: value})
    assert len(findings) == fires
    for finding in findings:
        assert finding.problem == "there are more threads than physical cores"
        assert finding.evidence == f"{name} is 5, on 4 cores"
        assert finding.remedy == f"Set {name} to 4 or fewer, or leave it out."
    assert found({name: value}, machine=replace(MACHINE, physical_cores=0)) == []


def test_threads_of_a_named_provider():
    (finding,) = found({"ENGINERY_PROVIDERS": "openvino; openvino.num_of_threads=64"})
    assert finding.evidence == "openvino.num_of_threads is 64, on 4 cores"


def test_fewer_cpus_than_cores():
    (finding,) = found({}, machine=replace(MACHINE, usable_cpus=2))
    assert finding.evidence == "2 CPUs usable of 4 cores"
    assert "--threads 2" in finding.remedy
    assert found({}, machine=replace(MACHINE, usable_cpus=4)) == []


@pytest.mark.more
def test_examination_includes_the_advice(monkeypatch):
    monkeypatch.setenv("ENGINERY_PROVIDERS", "cudaa")
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    problems = [finding.problem for finding in examine(DoctorConfig()).findings]
    assert "ENGINERY_PROVIDERS cannot be used" in problems
    assert "there are more threads than physical cores" in problems

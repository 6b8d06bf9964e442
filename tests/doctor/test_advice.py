"""Settings that slow models down, found without measuring."""

from dataclasses import replace

import pytest

from enginery.doctor.advice import check_settings
from enginery.doctor.config import DoctorConfig
from enginery.doctor.report import Gpu, NvidiaStatus, ProviderStatus
from enginery.doctor.stage import examine
from enginery.runtime.providers.known import CPU, CUDA

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


def found(environment, *, nvidia=WITHOUT, providers=LOST):
    return list(check_settings(environment, nvidia, providers))


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


@pytest.mark.more
def test_examination_includes_the_advice(monkeypatch):
    monkeypatch.setenv("ENGINERY_PROVIDERS", "cudaa")
    problems = [finding.problem for finding in examine(DoctorConfig()).findings]
    assert "ENGINERY_PROVIDERS cannot be used" in problems

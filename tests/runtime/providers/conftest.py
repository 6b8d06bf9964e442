"""A simulated machine with a GPU, and no providers from the environment."""

from types import SimpleNamespace

import pytest

from enginery.runtime.providers import availability, gpus, libraries, selection
from enginery.runtime.providers.gpus import CudaDriver
from enginery.runtime.providers.known import CPU, CUDA, TENSORRT
from tests.runtime.providers.doubles import write_library


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    monkeypatch.delenv("ENGINERY_PROVIDERS", raising=False)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Simulate a machine with a driver and a GPU; tests set the libraries that providers need."""

    machine = SimpleNamespace(
        needs={CUDA: ["libc.so.6"], TENSORRT: ["libc.so.6"]},
        driver=CudaDriver((13, 0), gpus=1),
        wheels=tmp_path / "wheels",
    )

    def library(name):
        path = tmp_path / f"{name}.so"
        return write_library(path, machine.needs[name]) if name in machine.needs else path

    machine.wheels.mkdir()
    monkeypatch.setattr(availability, "provider_library", library)
    monkeypatch.setattr(availability, "preload_nvidia", lambda: None)
    monkeypatch.setattr(availability, "compiled_providers", lambda: [TENSORRT, CUDA, CPU])
    monkeypatch.setattr(availability, "cuda_major", lambda: 13)
    monkeypatch.setattr(gpus, "cuda_driver", lambda: machine.driver)
    monkeypatch.setattr(libraries, "wheel_directories", lambda: [machine.wheels])
    monkeypatch.setattr(selection, "provider_warning", lambda name: "")
    return machine

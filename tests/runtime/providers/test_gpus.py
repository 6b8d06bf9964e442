"""The NVIDIA driver, with a test double of libcuda."""

import ctypes

import pytest

from enginery.runtime.providers import gpus
from enginery.runtime.providers.gpus import CudaDriver


class FakeCuda:
    """The functions of libcuda that are called, which return values through pointers."""

    def __init__(self, version=13010, gpus=2, init=0):
        self.version, self.gpus, self.init = version, gpus, init

    def cuInit(self, flags):  # noqa: N802
        return self.init

    def cuDriverGetVersion(self, out):  # noqa: N802
        out._obj.value = self.version
        return 0

    def cuDeviceGetCount(self, out):  # noqa: N802
        out._obj.value = self.gpus
        return 0

    def cuGetErrorName(self, code, out):  # noqa: N802
        out._obj.value = b"CUDA_ERROR_NO_DEVICE"
        return 0


@pytest.mark.parametrize(
    ("fake", "expected"),
    [
        (FakeCuda(), CudaDriver((13, 1), 2)),
        (FakeCuda(gpus=0), CudaDriver((13, 1), 0, "the NVIDIA driver sees no GPU")),
        (
            FakeCuda(init=100),
            CudaDriver((13, 1), 0, "the NVIDIA driver refused: CUDA_ERROR_NO_DEVICE (100)"),
        ),
    ],
)
def test_version_and_gpus_are_read_from_the_driver(monkeypatch, fake, expected):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: fake)
    assert gpus.cuda_driver() == expected


def test_no_libcuda_is_no_driver(monkeypatch):
    monkeypatch.setattr(gpus, "DRIVER", "libcudagone.so.1")
    driver = gpus.cuda_driver()
    assert driver.problem == "there is no NVIDIA driver: libcudagone.so.1 was not found"

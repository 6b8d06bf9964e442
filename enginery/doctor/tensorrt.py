"""Check whether the installed TensorRT libraries build engines that run on this machine.

Only metadata is read; TensorRT is not loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

from enginery.doctor.report import Finding, NvidiaStatus
from enginery.runtime.providers.availability import cuda_major
from enginery.runtime.providers.gpus import CudaGpu
from enginery.runtime.tensorrt.capabilities import unsupported_gpu
from enginery.runtime.tensorrt.library import has_tensorrt
from enginery.runtime.tensorrt.options import CLASSIC, RTX


def tensorrt_findings(nvidia: NvidiaStatus) -> Iterator[Finding]:
    """Report TensorRT packages that do not work here. `doctor.packages` checks their versions."""
    yield from _wrong_cuda_version()
    for gpu in nvidia.gpus:
        # An unknown compute capability is no finding.
        is_supported = not gpu.compute_capability or RTX.supports(gpu.compute_capability)
        if has_tensorrt(RTX) and not is_supported:
            cuda_gpu = CudaGpu(gpu.name, gpu.compute_capability, gpu.memory_total_bytes)
            yield Finding(
                "note",
                f"{RTX.title} does not run on {gpu.name}",
                unsupported_gpu(RTX, cuda_gpu),
                f"Build for it with --flavor {CLASSIC.name} ({CLASSIC.install}), or run models "
                "with --providers cuda.",
            )


def _wrong_cuda_version() -> Iterator[Finding]:
    """Report a classic TensorRT for another CUDA major version than onnxruntime's."""
    major = cuda_major()
    names = {
        (dist.metadata["Name"] or "").lower().replace("_", "-"): dist.version
        for dist in metadata.distributions()
    }
    for name, version in sorted(names.items()):
        family, _, cuda = name.removesuffix("-bindings").removesuffix("-libs").rpartition("-cu")
        if major and family == "tensorrt" and cuda.isdigit() and int(cuda) != major:
            yield Finding(
                "error",
                f"{name} {version} is for CUDA {cuda}, onnxruntime for CUDA {major}",
                f"ONNX Runtime's TensorRT provider links CUDA {major}; libraries of both versions "
                "in one process share neither memory nor streams",
                f"Run: pip uninstall -y {name} && {CLASSIC.install}",
            )
            return

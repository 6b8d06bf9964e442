"""Check whether an engine can run on this GPU, with this TensorRT and for this graph.

    graph = artifact.manifest.graphs[0]
    incompatibility(artifact, graph, engine, RTX, visible_gpus()[0], "1.7.1")
    # 'it is not for compute capability 8.6'

A plan runs with the version of TensorRT that built it, on the GPUs that it was built for. Source:
docs.nvidia.com/deeplearning/tensorrt, "Version Compatibility" and "Hardware Compatibility".
"""

from __future__ import annotations

import ctypes
import os

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.engine import Engine
from enginery.core.artifact.engine_record import ENGINES, EngineRecord, graph_sha256
from enginery.core.artifact.manifest import GraphRecord
from enginery.runtime.providers.gpus import CudaGpu
from enginery.runtime.tensorrt.options import Flavor

_AMPERE = (8, 0)


def loaded_version(flavor: Flavor) -> str:
    """Return the version of the loaded TensorRT library, `10.13.2`; empty if none is loaded.

    The library is not loaded here, because the one that the execution provider loads counts.
    """
    without_loading = getattr(os, "RTLD_NOLOAD", None)
    if without_loading is None:
        return ""
    try:
        library = ctypes.CDLL(flavor.library, mode=without_loading | os.RTLD_NOW)
        number = int(library.getInferLibVersion())
    except (OSError, AttributeError):
        return ""
    # NvInferVersion.h: from version 10 on, and in TensorRT for RTX, 10702 is 1.7.2.
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def incompatibility(
    artifact: Artifact,
    graph: GraphRecord,
    engine: Engine,
    flavor: Flavor,
    gpu: CudaGpu,
    version: str,
) -> str:
    """Return the reason why an engine cannot run here; empty if it can."""
    record = engine.record
    if record.flavor != flavor.name:
        return f"it is for the flavor {record.flavor}"
    for name in (record.plan, record.wrapper):
        # What the manifest does not list was not verified when the artifact was opened.
        if f"{ENGINES}/{engine.name}/{name}" not in artifact.manifest.files:
            return f"its {name} is not listed in the artifact's manifest"
    if record.graph_sha256 != graph_sha256(graph, artifact.manifest.files):
        return f"it was built from another {graph.file}"
    if version and _first_three(record.tensorrt) != version:
        return f"this machine has TensorRT {version}"
    return _gpu_incompatibility(record, flavor, gpu)


def _gpu_incompatibility(record: EngineRecord, flavor: Flavor, gpu: CudaGpu) -> str:
    if not flavor.supports(gpu.compute_capability):
        return f"{flavor.title} does not support compute capability {gpu.compute_capability}"
    if record.hardware_compatibility == "ampere-plus":
        return "" if _pair(gpu.compute_capability) >= _AMPERE else "it needs 8.0 or newer"
    if not record.capabilities and _pair(gpu.compute_capability) < _AMPERE:
        return "a portable plan needs compute capability 8.0 or newer"
    if record.capabilities and gpu.compute_capability not in record.capabilities:
        return f"it is not for compute capability {gpu.compute_capability}"
    # Classic TensorRT chose the kernels by timing them on that model of GPU.
    bound_to_model = flavor.needs_gpu and record.hardware_compatibility == "none"
    if bound_to_model and record.gpu.name and record.gpu.name != gpu.name:
        return f"it was built on {record.gpu.name} and runs only there"
    return ""


def _first_three(version: str) -> str:
    """Return `1.7.1` for `1.7.1.116`: a plan does not depend on the build number."""
    return ".".join(version.split(".")[:3])


def _pair(capability: str) -> tuple[int, int]:
    major, _, minor = capability.partition(".")
    return int(major), int(minor or 0)

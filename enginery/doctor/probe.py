"""Probes in a process of their own, because a provider may crash it.

    run_probe("provider", "CUDAExecutionProvider", timeout_seconds=60)
    # {'state': 'runs', 'reason': '', 'remedy': ''}

The process writes its result as a line of JSON, the last on standard output: libraries may print
before it. A provider is probed with the smallest model that proves it: y = x + x for two floats.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from enginery.core.errors import ProviderError
from enginery.core.subprocess import describe_exit
from enginery.runtime.providers import availability, gpus, libraries
from enginery.runtime.providers.known import CPU, SHORT_NAMES, TENSORRT_RTX
from enginery.runtime.tensorrt.library import tensorrt_version
from enginery.runtime.tensorrt.options import RTX

ONE_OP_MODEL = (
    b'\x08\x08::\n\x0e\n\x01x\n\x01x\x12\x01y"\x03Add\x12\x06one_opZ\x0f\n\x01x\x12\n\n\x08\x08\x01'
    b"\x12\x04\n\x02\x08\x02b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x02B\x04\n\x00\x10\x11"
)
"""A serialized ModelProto, because the bare install has no package `onnx`: IR version 8, opset 17,
a node Add, input x and output y, float32 (2,)."""
_LEFT_OUT = "ONNX Runtime left it out of the session"


def run_probe(*arguments: str, timeout_seconds: float) -> dict[str, Any]:
    """Run this module in a process with the same packages and return its result.

    Raises:
        ProviderError: the process crashed, failed, or has no result within the time.
    """
    # The process has the same import path; -P excludes the working directory.
    path = os.pathsep.join(entry for entry in sys.path if entry)
    try:
        process = subprocess.run(
            [sys.executable, "-P", "-m", __name__, *arguments],
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_seconds,
            check=False,
        )
        result = json.loads(process.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        raise ProviderError(
            f"the process has no result after {timeout_seconds:g} seconds"
        ) from None
    except OSError as error:
        raise ProviderError(f"Python could not be started: {error}") from error
    except (ValueError, IndexError):
        result = None
    lines = process.stderr.decode(errors="replace").strip().splitlines()
    last_line = f" ({lines[-1].strip()})" if lines else ""
    if process.returncode or not isinstance(result, dict):
        raise ProviderError(f"the process {describe_exit(process.returncode)}{last_line}")
    if result.get("reason") == _LEFT_OUT:  # only ONNX Runtime's log says why
        result["reason"] += last_line
    return result


def examine_provider(name: str) -> dict[str, str]:
    """Probe a provider; return `state`, `reason` and `remedy` of `ProviderStatus`."""
    if unavailable := availability.unavailable_reason(name):
        return _unavailable(name, unavailable)
    reason, remedy = "", ""
    try:
        reason = _run_model(name)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        remedy = availability.reinstall() if name == CPU else ""
    if reason:
        return {"state": "fails to run", "reason": reason, "remedy": remedy}
    return {"state": "runs", "reason": availability.provider_warning(name), "remedy": ""}


def _run_model(name: str) -> str:
    """Run the model on a provider; return what is wrong, or an empty text."""
    import numpy as np

    session = _session(name)
    if name not in session.get_providers():
        return _LEFT_OUT
    (answer,) = session.run(None, {"x": np.array([1.0, 2.5], dtype=np.float32)})
    # Not every build reports the placement.
    read_assignments = getattr(session, "get_provider_graph_assignment_info", list)
    placed = {node.ep_name for node in read_assignments()}
    if placed and name not in placed:
        return f"the operation ran on {', '.join(sorted(placed))} instead"
    if answer.tolist() != [2.0, 5.0]:
        return f"wrong result: found {answer.tolist()}, expected [2.0, 5.0]"
    return ""


def _session(name: str) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # failures show as an exception or a missing provider
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if name == TENSORRT_RTX and not _is_built_in(name):
        options.add_provider_for_devices(availability.register_plugin(name), {})
        return onnxruntime.InferenceSession(ONE_OP_MODEL, options)
    return onnxruntime.InferenceSession(ONE_OP_MODEL, options, providers=[name], enable_fallback=0)


def _is_built_in(name: str) -> bool:
    try:
        return name in availability.compiled_providers()
    except ImportError:
        return False


def _unavailable(name: str, unavailable: availability.Unavailable) -> dict[str, str]:
    """Return why a provider is unavailable and, beside a missing driver, its missing libraries."""
    reason, remedy = unavailable.reason, unavailable.do
    missing = {key: e for key, e in availability.missing_for(name).items() if key != gpus.DRIVER}
    details = availability.describe_missing(missing)
    if details and details not in reason:
        reason = f"{reason}; {details}"
        remedy = f"{remedy} Then: {availability.INSTALL.get(name, '')}"
    has_provider = _is_built_in(name) or availability.plugin_installed(name)
    return {
        "state": "unavailable" if has_provider else "not built in",
        "reason": reason,
        "remedy": remedy,
    }


def examine_machine() -> dict[str, Any]:
    """Return the driver, the GPUs and NVIDIA's libraries, and why providers are unavailable."""
    driver = gpus.cuda_driver()
    major, minor = driver.cuda_version
    availability.preload_nvidia()
    cuda_gpus = () if driver.problem else gpus.gpus_from_driver(ctypes.CDLL(gpus.DRIVER))
    unavailable = {name: availability.unavailable_reason(name) for name in SHORT_NAMES.values()}
    return {
        "nvidia": {
            "driver": gpus.driver_version(),
            "driver_cuda": f"{major}.{minor}" if major else "",
            "problem": driver.problem,
            "gpus": [
                asdict(gpu) | {"memory_free_bytes": _free_bytes(index)}
                for index, gpu in enumerate(cuda_gpus)
            ],
            "libraries": _library_versions(),
            "onnxruntime_cuda": str(availability.cuda_major() or ""),
        },
        "unavailable": {
            name: _unavailable(name, reason) for name, reason in unavailable.items() if reason
        },
    }


def _free_bytes(device_id: int) -> int:
    """Return the free memory of a GPU; 0 if the driver does not report it."""
    from enginery.runtime.nvml import Nvml

    try:
        with Nvml.open(device_id) as nvml:
            status = nvml.status()
    except ProviderError:
        return 0
    return (status.memory_total_bytes or 0) - (status.memory_used_bytes or 0)


def _library_versions() -> dict[str, str]:
    """Return the versions that NVIDIA's libraries report after loading, and of TensorRT for RTX."""
    versions = dict.fromkeys(("CUDA runtime", "cuDNN", "TensorRT"), "not found")
    versions[RTX.title] = tensorrt_version(RTX) or "not found"
    directories = libraries.wheel_directories()
    runtime = f"libcudart.so.{availability.cuda_major() or 13}"
    if not libraries.load_error(runtime, directories):
        value = ctypes.c_int()
        ctypes.CDLL(runtime).cudaRuntimeGetVersion(ctypes.byref(value))
        # 13010 is 13.1.
        versions["CUDA runtime"] = f"{value.value // 1000}.{value.value % 1000 // 10}"
    for title, library, function in (
        ("cuDNN", "libcudnn.so.9", "cudnnGetVersion"),
        ("TensorRT", "libnvinfer.so.10", "getInferLibVersion"),
    ):
        if not libraries.load_error(library, directories):
            read_version = getattr(ctypes.CDLL(library), function)
            read_version.restype = ctypes.c_size_t
            versions[title] = format_version(read_version())
    return versions


def format_version(number: int) -> str:
    """Format a version number of cuDNN (9 and later) or TensorRT (10 and later).

    >>> format_version(91701), format_version(101600)
    ('9.17.1', '10.16.0')
    """
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


if __name__ == "__main__":
    _, *words = sys.argv
    answer = examine_machine() if words == ["machine"] else examine_provider(words[1])
    sys.stdout.write(f"\n{json.dumps(answer)}\n")

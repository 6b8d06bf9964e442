"""What is asked in a child process: a provider that crashes must not take the doctor along.

    python -m enginery.doctor.child compiled
    python -m enginery.doctor.child provider CUDAExecutionProvider
    python -m enginery.doctor.child absent OpenVINOExecutionProvider CoreMLExecutionProvider
    python -m enginery.doctor.child nvidia

The answer is one line of JSON on standard output, the last one: libraries print before it.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from enginery.doctor.one_op import EXPECTED, FEED, one_op_model
from enginery.runtime.providers import availability, gpus, libraries
from enginery.runtime.providers.gpus import gpus_from_driver
from enginery.runtime.providers.known import CPU, TENSORRT_RTX


def examine_provider(name: str) -> dict[str, Any]:
    """How far a provider gets, as the fields of `ProviderStatus`."""
    status: dict[str, Any] = {
        "name": name, "compiled": True, "missing": [],
        "registers": False, "runs": False, "reason": "", "remedy": "",
    }  # fmt: skip
    if found := availability.unavailable_reason(name):
        return status | _unavailable(name, found)
    try:
        session = _session(name)
        status["registers"] = name in session.get_providers()
        if not status["registers"]:
            return status | {"reason": "ONNX Runtime left it out of the session without an error"}
        (answer,) = session.run(None, {"x": FEED})
        placed = _placement(session)
    except Exception as error:
        remedy = availability.reinstall("onnxruntime-gpu") if name == CPU else ""
        return status | {"reason": f"{type(error).__name__}: {error}", "remedy": remedy}
    if placed and name not in placed:
        return status | {"reason": f"the operation ran on {', '.join(sorted(placed))} instead"}
    if not np.array_equal(answer, EXPECTED):
        return status | {"reason": f"wrong answer: {answer.tolist()}, not {EXPECTED.tolist()}"}
    return status | {"runs": True, "reason": availability.provider_warning(name)}


def examine_absent(names: Sequence[str]) -> list[dict[str, Any]]:
    """Why each of these cannot be had, as the fields of `ProviderStatus`; none is tried."""
    statuses = []
    for name in names:
        found = availability.unavailable_reason(name)
        statuses.append({
            "name": name, "compiled": found is None or _is_built_in(name), "missing": [],
            "registers": False, "runs": False,
            "reason": found.reason if found else "it was not tried",
            "remedy": found.do if found else "",
        })  # fmt: skip
    return statuses


def examine_nvidia() -> dict[str, Any]:
    """The driver as libcuda describes it, and the versions of the libraries above it."""
    driver = gpus.cuda_driver()
    major, minor = driver.cuda_version
    availability.preload_nvidia()
    return {
        "driver_cuda": f"{major}.{minor}" if major else "",
        "problem": driver.problem,
        "gpus": [] if driver.problem else gpu_fields(ctypes.CDLL(gpus.DRIVER)),
        "libraries": library_versions(availability.cuda_major()),
        "onnxruntime_cuda": str(availability.cuda_major() or ""),
    }


def gpu_fields(cuda: Any) -> list[dict[str, Any]]:
    """Every visible GPU, as the fields of `Gpu`, from libcuda after `cuInit`.

    Free memory needs a context on the GPU, so it is given as 0.
    """
    return [asdict(gpu) | {"memory_free_bytes": 0} for gpu in gpus_from_driver(cuda)]


def library_versions(cuda_major: int) -> dict[str, str]:
    """Versions of the CUDA runtime, cuDNN and TensorRT that load here, by their own functions."""
    found = {}
    places = libraries.wheel_directories()
    runtime = f"libcudart.so.{cuda_major or 13}"
    if not libraries.load_error(runtime, places):
        value = ctypes.c_int()
        ctypes.CDLL(runtime).cudaRuntimeGetVersion(ctypes.byref(value))
        # 13010 is 13.1.
        found["CUDA runtime"] = f"{value.value // 1000}.{value.value % 1000 // 10}"
    if not libraries.load_error("libcudnn.so.9", places):
        function = ctypes.CDLL("libcudnn.so.9").cudnnGetVersion
        function.restype = ctypes.c_size_t
        found["cuDNN"] = dotted(function())
    if not libraries.load_error("libnvinfer.so.10", places):
        found["TensorRT"] = dotted(ctypes.CDLL("libnvinfer.so.10").getInferLibVersion())
    return found


def dotted(number: int) -> str:
    """`9.17.1` for 91701, as cuDNN from 9 and TensorRT from 10 number their versions."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _unavailable(name: str, found: availability.Unavailable) -> dict[str, Any]:
    """Return the reason and, where that is the driver, the libraries that are missing above it."""
    missing = availability.missing_for(name)
    others = {key: error for key, error in missing.items() if key != gpus.DRIVER}
    words = availability.describe_missing(others)
    more = bool(words) and words not in found.reason
    return {
        "compiled": _is_built_in(name) or availability.plugin_installed(name),
        "missing": list(missing),
        "reason": f"{found.reason}; {words}" if more else found.reason,
        "remedy": f"{found.do} Then: {availability.INSTALL[name]}" if more else found.do,
    }


def _is_built_in(name: str) -> bool:
    try:
        return name in availability.compiled_providers()
    except ImportError:
        return False


def _session(name: str) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what goes wrong comes back as an exception or a left-out name
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if name == TENSORRT_RTX and not _is_built_in(name):
        options.add_provider_for_devices(availability.register_plugin(name), {})
        return onnxruntime.InferenceSession(one_op_model(), options)
    return onnxruntime.InferenceSession(
        one_op_model(), options, providers=[name], enable_fallback=0
    )


def _placement(session: Any) -> set[str]:
    """The providers that took a node; empty where this onnxruntime cannot tell."""
    tell = getattr(session, "get_provider_graph_assignment_info", None)
    return {part.ep_name for part in tell()} if tell else set()


def main(arguments: list[str]) -> None:
    """Answers `compiled`, `provider NAME`, `absent NAMES` or `nvidia`."""
    answer: dict[str, Any]
    match arguments:
        case ["compiled"]:
            answer = {"providers": availability.compiled_providers()}
        case ["provider", name]:
            answer = examine_provider(name)
        case ["absent", *names]:
            answer = {"providers": examine_absent(names)}
        case ["nvidia"]:
            answer = examine_nvidia()
        case _:
            sys.exit(f"expected compiled, provider NAME, absent NAMES or nvidia, found {arguments}")
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])

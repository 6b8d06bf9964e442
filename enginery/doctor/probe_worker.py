"""Probes that run in a subprocess, because a provider may crash.

    python -m enginery.doctor.probe_worker compiled
    python -m enginery.doctor.probe_worker provider CUDAExecutionProvider
    python -m enginery.doctor.probe_worker absent OpenVINOExecutionProvider CoreMLExecutionProvider
    python -m enginery.doctor.probe_worker nvidia

The result is one line of JSON, the last on standard output: libraries may print before it.

A provider is probed with the smallest model that proves it: y = x + x for two floats, 68 bytes. It
is encoded by hand, because the bare install has no `onnx` package. Field numbers: onnx/onnx.proto.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from enginery.runtime.providers import availability, gpus, libraries
from enginery.runtime.providers.gpus import gpus_from_driver
from enginery.runtime.providers.known import CPU, TENSORRT_RTX

FEED = np.array([1.0, 2.5], dtype=np.float32)
EXPECTED = np.array([2.0, 5.0], dtype=np.float32)

_FLOAT = 1  # TensorProto.DataType
_IR_VERSION = 8
_OPSET = 17


def examine_provider(name: str) -> dict[str, Any]:
    """Probe a provider; return the fields of `ProviderStatus`."""
    status: dict[str, Any] = {
        "name": name,
        "compiled": True,
        "missing": [],
        "registers": False,
        "runs": False,
        "reason": "",
        "remedy": "",
    }
    if unavailable := availability.unavailable_reason(name):
        return status | _unavailable(name, unavailable)
    try:
        session = _session(name)
        status["registers"] = name in session.get_providers()
        if not status["registers"]:
            return status | {"reason": "ONNX Runtime left it out of the session without an error"}
        (answer,) = session.run(None, {"x": FEED})
        placed = _placement(session)
    except Exception as error:
        remedy = availability.reinstall() if name == CPU else ""
        return status | {"reason": f"{type(error).__name__}: {error}", "remedy": remedy}
    if placed and name not in placed:
        return status | {"reason": f"the operation ran on {', '.join(sorted(placed))} instead"}
    if not np.array_equal(answer, EXPECTED):
        return status | {
            "reason": f"wrong result: found {answer.tolist()}, expected {EXPECTED.tolist()}"
        }
    return status | {"runs": True, "reason": availability.provider_warning(name)}


def examine_unavailable(names: Sequence[str]) -> list[dict[str, Any]]:
    """Return why each provider is unavailable, as fields of `ProviderStatus`; none is probed."""
    statuses = []
    for name in names:
        unavailable = availability.unavailable_reason(name)
        statuses.append(
            {
                "name": name,
                "compiled": unavailable is None or _is_built_in(name),
                "missing": [],
                "registers": False,
                "runs": False,
                "reason": unavailable.reason if unavailable else "it was not tried",
                "remedy": unavailable.do if unavailable else "",
            }
        )
    return statuses


def examine_nvidia() -> dict[str, Any]:
    """Query the driver through libcuda, and the versions of the NVIDIA libraries."""
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
    """Return the fields of `Gpu` for every visible GPU, from libcuda after `cuInit`.

    Free memory is 0: querying it would need a CUDA context on the GPU.
    """
    return [asdict(gpu) | {"memory_free_bytes": 0} for gpu in gpus_from_driver(cuda)]


def library_versions(cuda_major: int) -> dict[str, str]:
    """Return the versions that the loaded CUDA runtime, cuDNN and TensorRT report."""
    versions = {}
    directories = libraries.wheel_directories()
    runtime = f"libcudart.so.{cuda_major or 13}"
    if not libraries.load_error(runtime, directories):
        value = ctypes.c_int()
        ctypes.CDLL(runtime).cudaRuntimeGetVersion(ctypes.byref(value))
        # 13010 is 13.1.
        versions["CUDA runtime"] = f"{value.value // 1000}.{value.value % 1000 // 10}"
    if not libraries.load_error("libcudnn.so.9", directories):
        function = ctypes.CDLL("libcudnn.so.9").cudnnGetVersion
        function.restype = ctypes.c_size_t
        versions["cuDNN"] = format_version(function())
    if not libraries.load_error("libnvinfer.so.10", directories):
        versions["TensorRT"] = format_version(ctypes.CDLL("libnvinfer.so.10").getInferLibVersion())
    return versions


def format_version(number: int) -> str:
    """Format a version number of cuDNN (9 and later) or TensorRT (10 and later).

    >>> format_version(91701)
    '9.17.1'
    """
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _unavailable(name: str, unavailable: availability.Unavailable) -> dict[str, Any]:
    """Return the reason and, where that is the driver, the libraries that are missing above it.

    cuDNN is added to a built-in CUDA, which loads without it, but runs no convolutions.
    """
    built_in = _is_built_in(name)
    missing = availability.missing_for(name)
    errors = {key: error for key, error in missing.items() if key != gpus.DRIVER}
    details = [availability.describe_missing(errors)]
    details += [availability.provider_warning(name) if built_in else ""]
    new_details = [text for text in details if text and text not in unavailable.reason]
    install = availability.INSTALL.get(name, "")
    remedy = (
        f"{unavailable.do} Then: {install}" if install not in unavailable.do else unavailable.do
    )
    return {
        "compiled": built_in or availability.plugin_installed(name),
        "missing": list(missing),
        "reason": "; ".join([unavailable.reason, *new_details]),
        "remedy": remedy if new_details else unavailable.do,
    }


def _is_built_in(name: str) -> bool:
    try:
        return name in availability.compiled_providers()
    except ImportError:
        return False


def _session(name: str) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # failures show as an exception or a missing provider
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if name == TENSORRT_RTX and not _is_built_in(name):
        options.add_provider_for_devices(availability.register_plugin(name), {})
        return onnxruntime.InferenceSession(one_op_model(), options)
    return onnxruntime.InferenceSession(
        one_op_model(), options, providers=[name], enable_fallback=0
    )


def _placement(session: Any) -> set[str]:
    """Return the providers that got a node; empty if this onnxruntime does not report it."""
    read_assignments = getattr(session, "get_provider_graph_assignment_info", None)
    return {assignment.ep_name for assignment in read_assignments()} if read_assignments else set()


def one_op_model() -> bytes:
    """Return a serialized ModelProto with input x and output y, float32 (2,)."""
    node = _text(1, "x") + _text(1, "x") + _text(2, "y") + _text(4, "Add")
    graph = (
        _message(1, node)
        + _text(2, "one_op")
        + _message(11, _value("x", len(FEED)))
        + _message(12, _value("y", len(FEED)))
    )
    opset = _text(1, "") + _number(2, _OPSET)
    return _number(1, _IR_VERSION) + _message(7, graph) + _message(8, opset)


def _value(name: str, size: int) -> bytes:
    """Encode a ValueInfoProto: a float tensor with one dim."""
    shape = _message(1, _number(1, size))
    tensor = _number(1, _FLOAT) + _message(2, shape)
    return _text(1, name) + _message(2, _message(1, tensor))


def _number(field: int, value: int) -> bytes:
    """Encode a varint field; all numbers in this model fit in one byte."""
    return bytes([field << 3, value])


def _message(field: int, content: bytes) -> bytes:
    """Encode a length-delimited field; all in this model are below 128 bytes."""
    return bytes([field << 3 | 2, len(content)]) + content


def _text(field: int, value: str) -> bytes:
    return _message(field, value.encode())


def main(arguments: list[str]) -> None:
    """Run the probe that the arguments name and print its result."""
    answer: dict[str, Any]
    match arguments:
        case ["compiled"]:
            answer = {"providers": availability.compiled_providers()}
        case ["provider", name]:
            answer = examine_provider(name)
        case ["absent", *names]:
            answer = {"providers": examine_unavailable(names)}
        case ["nvidia"]:
            answer = examine_nvidia()
        case _:
            sys.exit(f"expected compiled, provider NAME, absent NAMES or nvidia, found {arguments}")
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])

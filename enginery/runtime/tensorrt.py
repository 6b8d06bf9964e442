"""TensorRT for RTX: whether it takes a graph, and the engine that it makes of it. Needs no GPU.

Takes the path of an ONNX file, of any size; leaves nothing on disk but a log.

    >>> parse_onnx(Path("model.onnx")).require_accepted()
    >>> built = build_plan(Path("model.onnx"), profiles=[Profile.parse("batch=1:8:32,sequence=64")])
    >>> built.int8_gemms, built.fused_attentions
    (50, 12)

The work happens in a child process: its memory comes back, and a crash is an error message.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from enginery.core.errors import EngineryError, OptionError, ProviderError, ShapeError, SourceError
from enginery.core.home import enginery_home
from enginery.core.shapes import Profile, TensorSpec
from enginery.runtime.tensorrt_build import build_here, parse_here
from enginery.runtime.tensorrt_library import has_tensorrt, require_tensorrt
from enginery.runtime.tensorrt_log import LayerInfo
from enginery.runtime.tensorrt_reports import BuiltPlan, ParseReport, Refusal

__all__ = [
    "WORKSPACE_BYTES",
    "BuiltPlan",
    "LayerInfo",
    "ParseReport",
    "Refusal",
    "build_plan",
    "has_tensorrt",
    "log_path",
    "parse_onnx",
]

WORKSPACE_BYTES = 8 << 30
"""Device memory that a layer may use beside its tensors. It is part of what a plan depends on, so
that it is not left to the size of a GPU. TensorRT's own default without a GPU is 64 GiB, more than
the GPUs have that it builds for."""


def parse_onnx(path: Path, *, isolated: bool = True) -> ParseReport:
    """Asks TensorRT's parser whether it takes a graph.

    Args:
        path: the ONNX file; external data is read from beside it.
        isolated: parse in a child process.

    Raises:
        MissingPackageError: TensorRT for RTX is not installed.
        SourceError: there is no such file, or it is no ONNX model.
        ProviderError: TensorRT crashed.
    """
    require_tensorrt("Parsing a graph with TensorRT")
    if not isolated:
        return parse_here(path)
    found, _ = _run_worker("parse", path, {})
    return ParseReport(**{**found, **_records(found), "warnings": tuple(found["warnings"])})


def build_plan(
    path: Path,
    *,
    profiles: Sequence[Profile],
    capabilities: Sequence[str] = ("8.9",),
    workspace_bytes: int = WORKSPACE_BYTES,
    limits: Mapping[str, int] = {},
    isolated: bool = True,
) -> BuiltPlan:
    """Builds an engine ahead of time.

    The same file, profiles, capabilities and limits give the same layers. The bytes may differ in
    names that TensorRT makes up; compare what went in, never plans.

    Args:
        path: the ONNX file; external data is read from beside it.
        profiles: ranges of the graph's named dims, one or more; none for a graph of fixed shapes.
        capabilities: GPUs to build for: 8.9, 12.0, …; none for a plan that runs on all of them.
        workspace_bytes: device memory that a layer may use beside its tensors.
        limits: the largest sizes that the model allows, `{"sequence": 512}`. TensorRT would build
            beyond a model's positions and read other memory there.
        isolated: build in a child process.

    Raises:
        MissingPackageError: TensorRT for RTX is not installed.
        OptionError: it builds for no such GPU; the message says for which it does.
        ShapeError: a profile does not fit the graph.
        SourceError: there is no such file, or it is no ONNX model.
        ProviderError: TensorRT refuses the graph, builds no engine, or crashed.
    """
    require_tensorrt("Building an engine")
    if not isolated:
        return build_here(
            path, profiles, capabilities=capabilities, workspace_bytes=workspace_bytes,
            limits=limits,
        )  # fmt: skip
    found, plan = _run_worker(
        "build",
        path,
        {
            "profiles": [str(profile) for profile in profiles],
            "capabilities": list(capabilities),
            "workspace_bytes": workspace_bytes,
            "limits": dict(limits),
        },
    )
    lists = {name: tuple(found[name]) for name in ("capabilities", "profiles", "warnings")}
    return BuiltPlan(**{**found, **_records(found), **lists, "plan": plan})


def log_path(path: Path) -> Path:
    """Where everything is that TensorRT said of a graph last, its list of layers included."""
    folder = path.resolve().parent.name
    return enginery_home() / "logs" / f"tensorrt-{folder}-{path.stem}.log"


def _run_worker(action: str, path: Path, options: Mapping[str, Any]) -> tuple[Any, bytes]:
    """What the child found, as JSON has it, and the plan that it built."""
    with tempfile.TemporaryDirectory(prefix="enginery-tensorrt-") as scratch:
        request_file, result_file = Path(scratch, "request.json"), Path(scratch, "result.json")
        request = {"action": action, "path": str(path), "scratch": scratch, **options}
        request_file.write_text(json.dumps(request), encoding="utf-8")
        log_file = log_path(path)
        log_file.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "enginery.runtime.tensorrt_worker",
                   str(request_file), str(result_file)]  # fmt: skip
        with log_file.open("w", encoding="utf-8") as log:
            status = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, check=False,
                stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONUNBUFFERED": "1"},
            ).returncode  # fmt: skip
        if status != 0 or not result_file.is_file():
            raise ProviderError(
                f"{path}: the process with TensorRT {_how_it_ended(status)}.",
                do=f"TensorRT's last words are in {log_file}.",
            )
        found = json.loads(result_file.read_text(encoding="utf-8"))
        if "error" in found:
            raise _worker_error(found["error"], log_file)
        plan = Path(scratch, "plan")
        return found, plan.read_bytes() if plan.is_file() else b""


def _records(found: Mapping[str, Any]) -> dict[str, Any]:
    """The dataclasses in a result, from the JSON that the child made of them."""
    kinds = {"inputs": TensorSpec, "outputs": TensorSpec, "layers": LayerInfo, "refusals": Refusal}
    return {
        name: tuple(kind(**_frozen(record)) for record in found[name])
        for name, kind in kinds.items()
        if name in found
    }


def _frozen(record: Mapping[str, Any]) -> dict[str, Any]:
    return {n: tuple(value) if isinstance(value, list) else value for n, value in record.items()}


_WORKER_ERRORS: dict[str, type[EngineryError]] = {
    kind.__name__: kind for kind in (OptionError, ShapeError, SourceError)
}


def _worker_error(error: Mapping[str, str], log_file: Path) -> EngineryError:
    kind = _WORKER_ERRORS.get(error["type"], ProviderError)
    log = f"All that TensorRT said: {log_file}" if kind is ProviderError else ""
    return kind(error["message"], do=error["do"] or log)


def _how_it_ended(status: int) -> str:
    if status == -9:
        return "was killed (signal 9); the usual cause is that memory ran out"
    return f"crashed with signal {-status}" if status < 0 else f"ended with status {status}"

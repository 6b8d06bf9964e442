"""Parse graphs and build engines with TensorRT, in a child process.

    parse_onnx(Path("model.onnx")).require_accepted()
    profile = Profile.parse("batch=1:8:32,sequence=64")
    built = build_plan(Path("model.onnx"), BuildRequest([profile], capabilities="8.9"))
    built.int8_gemms          # 50
    built.fused_attentions    # 12

TensorRT for RTX needs no GPU. Classic TensorRT builds on the GPU that will run the engine. The
child process frees the memory of a build, and turns a crash of TensorRT into an error message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from enginery.core.artifact.engine_record import LayerRecord
from enginery.core.errors import OptionError, ProviderError, ShapeError, SourceError
from enginery.core.home import store_log
from enginery.core.scratch import final_name, temporary_directory
from enginery.core.shapes import TensorSpec
from enginery.core.subprocess import Supervision, run_in_subprocess
from enginery.core.trust.resource_limits import NO_LIMITS, ResourceLimits, read_sizes
from enginery.runtime.tensorrt.build import BuildRequest, build_in_process
from enginery.runtime.tensorrt.capabilities import resolve_capabilities
from enginery.runtime.tensorrt.library import require_tensorrt
from enginery.runtime.tensorrt.options import RTX, Flavor, check_options
from enginery.runtime.tensorrt.parse import cover_in_process, parse_in_process
from enginery.runtime.tensorrt.reports import BuiltPlan, Coverage, ParseReport, Refusal


def parse_onnx(path: Path, *, flavor: Flavor = RTX, isolated: bool = True) -> ParseReport:
    """Parse a graph with TensorRT and return whether it is accepted.

    Args:
        path: path of an ONNX file, with external data in the same directory.
        flavor: TensorRT flavor; classic TensorRT needs a GPU.
        isolated: parse in a child process.

    Raises:
        MissingPackageError: TensorRT for RTX is not installed.
        SourceError: the file does not exist or is not an ONNX model.
        ProviderError: classic TensorRT is not installed, or TensorRT crashed.
    """
    require_tensorrt("Parsing a graph with TensorRT", flavor)
    if not isolated:
        return parse_in_process(path, flavor=flavor)
    result = _run_worker("parse", path, flavor, {})
    return ParseReport(**{**result, **_records(result), "warnings": tuple(result["warnings"])})


def coverage(path: Path, *, flavor: Flavor = RTX, isolated: bool = True) -> Coverage:
    """Return which nodes of a graph TensorRT supports.

    The parser accepts some graphs that it computes wrongly (FP64, UINT8, operators of
    `com.microsoft` with a standard name); `enginery lint` reports them.

    Args:
        path: path of an ONNX file, with external data in the same directory.
        flavor: TensorRT flavor; classic TensorRT needs a GPU.
        isolated: run in a child process.

    Raises:
        MissingPackageError: TensorRT for RTX or onnx is not installed.
        SourceError: the file does not exist or is not an ONNX model.
        ProviderError: classic TensorRT is not installed, or TensorRT crashed.
    """
    require_tensorrt("Asking TensorRT which nodes it takes", flavor)
    if not isolated:
        return cover_in_process(path, flavor=flavor)
    result = _run_worker("cover", path, flavor, {})
    return Coverage(**{**result, **_records(result)})


def build_plan(
    path: Path,
    request: BuildRequest,
    *,
    plan_path: Path | None = None,
    isolated: bool = True,
) -> BuiltPlan:
    """Build an engine ahead of time.

    With TensorRT for RTX, the same file, profiles, capabilities, options and limits give the same
    layers. The bytes may differ in generated names, so compare cache keys instead of plans.

    Args:
        path: path of an ONNX file, with external data in the same directory.
        request: shapes, GPUs and options.
        plan_path: file for the plan, which is not loaded into this process then; None to return it.
        isolated: build in a child process, which ends with this one.

    Raises:
        MissingPackageError: TensorRT for RTX is not installed.
        OptionError: a compute capability is not supported (the message lists the supported ones),
            or an option is not available in the flavor.
        ShapeError: a profile does not fit the graph.
        SourceError: the file does not exist or is not an ONNX model.
        ProviderError: TensorRT rejects the graph, builds no engine, or crashes; or classic TensorRT
            is not installed or finds no GPU.
    """
    require_tensorrt("Building an engine", request.flavor)
    check_options(request.flavor, request.options)
    targets = resolve_capabilities(request.flavor, request.capabilities)
    request = replace(request, capabilities=targets)
    if not isolated:
        return build_in_process(path, request, plan_path=plan_path)
    if plan_path is not None:
        return _build_in_child(path, request, plan_path)
    # The plan comes back in a file: the child's result is JSON, which cannot hold bytes.
    with temporary_directory("plan") as scratch:
        written = scratch / "plan"
        built = _build_in_child(path, request, written)
        return replace(built, held=written.read_bytes(), plan_path="")


def _build_in_child(path: Path, request: BuildRequest, plan_path: Path) -> BuiltPlan:
    """Build in a child process, which writes the plan."""
    result = _run_worker(
        "build", path, request.flavor, {**request.as_json(), "plan_path": str(plan_path)}
    )
    lists = {name: tuple(result[name]) for name in ("capabilities", "profiles", "warnings")}
    values = {**result, **_records(result), **lists, "held": b"", "plan_path": str(plan_path)}
    return BuiltPlan(**values)


def log_path(path: Path) -> Path:
    """Return the log file of TensorRT's last run on a graph, with the list of layers."""
    folder = final_name(path.resolve().parent)
    return store_log(f"tensorrt-{folder}-{path.stem}.log")


def _run_worker(action: str, path: Path, flavor: Flavor, request: Mapping[str, Any]) -> Any:
    """Return the child's result, as parsed JSON."""
    return run_in_subprocess(
        "enginery.runtime.tensorrt.worker",
        {"action": action, "path": str(path), "flavor": flavor.name, **request},
        log=log_path(path),
        description=f"{path}: {flavor.title}",
        error_classes=(ProviderError, OptionError, ShapeError, SourceError),
        supervision=Supervision(limits=_limits(action, path)),
    )


def _limits(action: str, path: Path) -> ResourceLimits:
    if not path.is_file():  # the child says so
        return NO_LIMITS
    if action == "build":
        file_bytes, _ = read_sizes(path, error=SourceError)
        return ResourceLimits.of_build(file_bytes=file_bytes)
    return ResourceLimits.of_graph_file(path, error=SourceError)


def _records(result: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the records in a child's result to dataclasses."""
    kinds = {
        "inputs": TensorSpec,
        "outputs": TensorSpec,
        "layers": LayerRecord,
        "refusals": Refusal,
        "refused": Refusal,
    }
    return {
        name: tuple(kind(**_frozen(record)) for record in result[name])
        for name, kind in kinds.items()
        if name in result
    }


def _frozen(record: Mapping[str, Any]) -> dict[str, Any]:
    return {n: tuple(value) if isinstance(value, list) else value for n, value in record.items()}

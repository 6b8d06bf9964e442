"""TensorRT, of either flavor: whether it takes a graph, and the engine that it makes of it.

Takes the path of an ONNX file, of any size; leaves the plan in a file if one is named, and a log.

    >>> parse_onnx(Path("model.onnx")).require_accepted()
    >>> built = build_plan(Path("model.onnx"), profiles=[Profile.parse("batch=1:8:32,sequence=64")])
    >>> built.int8_gemms, built.fused_attentions
    (50, 12)

TensorRT for RTX needs no GPU. Classic TensorRT builds on the GPU that will run the engine, and has
not been run on one by this project.

The work happens in a child process: its memory comes back, and a crash is an error message.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from enginery.core.artifact.engine_record import LayerRecord
from enginery.core.errors import OptionError, ProviderError, ShapeError, SourceError
from enginery.core.home import enginery_home
from enginery.core.shapes import Profile, TensorSpec
from enginery.core.subprocess import run_in_subprocess
from enginery.runtime.tensorrt.build import build_here
from enginery.runtime.tensorrt.capabilities import resolve_capabilities
from enginery.runtime.tensorrt.engine_key import key_fields
from enginery.runtime.tensorrt.library import has_tensorrt, require_tensorrt
from enginery.runtime.tensorrt.options import (
    CLASSIC,
    FLAVORS,
    RTX,
    BuildOptions,
    Flavor,
    check_options,
    flavor_named,
)
from enginery.runtime.tensorrt.parse import cover_here, parse_here
from enginery.runtime.tensorrt.reports import BuiltPlan, Coverage, ParseReport, Refusal

__all__ = [
    "CLASSIC",
    "FLAVORS",
    "RTX",
    "BuildOptions",
    "BuiltPlan",
    "Coverage",
    "Flavor",
    "LayerRecord",
    "ParseReport",
    "Refusal",
    "build_plan",
    "check_options",
    "coverage",
    "flavor_named",
    "has_tensorrt",
    "key_fields",
    "log_path",
    "parse_onnx",
    "resolve_capabilities",
]


def parse_onnx(path: Path, *, flavor: Flavor = RTX, isolated: bool = True) -> ParseReport:
    """Asks TensorRT's parser whether it takes a graph.

    Args:
        path: the ONNX file; external data is read from beside it.
        flavor: whose parser; that of classic TensorRT needs a GPU.
        isolated: parse in a child process.

    Raises:
        MissingPackageError: TensorRT for RTX is not installed.
        SourceError: there is no such file, or it is no ONNX model.
        ProviderError: classic TensorRT is not installed, or TensorRT crashed.
    """
    require_tensorrt("Parsing a graph with TensorRT", flavor)
    if not isolated:
        return parse_here(path, flavor=flavor)
    found = _ask_worker("parse", path, flavor, {})
    return ParseReport(**{**found, **_records(found), "warnings": tuple(found["warnings"])})


def coverage(path: Path, *, flavor: Flavor = RTX, isolated: bool = True) -> Coverage:
    """Asks TensorRT which nodes of a graph it takes, also where it refuses some.

    The parser says nothing against some graphs that it computes wrongly (FP64, UINT8, operators of
    `com.microsoft` with a standard name): `enginery lint` does.

    Args:
        path: the ONNX file; external data is read from beside it.
        flavor: whose parser; that of classic TensorRT needs a GPU.
        isolated: ask in a child process.

    Raises:
        MissingPackageError: TensorRT for RTX or onnx is not installed.
        SourceError: there is no such file, or it is no ONNX model.
        ProviderError: classic TensorRT is not installed, or TensorRT crashed.
    """
    require_tensorrt("Asking TensorRT which nodes it takes", flavor)
    if not isolated:
        return cover_here(path, flavor=flavor)
    found = _ask_worker("cover", path, flavor, {})
    return Coverage(**{**found, **_records(found)})


def build_plan(
    path: Path,
    *,
    profiles: Sequence[Profile],
    capabilities: str | Sequence[str] = ("8.9",),
    flavor: Flavor = RTX,
    options: BuildOptions = BuildOptions(),  # noqa: B008  # frozen
    limits: Mapping[str, int] = {},
    plan_path: Path | None = None,
    isolated: bool = True,
) -> BuiltPlan:
    """Builds an engine ahead of time.

    The same file, profiles, capabilities, options and limits give the same layers with TensorRT for
    RTX. The bytes may differ in names that TensorRT makes up; compare what went in, never plans.

    Args:
        path: the ONNX file; external data is read from beside it.
        profiles: ranges of the graph's named dims, one or more; none for a graph of fixed shapes.
        capabilities: GPUs to build for, see `resolve_capabilities`: 8.9, 12.0, …, `current`; none
            for a plan that runs on all of them. Classic TensorRT takes `current` alone.
        flavor: who builds.
        options: how, see `BuildOptions`.
        limits: the largest sizes that the model allows, `{"sequence": 512}`. TensorRT would build
            beyond a model's positions and read other memory there.
        plan_path: the file that the plan is written to; nothing of it comes into this process
            then. Without, the result holds it.
        isolated: build in a child process, which ends when this one does.

    Raises:
        MissingPackageError: TensorRT for RTX is not installed.
        OptionError: it builds for no such GPU; the message says for which it does. Or an option
            means nothing for the flavor.
        ShapeError: a profile does not fit the graph.
        SourceError: there is no such file, or it is no ONNX model.
        ProviderError: TensorRT refuses the graph, builds no engine, or crashed; classic TensorRT is
            not installed, or there is no GPU for it.
    """
    require_tensorrt("Building an engine", flavor)
    check_options(flavor, options)
    targets = resolve_capabilities(flavor, capabilities)
    if not isolated:
        return build_here(
            path,
            profiles,
            flavor=flavor,
            capabilities=targets,
            options=options,
            limits=limits,
            plan_path=plan_path,
        )
    request = {
        "profiles": [str(profile) for profile in profiles],
        "capabilities": list(targets),
        "options": asdict(options),
        "limits": dict(limits),
    }
    if plan_path is not None:
        return _build_apart(path, flavor, request, plan_path)
    with tempfile.TemporaryDirectory(prefix="enginery-plan-") as scratch:
        written = Path(scratch, "plan")
        built = _build_apart(path, flavor, request, written)
        return replace(built, held=written.read_bytes(), plan_path="")


def _build_apart(
    path: Path, flavor: Flavor, request: Mapping[str, Any], plan_path: Path
) -> BuiltPlan:
    """Builds in a child process, which writes the plan."""
    found = _ask_worker("build", path, flavor, {**request, "plan_path": str(plan_path)})
    lists = {name: tuple(found[name]) for name in ("capabilities", "profiles", "warnings")}
    made = {**found, **_records(found), **lists, "held": b"", "plan_path": str(plan_path)}
    return BuiltPlan(**made)


def log_path(path: Path) -> Path:
    """Where everything is that TensorRT said of a graph last, its list of layers included."""
    folder = path.resolve().parent.name
    return enginery_home() / "logs" / f"tensorrt-{folder}-{path.stem}.log"


def _ask_worker(action: str, path: Path, flavor: Flavor, request: Mapping[str, Any]) -> Any:
    """What the child found, as JSON has it."""
    return run_in_subprocess(
        "enginery.runtime.tensorrt.worker",
        {"action": action, "path": str(path), "flavor": flavor.name, **request},
        log=log_path(path),
        description=f"{path}: {flavor.title}",
        error=ProviderError,
        reraise=(OptionError, ShapeError, SourceError),
    )


def _records(found: Mapping[str, Any]) -> dict[str, Any]:
    """The dataclasses in a result, from the JSON that the child made of them."""
    kinds = {
        "inputs": TensorSpec,
        "outputs": TensorSpec,
        "layers": LayerRecord,
        "refusals": Refusal,
        "refused": Refusal,
    }
    return {
        name: tuple(kind(**_frozen(record)) for record in found[name])
        for name, kind in kinds.items()
        if name in found
    }


def _frozen(record: Mapping[str, Any]) -> dict[str, Any]:
    return {n: tuple(value) if isinstance(value, list) else value for n, value in record.items()}

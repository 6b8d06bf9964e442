"""Sessions of ONNX Runtime on exactly the providers that were chosen.

    >>> session = new_session(artifact.model, choose_providers(["cpu"]), ort.SessionOptions())

ONNX Runtime's own silent fallback to the CPU is off.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import ArtifactError, ProviderError
from enginery.core.shapes import Dim, TensorSpec
from enginery.runtime.onnxruntime.graph_limits import check_allocations
from enginery.runtime.providers.availability import register_plugin
from enginery.runtime.providers.known import TENSORRT_RTX
from enginery.runtime.providers.selection import Provider

# x86 processors without VNNI add pairs of INT8 products in 16 bits, which saturate: a graph that is
# right elsewhere gives wrong answers there. With this entry ONNX Runtime takes kernels that do not
# saturate, which are slower; other processors and other graphs are not affected.
EXACT_INT8 = ("session.x64quantprecision", "1")


def new_session(
    path: Path, providers: Sequence[Provider], options: Any, *, record: GraphRecord | None = None
) -> Any:
    """An `onnxruntime.InferenceSession` on exactly the providers given.

    Args:
        path: an ONNX file.
        providers: as `choose_providers` gives them, each with its options.
        options: an `onnxruntime.SessionOptions`; its log is made quiet, INT8 exact, and a plugin is
            added.
        record: of an artifact's graph; None for another file.

    Raises:
        ArtifactError: the file is damaged, or the graph would allocate an absurd amount of memory.
        ProviderError: a provider did not register, or the graph cannot be loaded.
    """
    check_allocations(path, record=record)
    import onnxruntime as ort

    options.log_severity_level = 4  # errors come back as exceptions
    options.add_session_config_entry(*EXACT_INT8)
    wanted: list[tuple[str, dict[str, str]]] | None = [
        (provider.name, dict(provider.options)) for provider in providers
    ]
    for provider in providers:
        if provider.name == TENSORRT_RTX:
            # A plugin is given by its devices. ONNX Runtime then takes no list of names beside
            # it, and adds the CPU itself.
            devices = register_plugin(provider.name)
            options.add_provider_for_devices(devices, dict(provider.options))
            wanted = None
    try:
        try:
            session = ort.InferenceSession(str(path), options, providers=wanted, enable_fallback=0)
        except Exception as error:
            # Its fusions hand FP8 numbers between FP32 ones to kernels that take INT8 alone.
            if "float8" not in str(error):
                raise
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
            session = ort.InferenceSession(str(path), options, providers=wanted, enable_fallback=0)
    except Exception as error:
        raise ProviderError(f"{path} cannot be loaded by ONNX Runtime: {error}") from error
    session.disable_fallback()  # run() has a fallback of its own
    registered = session.get_providers()
    for provider in providers:
        if provider.name not in registered:
            raise ProviderError(
                f"{provider.name} was requested but did not register; "
                f"the session has {', '.join(registered)}.",
                do="Run: enginery doctor",
            )
    return session


_REMEDY = "The manifest is of another graph; make the artifact again."
_DTYPES = {"float": "float32", "double": "float64"}


def require_interface(session: Any, record: GraphRecord, path: Path) -> None:
    """Raise unless a session takes and gives what the manifest says of its graph.

    Names, dtypes, ranks and fixed sizes are compared. The names of other dims are not; the manifest
    may fix a size that is free in the graph, and an output may have a rank or a size that ONNX
    Runtime knows and the manifest does not.

    Raises:
        ArtifactError: they differ; the message names the tensor.
    """
    for kind, values, specs in (
        ("input", session.get_inputs(), record.inputs),
        ("output", session.get_outputs(), record.outputs),
    ):
        found = {value.name: value for value in values}
        expected = {spec.name: spec for spec in specs}
        if set(found) != set(expected):
            raise ArtifactError(
                f"{path} has the {kind}s {_listed(found)}; manifest.json says {_listed(expected)}.",
                do=_REMEDY,
            )
        for name, spec in expected.items():
            actual = tensor_spec(found[name])
            if actual.dtype != spec.dtype or not _same_dims(actual, spec, exact=kind == "input"):
                raise ArtifactError(
                    f"{path}: the {kind} {actual} differs from manifest.json, which says {spec}.",
                    do=_REMEDY,
                )


def tensor_spec(value: Any) -> TensorSpec:
    """Return name, dtype and dims of an `onnxruntime.NodeArg`; `?` is a dim without a name."""
    kind = value.type.removeprefix("tensor(").removesuffix(")")
    dims: list[Dim] = [
        dim if isinstance(dim, int) and dim >= 0 else (isinstance(dim, str) and dim) or "?"
        for dim in value.shape or ()
    ]
    return TensorSpec(value.name, _DTYPES.get(kind, kind), tuple(dims))


def _same_dims(actual: TensorSpec, spec: TensorSpec, *, exact: bool) -> bool:
    """Whether ranks and fixed sizes agree; unless `exact`, only where both sides know them."""
    if not exact and not (actual.dims and spec.dims):
        return True  # no rank is written as no dims
    return len(actual.dims) == len(spec.dims) and all(
        a == b if isinstance(a, int) and isinstance(b, int) else isinstance(a, str) or not exact
        for a, b in zip(actual.dims, spec.dims, strict=True)
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "(none)"

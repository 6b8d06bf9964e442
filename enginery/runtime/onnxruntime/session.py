"""Create ONNX Runtime sessions on exactly the chosen providers.

    session = new_session(artifact.model, choose_providers(["cpu"]), ort.SessionOptions())

ONNX Runtime's own silent fallback to the CPU is off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import ProviderError
from enginery.core.shapes import Dim, TensorSpec
from enginery.core.trust.graph_limits import check_allocations
from enginery.core.trust.resource_limits import ResourceLimits, limited_call, read_sizes
from enginery.runtime.machine import read_cpuinfo
from enginery.runtime.onnxruntime.capture_lock import CAPTURE_LOCK
from enginery.runtime.providers.availability import register_plugin
from enginery.runtime.providers.known import CPU, CUDA, TENSORRT_RTX, short_name
from enginery.runtime.providers.selection import Provider

_EXACT_INT8 = "session.x64quantprecision"
_VNNI = {"avx512_vnni", "avx_vnni"}


_ERROR = 3
"""A severity of `onnxruntime.set_default_logger_severity`."""


def silence_warnings() -> None:
    """Leave only errors of the logger that all sessions of the process share.

    Under CUDA it warns for each session that CUDA is not a plugin, and for each convolution at each
    size that cuDNN runs in its fallback mode.
    """
    import onnxruntime as ort

    ort.set_default_logger_severity(_ERROR)


def use_exact_int8(options: Any) -> None:
    """Change `onnxruntime.SessionOptions` so that INT8 products do not saturate.

    x86 processors without VNNI add pairs of INT8 products in 16 bits, which saturate: a graph that
    is correct on other processors gives wrong results. They get ONNX Runtime's exact kernels. With
    VNNI all kernels are exact, and these would take three times as long.
    """
    _, features = read_cpuinfo()
    if not _VNNI.intersection(features):
        options.add_session_config_entry(_EXACT_INT8, "1")


def new_session(
    path: Path, providers: Sequence[Provider], options: Any, *, record: GraphRecord | None = None
) -> Any:
    """Return an `onnxruntime.InferenceSession` on exactly the given providers.

    Args:
        path: path of an ONNX file.
        providers: result of `choose_providers`.
        options: `onnxruntime.SessionOptions`, which are changed: no log, exact INT8, plugins, the
            CPU's arena.
        record: record of the artifact's graph; None for other files.

    Raises:
        ArtifactError: the file is damaged, or the graph would allocate too much memory.
        ProviderError: a provider did not register, or the graph cannot be loaded.
    """
    # Before ONNX Runtime sees the file: it computes constants while it loads a graph.
    check_allocations(path, data_files=record.data_beside if record else None)

    options.log_severity_level = 4  # errors come back as exceptions
    use_exact_int8(options)
    requested: list[tuple[str, dict[str, str]]] | None = [
        (provider.name, dict(provider.options)) for provider in providers
    ]
    for provider in providers:
        if provider.name == CPU and provider.options.get("enable_cpu_mem_arena") == "0":
            options.enable_cpu_mem_arena = False
        if provider.name == TENSORRT_RTX:
            # A plugin is selected by its devices. ONNX Runtime then accepts no list of names, and
            # adds the CPU itself.
            devices = register_plugin(provider.name)
            options.add_provider_for_devices(devices, dict(provider.options))
            requested = None
    if providers[0].name == CUDA:
        silence_warnings()
    try:
        with (
            CAPTURE_LOCK.running(),  # a GPU's session allocates memory
            limited_call(path, lambda: _loading_limits(path, providers[0])),
        ):
            session = _opened(path, options, requested)
    except Exception as error:
        raise ProviderError(f"{path} cannot be loaded by ONNX Runtime: {error}") from error
    session.disable_fallback()  # run() has its own fallback
    registered = session.get_providers()
    for provider in providers:
        if provider.name not in registered:
            name = short_name(provider.name)
            chosen = ", ".join(f"{name}.{key}={value}" for key, value in provider.options.items())
            raise ProviderError(
                f"{provider.name} was requested but did not register; "
                f"the session has {', '.join(registered)}.",
                do="ONNX Runtime's log on standard error says why. "
                + (f"Check its options: {chosen}" if chosen else "Run: enginery doctor"),
            )
    return session


def _loading_limits(path: Path, provider: Provider) -> ResourceLimits:
    """Return what loading a graph may take; a GPU's provider may build an engine meanwhile."""
    if provider.name == CPU:
        return ResourceLimits.of_graph_file(path)
    return ResourceLimits.of_build(file_bytes=read_sizes(path)[0])


def run_limits(
    file_bytes: int, provider: Provider, feeds: Mapping[str, NDArray[Any]]
) -> ResourceLimits:
    """Return what one run may take; a GPU's provider may load kernels or build an engine in it."""
    if provider.name == CPU:
        return ResourceLimits.of_run(file_bytes, feeds)
    return ResourceLimits.of_build(file_bytes=file_bytes)


def _opened(path: Path, options: Any, requested: list[tuple[str, dict[str, str]]] | None) -> Any:
    import onnxruntime as ort

    try:
        # Without `enable_fallback=0` the constructor would try again on other providers.
        return ort.InferenceSession(str(path), options, providers=requested, enable_fallback=0)
    except Exception as error:
        # ONNX Runtime's fusions pass FP8 tensors to kernels that only support INT8.
        if "float8" not in str(error):
            raise
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        return ort.InferenceSession(str(path), options, providers=requested, enable_fallback=0)


_DTYPES = {"float": "float32", "double": "float64"}


def check_interface(session: Any, record: GraphRecord, path: Path) -> None:
    """Check that the inputs and outputs of a session match the manifest.

    Raises:
        ArtifactError: they differ; the message has the tensor.
    """
    record.require_interface(
        path,
        tuple(map(tensor_spec, session.get_inputs())),
        tuple(map(tensor_spec, session.get_outputs())),
    )


def tensor_spec(value: Any) -> TensorSpec:
    """Return the spec of an `onnxruntime.NodeArg`; `?` stands for an unnamed dim."""
    kind = value.type.removeprefix("tensor(").removesuffix(")")
    dims: list[Dim] = [
        # ONNX Runtime has None or an empty name for a dim without a name.
        dim if isinstance(dim, int) and dim >= 0 else (isinstance(dim, str) and dim) or "?"
        for dim in value.shape or ()
    ]
    return TensorSpec(value.name, _DTYPES.get(kind, kind), tuple(dims))

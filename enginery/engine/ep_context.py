"""Write the ONNX wrapper of an engine: one EPContext node that names the plan's file.

ONNX Runtime opens `model_ctx.onnx` instead of the model, loads the plan beside it and builds
nothing.

The attributes are documented in onnxruntime.ai/docs/execution-providers/EP-Context-Design.html.
What each provider reads of them is in its `onnx_ctx_model_helper.cc` (onnxruntime, core/providers/
tensorrt and nv_tensorrt_rtx).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from enginery.core.artifact.engine_record import EngineRecord
from enginery.core.errors import ArtifactError
from enginery.core.json_file import require_regular_file
from enginery.core.scratch import write_atomically
from enginery.core.shapes import TensorSpec
from enginery.runtime.tensorrt.options import RTX, get_flavor

ENGINE_HEADER_BYTES = 64
"""Size of the plan's header, `Runtime.engine_header_size` of TensorRT for RTX 1.7. The header says
where a plan can run. The provider expects it in the model, in hexadecimal, and checks it first."""

_COMPATIBILITY_INFO = "ep_compatibility_info."  # onnxruntime_ep_device_ep_metadata_keys.h
_OPSET, _IR_VERSION = 20, 10  # any that ONNX Runtime reads: the wrapper has no standard operators
_AMPERE_ON = "80+"  # as both providers write it; see ValidateEPCtxNode in both helpers
_DTYPES = {
    "float32": "FLOAT",
    "float16": "FLOAT16",
    "bfloat16": "BFLOAT16",
    "float64": "DOUBLE",
    "int8": "INT8",
    "int32": "INT32",
    "int64": "INT64",
    "uint8": "UINT8",
    "bool": "BOOL",
}


def write_wrapper(directory: Path, record: EngineRecord) -> Path:
    """Write the wrapper beside the plan, with the inputs and outputs of the graph.

    Args:
        directory: the engine's directory, with the plan.
        record: the engine's record; its `inputs` and `outputs` are those of the artifact's graph.

    Returns:
        The wrapper's path.

    Raises:
        ArtifactError: the plan is missing or too short, ONNX Runtime would reject its name, or a
            tensor has a dtype that ONNX does not have.
    """
    import onnx

    _require_plain_name(record.plan)
    attributes = _attributes(record)
    metadata = {}
    header = _plan_header(directory / record.plan)
    if record.flavor == RTX.name:
        metadata[f"{_COMPATIBILITY_INFO}{RTX.provider}"] = header.hex()
    node = onnx.helper.make_node(
        "EPContext",
        [spec.name for spec in record.inputs],
        [spec.name for spec in record.outputs],
        name=attributes["partition_name"],
        domain="com.microsoft",
        **attributes,
    )
    graph = onnx.helper.make_graph(
        [node], Path(record.graph).stem, _values(record.inputs), _values(record.outputs)
    )
    opsets = [
        onnx.helper.make_opsetid("", _OPSET),
        onnx.helper.make_opsetid("com.microsoft", 1),
    ]
    model = onnx.helper.make_model(
        graph, opset_imports=opsets, ir_version=_IR_VERSION, producer_name="enginery"
    )
    onnx.helper.set_model_props(model, metadata)
    onnx.checker.check_model(model)
    wrapper = directory / record.wrapper
    write_atomically(wrapper, model.SerializeToString())
    return wrapper


def _attributes(record: EngineRecord) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        # The plan stays a file: embedded, it would be in memory twice and limited to 2 GB.
        "embed_mode": 0,
        "ep_cache_context": record.plan,
        "source": get_flavor(record.flavor).provider,
        "partition_name": f"{Path(record.graph).stem}_{record.key[:16]}",
        "onnx_model_filename": Path(record.graph).name,
        "ep_sdk_version": record.tensorrt,
    }
    if architecture := _hardware_architecture(record):
        attributes["hardware_architecture"] = architecture
    if record.flavor == RTX.name:
        # Each node has its own payload; the provider supports nothing else.
        attributes |= {"main_context": 0, "max_size": 0, "ep_context_op_domain": "com.microsoft"}
    return attributes


def _hardware_architecture(record: EngineRecord) -> str:
    """Return `89` for one GPU, `80+` for all GPUs from Ampere on, or an empty text for several.

    Both providers compare it with the capability of the GPU and only warn.
    """
    if record.hardware_compatibility == "ampere-plus" or not record.capabilities:
        return _AMPERE_ON
    if len(record.capabilities) == 1:
        return record.capabilities[0].replace(".", "")
    return ""


def _require_plain_name(plan: str) -> None:
    """Check the plan's name: ONNX Runtime rejects absolute paths, and two dots anywhere in a path.

    Raises:
        ArtifactError: ONNX Runtime would reject the name.
    """
    if not plan or Path(plan).name != plan or ".." in plan or "\\" in plan:
        raise ArtifactError(
            f"ONNX Runtime rejects the plan's path '{plan}': expected the name of a file beside "
            "the wrapper, without two dots in a row.",
            do="Rename the graph." if ".." in plan and "/" not in plan else "",
        )


def _plan_header(plan: Path) -> bytes:
    try:
        require_regular_file(plan)
        with plan.open("rb") as stream:
            header = stream.read(ENGINE_HEADER_BYTES)
    except OSError as error:
        raise ArtifactError(f"{plan} cannot be read: {error.strerror}.") from error
    if len(header) < ENGINE_HEADER_BYTES:
        raise ArtifactError(
            f"{plan} has {len(header)} bytes, expected at least {ENGINE_HEADER_BYTES}.",
            do="Build the engine again.",
        )
    return header


def _values(specs: Sequence[TensorSpec]) -> list[Any]:
    import onnx

    values = []
    for spec in specs:
        if spec.dtype not in _DTYPES:
            raise ArtifactError(
                f"{spec} has an unsupported dtype; expected one of {', '.join(_DTYPES)}."
            )
        # TensorRT reports an unnamed dynamic dim as -1.
        dims = [None if dim == -1 else dim for dim in spec.dims]
        dtype = getattr(onnx.TensorProto, _DTYPES[spec.dtype])
        values.append(onnx.helper.make_tensor_value_info(spec.name, dtype, dims))
    return values

"""The ONNX model that stands for a plan: one EPContext node that names the plan's file.

Takes the directory of an engine with its plan, and the record of it; leaves `model_ctx.onnx` beside
the plan. ONNX Runtime opens that in the place of the model and builds nothing:

    >>> write_wrapper(Path("minilm/engines/tensorrt-rtx-sm89-3f2a91c04be7d815"), record)
    PosixPath('minilm/engines/tensorrt-rtx-sm89-3f2a91c04be7d815/model_ctx.onnx')

What the attributes mean is said in onnxruntime.ai/docs/execution-providers/EP-Context-Design.html;
what each provider reads of them, in its `onnx_ctx_model_helper.cc` (onnxruntime, core/providers/
tensorrt and nv_tensorrt_rtx). No wrapper of this project has been run on a GPU yet. What is known
without one: ONNX Runtime takes the graph, finds the node and names the provider that it wants.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from enginery.core.engine_record import EngineRecord
from enginery.core.errors import ArtifactError
from enginery.core.json_file import require_regular
from enginery.core.shapes import TensorSpec
from enginery.core.staging import write_beside
from enginery.runtime.tensorrt.options import RTX, flavor_named

ENGINE_HEADER_BYTES = 64
"""What says of a plan where it can run: `Runtime.engine_header_size` of TensorRT for RTX 1.7. Its
provider puts these bytes into the model, in hexadecimal, and checks them before it loads a plan."""

_COMPATIBILITY_INFO = "ep_compatibility_info."  # onnxruntime_ep_device_ep_metadata_keys.h
_OPSET, _IR_VERSION = 20, 10  # the wrapper has no operator of ONNX: any that ONNX Runtime reads
_AMPERE_ON = "80+"  # as both providers write it; see ValidateEPCtxNode in both helpers
_DTYPES = {
    "float32": "FLOAT", "float16": "FLOAT16", "bfloat16": "BFLOAT16", "float64": "DOUBLE",
    "int8": "INT8", "int32": "INT32", "int64": "INT64", "uint8": "UINT8", "bool": "BOOL",
}  # fmt: skip


def write_wrapper(directory: Path, record: EngineRecord) -> Path:
    """Writes the wrapper of a plan beside it, with the names, types and dims of its graph.

    Args:
        directory: where the plan is and the wrapper goes.
        record: what the plan is; its `inputs` and `outputs` as the artifact's graph has them.

    Returns:
        The wrapper's path.

    Raises:
        ArtifactError: the plan is missing or too short, its name is one that ONNX Runtime refuses,
            or a tensor is of a type that ONNX does not have.
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
    write_beside(wrapper, model.SerializeToString())
    return wrapper


def _attributes(record: EngineRecord) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        # The plan stays a file: embedded, it would be held twice, and 2 GB would be the most.
        "embed_mode": 0,
        "ep_cache_context": record.plan,
        "source": flavor_named(record.flavor).provider,
        "partition_name": f"{Path(record.graph).stem}_{record.key[:16]}",
        "onnx_model_filename": Path(record.graph).name,
        "ep_sdk_version": record.tensorrt,
    }
    if architecture := _hardware_architecture(record):
        attributes["hardware_architecture"] = architecture
    if record.flavor == RTX.name:
        # Each node has a payload of its own; its provider knows no other way.
        attributes |= {"main_context": 0, "max_size": 0, "ep_context_op_domain": "com.microsoft"}
    return attributes


def _hardware_architecture(record: EngineRecord) -> str:
    """`89`; `80+` for a plan of all GPUs from Ampere on; nothing where neither says it.

    Both providers only warn by it, and compare it with the one capability of the GPU.
    """
    if record.hardware_compatibility == "ampere-plus" or not record.capabilities:
        return _AMPERE_ON
    if len(record.capabilities) == 1:
        return record.capabilities[0].replace(".", "")
    return ""


def _require_plain_name(plan: str) -> None:
    """ONNX Runtime refuses absolute paths, and any with two dots in it wherever they are."""
    if not plan or Path(plan).name != plan or ".." in plan or "\\" in plan:
        raise ArtifactError(
            f"plan '{plan}': found a path that ONNX Runtime refuses, expected the name of a file "
            "beside the wrapper, without two dots in a row.",
            do="Rename the graph." if ".." in plan and "/" not in plan else "",
        )


def _plan_header(plan: Path) -> bytes:
    try:
        require_regular(plan)
        with plan.open("rb") as stream:
            header = stream.read(ENGINE_HEADER_BYTES)
    except OSError as error:
        raise ArtifactError(f"{plan} cannot be read: {error.strerror}.") from error
    if len(header) < ENGINE_HEADER_BYTES:
        raise ArtifactError(
            f"{plan} has {len(header)} bytes, too few for a plan (at least {ENGINE_HEADER_BYTES}).",
            do="Build it again.",
        )
    return header


def _values(specs: Sequence[TensorSpec]) -> list[Any]:
    import onnx

    values = []
    for spec in specs:
        if spec.dtype not in _DTYPES:
            raise ArtifactError(
                f"{spec}: a wrapper has no tensors of type {spec.dtype}; "
                f"known are {', '.join(_DTYPES)}."
            )
        # TensorRT gives a dynamic dim without a name as -1.
        dims = [None if dim == -1 else dim for dim in spec.dims]
        dtype = getattr(onnx.TensorProto, _DTYPES[spec.dtype])
        values.append(onnx.helper.make_tensor_value_info(spec.name, dtype, dims))
    return values

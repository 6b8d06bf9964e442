"""Read an engine's layers from the inspector of classic TensorRT.

    layers = read_inspector(engine.create_engine_inspector().get_engine_information(JSON))
    [layer.name for layer in layers if layer.precision == "int8"]
    # ['/encoder/layer.0/output/dense/MatMul_myl0_13']

The engine must be built with detailed verbosity, and loaded on its GPU. Sources: the developer
guide of TensorRT 10 ("Engine Inspector"; its sample is in the tests) and NVIDIA's engine explorer
(`trex/activations.py`, for the names of formats).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from enginery.core.artifact.engine_record import LayerKind, LayerRecord
from enginery.core.errors import ProviderError
from enginery.runtime.tensorrt.library import Messages
from enginery.runtime.tensorrt.log import (
    layer_kind,
    normalize_precision,
    onnx_nodes,
    product_precision,
)

# Formats such as "Thirty-two wide channel vectorized row major Int8 format." and "Half" contain the
# type. With dynamic shapes, the format may be "N/A due to dynamic shapes".
_TYPE = re.compile(
    r"\b(FP4|FP8|E4M3|FP16|FP32|BF16|BFloat16|Half|Float|Double|U?Int\d+|Bool)\b", re.IGNORECASE
)
_TYPE_KEYS = ("Format/Datatype", "Datatype", "DataType")
_SAME = {"fp32": "float", "fp16": "half"}

# ParameterType, the layer type in the network definition -> kind.
_PARAMETERS: dict[str, LayerKind] = {
    "Convolution": "convolution",
    "Deconvolution": "convolution",
    "MatrixMultiply": "gemm",
    "FullyConnected": "gemm",
}


def inspect_plan(trt: Any, plan: Any, messages: Messages) -> tuple[tuple[LayerRecord, ...], int]:
    """Load an engine on this GPU; return its layers and the activation memory in bytes.

    Args:
        trt: module of classic TensorRT.
        plan: serialized engine.
        messages: messages of TensorRT, for errors.

    Raises:
        ProviderError: TensorRT cannot load the engine.
    """
    runtime = trt.Runtime(messages.logger)
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        reason = next(reversed(messages.errors()), "no reason given.")
        raise ProviderError(
            f"TensorRT {trt.__version__} built an engine, but cannot load it: {reason}",
            do="The GPU's memory may be full; run: enginery doctor",
        )
    inspector = engine.create_engine_inspector()
    layers = read_inspector(inspector.get_engine_information(trt.LayerInformationFormat.JSON))
    return layers, int(engine.device_memory_size_v2)


def read_inspector(text: str) -> tuple[LayerRecord, ...]:
    """Return the layers of an engine, from the inspector's JSON.

    Raises:
        ProviderError: the text is not JSON, or has only the names of layers.
    """
    try:
        layers = json.loads(text)["Layers"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ProviderError(
            f"TensorRT's engine inspector gave no list of layers: {text[:80]!r}."
        ) from error
    if any(not isinstance(layer, dict) for layer in layers):
        raise ProviderError(
            "TensorRT's engine inspector gave only the names of layers.",
            do="Build the engine with profiling_verbosity DETAILED.",
        )
    return tuple(_layer(layer) for layer in layers)


def _layer(layer: Mapping[str, Any]) -> LayerRecord:
    name, kind_name = str(layer.get("Name", "")), str(layer.get("LayerType", ""))
    kind = _PARAMETERS.get(str(layer.get("ParameterType", "")), layer_kind(name, kind_name))
    inputs, outputs = _types(layer.get("Inputs", [])), _types(layer.get("Outputs", []))
    stored = [layer[part] for part in ("Weights", "Bias") if isinstance(layer.get(part), dict)]
    constants = _types([*stored, *layer.get("Constants", [])])
    # With dynamic shapes the type may be missing; then the weights of a product have it.
    operands = inputs or (constants[:1] if kind != "other" else ())
    return LayerRecord(
        name=name,
        kind=kind,
        precision=product_precision(name, kind, operands, constants, outputs),
        type=kind_name,
        inputs=inputs,
        constants=constants,
        outputs=outputs,
        nodes=onnx_nodes(str(layer.get("Metadata", ""))),
        tactic=str(layer.get("TacticName", "")),
    )


def _types(tensors: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the known types of tensors, with the names of `LayerRecord`."""
    words = (
        str(next((tensor[key] for key in (*_TYPE_KEYS, "Type") if key in tensor), ""))
        for tensor in tensors
    )
    types = (match[1].lower() for word in words if (match := _TYPE.search(word)))
    return tuple(normalize_precision(_SAME.get(word, word)) for word in types)

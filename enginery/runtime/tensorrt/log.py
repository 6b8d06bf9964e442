"""Read an engine's layers from the build log of TensorRT for RTX.

    layers = read_layers(log)
    [layer.name for layer in layers if layer.kind == "gemm" and layer.precision == "int8"]
    # ['/encoder/layer.0/output/dense/MatMul_myl0_13']

The build must use detailed verbosity. TensorRT's inspector (`inspector.py`) needs the GPU that the
engine is for; the log does not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from enginery.core.artifact.engine_record import LayerKind, LayerRecord

_LAYER = re.compile(
    r"^Name: (?P<name>.*?), LayerType: (?P<type>[^,]*), Inputs: (?P<inputs>\[.*?\])"
    r"(?:, Constants: (?P<constants>\[.*?\]))?, Outputs: (?P<outputs>\[.*?\])"
    r"(?P<rest>(?:, (?:TacticName|StreamId|Metadata|Attributes): .*)?)$"
)
_DTYPE = re.compile(r"Datatype: (\w+)")
_NODE = re.compile(r"\[ONNX Layer: ([^\x1e\x1f]*?)\](?=[\x1e\x1f\s,\[]|$)")
_TACTIC = re.compile(r", TacticName: ([^,]*)")
_SIZE = re.compile(r"^Total (Activation|Weights) Memory: (\d+) bytes")

_PRECISIONS = {
    "float": "fp32",
    "half": "fp16",
    "bfloat16": "bf16",
    "bf16": "bf16",
    "int8": "int8",
    "fp8": "fp8",
    "e4m3": "fp8",
    "fp4": "fp4",
    "int4": "int4",
    "double": "fp64",
}

# TensorRT computes a convolution as a correlation, which does not flip the kernel.
_KINDS: dict[str, LayerKind] = {"gemm": "gemm", "correlation": "convolution"}

# TensorRT's compiler names a fused layer after its operations, four letters each:
# __myl_FcAddDivErfAddMulMul is a GEMM with bias and GELU.
_FUSED = re.compile(r"^__myl_(?P<operations>[A-Za-z]+)")
_OPERATIONS: dict[str, LayerKind] = {"Fc": "gemm", "Gemm": "gemm", "Corr": "convolution"}

_QUANTIZED = ("int8", "fp8", "int4", "fp4")
_FLOATS = ("fp32", "fp16", "bf16")


def read_layers(messages: Iterable[str]) -> tuple[LayerRecord, ...]:
    """Return the engine's layers in order; none if the log does not list them."""
    layers: list[LayerRecord] = []
    for message in messages:
        if message.startswith("Layers:"):
            layers = [
                layer for line in message.splitlines()[1:] if (layer := read_layer(line))
            ]  # TensorRT prints a list for each engine that it builds; the last one counts
    return tuple(layers)


def read_layer(line: str) -> LayerRecord | None:
    """Parse one line of the list of layers; return None for other lines."""
    match = _LAYER.match(line)
    if not match:
        return None
    name, kind_name = match["name"], match["type"]
    inputs, constants, outputs = (
        tuple(normalize_precision(word) for word in _DTYPE.findall(match[part] or ""))
        for part in ("inputs", "constants", "outputs")
    )
    kind = layer_kind(name, kind_name)
    remainder = match["rest"]
    tactic = _TACTIC.search(remainder)
    return LayerRecord(
        name=name,
        kind=kind,
        precision=product_precision(name, kind, inputs, constants, outputs),
        type=kind_name,
        inputs=inputs,
        constants=constants,
        outputs=outputs,
        nodes=onnx_nodes(remainder),
        tactic=tactic[1] if tactic else "",
    )


def layer_kind(name: str, kind_name: str) -> LayerKind:
    """Return the kind of a layer, from its name and TensorRT's layer type."""
    # A fused attention has `mha` in its name, whatever its type.
    if "mha" in name.lower():
        return "attention"
    if kind_name in _KINDS:
        return _KINDS[kind_name]
    kinds = (_OPERATIONS[word] for word in _operations(name) if word in _OPERATIONS)
    return next(kinds, "other")


def _operations(name: str) -> list[str]:
    fused = _FUSED.match(name)
    return re.findall(r"[A-Z][a-z]*", fused["operations"]) if fused else []


def product_precision(
    name: str,
    kind: LayerKind,
    inputs: Sequence[str],
    constants: Sequence[str],
    outputs: Sequence[str],
) -> str:
    """Return the precision of a product's operands, or of another layer's output."""
    if kind == "other":
        return next(iter([*outputs, *inputs]), "")
    operand = next(iter([*inputs, *outputs]), "")
    first = next(iter(_operations(name)), "")
    if operand in _QUANTIZED and first and first not in _OPERATIONS:
        # The integers are converted to floats before the product, as in __myl_CastMulFc, so the
        # product is one of floats.
        return next((word for word in [*constants, *outputs] if word in _FLOATS), operand)
    return operand


def memory_bytes(messages: Iterable[str]) -> dict[str, int]:
    """Return the device memory of the engine in bytes, under `activation` and `weights`."""
    matches = (match for message in messages if (match := _SIZE.match(message)))
    return {match[1].lower(): int(match[2]) for match in matches}


def onnx_nodes(metadata: str) -> tuple[str, ...]:
    """Return the ONNX nodes of a layer, from `[ONNX Layer: …]` in its metadata."""
    return tuple(_NODE.findall(metadata))


def normalize_precision(word: str) -> str:
    """Return the name of a precision; other types of TensorRT are lowercased.

    >>> normalize_precision("Half"), normalize_precision("Int64")
    ('fp16', 'int64')
    """
    return _PRECISIONS.get(word.lower(), word.lower())

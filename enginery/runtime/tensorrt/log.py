"""An engine's layers, read from TensorRT's build log.

Takes the log of a build with detailed verbosity, by TensorRT for RTX; leaves one `LayerRecord` a
layer. TensorRT's own inspector (`inspector.py`) wants the GPU that the engine is for; the log
does not.

    >>> layers = read_layers(log)
    >>> [layer.name for layer in layers if layer.kind == "gemm" and layer.precision == "int8"]
    ['/encoder/layer.0/output/dense/MatMul_myl0_13']
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

# TensorRT computes a convolution as a correlation: the same sum without turning the kernel round.
_KINDS: dict[str, LayerKind] = {"gemm": "gemm", "correlation": "convolution"}

# TensorRT's compiler names a fused layer after its operations, four letters each:
# __myl_FcAddDivErfAddMulMul is a GEMM with bias and GELU.
_FUSED = re.compile(r"^__myl_(?P<operations>[A-Za-z]+)")
_OPERATIONS: dict[str, LayerKind] = {"Fc": "gemm", "Gemm": "gemm", "Corr": "convolution"}

_QUANTIZED = ("int8", "fp8", "int4", "fp4")
_FLOATS = ("fp32", "fp16", "bf16")


def read_layers(messages: Iterable[str]) -> tuple[LayerRecord, ...]:
    """The engine's layers in order; none where the log does not have them."""
    found: list[LayerRecord] = []
    for message in messages:
        if message.startswith("Layers:"):
            found = [
                layer for line in message.splitlines()[1:] if (layer := read_layer(line))
            ]  # the last list counts: TensorRT prints one for each engine it makes
    return tuple(found)


def read_layer(line: str) -> LayerRecord | None:
    """One line of the list of layers; None for a line that is no layer."""
    match = _LAYER.match(line)
    if not match:
        return None
    name, kind_name = match["name"], match["type"]
    inputs, constants, outputs = (
        tuple(precision_named(word) for word in _DTYPE.findall(match[part] or ""))
        for part in ("inputs", "constants", "outputs")
    )
    kind = layer_kind(name, kind_name)
    rest = match["rest"]
    tactic = _TACTIC.search(rest)
    return LayerRecord(
        name=name,
        kind=kind,
        precision=product_precision(name, kind, inputs, constants, outputs),
        type=kind_name,
        inputs=inputs,
        constants=constants,
        outputs=outputs,
        nodes=onnx_nodes(rest),
        tactic=tactic[1] if tactic else "",
    )


def layer_kind(name: str, kind_name: str) -> LayerKind:
    """What a layer is, by its name and TensorRT's word for its kind."""
    if "mha" in name.lower():
        return "attention"
    if kind_name in _KINDS:
        return _KINDS[kind_name]
    found = (_OPERATIONS[word] for word in _operations(name) if word in _OPERATIONS)
    return next(found, "other")


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
    """What a product multiplies, and any other layer gives its result in; see `LayerRecord`."""
    if kind == "other":
        return next(iter([*outputs, *inputs]), "")
    taken = next(iter([*inputs, *outputs]), "")
    first = next(iter(_operations(name)), "")
    if taken in _QUANTIZED and first and first not in _OPERATIONS:
        # Something is done to the integers before they are multiplied, __myl_CastMulFc: they
        # become floats first, and the product is one of floats.
        return next((word for word in [*constants, *outputs] if word in _FLOATS), taken)
    return taken


def memory_bytes(messages: Iterable[str]) -> dict[str, int]:
    """`activation` and `weights`: the device memory that the engine will take, in bytes."""
    found = (match for message in messages if (match := _SIZE.match(message)))
    return {match[1].lower(): int(match[2]) for match in found}


def onnx_nodes(metadata: str) -> tuple[str, ...]:
    """The ONNX nodes of a layer, from `[ONNX Layer: …]` in its metadata."""
    return tuple(_NODE.findall(metadata))


def precision_named(word: str) -> str:
    """`fp16` for TensorRT's `Half`; its own word, in small letters, for what is no float."""
    return _PRECISIONS.get(word.lower(), word.lower())

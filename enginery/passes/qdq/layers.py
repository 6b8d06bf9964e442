"""Find the layers of a graph with a constant weight, and which of them can be quantized.

>>> model = ir.from_onnx_text('''<ir_version: 9, opset_import: ["" : 20]>
... g (float[n, 32] x) => (float[n, 8] y) <float[32, 8] w = {0}> { y = MatMul (x, w) }''')
>>> [layer] = find_layers(model)
>>> layer.reduction_size, layer.out_channels, layer.skip_reason
(32, 8, 'K = 32 and N = 8: INT8 gains nothing below 16')
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

_MIN_GEMM_SIZE = 16
"""Tensor cores work on tiles of 16, so smaller products gain nothing from INT8."""


_LAYERS = ("MatMul", "Gemm", "Conv", "ConvTranspose")


@dataclass(frozen=True)
class Layer:
    """A MatMul, Gemm, Conv or ConvTranspose whose weight is constant."""

    name: str
    op_type: str
    activation: str
    weight: str
    output: str
    reduction_size: int
    """K, the number of multiply-adds for one output element; their mean for a ConvTranspose."""
    in_channels: int
    """Input channels of one output channel: K, divided by the kernel's area for a convolution."""
    out_channels: int
    """N, the number of output channels."""
    weight_axis: int
    """The axis of the weight that holds the output channels."""
    bias: str
    """The name of the constant (N,) that is added to the output; empty if there is none."""
    split: bool
    """True if the output is split along its channels, like the joint query, key and value of
    GPT-2."""
    skip_reason: str
    """The reason why the layer is not quantized to INT8 for TensorRT; empty if it can be."""
    too_small: bool
    """True if `skip_reason` is the layer's size, which matters to tensor cores alone."""
    groups: int
    """Groups of a convolution; 1 for a product."""
    activated_output: str
    """The output of the ReLU or Clip that is its only reader; `output` if there is none."""

    @property
    def linear(self) -> bool:
        """True for a product over the activation's last axis, whose channels can be scaled."""
        return self.op_type in ("MatMul", "Gemm")


def find_layers(model: ir.Model) -> tuple[Layer, ...]:
    """Return every product and convolution of the main graph with a constant weight, in order."""
    candidates = (_layer(node) for node in model.graph)
    return tuple(layer for layer in candidates if layer is not None)


def constant_tensor(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Return the tensor of an initializer or of a Constant node; None for a computed value.

    Identity nodes are followed to their input: exporters use them to share a weight.
    """
    while value is not None and (maker := value.producer()) and maker.op_type == "Identity":
        value = maker.inputs[0]
    return None if value is None else ir.convenience.get_const_tensor(value)


def operands(node: ir.Node) -> tuple[ir.Value, NDArray[np.float32]]:
    """Return the activation and the constant weight of a layer's node.

    Raises:
        ValueError: the node has no activation or no constant weight.
    """
    source, tensor = node.inputs[0], constant_tensor(node.inputs[1])
    if source is None or tensor is None:
        raise ValueError(
            f"{node.name} is not a layer: expected an activation and a constant weight as inputs"
        )
    return source, np.asarray(tensor.numpy(), dtype=np.float32)


def _bias(node: ir.Node, out_channels: int) -> str:
    """Return the name of the constant (N,) that is added to a layer's output, or ''."""
    if node.op_type != "MatMul":
        value = node.inputs[2] if len(node.inputs) > 2 else None
    else:
        add = following_add(node)
        value = None if add is None else _other_input(add, node.outputs[0])
    tensor = constant_tensor(value)
    if value is None or tensor is None or list(tensor.shape.numpy()) != [out_channels]:
        return ""
    return value.name or ""


def _is_split(output: ir.Value, depth: int = 4) -> bool:
    """Return True if a value is split, possibly after a bias, a Reshape and a Transpose."""
    for user in (use.node for use in output.uses()):
        if user.op_type in ("Split", "Slice"):
            return True
        biased = user.op_type == "Add" and constant_tensor(_other_input(user, output)) is not None
        moved = user.op_type in ("Reshape", "Transpose") and user.inputs[0] is output
        if depth and (biased or moved) and _is_split(user.outputs[0], depth - 1):
            return True
    return False


def following_add(node: ir.Node) -> ir.Node | None:
    """Return the Add that is the only consumer of a node's output, or None."""
    uses = list(node.outputs[0].uses())
    if len(uses) == 1 and not node.outputs[0].is_graph_output():
        return uses[0].node if uses[0].node.op_type == "Add" else None
    return None


def _other_input(add: ir.Node, value: ir.Value) -> ir.Value | None:
    return add.inputs[1] if add.inputs[0] is value else add.inputs[0]


def _layer(node: ir.Node) -> Layer | None:
    if node.op_type not in _LAYERS or node.domain not in ("", "ai.onnx"):
        return None
    weight = constant_tensor(node.inputs[1])
    source = node.inputs[0]
    if weight is None or source is None or constant_tensor(source) is not None:
        return None
    shape = [int(size) for size in weight.shape.numpy()]
    groups = _int(node, "group", 1)
    skip_reason = "" if weight.dtype == ir.DataType.FLOAT else f"its weight is {weight.dtype.name}"
    axis = len(shape) - 1
    if node.op_type == "Conv":
        axis = 0
        # Each group multiplies its own share of the channels.
        reduction_size, out_channels, gemm_n = int(np.prod(shape[1:])), shape[0], shape[0] // groups
        in_channels = shape[1]
    elif node.op_type == "ConvTranspose":
        axis = 1
        in_channels, out_channels = shape[0] // groups, shape[1] * groups
        strides = node.attributes.get_ints("strides", ()) or ()
        # A mean: the strides decide which elements of the kernel meet an output element.
        reduction_size = in_channels * int(np.prod(shape[2:])) // int(np.prod(strides))
        gemm_n = shape[1]
        # A plan of TensorRT for RTX 1.7 dequantizes its weight; ONNX Runtime has no such kernel.
        skip_reason = skip_reason or (
            "TensorRT multiplies a transposed convolution in FP16, and ONNX Runtime in FP32"
        )
    else:
        if node.op_type == "Gemm" and _int(node, "transB", 0):
            axis = 0
        reduction_size, out_channels = shape[1 - axis] if len(shape) == 2 else 0, shape[axis]
        in_channels, gemm_n = reduction_size, out_channels
        skip_reason = skip_reason or _product_skip_reason(node, shape)
    too_small = not skip_reason and min(reduction_size, gemm_n) < _MIN_GEMM_SIZE
    if too_small:
        skip_reason = (
            f"K = {reduction_size} and N = {gemm_n}: INT8 gains nothing below {_MIN_GEMM_SIZE}"
        )
    return Layer(
        name=node.name or "",
        op_type=node.op_type,
        activation=source.name or "",
        weight=node.inputs[1].name or "" if node.inputs[1] else "",
        output=node.outputs[0].name or "",
        reduction_size=reduction_size,
        in_channels=in_channels,
        out_channels=out_channels,
        weight_axis=axis,
        bias=_bias(node, out_channels),
        split=_is_split(node.outputs[0]),
        skip_reason=skip_reason,
        too_small=too_small,
        groups=groups,
        activated_output=activated_output(node).name or "",
    )


def activated_output(node: ir.Node) -> ir.Value:
    """Return a layer's output, or that of the ReLU or Clip that is its only reader."""
    output = node.outputs[0]
    uses = list(output.uses())
    if len(uses) != 1 or output.is_graph_output() or uses[0].idx:
        return output
    user = uses[0].node
    beside = user.graph is node.graph and user.domain in ("", "ai.onnx")
    return user.outputs[0] if beside and user.op_type in ("Relu", "Clip") else output


def quantized_tensors(layers: Sequence[Layer], *, outputs: bool) -> dict[str, bool]:
    """Return the tensors that quantizing layers needs ranges of, by name.

    Args:
        layers: the layers.
        outputs: include the outputs of convolutions, see `insert_qdq`.

    Returns:
        Whether all layers that read the tensor multiply over its last axis, so that its channels
        can be scaled. False for an output that is quantized.
    """
    linear: dict[str, bool] = {}
    for layer in layers:
        linear[layer.activation] = linear.get(layer.activation, True) and layer.linear
    convolutions = [layer for layer in layers if outputs and not layer.linear]
    return linear | {layer.activated_output: False for layer in convolutions}


def _product_skip_reason(node: ir.Node, shape: Sequence[int]) -> str:
    if len(shape) != 2:
        return f"its weight has {len(shape)} dims, expected 2"
    if node.op_type == "Gemm":
        alpha, beta = (node.attributes.get_float(name, 1.0) for name in ("alpha", "beta"))
        if _int(node, "transA", 0) or (alpha, beta) != (1.0, 1.0):
            return "a Gemm with transA, or with alpha or beta other than 1"
    return ""


def _int(node: ir.Node, name: str, default: int) -> int:
    return int(node.attributes.get_int(name, default) or 0)

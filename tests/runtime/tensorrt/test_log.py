"""The lines of TensorRT's build log, as 1.7.1 writes them."""

import pytest

from enginery.runtime.tensorrt.log import memory_bytes, read_layer, read_layers

_TENSOR = (
    "{{ Name: {name}, Dimensions: [-1,64], Strides: [64,1], StrideOrder: [1,0], "
    "Datatype: {dtype}, Format: (Arbitrary) Format with stride order = [1,2,0] }}"
)


def tensors(*dtypes):
    inner = ", ".join(_TENSOR.format(name=f"t{i}", dtype=d) for i, d in enumerate(dtypes))
    return f"[ {inner}]" if dtypes else "[]"


def line(name, kind, inputs=("Half",), constants=(), outputs=("Half",), nodes=("n",)):
    metadata = "\x1f".join(f"[ONNX Layer: {node}]" for node in nodes)
    return (
        f"Name: {name}, LayerType: {kind}, Inputs: {tensors(*inputs)}, "
        f"Constants: {tensors(*constants)}, Outputs: {tensors(*outputs)}, "
        f"TacticName: tactic_0x12, StreamId: 0, Metadata: {metadata}"
    )


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("/layer.0/dense/MatMul_myl0_9", "gemm", "gemm"),
        ("__myl_FcAddDivErfAddMulMul_myl0_10", "runtime_fusion", "gemm"),
        ("_gemm_mha_v2_myl0_17", "kgen", "attention"),
        ("/projection/Conv_myl0_2", "correlation", "convolution"),
        ("__myl_CorrAdd_myl0_11", "runtime_fusion", "convolution"),
        ("__myl_MoveReplConc_myl0_4", "kgen", "other"),
        ("__mye7106_0_myl0_0", "shape_call", "other"),
        ("/pooler/MaxPool_myl0_3", "maxpool", "other"),
    ],
)
def test_layers_are_told_apart(name, kind, expected):
    assert read_layer(line(name, kind)).kind == expected


@pytest.mark.parametrize(
    ("name", "types", "expected"),
    [
        ("mm_myl0_1", (["Int8"], ["Int8", "Float"], ["Half"]), "int8"),
        ("mm_myl0_1", (["Half"], ["Half", "Float"], ["Half"]), "fp16"),
        ("mm_myl0_1", (["BFloat16"], ["BFloat16"], ["BFloat16"]), "bf16"),
        ("mm_myl0_1", (["FP8"], ["FP8"], ["Half"]), "fp8"),
        ("__myl_FcMulAdd_myl0_1", (["Int8"], ["Int8", "Half"], ["Half"]), "int8"),
        # dequantized before it is multiplied
        ("__myl_CastMulCastFc_myl0_1", (["Int8"], ["Half", "Int8"], ["Half"]), "fp16"),
        ("__myl_CastMulFc_myl0_1", (["Int8"], ["Int8"], ["Float"]), "fp32"),
        # INT8 weights alone
        ("__myl_CastMulCastFc_myl0_1", (["Float"], ["Float", "Int8"], ["Float"]), "fp32"),
    ],
)
def test_precision_is_that_of_the_product(name, types, expected):
    kind = "runtime_fusion" if name.startswith("__myl") else "gemm"
    assert read_layer(line(name, kind, *types)).precision == expected


def test_other_layers_have_the_precision_of_their_result():
    layer = read_layer(line("__myl_MulMinMaxRounCast_myl0_1", "kgen", ["Half"], [], ["Int8"]))
    assert (layer.kind, layer.precision, layer.inputs) == ("other", "int8", ("fp16",))


def test_every_onnx_node_of_a_fused_layer_is_listed():
    layer = read_layer(line("a+b_myl0_1", "gemm", nodes=["/a/MatMul", "/b/MatMul", "x[0]"]))
    assert layer.nodes == ("/a/MatMul", "/b/MatMul", "x[0]")
    assert layer.tactic == "tactic_0x12"


def test_last_list_of_layers_counts():
    first, second = line("a", "gemm"), line("b", "gemm", ["Int8"])
    log = ["noise", f"Layers:\n{first}", f"Layers:\n{second}\n\nI/O Tensors:\n Name: x, IOMode: In"]
    assert [layer.name for layer in read_layers(log)] == ["b"]


def test_log_without_a_list_has_no_layers():
    assert read_layers(["Engine generation completed in 0.2 seconds."]) == ()


def test_memory_is_read():
    log = ["Total Activation Memory: 11864064 bytes", "Total Weights Memory: 2607616 bytes"]
    assert memory_bytes(log) == {"activation": 11864064, "weights": 2607616}

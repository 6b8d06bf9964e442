"""Real engines, built without a GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import onnx
import psutil
import pytest
from onnx import TensorProto

from enginery.core.errors import (
    MissingPackageError,
    OptionError,
    ProviderError,
    ShapeError,
    SourceError,
)
from enginery.core.shapes import Profile
from enginery.runtime.tensorrt import library, process
from enginery.runtime.tensorrt.build import BuildRequest
from enginery.runtime.tensorrt.library import has_tensorrt
from enginery.runtime.tensorrt.options import BuildOptions
from enginery.runtime.tensorrt.process import build_plan, coverage, parse_onnx
from tests.passes.onnx_graphs import WIDTH, node, quantized_constants, quantized_product, save_graph
from tests.tiny import tiny_artifact

needs_tensorrt = pytest.mark.skipif(
    not has_tensorrt(), reason="pip install 'enginery[tensorrt-rtx]'"
)
PROFILE = Profile.parse("batch=1:2:4,sequence=1:16:32")
BATCH = Profile.parse("batch=1:4:8")


@pytest.fixture(scope="session")
def wide_bert(tmp_path_factory):
    """A BERT whose heads are wide enough (64) for TensorRT's fused attention."""
    return tiny_artifact(
        "bert",
        "text-classification",
        tmp_path_factory.mktemp("wide") / "bert",
        hidden_size=128,
        num_attention_heads=2,
    )


@pytest.fixture
def halved(tmp_path):
    """`halved(path)`: the graph in FP16, as ONNX Runtime's own converter makes it."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    def make(path):
        out = tmp_path / "fp16.onnx"
        onnx.save(convert_float_to_float16(onnx.load(str(path)), keep_io_types=True), str(out))
        return out

    return make


def merged_decoder(path):
    """As Optimum merges decoders: an If on `use_cache_branch`."""

    def branch(name, op_type):
        out = onnx.helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", WIDTH])
        return onnx.helper.make_graph([node(op_type, "r", name)], name, [], [out])

    return save_graph(
        path,
        [
            node("Relu", "x", "r"),
            node(
                "If",
                "use_cache_branch",
                "y",
                name="choice",
                then_branch=branch("t", "Relu"),
                else_branch=branch("e", "Sigmoid"),
            ),
        ],
        inputs={
            "x": (TensorProto.FLOAT, ["batch", WIDTH]),
            "use_cache_branch": (TensorProto.BOOL, [1]),
        },
    )


def wait_for(condition):
    """What `condition` gives, as soon as that is true; false after a minute."""
    until = time.monotonic() + 60
    while not (found := condition()) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def products(path):
    nodes = onnx.load(str(path)).graph.node
    return {n.name for n in nodes if n.op_type in ("MatMul", "Gemm", "Conv")}


def computed(built):
    """The ONNX nodes inside layers that count as GEMM, convolution or attention."""
    return {name for layer in built.layers if layer.kind != "other" for name in layer.nodes}


@needs_tensorrt
def test_fp32_bert_builds_and_every_product_is_counted(exported):
    model = exported("bert", "text-classification").model
    built = build_plan(model, BuildRequest([PROFILE], capabilities=["8.9"]))
    assert products(model) <= computed(built)
    assert built.count("gemm", "fp32") == built.count("gemm") > 0
    assert built.fused_attentions == 0
    assert built.capabilities == ("8.9",)
    assert built.profiles == (str(PROFILE),)
    assert [str(spec) for spec in built.inputs] == [
        "input_ids: int64 (batch, sequence)",
        "attention_mask: int64 (batch, sequence)",
        "token_type_ids: int64 (batch, sequence)",
    ]
    assert [spec.name for spec in built.outputs] == ["logits"]
    assert len(built.plan) > built.weights_bytes > 0
    assert built.activation_bytes > 0
    assert built.peak_rss_bytes > 0
    assert built.seconds > 0


@pytest.mark.more
@needs_tensorrt
def test_fp16_attention_is_fused(wide_bert, halved):
    built = build_plan(halved(wide_bert.model), BuildRequest([PROFILE]))
    assert built.fused_attentions == built.count("attention", "fp16") == 2
    assert built.count("gemm", "fp16") > 0
    assert built.count("gemm", "fp32") == 0
    assert build_plan(wide_bert.model, BuildRequest([PROFILE])).fused_attentions == 0


@needs_tensorrt
@pytest.mark.parametrize(("axis", "precision"), [(1, "int8"), (0, "fp32")])
def test_gemm_of_dequantized_weights_does_not_count_as_int8(tmp_path, axis, precision):
    """Scales along the summed axis: INT8 goes in, and is made FP32 before it is multiplied."""
    path = save_graph(tmp_path / "m.onnx", quantized_product(axis=axis), quantized_constants())
    built = build_plan(path, BuildRequest([BATCH]))
    assert built.count("gemm") == built.count("gemm", precision) == 1
    assert built.int8_gemms == (precision == "int8")


@needs_tensorrt
@pytest.mark.parametrize("quantized", [True, False])
def test_int8_convolutions_are_counted(tmp_path, quantized):
    constants = quantized_constants(
        w=np.ones((32, 32, 3, 3), np.int8), sv=np.ones(32, np.float32), zv=np.zeros(32, np.int8)
    )
    shape = (TensorProto.FLOAT, ["batch", 32, 16, 16])
    nodes = [*quantized_product(axis=0)[:3], node("Conv", "d wd", "y", name="c", pads=[1] * 4)]
    if not quantized:
        constants = {"w": np.ones((32, 32, 3, 3), np.float32)}
        nodes = [node("Conv", "x w", "y", name="c", pads=[1] * 4)]
    path = save_graph(
        tmp_path / "c.onnx", nodes, constants, inputs={"x": shape}, outputs={"y": shape}
    )
    built = build_plan(path, BuildRequest([BATCH]))
    assert built.count("convolution") == 1
    assert built.count("convolution", "int8") == quantized
    assert built.count("convolution", "fp32") == (not quantized)


@needs_tensorrt
def test_several_profiles_and_capabilities_go_into_one_plan(exported):
    model = exported("bert", "text-classification").model
    profiles = [PROFILE, Profile.parse("batch=1,sequence=64:96:128")]
    built = build_plan(model, BuildRequest(profiles, capabilities=["8.9", "12.0"]))
    assert built.profiles == tuple(str(profile) for profile in profiles)
    assert built.capabilities == ("8.9", "12.0")
    log = process.log_path(model).read_text(encoding="utf-8")
    [ranges] = [line for line in log.splitlines() if line.startswith(" Name: input_ids")]
    assert "MinShape: [1,1], OptShape: [2,16], MaxShape: [4,32]" in ranges
    assert "MinShape: [1,64], OptShape: [1,96], MaxShape: [1,128]" in ranges


@needs_tensorrt
def test_no_capability_gives_a_portable_plan(tmp_path):
    path = save_graph(tmp_path / "r.onnx", [node("Relu", "x", "y")])
    assert build_plan(path, BuildRequest([BATCH], capabilities=[])).plan


@needs_tensorrt
def test_child_process_and_this_one_find_the_same(tmp_path):
    path = save_graph(tmp_path / "m.onnx", quantized_product(), quantized_constants())
    child = build_plan(path, BuildRequest([BATCH]))
    here = build_plan(path, BuildRequest([BATCH]), isolated=False)
    assert (child.layers, child.inputs, child.outputs, child.warnings) == (
        here.layers,
        here.inputs,
        here.outputs,
        here.warnings,
    )
    assert parse_onnx(path) == parse_onnx(path, isolated=False)


@needs_tensorrt
def test_all_rejected_operators_are_named(tmp_path):
    path = save_graph(
        tmp_path / "g.onnx",
        [
            node("BiasGelu", "x b", "a", name="first", domain="com.microsoft"),
            node("Relu", "a", "c", name="fine"),
            node("QuickGelu", "c", "y", name="second", domain="com.microsoft"),
        ],
        {"b": np.ones(WIDTH, np.float32)},
    )
    report = parse_onnx(path)
    assert not report.accepted
    assert [(r.node, r.op_type) for r in report.refusals] == [
        ("first", "BiasGelu"),
        ("second", "QuickGelu"),
    ]
    assert "Plugin not found" in report.refusals[0].reason
    with pytest.raises(ProviderError, match=r"rejects first \(BiasGelu\).*\(1 more\).*lint"):
        build_plan(path, BuildRequest([BATCH]))


@needs_tensorrt
def test_unnamed_node_is_rejected_by_index(tmp_path):
    path = save_graph(
        tmp_path / "g.onnx",
        [node("DynamicQuantizeLinear", "x", "q s z"), node("DequantizeLinear", "q s z", "y")],
    )
    assert [r.node for r in parse_onnx(path).refusals] == ["#0"]


@needs_tensorrt
def test_messages_belong_to_their_own_call(tmp_path):
    """TensorRT keeps one logger for the whole process."""
    unsigned = quantized_constants(z=np.array(0, np.uint8))
    noisy = save_graph(tmp_path / "u.onnx", quantized_product(), unsigned)
    quiet = save_graph(tmp_path / "r.onnx", [node("Relu", "x", "y")])
    assert any("UINT8" in text for text in parse_onnx(noisy, isolated=False).warnings)
    assert parse_onnx(quiet, isolated=False).warnings == ()


@needs_tensorrt
def test_messages_of_an_inner_block_stay_inside():
    trt = library.load_tensorrt()
    severity = trt.ILogger.Severity
    heard = []
    with library.trt_messages(trt) as outer:
        with library.trt_messages(trt, [lambda *said: heard.append(said)]) as inner:
            inner.logger.log(severity.ERROR, "inside")
        outer.logger.log(severity.WARNING, "outside")
    outer.logger.log(severity.ERROR, "afterwards")
    assert [*inner.entries] == heard == [("error", "inside")]
    assert [*outer.entries] == [("warning", "outside")]


@needs_tensorrt
@pytest.mark.parametrize("isolated", [True, False])
@pytest.mark.parametrize(
    ("profiles", "words"),
    [
        ([], "dynamic dims batch, sequence, but no profile"),
        (["batch=1:2:4"], "lacks the dim 'sequence'"),
        (["batch=1,sequence=8,rows=4"], "no dynamic dim 'rows'"),
        (["batch=1,sequence=8", "batch=1,sequence=8:64:256"], "positions end at 128"),
    ],
)
def test_bad_profile_never_reaches_the_builder(exported, profiles, words, isolated):
    model = exported("bert", "text-classification").model
    with pytest.raises(ShapeError, match=words):
        build_plan(
            model,
            BuildRequest([Profile.parse(text) for text in profiles], limits={"sequence": 128}),
            isolated=isolated,
        )


@needs_tensorrt
def test_sum_of_dims_takes_its_sizes_from_the_profile(tmp_path):
    dims = (TensorProto.FLOAT, ["batch", "past + sequence"])
    path = save_graph(
        tmp_path / "s.onnx", [node("Relu", "x", "y")], inputs={"x": dims}, outputs={"y": dims}
    )
    built = build_plan(path, BuildRequest([Profile.parse("batch=1,past=1:8:16,sequence=1:2:4")]))
    assert str(built.inputs[0]) == "x: float32 (batch, past + sequence)"
    log = (process.log_path(path)).read_text(encoding="utf-8")
    assert "MinShape: [1,2], OptShape: [1,10], MaxShape: [1,20]" in log


@needs_tensorrt
def test_dims_go_by_the_names_that_profiles_use(tmp_path):
    dims = (TensorProto.FLOAT, ["batch_size", "sequence_length"])
    path = save_graph(
        tmp_path / "s.onnx", [node("Relu", "x", "y")], inputs={"x": dims}, outputs={"y": dims}
    )
    built = build_plan(path, BuildRequest([Profile.parse("batch_size=1:2:4,sequence=8")]))
    assert built.inputs[0].dims == ("batch", "sequence")


@needs_tensorrt
def test_dim_without_a_name_is_an_error(tmp_path):
    dims = (TensorProto.FLOAT, ["batch", None])
    path = save_graph(
        tmp_path / "n.onnx", [node("Relu", "x", "y")], inputs={"x": dims}, outputs={"y": dims}
    )
    with pytest.raises(ShapeError, match="input x: dim 1 is dynamic, but has no name"):
        build_plan(path, BuildRequest([BATCH]))


@needs_tensorrt
def test_input_that_holds_a_shape_is_an_error(tmp_path):
    path = save_graph(
        tmp_path / "s.onnx",
        [node("Reshape", "x shape", "y")],
        inputs={"x": (TensorProto.FLOAT, ["batch", 4]), "shape": (TensorProto.INT64, [2])},
        outputs={"y": (TensorProto.FLOAT, [None, None])},
    )
    with pytest.raises(ShapeError, match="input shape holds a shape"):
        build_plan(path, BuildRequest([BATCH]))


@needs_tensorrt
@pytest.mark.parametrize("capability", ["9.0", "ada", ""])
def test_unknown_capability_is_an_error_that_lists_the_known(tmp_path, capability):
    path = save_graph(tmp_path / "r.onnx", [node("Relu", "x", "y")])
    with pytest.raises(OptionError, match=rf"'{capability}'.*7\.5, 8\.0, 8\.6, 8\.9, 12\.0"):
        build_plan(path, BuildRequest([BATCH], capabilities=[capability]))


@needs_tensorrt
def test_fp32_on_turing_has_a_remedy(tmp_path):
    constants = {"w": np.ones((WIDTH, WIDTH), np.float32)}
    path = save_graph(tmp_path / "m.onnx", [node("MatMul", "x w", "y", name="m")], constants)
    with pytest.raises(ProviderError, match=r"no engine for 7\.5.*FP32 GEMM.*the graph to FP16"):
        build_plan(path, BuildRequest([BATCH], capabilities=["7.5"]))


@needs_tensorrt
def test_attention_operator_in_fp32_has_a_remedy(tmp_path):
    dims = (TensorProto.FLOAT, ["batch", 8, 256])
    names = {"q": "wq", "k": "wk", "v": "wv"}
    path = save_graph(
        tmp_path / "a.onnx",
        [
            *(node("MatMul", f"x {weight}", name) for name, weight in names.items()),
            node("Attention", "q k v", "y", q_num_heads=4, kv_num_heads=4),
        ],
        {weight: np.full((256, 256), 0.01, np.float32) for weight in names.values()},
        inputs={"x": dims},
        outputs={"y": dims},
        opset=23,
    )
    assert parse_onnx(path).accepted
    with pytest.raises(ProviderError, match="convert the graph to FP16"):
        build_plan(path, BuildRequest([BATCH]))


@needs_tensorrt
@pytest.mark.parametrize("isolated", [True, False])
def test_plan_is_written_to_a_file_and_read_on_access(tmp_path, isolated):
    path = save_graph(tmp_path / "r.onnx", [node("Relu", "x", "y")])
    plan_path = tmp_path / "model.plan"
    built = build_plan(path, BuildRequest([BATCH]), plan_path=plan_path, isolated=isolated)
    assert built.held == b""
    assert built.plan == plan_path.read_bytes()
    assert built.plan_bytes == plan_path.stat().st_size > 0
    held = build_plan(path, BuildRequest([BATCH]), isolated=isolated)
    assert len(held.plan) == held.plan_bytes == len(held.held)
    assert held.plan_path == ""
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.plan", "r.onnx"]


@needs_tensorrt
def test_option_that_the_flavor_lacks_stops_before_the_build(tmp_path):
    path = save_graph(tmp_path / "r.onnx", [node("Relu", "x", "y")])
    with pytest.raises(OptionError, match="the optimization level has no effect in TensorRT for"):
        build_plan(path, BuildRequest([BATCH], options=BuildOptions(optimization_level=1)))


@needs_tensorrt
@pytest.mark.parametrize("isolated", [True, False])
def test_coverage_counts_supported_nodes_and_names_the_others(tmp_path, isolated):
    path = save_graph(
        tmp_path / "g.onnx",
        [
            node("Relu", "x", "r"),
            node("BiasGelu", "r b", "a", name="first", domain="com.microsoft"),
            node("Relu", "a", "c"),
            node("Relu", "c", "d"),
            node("DynamicQuantizeLinear", "d", "q s z"),
            node("DequantizeLinear", "q s z", "y"),
        ],
        {"b": np.ones(WIDTH, np.float32)},
    )
    found = coverage(path, isolated=isolated)
    assert (found.total, found.taken, found.partitions) == (6, 4, 3)
    first, second = found.refused
    assert (first.node, first.op_type) == ("first", "BiasGelu")
    assert "Plugin not found" in first.reason
    assert "enginery optimize --target tensorrt" in first.remedy
    assert (second.node, second.op_type, second.remedy) == ("#4", "DynamicQuantizeLinear", "")


@needs_tensorrt
def test_exported_graph_is_covered_whole(exported):
    found = coverage(exported("bert", "text-classification").model)
    assert found.refused == ()
    assert found.taken == found.total > 100
    assert found.partitions == 1


@needs_tensorrt
def test_merged_decoder_is_rejected_with_the_export_option(tmp_path):
    """The parser takes it; only the builder does not."""
    path = merged_decoder(tmp_path / "merged.onnx")
    found = coverage(path)
    assert (found.total, found.taken, found.partitions) == (2, 1, 1)
    (refusal,) = found.refused
    assert (refusal.node, refusal.op_type) == ("choice", "If")
    assert "--no-post-process" in refusal.remedy
    assert parse_onnx(path).accepted


@pytest.mark.more
@needs_tensorrt
def test_merged_t5_that_fails_to_build_names_the_export_option(tiny_model, tmp_path):
    source = tiny_model("t5", "text2text-generation")
    task = "text2text-generation-with-past"
    artifact = tiny_artifact("t5", task, tmp_path / "merged", source=source)
    dims = "batch=1:2:4,encoder_sequence=8,decoder_sequence=1,past_decoder_sequence=1:8:16"
    with pytest.raises(ProviderError, match=r"built no engine for 8\.9.*--no-post-process"):
        build_plan(artifact.path / "decoder_model_merged.onnx", BuildRequest([Profile.parse(dims)]))


@needs_tensorrt
def test_coverage_of_an_invalid_model_is_an_error(tmp_path):
    junk = tmp_path / "junk.onnx"
    junk.write_bytes(b"hello junk")
    with pytest.raises(SourceError, match="not an ONNX model"):
        coverage(junk)
    with pytest.raises(SourceError, match="is not a file"):
        coverage(tmp_path / "none.onnx")


@pytest.mark.more
@pytest.mark.parametrize("kill", [signal.SIGTERM, signal.SIGKILL])
def test_builder_ends_with_its_parent(tmp_path, kill):
    # A TensorRT that takes for ever to load.
    (tmp_path / "tensorrt.py").write_text('__version__ = "10.16"\nimport time\ntime.sleep(600)\n')
    path = save_graph(tmp_path / "r.onnx", [node("Relu", "x", "y")])
    script = (
        "from pathlib import Path\n"
        "from enginery.runtime.tensorrt.options import CLASSIC\n"
        "from enginery.runtime.tensorrt.process import parse_onnx\n"
        f"parse_onnx(Path({str(path)!r}), flavor=CLASSIC)\n"
    )
    places = os.pathsep.join([str(tmp_path), *(place for place in sys.path if place)])
    parent = subprocess.Popen(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": places}
    )
    try:
        (child,) = wait_for(lambda: psutil.Process(parent.pid).children())
        wait_for(lambda: "enginery.runtime.tensorrt.worker" in child.cmdline())
        time.sleep(1)  # it imports and then sleeps; either way it must end
        parent.send_signal(kill)
        parent.wait(timeout=60)
        assert wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    finally:
        parent.kill()


@needs_tensorrt
@pytest.mark.parametrize("isolated", [True, False])
def test_file_that_is_no_model_is_an_error(tmp_path, isolated):
    """TensorRT's parser takes a file of junk for an empty graph."""
    junk = tmp_path / "junk.onnx"
    junk.write_bytes(b"hello junk")
    with pytest.raises(SourceError, match="not an ONNX model"):
        parse_onnx(junk, isolated=isolated)
    with pytest.raises(SourceError, match="is not a file"):
        parse_onnx(tmp_path / "none.onnx", isolated=isolated)


@needs_tensorrt
def test_crash_of_the_child_is_an_error_message(tmp_path, monkeypatch):
    crash = tmp_path / "python"
    crash.write_text("#!/bin/sh\nkill -SEGV $$\n")
    crash.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(crash))
    path = save_graph(tmp_path / "r.onnx", [node("Relu", "x", "y")])
    with pytest.raises(ProviderError, match=r"crashed with signal 11.*whole log: .*\.log"):
        parse_onnx(path)


def test_missing_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt_rtx_bindings", None)
    path = save_graph(tmp_path / "r.onnx", [node("Relu", "x", "y")])
    for ask in (parse_onnx, lambda p: build_plan(p, BuildRequest([BATCH]))):
        with pytest.raises(MissingPackageError, match=r"enginery\[tensorrt-rtx\]"):
            ask(path)


@needs_tensorrt
@pytest.mark.slow
def test_graph_over_two_gigabytes_parses(tmp_path):
    big = onnx.TensorProto(
        name="w",
        data_type=TensorProto.FLOAT,
        dims=[WIDTH, 9_000_000],
        data_location=TensorProto.EXTERNAL,
    )
    big.external_data.add(key="location", value="weights.bin")
    with (tmp_path / "weights.bin").open("wb") as file:
        file.truncate(WIDTH * 9_000_000 * 4)  # 2.3 GB of zeros that take no room on disk
    path = save_graph(
        tmp_path / "big.onnx",
        [node("MatMul", "x w", "y")],
        {"w": big},
        outputs={"y": (TensorProto.FLOAT, ["batch", 9_000_000])},
    )
    assert parse_onnx(path).accepted

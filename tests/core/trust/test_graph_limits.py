"""Graphs that would allocate absurd sizes, and damaged files, are refused before a session."""

import os
import random
import re
import time

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import ArtifactError
from enginery.core.trust import onnx_structure
from enginery.core.trust.graph_limits import check_allocations
from enginery.core.trust.onnx_structure import read_structure
from enginery.runtime.onnxruntime.session import new_session
from enginery.runtime.providers.selection import Provider

BIG = 2**31
NODE = helper.make_node


def saved(path, nodes, initializers=(), shape=("batch",)):
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "g",
        [value("x", TensorProto.FLOAT, shape)],
        [value("y", TensorProto.FLOAT, None)],
        list(initializers),
    )
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


def stored(name, *values, dtype=np.int64):
    return numpy_helper.from_array(np.array(values, dtype), name)


def constant(name, *values, dtype=np.int64):
    return NODE("Constant", [], [name], value=stored("", *values, dtype=dtype))


def scalars(**values):
    return [numpy_helper.from_array(np.array(v, np.int64), name) for name, v in values.items()]


def bomb(op, inputs, **attributes):
    return NODE(op, inputs, ["y"], name="bomb", **attributes)


FILL = bomb("ConstantOfShape", ["size"])
NINE_FILLS = [NODE("ConstantOfShape", ["size"], [f"y{i}"]) for i in range(9)]
SUBGRAPH = helper.make_graph(
    [constant("size", BIG), NODE("ConstantOfShape", ["size"], ["z"], name="bomb")],
    "then",
    [],
    [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)],
)

BOMBS = {
    "stored": ([FILL], [stored("size", BIG)]),
    "constant": ([constant("size", BIG), FILL], []),
    "value_ints": ([NODE("Constant", [], ["size"], value_ints=[2**16, 2**15]), FILL], []),
    "product": (
        [constant("a", 2**20), constant("b", 2**11), NODE("Mul", ["a", "b"], ["size"]), FILL],
        [],
    ),
    "concatenated": (
        [
            constant("a", 2**20),
            constant("b", 2**11),
            NODE("Concat", ["a", "b"], ["size"], axis=0),
            FILL,
        ],
        [],
    ),
    "cast": (
        [
            constant("a", 2.0**31, dtype=np.float32),
            NODE("Cast", ["a"], ["size"], to=TensorProto.INT64),
            FILL,
        ],
        [],
    ),
    "shape of shape": (
        [constant("a", 2), NODE("ConstantOfShape", ["a"], ["size"], value=stored("", 2**16)), FILL],
        [],
    ),
    "of INT16": (
        [
            constant("a", 2**14, dtype=np.int16),
            NODE("Cast", ["a"], ["b"], to=TensorProto.INT64),
            NODE("Concat", ["b", "b", "b"], ["size"], axis=0),
            FILL,
        ],
        [],
    ),
    "divided": (
        [constant("a", -(2**40)), constant("b", -300), NODE("Div", ["a", "b"], ["size"]), FILL],
        [],
    ),
    "broadcast": (
        [bomb("Add", ["a", "b"])],
        [
            numpy_helper.from_array(np.zeros(shape, np.int8), name)
            for name, shape in (("a", (2**16, 1)), ("b", (1, 2**15)))
        ],
    ),
    "Expand": ([constant("a", 1), constant("b", BIG), bomb("Expand", ["a", "b"])], []),
    "Tile": ([constant("a", 1), constant("b", BIG), bomb("Tile", ["a", "b"])], []),
    "Range": ([bomb("Range", ["a", "b", "c"])], scalars(a=0, b=BIG, c=1)),
    "Pad": ([constant("a", 1), constant("b", 0, BIG), bomb("Pad", ["a", "b"])], []),
    "Resize": (
        [constant("a", 1), bomb("Resize", ["a", "", "b"])],
        [stored("b", 2.0**31, dtype=np.float32)],
    ),
    "RandomNormal": ([bomb("RandomNormal", [], shape=[BIG])], []),
    "in a branch": ([NODE("If", ["x"], ["y"], then_branch=SUBGRAPH, else_branch=SUBGRAPH)], []),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_constant_of_gigabytes_is_rejected_by_the_name_of_its_node(tmp_path, name):
    path = saved(tmp_path / "model.onnx", *BOMBS[name])
    with pytest.raises(ArtifactError, match=r"node 'bomb' \(\w+\) makes a tensor of .* GiB; expe"):
        check_allocations(path)


def test_a_session_is_not_even_created(tmp_path, monkeypatch):
    import onnxruntime

    monkeypatch.setattr(onnxruntime, "InferenceSession", None)
    path = saved(tmp_path / "model.onnx", *BOMBS["stored"])
    with pytest.raises(ArtifactError, match="node 'bomb'"):
        new_session(path, [Provider("CPUExecutionProvider", "")], onnxruntime.SessionOptions())


@pytest.mark.parametrize(
    ("nodes", "initializers", "message"),
    [
        ([constant("size", -5), FILL], [], r"node 'bomb' .* has the shape \[-5\], expected sizes"),
        ([constant("size", 2**40, 2**40), FILL], [], "expected fewer than 2^63 elements"),
        ([constant("b", 2**20, 2**20), bomb("Expand", ["x", "b"])], [], "of this machine's memory"),
        (
            [constant("size", 2**27), *NINE_FILLS],
            [],
            "with node 'y8' (ConstantOfShape) the graph makes 4.5 GiB of constants",
        ),
        (
            [NODE("Add", ["p", "x"], ["q"]), NODE("Add", ["q", "x"], ["p"])],
            [],
            "node 'p' (Add) computes 'p' behind a node that reads it, or the graph has a cycle",
        ),
        ([FILL, constant("size", BIG)], [], "node 'size' (Constant) computes 'size' behind"),
    ],
)
def test_impossible_sizes_and_unsorted_nodes_are_rejected(tmp_path, nodes, initializers, message):
    path = saved(tmp_path / "model.onnx", nodes, initializers)
    pattern = message if "\\" in message else re.escape(message)
    with pytest.raises(ArtifactError, match=pattern):
        check_allocations(path)


def test_a_stored_tensor_must_have_the_bytes_of_its_shape(tmp_path):
    tensor = stored("w", 1.0, 2.0, dtype=np.float32)
    tensor.dims[0] = 2**40
    path = saved(tmp_path / "model.onnx", [NODE("Add", ["x", "w"], ["y"])], [tensor])
    with pytest.raises(
        ArtifactError, match=r"initializer 'w' has the shape \[1099511627776\].*found"
    ):
        check_allocations(path)


def test_values_in_other_fields_than_those_of_the_type_hide_nothing(tmp_path):
    """ONNX Runtime reads the field of a tensor's or an attribute's type and no other."""
    size = helper.make_tensor("size", TensorProto.INT64, [1], [BIG])
    assert size.int64_data
    size.float_data[:], size.int32_data[:], size.string_data[:] = [1.0], [1] * 300, [b"x"]
    path = saved(tmp_path / "model.onnx", [FILL], [size])
    with pytest.raises(ArtifactError, match="node 'bomb'"):
        check_allocations(path)
    node = NODE("Constant", [], ["size"], value_ints=[2**16, 2**15])
    node.attribute[0].t.CopyFrom(stored("", 1))
    path = saved(tmp_path / "model.onnx", [node, FILL])
    with pytest.raises(ArtifactError, match="node 'bomb'"):
        check_allocations(path)


@pytest.mark.parametrize("location", ["/etc/passwd", "../other", "", "absent.bin", "linked"])
def test_external_data_is_a_file_beside_the_graph(tmp_path, location):
    (tmp_path / "other").write_bytes(bytes(64))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "linked").symlink_to(tmp_path / "other")
    tensor = onnx.TensorProto(name="w", dims=[2], data_type=1, data_location=1)
    tensor.external_data.add(key="location", value=location)
    path = saved(folder / "model.onnx", [NODE("Add", ["x", "w"], ["y"])], [tensor])
    with pytest.raises(ArtifactError, match=r"its data in .*(not a safe path|link|is missing)"):
        check_allocations(path)


def test_a_shape_in_external_data_is_read(tmp_path):
    path = saved(tmp_path / "model.onnx", *BOMBS["stored"])
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="data", size_threshold=0)
    assert (tmp_path / "data").stat().st_size == 8
    with pytest.raises(ArtifactError, match="node 'bomb'"):
        check_allocations(path)


def test_a_sparse_tensor_counts_as_large_as_it_is_loaded(tmp_path):
    path = saved(tmp_path / "model.onnx", [NODE("Add", ["x", "w"], ["y"])])
    model = onnx.load(path)
    values = stored("w", 1.0, dtype=np.float32)
    model.graph.sparse_initializer.append(
        onnx.SparseTensorProto(values=values, indices=stored("", 0), dims=[BIG])
    )
    onnx.save(model, path)
    with pytest.raises(ArtifactError, match="initializer 'w' makes a tensor"):
        check_allocations(path)


def test_usual_graphs_pass_whatever_their_weights(tmp_path):
    """A large stored tensor may be cast and multiplied: that is no constant made of nothing."""
    weights = numpy_helper.from_array(np.zeros((64, 64), np.float16), "w")
    nodes = [
        NODE("Cast", ["w"], ["v"], to=TensorProto.FLOAT),
        NODE("MatMul", ["x", "v"], ["m"]),
        NODE("Shape", ["m"], ["s"]),
        NODE("ConstantOfShape", ["s"], ["zeros"]),
        NODE("Add", ["m", "zeros"], ["y"]),
    ]
    check_allocations(saved(tmp_path / "model.onnx", nodes, [weights], shape=("batch", 64)))


def test_a_branch_may_use_the_names_of_the_node_around_it(tmp_path):
    """As Optimum's merged decoders do: the If and what is inside it make the same names."""
    made = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    nodes = [NODE("Neg", ["x"], ["y"]), NODE("Identity", ["y"], ["z"])]
    branch = helper.make_graph(nodes, "branch", [], [made])
    choose = NODE("If", ["x"], ["y"], then_branch=branch, else_branch=branch)
    check_allocations(saved(tmp_path / "model.onnx", [choose]))


def test_structure_is_what_onnx_reads(exported):
    path = exported("bert", "text-classification").model
    model, found = onnx.load(path), read_structure(path).graph
    assert [(n.op_type, n.name, n.inputs, n.outputs) for n in found.nodes] == [
        (n.op_type, n.name, list(n.input), list(n.output)) for n in model.graph.node
    ]
    assert [(t.name, t.dims, t.data_type) for t in found.initializers] == [
        (t.name, list(t.dims), t.data_type) for t in model.graph.initializer
    ]
    for ours, theirs in zip(found.initializers, model.graph.initializer, strict=True):
        if ours.values is not None:
            np.testing.assert_array_equal(ours.values, numpy_helper.to_array(theirs).ravel())
    for ours, theirs in zip(found.nodes, model.graph.node, strict=True):
        for attribute in theirs.attribute:
            if attribute.type == onnx.AttributeProto.INTS:
                assert ours.attributes[attribute.name].ints == list(attribute.ints)
            if attribute.type == onnx.AttributeProto.INT:
                assert ours.attributes[attribute.name].number == attribute.i


def field(number, payload):
    """A length-delimited field of protobuf."""
    length, size = len(payload), b""
    while length > 0x7F:
        size, length = size + bytes([length & 0x7F | 0x80]), length >> 7
    return bytes([number << 3 | 2]) + size + bytes([length]) + payload


def nested(depth):
    graph = b""
    for _ in range(depth):
        graph = field(1, field(5, field(6, graph)))
    return field(7, graph)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (b"no graph at all", "begins a field"),
        (
            b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\x0f",
            "begins a field of 1152921504606846975 bytes",
        ),
        (b"\x3a" + b"\xff" * 20, "number of more than 10 bytes"),
        (b"\x3a\x80", "ends within a number"),
        (b"\x3b\x01", "unknown kind 3"),
        (b"\x02\x00", "a field without a number"),
        (b"\x08\x07", "it has no graph"),
        (nested(5000), "nested more than 100 deep"),
    ],
)
def test_damaged_files_are_rejected(tmp_path, content, message):
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=re.escape(message)):
        check_allocations(path)


def test_a_file_of_millions_of_fields_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_structure, "MAX_FIELDS", 1000)
    path = tmp_path / "model.onnx"
    path.write_bytes(field(7, field(1, b"") * 2000))
    with pytest.raises(ArtifactError, match="more than 1000 fields"):
        check_allocations(path)


def test_runs_of_numbers_in_attributes_are_skipped_whatever_their_length(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_structure, "MAX_FIELDS", 100)
    trees = NODE("Trees", ["x"], ["y"], ids=list(range(5000)), weights=[0.5] * 5000, domain="other")
    check_allocations(saved(tmp_path / "model.onnx", [trees]))


@pytest.mark.more
def test_any_damage_is_read_or_rejected_and_never_hangs(tmp_path):
    """Seeded mutations of every graph above: cut, overwritten, doubled."""
    generator = random.Random(11)
    path = tmp_path / "model.onnx"
    whole = [saved(path, *BOMBS[name]).read_bytes() for name in BOMBS]
    refused, started = 0, time.monotonic()
    for _ in range(3000):
        content = bytearray(generator.choice(whole))
        for _ in range(generator.randint(1, 6)):
            at = generator.randrange(len(content))
            kind = generator.randrange(4)
            if kind == 0:
                content[at] = generator.randrange(256)
            elif kind == 1:
                content[at:at] = bytes([0xFF] * generator.randint(1, 12))
            elif kind == 2:
                content[at:at] = content[: generator.randrange(len(content))]
            elif len(content) > 40:
                del content[at : at + generator.randint(1, 30)]
        path.write_bytes(content)
        try:
            check_allocations(path)
        except ArtifactError:
            refused += 1
    assert refused > 1000
    assert time.monotonic() - started < 300  # a guard against a hang, no measurement


def test_a_graph_that_is_a_named_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "model.onnx")
    with pytest.raises(ArtifactError, match=r"model\.onnx cannot be read: it is a named pipe"):
        check_allocations(tmp_path / "model.onnx")


def in_branches(nodes, depth=3):
    for _ in range(depth):
        output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
        branch = helper.make_graph(nodes, "branch", [], [output])
        nodes = [NODE("If", ["x"], ["y"], then_branch=branch, else_branch=branch)]
    return nodes


def test_tensors_of_outer_graphs_are_known_and_sorted_at_any_depth(tmp_path):
    size, inner = constant("size", BIG), in_branches([FILL])
    path = saved(tmp_path / "model.onnx", [size, *inner])
    with pytest.raises(ArtifactError, match=r"node 'bomb' \(ConstantOfShape\) makes a tensor"):
        check_allocations(path)
    path = saved(tmp_path / "model.onnx", [*inner, size])
    with pytest.raises(ArtifactError, match=r"node 'size' .* computes 'size' behind"):
        check_allocations(path)


@pytest.mark.more
@pytest.mark.parametrize("content", [b"\x0a\x00", b"\x2a\x00"], ids=["nodes", "tensors"])
def test_empty_parts_are_counted_before_they_take_gigabytes(tmp_path, content):
    body = content * 2_100_000
    length = b"\x3a" + bytes(
        [
            len(body) & 0x7F | 0x80,
            len(body) >> 7 & 0x7F | 0x80,
            len(body) >> 14 & 0x7F | 0x80,
            len(body) >> 21,
        ]
    )
    (tmp_path / "model.onnx").write_bytes(length + body)
    with pytest.raises(ArtifactError, match=r"has more than \d+ nodes, tensors and other parts"):
        check_allocations(tmp_path / "model.onnx")


@pytest.mark.parametrize("folder", ["", "onnx/"])
def test_external_data_of_an_artifact_is_a_file_that_has_a_hash(tmp_path, folder):
    graph = tmp_path / f"{folder}model.onnx"
    graph.parent.mkdir(exist_ok=True)
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="w.bin")
    saved(graph, [NODE("Add", ["x", "w"], ["y"])], [tensor])
    (graph.parent / "w.bin").write_bytes(bytes(8))
    known = {"file": f"{folder}model.onnx", "opset": 17, "inputs": (), "outputs": ()}
    record = GraphRecord(**known, data_files=(f"{folder}w.bin",))
    check_allocations(graph, data_files=record.data_beside)
    for listed in ((), ("other/w.bin",), (f"{folder}model.onnx_data",)):
        record = GraphRecord(**known, data_files=listed)
        with pytest.raises(ArtifactError, match=r"'w\.bin', which the manifest does not list"):
            check_allocations(graph, data_files=record.data_beside)

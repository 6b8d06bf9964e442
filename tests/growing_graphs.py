"""Small ONNX files whose graphs need gigabytes or hours: what a stranger may send.

for name, model in growing_graphs():
    (folder / f"{name}.onnx").write_bytes(model)
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from onnx import TensorProto, helper, numpy_helper

_NODE = helper.make_node
_DOUBLINGS = (27, 30, 34)
"""2^27 numbers of FP32 are 0.5 GiB."""


def growing_graphs() -> Iterator[tuple[str, bytes]]:
    """Yield 60 graphs or more, each with a name."""
    for count in _DOUBLINGS:
        for rank in (1, 2, 3):
            yield f"concat-{rank}d-{count}", _concat(count, rank)
        yield (
            f"concat-of-three-{count}",
            _chain(count, lambda a, b: _NODE("Concat", [a] * 3, [b], axis=0)),
        )
        yield f"expand-{count}", _expand(count)
        yield f"tile-{count}", _chain(count, lambda a, b: _NODE("Tile", [a, "two"], [b]), two=[2])
        yield (
            f"pad-{count}",
            _chain(count, lambda a, b: _NODE("Pad", [a, "wide"], [b]), wide=[0, 2**count]),
        )
        yield f"resize-{count}", _resize(count)
        yield (
            f"gather-{count}",
            _chain(
                count,
                lambda a, b: _NODE("Gather", [a, "twice"], [b], axis=0),
                twice=[[0, 0]],
                rows=True,
            ),
        )
        yield f"outer-product-{count}", _outer_product(count)
        yield f"einsum-{count}", _einsum(count)
        yield f"matmul-{count}", _matmul(count)
        yield f"constant-of-shape-{count}", _fill(count)
        yield f"loop-of-concat-{count}", _loop(2**40, grow=True, width=count)
        yield f"range-{count}", _range(count)
        yield f"one-hot-{count}", _one_hot(count)
        yield f"functions-{count}", _functions(count)
        yield f"functions-that-concat-{count}", _functions(count, "Concat")
        yield f"scan-outputs-{count}", _scan_outputs(count)
    yield "loop-of-2^62-steps", _loop(2**62, grow=False)
    yield "loop-in-loops", _nested_loops()
    yield "functions-in-a-circle", _functions(3, circle=True)
    yield "functions-5000-deep", _functions(5000, calls=1)
    yield "if-of-concat", _if()
    yield "sequence-of-concat", _sequence()


def _value(name: str, shape, kind=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, kind, shape)


def _tensor(name: str, values, kind=np.int64):
    return numpy_helper.from_array(np.array(values, kind), name)


def _model(nodes, shape, *, functions=(), initializers=(), output=()) -> bytes:
    """Return a graph from `x` to `y`, a number unless another shape is given."""
    graph = helper.make_graph(
        nodes, "g", [_value("x", shape)], [_value("y", output)], list(initializers)
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    model = helper.make_model(graph, opset_imports=opsets, functions=list(functions), ir_version=8)
    return model.SerializeToString()


def _chain(count: int, grow, *, rows: bool = False, **constants) -> bytes:
    """Return a graph that applies a node `count` times, and adds all numbers up."""
    nodes = [grow(f"t{i}", f"t{i + 1}") for i in range(count)]
    nodes += [_NODE("ReduceSum", [f"t{count}"], ["y"], keepdims=0)]
    start = [_NODE("Reshape", ["x", "start"], ["t0"])]
    constants = {"start": [-1], **constants}
    return _model(
        [*start, *nodes],
        [16],
        initializers=[_tensor(name, value) for name, value in constants.items()],
    )


def _concat(count: int, rank: int) -> bytes:
    nodes = [_NODE("Concat", ["x", "x"], ["t0"], axis=0)]
    nodes += [
        _NODE("Concat", [f"t{i}", f"t{i}"], [f"t{i + 1}"], axis=i % rank) for i in range(count)
    ]
    nodes += [_NODE("Identity", [f"t{count}"], ["y"])]
    return _model(nodes, [1] * rank, output=[f"m{axis}" for axis in range(rank)])


def _expand(count: int) -> bytes:
    nodes = [
        _NODE("Shape", ["x"], ["size"]),
        _NODE("Mul", ["size", "large"], ["shape"]),
        _NODE("Expand", ["one", "shape"], ["t"]),
        _NODE("Mul", ["t", "t"], ["t2"]),
        _NODE("ReduceSum", ["t2"], ["s"], keepdims=0),
        _NODE("Identity", ["s"], ["y"]),
    ]
    constants = [_tensor("large", [2**count]), _tensor("one", [1], np.float32)]
    return _model(nodes, ["n"], initializers=constants)


def _resize(count: int) -> bytes:
    nodes = [
        _NODE("Resize", [f"t{i}" if i else "x", "", "scales"], [f"t{i + 1}"], mode="nearest")
        for i in range(count // 2)
    ]
    nodes += [_NODE("ReduceMean", [f"t{count // 2}"], ["y"], keepdims=0)]
    scales = [_tensor("scales", [1, 1, 2, 2], np.float32)]
    return _model(nodes, [1, 1, 4, 4], initializers=scales)


def _outer_product(count: int) -> bytes:
    """Return a graph whose tensor squares its number of elements with each node."""
    nodes = [_NODE("Concat", ["x"] * 16, ["t0"], axis=0)]
    for i in range(max(1, count // 6)):
        nodes += [
            _NODE("Reshape", [f"t{i}", "column"], [f"c{i}"]),
            _NODE("Reshape", [f"t{i}", "row"], [f"r{i}"]),
            _NODE("Mul", [f"c{i}", f"r{i}"], [f"m{i}"]),
            _NODE("Reshape", [f"m{i}", "flat"], [f"t{i + 1}"]),
        ]
    nodes += [_NODE("ReduceSum", [f"t{max(1, count // 6)}"], ["y"], keepdims=0)]
    constants = [_tensor("column", [-1, 1]), _tensor("row", [1, -1]), _tensor("flat", [-1])]
    return _model(nodes, [4], initializers=constants)


def _einsum(count: int) -> bytes:
    letters = "abcdefgh"
    terms = ",".join(letters)
    side = 2 ** (count // 8 + 1)
    nodes = [
        _NODE("Expand", ["x", "side"], ["wide"]),
        _NODE("Einsum", ["wide"] * 8, ["t"], equation=f"{terms}->{letters}"),
        _NODE("ReduceSum", ["t"], ["y"], keepdims=0),
    ]
    return _model(nodes, [1], initializers=[_tensor("side", [side])])


def _matmul(count: int) -> bytes:
    nodes = [
        _NODE("Expand", ["x", "tall"], ["a"]),
        _NODE("Expand", ["x", "wide"], ["b"]),
        _NODE("MatMul", ["a", "b"], ["t"]),
        _NODE("ReduceSum", ["t"], ["y"], keepdims=0),
    ]
    side = 2 ** (count // 2 + 1)
    return _model(nodes, [1], initializers=[_tensor("tall", [side, 1]), _tensor("wide", [1, side])])


def _fill(count: int) -> bytes:
    nodes = [
        _NODE("Shape", ["x"], ["n"]),
        _NODE("Mul", ["n", "large"], ["size"]),
        _NODE("ConstantOfShape", ["size"], ["t"]),
        _NODE("Add", ["t", "t"], ["t2"]),
        _NODE("ReduceSum", ["t2"], ["y"], keepdims=0),
    ]
    return _model(nodes, ["n"], initializers=[_tensor("large", [2**count])])


def _range(count: int) -> bytes:
    nodes = [
        _NODE("ReduceSum", ["x"], ["sum"], keepdims=0),
        _NODE("Sub", ["sum", "sum"], ["zero"]),
        _NODE("Add", ["zero", "large"], ["end"]),
        _NODE("Cast", ["end"], ["last"], to=TensorProto.INT64),
        _NODE("Cast", ["zero"], ["first"], to=TensorProto.INT64),
        _NODE("Range", ["first", "last", "step"], ["t"]),
        _NODE("Cast", ["t"], ["f"], to=TensorProto.FLOAT),
        _NODE("ReduceSum", ["f"], ["y"], keepdims=0),
    ]
    constants = [
        numpy_helper.from_array(np.array(2.0**count, np.float32), "large"),
        numpy_helper.from_array(np.array(1, np.int64), "step"),
    ]
    return _model(nodes, [1], initializers=constants)


def _one_hot(count: int) -> bytes:
    nodes = [
        _NODE("Cast", ["x"], ["index"], to=TensorProto.INT64),
        _NODE("Shape", ["x"], ["n"]),
        _NODE("Mul", ["n", "large"], ["depth"]),
        _NODE("OneHot", ["index", "depth", "values"], ["t"]),
        _NODE("ReduceSum", ["t"], ["y"], keepdims=0),
    ]
    constants = [_tensor("large", [2**count]), _tensor("values", [0, 1], np.float32)]
    return _model(nodes, [2], initializers=constants)


def _functions(count: int, op: str = "Identity", *, circle: bool = False, calls: int = 2) -> bytes:
    """Return a graph of functions, each of which calls the next one twice."""
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    names = ["a", *(f"c{i}" for i in range(calls - 1)), "b"]
    functions = [
        helper.make_function(
            "own",
            f"F{i}",
            ["a"],
            ["b"],
            [
                _NODE(f"F{i + 1}", [before], [after], domain="own")
                for before, after in pairwise(names)
            ],
            opsets,
        )
        for i in range(count)
    ]
    last = _NODE(
        op,
        ["a", "a"] if op == "Concat" else ["a"],
        ["b"],
        **({"axis": 0} if op == "Concat" else {}),
    )
    if circle:
        last = _NODE("F0", ["a"], ["b"], domain="own")
    functions.append(helper.make_function("own", f"F{count}", ["a"], ["b"], [last], opsets))
    return _model(
        [_NODE("F0", ["x"], ["y"], domain="own")], [1, 4], functions=functions, output=["m", 4]
    )


def _loop(steps: int, *, grow: bool, width: int = 0) -> bytes:
    body = helper.make_graph(
        [
            _NODE("Identity", ["go"], ["go_on"]),
            _NODE("Concat", ["a"] * (2 + width % 3), ["b"], axis=0)
            if grow
            else _NODE("Neg", ["a"], ["b"]),
        ],
        "body",
        [
            _value("i", [], TensorProto.INT64),
            _value("go", [], TensorProto.BOOL),
            _value("a", ["m"]),
        ],
        [_value("go_on", [], TensorProto.BOOL), _value("b", ["m2"])],
    )
    nodes = [_NODE("Loop", ["steps", "true", "x"], ["y"], body=body)]
    constants = [
        numpy_helper.from_array(np.array(steps, np.int64), "steps"),
        numpy_helper.from_array(np.array(True), "true"),
    ]
    return _model(nodes, [4], initializers=constants, output=["m"])


def _nested_loops() -> bytes:
    def body(depth: int):
        inner = (
            _NODE("Neg", [f"a{depth}"], [f"b{depth}"])
            if depth == 4
            else _NODE("Loop", ["steps", "true", f"a{depth}"], [f"b{depth}"], body=body(depth + 1))
        )
        return helper.make_graph(
            [_NODE("Identity", [f"go{depth}"], [f"go_on{depth}"]), inner],
            f"body{depth}",
            [
                _value(f"i{depth}", [], TensorProto.INT64),
                _value(f"go{depth}", [], TensorProto.BOOL),
                _value(f"a{depth}", [4]),
            ],
            [_value(f"go_on{depth}", [], TensorProto.BOOL), _value(f"b{depth}", [4])],
        )

    constants = [
        numpy_helper.from_array(np.array(1000, np.int64), "steps"),
        numpy_helper.from_array(np.array(True), "true"),
    ]
    return _model(
        [_NODE("Loop", ["steps", "true", "x"], ["y"], body=body(0))],
        [4],
        initializers=constants,
        output=[4],
    )


def _scan_outputs(count: int) -> bytes:
    """Return a Loop that stacks a row in each of its steps."""
    body = helper.make_graph(
        [
            _NODE("Identity", ["go"], ["go_on"]),
            _NODE("Neg", ["a"], ["b"]),
            _NODE("Expand", ["b", "wide"], ["row"]),
        ],
        "body",
        [_value("i", [], TensorProto.INT64), _value("go", [], TensorProto.BOOL), _value("a", [4])],
        [
            _value("go_on", [], TensorProto.BOOL),
            _value("b", [4]),
            _value("row", [2 ** (count // 2), 4]),
        ],
    )
    nodes = [
        _NODE("Loop", ["steps", "true", "x"], ["end", "rows"], body=body),
        _NODE("ReduceSum", ["rows"], ["y"], keepdims=0),
    ]
    constants = [
        numpy_helper.from_array(np.array(2**count, np.int64), "steps"),
        numpy_helper.from_array(np.array(True), "true"),
        _tensor("wide", [2 ** (count // 2), 4]),
    ]
    return _model(nodes, [4], initializers=constants)


def _if() -> bytes:
    def branch(name: str):
        nodes = [_NODE("Concat", ["x", "x"], [f"{name}0"], axis=0)]
        nodes += [
            _NODE("Concat", [f"{name}{i}"] * 2, [f"{name}{i + 1}"], axis=0) for i in range(32)
        ]
        return helper.make_graph(nodes, name, [], [_value(f"{name}32", ["m"])])

    nodes = [
        _NODE("ReduceSum", ["x"], ["s"], keepdims=0),
        _NODE("Cast", ["s"], ["condition"], to=TensorProto.BOOL),
        _NODE("If", ["condition"], ["y"], then_branch=branch("then"), else_branch=branch("else")),
    ]
    return _model(nodes, [4], output=["m"])


def _sequence() -> bytes:
    """Return a graph that puts growing tensors into a sequence and joins them."""
    nodes = [_NODE("SequenceConstruct", ["x", "x"], ["q0"])]
    for i in range(32):
        nodes += [
            _NODE("ConcatFromSequence", [f"q{i}"], [f"t{i}"], axis=0),
            _NODE("SequenceConstruct", [f"t{i}", f"t{i}"], [f"q{i + 1}"]),
        ]
    nodes += [_NODE("ConcatFromSequence", ["q32"], ["y"], axis=0)]
    return _model(nodes, [4], output=["m"])

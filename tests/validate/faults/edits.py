"""Deliberate faults in a copied artifact, each a small edit of one of its graphs.

The manifest's hashes are updated, so that the artifact opens. Its source is unchanged, so that
PyTorch still computes the outputs of the correct model.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

from enginery.core.artifact.artifact import Artifact, commit_artifact


def break_graph(artifact, edit, *, graph="model.onnx", **manifest):
    """Edit one graph of the artifact in place."""
    path = artifact.path / graph
    model = onnx.load(str(path))
    edit(model)
    path.unlink()  # it may be a hard link to the file in the store
    onnx.save(sorted_nodes(model), str(path))
    commit_artifact(artifact.path, artifact.manifest.model_copy(update=manifest))
    return Artifact.open(artifact.path)


def sorted_nodes(model):
    """Return a model whose nodes, which were added in any order, are sorted as ONNX requires."""
    edited = ir.from_proto(model)
    edited.graph.sort()
    return ir.to_proto(edited)


def weight(model, *, nth=3):
    """Return an inner weight: the initializer of the nth MatMul that has one."""
    initializers = {tensor.name: tensor for tensor in model.graph.initializer}
    names = [
        name
        for node in model.graph.node
        if node.op_type in ("MatMul", "Gemm", "Conv")
        for name in node.input[1:2]
        if name in initializers
    ]
    return initializers[names[min(nth, len(names) - 1)]]


def change_weight(model, change):
    """Edit a weight: `change` modifies its array in place."""
    tensor = weight(model)
    array = numpy_helper.to_array(tensor).copy()
    change(array)
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def flip_sign(model):
    change_weight(model, lambda array: np.negative(array[1, 2], out=array[1, 2, ...]))


def put_nan(model):
    def change(array):
        array[0, 0] = np.nan

    change_weight(model, change)


def after(graph, output, nodes_for):
    """Append `nodes_for(before)` to the producer of an output; the last node is the new output."""
    before = f"{output}_before"
    for node in graph.node:
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                if name == output:
                    names[index] = before
    nodes = nodes_for(before)
    nodes[-1].output[0] = output
    graph.node.extend(nodes)


def constant(name, value):
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(value, name))


def with_operand(operation, value, *, first=False):
    """Return a `nodes_for` that computes `operation(output, value)`."""

    def nodes(before):
        operand = f"{before}_operand"
        inputs = [operand, before] if first else [before, operand]
        return [constant(operand, value), helper.make_node(operation, inputs, ["out"])]

    return nodes


def scale(output, factor):
    return lambda model: after(model.graph, output, with_operand("Mul", np.float32(factor)))


def added(output, value):
    return lambda model: after(model.graph, output, with_operand("Add", np.float32(value)))


def reshape(output, shape):
    return lambda model: after(model.graph, output, with_operand("Reshape", np.int64(shape)))


def first_row(output):
    return lambda model: after(
        model.graph,
        output,
        lambda before: [
            constant("start", np.int64([0])),
            constant("end", np.int64([1])),
            helper.make_node("Slice", [before, "start", "end"], ["out"]),
        ],
    )


def cast(output, element_type):
    def edit(model):
        after(
            model.graph,
            output,
            lambda before: [helper.make_node("Cast", [before], ["out"], to=element_type)],
        )
        value = next(value for value in model.graph.output if value.name == output)
        value.type.tensor_type.elem_type = element_type

    return edit


def through_fp16(model):
    """Round the second layer's input to half precision, as a careless conversion does."""
    node = next(n for n in model.graph.node if n.op_type == "MatMul" and "layer.1" in n.name)
    source = node.input[0]
    for other in model.graph.node:
        for index, name in enumerate(other.input):
            if name == source:
                other.input[index] = "rounded"
    position = 1 + max(i for i, n in enumerate(model.graph.node) if source in n.output)
    model.graph.node.insert(
        position, helper.make_node("Cast", [source], ["half"], to=TensorProto.FLOAT16)
    )
    model.graph.node.insert(
        position + 1, helper.make_node("Cast", ["half"], ["rounded"], to=TensorProto.FLOAT)
    )


def swap_outputs(first, second):
    other = {first: second, second: first}

    def edit(model):
        for node in model.graph.node:
            for names in (node.input, node.output):
                for index, name in enumerate(names):
                    names[index] = other.get(name, name)

    return edit


def ignore_mask(model):
    """Replace the mask by ones in every use."""
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            if name == "attention_mask":
                node.input[index] = "ones"
    nodes = [
        helper.make_node("Sub", ["attention_mask", "attention_mask"], ["zeros"]),
        constant("one", np.int64(1)),
        helper.make_node("Add", ["zeros", "one"], ["ones"]),
    ]
    for node in reversed(nodes):
        model.graph.node.insert(0, node)


def weights_of(model):
    """Return the DequantizeLinear nodes of constant weights, in graph order."""
    stored = {tensor.name for tensor in model.graph.initializer}
    return [
        node
        for node in model.graph.node
        if node.op_type == "DequantizeLinear" and node.input[0] in stored
    ]


def change_initializer(model, name, change):
    """Replace an initializer by `change(array)`, with the same dtype."""
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == name)
    array = numpy_helper.to_array(tensor)
    changed = np.asarray(change(array.astype(np.float32))).astype(array.dtype)
    tensor.CopyFrom(numpy_helper.from_array(changed, name))


def change_quantized_weight(change, *, nth=-1, operand=0):
    """Change the values (operand 0) or the scale (operand 1) of one quantized weight."""
    return lambda model: change_initializer(model, weights_of(model)[nth].input[operand], change)


def swap_quantized_weights(model):
    """Swap the first two weights of equal shape."""
    shapes = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    nodes = weights_of(model)
    first, second = next(
        (a, b)
        for index, a in enumerate(nodes)
        for b in nodes[index + 1 :]
        if [shapes[name] for name in a.input] == [shapes[name] for name in b.input]
    )
    for index in range(len(first.input)):
        first.input[index], second.input[index] = second.input[index], first.input[index]


def clip_activations(factor):
    """Multiply every activation's range by `factor`."""

    def edit(model):
        for node in model.graph.node:
            if node.op_type == "QuantizeLinear":
                change_initializer(model, node.input[1], lambda scale: scale * factor)

    return edit

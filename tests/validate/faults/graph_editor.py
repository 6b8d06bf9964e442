"""Edit an ONNX graph by the names of its nodes.

    editor = GraphEditor(model)
    editor.replace("/encoder/layer.0/output/Add_output_0", lambda x: editor.op("Mul", x, 1.01))
    editor.finish()

Numbers among the inputs of a new node become constants of the other operand's type, so that one
edit serves FP32, FP16 and quantized graphs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import numpy as np
import onnx
from onnx import helper, numpy_helper


class GraphEditor:
    """The main graph of a model; new nodes may be added in any order."""

    def __init__(self, model: onnx.ModelProto, original: onnx.ModelProto | None = None) -> None:
        """Open a model; `original` is the FP32 graph that a quantized one was made from."""
        self.model = model
        self.graph = model.graph
        self.original = GraphEditor(original) if original else None
        self._count = 0

    # Find

    def node(self, name: str) -> onnx.NodeProto:
        """Return the only node whose name matches the regular expression at its end."""
        found = self.nodes(name)
        if len(found) != 1:
            raise LookupError(f"{len(found)} nodes match {name!r}: {[n.name for n in found][:4]}")
        return found[0]

    def nodes(self, name: str = "", *, op: str = "") -> list[onnx.NodeProto]:
        """Return all nodes with a matching name and operator, in graph order."""
        pattern = re.compile(f"(?:{name})$")
        return [
            node
            for node in self.graph.node
            if pattern.search(node.name) and op in ("", node.op_type)
        ]

    def producer(self, value: str) -> onnx.NodeProto | None:
        return next((node for node in self.graph.node if value in node.output), None)

    def consumers(self, value: str) -> list[onnx.NodeProto]:
        return [node for node in self.graph.node if value in node.input]

    # Constants and weights

    def array(self, value: str) -> np.ndarray | None:
        """Return a constant's array, or None if the value is computed."""
        for tensor in self.graph.initializer:
            if tensor.name == value:
                return numpy_helper.to_array(tensor).copy()
        node = self.producer(value)
        if node is not None and node.op_type == "Constant":
            return numpy_helper.to_array(node.attribute[0].t).copy()
        return None

    def set_array(self, value: str, array: np.ndarray) -> None:
        """Replace the array of a constant."""
        tensor = numpy_helper.from_array(np.ascontiguousarray(array), value)
        for held in self.graph.initializer:
            if held.name == value:
                held.CopyFrom(tensor)
                return
        self.producer(value).attribute[0].t.CopyFrom(tensor)

    def change_array(self, value: str, change: Callable[[np.ndarray], np.ndarray | None]) -> None:
        """Replace a constant by `change(array)`, or change it in place; its type stays.

        Floats are changed in float32; integers are rounded and saturate.
        """
        stored = self.array(value)
        wide = stored.astype(np.float32) if stored.dtype != np.int64 else stored
        result = change(wide)
        result = wide if result is None else result
        if stored.dtype == np.int8:
            result = np.clip(np.rint(result), -128, 127)
        with np.errstate(over="ignore", invalid="ignore"):
            self.set_array(value, np.asarray(result).astype(stored.dtype))

    def weight(self, node: str) -> str:
        """Return the constant that a node multiplies with: its INT8 values if it is quantized."""
        for value in self.node(node).input:
            if self.array(value) is not None:
                return value
            producer = self.producer(value)
            if producer is not None and producer.op_type == "DequantizeLinear":
                stored = self.array(producer.input[0])
                if stored is not None:
                    return producer.input[0]
        raise LookupError(f"{node} has no weight")

    def constant(self, array: np.ndarray) -> str:
        name = self._name("constant")
        self.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    # Add

    def op(self, operation: str, *inputs: str | float | np.ndarray, outputs=1, **attributes):
        """Add a node and return its output; with several outputs, a list of them.

        A number or float array is cast to the type of the first input that is a name.
        """
        operands = inputs[1:] if operation == "Where" else inputs  # without the condition
        like = next((value for value in operands if isinstance(value, str)), None)
        names = []
        for value in inputs:
            name = value
            if not isinstance(value, str):
                array = np.asarray(value)
                if array.dtype.kind == "f":
                    name = self.constant(array.astype(np.float32))
                    name = self.op("CastLike", name, like) if like else name
                else:
                    name = self.constant(array)
            names.append(name)
        results = [self._name(operation.lower()) for _ in range(outputs)]
        self.graph.node.append(
            helper.make_node(operation, names, results, name=results[0], **attributes)
        )
        return results[0] if outputs == 1 else results

    def replace(self, value: str, build: Callable[[str], str]) -> None:
        """Let every reader of a value, and the graph's output, take `build(value)` instead."""
        readers = self.consumers(value)
        output = next((o for o in self.graph.output if o.name == value), None)
        if output is not None:
            sound = self._name("sound")
            producer = self.producer(value)
            producer.output[list(producer.output).index(value)] = sound
            self._rewire(readers, value, sound)
            self.graph.node.append(helper.make_node("Identity", [build(sound)], [value]))
            return
        self._rewire(readers, value, build(value))

    def replace_output(self, node: str, build: Callable[[str], str]) -> None:
        """Replace the first output of a node."""
        self.replace(self.node(node).output[0], build)

    def replace_input(self, node: str, index: int, build: Callable[[str], str]) -> None:
        """Replace one input of one node; other readers of that value keep it."""
        found = self.node(node)
        found.input[index] = build(found.input[index])

    def bypass(self, node: str, index: int = 0) -> None:
        """Pass one input of a node on in place of its output."""
        found = self.node(node)
        self.replace(found.output[0], lambda _: found.input[index])

    # Shapes

    def size(self, value: str, axis: int) -> str:
        """Return a dim of a value as an int64 scalar."""
        return self.op("Gather", self.op("Shape", value), np.int64(axis))

    # Finish

    def finish(self) -> None:
        """Sort the nodes topologically, and drop what no output needs."""
        producers = {name: node for node in self.graph.node for name in node.output if name}
        ordered: list[onnx.NodeProto] = []
        done: set[int] = set()
        stack: list[tuple[onnx.NodeProto, Iterator[str]]] = []

        def push(name: str) -> None:
            node = producers.get(name)
            if node is not None and id(node) not in done:
                done.add(id(node))
                stack.append((node, iter(_reads(node))))

        for output in self.graph.output:
            push(output.name)
            while stack:
                node, inputs = stack[-1]
                depth = len(stack)
                for name in inputs:
                    push(name)
                    if len(stack) > depth:
                        break
                else:
                    ordered.append(node)
                    stack.pop()
        copies = [helper.make_node("Identity", ["x"], ["y"]) for _ in ordered]
        for copy, node in zip(copies, ordered, strict=True):
            copy.CopyFrom(node)
        del self.graph.node[:]
        self.graph.node.extend(copies)
        used = {name for node in copies for name in _reads(node)}
        for tensor in [t for t in self.graph.initializer if t.name not in used]:
            self.graph.initializer.remove(tensor)
        del self.graph.value_info[:]

    def _rewire(self, readers: list[onnx.NodeProto], old: str, new: str) -> None:
        for node in readers:
            for index, name in enumerate(node.input):
                if name == old:
                    node.input[index] = new

    def _name(self, stem: str) -> str:
        self._count += 1
        return f"edited/{stem}_{self._count}"


def _reads(node: onnx.NodeProto) -> list[str]:
    """Return the inputs of a node and, if it has branches, what their nodes read."""
    branches = [a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
    inner = [name for branch in branches for other in branch.node for name in _reads(other)]
    return [*node.input, *inner]


def set_attribute(node: onnx.NodeProto, name: str, value) -> None:
    """Set or replace an attribute of a node."""
    for attribute in list(node.attribute):
        if attribute.name == name:
            node.attribute.remove(attribute)
    node.attribute.append(helper.make_attribute(name, value))

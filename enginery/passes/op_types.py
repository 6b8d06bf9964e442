"""Which inputs and outputs of a node follow its floating-point type, read from the op's schema.

>>> ports = float_ports(node, opset=20)
>>> ports.inputs, ports.outputs, ports.allows("float16")
((True, False, False), (True,), True)

The schemas are ONNX's own; ONNX Runtime's for its `com.microsoft` ops. What no schema says is not
guessed: such a node keeps its types.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import onnx_ir as ir

FLOAT = ir.DataType.FLOAT
MICROSOFT = "com.microsoft"

# Their type is an attribute of their own and their values are drawn, not computed.
_RANDOM_OR_EYE = frozenset({
    "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli",
    "Multinomial", "EyeLike",
})  # fmt: skip


@dataclass(frozen=True)
class FloatPorts:
    """The ports of one node that are float32 and change together."""

    inputs: tuple[bool, ...]
    """For each actual input: it follows a type variable that is float32 in this node."""
    outputs: tuple[bool, ...]
    allowed: frozenset[str]
    """Types that every such variable may take, as `float16`, `bfloat16`."""

    @property
    def any(self) -> bool:
        """The node has a float32 port that may change."""
        return any(self.inputs) or any(self.outputs)

    def allows(self, dtype: str) -> bool:
        """Whether all these ports may be of `dtype`."""
        return self.any and dtype in self.allowed


NO_FLOAT_PORTS = FloatPorts((), (), frozenset())


def opset_of(node: ir.Node, opsets: dict[str, int]) -> int:
    """The version of the node's operator set."""
    domain = "" if node.domain in ("", "ai.onnx") else node.domain
    return opsets.get(domain, 1)


def float_ports(node: ir.Node, opset: int) -> FloatPorts:
    """The float32 ports of a node whose values have their types already.

    Nodes with subgraphs, with unknown ops, and those that draw random numbers have none.
    """
    if node.op_type in _RANDOM_OR_EYE or has_subgraph(node):
        return NO_FLOAT_PORTS
    schema = _schema(node.domain, node.op_type, opset)
    if schema is None:
        return NO_FLOAT_PORTS
    inputs = _type_variables(schema.inputs, len(node.inputs))
    outputs = _type_variables(schema.outputs, len(node.outputs))
    bound = {
        variable
        for values, variables in ((node.inputs, inputs), (node.outputs, outputs))
        for value, variable in zip(values, variables, strict=True)
        if value is not None and value.dtype == FLOAT and variable in schema.constraints
    }
    allowed = (
        frozenset.intersection(*(schema.constraints[name] for name in bound))
        if bound
        else frozenset[str]()
    )
    return FloatPorts(
        tuple(
            value is not None and value.dtype == FLOAT and variable in bound
            for value, variable in zip(node.inputs, inputs, strict=True)
        ),
        tuple(
            value.dtype == FLOAT and variable in bound
            for value, variable in zip(node.outputs, outputs, strict=True)
        ),
        allowed,
    )


def infer_missing_types(graph: ir.Graph, opsets: dict[str, int]) -> None:
    """Gives a type to values behind ops that ONNX's inference does not know: ONNX Runtime's own.

    An output takes the type that its variable has at an input.
    """
    for node in graph:
        schema = _schema(node.domain, node.op_type, opset_of(node, opsets))
        if schema is None or all(value.dtype is not None for value in node.outputs):
            continue
        bound = {
            variable: value.dtype
            for value, variable in zip(
                node.inputs, _type_variables(schema.inputs, len(node.inputs)), strict=True
            )
            if value is not None and value.dtype is not None
        }
        variables = _type_variables(schema.outputs, len(node.outputs))
        for value, variable in zip(node.outputs, variables, strict=True):
            if value.dtype is None and bound.get(variable) is not None:
                value.dtype = bound[variable]


def has_subgraph(node: ir.Node) -> bool:
    """Whether the node is an If, a Loop, a Scan or the like."""
    return any(
        attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
        for attribute in node.attributes.values()
    )


@dataclass(frozen=True)
class _Schema:
    inputs: tuple[tuple[str, bool], ...]
    """Type variable or literal type, and whether the port repeats."""
    outputs: tuple[tuple[str, bool], ...]
    constraints: dict[str, frozenset[str]]


@cache
def _schema(domain: str, op_type: str, opset: int) -> _Schema | None:
    domain = "" if domain == "ai.onnx" else domain
    if domain == MICROSOFT:
        found = _onnxruntime_schemas().get(op_type)
        return None if found is None else _read_schema(found, "typeStr", "type_param_str")
    import onnx.defs

    try:
        return _read_schema(
            onnx.defs.get_schema(op_type, opset, domain), "type_str", "type_param_str"
        )
    except onnx.defs.SchemaError:
        return None


@cache
def _onnxruntime_schemas() -> dict[str, Any]:
    from onnxruntime.capi import onnxruntime_pybind11_state as runtime

    newest: dict[str, Any] = {}
    for schema in runtime.get_all_operator_schema():
        if schema.domain == MICROSOFT:
            newest[schema.name] = schema
    return newest


def _read_schema(schema: Any, type_name: str, variable_name: str) -> _Schema:
    def ports(formal: Any) -> tuple[tuple[str, bool], ...]:
        return tuple(
            (str(getattr(port, type_name)), str(port.option).endswith("Variadic"))
            for port in formal
        )

    return _Schema(
        ports(schema.inputs),
        ports(schema.outputs),
        {
            str(getattr(constraint, variable_name)): frozenset(
                text.removeprefix("tensor(").removesuffix(")")
                for text in constraint.allowed_type_strs
            )
            for constraint in schema.type_constraints
        },
    )


def _type_variables(formal: tuple[tuple[str, bool], ...], count: int) -> list[str]:
    """The type variable of each actual port; the last formal one repeats where it is variadic."""
    found = [variable for variable, _ in formal][:count]
    while len(found) < count:
        found.append(formal[-1][0] if formal and formal[-1][1] else "")
    return found

"""Find the inputs and outputs of a node that share its floating-point type, from the op's schema.

>>> model = ir.from_onnx_text('''<ir_version: 9, opset_import: ["" : 20]>
... g (float[4] x, int64[2] i) => (float[2] y) { y = Gather (x, i) }''')
>>> ports = float_ports(model.graph[0], opset=20)
>>> ports.inputs, ports.outputs, ports.allows("float16")
((True, False), (True,), True)

The schemas come from ONNX, and from ONNX Runtime for its `com.microsoft` ops. A node without a
schema keeps its types.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import onnx_ir as ir

from enginery.core.model.random_numbers import RANDOM_OPS

FLOAT = ir.DataType.FLOAT
MICROSOFT = "com.microsoft"

# Operators of ONNX Runtime that have no domain of their own and no schema in onnx.
_IN_ONNX_DOMAIN = frozenset({"SimplifiedLayerNormalization"})
# The output type of these ops is an attribute.
_RANDOM_OR_EYE = frozenset({*RANDOM_OPS, "EyeLike"})


@dataclass(frozen=True)
class FloatPorts:
    """The float32 inputs and outputs of one node, whose type can only change together."""

    inputs: tuple[bool, ...]
    """For each actual input: True if its type variable is float32 in this node."""
    outputs: tuple[bool, ...]
    """The same for each output."""
    allowed: frozenset[str]
    """The types that all these variables accept, such as `float16` and `bfloat16`."""

    @property
    def any(self) -> bool:
        """True if the node has a float32 input or output whose type may change."""
        return any(self.inputs) or any(self.outputs)

    def allows(self, dtype: str) -> bool:
        """Return True if all these inputs and outputs may have the type `dtype`."""
        return self.any and dtype in self.allowed


NO_FLOAT_PORTS = FloatPorts((), (), frozenset())


def opset_of(node: ir.Node, opsets: dict[str, int]) -> int:
    """Return the version of the node's operator set."""
    domain = "" if node.domain in ("", "ai.onnx") else node.domain
    return opsets.get(domain, 1)


def float_ports(node: ir.Node, opset: int) -> FloatPorts:
    """Return the float32 inputs and outputs of a node. Its values must have types.

    Nodes with subgraphs, of unknown ops and of random-number ops have none.
    """
    if node.op_type in _RANDOM_OR_EYE or has_subgraph(node):
        return NO_FLOAT_PORTS
    schema = _schema(node.domain, node.op_type, opset)
    if schema is None:
        return NO_FLOAT_PORTS
    inputs = _type_variables(schema.inputs, len(node.inputs))
    outputs = _type_variables(schema.outputs, len(node.outputs))
    # Inputs and outputs of one type variable can only change their type together.
    bound = {
        variable
        for values, variables in ((node.inputs, inputs), (node.outputs, outputs))
        for value, variable in zip(values, variables, strict=True)
        if value is not None and value.dtype == FLOAT and variable in schema.constraints
    }
    # A node that has several type variables is cast as a whole, to a type that all of them allow.
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
    """Infer the output types of ops that ONNX's inference does not know: ONNX Runtime's own.

    An output gets the type that its type variable has at an input.
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
    """Return True if the node has a subgraph, as If, Loop and Scan have."""
    return any(
        attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
        for attribute in node.attributes.values()
    )


@dataclass(frozen=True)
class _Schema:
    inputs: tuple[tuple[str, bool], ...]
    """Type variable or literal type, and True for a variadic parameter."""
    outputs: tuple[tuple[str, bool], ...]
    constraints: dict[str, frozenset[str]]


@cache
def register_onnxruntime_operators() -> None:
    """Register the operators that ONNX Runtime keeps in ONNX's own domain with onnx.

    Its fusions write RMS normalization so. Without a schema, onnx's checker rejects the graph,
    and a cast leaves the node in FP32.
    """
    import onnx.defs
    from onnxruntime.capi import onnxruntime_pybind11_state as runtime

    for schema in runtime.get_all_operator_schema():
        unknown = schema.name in _IN_ONNX_DOMAIN and not onnx.defs.has(schema.name)
        if unknown and schema.domain == "":
            onnx.defs.register_schema(_onnx_schema(schema))


def _onnx_schema(schema: Any) -> Any:
    """Return ONNX Runtime's description of an operator as onnx's."""
    from onnx.defs import OpSchema

    def parameters(formal: Any) -> list[Any]:
        return [
            OpSchema.FormalParameter(
                port.name,
                port.typeStr,
                param_option=OpSchema.FormalParameterOption(int(port.option)),
            )
            for port in formal
        ]

    return OpSchema(
        schema.name,
        schema.domain,
        schema.since_version,
        inputs=parameters(schema.inputs),
        outputs=parameters(schema.outputs),
        type_constraints=[
            (constraint.type_param_str, list(constraint.allowed_type_strs), "")
            for constraint in schema.type_constraints
        ],
        attributes=[
            OpSchema.Attribute(name, OpSchema.AttrType(int(attribute.type)), required=False)
            for name, attribute in schema.attributes.items()
        ],
    )


@cache
def _schema(domain: str, op_type: str, opset: int) -> _Schema | None:
    domain = "" if domain == "ai.onnx" else domain
    if domain == MICROSOFT:
        schema = _onnxruntime_schemas().get(op_type)
        return None if schema is None else _read_schema(schema, "typeStr", "type_param_str")
    import onnx.defs

    if op_type in _IN_ONNX_DOMAIN:
        register_onnxruntime_operators()
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
    """Return the type variable of each actual input or output; a variadic last one repeats."""
    variables = [variable for variable, _ in formal][:count]
    while len(variables) < count:
        variables.append(formal[-1][0] if formal and formal[-1][1] else "")
    return variables

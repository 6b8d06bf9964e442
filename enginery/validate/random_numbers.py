"""Compare a graph that draws random numbers: it gets those that PyTorch drew, as inputs.

Without, its outputs differ from PyTorch's as much as two runs of PyTorch do. The graph that is
compared is a copy in which inputs take the place of standard normal and uniform numbers; it must
draw numbers of the same distributions and shapes in the same order as PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import InputError
from enginery.core.model.feeds import Feeds
from enginery.core.model.random_numbers import RANDOM_OPS, random_input
from enginery.core.shapes import TensorSpec
from enginery.passes.ir.graph_file import read_graph, write_graph
from enginery.passes.ir.nodes import all_nodes
from enginery.runtime.onnxruntime.tracing import GraphTracer
from enginery.validate.cases.sweep import ValidationCase
from enginery.validate.reference import ReferenceRun

_STANDARD = {
    "RandomNormal": ("normal", {"mean": 0.0, "scale": 1.0}),
    "RandomNormalLike": ("normal", {"mean": 0.0, "scale": 1.0}),
    "RandomUniform": ("uniform", {"low": 0.0, "high": 1.0}),
    "RandomUniformLike": ("uniform", {"low": 0.0, "high": 1.0}),
}
"""Op -> its distribution, and the attributes with which it is the standard one."""


@dataclass(frozen=True)
class GivenNumbers:
    """A graph that takes random numbers, and cases that have them."""

    path: Path
    record: GraphRecord
    """The graph's record, with the inputs for random numbers."""
    cases: list[ValidationCase]


def give_random_numbers(
    path: Path,
    record: GraphRecord,
    cases: Sequence[ValidationCase],
    reference: ReferenceRun,
    directory: Path,
) -> GivenNumbers | str:
    """Write a copy of a graph whose random numbers are inputs.

    Args:
        path: the ONNX file, which draws random numbers.
        record: its record.
        cases: the inputs.
        reference: the reference's outputs for them, and the numbers that it drew.
        directory: where to write the copy, under the name in the record.

    Returns:
        The copy and the cases, or the reason why there is none.
    """
    # The names are those of the draws in their order, which the sizes of the inputs do not change.
    drawn: Mapping[str, NDArray[Any]] = next(
        (expected.random_numbers() for expected in reference.outputs if expected.files), {}
    )
    model = read_graph(path)
    nodes = [node for node in all_nodes(model) if node.op_type in RANDOM_OPS and not node.domain]
    for node in nodes:
        if problem := _obstacle(node, inside=node.graph is not model.graph):
            return problem
    names = [random_input(i, _STANDARD[node.op_type][0]) for i, node in enumerate(nodes)]
    # Numbers of another distribution, or in another order, would not be the ones PyTorch used.
    if names != list(drawn):
        return (
            f"the graph draws {_listed(names)}, but {reference.name} draws {_listed(list(drawn))}"
        )
    specs = [
        _replace(model, node, name, drawn[name].ndim)
        for node, name in zip(nodes, names, strict=True)
    ]
    copy = directory / record.file
    copy.parent.mkdir(parents=True, exist_ok=True)
    data = write_graph(model, copy)
    changes = {"inputs": (*record.inputs, *specs), "data_files": data}
    fed_cases = [
        replace(case, make=partial(_make, case, expected.random_numbers(), specs))
        for case, expected in zip(cases, reference.outputs, strict=True)
    ]
    # A number for each of other elements would be broadcast without an error.
    outputs = [node.outputs[0].name or "" for node in nodes]
    if problem := _other_shapes(copy, dict(zip(outputs, names, strict=True)), fed_cases):
        return problem
    return GivenNumbers(copy, record.model_copy(update=changes), fed_cases)


def _obstacle(node: ir.Node, *, inside: bool) -> str:
    """Return the reason why a node's numbers cannot be given; empty if they can."""
    if inside:
        return f"{node.name} draws in a branch or a loop"
    standard = _STANDARD.get(node.op_type)
    if standard is None:
        return f"{node.op_type} is not supported"
    for name, usual in standard[1].items():
        if (value := node.attributes.get_float(name, usual)) != usual:
            return f"{node.name} draws with {name} {value:g}, expected {usual:g}"
    return ""


def _replace(model: ir.Model, node: ir.Node, name: str, rank: int) -> TensorSpec:
    """Put an input in the place of what a node draws, which stays; return the input's spec."""
    like = node.inputs[0].dtype if node.inputs and node.inputs[0] is not None else None
    number = node.attributes.get_int("dtype", None)
    dtype = ir.DataType(number) if number is not None else like or ir.DataType.FLOAT
    # Names of their own: how the sizes follow from those of the other inputs is not known.
    dims = tuple(f"{name}.{axis}" for axis in range(rank))
    value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(dims))
    model.graph.inputs.append(value)
    node.outputs[0].replace_all_uses_with(value, replace_graph_outputs=True)
    return TensorSpec(name, dtype.numpy().name, dims)


def _other_shapes(path: Path, names: Mapping[str, str], cases: Sequence[ValidationCase]) -> str:
    """Return a difference between the shapes that a graph draws and those that it gets.

    Args:
        path: the graph with both.
        names: output of each node that draws -> the input in its place.
        cases: the inputs.
    """
    with GraphTracer(path, list(names), optimized=True) as trace:
        for case in cases:
            feeds = case.make()
            if not feeds.keys() >= set(names.values()):
                continue
            try:
                drawn = trace(feeds)
            except InputError:  # the comparison says so
                continue
            for output, name in names.items():
                if drawn[output].shape != feeds[name].shape:
                    return (
                        f"the graph draws {drawn[output].shape} for '{case.name}', expected "
                        f"{feeds[name].shape}"
                    )
    return ""


def _make(
    case: ValidationCase, drawn: Mapping[str, NDArray[Any]], specs: Sequence[TensorSpec]
) -> Feeds:
    """Return a case's inputs with the random numbers; those it rejects draw none."""
    numbers = {spec.name: drawn[spec.name].astype(spec.dtype) for spec in specs if drawn}
    return {**case.make(), **numbers}


def _listed(names: Sequence[str]) -> str:
    return ", ".join(name.rpartition(".")[2] for name in names) or "none"

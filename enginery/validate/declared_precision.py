"""Check the precision that a manifest declares against the graphs themselves.

FP16, BF16 and INT8 have larger tolerances than FP32. A manifest that declares one of them for an
FP32 graph would hide errors, so weights and operators are checked first.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from enginery.core.artifact.artifact import MANIFEST, Artifact
from enginery.core.errors import ArtifactError
from enginery.core.model.onnx_structure import Graph, read_structure

# onnx.TensorProto.DataType; a validation that is up to date must not import onnx.
_FLOAT_TYPES = {1: "fp32", 10: "fp16", 16: "bf16"}

_MIN_SHARE = 0.1
"""Of the float weights. Layers that overflow in FP16 stay in FP32, and may be the majority."""

_REMEDY = "Create the artifact again from its model."


def check_declared_precision(artifact: Artifact) -> None:
    """Check that the graphs have the precision that the manifest declares.

    Raises:
        ArtifactError: the manifest declares fp16 or bf16, if quantized for the rest of the graph,
            but less than a tenth of the float weights have it; or it has a quantize stage, but no
            graph has a quantized operator.
    """
    manifest = artifact.manifest
    graphs = [
        graph
        for record in manifest.graphs
        for model in [read_structure(artifact.path / record.file)]
        for top in (model.graph, *model.functions)
        for graph in _with_subgraphs(top)
    ]
    quantized = manifest.is_quantized
    declared = manifest.float_precision
    counts = _count_weights(graphs)
    share = counts.get(declared, 0) / max(1, sum(counts.values()))
    if declared != "fp32" and counts and share < _MIN_SHARE:
        raise ArtifactError(
            f"{artifact.path / MANIFEST} declares the precision {declared}, but only {share:.1%} "
            "of the float weights have it, so the tolerance would be too large.",
            do=_REMEDY,
        )
    if quantized and not any(_is_quantized(graph) for graph in graphs):
        raise ArtifactError(
            f"{artifact.path / MANIFEST} declares a quantize stage, but no graph has a quantized "
            "operator, so the tolerance would be too large.",
            do=_REMEDY,
        )


def _with_subgraphs(graph: Graph) -> Iterator[Graph]:
    yield graph
    for node in graph.nodes:
        for attribute in node.attributes.values():
            for subgraph in attribute.graphs:
                yield from _with_subgraphs(subgraph)


def _count_weights(graphs: list[Graph]) -> dict[str, int]:
    """Return the number of float weights of each precision."""
    counts: dict[str, int] = {}
    for graph in graphs:
        for tensor in graph.initializers:
            if precision := _FLOAT_TYPES.get(tensor.data_type):
                counts[precision] = counts.get(precision, 0) + prod(tensor.dims)
    return counts


def _is_quantized(graph: Graph) -> bool:
    """Return True if the graph has a quantized operator: Q/DQ, QLinear…, …Integer."""
    return any(
        "Quantize" in node.op_type
        or node.op_type.startswith(("QLinear", "QAttention", "QGemm"))
        or node.op_type.endswith(("Integer", "NBits"))
        for node in graph.nodes
    )

"""What a manifest says of its graphs, where the limits of a verdict depend on it.

A manifest is what its author wrote. FP16, BF16 and INT8 allow more error than FP32 does, so that a
graph is held to FP32's limits unless its own weights and operators are of the other kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from onnx import TensorProto

from enginery.core.artifact import MANIFEST, Artifact
from enginery.core.errors import ArtifactError
from enginery.core.onnx_structure import Graph, read_structure

_FLOAT_TYPES = {
    TensorProto.FLOAT: "fp32",
    TensorProto.FLOAT16: "fp16",
    TensorProto.BFLOAT16: "bf16",
}

_LEAST_SHARE = 0.1
"""Of the float weights. Where layers overflow in FP16 they stay in FP32, and these may be most."""

_AGAIN = "Make the artifact again, from its model."


def require_true_claims(artifact: Artifact) -> None:
    """Check the precision and the quantization that a manifest claims against its graphs.

    Raises:
        ArtifactError: the manifest says fp16 or bf16, and less than a tenth of the float weights
            are; or it says that the artifact was quantized, and no graph has a quantized operator.
    """
    manifest = artifact.manifest
    graphs = [
        graph
        for record in manifest.graphs
        for model in [read_structure(artifact.path / record.file)]
        for top in (model.graph, *model.functions)
        for graph in _with_subgraphs(top)
    ]
    quantized = any(stage.stage == "quantize" for stage in manifest.stages)
    claimed = manifest.precision
    counts = _count_weights(graphs)
    share = counts.get(claimed, 0) / max(1, sum(counts.values()))
    # What is allowed to a quantized artifact is by its budget, and few of its weights are floats.
    if claimed != "fp32" and not quantized and counts and share < _LEAST_SHARE:
        raise ArtifactError(
            f"{artifact.path / MANIFEST} says that the precision is {claimed}, and {share:.1%} of "
            "the graph's float weights are: such an artifact would be allowed too much error.",
            do=_AGAIN,
        )
    if quantized and not any(_is_quantized(graph) for graph in graphs):
        raise ArtifactError(
            f"{artifact.path / MANIFEST} says that the artifact was quantized, and no graph has a "
            "quantized operator: it would be allowed too much error.",
            do=_AGAIN,
        )


def _with_subgraphs(graph: Graph) -> Iterator[Graph]:
    yield graph
    for node in graph.nodes:
        for attribute in node.attributes.values():
            for subgraph in attribute.graphs:
                yield from _with_subgraphs(subgraph)


def _count_weights(graphs: list[Graph]) -> dict[str, int]:
    """Return the number of stored float values of each precision."""
    counts: dict[str, int] = {}
    for graph in graphs:
        for tensor in graph.initializers:
            if precision := _FLOAT_TYPES.get(tensor.data_type):
                counts[precision] = counts.get(precision, 0) + prod(tensor.dims)
    return counts


def _is_quantized(graph: Graph) -> bool:
    """Return whether a node works on integers that stand for floats: Q/DQ, QLinear…, …Integer."""
    return any(
        "Quantize" in node.op_type
        or node.op_type.startswith(("QLinear", "QAttention", "QGemm"))
        or node.op_type.endswith(("Integer", "NBits"))
        for node in graph.nodes
    )

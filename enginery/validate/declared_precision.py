"""Check the precision that a manifest declares against the graphs themselves.

FP16, BF16 and INT8 have larger tolerances than FP32. A manifest that declares one of them for an
FP32 graph would hide errors, so weights and operators are checked first.

Some weights stay FP32 in any precision: those that a Loop or a Scan reads, where no range can be
measured, and those of normalizations, which may overflow. If a graph has no others, some node has
to compute in the declared type.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from math import prod

from enginery.core.artifact.artifact import MANIFEST, Artifact
from enginery.core.errors import ArtifactError
from enginery.core.trust.onnx_structure import Graph, read_structure

# onnx.TensorProto.DataType; a validation that is up to date must not import onnx.
_FLOAT_TYPES = {1: "fp32", 10: "fp16", 16: "bf16"}

_LOOPS = ("Loop", "Scan")
_NORMALIZATION = "Normalization"
"""End of the names of the operators that normalize."""

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
    tops = [
        top
        for record in manifest.graphs
        for model in [read_structure(artifact.path / record.file)]
        for top in model.graphs
    ]
    graphs = [graph for top in tops for graph in _with_subgraphs(top)]
    quantized = manifest.is_quantized
    declared = manifest.float_precision
    if declared != "fp32":
        _check_float_weights(artifact, tops, graphs, declared)
    if quantized and not any(_is_quantized(graph) for graph in graphs):
        raise ArtifactError(
            f"{artifact.path / MANIFEST} declares a quantize stage, but no graph has a quantized "
            "operator, so the tolerance would be too large.",
            do=_REMEDY,
        )


def _check_float_weights(
    artifact: Artifact, tops: list[Graph], graphs: list[Graph], declared: str
) -> None:
    """Check that enough of the float weights have the declared precision."""
    counts = _count_weights(graphs, set())
    if not counts or counts.get(declared, 0) >= _MIN_SHARE * sum(counts.values()):
        return
    kept = {name for top in tops for name in _weights_kept(top)}
    counts = _count_weights(graphs, kept)
    share = counts.get(declared, 0) / max(1, sum(counts.values()))
    if counts and share < _MIN_SHARE:
        raise ArtifactError(
            f"{artifact.path / MANIFEST} declares the precision {declared}, but only {share:.1%} "
            "of the float weights have it, so the tolerance would be too large.",
            do=_REMEDY,
        )
    if not counts and not any(_computes_in(graph, declared) for graph in graphs):
        raise ArtifactError(
            f"{artifact.path / MANIFEST} declares the precision {declared}, but no node computes "
            "in it, so the tolerance would be too large.",
            do=_REMEDY,
        )


def _with_subgraphs(graph: Graph) -> Iterator[Graph]:
    yield graph
    for node in graph.nodes:
        for attribute in node.attributes.values():
            for subgraph in attribute.graphs:
                yield from _with_subgraphs(subgraph)


def _count_weights(graphs: list[Graph], left_out: Collection[str]) -> dict[str, int]:
    """Return the number of float weights of each precision, without those of some names."""
    counts: dict[str, int] = {}
    for graph in graphs:
        for tensor in graph.initializers:
            precision = _FLOAT_TYPES.get(tensor.data_type)
            if precision and tensor.name not in left_out:
                counts[precision] = counts.get(precision, 0) + prod(tensor.dims)
    return counts


def _weights_kept(top: Graph) -> set[str]:
    """Return the names of the initializers that only loops and normalizations read."""
    kept: set[str] = set()
    other: set[str] = set()

    def read(graph: Graph, *, looping: bool) -> None:
        if looping:
            kept.update(tensor.name for tensor in graph.initializers)
        for node in graph.nodes:
            stays = looping or node.op_type.endswith(_NORMALIZATION)
            (kept if stays else other).update(node.inputs)
            for attribute in node.attributes.values():
                for subgraph in attribute.graphs:
                    read(subgraph, looping=looping or node.op_type in _LOOPS)

    read(top, looping=False)
    return kept - other


def _computes_in(graph: Graph, precision: str) -> bool:
    """Return True if a node casts to a precision."""
    return any(
        node.op_type == "Cast" and _FLOAT_TYPES.get(node.attributes["to"].number or 0) == precision
        for node in graph.nodes
        if "to" in node.attributes
    )


def _is_quantized(graph: Graph) -> bool:
    """Return True if the graph has a quantized operator: Q/DQ, QLinear…, …Integer."""
    return any(
        "Quantize" in node.op_type
        or node.op_type.startswith(("QLinear", "QAttention", "QGemm"))
        or node.op_type.endswith(("Integer", "NBits"))
        for node in graph.nodes
    )

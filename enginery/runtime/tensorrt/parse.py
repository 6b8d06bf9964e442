"""Parse a graph with TensorRT in this process, and report unsupported nodes with reasons.

    parse_in_process(Path("model.onnx")).accepted    # True

TensorRT may crash on unusual graphs, so `tensorrt.process` calls these functions in a child
process.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from enginery.core.artifact.external_data import load_graph
from enginery.core.errors import ProviderError, SourceError
from enginery.core.shapes import TensorSpec, canonical_dim
from enginery.runtime.tensorrt.library import Messages, Sink, load_tensorrt, trt_messages
from enginery.runtime.tensorrt.options import CLASSIC, RTX, Flavor
from enginery.runtime.tensorrt.reports import Coverage, ParseReport, Refusal

# TensorRT's name of a type -> numpy's.
_DTYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT8": "int8",
    "INT32": "int32",
    "INT64": "int64",
    "BOOL": "bool",
    "UINT8": "uint8",
}

# Without a GPU, TensorRT adds this line to other errors.
_NO_DEVICE = re.compile(r"^\[?checkMacros\.cpp::catchCudaError.*$", re.MULTILINE)

MERGED_CONDITION = "use_cache_branch"
"""Input of Optimum's merged decoder that selects the branch to run."""
MERGED_REMEDY = "Export the model with `enginery export`, or with --no-post-process of optimum-cli."
_MERGED = (
    "The parser accepts a merged decoder, but the builder does not, because the outputs of its "
    "branches have different shapes."
)
_FUSED_REMEDY = (
    "Use the graph before ONNX Runtime's fusions: `enginery export`, then `enginery optimize "
    "--target tensorrt`."
)


def parse_in_process(
    path: Path, *, flavor: Flavor = RTX, follow: Sequence[Sink] = ()
) -> ParseReport:
    """Parse a graph; see `process.parse_onnx` for the errors."""
    trt = load_tensorrt("Parsing a graph with TensorRT", flavor)
    require_file(path)
    with trt_messages(trt, follow) as messages:
        network, parser = open_parser(trt, make_builder(trt, flavor, messages), flavor, messages)
        refusals = parse_into(network, parser, path, messages)
        return ParseReport(
            path=str(path),
            tensorrt=trt.__version__,
            accepted=not refusals,
            refusals=refusals,
            inputs=network_inputs(network),
            warnings=tuple(messages.warnings()),
        )


def cover_in_process(path: Path, *, flavor: Flavor = RTX, follow: Sequence[Sink] = ()) -> Coverage:
    """Return which nodes TensorRT supports; see `process.coverage` for the errors."""
    trt = load_tensorrt("Asking TensorRT which nodes it takes", flavor)
    require_file(path)
    nodes = load_graph(path).graph.node
    with trt_messages(trt, follow) as messages:
        _, parser = open_parser(trt, make_builder(trt, flavor, messages), flavor, messages)
        # The path is needed for external data.
        parser.supports_model_v2(path.read_bytes(), str(path))
        parts = [parser.get_subgraph_nodes(index) for index in range(parser.num_subgraphs)]
        reasons = {refusal.node: refusal for refusal in _refusals(parser)}
    merged = {
        index
        for index, node in enumerate(nodes)
        if node.op_type == "If" and MERGED_CONDITION in node.input
    }
    supported = {index for part in parts for index in part} - merged
    refused = {}
    for index, node in enumerate(nodes):
        if index in supported:
            continue
        name = node.name or f"#{index}"
        default = _MERGED if index in merged else "TensorRT gives no reason."
        reported = reasons.pop(name, None)
        refused[name] = Refusal(
            name,
            node.op_type,
            reported.reason if reported else default,
            _remedy(node.op_type, node.domain),
        )
    # The remaining nodes are in branches or functions.
    inner = [
        Refusal(refusal.node, refusal.op_type, refusal.reason, _remedy(refusal.op_type))
        for refusal in reasons.values()
    ]
    return Coverage(
        path=str(path),
        tensorrt=trt.__version__,
        total=len(nodes),
        taken=len(supported),
        refused=(*refused.values(), *inner),
        partitions=sum(bool(supported.intersection(part)) for part in parts),
    )


def _remedy(op_type: str, domain: str = "") -> str:
    if op_type == "If":
        return MERGED_REMEDY
    return _FUSED_REMEDY if domain.startswith("com.microsoft") else ""


def make_builder(trt: Any, flavor: Flavor, messages: Messages) -> Any:
    """Return a builder; raise ProviderError if the flavor needs a GPU and there is none."""
    try:
        return trt.Builder(messages.logger)
    except TypeError as error:  # the bindings raise it for a null pointer
        raise ProviderError(
            f"{flavor.title} {trt.__version__} does not start: {last_error(messages)}",
            do=f"It requires an NVIDIA GPU and its driver; {RTX.title} does not: "
            f"--flavor {RTX.name}",
        ) from error


def open_parser(trt: Any, builder: Any, flavor: Flavor, messages: Messages) -> tuple[Any, Any]:
    """Return an empty network and a parser that fills it."""
    flags = 0
    if flavor is CLASSIC:
        # Types come from the graph. All networks of TensorRT for RTX are strongly typed.
        flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(flags)
    return network, trt.OnnxParser(network, messages.logger)


def parse_into(network: Any, parser: Any, path: Path, messages: Messages) -> tuple[Refusal, ...]:
    """Parse the file into the network; return the reasons why TensorRT rejects it, if any."""
    if not parser.parse_from_file(str(path)):
        return _refusals(parser) or (Refusal("", "", last_error(messages)),)
    # TensorRT also "parses" files that are not ONNX.
    if not network.num_outputs:
        raise SourceError(f"{path} is not an ONNX model: TensorRT finds no outputs in it.")
    return ()


def _refusals(parser: Any) -> tuple[Refusal, ...]:
    refusals = []
    for error in (parser.get_error(index) for index in range(parser.num_errors)):
        name = error.node_name() or (f"#{error.node()}" if error.node() >= 0 else "")
        reason = " ".join(_NO_DEVICE.sub("", error.desc()).split())
        refusals.append(Refusal(name, error.node_operator(), reason))
    return tuple(dict.fromkeys(refusals))


def last_error(messages: Messages) -> str:
    """Return TensorRT's last error message."""
    return next(reversed(messages.errors()), "no reason given.")


def require_file(path: Path) -> None:
    """Raise SourceError unless the file exists."""
    if not path.is_file():
        raise SourceError(f"{path} is not a file; expected an ONNX model.")


def network_inputs(network: Any) -> tuple[TensorSpec, ...]:
    """Return the inputs of a network, in order."""
    return tuple(_spec(network.get_input(index)) for index in range(network.num_inputs))


def network_outputs(network: Any) -> tuple[TensorSpec, ...]:
    """Return the outputs of a network, in order."""
    return tuple(_spec(network.get_output(index)) for index in range(network.num_outputs))


def _spec(tensor: Any) -> TensorSpec:
    """Return the spec of a tensor, with the names of dims that profiles use (`batch`).

    A dynamic dim without a name is -1; dims of outputs have no names.
    """
    dtype = tensor.dtype.name
    sizes = [int(size) for size in tensor.shape] if len(tensor.shape) >= 0 else []
    names = [tensor.get_dimension_name(axis) or "" for axis in range(len(sizes))]
    dims = (
        size if size >= 0 else canonical_dim(name) or -1
        for size, name in zip(sizes, names, strict=True)
    )
    return TensorSpec(tensor.name, _DTYPES.get(dtype, dtype.lower()), tuple(dims))

"""Parsing in this process: the network of a graph, or which nodes TensorRT refuses and why.

Takes the path of an ONNX file; leaves nothing on disk.

    >>> parse_here(Path("model.onnx")).accepted
    True

TensorRT may end the process on a graph that it does not expect: `tensorrt.process` calls these
functions in a child process.
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

# One word for each: TensorRT names the C++ type, the rest of this package numpy's.
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

# TensorRT looks for a device now and then; without one it says so inside other errors.
_NO_DEVICE = re.compile(r"^\[?checkMacros\.cpp::catchCudaError.*$", re.MULTILINE)

MERGED_CONDITION = "use_cache_branch"
"""The input of Optimum's merged decoder that says which of its branches runs."""
MERGED_REMEDY = (
    "Export separate decoders: `enginery export --no-post-process`, or no_post_process=True of "
    "Optimum."
)
_MERGED = (
    "The parser takes a merged decoder, and the builder does not: its branches give tensors of "
    "different shapes."
)
_FUSED_REMEDY = (
    "Use the graph before ONNX Runtime's fusions: `enginery export`, then `enginery optimize "
    "--target tensorrt`."
)


def parse_here(path: Path, *, flavor: Flavor = RTX, follow: Sequence[Sink] = ()) -> ParseReport:
    """Asks TensorRT's parser about a graph; the errors are those of `tensorrt.parse_onnx`."""
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


def cover_here(path: Path, *, flavor: Flavor = RTX, follow: Sequence[Sink] = ()) -> Coverage:
    """Asks TensorRT which nodes it takes; the errors are those of `tensorrt.coverage`."""
    trt = load_tensorrt("Asking TensorRT which nodes it takes", flavor)
    require_file(path)
    nodes = load_graph(path).graph.node
    with trt_messages(trt, follow) as messages:
        _, parser = open_parser(trt, make_builder(trt, flavor, messages), flavor, messages)
        # The path is for weights in external data; the file itself is small then.
        parser.supports_model_v2(path.read_bytes(), str(path))
        parts = [parser.get_subgraph_nodes(index) for index in range(parser.num_subgraphs)]
        reasons = {refusal.node: refusal for refusal in _refusals(parser)}
    merged = {
        index
        for index, node in enumerate(nodes)
        if node.op_type == "If" and MERGED_CONDITION in node.input
    }
    taken = {index for part in parts for index in part} - merged
    refused = {}
    for index, node in enumerate(nodes):
        if index in taken:
            continue
        name = node.name or f"#{index}"
        silent = _MERGED if index in merged else "TensorRT gives no reason."
        said = reasons.pop(name, None)
        refused[name] = Refusal(
            name, node.op_type, said.reason if said else silent, _remedy(node.op_type, node.domain)
        )
    # What is left lies inside a branch or a function, under a name of its own.
    inner = [Refusal(r.node, r.op_type, r.reason, _remedy(r.op_type)) for r in reasons.values()]
    return Coverage(
        path=str(path),
        tensorrt=trt.__version__,
        total=len(nodes),
        taken=len(taken),
        refused=(*refused.values(), *inner),
        partitions=sum(bool(taken.intersection(part)) for part in parts),
    )


def _remedy(op_type: str, domain: str = "") -> str:
    if op_type == "If":
        return MERGED_REMEDY
    return _FUSED_REMEDY if domain.startswith("com.microsoft") else ""


def make_builder(trt: Any, flavor: Flavor, messages: Messages) -> Any:
    """A builder; raises ProviderError where there is none without a GPU."""
    try:
        return trt.Builder(messages.logger)
    except TypeError as error:  # the bindings' word for a null pointer
        raise ProviderError(
            f"{flavor.title} {trt.__version__} does not start: {last_error(messages)}",
            do=f"It needs an NVIDIA GPU and its driver; {RTX.title} needs none: "
            f"--flavor {RTX.name}",
        ) from error


def open_parser(trt: Any, builder: Any, flavor: Flavor, messages: Messages) -> tuple[Any, Any]:
    """An empty network and a parser that writes into it."""
    flags = 0
    if flavor is CLASSIC:
        # Types come from the graph. TensorRT for RTX has no other networks.
        flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(flags)
    return network, trt.OnnxParser(network, messages.logger)


def parse_into(network: Any, parser: Any, path: Path, messages: Messages) -> tuple[Refusal, ...]:
    """Parses the file into the network; why TensorRT does not take it, or nothing."""
    if not parser.parse_from_file(str(path)):
        return _refusals(parser) or (Refusal("", "", last_error(messages)),)
    # A file that is no ONNX at all is "parsed", too.
    if not network.num_outputs:
        raise SourceError(f"{path} is not an ONNX model: TensorRT finds no outputs in it.")
    return ()


def _refusals(parser: Any) -> tuple[Refusal, ...]:
    found = []
    for error in (parser.get_error(index) for index in range(parser.num_errors)):
        name = error.node_name() or (f"#{error.node()}" if error.node() >= 0 else "")
        reason = " ".join(_NO_DEVICE.sub("", error.desc()).split())
        found.append(Refusal(name, error.node_operator(), reason))
    return tuple(dict.fromkeys(found))


def last_error(messages: Messages) -> str:
    """What TensorRT said last of what went wrong."""
    return next(reversed(messages.errors()), "no reason given.")


def require_file(path: Path) -> None:
    """Raises SourceError unless there is such a file."""
    if not path.is_file():
        raise SourceError(f"{path} is not a file; expected an ONNX model.")


def network_inputs(network: Any) -> tuple[TensorSpec, ...]:
    """The inputs of a network, in order."""
    return tuple(_spec(network.get_input(index)) for index in range(network.num_inputs))


def network_outputs(network: Any) -> tuple[TensorSpec, ...]:
    """The outputs of a network, in order."""
    return tuple(_spec(network.get_output(index)) for index in range(network.num_outputs))


def _spec(tensor: Any) -> TensorSpec:
    """Dims by the names that profiles use: Optimum's `batch_size` is batch.

    A dynamic dim without a name is -1; those of outputs have none.
    """
    dtype = tensor.dtype.name
    sizes = [int(size) for size in tensor.shape] if len(tensor.shape) >= 0 else []
    names = [tensor.get_dimension_name(axis) or "" for axis in range(len(sizes))]
    dims = (
        size if size >= 0 else canonical_dim(name) or -1
        for size, name in zip(sizes, names, strict=True)
    )
    return TensorSpec(tensor.name, _DTYPES.get(dtype, dtype.lower()), tuple(dims))

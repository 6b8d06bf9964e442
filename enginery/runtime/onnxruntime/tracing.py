"""Read the values of a graph's intermediate tensors.

    with GraphTracer(artifact.model, ["/encoder/layer.0/Add_output_0"]) as trace:
        trace(feeds)["/encoder/layer.0/Add_output_0"].shape    # (4, 17, 384)

The tensors become outputs of a copy of the graph in memory; the ONNX file is not changed, and
nothing is written to disk. The copy reads external weights from the file's own directory. ONNX
Runtime can only output tensors of the main graph, so a float tensor inside a branch of an If
becomes an additional output of that If, which is empty if the other branch ran.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from enginery.core.artifact.external_data import load_graph
from enginery.core.closing import Closeable
from enginery.core.errors import InputError, ProviderError, nearest
from enginery.runtime.onnxruntime.session import use_exact_int8
from enginery.runtime.providers.known import TENSORRT_RTX
from enginery.runtime.providers.selection import Provider, choose_providers

Feeds = Mapping[str, NDArray[Any]]
Values = dict[str, NDArray[Any]]


class GraphTracer(Closeable):
    """An ONNX Runtime session that also outputs intermediate tensors. A context manager."""

    def __init__(
        self,
        model: Path,
        tensors: Sequence[str],
        *,
        provider: str = "cpu",
        optimized: bool = False,
    ) -> None:
        """Open the session.

        Args:
            model: an ONNX file.
            tensors: names of node outputs, graph outputs, graph inputs, or float32 tensors in a
                branch of an If.
            provider: providers in order of preference.
            optimized: let ONNX Runtime fuse the nodes between the tensors: about twice as fast,
                but values differ in the last bits.

        Raises:
            InputError: the graph has no tensor of one of the names.
            ProviderError: the provider is unavailable, or the graph cannot be loaded.
        """
        graph = load_graph(model)
        self.tensors = tuple(dict.fromkeys(tensors))
        self.inputs = tuple(value.name for value in graph.graph.input)
        computed = {name for node in graph.graph.node for name in node.output if name}
        inner = expose_branches(graph.graph, {*self.tensors} - computed - {*self.inputs})
        for name in self.tensors:
            if name not in computed and name not in self.inputs and name not in inner:
                raise InputError(
                    f"{model} has no tensor '{name}'{nearest(name, [*computed, *self.inputs])}"
                )
        # Two branches may have tensors with the same name; a run computes at most one of them.
        self._sources = {
            name: inner.get(name, [name]) for name in self.tensors if name not in self.inputs
        }
        self._fetched = [source for sources in self._sources.values() for source in sources]
        # A session returns only outputs of the graph, so that the tensors become some.
        present = {value.name for value in graph.graph.output}
        for name in self._fetched:
            if name not in present:
                # ONNX Runtime infers the type of an output that has only a name.
                graph.graph.output.add().name = name
        self._session: Any = open_in_memory(
            graph.SerializeToString(),
            model.parent,
            choose_providers(provider),
            optimized=optimized,
            blocked_layout=not _has_series_convolution(graph.graph),
        )

    def __call__(self, feeds: Feeds) -> Values:
        """Return the values of the tensors for one batch, by name in the requested order.

        Raises:
            InputError: the graph fails on the feeds.
        """
        if self._session is None:
            raise ProviderError("the tracer is closed.")
        try:
            outputs = self._session.run(self._fetched, dict(feeds)) if self._fetched else []
        except Exception as error:  # ONNX Runtime raises many unrelated types
            shapes = ", ".join(f"{name} {array.shape}" for name, array in feeds.items())
            raise InputError(f"the graph fails on {shapes}: {error}") from error
        values = dict(zip(self._fetched, outputs, strict=True))
        results = {}
        for name in self.tensors:
            sources = [values[source] for source in self._sources.get(name, ())]
            # Outputs of a branch that did not run are empty.
            filled = next((array for array in sources if array.size), None)
            results[name] = feeds[name] if not sources else sources[0] if filled is None else filled
        return results

    def close(self) -> None:
        """Free the session and its memory."""
        self._session = None


def _has_series_convolution(graph: Any) -> bool:
    """Return True if a graph has a convolution over one axis.

    ONNX Runtime 1.31 crashes (signal 11) when it arranges some of these graphs in blocks of
    channels: WavLM in INT8, with the layers in FP32 beside those in INT8.
    """
    return any(
        node.op_type == "Conv"
        and any(a.name == "kernel_shape" and len(a.ints) == 1 for a in node.attribute)
        for node in graph.node
    )


def expose_branches(graph: Any, names: Collection[str]) -> dict[str, list[str]]:
    """Make float32 tensors inside the branches of If nodes outputs of those nodes, in place.

    Args:
        graph: an `onnx.GraphProto`.
        names: names of tensors; names that occur in no branch are ignored.

    Returns:
        For each name that was found, the outputs of `graph`'s own nodes with its values: one for
        each branch with a tensor of that name. An output is empty if another branch ran.
    """
    return _expose(graph, frozenset(names), count()) if names else {}


def _expose(graph: Any, names: frozenset[str], numbers: count[int]) -> dict[str, list[str]]:
    exposed: dict[str, list[str]] = {}
    for node in graph.node:
        if node.op_type != "If" or node.domain not in ("", "ai.onnx"):
            continue
        branches = [attribute.g for attribute in node.attribute if attribute.HasField("g")]
        for branch in branches:
            inner = _expose(branch, names, numbers)
            own = {name: [name] for n in branch.node for name in n.output if name in names}
            for name, sources in (*own.items(), *inner.items()):
                for source in sources:
                    # The number keeps names apart that occur in several branches or depths.
                    outside = f"{name}:fetched:{next(numbers)}"
                    _add_output(branch, source, f"{outside}:inside")
                    # All branches of an If need the same number of outputs.
                    for other in branches:
                        if other is not branch:
                            _add_empty(other, f"{outside}:empty")
                    node.output.append(outside)
                    exposed.setdefault(name, []).append(outside)
    return exposed


def _add_output(branch: Any, source: str, copy: str) -> None:
    """Add a copy of a tensor as an output, since the tensor itself may already be an output."""
    branch.node.add(op_type="Identity", input=[source], output=[copy], name=copy)
    branch.output.add().name = copy


def _add_empty(branch: Any, name: str) -> None:
    import onnx

    empty = onnx.TensorProto(name=name, data_type=onnx.TensorProto.FLOAT, dims=[0])
    node = branch.node.add(op_type="Constant", output=[name], name=name)
    node.attribute.append(onnx.helper.make_attribute("value", empty))
    branch.output.add().name = name


def open_in_memory(
    model: bytes,
    directory: Path,
    providers: Sequence[Provider],
    *,
    optimized: bool,
    keep_memory: bool = True,
    blocked_layout: bool = True,
) -> Any:
    """Open an `onnxruntime.InferenceSession` on a serialized graph.

    Args:
        model: a serialized `onnx.ModelProto`, without its external data.
        directory: the directory of its external data.
        providers: the result of `choose_providers`.
        optimized: let ONNX Runtime optimize the graph.
        keep_memory: keep the memory of a run for the next one; if False, free it after each run.
        blocked_layout: let it hold images in blocks of channels, which is faster.

    Raises:
        ProviderError: the provider cannot load a graph from memory, or the graph is invalid.
    """
    import onnxruntime as ort

    if any(provider.name == TENSORRT_RTX for provider in providers):
        raise ProviderError(
            "intermediate tensors cannot be read on tensorrt-rtx, because an engine has none.",
            do="Trace on cpu or cuda.",
        )
    options = ort.SessionOptions()
    options.log_severity_level = 4  # errors come back as exceptions
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimized else level.ORT_DISABLE_ALL
    options.enable_cpu_mem_arena = keep_memory
    use_exact_int8(options)
    # Outputs are compared or counted between the runs, which busy threads would slow down.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # A graph in memory has no folder, where its external data would be found.
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(directory.resolve())
    )
    requested = [(provider.name, dict(provider.options)) for provider in providers]
    try:
        return ort.InferenceSession(
            model,
            options,
            providers=requested,
            enable_fallback=0,
            disabled_optimizers=[] if blocked_layout else ["NchwcTransformer"],
        )
    except Exception as error:
        raise ProviderError(f"ONNX Runtime cannot load the graph: {error}") from error

"""The values of a graph's inner tensors, batch by batch.

Takes an ONNX file and tensor names; leaves nothing on disk, and the file as it is.

    >>> with GraphTracer(artifact.model, ["/encoder/layer.0/Add_output_0"]) as trace:
    ...     trace(feeds)["/encoder/layer.0/Add_output_0"].shape
    (4, 17, 384)

The tensors become outputs of a copy of the graph in memory. Weights outside the file stay there:
the copy reads them from the file's own directory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from enginery.core.closing import Closing
from enginery.core.errors import InputError, ProviderError, nearest
from enginery.core.external_data import load_graph
from enginery.runtime.provider_names import TENSORRT_RTX
from enginery.runtime.providers import Provider, choose_providers, parse_providers

Feeds = Mapping[str, NDArray[Any]]
Values = dict[str, NDArray[Any]]


class GraphTracer(Closing):
    """An ONNX Runtime session that also gives out inner tensors. A context manager."""

    def __init__(
        self,
        model: Path,
        tensors: Sequence[str],
        *,
        provider: str = "cpu",
        optimized: bool = False,
    ) -> None:
        """Opens the session.

        Args:
        model: an ONNX file.
        tensors: names of node outputs, graph outputs or graph inputs.
        provider: the ordered wish; the first is meant.
        optimized: let ONNX Runtime fuse what lies between the tensors: about twice as fast, and
            values differ in the last bits.

        Raises:
            InputError: the graph has no tensor of a name.
            ProviderError: the provider cannot be had, or the graph cannot be loaded.
        """
        graph = load_graph(model)
        self.tensors = tuple(dict.fromkeys(tensors))
        self.inputs = tuple(value.name for value in graph.graph.input)
        made = {name for node in graph.graph.node for name in node.output if name}
        for name in self.tensors:
            if name not in made and name not in self.inputs:
                raise InputError(
                    f"{model} has no tensor '{name}'{nearest(name, [*made, *self.inputs])}"
                )
        self._fetched = [name for name in self.tensors if name in made]
        present = {value.name for value in graph.graph.output}
        for name in self._fetched:
            if name not in present:
                graph.graph.output.add().name = name
        self._session: Any = open_in_memory(
            graph.SerializeToString(), model.parent, choose_providers(parse_providers(provider)),
            optimized=optimized,
        )  # fmt: skip

    def __call__(self, feeds: Feeds) -> Values:
        """The tensors' values for one batch, in the order in which they were named.

        Raises:
            InputError: the graph fails on the feeds.
        """
        if self._session is None:
            raise ProviderError("the tracer is closed.")
        try:
            found = self._session.run(self._fetched, dict(feeds)) if self._fetched else []
        except Exception as error:  # ONNX Runtime raises many unrelated types
            shapes = ", ".join(f"{name} {array.shape}" for name, array in feeds.items())
            raise InputError(f"the graph fails on {shapes}: {error}") from error
        values = dict(zip(self._fetched, found, strict=True))
        return {name: values[name] if name in values else feeds[name] for name in self.tensors}

    def close(self) -> None:
        """Frees the session and its memory."""
        self._session = None


def open_in_memory(
    model: bytes, directory: Path, providers: Sequence[Provider], *, optimized: bool
) -> Any:
    """An `onnxruntime.InferenceSession` over a serialized graph.

    Args:
        model: a serialized `onnx.ModelProto`; its external data stay outside.
        directory: where its external data lie.
        providers: what `choose_providers` chose.
        optimized: whether ONNX Runtime may fuse.

    Raises:
        ProviderError: the provider cannot take a graph in memory, or the graph cannot be loaded.
    """
    import onnxruntime as ort

    if any(provider.name == TENSORRT_RTX for provider in providers):
        raise ProviderError(
            "inner tensors cannot be read on tensorrt-rtx: an engine has none.",
            do="Trace on cpu or cuda.",
        )
    options = ort.SessionOptions()
    options.log_severity_level = 4  # errors come back as exceptions
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimized else level.ORT_DISABLE_ALL
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(directory.resolve())
    )
    wanted = [(provider.name, dict(provider.options)) for provider in providers]
    try:
        return ort.InferenceSession(model, options, providers=wanted, enable_fallback=0)
    except Exception as error:
        raise ProviderError(f"the graph cannot be loaded by ONNX Runtime: {error}") from error

"""The FP32 graph that is quantized.

An artifact with a cache and an encoder has two graphs, and so has one that segments what points in
an image belong to. Texts, images and sounds are inputs of the encoder; the other graph's inputs are
computed from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import ArtifactError
from enginery.passes.ir.graph_file import read_graph
from enginery.passes.ir.nodes import infer_types
from enginery.runtime.decoder_graphs import find_encoder_decoder
from enginery.runtime.graph_roles import find_segmenter


@dataclass(frozen=True)
class SourceGraph:
    """An FP32 graph."""

    artifact: Artifact
    """Has the tokenizer or processor, and the other graphs."""
    record: GraphRecord
    path: Path
    """Its file; outside the artifact if the graph was converted to a later opset."""

    @classmethod
    def of(cls, artifact: Artifact, record: GraphRecord) -> SourceGraph:
        """Return a graph of the artifact as it is."""
        return cls(artifact, record, artifact.path / record.file)

    def read(self) -> ir.Model:
        """Read the graph, with the types of its values."""
        model = read_graph(self.path)
        infer_types(model)
        return model

    @property
    def outputs(self) -> list[str]:
        """The names of its outputs."""
        return [spec.name for spec in self.record.outputs]

    @property
    def is_step(self) -> bool:
        """True for a decoder that runs one token in each row, with a cache and an encoder."""
        graphs = find_encoder_decoder(self.artifact.manifest.graphs)
        return graphs is not None and graphs.later.file == self.record.file


def require_calibratable(artifact: Artifact) -> None:
    """Check that calibration inputs give the inputs of every graph.

    Raises:
        ArtifactError: it has several graphs other than an encoder and its decoder, or those of
            images and of prompts.
    """
    graphs = artifact.manifest.graphs
    if len(graphs) == 1 or find_encoder_decoder(graphs) or find_segmenter(graphs):
        return
    names = ", ".join(record.file for record in graphs)
    raise ArtifactError(
        f"{artifact.path} has the graphs {names}; expected one, or an encoder and a decoder that "
        "runs every step.",
        do="Export the model for a task that ends in -with-past, with --layout enginery; or use "
        "--scheme dynamic --target cpu without data.",
    )

"""Let the graphs of embedders and text classifiers end in the task's answer."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.external_data import load_graph
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import ArtifactError
from enginery.core.model.files import ModelConfig
from enginery.core.shapes import TensorSpec
from enginery.passes.ir.answers import append_pooling, append_scores
from enginery.passes.ir.graph_file import check_graph
from enginery.runtime.tasks import manifest_task
from enginery.runtime.tasks.classify import SCORES, Classify, choose_activation
from enginery.runtime.tasks.embed import SENTENCE_OUTPUT, TOKEN_OUTPUTS, Embed, vector_output
from enginery.runtime.text.pooling import read_pooling


def append_answer(
    artifact: Artifact, record: GraphRecord, graph: Path
) -> tuple[TensorSpec | None, str]:
    """Add the output of the task's last step to a written graph, in FP32.

    Args:
        artifact: the artifact of which the graph is made, with the model's files.
        record: the record of the graph there.
        graph: the ONNX file, which is written anew; its external data stay as they are.

    Returns:
        The spec of the further output and a note; None and the reason, or an empty note, if there
        is none.
    """
    names = {spec.name: spec for spec in record.outputs}
    task = manifest_task(artifact.manifest, record)
    proto = load_graph(graph)  # without its external data
    model = ir.from_proto(proto)
    if task is Embed and not vector_output(record, ModelConfig.read(artifact.path)):
        tokens = next((names[name] for name in TOKEN_OUTPUTS if name in names), None)
        if tokens is None:
            return None, ""
        try:
            pooling = read_pooling(artifact.path)
            append_pooling(model, pooling, tokens=tokens.name)
        except ArtifactError as error:
            # Readers then pool by the model's own settings.
            return None, f"{record.file}: vectors are pooled outside the graph: {error.message}"
        last = tokens.dims[-1]
        size = pooling.size(last) if isinstance(last, int) else last
        spec = TensorSpec(SENTENCE_OUTPUT, "float32", (tokens.dims[0], size))
        layers = "".join(f", {layer.kind}" for layer in pooling.layers)
        normalized = " and normalized" if pooling.normalize else ""
        note = f"the output {SENTENCE_OUTPUT}, pooled by {pooling.modes[0]}{layers}{normalized}"
    elif task is Classify and SCORES not in names and "logits" in names:
        logits = names["logits"]
        labels = logits.dims[-1] if logits.dims else None
        if len(logits.dims) != 2 or not isinstance(labels, int):
            return None, ""
        activation = choose_activation(ModelConfig.read(artifact.path), labels)
        if activation == "none":
            return None, ""
        append_scores(model, activation, logits="logits")
        spec = TensorSpec(SCORES, "float32", logits.dims)
        note = f"the output {SCORES}, the {activation} of the logits"
    else:
        return None, ""
    # Only the graph is written anew; its external data stay as they are.
    graph.write_bytes(ir.to_proto(model).SerializeToString())
    check_graph(graph)
    return spec, f"{record.file}: {note}, in FP32"

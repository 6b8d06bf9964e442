"""Code that loads a published artifact with enginery, Optimum and ONNX Runtime.

>>> snippets = loading_snippets(artifact, "minilm", provider="CPUExecutionProvider")
>>> snippets["enginery"].splitlines()[0]
'from enginery import load_model'

The tests run the snippets of every supported task.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath

from enginery.core.artifact.artifact import Artifact
from enginery.core.model.files import ModelConfig
from enginery.runtime.providers.known import short_name
from enginery.runtime.tasks import manifest_task
from enginery.runtime.tasks.embed import SENTENCE_OUTPUT, vector_output
from enginery.runtime.tasks.examples import example_texts
from enginery.runtime.tasks.task import input_modality
from enginery.runtime.tasks.two_towers import has_two_towers
from enginery.runtime.text.pooling import Vectors

CPU = "CPUExecutionProvider"
_TEXT = '"The engine is warm."'
_IMAGE = 'Image.new("RGB", (64, 64))'
_SAMPLES = {"image": _IMAGE, "audio": "(np.zeros(16_000, np.float32), 16_000)"}
_OPTIMUM_CLASSES = {
    "feature-extraction": "ORTModelForFeatureExtraction",
    "text-classification": "ORTModelForSequenceClassification",
    "token-classification": "ORTModelForTokenClassification",
    "question-answering": "ORTModelForQuestionAnswering",
    "fill-mask": "ORTModelForMaskedLM",
    "image-classification": "ORTModelForImageClassification",
    "text-generation": "ORTModelForCausalLM",
    "text2text-generation": "ORTModelForSeq2SeqLM",
}
_GENERATES = ("text-generation", "text2text-generation")


def loading_snippets(artifact: Artifact, name: str, *, provider: str = CPU) -> dict[str, str]:
    """Return Python code by library: `enginery`, `Optimum`, `onnxruntime`.

    A library that does not support the task, or needs files that the artifact lacks, is left out.

    Args:
        artifact: the artifact to load.
        name: name of the directory that it was pulled to.
        provider: ONNX Runtime's name of the execution provider.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(  # noqa: S701  # it is Python
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["py"] = python_text
    manifest, files = artifact.manifest, artifact.manifest.files
    graph, task = manifest.graphs[0], manifest_task(manifest)
    images = input_modality(spec.name for spec in graph.inputs) == "image"
    texts = [python_text(text) for text in example_texts(artifact)]
    # With a cache, Optimum's classes are shown by its own documentation.
    optimum_class = optimum_loader(artifact) if "-with-past" not in manifest.task else ""
    template = environment.get_template("snippets.jinja")
    facts = {
        "CPU": CPU,
        "name": name,
        "provider": provider,
        "short_provider": short_name(provider),
        "failed": artifact.failed_verdict(),
        "graph": graph,
        "folder": PurePosixPath(graph.file).parent.name,
        "file_name": PurePosixPath(graph.file).name,
        "task": task,
        "images": images,
        "image": _IMAGE,
        "texts": ", ".join(texts) or _TEXT,
        "example": f"({', '.join(texts)})"
        if len(texts) > 1
        else (texts or [_SAMPLES.get(task.modality if task else "", _IMAGE)])[0],
        "answers_vectors": task is not None and task.result_type is Vectors,
        "optimum_class": optimum_class,
        "generates": manifest.task in _GENERATES,
        "has_past": _has_past(artifact),
    }
    needed = {
        "enginery": task
        and ("tokenizer.json" if task.modality == "text" else "preprocessor_config.json"),
        "Optimum": optimum_class
        and ("preprocessor_config.json" if images else "tokenizer_config.json"),
    }
    ways = [way for way, file in needed.items() if file in files]
    return {way: template.render(way=way, **facts).strip() for way in (*ways, "onnxruntime")}


def optimum_loader(artifact: Artifact) -> str:
    """Return Optimum's class that opens the artifact; empty if none does.

    >>> optimum_loader(artifact)
    'ORTModelForFeatureExtraction'
    """
    manifest = artifact.manifest
    graph = manifest.graphs[0]
    outputs = {spec.name for spec in graph.outputs}
    task = manifest.task.removesuffix("-with-past")
    loader = _OPTIMUM_CLASSES.get(task, "")
    if manifest.task == "feature-extraction":
        inputs = [spec.name for spec in graph.inputs]
        if len(manifest.graphs) > 1 or has_two_towers(manifest):
            return ""
        if input_modality(inputs) == "image":
            return "ORTModelForCustomTasks"  # the other class feeds token ids
        # It reads token vectors alone: of CLIP's and DPR's encoders they are not the embedding.
        vector = vector_output(graph, ModelConfig.read(artifact.path))
        reads_all = vector in ("", SENTENCE_OUTPUT) and "last_hidden_state" in outputs
        return loader if reads_all else ""
    if task == "text2text-generation":
        # The encoder of the layout `enginery` makes the keys of the cross-attention as well.
        names = {PurePosixPath(record.file).name for record in manifest.graphs}
        return loader if "decoder_model.onnx" in names else ""
    return loader


def _has_past(artifact: Artifact) -> bool:
    """Return True if a graph takes keys and values of earlier tokens."""
    inputs = (spec for graph in artifact.manifest.graphs for spec in graph.inputs)
    return any(spec.name.startswith("past_key_values") for spec in inputs)


def python_text(text: str) -> str:
    """Return a text as a Python string in double quotes."""
    return json.dumps(text, ensure_ascii=False)

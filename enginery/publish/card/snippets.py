"""How to load what was published, as code that runs: with enginery, Optimum, and ONNX Runtime.

>>> snippets = loading_snippets(artifact, "minilm", provider="CPUExecutionProvider")
>>> print(snippets["enginery"])
from enginery import load_model
…

Each is run by the tests for each task that it is made for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from enginery.core.artifact import Artifact
from enginery.core.model_files import ModelConfig, mask_token
from enginery.core.shapes import TensorSpec
from enginery.runtime.pooling import Vectors
from enginery.runtime.provider_names import short_name
from enginery.runtime.tasks import manifest_task, takes_pixels

CPU = "CPUExecutionProvider"
_TEXT = '"The engine is warm."'
_IMAGE = 'Image.new("RGB", (64, 64))'
_CLASSES = {
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
_TOKENS = {
    "input_ids": "encoded.ids",
    "attention_mask": "encoded.attention_mask",
    "token_type_ids": "encoded.type_ids",
}


def loading_snippets(artifact: Artifact, name: str, *, provider: str = CPU) -> dict[str, str]:
    """Return Python code by how it loads: `enginery`, `Optimum`, `onnxruntime`.

    Args:
        artifact: what is loaded.
        name: of the directory that it was pulled to.
        provider: ONNX Runtime's name of the execution provider to run on.
    """
    makers = {
        "enginery": _with_enginery(artifact, name, provider),
        "Optimum": _with_optimum(artifact, name, provider),
        "onnxruntime": _with_onnxruntime(artifact, name, provider),
    }
    return {way: code for way, code in makers.items() if code}


def example_texts(artifact: Artifact) -> tuple[str, ...]:
    """Return the texts of one input of the artifact's task, with the tokenizer's own mask.

    Empty for images and for a task that is not answered.
    """
    task = manifest_task(artifact.manifest)
    texts = task.example if task else ()
    return tuple(
        text.replace("{mask}", mask_token(artifact.path)) if "{mask}" in text else text
        for text in texts
    )


def _with_enginery(artifact: Artifact, name: str, provider: str) -> str:
    """Return no code for a task that is not answered, or without what prepares inputs."""
    task = manifest_task(artifact.manifest)
    if task is None or _prepares(task.takes_images) not in artifact.manifest.files:
        return ""
    lines = ["from enginery import load_model"]
    if task.takes_images:
        lines.append("from PIL import Image")
    options = "" if provider == CPU else f", provider={_quoted(short_name(provider))}"
    if artifact.failed():
        options += ", allow_failed=True"
    texts = [_quoted(text) for text in example_texts(artifact)] or [_IMAGE]
    example = texts[0] if len(texts) == 1 else f"({', '.join(texts)})"
    shape = ".shape" if task.result_type is Vectors else ""
    return "\n".join(
        [
            *lines,
            "",
            f'with load_model("{name}"{options}) as model:',
            f"    print(model.{task.verb}([{example}]){shape})",
        ]
    )


def _with_optimum(artifact: Artifact, name: str, provider: str) -> str:
    """Return no code for a task without a class of Optimum's, or without what prepares inputs."""
    task = artifact.manifest.task
    takes_images = takes_pixels(spec.name for spec in artifact.manifest.graphs[0].inputs)
    kind = _CLASSES.get(task, "")
    if takes_images and task == "feature-extraction":
        kind = "ORTModelForCustomTasks"  # the other class feeds token ids
    prepares = "preprocessor_config.json" if takes_images else "tokenizer_config.json"
    if not kind or prepares not in artifact.manifest.files:
        return ""
    options = "" if provider == CPU else f", provider={_quoted(provider)}"
    if task in _GENERATES and not _has_past(artifact):
        options += ", use_cache=False"
    load = f'model = {kind}.from_pretrained("{name}"{options})'
    if takes_images:
        return "\n".join(
            [
                f"from optimum.onnxruntime import {kind}",
                "from PIL import Image",
                "from transformers import AutoImageProcessor",
                "",
                f'processor = AutoImageProcessor.from_pretrained("{name}")',
                load,
                f"image = {_IMAGE}",
                'print(model(**processor(image, return_tensors="pt")))',
            ]
        )
    text = ", ".join(map(_quoted, example_texts(artifact))) or _TEXT
    run = f'tokenizer({text}, return_tensors="pt")'
    answer = f"model(**{run})"
    if task in _GENERATES:
        answer = f"tokenizer.batch_decode(model.generate(**{run}, max_new_tokens=8))"
    return "\n".join(
        [
            f"from optimum.onnxruntime import {kind}",
            "from transformers import AutoTokenizer",
            "",
            f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
            load,
            f"print({answer})",
        ]
    )


def _with_onnxruntime(artifact: Artifact, name: str, provider: str) -> str:
    """Feeds a text or an image where that is all that the graph takes, else lists its inputs."""
    graph = artifact.manifest.graphs[0]
    opened = (
        f"session = onnxruntime.InferenceSession({_quoted(f'{name}/{graph.file}')}, "
        f"providers=[{_quoted(provider)}])"
    )
    inputs = {spec.name: spec for spec in graph.inputs}
    if inputs.keys() <= _TOKENS.keys() and "tokenizer.json" in artifact.manifest.files:
        return "\n".join(
            [
                "import numpy as np",
                "import onnxruntime",
                "from tokenizers import Tokenizer",
                "",
                f'encoded = Tokenizer.from_file("{name}/tokenizer.json").encode({_TEXT})',
                *_call(opened, inputs.values(), {n: f"[{_TOKENS[n]}]" for n in inputs}),
            ]
        )
    if list(inputs) == ["pixel_values"] and inputs["pixel_values"].dtype in ("float32", "float16"):
        shape = _image_shape(artifact, inputs["pixel_values"])
        return "\n".join(
            [
                "import numpy as np",
                "import onnxruntime",
                "",
                "# preprocessor_config.json says how an image becomes such an array.",
                f"pixels = np.zeros({shape})",
                *_call(opened, inputs.values(), {"pixel_values": "pixels"}),
            ]
        )
    return "\n".join(
        [
            "import onnxruntime",
            "",
            opened,
            "for tensor in session.get_inputs():",
            "    print(tensor.name, tensor.type, tensor.shape)",
        ]
    )


def _call(opened: str, specs: Iterable[TensorSpec], values: dict[str, str]) -> list[str]:
    feeds = [
        f"    {_quoted(spec.name)}: np.array({values[spec.name]}, dtype=np.{spec.dtype}),"
        for spec in specs
    ]
    return [opened, "feeds = {", *feeds, "}", "print(session.run(None, feeds))"]


def _image_shape(artifact: Artifact, spec: TensorSpec) -> tuple[int, ...]:
    """One image; sides that are free are those that the model was trained with."""
    config = ModelConfig.read(artifact.path)
    sides = config.image_size.sides(224) if config.image_size else (224, 224)
    free = (1, config.num_channels or 3, *sides)
    return tuple(
        dim if isinstance(dim, int) else free[min(place, 3)] for place, dim in enumerate(spec.dims)
    )


def _has_past(artifact: Artifact) -> bool:
    """Whether a graph takes keys and values of earlier tokens."""
    inputs = (spec for graph in artifact.manifest.graphs for spec in graph.inputs)
    return any(spec.name.startswith("past_key_values") for spec in inputs)


def _prepares(takes_images: bool) -> str:
    """Return the file without which inputs cannot be prepared."""
    return "preprocessor_config.json" if takes_images else "tokenizer.json"


def _quoted(text: str) -> str:
    """Return a text as a Python string in double quotes."""
    return json.dumps(text, ensure_ascii=False)

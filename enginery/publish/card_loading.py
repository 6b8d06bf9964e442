"""How to load what was published, as code that runs: with enginery, Optimum, and ONNX Runtime.

>>> snippets = loading_snippets(artifact, "minilm", provider="CPUExecutionProvider")
>>> print(snippets["enginery"])
from enginery import load_model
…

Each is run by the tests for each task that it is made for.
"""

from __future__ import annotations

from collections.abc import Iterable

from enginery.core.artifact import Artifact
from enginery.core.model_files import ModelConfig, SpecialTokensMap, TokenizerConfig
from enginery.core.shapes import TensorSpec
from enginery.runtime.provider_names import short_name

CPU = "CPUExecutionProvider"
_TEXT = '"The engine is warm."'
_CALLS = {
    "feature-extraction": f"model.embed([{_TEXT}]).shape",
    "text-classification": f"model.classify([{_TEXT}])",
    "token-classification": 'model.tag(["Ada Lovelace lived in London."])',
    "question-answering": 'model.answer([("Where did Ada live?", "Ada lived in London.")])',
    "fill-mask": 'model.fill(["The engine is {mask}."])',
    "image-classification": 'model.classify_images([Image.new("RGB", (64, 64))])',
}
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
    """Python by how it loads: `enginery`, `Optimum`, `onnxruntime`.

    Args:
        artifact: what is loaded.
        name: of the directory that it was pulled to.
        provider: ONNX Runtime's name of the execution provider to run on.
    """
    takes_pixels = any(s.name == "pixel_values" for s in artifact.manifest.graphs[0].inputs)
    makers = {
        "enginery": _with_enginery(artifact, name, provider, takes_pixels=takes_pixels),
        "Optimum": _with_optimum(artifact, name, provider, takes_pixels=takes_pixels),
        "onnxruntime": _with_onnxruntime(artifact, name, provider),
    }
    return {way: code for way, code in makers.items() if code}


def _with_enginery(artifact: Artifact, name: str, provider: str, *, takes_pixels: bool) -> str:
    """Empty for a task whose answers enginery does not make, or without what prepares inputs."""
    call = _CALLS.get(artifact.manifest.task, "")
    if takes_pixels and artifact.manifest.task == "feature-extraction":
        call = 'model.embed_images([Image.new("RGB", (64, 64))]).shape'
    prepares = "preprocessor_config.json" if takes_pixels else "tokenizer.json"
    if not call or prepares not in artifact.manifest.files:
        return ""
    lines = ["from enginery import load_model"]
    if takes_pixels:
        lines.append("from PIL import Image")
    wish = "" if provider == CPU else f', provider="{short_name(provider)}"'
    if artifact.failed():
        wish += ", allow_failed=True"
    call = call.replace("{mask}", _mask(artifact))
    return "\n".join(
        [*lines, "", f'with load_model("{name}"{wish}) as model:', f"    print({call})"]
    )


def _with_optimum(artifact: Artifact, name: str, provider: str, *, takes_pixels: bool) -> str:
    """Empty for a task that has no class of Optimum's, and for a text model without tokenizer."""
    task = artifact.manifest.task
    kind = _CLASSES.get(task, "")
    if takes_pixels and task == "feature-extraction":
        kind = "ORTModelForCustomTasks"  # the other class feeds token ids
    prepares = "preprocessor_config.json" if takes_pixels else "tokenizer_config.json"
    if not kind or prepares not in artifact.manifest.files:
        return ""
    wish = "" if provider == CPU else f', provider="{provider}"'
    if task in _GENERATES and not _has_past(artifact):
        wish += ", use_cache=False"
    load = f'model = {kind}.from_pretrained("{name}"{wish})'
    if takes_pixels:
        return "\n".join(
            [
                f"from optimum.onnxruntime import {kind}",
                "from PIL import Image",
                "from transformers import AutoImageProcessor",
                "",
                f'processor = AutoImageProcessor.from_pretrained("{name}")',
                load,
                'image = Image.new("RGB", (64, 64))',
                'print(model(**processor(image, return_tensors="pt")))',
            ]
        )
    text = f'"The engine is {_mask(artifact)}."' if task == "fill-mask" else _TEXT
    if task == "question-answering":
        text = '"Where did Ada live?", "Ada lived in London."'
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
        f'session = onnxruntime.InferenceSession("{name}/{graph.file}", providers=["{provider}"])'
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
        f'    "{spec.name}": np.array({values[spec.name]}, dtype=np.{spec.dtype}),'
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


def _mask(artifact: Artifact) -> str:
    """The tokenizer's own mask; it is plain text in one file and an object in another."""
    settings = TokenizerConfig.read(artifact.path)
    return settings.with_map(SpecialTokensMap.read(artifact.path)).mask_token or "[MASK]"

"""Choose the class of transformers that loads a model for a task.

For features, the Auto class has one class for each model type. It would leave out the projections
of CLIP's towers, take DPR's question encoder for each of DPR's models, and ask a T5 encoder for a
decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from enginery.core.model.files import ModelConfig, module_kinds

_AUTO_CLASSES: Mapping[str, tuple[str, ...]] = {
    "audio-classification": ("AutoModelForAudioClassification",),
    "audio-frame-classification": ("AutoModelForAudioFrameClassification",),
    "audio-xvector": ("AutoModelForAudioXVector",),
    "automatic-speech-recognition": ("AutoModelForSpeechSeq2Seq", "AutoModelForCTC"),
    "depth-estimation": ("AutoModelForDepthEstimation",),
    "feature-extraction": ("AutoModel",),
    "fill-mask": ("AutoModelForMaskedLM",),
    "image-classification": ("AutoModelForImageClassification",),
    "image-segmentation": (
        "AutoModelForImageSegmentation",
        "AutoModelForSemanticSegmentation",
        "AutoModelForInstanceSegmentation",
        "AutoModelForUniversalSegmentation",
    ),
    "image-to-image": ("AutoModelForImageToImage",),
    "image-to-text": ("AutoModelForVision2Seq", "AutoModel"),
    "image-text-to-text": ("AutoModelForImageTextToText",),
    "masked-im": ("AutoModelForMaskedImageModeling",),
    "multiple-choice": ("AutoModelForMultipleChoice",),
    "object-detection": ("AutoModelForObjectDetection",),
    "question-answering": ("AutoModelForQuestionAnswering",),
    "reinforcement-learning": ("AutoModel",),
    "semantic-segmentation": ("AutoModelForSemanticSegmentation",),
    "text-to-audio": ("AutoModelForTextToSpectrogram", "AutoModelForTextToWaveform"),
    "text-generation": ("AutoModelForCausalLM",),
    "text2text-generation": ("AutoModelForSeq2SeqLM",),
    "text-classification": ("AutoModelForSequenceClassification",),
    "token-classification": ("AutoModelForTokenClassification",),
    "visual-question-answering": ("AutoModelForVisualQuestionAnswering",),
    "zero-shot-image-classification": ("AutoModelForZeroShotImageClassification",),
    "zero-shot-object-detection": ("AutoModelForZeroShotObjectDetection",),
    # Last: a class that is in the mapping of another task, too, is first of all for that.
    "document-question-answering": ("AutoModelForDocumentQuestionAnswering",),
    "keypoint-detection": ("AutoModelForKeypointDetection",),
    "time-series-forecasting": ("AutoModelForTimeSeriesPrediction",),
}
"""Task -> Auto classes, of which the first that has the model type loads it."""
_SUCCESSORS = {"AutoModelForVision2Seq": "AutoModelForImageTextToText"}
"""Auto classes of transformers 4 that version 5 does not have -> what took their models."""
_OWN_CLASSES = {
    ("colpali", "feature-extraction"): "ColPaliForRetrieval",
    ("patchtsmixer", "time-series-forecasting"): "PatchTSMixerForPrediction",
    ("patchtst", "time-series-forecasting"): "PatchTSTForPrediction",
    ("pix2struct", "image-to-text"): "Pix2StructForConditionalGeneration",
    ("pix2struct", "visual-question-answering"): "Pix2StructForConditionalGeneration",
    ("visual_bert", "question-answering"): "VisualBertForQuestionAnswering",
    ("vision-encoder-decoder", "document-question-answering"): "VisionEncoderDecoderModel",
    ("vitpose", "keypoint-detection"): "VitPoseForPoseEstimation",
}
"""Model types and tasks whose class no Auto class has."""
_OF_CONFIG = ("automatic-speech-recognition", "reinforcement-learning")
"""Tasks for which a model type has several classes: config.json names the one."""
_T5_ENCODERS = {"t5": "T5EncoderModel", "mt5": "MT5EncoderModel"}
"""Model types of which sentence-transformers loads the encoder alone; source: its
`models/Transformer.py`."""


def class_for_task(task: str, config: Any) -> Any:
    """Return the class, or the Auto class, that loads a model for a task.

    Args:
        task: the task, by its name in `export.tasks`; a cache does not change the class.
        config: the model's config, as transformers reads it.

    Raises:
        ValueError: transformers has no class for the task and the model type.
    """
    base = task.removesuffix("-with-past")
    named = (config.architectures or [""])[0] if task in _OF_CONFIG else ""
    if name := _OWN_CLASSES.get((config.model_type, base)) or named:
        if not hasattr(transformers, name):
            raise ValueError(f"transformers has no class {name}")
        return getattr(transformers, name)
    classes = auto_classes(base)
    if not classes:
        raise ValueError(f"transformers has no Auto class for {base}")
    fitting = [auto for auto in classes if config.model_type in class_names(auto)]
    if len(classes) > 1 and not fitting:
        names = ", ".join(auto.__name__ for auto in classes)
        raise ValueError(f"{names} have no model type {config.model_type}")
    return (fitting or classes)[0]


def auto_classes(task: str) -> list[Any]:
    """Return the Auto classes of a task that the installed transformers has."""
    names = (
        name if hasattr(transformers, name) else _SUCCESSORS.get(name, name)
        for name in _AUTO_CLASSES.get(task, ())
    )
    return [getattr(transformers, name) for name in names if hasattr(transformers, name)]


def class_names(auto_class: Any) -> Mapping[str, str | tuple[str, ...]]:
    """Return the names of an Auto class's classes by model type; several of some types."""
    names: Mapping[str, str | tuple[str, ...]] = auto_class._model_mapping._model_mapping  # noqa: SLF001  no accessor
    return names


def tasks_of_class(name: str) -> list[str]:
    """Return the tasks that transformers lists for a class, those of text before others.

    BART's class for conditional generation fills masks as well, but it is there to generate.
    """
    tasks = [
        task
        for task in _AUTO_CLASSES
        if any(
            name in (names if isinstance(names, tuple) else (names,))
            for auto in auto_classes(task)
            for names in class_names(auto).values()
        )
    ]
    return sorted(tasks, key=lambda task: task != "text2text-generation")


def tasks_of_type(model_type: str) -> list[str]:
    """Return the tasks for which transformers has a class of a model type."""
    return [
        task
        for task in _AUTO_CLASSES
        if any(model_type in class_names(auto) for auto in auto_classes(task))
    ]


def feature_class(path: Path, config: Any) -> Any | None:
    """Return the encoder's class that config.json names; None for the Auto class.

    Another class, such as BertForMaskedLM, has a head for a task: the Auto class loads what is
    below it. Of sentence-transformers' T5 models it is the encoder, whatever config.json names.

    Args:
        path: the model's directory.
        config: its config, as transformers reads it.
    """
    names = tuple(config.architectures or ())[:1]
    if config.model_type in _T5_ENCODERS and "Transformer" in module_kinds(path):
        names = (_T5_ENCODERS[config.model_type],)
    if not ModelConfig(architectures=names).names_encoder:
        return None
    named: Any = getattr(transformers, names[0], None)
    # A model's own code is not one of transformers' classes.
    is_class = isinstance(named, type) and issubclass(named, PreTrainedModel)
    settings: Any = getattr(named, "config_class", None)
    if not is_class or not isinstance(config, settings) or named is default_class(config):
        return None
    return named


def default_class(config: Any) -> Any | None:
    """Return the class that the Auto class loads; None for a type that it does not know."""
    return getattr(transformers, str(MODEL_MAPPING_NAMES.get(config.model_type)), None)

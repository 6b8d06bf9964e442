"""Names of tasks, known without importing Optimum, which takes seconds."""

from __future__ import annotations

from collections.abc import Collection

from enginery.core.errors import OptionError, nearest
from enginery.core.model.files import ModelConfig

TASKS = (
    "audio-classification",
    "audio-frame-classification",
    "audio-xvector",
    "automatic-speech-recognition",
    "depth-estimation",
    "document-question-answering",
    "feature-extraction",
    "fill-mask",
    "image-classification",
    "image-segmentation",
    "image-text-to-text",
    "image-to-image",
    "image-to-text",
    "inpainting",
    "keypoint-detection",
    "masked-im",
    "multiple-choice",
    "object-detection",
    "question-answering",
    "reinforcement-learning",
    "semantic-segmentation",
    "text-classification",
    "text-generation",
    "text-to-audio",
    "text-to-image",
    "text2text-generation",
    "time-series-forecasting",
    "token-classification",
    "visual-question-answering",
    "zero-shot-image-classification",
    "zero-shot-object-detection",
)
"""Tasks of Optimum 2.1, each also with `-with-past`. Importing its TasksManager to ask takes
seconds; `tests/export/test_tasks.py` holds the two together."""
SYNONYMS = {
    # of transformers' pipelines
    "ner": "token-classification",
    "sentiment-analysis": "text-classification",
    "text-to-speech": "text-to-audio",
    "vqa": "visual-question-answering",
    # of Optimum
    "audio-ctc": "automatic-speech-recognition",
    "causal-lm": "text-generation",
    "default": "feature-extraction",
    "image-feature-extraction": "feature-extraction",
    "latent-consistency": "text-to-image",
    "mask-generation": "feature-extraction",
    "masked-lm": "fill-mask",
    "pretraining": "feature-extraction",
    "sentence-similarity": "feature-extraction",
    "seq2seq-lm": "text2text-generation",
    "sequence-classification": "text-classification",
    "speech2seq-lm": "automatic-speech-recognition",
    "stable-diffusion": "text-to-image",
    "stable-diffusion-xl": "text-to-image",
    "summarization": "text2text-generation",
    "translation": "text2text-generation",
    "vision2seq-lm": "image-to-text",
    "zero-shot-classification": "text-classification",
}
"""Other names of tasks -> Optimum's names."""
_ENCODERS = frozenset(
    {
        "albert",
        "bert",
        "camembert",
        "convnext",
        "deberta",
        "deberta-v2",
        "deit",
        "distilbert",
        "electra",
        "modernbert",
        "mpnet",
        "resnet",
        "roberta",
        "swin",
        "vit",
        "xlm-roberta",
    }
)
"""Model types for which Optimum infers the task from the class alone. For a decoder, it prefers a
task with a KV cache."""
_TASK_OF_CLASS = {
    "ForImageClassification": "image-classification",
    "ForMaskedLM": "fill-mask",
    "ForMultipleChoice": "multiple-choice",
    "ForQuestionAnswering": "question-answering",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "Model": "feature-extraction",
}
"""End of a class's name -> the task that Optimum infers."""
_TASK_OF_HEAD = {
    end: task
    for end, task in _TASK_OF_CLASS.items()
    if task not in ("feature-extraction", "fill-mask")  # which need no head, or one of its own name
}
_PARTS = ("TextModel", "VisionModel")
_TASK_OF_MODULE = {
    "Pooling": "feature-extraction",
    "LogitScore": "text-classification",
    "SpladePooling": "fill-mask",
}


def task_name(task: str) -> str:
    """Return Optimum's name of a task; `auto` and none stay.

    >>> task_name("sentiment-analysis"), task_name("causal-lm-with-past")
    ('text-classification', 'text-generation-with-past')

    Raises:
        OptionError: Optimum does not know the task.
    """
    base, past, _ = task.partition("-with-past")
    if task not in ("", "auto") and base not in (*TASKS, *SYNONYMS):
        raise OptionError(
            f"option 'task': unknown task '{task}'{nearest(task, (*TASKS, *SYNONYMS))}",
            do=f"Known: {', '.join(TASKS)}; or auto.",
            option="task",
        )
    return SYNONYMS.get(base, base) + past


def require_trained_task(config: ModelConfig, task: str) -> None:
    """Raise OptionError if the model's class has a head that was trained for another task.

    Heads of several classes have one name, so that the weights of a BertForSequenceClassification
    load into a BertForTokenClassification, and label tokens with what they know of texts.
    """
    trained = {
        name: other
        for name in config.architectures
        for end, other in _TASK_OF_HEAD.items()
        if name.endswith(end)
    }
    if trained and task in _TASK_OF_HEAD.values() and task not in trained.values():
        name, other = next(iter(trained.items()))
        raise OptionError(
            f"option 'task' is {task}, but the model is a {name}, trained for {other}.",
            do="Leave out --task; or correct `architectures` in config.json if it names the wrong "
            "class.",
            option="task",
        )


def inferred_task(config: ModelConfig, modules: Collection[str] = ()) -> str:
    """Return the task that `auto` stands for if the model's files tell it, and else `auto`.

    Args:
        config: config.json.
        modules: the kinds of its sentence-transformers modules. One that pools makes embeddings of
            a decoder, and LogitScore a reranker.
    """
    if task := next((_TASK_OF_MODULE[kind] for kind in modules if kind in _TASK_OF_MODULE), ""):
        return task
    # Decoders of images and texts have a TextModel, too, but their type does not end like it.
    is_part = config.model_type.endswith(("_text_model", "_vision_model"))
    if config.names_encoder and (is_part or not config.architectures[0].endswith(_PARTS)):
        return "feature-extraction"
    name = config.architectures[0] if config.architectures else ""
    if config.model_type not in _ENCODERS or "LMHead" in name:
        return "auto"
    return next((task for end, task in _TASK_OF_CLASS.items() if name.endswith(end)), "auto")

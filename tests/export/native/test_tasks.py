"""Tasks without Optimum: classes, and the outputs of graphs."""

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from enginery.core.errors import ExportError
from enginery.core.model.files import ModelConfig
from enginery.export.native.tasks import choose_outputs, choose_task
from enginery.export.tasks import TASKS
from enginery.runtime.pytorch.classes import class_for_task, tasks_of_class
from tests.environments import needs_optimum

_OTHERS = ("inpainting", "text-to-image")
"""Tasks of diffusers, which transformers has no class for."""


def config_of(model_type, *architectures):
    config = transformers.PretrainedConfig(architectures=list(architectures))
    config.model_type = model_type
    return config


@needs_optimum
@pytest.mark.parametrize("task", sorted(set(TASKS) - set(_OTHERS)))
def test_classes_are_those_that_optimum_loads(task):
    from optimum.exporters.tasks import TasksManager

    for model_type in CONFIG_MAPPING_NAMES:
        try:
            expected = TasksManager.get_model_class_for_task(task, model_type=model_type)
        except (KeyError, ValueError):  # Optimum has none
            continue
        assert class_for_task(task, config_of(model_type)) is expected, model_type


@needs_optimum
def test_tasks_of_classes_are_those_that_optimum_knows():
    from optimum.exporters.tasks import TasksManager

    mappings = TasksManager._TRANSFORMERS_TASKS_TO_MODEL_MAPPINGS
    known = 0
    for task, classes in mappings.items():
        for names in classes.values():
            for name in names if isinstance(names, tuple) else (names,):
                tasks = tasks_of_class(name)
                assert task in (*tasks, "mask-generation"), name
                known += 1
    assert known > 1000


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("BertForSequenceClassification", "text-classification"),
        ("BartForConditionalGeneration", "text2text-generation"),
        ("GPT2LMHeadModel", "text-generation"),
        ("DetrForObjectDetection", "object-detection"),
        ("Wav2Vec2ForCTC", "automatic-speech-recognition"),
        ("ViTModel", "feature-extraction"),
    ],
)
def test_auto_is_the_task_of_the_class(name, task):
    assert choose_task("auto", ModelConfig(model_type="any", architectures=(name,))) == task


def test_class_without_a_task_is_an_error():
    settings = ModelConfig(model_type="bert", architectures=("BertForPreTrainingOfMine",))
    with pytest.raises(ExportError, match="which transformers does not have"):
        choose_task("auto", settings)


def test_speech_is_loaded_with_the_class_of_its_config():
    task = "automatic-speech-recognition"
    assert class_for_task(task, config_of("whisper", "WhisperForConditionalGeneration")) is (
        transformers.WhisperForConditionalGeneration
    )
    assert class_for_task(task, config_of("wav2vec2")) is transformers.AutoModelForCTC


def test_type_that_no_class_of_a_task_has_is_an_error():
    with pytest.raises(ValueError, match="have no model type bert"):
        class_for_task("image-segmentation", config_of("bert"))


@pytest.mark.parametrize(
    ("task", "results", "outputs"),
    [
        ("text-classification", ["loss", "logits"], ["logits"]),
        ("feature-extraction", ["last_hidden_state", "pooler_output"], ["last_hidden_state"]),
        ("feature-extraction", ["pooler_output"], ["pooler_output"]),
        (
            "feature-extraction",
            ["logits_per_text", "text_embeds"],
            ["logits_per_text", "text_embeds"],
        ),
        ("question-answering", ["end_logits", "start_logits"], ["start_logits", "end_logits"]),
        (
            "object-detection",
            ["logits", "pred_boxes", "last_hidden_state"],
            ["logits", "pred_boxes"],
        ),
    ],
)
def test_outputs_are_those_of_the_task(task, results, outputs):
    tensors = {name: torch.zeros(1) for name in results}
    assert choose_outputs(torch.nn.Identity(), task, tensors) == outputs


def test_every_output_of_an_encoder_is_a_feature():
    class CLIPTextModelWithProjection(torch.nn.Identity):
        pass

    tensors = {"text_embeds": torch.zeros(1), "last_hidden_state": torch.zeros(1), "hidden": ()}
    names = choose_outputs(CLIPTextModelWithProjection(), "feature-extraction", tensors)
    assert names == ["text_embeds", "last_hidden_state"]

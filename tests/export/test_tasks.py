"""Names of tasks, and the task that `auto` stands for."""

import pytest

from enginery import export_model
from enginery.core.errors import OptionError
from enginery.core.model.files import ModelConfig
from enginery.export.tasks import SYNONYMS, TASKS, inferred_task, task_name


def test_tasks_and_synonyms_are_those_of_optimum_and_transformers():
    from optimum.exporters.tasks import TasksManager
    from transformers.pipelines import TASK_ALIASES

    known = {task.removesuffix("-with-past") for task in TasksManager.get_all_tasks()}
    theirs = {
        name: task
        for name, task in (TASK_ALIASES | TasksManager._SYNONYM_TASK_MAP).items()
        if not name.endswith("-with-past")
    }
    assert theirs == SYNONYMS
    assert set(TASKS) == known - set(SYNONYMS)


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("auto", "auto"),
        ("fill-mask", "fill-mask"),
        ("text-generation-with-past", "text-generation-with-past"),
        ("sentiment-analysis", "text-classification"),
        ("ner", "token-classification"),
        ("seq2seq-lm-with-past", "text2text-generation-with-past"),
    ],
)
def test_task_by_any_of_its_names(task, name):
    assert task_name(task) == name


def test_an_unknown_task_names_the_nearest():
    with pytest.raises(OptionError, match="unknown task 'fill-masks'; did you mean 'fill-mask'"):
        task_name("fill-masks")


def test_synonyms_make_the_same_artifact(exported, tiny_model):
    made = exported("bert", "text-classification")
    again = export_model(str(tiny_model("bert", "text-classification")), task="sentiment-analysis")
    assert again.path == made.path


def test_wrong_task_is_found_before_the_model():
    with pytest.raises(OptionError, match="unknown task 'text-classifier'"):
        export_model("no/such-model", task="text-classifier")


@pytest.mark.parametrize(
    ("trained", "task"),
    [
        ("text-classification", "token-classification"),
        ("token-classification", "text-classification"),
        ("question-answering", "token-classification"),
    ],
)
def test_head_of_another_task_is_an_error(tiny_model, trained, task):
    with pytest.raises(OptionError, match=f"is {task}, but the model is a .* for {trained}"):
        export_model(str(tiny_model("bert", trained)), task=task)


def test_model_may_be_exported_without_its_head(tiny_model):
    source = str(tiny_model("bert", "text-classification"))
    assert export_model(source, task="feature-extraction").manifest.task == "feature-extraction"


def test_inferred_tasks_are_those_that_optimum_infers():
    import transformers
    from optimum.exporters.tasks import TasksManager
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from enginery.export.optimum import _supported_task, choose_task

    checked = 0
    for name in dir(transformers):
        for model_type in ("albert", "bert", "deberta-v2", "modernbert", "resnet", "swin", "vit"):
            stem = CONFIG_MAPPING[model_type].__name__.removesuffix("Config")
            settings = ModelConfig(model_type=model_type, architectures=(name,))
            task = inferred_task(settings)
            if not name.startswith(stem) or task == "auto":
                continue
            supported = TasksManager.get_supported_tasks_for_model_type(model_type, "onnx")
            if task in supported and name.removeprefix(stem).startswith(("For", "Model")):
                found = _supported_task(model_type, choose_task("auto", settings), requested="auto")
                assert task == found, name
                checked += 1
    assert checked > 15


@pytest.mark.parametrize("name", ["BertLMHeadModel", "BertForPreTraining", "Unknown", ""])
def test_class_that_does_not_tell_its_task(name):
    settings = ModelConfig(model_type="bert", architectures=(name,) if name else ())
    assert inferred_task(settings) == "auto"
    decoder = ModelConfig(model_type="qwen3", architectures=("Qwen3Model",))
    assert inferred_task(decoder) == "auto"


def test_modules_of_sentence_transformers_tell_the_task():
    decoder = ModelConfig(model_type="qwen3", architectures=("Qwen3ForCausalLM",))
    assert inferred_task(decoder, ["Transformer", "Pooling"]) == "feature-extraction"
    assert inferred_task(decoder, ["Transformer", "LogitScore"]) == "text-classification"
    assert inferred_task(decoder, ["Transformer"]) == "auto"


def test_auto_is_the_same_artifact_as_its_task(tiny_model, tmp_path):
    model = str(tiny_model("bert", "text-classification"))
    made = export_model(model, task="text-classification")
    assert export_model(model).path == made.path
    copy = export_model(model, task="auto", out=tmp_path / "copy")
    assert copy.manifest.files == made.manifest.files
    assert copy.manifest.stages == made.manifest.stages

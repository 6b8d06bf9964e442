import pytest

from enginery.core.errors import OptionError
from enginery.export.config import SYNONYMS, TASKS, ExportConfig, check_options, task_name


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
    from enginery import export_model

    made = exported("bert", "text-classification")
    again = export_model(str(tiny_model("bert", "text-classification")), task="sentiment-analysis")
    assert again.path == made.path


def test_wrong_task_is_found_before_the_model():
    from enginery import export_model

    with pytest.raises(OptionError, match="unknown task 'text-classifier'"):
        export_model("no/such-model", task="text-classifier")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"opset": 6}, "option 'opset' is 6, expected 7 to 23"),
        ({"opset": 24}, "option 'opset' is 24, expected 7 to 23"),
        ({"device": "gpu"}, "option 'device' is 'gpu', expected cpu, cuda or cuda:N"),
        ({"dtype": "bf16"}, "ONNX Runtime has no BF16 kernels on the CPU"),
    ],
)
def test_values_that_no_model_can_be_exported_with_are_refused(options, words):
    with pytest.raises(OptionError, match=words):
        check_options(ExportConfig(**options))
    check_options(ExportConfig(opset=23, device="cuda:1"))
    check_options(ExportConfig(dtype="bf16", exporter="dynamo"))

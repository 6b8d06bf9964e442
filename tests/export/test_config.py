import pytest

from enginery.core.errors import OptionError
from enginery.export.config import TASKS, ExportConfig, check_options, check_task


def test_the_tasks_are_optimums_own():
    from optimum.exporters.tasks import TasksManager

    known = {*TasksManager.get_all_tasks(), *TasksManager._SYNONYM_TASK_MAP}
    assert set(TASKS) == {task.removesuffix("-with-past") for task in known}


@pytest.mark.parametrize("task", ["", "auto", "fill-mask", "text-generation-with-past"])
def test_a_task_that_optimum_knows_is_fine(task):
    check_task(task)


def test_an_unknown_task_names_the_nearest():
    with pytest.raises(OptionError, match="unknown task 'fill-masks'; did you mean 'fill-mask'"):
        check_task("fill-masks")


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

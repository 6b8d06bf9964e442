import pytest

from enginery.core.errors import OptionError
from enginery.export.config import ExportConfig, check_options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"opset": 6}, "option 'opset' is 6, expected 7 to 23"),
        ({"opset": 24}, "option 'opset' is 24, expected 7 to 23"),
        ({"dims": ("x=batch,3",)}, "option 'dims' is given, but only the dims of an .onnx file"),
        ({"mean": "0.5"}, "option 'mean' is given, but other models than .onnx files come with"),
        ({"device": "gpu"}, "option 'device' is 'gpu', expected cpu, cuda or cuda:N"),
        ({"dtype": "bf16", "exporter": "optimum"}, "ONNX Runtime has no BF16 kernels on the CPU"),
    ],
)
def test_values_that_no_model_can_be_exported_with_are_refused(options, words):
    with pytest.raises(OptionError, match=words):
        check_options(ExportConfig(**options))
    check_options(ExportConfig(opset=23, device="cuda:1"))
    check_options(ExportConfig(dtype="bf16", exporter="dynamo"))

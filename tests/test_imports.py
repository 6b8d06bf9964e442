"""What the quick commands do not import."""

import os
import subprocess
import sys
from graphlib import TopologicalSorter

import grimp
import pytest

HEAVY = (
    "torch",
    "transformers",
    "optimum",
    "onnxruntime",
    "onnx",
    "numpy",
    "pydantic",
    "pyarrow",
    "PIL",
    "tokenizers",
    "huggingface_hub",
)


def run(code):
    words = [sys.executable, "-c", code]
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.mark.more
@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--version"],
        ["export", "--help"],
        ["validate", "--help"],
        ["run", "--help"],
        ["export", "model", "--opsets"],
    ],
    ids=" ".join,
)
def test_help_and_usage_errors_import_nothing_heavy(words):
    found = run(
        "import sys\n"
        "from enginery.cli import main\n"
        "try:\n"
        f"    main({words})\n"
        "except SystemExit:\n"
        "    pass\n"
        f"print('heavy:', *sorted(set({HEAVY}) & set(sys.modules)))\n"
    )
    assert found.splitlines()[-1].split() == ["heavy:"]


def test_onnxruntime_writes_no_identifier_for_telemetry(tmp_path):
    # It writes none in continuous integration, which it tells by variables of this kind.
    kept = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    code = (
        "import enginery, onnxruntime, onnx.parser\n"
        "model = onnx.parser.parse_model('<ir_version: 10, opset_import: [\"\": 20]>'"
        "' g (float[1] x) => (float[1] y) { y = Neg (x) }')\n"
        "onnxruntime.InferenceSession(model.SerializeToString())\n"
    )
    environment["HOME"] = str(tmp_path)
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)
    assert not [*tmp_path.rglob("*onnxruntime*")]


def test_telemetry_that_the_user_wants_stays():
    code = "import os, enginery; print(os.environ['ORT_DISABLE_TELEMETRY'])"
    assert run(code) == "1\n"
    assert run(f"import os; os.environ['ORT_DISABLE_TELEMETRY'] = '0'; {code}") == "0\n"


def test_command_line_module_imports_no_rich():
    assert run("import sys, enginery.cli; print('rich' in sys.modules)") == "False\n"


def test_store_and_inspect_load_no_framework(exported):
    artifact = exported("bert", "text-classification")
    found = run(
        "import sys\n"
        "from enginery.cli import main\n"
        f"for words in (['store', 'list'], ['inspect', {str(artifact.path)!r}]):\n"
        "    try:\n"
        "        main(words)\n"
        "    except SystemExit as ended:\n"
        "        assert ended.code == 0\n"
        "print('heavy:', *sorted({'torch', 'transformers', 'optimum', 'onnxruntime'}"
        " & set(sys.modules)))\n"
    )
    assert found.splitlines()[-1].split() == ["heavy:"]


@pytest.mark.more
def test_second_run_loads_no_framework(exported, tiny_model):
    from enginery import validate_model

    validate_model(exported("bert", "text-classification"))
    model = str(tiny_model("bert", "text-classification"))
    found = run(
        "import sys\n"
        "from enginery.cli import main\n"
        "try:\n"
        f"    main(['run', '--model', {model!r}, '--task', 'text-classification'])\n"
        "except SystemExit as ended:\n"
        "    assert ended.code == 0\n"
        "print('heavy:', *sorted({'torch', 'transformers', 'optimum', 'onnx'}"
        " & set(sys.modules)))\n"
    )
    assert "passed earlier" in found
    assert found.splitlines()[-1].split() == ["heavy:"]


BESIDE_TORCH = """
import sys
import numpy as np
from enginery.core.artifact.artifact import Artifact
from enginery.runtime.onnxruntime.runner import OrtRunner

def outputs(runner, tensors):
    on_device = runner.run_on_device(tensors)
    return [*runner(feeds).values(), *(value.numpy().copy() for value in on_device.values())]

with OrtRunner(Artifact.open({path!r})) as runner:
    feeds = {{spec.name: np.ones((2, 6), np.int64) for spec in runner.record.inputs}}
    alone = outputs(runner, feeds)
    print("torch:", "torch" in sys.modules)
    import torch
    tensors = {{name: torch.from_numpy(array) for name, array in feeds.items()}}
    product = torch.ones(64, 64) @ torch.ones(64, 64)
    for one, other in zip(alone, outputs(runner, tensors), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    print("product:", float(product.sum()))
"""


@pytest.mark.more
def test_session_imports_no_torch_and_runs_beside_it(exported):
    path = str(exported("bert", "feature-extraction").path)
    found = run(BESIDE_TORCH.format(path=path))
    assert found.splitlines() == ["torch: False", f"product: {64.0**3}"]


def test_no_modules_of_serve_import_each_other_in_a_circle():
    graph = grimp.build_graph("enginery", exclude_type_checking_imports=False, cache_dir=None)
    modules = {name for name in graph.modules if name.startswith("enginery.serve")}
    imports = {name: graph.find_modules_directly_imported_by(name) & modules for name in modules}
    TopologicalSorter(imports).prepare()  # raises CycleError
    assert len(modules) > 30

"""What the quick commands do not import."""

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


def test_no_modules_of_serve_import_each_other_in_a_circle():
    graph = grimp.build_graph("enginery", exclude_type_checking_imports=False, cache_dir=None)
    modules = {name for name in graph.modules if name.startswith("enginery.serve")}
    imports = {name: graph.find_modules_directly_imported_by(name) & modules for name in modules}
    TopologicalSorter(imports).prepare()  # raises CycleError
    assert len(modules) > 30

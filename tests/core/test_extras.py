"""Which extra installs a missing package, and which errors of imports are about one."""

import ast
import sys
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

import enginery
from enginery.cli import main
from enginery.core import extras
from enginery.core.errors import ExportError, MissingPackageError
from enginery.core.extras import (
    missing_packages,
    missing_packages_as_errors,
    own_requirements,
    require_packages,
)
from enginery.core.subprocess import WorkerProcess, run_in_subprocess

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def checkout(monkeypatch):
    """Read the requirements of this checkout, whatever is installed."""
    version = extras.installed_version
    monkeypatch.setattr(
        extras, "installed_version", lambda name: "" if name == "enginery" else version(name)
    )


def run_as(module, code):
    """Run code as if it were in a module of that name."""
    with missing_packages_as_errors("Testing"):
        exec(code, {"__name__": module})


@pytest.mark.parametrize(
    ("modules", "extra", "command"),
    [
        (["onnx"], "", "pip install 'enginery[generate]'"),
        (["onnx"], "export", "pip install 'enginery[export]'"),
        (["onnx", "onnx_ir"], "", "pip install 'enginery[export]'"),
        (["onnx", "onnx_ir.passes"], "generate", "pip install 'enginery[export]'"),
        (["orjson"], "", "pip install 'enginery[data]'"),
        (["orjson"], "serve", "pip install 'enginery[serve]'"),
        (["pyarrow", "orjson"], "", "pip install 'enginery[data]'"),
        (["torch", "pyarrow"], "", "pip install 'enginery[export]'"),
        (["mlflow"], "", "pip install 'enginery[mlflow]'"),
        (["soundfile", "oras", "matplotlib"], "", "pip install 'enginery[audio,oci,report]'"),
        (["opentelemetry.sdk.trace"], "", "pip install 'enginery[otel]'"),
        (["optimum.exporters.onnx"], "", "pip install 'enginery[export]'"),
        (
            ["onnxruntime"],
            "serve",
            "pip install 'enginery[gpu]', or 'enginery[cpu]' on a machine without NVIDIA GPU.",
        ),
        (
            ["onnxruntime", "torch"],
            "",
            "pip install 'enginery[gpu,export]', or 'enginery[cpu,export]' on a machine without "
            "NVIDIA GPU.",
        ),
        (["yaml"], "", "pip install 'enginery'"),
        (["yaml", "onnx"], "", "pip install 'enginery[generate]'"),
        (["accelerate", "onnx"], "", "pip install accelerate onnx"),
    ],
)
def test_command_installs_all_missing_packages_with_the_fewest_extras(modules, extra, command):
    error = missing_packages("Testing", modules, extra=extra)
    assert error.do.partition(" with: ")[2] == command


def test_message_names_packages_as_pip_does():
    assert str(missing_packages("Drawing", ["matplotlib.figure"])) == (
        "Drawing needs the package 'matplotlib', which is not installed. "
        "Install it with: pip install 'enginery[report]'"
    )
    error = missing_packages("Reading", ["onnx_ir", "PIL", "onnx_ir.passes", "yaml"])
    assert error.message == (
        "Reading needs the packages 'onnx-ir', 'pillow' and 'pyyaml', which are not installed."
    )


def test_modules_of_a_later_check_are_named_beside_others_only(monkeypatch):
    monkeypatch.setitem(sys.modules, "soxr", None)
    require_packages("Testing", "numpy", later=["soxr"])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackageError, match=r"'matplotlib' and 'soxr'.*\[audio,report\]"):
        require_packages("Testing", "numpy", "matplotlib", later=["soxr", "numpy"])


def test_folder_that_was_left_of_a_package_is_not_the_package(monkeypatch, tmp_path):
    (tmp_path / "soxr_left").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not extras.is_installed("soxr_left")
    assert extras.is_installed("optimum")  # which has no __init__.py either


@pytest.mark.parametrize("module", ["enginery.runtime.audio", "optimum.exporters", "onnx_ir"])
def test_missing_package_of_an_extra_is_an_error_with_the_extra(monkeypatch, module):
    monkeypatch.setitem(sys.modules, "soxr", None)
    with pytest.raises(MissingPackageError, match=r"Testing needs.*'soxr'.*enginery\[audio\]"):
        run_as(module, "import soxr")


@pytest.mark.parametrize("module", ["__main__", "transformers_modules.org.name", "company.audio"])
def test_missing_package_of_other_code_stays_what_it_is(monkeypatch, module):
    monkeypatch.setitem(sys.modules, "soxr", None)
    with pytest.raises(ModuleNotFoundError, match="soxr"):
        run_as(module, "import soxr")


def test_import_that_importlib_makes_for_other_code_stays_what_it_is(monkeypatch):
    monkeypatch.setitem(sys.modules, "soxr", None)
    code = "from importlib import import_module; import_module('soxr')"
    with pytest.raises(ModuleNotFoundError, match="soxr"):
        run_as("company.audio", code)
    with pytest.raises(MissingPackageError, match="soxr"):
        run_as("enginery.runtime", code)


@pytest.mark.parametrize("code", ["import no_such_module", "from enginery import no_such_name"])
def test_import_of_what_no_extra_has_stays_what_it_is(code):
    with pytest.raises(ImportError, match="no_such"):
        run_as("enginery.runtime", code)


def test_name_that_another_version_of_a_package_lacks_is_an_error_with_the_version(monkeypatch):
    code = "from soxr import no_such_name"
    with pytest.raises(ImportError, match="no_such_name"):
        run_as("enginery.runtime", code)
    version = extras.installed_version
    monkeypatch.setattr(
        extras, "installed_version", lambda name: "0.1" if name == "soxr" else version(name)
    )
    with pytest.raises(MissingPackageError) as caught:
        run_as("enginery.runtime", code)
    assert str(caught.value) == (
        "Testing needs soxr>=0.5, found 0.1. Install it with: pip install 'enginery[audio]'"
    )


def test_command_line_shows_a_missing_module_of_its_own_as_a_traceback(monkeypatch):
    monkeypatch.setitem(sys.modules, "enginery.core.store.store", None)
    with pytest.raises(ModuleNotFoundError, match=r"enginery\.core\.store"):
        main(["store", "list"])


WORKER = """
import sys
from enginery.core.subprocess import serve_requests, worker_main

def handle(request):
    sys.modules["soxr"] = None
    exec("import soxr", {"__name__": request["module"]})

if __name__ == "__main__":
    if sys.argv[1:]:
        worker_main(handle, description="exporting")
    serve_requests(handle)
"""


@pytest.mark.parametrize(
    ("module", "error", "words"),
    [
        ("enginery.export.worker", MissingPackageError, r"'soxr'.*enginery\[audio\]"),
        ("transformers_modules.name", ExportError, "failed in ModuleNotFoundError: .*soxr"),
    ],
)
def test_child_process_gives_the_same_sentence(monkeypatch, tmp_path, module, error, words):
    (tmp_path / "worker_without_soxr.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    about = {"log": tmp_path / "log", "description": "exporting"}
    with pytest.raises(error, match=words):
        run_in_subprocess(
            "worker_without_soxr", {"module": module}, **about, error_classes=[ExportError]
        )
    with (
        WorkerProcess("worker_without_soxr", **about, error=ExportError) as worker,
        pytest.raises(error, match=words),
    ):
        worker.request("handle", module=module)


def imported_modules():
    """The modules of other packages that enginery imports, anywhere."""
    names = set()
    for path in Path(enginery.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
            elif isinstance(node, ast.Import):
                names |= {each.name for each in node.names}
    return {name for name in names if name.partition(".")[0] not in sys.stdlib_module_names}


@pytest.mark.more
def test_every_imported_module_is_known_by_the_package_that_installs_it():
    own = {extras.normalized(requirement.name) for _, requirement in own_requirements()}
    providers = metadata.packages_distributions()
    checked = set()
    for module in imported_modules():
        top = module.partition(".")[0]
        packages = {extras.normalized(name) for name in providers.get(top, ())} & own
        if packages and top != "onnxruntime":  # which several packages install
            assert extras.package_name(module) in packages, module
            checked.add(top)
    assert checked >= {"torch", "onnx_ir", "mlflow", "opentelemetry", "yaml", "starlette"}


def test_without_metadata_and_checkout_the_packages_themselves_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(extras, "PYPROJECT", tmp_path / "pyproject.toml")
    error = missing_packages("Testing", ["onnx_ir", "onnxruntime"])
    assert error.do == "Install them with: pip install onnx-ir onnxruntime"


def test_extra_that_includes_another_has_its_packages():
    assert {"data", "export"} <= {extra for extra, r in own_requirements() if r.name == "pyarrow"}
    assert "enginery" not in {requirement.name for _, requirement in own_requirements()}


def test_module_whose_spec_is_unknown_is_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "made_in_a_test", sys)
    assert extras.is_installed("made_in_a_test")
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda name: ModuleSpec(name, None))
    assert not extras.is_installed("no_such_module")

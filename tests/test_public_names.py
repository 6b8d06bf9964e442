"""The public surface: `from enginery import …`."""

import inspect
import subprocess
import sys

import pytest

import enginery

VERBS = [name for name in enginery.__all__ if not name.startswith("_")]


def test_public_names_are_these():
    assert enginery.__all__ == sorted(
        [
            "Artifact",
            "EngineryError",
            "OrtRunner",
            "Recipe",
            "RunnerOptions",
            "__version__",
            "bench_model",
            "build_engine",
            "export_kserve",
            "export_model",
            "export_triton",
            "length_buckets",
            "load_model",
            "optimize_model",
            "predict_file",
            "publish_model",
            "pull_model",
            "quantize_model",
            "run_recipe",
            "validate_model",
            "write_report",
        ]
    )
    assert dir(enginery) == enginery.__all__


@pytest.mark.parametrize("name", VERBS)
def test_public_name_resolves_and_says_what_it_is(name):
    found = getattr(enginery, name)
    assert found.__name__ == name
    assert len(inspect.getdoc(found)) > 30
    assert found.__module__ == enginery._HOMES[name], "the table says where it lives"


@pytest.mark.parametrize("name", [n for n in VERBS if inspect.isfunction(getattr(enginery, n))])
def test_public_function_documents_its_arguments_and_errors(name):
    function = getattr(enginery, name)
    words = inspect.getdoc(function)
    assert "Raises:" in words
    for parameter in list(inspect.signature(function).parameters):
        assert f"{parameter}:" in words, parameter


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'exprot_model'"):
        enginery.exprot_model  # noqa: B018
    with pytest.raises(ImportError):
        from enginery import exprot_model  # noqa: F401


def test_version_is_the_installed_one():
    from importlib import metadata

    assert enginery.__version__ == metadata.version("enginery")


def test_importing_enginery_imports_nothing_else():
    code = (
        "import sys; before = set(sys.modules); import enginery;"
        "print(sorted(n.split('.')[0] for n in set(sys.modules) - before"
        " if n.split('.')[0] not in sys.stdlib_module_names))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "['enginery']\n"

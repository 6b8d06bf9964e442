"""The libraries and servers that are compared: what each installs, and how it is started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
TORCH = "torch==2.13.0"
BASELINE = "sentence-transformers"


@dataclass(frozen=True)
class Environment:
    """A virtual environment: its name, and the arguments of `pip install`, one call each."""

    name: str
    steps: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Library:
    """A contender that encodes texts in Python."""

    name: str
    environment: Environment
    function: str
    """Function of `programs/encode.py`."""
    model: str = "fp32"
    """Which directory it reads: `source` (the model of transformers), `fp32` or `int8` (artifacts
    of enginery), `ctranslate2`."""
    computes_in: str = "FP32"


@dataclass(frozen=True)
class Server:
    """A contender that serves."""

    name: str
    environment: Environment
    command: Callable[[Path, Path, int], list[str]]
    """From Python, the model and a port."""
    model: str = "fp32"
    computes_in: str = "FP32"
    route: str = "/embed"

    def body(self, text: str) -> dict[str, Any]:
        """Return the JSON of a request for one text."""
        if self.route == "/embed":
            return {"inputs": text}
        return {"model": "minilm", "input": text}

    def vector(self, answer: Any) -> list[float]:
        """Return the embedding of an answer."""
        found: list[float] = answer[0] if self.route == "/embed" else answer["data"][0]["embedding"]
        return found


_ENGINERY = Environment(
    "enginery",
    (("--constraint", str(ROOT / "constraints.txt"), "--editable", f"{ROOT}[cpu,data,serve]"),),
)
_SENTENCE_TRANSFORMERS = Environment(
    "sentence-transformers", ((TORCH,), ("sentence-transformers==6.2.0", "fastapi", "uvicorn"))
)
# The newest that works with the versions that Optimum's exporter for ONNX accepts.
_SENTENCE_TRANSFORMERS_ONNX = Environment(
    "sentence-transformers-onnx",
    (
        (TORCH,),
        ("sentence-transformers[onnx]==5.7.0", "transformers==4.57.6", "huggingface-hub<1"),
    ),
)
_FASTEMBED = Environment("fastembed", (("fastembed==0.9.1",),))
_OPENVINO = Environment("openvino", (("openvino==2026.4.1", "tokenizers"),))
# torch and transformers are for its converter; the process that is measured imports neither.
_CTRANSLATE2 = Environment(
    "ctranslate2", ((TORCH,), ("ctranslate2==4.8.5", "transformers==4.57.6", "huggingface-hub<1"))
)
# Its last version imports BetterTransformer, which optimum has removed since, needs numpy 1, and
# a typer that fails with newer versions of click.
_INFINITY = Environment(
    "infinity",
    (
        (TORCH,),
        (
            *("infinity-emb[torch,server]==0.0.78", TORCH, "transformers<4.49", "optimum<1.24"),
            *("sentence-transformers<4", "click<8.2", "datasets<4", "pyarrow<20"),
        ),
    ),
)

LIBRARIES = (
    Library(BASELINE, _SENTENCE_TRANSFORMERS, "sentence_transformers", "source"),
    Library(
        "sentence-transformers, ONNX", _SENTENCE_TRANSFORMERS_ONNX, "sentence_transformers_onnx"
    ),
    Library("fastembed", _FASTEMBED, "fastembed"),
    Library("OpenVINO, FP32", _OPENVINO, "openvino_fp32"),
    Library("OpenVINO, default", _OPENVINO, "openvino", computes_in="BF16 if the CPU has it"),
    Library("CTranslate2", _CTRANSLATE2, "ctranslate2", "ctranslate2"),
    Library("CTranslate2, INT8", _CTRANSLATE2, "ctranslate2_int8", "ctranslate2", "INT8"),
    Library("enginery, load_model", _ENGINERY, "enginery"),
    Library("enginery, predict", _ENGINERY, "enginery_predict"),
    Library("enginery INT8, load_model", _ENGINERY, "enginery", "int8", "INT8"),
    Library("enginery INT8, predict", _ENGINERY, "enginery_predict", "int8", "INT8"),
)


def _fastapi(python: Path, model: Path, port: int) -> list[str]:
    return [str(python), str(PROGRAMS / "fastapi_server.py"), str(model), str(port)]


def _infinity(python: Path, model: Path, port: int) -> list[str]:
    return [
        *(str(python.with_name("infinity_emb")), "v2", "--model-id", str(model)),
        *("--served-model-name", "minilm", "--engine", "torch", "--device", "cpu"),
        # Its warm-up runs batches of 512 tokens for many seconds before the first answer.
        *("--no-model-warmup", "--host", "127.0.0.1", "--port", str(port)),
    ]


def _enginery(python: Path, model: Path, port: int) -> list[str]:
    command = [str(python), "-m", "enginery", "serve", str(model), "--port", str(port)]
    return [*command, "--access-log", "off"]


SERVERS = (
    Server("FastAPI, sentence-transformers", _SENTENCE_TRANSFORMERS, _fastapi, "source"),
    Server("infinity", _INFINITY, _infinity, "source", route="/embeddings"),
    Server("enginery serve", _ENGINERY, _enginery),
    Server("enginery serve, INT8", _ENGINERY, _enginery, "int8", "INT8"),
)

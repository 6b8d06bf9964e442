"""Code of a user, for type checkers: it is checked and never run.

A line with `type: ignore` has to be an error: mypy and pyright report a comment without one.
"""
# pyright: strict, reportUnnecessaryTypeIgnoreComment=true

from collections.abc import Iterator
from pathlib import Path
from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image

import enginery
from enginery import (
    Artifact,
    EngineryError,
    OrtRunner,
    Recipe,
    __version__,
    bench_model,
    build_engine,
    export_kserve,
    export_model,
    export_triton,
    length_buckets,
    load_model,
    optimize_model,
    predict_file,
    publish_model,
    pull_model,
    quantize_model,
    run_recipe,
    validate_model,
    write_report,
)
from enginery.api import RunResult, lint_model
from enginery.deploy.kserve.stage import KserveExport
from enginery.deploy.triton.stage import TritonExport
from enginery.export.config import ExportConfig
from enginery.passes.lint.lint import LintReport
from enginery.predict.report import PredictReport
from enginery.publish.destination import Published
from enginery.reports.benchmark import BenchResult
from enginery.reports.validation import ValidationReport
from enginery.runtime.model import Model
from enginery.runtime.providers import ProviderSpec
from enginery.runtime.tasks.answer import ContextAnswer
from enginery.runtime.tasks.audio import Transcription
from enginery.runtime.tasks.classify import Classification
from enginery.runtime.tasks.detect import Box
from enginery.runtime.tasks.fill import MaskFillings
from enginery.runtime.tasks.generate import Generation
from enginery.runtime.tasks.tag import TokenSpan


def export_and_check(path: Path) -> None:
    artifact = export_model("org/name", task="feature-extraction", opset=20, out=path)
    assert_type(artifact, Artifact)
    assert_type(export_model("org/name", config=ExportConfig(task="ner")), Artifact)
    assert_type(validate_model(artifact, max_abs_error=1e-4, effort="quick"), ValidationReport)
    assert_type(validate_model(path).passed, bool)
    assert_type(lint_model(artifact, target="cuda"), list[LintReport])
    assert_type(bench_model(artifact, path, against="none", batch="1,8"), BenchResult)
    assert_type(write_report(artifact), Path)
    assert_type(length_buckets(artifact, path, count=2).padding, float)
    export_model("org/name", tsak="ner")  # type: ignore[call-arg]
    export_model("org/name", opset="20")  # type: ignore[arg-type]
    export_model("org/name", dtype="fp8")  # type: ignore[arg-type]
    export_model("org/name", config=path)  # type: ignore[arg-type]
    validate_model(artifact, effort="fast")  # type: ignore[arg-type]
    lint_model(artifact, target="cpu")  # type: ignore[arg-type]
    bench_model(artifact, batches="1")  # type: ignore[call-arg]


def make_smaller(artifact: Artifact, texts: list[str]) -> None:
    assert_type(optimize_model(artifact, target="cuda", keep_fp32=["/norm"]), Artifact)
    assert_type(quantize_model(artifact, "reviews.csv", smoothing=0.5), Artifact)
    assert_type(quantize_model(artifact, texts, scheme="int8", capability=("8.9",)), Artifact)
    assert_type(build_engine(artifact, profile=["batch=1:8:32"], tf32=False), Artifact)
    optimize_model(artifact, precision="int8")  # type: ignore[arg-type]
    quantize_model(artifact, calibration=texts)  # type: ignore[call-arg]
    build_engine(artifact, profile="batch=1:8:32")  # type: ignore[arg-type]


def ship(artifact: Artifact, path: Path) -> None:
    assert_type(predict_file(artifact, "in.csv", path, top_k=3), PredictReport)
    assert_type(publish_model(artifact, "file:///models", layout="hub"), Published)
    assert_type(pull_model("file:///models/a/1", path), Artifact)
    assert_type(export_triton(artifact, path, max_batch_size=8), TritonExport)
    assert_type(export_kserve(artifact, path, storage_uri="pvc://models", image="a"), KserveExport)
    predict_file(artifact, "in.csv", path, activation="relu")  # type: ignore[arg-type]
    publish_model(artifact, "file:///models", private="no")  # type: ignore[arg-type]
    pull_model("file:///models/a/1", path, trust=True)  # type: ignore[call-arg]
    export_triton(artifact, path, instances="2")  # type: ignore[arg-type]
    export_kserve(artifact, path, gpu=1)  # type: ignore[call-arg]


def run(path: Path) -> None:
    assert_type(run_recipe(path, allow_failed=True), RunResult)
    assert_type(run_recipe(Recipe.load(path)).artifact, Artifact)
    run_recipe(path, forced=True)  # type: ignore[call-arg]


def use_texts(model: Model, texts: list[str], pairs: list[tuple[str, str]]) -> None:
    assert_type(model.embed(texts, normalize=True, dimensions=64), NDArray[np.float32])
    assert_type(model.embed([[101, 2023, 102]], prompt_name="query"), NDArray[np.float32])
    assert_type(model.embed(texts, dtype="int8"), NDArray[Any])
    assert_type(model.embed_tokens(texts), list[NDArray[np.float32]])
    assert_type(model.embed_sparse(texts, max_active_dims=9)[0].values, NDArray[np.float32])
    model.embed(texts, dtype="int4")  # type: ignore[call-overload]
    assert_type(model.classify(texts, top_k=2, activation="softmax"), list[Classification])
    assert_type(model.classify(pairs, instruction="Is it about cats?"), list[Classification])
    assert_type(model.classify(texts)[0].score, float)
    assert_type(model.tag(texts, aggregation="first"), list[list[TokenSpan]])
    assert_type(model.answer(pairs, max_tokens=9, allow_none=True), list[list[ContextAnswer]])
    assert_type(model.answer([{"question": "Who?", "context": "Ada."}])[0][0].text, str)
    assert_type(model.fill(texts, top_k=3, truncate=False), list[MaskFillings])
    assert_type(model.fill(texts)[0].masks[0][0].token, str)
    model.embed(texts, normalise=True)  # type: ignore[call-overload]
    model.embed(texts, dimensions="64")  # type: ignore[call-overload]
    model.embed(texts, True)  # type: ignore[call-overload]
    model.classify(texts, activation="relu")  # type: ignore[arg-type]
    model.tag(pairs)  # type: ignore[arg-type]
    model.answer(texts)  # type: ignore[arg-type]
    model.embedd(texts)  # type: ignore[attr-defined]


def use_media(model: Model, image: Image, pixels: NDArray[np.uint8], path: Path) -> None:
    samples = np.zeros(16_000, np.float32)
    assert_type(model.classify_images([image, pixels, path], top_k=1), list[Classification])
    assert_type(model.embed_images(["cat.png", b"..."], dimensions=8), NDArray[np.float32])
    assert_type(model.detect([image], threshold=0.9)[0][0].box, Box)
    assert_type(model.segment([path], subtask="semantic")[0][0].mask, str)
    assert_type(model.zero_shot_images([pixels], ["cat", "boat"]), list[Classification])
    assert_type(model.classify_audio([path], activation="sigmoid"), list[Classification])
    assert_type(model.transcribe([(samples, 16_000), "a.wav"])[0].text, str)
    assert_type(model.transcribe([{"array": samples, "sampling_rate": 8000}]), list[Transcription])
    model.classify_images([image], dimensions=8)  # type: ignore[call-arg]
    model.segment([image], subtask="instance")  # type: ignore[arg-type]
    model.embed_images([1])  # type: ignore[list-item]
    model.transcribe([samples])  # type: ignore[list-item]


def generate(model: Model, texts: list[str], path: Path) -> None:
    assert_type(model.generate(texts, max_new_tokens=32, num_beams=4)[0].text, str)
    assert_type(model.generate([path], language="en", task="translate"), list[Generation])
    assert_type(model.stream("The engine", stop_strings=".", seed=1), Iterator[str])
    model.generate(texts, max_tokens=32)  # type: ignore[call-arg]
    model.generate(texts, temperature="hot")  # type: ignore[arg-type]
    model.stream("The engine", task="sing")  # type: ignore[arg-type]


def load(artifact: Artifact, path: Path) -> None:
    assert_type(load_model(path), Model)
    load_model(path, providers="cuda,cpu", provider_options=["cuda.gpu_mem_limit=2GiB"], threads=2)
    load_model(artifact, providers=["tensorrt", {"cuda": {"device_id": 1}}, ProviderSpec("cpu")])
    load_model(artifact, providers={"cuda": {"device_id": 1}})
    load_model(artifact, provider="cuda")  # type: ignore[call-arg]
    load_model(artifact, providers=3)  # type: ignore[arg-type]
    load_model(artifact, threads="2")  # type: ignore[arg-type]
    with OrtRunner(artifact, providers="cpu") as runner:
        feeds = {"input_ids": np.ones((1, 4), np.int64)}
        assert_type(runner(feeds), dict[str, NDArray[Any]])


def see_names(error: EngineryError) -> str:
    assert_type(error.message, str)
    enginery.exprot_model("org/name")  # type: ignore[attr-defined]
    return __version__

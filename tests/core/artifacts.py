"""Artifacts without a real model, because the core only reads bytes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from enginery.core.artifact.artifact import Artifact, commit_artifact, staging
from enginery.core.artifact.fingerprint import Fingerprint
from enginery.core.artifact.manifest import (
    GraphRecord,
    Manifest,
    SourceRecord,
    StageRecord,
    Verdict,
)
from enginery.core.json_file import CHECKSUM_KEY, append_checksum
from enginery.core.shapes import TensorSpec

FINGERPRINT = Fingerprint("export", {"model": "org/name", "opset": "20"})


def manifest(fingerprint: Fingerprint = FINGERPRINT) -> Manifest:
    return Manifest(
        source=SourceRecord(kind="hub", id="org/name", revision="abc", sha256="0" * 64, files={}),
        task="feature-extraction",
        model_type="bert",
        library="transformers",
        precision="fp32",
        target="onnx",
        graphs=(
            GraphRecord(
                file="model.onnx",
                opset=20,
                inputs=(TensorSpec("input_ids", "int64", ("batch", "sequence")),),
                outputs=(TensorSpec("logits", "float32", ("batch", 2)),),
                data_files=(),
            ),
        ),
        stages=(
            StageRecord(
                stage=fingerprint.stage,
                key=fingerprint.key,
                fields=fingerprint.fields,
                options={},
                changed_options=(),
                tools={},
                finished="2026-01-01T00:00:00+00:00",
                seconds=1.0,
                peak_rss_bytes=1,
            ),
        ),
        files={},
    )


def fill(directory: Path, *, graph: bytes = b"graph", fingerprint: Fingerprint = FINGERPRINT):
    """Write the files and the manifest of an artifact to a staging directory."""
    (directory / "model.onnx").write_bytes(graph)
    (directory / "config.json").write_text("{}")
    commit_artifact(directory, manifest(fingerprint))


def make(out: Path, *, graph: bytes = b"graph", fingerprint: Fingerprint = FINGERPRINT) -> Artifact:
    with staging(out) as directory:
        fill(directory, graph=graph, fingerprint=fingerprint)
    return Artifact.open(out)


def publishable(out: Path, *, graph: bytes = b"graph") -> Artifact:
    """Return an artifact whose graph has the inputs and outputs that the manifest says."""
    from onnx import TensorProto, helper

    values = helper.make_tensor_value_info
    model = helper.make_model(
        helper.make_graph(
            [],
            graph.decode(),
            [values("input_ids", TensorProto.INT64, ["batch", "sequence"])],
            [values("logits", TensorProto.FLOAT, ["batch", 2])],
        )
    )
    return make(out, graph=model.SerializeToString())


def made_for(artifact, out, *, precision="int8", residual="fp32", target="tensorrt"):
    """Copy an artifact, and let its manifest say how it was quantized."""
    shutil.copytree(artifact.path, out)
    (first, *_) = artifact.manifest.stages
    scheme = "dynamic" if target == "cpu" else precision
    stage = first.model_copy(update={"stage": "quantize", "options": {"scheme": scheme}})
    said = {"precision": precision, "residual": residual, "target": target}
    stages = (*artifact.manifest.stages, stage)
    commit_artifact(out, artifact.manifest.model_copy(update={**said, "stages": stages}))
    return Artifact.open(out)


def verdict(
    artifact: Artifact | None = None,
    *,
    passed: bool = True,
    stage: str = "validate",
    summary: str = "",
) -> Verdict:
    """Return a verdict on an artifact's content; without its sha256 for None."""
    return Verdict(
        stage=stage,
        key="k",
        fields={"artifact": artifact.content_sha256()} if artifact else {},
        passed=passed,
        summary=summary or f"passed: {passed}",
        report=f"reports/{stage}.json",
        finished="2026-01-01T00:00:00+00:00",
    )


def validated(artifact: Artifact, *, summary: str = "", report: bytes | None = None) -> Artifact:
    """Return the artifact with a verdict that passed, and its report."""
    return artifact.annotate(verdict(artifact, summary=summary), report)


def edit_manifest(directory: Path, **changes) -> None:
    """Change values of a manifest.json and update its checksum, like a deliberate manipulation."""
    file = directory / "manifest.json"
    found = json.loads(file.read_text())
    del found[CHECKSUM_KEY]
    file.write_bytes(append_checksum(json.dumps({**found, **changes}, indent=2)))


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Start a Python process that runs `code` and can import this repository."""
    root = str(Path(__file__).parents[2])
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": root},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

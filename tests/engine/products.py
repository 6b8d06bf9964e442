"""Artifacts with one small matrix product, whose engines build in a second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from enginery.core.artifact.artifact import Artifact, commit_artifact, staging
from enginery.export.graphs import record_graph
from tests.core.artifacts import manifest
from tests.passes.onnx_graphs import WIDTH, node, save_graph

PROFILE = "batch=1:4:8"


def product(
    out: Path,
    *,
    seed: int = 0,
    dtype: type[np.floating[Any]] = np.float32,
    external: bool = False,
    batch: str | int = "batch",
    config: str = "{}",
) -> Artifact:
    """Make a graph relu(x @ w), where x and y are (batch, 64)."""
    weight = np.random.default_rng(seed).standard_normal((WIDTH, WIDTH)).astype(dtype)
    return artifact_of(
        out,
        {"model.onnx": [node("MatMul", "x w", "p", name="product"), node("Relu", "p", "y")]},
        {"w": weight},
        external=external,
        batch=batch,
        config=config,
    )


def artifact_of(
    out: Path,
    graphs: Mapping[str, Sequence[onnx.NodeProto]],
    constants: Mapping[str, Any] = {},
    *,
    external: bool = False,
    batch: str | int = "batch",
    config: str = "{}",
) -> Artifact:
    """Make an artifact of graphs from x to y, with the dtype of the constant `w`."""
    half = getattr(constants.get("w"), "dtype", None) == np.float16
    spec = (TensorProto.FLOAT16 if half else TensorProto.FLOAT, [batch, WIDTH])
    with staging(out) as directory:
        (directory / "config.json").write_text(config)
        for name, nodes in graphs.items():
            path = save_graph(
                directory / name, nodes, constants, inputs={"x": spec}, outputs={"y": spec}
            )
            if external:
                onnx.save(
                    onnx.load(path),
                    str(path),
                    save_as_external_data=True,
                    location=f"{name}.data",
                    size_threshold=0,
                )
        records = tuple(record_graph(directory / name, directory) for name in graphs)
        commit_artifact(directory, manifest().model_copy(update={"graphs": records}))
    return Artifact.open(out)

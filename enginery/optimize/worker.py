"""The child process that fuses graphs, because ONNX Runtime's fusions load all weights.

It reads a request file, writes the fused graphs to the directory that the request names, and writes
a result file.

    $ python -m enginery.optimize.worker request.json result.json

Three programs follow each other: ONNX Runtime's own optimizations of level 1 (folding of constants,
common subexpressions), the fusions of `onnxruntime.transformers` (normalizations, GELU, attention
of BERT's family), and the fusion of attention in `passes/attention/`, for what is left.
"""

from __future__ import annotations

import tempfile
import traceback
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import numpy_helper

from enginery.core.artifact.external_data import external_data_files, load_graph
from enginery.core.errors import ExportError
from enginery.core.subprocess import peak_rss_bytes, worker_main
from enginery.passes.attention.fuse import Target, count_fused, fuse_attention
from enginery.passes.ir.graph_file import read_graph, write_graph
from enginery.passes.ir.nodes import clear_shapes

DECOMPOSED = "decomposed"
"""The folder of graphs whose attention is not fused."""

_INLINE_BYTES = 1 << 20

# What comes off, step by step, if a graph is built in a way that a fusion fails on: those that read
# the most of a graph first.
_FEWER_FUSIONS = (
    (),
    ("attention", "rotary_embeddings"),
    ("attention", "rotary_embeddings", "skip_layer_norm", "bias_skip_layer_norm"),
)


@dataclass(frozen=True)
class Fusion:
    """What to fuse, and where to write it."""

    model: Path
    """The directory of the artifact."""
    out: Path
    """The directory for the fused graphs."""
    level: str
    """O1, O2, O3 or O4."""
    target: Target
    decomposed: Collection[str] = ()
    """The graphs that are also written to the folder `DECOMPOSED`, without our fused attention."""


def fuse(fusion: Fusion, file: str) -> list[str]:
    """Fuse a graph and write it under its own name; return notes.

    Args:
        fusion: what to fuse.
        file: the graph, relative to the directory of the artifact.

    Raises:
        ExportError: ONNX Runtime cannot load the graph.
    """
    fused = fusion.out / file
    fused.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=fusion.out) as scratch:
        basic = Path(scratch) / "basic.onnx"
        optimize_basic(fusion.model / file, basic)
        if fusion.level == "O1":
            write_graph(read_graph(basic), fused, max_inline_bytes=_INLINE_BYTES)
            return []
        graph = read_graph(basic)
        count = fuse_attention(graph, fusion.target).total()
        attention = Path(scratch) / "attention.onnx"
        write_graph(graph, attention, max_inline_bytes=_INLINE_BYTES)
        if fusion.target == "cuda":
            # In BERT's family, the projections become a part of the operator, and its kernels know
            # the number of tokens of each row.
            notes = fuse_operators(basic, fused, fusion, attention=True)
            if count_fused(load_graph(fused)) >= count:
                return notes
        if file in fusion.decomposed:
            decomposed = fusion.out / DECOMPOSED / file
            decomposed.parent.mkdir(parents=True, exist_ok=True)
            write_graph(read_graph(fused), decomposed, max_inline_bytes=_INLINE_BYTES)
        return fuse_operators(attention, fused, fusion, attention=False)


def optimize_basic(source: Path, target: Path) -> None:
    """Apply ONNX Runtime's optimizations of level 1, which suit every provider.

    ONNX Runtime applies its higher levels when it loads the graph, for the provider that runs it.
    Applied here, they would suit this machine: some of the CPU's fused ops have no CUDA kernel.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4  # errors come back as exceptions
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(target)
    if external_data_files(source):
        data = f"{target.name}.data"
        options.add_session_config_entry(
            "session.optimized_model_external_initializers_file_name", data
        )
    try:
        ort.InferenceSession(
            str(source),
            options,
            providers=["CPUExecutionProvider"],
            # Constants that layers share are no longer those of one operator, which fusions read.
            disabled_optimizers=["ConstantSharing"],
        )
    except Exception as error:  # ONNX Runtime raises many unrelated types
        raise ExportError(f"ONNX Runtime cannot optimize {source.name}: {error}") from error


def fuse_operators(source: Path, fused: Path, fusion: Fusion, *, attention: bool) -> list[str]:
    """Apply the fusions of `onnxruntime.transformers`; leave some out where they fail.

    Args:
        source: the graph.
        fused: the file to write.
        fusion: the level and the target.
        attention: fuse attention of BERT's family, with its projections.
    """
    omitted = set() if attention else {"attention"}
    if fusion.target == "cpu":
        # In ONNX Runtime 1.31 its kernel takes several times as long as Add and LayerNormalization.
        omitted |= {"skip_layer_norm", "bias_skip_layer_norm"}
    notes = list[str]()
    for fewer in _FEWER_FUSIONS:
        proto = onnx.load(source)  # again: a fusion that fails leaves its graph half changed
        try:
            model = _apply_fusions(proto, fusion.level, omitted | set(fewer))
            break
        except Exception as error:  # they index nodes that a graph may not have
            frame = traceback.extract_tb(error.__traceback__)[-1]
            notes.append(
                f"onnxruntime.transformers fails in {Path(frame.filename).stem}, so fewer "
                f"operators are fused: {type(error).__name__}: {error}"
            )
    else:
        model = read_graph(source)
    if fusion.target == "cpu":
        # Else ONNX Runtime makes SkipLayerNormalization of the two when it loads the graph.
        clear_shapes(model)
    # With external weights, a session holds the weights in memory once.
    write_graph(model, fused, max_inline_bytes=_INLINE_BYTES)
    return notes


def _apply_fusions(model: onnx.ModelProto, level: str, omitted: Collection[str]) -> ir.Model:
    from onnxruntime.transformers.fusion_options import FusionOptions
    from onnxruntime.transformers.optimizer import optimize_by_fusion

    options = FusionOptions("bert")
    # Symbolic shape inference fails on graphs that are otherwise fused.
    options.enable_shape_inference = False
    # It is incompatible with ONNX Runtime's quantization.
    options.enable_embed_layer_norm = False
    # O4 is O3 in FP16; the cast to FP16 follows later, when the ranges are known.
    options.enable_gelu_approximation = level in ("O3", "O4")
    for name in omitted:
        setattr(options, f"enable_{name}", False)
    _complete_norms(model)
    # 0: the numbers of heads and features are read from the graph.
    return ir.from_proto(optimize_by_fusion(model, "bert", 0, 0, options).model)


def _complete_norms(model: onnx.ModelProto) -> None:
    """Give each LayerNormalization a bias, which the fusions read."""
    widths = {tensor.name: tensor.dims for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "LayerNormalization" and len(node.input) == 2:
            zeros = np.zeros(widths.get(node.input[1], ()), np.float32)
            if zeros.ndim == 1:
                name = f"{node.input[1]}/no_bias"
                if name not in widths:
                    model.graph.initializer.append(numpy_helper.from_array(zeros, name))
                    widths[name] = zeros.shape
                node.input.append(name)


def handle_request(request: dict[str, Any]) -> dict[str, Any]:
    """Run one request; request and result are JSON data."""
    fusion = Fusion(
        model=Path(request["model"]),
        out=Path(request["out"]),
        level=request["level"],
        target=request["target"],
        decomposed=request["decomposed"],
    )
    notes = list[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they concern third-party code
        for file in request["files"]:
            notes += [f"{file}: {note}" for note in fuse(fusion, file)]
    return {"notes": notes, "peak_rss_bytes": peak_rss_bytes()}


if __name__ == "__main__":
    worker_main(handle_request, description="fusing")

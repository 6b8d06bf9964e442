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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from enginery.core.artifact.external_data import external_data_files, load_graph
from enginery.core.errors import ExportError
from enginery.core.subprocess import peak_rss_bytes, worker_main
from enginery.passes.attention.fuse import ATTENTIONS, Target, fuse_attention
from enginery.passes.ir.graph_file import read_graph, write_graph
from enginery.passes.ir.nodes import clear_shapes

_INLINE_BYTES = 1 << 20

# They read the most of a graph, and come off first if one is built in a way that they fail on.
_FRAGILE = ("attention", "rotary_embeddings")


def fuse(model: Path, file: str, level: str, target: Target, out: Path) -> list[str]:
    """Fuse a graph and write it under its own name to `out`; return notes.

    Args:
        model: the directory of the artifact.
        file: the graph, relative to it.
        level: O1, O2, O3 or O4.
        target: the kind of device.
        out: the directory for the fused graph.

    Raises:
        ExportError: ONNX Runtime cannot load the graph.
    """
    fused = out / file
    fused.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        basic = Path(scratch) / "basic.onnx"
        _optimize_basic(model / file, basic)
        if level == "O1":
            write_graph(read_graph(basic), fused, max_inline_bytes=_INLINE_BYTES)
            return []
        attention = Path(scratch) / "attention.onnx"
        graph = read_graph(basic)
        count = fuse_attention(graph, target).total()
        write_graph(graph, attention, max_inline_bytes=_INLINE_BYTES)
        notes = list[str]()
        # For CUDA, the projections of BERT's family become a part of the operator, and its kernels
        # know the number of tokens of each row.
        if target == "cuda":
            notes = _fuse_operators(basic, fused, level, target, omitted=())
            if fused_attentions(fused) >= count:
                return notes
        return [*notes, *_fuse_operators(attention, fused, level, target, omitted=("attention",))]


def fused_attentions(path: Path) -> int:
    """Return the number of nodes of a graph that are a whole attention."""
    return sum(node.op_type in ATTENTIONS for node in load_graph(path).graph.node)


def _optimize_basic(source: Path, target: Path) -> None:
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


def _fuse_operators(
    source: Path, fused: Path, level: str, target: Target, *, omitted: Sequence[str]
) -> list[str]:
    """Apply the fusions of `onnxruntime.transformers`; leave some out where they fail."""
    import onnx
    from onnxruntime.transformers.fusion_options import FusionOptions
    from onnxruntime.transformers.optimizer import optimize_by_fusion

    options = FusionOptions("bert")
    # Symbolic shape inference fails on graphs that are otherwise fused.
    options.enable_shape_inference = False
    # It is incompatible with ONNX Runtime's quantization.
    options.enable_embed_layer_norm = False
    # O4 is O3 in FP16; the cast to FP16 follows later, when the ranges are known.
    options.enable_gelu_approximation = level in ("O3", "O4")
    if target == "cpu":
        # Its kernel takes four times as long as those of Add and LayerNormalization.
        omitted = (*omitted, "skip_layer_norm", "bias_skip_layer_norm")
    for name in omitted:
        setattr(options, f"enable_{name}", False)
    notes = list[str]()
    try:
        # 0: the numbers of heads and features are read from the graph.
        optimized = optimize_by_fusion(onnx.load(source), "bert", 0, 0, options)
    except Exception as error:  # they index nodes that a graph may not have
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).stem}: {type(error).__name__}: {error}"
        if set(_FRAGILE) <= set(omitted):
            raise ExportError(f"onnxruntime.transformers fails in {place}") from error
        fewer = (*omitted, *_FRAGILE)
        notes = _fuse_operators(source, fused, level, target, omitted=fewer)
        return [f"onnxruntime.transformers fails in {place}; fewer operators are fused", *notes]
    model = ir.from_proto(optimized.model)
    if target == "cpu":
        # Else ONNX Runtime makes the same of them when it loads the graph.
        clear_shapes(model)
    # With external weights, a session holds the weights in memory once.
    write_graph(model, fused, max_inline_bytes=_INLINE_BYTES)
    return notes


def handle_request(request: dict[str, Any]) -> dict[str, Any]:
    """Run one request; request and result are JSON data."""
    notes = list[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they concern third-party code
        for file in request["files"]:
            out = Path(request["out"])
            graph_notes = fuse(
                Path(request["model"]), file, request["level"], request["target"], out
            )
            notes += [f"{file}: {note}" for note in graph_notes]
    return {"notes": notes, "peak_rss_bytes": peak_rss_bytes()}


if __name__ == "__main__":
    worker_main(handle_request, description="fusing")

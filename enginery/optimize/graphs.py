"""Optimize the graphs of an artifact: prepare each for the target, then cast and check it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import ExportError, OptionError, nearest
from enginery.core.model.feeds import Feeds
from enginery.core.progress import SILENT, Progress
from enginery.core.shapes import TensorSpec
from enginery.core.tolerance import Tolerance
from enginery.optimize.answers import append_answer
from enginery.optimize.comparison import OutputComparison, compare_outputs, run_on_batches
from enginery.optimize.config import OptimizeConfig
from enginery.optimize.fixed_cache import (
    DecoderFiles,
    FixedCacheGraph,
    add_fixed_cache,
    wants_fixed_cache,
)
from enginery.optimize.fusions import fuse_graphs
from enginery.optimize.guard import GuardRecord, cast_guarded
from enginery.optimize.inputs import range_feeds
from enginery.optimize.worker import DECOMPOSED
from enginery.passes.ir.cleanup import clean_graph, non_standard_nodes
from enginery.passes.ir.graph_file import check_graph, externalize_weights, read_graph, write_graph
from enginery.passes.ir.nodes import infer_types

# Relative to an output's largest magnitude. Sums in another order differ by a few FP32 roundoffs
# per layer; the tanh approximation of GELU by up to 5e-4 of its input per layer.
_MAX_ERROR_REORDERED = 1e-4
_MAX_ERROR_APPROXIMATED = 3e-2
_MAX_LISTED = 10


@dataclass
class OptimizedGraphs:
    """The graphs written to the staging directory, with their records and notes."""

    records: list[GuardRecord] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    data_files: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The names of the external data files of each graph."""
    answers: dict[str, TensorSpec] = field(default_factory=dict)
    """The output that was added to a graph, by its file."""
    added: list[GraphRecord] = field(default_factory=list)
    """The records of graphs that the source does not have."""
    problem: str = ""
    """How the outputs of an FP32 graph have changed; empty if they have not."""
    peak_rss_bytes: int = 0
    """The peak resident memory of the process that fused the graphs; 0 if there was none."""

    @property
    def passed(self) -> bool:
        return not self.problem and all(record.passed for record in self.records)


def optimize_graphs(
    artifact: Artifact,
    config: OptimizeConfig,
    directory: Path,
    scratch: Path,
    *,
    progress: Progress = SILENT,
) -> OptimizedGraphs:
    """Optimize every graph of the artifact and write it to `directory`.

    Args:
        artifact: an FP32 artifact.
        config: the options of the stage.
        directory: the directory for the optimized graphs.
        scratch: a temporary directory for intermediate FP32 graphs.
        progress: receives progress messages.

    Raises:
        ExportError: a graph cannot be fused or cast, or has ops that the target does not support.
        InputError: the data cannot be read, or a graph fails on it.
        OptionError: `keep_fp32` names a node that no graph has.
    """
    result = OptimizedGraphs()
    _check_keep_fp32(artifact, config)
    if config.target == "tensorrt":
        _check_standard_ops(artifact)
        prepared = scratch / "clean"
    else:
        prepared = scratch / "fused"
        notes, result.peak_rss_bytes = fuse_graphs(artifact, config, prepared)
        result.notes += notes
    for record in artifact.manifest.graphs:
        # Loading a graph with inline weights takes two to three times their memory.
        source = externalize_weights(artifact.path / record.file, scratch / "outside")
        fp32 = prepared / record.file
        if config.target == "tensorrt":
            _clean(source, fp32, result)
        else:
            fp32 = externalize_weights(fp32, scratch / "fused-outside")
        feeds = range_feeds(artifact, record, config)
        # Before the cast, whose error is measured against the prepared graph.
        _compare_with_source(source, record, fp32, feeds.batches, config, result)
        out = directory / record.file
        out.parent.mkdir(parents=True, exist_ok=True)
        guard = None
        if (precision := config.low_precision) is not None:
            guard = cast_guarded(fp32, out, precision, feeds, config, progress=progress)
            result.records.append(guard)
            result.notes.append(guard.describe())
            data_files = guard.data_files
        else:
            data_files = write_graph(read_graph(fp32), out)
            check_graph(out)
        if config.target == "cuda":
            # Then a vector is copied from the GPU, and not the vectors of all tokens.
            answer, note = append_answer(artifact, record, out)
            if answer is not None:
                result.answers[record.file] = answer
            if note:
                result.notes.append(note)
        if wants_fixed_cache(artifact, record, config):
            # The cache is found by the operators of attention.
            decomposed = prepared / DECOMPOSED / record.file
            made_from = decomposed if decomposed.is_file() else fp32
            # It is cast as its decoder was.
            islands = () if guard is None else guard.island_names()
            fp32_nodes = frozenset((*config.keep_fp32, *islands))
            files = DecoderFiles(record, made_from, out, fp32_nodes)
            data_files = _note_fixed_cache(add_fixed_cache(artifact, files, config), result)
        folder = Path(record.file).parent
        result.data_files[record.file] = tuple((folder / name).as_posix() for name in data_files)
        if config.target == "tensorrt":
            _parse_with_tensorrt(out, record, result)
    return result


def _note_fixed_cache(fixed: FixedCacheGraph, result: OptimizedGraphs) -> tuple[str, ...]:
    """Record the attempt at a cache of fixed size; return the data files of the decoder."""
    result.notes.append(fixed.note)
    if fixed.record is not None:
        result.added.append(fixed.record)
    return fixed.data_files


def require_low_nodes(
    artifact: Artifact, config: OptimizeConfig, records: Sequence[GuardRecord]
) -> None:
    """Raise ExportError if graphs were cast, and no node of them can compute in the low precision.

    Nodes that stay FP32 for their measured range or because of `keep_fp32` could, with other inputs
    or options. The record of the cast lists them.
    """
    if not records or any(record.low_nodes or record.measured_too_large for record in records):
        return
    if any(not record.kept.keys().isdisjoint(config.keep_fp32) for record in records):
        return
    remedy = "Optimize it with --precision fp32."
    kept = [(node, reason) for record in records for node, reason in record.kept.items()]
    if kept:
        node, reason = kept[0]
        why = f"all {len(kept)} nodes with floats stay FP32, such as {node}: {reason}"
    elif any(_has_float64(artifact.path / record.file) for record in artifact.manifest.graphs):
        why = "it computes in float64, and only float32 is cast"
        remedy += (
            " Or convert the file's weights, inputs and outputs to float32, and export that file."
        )
    else:
        why = "it has no node with floats"
    names = ", ".join(record.file for record in artifact.manifest.graphs)
    raise ExportError(
        f"{artifact.path}: no node of {names} can compute in {config.precision}: {why}.",
        do=remedy,
    )


def _has_float64(path: Path) -> bool:
    return any(
        value.const_value is not None and value.dtype == ir.DataType.DOUBLE
        for graph in read_graph(path).graphs()
        for value in graph.initializers.values()
    )


def _check_keep_fp32(artifact: Artifact, config: OptimizeConfig) -> None:
    """Raise OptionError if `keep_fp32` names a node that no graph has."""
    if not config.keep_fp32:
        return
    names = {
        node.name or ""
        for record in artifact.manifest.graphs
        for graph in read_graph(artifact.path / record.file).graphs()
        for node in graph
    }
    for name in config.keep_fp32:
        if name not in names:
            raise OptionError(
                f"option 'keep_fp32': no node is named '{name}'{nearest(name, names)}"
            )


def _check_standard_ops(artifact: Artifact) -> None:
    for record in artifact.manifest.graphs:
        non_standard = non_standard_nodes(read_graph(artifact.path / record.file))
        if non_standard:
            count = len(non_standard)
            more = f" and {count - _MAX_LISTED} more" if count > _MAX_LISTED else ""
            raise ExportError(
                f"{artifact.path}: {record.file} has {count} nodes that TensorRT cannot "
                f"parse: {', '.join(non_standard[:_MAX_LISTED])}{more}.",
                do="Optimize the exported artifact instead: ONNX Runtime's fused ops suit only the "
                "targets cuda and cpu.",
            )


def _clean(source: Path, target: Path, result: OptimizedGraphs) -> None:
    model = read_graph(source)
    infer_types(model)
    cleaned = clean_graph(model)
    infer_types(model)
    target.parent.mkdir(parents=True, exist_ok=True)
    # With external weights, a session holds the weights in memory once.
    write_graph(model, target, max_inline_bytes=1 << 20)
    check_graph(target)
    result.notes.append(f"{source.name}: {cleaned.describe()}")


def _compare_with_source(
    source: Path,
    record: GraphRecord,
    fp32: Path,
    batches: Sequence[Feeds],
    config: OptimizeConfig,
    result: OptimizedGraphs,
) -> None:
    """Compare the prepared FP32 graph with the artifact's, and record a difference as a problem."""
    approximated = config.target != "tensorrt" and config.level in ("O3", "O4")
    limit = _MAX_ERROR_APPROXIMATED if approximated else _MAX_ERROR_REORDERED
    agreements = _compare_graphs(source, fp32, record, batches, limit)
    failed = next((agreement for agreement in agreements if not agreement.passed), None)
    if failed and not result.problem:
        result.problem = (
            f"the outputs of {record.file} have changed after clean-up or fusion: "
            f"{failed.describe()}"
        )


def _compare_graphs(
    reference: Path, graph: Path, record: GraphRecord, batches: Sequence[Feeds], limit: float
) -> list[OutputComparison]:
    names = [spec.name for spec in record.outputs]
    return compare_outputs(
        run_on_batches(reference, names, batches),
        run_on_batches(graph, names, batches),
        Tolerance.for_precision("fp32"),
        max_error=limit,
    )


def _parse_with_tensorrt(out: Path, record: GraphRecord, result: OptimizedGraphs) -> None:
    """Parse the graph with TensorRT for RTX if it is installed, and note the result."""
    from enginery.runtime.tensorrt.library import has_tensorrt
    from enginery.runtime.tensorrt.process import parse_onnx

    if not has_tensorrt():
        result.notes.append(f"{record.file}: not parsed: TensorRT for RTX is not installed")
        return
    report = parse_onnx(out)
    if report.accepted:
        result.notes.append(f"{record.file}: TensorRT {report.tensorrt} accepts every node")
        return
    refused = "; ".join(f"{r.node} ({r.op_type}): {r.reason}" for r in report.refusals[:3])
    result.notes.append(f"{record.file}: TensorRT {report.tensorrt} rejects {refused}")

"""Cast a graph to FP16 or BF16 without overflow: measure ranges, cast, check, and repair.

The search for the nodes that must stay FP32 has two parts:

1. The FP32 graph runs on real inputs, and the ranges of its tensors say which nodes do not fit FP16
   (`passes/cast/overflow.py`). BF16 has the range of FP32, so this part is skipped.
2. The cast graph is compared with the FP32 graph on the same inputs. If an output is not finite or
   exceeds the tolerance, the nodes at which the graphs diverge (`optimize/divergence.py`) stay FP32
   too, and the check is repeated. Each round may add twice as many nodes as the one before (1, 2,
   4, …): one cause costs one node, and many causes still take few rounds.

The check runs a simulation (`passes/cast/simulation.py`), because ONNX Runtime computes most of an
FP16 graph in FP32 on the CPU and would hide an overflow.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from enginery.core.errors import ExportError
from enginery.core.model.feeds import Feeds
from enginery.core.model.random_numbers import random_notes
from enginery.core.progress import SILENT, Progress
from enginery.core.scratch import temporary_directory
from enginery.core.tolerance import Tolerance
from enginery.core.trust.onnx_structure import read_structure
from enginery.optimize.comparison import (
    OutputComparison,
    compare_outputs,
    round_weights,
    run_on_batches,
)
from enginery.optimize.config import OptimizeConfig
from enginery.optimize.divergence import Divergence, find_divergences, measure_layer_errors
from enginery.optimize.inputs import RangeFeeds
from enginery.passes.cast.cast import CastResult, cast_graph
from enginery.passes.cast.overflow import Fp32Node, find_fp32_nodes, mask_floor
from enginery.passes.cast.simulation import simulate_cast
from enginery.passes.ir.graph_file import check_graph, read_graph, write_graph
from enginery.passes.ir.nodes import all_nodes, infer_types
from enginery.passes.ranges.measure import (
    float_tensors,
    make_value_names_unique,
    measure_ranges,
)
from enginery.passes.ranges.tensor_range import TensorRange
from enginery.runtime.onnxruntime.tracing import GraphTracer


@dataclass(frozen=True)
class GuardRecord:
    """The record of one cast, part of reports/optimization.json. Field names are its keys."""

    graph: str
    precision: str
    feeds: str
    """The origin of the inputs on which ranges were measured."""
    batches: int
    tensors_measured: int
    largest: float
    """The largest magnitude of any inner tensor, without masked values."""
    largest_tensor: str
    islands: list[dict[str, Any]]
    """The nodes that stay FP32 for their ranges or because of the check, see `Fp32Node`."""
    kept: dict[str, str]
    """All nodes that stay FP32, with the reason; `islands` are among them."""
    low_nodes: int
    """The number of nodes in the low precision."""
    casts: int
    clamped: list[str]
    """See `CastResult`."""
    shared: list[str]
    """See `CastResult`."""
    rounds: int
    """The number of times that the check kept more nodes in FP32."""
    agreements: list[OutputComparison]
    """The comparison of each output in the last check."""
    not_run: str = ""
    """The reason why only the simulation of the cast graph was run; empty if the graph was run."""
    unrepaired: list[Divergence] = field(default_factory=list)
    """The nodes at which the graphs still diverge after the last round."""
    data_files: tuple[str, ...] = ()
    layer_errors: dict[str, float] = field(default_factory=dict)
    """Matrix products and convolutions, in graph order -> the relative error of the output on one
    batch. It contains the errors of the layers before."""

    @property
    def passed(self) -> bool:
        return all(agreement.passed for agreement in self.agreements)

    def island_names(self) -> list[str]:
        """Return the names of the nodes in `islands`."""
        return [str(island["node"]) for island in self.islands]

    @property
    def measured_too_large(self) -> bool:
        """True if nodes stay FP32 for a range that inputs have shown, so that others may allow it.

        A range that was not measured, as in the body of a Loop, has no largest value.
        """
        return any(island["largest"] for island in self.islands)

    def describe(self) -> str:
        """Return one sentence for the manifest."""
        cast = (
            f"{self.graph}: {self.low_nodes} nodes in {self.precision}, {len(self.islands)} kept "
            f"in FP32 for their range{describe_origin([self])}, {self.casts} casts"
        )
        if self.not_run:
            cast += f", only simulated ({self.not_run})"
        worst = max(
            self.agreements, key=lambda a: a.max_abs / a.limit if a.limit else 0.0, default=None
        )
        if self.passed:
            return f"{cast}; {worst.describe() if worst else 'no float outputs'}"
        failed = next(a for a in self.agreements if not a.passed)
        after = f"after {self.rounds} round{'' if self.rounds == 1 else 's'}"
        return f"{cast}; {after} {failed.describe()}{self._describe_divergence()}"

    def _describe_divergence(self) -> str:
        """Return the node at which the graphs still diverge, and why it was not repaired."""
        if not self.unrepaired:
            return ""
        first = self.unrepaired[0]
        where = f"; it diverges from FP32 at the node {first.node}"
        if not first.fixed:
            return f"{where} (--max-rounds allows no further repair)"
        if math.isinf(first.error):
            return (
                f"{where}, which is FP32 already: an input or output of the graph overflows in "
                f"{self.precision}; use --io-dtype fp32"
            )
        return (
            f"{where}, which is FP32 already: the relative error of its output is "
            f"{first.error:.3g}, that of its computed inputs {first.before:.3g}"
        )


def describe_origin(records: Sequence[GuardRecord]) -> str:
    """Return the inputs on which ranges were measured, in brackets; empty if none were."""
    # BF16 has the range of FP32, so nothing is measured.
    origins = dict.fromkeys(r.feeds for r in records if r.precision == "fp16" and r.feeds)
    return f" (measured on {' and '.join(origins)})" if origins else ""


def cast_guarded(
    fp32: Path,
    out: Path,
    precision: Literal["fp16", "bf16"],
    feeds: RangeFeeds,
    config: OptimizeConfig,
    *,
    progress: Progress = SILENT,
) -> GuardRecord:
    """Cast a graph, check the result, and keep more nodes in FP32 until it passes.

    Args:
        fp32: the FP32 graph after clean-up, its weights inline or external.
        out: the file for the cast graph.
        precision: the type to cast to.
        feeds: feeds of the FP32 graph.
        config: the tolerance, the number of rounds, the nodes to keep and the types of inputs and
            outputs.
        progress: receives progress messages.

    Raises:
        ExportError: the cast graph is not valid ONNX.
        ProviderError: ONNX Runtime cannot load a graph.
        InputError: a graph fails on the feeds.
    """
    with temporary_directory("guard") as scratch:
        # Ranges and errors are recorded by name.
        fp32 = _with_unique_names(fp32, scratch)
        model = read_graph(fp32)
        infer_types(model)
        outputs = [value.name or "" for value in model.graph.outputs]
        op_types = {node.name or "": node.op_type for node in all_nodes(model)}
        cast = _Cast(fp32, precision, feeds, config, outputs, op_types)
        ranges: dict[str, TensorRange] = {}
        fp32_nodes: dict[str, Fp32Node] = {}
        # BF16 has the range of FP32, so there is nothing to measure.
        if precision == "fp16":
            with progress.task(f"measuring ranges, {fp32.name}"):
                ranges = measure_ranges(
                    fp32, float_tensors(model.graph), feeds.batches, mask_floor=mask_floor(model)
                )
            fp32_nodes = find_fp32_nodes(model.graph, ranges)
            progress.say(
                f"optimize: {len(fp32_nodes)} nodes exceed FP16's range on {feeds.origin} and stay "
                "FP32"
            )
        # The sessions below have weights of their own.
        del model
        _require_repeatable(fp32, out.name, outputs, feeds.batches[:1])
        rounds, agreements, unrepaired = _repair(
            cast, ranges, fp32_nodes, scratch / "simulated.onnx", progress
        )
        layer_errors: dict[str, float] = {}
        if feeds.batches:  # one shows how the errors grow from layer to layer
            simulated = scratch / "simulated.onnx"
            layer_errors = measure_layer_errors(fp32, simulated, feeds.batches[0])
        result, data_files = cast.write(fp32_nodes, out)
    not_run = ""
    if precision == "fp16":
        run_on_batches(out, outputs, feeds.batches[:1])  # ONNX Runtime loads and runs it
    else:
        not_run = "ONNX Runtime has no BF16 kernels on the CPU"
    top = max(ranges, key=lambda name: ranges[name].largest, default="")
    return GuardRecord(
        graph=fp32.name,
        precision=precision,
        feeds=feeds.origin,
        batches=len(feeds.batches),
        tensors_measured=len(ranges),
        largest=ranges[top].largest if top else 0.0,
        largest_tensor=top,
        islands=[node.as_json() for node in fp32_nodes.values()],
        # The cast only knows that a node was to be kept, the guard knows why.
        kept={
            name: fp32_nodes[name].reason if name in fp32_nodes else reason
            for name, reason in result.kept.items()
        },
        low_nodes=result.low_nodes,
        casts=result.casts,
        clamped=list(result.clamped),
        shared=list(result.shared),
        rounds=rounds,
        agreements=agreements,
        not_run=not_run,
        unrepaired=unrepaired,
        data_files=data_files,
        layer_errors=layer_errors,
    )


@dataclass(frozen=True)
class _Cast:
    """A graph, and how it is cast."""

    fp32: Path
    precision: Literal["fp16", "bf16"]
    feeds: RangeFeeds
    config: OptimizeConfig
    outputs: Sequence[str]
    """The names of the graph's outputs."""
    op_types: Mapping[str, str]
    """The operators of the graph's nodes, by their names."""

    def simulate(self, fp32_nodes: Collection[str], out: Path) -> None:
        """Write a graph that computes in FP32 and rounds as the cast graph would."""
        model = read_graph(self.fp32)
        keep_fp32 = {*fp32_nodes, *self.config.keep_fp32}
        simulate_cast(model, self.precision, keep_fp32=keep_fp32, io_dtype=self.config.io_dtype)
        write_graph(model, out, max_inline_bytes=1 << 20)

    def write(self, fp32_nodes: Collection[str], out: Path) -> tuple[CastResult, tuple[str, ...]]:
        """Write the cast graph; return what was cast, and the names of its data files."""
        model = read_graph(self.fp32)
        keep_fp32 = {*fp32_nodes, *self.config.keep_fp32}
        result = cast_graph(
            model, self.precision, keep_fp32=keep_fp32, io_dtype=self.config.io_dtype
        )
        data_files = write_graph(model, out)
        check_graph(out)
        return result, data_files


def _repair(
    cast: _Cast,
    ranges: Mapping[str, TensorRange],
    fp32_nodes: dict[str, Fp32Node],
    simulated: Path,
    progress: Progress,
) -> tuple[int, list[OutputComparison], list[Divergence]]:
    """Add nodes to `fp32_nodes` until the cast passes, or no more can or may be added.

    Args:
        cast: the cast.
        ranges: the ranges that were measured, for the nodes' records.
        fp32_nodes: the nodes that stay FP32.
        simulated: a file for the simulation.
        progress: receives progress messages.

    Returns:
        The number of rounds that added nodes, the comparison of each output in the last check, and
        the nodes at which the graphs still diverge.
    """
    batches, config = cast.feeds.batches, cast.config
    max_error = None if isinstance(config.max_error, str) else config.max_error
    expected = run_on_batches(cast.fp32, cast.outputs, batches)
    # The error of FP32 arithmetic on rounded weights is the least that the precision can have.
    round_weights(cast.fp32, simulated, cast.precision)
    noise = run_on_batches(simulated, cast.outputs, batches)
    rounds = 0
    while True:
        # A simulation: ONNX Runtime computes most of an FP16 graph in FP32 on the CPU, which would
        # hide an overflow.
        cast.simulate(fp32_nodes, simulated)
        agreements = compare_outputs(
            expected,
            run_on_batches(simulated, cast.outputs, batches),
            Tolerance.for_precision(cast.precision),
            noise=noise,
            max_error=max_error,
        )
        if all(agreement.passed for agreement in agreements):
            return rounds, agreements, []
        worst = next(a for a in agreements if not a.passed)
        fixed = {*fp32_nodes, *config.keep_fp32}
        # One batch shows where the graphs diverge: that of the largest error.
        divergences = find_divergences(cast.fp32, simulated, batches[worst.batch], fixed=fixed)
        movable = [divergence for divergence in divergences if not divergence.fixed]
        # 1, 2, 4, …: one cause costs one node, and many causes still take few rounds.
        repairable = movable[: 1 << rounds]
        if rounds >= config.max_rounds or not repairable:
            # A node that is FP32 already cannot be repaired, but the report names it.
            return rounds, agreements, repairable or divergences[:1]
        for divergence in repairable:
            op_type = cast.op_types[divergence.node]
            fp32_nodes[divergence.node] = _diverging_node(op_type, divergence, ranges)
        rounds += 1
        progress.say(f"optimize: {worst.describe()}; {len(repairable)} more nodes stay FP32")


def _require_repeatable(
    path: Path, name: str, outputs: Sequence[str], batches: Sequence[Feeds]
) -> None:
    """Raise ExportError if a graph draws random numbers that its outputs depend on."""
    notes = random_notes(read_structure(path).op_types(), name)
    if not notes or not batches:
        return
    with GraphTracer(path, outputs) as trace:  # another session would start from the same seed
        first, second = trace(batches[0]), trace(batches[0])
    if any(not np.array_equal(first[o], second[o], equal_nan=True) for o in outputs):
        raise ExportError(
            f"{notes[0]}, and the error of a cast cannot be told from chance.",
            do="Set the model's noise to 0 if its config.json can, and export it again.",
        )


def _with_unique_names(fp32: Path, scratch: Path) -> Path:
    """Return the graph, or a copy in which all value names are unique."""
    model = read_graph(fp32)
    infer_types(model)
    if not make_value_names_unique(model):
        return fp32
    path = scratch / fp32.name
    write_graph(model, path, max_inline_bytes=1 << 20)
    return path


def _diverging_node(
    op_type: str, divergence: Divergence, ranges: Mapping[str, TensorRange]
) -> Fp32Node:
    tensor_range = ranges.get(divergence.tensor)
    return Fp32Node(
        divergence.node,
        op_type,
        divergence.tensor,
        tensor_range.largest if tensor_range else float("nan"),
        tensor_range.smallest if tensor_range else float("nan"),
        f"its error in FP16 was {divergence.error:.3g}, {divergence.before:.3g} at its inputs",
    )

"""FP16 without overflow: ranges on real inputs, islands of FP32 where they leave FP16, a check.

Takes a clean FP32 graph; leaves the cast one, and a record of every island.

    >>> record = cast_guarded(fp32, out, "fp16", batches, config)
    >>> record.passed, len(record.islands), record.casts
    (True, 14, 9)

The check runs on a simulation (`passes/simulation.py`): on the CPU, ONNX Runtime computes most of
an FP16 graph in FP32 and would hide an overflow. While an output is not finite or too far off, the
node where the two graphs part joins the islands. BF16 has FP32's range, so nothing is measured.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from numpy.typing import NDArray

from enginery.core.precision import Tolerance
from enginery.core.progress import SILENT, Progress
from enginery.optimize.comparison import (
    OutputComparison,
    compare_outputs,
    round_weights,
    run_on_batches,
)
from enginery.optimize.config import OptimizeConfig
from enginery.optimize.divergence import Divergence, find_divergences
from enginery.passes.cast import CastResult, cast_graph
from enginery.passes.graph_file import check_graph, read_graph, write_graph
from enginery.passes.nodes import all_nodes, infer_types
from enginery.passes.overflow import Fp32Node, find_fp32_nodes, mask_floor
from enginery.passes.ranges import (
    TensorRange,
    float_tensors,
    make_value_names_unique,
    measure_ranges,
)
from enginery.passes.simulation import simulate_cast

Feeds = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class GuardRecord:
    """What the cast of one graph came to; part of reports/optimization.json."""

    graph: str
    precision: str
    feeds: str
    """Where the inputs come from that ranges were measured on."""
    batches: int
    tensors_measured: int
    largest: float
    """The largest magnitude of any inner tensor, masks left out."""
    largest_tensor: str
    islands: list[dict[str, Any]]
    """Nodes that stay FP32 for their ranges, or because the check asked for them."""
    kept: dict[str, str]
    """All FP32 nodes with the reason, islands included."""
    low_nodes: int
    casts: int
    clamped: list[str]
    shared: list[str]
    rounds: int
    """How often islands grew after the check."""
    agreements: list[OutputComparison]
    not_run: str = ""
    """Why the cast graph itself was not run, but only its simulation; empty where it was."""
    unrepaired: list[Divergence] = field(default_factory=list)
    """Where the graphs still part after the last round."""
    data_files: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return all(agreement.passed for agreement in self.agreements)

    def describe(self) -> str:
        """One sentence for the manifest."""
        what = (
            f"{self.graph}: {self.low_nodes} nodes in {self.precision}, {len(self.islands)} kept "
            f"FP32 for their range, {self.casts} casts"
        )
        if self.not_run:
            what += f", simulated only ({self.not_run})"
        worst = max(self.agreements, key=lambda a: a.max_abs / a.limit if a.limit else 0.0,
                    default=None)  # fmt: skip
        said = worst.describe() if worst else "no float outputs"
        if self.passed:
            return f"{what}; {said}"
        failed = next(a for a in self.agreements if not a.passed)
        after = f"after {self.rounds} round{'' if self.rounds == 1 else 's'}"
        return f"{what}; {after} {failed.describe()}{self._where()}"

    def _where(self) -> str:
        """At which node the graphs still part, and why it was left at that."""
        if not self.unrepaired:
            return ""
        at = self.unrepaired[0]
        if not at.fixed:
            return f"; it parts at the node {at.node} (--max-rounds allows no further islands)"
        if math.isinf(at.error):
            return (
                f"; it parts at the node {at.node}, which is FP32 already: an input or output of "
                f"the graph that is {self.precision} does not hold its numbers, --io-dtype fp32 "
                "does"
            )
        return (
            f"; it parts at the node {at.node}, which is FP32 already; its result is off by "
            f"{at.error:.3g}, those of its inputs that were computed by {at.before:.3g}"
        )


def cast_guarded(
    fp32: Path,
    out: Path,
    precision: Literal["fp16", "bf16"],
    batches: Sequence[Feeds],
    config: OptimizeConfig,
    *,
    feeds_origin: str = "",
    progress: Progress = SILENT,
) -> GuardRecord:
    """Casts a graph and checks it.

    Args:
        fp32: the FP32 graph, its weights inside or beside it.
        out: where the cast graph goes.
        precision: the narrow type.
        batches: feeds of the FP32 graph.
        config: tolerance, rounds, nodes to keep, types of inputs and outputs.
        feeds_origin: where the feeds come from, for the record.
        progress: who is told.

    Raises:
        ExportError: the cast graph is not valid ONNX.
        ProviderError: ONNX Runtime does not load a graph.
        InputError: a graph fails on the feeds.
    """
    with tempfile.TemporaryDirectory(prefix="enginery-guard-") as scratch:
        return _cast_guarded(
            _with_unique_names(fp32, Path(scratch)), out, precision, batches, config, feeds_origin,
            Path(scratch), progress,
        )  # fmt: skip


def _cast_guarded(
    fp32: Path,
    out: Path,
    precision: Literal["fp16", "bf16"],
    batches: Sequence[Feeds],
    config: OptimizeConfig,
    feeds_origin: str,
    scratch: Path,
    progress: Progress,
) -> GuardRecord:
    model = read_graph(fp32)
    infer_types(model)
    outputs = [value.name or "" for value in model.graph.outputs]
    ranges: dict[str, TensorRange] = {}
    islands: dict[str, Fp32Node] = {}
    if precision == "fp16":
        with progress.task(f"measuring ranges, {fp32.name}"):
            ranges = measure_ranges(
                fp32, float_tensors(model.graph), batches, mask_floor=mask_floor(model)
            )
        islands = find_fp32_nodes(model.graph, ranges)
        progress.say(f"optimize: {len(islands)} nodes leave FP16's range")
    op_types = {node.name or "": node.op_type for node in all_nodes(model)}
    del model
    tolerance = Tolerance.for_precision(precision)
    limit = None if isinstance(config.max_error, str) else config.max_error
    expected = run_on_batches(fp32, outputs, batches)
    rounds = 0
    simulated = scratch / "simulated.onnx"
    round_weights(fp32, simulated, precision)
    # FP32 arithmetic on narrow weights: nothing in the precision can do better.
    noise = run_on_batches(simulated, outputs, batches)
    while True:
        _simulate(fp32, simulated, precision, islands, config)
        agreements = compare_outputs(
            expected, run_on_batches(simulated, outputs, batches), tolerance,
            noise=noise, max_error=limit,
        )  # fmt: skip
        unrepaired: list[Divergence] = []
        if all(agreement.passed for agreement in agreements):
            break
        worst = next(a for a in agreements if not a.passed)
        fixed = {*islands, *config.keep_fp32}
        found = find_divergences(fp32, simulated, batches[worst.batch], fixed=fixed)
        repairable = [one for one in found if not one.fixed][: 1 << rounds]
        unrepaired = repairable or found[:1]
        if rounds >= config.max_rounds or not repairable:
            break
        for one in repairable:
            islands[one.node] = _diverging_node(op_types[one.node], one, ranges)
        rounds += 1
        progress.say(f"optimize: {worst.describe()}; {len(repairable)} more nodes stay FP32")
    result, data_files = _cast(fp32, out, precision, islands, config)
    not_run = ""
    if precision == "fp16":
        run_on_batches(out, outputs, batches[:1])  # ONNX Runtime loads and runs it
    else:
        not_run = "ONNX Runtime has no BF16 kernels on the CPU"
    return _record(
        fp32, precision, feeds_origin, batches, ranges, islands, result, rounds, agreements,
        not_run, unrepaired, data_files,
    )  # fmt: skip


def _with_unique_names(fp32: Path, scratch: Path) -> Path:
    """The graph, or a copy of it in which no two branches use the same names."""
    model = read_graph(fp32)
    infer_types(model)
    if not make_value_names_unique(model):
        return fp32
    path = scratch / fp32.name
    write_graph(model, path, max_inline_bytes=1 << 20)
    return path


def _simulate(
    fp32: Path,
    out: Path,
    precision: Literal["fp16", "bf16"],
    islands: Mapping[str, Fp32Node],
    config: OptimizeConfig,
) -> None:
    model = read_graph(fp32)
    simulate_cast(
        model, precision, keep_fp32={*islands, *config.keep_fp32}, io_dtype=config.io_dtype
    )
    write_graph(model, out, max_inline_bytes=1 << 20)


def _cast(
    fp32: Path,
    out: Path,
    precision: Literal["fp16", "bf16"],
    islands: Mapping[str, Fp32Node],
    config: OptimizeConfig,
) -> tuple[CastResult, tuple[str, ...]]:
    model = read_graph(fp32)
    result = cast_graph(
        model, precision, keep_fp32={*islands, *config.keep_fp32}, io_dtype=config.io_dtype
    )
    data_files = write_graph(model, out)
    check_graph(out)
    return result, data_files


def _diverging_node(op_type: str, found: Divergence, ranges: Mapping[str, TensorRange]) -> Fp32Node:
    known = ranges.get(found.tensor)
    return Fp32Node(
        found.node,
        op_type,
        found.tensor,
        known.largest if known else float("nan"),
        known.smallest if known else float("nan"),
        f"its error in FP16 was {found.error:.3g}, {found.before:.3g} at its inputs",
    )


def _record(
    fp32: Path,
    precision: str,
    feeds_origin: str,
    batches: Sequence[Feeds],
    ranges: Mapping[str, TensorRange],
    islands: Mapping[str, Fp32Node],
    result: CastResult,
    rounds: int,
    agreements: list[OutputComparison],
    not_run: str,
    unrepaired: list[Divergence],
    data_files: tuple[str, ...],
) -> GuardRecord:
    top = max(ranges, key=lambda name: ranges[name].largest, default="")
    reasons = {name: islands[name].reason if name in islands else reason
               for name, reason in result.kept.items()}  # fmt: skip
    return GuardRecord(
        graph=fp32.name,
        precision=precision,
        feeds=feeds_origin,
        batches=len(batches),
        tensors_measured=len(ranges),
        largest=ranges[top].largest if top else 0.0,
        largest_tensor=top,
        islands=[island.as_json() for island in islands.values()],
        kept=reasons,
        low_nodes=result.low_nodes,
        casts=result.casts,
        clamped=list(result.clamped),
        shared=list(result.shared),
        rounds=rounds,
        agreements=agreements,
        not_run=not_run,
        unrepaired=unrepaired,
        data_files=data_files,
    )

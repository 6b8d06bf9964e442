"""Check that every compute node of the optimized graphs runs on the GPU."""

from __future__ import annotations

from functools import partial

from benchmarks.gpu_check.settings import PRECISIONS
from benchmarks.gpu_check.work import Work
from enginery.core.artifact.artifact import Artifact
from enginery.core.errors import InputError
from enginery.core.model.feeds import FeedLimits, make_feeds
from enginery.runtime.onnxruntime.multiply_adds import profile_multiply_adds
from enginery.runtime.onnxruntime.placement import Placement, add_multiply_adds, read_placement
from enginery.runtime.providers.known import CPU
from enginery.runtime.providers.selection import choose_providers

HEAVY = (
    "MatMul",
    "Gemm",
    "Attention",
    "MultiHeadAttention",
    "Conv",
    "FusedMatMul",
    "GroupQueryAttention",
)
"""Ops that must be on the GPU, so that an empty record is not a success."""
_SIZES = {"batch": 1, "sequence": 16}


def run(work: Work) -> None:
    """Check each precision of the model."""
    for precision in PRECISIONS:
        work.case(precision, partial(_check, work, precision))


def _check(work: Work, precision: str) -> None:
    if precision == "bf16" and not work.on_gpu:
        work.note("bf16: left out, ONNX Runtime's CPU has no BF16 kernels")
        return
    placed = place(work.artifact(precision), work.provider, counted_in=work.artifact("fp32"))
    work.add("placed", {"model": work.model, "precision": precision, **described(placed)})
    passed, words = judge(placed)
    work.check(f"placement of {work.model} in {precision}", passed=passed, found=words)


def place(artifact: Artifact, provider: str, *, counted_in: Artifact) -> Placement:
    """Return the placement with the work of each node.

    Args:
        artifact: artifact with the graph.
        provider: short name of the provider.
        counted_in: the same graph in FP32. Work is counted on the CPU, which has no FP16 and BF16
            kernels of fused ops; casting keeps the names of nodes.
    """
    record = artifact.manifest.graphs[0]
    limits = FeedLimits.from_artifact(artifact)
    feeds = make_feeds(record.inputs, _SIZES, limits, seed=0)
    placed = read_placement(artifact.model, choose_providers([provider]), feeds)
    if not placed.counted:
        try:
            placed = add_multiply_adds(placed, profile_multiply_adds(counted_in.model, feeds))
        except InputError:
            return placed  # it says itself that nothing was counted
    return placed


def judge(placed: Placement) -> tuple[bool, str]:
    """Return whether every compute node runs on the requested provider, and a sentence about it."""
    fallen = [f"{node.name or 'unnamed'} ({node.op_type})" for node in placed.fallen]
    heavy = sum(node.op_type in HEAVY for node in placed.nodes if node.provider == placed.head)
    if fallen:
        return False, f"{len(fallen)} compute nodes run on the CPU: {', '.join(fallen)}"
    if not heavy:
        return (
            False,
            f"no matrix product is on {placed.head}: the record of {len(placed.nodes)} "
            "nodes cannot be right",
        )
    on_cpu = [n for n in placed.nodes if n.provider == CPU != placed.head]
    counted = "" if placed.counted else ", told by their ops alone"
    return True, (
        f"{heavy} matrix products and attentions and "
        f"{sum(n.provider == placed.head for n in placed.nodes) - heavy} other nodes on "
        f"{placed.head}; {len(on_cpu)} nodes that compute shapes on the CPU{counted}; "
        f"{len(placed.copies)} copies between the devices per run"
    )


def described(placed: Placement) -> dict[str, object]:
    """Return the placement as JSON values."""
    on_cpu = [n for n in placed.nodes if n.provider == CPU != placed.head]
    return {
        **placed.as_json(),
        "on the head": sum(n.provider == placed.head for n in placed.nodes),
        "on the cpu": [f"{n.name} ({n.op_type})" for n in on_cpu],
        "share of the multiply-adds": placed.share(placed.head) if placed.counted else None,
    }

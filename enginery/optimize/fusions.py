"""Fuse graphs for ONNX Runtime, in a child process that loads all weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.external_data import load_graph
from enginery.core.errors import ExportError
from enginery.core.home import store_log
from enginery.core.subprocess import Supervision, run_in_subprocess
from enginery.core.trust.resource_limits import ResourceLimits
from enginery.optimize.config import OptimizeConfig
from enginery.optimize.fixed_cache import wants_fixed_cache
from enginery.passes.attention.fuse import ATTENTIONS, count_unfused


def fuse_graphs(artifact: Artifact, config: OptimizeConfig, out: Path) -> tuple[list[str], int]:
    """Fuse every graph of the artifact and write it to `out`.

    Returns:
        Notes, and the peak resident memory of the child process in bytes.

    Raises:
        ExportError: a graph cannot be fused.
    """
    out.mkdir(parents=True)
    files = [graph.file for graph in artifact.manifest.graphs]
    log = store_log(f"optimize-{artifact.name}.log")
    result = run_in_subprocess(
        "enginery.optimize.worker",
        {
            "model": str(artifact.path),
            "files": files,
            "level": config.level or "O2",
            "target": config.target,
            "decomposed": [
                record.file
                for record in artifact.manifest.graphs
                if wants_fixed_cache(artifact, record, config)
            ],
            "out": str(out),
        },
        log=log,
        description=f"fusing {artifact.name}",
        error_classes=(ExportError,),
        supervision=Supervision(
            limits=ResourceLimits.of_checkpoint(
                file_bytes=sum(artifact.graph_bytes(graph) for graph in artifact.manifest.graphs)
            )
        ),
    )
    if missing := [file for file in files if not (out / file).is_file()]:
        raise ExportError(
            f"fusing {artifact.name} did not write {missing[0]}.", do=f"See the log: {log}"
        )
    # Fusions do not say what they have fused, and may fuse nothing.
    for file in files:
        counts = ", ".join(f"{count} {op}" for op, count in fused_ops(out / file).items())
        note = f"{file}: {counts or 'no fused ops'}"
        if unfused := count_unfused(load_graph(out / file)):
            note += f"; {unfused} attentions are as exported"
        result["notes"].append(note)
    return result["notes"], int(result["peak_rss_bytes"])


def fused_ops(path: Path) -> dict[str, int]:
    """Count the fused operators of a graph by type, in descending order.

    They are ONNX Runtime's own, and ONNX's attention.
    """
    nodes = load_graph(path).graph.node
    return dict(
        Counter(
            node.op_type
            for node in nodes
            if node.domain.startswith("com.microsoft") or node.op_type in ATTENTIONS
        ).most_common()
    )

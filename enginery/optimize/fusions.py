"""Fuse graphs for ONNX Runtime with Optimum's levels, in a child process.

Optimum deletes `*_data` files beside the graph that it reads, so it works on copies or links.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from enginery.core.artifact.artifact import Artifact, link_or_copy
from enginery.core.artifact.external_data import load_graph
from enginery.core.errors import ExportError
from enginery.core.home import store_log
from enginery.core.resource_limits import ResourceLimits
from enginery.core.subprocess import Supervision, run_in_subprocess


def fuse_graphs(artifact: Artifact, level: str, out: Path) -> tuple[list[str], int]:
    """Fuse every graph of the artifact and write it below `out`.

    Returns:
        Notes, and the peak resident memory of the child process in bytes.

    Raises:
        ExportError: a graph cannot be fused.
        MissingPackageError: Optimum or PyTorch is not installed.
    """
    source, fused = out / "source", out / "fused"
    source.mkdir(parents=True)
    fused.mkdir()
    external = artifact.external_data()
    for name in artifact.manifest.files:
        # Optimum deletes `*_data` files beside the graph that it reads.
        link_or_copy(artifact.path / name, source / name, linked=name not in external)
    files = [graph.file for graph in artifact.manifest.graphs]
    log = store_log(f"optimize-{artifact.name}.log")
    result = run_in_subprocess(
        "enginery.optimize.worker",
        {"model": str(source), "files": files, "level": level, "out": str(fused)},
        log=log,
        description=f"fusing {artifact.name}",
        error_classes=(ExportError,),
        supervision=Supervision(
            limits=ResourceLimits.of_checkpoint(
                file_bytes=sum(artifact.graph_bytes(graph) for graph in artifact.manifest.graphs)
            )
        ),
    )
    if missing := [file for file in files if not (fused / file).is_file()]:
        raise ExportError(
            f"fusing {artifact.name} did not write {missing[0]}.", do=f"See the log: {log}"
        )
    # Optimum does not say what it has fused, and may fuse nothing.
    for file in files:
        ops = fused_ops(fused / file)
        result["notes"].append(
            f"{file}: " + (", ".join(f"{n} {op}" for op, n in ops.items()) or "no fused ops")
        )
    return result["notes"], int(result["peak_rss_bytes"])


def fused_ops(path: Path) -> dict[str, int]:
    """Count the ONNX Runtime ops of a graph by type, in descending order."""
    nodes = load_graph(path).graph.node
    return dict(
        Counter(
            node.op_type for node in nodes if node.domain.startswith("com.microsoft")
        ).most_common()
    )

"""Optimize a graph for this processor once, and keep the result in the store.

    optimized_graph(artifact, artifact.manifest.graphs[0], providers)
    # PosixPath('…/graphs/graph-minilm-5d0c41f9a6b27e83/model.onnx')

ONNX Runtime optimizes a graph each time it is loaded, for the current processor. If this is done
once and the result is stored with separate weights, loading takes a third of the time and the
weights are memory-mapped instead of copied: all-MiniLM-L6-v2 in FP32 uses 72 MiB less memory
(benchmarks/results/figures.md).
"""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from pathlib import Path

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.fingerprint import Fingerprint, combined_sha256, runtime_version
from enginery.core.artifact.inputs import InputFiles
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.artifact.staging import staging
from enginery.core.errors import EngineryError
from enginery.core.store.optimized_graph import MODEL_FILE, STAGE, OptimizedGraph, write_record
from enginery.core.store.store import GRAPHS, Store
from enginery.core.trust.graph_limits import check_allocations
from enginery.runtime.machine import read_cpuinfo
from enginery.runtime.onnxruntime.session import use_exact_int8
from enginery.runtime.providers.known import CPU
from enginery.runtime.providers.selection import Provider

_STAGE_VERSION = "4"
_DATA = f"{MODEL_FILE}.data"
_SMALLEST_BYTES = "1024"
"""Smaller weights stay in the graph, because they are smaller than a page of memory."""
_PACKED = re.compile(rb"\|(\d+);\d+;\d+")
"""Offset, length and another number of weights that are stored in the layout of a kernel."""
_ALIGNMENT = 64
"""Kernels read such weights with instructions that need this alignment, or crash. ONNX Runtime does
not align them in the file: one weight of another size before them is enough."""


def optimized_graph(
    artifact: Artifact, record: GraphRecord, providers: Sequence[Provider]
) -> Path | None:
    """Return the file of the optimized graph, and make it if it is not in the store.

    Return None if there is no optimized graph, because the provider is not the CPU (others optimize
    by themselves) or the store cannot be written. Load the artifact's own graph then.
    """
    if [provider.name for provider in providers] != [CPU]:
        return None
    fingerprint = _fingerprint(artifact, record)
    if fingerprint is None:
        return None
    try:
        graph, _ = Store().obtain(
            GRAPHS,
            fingerprint,
            artifact.manifest.source.id,
            lambda out: _make(artifact, record, fingerprint, out),
        )
    except (EngineryError, OSError):  # a full or read-only store; run without the optimized graph
        return None
    return graph.model


def _fingerprint(artifact: Artifact, record: GraphRecord) -> Fingerprint | None:
    files = artifact.manifest.files
    names = (record.file, *record.data_files)
    if any(name not in files for name in names):
        return None  # an .onnx file outside an artifact
    return Fingerprint(
        STAGE,
        {
            "stage_version": _STAGE_VERSION,
            "graph": combined_sha256({name: files[name].sha256 for name in names}),
            "processor": _processor(),
            **runtime_version(),
        },
    )


def _make(
    artifact: Artifact, record: GraphRecord, fingerprint: Fingerprint, out: Path
) -> OptimizedGraph:
    import onnxruntime as ort

    inputs = InputFiles()
    with inputs.recording():  # the key has the digests of the manifest
        artifact.check_files()
    check_allocations(artifact.path / record.file, data_files=record.data_beside)

    def optimize(directory: Path, *, pack: bool) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 4  # it warns that the file is only for this processor
        options.optimized_model_filepath = str(directory / MODEL_FILE)
        use_exact_int8(options)
        prefix = "session.optimized_model_external_initializers_"
        options.add_session_config_entry(f"{prefix}file_name", _DATA)
        options.add_session_config_entry(f"{prefix}min_size_in_bytes", _SMALLEST_BYTES)
        entry = "save_external_prepacked_constant_initializers" if pack else "disable_prepacking"
        options.add_session_config_entry(f"session.{entry}", "1")
        try:
            ort.InferenceSession(
                str(artifact.path / record.file), options, providers=[CPU], enable_fallback=0
            )
        except Exception as error:  # ONNX Runtime raises many unrelated types
            raise EngineryError(f"{record.file} cannot be optimized: {error}") from error

    with staging(out, inputs) as directory:
        # Weights in the layout of the kernels are mapped, too, and shared by all sessions.
        optimize(directory, pack=True)
        offsets = _packed_offsets(directory / MODEL_FILE)
        if any(offset % _ALIGNMENT for offset in offsets):
            optimize(directory, pack=False)
        write_record(directory, fingerprint, artifact.manifest.source.id)
    return OptimizedGraph.open(out)


def has_packed_weights(path: Path) -> bool:
    """Return True if an optimized graph has weights as its kernels read them, to be mapped."""
    return bool(_packed_offsets(path))


def _packed_offsets(path: Path) -> list[int]:
    return [int(offset) for offset in _PACKED.findall(path.read_bytes())]


def _processor() -> str:
    """Describe the processor, on which the optimized graph depends: model and instruction sets."""
    model, features = read_cpuinfo()
    return " ".join((platform.machine(), model or platform.processor(), *features))

"""Build one engine: check the graph, build into the store, copy into the artifact.

Before anything is built, TensorRT's parser and this package's lint rules check the graph, so that
errors name the unsupported nodes.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from enginery.core.artifact.artifact import Artifact, link_or_copy, staging
from enginery.core.artifact.engine import Engine
from enginery.core.artifact.engine_record import (
    ENGINE_FILE,
    ENGINES,
    EngineRecord,
    GpuRecord,
    plan_name,
    wrapper_name,
)
from enginery.core.artifact.fingerprint import sha256_of
from enginery.core.errors import ArtifactError, ProviderError
from enginery.core.options import options_dict
from enginery.core.progress import SILENT, Progress
from enginery.core.store.store import ENGINES as STORED
from enginery.core.store.store import Store
from enginery.engine.config import BuildConfig
from enginery.engine.ep_context import write_wrapper
from enginery.engine.requests import EngineRequest, size_limits
from enginery.runtime.tensorrt.build import BuildRequest
from enginery.runtime.tensorrt.options import Flavor, get_flavor
from enginery.runtime.tensorrt.process import build_plan, coverage
from enginery.runtime.tensorrt.reports import Refusal

LAYER_LIST = "layers.json"


@dataclass(frozen=True)
class GraphCoverage:
    """TensorRT's support of the nodes of one graph."""

    graph: str
    total: int
    """Number of nodes; 0 if a lint rule rejects the graph before TensorRT parses it."""
    taken: int
    """Number of nodes that TensorRT supports."""
    partitions: int
    """Number of subgraphs that TensorRT supports."""
    refused: tuple[Refusal, ...]

    @property
    def complete(self) -> bool:
        """True if TensorRT supports every node."""
        return not self.refused

    def error(self, *, several: bool) -> ProviderError:
        """Return an error that names the unsupported nodes, grouped by reason.

        Args:
            several: the artifact has other graphs, which can be built without this one.
        """
        by_reason: dict[tuple[str, str], list[Refusal]] = {}
        for node in self.refused:
            by_reason.setdefault((node.op_type, node.reason), []).append(node)
        groups = [
            f"{group[0]}{f' ({len(group) - 1} more like it)' if len(group) > 1 else ''}"
            for group in by_reason.values()
        ]
        support = (
            f"TensorRT supports {self.taken} of {self.total} nodes"
            if self.total
            else "not supported"
        )
        remedies = [node.remedy for node in self.refused if node.remedy][:1]
        if several:
            remedies.append("To build only the other graphs: --allow-partitions")
        return ProviderError(
            f"{self.graph}: {support}, but an engine needs the whole graph: {'; '.join(groups)}",
            do=" ".join(remedies),
        )


def find_coverage(path: Path, name: str, flavor: Flavor) -> GraphCoverage:
    """Find out which nodes of an ONNX file TensorRT supports, after the rules of `enginery lint`.

    Raises:
        SourceError: the file is not an ONNX model.
        MissingPackageError: the flavor is not installed.
        ProviderError: TensorRT crashed.
    """
    # Importing this and onnx takes half the time of a cache hit, which needs neither.
    from enginery.passes.lint.lint import lint_onnx

    faults = lint_onnx(path, parser=False).errors
    if faults:
        refused = tuple(Refusal(f.node, "", f.problem, f.remedy) for f in faults)
        return GraphCoverage(name, 0, 0, 0, refused)
    supported = coverage(path, flavor=flavor)
    return GraphCoverage(
        name, supported.total, supported.taken, supported.partitions, supported.refused
    )


def find_engine(request: EngineRequest) -> Engine | None:
    """Return the engine from the store, or None."""
    return Store().find(STORED, request.fingerprint, request.targets)


def obtain_engine(
    artifact: Artifact,
    request: EngineRequest,
    config: BuildConfig,
    *,
    force: bool = False,
    progress: Progress = SILENT,
) -> tuple[Engine, bool]:
    """Return the engine, from the store or newly built.

    Returns:
        The engine, and True if it was built by this call.

    Raises:
        ProviderError: TensorRT does not support the graph, cannot build it, or crashed.
    """
    return Store().obtain(
        STORED,
        request.fingerprint,
        request.targets,
        lambda out: _build(artifact, request, config, out, progress),
        force=force,
        progress=progress,
    )


def _build(
    artifact: Artifact, request: EngineRequest, config: BuildConfig, out: Path, progress: Progress
) -> Engine:
    """Build an engine into the store. `engine.json` is written last."""
    graph, fields = request.graph, request.fingerprint.fields
    shutil.rmtree(out, ignore_errors=True)  # a forced rebuild; `staging` replaces only artifacts
    with (
        staging(out, request.fingerprint.inputs) as directory,
        progress.task(f"building an engine of {graph.file}"),
    ):
        plan = directory / plan_name(graph.file)
        built = build_plan(
            artifact.path / graph.file,
            BuildRequest(
                request.profiles,
                capabilities=request.capabilities,
                flavor=get_flavor(config.flavor),
                options=config.options,
                limits=size_limits(artifact),
            ),
            plan_path=plan,
        )
        layers = [asdict(layer) for layer in built.layers]
        (directory / LAYER_LIST).write_text(_json(layers), encoding="utf-8")
        record = EngineRecord(
            flavor=config.flavor,
            tensorrt=built.tensorrt,
            capabilities=built.capabilities,
            gpu=GpuRecord(name=fields.get("gpu", ""), driver=fields.get("driver", "")),
            hardware_compatibility=config.hardware_compatibility,
            profiles=built.profiles,
            graph=graph.file,
            graph_sha256=request.graph_sha256,
            key=request.fingerprint.key,
            fields=fields,
            plan=plan.name,
            plan_sha256=sha256_of(plan),
            plan_size_bytes=plan.stat().st_size,
            wrapper=wrapper_name(graph.file),
            inputs=graph.inputs,
            outputs=graph.outputs,
            layers=built.counts(),
            layer_list=LAYER_LIST,
            fused_attentions=built.fused_attentions,
            activation_bytes=built.activation_bytes,
            weights_bytes=built.weights_bytes,
            seconds=built.seconds,
            peak_rss_bytes=built.peak_rss_bytes,
            warnings=built.warnings,
            options=options_dict(config.options),
        )
        (directory / ENGINE_FILE).write_bytes(record.to_bytes())
    return Engine.open(out)


def place_engine(engine: Engine, artifact: Path) -> Path:
    """Copy an engine and its ONNX wrapper into a staged artifact; return its directory.

    Raises:
        ArtifactError: another process removed the engine from the store.
    """
    directory = artifact / ENGINES / engine.name
    shutil.rmtree(directory, ignore_errors=True)  # from an earlier build
    directory.mkdir(parents=True)
    for file in (engine.record.plan, engine.record.layer_list, ENGINE_FILE):
        try:
            link_or_copy(engine.path / file, directory / file)
        except FileNotFoundError as error:
            raise ArtifactError(
                f"{engine.path / file} is missing: another process removed it from the store.",
                do="Run the same command again.",
            ) from error
    write_wrapper(directory, engine.record)
    return directory


def _json(value: object) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"

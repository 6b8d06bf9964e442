"""The interface of a backend, and the two backends that run ONNX Runtime directly.

For every backend, a run starts with the inputs in host memory and ends with the outputs in host
memory. So the time includes the copies to and from a GPU and the wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from enginery.bench.config import ENGINERY
from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.fingerprint import runtime_version
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import EngineryError, InputError
from enginery.core.model.feeds import Feeds
from enginery.core.shapes import choose_profile
from enginery.core.trust.resource_limits import ResourceLimits, limited_call, read_sizes
from enginery.runtime.engines.padding import dim_sizes
from enginery.runtime.engines.selection import choose_with_engines, reachable_profile, wrapper_path
from enginery.runtime.onnxruntime.binding import BUCKETS, run_options
from enginery.runtime.onnxruntime.runner import (
    OrtRunner,
    RunnerOptions,
    open_session,
    shrink_config,
)
from enginery.runtime.providers.specification import ProviderSpec

Run = Callable[[], object]
"""One inference on inputs that were given before."""


class Backend(Protocol):
    """A model loaded in a backend's process."""

    providers: list[dict[str, Any]]
    """Execution providers of ONNX Runtime, each with its reason; empty for PyTorch."""
    tools: dict[str, str]
    """Package -> version."""
    notes: list[str]

    def prepare(self, feeds: Feeds) -> Run:
        """Return a function that runs these inputs; raise the errors that the first run would."""

    def facts(self) -> dict[str, Any]:
        """Return options, engines and placement of the session, after it has run."""

    def close(self) -> None:
        """Free the model."""


_LABELS = {
    ENGINERY: "enginery's runner",
    "enginery-cpu": "enginery's runner on the CPU",
    "onnxruntime": "onnxruntime.InferenceSession.run",
    "optimum": "Optimum's ORTModel",
    "pytorch": "PyTorch, eager mode",
    "pytorch-compile": "PyTorch, torch.compile",
    "pytorch-fp16": "PyTorch, FP16",
}


@dataclass(frozen=True)
class BackendPlan:
    """A backend on a target: what its process loads, and how."""

    name: str
    """Unique name: `pytorch`, or with several targets `bert: pytorch`."""
    kind: str
    target: str
    """Name of the target."""
    required: bool
    """True if the user named the backend, so that failing to run is an error."""
    providers: tuple[ProviderSpec, ...]
    """Requested providers with their options."""
    device: str
    """PyTorch's device: cpu, or the GPU of the first provider, such as cuda:0."""
    io_binding: bool = True
    cuda_graph: bool = False
    shrink_arena: bool = False
    buckets: int = BUCKETS
    """Number of shapes that keep their GPU buffers and CUDA graphs."""
    threads: int = 0
    """Intra-op threads; 0 for the backend's default."""
    allow_fallback: bool = False
    """Use the next provider if the first is not available."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model, in PyTorch."""
    allow_pickle: bool = False
    """Load pickled weights into PyTorch."""

    @property
    def label(self) -> str:
        """Description for people: `PyTorch, eager mode`."""
        return _LABELS[self.kind]

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> BackendPlan:
        """Return the plan from the JSON values of `asdict`."""
        providers = tuple(ProviderSpec(**provider) for provider in values["providers"])
        return cls(**{**values, "providers": providers})


class EngineryBackend:
    """Inference through `runtime.onnxruntime.runner.OrtRunner`."""

    def __init__(self, artifact: Artifact, record: GraphRecord, plan: BackendPlan) -> None:
        self._runner = OrtRunner(
            artifact,
            RunnerOptions(
                threads=plan.threads,
                io_binding=plan.io_binding,
                cuda_graph=plan.cuda_graph,
                shrink_arena=plan.shrink_arena,
                buckets=plan.buckets,
            ),
            graph=record.file,
            providers=plan.providers,
            allow_fallback=plan.allow_fallback,
        )
        self._cuda_graph = plan.cuda_graph
        self._smallest: Feeds | None = None
        self.providers = [asdict(provider) for provider in self._runner.providers]
        self.tools = runtime_version()
        self.notes: list[str] = []

    def prepare(self, feeds: Feeds) -> Run:
        """Return a function that calls the runner."""
        if self._smallest is None or _elements(feeds) < _elements(self._smallest):
            self._smallest = feeds
        return lambda: self._runner(feeds)

    def note_for(self, feeds: Feeds) -> str:
        """Return a note about the runs on these inputs, after the first one; empty for none."""
        if self._cuda_graph and not self._runner.is_captured(feeds):
            return "ran without a CUDA graph: earlier shapes used all that are kept"
        return ""

    def facts(self) -> dict[str, Any]:
        """Return the engines' names and profiles; without engines, the placement of the nodes."""
        engines = [engine.name for engine in self._runner.engines]
        properties = {"engines": engines, "profiles": [str(p) for p in self._runner.profiles]}
        return properties if engines else {**properties, **self._placement()}

    def _placement(self) -> dict[str, Any]:
        # Multiply-adds are counted in a run on the CPU, so the smallest inputs are used.
        try:
            placement = self._runner.placement(self._smallest)
        except EngineryError as error:
            return {"no_placement": error.message}
        feeds = self._smallest or {}
        shapes = {name: list(array.shape) for name, array in feeds.items()}
        return {"placement": {**placement.as_json(), "counted_on": shapes}}

    def close(self) -> None:
        """Free the sessions."""
        self._runner.close()


class OrtSessionBackend:
    """Inference through `onnxruntime.InferenceSession.run`, on the same graph or engine."""

    def __init__(self, artifact: Artifact, record: GraphRecord, plan: BackendPlan) -> None:
        chosen, engines = choose_with_engines(
            artifact,
            record,
            plan.providers,
            allow_fallback=plan.allow_fallback,
            allow_build=False,
        )
        paths: list[Path] = [wrapper_path(engine) for engine in engines]
        paths = paths or [artifact.path / record.file]
        self._record, self._graph_bytes = record, read_sizes(artifact.path / record.file)[0]
        self._profiles = [reachable_profile(engine.record) for engine in engines]
        self._sessions = [open_session(path, chosen, threads=plan.threads) for path in paths]
        self._shrink = plan.shrink_arena
        self.providers = [asdict(provider) for provider in chosen]
        self.tools = runtime_version()
        self.notes: list[str] = []
        if plan.cuda_graph:
            self.notes.append("no CUDA graph: session.run has no fixed buffers")

    def prepare(self, feeds: Feeds) -> Run:
        """Choose the engine, and return a function that calls `session.run`."""
        sizes = dim_sizes(self._record.inputs, feeds) if self._profiles else {}
        index = choose_profile(self._profiles, sizes) if self._profiles else 0
        session = self._sessions[index]
        names = [spec.name for spec in self._record.outputs]
        limits = ResourceLimits.of_run(self._graph_bytes, feeds)
        # `session.run` does not accept None as run options.
        extra = [run_options(shrink_config(session))] if self._shrink else []

        def run() -> object:
            try:
                with limited_call(self._record.file, lambda: limits):
                    return session.run(names, feeds, *extra)
            except Exception as error:  # ONNX Runtime raises many unrelated types
                shapes = ", ".join(f"{name} {array.shape}" for name, array in feeds.items())
                raise InputError(f"the graph fails on {shapes}: {error}") from error

        return run

    def facts(self) -> dict[str, Any]:
        """Return the options of each provider, including ONNX Runtime's defaults."""
        return {"provider_options": self._sessions[0].get_provider_options()}

    def close(self) -> None:
        """Free the sessions."""
        self._sessions = []


def _elements(feeds: Feeds) -> int:
    return sum(array.size for array in feeds.values())

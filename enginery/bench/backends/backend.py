"""The interface of a backend, and the two backends that run ONNX Runtime directly.

For every backend, a run starts with the inputs in host memory and ends with the outputs in host
memory. So the time includes the copies to and from a GPU and the wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.fingerprint import runtime_version
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import EngineryError, InputError, ProviderError
from enginery.core.model.feeds import Feeds
from enginery.core.shapes import choose_profile
from enginery.core.trust.resource_limits import ResourceLimits, limited_call, read_sizes
from enginery.runtime.engines.padding import dim_sizes
from enginery.runtime.engines.selection import choose_with_engines, reachable_profile, wrapper_path
from enginery.runtime.onnxruntime.binding import run_options
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


@dataclass(frozen=True)
class LoadOptions:
    """How a backend loads its model, besides its plan."""

    threads: int = 0
    """Intra-op threads; 0 for the backend's default."""
    allow_fallback: bool = False
    """Use the next provider if the first is not available."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model, in PyTorch."""
    allow_pickle: bool = False
    """Load pickled weights into PyTorch."""


def plan_providers(plan: Mapping[str, Any]) -> tuple[ProviderSpec, ...]:
    """Return the providers of `BackendPlan.as_json`, with their options."""
    return tuple(
        ProviderSpec(provider["name"], provider["options"]) for provider in plan["providers"]
    )


class EngineryBackend:
    """Inference through `runtime.onnxruntime.runner.OrtRunner`."""

    def __init__(
        self,
        artifact: Artifact,
        record: GraphRecord,
        plan: Mapping[str, Any],
        options: LoadOptions,
    ) -> None:
        self._runner = OrtRunner(
            artifact,
            RunnerOptions(
                threads=options.threads,
                io_binding=plan["io_binding"],
                cuda_graph=plan["cuda_graph"],
                shrink_arena=plan["shrink_arena"],
                buckets=plan["buckets"],
            ),
            graph=record.file,
            providers=plan_providers(plan),
            allow_fallback=options.allow_fallback,
        )
        self._cuda_graph = bool(plan["cuda_graph"])
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

    def __init__(
        self,
        artifact: Artifact,
        record: GraphRecord,
        plan: Mapping[str, Any],
        options: LoadOptions,
    ) -> None:
        chosen, engines = choose_with_engines(
            artifact,
            record,
            plan_providers(plan),
            allow_fallback=options.allow_fallback,
            allow_build=False,
        )
        paths: list[Path] = [wrapper_path(engine) for engine in engines]
        paths = paths or [artifact.path / record.file]
        self._record, self._graph_bytes = record, read_sizes(artifact.path / record.file)[0]
        self._profiles = [reachable_profile(engine.record) for engine in engines]
        self._sessions = [open_session(path, chosen, threads=options.threads) for path in paths]
        self._shrink = bool(plan["shrink_arena"])
        self.providers = [asdict(provider) for provider in chosen]
        self.tools = runtime_version()
        self.notes: list[str] = []
        if plan["cuda_graph"]:
            self.notes.append("no CUDA graph: session.run has no fixed buffers")

    def prepare(self, feeds: Feeds) -> Run:
        """Choose the engine, and return a function that calls `session.run`."""
        session = self.session_for(feeds)
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

    def session_for(self, feeds: Feeds) -> Any:
        """Return the session whose engine accepts the inputs; raise ShapeError if none does."""
        if not self._sessions:
            raise ProviderError("the session is closed.")
        sizes = dim_sizes(self._record.inputs, feeds) if self._profiles else {}
        return self._sessions[choose_profile(self._profiles, sizes) if self._profiles else 0]

    def facts(self) -> dict[str, Any]:
        """Return the options of each provider, including ONNX Runtime's defaults."""
        return {"provider_options": self._sessions[0].get_provider_options()}

    def close(self) -> None:
        """Free the sessions."""
        self._sessions = []


def _elements(feeds: Feeds) -> int:
    return sum(array.size for array in feeds.values())

"""A contender, opened in its own process: host arrays in, host arrays out.

>>> with open_contender(plan, artifact, record, threads=0) as opened:
...     run = opened.prepared(feeds)
...     outputs = run()

What `prepared` returns takes the inputs from the host's memory and has the outputs there when it
returns, so that a GPU is waited for and the copies count, for every contender alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from enginery.bench.config import OURS
from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.fingerprint import runtime_version, tool_versions
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import EngineryError, InputError, MissingPackageError, ProviderError
from enginery.core.model.feeds import Feeds
from enginery.core.shapes import choose_profile
from enginery.runtime.engines.profiles import dim_sizes
from enginery.runtime.engines.selection import choose_with_engines, reachable_profile, wrapper_path
from enginery.runtime.onnxruntime.binding import run_options
from enginery.runtime.onnxruntime.runner import OrtRunner, open_session, shrink_config
from enginery.runtime.providers.specification import ProviderSpec

Run = Callable[[], object]


class Opened(Protocol):
    """What a process asks of its contender."""

    providers: list[dict[str, Any]]
    """ONNX Runtime's, each with its reason; none for PyTorch."""
    tools: dict[str, str]
    """The versions that run it."""
    notes: list[str]

    def prepared(self, feeds: Feeds) -> Run:
        """One inference on these inputs, again and again; raises what the first one would."""

    def facts(self) -> dict[str, Any]:
        """What the session says of itself after it has run: options, engines, placement."""

    def close(self) -> None:
        """Frees it."""


def open_contender(
    plan: Mapping[str, Any],
    artifact: Artifact,
    record: GraphRecord,
    *,
    threads: int,
    allow_fallback: bool,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
) -> Opened:
    """Load the model.

    Args:
        plan: `Plan.as_json`, as it comes through a pipe.
        artifact: what to run.
        record: which graph of it.
        threads: intra-op threads; 0 for the contender's own choice.
        allow_fallback: take a later provider when the first cannot be had.
        trust_remote_code: run Python code that comes with the model, in PyTorch.
        allow_pickle: load pickled weights into PyTorch.

    Raises:
        EngineryError: the contender cannot run, with the reason.
    """
    kind = plan["kind"]
    if kind in (OURS, "enginery-cpu"):
        return OurRunner(artifact, record, plan, threads=threads, allow_fallback=allow_fallback)
    if kind == "onnxruntime":
        return BareSession(artifact, record, plan, threads=threads, allow_fallback=allow_fallback)
    try:
        from enginery.bench.backends import frameworks
    except ImportError as error:
        raise MissingPackageError(
            error.name or kind, extra="export", purpose=f"Running {plan['label']}"
        ) from error
    if kind == "optimum":
        return frameworks.OptimumModel(
            artifact,
            record,
            providers_of_plan(plan),
            threads=threads,
            io_binding=plan["io_binding"],
            trust_remote_code=trust_remote_code,
        )
    return frameworks.PyTorchModel(
        artifact,
        record,
        kind,
        plan["device"],
        threads=threads,
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
    )


def providers_of_plan(plan: Mapping[str, Any]) -> tuple[ProviderSpec, ...]:
    """The providers of a plan, with their options."""
    return tuple(ProviderSpec(one["name"], one["options"]) for one in plan["providers"])


class OurRunner:
    """The artifact through `runtime.onnxruntime.runner.OrtRunner`."""

    def __init__(
        self,
        artifact: Artifact,
        record: GraphRecord,
        plan: Mapping[str, Any],
        *,
        threads: int,
        allow_fallback: bool,
    ) -> None:
        self._runner = OrtRunner(
            artifact,
            graph=record.file,
            providers=providers_of_plan(plan),
            allow_fallback=allow_fallback,
            threads=threads,
            io_binding=plan["io_binding"],
            cuda_graph=plan["cuda_graph"],
            shrink_arena=plan["shrink_arena"],
            buckets=plan["buckets"],
        )
        self._cuda_graph = bool(plan["cuda_graph"])
        self._smallest: Feeds | None = None
        self.providers = [asdict(provider) for provider in self._runner.providers]
        self.tools = runtime_version()
        self.notes: list[str] = []

    def prepared(self, feeds: Feeds) -> Run:
        """One call of the runner."""
        if self._smallest is None or _elements(feeds) < _elements(self._smallest):
            self._smallest = feeds
        return lambda: self._runner(feeds)

    def note_on(self, feeds: Feeds) -> str:
        """What is to be said of the runs on these inputs, once there was one; empty for nothing."""
        if self._cuda_graph and not self._runner.is_captured(feeds):
            return "ran without a CUDA graph: all that are kept were recorded for shapes before it"
        return ""

    def facts(self) -> dict[str, Any]:
        """The engines' names and profiles; without engines, which provider runs which nodes."""
        engines = [engine.name for engine in self._runner.engines]
        found = {"engines": engines, "profiles": [str(p) for p in self._runner.profiles]}
        return found if engines else {**found, **self._placed()}

    def _placed(self) -> dict[str, Any]:
        """On the smallest inputs that were run: multiply-adds are counted on the CPU."""
        try:
            placement = self._runner.placement(self._smallest)
        except EngineryError as error:
            return {"no_placement": error.message}
        feeds = self._smallest or {}
        shapes = {name: list(array.shape) for name, array in feeds.items()}
        return {"placement": {**placement.as_json(), "counted_on": shapes}}

    def close(self) -> None:
        """Frees the sessions."""
        self._runner.close()


class BareSession:
    """`onnxruntime.InferenceSession.run` on the same graph or engine, and nothing around it."""

    def __init__(
        self,
        artifact: Artifact,
        record: GraphRecord,
        plan: Mapping[str, Any],
        *,
        threads: int,
        allow_fallback: bool,
    ) -> None:
        chosen, engines = choose_with_engines(
            artifact,
            record,
            providers_of_plan(plan),
            allow_fallback=allow_fallback,
            allow_build=False,
        )
        paths: list[Path] = [wrapper_path(engine) for engine in engines]
        paths = paths or [artifact.path / record.file]
        self._record = record
        self._profiles = [reachable_profile(engine.record) for engine in engines]
        self._sessions = [open_session(path, chosen, threads=threads) for path in paths]
        self._shrink = bool(plan["shrink_arena"])
        self.providers = [asdict(provider) for provider in chosen]
        self.tools = runtime_version()
        self.notes: list[str] = []
        if plan["cuda_graph"]:
            self.notes.append("without a CUDA graph, which session.run has no fixed buffers for")

    def prepared(self, feeds: Feeds) -> Run:
        """One `session.run`; the engine is chosen here, once."""
        session = self.session_for(feeds)
        names = [spec.name for spec in self._record.outputs]
        # A session takes no `None` for the options of a run.
        options = [run_options(shrink_config(session))] if self._shrink else []

        def run() -> object:
            try:
                return session.run(names, feeds, *options)
            except Exception as error:  # ONNX Runtime raises many unrelated types
                shapes = ", ".join(f"{name} {array.shape}" for name, array in feeds.items())
                raise InputError(f"the graph fails on {shapes}: {error}") from error

        return run

    def session_for(self, feeds: Feeds) -> Any:
        """The session whose engine takes the inputs; raises ShapeError where none does."""
        if not self._sessions:
            raise ProviderError("the session is closed.")
        sizes = dim_sizes(self._record.inputs, feeds) if self._profiles else {}
        return self._sessions[choose_profile(self._profiles, sizes) if self._profiles else 0]

    def facts(self) -> dict[str, Any]:
        """The options that ONNX Runtime gave each provider, its own defaults included."""
        return {"provider_options": self._sessions[0].get_provider_options()}

    def close(self) -> None:
        """Frees the sessions."""
        self._sessions = []


def _elements(feeds: Feeds) -> int:
    return sum(array.size for array in feeds.values())


def torch_tools() -> dict[str, str]:
    """The versions that run PyTorch's side."""
    return tool_versions(["torch", "transformers"])

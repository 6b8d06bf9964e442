"""Run a graph of an artifact in ONNX Runtime.

    with OrtRunner(artifact) as runner:
        outputs = runner({"input_ids": ids, "attention_mask": mask})

ONNX Runtime's own silent fallback to the CPU is off: if a requested provider is not in the session,
that is an error. TensorRT's providers get engines that were built ahead of time, with one session
for each engine; building an engine during loading requires `allow_build`. On NVIDIA's providers,
inputs and outputs are bound to buffers on the GPU.

With a ladder, callers round the sizes of their inputs up (`padded_shape`), and on CUDA the run of
each rung is recorded as a CUDA graph, by its first run or by `record_rungs`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.engine import Engine
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.closing import Closeable
from enginery.core.errors import InputError, ProviderError
from enginery.core.model.feeds import FeedLimits, make_feeds
from enginery.core.shapes import Profile, TensorSpec, canonical_dim, choose_profile, dynamic_dims
from enginery.core.trust.resource_limits import ResourceLimits, limited_call
from enginery.runtime.decoder_graphs import has_fixed_cache
from enginery.runtime.engines.padding import dim_sizes, max_rows, padded_sizes
from enginery.runtime.engines.selection import choose_with_engines, reachable_profile, wrapper_path
from enginery.runtime.onnxruntime.binding import (
    BUCKETS,
    UNRECORDED,
    BindingOptions,
    DeviceBinding,
    run_options,
)
from enginery.runtime.onnxruntime.capture_lock import CAPTURE_LOCK
from enginery.runtime.onnxruntime.cuda_graphs import (
    NOT_RECORDED,
    CaptureStatistics,
    capture_obstacles,
    has_attention,
    switched_on,
    waiting_nodes,
    with_cuda_graph,
)
from enginery.runtime.onnxruntime.device_values import (
    Device,
    device_of,
    read_value,
    shape_only_array,
)
from enginery.runtime.onnxruntime.ladder import Ladder
from enginery.runtime.onnxruntime.optimized_graph import has_packed_weights, optimized_graph
from enginery.runtime.onnxruntime.placement import Placement, read_placement
from enginery.runtime.onnxruntime.session import check_interface, new_session, run_limits
from enginery.runtime.providers.availability import ONNXRUNTIME, require_onnxruntime
from enginery.runtime.providers.known import CUDA
from enginery.runtime.providers.selection import Provider, with_dynamic_shapes
from enginery.runtime.providers.specification import (
    CUDA_GRAPH_OPTIONS,
    Providers,
    check_run_options,
    parse_providers,
)

Feeds = Mapping[str, NDArray[Any]]
Outputs = dict[str, NDArray[Any]]

_SHRINK = "memory.enable_memory_arena_shrinkage"
_TOKENS = 16
_SHAPES = 4096
"""Number of shapes whose padded ones are remembered."""
_OFF_LADDER = -1
"""Stands for the session of inputs off the ladder among the indices of sessions."""
_REPEATED = 3
"""Run of a shape from which it is recorded, if not every size has rungs."""
_KERNELS_WITHOUT_PLANS = "3"
"""ONNX Runtime's flash and memory-efficient attention; where neither takes the mask, unfused."""


Spinning = Literal["always", "in runs", "never"]
"""When intra-op threads without work wait in busy loops."""


@dataclass(frozen=True)
class RunnerOptions:
    """How an `OrtRunner` runs its graph: threads, memory, and CUDA graphs."""

    threads: int = 0
    """Intra-op threads; 0 for ONNX Runtime's default, one per physical core."""
    lone_threads: int = 0
    """Intra-op threads of a run that overlaps no other, in a second session; 0 for none.

    The session is opened only with `keep_optimized` and for more threads than `threads`, if both
    can map the same weights. Under load, runs overlap with short gaps: after a run that did, the
    next one is in the first session in any case."""
    io_binding: bool = True
    """On NVIDIA's providers, keep inputs and outputs in buffers on the GPU."""
    cuda_graph: bool = False
    """Record the run of each shape as a CUDA graph and replay it.

    The graph is loaded twice, first for a run on synthetic inputs that checks the placement. Each
    thread records its own, and while it does, other CUDA work of the process fails; only that of
    this package's sessions is held back."""
    shrink_arena: bool = False
    """After each run free the memory beyond the arena's first chunk, so that one large batch does
    not occupy it forever. Each run allocates again."""
    keep_optimized: bool = False
    """On the CPU, load the graph that ONNX Runtime has optimized for this processor from the store;
    the first time, make it."""
    spinning: bool = True
    """Intra-op threads wait in busy loops. This helps a single caller, but takes cores from several
    concurrent ones."""
    buckets: int = BUCKETS
    """Number of combinations of input shapes that keep their buffers on the GPU; with `cuda_graph`,
    this many are recorded, and others run without a CUDA graph."""
    ladder: Ladder | bool = False
    """True for the default ladder on CUDA, if the graph's batch is dynamic; or a ladder, on any
    provider. Rungs are recorded as CUDA graphs if every node can be, which `notes` says."""


class OrtRunner(Closeable):
    """A graph in ONNX Runtime. A context manager; closing frees its sessions.

    There is one session, or one for each engine with TensorRT; an input runs in the session whose
    profile covers it.
    """

    def __init__(
        self,
        artifact: Artifact,
        options: RunnerOptions = RunnerOptions(),
        *,
        graph: str = "",
        providers: Providers = ("cpu",),
        allow_fallback: bool = False,
        allow_build: bool = False,
    ) -> None:
        """Open the sessions.

        Args:
            artifact: the artifact.
            options: threads, memory and CUDA graphs.
            graph: file name of the graph; empty for the first.
            providers: names in order of preference, `("tensorrt", "cuda", "cpu")`, or the result of
                `parse_providers` with options; `cuda.gpu_mem_limit` limits the memory of CUDA's
                arena.
            allow_fallback: use a later provider if the first is unavailable or no engine fits.
            allow_build: if no engine fits, let TensorRT's provider build one while loading, and
                again for each input that does not fit; the results are not stored.

        Raises:
            MissingPackageError: no build of ONNX Runtime is installed.
            ProviderError: the provider is unavailable or rejects the model, no engine of the
                artifact runs on this GPU, or a node prevents CUDA graphs.
            OptionError: an option of a provider is invalid, or options exclude each other; see
                `check_run_options`.
            ArtifactError: a file of an engine is missing or altered; or the graph is damaged, does
                not match the manifest, or would allocate too much memory.
        """
        self.record: GraphRecord = artifact.graph(graph) if graph else artifact.manifest.graphs[0]
        require_onnxruntime("Running a model", ONNXRUNTIME)
        specs = parse_providers(providers)
        check_run_options(
            specs,
            io_binding=options.io_binding,
            cuda_graph=options.cuda_graph,
            shrink_arena=options.shrink_arena,
        )
        self._options = options
        self.providers, self.engines = choose_with_engines(
            artifact,
            self.record,
            specs,
            allow_fallback=allow_fallback,
            allow_build=allow_build,
        )
        # ONNX Runtime reaches only the first profile of an engine, so there is a session for each.
        self.profiles: list[Profile] = [reachable_profile(e.record) for e in self.engines]
        """Profile of each session; empty without engines."""
        self._limits = FeedLimits.from_artifact(artifact)
        self.notes: list[str] = []
        """Choices made for this session, with their reasons."""
        if not self.engines:
            # The kernels of an engine are fixed; CUDA's provider may search for those of
            # convolutions at each new shape.
            self.providers = with_dynamic_shapes(
                self.providers, dynamic=bool(dynamic_dims(self.record.inputs))
            )
        self.ladder = self._choose_ladder()
        """The sizes that callers round up to; None without."""
        path = artifact.path / self.record.file
        self._files = [artifact.path / name for name in (self.record.file, *self.record.data_files)]
        self._paths = [wrapper_path(engine) for engine in self.engines] or [path]
        self.records_steps = False
        """Whether the session records bound runs as CUDA graphs, by their `gpu_graph_id`; a decoder
        with a fixed cache does that."""
        self._lone_session: Any = None
        self._capture = False
        self._running, self._overlapped = 0, False
        self._running_lock = threading.Lock()
        has_steps = has_fixed_cache(self.record)
        # A decoder with a fixed cache records its steps itself, by their graph ids.
        cuda_graph = options.cuda_graph and not has_steps
        if cuda_graph:
            self.providers = with_cuda_graph(
                [(path, self._synthetic_feeds(index)) for index, path in enumerate(self._paths)],
                self.providers,
            )
        self._open = partial(
            open_session,
            threads=options.threads,
            spinning="always" if options.spinning else "never",
            record=self.record,
        )
        optimized = (
            optimized_graph(artifact, self.record, self.providers)
            if options.keep_optimized
            else None
        )
        if self.engines:
            self._sessions = [
                open_engine(engine, self.providers, threads=options.threads, record=self.record)
                for engine in self.engines
            ]
        else:
            # With `cuda_graph`, what cannot be recorded is an error and not a note.
            records = self.ladder is not None and options.io_binding and not options.cuda_graph
            session = self._open_recording(path) if records or has_steps else None
            self._capture = session is not None and not has_steps
            self.records_steps = session is not None and has_steps
            # A recording session has the graph's own file: only the CPU has an optimized one.
            session = session or self._open(
                optimized or path, self.providers, optimize=optimized is None
            )
            self._sessions = [session]
            has_lone_runs = options.lone_threads > options.threads
            if optimized and has_lone_runs and has_packed_weights(optimized):
                self._lone_session = open_session(
                    optimized,
                    self.providers,
                    threads=options.lone_threads,
                    optimize=False,
                    spinning="in runs",  # other runs need the cores
                    record=self.record,
                )
        self._capture = self._capture or cuda_graph
        self._shrink = options.shrink_arena
        self._prepare_bindings()

    def _prepare_bindings(self) -> None:
        """Prepare the bindings of the sessions, which the first runs make."""
        options = self._options
        self._buckets = options.buckets
        if self.ladder is not None:
            self._buckets = max(options.buckets, self.ladder.max_graphs)
        # For a small batch this would take longer than padding it.
        self._cached_padded_shape = lru_cache(_SHAPES)(self._padded_shape)
        self._statistics = [CaptureStatistics() for _ in (*self._sessions, None)]
        """Of each session; the last one of that for inputs off the ladder."""
        self._bindings: dict[tuple[int, tuple[str, ...]], DeviceBinding] = {}
        """Bindings by session and outputs."""
        self._other_session: Any = None
        """The session for inputs off the ladder, opened by the first of them."""
        self._rungs_are_all = self.ladder is not None and all(
            canonical_dim(name) in self.ladder.sizes for name in dynamic_dims(self.record.inputs)
        )
        """Whether every dynamic size is rounded, so that no shape comes only once."""
        self._binding_lock = threading.Lock()
        self._on_gpu = self.device.kind != "cpu"
        self._binds = options.io_binding and self._on_gpu

    def __call__(self, feeds: Feeds, outputs: Sequence[str] = ()) -> Outputs:
        """Run the graph.

        Args:
            feeds: an array for each input, of its dtype and rank.
            outputs: names of the outputs to return, in the order of the graph; empty for all.

        Raises:
            InputError: an input is missing, unknown, or of the wrong dtype or rank, or the graph
                fails.
            ShapeError: no engine's profile covers the shapes; the message has the nearest profile.
        """
        if not self._sessions:
            raise ProviderError("the runner is closed.")
        outputs = tuple(outputs)
        # The steady state of a server on CUDA: these shapes have been recorded by this thread.
        # `replay` returns None in any other case, and the checks below report what is wrong.
        if self._capture and not self.profiles and (0, outputs) in self._bindings:
            replayed = self._bindings[0, outputs].replay(feeds)
            if replayed is not None:
                return replayed
        arrays = {
            spec.name: _checked_input(feeds, spec.name, spec.dtype, len(spec.dims))
            for spec in self.record.inputs
        }
        if unknown := [name for name in feeds if name not in arrays]:
            expected = ", ".join(str(spec) for spec in self.record.inputs)
            raise InputError(f"unknown input '{unknown[0]}'; the graph takes {expected}.")
        return self._run(self._index(arrays), arrays, outputs)

    def _run(self, index: int, arrays: Feeds, outputs: tuple[str, ...] = ()) -> Outputs:
        """Run one of the sessions on checked arrays."""
        if self._binds:
            return self._choose_binding(index, arrays, outputs)(arrays)
        names = [spec.name for spec in self._output_specs(outputs)]
        try:
            with (
                self._choose_session(index) as session,
                # Without binding, ONNX Runtime allocates on the GPU and copies in this run, which
                # would break the recording of a CUDA graph in another thread.
                CAPTURE_LOCK.running() if self._on_gpu else nullcontext(),
                limited_call(self._paths[index], lambda: self._run_limits(arrays)),
            ):
                # A session does not accept None as run options.
                options = [run_options(self._run_config(session))] if self._shrink else []
                values = session.run(names, arrays, *options)
        except Exception as error:  # ONNX Runtime raises many unrelated types
            shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
            raise InputError(f"the graph fails on {shapes}: {error}") from error
        return dict(zip(names, values, strict=True))

    def _run_limits(self, arrays: Feeds) -> ResourceLimits:
        file_bytes = sum(path.stat().st_size for path in self._files if path.is_file())
        return run_limits(file_bytes, self.providers[0], arrays)

    @contextmanager
    def _choose_session(self, index: int) -> Iterator[Any]:
        """Yield the session of an index, or the one for runs that overlap no other."""
        if self._lone_session is None:
            yield self._sessions[index]
            return
        with self._running_lock:
            # Gaps between requests under load are short: a run that is alone after one that was not
            # would compete with the next ones for the cores, so it does not switch sessions yet.
            alone = not self._running and not self._overlapped
            self._overlapped = bool(self._running)
            self._running += 1
        try:
            yield self._lone_session if alone else self._sessions[index]
        finally:
            with self._running_lock:
                self._running -= 1

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Run as under load: in the session of runs that overlap."""
        with self._running_lock:
            self._running += 1
        try:
            yield
        finally:
            with self._running_lock:
                self._running -= 1
                # These runs were made to look concurrent, which says nothing about the next one.
                self._overlapped = False

    def run_on_device(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Run the graph and leave the outputs on the device of the session.

        Args:
            feeds: for each input a numpy array, or a tensor with DLPack, such as torch's. Tensors
                on the session's device are not copied.

        Returns:
            An `onnxruntime.OrtValue` for each output, for `torch.from_dlpack`; the next run on the
            same shapes overwrites it.

        Raises:
            InputError, ShapeError: see `__call__`; or an input is on another device.
        """
        if not self._sessions:
            raise ProviderError("the runner is closed.")
        # Several sessions exist only with engines, one for each; the shapes choose among them.
        index = 0
        if self.profiles:
            device = device_of(self._sessions[0])
            values = {
                spec.name: read_value(spec, feeds[spec.name], device)
                for spec in self.record.inputs
                if spec.name in feeds
            }
            if len(values) == len(self.record.inputs):  # the binding reports missing ones
                index = self._index(
                    {name: shape_only_array(value) for name, value in values.items()}
                )
        return self._binding(index, ()).run(feeds)

    def run_values(self, feeds: Mapping[str, Any], outputs: Sequence[str]) -> dict[str, Any]:
        """Run the graph on values that stay where they are, such as a decoder's cache.

        Args:
            feeds: for each input a numpy array or an `onnxruntime.OrtValue`. They are not checked.
            outputs: names of the outputs to compute.

        Returns:
            An `onnxruntime.OrtValue` for each output, which no later run overwrites.

        Raises:
            InputError: the graph fails.
            ShapeError: no engine's profile covers the shapes.
        """
        import onnxruntime as ort

        if not self._sessions:
            raise ProviderError("the runner is closed.")
        values = {
            name: ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(value))
            if isinstance(value, np.ndarray)
            else value
            for name, value in feeds.items()
        }
        index = 0
        if self.profiles:
            index = self._index({name: shape_only_array(v) for name, v in values.items()})
        try:
            return run_values(self._sessions[index], values, list(outputs))
        except Exception as error:  # ONNX Runtime raises many unrelated types
            found_shapes = ", ".join(f"{name} {v.shape()}" for name, v in values.items())
            raise InputError(f"the graph fails on {found_shapes}: {error}") from error

    @property
    def session(self) -> Any:
        """The `onnxruntime.InferenceSession`, for callers that bind its inputs and outputs."""
        if not self._sessions:
            raise ProviderError("the runner is closed.")
        return self._sessions[0]

    @property
    def device(self) -> Device:
        """The device of the session."""
        return device_of(self._sessions[0])

    def placement(self, feeds: Feeds | None = None) -> Placement:
        """Return which provider runs which nodes, from a separate session of the first engine.

        `Placement.notes` lists the compute nodes that run on the CPU although another provider was
        requested.

        Args:
            feeds: inputs to count multiply-adds on; None for one synthetic row of 16 tokens, or of
                the model's usual size.

        Raises:
            ProviderError: the session cannot be opened.
            InputError: the graph fails on the feeds.
        """
        if feeds is None and has_fixed_cache(self.record):
            # Synthetic positions could be outside the cache, which no kernel checks.
            return read_placement(self._paths[0], self.providers)
        if feeds is None:
            feeds = self._synthetic_feeds(0)
        return read_placement(self._paths[0], self.providers, feeds)

    def is_captured(self, feeds: Feeds) -> bool:
        """Return True if runs on inputs of these shapes replay a CUDA graph.

        Raises:
            ShapeError: no engine's profile covers the shapes.
        """
        binding = self._bindings.get((self._index(feeds), ()))
        shapes = tuple(feeds[spec.name].shape for spec in self.record.inputs)
        return binding is not None and shapes in binding.captured

    @property
    def pads(self) -> bool:
        """True if sizes of inputs are to be rounded up by `padded_shape`."""
        return bool(self.profiles) or self.ladder is not None

    @property
    def captures(self) -> CaptureStatistics | None:
        """Counts of the recorded CUDA graphs; None if runs are not recorded."""
        return self._statistics[0] if self._capture else None

    def record_rungs(
        self,
        *,
        max_rows: int,
        longest: int = 0,
        outputs: Sequence[str] = (),
        seconds: float = 0.0,
    ) -> int:
        """Run each rung of the ladder once on made-up inputs, in the current thread.

        On CUDA this records the CUDA graphs, which are those of this thread. Rungs that are not
        recorded, because of their memory, are left out.

        Args:
            max_rows: maximum batch size of the inputs to come.
            longest: their maximum length; 0 for the ladder's.
            outputs: see `__call__`; a CUDA graph is that of its outputs.
            seconds: time after which no further rung is begun; 0 for no limit.

        Returns:
            The number of rungs.

        Raises:
            InputError: the graph fails.
        """
        if self.ladder is None:
            return 0
        # Dims without rungs get the size of the model's config, such as an image's edges, or 1.
        others = dict.fromkeys(dynamic_dims(self.record.inputs), 1) | dict(self._limits.sizes)
        count, until = 0, time.monotonic() + seconds
        for rung in self.ladder.rungs(max_rows=max_rows, longest=longest):
            if seconds and time.monotonic() > until:
                break
            named = {name: rung.get(canonical_dim(name), size) for name, size in others.items()}
            feeds = make_feeds(self.record.inputs, named, self._limits, seed=0)
            if self._capture and not self._binding(0, tuple(outputs)).can_capture(feeds):
                continue  # outputs of gigabytes
            self(feeds, outputs)
            count += 1
        return count

    def _choose_ladder(self) -> Ladder | None:
        ladder = self._options.ladder
        # A decoder with a fixed cache has rungs of its own, an engine its profile. CUDA graphs
        # replay in the arena's memory, which must not shrink.
        shrinks = self._options.shrink_arena
        if not ladder or has_fixed_cache(self.record) or self.engines or shrinks:
            return None
        if isinstance(ladder, Ladder):
            return ladder
        if self.providers[0].name != CUDA:
            return None
        return Ladder.of(self.record.inputs, longest=self._limits.position_limit)

    def _open_recording(self, path: Path) -> Any:
        """Return a session whose runs are recorded as CUDA graphs; None if it cannot be."""
        if self.providers[0].name not in CUDA_GRAPH_OPTIONS:
            return None
        obstacle = ", ".join(waiting_nodes(path))
        if not obstacle:
            providers = switched_on(self.providers)
            try:
                session = self._open(path, providers)
            except ProviderError as error:
                if NOT_RECORDED not in error.message:
                    raise
                # ONNX Runtime does not name the nodes that prevent it. A graph with a fixed cache
                # is not run for them: synthetic positions could be outside the cache.
                nodes = []
                if not has_fixed_cache(self.record):
                    nodes = capture_obstacles(path, self.providers, self._synthetic_feeds(0))
                obstacle = "; ".join(nodes) or error.message
            else:
                self.providers = providers
                return session
        self.notes.append(f"runs are not recorded as CUDA graphs: {obstacle}")
        return None

    def _choose_binding(self, index: int, arrays: Feeds, outputs: tuple[str, ...]) -> DeviceBinding:
        """Return the binding for these inputs and outputs."""
        binding = self._binding(index, outputs)
        # Shapes with buffers are the usual case, and are found without computing their rung.
        if self.ladder is None or binding.has_buffers(arrays):
            return binding
        # A rung is recorded by its first run. Any other shape may never come again, so it goes to
        # the session beside the ladder.
        if self.ladder.is_rung(dim_sizes(self.record.inputs, arrays)):
            return binding
        return self._binding(_OFF_LADDER, outputs)

    def _binding(self, index: int, outputs: tuple[str, ...]) -> DeviceBinding:
        """Return the binding of a session to outputs; the first call makes it."""
        binding = self._bindings.get((index, outputs))
        if binding is not None:
            return binding
        # Look again under the lock: two threads may ask for the same binding at first, and each
        # would allocate all of its buffers.
        with self._binding_lock:
            if (index, outputs) not in self._bindings:
                self._bindings[index, outputs] = self._bind(index, outputs)
            return self._bindings[index, outputs]

    def _bind(self, index: int, outputs: tuple[str, ...]) -> DeviceBinding:
        off_ladder = index == _OFF_LADDER
        if off_ladder and self._other_session is None:
            self._other_session = self._open_other_session()
        session = self._other_session if off_ladder else self._sessions[index]
        shares_session = session is self._sessions[0]
        captures = self._capture and not off_ladder
        config = self._run_config(session)
        # A session that has CUDA graphs switched on records every run that does not say otherwise.
        if self._capture and off_ladder and shares_session:
            config |= UNRECORDED
        return DeviceBinding(
            session,
            self.record.inputs,
            self._output_specs(outputs),
            BindingOptions(
                buckets=self._buckets if captures else BUCKETS,
                capture=captures,
                lenient=self.ladder is not None and not self._options.cuda_graph,
                # Where a shape may come only once, recording it would cost more than it saves.
                capture_at=1 if self.ladder is None or self._rungs_are_all else _REPEATED,
                max_captured_bytes=self.ladder.max_bytes if self.ladder else math.inf,
                run_config=config,
            ),
            statistics=self._statistics[0 if shares_session else index],
        )

    def _open_other_session(self) -> Any:
        """Return the session for inputs beside the ladder, whose shapes are new.

        cuDNN's attention plans each new shape for tens of milliseconds, so that kernels without
        plans are faster there. The user's own choice of kernels applies to every shape.
        """
        head, *below = self.providers
        path = self._paths[0]
        if head.name != CUDA or "sdpa_kernel" in head.options or not has_attention(path):
            return self._sessions[0]
        option, _ = CUDA_GRAPH_OPTIONS[CUDA]
        # Without recordings: a shape that comes once would cost a capture and never be replayed.
        options = {name: value for name, value in head.options.items() if name != option}
        options["sdpa_kernel"] = _KERNELS_WITHOUT_PLANS
        providers = [replace(head, options=options), *below]
        try:
            session = self._open(path, providers)
        except ProviderError as error:  # the weights may not fit into memory twice
            self.notes.append(
                f"inputs off the ladder have no session of their own: {error.message}"
            )
            return self._sessions[0]
        self.notes.append(
            f"inputs off the ladder run in a second session, with sdpa_kernel="
            f"{_KERNELS_WITHOUT_PLANS}"
        )
        return session

    def _output_specs(self, outputs: Sequence[str]) -> list[TensorSpec]:
        """Return the specs of outputs by name; empty for all."""
        return [spec for spec in self.record.outputs if not outputs or spec.name in outputs]

    def _synthetic_feeds(self, index: int) -> Feeds:
        """Return inputs for a session, of its profile's optimum, or one small row."""
        limits = self._limits
        length = max(limits.min_sequence, min(_TOKENS, limits.max_positions))
        sizes = {name: limits.sizes.get(name, length) for name in dynamic_dims(self.record.inputs)}
        sizes |= {name: 1 for name in sizes if canonical_dim(name) == "batch"}
        if self.profiles:
            sizes |= {name: dim.opt for name, dim in self.profiles[index].dims.items()}
        return make_feeds(self.record.inputs, sizes, limits, seed=0)

    def _index(self, arrays: Feeds) -> int:
        """Return the index of the session for these shapes; raise ShapeError if there is none."""
        if not self.profiles:
            return 0
        return choose_profile(self.profiles, dim_sizes(self.record.inputs, arrays))

    def _run_config(self, session: Any) -> dict[str, str]:
        return shrink_config(session) if self._shrink else {}

    def padded_shape(self, spec: TensorSpec, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape to pad an input to, so that it fits a profile or is on the ladder.

        Dims below the minimum of a profile are raised to it. The shape is unchanged if it exceeds
        every profile or the ladder, or without either.
        """
        return self._cached_padded_shape(spec, tuple(shape))

    def _padded_shape(self, spec: TensorSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
        names = [_dim_name(dim) for dim in spec.dims]
        sizes = {name: size for name, size in zip(names, shape, strict=True) if name}
        padded = self.ladder.round_up(sizes) if self.ladder else padded_sizes(self.profiles, sizes)
        return tuple(padded.get(name, size) for name, size in zip(names, shape, strict=True))

    def max_rows(self, spec: TensorSpec, others: Sequence[int]) -> int:
        """Return the maximum number of rows of an input whose other dims have these sizes.

        Return 0 if no profile covers them, the number of rows is fixed, or there are neither
        engines nor a ladder.
        """
        # The rows are always the first dim of an input.
        rows, *names = (_dim_name(dim) for dim in spec.dims)
        sizes = {name: size for name, size in zip(names, others, strict=True) if name}
        if self.ladder:
            return self.ladder.max_rows(sizes)
        return max_rows(self.profiles, rows, sizes)

    def warm_up(self) -> None:
        """Run each engine once at the optimum of its profile, so that the first request is fast.

        Raises:
            ProviderError: an engine fails at its optimum.
        """
        engines = zip(self.engines, self.profiles, strict=True)
        for index, (engine, profile) in enumerate(engines):
            sizes = {name: sizes.opt for name, sizes in profile.dims.items()}
            try:
                # Do not use _index: it may prefer another engine for the same shape.
                self._run(index, make_feeds(self.record.inputs, sizes, self._limits, seed=0))
            except InputError as error:
                raise ProviderError(
                    f"{engine.name} does not run at its own optimum, {profile}: {error.message}",
                    do="Build it again for this GPU, and run: enginery doctor",
                ) from error

    def close(self) -> None:
        """Free the sessions and their memory."""
        # Take the bindings under the lock, so that no run makes one meanwhile, but close them
        # outside of it: each waits for its run in progress.
        with self._binding_lock:
            bindings, self._bindings = list(self._bindings.values()), {}
        for binding in bindings:
            binding.close()
        self._other_session = None
        self._sessions = []
        self._lone_session = None


def run_values(session: Any, values: Mapping[str, Any], outputs: Sequence[str]) -> dict[str, Any]:
    """Run a session on `onnxruntime.OrtValue`s, and leave the outputs on its device."""
    device = device_of(session)
    if device.kind == "cpu":
        return dict(zip(outputs, session.run_with_ort_values(outputs, values), strict=True))
    binding = session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    # Only the device is bound, no buffer: ONNX Runtime allocates each output anew, so that no later
    # run overwrites it.
    for name in outputs:
        binding.bind_output(name, device.kind, device.index)
    with CAPTURE_LOCK.running():
        session.run_with_iobinding(binding)
    return dict(zip(outputs, binding.get_outputs(), strict=True))


def shrink_config(session: Any) -> dict[str, str]:
    """Return the run option that frees the memory of the arenas after a run."""
    device = device_of(session)
    # ONNX Runtime calls CUDA memory `gpu` in this option.
    gpu = f"gpu:{device.index};" if device.kind == "cuda" else ""
    return {_SHRINK: f"{gpu}cpu:0"}


def open_engine(
    engine: Engine,
    providers: Sequence[Provider],
    *,
    threads: int = 0,
    record: GraphRecord | None = None,
) -> Any:
    """Return a session on the wrapper of an engine; see `open_session`."""
    return open_session(wrapper_path(engine), providers, threads=threads, record=record)


def open_session(
    path: Path,
    providers: Sequence[Provider],
    *,
    threads: int = 0,
    optimize: bool = True,
    spinning: Spinning = "always",
    record: GraphRecord | None = None,
) -> Any:
    """Return an `onnxruntime.InferenceSession` on exactly the given providers.

    Args:
        path: path of an ONNX file.
        providers: result of `choose_providers`.
        threads: intra-op threads; 0 for ONNX Runtime's default.
        optimize: False for a graph that ONNX Runtime has already optimized.
        spinning: when threads wait in busy loops.
        record: expected inputs and outputs; None if unknown.

    Raises:
        ArtifactError: the file is damaged, would allocate too much memory, or does not match the
            record.
        ProviderError: a provider did not register, or the graph cannot be loaded.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if spinning == "never":
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    elif spinning == "in runs":
        options.add_session_config_entry("session.force_spinning_stop", "1")
    # The weights of an optimized graph are in other files than those of the record.
    own = record if optimize else None
    session = new_session(path, providers, options, record=own)
    if record is not None:
        check_interface(session, record, path)
    return session


def _dim_name(dim: int | str) -> str:
    """Return the name of a dim in profiles; empty for a fixed size or a sum."""
    return "" if isinstance(dim, int) or "+" in dim else canonical_dim(dim)


def _checked_input(feeds: Feeds, name: str, dtype: str, rank: int) -> NDArray[Any]:
    if name not in feeds:
        raise InputError(f"input '{name}' is missing; found {', '.join(feeds) or 'none'}.")
    array = np.asarray(feeds[name], order="C")  # ascontiguousarray gives scalars a dim
    if array.dtype.name != dtype or array.ndim != rank:
        raise InputError(
            f"{name}: found {array.dtype.name} with {array.ndim} dims {array.shape}, "
            f"expected {dtype} with {rank} dims."
        )
    return array

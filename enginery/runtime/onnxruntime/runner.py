"""ONNX Runtime: a graph of an artifact, feeds in, outputs out.

    >>> with OrtRunner(artifact) as runner:
    ...     outputs = runner({"input_ids": ids, "attention_mask": mask})

ONNX Runtime's own silent fallback to the CPU is off: a provider that was requested and is not in
the session is an error. TensorRT's providers are given engines that were built ahead of time, one
session each; a session that would build while it loads needs `allow_build`.
On NVIDIA's providers inputs and outputs are bound to buffers on the GPU; that part has not run on a
GPU yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.engine import Engine
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.closing import Closeable
from enginery.core.errors import InputError, ProviderError
from enginery.core.model.feeds import FeedLimits, make_feeds
from enginery.core.model.files import ModelConfig
from enginery.core.shapes import Profile, TensorSpec, canonical_dim, choose_profile, dynamic_dims
from enginery.runtime.engines.profiles import most_rows, padded_sizes, sizes_of
from enginery.runtime.engines.selection import choose_with_engines, reachable_profile, wrapper_of
from enginery.runtime.onnxruntime.binding import BUCKETS, DeviceBinding, run_options
from enginery.runtime.onnxruntime.cuda_graphs import with_cuda_graph
from enginery.runtime.onnxruntime.device_values import device_of, read_value, shaped_like
from enginery.runtime.onnxruntime.optimized_graph import optimized_graph
from enginery.runtime.onnxruntime.placement import Placement, read_placement
from enginery.runtime.onnxruntime.session import new_session, require_interface
from enginery.runtime.providers.selection import Provider
from enginery.runtime.providers.specification import (
    Providers,
    check_run_options,
    parse_providers,
)

Feeds = Mapping[str, NDArray[Any]]
Outputs = dict[str, NDArray[Any]]

_SHRINK = "memory.enable_memory_arena_shrinkage"
_TOKENS = 16


class OrtRunner(Closeable):
    """ONNX Runtime over one graph. A context manager; closing frees its sessions.

    There is one session, or under TensorRT one for each engine; a request runs in the one whose
    profile takes it.
    """

    def __init__(
        self,
        artifact: Artifact,
        *,
        graph: str = "",
        providers: Providers = ("cpu",),
        allow_fallback: bool = False,
        allow_build: bool = False,
        threads: int = 0,
        io_binding: bool = True,
        cuda_graph: bool = False,
        shrink_arena: bool = False,
        keep_optimized: bool = False,
        spinning: bool = True,
        buckets: int = BUCKETS,
    ) -> None:
        """Open the sessions.

        Args:
        artifact: what to run.
        graph: which of several graphs; empty for the first.
        providers: names in order, `("tensorrt", "cuda", "cpu")`, or `parse_providers(…)` with the
            providers' options; `cuda.gpu_mem_limit` bounds the memory of CUDA's arena.
        allow_fallback: take a later provider when the first cannot be had, or no engine fits it.
        allow_build: where no engine fits, let TensorRT's provider build one while it loads and
            whenever a request does not fit; nothing of it is kept.
        threads: intra-op threads; 0 for ONNX Runtime's choice, one a physical core.
        io_binding: on NVIDIA's providers, keep inputs and outputs in buffers on the GPU.
        cuda_graph: record each shape's run as a CUDA graph and replay it. The graph is loaded
            twice: first for a run on made-up inputs, to see that every node is the provider's.
        shrink_arena: give the memory that a run took beyond the arena's first piece back after
            it, so that one large batch is not held for good. Each run allocates anew.
        keep_optimized: on the CPU, load the graph as ONNX Runtime optimized it for this processor,
            from the store; it is made and put there the first time.
        spinning: intra-op threads look for work in busy loops. It helps one caller and takes the
            cores from several.
        buckets: how many combinations of input shapes keep their buffers on the GPU; with
            `cuda_graph` the first so many are recorded, and others run without.

        Raises:
            ProviderError: the provider cannot be had, or does not take the model; or none of the
                artifact's engines runs on this GPU; or a node keeps CUDA graphs from being made.
            OptionError: an option of a provider does not fit it, or ways of running exclude each
                other: see `specification.check_run_options`.
            ArtifactError: a file of an engine is missing or altered; or the graph is damaged, is
                not the one that the manifest describes, or would allocate an absurd amount of
                memory.
        """
        self.record: GraphRecord = artifact.graph(graph) if graph else artifact.manifest.graphs[0]
        specs = parse_providers(providers)
        check_run_options(
            specs, io_binding=io_binding, cuda_graph=cuda_graph, shrink_arena=shrink_arena
        )
        self.providers, self.engines = choose_with_engines(
            artifact,
            self.record,
            specs,
            allow_fallback=allow_fallback,
            allow_build=allow_build,
        )
        self.profiles: list[Profile] = [reachable_profile(e.record) for e in self.engines]
        """What requests must fit, one for each session; none where no engine is used."""
        self._config = ModelConfig.read(artifact.path)
        path = artifact.path / self.record.file
        self._paths = [wrapper_of(engine) for engine in self.engines] or [path]
        if cuda_graph:
            self.providers = with_cuda_graph(
                [(path, self._made_up(index)) for index, path in enumerate(self._paths)],
                self.providers,
            )
        if self.engines:
            self._sessions = [
                open_engine(engine, self.providers, threads=threads, record=self.record)
                for engine in self.engines
            ]
        else:
            kept = (
                optimized_graph(artifact, self.record, self.providers) if keep_optimized else None
            )
            self._sessions = [
                open_session(
                    kept or path,
                    self.providers,
                    threads=threads,
                    optimize=kept is None,
                    spinning=spinning,
                    record=self.record,
                )
            ]
        self._capture = cuda_graph
        self._buckets = buckets
        self._shrink = shrink_arena
        self._bindings: dict[int, DeviceBinding] = {}
        if io_binding:
            for index, session in enumerate(self._sessions):
                if device_of(session).kind != "cpu":
                    self._bindings[index] = self._bind(session)

    def __call__(self, feeds: Feeds) -> Outputs:
        """Run the graph.

        Args:
            feeds: an array for each input, of its dtype and rank.

        Raises:
            InputError: an input is missing, unknown, or of the wrong dtype or rank, or the graph
                fails on it.
            ShapeError: there are engines, and the shapes are outside the profile of each; the
                message names the nearest. Nothing is built for it.
        """
        if not self._sessions:
            raise ProviderError("the runner is closed.")
        arrays = {
            spec.name: _fitting(feeds, spec.name, spec.dtype, len(spec.dims))
            for spec in self.record.inputs
        }
        if unknown := [name for name in feeds if name not in arrays]:
            expected = ", ".join(str(spec) for spec in self.record.inputs)
            raise InputError(f"unknown input '{unknown[0]}'; the graph takes {expected}.")
        return self._run(self._index(arrays), arrays)

    def _run(self, index: int, arrays: Feeds) -> Outputs:
        """Run one of the sessions on arrays that fit its graph."""
        names = [spec.name for spec in self.record.outputs]
        if index in self._bindings:
            return self._bindings[index](arrays)
        session = self._sessions[index]
        # A session takes no `None` for the options of a run.
        options = [run_options(self._run_config(session))] if self._shrink else []
        try:
            values = session.run(names, arrays, *options)
        except Exception as error:  # ONNX Runtime raises many unrelated types
            shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
            raise InputError(f"the graph fails on {shapes}: {error}") from error
        return dict(zip(names, values, strict=True))

    def run_on_device(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Run the graph and leave the outputs on the device of the session.

        Args:
            feeds: for each input a numpy array, or a tensor that speaks DLPack, as torch's: one
                that is on the session's device is not copied.

        Returns:
            An `onnxruntime.OrtValue` of each output, for `torch.from_dlpack`; the next run on the
            same shapes writes over it.

        Raises:
            InputError, ShapeError: as calling the runner does; or an input is on another device.
        """
        if not self._sessions:
            raise ProviderError("the runner is closed.")
        index = 0
        if self.profiles:
            device = device_of(self._sessions[0])
            values = {
                spec.name: read_value(spec, feeds[spec.name], device)
                for spec in self.record.inputs
                if spec.name in feeds
            }
            if len(values) == len(self.record.inputs):  # else the binding says what is missing
                index = self._index({name: shaped_like(value) for name, value in values.items()})
        if index not in self._bindings:
            self._bindings[index] = self._bind(self._sessions[index])
        return self._bindings[index].run(feeds)

    def placement(self, feeds: Feeds | None = None) -> Placement:
        """Which provider runs which nodes; opens a session for it, as recording would cost.

        Of several engines the first is looked at. `Placement.notes` says which compute nodes
        are on the CPU though another provider was requested.

        Args:
            feeds: what multiply-adds are counted on; None for one made-up row of 16 tokens, or of
                the model's natural size.

        Raises:
            ProviderError: the session cannot be opened.
            InputError: the graph fails on the feeds.
        """
        if feeds is None:
            feeds = self._made_up(0)
        return read_placement(self._paths[0], self.providers, feeds)

    def is_captured(self, feeds: Feeds) -> bool:
        """Whether runs on inputs of these shapes replay a CUDA graph.

        Raises:
            ShapeError: no engine takes the shapes.
        """
        binding = self._bindings.get(self._index(feeds))
        shapes = tuple(feeds[spec.name].shape for spec in self.record.inputs)
        return binding is not None and shapes in binding.captured

    def _made_up(self, index: int) -> Feeds:
        """Inputs for one of the sessions: of its profile's optimum, or one small row."""
        limits = FeedLimits.from_config(self._config)
        length = max(limits.min_sequence, min(_TOKENS, limits.max_positions))
        sizes = {name: limits.sizes.get(name, length) for name in dynamic_dims(self.record.inputs)}
        sizes |= {name: 1 for name in sizes if canonical_dim(name) == "batch"}
        if self.profiles:
            sizes |= {name: dim.opt for name, dim in self.profiles[index].dims.items()}
        return make_feeds(self.record.inputs, sizes, limits, seed=0)

    def _index(self, arrays: Feeds) -> int:
        """The session that takes these shapes; raises ShapeError where none does."""
        if not self.profiles:
            return 0
        return choose_profile(self.profiles, sizes_of(self.record.inputs, arrays))

    def _bind(self, session: Any) -> DeviceBinding:
        return DeviceBinding(
            session,
            self.record.inputs,
            self.record.outputs,
            capture=self._capture,
            run_config=self._run_config(session),
            buckets=self._buckets,
        )

    def _run_config(self, session: Any) -> dict[str, str]:
        return shrink_config(session) if self._shrink else {}

    def padded_shape(self, spec: TensorSpec, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape to pad an input to so that an engine takes it; as it is without engines.

        Dims below the minimum of a profile grow to it. A shape beyond every profile stays.
        """
        names = [_dim_name(dim) for dim in spec.dims]
        sizes = {name: size for name, size in zip(names, shape, strict=True) if name}
        padded = padded_sizes(self.profiles, sizes)
        return tuple(padded.get(name, size) for name, size in zip(names, shape, strict=True))

    def most_rows(self, spec: TensorSpec, others: Sequence[int]) -> int:
        """The most rows that an engine takes of an input whose other dims have these sizes.

        0 where no engine takes them, or the number of rows is fixed, or there are no engines.
        """
        rows, *names = (_dim_name(dim) for dim in spec.dims)
        sizes = {name: size for name, size in zip(names, others, strict=True) if name}
        return most_rows(self.profiles, rows, sizes)

    def warm_up(self) -> None:
        """Run each engine once at its profile's optimum, so that the first request finds it ready.

        Without engines there is nothing to do.

        Raises:
            ProviderError: an engine fails at its own optimum.
        """
        limits = FeedLimits.from_config(self._config)
        engines = zip(self.engines, self.profiles, strict=True)
        for index, (engine, profile) in enumerate(engines):
            sizes = {name: sizes.opt for name, sizes in profile.dims.items()}
            try:
                # Not by choice: another engine may be preferred for the very same shape.
                self._run(index, make_feeds(self.record.inputs, sizes, limits, seed=0))
            except InputError as error:
                raise ProviderError(
                    f"{engine.name} does not run at its own optimum, {profile}: {error.message}",
                    do="Build it again for this GPU, and run: enginery doctor",
                ) from error

    def close(self) -> None:
        """Free the sessions and their memory."""
        for binding in self._bindings.values():
            binding.close()
        self._bindings = {}
        self._sessions = []


def shrink_config(session: Any) -> dict[str, str]:
    """The entry of a run's options that gives its arenas' memory back after it."""
    device = device_of(session)
    # ONNX Runtime's name for CUDA's memory in this option is gpu.
    gpu = f"gpu:{device.index};" if device.kind == "cuda" else ""
    return {_SHRINK: f"{gpu}cpu:0"}


def open_engine(
    engine: Engine,
    providers: Sequence[Provider],
    *,
    threads: int = 0,
    record: GraphRecord | None = None,
) -> Any:
    """A session over the wrapper of an engine; raises what `open_session` raises."""
    return open_session(wrapper_of(engine), providers, threads=threads, record=record)


def open_session(
    path: Path,
    providers: Sequence[Provider],
    *,
    threads: int = 0,
    optimize: bool = True,
    spinning: bool = True,
    record: GraphRecord | None = None,
) -> Any:
    """An `onnxruntime.InferenceSession` on exactly the providers given.

    Args:
        path: an ONNX file.
        providers: as `choose_providers` gives them.
        threads: intra-op threads; 0 for ONNX Runtime's choice.
        optimize: False for a graph that ONNX Runtime has optimized before.
        spinning: whether its threads wait for work in busy loops.
        record: what the session must take and give; None where that is not known.

    Raises:
        ArtifactError: the file is damaged, the graph would allocate an absurd amount of memory, or
            it is not the one of the record.
        ProviderError: a provider did not register, or the graph cannot be loaded.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if not spinning:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # A graph that ONNX Runtime has optimized has its weights in files of its own.
    own = record if optimize else None
    session = new_session(path, providers, options, record=own)
    if record is not None:
        require_interface(session, record, path)
    return session


def _dim_name(dim: int | str) -> str:
    """The name by which profiles know a dim; empty for a fixed one and for a sum."""
    return "" if isinstance(dim, int) or "+" in dim else canonical_dim(dim)


def _fitting(feeds: Feeds, name: str, dtype: str, rank: int) -> NDArray[Any]:
    if name not in feeds:
        raise InputError(f"input '{name}' is missing; found {', '.join(feeds) or 'none'}.")
    array = np.ascontiguousarray(feeds[name])
    if array.dtype.name != dtype or array.ndim != rank:
        raise InputError(
            f"{name}: found {array.dtype.name} with {array.ndim} dims {array.shape}, "
            f"expected {dtype} with {rank} dims."
        )
    return array

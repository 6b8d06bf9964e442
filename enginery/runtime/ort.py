"""ONNX Runtime: a graph of an artifact, feeds in, outputs out.

    >>> with OrtRunner(artifact) as runner:
    ...     outputs = runner({"input_ids": ids, "attention_mask": mask})

ONNX Runtime's own silent fallback to the CPU is off: a provider that was asked for and is not in
the session is an error. TensorRT's providers are given engines that were built ahead of time, one
session each; a session that would build while it loads has to be asked for (`allow_build`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact import Artifact
from enginery.core.closing import Closing
from enginery.core.engine import Engine
from enginery.core.errors import InputError, ProviderError, ShapeError
from enginery.core.feeds import FeedLimits, make_feeds
from enginery.core.json_file import read_json
from enginery.core.manifest import GraphRecord
from enginery.core.profile_choice import choose_profile
from enginery.core.shapes import Profile, TensorSpec, canonical_dim
from enginery.runtime.engines import choose_with_engines, reachable_profile, wrapper_of
from enginery.runtime.obstacles import register_plugin
from enginery.runtime.profiles import most_rows, padded_sizes, sizes_of
from enginery.runtime.provider_names import TENSORRT_RTX
from enginery.runtime.providers import Provider

Feeds = Mapping[str, NDArray[Any]]
Outputs = dict[str, NDArray[Any]]


class OrtRunner(Closing):
    """ONNX Runtime over one graph. A context manager; closing frees its sessions.

    There is one session, or under TensorRT one for each engine; a request runs in the one whose
    profile takes it.
    """

    def __init__(
        self,
        artifact: Artifact,
        *,
        graph: str = "",
        providers: Sequence[str] = ("cpu",),
        allow_fallback: bool = False,
        allow_build: bool = False,
        threads: int = 0,
    ) -> None:
        """Opens the sessions.

        Args:
        artifact: what to run.
        graph: which of several graphs; empty for the first.
        providers: the ordered wish, `("tensorrt", "cuda", "cpu")`.
        allow_fallback: take a later wish when the first cannot be had, or no engine fits it.
        allow_build: where no engine fits, let TensorRT's provider build one while it loads and
            whenever a request does not fit; nothing of it is kept.
        threads: intra-op threads; 0 for ONNX Runtime's choice, one a physical core.

        Raises:
            ProviderError: the provider cannot be had, or does not take the model; or none of the
                artifact's engines runs on this GPU.
            ArtifactError: a file of an engine is missing or altered.
        """
        self.record: GraphRecord = artifact.graph(graph) if graph else artifact.manifest.graphs[0]
        self.providers, self.engines = choose_with_engines(
            artifact, self.record, providers,
            allow_fallback=allow_fallback, allow_build=allow_build,
        )  # fmt: skip
        self.profiles: list[Profile] = [reachable_profile(e.record) for e in self.engines]
        """What requests must fit, one for each session; none where no engine is used."""
        self._config = read_json(artifact.path / "config.json") if self.engines else {}
        if self.engines:
            self._sessions = [open_engine(e, self.providers, threads=threads) for e in self.engines]
        else:
            path = artifact.path / self.record.file
            self._sessions = [open_session(path, self.providers, threads=threads)]

    def __call__(self, feeds: Feeds) -> Outputs:
        """Runs the graph.

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
        arrays = {spec.name: _fitting(feeds, spec.name, spec.dtype, len(spec.dims))
                  for spec in self.record.inputs}  # fmt: skip
        if unknown := [name for name in feeds if name not in arrays]:
            expected = ", ".join(str(spec) for spec in self.record.inputs)
            raise InputError(f"unknown input '{unknown[0]}'; the graph takes {expected}.")
        names = [spec.name for spec in self.record.outputs]
        index = 0
        if self.profiles:
            index = choose_profile(self.profiles, sizes_of(self.record.inputs, arrays))
        try:
            values = self._sessions[index].run(names, arrays)
        except Exception as error:  # ONNX Runtime raises many unrelated types
            shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
            raise InputError(f"the graph fails on {shapes}: {error}") from error
        return dict(zip(names, values, strict=True))

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
        """Runs each engine once at its profile's optimum, so that the first request finds it ready.

        Without engines there is nothing to do.

        Raises:
            ProviderError: an engine fails at its own optimum.
        """
        limits = FeedLimits.from_config(self._config)
        for engine, profile in zip(self.engines, self.profiles, strict=True):
            sizes = {name: sizes.opt for name, sizes in profile.dims.items()}
            try:
                self(make_feeds(self.record.inputs, sizes, limits, seed=0))
            except (InputError, ShapeError) as error:
                raise ProviderError(
                    f"{engine.name} does not run at its own optimum, {profile}: {error.message}",
                    do="Build it again for this GPU, and run: enginery doctor",
                ) from error

    def close(self) -> None:
        """Frees the sessions and their memory."""
        self._sessions = []


def open_engine(engine: Engine, providers: Sequence[Provider], *, threads: int = 0) -> Any:
    """A session over the wrapper of an engine; raises what `open_session` raises."""
    return open_session(wrapper_of(engine), providers, threads=threads)


def open_session(path: Path, providers: Sequence[Provider], *, threads: int = 0) -> Any:
    """An `onnxruntime.InferenceSession` on exactly the providers given.

    Raises:
        ProviderError: a provider did not register, or the graph cannot be loaded.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # errors come back as exceptions; warnings would be noise
    wanted: list[tuple[str, dict[str, str]]] | None = [
        (provider.name, dict(provider.options)) for provider in providers
    ]
    for provider in providers:
        if provider.name == TENSORRT_RTX:
            # A plugin is given by its devices. ONNX Runtime then takes no list of names beside
            # it, and adds the CPU itself.
            devices = register_plugin(provider.name)
            options.add_provider_for_devices(devices, dict(provider.options))
            wanted = None
    try:
        session = ort.InferenceSession(str(path), options, providers=wanted, enable_fallback=0)
    except Exception as error:
        raise ProviderError(f"{path} cannot be loaded by ONNX Runtime: {error}") from error
    session.disable_fallback()  # run() has a fallback of its own
    registered = session.get_providers()
    for provider in providers:
        if provider.name not in registered:
            raise ProviderError(
                f"{provider.name} was asked for but did not register; "
                f"the session has {', '.join(registered)}.",
                do="Run: enginery doctor",
            )
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

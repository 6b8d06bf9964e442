"""ONNX Runtime: a graph of an artifact, feeds in, outputs out.

    >>> with OrtRunner(artifact) as runner:
    ...     outputs = runner({"input_ids": ids, "attention_mask": mask})

ONNX Runtime's own silent fallback to the CPU is off: a provider that was asked for and is not in
the session is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact import Artifact
from enginery.core.closing import Closing
from enginery.core.errors import InputError, ProviderError
from enginery.core.manifest import GraphRecord
from enginery.runtime.obstacles import register_plugin
from enginery.runtime.provider_names import TENSORRT_RTX
from enginery.runtime.providers import Provider, choose_providers

Feeds = Mapping[str, NDArray[Any]]
Outputs = dict[str, NDArray[Any]]


class OrtRunner(Closing):
    """One ONNX Runtime session over one graph. A context manager; closing frees the session."""

    def __init__(
        self,
        artifact: Artifact,
        *,
        graph: str = "",
        providers: Sequence[str] = ("cpu",),
        allow_fallback: bool = False,
        threads: int = 0,
    ) -> None:
        """Opens the session.

        Args:
        artifact: what to run.
        graph: which of several graphs; empty for the first.
        providers: the ordered wish, `("tensorrt", "cuda", "cpu")`.
        allow_fallback: take a later wish when the first cannot be had.
        threads: intra-op threads; 0 for ONNX Runtime's choice, one a physical core.

        Raises:
            ProviderError: the provider cannot be had, or does not take the model.
        """
        self.record: GraphRecord = artifact.graph(graph) if graph else artifact.manifest.graphs[0]
        self.providers: list[Provider] = choose_providers(providers, allow_fallback=allow_fallback)
        self._session: Any = open_session(
            artifact.path / self.record.file, self.providers, threads=threads
        )

    def __call__(self, feeds: Feeds) -> Outputs:
        """Runs the graph.

        Args:
            feeds: an array for each input, of its dtype and rank.

        Raises:
            InputError: an input is missing, unknown, or of the wrong dtype or rank, or the graph
                fails on it.
        """
        if self._session is None:
            raise ProviderError("the runner is closed.")
        arrays = {spec.name: _fitting(feeds, spec.name, spec.dtype, len(spec.dims))
                  for spec in self.record.inputs}  # fmt: skip
        if unknown := [name for name in feeds if name not in arrays]:
            expected = ", ".join(str(spec) for spec in self.record.inputs)
            raise InputError(f"unknown input '{unknown[0]}'; the graph takes {expected}.")
        names = [spec.name for spec in self.record.outputs]
        try:
            values = self._session.run(names, arrays)
        except Exception as error:  # ONNX Runtime raises many unrelated types
            shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
            raise InputError(f"the graph fails on {shapes}: {error}") from error
        return dict(zip(names, values, strict=True))

    def close(self) -> None:
        """Frees the session and its memory."""
        self._session = None


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

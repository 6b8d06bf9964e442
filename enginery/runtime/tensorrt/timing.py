"""Load and save the timing cache of a build, for classic TensorRT.

    cache = attach_timing_cache(config, options, messages)
    plan = builder.build_serialized_network(network, config)
    cache.save(config)

A cache belongs to one version of TensorRT and one type of GPU. TensorRT checks whether a file
matches; if not, the file is neither used nor changed. Several builds may share a file: under a
lock, each merges its results with those of the others, and replaces the file atomically.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from enginery.core.errors import OptionError, ProviderError
from enginery.core.scratch import locked, make_directory, write_atomically
from enginery.runtime.tensorrt.library import Messages
from enginery.runtime.tensorrt.options import BuildOptions


@dataclass
class TimingCache:
    """The timing cache of one build, and its file; without a path, it is not saved."""

    held: Any = None
    """TensorRT's object, which must live as long as the build."""
    path: Path | None = None
    content: bytes = b""
    """Content of the file before the build."""
    warnings: list[str] = field(default_factory=list)

    def save(self, config: Any) -> None:
        """Write the timings of this build, merged with those that other builds have added."""
        if self.path is None:
            return
        learnt = config.get_timing_cache()
        try:
            with locked(self.path, lambda: None):
                present = self.path.read_bytes() if self.path.is_file() else b""
                if present not in (b"", self.content):
                    # Another build has written the file in the meantime; keep its timings as well.
                    others = config.create_timing_cache(present)
                    if others is None or not learnt.combine(others, ignore_mismatch=False):
                        self.warnings.append(_unfit(self.path))
                        return
                content = bytes(learnt.serialize())
                if content != present:
                    write_atomically(self.path, content)
        except OSError as error:
            # The engine is built, so this is only a warning.
            self.warnings.append(f"the timing cache {self.path} was not written: {error.strerror}")


def attach_timing_cache(config: Any, options: BuildOptions, messages: Messages) -> TimingCache:
    """Attach the timing cache in the options to a build.

    Raises:
        OptionError: the file cannot be read.
        ProviderError: the cache is fixed, but does not match this TensorRT and GPU.
    """
    if not options.timing_cache:
        return TimingCache()
    path = Path(options.timing_cache)
    try:
        make_directory(path.parent)
        content = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise OptionError(
            f"option 'timing_cache': {path} cannot be used: {error.strerror}.",
            do="Choose a file in a writable directory.",
        ) from error
    if options.timing_cache_fixed and not content:
        raise OptionError(f"option 'timing_cache': {path} is fixed, but is missing or empty.")
    # A fixed cache gets no path, so that it is not saved.
    if (cache := _load_matching(config, content, messages)) is not None:
        return TimingCache(cache, None if options.timing_cache_fixed else path, content)
    if options.timing_cache_fixed:
        raise ProviderError(
            f"{_unfit(path)}.", do="Pass one that was made on this machine, or let a build make it."
        )
    # The file belongs to another TensorRT or GPU: build without its timings, and leave it as it is.
    empty = config.create_timing_cache(b"")
    config.set_timing_cache(empty, ignore_mismatch=False)
    return TimingCache(empty, warnings=[_unfit(path)])


def _load_matching(config: Any, content: bytes, messages: Messages) -> Any:
    """Return the cache with this content if TensorRT accepts it without errors, or None."""
    before = len(messages.errors())
    cache = config.create_timing_cache(content)
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        return None
    return cache if len(messages.errors()) == before else None


def _unfit(path: Path) -> str:
    return (
        f"the timing cache {path} is invalid or belongs to another TensorRT or GPU; "
        "it was neither used nor changed"
    )

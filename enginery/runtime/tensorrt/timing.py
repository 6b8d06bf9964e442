"""The file of a timing cache: read before a build, written back after it. Classic TensorRT alone.

    >>> cache = attach_timing_cache(config, options, messages)
    >>> plan = builder.build_serialized_network(network, config)
    >>> cache.save(config)

A cache belongs to one version of TensorRT and one kind of GPU. TensorRT says whether a file fits;
one that does not is neither used nor changed. Several builds may share a file: each adds to what
the others have written meanwhile, under a lock, and readers see a whole file at all times.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from enginery.core.artifact.staging import write_atomically
from enginery.core.errors import OptionError, ProviderError
from enginery.runtime.tensorrt.library import Messages
from enginery.runtime.tensorrt.options import BuildOptions


@dataclass
class TimingCache:
    """The cache of one build, and the file that it grows; with no path, nothing is kept."""

    held: Any = None
    """TensorRT's own object, which must live as long as the build."""
    path: Path | None = None
    content: bytes = b""
    """What was in the file before the build."""
    warnings: list[str] = field(default_factory=list)

    def save(self, config: Any) -> None:
        """Writes what the build has learnt, together with what others have since."""
        if self.path is None:
            return
        learnt = config.get_timing_cache()
        try:
            with _lock(self.path):
                present = self.path.read_bytes() if self.path.is_file() else b""
                if present not in (b"", self.content):
                    others = config.create_timing_cache(present)
                    if others is None or not learnt.combine(others, ignore_mismatch=False):
                        self.warnings.append(_unfit(self.path))
                        return
                content = bytes(learnt.serialize())
                if content != present:
                    write_atomically(self.path, content)
        except OSError as error:
            # The engine is built; it must not be lost over this.
            self.warnings.append(f"the timing cache {self.path} was not written: {error.strerror}")


def attach_timing_cache(config: Any, options: BuildOptions, messages: Messages) -> TimingCache:
    """Gives a build the cache that its options name.

    Raises:
        OptionError: its file cannot be read.
        ProviderError: it is fixed, and does not fit this TensorRT and GPU.
    """
    if not options.timing_cache:
        return TimingCache()
    path = Path(options.timing_cache)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path):
            content = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise OptionError(
            f"option 'timing_cache': {path} cannot be used: {error.strerror}.",
            do="Name a file in a directory that can be written.",
        ) from error
    if options.timing_cache_fixed and not content:
        raise OptionError(f"option 'timing_cache': {path} is fixed, and is missing or empty.")
    if (cache := _fitting(config, content, messages)) is not None:
        return TimingCache(cache, None if options.timing_cache_fixed else path, content)
    if options.timing_cache_fixed:
        raise ProviderError(
            f"{_unfit(path)}.", do="Name one that was made here, or let a build make it."
        )
    empty = config.create_timing_cache(b"")
    config.set_timing_cache(empty, ignore_mismatch=False)
    return TimingCache(empty, warnings=[_unfit(path)])


def _fitting(config: Any, content: bytes, messages: Messages) -> Any:
    """The cache of this content, if TensorRT takes it and says nothing against it, or None."""
    before = len(messages.errors())
    cache = config.create_timing_cache(content)
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        return None
    return cache if len(messages.errors()) == before else None


def _lock(path: Path) -> FileLock:
    return FileLock(path.with_name(f"{path.name}.lock"))


def _unfit(path: Path) -> str:
    return (
        f"the timing cache {path} is of another TensorRT or GPU, or is none; "
        "it was neither used nor changed"
    )

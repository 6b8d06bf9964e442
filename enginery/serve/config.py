"""The options of serve, and what is checked before anything starts; importing it is quick."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from enginery.core.errors import ArtifactError, MissingPackageError, OptionError
from enginery.core.staging import MANIFEST

_PACKAGES = (
    "httptools", "orjson", "prometheus_client", "python_multipart", "starlette", "uvicorn",
)  # fmt: skip


@dataclass(frozen=True)
class ServeConfig:
    """Where the server listens, how it batches, and what it refuses."""

    host: str = "127.0.0.1"
    """The address to listen on; 0.0.0.0 for all, as a container needs."""
    port: int = 8000
    """0 for any free one, which is printed."""
    provider: str = ""
    """Execution providers in order of preference: tensorrt,cuda,cpu. Empty for what
    `ENGINERY_PROVIDERS` says, and else the CPU."""
    provider_option: tuple[str, ...] = ()
    """An option of a provider, `cuda.gpu_mem_limit=2GiB`; repeat it for several."""
    allow_fallback: bool = False
    """Take the next provider where the first cannot be had; /health and /info say so."""
    allow_failed: bool = False
    """Take an artifact whose validation failed."""
    workers: int = 0
    """Batches that run at the same time; 0 for a physical core each on the CPU, 1 on a GPU."""
    threads: int = 0
    """Intra-op threads of a batch; 0 for one on the CPU where there are several workers."""
    batch_tokens: int = 0
    """The most tokens of a batch after padding; 0 for what the warm-up measures."""
    batch_rows: int = 64
    """The most inputs of a batch."""
    max_padding: float = 0.1
    """The most padding in a batch, as a share of its tokens; more where that costs less than
    another batch."""
    queue_inputs: int = 2048
    """The most inputs that wait for a model; beyond it requests are refused with 429."""
    max_wait: float = 10.0
    """Seconds that a request may have to wait for a worker, as the measured cost of batches says;
    beyond it requests are refused with 429."""
    queue_tokens: int = 262144
    """The most tokens that wait for a model; beyond it requests are refused with 429."""
    max_inputs: int = 2048
    """The most inputs of one request."""
    max_body_bytes: int = 8_388_608
    """The largest body of a request."""
    max_held_bytes: int = 268_435_456
    """The most bytes of bodies, of all requests that are arriving or not answered yet; those beyond
    are refused with 503. One body of the largest is always taken."""
    max_pixels: int = 33_177_600
    """The most pixels of an image, 8K by default: some kilobytes of a file may hold gigabytes."""
    truncate: bool = True
    """Cut texts that are longer than the model takes, where a request does not say."""
    api_key: str = ""
    """The key that clients have to send; prefer `api_key_file` or ENGINERY_API_KEY, which other
    users of the machine cannot read."""
    api_key_file: str = ""
    """A file with one key a line."""
    grace: float = 30.0
    """Seconds for requests that run to end after SIGTERM."""
    drain_delay: float = 0.0
    """Seconds after SIGTERM for which new connections are still taken, while readiness is off:
    as long as a load balancer needs to look."""
    stuck_after: float = 60.0
    """Seconds after which a batch that still runs, or a text that is still tokenized, counts as
    stuck."""
    processes: int = 1
    """Worker processes, each with all models; more than one where Python itself is what limits."""
    restart: bool = True
    """Replace a worker process that dies or is stuck; without it there is one process, which is not
    replaced."""
    idle_timeout: float = 75.0
    """Seconds for which a connection may say nothing between requests."""
    access_log: Literal["json", "off"] = "json"
    """A line of JSON for each request, on standard output."""
    optimized_graph: bool = True
    """Keep the graph as ONNX Runtime optimizes it for this processor in the store: the next start
    is faster and smaller."""


def check_options(config: ServeConfig) -> None:
    """Raise OptionError for a value that nothing can be served with."""
    least: tuple[tuple[str, float], ...] = (
        ("workers", 0), ("threads", 0), ("batch_tokens", 0), ("batch_rows", 1), ("max_padding", 0),
        ("queue_inputs", 1), ("queue_tokens", 1), ("max_inputs", 1), ("max_body_bytes", 1),
        ("max_held_bytes", 1), ("max_wait", 0),
        ("max_pixels", 1), ("grace", 0), ("drain_delay", 0), ("stuck_after", 0.1),
        ("idle_timeout", 0.1), ("processes", 1),
    )  # fmt: skip
    for name, low in least:
        if not low <= getattr(config, name) < math.inf:  # NaN is not
            raise OptionError(
                f"option '{name}' is {getattr(config, name):g}, expected a finite number from "
                f"{low:g} on."
            )
    if not 0 <= config.port < 65536:
        raise OptionError(f"option 'port' is {config.port}, expected 0 to 65535.")
    if config.max_padding >= 1:
        raise OptionError(f"option 'max_padding' is {config.max_padding:g}, expected less than 1.")
    if config.processes > 1 and not config.restart:
        raise OptionError(
            f"option 'processes' is {config.processes}, expected 1 without 'restart'.",
            do="Leave out --no-restart, or --processes.",
        )
    if config.api_key and config.api_key_file:
        raise OptionError("options 'api_key' and 'api_key_file' both give a key.", do="Keep one.")


def named_paths(artifacts: Sequence[str | Path]) -> dict[str, Path]:
    """Return artifacts' directories by the names under which they are served.

    Raises:
        OptionError: there is none, two have one name, or a name cannot stand in a path.
        ArtifactError: a directory is not an artifact.
    """
    if not artifacts:
        raise OptionError("no artifact is named.", do="enginery serve build/minilm")
    paths: dict[str, Path] = {}
    for given in artifacts:
        name, equals, rest = str(given).partition("=")
        path = Path(rest if equals else given)
        if not (path / MANIFEST).is_file():
            raise ArtifactError(
                f"{path} is not an artifact: it has no {MANIFEST}.",
                do="Make one: enginery export MODEL --out DIR",
            )
        if not equals:  # a link is called by its own name
            name = path.name if path.name not in ("", "..") else path.resolve().name
        if not name or not all(letter.isalnum() or letter in "._-" for letter in name):
            raise OptionError(
                f"model name '{name}' is invalid: use letters, digits, '.', '_' and '-'.",
                do=f"Name it: enginery serve model={path}",
            )
        if name in paths:
            raise OptionError(
                f"two artifacts are called '{name}': {paths[name]} and {path}.",
                do=f"Name one of them: other={path}",
            )
        paths[name] = path
    return paths


def require_packages() -> None:
    """Raise MissingPackageError unless the extra `serve` is installed."""
    for package in _PACKAGES:
        if find_spec(package) is None:
            raise MissingPackageError(package, extra="serve", purpose="Serving")

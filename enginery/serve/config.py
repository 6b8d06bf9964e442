"""The options of `enginery serve`, and the checks before it starts. Imports nothing heavy."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from enginery.core.artifact.staging import LISTING, MANIFEST
from enginery.core.errors import ArtifactError, OptionError
from enginery.core.home import enginery_home
from enginery.core.json_file import parse_json, read_document
from enginery.core.paths import portable_name, source_name, tells_something
from enginery.runtime.providers.availability import ONNXRUNTIME, require_onnxruntime

_PACKAGES = (
    "httptools",
    "orjson",
    "prometheus_client",
    "python_multipart",
    "starlette",
    "uvicorn",
)


_ORIGIN = re.compile(r"https?://[^/\s]+")


@dataclass(frozen=True)
class ServeConfig:
    """Options of the server: address, providers, batching, limits and process management."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all addresses, as a container needs."""
    port: int = 8000
    """Port to listen on; 0 for any free port, which is printed."""
    providers: str = ""
    """Execution providers in order of preference: tensorrt,cuda,cpu; or a YAML or JSON file of
    them. Empty for `ENGINERY_PROVIDERS` or, if that is not set, the CPU."""
    provider_option: tuple[str, ...] = ()
    """Option of a provider, such as `cuda.gpu_mem_limit=2GiB`; repeat it for several."""
    ladder: bool = True
    """On CUDA, round batches and lengths up to a few sizes and record a CUDA graph for each."""
    warm_up: bool = True
    """Record the CUDA graphs of all these sizes before the server is ready; else the first batch of
    each size does."""
    shrink_arena: bool = False
    """After each batch, free the memory that it took beyond the arena's initial chunk."""
    allow_fallback: bool = False
    """Use the next provider if the first is unavailable; /health and /info report it."""
    allow_failed: bool = False
    """Serve an artifact whose validation failed."""
    workers: int = 0
    """Number of batches that run at the same time; 0 for one per physical core on the CPU, 1 on a
    GPU."""
    threads: int = 0
    """Intra-op threads per batch; 0 for ONNX Runtime's default, or, on the CPU with several
    workers, for one, and as many as there are workers while no other batch runs."""
    batch_tokens: int = 0
    """Maximum number of tokens of a batch after padding; 0 to choose it by measuring."""
    batch_rows: int = 64
    """Maximum number of inputs of a batch."""
    generation_rows: int = 16
    """Maximum number of texts that a model generates at the same time; each beam counts as one."""
    max_new_tokens: int = 1024
    """Maximum number of tokens to generate for a text; a request for more is rejected."""
    max_padding: float = 0.1
    """Maximum share of padding in a batch's tokens; more is allowed if it costs less than another
    batch."""
    queue_inputs: int = 2048
    """Maximum number of inputs that wait for a model; further requests are rejected with 429."""
    max_wait: float = 10.0
    """Maximum time that a request may wait for a worker, in seconds, estimated from the measured
    cost of batches; requests that would wait longer are rejected with 429."""
    queue_tokens: int = 262144
    """Maximum number of tokens that wait for a model; further requests are rejected with 429."""
    max_inputs: int = 2048
    """Maximum number of inputs of one request."""
    max_body_bytes: int = 8_388_608
    """Maximum size of a request's body."""
    max_held_bytes: int = 268_435_456
    """Maximum total size of the bodies of all requests in progress; further requests are rejected
    with 503. A single body of up to `max_body_bytes` is always accepted."""
    max_pixels: int = 33_177_600
    """Maximum number of pixels of an image, 8K by default. It bounds memory: a file of some
    kilobytes can decode to gigabytes."""
    max_seconds: float = 60.0
    """Maximum duration of audio that runs in one piece, in seconds. It bounds memory, which grows
    with the square of the duration in models that take audio of any length."""
    max_speech_seconds: float = 1800.0
    """Maximum duration of speech that runs in windows, in seconds: of Whisper, and of CTC models
    with `chunk_length_s`. A second takes up to 100 kB while it waits or runs."""
    truncate: bool = True
    """Truncate texts that are longer than the model takes, unless the request sets its own
    option."""
    unproved: Literal["warn", "refuse"] = "warn"
    """A text that is longer than any that validate has compared with PyTorch: answer, and say so
    once in the log; or refuse it with status 413."""
    token_ids: bool = True
    """Embed lists of token ids as well as texts. Ids of another tokenizer give wrong vectors
    without an error if they are in the model's vocabulary; without this option all are rejected."""
    api_key: str = ""
    """API key that clients must send. Prefer `api_key_file` or ENGINERY_API_KEY, because other
    users of the machine can read command lines."""
    api_key_file: str = ""
    """File with API keys, one per line."""
    cors_origins: tuple[str, ...] = ()
    """Origin whose pages may call the server from a browser, such as `https://app.example`, or `*`
    for every one; repeat it for several. None by default."""
    grace: float = 30.0
    """Seconds that running requests get to finish after SIGTERM."""
    drain_delay: float = 0.0
    """Seconds after SIGTERM during which the server still accepts connections while it reports that
    it is not ready; set it to the interval of the load balancer's readiness probes."""
    stuck_after: float = 60.0
    """Seconds after which a batch that still runs, or a text that is still being tokenized, counts
    as stuck."""
    processes: int = 0
    """Number of worker processes, each with all models; use more than one if Python itself is the
    bottleneck. 0 for one or, on NVIDIA's providers, for `fronts` and a process for each GPU."""
    fronts: int = 0
    """Number of processes that parse, check, tokenize and answer, while another one runs the
    models; 0 to choose it from the cores on NVIDIA's providers, and for none on others."""
    gpus: str = ""
    """GPUs that run the models, each in a process of its own: CUDA's ids, such as `0,1`. Empty for
    the one that the provider's options name, by default the first."""
    restart: bool = True
    """Replace a worker process that dies or is stuck; without it there is only one process, which
    is not replaced."""
    idle_timeout: float = 75.0
    """Seconds after which an idle keep-alive connection is closed."""
    access_log: Literal["json", "off"] = "json"
    """Write one line of JSON per request to standard output."""
    optimized_graph: bool = True
    """Cache the graph that ONNX Runtime optimizes for this processor in the store, so that the next
    start is faster and takes less memory."""


def check_options(config: ServeConfig) -> None:
    """Raise OptionError for a value out of range, or options that exclude each other."""
    least: tuple[tuple[str, float], ...] = (
        ("workers", 0),
        ("threads", 0),
        ("batch_tokens", 0),
        ("batch_rows", 1),
        ("generation_rows", 1),
        ("max_new_tokens", 1),
        ("max_padding", 0),
        ("queue_inputs", 1),
        ("queue_tokens", 1),
        ("max_inputs", 1),
        ("max_body_bytes", 1),
        ("max_held_bytes", 1),
        ("max_wait", 0),
        ("max_pixels", 1),
        ("max_seconds", 0.01),
        ("max_speech_seconds", 0.01),
        ("grace", 0),
        ("drain_delay", 0),
        ("stuck_after", 0.1),
        ("idle_timeout", 0.1),
        ("processes", 0),
        ("fronts", 0),
    )
    for name, low in least:
        if not low <= getattr(config, name) < math.inf:  # NaN is not
            raise OptionError(
                f"option '{name}' is {getattr(config, name):g}, expected a finite number of "
                f"{low:g} or more."
            )
    if not 0 <= config.port < 65536:
        raise OptionError(f"option 'port' is {config.port}, expected 0 to 65535.")
    if config.max_padding >= 1:
        raise OptionError(f"option 'max_padding' is {config.max_padding:g}, expected less than 1.")
    for name in ("processes", "fronts"):
        count = getattr(config, name)
        if count > (name == "processes") and not config.restart:
            raise OptionError(
                f"option '{name}' is {count}, expected {int(name == 'processes')} without "
                "'restart'.",
                do=f"Remove --no-restart or --{name}.",
            )
    if config.gpus and not config.restart:
        raise OptionError(
            f"option 'gpus' is {config.gpus!r}, but without 'restart' there is only one process.",
            do="Remove --no-restart or --gpus.",
        )
    if config.processes and (config.fronts or config.gpus):
        other = "fronts" if config.fronts else "gpus"
        raise OptionError(
            f"options 'processes' and '{other}' are both set: worker processes have sessions of "
            "their own, and fronts do not.",
            do="Set only one of them.",
        )
    for origin in config.cors_origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise OptionError(
                f"option 'cors_origins' is '{origin}', expected a scheme and a host.",
                do="Write it as https://app.example, without a path; or * for every origin.",
                option="cors_origins",
            )
    gpu_ids(config)
    if config.api_key and config.api_key_file:
        raise OptionError(
            "options 'api_key' and 'api_key_file' are both set.", do="Set only one of them."
        )


def gpu_ids(config: ServeConfig) -> list[int]:
    """Return the ids of `gpus`; raise OptionError if they are not different whole numbers."""
    words = [word.strip() for word in config.gpus.split(",")] if config.gpus else []
    if not all(word.isascii() and word.isdigit() for word in words) or len({*words}) < len(words):
        raise OptionError(
            f"option 'gpus' is {config.gpus!r}, expected ids of GPUs, such as 0 or 0,1.",
            do="nvidia-smi lists them.",
        )
    return [int(word) for word in words]


def named_paths(artifacts: Sequence[str | Path]) -> dict[str, Path]:
    """Return the directories of artifacts by model name.

    Args:
        artifacts: `path` or `name=path` each; without a name, that of the publication, of the
            directory or of the source.

    Raises:
        OptionError: there is no artifact, two have the same name, or a name is invalid.
        ArtifactError: a directory is not an artifact.
    """
    if not artifacts:
        raise OptionError("no artifact was given.", do="Name one: enginery serve build/minilm")
    paths: dict[str, Path] = {}
    for artifact in artifacts:
        name, equals, directory = str(artifact).partition("=")
        path = Path(directory if equals else artifact)
        if not (path / MANIFEST).is_file():
            raise ArtifactError(
                f"{path} is not an artifact: it has no {MANIFEST}.",
                do="Create one: enginery export MODEL --out DIR",
            )
        if not equals:
            name = _model_name(path)
        if not name or not all(letter.isalnum() or letter in "._-" for letter in name):
            raise OptionError(
                f"model name '{name}' is invalid: use letters, digits, '.', '_' and '-'.",
                do=f"Name it: enginery serve model={path}",
            )
        if name in paths:
            raise OptionError(
                f"two artifacts have the name '{name}': {paths[name]} and {path}.",
                do=f"Give one of them another name: other={path}",
            )
        paths[name] = path
    return paths


def _model_name(path: Path) -> str:
    """Return the name to serve an artifact by, without pydantic, which takes long to import."""
    unreadable = (OSError, ValueError, KeyError, TypeError, AttributeError)
    with suppress(*unreadable):
        return portable_name(parse_json(read_document(path / LISTING))["name"])
    absolute = Path(os.path.normpath(path.absolute()))  # a symbolic link keeps its own name
    in_store = absolute.parent.resolve() == (enginery_home() / "artifacts").resolve()
    if in_store or not tells_something(absolute.name):
        with suppress(*unreadable):
            source = parse_json(read_document(path / MANIFEST))["source"]
            return portable_name(source_name(source["id"]))
    return absolute.name


def require_packages(paths: Iterable[Path] = ()) -> None:
    """Check that the extra `serve`, a build of ONNX Runtime and what the models need are installed.

    Raises:
        MissingPackageError: a package is not installed.
        ProviderError: the installation of ONNX Runtime is broken.
    """
    generating = ("onnx",) if any(map(generates, paths)) else ()
    require_onnxruntime("Serving", ONNXRUNTIME, *_PACKAGES, *generating, extra="serve")


def generates(path: Path) -> bool:
    """Return True if an artifact's task is generating texts."""
    with suppress(OSError, ValueError, KeyError, TypeError):  # it is reported when it is loaded
        task: str = parse_json(read_document(path / MANIFEST))["task"]
        return task.endswith("-with-past")
    return False

"""Options of the bench stage. The module imports nothing heavy: `enginery --help` loads it.

>>> backend_names(BenchConfig(against="pytorch,onnxruntime"))
('pytorch', 'onnxruntime')
"""

from __future__ import annotations

from dataclasses import dataclass

from enginery.core.errors import OptionError, nearest
from enginery.core.options import LabelReading, by_content, not_in_key

ENGINERY = "enginery"
"""The backend that is always measured: the artifact in this package's own runner."""
BACKENDS = (
    "onnxruntime",
    "optimum",
    "pytorch",
    "pytorch-compile",
    "pytorch-fp16",
    "enginery-cpu",
)
"""Backends that it can be compared with."""
AUTO = "auto"


@dataclass(frozen=True)
class BenchConfig:
    """Options of `bench`: the backends, the shapes and the length of the measurement."""

    providers: str = by_content()
    """Execution providers in order of preference: tensorrt,cuda,cpu; or a YAML or JSON file of
    them. Empty: those of the variable `ENGINERY_PROVIDERS`, or cpu."""
    provider_option: tuple[str, ...] = not_in_key(())  # part of the content of `providers`
    """Provider option, such as `cuda.gpu_mem_limit=2GiB`. Repeat it for several."""
    allow_fallback: bool = False
    """If the first provider is not available, use the next one and report the reason."""
    io_binding: bool = True
    """Keep inputs and outputs in GPU buffers, on NVIDIA's providers."""
    cuda_graph: bool = False
    """Capture a CUDA graph for each shape and replay it."""
    shrink_arena: bool = False
    """Return memory beyond the arena's first region to the system after each run. Each run then
    allocates again."""
    against: str = AUTO
    """Backends to compare with: onnxruntime, optimum, pytorch, pytorch-compile, pytorch-fp16,
    enginery-cpu, or none. `auto`: all that can run here; the report gives the reason for the
    others. A backend that you name and that cannot run is an error."""
    batch: str = "1,8,32"
    """Batch sizes."""
    sequence: str = AUTO
    """Sequence lengths. `auto`: 16,128,512 up to the model's maximum length, if the graph has the
    dim sequence."""
    shape: tuple[str, ...] = ()
    """Sizes of other dims, such as batch=1,height=64. Repeat it for several shapes. Missing dims
    are taken from `batch` and `sequence`."""
    graph: str = ""
    """Graph to measure, for an artifact with several. Empty: the first."""
    images: str = by_content()
    """Folder of images. Each is run by itself at its own size, instead of generated inputs."""
    multiple: int = 32
    """Scale images to the nearest multiple of this size if height and width are dynamic, as
    convolutional detectors require."""
    data: str = by_content()
    """File of texts: report how much padding their lengths cause at each batch size."""
    column: str = "text"
    """Column of `data` with the text."""
    label_column: str = ""
    """Column of `data` with the correct labels of a text classifier: report the accuracy of each
    artifact beside its latency."""
    label_values: LabelReading = "auto"
    """What the labels are: `names` of the model's classes, or `indices`. `auto` reads the whole
    column in one of the two ways; that both are possible is an error."""
    rows: int = 512
    """Number of rows of `data`, or of images, to read, evenly spread."""
    threads: int = 0
    """Intra-op threads of each backend. 0: the backend's default."""
    confidence: float = 0.95
    """Confidence level of the intervals of medians and ratios."""
    precision: float = 0.01
    """Stop when the interval of each median is within this share of the median."""
    smallest_difference: float = 0.02
    """Ratios closer to 1 than this count as no difference. One program in two processes differs by
    about as much."""
    min_rounds: int = 10
    """Minimum number of rounds at each shape, unless `max_seconds` runs out. The rounds that an
    interval needs, 6 at a confidence of 0.95, are always run."""
    max_rounds: int = 60
    """Maximum number of rounds at each shape."""
    max_seconds: float = 20.0
    """Time limit for the rounds of one shape, for all backends together. The rounds that an
    interval needs are still run, except by a backend that has used five times this limit."""
    warm_up_seconds: float = 10.0
    """Time limit for the warm-up of a backend at a shape."""
    seed: int = 0
    """Seed of the generated inputs."""
    allow_failed: bool = not_in_key(False)  # a permission
    """Accept an artifact whose validation failed."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model, in PyTorch. Only for authors you trust."""
    allow_pickle: bool = False
    """Load pickled weights into PyTorch. Only for authors you trust."""


def check_options(config: BenchConfig) -> None:
    """Raise OptionError if an option has a value that cannot be used."""
    backend_names(config)
    for name, least in (
        ("threads", 0),
        ("rows", 1),
        ("min_rounds", 1),
        ("multiple", 1),
        ("seed", 0),
    ):
        if getattr(config, name) < least:
            value = getattr(config, name)
            raise OptionError(f"option '{name}' is {value}, expected {least} or more.", option=name)
    if config.max_rounds < config.min_rounds:
        raise OptionError(
            f"option 'max_rounds' is {config.max_rounds}, expected {config.min_rounds} or more: "
            f"'min_rounds' is {config.min_rounds}.",
            do=f"Lower both: --min-rounds {max(1, config.max_rounds)} "
            f"--max-rounds {max(1, config.max_rounds)}",
            option="min_rounds" if config.max_rounds == BenchConfig.max_rounds else "max_rounds",
        )
    for name, low, high in (
        ("confidence", 0.5, 1.0),
        ("precision", 0.0, 1.0),
        ("smallest_difference", -1e-9, 1.0),
        ("max_seconds", 0.0, 1e6),
        ("warm_up_seconds", 0.0, 1e6),
    ):
        if not low < getattr(config, name) < high:
            value = getattr(config, name)
            raise OptionError(
                f"option '{name}' is {value:g}, expected more than {max(low, 0):g} "
                f"and less than {high:g}.",
                option=name,
            )
    if config.label_column and not config.data:
        raise OptionError(
            f"option 'label_column' is '{config.label_column}', but there are no data.",
            do="Name the file with that column: --data reviews.csv",
            option="label_column",
        )
    if config.images and config.shape:
        raise OptionError(
            "options 'images' and 'shape' cannot be combined: images are run at their own sizes.",
            do="Leave --shape out.",
            option="images",
        )


def backend_names(config: BenchConfig) -> tuple[str, ...]:
    """Return the backends that `against` names, each once; an empty tuple for `auto` and `none`.

    Raises:
        OptionError: a name is unknown, or `auto` or `none` is combined with others.
    """
    names = tuple(dict.fromkeys(part.strip() for part in config.against.split(",")))
    if names in ((AUTO,), ("none",)):
        return ()
    for name in names:
        if name in (AUTO, "none") or name not in BACKENDS:
            raise OptionError(
                f"option 'against': unknown backend '{name}'{nearest(name, BACKENDS)}",
                do=f"Known backends: {', '.join(BACKENDS)}; or auto or none by itself.",
                option="against",
            )
    return names


def read_sizes(text: str, name: str) -> tuple[int, ...]:
    """Parse sizes such as `1,8,32`; return them in ascending order without duplicates.

    Args:
        text: the sizes.
        name: the option, for the message.

    Raises:
        OptionError: a size is not a whole number of 1 or more.
    """
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not word.isascii() or not word.isdigit() or not 1 <= int(word) < 2**31:
            raise OptionError(
                f"option '{name}': found '{word}', expected whole numbers of 1 or more, such as "
                "1,8,32.",
                option=name,
            )
    return tuple(sorted({int(word) for word in words}))


def parse_shape(text: str) -> dict[str, int]:
    """Parse `batch=1,height=64`; return dim -> size.

    Raises:
        OptionError: the syntax is wrong, or a dim appears twice.
    """
    from enginery.core.shapes import canonical_dim  # imports pydantic, which --help must not

    sizes: dict[str, int] = {}
    for part in text.split(","):
        word, equals, size = part.partition("=")
        name = canonical_dim(word)
        if not equals or not name:
            raise OptionError(
                f"option 'shape': found '{part}', expected name=size.",
                do="Write it as --shape batch=1,height=64.",
                option="shape",
            )
        if name in sizes:
            raise OptionError(
                f"option 'shape': dim '{name}' is given twice in '{text}'.", option="shape"
            )
        (sizes[name],) = read_sizes(size, "shape")[:1]
    return sizes

"""The options of the bench stage; importing them is quick, as `enginery --help` is.

>>> contender_names(BenchConfig(against="pytorch,onnxruntime"))
('pytorch', 'onnxruntime')
"""

from __future__ import annotations

from dataclasses import dataclass

from enginery.core.errors import OptionError, nearest

OURS = "enginery"
"""What is measured in any case: the artifact through this package's own runner."""
CONTENDERS = (
    "onnxruntime",
    "optimum",
    "pytorch",
    "pytorch-compile",
    "pytorch-fp16",
    "enginery-cpu",
)
"""What may stand beside it."""
AUTO = "auto"


@dataclass(frozen=True)
class BenchConfig:
    """What is measured, beside what, and how long."""

    provider: str = ""
    """Execution providers in order of preference: tensorrt,cuda,cpu. Empty: what the variable
    `ENGINERY_PROVIDERS` says, and else cpu."""
    provider_option: tuple[str, ...] = ()
    """An option of a provider, `cuda.gpu_mem_limit=2GiB`; repeat it for several."""
    allow_fallback: bool = False
    """Take the next provider where the first cannot be had, and say so."""
    io_binding: bool = True
    """On NVIDIA's providers, keep inputs and outputs in buffers on the GPU."""
    cuda_graph: bool = False
    """Record each shape's run as a CUDA graph and replay it."""
    shrink_arena: bool = False
    """Give memory that a run took beyond the arena's first piece back after it; each run allocates
    anew."""
    against: str = AUTO
    """What it is compared with: onnxruntime, optimum, pytorch, pytorch-compile, pytorch-fp16,
    enginery-cpu; none for nothing. `auto`: those that can run here, the others with their reasons.
    One that is named and cannot run is an error."""
    batch: str = "1,8,32"
    """Batch sizes."""
    sequence: str = AUTO
    """Sequence lengths, 16,128,512. `auto`: these, up to the model's positions, where the graph
    has a sequence."""
    shape: tuple[str, ...] = ()
    """Sizes of other dims, batch=1,height=64; repeat it for several. Dims that it leaves out are
    taken from `batch` and `sequence`."""
    graph: str = ""
    """Which of several graphs; empty for the first."""
    images: str = ""
    """A folder of images, each run alone at its own size, in place of made-up inputs."""
    multiple: int = 32
    """Images of free height and width are scaled to the nearest multiple of it, as convolutional
    detectors need."""
    data: str = ""
    """A file of texts, for the padding that their lengths cause at each batch size."""
    column: str = "text"
    """The column of `data` that holds the text."""
    rows: int = 512
    """How many rows of `data`, or images of `images`, are read, evenly spread."""
    threads: int = 0
    """Intra-op threads of each contender; 0 for its own choice."""
    confidence: float = 0.95
    """Of the intervals of medians and ratios."""
    precision: float = 0.01
    """Measuring ends when the interval of each median is within this share of it."""
    smallest_difference: float = 0.02
    """Ratios nearer to 1 are no difference: the same program in two processes differs as much."""
    min_rounds: int = 10
    """Turns that each contender has at each shape, unless `max_seconds` is over before. As many as
    an interval needs, 6 at a confidence of 0.95, always run."""
    max_rounds: int = 60
    """The most turns of each contender at each shape."""
    max_seconds: float = 20.0
    """For the rounds of one shape, all contenders together. The rounds that an interval needs are
    run even so; who alone has taken five times as long sits those out."""
    warm_up_seconds: float = 10.0
    """The longest warm-up of a contender at a shape."""
    seed: int = 0
    """For the made-up inputs."""
    allow_failed: bool = False
    """Take an artifact whose validation failed."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model, in PyTorch. Only for authors you trust."""
    allow_pickle: bool = False
    """Load pickled weights into PyTorch. Only for authors you trust."""


def check_options(config: BenchConfig) -> None:
    """Raises OptionError for a value that nothing can be measured with."""
    contender_names(config)
    for name, least in (
        ("threads", 0),
        ("rows", 1),
        ("min_rounds", 1),
        ("multiple", 1),
        ("seed", 0),
    ):
        if getattr(config, name) < least:
            found = getattr(config, name)
            raise OptionError(f"option '{name}' is {found}, expected {least} or more.", option=name)
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
            found = getattr(config, name)
            raise OptionError(
                f"option '{name}' is {found:g}, expected more than {max(low, 0):g} "
                f"and less than {high:g}.",
                option=name,
            )
    if config.images and config.shape:
        raise OptionError(
            "options 'images' and 'shape' both say what is run.",
            do="Images have the sizes that they have: leave --shape out.",
            option="images",
        )


def contender_names(config: BenchConfig) -> tuple[str, ...]:
    """The contenders that were named, each once; none for `auto`.

    Raises:
        OptionError: a name is unknown, or `auto` or `none` is combined with others.
    """
    names = tuple(dict.fromkeys(part.strip() for part in config.against.split(",")))
    if names in ((AUTO,), ("none",)):
        return ()
    for name in names:
        if name in (AUTO, "none") or name not in CONTENDERS:
            raise OptionError(
                f"option 'against': unknown contender '{name}'{nearest(name, CONTENDERS)}",
                do=f"Known: {', '.join(CONTENDERS)}; or auto or none alone.",
                option="against",
            )
    return names


def read_sizes(text: str, name: str) -> tuple[int, ...]:
    """Sizes from `1,8,32`, ascending, each once.

    Raises:
        OptionError: one is no whole number from 1 on.
    """
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not word.isascii() or not word.isdigit() or not 1 <= int(word) < 2**31:
            raise OptionError(
                f"option '{name}': found '{word}', expected whole numbers from 1 on: 1,8,32.",
                option=name,
            )
    return tuple(sorted({int(word) for word in words}))


def parse_shape(text: str) -> dict[str, int]:
    """Sizes by dim from `batch=1,height=64`.

    Raises:
        OptionError: it is written otherwise, or a dim is there twice.
    """
    from enginery.core.shapes import canonical_dim  # which needs pydantic; --help does not

    given: dict[str, int] = {}
    for part in text.split(","):
        word, equals, size = part.partition("=")
        name = canonical_dim(word)
        if not equals or not name:
            raise OptionError(
                f"option 'shape': found '{part}', expected name=size.",
                do="Write it as --shape batch=1,height=64.",
                option="shape",
            )
        if name in given:
            raise OptionError(
                f"option 'shape': dim '{name}' is given twice in '{text}'.", option="shape"
            )
        (given[name],) = read_sizes(size, "shape")[:1]
    return given

"""The parts in their order, the models and the shapes, for a GPU and for a dry run.

settings_for(quick=False).points[0], [part.name for part in PARTS][:2]
# ((1, 128), ['doctor', 'models'])
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Part:
    """A part, which runs in its own process."""

    name: str
    least_seconds: float
    """Time that earlier parts must leave for it, of eight minutes."""
    needs_models: bool = False
    by_model: bool = False
    """True to start a process for each text model."""


PARTS = (
    Part("doctor", 15),
    Part("models", 60),
    Part("placement", 20, needs_models=True),
    Part("agreement", 30, needs_models=True),
    Part("speed", 130, needs_models=True, by_model=True),
    Part("convolutions", 40, needs_models=True),
    Part("tensorrt", 40, needs_models=True),
)
"""The parts in their order. Goals are judged from their results."""

PRECISIONS = ("fp16", "fp32", "bf16")
TEXT_MODELS = ("minilm", "bert-base")
CONVOLUTIONS = "resnet"
SEARCHES = ("EXHAUSTIVE", "HEURISTIC", "DEFAULT")
Point = tuple[int, int]
"""Batch and sequence."""

_SIZES = (
    (224, 224),
    (256, 192),
    (192, 320),
    (320, 320),
    (384, 256),
    (256, 448),
    (416, 416),
    (480, 320),
    (320, 544),
    (512, 512),
    (608, 416),
    (640, 480),
)
_MINILM = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
}
_TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 300,
    "max_position_embeddings": 64,
}
_TINY_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}


@dataclass(frozen=True)
class Settings:
    """Sizes of a full run or a dry run."""

    points: tuple[Point, ...]
    """The most important first: torch.compile runs in this order until its time is used."""
    must_points: int
    """Number of points with goals of their own."""
    agreement: tuple[Point, ...]
    images: tuple[tuple[int, int], ...]
    """Height and width."""
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Arguments of the models' configurations; empty for transformers' defaults."""
    min_rounds: int = 6
    """Enough for an interval at 95 %, see bench/measurement/statistics.py."""
    max_rounds: int = 8
    point_seconds: float = 10.0
    most_runs: int = 1000
    """Maximum number of runs in a turn, which takes 50 ms: bench/measurement/rounds.py."""
    warm_up_seconds: float = 1.0
    compile_backend: str = "inductor"


def settings_for(*, quick: bool) -> Settings:
    """Return the sizes of a full run, or those of a dry run with tiny models."""
    if quick:
        return Settings(
            points=((1, 8), (2, 16)),
            must_points=1,
            agreement=((1, 8), (2, 16)),
            images=((64, 64), (96, 64)),
            configs={
                "minilm": _TINY,
                "bert-base": {**_TINY, "num_hidden_layers": 3},
                CONVOLUTIONS: _TINY_RESNET,
            },
            max_rounds=6,
            most_runs=3,
            point_seconds=60.0,
            warm_up_seconds=0.1,
            compile_backend="aot_eager",
        )
    rest = tuple((batch, length) for length in (512, 16, 128) for batch in (1, 32, 8))
    must = ((1, 128), (32, 128))
    return Settings(
        points=(*must, *(point for point in rest if point not in must)),
        must_points=2,
        agreement=((1, 16), (8, 128), (32, 512)),
        images=_SIZES,
        # bert-base is transformers' own default, and so is ResNet-50.
        configs={"minilm": _MINILM, "bert-base": {}, CONVOLUTIONS: {}},
    )

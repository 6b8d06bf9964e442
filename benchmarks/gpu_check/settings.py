"""The parts in the order of their value, the models and the shapes, for a GPU and for a dry run.

[unit.name for unit in chosen_units("speed:minilm")]
# ['models:minilm', 'speed:minilm']
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

TEXT_MODELS = ("minilm", "bert-base")
CONVOLUTIONS = "resnet"
LARGE = "bert-large"
"""An embedder for which a request of many texts takes the GPU a while."""
GENERATORS = ("gpt2", "t5-small", "m2m100", "llama", "qwen3")
WITHOUT_BEAMS = ("llama", "qwen3")
"""Models of which beams are not measured: PyTorch would take most of the time."""
ENCODER_DECODERS = ("t5-small", "m2m100")
MODELS = (*TEXT_MODELS, CONVOLUTIONS, LARGE, *GENERATORS)
PRECISIONS = ("fp16", "fp32", "bf16")
"""FP16 that computes no padding, which runs on CUDA only."""
SEARCHES = ("EXHAUSTIVE", "HEURISTIC", "DEFAULT")


@dataclass(frozen=True)
class Part:
    """A part of the check."""

    name: str
    models: tuple[str, ...] = ()
    """Models that it runs on, each in its own process."""
    case_seconds: float = 90.0
    """Longest time of one case; then its process is ended, and the next case runs in a new one."""


@dataclass(frozen=True)
class Unit:
    """What one process does: a part, of one model if the part has any."""

    part: Part
    model: str = ""

    @property
    def name(self) -> str:
        return f"{self.part.name}:{self.model}" if self.model else self.part.name


PARTS = (
    Part("doctor"),
    Part("models", MODELS, case_seconds=900),
    Part("smoke", ("minilm",)),
    Part("agreement", TEXT_MODELS),
    Part("placement", TEXT_MODELS),
    Part("speed", TEXT_MODELS),
    Part("convolutions", (CONVOLUTIONS,), case_seconds=180),
    Part("vectors", ("minilm",)),
    Part("shapes", ("minilm",)),
    Part("serve", ("minilm",)),
    Part("embed", ("minilm",), case_seconds=120),
    Part("generate", GENERATORS),
    Part("streams", ("gpt2",)),
    Part("large", (LARGE,)),
    Part("predict", ("minilm",), case_seconds=240),
    Part("prototypes", ("minilm",), case_seconds=180),
    Part("speedup", TEXT_MODELS),
    Part("compiled", TEXT_MODELS, case_seconds=300),
    Part("tensorrt", ("minilm",), case_seconds=240),
)
"""The parts in the order of their value; models are made before the first part that needs them."""


def chosen_units(names: str = "") -> list[Unit]:
    """Return the units of `--only` and the models they need, in their order; all by default.

    Args:
        names: names of parts or units, separated by commas: `doctor,speed:minilm`.

    Raises:
        ValueError: a name is unknown.
    """
    units = [Unit(part, model) for part in PARTS for model in part.models or ("",)]
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = [part.name for part in PARTS] + [unit.name for unit in units if unit.model]
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"unknown part '{unknown[0]}', expected one of {', '.join(known)}.")
    chosen = [u for u in units if not wanted or u.name in wanted or u.part.name in wanted]
    ordered: list[Unit] = []
    for unit in chosen:
        made = next((u for u in units if u.name == f"models:{unit.model}"), unit)
        if unit == made and any(u.model == unit.model for u in chosen if u != unit):
            continue  # made when it is needed
        ordered += dict.fromkeys(u for u in (made, unit) if u not in ordered)
    return ordered


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
# The vocabulary has BERT's size, so that the ids of real texts fit.
_TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
_BERT_LARGE = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
# Words of the tokenizer are its vocabulary, so that every token is a word. No token ends a text:
# all generate the same number.
_NO_END = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
_BART_SIZES = {
    "encoder_layers": 6,
    "decoder_layers": 6,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 2048,
    "decoder_ffn_dim": 2048,
}
_GENERATORS: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 50_257, **_NO_END},
    "t5-small": {
        "vocab_size": 32_128,
        "d_model": 512,
        "d_ff": 2048,
        "num_layers": 6,
        "num_heads": 8,
        "decoder_start_token_id": 0,
        **_NO_END,
    },
    "m2m100": {
        "vocab_size": 32_000,
        "d_model": 512,
        "max_position_embeddings": 512,
        "decoder_start_token_id": 2,
        **_BART_SIZES,
        **_NO_END,
        "eos_token_id": 2,  # the exporter needs one; generation_config.json has none
    },
    # About half a billion parameters each.
    "llama": {
        "vocab_size": 32_000,
        "hidden_size": 1024,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        **_NO_END,
    },
    "qwen3": {
        "vocab_size": 64_000,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        **_NO_END,
    },
}
_TINY_LLAMA = {
    "vocab_size": 200,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
_TINY_GENERATORS: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 200, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "t5-small": {
        "vocab_size": 200,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
    },
    "m2m100": {
        **{name: 2 if "layers" in name or "heads" in name else 64 for name in _BART_SIZES},
        "vocab_size": 200,
        "d_model": 32,
        "max_position_embeddings": 64,
    },
    "llama": _TINY_LLAMA,
    "qwen3": _TINY_LLAMA,
}
_TINY_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}


@dataclass(frozen=True)
class Settings:
    """Sizes of a full run or a dry run."""

    points: tuple[Point, ...]
    """Shapes of the speed of text models, those with goals first."""
    agreement: tuple[Point, ...]
    speedup: tuple[Point, ...]
    """Shapes at which the GPU is compared with the CPU."""
    images: tuple[tuple[int, int], ...]
    """Height and width."""
    pooled: tuple[Point, ...]
    """Shapes at which vectors are made, without new ones in between."""
    shapes: int
    """Number of random shapes, each new."""
    clients: tuple[int, ...]
    """Numbers of connections to the server."""
    load_seconds: float
    sentences: int
    """Sentences that `embed` gets in one call."""
    rows: tuple[int, ...]
    """Rows of the files that `predict` reads."""
    large_texts: int
    """Texts in a request to the large model."""
    large_clients: int
    generated: tuple[tuple[int, int], ...]
    """Rows and beams of a generation, those with goals first."""
    new_tokens: int
    streams: int
    """Texts that a server generates at the same time."""
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Arguments of the models' configurations; empty for transformers' defaults."""
    min_rounds: int = 6
    """Enough for an interval at 95 %, see bench/measurement/statistics.py."""
    max_rounds: int = 8
    point_seconds: float = 15.0
    most_runs: int = 1000
    """Maximum number of runs in a turn, which takes 50 ms: bench/measurement/rounds.py."""
    warm_up_seconds: float = 1.0
    compile_modes: tuple[str, ...] = ("reduce-overhead", "max-autotune")
    """Modes of torch.compile, the fastest to compile first."""


def settings_for(*, quick: bool) -> Settings:
    """Return the sizes of a full run, or those of a dry run with tiny models."""
    if quick:
        return Settings(
            points=((1, 8), (2, 16)),
            agreement=((1, 8), (2, 16)),
            speedup=((1, 16),),
            images=((64, 64), (96, 64)),
            pooled=((1, 8), (2, 16)),
            shapes=6,
            clients=(1, 4),
            load_seconds=0.5,
            sentences=100,
            rows=(200,),
            large_texts=8,
            large_clients=2,
            generated=((1, 1), (3, 1), (1, 4)),
            new_tokens=6,
            streams=3,
            configs={
                "minilm": _TINY,
                "bert-base": {**_TINY, "num_hidden_layers": 3},
                CONVOLUTIONS: _TINY_RESNET,
                LARGE: {**_TINY, "num_hidden_layers": 3},
                **{
                    name: {**sizes, **_TINY_GENERATORS[name]} for name, sizes in _GENERATORS.items()
                },
            },
            max_rounds=6,
            most_runs=3,
            point_seconds=60.0,
            warm_up_seconds=0.1,
            compile_modes=("aot_eager",),
        )
    return Settings(
        points=((1, 128), (32, 128), (1, 16), (8, 128), (32, 512)),
        agreement=((1, 16), (8, 128), (32, 512)),
        speedup=((1, 16), (32, 128)),
        images=_SIZES,
        pooled=((1, 16), (1, 128), (32, 512), (32, 128)),
        shapes=300,
        clients=(64, 256, 1, 16),
        load_seconds=3.0,
        sentences=20_000,
        rows=(500_000,),
        large_texts=256,
        large_clients=16,
        generated=((1, 1), (8, 1), (32, 1), (1, 4)),
        new_tokens=64,
        streams=32,
        # bert-base is transformers' own default, and so is ResNet-50.
        configs={
            "minilm": _MINILM,
            "bert-base": {},
            CONVOLUTIONS: {},
            LARGE: _BERT_LARGE,
            **_GENERATORS,
        },
    )

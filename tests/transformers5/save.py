"""Save tiny models with transformers 5, and what it answers, for `read.py` and the tests.

    $ python -m venv v5; v5/bin/pip install torch==2.13.0 transformers==5.24.0
    $ v5/bin/python -m tests.transformers5.save --out models      # all types, for read.py
    $ v5/bin/python -m tests.transformers5.save --stored          # some, for the tests

A model is saved for each type of scaling. `answers.json` in the directory has what version 5
computes. The stored ones need no weights, which depend on names alone.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers

from tests.transformers5.models import (
    ANSWERS,
    SMALL,
    STEPS,
    answers,
    auto_class,
    rotary_types,
    scalings,
    set_weights,
)

LARGEST = 1_000_000
"""Weights of a model that is small enough."""


STORED = {
    "arcee": "yarn",
    "cohere": "linear",
    "cohere2": "default",
    "ernie4_5": "llama3",
    "exaone4": "llama3",
    "falcon": "dynamic",
    "gemma": "default",
    "gemma2": "linear",
    "gemma3_text": "linear",
    "glm": "default",
    "granite": "llama3",
    "helium": "dynamic",
    "llama": "llama3",
    "mistral": "longrope-factor",
    "modernbert": "default",
    "nemotron": "partial",
    "olmo": "linear",
    "olmo2": "dynamic",
    "olmo3": "yarn",
    "phi": "longrope",
    "phi3": "longrope",
    "qwen2": "yarn",
    "qwen3": "longrope",
    "smollm3": "llama3",
    "stablelm": "partial",
    "starcoder2": "default",
}
"""Model types and the scaling that the tests compare."""


def small_config(kind: str) -> Any:
    """Return a small configuration of a model type."""
    config_class = transformers.CONFIG_MAPPING[kind]
    default = config_class().to_dict()
    sizes = {key: value for key, value in SMALL.items() if key in default}
    off = [key for key in sizes if default[key] is None and key.endswith(("_rank", "window"))]
    sizes |= dict.fromkeys(off)
    if kind in ("deepseek_v2", "deepseek_v3", "longcat_flash"):  # they share no keys among heads
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
        sizes["head_dim"] = SMALL["qk_rope_head_dim"]
    layers = default.get("layer_types")
    if isinstance(layers, list):
        kinds = list(dict.fromkeys(layers))
        sizes["layer_types"] = [kinds[i % len(kinds)] for i in range(SMALL["num_hidden_layers"])]
        if kind.startswith("modernbert"):
            sizes["layer_types"] = ["full_attention", "sliding_attention"] * 2
    return config_class(**sizes)


def variants(config: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield names and rope_parameters, none of them the default of its type."""
    own = config.rope_parameters
    if all(isinstance(value, dict) for value in own.values()):
        # OLMo 3 has one base.
        step = 0 if config.model_type == "olmo3" else 1
        thetas = {name: 500.0 * (index * step + 1) for index, name in enumerate(own)}
        yield (
            "default",
            {name: {"rope_type": "default", "rope_theta": thetas[name]} for name in own},
        )
        for name, parameters in scalings(16).items():
            if name in ("linear", "yarn"):
                yield (
                    name,
                    {
                        label: {"rope_type": "default", "rope_theta": thetas[label]}
                        | ({"rope_type": name, **parameters} if label == "full_attention" else {})
                        for label in own
                    },
                )
        return
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if getattr(config, "qk_rope_head_dim", None):
        head = config.qk_rope_head_dim
    share = own.get("partial_rotary_factor")
    kept = {key: own[key] for key in ("partial_rotary_factor",) if key in own}
    if "mrope_section" in own:
        kept["mrope_section"] = [2, 3, 3]
    for name, parameters in scalings(int(head * (share or 1))).items():
        rope_type = name.partition("-")[0]
        yield name, {**kept, "rope_type": rope_type, "rope_theta": 77.0, **parameters}
    share = {"partial_rotary_factor": 0.5}
    yield "partial", {**kept, "rope_type": "default", "rope_theta": 77.0, **share}


def make_model(config: Any, parameters: dict[str, Any]) -> Any:
    """Return a model with a configuration's other positions."""
    values = json.loads(json.dumps(config.to_dict(), default=str))
    values.pop("dtype", None)
    changed = type(config).from_dict({**values, "rope_parameters": dict(parameters)})
    with torch.device("meta"):
        size = auto_class(changed).from_config(changed).num_parameters()
    if size > LARGEST:
        raise ValueError(f"it has {size:,} weights: SMALL lacks one of its sizes")
    model = auto_class(changed).from_config(changed, attn_implementation="eager")
    set_weights(model)
    return model


def save_type(kind: str, out: Path) -> dict[str, Any]:
    """Save the variants of a model type; return the answers, or the errors, by variant."""
    results: dict[str, Any] = {}
    try:
        config = small_config(kind)
        cases = list(variants(config))
    except Exception as error:
        return {"": {"error": f"{type(error).__name__}: {error}"[:200]}}
    for name, parameters in cases:
        try:
            model = make_model(config, parameters)
            results[name] = answers(model, steps=0)
            model.save_pretrained(out / kind / name)
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}"[:200]}
    return results


def stored_case(kind: str, variant: str) -> dict[str, Any]:
    """Return a configuration as version 5 saves it, and its answers."""
    config = small_config(kind)
    model = make_model(config, dict(variants(config))[variant])
    with tempfile.TemporaryDirectory() as folder:
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        document = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
    return {"class": type(model).__name__, "config": document, **answers(model, steps=STEPS)}


def main() -> None:
    """Save models of the named types, or of all."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path("models"))
    parser.add_argument("--stored", action="store_true", help=f"write {ANSWERS.name}")
    parser.add_argument("types", nargs="*")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    if options.stored:
        cases = {f"{kind} {name}": stored_case(kind, name) for kind, name in STORED.items()}
        document = {"transformers": transformers.__version__, "cases": cases}
        ANSWERS.write_text(json.dumps(document, indent=0, sort_keys=True) + "\n")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    results = {kind: save_type(kind, options.out) for kind in options.types or rotary_types()}
    (options.out / "answers.json").write_text(
        json.dumps({"transformers": transformers.__version__, "types": results})
    )


if __name__ == "__main__":
    main()

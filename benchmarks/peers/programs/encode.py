"""Encode texts with one library, in an environment that has only that.

    python encode.py LIBRARY MODEL TEXTS.json VECTORS.npy

It prints a line of JSON after the first answer, and one with the seconds after all texts. Each
library has the settings that its own documentation recommends for many texts on a CPU. Those that
do not sort texts by length get them sorted, because padding would take most of their time.
"""

import csv
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

BATCH = 32
"""Rows of a batch, the default of sentence-transformers."""


def sentence_transformers(model):
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(model, device="cpu").encode


def sentence_transformers_onnx(model):
    from sentence_transformers import SentenceTransformer

    options = {"file_name": "model.onnx", "provider": "CPUExecutionProvider"}
    return SentenceTransformer(model, device="cpu", backend="onnx", model_kwargs=options).encode


def fastembed(model):
    from fastembed import TextEmbedding

    embedder = TextEmbedding(
        "sentence-transformers/all-MiniLM-L6-v2", specific_model_path=model, lazy_load=False
    )

    def encode(texts):
        return in_order_of_length(
            texts, lambda ordered: np.stack(list(embedder.embed(ordered, batch_size=BATCH)))
        )

    return encode


def openvino(model, **properties):
    import openvino as ov

    compiled = ov.Core().compile_model(
        f"{model}/model.onnx", "CPU", {"PERFORMANCE_HINT": "THROUGHPUT", **properties}
    )
    tokenizer = read_tokenizer(model)

    def encode_ordered(texts):
        pooled = [None] * len(range(0, len(texts), BATCH))
        queue = ov.AsyncInferQueue(compiled)

        def keep(request, place):
            number, mask = place
            pooled[number] = mean_pooled(request.get_output_tensor(0).data, mask)

        queue.set_callback(keep)
        for number, encodings in enumerate(batches(tokenizer, texts)):
            ids, mask = padded(encodings)
            feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids * 0}
            queue.start_async(feeds, (number, mask))
        queue.wait_all()
        return np.concatenate(pooled)

    return lambda texts: in_order_of_length(texts, encode_ordered)


def openvino_fp32(model):
    return openvino(model, INFERENCE_PRECISION_HINT="f32")


def ctranslate2(model, compute_type="float32"):
    import ctranslate2

    cores = len(os.sched_getaffinity(0))
    encoder = ctranslate2.Encoder(
        model, compute_type=compute_type, inter_threads=cores, intra_threads=1
    )
    tokenizer = read_tokenizer(model)

    def run(encodings):
        found = encoder.forward_batch([encoding.ids for encoding in encodings])
        _, mask = padded(encodings)
        return mean_pooled(np.asarray(found.last_hidden_state), mask)

    def encode_ordered(texts):
        with ThreadPoolExecutor(cores) as pool:
            return np.concatenate(list(pool.map(run, batches(tokenizer, texts))))

    return lambda texts: in_order_of_length(texts, encode_ordered)


def ctranslate2_int8(model):
    return ctranslate2(model, "int8")


def enginery(model):
    from enginery import load_model

    return load_model(model).embed


def enginery_predict(model):
    from enginery import predict_file

    place = Path(sys.argv[4]).parent

    def encode(texts):
        import pyarrow.parquet as pq

        source, out = place / "in.csv", place / "out.parquet"
        with source.open("w", newline="", encoding="utf-8") as stream:
            csv.writer(stream).writerows([["text"], *([text] for text in texts)])
        predict_file(model, source, out, force=True)
        column = pq.read_table(out, columns=["embedding"]).column(0).combine_chunks()
        return column.values.to_numpy().reshape(len(texts), -1)

    return encode


def in_order_of_length(texts, encode):
    """Encode texts from the longest to the shortest; return vectors in the order of the texts."""
    order = np.argsort([-len(text) for text in texts], kind="stable")
    vectors = encode([texts[place] for place in order])
    found = np.empty_like(vectors)
    found[order] = vectors
    return found


def read_tokenizer(model):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    return tokenizer


def batches(tokenizer, texts):
    for start in range(0, len(texts), BATCH):
        yield tokenizer.encode_batch(texts[start : start + BATCH])


def padded(encodings):
    width = max(len(encoding.ids) for encoding in encodings)
    ids = np.zeros((len(encodings), width), np.int64)
    mask = np.zeros_like(ids)
    for row, encoding in enumerate(encodings):
        ids[row, : len(encoding.ids)], mask[row, : len(encoding.ids)] = encoding.ids, 1
    return ids, mask


def mean_pooled(hidden, mask):
    weights = mask[:, :, None].astype(np.float32)
    vectors = (hidden * weights).sum(axis=1) / weights.sum(axis=1)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def say(**found):
    print(json.dumps(found), flush=True)


def main():
    library, model, texts, out = sys.argv[1:]
    encode = globals()[library](model)
    encode(["The engine is warm."])
    say(ready=True)
    texts = json.loads(Path(texts).read_text(encoding="utf-8"))
    encode(texts[:64])  # the libraries choose kernels and start threads in their first runs
    begun = time.perf_counter()
    vectors = np.asarray(encode(texts), np.float32)
    say(seconds=time.perf_counter() - begun)
    np.save(out, vectors)


if __name__ == "__main__":
    main()

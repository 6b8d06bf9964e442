"""Compare text generation with Optimum, PyTorch and CTranslate2.

    python benchmarks/generate.py --models gpt2,t5-small,marian --rounds 3 --threads 1,2
    python benchmarks/generate.py --ctranslate2 DIR    # where pip install --target DIR ctranslate2

The models have the sizes of the published ones and random weights, made here from their configs.
Every engine runs in a process of its own, loads once, and takes turns with the others in an order
that is shuffled in each round: a prompt of 64 tokens, 32 new ones, for each number of rows and
beams. Tokens are compared with PyTorch's. The time of an engine is its least of all rounds; `ms
outside` is enginery's time outside of ONNX Runtime's `run`, for each new token.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROMPT, NEW = 64, 32
CASES = ((1, 1), (1, 4), (8, 1))
"""(rows, beams)"""
ENGINES = ("enginery", "optimum", "pytorch", "ctranslate2", "enginery-int8", "ctranslate2-int8")
MODELS = {
    "gpt2": ("gpt2", "text-generation", {}),
    "t5-small": (
        "t5",
        "text2text-generation",
        {
            "d_model": 512,
            "d_ff": 2048,
            "num_layers": 6,
            "num_heads": 8,
            "vocab_size": 32128,
            "decoder_start_token_id": 0,
        },
    ),
    "marian": (
        "marian",
        "text2text-generation",
        {
            "vocab_size": 59514,
            "d_model": 512,
            "encoder_layers": 6,
            "decoder_layers": 6,
            "encoder_attention_heads": 8,
            "decoder_attention_heads": 8,
            "encoder_ffn_dim": 2048,
            "decoder_ffn_dim": 2048,
            "max_position_embeddings": 512,
            "activation_function": "swish",
            "scale_embedding": True,
            "static_position_embeddings": True,
            "normalize_before": False,
            "add_bias_logits": False,
            "pad_token_id": 59513,
            "eos_token_id": 0,
            "forced_eos_token_id": 0,
            "decoder_start_token_id": 59513,
            "bad_words_ids": [[59513]],
        },
    ),
}


def make_model(name: str, directory: Path) -> None:
    """Write the model, its two artifacts and its INT8."""
    import torch
    import transformers

    from enginery import export_model, quantize_model

    kind, task, sizes = MODELS[name]
    source = directory / "source"
    if not source.exists():
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(kind, **sizes)
        auto = (
            transformers.AutoModelForCausalLM
            if task == "text-generation"
            else transformers.AutoModelForSeq2SeqLM
        )
        auto.from_config(config).eval().save_pretrained(source)
    for layout in ("enginery", "optimum"):
        if not (directory / layout).exists():
            export_model(
                str(source), task=f"{task}-with-past", layout=layout, out=str(directory / layout)
            )
    if not (directory / "enginery-int8").exists():
        quantize_model(
            directory / "enginery",
            scheme="dynamic",
            target="cpu",
            allow_failed=True,
            out=str(directory / "enginery-int8"),
        )


def prompts(name: str, rows: int) -> list[list[int]]:
    """Return the same prompts in every process."""
    top = {"gpt2": 50_000, "t5-small": 32_000, "marian": 59_000}[name]
    chosen = random.Random(rows)
    return [[chosen.randrange(10, top) for _ in range(PROMPT)] for _ in range(rows)]


class Enginery:
    """enginery's decoder and searches, without a tokenizer."""

    def __init__(self, directory: Path, threads: int) -> None:
        import onnxruntime

        from enginery.core.artifact.artifact import Artifact
        from enginery.runtime.decoder_graphs import DecoderGraphs
        from enginery.runtime.generation.decoder import CachedDecoder
        from enginery.runtime.generation.options import read_generation_config
        from enginery.runtime.onnxruntime.runner import OrtRunner, RunnerOptions

        artifact = Artifact.open(directory)
        (graphs,) = DecoderGraphs.find_all(artifact.manifest.graphs)
        records = [graphs.later, *([graphs.encoder] if graphs.encoder else [])]
        runners = {
            # From the second start on, as serve and predict do.
            each.file: OrtRunner(
                artifact, RunnerOptions(threads=threads, keep_optimized=True), graph=each.file
            )
            for each in records
        }
        self._decoder = CachedDecoder(graphs, runners)
        self._options = read_generation_config(directory)
        self._encoder = graphs.encoder is not None
        self.inside = 0.0
        original = onnxruntime.InferenceSession.run_with_ort_values

        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return original(*arguments)
            finally:
                self.inside += time.perf_counter() - started

        onnxruntime.InferenceSession.run_with_ort_values = timed

    def __call__(self, ids: list[list[int]], beams: int) -> list[list[int]]:
        """Return the new tokens."""
        import numpy as np

        from enginery.runtime.generation.batch import RunningBatch
        from enginery.runtime.generation.search import make_search

        self.inside = 0.0
        options = self._options.with_arguments(
            max_new_tokens=NEW, min_new_tokens=NEW, num_beams=beams, do_sample=False
        )
        # PyTorch has no end token either: the lengths are equal everywhere.
        options = options.model_copy(update={"eos_token_id": (), "min_new_tokens": None})
        feeds = None
        if self._encoder:
            feeds = {
                "input_ids": np.asarray(ids),
                "attention_mask": np.ones((len(ids), PROMPT), int),
            }
            start = options.decoder_start_token_id
            ids = [[0 if start is None else start]] * len(ids)
        searches = [make_search(tuple(row), options, positions=None) for row in ids]
        batch = RunningBatch(self._decoder)
        batch.add(searches, feeds)
        while batch.searches:
            batch.step()
        return [list(search.results()[0].tokens) for search in searches]


class Transformers:
    """PyTorch, or Optimum's classes over ONNX Runtime."""

    def __init__(self, directory: Path, name: str, threads: int, *, optimum: bool) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        decoder = MODELS[name][1] == "text-generation"
        if optimum:
            import onnxruntime
            from optimum.onnxruntime import ORTModelForCausalLM, ORTModelForSeq2SeqLM

            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = threads
            kind = ORTModelForCausalLM if decoder else ORTModelForSeq2SeqLM
            self._model = kind.from_pretrained(directory, session_options=options)
        else:
            kind = (
                transformers.AutoModelForCausalLM if decoder else transformers.AutoModelForSeq2SeqLM
            )
            self._model = kind.from_pretrained(directory).eval()
        self._model.generation_config.eos_token_id = None
        self._decoder = decoder
        self.inside = 0.0

    def __call__(self, ids: list[list[int]], beams: int) -> list[list[int]]:
        """Return the new tokens."""
        import torch

        inputs = torch.tensor(ids)
        with torch.inference_mode():
            found = self._model.generate(
                input_ids=inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=NEW,
                num_beams=beams,
                do_sample=False,
            )
        return [row[PROMPT if self._decoder else 1 :].tolist() for row in found]


class CTranslate2:
    """CTranslate2 in FP32 or INT8."""

    def __init__(self, directory: Path, name: str, threads: int, *, int8: bool) -> None:
        import ctranslate2

        self._decoder = MODELS[name][1] == "text-generation"
        kind = ctranslate2.Generator if self._decoder else ctranslate2.Translator
        self._model = kind(
            str(directory),
            compute_type="int8" if int8 else "float32",
            intra_threads=threads,
            inter_threads=1,
        )
        self.inside = 0.0

    def __call__(self, ids: list[list[int]], beams: int) -> list[list[int]]:
        """Return the new tokens."""
        tokens = [[str(each) for each in row] for row in ids]
        common = {"beam_size": beams, "max_batch_size": len(ids)}
        if self._decoder:
            found = self._model.generate_batch(
                tokens,
                max_length=NEW,
                min_length=NEW,
                sampling_topk=1,
                include_prompt_in_result=False,
                **common,
            )
            return [list(map(int, each.sequences_ids[0])) for each in found]
        found = self._model.translate_batch(
            tokens, max_decoding_length=NEW, min_decoding_length=NEW, **common
        )
        return [list(map(int, each.hypotheses[0])) for each in found]


def convert_for_ctranslate2(source: Path, out: Path) -> None:
    """Convert the model with a vocabulary of numbers."""
    import ctranslate2.converters.transformers as converters

    def vocabulary(_: Any, model: Any, __: Any) -> list[str]:
        # Marian's padding, its last token, has no weights there.
        left_out = model.config.model_type == "marian"
        return [str(token) for token in range(model.config.vocab_size - left_out)]

    class Tokenizer:
        bos_token = eos_token = unk_token = pad_token = "0"

        pad_token_id = eos_token_id = 0

        def get_vocab(self) -> dict[str, int]:
            return {}

        def convert_ids_to_tokens(self, token: int) -> str:
            return str(token)

    for loader in converters._MODEL_LOADERS.values():  # noqa: SLF001
        type(loader).get_vocabulary = vocabulary
    converter = converters.TransformersConverter(str(source))
    converter.load_tokenizer = lambda *_, **__: Tokenizer()
    converter.convert(str(out), force=True)


def work(engine: str, directory: Path, name: str, threads: int) -> None:
    """Answer each line of standard input with a measurement, as JSON."""
    started, cpu = time.perf_counter(), time.process_time()
    if engine.startswith("enginery"):
        model: Any = Enginery(directory / engine, threads)
    elif engine in ("optimum", "pytorch"):
        place = "optimum" if engine == "optimum" else "source"
        model = Transformers(directory / place, name, threads, optimum=engine == "optimum")
    else:
        model = CTranslate2(directory / "ctranslate2", name, threads, int8=engine.endswith("int8"))
    ready = {"ready_s": time.perf_counter() - started, "ready_cpu_s": time.process_time() - cpu}
    print(json.dumps(ready), flush=True)
    for line in sys.stdin:
        rows, beams = json.loads(line)
        ids = prompts(name, rows)
        started, cpu = time.perf_counter(), time.process_time()
        tokens = model(ids, beams)
        wall = time.perf_counter() - started
        found = {
            "wall_s": wall,
            "cpu_s": time.process_time() - cpu,
            "outside_ms": 1e3 * (wall - model.inside) / NEW,
            "peak_mb": peak_mb(),
            "tokens": tokens,
        }
        print(json.dumps(found), flush=True)


def peak_mb() -> float:
    """Return the largest memory of this process, without that of the one that started it."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


class Worker:
    """An engine in a process of its own."""

    def __init__(self, engine: str, directory: Path, name: str, threads: int, path: str) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), path))),
        }
        command = [sys.executable, __file__, "--work", engine, str(directory), name, str(threads)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.ready = self._read()

    def measure(self, rows: int, beams: int) -> dict[str, Any]:
        """Run one case."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps([rows, beams]) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                return dict(json.loads(line))
        raise SystemExit(f"{self._process.args} ended")


def compare(name: str, directory: Path, threads: int, arguments: argparse.Namespace) -> None:
    """Print the table of one model."""
    engines = [e for e in ENGINES if arguments.ctranslate2 or "ctranslate2" not in e]
    for engine in engines:  # what the first start keeps is there for the next
        Worker(engine, directory, name, threads, arguments.ctranslate2).close()
    workers = {e: Worker(e, directory, name, threads, arguments.ctranslate2) for e in engines}
    best: dict[tuple[str, tuple[int, int]], dict[str, Any]] = {}
    for turn in range(arguments.rounds + 1):
        for case in CASES:
            order = random.sample(engines, len(engines))
            for engine in order:
                found = workers[engine].measure(*case)
                key = (engine, case)
                if turn == 0:  # warms up, and is not counted
                    continue
                if key not in best or found["wall_s"] < best[key]["wall_s"]:
                    best[key] = {
                        **found,
                        "cpu_s": min(found["cpu_s"], best.get(key, found)["cpu_s"]),
                        "outside_ms": min(found["outside_ms"], best.get(key, found)["outside_ms"]),
                    }
    print(f"\n{name}, {threads} thread{'s' * (threads > 1)}: tokens a second (wall; CPU)\n")
    header = " | ".join(f"{rows} × {beams}" for rows, beams in CASES)
    print(f"| engine | {header} | ms outside | peak MB | ready CPU s |")
    print("|-" * (len(CASES) + 4) + "|")
    for engine in engines:
        cells, outside = [], []
        for case in CASES:
            found = best[engine, case]
            count = NEW * case[0]
            same = found["tokens"] == best["pytorch", case]["tokens"]
            cells.append(
                f"{count / found['wall_s']:.1f}; {count / found['cpu_s']:.1f}{'' if same else ' *'}"
            )
            outside.append(f"{found['outside_ms']:.2f}")
        shown = ", ".join(outside) if engine.startswith("enginery") else "–"
        peak = max(best[engine, case]["peak_mb"] for case in CASES)
        ready = workers[engine].ready["ready_cpu_s"]
        print(f"| {engine} | {' | '.join(cells)} | {shown} | {peak:.0f} | {ready:.2f} |")
    print("\n\\* other tokens than PyTorch's; CTranslate2 never takes its end token")
    for worker in workers.values():
        worker.close()


def main() -> None:
    """Read the arguments and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="gpt2,t5-small,marian")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--ctranslate2", default="", help="directory of the package")
    parser.add_argument("--directory", type=Path, default=Path("build/generate"))
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        engine, directory, name, threads = arguments.work
        work(engine, Path(directory), name, int(threads))
        return
    for name in arguments.models.split(","):
        directory = (arguments.directory / name).resolve()
        make_model(name, directory)
        if arguments.ctranslate2 and not (directory / "ctranslate2").exists():
            sys.path.append(arguments.ctranslate2)
            convert_for_ctranslate2(directory / "source", directory / "ctranslate2")
        for threads in arguments.threads.split(","):
            compare(name, directory, int(threads), arguments)


if __name__ == "__main__":
    main()

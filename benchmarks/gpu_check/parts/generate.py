"""Generate texts of a fixed length beside PyTorch's `generate`, greedy and with beams.

Prompts are words, each a token, and no token ends a text. The time is that of a whole call: prompt,
encoder, and every step. enginery and PyTorch in FP16 take turns in one process. Tokens are compared
with PyTorch's in FP32 on the same device. Random weights have close calls, after which a row goes
on differently, so each token is also judged by FP32's logits after the tokens before it: its own
may be below the largest by some times the rounding of PyTorch in FP16, and no more.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.settings import ENCODER_DECODERS, WITHOUT_BEAMS
from benchmarks.gpu_check.work import Work
from enginery import load_model
from enginery.core.artifact.artifact import Artifact

PROMPT = 16
_TURNS = 4
_TURNS_BESIDE = 2
"""PyTorch takes ten times as long, and varies less."""
_ROUNDING = 3.0
"""Allowed distance of a token from the best one, in errors of PyTorch's FP16. Two logits that are
each off by one error change places if they are two errors apart."""
_MIN_ROUNDING = 1e-3
"""Smallest allowed distance, for FP32."""
_FIRST_WORD = 10

Tokens = list[list[int]]


def run(work: Work) -> None:
    """Measure every number of rows and beams."""
    from benchmarks.gpu_check import pytorch

    pytorch.require_device(work.device)
    sides: dict[str, Any] = {}
    for rows, beams in work.settings.generated:
        if beams > 1 and work.model in WITHOUT_BEAMS:
            continue
        work.case(case_name(rows, beams), partial(_measure, work, sides, rows, beams), seconds=8.0)


def case_name(rows: int, beams: int) -> str:
    """Return `8 rows` or `1 row, 4 beams`."""
    return f"{rows} row{'s' * (rows > 1)}{f', {beams} beams' if beams > 1 else ''}"


def prompts(words: int, rows: int) -> list[list[int]]:
    """Return the prompts' tokens."""
    chosen = random.Random(1)
    return [[chosen.randrange(_FIRST_WORD, words) for _ in range(PROMPT)] for _ in range(rows)]


def text_of(tokens: Sequence[int]) -> str:
    """Return the text that is tokenized to these tokens."""
    return " ".join(f"w{token}" for token in tokens)


def artifact_of(work: Work) -> Artifact:
    """Return the artifact for CUDA, or in a dry run that in FP32."""
    return work.artifact("fp16" if work.on_gpu else "onnx")


class TorchGenerator:
    """PyTorch's `generate` of a model with seeded weights."""

    def __init__(self, work: Work, precision: str) -> None:
        import transformers

        from benchmarks.gpu_check import pytorch

        source = Path(work.results.artifacts(work.model)["source"])
        self._is_decoder = work.model not in ENCODER_DECODERS
        auto = (
            transformers.AutoModelForCausalLM
            if self._is_decoder
            else transformers.AutoModelForSeq2SeqLM
        )
        model = auto.from_pretrained(source).to(pytorch.DTYPES[precision])
        self._model, self._device = model.to(work.device).eval(), work.device
        self._new = work.settings.new_tokens

    def __call__(self, rows: Tokens, beams: int) -> Tokens:
        """Return the new tokens of each row."""
        import torch

        ids = torch.tensor(rows, device=self._device)
        with torch.inference_mode():
            found = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=self._new,
                num_beams=beams,
                do_sample=False,
            )
            # Copying to the host waits for the GPU.
            tokens: Tokens = found[:, PROMPT if self._is_decoder else 1 :].tolist()
        return tokens

    def logits(self, rows: Tokens, tokens: Tokens) -> Any:
        """Return the logits before each of the new tokens: float32 (rows, new, vocabulary)."""
        import torch

        prompts, new = (torch.tensor(each, device=self._device) for each in (rows, tokens))
        with torch.inference_mode():
            if self._is_decoder:
                ids = torch.cat([prompts, new[:, :-1]], dim=1)
                return self._model(ids).logits[:, PROMPT - 1 :].float()
            start = torch.full_like(new[:, :1], self._model.config.decoder_start_token_id)
            ids = torch.cat([start, new[:, :-1]], dim=1)
            return self._model(prompts, decoder_input_ids=ids).logits.float()


def distances(
    wide: TorchGenerator, narrow: TorchGenerator, rows: Tokens, tokens: Tokens
) -> tuple[float, float]:
    """Return the largest distance of a token from the best one, and the largest error of FP16.

    Both are differences of logits after the same tokens; the first is that in FP32.
    """
    import torch

    exact = wide.logits(rows, tokens)
    chosen = torch.tensor(tokens, device=exact.device)[..., None]
    distance = exact.amax(-1) - exact.gather(-1, chosen)[..., 0]
    error = (narrow.logits(rows, tokens) - exact).abs()
    return float(distance.max()), float(error.max())


def _measure(work: Work, sides: dict[str, Any], rows: int, beams: int) -> None:
    """Measure one number of rows; the models are loaded by the first case."""
    if not sides:
        began = time.perf_counter()
        sides["enginery"] = load_model(artifact_of(work), providers=work.provider)
        sides["ready_seconds"] = time.perf_counter() - began
        sides["fp32"] = TorchGenerator(work, "fp32")
        sides["fp16"] = TorchGenerator(work, "fp16") if work.on_gpu else sides["fp32"]
    batch = prompts(int(work.settings.configs[work.model]["vocab_size"]), rows)
    texts = [text_of(tokens) for tokens in batch]
    options = {"max_new_tokens": work.settings.new_tokens, "num_beams": beams, "do_sample": False}
    results: list[Any] = []
    narrow: Tokens = []

    def ours() -> None:
        results[:] = sides["enginery"].generate(texts, batch_size=rows, **options)

    def theirs() -> None:
        narrow[:] = sides["fp16"](batch, beams)

    first_ms = _timed(ours) * 1e3
    theirs()
    ours_seconds, their_seconds = [], []
    for turn in range(_TURNS):
        ours_seconds.append(_timed(ours))
        if turn < _TURNS_BESIDE:
            their_seconds.append(_timed(theirs))
    count = rows * work.settings.new_tokens
    tokens = [list(result.tokens) for result in results]
    expected = sides["fp32"](batch, beams)
    equal = first_differences(tokens, expected)
    distance, error = distances(sides["fp32"], sides["fp16"], batch, tokens)
    allowed = max(_ROUNDING * error, _MIN_ROUNDING)
    # A beam's tokens need not be the best ones after those before.
    is_right = beams > 1 or distance <= allowed
    row = {
        "model": work.model,
        "rows": rows,
        "beams": beams,
        "per_second": count / statistics.median(ours_seconds),
        "pytorch_per_second": count / statistics.median(their_seconds),
        "first_ms": first_ms,
        "ready_seconds": sides["ready_seconds"],
        "equal_rows": sum(length == work.settings.new_tokens for length in equal),
        "pytorch_equal_rows": first_differences(narrow, expected).count(work.settings.new_tokens),
        "distance": distance,
        "pytorch_error": error,
        "first_differences": [n for n in equal if n < work.settings.new_tokens],
        "distinct_tokens": len({token for each in tokens for token in each}),
    }
    row["speedup"] = row["per_second"] / row["pytorch_per_second"]
    work.add("generated", row)
    lengths = {len(each) for each in tokens}
    work.check(
        f"{work.model}: {case_name(rows, beams)}",
        passed=lengths == {work.settings.new_tokens} and is_right,
        found=f"{row['per_second']:.0f} tokens/s, {row['speedup']:.2f} × PyTorch FP16 "
        f"({row['pytorch_per_second']:.0f}); {row['equal_rows']} of {rows} rows equal PyTorch "
        f"FP32's, {row['pytorch_equal_rows']} of PyTorch FP16's; the others up to token "
        f"{row['first_differences']}; a token's logit is at most {distance:.3g} below the best, "
        f"{allowed:.3g} allowed; {row['distinct_tokens']} "
        f"distinct tokens; {lengths} tokens a row; the first call took {first_ms:.0f} ms",
    )


def first_differences(tokens: Tokens, expected: Tokens) -> list[int]:
    """Return for each row how many tokens are equal before the first one that differs."""
    return [
        next((i for i, (a, b) in enumerate(zip(mine, wanted, strict=False)) if a != b), len(wanted))
        for mine, wanted in zip(tokens, expected, strict=True)
    ]


def _timed(action: Callable[[], None]) -> float:
    before = time.perf_counter()
    action()
    return time.perf_counter() - before

"""Serve a large model to clients whose requests have many long texts, beside `load_model`."""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from typing import Any

from benchmarks.gpu_check.inputs import joined_sentences
from benchmarks.gpu_check.parts.serve import SharedServer, describe_load
from benchmarks.gpu_check.work import Work
from enginery import load_model

_WORDS, _SPREAD = 230, 0.33
"""Words of a text, which are 250 to 510 tokens, 380 on average."""
_REQUESTS = 4
"""Different requests."""


def run(work: Work) -> None:
    """Measure `load_model` and the server on the same texts."""
    work.case("large requests", partial(_measure, work), seconds=30.0)


def _measure(work: Work) -> None:
    size = work.settings.large_texts
    words = 20 if work.quick else _WORDS
    texts = joined_sentences(size * _REQUESTS, words=words, spread=_SPREAD)
    rates = []
    with load_model(work.artifact("fp16"), providers=work.provider) as model:
        for _ in range(3):
            before = time.perf_counter()
            expected = model.embed(texts, normalize=True)
            rates.append(len(texts) / (time.perf_counter() - before))
    bodies: list[dict[str, Any]] = [
        {"inputs": texts[first : first + size]} for first in range(0, len(texts), size)
    ]
    with ExitStack() as stack:
        # As many texts as all connections send, so that none is refused.
        waiting = size * work.settings.large_clients * 2
        limits = ("--queue-inputs", str(waiting), "--queue-tokens", str(512 * waiting))
        server = SharedServer(work, stack, *limits, "--max-wait", "120").get()
        load = partial(server.load, bodies, connections=work.settings.large_clients)
        load(seconds=min(work.settings.load_seconds, 1.0))
        result = load(seconds=work.settings.load_seconds * 2, expected=expected, check_every=3)
    served = result.per_second * size
    best = max(rates[1:])
    work.add(
        "large",
        {
            "model": work.model,
            "texts": size,
            "connections": result.connections,
            "load_model_per_second": best,
            "served_per_second": served,
            "share": served / best,
            "latency_ms": {f"p{share}": result.percentile(share) for share in (50, 99)},
        },
    )
    work.check(
        f"{result.connections} connections with requests of {size} texts are answered",
        passed=result.answered > 0 and not (result.lost or result.wrong or result.refused),
        found=f"{served:.0f} rows/s, load_model {best:.0f} ({served / best:.0%}); "
        f"{describe_load(result)}",
    )

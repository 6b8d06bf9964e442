"""Serve a decoder to clients that read streams of tokens, all at the same time."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

from benchmarks.gpu_check.parts.generate import artifact_of, prompts, text_of
from benchmarks.gpu_check.server import serving
from benchmarks.gpu_check.work import Work

_PROMPTS = 64


def run(work: Work) -> None:
    """Measure all streams at once, and one alone."""
    with ExitStack() as stack:
        servers: list[Any] = []
        for streams in (work.settings.streams, 1):
            measure = partial(_measure, work, stack, servers, streams)
            work.case(f"{streams} streams", measure, seconds=15.0)


def _measure(work: Work, stack: ExitStack, servers: list[Any], streams: int) -> None:
    new_tokens = work.settings.new_tokens
    if not servers:
        options = ("--generation-rows", str(work.settings.streams))
        servers.append(stack.enter_context(serving(artifact_of(work), work.provider, options)))
    (server,) = servers
    parameters = {"max_new_tokens": new_tokens, "do_sample": False}
    words = int(work.settings.configs[work.model]["vocab_size"])
    bodies = [
        {"inputs": text_of(tokens), "parameters": parameters} for tokens in prompts(words, _PROMPTS)
    ]
    load = partial(
        server.load, bodies, connections=streams, route="/generate_stream", streamed=True
    )
    load(seconds=min(work.settings.load_seconds, 1.0))
    result = load(seconds=work.settings.load_seconds)
    per_second = result.answered * new_tokens / result.seconds
    work.add(
        "streamed",
        {
            "model": work.model,
            "streams": streams,
            "per_second": per_second,
            "events_per_text": result.events / max(result.answered, 1),
            "latency_ms": {f"p{share}": result.percentile(share) for share in (50, 99)},
        },
    )
    work.check(
        f"{streams} streams of {work.model} are answered",
        passed=result.answered > 0 and not (result.lost or result.refused),
        found=f"{per_second:.0f} tokens/s in {result.answered} texts, p50 of a text "
        f"{result.percentile(50):.0f} ms, {result.refused} refused, {len(result.lost)} lost, "
        f"{result.events / max(result.answered, 1):.1f} events a text",
    )

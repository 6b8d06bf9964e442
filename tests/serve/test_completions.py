"""Texts of completions are put where their prompt and number say."""

import asyncio
from types import SimpleNamespace

from enginery.runtime.tasks.generate import Generation
from enginery.serve.api import completions
from enginery.serve.batching.generation import Progress


def test_texts_of_several_prompts_keep_their_places(monkeypatch):
    async def steps(*_):
        for index in (1, 0):  # the second prompt is done first
            yield Progress(
                index,
                tokens=2,
                results=tuple(
                    Generation(f"{index}/{number}", (), "stop", None) for number in (0, 1)
                ),
            )

    monkeypatch.setattr(completions, "run_stream", steps)
    answer = completions._Answer(None, SimpleNamespace(inputs=["a", "b"]), 2, {})
    texts = [(piece.index, piece.text, piece.finish) for piece in asyncio.run(answer.texts())]
    assert texts == [(0, "0/0", "stop"), (1, "0/1", "stop"), (2, "1/0", "stop"), (3, "1/1", "stop")]

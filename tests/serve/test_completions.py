"""Texts of completions are put where their prompt and number say."""

import asyncio

from enginery.runtime.generation.generator import Generation
from enginery.serve.api import completions
from enginery.serve.generation.jobs import Progress


def test_texts_of_several_prompts_keep_their_places(monkeypatch):
    async def steps(*_):
        for index in (1, 0):  # the second prompt is done first
            yield Progress(
                index,
                tokens=2,
                prompt_tokens=1,
                results=tuple(
                    Generation(f"{index}/{number}", (), "stop", None) for number in (0, 1)
                ),
            )

    monkeypatch.setattr(completions, "run_generation", steps)
    answer = completions._Answer(None, None, list, ["a", "b"], 2, {})
    texts = asyncio.run(answer.texts())
    assert texts == [("0/0", "stop"), ("0/1", "stop"), ("1/0", "stop"), ("1/1", "stop")]

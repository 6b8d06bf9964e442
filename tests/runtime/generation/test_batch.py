"""Searches join and leave a running batch; each gets what it gets alone."""

from dataclasses import replace

import numpy as np
import pytest

from enginery import export_model
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import InputError
from enginery.runtime.decoder_graphs import DecoderGraphs
from enginery.runtime.generation.batch import RunningBatch
from enginery.runtime.generation.decoder import CachedDecoder
from enginery.runtime.generation.options import GenerationOptions
from enginery.runtime.generation.search import Need, TextRules, make_search
from enginery.runtime.onnxruntime.runner import OrtRunner

MORE = pytest.mark.more
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12], [20], [30, 31, 32], [40, 41], [50, 51, 52, 53, 54]]


@pytest.fixture
def decoder(tiny_model, home):
    """Return a function: `decoder("llama")` is one in ONNX Runtime."""
    opened = []

    def make(kind):
        source = str(tiny_model(kind, "text-generation"))
        artifact = export_model(source, task="text-generation-with-past")
        (graphs,) = DecoderGraphs.find_all(artifact.manifest.graphs)
        runner = OrtRunner(artifact)
        opened.append(runner)
        return CachedDecoder(graphs, {graphs.later.file: runner})

    yield make
    for runner in opened:
        runner.close()


def search(prompt, **options):
    options = {"max_new_tokens": 12, "eos_token_id": tuple(range(100, 160)), **options}
    return make_search(tuple(prompt), GenerationOptions(**options), positions=128)


def alone(decoder, prompt, **options):
    batch, one = RunningBatch(decoder), search(prompt, **options)
    batch.add([one])
    while batch.searches:
        batch.step()
    return one.results()


@pytest.mark.parametrize(
    "kind", ["gpt2", *(pytest.param(k, marks=MORE) for k in ("llama", "opt", "qwen3"))]
)
def test_searches_that_join_and_leave_find_what_they_find_alone(decoder, kind):
    decoder = decoder(kind)
    assert decoder.takes_more
    options = [{}, {"num_beams": 3}, {"repetition_penalty": 1.3}, {"max_new_tokens": 3}, {}]
    searches = [search(p, **o) for p, o in zip(PROMPTS, options, strict=True)]
    batch = RunningBatch(decoder)
    for each in searches:
        batch.add([each])
        batch.step()
        batch.step()
    while batch.searches:
        batch.step()
    for each, prompt, option in zip(searches, PROMPTS, options, strict=True):
        wanted = alone(decoder, prompt, **option)
        found = each.results()
        assert [(f.tokens, f.finish) for f in found] == [(w.tokens, w.finish) for w in wanted]


@pytest.mark.parametrize("kind", ["gpt2", *(pytest.param(k, marks=MORE) for k in ("llama", "opt"))])
def test_logits_of_rows_that_joined_are_those_of_the_row_alone(decoder, kind):
    """Tokens may agree although a cache is off by a position; logits do not."""
    decoder, need = decoder(kind), Need(logits=True)
    above, _ = decoder.begin(PROMPTS[:2], need)
    above, _ = decoder.step(above, [60, 61], [0, 1], need)
    below, _ = decoder.begin([PROMPTS[2]], need)
    joined = decoder.join(above, below)
    _, found = decoder.step(joined, [70, 71, 72], [0, 1, 2], need)
    sequences = [[*PROMPTS[0], 60, 70], [*PROMPTS[1], 61, 71], [*PROMPTS[2], 72]]
    for row, tokens in enumerate(sequences):
        _, wanted = decoder.begin([tokens], need)
        np.testing.assert_allclose(found.logits[row], wanted.logits[0], atol=2e-5)


def test_padding_that_all_rows_have_is_dropped(decoder):
    decoder, need = decoder("llama"), Need(logits=True)
    state, _ = decoder.begin(PROMPTS[:2], need)
    state, _ = decoder.step(state, [60], [1], need)
    assert state.mask.tolist() == [[0] * 7 + [1, 1]]
    below, _ = decoder.begin([PROMPTS[2]], need)
    joined = decoder.join(state, below)
    assert joined.mask.tolist() == [[0, 1, 1], [1, 1, 1]]
    _, found = decoder.step(joined, [61, 62], [0, 1], need)
    _, wanted = decoder.begin([[*PROMPTS[1], 60, 61]], need)
    np.testing.assert_allclose(found.logits[0], wanted.logits[0], atol=2e-5)


def test_removed_search_frees_its_rows(decoder):
    decoder = decoder("gpt2")
    batch = RunningBatch(decoder)
    kept, removed = search(PROMPTS[0], eos_token_id=()), search(PROMPTS[1], num_beams=4)
    batch.add([kept, removed])
    batch.step()
    assert batch.rows == 5
    batch.remove(removed)
    assert batch.rows == 1
    while batch.searches:
        batch.step()
    assert kept.results() == alone(decoder, PROMPTS[0], eos_token_id=())


def test_search_that_fails_leaves_and_the_others_go_on(decoder):
    decoder = decoder("gpt2")
    batch = RunningBatch(decoder)
    kept, failing = (search(prompt, eos_token_id=()) for prompt in PROMPTS[:2])
    batch.add([failing, kept])
    failing.rules = TextRules(stops=lambda _: 1 / 0)
    batch.step()
    assert isinstance(failing.error, ZeroDivisionError)
    assert failing.done
    assert batch.searches == [kept]
    while batch.searches:
        batch.step()
    assert kept.results() == alone(decoder, PROMPTS[0], eos_token_id=())


def test_options_that_exclude_every_token_are_an_error(decoder):
    batch = RunningBatch(decoder("gpt2"))
    for options in ({}, {"num_beams": 2}):
        none = search(PROMPTS[0], do_sample=True, suppress_tokens=tuple(range(9999)), **options)
        batch.add([none])
        assert isinstance(none.error, InputError)
        assert "no token can be drawn" in str(none.error)


def test_prompts_of_one_length_run_together_where_padding_counts():
    record = GraphRecord(file="model.onnx", opset=20, inputs=(), outputs=(), data_files=())
    graphs = DecoderGraphs(record, record, None)
    assert graphs.batches([2, 3, 2]) == [[0, 1, 2]]
    assert replace(graphs, counts_padding=True).batches([2, 3, 2]) == [[0, 2], [1]]

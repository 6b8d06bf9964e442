"""A decoder with a fixed cache generates what a decoder with a growing one does."""

import shutil
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import onnxruntime as ort
import pytest

from enginery import export_model, load_model
from enginery.core.artifact.artifact import Artifact, commit_artifact, staging
from enginery.core.errors import ArtifactError, InputError
from enginery.runtime.decoder_graphs import DecoderGraphs, find_encoder_decoder
from enginery.runtime.generation import cache_buffers, fixed_cache, operators
from enginery.runtime.generation.batch import RunningBatch
from enginery.runtime.generation.cache_buffers import CacheBuffers
from enginery.runtime.generation.decoder import CachedDecoder
from enginery.runtime.generation.fixed_cache import FixedCacheDecoder
from enginery.runtime.generation.operators import Operators
from enginery.runtime.generation.options import GenerationOptions
from enginery.runtime.generation.search import Need, make_search
from enginery.runtime.model import Model
from enginery.runtime.onnxruntime.device_values import Device, new_buffer
from enginery.runtime.onnxruntime.runner import OrtRunner
from enginery.runtime.tasks.generate import Generate
from enginery.runtime.tasks.text_generator import TextGenerator
from tests.tiny_fixed_cache import fixed_bart, fixed_gpt2, graph_record

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12], [20], [30, 31, 32], [40, 41], [50, 51, 52, 53, 54]]
POSITIONS = 128
CASES = {
    "greedy": [{}] * 5,
    "beams": [{"num_beams": 4}] * 5,
    "samples": [{"do_sample": True, "seed": 3, "num_return_sequences": 3}] * 5,
    "processors": [{"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}] * 5,
    "many tokens": [{"max_new_tokens": 100, "eos_token_id": ()}] * 5,
    "each another": [
        {},
        {"num_beams": 3, "num_return_sequences": 2},
        {"repetition_penalty": 1.3},
        {"max_new_tokens": 3},
        {"do_sample": True, "seed": 3},
    ],
}


def search(prompt, **options):
    options = {"max_new_tokens": 12, "eos_token_id": tuple(range(100, 160)), **options}
    return make_search(tuple(prompt), GenerationOptions(**options), positions=POSITIONS)


def finish(batch, searches):
    while batch.searches:
        batch.step()
    assert [each.error for each in searches] == [None] * len(searches)
    return [[(h.tokens, h.finish) for h in each.results()] for each in searches]


def run(decoder, options, prompts=PROMPTS):
    searches = [search(p, **o) for p, o in zip(prompts, options, strict=True)]
    batch = RunningBatch(decoder)
    batch.add(searches)
    return finish(batch, searches)


def runner_of(model):
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return SimpleNamespace(session=session, device=Device(), records_steps=False, model=model)


@pytest.fixture(scope="module")
def gpt2(tiny_model):
    """GPT-2's decoder with a growing cache, its graphs, and the fixed ones by their attention."""
    from transformers import AutoModelForCausalLM

    source = tiny_model("gpt2", "text-generation")
    artifact = export_model(str(source), task="text-generation-with-past")
    (graphs,) = DecoderGraphs.find_all(artifact.manifest.graphs)
    weights = AutoModelForCausalLM.from_pretrained(source)
    models = {
        name: fixed_gpt2(weights, grouped=name == "grouped") for name in ("grouped", "scattered")
    }
    with OrtRunner(artifact) as runner:
        yield CachedDecoder(graphs, {graphs.later.file: runner}), graphs, models


def test_the_graph_is_recognized_by_its_choice_of_tokens(gpt2):
    _, graphs, models = gpt2
    record = graph_record(models["grouped"], "model_fixed_cache.onnx")
    for records in ([graphs.later, record], [record, graphs.later]):
        assert DecoderGraphs.find_all(records) == [replace(graphs, fixed=record)]
        assert find_encoder_decoder(records) is None


@pytest.fixture(params=["grouped", "scattered"])
def fixed(gpt2, request):
    """GPT-2 with a fixed cache."""
    _, graphs, models = gpt2
    model = models[request.param]
    record = graph_record(model, "model_fixed_cache.onnx")
    graphs = replace(graphs, fixed=record)
    return FixedCacheDecoder(graphs, {record.file: runner_of(model)}, limit=POSITIONS)


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_a_growing_cache(gpt2, fixed, case):
    assert run(fixed, CASES[case]) == run(gpt2[0], CASES[case])


def test_logits_are_those_of_a_growing_cache(gpt2, fixed):
    """Tokens may agree although a cache is off by a position; logits do not."""
    need, wanted = Need(logits=True), {}
    for decoder in (gpt2[0], fixed):
        above, _ = decoder.begin(PROMPTS[:2], need)
        above, _ = decoder.step(above, [60, 61], [0, 1], need)
        below, _ = decoder.begin(PROMPTS[2:4], need)
        below, _ = decoder.step(below, [62], [1], need)
        joined = decoder.join(above, below)
        joined, _ = decoder.step(joined, [63, 64, 65, 66], [2, 0, 1, 0], need)
        _, wanted[decoder] = decoder.step(joined, [70, 71, 72], [3, 0, 2], need)
    mine, theirs = (found.logits for found in wanted.values())
    np.testing.assert_allclose(mine, theirs, atol=2e-5)


def test_searches_join_and_leave_at_any_step(gpt2, fixed):
    options = CASES["each another"]
    found = []
    for decoder in (gpt2[0], fixed):
        searches = [search(p, **o) for p, o in zip(PROMPTS, options, strict=True)]
        left = search([60, 61], num_beams=2)
        batch = RunningBatch(decoder)
        for place, each in enumerate(searches):
            batch.add([each, left] if place == 1 else [each])
            batch.step()
            batch.step()
            if place == 2:
                batch.remove(left)
        found.append(finish(batch, searches))
    assert found[0] == found[1]


def test_a_place_that_is_free_is_taken_before_the_buffers_grow(fixed):
    batch = RunningBatch(fixed)
    batch.add(
        [
            search(p, eos_token_id=(), max_new_tokens=n)
            for p, n in zip(PROMPTS[:2], (3, 30), strict=True)
        ]
    )
    batch.step()
    batch.step()
    assert len(batch.searches) == 1
    batch.add([search(PROMPTS[2], eos_token_id=())])
    batch.step()
    assert batch.rows == 2
    assert batch._state.buffers.sizes.rows == 2
    finish(batch, [])
    assert {sizes.rows for sizes in fixed.sizes} == {1, 2}


def test_buffers_grow_with_the_longest_row(gpt2, fixed, monkeypatch):
    monkeypatch.setattr(fixed_cache, "_ROOM", 8)
    options = [{"max_new_tokens": count, "eos_token_id": ()} for count in (70, 5, 90, 2, 33)]
    assert run(fixed, options) == run(gpt2[0], options)
    assert {sizes.length for sizes in fixed.sizes} == {64, 128}


def test_rows_move_to_smaller_buffers_when_most_have_left(gpt2, fixed):
    options = [{"max_new_tokens": count, "eos_token_id": ()} for count in (2, 3, 40, 2, 2)]
    assert run(fixed, options) == run(gpt2[0], options)
    assert [sizes.rows for sizes in fixed.sizes] == [8, 2]


def test_steps_that_follow_the_choice_copy_nothing_to_the_device(fixed, monkeypatch):
    written = []
    original = CacheBuffers.write_turn
    monkeypatch.setattr(
        CacheBuffers,
        "write_turn",
        lambda *arguments: written.append(arguments) or original(*arguments),
    )
    run(fixed, CASES["many tokens"])
    assert written == []
    run(fixed, [{"num_beams": 2}] * 5)
    assert written != []


def test_a_row_without_a_search_never_leaves_the_buffers(gpt2, fixed):
    """Its position moves on with every step, and what is beyond the buffers is not checked."""
    options = [
        {"max_new_tokens": 100, "eos_token_id": ()},
        {"max_new_tokens": 30, "eos_token_id": ()},
    ]
    prompts = [PROMPTS[1], list(range(5, 95))]
    positions = []
    original = CacheBuffers.write_turn

    def watched(self, index, tokens, given):
        if given is not None:
            positions.append((self.sizes.length, given.copy()))
        original(self, index, tokens, given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CacheBuffers, "write_turn", watched)
        found = run(fixed, options, prompts)
    assert found == run(gpt2[0], options, prompts)
    assert positions
    assert all((given < length).all() for length, given in positions)


@pytest.fixture
def poisoned(monkeypatch):
    """New memory is NaN, as that of a GPU may be."""

    def make(dtype, shape, device):
        value = new_buffer(dtype, shape, device)
        if dtype == "float32":
            value.update_inplace(np.full(shape, np.nan, np.float32))
        return value

    monkeypatch.setattr(cache_buffers, "new_buffer", make)


@pytest.mark.usefixtures("poisoned")
def test_buffers_are_cleared_before_their_first_use_and_after_another_batch(
    gpt2, fixed, monkeypatch
):
    cleared = []
    clear = Operators.clear

    def watched(self, values):
        clear(self, values)
        cleared.append(values)
        assert not any(value.numpy().any() for value in values.values())

    monkeypatch.setattr(Operators, "clear", watched)
    monkeypatch.setattr(fixed_cache, "_ROOM", 8)
    for options in CASES.values():
        assert run(fixed, options) == run(gpt2[0], options)
        for buffers in fixed._idle:
            assert any(buffers.cache["past_key_values.0.key"] in v.values() for v in cleared)
            for value in buffers.cache.values():
                value.update_inplace(np.full(value.shape(), np.nan, np.float32))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3},
        {"do_sample": True},
        {"do_sample": True, "top_k": 0},
        {"repetition_penalty": 1.2},
    ],
)
@pytest.mark.parametrize("growing", [False, True])
def test_logits_that_are_not_numbers_are_an_error_of_their_row(gpt2, fixed, growing, options):
    decoder = gpt2[0] if growing else fixed
    options = {"eos_token_id": (), "seed": 1, **options}
    wanted = run(decoder, [options], PROMPTS[:1])
    searches = [search(prompt, **options) for prompt in PROMPTS[:2]]
    batch = RunningBatch(decoder)
    batch.add(searches)
    cache = batch._state.cache if growing else batch._state.buffers.cache
    for name, value in cache.items():
        if name.endswith("value"):
            array = value.numpy().copy()
            array[1] = np.nan
            value.update_inplace(array)
    while batch.searches:
        batch.step()
    assert "the logits are NaN" in str(searches[1].error)
    assert searches[0].error is None
    assert [(h.tokens, h.finish) for h in searches[0].results()] == wanted[0]


def test_a_prompt_whose_logits_are_not_numbers_fails_at_once(fixed):
    session = fixed._runner.session

    class Overflowing:
        def io_binding(self):
            return session.io_binding()

        def run_with_iobinding(self, bound, *_):
            session.run_with_iobinding(bound)
            outputs = dict(zip(names, bound.get_outputs(), strict=True))
            array = outputs["logits"].numpy().copy()
            array[0] = np.nan
            outputs["logits"].update_inplace(array)

    names = [spec.name for spec in fixed._record.outputs]
    fixed._runner.session = Overflowing()
    searches = [search(prompt) for prompt in PROMPTS[:2]]
    batch = RunningBatch(fixed)
    batch.add(searches)
    assert "the logits are NaN" in str(searches[0].error)
    assert batch.searches == searches[1:]


def test_buffers_come_back_from_a_batch_that_is_given_up(fixed):
    batch = RunningBatch(fixed)
    batch.add([search(PROMPTS[0])])
    batch.step()
    assert fixed.sizes == []
    del batch
    assert len(fixed.sizes) == 1
    fixed.close()
    assert fixed.sizes == []


def test_buffers_beyond_the_memory_to_keep_are_freed(fixed, monkeypatch):
    monkeypatch.setattr(fixed_cache, "_IDLE_BYTES", 1)
    run(fixed, CASES["greedy"])
    run(fixed, CASES["greedy"][:1], PROMPTS[:1])
    assert [sizes.rows for sizes in fixed.sizes] == [1]


def test_two_batches_at_once_have_buffers_of_their_own(gpt2, fixed):
    wanted = run(gpt2[0], CASES["greedy"])
    batches = [RunningBatch(fixed) for _ in range(2)]
    searches = [[search(prompt) for prompt in PROMPTS] for _ in batches]
    for batch, own in zip(batches, searches, strict=True):
        batch.add(own)
    while any(batch.searches for batch in batches):
        for batch in batches:
            batch.step()
    for batch, own in zip(batches, searches, strict=True):
        assert finish(batch, own) == wanted


def test_a_graph_that_fails_is_an_error_and_the_next_batch_runs(fixed):
    wanted = run(fixed, CASES["greedy"])
    session = fixed._runner.session

    class Failing:
        def io_binding(self):
            return session.io_binding()

        def run_with_iobinding(self, *_):
            raise RuntimeError("CUDA out of memory")

    fixed._runner.session = Failing()
    with pytest.raises(InputError, match="the graph fails: CUDA out of memory"):
        run(fixed, CASES["greedy"])
    fixed._runner.session = session
    assert run(fixed, CASES["greedy"]) == wanted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: None, "no graph with a fixed cache beside it"),
        (lambda r: renamed(r, "inputs", "rows", "columns"), "it has the input columns"),
        (lambda r: renamed(r, "outputs", "logits", "scores"), "it has no output logits"),
        (lambda r: renamed(r, "outputs", "present.1.key", "x"), "it has no output present.1.key"),
    ],
)
def test_a_graph_that_is_no_decoder_is_an_error(gpt2, change, message):
    _, graphs, models = gpt2
    record = change(graph_record(models["grouped"], "model_fixed_cache.onnx"))
    with pytest.raises(ArtifactError, match=message):
        FixedCacheDecoder(replace(graphs, fixed=record), {})


def renamed(record, kind, old, new):
    specs = tuple(
        replace(spec, name=new) if spec.name == old else spec for spec in getattr(record, kind)
    )
    return record.model_copy(update={kind: specs})


class OnGpu:
    """A session that does what ONNX Runtime does with CUDA graphs.

    A run with the number of a graph is recorded, by each thread for itself: it runs twice, and what
    is bound then is what a later run with this number uses, whatever is bound.
    """

    def __init__(self, session):
        self._session = session
        self._graphs = threading.local()
        self.recorded, self.plain = [], 0

    def io_binding(self):
        return self._session.io_binding()

    def run_with_iobinding(self, bound, options=None):
        graph = options.get_run_config_entry("gpu_graph_id") if options else "-1"
        own = self._graphs.__dict__.setdefault("own", {})
        if graph == "-1":
            self.plain += 1
        elif graph not in own:
            own[graph] = bound
            self.recorded.append((threading.get_ident(), graph))
            self._session.run_with_iobinding(bound)
        self._session.run_with_iobinding(own.get(graph, bound))


@pytest.fixture
def on_gpu(fixed, monkeypatch):
    """The same decoder as on a GPU; its memory is the host's."""
    fixed._runner.session = OnGpu(fixed._runner.session)
    operators = fixed._operators
    open_session = operators._open

    def open_on_gpu(graph, *, records=False):
        monkeypatch.setattr(operators, "_on_gpu", False)  # there is no GPU to open it on
        session = open_session(graph)
        monkeypatch.setattr(operators, "_on_gpu", True)
        return OnGpu(session)

    monkeypatch.setattr(operators, "_open", open_on_gpu)
    monkeypatch.setattr(operators, "_on_gpu", True)
    monkeypatch.setattr(fixed, "_captures", True)
    monkeypatch.setattr(fixed, "_on_gpu", True)
    return fixed


@pytest.mark.parametrize("case", ["greedy", "beams", "each another"])
def test_recorded_steps_give_the_same_tokens(gpt2, on_gpu, case):
    wanted = run(gpt2[0], CASES[case])
    assert [run(on_gpu, CASES[case]) for _ in range(2)] == [wanted] * 2


def test_warming_up_records_the_usual_sizes_for_the_rows_of_a_server(on_gpu):
    session = on_gpu._runner.session
    on_gpu.warm_up(6)
    assert {(sizes.rows, sizes.length) for sizes in on_gpu.sizes} >= {
        (rows, POSITIONS) for rows in (1, 2, 4, 8)
    }
    recorded = len(session.recorded)
    assert recorded == 8
    run(on_gpu, CASES["many tokens"])
    assert len(session.recorded) == recorded


def test_warming_up_stops_where_the_buffers_would_not_be_kept(on_gpu, monkeypatch):
    monkeypatch.setattr(fixed_cache, "_IDLE_BYTES", 3 * 2 * 2 * POSITIONS * 32 * 4)
    on_gpu.warm_up(64)
    assert [sizes.rows for sizes in on_gpu.sizes] == [1, 2]


def test_a_step_of_beams_makes_nothing_anew_and_replays_all(on_gpu, monkeypatch):
    batch = RunningBatch(on_gpu)
    searches = [
        search(prompt, num_beams=4, max_new_tokens=30, eos_token_id=()) for prompt in PROMPTS
    ]
    batch.add(searches)
    for _ in range(4):
        batch.step()
    sessions = [on_gpu._runner.session, *on_gpu._operators._sessions.values()]
    counts = [(len(session.recorded), session.plain) for session in sessions]
    monkeypatch.setattr(Operators, "_open", None)
    for module in (operators, cache_buffers):
        monkeypatch.setattr(module, "new_buffer", None)
    monkeypatch.setattr(OnGpu, "io_binding", None)
    for _ in range(10):
        batch.step()
    assert [(len(session.recorded), session.plain) for session in sessions] == counts


def test_each_size_is_recorded_once_in_a_thread_and_prompts_never(on_gpu):
    session = on_gpu._runner.session
    run(on_gpu, CASES["many tokens"])
    assert (len(session.recorded), session.plain) == (2, 1)
    run(on_gpu, CASES["many tokens"])
    assert (len(session.recorded), session.plain) == (2, 2)
    thread = threading.Thread(target=run, args=(on_gpu, CASES["many tokens"]))
    thread.start()
    thread.join()
    assert len(set(session.recorded)) == len(session.recorded) == 4


@pytest.fixture(scope="module")
def bart(tiny_model):
    """BART as it is loaded, and its decoder with a fixed cache."""
    from transformers import AutoModelForSeq2SeqLM

    source = tiny_model("bart", "text2text-generation")
    artifact = export_model(str(source), task="text2text-generation-with-past")
    decoder = fixed_bart(AutoModelForSeq2SeqLM.from_pretrained(source))
    record = graph_record(decoder, "decoder_model_fixed_cache.onnx")
    with load_model(artifact) as model, OrtRunner(artifact, graph="encoder_model.onnx") as encoder:
        runners = {record.file: runner_of(decoder), encoder.record.file: encoder}
        graphs = replace(model.definition.graphs, fixed=record)
        pad = model.definition.tokenizer.pad_id
        yield model, FixedCacheDecoder(graphs, runners, pad_id=pad, limit=POSITIONS)


@pytest.mark.more
def test_an_artifact_generates_with_the_graph_where_it_is_asked_to(bart, tmp_path):
    model, decoder = bart
    out = tmp_path / "artifact"
    record = decoder._record
    with staging(out) as staged:
        shutil.copytree(model.artifact.path, staged, dirs_exist_ok=True)
        (staged / record.file).write_bytes(decoder._runner.model.SerializeToString())
        manifest = model.artifact.manifest
        graphs = (*manifest.graphs, record)
        commit_artifact(staged, manifest.model_copy(update={"graphs": graphs}))
    artifact = Artifact.open(out)
    wanted = model.generate(TEXTS, num_beams=2)
    with load_model(artifact) as loaded:  # on the CPU, as before
        assert isinstance(loaded._rows.decoder, CachedDecoder)
        assert loaded.generate(TEXTS, num_beams=2) == wanted
    task = Generate.open(artifact, record)
    generator = TextGenerator(task, lambda file: OrtRunner(artifact, graph=file), fixed_cache=True)
    assert isinstance(generator.decoder, FixedCacheDecoder)
    assert generator.runner.record == record
    with Model(artifact, generator) as loaded:
        found = loaded.generate(TEXTS, num_beams=2)
        assert [each.tokens for each in found] == [each.tokens for each in wanted]
        assert "".join(loaded.stream(TEXTS[0])) == model.generate(TEXTS[:1])[0].text
        assert generator.decoder.sizes != []
    assert generator.decoder.sizes == []


TEXTS = [
    "The engine is warm and the pump runs again.",
    "Who",
    "A small cat sleeps on the boat under the tree; the rain is cold, the bell rings at noon.",
]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 4},
        {"num_beams": 3, "num_return_sequences": 3},
        {"do_sample": True, "seed": 1},
        {"max_new_tokens": 100, "eos_token_id": 599},
    ],
)
def test_an_encoder_decoder_writes_the_same_texts(bart, monkeypatch, options):
    model, decoder = bart
    options = {"max_new_tokens": 15, **options}
    wanted = [each.tokens for each in model.generate(TEXTS, **options)]
    monkeypatch.setattr(model._rows, "decoder", decoder)
    for batch_size in (8, 1):
        found = model.generate(TEXTS, batch_size=batch_size, **options)
        assert [each.tokens for each in found] == wanted


def test_inputs_of_an_encoder_join_a_batch(bart):
    model, decoder = bart
    assert decoder.takes_more
    assert not model._rows.decoder.takes_more
    task = model.definition
    wanted = [each.tokens for each in model.generate(TEXTS, max_new_tokens=15)]
    searches = []
    batch = RunningBatch(decoder)
    for row in task.read_rows(TEXTS, task.Options.read({"max_new_tokens": 15})):
        searches.append(row.content.search)
        batch.add(searches[-1:], task.collate([row], 0))
        batch.step()
    assert [tokens for ((tokens, _),) in finish(batch, searches)] == wanted

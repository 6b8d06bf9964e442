"""Decoders are compared with PyTorch's own cache over several tokens."""

import numpy as np
import pytest

from enginery import validate_model
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.model.feeds import FeedLimits
from enginery.core.shapes import TensorSpec
from enginery.runtime.decoder_graphs import DecoderGraphs, present_name
from enginery.validate.decoding import STEPS, _Decoder, make_sequences, usable_decoders
from enginery.validate.findings import Findings
from tests.validate.faults import decoder as faults
from tests.validate.faults.edits import break_graph
from tests.validate.faults.graph_editor import GraphEditor

SLOW = pytest.mark.slow
PROMPTS = ("1 prompt of 1 token", "1 prompt of 24 tokens", "4 prompts of 1–24 tokens")
ENCODED = ("1 prompt of 1 token", "1 prompt of 24 tokens", "4 prompts of 24 tokens")
TEXT, SEQ2SEQ = "text-generation-with-past", "text2text-generation-with-past"
FIRST, LATER = "decoder_model.onnx", "decoder_with_past_model.onnx"
ENCODER = "encoder_model.onnx"


def test_the_keys_of_the_encoder_are_those_of_the_prompt():
    """A step returns them, too, computed from nothing."""
    own, cross = "past_key_values.0.decoder.key", "past_key_values.0.encoder.key"
    inputs = [
        TensorSpec("input_ids", "int64", ("batch", "sequence")),
        TensorSpec(own, "float32", ("batch", 1, "past_sequence", 1)),
        TensorSpec(cross, "float32", ("batch", 1, "encoder_sequence", 1)),
    ]
    record = GraphRecord(
        file="model.onnx", opset=20, inputs=tuple(inputs), outputs=(), data_files=()
    )
    passed = []

    def run(feeds):
        passed.append(feeds)
        value = np.full((1, 1, len(passed), 1), len(passed), np.float32)
        return {present_name(own): value, present_name(cross): value}

    decoder = _Decoder(DecoderGraphs(record, record, None), {"model.onnx": run})
    feeds = {"input_ids": np.zeros((1, 1), np.int64)}
    decoder.start(feeds)
    for _ in range(2):
        decoder.resume(feeds)
    assert [step[own].max(initial=0) for step in passed] == [0, 1, 2]
    assert [step[cross].max(initial=0) for step in passed] == [0, 1, 1]


@pytest.fixture
def verdict(exported, copied, monkeypatch):
    """Return a function that validates an artifact with a fault, without generating texts."""
    monkeypatch.setattr(
        "enginery.validate.generation.generate_reference", lambda _: (None, Findings())
    )

    def make(kind, task, edit, *, graph="model.onnx", layout="enginery"):
        def plant(model):
            editor = GraphEditor(model)
            edit(editor)
            editor.finish()

        artifact = break_graph(copied(exported(kind, task, layout=layout)), plant, graph=graph)
        return validate_model(artifact, effort="quick")

    return make


def decoded(report, *, failed=False):
    """Return (graph, case) of the steps that were decoded, or of those that failed."""
    return [
        (case.graph, case.name)
        for case in report.cases
        if case.kind == "decoding" and not (failed and case.passed)
    ]


def failed_sweep(report):
    """Return the failed cases of the sweep, without those of what the graph itself decides."""
    return [
        case.name
        for case in report.cases
        if case.kind == "sweep" and not case.passed and not case.name.startswith("decision at")
    ]


def steps_of(prompts, first, later):
    return [
        (later, f"{prompt}, token {step}") if step else (first, f"{prompt}, the prompt")
        for prompt in prompts
        for step in range(STEPS + 1)
    ]


@pytest.mark.parametrize("kind", ["gpt2", *(pytest.param(k, marks=SLOW) for k in ("llama", "opt"))])
def test_decoder_passes_on_every_step(exported, kind):
    report = validate_model(exported(kind, TEXT), effort="quick")
    assert report.passed, report.summary
    assert decoded(report) == steps_of(PROMPTS, "model.onnx", "model.onnx")
    shown = [case for case in report.cases if case.kind == "decoding"]
    assert all([o.output for o in case.outputs] == ["logits"] for case in shown)
    assert not [note for note in report.notes if "Optimum" in note or "decoded" in note]


@pytest.mark.parametrize(
    ("kind", "task"),
    [
        ("t5", SEQ2SEQ),
        pytest.param("bart", SEQ2SEQ, marks=SLOW),
        # Its audio has 3000 frames.
        pytest.param("whisper", "automatic-speech-recognition-with-past", marks=SLOW),
    ],
)
@pytest.mark.parametrize(
    ("layout", "first"), [("enginery", LATER), pytest.param("optimum", FIRST, marks=SLOW)]
)
@pytest.mark.more
def test_encoder_decoder_passes_on_every_step(exported, kind, task, layout, first):
    report = validate_model(exported(kind, task, layout=layout), effort="quick")
    assert report.passed, report.summary
    assert decoded(report) == steps_of(ENCODED, first, LATER)


@pytest.mark.more
@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("gpt2", faults.newest_position_missing),
        ("gpt2", faults.cache_grown_at_the_wrong_end),
        pytest.param("gpt2", faults.oldest_position_missing, marks=SLOW),
        pytest.param("gpt2", faults.positions_returned_in_another_order, marks=SLOW),
        pytest.param("gpt2", faults.keys_returned_of_another_layer, marks=SLOW),
        pytest.param("llama", faults.newest_position_missing, marks=SLOW),
        pytest.param("llama", faults.cache_grown_at_the_wrong_end, marks=SLOW),
    ],
)
def test_wrong_cache_shows_in_the_tokens_after_it(verdict, kind, fault):
    report = verdict(kind, TEXT, fault)
    assert not report.passed
    failed = [name for _, name in decoded(report, failed=True)]
    assert any(name.startswith(PROMPTS[2]) and "token " in name for name in failed)
    assert not any("the prompt" in name for name in failed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fault", "shown_by_sweep"),
    [
        ("gpt2", faults.mask_of_the_prompt_ignored, False),
        pytest.param("llama", faults.mask_of_the_prompt_ignored, False, marks=SLOW),
        pytest.param("opt", faults.mask_of_the_prompt_ignored, False, marks=SLOW),
        pytest.param("opt", faults.mask_of_the_past_ignored, True, marks=SLOW),
    ],
)
def test_mask_of_padding_on_the_left_is_honoured(verdict, kind, fault, shown_by_sweep):
    report = verdict(kind, TEXT, fault)
    assert not report.passed
    failed = [name for _, name in decoded(report, failed=True)]
    assert any(name.startswith(PROMPTS[2]) for name in failed)
    assert all("prompts of 1–" in name for name in failed), "only prompts with padding"
    assert bool(failed_sweep(report)) == shown_by_sweep


@pytest.mark.more
@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        ("gpt2", True),
        pytest.param("opt", True, marks=SLOW),
        pytest.param("llama", False, marks=SLOW),
    ],
)
def test_positions_count_from_the_first_token(verdict, kind, shown):
    """Rotary positions are relative, so that Llama's tokens do not change; its keys do."""
    report = verdict(kind, TEXT, faults.positions_counted_from_the_padding)
    assert not report.passed
    failed = [name for _, name in decoded(report, failed=True)]
    assert all("prompts of 1–" in name for name in failed), "only prompts with padding"
    assert bool(failed) == shown


@pytest.mark.more
def test_prompt_runs_with_an_empty_past(verdict):
    report = verdict("gpt2", TEXT, faults.prompt_without_past_differs)
    assert not report.passed
    failed = {name for _, name in decoded(report, failed=True)}
    assert {f"{prompt}, the prompt" for prompt in PROMPTS} <= failed
    # More prompts are those at which a run at once differs from one token by token.
    assert all(name.endswith(", the prompt") for name in failed)
    assert not failed_sweep(report)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout", "fault", "graph"),
    [
        ("t5", "enginery", faults.encoder_mask_ignored, LATER),
        pytest.param("t5", "optimum", faults.encoder_keys_of_another_layer, LATER, marks=SLOW),
        pytest.param("t5", "optimum", faults.encoder_mask_ignored, FIRST, marks=SLOW),
        *(
            pytest.param("bart", layout, faults.encoder_keys_returned_of_another_layer, graph)
            for layout, graph in (("optimum", FIRST), ("enginery", ENCODER))
        ),
        pytest.param("bart", "enginery", faults.encoder_mask_ignored, LATER, marks=SLOW),
    ],
)
def test_fault_of_an_encoder_decoder_shows_in_its_tokens(verdict, kind, layout, fault, graph):
    report = verdict(kind, SEQ2SEQ, fault, graph=graph, layout=layout)
    assert not report.passed
    assert decoded(report, failed=True)


# Sequences


def record_of(inputs, outputs=()):
    return GraphRecord(
        file="model.onnx", opset=20, inputs=tuple(inputs), outputs=tuple(outputs), data_files=()
    )


def graphs_of(*inputs, encoder=()):
    decoder = record_of(inputs)
    return DecoderGraphs(decoder, decoder, record_of(encoder) if encoder else None)


IDS = TensorSpec("input_ids", "int64", ("batch", "sequence"))
MASK = TensorSpec("attention_mask", "int64", ("batch", "past_sequence + sequence"))
POSITIONS = TensorSpec("position_ids", "int64", ("batch", "sequence"))


def test_prompts_are_padded_on_the_left_and_positions_count_from_the_first_token():
    graphs = graphs_of(IDS, MASK, POSITIONS)
    limits = FeedLimits(vocab_size=50, pad_token_id=7, max_positions=STEPS + 4)
    tokens = make_sequences(graphs, limits, seed=0)[-1]
    prompt = tokens.feeds(graphs, 0)
    assert prompt["attention_mask"].tolist() == [
        [1, 1, 1, 1],
        [0, 1, 1, 1],
        [0, 0, 1, 1],
        [0, 0, 0, 1],
    ]
    assert ((prompt["input_ids"] == 7) == (prompt["attention_mask"] == 0)).all()
    assert prompt["position_ids"][1].tolist() == [0, 0, 1, 2]
    second = tokens.feeds(graphs, 2)
    assert second["input_ids"].shape == (4, 1)
    assert second["attention_mask"].sum(axis=1).tolist() == [6, 5, 4, 3]
    assert second["position_ids"].ravel().tolist() == [5, 4, 3, 2]


def test_tokens_of_all_steps_are_one_text():
    graphs = graphs_of(IDS, MASK)
    (tokens, *_) = make_sequences(graphs, FeedLimits(), seed=0)
    steps = [tokens.feeds(graphs, step)["input_ids"] for step in range(STEPS + 1)]
    np.testing.assert_array_equal(np.concatenate(steps, axis=1), tokens.ids)


def test_fixed_batch_and_short_models_are_kept_to():
    ids = TensorSpec("input_ids", "int64", (3, "sequence"))
    shapes = [s.ids.shape for s in make_sequences(graphs_of(ids), FeedLimits(), seed=0)]
    assert shapes == [(3, 1 + STEPS), (3, 24 + STEPS)]
    tiny = FeedLimits(max_positions=4)
    assert [s.ids.shape for s in make_sequences(graphs_of(IDS), tiny, seed=0)] == [(1, 1 + STEPS)]


def test_inputs_of_the_encoder_are_padded_on_the_right():
    encoder = (
        TensorSpec("input_ids", "int64", ("batch", "encoder_sequence")),
        TensorSpec("attention_mask", "int64", ("batch", "encoder_sequence")),
    )
    graphs = graphs_of(IDS, encoder=encoder)
    feeds = make_sequences(graphs, FeedLimits(), seed=0)[-1].feeds(graphs, 1)
    assert set(feeds) == {"input_ids", "encoder_input_ids", "encoder_attention_mask"}
    mask = feeds["encoder_attention_mask"]
    assert mask.shape == (4, 24)
    assert mask[:, 0].all()
    assert mask[1:, -1].sum() == 0


def past(positions):
    return TensorSpec("past_key_values.0.key", "float32", ("batch", 2, positions, 4))


PRESENT = TensorSpec("present.0.key", "float32", ("batch", 2, "past_sequence + sequence", 4))
EMBEDDINGS = TensorSpec("inputs_embeds", "float32", ("batch", "sequence", 8))
STATES = TensorSpec("encoder_hidden_states", "float32", ("batch", "encoder_sequence", 8))


@pytest.mark.parametrize(
    ("inputs", "outputs", "reason"),
    [
        ((past("past_sequence"), EMBEDDINGS), (PRESENT,), "it takes no input_ids"),
        ((IDS, past("past_sequence"), STATES), (PRESENT,), "computes its input encoder_hidden"),
        ((IDS, past(16)), (PRESENT,), "its past has 16 positions"),
        ((IDS, past("past_sequence")), (), "no output is fed back as past_key_values.0.key"),
        (
            (TensorSpec("input_ids", "int64", ("batch", 8)), past("past_sequence")),
            (PRESENT,),
            "it takes 8 tokens at a time",
        ),
    ],
)
def test_graph_that_cannot_decode_prompts_is_noted(inputs, outputs, reason):
    decoders = DecoderGraphs.find_all([record_of(inputs, outputs)])
    usable, findings = usable_decoders(decoders)
    assert usable == []
    (note,) = findings.notes
    assert reason in note
    assert note.startswith("model.onnx: no tokens were decoded: ")

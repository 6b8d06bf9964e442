"""Generated tokens are compared with those of PyTorch's `generate`, over many steps."""

import json
import re
from dataclasses import replace
from functools import partial

import pytest

from enginery import export_model, optimize_model, quantize_model, validate_model
from enginery.core.artifact.artifact import Artifact, commit_artifact
from enginery.core.errors import InputError
from enginery.reports.validation import GenerationMetrics
from enginery.validate import generation
from enginery.validate.generation import STEPS
from tests import sounds
from tests.speech import save_whisper
from tests.tiny import save_tiny
from tests.validate.faults import decoder as faults
from tests.validate.faults.edits import break_graph
from tests.validate.faults.graph_editor import GraphEditor

SLOW = pytest.mark.slow
TEXT, SEQ2SEQ = "text-generation-with-past", "text2text-generation-with-past"
SPEECH = "automatic-speech-recognition-with-past"
PROMPT = 24
"""Tokens of the longest prompt of every validation."""
LATER = "decoder_with_past_model.onnx"
TASKS = {"gpt2": TEXT, "marian": SEQ2SEQ}
WHISPER = {"whisper": SPEECH}
SLOW_TASKS = {
    **dict.fromkeys(("llama", "opt", "qwen3"), TEXT),
    **dict.fromkeys(("t5", "bart", "m2m_100"), SEQ2SEQ),
}
EQUAL = (
    f"3 inputs × {STEPS} steps equal PyTorch's greedy search token for token; beam 4 equal; weights"
)


def generated(report):
    """Return the problem of each search, text and option that failed, by its name."""
    return {
        case.name: case.problem
        for case in report.cases
        if case.kind == "generation" and case.problem
    }


def failed_steps(report):
    return [c.name for c in report.cases if c.kind == "generation" and c.outputs and not c.passed]


def others_failed(report):
    """Return failed cases that are not generated, nor made for what the graph itself decides."""
    return [
        case.name
        for case in report.cases
        if case.kind in ("sweep", "real", "decoding")
        and not case.passed
        and not case.name.startswith(("decision at", "length "))
        and "padded to" not in case.name
        and not any(int(tokens) > PROMPT for tokens in re.findall(r"(\d+) tokens,", case.name))
    ]


def validated(artifact, **options):
    return validate_model(artifact, **{"effort": "quick", **options})


@pytest.fixture
def broken(exported, copied):
    """Return a function that validates an artifact with a fault in a graph."""

    def make(kind, edit, *, graph="model.onnx", **options):
        def plant(model):
            editor = GraphEditor(model)
            edit(editor)
            editor.finish()

        artifact = break_graph(copied(exported(kind, TASKS[kind])), plant, graph=graph)
        return validated(artifact, **options)

    return make


@pytest.fixture
def edited(exported, copied, monkeypatch):
    """Return a function that validates an artifact after an edit of one of its JSON files.

    A few tokens of each text show it.
    """
    monkeypatch.setattr(generation, "STEPS", 4)

    def make(kind, file, edit, *, source=None, **options):
        task = {**TASKS, **WHISPER}[kind]
        sound = exported(kind, task) if source is None else export_model(str(source), task=task)
        artifact = copied(sound)
        path = artifact.path / file
        document = json.loads(path.read_text())
        edit(document)
        path.unlink()  # it may be a hard link to the file in the store
        path.write_text(json.dumps(document))
        commit_artifact(artifact.path, artifact.manifest)
        return validated(Artifact.open(artifact.path), **options)

    return make


def test_metrics_say_what_was_compared():
    found = GenerationMetrics("sentences", 8, 32, 256, 256, 8, 0, 4, 8, 1.0, 0)
    assert found.describe() == (
        "8 inputs × 32 steps equal PyTorch's greedy search token for token; beam 4 equal"
    )
    found = replace(found, compared_steps=200, equal=5, parted=2, beams_equal=6, failed=3)
    assert found.describe() == (
        "5 of 8 inputs × 32 steps equal PyTorch's greedy search, 2 part where that is allowed (200 "
        "of 256 tokens compared); best token the same in 100.0% of steps with PyTorch's tokens; "
        "beam 4 equal for 6 of 8; 3 failures"
    )
    ended = GenerationMetrics("images", 3, 9, 20, 20, 3, 0, 4, 3, 1.0, 0)
    assert ended.describe().startswith("3 inputs × up to 9 steps equal")


@pytest.mark.parametrize(
    ("kind", "task"),
    [*TASKS.items(), *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW_TASKS.items())],
)
def test_sound_artifact_generates_the_tokens_of_pytorch(exported, kind, task):
    report = validated(exported(kind, task))
    assert report.passed, report.summary
    assert f"; generation: {EQUAL}: " in report.summary
    steps = [case for case in report.cases if case.kind == "generation" and case.outputs]
    assert [case.name for case in steps] == [
        f"3 sentences with PyTorch's tokens, {f'token {step}' if step else 'the prompt'}"
        for step in range(STEPS)
    ]
    notes = [note for note in report.notes if "generated" in note or "tokens" in note]
    # A quick validation reads few positions token by token, and says so.
    assert [note for note in notes if "prompts were compared with single tokens" not in note] == []


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "task"), [("gpt2", TEXT), ("t5", SEQ2SEQ)])
def test_fp16_and_int8_pass(exported, tmp_path, kind, task):
    artifact = exported(kind, task)
    half = optimize_model(artifact, target="tensorrt", precision="fp16", allow_failed=True)
    report = validated(half)
    assert report.passed, report.summary
    assert f"; generation: {EQUAL}: " in report.summary
    small = quantize_model(
        artifact, out=tmp_path / "int8", scheme="dynamic", target="cpu", allow_failed=True
    )
    report = validated(small)
    assert report.passed, report.summary
    # Rounding decides near ties of random weights: the texts part, and the step that it is counts.
    found = report.generation
    assert found.parted > 0
    assert found.compared_steps < found.generated_steps
    assert 0.8 < found.agreement < 1
    assert "part where that is allowed" in report.summary
    assert f"{found.agreement:.1%} of steps with PyTorch's tokens" in report.summary


@pytest.mark.more
@pytest.mark.parametrize(
    "fault",
    [faults.positions_clamped, pytest.param(faults.long_mask_ignored, marks=pytest.mark.slow)],
)
def test_fault_of_late_steps_shows_in_generation_alone(broken, fault):
    report = broken("gpt2", fault)
    assert not report.passed
    assert not others_failed(report)
    assert failed_steps(report)
    assert report.generation.failed == len(generated(report))


@pytest.mark.slow
def test_fault_of_an_encoder_decoder_shows_in_late_steps(broken):
    past = "past_key_values.0.decoder.key"
    report = broken("marian", partial(faults.oldest_position_forgotten, past=past), graph=LATER)
    assert not report.passed
    # What the step after 30 tokens returns is read by the next one, the last.
    assert failed_steps(report) == [f"3 sentences with PyTorch's tokens, token {STEPS - 1}"]


@pytest.mark.slow
def test_wrong_tokens_name_input_step_and_margin(broken):
    report = broken("gpt2", faults.oldest_position_forgotten)
    assert re.search(r"worst: \w.* on (generation|sweep|decoding) '.*largest error", report.summary)
    problems = generated(report)
    greedy = [problem for name, problem in problems.items() if "greedy" in name]
    assert greedy
    for problem in greedy:
        assert " token " in problem
        assert ", PyTorch's is " in problem
        assert " apart, a near tie of up to " in problem
    assert all(name.startswith("sentence ") for name in problems)
    assert not others_failed(report)
    assert failed_steps(report)
    assert report.generation.failed == len(problems)
    beams = [problem for name, problem in problems.items() if name.endswith("beam 4")]
    assert any("its tokens differ from PyTorch's" in problem for problem in beams)


@pytest.mark.slow
def test_texts_may_part_within_the_allowed_error(broken):
    """A limit that allows the fault's errors allows its partings, and the report counts them."""
    fault = faults.oldest_position_forgotten
    report = broken("gpt2", fault, max_abs_error=100.0, min_cosine=-1.0)
    assert not generated(report)
    found = report.generation
    assert found.parted > 0
    assert found.equal + found.parted == found.inputs
    assert found.compared_steps < found.generated_steps
    assert found.beams_equal < found.inputs


@pytest.mark.more
@pytest.mark.parametrize(
    ("kind", "field", "value", "shown"),
    [
        ("gpt2", "eos_token_id", [0, 5], "eos_token_id is [0, 5], but [0] in PyTorch"),
        *(
            pytest.param("marian", field, value, f"{field} is {shown} in PyTorch", marks=SLOW)
            for field, value, shown in (
                ("eos_token_id", None, "not set, but [2]"),
                ("decoder_start_token_id", 7, "7, but 1"),
                ("bad_words_ids", None, "not set, but [[1]]"),
            )
        ),
    ],
)
def test_wrong_option_of_generation_is_named(edited, kind, field, value, shown):
    report = edited(kind, "generation_config.json", lambda d: d.update({field: value}))
    assert not report.passed
    assert generated(report)["generation_config.json"] == shown
    assert f"generation 'generation_config.json': {shown}" in report.summary
    assert not others_failed(report)


@pytest.mark.more
def test_end_token_that_pytorch_does_not_have_ends_the_text(edited, exported):
    sound = exported("gpt2", TEXT)
    from enginery import load_model

    with load_model(sound, allow_failed=True) as model:
        (text,) = model.generate(["The engine starts at the first turn of the key."])
    end = {"eos_token_id": [0, text.tokens[2]]}
    report = edited("gpt2", "generation_config.json", lambda d: d.update(end))
    problem = generated(report)["sentence 1, greedy search"]
    assert f"the text ends after {text.tokens.index(text.tokens[2]) + 1} tokens" in problem
    assert "PyTorch's after 4" in problem


@pytest.mark.more
def test_tokenizer_without_special_tokens_fails(edited):
    report = edited("marian", "tokenizer.json", lambda d: d.update(post_processor=None))
    assert not report.passed
    problems = [p for name, p in generated(report).items() if name.endswith(", tokens")]
    assert len(problems) == 3
    assert all("the tokenizer gives" in problem for problem in problems)


@pytest.mark.more
def test_artifact_that_load_model_cannot_generate_with_fails(edited):
    report = edited("gpt2", "generation_config.json", lambda d: d.update(num_beam_groups=2))
    assert not report.passed
    assert report.generation is None
    problem = generated(report)["answers"]
    assert problem.startswith("load_model cannot generate: ")
    assert "num_beam_groups is 2, which is not supported" in problem
    assert problem in report.summary


@pytest.mark.more
def test_options_of_the_model_are_honoured(tmp_path, home):
    """Sampling is off on both sides; processors, ends and forced tokens are those of the file."""
    source = save_tiny("gpt2", "text-generation", tmp_path / "source")
    file = source / "generation_config.json"
    options = {
        "do_sample": True,
        "temperature": 0.5,
        "top_k": 3,
        "num_beams": 2,
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "suppress_tokens": [70, 71],
        "eos_token_id": [0, *range(300, 340)],
        "forced_eos_token_id": 5,
        "max_new_tokens": 40,
        "length_penalty": 0.7,
    }
    file.write_text(json.dumps({**json.loads(file.read_text()), **options}))
    report = validated(export_model(str(source), task=TEXT))
    assert report.passed, report.summary
    assert not [note for note in report.notes if "generated" in note], report.notes
    assert report.generation.equal == report.generation.beams_equal == 3
    assert report.generation.generated_steps < 3 * STEPS
    assert f"3 inputs × up to {report.generation.steps} steps equal" in report.summary


@pytest.mark.parametrize(
    "kind",
    [pytest.param("gpt2", marks=pytest.mark.more), pytest.param("marian", marks=pytest.mark.slow)],
)
def test_without_tokenizer_prompts_are_made_up(tiny_model, home, tmp_path, kind):
    source = save_tiny(kind, TASKS[kind].removesuffix("-with-past"), tmp_path / "source")
    for file in ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"):
        (source / file).unlink()
    report = validated(export_model(str(source), task=TASKS[kind]))
    assert report.passed, report.summary
    assert report.generation.what == "made-up prompts"
    assert report.generation.equal == 3


@pytest.mark.more
def test_tokenizer_that_only_the_source_has_is_missed(exported, copied):
    artifact = copied(exported("gpt2", TEXT))
    (artifact.path / "tokenizer.json").unlink()
    commit_artifact(artifact.path, artifact.manifest)
    report = validated(Artifact.open(artifact.path))
    assert not report.passed
    assert generated(report)["answers"].startswith("load_model cannot generate: ")


@pytest.mark.slow
def test_texts_of_the_user_are_generated_from(exported, tmp_path):
    data = tmp_path / "prompts.csv"
    data.write_text("text\n" + "\n".join(["The pump runs", "The engine is", "A cat", "Who"]))
    artifact = exported("gpt2", TEXT)
    report = validated(artifact, data=str(data))
    assert report.passed, report.summary
    assert report.generation.what == "rows"
    assert report.generation.equal == 3
    with pytest.raises(InputError, match="column"):
        validated(artifact, data=str(data), column="review")


@pytest.mark.slow
def test_graphs_of_optimum_are_not_generated_with(exported):
    report = validated(exported("marian", SEQ2SEQ, layout="optimum"))
    assert report.passed, report.summary
    assert report.generation is None
    assert any(
        note.startswith("not generated: the first step of decoder_with_past_model.onnx is another")
        for note in report.notes
    )


@pytest.mark.slow
def test_speech_is_transcribed(home, tmp_path):
    """Whisper's whole prompt is PyTorch's, and every step behind it."""
    artifact = export_model(str(save_whisper(tmp_path / "whisper")), task=SPEECH)
    report = validated(artifact)
    assert report.passed, report.summary
    assert not [note for note in report.notes if "generated" in note], report.notes
    assert report.generation.equal == report.generation.beams_equal == 3
    steps = [case for case in report.cases if case.kind == "generation" and case.outputs]
    # The language and `<|notimestamps|>` follow the first token.
    assert len(steps) == 2 + report.generation.steps
    assert steps[0].name == "3 sounds with PyTorch's tokens, the prompt"

    folder = tmp_path / "sounds"
    folder.mkdir()
    for seed in range(2):
        (folder / f"{seed}.wav").write_bytes(sounds.wav(sounds.speech(2, seed=seed)))
    report = validated(artifact, data=str(folder))
    assert report.passed, report.summary
    assert report.generation.what == "sounds"
    assert report.generation.inputs == 2

    with pytest.raises(InputError, match="has no audio"):
        validated(artifact, data=str(tmp_path / "whisper"))


@pytest.mark.slow
def test_other_features_of_sounds_fail(home, edited, tmp_path):
    source = save_whisper(tmp_path / "whisper")
    file = "preprocessor_config.json"
    report = edited("whisper", file, lambda d: d.update(n_fft=512), source=source)
    assert not report.passed
    problem = generated(report)["sound 1, input_features"]
    assert "from transformers', 0.000" in problem


@pytest.mark.more
def test_tokens_that_are_decoded_to_another_text_fail(edited):
    """A step of the decoder that the source does not have changes words."""

    def change_words(document):
        replace = {"type": "Replace", "pattern": {"String": "e"}, "content": "x"}
        decoders = [decoder for decoder in (document["decoder"], replace) if decoder]
        document["decoder"] = {"type": "Sequence", "decoders": decoders}

    report = edited("marian", "tokenizer.json", change_words)
    assert not report.passed
    assert "tokenizer.json, decoder" in report.summary

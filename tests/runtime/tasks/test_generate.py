"""Generation as a task: which artifacts are of it, its options, limits and rows."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest

from enginery import export_model, load_model
from enginery.cli.demo import builtin_inputs, predict_samples
from enginery.core.errors import InputError
from enginery.core.shapes import TensorSpec
from enginery.runtime.tasks import find_task, is_generating, manifest_task, supported_tasks
from enginery.runtime.tasks.generate import (
    Generate,
    GenerateFromAudio,
    GenerateFromImages,
    GenerateOptions,
)
from enginery.runtime.tasks.task import InputLimits
from enginery.runtime.tasks.text_generator import TextGenerator


def manifest(task, *inputs):
    """A manifest with a graph for each input's name."""
    graphs = [
        SimpleNamespace(inputs=(TensorSpec(name, "float32", ("batch", 3)),)) for name in inputs
    ]
    return SimpleNamespace(task=task, graphs=graphs)


@pytest.mark.parametrize(
    ("task", "definition"),
    [
        ("text-generation-with-past", Generate),
        ("text2text-generation-with-past", Generate),
        ("image-to-text-with-past", GenerateFromImages),
        ("automatic-speech-recognition-with-past", GenerateFromAudio),
    ],
)
def test_task_of_an_artifact_is_known_whatever_its_first_graph_takes(task, definition):
    # A decoder takes token ids, also that of images or speech.
    assert manifest_task(manifest(task, "input_ids", "pixel_values")) is definition
    assert find_task(task, modality=definition.modality) is definition
    assert task in supported_tasks()
    assert is_generating(task)


def test_models_without_a_cache_do_not_generate():
    assert manifest_task(manifest("text-generation", "input_ids")) is None
    assert not is_generating("text-generation")
    several = manifest("automatic-speech-recognition", "input_values", "input_ids")
    assert manifest_task(several) is None


@pytest.fixture
def writer(tiny_model, home):
    source = tiny_model("gpt2", "text-generation")
    with load_model(export_model(str(source), task="text-generation-with-past")) as model:
        yield model


def test_model_that_generates_is_a_model_like_others(writer):
    assert writer.method == "generate"
    assert isinstance(writer.definition, Generate)
    texts = ["The engine", "A"]
    wanted = writer.generate(texts, max_new_tokens=5)
    assert writer(texts, max_new_tokens=5) == wanted
    assert [text.prompt_tokens for text in wanted] == [
        len(writer.definition.tokenizer.encode_untruncated([text], special=True)[0].ids)
        for text in texts
    ]
    writer.warm_up()
    with pytest.raises(InputError, match=r"embed\(\) was called, but .* was exported for text-gen"):
        writer.embed(texts)


def test_a_model_that_generates_is_asked_what_the_user_gives(writer):
    messages = []
    progress = SimpleNamespace(say=messages.append)
    assert builtin_inputs(writer.artifact, progress=progress) == ()
    assert messages == ["ask: skipped, no built-in input is for text-generation-with-past"]
    (sample,) = predict_samples(writer.artifact, ["The engine"])
    assert sample.row()["answer"] == writer.generate(["The engine"])[0].text


def test_stream_of_a_model_that_does_not_generate_is_an_error(tiny):
    with (
        load_model(tiny.artifact("bert", "text-classification")) as model,
        pytest.raises(InputError, match=r"stream\(\) was called, but"),
    ):
        model.stream("The engine")


def test_options_count_the_texts_of_an_input():
    assert GenerateOptions.read({"num_return_sequences": None}).max_items == 1
    options = GenerateOptions.read({"num_return_sequences": 3, "num_beams": 4})
    assert options.max_items == 3
    assert options.values == {"num_return_sequences": 3, "num_beams": 4}


def test_limits_hold_for_every_row(writer):
    limits = InputLimits(max_new_tokens=4, max_sequences=2)
    task = replace(writer.definition, limits=limits)
    (row,) = task.preprocess(["The engine"], task.Options.read({"max_length": 60})).rows
    assert row.content.new_tokens == 4
    for values, message in (
        ({"max_new_tokens": 5}, "max_new_tokens is 5, expected at most 4"),
        ({"num_beams": 3}, "takes 3 beams or sequences for each input, expected at most 2"),
        ({"stop_strings": ["a"] * 17}, "stop_strings: found 17 items, expected at most 16"),
    ):
        with pytest.raises(InputError, match=message):
            task.preprocess(["The engine"], task.Options.read(values))
    # Without a server's limits they are options like others.
    wide = writer.definition.preprocess(["A"], task.Options.read({"num_beams": 3})).rows
    assert wide[0].content.rows == 3


def test_rows_are_read_as_batches_run(writer, monkeypatch):
    happened = []
    steps = TextGenerator._steps

    def noting(generator, rows):
        happened.append(len(rows))
        return steps(generator, rows)

    monkeypatch.setattr(TextGenerator, "_steps", noting)
    assert len(writer.generate(["A"] * 5, batch_size=2, max_new_tokens=2)) == 5
    assert happened == [2, 2, 1]


TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}> {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
MESSAGES = [{"role": "user", "content": "Is the engine warm?"}]


@pytest.fixture
def chatter(tiny_model, tmp_path, home):
    source = shutil.copytree(tiny_model("llama", "text-generation"), tmp_path / "chatter")
    (source / "chat_template.jinja").write_text(TEMPLATE)
    with load_model(export_model(str(source), task="text-generation-with-past")) as model:
        yield model


def test_a_chat_is_the_generation_of_the_prompt_that_the_template_makes(chatter):
    prompt = "<user> Is the engine warm?\n<assistant> "
    (expected,) = chatter.generate([prompt], max_new_tokens=12)
    answer = chatter.chat(MESSAGES, max_new_tokens=12)
    assert answer.tokens == expected.tokens
    assert answer.text == expected.text.removeprefix(prompt)
    assert "".join(chatter.stream_chat(MESSAGES, max_new_tokens=12)) == answer.text


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        (MESSAGES, {"num_beams": 3, "num_return_sequences": 2}, "but a chat has one answer"),
        (MESSAGES, {"max_tokens": 3}, "unknown option 'max_tokens'"),
    ],
)
def test_what_a_chat_does_not_take_is_an_error(chatter, messages, options, message):
    with pytest.raises(InputError, match=message):
        chatter.chat(messages, **options)
    with pytest.raises(InputError, match=message):
        chatter.stream_chat(messages, **options)


def test_a_model_without_a_template_does_not_chat(writer):
    with pytest.raises(InputError, match="has no chat template"):
        writer.chat(MESSAGES)

"""One definition of a task is all that answers need; options are typed and limited."""

from __future__ import annotations

import csv
import inspect
import json
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest

from enginery import load_model
from enginery.api import export_triton
from enginery.cli.demo import builtin_inputs, predict_samples
from enginery.core.artifact.artifact import Artifact, commit_artifact
from enginery.core.errors import ArtifactError, InputError, OptionError
from enginery.core.shapes import TensorSpec
from enginery.predict.config import PredictConfig
from enginery.predict.stage import run as predict
from enginery.publish.card.snippets import loading_snippets
from enginery.publish.pyfunc import _load_pyfunc
from enginery.runtime.model import Model
from enginery.runtime.onnxruntime.runner import OrtRunner
from enginery.runtime.tasks import TASKS, find_task, supported_tasks
from enginery.runtime.tasks.audio import example_wav
from enginery.runtime.tasks.batch_runner import BatchRunner
from enginery.runtime.tasks.images import ImageTask
from enginery.runtime.tasks.task import Task, TaskOptionError, TaskOptions
from enginery.runtime.tasks.tensors import Tensors
from tests.deploy.triton_repository import read_config, run_ensemble, texts
from tests.runtime.count_task import Count, Counted, count

TEXTS = ["The engine is warm.", "Rain.", "the pump runs again and again and again"]


@pytest.fixture
def uncounted(tiny, tmp_path):
    """An artifact of a task that is not answered: BERT's token vectors, for token-counting."""
    source = tiny.artifact("bert", "feature-extraction")
    path = tmp_path / "counting"
    shutil.copytree(source.path, path)
    commit_artifact(path, source.manifest.model_copy(update={"task": "token-counting"}))
    return Artifact.open(path)


@pytest.fixture
def counting(uncounted, monkeypatch):
    """The same artifact, with the task and its method added."""
    monkeypatch.setitem(TASKS, Count.verb, Count)
    monkeypatch.setattr(Model, Count.verb, count, raising=False)
    return uncounted


@pytest.fixture
def counted(uncounted):
    """What is to be counted in the texts, for some vowels."""
    from enginery.runtime.text.tokenizer import TextTokenizer

    tokenizer = TextTokenizer.open(uncounted.path)

    def make(vowels="aeiou"):
        tokens = map(len, tokenizer.encode(TEXTS))
        return [
            Counted(n, sum(map(text.count, vowels))) for n, text in zip(tokens, TEXTS, strict=True)
        ]

    return make


# A new task is one module


def test_the_remedy_for_an_unknown_task_runs_as_it_is_shown(uncounted):
    with pytest.raises(ArtifactError, match="which is not a supported task") as error:
        load_model(uncounted)
    shown = re.search(r"(from enginery import .*?; OrtRunner\(.*?\)\({.*?}\))\.", error.value.do)[1]
    names = re.findall(r'"(\w+)": …', shown)
    assert names == [spec.name for spec in uncounted.manifest.graphs[0].inputs]
    imports, call = shown.split("; ")
    call = call.replace('"…"', repr(str(uncounted.path))).replace("…", "ids")
    found: dict[str, object] = {"ids": np.ones((1, 4), np.int64)}
    exec(f"{imports}\noutputs = {call}", found)  # the remedy is what is tested
    assert found["outputs"]["last_hidden_state"].shape[:2] == (1, 4)


def test_unsupported_task_is_an_error(uncounted, tmp_path):
    with pytest.raises(ArtifactError, match="exported for token-counting, which is not"):
        load_model(uncounted)
    (tmp_path / "in.txt").write_text("warm\n")
    with pytest.raises(ArtifactError, match="exported for token-counting, expected one of"):
        predict(uncounted, str(tmp_path / "in.txt"), tmp_path / "out.jsonl", PredictConfig())
    with pytest.raises(InputError, match="token-counting takes more than single texts"):
        predict_samples(uncounted, TEXTS)


def test_new_task_is_a_method_of_a_loaded_model(counting, counted):
    with load_model(counting) as model:
        assert model.count(TEXTS) == model(TEXTS) == counted()
        assert model.count(TEXTS, vowels="e") == counted("e")
        assert model.count([]) == []
        with pytest.raises(TaskOptionError, match="unknown option 'vowel'; did you mean 'vowels'"):
            model(TEXTS, vowel="e")
        with pytest.raises(InputError, match=r"embed\(\) was called, but .* Call count\(\)"):
            model.embed(TEXTS)


def test_new_task_answers_files(counting, counted, tmp_path):
    with (tmp_path / "in.csv").open("w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerows([("id", "text"), *enumerate([*TEXTS, ""])])
    for name in ("out.parquet", "out.jsonl"):
        report = predict(counting, str(tmp_path / "in.csv"), tmp_path / name, PredictConfig())
        assert (report.counts.rows, report.bad_rows) == (4, 1)
    found = pq.read_table(tmp_path / "out.parquet").to_pylist()
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == found
    *answered, bad = found
    assert [(row["tokens"], row["vowels"], row["error"]) for row in answered] == [
        (each.tokens, each.vowels, None) for each in counted()
    ]
    assert (bad["tokens"], bad["error"]) == (None, "text is empty")


def test_new_task_is_an_mlflow_model(counting, counted):
    model = _load_pyfunc(str(counting.path))
    assert model.predict({"text": TEXTS}) == [each.to_dict() for each in counted()]
    assert model.predict(TEXTS, {"vowels": "e"}) == [each.to_dict() for each in counted("e")]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow.*")
@pytest.mark.filterwarnings("ignore::FutureWarning:mlflow.*")
@pytest.mark.filterwarnings("ignore::UserWarning:mlflow.*")
def test_new_task_has_a_signature_for_mlflow(counting):
    pytest.importorskip("mlflow", reason="pip install 'enginery[mlflow]'")
    from enginery.publish.targets.mlflow.model import signature

    found = signature(counting.manifest)
    assert found.inputs.to_dict() == [{"type": "string", "required": True}]
    assert [(each["name"], each["type"]) for each in found.outputs.to_dict()] == [
        ("tokens", "long"),
        ("vowels", "long"),
    ]
    params = {each["name"]: (each["type"], each["default"]) for each in found.params.to_dict()}
    assert params == {"truncate": ("boolean", None), "vowels": ("string", "aeiou")}


def test_new_task_is_a_triton_model(counting, counted, tmp_path):
    models = tmp_path / "models"
    export_triton(counting, models, name="m", provider="cpu")
    for vowels, parameters in (("aeiou", {}), ("e", {"vowels": "e", "priority": 3})):
        found = run_ensemble(models, "m", {"text": texts(TEXTS)}, parameters)
        assert found["tokens"].tolist() == [each.tokens for each in counted(vowels)]
        assert found["vowels"].tolist() == [each.vowels for each in counted(vowels)]
    outputs = read_config(models / "m").output
    assert [(each.name, list(each.dims)) for each in outputs] == [
        ("tokens", [-1]),
        ("vowels", [-1]),
    ]


def test_new_task_has_sample_predictions_and_a_snippet(counting, counted, monkeypatch, capsys):
    assert len(builtin_inputs(counting)) > 1
    found = predict_samples(counting, TEXTS)
    assert [each.as_json() for each in found] == [
        {"input": text, **each.to_dict()} for text, each in zip(TEXTS, counted(), strict=True)
    ]
    assert found[0].row()["answer"] == f"{counted()[0].tokens} tokens"
    monkeypatch.chdir(counting.path.parent)
    exec(loading_snippets(counting, "counting")["enginery"], {})
    assert capsys.readouterr().out == f"[{counted()[0]}]\n"


def test_audio_task_is_an_mlflow_model(tiny):
    pytest.importorskip("soundfile", reason="pip install 'enginery[audio]'")
    artifact = tiny.artifact("wav2vec2", "audio-classification")
    model = _load_pyfunc(str(artifact.path))
    with load_model(artifact) as loaded:
        expected = [each.to_dict() for each in loaded([example_wav()])]
    assert model.predict({"audio": [example_wav()]}) == expected


# The tasks


def test_every_task_has_all_class_attributes():
    for verb, task in TASKS.items():
        assert task.verb == verb
        assert not inspect.isabstract(task)
        assert all(find_task(name, modality=task.modality) is task for name in task.tasks)
        for field in task.inputs:
            assert bool(field.example) == (task.modality == "text" and not field.optional)
        assert task.result_type is not None
    assert find_task("feature-extraction", modality="image").verb == "embed_images"
    assert len(set(supported_tasks())) == len(supported_tasks())


@pytest.mark.parametrize("task", ["feature-extraction", "fill-mask"])
def test_probe_row_runs(tiny, task):
    with load_model(tiny.artifact("bert", task)) as model:
        row = model.definition.probe(5)
        assert row.tokens == 5
        (found,) = model._rows.run([row])
        assert all(np.isfinite(each).all() for each in found)


def test_images_of_a_call_are_not_all_held_at_once(tiny, monkeypatch):
    happened = []
    read_row, call = ImageTask.read_row, OrtRunner.__call__
    monkeypatch.setattr(
        ImageTask, "read_row", lambda *given: happened.append("image") or read_row(*given)
    )
    monkeypatch.setattr(
        OrtRunner, "__call__", lambda *given: happened.append("run") or call(*given)
    )
    images = [np.full((20, 20, 3), shade, np.uint8) for shade in range(70)]
    with load_model(tiny.artifact("vit", "image-classification")) as model:
        found = model.classify_images(images)
        assert happened == [*["image"] * 32, "run", *["image"] * 32, "run", *["image"] * 6, "run"]
        (last,) = model.classify_images(images[-1:])
    assert found[-1].label == last.label
    assert found[-1].score == pytest.approx(last.score, abs=1e-5)


# Options


@pytest.mark.parametrize(
    ("verb", "values", "message"),
    [
        ("classify", {"top_kk": 1}, "unknown option 'top_kk'; did you mean 'top_k'?"),
        ("answer", {"truncate": True}, "unknown option 'truncate'"),
        ("embed", {"x" * 999: 1}, f"unknown option '{'x' * 60}'"),
        ("classify", {"top_k": "two"}, "found the string 'two', expected a whole number from 0 to"),
        ("classify", {"top_k": True}, "found true, expected a whole number"),
        ("classify", {"top_k": 1.5}, "found the number 1.5, expected a whole"),
        ("classify", {"top_k": [1]}, "found a list, expected a whole number"),
        ("classify", {"activation": "relu"}, "expected auto or softmax or sigmoid or none."),
        ("answer", {"allow_none": 1}, "found the number 1, expected true or false."),
        ("embed", {"normalize": "yes"}, "found the string 'yes', expected true or false."),
        ("embed", {"dimensions": 0}, "found the number 0, expected a whole number of 1 or more."),
        ("embed", {"prompt_name": 3}, "found the number 3, expected a string."),
        ("fill", {"top_k": 0}, "found the number 0, expected a whole number from 1 to 1000."),
        ("answer", {"max_tokens": 513}, "expected a whole number from 1 to 512."),
    ],
)
def test_option_that_a_task_does_not_take_is_named(verb, values, message):
    field = next(iter(values))[:60]
    with pytest.raises(TaskOptionError) as error:
        TASKS[verb].Options.read(values)
    assert message in error.value.message
    assert error.value.message.startswith((f"{field}: ", "unknown option"))
    assert error.value.field == field
    with pytest.raises(TaskOptionError) as error:
        TASKS[verb].Options.read(values, where="parameters.")
    assert f"parameters.{field}" in error.value.message
    assert error.value.field == f"parameters.{field}"


def test_unknown_option_lists_the_known_ones():
    with pytest.raises(TaskOptionError) as error:
        TASKS["tag"].Options.read({"language": "en"})
    assert error.value.do == "Known: truncate, aggregation."


def test_null_is_an_option_left_out():
    options = TASKS["classify"].Options.read({"top_k": None, "activation": "none", "x": None})
    assert options == TASKS["classify"].Options(activation="none")


# Which options generation has depends on the model.
FIXED_OPTIONS = {verb: task for verb, task in TASKS.items() if verb != "generate"}


@pytest.mark.parametrize("task", FIXED_OPTIONS.values(), ids=list(FIXED_OPTIONS))
def test_schema_of_options_says_what_is_taken(task: type[Task]):
    schema = task.Options.model_json_schema()
    assert schema["additionalProperties"] is False
    assert not schema.get("required")
    schemas = task.Options.schemas()
    assert list(schemas) == list(task.Options.model_fields)
    for name, values in schemas.items():
        taken, refused = taken_and_refused(values)
        for value in taken:
            assert getattr(task.Options.read({name: value}), name) == value
        for value in refused:
            with pytest.raises(TaskOptionError, match=f"^{name}: found"):
                task.Options.read({name: value})


def taken_and_refused(schema):
    """Values at the limits of a JSON schema, and just beyond them."""
    if "enum" in schema:
        return schema["enum"], ["x", 3]
    if schema["type"] == "boolean":
        return [True, False], [0, "true"]
    if schema["type"] == "string":
        return ["", "query"], [3]
    if schema["type"] == "array":
        return [["warm"]], [[], ["warm"] * (schema["maxItems"] + 1), "warm", [3]]
    ends = [schema[end] for end in ("minimum", "maximum") if end in schema]
    others = [1.0, True] if schema["type"] == "integer" else [True]
    return ends, [ends[0] - 1, *(end + 1 for end in ends[1:]), *others]


def test_options_of_predict_are_those_of_the_task(tiny, tmp_path):
    (tmp_path / "in.txt").write_text("the pump is [MASK]\n")
    for task, options, message in (
        ("fill-mask", {"top_k": 0}, "top_k: found the number 0, expected a whole number from 1"),
        ("question-answering", {"max_answer_tokens": 513}, "max_answer_tokens: found the number"),
        ("text-classification", {"top_k": 20_000}, "expected a whole number from 0 to 10000"),
    ):
        with pytest.raises(OptionError, match=message):
            predict(
                tiny.artifact("bert", task),
                str(tmp_path / "in.txt"),
                tmp_path / "out.jsonl",
                PredictConfig(**options),
            )


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        ({"text": ("texts", 2), "pixels": ("images", 3)}, {"logits": ("images", "texts")}),
        ({"text": (4, 2)}, {"logits": (4, 3)}),
        ({"scale": (), "text": ("batch", 2)}, {"logits": ("batch", 3)}),
    ],
)
def test_tensors_without_a_batch_axis_run_as_one_row(inputs, outputs):
    """Of CLIP, say, whose texts and images are counted apart."""
    record = SimpleNamespace(
        inputs=tuple(TensorSpec(name, "float32", dims) for name, dims in inputs.items()),
        outputs=tuple(TensorSpec(name, "float32", dims) for name, dims in outputs.items()),
    )
    sizes = {"texts": 3, "images": 2, "batch": 5}
    shapes = {
        name: tuple(sizes.get(dim, dim) for dim in dims)
        for name, dims in (inputs | outputs).items()
    }
    sent = {name: np.ones(shapes[name], np.float32) for name in inputs}

    class Runner:
        profiles = ()
        pads = False
        ladder = None

        def __call__(self, feeds, _outputs):
            assert {name: feed.shape for name, feed in feeds.items()} == {
                name: shapes[name] for name in inputs
            }
            return {name: np.zeros(shapes[name], np.float32) for name in outputs}

    Runner.record = record
    task = Tensors(record, {}, 512)
    work = task.preprocess(sent, TaskOptions())
    found = task.postprocess(work, BatchRunner(task, Runner()).run_all(work.rows), TaskOptions())
    assert {name: array.shape for name, array in found.items()} == {
        name: shapes[name] for name in outputs
    }


@pytest.mark.parametrize(("fixed_rows", "batches"), [(0, [[0], [1, 2]]), (4, [[0, 1, 2]])])
def test_fixed_batches_are_filled_with_any_lengths(tiny, fixed_rows, batches):
    """With a dynamic batch size on the CPU, a second batch costs less than padding."""
    artifact = tiny.artifact("bert", "feature-extraction")
    with OrtRunner(artifact) as runner:
        task = find_task("feature-extraction").open(artifact, runner.record)
        planner = BatchRunner(task, runner)
        planner.fixed_rows = fixed_rows
        assert planner.plan([task.probe(tokens) for tokens in (48, 3, 3)]) == batches

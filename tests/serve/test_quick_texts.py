"""Which models' short texts are tokenized in the event loop's own thread."""

import asyncio
import threading

import pytest
from tokenizers import Regex, normalizers, pre_tokenizers

from enginery.runtime.tasks import TASKS
from enginery.serve.config import ServeConfig
from enginery.serve.models import quick_texts
from enginery.serve.models.quick_texts import QUICK_CHARACTERS, quick_characters
from enginery.serve.models.served_model import LocalModel
from tests.hostile_tokenizers import spoiled_copy


@pytest.fixture
def task(exported):
    artifact = exported("bert", "feature-extraction")
    return TASKS["embed"].open(artifact, artifact.manifest.graphs[0])


def test_bert_tokenizers_are_bounded(task):
    assert quick_characters(task) == QUICK_CHARACTERS


@pytest.mark.parametrize("kind", ["no_unk", "panics", "never_returns"])
def test_hostile_tokenizers_are_not(exported, tmp_path, kind):
    artifact = spoiled_copy(exported("bert", "feature-extraction"), tmp_path / kind, kind)
    assert quick_characters(TASKS["embed"].open(artifact, artifact.manifest.graphs[0])) == 0


def test_rules_of_the_files_own_are_not(task):
    backend = task.tokenizer.backend
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase()] * 8)
    assert quick_characters(task)
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase()] * 9)
    assert quick_characters(task) == 0
    backend.normalizer = normalizers.Replace("a", "aa")  # thirty of them make a gigabyte
    assert quick_characters(task) == 0
    backend.normalizer = None
    assert quick_characters(task)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("(a|aa)+b"), "isolated")
    assert quick_characters(task) == 0
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Split(Regex("a"), "isolated")]
    )
    assert quick_characters(task) == 0
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Digits()]
    )
    assert quick_characters(task)
    backend.model.max_input_chars_per_word = 10**6
    assert quick_characters(task) == 0


def test_prompts_are_not_since_their_length_is_the_models(task):
    task.prompts = {"query": "query: "}
    assert quick_characters(task) == 0


def test_slow_tokenizers_are_not(task, monkeypatch):
    monkeypatch.setattr(quick_texts, "_MAX_SECONDS", -1.0)
    assert quick_characters(task) == 0


def test_other_tasks_are_not(exported):
    artifact = exported("bert", "question-answering")
    assert quick_characters(TASKS["answer"].open(artifact, artifact.manifest.graphs[0])) == 0
    assert quick_characters(None) == 0


async def test_short_requests_take_no_thread_and_long_ones_do(exported):
    path = exported("bert", "feature-extraction").path
    model = LocalModel("m", path, ServeConfig(), asyncio.get_running_loop())
    await asyncio.to_thread(model.load)
    threads = []
    preprocess = type(model.task).preprocess

    class Watched(type(model.task)):
        def preprocess(self, inputs, options):
            threads.append(threading.current_thread() is threading.main_thread())
            return preprocess(self, inputs, options)

    task = model.task
    task.__class__ = Watched
    try:
        for inputs in (["a"], ["a"] * 8, ["a"] * 9, ["a" * 512], ["a" * 513]):
            await model.infer(task, inputs, task.Options())
    finally:
        await model.close(drain=False)
    found = threads
    assert found == [True, True, False, True, False]

"""`Model`: a method for each task, and many texts on a GPU give the results of one piece."""

from __future__ import annotations

import inspect
import sys
import threading
from typing import Any, get_args, get_type_hints

import numpy as np
import PIL.Image
import pytest
from numpy.typing import NDArray

from enginery import keywords
from enginery.core.errors import InputError
from enginery.runtime import model as module
from enginery.runtime.model import Model, load_model
from enginery.runtime.tasks import TASKS
from enginery.runtime.tasks.results import TokenVectors, bare_type
from enginery.runtime.tasks.views import VIEWS
from enginery.runtime.text.pooling import Vectors
from tests.tolerances import OUTPUTS

TEXTS = [f"the cat {'sleeps ' * (n * 7 % 11)}{n}" for n in range(60)]


# Which options generation has depends on the model.
FIXED_OPTIONS = {verb: task for verb, task in {**TASKS, **VIEWS}.items() if verb != "generate"}


_POSITIONAL = {"zero_shot_images": (["cat"],)}
"""Verb -> what a method takes beside its inputs, instead of an option: labels."""


@pytest.mark.parametrize("task", FIXED_OPTIONS.values(), ids=FIXED_OPTIONS)
def test_method_has_the_options_and_the_result_of_its_task(task):
    method = getattr(Model, task.verb)
    names = {"Image": PIL.Image.Image, **vars(keywords)}
    types = get_type_hints(method, localns=names)
    (options,) = get_args(types["options"])
    parameters = inspect.signature(method).parameters
    labels = {"candidate_labels"} if task.verb in _POSITIONAL else set()
    typed = {name for name in parameters if name in task.Options.model_fields}
    assert {*options.__annotations__, *typed, *labels} == set(task.Options.model_fields)
    result_type = bare_type(task.result_type)
    # Vectors may have other types than float32.
    arrays = {Vectors: NDArray[Any], TokenVectors: TokenVectors}
    assert types["return"] == arrays.get(result_type, list[result_type])
    assert f"`{task.Options.__name__}`" in method.__doc__


@pytest.mark.parametrize(
    ("verb", "task", "item"),
    [
        ("embed", "feature-extraction", "text"),
        ("embed_tokens", "feature-extraction", "text"),
        ("classify", "text-classification", "text"),
        ("tag", "token-classification", "text"),
        ("answer", "question-answering", "question"),
        ("fill", "fill-mask", "text"),
        ("embed_sparse", "fill-mask", "text"),
    ],
)
def test_inputs_that_are_no_list_are_an_error(tiny, verb, task, item):
    """An iterator would be empty once its items were checked."""
    with load_model(tiny.artifact("bert", task)) as model:
        method = getattr(model, verb)
        others = {None: "None", 3: "an int", "a": f"one {item}", b"a": f"one {item}"}
        for value, found in others.items():
            with pytest.raises(InputError, match=f"found {found}, expected a list of"):
                method(value)
        for value, found in (({"a": 1}, "a dict"), (iter(["a"]), "a list_iterator")):
            with pytest.raises(InputError, match=f"found {found}, expected a list of {item}s"):
                method(value)
        for value in (None, 3, b"a", {"a": 1}, [["a"]], ("a", "b", "c")):
            with pytest.raises(InputError, match=r" 0 |input 0 "):
                method([value])


def test_method_of_another_task_is_an_error(tiny):
    with load_model(tiny.artifact("bert", "token-classification")) as model:
        for verb in TASKS:
            if verb != "tag":
                with pytest.raises(InputError, match=rf"{verb}\(\) was called, but .*Call tag\(\)"):
                    getattr(model, verb)([], *_POSITIONAL.get(verb, ()))
        with pytest.raises(InputError, match="unknown option 'top_k'"):
            model.tag(TEXTS, top_k=1)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Return a function that lets a model run windows of texts, as on a GPU, of a few texts."""
    monkeypatch.setattr(module, "_FIRST_WINDOW", 4)
    monkeypatch.setattr(module, "_WINDOW", 16)

    def change(model):
        model._on_gpu = True
        return model

    return change


@pytest.mark.parametrize(
    ("task", "kind", "verb"),
    [
        ("feature-extraction", "bert", "embed"),
        ("text-classification", "bert", "classify"),
        ("token-classification", "bert", "tag"),
        ("fill-mask", "bert", "fill"),
        ("question-answering", "bert", "answer"),
    ],
)
def test_windows_give_the_results_of_one_list(tiny, as_on_a_gpu, task, kind, verb):
    texts = TEXTS
    if verb == "fill":
        texts = [f"{text} [MASK]" for text in TEXTS]
    if verb == "answer":
        texts = [("who sleeps?", text) for text in TEXTS]
    with load_model(tiny.artifact(kind, task)) as model:
        whole = getattr(model, verb)(texts)
        truncated, model.truncated = model.truncated, 0
        windows = getattr(as_on_a_gpu(model), verb)(texts)
        assert model.truncated == truncated
    assert len(windows) == len(texts)
    if verb == "embed":
        assert (windows.dtype, windows.shape) == (np.dtype(np.float32), whole.shape)
        np.testing.assert_allclose(windows, whole, atol=OUTPUTS)
    else:
        assert [labels_of(result) for result in windows] == [labels_of(result) for result in whole]


def own_threads():
    """Return the threads of windows that still run; servers of other tests have some, too."""
    names = ("enginery-preprocess", "enginery-finish")
    return [thread for thread in threading.enumerate() if thread.name.startswith(names)]


def labels_of(result):
    """Return the words of a result, without scores, which differ by rounding."""
    if isinstance(result, list):
        return [getattr(item, "label", item.text) for item in result]
    if hasattr(result, "masks"):
        return [[filling.token for filling in mask] for mask in result.masks]
    return [label.label for label in result.labels]


def test_texts_are_tokenized_ahead_and_run_in_the_calling_thread(tiny, as_on_a_gpu, monkeypatch):
    with load_model(tiny.artifact("bert", "feature-extraction")) as model:
        interval = sys.getswitchinterval()
        tokenizing, running, sizes = set(), set(), []
        preprocess, run = model.definition.preprocess, model._runner.__call__

        def noting_preprocess(inputs, options):
            tokenizing.add(threading.current_thread().name)
            sizes.append(len(inputs))
            return preprocess(inputs, options)

        def noting_run(runner, *args):
            running.add(threading.current_thread())
            return run(*args)

        monkeypatch.setattr(model.definition, "preprocess", noting_preprocess)
        monkeypatch.setattr(type(model._runner), "__call__", noting_run)
        as_on_a_gpu(model).embed(TEXTS)
        assert tokenizing == {"enginery-preprocess"}
        assert running == {threading.current_thread()}
        assert sizes == [4, 8, 16, 16, 16]
        monkeypatch.setattr(module, "_WINDOW_CHARACTERS", max(map(len, TEXTS)))
        sizes.clear()
        model.embed(TEXTS)
        assert sum(sizes) == len(TEXTS)
        assert max(sizes) < 16
        tokenizing.clear()
        model.embed(TEXTS[:4])
        assert tokenizing == {threading.current_thread().name}  # a thread would take longer
    assert not own_threads()
    assert sys.getswitchinterval() == interval


def test_an_error_names_the_index_among_all_inputs(tiny, as_on_a_gpu):
    with load_model(tiny.artifact("bert", "fill-mask")) as model:
        texts = [f"{text} [MASK]" for text in TEXTS]
        texts[50] = "no mask"
        with pytest.raises(InputError, match=r"text 50 has no \[MASK\]"):
            as_on_a_gpu(model).fill(texts)
        texts[50] = None
        with pytest.raises(InputError, match="text 50 is None, expected a string"):
            model.fill(texts)
    assert not own_threads()


def test_a_run_that_fails_ends_the_call(tiny, as_on_a_gpu, monkeypatch):
    with load_model(tiny.artifact("bert", "feature-extraction")) as model:

        def failing(*_):
            raise InputError("the graph fails.")

        monkeypatch.setattr(type(model._runner), "__call__", failing)
        with pytest.raises(InputError, match=r"the graph fails\."):
            as_on_a_gpu(model).embed(TEXTS)
    assert not own_threads()

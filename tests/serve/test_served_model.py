import asyncio
import io
import threading
import time
from contextlib import asynccontextmanager

import numpy as np
import pytest
from PIL import Image

from enginery.core.errors import EngineryError, InputError, ProviderError
from enginery.runtime.model import load_model
from enginery.runtime.onnxruntime.runner import OrtRunner
from enginery.runtime.tasks.audio import example_wav
from enginery.runtime.tasks.task import TaskOptions
from enginery.runtime.tasks.text import TooLongError
from enginery.serve.batching.queue import OverloadedError
from enginery.serve.config import ServeConfig
from enginery.serve.models.backend import ModelBackend
from enginery.serve.models.served_model import LocalModel, TooManyInputsError, UnavailableError
from tests.tolerances import OUTPUTS

TEXTS = ["the pump runs", "a", "the engine is warm and the valve is open again", "the pump runs"]
PAIR = ("what runs?", "the pump runs and the valve is open. " * 12)


@asynccontextmanager
async def serving(artifact, **options):
    model = LocalModel("tiny", artifact.path, ServeConfig(**options), asyncio.get_running_loop())
    await asyncio.to_thread(model.load)
    try:
        yield model
    finally:
        await model.close(drain=False)


async def test_sessions_are_freed_after_the_worker_that_uses_them(exported, monkeypatch):
    """The first worker cannot be prepared; the second one may just be doing it."""
    artifact, events, threads = exported("bert", "feature-extraction"), [], []
    opened, closed = ModelBackend.open, ModelBackend.close

    def open_on_gpu(*args):
        backend = opened(*args)
        backend.on_cpu = False
        return backend

    def prepare(_):
        threads.append(threading.current_thread())
        if len(threads) == 1:
            raise ProviderError("no memory")
        time.sleep(0.2)
        events.append("prepared")

    def close(backend):
        events.append("closed")
        closed(backend)

    monkeypatch.setattr(ModelBackend, "open", open_on_gpu)
    monkeypatch.setattr(ModelBackend, "prepare", prepare)
    monkeypatch.setattr(ModelBackend, "close", close)
    with pytest.raises(ProviderError, match="no memory"):
        async with serving(artifact, workers=2):
            pass
    assert events[-1] == "closed"
    assert events.count("closed") == 1
    assert not any(thread.is_alive() for thread in threads)


def ask(model, inputs, **options):
    read = model.task.Options.read(options)
    return model.infer(model.task, inputs, read)


def infer(model, feeds):
    return model.infer(model.backend.tensors, feeds, TaskOptions())


def ones(model, rows=1, length=4):
    """Tensors for every input of a model's graph."""
    names = [spec.name for spec in model.backend.runner.record.inputs]
    return {name: np.ones((rows, length), np.int64) for name in names}


def waiting(model):
    """Inputs that wait or are preprocessed, and tokens that wait."""
    queue = model.info()["queue"]
    return queue["inputs"], queue["tokens"]


def photo(size=(40, 30), color=(200, 30, 60)):
    stream = io.BytesIO()
    Image.new("RGB", size, color).save(stream, "PNG")
    return stream.getvalue()


def near(found, expected):
    """Whether two answers are the same but for the last bits of their scores."""
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(near, found, expected))
    if isinstance(expected, float | np.ndarray):
        return np.allclose(found, expected, atol=OUTPUTS)
    if hasattr(expected, "to_dict"):
        return near(found.to_dict(), expected.to_dict())
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(near(found[k], expected[k]) for k in found)
    return found == expected


ASKED = [
    ("feature-extraction", "embed", TEXTS, {}),
    ("text-classification", "classify", [*TEXTS, ("the pump", "runs")], {"top_k": 2}),
    ("token-classification", "tag", TEXTS, {"aggregation": "none"}),
    ("question-answering", "answer", [PAIR, ("who?", "the engine")], {"top_k": 2}),
    ("fill-mask", "fill", ["the [MASK] runs", "[MASK] the [MASK] is open"], {"top_k": 3}),
]


@pytest.mark.parametrize(("task", "method", "inputs", "options"), ASKED, ids=[a[0] for a in ASKED])
async def test_answers_are_those_of_the_model_itself_alone_or_together(
    exported, task, method, inputs, options
):
    artifact = exported("bert", task)
    with load_model(artifact) as model:
        expected = list(getattr(model, method)(inputs, **options))
    async with serving(artifact) as served:
        one = await ask(served, inputs, **options)
        many = await asyncio.gather(*(ask(served, [item], **options) for item in inputs * 5))
    assert near(list(one.results), expected)
    assert near([reply.results[0] for reply in many], expected * 5)
    assert one.timings.tokens == sum(reply.timings.tokens for reply in many[: len(inputs)])
    assert one.timings.inference_seconds > 0


@pytest.mark.parametrize(
    ("task", "method"),
    [("image-classification", "classify_images"), ("feature-extraction", "embed_images")],
)
async def test_images_are_labelled_and_become_vectors(exported, task, method):
    images = [photo(), photo((33, 50), (0, 90, 10))]
    pictures = [Image.open(io.BytesIO(image)) for image in images]
    artifact = exported("vit", task)
    with load_model(artifact) as model:
        expected = list(getattr(model, method)(pictures))
    async with serving(artifact) as served:
        found = await ask(served, images)
    assert near(list(found.results), expected)


async def test_invalid_image_is_rejected_by_its_index(exported):
    with pytest.raises(InputError, match="image 1 is not an image"):
        async with serving(exported("vit", "image-classification")) as served:
            await ask(served, [photo(), b"not an image"])


async def test_token_ids_equal_their_text(exported):
    async with serving(exported("bert", "feature-extraction")) as served:
        ids = served.task.tokenizer.backend.encode("the pump runs").ids
        replies = await ask(served, ["the pump runs", ids, ids[1:-1]])
        with pytest.raises(InputError, match="token id 100000"):
            await ask(served, [[1, 100000]])
        text, whole, bare = replies.results
    assert np.allclose(text, whole, atol=OUTPUTS)
    assert np.allclose(text, bare, atol=OUTPUTS)


async def test_tensors_are_run_as_they_are_sent(exported):
    async with serving(exported("bert", "text-classification")) as served:
        row = ones(served, 1, 9)
        one, three = await asyncio.gather(infer(served, row), infer(served, ones(served, 3, 9)))
        singles = await asyncio.gather(*(infer(served, row) for _ in range(6)))
        one, three = one.results["logits"], three.results["logits"]
    assert one.shape == (1, 3)
    assert np.allclose(three, np.repeat(one, 3, axis=0), atol=OUTPUTS)
    assert all(np.allclose(reply.results["logits"], one, atol=OUTPUTS) for reply in singles)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.pop("input_ids"), "input 'input_ids' is missing"),
        (lambda f: f.update(more=np.ones((1, 4))), "unknown input 'more'"),
        (lambda f: f.update(input_ids=np.ones((1, 4), np.int32)), "found int32"),
        (lambda f: f.update(input_ids=np.ones((1, 0), np.int64)), r"shape \(1, 0\)"),
        (lambda f: f.update(input_ids=np.ones((1, 5), np.int64)), "sequence is"),
        (lambda f: f.update(input_ids=np.full((1, 4), 10**6)), "input_ids holds 1000000, expected"),
        (lambda f: f.update(input_ids=np.full((1, 4), -1)), "input_ids holds -1, expected 0 to"),
        (lambda f: f.update({n: np.ones((1, 600), np.int64) for n in f}), "sequence is 600"),
    ],
)
async def test_tensors_that_do_not_fit_are_refused(exported, change, message):
    async with serving(exported("bert", "text-classification")) as served:
        feeds = ones(served)
        change(feeds)
        with pytest.raises(Exception, match=message):
            await infer(served, feeds)


async def test_tensors_with_nan_are_refused(exported):
    async with serving(exported("vit", "image-classification")) as served:
        with pytest.raises(InputError, match="NaN or infinity"):
            await infer(served, {"pixel_values": np.full((1, 3, 32, 32), np.nan, np.float32)})


async def test_invalid_input_does_not_affect_its_batch(exported):
    async with serving(exported("bert", "text-classification")) as served:
        run = served.backend.runner._run

        def fails_on_seven(index, arrays, outputs):
            if (arrays["input_ids"] == 7).any():
                raise InputError("the graph fails on seven")
            return run(index, arrays, outputs)

        served.backend.runner._run = fails_on_seven
        good = ones(served)
        bad = {**good, "input_ids": np.full((1, 4), 7)}
        sent = [infer(served, good if place % 4 else bad) for place in range(12)]
        found = await asyncio.gather(*sent, return_exceptions=True)
    assert [isinstance(reply, InputError) for reply in found] == [True, False, False, False] * 3


async def test_rows_of_tensors_run_within_the_bounds_of_a_batch(exported):
    async with serving(exported("bert", "text-classification"), batch_tokens=32) as served:
        shapes, run = [], served.backend.runner._run

        def seen(index, arrays, outputs):
            shapes.append(arrays["input_ids"].shape)
            return run(index, arrays, outputs)

        served.backend.runner._run = seen
        feeds = ones(served, 20, 8)
        feeds["input_ids"] = np.arange(160).reshape(20, 8) % 30
        reply = await infer(served, feeds)
        expected = run(0, feeds)["logits"]
        found = reply.results["logits"]
    # It may be measured at the same time, with texts of other lengths.
    assert max(rows for rows, width in shapes if width == 8) == 4
    assert sum(rows for rows, width in shapes if width == 8) >= 20
    np.testing.assert_allclose(found, expected, atol=OUTPUTS)


async def test_pixels_count_as_images_and_not_as_tokens(exported):
    async with serving(exported("vit", "image-classification"), queue_inputs=64) as served:
        feeds = {"pixel_values": np.zeros((1, 3, 32, 32), np.float32)}
        found = await asyncio.gather(*(infer(served, feeds) for _ in range(60)))
    assert len(found) == 60


async def test_long_list_and_other_requests_leave_space_for_each_other(exported):
    artifact = exported("bert", "feature-extraction")
    async with serving(artifact, queue_inputs=16, workers=1, batch_tokens=8) as served:
        many = asyncio.create_task(ask(served, TEXTS * 50))
        while not waiting(served)[0]:
            await asyncio.sleep(0)
        alone = []
        for _ in range(10):
            alone.append((await ask(served, ["the pump"])).results[0])
            assert served.scheduler.queue.rows <= 16
        assert not many.done()
        # Something always waits, and a list gets in all the same.
        second = await ask(served, TEXTS * 20)
        many = await many
    assert len(many.results) == 200
    assert near(many.results[:80], second.results)
    assert len(alone) == 10


async def test_a_list_that_is_cancelled_half_way_leaves_nothing_behind(exported):
    artifact = exported("bert", "feature-extraction")
    async with serving(artifact, queue_inputs=16, workers=1, batch_tokens=8) as served:
        many = asyncio.create_task(ask(served, TEXTS * 100))
        while not waiting(served)[0]:
            await asyncio.sleep(0)
        many.cancel()
        with pytest.raises(asyncio.CancelledError):
            await many
        while waiting(served) != (0, 0):  # what is being tokenized is so to its end
            await asyncio.sleep(0.01)
        await ask(served, ["a"])


async def test_images_in_preprocessing_count_towards_the_queue(exported):
    artifact = exported("vit", "image-classification")
    async with serving(artifact, queue_inputs=4, max_inputs=100) as served:
        sent = [ask(served, [photo((900, 900))]) for _ in range(40)]
        found = await asyncio.gather(*sent, return_exceptions=True)
        while waiting(served)[0]:
            await asyncio.sleep(0.01)
        await ask(served, [photo()])
    refused = [reply for reply in found if isinstance(reply, OverloadedError)]
    assert 20 < len(refused) < 40


@pytest.mark.more
async def test_audio_is_batched_by_its_duration(exported):
    pytest.importorskip("soundfile", reason="pip install 'enginery[audio]'")
    async with serving(exported("wav2vec2", "audio-classification")) as served:
        rules, found = served.backend.rules, await ask(served, [example_wav()])
    assert (rules.max_tokens, rules.max_rows, rules.max_padding) == (4096, 8, 0.0)
    assert found.timings.tokens == 5  # 20 ms each


async def test_an_image_of_too_many_pixels_is_not_decoded(exported):
    with pytest.raises(InputError, match="image 0 has 40 × 30 pixels, expected at most 1,000"):
        async with serving(exported("vit", "image-classification"), max_pixels=1000) as served:
            await ask(served, [photo((40, 30))])


async def test_vectors_are_unnormalized_if_the_model_does_not_normalize(exported, minilm):
    from enginery import export_model

    async with serving(export_model(minilm)) as served:
        replies = [await ask(served, ["a pump"], normalize=n) for n in (None, True, False)]
        as_it_is, normalized, pooled = [
            float(np.linalg.norm(reply.results[0])) for reply in replies
        ]
    assert as_it_is == pytest.approx(1)
    assert normalized == pytest.approx(1)
    assert pooled > 1.5


async def test_dead_worker_thread_makes_the_model_unready(exported):
    async with serving(exported("bert", "feature-extraction"), workers=1) as served:
        served.scheduler.queue.take = list
        await ask(served, ["a"])  # the worker had asked before
        for _ in range(200):
            served.check_health()
            if served.state == "failed":
                break
            await asyncio.sleep(0.01)
        assert (served.state, served.reason) == ("failed", "a worker thread has ended")


@pytest.mark.parametrize(
    ("options", "threads", "spinning"),
    [
        ({"workers": 2, "shrink_arena": True}, 1, True),
        ({"workers": 2, "threads": 2}, 2, False),
        ({"workers": 1}, 0, True),
        ({"workers": 1, "threads": 3}, 3, True),
    ],
)
def test_threads_spin_only_if_they_have_the_cores_alone_and_the_arena_shrinks_as_asked(
    exported, monkeypatch, options, threads, spinning
):
    opened = []

    class Seen(OrtRunner):
        def __init__(self, artifact, options, **given):
            opened.append((options.threads, options.spinning, options.shrink_arena))
            super().__init__(artifact, options, **given)

    monkeypatch.setattr("enginery.serve.models.backend.OrtRunner", Seen)
    path = exported("bert", "feature-extraction").path
    ModelBackend.open(path, ServeConfig(**options)).close()
    assert opened == [(threads, spinning, "shrink_arena" in options)]


async def test_batch_is_reported_after_its_requests(exported):
    async with serving(exported("bert", "feature-extraction"), workers=1) as served:
        answered, seen = [], []
        served.scheduler._report_batch = lambda done: seen.append((len(done.batch), list(answered)))
        await ask(served, ["a"])
        answered.append("a")
        await asyncio.sleep(0)
        found = seen
    assert found == [(1, ["a"])]


async def test_cost_estimate_updates_the_rules(exported):
    async with serving(exported("bert", "feature-extraction"), workers=1) as served:
        while not served.scheduler.queue.seconds_per_token:  # it is being measured
            await asyncio.sleep(0.01)
        before = served.backend._cost.batches
        for _ in range(70):
            await ask(served, ["the pump runs"])
        await asyncio.sleep(0)  # what a batch cost is learned behind its answer
        assert served.backend._cost.batches >= before + 70
        assert served.scheduler.queue.seconds_per_token > 0


async def test_texts_over_the_limit_are_cut_and_counted_or_refused(exported):
    long = "the pump runs " * 500
    async with serving(exported("bert", "feature-extraction")) as served:
        reply = await ask(served, [long, "a"])
        assert reply.timings.truncated == 1
        with pytest.raises(TooLongError, match="input 1 is too long"):
            await ask(served, ["a", long], truncate=False)
    async with serving(exported("bert", "feature-extraction"), truncate=False) as served:
        with pytest.raises(TooLongError):
            await ask(served, [long])
        assert (await ask(served, [long], truncate=True)).timings.truncated == 1


async def test_an_empty_list_has_an_empty_answer(exported):
    async with serving(exported("bert", "text-classification")) as served:
        found = (await ask(served, [])).results
    assert found == []


async def test_too_many_inputs_and_a_full_queue_are_refused(exported):
    artifact = exported("bert", "feature-extraction")
    async with serving(artifact, max_inputs=3, queue_inputs=4, workers=1) as served:
        with pytest.raises(TooManyInputsError, match="found 4 inputs, expected at most 3"):
            await ask(served, ["a"] * 4)
        held = Held(served)
        first = asyncio.create_task(ask(served, ["a"]))
        await held.wait()
        others = [asyncio.create_task(ask(served, ["a"])) for _ in range(4)]
        await queued(served, 4)
        with pytest.raises(OverloadedError, match="4 inputs"):
            await ask(served, ["a"])
        held.release()
        assert len(await asyncio.gather(first, *others)) == 5


async def test_a_request_that_is_cancelled_leaves_the_queue(exported):
    async with serving(exported("bert", "feature-extraction"), workers=1) as served:
        held = Held(served)
        first = asyncio.create_task(ask(served, ["a"]))
        await held.wait()
        gone = asyncio.create_task(ask(served, ["the pump", "the pump runs warm"]))
        await queued(served, 2)
        assert waiting(served)[0] == 2
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        assert waiting(served) == (0, 0)
        held.release()
        await first
        assert held.runs == 1


async def test_model_is_stuck_while_a_batch_hangs(exported):
    artifact = exported("bert", "feature-extraction")
    async with serving(artifact, workers=1, stuck_after=0.1) as served:
        held = Held(served)
        running = asyncio.create_task(ask(served, ["a"]))
        await held.wait()
        await asyncio.sleep(0.2)
        served.check_health()
        assert served.state == "stuck"
        assert "has been running for" in served.reason
        with pytest.raises(UnavailableError):
            await ask(served, ["b"])
        held.release()
        await running
        served.check_health()
        assert (served.state, served.reason) == ("ready", "")
        await ask(served, ["b"])


async def test_closing_does_not_wait_for_a_batch_that_is_stuck(exported):
    async with serving(exported("bert", "feature-extraction"), workers=1, stuck_after=0.1) as it:
        held = Held(it)
        running = asyncio.create_task(ask(it, ["a"]))
        await held.wait()
        await asyncio.sleep(0.2)
        it.check_health()
        await it.close(drain=False, timeout_seconds=600)
        assert it.scheduler.busy_seconds(), "it still runs"
        held.release()
        await asyncio.gather(running, return_exceptions=True)


async def test_lost_provider_is_a_server_error(exported):
    async with serving(exported("bert", "feature-extraction")) as served:

        def lost(*_):
            raise InputError("the graph fails on anything: the device was lost")

        served.backend.runner.__class__ = type("Lost", (OrtRunner,), {"__call__": lost})
        with pytest.raises(UnavailableError, match="the device was lost"):
            await ask(served, ["a"])
        assert served.state == "failed"
        assert "can no longer run" in served.reason
        with pytest.raises(UnavailableError, match="can no longer run"):
            await ask(served, ["a"])


async def test_closing_fails_requests_behind_a_batch_that_hangs(exported):
    free = threading.Event()
    async with serving(exported("bert", "feature-extraction"), workers=1) as model:
        run_batch = model.backend.runner
        model.scheduler._run_batch = lambda batch: free.wait(60) and [None] * len(batch)
        running = asyncio.ensure_future(ask(model, ["a"]))
        while waiting(model)[0] or not model.scheduler.busy_seconds():
            await asyncio.sleep(0.01)
        waits = asyncio.ensure_future(ask(model, ["b"]))
        await asyncio.sleep(0.05)
        await model.close(timeout_seconds=0.1)
        for each in (running, waits):
            with pytest.raises(EngineryError, match="closed"):
                await asyncio.wait_for(each, 10)
        free.set()
        assert run_batch is not None


async def test_fillings_are_bounded_by_request(exported):
    async with serving(exported("bert", "fill-mask")) as model:
        with pytest.raises(
            TooManyInputsError, match="asks for 30000 fillings, expected at most 20000"
        ):
            await ask(model, ["[MASK]"] * 30, top_k=1000)
        found = await ask(model, ["[MASK] runs"] * 3, top_k=1000)
        assert len(found.results) == 3


async def test_closing_answers_waiting_requests(exported):
    async with serving(exported("bert", "feature-extraction"), workers=1) as served:
        held = Held(served)
        sent = [asyncio.create_task(ask(served, [text])) for text in TEXTS]
        await held.wait()
        held.release()
        await served.close(drain=True)
        replies = await asyncio.gather(*sent)
        assert [len(reply.results) for reply in replies] == [1] * 4
        with pytest.raises(UnavailableError, match="closed"):
            await ask(served, ["late"])


async def test_load_failure_has_a_reason(exported, tmp_path):
    model = LocalModel("tiny", tmp_path, ServeConfig(), asyncio.get_running_loop())
    with pytest.raises(UnavailableError, match="is being loaded"):
        await ask(model, ["a"])
    with pytest.raises(Exception, match="manifest") as failed:
        model.load()
    assert (model.state, model.reason) == ("failed", str(failed.value))
    assert model.info()["state"] == "failed"
    await model.close()


async def test_info_has_providers_and_batching(exported):
    async with serving(exported("bert", "feature-extraction")) as served:
        for _ in range(200):
            if served.info()["batching"]["seconds_per_token"]:
                break
            await asyncio.sleep(0.05)
        info = served.info()
    assert info["state"] == "ready"
    assert info["providers"][0]["name"] == "CPUExecutionProvider"
    assert info["dim"] == 32
    assert info["placement"]["notes"] == ["every node is on the CPU"]
    assert "tokens: on a CPU" in info["batching"]["explanation"]
    assert info["batching"]["seconds_per_token"] > 0


async def queued(served, inputs):
    """Waits until so many inputs are in the queue: they are tokenized first."""
    while served.scheduler.queue.rows < inputs:
        await asyncio.sleep(0.001)


class Held:
    """Holds a model's first batch until it is released."""

    def __init__(self, served):
        self.runs = 0
        self._begun, self._go = threading.Event(), threading.Event()
        self._run = served.scheduler._run_batch
        served.scheduler._run_batch = self._held

    def _held(self, batch):
        self.runs += 1
        self._begun.set()
        assert self._go.wait(30)
        return self._run(batch)

    async def wait(self):
        await asyncio.to_thread(self._begun.wait, 30)

    def release(self):
        self._go.set()

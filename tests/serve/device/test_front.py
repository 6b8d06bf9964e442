"""A front's models, connected to device processes that run in the same event loop."""

import asyncio
import errno
from contextlib import asynccontextmanager

import numpy as np
import pytest

from enginery.core.errors import InputError
from enginery.runtime.model import load_model
from enginery.runtime.providers.known import CPU
from enginery.runtime.tasks.task import Row, TaskOptions
from enginery.runtime.text.tokenizer import TokenIds
from enginery.serve.batching.queue import OverloadedError
from enginery.serve.batching.scheduler import Timings
from enginery.serve.config import ServeConfig
from enginery.serve.device import wire
from enginery.serve.device.front import FrontModel, FrontRegistry
from enginery.serve.device.process import DeviceProcess
from enginery.serve.models.served_model import UnavailableError
from tests.serve.test_served_model import ASKED, near, photo
from tests.tolerances import OUTPUTS

WAIT = 30


@asynccontextmanager
async def device(paths, socket, fronts=1, **options):
    process = DeviceProcess(paths, ServeConfig(**options), socket, fronts=fronts)
    await process.open()
    try:
        yield process
    finally:
        await process.close()


@asynccontextmanager
async def front(paths, *sockets, **options):
    registry = FrontRegistry(
        paths, ServeConfig(**options), asyncio.get_running_loop(), sockets=sockets
    )
    await asyncio.wait_for(registry.load(), WAIT)
    try:
        yield registry
    finally:
        await registry.close()


@asynccontextmanager
async def serving(artifact, socket, **options):
    paths = {"m": artifact.path}
    async with device(paths, socket, **options) as process, front(paths, socket, **options) as it:
        await until(lambda: it.ready)
        yield it.get("m"), process


async def until(is_true):
    async def wait():
        while not is_true():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(wait(), WAIT)


def ask(model, inputs, **options):
    return model.infer(model.task, inputs, model.task.Options.read(options))


@pytest.fixture
def socket(tmp_path_factory):
    return tmp_path_factory.mktemp("s") / "d"


def hold(process):
    """Make the device's worker wait; returns what lets it run again, and the batches it ran."""
    import threading

    free, batches = threading.Event(), []
    scheduler = process.registry.get("m").scheduler
    run = scheduler._run_batch

    def held(batch):
        batches.append(batch)
        assert free.wait(WAIT)
        return run(batch)

    scheduler._run_batch = held
    return free, batches


@pytest.mark.more
@pytest.mark.parametrize(("task", "method", "inputs", "options"), ASKED, ids=[a[0] for a in ASKED])
async def test_answers_are_those_of_the_model_itself(
    exported, socket, task, method, inputs, options
):
    artifact = exported("bert", task)
    with load_model(artifact) as model:
        expected = list(getattr(model, method)(inputs, **options))
    async with serving(artifact, socket) as (model, _):
        one = await ask(model, inputs, **options)
        many = await asyncio.gather(*(ask(model, [item], **options) for item in inputs * 5))
    assert near(list(one.results), expected)
    assert near([reply.results[0] for reply in many], expected * 5)
    assert one.timings.inference_seconds > 0
    assert 0 <= one.timings.queue_seconds < WAIT


@pytest.mark.parametrize(
    ("task", "method"),
    [("image-classification", "classify_images"), ("feature-extraction", "embed_images")],
)
async def test_images_are_answered(exported, socket, task, method):
    from io import BytesIO

    from PIL import Image

    artifact, images = exported("vit", task), [photo(), photo((33, 50), (0, 90, 10))]
    with load_model(artifact) as model:
        expected = list(getattr(model, method)([Image.open(BytesIO(image)) for image in images]))
    async with serving(artifact, socket) as (model, _):
        found = await ask(model, images)
    assert near(list(found.results), expected)


async def test_tensors_are_run_as_they_are_sent(exported, socket):
    async with serving(exported("bert", "feature-extraction"), socket) as (model, process):
        feeds = model.backend.synthetic_feeds(5)
        found = await model.infer(model.backend.tensors, feeds, TaskOptions())
        expected = process.registry.get("m").backend.runner(feeds)
        bad = {**feeds, "input_ids": feeds["input_ids"] * 0 - 1}
        with pytest.raises(InputError, match="input_ids holds"):
            await model.infer(model.backend.tensors, bad, TaskOptions())
        found = found.results
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert np.allclose(found[name], array, atol=OUTPUTS)


async def test_large_requests_are_cut_and_leave_space_for_others(exported, socket):
    async with serving(
        exported("bert", "feature-extraction"), socket, queue_inputs=16, workers=1
    ) as (model, process):
        free, batches = hold(process)
        large = asyncio.create_task(ask(model, ["the pump runs"] * 100))
        await until(lambda: batches)
        (connection,) = process.registry.fronts
        assert len(connection.waiting) == 4  # a quarter of the queue
        small = asyncio.create_task(ask(model, ["a"]))
        await until(lambda: len(connection.waiting) == 5)
        await until(lambda: process.registry.get("m").scheduler.queue.rows == 1)
        free.set()
        large, small = await large, await small
    assert len(large.results) == 100
    assert len(small.results) == 1


async def test_full_queue_is_reported_with_the_devices_own_words(exported, socket):
    async with serving(
        exported("bert", "feature-extraction"), socket, queue_tokens=30, workers=1
    ) as (model, process):
        free, batches = hold(process)
        running = asyncio.create_task(ask(model, ["the pump runs"]))
        await until(lambda: batches)
        waiting = asyncio.create_task(ask(model, ["the pump runs"]))
        await until(lambda: process.registry.get("m").scheduler.queue.rows)
        with pytest.raises(OverloadedError, match="the queue is full: 1 inputs with 5 tokens"):
            await ask(model, ["the pump runs and the valve is open again and again and again " * 2])
        free.set()
        await asyncio.gather(running, waiting)
        assert model.queued_rows == 0


async def test_cancelled_request_leaves_the_devices_queue(exported, socket):
    async with serving(exported("bert", "feature-extraction"), socket, workers=1) as (
        model,
        process,
    ):
        free, batches = hold(process)
        queue = process.registry.get("m").scheduler.queue
        running = asyncio.create_task(ask(model, ["a"]))
        await until(lambda: batches)
        waiting = asyncio.create_task(ask(model, ["the pump runs"] * 7))
        await until(lambda: queue.rows == 7)
        waiting.cancel()
        await until(lambda: queue.rows == 0)
        assert model.queued_rows == 1
        running.cancel()  # its output, which comes later, is dropped
        await asyncio.sleep(0)
        free.set()
        assert len((await ask(model, ["a"])).results) == 1
        assert model.queued_rows == 0
        assert not any(connection.waiting for connection in process.registry.fronts)


async def test_requests_of_a_lost_device_fail_and_the_next_one_answers(exported, socket):
    paths = {"m": exported("bert", "feature-extraction").path}
    async with device(paths, socket, workers=1) as first, front(paths, socket) as registry:
        await until(lambda: registry.ready)
        model = registry.get("m")
        free, batches = hold(first)
        running = asyncio.create_task(ask(model, ["a"]))
        await until(lambda: batches)
        for connection in list(first.registry.fronts):
            connection.transport.abort()
        first._server.close()
        socket.unlink(missing_ok=True)
        with pytest.raises(UnavailableError, match="'m' is being restarted"):
            await running
        assert (model.state, registry.ready) == ("loading", False)
        with pytest.raises(UnavailableError, match="m: its device process is starting"):
            await ask(model, ["a"])
        free.set()
        async with device(paths, socket):
            await until(lambda: registry.ready)
            assert len((await ask(registry.get("m"), ["a"])).results) == 1


async def test_server_is_ready_once_every_front_is(exported, socket):
    paths = {"m": exported("bert", "feature-extraction").path}
    async with device(paths, socket, fronts=2), front(paths, socket) as one:
        await asyncio.sleep(0.2)
        model = one.get("m")
        assert (model.state, one.ready) == ("loading", False)
        assert model.reason == "other processes of the server are starting"
        asked = asyncio.create_task(ask(model, ["a"]))  # it waits
        await asyncio.sleep(0.1)
        assert not asked.done()
        async with front(paths, socket) as two:
            await until(lambda: one.ready and two.ready)
            assert len((await asked).results) == 1


async def test_request_does_not_wait_long_for_other_fronts(exported, socket, monkeypatch):
    monkeypatch.setattr("enginery.serve.device.front._OPEN_SECONDS", 0.05)
    paths = {"m": exported("bert", "feature-extraction").path}
    async with device(paths, socket, fronts=2), front(paths, socket) as registry:
        with pytest.raises(UnavailableError, match="m: other processes of the server are start"):
            await ask(registry.get("m"), ["a"])


@pytest.mark.more
async def test_reload_is_done_by_the_device_and_followed_by_fronts(exported, socket, tmp_path):
    first, second = (exported("bert", "feature-extraction", opset=opset) for opset in (20, 19))
    served = tmp_path / "served"
    served.symlink_to(first.path)
    paths = {"m": served}
    async with (
        device(paths, socket, fronts=2) as process,
        front(paths, socket) as one,
        front(paths, socket) as two,
    ):
        await until(lambda: one.ready and two.ready)
        outcomes = await one.reload("m")
        assert outcomes["m"].message == "reloaded, content unchanged"
        number = process.registry.get("m").number
        await until(lambda: number in two.get("m").numbers.values())
        served.unlink()
        served.symlink_to(second.path)
        asked = [asyncio.create_task(ask(two.get("m"), ["a"])) for _ in range(20)]
        outcomes = await one.reload()
        assert outcomes["m"].swapped
        assert outcomes["m"].message.startswith("reloaded: ")
        assert one.get("m").content == second.content_sha256()
        await until(lambda: two.get("m").content == second.content_sha256())
        await asyncio.gather(*asked)
        assert one.ready
        assert two.ready
        served.unlink()
        served.symlink_to(tmp_path)
        outcomes = await one.reload()
        assert not outcomes["m"].swapped
        assert outcomes["m"].message.startswith("not reloaded: ")
        numbers = {model.number for model in process.registry}
        await until(lambda: process.registry.by_number.keys() == numbers)
        assert len((await ask(one.get("m"), ["a"])).results) == 1


async def test_numbers_start_again_after_the_largest(exported, socket):
    async with serving(exported("bert", "feature-extraction"), socket) as (model, _):
        ((link, _),) = model.numbers.items()
        link._next_number = wire.MAX_NUMBER - 4
        for _ in range(4):  # the second request does not fit
            assert len((await ask(model, ["a", "b", "the pump"])).results) == 3
        assert link._next_number == 10
        assert not link.sent


async def test_row_that_cannot_be_sent_fails_its_request_alone(exported, socket):
    async with serving(exported("bert", "feature-extraction"), socket) as (model, _):
        entries = model.entries(model.task, [Row(TokenIds([1]), 1), Row(TokenIds([2**31]), 1)])
        with pytest.raises(InputError, match="cannot be passed"):
            await model.scheduler.run(entries, Timings())
        assert model.queued_rows == 0
        assert not any(link.sent for link in model.numbers)
        assert len((await ask(model, ["a"])).results) == 1


async def test_parts_of_accepted_requests_are_sent_however_much_waits(
    exported, socket, monkeypatch
):
    monkeypatch.setattr("enginery.serve.device.front._MAX_UNSENT_BYTES", -1)
    async with serving(exported("bert", "feature-extraction"), socket) as (model, _):
        with pytest.raises(OverloadedError, match="bytes of other requests wait"):
            await ask(model, ["a"])
        link, number = model.choose_link(admitted=True)
        assert model.numbers == {link: number}


async def test_outputs_that_cannot_be_sent_fail_their_requests(exported, socket, monkeypatch):
    def broken(*_, **__):
        raise OverflowError("too large")

    async with serving(exported("bert", "feature-extraction"), socket) as (model, process):
        with monkeypatch.context() as patch:
            patch.setattr(wire, "outputs_frame", broken)
            with pytest.raises(RuntimeError, match="OverflowError: too large"):
                await asyncio.wait_for(ask(model, ["a", "b"]), WAIT)
            patch.undo()
        assert model.queued_rows == 0
        # The rows may be in two batches, of which the second still runs.
        await until(lambda: not any(front.waiting for front in process.registry.fronts))
        assert len((await ask(model, ["a"])).results) == 1


async def test_rows_that_the_device_cannot_queue_fail_alone(exported, socket, monkeypatch):
    def broken(*_):
        raise KeyError("length")

    async with serving(exported("bert", "feature-extraction"), socket) as (model, process):
        backend = process.registry.get("m").backend
        with monkeypatch.context() as patch:
            patch.setattr(backend, "entries", broken)
            with pytest.raises(RuntimeError, match="KeyError"):
                await asyncio.wait_for(ask(model, ["a"]), WAIT)
        assert len((await ask(model, ["a"])).results) == 1  # over the same connection


def linked(tmp_path, **artifacts):
    """Directories of models that `link` can replace."""
    paths = {name: tmp_path / name for name in artifacts}
    for name, artifact in artifacts.items():
        link(paths[name], artifact)
    return paths


def link(path, artifact):
    path.unlink(missing_ok=True)
    path.symlink_to(artifact.path)


@pytest.mark.more
async def test_model_that_cannot_be_opened_keeps_its_old_one_and_others_are_replaced(
    exported, socket, tmp_path, monkeypatch, caplog
):
    first, second = (exported("bert", "feature-extraction", opset=opset) for opset in (20, 19))
    monkeypatch.setattr("enginery.serve.device.front._FOLLOW_SECONDS", 0.2)
    monkeypatch.setattr("enginery.serve.device.front._RETRY_SECONDS", 0.1)
    original = FrontModel.open_files

    def too_many_files(model, described):
        if model.name == "b":
            raise OSError(errno.EMFILE, "Too many open files")
        original(model, described)

    paths = linked(tmp_path, a=first, b=first)
    async with device(paths, socket) as process, front(paths, socket) as registry:
        await until(lambda: registry.ready)
        before = registry.get("b")
        for path in paths.values():
            link(path, second)
        with monkeypatch.context() as patch:
            patch.setattr(FrontModel, "open_files", too_many_files)
            await registry.reload()
            assert registry.get("a").content == second.content_sha256()
            assert registry.get("b") is before
            assert registry.ready
            for name in ("a", "b"):
                assert len((await ask(registry.get(name), ["x"])).results) == 1
            await asyncio.sleep(0.5)
        await until(lambda: registry.get("b").content == second.content_sha256())
        assert len((await ask(registry.get("b"), ["x"])).results) == 1
        present = {model.number for model in process.registry}
        await until(lambda: process.registry.by_number.keys() == present)
    assert caplog.text.count("b: not opened: [Errno 24] Too many open files") == 1


async def test_following_goes_on_after_a_bug(exported, socket, monkeypatch, caplog):
    def broken(*_):
        raise KeyError("info")

    paths = {"m": exported("bert", "feature-extraction").path}
    with monkeypatch.context() as patch:
        patch.setattr(FrontModel, "follow", broken)
        async with device(paths, socket) as process:
            registry = FrontRegistry(
                paths, ServeConfig(), asyncio.get_running_loop(), sockets=[socket]
            )
            loading = asyncio.create_task(registry.load())
            await until(lambda: "could not be followed" in caplog.text)
            patch.undo()
            process.tell_fronts()
            await until(lambda: registry.ready)
            await loading
            await registry.close()


async def test_front_that_replaces_another_one_is_ready_with_one_of_two_devices(exported, tmp_path):
    sockets = [tmp_path / "0", tmp_path / "1"]
    paths = {"m": exported("bert", "feature-extraction").path}
    async with device(paths, sockets[0]) as process:
        async with front(paths, sockets[0]) as first:
            await until(lambda: first.ready)
        await until(lambda: not process.registry.fronts)
        async with front(paths, *sockets) as second:
            await until(lambda: second.ready)
            assert len((await ask(second.get("m"), ["a"])).results) == 1
            async with device(paths, sockets[1]):
                await until(lambda: len(second.get("m").numbers) == 2)


async def test_new_server_is_ready_once_all_devices_are(exported, tmp_path):
    sockets = [tmp_path / "0", tmp_path / "1"]
    paths = {"m": exported("bert", "feature-extraction").path}
    async with device(paths, sockets[0]), front(paths, *sockets) as registry:
        await asyncio.sleep(0.3)
        assert registry.get("m").state == "loading"
        async with device(paths, sockets[1]):
            await until(lambda: registry.ready)


@pytest.mark.more
async def test_replaced_model_answers_the_rest_of_a_large_request(exported, socket, tmp_path):
    first, second = (exported("bert", "feature-extraction", opset=opset) for opset in (20, 19))
    paths = linked(tmp_path, m=first)
    async with (
        device(paths, socket, queue_inputs=16, workers=1) as process,
        front(paths, socket, queue_inputs=16) as registry,
    ):
        await until(lambda: registry.ready)
        old = process.registry.get("m")
        free, batches = hold(process)
        large = asyncio.create_task(ask(registry.get("m"), ["the pump runs"] * 100))
        await until(lambda: batches)
        link(paths["m"], second)
        await registry.reload()
        await asyncio.sleep(1.5)  # longer than replaced models take new requests
        assert old.number in process.registry.by_number
        free.set()
        assert len((await large).results) == 100
        await until(lambda: old.number not in process.registry.by_number)
        assert old.state == "closed"


async def test_process_that_ends_alone_answers_only_what_was_begun(exported, socket, monkeypatch):
    statuses = []
    monkeypatch.setattr("enginery.serve.device.process.exit_process", statuses.append)
    async with serving(
        exported("bert", "feature-extraction"), socket, queue_inputs=16, workers=1
    ) as (model, process):
        free, batches = hold(process)
        large = asyncio.create_task(ask(model, ["the pump runs"] * 20))
        await until(lambda: batches)
        process._server_ends = lambda: False
        ending = asyncio.create_task(process._drain())
        await until(lambda: process.registry.refuses_requests)
        with pytest.raises(UnavailableError, match="'m' is being restarted"):
            await ask(model, ["a"])
        free.set()
        assert len((await large).results) == 20
        await asyncio.wait_for(ending, WAIT)
    assert statuses == [0]


def test_sighup_while_the_models_are_loaded_is_reported(tmp_path, caplog):
    process = DeviceProcess({}, ServeConfig(), tmp_path / "d", fronts=1)
    asyncio.run(process._reload())
    assert "not reloaded: the models are still being loaded." in caplog.text


async def test_rows_go_to_the_device_with_the_fewest(exported, tmp_path):
    sockets = [tmp_path / "0", tmp_path / "1"]
    paths = {"m": exported("bert", "feature-extraction").path}
    async with (
        device(paths, sockets[0], workers=1) as one,
        device(paths, sockets[1], workers=1) as two,
        front(paths, *sockets) as registry,
    ):
        await until(lambda: registry.ready)
        held = [hold(process) for process in (one, two)]
        model = registry.get("m")
        asked = [asyncio.create_task(ask(model, ["a"])) for _ in range(6)]
        await until(lambda: all(batches for _, batches in held))
        waiting = [sum(len(c.waiting) for c in p.registry.fronts) for p in (one, two)]
        assert waiting == [3, 3]
        assert model.queued_rows == 6
        assert [device[0]["name"] for device in model.info()["devices"]] == [CPU, CPU]
        for free, _ in held:
            free.set()
        await asyncio.gather(*asked)
        for connection in list(one.registry.fronts):
            connection.transport.abort()
        one._server.close()
        sockets[0].unlink()
        await until(lambda: len(model.numbers) == 1)
        assert registry.ready  # the other one still answers
        assert len((await ask(model, ["a"])).results) == 1

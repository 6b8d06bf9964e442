import asyncio
import io
import shutil

import pytest
from PIL import Image

from enginery.core.errors import EngineryError
from enginery.serve.config import ServeConfig
from enginery.serve.models.registry import ModelChoiceError, ModelRegistry, UnknownModelError
from enginery.serve.models.served_model import UnavailableError
from tests.serve.test_served_model import ask


def models_of(**paths):
    return ModelRegistry(paths, ServeConfig(), asyncio.get_running_loop())


async def test_models_are_found_by_name(exported):
    path = exported("bert", "feature-extraction").path
    models = models_of(one=path, two=exported("bert", "fill-mask").path)
    assert not models.ready
    with pytest.raises(UnknownModelError, match="no model 'three'"):
        models.get("three")  # whatever is loading
    await models.load()
    assert models.ready
    assert models.get("two").task.verb == models.select("two").task.verb == "fill"
    with pytest.raises(UnknownModelError, match="no model 'on'; did you mean 'one'"):
        models.get("on")
    with pytest.raises(ModelChoiceError, match="2 models, but the request names none"):
        models.select()
    models.draining = True
    assert not models.ready
    await models.close()


async def test_a_model_that_cannot_be_loaded_fails_the_start(exported, tmp_path):
    models = models_of(good=exported("bert", "feature-extraction").path, bad=tmp_path / "x")
    with pytest.raises(EngineryError, match="x"):
        await models.load()
    await models.close()


async def test_reloading_swaps_the_artifact_and_loses_no_request(exported, tmp_path):
    first, second = (
        exported("bert", "text-classification", opset=opset).path for opset in (20, 19)
    )
    place = tmp_path / "served"
    place.symlink_to(first)
    models = models_of(tiny=place)
    await models.load()
    before = models.get("tiny").artifact.content_sha256()
    stop, answered = asyncio.Event(), []

    async def client():
        while not stop.is_set():
            answered.append((await ask(models.get("tiny"), ["the pump"])).results[0].label)

    clients = [asyncio.create_task(client()) for _ in range(4)]
    await asyncio.sleep(0.1)
    place.unlink()
    place.symlink_to(second)
    said = await models.reload("tiny")
    await asyncio.sleep(0.1)
    stop.set()
    await asyncio.gather(*clients)
    after = models.get("tiny").artifact.content_sha256()
    await models.close()
    assert before != after
    assert said["tiny"].message == f"reloaded: {before[:12]} → {after[:12]}"
    assert said["tiny"].swapped
    assert len(answered) > 8


async def test_reloads_asked_for_at_once_run_one_after_the_other(tmp_path, monkeypatch):
    running, together = [], []

    async def reload(name):
        running.append(name)
        together.append(len(running))
        await asyncio.sleep(0.01)
        running.pop()

    models = models_of(one=tmp_path, two=tmp_path)
    for model in models:
        model.state = "ready"
    monkeypatch.setattr(models, "_reload", reload)
    await asyncio.gather(models.reload("one"), models.reload("two"))
    assert together == [1, 1]


async def test_failed_reload_keeps_the_old_model(exported, tmp_path):
    place = tmp_path / "served"
    shutil.copytree(exported("bert", "feature-extraction").path, place)
    models = models_of(tiny=place)
    await models.load()
    (place / "model.onnx").write_bytes(b"broken")
    said = await models.reload()
    assert said["tiny"].message.startswith("not reloaded: ")
    assert not said["tiny"].swapped
    assert len((await ask(models.get("tiny"), ["a"])).results) == 1
    assert models.ready
    with pytest.raises(UnknownModelError):
        await models.reload("other")
    await models.close()
    with pytest.raises(UnavailableError, match="shutting down"):
        await models.reload()


async def test_disconnect_during_reload_completes_the_replacement(exported):
    path = exported("bert", "feature-extraction").path
    models = models_of(tiny=path)
    await models.load()
    before = models.get("tiny")
    asked = asyncio.create_task(models.reload("tiny"))
    await asyncio.sleep(0.001)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    while models.get("tiny") is before:
        await asyncio.sleep(0.01)
    while before.state != "closed":
        await asyncio.sleep(0.01)
    await models.close()


async def test_a_model_that_is_being_loaded_is_not_reloaded(exported):
    models = models_of(tiny=exported("bert", "feature-extraction").path)
    with pytest.raises(UnavailableError, match="tiny is still being loaded"):
        await models.reload()
    await models.close()


async def test_images_that_are_being_read_survive_a_reload(exported):
    image = io.BytesIO()
    Image.new("RGB", (1500, 1500)).save(image, "PNG")
    models = models_of(tiny=exported("vit", "image-classification").path)
    await models.load()

    async def client():
        for _ in range(6):
            reply = await ask(models.get("tiny"), [image.getvalue()])
            assert len(reply.results) == 1

    clients = [asyncio.create_task(client()) for _ in range(6)]
    for _ in range(2):
        await asyncio.sleep(0.05)
        assert (await models.reload("tiny"))["tiny"].swapped
    await asyncio.gather(*clients)
    await models.close()

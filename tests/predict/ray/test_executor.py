import os
import signal
import sys

import pyarrow.parquet as pq
import pytest

from enginery.core.errors import ArtifactError, InputError, MissingPackageError, OptionError
from enginery.predict.config import PredictConfig
from enginery.predict.ray.cluster import connect, room_for
from enginery.predict.ray.worker import describe, found_or_raised
from tests.predict.conftest import text_of


class FakeRay:
    """What `connect` and `room_for` ask of the package."""

    def __init__(self, *, initialized=False, **resources):
        self.initialized, self.resources, self.given = initialized, resources, []

    def is_initialized(self):
        return self.initialized

    def init(self, **options):
        self.given.append(options)

    def cluster_resources(self):
        return self.resources


@pytest.fixture(autouse=True)
def no_address(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")


def test_ray_that_is_not_installed_is_named_with_its_extra(predict, tiny, reviews, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingPackageError, match=r"'ray'.*pip install 'enginery\[ray\]'"):
        predict(tiny("bert", "text-classification"), reviews, engine="ray")


@pytest.mark.parametrize("address", ["127.0.0.1:9", "127.0.0.1:port", "nowhere.invalid:6379"])
def test_address_where_nobody_listens_is_an_error_at_once(address):
    ray = FakeRay()
    with pytest.raises(OptionError, match=rf"ray_address is '{address}', and no Ray answers"):
        connect(ray, address)
    assert ray.given == []


def test_address_comes_from_the_environment_too(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(OptionError, match="is Ray's client; Ray Data needs a node"):
        connect(FakeRay(), "")
    monkeypatch.delenv("RAY_ADDRESS")
    ray = FakeRay()
    assert connect(ray, "")
    assert (ray.given[0]["address"], ray.given[0]["include_dashboard"]) == ("local", False)


def test_connection_of_the_caller_is_left_alone():
    ray = FakeRay(initialized=True)
    assert not connect(ray, "")
    assert ray.given == []


def test_actors_are_as_many_as_fit():
    assert room_for(FakeRay(CPU=7.0), 2, 0.0) == 3
    assert room_for(FakeRay(CPU=16.0, GPU=1.0), 1, 0.1) == 10
    with pytest.raises(OptionError, match=r"has 4 CPUs and 0 GPUs; an actor takes 1 and 0\.5"):
        room_for(FakeRay(CPU=4.0), 1, 0.5)


def test_options_of_ray_need_its_engine():
    with pytest.raises(OptionError, match=r"ray_gpus is 0.5, and the engine is local"):
        PredictConfig(ray_gpus=0.5)


def test_problems_travel_as_values_and_are_raised_as_what_they_were(tiny):
    artifact = tiny("bert", "text-classification")
    config = PredictConfig(workers=1)
    assert describe(str(artifact.path), artifact.content_sha256(), config, ".")["dim"] == 0
    with pytest.raises(ArtifactError, match="is another artifact than here"):
        found_or_raised(describe(str(artifact.path), "0" * 64, config, "."))
    with pytest.raises(InputError, match=r"^a\. b$"):
        found_or_raised({"problem": ("InputError", "a.", "b")})
    with pytest.raises(Exception, match="without words of its own"):
        found_or_raised({"problem": ("MissingPackageError", "without words of its own", "")})


@pytest.fixture(scope="module")
def cluster():
    """A Ray of two CPUs, which the runs of the module share."""
    ray = pytest.importorskip("ray", reason="pip install 'enginery[ray]'")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own, on its way
class TestCluster:
    def test_output_is_that_of_the_local_engine_to_the_byte(
        self, predict, tmp_path, tiny, reviews, cluster
    ):
        with reviews.open("a") as stream:
            stream.write('99,""\n')
        model = tiny("bert", "feature-extraction")
        options = {"window": 7, "part_rows": 10}
        here = predict(model, reviews, "here.parquet", **options)
        there = predict(model, reviews, "there.parquet", engine="ray", **options)
        # The counts of time differ, all others do not.
        assert (there.counts.rows, there.bad_rows, there.counts.tokens) == (
            here.counts.rows,
            here.bad_rows,
            here.counts.tokens,
        )
        assert there.first_bad == here.first_bad == "row 41: text is empty"
        assert (there.workers, "on Ray" in there.notes[-1]) == (2, True)
        files = [(tmp_path / f"{name}.parquet").read_bytes() for name in ("here", "there")]
        assert files[0] == files[1]
        assert cluster.is_initialized()

    def test_types_and_images_come_through(self, predict, rows, tmp_path, tiny, cluster):
        from PIL import Image

        (tmp_path / "photos").mkdir()
        for index in range(3):
            Image.new("RGB", (40, 30), (index * 90, 20, 9)).save(tmp_path / f"photos/{index}.png")
        (tmp_path / "in.csv").write_text("path\nphotos/0.png\nphotos/none.png\nphotos/2.png\n")
        model = tiny("vit", "image-classification")
        options = {"column": "path", "top_k": 2}
        predict(model, tmp_path / "in.csv", "here.jsonl", **options)
        predict(model, tmp_path / "in.csv", "there.jsonl", engine="ray", **options)
        assert rows("here.jsonl") == rows("there.jsonl")

    def test_killed_actor_loses_no_row(self, predict, rows, tmp_path, tiny, cluster):
        model = tiny("bert", "text-classification")
        lines = [f'{n},"{text_of(n)}"\n' for n in range(3000)]
        (tmp_path / "in.csv").write_text("id,text\n" + "".join(lines))
        killed = []

        class Killer:
            def task(self, what, *, total):
                from contextlib import nullcontext

                return nullcontext(self.advance)

            def say(self, message):
                pass

            def advance(self):
                if not killed:
                    killed.append(kill_an_actor())

        from enginery.predict.stage import run

        config = PredictConfig(engine="ray", window=50, part_rows=500)
        run(model, str(tmp_path / "in.csv"), tmp_path / "out.parquet", config, progress=Killer())
        assert killed[0]
        found = pq.read_table(tmp_path / "out.parquet").column("id").to_pylist()
        assert found == [str(n) for n in range(3000)]

    def test_run_goes_on_after_the_last_part(self, predict, rows, tmp_path, tiny, cluster):
        model = tiny("bert", "text-classification")
        values = [f'{n},"{"" if n == 25 else text_of(n)}"\n' for n in range(40)]
        (tmp_path / "in.csv").write_text("id,text\n" + "".join(values))
        options = {"engine": "ray", "window": 5, "part_rows": 10}
        with pytest.raises(InputError, match="row 26: text is empty"):
            predict(model, tmp_path / "in.csv", fail_fast=True, **options)
        report = predict(model, tmp_path / "in.csv", **options)
        assert report.resumed_rows == 20
        assert [row["id"] for row in rows()] == [str(n) for n in range(40)]

    def test_input_that_breaks_off_says_so(self, predict, tmp_path, tiny, cluster):
        (tmp_path / "in.csv").write_text('id,text\n1,warm\n2,"' + "x" * (65 << 20))
        with pytest.raises(InputError, match="is longer than 64 MiB"):
            predict(tiny("bert", "text-classification"), tmp_path / "in.csv", engine="ray")


def kill_an_actor():
    """SIGKILL to a worker that answers windows; its process id."""
    import psutil

    for process in psutil.Process().children(recursive=True):
        if "WindowActor" in " ".join(process.cmdline()):
            os.kill(process.pid, signal.SIGKILL)
            return process.pid
    return 0

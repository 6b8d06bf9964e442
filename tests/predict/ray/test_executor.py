import os
import signal
import sys

import pyarrow.parquet as pq
import pytest

from enginery.core.errors import ArtifactError, InputError, MissingPackageError, OptionError
from enginery.predict.config import PredictConfig
from enginery.predict.ray.cluster import connect, max_actors
from enginery.predict.ray.worker import describe_predictor, result_or_raise
from tests.predict.conftest import text_of


class FakeRay:
    """The part of the package that `connect` and `max_actors` use."""

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


def test_missing_ray_is_an_error_with_its_extra(predict, tiny, reviews, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingPackageError, match=r"'ray'.*pip install 'enginery\[ray\]'"):
        predict(tiny("bert", "text-classification"), reviews, engine="ray")


@pytest.mark.parametrize("address", ["127.0.0.1:9", "127.0.0.1:port", "nowhere.invalid:6379"])
def test_address_without_a_server_fails_fast(address):
    ray = FakeRay()
    with pytest.raises(OptionError, match=rf"'ray_address' is '{address}', but no Ray cluster"):
        connect(ray, address)
    assert ray.given == []


def test_address_comes_from_the_environment_variable(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(OptionError, match="an address for Ray Client, but Ray Data"):
        connect(FakeRay(), "")
    monkeypatch.delenv("RAY_ADDRESS")
    ray = FakeRay()
    assert connect(ray, "")
    assert (ray.given[0]["address"], ray.given[0]["include_dashboard"]) == ("local", False)


def test_existing_connection_is_used():
    ray = FakeRay(initialized=True)
    assert not connect(ray, "")
    assert ray.given == []


def test_max_actors_counts_those_that_fit():
    assert max_actors(FakeRay(CPU=7.0), 2, 0.0) == 3
    assert max_actors(FakeRay(CPU=16.0, GPU=1.0), 1, 0.1) == 10
    with pytest.raises(OptionError, match=r"an actor needs 1 CPUs and 0\.5 GPUs"):
        max_actors(FakeRay(CPU=4.0), 1, 0.5)


def test_ray_options_need_the_ray_engine():
    with pytest.raises(OptionError, match=r"'ray_gpus' is 0.5, but option 'engine' is local"):
        PredictConfig(ray_gpus=0.5)


def test_errors_travel_as_values_and_are_raised_with_their_type(tiny):
    artifact = tiny("bert", "text-classification")
    config = PredictConfig(workers=1)
    assert (
        describe_predictor(str(artifact.path), artifact.content_sha256(), config, ".")["dim"] == 0
    )
    with pytest.raises(ArtifactError, match="differs from the one on this machine"):
        result_or_raise(describe_predictor(str(artifact.path), "0" * 64, config, "."))
    with pytest.raises(InputError, match=r"^a\. b$"):
        result_or_raise({"problem": ("InputError", "a.", "b")})
    with pytest.raises(MissingPackageError, match=r"^no ray\.$"):
        result_or_raise({"problem": ("MissingPackageError", "no ray.", "")})


@pytest.fixture(scope="module")
def cluster():
    """Start a Ray with two CPUs for the runs of this module."""
    ray = pytest.importorskip("ray", reason="pip install 'enginery[ray]'")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Ray itself
class TestCluster:
    def test_output_has_the_same_bytes_as_that_of_the_local_engine(
        self, predict, tmp_path, tiny, reviews, cluster
    ):
        with reviews.open("a") as stream:
            stream.write('99,""\n')
        model = tiny("bert", "feature-extraction")
        options = {"window": 7, "part_rows": 10}
        here = predict(model, reviews, "here.parquet", **options)
        there = predict(model, reviews, "there.parquet", engine="ray", **options)
        # Only times differ.
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

    def test_images_and_types_are_the_same_as_locally(self, predict, rows, tmp_path, tiny, cluster):
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

    def test_no_row_is_lost_when_an_actor_is_killed(self, predict, rows, tmp_path, tiny, cluster):
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

    def test_run_is_resumed_after_the_last_part(self, predict, rows, tmp_path, tiny, cluster):
        model = tiny("bert", "text-classification")
        values = [f'{n},"{"" if n == 25 else text_of(n)}"\n' for n in range(40)]
        (tmp_path / "in.csv").write_text("id,text\n" + "".join(values))
        options = {"engine": "ray", "window": 5, "part_rows": 10}
        with pytest.raises(InputError, match="row 26: text is empty"):
            predict(model, tmp_path / "in.csv", fail_fast=True, **options)
        report = predict(model, tmp_path / "in.csv", **options)
        assert report.resumed_rows == 20
        assert [row["id"] for row in rows()] == [str(n) for n in range(40)]

    def test_incomplete_input_is_an_error(self, predict, tmp_path, tiny, cluster):
        (tmp_path / "in.csv").write_text('id,text\n1,warm\n2,"' + "x" * (65 << 20))
        with pytest.raises(InputError, match="is longer than 64 MiB"):
            predict(tiny("bert", "text-classification"), tmp_path / "in.csv", engine="ray")


def kill_an_actor():
    """Kill an actor and return its process id."""
    import psutil

    for process in psutil.Process().children(recursive=True):
        if "WindowActor" in " ".join(process.cmdline()):
            os.kill(process.pid, signal.SIGKILL)
            return process.pid
    return 0

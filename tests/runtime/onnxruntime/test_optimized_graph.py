import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from enginery.core.errors import InputError
from enginery.core.store.store import GRAPHS, Store
from enginery.runtime.onnxruntime.optimized_graph import has_packed_weights, optimized_graph
from enginery.runtime.onnxruntime.runner import OrtRunner, RunnerOptions
from enginery.runtime.providers.selection import Provider, choose_providers
from tests.tolerances import OUTPUTS

CPU = "CPUExecutionProvider"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A store of its own: what is in it is counted."""
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    from tests.tiny import tiny_artifact

    return tiny_artifact("bert", "feature-extraction", tmp_path_factory.mktemp("tiny") / "bert")


def graph_of(artifact):
    return optimized_graph(artifact, artifact.manifest.graphs[0], choose_providers(["cpu"]))


def feeds_of(artifact):
    return {spec.name: np.ones((2, 9), np.int64) for spec in artifact.manifest.graphs[0].inputs}


def test_a_kept_graph_answers_as_the_artifact_does(tiny, home):
    feeds = feeds_of(tiny)
    with OrtRunner(tiny) as plain, OrtRunner(tiny, RunnerOptions(keep_optimized=True)) as kept:
        expected, found = plain(feeds), kept(feeds)
    assert len(list((home / "graphs").glob("graph-*"))) == 1
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, atol=OUTPUTS)


class Held:
    """A session that waits in `run` until it is released."""

    def __init__(self, session):
        self._session = session
        self.entered, self.released = threading.Event(), threading.Event()

    def run(self, *arguments):
        self.entered.set()
        assert self.released.wait(30)
        return self._session.run(*arguments)


def test_a_run_that_overlaps_no_other_has_more_threads(tiny, home):
    feeds = feeds_of(tiny)
    with OrtRunner(tiny, RunnerOptions(threads=1, lone_threads=2, keep_optimized=True)) as runner:
        lone, shared = runner._lone_session, runner._sessions[0]
        assert lone.get_session_options().intra_op_num_threads == 2
        assert shared.get_session_options().intra_op_num_threads == 1
        runner._lone_session = first = Held(lone)
        runner._sessions[0] = second = Held(shared)
        with ThreadPoolExecutor(2) as pool:
            alone = pool.submit(runner, feeds)
            assert first.entered.wait(30)
            overlapping = pool.submit(runner, feeds)
            assert second.entered.wait(30)
            first.released.set()
            second.released.set()
            found = [alone.result(), overlapping.result()]
        for session, other in ((second, first), (first, second)):
            first.entered.clear()
            second.entered.clear()
            found.append(runner(feeds))
            assert session.entered.is_set()
            assert not other.entered.is_set()
    for name, array in found[0].items():
        for other in found[1:]:
            np.testing.assert_allclose(other[name], array, atol=OUTPUTS)


def test_a_run_that_fails_leaves_the_next_alone(tiny, home):
    feeds = feeds_of(tiny)
    with OrtRunner(tiny, RunnerOptions(threads=1, lone_threads=2, keep_optimized=True)) as runner:
        too_large = {name: np.full((1, 9), 10**6, np.int64) for name in feeds}
        with pytest.raises(InputError):
            runner(too_large)
        runner._lone_session = lone = Held(runner._lone_session)
        lone.released.set()
        runner(feeds)
        assert lone.entered.is_set()


@pytest.mark.more
def test_sessions_map_the_same_weights(tmp_path, home):
    """A second session takes a fraction of the weights' size."""
    import psutil

    from tests.tiny import tiny_artifact

    artifact = tiny_artifact(
        "bert", "feature-extraction", tmp_path / "wide", hidden_size=1024, intermediate_size=4096
    )
    weights = artifact.graph_bytes(artifact.manifest.graphs[0])
    assert weights > 50 << 20
    process = psutil.Process()
    with OrtRunner(artifact, RunnerOptions(threads=1, keep_optimized=True)) as first:
        first(feeds_of(artifact))
        before = process.memory_full_info().pss
        with OrtRunner(artifact, RunnerOptions(threads=1, keep_optimized=True)) as second:
            second(feeds_of(artifact))
            added = process.memory_full_info().pss - before
    assert added < weights / 4


def test_weights_that_would_not_be_aligned_are_not_packed(tmp_path, home):
    """The bias of a vocabulary of 600 has 2400 bytes."""
    from tests.tiny import tiny_artifact

    artifact = tiny_artifact("bert", "fill-mask", tmp_path / "masked")
    feeds = feeds_of(artifact)
    with (
        OrtRunner(artifact) as plain,
        OrtRunner(artifact, RunnerOptions(threads=1, lone_threads=2, keep_optimized=True)) as kept,
    ):
        assert not has_packed_weights(graph_of(artifact))
        np.testing.assert_allclose(kept(feeds)["logits"], plain(feeds)["logits"], atol=OUTPUTS)


def test_it_is_made_once(tiny, home):
    first = graph_of(tiny)
    made = first.stat().st_mtime_ns
    assert graph_of(tiny) == first
    assert first.stat().st_mtime_ns == made


def test_each_processor_has_its_own_optimized_graph(tiny, home, monkeypatch):
    first = graph_of(tiny)
    monkeypatch.setattr(
        "enginery.runtime.onnxruntime.optimized_graph.read_cpuinfo", lambda: ("other", ("avx2",))
    )
    assert graph_of(tiny).parent.parent == first.parent.parent
    assert graph_of(tiny) != first


def test_altered_optimized_graph_is_made_again(tiny, home):
    first = graph_of(tiny)
    content = first.read_bytes()
    first.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert graph_of(tiny).read_bytes() != content[:-1] + bytes([content[-1] ^ 1])
    with OrtRunner(tiny, RunnerOptions(keep_optimized=True)) as runner:
        runner(feeds_of(tiny))


def test_no_optimized_graph_for_other_providers(tiny, home):
    record = tiny.manifest.graphs[0]
    providers = [Provider("CUDAExecutionProvider", "requested"), Provider(CPU, "beneath")]
    assert optimized_graph(tiny, record, providers) is None
    assert not (home / "graphs").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_store_that_cannot_be_written_keeps_none(tiny, home):
    home.mkdir()
    home.chmod(0o500)
    assert graph_of(tiny) is None


def test_a_store_that_is_a_file_keeps_none(tiny, home):
    home.write_text("in the way")
    assert graph_of(tiny) is None
    with OrtRunner(tiny, RunnerOptions(keep_optimized=True)) as runner:
        runner(feeds_of(tiny))


def test_the_store_lists_it_and_prunes_it(tiny, home):
    graph = graph_of(tiny)
    (entry,) = Store().entries()
    assert (entry.kind, entry.graph.source, entry.problem) == (
        "graphs",
        tiny.manifest.source.id,
        "",
    )
    assert Store().find(GRAPHS, entry.graph.fingerprint, tiny.manifest.source.id).model == graph
    assert [removed.path for removed in Store().prune(max_size_bytes=0)] == [graph.parent]
    assert not graph.exists()

"""Sizes that are rounded up, and runs of a rung: answers, CUDA graphs, sizes above the top."""

import threading

import numpy as np
import pytest

from enginery import load_model
from enginery.core.errors import ProviderError
from enginery.core.shapes import TensorSpec
from enginery.runtime.onnxruntime import runner as runner_module
from enginery.runtime.onnxruntime.device_values import Device
from enginery.runtime.onnxruntime.ladder import Ladder
from enginery.runtime.onnxruntime.runner import OrtRunner, RunnerOptions
from enginery.runtime.providers.known import CPU, CUDA
from enginery.runtime.providers.selection import Provider, with_dynamic_shapes
from enginery.runtime.tasks import find_task
from enginery.runtime.tasks.batch_runner import BatchRunner
from tests.tolerances import OUTPUTS

IDS = TensorSpec("input_ids", "int64", ("batch_size", "sequence_length"))
MASK = TensorSpec("attention_mask", "int64", ("batch_size", "sequence_length"))
PIXELS = TensorSpec("pixel_values", "float32", ("batch_size", 3, "height", "width"))
SMALL = Ladder({"batch": (1, 2, 4), "sequence": (8, 16)}, max_tokens=32)
ON_SMALL = RunnerOptions(ladder=SMALL)


def test_lengths_end_at_the_models_limit():
    assert Ladder.of([IDS, MASK], longest=514).sizes["sequence"][-2:] == (512, 514)
    assert Ladder.of([IDS, MASK], longest=20).sizes["sequence"] == (16, 20)
    assert Ladder.of([IDS, MASK], longest=4096).sizes["sequence"][-5:] == (
        1024,
        1536,
        2048,
        3072,
        4096,
    )


def test_lengths_without_a_mask_and_images_keep_their_sizes():
    assert set(Ladder.of([IDS]).sizes) == {"batch"}
    ladder = Ladder.of([PIXELS])
    assert ladder.round_up({"batch": 3, "height": 33, "width": 47}) == {
        "batch": 4,
        "height": 33,
        "width": 47,
    }


def test_a_fixed_batch_has_no_ladder():
    assert Ladder.of([TensorSpec("input_ids", "int64", (8, "sequence"))]) is None


@pytest.mark.parametrize(
    ("sizes", "rung"),
    [
        ((1, 1), (1, 8)),
        ((3, 8), (4, 8)),
        ((2, 9), (2, 16)),
        ((4, 9), (4, 9)),  # 4 × 16 tokens are above the top
        ((5, 8), (5, 8)),
        ((1, 17), (1, 24)),
        ((1, 24), (1, 24)),
    ],
)
def test_sizes_are_rounded_up(sizes, rung):
    named = dict(zip(("batch", "sequence"), sizes, strict=True))
    assert tuple(SMALL.round_up(named).values()) == rung
    assert SMALL.is_rung(named) == (sizes == rung and sizes not in ((4, 9), (5, 8)))


def test_every_input_up_to_the_sizes_has_a_rung_among_those_that_are_run():
    rungs = [tuple(rung.values()) for rung in SMALL.rungs(max_rows=3, longest=12)]
    assert rungs[0] == (2, 16)
    reached = {
        tuple(SMALL.round_up({"batch": rows, "sequence": length}).values())
        for rows in (1, 2, 3)
        for length in range(1, 13)
        if rows <= SMALL.max_rows({"sequence": length})
    }
    assert reached == set(rungs)


@pytest.fixture
def watched(monkeypatch):
    """Record the shapes of `input_ids` of every run of a session."""
    shapes = []
    real = OrtRunner._run

    def run(self, index, arrays, outputs=()):
        shapes.append(next(iter(arrays.values())).shape)
        return real(self, index, arrays, outputs)

    monkeypatch.setattr(OrtRunner, "_run", run)
    return shapes


@pytest.mark.parametrize(
    ("kind", "task"),
    [
        ("bert", "feature-extraction"),
        ("bert", "text-classification"),
        ("roberta", "token-classification"),
        ("bert", "question-answering"),
        ("gpt2", "text-classification"),
    ],
)
def test_answers_on_the_ladder_are_those_of_rows_alone(tiny, watched, kind, task):
    artifact = tiny.artifact(kind, task)
    definition = find_task(task)
    texts = ["The engine is warm.", "A cat sleeps.", "The pump runs again, says Ada Lovelace."]
    inputs = [(text, text) for text in texts] if len(definition.inputs) > 1 else texts
    if task == "question-answering":
        inputs = [("Who runs?", text) for text in texts]
    with OrtRunner(artifact) as plain, OrtRunner(artifact, ON_SMALL) as laddered:
        opened = definition.open(artifact, plain.record)
        rows = opened.preprocess(inputs, opened.Options()).rows
        expected = [BatchRunner(opened, plain).run([row])[0] for row in rows]
        watched.clear()
        batches = BatchRunner(opened, laddered)
        outputs = batches.run_all(rows)
    for output, alone in zip(outputs, expected, strict=True):
        for mine, theirs in zip(np.atleast_2d(output), np.atleast_2d(alone), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=OUTPUTS)
    if opened.can_pad:
        sizes = [dict(zip(("batch", "sequence"), shape, strict=True)) for shape in watched]
        assert all(map(SMALL.is_rung, sizes))


class _Replayed:
    """Take the CPU for a GPU whose sessions record CUDA graphs."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(runner_module, "device_of", lambda session: Device("cuda"))
        monkeypatch.setitem(runner_module.CUDA_GRAPH_OPTIONS, CPU, ("enable_cpu_mem_arena", "1"))


@pytest.fixture
def recording(monkeypatch):
    return _Replayed(monkeypatch)


def feeds_of(runner, rows, length, value=5):
    feeds = {spec.name: np.ones((rows, length), np.int64) for spec in runner.record.inputs}
    feeds["input_ids"] *= value
    if "token_type_ids" in feeds:
        feeds["token_type_ids"][:] = 0
    return feeds


@pytest.mark.usefixtures("recording")
def test_each_rung_is_recorded_once_and_counted(tiny):
    with OrtRunner(tiny.artifact("bert", "feature-extraction"), ON_SMALL) as runner:
        count = runner.record_rungs(max_rows=4)
        rungs = list(SMALL.rungs(max_rows=4))
        assert count == len(rungs) == runner.captures.recorded
        for rung in rungs:
            feeds = feeds_of(runner, *rung.values())
            assert runner.is_captured(feeds)
            runner(feeds)
        assert runner.captures.recorded == count
        assert runner.captures.unrecorded_runs == 0
        assert runner.captures.buffer_bytes > 0


@pytest.mark.usefixtures("recording")
def test_replays_read_the_inputs_of_each_run(tiny):
    artifact = tiny.artifact("bert", "feature-extraction")
    with OrtRunner(artifact) as plain, OrtRunner(artifact, ON_SMALL) as runner:
        (output,) = (spec.name for spec in runner.record.outputs[:1])
        for types in (0, 1, 0, 1):  # token types begin as zeros, which are not copied again
            for value in (5, 6):
                feeds = feeds_of(runner, 2, 8, value)
                feeds["token_type_ids"][:] = types
                np.testing.assert_allclose(
                    runner(feeds, [output])[output], plain(feeds)[output], rtol=1e-4, atol=OUTPUTS
                )
        assert runner.captures.recorded == 1


@pytest.mark.usefixtures("recording")
def test_only_the_named_outputs_are_returned(tiny):
    with OrtRunner(tiny.artifact("bert", "question-answering"), ON_SMALL) as runner:
        names = [spec.name for spec in runner.record.outputs]
        feeds = feeds_of(runner, 2, 8)
        assert list(runner(feeds)) == names
        assert list(runner(feeds, names[1:])) == names[1:]
        assert runner.captures.recorded == 2


@pytest.mark.usefixtures("recording")
def test_inputs_above_the_ladder_run_without_a_cuda_graph(tiny):
    with OrtRunner(tiny.artifact("bert", "feature-extraction"), ON_SMALL) as runner:
        for length in (17, 18, 19):
            assert not runner.is_captured(feeds_of(runner, 2, length))
            runner(feeds_of(runner, 2, length))
        assert runner.captures.recorded == 0


@pytest.mark.usefixtures("recording")
def test_rungs_beyond_the_memory_bound_run_without_a_cuda_graph(tiny):
    """The bound is on all of them together; one alone may take a sixteenth."""
    with OrtRunner(tiny.artifact("bert", "feature-extraction"), ON_SMALL) as runner:
        runner(feeds_of(runner, 1, 8))
        size = runner.captures.buffer_bytes
    ladder = Ladder(SMALL.sizes, max_tokens=32, max_bytes=16 * size)
    with OrtRunner(
        tiny.artifact("bert", "feature-extraction"), RunnerOptions(ladder=ladder)
    ) as runner:
        assert runner.record_rungs(max_rows=4) == 1
        runner(feeds_of(runner, 1, 8))
        runner(feeds_of(runner, 4, 8))
        assert runner.captures.recorded == 1
        assert runner.captures.unrecorded_runs == 1
        assert runner.captures.buffer_bytes == size


class Failing:
    """A session whose recordings fail, as they do beside other CUDA work."""

    def __init__(self, session):
        self._session = session
        self.failures = 0

    def run_with_iobinding(self, bound, options=None):
        if options.get_run_config_entry("gpu_graph_id") != "-1":
            self.failures += 1
            raise RuntimeError("CUDA failure 900: operation not permitted when stream is capturing")
        self._session.run_with_iobinding(bound, options)

    def __getattr__(self, name):
        return getattr(self._session, name)


@pytest.mark.usefixtures("recording")
def test_a_failed_recording_is_a_run_without_a_cuda_graph(tiny):
    with OrtRunner(tiny.artifact("bert", "feature-extraction"), ON_SMALL) as runner:
        runner._sessions = [session] = [Failing(runner._sessions[0])]
        for _ in range(3):
            assert runner(feeds_of(runner, 2, 8))
        assert session.failures == 1
        assert (runner.captures.recorded, runner.captures.buffer_bytes) == (0, 0)
        assert runner.captures.unrecorded_runs == 3


@pytest.mark.usefixtures("recording")
def test_threads_record_no_more_graphs_together_than_the_ladder_allows(tiny):
    ladder = Ladder(SMALL.sizes, max_tokens=32, max_graphs=8)
    with OrtRunner(
        tiny.artifact("bert", "feature-extraction"), RunnerOptions(ladder=ladder)
    ) as runner:
        feeds = feeds_of(runner, 2, 8)

        def work():
            assert runner(feeds)

        for _ in range(12):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        assert runner.captures.recorded == 8
        assert runner.captures.unrecorded_runs == 4


@pytest.mark.usefixtures("recording")
def test_another_threads_token_types_do_not_stay(tiny):
    artifact = tiny.artifact("bert", "feature-extraction")
    with OrtRunner(artifact) as plain, OrtRunner(artifact, ON_SMALL) as runner:
        single, pair = feeds_of(runner, 2, 8), feeds_of(runner, 2, 8)
        pair["token_type_ids"][:] = 1
        expected = plain(single)
        runner(single)
        thread = threading.Thread(target=lambda: runner(pair))
        thread.start()
        thread.join()
        for name, values in runner(single).items():
            np.testing.assert_allclose(values, expected[name], rtol=1e-4, atol=OUTPUTS)


@pytest.mark.usefixtures("recording")
def test_sizes_without_rungs_are_recorded_when_they_come_again(tiny):
    ladder = Ladder({"batch": (1, 2, 4)})
    with OrtRunner(
        tiny.artifact("bert", "feature-extraction"), RunnerOptions(ladder=ladder)
    ) as runner:
        for length in range(3, 9):
            runner(feeds_of(runner, 2, length))
        assert runner.captures.recorded == 0
        for _ in range(3):
            runner(feeds_of(runner, 2, 8))
        assert runner.captures.recorded == 1


@pytest.mark.usefixtures("recording")
def test_a_graph_that_waits_for_the_gpu_is_not_recorded(tiny, monkeypatch):
    monkeypatch.setattr(runner_module, "waiting_nodes", lambda path: ["unpad (RemovePadding)"])
    with OrtRunner(tiny.artifact("bert", "feature-extraction"), ON_SMALL) as runner:
        assert runner.captures is None
        assert runner.notes == ["runs are not recorded as CUDA graphs: unpad (RemovePadding)"]


@pytest.mark.usefixtures("recording")
def test_a_graph_that_cannot_be_recorded_keeps_the_rungs(tiny, monkeypatch):
    opened = runner_module.open_session

    def refuse(path, providers, **options):
        if providers[0].options.get("enable_cpu_mem_arena"):
            raise ProviderError("the session cannot use the graph capture feature")
        return opened(path, providers, **options)

    monkeypatch.setattr(runner_module, "open_session", refuse)
    monkeypatch.setattr(runner_module, "capture_obstacles", lambda *_: ["loop_3 (Loop on cpu)"])
    with OrtRunner(tiny.artifact("bert", "feature-extraction"), ON_SMALL) as runner:
        assert runner.captures is None
        assert runner.notes == ["runs are not recorded as CUDA graphs: loop_3 (Loop on cpu)"]
        assert runner.padded_shape(runner.record.inputs[0], (3, 5)) == (4, 8)
        assert runner(feeds_of(runner, 4, 8))


@pytest.mark.usefixtures("recording")
def test_another_failure_to_open_is_an_error(tiny, monkeypatch):
    def refuse(path, providers, **options):
        raise ProviderError("out of memory")

    monkeypatch.setattr(runner_module, "open_session", refuse)
    monkeypatch.setattr(runner_module, "capture_obstacles", lambda *_: [])
    with pytest.raises(ProviderError, match="out of memory"):
        OrtRunner(tiny.artifact("bert", "feature-extraction"), ON_SMALL)


def test_the_cpu_has_no_ladder_by_default(tiny):
    with OrtRunner(
        tiny.artifact("bert", "feature-extraction"), RunnerOptions(ladder=True)
    ) as runner:
        assert runner.ladder is None
        assert not runner.pads


@pytest.mark.parametrize("own", [{}, {"sdpa_kernel": "8"}])
def test_kernels_without_plans_run_what_is_above_the_ladder(tiny, monkeypatch, own):
    """The user's own choice of kernels stays."""
    opened, sessions = runner_module.open_session, []

    def watched(path, providers, **options):
        sessions.append(providers[0].options)
        return opened(path, [Provider(CPU, "requested")], **options)

    monkeypatch.setattr(runner_module, "open_session", watched)
    monkeypatch.setattr(runner_module, "device_of", lambda session: Device("cuda"))
    monkeypatch.setattr(
        runner_module, "choose_with_engines", lambda *_, **__: ([Provider(CUDA, "", own)], [])
    )
    with OrtRunner(tiny.artifact("bert", "feature-extraction"), ON_SMALL) as runner:
        runner(feeds_of(runner, 1, 8))
        assert len(sessions) == 1
        runner(feeds_of(runner, 1, 17))
        runner(feeds_of(runner, 1, 18))
    heuristic = {"cudnn_conv_algo_search": "HEURISTIC"}
    assert sessions[0] == {**heuristic, **own, "enable_cuda_graph": "1"}
    assert sessions[1:] == ([] if own else [{**heuristic, "sdpa_kernel": "3"}])


def test_convolutions_of_dynamic_sizes_are_chosen_by_heuristics():
    cuda, cpu = Provider(CUDA, "requested"), Provider(CPU, "the rest")
    (changed, same) = with_dynamic_shapes([cuda, cpu], dynamic=True)
    assert changed.options == {"cudnn_conv_algo_search": "HEURISTIC"}
    assert same == cpu
    assert with_dynamic_shapes([cuda], dynamic=False) == [cuda]
    own = Provider(CUDA, "requested", {"cudnn_conv_algo_search": "EXHAUSTIVE"})
    assert with_dynamic_shapes([own], dynamic=True) == [own]


@pytest.mark.usefixtures("recording")
def test_a_model_that_is_warm_records_nothing_more(tiny, monkeypatch):
    monkeypatch.setattr(OrtRunner, "_choose_ladder", lambda self: SMALL)
    with load_model(tiny.artifact("bert", "text-classification")) as model:
        assert model._runner.captures.recorded == 0
        model.warm_up()
        recorded = model._runner.captures.recorded
        assert recorded == len(list(SMALL.rungs(max_rows=256)))
        model.classify(["The engine is warm.", "A cat."])
        assert model._runner.captures.recorded == recorded

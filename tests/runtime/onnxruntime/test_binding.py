"""Bound inputs and outputs, on the CPU: buffers that are used again, DLPack, buckets, the arena."""

import ctypes
import subprocess
import sys
import threading
import time

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from enginery.core.errors import InputError, OptionError, ProviderError, ShapeError
from enginery.core.shapes import TensorSpec
from enginery.runtime.onnxruntime.binding import BindingOptions, DeviceBinding
from enginery.runtime.onnxruntime.capture_lock import CaptureLock
from enginery.runtime.onnxruntime.device_values import Device, device_of
from enginery.runtime.onnxruntime.runner import OrtRunner, RunnerOptions
from tests.tolerances import OUTPUTS

X = TensorSpec("x", "float32", ("batch_size", 4))
Y = TensorSpec("y", "float32", ("batch_size", 4))


def session_of(nodes, *, inputs=("x",), outputs=("y",), dtype=TensorProto.FLOAT):
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(name, dtype, ["n", 4]) for name in inputs],
        [helper.make_tensor_value_info(name, dtype, None) for name in outputs],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.fixture
def doubling():
    return session_of([helper.make_node("Add", ["x", "x"], ["y"])])


def rows(count, value=1.0):
    return np.full((count, 4), value, np.float32)


def test_outputs_equal_those_of_a_plain_run(doubling):
    with DeviceBinding(doubling, [X], [Y]) as binding:
        for count in (2, 3, 2):
            feeds = {"x": rows(count, count)}
            np.testing.assert_array_equal(binding(feeds)["y"], doubling.run(None, feeds)[0])


def test_the_same_shape_takes_the_same_output_buffer_and_another_shape_another(doubling):
    binding = DeviceBinding(doubling, [X], [Y])
    places = [binding.run({"x": rows(count)})["y"].data_ptr() for count in (2, 3, 2, 3)]
    assert places[:2] == places[2:]
    assert places[0] != places[1]
    assert binding.shapes == (((2, 4),), ((3, 4),))


def test_no_buffer_is_made_for_a_shape_that_was_there(doubling, monkeypatch):
    binding = DeviceBinding(doubling, [X], [Y])
    binding({"x": rows(2)})
    monkeypatch.setattr("enginery.runtime.onnxruntime.binding.new_buffer", None)
    assert binding({"x": rows(2, 5)})["y"][0, 0] == 10


def test_answers_are_not_written_over_by_the_next_run(doubling):
    binding = DeviceBinding(doubling, [X], [Y])
    first = binding({"x": rows(2)})["y"]
    binding({"x": rows(2, 7)})
    assert (first == 2).all()


def test_outputs_on_the_device_are_overwritten(doubling):
    binding = DeviceBinding(doubling, [X], [Y])
    first = binding.run({"x": rows(2)})["y"]
    binding.run({"x": rows(2, 7)})
    assert (first.numpy() == 14).all()


def test_the_buckets_used_last_are_kept(doubling):
    binding = DeviceBinding(doubling, [X], [Y], BindingOptions(buckets=2))
    for count in (1, 2, 1, 3):
        binding({"x": rows(count)})
    assert binding.shapes == (((1, 4),), ((3, 4),))
    with pytest.raises(OptionError, match="buckets is 0"):
        DeviceBinding(doubling, [X], [Y], BindingOptions(buckets=0))


def test_numpy_and_torch_tensors_go_in_and_out_without_a_copy():
    import torch

    session = session_of([helper.make_node("Identity", ["x"], ["y"])])
    binding = DeviceBinding(session, [X], [Y])
    bound = {}
    real = ort.IOBinding.bind_ortvalue_input

    def recorded(self, name, value):
        bound[name] = value.data_ptr()
        real(self, name, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ort.IOBinding, "bind_ortvalue_input", recorded)
        array = rows(2)
        binding.run({"x": array})
        assert bound["x"] == array.ctypes.data
        tensor = torch.full((2, 4), 3.0)
        found = binding.run({"x": tensor})["y"]
        assert bound["x"] == tensor.data_ptr()
    out = torch.from_dlpack(found)
    assert out.data_ptr() == found.data_ptr()
    assert out.tolist() == tensor.tolist()


def test_an_output_goes_into_the_next_run_as_it_is(doubling):
    binding = DeviceBinding(doubling, [X], [Y])
    first = binding.run({"x": rows(2)})["y"]
    second = DeviceBinding(doubling, [X], [Y]).run({"x": first})["y"]
    assert (second.numpy() == 4).all()


def test_a_torch_tensor_with_strides_is_made_whole(doubling):
    import torch

    turned = torch.arange(8.0).reshape(4, 2).T
    found = DeviceBinding(doubling, [X], [Y])({"x": turned})["y"]
    np.testing.assert_array_equal(found, 2 * turned.numpy())


def test_truth_values_and_halves_are_bound():
    import torch

    negate = session_of([helper.make_node("Not", ["x"], ["y"])], dtype=TensorProto.BOOL)
    flags = [TensorSpec(name, "bool", ("n", 4)) for name in "xy"]
    given = torch.tensor([[True, False, True, False]])
    assert DeviceBinding(negate, flags[:1], flags[1:])({"x": given})["y"].tolist() == [
        [False, True, False, True]
    ]
    same = session_of([helper.make_node("Identity", ["x"], ["y"])], dtype=TensorProto.BFLOAT16)
    halves = [TensorSpec(name, "bfloat16", ("n", 4)) for name in "xy"]
    given = torch.full((1, 4), 1.5, dtype=torch.bfloat16)
    found = DeviceBinding(same, halves[:1], halves[1:]).run({"x": given})["y"]
    assert torch.equal(torch.from_dlpack(found), given)


def test_a_gpus_tensor_is_rejected_by_a_session_on_the_host(doubling):
    class OnGpu:
        def __dlpack_device__(self):
            return 2, 0

    with pytest.raises(InputError, match="x is on cuda:0, but the session is on cpu"):
        DeviceBinding(doubling, [X], [Y])({"x": OnGpu()})


@pytest.mark.parametrize(
    ("feeds", "words"),
    [
        ({}, "input 'x' is missing"),
        ({"x": rows(1), "z": rows(1)}, "unknown input 'z'"),
        ({"x": "text"}, "found a str, expected a numpy array"),
        ({"x": rows(1).astype(np.float64)}, "found float64 with 2 dims"),
        ({"x": np.ones(4, np.float32)}, "found float32 with 1 dims"),
    ],
)
def test_inputs_that_do_not_fit_are_rejected(doubling, feeds, words):
    with pytest.raises(InputError, match=words):
        DeviceBinding(doubling, [X], [Y])(feeds)


def test_a_tensor_that_needs_a_gradient_is_rejected_in_torchs_words(doubling):
    import torch

    with pytest.raises(InputError, match=r"DLPack failed.*grad"):
        DeviceBinding(doubling, [X], [Y])({"x": torch.ones(1, 4, requires_grad=True)})


def test_shapes_that_disagree_are_rejected():
    session = session_of([helper.make_node("Add", ["x", "z"], ["y"])], inputs=("x", "z"))
    both = [X, TensorSpec("z", "float32", ("batch_size", 4))]
    with pytest.raises(ShapeError, match="batch is 3, but 2"):
        DeviceBinding(session, both, [Y])({"x": rows(2), "z": rows(3)})


def test_failing_run_names_the_shapes_and_drops_the_bucket(doubling):
    binding = DeviceBinding(doubling, [TensorSpec("x", "float32", ("n", "m"))], [Y])
    with pytest.raises(InputError, match=r"the graph fails on x \(2, 5\)"):
        binding({"x": np.ones((2, 5), np.float32)})
    assert binding.shapes == ()
    assert binding({"x": rows(2)})["y"].shape == (2, 4)


def test_an_output_whose_shape_depends_on_values_is_allocated_in_each_run():
    session = session_of(
        [
            helper.make_node("NonZero", ["x"], ["i"]),
            helper.make_node("Cast", ["i"], ["y"], to=TensorProto.FLOAT),
        ]
    )
    found = TensorSpec("y", "float32", (2, "found"))
    binding = DeviceBinding(session, [X], [found])
    some = rows(2)
    some[0] = 0
    assert binding({"x": rows(2)})["y"].shape == (2, 8)
    assert binding({"x": some})["y"].shape == (2, 4)
    with pytest.raises(ProviderError, match="its shape is unknown before a run"):
        DeviceBinding(session, [X], [found], BindingOptions(capture=True))({"x": some})


def test_a_graph_that_declares_other_dims_than_it_makes_still_runs(doubling):
    binding = DeviceBinding(doubling, [X], [TensorSpec("y", "float32", (1, 4))])
    assert binding({"x": rows(2)})["y"].shape == (2, 4)
    assert binding({"x": rows(3)})["y"].shape == (3, 4)


class Recorded:
    """A session that says which graph each run is for, and where its inputs are."""

    def __init__(self, session):
        self._session = session
        self.graphs = []

    def io_binding(self):
        return self._session.io_binding()

    def run_with_iobinding(self, bound, options=None):
        entry = options.get_run_config_entry("gpu_graph_id")
        self.graphs.append((entry, bound._bound_inputs["x"].data_ptr()))
        self._session.run_with_iobinding(bound, options)


def test_a_captured_run_reads_the_same_buffers_each_time(doubling):
    session = Recorded(doubling)
    binding = DeviceBinding(
        session, [X], [Y], BindingOptions(capture=True, buckets=2), device=Device()
    )
    answers = [binding({"x": rows(count, count)})["y"][0, 0] for count in (1, 2, 1, 2)]
    assert answers == [2, 4, 2, 4]
    assert [graph for graph, _ in session.graphs] == ["1", "2", "1", "2"]
    assert session.graphs[:2] == session.graphs[2:]


def test_shapes_beyond_the_buckets_are_not_captured_and_no_capture_is_given_up(doubling):
    session = Recorded(doubling)
    binding = DeviceBinding(
        session, [X], [Y], BindingOptions(capture=True, buckets=1), device=Device()
    )
    for count in (1, 2, 3, 1):
        assert binding({"x": rows(count)})["y"].shape == (count, 4)
    assert [graph for graph, _ in session.graphs] == ["1", "-1", "-1", "1"]
    assert binding.shapes == (((1, 4),), ((3, 4),))


def test_a_shape_that_fails_under_capture_gives_its_place_and_no_number_comes_twice(doubling):
    session = Recorded(doubling)
    binding = DeviceBinding(
        session,
        [TensorSpec("x", "float32", ("n", "m"))],
        [TensorSpec("y", "float32", ("n", "m"))],
        BindingOptions(capture=True, buckets=2),
        device=Device(),
    )
    binding({"x": rows(1)})
    with pytest.raises(InputError, match=r"the graph fails on x \(2, 5\)"):
        binding({"x": np.ones((2, 5), np.float32)})
    assert binding.captured == (((1, 4),),)
    binding({"x": rows(2)})
    assert [graph for graph, _ in session.graphs] == ["1", "2", "3"]
    assert binding.captured == (((1, 4),), ((2, 4),))


@pytest.mark.parametrize(("buckets", "captured"), [(8, 8), (9, 9)])
def test_a_runner_keeps_as_many_shapes_as_it_is_told(tiny, monkeypatch, buckets, captured):
    artifact = tiny.artifact("bert", "feature-extraction")
    monkeypatch.setattr(
        "enginery.runtime.onnxruntime.runner.device_of", lambda session: Device("cuda")
    )
    monkeypatch.setattr(
        "enginery.runtime.onnxruntime.runner.check_run_options", lambda *_, **__: None
    )
    monkeypatch.setattr(
        "enginery.runtime.onnxruntime.runner.with_cuda_graph", lambda graphs, given: given
    )
    with OrtRunner(artifact, RunnerOptions(cuda_graph=True, buckets=buckets)) as runner:
        names = [spec.name for spec in runner.record.inputs]
        feeds = [dict.fromkeys(names, np.ones((n, 4), np.int64)) for n in range(1, 10)]
        for given in feeds:
            runner(given)
        assert [runner.is_captured(given) for given in feeds].count(True) == captured


def test_threads_wait_for_each_other(doubling):
    binding = DeviceBinding(doubling, [X], [Y])
    found = []

    def ask(value):
        found.extend((binding({"x": rows(2, value)})["y"] == 2 * value).all() for _ in range(50))

    threads = [threading.Thread(target=ask, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 200
    assert all(found)


def test_closed_binding_is_an_error(doubling):
    binding = DeviceBinding(doubling, [X], [Y])
    binding.close()
    binding.close()
    with pytest.raises(ProviderError, match="the binding is closed"):
        binding({"x": rows(1)})


def test_text_cannot_be_bound(doubling):
    with pytest.raises(ProviderError, match="a tensor of string cannot be bound"):
        DeviceBinding(doubling, [TensorSpec("x", "string", ("n",))], [Y])


def test_the_device_is_that_of_the_first_provider(doubling):
    class OnGpu:
        def get_providers(self):
            return ["CUDAExecutionProvider", "CPUExecutionProvider"]

        def get_provider_options(self):
            return {"CUDAExecutionProvider": {"device_id": "1"}}

    assert device_of(doubling) == Device()
    assert str(device_of(OnGpu())) == "cuda:1"


def test_a_runner_answers_bound_as_it_does_without(tiny):
    import torch

    artifact = tiny.artifact("bert", "feature-extraction")
    with OrtRunner(artifact) as runner:
        feeds = {spec.name: np.ones((2, 6), np.int64) for spec in runner.record.inputs}
        tensors = {name: torch.from_numpy(array) for name, array in feeds.items()}
        expected = runner(feeds)
        for _ in range(2):
            found = runner.run_on_device(tensors)
            assert list(found) == list(expected)
            for name, value in found.items():
                given = torch.from_dlpack(value).numpy()
                np.testing.assert_allclose(given, expected[name], rtol=1e-5, atol=OUTPUTS)
    with pytest.raises(ProviderError, match="the runner is closed"):
        runner.run_on_device(tensors)


@pytest.mark.parametrize("io_binding", [True, False])
def test_on_a_gpu_a_runner_binds_unless_it_is_told_not_to(tiny, monkeypatch, io_binding):
    artifact = tiny.artifact("bert", "feature-extraction")
    with OrtRunner(artifact) as plain:
        feeds = {spec.name: np.ones((2, 6), np.int64) for spec in plain.record.inputs}
        expected = plain(feeds)
    # The runner takes the host for a GPU; the binding sees what is there.
    monkeypatch.setattr(
        "enginery.runtime.onnxruntime.runner.device_of", lambda session: Device("cuda")
    )
    runs = []
    real = DeviceBinding.__call__
    monkeypatch.setattr(
        DeviceBinding, "__call__", lambda self, feeds: runs.append(1) or real(self, feeds)
    )
    with OrtRunner(artifact, RunnerOptions(io_binding=io_binding)) as runner:
        found = runner(feeds)
    assert bool(runs) == io_binding
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=OUTPUTS)


# One process each: memory that one run left would hide what the other takes. glibc is told to
# give freed blocks back at once, so that the resident set shows what the arena holds.
_ARENA = """
import sys
import numpy as np
import psutil
from enginery.core.artifact.artifact import Artifact
from enginery.runtime.onnxruntime.runner import OrtRunner, RunnerOptions
options = RunnerOptions(shrink_arena=sys.argv[2] == "True")
with OrtRunner(Artifact.open(sys.argv[1]), options) as runner:
    def run(rows):
        runner({spec.name: np.ones((rows, 128), np.int64) for spec in runner.record.inputs})
    run(1)
    before = psutil.Process().memory_info().rss
    run(256)
    print(psutil.Process().memory_info().rss - before)
"""


@pytest.mark.more
@pytest.mark.skipif(sys.platform != "linux", reason="other allocators keep what is freed")
def test_a_large_batch_is_not_held_where_the_arena_shrinks(tiny):
    artifact = tiny.artifact("bert", "feature-extraction")

    def held(shrink):
        done = subprocess.run(
            [sys.executable, "-c", _ARENA, str(artifact.path), str(shrink)],
            capture_output=True,
            text=True,
            check=True,
        )
        return int(done.stdout)

    kept, shrunk = held(shrink=False), held(shrink=True)
    # 256 rows of 4 heads of 128 by 128 float32 are 64 MiB for the scores of one layer.
    assert kept > 48 << 20
    assert shrunk < kept // 4


@pytest.fixture
def copied(monkeypatch):
    """As on a GPU: what comes from the host is copied into a buffer, a tensor there is bound."""
    monkeypatch.setattr(
        "enginery.runtime.onnxruntime.binding.is_on",
        lambda value, device: isinstance(value, ort.OrtValue),
    )


@pytest.mark.usefixtures("copied")
def test_host_and_device_inputs_may_take_turns(doubling):
    binding = DeviceBinding(doubling, [X], [Y])
    given = [rows(2, 1), ort.OrtValue.ortvalue_from_numpy(rows(2, 2)), rows(2, 3)]
    answers = [float(binding({"x": value})["y"][0, 0]) for value in given]
    assert answers == [2, 4, 6]


class CopiedWhenBound:
    """An IOBinding that copies inputs when they are bound, for a first node on another device."""

    def __init__(self, bound):
        self._bound = bound

    def bind_ortvalue_input(self, name, value):
        self._bound.bind_ortvalue_input(
            name, ort.OrtValue.ortvalue_from_numpy(np.array(value.numpy()))
        )

    def __getattr__(self, name):
        return getattr(self._bound, name)


class FirstNodeElsewhere:
    """A session whose inputs are read first by a node on another device than the buffers'."""

    def __init__(self, session):
        self._session = session

    def io_binding(self):
        return CopiedWhenBound(self._session.io_binding())

    def run_with_iobinding(self, bound, options=None):
        self._session.run_with_iobinding(bound._bound, options)


@pytest.mark.usefixtures("copied")
@pytest.mark.parametrize("capture", [False, True])
def test_updates_reach_a_node_on_another_device(doubling, capture):
    binding = DeviceBinding(
        FirstNodeElsewhere(doubling), [X], [Y], BindingOptions(capture=capture), device=Device()
    )
    assert [float(binding({"x": rows(2, n)})["y"][0, 0]) for n in (1, 2, 3)] == [2, 4, 6]


class _DlTensor(ctypes.Structure):
    """DLManagedTensor of dlpack.h, with its DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class OfKind:
    """A float32 array that says by DLPack that it is in memory of this kind."""

    def __init__(self, array, kind):
        self._array, self._kind = array, kind
        self._shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        self._tensor = _DlTensor(
            array.ctypes.data, kind, 0, array.ndim, 2, 32, 1, self._shape, None, 0, None, None
        )

    def __dlpack_device__(self):
        return self._kind, 0

    def __dlpack__(self, **_):
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = (
            ctypes.py_object,
            [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
        )
        return new(ctypes.addressof(self._tensor), b"dltensor", None)


@pytest.mark.parametrize("kind", [3, 13], ids=["pinned", "managed"])
def test_memory_of_cuda_that_the_host_reads_is_an_input(doubling, kind):
    given = OfKind(rows(2, 3), kind)
    # The reason why it does not go to ONNX Runtime as it is.
    with pytest.raises(Exception, match=r"(?i)device"):
        ort.OrtValue.from_dlpack(given)
    found = DeviceBinding(doubling, [X], [Y])({"x": given})["y"]
    np.testing.assert_array_equal(found, rows(2, 6))


def test_memory_of_another_vendor_is_rejected(doubling):
    with pytest.raises(InputError, match="x is on a device of DLPack type 10"):
        DeviceBinding(doubling, [X], [Y])({"x": OfKind(rows(2), 10)})


class RecordedByThread:
    """A session that keeps the CUDA graphs of each thread, as ONNX Runtime does.

    While one is recorded, a run of another session fails, as CUDA's error 900.
    """

    recording = threading.Lock()

    def __init__(self, session):
        self._session = session
        self._graphs = threading.local()
        self.recorded = []

    def io_binding(self):
        return self._session.io_binding()

    def run_with_iobinding(self, bound, options=None):
        graph = options.get_run_config_entry("gpu_graph_id") if options else "-1"
        own = self._graphs.__dict__.setdefault("own", set())
        if graph == "-1" or graph in own:
            for _ in range(2):
                if self.recording.locked():
                    raise RuntimeError("CUDA failure 900: operation not permitted")
                time.sleep(0.001)  # a recording must not begin in the meantime
        else:
            if not self.recording.acquire(blocking=False):
                raise RuntimeError("CUDA failure 900: operation not permitted")
            time.sleep(0.01)  # other threads run in the meantime
            own.add(graph)
            self.recorded.append((threading.get_ident(), graph))
            self.recording.release()
        self._session.run_with_iobinding(bound, options)


def test_each_thread_records_its_graphs_while_no_session_runs(doubling):
    sessions = [RecordedByThread(doubling) for _ in range(3)]
    bindings = [
        DeviceBinding(
            session, [X], [Y], BindingOptions(capture=session is not sessions[0]), device=Device()
        )
        for session in sessions
    ]
    found, failed = [], []

    def ask(binding, value):
        try:
            for count in (1, 2, 3, 1):
                answer = binding({"x": rows(count, value)})["y"]
                found.append((answer == 2 * value).all())
        except InputError as error:
            failed.append(error.message)

    threads = [
        threading.Thread(target=ask, args=(binding, value))
        for value, binding in enumerate(bindings * 3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert found == [True] * 36
    for session in sessions[1:]:
        assert len(session.recorded) == len(set(session.recorded)) == 9  # 3 threads, 3 shapes


def test_a_capture_waits_for_runs_and_holds_back_new_ones():
    lock, events = CaptureLock(), []

    def capture():
        with lock.capturing():
            events.append("capture")

    def run():
        with lock.running():
            events.append("second run")

    threads = [threading.Thread(target=capture), threading.Thread(target=run)]
    with lock.running(), lock.running():
        threads[0].start()
        threads[0].join(timeout=0.05)
        threads[1].start()
        threads[1].join(timeout=0.05)
        events.append("first run")
    for thread in threads:
        thread.join(timeout=10)
    assert events == ["first run", "capture", "second run"]

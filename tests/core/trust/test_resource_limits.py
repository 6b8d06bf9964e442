"""Limits of memory and time: of child processes, and of calls in the command's own process."""

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from enginery.core.errors import ArtifactError, ExportError, OptionError, ProviderError
from enginery.core.subprocess import Supervision, WorkerProcess, run_in_subprocess
from enginery.core.trust.onnx_structure import MAX_CALLS, read_structure
from enginery.core.trust.resource_limits import (
    MEMORY_VARIABLE,
    TIME_VARIABLE,
    ResourceLimits,
    activation_bytes,
    limited_call,
    memory_bytes,
    read_sizes,
    watching_own_calls,
)
from tests.growing_graphs import growing_graphs

ROOT = str(Path(__file__).parents[3])
MIB = 2**20

GREEDY = """
import time
from pathlib import Path
from enginery.core.subprocess import worker_main
def handle(request):
    match request["do"]:
        case "grow":
            held = []
            for _ in range(2**11):  # 1 MiB of memory that is written, not only reserved
                held.append(bytearray(b"x") * 2**20)
        case "reserve":
            import mmap
            held = mmap.mmap(-1, 2**32, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            return {"reserved": len(held)}
        case "map":
            import mmap
            with open(request["file"], "rb") as stream:
                return {"sum": sum(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)[::4096])}
        case "spin":
            end = time.monotonic() + 60
            while time.monotonic() < end:
                pass
        case "sleep":
            time.sleep(1.5)
        case "talk":
            for _ in range(100):
                print("x" * 2**18, flush=True)
            return {"said": True}
    Path(__file__).with_name("finished").touch()
    return {"finished": True}
worker_main(handle, description="{do}")
"""
SERVING = GREEDY.replace(
    'worker_main(handle, description="{do}")', "serve_requests(handle)"
).replace("import worker_main", "import serve_requests")


@pytest.fixture
def greedy(tmp_path, monkeypatch):
    (tmp_path / "greedy.py").write_text(GREEDY)
    (tmp_path / "serving.py").write_text(SERVING)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), ROOT]))

    def run(do, limits, **values):
        return run_in_subprocess(
            "greedy",
            {"do": do, **values},
            log=tmp_path / "greedy.log",
            description="working",
            error_classes=[ExportError],
            supervision=Supervision(limits=limits),
        )

    return run


def test_child_that_grows_is_ended_with_the_limit_and_the_option(greedy, tmp_path):
    with pytest.raises(ExportError) as error:
        greedy("grow", ResourceLimits(memory_bytes=256 * MIB, do=f"Set {MEMORY_VARIABLE}."))
    assert error.value.message == (
        "working: the process was ended because it needed more than 0.25 GiB of memory, its limit."
    )
    assert error.value.do == f"Set {MEMORY_VARIABLE}."
    assert not (tmp_path / "finished").exists()


def test_child_that_computes_for_ever_is_ended(greedy, tmp_path):
    with pytest.raises(ExportError, match=r"because it took longer than 1 seconds, its limit"):
        greedy("spin", ResourceLimits(seconds=1))
    assert not (tmp_path / "finished").exists()


def test_time_that_a_child_does_not_compute_does_not_count(greedy, tmp_path):
    assert greedy("sleep", ResourceLimits(seconds=0.5)) == {"finished": True}
    assert (tmp_path / "finished").exists()


def test_reserved_addresses_and_mapped_files_do_not_count(greedy, tmp_path):
    """CUDA reserves many times the machine's memory, and weights are mapped."""
    limits = ResourceLimits(memory_bytes=256 * MIB)
    assert greedy("reserve", limits) == {"reserved": 2**32}
    file = tmp_path / "weights"
    file.write_bytes(bytes(300 * MIB))
    assert greedy("map", limits, file=str(file)) == {"sum": 0}


def test_log_of_a_child_does_not_fill_the_disk(greedy, tmp_path):
    assert greedy("talk", ResourceLimits()) == {"said": True}
    assert (tmp_path / "greedy.log").stat().st_size <= 17 * MIB
    assert (tmp_path / "greedy.log").read_text().endswith("[the log is full]\n")


def test_worker_that_grows_is_ended_and_the_next_request_says_so(greedy, tmp_path):
    with WorkerProcess(
        "serving",
        log=tmp_path / "serving.log",
        description="backend",
        error=ProviderError,
    ) as worker:
        with pytest.raises(
            ProviderError, match=r"backend: the process was ended because it needed"
        ):
            worker.request("grow", limits=ResourceLimits(memory_bytes=256 * MIB))
        assert not worker.is_alive


OWN = """
import sys
from enginery.core.trust.resource_limits import ResourceLimits, limited_call, watching_own_calls
import os, time
def end(message):
    os.write(2, message.encode())
    os._exit(2)
before = bytearray(b"x") * 2**28  # does not count: the call has not taken it
with watching_own_calls(end):
    with limited_call("small", lambda: ResourceLimits(memory_bytes=2**27)):
        time.sleep(0.2)
    with limited_call("m.onnx", lambda: ResourceLimits(memory_bytes=2**27, seconds=1)):
        held = []
        end = time.monotonic() + 30
        while sys.argv[1] == "grow" and len(held) < 2**11:
            held.append(bytearray(b"x") * 2**20)
        while sys.argv[1] == "spin" and time.monotonic() < end:
            pass
"""


@pytest.mark.more
@pytest.mark.parametrize(
    ("do", "words"),
    [("grow", "needed more than 0.125 GiB"), ("spin", "took longer than 1 seconds")],
)
def test_call_in_the_own_process_is_ended(do, words):
    ended = subprocess.run(
        [sys.executable, "-c", OWN, do],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": ROOT},
        timeout=60,
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"m.onnx: it {words}")


def test_without_the_command_line_no_call_is_limited():
    def never():
        raise AssertionError

    with limited_call("m.onnx", never):
        pass


def test_calls_are_counted_only_while_they_run():
    ended = []
    with watching_own_calls(ended.append):
        for _ in range(3):
            with limited_call("m.onnx", lambda: ResourceLimits(memory_bytes=MIB)):
                pass
        held = b"x" * (8 * MIB)
        time.sleep(0.1)
    assert ended == []
    assert len(held) == 8 * MIB


def test_memory_is_that_without_the_pages_of_files():
    assert MIB < memory_bytes(os.getpid()) < 64 * 2**30
    assert memory_bytes(2**22 + 1) == 0  # no such process


@pytest.mark.parametrize(
    ("text", "gib"), [("8", 8.0), ("0.5", 0.5), ("0", math.inf), ("", 1.25), (" 2 ", 2.0)]
)
def test_variable_replaces_the_limit(monkeypatch, text, gib):
    monkeypatch.setenv(MEMORY_VARIABLE, text)
    assert ResourceLimits.of_graph(file_bytes=0).memory_bytes == gib * 2**30


@pytest.mark.parametrize("text", ["8GB", "-1", "nan", "lots"])
@pytest.mark.parametrize("name", [MEMORY_VARIABLE, TIME_VARIABLE])
def test_variable_that_is_no_number_is_an_error(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    with pytest.raises(OptionError, match=rf"{name} is '{text}', expected a number of at least 0"):
        ResourceLimits.of_graph(file_bytes=0)


def test_limits_grow_with_files_and_inputs():
    small = ResourceLimits.of_graph(file_bytes=1400)
    large = ResourceLimits.of_graph(file_bytes=2**30)
    assert 1.25 * 2**30 <= small.memory_bytes < 1.3 * 2**30
    assert large.memory_bytes > 10 * 2**30
    assert large.seconds > 10 * small.seconds
    # BERT's attention on 512 tokens, and a picture.
    tokens = activation_bytes(0, [(True, (8, 512))])
    assert tokens > 8 * 512 * 512 * 12 * 4
    assert activation_bytes(0, [(False, (1, 3, 640, 640))]) > 64 * 640 * 640 * 4
    assert activation_bytes(0, [(True, (1, 10**9))]) < 2**45  # never more than the machine has
    arrays = {"ids": np.zeros((8, 512), np.int64)}
    assert ResourceLimits.of_run(0, arrays).memory_bytes == small.memory_bytes - 14000 + tokens


def saved(path, model):
    path.write_bytes(model)
    return path


GRAPHS = dict(growing_graphs())


def test_there_are_sixty_graphs_that_grow():
    assert len(GRAPHS) >= 60


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("functions-30", r"its functions expand to \d{10} nodes, expected at most 1000000"),
        ("functions-that-concat-34", r"its functions expand to \d{11} nodes"),
        ("functions-in-a-circle", r"its functions call each other in a circle: F\d"),
        ("functions-5000-deep", rf"call each other 5001 deep, expected at most {MAX_CALLS}"),
    ],
)
def test_functions_are_counted_before_they_are_expanded(tmp_path, name, words):
    with pytest.raises(ArtifactError, match=words):
        read_structure(saved(tmp_path / "m.onnx", GRAPHS[name]))


def of_functions(*functions, nodes):
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "g",
        [value("x", TensorProto.FLOAT, [1])],
        [value("y", TensorProto.FLOAT, [1])],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    made = [
        helper.make_function("own", name, ["a"], ["b"], body, opsets) for name, body in functions
    ]
    return helper.make_model(
        graph, opset_imports=opsets, functions=made, ir_version=8
    ).SerializeToString()


def test_functions_of_an_exporter_pass(tmp_path):
    """PyTorch writes a function a module; one that is called 12 times is counted 12 times."""
    body = [helper.make_node("Neg", ["a"], ["b"])] * 10
    calls = [helper.make_node("Layer", ["x"], ["y"], domain="own")] * 12
    structure = read_structure(
        saved(tmp_path / "m.onnx", of_functions(("Layer", body), nodes=calls))
    )
    assert [(function.domain, function.name) for function in structure.functions] == [
        ("own", "Layer")
    ]


def test_two_functions_of_one_name_are_an_error(tmp_path):
    body = [helper.make_node("Neg", ["a"], ["b"])]
    model = of_functions(("F", body), ("F", body), nodes=body)
    with pytest.raises(ArtifactError, match="two functions with the name 'F'"):
        read_structure(saved(tmp_path / "m.onnx", model))


def test_calls_in_a_subgraph_count(tmp_path):
    """A function may be called in a branch of an If inside another function."""
    deep = [helper.make_node("F0", ["a"], ["b"], domain="own")] * 2000
    branch = helper.make_graph(deep, "then", [], [helper.make_tensor_value_info("b", 1, [1])])
    outer = [helper.make_node("If", ["a"], ["b"], then_branch=branch, else_branch=branch)]
    leaf = [helper.make_node("Neg", ["a"], ["b"])] * 300
    model = of_functions(
        ("F0", leaf), ("F1", outer), nodes=[helper.make_node("F1", ["x"], ["y"], domain="own")]
    )
    with pytest.raises(ArtifactError, match=r"its functions expand to 12\d+ nodes"):
        read_structure(saved(tmp_path / "m.onnx", model))


def test_sizes_are_read_from_the_file(tmp_path):
    path = saved(tmp_path / "m.onnx", GRAPHS["concat-1d-27"])
    assert read_sizes(path) == (path.stat().st_size, [(False, (1,))])


@pytest.mark.parametrize("where", ["input", "output", "initializer", "attribute"])
def test_element_type_that_onnx_lacks_is_named(tmp_path, where):
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Cast", ["x"], ["y"], to=1)],
        "g",
        [value("x", 1, [1])],
        [value("y", 1, [1])],
        [helper.make_tensor("w", 1, [1], [1.0])],
    )
    model = helper.make_model(graph)
    match where:
        case "input":
            model.graph.input[0].type.tensor_type.elem_type = 999
        case "output":
            model.graph.output[0].type.tensor_type.elem_type = 999
        case "initializer":
            model.graph.initializer[0].data_type = 999
        case "attribute":
            model.graph.node[0].attribute[0].i = 999
    with pytest.raises(
        ArtifactError, match=r"has the element type 999, which ONNX does not define"
    ):
        read_structure(saved(tmp_path / "m.onnx", model.SerializeToString()))

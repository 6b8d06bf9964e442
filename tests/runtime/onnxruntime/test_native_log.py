"""What ONNX Runtime logs is read and counted, and each kind is told once."""

import logging
import os
import subprocess
import sys
import threading

import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from enginery.core.errors import ProviderError
from enginery.runtime.onnxruntime import native_log
from enginery.runtime.onnxruntime.native_log import (
    LogMessage,
    NativeLog,
    describe_warning,
    reading_log,
    tell_once,
)
from enginery.runtime.onnxruntime.session import new_session
from enginery.runtime.providers.known import CUDA
from enginery.runtime.providers.selection import Provider


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch):
    monkeypatch.setattr(native_log, "_warned", set())


def graph(unused=2):
    """Return a graph for which ONNX Runtime warns once for each initializer."""
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n"]) for n in "xy"]
    tensors = [helper.make_tensor(f"t{i}", TensorProto.FLOAT, [1], [0.0]) for i in range(unused)]
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    made = helper.make_graph(nodes, "g", values[:1], values[1:], tensors)
    opsets = [helper.make_opsetid("", 17)]
    return helper.make_model(made, opset_imports=opsets, ir_version=9).SerializeToString()


def open_session():
    options = ort.SessionOptions()
    options.log_severity_level = 2
    ort.InferenceSession(graph(), options, providers=["CPUExecutionProvider"])


def test_warnings_are_read_and_other_lines_stay(capfd):
    with reading_log() as log:
        os.write(2, b"a line of another library\n")
        open_session()
        os.write(2, b"and one more")
    assert capfd.readouterr().err == "a line of another library\nand one more"
    assert [message.severity for message in log.messages] == ["W", "W"]
    assert log.messages[0].source.startswith("graph.cc:")
    ((text, count),) = log.warnings.items()
    assert "It is not used by any node" in text
    assert count == 2


def test_standard_error_is_that_of_before_after_an_error(capfd):
    logs = []

    def read():
        with reading_log() as log:
            logs.append(log)
            open_session()
            os.write(2, b"before\n")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        read()
    os.write(2, b"afterwards\n")
    assert capfd.readouterr().err == "before\nafterwards\n"
    assert len(logs[0].messages) == 2


def test_one_thread_reads_at_a_time(capfd):
    def read():
        with reading_log() as second:
            os.write(2, b"of the second\n")
        logs.append(second)

    logs = []
    with reading_log() as log:
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        open_session()
    assert logs == [NativeLog()]
    assert len(log.messages) == 2
    assert capfd.readouterr().err == "of the second\n"


def test_each_kind_is_told_once_with_its_number(caplog):
    def messages(*texts):
        return NativeLog([LogMessage("W", "conv.cc:425 UpdateState", text) for text in texts])

    fallback = "OP Conv(/layer/{}/Conv) running in Fallback mode. May be extremely slow."
    with caplog.at_level(logging.WARNING, "enginery.runtime"):
        tell_once(messages(*(fallback.format(index) for index in range(53)), "Other 'a'."))
        tell_once(messages(fallback.format(77), "Other 'b'.", "Another."))
    assert [record.getMessage() for record in caplog.records] == [
        describe_warning(fallback.format(0), 53),
        "ONNX Runtime warns: Other 'a'.",
        "ONNX Runtime warns: Another.",
    ]
    assert "53 convolutions" in caplog.records[0].getMessage()
    assert "HEURISTIC" in caplog.records[0].getMessage()


def test_expected_warnings_are_no_warnings():
    plugin = "No registered plugin EP device found for 'CUDAExecutionProvider' with device_id=0."
    log = NativeLog([LogMessage("W", "onnxruntime_pybind_state.cc:1 f", plugin)])
    assert not log.warnings


def test_errors_come_without_their_place():
    text = (
        "/onnxruntime_src/core/provider_bridge_ort.cc:2043 Get() [ONNXRuntimeError] : 1 : FAIL : "
        "Failed to load library x.so with error: y.so: cannot open shared object file"
    )
    assert NativeLog([LogMessage("E", "a.cc:1 f", text)]).errors == [
        "Failed to load library x.so with error: y.so: cannot open shared object file"
    ]


def test_log_with_colors_is_parsed():
    content = (
        b"\x1b[0;93m2026-11-26 17:11:01.503548532 [W:onnxruntime:Default, conv.cc:425 UpdateState] "
        b"OP Conv(a) running in Fallback mode.\x1b[m\nno log\n"
        b"\x1b[1;31m2026-11-26 17:11:01.5 [E:onnxruntime:, x.cc:1 Get] broken\n\x1b[m\n"
    )
    messages, others = native_log._parse(content)
    assert [(m.severity, m.text) for m in messages] == [
        ("W", "OP Conv(a) running in Fallback mode."),
        ("E", "broken"),
    ]
    assert others == b"no log\n"


def test_provider_that_does_not_register_says_why_in_its_error_alone(tmp_path, capfd):
    if CUDA not in ort.get_available_providers():
        pytest.skip("this onnxruntime has no CUDA provider")
    path = tmp_path / "model.onnx"
    path.write_bytes(graph(unused=0))
    with pytest.raises(ProviderError, match="did not register") as caught:
        new_session(path, [Provider(CUDA, "requested")], ort.SessionOptions())
    assert "Failed to load library" in caught.value.do
    assert capfd.readouterr().err == ""


def test_reading_works_without_a_standard_error():
    code = (
        "import os; os.close(2)\n"
        "from enginery.runtime.onnxruntime.native_log import NativeLog, reading_log\n"
        "with reading_log() as log: pass\n"
        "assert log == NativeLog()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

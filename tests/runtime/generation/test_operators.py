"""Rows are copied in place, on buffers of the same size or larger ones, and buffers are cleared."""

import numpy as np

from enginery.runtime.generation import operators as module
from enginery.runtime.generation.operators import Operators, ortvalue
from enginery.runtime.onnxruntime.device_values import Device, new_buffer

HOST = Device()


def values(*shape, dtype=np.float32, names="xy"):
    count = int(np.prod(shape))
    return {
        name: ortvalue((np.arange(count) + 1000 * place).reshape(shape).astype(dtype))
        for place, name in enumerate(names)
    }


def test_rows_are_copied_in_place_and_the_rest_stays():
    buffers = values(4, 2, 3)
    before = {name: value.numpy().copy() for name, value in buffers.items()}
    addresses = [value.data_ptr() for value in buffers.values()]
    copy = Operators().row_copy(buffers, buffers)
    copy.run([(0, 3), (1, 2)])
    copy.run([(0, 1)])
    for name, value in buffers.items():
        np.testing.assert_array_equal(value.numpy(), before[name][[0, 0, 1, 0]])
    assert [value.data_ptr() for value in buffers.values()] == addresses


def test_rows_of_shorter_buffers_are_filled_up_with_zeros():
    short, long = values(2, 2, 3, 2), values(3, 2, 5, 2)
    kept = long["x"].numpy()[1].copy()
    Operators().row_copy(short, long).run([(1, 0), (0, 2)])
    found = long["x"].numpy()
    np.testing.assert_array_equal(found[[0, 2], :, :3], short["x"].numpy()[[1, 0]])
    assert not found[[0, 2], :, 3:].any()
    np.testing.assert_array_equal(found[1], kept)


def test_values_are_converted_to_the_type_of_the_buffers():
    source = values(2, 3)
    target = {name: new_buffer("float16", (2, 4), HOST) for name in source}
    Operators().row_copy(source, target).run([(0, 0), (1, 1)])
    found = target["y"].numpy()
    np.testing.assert_array_equal(found[:, :3], source["y"].numpy().astype(np.float16))


def test_bfloat16_is_copied_bit_by_bit_and_cleared():
    import onnxruntime as ort
    import torch

    # As float16, the second is not a number.
    source = torch.tensor([[[1.5, -2.0]], [[3e38, 1e-38]]], dtype=torch.bfloat16)
    buffers = {"x": new_buffer("bfloat16", (2, 3, 2), HOST)}
    operators = Operators()
    operators.clear(buffers)
    assert not torch.from_dlpack(buffers["x"]).any()
    operators.row_copy({"x": ort.OrtValue.from_dlpack(source)}, buffers).run([(1, 0)])
    found = torch.from_dlpack(buffers["x"])
    assert found[0].tolist() == [source[1, 0].tolist(), [0.0, 0.0], [0.0, 0.0]]
    assert not found[1].any()


def test_buffers_of_several_types_are_cleared():
    buffers = {**values(2, 3, names="a"), **values(2, dtype=np.int64, names="b")}
    Operators().clear(buffers)
    assert not any(value.numpy().any() for value in buffers.values())


def test_the_best_tokens_of_logits_with_and_without_positions_are_the_same():
    logits = np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32)
    operators = Operators()
    alone = operators.best(ortvalue(logits), 4)
    behind = operators.best(ortvalue(np.stack([logits * 0, logits], axis=1)), 4)
    np.testing.assert_array_equal(alone[1], np.argsort(-logits, axis=1)[:, :4])
    for one, other in zip(alone, behind, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_copy_that_cannot_be_recorded_is_a_plain_run(monkeypatch, caplog):
    operators = Operators()
    opened = Operators._open

    def refuse(self, graph, *, records=False):
        if records:
            raise RuntimeError("This session cannot use the graph capture feature")
        monkeypatch.setattr(self, "_on_gpu", False)  # there is no GPU to open it on
        return opened(self, graph)

    monkeypatch.setattr(Operators, "_open", refuse)
    operators._on_gpu = True
    buffers = values(2, 3)
    operators.row_copy(buffers, buffers, records=True).run([(1, 0)])
    np.testing.assert_array_equal(buffers["x"].numpy()[0], buffers["x"].numpy()[1])
    assert "copies of the cache are not recorded" in caplog.text


def test_on_a_gpu_sessions_open_without_warnings_of_the_process(monkeypatch):
    import onnxruntime as ort

    levels, opened = [], []
    monkeypatch.setattr(ort, "set_default_logger_severity", levels.append)
    monkeypatch.setattr(
        ort, "InferenceSession", lambda *_, providers, **__: opened.append((*levels, *providers))
    )
    operators = Operators()
    operators._on_gpu = True
    operators._session(module._clear_graph, ("x", 1, 2))
    operators._session(module._clear_graph, ("x", 1, 2), records=True)
    plain, recording = {"device_id": "0"}, {"device_id": "0", "enable_cuda_graph": "1"}
    cuda = "CUDAExecutionProvider"
    assert opened == [(3, (cuda, plain)), (3, 3, (cuda, recording))]

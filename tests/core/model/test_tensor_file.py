"""Small safetensors files that numpy reads."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from enginery.core.errors import ArtifactError
from enginery.core.model.tensor_file import read_tensors


def test_tensors_are_those_that_safetensors_wrote(tmp_path):
    tensors = {
        "linear.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
        "linear.bias": np.array([1.5, -2, np.inf], np.float32),
        "scale": np.array(2, np.float32),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = read_tensors(tmp_path / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert np.array_equal(found[name], tensor)
        assert found[name].shape == tensor.shape


def test_missing_file_and_other_types_are_errors(tmp_path):
    with pytest.raises(ArtifactError, match=r"no safetensors file of float32 tensors: .*No such"):
        read_tensors(tmp_path / "model.safetensors")
    save_file({"a": np.ones(2, np.float16)}, tmp_path / "model.safetensors")
    with pytest.raises(ArtifactError, match=r"a is F16 \[2\]"):
        read_tensors(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b'{"a": 1}',
        b'{"a": {}}',
        b'{"a": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}',
        json.dumps(
            {"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 8]}}
        ).encode(),
    ],
)
def test_damaged_header_is_an_error_that_names_the_file(header, tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ArtifactError, match=r"model\.safetensors is no safetensors file"):
        read_tensors(file)
    file.write_bytes((2**60).to_bytes(8, "little") + header)
    with pytest.raises(ArtifactError, match=r"model\.safetensors is no safetensors file"):
        read_tensors(file)

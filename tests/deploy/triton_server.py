"""A test double of Triton that checks and runs a model repository.

    server = TritonDouble(tmp_path / "models")
    server.infer("mood", {"text": texts(["It runs again."])}, {"top_k": 1})["label"]

Configurations are parsed with tritonclient's model_config_pb2, generated from Triton's own proto.
Further checks follow Triton's code; each names the function. The double
runs Python models with a double of triton_python_backend_utils, graphs with ONNX Runtime, and
ensembles step by step. Everything else that a Triton server does is not tested.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import tritonclient
from google.protobuf import json_format, text_format

_NUMPY = {
    "TYPE_BOOL": np.bool_,
    "TYPE_INT8": np.int8,
    "TYPE_UINT8": np.uint8,
    "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64,
    "TYPE_FP16": np.float16,
    "TYPE_FP32": np.float32,
    "TYPE_FP64": np.float64,
    "TYPE_STRING": np.object_,
}
_ORT = {
    "tensor(int64)": "TYPE_INT64",
    "tensor(int32)": "TYPE_INT32",
    "tensor(bool)": "TYPE_BOOL",
    "tensor(float)": "TYPE_FP32",
    "tensor(float16)": "TYPE_FP16",
}


def _proto() -> Any:
    """Import the proto of tritonclient.grpc without grpc."""
    path = Path(tritonclient.__path__[0]) / "grpc/model_config_pb2.py"
    spec = importlib.util.spec_from_file_location("triton_model_config_pb2", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PROTO = _proto()
DATA_TYPES = PROTO.DataType


def read_config(directory: Path) -> Any:
    """Parse the config.pbtxt of a model's folder, and check it as Triton does."""
    text = (directory / "config.pbtxt").read_text(encoding="utf-8")
    config = text_format.Parse(text, PROTO.ModelConfig())
    check(directory, config)
    return config


def texts(values: list[str]) -> np.ndarray:
    """Return a BYTES tensor (n,)."""
    array = np.empty(len(values), dtype=object)
    array[:] = [value.encode() for value in values]
    return array


def newest_version(directory: Path) -> Path:
    """Return the folder of the version that `version_policy` selects."""
    versions = [path for path in directory.iterdir() if path.is_dir() and path.name.isdecimal()]
    return max(versions, key=lambda path: int(path.name))


def dtype_name(number: int) -> str:
    return DATA_TYPES.Name(number)


# What the proto cannot hold


def check(directory: Path, config: Any) -> None:
    """Raise AssertionError if Triton would not load the model."""
    assert config.name == directory.name
    assert config.version_policy.latest.num_versions == 1
    version = newest_version(directory)
    assert int(version.name) >= 1
    _check_kind(config)
    _check_tensors(config)
    _check_batching(config)
    _check_files(directory, version, config)
    if config.platform == "ensemble":
        _check_ensemble(config)
    else:
        _check_instances(config)
    _check_warmup(directory, config)


def _check_kind(config: Any) -> None:
    """Check platform and backend, as ValidateModelConfig does."""
    pairs = {
        ("ensemble", ""),
        ("onnxruntime_onnx", "onnxruntime"),
        ("tensorrt_plan", "tensorrt"),
        ("", "python"),
    }
    assert (config.platform, config.backend) in pairs
    assert config.HasField("version_policy")


def _check_tensors(config: Any) -> None:
    """Check shapes, as ValidateIOShape does."""
    names = [tensor.name for tensor in (*config.input, *config.output)]
    assert config.input
    assert config.output
    for group in (config.input, config.output):
        assert len({tensor.name for tensor in group}) == len(group)
    assert all(names)
    for tensor in (*config.input, *config.output):
        assert tensor.data_type != DATA_TYPES.TYPE_INVALID, tensor.name
        assert tensor.dims or tensor.HasField("reshape"), tensor.name
        assert all(dim == -1 or dim >= 1 for dim in tensor.dims), tensor.name
    # ModelInstanceState::ValidateInputs of the ONNX Runtime backend
    if config.max_batch_size and config.backend == "onnxruntime":
        assert not any(tensor.optional for tensor in config.input)


def _check_batching(config: Any) -> None:
    """Check preferred batch sizes, as ValidateModelConfig does."""
    assert config.max_batch_size >= 0
    batching = config.dynamic_batching
    assert all(1 <= size <= config.max_batch_size for size in batching.preferred_batch_size)
    if config.HasField("dynamic_batching"):
        assert config.max_batch_size > 0, "nothing to batch"


def _check_instances(config: Any) -> None:
    """Check instance groups, as ValidateInstanceGroup does: only TensorRT has profiles."""
    assert config.instance_group
    for group in config.instance_group:
        assert group.count >= 1
        assert config.platform == "tensorrt_plan" or not group.profile
        assert all(profile.isdecimal() for profile in group.profile)


def _check_files(directory: Path, version: Path, config: Any) -> None:
    for tensor in config.output:
        assert not tensor.label_filename or (directory / tensor.label_filename).is_file()
    plans = list(config.cc_model_filenames.values())
    wanted = {
        "onnxruntime": [config.default_model_filename or "model.onnx"],
        "tensorrt": plans or [config.default_model_filename or "model.plan"],
        "python": ["model.py"],
        "": [],
    }[config.backend]
    for name in wanted:
        path = version / name
        assert path.exists(), path
        assert path.is_file() or (path / "model.onnx").is_file()
    assert all("." in capability for capability in config.cc_model_filenames)


def _check_ensemble(config: Any) -> None:
    """Check that each tensor is written once and read, as ValidateEnsembleSchedulingConfig does."""
    assert not config.instance_group
    assert not config.HasField("optimization")
    assert not config.model_warmup
    written = [tensor.name for tensor in config.input]
    read = [tensor.name for tensor in config.output]
    for step in config.ensemble_scheduling.step:
        assert set(step.input_map.values()) <= set(written), "steps are in their order"
        read += step.input_map.values()
        written += step.output_map.values()
    assert len(set(written)) == len(written)
    assert set(read) == set(written)


def _check_warmup(directory: Path, config: Any) -> None:
    """Check warm-up samples, as TritonModelInstance::GenerateWarmupData does."""
    by_name = {tensor.name: tensor for tensor in config.input}
    for sample in config.model_warmup:
        assert 1 <= sample.batch_size <= max(config.max_batch_size, 1)
        assert set(sample.inputs) == set(by_name)
        for name, given in sample.inputs.items():
            assert given.data_type == by_name[name].data_type
            assert len(given.dims) == len(by_name[name].dims)
            assert all(
                size >= 1 and dim in (-1, size)
                for size, dim in zip(given.dims, by_name[name].dims, strict=True)
            )
            if given.input_data_file:
                item = np.dtype(_NUMPY[dtype_name(given.data_type)]).itemsize
                file = directory / "warmup" / given.input_data_file
                assert file.stat().st_size == item * int(np.prod(list(given.dims)))
            else:
                assert given.zero_data


def check_graph(config: Any, session: ort.InferenceSession) -> None:
    """Check dims, as CompareDimsSupported of the ONNX Runtime backend does."""
    batch = [-1] if config.max_batch_size else []
    tensors = [
        (config.input, session.get_inputs(), False),
        (config.output, session.get_outputs(), True),
    ]
    for described, found, is_exact in tensors:
        assert {tensor.name for tensor in described} <= {node.name for node in found}
        assert is_exact or len(described) == len(found)
        for tensor in described:
            node = next(node for node in found if node.name == tensor.name)
            assert _ORT[node.type] == dtype_name(tensor.data_type)
            model = [dim if isinstance(dim, int) else -1 for dim in node.shape]
            full = batch + list(tensor.dims)
            assert len(model) == len(full), tensor.name
            if batch:
                assert model[0] == -1
            for size, wanted in zip(model, full, strict=True):
                assert size == wanted or (not is_exact and size == -1), tensor.name


# The double


class TritonError(Exception):
    """An error response."""

    INVALID_ARG, INTERNAL = "INVALID_ARG", "INTERNAL"

    def __init__(self, message: str, code: str = INTERNAL) -> None:
        super().__init__(message)
        self.code = code


class Tensor:
    """Test double of pb_utils.Tensor."""

    def __init__(self, name: str, array: np.ndarray) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array


class Request:
    """Test double of pb_utils.InferenceRequest."""

    def __init__(self, tensors: list[Tensor], wanted: list[str], parameters: str) -> None:
        self._tensors, self._wanted, self._parameters = tensors, wanted, parameters

    def inputs(self) -> list[Tensor]:
        return self._tensors

    def requested_output_names(self) -> list[str]:
        return self._wanted

    def parameters(self) -> str:
        return self._parameters


def pb_utils() -> ModuleType:
    """Return a test double of triton_python_backend_utils."""
    module = ModuleType("triton_python_backend_utils")
    module.Tensor = Tensor
    module.TritonError = TritonError
    module.InferenceResponse = lambda output_tensors=(), error=None: SimpleNamespace(
        output_tensors=list(output_tensors), error=error
    )
    module.get_input_tensor_by_name = lambda request, name: next(
        (tensor for tensor in request.inputs() if tensor.name() == name), None
    )
    return module


class TritonDouble:
    """Test double of a Triton server with all models of a repository."""

    def __init__(self, repository: Path) -> None:
        self.configs = {
            path.name: read_config(path) for path in repository.iterdir() if path.is_dir()
        }
        self._repository = repository
        self.batches: list[tuple[int, ...]] = []
        """Shapes of the inputs of graphs."""
        self.python: dict[str, Any] = {}
        """Instances of the Python models."""
        self._loaded = {name: self._load(config) for name, config in self.configs.items()}
        for name in self.configs:
            self._warm_up(name)

    def infer(
        self, model: str, inputs: Mapping[str, np.ndarray], parameters: Mapping[str, Any] = {}
    ) -> dict[str, np.ndarray]:
        """Return the outputs for a request; raise TritonError if it fails."""
        config = self.configs[model]
        self._check_request(config, inputs)
        run = self._loaded[model]
        found = run(dict(inputs), dict(parameters))
        for tensor in config.output:
            if tensor.name in found:
                _check_fit(config, tensor, found[tensor.name])
        return found

    def _load(self, config: Any) -> Any:
        version = newest_version(self._repository / config.name)
        if config.platform == "ensemble":
            return lambda inputs, parameters: self._ensemble(config, inputs, parameters)
        if config.backend == "python":
            return self._python(config, version)
        path = version / "model.onnx"
        path = path / "model.onnx" if path.is_dir() else path
        session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
        check_graph(config, session)

        def run(inputs: dict[str, np.ndarray], _: dict[str, Any]) -> dict[str, np.ndarray]:
            self.batches.append(next(iter(inputs.values())).shape)
            names = [tensor.name for tensor in config.output]
            return dict(zip(names, session.run(names, inputs), strict=True))

        return run

    def _python(self, config: Any, version: Path) -> Any:
        sys.modules["triton_python_backend_utils"] = pb_utils()
        try:
            spec = importlib.util.spec_from_file_location("model", version / "model.py")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        finally:
            del sys.modules["triton_python_backend_utils"]
        model = self.python[config.name] = module.TritonPythonModel()
        as_json = json_format.MessageToJson(config, preserving_proto_field_name=True)
        model.initialize(
            {
                "model_config": as_json,
                "model_repository": str(version.parent),
                "model_version": version.name,
                "model_name": config.name,
                "model_instance_kind": "CPU",
                "model_instance_device_id": "0",
            }
        )
        wanted = [tensor.name for tensor in config.output]

        def run(inputs: dict[str, np.ndarray], given: dict[str, Any]) -> dict[str, np.ndarray]:
            tensors = [Tensor(name, array) for name, array in inputs.items()]
            request = Request(tensors, wanted, json.dumps(given) if given else "")
            (response,) = model.execute([request])
            if response.error is not None:
                raise response.error
            return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors}

        return run

    def _ensemble(
        self, config: Any, inputs: dict[str, np.ndarray], parameters: dict[str, Any]
    ) -> dict[str, np.ndarray]:
        tensors = dict(inputs)
        for step in config.ensemble_scheduling.step:
            given = {
                name: tensors[tensor]
                for name, tensor in step.input_map.items()
                if tensor in tensors
            }
            found = self.infer(step.model_name, given, parameters)
            tensors |= {tensor: found[name] for name, tensor in step.output_map.items()}
        return {tensor.name: tensors[tensor.name] for tensor in config.output}

    def _check_request(self, config: Any, inputs: Mapping[str, np.ndarray]) -> None:
        known = {tensor.name: tensor for tensor in config.input}
        assert set(inputs) <= set(known), f"{config.name}: unexpected inference input"
        missing = [t.name for t in config.input if not t.optional and t.name not in inputs]
        assert not missing, f"{config.name}: {missing}"
        for name, array in inputs.items():
            _check_fit(config, known[name], array)
            if config.max_batch_size:
                assert len(array) <= config.max_batch_size, "batch-size must be <="

    def _warm_up(self, model: str) -> None:
        config = self.configs[model]
        for sample in config.model_warmup:
            rows = {}
            for name, given in sample.inputs.items():
                dtype = _NUMPY[dtype_name(given.data_type)]
                if given.zero_data:
                    row = np.zeros(list(given.dims), dtype)
                else:
                    file = self._repository / model / "warmup" / given.input_data_file
                    row = np.frombuffer(file.read_bytes(), dtype).reshape(list(given.dims))
                rows[name] = np.stack([row] * sample.batch_size) if config.max_batch_size else row
            self.infer(model, rows)


def _check_fit(config: Any, tensor: Any, array: np.ndarray) -> None:
    full = [-1] * bool(config.max_batch_size) + list(tensor.dims)
    where = f"{config.name}, {tensor.name}: {array.dtype} {array.shape}, config {full}"
    assert array.dtype == np.dtype(_NUMPY[dtype_name(tensor.data_type)]), where
    assert array.ndim == len(full), where
    assert all(dim in (-1, size) for dim, size in zip(full, array.shape, strict=True)), where

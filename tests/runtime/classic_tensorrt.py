"""A test double of classic TensorRT 10's Python module that checks how it is called.

It records every call in order:

    monkeypatch.setitem(sys.modules, "tensorrt", ClassicTensorRT(calls := []))

Names, arguments, results and defaults follow NVIDIA's reference of the Python API, 10.16
(docs.nvidia.com/deeplearning/tensorrt/10.16.1/_static/python-api/infer/Core/: Builder,
BuilderConfig, TimingCache, OptimizationProfile, Runtime, Engine, EngineInspector; parsers/Onnx/
pyOnnx). `test_tensorrt_classic` compares them with the real bindings of TensorRT for RTX, whose API
is the same. What it cannot show is what classic TensorRT makes of a graph.
"""

from __future__ import annotations

import enum
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace

VERSION = "10.16.1.11"

Severity = enum.IntEnum("Severity", "INTERNAL_ERROR ERROR WARNING INFO VERBOSE", start=0)
NetworkDefinitionCreationFlag = enum.IntEnum(
    "NetworkDefinitionCreationFlag", "EXPLICIT_BATCH STRONGLY_TYPED", start=0
)
BuilderFlag = enum.IntEnum("BuilderFlag", "TF32", start=0)
MemoryPoolType = enum.IntEnum("MemoryPoolType", "WORKSPACE TACTIC_DRAM", start=0)
ProfilingVerbosity = enum.IntEnum("ProfilingVerbosity", "LAYER_NAMES_ONLY DETAILED NONE", start=0)
HardwareCompatibilityLevel = enum.IntEnum(
    "HardwareCompatibilityLevel", "NONE AMPERE_PLUS SAME_COMPUTE_CAPABILITY", start=0
)
LayerInformationFormat = enum.IntEnum("LayerInformationFormat", "ONELINE JSON", start=0)
DataType = enum.IntEnum("DataType", "FLOAT HALF INT8 INT32 BOOL UINT8 FP8 BF16 INT64", start=0)
_ONNX_TYPES = {1: DataType.FLOAT, 10: DataType.HALF, 7: DataType.INT64, 9: DataType.BOOL}

# The sample of the developer guide, "Engine Inspector", and a GEMM as its compiler names one.
LAYERS = [
    {
        "Name": "node_of_gpu_0/res4_0_branch2a_1 + node_of_gpu_0/res4_0_branch2a_bn_1",
        "LayerType": "CaskConvolution",
        "Inputs": [
            {
                "Name": "gpu_0/res3_3_branch2c_bn_3",
                "Dimensions": [16, 512, 28, 28],
                "Format/Datatype": "Thirty-two wide channel vectorized row major Int8 format.",
            }
        ],
        "Outputs": [
            {
                "Name": "gpu_0/res4_0_branch2a_bn_2",
                "Dimensions": [16, 256, 28, 28],
                "Format/Datatype": "Thirty-two wide channel vectorized row major Int8 format.",
            }
        ],
        "ParameterType": "Convolution",
        "Kernel": [1, 1],
        "Weights": {"Type": "Int8", "Count": 131072},
        "Bias": {"Type": "Float", "Count": 256},
        "Activation": "RELU",
        "TacticName": "sm80_xmma_fprop_implicit_gemm_interleaved_i8i8_i8i32_f32",
        "TacticValue": "0x11bde0e1d9f2f35d",
    },
    {
        "Name": "__myl_FcAddErf_myl0_10",
        "LayerType": "fusion",
        "Inputs": [{"Name": "x", "Dimensions": [-1, 64], "Format/Datatype": "Half"}],
        "Outputs": [{"Name": "y", "Dimensions": [-1, 64], "Format/Datatype": "Half"}],
        "TacticName": "sm80_xmma_gemm_f16f16_f16f32_f32_tn_n",
        "StreamId": 0,
        "Metadata": "[ONNX Layer: /dense/MatMul]\x1e[ONNX Layer: /dense/Add]",
    },
]


class Strict:
    """Raise for attributes that the real class does not have."""

    def __setattr__(self, name, value):
        if not name.startswith("_") and not isinstance(getattr(type(self), name, None), property):
            raise AttributeError(f"'{type(self).__name__}' has no attribute '{name}'")
        object.__setattr__(self, name, value)


def setting(name, kind):
    """Return a property that accepts values of one type and records them."""

    def write(self, value):
        if not isinstance(value, kind):
            raise TypeError(f"incompatible function arguments: {name} = {value!r}")
        self._calls.append((name, value))
        setattr(self, f"_{name}", value)

    return property(lambda self: getattr(self, f"_{name}", None), write)


class IHostMemory(bytes):
    @property
    def nbytes(self):
        return len(self)


class ILogger:
    Severity = Severity

    def __init__(self):
        self._base_made = True  # the bindings crash on a subclass that forgets this


class IOptimizationProfile(Strict):
    def __init__(self):
        self._shapes = {}

    def set_shape(self, input, min, opt, max):  # noqa: A002
        self._shapes[input] = (tuple(min), tuple(opt), tuple(max))


class IBuilderConfig(Strict):
    profiling_verbosity = setting("profiling_verbosity", ProfilingVerbosity)
    builder_optimization_level = setting("builder_optimization_level", int)
    hardware_compatibility_level = setting(
        "hardware_compatibility_level", HardwareCompatibilityLevel
    )

    def __init__(self, calls):
        self._calls, self._profiles = calls, []
        self._flags = {BuilderFlag.TF32}  # enabled by default

    def set_memory_pool_limit(self, pool, pool_size):
        self._calls.append(("set_memory_pool_limit", MemoryPoolType(pool), int(pool_size)))

    def clear_flag(self, flag):
        self._calls.append(("clear_flag", BuilderFlag(flag)))
        self._flags.discard(flag)

    def add_optimization_profile(self, profile):
        self._profiles.append(profile)
        self._calls.append(("add_optimization_profile", dict(profile._shapes)))
        return len(self._profiles) - 1


class ITensor(Strict):
    def __init__(self, value):
        kind = value.type.tensor_type
        self._value, self._dims, self._type = value, kind.shape.dim, kind.elem_type

    name = property(lambda self: self._value.name)
    dtype = property(lambda self: _ONNX_TYPES[self._type])
    is_shape_tensor = property(lambda self: False)

    @property
    def shape(self):
        return tuple(d.dim_value if d.HasField("dim_value") else -1 for d in self._dims)

    def get_dimension_name(self, index):
        return self._dims[index].dim_param


class INetworkDefinition(Strict):
    def __init__(self, flags):
        self._flags, self._graph = flags, None

    @property
    def num_inputs(self):
        return len(self._graph.input) if self._graph else 0

    @property
    def num_outputs(self):
        return len(self._graph.output) if self._graph else 0

    def get_input(self, index):
        return ITensor(self._graph.input[index])

    def get_output(self, index):
        return ITensor(self._graph.output[index])


class OnnxParser(Strict):
    def __init__(self, network, logger):
        if not isinstance(logger, ILogger) or not isinstance(network, INetworkDefinition):
            raise TypeError("incompatible constructor arguments")
        self._network, self._errors, self._parts = network, [], []

    @property
    def num_errors(self):
        return len(self._errors)

    @property
    def num_subgraphs(self):
        return len(self._parts)

    def parse_from_file(self, model):
        import onnx

        self._network._graph = onnx.load(str(model)).graph
        return not self._examine(self._network._graph)

    def supports_model_v2(self, model, path=None):
        import onnx

        return not self._examine(onnx.load_from_string(bytes(model)).graph)

    def get_error(self, index):
        return self._errors[index]

    def get_subgraph_nodes(self, index):
        return self._parts[index]

    def _examine(self, graph):
        part = []
        for index, node in enumerate(graph.node):
            if node.domain in ("", "ai.onnx"):
                part.append(index)
                continue
            values = {
                "node": index,
                "node_name": node.name,
                "node_operator": node.op_type,
                "desc": "Plugin not found",
            }
            self._errors.append(SimpleNamespace(**{k: lambda v=v: v for k, v in values.items()}))
            self._parts += [part] if part else []
            part = []
        self._parts += [part] if part else []
        return self._errors


class Builder(Strict):
    def __init__(self, calls, logger):
        if not isinstance(logger, ILogger):
            raise TypeError("incompatible constructor arguments")
        self._calls, self._logger = calls, logger

    def create_network(self, flags=0):
        self._calls.append(("create_network", flags))
        return INetworkDefinition(flags)

    def create_builder_config(self):
        return IBuilderConfig(self._calls)

    def create_optimization_profile(self):
        return IOptimizationProfile()

    def build_serialized_network(self, network, config):
        assert network.num_outputs, "the network is empty: nothing was parsed into it"
        names = {network.get_input(index).name for index in range(network.num_inputs)}
        for profile in config._profiles:
            assert set(profile._shapes) == names, "a profile does not name every input"
        self._calls.append(("build_serialized_network", frozenset(config._flags)))
        log = self._logger.log
        log(Severity.INFO, "Total Activation Memory: 11264 bytes")
        log(Severity.INFO, "Total Weights Memory: 16384 bytes")
        log(Severity.WARNING, "kernel tuning took long")
        return IHostMemory(b"a plan of " + b", ".join(sorted(n.encode() for n in names)))


class EngineInspector(Strict):
    def get_engine_information(self, format):  # noqa: A002
        assert format is LayerInformationFormat.JSON
        return json.dumps({"Layers": LAYERS, "Bindings": ["x", "y"]})


class ICudaEngine(Strict):
    device_memory_size_v2 = property(lambda self: 4096)

    def create_engine_inspector(self):
        return EngineInspector()


class Runtime(Strict):
    def __init__(self, calls, logger):
        assert isinstance(logger, ILogger)
        self._calls = calls

    def deserialize_cuda_engine(self, serialized_engine):
        return ICudaEngine() if bytes(serialized_engine).startswith(b"a plan") else None


_NAMES = (
    ILogger,
    NetworkDefinitionCreationFlag,
    BuilderFlag,
    MemoryPoolType,
    ProfilingVerbosity,
    HardwareCompatibilityLevel,
    LayerInformationFormat,
    OnnxParser,
)
CLASSES = (
    Builder,
    IBuilderConfig,
    INetworkDefinition,
    IOptimizationProfile,
    OnnxParser,
    Runtime,
    ICudaEngine,
    EngineInspector,
    ITensor,
    IHostMemory,
)


class ClassicTensorRT(ModuleType):
    """The module `tensorrt`."""

    def __init__(self, calls, version=VERSION):
        super().__init__("tensorrt")
        self.__version__ = version
        self.__file__ = str(Path(__file__))
        for kind in _NAMES:
            setattr(self, kind.__name__, kind)
        self.Builder = lambda logger: Builder(calls, logger)
        self.Runtime = lambda logger: Runtime(calls, logger)

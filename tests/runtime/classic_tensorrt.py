"""Classic TensorRT 10's Python module, on top of the bindings of TensorRT for RTX.

    monkeypatch.setitem(sys.modules, "tensorrt", ClassicTensorRT(calls := []))

Their API is the same, so networks, parsers and profiles are real. What needs a GPU is made up:
the engine and its layers. A configuration records how it is set, in order, and
refuses what the real one lacks. What this cannot show is what classic TensorRT makes of a graph.
"""

from __future__ import annotations

import json
from types import ModuleType, SimpleNamespace

import tensorrt_rtx_bindings as trt

VERSION = "10.16.1.11"
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


class IHostMemory(bytes):
    @property
    def nbytes(self):
        return len(self)


class Recorded:
    """Record what is set, and refuse what objects of the real class do not have."""

    def __init__(self, calls, kind):
        self._calls, self._kind = calls, kind

    def __setattr__(self, name, value):
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        elif hasattr(self._kind, name):
            self._calls.append((name, value))
        else:
            raise AttributeError(f"'{self._kind.__name__}' has no attribute '{name}'")


class IBuilderConfig(Recorded):
    def __init__(self, calls):
        super().__init__(calls, trt.IBuilderConfig)
        self._profiles = []
        self._flags = {trt.BuilderFlag.TF32}  # enabled by default

    def set_memory_pool_limit(self, pool, pool_size):
        self._calls.append(("set_memory_pool_limit", pool, pool_size))

    def clear_flag(self, flag):
        self._flags.discard(flag)

    def add_optimization_profile(self, profile):
        self._profiles.append(profile)
        return len(self._profiles) - 1


class Builder:
    def __init__(self, calls, logger):
        self._calls, self._logger, self._real = calls, logger, trt.Builder(logger)

    def create_network(self, flags=0):
        self._calls.append(("create_network", flags))
        return self._real.create_network(flags)

    def create_builder_config(self):
        return IBuilderConfig(self._calls)

    def create_optimization_profile(self):
        return self._real.create_optimization_profile()

    def build_serialized_network(self, network, config):
        names = [network.get_input(index).name for index in range(network.num_inputs)]
        for profile in config._profiles:
            shapes = {name: tuple(map(tuple, profile.get_shape(name))) for name in names}
            self._calls.append(("add_optimization_profile", shapes))
        self._calls.append(("build_serialized_network", frozenset(config._flags)))
        log, severity = self._logger.log, trt.ILogger.Severity
        log(severity.INFO, "Total Activation Memory: 11264 bytes")
        log(severity.INFO, "Total Weights Memory: 16384 bytes")
        log(severity.WARNING, "kernel tuning took long")
        return IHostMemory(f"a plan of {', '.join(names)}".encode())


class Runtime(Recorded):
    def __init__(self, calls):
        super().__init__(calls, trt.Runtime)

    def deserialize_cuda_engine(self, serialized_engine):
        layers = json.dumps({"Layers": LAYERS, "Bindings": ["x", "y"]})
        inspector = SimpleNamespace(get_engine_information=lambda layer_format: layers)
        return SimpleNamespace(
            device_memory_size_v2=4096, create_engine_inspector=lambda: inspector
        )


class ClassicTensorRT(ModuleType):
    """The module `tensorrt`."""

    def __init__(self, calls, version=VERSION):
        super().__init__("tensorrt")
        self.__dict__.update({name: getattr(trt, name) for name in dir(trt) if name[:1] != "_"})
        self.__version__, self.__file__ = version, __file__
        self.Builder = lambda logger: Builder(calls, logger)
        self.Runtime = lambda logger: Runtime(calls)

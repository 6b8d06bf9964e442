"""Configurations of the models in a Triton repository: graph, preprocessing, results, ensemble.

The fields are those of Triton's model_config.proto. Further rules are in Triton's code:
`ValidateModelConfig` and `ValidateEnsembleSchedulingConfig` in src/model_config_utils.cc of
triton-inference-server/core, and `ValidateInputs` and `ValidateOutputs` of the ONNX Runtime
backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from enginery.core.artifact.engine import Engine
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.shapes import Profile, TensorSpec, profile_shapes
from enginery.deploy.triton.options import TritonConfig
from enginery.deploy.triton.steps import graph_outputs
from enginery.deploy.triton.tensors import DATA_TYPES, STRING, batch_dim, tensor_fields
from enginery.deploy.triton.text_format import EnumValue, config_text, map_entries, parameters
from enginery.runtime.tasks.results import output_tensors
from enginery.runtime.tasks.task import Task

VERSION = "1"
"""Folder of a model's files. Versions of a model share one configuration in Triton, so a repository
has one of each, and another export replaces it."""
LABELS_FILE = "labels.txt"
TOKENIZER, ANSWERS, GRAPH = "tokenizer", "answers", "graph"
_NEWEST = -1
_HEURISTIC = "1"


@dataclass(frozen=True)
class TritonModel:
    """A model of the repository: one folder."""

    name: str
    fields: Mapping[str, Any]
    """Fields of the model's configuration."""
    files: Mapping[str, Path] = field(default_factory=dict)
    """Path below the model's folder -> file to copy."""
    contents: Mapping[str, bytes] = field(default_factory=dict)
    """Path below the model's folder -> content to write."""

    def config(self) -> str:
        """Return the text of `config.pbtxt`."""
        return config_text(self.fields)


@dataclass(frozen=True)
class GraphInfo:
    """Facts about the exported graph."""

    record: GraphRecord
    max_batch_size: int
    """Maximum batch size; 0 if the graph has no batch dim."""
    profiles: tuple[Profile, ...]
    """Profiles of the engine, or of the options if there is no engine."""
    engines: tuple[Engine, ...]
    sha256: str
    """Digest of the graph with its weights."""
    server_builds: bool
    """True if ONNX Runtime builds the engine in the server."""
    labels: tuple[str, ...]
    """Labels of the output `logits`; empty if it does not have one score per label."""

    @property
    def batched(self) -> bool:
        return self.max_batch_size > 0

    @property
    def has_engine(self) -> bool:
        """True if TensorRT runs the graph, so that its inputs must fit the profiles."""
        return self.server_builds or bool(self.engines)


def graph_model(
    info: GraphInfo,
    config: TritonConfig,
    name: str,
    *,
    files: Mapping[str, Path],
    warmup: Sequence[Mapping[str, Any]],
    contents: Mapping[str, bytes],
) -> TritonModel:
    """Return the model that runs the graph.

    Args:
        info: facts about the graph.
        config: the options.
        name: name of the model.
        files: path below the model's folder -> file to copy.
        warmup: warm-up samples.
        contents: path below the model's folder -> content to write.
    """
    fields: dict[str, Any] = {
        "name": name,
        "platform": "tensorrt_plan" if config.backend == "tensorrt" else "onnxruntime_onnx",
        "backend": config.backend,
        "max_batch_size": info.max_batch_size,
        "input": [tensor_fields(spec, batched=info.batched) for spec in info.record.inputs],
        "output": [_output(spec, info) for spec in info.record.outputs],
        "instance_group": [_instances(info, config)],
    }
    if info.batched:
        fields["dynamic_batching"] = _dynamic_batching(info, config)
    if config.backend == "onnxruntime":
        if config.provider == "tensorrt":
            accelerator = {
                "name": "tensorrt",
                "parameters": map_entries(_tensorrt_parameters(info, config)),
            }
            fields["optimization"] = {
                "execution_accelerators": {"gpu_execution_accelerator": [accelerator]}
            }
        fields["parameters"] = parameters(_runtime_parameters(config)) or None
    elif len(info.engines) > 1:
        fields["cc_model_filenames"] = map_entries(
            {c: plan_file(e) for e in info.engines for c in e.record.capabilities}
        )
    fields["model_warmup"] = list(warmup)
    all_contents = dict(contents)
    if info.labels:
        all_contents[LABELS_FILE] = "".join(f"{label}\n" for label in info.labels).encode()
    return TritonModel(name, fields, files, all_contents)


def plan_file(engine: Engine) -> str:
    """Return the file name of a plan if there are several: `model-8.9.plan`."""
    return f"model-{'-'.join(engine.record.capabilities)}.plan"


def step_model(
    step: str,
    task: Task,
    info: GraphInfo,
    config: TritonConfig,
    name: str,
    *,
    files: Mapping[str, Path],
) -> TritonModel:
    """Return the model for preprocessing or postprocessing in the Python backend.

    It has no batches: the first dim is the texts of one request, as in the ensemble. Triton batches
    the rows of several requests for the graph.
    """
    task_inputs = _task_inputs(task)
    if step == TOKENIZER:
        inputs = task_inputs
        outputs = [tensor_fields(spec, batched=False) for spec in info.record.inputs]
    else:
        needed = graph_outputs(task)
        specs = [spec for spec in info.record.outputs if spec.name in needed]
        inputs = [*task_inputs, *(tensor_fields(spec, batched=False) for spec in specs)]
        outputs = _task_outputs(task)
    options = {
        "step": step,
        "graph": info.record.file,
        "pad_multiple": str(config.pad_multiple),
        "max_rows": str(_max_rows(info)),
        "profiles": "; ".join(str(p) for p in info.profiles) if info.has_engine else "",
    }
    if config.execution_env:
        options["EXECUTION_ENV_PATH"] = config.execution_env
    fields = {
        "name": name,
        "backend": "python",
        "max_batch_size": 0,
        "input": inputs,
        "output": outputs,
        "instance_group": [{"count": config.tokenizer_instances, "kind": EnumValue("KIND_CPU")}],
        "parameters": parameters(options),
    }
    return TritonModel(name, fields, files)


def ensemble_model(task: Task, info: GraphInfo, name: str) -> TritonModel:
    """Return the ensemble for clients, which takes texts and returns results."""
    record = info.record
    inputs = {field.name: field.name for field in task.inputs}
    tokens = {spec.name: f"graph.{spec.name}" for spec in record.inputs}
    outputs = {n: f"graph.{n}" for n in graph_outputs(task)}
    answers = {tensor.name: tensor.name for tensor in output_tensors(task.result_type)}
    steps = [
        _step(f"{name}-{TOKENIZER}", inputs, tokens),
        _step(f"{name}-{GRAPH}", tokens, outputs),
        _step(f"{name}-{ANSWERS}", {**inputs, **outputs}, answers),
    ]
    fields = {
        "name": name,
        "platform": "ensemble",
        "max_batch_size": 0,
        "input": _task_inputs(task),
        "output": _task_outputs(task),
        "ensemble_scheduling": {"step": steps},
    }
    return TritonModel(name, fields)


def _step(model: str, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> dict[str, Any]:
    return {
        "model_name": model,
        "model_version": _NEWEST,
        "input_map": map_entries(inputs),
        "output_map": map_entries(outputs),
    }


def _task_inputs(task: Task) -> list[dict[str, Any]]:
    return [
        {
            "name": field.name,
            "data_type": STRING,
            "dims": [-1],
            "optional": True if field.optional else None,
        }
        for field in task.inputs
    ]


def _task_outputs(task: Task) -> list[dict[str, Any]]:
    """Return the tensors of results; their dims depend on the options of the request."""
    return [
        {
            "name": tensor.name,
            "data_type": EnumValue(DATA_TYPES[tensor.dtype]),
            "dims": [-1] * tensor.rank,
        }
        for tensor in output_tensors(task.result_type)
    ]


def _output(spec: TensorSpec, info: GraphInfo) -> dict[str, Any]:
    fields = tensor_fields(spec, batched=info.batched)
    if info.labels and spec.name == "logits":
        fields["label_filename"] = LABELS_FILE
    return fields


def _instances(info: GraphInfo, config: TritonConfig) -> dict[str, Any]:
    on_cpu = config.backend == "onnxruntime" and config.provider == "cpu"
    fields: dict[str, Any] = {
        "count": config.instances,
        "kind": EnumValue("KIND_CPU" if on_cpu else "KIND_GPU"),
    }
    if config.backend == "tensorrt" and info.profiles:
        # An instance has a context per profile, and uses the nearest one that covers a batch.
        fields["profile"] = [str(index) for index in range(len(info.profiles))]
    return fields


def _dynamic_batching(info: GraphInfo, config: TritonConfig) -> dict[str, Any]:
    name = batch_dim(info.record)
    optima = {profile.dims[name].opt for profile in info.profiles if name in profile.dims}
    preferred = sorted(size for size in optima if 1 < size <= info.max_batch_size)
    policy = {
        "timeout_action": EnumValue("REJECT"),
        "default_timeout_microseconds": config.queue_timeout_us,
        "allow_timeout_override": True,
        "max_queue_size": config.max_queue_size,
    }
    return {
        "preferred_batch_size": preferred or None,
        "max_queue_delay_microseconds": config.max_queue_delay_us,
        "default_queue_policy": policy,
    }


def _runtime_parameters(config: TritonConfig) -> dict[str, str]:
    values = {}
    if config.threads:
        values["intra_op_thread_count"] = str(config.threads)
    if config.provider != "cpu":
        # By default, cuDNN searches the best algorithm for each new shape of a convolution while
        # the request waits. The backend only reads this parameter: it overwrites the setting of an
        # execution accelerator `cuda` (onnxruntime.cc, LoadModel).
        values["cudnn_conv_algo_search"] = _HEURISTIC
    return values


def _tensorrt_parameters(info: GraphInfo, config: TritonConfig) -> dict[str, str]:
    """Return the parameters of the ONNX Runtime backend's execution accelerator `tensorrt`.

    There is no `precision_mode`: without one, ONNX Runtime makes a strongly typed network from
    TensorRT 9 on, whose precision is the graph's, Q/DQ included. With INT8 or FP16, TensorRT would
    choose it by itself. Names: onnxruntime.cc, LoadModel.
    """
    if not info.server_builds or not config.engine_cache:
        # An engine is loaded through its EPContext wrapper, and no cache is written beside it.
        values = {"trt_engine_cache_enable": "0"}
    else:
        values = {
            "trt_engine_cache_enable": "1",
            "trt_engine_cache_path": config.engine_cache,
            # ONNX Runtime's key has the model's file name, not its weights.
            "trt_engine_cache_prefix": info.sha256[:16],
        }
    if info.server_builds:
        values |= profile_shapes(info.record.inputs, info.profiles)
    return values


def _max_rows(info: GraphInfo) -> int:
    """Return the maximum number of rows per request: the batch size, also if it is fixed."""
    fixed = next((s.dims[0] for s in info.record.inputs if isinstance(s.dims[0], int)), 0)
    return info.max_batch_size or fixed

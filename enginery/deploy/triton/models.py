"""The configurations of the models in a Triton repository: graph, tokenizer, answers, ensemble.

>>> graph_model(parts, TritonConfig(), "minilm-graph").fields["max_batch_size"]
32

Fields are those of Triton's model_config.proto, in its words. The rules that the proto cannot hold
are Triton's own checks: `ValidateModelConfig` and `ValidateEnsembleSchedulingConfig` in
src/model_config_utils.cc of triton-inference-server/core, `ValidateInputs` and `ValidateOutputs` of
the ONNX Runtime backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from enginery.core.artifact.engine import Engine
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.shapes import Profile, TensorSpec
from enginery.deploy.triton.options import TritonConfig
from enginery.deploy.triton.tensors import DATA_TYPES, STRING, batch_dim, tensor_fields
from enginery.deploy.triton.text_format import EnumValue, config_text, map_entries, parameters
from enginery.runtime.tasks.task import Task

LABELS_FILE = "labels.txt"
TOKENIZER, ANSWERS, GRAPH = "tokenizer", "answers", "graph"
_NEWEST = -1
_HEURISTIC = "1"


@dataclass(frozen=True)
class TritonModel:
    """One folder of a repository."""

    name: str
    fields: Mapping[str, Any]
    files: Mapping[str, Path] = field(default_factory=dict)
    """Name below the model's folder -> what is there now."""
    texts: Mapping[str, bytes] = field(default_factory=dict)
    """Likewise, of what is made here."""

    @property
    def backend(self) -> str:
        """What loads it: a backend's name, or `ensemble`."""
        return str(self.fields.get("backend", "ensemble"))

    def config(self) -> str:
        """The text of `config.pbtxt`."""
        return config_text(self.fields)


@dataclass(frozen=True)
class GraphInfo:
    """What is known of the graph that is exported."""

    record: GraphRecord
    max_batch_size: int
    """0 where the graph has no batch."""
    profiles: tuple[Profile, ...]
    """Of the engine that runs; else those of the options."""
    engines: tuple[Engine, ...]
    labels: tuple[str, ...]
    """Of the output `logits`; none where a label is not one number of a row."""

    @property
    def batched(self) -> bool:
        return self.max_batch_size > 0


def graph_model(
    parts: GraphInfo,
    config: TritonConfig,
    name: str,
    *,
    files: Mapping[str, Path],
    warmup: Sequence[Mapping[str, Any]],
    texts: Mapping[str, bytes],
) -> TritonModel:
    """The model that runs the graph."""
    fields: dict[str, Any] = {
        "name": name,
        "platform": "tensorrt_plan" if config.backend == "tensorrt" else "onnxruntime_onnx",
        "backend": config.backend,
        "max_batch_size": parts.max_batch_size,
        "version_policy": {"latest": {"num_versions": 1}},
        "input": [tensor_fields(spec, batched=parts.batched) for spec in parts.record.inputs],
        "output": [_output(spec, parts) for spec in parts.record.outputs],
        "instance_group": [_instances(parts, config)],
    }
    if parts.batched:
        fields["dynamic_batching"] = _dynamic_batching(parts, config)
    if config.backend == "onnxruntime":
        if config.provider == "tensorrt":
            # ONNX Runtime opens the engine by its wrapper; it must not write a cache beside it.
            accelerator = {
                "name": "tensorrt",
                "parameters": map_entries({"trt_engine_cache_enable": "0"}),
            }
            fields["optimization"] = {
                "execution_accelerators": {"gpu_execution_accelerator": [accelerator]}
            }
        fields["parameters"] = parameters(_runtime_parameters(config)) or None
    elif len(parts.engines) > 1:
        fields["cc_model_filenames"] = map_entries(
            {c: plan_file(e) for e in parts.engines for c in e.record.capabilities}
        )
    fields["model_warmup"] = list(warmup)
    made = dict(texts)
    if parts.labels:
        made[LABELS_FILE] = "".join(f"{label}\n" for label in parts.labels).encode()
    return TritonModel(name, fields, files, made)


def plan_file(engine: Engine) -> str:
    """What a plan is called where there are several: `model-8.9.plan`."""
    return f"model-{'-'.join(engine.record.capabilities)}.plan"


def step_model(
    step: str,
    task: Task,
    parts: GraphInfo,
    config: TritonConfig,
    name: str,
    *,
    files: Mapping[str, Path],
) -> TritonModel:
    """Return the model that tokenizes, or the one that answers, in the Python backend.

    It takes no batches: a request's texts are the first dim, as the ensemble's are, and the graph
    takes rows of several requests together.
    """
    given = _task_inputs(task)
    if step == TOKENIZER:
        inputs = given
        outputs = [tensor_fields(spec, batched=False) for spec in parts.record.inputs]
    else:
        needed = task.outputs_read(parts.record)
        specs = [spec for spec in parts.record.outputs if spec.name in needed]
        inputs = [*given, *(tensor_fields(spec, batched=False) for spec in specs)]
        outputs = _task_outputs(task)
    options = {
        "step": step,
        "graph": parts.record.file,
        "pad_multiple": str(config.pad_multiple),
        "max_rows": str(_max_rows(parts)),
        "profiles": "; ".join(str(p) for p in parts.profiles) if parts.engines else "",
    }
    if config.execution_env:
        options["EXECUTION_ENV_PATH"] = config.execution_env
    fields = {
        "name": name,
        "backend": "python",
        "max_batch_size": 0,
        "version_policy": {"latest": {"num_versions": 1}},
        "input": inputs,
        "output": outputs,
        "instance_group": [{"count": config.tokenizer_instances, "kind": EnumValue("KIND_CPU")}],
        "parameters": parameters(options),
    }
    return TritonModel(name, fields, files)


def ensemble_model(task: Task, parts: GraphInfo, name: str) -> TritonModel:
    """Return the model that clients ask: texts in, results out."""
    record = parts.record
    given = {field.name: field.name for field in task.inputs}
    tokens = {spec.name: f"graph.{spec.name}" for spec in record.inputs}
    found = {n: f"graph.{n}" for n in task.outputs_read(record)}
    answers = {tensor.name: tensor.name for tensor in task.outputs}
    steps = [
        _step(f"{name}-{TOKENIZER}", given, tokens),
        _step(f"{name}-{GRAPH}", tokens, found),
        _step(f"{name}-{ANSWERS}", {**given, **found}, answers),
    ]
    fields = {
        "name": name,
        "platform": "ensemble",
        "max_batch_size": 0,
        "version_policy": {"latest": {"num_versions": 1}},
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
    """Return the tensors of results; options of a request change their sizes."""
    return [
        {
            "name": tensor.name,
            "data_type": EnumValue(DATA_TYPES[tensor.dtype]),
            "dims": [-1] * tensor.rank,
        }
        for tensor in task.outputs
    ]


def _output(spec: TensorSpec, parts: GraphInfo) -> dict[str, Any]:
    fields = tensor_fields(spec, batched=parts.batched)
    if parts.labels and spec.name == "logits":
        fields["label_filename"] = LABELS_FILE
    return fields


def _instances(parts: GraphInfo, config: TritonConfig) -> dict[str, Any]:
    on_cpu = config.backend == "onnxruntime" and config.provider == "cpu"
    fields: dict[str, Any] = {
        "count": config.instances,
        "kind": EnumValue("KIND_CPU" if on_cpu else "KIND_GPU"),
    }
    if config.backend == "tensorrt" and parts.profiles:
        # An instance has a context for each, and takes the nearest that covers a batch.
        fields["profile"] = [str(index) for index in range(len(parts.profiles))]
    return fields


def _dynamic_batching(parts: GraphInfo, config: TritonConfig) -> dict[str, Any]:
    preferred = list(config.preferred_batch_size)
    if not preferred:
        name = batch_dim(parts.record)
        optima = {p.dims[name].opt for p in parts.profiles if name in p.dims}
        preferred = sorted(size for size in optima if 1 < size <= parts.max_batch_size)
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
    found = {}
    if config.threads:
        found["intra_op_thread_count"] = str(config.threads)
    if config.provider != "cpu":
        # By default each new shape of a convolution is searched for its best algorithm, while the
        # request waits. The backend takes it from here alone: what an execution accelerator
        # `cuda` says of it is overwritten (onnxruntime.cc, LoadModel).
        found["cudnn_conv_algo_search"] = _HEURISTIC
    return found


def _max_rows(parts: GraphInfo) -> int:
    """The most rows of one request; of a fixed batch, that."""
    fixed = next((s.dims[0] for s in parts.record.inputs if isinstance(s.dims[0], int)), 0)
    return parts.max_batch_size or fixed

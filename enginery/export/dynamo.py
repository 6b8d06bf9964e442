"""Export a model with torch's own exporter (`torch.onnx.export(dynamo=True)`).

It is for models that Optimum's registry does not have: encoders of tokens, an image or audio, in
one graph. It writes `model.onnx` and `config.json` to the staging directory, and runs in the child
process of the stage.
"""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import torch

from enginery.core.errors import ExportError, SourceError
from enginery.core.model.feeds import FeedLimits, make_feeds
from enginery.core.model.files import ModelConfig
from enginery.core.shapes import Dim, TensorSpec
from enginery.core.subprocess import report_phase
from enginery.export.checkpoint import check_unused, require_trained, untrained_weights
from enginery.export.config import ExportConfig
from enginery.export.graphs import ExportedModel
from enginery.export.model_inputs import TYPES, compare_inputs
from enginery.export.optimum import choose_task, require_padding_token, with_image_size
from enginery.export.positions import find_length_limit
from enginery.export.sentence_modules import write_module_weights
from enginery.export.side_files import copy_side_files, require_equal_processor
from enginery.export.tokenizer import write_tokenizer
from enginery.export.vocabulary import check_vocabulary, embedding_rows
from enginery.runtime.image.processor import PIXEL_MASK
from enginery.runtime.pytorch.runner import TorchOptions, load_pytorch

_PROTOBUF_LIMIT_BYTES = 2**31 - 2**26  # protobuf's limit of 2 GiB, minus space for the nodes

_TOKENS: tuple[Dim, ...] = ("batch", "sequence")


def export_with_dynamo(
    source: Path,
    config: ExportConfig,
    out: Path,
    *,
    pickled: bool,
) -> ExportedModel:
    """Trace the model with `torch.export` and named dynamic dims, and write the graph to `out`.

    Args:
        source: the model directory.
        config: the options of the stage.
        out: the staging directory.
        pickled: True if the weights are pickled.

    Raises:
        ExportError: the model cannot be traced, or its inputs are not supported.
    """
    settings = ModelConfig.read(source, error=SourceError)
    task = choose_task(config.task, settings)
    if task.endswith("-with-past"):
        raise ExportError(
            f"the dynamo exporter does not support a KV cache, found task {task}.",
            do=f"Use --task {task.removesuffix('-with-past')}.",
        )
    model = load_pytorch(
        source,
        task,
        TorchOptions(
            precision=config.dtype,
            pickled=pickled,
            trust_remote_code=config.trust_remote_code,
            device=config.device,
        ),
    )
    # A class of one's own may need none; those of transformers fail without one as they are traced.
    if task == "text-classification" and getattr(model.config, "pad_token_id", None) is not None:
        require_padding_token(model, source, trust_remote_code=config.trust_remote_code)
    unused_notes = check_unused(model, source, allow_unused=config.allow_unused)
    length_limit, limit_notes = find_length_limit(model, settings)
    model.config.use_cache = False
    described = with_image_size(settings, source)
    inputs = _inputs(model, source, task, described, config)
    limits = FeedLimits.from_config(described)
    feeds = make_feeds(inputs, _sizes(limits), limits, seed=0)
    report_phase(f"tracing {settings.model_type or 'the model'} for {task} with dynamo")
    _trace(model, inputs, feeds, config, out / "model.onnx")
    unused = getattr(model, "unused_tensors", ())
    require_trained(untrained_weights(model), [out / "model.onnx"], source, task, unused)
    model.config.save_pretrained(out)
    copy_side_files(source, out, code=config.trust_remote_code)
    require_equal_processor(out)
    notes = [
        *write_module_weights(source, out),
        *write_tokenizer(source, out, trust_remote_code=config.trust_remote_code),
        *check_vocabulary(out, embedding_rows(model)),
    ]
    return ExportedModel(
        files=["model.onnx"],
        task=task,
        model_type=settings.model_type or "unknown",
        library="transformers",
        config=described,
        length_limit=length_limit,
        notes=[
            f"task {task}",
            "exported by torch's dynamo exporter",
            *model.config_notes,
            *unused_notes,
            *limit_notes,
            *notes,
        ],
    )


def _inputs(
    model: Any, source: Path, task: str, settings: ModelConfig, config: ExportConfig
) -> list[TensorSpec]:
    """Return the specs of the tokenizer and processor outputs that `forward` takes."""
    accepted = inspect.signature(model.forward).parameters
    floats = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}[config.dtype]
    supported = [
        TensorSpec("input_ids", "int64", _TOKENS),
        TensorSpec("attention_mask", "int64", _TOKENS),
        TensorSpec(TYPES, "int64", _TOKENS),
        TensorSpec("pixel_values", floats, ("batch", "channels", "height", "width")),
        TensorSpec(PIXEL_MASK, "int64", ("batch", "height", "width")),
        TensorSpec("input_values", floats, _TOKENS),
    ]
    names = [spec.name for spec in supported if spec.name in accepted and spec.name != PIXEL_MASK]
    if TYPES in names and not settings.type_vocab_size:
        names.remove(TYPES)  # unless the model uses it all the same, see below
    if model.main_input_name not in names:
        raise ExportError(
            f"the dynamo exporter supports the inputs {', '.join(s.name for s in supported)}, "
            f"but this model's main input is {model.main_input_name}."
        )
    changes = compare_inputs(model, source, task, names, trust_remote_code=config.trust_remote_code)
    names = [name for name in names if name not in changes.dropped] + sorted(changes.added)
    known = {spec.name: spec for spec in supported}
    specs = [known[name] for name in names]
    channels = settings.merged().num_channels or 3
    return [
        TensorSpec(s.name, s.dtype, tuple(channels if d == "channels" else d for d in s.dims))
        for s in specs
    ]


def _sizes(limits: FeedLimits) -> dict[str, int]:
    # torch.export treats sizes of 0 and 1 as constants; 2 and 16 stay dynamic.
    return {**limits.sizes, "batch": 2, "sequence": max(16, limits.min_sequence)}


def _trace(
    model: Any, inputs: list[TensorSpec], feeds: dict[str, Any], config: ExportConfig, path: Path
) -> None:
    tensors = {name: torch.from_numpy(array).to(config.device) for name, array in feeds.items()}
    floats = {name: t.to(model.dtype) for name, t in tensors.items() if t.is_floating_point()}
    tensors |= floats
    with torch.no_grad():
        result = model(**tensors, return_dict=True)
    outputs = [name for name, value in result.items() if isinstance(value, torch.Tensor)]
    # The position embeddings of most vision models fix height and width.
    dynamic = tuple(
        {
            axis: torch.export.Dim(dim)
            for axis, dim in enumerate(spec.dims)
            if dim in ("batch", "sequence")
        }
        for spec in inputs
    )
    size_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                _Positional(model, list(tensors), outputs).eval(),
                tuple(tensors.values()),
                str(path),
                dynamo=True,
                input_names=list(tensors),
                output_names=outputs,
                dynamic_shapes=(dynamic,),
                opset_version=config.opset,
                external_data=size_bytes > _PROTOBUF_LIMIT_BYTES,
            )
    except Exception as error:  # torch.onnx and torch._dynamo raise many unrelated types
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise ExportError(
            f"torch's dynamo exporter cannot trace the model: {lines[0] if lines else error!r}"
        ) from error


class _Positional(torch.nn.Module):  # type: ignore[misc]  # torch is not type-checked
    """A wrapper of the model with positional inputs and a tuple of tensors as output."""

    def __init__(self, model: Any, inputs: list[str], outputs: list[str]) -> None:
        super().__init__()
        self.model, self.inputs, self.outputs = model, inputs, outputs

    def forward(self, *tensors: Any) -> tuple[Any, ...]:
        named = dict(zip(self.inputs, tensors, strict=True))
        result = self.model(**named, return_dict=True)
        return tuple(result[name] for name in self.outputs)

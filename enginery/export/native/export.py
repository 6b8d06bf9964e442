"""Export a model with our own inputs and outputs, lowered by PyTorch's exporters.

It is the exporter of transformers 5, and in an environment with Optimum that of models that its
registry does not have. It writes the graphs and the files beside it to the staging directory, and
runs in the child process of the stage.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from enginery.core.errors import ExportError, SourceError
from enginery.core.json_file import json_bytes, read_json
from enginery.core.model.files import ModelConfig
from enginery.core.subprocess import report_phase
from enginery.export.checkpoint import check_unused, require_trained, untrained_weights
from enginery.export.config import ExportConfig
from enginery.export.graphs import ExportedModel, TracedInputs
from enginery.export.native.decoders import TracedGraph, export_decoder
from enginery.export.native.encoder_decoders import export_encoder_decoder
from enginery.export.native.inputs import ModelInputs, describe_inputs, with_image_size
from enginery.export.native.known_gaps import require_supported
from enginery.export.native.lowering import Route, Signature, available_routes, lower
from enginery.export.native.segmenters import export_segmenter
from enginery.export.native.tasks import choose_outputs, choose_task
from enginery.export.positions import find_length_limit
from enginery.export.sentence_modules import write_module_weights
from enginery.export.side_files import (
    copy_side_files,
    name_pillow_processor,
    require_equal_processor,
)
from enginery.export.tokenizer import write_tokenizer
from enginery.export.used_weights import UsedWeights, require_used
from enginery.export.vocabulary import check_vocabulary, embedding_rows, require_padding_token
from enginery.runtime.pytorch.answers import first_line
from enginery.runtime.pytorch.config import load_config
from enginery.runtime.pytorch.runner import TorchOptions, load_pytorch
from enginery.runtime.pytorch.segmenter import is_segmenter

_GRAPH = "model.onnx"
_ROUTES: dict[str, tuple[Route, ...]] = {"transformers": ("transformers",), "dynamo": ("dynamo",)}
"""Exporter that the options name -> the route; `auto` tries all that there are."""
_NOT_CHANGED = frozenset({"_name_or_path", "architectures", "dtype", "torch_dtype", "use_cache"})
"""Keys that loading and tracing set, which are no settings of the model."""


def export_with_transformers(
    source: Path,
    config: ExportConfig,
    out: Path,
    *,
    pickled: bool,
) -> ExportedModel:
    """Lower the model to `out`, with every dim dynamic of which the model takes other sizes.

    Args:
        source: the model directory.
        config: the options of the stage.
        out: the staging directory.
        pickled: True if the weights are pickled.

    Raises:
        ExportError: the model cannot be lowered, or its inputs are not supported.
    """
    settings = ModelConfig.read(source, error=SourceError)
    task = choose_task(config.task, settings)
    require_supported(settings.model_type, task)
    model = load_pytorch(
        source,
        task,
        TorchOptions(
            precision=config.dtype,
            pickled=pickled,
            trust_remote_code=config.trust_remote_code,
            device=config.device,
            attention="",
        ),
    )
    if config.task == "auto" and generates(model, task):
        task = f"{task}-with-past"
    if generates(model, task) and getattr(model.config, "is_encoder_decoder", False):
        raise ExportError(
            f"task '{task}' is of graphs without a cache, which only Optimum makes of an encoder "
            f"and a decoder such as {settings.model_type}'s.",
            do=f"Set --task {task}-with-past, with which enginery generates; or leave it out.",
            option="task",
        )
    if task.endswith("-with-past") and config.layout == "optimum":
        raise ExportError(
            f"option 'layout' is optimum, but {settings.model_type} is not exported by Optimum, "
            "whose graphs these are.",
            do="Leave it out.",
            option="layout",
        )
    # A class of one's own may need none; those of transformers fail without one as they are traced.
    if task == "text-classification" and getattr(model.config, "pad_token_id", None) is not None:
        require_padding_token(model, source, trust_remote_code=config.trust_remote_code)
    unused_notes = check_unused(model, source, allow_unused=config.allow_unused)
    length_limit, limit_notes = find_length_limit(model, settings)
    described = with_image_size(settings, source)
    inputs = describe_inputs(
        model, source, task, described, trust_remote_code=config.trust_remote_code
    )
    graphs = _lower(model, task, inputs, out, config)
    files = [graph.file for graph in graphs]
    unused = getattr(model, "unused_tensors", ())
    require_trained(untrained_weights(model), [out / file for file in files], source, task, unused)
    copy_side_files(source, out, code=config.trust_remote_code)
    write_config(model, source, out, trust_remote_code=config.trust_remote_code)
    write_generation_config(model, out)
    name_pillow_processor(out)
    require_equal_processor(out)
    notes = [
        *write_module_weights(source, out),
        *write_tokenizer(source, out, trust_remote_code=config.trust_remote_code),
        *check_vocabulary(out, embedding_rows(model)),
    ]
    return ExportedModel(
        files=sorted(files),
        task=task,
        model_type=settings.model_type or "unknown",
        library="transformers",
        traced={graph.file: graph.traced for graph in graphs},
        config=described,
        from_registry=is_segmenter(model),
        length_limit=length_limit,
        notes=[
            f"task {task}",
            *dict.fromkeys(f"exported by {graph.lowered.description}" for graph in graphs),
            *(note for graph in graphs for note in graph.lowered.notes),
            *model.config_notes,
            *unused_notes,
            *limit_notes,
            *notes,
        ],
    )


def _lower(
    model: Any, task: str, inputs: ModelInputs, out: Path, config: ExportConfig
) -> list[TracedGraph]:
    """Write the graphs, with images of any size if the model takes them."""
    model.config.use_cache = task.endswith("-with-past")
    # The others leave the soft cap out, and give padded frames another value than PyTorch's own,
    # which subsampled outputs have beside the real ones.
    if has_soft_cap(model.config) or inputs.masks_frames:
        model.set_attn_implementation("eager")
    report_phase(f"tracing {model.config.model_type} for {task}")
    if is_segmenter(model):
        return _lower_at(model, task, inputs.with_fixed_images(), out, config)
    if not inputs.takes_images:
        return _lower_at(model, task, inputs, out, config)
    if window := window_size(model.config):
        reason = f"PyTorch does not trace windows of {window} patches over a grid of any size"
        return _lower_fixed(model, task, inputs, out, config, reason)
    try:
        return _lower_at(model, task, inputs.with_larger_images(), out, config)
    except ExportError as error:
        reason = f"with others {error.message}"
        return _lower_fixed(model, task, inputs, out, config, reason)


def _lower_fixed(
    model: Any, task: str, inputs: ModelInputs, out: Path, config: ExportConfig, reason: str
) -> list[TracedGraph]:
    """Write the graphs for images of the model's own size, with a note that says why."""
    first, *others = _lower_at(model, task, inputs.with_fixed_images(), out, config)
    size = f"{inputs.sizes['height']} × {inputs.sizes['width']}"
    note = f"height and width are fixed at {size}, because {reason}"
    lowered = replace(first.lowered, notes=(*first.lowered.notes, note))
    return [replace(first, lowered=lowered), *others]


def _lower_at(
    model: Any, task: str, inputs: ModelInputs, out: Path, config: ExportConfig
) -> list[TracedGraph]:
    """Write the graphs for the dims that these inputs have.

    Raises:
        ExportError: the model rejects the example inputs, or cannot be lowered.
    """
    opset, routes = int(config.opset), _ROUTES.get(config.exporter, available_routes())
    if inputs.takes_images:
        routes = routes[:1]  # every attempt takes time, and images of one size are the rule
    if is_segmenter(model):
        return export_segmenter(model, inputs, out, opset=opset, routes=routes)
    if task.endswith("-with-past"):
        if model.config.is_encoder_decoder:
            return export_encoder_decoder(model, inputs, out, opset=opset, routes=routes)
        return [export_decoder(model, inputs.limits, out, opset=opset, routes=routes)]
    feeds = inputs.feeds(model)
    try:
        with torch.no_grad():
            results = model(**feeds)
    except Exception as error:  # a model of any class may fail in any way
        raise ExportError(f"PyTorch rejects the example inputs: {first_line(error)}") from error
    outputs = choose_outputs(model, task, results)
    used = UsedWeights(is_on=task == "feature-extraction")
    used.add(model, feeds, _GRAPH, outputs=outputs)
    signature = Signature(feeds, inputs.dims(), outputs)
    lowered = lower(model, signature, out / _GRAPH, opset=opset, routes=routes)
    notes = require_used(model, used, [out / _GRAPH], do="Set --task to one that has this output.")
    lowered = replace(lowered, notes=(*lowered.notes, *notes))
    traced = TracedInputs({name: tuple(tensor.shape) for name, tensor in feeds.items()})
    return [TracedGraph(_GRAPH, lowered, traced)]


def generates(model: Any, task: str) -> bool:
    """Return True if a model generates texts for a task, for which it should keep a cache."""
    is_text = task in ("text-generation", "text2text-generation")
    reads = task in ("automatic-speech-recognition", "image-to-text")
    return is_text or (reads and bool(model.config.is_encoder_decoder))


def write_generation_config(model: Any, out: Path) -> None:
    """Write generation_config.json, if the model generates.

    transformers makes the options of a model without the file from its config.json. It refuses to
    save some that it has loaded.
    """
    options = getattr(model, "generation_config", None)
    if options is not None:
        document = json.loads(options.to_json_string(use_diff=True))
        (out / "generation_config.json").write_bytes(json_bytes(document))


def window_size(config: Any) -> int:
    """Return the edge of the windows in which a vision transformer attends; 0 without windows.

    The windows of an image of any size are padded to a multiple, and shifted, by sizes that
    `torch.export` takes minutes to reason about.
    """
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    return next((part.window_size for part in parts if getattr(part, "window_size", 0)), 0)


def has_soft_cap(config: Any) -> bool:
    """Return True if attention scores are capped, as in Gemma 2."""
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    return any(getattr(part, "attn_logit_softcapping", None) for part in parts)


def write_config(model: Any, source: Path, out: Path, *, trust_remote_code: bool) -> None:
    """Write the model's own config.json, with what loading has changed of it.

    transformers would save it with the keys of its own version, which other readers may not know.
    """
    loaded = load_config(source, trust_remote_code=trust_remote_code)
    if loaded.is_newer:
        model.config.save_pretrained(out)
        return
    before, after = loaded.config.to_dict(), model.config.to_dict()
    changed = {
        key: value
        for key, value in after.items()
        if key not in _NOT_CHANGED and before.get(key) != value
    }
    document = read_json(source / ModelConfig.FILE)
    (out / ModelConfig.FILE).write_bytes(json_bytes(document | changed))

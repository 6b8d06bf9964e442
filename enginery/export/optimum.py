"""Export a model with Optimum's registry of model types and tasks.

It writes the graphs and Optimum's `config.json` to the staging directory. It imports torch,
transformers and optimum, and runs in the child process of the stage.
"""

from __future__ import annotations

import gc
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import transformers
from numpy.typing import NDArray
from onnx import numpy_helper
from optimum.exporters.onnx import onnx_export_from_model
from optimum.exporters.tasks import TasksManager
from optimum.utils import DEFAULT_DUMMY_SHAPES
from optimum.utils.save_utils import maybe_load_preprocessors
from transformers.modeling_attn_mask_utils import AttentionMaskConverter

from enginery.core.artifact.external_data import load_graph
from enginery.core.errors import ExportError, SourceError, nearest
from enginery.core.json_file import json_bytes, read_json
from enginery.core.model.feeds import FeedLimits
from enginery.core.model.files import ModelConfig, PreprocessorConfig
from enginery.core.shapes import canonical_dim
from enginery.core.subprocess import report_phase
from enginery.core.temporary import temporary_directory
from enginery.export.config import ExportConfig
from enginery.export.generation import arrange_for_generation
from enginery.export.graphs import ExportedModel, TracedInputs, list_graphs
from enginery.export.side_files import copy_side_files
from enginery.export.tokenizer import write_tokenizer
from enginery.runtime.torch_runner import TorchOptions, load_pytorch


def export_with_optimum(
    source: Path,
    config: ExportConfig,
    out: Path,
    *,
    pickled: bool,
    vocoder: Path | None = None,
) -> ExportedModel:
    """Trace the model with Optimum's configuration of its type, and write the graphs to `out`.

    Args:
        source: the model directory.
        config: the options of the stage.
        out: the staging directory.
        pickled: True if the weights are pickled.
        vocoder: the directory of the vocoder of a model of speech.

    Raises:
        ExportError: the registry lacks the model type or the task, or the model cannot be exported
            in this precision.
    """
    settings = ModelConfig.read(source, error=SourceError)
    library = "timm" if settings.architecture else "transformers"
    model_type = settings.model_type or library
    task = choose_task(config.task, settings)
    if library == "transformers":
        task = _supported_task(model_type, task, requested=config.task)
    _check_vocoder(model_type, vocoder)
    report_phase(f"tracing {model_type} for {task}")
    with _traced_inputs() as traced:
        model = load_pytorch(
            source,
            task,
            TorchOptions(
                precision=config.dtype,
                library=library,
                pickled=pickled,
                trust_remote_code=config.trust_remote_code,
                device=config.device,
                attention="",
            ),
        )
        _export(model, source, config, out, task=task, vocoder=vocoder)
        untrained = _untrained_weights(model)
        config_notes = getattr(model, "config_notes", ())
        # What follows may load the graphs, whose weights would be in memory twice.
        del model
    gc.collect()
    if not (source / PreprocessorConfig.FILE).is_file():
        (out / PreprocessorConfig.FILE).unlink(missing_ok=True)
    if library == "timm":
        _write_timm_processor(source, out)
    copy_side_files(source, out, code=config.trust_remote_code)
    notes = write_tokenizer(source, out, trust_remote_code=config.trust_remote_code)
    generates = task.endswith("-with-past") and task != "feature-extraction-with-past"
    if generates and config.layout == "enginery":
        report_phase("arranging the graphs for generation")
        notes = [*notes, *arrange_for_generation(out)]
    files = list_graphs(out)
    notes += [note for file in files for note in _drop_unnamed_outputs(out / file)]
    _require_trained(untrained, [out / file for file in files], source, task)
    return ExportedModel(
        files=files,
        task=task,
        model_type=model_type,
        library=library,
        traced=traced,
        from_registry=True,
        config=with_image_size(settings, source),
        notes=[f"task {task}", *config_notes, *notes],
    )


def _export(
    model: Any,
    source: Path,
    config: ExportConfig,
    out: Path,
    *,
    task: str,
    vocoder: Path | None,
) -> None:
    """Export a model of local files like Optimum's `main_export`, with less memory.

    `main_export` loads tokenizers before and after the trace, and holds them while memory peaks.
    """
    if task == "text-classification" and getattr(model.config, "pad_token_id", None) is None:
        raise ExportError(
            f"a text classifier needs a padding token, but neither config.json nor the tokenizer "
            f"of {source} has one.",
            do="Set pad_token_id in config.json.",
        )
    model.config.use_cache = task.endswith("with-past")
    if _has_soft_cap(model.config):
        model.set_attn_implementation("eager")  # the others leave the soft cap out
    settings = with_image_size(ModelConfig.read(source, error=SourceError), source)
    limits = FeedLimits.from_config(settings)
    longest = limits.position_limit or sys.maxsize
    if task.endswith("-with-past"):  # the past is as long as the tokens after it
        longest //= 2
    shapes = {"sequence_length": min(DEFAULT_DUMMY_SHAPES["sequence_length"], longest)}
    takes_pixels = (source / PreprocessorConfig.FILE).is_file()
    with _masks_for_any_length(), _processor_alone(source, settings, limits) as processor:
        # Optimum loads and saves the tokenizer of this path, too; the stage copies its files.
        model.config._name_or_path = str(processor or "")  # noqa: SLF001
        onnx_export_from_model(
            model=model,
            output=out,
            opset=config.opset,
            task=task,
            device=config.device,
            no_post_process=True,  # it merges decoders into one graph with an If node
            # Optimum reads image sizes from the processor; it needs no tokenizer for texts.
            preprocessors=maybe_load_preprocessors(str(source)) if takes_pixels else [],
            do_validation=False,  # the validate stage is stricter and raises
            model_kwargs={"vocoder": str(vocoder)} if vocoder else None,
            **shapes,
        )


def _untrained_weights(model: Any) -> dict[str, NDArray[np.float32]]:
    """Return the weights by name that the files lack, which are random numbers."""
    names = getattr(model, "untrained_weights", ())
    return {
        n: weight.detach().cpu().float().numpy()
        for n, weight in model.named_parameters()
        if n in names
    }


def _write_timm_processor(source: Path, out: Path) -> None:
    """Write how timm prepares images for a model to preprocessor_config.json.

    Nothing is written for what it does not say: images that are not square or not in color, and
    timm's rarer ways to crop.
    """
    import timm

    trained = read_json(source / ModelConfig.FILE).get("pretrained_cfg", {})
    data = timm.data.resolve_data_config(pretrained_cfg=trained)
    channels, height, width = data["input_size"]
    if channels != 3 or height != width or data["crop_mode"] not in ("center", "squash"):
        return
    edge = int(height / data["crop_pct"])
    center = data["crop_mode"] == "center"
    filters = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3, "box": 4, "hamming": 5}
    settings = {
        "image_processor_type": "TimmImageProcessor",
        "size": {"shortest_edge": edge} if center else {"height": edge, "width": edge},
        "resample": filters.get(data["interpolation"], filters["bicubic"]),
        "crop_size": {"height": height, "width": width},
        "image_mean": list(data["mean"]),
        "image_std": list(data["std"]),
    }
    (out / PreprocessorConfig.FILE).write_bytes(json_bytes(settings))


def _check_vocoder(model_type: str, vocoder: Path | None) -> None:
    """Raise ExportError if SpeechT5 has no vocoder, or another model has one."""
    if (model_type == "speecht5") == (vocoder is not None):
        return
    if vocoder is None:
        raise ExportError(
            "SpeechT5 is exported together with a vocoder, which makes sound of its spectrograms.",
            do='Name one: --model-kwargs \'{"vocoder": "org/name or a directory"}\'',
            option="model_kwargs",
        )
    raise ExportError(
        f"option 'model_kwargs' names a vocoder, but {model_type} has none.",
        do="Leave it out.",
        option="model_kwargs",
    )


def _has_soft_cap(config: Any) -> bool:
    """Return True if attention scores are capped, as in Gemma 2."""
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    return any(getattr(part, "attn_logit_softcapping", None) for part in parts)


@contextmanager
def _processor_alone(
    source: Path, settings: ModelConfig, limits: FeedLimits
) -> Iterator[Path | None]:
    """Yield a directory with the model's image or audio processor and no tokenizer; None if none.

    Optimum reads the sizes of some models' images from the processor of a path, and fails without
    one. For these sizes there is one of ViT if the model comes without.
    """
    file = source / PreprocessorConfig.FILE
    if not file.is_file() and settings.merged().image_size is None:
        yield None
        return
    with temporary_directory("processor") as folder:
        if file.is_file():
            shutil.copy(file, folder)
        else:
            size = {name: limits.sizes[name] for name in ("height", "width")}
            processor = transformers.ViTImageProcessor(size=size)
            processor.save_pretrained(folder)
        yield folder


@contextmanager
def _traced_inputs() -> Iterator[dict[str, TracedInputs]]:
    """Yield the inputs that graphs are traced with, by file.

    Optimum generates inputs that the model accepts: images of its size, series of its length.
    """
    original = torch.onnx.export
    traced: dict[str, TracedInputs] = {}

    def export(
        model: Any, args: Any, f: str, *, dynamic_axes: dict[str, dict[int, str]], **options: Any
    ) -> Any:
        tensors = {n: value for n, value in args[0].items() if isinstance(value, torch.Tensor)}
        names = options.get("input_names", ())
        if len(names) == len(tensors) and not set(names) & set(tensors):  # timm's is `x`
            tensors = dict(zip(names, tensors.values(), strict=True))
        traced[Path(f).name] = TracedInputs(
            {name: tuple(value.shape) for name, value in tensors.items()},
            frozenset(
                canonical_dim(dim)
                for dim in _series_dims(tensors, dynamic_axes)
                if not _takes_one_less(model, dim, args[0], dynamic_axes)
            ),
        )
        return original(model, args, f=f, dynamic_axes=dynamic_axes, **options)

    torch.onnx.export = export
    try:
        yield traced
    finally:
        torch.onnx.export = original


def _series_dims(
    tensors: Mapping[str, torch.Tensor], axes: Mapping[str, Mapping[int, str]]
) -> set[str]:
    """Return the lengths of series of numbers: dims that only inputs (batch, length, …) have."""
    series: set[str] = set()
    other: set[str] = set()
    for name, tensor in tensors.items():
        for axis, dim in axes.get(name, {}).items():
            is_series = axis == 1 and tensor.is_floating_point() and tensor.ndim < 4
            (series if is_series else other).add(dim)
    return series - other


def _takes_one_less(
    model: Any, dim: str, inputs: Mapping[str, Any], axes: Mapping[str, Mapping[int, str]]
) -> bool:
    """Return True if a model runs with a dim that is shorter by one."""
    shorter = dict(inputs)
    for name in inputs:
        for axis, axis_name in axes.get(name, {}).items():
            if axis_name == dim:
                shorter[name] = shorter[name].narrow(axis, 0, shorter[name].shape[axis] - 1)
    try:
        with torch.no_grad():
            model(**shorter)
    except Exception:  # a model of any class may fail in any way
        return False
    return True


@contextmanager
def _masks_for_any_length() -> Iterator[None]:
    """Let TrOCR's decoder and others make their causal mask for one new token, too.

    Optimum traces a decoder with a cache for one token. It needs no mask, and transformers makes
    none, so that the graph would let each of several tokens attend to those after it.
    """
    original = AttentionMaskConverter.to_causal_4d

    def to_causal_4d(
        self: Any,
        batch_size: Any,
        query_length: Any,
        key_value_length: Any,
        dtype: Any,
        device: Any,
    ) -> Any:
        if self.sliding_window is not None:
            return original(self, batch_size, query_length, key_value_length, dtype, device)
        keys = torch.arange(key_value_length, device=device)
        queries = torch.arange(query_length, device=device) + key_value_length - query_length
        mask = torch.zeros(query_length, key_value_length, dtype=dtype, device=device)
        mask = mask.masked_fill(keys[None, :] > queries[:, None], torch.finfo(dtype).min)
        return mask[None, None].expand(batch_size, 1, query_length, key_value_length)

    AttentionMaskConverter.to_causal_4d = to_causal_4d
    try:
        yield
    finally:
        AttentionMaskConverter.to_causal_4d = original


def _drop_unnamed_outputs(path: Path) -> list[str]:
    """Drop the outputs that Optimum has no names for, and return notes.

    The patched model of MetaCLIP 2 returns more tensors than its task has. The tracer names them.
    """
    model = load_graph(path)
    unnamed = [value for value in model.graph.output if "::" in value.name]
    if not unnamed:
        return []
    for value in unnamed:
        model.graph.output.remove(value)
    onnx.save(model, str(path))
    names = ", ".join(value.name for value in unnamed)
    return [f"{path.name}: dropped the outputs {names}, which no task has"]


def _require_trained(
    untrained: Mapping[str, NDArray[np.float32]], graphs: list[Path], source: Path, task: str
) -> None:
    """Raise ExportError if a graph has weights that the model's files lack.

    A pooler that no output reads, for example, is in no graph. Tracing renames weights that it
    transposes, so matrices are found by their values.
    """
    if not untrained:
        return  # no weight to compare, so the graphs need not be read
    random: list[str] = []
    for path in graphs:
        tensors = load_graph(path).graph.initializer
        names = {tensor.name for tensor in tensors}
        shapes = {weight.shape for weight in untrained.values() if weight.ndim > 1}
        shapes |= {shape[::-1] for shape in shapes}
        matrices = [
            numpy_helper.to_array(tensor, str(path.parent)).astype(np.float32)
            for tensor in tensors
            if tuple(tensor.dims) in shapes
        ]
        random += [
            name
            for name, weight in untrained.items()
            if name in names
            or (
                weight.ndim > 1
                and any(np.array_equal(m, w) for m in matrices for w in (weight, weight.T))
            )
        ]
    if random := sorted(set(random)):
        raise ExportError(
            f"{source} has no weights for {task}: {', '.join(random[:4])}"
            f"{', …' if len(random) > 4 else ''} would be random numbers.",
            do="Name the task that the model was trained for: --task, or --task auto.",
            option="task",
        )


def choose_task(requested: str, settings: ModelConfig) -> str:
    """Return the requested task; `auto` infers it from the model's class.

    Raises:
        ExportError: the task cannot be inferred.
    """
    tasks = sorted(TasksManager.get_all_tasks())
    if requested != "auto":
        return requested
    if settings.architecture:  # timm's config.json
        return "image-classification"
    names = settings.architectures
    model_class = getattr(transformers, names[0], None) if names else None
    if model_class is None:
        raise ExportError(
            f"the task cannot be inferred: config.json names the class "
            f"{names[0] if names else '(none)'}, which transformers does not have.",
            do=f"Set --task to one of: {', '.join(tasks)}.",
        )
    try:
        # The public method accepts only Hub ids, but these files are local.
        task = TasksManager._infer_task_from_model_or_model_class(model_class=model_class)  # noqa: SLF001
    except ValueError as error:
        raise ExportError(
            f"the task cannot be inferred from the class {names[0]}.",
            do=f"Set --task to one of: {', '.join(tasks)}.",
        ) from error
    return str(task)


def _supported_task(model_type: str, task: str, *, requested: str) -> str:
    """Return the registry's task for this model type; `auto` prefers generation with a KV cache.

    Raises:
        ExportError: the registry lacks the model type or the task.
    """
    known = TasksManager._SUPPORTED_MODEL_TYPE  # noqa: SLF001  there is no public accessor
    if model_type not in known:
        raise ExportError(
            f"Optimum's registry has no model type '{model_type}'.",
            do="Try --exporter dynamo, torch's own exporter.",
        )
    tasks = TasksManager.get_supported_tasks_for_model_type(
        model_type, "onnx", library_name="transformers"
    )
    if requested == "auto" and f"{task}-with-past" in tasks:
        return f"{task}-with-past"
    if task not in tasks:
        raise ExportError(
            f"Optimum exports {model_type} for {', '.join(tasks)}, not for {task}"
            f"{nearest(task, tasks)}",
            do="Choose another --task, or try --exporter dynamo.",
        )
    return task


def with_image_size(settings: ModelConfig, source: Path) -> ModelConfig:
    """Return the config with an `image_size`: its own, or that of the image processor."""
    merged = settings.merged()
    if merged.image_size is not None or not merged.num_channels:
        return settings
    processor = PreprocessorConfig.read(source, error=SourceError)
    size = (processor.crop_size if processor.do_center_crop else None) or processor.size
    return settings.model_copy(update={"image_size": size}) if size else settings

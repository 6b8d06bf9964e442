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

import onnx
import torch
import transformers
from optimum.exporters.onnx import onnx_export_from_model
from optimum.exporters.tasks import TasksManager
from optimum.utils import DEFAULT_DUMMY_SHAPES
from optimum.utils.save_utils import maybe_load_preprocessors
from transformers import CONFIG_MAPPING
from transformers.modeling_attn_mask_utils import AttentionMaskConverter

from enginery.core.artifact.external_data import load_graph
from enginery.core.errors import ExportError, SourceError, nearest
from enginery.core.json_file import json_bytes, read_json
from enginery.core.model.feeds import FeedLimits
from enginery.core.model.files import ModelConfig, PreprocessorConfig, module_kinds
from enginery.core.scratch import temporary_directory
from enginery.core.shapes import canonical_dim
from enginery.core.subprocess import report_phase
from enginery.export.checkpoint import check_unused, require_trained, untrained_weights
from enginery.export.config import ExportConfig
from enginery.export.encoder_configs import encoder_config, needs_encoder_config
from enginery.export.generation import arrange_for_generation
from enginery.export.graphs import ExportedModel, TracedInputs, list_graphs
from enginery.export.model_inputs import TYPES, InputChanges, compare_inputs
from enginery.export.native.export import has_soft_cap
from enginery.export.native.inputs import with_image_size
from enginery.export.native.tasks import choose_task
from enginery.export.positions import find_length_limit
from enginery.export.sentence_modules import write_module_weights
from enginery.export.side_files import copy_side_files, require_equal_processor
from enginery.export.tokenizer import write_tokenizer
from enginery.export.used_weights import UsedWeights, require_used
from enginery.export.vocabulary import check_vocabulary, embedding_rows, require_padding_token
from enginery.runtime.image.processor import PIXEL_MASK
from enginery.runtime.pytorch.classes import default_class, feature_class
from enginery.runtime.pytorch.config import load_config
from enginery.runtime.pytorch.runner import TorchOptions, load_pytorch


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
    task = choose_task(
        config.task, settings, supported=_tasks_of_type(settings.model_type), exporter="Optimum"
    )
    if library == "transformers" and not _is_encoder(source, config, task):
        task = _supported_task(
            model_type,
            task,
            requested=config.task,
            trust_remote_code=config.trust_remote_code,
        )
    _check_vocoder(model_type, vocoder)
    report_phase(f"tracing {model_type} for {task}")
    # Other tasks have outputs of their own: the objectness of OWLv2 is no answer of its pipeline.
    used = UsedWeights(is_on=task == "feature-extraction")
    with _traced_inputs(used) as traced:
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
        unused_notes = check_unused(model, source, allow_unused=config.allow_unused)
        length_limit, limit_notes = find_length_limit(model, settings)
        _export(model, source, config, out, task=task, vocoder=vocoder)
        untrained = untrained_weights(model)
        rows = embedding_rows(model)
        use_notes = require_used(
            model,
            used,
            [out / file for file in list_graphs(out)],
            do="Optimum exports fewer outputs than the class has: try --exporter dynamo.",
        )
        unused = getattr(model, "unused_tensors", ())
        config_notes = (*getattr(model, "config_notes", ()), *unused_notes, *limit_notes)
        # What follows may load the graphs, whose weights would be in memory twice.
        del model
    gc.collect()
    if not (source / PreprocessorConfig.FILE).is_file():
        (out / PreprocessorConfig.FILE).unlink(missing_ok=True)
    if library == "timm":
        _write_timm_processor(source, out)
    copy_side_files(source, out, code=config.trust_remote_code)
    require_equal_processor(out)
    notes = [
        *use_notes,
        *write_module_weights(source, out),
        *write_tokenizer(source, out, trust_remote_code=config.trust_remote_code),
        *check_vocabulary(out, rows),
    ]
    generates = task.endswith("-with-past") and task != "feature-extraction-with-past"
    if generates and config.layout == "enginery":
        report_phase("arranging the graphs for generation")
        notes = [*notes, *arrange_for_generation(out)]
    files = list_graphs(out)
    notes += [note for file in files for note in _drop_unnamed_outputs(out / file)]
    require_trained(untrained, [out / file for file in files], source, task, unused)
    return ExportedModel(
        files=files,
        task=task,
        model_type=model_type,
        library=library,
        traced=traced,
        from_registry=True,
        config=with_image_size(settings, source),
        length_limit=length_limit,
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
    if task == "text-classification":
        require_padding_token(model, source, trust_remote_code=config.trust_remote_code)
    model.config.use_cache = task.endswith("with-past")
    if has_soft_cap(model.config):
        model.set_attn_implementation("eager")  # the others leave the soft cap out
    settings = with_image_size(ModelConfig.read(source, error=SourceError), source)
    limits = FeedLimits.from_config(settings)
    longest = limits.position_limit or sys.maxsize
    if task.endswith("-with-past"):  # the past is as long as the tokens after it
        longest //= 2
    shapes = {"sequence_length": min(DEFAULT_DUMMY_SHAPES["sequence_length"], longest)}
    # An encoder's outputs are those of its class.
    encoder = encoder_config(model, config.dtype) if task == "feature-extraction" else None
    takes_pixels = (source / PreprocessorConfig.FILE).is_file()
    config_class = type(encoder) if encoder is not None else _config_class(model, task)
    inputs = _inputs_as_given(
        config_class, model, source, task, trust_remote_code=config.trust_remote_code
    )
    with (
        inputs,
        _masks_for_any_length(),
        _processor_alone(source, settings, limits) as processor,
    ):
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
            custom_onnx_configs={"model": encoder} if encoder is not None else None,
            **shapes,
        )


def obstacle_of_type(source: Path, config: ExportConfig) -> str:
    """Return why Optimum cannot export a model of a type that transformers can load, or nothing."""
    settings = ModelConfig.read(source, error=SourceError)
    model_type = settings.model_type
    is_known = settings.architecture or _tasks_of_type(model_type)
    can_load = model_type in CONFIG_MAPPING or config.trust_remote_code
    if is_known or not can_load or _is_encoder(source, config, "feature-extraction"):
        return ""
    return f"Optimum's registry has no model type '{model_type}'"


def _is_encoder(source: Path, config: ExportConfig, task: str) -> bool:
    """Return True for an encoder that is exported without Optimum's registry."""
    described = ModelConfig.read(source, error=SourceError)
    is_candidate = described.names_encoder or "Transformer" in module_kinds(source)
    is_known = described.model_type in CONFIG_MAPPING
    if task != "feature-extraction" or config.trust_remote_code or not (is_candidate and is_known):
        return False
    settings = load_config(source, trust_remote_code=False).config
    model_class = feature_class(source, settings) or default_class(settings)
    return model_class is not None and needs_encoder_config(model_class, settings)


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


def _config_class(model: Any, task: str) -> Any:
    """Return Optimum's class of export configurations for a model."""
    library = "timm" if type(model).__module__.startswith("timm") else "transformers"
    constructor = TasksManager.get_exporter_config_constructor(
        "onnx", model=model, task=task, library_name=library
    )
    return getattr(constructor, "func", constructor)


@contextmanager
def _inputs_as_given(
    config_class: Any, model: Any, source: Path, task: str, *, trust_remote_code: bool
) -> Iterator[None]:
    """Let a graph have the inputs that transformers' tokenizer or processor gives to the model.

    Optimum's configuration of a model type, `config_class`, lists its inputs. See `model_inputs`.
    """
    declared = config_class.inputs
    changes: dict[tuple[str, ...], InputChanges] = {}

    def inputs(self: Any) -> dict[str, dict[int, str]]:
        axes: dict[str, dict[int, str]] = dict(declared.fget(self))
        names = tuple(axes)
        if names not in changes:
            changes[names] = compare_inputs(
                model, source, task, names, trust_remote_code=trust_remote_code
            )
        for name in changes[names].dropped:
            del axes[name]
        if TYPES in changes[names].added:
            axes[TYPES] = dict(axes["input_ids"])
        if PIXEL_MASK in changes[names].added:
            axes[PIXEL_MASK] = {0: "batch_size", 1: "height", 2: "width"}
        return axes

    is_own = "inputs" in vars(config_class)
    config_class.inputs = property(inputs)
    try:
        yield
    finally:
        if is_own:
            config_class.inputs = declared
        else:
            del config_class.inputs


@contextmanager
def _traced_inputs(used: UsedWeights) -> Iterator[dict[str, TracedInputs]]:
    """Yield the inputs that graphs are traced with, by file; collect the weights in use.

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
        program = original(model, args, f=f, dynamic_axes=dynamic_axes, **options)
        # Afterwards: LeViT keeps tensors of its first run, which in a trace must have no gradient.
        used.add(model, args[0], Path(f).name)
        return program

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


def _tasks_of_type(model_type: str) -> list[str]:
    """Return the tasks for which Optimum exports a model type; nothing if it lacks the type."""
    if model_type not in TasksManager._SUPPORTED_MODEL_TYPE:  # noqa: SLF001  no accessor
        return []
    return list(
        TasksManager.get_supported_tasks_for_model_type(
            model_type, "onnx", library_name="transformers"
        )
    )


def _supported_task(
    model_type: str, task: str, *, requested: str, trust_remote_code: bool = False
) -> str:
    """Return the registry's task for this model type; `auto` prefers generation with a KV cache.

    Raises:
        ExportError: the registry lacks the model type or the task.
    """
    tasks = _tasks_of_type(model_type)
    if not tasks:
        if model_type not in CONFIG_MAPPING and not trust_remote_code:
            raise ExportError(
                f"transformers' AutoConfig has no model type '{model_type}'.",
                do="If it is a part of a model, such as a tower, export the whole model.",
            )
        raise ExportError(
            f"Optimum's registry has no model type '{model_type}'.",
            do="Try --exporter dynamo, torch's own exporter.",
        )
    # The features of a text need no cache: its tokens are known.
    if requested == "auto" and task != "feature-extraction" and f"{task}-with-past" in tasks:
        return f"{task}-with-past"
    if task not in tasks:
        raise ExportError(
            f"Optimum exports {model_type} for {', '.join(tasks)}, not for {task}"
            f"{nearest(task, tasks)}",
            do="Choose another --task, or try --exporter dynamo.",
        )
    return task

"""Export through Optimum's registry of model types and tasks.

Takes a model directory; leaves its graphs and Optimum's `config.json` in the staging directory.
Runs in the child process of the stage: it imports torch, transformers and optimum.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from enginery.core.errors import ExportError, MissingPackageError, SourceError, nearest
from enginery.core.model_files import ModelConfig, PreprocessorConfig
from enginery.export.config import ExportConfig
from enginery.export.protocol import ExportedModel
from enginery.export.side_files import copy_side_files

try:
    import transformers
    from optimum.exporters.onnx import onnx_export_from_model
    from optimum.exporters.tasks import TasksManager
    from optimum.utils.save_utils import maybe_load_preprocessors

    from enginery.runtime.torch import load_pytorch
except ImportError as error:
    raise MissingPackageError(
        error.name or "optimum", extra="export", purpose="Exporting a model"
    ) from error


def export_with_optimum(
    source: Path,
    config: ExportConfig,
    out: Path,
    report_phase: Callable[[str], None],
    *,
    pickled: bool,
) -> ExportedModel:
    """Traces the model with Optimum's configuration of its type.

    Raises:
        ExportError: the registry lacks the model type or the task.
    """
    if config.dtype == "bf16" and config.device == "cpu":
        raise ExportError(
            "Optimum runs the graph while it exports, and ONNX Runtime has no BF16 kernels on "
            "the CPU.",
            do="Use --device cuda or --exporter dynamo.",
        )
    settings = ModelConfig.read(source, error=SourceError)
    library = "timm" if settings.architecture else "transformers"
    model_type = settings.model_type or library
    task = choose_task(config.task, settings)
    if library == "transformers":
        task = _supported_task(model_type, task, asked=config.task)
    report_phase(f"tracing {model_type} for {task}")
    _export(source, config, out, task=task, library=library, pickled=pickled)
    gc.collect()
    copy_side_files(source, out, code=config.trust_remote_code)
    _convert_tokenizer(source, out)
    files = sorted(path.relative_to(out).as_posix() for path in out.rglob("*.onnx"))
    return ExportedModel(
        files=files,
        task=task,
        model_type=model_type,
        library=library,
        fixed_dims=fixed_dims(settings),
        config=with_image_size(settings, source),
        notes=[f"task {task}: {'inferred' if config.task == 'auto' else 'as asked'}"],
    )


def _export(
    source: Path, config: ExportConfig, out: Path, *, task: str, library: str, pickled: bool
) -> None:
    """What Optimum's `main_export` does, on files that are here.

    It would load tokenizers twice, before and behind the trace, and hold them while memory peaks.
    """
    model = load_pytorch(
        source,
        task,
        precision=config.dtype,
        library=library,
        pickled=pickled,
        trust_remote_code=config.trust_remote_code,
        device=config.device,
        attention="",
    )
    if task == "text-classification" and getattr(model.config, "pad_token_id", None) is None:
        model.config.pad_token_id = _pad_token_id(source)
    model.config.use_cache = task.endswith("with-past")
    # Optimum saves tokenizers it finds under this name; ours are copied as they are.
    model.config._name_or_path = ""  # noqa: SLF001
    takes_pixels = (source / "preprocessor_config.json").is_file()
    onnx_export_from_model(
        model=model,
        output=out,
        opset=config.opset,
        task=task,
        device=config.device,
        no_post_process=not config.post_process,
        # Image sizes are found there; texts need nothing from their tokenizer.
        preprocessors=maybe_load_preprocessors(str(source)) if takes_pixels else [],
        do_validation=False,  # the validate stage is stricter, and fails
    )


def _pad_token_id(source: Path) -> int:
    """The padding id of the tokenizer, for a classifier whose config has none.

    Raises:
        ExportError: the tokenizer has none either.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(source))
    if tokenizer.pad_token_id is None:
        raise ExportError(
            f"a text classifier needs a padding token, and neither config.json nor the tokenizer "
            f"of {source} names one.",
            do="Set pad_token_id in config.json.",
        )
    return int(tokenizer.pad_token_id)


def _convert_tokenizer(source: Path, out: Path) -> None:
    """Makes tokenizer.json for a model that has only its slow tokenizer's files."""
    names = ("tokenizer_config.json", "vocab.txt", "spiece.model", "tokenizer.model", "vocab.json")
    if (out / "tokenizer.json").is_file() or not any((source / name).is_file() for name in names):
        return
    # A tokenizer that has no fast form cannot be converted: load_model says so when asked.
    with suppress(Exception):
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(source))
        tokenizer.backend_tokenizer.save(str(out / "tokenizer.json"))


def choose_task(asked: str, settings: ModelConfig) -> str:
    """Optimum's name for the task: a synonym resolved, or inferred from the model's class.

    Raises:
        ExportError: no such task, or the class does not tell.
    """
    tasks = sorted(TasksManager.get_all_tasks())
    if asked != "auto":
        base = TasksManager.map_from_synonym(asked)
        if base.removesuffix("-with-past") not in tasks:
            raise ExportError(
                f"unknown task '{asked}'{nearest(asked, tasks)}", do=f"Known: {', '.join(tasks)}."
            )
        return str(base)
    if settings.architecture:  # timm's config.json
        return "image-classification"
    names = settings.architectures
    model_class = getattr(transformers, names[0], None) if names else None
    if model_class is None:
        raise ExportError(
            f"the task cannot be inferred: config.json names the class "
            f"{names[0] if names else '(none)'}, which transformers does not have.",
            do=f"Name it with --task, one of: {', '.join(tasks)}.",
        )
    try:
        # The public question is only answered for Hub ids, and these files are on disk.
        task = TasksManager._infer_task_from_model_or_model_class(model_class=model_class)  # noqa: SLF001
    except ValueError as error:
        raise ExportError(
            f"the task cannot be inferred from the class {names[0]}.",
            do=f"Name it with --task, one of: {', '.join(tasks)}.",
        ) from error
    return str(task)


def _supported_task(model_type: str, task: str, *, asked: str) -> str:
    """The task as the registry has it for this model type; generation keeps its past by default."""
    known = TasksManager._SUPPORTED_MODEL_TYPE  # noqa: SLF001  there is no public question for it
    if model_type not in known:
        raise ExportError(
            f"Optimum's registry has no model type '{model_type}'.",
            do="Try --exporter dynamo, torch's own exporter.",
        )
    tasks = TasksManager.get_supported_tasks_for_model_type(
        model_type, "onnx", library_name="transformers"
    )
    if asked == "auto" and f"{task}-with-past" in tasks:
        return f"{task}-with-past"
    if task not in tasks:
        raise ExportError(
            f"Optimum exports {model_type} for {', '.join(tasks)}, not for {task}"
            f"{nearest(task, tasks)}",
            do="Name another --task, or try --exporter dynamo.",
        )
    return task


def fixed_dims(settings: ModelConfig) -> dict[str, int]:
    """Dims that the weights fix although the tracer leaves them dynamic."""
    return {"channels": settings.num_channels} if settings.num_channels else {}


def with_image_size(settings: ModelConfig, source: Path) -> ModelConfig:
    """The config with `image_size`: its own, or else what its image processor makes."""
    if settings.image_size is not None or not settings.num_channels:
        return settings
    processor = PreprocessorConfig.read(source, error=SourceError)
    size = (processor.crop_size if processor.do_center_crop else None) or processor.size
    return settings.model_copy(update={"image_size": size}) if size else settings

"""The reference: the same model in PyTorch, from the artifact's own source.

Takes an artifact's manifest and the model's source; feeds in, outputs out, by the graph's names.

    >>> with TorchRunner(source, artifact.manifest, precision="fp32") as reference:
    ...     outputs = reference(feeds)

A model of one graph runs as it is, with eager attention. A model that Optimum cuts into several
graphs, or feeds its past, runs through Optimum's own cut of it; `TorchRunner.notes` says so.
This is the one room of the runtime that imports torch, transformers and optimum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.closing import Closing
from enginery.core.errors import ArtifactError, ExportError, InputError, MissingPackageError
from enginery.core.manifest import GraphRecord, Manifest
from enginery.core.source import ModelSource

try:
    import torch
    from optimum.exporters.tasks import TasksManager
except ImportError as error:
    raise MissingPackageError(
        error.name or "torch", extra="export", purpose="Running the PyTorch reference"
    ) from error

Feeds = Mapping[str, NDArray[Any]]
Outputs = dict[str, NDArray[Any]]

_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


def load_pytorch(
    path: Path, task: str, *, precision: str, library: str, trust_remote_code: bool, device: str
) -> Any:
    """The model of a directory in evaluation mode, with eager attention.

    Raises:
        ExportError: PyTorch cannot load it.
    """
    with _quiet():
        try:
            model = TasksManager.get_model_from_task(
                task,
                str(path),
                framework="pt",
                library_name=library,
                device=device,
                torch_dtype=torch.float32 if precision == "fp64" else _DTYPES[precision],
                trust_remote_code=trust_remote_code,
                attn_implementation="eager",
            )
        except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
            first = _first_line(error)
            raise ExportError(f"PyTorch cannot load {path} for {task}: {first}") from error
    return model.to(_DTYPES[precision]).eval()


class TorchRunner(Closing):
    """One model in PyTorch, answering for one graph. A context manager; closing frees it."""

    def __init__(
        self,
        source: ModelSource,
        manifest: Manifest,
        *,
        graph: str = "",
        precision: str = "fp32",
        device: str = "cpu",
    ) -> None:
        """Loads the model.

        Args:
        source: the model, as `resolve_record(manifest.source)` finds it.
        manifest: of the artifact that is compared.
        graph: which of several graphs; empty for the first.
        precision: fp64, fp32, fp16 or bf16.
        device: cpu, cuda or cuda:N.

        Raises:
            ArtifactError: there is no such graph.
            ExportError: PyTorch cannot load the model.
        """
        graphs = {record.file: record for record in manifest.graphs}
        if graph and graph not in graphs:
            raise ArtifactError(f"there is no graph '{graph}'; there are {', '.join(graphs)}.")
        self.record: GraphRecord = graphs[graph or manifest.graphs[0].file]
        self.notes: list[str] = []
        self._device = device
        self._float = _DTYPES[precision]
        self._model = load_pytorch(
            source.path,
            manifest.task,
            precision=precision,
            library=manifest.library if manifest.library == "timm" else "transformers",
            trust_remote_code=manifest.trust_remote_code,
            device=device,
        )
        cut = len(graphs) > 1 or any("past" in spec.name for spec in self.record.inputs)
        self._parts: dict[str, tuple[Any, Any]] = {}
        if cut:
            self._parts = _optimum_parts(self._model, manifest, precision)
            self.notes.append("the reference is PyTorch through Optimum's cut of the model")

    def __call__(self, feeds: Feeds) -> Outputs:
        """Runs the model on the feeds of the graph.

        Returns:
            Outputs by the graph's names, as float32 or wider: numpy has no bfloat16.

        Raises:
            InputError: PyTorch itself rejects the feeds.
        """
        tensors = {name: self._tensor(array) for name, array in feeds.items()}
        try:
            with torch.inference_mode(), _quiet():
                found = self._run_part(tensors) if self._parts else self._run_whole(tensors)
        except (RuntimeError, IndexError, ValueError, TypeError, AssertionError) as error:
            shapes = ", ".join(f"{name} {array.shape}" for name, array in feeds.items())
            first = _first_line(error)
            raise InputError(f"PyTorch rejects the inputs {shapes}: {first}") from error
        return {
            spec.name: _array(found[spec.name])
            for spec in self.record.outputs
            if spec.name in found
        }

    def close(self) -> None:
        """Frees the model."""
        self._model = None
        self._parts = {}

    def _tensor(self, array: NDArray[Any]) -> Any:
        tensor = torch.from_numpy(np.array(array)).to(self._device)
        return tensor.to(self._float) if tensor.is_floating_point() else tensor

    def _run_whole(self, tensors: dict[str, Any]) -> dict[str, Any]:
        if type(self._model).__module__.startswith("timm"):
            return {"logits": self._model(tensors["pixel_values"])}
        return dict(self._model(**tensors, return_dict=True).items())

    def _run_part(self, tensors: dict[str, Any]) -> dict[str, Any]:
        stem = Path(self.record.file).stem
        if "use_cache_branch" in tensors:  # Optimum's merged decoder holds both branches
            with_past = bool(tensors.pop("use_cache_branch").item())
            stem = "decoder_with_past_model" if with_past else "decoder_model"
            if not with_past:
                tensors = {n: t for n, t in tensors.items() if not n.startswith("past_")}
        model, config = self._parts[stem]
        inputs = _as_traced(tensors, config)
        if "encoder_outputs" in config.torch_to_onnx_input_map.keys() - inputs.keys():
            # With a past, the encoder's keys and values come from there. PyTorch still wants
            # something to tell it that the encoder has run.
            rows, length = tensors["encoder_attention_mask"].shape
            width = self._model.config.hidden_size
            inputs["encoder_outputs"] = (torch.zeros(rows, length, width), None, None)
        with config.patch_model_for_export(model, model_kwargs={}):
            found = model(**config.rename_ambiguous_inputs(inputs))
        flat: dict[str, Any] = {}
        for name, value in found.items():
            graph_name = "present" if name == "past_key_values" else name
            if isinstance(value, (list, tuple)):
                graph_name = config.torch_to_onnx_output_map.get(graph_name, graph_name)
                flat.update(config.flatten_output_collection_property(graph_name, value))
            else:
                flat[graph_name] = value
        return flat


def _optimum_parts(model: Any, manifest: Manifest, precision: str) -> dict[str, tuple[Any, Any]]:
    """Each graph's PyTorch module with Optimum's configuration of it, by the graph's stem."""
    import optimum.exporters.onnx.model_configs  # noqa: F401  registers the model types
    from optimum.exporters.onnx.utils import _get_submodels_and_onnx_configs

    model.config.use_cache = manifest.task.endswith("with-past")
    _, parts = _get_submodels_and_onnx_configs(
        model=model,
        task=manifest.task,
        monolith=False,
        custom_onnx_configs={},
        custom_architecture=False,
        float_dtype="fp32" if precision == "fp64" else precision,
        fn_get_submodels=None,
        preprocessors=None,
        _variant="default",
        library_name="transformers",
        model_kwargs={},
    )
    return dict(parts)


def _as_traced(tensors: dict[str, Any], config: Any) -> dict[str, Any]:
    """The graph's inputs as Optimum's patched models take them.

    PyTorch's names, the encoder's output in its tuple, and `past_key_values.0.key`, … as a tuple
    a layer.
    """
    torch_names = {graph: name for name, graph in config.torch_to_onnx_input_map.items()}
    layers: dict[str, list[Any]] = {}
    plain: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if name.startswith("past_key_values."):
            layers.setdefault(name.split(".")[1], []).append(tensor)
        elif torch_names.get(name) == "encoder_outputs":
            plain["encoder_outputs"] = (tensor, None, None)
        else:
            plain[torch_names.get(name, name)] = tensor
    return {**plain, "past_key_values": [tuple(v) for v in layers.values()]} if layers else plain


def _array(tensor: Any) -> NDArray[Any]:
    tensor = tensor.detach().cpu()
    if tensor.dtype in (torch.float16, torch.bfloat16):
        tensor = tensor.float()
    array: NDArray[Any] = tensor.numpy()
    return array


def _first_line(error: BaseException) -> str:
    """The first line of what an error says, or its name where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' advice on the log; errors still come as exceptions."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)

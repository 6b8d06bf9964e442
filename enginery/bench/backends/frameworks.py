"""PyTorch and Optimum as contenders. The one module of this stage that imports them.

>>> model = PyTorchModel(artifact, record, "pytorch", "cpu", threads=0)
>>> model.prepared(feeds)()
{'last_hidden_state': array(…)}

PyTorch runs with the attention that transformers gives it by default (SDPA, where the model has
it), not with the eager attention of the validation's reference: it is what a user would have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optimum.onnxruntime as optimum_ort
import torch
from numpy.typing import NDArray

from enginery.bench.backends.backend import Run, torch_tools
from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.fingerprint import runtime_version, tool_versions
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import InputError, ProviderError
from enginery.core.model.feeds import Feeds
from enginery.core.model.source import resolve_record
from enginery.runtime.providers.selection import REQUESTED
from enginery.runtime.providers.specification import ProviderSpec
from enginery.runtime.torch_runner import TorchRunner, guarded, load_pytorch

_CLASSES = {
    "feature-extraction": "FeatureExtraction",
    "sentence-similarity": "FeatureExtraction",
    "text-classification": "SequenceClassification",
    "token-classification": "TokenClassification",
    "question-answering": "QuestionAnswering",
    "fill-mask": "MaskedLM",
    "multiple-choice": "MultipleChoice",
    "image-classification": "ImageClassification",
    "semantic-segmentation": "SemanticSegmentation",
    "audio-classification": "AudioClassification",
}


class PyTorchModel:
    """The artifact's own source in PyTorch, as it was trained, in FP16, or compiled."""

    def __init__(
        self,
        artifact: Artifact,
        record: GraphRecord,
        kind: str,
        device: str,
        *,
        threads: int,
        trust_remote_code: bool,
        allow_pickle: bool,
    ) -> None:
        if threads:
            torch.set_num_threads(threads)
        if device != "cpu" and not torch.cuda.is_available():
            raise ProviderError(
                f"{kind}: the installed torch {torch.__version__} sees no GPU.",
                do="Install a build of torch for this CUDA, or leave it out of --against.",
            )
        manifest = artifact.manifest
        source = resolve_record(manifest.source, allow_pickle=allow_pickle)
        self._device = device
        self._dtype = torch.float16 if kind == "pytorch-fp16" else torch.float32
        self._names = [spec.name for spec in record.outputs]
        self._model: Any = None
        self._runner: TorchRunner | None = None
        precision = "fp16" if kind == "pytorch-fp16" else "fp32"
        with guarded(source.path, trust_remote_code=trust_remote_code):
            if _is_whole(artifact, record):
                self._model = load_pytorch(
                    source.path,
                    manifest.task,
                    precision=precision,
                    library="transformers",
                    pickled=source.pickled,
                    trust_remote_code=trust_remote_code,
                    device=device,
                    attention="",  # transformers' own choice
                )
                config = getattr(self._model, "config", None)
                attention = getattr(config, "_attn_implementation", "") or "its own"
                self.notes = [f"attention: {attention}; {torch.get_num_threads()} threads"]
            elif kind == "pytorch-compile":
                raise ProviderError(
                    f"{kind}: {record.file} is a part of its model, and that is not compiled here."
                )
            else:
                self._runner = TorchRunner(
                    source,
                    manifest,
                    graph=record.file,
                    precision=precision,
                    trust_remote_code=trust_remote_code,
                    device=device,
                )
                self.notes = [*self._runner.notes, "attention: eager"]
        # Outside: it runs a compiler. The model's own files are not read any more.
        if kind == "pytorch-compile":
            self._model.compile()
        self.providers: list[dict[str, Any]] = []
        self.tools = torch_tools()

    def prepared(self, feeds: Feeds) -> Run:
        """One forward pass, from numpy to numpy."""
        if self._runner is not None:
            runner = self._runner
            return lambda: runner(feeds)
        return lambda: self._forward(feeds)

    def facts(self) -> dict[str, Any]:
        """Threads and device."""
        return {"threads": torch.get_num_threads(), "device": self._device}

    def close(self) -> None:
        """Frees the model."""
        self._model = self._runner = None

    def _forward(self, feeds: Feeds) -> object:
        try:
            with torch.inference_mode():
                tensors = {name: self._tensor(array) for name, array in feeds.items()}
                found = self._model(**tensors, return_dict=True)
                # Copying to the host waits for the GPU.
                return [found[name].cpu().numpy() for name in self._names if name in found]
        except (RuntimeError, IndexError, ValueError, TypeError, AssertionError) as error:
            shapes = ", ".join(f"{name} {array.shape}" for name, array in feeds.items())
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise InputError(f"PyTorch rejects the inputs {shapes}: {first}") from error

    def _tensor(self, array: NDArray[Any]) -> Any:
        tensor = torch.from_numpy(array).to(self._device)
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor


def _is_whole(artifact: Artifact, record: GraphRecord) -> bool:
    """Whether the graph is a transformers model as it stands, and not a part that Optimum cut."""
    past = any("past" in spec.name for spec in record.inputs)
    manifest = artifact.manifest
    return len(manifest.graphs) == 1 and not past and manifest.library != "timm"


class OptimumModel:
    """The artifact's graph through `optimum.onnxruntime.ORTModelFor…`, with its defaults.

    It is given the first provider, with its options; IOBinding is its own choice unless it is off.
    """

    def __init__(
        self,
        artifact: Artifact,
        record: GraphRecord,
        specs: Sequence[ProviderSpec],
        *,
        threads: int,
        io_binding: bool,
        trust_remote_code: bool,
    ) -> None:
        import onnxruntime

        task = artifact.manifest.task
        if task not in _CLASSES:
            raise ProviderError(f"optimum has no ORTModel for the task {task}.")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        provider, given = specs[0].full_name, specs[0].options
        cls = getattr(optimum_ort, f"ORTModelFor{_CLASSES[task]}")
        try:
            with guarded(artifact.path, trust_remote_code=trust_remote_code):
                self._model: Any = cls.from_pretrained(
                    str(artifact.path),
                    file_name=record.file,
                    provider=provider,
                    provider_options=dict(given),
                    session_options=options,
                    local_files_only=True,
                    use_io_binding=None if io_binding else False,
                    trust_remote_code=trust_remote_code,
                )
        except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ProviderError(f"optimum cannot load {artifact.path}: {first}") from error
        found = self._model.providers
        if provider not in found:
            raise ProviderError(
                f"optimum runs {artifact.path} on {', '.join(found)}, not on {provider}."
            )
        self.providers = [
            {
                "name": name,
                "reason": REQUESTED if name == provider else "added by Optimum",
                "options": given if name == provider else {},
            }
            for name in found
        ]
        self.tools = {**runtime_version(), **tool_versions(["optimum", "optimum-onnx", "torch"])}
        whose = ", its default" if io_binding else ", as requested"
        self.notes = [f"IOBinding {'on' if self._model.use_io_binding else 'off'}{whose}"]

    def prepared(self, feeds: Feeds) -> Run:
        """One forward pass, from tensors on the host to tensors on the host."""
        tensors = {name: torch.from_numpy(array) for name, array in feeds.items()}
        device = self._model.device

        def run() -> object:
            try:
                moved = {name: tensor.to(device) for name, tensor in tensors.items()}
                with torch.inference_mode():
                    found = self._model(**moved)
                return [value.cpu() for value in found.values() if hasattr(value, "cpu")]
            except Exception as error:  # ONNX Runtime raises many unrelated types
                shapes = ", ".join(f"{name} {array.shape}" for name, array in feeds.items())
                raise InputError(f"optimum fails on {shapes}: {error}") from error

        return run

    def facts(self) -> dict[str, Any]:
        """Nothing beyond its providers."""
        return {}

    def close(self) -> None:
        """Frees the session."""
        self._model = None

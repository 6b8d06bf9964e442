"""The backends PyTorch and Optimum. No other module of this stage imports these libraries.

PyTorch runs with the attention that transformers chooses by default, which is SDPA if the model
supports it, because that is what users run. Validation uses eager attention as its reference.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from numpy.typing import NDArray

from enginery.bench.backends.backend import BackendPlan, Run
from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.fingerprint import runtime_version, tool_versions
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import InputError, ProviderError
from enginery.core.model.feeds import Feeds
from enginery.core.model.source import resolve_record
from enginery.core.trust.resource_limits import ResourceLimits, limited_call
from enginery.runtime.providers.selection import REQUESTED
from enginery.runtime.pytorch.runner import TorchOptions, TorchRunner, guarded, load_pytorch

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


class PyTorchBackend:
    """The artifact's source model in PyTorch: in FP32, in FP16, or compiled."""

    def __init__(self, artifact: Artifact, record: GraphRecord, plan: BackendPlan) -> None:
        kind, device = plan.kind, plan.device
        if plan.threads:
            torch.set_num_threads(plan.threads)
        if device != "cpu" and not torch.cuda.is_available():
            raise ProviderError(
                f"{kind}: the installed torch {torch.__version__} does not find a GPU.",
                do="Install a build of torch for this version of CUDA, or leave the backend out of "
                "--against.",
            )
        manifest = artifact.manifest
        source = resolve_record(manifest.source, allow_pickle=plan.allow_pickle)
        self._device = device
        self._dtype = torch.float16 if kind == "pytorch-fp16" else torch.float32
        self._names = [spec.name for spec in record.outputs]
        self._model: Any = None
        self._runner: TorchRunner | None = None
        torch_options = TorchOptions(
            precision="fp16" if kind == "pytorch-fp16" else "fp32",
            trust_remote_code=plan.trust_remote_code,
            device=device,
        )
        files = (source.path / name for name in source.record.files)
        file_bytes = sum(file.stat().st_size for file in files if file.is_file())
        limits = ResourceLimits.of_checkpoint(file_bytes=file_bytes)
        with (
            limited_call(kind, lambda: limits),
            guarded(source.path, trust_remote_code=plan.trust_remote_code),
        ):
            if _is_whole(artifact, record):
                self._model = load_pytorch(
                    source.path,
                    manifest.task,
                    # Without a name, transformers chooses the attention.
                    replace(torch_options, pickled=source.pickled, attention=""),
                )
                config = getattr(self._model, "config", None)
                attention = getattr(config, "_attn_implementation", "") or "its own"
                self.notes = [f"attention: {attention}; {torch.get_num_threads()} threads"]
            elif kind == "pytorch-compile":
                raise ProviderError(
                    f"{kind}: {record.file} is only a part of its model, and only whole models are "
                    "compiled."
                )
            else:
                self._runner = TorchRunner(
                    source,
                    manifest,
                    torch_options,
                    graph=record.file,
                )
                self.notes = [*self._runner.notes, "attention: eager"]
        # Outside `guarded`, because it runs a compiler. The model's files are not read any more.
        if kind == "pytorch-compile":
            self._model.compile()
        self.providers: list[dict[str, Any]] = []
        self.tools = tool_versions(["torch", "transformers"])

    def prepare(self, feeds: Feeds) -> Run:
        """Return a function that runs a forward pass, from numpy arrays to numpy arrays."""
        if self._runner is not None:
            runner = self._runner
            return lambda: runner(feeds)
        return lambda: self._forward(feeds)

    def facts(self) -> dict[str, Any]:
        """Return the number of threads and the device."""
        return {"threads": torch.get_num_threads(), "device": self._device}

    def close(self) -> None:
        """Free the model."""
        self._model = self._runner = None

    def _forward(self, feeds: Feeds) -> object:
        try:
            with torch.inference_mode():
                tensors = {name: self._tensor(array) for name, array in feeds.items()}
                outputs = self._model(**tensors, return_dict=True)
                # Copying to the host waits for the GPU.
                return [outputs[name].cpu().numpy() for name in self._names if name in outputs]
        except (RuntimeError, IndexError, ValueError, TypeError, AssertionError) as error:
            shapes = ", ".join(f"{name} {array.shape}" for name, array in feeds.items())
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise InputError(f"PyTorch rejects the inputs {shapes}: {first}") from error

    def _tensor(self, array: NDArray[Any]) -> Any:
        tensor = torch.from_numpy(array).to(self._device)
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor


def _is_whole(artifact: Artifact, record: GraphRecord) -> bool:
    """Return True if the graph is a whole transformers model, not a part that Optimum split off."""
    past = any("past" in spec.name for spec in record.inputs)
    manifest = artifact.manifest
    return len(manifest.graphs) == 1 and not past and manifest.library != "timm"


class OptimumBackend:
    """Inference through `optimum.onnxruntime.ORTModelFor…`, with Optimum's defaults.

    It gets the first provider with its options. Unless IOBinding is turned off, Optimum decides
    about it.
    """

    def __init__(self, artifact: Artifact, record: GraphRecord, plan: BackendPlan) -> None:
        import onnxruntime
        import optimum.onnxruntime as optimum_ort  # PyTorch's backend runs without it

        task = artifact.manifest.task
        if task not in _CLASSES:
            raise ProviderError(f"Optimum has no ORTModel for the task {task}.")
        session_options = onnxruntime.SessionOptions()
        session_options.intra_op_num_threads = plan.threads
        session_options.log_severity_level = 3
        spec, io_binding = plan.providers[0], plan.io_binding
        provider, provider_options = spec.full_name, spec.options
        cls = getattr(optimum_ort, f"ORTModelFor{_CLASSES[task]}")
        try:
            with guarded(artifact.path, trust_remote_code=plan.trust_remote_code):
                self._model: Any = cls.from_pretrained(
                    str(artifact.path),
                    file_name=record.file,
                    provider=provider,
                    provider_options=dict(provider_options),
                    session_options=session_options,
                    local_files_only=True,
                    use_io_binding=None if io_binding else False,
                    trust_remote_code=plan.trust_remote_code,
                )
        except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ProviderError(f"Optimum cannot load {artifact.path}: {first}") from error
        providers = self._model.providers
        if provider not in providers:
            raise ProviderError(
                f"Optimum runs {artifact.path} on {', '.join(providers)}, expected {provider}."
            )
        self.providers = [
            {
                "name": name,
                "reason": REQUESTED if name == provider else "added by Optimum",
                "options": provider_options if name == provider else {},
            }
            for name in providers
        ]
        self.tools = {**runtime_version(), **tool_versions(["optimum", "optimum-onnx", "torch"])}
        whose = ", its default" if io_binding else ", as requested"
        self.notes = [f"IOBinding {'on' if self._model.use_io_binding else 'off'}{whose}"]

    def prepare(self, feeds: Feeds) -> Run:
        """Return a function that runs a forward pass, from CPU tensors to CPU tensors."""
        tensors = {name: torch.from_numpy(array) for name, array in feeds.items()}
        device = self._model.device

        def run() -> object:
            try:
                moved = {name: tensor.to(device) for name, tensor in tensors.items()}
                with torch.inference_mode():
                    outputs = self._model(**moved)
                return [value.cpu() for value in outputs.values() if hasattr(value, "cpu")]
            except Exception as error:  # ONNX Runtime raises many unrelated types
                shapes = ", ".join(f"{name} {array.shape}" for name, array in feeds.items())
                raise InputError(f"Optimum fails on {shapes}: {error}") from error

        return run

    def facts(self) -> dict[str, Any]:
        """Return an empty dict."""
        return {}

    def close(self) -> None:
        """Free the session."""
        self._model = None

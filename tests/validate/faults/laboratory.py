"""Plant faults in one artifact, and look at the verdict and at the effect."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx

from enginery import validate_model
from enginery.core.artifact.artifact import Artifact, commit_artifact
from enginery.core.closing import Closeable
from enginery.core.errors import EngineryError
from enginery.runtime.pytorch import reference as torch_reference
from tests.validate.faults.edits import sorted_nodes
from tests.validate.faults.effect import FIRST, Effect, HeldOut, Rows
from tests.validate.faults.fault import Fault
from tests.validate.faults.quantized import QUANTIZED_FAULTS
from tests.validate.faults.sound import SoundGraph
from tests.validate.faults.text import TEXT_FAULTS
from tests.validate.faults.transformer import FP16_FAULTS, TRANSFORMER_FAULTS
from tests.validate.faults.vision import VISION_FAULTS

FAULTS = (*TEXT_FAULTS, *TRANSFORMER_FAULTS, *VISION_FAULTS, *FP16_FAULTS, *QUANTIZED_FAULTS)


def faults_of(model: str, precision: str, kind: str = "") -> list[Fault]:
    """Return the faults that apply to a model at a precision."""
    return [
        fault
        for fault in FAULTS
        if model in fault.models and precision in fault.precisions and kind in ("", fault.kind)
    ]


@dataclass(frozen=True)
class Outcome:
    """What one fault does, and what the verdict says."""

    fault: str
    kind: str
    effect: Effect
    passed: bool
    summary: str
    """Summary of the validation, or the error of the stage."""
    harmful_on_gpu: bool = False

    @property
    def harmful(self) -> bool:
        return self.effect.harmful or self.harmful_on_gpu

    @property
    def missed(self) -> bool:
        return self.harmful and self.passed

    def __str__(self) -> str:
        verdict = "passed" if self.passed else "failed"
        judged = "MISSED" if self.missed else "harmful" if self.harmful else "harmless"
        return f"{self.fault:44} {self.effect} {judged:8} {verdict} {self.summary[:110]}"


class Laboratory:
    """One sound artifact, the copies of it with faults, and held-out inputs."""

    def __init__(
        self, artifact: Artifact, original: Artifact, held_out: HeldOut, scratch: Path
    ) -> None:
        """Open a laboratory.

        Args:
            artifact: the sound artifact.
            original: the FP32 artifact that it was made from; may be the same.
            held_out: inputs that no verdict sees.
            scratch: directory for the copies.
        """
        self.artifact = artifact
        self.held_out = held_out
        self._scratch = scratch
        self._model = onnx.load(str(artifact.path / "model.onnx"))
        self._original = onnx.load(str(original.path / "model.onnx"))

    def plant(self, fault: Fault) -> Outcome:
        """Plant one fault, validate the copy, and measure the effect.

        A fault that fails is measured on all inputs only if the first do not show its harm.
        """
        broken = self.edited(lambda model: fault.plant(model, self._original))
        passed, summary = self.verdict(broken)
        effect = self._effect(broken, [FIRST, *fault.shown_by])
        if passed or not effect.harmful:
            effect = self._effect(broken, self.held_out.names(fault.shown_by))
        return Outcome(fault.name, fault.kind, effect, passed, summary, fault.harmful_on_gpu)

    def _effect(self, broken: Artifact, names: Sequence[str]) -> Effect:
        answers = self.held_out.run(broken, names)
        quantized = self.artifact.manifest.is_quantized
        return self.held_out.effect(answers, self._sound, quantized=quantized)

    def rewrite(self, graph: SoundGraph) -> Outcome:
        """Write the artifact's graph in another way, validate the copy, and measure the effect."""
        other = self.edited(graph.change, external_data=graph.external_data)
        passed, summary = self.verdict(other)
        effect = self._effect(other, self.held_out.names(()))
        return Outcome(graph.name, "sound", effect, passed, summary)

    def edited(
        self, edit: Callable[[onnx.ModelProto], object], *, external_data: bool = False
    ) -> Artifact:
        """Return the only copy of the artifact, with its graph edited in place or replaced."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        shutil.copytree(
            self.artifact.path, self._scratch, ignore=shutil.ignore_patterns("model.onnx*")
        )
        (self._scratch / "reports" / "validation.json").unlink(missing_ok=True)
        model = onnx.ModelProto()
        model.CopyFrom(self._model)
        changed = edit(model)
        model = changed if isinstance(changed, onnx.ModelProto) else model
        onnx.save(
            sorted_nodes(model),
            str(self._scratch / "model.onnx"),
            save_as_external_data=external_data,
            location="weights.bin",
        )
        manifest = self.artifact.manifest
        data_files = ("weights.bin",) if external_data else ()
        graphs = tuple(
            graph.model_copy(update={"data_files": data_files}) for graph in manifest.graphs
        )
        bare = manifest.model_copy(update={"verdicts": (), "graphs": graphs})
        commit_artifact(self._scratch, bare)
        return Artifact.open(self._scratch)

    @staticmethod
    def verdict(artifact: Artifact) -> tuple[bool, str]:
        """Validate with default options; an error of the stage is no passed verdict."""
        try:
            report = validate_model(artifact)
        except EngineryError as error:
            return False, error.message
        return report.passed, report.summary

    @cached_property
    def _sound(self) -> dict[str, Rows]:
        return self.held_out.run(self.artifact, list(self.held_out.inputs))


def memoized_reference(directory: Path):
    """Return a `TorchReference` that computes each output once.

    The source of a planted artifact never changes, so PyTorch's outputs are the same for all. The
    model is loaded when an output is not in the directory.
    """

    class MemoizedReference(Closeable):
        def __init__(self, source, manifest, *, graph="", precision="fp32", **options):
            self._arguments = (source, manifest)
            self._options = {"graph": graph, "precision": precision, **options}
            key = f"{manifest.source.sha256} {manifest.task} {graph} {precision}"
            self._directory = directory / hashlib.sha256(key.encode()).hexdigest()[:20]
            self._directory.mkdir(parents=True, exist_ok=True)
            self._loaded = None

        def _reference(self):
            if self._loaded is None:
                source, manifest = self._arguments
                self._loaded = torch_reference_class(source, manifest, **self._options)
            return self._loaded

        def __getattr__(self, name):
            return getattr(self._reference(), name)

        @property
        def notes(self):
            file = self._directory / "notes.json"
            if not file.exists():
                _write(file, json.dumps(self._reference().notes).encode())
            return json.loads(file.read_bytes())

        def __call__(self, feeds, target, **options):
            digest = hashlib.sha256()
            for name in sorted(feeds):
                array = np.ascontiguousarray(feeds[name])
                digest.update(f"{name} {array.dtype} {array.shape} ".encode() + array.tobytes())
            held = self._directory / digest.hexdigest()[:20]
            if not held.is_dir():
                made = held.with_suffix(f".{id(self)}")
                files = self._reference()(feeds, made, **options)
                names = {name: file.name for name, file in files.items()}
                (made / "names.json").write_text(json.dumps(names))
                if held.is_dir():  # another process was faster
                    shutil.rmtree(made)
                else:
                    made.rename(held)
            names = json.loads((held / "names.json").read_text())
            return {name: held / file for name, file in names.items()}

        def close(self):
            if self._loaded is not None:
                self._loaded.close()

    torch_reference_class = torch_reference.TorchReference
    return MemoizedReference


def _write(file: Path, content: bytes) -> None:
    beside = file.with_suffix(".new")
    beside.write_bytes(content)
    beside.replace(file)

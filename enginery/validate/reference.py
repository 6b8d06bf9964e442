"""Run the reference on every case: its outputs are expected, its own error is the noise floor.

The reference is the artifact's source in PyTorch, or, if that is an .onnx file, the file itself in
ONNX Runtime, see `source_file.py`.

Outputs are stored as `.npy` files in a scratch directory: those of a large profile (32 × 512 tokens
times a vocabulary) take gigabytes per case. The models run one after the other, so that only one is
in memory.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import ArtifactError, ExportError, InputError, ProviderError, SourceError
from enginery.core.model.feeds import Feeds
from enginery.core.model.files import ModelConfig
from enginery.core.model.random_numbers import RANDOM_OPS
from enginery.core.model.source import ModelSource, resolve_record, resolve_source
from enginery.core.precision import roundoff
from enginery.core.progress import Progress
from enginery.core.python_environment import PythonEnvironment
from enginery.core.trust.graph_limits import check_allocations
from enginery.core.trust.onnx_structure import read_structure
from enginery.runtime.agreement import read_model_pooling
from enginery.runtime.pytorch.reference import CONFINED, TorchProcess, TorchReference
from enginery.runtime.tasks.classify import SCORES, Activation, activated, choose_activation
from enginery.runtime.tasks.embed import SENTENCE_OUTPUT, TOKEN_OUTPUTS
from enginery.runtime.text.pooling import Pooling, read_pooling
from enginery.validate.cases.padding import find_padding_mask
from enginery.validate.cases.sweep import ValidationCase
from enginery.validate.config import ValidateConfig
from enginery.validate.metrics.differences import compute_differences
from enginery.validate.metrics.outputs import NoiseFloor, noise_floor

if TYPE_CHECKING:
    from enginery.validate.source_file import SourceFile
    from enginery.validate.weights.parameters import WeightSource

# Artifact precision -> PyTorch precision whose error against FP32 is the noise floor.
_NOISE_PRECISION = {"fp32": "fp64", "fp16": "fp16", "bf16": "bf16"}

# Fallback without a noise floor: this many roundings of the largest value, as in a deep network.
_ROUNDINGS = 16

_IN_MEMORY_BYTES = 64 << 20


@dataclass(frozen=True)
class ReferenceOutputs:
    """The reference's FP32 outputs for one case."""

    files: dict[str, Path] = field(default_factory=dict)
    """Output name -> `.npy` file."""
    problem: str = ""
    """Reason if there are none: the reference rejects the inputs."""
    random: Path | None = None
    """`.npz` file of the random numbers that the reference drew; None if it draws none."""

    def load(self, output: str) -> NDArray[Any]:
        """Load one output; a large one is memory-mapped."""
        path = self.files[output]
        large = path.stat().st_size > _IN_MEMORY_BYTES
        array: NDArray[Any] = np.load(path, mmap_mode="r" if large else None)
        return array

    def random_numbers(self) -> dict[str, NDArray[Any]]:
        """Load the random numbers that the reference drew, by `random_input`'s names."""
        if self.random is None or not self.random.exists():
            return {}
        with np.load(self.random, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}


@dataclass(frozen=True)
class Reference:
    """The model that an artifact is compared with: in PyTorch, or an .onnx file."""

    artifact: Artifact
    source: ModelSource
    process: TorchProcess = CONFINED
    """How PyTorch is started."""
    vocoder: Path | None = None
    """The directory of the vocoder that a model of speech was exported with."""
    other_transformers: str = ""
    """The version of transformers that runs it, if the artifact was exported with another family
    of versions; empty otherwise."""
    noise_precision: str = ""
    """Precision whose rounding errors are the noise floor; empty for the artifact's."""

    @classmethod
    def of(cls, artifact: Artifact, config: ValidateConfig) -> Reference:
        """Find the reference: the option, or else the artifact's source.

        Raises:
            SourceError: it does not exist or has changed since the export, or has only pickled
                weights; or it is an .onnx file, but the artifact has several graphs or contains it.
            OptionError: there is no such interpreter as `python` names, or it is too old.
        """
        record = artifact.manifest.source
        if config.reference:
            source = resolve_source(config.reference, allow_pickle=config.allow_pickle)
        elif record.kind == "onnx" and not Path(record.id).is_file():
            raise SourceError(
                f"{artifact.path} was made from {record.id}, which does not exist any more.",
                do="Put the file back, or name the original model with --reference MODEL.",
            )
        else:
            source = resolve_record(record, allow_pickle=config.allow_pickle)
        if source.record.kind == "onnx":
            # Compared with itself, a graph agrees in any case.
            if source.path.is_relative_to(artifact.path.resolve()):
                raise SourceError(
                    f"{source.path} is a file of the artifact itself, so it proves nothing.",
                    do="Name the original model with --reference MODEL.",
                )
            # The file passes the same checks as an artifact's own graphs before it is loaded.
            check_allocations(source.path, error=SourceError)
            if len(artifact.manifest.graphs) > 1:
                files = ", ".join(graph.file for graph in artifact.manifest.graphs)
                raise SourceError(
                    f"{source.path} is one graph, but {artifact.path} has several: {files}.",
                    do="Name the original model with --reference MODEL.",
                )
            return cls(artifact, source)
        vocoder = _find_vocoder(artifact, config)
        environment = PythonEnvironment.find(config.python)
        process = TorchProcess(environment.python, config.trust_remote_code)
        return cls(artifact, source, process, vocoder, _other_transformers(artifact, environment))

    @property
    def is_onnx(self) -> bool:
        """True for an .onnx file, False for a model in PyTorch."""
        return self.source.record.kind == "onnx"

    @property
    def name(self) -> str:
        """Its name in messages: `PyTorch`, `the source file` or, from the option, another file."""
        return f"the {self._file}" if self.is_onnx else "PyTorch"

    @property
    def description(self) -> str:
        """Where and how it runs."""
        if self.is_onnx:
            return f"ONNX Runtime FP32, {self._file}"
        return "PyTorch FP32, eager attention"

    def with_noise(self, precision: str) -> Reference:
        """Return the reference with the noise floor of a precision; of FP32 for TF32.

        PyTorch has no TF32 on a CPU.
        """
        return replace(self, noise_precision="" if precision == "tf32" else precision)

    @property
    def rounds_to(self) -> str:
        """The precision whose rounding errors are the noise floor."""
        return self.noise_precision or self.artifact.manifest.float_precision

    @property
    def _file(self) -> str:
        is_source = self.source.record.sha256 == self.artifact.manifest.source.sha256
        return "source file" if is_source else "reference file"

    def open(self, graph: str) -> TorchReference | SourceFile:
        """Load the reference of one graph, in FP32."""
        return self._open_file(graph) if self.is_onnx else self.open_pytorch(graph)

    def open_pytorch(self, graph: str) -> TorchReference:
        """Load the model in PyTorch as the reference of one graph, in FP32."""
        return self._open_torch(graph, "fp32")

    def open_noisy(self, graph: str) -> dict[str, Callable[[], TorchReference | SourceFile]]:
        """Return loaders of the runs whose errors are noise floors, by name for messages."""
        precision = self.rounds_to
        if not self.is_onnx:
            noisy = _NOISE_PRECISION[precision]
            return {f"PyTorch in {noisy.upper()}": partial(self._open_torch, graph, noisy)}
        from enginery.validate.source_file import DRAWS

        # Errors of FP32 are drawn; rounding to FP16 or BF16 gives the same values in every run.
        draws = DRAWS if precision == "fp32" else 1
        return {
            f"the source file with errors of {precision.upper()}, run {seed + 1}": partial(
                self._open_file, graph, noise=precision, seed=seed
            )
            for seed in range(draws)
        }

    def open_weights(self) -> WeightSource:
        """Load the weights of the reference."""
        if not self.is_onnx:
            return self.open_pytorch("")
        from enginery.validate.weights.source_file import SourceFileWeights

        return SourceFileWeights(self.source.path)

    def _open_torch(self, graph: str, precision: str) -> TorchReference:
        return TorchReference(
            self.source,
            self.artifact.manifest,
            graph=graph,
            precision=precision,
            vocoder=self.vocoder,
            process=self.process,
        )

    def _open_file(self, graph: str, **noise: Any) -> SourceFile:
        from enginery.validate.source_file import SourceFile  # onnx takes a while to import

        return SourceFile(self.source.path, self.artifact.graph(graph), **noise)


def _other_transformers(artifact: Artifact, environment: PythonEnvironment) -> str:
    """Return the environment's version if the artifact was exported with another major one."""
    tools = next((s.tools for s in artifact.manifest.stages if s.stage == "export"), {})
    exported, version = tools.get("transformers", "none"), environment.version_of("transformers")
    majors = {text.partition(".")[0] for text in (exported, version)}
    return f"transformers {version}" if len(majors) > 1 and exported != "none" else ""


def _find_vocoder(artifact: Artifact, config: ValidateConfig) -> Path | None:
    """Return the directory of the vocoder that the model was exported with; None without one.

    Raises:
        SourceError: it does not exist any more, has changed, or has only pickled weights.
        ArtifactError: the manifest does not name it.
    """
    export = next((s for s in artifact.manifest.stages if s.stage == "export"), None)
    if export is None or export.fields.get("model_kwargs", "none") == "none":
        return None
    kwargs = export.options.get("model_kwargs")
    name = kwargs.get("vocoder") if isinstance(kwargs, dict) else None
    if not isinstance(name, str):
        raise ArtifactError(
            f"{artifact.path}: manifest.json has the digest of a vocoder, but not its name."
        )
    source = resolve_source(name, allow_pickle=config.allow_pickle)
    if source.record.sha256 != export.fields["model_kwargs"]:
        raise SourceError(
            f"the vocoder {name} has changed since the export.", do="Export the model again."
        )
    return source.path


@dataclass(frozen=True)
class ReferenceRun:
    """The reference's outputs for all cases of one graph."""

    name: str
    """The reference's name in messages."""
    outputs: list[ReferenceOutputs]
    """One for each case, in order."""
    noise_floors: dict[str, NoiseFloor]
    """Output name -> largest noise floor over all cases; every output that the reference has."""
    notes: list[str]
    generated_floors: dict[str, NoiseFloor] = field(default_factory=dict)
    """The same over generated cases alone, for those: real inputs may have answers that are a near
    tie, and must not raise the limits of other inputs."""

    def noise_floor(self, output: str, *, real: bool) -> NoiseFloor:
        """Return the noise floor of an output for real or for generated inputs."""
        floor = self.noise_floors[output]
        return floor if real else self.generated_floors.get(output, floor)


def run_reference(
    reference: Reference,
    record: GraphRecord,
    cases: Sequence[ValidationCase],
    scratch: Path,
    *,
    progress: Progress,
    noise: bool = True,
) -> ReferenceRun:
    """Run the reference in FP32, then again with errors that are the noise floor.

    Args:
        reference: the reference.
        record: the graph whose outputs are computed.
        cases: the inputs.
        scratch: directory for the outputs.
        progress: receives progress messages.
        noise: measure noise floors. Without, they are 0: the tolerance of a quantized graph does
            not depend on them.

    Raises:
        InputError: the inputs of a case cannot be generated, for example from a damaged image.
        SourceError: an .onnx file has other inputs than the graph.
        ExportError: PyTorch cannot load the source.
        ProviderError: ONNX Runtime cannot load an .onnx file.
        UntrustedModelError: the source needs a permission that was not given, or is malicious.
        EngineryError: the outputs cannot be written to `scratch`.
    """
    expected: list[ReferenceOutputs] = []
    last_step = LastStep.of(reference.artifact, record)
    graph = reference.artifact.path / record.file
    # PyTorch's draws are recorded, so that the graph can get the same numbers.
    random = not (reference.is_onnx or RANDOM_OPS.isdisjoint(read_structure(graph).op_types()))
    with (
        reference.open(record.file) as model,
        progress.task(reference.description, total=len(cases)) as advance,
    ):
        for index, case in enumerate(cases):
            # Outside the `try`: a failure to generate inputs is not the model's.
            feeds = case.make()
            numbers = scratch / f"{record.file}-{index}.npz" if random else None
            directory = scratch / f"{record.file}-{index}"
            try:
                files = _run(model, case, feeds, directory, last_step, numbers)
            except InputError as error:
                expected.append(ReferenceOutputs(problem=error.message))
            else:
                expected.append(ReferenceOutputs(files, random=numbers))
            advance()
        notes = list(model.notes)
    # A quantized graph has no noise floor: PyTorch has no arithmetic of this kind.
    if not noise:
        names = {name for wide in expected for name in wide.files}
        floors = dict.fromkeys(names, NoiseFloor(0.0, cosine=1.0))
        return ReferenceRun(reference.name, expected, floors, notes)
    floors, generated, more_notes = _noise_floors(
        reference, record, cases, expected, scratch, progress
    )
    return ReferenceRun(reference.name, expected, floors, [*notes, *more_notes], generated)


def _run(
    model: TorchReference | SourceFile,
    case: ValidationCase,
    feeds: Feeds,
    directory: Path,
    last_step: LastStep,
    random: Path | None,
) -> dict[str, Path]:
    """Run the reference on a case; a step of decoding continues the one before."""
    if case.decode and isinstance(model, TorchReference):
        return model(feeds, directory, decode=case.decode)
    if random is not None and isinstance(model, TorchReference):
        files = model(feeds, directory, random=random)
    else:
        files = dict(model(feeds, directory))
    for name, values in last_step(files, feeds).items():
        files[name] = directory / f"{name}.npy"
        np.save(files[name], values)
    return files


@dataclass(frozen=True)
class LastStep:
    """The last step of a graph that the model in PyTorch does not have: pooling, an activation."""

    pooling: Pooling | None = None
    """Pooling of the token vectors, for a graph with the output `sentence_embedding`."""
    activation: Activation = "none"
    """Function of the logits, for a graph with the output `scores`."""

    @classmethod
    def of(cls, artifact: Artifact, record: GraphRecord) -> LastStep:
        specs = {spec.name: spec for spec in record.outputs}
        if SENTENCE_OUTPUT in specs:
            if specs.keys().isdisjoint(TOKEN_OUTPUTS):
                return cls(pooling=read_model_pooling(artifact.path))
            with suppress(ArtifactError):  # a module that only the graph has
                return cls(pooling=read_pooling(artifact.path))
        if SCORES in specs and "logits" in specs:
            labels = specs[SCORES].dims[-1]
            config = ModelConfig.read(artifact.path)
            if isinstance(labels, int):
                return cls(activation=choose_activation(config, labels))
        return cls()

    def __call__(self, files: Mapping[str, Path], feeds: Feeds) -> dict[str, NDArray[Any]]:
        """Return the outputs of the step, by name, without those that the reference has."""
        tokens = next((name for name in TOKEN_OUTPUTS if name in files), None)
        mask = feeds.get("attention_mask")
        if self.pooling and tokens and SENTENCE_OUTPUT not in files and mask is not None:
            return {SENTENCE_OUTPUT: self.pooling(np.load(files[tokens]), mask)}
        if self.activation != "none" and SCORES not in files and "logits" in files:
            return {SCORES: activated(np.load(files["logits"]), self.activation)}
        return {}


def _noise_floors(
    reference: Reference,
    record: GraphRecord,
    cases: Sequence[ValidationCase],
    expected: Sequence[ReferenceOutputs],
    scratch: Path,
    progress: Progress,
) -> tuple[dict[str, NoiseFloor], dict[str, NoiseFloor], list[str]]:
    """Return the noise floors over all cases, those over generated cases, and notes."""
    noise_floors: dict[str, NoiseFloor] = {}
    generated: dict[str, NoiseFloor] = {}
    refusals: dict[str, str] = {}
    specs = {spec.name: spec for spec in record.outputs}
    last_step = LastStep.of(reference.artifact, record)
    for name, load in reference.open_noisy(record.file).items():
        try:
            with load() as model, progress.task(name, total=len(cases)) as advance:
                for index, (case, wide) in enumerate(zip(cases, expected, strict=True)):
                    directory = scratch / f"{record.file}-{index}-noisy"
                    try:
                        feeds = case.make()
                        other = ReferenceOutputs()
                        if wide.files:
                            files = _run(model, case, feeds, directory, last_step, wide.random)
                            other = ReferenceOutputs(files)
                    except InputError as error:
                        refusals.setdefault(name, error.message)
                        other = ReferenceOutputs()
                    for output in other.files.keys() & wide.files.keys():
                        padding = find_padding_mask(specs[output], record.inputs, feeds)
                        narrow, exact = other.load(output), wide.load(output)
                        if narrow.shape != exact.shape:  # its size depends on values
                            continue
                        if not np.any(np.isfinite(narrow) & np.isfinite(exact)):
                            continue  # a mask of FP32's numbers overflows at another precision
                        floor = noise_floor(narrow, exact, padding)
                        noise_floors[output] = floor.wider(noise_floors.get(output, floor))
                        # Rounding may decide a near tie of a real answer, which must not excuse
                        # errors on other inputs.
                        if case.kind != "real":
                            generated[output] = floor.wider(generated.get(output, floor))
                    # The outputs of one case may take gigabytes.
                    shutil.rmtree(directory, ignore_errors=True)
                    advance()
        except (ExportError, ProviderError) as error:
            refusals.setdefault(name, error.message)
    # Some operators have no kernel at this precision.
    missing = {output for wide in expected for output in wide.files} - noise_floors.keys()
    unit = roundoff(reference.rounds_to)
    for output in missing:
        loaded = (wide.load(output) for wide in expected if output in wide.files)
        largest = max(compute_differences(array, array, None).largest for array in loaded)
        noise_floors[output] = NoiseFloor(_ROUNDINGS * unit * largest, cosine=1.0)
    notes = []
    if missing:
        name, refusal = next(iter(refusals.items()), (reference.name, "it has no such run"))
        notes.append(
            f"no noise floor from {name} ({refusal}); "
            f"using {_ROUNDINGS} roundings of the largest value instead"
        )
    return noise_floors, generated, notes

"""Run PyTorch on every case: its outputs are the reference, its own error the noise floor.

Outputs are stored as `.npy` files in a scratch directory: those of a large profile (32 × 512 tokens
times a vocabulary) take gigabytes per case. The models run one after the other, so that only one is
in memory.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import ExportError, InputError
from enginery.core.model.source import ModelSource
from enginery.core.precision import roundoff
from enginery.core.progress import Progress
from enginery.runtime.torch_reference import TorchReference
from enginery.validate.cases.padding import find_padding_mask
from enginery.validate.cases.sweep import ValidationCase
from enginery.validate.metrics.outputs import NoiseFloor, noise_floor

# Artifact precision -> PyTorch precision whose error against FP32 is the noise floor.
_NOISE_PRECISION = {"fp32": "fp64", "fp16": "fp16", "bf16": "bf16"}

# Fallback without a noise floor: this many roundings of the largest value, as in a deep network.
_ROUNDINGS = 16

_IN_MEMORY_BYTES = 64 << 20


@dataclass(frozen=True)
class ReferenceOutputs:
    """PyTorch's FP32 outputs for one case."""

    files: dict[str, Path] = field(default_factory=dict)
    """Output name -> `.npy` file."""
    problem: str = ""
    """Reason if there are none: PyTorch rejects the inputs."""

    def load(self, output: str) -> NDArray[Any]:
        """Load one output; a large one is memory-mapped."""
        path = self.files[output]
        large = path.stat().st_size > _IN_MEMORY_BYTES
        array: NDArray[Any] = np.load(path, mmap_mode="r" if large else None)
        return array


@dataclass(frozen=True)
class ReferenceRun:
    """PyTorch's outputs for all cases of one graph."""

    outputs: list[ReferenceOutputs]
    """One for each case, in order."""
    noise_floors: dict[str, NoiseFloor]
    """Output name -> largest noise floor over all cases; every output that PyTorch has."""
    notes: list[str]


def run_pytorch(
    artifact: Artifact,
    source: ModelSource,
    record: GraphRecord,
    cases: Sequence[ValidationCase],
    scratch: Path,
    *,
    progress: Progress,
    noise: bool = True,
    trust_remote_code: bool = False,
) -> ReferenceRun:
    """Run PyTorch in FP32, then at the precision whose error is the noise floor.

    Args:
        artifact: the artifact that is validated.
        source: the PyTorch model.
        record: the graph whose outputs are computed.
        cases: the inputs.
        scratch: directory for the outputs.
        progress: receives progress messages.
        noise: measure noise floors. Without, they are 0: the tolerance of a quantized graph does
            not depend on them.
        trust_remote_code: run Python code that comes with the model.

    Raises:
        InputError: the inputs of a case cannot be generated, for example from a damaged image.
        ExportError: PyTorch cannot load the source.
        UntrustedModelError: the source needs a permission that was not given, or is malicious.
        EngineryError: the outputs cannot be written to `scratch`.
    """
    expected: list[ReferenceOutputs] = []
    with (
        TorchReference(
            source, artifact.manifest, graph=record.file, trust_remote_code=trust_remote_code
        ) as reference,
        progress.task("PyTorch FP32", total=len(cases)) as advance,
    ):
        notes = list(reference.notes)
        for index, case in enumerate(cases):
            # Outside the `try`: a failure to generate inputs is not the model's.
            feeds = case.make()
            try:
                place = scratch / f"{record.file}-{index}"
                files = reference(feeds, place, decode=case.decode)
            except InputError as error:
                expected.append(ReferenceOutputs(problem=error.message))
            else:
                expected.append(ReferenceOutputs(files))
            advance()
    if not noise:
        names = {name for wide in expected for name in wide.files}
        return ReferenceRun(expected, dict.fromkeys(names, NoiseFloor(0.0, cosine=1.0)), notes)
    noise_floors, more_notes = _noise_floors(
        artifact, source, record, cases, expected, scratch, progress, trust_remote_code
    )
    return ReferenceRun(expected, noise_floors, [*notes, *more_notes])


def _noise_floors(
    artifact: Artifact,
    source: ModelSource,
    record: GraphRecord,
    cases: Sequence[ValidationCase],
    expected: Sequence[ReferenceOutputs],
    scratch: Path,
    progress: Progress,
    trust_remote_code: bool,
) -> tuple[dict[str, NoiseFloor], list[str]]:
    precision = artifact.manifest.precision
    noisy = _NOISE_PRECISION[precision]
    noise_floors: dict[str, NoiseFloor] = {}
    refusal = ""
    specs = {spec.name: spec for spec in record.outputs}
    try:
        with (
            TorchReference(
                source,
                artifact.manifest,
                graph=record.file,
                precision=noisy,
                trust_remote_code=trust_remote_code,
            ) as runner,
            progress.task(f"PyTorch {noisy.upper()}", total=len(cases)) as advance,
        ):
            for index, (case, wide) in enumerate(zip(cases, expected, strict=True)):
                place = scratch / f"{record.file}-{index}-{noisy}"
                try:
                    feeds = case.make()
                    files = runner(feeds, place, decode=case.decode) if wide.files else {}
                    other = ReferenceOutputs(files)
                except InputError as error:
                    refusal = refusal or error.message
                    other = ReferenceOutputs()
                for name in other.files.keys() & wide.files.keys():
                    padding = find_padding_mask(specs[name], record.inputs, feeds)
                    floor = noise_floor(other.load(name), wide.load(name), padding)
                    noise_floors[name] = floor.wider(noise_floors.get(name, floor))
                shutil.rmtree(place, ignore_errors=True)
                advance()
    except ExportError as error:
        refusal = error.message
    # Some operators have no kernel at this precision.
    missing = {name for wide in expected for name in wide.files} - noise_floors.keys()
    for name in missing:
        loaded = (wide.load(name) for wide in expected if name in wide.files)
        largest = max(float(np.abs(array[np.isfinite(array)]).max(initial=0.0)) for array in loaded)
        noise_floors[name] = NoiseFloor(_ROUNDINGS * roundoff(precision) * largest, cosine=1.0)
    notes = []
    if missing:
        notes.append(
            f"no noise floor from PyTorch in {noisy.upper()} ({refusal}); "
            f"using {_ROUNDINGS} roundings of the largest value instead"
        )
    return noise_floors, notes

"""PyTorch's answers to every case of one graph, and its own error at the artifact's precision.

Takes the model's source and the cases; leaves the answers as `.npy` files in a scratch directory.

    >>> answers = ask_pytorch(artifact, source, record, cases, scratch)
    >>> answers.expected[0].load("logits").shape, answers.floors["logits"].max_abs
    ((2, 8, 600), 3.1e-07)

On disk, because the outputs of a large profile (32 × 512 tokens by a vocabulary) are gigabytes a
case, and because the models run one after the other: never two of them are in memory.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact import Artifact
from enginery.core.errors import ExportError, InputError
from enginery.core.manifest import GraphRecord
from enginery.core.precision import roundoff
from enginery.core.progress import Progress
from enginery.core.source import ModelSource
from enginery.runtime.torch_reference import TorchReference
from enginery.validate.cases import Case
from enginery.validate.metrics import NoiseFloor, noise_floor
from enginery.validate.padding import kept_positions

# PyTorch at which precision shows the error of an artifact of each precision.
_NOISE_PRECISION = {"fp32": "fp64", "fp16": "fp16", "bf16": "bf16"}

# Where there is no floor: a deep network's worth of roundings of the largest value.
_ROUNDINGS = 16

_IN_MEMORY_BYTES = 64 << 20


@dataclass(frozen=True)
class Expected:
    """PyTorch's FP32 answer to one case."""

    files: dict[str, Path] = field(default_factory=dict)
    problem: str = ""
    """Why there is none: PyTorch rejects the inputs."""

    def load(self, output: str) -> NDArray[Any]:
        """One output; a large one stays on disk and is read as it is used."""
        path = self.files[output]
        large = path.stat().st_size > _IN_MEMORY_BYTES
        array: NDArray[Any] = np.load(path, mmap_mode="r" if large else None)
        return array


@dataclass(frozen=True)
class Answers:
    """All of PyTorch's answers for one graph."""

    expected: list[Expected]
    """One a case, in order."""
    floors: dict[str, NoiseFloor]
    """Of each output, the widest over all cases."""
    notes: list[str]


def ask_pytorch(
    artifact: Artifact,
    source: ModelSource,
    record: GraphRecord,
    cases: Sequence[Case],
    scratch: Path,
    progress: Progress,
    *,
    noise: bool = True,
    trust_remote_code: bool = False,
) -> Answers:
    """Run PyTorch in FP32, then at the precision whose error is the noise floor.

    Without `noise` the floors are 0: no tolerance of a quantized graph is scaled by them.

    Raises:
        InputError: a case's own inputs cannot be made (a damaged image).
        ExportError: PyTorch cannot load the source.
        UntrustedModelError: the source asks for what was not granted, or tried to do harm.
        EngineryError: `scratch` cannot hold the answers.
    """
    expected: list[Expected] = []
    with (
        TorchReference(
            source, artifact.manifest, graph=record.file, trust_remote_code=trust_remote_code
        ) as reference,
        progress.task("PyTorch FP32", total=len(cases)) as advance,
    ):
        notes = list(reference.notes)
        for index, case in enumerate(cases):
            # Outside the `try`: inputs that cannot be made are no fault of the model.
            feeds = case.make()
            try:
                files = reference(feeds, scratch / f"{record.file}-{index}")
            except InputError as error:
                expected.append(Expected(problem=error.message))
            else:
                expected.append(Expected(files))
            advance()
    if not noise:
        names = {name for wide in expected for name in wide.files}
        return Answers(expected, dict.fromkeys(names, NoiseFloor(0.0, cosine=1.0)), notes)
    floors, said = _noise_floors(
        artifact, source, record, cases, expected, scratch, progress, trust_remote_code
    )
    return Answers(expected, floors, [*notes, *said])


def _noise_floors(
    artifact: Artifact,
    source: ModelSource,
    record: GraphRecord,
    cases: Sequence[Case],
    expected: Sequence[Expected],
    scratch: Path,
    progress: Progress,
    trust_remote_code: bool,
) -> tuple[dict[str, NoiseFloor], list[str]]:
    precision = artifact.manifest.precision
    noisy = _NOISE_PRECISION[precision]
    floors: dict[str, NoiseFloor] = {}
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
                    other = Expected(runner(feeds, place) if wide.files else {})
                except InputError as error:
                    refusal = refusal or error.message
                    other = Expected()
                for name in other.files.keys() & wide.files.keys():
                    kept = kept_positions(specs[name], record.inputs, feeds)
                    floor = noise_floor(other.load(name), wide.load(name), kept)
                    floors[name] = floor.widest(floors.get(name, floor))
                shutil.rmtree(place, ignore_errors=True)
                advance()
    except ExportError as error:
        refusal = error.message
    # Some operations have no kernel at this precision.
    missing = {name for wide in expected for name in wide.files} - floors.keys()
    for name in missing:
        loaded = (wide.load(name) for wide in expected if name in wide.files)
        largest = max(float(np.abs(array[np.isfinite(array)]).max(initial=0.0)) for array in loaded)
        floors[name] = NoiseFloor(_ROUNDINGS * roundoff(precision) * largest, cosine=1.0)
    notes = []
    if missing:
        notes.append(
            f"no noise floor from PyTorch in {noisy.upper()} ({refusal}); "
            f"{_ROUNDINGS} roundings of the largest value stand in"
        )
    return floors, notes

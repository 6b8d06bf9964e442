"""Measure what a fault does to answers that the verdict never sees.

A row is one text or one image. Its answers are vectors: the scores of an image; the hidden states
of the real tokens of a text, and their mean, its embedding. Distances between answers are relative:
the length of the difference by the length of the exact answer, which PyTorch computes in FP64.

A fault is harmful if it does to any answer what no rounding at this precision does:

- the answer moves away from that of the sound artifact of the same precision by more than twice the
  largest error of the sound artifact (two sound graphs are each within that error of the exact
  answer, so they are within twice that of each other); or
- the mean of the squared errors is more than twice that of the sound artifact, or more than 1.25
  times if it is quantized. Kernels round floats differently: rewritten graphs (`sound.py`) were
  seen at 1.4 times, with changes of 1.1 times the largest error. A quantized graph rounds by its
  scales: rewritten ones stay near 1.0, and two calibrations of one model differ by about a
  twentieth. The mean needs many answers: one factor of 0.9995 to 1.0005 at the first convolution of
  a ResNet in INT8 gave 0.93 to 1.30 times the squared error of 43 images, and 0.97 to 1.05 times
  that of 443.

Both errors of the sound artifact are measured on the same inputs as the fault. An answer that
cannot be computed, has another shape, or is not finite is infinitely far.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from enginery.core.artifact.artifact import Artifact
from enginery.core.errors import EngineryError
from enginery.core.model.feeds import Feeds
from enginery.core.model.source import resolve_record
from enginery.runtime.image.processor import ImageProcessor, load_image
from enginery.runtime.onnxruntime.runner import OrtRunner
from enginery.runtime.pytorch import reference as torch_reference
from enginery.runtime.sample_inputs import TextFeeder
from tests.trained import TRAINED, load_digit_images
from tests.validate.faults.text import FUNCTION, RARE

MAX_CHANGE = 2.0
MAX_SPREAD, MAX_SPREAD_QUANTIZED = 2.0, 1.25

FIRST = "batch 40"
USUAL = (FIRST, "ragged", "ragged long", "length 301", "length 512", "batch 3")
"""Inputs that every fault is measured on, if the model has them."""
MORE = tuple(f"40 more {number}" for number in range(10))
"""Inputs that only the mean error is measured on, for faults that all inputs show."""

Rows = list[tuple[np.ndarray, ...]]
"""The answers of each row of a batch, float64; empty arrays if there are none. Cosines and
neighbours are those of the last one."""


@dataclass(frozen=True)
class Effect:
    """The effect of a fault on the held-out inputs that it was measured on."""

    max_abs: float
    min_cosine: float
    mean_cosine: float
    neighbours: float
    """Share of rows whose nearest neighbour is the same as in the exact answers."""
    change: float
    """Largest distance to the sound artifact's answer, by the sound artifact's largest error."""
    spread: float
    """Mean squared error, by that of the sound artifact."""
    max_spread: float

    @property
    def harmful(self) -> bool:
        return not (self.change <= MAX_CHANGE and self.spread <= self.max_spread)

    def __str__(self) -> str:
        return (
            f"change {self.change:9.3g} × own error, squared {self.spread:9.3g} ×, "
            f"cosine {self.mean_cosine:.5f} / {self.min_cosine:.5f}, "
            f"neighbours {self.neighbours:4.0%}, largest {self.max_abs:.2g}"
        )


class HeldOut:
    """Held-out inputs of one model, and the exact answers to them."""

    def __init__(self, inputs: Mapping[str, Feeds], artifact: Artifact, scratch: Path) -> None:
        self.inputs = dict(inputs)
        source = resolve_record(artifact.manifest.source)
        self.exact: dict[str, Rows] = {}
        with torch_reference.TorchReference(source, artifact.manifest, precision="fp64") as run:
            for index, (name, feeds) in enumerate(self.inputs.items()):
                files = run(feeds, scratch / str(index))
                (file,) = files.values()
                self.exact[name] = answers(np.load(file), feeds)

    def names(self, shown_by: tuple[str, ...]) -> list[str]:
        measured = (*USUAL, *(shown_by or MORE))
        return [name for name in self.inputs if name in measured]

    def run(self, artifact: Artifact, names: Sequence[str]) -> dict[str, Rows]:
        """Run an artifact. A failure is an empty answer for each row."""
        found: dict[str, Rows] = {}
        nothing = (np.empty(0), np.empty(0))
        try:
            with OrtRunner(artifact) as runner:
                for name in names:
                    try:
                        (output,) = runner(self.inputs[name]).values()
                        found[name] = answers(output, self.inputs[name])
                    except EngineryError:
                        found[name] = []
        except EngineryError:
            found = {name: [] for name in names}
        return {
            name: [*rows, *[nothing] * len(self.exact[name])][: len(self.exact[name])]
            for name, rows in found.items()
        }

    def effect(
        self, faulty: Mapping[str, Rows], sound: Mapping[str, Rows], *, quantized: bool
    ) -> Effect:
        """Compare the answers of a faulty artifact with those of the sound one.

        Args:
            faulty: answers on some of the inputs.
            sound: answers on all inputs.
            quantized: the artifacts are quantized.
        """
        all_rows = [
            (name, *row)
            for name in sorted(faulty, key=MORE.__contains__)  # the usual ones first
            for row in zip(faulty[name], sound[name], self.exact[name], strict=True)
        ]
        rows = [row for name, *row in all_rows if name not in MORE]
        changes, spreads = [], []
        for kind in range(len(rows[0][2])):
            triples = [
                (mine[kind], theirs[kind], exact[kind]) for _, mine, theirs, exact in all_rows
            ]
            own = np.array([distance(theirs, exact, exact) for _, theirs, exact in triples])
            errors = np.array([distance(mine, exact, exact) for mine, _, exact in triples])
            usual = slice(len(rows))
            changes.append(max(distance(*triple) for triple in triples[usual]) / own[usual].max())
            spreads.append(float(np.mean(errors**2) / np.mean(own**2)))
        cosines = [cosine(mine[-1], exact[-1]) for mine, _, exact in rows]
        return Effect(
            max_abs=max(largest(mine[0], exact[0]) for mine, _, exact in rows),
            min_cosine=min(cosines),
            mean_cosine=float(np.mean(cosines)),
            neighbours=self._neighbours(faulty[FIRST]),
            change=float(max(changes)),
            spread=max(spreads),
            max_spread=MAX_SPREAD_QUANTIZED if quantized else MAX_SPREAD,
        )

    def _neighbours(self, rows: Rows) -> float:
        """Compare the nearest neighbours within the largest batch."""
        exact = [row[-1] for row in self.exact[FIRST]]
        mine = [
            row[-1] if _comparable(row[-1], whole) else np.zeros_like(whole)
            for row, whole in zip(rows, exact, strict=True)
        ]
        return float(np.mean(_nearest(np.array(mine)) == _nearest(np.array(exact))))


def _nearest(vectors: np.ndarray) -> np.ndarray:
    vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-30)
    similar = vectors @ vectors.T
    np.fill_diagonal(similar, -np.inf)
    return similar.argmax(axis=1)


def answers(output: np.ndarray, feeds: Feeds) -> Rows:
    """Return the answers in an output, without padded positions."""
    mask = feeds.get("attention_mask")
    wide = np.asarray(output, np.float64)
    if mask is None:
        return [(row,) for row in wide]
    if wide.shape[:2] != mask.shape:
        return []
    tokens = [row[real != 0] for row, real in zip(wide, mask, strict=True)]
    return [(row.reshape(-1), row.mean(axis=0)) for row in tokens]


def _comparable(mine: np.ndarray, theirs: np.ndarray) -> bool:
    return mine.shape == theirs.shape and bool(np.isfinite(mine).all())


def distance(mine: np.ndarray, theirs: np.ndarray, exact: np.ndarray) -> float:
    """Return the length of the difference by that of the exact answer; infinity if incomparable."""
    if not _comparable(mine, theirs):
        return math.inf
    return float(np.linalg.norm(mine - theirs) / np.linalg.norm(exact))


def cosine(mine: np.ndarray, exact: np.ndarray) -> float:
    if not _comparable(mine, exact):
        return -1.0
    norms = float(np.linalg.norm(mine) * np.linalg.norm(exact))
    return float(mine @ exact) / norms if norms else 0.0


def largest(mine: np.ndarray, exact: np.ndarray) -> float:
    return float(np.abs(mine - exact).max()) if _comparable(mine, exact) else math.inf


# Held-out inputs


def numpy_sentences() -> list[str]:
    """Return sentences of NumPy's docstrings, which no calibration and no built-in input has."""
    found: dict[str, None] = {}
    folder = Path(np.__file__).parent
    for path in [*sorted((folder / "lib").glob("*.py")), *sorted((folder / "ma").glob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                text = re.sub(r"\s+", " ", ast.get_docstring(node) or "")
                for sentence in re.split(r"(?<=[.!?])\s+", text):
                    if 20 < len(sentence) < 400 and sentence[0].isupper():
                        found[sentence] = None
    everything = list(found)
    np.random.default_rng(1).shuffle(everything)
    return everything


def text_inputs(artifact: Artifact) -> dict[str, Feeds]:
    """Return batches of 1 to 40 texts of 1 to 512 tokens."""
    feeder = TextFeeder.open(artifact, artifact.manifest.graphs[0])
    sentences = iter(numpy_sentences())

    def ids(length: int) -> list[int]:
        """Return a text of so many tokens, made of sentences."""
        if length < 3:
            return [101, 102][:length]
        found: list[int] = []
        while len(found) < length - 2:
            found += feeder([next(sentences)])["input_ids"][0][1:-1].tolist()
        return [101, *found[: length - 2], 102]

    def batch(*lengths: int) -> Feeds:
        width = max(lengths)
        rows = [ids(length) for length in lengths]
        return {
            "input_ids": np.array([[*row, *[0] * (width - len(row))] for row in rows], np.int64),
            "attention_mask": np.array(
                [[n < size for n in range(width)] for size in lengths]
            ).astype(np.int64),
            "token_type_ids": np.zeros((len(lengths), width), np.int64),
        }

    def containing(token: int) -> Feeds:
        feeds = batch(12, 9, 10, 12)
        feeds["input_ids"][:, 4] = token
        return feeds

    pairs = batch(20, 18, 14)
    pairs["token_type_ids"][:, 7:] = pairs["attention_mask"][:, 7:]
    return {
        "batch 40": batch(*(4 + n % 10 for n in range(40))),
        "ragged": batch(90, 70, 20),
        "ragged long": batch(200, 40),
        "length 301": batch(301),
        "ragged 302": batch(302, 60),
        "length 512": batch(512),
        "batch 32": batch(*(4 + n % 5 for n in range(32))),
        "batch 9": batch(*(4 + n % 7 for n in range(9))),
        "length 1": batch(1, 1),
        "length 2": batch(2, 2),
        "length 97": batch(97, 90),
        "length 98": batch(98, 90),
        "length 100": batch(100, 90),
        "length 256": batch(256),
        "one token": batch(1, 12),
        "rare token": containing(RARE),
        "last token": containing(30521),
        "common token": containing(FUNCTION),
        "pairs": pairs,
    }


def image_inputs(artifact: Artifact, *, any_size: bool) -> dict[str, Feeds]:
    """Return batches of 1 to 40 images: digits and parts of photographs in color."""
    digits = load_digit_images()[0][TRAINED:]
    tiles = _tiles(start=0)
    processor = ImageProcessor.open(artifact.path)

    def stacked(images: Sequence[np.ndarray]) -> Feeds:
        return {"pixel_values": np.stack([processor(load_image(image)) for image in images])}

    pixels = stacked([*digits[:24], *tiles[:40]])["pixel_values"]

    def batch(*places: int) -> Feeds:
        return {"pixel_values": pixels[list(places)]}

    found = {
        "batch 40": batch(*range(40)),
        "batch 3": batch(40, 1, 41),
        "batch 32": batch(*range(16, 48)),
        "batch 9": batch(*range(42, 51)),
        "batch 1": batch(52),
    }
    if any_size:
        wide = np.concatenate([found["batch 3"]["pixel_values"]] * 2, axis=3)
        found["not square"] = {"pixel_values": np.ascontiguousarray(wide[..., :48])}
        tall = np.concatenate([wide] * 3, axis=2)
        found["large"] = {"pixel_values": np.ascontiguousarray(tall[:2, :, :96, :64])}
    other_tiles = [*_tiles(start=20), *_tiles(start=40), *_tiles(start=60)]
    for number, name in enumerate(MORE):
        these = slice(16 * number, 16 * (number + 1))
        start = 24 * (number + 1)
        found[name] = stacked([*digits[start : start + 24], *other_tiles[these]])
    return found


def _tiles(start: int) -> list[np.ndarray]:
    """Return squares of photographs; those of two starts below 64 overlap."""
    from sklearn.datasets import load_sample_images

    return [
        photograph[top : top + 64, left : left + 64]
        for photograph in load_sample_images().images
        for top in range(start, 320 + start, 80)
        for left in range(start, 560 + start, 80)
        if top + 64 <= photograph.shape[0] and left + 64 <= photograph.shape[1]
    ]

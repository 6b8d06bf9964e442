"""Transcribe minutes of made-up audio as transformers' pipeline does, and measure time and memory.

    $ python -m benchmarks.long_speech --minutes 10

A Whisper with few random weights, whose tokens vary with the audio, is exported; then the same
recording is transcribed by the artifact and by transformers, window after window and in chunks.
Each runs in a process of its own, so that the peak memory is its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from tests import sounds
from tests.speech import save_whisper

WAYS = {
    "window after window": {"return_timestamps": True},
    "chunks of 30 s": {"chunk_length_s": 30},
    "chunks of 15 s, with times": {"chunk_length_s": 15, "return_timestamps": True},
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--minutes", type=float, default=10)
    arguments.add_argument("--side", choices=("artifact", "transformers"))
    arguments.add_argument("--folder", type=Path)
    arguments.add_argument("--way")
    parsed = arguments.parse_args()
    if parsed.side:
        transcribe(parsed.side, parsed.folder, parsed.way)
        return
    with tempfile.TemporaryDirectory() as folder:
        compare(Path(folder), parsed.minutes)


def compare(folder: Path, minutes: float) -> None:
    from enginery import export_model

    source = save_whisper(folder / "whisper", time_stamps=True)
    export_model(str(source), task="automatic-speech-recognition-with-past", out=folder / "onnx")
    samples = sounds.recording(60 * minutes, seed=1)
    (folder / "speech.wav").write_bytes(sounds.wav(samples))
    print(f"{minutes:g} minutes, {len(samples) / 1e6:.1f} million samples\n")
    sides = ("enginery, s", "transformers, s", "enginery, MB", "transformers, MB")
    print("|", " | ".join(["", "characters", "parts", "equal", *sides]), "|")
    print("|-|-|-|-|-|-|-|-|")
    for way in WAYS:
        mine, theirs = (run(side, folder, way) for side in ("artifact", "transformers"))
        equal = mine["text"] == theirs["text"] and mine["chunks"] == theirs["chunks"]
        figures = [f"{side['seconds']:.1f}" for side in (mine, theirs)]
        figures += [f"{side['grown_mb']:.0f}" for side in (mine, theirs)]
        sizes = (len(mine["text"]), len(mine["chunks"]))
        print("|", " | ".join(map(str, [way, *sizes, "yes" if equal else "NO", *figures])), "|")


def run(side: str, folder: Path, way: str) -> dict:
    command = [
        sys.executable,
        "-m",
        "benchmarks.long_speech",
        "--side",
        side,
        "--folder",
        str(folder),
        "--way",
        way,
    ]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


def transcribe(side: str, folder: Path, way: str) -> None:
    path, options = folder / "speech.wav", WAYS[way]
    if side == "artifact":
        from enginery import load_model

        with load_model(folder / "onnx") as model:
            model.generate(
                [(sounds.silence(1), sounds.RATE)], language="en"
            )  # what any input takes
            before, started = peak_mb(), time.perf_counter()
            (result,) = model.generate([path], language="en", **options)
            chunks = [(c.text, c.timestamp) for c in getattr(result, "chunks", ())]
            found = {"text": result.text, "chunks": chunks}
    else:
        import transformers

        transformers.utils.logging.set_verbosity_error()
        pipeline = transformers.pipeline(
            "automatic-speech-recognition", model=str(folder / "whisper"), device="cpu"
        )
        generate = {"language": "en", "num_beams": 1}
        pipeline(sounds.silence(1), generate_kwargs=generate)
        before, started = peak_mb(), time.perf_counter()
        samples = np.frombuffer(path.read_bytes()[44:], "<i2").astype(np.float32) / 32768
        answer = pipeline(samples, generate_kwargs=generate, **options)
        chunks = [(c["text"], c["timestamp"]) for c in answer.get("chunks", ())]
        found = {"text": answer["text"], "chunks": chunks}
    seconds = time.perf_counter() - started
    print(json.dumps({**found, "seconds": seconds, "grown_mb": peak_mb() - before}))


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()

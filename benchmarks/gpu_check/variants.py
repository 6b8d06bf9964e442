"""The ways of running a model at one shape: enginery's runner, PyTorch and plain ONNX Runtime.

On `host`, inputs and outputs are numpy arrays. On `device`, inputs are torch tensors on the GPU,
and outputs stay there. Every run is synchronized. All ways of a shape take turns in one process, in
rounds; every other round has the reverse order (bench/measurement/rounds.py). Medians and intervals
are those of bench/measurement/statistics.py.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.gpu_check.pytorch import tensors_of, wait
from benchmarks.gpu_check.work import Work, describe_error
from enginery.bench.backends.warmup import take_turn, warm_up
from enginery.bench.measurement.rounds import RoundLimits, Rounds, run_rounds, runs_in_turn
from enginery.bench.measurement.statistics import compare, latency
from enginery.core.artifact.artifact import Artifact
from enginery.core.model.feeds import Feeds
from enginery.runtime.onnxruntime.runner import OrtRunner, RunnerOptions

PLAIN, BOUND, GRAPH = "enginery, no IOBinding", "enginery, IOBinding", "enginery, CUDA graph"
LOADED = "enginery, as load_model runs"
EAGER, SDPA, COMPILED = "PyTorch eager", "PyTorch SDPA", "torch.compile"
EAGER_FP32 = "PyTorch eager FP32"
BARE_FP16, BARE_FP32 = "ONNX Runtime", "ONNX Runtime, exported FP32"
PLACES = ("host", "device")
CONFIDENCE, SMALLEST = 0.95, 0.02
WAYS: dict[str, dict[str, Any]] = {
    PLAIN: {"io_binding": False},
    BOUND: {},
    GRAPH: {"cuda_graph": True},
}
"""Options of enginery's runner in each of its ways."""


@dataclass(frozen=True)
class Variant:
    """A way of running a model."""

    side: str
    """One of the names above."""
    place: str
    run: Callable[[], object]

    @property
    def is_enginery(self) -> bool:
        return self.side in (*WAYS, LOADED)

    @property
    def name(self) -> str:
        return f"{self.side}, {self.place}"


def enginery_variants(
    runners: Mapping[str, OrtRunner], feeds: Feeds, device: str
) -> Iterator[Variant]:
    """Return the ways of enginery's runner; without IOBinding it runs on `host` only."""
    tensors = tensors_of(feeds, device)
    for side, runner in runners.items():
        yield Variant(side, "host", lambda runner=runner: runner(feeds))
        if side != PLAIN:
            yield Variant(side, "device", lambda runner=runner: runner.run_on_device(tensors))


def pytorch_variants(models: Mapping[str, Any], feeds: Feeds, device: str) -> Iterator[Variant]:
    """Return PyTorch's models; only the output that the graph has is copied back."""
    tensors = tensors_of(feeds, device)
    for side, model in models.items():
        yield Variant(side, "host", _host_run(model, feeds, device))
        yield Variant(side, "device", _device_run(model, tensors, device))


def bare_variants(artifacts: Mapping[str, Artifact], feeds: Feeds, device: str) -> list[Variant]:
    """Return ONNX Runtime's own sessions on the artifacts' graphs, with its default options."""
    import onnxruntime as ort

    gpu = ["CUDAExecutionProvider"] if device == "cuda" else []
    found = []
    for side, artifact in artifacts.items():
        providers = [*gpu, "CPUExecutionProvider"]
        session = ort.InferenceSession(str(artifact.model), providers=providers)
        found.append(Variant(side, "host", lambda s=session: s.run(None, feeds)))
    return found


def open_runners(work: Work, artifact: Artifact, left_out: dict[str, str]) -> dict[str, OrtRunner]:
    """Return enginery's runner in each of its ways; record those that cannot be opened.

    A way that does not run on a GPU is a failed check.
    """
    opened: dict[str, OrtRunner] = {}
    for side, options in WAYS.items():
        try:
            opened[side] = OrtRunner(artifact, RunnerOptions(**options), providers=[work.provider])
        except Exception as error:
            _record_skipped(work, left_out, side, error, is_failure=work.on_gpu)
    return opened


def measure(work: Work, variants: Sequence[Variant], left_out: dict[str, str]) -> dict[str, Any]:
    """Return the latency of each variant, and the speedups of enginery's ways over the others."""
    rounds = _take_turns(work, variants, left_out)
    there = [variant for variant in variants if variant.name in rounds.turns]
    return {
        "latency": {
            name: asdict(latency(turns, confidence=CONFIDENCE))
            for name, turns in rounds.turns.items()
        },
        "ratios": [
            _ratio(rounds, mine, other)
            for place in PLACES
            for mine in there
            if mine.is_enginery and mine.place == place
            for other in there
            if not other.is_enginery and other.place == place
        ],
        "left out": left_out,
        "rounds": rounds.ended,
    }


def _ratio(rounds: Rounds, mine: Variant, other: Variant) -> dict[str, Any]:
    found = compare(
        rounds.turns[other.name],
        rounds.turns[mine.name],
        confidence=CONFIDENCE,
        smallest=SMALLEST,
        names=(mine.name, other.name),
    )
    return {"place": mine.place, "ours": mine.side, "theirs": other.side, **asdict(found)}


def _take_turns(work: Work, variants: Sequence[Variant], left_out: dict[str, str]) -> Rounds:
    """Warm all up, leave out those that fail, and run rounds of the rest."""
    settings = work.settings
    runs: dict[str, int] = {}
    turns: dict[str, Any] = {}
    for variant in variants:
        try:
            warm = warm_up(variant.run, max_seconds=settings.warm_up_seconds)
        except Exception as error:
            is_failure = variant.is_enginery and work.on_gpu
            _record_skipped(work, left_out, variant.name, error, is_failure=is_failure)
            continue
        runs[variant.name] = min(runs_in_turn(warm.typical_ms), settings.most_runs)
        turns[variant.name] = lambda count, run=variant.run: take_turn(run, runs=count)
    limits = RoundLimits(
        CONFIDENCE,
        0.01,
        settings.min_rounds,
        settings.max_rounds,
        min(settings.point_seconds, max(1.0, work.left() - 5.0)),
    )
    # Each turn collects garbage before it. With torch's and the compiler's objects set aside that
    # takes a millisecond and not a tenth of a second, which is more than most turns.
    gc.collect()
    gc.freeze()
    try:
        return run_rounds(turns, runs, limits)
    finally:
        gc.unfreeze()


def _record_skipped(
    work: Work, left_out: dict[str, str], name: str, error: Exception, *, is_failure: bool
) -> None:
    """Record why a way does not run; if it is enginery's on a GPU, the check fails."""
    left_out[name] = describe_error(error)
    if is_failure:
        work.check(f"{name} of {work.model}", passed=False, found=describe_error(error))
    else:
        work.note(f"{name}: left out, {describe_error(error)}")


def say_medians(work: Work, title: str, found: Mapping[str, Any]) -> None:
    """Print the medians of a shape."""
    medians = (f"{name} {one['median_ms']:.3f} ms" for name, one in found["latency"].items())
    print(f"{work.name}: {title}: {', '.join(medians)}", flush=True)


def _host_run(model: Any, feeds: Feeds, device: str) -> Callable[[], object]:
    def run() -> object:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.inference_mode():
            # Copying to the host waits for the GPU.
            return model(**tensors_of(feeds, device)).last_hidden_state.cpu().numpy()

    return run


def _device_run(
    model: Any, tensors: Mapping[str, torch.Tensor], device: str
) -> Callable[[], object]:
    def run() -> object:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.inference_mode():
            found = model(**tensors).last_hidden_state
        wait(device)
        return found

    return run

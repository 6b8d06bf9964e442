"""Plan which backends are measured: this package's runner, and those it is compared with.

>>> plans, left_out = plan_contenders(subjects, BenchConfig())
>>> [plan.name for plan in plans], left_out
(['enginery', 'onnxruntime', 'optimum', 'pytorch'], {'pytorch-fp16': 'on the CPU it is …'})

A plan says what a process opens; whether that works is known once it has tried. Providers are
chosen first: after a fallback to the CPU, nothing else is planned for the GPU.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from enginery.bench.config import AUTO, CONTENDERS, OURS, BenchConfig, contender_names
from enginery.bench.target import Subject
from enginery.core.errors import ProviderError
from enginery.runtime.engines.selection import choose_with_engines
from enginery.runtime.onnxruntime.binding import BUCKETS
from enginery.runtime.providers.known import CPU, CUDA, TENSORRT, TENSORRT_RTX, short_name
from enginery.runtime.providers.selection import Provider
from enginery.runtime.providers.specification import (
    ProviderSpec,
    check_run_options,
    parse_providers,
)

_LABELS = {
    OURS: "enginery's runner",
    "enginery-cpu": "enginery's runner on the CPU",
    "onnxruntime": "onnxruntime.InferenceSession.run",
    "optimum": "Optimum's ORTModel",
    "pytorch": "PyTorch, eager mode",
    "pytorch-compile": "PyTorch, torch.compile",
    "pytorch-fp16": "PyTorch, FP16",
}


@dataclass(frozen=True)
class Plan:
    """One contender on one subject."""

    name: str
    """Unique in a measurement: the contender, after its artifact where there are several."""
    kind: str
    subject: str
    asked: bool
    """Named by the user, so that not running is an error."""
    providers: tuple[ProviderSpec, ...]
    """What is asked for, with the options."""
    device: str
    """Of PyTorch: cpu, or cuda:0, the GPU that the providers are given."""
    io_binding: bool = True
    cuda_graph: bool = False
    shrink_arena: bool = False
    buckets: int = BUCKETS
    """Shapes that keep their buffers on a GPU, and their CUDA graphs."""

    @property
    def label(self) -> str:
        """In words: `PyTorch, eager mode`."""
        return _LABELS[self.kind]

    def as_json(self) -> dict[str, Any]:
        """For the process that opens it, and for the result."""
        return {**asdict(self), "label": self.label}


def providers_of(config: BenchConfig) -> tuple[ProviderSpec, ...]:
    """The providers that the options, or the environment, ask for.

    Raises:
        ProviderError: a name is unknown, or the first has no CUDA graphs and they are asked for.
        OptionError: an option does not fit its provider, or ways of running exclude each other.
    """
    specs = parse_providers(config.provider, config.provider_option, default="cpu")
    check_run_options(
        specs,
        io_binding=config.io_binding,
        cuda_graph=config.cuda_graph,
        shrink_arena=config.shrink_arena,
    )
    return specs


def plan_contenders(
    subjects: Sequence[Subject], config: BenchConfig, *, buckets: int = BUCKETS
) -> tuple[list[Plan], dict[str, str]]:
    """Who is to run, and who cannot be expected to, with the reasons.

    Each artifact runs through our runner and, where it was not narrowed, bare ONNX Runtime;
    PyTorch and Optimum run once, for the first.

    Args:
        subjects: what is measured.
        config: beside what, and on which providers.
        buckets: shapes that our runner is to keep buffers and CUDA graphs for.

    Raises:
        OptionError: a contender is unknown, or as `providers_of`.
        ProviderError: one that was named cannot run, the provider cannot be had, or as
            `providers_of`.
    """
    named = contender_names(config)
    specs = providers_of(config)
    heads = {
        subject.name: choose_with_engines(
            subject.artifact, subject.record, specs, allow_fallback=config.allow_fallback
        )[0][0]
        for subject in subjects
    }
    plans: list[Plan] = []
    left_out: dict[str, str] = {}

    def add(kind: str, subject: Subject, *, asked: bool) -> None:
        name = kind if len(subjects) == 1 else f"{subject.name}: {kind}"
        head = heads[subject.name]
        providers = specs
        if kind == "enginery-cpu":
            providers, head = (ProviderSpec("cpu"),), Provider(CPU, "for comparison")
        elif kind == "optimum":  # it takes one provider, and falls back to none by itself
            providers = (ProviderSpec(short_name(head.name), head.options),)
        device = _device(head)
        plans.append(
            Plan(
                name,
                kind,
                subject.name,
                asked,
                providers=providers,
                device=device,
                io_binding=config.io_binding,
                cuda_graph=config.cuda_graph and device != "cpu",
                shrink_arena=config.shrink_arena,
                buckets=buckets,
            )
        )

    for subject in subjects:
        add(OURS, subject, asked=True)
    wanted = named or (CONTENDERS if config.against == AUTO else ())
    for kind in wanted:
        repeated = kind in ("onnxruntime", "enginery-cpu")
        for subject in subjects if repeated else subjects[:1]:
            head = heads[subject.name]
            on_gpu = _device(head) != "cpu"
            reason = _skip_reason(kind, subject, on_gpu=on_gpu)
            if not reason and not named:
                reason = _not_by_itself(kind, on_gpu=on_gpu, on_cpu=head.name == CPU)
            if reason and named:
                raise ProviderError(
                    f"{kind} cannot run beside {subject.name}: {reason}.",
                    do="Leave it out of --against, or name --against auto for those that can run.",
                )
            if reason:
                left_out[kind] = reason
            else:
                add(kind, subject, asked=bool(named))
    return plans, left_out


def for_images(plans: Sequence[Plan], left_out: dict[str, str]) -> list[Plan]:
    """Those that run on images; of `auto`, the others go to `left_out` with the reason."""
    kept = []
    for plan in plans:
        if plan.asked or plan.kind in ("onnxruntime", "enginery-cpu"):
            kept.append(plan)
        else:
            left_out[plan.name] = "on images it runs where it is named"
    return kept


def _skip_reason(kind: str, subject: Subject, *, on_gpu: bool) -> str:
    """Why a contender cannot run, as far as that is known without trying."""
    manifest = subject.artifact.manifest
    if kind == "optimum":
        if importlib.util.find_spec("optimum.onnxruntime") is None:
            return "optimum is not installed (pip install 'enginery[export]')"
        if subject.is_bare or manifest.source.kind == "onnx":
            return "it needs a Hugging Face model's config.json and task, an .onnx file has none"
        if len(manifest.graphs) > 1:
            return "it runs a whole model of several graphs, and one graph is measured"
    if kind.startswith("pytorch"):
        if importlib.util.find_spec("torch") is None:
            return "torch is not installed (pip install 'enginery[export]')"
        if subject.is_bare or manifest.source.kind == "onnx":
            return "an .onnx file has no PyTorch model"
    if kind == "pytorch-compile" and not on_gpu and not any(map(shutil.which, ("g++", "clang++"))):
        return "torch.compile needs a C++ compiler on the CPU, and g++ was not found"
    return ""


def _not_by_itself(kind: str, *, on_gpu: bool, on_cpu: bool) -> str:
    """Why `auto` leaves a contender out that could run."""
    if kind == "pytorch-fp16" and not on_gpu:
        return "PyTorch's FP16 is for GPUs; on the CPU it is slower than FP32 (name it to see)"
    if kind == "pytorch-compile" and not on_gpu:
        return "torch.compile compiles for each shape on the CPU, which takes minutes (name it)"
    if kind == "enginery-cpu" and on_cpu:
        return "the CPU is measured anyway"
    return ""


def _device(head: Provider) -> str:
    """Where PyTorch runs beside a provider: on the same GPU."""
    if head.name in (CUDA, TENSORRT, TENSORRT_RTX):
        return f"cuda:{head.options.get('device_id', '0')}"
    return "cpu"


def runs_on_cpu(providers: Sequence[dict[str, Any]]) -> bool:
    """Whether the first of a contender's providers is the CPU."""
    return bool(providers) and providers[0]["name"] == CPU

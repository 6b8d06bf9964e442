"""Plan which backends are measured: enginery's runner, and those it is compared with.

>>> target = Target.open(artifact, "", allow_failed=False)
>>> plans, left_out = plan_backends([target], BenchConfig(against="onnxruntime"))
>>> [plan.name for plan in plans], left_out
(['enginery', 'onnxruntime'], {})

A plan tells a process what to load; loading may still fail. Providers are chosen here, before any
process starts: after a fallback to the CPU, no backend is planned for the GPU.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

from enginery.bench.backends.backend import BackendPlan
from enginery.bench.config import AUTO, BACKENDS, ENGINERY, BenchConfig, backend_names
from enginery.bench.target import Target
from enginery.core.errors import ProviderError
from enginery.core.extras import is_installed
from enginery.core.versions import export_extra, installed_version
from enginery.runtime.engines.selection import choose_with_engines
from enginery.runtime.onnxruntime.binding import BUCKETS
from enginery.runtime.providers.known import CPU, CUDA, TENSORRT, TENSORRT_RTX, short_name
from enginery.runtime.providers.selection import Provider
from enginery.runtime.providers.specification import (
    ProviderSpec,
    check_run_options,
    parse_providers,
)


def providers_of(config: BenchConfig) -> tuple[ProviderSpec, ...]:
    """Return the providers of the options or, without any, of ENGINERY_PROVIDERS.

    Raises:
        ProviderError: a name is unknown, or `cuda_graph` is set and the first has no CUDA graphs.
        OptionError: a provider does not have an option, or options exclude each other.
    """
    specs = parse_providers(config.providers, config.provider_option, default="cpu")
    check_run_options(
        specs,
        io_binding=config.io_binding,
        cuda_graph=config.cuda_graph,
        shrink_arena=config.shrink_arena,
    )
    return specs


def plan_backends(
    targets: Sequence[Target], config: BenchConfig, *, buckets: int = BUCKETS
) -> tuple[list[BackendPlan], dict[str, str]]:
    """Plan the backends of each target.

    Each target runs in enginery's runner, and in plain ONNX Runtime if that is selected. PyTorch
    and Optimum run once, for the first target.

    Args:
        targets: the models.
        config: the options.
        buckets: number of shapes for which enginery's runner keeps buffers and CUDA graphs.

    Returns:
        The plans; and backend -> reason for those of `auto` that are left out.

    Raises:
        OptionError: a backend is unknown, or as in `providers_of`.
        ProviderError: a backend named in `against` cannot run, no provider is available, or as in
            `providers_of`.
    """
    named = backend_names(config)
    specs = providers_of(config)
    heads = {
        target.name: choose_with_engines(
            target.artifact, target.record, specs, allow_fallback=config.allow_fallback
        )[0][0]
        for target in targets
    }
    plans: list[BackendPlan] = []
    left_out: dict[str, str] = {}

    def add(kind: str, target: Target, *, required: bool) -> None:
        name = kind if len(targets) == 1 else f"{target.name}: {kind}"
        head = heads[target.name]
        providers = specs
        if kind == "enginery-cpu":
            providers, head = (ProviderSpec("cpu"),), Provider(CPU, "for comparison")
        elif kind == "optimum":  # accepts a single provider, without a fallback
            providers = (ProviderSpec(short_name(head.name), head.options),)
        device = _device(head)
        plans.append(
            BackendPlan(
                name,
                kind,
                target.name,
                required,
                providers=providers,
                device=device,
                io_binding=config.io_binding,
                cuda_graph=config.cuda_graph and device != "cpu",
                shrink_arena=config.shrink_arena,
                buckets=buckets,
                threads=config.threads,
                allow_fallback=config.allow_fallback,
                trust_remote_code=config.trust_remote_code,
                allow_pickle=config.allow_pickle,
            )
        )

    for target in targets:
        add(ENGINERY, target, required=True)
    kinds = named or (BACKENDS if config.against == AUTO else ())
    for kind in kinds:
        for_each_target = kind in ("onnxruntime", "enginery-cpu")
        measured = targets if for_each_target else targets[:1]
        for target in measured:
            head = heads[target.name]
            on_gpu = _device(head) != "cpu"
            reason = _skip_reason(kind, target, on_gpu=on_gpu)
            if not reason and not named:
                reason = _auto_skip_reason(kind, on_gpu=on_gpu, on_cpu=head.name == CPU)
            if reason and named:
                raise ProviderError(
                    f"{kind} cannot be compared with {target.name}: {reason}.",
                    do="Leave it out of --against, or use --against auto for all that can run.",
                )
            if reason:
                left_out[kind] = reason
            else:
                add(kind, target, required=bool(named))
    return plans, left_out


def keep_image_backends(
    plans: Sequence[BackendPlan], left_out: dict[str, str]
) -> list[BackendPlan]:
    """Return the plans that run on images; of `auto`, add the others to `left_out`."""
    remaining = []
    for plan in plans:
        if plan.required or plan.kind in ("onnxruntime", "enginery-cpu"):
            remaining.append(plan)
        else:
            left_out[plan.name] = "on images it runs only if --against names it"
    return remaining


def _skip_reason(kind: str, target: Target, *, on_gpu: bool) -> str:
    """Return why a backend cannot run, as far as is known without loading it; empty if it can."""
    manifest = target.artifact.manifest
    if kind == "optimum":
        # The package optimum alone has no such folder; to look it up by name would import optimum.
        if not installed_version("optimum-onnx"):
            return "optimum is not installed (pip install 'enginery[export]')"
        if target.is_onnx_file or manifest.source.kind == "onnx":
            return "it needs a Hugging Face config.json and a task, and an .onnx file has neither"
        if len(manifest.graphs) > 1:
            return "it runs all graphs of the model, and a single graph is measured"
    if kind.startswith("pytorch"):
        if not is_installed("torch"):
            return f"torch is not installed (pip install 'enginery[{export_extra()}]')"
        if target.is_onnx_file or manifest.source.kind == "onnx":
            return "an .onnx file has no PyTorch model"
    if kind == "pytorch-compile" and not on_gpu and not any(map(shutil.which, ("g++", "clang++"))):
        return (
            "on the CPU torch.compile needs a C++ compiler, and neither g++ nor clang++ was found"
        )
    return ""


def _auto_skip_reason(kind: str, *, on_gpu: bool, on_cpu: bool) -> str:
    """Return why `auto` leaves out a backend that could run; empty if it does not."""
    if kind == "pytorch-fp16" and not on_gpu:
        return "on the CPU, FP16 in PyTorch is slower than FP32 (name it in --against to run it)"
    if kind == "pytorch-compile" and not on_gpu:
        return "on the CPU, torch.compile takes minutes per shape (name it in --against to run it)"
    if kind == "enginery-cpu" and on_cpu:
        return "enginery's runner already runs on the CPU"
    return ""


def _device(head: Provider) -> str:
    """Return PyTorch's device: the GPU of the provider, or the CPU."""
    if head.name in (CUDA, TENSORRT, TENSORRT_RTX):
        return f"cuda:{head.options.get('device_id', '0')}"
    return "cpu"


def runs_on_cpu(providers: Sequence[dict[str, Any]]) -> bool:
    """Return True if the first of a backend's providers is the CPU."""
    return bool(providers) and providers[0]["name"] == CPU

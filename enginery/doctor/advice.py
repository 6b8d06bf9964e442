"""Check settings that slow models down or keep them off the GPU, without measuring.

`enginery bench` finds what only a measurement shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from enginery.core.errors import EngineryError
from enginery.doctor.report import Finding, MachineStatus, NvidiaStatus, ProviderStatus
from enginery.runtime.onnxruntime.session import Advice, exhaustive_search, too_many_threads
from enginery.runtime.providers.known import (
    CPU,
    CUDA,
    OPENVINO,
    TENSORRT,
    TENSORRT_RTX,
    short_name,
)
from enginery.runtime.providers.specification import ENVIRONMENT, ProviderSpec, parse_providers

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_THREAD_OPTIONS = {
    OPENVINO: "num_of_threads",
    "XnnpackExecutionProvider": "intra_op_num_threads",
}
_NVIDIA = (CUDA, TENSORRT, TENSORRT_RTX)


def check_settings(
    environment: Mapping[str, str],
    machine: MachineStatus,
    nvidia: NvidiaStatus,
    providers: Sequence[ProviderStatus],
) -> Iterator[Finding]:
    """Yield a finding for each setting that slows models down on this machine.

    Args:
        environment: environment variables, as in `os.environ`.
        machine: has the number of cores.
        nvidia: has the GPUs.
        providers: status of each execution provider.
    """
    specs: tuple[ProviderSpec, ...] = ()
    try:
        if environment.get(ENVIRONMENT, "").strip():
            specs = parse_providers(environment[ENVIRONMENT])
    except EngineryError as error:
        yield Finding(
            "error",
            f"{ENVIRONMENT} cannot be used",
            error.message,
            error.do or f"Correct it, or unset {ENVIRONMENT}.",
        )
    else:
        yield from _check_gpu(environment, specs, nvidia, providers)
    for advice in (
        *_check_convolution_search(specs),
        *_check_threads(environment, specs, machine),
        *_check_cpu_limits(machine),
    ):
        yield Finding("note", advice.finding, advice.evidence, advice.remedy)


def _check_gpu(
    environment: Mapping[str, str],
    specs: Sequence[ProviderSpec],
    nvidia: NvidiaStatus,
    providers: Sequence[ProviderStatus],
) -> Iterator[Finding]:
    """Report a provider that does not run here, and a GPU that no variable names."""
    by_name = {status.name: status for status in providers}
    head = specs[0].full_name if specs else CPU
    if specs and head in by_name and not by_name[head].runs:
        status = by_name[head]
        yield Finding(
            "error",
            f"{ENVIRONMENT} names {specs[0].name}, which does not run here",
            status.reason,
            status.remedy or f"Unset {ENVIRONMENT}.",
        )
    running = [short_name(name) for name in _NVIDIA if name in by_name and by_name[name].runs]
    if head == CPU and running and nvidia.gpus:
        state = f"is {environment[ENVIRONMENT]}" if specs else "is not set"
        yield Finding(
            "note",
            "there is a GPU, but models run on the CPU unless a command names it",
            f"{nvidia.gpus[0].name}, which {' and '.join(running)} can use; {ENVIRONMENT} {state}",
            f"Set {ENVIRONMENT}={running[0]}, or pass --providers {running[0]}.",
        )


def _check_convolution_search(specs: Sequence[ProviderSpec]) -> Iterator[Advice]:
    """Check for an exhaustive search of algorithms, which slows down models with convolutions."""
    for spec in specs:
        if spec.options.get("cudnn_conv_algo_search") == "EXHAUSTIVE":
            yield exhaustive_search(
                f"{ENVIRONMENT} has {spec.name}.cudnn_conv_algo_search=EXHAUSTIVE; models without "
                "convolutions are not concerned"
            )


def _check_threads(
    environment: Mapping[str, str], specs: Sequence[ProviderSpec], machine: MachineStatus
) -> Iterator[Advice]:
    """Check for more threads than cores, in OMP variables and options of providers.

    The OMP variables apply to PyTorch. ONNX Runtime's own threads are an option of each command.
    """
    cores = machine.physical_cores
    settings = {name: environment.get(name, "") for name in _THREADS}
    for spec in specs:
        if option := _THREAD_OPTIONS.get(spec.full_name):
            settings[f"{spec.name}.{option}"] = spec.options.get(option, "")
    for name, value in settings.items():
        # OMP accepts a list with one number per nesting level; the first is the outermost.
        outermost = value.partition(",")[0].strip()
        threads = int(outermost) if outermost.isascii() and outermost.isdigit() else 0
        advice = too_many_threads(
            threads,
            cores,
            evidence=f"{name} is {threads}, on {cores} cores",
            remedy=f"Set {name} to {cores} or fewer, or leave it out.",
        )
        if advice:
            yield advice


def _check_cpu_limits(machine: MachineStatus) -> Iterator[Advice]:
    """Check for a CPU limit, which ONNX Runtime ignores: it starts a thread for each core.

    Observed with an affinity of one CPU of two; github.com/microsoft/onnxruntime/issues/8313.
    """
    if 0 < machine.usable_cpus < machine.physical_cores:
        yield Advice(
            "thread limits",
            "ONNX Runtime starts a thread for each core, but this process may not use all of them",
            f"{machine.usable_cpus} CPUs usable of {machine.physical_cores} cores",
            f"Set the number of threads: --threads {machine.usable_cpus} for bench, "
            f"load_model(…, threads={machine.usable_cpus}). predict uses the limit by itself.",
        )

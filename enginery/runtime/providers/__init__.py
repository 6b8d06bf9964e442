"""Execution providers: names, options, availability on this machine, and selection."""

from enginery.runtime.providers.options import (
    CpuOptions,
    CudaOptions,
    TensorrtOptions,
    TensorrtRtxOptions,
)
from enginery.runtime.providers.selection import Provider, choose_providers
from enginery.runtime.providers.specification import ProviderSpec, parse_providers

__all__ = [
    "CpuOptions",
    "CudaOptions",
    "Provider",
    "ProviderSpec",
    "TensorrtOptions",
    "TensorrtRtxOptions",
    "choose_providers",
    "parse_providers",
]

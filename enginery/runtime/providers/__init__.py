"""Execution providers: names, options, availability on this machine, and selection."""

from enginery.runtime.providers.selection import Provider, choose_providers
from enginery.runtime.providers.specification import ProviderSpec, parse_providers

__all__ = [
    "Provider",
    "ProviderSpec",
    "choose_providers",
    "parse_providers",
]

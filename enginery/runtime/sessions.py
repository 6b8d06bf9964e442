"""Sessions of ONNX Runtime on exactly the providers that were chosen.

    >>> session = new_session(artifact.model, choose_providers(["cpu"]), ort.SessionOptions())

ONNX Runtime's own silent fallback to the CPU is off.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from enginery.core.errors import ProviderError
from enginery.runtime.obstacles import register_plugin
from enginery.runtime.provider_names import TENSORRT_RTX
from enginery.runtime.providers import Provider

# x86 processors without VNNI add pairs of INT8 products in 16 bits, which saturate: a graph that is
# right elsewhere gives wrong answers there. With this entry ONNX Runtime takes kernels that do not
# saturate, which are slower; other processors and other graphs are not affected.
EXACT_INT8 = ("session.x64quantprecision", "1")


def new_session(path: Path, providers: Sequence[Provider], options: Any) -> Any:
    """An `onnxruntime.InferenceSession` on exactly the providers given.

    Args:
        path: an ONNX file.
        providers: as `choose_providers` gives them, each with its options.
        options: an `onnxruntime.SessionOptions`; its log is made quiet, INT8 exact, and a plugin is
            added.

    Raises:
        ProviderError: a provider did not register, or the graph cannot be loaded.
    """
    import onnxruntime as ort

    options.log_severity_level = 4  # errors come back as exceptions
    options.add_session_config_entry(*EXACT_INT8)
    wanted: list[tuple[str, dict[str, str]]] | None = [
        (provider.name, dict(provider.options)) for provider in providers
    ]
    for provider in providers:
        if provider.name == TENSORRT_RTX:
            # A plugin is given by its devices. ONNX Runtime then takes no list of names beside
            # it, and adds the CPU itself.
            devices = register_plugin(provider.name)
            options.add_provider_for_devices(devices, dict(provider.options))
            wanted = None
    try:
        try:
            session = ort.InferenceSession(str(path), options, providers=wanted, enable_fallback=0)
        except Exception as error:
            # Its fusions hand FP8 numbers between FP32 ones to kernels that take INT8 alone.
            if "float8" not in str(error):
                raise
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
            session = ort.InferenceSession(str(path), options, providers=wanted, enable_fallback=0)
    except Exception as error:
        raise ProviderError(f"{path} cannot be loaded by ONNX Runtime: {error}") from error
    session.disable_fallback()  # run() has a fallback of its own
    registered = session.get_providers()
    for provider in providers:
        if provider.name not in registered:
            raise ProviderError(
                f"{provider.name} was asked for but did not register; "
                f"the session has {', '.join(registered)}.",
                do="Run: enginery doctor",
            )
    return session

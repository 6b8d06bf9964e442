"""The command provider-options."""

from __future__ import annotations

import json
from pathlib import Path

from enginery.cli.app import OUTPUT, Flag, Output
from enginery.cli.app import application as app


@app.command(name="provider-options")
def show_provider_options(
    artifact: Path,
    *,
    provider: str = "tensorrt",
    graph: str = "",
    profile: tuple[str, ...] = (),
    fp16: Flag = False,
    save_context: Flag = False,
    output: Output = OUTPUT,
) -> None:
    """Print the options with which ONNX Runtime builds and caches TensorRT engines itself.

    They are for Optimum and plain ONNX Runtime sessions. Engines built by `enginery build` need
    none.

    Parameters
    ----------
    artifact
        The artifact's directory.
    provider
        tensorrt or tensorrt-rtx.
    graph
        One of several graphs; empty for the first.
    profile
        A profile, batch=1:8:32,sequence=8:128:512; repeat it for several. Without it: the profiles
        of the artifact's engines.
    fp16
        Let TensorRT 10 choose FP16 for an FP32 graph by itself.
    save_context
        Let the tensorrt provider save the engine's ONNX wrapper beside the engine.
    """
    from enginery.core.artifact.artifact import Artifact
    from enginery.engine.provider_options import provider_options, to_json, to_python

    console = output.console()
    options = provider_options(
        Artifact.open(artifact),
        provider,
        graph=graph,
        profiles=profile,
        fp16=fp16,
        save_context=save_context,
    )
    console.json(json.loads(to_json(provider, options)))
    console.line(to_python(provider, options).rstrip())

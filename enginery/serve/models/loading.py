"""Load and reload the models of a process, and log what serves them."""

from __future__ import annotations

import gc
import logging

from enginery.runtime.providers.selection import REQUESTED
from enginery.serve.models.registry import ModelRegistry
from enginery.serve.models.served_model import LocalModel, ServedModel

_log = logging.getLogger("enginery.serve")

_COLLECTED_OBJECTS = 20_000
"""Number of new objects after which Python looks for garbage in cycles."""


async def load(registry: ModelRegistry) -> None:
    """Load the models and log what serves them; raise EngineryError if one cannot be loaded."""
    await registry.load()
    settle_memory()
    for model in registry:
        if not isinstance(model, LocalModel):
            continue  # the process that runs it logs it
        first = model.backend.providers[0]
        why = "" if first.reason == REQUESTED else f" ({first.reason})"
        manifest = model.artifact.manifest
        _log.info(
            "ready: %s, %s, %s on %s%s, %s",
            model.name,
            manifest.task,
            manifest.describe_precision(),
            first.name,
            why,
            _validation_words(model),
        )
        _warn_if_failed(model)


async def reload(registry: ModelRegistry) -> None:
    """Load the artifacts again from their directories, and log the result for each."""
    for name, outcome in (await registry.reload()).items():
        if not outcome.swapped:
            _log.error("%s: %s", name, outcome.message)
            continue
        model = registry.get(name)
        _log.info("%s: %s, %s", name, outcome.message, _validation_words(model))
        _warn_if_failed(model)


def settle_memory() -> None:
    """Exclude what was loaded from garbage collections, and enable them."""
    if not gc.isenabled():
        gc.freeze()  # all objects so far are permanent
        # Requests in progress have thousands of objects, of which a collection finds none to free.
        # With Python's own threshold of 700 they took a tenth of a front's time.
        gc.set_threshold(_COLLECTED_OBJECTS, *gc.get_threshold()[1:])
        gc.enable()


def _validation_words(model: ServedModel) -> str:
    status = model.artifact.validation_status()
    return "not validated" if status == "none" else f"validation {status}"


def _warn_if_failed(model: ServedModel) -> None:
    if failed := model.artifact.failed_verdict():
        _log.warning(
            "%s failed its validation; it is served because of --allow-failed: %s",
            model.name,
            failed.summary,
        )

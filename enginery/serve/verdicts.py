"""Whether what is served was checked against PyTorch.

    >>> verdict_of(model.artifact)
    'none'

Takes an artifact; says what `enginery validate` found of it.
"""

from __future__ import annotations

from typing import Literal

from enginery.core.artifact import Artifact

State = Literal["passed", "failed", "none"]

_VALIDATION = "validate"
_WORDS = {"passed": "validation passed", "failed": "validation failed", "none": "not validated"}


def verdict_of(artifact: Artifact) -> State:
    """`failed` where any check has failed, `none` where there was no validation."""
    if artifact.failed():
        return "failed"
    return "passed" if artifact.manifest.verdict(_VALIDATION) else "none"


def verdict_words(artifact: Artifact) -> str:
    """The same for people."""
    return _WORDS[verdict_of(artifact)]


def verdict_warning(name: str, artifact: Artifact) -> str:
    """The line that warns of a model that failed and is served all the same; empty for others."""
    failed = artifact.failed()
    if failed is None:
        return ""
    return f"{name} failed its validation and is served because of --allow-failed: {failed.summary}"

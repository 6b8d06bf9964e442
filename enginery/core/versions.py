"""Tell which family of packages an environment exports with.

Optimum's exporter requires transformers 4.57, and transformers 5 has an exporter of its own, so an
environment has one of them. This is the only module that knows both. It reads metadata and imports
nothing.
"""

from __future__ import annotations

from typing import Literal

from enginery.core.extras import installed_version

Family = Literal["optimum", "transformers5", ""]

OPTIMUM: Family = "optimum"
TRANSFORMERS5: Family = "transformers5"


def transformers_family() -> Family:
    """Return the family of this environment; empty if it exports with neither.

    The names are those of the extras, except that `[export]` installs the family of Optimum.
    """
    major = installed_version("transformers").partition(".")[0]
    if not major.isdecimal():
        return ""
    if int(major) >= 5:
        return TRANSFORMERS5
    return OPTIMUM if installed_version("optimum-onnx") else ""

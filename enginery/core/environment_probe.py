"""Describe the environment of the interpreter that runs this, as one line of JSON.

    $ other/bin/python -P enginery/core/module_runner.py enginery.core.environment_probe

It imports nothing but the standard library, since the environment may have no packages at all.
"""

from __future__ import annotations

import json
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from enginery.core.onnxruntime_builds import installed_onnxruntimes


def describe_environment() -> dict[str, Any]:
    """Return the fields of a `PythonEnvironment`, `prefix`, and the folders with its packages."""
    # The first of a name on the path is the one that is imported.
    distributions = reversed([dist for dist in metadata.distributions() if dist.name])
    return {
        "version": ".".join(map(str, sys.version_info[:3])),
        "prefix": sys.prefix,
        "packages": {normalized(dist.name): dist.version for dist in distributions},
        "runtimes": {build.name: build.version for build in reversed(installed_onnxruntimes())},
        "folders": sorted({path for path in sys.path if Path(path).is_dir()}),
    }


def normalized(name: str) -> str:
    """Return the name of a package as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(describe_environment()) + "\n")

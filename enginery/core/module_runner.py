"""Run a module with the package enginery from the folder of this file.

    $ python -P enginery/core/module_runner.py enginery.export.worker request.json result.json

Every child process is started with it. The interpreter may be that of another environment, which
needs enginery's libraries and not enginery itself. Its folder is not put on the import path: where
enginery is installed, all other packages of that environment are beside it.
"""

from __future__ import annotations

import runpy
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path


def main() -> None:
    """Run the module that the first argument names, with the other arguments."""
    folder = Path(__file__).resolve().parents[1]
    spec = spec_from_file_location(
        folder.name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{folder} is no package")
    package = module_from_spec(spec)
    sys.modules[folder.name] = package
    spec.loader.exec_module(package)
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

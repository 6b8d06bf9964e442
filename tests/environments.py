"""Environments that have some of the packages of this one: no download, and no copy.

    python = linked_environment(tmp_path / "bare", "enginery")
    python = linked_environment(tmp_path / "serve", "enginery[gpu,serve]")

Such an environment is a virtual one whose packages are links. It has the metadata of its packages
and of no other, and what its Python starts is in it, too.
"""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from enginery.core.versions import OPTIMUM, TRANSFORMERS5, transformers_family

needs_optimum = pytest.mark.skipif(
    transformers_family() != OPTIMUM, reason="needs Optimum and transformers 4.57: enginery[export]"
)
needs_transformers5 = pytest.mark.skipif(
    transformers_family() != TRANSFORMERS5, reason="needs enginery[transformers5]"
)

ROOT = Path(__file__).parents[1]
METADATA = (
    "import sys; from hatchling import build; build.prepare_metadata_for_build_wheel(*sys.argv[1:])"
)


def linked_environment(folder, *wanted):
    """Make an environment with what `pip install` would install; return its Python.

    Args:
        folder: where it goes.
        wanted: requirements: `enginery[serve]`.
    """
    pytest.importorskip("hatchling")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "lib" / version / "site-packages"
    # As this checkout's pyproject.toml has it, whatever was installed here.
    subprocess.run([sys.executable, "-c", METADATA, str(site)], cwd=ROOT, check=True)
    (site / "enginery").symlink_to(ROOT / "enginery")
    (own,) = metadata.distributions(name="enginery", path=[str(site)])
    for dist in _closure(wanted, own):
        _link(dist, site)
    return folder / "bin" / "python"


def _closure(wanted, own):
    """Return the packages of requirements and of all that these need, as far as they are here."""
    packages, seen, pending = {}, set(), [Requirement(text) for text in wanted]
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        if (name, *sorted(requirement.extras)) in seen:
            continue
        seen.add((name, *sorted(requirement.extras)))
        try:
            packages[name] = own if name == "enginery" else metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        for needed in map(Requirement, packages[name].requires or ()):
            extras = ("", *requirement.extras)
            if not needed.marker or any(needed.marker.evaluate({"extra": e}) for e in extras):
                pending.append(needed)
    del packages["enginery"]
    return packages.values()


def _link(dist, site):
    """Link the modules and the metadata of a package."""
    for name in {file.parts[0] for file in dist.files or ()} - {"..", "/", "__pycache__"}:
        if not name.endswith(".pth") and not (site / name).exists():
            (site / name).symlink_to(str(dist.locate_file(name)))

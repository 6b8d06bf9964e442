"""Break the product on purpose, one sync, order, lock or cleanup at a time: a test fails each time.

Each break is made in a copy of the package, and the tests run on the copy.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads descriptors from /proc"),
]
ROOT = Path(__file__).parents[2]
POWER = "tests/faults/test_power_failure.py"
OPERATIONS = "tests/faults/test_every_operation.py"
LEFTOVERS = "tests/faults/test_leftovers.py"


@dataclass(frozen=True)
class Break:
    """A change of the product, and the tests that notice it."""

    what: str
    file: str
    before: str
    after: str
    tests: str
    selected: str = ""


BREAKS = [
    Break(
        "files of an artifact are not synced",
        "core/scratch.py",
        "    sync_tree(source)\n",
        "",
        POWER,
        "every_moment and store",
    ),
    Break(
        "the rename of an artifact is not synced",
        "core/scratch.py",
        "        sync(directory)\n",
        "        pass\n",
        POWER,
        "every_moment and store",
    ),
    Break(
        "the exchange of two artifacts is not synced",
        "core/scratch.py",
        "        sync(directory)\n",
        "        if not source.exists():\n            sync(directory)\n",
        POWER,
        "every_moment and force",
    ),
    Break(
        "names of new directories are not synced",
        "core/scratch.py",
        "    path.mkdir(exist_ok=True)\n    sync(path.parent)\n",
        "    path.mkdir(exist_ok=True)\n",
        POWER,
        "every_moment and (publish or optimize)",
    ),
    Break(
        "a manifest is not synced before its rename",
        "core/scratch.py",
        "    sync_tree(source)\n",
        "    if source.is_dir():\n        sync_tree(source)\n",
        POWER,
        "every_moment and annotate",
    ),
    Break(
        "the rename of a manifest is not synced",
        "core/scratch.py",
        "        replace_synced(scratch.path, path)\n",
        "        sync(scratch.path)\n        os.replace(scratch.path, path)\n",
        POWER,
        "every_moment and annotate",
    ),
    Break(
        "the old content is removed before the new one is in its place",
        "core/scratch.py",
        "    sync_tree(source)\n",
        "    sync_tree(source)\n    shutil.rmtree(target, ignore_errors=True)\n",
        OPERATIONS,
        "every_operation and force and killed",
    ),
    Break(
        "an output and its rename are not synced",
        "predict/writer.py",
        "        replace_synced(self._path, output)\n",
        "        os.replace(self._path, output)\n",
        POWER,
        "every_moment and predict",
    ),
    Break(
        "the report of an output is not synced before its parts are removed",
        "predict/stage.py",
        "    write_atomically(sidecar(output), json_bytes(complete.as_json()))\n",
        "    sidecar(output).write_bytes(json_bytes(complete.as_json()))\n",
        POWER,
        "every_moment and predict",
    ),
    Break(
        "the earlier report of an output is removed without a sync",
        "predict/stage.py",
        "    sidecar(output).unlink(missing_ok=True)\n    sync(output.parent)\n",
        "    sidecar(output).unlink(missing_ok=True)\n",
        POWER,
        "every_moment and older",
    ),
    Break(
        "parts are removed before the report is written",
        "predict/stage.py",
        "    write_atomically(sidecar(output), json_bytes(complete.as_json()))\n",
        "    remove_parts(output)\n"
        "    write_atomically(sidecar(output), json_bytes(complete.as_json()))\n",
        OPERATIONS,
        "every_operation and killed and predict",
    ),
    Break(
        "files of a version are not synced",
        "publish/targets/folder.py",
        "        replace_synced(scratch.path, directory)\n",
        "        scratch.path.replace(directory)\n        sync(folder)\n",
        POWER,
        "every_moment and publish",
    ),
    Break(
        "the name of a version is not synced",
        "core/scratch.py",
        "        sync(directory)\n",
        "        pass\n",
        POWER,
        "every_moment and publish",
    ),
    Break(
        "two processes may build the same entry",
        "core/store/store.py",
        "with self._errors(), self._locked(path.name, progress):",
        "with self._errors():",
        "tests/core/store/test_store.py",
        "build_once",
    ),
    Break(
        "temporary directories are not locked",
        "core/scratch.py",
        "                scratch._descriptor = _open_locked(scratch.path)\n",
        "                pass\n",
        f"tests/core/artifact/test_artifact.py {LEFTOVERS}",
        "living_process",
    ),
    Break(
        "two processes may write the same output",
        "predict/journal.py",
        "                stack.enter_context(locked(output))\n",
        "                pass\n",
        "tests/predict",
        "another_process or no_run_can_resume_from",
    ),
    Break(
        "leftovers beside an artifact stay",
        "core/scratch.py",
        "        remove_leftovers(target.parent, target.name)\n",
        "        if is_file:\n            remove_leftovers(target.parent, target.name)\n",
        LEFTOVERS,
        "hundred_kills and pull",
    ),
    Break(
        "leftovers in the temporary folder stay",
        "core/scratch.py",
        "        remove_temporary()\n",
        "",
        LEFTOVERS,
        "a_few_kills and publish or dead_one",
    ),
    Break(
        "leftovers of a manifest stay",
        "core/scratch.py",
        "        remove_leftovers(target.parent, target.name)\n",
        "        if not is_file:\n            remove_leftovers(target.parent, target.name)\n",
        LEFTOVERS,
        "a_few_kills and annotate",
    ),
    Break(
        "a directory that cannot be listed is taken for an empty one",
        "core/paths.py",
        "os.walk(directory, onerror=_raise)",
        "os.walk(directory)",
        OPERATIONS,
        "every_operation and denied and store",
    ),
    Break(
        "an error of the disk is no EngineryError",
        "core/artifact/artifact.py",
        '            os_errors_as(ArtifactError, f"{self.path} cannot be written"),\n'
        "            locked(",
        "            locked(",
        OPERATIONS,
        "every_operation and annotate and once",
    ),
    Break(
        "a damaged entry of the store is not removed",
        "core/store/store.py",
        "                    _remove_damaged(path, kind)\n",
        "",
        "tests/faults/test_damaged_store.py",
        "made_anew",
    ),
    Break(
        "a hit needs the lock of a store that can only be read",
        "core/store/store.py",
        "        content = None if force else self.find(kind, fingerprint, name)\n"
        "        if content is None:\n            with",
        "        content = None\n        if content is None:\n            with",
        "tests/faults/test_damaged_store.py",
        "only_be_read",
    ),
    Break(
        "a child process does not say which file it could not use",
        "core/subprocess.py",
        "        print(error)  # noqa: T201  the parent reads this line\n",
        "",
        "tests/core/test_subprocess.py",
        "child_cannot_use",
    ),
    Break(
        "a directory of graphs that cannot be listed is taken for an empty one",
        "export/graphs.py",
        "list_tree(directory) if path",
        'directory.rglob("*") if path',
        "tests/faults/test_child_processes.py",
        "every_operation and denied and export-",
    ),
    Break(
        "the checksum of engine.json is not compared",
        "core/artifact/engine_record.py",
        "content = verify_checksum(content)",
        'content = content[: content.rindex(b",")] + b"}"',
        "tests/engine/test_ep_context.py",
        "every_changed_byte",
    ),
]


def run_tests(copy: Path, tests: str, selected: str) -> subprocess.CompletedProcess[str]:
    options = ["-q", "-x", "--tb=line", "-p", "no:cacheprovider", "-m", "slow or not slow"]
    chosen = ["-k", selected] if selected else []
    return subprocess.run(
        [sys.executable, "-m", "pytest", *tests.split(), *options, *chosen],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def copy(tmp_path):
    """Return a directory with a copy of the package, and the tests."""
    shutil.copytree(ROOT / "enginery", tmp_path / "enginery")
    for name in ("tests", "conftest.py", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


@pytest.mark.parametrize("broken", BREAKS, ids=lambda broken: broken.what)
def test_break_is_noticed(copy, broken):
    file = copy / "enginery" / broken.file
    whole = file.read_text(encoding="utf-8")
    assert whole.count(broken.before) >= 1, "the product has changed: write the break again"
    file.write_text(whole.replace(broken.before, broken.after, 1), encoding="utf-8")
    result = run_tests(copy, broken.tests, broken.selected)
    assert result.returncode == 1, f"not noticed:\n{result.stdout[-2000:]}"


def test_package_that_is_not_broken_passes(copy):
    result = run_tests(copy, f"{POWER} {LEFTOVERS}", "some_moments or a_few_kills or living")
    assert result.returncode == 0, result.stdout[-2000:]
    assert " passed" in result.stdout

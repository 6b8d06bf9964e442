"""Fixtures: scenarios with their files before and after, in a root that holds everything."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import metadata
from pathlib import Path

import jinja2
import pytest

from enginery.core.artifact import fingerprint
from tests.faults.scenarios import Scenario, scenarios, scenarios_with_children
from tests.prefork import forked_children
from tests.tiny import tiny_artifact

_version = cache(metadata.version)


class CompiledTemplates(jinja2.BytecodeCache):
    """Keeps templates that are compiled in memory."""

    def __init__(self) -> None:
        self._compiled: dict[str, bytes] = {}

    def load_bytecode(self, bucket: jinja2.bccache.Bucket) -> None:
        if bucket.key in self._compiled:
            bucket.bytecode_from_string(self._compiled[bucket.key])

    def dump_bytecode(self, bucket: jinja2.bccache.Bucket) -> None:
        self._compiled[bucket.key] = bucket.bytecode_to_string()


_environment = partial(jinja2.Environment, bytecode_cache=CompiledTemplates())


@dataclass
class Sandbox:
    """A directory that has all files of an operation: its inputs, the store and temporary files."""

    root: Path
    templates: Path
    before: dict[str, dict[str, str]] = field(default_factory=dict)
    after: dict[str, dict[str, str]] = field(default_factory=dict)
    files: dict[str, set[str]] = field(default_factory=dict)
    """Names of the files after a run that nothing disturbed, by scenario."""

    def prepare(self, scenario: Scenario) -> None:
        """Write the files that a scenario starts from, and learn what it leaves."""
        template = self.templates / scenario.name
        if not template.exists():
            self.empty()
            scenario.prepare(self.root)
            shutil.copytree(self.root, template, symlinks=True)
            self.before[scenario.name] = scenario.results(self.root)
            scenario.run(self.root)
            self.after[scenario.name] = scenario.results(self.root)
            self.files[scenario.name] = self.names()
            assert self.after[scenario.name] != self.before[scenario.name]
        self.restore(scenario)

    def restore(self, scenario: Scenario) -> None:
        """Write the files that a scenario starts from."""
        shutil.rmtree(self.root)
        shutil.copytree(self.templates / scenario.name, self.root, symlinks=True)

    def check(self, scenario: Scenario) -> None:
        """Assert that every result is the earlier or the new one, and that none is lost."""
        before, after = self.before[scenario.name], self.after[scenario.name]
        found = scenario.results(self.root)
        for name in {**before, **after}:
            allowed = (before.get(name, ""), after.get(name, ""))
            assert found.get(name, "") in allowed, f"{name} is neither old nor new"
        assert found.keys() <= {**before, **after}.keys()

    def check_survived(self, scenario: Scenario) -> None:
        """Assert that the results are the new ones."""
        found, after = scenario.results(self.root), self.after[scenario.name]
        assert {n: value for n, value in found.items() if value} == {
            n: value for n, value in after.items() if value
        }

    def check_finished(self, scenario: Scenario) -> None:
        """Assert that the results are the new ones and that nothing else is left.

        Logs are not synced, so a power failure may take one of an earlier run.
        """
        assert scenario.results(self.root) == self.after[scenario.name]
        left = self.names() - self.files[scenario.name]
        assert left == set(), f"left over: {sorted(left)}"
        lost = self.files[scenario.name] - self.names()
        assert {name for name in lost if not name.startswith("home/logs")} == set()

    def names(self) -> set[str]:
        """Return the paths of all files and directories.

        Without locks, which hold nothing, verdicts, whose names depend on the time, graphs that
        are optimized for this processor, which are made when there is time, and the list of what
        was made, which has them.
        """
        found = {path.relative_to(self.root).as_posix() for path in self.root.rglob("*")}
        return {
            name
            for name in found
            if not name.startswith(
                ("home/locks", "home/verdicts/", "home/graphs", "home/.made-by-enginery")
            )
            or ".tmp-" in name
        }

    def empty(self) -> None:
        """Remove everything but the empty store and temporary folder."""
        shutil.rmtree(self.root, ignore_errors=True)
        for name in ("home", "tmp"):
            (self.root / name).mkdir(parents=True)


@pytest.fixture(scope="session")
def classifier(tmp_path_factory):
    """Return the directory of a tiny text classifier."""
    out = tmp_path_factory.mktemp("classifier") / "bert"
    return tiny_artifact("bert", "text-classification", out).path


@pytest.fixture(scope="session")
def shared_sandbox(request, tmp_path_factory):
    """Return the sandbox of all tests, in memory if possible: every run syncs dozens of files.

    Child processes are forked, see `tests.prefork`: scenarios start thousands.
    """
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        memory = tmp_path_factory.mktemp("faults")
    with tempfile.TemporaryDirectory(prefix="faults-", dir=memory) as base, ExitStack() as stack:
        if not request.config.getoption("--prefork"):
            stack.enter_context(forked_children(Path(base, "socket")))
        yield Sandbox(Path(base, "root"), Path(base, "templates"))


@pytest.fixture
def sandbox(shared_sandbox, monkeypatch):
    """Return the sandbox, with the store and the temporary files of this process in it.

    The cache of hashes is left out: SQLite writes it, and it only saves time. What does not change
    is computed once: versions of packages, and templates of the model card.
    """
    monkeypatch.setenv("ENGINERY_HOME", str(shared_sandbox.root / "home"))
    monkeypatch.setenv("TMPDIR", str(shared_sandbox.root / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(shared_sandbox.root / "tmp"))
    monkeypatch.setattr(fingerprint, "_query_cache", lambda *_: None)
    monkeypatch.setattr(fingerprint, "_SETTLED_NS", 0)
    monkeypatch.setattr(gc, "collect", lambda *_: 0)
    monkeypatch.setattr(metadata, "version", _version)
    monkeypatch.setattr(jinja2, "Environment", _environment)
    return shared_sandbox


@pytest.fixture
def scenario(request, classifier, sandbox):
    """Return the scenario with the name that the test asks for, prepared."""
    known = [*scenarios(classifier), *scenarios_with_children(classifier)]
    found = next(each for each in known if each.name == request.param)
    sandbox.prepare(found)
    return found

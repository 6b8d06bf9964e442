import os
import shutil
import signal
from dataclasses import replace

import pytest

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.engine import Engine
from enginery.core.artifact.fingerprint import Fingerprint
from enginery.core.errors import EngineryError
from enginery.core.home import MADE, store_log
from enginery.core.store.store import ARTIFACTS, ENGINES, Store
from tests.core.artifacts import FINGERPRINT, make, start
from tests.engine.made import PLAN, engine_record, write_engine
from tests.progress import Said

OTHER = Fingerprint("export", {"model": "org/name", "opset": "17"})

BUILD = """
import sys, time
from pathlib import Path
from enginery.core.artifact.artifact import Artifact, staging
from enginery.core.store.store import ARTIFACTS, Store
from tests.core.artifacts import FINGERPRINT, fill
log, hang = Path(sys.argv[1]), sys.argv[2] == "hang"

def build(out):
    with staging(out) as directory:
        with log.open("a") as stream:
            stream.write("built\\n")
        fill(directory)
        print("building", flush=True)
        if hang:
            sys.stdin.readline()
        time.sleep(0.3)
    return Artifact.open(out)

class Aloud:
    def say(self, message):
        print(message, flush=True)

if not hang:
    print("ready", flush=True)
    sys.stdin.readline()
artifact, built = Store().obtain(ARTIFACTS, FINGERPRINT, "minilm", build, progress=Aloud())
print("done", built, artifact.path.name, flush=True)
"""


def never(_):
    pytest.fail("built again")


def kill(child):
    os.kill(child.pid, signal.SIGKILL)
    child.wait()


def leftovers(store):
    return [path for path in store.artifacts.iterdir() if path.name.startswith(".tmp-")]


def obtain(store, fingerprint=FINGERPRINT, **options):
    return store.obtain(
        ARTIFACTS, fingerprint, "minilm", lambda out: make(out, fingerprint=fingerprint), **options
    )


def test_the_first_asks_build_and_the_second_does_not(home):
    store, said = Store(), Said()
    artifact, built = obtain(store)
    assert built
    assert artifact.path.parent == home / "artifacts"
    assert artifact.path.name == f"export-minilm-{FINGERPRINT.key[:16]}"
    assert store.obtain(ARTIFACTS, FINGERPRINT, "minilm", never, progress=said) == (artifact, False)
    assert said.messages == [f"export: nothing to do, {artifact.path.name} is up to date"]


def test_force_builds_again():
    store, said = Store(), Said()
    obtain(store)
    assert obtain(store, force=True, progress=said)[1]
    assert said.messages == ["export: rebuilding (--force)"]


def test_miss_reports_the_changed_field():
    store, said = Store(), Said()
    obtain(store, OTHER, progress=said)
    obtain(store, FINGERPRINT, progress=said)
    assert said.messages == [
        "export: building, not in the store yet",
        "export: rebuilding: opset: 17 → 20",
    ]


def test_entry_that_differs_in_most_fields_is_no_earlier_version():
    store, said = Store(), Said()
    obtain(store, OTHER)
    fields = {**FINGERPRINT.fields, **{f"option{number}": "1" for number in range(5)}}
    obtain(store, replace(FINGERPRINT, fields=fields), progress=said)
    assert said.messages == ["export: building, not in the store yet"]


def test_a_miss_is_explained_by_the_nearest_of_several_and_never_by_another_model():
    store, said = Store(), Said()
    far = Fingerprint("export", {"model": "org/name", "opset": "17", "dtype": "fp16"})
    foreign = Fingerprint("export", {"model": "org/other", "opset": "20"})
    for fingerprint in (OTHER, far, foreign):
        obtain(store, fingerprint)
    obtain(store, progress=said)
    assert said.messages == ["export: rebuilding: opset: 17 → 20"]


def test_miss_of_a_later_stage_compares_with_the_same_source_or_one_change():
    store, said = Store(), Said()
    fields = {"artifact": "a" * 64, "profiles": "batch=1", "flavor": "x"}
    for changes in (
        {},
        {"profiles": "batch=2", "flavor": "y"},
        {"artifact": "b" * 64},
        {"artifact": "c" * 64, "profiles": "rows=1", "flavor": "z"},
    ):
        obtain(store, Fingerprint("build", {**fields, **changes}), progress=said)
    assert said.messages == [
        "build: building, not in the store yet",
        "build: rebuilding: profiles: batch=1 → batch=2; flavor: x → y",
        f"build: rebuilding: artifact: {'a' * 12} → {'b' * 12}",
        "build: building, not in the store yet",
    ]


def test_names_become_safe_file_names():
    store = Store()
    for name in ("org/name", "../..", "a" * 500, "", "naïve model", ".hidden"):
        path = store.path_for(ARTIFACTS, FINGERPRINT, name)
        assert path.parent == store.artifacts
        assert len(path.name) < 200
        assert not path.name.startswith(".")


def test_an_artifact_of_another_key_is_not_taken():
    store = Store()
    make(store.path_for(ARTIFACTS, FINGERPRINT, "minilm"), fingerprint=OTHER)
    assert store.find(ARTIFACTS, FINGERPRINT, "minilm") is None
    assert obtain(store)[1]
    assert store.find(ARTIFACTS, FINGERPRINT, "minilm")


def test_a_failed_build_leaves_nothing_and_frees_the_lock():
    store = Store()

    def fail(out):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.obtain(ARTIFACTS, FINGERPRINT, "minilm", fail)
    assert obtain(store)[1]


def test_two_processes_that_ask_at_once_build_once(tmp_path):
    log = tmp_path / "builds"
    children = [start(BUILD, log, "wait") for _ in range(2)]
    for child in children:
        assert child.stdout.readline() == "ready\n"
    for child in children:  # both are past their imports; now both at once
        child.stdin.write("go\n")
        child.stdin.flush()
    outputs = [child.communicate()[0] for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert log.read_text() == "built\n"
    done = sorted(output.splitlines()[-1].split()[1] for output in outputs)
    assert done == ["False", "True"]


def test_waiting_process_reports_it_and_uses_the_result(tmp_path):
    log = tmp_path / "builds"
    with start(BUILD, log, "hang") as builder, start(BUILD, log, "wait") as other:
        while builder.stdout.readline() != "building\n":
            pass
        other.stdin.write("go\n")
        other.stdin.flush()
        assert other.stdout.readline() == "ready\n"
        assert other.stdout.readline().startswith("waiting: another process is building export-")
        builder.communicate("\n")
        assert other.communicate()[0].splitlines()[-1].startswith("done False")
    assert log.read_text() == "built\n"


def test_a_killed_builder_leaves_nothing_and_the_next_one_builds_and_cleans_up(tmp_path):
    store, log = Store(), tmp_path / "builds"
    with start(BUILD, log, "hang") as child:
        while child.stdout.readline() != "building\n":
            pass
        kill(child)
    assert store.entries() == []
    assert store.find(ARTIFACTS, FINGERPRINT, "minilm") is None
    assert len(leftovers(store)) == 1
    assert obtain(store)[1]
    assert leftovers(store) == []


def test_entries_come_most_recently_used_first():
    store = Store()
    first, second = obtain(store)[0].path, obtain(store, OTHER)[0].path
    os.utime(first, (1, 1))
    assert [entry.path for entry in store.entries()] == [second, first]
    assert store.find(ARTIFACTS, FINGERPRINT, "minilm")
    assert store.entries()[0].path == first


def test_entries_name_the_problem_and_the_size():
    store = Store()
    artifact = obtain(store)[0]
    entry = store.entries()[0]
    assert (entry.artifact, entry.problem) == (artifact, "")
    assert entry.size_bytes == sum(p.stat().st_size for p in artifact.path.iterdir())
    artifact.model.unlink()
    entry = store.entries()[0]
    assert entry.artifact is None
    assert "model.onnx is missing" in entry.problem


def test_entries_bear_with_an_artifact_that_goes_away_meanwhile(monkeypatch):
    store = Store()
    gone, stays = obtain(store)[0].path, obtain(store, OTHER)[0].path
    is_dir = type(gone).is_dir

    def seen_then_removed(path):
        found = is_dir(path)
        if path == gone and found:
            shutil.rmtree(gone)
        return found

    monkeypatch.setattr(type(gone), "is_dir", seen_then_removed)
    assert [entry.path for entry in store.entries()] == [stays]


def test_prune_removes_the_least_recently_used_until_the_rest_fits():
    store = Store()
    old, new = obtain(store)[0].path, obtain(store, OTHER)[0].path
    os.utime(old, (1, 1))
    size_bytes = {entry.path: entry.size_bytes for entry in store.entries()}
    assert store.prune(max_size_bytes=sum(size_bytes.values())) == []
    removed = store.prune(max_size_bytes=size_bytes[new])
    assert [entry.path for entry in removed] == [old]
    assert [entry.path for entry in store.entries()] == [new]
    assert [entry.path for entry in store.prune(max_size_bytes=0)] == [new]


def test_prune_removes_only_leftovers_of_dead_processes(tmp_path):
    store, log = Store(), tmp_path / "builds"
    with start(BUILD, log, "hang") as child:
        while child.stdout.readline() != "building\n":
            pass
        store.prune()
        assert len(leftovers(store)) == 1
        kill(child)
    store.prune()
    assert leftovers(store) == []


def test_prune_keeps_entries_that_another_process_builds(tmp_path):
    store, log = Store(), tmp_path / "builds"
    damaged = obtain(store)[0]
    damaged.model.unlink()
    with start(BUILD, log, "hang") as child:
        while child.stdout.readline() != "building\n":
            pass
        damaged.path.mkdir(exist_ok=True)
        assert store.prune() == []
        child.communicate("\n")
        assert child.returncode == 0
    assert store.find(ARTIFACTS, FINGERPRINT, "minilm")


# Engines, which share the store with artifacts.


ENGINE = Fingerprint("tensorrt-rtx", {"graph": "a" * 64, "profiles": "batch=1"})


def engine(out, *, fingerprint=ENGINE, plan=PLAN):
    source = out.parent.parent / "model"
    record = engine_record(
        Artifact.open(source) if source.is_dir() else make(source),
        plan=plan,
        key=fingerprint.key,
        fields=fingerprint.fields,
        graph_sha256=fingerprint.fields["graph"],
        profiles=(fingerprint.fields.get("profiles", "batch=1"),),
    )
    return Engine.open(write_engine(out, record, plan=plan))


def obtain_engine(store, fingerprint=ENGINE, **options):
    return store.obtain(
        ENGINES, fingerprint, "sm89", lambda out: engine(out, fingerprint=fingerprint), **options
    )


def test_engines_are_stored_by_fingerprint(home):
    store = Store()
    made, built = obtain_engine(store)
    assert built
    assert made.path == home / "engines" / f"tensorrt-rtx-sm89-{ENGINE.key[:16]}"
    assert made.path.name == made.record.directory_name
    assert obtain_engine(store) == (made, False)
    assert store.find(ARTIFACTS, ENGINE, "sm89") is None
    obtain(store)
    assert [entry.kind for entry in store.entries()] == ["artifacts", "engines"]
    assert [bool(entry.engine) for entry in store.entries()] == [False, True]


def test_an_engine_of_other_fields_under_its_name_is_not_taken():
    store = Store()
    made, _ = obtain_engine(store)
    other = Fingerprint("tensorrt-rtx", {**ENGINE.fields, "profiles": "batch=2"})
    path = store.path_for(ENGINES, other, "sm89")
    shutil.copytree(made.path, path)
    assert store.find(ENGINES, other, "sm89") is None


def test_a_missed_engine_is_explained_by_one_of_its_graph_or_one_other_field():
    store, said = Store(), Said()
    obtain_engine(store)
    wider = Fingerprint("tensorrt-rtx", {**ENGINE.fields, "profiles": "batch=8"})
    obtain_engine(store, wider, progress=said)
    tuned = Fingerprint("tensorrt-rtx", {**ENGINE.fields, "graph": "b" * 64})
    obtain_engine(store, tuned, progress=said)
    foreign = Fingerprint("tensorrt-rtx", {"graph": "c" * 64, "profiles": "rows=4"})
    obtain_engine(store, foreign, progress=said)
    assert said.messages == [
        "tensorrt-rtx: rebuilding: profiles: batch=1 → batch=8",
        f"tensorrt-rtx: rebuilding: graph: {'a' * 12} → {'b' * 12}",
        "tensorrt-rtx: building, not in the store yet",
    ]


def test_the_least_recently_used_goes_first_whatever_its_kind():
    store = Store()
    old, artifact = obtain_engine(store)[0].path, obtain(store)[0].path
    new = obtain_engine(store, Fingerprint("tensorrt-rtx", {"graph": "b"}))[0].path
    os.utime(old, (1, 1))
    os.utime(artifact, (2, 2))
    sizes = {entry.path: entry.size_bytes for entry in store.entries()}
    removed = store.prune(max_size_bytes=sizes[artifact] + sizes[new])
    assert [entry.path for entry in removed] == [old]
    assert [entry.path for entry in store.prune(max_size_bytes=sizes[new])] == [artifact]
    assert [entry.path for entry in store.entries()] == [new]


def test_files_that_an_artifact_and_an_engine_share_count_once():
    store = Store()
    made, artifact = obtain_engine(store)[0], obtain(store)[0]
    size_bytes = store.size_bytes()
    (artifact.path / "engines").mkdir()
    os.link(made.plan, artifact.path / "engines" / "model.plan")
    assert store.size_bytes() == size_bytes
    assert sum(entry.size_bytes for entry in store.entries()) == size_bytes + len(PLAN)
    assert store.prune(max_size_bytes=size_bytes) == []
    # Of the engine, all goes but the plan: the artifact has it still, so that a byte less is too
    # much for both.
    os.utime(made.path, (1, 1))
    own = sum(file.stat().st_size for file in made.path.iterdir()) - len(PLAN)
    assert [entry.path for entry in store.prune(max_size_bytes=size_bytes - own)] == [made.path]
    assert store.size_bytes() == size_bytes - own
    again = obtain_engine(store)[0]
    again.plan.unlink()
    os.link(artifact.path / "engines" / "model.plan", again.plan)
    os.utime(again.path, (1, 1))
    assert len(store.prune(max_size_bytes=size_bytes - own - 1)) == 2


KEY = "0123456789abcdef"


def mine(home):
    """Write files and folders of a user into the folders of a store; return their paths."""
    files = [
        "artifacts/my-thesis/chapter1.txt",
        f"artifacts/export-notes-{KEY}/chapter1.txt",
        f"artifacts/my-thesis/.tmp-chapter2-{KEY[:12]}",
        f"artifacts/.tmp-draft-{KEY[:12]}",
        f"engines/tensorrt-mine-{KEY}/model.plan",
        "graphs/figure/graph.svg",
        "logs/train.log",
        "logs/export-train.log",
        "pulls/requests.txt",
        "predict/table.csv",
        "verdicts/court.txt",
        "readme.txt",
    ]
    for name in files:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("mine")
        os.utime(home / name, (1, 1))
    return [home / name for name in files]


def test_prune_removes_what_the_store_made_and_nothing_else(home):
    files = mine(home)
    store = Store()
    made = obtain(store)[0]
    shutil.copytree(made.path, made.path.with_name("a-copy-of-mine"))
    log = store_log("export-minilm.log")
    log.write_text("old")
    os.utime(log, (1, 1))
    leftover = made.path.with_name(f".tmp-export-minilm-{KEY}-{KEY[:12]}")
    leftover.mkdir()
    removed = []
    entries = store.prune(on_removed=removed.append)
    assert [entry.path for entry in entries] == [made.path]
    assert sorted(removed) == sorted([log, leftover])
    assert not made.path.exists()
    assert not any(path.exists() for path in removed)
    assert all(file.read_text() == "mine" for file in files)
    assert made.path.with_name("a-copy-of-mine").is_dir()
    assert made.path.with_name("a-copy-of-mine") in store.foreign()
    assert store.entries() == []


def test_prune_knows_entries_by_their_keys_where_the_list_is_lost(home):
    store = Store()
    made, damaged = obtain(store)[0], obtain(store, OTHER)[0]
    (damaged.path / "model.onnx").write_bytes(b"grape")
    (home / MADE).unlink()
    assert [entry.path for entry in store.prune()] == [made.path]
    assert store.foreign() == [damaged.path]  # nothing says that it was made here
    assert obtain(store, OTHER)[1]  # but it is replaced when its key is asked for
    assert len(store.prune()) == 1


@pytest.mark.parametrize("name", ["artifacts", "logs"])
def test_prune_does_not_follow_links(home, tmp_path, name):
    store = Store()
    made = obtain(store)[0]
    log = store_log("export-minilm.log")
    os.utime(made.path, (1, 1))
    log.write_text("old")
    os.utime(log, (1, 1))
    (home / name).rename(tmp_path / "elsewhere")
    (home / name).symlink_to(tmp_path / "elsewhere")
    store.prune()
    assert made.path.exists() == (name == "artifacts")
    assert log.exists() == (name == "logs")


def test_prune_does_not_follow_the_link_of_an_entry(tmp_path):
    store = Store()
    made = obtain(store)[0]
    made.path.rename(tmp_path / "mine")
    made.path.symlink_to(tmp_path / "mine")
    assert store.prune() == []
    assert (tmp_path / "mine" / "model.onnx").exists()


@pytest.mark.parametrize("content", [b"", b"\xff\n{", b'"../../etc"\n[]\n1\n'])
def test_damaged_list_of_what_was_made_removes_nothing_of_others(home, content):
    files = mine(home)
    store = Store()
    made = obtain(store)[0]
    (home / MADE).write_bytes(content)
    assert [entry.path for entry in store.prune()] == [made.path]
    assert all(file.exists() for file in files)


def test_an_empty_store_has_no_entries_and_nothing_to_prune():
    assert Store().entries() == []
    assert Store().prune() == []


def test_a_home_that_is_no_directory_is_an_error_and_not_a_traceback(home):
    home.write_text("")
    with pytest.raises(EngineryError, match=r"cannot be used as the store: .* Set ENGINERY_HOME"):
        obtain(Store())

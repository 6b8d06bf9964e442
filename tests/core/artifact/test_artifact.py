import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from enginery.core.artifact import artifact as module
from enginery.core.artifact.artifact import Artifact, check_overwritable, commit_artifact, staging
from enginery.core.errors import ArtifactError, RejectedArtifactError
from enginery.core.scratch import locked, remove_leftovers, write_atomically
from tests.core.artifacts import edit_manifest, fill, make, manifest, start, verdict

STAGE_AND_WAIT = """
import sys
from pathlib import Path
from enginery.core.artifact.artifact import staging
from tests.core.artifacts import fill
with staging(Path(sys.argv[1])) as directory:
    fill(directory, graph=b"slow")
    print(directory.name, flush=True)
    sys.stdin.readline()
"""

ANNOTATE = """
import sys
from enginery.core.artifact.artifact import Artifact
from tests.core.artifacts import verdict
artifact = Artifact.open(sys.argv[1])
print("open", flush=True)
sys.stdin.readline()
for _ in range(5):
    artifact.annotate(verdict(stage=sys.argv[2]), sys.argv[2].encode())
"""


def hidden(directory):
    return [path.name for path in directory.iterdir() if path.name.startswith(".tmp-")]


def test_finished_artifact_opens_with_its_manifest(tmp_path):
    artifact = make(tmp_path / "minilm")
    assert (artifact.name, artifact.model) == ("minilm", tmp_path / "minilm" / "model.onnx")
    assert artifact.model.read_bytes() == b"graph"
    assert set(artifact.manifest.files) == {"model.onnx", "config.json"}
    assert Artifact.open(str(artifact.path), verify=True) == artifact
    assert artifact.graph("model.onnx").opset == 20
    with pytest.raises(ArtifactError, match=r"no graph 'decoder.onnx'; it has model.onnx"):
        artifact.graph("decoder.onnx")


def test_content_hash_follows_the_files_and_not_the_verdicts(tmp_path):
    artifact = make(tmp_path / "a")
    assert make(tmp_path / "b").content_sha256() == artifact.content_sha256()
    assert make(tmp_path / "c", graph=b"other").content_sha256() != artifact.content_sha256()
    assert artifact.annotate(verdict(), b"{}").content_sha256() == artifact.content_sha256()


@pytest.mark.parametrize("verify", [False, True])
def test_a_truncated_file_is_named(tmp_path, verify):
    artifact = make(tmp_path / "minilm")
    artifact.model.write_bytes(b"gr")
    with pytest.raises(ArtifactError, match=r"model.onnx has 2 bytes, manifest.json says 5"):
        Artifact.open(artifact.path, verify=verify)


@pytest.mark.parametrize("verify", [False, True])
def test_an_altered_file_of_the_same_size_and_mtime_is_named(tmp_path, verify):
    artifact = make(tmp_path / "minilm")
    times = artifact.model.stat()
    artifact.model.write_bytes(b"other")
    os.utime(artifact.model, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(ArtifactError, match=r"model.onnx was altered: its sha256 is "):
        Artifact.open(artifact.path, verify=verify)


def test_a_missing_file_is_named(tmp_path):
    artifact = make(tmp_path / "minilm")
    (artifact.path / "config.json").unlink()
    with pytest.raises(ArtifactError, match=r"config.json is missing from the artifact"):
        Artifact.open(artifact.path)


def test_verify_ignores_the_hash_cache(tmp_path, monkeypatch):
    artifact = make(tmp_path / "minilm")
    read = []

    def read_file(stream, _):
        read.append(stream.name)
        pytest.fail("read")

    monkeypatch.setattr("enginery.core.artifact.fingerprint.hashlib.file_digest", read_file)
    Artifact.open(artifact.path)
    with pytest.raises(pytest.fail.Exception):
        Artifact.open(artifact.path, verify=True)
    assert len(read) == 1


@pytest.mark.parametrize("name", ["../outside.txt", "/etc/hostname", "link.txt"])
def test_a_file_outside_the_artifact_is_rejected(tmp_path, name):
    artifact = make(tmp_path / "minilm")
    outside = tmp_path / "outside.txt"
    outside.write_text("secret")
    (artifact.path / "link.txt").symlink_to(outside)
    record = {"sha256": "0" * 64, "size_bytes": 6}
    edit_manifest(artifact.path, files={**_files(artifact), name: record})
    with pytest.raises(ArtifactError, match=r"(is not a safe path in|in) the (artifact|directory)"):
        Artifact.open(artifact.path)


def _files(artifact):
    return json.loads((artifact.path / "manifest.json").read_text())["files"]


def test_a_graph_without_a_hash_is_rejected(tmp_path):
    artifact = make(tmp_path / "minilm")
    files = _files(artifact)
    del files["model.onnx"]
    edit_manifest(artifact.path, files=files)
    with pytest.raises(ArtifactError, match=r"records no sha256 of model\.onnx"):
        Artifact.open(artifact.path)


def test_an_artifact_without_graphs_is_rejected(tmp_path):
    artifact = make(tmp_path / "minilm")
    edit_manifest(artifact.path, graphs=[])
    with pytest.raises(ArtifactError, match="lists no graph"):
        Artifact.open(artifact.path)


def test_directory_that_is_not_an_artifact_is_an_error(tmp_path):
    with pytest.raises(ArtifactError, match=r"it does not exist\. Make one with: enginery export"):
        Artifact.open(tmp_path / "nowhere")
    with pytest.raises(ArtifactError, match=r"it has no manifest.json"):
        Artifact.open(tmp_path)
    file = tmp_path / "model.onnx"
    file.write_bytes(b"graph")
    with pytest.raises(ArtifactError, match=r"it has no manifest.json"):
        Artifact.open(file)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"schema_version": 1}'])
def test_a_broken_manifest_is_named(tmp_path, content):
    artifact = make(tmp_path / "minilm")
    (artifact.path / "manifest.json").write_bytes(content)
    with pytest.raises(ArtifactError, match=r"manifest\.json"):
        Artifact.open(artifact.path)


def test_manifest_of_a_newer_version_is_an_error(tmp_path):
    artifact = make(tmp_path / "minilm")
    edit_manifest(artifact.path, schema_version=3, novelty=True)
    with pytest.raises(ArtifactError, match=r"schema_version 3, expected 2: another version"):
        Artifact.open(artifact.path)


# What is not an artifact is never overwritten.


def _foreign_directory(out):
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")


def _browser_extension(out):
    out.mkdir()
    (out / "manifest.json").write_text('{"manifest_version": 3, "name": "mine"}')
    (out / "thesis.tex").write_text("years of work")


def _file(out):
    out.write_text("years of work")


@pytest.mark.parametrize("foreign", [_foreign_directory, _browser_extension, _file])
def test_other_directories_are_never_overwritten(tmp_path, foreign):
    out = tmp_path / "out"
    foreign(out)
    with pytest.raises(
        ArtifactError, match="is not an enginery artifact, so it is not overwritten"
    ):
        make(out)
    with pytest.raises(ArtifactError, match="not overwritten"):
        make(tmp_path / "other").copy_to(out)
    kept = out if out.is_file() else out / "thesis.tex"
    assert kept.read_text() == "years of work"
    assert hidden(tmp_path) == []


def test_an_empty_directory_and_an_artifact_of_any_version_are_overwritten(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    artifact = make(out)
    edit_manifest(artifact.path, schema_version=99)
    check_overwritable(out)
    assert make(out, graph=b"newer").model.read_bytes() == b"newer"
    assert hidden(tmp_path) == []


def test_a_link_stays_a_link_and_its_directory_is_replaced(tmp_path):
    big_disk = tmp_path / "disk" / "minilm"
    make(big_disk)
    link = tmp_path / "current"
    link.symlink_to(big_disk)
    make(link, graph=b"newer")
    assert link.is_symlink()
    assert (big_disk / "model.onnx").read_bytes() == b"newer"
    assert hidden(tmp_path) == hidden(big_disk.parent) == []


def test_a_parent_that_is_a_file_is_an_error_and_not_a_traceback(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match=r"cannot be written: .*Choose another --out"):
        make(tmp_path / "file" / "minilm")


# All or nothing.


def fail_while_staging(out):
    with staging(out) as directory:
        fill(directory, graph=b"newer")
        raise ZeroDivisionError


def test_a_block_that_raises_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError):
        fail_while_staging(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_block_that_raises_leaves_the_earlier_artifact(tmp_path):
    make(tmp_path / "out")
    with pytest.raises(ZeroDivisionError):
        fail_while_staging(tmp_path / "out")
    assert Artifact.open(tmp_path / "out").model.read_bytes() == b"graph"


def test_a_rename_that_fails_leaves_the_earlier_artifact(tmp_path, monkeypatch):
    make(tmp_path / "out")
    replace = os.replace

    def fail_for_the_new_one(source, target):
        if (source / "marker").exists():
            raise OSError("no space")
        replace(source, target)

    monkeypatch.setattr("enginery.core.scratch._exchange", lambda *_: False)
    monkeypatch.setattr("enginery.core.scratch.os.replace", fail_for_the_new_one)
    with pytest.raises(ArtifactError, match="no space"), staging(tmp_path / "out") as directory:
        (directory / "marker").touch()
    assert Artifact.open(tmp_path / "out").model.read_bytes() == b"graph"
    assert hidden(tmp_path) == []


def test_a_killed_process_leaves_nothing_finished_and_the_next_run_cleans_up(tmp_path):
    out = tmp_path / "out"
    with start(STAGE_AND_WAIT, out) as child:
        leftover = child.stdout.readline().strip()
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        assert child.returncode == -signal.SIGKILL
    assert hidden(tmp_path) == [leftover]
    assert not out.exists()
    with pytest.raises(ArtifactError):
        Artifact.open(out)
    assert make(out).model.read_bytes() == b"graph"
    assert hidden(tmp_path) == []


@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot exchange names")
def test_an_artifact_is_replaced_without_a_moment_when_it_is_gone(tmp_path, monkeypatch):
    def never(*_):
        raise AssertionError("a rename leaves a moment between two")

    first = make(tmp_path / "a")
    monkeypatch.setattr("enginery.core.scratch.os.replace", never)
    second = make(first.path, graph=b"other")
    assert Artifact.open(first.path).content_sha256() == second.content_sha256()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("stranger", ["README.md", "notes/a.txt", "inner/manifest.json"])
def test_an_artifact_that_holds_other_files_is_not_replaced(tmp_path, stranger):
    artifact = make(tmp_path / "a")
    (artifact.path / stranger).parent.mkdir(parents=True, exist_ok=True)
    (artifact.path / stranger).write_text("mine")
    with pytest.raises(ArtifactError, match=f"would be lost: {stranger}"):
        make(tmp_path / "a", graph=b"other")
    assert (artifact.path / stranger).read_text() == "mine"


def test_reports_do_not_keep_an_artifact_from_being_replaced(tmp_path):
    artifact = make(tmp_path / "a")
    (artifact.path / "reports").mkdir()
    (artifact.path / "reports" / "benchmark.json").write_text("{}")
    make(tmp_path / "a", graph=b"other")


def test_the_staging_directory_of_a_living_process_is_left_alone(tmp_path):
    out = tmp_path / "out"
    with start(STAGE_AND_WAIT, out) as child:
        staged = child.stdout.readline().strip()
        make(out)
        remove_leftovers(tmp_path)
        assert hidden(tmp_path) == [staged]
        child.communicate("\n")
        assert child.returncode == 0
    assert Artifact.open(out).model.read_bytes() == b"slow"
    assert hidden(tmp_path) == []


def test_only_leftovers_of_the_same_name_are_removed(tmp_path):
    names = [".tmp-out-0123456789ab", ".tmp-out-a-0123456789ab", ".tmp-out-notes", ".tmp-o"]
    for name in names:
        (tmp_path / name).mkdir()
    remove_leftovers(tmp_path, "out")
    assert sorted(hidden(tmp_path)) == sorted(names[1:])
    remove_leftovers(tmp_path)
    assert sorted(hidden(tmp_path)) == sorted(names[2:])


# Copies and verdicts.


def test_a_copy_is_the_same_artifact(tmp_path):
    artifact = make(tmp_path / "a", graph=b"x" * (1 << 20)).annotate(verdict(), b"{}")
    copy = artifact.copy_to(tmp_path / "deep" / "b")
    assert Artifact.open(copy.path, verify=True).manifest == artifact.manifest
    assert (copy.path / "reports" / "validate.json").read_bytes() == b"{}"
    assert Artifact.open(artifact.path)


def test_a_copy_onto_itself_is_the_same_artifact(tmp_path):
    artifact = make(tmp_path / "a", graph=b"x" * (1 << 20))
    artifact.copy_to(artifact.path)
    assert Artifact.open(artifact.path, verify=True) == artifact


def test_a_copy_shares_no_small_file_with_its_source(tmp_path):
    artifact = make(tmp_path / "a")
    copy = artifact.copy_to(tmp_path / "b")
    copy.annotate(verdict(passed=False), b"{}")
    (copy.path / "config.json").write_text("[]")
    assert Artifact.open(artifact.path).failed_verdict() is None


def test_a_copy_works_where_links_do_not(tmp_path, monkeypatch):
    def no_links(*_):
        raise OSError("cross-device link")

    monkeypatch.setattr("enginery.core.artifact.artifact.os.link", no_links)
    artifact = make(tmp_path / "a", graph=b"x" * (1 << 20))
    assert Artifact.open(artifact.copy_to(tmp_path / "b").path, verify=True)


def test_a_copy_leaves_out_what_a_killed_annotate_left(tmp_path):
    artifact = make(tmp_path / "a")
    (artifact.path / ".tmp-manifest.json-0123456789ab").write_text("half")
    assert hidden(artifact.copy_to(tmp_path / "b").path) == []


def test_a_verdict_is_replaced_by_a_newer_one_of_its_stage(tmp_path):
    artifact = make(tmp_path / "a").annotate(verdict(passed=False), b"first")
    assert artifact.failed_verdict().summary == "passed: False"
    artifact.annotate(verdict(stage="bench"), b"other")
    newest = artifact.annotate(verdict(), b"second")
    opened = Artifact.open(artifact.path)
    assert opened == newest
    assert opened.failed_verdict() is None
    assert [v.stage for v in opened.manifest.verdicts] == ["bench", "validate"]
    assert (artifact.path / "reports" / "validate.json").read_bytes() == b"second"


def test_a_failed_artifact_is_closed_unless_allowed(tmp_path):
    artifact = make(tmp_path / "a").annotate(verdict(passed=False, summary="logits differ"), b"{}")
    with pytest.raises(RejectedArtifactError, match=r"logits differ\. Read .*validate\.json"):
        artifact.require_passed(allow_failed=False)
    artifact.require_passed(allow_failed=True)
    artifact.annotate(verdict(), b"{}").require_passed(allow_failed=False)


def test_annotate_leaves_the_old_manifest_when_it_is_interrupted(tmp_path, monkeypatch):
    artifact = make(tmp_path / "a")
    replace = os.replace

    def interrupted(source, target):
        if target.name == "manifest.json":
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr("enginery.core.scratch.os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        artifact.annotate(verdict(passed=False), b"{}")
    assert Artifact.open(artifact.path) == artifact
    assert hidden(artifact.path) == []


def test_two_processes_that_annotate_at_once_keep_each_others_verdicts(tmp_path):
    """By a link, too: the lock is on the directory that is meant."""
    artifact = make(tmp_path / "minilm")
    (tmp_path / "link").symlink_to("minilm")
    stages = ["validate", "bench", "optimize", "lint"]
    places = [artifact.path, tmp_path / "link"] * 2
    children = [start(ANNOTATE, *given) for given in zip(places, stages, strict=True)]
    for child in children:
        assert child.stdout.readline() == "open\n"
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    assert [child.communicate()[1] for child in children] == [""] * 4
    found = Artifact.open(artifact.path)
    assert sorted(v.stage for v in found.manifest.verdicts) == sorted(stages)
    assert [(artifact.path / f"reports/{stage}.json").read_text() for stage in stages] == stages
    assert {path.name for path in artifact.path.iterdir()} == {
        "manifest.json",
        "model.onnx",
        "config.json",
        "reports",
    }


def test_annotate_waits_for_another_process(tmp_path, home):
    """Whoever comes second reads the manifest that the first has written."""
    artifact = make(tmp_path / "minilm")
    with locked(artifact.path / "manifest.json"):
        child = start(ANNOTATE, artifact.path, "bench")
        child.stdout.readline()
        child.stdin.write("go\n")
        child.stdin.flush()
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(timeout=0.5)
        edit_manifest(artifact.path, verdicts=[verdict(stage="lint").model_dump()])
    child.communicate()
    assert [v.stage for v in Artifact.open(artifact.path).manifest.verdicts] == ["lint", "bench"]


def test_a_verdict_needs_no_store(tmp_path, home):
    artifact = make(tmp_path / "minilm")
    shutil.rmtree(home, ignore_errors=True)
    home.write_text("a file")
    annotated = artifact.annotate(verdict(), b"{}")
    assert Artifact.open(artifact.path) == annotated


def test_a_verdict_is_not_added_to_another_artifact(tmp_path):
    artifact = make(tmp_path / "minilm")
    make(tmp_path / "minilm", graph=b"other")
    with pytest.raises(ArtifactError, match="minilm was replaced by another artifact"):
        artifact.annotate(verdict(), b"{}")
    assert Artifact.open(artifact.path).manifest.verdicts == ()


def test_write_atomically_never_shows_a_part(tmp_path, monkeypatch):
    file = tmp_path / "report.json"
    write_atomically(file, b"old")
    seen = []
    monkeypatch.setattr("enginery.core.scratch.os.fsync", lambda _: seen.append(file.read_bytes()))
    write_atomically(file, b"new")
    assert seen == [b"old", b"new"]  # the content is synced before the rename, the name after it
    assert file.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [file]


# Every byte


def reported(tmp_path):
    made = make(tmp_path / "a").annotate(verdict(), b'{"passed": true}')
    return made.annotate(reports={"reports/latency.svg": b"<svg/>"})


@pytest.mark.more
def test_a_changed_byte_of_any_file_is_named(tmp_path):
    artifact = reported(tmp_path)
    for file in [path for path in artifact.path.rglob("*") if path.is_file()]:
        whole = file.read_bytes()
        for index in range(len(whole)):
            for flipped in (whole[index] ^ 1, whole[index] ^ 32, 255 - whole[index]):
                file.write_bytes(whole[:index] + bytes([flipped]) + whole[index + 1 :])
                with pytest.raises(ArtifactError, match=re.escape(str(file))):
                    Artifact.open(artifact.path)
        file.write_bytes(whole)
    Artifact.open(artifact.path, verify=True)


def test_bytes_after_the_manifest_are_damage(tmp_path):
    artifact = make(tmp_path / "a")
    with (artifact.path / "manifest.json").open("a") as stream:
        stream.write(" ")
    with pytest.raises(ArtifactError, match=r"manifest\.json is damaged: it does not end with"):
        Artifact.open(artifact.path)


def test_a_report_that_is_gone_is_missed_when_everything_is_verified(tmp_path):
    artifact = reported(tmp_path)
    (artifact.path / "reports/latency.svg").unlink()
    assert Artifact.open(artifact.path).report("latency.svg") is None
    with pytest.raises(ArtifactError, match=r"latency\.svg is missing"):
        Artifact.open(artifact.path, verify=True)


def test_unrecorded_report_is_ignored(tmp_path):
    artifact = reported(tmp_path)
    (artifact.path / "reports/benchmark.json").write_text("{}")
    assert artifact.report("benchmark.json") is None
    assert artifact.report("validate.json") == artifact.path / "reports/validate.json"


@pytest.mark.parametrize("report", ["../x.json", "/tmp/x.json", "x.json", "reports/../../x.json"])
def test_verdict_with_a_report_outside_is_rejected(tmp_path, report):
    artifact = make(tmp_path / "a")
    found = {**verdict().model_dump(), "report": report}
    edit_manifest(artifact.path, verdicts=[found])
    with pytest.raises(ArtifactError, match=r"verdicts\.0\.report: .*(not a safe path|not below)"):
        Artifact.open(artifact.path)


def test_reports_are_not_written_through_a_link(tmp_path):
    artifact = make(tmp_path / "a")
    (tmp_path / "elsewhere").mkdir()
    (artifact.path / "reports").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArtifactError, match="reports is a symbolic link"):
        artifact.annotate(verdict(), b"{}")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_copy_takes_nothing_that_the_manifest_does_not_name(tmp_path):
    artifact = reported(tmp_path)
    (artifact.path / "reports/extra.json").symlink_to("/etc/hostname")
    (artifact.path / "notes.txt").write_text("mine")
    copy = artifact.copy_to(tmp_path / "b")
    found = {path.relative_to(copy.path).as_posix() for path in copy.path.rglob("*")}
    assert found == {
        "config.json",
        "manifest.json",
        "model.onnx",
        "reports",
        "reports/latency.svg",
        "reports/validate.json",
    }


@pytest.mark.more
def test_opening_while_another_process_writes_reports_finds_no_damage(tmp_path):
    artifact = reported(tmp_path)
    child = start(ANNOTATE.replace("range(5)", "range(200)"), artifact.path, "bench")
    child.stdout.readline()
    child.stdin.write("go\n")
    child.stdin.flush()
    while child.poll() is None:
        Artifact.open(artifact.path, verify=True)
    assert child.communicate()[1] == ""


def test_external_data_are_copied_and_can_be_read_by_everybody(tmp_path):
    """onnx-ir refuses external data with several hard links, and onnx writes them with 0600."""
    with staging(tmp_path / "a") as directory:
        (directory / "model.onnx").write_bytes(b"g" * (1 << 20))
        data = directory / "model.onnx_data"
        data.write_bytes(b"w" * (1 << 20))
        data.chmod(0o600)
        graph = manifest().graphs[0].model_copy(update={"data_files": ("model.onnx_data",)})
        commit_artifact(directory, manifest().model_copy(update={"graphs": (graph,)}))
    artifact = Artifact.open(tmp_path / "a")
    copy = artifact.copy_to(tmp_path / "b").path
    for path in (artifact.path, copy):
        stat = (path / "model.onnx_data").stat()
        assert stat.st_nlink == 1
        assert stat.st_mode == (path / "manifest.json").stat().st_mode
    assert (copy / "model.onnx").stat().st_nlink == 2, "what may be a link is one"


@pytest.mark.parametrize("name", ["manifest.json", "model.onnx"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_named_pipe_in_an_artifact_is_an_error_and_does_not_block(tmp_path, name, kind):
    path = make(tmp_path / "a").path / name
    path.unlink()
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    with pytest.raises(ArtifactError, match=name):
        Artifact.open(tmp_path / "a")


def test_directory_with_a_nested_manifest_is_not_overwritten(tmp_path):
    out = tmp_path / "artifact"
    out.mkdir()
    (out / "manifest.json").write_text("[" * 200_000)
    with pytest.raises(ArtifactError, match="not an enginery artifact"):
        check_overwritable(out)


def test_card_with_an_invalid_listing_is_not_overwritten(tmp_path):
    out = make(tmp_path / "artifact").path
    (out / "reports").mkdir(exist_ok=True)
    (out / "reports" / "publication.json").write_text("[" * 200_000)
    (out / "README.md").write_text("mine")
    with pytest.raises(ArtifactError, match=r"files that do not belong to it .*README\.md"):
        check_overwritable(out)


def test_a_manifest_that_lists_no_files_is_no_artifacts(tmp_path):
    out = make(tmp_path / "artifact").path
    edit_manifest(out, files=None)
    with pytest.raises(ArtifactError, match="not an enginery artifact"):
        check_overwritable(out)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "1_Pooling/config.json"])
def test_unlisted_settings_are_rejected(tmp_path, name):
    artifact = make(tmp_path / "a")
    path = artifact.path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("{}")
    with pytest.raises(ArtifactError, match=rf"{name} is not listed in manifest\.json"):
        Artifact.open(artifact.path)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(ArtifactError, match=rf"{name} is not listed in manifest\.json"):
        Artifact.open(artifact.path)
    path.unlink()
    (artifact.path / "notes.md").write_text("mine")
    Artifact.open(artifact.path, verify=True)


def test_open_reads_again_what_another_process_has_just_written(tmp_path, monkeypatch):
    first = make(tmp_path / "artifact").annotate(verdict(), b"{}")
    second = first.annotate(verdict(), b'{"seconds": 1}')
    earlier = iter([first.manifest])
    read = module._read_manifest
    monkeypatch.setattr(module, "_read_manifest", lambda path: next(earlier, None) or read(path))
    assert Artifact.open(second.path) == second


def test_copied_reports_are_of_one_moment(tmp_path, monkeypatch):
    first = make(tmp_path / "artifact").annotate(verdict(), b"{}")
    second = first.annotate(verdict(), b'{"seconds": 1}')
    earlier = iter([first.manifest])
    read = module._read_manifest
    monkeypatch.setattr(module, "_read_manifest", lambda path: next(earlier, None) or read(path))
    kept = tmp_path / "kept"
    assert first.copy_reports(kept) == second
    second.annotate(verdict(), b'{"seconds": 2}')
    assert (kept / "reports/validate.json").read_bytes() == b'{"seconds": 1}'
    assert (kept / "manifest.json").read_bytes() == second.manifest.to_bytes()


def test_copied_manifest_records_no_report_that_was_removed_meanwhile(tmp_path, monkeypatch):
    first = make(tmp_path / "artifact").annotate(verdict(), b"{}")
    second = first.annotate(removed=["reports/validate.json"])
    earlier = iter([first.manifest])
    read = module._read_manifest
    monkeypatch.setattr(module, "_read_manifest", lambda path: next(earlier, None) or read(path))
    assert first.copy_to(tmp_path / "copy").manifest == second.manifest
    assert Artifact.open(tmp_path / "copy", verify=True).manifest.reports == {}


def test_reports_of_another_artifact_are_not_copied(tmp_path):
    artifact = make(tmp_path / "artifact")
    shutil.rmtree(artifact.path)
    make(artifact.path, graph=b"other")
    with pytest.raises(ArtifactError, match="was replaced by another artifact"):
        artifact.copy_reports(tmp_path / "kept")
    with pytest.raises(ArtifactError, match="was replaced by another artifact"):
        artifact.copy_to(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_open_gives_up_on_reports_that_never_match(tmp_path, monkeypatch):
    artifact = make(tmp_path / "artifact").annotate(verdict(), b"{}")
    (artifact.path / "reports/validate.json").write_bytes(b"{} ")
    numbers = iter(range(1000))

    def read(path):
        # As if other processes wrote another manifest each time.
        return artifact.manifest.model_copy(update={"model_type": str(next(numbers))})

    monkeypatch.setattr(module, "_read_manifest", read)
    with pytest.raises(ArtifactError, match=r"validate\.json"):
        Artifact.open(artifact.path)
    assert next(numbers) < 100


def test_an_artifact_is_shown_in_one_line(tmp_path):
    artifact = make(tmp_path / "made")
    assert repr(artifact).startswith(f"<Artifact {artifact.path}: ")
    assert artifact.manifest.task in repr(artifact)
    assert len(repr(artifact)) < len(str(artifact.path)) + 200
    shown = artifact._repr_html_()
    assert f"<td>task</td><td>{artifact.manifest.task}</td>" in shown
    assert f"<caption>{artifact.path}</caption>" in shown

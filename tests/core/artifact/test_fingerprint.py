import hashlib
import os
import sqlite3
import subprocess

import pytest

from enginery.core.artifact import fingerprint as module
from enginery.core.artifact.fingerprint import (
    Fingerprint,
    combined_sha256,
    option_fields,
    runtime_version,
    sha256_of,
    tool_versions,
)
from enginery.validate.config import ValidateConfig


def test_key_depends_on_stage_names_and_values_but_not_on_order():
    key = Fingerprint("export", {"a": "1", "b": "2"}).key
    assert len(key) == 64
    assert Fingerprint("export", {"b": "2", "a": "1"}).key == key
    assert Fingerprint("optimize", {"a": "1", "b": "2"}).key != key
    assert Fingerprint("export", {"a": "2", "b": "1"}).key != key
    assert Fingerprint("export", {"a": "1"}).key != key


def test_key_is_the_same_in_every_version():
    # A change here would throw away everybody's store.
    assert Fingerprint("export", {"model": "café", "opset": "20"}).key == (
        hashlib.sha256('["export", {"model": "café", "opset": "20"}]'.encode()).hexdigest()
    )


def test_changes_name_each_field_with_before_and_now():
    now = Fingerprint("export", {"opset": "20", "torch": "2.13.0"})
    assert now.changes({"opset": "17", "torch": "2.13.0"}) == ["opset: 17 → 20"]
    assert now.changes({"opset": "20", "dtype": "fp16"}) == [
        "dtype: fp16 → none",
        "torch: none → 2.13.0",
    ]
    assert now.changes(now.fields) == []


def test_changes_shorten_digests():
    now = Fingerprint("export", {"source": "a" * 64})
    assert now.changes({"source": "b" * 64}) == [f"source: {'b' * 12} → {'a' * 12}"]


def test_changes_shorten_the_digest_of_content_and_keep_its_kind():
    now = Fingerprint("optimize", {"data": f"csv {'a' * 64}"})
    assert now.changes({"data": f"tsv {'b' * 64}"}) == [f"data: tsv {'b' * 12} → csv {'a' * 12}"]


def test_option_fields_are_text():
    config = ValidateConfig(seed=20, allow_fallback=True, profile=("a",))
    fields = option_fields(config)
    assert (fields["column"], fields["seed"], fields["allow_fallback"], fields["profile"]) == (
        "text",
        "20",
        "true",
        '["a"]',
    )


def test_tool_versions_are_none_for_missing_packages():
    found = tool_versions(["pydantic", "no-such-distribution"])
    assert found["no-such-distribution"] == "none"
    assert found["pydantic"][0].isdigit()


def test_runtime_version_names_the_distribution_that_is_installed():
    (name,) = runtime_version()
    assert name in ("onnxruntime-gpu", "onnxruntime")


def test_hash_is_sha256(tmp_path):
    file = tmp_path / "model.onnx"
    file.write_bytes(b"graph")
    assert sha256_of(file) == hashlib.sha256(b"graph").hexdigest()


def test_second_hash_reads_nothing(tmp_path, monkeypatch):
    file = tmp_path / "model.onnx"
    file.write_bytes(b"graph")
    first = sha256_of(file)
    monkeypatch.setattr(module.hashlib, "file_digest", lambda *_: pytest.fail("read again"))
    assert sha256_of(file) == first
    with pytest.raises(pytest.fail.Exception):
        sha256_of(file, trust_stat=False)


def test_hash_sees_an_edit_that_keeps_size_and_mtime(tmp_path):
    file = tmp_path / "model.onnx"
    file.write_bytes(b"graph")
    before = file.stat()
    first = sha256_of(file)
    file.write_bytes(b"other")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert sha256_of(file) == hashlib.sha256(b"other").hexdigest() != first


def test_hash_sees_every_one_of_many_quick_edits(tmp_path):
    # Edits within one tick of the kernel's clock leave all times as they were.
    file = tmp_path / "model.onnx"
    for number in range(20):
        content = f"graph {number:03}".encode()
        file.write_bytes(content)
        os.utime(file, ns=(1, 1))
        assert sha256_of(file) == hashlib.sha256(content).hexdigest()


def test_hash_waits_only_for_files_that_were_just_written(tmp_path, monkeypatch):
    file = tmp_path / "model.onnx"
    file.write_bytes(b"graph")
    waits = []
    monkeypatch.setattr(module.time, "sleep", waits.append)
    written_ns = file.stat().st_ctime_ns
    monkeypatch.setattr(module.time, "time_ns", lambda: written_ns)
    sha256_of(file)
    monkeypatch.setattr(module.time, "time_ns", lambda: written_ns + 10**9)
    sha256_of(file)
    monkeypatch.setattr(module.time, "time_ns", lambda: written_ns - 10**12)  # a server's clock
    sha256_of(file)
    assert waits == [0.02, 0.02]


def test_hash_sees_another_file_moved_into_place(tmp_path):
    file, other = tmp_path / "model.onnx", tmp_path / "other"
    file.write_bytes(b"graph")
    sha256_of(file)
    other.write_bytes(b"other")
    os.replace(other, file)
    assert sha256_of(file) == hashlib.sha256(b"other").hexdigest()


@pytest.mark.parametrize("broken", ["garbage", "directory", "another schema", "home is a file"])
def test_a_broken_hash_table_stops_nothing(tmp_path, home, broken):
    table = home / "hashes.sqlite"
    if broken == "home is a file":
        home.write_text("")
    else:
        home.mkdir()
    if broken == "garbage":
        table.write_bytes(b"not a database" * 1000)
    if broken == "directory":
        table.mkdir()
    if broken == "another schema":
        with sqlite3.connect(table) as connection:
            connection.execute("create table file_hashes (something text)")
        connection.close()
    file = tmp_path / "model.onnx"
    file.write_bytes(b"graph")
    assert sha256_of(file) == sha256_of(file) == hashlib.sha256(b"graph").hexdigest()


def test_a_read_only_hash_table_is_still_read(tmp_path, home, monkeypatch):
    file = tmp_path / "model.onnx"
    file.write_bytes(b"graph")
    digest = sha256_of(file)
    connect = sqlite3.connect

    def read_only(path, **options):
        return connect(f"file:{path}?mode=ro", uri=True, **options)

    monkeypatch.setattr(module.sqlite3, "connect", read_only)
    other = tmp_path / "other"
    other.write_bytes(b"other")
    assert sha256_of(other) == hashlib.sha256(b"other").hexdigest()
    monkeypatch.setattr(module.hashlib, "file_digest", lambda *_: pytest.fail("read again"))
    assert sha256_of(file) == digest


def test_hash_table_takes_inodes_of_64_bits(tmp_path, home, monkeypatch):
    file = tmp_path / "model.onnx"
    file.write_bytes(b"graph")
    monkeypatch.setattr(module, "_settled_stat", lambda _: f"5 {2**64 - 1} 1 1")
    digest = sha256_of(file)
    file.write_bytes(b"other")
    assert sha256_of(file) == digest, "from the table"
    monkeypatch.setattr(module, "_settled_stat", lambda _: f"5 {2**64 - 2} 1 1")
    assert sha256_of(file) != digest


def test_combined_hash_is_that_of_sha256sums_listing(tmp_path):
    for name in ("b.json", "a.onnx"):
        (tmp_path / name).write_text(name)
    listing = subprocess.run(
        ["sha256sum", "a.onnx", "b.json"], cwd=tmp_path, capture_output=True, check=True
    ).stdout
    files = {name: sha256_of(tmp_path / name) for name in ("a.onnx", "b.json")}
    assert combined_sha256(files) == hashlib.sha256(listing).hexdigest()


def test_no_file_name_passes_for_two_files():
    two = {"a": "1" * 64, "b": "2" * 64}
    one = {f"a\n{'2' * 64}  b": "1" * 64}
    assert combined_sha256(one) != combined_sha256(two)


def test_a_named_pipe_has_no_hash_and_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "file")
    with pytest.raises(OSError, match="it is a named pipe"):
        sha256_of(tmp_path / "file")

"""Engines in the store: cache hits and misses, damage, and builds that fail or are killed."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from enginery.core.artifact.artifact import Artifact, commit_artifact
from enginery.core.artifact.engine import Engine
from enginery.core.artifact.engine_record import engine_directories
from enginery.core.errors import ArtifactError, ProviderError
from enginery.core.json_file import append_checksum, verify_checksum
from enginery.core.store.store import Store
from enginery.engine import build, stage
from enginery.engine.build import find_engine, obtain_engine
from enginery.engine.requests import resolve_requests
from enginery.runtime.tensorrt.library import has_tensorrt
from tests.engine.conftest import build_config
from tests.engine.products import product
from tests.progress import Said

pytestmark = pytest.mark.skipif(not has_tensorrt(), reason="pip install 'enginery[tensorrt-rtx]'")


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def request_of(artifact, **options):
    (request,) = resolve_requests(artifact, build_config(**options)).requests
    return request


def obtain(artifact, progress=None, **options):
    config = build_config(**options)
    request = request_of(artifact, **options)
    return obtain_engine(artifact, request, config, progress=progress or Said())


# What is shared


def test_second_build_comes_from_the_store(tmp_path, home):
    artifact, said = product(tmp_path / "a"), Said()
    engine, built = obtain(artifact)
    again, rebuilt = obtain(artifact, said)
    assert (built, rebuilt) == (True, False)
    assert again == engine
    assert engine.path.parent == home / "engines"
    assert engine.name == engine.record.directory_name
    assert said.messages == [f"tensorrt-rtx: nothing to do, {engine.name} is up to date"]
    assert sorted(path.name for path in engine.path.iterdir()) == [
        "engine.json",
        "layers.json",
        "model.plan",
    ]


def test_the_same_graph_in_another_artifact_hits(tmp_path):
    engine, _ = obtain(product(tmp_path / "a", external=True))
    other = product(tmp_path / "elsewhere" / "b", external=True, config='{"id2label": {}}')
    assert obtain(other) == (engine, False)


def test_options_that_do_not_change_the_plan_hit(tmp_path):
    artifact = product(tmp_path / "a")
    engine, _ = obtain(artifact)
    for options in ({"allow_partitions": True}, {"engine_per_profile": False}, {"column": "x"}):
        assert obtain(artifact, **options) == (engine, False)


# What never is


def test_two_fine_tunes_of_one_file_name_never_share_an_engine(tmp_path):
    first, second = product(tmp_path / "a", seed=1), product(tmp_path / "b", seed=2)
    assert first.model.name == second.model.name
    assert first.model.stat().st_size == second.model.stat().st_size
    engine, _ = obtain(first)
    assert find_engine(request_of(second)) is None
    other, built = obtain(second)
    assert built
    assert other.path != engine.path
    assert find_engine(request_of(first)) == engine


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({"profile": ["batch=1:4:16"]}, "profiles: batch=1:4:8 → batch=1:4:16"),
        ({"capability": "8.0"}, "capabilities: 8.9 → 8.0"),
        ({"capability": "8.0,8.9"}, "capabilities: 8.9 → 8.0,8.9"),
        ({"capability": "portable"}, "capabilities: 8.9 → portable"),
        ({"workspace_bytes": 1 << 30}, "workspace_bytes: 8589934592 → 1073741824"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_changed_option_misses_and_is_named(tmp_path, monkeypatch, options, changed):
    artifact, said = product(tmp_path / "a"), Said()
    obtain(artifact)
    assert find_engine(request_of(artifact, **options)) is None
    never_built(monkeypatch)
    with pytest.raises(ProviderError, match="stopped"):
        obtain(artifact, said, **options)
    assert said.messages == [f"tensorrt-rtx: rebuilding: {changed}"]


def never_built(monkeypatch):
    def stop(*_, **__):
        raise ProviderError("stopped.")

    monkeypatch.setattr(build, "build_plan", stop)


def test_another_external_data_file_misses_and_the_graph_is_named(tmp_path, monkeypatch):
    first = product(tmp_path / "a", external=True, seed=1)
    second = product(tmp_path / "b", external=True, seed=2)
    assert first.model.read_bytes() == second.model.read_bytes()
    obtain(first)
    assert find_engine(request_of(second)) is None
    never_built(monkeypatch)
    said = Said()
    with pytest.raises(ProviderError):
        obtain(second, said)
    (message,) = said.messages
    before, now = (request_of(a).graph_sha256[:12] for a in (first, second))
    assert message == f"tensorrt-rtx: rebuilding: graph: {before} → {now}"


def test_the_order_of_profiles_misses(tmp_path):
    artifact = product(tmp_path / "a")
    both = ["batch=1:4:8", "batch=16"]
    obtain(artifact, profile=both, engine_per_profile=False)
    other = request_of(artifact, profile=both[::-1], engine_per_profile=False)
    assert find_engine(other) is None


# What is damaged or dies half-way


def flipped(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize(
    "change",
    [
        {"profiles": ["batch=1:8:999"]},
        {"capabilities": ["8.0"]},
        {"graph_sha256": "0" * 64},
        {"key": "0" * 64},
    ],
    ids=["profiles", "capabilities", "graph_sha256", "key"],
)
def test_altered_record_is_detected(tmp_path, change):
    artifact = product(tmp_path / "a")
    engine, _ = obtain(artifact)
    file = engine.path / "engine.json"
    found = json.loads(verify_checksum(file.read_bytes()))
    file.write_bytes(append_checksum(json.dumps({**found, **change}, indent=2)))
    assert find_engine(request_of(artifact)) is None
    with pytest.raises(ArtifactError, match=r"engine.json was altered"):
        Engine.open(engine.path)


def test_missing_layer_in_the_list_is_detected(tmp_path):
    artifact = product(tmp_path / "a")
    engine, _ = obtain(artifact)
    (engine.path / "layers.json").write_text(
        json.dumps([asdict(layer) for layer in engine.layers()[1:]])
    )
    assert find_engine(request_of(artifact)) is None


def test_damaged_plan_is_never_copied_into_an_artifact(tmp_path):
    artifact = product(tmp_path / "a")
    engine, _ = obtain(artifact)
    engine.plan.write_bytes(flipped(engine.plan.read_bytes()))
    made = stage.run(artifact, build_config(), tmp_path / "made")
    assert Artifact.open(made.path, verify=True)
    assert find_engine(request_of(artifact))


def test_what_is_built_is_what_the_manifest_hashes(tmp_path):
    artifact = product(tmp_path / "a")
    made = stage.run(artifact, build_config(), tmp_path / "made")
    (engine,) = [entry.engine for entry in Store().entries() if entry.engine]
    name = f"engines/{engine.name}/model.plan"
    assert made.manifest.files[name].sha256 == engine.record.plan_sha256
    shutil.copy(artifact.model, made.path / name)
    with pytest.raises(Exception, match=r"model\.plan has \d+ bytes"):
        Artifact.open(made.path)


def test_a_hidden_file_of_a_killed_verdict_is_not_hashed_into_the_artifact(tmp_path):
    artifact = product(tmp_path / "a")
    (artifact.path / ".tmp-manifest.json-0123456789ab").write_text("{}")
    made = stage.run(artifact, build_config(), tmp_path / "made")
    assert not [name for name in made.manifest.files if ".tmp-" in name]
    assert Path(made.path, "manifest.json").is_file()


def test_a_stray_directory_among_the_engines_is_kept_and_is_no_engine(tmp_path):
    artifact = product(tmp_path / "a")
    stray = artifact.path / "engines" / "stray"
    stray.mkdir(parents=True)
    (stray / "model.plan").write_bytes(b"no record")
    commit_artifact(artifact.path, artifact.manifest)
    made = stage.run(Artifact.open(artifact.path), build_config(), tmp_path / "made")
    assert len(engine_directories(made.path)) == 1
    assert (made.path / "engines/stray/model.plan").read_bytes() == b"no record"

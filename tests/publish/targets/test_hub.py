"""The Hub, tested with the server of `hub_server`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from enginery.core.artifact.artifact import Artifact
from enginery.core.errors import ArtifactError, OptionError, RegistryError
from enginery.publish import stage
from tests.publish.products import UNVALIDATED, Heard, altered, large, with_an_engine
from tests.publish.targets.hub_server import hub_server

pytest.importorskip("huggingface_hub", reason="pip install 'enginery[export]'")

from enginery.publish.targets.hub import HubRegistry

TOKEN = "hf_" + "s3cr3t" * 6
URL = "hf://org/name"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    from huggingface_hub import constants, file_download
    from huggingface_hub.utils import reset_sessions

    with hub_server() as server:
        template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        # The library reads its variables once, when it is imported.
        monkeypatch.setattr(file_download, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        for name, value in {
            "ENDPOINT": server.endpoint,
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        reset_sessions()  # one that was made offline stays so
        yield server
    reset_sessions()


@pytest.fixture
def artifact(exported) -> Artifact:
    return exported("bert", "feature-extraction")


@pytest.mark.parametrize(
    "url",
    ["hf://name", "hf://a/b/c", "hf://org/na me", "hf://org/..", "hf://org/-name", "hf://org/a--b"],
)
def test_invalid_address_is_an_error(url):
    with pytest.raises(OptionError, match="address"):
        HubRegistry(url, UNVALIDATED)


@pytest.mark.more
def test_pulled_package_equals_the_published_one(hub, artifact, tmp_path):
    whole = large(artifact, tmp_path / "large")
    heard = Heard()
    published = stage.run(whole, URL, UNVALIDATED, progress=heard)
    repository = hub.repositories["org/name"]
    assert published.is_new
    assert published.url == f"hf://org/name@{repository.branches['main']}"
    assert any(name.startswith("uploading") for name in heard.tasks)
    for out, url in (("a", published.url), ("b", URL)):
        pulled = stage.pull(url, tmp_path / out, UNVALIDATED)
        assert pulled.content_sha256() == whole.content_sha256()
    head = repository.commits[repository.branches["main"]]
    assert head["README.md"].startswith(b"---\n")
    assert ".gitattributes" in head


@pytest.mark.parametrize("private", [True, False])
def test_new_repository_is_private_by_default(hub, artifact, private):
    stage.run(artifact, URL, replace(UNVALIDATED, private=private))
    assert hub.repositories["org/name"].private is private


def test_same_content_is_committed_once(hub, artifact):
    first = stage.run(artifact, URL, UNVALIDATED)
    second = stage.run(artifact, URL, UNVALIDATED)
    assert (first.is_new, second.is_new) == (True, False)
    assert first.url == second.url
    assert len(hub.repositories["org/name"].messages) == 2  # the Hub's own and ours


def test_large_file_of_an_earlier_version_is_not_uploaded_again(hub, artifact, tmp_path):
    first = large(artifact, tmp_path / "first")
    stage.run(first, URL, UNVALIDATED)
    stage.run(altered(first, tmp_path / "second"), URL, UNVALIDATED)
    assert len(hub.uploads) == 1
    assert len(hub.repositories["org/name"].messages) == 3


@pytest.mark.more
def test_layout_of_the_hub_replaces_the_other_one(hub, artifact, tmp_path):
    whole = large(artifact, tmp_path / "large")
    stage.run(whole, URL, UNVALIDATED)
    stage.run(whole, URL, replace(UNVALIDATED, layout="hub"))
    repository = hub.repositories["org/name"]
    files = repository.commits[repository.branches["main"]]
    assert {name for name in files if ".onnx" in name} == {
        "onnx/model.onnx",
        "onnx/model.onnx_data",
    }
    assert len(hub.uploads) == 1, "the weights are the same under both names"
    back = stage.pull(URL, tmp_path / "back", UNVALIDATED, variant="fp32")
    assert back.model == tmp_path / "back/model.onnx"


def test_files_of_an_earlier_version_are_removed_and_others_kept(hub, artifact, tmp_path):
    stage.run(altered(artifact, tmp_path / "first"), URL, UNVALIDATED)
    repository = hub.repositories["org/name"]
    head = repository.commits[repository.branches["main"]]
    repository.commit("main", {**head, "picture.png": b"mine"}, "by hand")
    stage.run(artifact, URL, UNVALIDATED)
    files = repository.commits[repository.branches["main"]]
    assert "notes.json" not in files
    assert files["picture.png"] == b"mine"


def test_edited_card_is_restored(hub, artifact, tmp_path):
    stage.run(artifact, URL, UNVALIDATED)
    repository = hub.repositories["org/name"]
    head = repository.commits[repository.branches["main"]]
    repository.commit("main", {**head, "README.md": b"edited"}, "by hand")
    with pytest.raises(ArtifactError, match=r"README\.md"):
        stage.pull(URL, tmp_path / "edited", UNVALIDATED)
    stage.run(artifact, URL, UNVALIDATED)
    stage.pull(URL, tmp_path / "whole", UNVALIDATED)


def test_changed_file_on_the_hub_is_an_error_with_its_name(hub, artifact, tmp_path):
    stage.run(artifact, URL, UNVALIDATED)
    repository = hub.repositories["org/name"]
    head = repository.commits[repository.branches["main"]]
    head["model.onnx"] = head["model.onnx"][:-1] + b"?"
    with pytest.raises(ArtifactError, match=r"model\.onnx was altered"):
        stage.pull(URL, tmp_path / "out", UNVALIDATED)
    assert not (tmp_path / "out").exists()


def test_model_not_published_by_enginery_is_not_overwritten(hub, artifact):
    stage.run(artifact, URL, UNVALIDATED)
    repository = hub.repositories["org/name"]
    repository.commit("main", {"model.safetensors": b"w", "config.json": b"{}"}, "theirs")
    with pytest.raises(RegistryError, match=r"that enginery did not publish: config\.json, model"):
        stage.run(artifact, URL, UNVALIDATED)
    assert repository.messages[-1] == "theirs"


def test_branch_of_the_address_is_created(hub, artifact, tmp_path):
    published = stage.run(artifact, f"{URL}@fp16", UNVALIDATED)
    branches = hub.repositories["org/name"].branches
    assert published.url.endswith(branches["fp16"])
    assert branches["main"] != branches["fp16"]
    stage.pull(f"{URL}@fp16", tmp_path / "out", UNVALIDATED)


@pytest.mark.more
def test_version_is_a_tag_and_never_gets_other_content(hub, artifact, tmp_path):
    named = replace(UNVALIDATED, version="1.0", alias="production")
    published = stage.run(artifact, URL, named)
    tags = hub.repositories["org/name"].tags
    assert published.url == f"{URL}@1.0"
    assert tags["1.0"] == tags["production"]
    assert not stage.run(artifact, URL, named).is_new
    other = altered(artifact, tmp_path / "other")
    with pytest.raises(
        RegistryError, match=r"@1\.0 exists with other content .* another --version"
    ):
        stage.run(other, URL, named)
    stage.run(other, URL, replace(named, version="2.0"))
    assert tags["production"] == tags["2.0"] != tags["1.0"]
    assert not (
        stage.pull(f"{URL}@1.0", tmp_path / "out", UNVALIDATED).path / "notes.json"
    ).exists()


def test_alias_never_moves_a_version(hub, artifact, tmp_path):
    stage.run(artifact, URL, replace(UNVALIDATED, version="1.0"))
    repository = hub.repositories["org/name"]
    first = repository.tags["1.0"]
    other = altered(artifact, tmp_path / "other")
    with pytest.raises(RegistryError, match=r"alias '1\.0' is the name of a version"):
        stage.run(other, URL, replace(UNVALIDATED, version="2.0", alias="1.0"))
    with pytest.raises(OptionError, match=r"are both '2\.0'"):
        stage.run(other, URL, replace(UNVALIDATED, version="2.0", alias="2.0"))
    assert repository.tags == {"1.0": first}
    assert repository.branches["main"] == first, "nothing was committed"


@pytest.mark.more
def test_published_content_can_become_a_version(hub, artifact, tmp_path):
    first = stage.run(artifact, URL, replace(UNVALIDATED, alias="production"))
    second = stage.run(artifact, URL, replace(UNVALIDATED, version="1.0"))
    assert (first.is_new, second.is_new) == (True, False)
    with pytest.raises(RegistryError, match="is the name of a version"):
        stage.run(artifact, URL, replace(UNVALIDATED, alias="1.0"))
    stage.run(altered(artifact, tmp_path / "o"), URL, replace(UNVALIDATED, alias="production"))
    pulled = stage.pull(f"{URL}@1.0", tmp_path / "out", UNVALIDATED)
    assert pulled.content_sha256() == artifact.content_sha256()


@pytest.mark.parametrize("url", [URL, f"{URL}@onnx"])
def test_foreign_repository_gets_no_branch(hub, artifact, url):
    from huggingface_hub import HfApi

    HfApi().create_repo("org/name")
    repository = hub.repositories["org/name"]
    repository.commit("main", {"pytorch_model.bin": b"y", "config.json": b"{}"}, "theirs")
    with pytest.raises(RegistryError, match="Use another repository; a new branch of this one"):
        stage.run(artifact, url, UNVALIDATED)
    assert list(repository.branches) == ["main"]


def test_damage_is_found_if_the_card_has_other_wording(hub, artifact, tmp_path, monkeypatch):
    from enginery.publish import package

    stage.run(artifact, URL, UNVALIDATED)
    repository = hub.repositories["org/name"]
    head = repository.commits[repository.branches["main"]]
    repository.commit("main", {**head, "config.json": b"{ }"}, "by hand")
    words = package.model_card
    monkeypatch.setattr(package, "model_card", lambda facts: words(facts) + "\nIn other words.\n")
    assert not stage.run(artifact, URL, UNVALIDATED).is_new
    stage.pull(URL, tmp_path / "out", UNVALIDATED)


def test_engine_is_marked_as_bound_to_its_hardware(hub, artifact, tmp_path):
    published = stage.run(with_an_engine(artifact, tmp_path / "e"), URL, UNVALIDATED)
    assert "hardware-bound: tensorrt-rtx 1.7.1.116, compute capability 8.9" in published.notes[0]
    repository = hub.repositories["org/name"]
    head = repository.commits[repository.branches["main"]]
    assert any(name.endswith(".plan") for name in head)
    assert "model.onnx" in head
    assert b"8.9" in head["README.md"]


def test_concurrent_commit_is_an_error(hub, artifact):
    repository = None

    def other_commits():
        nonlocal repository
        if repository is None:
            repository = hub.repositories["org/name"]
            repository.commit("main", {"manifest.json": b"{}"}, "another writer")

    hub.on_commit = other_commits
    with pytest.raises(RegistryError, match=r"was changed by another writer\. Publish again"):
        stage.run(artifact, URL, UNVALIDATED)


def test_files_uploaded_before_a_broken_connection_are_not_uploaded_again(hub, artifact, tmp_path):
    whole = large(artifact, tmp_path / "large")

    def broken():
        raise ConnectionError

    hub.on_commit = broken
    with pytest.raises(RegistryError, match="cannot be reached"):
        stage.run(whole, URL, UNVALIDATED)
    hub.on_commit = lambda: None
    assert stage.run(whole, URL, UNVALIDATED).is_new
    assert len(hub.uploads) == 1


@pytest.mark.more
@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        (
            (401, "", "Invalid username or password."),
            r"answered 401 for hf://org/name: Invalid username.*HF_TOKEN",
        ),
        (
            (403, "", "You don't have the rights"),
            r"answered 403 for .*the rights.*HF_TOKEN",
        ),
        ((403, "", "Private repository storage limit reached"), "storage limit reached"),
        ((429, "", "Too many requests"), "answered 429.*rate limit is reached"),
        ((500, "", "Internal"), "answered 500"),
    ],
)
def test_errors_of_the_hub_are_without_the_token(hub, artifact, refusal, said, caplog, capfd):
    caplog.set_level("DEBUG")
    hub.refusal = (*refusal[:2], f"{refusal[2]} {TOKEN}")
    with pytest.raises(RegistryError, match=said) as refused:
        stage.run(artifact, URL, UNVALIDATED)
    assert hub.tokens == {f"Bearer {TOKEN}"}
    spoken = capfd.readouterr()
    for text in (str(refused.value), caplog.text, spoken.out, spoken.err):
        assert TOKEN not in text
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__


def test_unreachable_hub_is_an_error(hub, artifact, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(RegistryError, match=r"cannot be reached for hf://org/name.*HF_ENDPOINT"):
        stage.run(artifact, URL, UNVALIDATED)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("hf://org/none", "does not exist, is private or gated"),
        (f"{URL}@v9", "revision does not exist"),
    ],
)
def test_missing_version_is_an_error(hub, artifact, url, said, tmp_path):
    stage.run(artifact, URL, UNVALIDATED)
    with pytest.raises(RegistryError, match=said):
        stage.pull(url, tmp_path / "out", UNVALIDATED)

import pytest

from enginery.core.errors import ArtifactError
from enginery.core.paths import (
    is_portable_name,
    is_relative_path,
    portable_name,
    resolve_inside,
)

OUTSIDE = [
    "",
    ".",
    "..",
    "/etc/passwd",
    "../a",
    "a/../b",
    "a//b",
    "./a",
    "a/",
    "a/.",
    "a\\b",
    "C:a",
    "c:/a",
    "a\0b",
]


@pytest.mark.parametrize("name", ["a", "a/b.json", "1_Pooling/config.json", "..a", "a..b", "~"])
def test_plain_names_are_below_the_root(tmp_path, name):
    assert resolve_inside(tmp_path, name, what="it") == tmp_path / name


@pytest.mark.parametrize("name", OUTSIDE)
def test_paths_out_of_the_root_are_rejected(tmp_path, name):
    assert not is_relative_path(name)
    with pytest.raises(ArtifactError, match="is not a safe path in the artifact: expected"):
        resolve_inside(tmp_path, name, what="the artifact")


@pytest.mark.parametrize("target", ["file", "/etc/hostname", "missing"])
def test_links_are_not_followed_wherever_they_lead(tmp_path, target):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(ArtifactError, match="link is a symbolic link"):
        resolve_inside(tmp_path, "link", what="the artifact")


def test_linked_directories_are_not_followed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "reports").symlink_to("real")
    with pytest.raises(ArtifactError, match="reports is a symbolic link"):
        resolve_inside(tmp_path, "reports/validation.json", what="the artifact")


def test_the_root_may_be_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "latest").symlink_to("real")
    assert resolve_inside(tmp_path / "latest", "a", what="it") == tmp_path / "latest" / "a"


@pytest.mark.parametrize("character", "\0\n\r\t\x1b\x7f\x85\x9b")
def test_names_with_control_characters_are_rejected(tmp_path, character):
    name = f"a{character}b"
    assert not is_relative_path(name)
    with pytest.raises(ArtifactError, match="control characters") as raised:
        resolve_inside(tmp_path, name, what="the artifact")
    assert character not in raised.value.message


def test_portable_name_is_valid_in_every_registry():
    assert portable_name("My Model/v1 (final)") == "My-Model-v1-final"
    assert portable_name("../..") == "model"
    assert len(portable_name("x" * 500)) == 128
    assert portable_name("nul") == "model-nul"
    for text in ("a" * 127 + ".b", "con.onnx", "1.", "aux"):
        assert is_portable_name(portable_name(text)), text

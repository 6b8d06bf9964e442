"""Tokenizers that fail, panic or never return, in place of a tiny model's own.

    >>> artifact = spoiled_copy(artifact, tmp_path / "panics", "panics")    # then tokenize PANIC

Words like `the pump is warm` are taken by each; the text that is not is in a constant.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from enginery.core.artifact.artifact import Artifact, commit_artifact

UNKNOWN = "xyzzy"
"""A word that the vocabulary of `no_unk` lacks."""
PANIC = "a" * 60
"""There are 2^60 ways to match it by the regex of `panics`. Onigmo gives up after 10^7, which the
Rust code takes for impossible."""
ENDLESS = "q" * 1000
"""A second for each of the thousand normalizers of `never_returns`: the regex tries n^3 / 6 ways,
too few at each place for Onigmo to give up. The text does not grow, and so takes no memory."""


def spoil(directory: Path, kind: str) -> None:
    """Writes a tokenizer.json of that kind over the one in `directory`."""
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(_KINDS[kind](json.loads(path.read_text()))))


def spoiled_copy(artifact: Artifact, directory: Path, kind: str) -> Artifact:
    """Copies an artifact, with such a tokenizer in it."""
    shutil.copytree(artifact.path, directory)
    spoil(directory, kind)
    commit_artifact(directory, artifact.manifest)
    return Artifact.open(directory)


def _no_unk(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """Words alone, and none that stands for others."""
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    words = ["the", "pump", "is", "warm", "again", "a"]
    vocabulary = special | {word: len(special) + place for place, word in enumerate(words)}
    return {**tokenizer, "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<no>"}}


def _panics(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """A regex that backtracks."""
    pattern = {"Regex": "(a|aa)+b"}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    steps = [split, tokenizer["pre_tokenizer"]]
    return {**tokenizer, "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}


def _never_returns(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """Regexes that take the cube of the text's length, one after the other."""
    replace = {"type": "Replace", "pattern": {"Regex": "qq*q*[^q]"}, "content": "q"}
    steps = [*[replace] * 1000, tokenizer["normalizer"]]
    return {**tokenizer, "normalizer": {"type": "Sequence", "normalizers": steps}}


_KINDS = {"no_unk": _no_unk, "panics": _panics, "never_returns": _never_returns}

"""Inputs of the text models: the tokens of English sentences, and full rows for speed.

    text_feeds(artifact, (8, 128))["attention_mask"].sum(1)    # 128, 119, …

The sentences are those of docstrings of Python's standard library, which every machine has.
"""

from __future__ import annotations

import ast
import random
import re
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from enginery.core.artifact.artifact import Artifact
from enginery.core.errors import InputError
from enginery.core.model.feeds import FeedLimits, Feeds, make_feeds
from enginery.runtime.text.tokenizer import TextTokenizer

_MODULES = ("argparse", "datetime", "difflib", "logging/__init__", "statistics", "subprocess")


@cache
def sentences() -> tuple[str, ...]:
    """Return some hundred sentences of 12 to 150 characters, each once."""
    found: dict[str, None] = {}
    for module in _MODULES:
        file = Path(sysconfig.get_paths()["stdlib"]) / f"{module}.py"
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                text = re.sub(r"\s+", " ", ast.get_docstring(node) or "")
                pieces = re.split(r"(?<=[.!?])\s+", text)
                found |= dict.fromkeys(piece for piece in pieces if 12 < len(piece) < 150)
    return tuple(found)


def joined_sentences(count: int, *, words: int, spread: float = 0.75, seed: int = 0) -> list[str]:
    """Return texts of one or more sentences, the same with the same version of Python.

    Args:
        count: number of texts.
        words: number of words on average; BERT's tokenizer makes 1.65 tokens of one.
        spread: the number of words differs by up to this share of the average.
        seed: seed of the choice.
    """
    chosen = random.Random(seed)
    known = sentences()
    texts = []
    for _ in range(count):
        wanted = chosen.uniform(1 - spread, 1 + spread) * words
        text: list[str] = []
        while len(text) < wanted:
            text += known[chosen.randrange(len(known))].split()
        texts.append(" ".join(text[: max(int(wanted), 3)]))
    return texts


def text_feeds(artifact: Artifact, point: tuple[int, int], *, first: int = 0) -> Feeds:
    """Return tokens of real sentences; every row but the first is shorter, and padded.

    Args:
        artifact: a text model with BERT's tokenizer.
        point: batch and sequence.
        first: index of the first sentence.

    Raises:
        ArtifactError: it has no tokenizer.
    """
    batch, length = point
    tokenizer = TextTokenizer.open(artifact.path)
    texts = sentences()
    ids = np.zeros((batch, length), np.int64)
    mask = np.zeros_like(ids)
    for row in range(batch):
        wanted = length - row * (length // 2) // max(batch, 1)
        tokens: list[int] = []
        index = first + row
        while len(tokens) < wanted:
            (encoding,) = tokenizer.encode([texts[index % len(texts)]])
            tokens += encoding.ids if not tokens else encoding.ids[1:]
            index += 1
        ids[row, :wanted], mask[row, :wanted] = tokens[:wanted], 1
    made: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    inputs = artifact.manifest.graphs[0].inputs
    return {spec.name: made.get(spec.name, np.zeros_like(ids)) for spec in inputs}


def full_rows(artifact: Artifact, point: tuple[int, int]) -> Feeds:
    """Return random tokens without padding, which PyTorch and the graph treat differently.

    Raises:
        InputError: the graph has no inputs.
    """
    record = artifact.manifest.graphs[0]
    sizes = dict(zip(("batch", "sequence"), point, strict=True))
    found = make_feeds(record.inputs, sizes, FeedLimits.from_artifact(artifact), seed=3)
    if not found:
        raise InputError(f"{artifact.path} has no inputs.")
    return found

"""Tiny models of natural language inference, which judge a text and a hypothesis."""

import json

from tests.tiny import save_tiny

NAMES = {
    "last": {0: "contradiction", 1: "neutral", 2: "entailment"},
    "first": {0: "ENTAILMENT", 1: "neutral", 2: "contradiction"},
    "two": {0: "not_entailment", 1: "entailment"},
}
"""Where entailment is -> the labels of the model."""


def save_nli(kind, family, folder):
    """Save a model of a family, `bert` or `roberta`, whose labels are `NAMES[kind]`."""
    names = NAMES[kind]
    save_tiny(family, "text-classification", folder, num_labels=len(names))
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"id2label": names, "label2id": {name: index for index, name in names.items()}}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder

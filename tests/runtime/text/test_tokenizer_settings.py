"""Settings of tokenizers, in every file: the tokenizer is transformers', state for state.

More than 60 settings of 15 families. Beside the states, the ids of texts, of pairs and of questions
with their contexts are compared as `AutoTokenizer` gives them, without the package's comparison.
"""

import json
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from enginery.core.errors import ArtifactError, InputError
from enginery.core.json_file import json_bytes
from enginery.core.shapes import TensorSpec
from enginery.runtime.pytorch.tokenizer import load_tokenizer
from enginery.runtime.text.tokenizer import TextTokenizer
from enginery.runtime.text.tokenizer_comparison import compare_tokenizer
from tests import tiny
from tests.runtime.text import tokenizer_classes

FAMILIES = (
    "bert",
    "distilbert",
    "electra",
    "mpnet",
    "roberta",
    "modernbert",
    "gpt2",
    "llama",
    "qwen3",
    "gemma",
    "gpt_neox",
    "bloom",
    "bart",
    "t5",
    "opt",
)
OTHER_CLASSES = {
    "bert": ("FunnelTokenizer", "SplinterTokenizer", "LayoutLMv2Tokenizer", "MPNetTokenizer"),
    "llama": ("LlamaTokenizer", "GemmaTokenizer", "CohereTokenizer", "GPTNeoXTokenizerFast"),
    "gpt2": ("RobertaTokenizer", "BloomTokenizer", "Qwen2Tokenizer", "LayoutLMv3Tokenizer"),
    "t5": ("AlbertTokenizer", "XLNetTokenizer", "CamembertTokenizer", "CodeLlamaTokenizer"),
}
TOKEN = {"lstrip": False, "rstrip": False, "normalized": True, "single_word": False}
ROLES = ("unk_token", "pad_token", "cls_token", "sep_token", "mask_token", "bos_token", "eos_token")
SPECIAL_MAP = {
    "eos_token": "</e>",
    "additional_special_tokens": ["[NEW]", {"content": "warm", **TOKEN, "lstrip": True}],
}
CUT_LEFT = {"direction": "Left", "max_length": 11, "strategy": "LongestFirst", "stride": 0}
PADDED = {
    "strategy": "BatchLongest",
    "direction": "Left",
    "pad_to_multiple_of": 8,
    "pad_id": 1,
    "pad_type_id": 2,
    "pad_token": "warm",
}


@dataclass(frozen=True)
class Change:
    """A change of a tokenizer's files."""

    config: Mapping[str, Any] = field(default_factory=dict)
    """Keys of tokenizer_config.json."""
    remove: tuple[str, ...] = ()
    """Keys of tokenizer_config.json that are removed first."""
    files: Mapping[str, Any] = field(default_factory=dict)
    """Other files; None removes one."""
    edit: Callable[[dict[str, Any]], object] | None = None
    """Changes tokenizer.json."""


def _stored(**parts: Any) -> Callable[[dict[str, Any]], object]:
    return lambda document: document.update(parts)


def _split_digits(document: dict[str, Any]) -> None:
    digits = {"type": "Digits", "individual_digits": True}
    own = [document["pre_tokenizer"]] if document["pre_tokenizer"] else []
    document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, *own]}


def _add_token(**settings: Any) -> Callable[[dict[str, Any]], object]:
    def add(document: dict[str, Any]) -> None:
        token = {"id": 800, "content": "zzz", "special": False, **TOKEN, **settings}
        document["added_tokens"].append(token)

    return add


def _space_in_json(document: dict[str, Any]) -> None:
    part = document["pre_tokenizer"] or {}
    if "add_prefix_space" in part:
        part["add_prefix_space"] = not part["add_prefix_space"]
    if "prepend_scheme" in part:
        part["prepend_scheme"] = "never"


def _nothing_special(document: dict[str, Any]) -> None:
    for token in document["added_tokens"]:
        token["special"] = False


SETTINGS = {
    # Keys of tokenizer_config.json
    "own": Change(),
    "cased": Change({"do_lower_case": False}),
    "lower case": Change({"do_lower_case": True}),
    "accents": Change({"strip_accents": False}),
    "no accents": Change({"strip_accents": True}),
    "Chinese": Change({"tokenize_chinese_chars": False}),
    "space": Change({"add_prefix_space": True}),
    "no space": Change({"add_prefix_space": False}),
    "bos": Change({"add_bos_token": True}),
    "no bos": Change({"add_bos_token": False}),
    "eos": Change({"add_eos_token": True}),
    "bos and eos": Change({"add_bos_token": True, "add_eos_token": True}),
    "offsets": Change({"trim_offsets": False}),
    "no padding token": Change({"pad_token": None}),
    "padding left": Change({"padding_side": "left"}),
    "truncation left": Change({"truncation_side": "left"}),
    "all left, short": Change(
        {"padding_side": "left", "truncation_side": "left", "model_max_length": 9}
    ),
    "padding type": Change({"pad_token_type_id": 1}),
    "more tokens": Change({"additional_special_tokens": ["[NEW]", "engine"]}),
    "extra tokens": Change({"extra_special_tokens": {"image_token": "<image>"}}),
    "split tokens": Change({"split_special_tokens": True}),
    "short": Change({"model_max_length": 9}),
    "no limit": Change({"model_max_length": 1_000_000_000_000_000_019_884_624_838_656}),
    "limit's old name": Change({"max_len": 13}, ("model_max_length",)),
    "clean up": Change({"clean_up_tokenization_spaces": True}),
    "spaces between": Change({"spaces_between_special_tokens": False}),
    "generic": Change({"tokenizer_class": "PreTrainedTokenizerFast"}),
    "generic, cased": Change(
        {"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": False}
    ),
    "generic, eos": Change({"tokenizer_class": "PreTrainedTokenizerFast", "add_eos_token": True}),
    "generic, space": Change(
        {"tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": True}
    ),
    "no types": Change({"model_input_names": ["input_ids", "attention_mask"]}),
    "types": Change({"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}),
    "unknown": Change({"unk_token": "warm"}),
    "end pads": Change({"pad_token": "[SEP]"}),
    "a word pads": Change({"pad_token": "engine"}),
    "new padding": Change({"pad_token": "[NEWPAD]"}),
    "new mask": Change({"mask_token": {"__type": "AddedToken", "content": "[M]", **TOKEN}}),
    "mask with flags": Change(
        {"mask_token": {"__type": "AddedToken", "content": "engine", "lstrip": True}},
        ("added_tokens_decoder",),
    ),
    "end with flags": Change(
        {"eos_token": {"__type": "AddedToken", "content": "warm", "rstrip": True}}
    ),
    "never split": Change({"never_split": ["engine"], "do_basic_tokenize": False}),
    "legacy": Change({"legacy": True}),
    "not legacy": Change({"legacy": False}),
    "added token": Change({"added_tokens_decoder": {"700": {"content": "zzz", **TOKEN}}}),
    "few flags": Change({"added_tokens_decoder": {"700": {"content": "Zzz"}}}),
    "added word": Change(
        {"added_tokens_decoder": {"20": {"content": "warm", **TOKEN, "rstrip": True}}}
    ),
    # Other files
    "no class": Change(remove=("tokenizer_class",)),
    "no class, cased": Change({"do_lower_case": False}, ("tokenizer_class",)),
    "no special map": Change(files={"special_tokens_map.json": None}),
    "no decoder of tokens": Change(remove=("added_tokens_decoder",)),
    "special map alone": Change(
        remove=("added_tokens_decoder",), files={"special_tokens_map.json": SPECIAL_MAP}
    ),
    "special map": Change(files={"special_tokens_map.json": SPECIAL_MAP}),
    "old file of tokens": Change(
        remove=("added_tokens_decoder",), files={"added_tokens.json": {"qqq": 900}}
    ),
    "no roles": Change(remove=("added_tokens_decoder", *ROLES)),
    # tokenizer.json
    "stored sides": Change(
        remove=("padding_side", "truncation_side", "pad_token"),
        edit=_stored(truncation=CUT_LEFT, padding=PADDED),
    ),
    "no normalizer": Change(edit=_stored(normalizer=None)),
    "stored lower case": Change(edit=_stored(normalizer={"type": "Lowercase"})),
    "no post-processor": Change(edit=_stored(post_processor=None)),
    "digits": Change(edit=_split_digits),
    "stored space": Change(remove=("add_prefix_space",), edit=_space_in_json),
    "stored token": Change(edit=_add_token(lstrip=True)),
    "stored single word": Change(edit=_add_token(single_word=True, normalized=False)),
    "stored special token": Change(edit=_add_token(special=True, rstrip=True)),
    "nothing special": Change(edit=_nothing_special),
}
TEXTS = (
    "The Engine STARTS é naïve.",
    " leading space and  two",
    "东京 is 高い",
    "a [NEW] b <x> [SEP] </s> c warm zzz, zzzy engine qqq",
    "word " * 40,
    "😀 family 👩‍👩‍👧 2026",
    "",
)
PAIRS = (("The Engine", "is warm"), ("é " * 30, "a b"), ("a", "zzz " * 40))


@pytest.fixture(scope="module")
def save(tmp_path_factory):
    """Saves a family's tokenizer with settings; keys without a value are removed."""
    sources = {}

    def save(family, config=None, **parts):
        change = Change(config or {}, **parts) if not isinstance(config, Change) else config
        if family not in sources:
            source = tmp_path_factory.mktemp(family)
            settings = tiny._save_tokenizer(family, source)
            document = {"model_type": family, "max_position_embeddings": 128, **settings}
            (source / "config.json").write_bytes(json_bytes(document))
            sources[family] = source
        directory = tmp_path_factory.mktemp("edited") / family
        shutil.copytree(sources[family], directory)
        file = directory / "tokenizer_config.json"
        document = json.loads(file.read_text())
        kept = {key: value for key, value in document.items() if key not in change.remove}
        file.write_bytes(json_bytes({**kept, **change.config}))
        for name, content in change.files.items():
            if content is None:
                (directory / name).unlink(missing_ok=True)
            else:
                (directory / name).write_bytes(json_bytes(content))
        if change.edit is not None:
            stored = json.loads((directory / "tokenizer.json").read_text())
            change.edit(stored)
            (directory / "tokenizer.json").write_bytes(json_bytes(stored))
        return directory

    return save


def compare(directory):
    """Return `equal`, `refused`, or `rejected` if transformers cannot load the tokenizer."""
    from enginery.runtime.pytorch.tokenizer import describe_tokenizer, load_reference_tokenizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            reference = load_reference_tokenizer(directory, trust_remote_code=False)
        except InputError:  # its own class has no such token, or needs another file
            return "rejected"
        try:
            tokenizer = TextTokenizer.open(directory)
        except ArtifactError:
            return "refused"
        if "LayoutLM" not in type(reference).__name__:  # these take words in place of texts
            assert_same_ids(tokenizer, reference)
        expected = describe_tokenizer(reference, limit=tokenizer.limit)
    differences = compare_tokenizer(directory, tokenizer, expected)
    assert (differences.problem, differences.state) == ("", [])
    return "equal"


def assert_same_ids(tokenizer, reference):
    """Compare what a model gets of texts and pairs, each alone and all in a batch."""
    longest = min(tokenizer.limit, reference.model_max_length)
    names = ("input_ids", "attention_mask", "token_type_ids")
    inputs = [TensorSpec(name, "int64", ("batch", "sequence")) for name in names]
    # transformers makes no row of an empty text without special tokens.
    texts = [text for text in TEXTS if text or reference(text).input_ids]
    can_pad = reference.pad_token_id is not None
    for items in (texts, list(PAIRS)):
        for group in [*([item] for item in items), *([items] if can_pad else [])]:
            columns = zip(*group, strict=True) if isinstance(group[0], tuple) else [group]
            expected = reference(
                *map(list, columns),
                truncation=True,
                max_length=longest,
                padding=len(group) > 1,
                return_tensors="np",
            )
            feeds = tokenizer.feeds(tokenizer.encode(group), inputs)
            real = np.ones_like(feeds["input_ids"], bool)
            if "attention_mask" in expected:
                real = expected["attention_mask"] == 1
            assert set(feeds["input_ids"][~real].flatten()) <= {tokenizer.pad_id}
            for name, values in expected.items():
                # What is padded with is config.json's id, where it has one.
                places = real if name == "input_ids" else ...
                np.testing.assert_array_equal(
                    feeds[name][places], values[places], f"{name} of {group}"
                )
    assert_same_windows(tokenizer, reference)


def assert_same_windows(tokenizer, reference):
    """Compare the windows of a context with those of the pipeline for question answering."""
    length = min(tokenizer.limit, reference.model_max_length, 384)
    if length < 16:  # a window has to be longer than its overlap and the special tokens
        return
    question, context = "The", "naïve word zzz " * 9
    is_left = reference.padding_side == "left"
    expected = reference(
        *(([context], [question]) if is_left else ([question], [context])),
        truncation="only_first" if is_left else "only_second",
        max_length=length,
        stride=min(length // 2, 128),
        return_overflowing_tokens=True,
    )["input_ids"]
    (first,) = tokenizer.encode_pairs([(question, context)])
    assert [first.ids, *(window.ids for window in first.overflowing)] == expected


@pytest.mark.parametrize("family", tiny.with_more(FAMILIES, "bert", "roberta", "gpt2", "llama"))
def test_each_setting_gives_the_ids_of_transformers(save, family):
    verdicts = {}
    for name, change in SETTINGS.items():
        try:
            verdicts[name] = compare(save(family, change))
        except AssertionError as error:
            verdicts[name] = f"DIFFERENT {error}"
    counts = Counter(verdicts.values())
    others = {name: verdict for name, verdict in verdicts.items() if verdict != "equal"}
    print(family, dict(counts), others)  # noqa: T201 the table is for the reader of `-rP`
    assert not [name for name, verdict in others.items() if "DIFFERENT" in verdict], others
    assert counts["equal"] >= len(SETTINGS) - 6, others


def test_there_are_many_settings():
    assert len(SETTINGS) >= 60


@pytest.mark.more
@pytest.mark.parametrize("family", OTHER_CLASSES)
def test_a_vocabulary_of_another_class_is_transformers(save, family):
    for name in OTHER_CLASSES[family]:
        for settings in ({}, {"do_lower_case": False}, {"add_prefix_space": True}):
            assert compare(save(family, {"tokenizer_class": name, **settings})) in (
                "equal",
                "rejected",
            )


def test_a_class_that_needs_another_library_is_refused(save):
    directory = save("bert", {"tokenizer_class": "RoFormerTokenizer"})
    with pytest.raises(ArtifactError, match=r"RoFormerTokenizer finds the words .* package rjieba"):
        TextTokenizer.open(directory)


def test_a_setting_with_which_transformers_makes_another_file_is_refused(save):
    directory = save("t5", {"add_prefix_space": False})
    with pytest.raises(ArtifactError, match="sets add_prefix_space to false, with which"):
        TextTokenizer.open(directory)


def test_of_an_unknown_class_tokenizer_json_says_everything(save):
    document = json.loads((save("roberta", {}) / "tokenizer.json").read_text())
    document["pre_tokenizer"]["add_prefix_space"] = True
    files = {"tokenizer.json": document}
    settings = {"tokenizer_class": "TokenizersBackend"}
    directory = save("roberta", settings, remove=["add_prefix_space"], files=files)
    first = TextTokenizer.open(directory).encode(["warm"])[0].tokens[1]
    assert first.startswith("Ġ")


def test_transformers_5s_own_class_is_read_by_version_4_and_sends_no_types(save):
    """Version 5 saves generic tokenizers under a name that version 4 does not know."""
    directory = save("bert", {"tokenizer_class": "TokenizersBackend"}, remove=["model_input_names"])
    reference = load_tokenizer(directory, local_files_only=True)
    assert set(reference("warm", "cold")) == {"input_ids", "attention_mask"}
    tokenizer = TextTokenizer.open(directory)
    assert tokenizer.encode(["warm cold"])[0].ids == reference("warm cold").input_ids
    assert not tokenizer.sends_types


def test_a_token_that_a_setting_needs_is_named(save):
    settings = {"tokenizer_class": "LlamaTokenizer", "add_eos_token": True, "eos_token": None}
    with pytest.raises(ArtifactError, match="add_eos_token is true, but the tokenizer has no"):
        TextTokenizer.open(save("gpt2", settings))


def test_classes_are_those_of_the_installed_transformers():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert tokenizer_classes.FILE.read_text("utf-8") == tokenizer_classes.write_document()

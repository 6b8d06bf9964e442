"""Settings of tokenizers, in every file: the tokenizer is transformers', state for state."""

import json
import shutil
import warnings

import pytest

from enginery.core.errors import ArtifactError
from enginery.core.json_file import json_bytes
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
SETTINGS = {
    "own": {},
    "cased": {"do_lower_case": False},
    "lower case": {"do_lower_case": True},
    "accents": {"strip_accents": False},
    "Chinese": {"tokenize_chinese_chars": False},
    "space": {"add_prefix_space": True},
    "no space": {"add_prefix_space": False},
    "bos": {"add_bos_token": True},
    "no bos": {"add_bos_token": False},
    "eos": {"add_eos_token": True},
    "offsets": {"trim_offsets": False},
    "no padding token": {"pad_token": None},
    "padding left": {"padding_side": "left"},
    "truncation left": {"truncation_side": "left"},
    "padding type": {"pad_token_type_id": 1},
    "more tokens": {"additional_special_tokens": ["[NEW]", "engine"]},
    "extra tokens": {"extra_special_tokens": {"image_token": "<image>"}},
    "split tokens": {"split_special_tokens": True},
    "short": {"model_max_length": 9},
    "clean up": {"clean_up_tokenization_spaces": True},
    "generic": {"tokenizer_class": "PreTrainedTokenizerFast"},
    "unknown": {"unk_token": "warm"},
    "added token": {"added_tokens_decoder": {"700": {"content": "zzz", **TOKEN}}},
    "added word": {"added_tokens_decoder": {"20": {"content": "warm", **TOKEN, "rstrip": True}}},
}
SPECIAL_MAP = {
    "eos_token": "</e>",
    "additional_special_tokens": ["[NEW]", {"content": "warm", **TOKEN, "lstrip": True}],
}


@pytest.fixture(scope="module")
def save(tmp_path_factory):
    """Saves a family's tokenizer with settings; keys without a value are removed."""
    sources = {}

    def save(family, settings, *, remove=(), files=()):
        if family not in sources:
            source = tmp_path_factory.mktemp(family)
            config = tiny._save_tokenizer(family, source)
            document = {"model_type": family, "max_position_embeddings": 128, **config}
            (source / "config.json").write_bytes(json_bytes(document))
            sources[family] = source
        directory = tmp_path_factory.mktemp("edited") / family
        shutil.copytree(sources[family], directory)
        file = directory / "tokenizer_config.json"
        document = json.loads(file.read_text()) | settings
        for key in remove:
            document.pop(key, None)
        file.write_bytes(json_bytes(document))
        for name, content in dict(files).items():
            if content is None:
                (directory / name).unlink(missing_ok=True)
            else:
                (directory / name).write_bytes(json_bytes(content))
        return directory

    return save


def assert_equal(directory):
    from enginery.core.errors import InputError
    from enginery.runtime.torch_tokenizer import describe_tokenizer, load_reference_tokenizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            reference = load_reference_tokenizer(directory, trust_remote_code=False)
        except InputError:  # transformers' own class has no such token, or needs another file
            return False
        tokenizer = TextTokenizer.open(directory)
        expected = describe_tokenizer(reference, limit=tokenizer.limit)
    differences = compare_tokenizer(directory, tokenizer, expected)
    assert (differences.problem, differences.state) == ("", [])
    return True


@pytest.mark.parametrize("family", tiny.with_more(FAMILIES, "bert", "roberta", "gpt2", "llama"))
def test_each_setting_of_tokenizer_config_is_transformers(save, family):
    equal = [name for name, settings in SETTINGS.items() if assert_equal(save(family, settings))]
    assert len(equal) >= len(SETTINGS) - 4


@pytest.mark.parametrize("family", tiny.with_more(FAMILIES, "bert", "gpt2"))
def test_tokens_and_classes_of_other_files_are_transformers(save, family):
    roles = [role for role in tiny_roles() if role != "additional_special_tokens"]
    decoder = "added_tokens_decoder"
    stored = json.loads((save(family, {}) / "tokenizer.json").read_text())
    stored["truncation"] = {
        "direction": "Left",
        "max_length": 11,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    stored["padding"] = {
        "strategy": "BatchLongest",
        "direction": "Left",
        "pad_to_multiple_of": 8,
        "pad_id": 1,
        "pad_type_id": 2,
        "pad_token": "warm",
    }
    sides = ("padding_side", "truncation_side", "pad_token")
    special_map = {"special_tokens_map.json": SPECIAL_MAP}
    equal = [
        assert_equal(save(family, {}, remove=["tokenizer_class"])),
        assert_equal(save(family, {}, files={"special_tokens_map.json": None})),
        assert_equal(save(family, {}, remove=[decoder])),
        assert_equal(save(family, {}, remove=[decoder], files=special_map)),
        assert_equal(save(family, {}, files=special_map)),
        assert_equal(save(family, {}, remove=[decoder], files={"added_tokens.json": {"qqq": 900}})),
        assert_equal(save(family, {}, remove=sides, files={"tokenizer.json": stored})),
        assert_equal(save(family, {"max_len": 13}, remove=["model_max_length"])),
        family == "bart" or assert_equal(save(family, {}, remove=[decoder, *roles])),
    ]
    assert sum(equal) >= len(equal) - 2


@pytest.mark.parametrize("family", OTHER_CLASSES)
def test_a_vocabulary_of_another_class_is_transformers(save, family):
    for name in OTHER_CLASSES[family]:
        for settings in ({}, {"do_lower_case": False}, {"add_prefix_space": True}):
            assert_equal(save(family, {"tokenizer_class": name, **settings}))


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


def test_a_token_that_a_setting_needs_is_named(save):
    settings = {"tokenizer_class": "LlamaTokenizer", "add_eos_token": True, "eos_token": None}
    with pytest.raises(ArtifactError, match="add_eos_token is true, but the tokenizer has no"):
        TextTokenizer.open(save("gpt2", settings))


def test_classes_are_those_of_the_installed_transformers():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert tokenizer_classes.FILE.read_text("utf-8") == tokenizer_classes.write_document()


def tiny_roles():
    from transformers import SpecialTokensMixin

    return SpecialTokensMixin.SPECIAL_TOKENS_ATTRIBUTES

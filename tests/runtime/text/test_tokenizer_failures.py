"""What a tokenizer raises, and its panics, become errors that say which text it was."""

from __future__ import annotations

import json
import shutil

import pytest

from enginery.core.artifact.artifact import commit_artifact
from enginery.core.errors import ArtifactError, InputError
from enginery.runtime.model import load_model
from enginery.runtime.text.tokenizer import TextTokenizer
from tests.hostile_tokenizers import PANIC, UNKNOWN, spoil, spoiled_copy
from tests.tiny import save_tiny

FAILURES = pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [("no_unk", UNKNOWN, "Missing"), ("panics", PANIC, "retry-limit-in-match over")],
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return save_tiny("bert", "feature-extraction", tmp_path_factory.mktemp("plain") / "bert")


@pytest.fixture
def opened(plain, tmp_path):
    """`opened("panics")`: a tokenizer of that kind."""

    def open_it(kind):
        directory = shutil.copytree(plain, tmp_path / kind)
        spoil(directory, kind)
        return TextTokenizer.open(directory)

    return open_it


@pytest.mark.more
@FAILURES
@pytest.mark.parametrize("offsets", [True, False])
def test_text_that_cannot_be_tokenized_is_named_by_its_index(opened, kind, text, reason, offsets):
    tokenizer = opened(kind)
    with pytest.raises(InputError, match=f"^text 0 cannot be tokenized: .*{reason}"):
        tokenizer.encode([text], offsets=offsets)
    with pytest.raises(InputError, match=f"^text 2 cannot be tokenized: .*{reason}"):
        tokenizer.encode(["the pump", "is warm", text, "again"], offsets=offsets)
    with pytest.raises(InputError, match=f"^text 1 cannot be tokenized: .*{reason}"):
        tokenizer.encode(["the pump", ("is warm", text)], offsets=offsets)
    with pytest.raises(InputError, match=f"^text 1 cannot be tokenized: .*{reason}"):
        tokenizer.encode_untruncated(["the pump", text], special=True)
    # Nothing is left of it.
    (encoding,) = tokenizer.encode(["the pump"], offsets=offsets)
    assert len(encoding.ids) == 4


@FAILURES
def test_question_or_context_that_cannot_be_tokenized_is_named(opened, kind, text, reason):
    tokenizer = opened(kind)
    with pytest.raises(InputError, match=f"^question 1 cannot be tokenized: .*{reason}"):
        tokenizer.encode_pairs([("the pump", "is warm"), (text, "is warm")])
    with pytest.raises(InputError, match=f"^context 0 cannot be tokenized: .*{reason}"):
        tokenizer.encode_pairs([("the pump", text)])


def test_question_that_leaves_less_than_the_overlap_of_windows_is_too_long(plain, tmp_path):
    directory = shutil.copytree(plain, tmp_path / "short")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 20}))
    tokenizer = TextTokenizer.open(directory)
    question = "the pump is warm again the pump is warm"  # 9 tokens of 20, and 3 special ones
    with pytest.raises(InputError, match=r"^question 1 is too long: in windows of 20 tokens"):
        tokenizer.encode_pairs([("the pump", "is warm"), (question, "the pump " * 30)])


def test_interrupt_while_encoding_is_no_error_of_the_text(opened, monkeypatch):
    tokenizer = opened("no_unk")

    def interrupted(_self, _texts):
        raise KeyboardInterrupt

    monkeypatch.setattr("enginery.runtime.text.tokenizer.FastEncoder.encode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode(["the pump"], offsets=False)


def test_token_ids_are_rejected_where_no_text_shows_the_special_tokens(plain, tmp_path):
    directory = shutil.copytree(plain, tmp_path / "no-a")
    spoil(directory, "no_unk")
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    del tokenizer["model"]["vocab"]["a"]
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(InputError, match=r"token ids cannot be used: .*the text 'a'.*Missing"):
        TextTokenizer.open(directory).encode_ids([5, 6])


def test_ids_that_cannot_be_decoded_are_an_input_error(plain, tmp_path):
    directory = shutil.copytree(plain, tmp_path / "decoder")
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    split = {"type": "Replace", "pattern": {"Regex": "(p|pp)+b"}, "content": ""}
    tokenizer["decoder"] = {"type": "Sequence", "decoders": [{"type": "Fuse"}, split]}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    opened = TextTokenizer.open(directory)
    p = opened.backend.token_to_id("p")
    assert opened.decode([p], skip_special=True) == "p"
    with pytest.raises(InputError, match=r"token ids cannot be decoded: .*retry-limit"):
        opened.decode([p] * 60, skip_special=True)


def test_tokenizer_that_panics_when_it_is_opened_is_named(plain, tmp_path):
    directory = shutil.copytree(plain, tmp_path / "opened")
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    # Added tokens go through the normalizer when the file is read.
    pattern = {"Regex": "(a|aa)+b"}
    tokenizer["normalizer"] = {"type": "Replace", "pattern": pattern, "content": ""}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False)
    added = {"id": 600, "content": PANIC, "normalized": True, **flags}
    tokenizer["added_tokens"].append(added)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ArtifactError, match=r"opened/tokenizer\.json cannot be read .*retry-limit"):
        TextTokenizer.open(directory)


def test_settings_that_the_tokenizer_does_not_take_are_an_artifact_error(plain, tmp_path):
    directory = shutil.copytree(plain, tmp_path / "settings")
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"truncation_side": "middle"}))
    with pytest.raises(ArtifactError, match=r"truncation_side is 'middle'"):
        TextTokenizer.open(directory)


def test_prompt_that_cannot_be_tokenized_is_named(tiny, tmp_path):
    artifact = tiny.artifact("bert", "feature-extraction")
    directory = spoiled_copy(artifact, tmp_path / "prompt", "no_unk").path
    prompts = {"prompts": {"query": f"{UNKNOWN} "}}
    (directory / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    commit_artifact(directory, artifact.manifest)
    with (
        load_model(directory) as model,
        pytest.raises(InputError, match=r"^prompt 'query' cannot be tokenized"),
    ):
        model.embed(["the pump"], prompt_name="query")

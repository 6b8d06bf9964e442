"""tokenizer.json of models that have only slow tokenizers equals transformers' slow tokenizer."""

import json
import random
import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from enginery import export_model
from enginery.core.errors import ArtifactError, MissingPackageError, SourceError
from enginery.export import tokenizer as module
from enginery.export.side_files import copy_side_files
from enginery.export.tokenizer import write_tokenizer
from enginery.runtime.pytorch.tokenizer import describe_tokenizer, load_reference_tokenizer
from enginery.runtime.text.tokenizer import TextTokenizer
from enginery.runtime.text.tokenizer_comparison import compare_tokenizer
from enginery.runtime.text.tokenizer_files import TokenizerFiles
from tests import tiny
from tests.translation import HOSTILE, TEXTS, docstrings, pieces

pytest.importorskip("sentencepiece")

BUILT = ["marian", "m2m100", "m2m100-bpe"]
CONVERTED = ["t5", "pegasus", "mbart", "mbart50", "nllb"]


def slow(directory):
    return AutoTokenizer.from_pretrained(directory, use_fast=False)


def differing(directory, texts, *, strip=False):
    """The texts whose ids or decoded texts are not those of the slow tokenizer."""
    wanted, found = slow(directory), TextTokenizer.open(directory)
    ends = str.strip if strip else str
    return [
        text
        for text, encoding in zip(texts, found.encode_source(texts), strict=True)
        if (ids := wanted(text).input_ids) != encoding.ids
        or ends(wanted.decode(ids, skip_special_tokens=True))
        != ends(found.decode(ids, skip_special=True))
    ]


@pytest.mark.more
@pytest.mark.parametrize("kind", BUILT)
@pytest.mark.parametrize("name", ["texts", *HOSTILE])
def test_marian_and_m2m100_equal_the_slow_tokenizer(written_tokenizer, kind, name):
    texts = TEXTS + docstrings()[:200] if name == "texts" else HOSTILE[name]
    assert differing(written_tokenizer(kind), texts) == []


@pytest.mark.parametrize("kind", BUILT)
def test_any_ids_are_decoded_as_by_the_slow_tokenizer(written_tokenizer, kind):
    wanted, found = slow(written_tokenizer(kind)), TextTokenizer.open(written_tokenizer(kind))
    chosen = random.Random(0)
    for _ in range(500):
        ids = chosen.choices(range(len(wanted)), k=chosen.randint(0, 12))
        text = wanted.decode(ids, skip_special_tokens=True)
        assert found.decode(ids, skip_special=True) == text


# transformers' own conversions differ for these: they lose marks of decomposed letters and find
# special tokens in normalized text, T5's slow tokenizer adds no second end token, and Pegasus' fast
# one splits at U+0085.
CONVERTED_ALIKE = HOSTILE.keys() - {"decomposed", "marks", "special", "normalized"}


@pytest.mark.more
@pytest.mark.parametrize("kind", CONVERTED)
def test_converted_tokenizers_equal_the_slow_tokenizer(written_tokenizer, kind):
    texts = TEXTS + docstrings()[:200]
    texts += [text for name in sorted(CONVERTED_ALIKE) for text in HOSTILE[name]]
    texts = [text for text in texts if "\x85" not in text]
    # They leave spaces at the ends of texts where unknown tokens were.
    assert differing(written_tokenizer(kind), texts, strip=True) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*BUILT, *CONVERTED])
def test_thousands_of_texts_equal_the_slow_tokenizer(written_tokenizer, kind):
    chosen = random.Random(1)
    words = [word for text in docstrings() + TEXTS for word in text.split()]
    texts = docstrings() + [" ".join(chosen.choices(words, k=12)) for _ in range(1500)]
    assert differing(written_tokenizer(kind), texts, strip=True) == []


@pytest.mark.parametrize("kind", [*BUILT, *CONVERTED])
def test_transformers_reads_the_written_directory_as_the_model(
    slow_tokenizer, written_tokenizer, kind
):
    wanted, found = slow(slow_tokenizer(kind)), slow(written_tokenizer(kind))
    texts = [*TEXTS, *HOSTILE["special"], *HOSTILE["codes"]]
    assert [found(text).input_ids for text in texts] == [wanted(text).input_ids for text in texts]


def test_special_tokens_that_no_file_names_are_written(written_tokenizer):
    tokenizer = TextTokenizer.open(written_tokenizer("marian"))
    vocabulary = json.loads((written_tokenizer("marian") / "vocab.json").read_text())
    assert (tokenizer.pad_id, tokenizer.unk_id) == (vocabulary["<pad>"], vocabulary["<unk>"])


def edited(source, tmp_path, **files):
    """A copy of a directory with other contents of files; None removes one."""
    directory = shutil.copytree(source, tmp_path / "model")
    for name, content in files.items():
        path = directory / name.replace("_spm", ".spm").replace("_json", ".json")
        path.unlink() if content is None else path.write_bytes(content)
    return directory


def write(source, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    copy_side_files(source, out, code=False)
    return write_tokenizer(source, out, trust_remote_code=False), out


@pytest.mark.parametrize("content", [b"", b"no model", b"\x0a\x05\x0a\x03abc" * 9])
def test_damaged_sentencepiece_model_is_an_error(slow_tokenizer, tmp_path, content):
    source = edited(slow_tokenizer("marian"), tmp_path, target_spm=content)
    with pytest.raises(SourceError, match=r"target\.spm is not a sentencepiece model"):
        write(source, tmp_path)
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_sentencepiece_model_with_bytes_that_are_no_text_is_an_error(slow_tokenizer, tmp_path):
    whole = (slow_tokenizer("marian") / "source.spm").read_bytes()
    damaged = whole.replace("▁the".encode(), b"\xff\xfe\xfd" + b"the", 1)
    source = edited(slow_tokenizer("marian"), tmp_path, source_spm=damaged)
    with pytest.raises(SourceError, match=r"source\.spm is not a sentencepiece model"):
        write(source, tmp_path)


def test_truncated_sentencepiece_model_is_an_error(slow_tokenizer, tmp_path):
    whole = (slow_tokenizer("marian") / "source.spm").read_bytes()
    source = edited(slow_tokenizer("marian"), tmp_path, source_spm=whole[: len(whole) // 2])
    with pytest.raises(SourceError, match=r"source\.spm is not a sentencepiece model"):
        write(source, tmp_path)


def test_missing_sentencepiece_is_named(slow_tokenizer, tmp_path, monkeypatch):
    directory = slow_tokenizer("marian")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(MissingPackageError, match=r"sentencepiece.*enginery\[export\]"):
        write(directory, tmp_path)


def test_tokenizer_that_would_differ_is_not_written(slow_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_BUILDERS", {"MarianTokenizer": _with_other_spaces})
    notes, out = write(slow_tokenizer("marian"), tmp_path)
    (note,) = notes
    assert note.startswith("no tokenizer.json: it would differ from MarianTokenizer for '")
    assert not (out / "tokenizer.json").exists()
    with pytest.raises(ArtifactError, match=r"has no tokenizer\.json"):
        TextTokenizer.open(out)


class SlowByLetter:
    """A slow tokenizer of a class without a builder: a letter is a token, `?` is unknown."""

    is_fast, unk_token_id = False, 0

    def __call__(self, text):
        return SimpleNamespace(input_ids=[0 if letter == "?" else ord(letter) for letter in text])


class FastByLetter:
    """The fast one, which differs on some texts."""

    def __init__(self, differs):
        self._differs = differs

    def encode_source(self, texts):
        slow = SlowByLetter()
        extra = {True: [1], False: []}
        return [SimpleNamespace(ids=slow(t).input_ids + extra[self._differs(t)]) for t in texts]


def test_a_fast_tokenizer_of_transformers_may_differ_on_unusual_texts_alone():
    (note,) = module._compare(SlowByLetter(), FastByLetter(lambda text: "  Two  spaces" in text))
    assert note.startswith("tokenizer.json: transformers' fast tokenizer differs")
    with pytest.raises(module.UnsupportedTokenizerError, match="it would differ from SlowByLetter"):
        module._compare(SlowByLetter(), FastByLetter(lambda text: text == module.TEXTS[0]))


def _with_other_spaces(wanted):
    from enginery.export.sentencepiece_tokenizers import marian_tokenizer

    tokenizer = Tokenizer.from_str(marian_tokenizer(wanted).to_str())
    tokenizer.normalizer = None
    return tokenizer


def test_pieces_that_vocab_json_lacks_are_noted_and_have_no_ids(slow_tokenizer, tmp_path):
    source = edited(slow_tokenizer("marian"), tmp_path)
    vocabulary = json.loads((source / "vocab.json").read_text())
    rare = [p for p in pieces(source / "source.spm") if p.startswith("▁") and len(p) > 6][-3:]
    kept = [token for token in vocabulary if token not in rare]
    (source / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(kept)}))
    notes, out = write(source, tmp_path)
    (note,) = notes
    assert "3 pieces of the sentencepiece model are not in vocab.json" in note
    tokenizer = TextTokenizer.open(out)
    (encoding,) = tokenizer.encode_source([" ".join(rare).replace("▁", "")])
    assert tokenizer.unk_id not in encoding.ids
    assert max(encoding.ids) < len(kept)


@pytest.mark.parametrize(
    ("vocabulary", "reason"),
    [
        (lambda v: {t: i + 1 for t, i in v.items()}, "are not 0, 1, 2"),
        (lambda v: {**v, "again": 5}, "are not 0, 1, 2"),
        (lambda v: {**v, ">>a b<<": len(v)}, "language code '>>a b<<'"),
        (lambda v: [], "no tokenizer.json"),
    ],
)
def test_unusual_vocabulary_is_noted(slow_tokenizer, tmp_path, vocabulary, reason):
    source = edited(slow_tokenizer("marian"), tmp_path)
    changed = vocabulary(json.loads((source / "vocab.json").read_text()))
    (source / "vocab.json").write_text(json.dumps(changed))
    notes, out = write(source, tmp_path)
    assert reason in notes[0]
    assert not (out / "tokenizer.json").exists()


def test_model_without_tokenizer_files_is_left_alone(tmp_path):
    (tmp_path / "model").mkdir()
    assert write(tmp_path / "model", tmp_path)[0] == []


def test_own_tokenizer_json_is_kept(slow_tokenizer, tmp_path):
    source = edited(slow_tokenizer("marian"), tmp_path, tokenizer_json=b"{}", source_spm=b"damaged")
    notes, out = write(source, tmp_path)
    assert (out / "tokenizer.json").read_bytes() == b"{}"
    assert [note.partition(":")[0] for note in notes] == ["tokenizer.json was not compared"]


@pytest.fixture(scope="module")
def marian_model(slow_tokenizer, tmp_path_factory):
    """A tiny Marian model, as published: weights, sentencepiece models and vocab.json."""
    from transformers import MarianConfig, MarianMTModel

    directory = tmp_path_factory.mktemp("marian") / "model"
    shutil.copytree(slow_tokenizer("marian"), directory)
    size = len(json.loads((directory / "vocab.json").read_text()))
    config = MarianConfig(
        vocab_size=size,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        max_position_embeddings=64,
        pad_token_id=size - 1,
        eos_token_id=0,
        decoder_start_token_id=size - 1,
        forced_eos_token_id=0,
    )
    MarianMTModel(config).save_pretrained(directory)
    return directory


@pytest.mark.more
def test_exported_marian_has_its_tokenizer(marian_model, home):
    artifact = export_model(str(marian_model), task="text2text-generation")
    assert {"tokenizer.json", "source.spm", "target.spm"} < artifact.manifest.files.keys()
    assert artifact.manifest.source.files.keys() >= {"source.spm", "target.spm"}
    assert not any("tokenizer.json" in note for note in artifact.manifest.stages[0].notes)
    assert differing(artifact.path, [*TEXTS, *HOSTILE["codes"]]) == []


def test_export_of_a_damaged_sentencepiece_model_leaves_nothing(marian_model, tmp_path, home):
    source = edited(marian_model, tmp_path, source_spm=b"no model")
    with pytest.raises(SourceError, match=r"source\.spm is not a sentencepiece model"):
        export_model(str(source), task="feature-extraction", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def with_settings(source, directory, **settings):
    """A copy of a tokenizer's directory with other settings."""
    shutil.copytree(source, directory)
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    return directory


@pytest.fixture(scope="module")
def bert_tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("bert")
    config = tiny._save_tokenizer("bert", directory)
    (directory / "config.json").write_text(json.dumps({"model_type": "bert", **config}))
    return directory


def exported(source, tmp_path):
    notes, out = write(source, tmp_path)
    shutil.copyfile(source / "config.json", out / "config.json")
    return notes, out


def test_a_tokenizer_that_equals_transformers_is_copied_byte_for_byte(bert_tokenizer, tmp_path):
    source = with_settings(bert_tokenizer, tmp_path / "source", do_lower_case=False)
    notes, out = exported(source, tmp_path)
    assert notes == []
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert TextTokenizer.open(out).encode(["É"])[0].ids == slow(source)("É").input_ids


def test_a_tokenizer_that_only_transformers_can_build_is_written(
    bert_tokenizer, tmp_path, monkeypatch
):
    # A runtime that does not know the setting.
    monkeypatch.setattr(TokenizerFiles, "_set_normalizer", lambda *_: None)
    source = with_settings(bert_tokenizer, tmp_path / "source", do_lower_case=False)
    notes, out = exported(source, tmp_path)
    assert notes[0].startswith("tokenizer.json is that of BertTokenizerFast, which transformers")
    fast = AutoTokenizer.from_pretrained(source)
    texts = ["The Engine", "É", "a"]
    assert [e.ids for e in TextTokenizer.open(out).encode(texts)] == fast(texts).input_ids
    assert AutoTokenizer.from_pretrained(out)(texts).input_ids == fast(texts).input_ids


def test_a_model_whose_texts_would_get_other_ids_is_refused(bert_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(
        TokenizerFiles, "_add_tokens", lambda _, tokenizer: tokenizer.add_tokens(["warm"])
    )
    source = with_settings(bert_tokenizer, tmp_path / "source")
    with pytest.raises(SourceError, match="would get other token ids than with transformers"):
        exported(source, tmp_path)


def test_a_padding_side_that_is_not_transformers_is_refused(bert_tokenizer, tmp_path, monkeypatch):
    source = with_settings(bert_tokenizer, tmp_path / "source", padding_side="left")
    opened = TextTokenizer.open

    def open_to_the_right(directory):
        return replace(opened(directory), pad_left=False)

    monkeypatch.setattr(TextTokenizer, "open", open_to_the_right)
    with pytest.raises(
        SourceError, match="padding_side is 'right' here and 'left' in transformers"
    ):
        exported(source, tmp_path)


def test_a_tokenizer_that_needs_another_library_is_refused(bert_tokenizer, tmp_path):
    source = with_settings(bert_tokenizer, tmp_path / "source", tokenizer_class="RoFormerTokenizer")
    with pytest.raises(SourceError, match="needs the package rjieba, which is not installed"):
        exported(source, tmp_path)


def test_a_tokenizer_that_transformers_cannot_load_is_noted(bert_tokenizer, tmp_path):
    source = with_settings(bert_tokenizer, tmp_path / "source", tokenizer_class="Unheard")
    (note,) = exported(source, tmp_path)[0]
    assert note.startswith("tokenizer.json was not compared: transformers cannot load")


@pytest.mark.parametrize("kind", BUILT + CONVERTED)
def test_written_tokenizers_pass_the_comparison_of_validate(
    slow_tokenizer, written_tokenizer, kind
):
    written = written_tokenizer(kind)
    reference = load_reference_tokenizer(slow_tokenizer(kind), trust_remote_code=False)
    tokenizer = TextTokenizer.open(written)
    expected = describe_tokenizer(reference, limit=tokenizer.limit)
    differences = compare_tokenizer(written, tokenizer, expected)
    assert (differences.problem, differences.state) == ("", [])

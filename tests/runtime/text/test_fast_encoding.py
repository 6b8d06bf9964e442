import random

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from enginery.runtime.text.tokenizer import FastEncoder, TextTokenizer
from tests.tiny import TEXT_KINDS, tiny_artifact

PIECES = [
    "the pump",
    "IS Warm",
    "  ",
    "again,",
    "[MASK]",
    "[mask]",
    "</s>",
    "<mask>",
    "#tag",
    "[",
    "é",
    "中文",
    "ﬁ",
    "\t",
    "\n",
    "\x00",
    "\x7f",
    "don't",
    "1,000.5",
    "##ing",
    "Ünïcödé",
]


@pytest.fixture(scope="module", params=TEXT_KINDS)
def tokenizer(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("quick") / request.param
    return TextTokenizer.open(tiny_artifact(request.param, "feature-extraction", out).path)


@pytest.mark.more
def test_ids_are_those_with_offsets(tokenizer):
    draw = random.Random(0)
    texts = ["".join(draw.choices(PIECES, k=draw.choice((0, 1, 5, 40)))) for _ in range(400)]
    texts += ["".join(map(chr, draw.choices(range(32, 127), k=60))) for _ in range(200)]
    texts += [" ".join(draw.choices(["pump", "Warm", "is"], k=700))]
    quick = tokenizer.encode(texts, offsets=False)
    quick += [tokenizer.encode([text], offsets=False)[0] for text in texts]
    for text, found, plain in zip(texts * 2, quick, tokenizer.encode(texts) * 2, strict=True):
        assert (found.ids, found.type_ids, found.attention_mask, found.special_tokens_mask) == (
            plain.ids,
            plain.type_ids,
            plain.attention_mask,
            plain.special_tokens_mask,
        ), text
        assert bool(found.overflowing) == bool(plain.overflowing)


def test_pairs_are_as_with_offsets(tokenizer):
    pairs = [("the pump", "is WARM"), ("é", "again [MASK]"), "alone"]
    quick, plain = tokenizer.encode(pairs, offsets=False), tokenizer.encode(pairs)
    assert [e.ids for e in quick] == [e.ids for e in plain]
    assert [e.type_ids for e in quick] == [e.type_ids for e in plain]


def test_pairs_without_a_template_have_their_types():
    words = {"[UNK]": 0, "the": 1, "pump": 2, "runs": 3}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    encoder = FastEncoder.from_tokenizer(backend)
    pair, single = encoder.encode([("the pump", "runs"), "the pump"])
    assert pair.type_ids == [0, 0, 1]
    assert single.type_ids == [0, 0]


def test_plain_ascii_skips_berts_normalizer(tmp_path):
    artifact = tiny_artifact("bert", "feature-extraction", tmp_path / "bert")
    quick = FastEncoder.from_tokenizer(TextTokenizer.open(artifact.path).backend)
    seen = []

    class Spy:
        def encode_batch_fast(self, texts):
            seen.extend(texts)
            return quick.plain.encode_batch_fast(texts)

    spied = FastEncoder(quick.tokenizer, Spy(), quick.added)
    spied.encode(["The Pump", "caf\u00e9", "a [MASK]", "tab\there", ("a", "b"), ""])
    for text in ("One Pump", "caf\u00e9"):
        spied.encode([text])
    assert seen == ["the pump", "", "one pump"]


@pytest.mark.parametrize(
    ("count", "letters", "is_quick"),
    [
        (5, 0, True),
        (100, 0, True),
        (256, 0, True),
        (1_600, 0, False),
        (20_000, 0, False),
        (100, 400, False),
    ],
)
def test_ids_are_right_with_any_number_of_added_tokens(tmp_path, count, letters, is_quick):
    artifact = tiny_artifact("bert", "feature-extraction", tmp_path / "bert")
    texts = TextTokenizer.open(artifact.path).backend
    texts.add_tokens([f"<{'x' * letters}Extra_{n}>" for n in range(count)])
    quick = FastEncoder.from_tokenizer(texts)
    assert (quick.plain is not None) == is_quick
    assert len(quick.added) <= 1_000
    sentences = [f"the <{'X' * letters}extra_{n}> Pump" for n in range(0, count, 1 + count // 50)]
    sentences += ["The Pump", f"is<{'x' * letters}Extra_1>warm", "<extra_", "x" * 3_000]
    assert [e.ids for e in quick.encode(sentences)] == [
        e.ids for e in texts.encode_batch(sentences)
    ]


@pytest.mark.parametrize("token", ["\u00c9", "\u212a", "\x00the"])
def test_an_added_token_that_the_normalizer_changes_is_found(tmp_path, token):
    artifact = tiny_artifact("bert", "feature-extraction", tmp_path / "bert")
    texts = TextTokenizer.open(artifact.path).backend
    texts.add_tokens([token])
    sentences = ["the Pump", "e k E K", "pumpe"]
    assert [e.ids for e in FastEncoder.from_tokenizer(texts).encode(sentences)] == [
        e.ids for e in texts.encode_batch(sentences)
    ]


def test_cased_tokenizer_has_no_fast_path(tmp_path):
    from tokenizers import normalizers

    artifact = tiny_artifact("bert", "feature-extraction", tmp_path / "bert")
    texts = TextTokenizer.open(artifact.path).backend
    texts.normalizer = normalizers.BertNormalizer(lowercase=False)
    quick = FastEncoder.from_tokenizer(texts)
    assert quick.plain is None
    sentences = ["The Pump", "the pump"]
    assert [e.ids for e in quick.encode(sentences)] == [
        e.ids for e in texts.encode_batch(sentences)
    ]

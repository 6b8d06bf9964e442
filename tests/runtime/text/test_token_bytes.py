"""The bytes of single tokens are together those of a text."""

import pytest
from tokenizers import Tokenizer, decoders, models

from enginery.runtime.text.token_bytes import TokenBytes
from enginery.runtime.text.tokenizer import TextTokenizer
from tests.tiny import tiny_artifact

TEXT = "The Über-pump,  1 😀 é"


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_bytes_of_a_decoders_tokens_are_the_text(tmp_path, kind):
    artifact = tiny_artifact(kind, "text-generation-with-past", tmp_path / kind)
    tokenizer = TextTokenizer.open(artifact.path)
    (encoding,) = tokenizer.encode_untruncated([TEXT], special=False)
    token_bytes = TokenBytes(tokenizer.backend)
    joined = b"".join(map(token_bytes, encoding.ids)).decode()
    assert joined.strip() == tokenizer.decode(encoding.ids, skip_special=False).strip()


def of_vocabulary(decoder, *tokens):
    words = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=tokens[0]))
    tokenizer.decoder = decoder
    return [TokenBytes(tokenizer)(index) for index in range(len(tokens))]


def test_decoders_of_several_kinds():
    sentencepiece = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    assert of_vocabulary(sentencepiece, "▁pump", "<0xF0>", "er") == [b" pump", b"\xf0", b"er"]
    assert of_vocabulary(decoders.Metaspace(), "▁pump", "<0xF0>") == [b" pump", b"<0xF0>"]
    assert of_vocabulary(decoders.WordPiece(), "pump", "##s") == [b" pump", b"s"]
    assert of_vocabulary(decoders.BPEDecoder(), "pump</w>", "s") == [b"pump ", b"s"]
    assert of_vocabulary(decoders.ByteLevel(), "Ġa", "Ã", "漢") == [b" a", b"\xc3", "漢".encode()]

"""Tokens of the tokenizer that the embedding table lacks."""

import json
import shutil

import pytest
import torch

from enginery import export_model
from enginery.core.errors import ExportError
from enginery.export.vocabulary import check_vocabulary, embedding_rows


@pytest.fixture
def tokenizer(tiny_model, tmp_path):
    """A copy of a tokenizer of 600 tokens."""
    shutil.copytree(tiny_model("bert", "fill-mask"), tmp_path / "copy")
    return tmp_path / "copy"


def test_table_with_all_tokens_or_more_is_right(tokenizer):
    assert check_vocabulary(tokenizer, 600) == []
    assert check_vocabulary(tokenizer, 640) == []
    assert check_vocabulary(tokenizer, 0) == []


def test_tokens_beyond_the_table_are_noted_by_name(tokenizer):
    (note,) = check_vocabulary(tokenizer, 594)
    table = "beyond the model's embedding table of 594 rows"
    assert note.startswith(f"the tokenizer has 6 tokens {table}")
    assert "(594), " in note
    assert note.endswith("; a text with such a token is an error")
    (note,) = check_vocabulary(tokenizer, 599)
    assert "has 1 token beyond" in note


def add_token(directory, content, *, in_tokenizer, **roles):
    """Add a token, with the next id, to a tokenizer's files."""
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | roles))
    if in_tokenizer:
        file = directory / "tokenizer.json"
        document = json.loads(file.read_text())
        token = {**document["added_tokens"][0], "id": 600, "content": content}
        document["added_tokens"].append(token)
        file.write_text(json.dumps(document))


@pytest.mark.more
@pytest.mark.parametrize("in_tokenizer", [True, False])
def test_padding_token_beyond_the_table_is_refused(tokenizer, in_tokenizer):
    """As a fine-tuned decoder has it, to which a padding token was added afterwards."""
    add_token(tokenizer, "[EXTRA]", in_tokenizer=in_tokenizer, pad_token="[EXTRA]")
    with pytest.raises(ExportError, match=r"'\[EXTRA\]' \(600\)\. One is the pad_token"):
        check_vocabulary(tokenizer, 600)
    with pytest.raises(ExportError, match=r"beyond the model's embedding table of 600 rows"):
        export_model(str(tokenizer))


def test_only_models_of_texts_have_such_a_table():
    class Images(torch.nn.Module):
        main_input_name = "pixel_values"

    class Texts(Images):
        main_input_name = "input_ids"

        def get_input_embeddings(self):
            return torch.nn.Embedding(7, 2)

    class Hashes(Texts):
        def get_input_embeddings(self):
            raise NotImplementedError

    assert [embedding_rows(kind()) for kind in (Images, Texts, Hashes)] == [0, 7, 0]

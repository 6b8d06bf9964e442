"""Pieces of a text are cut between characters, and together they are the whole text."""

import pytest

from enginery.runtime.generation.stream import TextStream


def bytes_of(tokens):
    return bytes(tokens).decode("utf-8", "replace")


def pieces(text, *, decode=bytes_of, **options):
    stream, tokens = TextStream(decode, **options), list(text.encode())
    found = [stream.feed(tokens[:end]) for end in range(1, len(tokens))]
    return [*found, stream.finish(tokens)], stream.text(tokens)


@pytest.mark.parametrize("text", ["warm", "naïve 日本 🚂", "🚂", " a  b "])
def test_pieces_are_the_text_and_end_between_characters(text):
    found, whole = pieces(text)
    assert "".join(found) == whole == text
    assert not any("�" in piece for piece in found)


def test_beginning_of_a_stop_string_is_held_back():
    found, whole = pieces("one two#three", stops=["##"])
    assert "".join(found) == whole == "one two#three"
    assert found[7:9] == ["", "#t"]


@pytest.mark.parametrize(
    ("stops", "kept", "cut"),
    [
        (["END"], "one END", "one "),
        (["zz", "E", "END"], "one E", "one "),
        (["e E", "END"], "one E", "on"),
        (["nothing"], "one END more", "one END more"),
    ],
)
def test_stop_string_ends_the_text_with_it_or_before_it(stops, kept, cut):
    for keep_stop, wanted in ((True, kept), (False, cut)):
        found, whole = pieces("one END more", stops=stops, keep_stop=keep_stop)
        assert "".join(found) == whole == wanted


def test_spaces_that_decoding_removes_later_are_not_sent():
    def decode(tokens):
        return bytes_of(tokens).replace(" n't", "n't").replace(" .", ".")

    found, whole = pieces("It does n't run .", decode=decode, clean_up=True)
    assert "".join(found) == whole == "It doesn't run."
    assert len([piece for piece in found if piece]) > 3

"""The frames between fronts and device processes."""

import numpy as np
import pytest

from enginery.core.errors import InputError, OptionError, ShapeError
from enginery.runtime.tasks.task import Row
from enginery.runtime.text.tokenizer import TokenArray, TokenIds
from enginery.serve.batching.queue import ClosedError, OverloadedError
from enginery.serve.device import wire
from enginery.serve.models.served_model import UnavailableError


class PairEncoding:
    """What `tokenizers` returns for two texts."""

    ids = (101, 7, 102, 8, 102)
    type_ids = (0, 0, 0, 1, 1)

    def __len__(self):
        return 5


def received(*frames, piece=10**9):
    """The frames that a reader finds in these bytes, `piece` of which arrive at a time."""
    data = b"".join(frames)
    found = []
    reader = wire.FrameReader(found.append)
    for start in range(0, len(data), piece):
        reader.feed(data[start : start + piece])
    return found


def joined(parts):
    return b"".join(parts)


def sent_rows(*rows, first=1, model=3, admitted=False, raw=False):
    frame = wire.rows_frames(rows, first=first, model=model, admitted=admitted, raw=raw)
    (found,) = received(joined(frame))
    return found, wire.read_rows(found)


def test_rows_of_token_ids_arrive_as_arrays():
    rows = [Row(TokenIds([1, 2, 65535]), 3, truncated=True), Row(TokenIds([9]), 1, 4)]
    frame, found = sent_rows(*rows, first=17, admitted=True)
    assert (frame.kind, frame.model, frame.number) == (wire.ROWS, 3, 17)
    assert frame.flags == wire.ADMITTED
    assert [row.content.ids.tolist() for row in found] == [[1, 2, 65535], [9]]
    assert [row.content.types for row in found] == [None, None]
    assert [row.content.type_ids.tolist() for row in found] == [[0, 0, 0], [0]]
    assert [(row.tokens, row.prompt_tokens, row.truncated) for row in found] == [
        (3, 0, True),
        (1, 4, False),
    ]


def test_token_ids_of_large_vocabularies_arrive():
    _, (row,) = sent_rows(Row(TokenIds([65536, 1, 250_001]), 3))
    assert row.content.ids.tolist() == [65536, 1, 250_001]


def test_types_of_pairs_arrive():
    _, (row,) = sent_rows(Row(PairEncoding(), 5))
    assert tuple(row.content.ids) == PairEncoding.ids
    assert tuple(row.content.type_ids) == PairEncoding.type_ids


def test_pixels_and_tensors_arrive_aligned():
    pixels = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    tensors = {
        "input_ids": np.arange(3, dtype=np.int64)[None],
        "flag": np.array(True),
        "half": np.ones((1, 2), np.float16),
    }
    _, (image,) = sent_rows(Row(pixels, 1))
    frame, (raw,) = sent_rows(Row(tensors, 3), raw=True)
    assert frame.flags == wire.RAW
    assert image.content.dtype == np.float32
    assert (image.content == pixels).all()
    assert raw.content.keys() == tensors.keys()
    for name, array in tensors.items():
        assert raw.content[name].dtype == array.dtype
        assert raw.content[name].shape == array.shape
        assert (raw.content[name] == array).all()
    for array in (image.content, *raw.content.values()):
        assert array.flags.aligned


def test_the_size_of_an_image_arrives_with_its_row_and_its_outputs():
    pixels = {"pixel_values": np.zeros((3, 2, 2), np.float32)}
    _, (row,) = sent_rows(Row(pixels, 1, image_size=(480, 640), group=2**56 - 1))
    assert (*row.image_size, row.group) == (480, 640, 2**56 - 1)
    boxes = np.ones((5, 4), np.float32)
    ((logits, centers, size),) = outputs_of([(boxes, boxes, row.image_size)], [1])
    assert (logits.shape, centers.shape, tuple(size)) == ((5, 4), (5, 4), (480, 640))


@pytest.mark.parametrize("texts", [["a", "", "ü界"], [b"a", b"", b"\xff\x00"]])
def test_arrays_of_strings_arrive(texts):
    _, (row,) = sent_rows(Row({"text": np.array([texts], object)}, 1))
    assert row.content["text"].shape == (1, 3)
    assert row.content["text"].tolist() == [texts]


def test_many_bytes_of_rows_are_sent_in_several_frames():
    pixels = np.zeros((3, 300, 300), np.float32)  # 1.03 MiB
    frames = wire.rows_frames([Row(pixels, 1)] * 3, first=7, model=1, admitted=False, raw=False)
    found = received(joined(frames))
    assert [(frame.number, frame.flags) for frame in found] == [
        (7, 0),
        (8, wire.ADMITTED),
        (9, wire.ADMITTED),
    ]
    assert [len(wire.read_rows(frame)) for frame in found] == [1, 1, 1]


class FarTypes(PairEncoding):
    type_ids = (0, 0, 0, 256, 256)


@pytest.mark.parametrize(
    "content",
    [TokenIds([1, 2**31]), FarTypes()],
    ids=["id", "type id"],
)
def test_rows_that_cannot_be_sent_are_invalid_inputs(content):
    with pytest.raises(InputError, match="an input cannot be passed to the model"):
        sent_rows(Row(content, 2))


def test_messages_with_invalid_unicode_arrive():
    (found,) = received(wire.failed_frame([1], InputError("'\ud800' is unknown."), model=1))
    assert wire.read_failure(found)[1].message == r"'\ud800' is unknown."


def test_frames_arrive_whole_however_they_are_cut():
    frames = [
        joined(
            wire.rows_frames(
                [Row(TokenIds([1, 2]), 2)] * 2, first=1, model=1, admitted=False, raw=False
            )
        ),
        wire.json_frame(wire.ASK, {"ask": "info"}, number=9),
        joined(wire.cancel_frame([4, 5])),
    ]
    for piece in (1, 2, 5, 11, 12, 13, 64):
        found = received(*frames, piece=piece)
        assert [frame.kind for frame in found] == [wire.ROWS, wire.ASK, wire.CANCEL]
        assert len(wire.read_rows(found[0])) == 2
        assert found[1].json() == {"ask": "info"}
        assert wire.read_cancelled(found[2]) == [4, 5]


def outputs_of(outputs, numbers):
    frame = wire.outputs_frame(numbers, outputs, model=2, started=12.5, seconds=0.25)
    (found,) = received(joined(frame))
    assert (found.kind, found.model) == (wire.OUTPUTS, 2)
    batch = wire.read_outputs(found)
    assert (batch.numbers, batch.started, batch.seconds) == (numbers, 12.5, 0.25)
    return batch.outputs


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64])
def test_outputs_of_one_shape_arrive_as_one_array(dtype):
    vectors = [np.arange(6, dtype=dtype).reshape(2, 3) + index for index in range(3)]
    found = outputs_of(vectors, [5, 9, 2**32 - 1])
    assert isinstance(found, np.ndarray)
    assert found.dtype == dtype
    assert (found == np.stack(vectors)).all()


def test_outputs_of_any_shape_arrive():
    outputs = [
        np.ones((2, 3), np.float32),
        (np.arange(4), np.float32(0.5)),
        {"logits": np.zeros((1, 2)), "names": np.array(["a", "b"], object)},
        [np.array(7)],
        None,
    ]
    first, (ids, score), named, (scalar,), nothing = outputs_of(outputs, [1, 2, 3, 4, 5])
    assert first.shape == (2, 3)
    assert ids.tolist() == [0, 1, 2, 3]
    assert float(score) == 0.5
    assert named["logits"].shape == (1, 2)
    assert named["names"].tolist() == ["a", "b"]
    assert int(scalar) == 7
    assert nothing is None


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InputError("no", do="yes"), InputError),
        (ShapeError("no", do="yes"), ShapeError),
        (ClosedError("no", do="yes"), ClosedError),
        (OptionError("no", do="yes"), UnavailableError),
        (UnavailableError("no", do="yes", retry_after_seconds=7.5), UnavailableError),
    ],
)
def test_expected_errors_arrive_as_they_are(error, kind):
    (found,) = received(wire.failed_frame(range(3, 5), error, model=1))
    numbers, arrived = wire.read_failure(found)
    assert numbers == [3, 4]
    assert type(arrived) is kind
    assert (arrived.message, arrived.do) == ("no", "yes")
    if isinstance(error, UnavailableError):
        assert arrived.retry_after_seconds == 7.5


def test_overload_arrives_with_the_time_to_wait():
    error = OverloadedError("full.", retry_after_seconds=3.25)
    (found,) = received(wire.failed_frame([1], error, model=1))
    _, arrived = wire.read_failure(found)
    assert type(arrived) is OverloadedError
    assert arrived.retry_after_seconds == 3.25
    assert arrived.do == error.do


def test_bugs_arrive_as_unexpected_errors():
    (found,) = received(wire.failed_frame([1], KeyError("x"), model=1))
    _, arrived = wire.read_failure(found)
    assert type(arrived) is RuntimeError
    assert "KeyError" in str(arrived)


def test_arrays_of_ids_are_padded_like_encodings(exported):
    from enginery.runtime.text.tokenizer import TextTokenizer

    artifact = exported("bert", "feature-extraction")
    tokenizer = TextTokenizer.open(artifact.path)
    inputs = artifact.manifest.graphs[0].inputs
    texts = ["the pump runs", "a", ("who?", "the engine is warm")]
    encodings = tokenizer.encode(texts, offsets=False)
    _, rows = sent_rows(*(Row(encoding, len(encoding)) for encoding in encodings))
    assert all(type(row.content) is TokenArray for row in rows)
    for chosen in ([0], [0, 1], [0, 1, 2], [2]):
        expected = tokenizer.feeds([encodings[i] for i in chosen], inputs, width=9)
        found = tokenizer.feeds([rows[i].content for i in chosen], inputs, width=9)
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            assert found[name].dtype == array.dtype
            assert (found[name] == array).all(), name

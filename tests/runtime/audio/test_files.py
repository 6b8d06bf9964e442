"""Audio files and arrays become mono float32 samples at the model's sampling rate."""

from __future__ import annotations

import io
import os
import re
import struct
import sys

import numpy as np
import pytest

from enginery.core.errors import InputError, MissingPackageError
from enginery.runtime.audio import files
from enginery.runtime.audio.files import load_audio
from tests.sounds import RATE, chirp, noise, silence, sine, speech
from tests.tolerances import EPSILON

soundfile = pytest.importorskip("soundfile", reason="pip install 'enginery[audio]'")
soxr = pytest.importorskip("soxr", reason="pip install 'enginery[audio]'")


def encoded(samples, rate=RATE, kind="WAV", subtype=None):
    stream = io.BytesIO()
    soundfile.write(stream, samples, rate, format=kind, subtype=subtype)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("kind", "subtype", "tolerance"),
    [
        ("WAV", "PCM_16", 2.0**-14),
        ("WAV", "PCM_U8", 2.0**-6),
        ("WAV", "PCM_24", 2.0**-22),
        ("WAV", "FLOAT", 0),
        ("WAVEX", "PCM_16", 2.0**-14),
        ("RF64", "PCM_16", 2.0**-14),
        ("FLAC", "PCM_16", 2.0**-14),
    ],
)
def test_lossless_formats_are_read_from_files_and_bytes(tmp_path, kind, subtype, tolerance):
    wave = speech(1.0)
    content = encoded(wave, kind=kind, subtype=subtype)
    (path := tmp_path / "call.audio").write_bytes(content)
    for source in (content, path, str(path)):
        found = load_audio(source, RATE)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, wave, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("kind", "subtype"), [("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", None)])
def test_lossy_formats_are_read(kind, subtype):
    wave = sine(2.0, rate=48_000)
    found = load_audio(encoded(wave, 48_000, kind, subtype), 48_000)
    assert found.shape == wave.shape
    assert np.abs(found - wave)[4800:-4800].max() < 0.02


def test_channels_are_averaged():
    left, right = sine(1.0), sine(1.0, hertz=900)
    both = np.stack([left, right], axis=1)
    expected = (left + right) / 2
    content = encoded(both, subtype="FLOAT")
    for source in (content, (both, RATE), {"array": both, "sampling_rate": RATE, "path": None}):
        np.testing.assert_allclose(load_audio(source, RATE), expected, atol=EPSILON)


@pytest.mark.parametrize("seconds", [0.001, 1.0, 12.0])  # 12 s are more than one block
@pytest.mark.parametrize(("rate", "target"), [(44_100, 16_000), (8_000, 16_000), (48_000, 16_000)])
def test_resampling_equals_soxr(rate, target, seconds):
    wave = chirp(seconds, rate=rate, high=3500)
    expected = soxr.resample(wave, rate, target)
    for source in (encoded(wave, rate, subtype="FLOAT"), (wave, rate)):
        np.testing.assert_array_equal(load_audio(source, target), expected)


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000, 96_000])
def test_a_tone_keeps_its_frequency_when_resampled(rate):
    found = load_audio((sine(2.0, hertz=1000, rate=rate), rate), RATE)
    assert found.shape == (2 * RATE,)
    inner = slice(RATE // 10, -RATE // 10)
    expected = sine(2.0, hertz=1000)
    np.testing.assert_allclose(found[inner], expected[inner], rtol=0, atol=1e-4)


def test_frequencies_above_the_new_limit_disappear():
    found = load_audio((sine(1.0, hertz=11_000, rate=48_000), 48_000), RATE)
    assert np.abs(found[1600:-1600]).max() < 1e-4


@pytest.mark.parametrize(
    ("dtype", "zero", "scale"), [("int16", 0, 2**15), ("int32", 0, 2**31), ("uint8", 128, 2**7)]
)
def test_integers_are_scaled_by_their_range(dtype, zero, scale):
    limits = np.iinfo(dtype)
    found = load_audio((np.array([limits.min, zero, limits.max], dtype), RATE), RATE)
    np.testing.assert_allclose(found, [-1, 0, (limits.max - zero) / scale], atol=EPSILON)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_floats_are_taken_as_they_are(dtype):
    array = np.array([-1.5, 0.25, 1], dtype)
    np.testing.assert_array_equal(load_audio((array, RATE), RATE), array)


TINY = np.zeros(8, np.float32)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (TINY, "is an array without its sampling rate. Pass (array, sampling_rate)"),
        ((TINY, 16000.0), "the sampling rate is 16000.0, expected a whole number"),
        ((TINY, True), "the sampling rate is True"),
        ((TINY, 0), "sampling rate of 0 Hz, expected 1,000 to 768,000"),
        ((TINY, -16000), "sampling rate of -16,000 Hz"),
        ((TINY, 10**9), "sampling rate of 1,000,000,000 Hz"),
        ((np.zeros((2, 16000), np.float32), RATE), "16,000 channels of shape (2, 16000): (samples"),
        ((np.zeros((2, 2, 2), np.float32), RATE), "array of shape (2, 2, 2)"),
        ((np.zeros((8, 0), np.float32), RATE), "has 0 channels"),
        ((np.zeros(8, np.int64), RATE), "array of int64, expected float32"),
        ((np.zeros(8, np.complex64), RATE), "array of complex64"),
        ((np.zeros(8, bool), RATE), "array of bool"),
        ((np.zeros(0, np.float32), RATE), "audio 3 has no samples"),
        ((np.array([0, np.nan], np.float32), RATE), "NaN or infinite"),
        ((np.array([0, np.inf], np.float32), RATE), "NaN or infinite"),
        (5, "is a int, expected a path, a file's bytes, or a pair"),
        (None, "is a NoneType"),
        ({"array": [1, 2]}, "is a dict"),
        ("nowhere.wav", "file nowhere.wav does not exist"),
        (b"", "not an audio file of a supported format. Supported: WAV, FLAC, OGG, MP3"),
        (b"<html>", "not an audio file"),
        (b"RIFF\x04\0\0\0AVI LIST", "not an audio file"),
        (b"RIFF\x04\0\0\0WAVE", "not a complete audio file"),
        (b"fLaC" + bytes(50), "not a complete audio file"),
        (b"OggS" + bytes(50), "not a complete audio file"),
        (b"\xff\xfb\x90\x00" + bytes(50), "not a complete audio file"),
    ],
)
def test_unusable_audio_is_named(source, message):
    with pytest.raises(InputError, match=re.escape(message)):
        load_audio(source, RATE, name="audio 3")


@pytest.mark.parametrize("kind", ["AIFF", "AU", "CAF", "VOC", "W64", "SVX", "NIST", "MAT5", "PAF"])
def test_other_formats_of_libsndfile_are_not_parsed(monkeypatch, kind):
    content = encoded(sine(0.1), kind=kind)
    monkeypatch.setattr(soundfile, "SoundFile", lambda *_: pytest.fail("it was opened"))
    with pytest.raises(InputError, match="not an audio file of a supported format"):
        load_audio(content, RATE)


@pytest.mark.parametrize(
    ("kind", "subtype"), [("FLAC", None), ("OGG", "OPUS"), ("OGG", "VORBIS"), ("MP3", None)]
)
def test_a_truncated_file_is_an_error(kind, subtype):
    content = encoded(noise(1.0, rate=48_000), 48_000, kind, subtype)
    with pytest.raises(InputError, match=r"audio is not a complete|audio has no samples"):
        load_audio(content[: len(content) // 20], RATE)


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
def test_damaged_files_are_read_or_an_input_error(kind):
    content = encoded(noise(0.2, rate=48_000), 48_000, kind)
    random = np.random.default_rng(0)
    for _ in range(60):
        damaged = bytearray(content)
        for place in random.integers(0, len(content), 8):
            damaged[place] = random.integers(0, 256)
        start = bytes(damaged[:64])
        for broken in (bytes(damaged), start + content[64:]):
            try:
                found = load_audio(broken, RATE, max_seconds=5)
            except InputError:
                continue
            assert found.size <= 5 * RATE + 1


def test_named_pipe_and_folder_are_rejected(tmp_path):
    os.mkfifo(path := tmp_path / "call.wav")
    for each in (path, tmp_path):
        with pytest.raises(InputError, match="is not a regular file"):
            load_audio(each, RATE)


def test_error_names_the_file(tmp_path):
    (path := tmp_path / "call.wav").write_bytes(b"RIFF")
    with pytest.raises(InputError, match=r"audio 3 \(.*call\.wav\) is not an audio file"):
        load_audio(path, RATE, name="audio 3")


# Limits


def test_duration_is_checked_before_decoding(monkeypatch):
    # A minute of silence has 14 kB in FLAC.
    content = encoded(silence(60), kind="FLAC")
    monkeypatch.setattr(soundfile.SoundFile, "read", lambda *_, **__: pytest.fail("it was decoded"))
    with pytest.raises(InputError, match=r"60\.0 seconds long, expected at most 59\.5"):
        load_audio(content, RATE, max_seconds=59.5)
    with pytest.raises(InputError, match=r"60\.0 seconds long"):
        load_audio((silence(60), RATE), RATE, max_seconds=59)


def test_flac_without_its_length_is_named():
    content = bytearray(encoded(speech(2.0), kind="FLAC"))
    content[21] &= 0xF0  # the number of samples in STREAMINFO has 36 bits
    content[22:26] = bytes(4)
    with pytest.raises(InputError, match=r"audio does not declare its length.*ffmpeg"):
        load_audio(bytes(content), RATE)


def test_memory_depends_on_the_seconds_alone():
    import tracemalloc

    both = np.zeros((192_000 * 10, 8), np.int16)  # as float32, 61 MB
    content = encoded(both, 192_000, "FLAC")
    del both
    load_audio(content, RATE)  # imports
    tracemalloc.start()
    try:
        load_audio(content, RATE)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8e6


def test_a_header_that_declares_too_much_is_rejected():
    content = bytearray(encoded(sine(0.1)))
    content[22:24] = struct.pack("<H", 500)  # channels
    with pytest.raises(InputError, match=r"500 channels|not a complete audio file"):
        load_audio(bytes(content), RATE)
    content = bytearray(encoded(sine(0.1)))
    content[24:28] = struct.pack("<I", 2_000_000_000)  # sampling rate
    with pytest.raises(InputError, match="sampling rate of 2,000,000,000 Hz"):
        load_audio(bytes(content), RATE)


def test_file_size_is_limited(tmp_path, monkeypatch):
    (path := tmp_path / "call.wav").write_bytes(encoded(sine(0.1)))
    monkeypatch.setattr(files, "MAX_BYTES", 1000)
    with pytest.raises(InputError, match="3,244 bytes, expected at most 1,000"):
        load_audio(path, RATE)


@pytest.mark.parametrize(
    ("package", "source", "purpose"),
    [
        ("soundfile", encoded(sine(0.1)), "Reading audio"),
        ("soxr", (sine(0.1, rate=8000), 8000), "Resampling audio from 8000 to 16000 Hz"),
    ],
)
def test_missing_package_is_named_with_its_extra(monkeypatch, package, source, purpose):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=rf"{purpose}.*enginery\[audio\]"):
        load_audio(source, RATE)


def test_samples_at_the_models_rate_need_no_package(monkeypatch):
    for package in ("soundfile", "soxr"):
        monkeypatch.setitem(sys.modules, package, None)
    np.testing.assert_array_equal(load_audio((sine(0.1), RATE), RATE), sine(0.1))

"""Load audio from paths, bytes or arrays as mono float32 at the sampling rate of a model.

Files are decoded by libsndfile, which the package soundfile contains, and resampled by soxr, as by
`librosa.load`. Integer samples are scaled to [-1, 1); channels are averaged. After its header was
checked, a file is decoded, averaged and resampled block by block, so memory depends on the seconds
of audio alone. Only the formats in `FORMATS` are read. A WAV file that was cut off is read up to
its end; other files are an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from enginery.core.errors import InputError
from enginery.core.extras import missing_packages, missing_packages_as_errors

if TYPE_CHECKING:
    from soundfile import SoundFile

FORMATS = ("WAV", "FLAC", "OGG", "MP3")
"""The supported formats; OGG includes Vorbis and Opus."""

MAX_SECONDS = 2 * 60 * 60
"""Largest duration by default: 440 MiB of samples at 16 kHz."""
MAX_BYTES = 2**31
"""Largest audio file."""
MAX_CHANNELS = 32
MIN_SAMPLING_RATE, MAX_SAMPLING_RATE = 1_000, 768_000

_LIBSNDFILE_FORMATS = ("WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3")
_SCALES = {"uint8": 2.0**7, "int16": 2.0**15, "int32": 2.0**31}
_UNKNOWN_LENGTH = 2**63 - 1
"""Number of samples that libsndfile gives if the header of a FLAC file lacks it."""
_BLOCK_SAMPLES = 2**18
"""Samples that are decoded at a time, over all channels."""


def load_audio(
    source: Any, sampling_rate: int, *, name: str = "audio", max_seconds: float = 0
) -> NDArray[np.float32]:
    """Load audio as mono samples; see `audio_blocks` for the arguments and errors.

    Returns:
        float32 (samples,). Integers are scaled to [-1, 1); floats are taken as they are.
    """
    return _join(audio_blocks(source, sampling_rate, name=name, max_seconds=max_seconds))


def audio_blocks(
    source: Any, sampling_rate: int, *, name: str = "audio", max_seconds: float = 0
) -> Iterator[NDArray[np.float32]]:
    """Yield consecutive mono samples, float32 (samples,) each; those of a file as it is decoded.

    Args:
        source: a path, the contents of a file, or samples with their sampling rate: a pair
            (array, sampling_rate), or a mapping with the keys `array` and `sampling_rate`, as rows
            of `datasets` are. An array is (samples,) or (samples, channels) of float16, float32,
            float64, int16, int32 or uint8.
        sampling_rate: the sampling rate of the result in Hz.
        name: what error messages call the audio, such as `audio 3`.
        max_seconds: maximum duration; 0 for `MAX_SECONDS`.

    Raises:
        InputError: the file is missing, damaged or of another format, the audio is empty or longer
            than `max_seconds`, it has too many channels or an unusual sampling rate, or a sample is
            NaN or infinite.
        MissingPackageError: a package of the extra `audio` is needed and not installed.
    """
    limit = max_seconds or MAX_SECONDS
    if isinstance(source, str | Path):
        blocks = _from_file(Path(source), sampling_rate, name, limit)
        name = f"{name} ({source})"
    elif isinstance(source, bytes):
        blocks = _decode(BytesIO(source), len(source), sampling_rate, name, limit)
    else:
        array, rate = _array_and_rate(source, name)
        _check_rate(rate, name)
        blocks = _resampled(iter([_from_array(array, rate, name, limit)]), rate, sampling_rate)
    is_empty = True
    for block in blocks:
        if not np.isfinite(block).all():
            raise InputError(f"{name} has samples that are NaN or infinite.")
        is_empty = is_empty and not block.size
        yield block
    if is_empty:
        raise InputError(f"{name} has no samples.")


def resample(samples: NDArray[np.float32], rate: int, target: int) -> NDArray[np.float32]:
    """Resample mono samples with soxr's high quality.

    Args:
        samples: float32 (samples,).
        rate: their sampling rate in Hz.
        target: the sampling rate of the result in Hz.
    """
    return _join(_resampled(iter([samples]), rate, target))


def _from_file(
    path: Path, sampling_rate: int, name: str, limit: float
) -> Iterator[NDArray[np.float32]]:
    if path.exists() and not path.is_file():  # opening a named pipe would block
        raise InputError(f"{name}: {path} is not a regular file.")
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            yield from _decode(file, size, sampling_rate, f"{name} ({path})", limit)
    except FileNotFoundError:
        raise InputError(f"{name}: file {path} does not exist.") from None
    except OSError as error:
        raise InputError(f"{name}: {path} cannot be read: {error}.") from error


def _decode(
    file: BinaryIO, size: int, sampling_rate: int, name: str, limit: float
) -> Iterator[NDArray[np.float32]]:
    if size > MAX_BYTES:
        raise InputError(f"{name} has {size:,} bytes, expected at most {MAX_BYTES:,}.")
    # The first bytes decide, before libsndfile looks at the file: it has rarely tested parsers for
    # formats beyond `FORMATS`.
    head = file.read(12)
    file.seek(0)
    if not _is_supported(head):
        raise _unsupported(name)
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: without the libsndfile of the wheels
        raise missing_packages("Reading audio", ["soundfile"]) from error
    try:
        with soundfile.SoundFile(file) as opened:
            # Behind an ID3 tag there may be another format.
            if opened.format not in _LIBSNDFILE_FORMATS:
                raise _unsupported(name)
            _check_rate(opened.samplerate, name)
            _check_channels(opened.channels, name)
            if opened.frames == _UNKNOWN_LENGTH:  # soundfile cannot read it to its end
                raise InputError(
                    f"{name} does not declare its length, as FLAC that was written to a pipe.",
                    do="Write it to a file: ffmpeg -i FILE audio.flac",
                )
            _check_seconds(opened.frames / opened.samplerate, name, limit)
            blocks = _blocks(opened, name)
            yield from _resampled(blocks, opened.samplerate, sampling_rate)
    except soundfile.LibsndfileError as error:
        raise InputError(f"{name} is not a complete audio file: {error.error_string}") from error


def _is_supported(head: bytes) -> bool:
    """Return True if a file starts like one of `FORMATS`."""
    if head[:4] in (b"RIFF", b"RF64"):
        return head[8:12] == b"WAVE"
    mpeg_frame = len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0
    return head.startswith((b"fLaC", b"OggS", b"ID3")) or mpeg_frame


def _unsupported(name: str) -> InputError:
    return InputError(
        f"{name} is not an audio file of a supported format.",
        do=f"Supported: {', '.join(FORMATS)}. To convert another: ffmpeg -i FILE audio.flac",
    )


def _blocks(opened: SoundFile, name: str) -> Iterator[NDArray[np.float32]]:
    """Yield the samples of an open file, as the mean of its channels."""
    frames = max(_BLOCK_SAMPLES // opened.channels, 1)
    read = 0
    while len(block := opened.read(frames, dtype="float32", always_2d=True)):
        read += len(block)
        yield block[:, 0] if opened.channels == 1 else block.mean(axis=1)
    # A compressed file that was cut off ends like a whole one.
    if read < opened.frames:
        raise InputError(
            f"{name} is not a complete audio file: it has {read:,} samples, and its header "
            f"declares {opened.frames:,}."
        )


def _resampled(
    blocks: Iterator[NDArray[np.float32]], rate: int, target: int
) -> Iterator[NDArray[np.float32]]:
    """Resample consecutive blocks; the result is the same as of all samples at once."""
    if rate == target:
        yield from blocks
        return
    with missing_packages_as_errors(f"Resampling audio from {rate} to {target} Hz"):
        import soxr

    stream = soxr.ResampleStream(rate, target, num_channels=1, dtype="float32")
    for block in blocks:
        yield stream.resample_chunk(np.ascontiguousarray(block))
    # The filter holds back the last samples until the stream ends.
    yield stream.resample_chunk(np.empty(0, np.float32), last=True)


def _join(blocks: Iterator[NDArray[np.float32]]) -> NDArray[np.float32]:
    parts = list(blocks)
    return np.concatenate(parts) if parts else np.empty(0, np.float32)


def _array_and_rate(source: Any, name: str) -> tuple[NDArray[Any], int]:
    if isinstance(source, Mapping) and {"array", "sampling_rate"} <= set(source):
        source = (source["array"], source["sampling_rate"])
    if isinstance(source, tuple) and len(source) == 2 and isinstance(source[0], np.ndarray):
        array, rate = source
        if isinstance(rate, int | np.integer) and not isinstance(rate, bool):
            return array, int(rate)
        raise InputError(f"{name}: the sampling rate is {rate!r}, expected a whole number of Hz.")
    if isinstance(source, np.ndarray):
        raise InputError(
            f"{name} is an array without its sampling rate.", do="Pass (array, sampling_rate)."
        )
    raise InputError(
        f"{name} is a {type(source).__name__}, expected a path, a file's bytes, or a pair (array, "
        "sampling_rate)."
    )


def _from_array(array: NDArray[Any], rate: int, name: str, limit: float) -> NDArray[np.float32]:
    """Return the mean of the channels of an array, scaled to [-1, 1) if it holds integers."""
    if array.ndim not in (1, 2):
        raise InputError(
            f"{name} is an array of shape {array.shape}, expected (samples,) or (samples, "
            "channels)."
        )
    if array.ndim == 2:
        _check_channels(array.shape[1], name, f" of shape {array.shape}: (samples, channels)")
    _check_seconds(len(array) / rate, name, limit)
    scale = _SCALES.get(array.dtype.name)
    if scale is None and array.dtype.name not in ("float16", "float32", "float64"):
        raise InputError(
            f"{name} is an array of {array.dtype}, expected float32, float64, float16, "
            f"{', '.join(_SCALES)}."
        )
    samples = array.astype(np.float32)
    if scale is not None:
        if array.dtype == np.uint8:
            samples -= 128  # silence, in 8-bit audio
        samples /= np.float32(scale)
    return samples if samples.ndim == 1 else samples.mean(axis=1)


def _check_rate(rate: int, name: str) -> None:
    if not MIN_SAMPLING_RATE <= rate <= MAX_SAMPLING_RATE:
        raise InputError(
            f"{name} has a sampling rate of {rate:,} Hz, expected {MIN_SAMPLING_RATE:,} to "
            f"{MAX_SAMPLING_RATE:,}."
        )


def _check_channels(channels: int, name: str, detail: str = "") -> None:
    if not 1 <= channels <= MAX_CHANNELS:
        raise InputError(
            f"{name} has {channels:,} channels{detail}, expected at most {MAX_CHANNELS}."
        )


def _check_seconds(seconds: float, name: str, limit: float) -> None:
    if seconds > limit:
        raise InputError(f"{name} is {seconds:,.1f} seconds long, expected at most {limit:,g}.")

"""Preprocess audio into a model's features, as its feature extractor in transformers does.

    processor = AudioProcessor.open(artifact.path)    # reads preprocessor_config.json
    waveform = load_audio("call.flac", processor.sampling_rate)
    processor([waveform])["input_features"].shape     # (1, 80, 3000) for Whisper

Rules and defaults are from transformers 4.57, `models/*/feature_extraction_*.py` and
`audio_utils.py`. Spectrograms are computed in float64, as transformers does in NumPy. With PyTorch,
its Whisper extractor computes in float32, whose rounding differs. Keys of the file that the
extractor does not read are ignored, as in transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from enginery.core.errors import ArtifactError, InputError, nearest
from enginery.core.model.files import MAX_FRAMES, FeatureExtractorConfig, ModelConfig
from enginery.runtime.audio.files import audio_blocks, load_audio

__all__ = ["AudioProcessor", "WhisperSpectrogram", "audio_blocks", "load_audio"]

Waveform = NDArray[np.float32]

# Defaults of each feature extractor.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "Whisper": {
        "feature_size": 80,
        "sampling_rate": 16_000,
        "hop_length": 160,
        "chunk_length": 30,
        "n_fft": 400,
        "padding_value": 0.0,
        "padding_side": "right",
        "dither": 0.0,
    },
    "Wav2Vec2": {
        "feature_size": 1,
        "sampling_rate": 16_000,
        "padding_value": 0.0,
        "padding_side": "right",
        "return_attention_mask": False,
        "do_normalize": True,
    },
    "AST": {
        "sampling_rate": 16_000,
        "num_mel_bins": 128,
        "max_length": 1024,
        "do_normalize": True,
        "mean": -4.2677393,
        "std": 4.5689974,
    },
    "Speech2Text": {
        "sampling_rate": 16_000,
        "num_mel_bins": 80,
        "padding_value": 0.0,
        "padding_side": "right",
        "dither": 0.0,
        "do_ceptral_normalize": True,
        "normalize_means": True,
        "normalize_vars": True,
    },
    "Parakeet": {
        "feature_size": 80,
        "sampling_rate": 16_000,
        "hop_length": 160,
        "n_fft": 512,
        "win_length": 400,
        "preemphasis": 0.97,
        "padding_side": "right",
    },
}
_INPUT_NAMES = {
    "Whisper": "input_features",
    "Wav2Vec2": "input_values",
    "AST": "input_values",
    "Speech2Text": "input_features",
    "Parakeet": "input_features",
}

# Extractors of model types whose file does not name one, as older files.
_BY_MODEL_TYPE = {
    "whisper": "Whisper",
    "audio-spectrogram-transformer": "AST",
    "speech_to_text": "Speech2Text",
    "parakeet_ctc": "Parakeet",
    **dict.fromkeys(
        (
            "wav2vec2",
            "wav2vec2-conformer",
            "hubert",
            "wavlm",
            "sew",
            "sew-d",
            "unispeech",
            "unispeech-sat",
            "data2vec-audio",
            "moonshine",
        ),
        "Wav2Vec2",
    ),
}

# Kaldi's filter banks: frames of 25 ms every 10 ms at 16 kHz, padded to a power of two.
_KALDI_RATE, _KALDI_FRAME, _KALDI_HOP, _KALDI_FFT = 16_000, 400, 160, 512
_KALDI_PREEMPHASIS = 0.97
# `mel_floor` of transformers, the epsilon of float32.
_KALDI_FLOOR = 2.0**-23

_WHISPER_MAX_FREQUENCY = 8000.0
_WHISPER_FLOOR = 1e-10
_WHISPER_RANGE = 8.0
"""Decades below the loudest value that are kept."""

# Added to energies and to deviations of Parakeet's features, as NeMo does.
_PARAKEET_FLOOR = 2.0**-24
_PARAKEET_EPSILON = 1e-5

_BLOCK_VALUES = 2**18
"""Values of the frames that are transformed at a time: 2 MiB."""


@dataclass(frozen=True)
class AudioProcessor:
    """The audio preprocessing of one model."""

    kind: str
    """Name of the extractor's class without `FeatureExtractor`: Whisper, Wav2Vec2, …"""
    settings: Mapping[str, Any]
    """The settings of preprocessor_config.json, completed by the extractor's defaults."""

    @classmethod
    def open(cls, directory: Path) -> AudioProcessor:
        """Read preprocessor_config.json; config.json names the model's type if the file does not.

        Raises:
            ArtifactError: the file is missing or malformed, its feature extractor is not supported,
                or a setting has a value that is not supported.
        """
        file = directory / FeatureExtractorConfig.FILE
        if not file.is_file():
            raise ArtifactError(
                f"{directory} has no preprocessor_config.json, which is needed to preprocess "
                "audio.",
                do="Save the model's feature extractor in its directory and export again.",
            )
        config = FeatureExtractorConfig.read(directory)
        name = config.feature_extractor_type
        kind = name.removesuffix("FeatureExtractor")
        # The file need not name its extractor; then the model's type does.
        if not name:
            kind = _BY_MODEL_TYPE.get(ModelConfig.read(directory).model_type, "")
        if kind not in _DEFAULTS:
            raise ArtifactError(
                f"{file}: feature extractor '{name}' is not supported{nearest(kind, _DEFAULTS)}",
                do=f"Supported: {', '.join(f'{key}FeatureExtractor' for key in _DEFAULTS)}.",
            )
        settings = dict(_DEFAULTS[kind])
        values = {key: getattr(config, key) for key in settings}
        settings |= {key: value for key, value in values.items() if value is not None}
        _check_settings(file, kind, settings)
        return cls(kind, settings)

    @property
    def sampling_rate(self) -> int:
        """The sampling rate in Hz of the waveforms that the model takes."""
        rate: int = self.settings["sampling_rate"]
        return rate

    @property
    def input_name(self) -> str:
        """The name of the features in the result and of the graph's input."""
        return _INPUT_NAMES[self.kind]

    @property
    def fixed_samples(self) -> int:
        """The length that waveforms are padded or truncated to; 0 if they keep their own."""
        settings = self.settings
        if self.kind == "Whisper":
            return int(settings["chunk_length"] * self.sampling_rate)
        if self.kind == "AST":
            return int(_KALDI_FRAME + (settings["max_length"] - 1) * _KALDI_HOP)
        return 0

    def __call__(self, waveforms: Sequence[Waveform], *, first: int = 0) -> dict[str, NDArray[Any]]:
        """Preprocess waveforms into one batch, padded as transformers does with `padding=True`.

        Args:
            waveforms: float32 (samples,) each, at `sampling_rate`, as `load_audio` returns them.
            first: number of the first waveform in error messages.

        Returns:
            The graph's inputs by name:

            - Whisper: `input_features` float32 (batch, mel bins, frames), padded or truncated to
              `chunk_length` seconds.
            - Wav2Vec2: `input_values` float32 (batch, samples), padded to the longest waveform, and
              with `return_attention_mask` the `attention_mask` int64 (batch, samples).
            - AST: `input_values` float32 (batch, max_length, mel bins), padded or truncated.
            - Speech2Text: `input_features` float32 (batch, frames, mel bins), padded to the longest
              waveform, and `attention_mask` int64 (batch, frames).
            - Parakeet: the same; one frame more than the longest waveform has, which is 0.

        Raises:
            InputError: a waveform has another dtype or shape, no samples, or too few for a frame.
        """
        checked = [_check(wave, f"audio {first + i}") for i, wave in enumerate(waveforms)]
        if self.kind in ("AST", "Speech2Text"):
            for index, wave in enumerate(checked):
                if wave.size < _KALDI_FRAME:
                    raise InputError(
                        f"audio {first + index} has {wave.size} samples, expected at least "
                        f"{_KALDI_FRAME}: {self.kind} computes frames of 25 ms."
                    )
        if self.kind == "Whisper":
            return {"input_features": self._whisper(checked)}
        if self.kind == "Wav2Vec2":
            return self._wav2vec2(checked)
        if self.kind == "AST":
            return {"input_values": self._ast(checked)}
        if self.kind == "Parakeet":
            return self._parakeet(checked, first)
        return self._speech2text(checked)

    def _whisper(self, waveforms: Sequence[Waveform]) -> NDArray[np.float32]:
        frames = _whisper_frames(self.settings)
        features = np.empty((len(waveforms), self.settings["feature_size"], frames), np.float32)
        for row, waveform in zip(features, waveforms, strict=True):
            row[:] = self.window_spectrogram(waveform).window(0, frames)
        return features

    def window_spectrogram(self, waveform: Waveform) -> WhisperSpectrogram:
        """Return Whisper's features of one window, to which audio is padded or truncated."""
        samples = self.fixed_samples
        return self.spectrogram(iter([self._pad(waveform[:samples], samples)]))

    def spectrogram(self, blocks: Iterator[Waveform]) -> WhisperSpectrogram:
        """Return Whisper's features of audio of any length, of which no more than a block is held.

        Args:
            blocks: consecutive samples, as `audio_blocks` yields them; at least half of `n_fft`
                samples and one.
        """
        settings = self.settings
        bins, n_fft, hop = settings["feature_size"], settings["n_fft"], settings["hop_length"]
        # torch.stft's periodic Hann window: a symmetric one with one more sample, less its last.
        window = np.hanning(n_fft + 1)[:-1]
        filters = _whisper_filters(bins, n_fft, self.sampling_rate)
        spectrogram = WhisperSpectrogram(bins)
        for frames in _centred_frames(self._dithered(blocks), n_fft, hop):
            mels = _mel_energies(_blocks(frames), window, n_fft, filters, _WHISPER_FLOOR)
            spectrogram.append(np.log10(mels).astype(np.float32))
        return spectrogram

    def _dithered(self, blocks: Iterator[Waveform]) -> Iterator[NDArray[np.float64]]:
        # Always the same noise, so that the same audio gives the same result.
        generator, dither = np.random.default_rng(0), self.settings["dither"]
        for block in blocks:
            samples = block.astype(np.float64)
            yield samples + dither * generator.standard_normal(len(block)) if dither else samples

    def _wav2vec2(self, waveforms: Sequence[Waveform]) -> dict[str, NDArray[Any]]:
        settings = self.settings
        masked = settings["return_attention_mask"]
        longest = max((wave.size for wave in waveforms), default=0)
        values = np.full((len(waveforms), longest), settings["padding_value"], np.float32)
        for row, wave in zip(values, waveforms, strict=True):
            row[: wave.size] = wave
            if settings["do_normalize"]:
                # Without a mask, the mean and the variance are those of the padded waveform.
                part = row[: wave.size] if masked else row
                # transformers adds 1e-7, so that silence, whose variance is 0, stays finite.
                part[:] = (part - part.mean()) / np.sqrt(part.var() + 1e-7)
        if not masked:
            return {"input_values": values}
        return {"input_values": values, "attention_mask": _mask([w.size for w in waveforms])}

    def _ast(self, waveforms: Sequence[Waveform]) -> NDArray[np.float32]:
        settings = self.settings
        bins, length = settings["num_mel_bins"], settings["max_length"]
        # Frames behind the end of the audio are 0 before they are normalized, like transformers'
        # padding.
        features = np.zeros((len(waveforms), length, bins), np.float32)
        for row, wave in zip(features, waveforms, strict=True):
            frames = _kaldi_features(wave[: self.fixed_samples], np.hanning(_KALDI_FRAME), bins)
            row[: len(frames)] = frames
        if settings["do_normalize"]:
            # Twice the deviation, as in transformers.
            features = (features - settings["mean"]) / (settings["std"] * 2)
        return features.astype(np.float32, copy=False)

    def _speech2text(self, waveforms: Sequence[Waveform]) -> dict[str, NDArray[Any]]:
        settings = self.settings
        window = np.hanning(_KALDI_FRAME) ** 0.85  # Kaldi's window "povey"
        bins = settings["num_mel_bins"]
        features = [
            # Kaldi takes the values of 16-bit samples.
            _kaldi_features(wave * np.float32(2**15), window, bins, dither=settings["dither"])
            for wave in waveforms
        ]
        mask = _mask([len(frames) for frames in features])
        padded = np.full((*mask.shape, bins), settings["padding_value"], np.float32)
        for row, frames in zip(padded, features, strict=True):
            row[: len(frames)] = self._normalize(frames)
        return {"input_features": padded, "attention_mask": mask}

    def _parakeet(self, waveforms: Sequence[Waveform], first: int) -> dict[str, NDArray[Any]]:
        settings = self.settings
        hop, n_fft, length = settings["hop_length"], settings["n_fft"], settings["win_length"]
        counts = [wave.size // hop for wave in waveforms]
        for index, (wave, count) in enumerate(zip(waveforms, counts, strict=True)):
            if count < 2:
                raise InputError(
                    f"audio {first + index} has {wave.size} samples, expected at least {2 * hop}: "
                    "Parakeet divides by the deviation of two frames or more."
                )
        # As `torch.stft`, which centers a window that is shorter than the transform.
        before = (n_fft - length) // 2
        window = np.pad(np.hanning(length), (before, n_fft - length - before))
        bins = settings["feature_size"]
        filters = _parakeet_filters(bins, n_fft, self.sampling_rate)
        frames = max(counts, default=0) + 1
        features = np.zeros((len(waveforms), frames, bins), np.float32)
        for row, wave, count in zip(features, waveforms, counts, strict=True):
            emphasized = wave.copy()
            emphasized[1:] -= np.float32(settings["preemphasis"]) * wave[:-1]
            # Frames are centred on their samples, with silence at both ends.
            padded = np.pad(emphasized.astype(np.float64), n_fft // 2)
            windows = sliding_window_view(padded, n_fft)[::hop][:count]
            energies = _mel_energies(_blocks(windows), window, n_fft, filters, 0)
            values = np.log(energies + _PARAKEET_FLOOR)
            deviation = values.std(axis=0, ddof=1)
            row[:count] = (values - values.mean(axis=0)) / (deviation + _PARAKEET_EPSILON)
        mask = np.zeros((len(waveforms), frames), np.int64)
        for row, count in zip(mask, counts, strict=True):
            row[:count] = 1
        return {"input_features": features, "attention_mask": mask}

    def _normalize(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """Normalize each mel bin over the frames of one waveform."""
        settings = self.settings
        if settings["do_ceptral_normalize"] and settings["normalize_means"]:
            features = features - features.mean(axis=0)
        if settings["do_ceptral_normalize"] and settings["normalize_vars"]:
            deviation = features.std(axis=0)
            deviation[deviation == 0] = 1  # silence; transformers divides zero by zero
            features = features / deviation
        return features

    def _pad(self, waveform: Waveform, samples: int) -> Waveform:
        missing = samples - waveform.size
        sides = (missing, 0) if self.settings["padding_side"] == "left" else (0, missing)
        return np.pad(waveform, sides, constant_values=self.settings["padding_value"])


class WhisperSpectrogram:
    """The features of one recording: 100 frames a second, 32 kB of 80 mel bins.

    The loudest value of all sets the floor of each window, so all frames are computed first.
    """

    def __init__(self, bins: int) -> None:
        self.frames = 0
        """Number of frames, without the last one, which transformers drops."""
        self.bins = bins
        self._blocks: list[NDArray[np.float32]] = []
        """(frames, bins) each."""
        self._loudest = -np.inf

    def append(self, log: NDArray[np.float32]) -> None:
        """Add decimal logarithms of energies, (frames, bins)."""
        if len(log):
            self._blocks.append(log)
            self.frames += len(log)
            self._loudest = max(self._loudest, float(log.max()))

    def window(self, start: int, frames: int) -> NDArray[np.float32]:
        """Return the features of consecutive frames, 0 behind the last one: (bins, frames)."""
        features = np.zeros((frames, self.bins), np.float32)
        first = 0
        for block in self._blocks:
            log = block[max(start - first, 0) : max(start + frames - first, 0)]
            target = features[max(first - start, 0) :][: len(log)]
            np.maximum(log, np.float32(self._loudest) - np.float32(_WHISPER_RANGE), out=target)
            target += np.float32(4)
            target /= np.float32(4)
            first += len(block)
        return np.ascontiguousarray(features.T)


def mel_filters(
    bins: int, n_fft: int, sampling_rate: int, *, low: float, high: float, slaney: bool
) -> NDArray[np.float64]:
    """Return triangular filters that are evenly spaced on a mel scale, (frequencies, bins).

    Args:
        bins: number of filters.
        n_fft: length of the Fourier transform, which gives n_fft // 2 + 1 frequencies.
        sampling_rate: in Hz.
        low: frequency in Hz at which the first filter starts.
        high: frequency in Hz at which the last filter ends.
        slaney: use the mel scale of Slaney's Auditory Toolbox and give every filter the same area,
            as librosa does; else Kaldi's scale, on which its filters are triangles of height 1.
    """
    frequencies = n_fft // 2 + 1
    if slaney:
        first, last = _slaney_mels(np.array([low, high]))
        edges = _slaney_hertz(np.linspace(first, last, bins + 2))
        positions = np.linspace(0, sampling_rate // 2, frequencies)
    else:
        first, last = _kaldi_mels(np.array([low, high]))
        edges = np.linspace(first, last, bins + 2)
        positions = _kaldi_mels(np.arange(frequencies) * np.float64(sampling_rate / n_fft))
    # Filter i rises from edge i to edge i + 1 and falls to edge i + 2: (frequencies, bins).
    rising = (positions[:, None] - edges[:-2]) / np.diff(edges)[:-1]
    falling = (edges[2:] - positions[:, None]) / np.diff(edges)[1:]
    filters = np.maximum(0, np.minimum(rising, falling))
    if slaney:
        # The area of a triangle is half its width times its height.
        filters *= 2 / (edges[2:] - edges[:-2])
    return filters


# Slaney's mel scale is linear up to 1000 Hz, which are 15 mels, and logarithmic above.
_LINEAR_HERTZ, _LINEAR_MELS = 1000.0, 15.0
_LOG_STEP = np.log(6.4) / 27


def _slaney_mels(hertz: NDArray[np.float64]) -> NDArray[np.float64]:
    ratio = np.maximum(hertz, _LINEAR_HERTZ) / _LINEAR_HERTZ
    return np.where(ratio > 1, _LINEAR_MELS + np.log(ratio) / _LOG_STEP, 3 * hertz / 200)


def _slaney_hertz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    above = np.maximum(mels - _LINEAR_MELS, 0)
    return np.where(above > 0, _LINEAR_HERTZ * np.exp(_LOG_STEP * above), 200 * mels / 3)


def _kaldi_mels(hertz: NDArray[np.float64]) -> NDArray[np.float64]:
    # Source: `MelScale` in Kaldi's feat/mel-computations.h.
    return np.asarray(1127 * np.log(1 + hertz / 700))


@lru_cache(maxsize=8)
def _whisper_filters(bins: int, n_fft: int, sampling_rate: int) -> NDArray[np.float64]:
    return mel_filters(bins, n_fft, sampling_rate, low=0, high=_WHISPER_MAX_FREQUENCY, slaney=True)


@lru_cache(maxsize=8)
def _parakeet_filters(bins: int, n_fft: int, sampling_rate: int) -> NDArray[np.float64]:
    return mel_filters(bins, n_fft, sampling_rate, low=0, high=sampling_rate / 2, slaney=True)


@lru_cache(maxsize=8)
def _kaldi_filters(bins: int) -> NDArray[np.float64]:
    return mel_filters(bins, _KALDI_FFT, _KALDI_RATE, low=20, high=_KALDI_RATE / 2, slaney=False)


def _kaldi_features(
    waveform: Waveform, window: NDArray[np.float64], bins: int, *, dither: float = 0
) -> NDArray[np.float32]:
    """Return Kaldi's log-mel filter bank features, float32 (frames, bins)."""
    frames = sliding_window_view(waveform, _KALDI_FRAME)[::_KALDI_HOP]
    generator = np.random.default_rng(0)

    def prepared() -> Iterator[NDArray[np.float64]]:
        for block in _blocks(frames):
            values = block.astype(np.float64)
            if dither:
                values += dither * generator.standard_normal(values.shape)
            values -= values.mean(axis=1, keepdims=True)
            # Pre-emphasis subtracts a part of the sample before. The first sample of a frame has
            # none, and Kaldi takes the sample itself in its place.
            emphasized = values.copy()
            emphasized[:, 1:] -= _KALDI_PREEMPHASIS * values[:, :-1]
            emphasized[:, 0] *= 1 - _KALDI_PREEMPHASIS
            yield emphasized

    energies = _mel_energies(prepared(), window, _KALDI_FFT, _kaldi_filters(bins), _KALDI_FLOOR)
    return np.log(energies).astype(np.float32)


def _mel_energies(
    blocks: Iterator[NDArray[np.float64]],
    window: NDArray[np.float64],
    n_fft: int,
    filters: NDArray[np.float64],
    floor: float,
) -> NDArray[np.float64]:
    """Return the energy of frames in each mel filter, at least `floor`: (frames, bins)."""
    # rfft pads frames that are shorter than n_fft with zeros: (frames, n_fft // 2 + 1).
    energies = [
        np.abs(np.fft.rfft(block * window, n_fft, axis=1)) ** 2 @ filters for block in blocks
    ]
    return np.maximum(np.concatenate(energies), floor)


def _centred_frames(
    blocks: Iterator[NDArray[np.float64]], length: int, hop: int
) -> Iterator[NDArray[np.float64]]:
    """Yield the frames of consecutive samples but for the last frame, (frames, length) each.

    Frames are centred on their samples: half a frame of mirrored samples is added at both ends, as
    by torch.stft with `center=True`.
    """
    half, samples, is_first = length // 2, np.empty(0), True
    for block in blocks:
        samples = np.concatenate([samples, block])
        if is_first and len(samples) <= half:
            continue
        if is_first:
            samples, is_first = np.concatenate([samples[half:0:-1], samples]), False
        # What the end is mirrored from stays, with the start of the next frame.
        count = max((len(samples) - half - 1 - length) // hop + 1, 0)
        if count:
            yield sliding_window_view(samples, length)[::hop][:count]
            samples = samples[count * hop :]
    samples = np.concatenate([samples, samples[-2 : -half - 2 : -1]])
    yield sliding_window_view(samples, length)[::hop][:-1]


def _blocks(frames: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Yield consecutive frames, so few that copies of them are small."""
    rows = max(_BLOCK_VALUES // frames.shape[1], 1)
    for start in range(0, len(frames), rows):
        yield frames[start : start + rows]


def _whisper_frames(settings: Mapping[str, Any]) -> int:
    """Return the number of frames of a chunk, without the last one, which transformers drops."""
    samples: int = settings["chunk_length"] * settings["sampling_rate"]
    frames: int = (samples - settings["n_fft"] % 2) // settings["hop_length"]
    return frames


def _mask(lengths: Sequence[int]) -> NDArray[np.int64]:
    """Return a mask of ones for each length, padded on the right with zeros: (rows, longest)."""
    positions = np.arange(max(lengths, default=0))
    return (positions < np.array(lengths, np.int64)[:, None]).astype(np.int64)


def _check(waveform: Waveform, name: str) -> Waveform:
    if waveform.ndim != 1 or waveform.dtype != np.float32:
        raise InputError(
            f"{name} is an array of {waveform.dtype} {waveform.shape}, expected float32 (samples,)."
        )
    if not waveform.size:
        raise InputError(f"{name} has no samples.")
    return waveform


def _check_settings(file: Path, kind: str, settings: Mapping[str, Any]) -> None:
    """Raise ArtifactError for values with which the features cannot be computed as transformers."""

    def refuse(key: str, expected: str) -> ArtifactError:
        return ArtifactError(f"{file}: {key} is {settings[key]!r}, expected {expected}.")

    if kind == "Wav2Vec2" and settings["feature_size"] != 1:
        raise refuse("feature_size", "1")
    if kind != "Whisper" and settings.get("padding_side") == "left":
        raise refuse("padding_side", "'right'")
    if kind == "Parakeet" and settings["win_length"] > settings["n_fft"]:
        raise refuse("win_length", f"up to n_fft, which is {settings['n_fft']}")
    if kind in ("AST", "Speech2Text") and settings["sampling_rate"] != _KALDI_RATE:
        raise refuse("sampling_rate", str(_KALDI_RATE))
    if kind == "Whisper":
        samples = settings["chunk_length"] * settings["sampling_rate"]
        if not 1 <= _whisper_frames(settings) <= MAX_FRAMES:
            raise refuse("hop_length", f"1 to {MAX_FRAMES} hops in {samples} samples")
        if settings["n_fft"] // 2 >= samples:
            raise refuse("n_fft", f"less than twice the chunk's {samples} samples")

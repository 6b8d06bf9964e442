"""Audio becomes the same features as with transformers' feature extractors."""

from __future__ import annotations

import importlib
import json
import re

import numpy as np
import pytest

from enginery.core.errors import ArtifactError, InputError
from enginery.runtime.audio.processor import AudioProcessor, mel_filters
from tests.environments import needs_transformers5
from tests.sounds import RATE, chirp, noise, silence, sine, speech
from tests.tolerances import EPSILON

# Both compute in float64 and round to float32, values of up to about 4.
ROUNDING = 8 * EPSILON
# With PyTorch, transformers' Whisper extractor transforms in float32. Its rounding is relative to
# the loudest amplitude, and amplitudes down to 4 decades below that are kept: 1e-7 / 1e-4 is 1e-3,
# and the logarithm over 4 a tenth of it.
FLOAT32_TRANSFORM = 1e-4

SOUNDS = [silence, sine, chirp, noise, speech]
SECONDS = [1 / RATE, 0.02, 1.0, 5.3, 30.0, 31.7]


def extractor(module, name, **settings):
    path = f"transformers.models.{module}.feature_extraction_{module}"
    return getattr(importlib.import_module(path), f"{name}FeatureExtractor")(**settings)


def opened(directory, reference):
    reference.save_pretrained(directory)
    return AudioProcessor.open(directory)


def write_config(directory, **config):
    (directory / "preprocessor_config.json").write_text(json.dumps(config))


def open_kind(directory, kind, **settings):
    """A processor of a file with these settings of an extractor."""
    write_config(directory, feature_extractor_type=f"{kind}FeatureExtractor", **settings)
    return AudioProcessor.open(directory)


def without_torch(monkeypatch):
    module = importlib.import_module("transformers.models.whisper.feature_extraction_whisper")
    monkeypatch.setattr(module, "is_torch_available", lambda: False)


@pytest.mark.more
@pytest.mark.parametrize("sound", SOUNDS)
@pytest.mark.parametrize("bins", [80, 128])
def test_whisper_features_equal_transformers(tmp_path, monkeypatch, bins, sound):
    reference = extractor("whisper", "Whisper", feature_size=bins)
    processor = opened(tmp_path, reference)
    waveforms = [sound(seconds) for seconds in SECONDS]
    found = processor(waveforms)
    assert list(found) == [processor.input_name] == ["input_features"]
    features = found["input_features"]
    assert features.dtype == np.float32
    assert features.shape == (len(waveforms), bins, 3000)
    with_torch = reference(waveforms, sampling_rate=RATE, return_tensors="np")["input_features"]
    np.testing.assert_allclose(features, with_torch, rtol=0, atol=FLOAT32_TRANSFORM)
    without_torch(monkeypatch)
    in_numpy = reference(waveforms, sampling_rate=RATE, return_tensors="np")["input_features"]
    np.testing.assert_allclose(features, in_numpy, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("amplitude", [1e-6, 1e-3, 1.0, 32768.0])
def test_whisper_features_of_quiet_clipped_and_unscaled_sound(tmp_path, monkeypatch, amplitude):
    reference = extractor("whisper", "Whisper")
    processor = opened(tmp_path, reference)
    wave = amplitude * (3 * speech(2.0)).clip(-1, 1)
    without_torch(monkeypatch)
    expected = reference(wave, sampling_rate=RATE, return_tensors="np")["input_features"]
    np.testing.assert_allclose(processor([wave])["input_features"], expected, atol=ROUNDING)


@pytest.mark.parametrize(
    "settings",
    [
        {"chunk_length": 2},
        {"n_fft": 512, "hop_length": 256, "feature_size": 40},
        {"n_fft": 401, "hop_length": 77, "chunk_length": 3},
        {"sampling_rate": 24_000, "chunk_length": 5},
        {"padding_value": 0.25, "chunk_length": 3},
        {"padding_side": "left", "chunk_length": 3},
        {"do_normalize": True, "return_attention_mask": True, "chunk_length": 3},
    ],
)
def test_whisper_settings(tmp_path, monkeypatch, settings):
    reference = extractor("whisper", "Whisper", **settings)
    processor = opened(tmp_path, reference)
    assert processor.sampling_rate == reference.sampling_rate
    waves = [speech(1.3), speech(4.0, seed=1)]
    without_torch(monkeypatch)
    expected = reference(waves, sampling_rate=reference.sampling_rate, return_tensors="np")
    found = processor(waves)["input_features"]
    np.testing.assert_allclose(found, expected["input_features"], rtol=0, atol=ROUNDING)


def test_dither_adds_the_same_noise_every_time(tmp_path):
    plain = open_kind(tmp_path, "Whisper", chunk_length=1)
    dithered = open_kind(tmp_path, "Whisper", chunk_length=1, dither=0.01)
    found = dithered([silence(1.0)])["input_features"]
    np.testing.assert_array_equal(found, dithered([silence(1.0)])["input_features"])
    # As noise of that amplitude, at every frequency.
    expected = plain([noise(1.0, amplitude=0.01)])["input_features"]
    assert abs(found.mean() - expected.mean()) < 0.01
    assert abs(found.std() - expected.std()) < 0.01


@pytest.mark.more
@pytest.mark.parametrize("sound", SOUNDS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"return_attention_mask": True},
        {"do_normalize": False},
        {"do_normalize": False, "return_attention_mask": True, "padding_value": -0.5},
    ],
)
def test_wav2vec2_values_equal_transformers(tmp_path, settings, sound):
    reference = extractor("wav2vec2", "Wav2Vec2", **settings)
    processor = opened(tmp_path, reference)
    for seconds in ([0.01], [1.0], [30.0], [31.7], [0.5, 2.0, 1.1]):
        waves = [sound(each) for each in seconds]
        expected = reference(waves, sampling_rate=RATE, padding=True, return_tensors="np")
        found = processor(waves)
        assert found.keys() == expected.keys()
        assert found["input_values"].dtype == np.float32
        np.testing.assert_array_equal(found["input_values"], expected["input_values"])
        if "attention_mask" in found:
            np.testing.assert_array_equal(found["attention_mask"], expected["attention_mask"])


@pytest.mark.more
@pytest.mark.parametrize("sound", SOUNDS)
@pytest.mark.parametrize(
    "settings",
    [{}, {"max_length": 99, "num_mel_bins": 40}, {"do_normalize": False}, {"mean": -6, "std": 2}],
)
def test_ast_values_equal_transformers(tmp_path, settings, sound):
    reference = extractor("audio_spectrogram_transformer", "AST", **settings)
    processor = opened(tmp_path, reference)
    waves = [sound(seconds) for seconds in (0.025, 0.9, 1.0, 10.24, 12.0)]
    expected = reference(waves, sampling_rate=RATE, return_tensors="np")["input_values"]
    found = processor(waves)["input_values"]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=EPSILON, atol=ROUNDING)


@pytest.mark.parametrize("sound", [chirp, noise, speech])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_mel_bins": 40, "feature_size": 40, "padding_value": 0.5},
        {"normalize_vars": False},
        {"normalize_means": False},
        {"do_ceptral_normalize": False},
    ],
)
def test_speech2text_features_equal_transformers(tmp_path, settings, sound):
    reference = extractor("speech_to_text", "Speech2Text", **settings)
    processor = opened(tmp_path, reference)
    waves = [sound(seconds) for seconds in (0.1, 1.0, 3.7)]
    expected = reference(waves, sampling_rate=RATE, padding=True, return_tensors="np")
    found = processor(waves)
    assert found.keys() == expected.keys()
    np.testing.assert_array_equal(found["attention_mask"], expected["attention_mask"])
    # It is divided by the deviation of a mel bin, which may be small; a sine has nearly none.
    tolerance = 5e-5 if reference.do_ceptral_normalize else ROUNDING
    np.testing.assert_allclose(
        found["input_features"], expected["input_features"], rtol=tolerance, atol=tolerance
    )


@needs_transformers5
@pytest.mark.parametrize("sound", [sine, chirp, noise, speech])
@pytest.mark.parametrize(
    "settings", [{}, {"feature_size": 128, "hop_length": 80, "win_length": 300, "preemphasis": 0.5}]
)
def test_parakeet_features_equal_transformers(tmp_path, settings, sound):
    reference = extractor("parakeet", "Parakeet", **settings)
    processor = opened(tmp_path, reference)
    for seconds in ([0.5], [0.1, 1.0, 3.7]):
        waves = [sound(duration) for duration in seconds]
        expected = reference(waves, sampling_rate=RATE, return_tensors="np")
        features = processor(waves)
        np.testing.assert_array_equal(features["attention_mask"], expected["attention_mask"])
        assert features["input_features"].dtype == np.float32
        real = expected["attention_mask"][..., None] * np.ones_like(features["input_features"])
        difference = np.abs(features["input_features"] - expected["input_features"]) * real
        # Quiet bins are divided by their deviation, which PyTorch's float32 rounds.
        assert np.quantile(difference, 0.99) < 2e-3
        assert difference.mean() < 2e-4


def test_speech2text_features_of_silence_are_zero(tmp_path):
    found = open_kind(tmp_path, "Speech2Text")([silence(1.0)])["input_features"]
    np.testing.assert_allclose(found, 0, atol=ROUNDING * 16)  # the logarithms are -16


@pytest.mark.parametrize("bins", [40, 80, 128])
def test_filters_equal_those_of_transformers(bins):
    from transformers.audio_utils import mel_filter_bank

    expected = mel_filter_bank(201, bins, 0.0, 8000.0, RATE, norm="slaney", mel_scale="slaney")
    found = mel_filters(bins, 400, RATE, low=0, high=8000, slaney=True)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("model_type", "kind", "input_name"),
    [
        ("wav2vec2", "Wav2Vec2", "input_values"),
        ("whisper", "Whisper", "input_features"),
        ("audio-spectrogram-transformer", "AST", "input_values"),
        ("speech_to_text", "Speech2Text", "input_features"),
    ],
)
def test_an_old_file_without_a_type_is_read_by_the_model_type(
    tmp_path, model_type, kind, input_name
):
    write_config(tmp_path, sampling_rate=16_000, padding_side="right")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    processor = AudioProcessor.open(tmp_path)
    assert (processor.kind, processor.input_name) == (kind, input_name)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("Clap", {}, "'ClapFeatureExtractor' is not supported. Supported: WhisperFeatureExtractor"),
        ("Wisper", {}, "did you mean 'Whisper'?"),
        ("Wav2Vec2", {"feature_size": 2}, "feature_size is 2, expected 1"),
        ("Wav2Vec2", {"padding_side": "left"}, "padding_side is 'left', expected 'right'"),
        ("AST", {"sampling_rate": 8000}, "sampling_rate is 8000, expected 16000"),
        ("Whisper", {"hop_length": 1}, "hop_length is 1"),
        ("Whisper", {"n_fft": 1e9}, "n_fft is 1000000000"),
        ("Whisper", {"chunk_length": 3600, "sampling_rate": 768000}, "chunk_length is 3600"),
        (
            "Whisper",
            {"sampling_rate": "fast"},
            "is 'fast', expected a whole number",
        ),
    ],
)
def test_unsupported_extractors_and_settings_are_named(tmp_path, kind, settings, message):
    with pytest.raises(ArtifactError, match=re.escape(message)):
        open_kind(tmp_path, kind, **settings)


def test_file_without_a_type_is_refused(tmp_path):
    write_config(tmp_path)
    with pytest.raises(ArtifactError, match="feature extractor '' is not supported"):
        AudioProcessor.open(tmp_path)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ArtifactError, match=r"has no preprocessor_config\.json"):
        AudioProcessor.open(tmp_path)


@pytest.mark.parametrize(
    ("kind", "wave", "message"),
    [
        ("Whisper", np.zeros(0, np.float32), "audio 3 has no samples"),
        ("Whisper", np.zeros(800, np.float64), "audio 3 is an array of float64 (800,)"),
        ("Wav2Vec2", np.zeros((2, 800), np.float32), "expected float32 (samples,)"),
        ("AST", np.zeros(399, np.float32), "audio 3 has 399 samples, expected at least 400"),
        ("Speech2Text", np.zeros(399, np.float32), "audio 3 has 399 samples"),
        ("Parakeet", np.zeros(319, np.float32), "audio 3 has 319 samples, expected at least 320"),
    ],
)
def test_unusable_waveforms_are_named(tmp_path, kind, wave, message):
    with pytest.raises(InputError, match=re.escape(message)):
        open_kind(tmp_path, kind)([noise(1.0), wave], first=2)


@pytest.mark.parametrize("kind", ["Whisper", "Wav2Vec2", "AST", "Speech2Text", "Parakeet"])
def test_no_waveforms_give_an_empty_batch(tmp_path, kind):
    assert all(len(array) == 0 for array in open_kind(tmp_path, kind)([]).values())

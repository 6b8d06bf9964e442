"""Sounds made in code, as float32 samples in [-1, 1]: there are no recordings in the tests."""

from __future__ import annotations

import io
import wave

import numpy as np

RATE = 16_000


def sine(seconds, *, hertz=440.0, rate=RATE, amplitude=0.5):
    times = np.arange(round(seconds * rate)) / rate
    return (amplitude * np.sin(2 * np.pi * hertz * times)).astype(np.float32)


def chirp(seconds, *, low=80.0, high=7000.0, rate=RATE, amplitude=0.7):
    """A tone that rises from one frequency to another, and starts and ends softly."""
    times = np.arange(round(seconds * rate)) / rate
    phase = low * times + (high - low) * times**2 / (2 * max(seconds, 1e-9))
    edges = np.minimum(times, times[::-1]) * 50 if len(times) else times
    return (amplitude * edges.clip(0, 1) * np.sin(2 * np.pi * phase)).astype(np.float32)


def noise(seconds, *, rate=RATE, amplitude=0.1, seed=0):
    samples = np.random.default_rng(seed).standard_normal(round(seconds * rate))
    return (amplitude * samples).clip(-1, 1).astype(np.float32)


def speech(seconds, *, rate=RATE, seed=0):
    """Vowels of changing pitch, with pauses and hiss: harmonics weighted by three formants."""
    random = np.random.default_rng(seed)
    count = round(seconds * rate)
    times = np.arange(count) / rate
    pitch = 120 + 30 * np.sin(2 * np.pi * 0.9 * times + random.uniform(0, 6))
    phase = 2 * np.pi * np.cumsum(pitch) / rate
    voice = np.zeros(count)
    for number in range(1, 40):
        gains = sum(
            np.exp(-(((number * pitch - centre) / width) ** 2))
            for centre, width in ((500 + 200 * np.sin(times), 120), (1500, 200), (2600, 300))
        )
        voice += gains * np.sin(number * phase) / number**0.5
    spoken = np.sin(2 * np.pi * 1.7 * times) > -0.4
    voice = 0.2 * voice * spoken + 0.002 * random.standard_normal(count)
    return voice.clip(-1, 1).astype(np.float32)


def recording(seconds, *, seed=0):
    """Voices, tones and noise of changing loudness, a few seconds each."""
    random = np.random.default_rng(seed)
    parts, total = [], 0.0
    while total < seconds:
        length = float(random.uniform(1, 7))
        kind = random.choice([speech, chirp, sine, noise])
        more = {"seed": int(random.integers(99))} if kind in (speech, noise) else {}
        parts.append(kind(length, **more) * np.float32(random.uniform(0.1, 1)))
        total += length
    return np.concatenate(parts)[: round(seconds * RATE)]


def silence(seconds, *, rate=RATE):
    return np.zeros(round(seconds * rate), np.float32)


def wav(samples, rate=RATE):
    """Return the samples as a WAV file of 16 bits."""
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    return content.getvalue()

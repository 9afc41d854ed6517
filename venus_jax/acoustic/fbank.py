"""What the voice's networks hear of a prompt: Kaldi filter banks for the speaker encoder, a 24 kHz mel for the flow.

NumPy, on the host. The speech tokenizer's 128-bin log-mel is `media.mel.log_mel(samples, num_mels=128)`.
"""

from __future__ import annotations

import functools

import numpy as np

from venus_jax.acoustic.config import OUTPUT_RATE, SAMPLES_PER_FRAME
from venus_jax.config import SAMPLE_RATE
from venus_jax.errors import MediaError
from venus_jax.media import mel

FRAME, SHIFT, FFT_SIZE = 400, 160, 512  # samples at 16 kHz: 25 ms every 10 ms, to the next power of two
NUM_BINS = 80
LOWEST = 20.0  # Hz
PREEMPHASIS = 0.97
POWER_FLOOR = float(np.finfo(np.float32).eps)

PROMPT_FFT = 1920  # samples at 24 kHz
PROMPT_PADDING = (PROMPT_FFT - SAMPLES_PER_FRAME) // 2
MAGNITUDE_FLOOR = 1e-5


def kaldi_fbank(samples: np.ndarray) -> np.ndarray:
    """Log-mel energies as Kaldi's `compute-fbank-feats --dither=0` and torchaudio's `kaldi.fbank` give them.

    Whole frames only (`snip_edges`); each loses its mean, is pre-emphasised by 0.97 and weighted by Povey's window;
    power spectrum, 80 triangles on the mel scale from 20 Hz to 8 kHz, natural logarithm of at least float32's epsilon.
    Checked against the `kaldi-native-fbank` library. Rule: minicpmo45.md 6.5, which feeds samples in [-1, 1] without
    Kaldi's usual 16-bit scale, so that the floor is heard in quiet passages.

    Args:
      samples: floating [N], 16 kHz mono, N at least 400.

    Returns:
      float32 [1 + (N - 400) // 160, 80].

    Raises:
      MediaError: not floating-point mono samples, or fewer than one frame.
    """
    samples = mel.mono(samples)
    if len(samples) < FRAME:
        raise MediaError(f"filter banks need at least {FRAME} samples, got {len(samples)}")
    frames = np.lib.stride_tricks.sliding_window_view(samples, FRAME)[::SHIFT].astype(np.float64)
    frames = frames - frames.mean(axis=1, keepdims=True)
    frames = frames - PREEMPHASIS * np.concatenate([frames[:, :1], frames[:, :-1]], axis=1)
    spectrum = np.fft.rfft(frames * _povey_window(), FFT_SIZE)
    power = spectrum.real**2 + spectrum.imag**2
    return np.log(np.maximum(power @ _kaldi_filters(), POWER_FLOOR)).astype(np.float32)


def speaker_features(samples: np.ndarray) -> np.ndarray:
    """What the speaker encoder reads: `kaldi_fbank` less its mean over time, float32 [T, 80]."""
    bank = kaldi_fbank(samples)
    return bank - bank.mean(axis=0)


def prompt_mel(samples: np.ndarray) -> np.ndarray:
    """Log-mel spectrum of a prompt on the flow's grid, 50 frames a second (minicpmo45.md 6.5).

    The signal is reflected by 720 samples at both ends; Hann window and FFT of 1920 samples every 480; magnitude, 80
    Slaney filters from 0 to 8 kHz, natural logarithm of at least 1e-5.

    Args:
      samples: floating [N], 24 kHz mono, N more than 720.

    Returns:
      float32 [N // 480, 80].

    Raises:
      MediaError: not floating-point mono samples, or too few of them.
    """
    samples = mel.mono(samples)
    if len(samples) <= PROMPT_PADDING:
        raise MediaError(f"a prompt's spectrum needs more than {PROMPT_PADDING} samples, got {len(samples)}")
    padded = np.pad(samples, PROMPT_PADDING, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, PROMPT_FFT)[::SAMPLES_PER_FRAME]
    spectrum = np.fft.rfft((frames * mel.hann_window(PROMPT_FFT)).astype(np.float64))
    magnitude = np.sqrt(spectrum.real**2 + spectrum.imag**2 + 1e-9)
    filters = mel.mel_filters(NUM_BINS, PROMPT_FFT, OUTPUT_RATE)
    return np.log(np.maximum(magnitude @ filters, MAGNITUDE_FLOOR)).astype(np.float32)


def _povey_window() -> np.ndarray:
    angle = 2 * np.pi * np.arange(FRAME) / (FRAME - 1)
    return (0.5 - 0.5 * np.cos(angle))**0.85


@functools.cache
def _kaldi_filters() -> np.ndarray:
    """Triangles whose sides are straight on the mel scale: float64 [257 bins, 80]; the highest bin is in none."""
    to_mel = lambda hz: 1127.0 * np.log1p(np.asarray(hz) / 700.0)
    edges = np.linspace(to_mel(LOWEST), to_mel(SAMPLE_RATE / 2), NUM_BINS + 2)
    low, centre, high = edges[:-2], edges[1:-1], edges[2:]
    bins = to_mel(np.arange(FFT_SIZE // 2 + 1) * SAMPLE_RATE / FFT_SIZE)[:, None]
    return np.maximum(0, np.minimum((bins - low) / (centre - low), (high - bins) / (high - centre)))

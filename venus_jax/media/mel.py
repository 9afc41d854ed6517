"""Log-mel spectra as the model's audio tower hears them: whole clips, and the units of a live stream.

NumPy, on the host. `mel_jax.stream_log_mel` is `StreamingMel` for use inside a jitted step; the sizes both follow are
here. The rules are those of the reference's Whisper feature extractor and of its "exact" streaming processor.
"""

from __future__ import annotations

import functools

import numpy as np

from venus_jax.config import FRAME_HOP, SAMPLE_RATE
from venus_jax.errors import MediaError

FFT_SIZE = 400  # samples a frame looks at, 25 ms
NUM_MELS = 80
NUM_BINS = FFT_SIZE // 2 + 1
HIGHEST = 8000.0  # Hz; where the filters end at any sample rate
LOG_FLOOR = -10.0  # log10 of the least power told apart; also the "fixed" floor
DYNAMIC_RANGE = 8.0  # decades below the loudest value that the "dynamic" floor keeps

CLIP_SAMPLES = 30 * SAMPLE_RATE  # a clip is heard in items of at most 30 s

# A unit of a stream is the reference's second unless said otherwise. The first is padded in front by 35 ms, of which 30
# are used, so that its last frame with context (and one redundant frame more) is complete; 80 samples stay behind for
# ever.
UNIT_SAMPLES = SAMPLE_RATE
UNIT_FRAMES = UNIT_SAMPLES // FRAME_HOP
EMBEDDING_SAMPLES = 10 * FRAME_HOP  # the audio tower makes one embedding of ten frames
REDUNDANCY = 2  # frames repeated from, and borrowed for, the neighbouring units: the context of the convolutions
PADDING = 560
LEFT_BEHIND = 80
DYNAMIC_FROM = 5 * SAMPLE_RATE  # samples heard before the dynamic floor replaces the fixed one
SLIDE_AT = 30 * SAMPLE_RATE  # samples at which the stream forgets its oldest `SLIDE_BY`
SLIDE_BY = 10 * SAMPLE_RATE


def hann_window(size: int = FFT_SIZE) -> np.ndarray:
    """Periodic Hann window, float32 [size]; angles in float32, as the reference's, to within its last bit."""
    angle = np.arange(size, dtype=np.float32) * np.float32(2 * np.pi / size)
    cosine = np.cos(angle, dtype=np.float64).astype(np.float32)
    return np.float32(0.5) - np.float32(0.5) * cosine


@functools.cache
def mel_filters(num_mels: int = NUM_MELS, fft_size: int = FFT_SIZE, sample_rate: int = SAMPLE_RATE) -> np.ndarray:
    """Slaney's mel filter bank with Slaney's area normalisation, 0 to 8 kHz: float64 [bins, mels], read-only.

    Bins are those of a real FFT: `fft_size // 2 + 1` from 0 to half the sample rate.
    """
    linear_step, knee = 200 / 3, 1000.0  # Hz a mel below the knee; above it the scale is logarithmic
    log_step = np.log(6.4) / 27

    mels = np.linspace(0, knee / linear_step + np.log(HIGHEST / knee) / log_step, num_mels + 2)
    hz = np.minimum(mels * linear_step, knee) * np.exp(log_step * np.maximum(mels - knee / linear_step, 0))
    low, centre, high = hz[:-2], hz[1:-1], hz[2:]
    bins = np.linspace(0, sample_rate / 2, fft_size // 2 + 1)[:, None]
    triangles = np.maximum(0, np.minimum((bins - low) / (centre - low), (high - bins) / (high - centre)))
    filters = triangles * (2 / (high - low))
    filters.setflags(write=False)
    return filters


def log_mel(samples: np.ndarray, floor: str = "dynamic", num_mels: int = NUM_MELS) -> np.ndarray:
    """Log-mel spectrum of a stretch of sound.

    Args:
      samples: floating [N], 16 kHz mono in [-1, 1], N > 200.
      floor: "dynamic" lifts everything to 8 decades below the loudest value, "fixed" to 1e-10 (which is no lift).
      num_mels: filters; 80 for the audio tower, 128 for the speech tokenizer.

    Returns:
      float32 [num_mels, N // 160]: (max(log10 power, floor) + 4) / 4. Frame t is centred on sample 160 t; the signal is
      reflected at both ends.

    Raises:
      MediaError: not floating-point mono samples, or too few of them.
    """
    samples = mono(samples)
    if len(samples) <= FFT_SIZE // 2:
        raise MediaError(f"a log-mel spectrum needs more than {FFT_SIZE // 2} samples, got {len(samples)}")
    padded = np.pad(samples, FFT_SIZE // 2, mode="reflect")
    whole = len(samples) // FRAME_HOP * FRAME_HOP
    frames = np.lib.stride_tricks.sliding_window_view(padded, FFT_SIZE)[:whole:FRAME_HOP]
    # float64 from here: bins 100 dB below the loudest would else carry the rounding of the loud ones
    spectrum = np.fft.rfft((frames * hann_window()).astype(np.float64))
    power = spectrum.real**2 + spectrum.imag**2
    log = np.log10(np.maximum(power @ mel_filters(num_mels), 10**LOG_FLOOR)).astype(np.float32)
    if floor == "dynamic":
        log = np.maximum(log, log.max() - np.float32(DYNAMIC_RANGE))
    elif floor != "fixed":
        raise ValueError(f"floor is {floor!r}; expected 'dynamic' or 'fixed'")
    return ((log + np.float32(4)) / np.float32(4)).T


def split_clip(samples: np.ndarray) -> list[np.ndarray]:
    """Cuts a clip [N] into consecutive items of 30 s, the last one shorter; each is heard on its own."""
    return [samples[i:i + CLIP_SAMPLES] for i in range(0, len(samples), CLIP_SAMPLES)]


def clip_log_mel(samples: np.ndarray) -> np.ndarray:
    """Log-mel spectrum of one item of a clip, as if followed by silence up to 30 s.

    Args:
      samples: floating [N], 16 kHz mono, 0 < N <= 480,000 (see `split_clip`).

    Returns:
      float32 [80, ceil(N / 160)]; the dynamic floor.

    Raises:
      MediaError: empty, longer than 30 s, or not floating-point mono samples.
    """
    samples = mono(samples)
    if not 0 < len(samples) <= CLIP_SAMPLES:
        raise MediaError(f"a clip item has {len(samples)} samples; expected 1 to {CLIP_SAMPLES} (30 s)")
    # Frames of pure silence can neither be the loudest nor are they kept: one window of it does for the whole 30 s.
    silence = min(FFT_SIZE, CLIP_SAMPLES - len(samples))
    return log_mel(np.pad(samples, (0, silence)))[:, :-(-len(samples) // FRAME_HOP)]


def unit_frames(unit_samples: int) -> int:
    """Mel frames that one unit of a stream adds.

    Raises:
      MediaError: a length that holds no whole number of embeddings, at least two, or that does not divide the 10 s by
        which a stream forgets.
    """
    if unit_samples < 2 * EMBEDDING_SAMPLES or unit_samples % EMBEDDING_SAMPLES or SLIDE_BY % unit_samples:
        raise MediaError(f"a unit of {unit_samples} samples; expected a multiple of {EMBEDDING_SAMPLES} (0.1 s), at "
                         f"least {2 * EMBEDDING_SAMPLES}, that divides {SLIDE_BY} (10 s)")
    return unit_samples // FRAME_HOP


class StreamingMel:
    """Log-mel frames of a live stream, one unit a call, by recomputing the whole remembered sound each time.

    Frame t of the stream is centred on its sample 160 t, where sample 0 lies 560 before the client's first. Unit k is
    frames u k - r to u k + u - 1 + r with u = `unit_frames` and r = `redundancy`; unit 0 has nothing in front: 102
    frames of a second, then 104. Units of another length cut the same signal at another grain; the floor and the
    forgetting go by samples, as with units of a second.

    Attributes:
      buffer: float32 samples remembered, less than 30 s.
      pending: float32 samples received and not yet used.
      base_frame: the stream's frame at the start of `buffer`.
      units: units emitted.
    """

    def __init__(self, redundancy: int = REDUNDANCY, unit_samples: int = UNIT_SAMPLES):
        """Raises MediaError for an unsupported `unit_samples`: see `unit_frames`."""
        self.redundancy = redundancy
        self.unit_samples, self.unit_frames = unit_samples, unit_frames(unit_samples)
        self.buffer = np.zeros(0, np.float32)
        self.pending = np.zeros(0, np.float32)
        self.base_frame = 0
        self.units = 0

    def push(self, samples: np.ndarray) -> np.ndarray:
        """Takes the client's next samples and returns the unit's frames.

        Args:
          samples: floating [N], 16 kHz mono; `unit_samples` a unit. A short first unit is padded with zeros in front.

        Returns:
          float32 [80, u + 2 r], in unit 0 [80, u + r].

        Raises:
          MediaError: too few samples for the unit, or not floating-point mono; nothing is consumed.
        """
        received = np.concatenate([self.pending, mono(samples)])
        if self.units == 0:
            received = np.pad(received, (max(0, self.unit_samples + PADDING - len(received)), 0))
        used = self.unit_samples if self.units else self.unit_samples + PADDING - LEFT_BEHIND
        if len(received) < used:
            raise MediaError(f"unit {self.units} has {len(received)} samples; expected at least {used}")
        self.buffer = np.concatenate([self.buffer, received[:used]])
        self.pending = received[used:]
        if len(self.buffer) >= SLIDE_AT:
            self.buffer = self.buffer[SLIDE_BY:]
            self.base_frame += SLIDE_BY // FRAME_HOP
        mel = log_mel(self.buffer, "fixed" if len(self.buffer) < DYNAMIC_FROM else "dynamic")
        start = self.units * self.unit_frames - self.base_frame
        self.units += 1
        return mel[:, max(0, start - self.redundancy):start + self.unit_frames + self.redundancy]


def mono(samples: np.ndarray) -> np.ndarray:
    """Samples as float32 [N]; raises MediaError where they are not floating-point mono."""
    samples = np.asarray(samples)
    if samples.ndim != 1 or not np.issubdtype(samples.dtype, np.floating):
        raise MediaError(f"expected floating-point mono samples [N], got {samples.dtype} {list(samples.shape)}")
    return samples.astype(np.float32, copy=False)

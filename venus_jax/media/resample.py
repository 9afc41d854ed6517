"""Sample rate conversion that may be fed in pieces of any size."""

from __future__ import annotations

import numpy as np

from venus_jax.errors import MediaError

LOWEST_RATE, HIGHEST_RATE = 1_000, 768_000  # Hz; beyond, a header is damaged, and a small file would become a huge one


class Resampler:
    """Converts a mono stream from one rate to another (soxr, high quality).

    The concatenation of what `push` and `flush` return depends on the samples alone, never on how they were cut:
    bit for bit. Output lags the input by the filter's length until `flush`. Equal rates pass samples through.
    """

    def __init__(self, in_rate: float, out_rate: float):
        """Rates in Hz.

        Raises:
          MediaError: a rate that is not between `LOWEST_RATE` and `HIGHEST_RATE`.
        """
        if not all(LOWEST_RATE <= rate <= HIGHEST_RATE for rate in (in_rate, out_rate)):
            raise MediaError(f"cannot resample from {in_rate} Hz to {out_rate} Hz; expected rates from "
                             f"{LOWEST_RATE} to {HIGHEST_RATE} Hz")
        self._stream = None
        if in_rate != out_rate:
            import soxr
            self._stream = soxr.ResampleStream(in_rate, out_rate, num_channels=1, dtype="float32", quality="HQ")

    def push(self, samples: np.ndarray) -> np.ndarray:
        """The output, float32 [M], that has become certain with `samples` [N]; M may be 0."""
        samples = np.asarray(samples, np.float32)
        return samples if self._stream is None else self._stream.resample_chunk(samples)

    def flush(self) -> np.ndarray:
        """The rest of the output, float32 [M]. Afterwards the resampler is as new."""
        if self._stream is None:
            return np.zeros(0, np.float32)
        rest = self._stream.resample_chunk(np.zeros(0, np.float32), last=True)
        self._stream.clear()
        return rest


def resample(samples: np.ndarray, in_rate: float, out_rate: float) -> np.ndarray:
    """A whole signal [N] at another rate: float32 [round(N * out_rate / in_rate)], give or take one sample."""
    resampler = Resampler(in_rate, out_rate)
    return np.concatenate([resampler.push(samples), resampler.flush()])

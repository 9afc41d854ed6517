"""A sound as a caller has it, a file or an array, to mono samples at the rate a network wants."""

from __future__ import annotations

import os

import numpy as np

from venus_jax.errors import MediaError
from venus_jax.media import decode
from venus_jax.media.resample import resample

MAX_CHANNELS = 32  # a longer second axis is a [channels, N] array


def mono(sound: str | os.PathLike | np.ndarray, sample_rate: float | None, wanted: int) -> np.ndarray:
    """Samples of a file or an array; channels are averaged.

    Args:
      sound: a path, see `media.decode.read_audio`; or floating [N] or [N, channels], any precision, in [-1, 1].
      sample_rate: Hz of the array; a file says its own.
      wanted: Hz of the result.

    Returns:
      float32 [M].

    Raises:
      MediaError: a file that cannot be read; an array of another type or shape, empty, or not finite; no usable rate.
    """
    if isinstance(sound, (str, os.PathLike)):
        return decode.read_audio(sound, wanted)
    samples = np.asarray(sound)
    if samples.ndim not in (1, 2) or not np.issubdtype(samples.dtype, np.floating) or (
            samples.ndim == 2 and not 1 <= samples.shape[1] <= MAX_CHANNELS):
        raise MediaError(f"expected a path or floating-point samples [N] or [N, channels], got {samples.dtype} "
                         f"{list(samples.shape)}")
    if not len(samples):
        raise MediaError("a sound of 0 samples; expected some")
    if sample_rate is None:
        raise MediaError("an array of samples needs its sample_rate in Hz")
    samples = samples.reshape(len(samples), -1).mean(axis=1)
    if not np.isfinite(samples).all():
        raise MediaError("the sound has samples that are infinite or not a number; expected finite ones")
    return resample(samples, sample_rate, wanted)

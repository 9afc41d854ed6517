"""Resampling must not depend on how a stream is cut: a live microphone and a file give the model the same samples."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from venus_jax.errors import MediaError
from venus_jax.media.resample import Resampler, resample

RATES = [(8000, 16_000), (11_025, 16_000), (22_050, 16_000), (24_000, 16_000), (44_100, 16_000), (48_000, 16_000),
         (96_000, 16_000), (16_000, 24_000), (24_000, 48_000), (16_000, 16_000)]


def noise(n: int) -> np.ndarray:
    return np.random.default_rng(n).standard_normal(n).astype(np.float32) * 0.2


def in_pieces(x: np.ndarray, sizes, in_rate: int, out_rate: int) -> np.ndarray:
    resampler, out, at = Resampler(in_rate, out_rate), [], 0
    for size in sizes:
        out.append(resampler.push(x[at:at + size]))
        at += size
    return np.concatenate([*out, resampler.push(x[at:]), resampler.flush()])


@pytest.mark.parametrize("in_rate, out_rate", RATES)
def test_pieces_of_20_ms_give_the_same_samples(in_rate, out_rate):
    x = noise(3 * in_rate + 77)
    whole = resample(x, in_rate, out_rate)
    assert whole.dtype == np.float32
    assert abs(len(whole) - len(x) * out_rate / in_rate) <= 1
    piece = in_rate // 50
    np.testing.assert_array_equal(whole, in_pieces(x, [piece] * (len(x) // piece), in_rate, out_rate))


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(RATES), st.lists(st.integers(0, 9000), max_size=8))
def test_any_pieces_give_the_same_samples(rates, sizes):
    x = noise(20_000)
    np.testing.assert_array_equal(resample(x, *rates), in_pieces(x, sizes, *rates))


@pytest.mark.parametrize("in_rate, out_rate", RATES)
def test_a_tone_keeps_pitch_level_and_time(in_rate, out_rate):
    tone = np.sin(2 * np.pi * 440 * np.arange(in_rate) / in_rate)
    wanted = np.sin(2 * np.pi * 440 * np.arange(out_rate) / out_rate)
    middle = slice(out_rate // 10, -out_rate // 10)
    np.testing.assert_allclose(resample(tone, in_rate, out_rate)[middle], wanted[middle], atol=1e-3)


def test_what_the_new_rate_cannot_hold_is_removed():
    tone = np.sin(2 * np.pi * 11_000 * np.arange(48_000) / 48_000)  # would come back as 5 kHz
    assert np.abs(resample(tone, 48_000, 16_000)[1600:-1600]).max() < 1e-3


def test_a_flushed_resampler_is_as_new():
    resampler, x = Resampler(44_100, 16_000), noise(5000)
    first = np.concatenate([resampler.push(x), resampler.flush()])
    np.testing.assert_array_equal(first, np.concatenate([resampler.push(x), resampler.flush()]))


@pytest.mark.parametrize("rates", [(0, 16_000), (16_000, -1), (float("nan"), 16_000), (1, 16_000), (16_000, 10**9)])
def test_impossible_rates_are_refused(rates):
    with pytest.raises(MediaError, match="expected rates from 1000 to 768000 Hz"):
        Resampler(*rates)

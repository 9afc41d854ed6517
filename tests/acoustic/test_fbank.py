"""Filter banks against Kaldi's own code, the prompt's mel against the recorded one."""

import kaldi_native_fbank
import numpy as np
import pytest

from venus_jax.acoustic import fbank
from venus_jax.errors import MediaError
from venus_jax.media import mel


@pytest.fixture(scope="module")
def speech(golden):
    return np.load(golden / "audio/speech.npz")["wave_i16"].astype(np.float32) / 32768


def kaldis(samples):
    options = kaldi_native_fbank.FbankOptions()
    options.frame_opts.dither, options.frame_opts.samp_freq, options.mel_opts.num_bins = 0, 16_000, 80
    bank = kaldi_native_fbank.OnlineFbank(options)
    bank.accept_waveform(16_000, samples.tolist())
    bank.input_finished()
    return np.stack([bank.get_frame(i) for i in range(bank.num_frames_ready)])


@pytest.mark.parametrize("count", [400, 559, 560, 48_000])
def test_filter_banks_are_kaldis(speech, count):
    """Theirs in float32: a quiet bin next to loud ones carries their rounding."""
    ours, theirs = fbank.kaldi_fbank(speech[8000:8000 + count]), kaldis(speech[8000:8000 + count])
    assert ours.shape == theirs.shape == (1 + (count - 400) // 160, 80) and ours.dtype == np.float32
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-3)
    assert np.abs(ours - theirs).mean() < 2e-5


def test_silence_is_the_floor(speech):
    np.testing.assert_array_equal(fbank.kaldi_fbank(np.full(800, 0.3)), np.float32(np.log(fbank.POWER_FLOOR)))
    assert fbank.kaldi_fbank(speech[:16_000]).min() >= np.float32(np.log(fbank.POWER_FLOOR))


def test_the_speakers_features_have_no_mean(speech):
    features = fbank.speaker_features(speech[:32_000])
    assert features.shape == (198, 80) and np.abs(features.mean(axis=0)).max() < 1e-5 and features.std() > 1


def test_features_of_a_prompt_are_the_recorded_ones(golden):
    """The recording was fed to both at its own rate."""
    recorded = np.load(golden / "token2wav/prompt_features.npz")
    start, count = int(recorded["wave_start"]), int(recorded["wave_len"])
    samples = np.load(golden / "audio/speech.npz")["wave_i16"][start:start + count].astype(np.float32) / 32768
    np.testing.assert_allclose(fbank.prompt_mel(samples).T, recorded["prompt_mel_24k"], rtol=0, atol=1e-3)
    np.testing.assert_allclose(mel.log_mel(samples, num_mels=128), recorded["s3_log_mel128"], rtol=0, atol=1e-3)


@pytest.mark.parametrize("bad, message", [(np.zeros(399), "at least 400 samples"),
                                          (np.zeros((2, 800)), "mono"), (np.zeros(800, np.int16), "floating-point")])
def test_what_is_no_sound_is_refused(bad, message):
    with pytest.raises(MediaError, match=message):
        fbank.kaldi_fbank(bad)
    if bad.dtype != np.float64 or bad.ndim > 1:
        with pytest.raises(MediaError, match=message):
            fbank.prompt_mel(bad)
    with pytest.raises(MediaError, match="more than 720"):
        fbank.prompt_mel(np.zeros(720))

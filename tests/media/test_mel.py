"""Log-mel on the host, against the recorded reference."""

import json

import numpy as np
import pytest

from venus_jax.errors import MediaError
from venus_jax.media import mel

BOUND = 1e-4  # the recording's own float32 noise reaches 7e-5 where no floor hides it


@pytest.fixture(scope="module")
def speech(golden):
    return np.load(golden / "audio/speech.npz")["wave_i16"].astype(np.float32) / 32768


def test_filters_and_window(golden):
    import librosa

    recorded = np.load(golden / "audio/mel_filters.npz")
    np.testing.assert_allclose(mel.mel_filters(), recorded["mel_filters"], rtol=0, atol=1e-12)
    librosas = librosa.filters.mel(sr=16_000, n_fft=400, n_mels=80)
    np.testing.assert_allclose(mel.mel_filters().T, librosas, rtol=0, atol=1e-8)
    np.testing.assert_allclose(mel.hann_window(), recorded["hann"], rtol=0, atol=1e-7)


def test_clip_is_the_recorded_one(golden):
    recorded = np.load(golden / "audio/clip.npz")
    got = mel.clip_log_mel(recorded["wave_i16"].astype(np.float32) / 32768)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, recorded["mel"], rtol=0, atol=BOUND)


@pytest.mark.parametrize("n", [1, 159, 160, 161, 16_000, 479_600, 479_900, 479_999, 480_000])
def test_clip_is_heard_as_if_padded_to_30_s(speech, n):
    samples = speech[-n:]  # loud to the very end
    whole = mel.log_mel(np.pad(samples, (0, 480_000 - n)))
    np.testing.assert_array_equal(mel.clip_log_mel(samples), whole[:, :-(-n // 160)])


def test_long_clips_are_cut_every_30_s():
    clip = np.arange(1_000_000, dtype=np.float32)
    pieces = mel.split_clip(clip)
    assert [len(p) for p in pieces] == [480_000, 480_000, 40_000]
    np.testing.assert_array_equal(np.concatenate(pieces), clip)


def test_floors(speech):
    fixed, dynamic = mel.log_mel(speech[:64_000], "fixed"), mel.log_mel(speech[:64_000])
    assert fixed.min() < dynamic.min() == pytest.approx(fixed.max() - 2)  # 8 decades, a quarter each
    np.testing.assert_array_equal(np.maximum(fixed, dynamic.min()), dynamic)
    assert (mel.log_mel(np.zeros(1600, np.float32), "fixed") == -1.5).all()
    with pytest.raises(ValueError, match="'loud'"):
        mel.log_mel(speech[:1600], "loud")


@pytest.mark.parametrize("name, case, redundancy", [
    ("streaming", "streaming", 2),
    ("streaming_mel_long", "streaming_long", 2),
    ("streaming_mel_noredundancy", "noredundancy", 0),
])
def test_stream_is_the_recorded_one(golden, speech, name, case, redundancy):
    recorded = np.load(golden / f"audio/{name}.npz")
    units = json.loads((golden / "audio/audio.json").read_text())[case]
    stream, compared = mel.StreamingMel(redundancy), 0
    for k, unit in enumerate(units):
        pending = len(stream.pending)
        got = stream.push(speech[k * 16_000:(k + 1) * 16_000])
        info, buffered = unit["info"], len(stream.buffer)
        assert got.shape == (80, unit["emitted"]) and stream.units == info["chunk_number"]
        assert len(stream.pending) == unit.get("left", 80)
        if k:
            assert pending + 16_000 - len(stream.pending) == unit["need_samples"]
        assert (buffered, stream.base_frame) == (info["buffer_len_samples"], info["base_T"])
        assert stream.base_frame * 160 == info["left_samples_dropped"]
        if f"mel{k}" in recorded:
            np.testing.assert_allclose(got, recorded[f"mel{k}"], rtol=0, atol=BOUND, err_msg=f"unit {k}")
            compared += 1
    assert compared == sum(key.startswith("mel") for key in recorded)


def test_neighbouring_units_share_frames(speech):
    stream = mel.StreamingMel()
    first, second = (stream.push(speech[k * 16_000:(k + 1) * 16_000]) for k in range(2))
    np.testing.assert_array_equal(first[:, -4:], second[:, :4])  # under the fixed floor: not even the floor differs


def test_a_second_may_come_with_more_or_less_as_long_as_it_is_there(speech):
    stream, even = mel.StreamingMel(), mel.StreamingMel()
    stream.push(speech[:16_000])
    even.push(speech[:16_000])
    with pytest.raises(MediaError, match="unit 1 has 15999 samples; expected at least 16000"):
        stream.push(speech[16_000:31_919])
    wanted = [even.push(speech[16_000:32_000]), even.push(speech[32_000:48_000])]
    np.testing.assert_array_equal(stream.push(speech[16_000:31_920]), wanted[0])  # the refused call left no trace
    np.testing.assert_array_equal(stream.push(speech[31_920:48_000]), wanted[1])


def test_half_seconds_cut_the_same_stream_finer(speech):
    """Under the fixed floor they are the frames of a second. Whenever a second is full, what is remembered is the same
    sound, and so are its last frames, floor and all."""
    sound = np.tile(speech, 2)[:45 * 16_000] * np.repeat(np.float32([1, 0.01, 0.2]), 15 * 16_000)
    whole, halves = mel.StreamingMel(), mel.StreamingMel(unit_samples=8000)
    for k, second in enumerate(sound.reshape(-1, 2, 8000)):
        wanted = whole.push(second.reshape(-1))
        for half in (0, 1):
            got = halves.push(second[half])
            assert got.shape == (80, 54 if k or half else 52)
            if half == 1:
                np.testing.assert_allclose(got, wanted[:, -54:], rtol=0, atol=1e-6)
            elif k < 4:
                np.testing.assert_allclose(got, wanted[:, :got.shape[1]], rtol=0, atol=1e-6)
        np.testing.assert_array_equal(halves.buffer, whole.buffer)
        np.testing.assert_array_equal(halves.pending, whole.pending)
        assert halves.base_frame == whole.base_frame
    assert whole.base_frame == 2000 and halves.units == 2 * whole.units == 90


@pytest.mark.parametrize("unit_samples", [16_000, 8000, 6400])
def test_the_floor_and_the_forgetting_go_by_samples(unit_samples):
    """A short first unit is padded by 35 ms; with 5 s remembered the floor turns dynamic; at 30 s the oldest 10 go.

    A bang and then silence: the silence stands at the fixed floor's -1.5, until the bang lifts it, until that is gone.
    """
    bang, silence = np.ones(unit_samples, np.float32), np.zeros(unit_samples, np.float32)
    stream = mel.StreamingMel(unit_samples=unit_samples)
    assert stream.push(bang).min() == -1.5
    np.testing.assert_array_equal(stream.buffer, np.arange(unit_samples + 480) >= 560)
    for k in range(1, 480_000 // unit_samples):
        lifted = stream.push(silence).min() > -1.5
        heard = (k + 1) * unit_samples + 480
        assert lifted == (80_000 <= heard < 480_000)
    assert stream.base_frame == 1000 and len(stream.buffer) == 320_480


@pytest.mark.parametrize("unit_samples", [-8000, 0, 1600, 5000, 4800, 12_800])
def test_unsupported_units_are_refused(unit_samples):
    with pytest.raises(MediaError, match=f"a unit of {unit_samples} samples; expected a multiple of 1600 .*divides"):
        mel.StreamingMel(unit_samples=unit_samples)
    assert [mel.unit_frames(n) for n in (3200, 6400, 8000, 16_000)] == [20, 40, 50, 100]


@pytest.mark.parametrize("function", [mel.log_mel, mel.clip_log_mel, lambda x: mel.StreamingMel().push(x)])
def test_wrong_samples_are_refused(function):
    with pytest.raises(MediaError, match=r"floating-point mono samples \[N\], got int16 \[16000\]"):
        function(np.zeros(16_000, np.int16))
    with pytest.raises(MediaError, match=r"got float32 \[2, 16000\]"):
        function(np.zeros((2, 16_000), np.float32))


def test_wrong_lengths_are_refused():
    with pytest.raises(MediaError, match="more than 200 samples, got 200"):
        mel.log_mel(np.zeros(200, np.float32))
    for n in (0, 480_001):
        with pytest.raises(MediaError, match=f"a clip item has {n} samples"):
            mel.clip_log_mel(np.zeros(n, np.float32))

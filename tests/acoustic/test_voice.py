"""Voices from recordings good and bad, and voices kept in files."""

import numpy as np
import pytest
import safetensors.numpy
import soundfile

from tests.checkpoints import campplus_onnx
from venus_jax.acoustic import sound as sound_lib
from venus_jax.acoustic import voice
from venus_jax.checkpoints import acoustic_speaker, acoustic_tokenizer
from venus_jax.errors import CheckpointError, MediaError
from venus_jax.media.resample import resample


@pytest.fixture(scope="module")
def tokenizer(golden):
    return acoustic_tokenizer.from_tensors(
        safetensors.numpy.load_file(golden / "token2wav/speech_tokenizer.safetensors"))


@pytest.fixture(scope="module")
def speaker_encoder(tmp_path_factory):
    """Of random weights."""
    path = tmp_path_factory.mktemp("onnx") / "campplus.onnx"
    return acoustic_speaker.from_onnx(campplus_onnx.save(path, bins=80))


@pytest.fixture(scope="module")
def prepare(tokenizer, speaker_encoder):
    return lambda sound, sample_rate=None, **kwargs: voice.prepare(sound, tokenizer, speaker_encoder, sample_rate,
                                                                   **kwargs)


@pytest.fixture(scope="module")
def speech(golden):
    return np.load(golden / "audio/speech.npz")["wave_i16"].astype(np.float32) / 32768


def test_a_recording(prepare, tokenizer, speech, tmp_path):
    """A stereo file of 48 kHz in float64 gives nearly what the samples it was made of give."""
    samples = speech[:40_000]  # 2.5 s
    plain = prepare(samples, 16_000)
    assert plain.codes.shape == (63,) and plain.codes.dtype == np.int32 and plain.seconds == 2.52
    assert plain.mel.shape == (126, 80) and plain.mel.dtype == plain.speaker.dtype == np.float32
    np.testing.assert_array_equal(plain.mel[125], plain.mel[124])  # 125 whole frames, the last one repeated
    assert plain.speaker.shape == (campplus_onnx.EMBEDDING,) and plain.notes == ()

    path = tmp_path / "stereo.wav"
    wide = resample(samples, 16_000, 48_000).astype(np.float64)
    soundfile.write(path, np.stack([wide * 0.5, wide * 1.5], axis=1), 48_000, subtype="DOUBLE")
    for other in (prepare(path), prepare(np.stack([wide * 0.5, wide * 1.5], axis=1), 48_000)):
        assert (other.codes == plain.codes).mean() > 0.8
        np.testing.assert_allclose(other.speaker, plain.speaker, rtol=0, atol=0.05)
        assert np.abs(other.mel - plain.mel).mean() < 0.1
    assert prepare(path).source == str(path)


def test_a_long_recording_is_cut(prepare, speech, caplog):
    """50 s: the first 17 are used, with a warning and a note."""
    long = np.concatenate([speech, speech])[:50 * 16_000]
    with caplog.at_level("WARNING"):
        found = prepare(long, 16_000)
    assert found.codes.shape == (425,) and found.mel.shape == (850, 80)
    assert found.notes == ("only the first 17 s of 50.0 s are used",) and found.notes[0] in caplog.text
    exact = prepare(long[:17 * 16_000], 16_000)
    np.testing.assert_array_equal(found.codes, exact.codes)
    np.testing.assert_array_equal(found.speaker, exact.speaker)
    assert not exact.notes and len(prepare(long, 16_000, longest=2.0).codes) == 50


def test_bad_recordings(prepare, speech, tmp_path):
    def refused(match, sound, rate=None):
        with pytest.raises(MediaError, match=match) as error:
            prepare(sound, rate)
        assert "\n" not in str(error.value)

    silence, text, empty, short = (tmp_path / name for name in ("silence.wav", "text.wav", "empty.wav", "short.wav"))
    soundfile.write(silence, np.zeros((3 * 48_000, 2)), 48_000)
    text.write_text("this is not a sound")
    empty.write_bytes(b"")
    soundfile.write(short, speech[8000:8000 + 4000], 16_000)
    refused(r"silence.wav: silent \(at most -180 dB\); expected speech above -60 dB", silence)
    refused("silent", 1e-4 * np.random.default_rng(0).standard_normal(48_000), 16_000)
    refused("text.wav", text)
    refused("empty.wav: is empty", empty)
    refused("short.wav: 0.25 s long; a voice needs at least 0.5 s", short)
    refused("no such file", tmp_path / "absent.wav")
    refused("is a directory", tmp_path)
    refused("0 samples", np.zeros(0), 16_000)
    refused("infinite or not a number", np.full(16_000, np.nan), 16_000)
    refused("got int16", np.zeros(16_000, np.int16), 16_000)
    refused(r"got float64 \[2, 16000\]", np.zeros((2, 16_000)), 16_000)
    refused("needs its sample_rate", np.zeros(16_000))
    refused("cannot resample from 0 Hz", np.ones(16_000), 0)


def test_channels_are_averaged():
    channels = np.random.default_rng(0).standard_normal((1000, 3))
    np.testing.assert_allclose(sound_lib.mono(channels, 16_000, 16_000), channels.mean(axis=1), rtol=0, atol=1e-6)
    assert sound_lib.mono(channels.astype(np.float16), 8000, 16_000).dtype == np.float32


def test_a_voice_survives_its_file(golden, tmp_path):
    rng = np.random.default_rng(0)
    kept = voice.Voice(rng.integers(0, 6561, 7), rng.standard_normal(192), rng.standard_normal((14, 80)), "me.wav",
                       ("cut", "loud"))
    kept.save(tmp_path / "me.voice")
    assert [path.name for path in tmp_path.iterdir()] == ["me.voice"]
    found = voice.Voice.load(tmp_path / "me.voice")
    for field in ("codes", "speaker", "mel"):
        np.testing.assert_array_equal(getattr(found, field), getattr(kept, field))
    assert (found.source, found.notes) == ("me.wav", ("cut", "loud"))


def test_the_recorded_prompt_is_a_voice(golden):
    """It has the noise table besides, and neither source nor notes."""
    recorded = np.load(golden / "token2wav/prompt.npz")
    found = voice.Voice.load(golden / "token2wav/prompt.npz")
    np.testing.assert_array_equal(found.codes, recorded["prompt_tokens"])
    np.testing.assert_array_equal(found.speaker, recorded["spk_embedding"])
    np.testing.assert_array_equal(found.mel, recorded["prompt_mel"])
    assert found.seconds == len(found.codes) / 25 and found.notes == ()


def test_files_that_are_no_voice(golden, tmp_path):
    path = tmp_path / "x.npz"
    arrays = dict(prompt_tokens=np.zeros(3, np.int32), spk_embedding=np.zeros(4), prompt_mel=np.zeros((6, 8)))

    def refused(match, **changes):
        np.savez(path, **{key: value for key, value in (arrays | changes).items() if value is not None})
        with pytest.raises(CheckpointError, match=match) as error:
            voice.Voice.load(path)
        assert str(path) in str(error.value)

    refused("no array spk_embedding", spk_embedding=None)
    refused(r"codes \[3\].*mel \[5, 8\]; expected", prompt_mel=np.zeros((5, 8)))
    refused(r"codes \[0\]", prompt_tokens=np.zeros(0), prompt_mel=np.zeros((0, 8)))
    refused("mel has numbers that are infinite", prompt_mel=np.full((6, 8), np.inf))
    refused("not a voice", prompt_mel=np.array([None], object))
    for data in (b"text", b"", (golden / "token2wav/prompt.npz").read_bytes()[:1000]):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match="x.npz: not a voice"):
            voice.Voice.load(path)
    with pytest.raises(CheckpointError, match="absent"):
        voice.Voice.load(tmp_path / "absent.npz")
    with pytest.raises(CheckpointError, match="cannot be written"):
        voice.Voice(*arrays.values()).save(tmp_path / "absent" / "x.npz")

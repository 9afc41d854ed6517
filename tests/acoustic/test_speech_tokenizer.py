"""The speech tokenizer: recorded states and codes, batches of any lengths, sounds longer than its window."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from venus_jax.acoustic import fsq, speech_tokenizer
from venus_jax.checkpoints import acoustic_tokenizer
from venus_jax.errors import MediaError
from venus_jax.media.mel import log_mel
from venus_jax.nn import layers

LONG = 3201  # mel frames
ROWS = (500, 331, 102)


@pytest.fixture(scope="module")
def network(golden):
    tensors = safetensors.numpy.load_file(golden / "token2wav/speech_tokenizer.safetensors")
    return acoustic_tokenizer.from_tensors(tensors)


@pytest.fixture(scope="module")
def speech(golden):
    return np.load(golden / "audio/speech.npz")["wave_i16"].astype(np.float32) / 32768


@pytest.fixture(scope="module")
def recorded(golden):
    return np.load(golden / "token2wav/prompt_features.npz")


def tokenize(network, mel, lengths):
    config, params = network
    codes, count = speech_tokenizer.tokenize(params, config, mel, np.array(lengths))
    return np.asarray(codes), np.asarray(count)


def test_states_and_codes_are_the_recorded_ones(network, recorded):
    config, params = network
    model = speech_tokenizer.SpeechTokenizer(config)
    mel, length = recorded["s3_log_mel128"].T[None], recorded["s3_mel_len"]
    states, h, count = model.apply({"params": params}, mel, length)
    np.testing.assert_allclose(states[0], recorded["s3_encoder_hidden"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(h[0], recorded["s3_project_down"], rtol=0, atol=1e-4)
    np.testing.assert_array_equal(fsq.quantise(h[0])[0], recorded["s3_digits"])
    np.testing.assert_array_equal(tokenize(network, mel, length)[0][0], recorded["s3_codes"])
    assert count.tolist() == [len(recorded["s3_codes"])]
    apart, _, _ = model.apply({"params": layers.separate_layers(params)}, mel, length)
    np.testing.assert_allclose(apart, states, rtol=0, atol=1e-5)


def test_a_sound_gives_the_recorded_codes(network, recorded, speech):
    config, params = network
    start = int(recorded["wave_start"])
    sound = speech[start:start + int(recorded["wave_len"])]
    codes = speech_tokenizer.encode(sound, 16_000, params, config)
    np.testing.assert_array_equal(codes, recorded["s3_codes"])
    assert codes.dtype == np.int32
    stereo = np.repeat(sound.astype(np.float64)[:, None], 2, axis=1)
    np.testing.assert_array_equal(speech_tokenizer.encode(stereo, 16_000, params, config), codes)


def mels():
    return np.random.default_rng(0).standard_normal((len(ROWS), max(ROWS), 128)).astype(np.float32)


def test_a_ragged_batch_equals_each_sound_alone(network):
    mel = mels()
    for row, n in enumerate(ROWS):
        mel[row, n:] = np.nan
    codes, count = tokenize(network, mel, ROWS)
    assert count.tolist() == [-(-n // 4) for n in ROWS]
    for row, n in enumerate(ROWS):
        alone, _ = tokenize(network, mel[row:row + 1, :n], [n])
        np.testing.assert_array_equal(codes[row, :count[row]], alone[0])
        assert not codes[row, count[row]:].any()


def test_parameters_say_the_precision(network):
    """In bfloat16 the states are; what the quantiser rounds stays float32."""
    config, params = network
    half = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), params)
    model = speech_tokenizer.SpeechTokenizer(config, dtype=jnp.bfloat16)
    states, h, _ = jax.eval_shape(lambda: model.apply({"params": half}, mels(), np.array(ROWS)))
    assert (states.dtype, h.dtype) == (jnp.bfloat16, jnp.float32)
    codes, _ = jax.eval_shape(lambda: speech_tokenizer.tokenize(half, config, mels(), np.array(ROWS)))
    assert codes.shape == (3, 125) and codes.dtype == jnp.int32


def test_rows_are_independent(network):
    mel, others = mels(), mels()
    others[0] = -others[0]
    a, b = (tokenize(network, x, ROWS)[0] for x in (mel, others))
    np.testing.assert_array_equal(a[1:], b[1:])
    assert (a[0] != b[0]).any()


def test_a_long_sound_is_heard_in_windows(network, speech):
    """Its codes are those of two windows, each up to the middle of what they share."""
    config, params = network
    sound = np.tile(speech, 2)[:LONG * 160]
    codes = speech_tokenizer.encode(sound, 16_000, params, config)
    mel = log_mel(sound, num_mels=128).T
    first, _ = tokenize(network, mel[None, :3000], [3000])
    last, _ = tokenize(network, np.pad(mel[2600:], ((0, 399), (0, 0)))[None], [601])
    np.testing.assert_array_equal(codes, np.concatenate([first[0, :700], last[0, 50:151]]))
    assert len(codes) == -(-LONG // 4)
    np.testing.assert_array_equal(speech_tokenizer.encode(sound, 16_000, params, config, reference_quirks=True), codes)


@pytest.mark.parametrize("frames, ours, reference", [
    (3000, [(0, 3000)], [(0, 3000)]),
    (3001, [(0, 3000), (2600, 3001)], [(0, 3000), (2600, 3001)]),
    (5300, [(0, 3000), (2600, 5300)], [(0, 3000), (2600, 5300), (5200, 5300)]),
    (5601, [(0, 3000), (2600, 5600), (5200, 5601)], [(0, 3000), (2600, 5600), (5200, 5601)])])
def test_windows_cover_a_sound_once(frames, ours, reference):
    """The reference loses what its last two windows both leave to the other; ours has a code for every 4 frames."""
    assert speech_tokenizer.windows(frames) == ours
    assert speech_tokenizer.windows(frames, reference_quirks=True) == reference
    at = lambda windows: speech_tokenizer.merge([np.arange(start // 4, -(-stop // 4)) for start, stop in windows])
    np.testing.assert_array_equal(at(ours), np.arange(-(-frames // 4)))
    lost = -(-frames // 4) - len(at(reference))
    assert lost == (50 if frames == 5300 else 0)


def test_what_cannot_be_encoded_is_refused(network):
    config, params = network
    for sound, message in ((np.zeros(200), "more than 200 samples"), (np.zeros(0), "0 samples"),
                           (np.full(999, np.inf), "infinite or not a number")):
        with pytest.raises(MediaError, match=message):
            speech_tokenizer.encode(sound, 16_000, params, config)

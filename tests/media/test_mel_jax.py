"""The streaming log-mel inside a jitted step, against the NumPy class that recomputes everything."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from venus_jax.errors import MediaError
from venus_jax.media.mel import StreamingMel
from venus_jax.media.mel_jax import FIRST_FRAMES, NUM_FRAMES, init_mel_state, stream_log_mel

UNITS = 45  # two slides of the remembered sound, at units 29 and 39
SECOND = 16_000
step = jax.jit(stream_log_mel, donate_argnums=0)


@pytest.fixture(scope="module")
def speech(golden):
    return np.load(golden / "audio/speech.npz")["wave_i16"].astype(np.float32) / 32768


@pytest.fixture(scope="module")
def sound(speech):
    """Speech whose loudness changes every few seconds, so that the floor does, [45 s]."""
    gain = [1.4, 0.03, 0.3, 1.0, 0.001, 0.05, 0.0, 0.1, 0.01, 0.004, 0.2, 0.0]
    gain = np.repeat(gain, 4)[:UNITS].astype(np.float32)
    return np.tile(speech, 2)[:UNITS * 16_000] * np.repeat(gain, 16_000)


def seconds(sound):
    return sound.reshape(-1, SECOND)


def run(sound, unit_samples=SECOND):
    """Mel of every unit of one session alone, absent frames included."""
    state, out, yes = init_mel_state(1, unit_samples), [], np.array([True])
    for samples in sound.reshape(-1, unit_samples):
        state, mel, num_frames = step(state, samples[None], yes, ~yes)
        out.append(np.asarray(mel)[0])
        assert mel.shape[1] == unit_samples // 160 + 4 and num_frames[0] == mel.shape[1] - 2 * (len(out) == 1)
    return out


def check(sound, unit_samples=SECOND, atol=1e-5):
    reference, floors = StreamingMel(unit_samples=unit_samples), set()
    for k, (samples, got) in enumerate(zip(sound.reshape(-1, unit_samples), run(sound, unit_samples), strict=True)):
        wanted = reference.push(samples).T
        floors.add(float(wanted.min()))
        absent = len(got) - len(wanted)
        assert (got[:absent] == 0).all(), "frames before the stream's start are zeros"
        np.testing.assert_allclose(got[absent:], wanted, rtol=0, atol=atol, err_msg=f"unit {k}")
    return floors


@pytest.mark.parametrize("unit_samples, units", [(SECOND, 70), (8000, 90), (6400, 80)])
def test_equals_recomputation_of_everything(sound, unit_samples, units):
    """With seconds, half seconds, and units that are no part of a second; past the first slide, at 30 s."""
    floors = check(np.tile(sound, 2)[:units * unit_samples], unit_samples)
    assert len(floors) > 4, "the sound never changes the floor: the test would not notice a wrong one"


def test_units_of_another_length_than_the_state_s_are_refused():
    call = lambda n: stream_log_mel(init_mel_state(4), jnp.zeros((4, n)), *2 * [jnp.zeros(4, bool)])
    with pytest.raises(MediaError, match="4 units of 8000 samples; the state is of 4 sessions with units of 16000"):
        call(8000)
    for function in (call, lambda n: init_mel_state(4, n)):
        with pytest.raises(MediaError, match="a unit of 12000 samples; expected a multiple of 1600"):
            function(12_000)


@pytest.mark.parametrize("at, when", [
    (160_000 - 560 + 10, "just behind the start of the buffer after unit 29: heard twice by its first frame"),
    (160_000 - 560 + 190, "reflected only in part"),
    (160_000 - 560 - 150, "just before it: forgotten, though its frames reach in"),
    (320_000 - 560 + 10, "at the start after unit 39"),
    (15_920 + 9 * 16_000 - 10, "at the end of a unit: heard twice by the frame behind it, once in the next"),
    (15_920 + 33 * 16_000 - 60, "likewise, later"),
])
def test_reflected_frames_count_for_the_floor(speech, at, when):
    sound = 0.01 * np.tile(speech, 2)[:UNITS * 16_000]
    sound[at:at + 5] += 0.8
    check(sound)


def test_is_the_recorded_stream(golden, speech):
    recorded = np.load(golden / "audio/streaming_mel_long.npz")
    units = run(speech[:33 * 16_000])
    for k in recorded["units"]:
        np.testing.assert_allclose(units[k].T, recorded[f"mel{k}"], rtol=0, atol=1e-4, err_msg=f"unit {k}")


def test_rows_come_go_wait_and_begin_anew_on_their_own(sound):
    """A random schedule of three sessions in one batch, one compiled program."""
    rng = np.random.default_rng(5)
    traces = 0

    @jax.jit
    def counted(*args):
        nonlocal traces
        traces += 1
        return stream_log_mel(*args)

    state, references = init_mel_state(3), [StreamingMel() for _ in range(3)]
    longest = 0
    for t in range(70):
        valid = rng.random(3) < [1.0, 0.7, 0.5]
        reset = (rng.random(3) < [0.0, 0.04, 0.1]) & valid
        samples = np.stack([seconds(sound)[(t + 15 * row) % UNITS] for row in range(3)])
        samples[~valid] = np.nan  # what lies in rows without sound must not matter
        state, mel, num_frames = counted(state, samples, valid, reset)
        for row in range(3):
            if reset[row]:
                references[row] = StreamingMel()
            if not valid[row]:
                assert num_frames[row] == 0 and not np.asarray(mel[row]).any()
                continue
            wanted = references[row].push(samples[row]).T
            longest = max(longest, references[row].units)
            assert num_frames[row] == len(wanted)
            np.testing.assert_allclose(mel[row, NUM_FRAMES - len(wanted):], wanted, rtol=0, atol=1e-5)
    assert longest > 60 and traces == 1


def test_other_rows_change_no_bit(sound):
    yes = np.array([True, True])
    ours, other, nothing = seconds(sound)[3], np.ones(16_000, np.float32), np.zeros(16_000, np.float32)
    outcome = [step(init_mel_state(2), np.stack([ours, second]), yes, ~yes) for second in (other, nothing)]
    for a, b in zip(*map(jax.tree.leaves, outcome)):
        np.testing.assert_array_equal(a[0], b[0])


def test_state_is_small_and_keeps_its_shapes():
    state = init_mel_state(4)
    after, mel, _ = jax.eval_shape(stream_log_mel, state, jnp.zeros((4, 16_000)), *2 * [jnp.zeros(4, bool)])
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert mel.shape == (4, NUM_FRAMES, 80) and NUM_FRAMES == FIRST_FRAMES + 2 == 104 and mel.dtype == jnp.float32
    assert sum(x.nbytes for x in jax.tree.leaves(state)) < 4 * 5000  # 30 s of sound would be 1.9 MB a row

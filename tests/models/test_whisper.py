"""The audio tower: a live stream hears exactly what the whole clip holds, unit by unit, in any mixture of sessions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.tiny import CONFIG
from venus_jax.errors import MediaError
from venus_jax.media import mel
from venus_jax.models import frontend, whisper
from venus_jax.nn import kv_cache

C = CONFIG.audio
ROWS, UNITS = 3, 5
STATES = 50  # encoder states of a unit
CONTEXT = whisper.CONTEXT_FRAMES
FRAMES = mel.UNIT_FRAMES + 2 * CONTEXT
CLIP = UNITS * mel.UNIT_FRAMES + CONTEXT


@pytest.fixture(scope="module")
def frames(golden):
    """Mel frames of three stretches of speech, [3, 800, 80]."""
    speech = np.load(golden / "audio/speech.npz")["wave_i16"].astype(np.float32) / 32768
    return np.stack([mel.log_mel(speech[start:start + 8 * mel.UNIT_SAMPLES]).T for start in (0, 160_000, 320_000)])


def unit(frames, k, size=mel.UNIT_FRAMES):
    """Unit k of one stretch with its context; zeros stand for what was before the first."""
    start = k * size
    return np.pad(frames, ((CONTEXT, 0), (0, 0)))[start:start + size + 2 * CONTEXT]


@pytest.fixture(scope="module")
def step(params):
    """step(mel, first, valid, cache) -> states, cache."""
    model = whisper.whisper(C)
    run = jax.jit(lambda params, *args: model.apply({"params": params}, *args, method="stream"))
    return functools.partial(run, params["audio"])


@pytest.fixture(scope="module")
def clip(params):
    """clip(mel, num_frames, chunk, quirks) -> states."""
    model = whisper.whisper(C)
    run = jax.jit(lambda params, *args: model.apply({"params": params}, *args)[0], static_argnums=(3, 4))
    return lambda x, n, chunk=STATES, quirks=False: np.asarray(run(params["audio"], x, jnp.asarray(n), chunk, quirks))


def row_of(cache, row):
    return [x[:, row] if x.ndim == 5 else x[row] for x in cache]


def test_stream_equals_the_whole_clip_under_the_chunk_mask(step, clip, frames):
    """Sessions that begin and pause at different moments, in one batch of one compiled program."""
    wanted = clip(frames[:, :CLIP], [CLIP] * ROWS)
    moments = [{0, 1, 2, 3, 4}, {2, 3, 5, 6, 7}, {3, 4, 6, 7}]  # at which a session brings sound
    cache, done = whisper.empty_cache(C, ROWS), [0] * ROWS
    for moment in range(8):
        valid = np.array([moment in own for own in moments])
        first = np.array([moment == min(own) for own in moments])
        x = np.stack([unit(frames[row], done[row]) if valid[row] else np.full((FRAMES, 80), np.nan, np.float32)
                      for row in range(ROWS)])
        before = cache
        states, cache = step(x, first, valid, before)
        for row in range(ROWS):
            if valid[row]:
                part = wanted[row, done[row] * STATES:(done[row] + 1) * STATES]
                np.testing.assert_allclose(states[row], part, rtol=0, atol=1e-5)
                done[row] += 1
            else:
                for a, b in zip(row_of(cache, row), row_of(before, row)):
                    np.testing.assert_array_equal(a, b)
    assert kv_cache.length(cache).tolist() == [done[row] * STATES for row in range(ROWS)] == [250, 250, 200]
    assert step.func._cache_size() == 1


def test_half_seconds_equal_the_whole_clip_under_a_finer_mask(step, clip, frames):
    wanted = clip(frames[:, :CLIP], [CLIP] * ROWS, STATES // 2)
    assert np.abs(wanted - clip(frames[:, :CLIP], [CLIP] * ROWS)).max() > 1e-3  # the grain is heard
    cache, yes, states = whisper.empty_cache(C, ROWS), np.array([True] * ROWS), []
    for k in range(2 * UNITS):
        x = np.stack([unit(rows, k, mel.unit_frames(8000)) for rows in frames])
        part, cache = step(x, yes & (k == 0), yes, cache)
        states.append(part)
    np.testing.assert_allclose(np.concatenate(states, axis=1), wanted[:, :UNITS * STATES], rtol=0, atol=1e-5)


def test_half_seconds_of_a_full_stream_start_again_by_their_own_count(step, frames):
    """Where cached + 27 reaches the limit of 302: after eleven units, where seconds do after five."""
    cache, yes, lengths = whisper.empty_cache(C, ROWS), np.array([True] * ROWS), []
    for k in range(13):
        _, cache = step(np.stack([unit(rows, k, 50) for rows in frames]), yes & (k == 0), yes, cache)
        lengths.append(int(kv_cache.length(cache)[1]))
    assert lengths == [*range(25, 276, 25), 25, 50] and not kv_cache.overflowed(cache).any()


@pytest.mark.parametrize("unit_samples, embeddings", [(3200, 2), (8000, 5), (16_000, 10)])
def test_a_unit_is_so_many_embeddings(params, unit_samples, embeddings):
    x, row = jnp.zeros((2, mel.unit_frames(unit_samples) + 2 * CONTEXT, C.num_mel_bins)), jnp.array([True, False])
    encode = lambda params, *args: frontend.Frontend(CONFIG).apply({"params": params}, *args, method="encode_stream")
    embeds, _ = jax.eval_shape(encode, params, x, row, row, whisper.empty_cache(C, 2))
    assert embeds.shape == (2, embeddings, CONFIG.llm.hidden_size)


def test_a_full_stream_starts_again_at_the_reference_s_moment(step, frames):
    """Where cached + 52 reaches the limit, here 302: the unit is heard at position 0, without history.

    One row meets the limit exactly, one has a position less, one began a unit later.
    """
    yes, no = np.array([True] * ROWS), np.array([False] * ROWS)
    cache, lengths = whisper.empty_cache(C, ROWS), []
    for k in range(7):
        x = np.stack([unit(frames[0], k)] * ROWS)
        if k == 5:
            less = np.arange(ROWS) == 1
            cache = kv_cache.keep(cache, ~(less[:, None] & (cache.slot_position == 249)))
            cache = cache._replace(next_position=cache.next_position - less)
        later = (k == 1) & (np.arange(ROWS) == 2)
        states, cache = step(x, no | (k == 0) | later, yes, kv_cache.reset(cache, later))
        lengths.append(kv_cache.length(cache).tolist())
        if k == 5:  # a stream without history, to which the frames before the unit are still context and not silence
            wanted, fresh = step(x, no, yes, whisper.empty_cache(C, ROWS))
            np.testing.assert_array_equal(states[0], wanted[0])
            assert fresh.slot_position[0].tolist() == cache.slot_position[0].tolist()
    assert lengths == [[50, 50, 50], [100, 100, 50], [150, 150, 100], [200, 200, 150], [250, 250, 200],
                       [50, 299, 250], [100, 50, 50]]


def test_what_stands_before_the_first_unit_does_not_count(step, frames):
    x = np.stack([unit(frames[row], 0) for row in range(ROWS)])
    junk = x.copy()
    junk[:, :CONTEXT] = 7
    yes = np.array([True] * ROWS)
    outs = [step(mel, yes, yes, whisper.empty_cache(C, ROWS))[0] for mel in (x, junk)]
    np.testing.assert_array_equal(*outs)


def test_chunk_mask(clip, frames):
    """A state sees its own second and all earlier ones; without the mask, everything."""
    x, n = frames[:, :CLIP], [CLIP] * ROWS
    later, earlier = x.copy(), x.copy()
    later[:, 210:] = 0  # inside the third second, and clear of the convolutions of the second
    earlier[:, :90] = 0
    for chunk, same in ((STATES, True), (None, False)):
        a, b = (clip(y, n, chunk)[:, :2 * STATES] for y in (x, later))
        assert np.array_equal(a, b) == same
    assert np.abs(clip(earlier, n) - clip(x, n))[:, 2 * STATES:].max() > 1e-3


def batch_of(frames, n):
    """Clips of `n` frames, padded with zeros."""
    return np.where(np.arange(CLIP)[:, None] < np.array(n)[:, None, None], frames[:, :CLIP], 0)


def test_a_shorter_clip_in_a_batch(clip, frames):
    """By default its padding is not seen. The reference sees some of it, and only there the two differ."""
    n = [CLIP, 180, CLIP]
    ours, reference = (clip(batch_of(frames, n), n, quirks=quirks) for quirks in (False, True))
    alone = clip(frames[1:2, :180], [180])[0]
    np.testing.assert_allclose(ours[1, :90], alone, rtol=0, atol=1e-5)
    assert np.abs(reference[1, :90] - alone).max() > 1e-3
    np.testing.assert_array_equal(ours[::2], reference[::2])


def test_a_clip_longer_than_the_position_table_is_refused(params):
    longest = jnp.zeros((1, 2 * C.max_positions, C.num_mel_bins))
    model = whisper.whisper(C)
    encode = lambda mel: jax.eval_shape(lambda: model.apply({"params": params["audio"]}, mel, jnp.array([1])))
    assert encode(longest)[0].shape[1] == C.max_positions
    with pytest.raises(MediaError, match="605 mel frames.*at most 604"):
        encode(jnp.pad(longest, ((0, 0), (0, 1), (0, 0))))


def test_a_clip_of_an_odd_number_of_frames_in_a_batch(clip, frames):
    """Its last state reads one frame beyond the end, which in a batch must be as silent as the edge it is alone."""
    n = [CLIP, 189, CLIP]
    alone = clip(frames[1:2, :189], [189])[0]
    np.testing.assert_allclose(clip(batch_of(frames, n), n)[1, :95], alone, rtol=0, atol=1e-5)


def test_embeddings_are_means_of_whole_groups(params):
    x = np.random.default_rng(0).standard_normal((2, 14, 3), np.float32)
    np.testing.assert_allclose(whisper.pool(x, 5), x[:, :10].reshape(2, 2, 5, 3).mean(axis=2), rtol=0, atol=1e-6)

    model = whisper.whisper(C)
    for n in (9, 10, 11, 100, 101, 199, 200, 1234):  # mel frames -> states -> embeddings
        mel = jnp.zeros((1, n, C.num_mel_bins))
        states = jax.eval_shape(lambda: model.apply({"params": params["audio"]}, mel, method="convolve"))
        assert states.shape[1] // 5 == whisper.num_embeddings(n, 5), n
    assert whisper.num_embeddings(jnp.array([100, 200]), 5).tolist() == [10, 20]

"""A stack with a cache: however a sequence is cut, padded, evicted or moved, it is the same sequence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from venus_jax.nn import kv_cache, rope
from venus_jax.nn.decoder import Decoder

LAYERS, HEADS, KV_HEADS, H, D, THETA = 2, 4, 2, 8, 24, 10_000.0
SLOTS, WIDTH, ROWS = 40, 6, 3  # cache slots, chunk width, sessions: one compiled step for all tests
STACK = Decoder(hidden_size=D, intermediate_size=40, num_layers=LAYERS, num_heads=HEADS, num_kv_heads=KV_HEADS,
                head_dim=H, rms_eps=1e-6, rope_theta=THETA, qk_norm=True)


@pytest.fixture(scope="module")
def params():
    shapes = jax.eval_shape(STACK.init, jax.random.key(0), jnp.zeros((1, 1, D)), jnp.zeros((1, 1), jnp.int32))
    rng = np.random.default_rng(0)
    draw = lambda shape: rng.standard_normal(shape, np.float32) / np.float32(np.prod(shape[1:-1])) ** 0.5
    return jax.tree.map(lambda leaf: jnp.asarray(draw(leaf.shape)), shapes)


@pytest.fixture(scope="module")
def step(params):
    """step(cache, x, valid, reuse) -> hidden, cache; with `reuse` entries go to free slots, else slot = position."""
    def run(params, cache, x, valid, reuse):
        positions = kv_cache.next_positions(cache, valid)
        slots = jnp.where(reuse, kv_cache.free_slots(cache, valid), positions)
        hidden, cache, _ = STACK.apply(params, x, positions, None, cache, slots)
        return hidden, cache

    return functools.partial(jax.jit(run), params)


@pytest.fixture(scope="module")
def whole(params):
    """whole(x, first position) -> hidden of a sequence in one pass without a cache."""
    at = lambda x, start: start + jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    return functools.partial(jax.jit(lambda params, x, start: STACK.apply(params, x, at(x, start))[0]), params)


def empty(slots=SLOTS):
    return kv_cache.empty(LAYERS, ROWS, slots, KV_HEADS, H)


def sequences(length, seed=0):
    return np.random.default_rng(seed).standard_normal((ROWS, length, D), np.float32)


def feed(step, cache, xs, reuse=False, seed=None):
    """Feeds row r the sequence xs[r]; in full chunks, or with a `seed` in ragged ones with junk between the entries.

    Returns the hidden states of each row and the cache.
    """
    rng = np.random.default_rng(seed)
    done, out = [0] * ROWS, [[] for _ in range(ROWS)]
    while any(n < len(x) for n, x in zip(done, xs)):
        chunk = np.zeros((ROWS, WIDTH, D), np.float32) if seed is None else 1e3 * rng.standard_normal((ROWS, WIDTH, D))
        valid = np.zeros((ROWS, WIDTH), bool)
        for row, x in enumerate(xs):
            count = min(len(x) - done[row], WIDTH if seed is None else rng.integers(WIDTH + 1))
            valid[row, np.arange(WIDTH) if count == WIDTH else np.sort(rng.permutation(WIDTH)[:count])] = True
            chunk[row, valid[row]] = x[done[row]:done[row] + count]
            done[row] += count
        hidden, cache = step(cache, jnp.float32(chunk), valid, reuse)
        for row in range(ROWS):
            out[row] += list(np.asarray(hidden[row])[valid[row]])
    return [np.array(rows) for rows in out], cache


def entries(cache, row):
    """(positions, keys, values) of a row in order of position."""
    k, v, positions = (np.asarray(x) for x in cache[:3])
    held = np.flatnonzero(positions[row] >= 0)
    held = held[np.argsort(positions[row, held])]
    return positions[row, held], k[:, row, :, held], v[:, row, :, held]


def assert_same_entries(a, b, rows=range(ROWS), atol=1e-5):
    for row in rows:
        for x, y in zip(entries(a, row), entries(b, row)):
            np.testing.assert_allclose(x, y, rtol=0, atol=atol)


def test_any_chunking_equals_one_pass(step, whole):
    """Ragged chunks, junk between their entries, rows without any: same hidden states, same cache, one program."""
    x = sequences(33)
    xs = [x[0], x[1, :20], x[2, :7]]
    wanted = whole(x, 0)
    in_full_chunks, cache = feed(step, empty(), xs)
    programs = step.func._cache_size()
    for seed in range(3):
        hidden, ragged = feed(step, empty(), xs, seed=seed)
        for row, own in enumerate(xs):
            np.testing.assert_allclose(hidden[row], wanted[row, :len(own)], rtol=0, atol=1e-5)
            np.testing.assert_allclose(hidden[row], in_full_chunks[row], rtol=0, atol=1e-5)
        assert_same_entries(ragged, cache)
        assert ragged.next_position.tolist() == kv_cache.length(ragged).tolist() == [33, 20, 7]
    assert step.func._cache_size() == programs


def test_rows_are_independent(step):
    """A neighbour's reset, overflow or NaN changes no bit of a row."""
    x = sequences(30)
    quiet, cache = feed(step, empty(), [x[0], x[1], x[2]], seed=5)
    hidden, disturbed = feed(step, empty(), [x[0][:12], x[1][:12] * np.nan, x[2][:12]])
    disturbed = kv_cache.reset(disturbed, jnp.array([False, False, True]))
    assert kv_cache.length(disturbed).tolist() == [12, 12, 0]
    again, disturbed = feed(step, disturbed, [x[0][12:], np.zeros((0, D)), np.tile(x[1], (2, 1))])
    assert kv_cache.overflowed(disturbed).tolist() == [False, False, True]
    np.testing.assert_allclose(np.concatenate([hidden[0], again[0]]), quiet[0], rtol=0, atol=1e-5)
    assert_same_entries(disturbed, cache, rows=[0])

    alone, _ = feed(step, empty(), [x[0][:12], np.zeros((0, D)), np.zeros((0, D))])
    np.testing.assert_array_equal(hidden[0], alone[0])


def test_a_reset_row_starts_anew(step):
    x = sequences(25)
    _, cache = feed(step, empty(), [x[0], x[1], x[2]])
    cache = kv_cache.reset(cache, jnp.array([False, True, False]))
    hidden, cache = feed(step, cache, [x[0][:0], x[0], x[0][:0]])
    fresh, _ = feed(step, empty(), [x[0][:0], x[0], x[0][:0]])
    np.testing.assert_array_equal(hidden[1], fresh[1])
    assert kv_cache.length(cache).tolist() == [25, 25, 25]


def test_what_does_not_fit_is_dropped_and_told(step):
    """Not clamped: the entries at the end stay what they were."""
    x = sequences(SLOTS + 3)
    xs = [x[0], x[1][:SLOTS], x[2][:5]]
    _, full = feed(step, empty(), [x[0][:SLOTS], *xs[1:]])
    assert not kv_cache.overflowed(full).any()
    _, over = feed(step, full, [x[0][SLOTS:], x[1][:0], x[2][:0]])
    assert kv_cache.overflowed(over).tolist() == [True, False, False]
    assert_same_entries(over, full, atol=0)
    assert over.next_position.tolist() == [SLOTS + 3, SLOTS, 5]


def test_free_slots_run_out_instead_of_overwriting(step):
    x = sequences(SLOTS + 3)
    _, full = feed(step, empty(), [x[0][:SLOTS], x[1][:3], x[2][:0]], reuse=True)
    _, over = feed(step, full, [x[0][SLOTS:], x[1][:0], x[2][:0]], reuse=True)
    assert_same_entries(over, full, atol=0)


def test_moved_keys_are_keys_computed_at_the_new_place():
    """Every entry by its own distance, out of order, over the whole context, in float32."""
    rng = np.random.default_rng(1)
    raw = rng.standard_normal((LAYERS, ROWS, KV_HEADS, SLOTS, H)).astype(np.float32)
    old, new = (np.stack([rng.permutation(4000)[:SLOTS] for _ in range(ROWS)]) for _ in range(2))
    old[:, 30:], new[:, 3] = -1, -1  # empty slots, and entries to drop
    new[:, 31] = 77  # an empty slot stays empty

    def keys_at(positions):
        cos, sin = rope.angles(jnp.maximum(positions, 0), H, THETA)
        return jnp.swapaxes(rope.rotate(jnp.swapaxes(jnp.asarray(raw), 2, 3), cos[None], sin[None]), 2, 3)

    cache = kv_cache.KVCache(keys_at(old), jnp.asarray(raw), jnp.asarray(old), jnp.asarray(old.max(axis=1) + 1))
    moved = kv_cache.reposition(cache, jnp.asarray(new), THETA)
    held = (old >= 0) & (new >= 0)
    np.testing.assert_array_equal(moved.slot_position, np.where(held, new, -1))
    np.testing.assert_array_equal(moved.next_position, np.where(held, new, -1).max(axis=1) + 1)
    rounding = 4000 * 2.0**-23 * 3 * np.abs(raw).max()  # of float32 angles: where it was, where it goes, the difference
    held_keys = lambda k: np.swapaxes(k, 2, 3)[:, held]
    np.testing.assert_allclose(held_keys(moved.k), held_keys(keys_at(new)), rtol=0, atol=rounding)
    np.testing.assert_array_equal(moved.v, raw)


def test_attention_does_not_notice_that_all_moved_together(step, whole):
    x = sequences(20)
    _, cache = feed(step, empty(), list(x[:, :14]))
    held = cache.slot_position
    far = kv_cache.reposition(cache, jnp.where(held >= 0, held + 1000, -1), THETA)
    hidden, after = feed(step, far, list(x[:, 14:]), reuse=True)
    np.testing.assert_allclose(hidden, whole(x, 0)[:, 14:], rtol=0, atol=1e-4)
    np.testing.assert_allclose(hidden, whole(x, 1000)[:, 14:], rtol=0, atol=1e-4)
    assert after.next_position.tolist() == [1020] * ROWS


def test_slots_used_again_after_an_eviction(step):
    """A full cache from which entries anywhere were dropped goes on like a roomy one that holds just the kept ones."""
    x = sequences(SLOTS + 18)
    _, full = feed(step, empty(), list(x[:, :SLOTS]))
    drop = np.random.default_rng(2).random((ROWS, SLOTS)).argsort(axis=1) < 20  # 20 in each row
    evicted = kv_cache.keep(full, ~drop)
    assert kv_cache.length(evicted).tolist() == [SLOTS - 20] * ROWS
    hidden, reused = feed(step, evicted, list(x[:, SLOTS:]), reuse=True)

    room = empty(SLOTS + 18)
    roomy = kv_cache.append(room, *(jnp.swapaxes(x, 2, 3) for x in full[:2]), jnp.where(drop, -1, jnp.arange(SLOTS)))
    roomy = roomy._replace(next_position=full.next_position)
    wanted, fresh = feed(step, roomy, list(x[:, SLOTS:]))
    np.testing.assert_allclose(hidden, wanted, rtol=0, atol=1e-5)
    assert_same_entries(reused, fresh)


def test_free_slots_are_the_lowest_unused_ones():
    cache = empty(6)._replace(slot_position=jnp.array([[7, -1, 3, -1, -1, 2], [0, 1, 2, 3, 4, 5], [-1] * 6]))
    valid = jnp.array([[1, 0, 1, 1, 1], [1, 1, 0, 0, 0], [0, 1, 1, 0, 1]])
    assert kv_cache.free_slots(cache, valid > 0).tolist() == [[1, 6, 3, 4, 6], [6, 6, 6, 6, 6], [6, 0, 1, 6, 2]]


def test_ranks_and_keep_order_by_position_not_by_slot():
    positions = np.array([[70, -1, 30, -1, 31, 2], [0, 5, 4, 3, 9, 1], [-1] * 6])
    cache = empty(6)._replace(slot_position=jnp.asarray(positions), next_position=jnp.array([71, 10, 0]))
    held = positions >= 0
    wanted = [[sorted(row[row >= 0]).index(p) if p >= 0 else -1 for p in row] for row in positions]
    np.testing.assert_array_equal(np.where(held, kv_cache.ranks(cache), -1), wanted)

    newest = kv_cache.keep(cache, kv_cache.ranks(cache) >= kv_cache.length(cache)[:, None] - 2)
    assert newest.slot_position.tolist() == [[70, -1, -1, -1, 31, -1], [-1, 5, -1, -1, 9, -1], [-1] * 6]
    assert kv_cache.length(newest).tolist() == [2, 2, 0]
    assert newest.next_position.tolist() == [71, 10, 0]  # time goes on
    untouched = kv_cache.keep(cache, jnp.ones((3, 6), bool))
    np.testing.assert_array_equal(untouched.slot_position, positions)

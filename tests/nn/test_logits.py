"""Penalties and cuts against their definitions in plain loops, on scores with many ties."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from venus_jax.nn import logits

C = 12
scores_with_ties = st.lists(st.integers(-8, 8).map(lambda n: n / 2), min_size=C, max_size=C)
examples = settings(max_examples=60, deadline=None, database=None, derandomize=True)
top_k = jax.jit(logits.keep_top_k)
top_p = jax.jit(logits.keep_top_p)


def row(scores):
    return jnp.asarray(scores, jnp.float32)[None]


def kept(cut, scores):
    """Which scores stayed; those must be unchanged, the others -inf."""
    cut, scores = np.asarray(cut[0]), np.asarray(scores, np.float32)
    stays = cut != -np.inf
    np.testing.assert_array_equal(cut[stays], scores[stays])
    return stays


@examples
@given(scores_with_ties, st.integers(1, C + 3))
def test_top_k_keeps_the_best_k_and_their_ties(scores, k):
    worst = sorted(scores, reverse=True)[min(k, C) - 1]
    np.testing.assert_array_equal(kept(top_k(row(scores), k), scores), [s >= worst for s in scores])


@examples
@given(scores_with_ties, st.floats(0, 1), st.integers(1, 4))
def test_top_p_keeps_a_token_while_the_likelier_ones_fall_short(scores, p, min_keep):
    probability = np.exp(np.float64(scores)) / np.exp(np.float64(scores)).sum()
    order = sorted(range(C), key=lambda c: -scores[c])  # sorted is stable: of equals the lower id comes first
    before = dict(zip(order, np.cumsum([0, *probability[order]])))
    stays = kept(top_p(row(scores), p, min_keep), scores)
    for rank, c in enumerate(order):
        if rank < min_keep or before[c] < p - 1e-6:
            assert stays[c]
        elif before[c] > p + 1e-6:
            assert not stays[c]


def test_top_p_at_its_boundary():
    """Probabilities 1/2, 1/4, 1/8, 1/8 are exact: a sum that just reaches p needs no further token."""
    scores = np.log([2, 8, 2, 4]).astype(np.float32)
    for p, wanted in [(0.0, [1]), (0.49, [1]), (0.51, [1, 3]), (0.74, [1, 3]), (0.76, [0, 1, 3]), (0.9, [0, 1, 2, 3])]:
        assert np.flatnonzero(kept(top_p(row(scores), p), scores)).tolist() == wanted, p
    assert np.flatnonzero(kept(top_p(row(np.zeros(4)), 0.5), np.zeros(4))).tolist() == [0, 1]
    negligible = np.array([0, -20, -30, -1], np.float32)  # beside these probabilities 1 is reached by rounding
    assert kept(top_p(row(negligible), 1.0), negligible).all()


@examples
@given(scores_with_ties, st.lists(st.integers(0, C - 1), max_size=16), st.sampled_from([1.0, 1.05, 2.0, 0.5]))
def test_frequency_penalty_weighs_by_count_and_sign(scores, history, penalty):
    window = np.array([history + [-1] * (16 - len(history))])
    counts = logits.count_tokens(jnp.asarray(window), jnp.asarray(window >= 0), C)
    assert counts[0].tolist() == [history.count(c) for c in range(C)]
    factors = [penalty ** history.count(c) for c in range(C)]
    wanted = [s * factor if s < 0 else s / factor for s, factor in zip(scores, factors)]
    np.testing.assert_allclose(logits.frequency_penalty(row(scores), counts, penalty)[0], wanted, rtol=1e-5)


def test_rows_have_their_own_history_and_limits_compile_nothing():
    window = jnp.array([[3, 3, 3], [0, 1, 3]])
    counted = jnp.array([[True, False, True], [True, True, False]])
    counts = logits.count_tokens(window, counted, 5)
    assert counts.tolist() == [[0, 0, 0, 2, 0], [1, 1, 0, 0, 0]]
    top_k(row(np.arange(C)), 1)
    before = top_k._cache_size()
    top_k(row(np.arange(C)), 7)
    assert top_k._cache_size() == before


def test_cuts_see_through_tokens_already_barred():
    """-inf scores have no probability and never come back, not even to reach `min_keep`."""
    scores = np.array([-np.inf, 1.0, -np.inf, 3.0], np.float32)
    assert kept(top_p(row(scores), 0.99, 3), scores).tolist() == [False, True, False, True]
    assert kept(top_k(row(scores), 3), scores).tolist() == [False, True, False, True]


def test_a_row_s_limit_is_its_own():
    """Rows of a batch with one limit each are cut as alone with it."""
    scores = jnp.asarray(np.random.default_rng(0).integers(-8, 8, (4, C)) / 2, jnp.float32)
    counts = jnp.asarray(np.random.default_rng(1).integers(0, 4, (4, C)))
    for function, limits in [(logits.keep_top_k, [1, 4, 0, C + 3]), (logits.keep_top_p, [0.3, 1.0, 0.0, 0.95]),
                             (lambda s, x: logits.frequency_penalty(s, counts, x), [1.0, 1.05, 0.5, 2.0])]:
        together = jax.jit(function)(scores, jnp.array(limits))
        for row, limit in enumerate(limits):
            np.testing.assert_array_equal(together[row], jax.jit(function)(scores, limit)[row])
        assert len({float(jnp.where(jnp.isfinite(cut), cut, 0).sum()) for cut in together}) == 4

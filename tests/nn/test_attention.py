"""The three forms of attention against the textbook formula, values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from venus_jax.nn.attention import attend, attend_cached, attend_causal
from venus_jax.sharding import TRAIN, make_mesh

B, T, N, K, H = 2, 37, 4, 2, 8


@jax.jit
def textbook(q, k, v, mask):
    """softmax(q k^T / sqrt(H)) v; query head n reads key head n // (N / K); `mask` [B, T, S]."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / q.shape[-1] ** 0.5
    weights = jnp.where(mask[:, None], jnp.exp(scores - scores.max(axis=-1, keepdims=True)), 0)
    return jnp.einsum("bnts,bsnh->btnh", weights / weights.sum(axis=-1, keepdims=True), v)


def random_qkv(batch=B, length=T, heads=N, kv_heads=K, width=H, seed=0):
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal((batch, length, n, width), np.float32) for n in (heads, kv_heads, kv_heads))


def packed(batch, length, seed=1):
    """Segments of random lengths, another packing in each row; ids need not grow."""
    rng = np.random.default_rng(seed)
    return rng.permutation(8)[np.sort(rng.integers(0, 8, (batch, length)), axis=1)].astype(np.int32)


def causal_mask(segments):
    return (segments[:, :, None] == segments[:, None]) & np.tri(segments.shape[1], dtype=bool)


def value_and_grads(function, *qkv):
    """The output, and the gradients of a random projection of it."""
    project = np.random.default_rng(2).standard_normal(qkv[0].shape, np.float32)

    def run(*qkv):
        out = function(*qkv)
        return jnp.sum(out * project), out

    grads, out = jax.jit(jax.grad(run, argnums=(0, 1, 2), has_aux=True))(*qkv)
    return out, *grads


def assert_close(ours, wanted, atol=2e-5):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


def test_packed_causal_attention_is_the_formula_however_it_is_chunked():
    qkv, segments = random_qkv(), packed(B, T)
    wanted = value_and_grads(lambda *x: textbook(*x, causal_mask(segments)), *qkv)
    for q_chunk in (T, 8):
        assert_close(value_and_grads(lambda *x: attend_causal(*x, segments, q_chunk, "xla"), *qkv), wanted)


def test_other_segments_and_the_future_do_not_leak():
    """Not even by a rounding: whatever stands elsewhere, the numbers of a segment are the same bits."""
    (q, k, v), segments = random_qkv(), np.repeat([[0, 1, 2]], [10, 9, 18], axis=1).repeat(B, axis=0)
    run = jax.jit(lambda k, v: attend_causal(q, k, v, segments, 8, "xla"))
    out = run(k, v)
    k[:, :10], v[:, :10] = 1e4, -1e4  # the first segment
    k[:, 15:], v[:, 15:] = -1e4, 1e4  # the future of position 14
    np.testing.assert_array_equal(run(k, v)[:, 10:15], out[:, 10:15])


def test_tpu_kernel_equals_the_portable_form(monkeypatch):
    """The Pallas kernel, interpreted: grouped heads, packed segments, several blocks, gradients."""
    interpret_kernel(monkeypatch)
    qkv, segments = random_qkv(1, 640, 2, 1, 128), packed(1, 640)
    kernel, portable = (value_and_grads(lambda *x: attend_causal(*x, segments, implementation=form), *qkv)
                        for form in ("splash", "xla"))
    assert_close(kernel, portable)


def test_tpu_kernel_on_a_mesh(monkeypatch):
    """Each device runs it on its own rows and heads."""
    interpret_kernel(monkeypatch)
    qkv, segments = random_qkv(4, 128, 4, 2, 128), packed(4, 128)
    with jax.set_mesh(make_mesh((2, 2, 2))):
        ours = jax.jit(lambda *x: attend_causal(*x, segments, implementation="splash", rules=TRAIN))(*qkv)
    assert_close(ours, textbook(*qkv, causal_mask(segments)))


def interpret_kernel(monkeypatch):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    monkeypatch.setattr(splash_attention_kernel, "make_splash_mha",
                        functools.partial(splash_attention_kernel.make_splash_mha, interpret=True))


@pytest.mark.parametrize("length", [128, 100])
def test_auto_runs_here_whether_or_not_the_kernel_would_fit(length):
    qkv, segments = random_qkv(1, length, 2, 1, 128), packed(1, length)
    assert_close(jax.jit(attend_causal)(*qkv, segments), textbook(*qkv, causal_mask(segments)))


def test_cached_attention_is_attention_over_cache_and_chunk_joined():
    rng = np.random.default_rng(3)
    q, k, v = random_qkv(length=5)
    _, cached_k, cached_v = random_qkv(length=11, seed=4)
    cached_mask, new_mask = rng.random((B, 5, 11)) < 0.5, rng.random((B, 5, 5)) < 0.5
    new_mask |= np.eye(5, dtype=bool)
    joined = [np.concatenate(pair, axis=1) for pair in ((cached_k, k), (cached_v, v))]
    wanted = textbook(q, *joined, np.concatenate([cached_mask, new_mask], axis=2))
    attend = jax.jit(attend_cached)
    cached_k, cached_v = (np.swapaxes(x, 1, 2) for x in (cached_k, cached_v))
    assert_close(attend(q, k, v, cached_k, cached_v, cached_mask, new_mask), wanted)

    half = attend(*(jnp.bfloat16(x) for x in (q, k, v, cached_k, cached_v)), cached_mask, new_mask)
    assert half.dtype == jnp.bfloat16
    assert_close(half.astype(jnp.float32), wanted, atol=3e-2)


def test_explicit_masks_and_grouped_heads():
    q, k, v = random_qkv()
    mask = np.random.default_rng(5).random((B, T, T)) < 0.3
    mask |= np.eye(T, dtype=bool)
    assert_close(jax.jit(attend)(q, k, v, mask[:, None]), textbook(q, k, v, mask))
    assert_close(jax.jit(attend)(q, k, v), textbook(q, k, v, np.ones_like(mask)))


def test_a_query_that_may_see_nothing_gives_finite_numbers():
    """Padding produces such rows; a NaN of theirs would spread through gradients and later layers."""
    q, k, v = random_qkv()
    nothing = np.zeros((B, T, T), bool)
    for form in (lambda q, k, v: attend(q, k, v, nothing[:, None]),
                 lambda q, k, v: attend_cached(q, k, v, *(jnp.swapaxes(x, 1, 2) for x in (k, v)), nothing, nothing)):
        assert all(np.isfinite(x).all() for x in value_and_grads(form, q, k, v))

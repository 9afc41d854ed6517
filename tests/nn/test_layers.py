"""The two heads; everything else in `layers` is Flax's and is compared with recorded numbers elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np

from venus_jax.nn.layers import Head, WeightNormHead

D = 24


def test_weight_normed_head_is_the_formula():
    """Column c of the weight has length scale[c], whatever the length of kernel[:, c]."""
    rng = np.random.default_rng(0)
    kernel = rng.standard_normal((D, 10)) * np.logspace(-2, 2, 10)
    scale, x = rng.standard_normal(10), rng.standard_normal((3, D))
    wanted = x @ (kernel / np.linalg.norm(kernel, axis=0) * scale)
    params = {"kernel": jnp.float32(kernel), "scale": jnp.float32(scale)}
    apply = lambda dtype: WeightNormHead(10, dtype).apply({"params": params}, jnp.asarray(x, dtype))
    np.testing.assert_allclose(apply(jnp.float32), wanted, rtol=0, atol=1e-5)
    half = apply(jnp.bfloat16)
    assert half.dtype == jnp.float32
    np.testing.assert_allclose(half, wanted, rtol=0, atol=0.1)


def test_padding_of_the_vocabulary_never_wins_and_changes_nothing_else():
    rng = np.random.default_rng(1)
    kernel, x = rng.standard_normal((D, 16)).astype(np.float32), -rng.random((5, D), np.float32)
    kernel[:, :11] = np.abs(kernel[:, :11])  # every real score is negative: a padding score of 0 would win
    kernel[:, 11:] = -100
    padded = Head(16, 11, jnp.float32).apply({"params": {"kernel": kernel}}, x)
    exact = Head(11, 11, jnp.float32).apply({"params": {"kernel": kernel[:, :11]}}, x)
    np.testing.assert_array_equal(padded[:, :11], exact)
    assert (jax.nn.softmax(padded)[:, 11:] == 0).all()
    assert np.isfinite(padded).all()  # -inf would make NaN of 0 * -inf

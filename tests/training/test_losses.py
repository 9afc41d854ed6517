"""Cross entropy in chunks is cross entropy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from venus_jax.training.losses import chunked_cross_entropy

B, T, D, V, ROWS = 2, 11, 8, 13, 16  # ROWS of the head, V of them tokens


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    weights = rng.random((B, T), np.float32) * (rng.random((B, T)) < 0.7)
    return (rng.standard_normal((B, T, D), np.float32), 3 * rng.standard_normal((D, ROWS)).astype(np.float32),
            rng.integers(0, V, (B, T)), weights)


def value_and_grads(loss, batch):
    hidden, kernel, targets, weights = batch
    run = lambda hidden, kernel, weights: loss(hidden, kernel, targets, weights)
    return jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2)))(hidden, kernel, weights)


def plain(hidden, kernel, targets, weights):
    scores = (hidden @ kernel)[..., :V]
    return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(scores, targets) * weights)


def test_equals_the_plain_loss_and_its_gradients(batch):
    """Eleven positions in chunks of four; a chunk longer than the sequence; a head without padding."""
    ours = value_and_grads(lambda *args: chunked_cross_entropy(*args, V, 4)[0], batch)
    wanted = value_and_grads(plain, batch)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert (np.asarray(ours[1][1])[:, V:] == 0).all()  # the padding of the head learns nothing

    hidden, kernel, targets, weights = batch
    total, weight = jax.jit(lambda *args: chunked_cross_entropy(*args, V, 64))(hidden, kernel[:, :V], targets, weights)
    np.testing.assert_allclose(total, wanted[0], rtol=1e-5)
    np.testing.assert_allclose(weight, weights.sum(), rtol=1e-6)


def test_positions_without_weight_do_not_count(batch):
    """Whatever their state or target is, the loss has the same bits; a target may even be no token."""
    hidden, kernel, targets, weights = batch
    ignored = weights == 0
    assert ignored.any()
    other = hidden + ignored[..., None] * 5, kernel, np.where(ignored, -1, targets), weights
    run = jax.jit(lambda *args: chunked_cross_entropy(*args, V, 4))
    np.testing.assert_array_equal(run(*batch), run(*other))
    grads = value_and_grads(lambda *args: chunked_cross_entropy(*args, V, 4)[0], other)[1]
    assert (np.asarray(grads[0])[ignored] == 0).all() and np.isfinite(grads[1]).all()


def test_low_precision_states_are_summed_in_float32(batch):
    """As in training: bfloat16 states, a float32 head."""
    hidden, kernel, targets, weights = batch
    loss = jax.jit(lambda *args: chunked_cross_entropy(*args, V, 4))
    total, weight = loss(jnp.bfloat16(hidden), kernel, targets, weights)
    assert total.dtype == weight.dtype == jnp.float32
    np.testing.assert_allclose(total, plain(hidden, kernel, targets, weights), rtol=2e-2)

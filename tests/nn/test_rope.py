"""Rotary positions: a rotation, relative, and right at the far end of the context."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from venus_jax.nn import rope
from venus_jax.nn.rope import angles, rotate

H, THETA = 16, 1_000_000.0


def turned(x, positions):
    """`x` [T, H] at `positions` [T]."""
    return np.asarray(rotate(jnp.asarray(x)[None, :, None], *angles(jnp.asarray(positions)[None], H, THETA))[0, :, 0])


def vectors(count, seed):
    return np.random.default_rng(seed).standard_normal((count, H), np.float32)


def test_lengths_stay():
    x = vectors(50, 0)
    length = lambda y: np.linalg.norm(y, axis=1)
    np.testing.assert_allclose(length(turned(x, np.arange(50) * 800)), length(x), rtol=1e-6)
    np.testing.assert_array_equal(turned(x, np.zeros(50, int)), x)


def test_products_depend_on_distance_alone():
    q, k, at = vectors(40, 1), vectors(40, 2), np.arange(40) * 5
    near = (turned(q, at + 3) * turned(k, at)).sum(axis=1)
    for shift in (1, 700):
        np.testing.assert_allclose((turned(q, at + shift + 3) * turned(k, at + shift)).sum(axis=1), near, atol=2e-3)
    assert np.abs((turned(q, at + 4) * turned(k, at)).sum(axis=1) - near).max() > 0.1  # and distance matters


def test_halves_are_paired():
    """Channel i turns with channel i + H/2, by position * theta**(-2i/H): not with its neighbour."""
    x = np.zeros((1, H), np.float32)
    x[0, 3] = 1
    angle = 7 * THETA ** (-6 / H)
    wanted = np.zeros(H)
    wanted[3], wanted[3 + H // 2] = np.cos(angle), np.sin(angle)
    np.testing.assert_allclose(turned(x, [7])[0], wanted, atol=1e-6)


@pytest.mark.parametrize("theta, last", [(1_000_000.0, 40_959), (10_000.0, 4_095)], ids=["backbone", "talker"])
def test_far_positions_lose_only_the_rounding_of_the_angle(theta, last):
    """Angles are float32, as the reference's: at most two roundings off. Sine and cosine add nothing to that."""
    positions = np.array([0, 1, 77, last // 3, last - 1, last])
    exact = positions[:, None] * theta ** (-np.arange(0, 128, 2) / 128)
    cos, sin = angles(jnp.asarray(positions), 128, theta)
    bound = exact * 2.0**-23 + 2.0**-22
    assert (np.abs(cos - np.cos(exact)) <= bound).all() and (np.abs(sin - np.sin(exact)) <= bound).all()


def test_half_precision_is_rotated_in_float32():
    x = jnp.asarray(vectors(8, 3), jnp.bfloat16)[None, :, None]
    at = jnp.arange(8)[None] * 5000
    ours = rotate(x, *angles(at, H, THETA))
    assert ours.dtype == jnp.bfloat16
    np.testing.assert_array_equal(ours, rotate(x.astype(jnp.float32), *angles(at, H, THETA)).astype(jnp.bfloat16))


def test_rotating_whole_heads_is_rotating_halves():
    heads_first = lambda x: jnp.swapaxes(x, 1, 2)
    x = jax.random.normal(jax.random.key(0), (2, 5, 3, 8))
    cos, sin = rope.angles(jnp.arange(10).reshape(2, 5) - 4, 8, 1e4)
    np.testing.assert_allclose(rope.rotate_whole(heads_first(x), cos, sin), heads_first(rope.rotate(x, cos, sin)), rtol=1e-6, atol=1e-6)
    half = x.astype(jnp.bfloat16)
    np.testing.assert_array_equal(rope.rotate_whole(heads_first(half), cos, sin), heads_first(rope.rotate(half, cos, sin)))

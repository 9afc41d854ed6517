"""Digits, codes and the gradient that passes the rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from venus_jax.acoustic import fsq


@pytest.mark.parametrize("levels, dims", [(3, 8), (5, 4)])
def test_every_code_has_its_digits(levels, dims):
    codes = np.arange(levels**dims)
    digits = fsq.digits(codes, dims, levels)
    assert digits.shape == (levels**dims, dims) and int(digits.min()) == 0 and int(digits.max()) == levels - 1
    np.testing.assert_array_equal(fsq.codes(digits, levels), codes)
    assert fsq.codes(np.array([1, 0, 2]), 3) == 1 + 2 * 9  # the first digit is the least


def test_values_are_the_nearest_levels():
    h = jnp.array([-50.0, -0.6, -0.5, 0.0, 0.54, 0.56, 50.0])  # tanh(0.549) is 0.5
    digits, values = fsq.quantise(h)
    assert digits.tolist() == [0, 0, 1, 1, 1, 2, 2] and values.tolist() == [-1, -1, 0, 0, 0, 1, 1]
    digits, values = fsq.quantise(h, levels=5)
    assert digits.tolist() == [0, 1, 1, 2, 3, 3, 4] and values.tolist() == [-1, -0.5, -0.5, 0, 0.5, 0.5, 1]


def test_the_gradient_is_that_of_tanh():
    h = jnp.linspace(-2, 2, 7)
    gradient = jax.grad(lambda h: (fsq.quantise(h)[1] * jnp.arange(7)).sum())(h)
    np.testing.assert_allclose(gradient, jnp.arange(7) * (1 - jnp.tanh(h)**2), rtol=1e-5)


def test_half_precision_is_rounded_in_float32():
    digits, values = fsq.quantise(jnp.array([0.546875, -3.0], jnp.bfloat16))  # 1.498, and 1.5 in bfloat16
    assert values.dtype == jnp.float32 and digits.dtype == jnp.int32 and values.tolist() == [0, -1]

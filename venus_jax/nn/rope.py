"""Rotary positions, half-split form: (a, b) -> (a cos - b sin, b cos + a sin) with a, b the two halves of a head."""

import jax.numpy as jnp
import numpy as np

from venus_jax.typing import Array, Float, Int


def angles(positions: Int[Array, "..."], head_dim: int, theta: float) -> tuple[Float[Array, "... h2"], ...]:
    """(cos, sin) of `positions * theta**(-2i/head_dim)`, float32, each `[..., head_dim // 2]`."""
    inverse = (1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)).astype(np.float32)
    phase = positions.astype(jnp.float32)[..., None] * inverse
    return jnp.cos(phase), jnp.sin(phase)


def rotate(x: Float[Array, "b t n h"], cos: Float[Array, "b t h2"], sin: Float[Array, "b t h2"]) -> Array:
    """Rotates every head of `x` by its position's angles; float32 inside, `x.dtype` outside."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def rotate_whole(x: Float[Array, "b n t h"], cos: Float[Array, "b t h2"], sin: Float[Array, "b t h2"]) -> Array:
    """`rotate` with heads first and without taking them apart: the swapped halves come from a product with a signed permutation, which is exact.

    For arrays that must stay as they lie: a TPU compiler turns a whole cache over to cut its last axis in two.
    """
    half = x.shape[-1] // 2
    swap = np.zeros((2 * half, 2 * half), np.float32)
    swap[np.arange(half) + half, np.arange(half)], swap[np.arange(half), np.arange(half) + half] = -1, 1
    swapped = jnp.einsum("bnth,hg->bntg", x, jnp.asarray(swap, x.dtype), precision="highest",
                         preferred_element_type=jnp.float32)
    both = lambda angle: jnp.concatenate([angle, angle], axis=-1)[:, None]
    return (x.astype(jnp.float32) * both(cos) + swapped * both(sin)).astype(x.dtype)

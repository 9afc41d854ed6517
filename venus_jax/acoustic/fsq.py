"""Finite scalar quantisation: a few bounded numbers, each rounded to one of `levels`, read as digits of a code.

Rule: minicpmo45.md 6.5; 8 dimensions of 3 levels are the 6561 codes of the speech tokenizer.
"""

import jax
import jax.numpy as jnp
import numpy as np

from venus_jax.typing import Array, Float, Int

MARGIN = 1e-6  # values are kept this far inside (-1, 1)


def quantise(h: Float[Array, "... c"], levels: int = 3) -> tuple[Int[Array, "... c"], Float[Array, "... c"]]:
    """Rounds `tanh(h)` to `levels` evenly spaced values from -1 to 1; float32 inside.

    Returns:
      digits, int32 in `[0, levels)`; and the rounded values, float32, whose gradient is that of `tanh(h)`
      (straight through), for what is trained behind them.
    """
    soft = jnp.tanh(h.astype(jnp.float32))
    half = (levels - 1) / 2
    rounded = jnp.round((jnp.clip(soft, -1 + MARGIN, 1 - MARGIN) + 1) * half)
    return rounded.astype(jnp.int32), soft + jax.lax.stop_gradient(rounded / half - 1 - soft)


def codes(digits: Int[Array, "... c"], levels: int = 3) -> Int[Array, "..."]:
    """Digits, the first the least significant, to codes in `[0, levels ** C)`; int32."""
    return jnp.sum(digits * _powers(digits.shape[-1], levels), axis=-1, dtype=jnp.int32)


def digits(codes: Int[Array, "..."], dims: int = 8, levels: int = 3) -> Int[Array, "... c"]:
    """The inverse of `codes`: int32 `[..., dims]`."""
    return (codes[..., None] // _powers(dims, levels) % levels).astype(jnp.int32)


def _powers(dims: int, levels: int) -> np.ndarray:
    return (levels ** np.arange(dims)).astype(np.int32)

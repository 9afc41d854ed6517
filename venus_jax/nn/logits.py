"""What is done to scores before a draw: penalties and cuts, on the last axis, float32.

Limits may be traced, and are one number for all rows or `[B]`, one a row.
"""

import jax
import jax.numpy as jnp

from venus_jax.typing import Array, Bool, Float, Int


def count_tokens(tokens: Int[Array, "b w"], counted: Bool[Array, "b w"], size: int) -> Int[Array, "b c"]:
    """How often each of `size` tokens occurs among the counted ones of each row."""
    rows = jnp.arange(tokens.shape[0])[:, None]
    where = jnp.where(counted, tokens, size)
    return jnp.zeros((tokens.shape[0], size), jnp.int32).at[rows, where].add(1, mode="drop")


def frequency_penalty(scores: Float[Array, "b c"], counts: Int[Array, "b c"], penalty) -> Float[Array, "b c"]:
    """`penalty**count`: positive scores are divided by it, negative ones multiplied."""
    factor = jnp.power(_per_row(penalty).astype(jnp.float32), counts)
    return jnp.where(scores < 0, scores * factor, scores / factor)


def keep_top_k(scores: Float[Array, "b c"], k) -> Float[Array, "b c"]:
    """-inf below the k-th largest score; ties with it stay."""
    ordered = jnp.sort(scores, axis=-1, descending=True)
    kth = jnp.take_along_axis(ordered, jnp.clip(_per_row(k), 1, scores.shape[-1]) - 1, axis=-1)
    return jnp.where(scores < kth, -jnp.inf, scores)


def keep_top_p(scores: Float[Array, "b c"], p, min_keep=1) -> Float[Array, "b c"]:
    """-inf outside the smallest set of likely tokens whose probability reaches `p`; at least `min_keep` stay.

    A token stays while the probability of all likelier ones is below `p`; with `p` of 1 or more all stay.
    """
    order = jnp.argsort(scores, axis=-1, descending=True, stable=True)
    probability = jax.nn.softmax(jnp.take_along_axis(scores, order, axis=-1), axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    p = _per_row(p)
    stays = (before < p) | (p >= 1) | (jnp.arange(scores.shape[-1]) < min_keep)
    back = jnp.argsort(order, axis=-1)
    return jnp.where(jnp.take_along_axis(stays, back, axis=-1), scores, -jnp.inf)


def _per_row(limit):
    """[1, 1] or [B, 1]."""
    return jnp.asarray(limit).reshape(-1, 1)

"""Keys and values of earlier positions, as arrays of fixed shape.

Heads come before slots: what one head attends to lies together, so no compiler has to turn a cache over to multiply it.
Every row owns `S` slots; `slot_position` says which position a slot holds (-1: none). Masks come from it alone, so
eviction, reset and ragged batches are integer edits and nothing is shifted. New entries are scattered with
`mode="drop"`: slot `S` means "nowhere". Networks read a cache and return the new entries; one scatter writes all layers.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from venus_jax.nn import rope
from venus_jax.sharding import Rules
from venus_jax.typing import Array, Bool, Float, Int


class KVCache(NamedTuple):
    """`k`, `v`: `[L, B, K, S, H]`, keys after rotation; `slot_position`: int32 `[B, S]`; `next_position`: int32 `[B]`."""

    k: Float[Array, "l b k s h"]
    v: Float[Array, "l b k s h"]
    slot_position: Int[Array, "b s"]
    next_position: Int[Array, "b"]


def empty(num_layers: int, batch: int, slots: int, num_kv_heads: int, head_dim: int, dtype=jnp.float32) -> KVCache:
    """A cache that holds nothing."""
    shape = (num_layers, batch, num_kv_heads, slots, head_dim)
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.full((batch, slots), -1, jnp.int32),
                   jnp.zeros((batch,), jnp.int32))


def specs(rules: Rules, heads: str | None = "kv_heads", batch: str | None = "batch") -> KVCache:
    """PartitionSpecs of a cache: rows over the axes of `batch`, heads over those of `heads` (None: whole)."""
    entry = rules.spec(None, batch, heads, "cache_slots", None)
    return KVCache(entry, entry, rules.spec(batch, "cache_slots"), rules.spec(batch))


def next_positions(cache: KVCache, valid: Bool[Array, "b t"]) -> Int[Array, "b t"]:
    """Positions the valid entries of a chunk take, counted on from `next_position`; -1 where not valid."""
    return jnp.where(valid, cache.next_position[:, None] + jnp.cumsum(valid, axis=1) - 1, -1)


def append(cache: KVCache, k: Float[Array, "l b t k h"], v: Float[Array, "l b t k h"],
           positions: Int[Array, "b t"], slots: Int[Array, "b t"] | None = None) -> KVCache:
    """Writes a chunk. `positions` -1 are skipped; `slots` defaults to the positions themselves (no reuse).

    An entry whose slot is `S` or more is dropped and `next_position` still advances: the caller sees the overflow as
    `next_position > S` (see `overflowed`) instead of a silently moved entry.
    """
    size = cache.slot_position.shape[1]
    slots = positions if slots is None else slots
    slots = jnp.where(positions < 0, size, slots)  # negative indices would wrap
    # Layers, rows and heads are batch dimensions of the scatter, each with its own slots: it stays inside a device's share
    # of them, and what is written at once, the width of a head, lies together. Anything wider would turn the cache over.
    at = jnp.broadcast_to(slots[None, :, None], (*cache.k.shape[:3], slots.shape[1]))
    one = lambda held, new, at: held.at[at].set(new.astype(held.dtype), mode="drop")
    over_all = jax.vmap(jax.vmap(jax.vmap(one)))
    write = lambda held, new: over_all(held, jnp.swapaxes(new, 2, 3), at)
    return KVCache(
        write(cache.k, k),
        write(cache.v, v),
        cache.slot_position.at[jnp.arange(positions.shape[0])[:, None], slots].set(positions, mode="drop"),
        jnp.maximum(cache.next_position, positions.max(axis=1) + 1))


def overflowed(cache: KVCache) -> Bool[Array, "b"]:
    """Rows that were given more positions than they have slots (for caches that never reuse a slot)."""
    return cache.next_position > cache.slot_position.shape[1]


def reset(cache: KVCache, rows: Bool[Array, "b"]) -> KVCache:
    """Forgets the marked rows. Stale numbers stay in `k` and `v` and are masked, which only finite numbers obey: keep
    NaN and infinity out of a session's input.
    """
    return cache._replace(slot_position=jnp.where(rows[:, None], -1, cache.slot_position),
                          next_position=jnp.where(rows, 0, cache.next_position))


def reposition(cache: KVCache, new_position: Int[Array, "b s"], theta: float) -> KVCache:
    """Moves entries to other positions (-1 drops one): keys are turned by the difference, slots and values stay.

    This is the reference's un-rotate and re-rotate as one rotation; float32 inside. Slot and position are unrelated from
    then on: append with `free_slots`.
    """
    held = (new_position >= 0) & (cache.slot_position >= 0)
    new_position = jnp.where(held, new_position, -1)
    cos, sin = rope.angles(jnp.where(held, new_position - cache.slot_position, 0), cache.k.shape[-1], theta)
    # Layer by layer, in place: rotated all at once the keys would be held twice more, in float32.
    turn = lambda layer, k: k.at[layer].set(rope.rotate_whole(k[layer], cos, sin))
    k = jax.lax.fori_loop(0, cache.k.shape[0], turn, cache.k)
    return KVCache(k, cache.v, new_position, new_position.max(axis=1) + 1)


def free_slots(cache: KVCache, valid: Bool[Array, "b t"]) -> Int[Array, "b t"]:
    """The first unused slot for each valid entry of a chunk, `S` where none is left (or where not valid).

    An entry given `S` is dropped by `append` without a sign: check `length` before, `overflowed` cannot tell. For caches
    that drop entries anywhere: positions and slots are then unrelated.
    """
    size = cache.slot_position.shape[1]
    unused = cache.slot_position < 0
    order = jnp.argsort(~unused, axis=1, stable=True)  # unused slots first, lowest first
    nth = jnp.cumsum(valid, axis=1) - 1
    slots = jnp.take_along_axis(order, jnp.clip(nth, 0, size - 1), axis=1)
    return jnp.where(valid & (nth < unused.sum(axis=1, keepdims=True)), slots, size)


def ranks(cache: KVCache) -> Int[Array, "b s"]:
    """Place of every held entry in order of position (0: oldest); numbers at empty slots mean nothing."""
    order = jnp.where(cache.slot_position < 0, jnp.iinfo(jnp.int32).max, cache.slot_position)
    return jnp.argsort(jnp.argsort(order, axis=1), axis=1)


def keep(cache: KVCache, mask: Bool[Array, "b s"]) -> KVCache:
    """Drops held entries outside `mask`; the kept ones stay at their positions."""
    return cache._replace(slot_position=jnp.where(mask, cache.slot_position, -1))


def length(cache: KVCache) -> Int[Array, "b"]:
    """Entries held per row."""
    return (cache.slot_position >= 0).sum(axis=1)

"""Scaled dot-product attention with grouped heads: softmax in float32, three forms.

* `attend`: a mask is given; whole sequences of encoders.
* `attend_cached`: a chunk against a cache and itself, without joining the two in memory.
* `attend_causal`: long training sequences with packed segments; a Pallas kernel on TPU, query chunks elsewhere.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from venus_jax.sharding import Rules
from venus_jax.typing import Array, Bool, Float, Int

NEGATIVE = -0.7 * float(jnp.finfo(jnp.float32).max)  # finite: a row that may see nothing stays free of NaN


def attend(q: Float[Array, "b t n h"], k: Float[Array, "b s k h"], v: Float[Array, "b s k h"],
           mask: Bool[Array, "b #n #t s"] | None = None) -> Float[Array, "b t n h"]:
    """Attention under an explicit mask (True: may see). N is a multiple of K; scale is H**-0.5."""
    return jax.nn.dot_product_attention(q, k, v, mask=mask)


def attend_cached(q: Float[Array, "b t n h"], k: Float[Array, "b t k h"], v: Float[Array, "b t k h"],
                  cached_k: Float[Array, "b k s h"], cached_v: Float[Array, "b k s h"],
                  cached_mask: Bool[Array, "b t s"], new_mask: Bool[Array, "b t t"]) -> Float[Array, "b t n h"]:
    """Attention of a chunk over cached entries and over the chunk itself.

    The two parts share a maximum and a sum and are never joined: the cache is read once and not copied.
    """
    b, t, n, h = q.shape
    group = jnp.moveaxis(q.reshape(b, t, k.shape[2], n // k.shape[2], h), 1, 3)  # [B, K, G, T, H]

    def scores(keys, mask):
        s = jnp.einsum("bkgth,bksh->bkgts", group, keys, preferred_element_type=jnp.float32) * h**-0.5
        return jnp.where(mask[:, None, None], s, NEGATIVE)

    parts = ((scores(cached_k, cached_mask), cached_v), (scores(jnp.swapaxes(k, 1, 2), new_mask), jnp.swapaxes(v, 1, 2)))
    largest = jnp.maximum(*(s.max(axis=-1, keepdims=True) for s, _ in parts))
    weights = [jnp.exp(s - largest) for s, _ in parts]
    total = sum(w.sum(axis=-1, keepdims=True) for w in weights)
    out = sum(jnp.einsum("bkgts,bksh->bkgth", w.astype(v.dtype), values, preferred_element_type=jnp.float32)
              for w, (_, values) in zip(weights, parts))
    return jnp.moveaxis(out / total, 3, 1).reshape(b, t, n, h).astype(q.dtype)


def attend_causal(q: Float[Array, "b t n h"], k: Float[Array, "b t k h"], v: Float[Array, "b t k h"],
                  segment_ids: Int[Array, "b t"], q_chunk: int = 512, implementation: str = "auto",
                  rules: Rules | None = None) -> Float[Array, "b t n h"]:
    """Causal attention inside equal `segment_ids`; the sequence index is the order.

    Args:
      q_chunk: queries scored at once by the XLA form; T need not divide by it.
      implementation: "xla", "splash" (TPU kernel) or "auto": splash when compiled for TPU and the shape allows it (T
        and H multiples of 128, rows and heads that divide over the mesh).
      rules: how batch and heads lie on the mesh; the kernel runs per shard and must be told.
    """
    shards = rules is None or all(rules.divides(logical, size) for logical, size in (
        ("batch", q.shape[0]), ("heads", q.shape[2]), ("kv_heads", k.shape[2])))
    kernel_fits = q.shape[1] % 128 == 0 and q.shape[-1] % 128 == 0 and shards
    xla = functools.partial(_chunked, q_chunk=q_chunk)
    if implementation == "xla" or (implementation == "auto" and not kernel_fits):
        return xla(q, k, v, segment_ids)
    splash = _splash if rules is None else _per_shard(_splash, rules)
    if implementation == "splash":
        return splash(q, k, v, segment_ids)
    return jax.lax.platform_dependent(q, k, v, segment_ids, tpu=splash, default=xla)


def _chunked(q, k, v, segment_ids, q_chunk):
    """Queries in chunks, each against all keys; scores are recomputed in the backward pass, never kept."""
    t = q.shape[1]
    index = jnp.arange(t)

    def chunk(q_part, segments_part, index_part):
        mask = (segments_part[:, :, None] == segment_ids[:, None, :]) & (index_part[:, None] >= index)
        return attend(q_part, k, v, mask[:, None])

    if t <= q_chunk:
        return chunk(q, segment_ids, index)
    count = -(-t // q_chunk)
    pad = count * q_chunk - t

    def split(x):  # [B, T, ...] -> [count, B, q_chunk, ...]
        x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], count, q_chunk, *x.shape[2:]), 1, 0)

    parts = split(q), split(segment_ids), jnp.arange(count * q_chunk).reshape(count, q_chunk)
    out = jax.lax.map(lambda part: jax.checkpoint(chunk)(*part), parts)
    return jnp.moveaxis(out, 0, 1).reshape(q.shape[0], -1, *q.shape[2:])[:, :t]


def _splash(q, k, v, segment_ids):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    t, n = q.shape[1:3]
    mask = masks.MultiHeadMask([masks.CausalMask((t, t))] * n)
    block = next(size for size in (512, 384, 256, 128) if t % size == 0)
    sizes = kernel.BlockSizes(block_q=block, block_kv=block, block_kv_compute=block, block_q_dkv=block,
                              block_kv_dkv=block, block_kv_dkv_compute=block, block_q_dq=block, block_kv_dq=block)
    attend_one = kernel.make_splash_mha(mask=mask, head_shards=1, q_seq_shards=1, block_sizes=sizes)
    heads_first = lambda x: jnp.swapaxes(x, 1, 2)
    q = (q * q.shape[-1] ** -0.5).astype(q.dtype)
    out = jax.vmap(attend_one)(heads_first(q), heads_first(k), heads_first(v),
                               segment_ids=kernel.SegmentIds(segment_ids, segment_ids))
    return heads_first(out)


def _per_shard(function, rules: Rules):
    """Runs the kernel on each device's share: rows over the batch axes, heads over the tensor axis."""
    heads, rows = P(rules.axes("batch"), None, rules.axes("heads"), None), P(rules.axes("batch"), None)
    kv = P(rules.axes("batch"), None, rules.axes("kv_heads"), None)
    return jax.shard_map(function, in_specs=(heads, kv, kv, rows), out_specs=heads, check_vma=False)

"""The pre-norm decoder shared by the backbone (Qwen3) and the talker (Llama): scanned blocks around a KV cache.

    x += o(attention(rope(norm(q x)), rope(norm(k x)), v x));  x += down(silu(gate x) * up x)

A block reads its layer's cache and returns the chunk's keys and values; `kv_cache.append` writes all layers at once
after the scan, so the cache is never copied layer by layer.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from venus_jax.nn import attention, kv_cache, layers, rope
from venus_jax.sharding import Rules, constrain
from venus_jax.typing import Array, Bool, Float, Int


class DecoderAttention(nn.Module):
    """Rotary self-attention, grouped heads, optional RMS norm of every query and key head (`qk_norm`)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    qk_norm: bool
    dtype: Any
    rules: Rules | None
    implementation: str
    q_chunk: int

    @nn.compact
    def __call__(self, x, angles, segment_ids, cached):
        def heads(name, count):
            y = layers.linear(count * self.head_dim, self.dtype, name, bias=False)(x)
            return y.reshape(*x.shape[:2], count, self.head_dim)

        q, k, v = heads("q_proj", self.num_heads), heads("k_proj", self.num_kv_heads), heads("v_proj", self.num_kv_heads)
        if self.qk_norm:
            q = layers.rms_norm(self.rms_eps, self.dtype, "q_norm")(q)
            k = layers.rms_norm(self.rms_eps, self.dtype, "k_norm")(k)
        q, k = rope.rotate(q, *angles), rope.rotate(k, *angles)
        if cached is None:
            out = attention.attend_causal(q, k, v, segment_ids, self.q_chunk, self.implementation, self.rules)
        else:
            out = attention.attend_cached(q, k, v, *cached)
        out = constrain(out, self.rules, "batch", "len", "heads", None).reshape(*x.shape[:2], -1)
        return layers.linear(x.shape[-1], self.dtype, "o_proj", bias=False)(out), (k, v)


class DecoderBlock(nn.Module):
    """One layer; `(x, ...) -> (x, (x if keep_layers, (k, v) if cached))` for the scan."""

    attention: dict[str, Any]
    intermediate_size: int
    keep_layers: bool

    @nn.compact
    def __call__(self, x, layer_cache, angles, segment_ids, masks):
        eps, dtype, rules = (self.attention[key] for key in ("rms_eps", "dtype", "rules"))
        x = constrain(x, rules, "batch", "len", "act_embed")
        cached = None if layer_cache is None else (*layer_cache, *masks)
        mixed, new = DecoderAttention(**self.attention, name="attn")(
            layers.rms_norm(eps, dtype, "attn_norm")(x), angles, segment_ids, cached)
        x += mixed
        x += layers.GatedMLP(self.intermediate_size, dtype, name="mlp")(layers.rms_norm(eps, dtype, "mlp_norm")(x))
        return x, (x if self.keep_layers else None, None if layer_cache is None else new)


class Decoder(nn.Module):
    """A stack of blocks and the final norm.

    Attributes:
      remat: recompute each block in the backward pass instead of keeping its activations.
      keep_layers: also return every block's output (for parity tests).
      implementation, q_chunk: see `attention.attend_causal`; used without a cache.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope_theta: float
    qk_norm: bool
    dtype: Any = jnp.float32
    rules: Rules | None = None
    remat: bool = False
    keep_layers: bool = False
    implementation: str = "auto"
    q_chunk: int = 512

    def setup(self):
        block = nn.remat(DecoderBlock, prevent_cse=False) if self.remat else DecoderBlock
        stack = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True},
                        in_axes=(0, nn.broadcast, nn.broadcast, nn.broadcast), length=self.num_layers)
        shape = dict(num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim,
                     rms_eps=self.rms_eps, qk_norm=self.qk_norm, dtype=self.dtype, rules=self.rules,
                     implementation=self.implementation, q_chunk=self.q_chunk)
        if self.has_variable("params", "layers_0"):  # see `layers.separate_layers`
            self.layers = [block(shape, self.intermediate_size, self.keep_layers) for _ in range(self.num_layers)]
        else:
            self.layers = stack(shape, self.intermediate_size, self.keep_layers)
        self.norm = layers.rms_norm(self.rms_eps, self.dtype)

    def __call__(self, x: Float[Array, "b t d"], positions: Int[Array, "b t"],
                 segment_ids: Int[Array, "b t"] | None = None, cache: kv_cache.KVCache | None = None,
                 slots: Int[Array, "b t"] | None = None):
        """Runs the stack over embeddings.

        Args:
          x: embeddings.
          positions: rotary positions, -1 at padding (with a cache padding is neither seen nor written).
          segment_ids: without a cache: tokens see earlier tokens of their own segment; default one segment.
          cache: earlier keys and values; the chunk attends to them and to itself, then is written.
          slots: where the chunk goes; by default slot = position.

        Returns:
          hidden after the final norm `[B, T, D]`, the new cache (None without one), and per-block outputs
          `[L, B, T, D]` (None unless `keep_layers`).
        """
        angles = rope.angles(jnp.maximum(positions, 0), self.head_dim, self.rope_theta)
        masks = layer_cache = None
        if cache is None:
            segment_ids = jnp.zeros_like(positions) if segment_ids is None else segment_ids
        else:
            masks, layer_cache = causal_masks(positions, cache), (cache.k, cache.v)
        x, (per_layer, new) = layers.run_stack(self.layers, x.astype(self.dtype), layer_cache, angles, segment_ids, masks)
        if cache is not None:
            cache = kv_cache.append(cache, *new, positions, slots)
        return self.norm(x), cache, per_layer


def causal_masks(positions: Int[Array, "b t"], cache: kv_cache.KVCache
                 ) -> tuple[Bool[Array, "b t s"], Bool[Array, "b t t"]]:
    """Who sees what by position alone: cached entries at or before the query, and the chunk's own earlier tokens."""
    query = positions[:, :, None]
    held = cache.slot_position[:, None]
    return (held >= 0) & (held <= query), (positions[:, None] >= 0) & (positions[:, None] <= query)

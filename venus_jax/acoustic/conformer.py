"""Conformer encoder of the flow: speech codes' embeddings to states at twice their rate, whole or chunk by chunk.

    linear, norm -> look ahead 3 -> blocks at the rate of codes -> repeat twice, convolve -> linear, norm -> blocks

Every query sees its whole chunk and everything cached. Keys lie in the cache in order of time, and distances count
cached places, so what was trimmed leaves no gap. Rules: minicpmo45.md 6.5.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from venus_jax.acoustic.config import LOOKAHEAD, MEL_PER_CODE, FlowConfig
from venus_jax.nn import layers
from venus_jax.nn.attention import NEGATIVE
from venus_jax.typing import Array, Bool, Float, Int

_BLOCK_EPSILON, _EPSILON = 1e-12, 1e-5
_LEFT, _UP_LEFT = 2, 4  # frames the two causal convolutions remember
_UP_KERNEL = 5
_LEAK = 0.01


class KeyValues(NamedTuple):
    """Of all layers of a stack, heads before slots."""

    k: Float[Array, "l b n s h"]
    v: Float[Array, "l b n s h"]


class ConformerCache(NamedTuple):
    """What a chunk needs of those before. Of the slots, the first `count` (twice as many in `up`) are filled, in order.

    `left`, `up_left`: inputs the causal convolutions remember.
    """

    low: KeyValues
    up: KeyValues
    left: Float[Array, "b 2 d"]
    up_left: Float[Array, "b 4 d"]
    count: Int[Array, "b"]


def empty_cache(config: FlowConfig, batch: int, slots: int, dtype: Any) -> ConformerCache:
    """`slots` codes, none filled."""
    d, n = config.hidden_size, config.num_heads

    def stack(num_layers, size):
        return KeyValues(*(jnp.zeros((num_layers, batch, n, size, d // n), dtype) for _ in range(2)))

    return ConformerCache(stack(config.num_layers, slots), stack(config.num_up_layers, MEL_PER_CODE * slots),
                          jnp.zeros((batch, _LEFT, d), dtype), jnp.zeros((batch, _UP_LEFT, d), dtype),
                          jnp.zeros((batch,), jnp.int32))


class RelativeAttention(nn.Module):
    """Scores `((q + u) k + (q + w) W e(distance)) / sqrt(H)` over cached and new keys; returns the new ones, too."""

    num_heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x, cached: KeyValues, distance: Int[Array, "b t s"], mask: Bool[Array, "b t s"],
                 table: Float[Array, "r d"]):
        b, t, d = x.shape
        heads = lambda y: y.reshape(*y.shape[:-1], self.num_heads, d // self.num_heads)
        q, k, v = (heads(layers.linear(d, self.dtype, f"{name}_proj")(x)) for name in "qkv")
        far = heads(layers.linear(d, self.dtype, "pos_proj", bias=False)(table))
        near_bias, far_bias = (self.param(name, layers.KERNEL_INIT, (self.num_heads, d // self.num_heads)).astype(self.dtype)
                               for name in ("key_bias", "pos_bias"))
        new = KeyValues(jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2))
        keys, values = (jnp.concatenate([old.astype(self.dtype), y], axis=2) for old, y in zip(cached, new))
        near = jnp.einsum("btnh,bnsh->bnts", q + near_bias, keys, preferred_element_type=jnp.float32)
        by_distance = jnp.einsum("btnh,rnh->bntr", q + far_bias, far, preferred_element_type=jnp.float32)
        scores = near + jnp.take_along_axis(by_distance, distance[:, None], axis=3)
        scores = jnp.where(mask[:, None], scores * (d // self.num_heads)**-0.5, NEGATIVE)
        weights = jax.nn.softmax(scores, axis=-1).astype(self.dtype)
        out = jnp.einsum("bnts,bnsh->btnh", weights, values).reshape(b, t, d)
        return layers.linear(d, self.dtype, "out_proj")(out), new


class Block(nn.Module):
    """One layer; `(x, cached, ...) -> (x, new keys and values)` for the scan."""

    num_heads: int
    width: int
    dtype: Any

    @nn.compact
    def __call__(self, x, cached, distance, mask, table):
        y, new = RelativeAttention(self.num_heads, self.dtype, name="attn")(
            layers.layer_norm(_BLOCK_EPSILON, self.dtype, "attn_norm")(x), cached, distance, mask, table)
        x += y
        y = layers.linear(self.width, self.dtype, "fc1")(layers.layer_norm(_BLOCK_EPSILON, self.dtype, "mlp_norm")(x))
        return x + layers.linear(x.shape[-1], self.dtype, "fc2")(nn.silu(y)), new


class Stack(nn.Module):
    """`linear, norm, times sqrt(D)`; then, with `between` done, the blocks over a cache of which `count` are filled."""

    config: FlowConfig
    num_layers: int
    dtype: Any

    def setup(self):
        c = self.config
        self.linear = layers.linear(c.hidden_size, self.dtype)
        self.norm = layers.layer_norm(_EPSILON, self.dtype)
        shape = (c.num_heads, c.intermediate_size, self.dtype)
        if self.has_variable("params", "layers_0"):  # see `layers.separate_layers`
            self.layers = [Block(*shape) for _ in range(self.num_layers)]
        else:
            self.layers = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True},
                                  in_axes=(0, *(nn.broadcast,) * 3), length=self.num_layers)(*shape)

    def embed(self, x):
        return self.norm(self.linear(x)) * math.sqrt(self.config.hidden_size)

    def __call__(self, x, valid, cached: KeyValues, count):
        t, slots = x.shape[1], cached.k.shape[3]
        query, filled = jnp.arange(t), jnp.arange(slots)
        old = count[:, None, None] + query[:, None] - filled  # [B, T, S]
        new = jnp.broadcast_to(query[:, None] - query, (x.shape[0], t, t))
        distance = jnp.concatenate([old, new], axis=2)
        seen = jnp.concatenate([filled < count[:, None], query < valid[:, None]], axis=1)
        mask = jnp.broadcast_to(seen[:, None], distance.shape)
        table = distances(1 - t, slots + t, self.config.hidden_size).astype(self.dtype)
        return layers.run_stack(self.layers, x, cached, (distance + t - 1).clip(0, len(table) - 1), mask, table)


class Conformer(nn.Module):
    """Params `{low, look1, look2, up_conv, up, norm}`."""

    config: FlowConfig
    dtype: Any = jnp.float32

    def setup(self):
        c, conv = self.config, lambda width: nn.Conv(self.config.hidden_size, (width,), padding="VALID",
                                                     dtype=self.dtype, kernel_init=layers.KERNEL_INIT)
        self.low = Stack(c, c.num_layers, self.dtype)
        self.look1, self.look2, self.up_conv = conv(LOOKAHEAD + 1), conv(_LEFT + 1), conv(_UP_KERNEL)
        self.up = Stack(c, c.num_up_layers, self.dtype)
        self.norm = layers.layer_norm(_EPSILON, self.dtype)

    def __call__(self, x: Float[Array, "b t d"], given: Int[Array, "b"], last: Bool[Array, "b"], cache: ConformerCache):
        """Encodes a chunk.

        Args:
          x: embeddings of codes; what lies beyond `given` is not heard.
          given: codes of this chunk, look ahead included.
          last: nothing follows: the look ahead is silence, and all `given` codes are encoded; otherwise 3 fewer.

        Returns:
          states `[B, 2 T, D]`; how many count, `[B]`; new keys and values of the stack at the rate of codes `[L, B, N,
          T, H]` and of mel frames; and the cache's `left`, `up_left` after this chunk.
        """
        heard = jnp.arange(x.shape[1]) < given[:, None]
        x = jnp.where(heard[..., None], self.low.embed(x.astype(self.dtype)), 0)
        codes = jnp.where(last, given, (given - LOOKAHEAD).clip(0))
        ahead = nn.leaky_relu(self.look1(jnp.pad(x, ((0, 0), (0, LOOKAHEAD), (0, 0)))), _LEAK)
        left = jnp.concatenate([cache.left.astype(self.dtype), ahead], axis=1)
        x += self.look2(left)
        x, low = self.low(x, codes, cache.low, cache.count)

        x = jnp.repeat(x, MEL_PER_CODE, axis=1)
        up_left = jnp.concatenate([cache.up_left.astype(self.dtype), x], axis=1)
        x, up = self.up(self.up.embed(self.up_conv(up_left)), MEL_PER_CODE * codes, cache.up, MEL_PER_CODE * cache.count)
        return (self.norm(x), MEL_PER_CODE * codes, low, up, remembered(left, codes, _LEFT),
                remembered(up_left, MEL_PER_CODE * codes, _UP_LEFT))


def remembered(x: Float[Array, "b t d"], new: Int[Array, "b"], size: int) -> Float[Array, "b s d"]:
    """The `size` frames of `x` that end where `new` frames behind its first `size` do."""
    return jnp.take_along_axis(x, (new[:, None] + jnp.arange(size))[..., None], axis=1)


def distances(low: int, high: int, width: int) -> Float[Array, "r d"]:
    """Sinusoids of the distances low, ..., high - 1: sine and cosine in turn."""
    frequency = np.exp(np.arange(0, width, 2, dtype=np.float32) * np.float32(-math.log(1e4) / width))
    angle = np.arange(low, high, dtype=np.float32)[:, None] * frequency
    return jnp.asarray(np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(high - low, width))

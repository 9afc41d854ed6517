"""2-D perceiver resampler: learned queries read a slice's patches; keys carry sine positions of column and row.

    kv = LN(x W_kv);  y = attention(LN(query), kv + position, kv);  out = LN(y) @ proj
"""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from venus_jax.config import ResamplerConfig
from venus_jax.nn import attention, layers
from venus_jax.typing import Array, Float, Int


class CrossAttention(nn.Module):
    """Multi-head attention with biases and separate query, key and value inputs."""

    num_heads: int
    dtype: Any

    @nn.compact
    def __call__(self, q, k, v, mask):
        def heads(name, x):
            y = layers.linear(x.shape[-1], self.dtype, name)(x)
            return y.reshape(*x.shape[:2], self.num_heads, -1)

        out = attention.attend(heads("q_proj", q), heads("k_proj", k), heads("v_proj", v), mask)
        return layers.linear(q.shape[-1], self.dtype, "out_proj")(out.reshape(q.shape))


class Resampler(nn.Module):
    """Params `{query, proj, kv_proj, attn, ln_q, ln_kv, ln_post}`."""

    config: ResamplerConfig
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "m p w"], grid_hw: Int[Array, "m 2"]) -> Float[Array, "m q d"]:
        """Compresses the patches of each slice to `num_queries` embeddings of the backbone's width.

        Args:
          x: vision states in row-major patch order.
          grid_hw: patches down and across per slice; patches beyond `h * w` are not read.
        """
        c = self.config
        norm = lambda name, y: layers.layer_norm(c.layer_norm_eps, self.dtype, name)(y)
        init = nn.initializers.normal(0.02)
        query = self.param("query", init, (c.num_queries, c.hidden_size)).astype(self.dtype)
        proj = self.param("proj", init, (c.hidden_size, c.hidden_size)).astype(self.dtype)

        kv = norm("ln_kv", layers.linear(c.hidden_size, self.dtype, "kv_proj", bias=False)(x))
        q = jnp.broadcast_to(norm("ln_q", query), (x.shape[0], *query.shape))
        index, width = jnp.arange(x.shape[1]), jnp.maximum(grid_hw[:, 1:], 1)
        keys = kv + sine_positions(index // width, index % width, c.hidden_size).astype(kv.dtype)
        valid = index < grid_hw.prod(axis=1)[:, None]
        y = CrossAttention(c.num_heads, self.dtype, name="attn")(q, keys, kv, valid[:, None, None])
        return norm("ln_post", y) @ proj


def sine_positions(row: Int[Array, "m p"], column: Int[Array, "m p"], width: int) -> Float[Array, "m p d"]:
    """[sin(column w), cos(column w), sin(row w), cos(row w)], w_k = 10000**(-4k/width), a quarter of `width` each."""
    quarter = width // 4
    omega = (1.0 / 10_000 ** (np.arange(quarter, dtype=np.float32) / np.float32(quarter))).astype(np.float32)
    phases = [axis.astype(jnp.float32)[..., None] * omega for axis in (column, row)]
    return jnp.concatenate([f(phase) for phase in phases for f in (jnp.sin, jnp.cos)], axis=-1)

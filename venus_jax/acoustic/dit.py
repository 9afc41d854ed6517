"""Estimator of the flow: a diffusion transformer over mel frames, whole or chunk by chunk.

A frame sees its whole chunk and everything cached; there are no positions, which convolutions between the layers make
up for. Rules: minicpmo45.md 6.5.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from venus_jax.acoustic.config import FlowConfig
from venus_jax.acoustic.conformer import remembered
from venus_jax.nn import attention, layers
from venus_jax.typing import Array, Bool, Float, Int

_EPSILON, _MODULATED_EPSILON = 1e-5, 1e-6
_KERNEL = 3
LEFT = _KERNEL - 1  # frames each convolution remembers
_TIME_SCALE, _TIME_FEATURES, _SLOWEST = 1000.0, 256, 1e4


class LayerCache(NamedTuple):
    """Of all layers on a leading axis; `left`: inputs of the two convolutions, side by side."""

    k: Float[Array, "l b n s h"]
    v: Float[Array, "l b n s h"]
    left: Float[Array, "l b 2 e"]


class Attention(nn.Module):
    """Heads with normalised queries and keys; returns the new keys and values `[B, N, T, H]`, too."""

    config: FlowConfig
    dtype: Any

    @nn.compact
    def __call__(self, x, valid, cached, visible):
        n, h = self.config.dit_num_heads, self.config.dit_head_dim
        q, k, v = (layers.linear(n * h, self.dtype, f"{name}_proj")(x).reshape(*x.shape[:2], n, h) for name in "qkv")
        q, k = (layers.layer_norm(_EPSILON, self.dtype, f"{name}_norm")(y) for name, y in (("q", q), ("k", k)))
        if cached is None:
            out = attention.attend(q, k, v, valid[:, None, None])
        else:
            b, t = x.shape[:2]
            old, new = (jnp.broadcast_to(mask[:, None], (b, t, mask.shape[1])) for mask in (visible, valid))
            out = attention.attend_cached(q, k, v, *(y.astype(self.dtype) for y in cached), old, new)
        out = layers.linear(x.shape[-1], self.dtype, "out_proj")(out.reshape(*x.shape[:2], n * h))
        return out, (jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2))


class Convolutions(nn.Module):
    """Two causal convolutions with a norm and Mish between; returns what they remember, too."""

    dtype: Any

    @nn.compact
    def __call__(self, x, count, left):
        d = x.shape[-1]
        conv = lambda name: nn.Conv(d, (_KERNEL,), padding="VALID", dtype=self.dtype, kernel_init=layers.KERNEL_INIT,
                                    name=name)
        first = jnp.concatenate([left[..., :d].astype(self.dtype), x], axis=1)
        x = layers.layer_norm(_EPSILON, self.dtype, "norm")(conv("conv1")(first))
        second = jnp.concatenate([left[..., d:].astype(self.dtype), jax.nn.mish(x)], axis=1)
        after = jnp.concatenate([remembered(y, count, LEFT) for y in (first, second)], axis=-1)
        return conv("conv2")(second), after


class Block(nn.Module):
    """One layer; `(x, cached, ...) -> (x, new)` for the scan; each branch is modulated and gated by `condition`."""

    config: FlowConfig
    dtype: Any

    @nn.compact
    def __call__(self, x, cached: LayerCache, condition, count, visible):
        d, valid = x.shape[-1], jnp.arange(x.shape[1]) < count[:, None]
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m, shift_c, scale_c, gate_c = jnp.split(
            layers.linear(9 * d, self.dtype, "modulation")(nn.silu(condition))[:, None], 9, axis=-1)
        kv = None if visible is None else (cached.k, cached.v)
        y, (k, v) = Attention(self.config, self.dtype, name="attn")(
            modulated(x, shift_a, scale_a), valid, kv, visible)
        x += gate_a * y
        y, left = Convolutions(self.dtype, name="conv")(modulated(x, shift_c, scale_c), count, cached.left)
        x += gate_c * y
        y = layers.MLP(self.config.dit_intermediate_size, True, self.dtype, name="mlp")(modulated(x, shift_m, scale_m))
        return x + gate_m * y, LayerCache(k, v, left)


class DiT(nn.Module):
    """Params `{time1, time2, in_proj, layers, modulation, out_proj}`."""

    config: FlowConfig
    dtype: Any = jnp.float32

    def setup(self):
        c = self.config
        linear = lambda width: layers.linear(width, self.dtype)
        self.time1, self.time2, self.in_proj = (linear(c.dit_hidden_size) for _ in range(3))
        self.modulation, self.out_proj = linear(2 * c.dit_hidden_size), linear(c.num_mels)
        if self.has_variable("params", "layers_0"):  # see `layers.separate_layers`
            self.layers = [Block(c, self.dtype) for _ in range(c.dit_num_layers)]
        else:
            self.layers = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True},
                                  in_axes=(0, *(nn.broadcast,) * 3), length=c.dit_num_layers)(c, self.dtype)

    def __call__(self, x: Float[Array, "b t m"], mu: Float[Array, "b t m"], time: Float[Array, "#b"],
                 speaker: Float[Array, "b m"], condition: Float[Array, "b t m"], count: Int[Array, "b"],
                 cache: LayerCache | None = None, visible: Bool[Array, "b s"] | None = None):
        """The velocity at `time` in [0, 1].

        Args:
          x: mel on its way from noise; mu: what the encoder says; condition: mel that is known, or zeros.
          count: frames of each row; what lies beyond is not seen.
          cache, visible: earlier frames and which of the slots are seen; None: there are none.

        Returns:
          `[B, T, M]`, junk beyond `count`; and a `LayerCache` with the new keys and values `[L, B, N, T, H]`.
        """
        frequency = np.exp(-math.log(_SLOWEST) * np.arange(_TIME_FEATURES // 2, dtype=np.float32) / (_TIME_FEATURES // 2))
        angle = (time.astype(jnp.float32) * _TIME_SCALE)[:, None] * frequency
        features = jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)
        moment = self.time2(nn.silu(self.time1(features.astype(self.dtype))))
        speaker = jnp.broadcast_to(speaker[:, None], (*x.shape[:2], speaker.shape[-1]))
        h = self.in_proj(jnp.concatenate([x, mu, speaker, condition], axis=-1).astype(self.dtype))
        if cache is None:
            cache, visible = empty_cache(self.config, x.shape[0], 0, self.dtype), None
        h, new = layers.run_stack(self.layers, h, cache, moment, count, visible)
        shift, scale = jnp.split(self.modulation(nn.silu(moment))[:, None], 2, axis=-1)
        return self.out_proj(modulated(h, shift, scale)).astype(jnp.float32), new


def empty_cache(config: FlowConfig, batch: int, slots: int, dtype: Any) -> LayerCache:
    """Zeros."""
    keys = (config.dit_num_layers, batch, config.dit_num_heads, slots, config.dit_head_dim)
    return LayerCache(jnp.zeros(keys, dtype), jnp.zeros(keys, dtype),
                      jnp.zeros((config.dit_num_layers, batch, LEFT, 2 * config.dit_hidden_size), dtype))


def modulated(x, shift, scale):
    """A norm without weights, then scale and shift; one expression, two passes over the mean as in `layer_norm`."""
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(axis=-1, keepdims=True)
    normed = centred * (jnp.mean(centred**2, axis=-1, keepdims=True) + _MODULATED_EPSILON)**-0.5
    return normed.astype(x.dtype) * (1 + scale) + shift

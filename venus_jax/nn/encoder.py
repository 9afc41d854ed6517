"""The pre-norm encoder shared by the vision tower (SigLIP2) and the audio tower (Whisper): scanned blocks, biases.

    x += out(attention(LN x));  x += fc2(gelu(fc1(LN x)));  at the end LN
"""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from venus_jax.nn import attention, layers
from venus_jax.sharding import Rules, constrain
from venus_jax.typing import Array, Float


class EncoderAttention(nn.Module):
    """Self-attention with biases; Whisper's keys have none."""

    num_heads: int
    key_bias: bool
    dtype: Any

    @nn.compact
    def __call__(self, x, mask, cached):
        def heads(name, bias=True):
            y = layers.linear(x.shape[-1], self.dtype, name, bias)(x)
            return y.reshape(*x.shape[:2], self.num_heads, -1)

        q, k, v = heads("q_proj"), heads("k_proj", self.key_bias), heads("v_proj")
        out = attention.attend(q, k, v, mask) if cached is None else attention.attend_cached(q, k, v, *cached)
        return layers.linear(x.shape[-1], self.dtype, "out_proj")(out.reshape(x.shape)), (k, v)


class EncoderBlock(nn.Module):
    """One layer; `(x, ...) -> (x, (x if keep_layers, (k, v) if cached))` for the scan."""

    num_heads: int
    intermediate_size: int
    epsilon: float
    key_bias: bool
    approximate_gelu: bool
    dtype: Any
    rules: Rules | None
    keep_layers: bool

    @nn.compact
    def __call__(self, x, layer_cache, mask):
        norm = lambda name: layers.layer_norm(self.epsilon, self.dtype, name)
        x = constrain(x, self.rules, "batch", "len", "act_embed")
        cached, mask = (None, mask) if layer_cache is None else ((*layer_cache, *mask), None)
        mixed, new = EncoderAttention(self.num_heads, self.key_bias, self.dtype, name="attn")(
            norm("attn_norm")(x), mask, cached)
        x += mixed
        x += layers.MLP(self.intermediate_size, self.approximate_gelu, self.dtype, name="mlp")(norm("mlp_norm")(x))
        return x, (x if self.keep_layers else None, None if layer_cache is None else new)


class Encoder(nn.Module):
    """A stack of blocks and the final norm; a network adds what stands before the first block."""

    num_layers: int
    num_heads: int
    intermediate_size: int
    epsilon: float
    key_bias: bool
    approximate_gelu: bool
    dtype: Any = jnp.float32
    rules: Rules | None = None
    remat: bool = False
    keep_layers: bool = False

    def setup(self):
        block = nn.remat(EncoderBlock, prevent_cse=False) if self.remat else EncoderBlock
        stack = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True},
                        in_axes=(0, nn.broadcast), length=self.num_layers)
        shape = (self.num_heads, self.intermediate_size, self.epsilon, self.key_bias, self.approximate_gelu, self.dtype,
                 self.rules, self.keep_layers)
        if self.has_variable("params", "layers_0"):  # see `layers.separate_layers`
            self.layers = [block(*shape) for _ in range(self.num_layers)]
        else:
            self.layers = stack(*shape)
        self.norm = layers.layer_norm(self.epsilon, self.dtype)

    def run(self, x: Float[Array, "b t d"], mask, layer_cache=None):
        """Runs the stack.

        Args:
          x: embeddings.
          mask: bool `[B, 1, #T, T]` or None; with `layer_cache` the pair of masks of `attention.attend_cached`.
          layer_cache: `(k, v)`, each `[L, B, N, S, H]`, or None.

        Returns:
          x after the final norm, the chunk's `(k, v)` `[L, B, T, N, H]` (None without a cache), and per-block outputs
          before that norm `[L, B, T, D]` (None unless `keep_layers`).
        """
        x, (per_layer, new) = layers.run_stack(self.layers, x.astype(self.dtype), layer_cache, mask)
        return self.norm(x), new, per_layer

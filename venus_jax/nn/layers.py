"""Layers the networks share. Flax's own where they exist; weights `[in, out]`, statistics in float32."""

from typing import Any, Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp

from venus_jax.typing import Array, Float

KERNEL_INIT = nn.initializers.variance_scaling(1.0, "fan_in", "normal")


def linear(features: int, dtype: Any, name: str | None = None, bias: bool = True) -> nn.Dense:
    """`y = x W + b`, W `[in, out]`."""
    return nn.Dense(features, use_bias=bias, dtype=dtype, kernel_init=KERNEL_INIT, name=name)


def rms_norm(epsilon: float, dtype: Any, name: str | None = None) -> nn.RMSNorm:
    """`x / sqrt(mean(x^2) + eps) * scale`."""
    return nn.RMSNorm(epsilon=epsilon, dtype=dtype, name=name)


def layer_norm(epsilon: float, dtype: Any, name: str | None = None) -> nn.LayerNorm:
    """Mean and variance in two passes: the one-pass form loses digits the golden numbers have."""
    return nn.LayerNorm(epsilon=epsilon, dtype=dtype, use_fast_variance=False, name=name)


def embedding(rows: int, features: int, dtype: Any, name: str | None = None) -> nn.Embed:
    """A table looked up by row."""
    return nn.Embed(rows, features, dtype=dtype, embedding_init=nn.initializers.normal(0.02), name=name)


class GatedMLP(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`, no biases."""

    width: int
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        gate = linear(self.width, self.dtype, "gate_proj", bias=False)(x)
        up = linear(self.width, self.dtype, "up_proj", bias=False)(x)
        return linear(x.shape[-1], self.dtype, "down_proj", bias=False)(nn.silu(gate) * up)


class MLP(nn.Module):
    """`fc2(gelu(fc1(x)))` with biases; `approximate` chooses the tanh form."""

    width: int
    approximate: bool
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        hidden = nn.gelu(linear(self.width, self.dtype, "fc1")(x), approximate=self.approximate)
        return linear(x.shape[-1], self.dtype, "fc2")(hidden)


class Projector(nn.Module):
    """`linear2(relu(linear1(x)))`: audio to backbone, backbone to talker."""

    features: int
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... e"]:
        return linear(self.features, self.dtype, "linear2")(
            nn.relu(linear(self.features, self.dtype, "linear1")(x)))


class Head(nn.Module):
    """Logits in float32 from activations of any dtype; rows beyond `size` are padding and come out very negative."""

    rows: int
    size: int
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... v"]:
        kernel = self.param("kernel", KERNEL_INIT, (x.shape[-1], self.rows))
        logits = jnp.dot(x.astype(self.dtype), kernel.astype(self.dtype), preferred_element_type=jnp.float32)
        if self.rows == self.size:
            return logits
        return jnp.where(jnp.arange(self.rows) < self.size, logits, jnp.finfo(jnp.float32).min)


class WeightNormHead(nn.Module):
    """Logits of a weight-normalised head: column c of W is `scale[c] * kernel[:, c] / |kernel[:, c]|`; float32."""

    size: int
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "... e"]) -> Float[Array, "... c"]:
        kernel = self.param("kernel", KERNEL_INIT, (x.shape[-1], self.size)).astype(jnp.float32)
        scale = self.param("scale", nn.initializers.ones, (self.size,)).astype(jnp.float32)
        weight = kernel * (scale * jax.lax.rsqrt(jnp.sum(kernel**2, axis=0)))
        return jnp.dot(x.astype(self.dtype), weight.astype(self.dtype), preferred_element_type=jnp.float32)


def run_stack(blocks: Any, x: Any, layer_cache: Any, *rest: Any) -> tuple[Any, Any]:
    """`(x, outputs [L, ...])` of a scanned stack, or of blocks one by one where their parameters lie apart.

    `layer_cache`: what each layer reads besides `x`, stacked on a leading axis, or None; `rest` goes to every layer.
    """
    if callable(blocks):
        return blocks(x, layer_cache, *rest)
    outputs = []
    for i, block in enumerate(blocks):
        x, output = block(x, jax.tree.map(lambda c: c[i], layer_cache), *rest)
        outputs.append(output)
    return x, jax.tree.map(lambda *parts: jnp.stack(parts), *outputs)


def separate_layers(params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters with every `layers` stack taken apart into `layers_0`, `layers_1`, ...; networks run on both forms.

    A scan copies each layer's weights out of the stack before it multiplies. On a CPU, where reading weights is most of
    a small step, that costs a third of it; on accelerators stacks compile faster and cost nothing.
    """
    apart: dict[str, Any] = {}
    for name, part in params.items():
        if name == "layers":
            count = jax.tree.leaves(part)[0].shape[0]
            apart |= {f"layers_{i}": jax.tree.map(lambda x: jnp.asarray(x[i]), part) for i in range(count)}
        else:
            apart[name] = separate_layers(part) if isinstance(part, Mapping) else part
    return apart

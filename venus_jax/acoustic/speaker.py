"""CAM++ speaker encoder: a sound's filter banks to a vector that says whose voice it is.

    residual 2-D convolutions over (time, bins) -> a TDNN layer of stride 2 -> dense blocks, each followed by a transit
    layer that halves the channels -> mean and deviation over time -> linear

A layer of a dense block adds channels to what it read: `local(h) * mask(context)` with `h` a bottleneck of its input
and the context the mean of the whole sound plus that of the segment of 100 frames. Batch normalisation is part of the
convolution before it, where there is one, and else a scale and bias per channel; the converter folds what the exporter
left (`checkpoints/acoustic_speaker.py`).

Written from the description of CAM++ (arXiv 2303.00332) and the published 3D-Speaker network; no published weights and
no recorded results were at hand. Checked in the tests: shapes, padding, rows, and a small network of random weights
against its ONNX graph. Checked once: a PyTorch network of the published layout and size with random weights, and the
files it exports, with and without folding, run by onnxruntime (2e-6). Not checked: the published `campplus.onnx`.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from venus_jax.acoustic.config import SpeakerConfig
from venus_jax.nn import layers
from venus_jax.typing import Array, Bool, Float, Int, Params


class Affine(nn.Module):
    """`relu(x * scale + bias)` per channel: a batch normalisation that stands before its convolution."""

    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
        bias = self.param("bias", nn.initializers.zeros, x.shape[-1:])
        return nn.relu(x * scale.astype(self.dtype) + bias.astype(self.dtype))


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut; with `stride` 2 the shortcut is a convolution, and bins are halved."""

    stride: int
    dtype: Any

    @nn.compact
    def __call__(self, x, heard):
        conv = functools.partial(nn.Conv, x.shape[-1], dtype=self.dtype, kernel_init=layers.KERNEL_INIT)
        strides = (1, self.stride)
        y = nn.relu(conv((3, 3), strides, padding=1, name="conv1")(x))
        y = conv((3, 3), padding=1, name="conv2")(_keep(y, heard))
        short = x if self.stride == 1 else conv((1, 1), strides, padding=0, name="shortcut")(x)
        return _keep(nn.relu(y + short), heard)


class DenseLayer(nn.Module):
    """The channels a layer of a dense block adds to `x`."""

    config: SpeakerConfig
    dilation: int
    dtype: Any

    @nn.compact
    def __call__(self, x, heard):
        c = self.config
        linear = lambda features, name: layers.linear(features, self.dtype, name)
        h = nn.relu(linear(c.bottleneck, "bottleneck")(Affine(self.dtype, name="norm")(x)))
        h = _keep(h, heard)
        local = nn.Conv(c.growth, (c.kernel,), padding=(c.kernel - 1) // 2 * self.dilation, dtype=self.dtype,
                        kernel_dilation=self.dilation, kernel_init=layers.KERNEL_INIT, name="local")(h)
        context = _mean(h, heard) + _segment_means(h, heard, c.segment)
        mask = nn.sigmoid(linear(c.growth, "mask")(nn.relu(linear(c.mask_channels, "context")(context))))
        return local * mask


class SpeakerEncoder(nn.Module):
    """Params `{head_*, tdnn, block{i}_layer{j}, transit{i}_norm, transit{i}, embedding}`, i and j from 0."""

    config: SpeakerConfig
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, features: Float[Array, "b t c"], num_frames: Int[Array, "b"]) -> Float[Array, "b e"]:
        """Encodes whole sounds.

        Args:
          features: `fbank.speaker_features`; what lies beyond `num_frames` is not heard.
          num_frames: per sound, at least 1.

        Returns:
          float32 `[B, 192]`, not normalised.
        """
        c = self.config
        conv = functools.partial(nn.Conv, dtype=self.dtype, kernel_init=layers.KERNEL_INIT)
        heard = jnp.arange(features.shape[1]) < num_frames[:, None]
        x = _keep(features.astype(self.dtype), heard)[..., None]
        x = _keep(nn.relu(conv(c.head_channels, (3, 3), padding=1, name="head_conv1")(x)), heard)
        for i, count in enumerate(c.head_blocks):
            for j in range(count):
                x = ResidualBlock(1 if j else 2, self.dtype, name=f"head_stage{i}_block{j}")(x, heard)
        x = nn.relu(conv(c.head_channels, (3, 3), (1, 2), padding=1, name="head_conv2")(x))
        x = _keep(jnp.swapaxes(x, 2, 3).reshape(*x.shape[:2], -1), heard)  # bins of a channel side by side

        x = nn.relu(conv(c.tdnn_channels, (c.tdnn_kernel,), 2, padding=c.tdnn_kernel // 2, name="tdnn")(x))
        heard = jnp.arange(x.shape[1]) < (num_frames[:, None] + 1) // 2
        for i, (count, dilation) in enumerate(zip(c.num_layers, c.dilations, strict=True)):
            for j in range(count):
                added = DenseLayer(c, dilation, self.dtype, name=f"block{i}_layer{j}")(x, heard)
                x = jnp.concatenate([x, added], axis=-1)
            x = Affine(self.dtype, name=f"transit{i}_norm")(x)
            x = layers.linear(x.shape[-1] // 2, self.dtype, f"transit{i}")(x)
        x = nn.relu(x).astype(jnp.float32)
        mean = _mean(x, heard)
        square = _mean(jnp.square(x - mean), heard)
        count = heard.sum(axis=1)[:, None]
        deviation = jnp.sqrt(square[:, 0] * (count / jnp.maximum(count - 1, 1)))
        return layers.linear(c.embedding_size, jnp.float32, "embedding")(
            jnp.concatenate([mean[:, 0], deviation], axis=-1))


@functools.partial(jax.jit, static_argnames="config")
def embed(params: Params, config: SpeakerConfig, features: Float[Array, "b t c"],
          num_frames: Int[Array, "b"]) -> Float[Array, "b e"]:
    """Speaker vectors in the dtype of the parameters; arguments as in `SpeakerEncoder`."""
    model = SpeakerEncoder(config, dtype=params["tdnn"]["kernel"].dtype)
    return model.apply({"params": params}, features, num_frames)


def _keep(x: Array, heard: Bool[Array, "b t"]) -> Array:
    """Zeros where nothing is heard: what a convolution sees beyond the end."""
    return jnp.where(heard.reshape(*heard.shape, *(1,) * (x.ndim - 2)), x, 0)


def _mean(x: Float[Array, "b t d"], heard: Bool[Array, "b t"]) -> Float[Array, "b 1 d"]:
    total = jnp.sum(_keep(x, heard), axis=1, keepdims=True, dtype=jnp.float32)
    return (total / jnp.maximum(heard.sum(axis=1), 1)[:, None, None]).astype(x.dtype)


def _segment_means(x: Float[Array, "b t d"], heard: Bool[Array, "b t"], size: int) -> Float[Array, "b t d"]:
    """Every frame's mean over its segment of `size` frames; the last one is as long as the sound lasts."""
    b, t, d = x.shape
    count = -(-t // size)
    padded = jnp.pad(_keep(x, heard), ((0, 0), (0, count * size - t), (0, 0))).reshape(b, count, size, d)
    lengths = jnp.pad(heard, ((0, 0), (0, count * size - t))).reshape(b, count, size).sum(axis=2)
    means = jnp.sum(padded, axis=2, dtype=jnp.float32) / jnp.maximum(lengths, 1)[..., None]
    return jnp.repeat(means.astype(x.dtype), size, axis=1)[:, :t]

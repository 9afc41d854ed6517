"""S3 tokenizer v2: speech to 25 codes a second. Whole sounds, in batches of any lengths.

    mel (100 frames a second) -> conv, conv (each halves) -> blocks -> linear to 8 -> finite scalar quantisation

A block is `x += out(attention) + memory(v)`, `x += mlp(x)`: attention with rotary positions over the whole sound, and
beside it FSMN's memory, a depthwise convolution of the values plus the values themselves. Rules: minicpmo45.md 6.5 and
the s3tokenizer of minicpmo-utils 1.0.7.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from venus_jax.acoustic import fsq
from venus_jax.acoustic import sound as sound_lib
from venus_jax.acoustic.config import SpeechTokenizerConfig
from venus_jax.config import SAMPLE_RATE
from venus_jax.media import mel as mel_lib
from venus_jax.nn import attention, layers, rope
from venus_jax.typing import Array, Float, Int, Params

FRAMES_PER_CODE = 4
WINDOW, STRIDE = 3000, 2600  # mel frames: longer sounds are heard in windows of 30 s that overlap by 4 s
LENGTHS = (500, 1000, 2000, WINDOW)  # mel frames `encode` pads to: one compiled program each

_ROPE_THETA = 1e4
_ATTENTION_EPSILON, _MLP_EPSILON = 1e-6, 1e-5
_MLP_FACTOR = 4  # width of a block's middle over the model's


class FSMNAttention(nn.Module):
    """Self-attention plus memory of the values; keys have no bias. `valid` [B, T] marks what is heard."""

    num_heads: int
    kernel: int
    dtype: Any

    @nn.compact
    def __call__(self, x, valid, angles):
        width = x.shape[-1]
        q, k, v = (layers.linear(width, self.dtype, f"{name}_proj", bias=name != "k")(x) for name in "qkv")
        q, k = (rope.rotate(y.reshape(*x.shape[:2], self.num_heads, -1), *angles) for y in (q, k))
        v = jnp.where(valid[..., None], v, 0)
        before = (self.kernel - 1) // 2
        memory = v + nn.Conv(width, (self.kernel,), padding=((before, self.kernel - 1 - before),),
                             feature_group_count=width, use_bias=False, dtype=self.dtype,
                             kernel_init=layers.KERNEL_INIT, name="memory")(v)
        out = attention.attend(q, k, v.reshape(k.shape), valid[:, None, None])
        return layers.linear(width, self.dtype, "out_proj")(out.reshape(x.shape)) + memory


class Block(nn.Module):
    """One layer; `(x, None, ...) -> (x, None)` for the scan."""

    num_heads: int
    kernel: int
    dtype: Any

    @nn.compact
    def __call__(self, x, _, valid, angles):
        x += FSMNAttention(self.num_heads, self.kernel, self.dtype, name="attn")(
            layers.layer_norm(_ATTENTION_EPSILON, self.dtype, "attn_norm")(x), valid, angles)
        x += layers.MLP(_MLP_FACTOR * x.shape[-1], False, self.dtype, name="mlp")(
            layers.layer_norm(_MLP_EPSILON, self.dtype, "mlp_norm")(x))
        return x, None


class SpeechTokenizer(nn.Module):
    """Params `{conv1, conv2, layers, project_down}`."""

    config: SpeechTokenizerConfig
    dtype: Any = jnp.float32

    def setup(self):
        c = self.config
        conv = lambda: nn.Conv(c.hidden_size, (3,), strides=2, padding=1, dtype=self.dtype,
                               kernel_init=layers.KERNEL_INIT)
        self.conv1, self.conv2 = conv(), conv()
        shape = (c.num_heads, c.fsmn_kernel, self.dtype)
        if self.has_variable("params", "layers_0"):  # see `layers.separate_layers`
            self.layers = [Block(*shape) for _ in range(c.num_layers)]
        else:
            self.layers = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True},
                                  in_axes=(0, nn.broadcast, nn.broadcast), length=c.num_layers)(*shape)
        self.project_down = layers.linear(c.codebook_dims, jnp.float32)

    def __call__(self, mel: Float[Array, "b t c"], num_frames: Int[Array, "b"]):
        """Encodes sounds of at most 30 s.

        Args:
          mel: log-mel (`media.mel.log_mel`, the config's bins); what lies beyond `num_frames` is not heard.
          num_frames: per sound.

        Returns:
          states `[B, ceil(T/4), D]`; what the quantiser rounds, float32 `[B, ceil(T/4), C]`; and how many of them
          count, int32 `[B]`.
        """
        x, count = mel.astype(self.dtype), num_frames
        for conv in (self.conv1, self.conv2):
            heard = jnp.arange(x.shape[1]) < count[:, None]
            x = nn.gelu(conv(jnp.where(heard[..., None], x, 0)), approximate=False)
            count = (count + 1) // 2
        index = jnp.arange(x.shape[1])
        angles = rope.angles(index[None], self.config.hidden_size // self.config.num_heads, _ROPE_THETA)
        x, _ = layers.run_stack(self.layers, x, None, index < count[:, None], angles)
        return x, self.project_down(x), count.astype(jnp.int32)


@functools.partial(jax.jit, static_argnames="config")
def tokenize(params: Params, config: SpeechTokenizerConfig, mel: Float[Array, "b t c"],
             num_frames: Int[Array, "b"]) -> tuple[Int[Array, "b n"], Int[Array, "b"]]:
    """Codes of sounds of at most 30 s in the dtype of the parameters; arguments as in `SpeechTokenizer`.

    Returns:
      codes, int32 `[B, ceil(T/4)]`, 0 beyond a sound's own; and their number, `ceil(num_frames / 4)`.
    """
    model = SpeechTokenizer(config, dtype=params["conv1"]["kernel"].dtype)
    _, h, count = model.apply({"params": params}, mel, num_frames)
    codes = fsq.codes(fsq.quantise(h, config.levels)[0], config.levels)
    return jnp.where(jnp.arange(codes.shape[1]) < count[:, None], codes, 0), count


def windows(num_frames: int, reference_quirks: bool = False) -> list[tuple[int, int]]:
    """(start, stop) in mel frames of the windows a sound is heard in; one window where it lasts at most 30 s.

    The last one reaches the end. The reference (quirks) goes on while a stride begins inside the sound, so that a last
    window may hold little but what the one before has heard.
    """
    if num_frames <= WINDOW:
        return [(0, num_frames)]
    last = num_frames if reference_quirks else num_frames - (WINDOW - STRIDE)
    return [(start, min(start + WINDOW, num_frames)) for start in range(0, last, STRIDE)]


def merge(parts: list[np.ndarray]) -> np.ndarray:
    """Joins the codes of consecutive windows: each neighbour gives half of the overlap, 50 codes."""
    half = (WINDOW - STRIDE) // FRAMES_PER_CODE // 2
    last = len(parts) - 1
    return np.concatenate([part[half if i else 0:len(part) if i == last else -half] for i, part in enumerate(parts)])


def encode(sound: str | os.PathLike | np.ndarray, sample_rate: float | None, params: Params,
           config: SpeechTokenizerConfig, reference_quirks: bool = False) -> np.ndarray:
    """The codes of a sound of any length, 25 a second.

    Args:
      sound, sample_rate: as in `acoustic.sound.mono`.
      params, config: of the speech tokenizer.
      reference_quirks: of a sound longer than 30 s, cut windows and join them as the reference does, which loses up to
        2 s before the end where the last window is shorter than 4 s.

    Returns:
      int32, a code for every four (or the last, fewer) of the N // 160 mel frames of N samples at 16 kHz.

    Raises:
      MediaError: see `acoustic.sound.mono`; a sound of 200 samples (at 16 kHz) or fewer.
    """
    samples = sound_lib.mono(sound, sample_rate, SAMPLE_RATE)
    mel = mel_lib.log_mel(samples, num_mels=config.num_mels).T
    parts = []
    for start, stop in windows(len(mel), reference_quirks):
        length = next(n for n in LENGTHS if n >= stop - start)
        padded = np.zeros((1, length, config.num_mels), np.float32)
        padded[0, :stop - start] = mel[start:stop]
        codes, count = tokenize(params, config, padded, jnp.array([stop - start], jnp.int32))
        parts.append(np.asarray(codes[0, :int(count[0])]))
    return merge(parts)

"""Whisper encoder in two forms over one parameter tree: whole clips, and a stream of units with a KV cache.

The stream equals the whole-clip form under the chunk mask of a unit's states (50 for a second): convolution edges are
trimmed, positions go on with the cache, and each unit sees all earlier ones. Rules: reference sections 3.2 and 3.5 of
the base model's description.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from venus_jax.config import AudioConfig
from venus_jax.errors import MediaError
from venus_jax.nn import kv_cache, layers
from venus_jax.nn.encoder import Encoder
from venus_jax.typing import Array, Bool, Float, Int

CONTEXT_FRAMES = 2  # mel frames on either side of a streamed unit; each side costs one encoder frame, which is cut


class Whisper(Encoder):
    """Params `{conv1, conv2, position_embed, layers, norm}`."""

    hidden_size: int = 0
    max_positions: int = 1500

    def setup(self):
        super().setup()
        conv = lambda stride: nn.Conv(self.hidden_size, (3,), strides=stride, padding=1, dtype=self.dtype,
                                      kernel_init=layers.KERNEL_INIT)
        self.conv1, self.conv2 = conv(1), conv(2)
        self.position_embed = layers.embedding(self.max_positions, self.hidden_size, self.dtype)

    def convolve(self, mel: Float[Array, "b t c"], absent: Bool[Array, "b t"] | None = None) -> Float[Array, "b t2 d"]:
        """conv1, GELU, conv2 (stride 2), GELU: two mel frames an output.

        `absent` marks frames outside the sound: both convolutions see zeros there, as at the edge of the array.
        """
        def inside(x):
            return x if absent is None else jnp.where(absent[..., None], 0, x)

        x = nn.gelu(self.conv1(inside(mel.astype(self.dtype))), approximate=False)
        return nn.gelu(self.conv2(inside(x)), approximate=False)

    def __call__(self, mel: Float[Array, "b t c"], num_frames: Int[Array, "b"], chunk_frames: int | None = None,
                 reference_quirks: bool = False):
        """Encodes whole clips of at most 30 s.

        Args:
          mel: log-mel; what lies beyond `num_frames` is not heard.
          num_frames: mel frames per clip.
          chunk_frames: encoder frames that see each other and everything earlier; None: all see all.
          reference_quirks: compare encoder frames with mel lengths, as the reference does, so that in a batch the
            padding of a shorter clip is partly seen.

        Returns:
          states after the final norm `[B, ceil(T/2), D]`, and per-block outputs (None unless `keep_layers`).

        Raises:
          MediaError: more frames than the position table holds.
        """
        if mel.shape[1] > 2 * self.max_positions:
            raise MediaError(f"a clip of {mel.shape[1]} mel frames; the audio tower takes at most {2 * self.max_positions}")
        x = self.convolve(mel, None if reference_quirks else jnp.arange(mel.shape[1]) >= num_frames[:, None])
        index = jnp.arange(x.shape[1])
        limit = num_frames if reference_quirks else (num_frames - 1) // 2 + 1
        mask = (index < limit[:, None])[:, None, None]
        if chunk_frames is not None:
            mask &= index < ((index // chunk_frames + 1) * chunk_frames)[:, None]
        hidden, _, per_layer = self.run(x + self.position_embed(index), mask)
        return hidden, per_layer

    def stream(self, mel: Float[Array, "b t c"], first: Bool[Array, "b"], valid: Bool[Array, "b"],
               cache: kv_cache.KVCache) -> tuple[Float[Array, "b u d"], kv_cache.KVCache]:
        """Encodes one unit of a stream.

        Args:
          mel: `CONTEXT_FRAMES` before the unit, the unit (an even number of frames), `CONTEXT_FRAMES` after; a first
            unit has no frames before, they count as absent whatever they hold.
          first: rows whose stream begins here: it has no sound before. Their cache is the caller's to reset.
          valid: rows that bring sound; others leave their cache as it is and their output means nothing.
          cache: of `max_positions` slots; a row whose next unit would not fit starts again at position 0 (the
            reference's rule, which counts the untrimmed convolution output).

        Returns:
          states after the final norm `[B, (T - 2 * CONTEXT_FRAMES) / 2, D]` and the cache.
        """
        before = first[:, None] & (jnp.arange(mel.shape[1]) < CONTEXT_FRAMES)
        edge = CONTEXT_FRAMES // 2
        untrimmed = self.convolve(mel, before)
        x = untrimmed[:, edge:-edge]
        untrimmed_frames = untrimmed.shape[1] - jnp.where(first, edge, 0)
        full = cache.next_position + untrimmed_frames >= self.max_positions
        cache = kv_cache.reset(cache, valid & full)

        positions = kv_cache.next_positions(cache, jnp.broadcast_to(valid[:, None], x.shape[:2]))
        seen = jnp.broadcast_to((cache.slot_position >= 0)[:, None], (*x.shape[:2], cache.slot_position.shape[1]))
        itself = jnp.broadcast_to(valid[:, None, None], (x.shape[0], x.shape[1], x.shape[1]))
        x += self.position_embed(jnp.maximum(positions, 0))
        hidden, new, _ = self.run(x, (seen, itself), (cache.k, cache.v))
        return hidden, kv_cache.append(cache, *new, positions)


def whisper(config: AudioConfig, dtype: Any = jnp.float32, **kwargs) -> Whisper:
    """The module of a config; `kwargs` are `Encoder`'s options."""
    return Whisper(num_layers=config.num_layers, num_heads=config.num_heads,
                   intermediate_size=config.intermediate_size, epsilon=config.layer_norm_eps, key_bias=False,
                   approximate_gelu=False, dtype=dtype, hidden_size=config.hidden_size,
                   max_positions=config.max_positions, **kwargs)


def empty_cache(config: AudioConfig, batch: int, dtype: Any = jnp.float32) -> kv_cache.KVCache:
    """The streaming encoder's cache: as many slots as positions."""
    return kv_cache.empty(config.num_layers, batch, config.max_positions, config.num_heads,
                          config.hidden_size // config.num_heads, dtype)


def pool(x: Float[Array, "b t d"], step: int) -> Float[Array, "b n d"]:
    """Mean of every `step` frames; an incomplete last group is left out."""
    count = x.shape[1] // step
    return x[:, :count * step].reshape(x.shape[0], count, step, -1).astype(jnp.float32).mean(axis=2).astype(x.dtype)


def num_embeddings(num_frames: jax.Array | int, step: int):
    """Embeddings a clip of `num_frames` mel frames yields: 100 frames, 50 states, 10 embeddings a second."""
    return ((num_frames - 1) // 2 + 1 - step) // step + 1

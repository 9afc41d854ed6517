"""The whole model as one Flax module: towers, projections, backbone and talker, wired.

Media reach the backbone by index: towers produce a table `[B, M, D]`, and `media_index[b, t]` names the row of it that
stands at a position (-1: the token's own embedding). A gather, so that shapes never depend on how many media there are,
and one inside a session, so that a sharded batch moves nothing between chips.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from venus_jax.config import VenusConfig
from venus_jax.media.images import VisionInputs
from venus_jax.models import qwen3, resampler, siglip2, talker, whisper
from venus_jax.nn import kv_cache, layers
from venus_jax.sharding import Rules, constrain
from venus_jax.typing import Array, Bool, Float, Int, Params


class Frontend(nn.Module):
    """Params `{llm, vision, resampler, audio, audio_projection, talker}`; absent parts have none.

    Attributes:
      config: sizes and compute dtype.
      rules: sharding rules of activations; None on one device.
      remat: recompute blocks in the backward pass.
      implementation, q_chunk: see `nn.attention.attend_causal`.
    """

    config: VenusConfig
    rules: Rules | None = None
    remat: bool = False
    implementation: str = "auto"
    q_chunk: int = 512

    def setup(self):
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        shared = dict(dtype=dtype, rules=self.rules, remat=self.remat)
        causal = dict(implementation=self.implementation, q_chunk=self.q_chunk)
        self.llm = qwen3.qwen3(c.llm, **shared, **causal)
        if c.vision is not None:
            self.vision = siglip2.siglip2(c.vision, **shared)
            self.resampler = resampler.Resampler(c.resampler, dtype)
        if c.audio is not None:
            self.audio = whisper.whisper(c.audio, **shared)
            self.audio_projection = layers.Projector(c.llm.hidden_size, dtype)
        if c.talker is not None:
            # Talker heads do not divide over a tensor axis; XLA lays its small activations out by itself.
            self.talker = talker.talker(c.talker, dtype=dtype, remat=self.remat, **causal)

    def encode_images(self, images: VisionInputs) -> Float[Array, "m q d"]:
        """`num_queries` embeddings per slice; `grid_hw` (0, 0) marks an empty slot, whose rows mean nothing."""
        return self.resampler(self.vision(images), images.grid_hw)

    def encode_clips(self, mel: Float[Array, "b t c"], num_frames: Int[Array, "b"], chunked: bool = True,
                     reference_quirks: bool = False) -> Float[Array, "b n d"]:
        """Embeddings of whole clips (reference voice, chat): ten a second; the first `num_embeddings` rows count."""
        hidden, _ = self.audio(mel, num_frames, self.config.audio.chunk_frames if chunked else None, reference_quirks)
        return self._project(hidden)

    def encode_stream(self, mel: Float[Array, "b t c"], first: Bool[Array, "b"], valid: Bool[Array, "b"],
                      cache: kv_cache.KVCache) -> tuple[Float[Array, "b n d"], kv_cache.KVCache]:
        """Embeddings of one streamed unit: ten rows for one second; see `Whisper.stream`."""
        hidden, cache = self.audio.stream(mel, first, valid, cache)
        return self._project(hidden), cache

    def _project(self, hidden):
        return whisper.pool(self.audio_projection(hidden), self.config.audio.pool_step)

    def embed(self, ids: Int[Array, "b t"], media: Float[Array, "b m d"] | None = None,
              media_index: Int[Array, "b t"] | None = None) -> Float[Array, "b t d"]:
        """Token embeddings with a row's media written over the places `media_index` names (-1: none)."""
        x = self.llm.embed_tokens(ids)
        if media is None:
            return x
        rows = jnp.take_along_axis(media.astype(x.dtype), jnp.maximum(media_index, 0)[..., None], axis=1)
        return constrain(jnp.where((media_index >= 0)[..., None], rows, x), self.rules, "batch", "len", "act_embed")

    def backbone(self, x: Float[Array, "b t d"], positions: Int[Array, "b t"], segment_ids=None, cache=None,
                 slots=None):
        """Hidden states after the final norm and the cache; see `Decoder.__call__`."""
        return self.llm(x, positions, segment_ids, cache, slots)[:2]

    def logits(self, hidden: Float[Array, "b t d"]) -> Float[Array, "b t v"]:
        """Next-token scores, float32, `vocab_rows` wide."""
        return self.llm.logits(hidden)

    def __call__(self, ids: Int[Array, "b t"], images: VisionInputs | None, mel: Float[Array, "b f c"] | None):
        """Touches every parameter once; `init_params` and `abstract_params` use it, nothing else does."""
        x = self.embed(ids)
        hidden, _ = self.backbone(x, jnp.zeros_like(ids))
        out = self.logits(hidden).sum()
        if images is not None:
            out += self.encode_images(images).astype(jnp.float32).sum()
        if mel is not None:
            out += self.encode_clips(mel, jnp.full(mel.shape[:1], mel.shape[1])).astype(jnp.float32).sum()
        if self.config.talker is not None:
            out += self.talker.touch(hidden, jnp.zeros_like(ids)).sum()
        return out


def init_params(config: VenusConfig, key: jax.Array, dtype: Any = jnp.float32) -> Params:
    """Random parameters of a config as a plain nested dict, stored in `dtype`."""
    images = mel = None
    if (v := config.vision) is not None:
        images = VisionInputs(jnp.zeros((1, 1, v.patch_dim)), jnp.ones((1, 2), jnp.int32), jnp.zeros((1, 1), jnp.int32))
    if (a := config.audio) is not None:
        mel = jnp.zeros((1, 2 * a.pool_step, a.num_mel_bins))
    def init(key):
        params = Frontend(config, implementation="xla").init(key, jnp.zeros((1, 1), jnp.int32), images, mel)["params"]
        return jax.tree.map(lambda x: x.astype(dtype), params)

    return jax.jit(init)(key)


def abstract_params(config: VenusConfig, dtype: Any = jnp.float32) -> Params:
    """Shapes and dtypes of `init_params` without computing anything."""
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0), dtype))


def num_parameters(params: Params) -> int:
    """Parameters in a tree of arrays or shapes."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))

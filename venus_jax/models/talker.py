"""The talker: a Llama decoder that turns text and backbone states into speech codes.

The condition of a text token is `emb_text[id] + normalise(projector_semantic(hidden))`; codes feed back through
`emb_code`; the head is weight-normalised. `projector_spk` and `embed` exist in checkpoints and are never read.
"""

from typing import Any

import jax
import jax.numpy as jnp

from venus_jax.config import TalkerConfig
from venus_jax.nn import kv_cache, layers
from venus_jax.nn.decoder import Decoder
from venus_jax.typing import Array, Float, Int


class Talker(Decoder):
    """Params `{emb_text, emb_code, head_code, projector_semantic, projector_spk, embed, layers, norm}`."""

    num_audio_tokens: int = 0
    num_text_tokens: int = 0
    unused_vocab_size: int = 0

    def setup(self):
        super().setup()
        table = lambda rows: layers.embedding(rows, self.hidden_size, self.dtype)
        self.emb_text, self.emb_code = table(self.num_text_tokens), table(self.num_audio_tokens)
        self.embed = table(self.unused_vocab_size)
        self.head_code = layers.WeightNormHead(self.num_audio_tokens, self.dtype)
        self.projector_semantic = layers.Projector(self.hidden_size, self.dtype)
        self.projector_spk = layers.Projector(self.hidden_size, self.dtype)

    def embed_text(self, ids: Int[Array, "b n"]) -> Float[Array, "b n e"]:
        """Rows of the text table, indexed by the backbone's ids."""
        return self.emb_text(ids)

    def embed_code(self, codes: Int[Array, "b n"]) -> Float[Array, "b n e"]:
        """Rows of the code table."""
        return self.emb_code(codes)

    def condition(self, ids: Int[Array, "b n"], hidden: Float[Array, "b n d"]) -> Float[Array, "b n e"]:
        """Text embedding plus the unit-length projection of the state that consumed the same token."""
        projected = self.projector_semantic(hidden.astype(self.dtype)).astype(jnp.float32)
        length = jnp.sqrt(jnp.sum(projected**2, axis=-1, keepdims=True))
        return self.emb_text(ids) + (projected / jnp.maximum(length, 1e-12)).astype(self.dtype)

    def logits(self, hidden: Float[Array, "b n e"]) -> Float[Array, "b n c"]:
        """Scores of the next code, float32."""
        return self.head_code(hidden)

    def touch(self, hidden: Float[Array, "b n d"], ids: Int[Array, "b n"]) -> jax.Array:
        """Uses every parameter once, the never-read ones too: for initialisation only."""
        x = self.condition(ids, hidden) + self.embed_code(ids) + self.embed(ids) + self.projector_spk(hidden)
        return self.logits(self(x, jnp.zeros_like(ids))[0])


def talker(config: TalkerConfig, dtype: Any = jnp.float32, **kwargs) -> Talker:
    """The module of a config; `kwargs` are `Decoder`'s options."""
    return Talker(hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
                  num_layers=config.num_layers, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads,
                  head_dim=config.head_dim, rms_eps=config.rms_eps, rope_theta=config.rope_theta, qk_norm=False,
                  num_audio_tokens=config.num_audio_tokens, num_text_tokens=config.num_text_tokens,
                  unused_vocab_size=config.unused_vocab_size, dtype=dtype, **kwargs)


def empty_cache(config: TalkerConfig, batch: int, slots: int, dtype: Any = jnp.float32) -> kv_cache.KVCache:
    """The talker's cache over the units of one turn."""
    return kv_cache.empty(config.num_layers, batch, slots, config.num_kv_heads, config.head_dim, dtype)

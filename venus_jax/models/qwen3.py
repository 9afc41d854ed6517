"""Qwen3 backbone: token table, decoder with per-head query and key norms, untied head."""

import dataclasses

from venus_jax.config import LLMConfig
from venus_jax.nn import layers
from venus_jax.nn.decoder import Decoder
from venus_jax.sharding import constrain
from venus_jax.typing import Array, Float, Int


class Qwen3(Decoder):
    """Params `{embed, layers, norm, lm_head}`. Calling it is `Decoder.__call__`; "hidden" is after the final norm."""

    vocab_rows: int = 0
    vocab_size: int = 0

    def setup(self):
        super().setup()
        self.embed = layers.embedding(self.vocab_rows, self.hidden_size, self.dtype)
        self.lm_head = layers.Head(self.vocab_rows, self.vocab_size, self.dtype)

    def embed_tokens(self, ids: Int[Array, "b t"]) -> Float[Array, "b t d"]:
        """Rows of the token table; no scale."""
        return constrain(self.embed(ids), self.rules, "batch", "len", "act_embed")

    def logits(self, hidden: Float[Array, "b t d"]) -> Float[Array, "b t v"]:
        """Scores of the next token, float32, `vocab_rows` wide."""
        return constrain(self.lm_head(hidden), self.rules, "batch", "len", "vocab")


def qwen3(config: LLMConfig, **kwargs) -> Qwen3:
    """The module of a config; `kwargs` are `Decoder`'s options."""
    fields = {k: v for k, v in dataclasses.asdict(config).items() if k not in ("max_positions", "vocab_multiple")}
    return Qwen3(**fields, qk_norm=True, vocab_rows=config.vocab_rows, **kwargs)

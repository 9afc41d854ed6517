"""SigLIP2 NaViT vision tower: pictures of any shape as rows of patches with bucketed 2-D positions, no pooling."""

from typing import Any

import jax.numpy as jnp

from venus_jax.config import VisionConfig
from venus_jax.media.images import VisionInputs
from venus_jax.nn import layers
from venus_jax.nn.encoder import Encoder
from venus_jax.typing import Array, Float, Int


class SigLIP2(Encoder):
    """Params `{patch_embed, position_embed, layers, norm}`."""

    hidden_size: int = 0
    num_positions: int = 0

    def setup(self):
        super().setup()
        self.patch_embed = layers.linear(self.hidden_size, self.dtype)
        self.position_embed = layers.embedding(self.num_positions, self.hidden_size, self.dtype)

    def embeddings(self, patches: Float[Array, "m p c"], position_ids: Int[Array, "m p"]) -> Float[Array, "m p d"]:
        """Patch projection plus learned position; what the first block reads."""
        return self.patch_embed(patches.astype(self.dtype)) + self.position_embed(position_ids)

    def __call__(self, images: VisionInputs) -> Float[Array, "m p d"]:
        """Encodes slices; states after the final norm. Rows of padding (beyond `h * w` patches) carry no meaning."""
        valid = jnp.arange(images.patches.shape[1]) < images.grid_hw.prod(axis=1)[:, None]
        return self.run(self.embeddings(images.patches, images.position_ids), valid[:, None, None])[0]


def siglip2(config: VisionConfig, dtype: Any = jnp.float32, **kwargs) -> SigLIP2:
    """The module of a config; `kwargs` are `Encoder`'s options."""
    return SigLIP2(num_layers=config.depth, num_heads=config.num_heads, intermediate_size=config.intermediate_size,
                   epsilon=config.layer_norm_eps, key_bias=True, approximate_gelu=True, dtype=dtype,
                   hidden_size=config.hidden_size, num_positions=config.positions_per_side**2, **kwargs)

"""Cross entropy over a large vocabulary without ever holding all logits."""

import jax
import jax.numpy as jnp

from venus_jax.sharding import Rules, constrain
from venus_jax.typing import Array, Float, Int


def chunked_cross_entropy(hidden: Float[Array, "b t d"], kernel: Float[Array, "d v"], targets: Int[Array, "b t"],
                          weights: Float[Array, "b t"], vocab_size: int, chunk: int = 256,
                          rules: Rules | None = None) -> tuple[Array, Array]:
    """Weighted sum of -log p(target) and the sum of weights, both float32 scalars.

    Logits of `chunk` positions at a time are made, used and forgotten; the backward pass makes them again.

    Args:
      hidden: states after the final norm.
      kernel: the head, `vocab_rows` columns; those from `vocab_size` on are padding and get no probability.
      targets: ids below `vocab_size` everywhere, also where the weight is 0.
      weights: 0 where a position is not learned from.
      chunk: positions per step; T is padded up to a multiple.
    """
    t = hidden.shape[1]
    count = -(-t // chunk)

    def split(x):  # [B, T, ...] -> [count, B, chunk, ...]
        x = jnp.pad(x, [(0, 0), (0, count * chunk - t)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], count, chunk, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def step(total, part):
        h, target, weight = part
        # Cast here, not outside: the head's gradient then adds up over chunks in the head's own float32.
        logits = jnp.dot(h, kernel.astype(h.dtype), preferred_element_type=jnp.float32)
        logits = constrain(logits, rules, "batch", "len", "vocab")
        if kernel.shape[1] != vocab_size:
            logits = jnp.where(jnp.arange(kernel.shape[1]) < vocab_size, logits, jnp.finfo(jnp.float32).min)
        picked = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
        return total + jnp.sum((jax.nn.logsumexp(logits, axis=-1) - picked) * weight), None

    total, _ = jax.lax.scan(step, jnp.float32(0), (split(hidden), split(targets), split(weights.astype(jnp.float32))))
    return total, weights.astype(jnp.float32).sum()

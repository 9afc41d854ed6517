"""The small model that the networks are tested on: every part, no two widths alike, float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from venus_jax import config as config_lib
from venus_jax.models import frontend

CONFIG = config_lib.VenusConfig(
    name="tiny",
    llm=config_lib.LLMConfig(vocab_size=640, hidden_size=128, intermediate_size=160, num_layers=2, num_heads=4,
                             num_kv_heads=2, head_dim=24),
    vision=config_lib.VisionConfig(hidden_size=48, intermediate_size=80, num_layers=2, num_heads=3, image_size=112),
    resampler=config_lib.ResamplerConfig(num_queries=64, hidden_size=128, kv_dim=48),
    audio=config_lib.AudioConfig(hidden_size=32, intermediate_size=72, num_layers=2, num_heads=4, max_positions=302),
    talker=config_lib.TalkerConfig(hidden_size=56, intermediate_size=104, num_layers=2, num_heads=4, num_kv_heads=2,
                                   num_audio_tokens=82, num_text_tokens=656, audio_bos_token_id=544,
                                   text_eos_token_id=549, unused_vocab_size=9, max_positions=384))


TEXT_ONLY = CONFIG.replace(name="tiny text", vision=None, resampler=None, audio=None, talker=None)


@functools.cache
def shapes(config: config_lib.VenusConfig):
    return frontend.abstract_params(config)


def random_params(config: config_lib.VenusConfig = CONFIG, seed: int = 0):
    """New parameters of `config`, all of which do something: norms and biases too, and media weigh as much as text."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        path = "/".join(key.key for key in path)
        noise = rng.standard_normal(leaf.shape).astype(np.float32)
        if path.endswith("scale"):
            noise = 1 + 0.2 * noise
        elif path.endswith("bias"):
            noise = 0.2 * noise
        elif path.endswith(("kernel", "resampler/proj")):
            noise /= np.sqrt(np.prod(leaf.shape["/layers/" in path:-1]))
        return jnp.asarray(noise)

    return jax.tree.map_with_path(draw, shapes(config))

"""The assembled model: its parameter tree, where media enter, and what bfloat16 changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.tiny import CONFIG, TEXT_ONLY
from venus_jax.checkpoints import table
from venus_jax.config import audio_9b, omni_9b
from venus_jax.media.images import VisionInputs
from venus_jax.models import frontend, talker, whisper
from venus_jax.models.talker_decode import generate_chunk
from venus_jax.sharding import paths


@pytest.mark.parametrize("config", [
    omni_9b(), audio_9b(), CONFIG, TEXT_ONLY, CONFIG.replace(name="padded", llm=dict(vocab_multiple=96)),
    CONFIG.replace(name="last block dropped", vision=dict(drop_last_layer=True))], ids=lambda config: config.name)
def test_parameter_tree_is_the_checkpoint_s(config):
    shapes = {path: leaf.shape for path, leaf in paths(frontend.abstract_params(config))}
    assert shapes == table.param_shapes(config)


@pytest.mark.parametrize("make, count", [(omni_9b, 9_371_787_666), (audio_9b, 8_865_087_650)])
def test_published_sizes(make, count):
    tree = frontend.abstract_params(make(added_tokens=False), jnp.bfloat16)
    assert frontend.num_parameters(tree) == count
    assert {leaf.dtype for leaf in jax.tree.leaves(tree)} == {jnp.dtype(jnp.bfloat16)}
    with_tokens = frontend.num_parameters(frontend.abstract_params(make()))
    assert with_tokens == count + 4 * 2 * 4096  # a row of the table and a column of the head each


def test_random_parameters_follow_the_key():
    make = jax.jit(lambda key: frontend.init_params(TEXT_ONLY, key))
    params, again, other = make(jax.random.key(0)), make(jax.random.key(0)), make(jax.random.key(1))
    table_of = lambda params: params["llm"]["embed"]["embedding"]
    np.testing.assert_array_equal(table_of(params), table_of(again))
    assert (table_of(params) != table_of(other)).all()
    layers = params["llm"]["layers"]["mlp"]["up_proj"]["kernel"]
    assert (layers[0] != layers[1]).any()
    assert 0.9 < np.std(layers) * CONFIG.llm.hidden_size**0.5 < 1.1


def apply(params, *args, config=CONFIG, method):
    return frontend.Frontend(config).apply({"params": params}, *args, method=method)


def test_media_stand_where_the_index_says(params):
    """In any order, any row twice, -1 for the token's own embedding; each session reads its own table."""
    rng = np.random.default_rng(0)
    ids, media = rng.integers(0, 640, (2, 9)), rng.standard_normal((2, 5, CONFIG.llm.hidden_size), np.float32)
    index = np.array([[-1, 4, 0, -1, 0, -1, 3, -1, -1], [0, 1, 2, 3, 4, -1, -1, 4, -1]])
    x = apply(params, ids, media, index, method="embed")
    own = np.asarray(params["llm"]["embed"]["embedding"])[ids]
    for row in range(2):
        for t in range(9):
            np.testing.assert_array_equal(x[row, t], own[row, t] if index[row, t] < 0 else media[row, index[row, t]])
    np.testing.assert_array_equal(apply(params, ids, method="embed"), own)


def test_bfloat16_backbone_is_close(params):
    """Within the rounding of two layers, with logits in float32."""
    ids = np.random.default_rng(0).integers(0, 640, (2, 24))

    def run(config, params):
        hidden, _ = apply(params, apply(params, ids, config=config, method="embed"),
                          jnp.broadcast_to(jnp.arange(24), ids.shape), config=config, method="backbone")
        return hidden, apply(params, hidden, config=config, method="logits")

    run = jax.jit(run, static_argnums=0)
    text = {"llm": params["llm"]}
    half = run(TEXT_ONLY.replace(dtype="bfloat16"), jax.tree.map(lambda x: np.asarray(x).astype(jnp.bfloat16), text))
    assert [out.dtype for out in half] == [jnp.bfloat16, jnp.float32]
    for ours, wanted in zip(half, run(TEXT_ONLY, text)):
        assert np.linalg.norm(ours.astype(jnp.float32) - wanted) < 0.03 * np.linalg.norm(wanted)


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_every_part_runs_in_bfloat16(stored):
    """Whatever the parameters are stored in; caches keep their shapes and dtype."""
    dtype = jnp.dtype(jnp.bfloat16)
    config = CONFIG.replace(dtype="bfloat16")
    params = frontend.abstract_params(config, stored)
    shape = lambda *args, method: jax.eval_shape(
        lambda params: apply(params, *args, config=config, method=method), params)
    images = VisionInputs(jnp.zeros((3, 6, CONFIG.vision.patch_dim)), jnp.ones((3, 2), int), jnp.zeros((3, 6), int))
    mel, yes = jnp.zeros((2, 104, 80)), jnp.ones(2, bool)
    audio_cache = whisper.empty_cache(config.audio, 2, dtype)
    embeds, after = shape(mel, yes, yes, audio_cache, method="encode_stream")
    clips = shape(mel, jnp.array([104, 80]), method="encode_clips")
    pictures = shape(images, method="encode_images")
    assert (embeds.shape, clips.shape, pictures.shape) == ((2, 10, 128), (2, 10, 128), (3, 64, 128))
    assert [(x.shape, x.dtype) for x in after] == [(x.shape, x.dtype) for x in audio_cache]
    assert {x.dtype for x in (embeds, clips, pictures)} == {dtype}

    text = jnp.zeros((2, 4), int), jnp.zeros((2, 4, 128), dtype), jnp.array([4, 0])
    turn = jnp.zeros(2, int), talker.empty_cache(config.talker, 2, 64, dtype)
    codes, _, _, cache, raw = jax.eval_shape(lambda params: generate_chunk(
        params["talker"], config.talker, *text, *turn, jax.random.split(jax.random.key(0), 2), keep_scores=True), params)
    assert codes.dtype == jnp.int32 and raw.scores.dtype == jnp.float32 and cache.k.dtype == dtype

"""The backbone: causal, the same with and without a cache, and with a padded vocabulary."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.tiny import CONFIG
from venus_jax.models.qwen3 import qwen3
from venus_jax.nn import kv_cache

B, T = 2, 19
C = CONFIG.llm


@pytest.fixture(scope="module")
def ids():
    return jnp.asarray(np.random.default_rng(0).integers(0, C.vocab_size, (B, T)))


def score(config=C):
    """score(params, ids) -> logits, jitted."""
    model = qwen3(config)

    def run(params, ids):
        apply = lambda *args, **kwargs: model.apply({"params": params}, *args, **kwargs)
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        return apply(apply(apply(ids, method="embed_tokens"), positions)[0], method="logits")

    return jax.jit(run)


@pytest.fixture(scope="module")
def logits(params, ids):
    return score()(params["llm"], ids)


def test_the_future_does_not_change_the_past(params, ids, logits):
    other = score()(params["llm"], ids.at[:, 11:].add(1))
    np.testing.assert_array_equal(other[:, :11], logits[:, :11])
    assert np.abs(other[:, 11:] - logits[:, 11:]).max(axis=-1).min() > 0.1  # and every later token sees the change


def test_token_by_token_equals_the_whole(params, ids, logits):
    model = qwen3(C)

    @jax.jit
    def step(params, cache, token):
        apply = lambda *args, **kwargs: model.apply({"params": params}, *args, **kwargs)
        positions = kv_cache.next_positions(cache, jnp.ones(token.shape, bool))
        hidden, cache, _ = apply(apply(token, method="embed_tokens"), positions, None, cache)
        return cache, apply(hidden, method="logits")

    cache = kv_cache.empty(C.num_layers, B, T, C.num_kv_heads, C.head_dim)
    for t in range(T):
        cache, scores = step(params["llm"], cache, ids[:, t:t + 1])
        np.testing.assert_allclose(scores[:, 0], logits[:, t], rtol=0, atol=1e-4)


def test_a_vocabulary_padded_for_sharding_is_the_same_model(params, ids, logits):
    padded = dataclasses.replace(C, vocab_multiple=96)
    rows = padded.vocab_rows
    assert rows == 672
    junk = np.random.default_rng(1).standard_normal((rows - C.vocab_size, C.hidden_size)).astype(np.float32) * 9
    longer = {**params["llm"],
              "embed": {"embedding": jnp.concatenate([params["llm"]["embed"]["embedding"], junk])},
              "lm_head": {"kernel": jnp.concatenate([params["llm"]["lm_head"]["kernel"], junk.T], axis=1)}}
    ours = score(padded)(longer, ids)
    assert ours.shape == (B, T, rows)
    np.testing.assert_allclose(ours[..., :C.vocab_size], logits, rtol=0, atol=1e-5)
    assert (jax.nn.softmax(ours)[..., C.vocab_size:] == 0).all()

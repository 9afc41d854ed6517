"""One model, four meshes, the same numbers: forward, loss and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from venus_jax import sharding
from venus_jax.config import AudioConfig, LLMConfig, ResamplerConfig, TalkerConfig, VenusConfig, VisionConfig
from venus_jax.media.images import VisionInputs
from venus_jax.models import frontend
from venus_jax.training import step as training

MESHES = [(1, 1, 1), (1, 8, 1), (2, 2, 2), (1, 1, 8)]
# Every width a rule may cut divides by 8.
CONFIG = VenusConfig(
    llm=LLMConfig(vocab_size=512, hidden_size=128, intermediate_size=256, num_layers=2, num_heads=16, num_kv_heads=8,
                  head_dim=16),
    vision=VisionConfig(hidden_size=64, intermediate_size=128, num_layers=2, num_heads=8, image_size=112),
    resampler=ResamplerConfig(num_queries=8, hidden_size=128, kv_dim=64),
    audio=AudioConfig(hidden_size=64, intermediate_size=128, num_layers=2, num_heads=8, max_positions=128),
    talker=TalkerConfig(hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=4,
                        num_audio_tokens=80, num_text_tokens=512, audio_bos_token_id=1, text_eos_token_id=2,
                        unused_vocab_size=16))


def batch():
    rng = np.random.default_rng(0)
    rows, length, frames, patches = 8, 96, 2, 12
    ids = rng.integers(0, 512, (rows, length))
    media = np.full((rows, length), -1)
    media[:, 4:12], media[:, 20:28], media[:, 40:60] = np.arange(8), np.arange(8, 16), np.arange(16, 36)
    images = VisionInputs(rng.normal(size=(rows, frames, patches, 588)).astype(np.float32),
                          np.tile(np.array([3, 4], np.int32), (rows, frames, 1)),
                          rng.integers(0, 64, (rows, frames, patches)))
    return training.Batch(
        ids=ids, targets=np.roll(ids, -1, 1), weights=(media < 0).astype(np.float32),
        positions=np.tile(np.arange(length) % 64, (rows, 1)), segment_ids=np.tile(np.arange(length) // 64, (rows, 1)),
        media_index=media, images=images, mel=rng.normal(size=(rows, 1, 200, 80)).astype(np.float32),
        mel_frames=np.full((rows, 1), 200))


@pytest.fixture(scope="module")
def params():
    return frontend.init_params(CONFIG, jax.random.key(0))


@pytest.fixture(scope="module")
def results(params):
    """Per mesh: (loss, gradients, hidden states) on the host, from one program."""
    rules, out = sharding.TRAIN, {}
    loss_fn = training.make_loss(CONFIG, rules, ce_chunk=40, q_chunk=32)  # of 96 positions: the former does not divide
    model = frontend.Frontend(CONFIG, rules)

    def everything(params, data):
        x = model.apply({"params": params}, data.ids, method="embed")
        hidden, _ = model.apply({"params": params}, x, data.positions, data.segment_ids, method="backbone")
        return *jax.value_and_grad(loss_fn)(params, data), hidden

    for shape in MESHES:
        mesh = sharding.make_mesh(shape, jax.devices()[:int(np.prod(shape))])
        placed = jax.device_put(params, sharding.param_shardings(params, rules, mesh))
        data = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, rules.spec("batch"))), batch())
        with jax.set_mesh(mesh):
            lowered = jax.jit(everything).lower(placed, data)
            quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
            out[shape] = jax.device_get(lowered.compile(compiler_options=quick)(placed, data))
    return out


@pytest.mark.parametrize("shape", MESHES[1:], ids=str)
def test_numbers_do_not_depend_on_the_mesh(results, shape):
    (loss, grads, hidden), (other_loss, other_grads, other_hidden) = results[MESHES[0]], results[shape]
    assert abs(loss - other_loss) < 1e-5
    np.testing.assert_allclose(hidden, other_hidden, atol=1e-5, rtol=0)
    for (path, grad), (_, other) in zip(sharding.paths(grads), sharding.paths(other_grads), strict=True):
        assert np.abs(grad - other).max() < 1e-5 + 1e-5 * np.abs(grad).max(), path


def test_every_trained_part_gets_a_gradient(results):
    """A part that the loss does not reach would make the comparison above empty."""
    reached = {path.split("/")[0] for path, grad in sharding.paths(results[MESHES[0]][1]) if np.abs(grad).max() > 0}
    assert reached == {"llm", "vision", "resampler", "audio", "audio_projection"}  # the loss is the backbone's


@pytest.mark.parametrize("shape", MESHES[1:], ids=str)
def test_parameters_really_are_cut(params, shape):
    mesh = sharding.make_mesh(shape)
    kernel = jax.device_put(params, sharding.param_shardings(params, sharding.TRAIN, mesh))["llm"]["lm_head"]["kernel"]
    held = kernel.addressable_shards[0].data.size
    assert kernel.size // held == shape[1] * shape[2]


def test_serving_rules_give_the_same_hidden_states(params):
    """Heads over eight devices: the cached forward equals the unsharded one."""
    from venus_jax.nn import kv_cache

    llm, ids = CONFIG.llm, jnp.arange(24).reshape(2, 12) % 512
    cache = kv_cache.empty(llm.num_layers, 2, 32, llm.num_kv_heads, llm.head_dim)

    def run(rules, params, cache):
        model = frontend.Frontend(CONFIG, rules)

        @jax.jit
        def step(params, ids, cache):
            apply = lambda *args, method: model.apply({"params": params}, *args, method=method)
            positions = kv_cache.next_positions(cache, jnp.ones_like(ids, bool))
            hidden, cache = apply(apply(ids, method="embed"), positions, None, cache, method="backbone")
            return apply(hidden, method="logits"), cache

        first, cache = step(params, ids[:, :8], cache)
        second, cache = step(params, ids[:, 8:], cache)
        return jnp.concatenate([first, second], axis=1), cache

    plain, _ = run(None, params, cache)
    mesh = sharding.make_mesh((1, 1, 8))
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, sharding.param_shardings(params, sharding.SERVE, mesh))
        cut = jax.device_put(cache, jax.tree.map(lambda spec: NamedSharding(mesh, spec), kv_cache.specs(sharding.SERVE)))
        sharded, after = run(sharding.SERVE, placed, cut)
    assert after.k.sharding.spec[2] == "tensor"
    np.testing.assert_allclose(plain, sharded, atol=2e-5, rtol=0)


def test_sessions_on_a_mesh_say_the_same(golden):
    """Four rows over `data`, heads over `tensor`, speech over both: words, codes and lengths of the unsharded session."""
    from venus_jax import api
    from venus_jax.stream.inputs import Bucket

    sound = 0.1 * np.random.default_rng(0).standard_normal((4, 16_000)).clip(-3, 3).astype(np.float32)
    said = []
    for mesh in (None, sharding.make_mesh((2, 1, 2), jax.devices()[:4])):
        session = api.load(golden / "checkpoint", mesh=mesh).duplex(
            batch=4, slots=256, max_unit_tokens=8, buckets=[Bucket()], seed=1, settings=dict(follow_clock=False))
        units = [unit for k in range(4) for unit in session.step(audio=list(np.roll(sound, k, axis=0)))]
        said.append([(u.tokens, u.terminator, u.codes.tolist(), u.kv_length) for u in units])
        if mesh is not None:
            assert session._state.llm.k.sharding.spec[1:3] == (("data", "fsdp"), "tensor")
            assert session._state.talker.k.sharding.spec[1] == ("data", "fsdp", "tensor")
    assert said[0] == said[1] and len({tokens for tokens, *_ in said[0]}) > 4

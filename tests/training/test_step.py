"""One optimiser step: it learns, it learns only what it is told to, and packing is invisible to it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.models import tiny
from venus_jax.errors import ConfigError
from venus_jax.media.images import VisionInputs
from venus_jax.models.frontend import Frontend
from venus_jax.training.step import Batch, init_state, make_loss, make_train_step, split_params

CONFIG = tiny.CONFIG.replace(talker=None)
TRAINABLE = ("llm", "resampler")
OPTIMIZER = optax.adam(1e-3)  # without decay, so that only a gradient moves a parameter
B, T = 2, 24


@pytest.fixture(scope="module")
def batch():
    """Rows of text, each with two frames and a clip of which the rows say something."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, CONFIG.llm.vocab_size, (B, T + 1))
    media_index = np.full((B, T), -1)
    media_index[:, 2:10], media_index[:, 12:22] = rng.integers(0, 128, (B, 8)), np.arange(128, 138)
    images = VisionInputs(rng.standard_normal((B, 2, 4, CONFIG.vision.patch_dim), np.float32),
                          np.array([[[2, 2], [1, 3]], [[1, 4], [0, 0]]]), rng.integers(0, 64, (B, 2, 4)))
    return Batch(ids[:, :-1], ids[:, 1:], (media_index < 0).astype(np.float32), np.tile(np.arange(T), (B, 1)),
                 np.zeros((B, T), np.int32), media_index, images, rng.standard_normal((B, 1, 100, 80), np.float32),
                 np.full((B, 1), 100))


@pytest.fixture(scope="module")
def trained(batch):
    """(state before, the donated state, state after, losses) of five steps on one batch."""
    step = jax.jit(make_train_step(CONFIG, OPTIMIZER, ce_chunk=16), donate_argnums=0)
    params = tiny.random_params(CONFIG)
    state = init_state(params, TRAINABLE, OPTIMIZER, jnp.float32)
    before, given, losses = jax.tree.map(np.array, state), state, []
    for _ in range(5):
        state, metrics = step(state, batch)
        losses.append({key: float(value) for key, value in metrics.items()})
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))  # the state was a copy
    return before, given, state, losses


def test_the_loss_falls(trained):
    losses = [metrics["loss"] for metrics in trained[3]]
    assert all(later < earlier for earlier, later in zip(losses, losses[1:])) and losses[-1] < 0.8 * losses[0]
    assert all(np.isfinite(metrics["grad_norm"]) and metrics["grad_norm"] > 0 for metrics in trained[3])
    assert trained[2].step == 5


def test_a_row_s_media_are_its_frames_and_then_its_clips(batch, trained):
    """The first loss by hand, row by row, on the batch's own tables."""
    @jax.jit
    def row_loss(params, row):
        apply = lambda *args, method: Frontend(CONFIG).apply({"params": params}, *args, method=method)
        tables = apply(row.images, method="encode_images"), apply(row.mel, row.mel_frames, method="encode_clips")
        media = jnp.concatenate([table.reshape(1, -1, CONFIG.llm.hidden_size) for table in tables], axis=1)
        x = apply(row.ids[None], media, row.media_index[None], method="embed")
        scores = apply(apply(x, row.positions[None], method="backbone")[0], method="logits")[0]
        return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(scores, row.targets) * row.weights)

    rows = [jax.tree.map(lambda x: x[i], batch) for i in range(B)]
    total = sum(row_loss({**trained[0].params, **trained[0].frozen}, row) for row in rows)
    np.testing.assert_allclose(trained[3][0]["loss"], total / batch.weights.sum(), rtol=1e-5)


def test_frozen_parts_keep_every_bit_and_learned_parts_all_move(trained):
    before, _, after, _ = trained
    assert set(after.params) == set(TRAINABLE)
    assert set(after.frozen) == {"vision", "audio", "audio_projection"}
    jax.tree.map(np.testing.assert_array_equal, after.frozen, before.frozen)
    for (path, a), b in zip(jax.tree.leaves_with_path(after.params), jax.tree.leaves(before.params)):
        assert (np.asarray(a) != b).any(), jax.tree_util.keystr(path)


def test_the_state_is_given_away(trained):
    """Donated: the step writes over the old state instead of holding two."""
    _, given, after, _ = trained
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(after))


def test_what_is_frozen_is_kept_small_and_what_learns_in_float32():
    given = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float16), tiny.shapes(CONFIG))
    state = jax.eval_shape(lambda given: init_state(given, ("vision", "audio"), OPTIMIZER, jnp.bfloat16), given)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.float32)}
    assert {leaf.dtype for leaf in jax.tree.leaves(state.frozen)} == {jnp.dtype(jnp.bfloat16)}
    moments = [leaf.size for leaf in jax.tree.leaves(state.opt_state) if leaf.size > 1]
    assert sum(moments) == 2 * sum(leaf.size for leaf in jax.tree.leaves(state.params))  # none for what is frozen


def test_an_unknown_part_is_named():
    with pytest.raises(ConfigError, match="'vison'.*llm.*vision"):
        split_params({"llm": {}, "vision": {}}, ("llm", "vison"))


def text_batch(ids, targets, weights, positions, segment_ids):
    return Batch(ids, targets, weights, positions, segment_ids, np.full(ids.shape, -1), None, None, None)


@pytest.fixture(scope="module")
def segments():
    """Two texts of 9 and 14 tokens with their targets and weights."""
    rng = np.random.default_rng(1)
    return [(rng.integers(0, 640, n), rng.integers(0, 640, n), rng.random(n).astype(np.float32)) for n in (9, 14)]


def packed(segments):
    """One row holding both."""
    ids, targets, weights = (np.concatenate(parts)[None] for parts in zip(*segments))
    lengths = [len(ids) for ids, _, _ in segments]
    positions = np.concatenate([np.arange(n) for n in lengths])[None]
    return text_batch(ids, targets, weights, positions, np.repeat([0, 1], lengths)[None])


def padded(segments):
    """A row each; the padding is a segment of its own and weighs nothing."""
    longest = max(len(ids) for ids, _, _ in segments)
    rows = [[np.pad(x, (0, longest - len(x))) for x in segment] for segment in segments]
    ids, targets, weights = (np.stack(parts) for parts in zip(*rows))
    inside = np.arange(longest) < np.array([[len(ids)] for ids, _, _ in segments])
    return text_batch(ids, targets, weights, np.where(inside, np.arange(longest), 0), np.where(inside, 0, 1))


@pytest.fixture(scope="module")
def loss_and_grads():
    """loss_and_grads(batch, remat) of the text model."""
    params = tiny.random_params(tiny.TEXT_ONLY)
    form = lambda remat: jax.jit(jax.value_and_grad(make_loss(tiny.TEXT_ONLY, remat=remat, ce_chunk=8)))
    forms = {remat: form(remat) for remat in (True, False)}
    return lambda batch, remat: forms[remat](params, batch)


def test_packing_and_recomputation_change_nothing(segments, loss_and_grads):
    """Two texts in one row, or in two padded rows and with every block kept: the same loss and gradients."""
    runs = loss_and_grads(packed(segments), remat=True), loss_and_grads(padded(segments), remat=False)
    for a, b in zip(*map(jax.tree.leaves, runs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)


def test_loss_is_the_mean_over_weighted_positions(segments, loss_and_grads):
    """Also where the weights are small; and nothing, not NaN, where there are none."""
    batch = packed(segments)
    weighing = lambda factor: loss_and_grads(batch._replace(weights=np.float32(factor) * batch.weights), remat=True)
    np.testing.assert_allclose(weighing(0.01)[0], weighing(1)[0], rtol=1e-5)
    loss, grads = weighing(0)
    assert loss == 0 and not any(leaf.any() for leaf in jax.tree.leaves(grads))

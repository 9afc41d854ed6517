"""Vision tower and resampler: every slice is seen by itself, whatever others and padding lie beside it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.tiny import CONFIG
from venus_jax.config import ResamplerConfig
from venus_jax.media.images import VisionInputs, patchify
from venus_jax.models.frontend import Frontend
from venus_jax.models.resampler import Resampler, sine_positions

GRIDS = ((4, 3), (2, 7), (5, 2))  # rows and columns of patches


def pictures(seed=0):
    """Noise pictures of `GRIDS`; our own patching gives them the inputs they have in life."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (14 * rows, 14 * columns, 3), np.uint8) for rows, columns in GRIDS]


def inputs(arrays, num_patches=None):
    from PIL import Image

    return patchify([Image.fromarray(x) for x in arrays], CONFIG.vision.positions_per_side, num_patches=num_patches)


@pytest.fixture(scope="module")
def encode(params):
    run = jax.jit(lambda params, images: Frontend(CONFIG).apply({"params": params}, images, method="encode_images"))
    return functools.partial(run, params)


@pytest.fixture(scope="module")
def together(encode):
    return encode(inputs(pictures()))


def test_slices_do_not_see_each_other_or_the_padding(encode, together):
    """Beside other pictures, junk padding and empty slots: the same embeddings."""
    assert together.shape == (3, CONFIG.resampler.num_queries, CONFIG.llm.hidden_size)
    other = inputs([*pictures()[:1], *pictures(seed=1)[1:]])
    np.testing.assert_array_equal(encode(other)[0], together[0])

    longer = inputs(pictures(), num_patches=20)
    for i, (rows, columns) in enumerate(GRIDS):
        longer.patches[i, rows * columns:] = 50
        longer.position_ids[i, rows * columns:] = 3
    empty = lambda x: np.concatenate([x, np.zeros((2, *x.shape[1:]), x.dtype)])
    ours = encode(VisionInputs(*map(empty, longer)))
    np.testing.assert_allclose(ours[:3], together, rtol=0, atol=2e-5)
    assert np.isfinite(ours).all()  # a NaN in an empty slot would reach the gradients of the others


def test_the_layout_of_the_patches_matters(encode, together):
    """To the resampler by the grid, to the tower by the position ids."""
    images = inputs(pictures())
    turned = images._replace(grid_hw=images.grid_hw[:, ::-1].copy())
    moved = images._replace(position_ids=images.position_ids[:, ::-1].copy())
    for other in (turned, moved):
        assert np.abs(encode(other) - together).max(axis=(1, 2)).min() > 1e-2


def test_sine_positions_encode_the_column_first():
    row, column, width = np.array([[0, 5, 5]]), np.array([[3, 3, 900]]), 64
    table = np.asarray(sine_positions(jnp.asarray(row), jnp.asarray(column), width))[0]
    np.testing.assert_array_equal(table[0, :32], table[1, :32])  # same column
    np.testing.assert_array_equal(table[1, 32:], table[2, 32:])  # same row
    omega = 10_000.0 ** (-np.arange(16) / 16)
    wanted = np.concatenate([f(axis[0][:, None] * omega) for axis in (column, row) for f in (np.sin, np.cos)], axis=1)
    np.testing.assert_allclose(table, wanted, rtol=0, atol=900 * 2.0**-23)


def test_resampler_is_its_formula():
    """With several heads, in plain float64: positions on keys only, queries without, one norm each."""
    c, grid, patches = ResamplerConfig(num_queries=5, hidden_size=256, kv_dim=24), (3, 4), 12
    module, rng = Resampler(c), np.random.default_rng(0)
    x = rng.standard_normal((1, patches, c.kv_dim)).astype(np.float32)
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), x, jnp.array([grid])))["params"]
    draw = lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32) / max(leaf.shape[0], 16) ** 0.5
    p = jax.tree.map(draw, shapes)
    ours = jax.jit(module.apply)({"params": p}, x, jnp.array([grid]))[0]

    def norm(name, y):
        y = (y - y.mean(axis=-1, keepdims=True)) / np.sqrt(y.var(axis=-1, keepdims=True) + c.layer_norm_eps)
        return y * p[name]["scale"] + p[name]["bias"]

    def heads(name, y):  # [head, token, 128]
        y = y @ p["attn"][name]["kernel"] + p["attn"][name]["bias"]
        return y.reshape(len(y), -1, 128).swapaxes(0, 1)

    p = jax.tree.map(np.float64, p)
    omega = 10_000.0 ** (-np.arange(64) / 64)
    row, column = np.divmod(np.arange(patches), grid[1])
    position = np.concatenate([f(axis[:, None] * omega) for axis in (column, row) for f in (np.sin, np.cos)], axis=1)
    kv = norm("ln_kv", np.float64(x[0]) @ p["kv_proj"]["kernel"])
    q, k, v = heads("q_proj", norm("ln_q", p["query"])), heads("k_proj", kv + position), heads("v_proj", kv)
    weights = np.exp(q @ k.swapaxes(1, 2) / 128**0.5)
    mixed = (weights / weights.sum(axis=-1, keepdims=True) @ v).swapaxes(0, 1).reshape(c.num_queries, -1)
    wanted = norm("ln_post", mixed @ p["attn"]["out_proj"]["kernel"] + p["attn"]["out_proj"]["bias"]) @ p["proj"]
    np.testing.assert_allclose(ours, wanted, rtol=0, atol=2e-5)

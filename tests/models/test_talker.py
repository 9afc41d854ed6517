"""What the talker is told of a text token."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.models.tiny import CONFIG
from venus_jax.models.talker import empty_cache, talker
from venus_jax.nn.layers import separate_layers

IDS = jnp.array([[3, 650, 3]])  # ids of the backbone's vocabulary and beyond it


def condition(params, hidden):
    return talker(CONFIG.talker).apply({"params": params}, IDS, hidden, method="condition")


def test_condition_is_text_plus_a_direction(params):
    """The projected state counts by its direction alone, never by its length."""
    params = params["talker"]
    hidden = np.random.default_rng(0).standard_normal((1, 3, CONFIG.llm.hidden_size), np.float32)
    p = params["projector_semantic"]
    projected = np.maximum(hidden @ p["linear1"]["kernel"] + p["linear1"]["bias"], 0) @ p["linear2"]["kernel"]
    projected = projected + p["linear2"]["bias"]
    text = np.asarray(params["emb_text"]["embedding"])[IDS]
    wanted = text + projected / np.linalg.norm(projected, axis=-1, keepdims=True)
    np.testing.assert_allclose(condition(params, hidden), wanted, rtol=0, atol=1e-5)


def test_a_state_without_direction_is_no_nan(params):
    params = params["talker"]
    nothing = {**params, "projector_semantic": jax.tree.map(jnp.zeros_like, params["projector_semantic"])}
    text = params["emb_text"]["embedding"][IDS]
    np.testing.assert_array_equal(condition(nothing, jnp.ones((1, 3, CONFIG.llm.hidden_size))), text)


def test_networks_run_on_layers_that_lie_apart(params):
    """The same numbers from a scanned stack and from blocks one by one; the tree itself says which it is."""
    stacked, c = params["talker"], CONFIG.talker
    apart = separate_layers(stacked)
    assert {"layers_0", "layers_1"} <= set(apart) and "layers" not in apart
    x, positions = jax.random.normal(jax.random.key(1), (2, 3, c.hidden_size)), jnp.arange(6).reshape(2, 3)
    outs = [talker(c).apply({"params": tree}, x, positions, None, empty_cache(c, 2, 16)) for tree in (stacked, apart)]
    for a, b in zip(jax.tree.leaves(outs[0]), jax.tree.leaves(outs[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)

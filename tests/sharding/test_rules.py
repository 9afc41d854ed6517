"""Where parameters lie: rule tables against their golden lists, and what happens when a size does not divide."""

import importlib.util
import json
import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from venus_jax import config, sharding
from venus_jax.errors import ShardingError
from venus_jax.models import frontend

LISTS = Path(__file__).resolve().parents[1] / "golden_lists"
_spec = importlib.util.spec_from_file_location("update", LISTS / "update.py")
update = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(update)


@pytest.mark.parametrize("name", update.LISTS)
def test_golden_lists(name):
    assert update.LISTS[name]() == json.loads((LISTS / f"{name}.json").read_text()), (
        "if the change is meant: python tests/golden_lists/update.py")


def test_published_parameter_counts():
    count = lambda make: frontend.num_parameters(frontend.abstract_params(make(added_tokens=False)))
    assert count(config.omni_9b) == 9_371_787_666
    assert count(config.audio_9b) == 8_865_087_650


@pytest.mark.parametrize("rules", sharding.RULES.values(), ids=sharding.RULES)
def test_all_of_the_9b_divides_by_eight(rules, caplog):
    """The large tables and matrices really are cut: no more than 2 % of the parameters are whole on each device."""
    params = frontend.abstract_params(config.omni_9b())
    mesh = sharding.make_mesh((1, 8, 1) if rules.name == "train" else (1, 1, 8))
    with caplog.at_level(logging.INFO):
        specs = dict(sharding.paths(sharding.param_specs(params, rules, mesh)))
    assert not caplog.records
    whole = sum(leaf.size for path, leaf in sharding.paths(params) if specs[path] == PartitionSpec(*[None] * leaf.ndim))
    assert whole < (0.001 if rules.name == "train" else 0.02) * frontend.num_parameters(params)


def test_mesh_axes_are_auto():
    assert set(sharding.make_mesh((2, 2, 2)).axis_types) == {AxisType.Auto}


@pytest.mark.parametrize("shape", [(1, 1, 4), (8,), (2, 2, 2, 1), (-1, 8, 1)])
def test_a_mesh_that_does_not_fit_the_devices(shape):
    with pytest.raises(ShardingError, match="product 8, the number of devices"):
        sharding.make_mesh(shape)


def test_a_size_that_does_not_divide_is_kept_whole_and_said(caplog):
    tree = {"llm": {"embed": {"embedding": jax.ShapeDtypeStruct((426, 256), "float32")}}}
    with caplog.at_level(logging.INFO):
        specs = sharding.param_specs(tree, sharding.SERVE, sharding.make_mesh((1, 1, 8)))
    assert specs["llm"]["embed"]["embedding"] == PartitionSpec(None, None)
    assert "llm/embed/embedding: axis 0 of size 426 does not divide by tensor=8" in caplog.text


def test_activations_that_do_not_divide_are_left_whole_and_rules_need_a_mesh():
    x = jnp.zeros((8, 3, 430))
    with jax.set_mesh(sharding.make_mesh((2, 1, 4))):
        cut = jax.jit(lambda x: sharding.constrain(x, sharding.TRAIN, "batch", "len", "vocab"))(x)
    assert cut.sharding.shard_shape(x.shape) == (4, 3, 430)
    with pytest.raises(ShardingError, match="no mesh is entered"):
        sharding.constrain(x, sharding.TRAIN, "batch", "len", "vocab")


def test_unknown_paths_and_ranks_are_refused():
    with pytest.raises(ShardingError, match="parameter llm/new/kernel: no sharding rule"):
        sharding.logical_axes("llm/new/kernel", 2)
    with pytest.raises(ShardingError, match="lm_head/kernel: 3 dimensions"):
        sharding.logical_axes("llm/lm_head/kernel", 3)
    with pytest.raises(ShardingError, match="no entry for logical axis 'experts'"):
        sharding.TRAIN.axes("experts")

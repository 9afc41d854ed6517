"""Tensors of a fixed acoustic network, all in memory, to our parameter tree and back by `table.Rule`s."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from venus_jax import sharding
from venus_jax.checkpoints import store, table
from venus_jax.errors import CheckpointError
from venus_jax.typing import Params


def to_params(rules: Sequence[table.Rule], tensors: Mapping[str, np.ndarray], source: str) -> Params:
    """The tree the rules describe, layers stacked; NumPy arrays in the tensors' dtypes.

    Raises:
      CheckpointError: a tensor is missing, unused or misshapen; the message begins with `source` and names it.
    """
    expected = {name: rule.shape for rule in rules for name in rule.names}
    if missing := [name for name in expected if name not in tensors]:
        raise CheckpointError(f"{source}: missing tensor {store.shorten(missing)}")
    if unused := [name for name in tensors if name not in expected]:
        raise CheckpointError(f"{source}: unused tensor {store.shorten(unused)}")
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise CheckpointError(f"{source}: tensor {name} has shape {list(tensors[name].shape)}, "
                                  f"expected {list(shape)}")
    flat = {}
    for rule in rules:
        parts = [rule.turn(tensors[name]) for name in rule.names]
        flat[rule.path] = np.stack(parts) if rule.layers else np.ascontiguousarray(parts[0])
    return table.nest(flat)


def to_tensors(rules: Sequence[table.Rule], params: Params) -> dict[str, np.ndarray]:
    """The inverse: tensors under their official names, contiguous.

    Raises:
      CheckpointError: a parameter is missing, unused or misshapen; the message names it.
    """
    flat = {path: np.asarray(x) for path, x in sharding.paths(params)}
    found, wanted = {path: x.shape for path, x in flat.items()}, {rule.path: rule.param_shape for rule in rules}
    for path in sorted(found.keys() | wanted.keys()):
        if found.get(path) != wanted.get(path):
            raise CheckpointError(f"parameter {path} has shape {found.get(path)}, expected {wanted.get(path)}")
    out = {}
    for rule in rules:
        for n, name in enumerate(rule.names):
            out[name] = np.ascontiguousarray(rule.turn(flat[rule.path][n] if rule.layers else flat[rule.path]))
    return out

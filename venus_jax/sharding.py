"""How parameters and activations lie on a mesh of devices: logical axes, two rule tables, nothing else.

A parameter's path gives its logical axes (`PARAM_AXES`); a rule table maps logical axes to the mesh axes `data`,
`fsdp`, `tensor`. `TRAIN` shards weights over `fsdp` and `tensor`; `SERVE` over `tensor` alone, so that a decode step
gathers no weights. Reasons: DESIGN section 6.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from typing import Any, Iterator, Mapping, Sequence

from venus_jax.errors import ShardingError

MESH_AXES = ("data", "fsdp", "tensor")

# Path pattern (without the `layers/` stack) -> logical axes of the unstacked parameter. First match wins.
# Talker heads (12) do not divide by a tensor axis of 8, so its attention is kept whole on every chip: axis None.
PARAM_AXES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"llm/embed/embedding", ("vocab", "embed")),
    (r"llm/lm_head/kernel", ("embed", "vocab")),
    (r"llm/attn/q_proj/kernel", ("embed", "heads")),
    (r"llm/attn/[kv]_proj/kernel", ("embed", "kv_heads")),
    (r"llm/attn/o_proj/kernel", ("heads", "embed")),
    (r"(llm|talker)/mlp/(gate|up)_proj/kernel", ("embed", "mlp")),
    (r"(llm|talker)/mlp/down_proj/kernel", ("mlp", "embed")),
    (r"(vision|audio|resampler)/attn/[qkv]_proj/kernel", ("embed", "heads")),
    (r"(vision|audio|resampler)/attn/[qkv]_proj/bias", ("heads",)),
    (r"(vision|audio|resampler)/attn/out_proj/kernel", ("heads", "embed")),
    (r"(vision|audio)/mlp/fc1/kernel", ("embed", "mlp")),
    (r"(vision|audio)/mlp/fc1/bias", ("mlp",)),
    (r"(vision|audio)/mlp/fc2/kernel", ("mlp", "embed")),
    (r"vision/patch_embed/kernel", (None, "embed")),
    (r"(vision|audio)/position_embed/embedding", (None, "embed")),
    (r"audio/conv[12]/kernel", (None, None, "embed")),
    (r"resampler/(query|proj|kv_proj/kernel)", (None, "embed")),
    (r"audio_projection/linear[12]/kernel", (None, "embed")),
    (r"talker/(emb_text|embed)/embedding", ("vocab", "embed")),
    (r"talker/emb_code/embedding", (None, "embed")),
    (r"talker/head_code/kernel", ("embed", None)),
    (r"talker/attn/[qkv]_proj/kernel", ("embed", None)),
    (r"talker/attn/o_proj/kernel", (None, "embed")),
    (r"talker/projector_\w+/linear[12]/kernel", (None, "embed")),
    (r".*/(scale|bias)", (None,)),
)


@dataclasses.dataclass(frozen=True)
class Rules:
    """Logical axis -> mesh axis (a name, a tuple of names, or None). Hashable: it is a static argument."""

    name: str
    table: tuple[tuple[str, Any], ...]

    def axes(self, logical: str | None) -> Any:
        """Mesh axes of one logical axis."""
        if logical is None:
            return None
        table = dict(self.table)
        if logical not in table:
            raise ShardingError(f"rules {self.name!r} have no entry for logical axis {logical!r}")
        return table[logical]

    def divides(self, logical: str | None, size: int, mesh: Any = None) -> bool:
        """Whether a dimension of `size` divides over its axes of `mesh` (default: the one of `jax.set_mesh`).

        Raises:
          ShardingError: no mesh is entered.
        """
        import jax

        mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
        if mesh.empty:
            raise ShardingError("sharding rules are given but no mesh is entered: use `with jax.set_mesh(mesh):`")
        return size % _mesh_size(mesh, self.axes(logical)) == 0

    def spec(self, *logical: str | None):
        """PartitionSpec of an array whose dimensions have these logical axes."""
        from jax.sharding import PartitionSpec

        return PartitionSpec(*map(self.axes, logical))


TRAIN = Rules("train", (
    ("batch", ("data", "fsdp")), ("len", None), ("embed", "fsdp"), ("act_embed", None), ("heads", "tensor"),
    ("kv_heads", "tensor"), ("mlp", "tensor"), ("vocab", "tensor"), ("cache_slots", None),
    ("speech_batch", ("data", "fsdp"))))
SERVE = Rules("serve", (
    ("batch", ("data", "fsdp")), ("len", None), ("embed", None), ("act_embed", None), ("heads", "tensor"),
    ("kv_heads", "tensor"), ("mlp", "tensor"), ("vocab", "tensor"), ("cache_slots", None),
    ("speech_batch", ("data", "fsdp", "tensor"))))  # the talker lies whole on every chip, so its sessions are spread
RULES = {"train": TRAIN, "serve": SERVE}


def make_mesh(shape: Sequence[int], devices: Sequence[Any] | None = None):
    """A mesh with axes `data, fsdp, tensor` of type Auto (JAX's default, Explicit, refuses sharding constraints).

    Raises:
      ShardingError: `shape` does not have three sizes whose product is the number of devices.
    """
    import jax
    from jax.experimental import mesh_utils
    from jax.sharding import AxisType, Mesh

    devices = jax.devices() if devices is None else devices
    if len(shape) != 3 or min(shape) < 1 or math.prod(shape) != len(devices):
        raise ShardingError(f"mesh {tuple(shape)} needs three sizes (data, fsdp, tensor) with product {len(devices)}, "
                            "the number of devices")
    # An axis of 8 on a torus of 4 x 4 chips has to be folded, which JAX does only when allowed to.
    grid = mesh_utils.create_device_mesh(tuple(shape), devices, allow_split_physical_axes=True)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * 3)


def constrain(x, rules: Rules | None, *logical: str | None):
    """Pins an activation's layout under `jax.set_mesh`; a dimension that does not divide is left whole.

    Without rules (one device) `x` is returned.

    Raises:
      ShardingError: rules without a mesh.
    """
    if rules is None:
        return x
    import jax
    from jax.sharding import PartitionSpec

    axes = [rules.axes(axis) if rules.divides(axis, size) else None for size, axis in zip(x.shape, logical, strict=True)]
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*axes))


def paths(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, leaf) of a nested dict, in its order; path parts joined by '/'."""
    for key, value in tree.items():
        path = f"{prefix}/{key}" if prefix else key
        if isinstance(value, Mapping):
            yield from paths(value, path)
        else:
            yield path, value


def logical_axes(path: str, ndim: int) -> tuple[str | None, ...]:
    """Logical axes of the parameter at `path`; a stacked one has a leading None.

    Raises:
      ShardingError: no pattern fits, or it fits a parameter of other rank.
    """
    stacked = "/layers/" in path
    bare = path.replace("/layers/", "/")
    for pattern, axes in PARAM_AXES:
        if re.fullmatch(pattern, bare):
            if len(axes) + stacked != ndim:
                raise ShardingError(f"parameter {path}: {ndim} dimensions, its rule {pattern!r} has {len(axes) + stacked}")
            return (None,) * stacked + axes
    raise ShardingError(f"parameter {path}: no sharding rule fits its path")


def param_specs(params: Mapping[str, Any], rules: Rules, mesh) -> dict[str, Any]:
    """PartitionSpecs of a parameter tree (arrays or shapes).

    A dimension that does not divide by its mesh axes is kept whole, and that is logged once a parameter.
    """
    from jax.sharding import PartitionSpec

    def spec(path, leaf):
        out = []
        for axis, (size, logical) in enumerate(zip(leaf.shape, logical_axes(path, len(leaf.shape)))):
            wanted = rules.axes(logical)
            parts = _mesh_size(mesh, wanted)
            if size % parts:
                logging.info("%s: axis %d of size %d does not divide by %s=%d, kept whole", path, axis, size, wanted, parts)
                wanted = None
            out.append(wanted)
        return PartitionSpec(*out)

    def walk(tree, prefix=""):
        return {k: walk(v, f"{prefix}{k}/") if isinstance(v, Mapping) else spec(prefix + k, v) for k, v in tree.items()}

    return walk(params)


def param_shardings(params: Mapping[str, Any], rules: Rules, mesh) -> dict[str, Any]:
    """NamedShardings of a parameter tree on `mesh`; see `param_specs`."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), param_specs(params, rules, mesh),
                        is_leaf=lambda x: isinstance(x, PartitionSpec))


def _mesh_size(mesh, axes) -> int:
    size = 1
    for axis in (axes,) if isinstance(axes, str) else axes or ():
        size *= mesh.shape[axis]
    return size

"""Writes the lists the tests compare with; run it after a change that is meant, and read the diff.

    python tests/golden_lists/update.py
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from venus_jax import config, sharding
from venus_jax.models import frontend

MESHES = {"train": (1, 8, 1), "serve": (1, 1, 8)}


def parameter_list(variant: str) -> dict[str, list]:
    """Path -> [shape, dtype] of a published size, before the four added tokens."""
    params = frontend.abstract_params(getattr(config, variant)(added_tokens=False))
    return {path: [list(leaf.shape), str(leaf.dtype)] for path, leaf in sharding.paths(params)}


def spec_list(rules: str) -> dict[str, str]:
    """Path -> PartitionSpec of omni_9b, added tokens included, on eight devices."""
    params = frontend.abstract_params(config.omni_9b())
    specs = sharding.param_specs(params, sharding.RULES[rules], sharding.make_mesh(MESHES[rules]))
    return {path: str(spec) for path, spec in sharding.paths(specs)}


LISTS = {
    "omni_9b_params": lambda: parameter_list("omni_9b"), "audio_9b_params": lambda: parameter_list("audio_9b"),
    "omni_9b_train_specs": lambda: spec_list("train"), "omni_9b_serve_specs": lambda: spec_list("serve")}


def main():
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    for name, make in LISTS.items():
        rows = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in make().items())
        (HERE / f"{name}.json").write_text("{\n" + rows + "\n}\n")


if __name__ == "__main__":
    main()

"""Compiles a configuration for a TPU topology on a machine without TPUs, and prints the memory a chip needs.

    python launch/compile_tpu.py --config=configs/omni_9b_sft.py --topology=v5e:4x8 --what=train --json=out.json
    python launch/compile_tpu.py --config=configs/omni_9b.py --topology=v5e:2x4 --what=unit --config.batch_size=32

Needs the TPU compiler: pip install "venus_jax[tpu]". Takes one to several minutes. Exit code 1 if the program does not fit.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the chips are only described, never opened

from absl import flags
from ml_collections import config_flags

from venus_jax import cli, reports

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "configs/omni_9b.py (forward, unit) or configs/omni_9b_sft.py (train)", lock_config=True)
_TOPOLOGY = flags.DEFINE_string("topology", "v5e:4x8", "chip and shape: v5e:4x8, v6e:4x4, v5p:2x2x4, ...")
_WHAT = flags.DEFINE_enum("what", "forward", ["forward", "unit", "train"], "which program")
_JSON = flags.DEFINE_string("json", None, "file to write the report to")
flags.mark_flag_as_required("config")


def main(_):
    from venus_jax import aot  # after the flags: --help stays quick

    config, output = _CONFIG.value, reports.JsonReport(_JSON.value)
    aot.check_settings(config, _WHAT.value)
    mesh = aot.build_mesh(config.mesh, aot.topology_devices(_TOPOLOGY.value))
    axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    print(f"{config.model.variant} {_WHAT.value} for {_TOPOLOGY.value} ({axes}): tracing ...", flush=True)
    lower = {"forward": aot.lower_forward, "unit": aot.lower_unit, "train": aot.lower_train}[_WHAT.value]
    lowered = lower(config, mesh)
    print("compiling ...", flush=True)
    report = {"model": config.model.variant, "what": _WHAT.value, "mesh": dict(mesh.shape)}
    report |= aot.compile_report(lowered, _TOPOLOGY.value)
    if report["error"]:
        print(f"refused by the compiler: {report['error']}")
    for name, size in report.get("bytes_per_chip", {}).items():
        print(f"  {name:<12}{size / aot.GIB:8.2f} GiB")
    peak = report["bytes_per_chip_peak"]
    needed = "an unknown amount" if peak is None else f"{peak / aot.GIB:.2f} GiB ({peak} bytes)"
    verdict = "fits" if report["fits"] else "DOES NOT FIT"
    print(f"peak {needed} of {report['hbm_bytes'] / aot.GIB:.2f} GiB a chip: {verdict}; "
          f"compiled in {report['compile_seconds']:.0f} s; collectives {report.get('collectives', {})}")
    output.write(report)
    return 0 if report["fits"] else 1


if __name__ == "__main__":
    cli.run(main)

"""Times the duplex step and prints medians, spread and ratios; nothing else on the machine should be busy.

    python launch/bench.py --what=unit --model_json=FILE     # a unit against a plain PyTorch loop of the same sizes
    python launch/bench.py --what=batch                      # 16 sessions in a batch against one
    python launch/bench.py --what=long --hours=4             # does the tenth hour cost what the first minute did?

Models have random weights; FILE has the form of the golden set's bench_config.json. The comparison with PyTorch needs torch
and transformers, here or in the Python that --torch_python names; without them it is skipped with a message. Ratios are
ours over the other's: below 1 is faster, except throughputs, where above 1 is more.
"""

import math
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import sys

from absl import flags

from venus_jax import cli, reports
from venus_jax.errors import ConfigError

_WHAT = flags.DEFINE_enum("what", "unit", ["unit", "batch", "long"], "what to time")
_MODEL = flags.DEFINE_string("model_json", None, "sizes of the model and the script; default: a small built-in one")
_TORCH = flags.DEFINE_string("torch_python", None, "a Python that has torch and transformers (--what=unit); default: this one")
_HOURS = flags.DEFINE_float("hours", 4, "hours of talk to simulate (--what=long)", lower_bound=0.1)
_JSON = flags.DEFINE_string("json", None, "file to write rows and ratios to")


def main(_):
    from tqdm import tqdm

    from venus_jax import benchmarks  # after the flags: --help stays quick

    if not math.isfinite(_HOURS.value):
        raise ConfigError(f"--hours={_HOURS.value}: expected a number of hours")
    output, bench = reports.JsonReport(_JSON.value), benchmarks.read_model_json(_MODEL.value)
    print(f"model {bench.name}, {_WHAT.value} ...", flush=True)
    if _WHAT.value == "unit":
        result = benchmarks.bench_unit(bench, _TORCH.value or sys.executable, say=lambda text: print(text, flush=True))
    elif _WHAT.value == "batch":
        result = benchmarks.bench_batch(bench)
    else:
        with tqdm(desc="units", disable=None) as bar:
            def progress(done, total):
                bar.total = total
                bar.update(done - bar.n)

            result = benchmarks.bench_long(bench, _HOURS.value, progress)
    for row in result["rows"]:
        print(f"  {row['name']:<22} median {row['median_s'] * 1e3:8.2f} ms   p10 {row['p10_s'] * 1e3:8.2f}   "
              f"p90 {row['p90_s'] * 1e3:8.2f}   n {row['n']}")
    for name, ratio in result["ratios"].items():
        print(f"  {name:<34} {ratio:8.4f}")
    output.write({"what": _WHAT.value, "model": bench.name, **result})


if __name__ == "__main__":
    cli.run(main)

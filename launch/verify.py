"""Runs our networks on recorded inputs of the reference and prints one line a comparison.

    python launch/verify.py --golden=tests/golden
    python launch/verify.py --golden=DIR --part=llm,vision --json=report.json

A line shows the largest absolute error and its bound: ten times the difference recorded with the set, at least 1e-4
(2e-4 for logits); ids and tables must be identical (bound 0). Exit code 1 if any line is off.
"""

import math
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # parity is a matter of float32, which accelerators round

from absl import flags

from venus_jax import cli, reports

_GOLDEN = flags.DEFINE_string("golden", "tests/golden", "folder of recorded fixtures (audio, checkpoint, llm, ...)")
_PART = flags.DEFINE_list("part", None, "parts to run: llm, vision, audio, tts, decision, duplex; default all")
_JSON = flags.DEFINE_string("json", None, "file to write all comparisons to")


def main(_):
    from venus_jax.checkpoints import golden, verify  # after the flags: --help stays quick
    from venus_jax.stream import verify as stream_verify

    runners = verify.PARTS | stream_verify.PARTS
    report = reports.JsonReport(_JSON.value)
    checks = verify.verify(golden.GoldenSet(_GOLDEN.value), _PART.value or list(runners),
                           emit=lambda check: print(check, flush=True), runners=runners)
    off = [check for check in checks if not check.ok]
    report.write([dict(part=c.part, name=c.name, error=c.error if math.isfinite(c.error) else None, bound=c.bound,
                       ok=c.ok) for c in checks])
    print(f"{len(checks) - len(off)} of {len(checks)} comparisons ok")
    return 1 if off else 0


if __name__ == "__main__":
    cli.run(main)

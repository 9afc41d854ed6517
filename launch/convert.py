"""Converts a checkpoint between Hugging Face's form and ours; the direction follows from what --from holds.

  python launch/convert.py --from=MiniCPM-o-4_5 --to=checkpoints/omni     # safetensors -> config.json, params/ (Orbax)
  python launch/convert.py --from=checkpoints/omni --to=exported          # and back, bit for bit

Tokenizer files and whatever else is not weights come along. --to must not exist yet, or be empty; it appears whole or
not at all. The 9B takes 18 GB of disk and, as the line it prints at the end says, 4 GiB of memory.
Exit status: 0 done, 1 wrong flags, 2 a checkpoint that cannot be read or written (one line says what and where).
"""

import signal
import time

from absl import flags

from venus_jax import cli

FLAGS = flags.FLAGS
flags.DEFINE_string("from", None, "Directory to read: Hugging Face's (config.json with model.safetensors, or with "
                    "shards and model.safetensors.index.json) or ours (config.json with params/).", required=True)
flags.DEFINE_string("to", None, "Directory to write; must not exist yet, or be empty.", required=True)
flags.DEFINE_enum("added_tokens", "auto", ["auto", "keep", "drop"],
                  "The rows of <delegate>, </delegate>, <backend>, </backend>. auto: appended where a Hugging Face "
                  "checkpoint lacks them, and cut back on the way out if they were never trained. keep: never cut. "
                  "drop: never appended, always cut.")
flags.DEFINE_enum("dtype", None, ["bfloat16", "float16", "float32"],
                  "Cast every parameter to this dtype. Default: as stored, which alone is reversible bit for bit.")


def main(argv):
    del argv
    for number in (signal.SIGTERM, signal.SIGHUP):  # whoever is killed or hung up on tidies up as after Ctrl-C
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, signal.default_int_handler)
    import jax

    jax.config.update("jax_platforms", "cpu")  # a conversion must not take the chips from whoever is using them
    import ml_dtypes  # noqa: F401  NumPy learns the name bfloat16 from it
    import numpy as np

    from venus_jax.checkpoints.convert import convert

    source, target = FLAGS["from"].value, FLAGS["to"].value
    begin = time.monotonic()
    with cli.progress_bar(target) as progress:
        report = convert(source, target, FLAGS.added_tokens, FLAGS.dtype and np.dtype(FLAGS.dtype), progress)
    print(f"{target}: {report.form} form, {report.parameters:,} parameters, "
          f"{report.nbytes / 2**30:.2f} GiB in {time.monotonic() - begin:.1f} s, "
          f"peak memory {cli.peak_memory() / 2**30:.2f} GiB")
    if report.added:
        print(report.added)


if __name__ == "__main__":
    cli.run(main)

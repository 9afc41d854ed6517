"""Serving shapes of the 9B models, for ahead-of-time compilation of one unit's forward pass or of the whole duplex step.

    python launch/compile_tpu.py --config=configs/omni_9b.py --topology=v5e:4x8 --what=forward
    python launch/compile_tpu.py --config=configs/omni_9b.py:audio_9b --topology=v6e:4x4 --what=forward
    python launch/compile_tpu.py --config=configs/omni_9b.py --topology=v5e:2x4 --what=unit --config.batch_size=32
    python launch/compile_tpu.py --config=configs/omni_9b.py:audio_9b --topology=v6e:2x2 --what=unit \
        --config.mesh='(1,1,1)' --config.batch_size=1          # one chip, one session

Expect: parameters in bf16 over `tensor`, sessions over `data`; bytes per chip well inside the chip's memory.
"""

from ml_collections import ConfigDict


def get_config(variant: str = "omni_9b") -> ConfigDict:
    """`variant`: omni_9b or audio_9b."""
    return ConfigDict(dict(
        model=dict(variant=variant, dtype="bfloat16", vocab_multiple=1),
        mesh=(-1, 1, 8),  # data, fsdp, tensor: eight key/value heads allow eight-way tensor parallelism
        batch_size=8,
        append_len=96,  # tokens of one unit, padded
        cache_slots=8192,
        talker_slots=1024,  # entries of the talker's cache: about 22 seconds of one turn
        slices=1 if variant == "omni_9b" else 0,  # picture slices a session brings with a unit
        text=0,  # tokens of typed and of background text, each
        num_steps=1,
        seed=0,
    ))

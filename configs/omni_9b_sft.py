"""Supervised fine-tuning of the 9B models: AdamW, weights sharded over all chips, blocks recomputed.

    python launch/compile_tpu.py --config=configs/omni_9b_sft.py --topology=v5e:4x8 --what=train
    python launch/compile_tpu.py --config=configs/omni_9b_sft.py --topology=v5p:2x2x4 --what=train \
        --config.batch_size=16 --config.seq_len=4096
    python launch/compile_tpu.py --config=configs/omni_9b_sft.py:audio_9b --topology=v6e:4x4 --what=train

Expect: the published recipe (only the backbone learns) at 32 x 2048 tokens within 15.75 GiB a chip of v5e:4x8.
"""

from ml_collections import ConfigDict


def get_config(variant: str = "omni_9b") -> ConfigDict:
    """`variant`: omni_9b or audio_9b."""
    return ConfigDict(dict(
        model=dict(variant=variant, dtype="bfloat16", vocab_multiple=1),
        mesh=(1, -1, 1),  # data, fsdp, tensor; -1: all chips that are left
        batch_size=32,
        seq_len=2048,
        trainable=("llm",),  # top-level parts that learn; the rest is frozen in bf16
        optimizer=dict(learning_rate=1e-5, b2=0.95, weight_decay=0.1),
        ce_chunk=256,
        q_chunk=512,
        attention="auto",
        num_steps=1000,
        seed=0,
    ))

"""Whole checkpoints from one form to the other, a parameter at a time: Hugging Face's directory and ours.

Host memory stays below the largest parameter (its layers stacked) plus 2 GiB in both directions:
`pytest --slow -s tests/checkpoints/test_memory.py` measures it.
"""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any, Callable

import numpy as np
from absl import logging

from venus_jax.checkpoints import added_tokens as added_tokens_lib
from venus_jax.checkpoints import files, hf, safetensors_io, store, table
from venus_jax.config import NUM_ADDED_TOKENS, VenusConfig
from venus_jax.errors import CheckpointError
from venus_jax.typing import Params

AUTO, KEEP, DROP = ADDED_TOKENS = ("auto", "keep", "drop")

Progress = Callable[[int, int], None]  # (bytes since the last call, bytes in all)


@dataclasses.dataclass(frozen=True)
class Report:
    """What a conversion wrote: `form` is "checkpoint" or "Hugging Face"; `added` tells of the added tokens' rows."""

    form: str
    config: VenusConfig
    parameters: int
    nbytes: int
    added: str


def convert(source: str | os.PathLike, target: str | os.PathLike, added_tokens: str = AUTO, dtype: Any = None,
            progress: Progress = lambda nbytes, total: None) -> Report:
    """Converts `source` into `target`; the direction follows from what `source` holds.

    Args:
      source: a Hugging Face directory or a checkpoint of ours.
      target: must not exist, or be empty; appears whole or not at all.
      added_tokens: the rows of the four added tokens. Import: "drop" adds none where they are missing. Export: "auto"
        cuts back those that import added and nobody trained, "keep" keeps them, "drop" cuts them even if trained.
      dtype: of all parameters; None: as stored.
      progress: called as bytes are written.

    Raises:
      CheckpointError, ConfigError: `source` is neither or is broken (file and tensor are named), `target` exists or
        cannot be written, or `dtype` is none of bfloat16, float16 and float32.
      TokenizerError: its tokenizer files cannot be read.
    """
    if added_tokens not in ADDED_TOKENS:
        raise CheckpointError(f"added_tokens is {added_tokens!r}; expected one of {', '.join(ADDED_TOKENS)}")
    if _is_ours(source):
        return convert_checkpoint_to_hf(source, target, added_tokens, dtype, progress)
    return convert_hf_to_checkpoint(source, target, added_tokens != DROP, dtype, progress)


def convert_hf_to_checkpoint(source: str | os.PathLike, target: str | os.PathLike, added_tokens: bool = True,
                             dtype: Any = None, progress: Progress = lambda nbytes, total: None) -> Report:
    """Imports; arguments and errors as in `convert`, `added_tokens` False adds no rows."""
    model = hf.HFCheckpoint(source, add_tokens=added_tokens, dtype=dtype)
    total = _nbytes(model.config, model.dtypes)
    if folders := sorted(p.name for p in model.directory.iterdir() if p.is_dir() and not p.name.startswith(".")):
        # the released assets/ holds the voice decoder's weights, which are another checkpoint
        logging.warning("%s: folders are not copied: %s", model.directory, ", ".join(folders))
    with files.new_directory(target) as scratch:
        store.write_config_and_files(scratch, model.config, model.directory)
        store.write_leaves(scratch / store.PARAMS_DIR, ((rule.path, model.read(rule)) for rule in model.rules),
                           lambda nbytes: progress(nbytes, total))
    added = f"{model.rows_added} rows for the added tokens appended to embedding and head" if model.rows_added else ""
    return Report("checkpoint", model.config, _count(model.config), total, added)


def convert_checkpoint_to_hf(source: str | os.PathLike, target: str | os.PathLike, added_tokens: str = AUTO,
                             dtype: Any = None, progress: Progress = lambda nbytes, total: None) -> Report:
    """Exports; arguments and errors as in `convert`."""
    dtype = None if dtype is None else safetensors_io.known_dtype(dtype)
    checkpoint = store.Checkpoint(source)
    originals = checkpoint.directory / store.HF_DIR
    grown = store.rows_added(checkpoint.directory, checkpoint.config)
    if added_tokens == DROP and not grown:
        raise CheckpointError(f"{checkpoint.directory}: no rows to drop; its added tokens were not added by import")
    cut = added_tokens == DROP or (grown and added_tokens == AUTO and _rows_are_untrained(checkpoint))
    config = checkpoint.config
    if cut:
        config = config.replace(llm=dict(vocab_size=config.llm.vocab_size - NUM_ADDED_TOKENS))
    dtypes = {path: dtype or own for path, own in checkpoint.dtypes.items()}
    total = _nbytes(config, dtypes)
    travelling = files.travelling_files(originals if cut else checkpoint.directory)
    with files.new_directory(target) as scratch:
        hf.write_hf(scratch, config, dtypes, checkpoint.read, lambda nbytes: progress(nbytes, total))
        files.copy_files(travelling, scratch)
        (scratch / hf.CONFIG_FILE).write_text(hf.config_text(
            config, originals / hf.CONFIG_FILE, dtypes[table.VOCAB_PATHS[0]].name), encoding="utf-8")
    added = f"the {NUM_ADDED_TOKENS} rows of the added tokens {'cut back' if cut else 'kept'}" if grown else ""
    return Report("Hugging Face", config, _count(config), total, added)


def load_any(directory: str | os.PathLike, shardings: store.Shardings | None = None,
             dtype: Any = None, vocab_multiple: int | None = None) -> tuple[VenusConfig, Params]:
    """`store.load_checkpoint` or `hf.import_hf`, whichever fits what `directory` holds.

    `vocab_multiple` pads the vocabulary in memory: 151,752 rows divide by 8, not by 16 or more.
    """
    if _is_ours(directory):
        return store.load_checkpoint(directory, shardings, dtype, vocab_multiple)
    config = None
    if vocab_multiple is not None:
        config = hf.HFCheckpoint(directory).config.replace(llm=dict(vocab_multiple=vocab_multiple))
    return hf.import_hf(directory, config, dtype, shardings)


def _is_ours(directory: str | os.PathLike) -> bool:
    """Which of the two forms `directory` has; CheckpointError where it has neither."""
    if store.is_checkpoint(directory):
        return True
    if not os.path.isdir(directory):
        raise CheckpointError(f"{directory}: no such directory; expected a checkpoint")
    names = (safetensors_io.SINGLE_FILE, safetensors_io.INDEX_FILE)
    if not any(os.path.isfile(os.path.join(directory, name)) for name in names):
        raise CheckpointError(f"{directory}: no checkpoint; expected {' or '.join(names)} (Hugging Face), or "
                              f"{store.CONFIG_FILE} and {store.PARAMS_DIR}/ (ours)")
    return False


def _rows_are_untrained(checkpoint: store.Checkpoint) -> bool:
    """Whether the added rows are still, bit for bit, what the rule makes of the others."""
    count = checkpoint.config.llm.vocab_size - NUM_ADDED_TOKENS

    def untrained(rule: table.Rule) -> bool:  # a function, so that one table is gone before the other is read
        rows = rule.turn(checkpoint.read(rule.path))
        fresh = added_tokens_lib.initial_rows(lambda start, stop: rows[start:stop], count)
        return rows[count:].tobytes() == fresh.tobytes()

    return all(untrained(rule) for rule in table.rules(checkpoint.config) if rule.path in table.VOCAB_PATHS)


def _count(config: VenusConfig) -> int:
    return sum(map(math.prod, table.param_shapes(config, padded=False).values()))


def _nbytes(config: VenusConfig, dtypes: dict[str, np.dtype]) -> int:
    return sum(math.prod(s) * dtypes[path].itemsize for path, s in table.param_shapes(config, padded=False).items())

"""Hugging Face directories: opened and checked, read parameter by parameter in our layout, and written back.

Reading goes by ranges: a device's shard of a parameter touches only the rows of the tensors that it overlaps.
"""

from __future__ import annotations

import functools
import json
import math
import os
from pathlib import Path
from typing import Any, Callable, Mapping

import jax
import numpy as np
from absl import logging

from venus_jax import sharding as sharding_lib
from venus_jax.checkpoints import added_tokens as added_tokens_lib
from venus_jax.checkpoints import safetensors_io, store, table
from venus_jax.config import NUM_ADDED_TOKENS, VenusConfig
from venus_jax.errors import CheckpointError
from venus_jax.typing import Params

CONFIG_FILE = "config.json"

_BLOCK_BYTES = 8 * 2**20  # read and turned at once: about what the caches hold
_EMBED = "llm.model.embed_tokens.weight"
_LAYER_KEYS = {"llm": "num_hidden_layers", "vision": "vision_config.num_hidden_layers",
               "audio": "audio_config.encoder_layers", "talker": "tts_config.num_hidden_layers"}

Bounds = tuple[tuple[int, int], ...]  # (start, stop) along every axis


class HFCheckpoint:
    """An opened Hugging Face directory whose tensors have been compared with its config.

    Parts that the config describes and no tensor belongs to (vision with the resampler, audio with its projection, the
    talker) are dropped with a warning: Realtime-Venus-Audio keeps `vision_config`.

    Args:
      directory: `config.json`, `model.safetensors` or shards with their index, perhaps tokenizer files.
      config: taken instead of `config.json`; where it has four rows more than the file, the added tokens get them.
      add_tokens: without `config`, whether a table that lacks the four added tokens gets their rows (`added_tokens.py`
        states which).
      dtype: of all parameters; None: as in the file. Without `config`, activations get the dtype of the embedding.

    Attributes:
      directory, config: as given or read; `config` counts the added rows.
      rows_added: 0 or `NUM_ADDED_TOKENS`.
      rules: of `table`, with the shapes parameters have in memory.
      dtypes: of the parameters, by path.

    Raises:
      CheckpointError: unreadable files; tensors missing, unused or misshapen; layers of different dtypes, without
        `dtype`. File and tensor are named.
      ConfigError: a `config.json` that is not supported.
    """

    def __init__(self, directory: str | os.PathLike, config: VenusConfig | None = None, add_tokens: bool = True,
                 dtype: Any = None):
        self.directory = Path(os.path.abspath(directory))
        dtype = None if dtype is None else safetensors_io.known_dtype(dtype)
        self._reader = safetensors_io.Reader(self.directory)
        self._rows_in_file = next(iter(self._shape(_EMBED)), 0)
        if config is None:
            add_tokens = add_tokens and self._rows_in_file > 0 and added_tokens_lib.are_missing(
                self.directory, self._rows_in_file)
            stored = self._read_config()
        else:
            add_tokens = config.llm.vocab_size == self._rows_in_file + NUM_ADDED_TOKENS
            stored = config.replace(llm=dict(vocab_size=config.llm.vocab_size - NUM_ADDED_TOKENS * add_tokens))
        if stored.talker is not None and (rows := next(iter(self._shape(table.UNUSED_EMBED)), 0)):
            stored = stored.replace(talker=dict(unused_vocab_size=rows))
        self._check(stored)
        self.rows_added = NUM_ADDED_TOKENS * add_tokens
        self.config = stored.replace(llm=dict(vocab_size=stored.llm.vocab_size + self.rows_added))
        self.rules = table.rules(table.pad_vocab(self.config))
        self.dtypes = {rule.path: dtype or self._dtype(rule) for rule in self.rules}
        if config is None:
            bfloat16 = self.dtypes[table.VOCAB_PATHS[0]].name == "bfloat16"
            self.config = self.config.replace(dtype="bfloat16" if bfloat16 else "float32")
        self._new_rows = functools.cache(self._compute_new_rows)

    def read(self, rule: table.Rule, bounds: Bounds | None = None) -> np.ndarray:
        """A box of one of our parameters; what pads the vocabulary is zero.

        Args:
          rule: one of `rules`.
          bounds: (start, stop) along every axis of the parameter; None: all of it.
        """
        bounds = bounds or tuple((0, n) for n in rule.param_shape)
        out = np.empty([stop - start for start, stop in bounds], self.dtypes[rule.path])
        (start, stop), *rest = rule.turn(bounds[1:] if rule.layers else bounds)
        columns = tuple(slice(*bound) for bound in rest)
        block = _block_rows(rule, out.itemsize)
        for n, name in enumerate(rule.names[slice(*bounds[0])] if rule.layers else rule.names):
            target = rule.turn(out[n] if rule.layers else out)
            for a in range(start, stop, block):
                b = min(a + block, stop)
                rows = self._rows(name, rule.first_row + a, rule.first_row + b, out.dtype)
                target[a - start:b - start] = rows.reshape(b - a, *rule.rows[1:])[(slice(None), *columns)]
        return out

    def _rows(self, name: str, start: int, stop: int, dtype: np.dtype) -> np.ndarray:
        """Rows of a tensor; of a vocabulary, the added rows and zeros follow those in the file."""
        count = self._reader.tensors[name].shape[0]
        rows = self._reader.rows(name, min(start, count), min(stop, count)).astype(dtype, copy=False)
        if stop <= count:
            return rows
        added = self._new_rows(name, dtype)[max(start - count, 0):max(stop - count, 0)]
        zeros = np.zeros((stop - start - len(rows) - len(added), rows.shape[1]), dtype)
        return np.concatenate([rows, added, zeros])

    def _compute_new_rows(self, name: str, dtype: np.dtype) -> np.ndarray:
        """From the rows as they are stored on our side, so that export finds the same."""
        def rows(start, stop):
            return self._reader.rows(name, start, stop).astype(dtype, copy=False)

        return added_tokens_lib.initial_rows(rows, self._rows_in_file)[:self.rows_added]

    def _dtype(self, rule: table.Rule) -> np.dtype:
        first, *others = (self._reader.tensors[name] for name in rule.names)
        for name, tensor in zip(rule.names[1:], others):
            if tensor.dtype != first.dtype:
                raise CheckpointError(f"{tensor.file}: tensor {name} has dtype {tensor.dtype}, {rule.names[0]} has "
                                      f"{first.dtype}; layers are stacked and need one dtype, so give one (--dtype)")
        return first.dtype

    def _shape(self, name: str) -> tuple[int, ...]:
        return self._reader.tensors[name].shape if name in self._reader.tensors else ()

    def _read_config(self) -> VenusConfig:
        path = self.directory / CONFIG_FILE
        config = VenusConfig.from_hf(safetensors_io.read_json(path), str(path))
        for part, prefixes in table.HF_PREFIXES.items():
            if getattr(config, part) is not None and not any(n.startswith(prefixes) for n in self._reader.tensors):
                logging.warning("%s has no tensor %s: the model is read without %s, though config.json describes it",
                                self._reader.listing, " or ".join(f"{p}*" for p in prefixes), part)
                config = config.replace(**{part: None}, **({"resampler": None} if part == "vision" else {}))
        return config

    def _check(self, config: VenusConfig) -> None:
        found = self._reader.tensors
        for rule in table.rules(config):
            if rule.layers > len(found):  # before every one of their tensors is listed
                key = _LAYER_KEYS[rule.path.split("/")[0]]
                raise CheckpointError(f"{self.directory / CONFIG_FILE}: {key} stands for {rule.layers} layers; "
                                      f"{self._reader.listing} has {len(found)} tensors in all")
        expected = table.hf_shapes(config)
        if missing := [name for name in expected if name not in found]:
            raise CheckpointError(f"{self._reader.listing}: missing tensor {store.shorten(missing)}")
        if unused := [name for name in found if name not in expected]:
            raise CheckpointError(f"{found[unused[0]].file}: unused tensor {store.shorten(unused)}; the model that "
                                  "config.json describes has no place for it")
        for name, shape in expected.items():
            if found[name].shape != shape:
                raise CheckpointError(f"{found[name].file}: tensor {name} has shape {list(found[name].shape)}, "
                                      f"expected {list(shape)}")


def import_hf(directory: str | os.PathLike, config: VenusConfig | None = None, dtype: Any = None,
              shardings: store.Shardings | None = None, added_tokens: bool = True) -> tuple[VenusConfig, Params]:
    """Reads a Hugging Face directory into memory.

    Args:
      directory, config, dtype: as in `HFCheckpoint`; a config with another `vocab_multiple` pads the vocabulary.
      shardings: as in `store.load_checkpoint`; a process then reads only the rows its devices' shards overlap.
      added_tokens: `add_tokens` of `HFCheckpoint`.

    Returns:
      The config and the tree of `docs/params.md`: NumPy arrays, or JAX arrays where `shardings` are given.

    Raises:
      CheckpointError, ConfigError: see `HFCheckpoint`.
    """
    source = HFCheckpoint(directory, config, added_tokens, dtype)
    if shardings is None:
        return source.config, table.nest({rule.path: source.read(rule) for rule in source.rules})
    shapes = {rule.path: rule.param_shape for rule in source.rules}
    placed = dict(sharding_lib.paths(store.with_shardings(shapes, source.dtypes, shardings)))

    def place(rule: table.Rule) -> jax.Array:
        read = functools.cache(lambda bounds: source.read(rule, bounds))  # once for devices that hold the same shard
        return jax.make_array_from_callback(
            rule.param_shape, placed[rule.path].sharding,
            lambda index: read(tuple(s.indices(n)[:2] for s, n in zip(index, rule.param_shape))))

    return source.config, table.nest({rule.path: place(rule) for rule in source.rules})


def write_hf(directory: Path, config: VenusConfig, dtypes: Mapping[str, Any], read: Callable[[str], np.ndarray],
             progress: Callable[[int], None] = lambda nbytes: None) -> None:
    """Writes the safetensors files of a model, one parameter in memory at a time.

    Args:
      directory: exists.
      config: of the model as it is written; a parameter may have more vocabulary rows, which are left out.
      dtypes: of every parameter, by path, as it is written.
      read: gives a parameter by path.
      progress: called with the bytes written since the last call.
    """
    rules = table.rules(config)
    tensors = {name: (rule.shape, dtypes[rule.path]) for rule in rules for name in rule.names}
    with safetensors_io.Writer(directory, tensors) as writer:
        for rule in rules:
            _write_parameter(writer, rule, read(rule.path))
            progress(math.prod(rule.param_shape) * np.dtype(dtypes[rule.path]).itemsize)


def _block_rows(rule: table.Rule, itemsize: int) -> int:
    """Rows of a tensor that are handled at once."""
    return max(1, _BLOCK_BYTES // (itemsize * math.prod(rule.rows[1:])))


def config_text(config: VenusConfig, original: Path, dtype: str) -> str:
    """`config.json` as Hugging Face's loader wants it: the original's text where there is one, with what has changed.

    Keys that we do not read stay as they were; if nothing changed, so does every byte. `dtype` is that of the weights
    written, which `torch_dtype` (newer: `dtype`) must say.
    """
    if not original.is_file():
        return json.dumps(config.to_hf() | {"torch_dtype": dtype}, indent=2) + "\n"
    raw = safetensors_io.read_json(original)
    then = VenusConfig.from_hf(raw, str(original))
    absent = {part: None for part in ("vision", "resampler", "audio", "talker") if getattr(config, part) is None}
    then = then.replace(dtype=config.dtype, **absent)  # which follows from the weights
    if then.talker is not None:
        then = then.replace(talker=dict(unused_vocab_size=config.talker.unused_vocab_size))
    changed = _changes(then.to_hf(), config.to_hf())
    changed |= {key: dtype for key in ("torch_dtype", "dtype") if raw.get(key, dtype) != dtype}
    if changed:
        return json.dumps(_merge(raw, changed), indent=2, ensure_ascii=False) + "\n"
    return original.read_text(encoding="utf-8")


def _write_parameter(writer: safetensors_io.Writer, rule: table.Rule, x: np.ndarray) -> None:
    block = _block_rows(rule, x.itemsize)
    for n, name in enumerate(rule.names):
        rows = rule.turn(x[n] if rule.layers else x)
        for a in range(0, rule.rows[0], block):
            writer.write(name, rule.first_row + a, rows[a:min(a + block, rule.rows[0])])


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """What to merge into `old` to get the values of `new`."""
    out = {}
    for key, value in new.items():
        if isinstance(value, Mapping) and isinstance(old.get(key), Mapping):
            if inner := _changes(old[key], value):
                out[key] = inner
        elif key not in old or old[key] != value:
            out[key] = value
    return out


def _merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes` put in, mapping by mapping."""
    out = dict(base)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = _merge(out[key], value) if both else value
    return out

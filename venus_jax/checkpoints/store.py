"""Our checkpoint directory: written by Orbax, whole or leaf by leaf; read into host memory or straight onto a mesh.

    config.json     VenusConfig
    params/         the tree of `docs/params.md`, an Orbax checkpoint that any Orbax reads; `_FILES` lists its files
    tokenizer.json, ... and other files that are not weights
    hf/             where the weights were imported: the source's own version of config.json and those files

Arrays lie in plain Zarr directories, one a parameter, rather than in Orbax's key-value files: those buffer a whole leaf
while it is written, and an error in them names neither parameter nor file.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Mapping

import jax
import numpy as np
from absl import logging

from venus_jax import sharding as sharding_lib
from venus_jax.checkpoints import added_tokens, files, table
from venus_jax.checkpoints.safetensors_io import read_json
from venus_jax.config import NUM_ADDED_TOKENS, VenusConfig
from venus_jax.errors import CheckpointError, ConfigError
from venus_jax.typing import Params

CONFIG_FILE = "config.json"
PARAMS_DIR = "params"
FILES_FILE = "_FILES"
HF_DIR = "hf"
INFO_FILE, STATE_DIR = "session.json", "state"

_CHUNK_BYTES = 32 * 2**20  # of one file; who reads a shard reads the files it overlaps
_BATCH_BYTES = 256 * 2**20  # small leaves are written together up to this
_READ_BYTES = 2 * 2**30  # in flight while restoring, or one shard where that is more

Shardings = Any  # a tree of jax.sharding.Sharding like the parameters, or a function that makes it of their shapes


class Checkpoint:
    """An opened checkpoint directory whose stored tree has been compared with its config.

    Attributes:
      directory: where it lies.
      config: its `VenusConfig`.
      dtypes: stored dtype of every parameter by path.

    Raises:
      CheckpointError: no such checkpoint, a file missing or of another size than when it was written, or a tree that is
        not the config's; the message names the file, or lists missing, unexpected and misshapen paths.
    """

    def __init__(self, directory: str | os.PathLike):
        self.directory = Path(os.path.abspath(directory))
        if not is_checkpoint(self.directory):
            raise CheckpointError(f"{self.directory}: no checkpoint of ours; expected {CONFIG_FILE} and {PARAMS_DIR}/")
        self.config = read_config(self.directory / CONFIG_FILE)
        params = self.directory / PARAMS_DIR
        _check_files(params)
        try:
            with _orbax() as ocp:
                stored = dict(sharding_lib.paths(ocp.metadata(params).metadata))
        except Exception as e:  # Orbax and TensorStore raise whatever their layers below raised
            raise CheckpointError(f"{params}: its metadata cannot be read ({_first_line(e)})") from e
        shapes = {path: tuple(leaf.shape) for path, leaf in stored.items()}
        check_tree(shapes, table.param_shapes(self.config, padded=False), str(params))
        self.dtypes = {path: np.dtype(leaf.dtype) for path, leaf in stored.items()}

    def read(self, path: str) -> np.ndarray:
        """One stored parameter, whole, in its stored dtype.

        Orbax would hold it twice: TensorStore fetches a whole array faster than it copies it. So one chunk at a time.

        Raises:
          CheckpointError: a file of it is missing or damaged.
        """
        import tensorstore as ts

        where = self.directory / PARAMS_DIR / "state" / path.replace("/", ".")
        try:
            array = ts.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{where}/"},
                             "fill_missing_data_reads": False}, open=True, read=True).result()
            out = np.empty(array.shape, self.dtypes[path])
            chunk = array.chunk_layout.read_chunk.shape
            for corner in itertools.product(*(range(0, n, c) for n, c in zip(array.shape, chunk))):
                box = tuple(slice(a, min(a + c, n)) for a, c, n in zip(corner, chunk, array.shape))
                out[box] = array[box].read().result()
        except Exception as e:  # as above
            raise CheckpointError(f"{where}: parameter {path!r} cannot be read ({_first_line(e)})") from e
        return out


def is_checkpoint(directory: str | os.PathLike) -> bool:
    """Whether `directory` looks like a checkpoint of ours, complete or not."""
    return os.path.isfile(Path(directory) / CONFIG_FILE) and os.path.isdir(Path(directory) / PARAMS_DIR)


def read_config(path: Path) -> VenusConfig:
    """The `VenusConfig` in a file; CheckpointError where it cannot be read."""
    try:
        return VenusConfig.from_json(path.read_text(encoding="utf-8"), str(path))
    except ConfigError as e:
        raise CheckpointError(str(e) if str(e).startswith(str(path)) else f"{path}: {e}") from e
    except (OSError, ValueError, RecursionError) as e:
        raise CheckpointError(f"{path}: cannot be read ({e})") from e


def load_checkpoint(directory: str | os.PathLike, shardings: Shardings | None = None, dtype: Any = None,
                    vocab_multiple: int | None = None) -> tuple[VenusConfig, Params]:
    """Loads a checkpoint.

    Args:
      directory: written by `save_checkpoint` or `convert`.
      shardings: a tree of `jax.sharding.Sharding` like the parameters, or a function from the tree of
        `jax.ShapeDtypeStruct` to it. Every device then gets its own shard and nothing else. None: NumPy arrays.
      dtype: of all parameters; None: as stored.
      vocab_multiple: replaces the config's; rows that pad the vocabulary are zero.

    Returns:
      The config and the tree of `docs/params.md`.

    Raises:
      CheckpointError: see `Checkpoint`; or a file of a parameter is missing or damaged.
    """
    checkpoint = Checkpoint(directory)
    config = checkpoint.config
    if vocab_multiple is not None:
        config = config.replace(llm=dict(vocab_multiple=vocab_multiple))
    shapes = table.param_shapes(config)
    if shardings is None:
        return config, table.nest({path: _pad(checkpoint.read(path), shape, dtype) for path, shape in shapes.items()})

    abstract = with_shardings(shapes, {p: checkpoint.dtypes[p] if dtype is None else dtype for p in shapes}, shardings)
    largest = max(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(abstract))

    def options(context):
        context.array.loading.enable_padding_and_truncation = config.llm.vocab_rows != config.llm.vocab_size
        context.memory.read_concurrent_bytes = max(largest, _READ_BYTES)

    params = checkpoint.directory / PARAMS_DIR
    try:
        with _orbax(options) as ocp:
            return config, ocp.load(params, abstract)
    except Exception as e:  # as above; somewhere in a long text it names the file
        where = re.search(rf"{re.escape(str(params))}[^\s'\"]*", str(e))
        raise CheckpointError(f"{where[0] if where else params}: cannot be restored ({_first_line(e)})") from e


def save_checkpoint(directory: str | os.PathLike, params: Params, config: VenusConfig,
                    extra_files: str | os.PathLike | None = None) -> None:
    """Writes a checkpoint; it appears whole or not at all. With several processes all of them call it.

    Args:
      directory: must not exist, or be empty.
      params: the tree of `docs/params.md`, of NumPy or (sharded) JAX arrays. Rows padding the vocabulary are cut off.
      config: whose shapes `params` has.
      extra_files: the checkpoint, of either form, that `params` came from, or a directory with a tokenizer; its files
        that are not weights come along.

    Raises:
      CheckpointError: `params` is not `config`'s tree (the message lists the paths), or the directory is not empty or
        cannot be written.
    """
    from jax.experimental import multihost_utils

    flat = dict(sharding_lib.paths(params))
    check_tree({path: tuple(x.shape) for path, x in flat.items()}, table.param_shapes(config), "params")
    stored = table.param_shapes(config, padded=False)
    tree = table.nest({path: _cut(x, stored[path]) for path, x in flat.items()})
    several = jax.process_count() > 1
    token = None
    if several:  # every process has to write to the same place
        token = f"{int(multihost_utils.broadcast_one_to_all(np.uint32(os.getpid()))):x}"
    with files.new_directory(directory, token, rename=jax.process_index() == 0) as scratch:
        if jax.process_index() == 0:
            write_config_and_files(scratch, config, extra_files)
        _undisturbed(lambda ocp: ocp.save(scratch / PARAMS_DIR, tree))
        if jax.process_index() == 0:
            _list_files(scratch / PARAMS_DIR)
    if several:
        multihost_utils.sync_global_devices("checkpoint renamed")


def save_tree(directory: str | os.PathLike, tree: Any, info: Mapping[str, Any]) -> None:
    """Writes any tree of arrays (a session's state) and what JSON can hold beside it; it appears whole or not at all.

    Raises:
      CheckpointError: the directory is not empty or cannot be written.
    """
    with files.new_directory(directory) as scratch:
        (scratch / INFO_FILE).write_text(json.dumps(info, indent=1) + "\n", encoding="utf-8")
        leaves = {name: x for name, x in _named_leaves(tree) if x.size}
        _undisturbed(lambda ocp: ocp.save(scratch / STATE_DIR, leaves))
        _list_files(scratch / STATE_DIR)


def load_info(directory: str | os.PathLike) -> Mapping[str, Any]:
    """The `info` of `save_tree`. Raises CheckpointError: there is none."""
    path = Path(os.path.abspath(directory)) / INFO_FILE
    if not path.is_file():
        raise CheckpointError(f"{directory}: no saved session; expected {INFO_FILE} and {STATE_DIR}/")
    return read_json(path)


def load_tree(directory: str | os.PathLike, like: Any) -> Any:
    """The tree of `save_tree`, with the structure, shapes, dtypes and shardings of `like` (arrays or their shapes).

    Raises:
      CheckpointError: no such tree, damaged, or of other shapes; the first difference is named.
    """
    state = Path(os.path.abspath(directory)) / STATE_DIR
    load_info(directory)
    _check_files(state)
    wanted = {name: x for name, x in _named_leaves(like) if x.size}
    try:
        with _orbax() as ocp:
            stored = ocp.metadata(state).metadata
            check_tree({name: tuple(x.shape) for name, x in stored.items()},
                       {name: tuple(x.shape) for name, x in wanted.items()}, str(state))
            found = ocp.load(state, {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None))
                                     for name, x in wanted.items()})
    except CheckpointError:
        raise
    except Exception as e:  # Orbax and TensorStore raise whatever their layers below raised
        raise CheckpointError(f"{state}: cannot be restored ({_first_line(e)})") from e
    empty = lambda x: np.zeros(x.shape, x.dtype)
    leaves = [found[name] if x.size else empty(x) for name, x in _named_leaves(like)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _named_leaves(tree: Any) -> list[tuple[str, Any]]:
    return [(jax.tree_util.keystr(path, simple=True, separator="."), x) for path, x in jax.tree.leaves_with_path(tree)]


def write_leaves(directory: Path, leaves: Iterable[tuple[str, np.ndarray]],
                 progress: Callable[[int], None] = lambda nbytes: None) -> None:
    """Writes an Orbax checkpoint to `directory` from (path, array) pairs, of which it holds little more than one.

    `progress` is called with the bytes written since the last call.
    """
    batch: dict[str, np.ndarray] = {}

    def flush():
        if batch:
            _undisturbed(lambda ocp: ocp.partial.save(directory, table.nest(batch)))
            progress(sum(x.nbytes for x in batch.values()))
            batch.clear()

    for path, x in leaves:
        batch[path] = x
        del x  # else this name would hold it while `leaves` makes the next one
        if sum(y.nbytes for y in batch.values()) >= _BATCH_BYTES:
            flush()
    flush()
    _undisturbed(lambda ocp: ocp.partial.finalize(directory))
    _list_files(directory)


def write_config_and_files(directory: Path, config: VenusConfig, extra_files: str | os.PathLike | None) -> None:
    """Puts everything but the parameters into a checkpoint; `extra_files` as in `save_checkpoint`."""
    (directory / CONFIG_FILE).write_text(config.to_json() + "\n", encoding="utf-8")
    if extra_files is None:
        return
    source = Path(extra_files)
    travelling = files.travelling_files(source)
    files.copy_files(travelling, directory)
    if is_checkpoint(source):
        originals = sorted((source / HF_DIR).glob("*"))
    else:
        originals = [source / CONFIG_FILE, *travelling] if (source / CONFIG_FILE).is_file() else []
    if originals:
        (directory / HF_DIR).mkdir()
        files.copy_files(originals, directory / HF_DIR)
    if rows_added(directory, config):
        added_tokens.list_in_tokenizer(directory, config.llm.vocab_size - NUM_ADDED_TOKENS)


def rows_added(directory: Path, config: VenusConfig) -> bool:
    """Whether the checkpoint in `directory` has rows of the added tokens that its source in `hf/` did not have."""
    original = directory / HF_DIR / CONFIG_FILE
    rows = read_json(original).get("vocab_size") if original.is_file() else None
    return rows == config.llm.vocab_size - NUM_ADDED_TOKENS


def with_shardings(shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, Any], shardings: Shardings) -> Params:
    """The tree of `jax.ShapeDtypeStruct` with a sharding each; `shardings` as in `load_checkpoint`."""
    abstract = table.nest({path: jax.ShapeDtypeStruct(shape, dtypes[path]) for path, shape in shapes.items()})
    if callable(shardings):
        shardings = shardings(abstract)
    try:
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings)
    except ValueError as e:
        raise CheckpointError(f"the shardings do not form the tree of the parameters ({_first_line(e)})") from e


def check_tree(found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Compares shapes by path.

    Raises:
      CheckpointError: they differ; the message lists what is missing, unexpected and misshapen.
    """
    wrong = {"missing": [p for p in expected if p not in found],
             "unexpected": [p for p in found if p not in expected],
             "misshapen": [f"{p} {list(found[p])} (expected {list(shape)})"
                           for p, shape in expected.items() if found.get(p, shape) != shape]}
    if any(wrong.values()):
        text = "; ".join(f"{what}: {shorten(paths)}" for what, paths in wrong.items() if paths)
        raise CheckpointError(f"{source}: the parameters are not those of the config; {text}")


def shorten(items: list[str], limit: int = 4) -> str:
    """The first few of a list, and how many there are besides; quoted where they would break the line."""
    shown = ", ".join(item if item.isprintable() else repr(item) for item in items[:limit])
    return shown + (f" and {len(items) - limit} more" if len(items) > limit else "")


def _sizes(directory: Path) -> dict[str, int]:
    found = (path for path in directory.rglob("*") if path.is_file() and path.name != FILES_FILE)
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in found}


def _list_files(directory: Path) -> None:
    """Ends the writing of an Orbax checkpoint."""
    mark = directory / "commit_success.txt"
    if mark.is_file():
        mark.write_text("complete\n", encoding="utf-8")  # instead of where it lay while it was being written
    text = json.dumps(_sizes(directory), indent=0, sort_keys=True)
    (directory / FILES_FILE).write_text(text + "\n", encoding="utf-8")


def _check_files(directory: Path) -> None:
    """What Orbax finds out late, in many words, or not at all."""
    try:
        found = _sizes(directory)
    except OSError as e:
        raise CheckpointError(f"{directory}: cannot be read ({e})") from e
    for name, size in read_json(directory / FILES_FILE).items():
        if name not in found:
            raise CheckpointError(f"{directory / name}: missing")
        if found[name] != size:
            raise CheckpointError(f"{directory / name}: {found[name]} bytes where {size} were written; damaged")


@contextlib.contextmanager
def _orbax(options: Callable[[Any], None] = lambda context: None) -> Iterator[Any]:
    """Orbax's module, under a context that `options` has set up, and quiet: it tells a long story of each save, and
    takes arrays outside its key-value files for a sign of damage."""
    import orbax.checkpoint.experimental.v1 as ocp

    context, verbosity = ocp.Context(), logging.get_verbosity()
    options(context)
    logging.set_verbosity(logging.FATAL)  # errors come as exceptions, too
    try:
        with context:
            yield ocp
    finally:
        logging.set_verbosity(verbosity)


def _undisturbed(save: Callable[[Any], None]) -> None:
    """`save(ocp)` where Ctrl-C cannot reach it. Interrupted itself, Orbax would go on writing into a directory that is
    being removed; so an interrupt waits for it, for as long as one parameter takes.

    Raises:
      OSError: whatever Orbax raised. Writes then still in flight end without a word.
    """
    def call():
        with _orbax(_saving_options) as ocp:
            save(ocp)

    hook = sys.unraisablehook
    sys.unraisablehook = lambda args: None if str(args.exc_value) == "Event loop is closed" else hook(args)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        e = pool.submit(call).exception()
    if e is not None:  # then the hook stays, for the writes in flight
        code = re.search(r"os_error_code='(\d+)'", str(e))
        raise (OSError(int(code[1]), os.strerror(int(code[1]))) if code else OSError(_first_line(e))) from e
    sys.unraisablehook = hook


def _saving_options(context: Any) -> None:
    context.array.saving.use_ocdbt = False
    context.array.saving.use_compression = False  # weights hardly shrink, and two cores take longer than the disk
    context.array.saving.use_replica_parallel = False  # it compiles a slice for every shape: 20 s before the first byte
    context.array.saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    context.memory.deepcopy_host_arrays = False  # nobody changes them before the save is through


def _cut(x: Any, shape: tuple[int, ...]) -> Any:
    """`x[:shape[0], :shape[1], ...]`; a sharded array stays sharded on the axes that are not cut."""
    if tuple(x.shape) == shape:
        return x
    box = tuple(slice(0, n) for n in shape)
    if isinstance(x, jax.Array) and isinstance(x.sharding, jax.sharding.NamedSharding):
        spec = (*x.sharding.spec, *[None] * (x.ndim - len(x.sharding.spec)))
        kept = [axis if x.shape[i] == shape[i] else None for i, axis in enumerate(spec)]
        target = jax.sharding.NamedSharding(x.sharding.mesh, jax.sharding.PartitionSpec(*kept))
        return jax.jit(lambda y: y[box], out_shardings=target)(x)
    return x[box]


def _pad(x: np.ndarray, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """`x` cast to `dtype`, with zeros behind it up to `shape`."""
    x = x if dtype is None else x.astype(dtype, copy=False)
    if x.shape == shape:
        return x
    return np.pad(x, [(0, n - m) for n, m in zip(shape, x.shape)])


def _first_line(e: BaseException) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0][:300]

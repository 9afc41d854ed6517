"""Reading and writing safetensors files, whole or in shards, a few rows at a time.

The `safetensors` library maps files into memory, and the pages it touched count as ours; converting 18 GB in a few GB
needs plain reads. The format is eight bytes of length, a JSON header, and the tensors' bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any, Iterable, Mapping

import ml_dtypes
import numpy as np

from venus_jax.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9  # as Hugging Face cuts its own

# In the order in which the library puts tensors into a file.
_DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16)}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_MAX_HEADER_BYTES = 100 * 10**6  # the library's own limit
_MAX_NUMBER = 2**63 - 1  # of a size or offset
_MAX_AXES = 64  # NumPy's limit


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where a tensor lies: `offset` is its first byte in `file`."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize


class Reader:
    """The tensors of a directory with `model.safetensors`, or with shards and their index.

    All headers are checked when it is made, so that a broken file is known before anything is written.

    Attributes:
      tensors: name -> `Tensor`.
      listing: the file that says what there is: the index, or the single file.

    Raises:
      CheckpointError: no such files, or one that is truncated, inconsistent or of an unsupported dtype; the message
        names file and tensor.
    """

    def __init__(self, directory: str | os.PathLike):
        directory = Path(directory)
        self.tensors: dict[str, Tensor] = {}
        if os.path.isfile(directory / SINGLE_FILE):  # the file before the index: the order of Hugging Face's own loader
            self.listing = directory / SINGLE_FILE
            self.tensors = _read_header(self.listing)
        elif os.path.isfile(directory / INDEX_FILE):
            self.listing = directory / INDEX_FILE
            self._read_shards(directory)
        else:
            raise CheckpointError(f"{directory}: no weights; expected {SINGLE_FILE} or {INDEX_FILE}")

    def _read_shards(self, directory: Path) -> None:
        raw = read_json(self.listing)
        weight_map = raw.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{self.listing}: no weight_map; expected tensor names with their files")
        for shard in weight_map.values():
            if not isinstance(shard, str) or Path(shard).name != shard:
                raise CheckpointError(f"{self.listing}: {shard!r:.80} is not the name of a file beside it")
        for shard in dict.fromkeys(weight_map.values()):
            if not os.path.isfile(directory / shard):
                name = next(n for n, s in weight_map.items() if s == shard)
                raise CheckpointError(f"{directory / shard}: missing; {INDEX_FILE} puts {name!r} there")
            for name, tensor in _read_header(directory / shard).items():
                if name in self.tensors:
                    raise CheckpointError(f"{tensor.file}: tensor {name!r} is also in {self.tensors[name].file.name}")
                if weight_map.get(name) != shard:
                    raise CheckpointError(f"{tensor.file}: holds tensor {name!r}, for which {INDEX_FILE} names "
                                          f"{weight_map.get(name)}")
                self.tensors[name] = tensor
        for name, shard in weight_map.items():
            if name not in self.tensors:
                raise CheckpointError(f"{directory / shard}: no tensor {name!r}, though {INDEX_FILE} puts it there")

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows `start:stop` of a tensor, `[stop - start, *shape[1:]]` in its own dtype.

        Raises:
          CheckpointError: the file cannot be read or has become shorter.
        """
        tensor = self.tensors[name]
        return _read_rows(name, tensor, tensor.offset + start * tensor.row_bytes, (stop - start, *tensor.shape[1:]))


class Writer:
    """A set of safetensors files whose headers are written first and whose rows may then come in any order.

    Args:
      directory: exists; gets `model.safetensors`, or shards and an index when the bytes exceed `max_shard_bytes`.
      tensors: name -> (shape, dtype) of everything that will be written, in the order the shards are filled.
      max_shard_bytes: of tensors in one file; a larger tensor has a file of its own.

    Raises:
      CheckpointError: a dtype that is not bfloat16, float16 or float32; `write` was not given every byte.
    """

    def __init__(self, directory: str | os.PathLike, tensors: Mapping[str, tuple[tuple[int, ...], Any]],
                 max_shard_bytes: int = MAX_SHARD_BYTES):
        self._files: dict[Path, Any] = {}
        self._tensors: dict[str, Tensor] = {}
        self._missing = 0
        for path, names in _plan(Path(directory), tensors, max_shard_bytes).items():
            header, placed = _header(path, {name: tensors[name] for name in names})
            self._tensors.update(placed)
            size = sum(t.nbytes for t in placed.values())
            self._missing += size
            self._files[path] = open(path, "wb")
            self._files[path].write(header)
            self._files[path].truncate(len(header) + size)
        if len(self._files) > 1:
            index = {"metadata": {"total_size": self._missing},
                     "weight_map": {name: self._tensors[name].file.name for name in sorted(self._tensors)}}
            (Path(directory) / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind, *_) -> None:
        with contextlib.ExitStack() as stack:
            for file in self._files.values():
                stack.callback(file.close)
        if kind is None and self._missing:
            raise CheckpointError(f"{', '.join(map(str, self._files))}: {self._missing} bytes were never written")

    def write(self, name: str, start: int, rows: np.ndarray) -> None:
        """Writes rows `start : start + len(rows)` of a tensor, cast to its dtype."""
        tensor = self._tensors[name]
        rows = np.ascontiguousarray(rows, dtype=tensor.dtype)
        file = self._files[tensor.file]
        file.seek(tensor.offset + start * tensor.row_bytes)
        file.write(memoryview(rows.reshape(-1).view(np.uint8)))
        self._missing -= rows.nbytes


def read_tensors(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """All tensors of one file, for networks that are small; CheckpointError as in `Reader`."""
    return {name: _read_rows(name, x, x.offset, x.shape) for name, x in _read_header(Path(path)).items()}


def write_tensors(path: str | os.PathLike, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes one file; CheckpointError: a dtype that is not bfloat16, float16 or float32."""
    for name, x in tensors.items():
        if x.dtype not in _CODES:
            raise CheckpointError(f"{path}: tensor {name!r} has dtype {x.dtype}; expected one of "
                                  f"{', '.join(map(str, _CODES))}")
    header, placed = _header(Path(path), {name: (x.shape, x.dtype) for name, x in tensors.items()})
    with open(path, "wb") as file:
        file.write(header)
        for name in sorted(placed, key=lambda name: placed[name].offset):
            file.write(np.ascontiguousarray(tensors[name]).tobytes())


def known_dtype(dtype: Any) -> np.dtype:
    """The NumPy dtype of one that files can hold: bfloat16, float16 or float32; CheckpointError for others."""
    with contextlib.suppress(TypeError):
        if (found := np.dtype(dtype)) in _CODES:
            return found
    raise CheckpointError(f"dtype is {dtype!r}; expected one of {', '.join(map(str, _CODES))}")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; CheckpointError where it cannot be read or is none."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise CheckpointError(f"{path}: not readable as JSON ({e})") from e
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(raw).__name__}")
    return raw


def _read_rows(name: str, tensor: Tensor, offset: int, shape: tuple[int, ...]) -> np.ndarray:
    out = np.empty(shape, tensor.dtype)
    view = memoryview(out.reshape(-1).view(np.uint8))
    try:
        with open(tensor.file, "rb", buffering=0) as f:
            f.seek(offset)
            while view and (count := f.readinto(view)):  # one read stops at 2 GiB
                view = view[count:]
    except OSError as e:
        raise CheckpointError(f"{tensor.file}: cannot read tensor {name!r} ({e})") from e
    if view:
        raise CheckpointError(f"{tensor.file}: truncated within tensor {name!r}")
    return out


def _read_header(path: Path) -> dict[str, Tensor]:
    """The tensors of one file, after checking that the file is exactly what its header says."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as f:
            length = int.from_bytes(f.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise CheckpointError(f"{path}: {size} bytes, header of {length}; truncated or not a safetensors file")
            header = json.loads(f.read(length).decode("utf-8"), object_pairs_hook=lambda pairs: _object(path, pairs))
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read ({e})") from e
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{path}: the header is not JSON ({e})") from e
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is no JSON object")
    header.pop("__metadata__", None)
    tensors = {name: _tensor(path, name, entry, 8 + length, size) for name, entry in header.items()}
    end = 8 + length
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != end:
            raise CheckpointError(f"{path}: tensor {name!r} begins at byte {tensor.offset}, expected {end}")
        end += tensor.nbytes
    if end != size:
        raise CheckpointError(f"{path}: {size} bytes, {end} are accounted for by its tensors")
    return tensors


def _object(path: Path, pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise CheckpointError(f"{path}: {key!r} is twice in the header")
        out[key] = value
    return out


def _tensor(path: Path, name: str, entry: Any, data: int, size: int) -> Tensor:
    """Checks one entry of a header; `data` is where tensors begin, `size` the file's length."""
    try:
        code, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        numbers_ok = all(type(n) is int and 0 <= n <= _MAX_NUMBER for n in (*shape, begin, end))
        known = code in _DTYPES
    except (KeyError, TypeError, ValueError) as e:
        raise CheckpointError(f"{path}: tensor {name!r} has a malformed entry ({e!r})") from e
    if not numbers_ok or len(shape) > _MAX_AXES:
        raise CheckpointError(f"{path}: tensor {name!r} has a negative, fractional or oversized size or offset, or more "
                              f"than {_MAX_AXES} axes")
    if not known:
        raise CheckpointError(f"{path}: tensor {name!r} has dtype {code!r:.60}; expected one of "
                              f"{', '.join(_DTYPES)}")
    tensor = Tensor(path, _DTYPES[code], shape, data + begin)
    if end - begin != tensor.nbytes:
        raise CheckpointError(f"{path}: tensor {name!r} has {end - begin} bytes, expected {tensor.nbytes} for shape "
                              f"{list(shape)} and dtype {code}")
    if data + end > size:
        raise CheckpointError(f"{path}: truncated: tensor {name!r} ends at byte {data + end}, the file at {size}")
    return tensor


def _plan(directory: Path, tensors: Mapping[str, tuple[tuple[int, ...], Any]], limit: int) -> dict[Path, list[str]]:
    """Which tensors go into which file."""
    shards: list[list[str]] = []
    room = 0
    for name, (shape, dtype) in tensors.items():
        if np.dtype(dtype) not in _CODES:
            raise CheckpointError(f"{directory}: tensor {name!r} has dtype {np.dtype(dtype)}; expected one of "
                                  f"{', '.join(map(str, _CODES))}")
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if nbytes > room or not shards:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= nbytes
    if len(shards) == 1:
        return {directory / SINGLE_FILE: shards[0]}
    count = len(shards)
    return {directory / f"model-{n:05}-of-{count:05}.safetensors": names for n, names in enumerate(shards, 1)}


def _header(path: Path, tensors: Mapping[str, tuple[tuple[int, ...], Any]]) -> tuple[bytes, dict[str, Tensor]]:
    """The bytes before the data, and where each tensor will lie: by dtype, then by name, as the library does it."""
    order = sorted(tensors, key=lambda name: (list(_CODES).index(np.dtype(tensors[name][1])), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset, offsets = 0, {}
    for name in order:
        shape, dtype = tensors[name]
        end = offset + math.prod(shape) * np.dtype(dtype).itemsize
        header[name] = {"dtype": _CODES[np.dtype(dtype)], "shape": list(shape), "data_offsets": [offset, end]}
        offsets[name], offset = offset, end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight bytes
    start = 8 + len(text)
    placed = {n: Tensor(path, np.dtype(tensors[n][1]), tuple(tensors[n][0]), start + offsets[n]) for n in order}
    return len(text).to_bytes(8, "little") + text, placed

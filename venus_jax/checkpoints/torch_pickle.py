"""PyTorch checkpoints (`torch.save`, since 1.6) into NumPy arrays, without PyTorch and without running anything.

The format is an uncompressed zip: `NAME/data.pkl` says what there is, `NAME/data/KEY` are the bytes of the storages
tensors look into. A pickle may name any function to be called; here only those that rebuild tensors and dicts have a
meaning, each replaced by code of ours, and every other name is refused. Storages are mapped, not read: a tensor costs
memory when it is used, and tensors that share a storage share it here.
"""

from __future__ import annotations

import os
import pickle
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from venus_jax.errors import CheckpointError

_STORAGES = {"FloatStorage": "float32", "DoubleStorage": "float64", "HalfStorage": "float16",
             "BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16",
             "CharStorage": "int8", "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
             "ComplexDoubleStorage": "complex128", "UntypedStorage": "uint8"}
_DTYPES = {name: np.dtype(getattr(ml_dtypes, name, None) or name) for name in (
    *_STORAGES.values(), "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2")}
_LEGACY = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"  # the number older files begin with, as pickled
_LOCAL_HEADER = 30  # bytes before the name of a zip member


def read(path: str | os.PathLike) -> Any:
    """Everything a checkpoint holds: dicts, lists, tuples, numbers and strings, tensors as read-only arrays.

    An `OrderedDict` becomes a dict, a parameter its tensor. The file must not be changed while arrays are in use.

    Raises:
      CheckpointError: no such file; another format (older than PyTorch 1.6, tar, compressed, big-endian) or truncated;
        a pickle that names anything but tensors and dicts, in which case nothing has been called; a tensor that reaches
        beyond its storage. The message names the file and what was refused.
    """
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as archive:
            return _Unpickler(path, archive).load()
    except CheckpointError:
        raise
    except zipfile.BadZipFile as e:
        raise CheckpointError(f"{path}: {_not_a_zip(path)}") from e
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read ({e.strerror or e})") from e
    except Exception as e:  # a damaged pickle raises nearly anything
        raise CheckpointError(f"{path}: its pickle is damaged ({type(e).__name__}: {e})") from e


def read_tensors(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """The tensors of a state dict by name.

    Raises:
      CheckpointError: as `read`; something other than a dict of tensors.
    """
    found = read(path)
    if not isinstance(found, dict) or not found:
        raise CheckpointError(f"{path}: holds {type(found).__name__}; expected a dict of tensors")
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, np.ndarray):
            raise CheckpointError(f"{path}: {name!r:.80} is {type(value).__name__}; expected a dict of tensors")
    return dict(found)


class _Dict(dict):
    """A dict that forgets the attributes (such as `_metadata`) PyTorch hangs on a state dict."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        pass


class _Unpickler(pickle.Unpickler):
    """Gives every admitted name a meaning of ours; types of storages and elements are strings here."""

    def __init__(self, path: Path, archive: zipfile.ZipFile):
        self._path, self._archive = path, archive
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            raise CheckpointError(f"{path}: a zip without a PyTorch checkpoint in it; expected one NAME/data.pkl")
        self._prefix = pickles[0].removesuffix("data.pkl")
        order = self._prefix + "byteorder"
        if order in archive.namelist() and archive.read(order) != b"little":
            raise CheckpointError(f"{path}: big-endian; expected a little-endian checkpoint")
        self._bytes = np.memmap(path, np.uint8, "r")
        self._storages: dict[str, np.ndarray] = {}
        super().__init__(_Stream(self._member("data.pkl")))

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch.storage" and name in ("UntypedStorage", "TypedStorage"):
            return "uint8"
        if module == "torch" and name in _DTYPES:
            return name
        admitted = {("collections", "OrderedDict"): _Dict, ("torch", "Size"): tuple,
                    ("torch._utils", "_rebuild_tensor_v2"): self._tensor,
                    ("torch._utils", "_rebuild_tensor_v3"): self._tensor,
                    ("torch._utils", "_rebuild_parameter"): self._parameter}
        if (module, name) not in admitted:
            raise CheckpointError(f"{self._path}: refused: its pickle asks for {f'{module}.{name}'!r:.120}; only "
                                  "tensors and dicts are read")
        return admitted[module, name]

    def persistent_load(self, pid: Any) -> tuple[np.ndarray, str]:
        """A storage: its bytes and the type of its elements."""
        kind, element, key, _, count = pid
        if kind != "storage" or element not in _DTYPES:
            raise CheckpointError(f"{self._path}: refused: its pickle refers to {kind!r:.80} {element!r:.80}")
        if key not in self._storages:
            self._storages[key] = self._member(f"data/{key}")
        if count * _DTYPES[element].itemsize > len(self._storages[key]):
            raise CheckpointError(f"{self._path}: storage {key} has {len(self._storages[key])} bytes, expected {count} "
                                  f"of {element}")
        return self._storages[key], element

    def _tensor(self, storage: tuple[np.ndarray, str], offset: int, shape: tuple[int, ...], stride: tuple[int, ...],
                requires_grad: bool = False, hooks: Any = None, element: Any = None,
                metadata: Any = None) -> np.ndarray:
        data, stored = storage
        dtype = _DTYPES[element if isinstance(element, str) else stored]
        try:
            return np.ndarray(shape, dtype, data, offset * dtype.itemsize, [step * dtype.itemsize for step in stride])
        except (ValueError, TypeError, OverflowError):
            raise CheckpointError(f"{self._path}: a tensor of shape {shape!r:.80}, stride {stride!r:.80} and offset "
                                  f"{offset!r:.80} does not fit its storage of {len(data)} bytes") from None

    @staticmethod
    def _parameter(data: np.ndarray, requires_grad: bool = False, hooks: Any = None) -> np.ndarray:
        return data

    def _member(self, name: str) -> np.ndarray:
        """The bytes of a member of the archive, mapped."""
        try:
            info = self._archive.getinfo(self._prefix + name)
        except KeyError:
            raise CheckpointError(f"{self._path}: has no member {self._prefix + name}") from None
        if info.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(f"{self._path}: {info.filename} is compressed; expected a file of torch.save")
        header = self._bytes[info.header_offset:info.header_offset + _LOCAL_HEADER]
        name_size, extra_size = header[26:30].view("<u2").tolist()
        start = info.header_offset + _LOCAL_HEADER + name_size + extra_size
        if start + info.file_size > len(self._bytes):
            raise CheckpointError(f"{self._path}: truncated within {info.filename}")
        return self._bytes[start:start + info.file_size]


class _Stream:
    """Mapped bytes as the stream an unpickler reads."""

    def __init__(self, data: np.ndarray):
        self._data, self._at = memoryview(data), 0

    def read(self, size: int = -1) -> bytes:
        stop = len(self._data) if size < 0 else self._at + size
        part = bytes(self._data[self._at:stop])
        self._at += len(part)
        return part

    def readline(self) -> bytes:
        rest = bytes(self._data[self._at:self._at + 4096])
        return self.read(rest.find(b"\n") + 1 or len(rest))


def _not_a_zip(path: Path) -> str:
    """What a file that is no zip may be."""
    with open(path, "rb") as file:
        head = file.read(512)
    if head[:4] == b"PK\3\4":
        return "truncated: the end of the zip is missing"
    if _LEGACY in head[:64] or head[:2] == b"\x80\x02":
        return "written in the format of PyTorch before 1.6; load and save it again with a newer one"
    if tarfile.is_tarfile(path):
        return "a tar archive, PyTorch's oldest format; load and save it again with a newer one"
    return "not a PyTorch checkpoint; expected a file of torch.save"

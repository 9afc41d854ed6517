"""PyTorch's checkpoint files without PyTorch: every kind of tensor, and no way to run what a file says."""

import collections
import io
import os
import pickle
import sys
import tarfile
import types
import zipfile

import ml_dtypes
import numpy as np
import pytest

from venus_jax.checkpoints import torch_pickle
from venus_jax.errors import CheckpointError

DTYPES = {"FloatStorage": np.float32, "DoubleStorage": np.float64, "HalfStorage": np.float16,
          "BFloat16Storage": ml_dtypes.bfloat16, "LongStorage": np.int64, "IntStorage": np.int32,
          "ShortStorage": np.int16, "CharStorage": np.int8, "ByteStorage": np.uint8, "BoolStorage": np.bool_,
          "ComplexFloatStorage": np.complex64, "ComplexDoubleStorage": np.complex128}


class Storage:
    """A run of numbers; `kind` is PyTorch's class of it."""

    def __init__(self, kind, values):
        self.kind, self.values = kind, np.asarray(values)


class Call:
    """Pickled as a call of the global `torch._utils.NAME`, or of another module's."""

    def __init__(self, name, *args, module="torch._utils"):
        self.module, self.name, self.args = module, name, args

    def __reduce__(self):
        return getattr(sys.modules[self.module], self.name), self.args


def tensor(storage, shape, stride, offset=0):
    return Call("_rebuild_tensor_v2", storage, offset, shape, stride, False, collections.OrderedDict())


@pytest.fixture
def save(tmp_path, monkeypatch):
    """save(object, **archive options) -> path: what `torch.save` would write, with a stand-in for its names."""
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    for module, names in ((torch, (*DTYPES, "UntypedStorage", "uint16")), (utils, (
            "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter", "_rebuild_qtensor"))):
        for name in names:
            setattr(module, name, type(name, (), {"__module__": module.__name__}))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch._utils", utils)

    def write(obj, skip=None, byteorder=b"little", compression=zipfile.ZIP_STORED):
        path, stream, storages = tmp_path / "model.pt", io.BytesIO(), {}
        pickler = pickle.Pickler(stream, protocol=2)

        def persistent_id(x):
            if isinstance(x, Storage):
                key = storages.setdefault(id(x), (str(len(storages)), x))[0]
                return "storage", getattr(torch, x.kind), key, "cpu", x.values.size
        pickler.persistent_id = persistent_id
        pickler.dump(obj)
        with zipfile.ZipFile(path, "w", compression) as archive:
            archive.writestr("model/data.pkl", stream.getvalue())
            archive.writestr("model/byteorder", byteorder)
            for key, storage in storages.values():
                if key != skip:
                    archive.writestr(f"model/data/{key}", storage.values.tobytes())
        return path

    return write


@pytest.mark.parametrize("kind", DTYPES)
def test_every_dtype(save, kind):
    values = (np.arange(12) % 2 if kind == "BoolStorage" else np.arange(-5, 7).astype(np.int8)).astype(DTYPES[kind])
    out = torch_pickle.read_tensors(save({"x": tensor(Storage(kind, values), (3, 4), (4, 1))}))["x"]
    assert out.dtype == values.dtype and not out.flags.writeable
    np.testing.assert_array_equal(out, values.reshape(3, 4))


def test_a_dtype_beside_an_untyped_storage(save):
    """`_rebuild_tensor_v3`, which PyTorch uses for types it has no storage of; a dtype is pickled by its name alone."""
    values = np.arange(6, dtype=np.uint16)
    storage = Storage("UntypedStorage", values.view(np.uint8))
    path = save({"x": Call("_rebuild_tensor_v3", storage, 1, (5,), (1,), False, None, sys.modules["torch"].uint16)})
    np.testing.assert_array_equal(torch_pickle.read_tensors(path)["x"], values[1:])


def test_views_of_one_storage(save):
    storage = Storage("FloatStorage", np.arange(24, dtype=np.float32))
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    found = torch_pickle.read(save({
        "whole": tensor(storage, (4, 6), (6, 1)), "turned": tensor(storage, (6, 4), (1, 6)),
        "part": tensor(storage, (2, 3), (6, 2), 7), "spread": tensor(storage, (3, 2), (0, 1), 5),
        "number": tensor(storage, (), (), 23), "nothing": tensor(storage, (0, 3), (3, 1))}))
    np.testing.assert_array_equal(found["whole"], whole)
    np.testing.assert_array_equal(found["turned"], whole.T)
    np.testing.assert_array_equal(found["part"], whole[1:3, 1::2])
    np.testing.assert_array_equal(found["spread"], [[5, 6]] * 3)
    assert found["number"] == 23 and found["number"].shape == () and found["nothing"].shape == (0, 3)
    assert np.shares_memory(found["whole"], found["part"])


def test_nested_dicts_and_parameters(save):
    weight = tensor(Storage("FloatStorage", np.ones(2, np.float32)), (2,), (1,))
    state = collections.OrderedDict(weight=Call("_rebuild_parameter", weight, True, collections.OrderedDict()))
    state._metadata = collections.OrderedDict(version=1)
    found = torch_pickle.read(save({"state": state, "step": 7, "rates": [0.5, None], "name": "x", "betas": (1, 2)}))
    np.testing.assert_array_equal(found["state"]["weight"], [1, 1])
    assert (found["step"], found["rates"], found["name"], found["betas"]) == (7, [0.5, None], "x", (1, 2))


@pytest.mark.parametrize("module, name, shown", [
    ("posix", "mkdir", "posix.mkdir"), ("builtins", "eval", "__builtin__.eval"),
    ("torch._utils", "_rebuild_qtensor", "torch._utils._rebuild_qtensor")])
def test_what_a_pickle_may_not_call_is_not_called(save, tmp_path, module, name, shown):
    made = str(tmp_path / "made")
    args = {"mkdir": (made,), "eval": (f"__import__('os').mkdir({made!r})",)}.get(name, ())
    with pytest.raises(CheckpointError, match=rf"model\.pt: refused: .*'{shown}'"):
        torch_pickle.read(save({"x": Call(name, *args, module=module)}))
    assert not os.path.exists(made)


@pytest.mark.parametrize("ops", [
    b"\x80\x02ctorch\nFloatStorage\n(tR.",  # calls what is only a name here
    b"\x80\x02ccollections\nOrderedDict\n}\x8c\x04keysNsb.",  # gives a class attributes
    b"\x80\x02(cposix\nmkdir\n\x8c\x04madetR.", b"\x80\x02(iposix\nmkdir\n.",
    b"\x80\x04\x8c\x05posix\x8c\x05mkdir\x93)R.",
    b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(K\x01tR.", b"\x80\x02", b""])
def test_hand_made_pickles_end_in_one_error(tmp_path, ops):
    path = tmp_path / "model.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/data.pkl", ops)
    with pytest.raises(CheckpointError, match=r"model\.pt: "):
        torch_pickle.read_tensors(path)
    assert not os.path.exists("made")


def test_tensors_stay_inside_their_storage(save):
    for shape, stride, offset in (((5,), (1,), 0), ((2, 2), (3, 1), 0), ((1,), (1,), 4), ((2,), (-1,), 0),
                                  ((-1,), (1,), 0), ((2,), (1, 1), 0), ((2**40,), (0,), 2**70)):
        path = save({"x": tensor(Storage("FloatStorage", np.ones(4, np.float32)), shape, stride, offset)})
        with pytest.raises(CheckpointError, match="does not fit its storage of 16 bytes"):
            torch_pickle.read(path)


def test_other_formats_and_damage(save, tmp_path):
    obj = {"x": tensor(Storage("FloatStorage", np.ones(400, np.float32)), (400,), (1,))}
    path = save(obj)
    whole = path.read_bytes()

    def refused(match, data=None):
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(CheckpointError, match=match) as error:
            torch_pickle.read(path)
        assert str(path) in str(error.value) and "\n" not in str(error.value)

    refused("truncated: the end of the zip is missing", whole[:len(whole) // 2])
    refused("before 1.6", pickle.dumps(0x1950a86a20f9469cfc6c, protocol=2) + b"rest")
    refused("not a PyTorch checkpoint", b"text")
    refused("not a PyTorch checkpoint", b"")
    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo("tensors"))
    refused("a tar archive")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("other.txt", "x")
    refused("expected one NAME/data.pkl")
    save(obj, skip="0")
    refused("has no member model/data/0")
    save(obj, byteorder=b"big")
    refused("big-endian")
    save(obj, compression=zipfile.ZIP_DEFLATED)
    refused("is compressed")
    path.unlink()
    refused("No such file")
    path.mkdir()
    refused("cannot be read")


def test_a_state_dict_holds_nothing_but_tensors(save):
    for obj, match in (([1], "holds list"), ({}, "expected a dict of tensors"), ({"step": 3}, "'step' is int")):
        with pytest.raises(CheckpointError, match=match):
            torch_pickle.read_tensors(save(obj))

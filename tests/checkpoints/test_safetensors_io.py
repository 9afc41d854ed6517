"""Our reader and writer against the `safetensors` library, and files that are broken in every way we know of."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from venus_jax.checkpoints.safetensors_io import Reader, Writer
from venus_jax.errors import CheckpointError


@pytest.fixture
def tensors():
    rng = np.random.default_rng(0)
    return {"b.wide": rng.standard_normal((7, 5), np.float32),
            "a.half": rng.standard_normal((3, 2, 2)).astype(np.float16),
            "c.brain": rng.standard_normal((9, 4)).astype(ml_dtypes.bfloat16),
            "d.row": np.arange(6, dtype=np.float32)}


@pytest.mark.parametrize("shards", [1, 3])
def test_reads_what_the_library_wrote(lab, tmp_path, tensors, shards):
    lab.write(tmp_path, tensors, shards)
    reader = Reader(tmp_path)
    assert reader.tensors.keys() == tensors.keys()
    for name, x in tensors.items():
        assert reader.rows(name, 0, len(x)).tobytes() == x.tobytes()
        middle = reader.rows(name, 1, 3)
        assert middle.dtype == x.dtype and middle.tobytes() == x[1:3].tobytes()


@pytest.mark.parametrize("limit, files", [(10**9, 1), (100, 3)])
def test_library_reads_what_we_wrote_in_any_order(lab, tmp_path, tensors, limit, files):
    with Writer(tmp_path, {name: (x.shape, x.dtype) for name, x in tensors.items()}, limit) as writer:
        for name, x in reversed(tensors.items()):
            for row in reversed(range(len(x))):
                writer.write(name, row, x[row:row + 1])
    assert len(list(tmp_path.glob("*.safetensors"))) == files
    found = lab.read(tmp_path)
    assert {name: x.tobytes() for name, x in found.items()} == {name: x.tobytes() for name, x in tensors.items()}
    assert all(found[name].dtype == x.dtype for name, x in tensors.items())
    assert Reader(tmp_path).tensors.keys() == tensors.keys()


def test_files_are_laid_out_as_by_the_library(tmp_path, tensors):
    with Writer(tmp_path, {name: (x.shape, x.dtype) for name, x in tensors.items()}) as writer:
        for name, x in tensors.items():
            writer.write(name, 0, x)
    safetensors.numpy.save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_writer_refuses_to_end_before_every_byte_came(tmp_path):
    with pytest.raises(CheckpointError, match="16 bytes were never written"):
        with Writer(tmp_path, {"x": ((3, 4), np.float32)}) as writer:
            writer.write("x", 0, np.zeros((2, 4), np.float32))


def test_writer_refuses_dtypes_a_model_has_not(tmp_path):
    with pytest.raises(CheckpointError, match="'x' has dtype int64.*expected one of float32"):
        Writer(tmp_path, {"x": ((3,), np.int64)})


def write_raw(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def entry(begin, end, shape=None, dtype="F32"):
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


BROKEN = {
    "empty file": (b"", None, None, "0 bytes"),
    "no safetensors": (b"x", b"\0" * 3, 2**60, "truncated or not a safetensors file"),
    "header beyond the file": ({"w": entry(0, 8)}, b"\0" * 8, 9999, "header of 9999"),
    "header is not JSON": (b"{{{{", b"", None, "header is not JSON"),
    "header is a list": (b"[1, 2]", b"", None, "no JSON object"),
    "header is not text": (b"\xff\xfe\xff\xfe", b"", None, "header is not JSON"),
    "data cut off": ({"w": entry(0, 400)}, b"\0" * 399, None, "truncated: tensor 'w' ends at byte"),
    "data left over": ({"w": entry(0, 8)}, b"\0" * 12, None, "accounted for by its tensors"),
    "gap between tensors": ({"v": entry(0, 8), "w": entry(12, 20)}, b"\0" * 20, None, "tensor 'w' begins at byte"),
    "tensors overlap": ({"v": entry(0, 8), "w": entry(4, 12)}, b"\0" * 12, None, "tensor 'w' begins at byte"),
    "unknown dtype": ({"w": entry(0, 8, dtype="F9")}, b"\0" * 8, None,
                      "'w' has dtype 'F9'; expected one of F32, BF16, F16"),
    "integers": ({"w": entry(0, 8, dtype="I32")}, b"\0" * 8, None, "'w' has dtype 'I32'"),
    "offsets against shape": ({"w": entry(0, 8, shape=[3])}, b"\0" * 8, None,
                              r"'w' has 8 bytes, expected 12 for shape \[3\]"),
    "dtype is a list": ({"w": entry(0, 8, dtype=["F32"])}, b"\0" * 8, None, "'w' has a malformed entry"),
    "size of 4000 digits": ({"w": entry(0, 8, shape=[10**4000, 10**4000])}, b"\0" * 8, None, "'w' has .*oversized"),
    "product of 4800 digits": ({"w": entry(0, 8, shape=[2**62] * 260)}, b"\0" * 8, None, "'w' has .*more than 64 axes"),
    "nested deeply": (b"[" * 100_000, b"", None, "header is not JSON"),
    "negative size": ({"w": entry(0, 8, shape=[-2])}, b"\0" * 8, None, "'w' has a negative"),
    "negative offset": ({"w": entry(-4, 4)}, b"\0" * 8, None, "'w' has a negative"),
    "no offsets": ({"w": {"dtype": "F32", "shape": [2]}}, b"\0" * 8, None, "'w' has a malformed entry"),
    "same name twice": (b'{"w":%s,"w":%s}' % ((json.dumps(entry(0, 8)).encode(),) * 2), b"\0" * 8, None,
                        "'w' is twice"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_named(tmp_path, case):
    header, data, length, message = BROKEN[case]
    path = tmp_path / "model.safetensors"
    if case == "empty file":
        path.write_bytes(b"")
    else:
        write_raw(path, header, data, length)
    with pytest.raises(CheckpointError, match=message) as e:
        Reader(tmp_path)
    assert str(path) in str(e.value)


def test_file_that_shrinks_while_it_is_read(tmp_path, tensors):
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    reader = Reader(tmp_path)
    with open(tmp_path / "model.safetensors", "r+b") as f:
        f.truncate(reader.tensors["c.brain"].offset + 10)
    with pytest.raises(CheckpointError, match="model.safetensors: truncated within tensor 'c.brain'"):
        reader.rows("c.brain", 0, 9)


class TestShards:
    @pytest.fixture
    def directory(self, lab, tmp_path, tensors):
        lab.write(tmp_path, tensors, 2)
        return tmp_path

    @staticmethod
    def edit_index(directory, change):
        path = directory / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        change(index)
        path.write_text(json.dumps(index))

    def refuse(self, directory, message):
        with pytest.raises(CheckpointError, match=message):
            Reader(directory)

    def test_shard_missing(self, directory):
        (directory / "model-00002-of-00002.safetensors").unlink()
        self.refuse(directory, "model-00002-of-00002.safetensors: missing; .*puts 'a.half' there")

    def test_tensor_not_in_its_shard(self, directory):
        self.edit_index(directory, lambda i: i["weight_map"].update(ghost="model-00001-of-00002.safetensors"))
        self.refuse(directory, "model-00001-of-00002.safetensors: no tensor 'ghost'")

    def test_tensor_in_two_shards(self, directory, tensors):
        names = ["a.half", "d.row", "b.wide"]
        safetensors.numpy.save_file({n: tensors[n] for n in names}, directory / "model-00002-of-00002.safetensors")
        self.refuse(directory, "model-00002-of-00002.safetensors: tensor 'b.wide' is also in model-00001")

    def test_tensor_the_index_does_not_know(self, directory):
        self.edit_index(directory, lambda i: i["weight_map"].pop("a.half"))
        self.refuse(directory, "model-00002-of-00002.safetensors: holds tensor 'a.half', for which .* names None")

    def test_index_names_a_file_elsewhere(self, directory):
        self.edit_index(directory, lambda i: i["weight_map"].update({"a.half": "../model.safetensors"}))
        self.refuse(directory, "'../model.safetensors' is not the name of a file beside it")

    def test_index_names_no_file(self, directory):
        self.edit_index(directory, lambda i: i["weight_map"].update({"a.half": ["x"]}))
        self.refuse(directory, r"\['x'\] is not the name of a file beside it")
        self.edit_index(directory, lambda i: i["weight_map"].update({"a.half": "x" * 5000}))
        self.refuse(directory, "xxx: missing; model.safetensors.index.json puts 'a.half' there")

    @pytest.mark.parametrize("text, message", [("{", "not readable as JSON"), ("[]", "expected a JSON object"),
                                               ("[" * 100_000, "not readable as JSON"),
                                               ("{}", "no weight_map")])
    def test_index_unreadable(self, directory, text, message):
        (directory / "model.safetensors.index.json").write_text(text)
        self.refuse(directory, f"model.safetensors.index.json: {message}")


def test_directory_without_weights(tmp_path):
    with pytest.raises(CheckpointError, match="no weights; expected model.safetensors or model.safetensors.index.json"):
        Reader(tmp_path)

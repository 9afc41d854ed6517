"""Weights and operations of ONNX files, wherever a file keeps them, and files that are none."""

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from venus_jax.checkpoints import onnx_weights
from venus_jax.errors import CheckpointError


def write(path, weights, nodes=None):
    nodes = nodes or [helper.make_node("Relu", ["x"], ["y"], name="relu")]
    value = lambda name: helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "g", [value("x")], [value("y")], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    return path


def external(name, shape, **entries):
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape, data_location=TensorProto.EXTERNAL)
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def test_bytes_and_typed_numbers(tmp_path):
    x = np.arange(6).reshape(2, 3)
    weights = [numpy_helper.from_array(x.astype(dtype), f"raw {np.dtype(dtype)}")
               for dtype in (np.float32, np.float16, np.float64, np.int64, np.uint8, ml_dtypes.bfloat16)]
    weights += [helper.make_tensor("floats", TensorProto.FLOAT, (2, 3), x.ravel().tolist()),
                helper.make_tensor("ints", TensorProto.INT64, (6,), x.ravel().tolist()),
                helper.make_tensor("bfloats", TensorProto.BFLOAT16, (2, 3), x.ravel().astype(float).tolist())]
    tensors = onnx_weights.read(write(tmp_path / "m.onnx", weights)).tensors
    for name, found in tensors.items():
        np.testing.assert_array_equal(found.astype(np.float64).ravel(), x.ravel())
        assert name == "ints" or found.shape == (2, 3)
    assert tensors["raw bfloat16"].dtype == tensors["bfloats"].dtype == ml_dtypes.bfloat16
    assert tensors["raw float16"].dtype == np.float16


def test_operations_and_what_stands_for_weights(tmp_path):
    """Constants are weights, an identity of a weight is another name of it; attributes keep their values."""
    w = numpy_helper.from_array(np.ones((4, 3, 5), np.float32), "w")
    nodes = [helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.float32([7]), "")),
             helper.make_node("Identity", ["w"], ["v"]),
             helper.make_node("Conv", ["x", "v"], ["h"], name="conv", strides=[2], dilations=[3], auto_pad="VALID"),
             helper.make_node("Add", ["h", "c"], ["y"], name="add")]
    graph = onnx_weights.read(write(tmp_path / "m.onnx", [w], nodes))
    assert [node.op for node in graph.nodes] == ["Conv", "Add"] and graph.inputs == ("x",) and graph.outputs == ("y",)
    assert graph.nodes[0] == onnx_weights.Node("Conv", "conv", ("x", "v"), ("h",), {
        "strides": [2], "dilations": [3], "auto_pad": b"VALID"})
    assert graph.tensors["c"] == [7] and graph.tensors["v"] is graph.tensors["w"]


def test_weights_in_a_file_beside_it(tmp_path):
    np.arange(10, dtype=np.float32).tofile(tmp_path / "m.data")
    path = write(tmp_path / "m.onnx", [external("w", (2, 3), location="m.data", offset=8, length=24)])
    np.testing.assert_array_equal(onnx_weights.read(path).tensors["w"], np.arange(2, 8).reshape(2, 3))


@pytest.mark.parametrize("location", ["../secret", "{root}/secret", "link"])
def test_weights_outside_the_folder_are_not_read(tmp_path, location):
    (tmp_path / "secret").write_bytes(b"\0" * 100)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "secret")
    path = write(folder / "m.onnx", [external("w", (2,), location=location.format(root=tmp_path))])
    with pytest.raises(CheckpointError, match="m.onnx: tensor 'w' .* outside the model's folder"):
        onnx_weights.read(path)


def test_what_is_no_model(tmp_path):
    path = tmp_path / "m.onnx"

    def refused(match):
        with pytest.raises(CheckpointError, match=match) as error:
            onnx_weights.read(path)
        assert str(path) in str(error.value)

    refused("No such file")
    write(path, [numpy_helper.from_array(np.ones(1000, np.float32), "w")])
    path.write_bytes(path.read_bytes()[:2000])
    refused("cannot be read as an ONNX model")
    path.write_bytes(b"")
    refused("holds no operations")
    path.write_bytes(b"text, and not a protocol buffer")
    refused("m.onnx: ")
    for tensor in (external("w", (9,), location="absent"), external("w", (9,)),
                   TensorProto(name="w", data_type=TensorProto.FLOAT, dims=(9,), raw_data=b"1234"),
                   TensorProto(name="w", data_type=999, dims=(1,), raw_data=b"1234")):
        write(path, [tensor])
        refused("tensor 'w' cannot be read")

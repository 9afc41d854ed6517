"""The weights of an ONNX file and the nodes that read them, with the `onnx` package (extra `hf`); nothing is run."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np

from venus_jax.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class Node:
    """One operation: `op` is its type; names of tensors in and out; attributes that are numbers, lists or strings."""

    op: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Graph:
    """What a file holds.

    Attributes:
      tensors: weights and constants by name, read-only where they need no conversion; what an `Identity` passes on has
        both names.
      nodes: in the file's order, in which every input is made before it is read; without constants and identities of
        weights.
      inputs, outputs: names of the graph's own.
    """

    tensors: dict[str, np.ndarray]
    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def read(path: str | os.PathLike) -> Graph:
    """Reads a model's main graph.

    Weights may lie in the file, as bytes or as typed numbers, or in files beside it ("external data"); those must be
    inside the model's folder.

    Raises:
      CheckpointError: no such file; not an ONNX model, or truncated; a tensor of an unknown type, of the wrong number
        of bytes, or whose external file is missing, too short or outside the folder; `onnx` is not installed.
    """
    path = Path(path)
    try:
        import onnx
        from google.protobuf.message import DecodeError
    except ImportError as e:
        raise CheckpointError(f'{path}: reading ONNX files needs: pip install "venus_jax[hf]" ({e})') from e
    try:
        graph = onnx.load(path, load_external_data=False).graph
    except (OSError, DecodeError, ValueError) as e:
        raise CheckpointError(f"{path}: cannot be read as an ONNX model ({e})") from e
    if not graph.node:
        raise CheckpointError(f"{path}: holds no operations; expected an ONNX model")
    tensors = {tensor.name: _array(tensor, path) for tensor in graph.initializer}
    nodes = []
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
            tensors[node.output[0]] = _array(node.attribute[0].t, path, node.output[0])
        elif node.op_type == "Identity" and node.input[0] in tensors:
            tensors[node.output[0]] = tensors[node.input[0]]
        else:
            attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute
                          if a.type not in (a.GRAPH, a.GRAPHS, a.TENSOR, a.TENSORS)}
            nodes.append(Node(node.op_type, node.name, tuple(node.input), tuple(node.output), attributes))
    return Graph(tensors, tuple(nodes), tuple(i.name for i in graph.input if i.name not in tensors),
                 tuple(o.name for o in graph.output))


def _array(tensor: Any, path: Path, name: str = "") -> np.ndarray:
    import onnx

    name = tensor.name or name
    try:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            return _external(tensor, path)
        return onnx.numpy_helper.to_array(tensor)
    except (ValueError, TypeError, KeyError, OSError) as e:
        raise CheckpointError(f"{path}: tensor {name!r} cannot be read ({e})") from e


def _external(tensor: Any, path: Path) -> np.ndarray:
    """A tensor whose bytes lie in another file: the file's name is the model's word, so it is not trusted."""
    import onnx

    entries = {entry.key: entry.value for entry in tensor.external_data}
    folder = path.resolve().parent
    file = (folder / entries["location"]).resolve()
    if not file.is_relative_to(folder):
        raise ValueError(f"its data are said to lie in {entries['location']!r}, outside the model's folder")
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type))
    count = int(np.prod(tensor.dims, dtype=np.int64))
    return np.memmap(file, dtype, "r", int(entries.get("offset", 0)), (count,)).reshape(tuple(tensor.dims))

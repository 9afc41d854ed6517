"""CAM++'s weights out of `campplus.onnx`, sizes and all, into our tree.

Exporters fold a batch normalisation into the convolution before it and then have no name for the result, so weights
are told apart by the order of the graph and their shapes, not by names. What an exporter left unfolded is folded here:
our tree is the same either way. Checked on files made for the purpose, and once on some that PyTorch exported from a
network of the published layout and size; the published file was not at hand.
"""

from __future__ import annotations

import collections
import dataclasses
import os

import numpy as np

from venus_jax.acoustic.config import SpeakerConfig
from venus_jax.checkpoints import onnx_weights
from venus_jax.errors import CheckpointError
from venus_jax.typing import Params

_PASS_ON = ("Squeeze", "Unsqueeze")  # between a convolution and its normalisation, where channels stay what they are


@dataclasses.dataclass
class _Convolution:
    """`weight` [out, in, ...], `bias` [out], float32; bins before time, in 2-D."""

    name: str
    weight: np.ndarray
    bias: np.ndarray
    strides: tuple[int, ...]
    dilation: int

    @property
    def params(self) -> dict[str, np.ndarray]:
        return {"kernel": np.ascontiguousarray(self.weight.T), "bias": self.bias}

    @property
    def linear(self) -> dict[str, np.ndarray]:
        """`params` of a convolution of width 1 as a linear layer's."""
        return {"kernel": np.ascontiguousarray(self.weight[..., 0].T), "bias": self.bias}

    def fold(self, scale: np.ndarray, bias: np.ndarray) -> None:
        """Takes in a normalisation that follows."""
        self.weight = self.weight * scale.reshape(-1, *(1,) * (self.weight.ndim - 1))
        self.bias = self.bias * scale + bias


@dataclasses.dataclass
class _Affine:
    """A normalisation that no convolution stands before."""

    name: str
    scale: np.ndarray
    bias: np.ndarray

    @property
    def params(self) -> dict[str, np.ndarray]:
        return {"scale": self.scale, "bias": self.bias}


def from_onnx(path: str | os.PathLike) -> tuple[SpeakerConfig, Params]:
    """Config and tree of a CAM++ network; every size comes from the file.

    Raises:
      CheckpointError: not an ONNX file, or not this network; the message names the file and the operation that does
        not fit.
    """
    graph = onnx_weights.read(path)
    segment = [node.attributes["kernel_shape"][0] for node in graph.nodes if node.op == "AveragePool"]
    try:
        operations = _operations(graph)
        flat = [op for op in operations if isinstance(op, _Convolution) and op.weight.ndim == 4]
        head, sizes = _head(flat)
        tdnn, *body = [op for op in operations if op not in flat]
        trunk, more_sizes = _trunk(tdnn, body)
        config = SpeakerConfig(
            **sizes, **more_sizes, segment=segment[0] if segment else SpeakerConfig.segment,
            num_bins=tdnn.weight.shape[1] // sizes["head_channels"] * 2 ** (len(sizes["head_blocks"]) + 1))
    except (ValueError, IndexError, AttributeError) as e:
        raise CheckpointError(f"{path}: not a CAM++ speaker encoder ({e})") from e
    return config, head | trunk


def _operations(graph: onnx_weights.Graph) -> list[_Convolution | _Affine]:
    """The operations with weights, in order, after folding.

    A normalisation is folded where nothing else reads what its convolution makes: the first layer of a dense block
    normalises what the block's later layers read as it is.
    """
    readers = collections.Counter(name for node in graph.nodes for name in node.inputs)
    made: dict[str, _Convolution] = {}  # by the name of what one makes, if it alone is read
    out: list[_Convolution | _Affine] = []
    for node in graph.nodes:
        weights = [np.asarray(graph.tensors[name], np.float32) for name in node.inputs if name in graph.tensors]
        source = made.get(node.inputs[0]) if node.inputs and readers[node.inputs[0]] == 1 else None
        if node.op == "Conv":
            weight, *bias = weights
            source = _Convolution(node.name or node.outputs[0], weight, *bias or [np.zeros(len(weight), np.float32)],
                                  tuple(node.attributes.get("strides", ())), node.attributes.get("dilations", (1,))[0])
            out.append(source)
        elif node.op == "BatchNormalization":
            gamma, beta, mean, variance = weights
            scale = gamma / np.sqrt(variance + np.float32(node.attributes.get("epsilon", 1e-5)))
            if source is None:
                out.append(_Affine(node.name or node.outputs[0], scale, beta - mean * scale))
            else:
                source.fold(scale, beta - mean * scale)
        elif node.op not in _PASS_ON:
            continue
        if source is not None:
            made[node.outputs[0]] = source
    return out


def _head(operations: list[_Convolution]) -> tuple[Params, dict]:
    """Parameters and sizes of the 2-D part: a convolution, stages of residual blocks, a convolution."""
    first, *middle, last = [op for op in operations if op.weight.shape[2:] == (3, 3)]
    shortcuts = [op for op in operations if op.weight.shape[2:] == (1, 1)]
    params = {"head_conv1": first.params, "head_conv2": last.params}
    blocks: list[int] = []
    for conv1, conv2 in zip(middle[::2], middle[1::2], strict=True):
        begins = conv1.strides[0] == 2
        blocks += [0] * begins
        block = {"conv1": conv1.params, "conv2": conv2.params}
        if begins:
            block["shortcut"] = shortcuts[len(blocks) - 1].params
        params[f"head_stage{len(blocks) - 1}_block{blocks[-1]}"] = block
        blocks[-1] += 1
    width = len(first.weight)
    for op in operations:
        _check(op, op.weight.shape[:2] == (width, 1 if op is first else width))
    _check(last, len(shortcuts) == len(blocks) and len(operations) == len(middle) + len(shortcuts) + 2)
    return params, {"head_channels": width, "head_blocks": tuple(blocks)}


def _trunk(tdnn: _Convolution, body: list[_Convolution | _Affine]) -> tuple[Params, dict]:
    """Parameters and sizes of the 1-D part. Each normalisation begins a layer (four convolutions) or a transit (one);
    the last transit is followed by the embedding.
    """
    starts = [n for n, op in enumerate(body) if isinstance(op, _Affine)]
    *groups, (norm, transit, embedding) = [body[a:b] for a, b in zip(starts, starts[1:] + [len(body)])]
    params, counts, dilations, shape, channels = {"tdnn": tdnn.params}, [0], [], None, len(tdnn.weight)
    for begin, *convolutions in [*groups, [norm, transit]]:
        _check(begin, len(begin.scale) == channels == convolutions[0].weight.shape[1])
        if len(convolutions) == 1:
            params[f"transit{len(counts) - 1}_norm"], params[f"transit{len(counts) - 1}"] = (
                begin.params, convolutions[0].linear)
            channels //= 2
            _check(convolutions[0], len(convolutions[0].weight) == channels)
            counts.append(0)
            continue
        bottleneck, *rest = convolutions
        local = max(rest, key=lambda op: op.weight.shape[2])
        context, mask = [op for op in rest if op is not local]
        shape = shape or (len(bottleneck.weight), len(local.weight), local.weight.shape[2], len(context.weight))
        found = (local.weight.shape[1], len(mask.weight), local.weight.shape[2], mask.weight.shape[1])
        _check(local, found == shape and context.weight.shape[1] == shape[0])
        if not counts[-1]:
            dilations.append(local.dilation)
        _check(local, local.dilation == dilations[-1])
        params[f"block{len(counts) - 1}_layer{counts[-1]}"] = {
            "norm": begin.params, "bottleneck": bottleneck.linear, "local": local.params, "context": context.linear,
            "mask": mask.linear}
        counts[-1] += 1
        channels += shape[1]
    _check(embedding, embedding.weight.shape[1] == 2 * channels)
    params["embedding"] = embedding.linear
    bottleneck_size, growth, kernel, mask_channels = shape
    return params, dict(
        tdnn_channels=len(tdnn.weight), tdnn_kernel=tdnn.weight.shape[2], num_layers=tuple(counts[:-1]),
        dilations=tuple(dilations), growth=growth, kernel=kernel, bottleneck=bottleneck_size,
        mask_channels=mask_channels, embedding_size=len(embedding.weight))


def _check(op: _Convolution | _Affine, fits: bool) -> None:
    if not fits:
        shape = op.weight.shape if isinstance(op, _Convolution) else op.scale.shape
        raise ValueError(f"operation {op.name} of shape {list(shape)} has no place in it")

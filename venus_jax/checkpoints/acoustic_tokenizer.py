"""The speech tokenizer's official tensors <-> our tree, and their names in `speech_tokenizer_v2_25hz.onnx`.

Official names are those of the s3tokenizer package (S3TokenizerV2). The table is checked by the recorded fixtures. The
published ONNX file was not at hand: its names are those the package's own converter knows, checked on a synthetic file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import numpy as np

from venus_jax.acoustic.config import SpeechTokenizerConfig
from venus_jax.checkpoints import acoustic_rules, onnx_weights
from venus_jax.checkpoints.table import KEEP, REVERSE, Rule
from venus_jax.errors import CheckpointError
from venus_jax.typing import Params

HEAD_DIM = 64  # the width of the reference's table of rotary angles

_BLOCK = "encoder.blocks.{i}."
_QUANTISER = "quantizer._codebook.project_down"
# (our path, their name, their shape, kind); D width, F the middle of a block, M mel bins, K memory, C code dimensions.
_TABLE = (
    ("conv1/kernel", "encoder.conv1.weight", "D M 3", REVERSE),
    ("conv1/bias", "encoder.conv1.bias", "D", KEEP),
    ("conv2/kernel", "encoder.conv2.weight", "D D 3", REVERSE),
    ("conv2/bias", "encoder.conv2.bias", "D", KEEP),
    ("layers/attn_norm/scale", _BLOCK + "attn_ln.weight", "D", KEEP),
    ("layers/attn_norm/bias", _BLOCK + "attn_ln.bias", "D", KEEP),
    ("layers/attn/q_proj/kernel", _BLOCK + "attn.query.weight", "D D", REVERSE),
    ("layers/attn/q_proj/bias", _BLOCK + "attn.query.bias", "D", KEEP),
    ("layers/attn/k_proj/kernel", _BLOCK + "attn.key.weight", "D D", REVERSE),
    ("layers/attn/v_proj/kernel", _BLOCK + "attn.value.weight", "D D", REVERSE),
    ("layers/attn/v_proj/bias", _BLOCK + "attn.value.bias", "D", KEEP),
    ("layers/attn/out_proj/kernel", _BLOCK + "attn.out.weight", "D D", REVERSE),
    ("layers/attn/out_proj/bias", _BLOCK + "attn.out.bias", "D", KEEP),
    ("layers/attn/memory/kernel", _BLOCK + "attn.fsmn_block.weight", "D 1 K", REVERSE),
    ("layers/mlp_norm/scale", _BLOCK + "mlp_ln.weight", "D", KEEP),
    ("layers/mlp_norm/bias", _BLOCK + "mlp_ln.bias", "D", KEEP),
    ("layers/mlp/fc1/kernel", _BLOCK + "mlp.0.weight", "F D", REVERSE),
    ("layers/mlp/fc1/bias", _BLOCK + "mlp.0.bias", "F", KEEP),
    ("layers/mlp/fc2/kernel", _BLOCK + "mlp.2.weight", "D F", REVERSE),
    ("layers/mlp/fc2/bias", _BLOCK + "mlp.2.bias", "D", KEEP),
    ("project_down/kernel", _QUANTISER + ".weight", "C D", REVERSE),
    ("project_down/bias", _QUANTISER + ".bias", "C", KEEP),
)
_OPERATIONS = {"MatMul": "weight", "Gemm": "weight", "Conv": "weight", "Mul": "weight", "Add": "bias", "Add_1": "bias"}


def rules(config: SpeechTokenizerConfig) -> tuple[Rule, ...]:
    """The table at a config's sizes."""
    sizes = {"D": config.hidden_size, "F": 4 * config.hidden_size, "M": config.num_mels, "K": config.fsmn_kernel,
             "C": config.codebook_dims}
    return tuple(Rule(path, name, tuple(sizes.get(d) or int(d) for d in shape.split()), kind,
                      config.num_layers if "{i}" in name else 0) for path, name, shape, kind in _TABLE)


def config_from_tensors(tensors: Mapping[str, np.ndarray], source: str = "speech tokenizer") -> SpeechTokenizerConfig:
    """Sizes read off the tensors; heads are 64 wide and there are three levels, which no tensor says.

    Raises:
      CheckpointError: a tensor that shows a size is missing or of another rank; the message names it.
    """
    def shape(name, rank):
        if name not in tensors or tensors[name].ndim != rank:
            raise CheckpointError(f"{source}: no tensor {name} of {rank} axes; expected an S3 tokenizer v2")
        return tensors[name].shape

    hidden, num_mels, _ = shape("encoder.conv1.weight", 3)
    blocks = {int(m[1]) for name in tensors if (m := re.match(r"encoder\.blocks\.(\d+)\.", name))}
    if hidden % HEAD_DIM:
        raise CheckpointError(f"{source}: encoder.conv1.weight has {hidden} channels; expected a multiple of "
                              f"{HEAD_DIM}")
    return SpeechTokenizerConfig(
        num_mels=num_mels, hidden_size=hidden, num_heads=hidden // HEAD_DIM, num_layers=max(blocks, default=-1) + 1,
        fsmn_kernel=shape("encoder.blocks.0.attn.fsmn_block.weight", 3)[2],
        codebook_dims=shape(_QUANTISER + ".weight", 2)[0])


def from_tensors(tensors: Mapping[str, np.ndarray],
                 source: str = "speech tokenizer") -> tuple[SpeechTokenizerConfig, Params]:
    """Config and tree of tensors under their official names; CheckpointError names what does not fit."""
    config = config_from_tensors(tensors, source)
    return config, acoustic_rules.to_params(rules(config), tensors, source)


def to_tensors(config: SpeechTokenizerConfig, params: Params) -> dict[str, np.ndarray]:
    """A tree's tensors under their official names."""
    return acoustic_rules.to_tensors(rules(config), params)


def from_onnx(path: str | os.PathLike) -> tuple[SpeechTokenizerConfig, Params]:
    """Config and tree of `speech_tokenizer_v2_25hz.onnx`.

    Raises:
      CheckpointError: not an ONNX file, or not of this network; the message names file and tensor.
    """
    return from_tensors(_official(onnx_weights.read(path)), str(path))


def _official(graph: onnx_weights.Graph) -> dict[str, np.ndarray]:
    """Weights by official name: a node's scope says which module it belongs to, its operation which weight.

    `/blocks.0/attn/query/MatMul` reads `encoder.blocks.0.attn.query.weight`, transposed. The first two convolutions are
    known by their order; the quantiser's first product and sum are its projection.
    """
    found: dict[str, np.ndarray] = {}
    convolutions = iter(("encoder.conv1", "encoder.conv2"))
    for node in graph.nodes:
        weights = [graph.tensors[name] for name in node.inputs if name in graph.tensors]
        weights = [x for x in weights if x.size > 1]
        *scope, operation = node.name.strip("/").split("/")
        module = _module(scope)
        if not weights:
            continue
        if node.op == "Conv" and module is None:
            module = next(convolutions, None)
        if module is None and any("project_in" in name for name in node.inputs):
            module = _QUANTISER
        if node.op == "MatMul" or (node.op == "Gemm" and not node.attributes.get("transB")):
            weights[0] = weights[0].T
        parts = ("weight", "bias") if len(weights) == 2 else (_OPERATIONS.get(operation, ""),)
        for part, x in zip(parts, weights):
            found.setdefault(f"{module}.{part}", x)
    return {name: x for name, x in found.items() if _is_expected(name)}


def _module(scope: list[str]) -> str | None:
    """The official name of the module a scope stands for."""
    for n, part in enumerate(scope):
        if part.startswith("blocks."):
            return "encoder." + ".".join(scope[n:]).replace("mlp.mlp.", "mlp.")
        if part.startswith("quantizer"):
            return _QUANTISER
    return None


def _is_expected(name: str) -> bool:
    pattern = re.sub(r"\d+", "{i}", name, count=1) if ".blocks." in name else name
    return any(pattern == official for _, official, _, _ in _TABLE)

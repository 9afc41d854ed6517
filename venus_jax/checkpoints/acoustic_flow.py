"""The flow's official tensors (`flow.pt`) <-> our tree. Checked by the recorded fixtures; minicpmo45.md 2.7."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from venus_jax.acoustic.config import FlowConfig
from venus_jax.checkpoints import acoustic_rules
from venus_jax.checkpoints.table import KEEP, REVERSE, Rule
from venus_jax.errors import CheckpointError
from venus_jax.typing import Params

_E, _D = "encoder.", "decoder.estimator."
_BLOCK = _D + "blocks.{i}."


def _linear(path: str, name: str, outputs: str, inputs: str):
    return (path + "/kernel", name + ".weight", f"{outputs} {inputs}", REVERSE), (path + "/bias", name + ".bias", outputs, KEEP)


def _norm(path: str, name: str, size: str):
    return (path + "/scale", name + ".weight", size, KEEP), (path + "/bias", name + ".bias", size, KEEP)


def _conv(path: str, name: str, channels: str, width: int):
    return ((path + "/kernel", name + ".weight", f"{channels} {channels} {width}", REVERSE),
            (path + "/bias", name + ".bias", channels, KEEP))


def _stack(ours: str, embed: str, blocks: str):
    block, attn = f"{_E}{blocks}.{{i}}.", f"{_E}{blocks}.{{i}}.self_attn."
    return (*_linear(f"{ours}/linear", f"{_E}{embed}.out.0", "D", "D"), *_norm(f"{ours}/norm", f"{_E}{embed}.out.1", "D"),
            *(rule for name in ("q", "k", "v", "out") for rule in _linear(
                f"{ours}/layers/attn/{name}_proj", f"{attn}linear_{name}", "D", "D")),
            (f"{ours}/layers/attn/pos_proj/kernel", f"{attn}linear_pos.weight", "D D", REVERSE),
            (f"{ours}/layers/attn/key_bias", f"{attn}pos_bias_u", "N H", KEEP),
            (f"{ours}/layers/attn/pos_bias", f"{attn}pos_bias_v", "N H", KEEP),
            *_norm(f"{ours}/layers/attn_norm", block + "norm_mha", "D"), *_norm(f"{ours}/layers/mlp_norm", block + "norm_ff", "D"),
            *_linear(f"{ours}/layers/fc1", block + "feed_forward.w_1", "F", "D"),
            *_linear(f"{ours}/layers/fc2", block + "feed_forward.w_2", "D", "F"))


# (our path, their name, their shape, kind). Encoder: D width, F middle, N heads of H; estimator: W width, G middle, A all
# heads of B; M mel bins, S speaker features, V codes.
_TABLE = (
    ("embed/embedding", "input_embedding.weight", "V D", KEEP),
    *_linear("speaker", "spk_embed_affine_layer", "M", "S"),
    *_linear("mu_proj", "encoder_proj", "M", "D"),
    *_stack("encoder/low", "embed", "encoders"), *_stack("encoder/up", "up_embed", "up_encoders"),
    *_conv("encoder/look1", _E + "pre_lookahead_layer.conv1", "D", 4),
    *_conv("encoder/look2", _E + "pre_lookahead_layer.conv2", "D", 3),
    *_conv("encoder/up_conv", _E + "up_layer.conv", "D", 5),
    *_norm("encoder/norm", _E + "after_norm", "D"),
    *_linear("estimator/time1", _D + "t_embedder.mlp.0", "W", "256"), *_linear("estimator/time2", _D + "t_embedder.mlp.2", "W", "W"),
    *_linear("estimator/in_proj", _D + "in_proj", "W", "4M"),
    *(rule for name in "qkv" for rule in _linear(f"estimator/layers/attn/{name}_proj", f"{_BLOCK}attn.to_{name}", "A", "W")),
    *(rule for name in "qk" for rule in _norm(f"estimator/layers/attn/{name}_norm", f"{_BLOCK}attn.{name}_norm", "B")),
    *_linear("estimator/layers/attn/out_proj", _BLOCK + "attn.proj", "W", "A"),
    *_conv("estimator/layers/conv/conv1", _BLOCK + "conv.block.1", "W", 3),
    *_norm("estimator/layers/conv/norm", _BLOCK + "conv.block.3", "W"),
    *_conv("estimator/layers/conv/conv2", _BLOCK + "conv.block.6", "W", 3),
    *_linear("estimator/layers/mlp/fc1", _BLOCK + "mlp.fc1", "G", "W"), *_linear("estimator/layers/mlp/fc2", _BLOCK + "mlp.fc2", "W", "G"),
    *_linear("estimator/layers/modulation", _BLOCK + "adaLN_modulation.1", "9W", "W"),
    *_linear("estimator/modulation", _D + "final_layer.adaLN_modulation.1", "2W", "W"),
    *_linear("estimator/out_proj", _D + "final_layer.linear", "M", "W"),
)


def rules(config: FlowConfig) -> tuple[Rule, ...]:
    """The table at a config's sizes."""
    c = config
    sizes = {"D": c.hidden_size, "F": c.intermediate_size, "N": c.num_heads, "H": c.hidden_size // c.num_heads,
             "W": c.dit_hidden_size, "G": c.dit_intermediate_size, "A": c.dit_num_heads * c.dit_head_dim,
             "B": c.dit_head_dim, "M": c.num_mels, "S": c.speaker_dim, "V": c.vocab_size}
    size = lambda d: int(d) if d.isdigit() else int(d[:-1] or 1) * sizes[d[-1]]
    layers = {"encoder/low": c.num_layers, "encoder/up": c.num_up_layers, "estimator/l": c.dit_num_layers}
    return tuple(Rule(path, name, tuple(map(size, shape.split())), kind,
                      next(n for prefix, n in layers.items() if path.startswith(prefix)) if "{i}" in name else 0)
                 for path, name, shape, kind in _TABLE)


def config_from_tensors(tensors: Mapping[str, np.ndarray], sizes: Mapping[str, Any] | None = None,
                        source: str = "flow") -> FlowConfig:
    """Sizes read off the tensors.

    Args:
      sizes: what they do not show, in the layout of the published YAML: `flow/inference_cfg_rate`.

    Raises:
      CheckpointError: a tensor that shows a size is missing or of another rank; the message names it.
    """
    def shape(name, rank):
        if name not in tensors or tensors[name].ndim != rank:
            raise CheckpointError(f"{source}: no tensor {name} of {rank} axes; expected a flow of Step-Audio 2")
        return tensors[name].shape

    def count(prefix):
        return max((int(m[1]) for name in tensors if (m := re.match(re.escape(prefix) + r"(\d+)\.", name))), default=-1) + 1

    vocab, hidden = shape("input_embedding.weight", 2)
    heads, _ = shape(_E + "encoders.0.self_attn.pos_bias_u", 2)
    mels, speaker = shape("spk_embed_affine_layer.weight", 2)
    inner, width = shape(_D + "blocks.0.attn.to_q.weight", 2)
    (head,) = shape(_D + "blocks.0.attn.q_norm.weight", 1)
    guidance = ((sizes or {}).get("flow") or {}).get("inference_cfg_rate", FlowConfig.guidance)
    return FlowConfig(
        vocab_size=vocab, speaker_dim=speaker, num_mels=mels, hidden_size=hidden, num_heads=heads,
        intermediate_size=shape(_E + "encoders.0.feed_forward.w_1.weight", 2)[0], num_layers=count(_E + "encoders."),
        num_up_layers=count(_E + "up_encoders."), dit_hidden_size=width, dit_num_layers=count(_D + "blocks."),
        dit_num_heads=inner // head, dit_head_dim=head, dit_intermediate_size=shape(_D + "blocks.0.mlp.fc1.weight", 2)[0],
        guidance=guidance)


def from_tensors(tensors: Mapping[str, np.ndarray], sizes: Mapping[str, Any] | None = None,
                 source: str = "flow") -> tuple[FlowConfig, Params]:
    """Config and tree of tensors under their official names; CheckpointError names what does not fit."""
    config = config_from_tensors(tensors, sizes, source)
    return config, acoustic_rules.to_params(rules(config), tensors, source)


def to_tensors(config: FlowConfig, params: Params) -> dict[str, np.ndarray]:
    """A tree's tensors under their official names."""
    return acoustic_rules.to_tensors(rules(config), params)

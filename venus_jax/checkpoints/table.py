"""The one map between Hugging Face tensors and our parameter tree; with a config it gives names and shapes of both.

A `Rule` says: this parameter is that tensor, or those of all layers stacked, seen as rows, for most kernels with its
axes reversed. Reversing undoes itself, so no rule says anything twice for the two directions.
Sources: `docs/params.md` for our side, the names of MiniCPM-o 4.5's safetensors for theirs.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import re
from typing import Any, Mapping, TypeVar

from venus_jax.config import VenusConfig

T = TypeVar("T")


class Kind(enum.Enum):
    """How one Hugging Face tensor becomes one of ours."""

    KEEP = "unchanged"
    REVERSE = "axes reversed: linear [out, in] -> [in, out], convolution [out, in, width] -> [width, in, out]"
    PATCHES = "[out, channels, height, width] -> [channels * height * width, out]"
    COLUMN = "[n, 1] -> [n]"


KEEP, REVERSE, PATCHES, COLUMN = Kind

# (our path, their name, their shape, kind), by part. `{a,b}` on both sides stands for a rule each, `{i}` for the layer;
# `name:k` is the k-th third of the rows of a tensor that packs three. `_sizes` says what the letters of shapes mean.
_TABLE: dict[str, tuple[tuple[str, str, str, Kind], ...]] = {
    "llm": (
        ("llm/embed/embedding", "llm.model.embed_tokens.weight", "V D", KEEP),
        ("llm/layers/attn_norm/scale", "llm.model.layers.{i}.input_layernorm.weight", "D", KEEP),
        ("llm/layers/attn/q_proj/kernel", "llm.model.layers.{i}.self_attn.q_proj.weight", "Q D", REVERSE),
        ("llm/layers/attn/{k,v}_proj/kernel", "llm.model.layers.{i}.self_attn.{k,v}_proj.weight", "K D", REVERSE),
        ("llm/layers/attn/o_proj/kernel", "llm.model.layers.{i}.self_attn.o_proj.weight", "D Q", REVERSE),
        ("llm/layers/attn/{q,k}_norm/scale", "llm.model.layers.{i}.self_attn.{q,k}_norm.weight", "H", KEEP),
        ("llm/layers/mlp_norm/scale", "llm.model.layers.{i}.post_attention_layernorm.weight", "D", KEEP),
        ("llm/layers/mlp/{gate,up}_proj/kernel", "llm.model.layers.{i}.mlp.{gate,up}_proj.weight", "F D", REVERSE),
        ("llm/layers/mlp/down_proj/kernel", "llm.model.layers.{i}.mlp.down_proj.weight", "D F", REVERSE),
        ("llm/norm/scale", "llm.model.norm.weight", "D", KEEP),
        ("llm/lm_head/kernel", "llm.lm_head.weight", "V D", REVERSE),
    ),
    "vision": (
        ("vision/patch_embed/kernel", "vpm.embeddings.patch_embedding.weight", "W C P P", PATCHES),
        ("vision/patch_embed/bias", "vpm.embeddings.patch_embedding.bias", "W", KEEP),
        ("vision/position_embed/embedding", "vpm.embeddings.position_embedding.weight", "N W", KEEP),
        ("vision/layers/{attn,mlp}_norm/{scale,bias}",
         "vpm.encoder.layers.{i}.layer_norm{1,2}.{weight,bias}", "W", KEEP),
        ("vision/layers/attn/{q,k,v,out}_proj/kernel",
         "vpm.encoder.layers.{i}.self_attn.{q,k,v,out}_proj.weight", "W W", REVERSE),
        ("vision/layers/attn/{q,k,v,out}_proj/bias",
         "vpm.encoder.layers.{i}.self_attn.{q,k,v,out}_proj.bias", "W", KEEP),
        ("vision/layers/mlp/fc1/kernel", "vpm.encoder.layers.{i}.mlp.fc1.weight", "F W", REVERSE),
        ("vision/layers/mlp/fc1/bias", "vpm.encoder.layers.{i}.mlp.fc1.bias", "F", KEEP),
        ("vision/layers/mlp/fc2/kernel", "vpm.encoder.layers.{i}.mlp.fc2.weight", "W F", REVERSE),
        ("vision/layers/mlp/fc2/bias", "vpm.encoder.layers.{i}.mlp.fc2.bias", "W", KEEP),
        ("vision/norm/{scale,bias}", "vpm.post_layernorm.{weight,bias}", "W", KEEP),
    ),
    "resampler": (
        ("resampler/query", "resampler.query", "Q D", KEEP),
        ("resampler/proj", "resampler.proj", "D D", KEEP),  # applied as x @ proj by the reference too
        ("resampler/kv_proj/kernel", "resampler.kv_proj.weight", "D W", REVERSE),
        ("resampler/attn/{q,k,v}_proj/kernel", "resampler.attn.in_proj_weight:{0,1,2}", "3D D", REVERSE),
        ("resampler/attn/{q,k,v}_proj/bias", "resampler.attn.in_proj_bias:{0,1,2}", "3D", KEEP),
        ("resampler/attn/out_proj/kernel", "resampler.attn.out_proj.weight", "D D", REVERSE),
        ("resampler/attn/out_proj/bias", "resampler.attn.out_proj.bias", "D", KEEP),
        ("resampler/ln_{q,kv,post}/{scale,bias}", "resampler.ln_{q,kv,post}.{weight,bias}", "D", KEEP),
    ),
    "audio": (
        ("audio/conv1/kernel", "apm.conv1.weight", "A M 3", REVERSE),
        ("audio/conv2/kernel", "apm.conv2.weight", "A A 3", REVERSE),
        ("audio/conv{1,2}/bias", "apm.conv{1,2}.bias", "A", KEEP),
        ("audio/position_embed/embedding", "apm.embed_positions.weight", "N A", KEEP),
        ("audio/layers/attn_norm/{scale,bias}", "apm.layers.{i}.self_attn_layer_norm.{weight,bias}", "A", KEEP),
        ("audio/layers/attn/{q,k,v,out}_proj/kernel",
         "apm.layers.{i}.self_attn.{q,k,v,out}_proj.weight", "A A", REVERSE),
        ("audio/layers/attn/{q,v,out}_proj/bias", "apm.layers.{i}.self_attn.{q,v,out}_proj.bias", "A", KEEP),
        ("audio/layers/mlp_norm/{scale,bias}", "apm.layers.{i}.final_layer_norm.{weight,bias}", "A", KEEP),
        ("audio/layers/mlp/fc1/kernel", "apm.layers.{i}.fc1.weight", "F A", REVERSE),
        ("audio/layers/mlp/fc1/bias", "apm.layers.{i}.fc1.bias", "F", KEEP),
        ("audio/layers/mlp/fc2/kernel", "apm.layers.{i}.fc2.weight", "A F", REVERSE),
        ("audio/layers/mlp/fc2/bias", "apm.layers.{i}.fc2.bias", "A", KEEP),
        ("audio/norm/{scale,bias}", "apm.layer_norm.{weight,bias}", "A", KEEP),
        ("audio_projection/linear1/kernel", "audio_projection_layer.linear1.weight", "D A", REVERSE),
        ("audio_projection/linear2/kernel", "audio_projection_layer.linear2.weight", "D D", REVERSE),
        ("audio_projection/linear{1,2}/bias", "audio_projection_layer.linear{1,2}.bias", "D", KEEP),
    ),
    "talker": (
        ("talker/emb_text/embedding", "tts.emb_text.weight", "T E", KEEP),
        ("talker/emb_code/embedding", "tts.emb_code.0.weight", "C E", KEEP),
        ("talker/head_code/scale", "tts.head_code.0.parametrizations.weight.original0", "C 1", COLUMN),
        ("talker/head_code/kernel", "tts.head_code.0.parametrizations.weight.original1", "C E", REVERSE),
        ("talker/projector_{semantic,spk}/linear1/kernel",
         "tts.projector_{semantic,spk}.linear1.weight", "E D", REVERSE),
        ("talker/projector_{semantic,spk}/linear2/kernel",
         "tts.projector_{semantic,spk}.linear2.weight", "E E", REVERSE),
        ("talker/projector_{semantic,spk}/linear{1,2}/bias",
         "tts.projector_{semantic,spk}.linear{1,2}.bias", "E", KEEP),
        ("talker/embed/embedding", "tts.model.embed_tokens.weight", "U E", KEEP),
        ("talker/layers/attn_norm/scale", "tts.model.layers.{i}.input_layernorm.weight", "E", KEEP),
        ("talker/layers/attn/q_proj/kernel", "tts.model.layers.{i}.self_attn.q_proj.weight", "Q E", REVERSE),
        ("talker/layers/attn/{k,v}_proj/kernel", "tts.model.layers.{i}.self_attn.{k,v}_proj.weight", "K E", REVERSE),
        ("talker/layers/attn/o_proj/kernel", "tts.model.layers.{i}.self_attn.o_proj.weight", "E Q", REVERSE),
        ("talker/layers/mlp_norm/scale", "tts.model.layers.{i}.post_attention_layernorm.weight", "E", KEEP),
        ("talker/layers/mlp/{gate,up}_proj/kernel", "tts.model.layers.{i}.mlp.{gate,up}_proj.weight", "F E", REVERSE),
        ("talker/layers/mlp/down_proj/kernel", "tts.model.layers.{i}.mlp.down_proj.weight", "E F", REVERSE),
        ("talker/norm/scale", "tts.model.norm.weight", "E", KEEP),
    ),
}

# Names by which a part is recognised in a file; a part none of whose names occur is absent.
HF_PREFIXES = {"vision": ("vpm.", "resampler."), "audio": ("apm.", "audio_projection_layer."), "talker": ("tts.",)}

UNUSED_EMBED = "tts.model.embed_tokens.weight"  # its rows are a matter of the file, not of config.json
VOCAB_PATHS = ("llm/embed/embedding", "llm/lm_head/kernel")  # the parameters with a row for each token


@dataclasses.dataclass(frozen=True)
class Rule:
    """One parameter of ours and the tensors it is made of.

    Attributes:
      path: our path, parts joined by "/".
      name: their name; "{i}" in it stands for the layer.
      shape: of one tensor of theirs.
      kind: how it becomes ours.
      layers: how many are stacked on our leading axis; 0 where there is no such axis.
      third: which third of the tensor's rows is meant; None: all of them.
    """

    path: str
    name: str
    shape: tuple[int, ...]
    kind: Kind
    layers: int = 0
    third: int | None = None

    @property
    def rows(self) -> tuple[int, ...]:
        """Shape of the part taken from one tensor, as rows: flattened behind the first axis where `kind` says so."""
        count = self.shape[0] // (1 if self.third is None else 3)
        if self.kind is COLUMN:
            return (count,)
        return (count, math.prod(self.shape[1:])) if self.kind is PATCHES else (count, *self.shape[1:])

    @property
    def first_row(self) -> int:
        """Where `rows` begins in the tensor."""
        return (self.third or 0) * self.rows[0]

    @property
    def param_shape(self) -> tuple[int, ...]:
        """Shape of our parameter."""
        return (self.layers,) * bool(self.layers) + self.turn(self.rows)

    @property
    def names(self) -> list[str]:
        """Their tensors, one a layer."""
        return [self.name.replace("{i}", str(i)) for i in range(self.layers or 1)]

    def turn(self, x: Any) -> Any:
        """Their rows to our parameter of one layer, or back: an array (as a view) or a tuple with an item an axis."""
        if self.kind not in (REVERSE, PATCHES):
            return x
        return x.T if hasattr(x, "T") else x[::-1]


def rules(config: VenusConfig) -> tuple[Rule, ...]:
    """The rules of the parts `config` has, each part's together."""
    out = []
    for part, sizes in _sizes(config).items():
        for paths, names, shape, kind in _TABLE[part]:
            dims = tuple(sizes[d] if d in sizes else int(d) for d in shape.split())
            for path, name in zip(_expand(paths), _expand(names), strict=True):
                name, _, third = name.partition(":")
                layers = sizes["L"] if "{i}" in name else 0
                out.append(Rule(path, name, dims, kind, layers, int(third) if third else None))
    return tuple(out)


def hf_shapes(config: VenusConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a Hugging Face checkpoint of `config` holds, with its shape."""
    return {name: rule.shape for rule in rules(config) for name in rule.names}


def param_shapes(config: VenusConfig, padded: bool = True) -> dict[str, tuple[int, ...]]:
    """Every parameter of ours by path, as it lives in memory or (not `padded`) without rows that pad the vocabulary."""
    return {rule.path: rule.param_shape for rule in rules(pad_vocab(config) if padded else config)}


def pad_vocab(config: VenusConfig) -> VenusConfig:
    """`config` with the rows that pad the vocabulary counted as tokens: its shapes are those in memory."""
    return config.replace(llm=dict(vocab_size=config.llm.vocab_rows))


def nest(flat: Mapping[str, T]) -> dict[str, Any]:
    """{"a/b": x} to {"a": {"b": x}}; `sharding.paths` is the inverse."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, last = path.split("/")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = value
    return tree


def _sizes(config: VenusConfig) -> dict[str, dict[str, int]]:
    """What the letters of each part's shapes mean; a part the config lacks is missing."""
    llm, vision, resampler, audio, talker = config.llm, config.vision, config.resampler, config.audio, config.talker
    width = llm.hidden_size

    def decoder(c):
        return dict(L=c.num_layers, F=c.intermediate_size, Q=c.num_heads * c.head_dim, K=c.num_kv_heads * c.head_dim)

    sizes = {"llm": dict(V=llm.vocab_size, D=width, H=llm.head_dim, **decoder(llm))}
    if vision is not None:
        sizes["vision"] = dict(W=vision.hidden_size, F=vision.intermediate_size, L=vision.depth, C=vision.num_channels,
                               P=vision.patch_size, N=vision.positions_per_side**2)
        sizes["resampler"] = {"Q": resampler.num_queries, "D": width, "3D": 3 * width, "W": resampler.kv_dim}
    if audio is not None:
        sizes["audio"] = dict(A=audio.hidden_size, F=audio.intermediate_size, L=audio.num_layers, D=width,
                              M=audio.num_mel_bins, N=audio.max_positions)
    if talker is not None:
        sizes["talker"] = dict(E=talker.hidden_size, T=talker.num_text_tokens, C=talker.num_audio_tokens,
                               U=talker.unused_vocab_size, D=width, **decoder(talker))
    return sizes


def _expand(text: str) -> list[str]:
    """"a{b,c}" to ["ab", "ac"], several braces in all combinations, the first varying slowest."""
    if not (braces := re.search(r"\{([^{}]*,[^{}]*)\}", text)):
        return [text]
    return [out for word in braces[1].split(",") for out in _expand(text[:braces.start()] + word + text[braces.end():])]

"""Sizes and constants of the networks as frozen dataclasses; the one place that knows Hugging Face's `config.json`.

A `VenusConfig` is hashable (it is a static argument of jitted functions), prints as JSON, and is stored as
`config.json` beside every checkpoint. `omni_9b()` and `audio_9b()` are the published sizes.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, Mapping

from venus_jax.errors import ConfigError

SAMPLE_RATE = 16_000  # Hz, of everything the model hears
FRAME_HOP = 160  # samples a mel frame: 100 frames a second
NUM_ADDED_TOKENS = 4  # <delegate> </delegate> <backend> </backend>


class _Checked:
    """Every number of a part is positive and finite and every field has its annotated type."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), _KINDS[field.type]
            if kind is float and type(value) is int and abs(value) < 1 << 53:
                object.__setattr__(self, field.name, value := float(value))
            ok = type(value) is kind and (kind not in (int, float) or 0 < value < (1 << 53))
            if not ok:
                want = {int: "a positive whole number", float: "a positive number", bool: "true or false", str: "a text"}
                raise ConfigError(f"{type(self).__name__}.{field.name} is {value!r}; expected {want[kind]}")


_KINDS = {"int": int, "float": float, "bool": bool, "str": str}


@dataclasses.dataclass(frozen=True)
class LLMConfig(_Checked):
    """Qwen3 decoder. `vocab_size` counts rows in checkpoints; `vocab_multiple` pads the live table for sharding."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    max_positions: int = 40_960
    vocab_multiple: int = 1

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding and head in memory: `vocab_size` rounded up to `vocab_multiple`."""
        return math.ceil(self.vocab_size / self.vocab_multiple) * self.vocab_multiple


@dataclasses.dataclass(frozen=True)
class VisionConfig(_Checked):
    """SigLIP2 NaViT tower. `num_layers` is the configured count; `depth` the blocks stored and run."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    image_size: int = 980
    patch_size: int = 14
    num_channels: int = 3
    layer_norm_eps: float = 1e-6
    drop_last_layer: bool = False

    @property
    def depth(self) -> int:
        return self.num_layers - int(self.drop_last_layer)

    @property
    def positions_per_side(self) -> int:
        return self.image_size // self.patch_size

    @property
    def patch_dim(self) -> int:
        return self.num_channels * self.patch_size**2


@dataclasses.dataclass(frozen=True)
class ResamplerConfig(_Checked):
    """2-D perceiver from vision width to the backbone's; head width is 128 as published."""

    num_queries: int
    hidden_size: int
    kv_dim: int
    layer_norm_eps: float = 1e-6

    @property
    def num_heads(self) -> int:
        return self.hidden_size // 128


@dataclasses.dataclass(frozen=True)
class AudioConfig(_Checked):
    """Whisper encoder, projection to the backbone's width, and pooling."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_mel_bins: int = 80
    max_positions: int = 1500
    layer_norm_eps: float = 1e-5
    pool_step: int = 5
    chunk_seconds: float = 1.0

    @property
    def chunk_frames(self) -> int:
        """Encoder frames in one attention chunk (50 a second)."""
        return int(self.chunk_seconds * 50)


@dataclasses.dataclass(frozen=True)
class TalkerConfig(_Checked):
    """Llama decoder over speech codes; the last of `num_audio_tokens` ends an utterance."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    num_audio_tokens: int
    num_text_tokens: int
    audio_bos_token_id: int
    text_eos_token_id: int
    unused_vocab_size: int = 32_000  # rows of the backbone's own table: stored, never read
    rms_eps: float = 1e-6
    rope_theta: float = 10_000.0
    max_positions: int = 4096
    attention_type: str = "full_attention"
    window_size: int = 300  # cache entries kept by attention_type="sliding_window"

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def eos_token(self) -> int:
        return self.num_audio_tokens - 1


@dataclasses.dataclass(frozen=True)
class ImageConfig(_Checked):
    """How pictures are cut into slices before the vision tower."""

    scale_resolution: int = 448
    max_slice_nums: int = 1


@dataclasses.dataclass(frozen=True)
class VenusConfig:
    """The whole model. `vision`/`resampler` are None in audio-only models, `talker` in text-only ones.

    `dtype` is the dtype activations are computed in; norms, softmax, rotary angles and logits are float32 always.
    """

    llm: LLMConfig
    audio: AudioConfig | None
    vision: VisionConfig | None = None
    resampler: ResamplerConfig | None = None
    talker: TalkerConfig | None = None
    image: ImageConfig = ImageConfig()
    name: str = "custom"
    stream_input: bool = True
    dtype: str = "float32"

    def __post_init__(self):
        _check(self)

    def replace(self, **changes) -> VenusConfig:
        """A copy with top-level fields changed; `llm=dict(...)` changes fields of a part.

        Raises:
          ConfigError: an unknown field, or a field of a part this model does not have.
        """
        for key, value in changes.items():
            if isinstance(value, Mapping):
                part = getattr(self, key, None)
                if part is None:
                    raise ConfigError(f"config {self.name!r} has no part {key!r} to change")
                changes[key] = _build(type(part), {**_fields(part), **value}, key)
        return _build(type(self), {**_fields(self), **changes}, "config")

    # --- JSON -------------------------------------------------------------------------------------------------
    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str, source: str = "config.json") -> VenusConfig:
        """Reads `to_json`'s text.

        Raises:
          ConfigError: not JSON, an unknown or a missing key; the message names `source` and the key.
        """
        try:
            raw = json.loads(text)
        except json.JSONDecodeError as e:
            raise ConfigError(f"{source}: not valid JSON ({e})") from e
        if not isinstance(raw, dict):
            raise ConfigError(f"{source}: expected a JSON object, got {type(raw).__name__}")
        kwargs = {}
        for key, value in raw.items():
            if key in _PARTS and value is not None:
                value = _build(_PARTS[key], value, f"{source}: {key}")
            kwargs[key] = value
        return _build(cls, kwargs, source)

    # --- Hugging Face -----------------------------------------------------------------------------------------
    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], source: str = "config.json", name: str = "custom") -> VenusConfig:
        """Reads a MiniCPM-o 4.5 / Realtime-Venus `config.json` (already parsed).

        Parts are present where `init_vision`, `init_audio`, `init_tts` are true (the default) and their block exists.

        Raises:
          ConfigError: a missing key or an unsupported value, named.
        """
        try:
            return cls._from_hf(raw, source, name)
        except ConfigError as e:
            raise e if str(e).startswith(source) else ConfigError(f"{source}: {e}") from e
        except (TypeError, AttributeError, OverflowError) as e:  # a text or a list where a size or a block should be
            raise ConfigError(f"{source}: a value is not of the expected kind ({e})") from e

    @classmethod
    def _from_hf(cls, raw: Mapping[str, Any], source: str, name: str) -> VenusConfig:
        get = _reader(raw, source)
        for key in ("init_vision", "init_audio", "init_tts", "drop_vision_last_layer", "stream_input"):
            if type(raw.get(key, True)) is not bool:
                raise ConfigError(f"{source}: {key} is {raw[key]!r}; expected true or false")
        for block, keys in _ONLY.items():
            values = raw if block is None else raw.get(block) or {}
            if not isinstance(values, Mapping):
                raise ConfigError(f"{source}: {block}: expected a JSON object, got {type(values).__name__}")
            for key, only in keys.items():
                if values.get(key, only) not in (only, None):
                    where = key if block is None else f"{block}.{key}"
                    raise ConfigError(f"{source}: {where} is {values[key]!r}; this model knows only {only!r}")
        theta = raw.get("rope_theta") or (raw.get("rope_parameters") or {}).get("rope_theta")
        if theta is None:  # newer writers move it; silently assuming 10000 would ruin every position
            raise ConfigError(f"{source}: neither rope_theta nor rope_parameters.rope_theta is present")
        hidden = get("hidden_size")
        llm = LLMConfig(
            vocab_size=get("vocab_size"), hidden_size=hidden, intermediate_size=get("intermediate_size"),
            num_layers=get("num_hidden_layers"), num_heads=get("num_attention_heads"),
            num_kv_heads=get("num_key_value_heads"),
            head_dim=raw.get("head_dim") or hidden // max(1, get("num_attention_heads")),
            rms_eps=raw.get("rms_norm_eps", 1e-6), rope_theta=theta,
            max_positions=raw.get("max_position_embeddings", 40_960))

        vision = resampler = audio = talker = None
        if raw.get("init_vision", True) and raw.get("vision_config"):
            v = _reader(raw["vision_config"], f"{source}: vision_config")
            vision = VisionConfig(
                hidden_size=v("hidden_size"), intermediate_size=v("intermediate_size"),
                num_layers=v("num_hidden_layers"), num_heads=v("num_attention_heads"),
                image_size=v("image_size"), patch_size=v("patch_size"),
                num_channels=v("num_channels", 3), layer_norm_eps=v("layer_norm_eps", 1e-6),
                drop_last_layer=bool(raw.get("drop_vision_last_layer", False)))
            resampler = ResamplerConfig(num_queries=get("query_num", 64), hidden_size=hidden, kv_dim=vision.hidden_size)
        if raw.get("init_audio", True) and raw.get("audio_config"):
            a = _reader(raw["audio_config"], f"{source}: audio_config")
            audio = AudioConfig(
                hidden_size=a("d_model"), intermediate_size=a("encoder_ffn_dim"), num_layers=a("encoder_layers"),
                num_heads=a("encoder_attention_heads"), num_mel_bins=a("num_mel_bins", 80),
                max_positions=a("max_source_positions", 1500), pool_step=get("audio_pool_step", 5),
                chunk_seconds=get("audio_chunk_length", 1.0))
        if raw.get("init_tts", True) and raw.get("tts_config"):
            t = _reader(raw["tts_config"], f"{source}: tts_config")
            if t("num_vq", 1) != 1:
                raise ConfigError(f"{source}: tts_config.num_vq={t('num_vq')}; one codebook is supported")
            talker = TalkerConfig(
                hidden_size=t("hidden_size"), intermediate_size=t("intermediate_size"),
                num_layers=t("num_hidden_layers"), num_heads=t("num_attention_heads"),
                num_kv_heads=t("num_key_value_heads"), num_audio_tokens=t("num_audio_tokens"),
                num_text_tokens=t("num_text_tokens"), audio_bos_token_id=t("audio_bos_token_id"),
                text_eos_token_id=t("text_eos_token_id"), max_positions=t("max_position_embeddings", 4096),
                unused_vocab_size=t("vocab_size", 32_000),
                attention_type=t("attention_type", "full_attention"),
                window_size=t("streaming_sliding_window_audio_window_size", 300))
        slices = raw.get("slice_config") or {}
        return cls(llm=llm, audio=audio, vision=vision, resampler=resampler, talker=talker, name=name,
                   image=ImageConfig(scale_resolution=slices.get("scale_resolution", 448),
                                     max_slice_nums=slices.get("max_slice_nums", 1)),
                   stream_input=raw.get("stream_input", False))

    def to_hf(self) -> dict[str, Any]:
        """The inverse of `from_hf`: every key the reference needs, none of its serialisation defaults."""
        llm = self.llm
        out: dict[str, Any] = dict(
            model_type="minicpmo", architectures=["MiniCPMO"], version="4.5", torch_dtype=self.dtype,
            vocab_size=llm.vocab_size, hidden_size=llm.hidden_size, intermediate_size=llm.intermediate_size,
            num_hidden_layers=llm.num_layers, num_attention_heads=llm.num_heads,
            num_key_value_heads=llm.num_kv_heads, head_dim=llm.head_dim, rms_norm_eps=llm.rms_eps,
            rope_theta=llm.rope_theta, max_position_embeddings=llm.max_positions, rope_scaling=None,
            attention_bias=False, hidden_act="silu", tie_word_embeddings=False, sliding_window=None,
            use_sliding_window=False, stream_input=self.stream_input, use_image_id=True, slice_mode=True,
            batch_vision_input=True, vision_batch_size=16, init_vision=self.vision is not None,
            init_audio=self.audio is not None, init_tts=self.talker is not None,
            slice_config=dict(patch_size=self.vision.patch_size if self.vision else 14,
                              scale_resolution=self.image.scale_resolution,
                              max_slice_nums=self.image.max_slice_nums, model_type="minicpmv"))
        if (v := self.vision) is not None:
            out.update(patch_size=v.patch_size, image_size=self.image.scale_resolution,
                       drop_vision_last_layer=v.drop_last_layer, query_num=self.resampler.num_queries)
            out["vision_config"] = dict(
                model_type="siglip_vision_model", hidden_size=v.hidden_size, intermediate_size=v.intermediate_size,
                num_hidden_layers=v.num_layers, num_attention_heads=v.num_heads, num_channels=v.num_channels,
                patch_size=v.patch_size, image_size=v.image_size, layer_norm_eps=v.layer_norm_eps,
                attention_dropout=0.0, hidden_act="gelu_pytorch_tanh")
        if (a := self.audio) is not None:
            out.update(audio_pool_step=a.pool_step, audio_chunk_length=a.chunk_seconds)
            out["audio_config"] = dict(
                model_type="whisper", d_model=a.hidden_size, encoder_ffn_dim=a.intermediate_size,
                encoder_layers=a.num_layers, encoder_attention_heads=a.num_heads, num_mel_bins=a.num_mel_bins,
                max_source_positions=a.max_positions, activation_function="gelu", scale_embedding=False)
        if (t := self.talker) is not None:
            out["tts_config"] = dict(
                model_type="minicpmtts", backbone_model="llama", llm_dim=llm.hidden_size, hidden_size=t.hidden_size,
                intermediate_size=t.intermediate_size, num_hidden_layers=t.num_layers,
                num_attention_heads=t.num_heads, num_key_value_heads=t.num_kv_heads, hidden_act="silu",
                max_position_embeddings=t.max_positions, num_audio_tokens=t.num_audio_tokens,
                num_text_tokens=t.num_text_tokens, num_vq=1, audio_bos_token_id=t.audio_bos_token_id,
                text_eos_token_id=t.text_eos_token_id, vocab_size=t.unused_vocab_size, projector_type="mlp",
                condition_type="hidden_text_merge", normalize_projected_hidden=True, use_text=True,
                use_llm_hidden_state=False, attention_type=t.attention_type,
                streaming_sliding_window_audio_window_size=t.window_size,
                audio_tokenizer_type="s3tokenizer", audio_tokenizer_sample_rate=16_000)
        return out


# Keys of Hugging Face's config that would change the arithmetic, and the only value each may have.
_ONLY = {
    None: {"model_type": "minicpmo", "tie_word_embeddings": False, "rope_scaling": None, "attention_bias": False,
           "hidden_act": "silu", "use_sliding_window": False},
    "rope_parameters": {"rope_type": "default"},
    "vision_config": {"hidden_act": "gelu_pytorch_tanh"},
    "audio_config": {"activation_function": "gelu", "scale_embedding": False},
    "tts_config": {"hidden_act": "silu", "projector_type": "mlp", "backbone_model": "llama",
                   "normalize_projected_hidden": True, "condition_type": "hidden_text_merge"}}
_PARTS = {"llm": LLMConfig, "audio": AudioConfig, "vision": VisionConfig, "resampler": ResamplerConfig,
          "talker": TalkerConfig, "image": ImageConfig}
ATTENTION_TYPES = ("full_attention", "sliding_window", "sliding_recompute", "reindex")


def _fields(part: Any) -> dict[str, Any]:
    return {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}


def _reader(raw: Any, source: str):
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{source}: expected a JSON object, got {type(raw).__name__}")
    missing = object()

    def get(key: str, default: Any = missing):
        value = raw.get(key)
        if value is None:
            if default is missing:
                raise ConfigError(f"{source}: missing key {key!r}")
            return default
        if type(value) not in (int, float, bool, str):
            raise ConfigError(f"{source}: {key} is {value!r}; expected one value")
        return value

    return get


def _build(cls, kwargs: Any, source: str):
    if not isinstance(kwargs, Mapping):
        raise ConfigError(f"{source}: expected an object with fields, got {kwargs!r}")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    if unknown := sorted(set(kwargs) - set(fields)):
        raise ConfigError(f"{source}: unknown key {unknown[0]!r}; known keys: {', '.join(fields)}")
    try:
        return cls(**kwargs)
    except TypeError as e:
        raise ConfigError(f"{source}: {e}") from e


def _check(c: VenusConfig) -> None:
    def need(ok: bool, what: str):
        if not ok:
            raise ConfigError(f"config {c.name!r}: {what}")

    need(isinstance(c.name, str), "name must be a text")
    need(c.dtype in ("float32", "bfloat16"), f"dtype {c.dtype!r} is not float32 or bfloat16")
    for key, part in _PARTS.items():
        value, optional = getattr(c, key), key not in ("llm", "image")
        need(isinstance(value, part) or (optional and value is None), f"{key} is {value!r}; expected a {part.__name__}")
    need(c.llm.num_heads % c.llm.num_kv_heads == 0, "llm.num_heads must be a multiple of llm.num_kv_heads")
    need(c.llm.head_dim % 2 == 0, "llm.head_dim must be even: rotary positions turn pairs")
    need((c.vision is None) == (c.resampler is None), "vision and resampler come together")
    if c.resampler is not None:
        need(c.resampler.hidden_size % 128 == 0, "the resampler's width must be a multiple of 128")
        need(c.resampler.hidden_size == c.llm.hidden_size, "resampler.hidden_size must equal llm.hidden_size")
        need(c.resampler.kv_dim == c.vision.hidden_size, "resampler.kv_dim must equal vision.hidden_size")
        need(c.vision.hidden_size % c.vision.num_heads == 0, "vision.hidden_size must divide by its heads")
        need(c.vision.positions_per_side > 0, "vision.image_size is smaller than one patch")
        need(c.vision.depth > 0, "vision has no block left when its last one is dropped")
    if c.audio is not None:
        need(c.audio.hidden_size % c.audio.num_heads == 0, "audio.hidden_size must divide by its heads")
        need(0.02 <= c.audio.chunk_seconds <= 30, "audio.chunk_seconds must lie between 0.02 (one encoder frame) and 30")
    if c.talker is not None:
        need(c.talker.hidden_size % c.talker.num_heads == 0, "talker.hidden_size must divide by its heads")
        need(c.talker.num_heads % c.talker.num_kv_heads == 0, "talker.num_heads must be a multiple of its kv heads")
        need(c.talker.head_dim % 2 == 0, "talker head width must be even: rotary positions turn pairs")
        need(c.talker.attention_type in ATTENTION_TYPES,
             f"talker.attention_type {c.talker.attention_type!r} is not one of {', '.join(ATTENTION_TYPES)}")


# --- published sizes ------------------------------------------------------------------------------------------------
BASE_VOCAB_SIZE = 151_748  # MiniCPM-o 4.5 before the four added tokens


def omni_9b(added_tokens: bool = True, **changes) -> VenusConfig:
    """MiniCPM-o 4.5 / Realtime-Venus-Omni: 9,371,787,666 parameters plus the rows of the four added tokens."""
    config = VenusConfig(
        name="omni_9b",
        dtype="bfloat16",
        llm=LLMConfig(vocab_size=BASE_VOCAB_SIZE + NUM_ADDED_TOKENS * added_tokens, hidden_size=4096,
                      intermediate_size=12_288, num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128),
        vision=VisionConfig(hidden_size=1152, intermediate_size=4304, num_layers=27, num_heads=16),
        resampler=ResamplerConfig(num_queries=64, hidden_size=4096, kv_dim=1152),
        audio=AudioConfig(hidden_size=1024, intermediate_size=4096, num_layers=24, num_heads=16),
        talker=TalkerConfig(hidden_size=768, intermediate_size=3072, num_layers=20, num_heads=12, num_kv_heads=12,
                            num_audio_tokens=6562, num_text_tokens=152_064, audio_bos_token_id=151_687,
                            text_eos_token_id=151_692))
    return config.replace(**changes)


def audio_9b(added_tokens: bool = True, **changes) -> VenusConfig:
    """Realtime-Venus-Audio: `omni_9b` without vision tower and resampler, 8,865,087,650 parameters plus added rows."""
    return omni_9b(added_tokens, **{"name": "audio_9b", "vision": None, "resampler": None, **changes})

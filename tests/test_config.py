import dataclasses
import json

import pytest

from venus_jax.config import NUM_ADDED_TOKENS, VenusConfig, audio_9b, omni_9b
from venus_jax.errors import ConfigError


@pytest.fixture(scope="module")
def raw(golden) -> dict:
    """A `config.json` as the reference writes it, serialisation defaults and all."""
    return json.loads((golden / "checkpoint" / "config.json").read_text())


@pytest.fixture
def small(raw) -> VenusConfig:
    return VenusConfig.from_hf(raw)


def edited(config: VenusConfig, part: str | None = None, **changes) -> str:
    out = json.loads(config.to_json())
    (out[part] if part else out).update(changes)
    return json.dumps(out)


# --- Hugging Face's config.json -------------------------------------------------------------------------------------
def test_reads_the_reference(raw, small):
    vision, audio, talker = raw["vision_config"], raw["audio_config"], raw["tts_config"]
    assert (small.llm.vocab_size, small.llm.hidden_size, small.llm.num_layers) == (
        raw["vocab_size"], raw["hidden_size"], raw["num_hidden_layers"])
    assert (small.llm.num_heads, small.llm.num_kv_heads, small.llm.head_dim, small.llm.rope_theta) == (
        raw["num_attention_heads"], raw["num_key_value_heads"], raw["head_dim"], raw["rope_theta"])
    assert (small.vision.hidden_size, small.vision.depth, small.vision.image_size) == (
        vision["hidden_size"], vision["num_hidden_layers"], vision["image_size"])
    assert (small.resampler.num_queries, small.resampler.hidden_size, small.resampler.kv_dim) == (
        raw["query_num"], raw["hidden_size"], vision["hidden_size"])
    assert (small.audio.hidden_size, small.audio.num_layers, small.audio.max_positions, small.audio.chunk_frames) == (
        audio["d_model"], audio["encoder_layers"], audio["max_source_positions"], 50)
    assert (small.talker.num_audio_tokens, small.talker.num_text_tokens, small.talker.audio_bos_token_id) == (
        talker["num_audio_tokens"], talker["num_text_tokens"], talker["audio_bos_token_id"])
    assert small.talker.eos_token == talker["num_audio_tokens"] - 1
    assert small.stream_input is raw["stream_input"] and small.image.max_slice_nums == 1


@pytest.mark.parametrize("make", [omni_9b, audio_9b, lambda: omni_9b(added_tokens=False), lambda: omni_9b(talker=None),
                                  lambda: omni_9b(vision=dict(drop_last_layer=True), talker=dict(window_size=77)),
                                  lambda: omni_9b(stream_input=False, image=dict(max_slice_nums=9))])
def test_hugging_face_round_trip(make):
    config = make()
    back = VenusConfig.from_hf(json.loads(json.dumps(config.to_hf())), name=config.name)
    assert back.replace(dtype=config.dtype) == config


def test_hugging_face_round_trip_of_the_fixture(small):
    assert VenusConfig.from_hf(small.to_hf()) == small


def test_parts_that_are_switched_off_or_absent(raw):
    assert VenusConfig.from_hf({**raw, "init_vision": False}).vision is None
    assert VenusConfig.from_hf({**raw, "init_vision": False}).resampler is None
    assert VenusConfig.from_hf({**raw, "init_audio": False}).audio is None
    assert VenusConfig.from_hf({**raw, "init_tts": False}).talker is None
    assert VenusConfig.from_hf({k: v for k, v in raw.items() if k != "tts_config"}).talker is None


def test_last_vision_layer_may_be_left_out(raw):
    config = VenusConfig.from_hf({**raw, "drop_vision_last_layer": True})
    assert config.vision.depth == raw["vision_config"]["num_hidden_layers"] - 1


def test_rope_theta_where_newer_writers_put_it(raw):
    moved = {**raw, "rope_theta": None, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    assert VenusConfig.from_hf(moved).llm.rope_theta == 5e5


def test_head_width_follows_from_the_heads_where_it_is_not_given(raw):
    config = VenusConfig.from_hf({k: v for k, v in raw.items() if k != "head_dim"})
    assert config.llm.head_dim == raw["hidden_size"] // raw["num_attention_heads"]


@pytest.mark.parametrize("changes, message", [
    (dict(vocab_size=None), "missing key 'vocab_size'"),
    (dict(num_key_value_heads=None), "missing key 'num_key_value_heads'"),
    (dict(vision_config={"image_size": 980}), "vision_config: missing key 'hidden_size'"),
    (dict(audio_config={"num_mel_bins": 80}), "audio_config: missing key 'd_model'"),
    (dict(tts_config={"num_vq": 1}), "tts_config: missing key 'hidden_size'"),
    (dict(tts_config={"num_vq": 4}), "tts_config.num_vq=4; one codebook"),
    (dict(rope_theta=None), "neither rope_theta nor rope_parameters.rope_theta"),
    (dict(rope_scaling={"type": "yarn"}), "rope_scaling is .*yarn.*; this model knows only None"),
    (dict(tie_word_embeddings=True), "tie_word_embeddings is True; this model knows only False"),
    (dict(attention_bias=True), "attention_bias is True"),
    (dict(hidden_act="gelu"), "hidden_act is 'gelu'; this model knows only 'silu'"),
    (dict(model_type="qwen3"), "model_type is 'qwen3'"),
    (dict(hidden_size="256"), "LLMConfig.hidden_size is '256'; expected a positive whole number"),
    (dict(hidden_size="256", head_dim=None), "a value is not of the expected kind"),
    (dict(num_attention_heads=0, head_dim=None), "LLMConfig.num_heads is 0"),
    (dict(vision_config="x"), "vision_config: expected a JSON object, got str"),
    (dict(rope_theta="abc"), "LLMConfig.rope_theta is 'abc'"),
    (dict(rope_theta=10**400), "LLMConfig.rope_theta is 1000"),
    (dict(vocab_size=10**400), "LLMConfig.vocab_size is 1000"),
    (dict(audio_config={"scale_embedding": True}), "audio_config.scale_embedding is True"),
    (dict(vision_config={"hidden_act": "relu"}), "vision_config.hidden_act is 'relu'"),
    (dict(rope_parameters={"rope_type": "yarn", "rope_theta": 1e6}), "rope_parameters.rope_type is 'yarn'"),
    (dict(use_sliding_window=True), "use_sliding_window is True"),
    (dict(tts_config={"normalize_projected_hidden": False}), "normalize_projected_hidden is False"),
    (dict(slice_config=[1]), "a value is not of the expected kind"),
    (dict(init_vision="false"), "init_vision is 'false'; expected true or false"),
])
def test_hugging_face_values_that_cannot_be_used(raw, changes, message):
    with pytest.raises(ConfigError, match=f"dir/config.json: .*{message}"):
        VenusConfig.from_hf({**raw, **changes}, source="dir/config.json")


# --- our config.json ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [omni_9b, audio_9b, lambda: omni_9b(llm=dict(vocab_multiple=256), dtype="float32"),
                                  lambda: audio_9b(audio=None, talker=None, stream_input=False)])
def test_json_round_trip(make):
    assert VenusConfig.from_json(make().to_json()) == make()


@pytest.mark.parametrize("part, changes, message", [
    (None, dict(speed=1), "x.json: unknown key 'speed'; known keys: llm, audio"),
    ("llm", dict(hidden=1), "x.json: llm: unknown key 'hidden'; known keys: vocab_size"),
    ("talker", dict(vocab=1), "x.json: talker: unknown key 'vocab'"),
    ("llm", dict(num_layers=-1), "LLMConfig.num_layers is -1; expected a positive whole number"),
    ("llm", dict(rms_eps=float("nan")), "LLMConfig.rms_eps is nan"),
    ("llm", dict(vocab_multiple=0), "LLMConfig.vocab_multiple is 0"),
    ("vision", dict(num_heads=0), "VisionConfig.num_heads is 0"),
    ("llm", dict(num_kv_heads=3), "llm.num_heads must be a multiple of llm.num_kv_heads"),
    ("vision", dict(hidden_size=1150), "resampler.kv_dim must equal vision.hidden_size"),
    ("vision", dict(image_size=5), "vision.image_size is smaller than one patch"),
    ("vision", dict(num_heads=7), "vision.hidden_size must divide by its heads"),
    ("vision", dict(num_layers=1, drop_last_layer=True), "vision has no block left"),
    ("llm", dict(vocab_size="426"), "LLMConfig.vocab_size is '426'; expected a positive whole number"),
    ("llm", dict(head_dim=127), "llm.head_dim must be even"),
    ("llm", dict(rope_theta=float("inf")), "LLMConfig.rope_theta is inf"),
    ("image", dict(scale_resolution=-1), "ImageConfig.scale_resolution is -1"),
    ("talker", dict(attention_type="x"), "talker.attention_type 'x' is not one of full_attention"),
    ("audio", dict(chunk_seconds=0.001), "audio.chunk_seconds must lie between"),
    (None, dict(llm=None), "llm is None; expected a LLMConfig"),
    (None, dict(llm=5), "x.json: llm: expected an object with fields, got 5"),
    (None, dict(image=None), "image is None; expected a ImageConfig"),
    (None, dict(name=5), "name must be a text"),
    ("audio", dict(num_heads=7), "audio.hidden_size must divide by its heads"),
    ("talker", dict(num_heads=7), "talker.hidden_size must divide by its heads"),
    ("resampler", dict(hidden_size=2048), "resampler.hidden_size must equal llm.hidden_size"),
    ("resampler", dict(hidden_size=4000), "the resampler's width must be a multiple of 128"),
    (None, dict(resampler=None), "vision and resampler come together"),
    (None, dict(dtype="int8"), "dtype 'int8' is not float32 or bfloat16"),
])
def test_values_that_cannot_be_used(part, changes, message):
    with pytest.raises(ConfigError, match=message):
        VenusConfig.from_json(edited(omni_9b(), part, **changes), source="x.json")


def test_missing_keys_are_named():
    out = json.loads(omni_9b().to_json())
    with pytest.raises(ConfigError, match="x.json.*'llm'"):
        VenusConfig.from_json(json.dumps({k: v for k, v in out.items() if k != "llm"}), "x.json")
    del out["llm"]["num_layers"]
    with pytest.raises(ConfigError, match="x.json: llm: .*'num_layers'"):
        VenusConfig.from_json(json.dumps(out), "x.json")


@pytest.mark.parametrize("text, message", [("{", "x.json: not valid JSON"), ("", "x.json: not valid JSON"),
                                           ("[]", "x.json: expected a JSON object, got list")])
def test_text_that_is_no_object(text, message):
    with pytest.raises(ConfigError, match=message):
        VenusConfig.from_json(text, source="x.json")


# --- the published sizes --------------------------------------------------------------------------------------------
def test_published_sizes():
    omni = omni_9b()
    assert omni.llm.vocab_size == 151_752 and omni_9b(added_tokens=False).llm.vocab_size == 151_748
    assert omni.llm.vocab_size - omni_9b(added_tokens=False).llm.vocab_size == NUM_ADDED_TOKENS
    assert omni.llm.num_heads * omni.llm.head_dim == omni.llm.hidden_size and omni.llm.max_positions == 40_960
    assert (omni.vision.depth, omni.vision.positions_per_side, omni.vision.patch_dim) == (27, 70, 588)
    assert (omni.resampler.num_heads, omni.audio.chunk_frames) == (32, 50)
    assert (omni.talker.head_dim, omni.talker.eos_token) == (64, 6561)
    assert audio_9b().replace(name=omni.name, vision=omni.vision, resampler=omni.resampler) == omni


def test_published_parameter_count():
    """Counted from the sizes alone, so that a wrong size shows before any network is built."""
    config = omni_9b(added_tokens=False)
    c, v, a, t = config.llm, config.vision, config.audio, config.talker
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    layer = c.hidden_size * (2 * q + 2 * kv + 3 * c.intermediate_size + 2) + 2 * c.head_dim
    llm = 2 * c.vocab_size * c.hidden_size + c.num_layers * layer + c.hidden_size

    def encoder_layer(width, hidden, bias_free=0):  # four projections, two norms, two feed-forward matrices
        return 4 * width * (width + 1) - bias_free + 4 * width + 2 * width * hidden + hidden + width

    vision = (v.depth * encoder_layer(v.hidden_size, v.intermediate_size) + (v.patch_dim + 1) * v.hidden_size
              + v.positions_per_side**2 * v.hidden_size + 2 * v.hidden_size)
    d = config.resampler.hidden_size
    resampler = config.resampler.num_queries * d + config.resampler.kv_dim * d + 4 * d * (d + 1) + 6 * d + d * d
    audio = (a.num_layers * encoder_layer(a.hidden_size, a.intermediate_size, bias_free=a.hidden_size)
             + (3 * a.num_mel_bins + 1) * a.hidden_size + (3 * a.hidden_size + 1) * a.hidden_size
             + a.max_positions * a.hidden_size + 2 * a.hidden_size)
    projection = (a.intermediate_size // 4 + 1) * d + (d + 1) * d
    t_layer = 4 * t.hidden_size**2 + 3 * t.hidden_size * t.intermediate_size + 2 * t.hidden_size
    projector = (d + 1) * t.hidden_size + (t.hidden_size + 1) * t.hidden_size
    talker = (t.num_layers * t_layer + t.hidden_size + 2 * projector
              + (t.num_text_tokens + t.unused_vocab_size + 2 * t.num_audio_tokens) * t.hidden_size + t.num_audio_tokens)
    assert llm + vision + resampler + audio + projection + talker == 9_371_787_666
    assert llm + audio + projection + talker == 8_865_087_650


def test_padded_vocabulary_rows():
    assert omni_9b(llm=dict(vocab_multiple=256)).llm.vocab_rows == 151_808
    assert omni_9b().llm.vocab_rows == omni_9b().llm.vocab_size


def test_configs_are_static_arguments():
    assert hash(omni_9b()) == hash(omni_9b()) and omni_9b() == omni_9b() != audio_9b()
    with pytest.raises(dataclasses.FrozenInstanceError):
        omni_9b().llm.num_layers = 1


def test_replace_changes_parts_and_leaves_the_original():
    omni = omni_9b()
    short = omni.replace(llm=dict(num_layers=2), name="short")
    assert (short.llm.num_layers, short.llm.hidden_size, short.name) == (2, 4096, "short")
    assert (omni.llm.num_layers, omni.name) == (36, "omni_9b")
    with pytest.raises(ConfigError, match="num_layers is 0"):
        omni.replace(llm=dict(num_layers=0))


@pytest.mark.parametrize("changes, message", [
    (dict(foo=1), "unknown key 'foo'"),
    (dict(llm=dict(foo=1)), "llm: unknown key 'foo'"),
    (dict(vision=dict(num_layers=3)), "config 'audio_9b' has no part 'vision'"),
])
def test_changes_that_cannot_be_made(changes, message):
    with pytest.raises(ConfigError, match=message):
        audio_9b().replace(**changes)

"""The map between tensor names and parameters, held against what others know of it."""

import json
import math
import re

import numpy as np
import pytest
import safetensors.numpy

from venus_jax import sharding
from venus_jax.checkpoints import hf, table
from venus_jax.config import VenusConfig, audio_9b, omni_9b


@pytest.mark.parametrize("config, tensors, parameters", [
    (omni_9b(added_tokens=False), 1414, 9_371_787_666), (audio_9b(added_tokens=False), 964, 8_865_087_650)],
    ids=["omni_9b", "audio_9b"])
def test_published_models_are_covered_exactly(config, tensors, parameters):
    theirs, ours = table.hf_shapes(config), table.param_shapes(config)
    assert len(theirs) == tensors
    assert sum(map(math.prod, theirs.values())) == sum(map(math.prod, ours.values())) == parameters


def test_names_and_shapes_are_the_recorded_models(golden):
    config = VenusConfig.from_hf(json.loads((golden / "checkpoint/config.json").read_text()))
    recorded = json.loads((golden / "checkpoint/tensor_index.json").read_text())
    config = config.replace(talker=dict(unused_vocab_size=recorded[table.UNUSED_EMBED]["shape"][0]))
    assert table.hf_shapes(config) == {name: tuple(entry["shape"]) for name, entry in recorded.items()}


def test_paths_are_the_documented_ones(request):
    text = (request.config.rootpath / "docs/params.md").read_text()
    documented = re.findall(r"`([a-z_]+/[^`]*|resampler/proj)`", " ".join(re.findall(r"^\| (.*?) \|", text, re.M)))
    patterns = [re.sub(r"\\\{(.*?)\\\}", lambda m: f"({m[1].replace(',', '|')})", re.escape(d)).replace(r"\.\.\.", ".*")
                for d in documented]
    for path in table.param_shapes(omni_9b()):
        assert any(re.fullmatch(pattern, path) for pattern in patterns), path


def test_every_parameter_has_a_sharding():
    for path, shape in table.param_shapes(omni_9b()).items():
        sharding.logical_axes(path, len(shape))


def test_each_kind_puts_numbers_where_the_network_expects_them(golden):
    raw = safetensors.numpy.load_file(golden / "checkpoint/model.safetensors")
    _, params = hf.import_hf(golden / "checkpoint", added_tokens=False)
    width = params["resampler"]["proj"].shape[0]
    expected = {
        "llm/embed/embedding": raw["llm.model.embed_tokens.weight"],
        "llm/lm_head/kernel": raw["llm.lm_head.weight"].T,
        "llm/layers/mlp/down_proj/kernel": np.stack(
            [raw[f"llm.model.layers.{i}.mlp.down_proj.weight"].T for i in range(3)]),
        "llm/layers/attn/q_norm/scale": np.stack(
            [raw[f"llm.model.layers.{i}.self_attn.q_norm.weight"] for i in range(3)]),
        "vision/patch_embed/kernel": raw["vpm.embeddings.patch_embedding.weight"].reshape(-1, 588).T,
        "resampler/query": raw["resampler.query"],
        "resampler/proj": raw["resampler.proj"],
        "resampler/attn/k_proj/kernel": raw["resampler.attn.in_proj_weight"][width:2 * width].T,
        "resampler/attn/v_proj/bias": raw["resampler.attn.in_proj_bias"][2 * width:],
        "audio/conv1/kernel": np.transpose(raw["apm.conv1.weight"], (2, 1, 0)),
        "audio/layers/mlp/fc1/bias": np.stack([raw[f"apm.layers.{i}.fc1.bias"] for i in range(2)]),
        "talker/head_code/scale": raw["tts.head_code.0.parametrizations.weight.original0"][:, 0],
        "talker/head_code/kernel": raw["tts.head_code.0.parametrizations.weight.original1"].T,
        "talker/projector_semantic/linear1/kernel": raw["tts.projector_semantic.linear1.weight"].T,
    }
    found = dict(sharding.paths(params))
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)


def test_parts_that_the_config_lacks_have_no_rules(lab):
    config = lab.tiny(vision=False, audio=False, talker=False)
    assert {path.split("/")[0] for path in table.param_shapes(config)} == {"llm"}
    assert all(name.startswith("llm.") for name in table.hf_shapes(config))


def test_rows_that_pad_the_vocabulary_live_only_in_memory(lab):
    config = lab.tiny(rows=426).replace(llm=dict(vocab_multiple=128))
    live, stored = table.param_shapes(config), table.param_shapes(config, padded=False)
    assert live["llm/lm_head/kernel"] == (128, 512) and stored["llm/lm_head/kernel"] == (128, 426)
    assert table.hf_shapes(config)["llm.lm_head.weight"] == (426, 128)

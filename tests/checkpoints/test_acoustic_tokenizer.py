"""The speech tokenizer's tensors: to our tree and back, and out of an ONNX file named as the published one."""

import numpy as np
import onnx
import pytest
import safetensors.numpy
from onnx import TensorProto, helper, numpy_helper

from venus_jax import sharding
from venus_jax.acoustic.config import SpeechTokenizerConfig
from venus_jax.checkpoints import acoustic_tokenizer
from venus_jax.errors import CheckpointError


@pytest.fixture(scope="module")
def tensors(golden):
    return safetensors.numpy.load_file(golden / "token2wav/speech_tokenizer.safetensors")


def random_tensors():
    """Two layers of widths that all differ."""
    config = SpeechTokenizerConfig(num_mels=5, hidden_size=128, num_heads=2, num_layers=2, fsmn_kernel=7,
                                   codebook_dims=3)
    rng = np.random.default_rng(0)
    return config, {name: rng.standard_normal(rule.shape, np.float32)
                    for rule in acoustic_tokenizer.rules(config) for name in rule.names}


def test_recorded_tensors_there_and_back(tensors):
    config, params = acoustic_tokenizer.from_tensors(tensors)
    assert config == SpeechTokenizerConfig(hidden_size=64, num_heads=1, num_layers=1)
    back = acoustic_tokenizer.to_tensors(config, params)
    assert back.keys() == tensors.keys()
    for name, x in tensors.items():
        np.testing.assert_array_equal(back[name], x, err_msg=name)


def test_sizes_are_read_off_the_tensors():
    config, tensors = random_tensors()
    found, params = acoustic_tokenizer.from_tensors(tensors)
    assert found == config
    assert params["layers"]["attn"]["memory"]["kernel"].shape == (2, 7, 1, 128)
    np.testing.assert_array_equal(params["layers"]["mlp"]["fc1"]["kernel"][1],
                                  tensors["encoder.blocks.1.mlp.0.weight"].T)


def test_what_does_not_fit_is_named(tensors):
    for change, match in ((lambda t: t.pop("encoder.conv2.bias"), "voice: missing tensor encoder.conv2.bias"),
                          (lambda t: t.update(extra=np.ones(1)), "voice: unused tensor extra"),
                          (lambda t: t.update({"encoder.conv2.bias": np.ones(3)}), r"conv2.bias has shape \[3\]"),
                          (lambda t: t.pop("encoder.conv1.weight"), "no tensor encoder.conv1.weight of 3 axes"),
                          (lambda t: t.update({"encoder.conv1.weight": np.ones((65, 5, 3))}), "a multiple of 64")):
        changed = dict(tensors)
        change(changed)
        with pytest.raises(CheckpointError, match=match):
            acoustic_tokenizer.from_tensors(changed, "voice")
    config, params = acoustic_tokenizer.from_tensors(tensors)
    with pytest.raises(CheckpointError, match=r"parameter conv1/bias has shape None, expected \(64,\)"):
        acoustic_tokenizer.to_tensors(config, params | {"conv1": {"kernel": params["conv1"]["kernel"]}})


def published(tensors, decomposed):
    """An ONNX model that keeps `tensors` as the published one does: weights without names, nodes with scopes."""
    nodes, weights = [], []

    def add(op, name, *arrays, turned=False):
        inputs = [f"t{len(nodes)}"]
        for x in arrays:
            inputs.append(f"onnx::{op}_{1000 + len(weights)}")
            weights.append(numpy_helper.from_array(np.ascontiguousarray(x.T if turned else x), inputs[-1]))
        nodes.append(helper.make_node(op, inputs, [f"t{len(nodes) + 1}"], name=name))

    def linear(scope, name):
        add("MatMul", f"{scope}/MatMul", tensors[f"{name}.weight"], turned=True)
        if f"{name}.bias" in tensors:
            add("Add", f"{scope}/Add", tensors[f"{name}.bias"])

    def norm(scope, name):
        pair = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
        if decomposed:
            add("Add", f"{scope}/Add", np.float32(1e-6).reshape(1))
            add("Mul", f"{scope}/Mul", pair[0])
            add("Add", f"{scope}/Add_1", pair[1])
        else:
            add("LayerNormalization", f"{scope}/LayerNormalization", *pair)

    for n in (1, 2):
        add("Conv", f"/conv{n}/Conv", tensors[f"encoder.conv{n}.weight"], tensors[f"encoder.conv{n}.bias"])
        add("Mul", f"/Mul_{n}", np.float32([0.5]))  # of a GELU
    layers = 1 + max(int(name.split(".")[2]) for name in tensors if "blocks" in name)
    for i in range(layers):
        block, scope = f"encoder.blocks.{i}", f"/blocks.{i}"
        norm(f"{scope}/attn_ln", f"{block}.attn_ln")
        for name in ("query", "key", "value"):
            linear(f"{scope}/attn/{name}", f"{block}.attn.{name}")
        add("Mul", f"{scope}/attn/Mul", np.ones((4, 64), np.float32))  # of the rotation: not a weight
        add("Conv", f"{scope}/attn/fsmn_block/Conv", tensors[f"{block}.attn.fsmn_block.weight"])
        linear(f"{scope}/attn/out", f"{block}.attn.out")
        norm(f"{scope}/mlp_ln", f"{block}.mlp_ln")
        linear(f"{scope}/mlp/mlp.0", f"{block}.mlp.0")
        add("Mul", f"{scope}/mlp/mlp.1/Mul", np.ones(2, np.float32))
        linear(f"{scope}/mlp/mlp.2", f"{block}.mlp.2")
    linear("/quantizer/project_in", "quantizer._codebook.project_down")
    add("Mul", "/quantizer/Mul", 3 ** np.arange(8, dtype=np.float32))  # powers: not a weight
    value = lambda name: helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
    return helper.make_model(helper.make_graph(nodes, "g", [value("t0")], [value(f"t{len(nodes)}")], weights))


@pytest.mark.parametrize("decomposed", [False, True])
def test_an_onnx_file(tmp_path, decomposed):
    config, tensors = random_tensors()
    onnx.save(published(tensors, decomposed), tmp_path / "tokenizer.onnx")
    found, params = acoustic_tokenizer.from_onnx(tmp_path / "tokenizer.onnx")
    assert found == config
    for (path, a), (_, b) in zip(sharding.paths(params), sharding.paths(acoustic_tokenizer.from_tensors(tensors)[1]),
                                 strict=True):
        np.testing.assert_array_equal(a, b, err_msg=path)


def test_an_onnx_file_of_another_network(tmp_path):
    _, tensors = random_tensors()
    model = published(tensors, False)
    model.graph.node.remove(next(node for node in model.graph.node if node.name.endswith("blocks.1/attn/key/MatMul")))
    onnx.save(model, tmp_path / "tokenizer.onnx")
    with pytest.raises(CheckpointError, match="tokenizer.onnx: missing tensor encoder.blocks.1.attn.key.weight"):
        acoustic_tokenizer.from_onnx(tmp_path / "tokenizer.onnx")

"""CAM++ out of ONNX files: folded or not, one tree; and files of other networks."""

import jax
import numpy as np
import onnx
import pytest

from tests.checkpoints import campplus_onnx
from venus_jax import sharding
from venus_jax.acoustic import speaker
from venus_jax.acoustic.config import SpeakerConfig
from venus_jax.checkpoints import acoustic_speaker
from venus_jax.errors import CheckpointError


def shapes(config):
    """What the network itself has."""
    model = speaker.SpeakerEncoder(config)
    init = lambda: model.init(jax.random.key(0), np.zeros((1, 300, config.num_bins)), np.array([300]))
    return {path: x.shape for path, x in sharding.paths(jax.eval_shape(init)["params"])}


def test_sizes_and_shapes_come_from_the_file(tmp_path):
    config, params = acoustic_speaker.from_onnx(campplus_onnx.save(tmp_path / "campplus.onnx"))
    assert config == SpeakerConfig(num_bins=16, head_channels=4, head_blocks=(2, 2), tdnn_channels=8,
                                   num_layers=(2, 3, 1), dilations=(1, 2, 3), growth=4, bottleneck=8, mask_channels=4,
                                   embedding_size=12)
    assert {path: x.shape for path, x in sharding.paths(params)} == shapes(config)


def test_published_sizes():
    """The paper's 7.18 million parameters, counted with an embedding of 512; the published file's has 192."""
    count = sum(np.prod(shape) for shape in shapes(SpeakerConfig(embedding_size=512)).values())
    assert abs(count - 7.18e6) < 0.02e6


def test_folded_or_not_the_tree_is_the_same(tmp_path):
    """Of the unfolded file, every normalisation that alone reads a convolution is folded here."""
    (folded_config, folded), (config, unfolded) = (acoustic_speaker.from_onnx(campplus_onnx.save(
        tmp_path / f"{name}.onnx", name == "folded")) for name in ("folded", "unfolded"))
    assert config == folded_config
    for (path, a), (other, b) in zip(sharding.paths(folded), sharding.paths(unfolded), strict=True):
        assert path == other
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6, err_msg=path)


def drop(graph, op, nth):
    """Takes an operation out, its reader reads what it read."""
    node = [node for node in graph.node if node.op_type == op][nth]
    for other in graph.node:
        for n, name in enumerate(other.input):
            if name == node.output[0]:
                other.input[n] = node.input[0]
    graph.node.remove(node)


@pytest.mark.parametrize("op, nth", [("Conv", 0), ("Conv", 2), ("Conv", 14), ("Conv", -1), ("BatchNormalization", 0),
                                     ("BatchNormalization", -2)])
def test_a_network_that_lacks_an_operation_is_refused(tmp_path, op, nth):
    model = campplus_onnx.model()
    drop(model.graph, op, nth)
    onnx.save(model, tmp_path / "campplus.onnx")
    with pytest.raises(CheckpointError, match="campplus.onnx: not a CAM.. speaker encoder"):
        acoustic_speaker.from_onnx(tmp_path / "campplus.onnx")


def test_other_networks_are_refused(tmp_path):
    model = campplus_onnx.model()
    del model.graph.node[3:]
    onnx.save(model, tmp_path / "other.onnx")
    with pytest.raises(CheckpointError, match="other.onnx: not a CAM.. speaker encoder"):
        acoustic_speaker.from_onnx(tmp_path / "other.onnx")

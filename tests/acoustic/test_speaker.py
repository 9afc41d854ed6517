"""The speaker encoder against the same network run operation by operation, in batches of any lengths."""

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

from tests.checkpoints import campplus_onnx
from venus_jax.acoustic import speaker
from venus_jax.checkpoints import acoustic_speaker

FRAMES, SHORT = 330, 251  # each ends within its second segment of 100 (after a stride of 2)


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    return acoustic_speaker.from_onnx(campplus_onnx.save(tmp_path_factory.mktemp("onnx") / "campplus.onnx"))


@pytest.fixture(scope="module")
def features():
    return 2 * np.random.default_rng(1).standard_normal((3, FRAMES, 16)).astype(np.float32)


def embed(network, features, lengths):
    config, params = network
    return np.asarray(speaker.embed(params, config, features, np.array(lengths)))


def by_hand(features):
    """The unfolded graph, run by ONNX's own NumPy operators."""
    run = ReferenceEvaluator(campplus_onnx.model(folded=False, frames=len(features)))
    return run.run(None, {"feats": features[None]})[0][0]


def test_a_ragged_batch_equals_each_sound_alone(network, features):
    junk = features.copy()
    junk[1, SHORT:] = np.nan
    vectors = embed(network, junk, [FRAMES, SHORT, FRAMES])
    assert vectors.shape == (3, campplus_onnx.EMBEDDING) and vectors.dtype == np.float32
    np.testing.assert_allclose(vectors[0], by_hand(features[0]), rtol=0, atol=1e-5)
    np.testing.assert_allclose(vectors[1], by_hand(features[1, :SHORT]), rtol=0, atol=1e-5)


def test_rows_are_independent(network, features):
    others = features.copy()
    others[0] += 1
    a, b = (embed(network, x, [FRAMES, SHORT, FRAMES]) for x in (features, others))
    np.testing.assert_array_equal(a[1:], b[1:])
    assert np.abs(a[0] - b[0]).max() > 1e-2


def test_a_row_without_sound_leaves_the_others_alone(network, features):
    a, b = (embed(network, features, [FRAMES, n, FRAMES]) for n in (0, SHORT))
    np.testing.assert_array_equal(a[::2], b[::2])

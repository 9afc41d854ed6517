"""Slicing, patching and position ids, against the recorded reference."""

import hashlib
import io
import json

import numpy as np
import pytest
from PIL import Image

from venus_jax.errors import MediaError
from venus_jax.media import images


@pytest.fixture(scope="module")
def recorded(golden):
    return json.loads((golden / "vision/vision.json").read_text())


def picture_of(png: np.ndarray) -> Image.Image:
    return Image.open(io.BytesIO(png.tobytes()))


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def test_slicing_table(recorded):
    settings = recorded["scale_resolution"], recorded["patch_size"]
    for case in recorded["slicing_table"]:
        plan = images.slice_plan(*case["size"], case["max_slice_nums"], *settings)
        assert json.loads(json.dumps(plan)) == [case["grid"], case["source"], case["refine"]], case


def test_position_table(recorded):
    side = recorded["positions_per_side"]
    for n, buckets in recorded["position_buckets"].items():
        assert images.position_bucket(int(n), side).tolist() == buckets, n


def test_position_buckets_of_other_tables():
    """Sides 8 to 80, 1 to 160 patches: the hash of what torch 2.13's arange and bucketize give on a CPU."""
    digest = hashlib.sha256()
    for side in range(8, 81):
        for n in range(1, 161):
            digest.update(images.position_bucket(n, side).astype(np.uint8).tobytes())
    assert digest.hexdigest() == "9e48d8afd9bf86bf3b748986ee7bbbe95996296aed1a7532ba4f61a08e61cc1e"


@pytest.mark.parametrize("name", ["single_noslice", "hires_slices"])
def test_slices_and_patches_are_the_recorded_ones(golden, recorded, name):
    arrays = np.load(golden / f"vision/{name}.npz")
    case = next(c for c in recorded["cases"] if c["name"] == name)
    slices = images.slice_image(picture_of(arrays["image0_png"]), case["max_slice_nums"])
    assert [list(s.size) for s in slices] == case["slice_sizes"]
    sums = [np.asarray(s).astype(np.int64).sum((0, 1)) for s in slices]
    np.testing.assert_array_equal(sums, arrays["slice_u8_sums"])
    for i in range(len(slices)):
        if f"slice{i}_png" in arrays:
            np.testing.assert_array_equal(slices[i], picture_of(arrays[f"slice{i}_png"]))

    inputs = images.patchify(slices, recorded["positions_per_side"])
    np.testing.assert_array_equal(inputs.grid_hw, arrays["tgt_sizes"])
    strip = inputs.patches[0, :4].reshape(4, 3, 14, 14).transpose(1, 2, 0, 3).reshape(3, 14, 56)
    np.testing.assert_array_equal(strip, arrays["pixel_values_slice0_first4patches"])
    sums = np.abs(inputs.patches.astype(float)).sum((1, 2))
    np.testing.assert_allclose(sums, arrays["pixel_values_abs_sum"], rtol=1e-6)


def test_patches_are_padded_to_the_longest_or_to_what_is_asked():
    slices = [Image.fromarray(noise(28, 42)), Image.fromarray(noise(14, 70, 1))]
    inputs = images.patchify(slices, side=70)
    assert [a.dtype for a in inputs] == [np.float32, np.int32, np.int32]
    assert inputs.patches.shape == (2, 6, 588) and inputs.position_ids.shape == (2, 6)
    assert inputs.grid_hw.tolist() == [[2, 3], [1, 5]]
    assert not inputs.patches[1, 5].any() and inputs.position_ids[1, 5] == 0
    assert inputs.position_ids[0].tolist() == [0, 23, 46, 35 * 70, 35 * 70 + 23, 35 * 70 + 46]
    second_row_second_column = np.asarray(slices[0])[14:28, 14:28].transpose(2, 0, 1).ravel()
    np.testing.assert_allclose(inputs.patches[0, 4], second_row_second_column / 127.5 - 1, atol=1e-6)

    wide = images.patchify(slices, side=70, num_patches=9)
    np.testing.assert_array_equal(wide.patches[:, :6], inputs.patches)
    assert wide.patches.shape == (2, 9, 588) and not wide.patches[:, 6:].any() and not wide.position_ids[:, 6:].any()


@pytest.mark.parametrize("size", [(1, 1), (1, 3000), (3000, 1), (14, 14), (4000, 3000)])
def test_odd_pictures_work(size):
    inputs = images.patchify(images.slice_image(Image.new("RGB", size, "red"), 9))
    assert (inputs.grid_hw > 0).all()
    assert inputs.position_ids.max() < 70 * 70


def test_modes_other_than_rgb_work():
    grey = Image.fromarray(noise(50, 60)[:, :, 0])
    for mode in ("L", "1", "P", "RGBA", "CMYK", "LA"):
        assert images.slice_image(grey.convert(mode))[0].mode == "RGB"


@pytest.mark.parametrize("bad, message", [
    (np.zeros((4, 4, 3), np.float32), r"uint8 RGB \[H, W, 3\], got float32 \[4, 4, 3\]"),
    (np.zeros((4, 4), np.uint8), r"got uint8 \[4, 4\]"),
    ("picture.png", "got str"),
    (Image.new("RGB", (0, 5)), "0 x 5 pixels"),
])
def test_bad_pictures_are_refused(bad, message):
    for function in (images.slice_image, lambda p: images.stack_frames([p])):
        with pytest.raises(MediaError, match=message):
            function(bad)


def test_bad_slices_are_refused():
    with pytest.raises(MediaError, match="at least one"):
        images.patchify([])
    with pytest.raises(MediaError, match="15 x 14 pixels; expected multiples of 14"):
        images.patchify([Image.new("RGB", (15, 14))])
    with pytest.raises(MediaError, match="4 patches; expected at most 3"):
        images.patchify([Image.new("RGB", (28, 28))], num_patches=3)


@pytest.mark.parametrize("n, size, layout", [
    (1, (40, 30), (1, 1)), (2, (40, 30), (2, 1)), (2, (30, 40), (1, 2)), (3, (160, 90), (3, 1)), (3, (30, 80), (1, 3)),
    (4, (40, 30), (2, 2)), (5, (40, 30), (1, 5)), (9, (40, 30), (1, 9)),
])
def test_stacked_frames_stand_in_a_grid_with_black_lines(n, size, layout):
    width, height = size
    frames = [noise(height, width, seed) for seed in range(n)]
    rows, columns = layout
    stacked = np.asarray(images.stack_frames(frames))
    assert stacked.shape == (rows * (height + 6) - 6, columns * (width + 6) - 6, 3)
    lines = np.ones(stacked.shape[:2], bool)
    for i, frame in enumerate(frames):
        y, x = i // columns * (height + 6), i % columns * (width + 6)
        np.testing.assert_array_equal(stacked[y:y + height, x:x + width], frame)
        lines[y:y + height, x:x + width] = False
    assert not stacked[lines].any()


def test_stacked_frames_of_other_shapes_are_enlarged_and_centred_on_white():
    stacked = np.asarray(images.stack_frames([np.zeros((40, 80, 3), np.uint8), np.zeros((10, 10, 3), np.uint8)]))
    cell = stacked[46:]  # 80 x 40: the square becomes 40 x 40 with 20 white columns on either side
    assert stacked.shape == (86, 80, 3)
    assert (cell[:, :20] == 255).all() and (cell[:, 60:] == 255).all() and not cell[:, 20:60].any()


def test_no_frames_cannot_be_stacked():
    with pytest.raises(MediaError, match="at least one frame"):
        images.stack_frames([])

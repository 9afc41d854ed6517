"""Pictures into the patches the vision tower reads: slicing, patching and position ids, exactly as the reference.

A large picture is seen twice: whole, scaled to the area of 448 x 448 pixels, and cut into a grid of such slices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from venus_jax.errors import MediaError

if TYPE_CHECKING:
    from PIL import Image

SCALE_RESOLUTION = 448  # side of the square whose area a slice is scaled to
PATCH_SIZE = 14
POSITIONS_PER_SIDE = 70  # of the published tower's position table
SEPARATOR = 6  # black pixels between the cells of a stacked frame


class SlicePlan(NamedTuple):
    """How a picture is cut; all sizes are (width, height) in pixels, multiples of the patch size.

    `grid` is (columns, rows) and `refine` what the picture is scaled to before it is cut; None where it is not cut.
    """

    grid: tuple[int, int] | None
    source: tuple[int, int]
    refine: tuple[int, int] | None


class VisionInputs(NamedTuple):
    """Slices as patches, padded to the same number P: what the vision tower takes."""

    patches: np.ndarray  # float32 [n, P, 588] in [-1, 1], flattened channel, row, column; 0 where padded
    grid_hw: np.ndarray  # int32 [n, 2] rows and columns of patches
    position_ids: np.ndarray  # int32 [n, P]; 0 where padded


def slice_plan(width: int, height: int, max_slices: int, scale_resolution: int = SCALE_RESOLUTION,
               patch: int = PATCH_SIZE) -> SlicePlan:
    """Decides how a picture of this size is cut into at most `max_slices` slices.

    The wanted number is the picture's area in units of `scale_resolution` squared; of the grids with that many cells,
    one fewer or one more, the one nearest in aspect ratio wins.
    """
    source = _scaled(width, height, scale_resolution, patch)
    wanted = min(math.ceil(width * height / scale_resolution**2), max_slices)
    if wanted <= 1:
        return SlicePlan(None, source, None)
    grids = [(columns, cells // columns)
             for cells in (wanted - 1, wanted, wanted + 1) if 1 < cells <= max_slices
             for columns in range(1, cells + 1) if cells % columns == 0]
    columns, rows = min(grids, key=lambda g: abs(math.log(width / height) - math.log(g[0] / g[1])))
    cell = _scaled(_multiple(width, columns) / columns, _multiple(height, rows) / rows, scale_resolution, patch)
    return SlicePlan((columns, rows), source, (cell[0] * columns, cell[1] * rows))


def slice_image(picture: Image.Image | np.ndarray, max_slices: int = 1, scale_resolution: int = SCALE_RESOLUTION,
                patch: int = PATCH_SIZE) -> list[Image.Image]:
    """Cuts a picture (PIL, or uint8 RGB [H, W, 3]) into [whole, slice, slice, ...], row by row; bicubic.

    Raises:
      MediaError: not a picture, or one without pixels.
    """
    from PIL import Image

    picture = _as_rgb(picture)
    plan = slice_plan(*picture.size, max_slices, scale_resolution, patch)
    slices = [picture.resize(plan.source, Image.Resampling.BICUBIC)]
    if plan.grid:
        columns, rows = plan.grid
        width, height = plan.refine[0] // columns, plan.refine[1] // rows
        refined = picture.resize(plan.refine, Image.Resampling.BICUBIC)
        slices += [refined.crop((x * width, y * height, (x + 1) * width, (y + 1) * height))
                   for y in range(rows) for x in range(columns)]
    return slices


def patchify(slices: Sequence[Image.Image], side: int = POSITIONS_PER_SIDE, patch: int = PATCH_SIZE,
             num_patches: int | None = None) -> VisionInputs:
    """Turns slices from `slice_image` into patches, row by row, with their position ids.

    Args:
      slices: RGB pictures, sides multiples of `patch`.
      side: rows and columns of the position table (`VisionConfig.positions_per_side`).
      patch: side of a patch.
      num_patches: P to pad to; the longest slice's number by default.

    Raises:
      MediaError: no slices, a side that is no multiple of `patch`, or a slice with more than `num_patches`.
    """
    if not slices:
        raise MediaError("expected at least one picture slice, got none")
    for width, height in (image.size for image in slices):
        if width % patch or height % patch:
            raise MediaError(f"a slice is {width} x {height} pixels; expected multiples of {patch}")
    grid_hw = np.array([(image.height // patch, image.width // patch) for image in slices], np.int32)
    longest = int(grid_hw.prod(1).max())
    num_patches = longest if num_patches is None else num_patches
    if longest > num_patches:
        raise MediaError(f"a slice has {longest} patches; expected at most {num_patches}")

    patches = np.zeros((len(slices), num_patches, 3 * patch**2), np.float32)
    position_ids = np.zeros((len(slices), num_patches), np.int32)
    for i, (image, (rows, columns)) in enumerate(zip(slices, grid_hw)):
        pixels = np.asarray(_as_rgb(image), np.float32) / 255
        pixels = (pixels - 0.5) / 0.5
        cells = pixels.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)
        patches[i, :rows * columns] = cells.reshape(rows * columns, -1)
        ids = position_bucket(rows, side)[:, None] * side + position_bucket(columns, side)
        position_ids[i, :rows * columns] = ids.ravel()
    return VisionInputs(patches, grid_hw, position_ids)


def max_patches(scale_resolution: int = SCALE_RESOLUTION, patch: int = PATCH_SIZE) -> int:
    """Patches to provide for a slice: its area, and one more a side because sides are rounded to whole patches.

    Pictures longer than about 20 times their width can need more; `patchify` refuses them by name.
    """
    return (scale_resolution // patch + 1) ** 2


@functools.lru_cache(maxsize=1024)
def position_bucket(n: int, side: int = POSITIONS_PER_SIDE) -> np.ndarray:
    """Rows of a position table of `side` that `n` patches along an axis use: int32 [n], read-only.

    In exact arithmetic floor(side * i / n). The reference compares float32 numbers, i / n against k / side, and where
    the two are equal rounding decides; its rounding is followed bit for bit.
    """
    boundaries = _arange(1 / side, 1.0, 1 / side)
    coordinates = _arange(0.0, 1 - 1e-6, float(np.float32(1) / np.float32(n)))
    buckets = np.searchsorted(boundaries, coordinates, side="right").astype(np.int32)
    buckets.setflags(write=False)
    return buckets


def stack_frames(frames: Sequence[Image.Image | np.ndarray]) -> Image.Image:
    """Several moments of one second as a single picture, as the reference's client sends them.

    Cells as large as the largest frame, smaller ones enlarged and centred on white, black lines between the cells.
    Four frames form a square; two and three a row or a column, whichever is nearer to a square; others a row.

    Raises:
      MediaError: no frames, or something that is no picture.
    """
    from PIL import Image

    pictures = [_as_rgb(frame) for frame in frames]
    if not pictures:
        raise MediaError("expected at least one frame to stack, got none")
    width, height = max(p.width for p in pictures), max(p.height for p in pictures)

    def canvas_size(rows: int, columns: int) -> tuple[int, int]:
        return columns * (width + SEPARATOR) - SEPARATOR, rows * (height + SEPARATOR) - SEPARATOR

    def squareness(layout: tuple[int, int]) -> float:
        canvas_width, canvas_height = canvas_size(*layout)
        return abs(canvas_width / canvas_height - 1)

    n = len(pictures)
    rows, columns = (2, 2) if n == 4 else min([(1, n), (n, 1)], key=squareness) if n < 4 else (1, n)
    canvas = Image.new("RGB", canvas_size(rows, columns), "black")
    for i, picture in enumerate(pictures):
        scale = min(width / picture.width, height / picture.height)
        picture = picture.resize((max(1, round(picture.width * scale)), max(1, round(picture.height * scale))),
                                 Image.Resampling.BICUBIC)
        cell = Image.new("RGB", (width, height), "white")
        cell.paste(picture, ((width - picture.width) // 2, (height - picture.height) // 2))
        row, column = divmod(i, columns)
        canvas.paste(cell, (column * (width + SEPARATOR), row * (height + SEPARATOR)))
    return canvas


def _multiple(length: float, of: int) -> int:
    return max(round(length / of) * of, of)


def _scaled(width: float, height: float, scale_resolution: int, patch: int) -> tuple[int, int]:
    """The size of about `scale_resolution` squared pixels and the same aspect ratio, in whole patches."""
    ratio = width / height
    height = int(scale_resolution / math.sqrt(ratio))
    return _multiple(int(height * ratio), patch), _multiple(height, patch)


def _arange(start: float, stop: float, step: float) -> np.ndarray:
    """torch.arange in float32 on a CPU: pairs of blocks of 8, each counting from its rounded first value; the rest is
    rounded value by value."""
    index = np.arange(math.ceil((stop - start) / step))
    block = index // 8 * 8
    lanes = ((start + step * block).astype(np.float32) + step * (index - block)).astype(np.float32)
    return np.where(index < len(index) // 16 * 16, lanes, (start + step * index).astype(np.float32))


def _as_rgb(picture: Image.Image | np.ndarray) -> Image.Image:
    from PIL import Image

    if isinstance(picture, np.ndarray) and picture.dtype == np.uint8 and picture.ndim == 3 and picture.shape[2] == 3:
        picture = Image.fromarray(picture)
    if not isinstance(picture, Image.Image):
        got = f"{picture.dtype} {list(picture.shape)}" if isinstance(picture, np.ndarray) else type(picture).__name__
        raise MediaError(f"expected a PIL image or uint8 RGB [H, W, 3], got {got}")
    if 0 in picture.size:
        raise MediaError(f"a picture of {picture.width} x {picture.height} pixels has nothing to see")
    return picture.convert("RGB")

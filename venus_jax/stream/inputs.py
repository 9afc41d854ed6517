"""From what a client brings in a unit to arrays of a few fixed shapes. The one place that decides shapes.

A `Bucket` is a size of input: picture slices, and tokens of text. Every unit is packed into the smallest bucket that
holds all its rows, and a program exists for every bucket, so a session never waits for a compilation.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Sequence

import numpy as np
from PIL import Image

from venus_jax.config import SAMPLE_RATE
from venus_jax.errors import CapacityError, ConfigError, MediaError
from venus_jax.media import images
from venus_jax.media.images import VisionInputs
from venus_jax.stream.state import BackgroundText, Feedback, StreamConfig, UnitInputs
from venus_jax.stream.unit import Grammar, Layout


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """Room for `slices` picture slices and `text` tokens, of the user and of the background each, in every row."""

    slices: int = 0
    text: int = 0

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if type(value) is not int or value < 0:
                raise ConfigError(f"a bucket of {value!r} {name}; expected a whole number, not negative")


AUDIO_BUCKETS = (Bucket(0, 0), Bucket(0, 512))
OMNI_BUCKETS = (*AUDIO_BUCKETS, Bucket(1, 0), Bucket(4, 512))


class Row(NamedTuple):
    """One session's input of one unit, on the host. `pictures`: the slices of each picture (`images.slice_image`)."""

    samples: np.ndarray | None = None
    pictures: tuple[tuple[Image.Image, ...], ...] = ()
    text: tuple[int, ...] = ()
    background: tuple[int, ...] = ()
    force_listen: bool = False
    stop: bool = False
    played: float = -1.0

    @property
    def slices(self) -> list[int]:
        """Slices of each picture."""
        return [len(picture) for picture in self.pictures]


def default_buckets(config: StreamConfig) -> tuple[Bucket, ...]:
    """The buckets of a session: with pictures where the model sees."""
    return AUDIO_BUCKETS if config.model.vision is None else OMNI_BUCKETS


def choose(buckets: Sequence[Bucket], rows: Sequence[Row | None]) -> Bucket:
    """The smallest bucket that holds every row.

    Raises:
      CapacityError: none does; names what is too much.
    """
    slices = max((sum(row.slices) for row in rows if row), default=0)
    text = max((max(len(row.text), len(row.background) and len(row.background) + 2) for row in rows if row), default=0)
    for bucket in sorted(buckets):
        if bucket.slices >= slices and bucket.text >= text:
            return bucket
    raise CapacityError(f"a unit with {slices} picture slices and {text} tokens of text fits none of the shapes "
                        f"prepared: {', '.join(f'{b.slices} and {b.text}' for b in sorted(buckets))}")


def grammar(config: StreamConfig) -> Grammar:
    """How units of this configuration are laid out."""
    queries = config.model.resampler.num_queries if config.model.resampler else 0
    return Grammar(config.control, queries, config.sound_embeddings)


def input_width(config: StreamConfig, bucket: Bucket) -> int:
    """Places of a unit's input without background: `<unit>`, slices in their brackets, sound, user text."""
    g = grammar(config)
    return 1 + bucket.slices * (g.num_queries + 2) + g.sound_embeddings + bucket.text


def pack(config: StreamConfig, bucket: Bucket, rows: Sequence[Row | None]) -> tuple[UnitInputs, BackgroundText, Feedback]:
    """Arrays (NumPy) of one unit; None is a row that takes no part.

    Raises:
      MediaError: sound of another length than a unit, not float32 in [-1, 1], a picture for a model that sees none.
      CapacityError: more than the bucket holds.
    """
    batch, g = len(rows), grammar(config)
    queries = bucket.slices * g.num_queries
    width = input_width(config, bucket)
    inputs = empty_inputs(config, bucket, batch)
    background = BackgroundText(np.zeros((batch, bucket.text), np.int32), np.zeros(batch, np.int32))
    feedback = Feedback(np.zeros(batch, bool), np.zeros(batch, bool), np.full(batch, -1, np.float32))
    for i, row in enumerate(rows):
        if row is None:
            continue
        inputs.active[i] = True
        feedback.force_listen[i], feedback.stop[i], feedback.played[i] = row.force_listen, row.stop, row.played
        if row.samples is not None:
            inputs.samples[i] = checked_samples(row.samples, config.unit_samples)
            inputs.has_sound[i] = True
        layout = g.unit_input(row.slices, row.samples is not None, row.text, row.background)
        block = len(row.background) and len(row.background) + 2
        count = len(layout.ids) - block
        if count > width or block > bucket.text or sum(row.slices) > bucket.slices:
            raise CapacityError(f"a unit of {count} tokens, {sum(row.slices)} picture slices and {block} tokens of "
                                f"background text does not fit {bucket}")
        inputs.ids[i, :count] = layout.ids[:count]
        inputs.media_index[i, :count] = layout.media_index(queries)[:count]
        inputs.count[i] = count
        inputs.media_count[i] = _media_count(layout)
        background.ids[i, :block] = layout.ids[count:]
        background.count[i] = block
        if slices := [s for picture in row.pictures for s in picture]:
            _put_pictures(config, inputs.images, i, slices)
    return inputs, background, feedback


def empty_inputs(config: StreamConfig, bucket: Bucket, batch: int) -> UnitInputs:
    """Inputs in which no row takes part; NumPy arrays of the bucket's shapes."""
    width, model = input_width(config, bucket), config.model
    patches, dim = 0, 0
    if bucket.slices:
        if model.vision is None:
            raise ConfigError(f"{bucket}: this model has no vision tower")
        patches = images.max_patches(model.image.scale_resolution, model.vision.patch_size)
        dim = model.vision.patch_dim
    shape = (batch, bucket.slices)
    return UnitInputs(
        active=np.zeros(batch, bool), samples=np.zeros((batch, config.unit_samples), np.float32),
        has_sound=np.zeros(batch, bool),
        images=VisionInputs(np.zeros((*shape, patches, dim), np.float32), np.zeros((*shape, 2), np.int32),
                            np.zeros((*shape, patches), np.int32)),
        ids=np.zeros((batch, width), np.int32), media_index=np.full((batch, width), -1, np.int32),
        count=np.zeros(batch, np.int32), media_count=np.zeros(batch, np.int32))


def checked_samples(samples: np.ndarray, count: int) -> np.ndarray:
    """One unit of sound, float32 `[count]` in [-1, 1].

    Raises:
      MediaError: anything else; NaN would outlive the unit in every cache.
    """
    samples = np.asarray(samples)
    if samples.shape != (count,):
        raise MediaError(f"a unit's sound has shape {samples.shape}; expected ({count},): {count / SAMPLE_RATE} s at "
                         f"{SAMPLE_RATE} Hz, one channel")
    if samples.dtype.kind != "f":
        raise MediaError(f"a unit's sound is {samples.dtype}; expected float32 in [-1, 1]")
    check_range(samples, "a unit's sound")
    return samples.astype(np.float32)


def check_range(samples: np.ndarray, what: str) -> None:
    """Raises MediaError: `what` holds numbers outside [-1, 1], a rounding error aside."""
    if not np.isfinite(samples).all() or np.abs(samples).max(initial=0) > 1.001:
        raise MediaError(f"{what} holds numbers outside [-1, 1]")


def _media_count(layout: Layout) -> int:
    """Places up to the last medium, its closing bracket included; 0 without media."""
    return layout.decide_at(reference_quirks=True) + 1 if (layout.kind > 0).any() else 0


def _put_pictures(config: StreamConfig, into: VisionInputs, row: int, slices: list[Image.Image]) -> None:
    vision = config.model.vision
    packed = images.patchify(slices, vision.positions_per_side, vision.patch_size, into.patches.shape[2])
    for whole, part in zip(into, packed):
        whole[row, :len(slices)] = part

"""`mel.StreamingMel` as a pure function on arrays, for use inside a jitted step.

The NumPy class recomputes up to 30 s for each unit because the dynamic floor is the maximum over all of it. Only that
maximum is needed, so the state holds the last 1080 samples and two numbers a unit (R units are 30 s), not the sound:

* `loudest[u % R]` is the maximum over the frames that unit u completed;
* `edge[u % R]` is the maximum over the first two frames of a buffer that begins with unit u. They see the sound
  reflected at the buffer's start, and are computed while that sound is at hand;
* the newest frame sees the sound reflected at its end, and is computed anew in each unit.

The spectrum is a matrix product, not `jnp.fft`: 400 is no power of two, the product runs on the matrix unit, and it
can be made exact where float32 FFTs are not. Speech has bins 100 dB below its loudest, where the rounding of a float32
FFT shows as 1e-4 in the result. Here a frame is split into its upper 10 bits and the rest, the basis into its upper 6
and the rest; the upper parts multiply without rounding (their sum of 400 fits 24 bits), and what rounds is small.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from venus_jax.config import FRAME_HOP
from venus_jax.errors import MediaError
from venus_jax.media import mel
from venus_jax.typing import Array, Bool, Float, Int

# Of a unit of one second.
NUM_FRAMES = mel.UNIT_FRAMES + 2 * mel.REDUNDANCY  # of every unit but the first
FIRST_FRAMES = mel.UNIT_FRAMES + mel.REDUNDANCY

# Offsets in samples from the first sample that a unit's first frame sees; `_SPAN` and `_NEXT` less the unit's length.
_HALF = mel.FFT_SIZE // 2
_TAIL = mel.REDUNDANCY * FRAME_HOP + _HALF + mel.PADDING  # where the samples the client sends for the unit begin
_SPAN = _TAIL - mel.LEFT_BEHIND  # where the unit's samples end
_NEXT = mel.REDUNDANCY * FRAME_HOP + _HALF  # where a buffer that begins with the next unit would
_OVERHANG = 2 * mel.REDUNDANCY * FRAME_HOP + mel.FFT_SIZE - _SPAN  # of the frame after the unit's last, beyond `_SPAN`


def _bases() -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines in multiples of 2^-6, [400, 402]; and what these lack, above the exact ones, [800, 402]."""
    angle = 2 * np.pi / mel.FFT_SIZE * (np.outer(np.arange(mel.FFT_SIZE), np.arange(mel.NUM_BINS)) % mel.FFT_SIZE)
    basis = np.concatenate([np.cos(angle), np.sin(angle)], 1)
    coarse = np.round(basis * 64) / 64
    return coarse.astype(np.float32), np.concatenate([basis - coarse, basis]).astype(np.float32)


_COARSE_BASIS, _FINE_BASIS = _bases()
_WINDOW = mel.hann_window()
_FILTERS = mel.mel_filters().astype(np.float32)


class MelState(NamedTuple):
    """What a stream remembers; rows are sessions."""

    tail: Float[Array, "b 1080"]  # the last samples received
    unit: Int[Array, "b"]  # units emitted
    loudest: Float[Array, "b r"]  # log10 power, by unit of the last 30 s
    edge: Float[Array, "b r"]


def init_mel_state(batch: int, unit_samples: int = mel.UNIT_SAMPLES) -> MelState:
    """The state before any sound. Zeros stand for the padding in front of the first unit, which is silence.

    Raises:
      MediaError: an unsupported length of a unit, see `mel.unit_frames`.
    """
    mel.unit_frames(unit_samples)

    def silence():  # two arrays: a state is donated, and a buffer can be given away only once
        return jnp.full((batch, mel.SLIDE_AT // unit_samples), mel.LOG_FLOOR, jnp.float32)

    return MelState(jnp.zeros((batch, _TAIL), jnp.float32), jnp.zeros((batch,), jnp.int32), silence(), silence())


def stream_log_mel(
    state: MelState,
    samples: Float[Array, "b n"],
    valid: Bool[Array, "b"],
    reset: Bool[Array, "b"],
) -> tuple[MelState, Float[Array, "b u+4 80"], Int[Array, "b"]]:
    """One unit of every session; its length N is that of `samples`, 16,000 for a second.

    Args:
      state: from `init_mel_state` for units of this length, or the previous call.
      samples: float32, what the client has just recorded: 16 kHz mono in [-1, 1].
      valid: rows that have a unit; other rows keep their state and get zeros.
      reset: rows that begin anew with this unit.

    Returns:
      The new state; with u = N / 160, float32 frames u k - 2 to u k + u + 1 of the session's unit k; and how many of
      them exist: u + 4 (`NUM_FRAMES` = 104), in unit 0 u + 2 (`FIRST_FRAMES` = 102), in rows that are not valid 0.
      Frames that do not exist are zeros: in unit 0 these are rows 0 and 1, in front of the stream's start, so that
      every unit is aligned alike.

    Raises:
      MediaError: an unsupported length (see `mel.unit_frames`), or a state made for another.
    """
    batch, size = samples.shape
    fresh = init_mel_state(batch, size)
    if state.loudest.shape != fresh.loudest.shape:
        raise MediaError(f"{batch} units of {size} samples; the state is of {state.loudest.shape[0]} sessions with "
                         f"units of {mel.SLIDE_AT // state.loudest.shape[1]}")
    total = mel.unit_frames(size) + 2 * mel.REDUNDANCY
    span, next_unit = size + _SPAN, size + _NEXT
    ring, slide = mel.SLIDE_AT // size, mel.SLIDE_BY // size  # units a buffer holds at most, and forgets at once
    fixed = -(-(mel.DYNAMIC_FROM - mel.PADDING + mel.LEFT_BEHIND) // size) - 1  # units under the fixed floor

    state = _choose(reset, fresh, state)
    heard = jnp.concatenate([state.tail, samples.astype(jnp.float32)], 1)
    sound = heard[:, :span]
    # The unit's frames, the one after them, and the first two of a buffer that would begin with the next unit. The last
    # three see a reflection and count for the maximum only.
    after = sound[:, span - 1 - _OVERHANG:-1][:, ::-1]
    before_next = sound[:, next_unit + 1:next_unit + 1 + _HALF][:, ::-1]
    next_start = sound[:, next_unit:next_unit + _HALF + FRAME_HOP]
    frames = jnp.concatenate([_frames(jnp.concatenate([sound, after], 1)),
                              _frames(jnp.concatenate([before_next, next_start], 1))], 1)
    log = jnp.log10(jnp.maximum(jnp.matmul(_power(frames), _FILTERS, precision="highest"), 10**mel.LOG_FLOOR))
    peak = log.max(-1)

    slots, slot = jnp.arange(ring)[None], (state.unit % ring)[:, None]
    completed = peak[:, 2 * mel.REDUNDANCY:total].max(1, keepdims=True)
    loudest = jnp.where(slots == slot, completed, state.loudest)
    next_edge = peak[:, total + 1:].max(1, keepdims=True)
    edge = jnp.where(slots == (slot + 1) % ring, next_edge, state.edge)

    # With units of a second the buffer begins with unit 0, from unit 29 on with unit 10, from unit 39 on with 20, ...
    begin = slide * jnp.maximum((state.unit + 1) // slide - (ring // slide - 1), 0)[:, None]
    unit_of_slot = state.unit[:, None] - (slot - slots) % ring
    in_buffer = jnp.where(unit_of_slot >= begin, loudest, mel.LOG_FLOOR)
    at_start = jnp.where(slots == begin % ring, edge, mel.LOG_FLOOR)
    top = jnp.concatenate([in_buffer, at_start, peak[:, total:total + 1]], 1).max(1)
    floor = jnp.where(state.unit < fixed, mel.LOG_FLOOR, top - mel.DYNAMIC_RANGE)
    out = (jnp.maximum(log[:, :total], floor[:, None, None]) + 4) / 4

    num_frames = jnp.where(valid, jnp.where(state.unit == 0, total - mel.REDUNDANCY, total), 0)
    exists = jnp.arange(total)[None] >= total - num_frames[:, None]
    new_state = MelState(heard[:, -_TAIL:], state.unit + 1, loudest, edge)
    return _choose(valid, new_state, state), jnp.where(exists[:, :, None], out, 0), num_frames


def _frames(signal: Float[Array, "b n"]) -> Float[Array, "b t 400"]:
    """Windows of 400 samples every 160: five strided pieces of 80, no gather."""
    piece = mel.FFT_SIZE // 5
    count = (signal.shape[1] - mel.FFT_SIZE) // FRAME_HOP + 1
    pieces = signal.reshape(signal.shape[0], -1, piece)
    step = FRAME_HOP // piece
    return jnp.concatenate([pieces[:, i:i + step * (count - 1) + 1:step] for i in range(5)], -1)


def _power(frames: Float[Array, "b t 400"]) -> Float[Array, "b t 201"]:
    """Power spectrum of windowed frames: both factors are split, and the product of the large parts is exact."""
    frames = frames * _WINDOW
    _, exponent = jnp.frexp(jnp.abs(frames).max(-1, keepdims=True))
    step = jnp.ldexp(jnp.float32(1), exponent - 10)
    coarse = jnp.round(frames / step) * step
    rest = jnp.concatenate([coarse, frames - coarse], -1)
    spectrum = (jnp.matmul(coarse, _COARSE_BASIS, precision="highest")
                + jnp.matmul(rest, _FINE_BASIS, precision="highest"))
    return spectrum[..., :mel.NUM_BINS]**2 + spectrum[..., mel.NUM_BINS:]**2


def _choose(rows: Bool[Array, "b"], yes: MelState, no: MelState) -> MelState:
    return jax.tree.map(lambda a, b: jnp.where(rows.reshape(-1, *(1,) * (a.ndim - 1)), a, b), yes, no)

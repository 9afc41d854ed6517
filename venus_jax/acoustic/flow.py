"""Speech codes to mel: a conformer's states lead a flow from noise to mel, at once or as a stream of chunks.

A stream keeps, of each network, what a voice's prompt left (never overwritten) and the latest `history` frames. Which
slots of the estimator's cache are seen, and in which order the reference would hold them, is one integer a slot: its
rank, 0 the first, -1 not held. So trimming and going back to the prompt are edits of integers.

The reference puts new entries in front but trims as if they stood behind: of a long turn it forgets the end of the
prompt or hears stale frames, and draws each chunk's noise from the same place. `reference_quirks` reproduces that, in
the form of minicpmo-utils 1.0.6 or 1.0.7. Rules: minicpmo45.md 6.5.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from venus_jax.acoustic import conformer, dit
from venus_jax.acoustic.config import LOOKAHEAD, MEL_PER_CODE, SILENCE_CODE, FlowConfig
from venus_jax.acoustic.conformer import Conformer, ConformerCache
from venus_jax.acoustic.dit import DiT, LayerCache
from venus_jax.nn import layers
from venus_jax.typing import Array, Bool, Float, Int, Params

VERSIONS = ("1.0.6", "1.0.7")  # of minicpmo-utils, whose rules differ


@dataclasses.dataclass(frozen=True)
class FlowStream:
    """Lengths and rules of streams.

    Attributes:
      max_prompt: codes the longest voice has.
      history: mel frames of a turn that are kept; even.
      num_steps: Euler steps.
      version: of the reference whose set-up and trimming are meant.
      reference_quirks: trims and draws as the reference does.
      dtype: of the caches.
    """

    max_prompt: int
    history: int = 100
    num_steps: int = 10
    version: str = VERSIONS[-1]
    reference_quirks: bool = False
    dtype: str = "float32"

    @property
    def code_slots(self) -> int:
        """Of the conformer's cache."""
        return self.max_prompt + self.history // MEL_PER_CODE

    @property
    def frame_slots(self) -> int:
        """Of the estimator's cache: prompt, then history, of which the reference may keep as much as prompt."""
        prompt = MEL_PER_CODE * self.max_prompt
        return prompt + (max(prompt, self.history) if self.reference_quirks else self.history)


class Flow(nn.Module):
    """Params `{embed, speaker, encoder, mu_proj, estimator}`; all methods are jittable."""

    config: FlowConfig
    dtype: Any = jnp.float32

    def setup(self):
        c = self.config
        self.embed = layers.embedding(c.vocab_size, c.hidden_size, self.dtype)
        self.speaker = layers.linear(c.num_mels, self.dtype)
        self.encoder = Conformer(c, self.dtype)
        self.mu_proj = layers.linear(c.num_mels, self.dtype)
        self.estimator = DiT(c, self.dtype)

    def encode(self, codes, given, last, cache):
        """mu `[B, 2 T, M]` float32, frames `[B]` and what `Conformer` adds, for codes `[B, T]`."""
        states, *rest = self.encoder(self.embed(codes.clip(0, self.config.vocab_size - 1)), given, last, cache)
        return self.mu_proj(states).astype(jnp.float32), *rest

    def identify(self, speaker: Float[Array, "b e"]) -> Float[Array, "b m"]:
        """What the estimator is told of whose voice it is."""
        length = jnp.sqrt((speaker**2).sum(axis=-1, keepdims=True))
        return self.speaker((speaker / length.clip(1e-12)).astype(self.dtype)).astype(jnp.float32)

    def velocity(self, *args):
        """See `DiT`."""
        return self.estimator(*args)

    def __call__(self, codes, given, speaker, x, time, condition):
        """Velocity for whole sequences `[B, T]` of codes, as in training; mel `[B, 2 T, M]`."""
        b, t = codes.shape
        cache = conformer.empty_cache(self.config, b, 0, self.dtype)
        mu, frames, *_ = self.encode(codes, given, jnp.ones((b,), bool), cache)
        return self.velocity(x, mu, time, self.identify(speaker), condition, frames)[0]


class EstimatorCache(NamedTuple):
    """By Euler step and layer; the halves of the guidance lie on an axis before the rows'."""

    k: Float[Array, "e l 2 b n s h"]
    v: Float[Array, "e l 2 b n s h"]
    left: Float[Array, "e l 2 b 2 d"]


class Prompt(NamedTuple):
    """What set-up makes of one voice: caches of batch 1 whose slots are the prompt's, and its speaker `[1, M]`."""

    encoder: ConformerCache
    estimator: EstimatorCache
    speaker: Float[Array, "1 m"]


class FlowState(NamedTuple):
    """Streams of B rows.

    `rank` as above. `drawn`: frames of noise used. `prompt_count`: codes of the voice. `*_start`: what convolutions
    remember at the end of the prompt.
    """

    encoder: ConformerCache
    estimator: EstimatorCache
    rank: Int[Array, "b s"]
    drawn: Int[Array, "b"]
    speaker: Float[Array, "b m"]
    prompt_count: Int[Array, "b"]
    left_start: Float[Array, "b 2 d"]
    up_left_start: Float[Array, "b 4 d"]
    estimator_left_start: Float[Array, "e l 2 b 2 d"]


def noise_table(key: jax.Array, frames: int, num_mels: int) -> Float[Array, "f m"]:
    """What flows begin with: N(0, 1), float32 `[F, M]`."""
    return jax.random.normal(key, (frames, num_mels))


def times(num_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """(moments, steps), float32 `[N]` each: cosine spacing, added up as the reference does."""
    span = np.linspace(0, 1, num_steps + 1, dtype=np.float32)
    span = 1 - np.cos(span * np.float32(0.5) * np.float32(np.pi))
    moments, steps, now, step = [], [], span[0], span[1] - span[0]
    for following in [*span[2:], None]:
        moments.append(now)
        steps.append(step)
        now += step
        if following is not None:
            step = following - now
    return np.array(moments, np.float32), np.array(steps, np.float32)


# --- at once ----------------------------------------------------------------------------------------------------------
def offline(params: Params, config: FlowConfig, codes: Int[Array, "b t"], count: Int[Array, "b"],
            prompt_codes: Int[Array, "b p"], prompt_mel: Float[Array, "b q m"], speaker: Float[Array, "b e"],
            prompt_count: Int[Array, "b"], noise: Float[Array, "f m"],
            num_steps: int) -> tuple[Float[Array, "b u m"], Int[Array, "b"]]:
    """Mel of whole sequences; everything hears everything.

    Args:
      codes, count, prompt_codes, prompt_count: padded rows and their lengths; prompt_mel has 2 P frames.
      noise: at least 2 (P + T) frames.

    Returns:
      mel `[B, 2 T, M]`, 0 beyond the second, frames `[B]` = 2 count.
    """
    dtype, total = params["mu_proj"]["kernel"].dtype, codes.shape[1] + prompt_codes.shape[1]
    place = jnp.arange(total) - prompt_count[:, None]
    take = lambda x, at: jnp.take_along_axis(x, at.clip(0, x.shape[1] - 1), axis=1)
    joined = jnp.where(place < 0, take(prompt_codes, place + prompt_count[:, None]), take(codes, place))
    known = jnp.arange(MEL_PER_CODE * total) < MEL_PER_CODE * prompt_count[:, None]
    condition = jnp.pad(prompt_mel, ((0, 0), (0, MEL_PER_CODE * codes.shape[1]), (0, 0)))
    condition = jnp.where(known[..., None], condition, 0)

    flow = Flow(config, dtype)
    apply = functools.partial(flow.apply, {"params": params})
    mu, frames, *_ = apply(joined, prompt_count + count, jnp.ones_like(count, bool),
                           conformer.empty_cache(config, len(codes), 0, dtype), method="encode")
    start = jnp.broadcast_to(noise[:mu.shape[1]], mu.shape)
    mel, _ = _integrate(params, config, num_steps, start, mu, apply(speaker, method="identify"), condition, frames)
    at = jnp.arange(MEL_PER_CODE * codes.shape[1]) + MEL_PER_CODE * prompt_count[:, None]
    mel = jnp.take_along_axis(mel, at.clip(max=mel.shape[1] - 1)[..., None], axis=1)
    frames = MEL_PER_CODE * count
    return jnp.where((jnp.arange(mel.shape[1]) < frames[:, None])[..., None], mel, 0), frames


def _integrate(params, config, num_steps, x, mu, speaker, condition, frames, cache=None, visible=None):
    """(mel, new estimator entries by step): Euler steps, each with and without what leads the flow, in one batch."""
    dtype = params["mu_proj"]["kernel"].dtype
    twice = lambda y: jnp.concatenate([y, jnp.zeros_like(y)])
    mu, speaker, condition = map(twice, (mu, speaker, condition))
    both = jnp.concatenate([frames, frames])
    visible = None if visible is None else jnp.concatenate([visible, visible])
    flat = lambda y: y.reshape(y.shape[0], -1, *y.shape[3:])  # [L, 2, B, ...] -> [L, 2 B, ...]

    def euler(x, step):
        time, dt, layer_cache = step
        layer_cache = None if cache is None else LayerCache(*map(flat, layer_cache))
        v, new = Flow(config, dtype).apply({"params": params}, jnp.concatenate([x, x]), mu, time[None], speaker, condition,
                                           both, layer_cache, visible, method="velocity")
        led, free = jnp.split(v, 2)
        x += dt * ((1 + config.guidance) * led - config.guidance * free)
        return x, jax.tree.map(lambda y: y.reshape(y.shape[0], 2, -1, *y.shape[2:]), new)

    return jax.lax.scan(euler, x, (*times(num_steps), cache))


# --- as a stream ------------------------------------------------------------------------------------------------------
def prepare(params: Params, config: FlowConfig, stream: FlowStream, codes: Int[Array, "p"], speaker: Float[Array, "e"],
            mel: Float[Array, "q m"], count: Int[Array, ""], noise: Float[Array, "f m"]) -> Prompt:
    """Reads a voice: `count` of the P = `max_prompt` codes and twice as many of the frames count."""
    dtype, p = params["mu_proj"]["kernel"].dtype, stream.max_prompt
    ahead = jnp.full((LOOKAHEAD,), SILENCE_CODE, codes.dtype) if stream.version == VERSIONS[0] else codes[:LOOKAHEAD]
    place = jnp.arange(p + LOOKAHEAD)
    codes = jnp.where(place < count, jnp.pad(codes, (0, LOOKAHEAD)), ahead[(place - count).clip(0, LOOKAHEAD - 1)])
    apply = functools.partial(Flow(config, dtype).apply, {"params": params})
    mu, frames, low, up, left, up_left = apply(
        codes[None], count[None] + LOOKAHEAD, jnp.array([False]), conformer.empty_cache(config, 1, 0, dtype),
        method="encode")
    mu = mu[:, :MEL_PER_CODE * p]
    known = jnp.arange(MEL_PER_CODE * p) < MEL_PER_CODE * count
    speaker = apply(speaker[None], method="identify")
    _, new = _integrate(params, config, stream.num_steps, noise[None, :MEL_PER_CODE * p], mu, speaker,
                        jnp.where(known[:, None], mel, 0)[None], frames)
    cut = lambda kv, size: jax.tree.map(lambda y: y[:, :, :, :size], kv)
    return Prompt(ConformerCache(cut(low, p), cut(up, MEL_PER_CODE * p), left, up_left, count[None]),
                  EstimatorCache(*new), speaker)


def init(config: FlowConfig, stream: FlowStream, batch: int) -> FlowState:
    """Rows without a voice."""
    dtype = jnp.dtype(stream.dtype)
    encoder = conformer.empty_cache(config, batch, stream.code_slots, dtype)
    one = dit.empty_cache(config, 1, stream.frame_slots, dtype)
    estimator = EstimatorCache(*(jnp.zeros((stream.num_steps, y.shape[0], 2, batch, *y.shape[2:]), dtype) for y in one))
    return FlowState(encoder, estimator, jnp.full((batch, stream.frame_slots), -1, jnp.int32),
                     jnp.zeros((batch,), jnp.int32), jnp.zeros((batch, config.num_mels)), jnp.zeros((batch,), jnp.int32),
                     jnp.zeros_like(encoder.left), jnp.zeros_like(encoder.up_left), jnp.zeros_like(estimator.left))


def join(state: FlowState, prompt: Prompt, rows: Bool[Array, "b"]) -> FlowState:
    """Gives these rows the voice, at the beginning of a turn; the others are as before."""
    def put(old, new, axis):  # `new` has one row and may have fewer slots
        part = tuple(slice(0, n) for i, n in enumerate(new.shape) if i > axis)
        at = (slice(None),) * (axis + 1) + part
        marked = rows.reshape(-1, *(1,) * (old.ndim - axis - 1))
        return old.at[at].set(jnp.where(marked, new.astype(old.dtype), old[at]))

    encoder, estimator = state.encoder, state.estimator
    return rewind(state._replace(
        encoder=encoder._replace(low=jax.tree.map(lambda a, b: put(a, b, 1), encoder.low, prompt.encoder.low),
                                 up=jax.tree.map(lambda a, b: put(a, b, 1), encoder.up, prompt.encoder.up)),
        estimator=estimator._replace(k=put(estimator.k, prompt.estimator.k, 3), v=put(estimator.v, prompt.estimator.v, 3)),
        speaker=put(state.speaker, prompt.speaker, 0),
        prompt_count=put(state.prompt_count, prompt.encoder.count, 0),
        left_start=put(state.left_start, prompt.encoder.left, 0),
        up_left_start=put(state.up_left_start, prompt.encoder.up_left, 0),
        estimator_left_start=put(state.estimator_left_start, prompt.estimator.left, 3)), rows)


def rewind(state: FlowState, rows: Bool[Array, "b"]) -> FlowState:
    """Takes these rows back to the end of their prompt."""
    def choose(new, old, axis=0):
        return jnp.where(rows.reshape(-1, *(1,) * (old.ndim - axis - 1)), new, old)

    frames, slot = MEL_PER_CODE * state.prompt_count, jnp.arange(state.rank.shape[1])
    encoder, estimator = state.encoder, state.estimator
    return state._replace(
        encoder=encoder._replace(left=choose(state.left_start, encoder.left),
                                 up_left=choose(state.up_left_start, encoder.up_left),
                                 count=choose(state.prompt_count, encoder.count)),
        estimator=estimator._replace(left=choose(state.estimator_left_start, estimator.left, axis=3)),
        rank=choose(jnp.where(slot < frames[:, None], slot, -1), state.rank), drawn=choose(frames, state.drawn))


def step(params: Params, config: FlowConfig, stream: FlowStream, state: FlowState, codes: Int[Array, "b t"],
         counts: Int[Array, "b"], last: Bool[Array, "b"],
         noise: Float[Array, "f m"]) -> tuple[FlowState, Float[Array, "b u m"], Int[Array, "b"]]:
    """Renders a chunk of each row.

    Args:
      codes, counts: the last three of a row's only as a look ahead, unless it is its `last` chunk; 0: the row rests, and
        its state stays as it is, bit for bit.
      noise: used from where the row's turn has come to, around and around.

    Returns:
      state; mel `[B, 2 T, M]` float32, 0 beyond the third, frames `[B]`: twice the codes rendered.
    """
    apply = functools.partial(Flow(config, params["mu_proj"]["kernel"].dtype).apply, {"params": params})
    mu, frames, low, up, left, up_left = apply(codes, counts, last, state.encoder, method="encode")
    held = state.rank >= 0
    offset = held.sum(axis=1) if stream.reference_quirks else state.drawn
    x = noise[(offset[:, None] + jnp.arange(mu.shape[1])) % len(noise)]
    mel, new = _integrate(params, config, stream.num_steps, x, mu, state.speaker, jnp.zeros_like(mu), frames,
                          state.estimator, held)
    mel = jnp.where((jnp.arange(mel.shape[1]) < frames[:, None])[..., None], mel, 0)

    moved = frames > 0
    choose = lambda new, old, axis=0: jnp.where(moved.reshape(-1, *(1,) * (old.ndim - axis - 1)), new.astype(old.dtype), old)
    encoder = _trim_encoder(stream, state, low, up, frames // MEL_PER_CODE)
    encoder = encoder._replace(left=choose(left, state.encoder.left), up_left=choose(up_left, state.encoder.up_left))
    estimator, rank = _trim_estimator(stream, state, new, frames)
    estimator = estimator._replace(left=choose(new.left, state.estimator.left, axis=3))
    return state._replace(encoder=encoder, estimator=estimator, rank=rank, drawn=state.drawn + frames), mel, frames


def _trim_encoder(stream: FlowStream, state: FlowState, low, up, new: Int[Array, "b"]) -> ConformerCache:
    """The conformer's cache with a chunk of `new` codes: prompt, then the latest; kept in order of time."""
    cache, history, prompt = state.encoder, stream.history, MEL_PER_CODE * state.prompt_count[:, None]
    count = (cache.count + new)[:, None]
    full = MEL_PER_CODE * count > prompt + history
    place = jnp.arange(stream.code_slots)
    kept = jnp.where(place < prompt // 2, place, count - history // 2 + place - prompt // 2)
    if stream.reference_quirks and stream.version == VERSIONS[0]:
        # Codes' entries lie there twice in a row, and are trimmed as if they were frames.
        kept = jnp.where(place < prompt, place, MEL_PER_CODE * count - history + place - prompt) % count.clip(1)
    kept = jnp.where(full, kept, place)
    place = jnp.arange(MEL_PER_CODE * stream.code_slots)
    kept_up = jnp.where(full & (place >= prompt), MEL_PER_CODE * count - history + place - prompt, place)

    def gather(old, chunk, kept, rate):  # entry i of the row is in slot i, or in place i - filled of the chunk
        filled = rate * cache.count[:, None]
        at = jnp.where((kept >= filled) & (kept < rate * count), old.shape[3] + kept - filled, kept)
        both = jnp.concatenate([old, chunk.astype(old.dtype)], axis=3)
        return jnp.take_along_axis(both, at.clip(0, both.shape[3] - 1)[None, :, None, :, None], axis=3)

    kept_count = jnp.where(full, (prompt + history) // MEL_PER_CODE, count)[:, 0]
    return cache._replace(low=jax.tree.map(lambda a, b: gather(a, b, kept, 1), cache.low, low),
                          up=jax.tree.map(lambda a, b: gather(a, b, kept_up, MEL_PER_CODE), cache.up, up),
                          count=kept_count)


def _trim_estimator(stream: FlowStream, state: FlowState, new, frames: Int[Array, "b"]):
    """(cache, rank) with a chunk whose entries are `new`, of which `frames` count."""
    rank, prompt = state.rank, MEL_PER_CODE * state.prompt_count[:, None]
    size, room = new.k.shape[5], rank.shape[1]
    frame, used = jnp.arange(size), frames[:, None]
    # In the reference a chunk's first frame comes first; whoever means the latest counts from its last.
    fresh = frame if stream.reference_quirks else used - 1 - frame
    fresh = jnp.where(frame < used, fresh, -1)
    both = jnp.concatenate([jnp.where(rank >= 0, rank + used, -1), fresh], axis=1)  # [B, S + T]
    total = (both >= 0).sum(axis=1, keepdims=True)
    if stream.reference_quirks:
        keep = (total <= prompt + stream.history) | (both < prompt) | (both >= total - stream.history)
    else:
        slots = jnp.arange(room + size)
        keep = (slots < prompt) | (both < stream.history)
    keep &= both >= 0
    # Rank among those kept: how many kept ones come before.
    order = jnp.argsort(jnp.where(keep, both, room + size), axis=1)
    place = jnp.argsort(order, axis=1)
    both = jnp.where(keep, place, -1)
    rank, fresh = both[:, :room], both[:, room:]

    free = (rank < 0) & (jnp.arange(room) >= MEL_PER_CODE * stream.max_prompt)
    spare = jnp.argsort(~free, axis=1, stable=True)  # free slots first
    number = jnp.cumsum(fresh >= 0, axis=1) - 1
    slots = jnp.where(fresh >= 0, jnp.take_along_axis(spare, number.clip(0), axis=1), room)
    rank = jax.vmap(lambda held, at, new: held.at[at].set(new, mode="drop"))(rank, slots, fresh)

    # Each head of each row is a scatter of its own: what is written at once lies together, and no cache is turned over.
    one = lambda held, at, new: held.at[at].set(new.astype(held.dtype), mode="drop")
    over_heads = jax.vmap(one, in_axes=(0, None, 0))
    over_rows = jax.vmap(over_heads, in_axes=(0, 0, 0))
    write = jax.vmap(jax.vmap(jax.vmap(over_rows, in_axes=(0, None, 0)), in_axes=(0, None, 0)), in_axes=(0, None, 0))
    cache = state.estimator
    return cache._replace(k=write(cache.k, slots, new.k), v=write(cache.v, slots, new.v)), rank

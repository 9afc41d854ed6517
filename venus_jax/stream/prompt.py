"""How a session begins: the system prompt with its reference voice, as arrays for `transition.prefill`."""

from __future__ import annotations

import functools
from typing import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from venus_jax.config import VenusConfig
from venus_jax.errors import CapacityError
from venus_jax.media import mel
from venus_jax.models import frontend, whisper
from venus_jax.stream.inputs import grammar
from venus_jax.stream.state import MAX_SUFFIX, StreamConfig
from venus_jax.stream.transition import Prompt
from venus_jax.typing import Params

PROMPT_MULTIPLE = 64  # prompts are padded to a multiple of so many places: few programs
_MEL_MULTIPLE = 500  # likewise the frames of a voice


@functools.partial(jax.jit, static_argnames="config")
def _encode(params, config, frames, count):
    return frontend.Frontend(config).apply({"params": params}, frames, count, method="encode_clips")


def encode_voice(params: Params, config: VenusConfig, samples: np.ndarray) -> np.ndarray:
    """Embeddings `[N, D]` of a reference voice, ten a second; sound beyond 30 s is heard in items of 30 s.

    Raises:
      MediaError: not a mono float array, or no sound in it.
    """
    parts = []
    for clip in mel.split_clip(samples):
        frames = mel.clip_log_mel(clip).T
        width = min(-(-len(frames) // _MEL_MULTIPLE) * _MEL_MULTIPLE, 2 * config.audio.max_positions)
        padded = np.zeros((1, max(width, len(frames)), frames.shape[1]), np.float32)
        padded[0, :len(frames)] = frames
        count = whisper.num_embeddings(len(frames), config.audio.pool_step)
        parts.append(np.asarray(_encode(params, config, padded, np.array([len(frames)])))[0, :count])
    return np.concatenate(parts)


def make_prompt(config: StreamConfig, rows: Sequence[bool], prefix: Sequence[int], voice: np.ndarray | None,
                suffix: Sequence[int], seeds: Sequence[int]) -> Prompt:
    """The same prompt for all marked rows, padded.

    Raises:
      CapacityError: a prompt that leaves no room in the cache, or a suffix of more than `MAX_SUFFIX` ids.
    """
    batch, voiced = len(rows), 0 if voice is None else len(voice)
    layout = grammar(config).prompt(prefix, voiced, suffix)
    count, width = len(layout.ids), -(-len(layout.ids) // PROMPT_MULTIPLE) * PROMPT_MULTIPLE
    if count + config.max_unit_tokens >= config.slots:
        raise CapacityError(f"a prompt of {count} tokens and a unit do not fit into {config.slots} cache slots")
    if len(suffix) > MAX_SUFFIX:
        raise CapacityError(f"{len(suffix)} tokens behind the voice; at most {MAX_SUFFIX} are supported")
    pad = lambda values, size, fill: np.pad(values, (0, size - len(values)), constant_values=fill)
    every = lambda array: np.broadcast_to(array, (batch, *array.shape)).copy()
    media = np.zeros((-(-voiced // PROMPT_MULTIPLE) * PROMPT_MULTIPLE or 1, config.model.llm.hidden_size), np.float32)
    if voiced:
        media[:voiced] = voice
    scalar = lambda value: np.full(batch, value, np.int32)
    key = np.asarray(jax.random.key_data(jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32))), np.uint32)
    return Prompt(
        rows=np.asarray(rows, bool), ids=every(pad(layout.ids, width, 0)),
        media=every(media.astype(jnp.dtype(config.model.dtype))), media_index=every(pad(layout.media_index(0), width, -1)),
        count=scalar(count), prefix_count=scalar(len(prefix) + voiced),
        suffix=every(pad(np.asarray(suffix, np.int32), MAX_SUFFIX, 0)), suffix_count=scalar(len(suffix)), key=key)

"""How a session begins: the system prompt with its reference voice, as arrays for `transition.prefill`."""

from __future__ import annotations

import functools
import re
from typing import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from venus_jax.config import FRAME_HOP, VenusConfig
from venus_jax.errors import CapacityError, MediaError
from venus_jax.media import mel
from venus_jax.models import frontend, whisper
from venus_jax.stream.inputs import check_range, grammar
from venus_jax.stream.state import MAX_SUFFIX, StreamConfig
from venus_jax.stream.transition import Prompt
from venus_jax.stream.unit import prompt_text
from venus_jax.tokens import Tokenizer
from venus_jax.typing import Params

PROMPT_MULTIPLE = 64  # prompts are padded to a multiple of so many places: few programs
_MEL_MULTIPLE = 500  # likewise the frames of a voice


@functools.partial(jax.jit, static_argnames="config")
def _encode(params, config, frames, count):
    return frontend.Frontend(config).apply({"params": params}, frames, count, method="encode_clips")


def encode_voice(params: Params, config: VenusConfig, samples: np.ndarray) -> np.ndarray:
    """Embeddings `[N, D]` of a reference voice, ten a second; sound beyond 30 s is heard in items of 30 s.

    A smaller audio tower hears shorter items.

    Raises:
      MediaError: not a mono float array in [-1, 1], or no sound in it.
    """
    samples = np.asarray(samples)
    if samples.ndim != 1 or samples.dtype.kind != "f" or not len(samples):
        raise MediaError(f"the voice is {samples.dtype} {samples.shape}; expected float32 samples [N], 16 kHz, one channel")
    check_range(samples, "the voice")
    parts, item = [], min(mel.CLIP_SAMPLES, 2 * config.audio.max_positions * FRAME_HOP)
    for clip in (samples[i:i + item] for i in range(0, len(samples), item)):
        frames = mel.clip_log_mel(clip).T
        width = min(-(-len(frames) // _MEL_MULTIPLE) * _MEL_MULTIPLE, 2 * config.audio.max_positions)
        padded = np.zeros((1, width, frames.shape[1]), np.float32)
        padded[0, :len(frames)] = frames
        count = whisper.num_embeddings(len(frames), config.audio.pool_step)
        parts.append(np.asarray(_encode(params, config, padded, np.array([len(frames)])))[0, :count])
    return np.concatenate(parts)


def prompt_ids(tokenizer: Tokenizer, text: str, voice: bool) -> tuple[list[int], list[int]]:
    """Ids before and after the reference voice. `text` cannot hold control tokens; what stands beside it is tokenized
    together with it, as in the published prompts.
    """
    def ids(form):
        parts = re.split(r"(<\|[^|]*\|>)", form)  # control tokens at odd places
        return [i for n, part in enumerate(parts) for i in tokenizer.encode(part.replace("\0", text), special=n % 2 == 1)]

    before, after = prompt_text("\0", voice)
    return ids(before), ids(after)


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
    if config.window.kind != "context":
        suffix = ()  # nobody reads it anew
    elif len(suffix) > MAX_SUFFIX:
        raise CapacityError(f"{len(suffix)} tokens behind the voice; window 'context' takes at most {MAX_SUFFIX}")
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

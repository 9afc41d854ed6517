"""The offline form of the model: a whole conversation in, one answer out, with pictures, sounds and a spoken reply.

The prompt follows Qwen3's chat template. What a message says is read as plain characters: only the template and the
placeholders of media hold control tokens. Lengths are padded to `bucket` sizes, so that few programs are compiled.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import TYPE_CHECKING, Any, Mapping, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from venus_jax.config import FRAME_HOP, VenusConfig
from venus_jax.errors import CapacityError, ConfigError, MediaError
from venus_jax.media import images, mel
from venus_jax.models.frontend import Frontend
from venus_jax.models.talker import talker
from venus_jax.models.talker_decode import HalfDuplexSpeech
from venus_jax.nn import kv_cache, logits
from venus_jax.tokens import Tokenizer, audio_placeholder, audio_token_count, image_placeholder
from venus_jax.typing import Array, Float, Int, Params

if TYPE_CHECKING:
    from PIL import Image

ROLES = ("system", "user", "assistant")
PREFILL = 512  # prompt tokens fed at once: bounds the memory of attention scores
CONDITION_TOKENS = 10  # answer tokens spoken at once
CONDITION_CODES = 500  # codes they may become, 20 s
WORDS, TEMPLATE, PICTURE, SOUND = range(4)  # what a part of the prompt is


class ChatReply(NamedTuple):
    """`text` without special tokens; `ids` int32 `[n]` without the end token; `codes` int32 `[c]`, 25 a second."""

    text: str
    ids: np.ndarray
    codes: np.ndarray


class Prompt(NamedTuple):
    """`ids` int32 `[t]`, `<unk>` where an embedding stands; `kind` `[t]`: PICTURE or SOUND there, else 0.

    `slices`: what the vision tower sees; `clips`: sounds, a list for each message that has any.
    """

    ids: np.ndarray
    kind: np.ndarray
    slices: list[Image.Image]
    clips: list[list[np.ndarray]]


class Sampling(NamedTuple):
    """How tokens are drawn; traced, so that changing them compiles nothing. `top_k` 0 and `top_p` 1 cut nothing."""

    greedy: bool
    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float


def bucket(n: int) -> int:
    """The size `n` is padded to: a multiple of 64, above 512 one of four sizes to each doubling."""
    step = max(64, 1 << n.bit_length() >> 3)
    return -(-n // step) * step


def chat(params: Params, config: VenusConfig, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], *,
         max_new_tokens: int = 512, greedy: bool = True, temperature: float = 0.7, top_k: int = 100, top_p: float = 0.8,
         repetition_penalty: float = 1.02, enable_thinking: bool = False, seed: int = 0,
         max_slice_nums: int | None = None, omni_mode: bool = False, speak: bool = False) -> ChatReply:
    """Answers a conversation.

    There is no beam search: the reference's default of 3 beams is not reproduced. Nor is its way of speaking a whole
    answer at once: as in its half-duplex stream, ten tokens are spoken at a time. No token is barred, as there.

    Args:
      messages: `{"role": "system" | "user" | "assistant", "content": ...}`, the last not the assistant's. A content
        is a text or a list of texts, pictures (PIL, or uint8 RGB `[H, W, 3]`) and sounds (floating `[N]`, 16 kHz
        mono); the sounds of a message are heard as one recording.
      max_new_tokens: the answer's at most; it ends earlier at `<|tts_eos|>`, `<|im_end|>` or `<|endoftext|>`.
      greedy: the likeliest token each time; else drawn by `temperature`, `top_k` (0: off) and `top_p` with `seed`.
      repetition_penalty: for tokens already in the answer (the prompt's do not count, as in the reference): positive
        scores are divided by it, negative ones multiplied.
      enable_thinking: lets the model think before it answers.
      max_slice_nums: pieces a large picture may be cut into; None: as the config says.
      omni_mode: no line ends between contents and no numbers at pictures: for clips, a frame and a second in turn.
      speak: also returns speech codes.

    Raises:
      ConfigError: no messages, an unknown role or setting, no talker to speak, more tokens than positions.
      MediaError: content that is none of the above, or that this model cannot see or hear.
      TokenizerError: a text that is not valid Unicode.
    """
    if max_slice_nums is None:
        max_slice_nums = config.image.max_slice_nums
    for name, value in dict(max_new_tokens=max_new_tokens, max_slice_nums=max_slice_nums, temperature=temperature,
                            top_p=top_p, repetition_penalty=repetition_penalty).items():
        if not 0 < value < math.inf:
            raise ConfigError(f"chat: {name} is {value!r}; expected a positive number")
    if speak and config.talker is None:
        raise ConfigError(f"chat: speech was asked of the model {config.name!r}, which has no talker")

    asked = build_prompt(config, tokenizer, messages, enable_thinking, max_slice_nums, omni_mode, speak)
    length, positions = len(asked.ids), config.llm.max_positions
    if length + max_new_tokens > positions:
        raise ConfigError(f"chat: the messages take {length} tokens and the answer up to {max_new_tokens}; "
                          f"the model has {positions} positions")
    ids, kind = (np.pad(x, (0, bucket(length) - length))[None] for x in (asked.ids, asked.kind))
    media, control = _embed_media(params, config, asked, kind), tokenizer.control
    stop = np.array([control.tts_eos, control.im_end, control.endoftext])
    sampling = Sampling(bool(greedy), float(temperature), int(top_k), float(top_p), float(repetition_penalty))
    text_key, speech_key = jax.random.split(jax.random.key(seed))
    tokens, states, count = _answer(params, config, bucket(max_new_tokens), ids, length, media, stop, max_new_tokens,
                                    sampling, text_key)
    answer = np.asarray(tokens)[:int(count)]
    codes = np.zeros(0, np.int32)
    if speak:
        begins = np.flatnonzero(answer == control.tts_bos)  # where the model itself says when speech begins
        conditions = np.asarray(_conditions(params, config, tokens, states))[:len(answer)]
        codes = _speak(params, config, conditions[begins[-1] + 1 if len(begins) else 0:], speech_key)
    return ChatReply(tokenizer.decode(answer, skip_special=True), answer, codes)


# --- prompt ---------------------------------------------------------------------------------------------------------
def build_prompt(config: VenusConfig, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]],
                 enable_thinking: bool = False, max_slice_nums: int = 1, omni_mode: bool = False,
                 speak: bool = False) -> Prompt:
    """Lays out a conversation up to where the answer begins. Arguments and errors as in `chat`."""
    if not messages:
        raise ConfigError("chat: the list of messages is empty; expected at least one")
    parts, slices, clips, pictures = [], [], [], 0  # parts: (kind, text)
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise ConfigError(f"chat: message {number} is not a dict with 'role' and 'content'")
        role, content = message["role"], message["content"]
        if role not in ROLES:
            raise ConfigError(f"chat: message {number} has the role {role!r}; expected one of {', '.join(ROLES)}")
        parts += [(TEMPLATE, "<|im_start|>"), (WORDS, f"{role}\n")]
        sounds = []
        for place, item in enumerate(content if isinstance(content, (list, tuple)) else [content]):
            where = f"chat: message {number}, content {place}"
            if place and not omni_mode:
                parts.append((WORDS, "\n"))
            if isinstance(item, str):
                if role == "assistant" and "</think>" in item:  # the template forgets earlier thoughts
                    item = item.rpartition("</think>")[2].lstrip("\n")
                parts.append((WORDS, item))
            elif isinstance(item, np.ndarray) and item.ndim == 1:
                sounds.append(_check_sound(item, config, where))
                parts.append((SOUND, audio_placeholder(len(item), config.stream_input, config.audio.pool_step)))
            else:
                cut, text = _cut_picture(item, config, None if omni_mode else pictures, max_slice_nums, where)
                pictures += 1
                slices += cut
                parts.append((PICTURE, text))
        clips += [sounds] if sounds else []
        parts.append((TEMPLATE, "<|im_end|>\n"))
    if role == "assistant":
        raise ConfigError("chat: the last message is the assistant's own; expected one to answer")
    begin = "<|im_start|>assistant\n" + ("" if enable_thinking else "<think>\n\n</think>\n\n")
    parts.append((TEMPLATE, begin + ("<|tts_bos|>" if clips or speak else "")))

    ids, kinds = [], []
    for kind, group in itertools.groupby(parts, key=lambda part: part[0]):  # words that meet are tokenized as one text
        new = tokenizer.encode("".join(text for _, text in group), special=kind != WORDS)
        ids += new
        kinds += [kind if kind in (PICTURE, SOUND) and i == tokenizer.control.unk else WORDS for i in new]
    return Prompt(np.array(ids, np.int32), np.array(kinds, np.int32), slices, clips)


def _cut_picture(item, config: VenusConfig, number: int | None, max_slices: int, where: str):
    """(slices, placeholder) of a picture."""
    if config.vision is None:
        raise MediaError(f"{where} is neither text nor sound, and the model {config.name!r} has no vision")
    rule = max_slices, config.image.scale_resolution, config.vision.patch_size
    try:
        slices = images.slice_image(item, *rule)
    except MediaError as e:
        raise MediaError(f"{where} is neither text nor samples [N]: {e}") from e
    width, height = item.shape[1::-1] if isinstance(item, np.ndarray) else item.size
    grid = images.slice_plan(width, height, *rule).grid
    return slices, image_placeholder(config.resampler.num_queries, grid, number)


def _check_sound(samples: np.ndarray, config: VenusConfig, where: str) -> np.ndarray:
    if config.audio is None:
        raise MediaError(f"{where} is a sound; the model {config.name!r} has no audio tower")
    if not np.issubdtype(samples.dtype, np.floating) or not np.isfinite(samples).all():
        raise MediaError(f"{where} is a sound of {samples.dtype}; expected finite floating-point samples in [-1, 1]")
    if audio_token_count(len(samples), config.audio.pool_step) < 1:
        raise MediaError(f"{where} is a sound of {len(samples)} samples; expected at least a tenth of a second")
    return samples.astype(np.float32)


# --- media ----------------------------------------------------------------------------------------------------------
@functools.partial(jax.jit, static_argnames=("config", "method"))
def _encode(params, config, method, *args):
    return Frontend(config).apply({"params": params}, *args, method=method)[0]


def _embed_media(params, config: VenusConfig, asked: Prompt, kind: np.ndarray) -> tuple | None:
    """(embeddings `[1, T, D]`, index `[1, T]`) as `Frontend.embed` takes them; None without media."""
    if not asked.slices and not asked.clips:
        return None
    table = np.zeros((*kind.shape, config.llm.hidden_size), jnp.dtype(config.dtype))
    if asked.slices:
        table[kind == PICTURE] = np.concatenate([_see(params, config, image) for image in asked.slices])
    if asked.clips:
        table[kind == SOUND] = np.concatenate([_hear(params, config, sounds) for sounds in asked.clips])
    return table, np.where(kind > 0, np.arange(kind.shape[1]), -1)


def _see(params, config: VenusConfig, image: Image.Image) -> np.ndarray:
    v = config.vision
    patches = bucket(image.width // v.patch_size * (image.height // v.patch_size))
    inputs = images.patchify([image], v.positions_per_side, v.patch_size, patches)
    return np.asarray(_encode(params, config, "encode_images", inputs))


def _hear(params, config: VenusConfig, sounds: list[np.ndarray]) -> np.ndarray:
    """Embeddings of the sounds of one message, as many as their placeholders have in all.

    They are joined into one recording, all but the last cut or filled to a whole number of embeddings, as whole tenths
    of a second are already. The reference joins them as they are; the rests add up and move later embeddings.
    """
    pool = config.audio.pool_step
    widths = [audio_token_count(len(s), pool) * pool * 2 * FRAME_HOP for s in sounds[:-1]]
    whole = [np.pad(s[:width], (0, max(0, width - len(s)))) for s, width in zip(sounds, widths)]
    out = []
    for item in mel.split_clip(np.concatenate([*whole, sounds[-1]])):
        features = mel.clip_log_mel(item).T
        frames = len(features)
        padded = min(bucket(frames), max(frames, 2 * config.audio.max_positions))
        features = np.pad(features, ((0, padded - frames), (0, 0)))[None]
        heard = _encode(params, config, "encode_clips", features, np.array([frames]))
        out.append(np.asarray(heard)[:audio_token_count(len(item), pool)])
    return np.concatenate(out)


# --- answer ---------------------------------------------------------------------------------------------------------
@functools.partial(jax.jit, static_argnames=("config", "room"))
def _answer(params: Params, config: VenusConfig, room: int, ids: Int[Array, "1 t"], length: Int[Array, ""],
            media: tuple | None, stop: Int[Array, "e"], limit: Int[Array, ""], sampling: Sampling, key: jax.Array
            ) -> tuple[Int[Array, "n"], Float[Array, "n d"], Int[Array, ""]]:
    """Feeds the first `length` of `ids` and decodes up to `limit <= room` tokens.

    Returns:
      tokens int32 `[room]`, the states that consumed them `[room, D]`, and their number; the one of `stop` that ended
      the answer is not among them.
    """
    model = functools.partial(Frontend(config).apply, {"params": params})
    x = model(ids, *(media or ()), method="embed")
    index = jnp.arange(ids.shape[1])[None]
    positions = jnp.where(index < length, index, -1)
    chunk = math.gcd(ids.shape[1], PREFILL)
    c = config.llm
    cache = kv_cache.empty(c.num_layers, 1, ids.shape[1] + room, c.num_kv_heads, c.head_dim, x.dtype)

    def prefill(i, carry):
        part = lambda array: jax.lax.dynamic_slice_in_dim(array, i * chunk, chunk, axis=1)
        return model(part(x), part(positions), None, carry[1], method="backbone")

    hidden, cache = jax.lax.fori_loop(0, (length + chunk - 1) // chunk, prefill, (jnp.zeros_like(x[:, :chunk]), cache))

    def choose(state, seen, key):
        scores = model(state, method="logits")
        scores = logits.frequency_penalty(scores, seen.astype(jnp.int32), sampling.repetition_penalty)

        def draw(scores):
            top_k = jnp.where(sampling.top_k > 0, sampling.top_k, scores.shape[-1])
            kept = logits.keep_top_k(scores / sampling.temperature, top_k)
            return jax.random.categorical(key, logits.keep_top_p(kept, sampling.top_p))

        return jax.lax.cond(sampling.greedy, lambda scores: scores.argmax(axis=-1), draw, scores).astype(jnp.int32)

    def step(carry):
        n, token, tokens, states, seen, cache, key = carry
        key, draw_key = jax.random.split(key)
        x = model(token[:, None], method="embed")
        hidden, cache = model(x, (length + n).reshape(1, 1), None, cache, method="backbone")
        seen = seen.at[:, token].set(True)
        return (n + 1, choose(hidden[:, 0], seen, draw_key), tokens.at[n].set(token[0]),
                states.at[n].set(hidden[0, 0]), seen, cache, key)

    key, draw_key = jax.random.split(key)
    seen = jnp.zeros((1, c.vocab_rows), bool)
    token = choose(jnp.take(hidden, (length - 1) % chunk, axis=1), seen, draw_key)
    blank = jnp.zeros((room,), jnp.int32), jnp.zeros((room, c.hidden_size), x.dtype)
    goes_on = lambda carry: (carry[0] < limit) & ~jnp.isin(carry[1][0], stop)
    n, _, tokens, states, *_ = jax.lax.while_loop(goes_on, step, (jnp.int32(0), token, *blank, seen, cache, key))
    return tokens, states, n


# --- speech ---------------------------------------------------------------------------------------------------------
@functools.partial(jax.jit, static_argnames="config")
def _conditions(params, config, ids, states):
    return talker(config.talker, states.dtype).apply({"params": params["talker"]}, ids, states, method="condition")


def _speak(params, config: VenusConfig, conditions: np.ndarray, key: jax.Array) -> np.ndarray:
    """Codes of an answer; where the talker's memory is full it begins afresh, as if with a new answer."""
    def begin(at):
        return HalfDuplexSpeech(params["talker"], config.talker, jax.random.fold_in(key, at), dtype=config.dtype,
                                max_new=min(CONDITION_CODES, config.talker.max_positions // 2))

    speeches = [begin(0)]
    for at in range(0, len(conditions), CONDITION_TOKENS):
        piece, last = jnp.asarray(conditions[at:at + CONDITION_TOKENS]), at + CONDITION_TOKENS >= len(conditions)
        try:
            speeches[-1].push(piece, last)
        except CapacityError:
            speeches.append(begin(at))
            speeches[-1].push(piece, last)
    return np.array([code for speech in speeches for code in speech.codes], np.int32)

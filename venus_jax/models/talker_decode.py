"""Drawing speech codes from the talker: the duplex chunk of one unit, and the half-duplex stream of a whole answer.

Both run `decode_codes`: feed a condition, draw, feed the code drawn, until the end code or a limit. The code drawn last
is never fed back, so a cache holds the condition and all codes but that one. Rows share nothing but the program.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from venus_jax.config import TalkerConfig
from venus_jax.errors import CapacityError
from venus_jax.models.talker import empty_cache, talker
from venus_jax.nn import kv_cache, logits
from venus_jax.typing import Array, Bool, Float, Int, Params


class Draw(NamedTuple):
    """How codes are drawn. Numbers, or `[B]` with one a row; traced: changing them compiles nothing.

    `min_new`: draws before which the end code is barred. `top_p` 1 and `top_k` 0 switch cuts off.
    `end_bias` is added to the end code's score. `greedy`: the likeliest code instead of a draw.
    """

    temperature: float | Array = 0.8
    penalty: float | Array = 1.05
    min_new: int | Array = 0
    top_p: float | Array = 1.0
    top_k: int | Array = 0
    end_bias: float | Array = 0.0
    greedy: bool | Array = False


class Codes(NamedTuple):
    """`tokens` int32 `[B, max_new]` as drawn, the end code included; `drawn` `[B]`; `scores` float32 `[B, max_new, C]` raw."""

    tokens: Int[Array, "b n"]
    drawn: Int[Array, "b"]
    ended: Bool[Array, "b"]
    scores: Float[Array, "b n c"]


PENALTY_WINDOW = 16  # codes the frequency penalty looks back on
MIN_KEEP = 3  # codes that survive every cut


def decode_codes(params: Params, config: TalkerConfig, condition: Float[Array, "b n e"], lengths: Int[Array, "b"],
                 start: Int[Array, "b"], cache: kv_cache.KVCache, key: jax.Array, draw: Draw, max_new: int,
                 history: Int[Array, "b w"] | None = None, window: int | None = None, keep_scores: bool = False,
                 active: Bool[Array, "b"] | None = None, limit: Int[Array, "b"] | None = None, in_order: bool = False
                 ) -> tuple[Codes, kv_cache.KVCache]:
    """Draws up to `max_new` codes per row.

    Args:
      params: the `talker` part of the tree.
      condition: embeddings of the condition, the first `lengths` rows of each count (at least one).
      start: position of the condition's first row.
      cache: earlier entries; must have room for `lengths + max_new - 1` more.
      key: `[B]` keys; a row's draws follow its own key alone.
      history: the last `PENALTY_WINDOW` codes before this call, -1 where none; None: the penalty starts afresh and the
        first draw is neither penalised nor cut.
      window: keep only the newest `window` entries of the cache after every step.
      keep_scores: also return the head's raw scores (for parity tests); otherwise `Codes.scores` has no rows.
      active: rows that speak; the others draw nothing, and their cache stays as it is bit for bit. None: all.
      limit: draws of each row at most, where that is less than `max_new`; at least 1.
      in_order: every entry of the cache lies in the slot of its own position, so that free slots need no search.
    """
    model = talker(config, condition.dtype)
    batch, width = condition.shape[:2]
    draw = Draw(*(jnp.broadcast_to(field, (batch,)) for field in draw))
    active = jnp.ones((batch,), bool) if active is None else active
    limit = jnp.minimum(max_new, max_new if limit is None else limit)
    recent = jnp.full((batch, PENALTY_WINDOW), -1) if history is None else history

    def feed(cache, x, positions):
        slots = positions if in_order else kv_cache.free_slots(cache, positions >= 0)
        hidden, cache, _ = model.apply({"params": params}, x, positions, None, cache, slots)
        if window is not None:
            newest = kv_cache.ranks(cache) >= kv_cache.length(cache)[:, None] - window
            cache = kv_cache.keep(cache, newest | (positions < 0).all(axis=1, keepdims=True))
        return hidden, cache

    def cuts(scores):  # two sorts of all codes: most of a draw's time, so only where asked for
        cut = logits.keep_top_p(scores, draw.top_p, MIN_KEEP)
        return jnp.where(draw.top_k[:, None] > 0, logits.keep_top_k(cut, jnp.maximum(draw.top_k, MIN_KEEP)), cut)

    def choose(hidden, recent, step):
        raw = model.apply({"params": params}, hidden, method="logits")[:, 0]
        raw = raw.at[:, config.eos_token].add(draw.end_bias)
        scores = raw / draw.temperature[:, None]
        counts = logits.count_tokens(recent, recent >= 0, config.num_audio_tokens)
        scores = logits.frequency_penalty(scores, counts, draw.penalty)
        cut = jax.lax.cond(((draw.top_p < 1) | (draw.top_k > 0)).any(), cuts, lambda s: s, scores)
        any_before = (recent >= 0).any(axis=1, keepdims=True)
        scores = jnp.where(any_before, cut, scores)
        barred = (step < draw.min_new)[:, None] & (jnp.arange(config.num_audio_tokens) == config.eos_token)
        scores = jnp.where(barred, -jnp.inf, scores)
        drawn = jax.vmap(lambda key, row: jax.random.categorical(jax.random.fold_in(key, step), row))(key, scores)
        token = jnp.where(draw.greedy, scores.argmax(axis=-1), drawn)
        return token.astype(jnp.int32), raw

    def body(carry):
        step, token, active, codes, recent, cache = carry
        recent = jnp.where(active[:, None], jnp.roll(recent, -1, axis=1).at[:, -1].set(token), recent)
        x = model.apply({"params": params}, token[:, None], method="embed_code")
        hidden, cache = feed(cache, x, jnp.where(active, start + lengths + step - 1, -1)[:, None])
        token, raw = choose(hidden, recent, step)
        codes, active = record(codes, active, token, raw, step)
        return step + 1, token, active, codes, recent, cache

    def record(codes, active, token, raw, step):
        ended = active & (token == config.eos_token)
        scores = codes.scores
        if keep_scores:
            scores = scores.at[:, step].set(jnp.where(active[:, None], raw, 0))
        codes = Codes(codes.tokens.at[:, step].set(jnp.where(active, token, -1)), codes.drawn + active,
                      codes.ended | ended, scores)
        return codes, active & ~ended & (codes.drawn < limit)

    index = jnp.arange(width)
    inside = active[:, None] & (index < lengths[:, None])
    hidden, cache = feed(cache, condition, jnp.where(inside, start[:, None] + index, -1))
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)
    token, raw = choose(last, recent, 0)
    blank = Codes(jnp.full((batch, max_new), -1, jnp.int32), jnp.zeros((batch,), jnp.int32),
                  jnp.zeros((batch,), bool), jnp.zeros((batch, max_new * keep_scores, config.num_audio_tokens), jnp.float32))
    codes, active = record(blank, active, token, raw, 0)
    carry = (jnp.int32(1), token, active, codes, recent, cache)
    carry = jax.lax.while_loop(lambda c: c[2].any(), body, carry)
    return carry[3], carry[5]


CHUNK_CODES = 25  # codes of one second


def generate_chunk(params: Params, config: TalkerConfig, ids: Int[Array, "b n"], hidden: Float[Array, "b n d"],
                   lengths: Int[Array, "b"], start: Int[Array, "b"], cache: kv_cache.KVCache, key: jax.Array,
                   draw: Draw = Draw(), keep_scores: bool = False, active: Bool[Array, "b"] | None = None,
                   limit: Int[Array, "b"] | None = None):
    """The codes of one duplex unit.

    The condition is the unit's text tokens with the states that consumed them, then the begin-of-speech row (alone when
    there is no text). Of up to `limit + 1` draws the last, whether end code or not, is never returned: with
    `draw.min_new = limit + 1` exactly `limit` codes.

    Args:
      ids, hidden: text tokens and backbone states, the first `lengths` of each row count (0 is allowed).
      start: position the turn has reached; 0 at its first unit.
      cache: the turn's cache, every entry in the slot of its own position.
      key: `[B]` keys, new ones for every unit.
      active: rows that speak; the others return no code and keep `start` and cache. None: all.
      limit: the most codes each row returns, where that is less than `CHUNK_CODES`; None: as many.

    Returns:
      codes int32 `[B, 25]` (-1 beyond their count), counts `[B]`, `start` of the next unit, the cache, the raw `Codes`.
    """
    model = talker(config, hidden.dtype)
    text = model.apply({"params": params}, ids, hidden, method="condition")
    bos = model.apply({"params": params}, jnp.full((ids.shape[0], 1), config.audio_bos_token_id), method="embed_text")
    condition = jnp.pad(text, ((0, 0), (0, 1), (0, 0)))
    condition = jnp.where((jnp.arange(condition.shape[1]) == lengths[:, None])[..., None], bos, condition)
    codes, cache = decode_codes(params, config, condition, lengths + 1, start, cache, key, draw, CHUNK_CODES + 1,
                                keep_scores=keep_scores, active=active,
                                limit=None if limit is None else limit + 1, in_order=True)
    count = jnp.maximum(codes.drawn - 1, 0)
    kept = jnp.where(jnp.arange(CHUNK_CODES) < count[:, None], codes.tokens[:, :CHUNK_CODES], -1)
    return kept, count, start + jnp.where(codes.drawn > 0, lengths + 1 + count, 0), cache, codes


@functools.partial(jax.jit, static_argnames=("config", "dtype", "method"))
def _apply(params, config, dtype, method, *args):
    return talker(config, dtype).apply({"params": params}, *args, method=method)


_decode = jax.jit(decode_codes, static_argnames=("config", "max_new", "window"))


class HalfDuplexSpeech:
    """Codes of a whole spoken answer, condition by condition (one session; chat and half-duplex).

    Earlier conditions stay in sight as `config.attention_type` says:
      full_attention: all of them.
      sliding_window: the newest `config.window_size` cache entries.
      sliding_recompute: only the previous condition and its codes, computed anew.
      reindex: the first condition as an anchor and the previous one, moved together, once a third has gone by.

    The end code ends a condition, not the answer. Codes are handed out in blocks of `block`.

    `reference_quirks` reproduces three faults of the reference: a condition that runs into `max_new` never feeds its
    last code back, so that later ones do not see it; "reindex" turns the previous condition's keys as if all had stood
    at its first place (and lets one key of the second condition into the anchor); and an answer whose last condition
    runs into `max_new` keeps its last, incomplete block for ever.
    """

    def __init__(self, params: Params, config: TalkerConfig, key: jax.Array, draw: Draw = Draw(top_p=0.85, top_k=25),
                 max_new: int = 500, block: int = CHUNK_CODES, dtype=jnp.float32, reference_quirks: bool = False):
        self.params, self.config, self.draw, self.max_new, self.block = params, config, draw, max_new, block
        self.reference_quirks = reference_quirks
        self.cache = empty_cache(config, 1, config.max_positions, dtype)
        self.position = 0
        self.codes: list[int] = []  # all of the answer
        self.handed_out = 0
        self._key = key
        self._spans: list[int] = []  # positions each condition and its codes took
        self._previous = None  # embeddings of the last condition and its codes
        self._unfed = None  # embedding of a last code that is still to be fed back
        self.dtype = jnp.dtype(dtype)

    def push(self, condition: Float[Array, "n e"], last: bool = False) -> list[list[int]]:
        """Speaks one condition (rows of `Talker.condition`); returns the blocks that became full, and on `last` the rest.

        Raises:
          CapacityError: the cache could overflow: an answer too long for this `attention_type`. Nothing has changed.
        """
        tail = [self.config.text_eos_token_id] * last + [self.config.audio_bos_token_id]
        tail = _apply(self.params, self.config, self.dtype, "embed_text", jnp.asarray([tail]))
        given = condition = jnp.concatenate([condition[None].astype(self.dtype), tail], axis=1)
        kind = self.config.attention_type
        if kind == "sliding_recompute" and self._previous is not None:
            condition = jnp.concatenate([self._previous, given], axis=1)
        elif self._unfed is not None:
            condition = jnp.concatenate([self._unfed, given], axis=1)
        self._check_room(condition.shape[1])
        if kind == "sliding_recompute":
            self.cache, self.position = kv_cache.reset(self.cache, jnp.array([True])), 0
        elif kind == "reindex" and len(self._spans) > 1:
            self._anchor()
        if kind != "sliding_recompute" and self._unfed is not None:
            self.position -= 1  # the code fed now took its position when it was drawn

        history = [-1] * PENALTY_WINDOW + self.codes
        self._key, key = jax.random.split(self._key)
        width = -(-condition.shape[1] // 16) * 16  # few shapes, few programs
        padded = jnp.pad(condition, ((0, 0), (0, width - condition.shape[1]), (0, 0)))
        codes, self.cache = _decode(
            self.params, self.config, padded, jnp.array([condition.shape[1]]), jnp.array([self.position]), self.cache,
            key[None], self.draw, self.max_new, jnp.array([history[-PENALTY_WINDOW:]]),
            self.config.window_size if kind == "sliding_window" else None)
        new = np.asarray(codes.tokens[0, :int(codes.drawn[0]) - int(codes.ended[0])]).tolist()
        self.codes += new
        self.position += condition.shape[1] + len(new)
        self._spans.append(given.shape[1] + len(new))
        spoken = _apply(self.params, self.config, self.dtype, "embed_code", jnp.maximum(codes.tokens, 0))[:, :len(new)]
        self._previous = jnp.concatenate([given, spoken], axis=1)
        waits = new and not bool(codes.ended[0]) and not self.reference_quirks
        self._unfed = spoken[:, -1:] if waits else None
        return self._blocks(last and not (self.reference_quirks and not bool(codes.ended[0])))

    def _check_room(self, length: int) -> None:
        kind, slots = self.config.attention_type, self.cache.slot_position.shape[1]
        held = 0 if kind == "sliding_recompute" else int(kv_cache.length(self.cache)[0])
        if kind == "reindex" and len(self._spans) > 1:
            held = min(held, self._spans[0] + self._spans[-1])
        needed = held + length + (self.max_new - 1) * (kind != "sliding_window")
        if needed > slots:
            raise CapacityError(f"the talker's cache of {slots} entries could overflow: {held} are held, a condition of "
                                f"{length} and up to {self.max_new} codes come; lower max_new, or use an attention_type "
                                "that forgets")

    def _anchor(self):
        """Keeps the first and the newest condition and closes the gap between them."""
        first, newest, cache = self._spans[0], self._spans[-1], self.cache
        if self.reference_quirks:
            held = int(kv_cache.length(cache)[0])
            if held <= first + newest:
                return
            place, start = kv_cache.ranks(cache), held - newest
            cache = cache._replace(slot_position=jnp.where(cache.slot_position < 0, -1, jnp.minimum(place, start)))
        else:
            place, start = cache.slot_position, self.position - newest
        new = jnp.where(place < first, place, jnp.where(place >= start, place - start + first, -1))
        self.cache = kv_cache.reposition(cache, new, self.config.rope_theta)
        self.position = first + newest

    def _blocks(self, flush: bool) -> list[list[int]]:
        blocks = []
        while len(self.codes) - self.handed_out >= self.block or (flush and self.handed_out < len(self.codes)):
            blocks.append(self.codes[self.handed_out:self.handed_out + self.block])
            self.handed_out += len(blocks[-1])
        return blocks

"""The decision: which token comes next. One rule for listening, speaking, ending and words, per row, float32.

In order, as the reference's duplex decoder does it:

1. An unfiltered draw decides whether the unit ends (`<|chunk_eos|>`); it can end in no other way by choice.
2. Forbidden tokens are barred, the end of the unit among them.
3. Every distinct recent token is penalised.
4. `<|turn_eos|>` is penalised.
5. The listen token is scaled, and wins outright if it ranks high enough.
6. Arg max, or temperature, top-k, top-p and a draw.

With `reference_quirks` rules 3 and 5 are as published: the penalty divides negative scores too (which makes them
likelier), and "listen" is `<|im_end|>`, whose score is multiplied. Mended, a penalty above 1 always lowers, and
`listen_scale` multiplies the odds of `<|listen|>` (log scale is added to its score).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from venus_jax.errors import ConfigError
from venus_jax.stream.state import HISTORY
from venus_jax.stream.vocabulary import Vocabulary
from venus_jax.tokens import ControlTokens
from venus_jax.typing import Array, Bool, Float, Int

CANDIDATES = 128  # a draw looks at this many tokens when every row's top-k allows it; at all of them otherwise


class Controls(NamedTuple):
    """Traced settings, one value a row `[B]`; changing them compiles nothing.

    Attributes:
      greedy: the likeliest token instead of a draw.
      top_k, listen_top_k, max_chars: 0 switches them off; `top_p` 1 likewise.
      repetition_window: recent ids that are penalised, at most `HISTORY`.
      length_penalty: above 1 turns last longer, below they end sooner.
      max_tokens: rounds of a unit; the last is its forced end, so one less token is said.
      max_delegate: tokens of a delegate span that a unit can hold besides.
      max_chars: a unit's text stays shorter than this.
      follow_clock: cap a unit's text by the speech clock: stop where the speech scheduled so far ends nearest to now.
      voice_temperature, voice_penalty: the talker's draw.
      vocabulary: tables shared by all rows.
    """

    greedy: Bool[Array, "b"]
    temperature: Float[Array, "b"]
    top_k: Int[Array, "b"]
    top_p: Float[Array, "b"]
    listen_scale: Float[Array, "b"]
    listen_top_k: Int[Array, "b"]
    repetition_penalty: Float[Array, "b"]
    repetition_window: Int[Array, "b"]
    length_penalty: Float[Array, "b"]
    max_tokens: Int[Array, "b"]
    max_delegate: Int[Array, "b"]
    max_chars: Int[Array, "b"]
    follow_clock: Bool[Array, "b"]
    voice_greedy: Bool[Array, "b"]
    voice_temperature: Float[Array, "b"]
    voice_penalty: Float[Array, "b"]
    vocabulary: Vocabulary


DEFAULTS = dict(greedy=False, temperature=0.7, top_k=20, top_p=0.8, listen_scale=1.0, listen_top_k=0,
                repetition_penalty=1.05, repetition_window=HISTORY, length_penalty=1.1, max_tokens=20, max_delegate=64,
                max_chars=0, follow_clock=True, voice_greedy=False, voice_temperature=0.8, voice_penalty=1.05)
MOST = 1_000_000  # no setting is larger; int32 and float32 hold what is made of it
_POSITIVE = ("temperature", "listen_scale", "repetition_penalty", "length_penalty", "voice_temperature", "voice_penalty")


def controls(batch: int, vocabulary: Vocabulary, **values) -> Controls:
    """Controls with the reference's defaults; each value is a number for all rows or a list of `batch`.

    Raises:
      ConfigError: an unknown name, or a value out of its range, named.
    """
    import numpy as np

    if unknown := sorted(values.keys() - DEFAULTS.keys()):
        raise ConfigError(f"sampling setting {unknown[0]!r} is unknown; expected one of {', '.join(DEFAULTS)}")
    arrays = {}
    for name, default in DEFAULTS.items():
        kind = {bool: np.bool_, int: np.int32, float: np.float32}[type(default)]
        value = values.get(name, default)
        try:
            array = np.broadcast_to(np.asarray(value), (batch,))
            if array.dtype.kind not in {bool: "b", int: "iu", float: "iuf"}[type(default)]:
                raise ValueError
        except (ValueError, TypeError):
            raise ConfigError(f"{name} is {value!r}; expected {type(default).__name__} or {batch} of them") from None
        low = 1e-4 if name in _POSITIVE else 0
        high = 1 if name == "top_p" else MOST
        if kind is not np.bool_ and not ((array >= low) & (array <= high)).all():  # NaN is outside, too
            raise ConfigError(f"{name} is {value!r}; expected a number from {low} to {high}")
        arrays[name] = array.astype(kind)
    if (arrays["max_tokens"] < 1).any():
        raise ConfigError("max_tokens must be at least 1")
    if (arrays["repetition_window"] > HISTORY).any():
        raise ConfigError(f"repetition_window is at most {HISTORY}")
    return Controls(**{name: jnp.asarray(array) for name, array in arrays.items()}, vocabulary=vocabulary)


def process(scores: Float[Array, "b v"], history: Int[Array, "b h"], c: Controls, tokens: ControlTokens,
            reference_quirks: bool) -> Float[Array, "b v"]:
    """Rules 2 to 5: raw scores to those that are drawn from."""
    rows = jnp.arange(scores.shape[0])
    scores = jnp.where(c.vocabulary.forbidden, -jnp.inf, scores)
    age = history.shape[1] - jnp.arange(history.shape[1])
    recent = (history >= 0) & (age <= c.repetition_window[:, None])
    at = jnp.where(recent, history, 0)
    old = jnp.take_along_axis(scores, at, axis=1)
    penalty = c.repetition_penalty[:, None]
    new = old / penalty if reference_quirks else jnp.where(old > 0, old / penalty, old * penalty)
    # equal ids get equal values, so that their order does not matter
    scores = scores.at[rows[:, None], jnp.where(recent, history, scores.shape[1])].set(new, mode="drop")
    turn_eos = scores[:, tokens.turn_eos]
    scores = scores.at[:, tokens.turn_eos].set(
        jnp.where(turn_eos > 0, turn_eos / c.length_penalty, turn_eos * c.length_penalty))
    listen = listen_token(tokens, reference_quirks)
    scaled = scores[:, listen] * c.listen_scale if reference_quirks else scores[:, listen] + jnp.log(c.listen_scale)
    return scores.at[:, listen].set(scaled)


def listen_token(tokens: ControlTokens, reference_quirks: bool) -> int:
    """The token that `listen_scale` and `listen_top_k` act on."""
    return tokens.im_end if reference_quirks else tokens.listen


def candidates(scores: Float[Array, "b v"], c: Controls, count: int) -> tuple[Float[Array, "b k"], Int[Array, "b k"]]:
    """Rule 6 before the draw: the `count` best ids in order, and their scores, -inf where cut off."""
    best, ids = jax.lax.top_k(scores / c.temperature[:, None], count)
    last = jnp.where(c.top_k > 0, jnp.minimum(c.top_k, count), count) - 1  # sorted already: the cuts need no sort
    best = jnp.where(best < jnp.take_along_axis(best, last[:, None], axis=1), -jnp.inf, best)
    chance = jax.nn.softmax(best, axis=-1)
    likelier = jnp.cumsum(chance, axis=-1) - chance
    stays = (likelier < c.top_p[:, None]) | (c.top_p >= 1)[:, None] | (jnp.arange(count) == 0)
    return jnp.where(stays, best, -jnp.inf), ids


def decide(keys: Array, scores: Float[Array, "b v"], history: Int[Array, "b h"], c: Controls, tokens: ControlTokens,
           reference_quirks: bool) -> tuple[Int[Array, "b"], Bool[Array, "b"]]:
    """The next token of every row, and whether it belongs into the history.

    Args:
      keys: one random key a row; a row's draw depends on nothing else but its own scores.
      scores: raw logits.
    """
    end_draw, word_draw = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
    chance = jax.nn.softmax(scores, axis=-1)[:, tokens.chunk_eos]  # a draw, of which only this outcome matters
    ends = jnp.where(c.greedy, scores.argmax(axis=-1) == tokens.chunk_eos, jax.vmap(jax.random.uniform)(end_draw) < chance)

    processed = process(scores, history, c, tokens, reference_quirks)
    listen = listen_token(tokens, reference_quirks)
    rank = (processed > processed[:, listen, None]).sum(axis=-1)
    listens = (rank < c.listen_top_k) & jnp.isfinite(processed[:, listen])

    def draw(count):
        def among(processed):
            best, ids = candidates(processed, c, count)
            chosen = jax.vmap(jax.random.categorical)(word_draw, best)
            return jnp.take_along_axis(ids, chosen[:, None], axis=1)[:, 0]
        return among

    width = scores.shape[1]
    few = min(CANDIDATES, width)
    best = processed.argmax(axis=-1).astype(jnp.int32)
    narrow = (c.greedy | ((c.top_k > 0) & (c.top_k < few))).all()
    how = jnp.where(c.greedy.all(), 0, jnp.where(narrow, 1, 2))
    drawn = jax.lax.switch(how, [lambda s: best, draw(few), draw(width)], processed)
    token = jnp.where(c.greedy, best, drawn)
    token = jnp.where(ends, tokens.chunk_eos, jnp.where(listens, listen, token))
    return token.astype(jnp.int32), ~ends & ~listens


def remember(history: Int[Array, "b h"], token: Int[Array, "b"], rows: Bool[Array, "b"]) -> Int[Array, "b h"]:
    """Appends a token to the marked rows' histories."""
    return jnp.where(rows[:, None], jnp.roll(history, -1, axis=1).at[:, -1].set(token), history)

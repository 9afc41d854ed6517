"""What the jitted step must know about each token besides its row: may it be said, how long does it sound, what does it spell.

Speaking time is estimated from spelling alone, so that training data, live stream and tests share one clock:

    D(text) = sum over characters of SECONDS[kind of character]

Kinds and seconds are the everyday rates of read speech: about 5 Chinese characters, 15 Latin letters or 3 spoken
digits a second, a short breath at a comma and a longer one at a full stop. The published system gives no estimator.
"""

from __future__ import annotations

import dataclasses
import unicodedata
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from venus_jax.tokens import Tokenizer
from venus_jax.typing import Array, Bool, Float, Int

SECONDS = {"han": 0.20, "kana": 0.13, "hangul": 0.18, "letter": 0.065, "digit": 0.30, "pause": 0.15, "stop": 0.30,
           "silent": 0.0}
# Control tokens a model may say; the others lay out what it is given. The reference bars none of those.
_SAID = {"listen", "speak", "turn_eos", "chunk_tts_eos", "tts_bos", "delegate_start", "delegate_end"}
_PAUSES, _STOPS = set(",;:、，；：—"), set(".!?。！？…")


class Vocabulary(NamedTuple):
    """Tables over the backbone's vocabulary rows; arrays, an argument of the step.

    `next_state`, `characters`: a machine that counts characters across byte-level tokens (see `count_characters`).
    """

    forbidden: Bool[Array, "v"]  # never drawn
    special: Bool[Array, "v"]  # not text: left out of transcripts, character counts and remembered words
    seconds: Float[Array, "v"]
    next_state: Int[Array, "8 v"]
    characters: Int[Array, "8 v"]


def vocabulary(tokenizer: Tokenizer, rows: int, reference_quirks: bool = False) -> Vocabulary:
    """Tables of a tokenizer for a model with `rows` rows (padding rows are never drawn).

    Args:
      reference_quirks: `special` is what the reference leaves out of its remembered words, which lacks a few tokens.
    """
    control = tokenizer.control
    barred = {control.tts_pad, control.chunk_eos, *tokenizer.bad_token_ids, *range(tokenizer.vocab_size, rows)}
    if not reference_quirks:
        barred |= {i for name, i in dataclasses.asdict(control).items() if name not in _SAID}
    special = tokenizer.named_special_ids | {control.turn_eos} if reference_quirks else tokenizer.special_ids
    next_state, characters = np.zeros((8, rows), np.int8), np.zeros((8, rows), np.int16)
    seconds = np.zeros(rows, np.float32)
    next_state[:] = np.arange(8)[:, None]  # special tokens and padding spell nothing
    for i, piece in enumerate(tokenizer.pieces[:rows]):
        if i in tokenizer.special_ids:
            continue
        seconds[i] = text_seconds(piece)
        if piece and piece.isascii():  # every byte a character; what was begun before is ill-formed
            next_state[:, i], characters[:, i] = 0, len(piece) + (np.arange(8) > 0)
            continue
        for state in range(8):
            next_state[state, i], characters[state, i] = _run(state, piece)
    mask = lambda ids: np.isin(np.arange(rows), list(ids))
    return Vocabulary(*map(jnp.asarray, (mask(barred), mask(special), seconds, next_state, characters)))


def text_seconds(text: str | bytes) -> float:
    """D(text). Bytes that are part of a character count as their share of a three-byte Chinese character."""
    if isinstance(text, bytes):
        whole = text.decode(errors="ignore")
        loose = len(text) - len(whole.encode())
        return text_seconds(whole) + loose / 3 * SECONDS["han"]
    return sum(SECONDS[_kind(character)] for character in text)


def _kind(character: str) -> str:
    if character in _STOPS:
        return "stop"
    if character in _PAUSES:
        return "pause"
    code = ord(character)
    if 0x3400 <= code <= 0x9FFF or 0xF900 <= code <= 0xFAFF or 0x20000 <= code <= 0x3FFFF:
        return "han"
    if 0x3040 <= code <= 0x30FF:
        return "kana"
    if 0xAC00 <= code <= 0xD7AF:
        return "hangul"
    category = unicodedata.category(character)
    return "digit" if category[0] == "N" else "letter" if category[0] == "L" else "silent"


# --- counting characters ----------------------------------------------------------------------------------------------
# A token may end inside a UTF-8 character. Eight states say what may follow: (lowest, highest) next byte and the state
# after it. State 0 is between characters. An ill-formed sequence counts as one character (U+FFFD) per maximal part, as
# in every decoder that follows the Unicode standard's advice.
_FOLLOW = {1: (0x80, 0xBF, 0), 2: (0x80, 0xBF, 1), 3: (0x80, 0xBF, 2), 4: (0xA0, 0xBF, 1), 5: (0x80, 0x9F, 1),
           6: (0x90, 0xBF, 2), 7: (0x80, 0x8F, 2)}


def _lead(byte: int) -> tuple[int, int]:
    """(state, characters completed) after a byte that begins a character."""
    if 0xC2 <= byte <= 0xDF:
        return 1, 0
    if 0xE0 <= byte <= 0xEF:
        return {0xE0: 4, 0xED: 5}.get(byte, 2), 0
    if 0xF0 <= byte <= 0xF4:
        return {0xF0: 6, 0xF4: 7}.get(byte, 3), 0
    return 0, 1  # ASCII, or a byte that can begin nothing


def _run(state: int, piece: bytes) -> tuple[int, int]:
    count = 0
    for byte in piece:
        if state:
            low, high, after = _FOLLOW[state]
            if low <= byte <= high:
                state = after
                count += state == 0
                continue
            count += 1  # what was begun is ill-formed
        state, done = _lead(byte)
        count += done
    return state, count


def count_characters(tables: Vocabulary, state: Int[Array, "b"], count: Int[Array, "b"], token: Int[Array, "b"]
                     ) -> tuple[Int[Array, "b"], Int[Array, "b"], Int[Array, "b"]]:
    """Appends a token to a text: (state, characters completed, length of the text as decoded now)."""
    new_count = count + tables.characters[state, token]
    new_state = tables.next_state[state, token].astype(jnp.int32)
    return new_state, new_count, new_count + (new_state != 0)

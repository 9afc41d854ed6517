"""What a token spells, how long it sounds and whether it may be said."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.stream.stream_cases import C, ROWS, TOKENIZER, tables
from venus_jax.stream import vocabulary
from venus_jax.stream.vocabulary import SECONDS, count_characters, text_seconds

TABLES = tables()
NUMPY = TABLES._replace(next_state=np.asarray(TABLES.next_state), characters=np.asarray(TABLES.characters))
HARD = sorted(i for i, piece in enumerate(TOKENIZER.pieces[:TOKENIZER.base_size])
              if any(byte >= 0x80 for byte in piece))  # parts of characters


def lengths(ids):
    """The length of the text after each of `ids`, as the step counts it."""
    state, count, found = np.array([0]), np.array([0]), []
    for i in ids:
        state, count, length = count_characters(NUMPY, state, count, np.array([i]))
        found.append(int(length[0]))
    return found


def decoded(ids):
    return [len(TOKENIZER.decode(ids[:n + 1], skip_special=True)) for n in range(len(ids))]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.integers(0, ROWS - 1), st.sampled_from(HARD)), max_size=12))
def test_characters_are_counted_as_decoded(ids):
    assert lengths(ids) == decoded(ids)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=12))
def test_bytes_are_counted_as_decoded(data):
    """Any bytes, well-formed or not, however they are cut into tokens."""
    state = count = 0
    for n, byte in enumerate(data):
        state, done = vocabulary._run(state, bytes([byte]))
        count += done
        assert count + (state != 0) == len(data[:n + 1].decode(errors="replace"))
    assert vocabulary._run(0, data) == (state, count)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=12))
def test_text_in_single_bytes_is_counted(text):
    bytes_of = {piece: i for i, piece in enumerate(TOKENIZER.pieces[:TOKENIZER.base_size]) if len(piece) == 1}
    ids = [bytes_of[bytes([byte])] for byte in text.encode()]
    assert not ids or lengths(ids)[-1] == len(text)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=20), st.text(max_size=20))
def test_seconds_add_up(a, b):
    assert text_seconds(a + b) == pytest.approx(text_seconds(a) + text_seconds(b))
    assert text_seconds(a) >= 0 and text_seconds((a + b).encode()) == pytest.approx(text_seconds(a + b))


@settings(max_examples=100, deadline=None)
@given(st.text("春天来了今天气好", min_size=1, max_size=6), st.data())
def test_a_chinese_character_cut_in_two_sounds_as_long_as_a_whole_one(text, data):
    whole = text.encode()
    cut = data.draw(st.integers(0, len(whole)))
    assert text_seconds(whole[:cut]) + text_seconds(whole[cut:]) == pytest.approx(text_seconds(text))
    assert text_seconds(text) == pytest.approx(SECONDS["han"] * len(text))


def test_seconds_of_a_vocabulary():
    for text in ("hello, world.", "今天天气很好", "one 2 three"):
        ids = TOKENIZER.encode(text)
        assert float(TABLES.seconds[jnp.array(ids)].sum()) == pytest.approx(text_seconds(text), abs=1e-4)
    assert text_seconds("hello") == pytest.approx(5 * SECONDS["letter"])
    assert not TABLES.seconds[jnp.array(sorted(TOKENIZER.special_ids))].any()


def test_what_may_be_said():
    may = [C.listen, C.speak, C.turn_eos, C.chunk_tts_eos, C.tts_bos, C.delegate_start, C.delegate_end,
           *TOKENIZER.encode("ab c")]
    never = [C.tts_pad, C.chunk_eos, C.unk, C.unit_start, C.unit_end, C.im_start, C.im_end, C.image_start, C.slice_end,
             C.backend_start, C.backend_end, C.audio_start, C.tts_eos, *TOKENIZER.bad_token_ids]
    forbidden = np.asarray(TABLES.forbidden)
    assert not forbidden[may].any() and forbidden[never].all()
    published = np.asarray(tables(reference_quirks=True).forbidden)
    assert published[[C.tts_pad, C.chunk_eos, *TOKENIZER.bad_token_ids]].all() and not published[C.im_end]


def test_rows_beyond_the_tokenizer_are_never_said():
    padded = vocabulary.vocabulary(TOKENIZER, ROWS + 6)
    assert np.asarray(padded.forbidden)[ROWS:].all() and padded.seconds.shape == (ROWS + 6,)
    assert not np.asarray(padded.characters)[:, ROWS:].any()

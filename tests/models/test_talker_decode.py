"""Speech codes: every row as if alone, every code accounted for in the cache, every kind of memory what it says."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.tiny import CONFIG
from venus_jax.errors import CapacityError
from venus_jax.models.talker import empty_cache, talker
from venus_jax.models.talker_decode import (CHUNK_CODES, PENALTY_WINDOW, Draw, HalfDuplexSpeech, decode_codes,
                                            generate_chunk)
from venus_jax.nn import kv_cache

C = CONFIG.talker
B, N, SLOTS = 4, 7, 96
GREEDY = Draw(greedy=True, min_new=jnp.zeros(B, jnp.int32))
MAX_NEW, BLOCK = 6, 4


@pytest.fixture(scope="module")
def generate(params):
    jitted = jax.jit(generate_chunk, static_argnames=("config", "keep_scores"))
    return lambda *args, params=params["talker"]: jitted(params, C, *args[:7], True, *args[7:])


@pytest.fixture(scope="module")
def text():
    """(ids, hidden, lengths) of four rows; one says nothing."""
    rng = np.random.default_rng(0)
    return (rng.integers(0, C.num_text_tokens, (B, N)), rng.standard_normal((B, N, CONFIG.llm.hidden_size), np.float32),
            np.array([N, 0, 3, 5]))


def keys(seed, batch=B):
    return jax.random.split(jax.random.key(seed), batch)


def fresh():
    return jnp.zeros(B, jnp.int32), empty_cache(C, B, SLOTS)


def held(cache, row=0):
    """Positions held, in order."""
    return np.asarray(cache.slot_position)[row, slots_of(cache, row)].tolist()


def slots_of(cache, row=0):
    """The slots that hold something, by position."""
    positions = np.asarray(cache.slot_position)[row]
    return np.argsort(positions)[(positions < 0).sum():]


def two_chunks(generate, text, draws, key=0):
    """Codes of two units in a row, [(codes, count), ...], and the state after them."""
    ids, hidden, lengths = text
    (start, cache), out = fresh(), []
    for i, draw in enumerate(draws):
        codes, count, start, cache, _ = generate(np.roll(ids, i, axis=1), hidden, lengths, start, cache,
                                                 keys(key + i), draw)
        out.append((np.asarray(codes), np.asarray(count)))
    return out, start, cache


def test_rows_speak_as_if_alone(generate, text):
    """Rows of other lengths, other limits and other ends beside a row change none of its codes, nor its cache."""
    draws = [GREEDY._replace(end_bias=1e4, min_new=jnp.array([26, 0, 3, 10])),
             GREEDY._replace(end_bias=1e4, min_new=jnp.array([7, 26, 0, 26]))]
    together, start, cache = two_chunks(generate, text, draws)
    assert [count.tolist() for _, count in together] == [[25, 0, 3, 10], [7, 25, 0, 25]]
    for row in range(B):
        copies = tuple(np.repeat(x[row:row + 1], B, axis=0) for x in text)
        own = [draw._replace(min_new=jnp.repeat(draw.min_new[row], B)) for draw in draws]
        alone, own_start, own_cache = two_chunks(generate, copies, own)
        for (codes, count), (own_codes, own_count) in zip(together, alone):
            assert count[row] == own_count[0]
            np.testing.assert_array_equal(codes[row], own_codes[0])
        assert start[row] == own_start[0]
        assert held(cache, row) == held(own_cache)


def row_of(tree, row):
    """Row `row` of arrays that are all `[B, ...]` or, in a cache, `[L, B, ...]`."""
    return jax.tree.map(lambda x: x[:, row:row + 1] if x.ndim == 5 else x[row:row + 1], tree)


def test_rows_come_and_go_as_if_alone(generate, text):
    """Each with its own key, ways to draw, limits and pauses over four units: the same codes as in a batch of one."""
    rows, rng = 3, np.random.default_rng(1)
    ids, hidden, lengths = (x[:rows] for x in text)
    activity = np.array([[1, 0, 1], [1, 1, 0], [0, 0, 0], [1, 1, 1]], bool)
    limits = np.array([[25, 25, 3], [6, 25, 25], [5, 5, 5], [12, 0, 13]])
    draw = Draw(temperature=jnp.array([0.8, 1.2, 0.5]), penalty=jnp.array([1.05, 1.0, 2.0]),
                min_new=jnp.array([26, 4, 0]), top_p=jnp.array([1.0, 0.9, 1.0]), top_k=jnp.array([0, 0, 7]),
                end_bias=jnp.array([0.0, 2.0, 0.0]), greedy=jnp.array([False, False, False]))
    state = jnp.zeros(rows, jnp.int32), empty_cache(C, rows, SLOTS)
    alone = [row_of(state, row) for row in range(rows)]
    for unit, (active, limit) in enumerate(zip(activity, limits)):
        given = np.roll(ids, unit, axis=1), np.where(active[:, None, None], hidden, np.nan), lengths
        before, key = state, keys(unit, rows)
        codes, count, *state, raw = generate(*given, *before, key, draw, active, limit)
        assert (count <= limit).all() and (count[~active] == 0).all() and (raw.drawn[~active] == 0).all()
        for row in range(rows):
            if active[row]:
                own_key, own_draw, own_limit = row_of((key, draw, limit), row)
                own_codes, own_count, *alone[row], _ = generate(*row_of(given, row), *alone[row], own_key, own_draw,
                                                                None, own_limit)
                assert own_count[0] == count[row]
                np.testing.assert_array_equal(own_codes[0], codes[row])
            else:
                assert (codes[row] == -1).all()
                jax.tree.map(np.testing.assert_array_equal, row_of(state, row), row_of(list(before), row))
            assert state[0][row] == alone[row][0][0]
            assert held(state[1], row) == held(alone[row][1]) == list(range(int(state[0][row])))
    assert len({*np.asarray(codes[0]).tolist()}) > 5, "a row that repeats itself would not notice another's key"


def test_a_limit_is_met_exactly_and_stops_only_its_row(generate, text):
    """The codes are the first of the unlimited ones; the limit is traced, and counted in codes, not in draws."""
    limit = jnp.array([25, 0, 12, 13])
    speak = lambda limit: generate(*text, *fresh(), keys(0), GREEDY._replace(min_new=limit + 1), None, limit)
    ample, *_ = speak(jnp.full(B, 25))
    codes, count, start, cache, raw = speak(limit)
    assert count.tolist() == limit.tolist() and raw.drawn.tolist() == (limit + 1).tolist()
    for row, n in enumerate(limit.tolist()):
        np.testing.assert_array_equal(codes[row, :n], ample[row, :n])
        assert (codes[row, n:] == -1).all()
        assert held(cache, row) == list(range(int(text[2][row]) + 1 + n)) and start[row] == text[2][row] + 1 + n


def test_a_window_forgets_nothing_of_a_row_that_pauses(params):
    """Though the row holds more than the window keeps."""
    cache = empty_cache(C, 2, 32)
    entries = jnp.ones((C.num_layers, 2, 20, C.num_kv_heads, C.head_dim))
    cache = kv_cache.append(cache, entries, entries, jnp.tile(jnp.arange(20), (2, 1)))
    speak = jax.jit(decode_codes, static_argnames=("config", "max_new", "window"))
    codes, after = speak(params["talker"], C, jnp.ones((2, 3, C.hidden_size)), jnp.array([3, 3]), jnp.array([20, 20]),
                         cache, keys(0, 2), Draw(min_new=9), 4, window=10, active=jnp.array([True, False]))
    assert codes.drawn.tolist() == [4, 0] and held(after, 0) == list(range(16, 26))
    jax.tree.map(np.testing.assert_array_equal, row_of(after, 1), row_of(cache, 1))


def test_the_last_code_drawn_is_neither_returned_nor_fed(generate, text):
    """25 codes of 26 draws; the cache holds the condition and the returned codes, at consecutive positions."""
    ids, hidden, lengths = text
    draw = GREEDY._replace(min_new=jnp.array([26, 26, 4, 1]), end_bias=1e4)
    codes, count, start, cache, raw = generate(ids, hidden, lengths, *fresh(), keys(0), draw)
    assert codes.shape == (B, CHUNK_CODES) and count.tolist() == [25, 25, 4, 1]
    assert raw.drawn.tolist() == [26, 26, 5, 2] and raw.ended.tolist() == [False, False, True, True]
    for row in range(B):
        n = int(count[row])
        assert (codes[row, n:] == -1).all() and (codes[row, :n] < C.eos_token).all() and (codes[row, :n] >= 0).all()
        assert start[row] == lengths[row] + 1 + n
        assert held(cache, row) == list(range(int(start[row])))


def test_scores_are_those_of_one_pass_and_codes_their_likeliest(params, generate, text):
    """Against the talker run once over condition and codes without a cache, and the rules of drawing in plain loops."""
    ids, hidden, lengths = text
    draw = GREEDY._replace(min_new=jnp.array([26, 26, 26, 0]), penalty=1.5)  # strong: every count matters
    codes, count, _, _, raw = generate(ids, hidden, lengths, *fresh(), keys(0), draw)
    model, row = talker(C), 0

    @jax.jit
    def one_pass(params, ids, hidden, codes):
        apply = lambda *args, **kwargs: model.apply({"params": params}, *args, **kwargs)
        bos = apply(jnp.array([[C.audio_bos_token_id]]), method="embed_text")
        x = jnp.concatenate([apply(ids, hidden, method="condition"), bos, apply(codes, method="embed_code")], axis=1)
        states = apply(x, jnp.arange(x.shape[1])[None])[0]
        return apply(states[0, ids.shape[1]:], method="logits")

    scores = np.asarray(one_pass(params["talker"], ids[row:row + 1], hidden[row:row + 1], codes[row:row + 1]))
    np.testing.assert_allclose(raw.scores[row], scores, rtol=0, atol=1e-4)

    for row in range(B):
        drawn = np.asarray(raw.tokens[row, :int(raw.drawn[row])]).tolist()
        for step, code in enumerate(drawn):
            z = np.asarray(raw.scores[row, step], np.float64) / 0.8
            for c in set(drawn[max(0, step - PENALTY_WINDOW):step]):
                factor = 1.5 ** drawn[max(0, step - PENALTY_WINDOW):step].count(c)
                z[c] = z[c] * factor if z[c] < 0 else z[c] / factor
            if step < draw.min_new[row]:
                z[C.eos_token] = -np.inf
            assert z.argmax() == code
    assert len(set(drawn)) > 5, "a talker that repeats itself would not notice a wrong history"


def test_the_penalty_looks_back_sixteen_codes(params, generate, text):
    """A talker whose scores never change goes round its seventeen likeliest codes when repeating costs everything."""
    steady = {**params["talker"], "layers": jax.tree.map(jnp.zeros_like, params["talker"]["layers"]),
              "emb_code": jax.tree.map(jnp.ones_like, params["talker"]["emb_code"])}
    draw = GREEDY._replace(min_new=jnp.array([26] * B), penalty=1e6)
    codes = np.asarray(generate(*text, *fresh(), keys(0), draw, params=steady)[0])[0, 1:].tolist()
    assert len(set(codes[:17])) == 17 and codes[17:] == codes[:7]


def test_draws_follow_the_key(generate, text):
    ids, hidden, lengths = (np.repeat(x[:1], B, axis=0) for x in text)
    speak = lambda key, **changes: np.asarray(generate(
        ids, hidden, lengths, *fresh(), keys(key),
        GREEDY._replace(greedy=False, min_new=jnp.array([26] * B), **changes))[0])
    codes = speak(1)
    np.testing.assert_array_equal(codes, speak(1))
    assert (codes != speak(2)).mean() > 0.5
    assert (codes[0] != codes[1]).any()  # equal rows with keys of their own
    np.testing.assert_array_equal(speak(3, temperature=1e-4)[0], speak(4, temperature=1e-4)[0])


# --- the half-duplex stream -----------------------------------------------------------------------------------------
def condition(seed, length=5):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((length, C.hidden_size), np.float32))


def speech_of(params, kind="full_attention", **options):
    config = dataclasses.replace(C, attention_type=kind, window_size=13)
    draw = Draw(greedy=True, top_p=0.85, top_k=25)
    return HalfDuplexSpeech(params["talker"], config, jax.random.key(0), draw, MAX_NEW, BLOCK, **options)


def say(speech, seed, codes=None, last=False, length=5):
    """One condition of `length` rows; with `codes` the end code comes after exactly that many."""
    ending = dict(min_new=MAX_NEW if codes is None else codes, end_bias=0.0 if codes is None else 1e4)
    speech.draw = speech.draw._replace(**ending)
    return speech.push(condition(seed, length), last)


def text_rows(params, *ids):
    return params["talker"]["emb_text"]["embedding"][np.array(ids)]


def code_rows(params, codes):
    return params["talker"]["emb_code"]["embedding"][np.array(codes)]


def decode(params, speech, rows, history, cache=None, start=0):
    """`decode_codes` by hand: the codes drawn after the embeddings `rows`. The kind of memory is not its affair."""
    cache = empty_cache(C, 1, C.max_positions) if cache is None else cache
    rows = jnp.concatenate([rows, text_rows(params, C.audio_bos_token_id)])
    history = ([-1] * PENALTY_WINDOW + history)[-PENALTY_WINDOW:]
    codes, cache = jax.jit(decode_codes, static_argnames=("config", "max_new", "window"))(
        params["talker"], dataclasses.replace(speech.config, attention_type="sliding_recompute"),
        jnp.pad(rows, ((0, 32 - len(rows)), (0, 0)))[None], jnp.array([len(rows)]),
        jnp.array([start]), cache, keys(9, 1), speech.draw, MAX_NEW, jnp.array([history]), None)
    return codes.tokens[0, :int(codes.drawn[0]) - int(codes.ended[0])].tolist(), cache


def test_blocks_lose_nothing(params):
    """Full blocks as they fill, the rest at the end, even where the last condition ran into its limit."""
    speech, blocks = speech_of(params), []
    for i, codes in enumerate((3, 6, 0, None)):
        blocks += say(speech, i, codes, last=i == 3)
    assert [len(block) for block in blocks] == [4, 4, 4, 3]
    assert sum(blocks, []) == speech.codes and C.eos_token not in speech.codes

    reference = speech_of(params, reference_quirks=True)
    kept = [block for i, codes in enumerate((3, 6, 0, None)) for block in say(reference, i, codes, last=i == 3)]
    assert kept == blocks[:3]  # the reference keeps the last one for ever
    assert sum(kept + say(reference, 4, 1, last=True), []) == reference.codes  # unless the end code comes


def test_everything_said_stays_in_sight_of_full_attention(params):
    """The third condition is spoken as after one long sequence of conditions and codes; the penalty spans them too.

    The second ran into its limit: the code drawn last is fed before the third.
    """
    speech, rows = speech_of(params), []
    for i, codes in enumerate((3, None)):
        before = len(speech.codes)
        say(speech, i, codes)
        bos = text_rows(params, C.audio_bos_token_id)
        rows += [condition(i), bos, code_rows(params, speech.codes[before:])]
    history = list(speech.codes)
    say(speech, 2)
    wanted, cache = decode(params, speech, jnp.concatenate([*rows, condition(2)]), history)
    assert speech.codes[len(history):] == wanted
    assert held(speech.cache) == held(cache) == list(range(speech.position - 1))  # the newest waits to be fed


def test_sliding_window_keeps_the_newest_entries(params):
    speech = speech_of(params, "sliding_window")
    for i in range(4):
        say(speech, i, codes=4)
        total = (i + 1) * (5 + 1 + 4)
        assert held(speech.cache) == list(range(max(0, total - 13), total))
    assert speech.position == 40


def test_sliding_recompute_is_a_fresh_run_on_previous_and_current(params):
    speech = speech_of(params, "sliding_recompute")
    say(speech, 0, 3, length=17)  # all lengths are padded to one, 32
    say(speech, 1)
    history = list(speech.codes)
    say(speech, 2, length=8)
    rows = [condition(1), text_rows(params, C.audio_bos_token_id), code_rows(params, history[3:]),
            condition(2, 8)]
    wanted, cache = decode(params, speech, jnp.concatenate(rows), history)
    assert speech.codes[len(history):] == wanted
    assert held(speech.cache) == held(cache)


def test_reindex_keeps_first_and_previous_side_by_side(params):
    """The fourth condition is spoken as by a talker whose cache was built so by hand, keys turned in float64."""
    speech = speech_of(params, "reindex")
    for i, codes in enumerate((4, 4, None)):
        say(speech, i, codes)
    assert held(speech.cache) == list(range(10 + 10 + 11)) and speech.position == 32
    before, history = speech.cache, list(speech.codes)
    say(speech, 3)
    assert held(speech.cache) == list(range(speech.position - 1)) == list(range(10 + 12 + 6 + MAX_NEW - 1))

    old = np.concatenate([np.arange(10), np.arange(20, 31)])  # the second condition is dropped, the third moves up
    k, v = (np.asarray(x, np.float64)[:, 0, :, slots_of(before)[old]] for x in (before.k, before.v))  # [21, L, K, H]
    angle = (np.arange(21) - old)[:, None] * C.rope_theta ** (-np.arange(0, C.head_dim, 2) / C.head_dim)
    cos, sin, (a, b) = np.cos(angle)[:, None, None], np.sin(angle)[:, None, None], np.split(k, 2, axis=-1)
    k = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    cache = kv_cache.append(empty_cache(C, 1, C.max_positions), *(jnp.float32(np.swapaxes(x, 0, 1))[:, None] for x in (k, v)),
                            jnp.arange(21)[None])
    rows = jnp.concatenate([code_rows(params, history[-1:]), condition(3)])  # the code drawn last was not yet fed
    wanted, cache = decode(params, speech, rows, history, cache, start=21)
    assert speech.codes[len(history):] == wanted
    keys = lambda cache: np.asarray(cache.k)[:, 0, :, slots_of(cache)]
    np.testing.assert_allclose(keys(speech.cache), keys(cache), rtol=0, atol=1e-4)

    say(speech, 4, codes=4)
    assert held(speech.cache) == list(range(10 + 12 + 10)) and speech.position == 10 + 12 + 10


def test_an_answer_too_long_for_the_cache_is_refused_unspoken(params):
    """Rather than losing its newest entries without a word."""
    config = dataclasses.replace(C, max_positions=10)
    speech = HalfDuplexSpeech(params["talker"], config, jax.random.key(0), max_new=MAX_NEW)
    with pytest.raises(CapacityError, match="10 entries"):
        speech.push(condition(0))
    assert speech.codes == [] and speech.position == 0 and not held(speech.cache)

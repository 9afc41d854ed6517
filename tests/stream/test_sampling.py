"""The decision as a random variable: what is drawn, how often, and never; and where the reference's rule is another."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from venus_jax.errors import ConfigError
from venus_jax.stream import sampling
from venus_jax.stream.sampling import CANDIDATES, HISTORY, controls
from venus_jax.stream.vocabulary import Vocabulary
from venus_jax.tokens import ControlTokens

ROWS, DRAWS = 200, 4000  # more rows than a narrow draw looks at
C = ControlTokens(*range(len(dataclasses.fields(ControlTokens))))
WORD = 40
BARRED = np.zeros(ROWS, bool)
BARRED[[C.tts_pad, C.chunk_eos, 199]] = True
TABLES = Vocabulary(jnp.asarray(BARRED), *(jnp.zeros(ROWS),) * 2, *(jnp.zeros((8, ROWS), jnp.int8),) * 2)
EMPTY = jnp.full((1, HISTORY), -1)
decide = jax.jit(sampling.decide, static_argnums=(4, 5))
process = jax.jit(sampling.process, static_argnums=(3, 4))


def history(*ids):
    return jnp.asarray([[-1] * (HISTORY - len(ids)) + list(ids)])


def drawn(scores, count=DRAWS, seed=0, past=EMPTY, quirks=False, **settings):
    """(tokens, recorded) of `count` rows with the same scores and keys of their own."""
    settings = {"repetition_penalty": 1.0, "length_penalty": 1.0, **settings}
    keys = jax.random.split(jax.random.key(seed), count)
    rows = lambda a: jnp.broadcast_to(jnp.asarray(a, jnp.float32), (count, ROWS))
    token, recorded = decide(keys, rows(scores), jnp.broadcast_to(past, (count, HISTORY)),
                             controls(count, TABLES, **settings), C, quirks)
    return np.asarray(token), np.asarray(recorded)


@functools.cache
def scores():
    s = np.random.default_rng(0).normal(size=ROWS).astype(np.float32) * 1.5
    s[C.chunk_eos] = np.log(0.3 * np.exp(s).sum())
    s[199] = 8.0  # barred, and would be the likeliest
    return s


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def expected(s, temperature=1.0, top_k=0, top_p=1.0):
    """Chances of words by the rule as it is written."""
    s = np.where(BARRED, -np.inf, s.astype(np.float64)) / temperature
    if top_k:
        s = np.where(s >= np.sort(s)[-top_k], s, -np.inf)
    order = np.argsort(-s, kind="stable")
    before = np.cumsum(softmax(s)[order]) - softmax(s)[order]
    s[order[before >= top_p]] = -np.inf
    return softmax(s)


def test_a_unit_ends_as_often_as_its_raw_score_says():
    """Whatever else is set: temperature, cuts and penalties do not touch the first draw."""
    chance = softmax(scores().astype(np.float64))[C.chunk_eos]
    for settings in (dict(temperature=0.2, top_k=1), dict(temperature=2.0, top_k=0, top_p=0.5, length_penalty=3.0)):
        token, recorded = drawn(scores(), past=history(C.chunk_eos), **settings)
        ends = (token == C.chunk_eos).sum()
        assert abs(ends - DRAWS * chance) < 4 * np.sqrt(DRAWS * chance * (1 - chance))
        assert not recorded[token == C.chunk_eos].any() and recorded[token != C.chunk_eos].all()


@pytest.mark.parametrize("settings", [
    dict(temperature=0.7, top_k=20, top_p=0.8), dict(temperature=1.3, top_k=5, top_p=1.0),
    dict(temperature=1.0, top_k=0, top_p=0.9), dict(temperature=1.0, top_k=CANDIDATES + 10, top_p=1.0),
    dict(temperature=1.0, top_k=0, top_p=1.0)], ids=str)
def test_words_are_drawn_with_their_chances_and_never_beyond_a_cut(settings):
    token, _ = drawn(scores(), seed=1, **settings)
    said = token[token != C.chunk_eos]
    chance = expected(scores(), **settings)
    counts = np.bincount(said, minlength=ROWS)
    assert not counts[chance == 0].any() and not counts[BARRED].any()
    often = chance * len(said) >= 5
    rare = np.array([counts[~often].sum(), chance[~often].sum() * len(said)])
    observed, wanted = np.append(counts[often], rare[0]), np.append(chance[often] * len(said), max(rare[1], 1e-9))
    keep = wanted > 1
    chi2, freedom = ((observed - wanted)[keep] ** 2 / wanted[keep]).sum(), keep.sum() - 1
    assert chi2 < freedom + 4 * np.sqrt(2 * freedom)


def test_a_neighbour_s_settings_change_no_draw():
    """One row that wants all tokens makes the step look at all of them; the others draw what they would have drawn."""
    narrow, _ = drawn(scores(), count=500, temperature=1.0, top_k=20, top_p=0.9)
    mixed, _ = drawn(scores(), count=500, temperature=1.0, top_k=[20] * 499 + [0], top_p=0.9)
    greedy, _ = drawn(scores(), count=500, temperature=1.0, top_k=20, top_p=0.9, greedy=[False] * 499 + [True])
    np.testing.assert_array_equal(narrow[:499], mixed[:499])
    np.testing.assert_array_equal(narrow[:499], greedy[:499])
    assert len(np.unique(narrow)) > 10


def test_greedy():
    s = scores().copy()
    token, recorded = drawn(s, count=2, greedy=True)
    assert (token == np.where(BARRED, -np.inf, s).argmax()).all() and recorded.all()
    s[C.chunk_eos] = 20.0
    token, recorded = drawn(s, count=2, greedy=True)
    assert (token == C.chunk_eos).all() and not recorded.any()
    s[C.chunk_eos], s[WORD] = 20.0, 20.5  # not the likeliest: it cannot win any more
    assert (drawn(s, count=2, greedy=True)[0] == WORD).all()


def processed(values, past=EMPTY, quirks=False, **settings):
    s = np.full(ROWS, -3.0, np.float32)
    for token, value in values.items():
        s[token] = value
    settings = {"repetition_penalty": 1.0, "length_penalty": 1.0, **settings}
    return np.asarray(process(jnp.asarray(s)[None], past, controls(1, TABLES, **settings), C, quirks))[0]


def test_the_pad_of_speech_is_never_drawn():
    """Surprise 3: the reference forbids it too."""
    for quirks in (False, True):
        assert processed({C.tts_pad: 50.0}, quirks=quirks)[C.tts_pad] == -np.inf


def test_a_repetition_is_penalised_but_in_the_reference_a_negative_score_is_raised():
    """Surprise 2."""
    words, past = {WORD: 4.0, WORD + 1: -4.0, WORD + 2: 4.0}, history(WORD, WORD + 1, WORD, C.chunk_eos)
    mended = processed(words, past, repetition_penalty=2.0)
    assert mended[[WORD, WORD + 1, WORD + 2]].tolist() == [2.0, -8.0, 4.0]
    published = processed(words, past, quirks=True, repetition_penalty=2.0)
    assert published[[WORD, WORD + 1, WORD + 2]].tolist() == [2.0, -2.0, 4.0]
    assert mended[C.chunk_eos] == published[C.chunk_eos] == -np.inf  # barred stays barred


def test_repetitions_are_forgotten_behind_the_window():
    past = history(WORD, WORD + 1, WORD + 2)
    s = processed({WORD + i: 4.0 for i in range(3)}, past, repetition_penalty=2.0, repetition_window=2)
    assert s[[WORD, WORD + 1, WORD + 2]].tolist() == [4.0, 2.0, 2.0]


def test_length_penalty_makes_turns_longer_on_either_side_of_zero():
    for quirks in (False, True):
        for score, penalised in ((4.0, 2.0), (-4.0, -8.0)):
            assert processed({C.turn_eos: score}, quirks=quirks, length_penalty=2.0)[C.turn_eos] == penalised


def test_listen_scale_multiplies_the_odds_of_listening_but_in_the_reference_a_score_of_another_token():
    """Surprises 1 and 2."""
    values = {C.listen: -1.0, C.im_end: -1.0, WORD: 1.0}
    plain, scaled = processed(values), processed(values, listen_scale=3.0)
    odds = lambda s: softmax(s)[C.listen] / (1 - softmax(s)[C.listen])
    assert odds(scaled) == pytest.approx(3 * odds(plain), rel=1e-5) and scaled[C.im_end] == plain[C.im_end]
    published = processed(values, quirks=True, listen_scale=3.0)
    assert published[C.listen] == -1.0 and published[C.im_end] == -3.0


def test_listening_that_ranks_high_enough_wins_unrecorded():
    s = np.full(ROWS, -3.0, np.float32)
    s[[WORD, WORD + 1, C.listen, C.im_end, C.chunk_eos]] = 3.0, 2.0, 1.0, 1.5, -30.0
    for quirks, token, rank in ((False, C.listen, 3), (True, C.im_end, 2)):
        won, recorded = drawn(s, count=50, quirks=quirks, listen_top_k=rank + 1)
        assert (won == token).all() and not recorded.any()
        assert (drawn(s, count=50, quirks=quirks, listen_top_k=rank, top_k=1)[0] == WORD).all()
    s[C.chunk_eos] = 30.0  # the end of the unit comes first
    assert (drawn(s, count=50, listen_top_k=9)[0] == C.chunk_eos).all()


def test_remember():
    past = jnp.broadcast_to(history(1, 2), (2, HISTORY))
    new = np.asarray(sampling.remember(past, jnp.array([7, 8]), jnp.array([True, False])))
    assert new[0, -3:].tolist() == [1, 2, 7] and new[1, -3:].tolist() == [-1, 1, 2]


@pytest.mark.parametrize("settings, message", [
    (dict(temprature=1.0), "'temprature' is unknown"), (dict(temperature=0.0), "temperature is 0.0"),
    (dict(top_p=float("nan")), "top_p is nan"), (dict(top_k=-1), "top_k is -1"), (dict(top_k=2.5), "top_k is 2.5"),
    (dict(max_tokens=0), "max_tokens"), (dict(repetition_window=HISTORY + 1), "repetition_window"),
    (dict(greedy="yes"), "greedy is 'yes'"), (dict(top_k=[1, 2, 3]), "top_k")])
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        controls(2, TABLES, **settings)

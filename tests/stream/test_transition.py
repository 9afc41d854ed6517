"""The transition: what rows, padding, shapes, joins and time must not change; and the grammar, rule by rule."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.stream import stream_cases as cases
from tests.stream.stream_cases import C, WORDS, Scripted
from venus_jax import api
from venus_jax.errors import CapacityError, ConfigError
from venus_jax.models.talker_decode import CHUNK_CODES
from venus_jax.stream.state import StreamConfig, codes_per_unit, init_state
from venus_jax.stream.transition import prefill, transition

A, B, D, E, F, G = WORDS[:6]
LISTEN = [C.listen]


# --- random sessions ------------------------------------------------------------------------------------------------
ROWS, UNITS = range(4), 72


@pytest.fixture(scope="module")
def ticks():
    return cases.random_ticks(np.random.default_rng(8), len(ROWS), UNITS)


@pytest.fixture(scope="module")
def record(ticks):
    """The session that the others are compared with: four rows, every state and output."""
    return list(cases.run_ticks(ticks, list(ROWS)))


def test_the_random_session_does_everything(ticks, record):
    """Otherwise the tests below would show little."""
    outs = [step[-1] for step in record]
    count = lambda what: int(sum(np.sum(what(out) & out.active) for out in outs))
    assert count(lambda out: out.active) >= 200
    for what in (lambda out: out.is_listen, lambda out: ~out.is_listen, lambda out: out.end_of_turn,
                 lambda out: out.flush, lambda out: out.forced_turn_end, lambda out: out.text_count > 1,
                 lambda out: out.code_count == 25,
                 lambda out: out.delegate_count > 1, lambda out: out.terminator == C.chunk_eos,
                 lambda out: (out.code_count > 0) & (out.code_count < 25)):
        assert count(what) >= 5
    assert sum(int(out.full.sum()) for out in outs) >= 3
    assert sum(len(tick.joins) for tick in ticks) >= 8 and sum(len(tick.joins) == 1 for tick in ticks[1:]) >= 4
    assert any(len(s.units) > 12 for row in ROWS for s in cases.sessions_of(ticks, record, row))


@pytest.mark.parametrize("row", ROWS)
def test_a_row_is_as_if_it_were_alone(ticks, record, row):
    """Neighbours change nothing; nor does a larger bucket, in which the lone row is packed."""
    last = None
    for step, alone in zip(record, cases.run_ticks(ticks, [row], bucket=cases.Bucket(3, 20))):
        if alone is None:
            continue
        together = cases.said(step[-1], row)
        assert cases.said(alone[-1]) == together
        last = step[2], alone[2]
    cases.assert_same_row(cases.row_of(last[1], 0), cases.row_of(last[0], row), tolerance=1e-5)


def test_rows_that_take_no_part_keep_every_bit(record):
    kept = 0
    for before, (inputs, _, feedback), after, out in record:
        for row in ROWS:
            idle = not inputs.active[row] or feedback.stop[row] or bool(out.full[row])
            assert bool(out.active[row]) != idle
            if idle:
                cases.assert_untouched(before, after, row)
                kept += 1
    assert kept >= 20


def junk(rng):
    """Fills every place that must not count."""
    def change(state, packed):
        inputs, background, feedback = (type(part)(*jax.tree.map(np.copy, list(part))) for part in packed)
        beyond = lambda array, count: np.arange(array.shape[1]) >= count[:, None]
        noise = lambda shape: rng.integers(0, cases.ROWS, shape).astype(np.int32)
        idle = ~inputs.active | feedback.stop
        for ids, count in ((inputs.ids, inputs.count), (background.ids, background.count)):
            wrong = beyond(ids, count) | idle[:, None]
            ids[wrong] = noise(ids.shape)[wrong]
        wrong = beyond(inputs.media_index, inputs.count) | idle[:, None]
        inputs.media_index[wrong] = rng.integers(-1, 16, wrong.shape)[wrong]
        inputs.samples[idle | ~inputs.has_sound] = rng.uniform(-1, 1, inputs.samples.shape[1])
        inputs.has_sound[idle] = True
        inputs.count[idle] = rng.integers(0, inputs.ids.shape[1])
        feedback.force_listen[~inputs.active] = True
        feedback.played[idle] = rng.uniform(0, 9)
        pictures = inputs.images
        padding = np.arange(pictures.patches.shape[2]) >= pictures.grid_hw.prod(-1)[..., None]
        pictures.patches[padding] = rng.uniform(-1e3, 1e3, pictures.patches.shape[-1])
        pictures.position_ids[padding] = rng.integers(0, 25)

        def stale(cache):
            free = (cache.slot_position < 0)[None, :, None, :, None]
            spoil = lambda a: jnp.where(free, jnp.asarray(1e4 * rng.standard_normal(a.shape), a.dtype), a)
            return cache._replace(k=spoil(cache.k), v=spoil(cache.v))

        pending = jnp.where(jnp.arange(3) < state.pending_count[:, None], state.pending, noise((len(idle), 3)))
        caches = {name: stale(getattr(state, name)) for name in cases.CACHES}
        return state._replace(**caches, pending=pending), (inputs, background, feedback)

    return change


def test_junk_where_nothing_counts_changes_nothing(ticks, record):
    for step, spoilt in zip(record, cases.run_ticks(ticks, list(ROWS), junk(np.random.default_rng(8)))):
        for row in ROWS:
            if step[-1].active[row]:
                assert cases.said(spoilt[-1], row) == cases.said(step[-1], row)
    for row in ROWS:
        cases.assert_same_row(cases.row_of(spoilt[2], row), cases.row_of(step[2], row))


@pytest.mark.parametrize("row", ROWS)
def test_slow_recompute_agrees(ticks, record, row):
    """The whole session as one training sequence, without any cache, makes the same decisions."""
    for session in cases.sessions_of(ticks, record, row):
        scores = cases.recomputed_scores(session)
        for place, live in session.decisions:
            np.testing.assert_allclose(scores[place], live, rtol=0, atol=2e-4)


@pytest.mark.parametrize("row", ROWS)
def test_what_is_served_is_what_is_trained(ticks, record, row):
    """A live session, laid out by the grammar, is the ids that were fed; and is read back as the same units."""
    grammar = cases.packing.grammar(cases.MAIN)
    for session in cases.sessions_of(ticks, record, row):
        layout = grammar.session(session.prompt, session.units)
        assert layout.ids.tolist() == session.fed + session.pending
        assert grammar.parse(layout) == session.units


def test_a_copy_of_a_state_goes_on_alike(ticks, record):
    before, packed, _, out = record[UNITS // 2]
    copy = jax.tree.map(lambda a: jnp.asarray(np.array(a)), before)
    tick = ticks[UNITS // 2]
    settings = {name: [s[name] for s in tick.settings] for name in tick.settings[0]}
    controls = cases.sampling.controls(len(ROWS), cases.tables(), **settings)
    _, again = cases.STEP(cases.lively_params(), cases.MAIN, copy, *packed, controls)
    jax.tree.map(np.testing.assert_array_equal, cases.on_host(again), out)


# --- the grammar, scripted ------------------------------------------------------------------------------------------
def test_a_turn():
    session = Scripted()
    unit = session(LISTEN)
    assert unit.is_listen and unit.tokens == [] and unit.terminator == C.listen and not unit.turn_open
    unit = session([C.speak, A, B, C.chunk_eos])
    assert (unit.text, unit.tokens, unit.terminator) == ([A, B], [C.speak, A, B], C.chunk_eos)
    assert not unit.is_listen and unit.turn_open and not unit.end_of_turn and len(unit.codes) == 25
    assert session.talker_start == 2 + 1 + 25  # words, begin of speech, codes
    # listening is no way out of a turn: the reference reads <|tts_bos|> in its place
    unit = session(LISTEN, [C.tts_bos, D, C.chunk_eos])
    assert (unit.tokens, unit.text, unit.terminator) == ([C.tts_bos, D], [D], C.chunk_eos)
    assert len(unit.codes) == 25 and session.talker_start == 28 + 1 + 1 + 25
    unit = session([C.chunk_eos])  # nothing new to say: the voice goes on with what it has
    assert unit.text == [] and len(unit.codes) == 25 and not unit.is_listen and unit.turn_open
    unit = session([C.speak, C.turn_eos, C.chunk_eos])
    assert unit.end_of_turn and not unit.turn_open and unit.text == [] and not unit.flush
    assert len(unit.codes) == 25 and session.talker_start == 0
    unit = session(LISTEN)
    assert unit.is_listen and unit.codes == [] and unit.unit == 5


def test_a_turn_ends_with_its_unit_but_not_in_the_reference():
    """Surprise 16."""
    script = [C.speak, A, C.turn_eos, B, C.chunk_eos]
    unit = Scripted()(script)
    assert unit.tokens == [C.speak, A, C.turn_eos] and unit.terminator == C.chunk_eos
    assert unit.end_of_turn and not unit.turn_open and unit.text == [A]
    quirky = Scripted(reference_quirks=True)
    unit = quirky(script)
    assert unit.tokens == script[:-1] and not unit.end_of_turn and unit.turn_open and quirky.talker_start > 0


def test_words_in_front_of_a_turn_s_end_and_listening_are_heard_but_not_in_the_reference():
    """Surprise 15."""
    for quirks in (False, True):
        session = Scripted(quirks)
        session([C.speak, A, C.chunk_eos])
        before = session.talker_start
        unit = session([C.speak, B, C.turn_eos, C.listen])
        assert not unit.turn_open
        if quirks:
            assert unit.is_listen and unit.codes == [] and session.talker_start == before > 0
            assert not unit.end_of_turn
        else:
            assert not unit.is_listen and unit.text == [B] and len(unit.codes) == 25 and session.talker_start == 0
            assert unit.end_of_turn


def test_a_forced_end_leaves_no_voice_behind_but_in_the_reference():
    """Surprise 5."""
    for quirks in (False, True):
        session = Scripted(quirks)
        first = session([C.speak, A, B, C.chunk_eos])
        unit = session([C.speak, A, B, C.chunk_eos], force_listen=True)
        assert unit.is_listen and unit.tokens == [] and unit.codes == [] and unit.flush and not unit.turn_open
        assert session.state.pending[0].tolist() == [C.turn_eos, C.listen, C.unit_end]
        assert (session.talker_start > 0) == quirks
        again = session([C.speak, A, B, C.chunk_eos])
        assert (again.codes == first.codes) == (not quirks)  # a new turn sounds like one


def test_force_listen_without_a_turn_flushes_nothing():
    session = Scripted()
    unit = session([C.speak, A, C.chunk_eos], force_listen=True)
    assert unit.is_listen and not unit.flush and session.state.pending_count[0] == 2


def test_interruption_in_one_unit():
    """The floor is yielded, queued sound is dropped, and the new intent is voiced at once, from a fresh start."""
    session = Scripted()
    session([C.speak, A, B, C.chunk_eos])
    unit = session([C.turn_eos, D, E, C.chunk_eos])
    assert unit.flush and unit.text == [D, E] and unit.turn_open and not unit.is_listen
    assert len(unit.codes) == 25 and session.talker_start == 2 + 1 + 25
    fresh = Scripted()(([C.speak, D, E, C.chunk_eos]))
    assert unit.codes == fresh.codes
    session([C.speak, A, C.chunk_eos])
    unit = session([C.turn_eos, C.listen])
    assert unit.flush and unit.is_listen and unit.codes == [] and not unit.turn_open and session.talker_start == 0
    assert not session([C.turn_eos, C.listen]).flush  # there was nothing to lose


def test_a_turn_s_end_is_reported_however_it_ends():
    for script, feedback in (
            ([C.speak, C.turn_eos, C.chunk_eos], {}), ([C.turn_eos, C.listen], {}), ([C.turn_eos, B, C.chunk_eos], {}),
            (LISTEN, dict(force_listen=True)), (LISTEN, dict(stop=True))):
        session = Scripted()
        assert not session([C.speak, A, C.chunk_eos]).end_of_turn
        assert session(script, **feedback).end_of_turn, (script, feedback)


def test_a_stopped_row_stands_still():
    session = Scripted()
    session([C.speak, A, C.chunk_eos])
    before = cases.on_host(session.state)
    unit = session([C.speak, B, C.chunk_eos], stop=True, background=(A,))
    assert unit.is_listen and unit.flush and unit.end_of_turn and unit.codes == [] and unit.tokens == []
    jax.tree.map(np.testing.assert_array_equal, before, cases.on_host(session.state))


def test_a_request_goes_to_the_harness_alone():
    session = Scripted()
    unit = session([C.speak, A, C.delegate_start, B, D, C.delegate_end, E, C.chunk_eos])
    assert unit.delegate == [C.delegate_start, B, D, C.delegate_end]
    assert unit.text == [A, E] and len(unit.codes) == 25
    assert session.talker_start == 2 + 1 + 25  # two words were voiced
    alone = Scripted()
    unit = alone([C.speak, C.delegate_start, B, D, C.delegate_end, C.chunk_eos])
    assert unit.delegate == [C.delegate_start, B, D, C.delegate_end]
    assert unit.text == [] and unit.codes == [] and alone.talker_start == 0


def test_a_request_over_two_units_and_one_cut_off_by_the_turn_s_end():
    session = Scripted()
    first = session([C.speak, C.delegate_start, A, C.chunk_eos])
    second = session([B, C.delegate_end, D, C.chunk_eos])
    assert first.delegate == [C.delegate_start, A] and first.text == []
    assert second.delegate == [B, C.delegate_end] and second.text == [D]
    session([C.speak, C.delegate_start, A, C.chunk_eos])
    unit = session([B, C.turn_eos, C.chunk_eos])
    assert unit.delegate == [B, C.turn_eos] and unit.end_of_turn and not bool(session.state.delegating[0])
    assert session([C.speak, D, C.chunk_eos]).text == [D]


def test_a_word_in_front_of_a_request_cut_off_by_the_turn_s_end_is_voiced():
    unit = Scripted()([C.speak, A, C.delegate_start, B, C.turn_eos, C.chunk_eos])
    assert unit.text == [A] and unit.delegate == [C.delegate_start, B, C.turn_eos]
    assert len(unit.codes) == 25


def test_a_request_counts_against_its_own_budget():
    session = Scripted(max_tokens=3, max_delegate=4)  # two spoken tokens, and four of a request
    unit = session([C.speak, A, C.delegate_start, B, D, E, F, G, C.delegate_end])
    assert unit.tokens == [C.speak, A] and unit.delegate == []
    session = Scripted(max_tokens=3, max_delegate=4)
    unit = session([C.speak, C.delegate_start, B, D, E, F, G, C.delegate_end])
    assert unit.delegate == [C.delegate_start, B, D, E] and unit.terminator == C.chunk_eos
    unit = session([F, C.delegate_end, A, G, C.chunk_eos])
    assert unit.delegate == [F, C.delegate_end] and unit.text == [A, G]


def test_a_request_without_a_budget_does_not_silence_the_session():
    session = Scripted(max_delegate=0)
    units = [session([C.speak, C.delegate_start, A, C.delegate_end, C.turn_eos, C.chunk_eos])]
    for _ in range(4):
        units.append(session([C.delegate_end, C.turn_eos, C.chunk_eos]))
    assert any(unit.end_of_turn for unit in units)


def test_max_tokens():
    assert Scripted(max_tokens=4)([C.speak, A, B, D, C.chunk_eos]).tokens == [C.speak, A, B]
    assert Scripted(max_tokens=1)([C.speak, A, C.chunk_eos]).tokens == []
    unit = Scripted(max_tokens=100)([C.speak, *WORDS[:20], C.chunk_eos])  # the compiled limit
    assert unit.tokens == [C.speak, *WORDS[:11]] and unit.terminator == C.chunk_eos


def test_max_chars():
    for quirks in (False, True):
        session = Scripted(quirks, max_chars=4)
        unit = session([C.speak, A, B, D, E, F, C.chunk_eos])
        assert unit.text == [A, B, D] and unit.terminator == C.chunk_eos and unit.tokens == [C.speak, A, B, D]
        assert session([C.speak, A, B, C.turn_eos, C.chunk_eos]).end_of_turn or quirks


def test_max_chars_counts_words_only():
    """A request is none of the user's text, and a control token has no characters."""
    session = Scripted(max_chars=3)
    unit = session([C.speak, A, B, C.delegate_start, D, E, F, C.delegate_end, C.turn_eos, C.chunk_eos])
    assert unit.text == [A, B] and unit.delegate == [C.delegate_start, D, E, F, C.delegate_end] and unit.end_of_turn
    # a first word may be longer than allowed, or it would never be said; what follows it may still end the turn
    assert Scripted(max_chars=1)([A, C.turn_eos, C.chunk_eos]).end_of_turn


def test_typed_text_and_a_prepared_reply_lead_to_the_decision():
    session = Scripted()
    unit = session([C.speak, B, C.chunk_eos], text=(A,))
    assert unit.text == [B] and unit.kv_length == 1 + 10 + 1 + 2 + 2
    unit = session([C.speak, E, C.chunk_eos], text=(A,), background=(F, G))
    assert unit.text == [E] and unit.kv_length == 16 + (1 + 10 + 1 + 4) + 2 + 2


def test_listen_scale_acts_on_listening_but_not_in_the_reference():
    """Surprise 1: there it scales <|im_end|>."""
    scores = dict(beside={C.listen: 0.95, C.im_end: 0.9})
    for quirks in (False, True):
        unit = lambda **settings: Scripted(quirks, **settings)([C.speak, A, C.chunk_eos], **scores)
        assert unit().tokens == [C.speak, A]
        loud = unit(listen_scale=9.0)
        if quirks:
            assert loud.tokens[0] == C.im_end and unit(listen_top_k=3).tokens[0] == C.im_end
        else:
            assert loud.is_listen and loud.tokens == [] and unit(listen_top_k=2).is_listen
            assert not unit(listen_top_k=1).is_listen


# --- the speech clock -----------------------------------------------------------------------------------------------
def spoken(session, words, count=1, **feedback):
    return [len(session([C.speak, *words, C.chunk_eos], **feedback).text) for _ in range(count)]


def test_text_follows_the_clock():
    """Words of 0.35 s: the end of speech stays as near as it can to the end of each unit."""
    session = Scripted(seconds=dict.fromkeys(WORDS, 0.35))
    counts = spoken(session, WORDS[:8], 6)
    ends = [0.0]
    for k, count in enumerate(counts):  # what argmin says, from where the last unit's speech ends
        before = max(ends[k], k)
        assert count == np.argmin(np.abs(before + 0.35 * np.arange(9) - (k + 1)))
        ends.append(before + 0.35 * count)
    assert counts == [3, 3, 3, 2, 3, 3]


def test_a_turn_begins_now_however_long_the_silence():
    session = Scripted(seconds=dict.fromkeys(WORDS, 0.25))
    for _ in range(5):
        session(LISTEN)
    assert spoken(session, WORDS[:8], 2) == [4, 4]


def test_what_was_played_moves_the_clock():
    session = Scripted(seconds=dict.fromkeys(WORDS, 0.25))
    assert spoken(session, WORDS[:8]) == [4]  # one second
    assert spoken(session, WORDS[:8], played=0.5) == [2]  # half of it is still to be heard
    assert spoken(session, WORDS[:8], played=1.5) == [4]
    assert spoken(session, WORDS[:8], played=0.0) == [0]


def test_a_very_long_word_is_said_and_paid_for():
    session = Scripted(seconds={A: 3.4, B: 0.25, D: 0.25, E: 0.25, F: 0.25})
    assert spoken(session, [A, B]) == [1]
    assert spoken(session, [B, D, E, F], 4) == [0, 0, 2, 4]


def test_an_interruption_takes_the_queue_off_the_clock():
    """What was queued is not heard any more, so the new words are due at once."""
    session = Scripted(seconds={A: 5.0, B: 0.25, D: 0.25, E: 0.25, F: 0.25})
    session([C.speak, A, C.chunk_eos])
    unit = session([C.turn_eos, B, D, E, F, C.chunk_eos])
    assert unit.flush and unit.text == [B, D, E, F]
    # the new turn has been scheduled for one second, half of which was heard
    assert spoken(session, [B, D, E, F], played=0.5) == [2]


def test_a_forced_end_takes_the_queue_off_the_clock():
    session = Scripted(seconds={A: 5.0, B: 0.25, D: 0.25, E: 0.25, F: 0.25})
    session([C.speak, A, C.chunk_eos])
    assert session(LISTEN, force_listen=True).flush
    assert session([C.speak, B, D, E, F, C.chunk_eos]).text == [B, D, E, F]


def test_requests_take_no_time():
    session = Scripted(seconds=dict.fromkeys(WORDS, 0.6))
    unit = session([C.speak, C.delegate_start, A, B, D, E, C.delegate_end, F, G, C.chunk_eos])
    assert unit.delegate[1:-1] == [A, B, D, E] and unit.text == [F, G]


# --- the voice ------------------------------------------------------------------------------------------------------
def test_half_seconds_take_twelve_and_thirteen_codes():
    session = Scripted(unit_seconds=0.5, seconds=dict.fromkeys(WORDS, 0.25))
    units = [session([C.speak, A, B, D, E, C.chunk_eos]) for _ in range(4)]
    assert [len(unit.codes) for unit in units] == [12, 13, 12, 13]
    assert [len(unit.text) for unit in units] == [2, 2, 2, 2]
    assert [unit.kv_length for unit in units] == [(1 + 5 + 1 + 2 + 2) * k for k in range(1, 5)]


def test_a_long_turn_outgrows_the_talker_s_cache_and_goes_on():
    session = Scripted()
    for k in range(8):
        unit = session([C.speak, A, B, C.chunk_eos])
        assert len(unit.codes) == 25
        cache = session.state.talker
        positions = np.sort(np.asarray(cache.slot_position[0])[np.asarray(cache.slot_position[0]) >= 0])
        assert positions.tolist() == list(range(session.talker_start))  # nothing was dropped or doubled
        assert 28 <= session.talker_start <= 96
    assert session([C.speak, C.turn_eos, C.chunk_eos]).end_of_turn and session.talker_start == 0


@pytest.mark.parametrize("seconds", [0.2, 0.5, 1.0, 2.0])
def test_a_unit_s_codes_are_as_long_as_the_unit(seconds):
    """A clock is refused, or a second of it takes 25 codes."""
    try:
        config = StreamConfig(cases.HEARING, C, unit_seconds=seconds, slots=256, talker_slots=256)
    except ConfigError:
        return
    count = sum(int(min(codes_per_unit(config, jnp.array(u)), CHUNK_CODES)) for u in range(10))
    assert count == round(25 * seconds * 10)


def test_a_talker_cache_too_small_for_a_unit_is_refused():
    """The half that is kept, a unit's words and its codes must fit, or entries are dropped without a word."""
    with pytest.raises(ConfigError, match="talker_slots"):
        StreamConfig(cases.HEARING, C, slots=256, talker_slots=64, max_unit_tokens=12)


# --- joins ----------------------------------------------------------------------------------------------------------
def test_a_new_session_hears_nothing_of_the_last_but_in_the_reference():
    """Surprise 4."""
    for quirks in (False, True):
        session = Scripted(quirks, cases.HEARING)
        session.params = cases.lively_params(cases.HEARING) | {"llm": session.params["llm"]}
        heard = []
        for seed in (0, 0):
            session.join(WORDS[:5], WORDS[5:7])
            session(LISTEN, seed=seed)
            heard.append(cases.row_of(session.state, 0))
        audio = [state.audio for state in heard]
        assert [int(cache.next_position) for cache in audio] == [50, 100 if quirks else 50]
        if not quirks:
            cases.assert_same_row(heard[1], heard[0])


# --- through the front door -----------------------------------------------------------------------------------------
BUCKETS = (cases.Bucket(0, 0), cases.Bucket(2, 12))


def quickly(monkeypatch):
    """Sessions compile as the other tests do."""
    def programs(config, batch, mesh):
        quick = dict(static_argnames="config", donate_argnames="state", compiler_options=cases.QUICK)
        return init_state, jax.jit(prefill, **quick), jax.jit(transition, **quick)

    monkeypatch.setattr(api, "_programs", programs)


@pytest.fixture(scope="module")
def session():
    model = cases.CONFIG.replace(talker=None)
    with pytest.MonkeyPatch.context() as patch:
        quickly(patch)
        venus = api.Venus(model, cases.lively_params(model), cases.TOKENIZER)
        yield venus.duplex(batch=2, buckets=BUCKETS, slots=160, max_unit_tokens=8)


def random_step(session, rng):
    """One unit of whatever a client may send."""
    some = lambda p, make: [make() if rng.random() < p else None for _ in range(2)]
    audio = some(0.8, lambda: (0.1 * rng.standard_normal(cases.SECOND)).astype(np.float32))
    frames = some(0.2, lambda: [rng.integers(0, 256, (28, 28, 3), np.uint8) for _ in range(rng.integers(1, 3))])
    text, background = some(0.15, lambda: "stop it"), some(0.1, lambda: "it rains")
    feedback = some(0.4, lambda: dict(force_listen=bool(rng.random() < 0.2), stop=bool(rng.random() < 0.1),
                                      played=float(rng.uniform(0, 2))))
    if not any(x is not None for part in (audio, frames, text, background) for x in part):
        audio[0] = np.zeros(cases.SECOND, np.float32)
    if rng.random() < 0.1:
        session.set(max_tokens=int(rng.integers(2, 9)), greedy=bool(rng.random() < 0.5), top_k=int(rng.integers(0, 30)))
    if rng.random() < 0.05:
        session.join(int(rng.integers(2)), "Hello there", seed=int(rng.integers(99)))
    return session.step(audio, frames, text, background, feedback)


@pytest.mark.filterwarnings("error::venus_jax.api.LateCompileWarning")
def test_programs_are_compiled_once(session):
    compiled, rng = [], np.random.default_rng(0)

    def listener(event, duration, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(kwargs)

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        units = [random_step(session, rng) for _ in range(200)]
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert session.num_programs == len(BUCKETS)
    assert not compiled, f"{len(compiled)} programs were compiled during the session"
    rows = [unit for both in units for unit in both if unit is not None]
    assert len(rows) > 250 and {unit.state for unit in rows} == {"listen", "speak"}
    assert any(unit.text for unit in rows) and any(unit.delegate for unit in rows)
    assert 100 < max(unit.kv_length for unit in rows) <= 160


def test_a_saved_session_goes_on_alike(session, tmp_path):
    rng = np.random.default_rng(1)
    for _ in range(5):
        random_step(session, rng)
    session.save(tmp_path / "state")  # settings belong to the session, not to its state
    session.set(max_tokens=8)
    plain = lambda unit: unit and dataclasses.astuple(dataclasses.replace(unit, seconds=0, codes=unit.codes.tolist()))
    futures = []
    for _ in range(2):
        rng = np.random.default_rng(2)
        futures.append([[plain(unit) for unit in random_step(session, rng)] for _ in range(12)])
        session.restore(tmp_path / "state")
        session.set(max_tokens=8)
    assert futures[0] == futures[1]


def silent_session(**options):
    venus = api.Venus(cases.SILENT, cases.lively_params(cases.SILENT), cases.TOKENIZER)
    return venus.duplex(precompile=False, max_unit_tokens=8, settings=dict(max_tokens=8, max_delegate=1), **options)


@pytest.mark.filterwarnings("error::venus_jax.api.LateCompileWarning")
@pytest.mark.parametrize("window", ["ring", "prefix_ring"])
def test_a_unit_that_fits_no_ring_is_refused(monkeypatch, window):
    quickly(monkeypatch)
    session = silent_session(window=window, slots=64, buckets=(cases.Bucket(0, 64),))
    room = 64 - (window == "prefix_ring") * int(session._held[0])
    second = np.zeros(cases.SECOND, np.float32)
    fits = room - (1 + 10 + 8 + 3)
    with pytest.raises(CapacityError, match="session 0"):
        session.step(second, text="a" * (fits + 1))

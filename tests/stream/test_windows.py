"""What stays in a cache of fixed size, and that what stays is all that matters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.stream import stream_cases as cases
from tests.stream.stream_cases import C, WORDS, Scripted
from venus_jax.nn import kv_cache
from venus_jax.stream import inputs as packing
from venus_jax.stream import kv_cache as windows
from venus_jax.stream import sampling
from venus_jax.stream.inputs import Bucket, Row
from venus_jax.stream.kv_cache import PROMPT, Window
from venus_jax.stream.prompt import make_prompt
from venus_jax.stream.state import PENDING, StreamConfig, init_state

SLOTS, UNITS, PROMPTS = 96, 40, (9, 14)
SMALL = cases.SILENT.replace(llm=dict(max_positions=2 * SLOTS))  # a ring turns once and is set back
RING = StreamConfig(SMALL, C, window=Window("ring"), slots=SLOTS, max_unit_tokens=8, speak=False, trace=True)
PREFIX_RING = dataclasses.replace(RING, window=Window("prefix_ring"))
ENDLESS = dataclasses.replace(RING, model=cases.SILENT)
SETTINGS = dict(greedy=[True, False], max_tokens=8, max_delegate=3, follow_clock=False, temperature=1.0)


def run(config):
    """Forty units of two rows; per unit (state before, packed, state after, outputs)."""
    params, state, rng = cases.lively_params(cases.SILENT), init_state(config, 2), np.random.default_rng(3)
    controls = sampling.controls(2, cases.tables(), **SETTINGS)
    for row, count in enumerate(PROMPTS):
        prompt = make_prompt(config, [row == 0, row == 1], WORDS[:count - 2], None, WORDS[:2], [5, 6])
        state = cases.PREFILL(params, config, state, prompt)
    steps = []
    for _ in range(UNITS):
        words = lambda: tuple(rng.choice(WORDS, int(rng.integers(1, 5))).tolist())
        rows = [Row((0.1 * rng.standard_normal(cases.SECOND)).astype(np.float32), (), words() * (rng.random() < 0.4),
                    words() * (rng.random() < 0.3)) for _ in range(2)]
        rows[1] = rows[1] if rng.random() < 0.8 else None
        packed = packing.pack(config, Bucket(0, 6), rows)
        after, out = cases.STEP(params, config, state, *packed, controls)
        steps.append((state, packed, after, cases.on_host(out)))
        state = after
    return steps


@pytest.fixture(scope="module")
def ring():
    return run(RING)


@pytest.fixture(scope="module")
def prefix_ring():
    return run(PREFIX_RING)


@dataclasses.dataclass
class Entry:
    unit: int
    embedding: np.ndarray
    position: int


def replay(config, steps, row):
    """One row by the rule as it is written, on a plain list: what is held after every unit, and what each place saw.

    Returns all entries ever read, per entry (places it saw, their distances), per decision (place, scores), and after
    every unit the places held.
    """
    limit, pinned = config.model.llm.max_positions, PROMPTS[row] if config.window.kind == "prefix_ring" else 0
    table = np.asarray(cases.lively_params(cases.SILENT)["llm"]["embed"]["embedding"])
    entries, held, sights, decisions, after_units = [], [], [], [], []

    def read(unit, embedding):
        held.append(len(entries))
        entries.append(Entry(unit, embedding, entries[-1].position + 1 if entries else 0))
        sights.append((list(held), [entries[-1].position - entries[i].position for i in held]))

    for i in [*WORDS[:PROMPTS[row] - 2], *WORDS[:2]]:
        read(PROMPT, table[i])
    for before, (inputs, background, _), _, out in steps:
        if out.active[row]:
            unit, pending = int(before.unit[row]), int(before.pending_count[row])
            given = int(inputs.count[row] + background.count[row])
            needed = pending + given + min(SETTINGS["max_tokens"] - 1 + SETTINGS["max_delegate"], 8) + PENDING
            while len(held) + needed > config.slots:  # the oldest unit goes, whole
                turning = [i for i in held if i >= pinned]
                oldest = min(entries[i].unit for i in turning)
                held[:] = [i for i in held if i < pinned or entries[i].unit != oldest]
            if entries[-1].position + 1 + needed > limit:
                ring, turning = config.slots - pinned, [e for e in (entries[i] for i in held if i >= pinned)]
                back = (turning[0].position - pinned) // ring * ring
                for entry in turning:
                    entry.position -= back
            width = inputs.ids.shape[1]
            valid = np.concatenate([np.arange(3) < pending, np.arange(width) < inputs.count[row],
                                    np.arange(background.ids.shape[1]) < background.count[row]])
            for n, place in enumerate(np.flatnonzero(valid)):
                read(unit - (n < pending), out.trace.embeds[row, place])
            for j in range(out.token_count[row] + 1):
                decisions.append((len(entries) - 1, out.trace.logits[row, j]))
                if j < out.token_count[row]:
                    read(unit, table[out.tokens[row, j]])
        after_units.append([(entries[i].position, entries[i].unit) for i in held])
    return entries, sights, decisions, after_units


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("kind", ["ring", "prefix_ring"])
def test_rings_hold_whole_units_and_the_newest(kind, row, request):
    config, steps = (RING, PREFIX_RING)[kind == "prefix_ring"], request.getfixturevalue(kind)
    *_, after_units = replay(config, steps, row)
    dropped = set()
    for (_, _, state, out), expected in zip(steps, after_units):
        position, unit = (np.asarray(a[row]) for a in (state.llm.slot_position, state.entries.unit))
        held = position >= 0
        assert sorted(zip(position[held].tolist(), unit[held].tolist())) == expected
        assert held.sum() <= SLOTS and state.llm.next_position[row] <= SMALL.llm.max_positions
        assert out.kv_length[row] == held.sum() + state.pending_count[row] and not out.full[row]
        if kind == "prefix_ring":
            assert sorted(position[held & (unit == PROMPT)].tolist()) == list(range(PROMPTS[row]))
        dropped.add(min(unit[held & (unit > PROMPT)]))
    assert max(dropped) > UNITS // 2 and int(steps[-1][2].unit[row]) > max(dropped) + 2


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("kind", ["ring", "prefix_ring"])
def test_decisions_equal_a_recompute_that_sees_what_was_held(kind, row, request):
    config, steps = (RING, PREFIX_RING)[kind == "prefix_ring"], request.getfixturevalue(kind)
    entries, sights, decisions, _ = replay(config, steps, row)
    scores = cases.explicit_scores(cases.lively_params(cases.SILENT), cases.SILENT.llm,
                                   np.stack([entry.embedding for entry in entries]), sights)
    for place, live in decisions:
        np.testing.assert_allclose(scores[place], live, rtol=0, atol=2e-4)
    assert len(decisions) > 60 and max(max(distances) for _, distances in sights) < 2 * SLOTS


def test_rebasing_changes_nothing(ring):
    """A ring whose positions are set back every few units says what one with room for all of them says."""
    rebased = 0
    for (before, _, after, out), (_, _, endless, other) in zip(ring, run(ENDLESS)):
        for row in (0, 1):
            assert cases.said(out, row) == cases.said(other, row)
        np.testing.assert_allclose(out.trace.logits, other.trace.logits, rtol=0, atol=2e-4)
        rebased += int((after.llm.next_position < before.llm.next_position).sum())
        assert (np.asarray(after.llm.slot_position >= 0) == np.asarray(endless.llm.slot_position >= 0)).all()
    assert rebased >= 6 and (endless.llm.next_position > 3 * SLOTS).any()


def test_a_ring_of_which_nothing_is_left_is_set_back_too():
    """Units that take more than half of the ring leave nothing of the last; positions must not run away."""
    window, pinned, needed = Window("prefix_ring"), jnp.array([4]), jnp.array([20])
    cache, entries = kv_cache.empty(1, 1, 32, 1, 2), windows.empty_entries(1, 32)

    def append(cache, entries, count, unit):
        positions = kv_cache.next_positions(cache, jnp.ones((1, count), bool))
        where = windows.slots(window, cache, pinned, positions)
        kv = jnp.ones((1, 1, count, 1, 2))
        labels = jnp.full((1, count), unit)
        return kv_cache.append(cache, kv, kv, positions, where), windows.write(entries, where, labels, labels)

    cache, entries = append(cache, entries, 4, PROMPT)
    for unit in range(8):
        cache, fits = windows.make_room(window, cache, entries, pinned, needed, jnp.array([True]))
        cache = windows.rebase(cache, pinned, needed, 64, 1e4)
        cache, entries = append(cache, entries, 20, unit)
        assert bool(fits[0]) and int(cache.next_position[0]) <= 64, unit
        assert int(kv_cache.length(cache)[0]) == 24


def test_windows_touch_no_other_row():
    """A neighbour that is set back or cut leaves every bit of a row as it was, of an empty one too."""
    rng, first, zero = np.random.default_rng(0), jnp.array([True, False, False]), jnp.zeros(3, jnp.int32)

    def holding(positions):
        k, v = (jnp.asarray(rng.standard_normal((2, 3, 1, 8, 4)), jnp.float32) for _ in range(2))
        slot_position = jnp.array([positions, positions, [-1] * 8])
        cache = kv_cache.KVCache(k, v, slot_position, slot_position.max(axis=1) + 1)
        return cache, windows.Entries(slot_position // 3, zero)

    (turned, of_turned), (compact, of_compact) = holding([-1, *range(9, 16)]), holding([3, 4, 5, 6, -1, 0, 1, 2])
    for cache, changed in (
            (turned, windows.rebase(turned, zero, jnp.where(first, 5, 0), 16, 1e4)),
            (turned, windows.make_room(Window("ring"), turned, of_turned, zero, zero + 5, first)[0]),
            (compact, windows.basic(Window("basic", high=4, low=3), compact, of_compact, zero, first, 1e4)),
            (compact, windows.cut_out(compact, zero, zero + 3, zero, first, 1e4))):
        for before, after, axis in zip(cache, changed, (1, 1, 0, 0)):
            np.testing.assert_array_equal(*(np.take(np.asarray(a), [1, 2], axis) for a in (before, after)))
        assert (np.asarray(changed.slot_position[0]) != np.asarray(cache.slot_position[0])).any()


# --- the reference's windows, by hand -------------------------------------------------------------------------------
PREFIX, SUFFIX = WORDS[:5], WORDS[5:7]
A, B, D, E = WORDS[20:24]
LISTEN, SPEAK = [C.listen], [C.speak, A, B, C.turn_eos, C.chunk_eos]  # units of 13 and 17 entries
CONTEXT = Window("context", max_units=3, max_previous=3, marker=(D, E))


def scripted(window):
    session = Scripted(config=cases.SILENT, window=window, slots=160)
    session.join(PREFIX, SUFFIX)
    return session


def held(session):
    """Positions and units held."""
    mask = np.asarray(session.state.llm.slot_position[0]) >= 0
    position, unit = (np.asarray(a[0])[mask] for a in (session.state.llm.slot_position, session.state.entries.unit))
    return sorted(position.tolist()), sorted(set(unit.tolist()))


def remembered(session):
    return session.state.memory.previous[0, :int(session.state.memory.count[0])].tolist()


def test_basic_drops_the_oldest_units_down_to_the_lower_mark():
    session = scripted(Window("basic", high=60, low=41))
    lengths = [session(script).kv_length for script in [LISTEN] * 5]
    assert lengths == [20, 33, 46, 59, 33]  # 72 is above 60: three units go
    assert held(session) == (list(range(33)), [PROMPT, 3, 4])  # compact again
    assert session(SPEAK).kv_length == 50
    assert session(SPEAK).kv_length == 41  # 67 is above 60: two listening units go
    assert held(session) == (list(range(41)), [PROMPT, 5, 6])
    assert [session(LISTEN).kv_length for _ in range(2)] == [54, 33]  # 67 again, and 67 - 17 is not enough
    assert session.state.pending_count[0] == 0 and held(session)[1] == [PROMPT, 7, 8]


def test_context_keeps_units_and_remembers_words():
    session = scripted(CONTEXT)
    lengths = [session(script).kv_length for script in (LISTEN, SPEAK, LISTEN, LISTEN)]
    assert lengths == [20, 37, 50, 50] and remembered(session) == []  # a listening unit leaves nothing
    assert session(SPEAK).kv_length == 7 + 4 + 13 + 13 + 17 and remembered(session) == [A, B]  # behind the marker
    assert int(session.state.pinned[0]) == 11 and held(session) == (list(range(54)), [PROMPT, 2, 3, 4])
    assert session([C.speak, *WORDS[30:32], C.turn_eos, C.chunk_eos]).kv_length == 11 + 13 + 17 + 17
    assert session(LISTEN).kv_length == 11 + 17 + 17 + 13
    assert session(LISTEN).kv_length == 12 + 17 + 13 + 13 and remembered(session) == [B, A, B]  # the newest three
    assert session(LISTEN).kv_length == 12 + 13 + 13 + 13 and remembered(session) == [B, *WORDS[30:32]]
    for _ in range(3):  # nothing more to remember
        assert session(LISTEN).kv_length == 12 + 3 * 13
    assert int(session.state.pinned[0]) == 12 and held(session)[0] == list(range(51))


def test_context_remembers_no_request():
    session = scripted(CONTEXT)
    session([C.speak, A, C.delegate_start, WORDS[40], C.delegate_end, B, C.turn_eos, C.chunk_eos])
    for _ in range(3):
        session(LISTEN)
    assert remembered(session) == [A, B]


def test_error_refuses_a_unit_and_keeps_everything():
    session = Scripted(config=cases.SILENT, window=Window("error"), slots=64, max_tokens=8, max_delegate=1)
    session.join(PREFIX, SUFFIX)
    # 11 of input, 8 to be said and 3 for the end must be free
    lengths = [session(LISTEN).kv_length for _ in range(3)]
    assert lengths == [20, 33, 46]
    before = cases.on_host(session.state)
    unit = session(SPEAK)
    assert unit.full and unit.is_listen and unit.tokens == [] and unit.kv_length == 46 and unit.unit == 3
    jax.tree.map(np.testing.assert_array_equal, before, cases.on_host(session.state))
    session.join(PREFIX, SUFFIX)
    assert session(SPEAK).kv_length == 7 + 17

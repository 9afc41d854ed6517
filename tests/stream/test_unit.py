import json

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from venus_jax.config import VenusConfig
from venus_jax.errors import GrammarError
from venus_jax.stream.unit import PICTURE, SOUND, TOKEN, Grammar, Layout, Output, Unit, prompt_text
from venus_jax.tokens import CONTROL_TEXT, PUBLISHED_CONTROL as C, RESERVED_TEXT, load_tokenizer

GRAMMAR = Grammar(C, num_queries=64)
SMALL = Grammar(C, num_queries=2, sound_embeddings=3)
RESERVED = [getattr(C, name) for name, text in CONTROL_TEXT.items() if text in RESERVED_TEXT]
SESSIONS = ["session_a_audio", "session_b_omni", "session_c_hf_audio", "session_d_charlimit"]


def unit(pictures=(), sound=True, text=(), backend=(), output=GRAMMAR.listen()) -> Unit:
    return Unit(pictures, sound, text, backend, output)


def assert_same(a: Layout, b: Layout):
    for x, y in zip(a, b):
        np.testing.assert_array_equal(x, y, strict=True)


def seen(layout: Layout) -> list[int]:
    """Ids as the recorded sessions write them: -1 where an embedding stands."""
    return np.where(layout.kind == TOKEN, layout.ids, -1).tolist()


# --- the recorded sessions of the reference -------------------------------------------------------------------------
@pytest.fixture(scope="module")
def tokenizer(golden):
    return load_tokenizer(golden / "checkpoint")


@pytest.fixture(scope="module")
def grammar(golden, tokenizer):
    config = VenusConfig.from_hf(json.loads((golden / "checkpoint" / "config.json").read_text()))
    return Grammar(tokenizer.control, config.resampler.num_queries)


@pytest.fixture(params=SESSIONS)
def recorded(golden, request):
    return json.loads((golden / "duplex" / f"{request.param}.json").read_text())


def unit_of_schema(recorded_unit, control) -> Unit:
    """The unit that a recorded session fed: input read off `prefill_schema`, output off `feeds`."""
    schema = [i if isinstance(i, int) else i[0] for i in recorded_unit["prefill_schema"]]
    marks = "".join({control.image_start: "I", control.slice_start: "S"}.get(i, "") for i in schema)
    pictures = tuple(1 + len(slices) for slices in marks.split("I")[1:])
    fed = [i for feed in recorded_unit["feeds"][recorded_unit["n_prefill_feeds"]:] for i in feed[3]]
    return unit(pictures, "audio" in schema, output=Output(tuple(fed[:-2]), fed[-2]))


def test_units_as_recorded(recorded, grammar):
    assert recorded["units"]
    for expected in recorded["units"]:
        u = unit_of_schema(expected, grammar.control)
        given = grammar.unit_input(u.pictures, u.sound)
        layout = given.join(grammar.unit_output(u.output))
        assert seen(layout) == [i for feed in expected["feeds"] for i in feed[3]]
        assert_same(layout, grammar.unit(u))
        assert grammar.parse(layout) == [u]

        assert len(given.ids) == expected["kv_after_prefill"] - expected["kv_before"]
        assert expected["feeds"][-1][2] == expected["kv_before"] + len(layout.ids)
        window = {kept["id"]: kept["length"] for kept in expected["window"]["units"]}
        assert window.get(expected["index"], len(layout.ids)) == len(layout.ids)
        asked = expected["feeds"][expected["n_prefill_feeds"] - 1]
        assert asked[4] and asked[2] - 1 - expected["kv_before"] == given.decide_at() == given.decide_at(True)


def test_schemas_as_recorded(recorded, grammar, tokenizer):
    """The reference's own spelling of every unit, in which a run of embeddings is a word in brackets."""
    assert len(recorded["unit_schemas"]) == len(recorded["units"])
    for expected, schema in zip(recorded["units"], recorded["unit_schemas"]):
        layout = grammar.unit(unit_of_schema(expected, grammar.control))
        changes = np.flatnonzero(np.diff(layout.kind)) + 1
        text = ""
        for ids, kind in zip(np.split(layout.ids, changes), np.split(layout.kind, changes)):
            name = {PICTURE: "img", SOUND: "audio"}.get(kind[0])
            text += f"[{name}_embed_{len(ids)}]" if name else tokenizer.decode(ids)
        assert text == schema


def test_prompt_as_recorded(recorded, grammar, tokenizer):
    prepare = recorded["settings"]["prepare"]
    texts = prompt_text("Streaming Omni Conversation.", voice=True)
    assert texts == (prepare["prefix_system_prompt"], prepare["suffix_system_prompt"])
    fed = [i for feed in recorded["prepare"]["feeds"] for i in feed[2]]
    prefix, suffix = map(tokenizer.encode, texts)
    prompt = grammar.prompt(prefix, fed.count(-1), suffix)
    assert seen(prompt) == fed and len(prompt.ids) == recorded["prepare"]["kv_after"] and not prompt.target.any()
    units = [unit_of_schema(u, grammar.control) for u in recorded["units"]]
    assert grammar.parse(grammar.session(prompt, units)) == units


# --- the published ids ----------------------------------------------------------------------------------------------
def test_published_units():
    listen = GRAMMAR.unit(unit())
    assert listen.ids.tolist() == [151683, *[128244] * 10, 151705, 151684]
    assert listen.kind.tolist() == [TOKEN, *[SOUND] * 10, TOKEN, TOKEN]
    assert listen.index.tolist() == [-1, *range(10), -1, -1]
    assert listen.target.tolist() == [False] * 11 + [True, False]
    assert [x.dtype for x in listen] == [np.int32, np.int32, np.int32, bool]

    omni = GRAMMAR.unit(unit((1,)))
    assert len(omni.ids) == 79
    assert seen(omni) == [151683, 151669, *[-1] * 64, 151670, *[-1] * 10, 151705, 151684]
    sliced = SMALL.unit(unit((3, 1), False))
    assert seen(sliced) == [151683, 151669, -1, -1, 151670, *[151679, -1, -1, 151680] * 2, 151669, -1, -1, 151670,
                            151705, 151684]

    assert seen(GRAMMAR.unit(unit(output=GRAMMAR.speak([9, 8])))) == [
        151683, *[-1] * 10, 151706, 9, 8, 151718, 151684]
    assert seen(GRAMMAR.unit_output(GRAMMAR.turn_end())) == [151706, 151717, 151718, 151684]
    assert seen(GRAMMAR.unit_output(GRAMMAR.delegate([9]))) == [151706, 151748, 9, 151749, 151718, 151684]
    assert seen(GRAMMAR.unit_output(GRAMMAR.interrupted())) == [151717, 151705, 151684]
    assert seen(GRAMMAR.unit_input(text=[7], backend=[5, 6])) == [151683, *[-1] * 10, 7, 151750, 5, 6, 151751]
    assert seen(GRAMMAR.backend([5, 6])) == [151750, 5, 6, 151751]


def test_published_prompt(official_tokenizer):
    tokenizer = load_tokenizer(official_tokenizer)
    prefix, suffix = map(tokenizer.encode, prompt_text("Streaming Omni Conversation.", voice=True))
    assert prefix == [151644, 8948, 198, 76509, 85225, 50830, 624, 151697] and suffix == [151699, 151645]
    assert seen(GRAMMAR.prompt(prefix, 3, suffix)) == [*prefix, -1, -1, -1, *suffix]


def test_prompt_text_without_voice():
    assert prompt_text("Be brief.", voice=False) == ("<|im_start|>system\nBe brief.", "<|im_end|>")


# --- numbering, deciding, loss mask ---------------------------------------------------------------------------------
def test_embeddings_are_numbered_through_a_session():
    prompt = SMALL.prompt([11, 12], 2, [13])
    session = SMALL.session(prompt, [unit((2,)), unit(text=(5,), output=SMALL.speak([9]))])
    assert session.index[session.kind == SOUND].tolist() == list(range(2 + 3 + 3))
    assert session.index[session.kind == PICTURE].tolist() == list(range(4))
    rows = session.media_index(pictures_first=4)
    assert rows.dtype == np.int32 and (rows[session.kind == TOKEN] == -1).all()
    assert rows[session.kind == PICTURE].tolist() == [0, 1, 2, 3]
    assert rows[session.kind == SOUND].tolist() == list(range(4, 12))
    assert_same(session, Layout.join(prompt, SMALL.unit(unit((2,))),
                                     SMALL.unit(unit(text=(5,), output=SMALL.speak([9])))))


@pytest.mark.parametrize("given, last, quirks", [
    (dict(), 3, 3), (dict(text=[7, 8]), 5, 3), (dict(backend=[7]), 6, 3),
    (dict(pictures=[1], sound=False), 4, 4), (dict(pictures=[2, 2], sound=False, text=[7]), 17, 16),
    (dict(pictures=[1], text=[7]), 8, 7), (dict(sound=False, text=[7, 8]), 2, 2),
    (dict(sound=False, backend=[7]), 3, 3)])
def test_where_the_first_decision_is_made(given, last, quirks):
    layout = SMALL.unit_input(**given)
    assert layout.decide_at() == last == len(layout.ids) - 1
    assert layout.decide_at(reference_quirks=True) == quirks


def test_loss_falls_on_what_the_model_says_alone():
    outputs = [SMALL.speak([21, 22]), SMALL.delegate([23]), SMALL.turn_end(), SMALL.interrupted(), SMALL.listen()]
    units = [unit((2,), True, (31,), (32, 33), output) for output in outputs]
    session = SMALL.session(SMALL.prompt([41], 2, [42]), units)
    said = [i for output in outputs for i in (*output.ids, output.terminator)]
    assert session.ids[session.target].tolist() == said
    assert set(session.ids[~session.target].tolist()) == {
        41, 42, C.unk, C.unit_start, C.unit_end, C.image_start, C.image_end, C.slice_start, C.slice_end, 31,
        C.backend_start, 32, 33, C.backend_end}


# --- there and back -------------------------------------------------------------------------------------------------
CONTROL = sorted(getattr(C, name) for name in CONTROL_TEXT)
plain = st.integers(0, 150_000).filter(lambda i: i not in CONTROL)
some = st.lists(plain, max_size=4).map(tuple)
closing = [C.listen, C.chunk_eos, C.chunk_tts_eos]
sayable = st.one_of(plain, st.sampled_from([i for i in CONTROL if i not in (*closing, C.unit_start, C.unit_end)]))
outputs = st.one_of(
    st.builds(Output, st.lists(sayable, max_size=6).map(tuple), st.sampled_from(closing)),  # whatever may be live
    st.sampled_from([SMALL.listen(), SMALL.turn_end(), SMALL.interrupted()]),
    some.map(SMALL.speak), some.filter(len).map(SMALL.delegate))
units_ = st.builds(Unit, st.lists(st.integers(1, 3), max_size=2).map(tuple), st.booleans(), some, some, outputs).filter(
    lambda u: u.pictures or u.sound or u.text or u.backend)
grammars = st.sampled_from([SMALL, Grammar(C, 1, 5), Grammar(C, 3, 10)])
prompts = st.tuples(some, st.integers(0, 3), some)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(grammar=grammars, prompt=prompts, units=st.lists(units_, max_size=5))
def test_parse_is_the_inverse_of_session(grammar, prompt, units):
    prompt = grammar.prompt(*prompt)
    session = grammar.session(prompt, units)
    assert grammar.parse(session) == units
    rest = Layout(*(array[len(prompt.ids):] for array in session))
    assert grammar.parse(rest) == units, "units without the prompt, as a window that slid would leave them"


@settings(max_examples=300, deadline=None, derandomize=True)
@given(units=st.lists(units_, min_size=1, max_size=3), data=st.data())
def test_what_parse_accepts_is_what_session_writes(units, data):
    """After any small damage, parse either refuses or has understood every position."""
    session = SMALL.session(SMALL.prompt([1], 1, [2]), units)
    p = data.draw(st.integers(4, len(session.ids) - 1))
    damage = data.draw(st.sampled_from(["drop", "double", "id", "kind", "target"]))
    if damage in ("drop", "double"):
        places = np.delete(np.arange(len(session.ids)), p) if damage == "drop" else np.insert(
            np.arange(len(session.ids)), p, p)
        damaged = Layout(*(array[places] for array in session))
    else:
        damaged = Layout(*(array.copy() for array in session))
        damaged.ids[p] = data.draw(st.sampled_from(CONTROL)) if damage == "id" else damaged.ids[p]
        damaged.kind[p] = data.draw(st.integers(0, 2)) if damage == "kind" else damaged.kind[p]
        damaged.target[p] ^= damage == "target"
    try:
        found = SMALL.parse(damaged)
    except GrammarError as error:
        assert "position" in str(error) and "expected" in str(error)
        return
    again = SMALL.session(SMALL.prompt([1], 1, [2]), found)
    assert seen(again) == seen(damaged)
    for name in ("kind", "target"):
        np.testing.assert_array_equal(getattr(again, name), getattr(damaged, name))


# --- what is refused ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("token", CONTROL)
def test_control_tokens_cannot_be_smuggled(token):
    name = {getattr(C, name): text for name, text in CONTROL_TEXT.items()}[token]
    for where, build in {"text": lambda ids: SMALL.unit_input(text=ids),
                         "backend": lambda ids: SMALL.unit_input(backend=ids), "speech": SMALL.speak,
                         "delegate": SMALL.delegate}.items():
        with pytest.raises(GrammarError) as error:
            build([5, token, 6])
        assert str(error.value).startswith(f"{where}: {name} at place 1; expected")
    if token in RESERVED:
        with pytest.raises(GrammarError, match="prompt: "):
            SMALL.prompt([token], 0, [5])
        with pytest.raises(GrammarError, match="prompt: "):
            SMALL.prompt([5], 0, [token])


@pytest.mark.parametrize("build, message", [
    (lambda: SMALL.unit_input(sound=False), "a unit without input; expected pictures, sound, text or a backend"),
    (lambda: SMALL.unit_input([1, 0]), "a picture of 0 slices; expected 1 or more"),
    (lambda: SMALL.unit_input(text=[-1]), "text: token -1 at place 0"),
    (lambda: SMALL.unit_input(text=[1 << 31]), "text: token 2147483648 at place 0"),
    (lambda: SMALL.backend([]), "backend: no tokens"),
    (lambda: SMALL.delegate([]), "delegate: no tokens"),
    (lambda: SMALL.prompt([5], -1, [6]), "-1 embeddings of a voice"),
    (lambda: SMALL.unit_output(Output((5,), 6)), r"output ends with token 6; expected <\|listen\|>, <\|chunk_eos\|>"),
    (lambda: SMALL.unit_output(Output((5, C.listen), C.chunk_eos)), r"output: <\|listen\|> at place 1"),
    (lambda: SMALL.unit_output(Output((C.unit_start,), C.chunk_eos)), "output: <unit> at place 0"),
    (lambda: SMALL.unit_output(Output((C.unit_end,), C.chunk_eos)), "output: </unit> at place 0")])
def test_what_cannot_be_laid_out(build, message):
    with pytest.raises(GrammarError, match=message):
        build()


P, S = "P", "S"  # places of embeddings in the layouts below
MEDIA = [C.image_start, P, P, C.image_end, S, S, S]


def written(items, output=(C.speak, 9, C.chunk_eos), end=(C.unit_end,)) -> Layout:
    """A layout written position by position: `<unit>`, items, output as target, end."""
    items = [C.unit_start, *items]
    all_ids = [*items, *output, *end]
    kind = np.array([{P: PICTURE, S: SOUND}.get(i, TOKEN) for i in all_ids], np.int32)
    ids = np.array([C.unk if i in (P, S) else i for i in all_ids], np.int32)
    target = np.zeros(len(ids), bool)
    target[len(items):len(items) + len(output)] = True
    return Layout(ids, kind, np.full(len(ids), -1, np.int32), target)


@pytest.mark.parametrize("layout, message", [
    (written(MEDIA, end=()), "position 11: the end; expected </unit>"),
    (written(MEDIA, end=()).join(written(MEDIA)), "position 11: <unit>; expected </unit>"),
    (written([C.unit_start, S, S, S]), "unit at position 0: nothing is said; expected an output"),
    (written([S, S, S, C.unit_start], end=(C.unit_end,)), "unit at position 0: nothing is said"),
    (written([C.image_start, P, C.image_end, S, S, S]), "position 3: </image>; expected embedding of a picture"),
    (written([C.image_start, P, P, P, C.image_end]), "position 4: embedding of a picture; expected </image>"),
    (written([C.image_start, P, P, S, S, S]), "position 4: embedding of sound; expected </image>"),
    (written([C.slice_start, P, P, C.slice_end, S, S, S]), "position 1: <slice>; expected embedding of sound"),
    (written([S, S, S, C.image_start, P, P, C.image_end]), "position 1: embedding of sound; expected <image>"),
    (written([S, S]), r"position 3: <\|speak\|> as output; expected embedding of sound"),
    (written([S, S, S, S]), r"position 4: embedding of sound; expected <\|speak\|> as output"),
    (written([5, S, S, S]), "position 1: token 5; expected embedding of sound"),
    (written([]), "unit at position 0: a unit without input"),
    (written([S, S, S, C.backend_start, 5]), r"position 6: <\|speak\|> as output; expected </backend>"),
    (written([S, S, S, C.backend_start, C.backend_end]), r"position 4: <backend>; expected <\|speak\|> as output"),
    (written([S, S, S, C.backend_start, 5, C.backend_end, 6]), "position 6: </backend>; expected token 6"),
    (written([S, S, S, 5, C.backend_end]), r"position 5: </backend>; expected <\|speak\|> as output"),
    (written([S, S, S, C.speak, 5]), r"position 4: <\|speak\|>; expected token 5"),
    (written([S, S, S], output=(C.speak, 9)), "unit at position 0: output ends with token 9; expected"),
    (written([S, S, S], output=(C.listen, C.chunk_eos)), r"unit at position 0: output: <\|listen\|> at place 0"),
    (written([S, S, S], output=()), "unit at position 0: nothing is said; expected an output"),
    (written([S, S, S], end=(C.unit_end, 5)), "position 8: token 5; expected the end"),
    (written([S, S, S], end=(C.unit_end, C.unit_end)), "position 8: </unit>; expected the end"),
    (SMALL.unit_output(SMALL.listen()), r"position 0: <\|listen\|> as output before any unit; expected <unit>"),
    (SMALL.prompt([5], 0, [])._replace(target=np.array([True])), "position 0: token 5 as output before any unit"),
    (SMALL.backend([5]), "position 0: <backend> before any unit; expected <unit>")])
def test_what_cannot_be_read(layout, message):
    with pytest.raises(GrammarError, match=message):
        SMALL.parse(layout)
    whole = SMALL.session(SMALL.prompt([], 0, []), [unit()])
    with pytest.raises(GrammarError):
        SMALL.parse(whole.join(layout))  # position of a later unit, same judgement


def test_errors_name_the_position_in_the_session():
    session = SMALL.session(SMALL.prompt([1, 2], 0, [3]), [unit()]).join(written([S, S]))
    with pytest.raises(GrammarError, match="^position 12: "):
        SMALL.parse(session)

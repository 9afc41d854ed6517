"""The equation: one unit of every session as one pure function.

    (s_{k+1}, O_k) = F_m(s_k, x_k, b_k; eta_k)

    sound -> log-mel -> audio tower --\
    pictures -> vision tower ----------> one append of the whole unit -> decision loop -> talker
    text, background text -------------/

Nothing in it depends on the host: loops are `lax.while_loop` with a static cap and traced limits, rows that take no part
keep their state bit for bit, and every random draw has its own key, so that a row does not depend on its neighbours.

The tokens that end a unit (its terminator and `</unit>`) change no decision of that unit; they wait in `pending` and
lead the next append. A listening unit is one pass through the backbone.

With `reference_quirks` a unit is what the reference makes of it. Mended:
* text in front of a same-unit turn end is voiced, also when the unit then listens (surprise 15);
* a turn ends with its unit: behind `<|turn_eos|>` comes the unit's end, unless it was the unit's first token, which
  yields the floor at once and leaves the unit free for the new intent (surprise 16);
* talker state never outlives its turn, forced ends included (surprise 5);
* a first token that is a word is a word: only control tokens are kept from text and voice there;
* a rejected word does not count as said for the repetition penalty.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from venus_jax.media import mel_jax
from venus_jax.models import frontend, talker_decode
from venus_jax.models.talker_decode import CHUNK_CODES
from venus_jax.nn import kv_cache
from venus_jax.sharding import constrain
from venus_jax.stream import kv_cache as windows
from venus_jax.stream import sampling
from venus_jax.stream.sampling import Controls
from venus_jax.stream.state import (
    PENDING, BackgroundText, Clock, Feedback, StreamConfig, StreamState, Trace, UnitInputs, UnitOutputs,
    codes_per_unit, init_state, select_rows)
from venus_jax.stream.vocabulary import count_characters
from venus_jax.typing import Array, Bool, Float, Int, Params


def transition(params: Params, config: StreamConfig, state: StreamState, inputs: UnitInputs, background: BackgroundText,
               feedback: Feedback, controls: Controls) -> tuple[StreamState, UnitOutputs]:
    """One unit of every active row. Jit it with `config` static and `state` donated.

    Args:
      params: the whole parameter tree.
      inputs, background, feedback, controls: see their classes; shapes differ between buckets only.

    Returns:
      the state after the unit and what was said. Rows that are inactive, stopped or full keep their state.
    """
    needed = state.pending_count + room_needed(config, controls, inputs.count + background.count)
    wanted = inputs.active & ~feedback.stop
    pinned = _front(config, state)
    cache, fits = windows.make_room(config.window, state.llm, state.entries, pinned, needed, wanted)
    active = wanted & fits
    if config.window.is_ring:
        cache = windows.rebase(cache, pinned, jnp.where(active, needed, 0), config.model.llm.max_positions,
                               config.model.llm.rope_theta)
    before = kv_cache.length(state.llm) + state.pending_count
    state = state._replace(llm=cache)

    state, media = _perceive(params, config, state, inputs, active)
    state, hidden, embeds = _take_in(params, config, state, inputs, background, media, active)
    after_input = kv_cache.length(state.llm)
    decide_at = PENDING + _decision_place(config, inputs, background)
    hidden = jnp.take_along_axis(hidden, decide_at[:, None, None], axis=1)
    state, said = _say(params, config, state, hidden, active, feedback, controls)
    after_said = kv_cache.length(state.llm)
    state, codes, code_count, code_scores = _voice(params, config, state, said, active, controls)
    state, end = _end_unit(params, config, state, said, active)

    stopped = inputs.active & feedback.stop
    is_listen, end_of_turn = said.terminator == config.control.listen, said.ended
    if config.reference_quirks:
        end_of_turn &= ~is_listen
    else:
        is_listen &= (said.voice_count == 0) & (code_count == 0)
        end_of_turn |= said.flush
    trace = None
    if config.trace:
        after_said += jnp.where(said.forced_turn_end, 1, 0)
        marks = jnp.stack([before, after_input, after_said, end], axis=1)
        trace = Trace(embeds, said.logits, said.hidden, said.decided, code_scores, marks)
    return state, UnitOutputs(
        active=active, is_listen=jnp.where(active, is_listen, True),
        terminator=jnp.where(active, said.terminator, config.control.listen),
        tokens=said.tokens, token_count=said.count, text=said.text, text_count=said.text_count,
        delegate=said.delegate, delegate_count=said.delegate_count, codes=codes, code_count=code_count,
        end_of_turn=(end_of_turn & active) | stopped, turn_open=state.turn_open,
        flush=(said.flush & active) | (stopped & state.turn_open), full=wanted & ~fits,
        forced_turn_end=said.forced_turn_end, unit=state.unit - active, kv_length=end, trace=trace)


def room_needed(config: StreamConfig, controls: Controls, given: Int[Array, "b"]) -> Int[Array, "b"]:
    """Cache entries a unit with `given` tokens of input may come to take, its end included."""
    said = controls.max_tokens - 1 + controls.max_delegate
    return given + said.clip(max=config.max_unit_tokens) + PENDING


class Prompt(NamedTuple):
    """A system prompt for some rows, as `stream.unit.Grammar.prompt` lays it out.

    `media`: embeddings of the reference voice. `prefix_count`: entries in front of the place where the `context` window
    puts remembered words; `suffix`, `suffix_count`: the ids behind it. `key`: uint32 seeds of the sessions.
    """

    rows: Bool[Array, "b"]
    ids: Int[Array, "b t"]
    media: Float[Array, "b m d"]
    media_index: Int[Array, "b t"]
    count: Int[Array, "b"]
    prefix_count: Int[Array, "b"]
    suffix: Int[Array, "b x"]
    suffix_count: Int[Array, "b"]
    key: Array


def prefill(params: Params, config: StreamConfig, state: StreamState, prompt: Prompt) -> StreamState:
    """Begins a session in the marked rows: forgets what was there and reads the system prompt. Others stay as they are.

    With `reference_quirks` the audio tower's cache is carried over from the row's last session (surprise 4).
    """
    rows, ids = prompt.rows, prompt.ids
    reset = lambda cache: None if cache is None else kv_cache.reset(cache, rows)
    caches = dict(llm=reset(state.llm), talker=reset(state.talker),
                  audio=state.audio if config.reference_quirks else reset(state.audio))
    no_caches = dict.fromkeys(caches)
    fresh = init_state(config, rows.shape[0])
    fresh = fresh._replace(pinned=prompt.count, key=prompt.key, memory=fresh.memory._replace(
        prefix=prompt.prefix_count, suffix=prompt.suffix, suffix_count=prompt.suffix_count))
    state = select_rows(rows, fresh._replace(**no_caches), state._replace(**no_caches))._replace(**caches)
    valid = rows[:, None] & (jnp.arange(ids.shape[1]) < prompt.count[:, None])
    x = _apply(params, config, ids, prompt.media, prompt.media_index, method="embed")
    none = jnp.full(ids.shape, -1)
    return _append(params, config, state, x, valid, jnp.full(ids.shape, windows.PROMPT), none)[0]


# --- input ------------------------------------------------------------------------------------------------------------
def _apply(params, config, *args, method):
    return frontend.Frontend(config.model, config.rules).apply({"params": params}, *args, method=method)


def _front(config, state):
    """Positions at the front that a ring goes round."""
    return jnp.zeros_like(state.pinned) if config.window.kind == "ring" else state.pinned


def _append(params, config, state, x, valid, unit, word):
    """Reads embeddings behind everything held; labels the new entries. Returns the state and the hidden states."""
    positions = kv_cache.next_positions(state.llm, valid)
    where = windows.slots(config.window, state.llm, _front(config, state), positions)
    hidden, cache = _apply(params, config, x, positions, None, state.llm, where, method="backbone")
    return state._replace(llm=cache, entries=windows.write(state.entries, where, unit, word)), hidden


def _perceive(params, config, state, inputs, active):
    """Towers: the table [pictures | sound] of every row, `[B, M, D]`."""
    valid = active & inputs.has_sound
    first = valid & (state.mel.unit == 0)
    mel_state, mel, _ = mel_jax.stream_log_mel(state.mel, inputs.samples, valid, jnp.zeros_like(valid))
    media, audio = _apply(params, config, mel, first, valid, state.audio, method="encode_stream")
    batch, slices = inputs.images.grid_hw.shape[:2]
    if slices:
        flat = jax.tree.map(lambda a: a.reshape(batch * slices, *a.shape[2:]), inputs.images)
        pictures = _apply(params, config, flat, method="encode_images")
        media = jnp.concatenate([pictures.reshape(batch, -1, pictures.shape[-1]), media], axis=1)
    return state._replace(mel=mel_state, audio=audio), media


def _take_in(params, config, state, inputs, background, media, active):
    """The one append: what the last unit left, this unit's input, the background block."""
    none = lambda ids: jnp.full(ids.shape, -1)
    ids = jnp.concatenate([state.pending, inputs.ids, background.ids], axis=1)
    index = jnp.concatenate([none(state.pending), inputs.media_index, none(background.ids)], axis=1)
    within = lambda ids, count: jnp.arange(ids.shape[1]) < count[:, None]
    valid = active[:, None] & jnp.concatenate([
        within(state.pending, state.pending_count), within(inputs.ids, inputs.count),
        within(background.ids, background.count)], axis=1)
    unit = jnp.where(jnp.arange(ids.shape[1]) < PENDING, state.unit[:, None] - 1, state.unit[:, None])
    x = _apply(params, config, ids, media, index, method="embed")
    state, hidden = _append(params, config, state, x, valid, unit, none(ids))
    state = state._replace(pending_count=jnp.where(active, 0, state.pending_count))
    return state, hidden, x if config.trace else None


def _decision_place(config, inputs, background):
    """Where in [input | background] the decision is read: at the last place, or as the reference at the last medium."""
    width = inputs.ids.shape[1]
    last = jnp.where(background.count > 0, width + background.count - 1, inputs.count - 1)
    if config.reference_quirks:
        last = jnp.where(inputs.media_count > 0, inputs.media_count - 1, last)
    return jnp.maximum(last, 0)


# --- what is said -----------------------------------------------------------------------------------------------------
class _Said(NamedTuple):
    """The decision loop's record; `rounds` counts decisions and forced ends of spoken tokens, as the budget does."""

    going: Bool[Array, "b"]
    token: Int[Array, "b"]  # decided, not yet read
    terminator: Int[Array, "b"]
    tokens: Int[Array, "b n"]
    count: Int[Array, "b"]
    rounds: Int[Array, "b"]
    text: Int[Array, "b n"]
    text_count: Int[Array, "b"]
    delegate: Int[Array, "b n"]
    delegate_count: Int[Array, "b"]
    voice: Int[Array, "b n"]
    voice_hidden: Float[Array, "b n d"]
    voice_count: Int[Array, "b"]
    ended: Bool[Array, "b"]  # the last token read was <|turn_eos|>
    flush: Bool[Array, "b"]
    forced_turn_end: Bool[Array, "b"]
    byte_state: Int[Array, "b"]
    characters: Int[Array, "b"]
    seconds: Float[Array, "b"]  # estimated duration of the text so far
    logits: Float[Array, "b n v"]  # for the trace: behind the input, then behind every token
    hidden: Float[Array, "b n d"]  # likewise
    decided: Int[Array, "b n"]


def _put(buffer, count, value, rows):
    """Writes `value` at place `count` of each marked row."""
    row = jnp.arange(buffer.shape[0])
    return buffer.at[row, jnp.where(rows, count, buffer.shape[1])].set(value.astype(buffer.dtype), mode="drop")


def _say(params, config, state, hidden, active, feedback, controls):
    """Decides and reads tokens until every row's unit has ended. Returns the state and the record."""
    tokens, quirks, cap = config.control, config.reference_quirks, config.max_unit_tokens
    vocabulary = controls.vocabulary
    batch = active.shape[0]
    row_key = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(state.key), state.unit)
    was_open, forced = state.turn_open, feedback.force_listen & active
    forced_turn_end = forced & was_open
    base = _speech_ahead(state, feedback)
    is_terminator = lambda x: jnp.isin(x, jnp.array([tokens.listen, tokens.chunk_eos, tokens.chunk_tts_eos]))

    def decide(state, said, hidden):
        """From the state behind the last token to the next token, or the unit's end."""
        logits = _apply(params, config, hidden, method="logits")[:, 0]
        keys = jax.vmap(jax.random.fold_in)(row_key, said.count)
        drawn, recorded = sampling.decide(keys, logits, state.history, controls, tokens, quirks)
        delegating = state.delegating
        out_of_budget = jnp.where(delegating, said.delegate_count >= jnp.maximum(controls.max_delegate, 1),
                                  said.rounds >= controls.max_tokens - 1) | (said.count >= cap)
        over = out_of_budget
        if not quirks:  # a turn ends with its unit
            over |= said.ended & (said.count > 1)
        asked = said.going & ~over & ~forced
        token = jnp.where(forced, tokens.listen, jnp.where(over, tokens.chunk_eos, drawn))
        token = jnp.where((token == tokens.listen) & ~forced & state.turn_open, tokens.tts_bos, token)
        ends = is_terminator(token)

        byte_state, characters, length = count_characters(vocabulary, said.byte_state, said.characters, token)
        first = said.count == 0
        counted = ~first if quirks else ~(vocabulary.special[token] & first)
        spelt = counted & ~first & ~vocabulary.special[token] & ~delegating
        too_long = (controls.max_chars > 0) & spelt & (length >= controls.max_chars)
        seconds = vocabulary.seconds[token]
        gap = config.unit_seconds - jnp.where(said.flush, 0, base) - said.seconds
        # The nearest end wins; a unit's first word may overshoot, or a very long one would never be said.
        further = (jnp.abs(gap - seconds) >= jnp.abs(gap)) & ((said.seconds > 0) | (gap <= 0))
        too_far = controls.follow_clock & (seconds > 0) & further & ~delegating
        rejected = ~ends & (too_long | too_far)
        kept = asked & recorded & (~rejected | quirks)
        turn_open = state.turn_open | (said.going & ~ends & (~rejected | quirks))
        ends |= rejected
        terminator = jnp.where(rejected, tokens.chunk_eos, token)
        takes = said.going & ~ends & counted & ~delegating
        state = state._replace(turn_open=turn_open, history=sampling.remember(state.history, drawn, kept))
        logged = {}
        if config.trace:
            logged = dict(logits=_put(said.logits, said.count, logits, said.going),
                          hidden=_put(said.hidden, said.count, hidden[:, 0], said.going),
                          decided=_put(said.decided, said.count, drawn, asked))
        said = said._replace(
            token=token, terminator=jnp.where(said.going & ends, terminator, said.terminator),
            going=said.going & ~ends,
            byte_state=jnp.where(takes, byte_state, said.byte_state),
            characters=jnp.where(takes, characters, said.characters),
            seconds=jnp.where(takes, said.seconds + seconds, said.seconds), **logged)
        return state, said

    def read(state, said):
        """Feeds the decided token of every going row and files it: text, request, voice."""
        token, rows = said.token, said.going
        opens, closes = token == tokens.delegate_start, token == tokens.delegate_end
        is_end = token == tokens.turn_eos
        request = rows & (state.delegating | opens)
        delegating = jnp.where(rows, (state.delegating | opens) & ~closes & ~is_end, state.delegating)
        first = said.count == 0
        yields = rows & first & is_end & was_open  # the floor is given up before anything is said
        special = vocabulary.special[token]
        if quirks:
            spoken = rows & ~first
        else:  # control tokens in front of a turn's words are none of them; turn_eos closes what was voiced
            heads = (said.voice_count == 0) & special & ~is_end
            spoken = rows & ~request & ~heads & ~(first & special)
        word = jnp.where(spoken & ~special & ~request, token, -1)
        x = _apply(params, config, token[:, None], method="embed")
        state, hidden = _append(params, config, state, x, rows[:, None], state.unit[:, None], word[:, None])
        state = state._replace(turn_open=state.turn_open & ~(rows & is_end), delegating=delegating)
        if quirks:
            said_text = spoken
        else:
            said_text = rows & ~request & ~special
        said = said._replace(
            tokens=_put(said.tokens, said.count, token, rows), count=said.count + rows,
            rounds=said.rounds + (rows & ~request),
            text=_put(said.text, said.text_count, token, said_text), text_count=said.text_count + said_text,
            delegate=_put(said.delegate, said.delegate_count, token, request),
            delegate_count=said.delegate_count + request,
            voice=_put(said.voice, said.voice_count, token, spoken),
            voice_hidden=_put(said.voice_hidden, said.voice_count, hidden[:, 0], spoken),
            voice_count=said.voice_count + spoken,
            ended=jnp.where(rows, is_end, said.ended), flush=said.flush | yields)
        return state, said, hidden

    def step(carry):
        state, said = carry
        state, said, hidden = read(state, said)
        return decide(state, said, hidden)

    width, d = controls.vocabulary.forbidden.shape[0], hidden.shape[-1]
    none, zero = jnp.full((batch, cap), -1, jnp.int32), jnp.zeros((batch,), jnp.int32)
    no = jnp.zeros((batch,), bool)
    traced = (cap + 1) * config.trace
    said = _Said(
        going=active, token=zero, terminator=jnp.full((batch,), tokens.listen), tokens=none, count=zero, rounds=zero,
        text=none, text_count=zero, delegate=none, delegate_count=zero, voice=none,
        voice_hidden=jnp.zeros((batch, cap, d), hidden.dtype), voice_count=zero, ended=no, flush=forced_turn_end,
        forced_turn_end=forced_turn_end, byte_state=zero, characters=zero, seconds=jnp.zeros((batch,)),
        logits=jnp.zeros((batch, traced, width)), hidden=jnp.zeros((batch, traced, d), hidden.dtype),
        decided=jnp.full((batch, traced), -1))
    state = state._replace(turn_open=state.turn_open & ~forced_turn_end)
    state, said = jax.lax.while_loop(lambda carry: carry[1].going.any(), step, decide(state, said, hidden))
    # A bare turn end is no interruption: nothing takes the place of what was said.
    bare = (said.count == 1) & (said.terminator == tokens.chunk_eos)
    said = said._replace(flush=forced_turn_end | (said.flush & ~bare))
    base = jnp.where(said.flush, 0, base)  # what was dropped is not waited for
    clock = Clock(jnp.maximum(base + said.seconds - config.unit_seconds, 0),
                  jnp.where(said.flush, 0, state.clock.scheduled) + said.seconds)
    return state._replace(clock=select_rows(active, clock, state.clock)), said


def _speech_ahead(state, feedback):
    """tau_{k-1} - t_{k-1}: seconds of scheduled speech that are still to be said when this unit begins, at least 0.

    What was really played corrects the estimate.
    """
    reported = jnp.maximum(state.clock.scheduled - feedback.played, 0)
    return jnp.where(feedback.played >= 0, reported, state.clock.ahead)


# --- voice ------------------------------------------------------------------------------------------------------------
def _voice(params, config, state, said, active, controls):
    """The unit's speech codes, for the rows that speak."""
    batch = active.shape[0]
    nothing = (jnp.full((batch, CHUNK_CODES), -1, jnp.int32), jnp.zeros((batch,), jnp.int32))
    if not config.speak:
        return state, *nothing, None
    model, quirks = config.model.talker, config.reference_quirks
    listens = said.terminator == config.control.listen
    limit = jnp.minimum(codes_per_unit(config, state.unit), CHUNK_CODES)
    if quirks:
        speaks, closes = active & ~listens, said.ended
    else:
        # An interrupted or forcibly closed turn is over before this unit's words; a delegate span alone has no voice.
        over = active & (said.flush | said.forced_turn_end)
        state = state._replace(talker=kv_cache.reset(state.talker, over), talker_start=jnp.where(over, 0, state.talker_start))
        words = ((said.voice >= 0) & (said.voice != config.control.turn_eos)).any(axis=1)
        speaks = active & (words | (state.talker_start > 0)) & ~(listens & ~words & ~said.ended)
        closes = said.ended | ~state.turn_open
    state = _talker_room(config, state, said.voice_count + CHUNK_CODES + 2, speaks)
    free = (state.talker_start == 0) | closes | (said.delegate_count > 0)
    draw = talker_decode.Draw(controls.voice_temperature, controls.voice_penalty, jnp.where(free, 0, limit + 1),
                              greedy=controls.voice_greedy)
    keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(state.key), -1 - state.unit)

    spread = lambda x: constrain(x, config.rules, "speech_batch", *[None] * (x.ndim - 1))
    voice, voice_hidden, voice_count = map(spread, (said.voice, said.voice_hidden, said.voice_count))

    def speak(carry):
        cache, start, *_ = carry
        codes, count, start, cache, raw = talker_decode.generate_chunk(
            params["talker"], model, voice, voice_hidden, voice_count, start, cache, keys, draw,
            keep_scores=config.trace, active=speaks, limit=limit)
        return cache, start, codes, count, raw.scores, jnp.bool_(False)

    scores = jnp.zeros((batch, (CHUNK_CODES + 1) * config.trace, model.num_audio_tokens))
    # like `rebase`: a loop of at most one turn, where a branch would copy the cache
    cache, start, codes, count, scores, _ = jax.lax.while_loop(
        lambda carry: carry[-1], speak, (state.talker, state.talker_start, *nothing, scores, speaks.any()))
    over = (speaks & closes) if quirks else (active & ~state.turn_open)
    state = state._replace(talker=kv_cache.reset(cache, over), talker_start=jnp.where(over, 0, start))
    return state, codes, count, scores


def _talker_room(config, state, needed, rows):
    """A turn that would outgrow the talker's cache forgets its older half."""
    size = config.talker_slots
    tight = rows & (state.talker_start + needed > size)

    def forget(carry):
        cache, start, tight = carry
        # The talker's entries lie in the slots of their positions: the newer half moves to the front.
        drop = jnp.where(tight, jnp.maximum(start - size // 2, 0), 0)
        source = (jnp.arange(size) + drop[:, None]) % size
        take = lambda x: jnp.take_along_axis(x, source[None, :, None, :, None], axis=3)
        moved = cache._replace(k=take(cache.k), v=take(cache.v),
                               slot_position=jnp.take_along_axis(cache.slot_position, source, axis=1))
        cache = kv_cache.reposition(moved, moved.slot_position - drop[:, None], config.model.talker.rope_theta)
        return cache, start - drop, jnp.zeros_like(tight)

    cache, start, _ = jax.lax.while_loop(lambda c: c[2].any(), forget, (state.talker, state.talker_start, tight))
    return state._replace(talker=cache, talker_start=start)


# --- the unit's end ---------------------------------------------------------------------------------------------------
def _end_unit(params, config, state, said, active):
    """Leaves the closing tokens for the next append, counts the unit, lets the reference's windows act.

    Returns the state and the entries held, pending ones counted.
    """
    tokens = config.control
    forced = said.forced_turn_end
    unit_end = jnp.full_like(said.terminator, tokens.unit_end)
    plain = jnp.stack([said.terminator, unit_end, unit_end], axis=1)
    closing = jnp.stack([jnp.full_like(unit_end, tokens.turn_eos), said.terminator, unit_end], axis=1)
    pending = jnp.where(forced[:, None], closing, plain)
    closed = active & ~state.turn_open
    clock = state.clock._replace(scheduled=jnp.where(closed, 0, state.clock.scheduled))
    entries = state.entries
    if config.window.kind == "context":  # what was only listened to is not remembered
        unsaid = active & (said.terminator == tokens.listen if config.reference_quirks else said.text_count == 0)
        entries = entries._replace(word=jnp.where(unsaid[:, None] & (entries.unit == state.unit[:, None]), -1, entries.word))
    state = state._replace(
        pending=jnp.where(active[:, None], pending, state.pending),
        pending_count=jnp.where(active, 2 + forced, state.pending_count),
        delegating=state.delegating & ~closed,
        clock=clock, entries=entries, unit=state.unit + active)
    if config.window.kind == "basic":
        evicts = kv_cache.length(state.llm) + state.pending_count > config.window.high
        state = _evict(params, config, state, evicts & active, _basic)
    elif config.window.kind == "context":
        evicts = windows.units_held(state.llm, state.entries) > config.window.max_units
        state = _evict(params, config, state, evicts & active, _context)
    return state, kv_cache.length(state.llm) + state.pending_count


def flush(params: Params, config: StreamConfig, state: StreamState, rows: Bool[Array, "b"]) -> StreamState:
    """Reads the pending tokens now. A window that moves entries needs them in place; nothing else does."""
    valid = rows[:, None] & (jnp.arange(PENDING) < state.pending_count[:, None])
    x = _apply(params, config, state.pending, method="embed")
    unit = jnp.broadcast_to(state.unit[:, None] - 1, valid.shape)
    state, _ = _append(params, config, state, x, valid, unit, jnp.full(valid.shape, -1))
    return state._replace(pending_count=jnp.where(rows, 0, state.pending_count))


def _evict(params, config, state, rows, how):
    return jax.lax.cond(rows.any(), lambda state: how(params, config, flush(params, config, state, rows), rows),
                        lambda state: state, state)


def _basic(params, config, state, rows):
    return state._replace(llm=windows.basic(config.window, state.llm, state.entries, state.pinned, rows,
                                            config.model.llm.rope_theta))


def _context(params, config, state, rows):
    """Drops the oldest unit; its words, if any, join the remembered ones, which are read anew with the prompt's end."""
    window, memory, theta = config.window, state.memory, config.model.llm.rope_theta
    length, mine = windows.oldest_unit(state.llm, state.entries)
    words, count = windows.words_of(state.llm, state.entries, mine, config.max_unit_tokens)
    renew = rows & (count > 0)
    joined = jnp.concatenate([memory.previous, words], axis=1)
    total = memory.count + count
    kept = jnp.minimum(total, window.max_previous)
    at = jnp.arange(window.max_previous) + (total - kept)[:, None]  # place among all words, oldest first
    at = jnp.where(at < memory.count[:, None], at, at - memory.count[:, None] + window.max_previous)
    previous = jnp.take_along_axis(joined, jnp.minimum(at, joined.shape[1] - 1), axis=1)
    marker = jnp.broadcast_to(jnp.array(window.marker, jnp.int32), (rows.shape[0], len(window.marker)))
    inserted = len(window.marker) + kept + memory.suffix_count

    start = jnp.where(renew, memory.prefix, state.pinned)
    cache = windows.cut_out(state.llm, start, state.pinned + length, jnp.where(renew, inserted, 0), rows, theta)
    memory = memory._replace(previous=jnp.where(renew[:, None], previous, memory.previous),
                             count=jnp.where(renew, kept, memory.count))
    state = state._replace(llm=cache, memory=memory, pinned=jnp.where(renew, memory.prefix + inserted, state.pinned))

    ids = jnp.concatenate([marker, memory.previous, memory.suffix], axis=1)
    present = jnp.concatenate([jnp.ones(marker.shape, bool), jnp.arange(window.max_previous) < memory.count[:, None],
                               jnp.arange(memory.suffix.shape[1]) < memory.suffix_count[:, None]], axis=1)
    valid = renew[:, None] & present
    positions = jnp.where(valid, memory.prefix[:, None] + jnp.cumsum(valid, axis=1) - 1, -1)
    where = windows.slots(window, cache, state.pinned, positions)
    x = _apply(params, config, ids, method="embed")
    _, cache = _apply(params, config, x, positions, None, cache, where, method="backbone")
    prompt = jnp.full(ids.shape, windows.PROMPT)
    return state._replace(llm=cache, entries=windows.write(state.entries, where, prompt, jnp.full(ids.shape, -1)))

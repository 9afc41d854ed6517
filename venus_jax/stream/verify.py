"""The decision and whole duplex sessions against recorded numbers of the reference: parts decision and duplex.

Sessions run through `transition` as a live session does, quirks on; nothing of a fixture is fed back. Waveforms belong
to part token2wav.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from venus_jax import tokens as tokens_lib
from venus_jax.checkpoints.golden import GoldenSet, Report
from venus_jax.config import VenusConfig
from venus_jax.errors import GoldenError
from venus_jax.media import decode, images
from venus_jax.models import frontend, talker
from venus_jax.nn import kv_cache
from venus_jax.stream import inputs as packing
from venus_jax.stream import sampling
from venus_jax.stream.kv_cache import Window
from venus_jax.stream.prompt import encode_voice, make_prompt
from venus_jax.stream.state import StreamConfig, init_state
from venus_jax.stream.transition import flush, prefill, transition
from venus_jax.stream.unit import Output
from venus_jax.stream.vocabulary import vocabulary
from venus_jax.tokens import ControlTokens, Tokenizer
from venus_jax.typing import Params


def _tokenizer(golden: GoldenSet) -> Tokenizer:
    return tokens_lib.load_tokenizer(golden.path("checkpoint/config.json").parent)


def _controls(batch: int, config: VenusConfig, tokenizer: Tokenizer, settings: dict[str, Any], **more) -> sampling.Controls:
    """Controls of recorded arguments; an arg max stands in for every recorded draw."""
    tables = vocabulary(tokenizer, config.llm.vocab_rows, reference_quirks=True)
    return sampling.controls(
        batch, tables, greedy=True, temperature=settings["temperature"], top_k=settings["top_k"] or 0,
        top_p=settings["top_p"] or 1.0,  # 0 switches it off there
        listen_scale=settings["listen_prob_scale"], listen_top_k=settings["listen_top_k"] or 0,
        repetition_penalty=settings["text_repetition_penalty"],
        repetition_window=min(settings["text_repetition_window_size"] or sampling.HISTORY, sampling.HISTORY), length_penalty=settings["length_penalty"],
        follow_clock=False, voice_greedy=True, **more)


def _history(ids: list[int]) -> jax.Array:
    return jnp.asarray([([-1] * sampling.HISTORY + ids)[-sampling.HISTORY:]])


def verify_decision(golden: GoldenSet, config: VenusConfig, params: Params, report: Report) -> None:
    """Every recorded call of the reference's `decode`: the id, whether it is remembered, the scores it was drawn from."""
    info, z, tokenizer = golden.json("decision/decision.json"), golden.arrays("decision/decision.npz"), _tokenizer(golden)
    bound = golden.bound("session_a_audio.decode_logits", logits=True)
    control = tokenizer.control
    decide, process = (jax.jit(f, static_argnums=(k, k + 1)) for f, k in ((sampling.decide, 4), (sampling.process, 3)))
    keys = jax.random.split(jax.random.key(0), 1)
    for case in info["cases"]:
        n, quiet = case["n"], case["params"]
        logits, history = jnp.asarray(z[f"{n}.logits"])[None], _history(case["history"])
        c = _controls(1, config, tokenizer, quiet)
        token, remembered = decide(keys, logits, history, c, control, True)
        report.same(f"{n}.result, appended", [int(token[0]), int(remembered[0])], [case["result"], case["appended"]])
        processed = process(logits, history, c, control, True)
        if (key := f"{n}.processed") in z:
            report.close(key, processed[0], z[key], bound)
        if (key := f"{n}.first_probs") in z:
            report.close(key, jax.nn.softmax(logits[0]), z[key], bound)
        if (key := f"{n}.final_probs") in z:
            best, ids = sampling.candidates(processed, c, logits.shape[1])
            report.close(key, jnp.zeros(logits.shape[1]).at[ids[0]].set(jax.nn.softmax(best[0])), z[key], bound)


def verify_duplex(golden: GoldenSet, config: VenusConfig, params: Params, report: Report) -> None:
    """Every recorded session of the set."""
    names = sorted(path.stem for path in (golden.root / "duplex").glob("session_*.json"))
    if not names:
        raise GoldenError(f"{golden.root}: no recorded sessions; expected duplex/session_*.json")
    infos = [golden.json(f"duplex/{name}.json") for name in names]
    budget = max(info["settings"]["gen"]["max_new_speak_tokens_per_chunk"] for info in infos)
    longest = max(unit["kv_after_generate"] for info in infos for unit in info["units"])
    for name in names:  # sizes that all sessions share: those alike share their programs
        slots = min(longest + 2 * budget + 128, config.llm.max_positions)
        _Session(golden, config, params, report, name, budget, slots).run()


def _condition(params, config, ids, hidden):
    model, bos = talker.talker(config), jnp.full((ids.shape[0], 1), config.audio_bos_token_id)
    return (model.apply({"params": params}, ids, hidden, method="condition"),
            model.apply({"params": params}, bos, method="embed_text"))


def _embed(params, config, *args):
    return frontend.Frontend(config).apply({"params": params}, *args, method="embed")


_STEP = jax.jit(transition, static_argnames="config", donate_argnames="state")
_PREFILL = jax.jit(prefill, static_argnames="config", donate_argnames="state")
_FLUSH = jax.jit(flush, static_argnames="config")
_CONDITION = jax.jit(_condition, static_argnames="config")
_EMBED = jax.jit(_embed, static_argnames="config")
_PROCESS = jax.jit(sampling.process, static_argnums=(3, 4))


class _Session:
    """One recorded session, replayed."""

    def __init__(self, golden, config, params, report, name, budget, slots):
        self.golden, self.params, self.report, self.name = golden, params, report, name
        self.info, self.z = golden.json(f"duplex/{name}.json"), golden.arrays(f"duplex/{name}.npz")
        self.speech = golden.arrays("audio/speech.npz")["wave_i16"].astype(np.float32) / 32768
        self.tokenizer = _tokenizer(golden)
        settings = self.info["settings"]
        self.hf = settings["variant"] == "hf"  # the other class: no limit of characters, ends are fed at once
        cap, gen, prepare = settings["cap"], settings["gen"], settings["prepare"]
        marker = prepare.get("context_previous_marker", "\n\nprevious: ")
        kind = {"off": "error"}.get(cap["sliding_window_mode"], cap["sliding_window_mode"])
        high = min(cap.get("basic_window_high_tokens", 8000), slots)  # a mark that is not reached needs no room
        window = Window(kind, high=high, low=min(cap.get("basic_window_low_tokens", 6000), high),
                        max_units=cap.get("context_max_units", 24), max_previous=cap.get("context_previous_max_tokens", 500),
                        marker=tuple(self.tokenizer.encode(marker)))
        self.config = StreamConfig(
            config, self.tokenizer.control, slots=slots, talker_slots=config.talker.max_positions, window=window,
            max_unit_tokens=budget, speak=cap["generate_audio"], reference_quirks=True, trace=True)
        self.controls = _controls(1, config, self.tokenizer, gen, max_tokens=gen["max_new_speak_tokens_per_chunk"],
                                  max_delegate=0, max_chars=0 if self.hf else 28)
        self.force_listen = cap["force_listen_count"]
        self.said: list[int] = []  # the reference's `generated_tokens`

    def run(self) -> None:
        state = self._prepare()
        slices = [self._pictures(unit) for unit in self.info["units"]]
        widest = max(sum(map(len, pictures)) for pictures in slices)
        for unit, pictures in zip(self.info["units"], slices):
            k = unit["index"]
            samples = None
            if "audio_range_in_speech" in unit:
                start, count = unit["audio_range_in_speech"]
                samples = np.pad(self.speech[start:start + count], (0, max(0, self.config.unit_samples - count)))
            row = packing.Row(samples, pictures, force_listen=unit["force_listen"] or k < self.force_listen)
            before = state.turn_open[0]
            self._same(k, "turn_ended_before", not before, unit["turn_ended_before"])
            packed = packing.pack(self.config, packing.Bucket(widest if pictures else 0), [row])
            talker_before = int(state.talker_start[0])
            state, out = _STEP(self.params, self.config, state, *packed, self.controls)
            self._check(unit, state, jax.tree.map(np.asarray, out), packed[0], talker_before)

    def _same(self, k, what, ours, recorded):
        self.report.same(f"{self.name}.u{k}.{what}", ours, recorded)

    def _close(self, k, what, ours, recorded, key, logits=False):
        self.report.close(f"{self.name}.u{k}.{what}", ours, recorded, self.golden.bound(f"{self.name}.{key}", logits=logits))

    def _prepare(self):
        prepare, text = self.info["prepare"], self.info["settings"]["prepare"]
        voice = None
        if text["ref_audio"]:
            sound = self.z[text["ref_audio"]].astype(np.float32) / 32768
            voice = encode_voice(self.params, self.config.model, sound)
        prefix, suffix = (self.tokenizer.encode(text[key] or "") for key in ("prefix_system_prompt", "suffix_system_prompt"))
        prompt = make_prompt(self.config, [True], prefix, voice, suffix, [0])
        self.prompt_count = int(prompt.count[0])
        fed = sum((feed[2] for feed in prepare["feeds"]), [])
        ours = np.where(prompt.media_index[0] >= 0, -1, prompt.ids[0])[:int(prompt.count[0])]
        self.report.same(f"{self.name}.prepare.ids", ours, fed)
        embeds = _EMBED(self.params, self.config.model, prompt.ids, prompt.media, prompt.media_index)
        self.report.close(f"{self.name}.prepare.embeds", embeds[0, :int(prompt.count[0])], self.z["prepare.embeds"],
                          self.golden.bound(f"{self.name}.prefill_embeds"))
        state = _PREFILL(self.params, self.config, init_state(self.config, 1, jnp.float32), prompt)
        self.report.same(f"{self.name}.prepare.kv_after, preserve", [kv_cache.length(state.llm)[0], state.pinned[0]],
                         [prepare["kv_after"], prepare["preserve"]])
        return state

    def _pictures(self, unit):
        most = unit["max_slice_nums"]
        most = most if isinstance(most, list) else [most] * len(unit["frames"])
        vision, scale = self.config.model.vision, self.config.model.image.scale_resolution
        return tuple(tuple(images.slice_image(decode.read_image(self.z[f"frame{i}_png"].tobytes()), n, scale,
                                              vision.patch_size)) for i, n in zip(unit["frames"], most))

    def _check(self, unit, state, out, packed, talker_before):
        k, c, z = unit["index"], self.config.control, self.z
        count, trace = int(out.token_count[0]), out.trace
        # What was fed, in order. The reference feeds a unit's end at once, we with the next unit.
        fed = sum((feed[3] for feed in unit["feeds"][:unit["n_prefill_feeds"]]), [])
        used = int(packed.count[0])
        self._same(k, "prefill ids", np.where(packed.media_index[0] >= 0, -1, packed.ids[0])[:used], fed)
        said = [c.turn_eos] * bool(out.forced_turn_end[0]) + out.tokens[0, :count].tolist()
        end = packing.grammar(self.config).unit_output(Output((), int(out.terminator[0]))).ids.tolist()
        self._same(k, "generated ids", said + end, sum((feed[3] for feed in unit["feeds"][unit["n_prefill_feeds"]:]), []))
        marks = trace.kv_length[0].tolist()
        if self.hf:
            marks[2] += len(end)
        self._same(k, "kv before, after input, said, end", marks,
                   [unit[key] for key in ("kv_before", "kv_after_prefill", "kv_after_generate", "kv_after_finalize")])
        flags = [out.is_listen[0], out.end_of_turn[0], not out.turn_open[0]]
        self._same(k, "is_listen, end_of_turn, turn_ended", flags,
                   [unit[key] for key in ("is_listen", "end_of_turn", "turn_ended_after")])
        self._same(k, "audio_kv", kv_cache.length(state.audio)[0], unit["audio_kv"])
        decided = trace.decided[0][trace.decided[0] >= 0].tolist()
        self._same(k, "decided", decided, unit["decoded"])
        if not unit["is_listen"]:
            text = self.tokenizer.decode(out.text[0, :int(out.text_count[0])], skip_special=True)
            self._same(k, "text", text, unit["text"])

        first = trace.embeds.shape[1] - packed.ids.shape[1]
        self._close(k, "prefill_embeds", trace.embeds[0, first:first + used], z[f"u{k}.prefill_embeds"], "prefill_embeds")
        logits, hidden = trace.logits[0], trace.hidden[0]
        n = len(unit["decoded"])
        if (key := f"u{k}.decode_logits") in z:
            self._close(k, "decode_logits", logits[:n], z[key], "decode_logits", logits=True)
        if (key := f"u{k}.decode_top16_ids") in z:
            top = np.take_along_axis(logits[:n], z[key].astype(np.int64), axis=1)
            self._close(k, "decode_top16", top, z[f"u{k}.decode_top16_values"], "decode_logits", logits=True)
        if (key := f"u{k}.decode_processed") in z:
            self._processed(k, logits[:n], decided, z[key])
        self.said += [i for i in decided if i != c.chunk_eos]
        fed_last = count if not out.forced_turn_end[0] and not self.hf else None
        if fed_last is not None:
            self._close(k, "last_feed_logits", logits[fed_last], z[f"u{k}.last_feed_logits"], "last_feed_logits", logits=True)
        recorded = z[f"u{k}.feed_hidden"]
        self._same(k, "feeds with logits", len(recorded), sum(feed[4] for feed in unit["feeds"]))
        m = min(count + 1, len(recorded))  # a forced or separately fed end has states of its own, which nothing reads
        self._close(k, "feed_hidden", hidden[:m], recorded[:m], "decode_logits")
        self._check_cache(k, unit, state)
        self._check_window(k, unit, state)
        if "tts" in unit:
            self._check_talker(k, unit, state, out, talker_before)

    def _processed(self, k, logits, decided, recorded):
        c, control, said = self.controls, self.config.control, list(self.said)
        for j, row in enumerate(recorded):
            ours = np.asarray(_PROCESS(jnp.asarray(logits[j])[None], _history(said), c, control, True))[0]
            if not np.isnan(row).all():  # left early
                self._close(k, f"decode_processed{j}", ours, row, "decode_logits", logits=True)
            if decided[j] != control.chunk_eos:
                said.append(decided[j])

    def _check_cache(self, k, unit, state):
        rows = jnp.array([True])
        flushed = _FLUSH(self.params, self.config, state, rows)
        cache = flushed.llm
        order = np.argsort(np.where(np.asarray(cache.slot_position[0]) < 0, 1 << 30, np.asarray(cache.slot_position[0])))
        order = order[:int(kv_cache.length(cache)[0])]
        keys, values = (np.asarray(a[:, 0])[:, :, order] for a in (cache.k, cache.v))  # [L, K, S, H]
        self._close(k, "kv_key_last", keys[-1, :, -1], self.z[f"u{k}.kv_key_last"], "kv_key_last")
        self._close(k, "kv_value_last", values[-1, :, -1], self.z[f"u{k}.kv_value_last"], "kv_key_last")
        if (key := f"u{k}.kv_key_all") in self.z:
            self._close(k, "kv_key_all", keys, self.z[key], "kv_key_last")
            self._close(k, "kv_value_all", values, self.z[f"u{k}.kv_value_all"], "kv_key_last")

    def _check_window(self, k, unit, state):
        window, memory = unit["window"], state.memory
        self._same(k, "window.preserve", state.pinned[0], window["preserve"])
        if self.config.window.kind == "context":
            words = memory.previous[0, :int(memory.count[0])].tolist()
            inserted = int(state.pinned[0]) > self.prompt_count
            ours = list(self.config.window.marker) + words if inserted else []
            self._same(k, "window.previous_ids", ours, window["previous_ids"])
        held = np.asarray(state.entries.unit[0])[np.asarray(state.llm.slot_position[0]) >= 0]
        lengths = [int((held == u["id"]).sum()) for u in window["units"]]
        lengths[-1:] = [n + int(state.pending_count[0]) for n in lengths[-1:]]  # what the newest unit still has to be fed
        self._same(k, "window.units", lengths, [u["length"] for u in window["units"]])

    def _check_talker(self, k, unit, state, out, before):
        recorded = unit["tts"]
        self._same(k, "tts.tokens", out.codes[0, :int(out.code_count[0])], recorded["tokens"])
        after = recorded["text_start_pos_after"]
        self._same(k, "tts.text_start_pos, after", [before, state.talker_start[0]], [recorded["text_start_pos"], after])
        n = int(out.token_count[0]) - 1
        said, bos = _CONDITION(self.params["talker"], self.config.model.talker, out.tokens[:, 1:], out.trace.hidden[:, 2:1 + out.tokens.shape[1]])
        condition = np.concatenate([said[:, :n], bos], axis=1)
        bound = self.golden.bound("tts.condition")
        self.report.close(f"{self.name}.u{k}.tts_condition", condition[0], self.z[f"u{k}.tts_condition"], bound)
        first = jax.nn.softmax(self._first_scores(out, recorded))
        self.report.close(f"{self.name}.u{k}.tts_first_probs", first, self.z[f"u{k}.tts_first_probs"],
                          self.golden.bound("tts.raw_logits"))

    def _first_scores(self, out, recorded):
        scores = np.array(out.trace.code_scores[0, 0]) / float(self.controls.voice_temperature[0])
        if recorded["min_new"] > 0:
            scores[self.config.model.talker.eos_token] = -np.inf
        return scores


PARTS = {"decision": verify_decision, "duplex": verify_duplex}

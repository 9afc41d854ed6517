"""The networks against recorded numbers of the reference: parts llm, vision, audio, tts.

Each part runs our public code with `reference_quirks` on the recorded inputs, in float32, and compares every array its
fixtures hold. Parts of higher rooms (decision, duplex, token2wav) bring their own runners.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax.errors import FlaxError

from venus_jax import tokens
from venus_jax.checkpoints.golden import Check, GoldenSet, Report
from venus_jax.checkpoints.hf import HFCheckpoint, import_hf
from venus_jax.config import FRAME_HOP, VenusConfig
from venus_jax.errors import GoldenError
from venus_jax.media import decode, images, mel, mel_jax
from venus_jax.models import frontend, qwen3, resampler, siglip2, talker, talker_decode, whisper
from venus_jax.nn import kv_cache, layers, logits
from venus_jax.typing import Params


Runner = Callable[[GoldenSet, VenusConfig, Params, Report], Any]


def verify(golden: GoldenSet, parts: list[str], emit: Callable[[Check], None] = lambda check: None,
           runners: dict[str, Runner] | None = None) -> list[Check]:
    """Runs the named parts and returns their checks in order.

    Args:
      runners: part -> what runs it; `PARTS` by default, to which higher rooms add theirs.

    Raises:
      GoldenError: an unknown part or an incomplete set.
    """
    runners = PARTS if runners is None else runners
    if unknown := [part for part in parts if part not in runners]:
        raise GoldenError(f"part {unknown[0]!r} is unknown; parts are {', '.join(runners)}")
    root = golden.path("checkpoint/config.json").parent
    config = HFCheckpoint(root, add_tokens=False).config.replace(dtype="float32")
    _, params = import_hf(root, config, dtype=jnp.float32)
    checks = []
    for part in parts:
        report = Report(part, emit)
        needs = {"vision": config.vision, "audio": config.audio, "tts": config.talker}
        if needs.get(part, config.llm) is None:
            raise GoldenError(f"{root}: this checkpoint has nothing to run part {part!r} with")
        try:
            runners[part](golden, config, params, report)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, FlaxError) as e:
            after = f" after {report.checks[-1].name!r}" if report.checks else ""
            raise GoldenError(f"{golden.root}: part {part!r} is not of the expected layout{after} "
                              f"({type(e).__name__}: {str(e).strip().splitlines()[0]})") from e
        checks += report.checks
    return checks


def _jitted(module, params: Params):
    """`call(*args, method=..., **options)`: the module's methods, compiled; far quicker than one operation at a time."""
    def apply(params, *args, method, options):
        return module.apply({"params": params}, *args, method=method, **dict(options))

    compiled = jax.jit(apply, static_argnames=("method", "options"))
    return lambda *args, method="__call__", **options: compiled(params, *args, method=method,
                                                                options=tuple(sorted(options.items())))


def verify_llm(golden: GoldenSet, config: VenusConfig, params: Params, report: Report) -> None:
    """Whole sequence, the same in pieces with a cache, far positions, and after an eviction with re-rotated keys."""
    z, c, apply = golden.arrays("llm/llm.npz"), config.llm, _jitted(frontend.Frontend(config), params)
    ids = jnp.asarray(z["input_ids"])[None]
    length = ids.shape[1]
    x = apply(ids, method="embed")
    hidden, _, blocks = _jitted(qwen3.qwen3(c, keep_layers=True), params["llm"])(x, jnp.arange(length)[None])
    bound = golden.bound("llm.full_hidden")
    report.close("hidden_states.embedding", x[0], z["hidden_states"][0], bound)
    report.close("hidden_states.blocks", blocks[:-1, 0], z["hidden_states"][1:-1], bound)
    report.close("hidden_states.final_norm", hidden[0], z["hidden_states"][-1], bound)
    report.close("logits", apply(hidden, method="logits")[0], z["logits"], golden.bound("llm.full_logits", logits=True))

    cache = kv_cache.empty(c.num_layers, 1, length + 16, c.num_kv_heads, c.head_dim)
    pieces, start = [], 0
    for count in z["incremental_splits"].tolist():
        piece = x[:, start:start + count]
        positions = kv_cache.next_positions(cache, jnp.ones(piece.shape[:2], bool))
        hidden, cache = apply(piece, positions, None, cache, method="backbone")
        pieces.append(hidden)
        start += count
    hidden = jnp.concatenate(pieces, axis=1)
    logits_bound = golden.bound("llm.incremental_logits", logits=True)
    report.close("incremental_last_hidden", hidden[0], z["incremental_last_hidden"], bound)
    report.close("incremental_logits", apply(hidden, method="logits")[0], z["incremental_logits"], logits_bound)
    report.close("kv_keys", _entries(cache, cache.k), z["kv_keys"], bound)
    report.close("kv_values", _entries(cache, cache.v), z["kv_values"], bound)

    far = jnp.asarray(z["offset_embeds"])[None]
    hidden, _ = apply(far, jnp.asarray(z["offset_position_ids"])[None], method="backbone")
    report.close("offset_last_hidden", hidden[0], z["offset_last_hidden"], golden.bound("llm.offset_logits"))
    report.close("offset_logits", apply(hidden, method="logits")[0], z["offset_logits"],
                 golden.bound("llm.offset_logits", logits=True))

    keep, drop = int(z["evict_preserve"]), int(z["evict_length"])
    held = cache.slot_position
    evicted = kv_cache.reposition(
        cache, jnp.where(held < keep, held, jnp.where(held < keep + drop, -1, held - drop)), c.rope_theta)
    bound = golden.bound("llm.after_eviction_logits")
    report.close("evicted_keys", _entries(evicted, evicted.k), z["evicted_keys"], bound)
    report.close("evicted_values", _entries(evicted, evicted.v), z["evicted_values"], bound)
    next_ids = jnp.asarray(z["evict_next_ids"])[None]
    positions = kv_cache.next_positions(evicted, jnp.ones(next_ids.shape, bool))
    report.same("evict_next_position_ids", positions[0], z["evict_next_position_ids"])
    hidden, _ = apply(apply(next_ids, method="embed"), positions, None, evicted, kv_cache.free_slots(evicted, positions >= 0),
                      method="backbone")
    report.close("evict_next_logits", apply(hidden, method="logits")[0], z["evict_next_logits"],
                 golden.bound("llm.after_eviction_logits", logits=True))


def _entries(cache: kv_cache.KVCache, values: jax.Array) -> np.ndarray:
    """Held entries of row 0 in order of position, `[L, K, S, H]` as the reference keeps them."""
    order = jnp.argsort(kv_cache.ranks(cache)[0])[:int(kv_cache.length(cache)[0])]
    return np.asarray(values[:, 0])[:, :, order]


def verify_vision(golden: GoldenSet, config: VenusConfig, params: Params, report: Report) -> None:
    """Slicing and position tables exactly; pixels, tower and resampler on the recorded pictures."""
    tables, c = golden.json("vision/vision.json"), config.vision
    resolution, patch, side = tables["scale_resolution"], tables["patch_size"], tables["positions_per_side"]
    plans = [images.slice_plan(*row["size"], row["max_slice_nums"], resolution, patch) for row in tables["slicing_table"]]
    as_lists = [[[list(part) if part else None for part in plan] for plan in plans],
                [[row["grid"], row["source"], row["refine"]] for row in tables["slicing_table"]]]
    report.same("slicing_table", *(np.array([repr(row) for row in rows]) for rows in as_lists))
    flat = lambda rows: np.concatenate([np.asarray(row) for row in rows])
    report.same("position_buckets", flat(images.position_bucket(int(n), side) for n in tables["position_buckets"]),
                flat(tables["position_buckets"].values()))

    tower = _jitted(siglip2.siglip2(c), params["vision"])
    resample = _jitted(resampler.Resampler(config.resampler), params["resampler"])
    bound = golden.bound("vision.resampler_out", "vision.padded_vs_single_resampler")
    for case in tables["cases"]:
        name = case["name"]
        z = golden.arrays(f"vision/{name}.npz")
        slices = []
        for index in range(len(case["image_sizes"])):
            picture = decode.read_image(z[f"image{index}_png"].tobytes())
            slices += images.slice_image(picture, case["max_slice_nums"], resolution, patch)
        pixels = [np.asarray(image, np.int64) for image in slices]
        report.same(f"{name}.slice_sizes", [image.size for image in slices], case["slice_sizes"])
        report.same(f"{name}.slice_u8_sums", [image.sum(axis=(0, 1)) for image in pixels], z["slice_u8_sums"])
        for key in (key for key in z if key.startswith("slice") and key.endswith("_png")):
            index = int(key[len("slice"):-len("_png")])
            report.same(f"{name}.{key}", pixels[index], decode.read_image(z[key].tobytes()))
        inputs = images.patchify(slices, side, patch)
        report.same(f"{name}.tgt_sizes", inputs.grid_hw, z["tgt_sizes"])
        strip = z["pixel_values_slice0_first4patches"]  # [3, 14, 14 * patches]
        strip = strip.reshape(3, patch, -1, patch).transpose(2, 0, 1, 3)
        report.close(f"{name}.pixel_values_slice0_first4patches", inputs.patches[0, :len(strip)].reshape(strip.shape),
                     strip, golden.bound())
        sums = np.abs(inputs.patches.astype(np.float64)).sum(axis=(1, 2))
        report.close(f"{name}.pixel_values_abs_sum (relative)", sums / z["pixel_values_abs_sum"],
                     np.ones_like(sums), golden.bound())

        states = tower(inputs)
        queries = resample(states, inputs.grid_hw)
        counts = inputs.grid_hw.prod(axis=1)
        if (key := "vpm_embeddings_slice0_first256") in z:
            embedded = tower(inputs.patches[:1], inputs.position_ids[:1], method="embeddings")
            report.close(f"{name}.{key}", embedded[0, :len(z[key])], z[key], bound)
        report.close(f"{name}.vpm_out_slice0", states[0, :counts[0]], z["vpm_out_slice0"], bound)
        if (key := "vpm_out_slice1_first64") in z:
            report.close(f"{name}.{key}", states[1, :len(z[key])], z[key], bound)
        means = [jnp.abs(states[i, :count]).mean() for i, count in enumerate(counts)]
        report.close(f"{name}.vpm_out_mean_abs", means, z["vpm_out_mean_abs"], bound)
        report.close(f"{name}.resampler_out", queries, z["resampler_out"], bound)


def verify_audio(golden: GoldenSet, config: VenusConfig, params: Params, report: Report) -> None:
    """Mel, whole clips with both masks and in a batch, and the stream with its cache, drop and slide."""
    info, filters = golden.json("audio/audio.json"), golden.arrays("audio/mel_filters.npz")
    report.close("mel_filters", mel.mel_filters(), filters["mel_filters"], golden.bound())
    report.close("hann", mel.hann_window(), filters["hann"], golden.bound())
    for row in info["placeholder_counts"]:
        for key, streamed in (("plain", False), ("chunked", True)):
            text = tokens.audio_placeholder(row["samples"], streamed, config.audio.pool_step)
            counts = [text.count("<unk>"), text.count("<|audio_start|>")]
            report.same(f"placeholder_counts.{row['samples']}.{key}", counts,
                        [row[key], row["chunks"] if streamed else 1])
    _verify_clips(golden, config, params, report)
    _verify_stream(golden, config, params, report)


def _verify_clips(golden, config, params, report):
    z, apply = golden.arrays("audio/clip.npz"), _jitted(frontend.Frontend(config), params)
    bound = golden.bound("audio.clip_embeds")
    clips = [z[key].astype(np.float32) / 32768 for key in ("wave_i16", "wave2_i16")]
    mels = [mel.clip_log_mel(clip) for clip in clips]
    report.close("clip.mel", mels[0], z["mel"], bound)
    report.close("clip.batch_mel_1", np.pad(mels[1], ((0, 0), (0, mels[0].shape[1] - mels[1].shape[1]))),
                 z["batch_mel_1"], bound)
    lengths = [m.shape[1] for m in mels]
    report.same("clip.lens", lengths[:1], z["lens"])
    report.same("clip.batch_lens", lengths, z["batch_lens"])

    x, n = jnp.asarray(mels[0].T)[None], jnp.array(lengths[:1])
    count = whisper.num_embeddings(lengths[0], config.audio.pool_step)
    report.close("clip.embeds_full", apply(x, n, method="encode_clips", chunked=False)[0, :count], z["embeds_full"], bound)
    report.close("clip.embeds_chunk1s", apply(x, n, method="encode_clips")[0, :count], z["embeds_chunk1s"], bound)
    encoder = _jitted(whisper.whisper(config.audio, keep_layers=True), params["audio"])
    hidden, blocks = encoder(x, n)
    first = encoder(x, method="convolve")
    first += params["audio"]["position_embed"]["embedding"][:first.shape[1]]
    report.close("clip.encoder_layers_full", jnp.concatenate([first[None], blocks[:-1], hidden[None]])[:, 0],
                 z["encoder_layers_full"], bound)
    report.close("clip.projected_full", _project(config, params, hidden)[0], z["projected_full"], bound)

    longest = max(lengths)
    batch = jnp.stack([jnp.pad(jnp.asarray(m.T), ((0, longest - m.shape[1]), (0, 0))) for m in mels])
    embeds = apply(batch, jnp.array(lengths), method="encode_clips", reference_quirks=True)
    for i in range(len(mels)):
        recorded = z[f"batch_embeds_{i}"]
        report.close(f"clip.batch_embeds_{i}", embeds[i, :len(recorded)], recorded, bound)


def _project(config, params, hidden):
    module = layers.Projector(config.llm.hidden_size, hidden.dtype)
    return module.apply({"params": params["audio_projection"]}, hidden)


def _verify_stream(golden, config, params, report):
    info, z = golden.json("audio/audio.json"), golden.arrays("audio/streaming.npz")
    speech = golden.arrays("audio/speech.npz")["wave_i16"].astype(np.float32) / 32768
    second = lambda k: speech[k * mel.UNIT_SAMPLES:(k + 1) * mel.UNIT_SAMPLES]
    bound = golden.bound("audio.stream_embeds")

    encoder = _jitted(whisper.whisper(config.audio), params["audio"])
    apply = _jitted(frontend.Frontend(config), params)
    host, state = mel.StreamingMel(), mel_jax.init_mel_state(1)
    step = jax.jit(mel_jax.stream_log_mel)
    cache = whisper.empty_cache(config.audio, 1)
    for k, unit in enumerate(info["streaming"]):
        frames = host.push(second(k))
        _same_processor(report, f"streaming.{k}", host, frames, unit)
        report.close(f"streaming.mel{k}", frames, z[f"mel{k}"], bound)
        state, streamed, _ = step(state, jnp.asarray(second(k))[None], jnp.array([True]), jnp.array([False]))
        report.close(f"streaming.mel{k} (in the step)", streamed[0, streamed.shape[1] - frames.shape[1]:].T, z[f"mel{k}"],
                     bound)
        first, valid = jnp.array([k == 0]), jnp.array([True])
        before = cache
        embeds, cache = apply(streamed, first, valid, before, method="encode_stream")
        hidden, _ = encoder(streamed, first, valid, before, method="stream")
        report.close(f"streaming.embeds{k}", embeds[0], z[f"embeds{k}"], bound)
        report.same(f"streaming.{k}.kv_len", kv_cache.length(cache)[0], unit["kv_len"])
        if f"encoder{k}" in z:
            report.close(f"streaming.encoder{k}", hidden[0], z[f"encoder{k}"], bound)
        if f"cnn{k}" in z:
            before_start = first[:, None] & (jnp.arange(streamed.shape[1]) < whisper.CONTEXT_FRAMES)
            convolved = encoder(streamed, before_start, method="convolve")
            report.close(f"streaming.cnn{k}", convolved[0, 1:-1], z[f"cnn{k}"], bound)
        if f"projected{k}" in z:
            report.close(f"streaming.projected{k}", _project(config, params, hidden)[0], z[f"projected{k}"], bound)
        if (key := f"kv_key0_last2_{k}") in z:
            report.close(f"streaming.{key}", _entries(cache, cache.k)[0, :, -2:], z[key], bound)

    for name, redundancy, rows in (("streaming_mel_long", mel.REDUNDANCY, info["streaming_long"]),
                                   ("streaming_mel_noredundancy", 0, info["noredundancy"])):
        z, host = golden.arrays(f"audio/{name}.npz"), mel.StreamingMel(redundancy)
        for k, unit in enumerate(rows):
            frames = host.push(second(k))
            _same_processor(report, f"{name}.{k}", host, frames, unit)
            if f"mel{k}" in z:
                report.close(f"{name}.mel{k}", frames, z[f"mel{k}"], bound)


def _same_processor(report, name, host, frames, unit):
    info = unit["info"]
    ours = [frames.shape[1], host.base_frame, len(host.buffer), host.base_frame * FRAME_HOP, host.units]
    recorded = [unit["emitted"], info["base_T"], info["buffer_len_samples"], info["left_samples_dropped"],
                info["chunk_number"]]
    if "left" in unit:
        ours, recorded = [*ours, len(host.pending)], [*recorded, unit["left"]]
    report.same(f"{name}.processor", ours, recorded)


def verify_tts(golden: GoldenSet, config: VenusConfig, params: Params, report: Report) -> None:
    """Duplex chunks with a continuing cache, end codes, the half-duplex stream in four kinds, and score processors."""
    info, z = golden.json("tts/tts.json"), golden.arrays("tts/talker.npz")
    c, params = config.talker, params["talker"]
    report.same("special ids", [c.eos_token, c.audio_bos_token_id, c.text_eos_token_id],
                [info[key] for key in ("eos_token", "audio_bos_token_id", "text_eos_token_id")])
    longest = max([array.shape[0] for key, array in z.items() if key.endswith("llm_ids")]) + 1
    generate = jax.jit(talker_decode.generate_chunk, static_argnames=("config", "keep_scores"))
    base = talker_decode.Draw(temperature=info["temperature"], penalty=info["repetition_penalty"], greedy=True)

    def speak(index, start, cache, draw):
        ids, hidden = z[f"c{index}.llm_ids"], z[f"c{index}.llm_hidden"]
        ids, hidden = (np.pad(x, [(0, longest - len(x))] + [(0, 0)] * (x.ndim - 1))[None] for x in (ids, hidden))
        return generate(params, c, ids, hidden, jnp.array([len(z[f"c{index}.llm_ids"])]), start, cache,
                        jax.random.key(0)[None], draw, keep_scores=True)

    slots = sum(row["n_cond"] + talker_decode.CHUNK_CODES for row in info["talker"] if "n_cond" in row)
    fresh = lambda: (jnp.array([0]), talker.empty_cache(c, 1, slots))
    start, cache = fresh()
    model = _jitted(talker.talker(c), params)
    bos = model(jnp.array([[c.audio_bos_token_id]]), method="embed_text")
    for i, row in enumerate(row for row in info["talker"] if "case" not in row):
        ids, hidden = (jnp.asarray(z[f"c{i}.{key}"])[None] for key in ("llm_ids", "llm_hidden"))
        condition = jnp.concatenate([model(ids, hidden, method="condition"), bos], axis=1)
        report.close(f"c{i}.condition", condition[0], z[f"c{i}.condition"], golden.bound("tts.condition"))
        report.same(f"c{i}.text_start_pos", start[0], row["text_start_pos"])
        codes, count, start, cache, raw = speak(i, start, cache, base._replace(min_new=row["min_new"]))
        report.same(f"c{i}.tokens", codes[0, :int(count[0])], z[f"c{i}.tokens"])
        sampled = int(raw.drawn[0])
        report.same(f"c{i}.sampled_steps, last, kv_len", [sampled, raw.tokens[0, sampled - 1], kv_cache.length(cache)[0]],
                    [row["sampled_steps"], row["last_sampled_dropped"], row["kv_len"]])
        report.close(f"c{i}.head_logits", raw.scores[0, :sampled], z[f"c{i}.head_logits"],
                     golden.bound("tts.raw_logits", logits=True))
        for key, step in (("probs_first", 0), ("probs_last", sampled - 1)):
            report.close(f"c{i}.{key}", _probabilities(raw, step, base._replace(min_new=row["min_new"]), c),
                         z[f"c{i}.{key}"], golden.bound("tts.raw_logits"))
    report.close("kv_keys", _entries(cache, cache.k), z["kv_keys"], golden.bound("tts.raw_logits"))
    report.close("kv_values", _entries(cache, cache.v), z["kv_values"], golden.bound("tts.raw_logits"))

    for row in (row for row in info["talker"] if "case" in row):
        start, cache = fresh()
        lengths, returned = [], []
        for j, index in enumerate(row["chunks"]):
            draw = base._replace(min_new=row["min_new"][j], end_bias=row["eos_bias"])
            codes, count, start, cache, _ = speak(index, start, cache, draw)
            report.same(f"{row['case']}.c{j}.tokens", codes[0, :int(count[0])], z[f"{row['case']}.c{j}.tokens"])
            lengths.append(int(kv_cache.length(cache)[0]))
            returned.append(int(count[0]))
        report.same(f"{row['case']}.returned, kv_len", [returned, lengths], [row["returned"], row["kv_len"]])
    _verify_half_duplex(golden, c, params, info, report)
    _verify_processors(golden, info, report)


def _probabilities(raw, step, draw, c):
    """The distribution a greedy duplex draw looked at, rebuilt from raw scores and the codes before it."""
    before = raw.tokens[:, max(0, step - talker_decode.PENALTY_WINDOW):step]
    scores = raw.scores[:, step] / draw.temperature
    if step:
        counts = logits.count_tokens(before, before >= 0, c.num_audio_tokens)
        scores = logits.frequency_penalty(scores, counts, draw.penalty)
    if step < draw.min_new:
        scores = scores.at[:, c.eos_token].set(-jnp.inf)
    return jax.nn.softmax(scores, axis=-1)[0]


def _verify_half_duplex(golden, c, params, info, report):
    z = golden.arrays("tts/streaming_generator.npz")
    for row in info["streaming_generator"]:
        kind = row["attention_type"]
        speech = talker_decode.HalfDuplexSpeech(
            params, dataclasses.replace(c, attention_type=kind, window_size=row["token_window_size"]), jax.random.key(0),
            talker_decode.Draw(info["temperature"], info["repetition_penalty"], top_p=0.85, top_k=25, greedy=True),
            max_new=row["max_new_token"], block=row["chunk_size"], reference_quirks=True)
        for i, call in enumerate(row["calls"]):
            blocks = speech.push(jnp.asarray(z[f"cond{i}"]), last=i == len(row["calls"]) - 1)
            report.same(f"{kind}.{i}.yielded", sum(blocks, []), sum((block for block, _ in call["yielded"]), []))
            report.same(f"{kind}.{i}.blocks", [len(block) for block in blocks], [len(b) for b, _ in call["yielded"]])
            state = [speech.position, kv_cache.length(speech.cache)[0], len(speech.codes) - speech.handed_out]
            report.same(f"{kind}.{i}.text_start_pos, kv_len, buffer", state,
                        [call["text_start_pos"], call["kv_len"], call["buffer"]])
        report.same(f"{kind}.all_tokens", speech.codes, row["all_tokens"])
        report.close(f"{kind}.final_keys", _entries(speech.cache, speech.cache.k), z[f"{kind}.final_keys"],
                     golden.bound("tts.raw_logits"))


def _verify_processors(golden, info, report):
    z = golden.arrays("tts/processors.npz")
    for row in info["processors"]:
        name = row["case"]
        scores = jnp.asarray(z[f"{name}.scores"])[None]
        if "penalty" in row:
            history = jnp.asarray(z[f"{name}.history"][-row["window"]:])[None]
            counts = logits.count_tokens(history, history >= 0, scores.shape[1])
            outs = {"out": logits.frequency_penalty(scores, counts, row["penalty"])}
        elif "min_tokens_to_keep" in row:
            keep = row["min_tokens_to_keep"]
            k = max(row["top_k"], keep)
            cut = logits.keep_top_p(scores, row["top_p"], keep)
            outs = {"top_p": cut, "top_k": logits.keep_top_k(scores, k), "p_then_k": logits.keep_top_k(cut, k)}
        else:  # 0 switches a cut off
            cut = logits.keep_top_k(scores, row["top_k"]) if row["top_k"] else scores
            outs = {"out": logits.keep_top_p(cut, row["top_p"]) if row["top_p"] else cut}
        for key, ours in outs.items():
            recorded = z[f"{name}.{key}"]
            recorded = np.where(recorded <= np.finfo(np.float32).min, -np.inf, recorded)
            report.close(f"{name}.{key}", ours[0], recorded, golden.bound("tts.raw_logits"))


PARTS: dict[str, Runner] = {
    "llm": verify_llm, "vision": verify_vision, "audio": verify_audio, "tts": verify_tts}

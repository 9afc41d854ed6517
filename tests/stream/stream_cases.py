"""What the tests of the live stream share: a small model, random sessions, scripted sessions, and slow oracles."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from tests.models import tiny
from venus_jax import config as config_lib
from venus_jax.media import images
from venus_jax.media.mel import StreamingMel
from venus_jax.models.frontend import Frontend
from venus_jax.nn.kv_cache import KVCache
from venus_jax.stream import inputs as packing
from venus_jax.stream import sampling
from venus_jax.stream.inputs import Bucket, Row
from venus_jax.stream.kv_cache import Window
from venus_jax.stream.prompt import make_prompt
from venus_jax.stream.state import StreamConfig, init_state
from venus_jax.stream.transition import prefill, transition
from venus_jax.stream.unit import Layout, Output, Unit
from venus_jax.stream.vocabulary import vocabulary
from venus_jax.tokens import load_tokenizer

SECOND = 16_000
TOKENIZER = load_tokenizer(Path(__file__).parents[1] / "golden" / "checkpoint")
C, ROWS = TOKENIZER.control, TOKENIZER.vocab_size
CONFIG = config_lib.VenusConfig(
    name="stream",
    llm=config_lib.LLMConfig(vocab_size=ROWS, hidden_size=128, intermediate_size=48, num_layers=2, num_heads=4,
                             num_kv_heads=2, head_dim=16),
    vision=config_lib.VisionConfig(hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2, image_size=70),
    resampler=config_lib.ResamplerConfig(num_queries=3, hidden_size=128, kv_dim=16),
    audio=config_lib.AudioConfig(hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2, max_positions=160),
    talker=config_lib.TalkerConfig(hidden_size=24, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1,
                                   num_audio_tokens=40, num_text_tokens=ROWS, audio_bos_token_id=365,
                                   text_eos_token_id=368, unused_vocab_size=9, max_positions=512),
    image=config_lib.ImageConfig(scale_resolution=28, max_slice_nums=2))
HEARING = CONFIG.replace(name="hearing", vision=None, resampler=None)  # neither sees
SILENT = HEARING.replace(name="silent", talker=None)  # nor speaks

# The compiler's optimisations take longer than all steps of all tests.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
STEP = jax.jit(transition, static_argnames="config", compiler_options=QUICK)
PREFILL = jax.jit(prefill, static_argnames="config", compiler_options=QUICK)
WORDS = [TOKENIZER.encode(letter)[0] for letter in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"]


@functools.cache
def tables(reference_quirks: bool = False):
    return vocabulary(TOKENIZER, ROWS, reference_quirks)


@functools.cache
def lively_params(config: config_lib.VenusConfig = CONFIG, seed: int = 0):
    """Random parameters whose control tokens score high: they listen, speak, delegate, and end chunks and turns."""
    params = tiny.random_params(config, seed)
    louder = np.ones(ROWS, np.float32)
    for name, factor in dict(listen=2.5, speak=2.8, chunk_eos=2.6, turn_eos=2.2, delegate_start=3.4, delegate_end=2.5,
                             tts_bos=1.5, chunk_tts_eos=1.3).items():
        louder[getattr(C, name)] = factor
    params["llm"]["lm_head"]["kernel"] *= louder
    return params


def on_host(array: Any) -> Any:
    """A tree on the host."""
    return jax.tree.map(np.asarray, array)


# --- scripted sessions ----------------------------------------------------------------------------------------------
class Said(NamedTuple):
    """One row's `UnitOutputs`, cut to what counts."""

    tokens: list[int]
    text: list[int]
    delegate: list[int]
    codes: list[int]
    terminator: int
    is_listen: bool
    end_of_turn: bool
    turn_open: bool
    flush: bool
    full: bool
    unit: int
    kv_length: int


def said(out, row: int = 0) -> Said:
    """Row `row` of outputs; what lies beyond a count is -1 and is cut off."""
    lists = {}
    for name, count in (("tokens", "token_count"), ("text", "text_count"), ("delegate", "delegate_count"),
                        ("codes", "code_count")):
        whole, n = np.asarray(getattr(out, name)[row]), int(getattr(out, count)[row])
        assert (whole[n:] == -1).all() and (whole[:n] >= 0).all(), (name, whole, n)
        lists[name] = whole[:n].tolist()
    rest = {name: np.asarray(getattr(out, name)[row]).item() for name in Said._fields if name not in lists}
    return Said(**lists, **rest)


class Scripted:
    """A session of one row that says what it is told, unit by unit.

    Embeddings are one-hot and the blocks add nothing, so that a state is the last token. The head of a unit makes each
    token of a run the likeliest after the one before it; the first run begins after the unit's input.
    """

    SOUND = 0  # the dimension that every embedding of sound is

    def __init__(self, reference_quirks: bool = False, config: config_lib.VenusConfig = HEARING, seconds=None,
                 unit_seconds: float = 1.0, slots: int = 512, max_unit_tokens: int = 12, talker_slots: int = 96,
                 window: Window = Window(), **settings):
        self.config = StreamConfig(config, C, unit_seconds=unit_seconds, slots=slots, talker_slots=talker_slots,
                                   max_unit_tokens=max_unit_tokens, reference_quirks=reference_quirks, window=window,
                                   speak=config.talker is not None)
        self.state = init_state(self.config, 1)
        vocabulary = tables(reference_quirks)
        if seconds is not None:  # how long a word takes
            vocabulary = vocabulary._replace(seconds=jnp.zeros(ROWS).at[jnp.array(list(seconds))].set(
                jnp.array(list(seconds.values()))))
        self.vocabulary = vocabulary
        self.settings = dict(greedy=True, voice_greedy=True, repetition_penalty=1.0, length_penalty=1.0,
                             follow_clock=seconds is not None) | settings
        self.params = _one_hot(config)

    def __call__(self, *runs, text=(), background=(), beside=None, seed=0, **feedback) -> Said:
        """One unit. Every run is a list of tokens, the first of all follows the input.

        `beside`: scores of other tokens behind the sound, where that of the run is 1.
        """
        start = C.backend_end if background else text[-1] if text else None
        follows = np.zeros((128, ROWS), np.float32)
        for n, run in enumerate(runs):
            run = [start, *run] if n == 0 else run
            for a, b in zip(run, run[1:]):
                place = follows[self.SOUND if a is None else _dimension()[a]]
                assert not place.any() or place[b], "a token is followed by the same token all through a unit"
                place[b] = 1
        for token, score in (beside or {}).items():
            follows[self.SOUND, token] = score
        kernel = jnp.asarray(follows)
        given = self.params | {"llm": self.params["llm"] | {"lm_head": {"kernel": kernel}}}
        sound = 0.1 * np.random.default_rng(seed).standard_normal(self.config.unit_samples).astype(np.float32)
        row = Row(sound, (), tuple(text), tuple(background), **feedback)
        packed = packing.pack(self.config, Bucket(0, 6), [row])
        controls = sampling.controls(1, self.vocabulary, **self.settings)
        self.state, out = STEP(given, self.config, self.state, *packed, controls)
        return said(out)

    def join(self, prefix, suffix) -> None:
        """Begins a new session with this prompt."""
        prompt = make_prompt(self.config, [True], prefix, None, suffix, [0])
        self.state = PREFILL(self.params, self.config, self.state, prompt)

    @property
    def talker_start(self) -> int:
        return int(self.state.talker_start[0])


@functools.cache
def _dimension() -> dict[int, int]:
    control = {getattr(C, name): n for n, name in enumerate(C.__dataclass_fields__, 1)}
    return control | {word: n for n, word in enumerate(WORDS, len(control) + 1)}


@functools.cache
def _one_hot(config):
    params = tiny.random_params(config)
    llm = params["llm"]
    zero = lambda x: jnp.zeros_like(x)
    llm["layers"]["attn"]["o_proj"]["kernel"] = zero(llm["layers"]["attn"]["o_proj"]["kernel"])
    llm["layers"]["mlp"]["down_proj"]["kernel"] = zero(llm["layers"]["mlp"]["down_proj"]["kernel"])
    llm["norm"]["scale"] = jnp.ones_like(llm["norm"]["scale"])
    table = np.zeros((ROWS, config.llm.hidden_size), np.float32)
    for token, dimension in _dimension().items():
        table[token, dimension] = 1
    llm["embed"]["embedding"] = jnp.asarray(table)
    last = params["audio_projection"]["linear2"]
    last["kernel"], last["bias"] = zero(last["kernel"]), jnp.eye(config.llm.hidden_size)[Scripted.SOUND]
    if config.talker is not None:  # it never ends by itself
        scale = params["talker"]["head_code"]["scale"]
        params["talker"]["head_code"]["scale"] = scale.at[config.talker.eos_token].set(0)
    return params


# --- random sessions ------------------------------------------------------------------------------------------------
MAIN = StreamConfig(CONFIG, C, window=Window("error"), slots=480, talker_slots=96, max_unit_tokens=8, trace=True)
BUCKET = Bucket(2, 8)


class Tick(NamedTuple):
    """One unit of all rows: who joins before it, what each brings (None: it takes no part), and its settings."""

    joins: dict[int, tuple]  # row -> (prefix, voice, suffix, seed)
    rows: list[Row | None]
    settings: list[dict[str, Any]]


def random_ticks(rng: np.random.Generator, batch: int, count: int) -> list[Tick]:
    """A wild session: rows come and go, are forced, stopped, typed and replied to, see, and change their settings."""
    ticks, present = [], [False] * batch
    for k in range(count):
        joins = {}
        for i in range(batch):
            if rng.random() < (0.06 if present[i] else 0.3) or k == count // 2 and not present[i]:
                joins[i] = random_prompt(rng)
                present[i] = True
        rows = [random_row(rng) if present[i] and rng.random() < 0.85 else None for i in range(batch)]
        ticks.append(Tick(joins, rows, [random_settings(rng) for _ in range(batch)]))
    return ticks


def random_prompt(rng):
    voice = rng.standard_normal((int(rng.integers(1, 12)), CONFIG.llm.hidden_size)).astype(np.float32)
    words = rng.choice(WORDS, int(rng.integers(1, 20))).tolist()
    return [C.im_start, *words, C.audio_start], voice, [C.audio_end, C.im_end], int(rng.integers(1 << 31))


def random_row(rng) -> Row:
    chance = lambda p: rng.random() < p
    words = lambda most: tuple(rng.choice(WORDS, int(rng.integers(1, most))).tolist())
    samples = (0.1 * rng.standard_normal(SECOND)).astype(np.float32) if chance(0.9) else None
    pictures = ()
    if chance(0.3):
        size = (int(rng.integers(20, 60)), int(rng.integers(20, 60)))
        picture = rng.integers(0, 256, (*size, 3), np.uint8)
        pictures = (tuple(images.slice_image(picture, 1, CONFIG.image.scale_resolution)),)
        if chance(0.5):
            pictures *= 2
    text = words(8) if chance(0.2) or samples is None and not pictures else ()
    return Row(samples, pictures, text, words(6) if chance(0.15) else (), chance(0.08), chance(0.05),
               float(rng.uniform(0, 3)) if chance(0.3) else -1.0)


def random_settings(rng) -> dict[str, Any]:
    pick = lambda *values: rng.choice(np.array(values)).item()
    return dict(greedy=pick(True, False), temperature=pick(0.5, 1.0), top_k=pick(0, 5, 20), top_p=pick(0.8, 1.0),
                listen_scale=pick(0.5, 1.0, 2.0), listen_top_k=pick(0, 0, 1), repetition_penalty=pick(1.0, 1.2),
                repetition_window=pick(4, 512), length_penalty=pick(0.9, 1.1), max_tokens=pick(1, 4, 7, 9),
                max_delegate=pick(1, 3, 9), max_chars=pick(0, 0, 4), follow_clock=pick(True, False),
                voice_greedy=pick(True, False), voice_temperature=pick(0.8, 1.2), voice_penalty=pick(1.0, 1.05))


def run_ticks(ticks: list[Tick], rows: list[int], change=lambda state, packed: (state, packed),
              bucket: Bucket = BUCKET):
    """Runs these rows of a random session as a batch; yields per unit (state before, packed, state after, outputs).

    `change` may spoil state and input before a step. Units in which none of the rows takes part are left out for a
    single row, and yield None.
    """
    params, batch = lively_params(), len(rows)
    state = init_state(MAIN, batch)
    for tick in ticks:
        for row, (prefix, voice, suffix, seed) in tick.joins.items():
            if row in rows:
                prompt = make_prompt(MAIN, [r == row for r in rows], prefix, voice, suffix, [seed] * batch)
                state = PREFILL(params, MAIN, state, prompt)
        given = [tick.rows[row] for row in rows]
        if batch == 1 and given == [None]:
            yield None
            continue
        settings = {name: [tick.settings[row][name] for row in rows] for name in tick.settings[0]}
        controls = sampling.controls(batch, tables(), **settings)
        before, packed = change(state, packing.pack(MAIN, bucket, given))
        state, out = STEP(params, MAIN, before, *packed, controls)
        yield before, packed, state, on_host(out)


CACHES = ("llm", "audio", "talker")


def row_of(state, row: int):
    """One row of a state on the host, with zeros wherever nothing is held."""
    def cache(c):
        held = np.asarray(c.slot_position[row]) >= 0
        cut = lambda a: np.where(held[:, None], np.asarray(a[:, row]), 0)
        return KVCache(cut(c.k), cut(c.v), np.asarray(c.slot_position[row]), np.asarray(c.next_position[row]))

    caches = {name: cache(getattr(state, name)) for name in CACHES}
    held = caches["llm"].slot_position >= 0
    rest = jax.tree.map(lambda a: np.asarray(a[row]), state._replace(**dict.fromkeys(CACHES)))
    pending = np.where(np.arange(len(rest.pending)) < rest.pending_count, rest.pending, -1)
    entries = jax.tree.map(lambda a: np.where(held, a, -2), rest.entries)
    return rest._replace(**caches, pending=pending, entries=entries)


def assert_same_row(one, other, tolerance: float = 0):
    """Two rows of states: equal, floats as close as said."""
    def same(path, a, b):
        if a.dtype.kind == "f":
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance, err_msg=jax.tree_util.keystr(path))
        else:
            np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))

    jax.tree.map_with_path(same, one, other)


def assert_untouched(before, after, row: int):
    """Every array of a row is as it was, unheld places of caches included."""
    def same(path, a, b):
        cached = path[-1].name in ("k", "v")
        a, b = (np.asarray(x[:, row] if cached else x[row]) for x in (a, b))
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))

    jax.tree.map_with_path(same, before, after)


# --- slow oracles ---------------------------------------------------------------------------------------------------
@dataclasses.dataclass
class Session:
    """What one row did from its join to its end. `fed`: ids as they went in; `decisions`: (place, scores there)."""

    prompt: Layout
    voice: np.ndarray
    fed: list[int]
    pending: list[int] = dataclasses.field(default_factory=list)
    units: list[Unit] = dataclasses.field(default_factory=list)
    sounds: list[np.ndarray] = dataclasses.field(default_factory=list)
    slices: list[Image.Image] = dataclasses.field(default_factory=list)
    decisions: list[tuple[int, np.ndarray]] = dataclasses.field(default_factory=list)


def sessions_of(ticks, record, row: int) -> list[Session]:
    """The sessions of one row of a recorded run, from the arrays that every step took and gave."""
    grammar, sessions = packing.grammar(MAIN), []
    for tick, step in zip(ticks, record):
        if row in tick.joins:
            prefix, voice, suffix, _ = tick.joins[row]
            layout = grammar.prompt(prefix, len(voice), suffix)
            sessions.append(Session(layout, voice, layout.ids.tolist()))
        if step is None or not step[-1].active[row]:
            continue
        before, (inputs, background, _), after, out = step
        at = lambda array, count: np.asarray(array[row])[:int(count[row])].tolist()
        session, given, words = sessions[-1], tick.rows[row], at(out.tokens, out.token_count)
        ids, index = at(inputs.ids, inputs.count), at(inputs.media_index, inputs.count)
        session.fed += at(before.pending, before.pending_count)
        session.fed += [i if m < 0 else C.unk for i, m in zip(ids, index)] + at(background.ids, background.count)
        session.decisions += [(len(session.fed) - 1 + j, out.trace.logits[row, j]) for j in range(len(words) + 1)]
        session.fed += words
        session.pending = at(after.pending, after.pending_count)
        closing = [C.turn_eos] * bool(out.forced_turn_end[row])
        session.units.append(Unit(tuple(given.slices), given.samples is not None, given.text, given.background,
                                  Output((*words, *closing), int(out.terminator[row]))))
        session.sounds += [given.samples] if given.samples is not None else []
        session.slices += [s for picture in given.pictures for s in picture]
    return sessions


LONGEST, MOST_MEDIA, MOST_SOUNDS = 512, 512, 36


@functools.partial(jax.jit, compiler_options=QUICK)
def _heard(params, mel):
    """Sound embeddings of a whole session at once: as clips of the tower's three units, each unit a chunk."""
    def method(module, mel):
        states = module.audio.convolve(mel[None])[0]
        groups = states[:MOST_SOUNDS * 50].reshape(-1, 150, states.shape[-1])
        place = jnp.arange(150)
        mask = (place[None] // 50 <= place[:, None] // 50)[None, None]
        hidden, _, _ = module.audio.run(groups + module.audio.position_embed(place), mask)
        return module._project(hidden.reshape(1, -1, hidden.shape[-1]))[0]

    return Frontend(CONFIG).apply({"params": params}, mel, method=method)


@functools.partial(jax.jit, compiler_options=QUICK)
def _seen(params, pictures):
    return Frontend(CONFIG).apply({"params": params}, pictures, method="encode_images")


@functools.partial(jax.jit, compiler_options=QUICK)
def _scores(params, ids, media, index):
    def method(module, ids, media, index):
        x = module.embed(ids[None], media[None], index[None])
        return module.logits(module.backbone(x, jnp.arange(len(ids))[None])[0])[0]

    return Frontend(CONFIG).apply({"params": params}, ids, media, index, method=method)


def recomputed_scores(session: Session) -> np.ndarray:
    """Scores at every place of a session that is laid out as training data and read in one pass without any cache."""
    params, layout = lively_params(), packing.grammar(MAIN).session(session.prompt, session.units)
    stream, frames = StreamingMel(), []
    for k, sound in enumerate(session.sounds):
        unit = stream.push(sound).T
        frames.append(unit[:100] if k == 0 else unit[2:102])
    mel = np.concatenate([*frames, unit[-2:]]) if frames else np.zeros((0, 80), np.float32)
    mel = np.pad(mel, ((0, MOST_SOUNDS * 100 + 2 - len(mel)), (0, 0)))
    sounds = np.asarray(_heard(params, mel))[:10 * len(session.sounds)]
    vision = CONFIG.vision
    patches = [images.patchify([s], vision.positions_per_side, vision.patch_size, 9) for s in session.slices]
    pictures = [np.asarray(_seen(params, p))[0] for p in patches]
    media = np.concatenate([*pictures, session.voice, sounds])
    media = np.pad(media, ((0, MOST_MEDIA - len(media)), (0, 0)))
    pad = lambda a, fill: np.pad(a, (0, LONGEST - len(a)), constant_values=fill)
    index = layout.media_index(len(pictures) * CONFIG.resampler.num_queries)
    return np.asarray(_scores(params, pad(layout.ids, 0), media, pad(index, -1)))


def explicit_scores(params, config, x: np.ndarray, sights: list[tuple[list[int], list[int]]]) -> np.ndarray:
    """The backbone written out in float64: entry i sees the places `sights[i][0]` at the distances `sights[i][1]`."""
    llm = jax.tree.map(lambda a: np.asarray(a, np.float64), params["llm"])
    count, group = len(x), config.num_heads // config.num_kv_heads
    seen, distance = np.zeros((count, count), bool), np.zeros((count, count))
    for i, (places, distances) in enumerate(sights):
        seen[i, places], distance[i, places] = True, distances
    frequency = config.rope_theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    turn = np.exp(1j * distance[..., None] * frequency)  # [T, T, H/2]
    norm = lambda x, scale: x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_eps) * scale
    paired = lambda x: x[..., :config.head_dim // 2] + 1j * x[..., config.head_dim // 2:]
    x = np.asarray(x, np.float64)
    for n in range(config.num_layers):
        layer = jax.tree.map(lambda a: a[n], llm["layers"])
        attn, y = layer["attn"], norm(x, layer["attn_norm"]["scale"])
        q, k, v = ((y @ attn[f"{name}_proj"]["kernel"]).reshape(count, -1, config.head_dim) for name in "qkv")
        q, k = paired(norm(q, attn["q_norm"]["scale"])), paired(norm(k, attn["k_norm"]["scale"]))
        mixed = []
        for head in range(config.num_heads):
            scores = np.einsum("ih,jh,ijh->ij", q[:, head], k[:, head // group].conj(), turn, optimize=True).real
            scores = np.where(seen, scores / np.sqrt(config.head_dim), -np.inf)
            weights = np.exp(scores - scores.max(1, keepdims=True))
            mixed.append(weights / weights.sum(1, keepdims=True) @ v[:, head // group])
        x = x + np.concatenate(mixed, 1) @ attn["o_proj"]["kernel"]
        y, mlp = norm(x, layer["mlp_norm"]["scale"]), layer["mlp"]
        gate = y @ mlp["gate_proj"]["kernel"]
        x = x + (gate / (1 + np.exp(-gate)) * (y @ mlp["up_proj"]["kernel"])) @ mlp["down_proj"]["kernel"]
    return norm(x, llm["norm"]["scale"]) @ llm["lm_head"]["kernel"]

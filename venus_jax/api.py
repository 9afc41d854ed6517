"""The front door: load a checkpoint, talk with it.

    import venus_jax.api as api

    venus = api.load("omni_9b")                      # a checkpoint directory of either kind
    session = venus.duplex(prompt="Streaming Omni Conversation.")
    for second in seconds:                           # float32 [16000]
        unit = session.step(audio=second)
        print(unit.unit, unit.state, unit.text)
    venus.chat([{"role": "user", "content": "Hello"}])
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import functools
import math
import os
import signal
import threading
import time
import warnings
from typing import Any, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from venus_jax import sharding
from venus_jax.checkpoints import convert, store
from venus_jax.config import VenusConfig
from venus_jax.errors import CapacityError, CheckpointError, ConfigError, MediaError
from venus_jax.media import images
from venus_jax.nn.layers import separate_layers
from venus_jax.stream import inputs as packing
from venus_jax.stream import sampling
from venus_jax.stream.chat import ChatReply, chat
from venus_jax.stream.inputs import Bucket, Row
from venus_jax.stream.kv_cache import Window
from venus_jax.stream.prompt import encode_voice, make_prompt, prompt_ids
from venus_jax.stream.state import PENDING, StreamConfig, UnitOutputs, init_state, state_specs
from venus_jax.stream.transition import prefill, room_needed, transition
from venus_jax.stream.vocabulary import vocabulary
from venus_jax.tokens import Tokenizer, load_tokenizer
from venus_jax.typing import Params

SEPARATE_LAYERS = 16  # models of up to so many layers run on a CPU with their layers apart: quicker, but slower to compile
DEFAULT_PROMPT = "Streaming Omni Conversation."


class LateCompileWarning(UserWarning):
    """A shape was met that nothing was compiled for: the session waited for the compiler."""


@dataclasses.dataclass(frozen=True)
class Unit:
    """What one session did in one unit.

    Attributes:
      unit: its number, from 0.
      state: "listen" or "speak".
      text: foreground text of this unit.
      delegate: request to the harness that was completed in this unit, "" if none; several are joined by line ends.
      codes: speech codes, int32, 25 for a second of sound; empty when silent.
      tokens, terminator: everything said, as ids.
      end_of_turn: a turn ended in this unit.
      flush: the floor was lost: drop sound that is queued and not yet heard.
      kv_length: entries the backbone's cache holds.
      seconds: how long the step took, transfers included.
    """

    unit: int
    state: str
    text: str
    delegate: str
    codes: np.ndarray
    tokens: tuple[int, ...]
    terminator: int
    end_of_turn: bool
    flush: bool
    kv_length: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Venus:
    """A loaded model."""

    config: VenusConfig
    params: Params
    tokenizer: Tokenizer
    mesh: Any = None

    def duplex(self, batch: int = 1, prompt: str = DEFAULT_PROMPT, voice: np.ndarray | None = None, seed: int = 0,
               buckets: Sequence[Bucket] | None = None, precompile: bool = True, force_listen_units: int = 0,
               window: Window | str = Window(), settings: dict[str, Any] | None = None, **options) -> Session:
        """Full-duplex sessions that step together.

        Args:
          batch: sessions.
          prompt: text of the system prompt, without control tokens.
          voice: reference voice, float 16 kHz mono, or None.
          seed: session i draws with seed + i.
          buckets: input shapes to prepare (`stream.inputs`); by default sound, pictures, text.
          precompile: compile them now, with a progress bar on a terminal; otherwise when first met, with a warning.
          force_listen_units: units at the beginning in which the model does not speak.
          window: what stays in the cache, a `Window` or its kind.
          settings: sampling and budgets, see `sampling.Controls`.
          options: fields of `StreamConfig` (slots, unit_seconds, speak, reference_quirks, ...).

        Raises:
          ConfigError, CapacityError: an option that cannot be, named.
        """
        known = {f.name for f in dataclasses.fields(StreamConfig)} - {"model", "control", "window", "rules"}
        if unknown := sorted(options.keys() - known):
            raise ConfigError(f"duplex option {unknown[0]!r} is unknown; expected one of {', '.join(sorted(known))}")
        window = Window(window) if isinstance(window, str) else window
        if not isinstance(window, Window):
            raise ConfigError(f"window is {window!r}; expected a Window or its kind")
        if window.kind == "context" and not window.marker:
            window = dataclasses.replace(window, marker=tuple(self.tokenizer.encode("\n\nprevious: ")))
        positions = self.config.llm.max_positions
        options.setdefault("slots", min(8192, positions // 2 if window.is_ring else positions))
        options.setdefault("speak", self.config.talker is not None)
        if options["speak"]:
            options.setdefault("talker_slots", min(1024, self.config.talker.max_positions))
        rules = None if self.mesh is None else sharding.SERVE
        config = StreamConfig(self.config, self.tokenizer.control, window=window, rules=rules, **options)
        return Session(self, config, batch, prompt, voice, seed, buckets, precompile, force_listen_units, settings or {})

    def chat(self, messages: Sequence[dict[str, Any]], **options) -> str:
        """Answers a turn-based conversation; see `stream.chat.chat`."""
        return self.chat_reply(messages, **options).text

    def chat_reply(self, messages: Sequence[dict[str, Any]], **options) -> ChatReply:
        """`chat` with the ids and, where asked for, the speech codes."""
        return chat(self.params, self.config, self.tokenizer, messages, **options)


def load(path: str | os.PathLike, dtype: Any = None, mesh: Any = None) -> Venus:
    """Loads a checkpoint directory, ours or Hugging Face's.

    Args:
      dtype: of parameters and computation; by default bfloat16 on accelerators and float32 on a CPU.
      mesh: lay the model out for serving on these devices (`sharding.make_mesh`); sessions then lie on them, too.

    Raises:
      CheckpointError, TokenizerError: what is missing or wrong, named.
    """
    if not os.path.isdir(path):
        raise CheckpointError(f"{path}: expected a checkpoint directory")
    dtype = jnp.dtype(dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16"))
    place = None if mesh is None else lambda shapes: sharding.param_shardings(shapes, sharding.SERVE, mesh)
    config, params = convert.load_any(path, place, dtype)
    tokenizer = load_tokenizer(path, config.llm.vocab_size)
    if mesh is None:
        params = jax.device_put(params)
        if jax.default_backend() == "cpu" and config.llm.num_layers <= SEPARATE_LAYERS:
            params = separate_layers(params)
    return Venus(config.replace(dtype=dtype.name), params, tokenizer, mesh)


class Session:
    """One or many conversations on one clock. `step` is the only thing that takes time.

    With `batch=1` arguments and results are single values, otherwise lists with one entry a row; None is a row that
    takes no part. Rows begin with `join`, which the constructor does for all of them.
    """

    def __init__(self, venus: Venus, config: StreamConfig, batch: int, prompt: str, voice: np.ndarray | None, seed: int,
                 buckets: Sequence[Bucket] | None, precompile: bool, force_listen_units: int, settings: dict[str, Any]):
        if type(batch) is not int or batch < 1:
            raise ConfigError(f"batch is {batch!r}; expected a whole number of sessions, at least one")
        for name, value in (("seed", seed), ("force_listen_units", force_listen_units)):
            if type(value) is not int or value < 0:
                raise ConfigError(f"{name} is {value!r}; expected a whole number, not negative")
        if buckets is not None and not all(isinstance(bucket, Bucket) for bucket in buckets):
            raise ConfigError(f"buckets is {buckets!r}; expected a list of Bucket")
        self.venus, self.config, self.batch = venus, config, batch
        self.buckets = tuple(packing.default_buckets(config) if buckets is None else buckets)
        self.force_listen_units = force_listen_units
        self._vocabulary = vocabulary(venus.tokenizer, venus.config.llm.vocab_rows, config.reference_quirks)
        self.set(**settings)
        self._begin, self._prefill, self._step = _programs(config, batch, venus.mesh)
        with self._on_mesh():
            self._state = self._begin(config, batch)
        self._programs: dict[Bucket, Any] = {}
        self._requests: list[list[int]] = [[] for _ in range(batch)]  # delegate spans that are still open
        self._tails = [b""] * batch  # the beginning of a character that the next unit completes
        self._units = np.zeros(batch, int)
        self._held, self._pinned = np.zeros(batch, int), np.zeros(batch, int)  # cache entries of each row, of its prompt
        if precompile:
            self.precompile()
        self.join(range(batch), prompt, voice, seed)

    def set(self, **settings) -> None:
        """Changes sampling settings from the next unit on; others return to their defaults. Compiles nothing."""
        cap = self.config.max_unit_tokens
        if self.config.reference_quirks:  # its limits, too
            settings = dict(follow_clock=False, max_chars=28) | settings
        most = settings.setdefault("max_tokens", min(sampling.DEFAULTS["max_tokens"], cap + 1))
        self.controls = sampling.controls(self.batch, self._vocabulary, **settings)
        if int(self.controls.max_tokens.max()) - 1 > cap:
            raise ConfigError(f"max_tokens is {most}; this session was made for max_unit_tokens={cap}")
        self._budgets = jax.device_get(self.controls._replace(vocabulary=None))

    def precompile(self) -> None:
        """Compiles every bucket that has no program yet; a progress bar shows on a terminal."""
        from tqdm import tqdm

        todo = [bucket for bucket in self.buckets if bucket not in self._programs]
        for bucket in tqdm(todo, desc="compiling unit shapes", disable=None):
            self._compile(bucket)

    @property
    def num_programs(self) -> int:
        """Programs compiled for `step` so far."""
        return len(self._programs)

    def join(self, rows: Sequence[int] | int = 0, prompt: str = DEFAULT_PROMPT, voice: np.ndarray | None = None,
             seed: int = 0) -> None:
        """Begins new conversations in these rows; the others go on undisturbed.

        Raises:
          CapacityError: the prompt does not fit. MediaError: the voice is no 16 kHz mono sound.
        """
        rows = list(rows) if isinstance(rows, (list, tuple, range, np.ndarray)) else [rows]
        if not all(isinstance(row, (int, np.integer)) and 0 <= row < self.batch for row in rows):
            raise ConfigError(f"rows {rows}: this session has rows 0 to {self.batch - 1}")
        marked = np.isin(np.arange(self.batch), rows)
        if not isinstance(prompt, str):
            raise ConfigError(f"prompt is {prompt!r}; expected a text")
        prefix, suffix = prompt_ids(self.venus.tokenizer, prompt, voice is not None)
        embeddings = None if voice is None else encode_voice(self.venus.params, self.venus.config, voice)
        seeds = [(seed + row) % 2**32 for row in range(self.batch)]
        made = make_prompt(self.config, marked, prefix, embeddings, suffix, seeds)
        with self._on_mesh(), _uninterrupted():
            self._state = self._prefill(self.venus.params, self.config, self._state, made)
            self._units[marked] = 0
            self._held[marked] = self._pinned[marked] = made.count[marked]
            for row in rows:
                self._requests[row], self._tails[row] = [], b""

    def step(self, audio: Any = None, frames: Any = None, text: Any = None, background: Any = None,
             feedback: Any = None) -> Unit | list[Unit | None]:
        """One unit.

        Args:
          audio: float32 `[unit_samples]` in [-1, 1], 16 kHz mono, or None.
          frames: pictures of this unit (PIL or uint8 `[H, W, 3]`), or pairs (picture, most slices).
          text: typed by the user; background: a prepared reply that is to be spoken. Neither can hold control tokens:
            what looks like one is read as plain text.
          feedback: dict with any of `force_listen`, `stop`, `played` (see `state.Feedback`).

        Returns:
          a `Unit`; for `batch` > 1 a list of them, None where a row took no part.

        Raises:
          CapacityError: the cache has no room (windows that forget nothing), or the input fits no bucket.
          MediaError: sound or pictures that cannot be used. In each case no session has moved.
        """
        start = time.perf_counter()
        given = zip(*(self._per_row(name, value) for name, value in (
            ("audio", audio), ("frames", frames), ("text", text), ("background", background), ("feedback", feedback))))
        rows = [self._row(i, *values) for i, values in enumerate(given)]
        if not any(rows):
            raise MediaError("a step without input; expected sound, pictures, text or a background reply")
        bucket = packing.choose(self.buckets, rows)
        packed = packing.pack(self.config, bucket, rows)
        self._check_room(packed)
        if bucket not in self._programs:
            warnings.warn(f"compiling a unit of {bucket.slices} picture slices and {bucket.text} text tokens for "
                          f"{self.batch} sessions, late: call precompile() first", LateCompileWarning, stacklevel=2)
            self._compile(bucket)
        with _uninterrupted():
            self._state, out = self._programs[bucket](self.venus.params, self._state, *packed, self.controls)
            out = jax.device_get(out._replace(trace=None))
            seconds = time.perf_counter() - start
            units = [self._unit(i, out, seconds) if row is not None else None for i, row in enumerate(rows)]
        return units[0] if self.batch == 1 else units

    def save(self, directory: str | os.PathLike) -> None:
        """Writes the whole state of all rows to a new directory; settings (`set`) are not part of it."""
        info = dict(format=1, options=self._options(), requests=self._requests, tails=[tail.hex() for tail in self._tails])
        store.save_tree(directory, self._state, info)

    def restore(self, directory: str | os.PathLike) -> None:
        """Goes on where `save` left off.

        Raises:
          CheckpointError: saved with a model of other sizes or with other options (named), or damaged. Nothing has moved.
        """
        info, ours = store.load_info(directory), self._options()
        saved = info.get("options")
        if info.get("format") != 1 or not isinstance(saved, dict):
            raise CheckpointError(f"{directory}: not a session this version can read")
        for key in sorted(ours.keys() | saved.keys()):
            if ours.get(key) != saved.get(key):
                raise CheckpointError(f"{directory}: saved with another {key} than this session's "
                                      f"({saved.get(key)}, not {ours.get(key)})")
        vocabulary, requests, tails = self.venus.config.llm.vocab_rows, info.get("requests"), info.get("tails")
        try:
            requests = [[int(token) for token in request] for request in requests]
            tails = [bytes.fromhex(tail) for tail in tails]
            if (len(requests), len(tails)) != (self.batch, self.batch) or not all(
                    0 <= token < vocabulary for request in requests for token in request):
                raise ValueError
        except (TypeError, ValueError, AttributeError):
            raise CheckpointError(f"{directory}/{store.INFO_FILE}: requests or tails are damaged") from None
        self._state = store.load_tree(directory, self._state)
        self._requests, self._tails = requests, tails
        state = jax.device_get(self._state._replace(llm=None, audio=None, talker=None, mel=None))
        self._units, self._pinned = state.unit.astype(int), state.pinned.astype(int)
        self._held = np.asarray((self._state.llm.slot_position >= 0).sum(axis=1)) + state.pending_count

    def _options(self) -> dict[str, str]:
        """What a saved state depends on, by name."""
        fields = {f.name: repr(getattr(self.config, f.name)) for f in dataclasses.fields(self.config) if f.name != "rules"}
        return fields | dict(batch=repr(self.batch))

    def _compile(self, bucket: Bucket) -> None:
        packed = packing.pack(self.config, bucket, [None] * self.batch)
        with self._on_mesh():
            program = self._step.lower(self.venus.params, self.config, self._state, *packed, self.controls).compile()
        self._state, _ = program(self.venus.params, self._state, *packed, self.controls)  # a first run is slow; nobody moves
        self._programs[bucket] = program

    def _check_room(self, packed) -> None:
        """Refuses before anything moves what the step would refuse row by row (`UnitOutputs.full`)."""
        inputs, background, feedback = packed
        needed = room_needed(self.config, self._budgets, inputs.count + background.count)
        kept = {"ring": 0, "prefix_ring": self._pinned}.get(self.config.window.kind, self._held - PENDING)
        full = inputs.active & ~feedback.stop & (needed > self.config.slots - PENDING - kept)
        if full.any():
            row = int(full.argmax())
            raise CapacityError(f"session {row} holds {self._held[row]} of {self.config.slots} cache slots and a unit may "
                                f"take {int(needed[row])}; window {self.config.window.kind!r} cannot make room")

    def _on_mesh(self):
        return contextlib.nullcontext() if self.venus.mesh is None else jax.set_mesh(self.venus.mesh)

    def _per_row(self, name: str, value: Any) -> Sequence[Any]:
        if self.batch == 1:
            return [value]
        if value is None:
            return [None] * self.batch
        if not isinstance(value, (list, tuple)) or len(value) != self.batch:
            raise ConfigError(f"{name}: expected a list of {self.batch}, one entry for every session")
        return value

    def _row(self, i: int, audio, frames, text, background, feedback) -> Row | None:
        feedback = _checked_feedback(feedback)
        for name, words in (("text", text), ("background", background)):
            if words is not None and not isinstance(words, str):
                raise ConfigError(f"{name} is {words!r}; expected a text")
        frames = () if frames is None else frames
        if not isinstance(frames, (list, tuple)):
            raise MediaError(f"frames is one {type(frames).__name__}; expected a list of pictures")
        if audio is None and not len(frames) and not text and not background:
            if feedback.get("stop"):
                audio = np.zeros(self.config.unit_samples, np.float32)  # nothing of it is heard
            else:
                return None
        encode = lambda words: tuple(self.venus.tokenizer.encode(words, special=False)) if words else ()
        force = bool(feedback.get("force_listen")) or self._units[i] < self.force_listen_units
        return Row(audio, tuple(self._slices(frame) for frame in frames), encode(text), encode(background), force,
                   bool(feedback.get("stop")), float(feedback.get("played", -1)))

    def _slices(self, frame) -> tuple:
        model = self.venus.config
        if model.vision is None:
            raise MediaError("a picture was given, but this model has no vision tower")
        picture, most = frame if isinstance(frame, tuple) and len(frame) == 2 else (frame, model.image.max_slice_nums)
        if type(most) is not int or most < 1:
            raise MediaError(f"a picture with at most {most!r} slices; expected a whole number, at least 1")
        return tuple(images.slice_image(picture, most, model.image.scale_resolution, model.vision.patch_size))

    def _words(self, i: int, ids: list[int], last: bool) -> str:
        """Text of a unit; a character cut by the unit's end is kept for the next."""
        tokenizer = self.venus.tokenizer
        said = b"".join(tokenizer.pieces[token] for token in ids if token not in tokenizer.special_ids)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(self._tails[i] + said, last)
        self._tails[i] = decoder.getstate()[0]
        return text

    def _unit(self, i: int, out: UnitOutputs, seconds: float) -> Unit:
        control, decode = self.config.control, self.venus.tokenizer.decode
        ids = lambda name, count: getattr(out, name)[i, :int(getattr(out, count)[i])].tolist()
        finished, request = [], self._requests[i]
        for token in ids("delegate", "delegate_count"):
            if token in (control.delegate_end, control.turn_eos):
                finished.append(decode(request, skip_special=True).strip())
                request.clear()
            elif token == control.delegate_start:
                request.clear()
            else:
                request.append(token)
        if out.active[i]:
            self._units[i] += 1
            self._held[i] = out.kv_length[i]
        return Unit(
            unit=int(out.unit[i]), state="listen" if out.is_listen[i] else "speak",
            text=self._words(i, ids("text", "text_count"), bool(out.end_of_turn[i] and out.active[i])), delegate="\n".join(filter(None, finished)),
            codes=np.asarray(ids("codes", "code_count"), np.int32), tokens=tuple(ids("tokens", "token_count")),
            terminator=int(out.terminator[i]), end_of_turn=bool(out.end_of_turn[i]), flush=bool(out.flush[i]),
            kv_length=int(out.kv_length[i]), seconds=seconds)


def _checked_feedback(feedback: Any) -> dict[str, Any]:
    """`feedback` of a row. Raises ConfigError: no dict, an unknown name, or a value of another kind."""
    if feedback is not None and not isinstance(feedback, dict):
        raise ConfigError(f"feedback is {feedback!r}; expected a dict")
    feedback = dict(feedback or {})
    if unknown := sorted(map(str, feedback.keys() - {"force_listen", "stop", "played"})):
        raise ConfigError(f"feedback {unknown[0]!r} is unknown; expected force_listen, stop or played")
    for name in ("force_listen", "stop"):
        if not isinstance(feedback.get(name, False), (bool, np.bool_)):
            raise ConfigError(f"feedback {name} is {feedback[name]!r}; expected True or False")
    played = feedback.get("played", -1)
    if isinstance(played, bool) or not isinstance(played, (int, float)) or not (
            played == -1 or 0 <= played < math.inf):
        raise ConfigError(f"feedback played is {played!r}; expected seconds, or -1 where unknown")
    return feedback


@contextlib.contextmanager
def _uninterrupted():
    """Ctrl-C waits until the body is through: between giving the old state away and keeping the new one, it would lose both."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = []
    before = signal.signal(signal.SIGINT, lambda *args: came.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came and callable(before):
        before(*came[0])


@functools.cache
def _programs(config: StreamConfig, batch: int, mesh: Any):
    """(init_state, prefill, transition) jitted; on a mesh the state keeps its layout."""
    begin = functools.partial(jax.jit, init_state, static_argnums=(0, 1))
    read, step = (functools.partial(jax.jit, f, static_argnames="config", donate_argnames="state")
                  for f in (prefill, transition))
    if mesh is None:
        return begin(), read(), step()
    specs = state_specs(config, sharding.SERVE, batch, mesh)
    layout = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs,
                          is_leaf=lambda x: isinstance(x, jax.P))
    return begin(out_shardings=layout), read(out_shardings=layout), step(out_shardings=(layout, None))

"""Everything a session remembers between two units, as arrays of fixed shape: `s_k` of the equation, and its companions.

    (s_{k+1}, O_k) = F_m(s_k, x_k, b_k; eta_k)      StreamState, UnitOutputs; UnitInputs, BackgroundText, Feedback

The leading axis of every array is the session, B. Optional things are zeros beside a count or a bit, never absent.
"""

from __future__ import annotations

import dataclasses
import fractions
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from venus_jax.config import FRAME_HOP, SAMPLE_RATE, VenusConfig
from venus_jax.errors import ConfigError, MediaError
from venus_jax.media import mel, mel_jax
from venus_jax.media.images import VisionInputs
from venus_jax.models import talker, whisper
from venus_jax.models.talker_decode import CHUNK_CODES
from venus_jax.nn import kv_cache
from venus_jax.sharding import Rules
from venus_jax.stream.kv_cache import Entries, Window, empty_entries
from venus_jax.tokens import ControlTokens
from venus_jax.typing import Array, Bool, Float, Int

HISTORY = 512  # ids the repetition penalty can look back on
PENDING = 3  # tokens a unit can leave to be fed with the next: <|turn_eos|> of a forced end, terminator, </unit>
MAX_SUFFIX = 64  # ids behind the voice in a prompt that the `context` window can read anew


@dataclasses.dataclass(frozen=True)
class StreamConfig:
    """What is fixed when the step is compiled. Hashable: a static argument.

    Attributes:
      unit_seconds: the clock: 1.0 as published, 0.5 for a finer one.
      slots: entries of the backbone's cache per session.
      talker_slots: entries of the talker's cache; a turn that outgrows it forgets its older half.
      max_unit_tokens: most tokens one unit can say; `Controls` holds the budgets below it.
      speak: run the talker.
      reference_quirks: reproduce the reference's faults (golden numbers); off mends them.
      trace: outputs also carry what a parity check looks at (logits, states): large, for `verify` and tests.
      rules: how arrays lie on a mesh; None on one device.
    """

    model: VenusConfig
    control: ControlTokens
    unit_seconds: float = 1.0
    slots: int = 8192
    talker_slots: int = 1024
    window: Window = Window()
    max_unit_tokens: int = 128
    speak: bool = True
    reference_quirks: bool = False
    trace: bool = False
    rules: Rules | None = None

    def __post_init__(self):
        if self.model.audio is None:
            raise ConfigError("a duplex session needs a model with an audio tower")
        for name in ("slots", "talker_slots", "max_unit_tokens"):
            if type(getattr(self, name)) is not int:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; expected a positive whole number")
        if type(self.unit_seconds) not in (int, float) or not math.isfinite(self.unit_seconds):
            raise ConfigError(f"unit_seconds is {self.unit_seconds!r}; expected a number of seconds")
        if not isinstance(self.speak, bool):
            raise ConfigError(f"speak is {self.speak!r}; expected True or False")
        try:
            mel.unit_frames(self.unit_samples)
        except MediaError as e:
            raise ConfigError(f"unit_seconds is {self.unit_seconds}: {e}") from e
        if self.speak and self.model.talker is None:
            raise ConfigError("this model has no talker: use speak=False")
        for name in ("slots", "talker_slots", "max_unit_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected a positive whole number")
        if self.max_unit_tokens < 2:
            raise ConfigError("max_unit_tokens is 1; a unit needs at least two")
        if self.window.is_ring and 2 * self.slots > self.model.llm.max_positions:
            raise ConfigError(f"slots is {self.slots}; a ring needs twice as many positions, and the model has "
                              f"{self.model.llm.max_positions}")
        if not self.window.is_ring and self.slots > self.model.llm.max_positions:
            raise ConfigError(f"slots is {self.slots}; the model has {self.model.llm.max_positions} positions")
        if self.speak and self.unit_seconds > 1:
            raise ConfigError(f"unit_seconds is {self.unit_seconds}; the talker speaks at most a second a unit")
        least = 2 * (self.max_unit_tokens + CHUNK_CODES + 2)
        if self.speak and self.talker_slots < least:
            raise ConfigError(f"talker_slots is {self.talker_slots}; with max_unit_tokens={self.max_unit_tokens} it takes "
                              f"at least {least}")
        if self.window.kind == "basic" and self.window.high > self.slots:
            raise ConfigError(f"window high={self.window.high}: the cache has {self.slots} slots")
        if self.speak and self.talker_slots > self.model.talker.max_positions:
            raise ConfigError(f"talker_slots is {self.talker_slots}; the talker has "
                              f"{self.model.talker.max_positions} positions")

    @property
    def unit_samples(self) -> int:
        return round(self.unit_seconds * SAMPLE_RATE)

    @property
    def sound_embeddings(self) -> int:
        """Audio embeddings of one unit: ten a second."""
        return self.unit_samples // (2 * FRAME_HOP * self.model.audio.pool_step)


class Clock(NamedTuple):
    """Speech in seconds: `ahead` is what is scheduled and not yet said when the next unit begins; `scheduled` in this turn."""

    ahead: Float[Array, "b"]
    scheduled: Float[Array, "b"]


class Memory(NamedTuple):
    """What the `context` window needs: the words of dropped units, and the parts of the prompt around them."""

    previous: Int[Array, "b p"]
    count: Int[Array, "b"]
    prefix: Int[Array, "b"]  # prompt entries in front of the remembered words
    suffix: Int[Array, "b x"]
    suffix_count: Int[Array, "b"]


class StreamState(NamedTuple):
    """`s_k`. `pending`: ids that the last unit said but nobody has read yet, from the left; they lead the next append."""

    unit: Int[Array, "b"]
    llm: kv_cache.KVCache
    entries: Entries
    pinned: Int[Array, "b"]  # prompt entries
    pending: Int[Array, "b 3"]
    pending_count: Int[Array, "b"]
    mel: mel_jax.MelState
    audio: kv_cache.KVCache
    talker: kv_cache.KVCache | None
    talker_start: Int[Array, "b"]  # position the turn's speech has reached; 0: it has not begun
    turn_open: Bool[Array, "b"]
    delegating: Bool[Array, "b"]  # inside <delegate> ... </delegate>
    history: Int[Array, "b h"]  # ids said, newest last, -1 where none
    clock: Clock
    memory: Memory
    key: Array  # uint32 [B, 2]: the session's seed; every draw derives its own key from it, the unit and the step


class UnitInputs(NamedTuple):
    """`x_k`, laid out by `stream.unit`. Inactive rows take no part in the step and keep their state.

    `ids`, `media_index`: the unit up to its user text, the first `count` places; `media_index` names the row of the
    table [pictures | sound] that stands at a place, -1 for a token. `media_count`: places up to the last medium.
    """

    active: Bool[Array, "b"]
    samples: Float[Array, "b n"]
    has_sound: Bool[Array, "b"]
    images: VisionInputs  # [B, M, P, D] and so on; M may be 0
    ids: Int[Array, "b t"]
    media_index: Int[Array, "b t"]
    count: Int[Array, "b"]
    media_count: Int[Array, "b"]


class BackgroundText(NamedTuple):
    """`b_k`: the block `<backend>...</backend>` as ids, the first `count` of each row."""

    ids: Int[Array, "b t"]
    count: Int[Array, "b"]


class Feedback(NamedTuple):
    """`eta_k`.

    `force_listen`: do not speak in this unit; an open turn is closed. `stop`: the session stands still, nothing is
    taken in, queued sound is to be dropped. `played`: seconds of this turn's speech heard so far, -1 where unknown.
    """

    force_listen: Bool[Array, "b"]
    stop: Bool[Array, "b"]
    played: Float[Array, "b"]


class Trace(NamedTuple):
    """Insides of a step for parity checks."""

    embeds: Float[Array, "b t d"]  # what was appended, pending tokens included
    logits: Float[Array, "b n v"]  # behind the input, and behind every token said
    hidden: Float[Array, "b n d"]  # states that read the tokens said
    decided: Int[Array, "b n"]  # decisions before any rewriting, -1 where none was taken
    code_scores: Float[Array, "b c a"]
    kv_length: Int[Array, "b 4"]  # before, after the input, after the tokens said, after the end (windows included)


class UnitOutputs(NamedTuple):
    """`O_k` = (c, Y, D, S). Only text and codes are for the user.

    `tokens`: everything said in order, without its terminator; -1 beyond `token_count`, as in `text`, `delegate`, `codes`.
    `flush`: the floor was lost: sound of earlier units that is queued but not yet heard is to be dropped (codes of this
    unit belong to the new intent). `end_of_turn`: a turn ended in this unit; another may have begun. `full`: no room was left and the
    row did not take part.
    """

    active: Bool[Array, "b"]
    is_listen: Bool[Array, "b"]
    terminator: Int[Array, "b"]
    tokens: Int[Array, "b n"]
    token_count: Int[Array, "b"]
    text: Int[Array, "b n"]
    text_count: Int[Array, "b"]
    delegate: Int[Array, "b n"]
    delegate_count: Int[Array, "b"]
    codes: Int[Array, "b c"]
    code_count: Int[Array, "b"]
    end_of_turn: Bool[Array, "b"]
    turn_open: Bool[Array, "b"]
    flush: Bool[Array, "b"]
    full: Bool[Array, "b"]
    forced_turn_end: Bool[Array, "b"]  # <|turn_eos|> was put in by `force_listen`
    unit: Int[Array, "b"]
    kv_length: Int[Array, "b"]
    trace: Trace | None


def init_state(config: StreamConfig, batch: int, dtype: Any = None) -> StreamState:
    """Rows without a session. `dtype`: of the caches; the model's by default."""
    dtype = jnp.dtype(config.model.dtype if dtype is None else dtype)
    llm, window = config.model.llm, config.window
    def zeros(*shape, kind=jnp.int32):  # each array its own buffer: a state is donated
        return jnp.zeros((batch, *shape), kind)

    previous = window.max_previous if window.kind == "context" else 0
    return StreamState(
        unit=zeros(),
        llm=kv_cache.empty(llm.num_layers, batch, config.slots, llm.num_kv_heads, llm.head_dim, dtype),
        entries=empty_entries(batch, config.slots), pinned=zeros(),
        pending=zeros(PENDING), pending_count=zeros(),
        mel=mel_jax.init_mel_state(batch, config.unit_samples),
        audio=whisper.empty_cache(config.model.audio, batch, dtype),
        talker=talker.empty_cache(config.model.talker, batch, config.talker_slots, dtype) if config.speak else None,
        talker_start=zeros(), turn_open=zeros(kind=bool), delegating=zeros(kind=bool),
        history=jnp.full((batch, HISTORY), -1, jnp.int32),
        clock=Clock(zeros(kind=jnp.float32), zeros(kind=jnp.float32)),
        memory=Memory(zeros(previous), zeros(), zeros(), zeros(MAX_SUFFIX), zeros()),
        key=zeros(2, kind=jnp.uint32))


def state_specs(config: StreamConfig, rules: Rules, batch: int, mesh: Any) -> StreamState:
    """PartitionSpecs of a state: sessions over the batch axes, heads of backbone and audio tower over `tensor`.

    The talker lies whole on every chip and its heads do not divide, so its sessions are spread over all chips, where
    they divide.
    """
    def axis(name, size):
        return name if rules.divides(name, size, mesh) else None

    rows, model = axis("batch", batch), config.model
    specs = jax.tree.map(lambda _: rules.spec(rows), jax.eval_shape(lambda: init_state(config, 1)))
    return specs._replace(
        llm=kv_cache.specs(rules, axis("kv_heads", model.llm.num_kv_heads), rows),
        audio=kv_cache.specs(rules, axis("heads", model.audio.num_heads), rows),
        talker=kv_cache.specs(rules, None, axis("speech_batch", batch)) if config.speak else None)


def select_rows(rows: Bool[Array, "b"], yes: Any, no: Any) -> Any:
    """A tree of arrays with a leading session axis: `yes` where marked, else `no`. Not for KV caches, whose rows come second."""
    return jax.tree.map(lambda a, b: jnp.where(rows.reshape(-1, *(1,) * (a.ndim - 1)), a, b), yes, no)


def codes_per_unit(config: StreamConfig, unit: Int[Array, "b"]) -> Int[Array, "b"]:
    """Speech codes of a whole unit: 25 a second, and for half seconds 12 and 13 in turn."""
    rate = fractions.Fraction(CHUNK_CODES * config.unit_samples, SAMPLE_RATE)
    at = lambda u: u * rate.numerator // rate.denominator
    phase = unit % rate.denominator
    return at(phase + 1) - at(phase)

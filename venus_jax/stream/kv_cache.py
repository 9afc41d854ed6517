"""What a session may keep in its backbone cache, and where: windows over `nn.kv_cache.KVCache`.

Every held entry belongs to a unit (`Entries.unit`, `PROMPT` for the system prompt). Old units are dropped whole, by an
edit of integers; nothing is moved. Kinds of `Window`:

* `error`: keep everything; a unit that does not fit is not begun and is reported.
* `ring`: before a unit, drop the oldest units until it surely fits.
* `prefix_ring`: the same, and the prompt stays.
* `basic`, `context`: the reference's. They act after a unit and move the kept keys to compact positions.
  `basic` drops the oldest units down to `low` once more than `high` entries are held. `context` keeps `max_units` units
  and writes the last `max_previous` words of dropped ones, behind `marker`, into the prompt.

In rings, slot and position are tied (`slots`), so that a decode step searches nothing. Positions grow without end and are
set back (`rebase`) by whole turns of the ring before they leave the range the model was trained on.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from venus_jax.errors import ConfigError
from venus_jax.nn import kv_cache
from venus_jax.nn.kv_cache import KVCache
from venus_jax.typing import Array, Bool, Int

KINDS = ("error", "ring", "prefix_ring", "basic", "context")
PROMPT = -1  # the unit of prompt entries


@dataclasses.dataclass(frozen=True)
class Window:
    """Which entries stay; numbers of tokens and units. `marker`: ids that introduce remembered words (`context`)."""

    kind: str = "prefix_ring"
    high: int = 8000
    low: int = 6000
    max_units: int = 24
    max_previous: int = 500
    marker: tuple[int, ...] = ()

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ConfigError(f"window {self.kind!r}: expected one of {', '.join(KINDS)}")
        if not 0 < self.low <= self.high:
            raise ConfigError(f"window low={self.low}, high={self.high}: expected 0 < low <= high")
        if self.max_units < 1 or self.max_previous < 0:
            raise ConfigError(f"window max_units={self.max_units}, max_previous={self.max_previous}: expected at least "
                              "one unit and no negative number of words")

    @property
    def is_ring(self) -> bool:
        return self.kind in ("ring", "prefix_ring")


class Entries(NamedTuple):
    """Beside each slot: the unit its entry belongs to, and the word to remember when it is dropped (-1: none)."""

    unit: Int[Array, "b s"]
    word: Int[Array, "b s"]


def empty_entries(batch: int, slots: int) -> Entries:
    """Entries of an empty cache."""
    return Entries(jnp.full((batch, slots), PROMPT, jnp.int32), jnp.full((batch, slots), -1, jnp.int32))


def slots(window: Window, cache: KVCache, pinned: Int[Array, "b"], positions: Int[Array, "b t"]) -> Int[Array, "b t"]:
    """Slots for new positions (-1 where there is none: slot S, which `append` drops).

    `pinned`: positions at the front that the ring goes round; 0 unless the window keeps the prompt.
    """
    size = cache.slot_position.shape[1]
    if window.is_ring:
        front = pinned[:, None]
        where = jnp.where(positions < front, positions, front + (positions - front) % (size - front))
    elif window.kind == "error":
        where = positions
    else:
        where = kv_cache.free_slots(cache, positions >= 0)
    return jnp.where(positions < 0, size, where)


def write(entries: Entries, where: Int[Array, "b t"], unit: Int[Array, "b t"], word: Int[Array, "b t"]) -> Entries:
    """Labels the entries that were just written to slots `where`."""
    rows = jnp.arange(where.shape[0])[:, None]
    return Entries(entries.unit.at[rows, where].set(unit, mode="drop"),
                   entries.word.at[rows, where].set(word, mode="drop"))


def make_room(window: Window, cache: KVCache, entries: Entries, pinned: Int[Array, "b"], needed: Int[Array, "b"],
              rows: Bool[Array, "b"]) -> tuple[KVCache, Bool[Array, "b"]]:
    """Before a unit of at most `needed` entries: drops what a ring must give up; says which rows have room.

    Rows without room, and rows outside `rows`, keep everything.
    """
    size = cache.slot_position.shape[1]
    if not window.is_ring:
        return cache, kv_cache.length(cache) + needed <= size
    oldest = (cache.next_position + needed - (size - pinned))[:, None]
    held, turning = cache.slot_position >= 0, cache.slot_position >= pinned[:, None]
    too_old = held & turning & (cache.slot_position < oldest)
    last = jnp.where(too_old, entries.unit, PROMPT - 1).max(axis=1, keepdims=True)
    fits = needed <= size - pinned
    drop = turning & (entries.unit <= last) & (rows & fits)[:, None]
    return kv_cache.keep(cache, ~drop), fits


def rebase(cache: KVCache, pinned: Int[Array, "b"], needed: Int[Array, "b"], limit: int, theta: float) -> KVCache:
    """Sets a ring's positions back in rows that would pass `limit`: keys are turned by the distance, slots stay.

    The prompt keeps its positions. The distance is a multiple of the ring's size, so `slots` still finds every entry.
    """
    size = cache.slot_position.shape[1]
    turning = cache.slot_position >= pinned[:, None]
    first = jnp.where(turning, cache.slot_position, jnp.iinfo(jnp.int32).max).min(axis=1)
    first = jnp.minimum(first, cache.next_position)  # nothing but the prompt may be held
    ring = size - pinned
    back = jnp.where(cache.next_position + needed > limit, (first - pinned) // ring * ring, 0)
    back = jnp.maximum(back, 0)

    def turn(carry):
        cache, back = carry
        position = jnp.where(turning, cache.slot_position - back[:, None], cache.slot_position)
        moved = kv_cache.reposition(cache, position, theta)
        # a row that did not move may hold nothing beyond its prompt: its count of positions stays
        return moved._replace(next_position=cache.next_position - back), jnp.zeros_like(back)

    # a loop of at most one turn: unlike a branch it surely works in place
    return jax.lax.while_loop(lambda carry: carry[1].any(), turn, (cache, back))[0]


def units_held(cache: KVCache, entries: Entries) -> Int[Array, "b"]:
    """Units of which entries are held, counted from the oldest to the newest."""
    of_units = (cache.slot_position >= 0) & (entries.unit > PROMPT)
    newest = jnp.where(of_units, entries.unit, PROMPT).max(axis=1)
    oldest = jnp.where(of_units, entries.unit, newest[:, None] + 1).min(axis=1)
    return newest - oldest + 1


def basic(window: Window, cache: KVCache, entries: Entries, preserve: Int[Array, "b"], rows: Bool[Array, "b"],
          theta: float) -> KVCache:
    """The reference's token window, after a unit: positions are compact before and after."""
    length = kv_cache.length(cache)
    evict = rows & (length > window.high)
    # A unit may be cut off in front of a position where a unit begins; take the first that leaves `low` or fewer.
    by_position = jnp.where(cache.slot_position < 0, cache.slot_position.shape[1], cache.slot_position)
    row = jnp.arange(by_position.shape[0])[:, None]
    unit = jnp.full_like(entries.unit, PROMPT).at[row, by_position].set(entries.unit, mode="drop")
    position = jnp.arange(unit.shape[1])
    begins = unit != jnp.pad(unit, ((0, 0), (1, 0)), constant_values=PROMPT)[:, :-1]
    enough = position >= (length + preserve - window.low)[:, None]
    cut = jnp.where(begins & enough & (position < length[:, None]), position, length[:, None]).min(axis=1)
    return cut_out(cache, preserve, cut, jnp.zeros_like(cut), evict, theta)


def oldest_unit(cache: KVCache, entries: Entries) -> tuple[Int[Array, "b"], Bool[Array, "b s"]]:
    """Length of the oldest unit held, and where its entries are."""
    of_units = (cache.slot_position >= 0) & (entries.unit > PROMPT)
    oldest = jnp.where(of_units, entries.unit, jnp.iinfo(jnp.int32).max).min(axis=1, keepdims=True)
    mine = of_units & (entries.unit == oldest)
    return mine.sum(axis=1), mine


def words_of(cache: KVCache, entries: Entries, mine: Bool[Array, "b s"], most: int) -> tuple[Int[Array, "b w"], Int[Array, "b"]]:
    """The words to remember among the marked entries, in order: ids `[B, most]` from the left, and how many."""
    marked = mine & (entries.word >= 0)
    key = jnp.where(marked, cache.slot_position, jnp.iinfo(jnp.int32).max)
    order = jnp.argsort(key, axis=1)[:, :most]
    return jnp.take_along_axis(entries.word, order, axis=1), marked.sum(axis=1)


def cut_out(cache: KVCache, start: Int[Array, "b"], end: Int[Array, "b"], inserted: Int[Array, "b"],
            rows: Bool[Array, "b"], theta: float) -> KVCache:
    """Drops positions [start, end) in `rows` and moves what follows to `start + inserted`."""
    position, start, end = cache.slot_position, start[:, None], end[:, None]
    moved = jnp.where(position < start, position,
                      jnp.where(position < end, -1, position - end + start + inserted[:, None]))
    return kv_cache.reposition(cache, jnp.where(rows[:, None], moved, position), theta)

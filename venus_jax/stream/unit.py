"""How a session is laid out: one sequence of tokens and embeddings, the same for training and for the live stream.

    session := prompt unit*
    prompt  := token* SOUND* token*                                              system text around the reference voice
    unit    := <unit> picture* [SOUND^n] text* [<backend> text+ </backend>] output </unit>       at least one part
    picture := <image> PICTURE^q </image> { <slice> PICTURE^q </slice> }*
    output  := token* ( <|listen|> | <|chunk_eos|> | <|chunk_tts_eos|> )

PICTURE and SOUND are places of embeddings, `text` is any token but the control tokens. What the model says is free (a
turn may end anywhere, `<|tts_bos|>` may stand in mid-turn, a delegate span may go on in the next unit), except that it
cannot open or close a unit. This file runs on the host; on the device there are only the arrays of a `Layout`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple, Sequence

import numpy as np

from venus_jax.errors import GrammarError
from venus_jax.tokens import CONTROL_TEXT, RESERVED_TEXT, ControlTokens

TOKEN, PICTURE, SOUND = 0, 1, 2  # what stands at a position


class Layout(NamedTuple):
    """A stretch of a session; arrays of one length T.

    Attributes:
      ids: int32, token ids; `<unk>` where an embedding stands (nothing reads it there).
      kind: int32, TOKEN, PICTURE or SOUND.
      index: int32, running number of an embedding among those of its kind in this layout; -1 at tokens.
      target: bool, tokens the model itself is to say: the loss mask, and what tells output from typed text.
    """

    ids: np.ndarray
    kind: np.ndarray
    index: np.ndarray
    target: np.ndarray

    def join(self, *others: Layout) -> Layout:
        """This layout followed by others, embeddings numbered anew through all of them."""
        parts = (self, *others)
        return _layout(*(np.concatenate([getattr(p, name) for p in parts]) for name in ("ids", "kind", "target")))

    def media_index(self, pictures_first: int) -> np.ndarray:
        """Rows of a media table `[pictures | sound]` with so many rows of pictures, int32 [T]; -1 at tokens."""
        return self.index + np.where(self.kind == SOUND, pictures_first, 0).astype(np.int32)

    def decide_at(self, reference_quirks: bool = False) -> int:
        """Position in the input of a unit whose logits make the first decision: the last one.

        In MiniCPM-o text that follows media changes nothing: there it is the last embedding of sound, or the
        token that closes the last picture.
        """
        media = np.flatnonzero(self.kind != TOKEN)
        if not reference_quirks or not len(media):
            return len(self.ids) - 1
        return int(media[-1]) + int(self.kind[media[-1]] == PICTURE)


class Output(NamedTuple):
    """What the model says in a unit: `ids` in the order they are fed, then the `terminator`."""

    ids: tuple[int, ...]
    terminator: int


class Unit(NamedTuple):
    """One tick of the clock. `pictures` counts the slices of each picture, the whole of it included (1: not sliced)."""

    pictures: tuple[int, ...]
    sound: bool
    text: tuple[int, ...]
    backend: tuple[int, ...]
    output: Output


def prompt_text(text: str, voice: bool) -> tuple[str, str]:
    """Texts before and after the reference voice, to be tokenized with their control tokens, as MiniCPM-o has it.

    Without a voice the two follow one another. No line end after either: `<unit>` comes next.
    """
    before, after = ("\n<|audio_start|>", "<|audio_end|>") if voice else ("", "")
    return f"<|im_start|>system\n{text}{before}", f"{after}<|im_end|>"


@dataclasses.dataclass(frozen=True)
class Grammar:
    """Lays sessions out and reads them back.

    Attributes:
      control: ids of the control tokens.
      num_queries: embeddings of one slice of a picture.
      sound_embeddings: embeddings of one unit of sound: 10 a second.
    """

    control: ControlTokens
    num_queries: int
    sound_embeddings: int = 10

    def prompt(self, prefix: Sequence[int], voice_embeddings: int, suffix: Sequence[int]) -> Layout:
        """What comes before the first unit. Raises GrammarError: one of the protocol's twelve tokens is in it."""
        if voice_embeddings < 0:
            raise GrammarError(f"prompt: {voice_embeddings} embeddings of a voice; expected 0 or more")
        return _given((TOKEN, self._checked("prompt", prefix, self._reserved)),
                      (SOUND, [self.control.unk] * voice_embeddings),
                      (TOKEN, self._checked("prompt", suffix, self._reserved)))

    def unit_input(self, pictures: Sequence[int] = (), sound: bool = True, text: Sequence[int] = (),
                   backend: Sequence[int] = ()) -> Layout:
        """`<unit>` and what the model is given in it; arguments as in `Unit`.

        Raises GrammarError: nothing is given, a picture without slices, a control token in `text` or `backend`.
        """
        c = self.control
        if not (len(pictures) or sound or len(text) or len(backend)):
            raise GrammarError("a unit without input; expected pictures, sound, text or a backend block")
        queries = PICTURE, [c.unk] * self.num_queries
        parts = [(TOKEN, [c.unit_start])]
        for slices in pictures:
            if slices < 1:
                raise GrammarError(f"a picture of {slices} slices; expected 1 or more")
            parts += [(TOKEN, [c.image_start]), queries, (TOKEN, [c.image_end])]
            parts += [(TOKEN, [c.slice_start]), queries, (TOKEN, [c.slice_end])] * (slices - 1)
        given = _given(*parts, (SOUND, [c.unk] * self.sound_embeddings * bool(sound)),
                       (TOKEN, self._checked("text", text, self._names)))
        return given.join(self.backend(backend)) if len(backend) else given

    def backend(self, ids: Sequence[int]) -> Layout:
        """A private reply, `<backend> ids </backend>`. Raises GrammarError: no ids, a control token in them."""
        ids = self._checked("backend", ids, self._names, least=1)
        return _given((TOKEN, [self.control.backend_start, *ids, self.control.backend_end]))

    def unit_output(self, output: Output) -> Layout:
        """What the model says, all of it target, and the `</unit>` that closes the unit.

        Raises GrammarError: the terminator is none, or the ids hold one or open or close a unit.
        """
        c = self.control
        terminators = (c.listen, c.chunk_eos, c.chunk_tts_eos)
        if output.terminator not in terminators:
            raise GrammarError(f"output ends with {self._name(output.terminator)}; "
                               f"expected {', '.join(map(self._name, terminators))}")
        ids = self._checked("output", output.ids, {*terminators, c.unit_start, c.unit_end})
        said = [*ids, output.terminator]
        return _layout([*said, c.unit_end], np.zeros(len(said) + 1), [True] * len(said) + [False])

    def unit(self, unit: Unit) -> Layout:
        """A whole unit, `<unit>` to `</unit>`."""
        return self.unit_input(unit.pictures, unit.sound, unit.text, unit.backend).join(self.unit_output(unit.output))

    def session(self, prompt: Layout, units: Sequence[Unit]) -> Layout:
        """The prompt and the units; embeddings of the voice are the first of sound."""
        return prompt.join(*map(self.unit, units))

    def parse(self, layout: Layout) -> list[Unit]:
        """The units of a session or of whole units: `parse(session(prompt, units)) == units`.

        Ids alone do not say where typed text ends and output begins: `target` does.
        Raises GrammarError: anything `session` would not have written; names the first position that differs.
        """
        given = (layout.kind == TOKEN) & ~layout.target
        starts = np.flatnonzero(given & (layout.ids == self.control.unit_start)).tolist()
        ends = [*starts[1:], len(layout.ids)]
        for p in range(starts[0] if starts else len(layout.ids)):
            if layout.target[p] or layout.ids[p] in self._reserved:
                raise GrammarError(f"position {p}: {self._describe(layout, p)} before any unit; expected <unit>")
        return [self._parse_unit(layout, start, end) for start, end in zip(starts, ends)]

    def _parse_unit(self, layout: Layout, start: int, end: int) -> Unit:
        """Reads leniently, lays what was read out again, and compares: what `unit` would not write is refused."""
        c = self.control
        ids, kind, _, target = (array[start:end] for array in layout)
        said = ids[target].tolist()
        heard = slice(int(np.argmax(target)) if said else None)  # what stands before the output
        pictures, text, backend = [], [], []
        into = text
        for i in ids[heard][kind[heard] == TOKEN].tolist():
            if i == c.image_start:
                pictures.append(1)
            elif i == c.slice_start and pictures:
                pictures[-1] += 1
            elif i == c.backend_start:
                into = backend
            elif i not in self._names:
                into.append(i)
        try:
            if not said:
                raise GrammarError("nothing is said; expected an output")
            unit = Unit(tuple(pictures), SOUND in kind, tuple(text), tuple(backend), Output(tuple(said[:-1]), said[-1]))
            expected = self.unit(unit)
        except GrammarError as error:
            raise GrammarError(f"unit at position {start}: {error}") from error
        for p in range(max(end - start, len(expected.ids))):
            found, want = self._describe(layout, start + p), self._describe(expected, p)
            if found != want:
                raise GrammarError(f"position {start + p}: {found}; expected {want}")
        return unit

    # The outputs that training data is made of (the records in the appendix of the Realtime-Venus paper).
    def listen(self) -> Output:
        """Keeps listening: `<|listen|>`."""
        return Output((), self.control.listen)

    def speak(self, ids: Sequence[int]) -> Output:
        """Says text: `<|speak|> ids <|chunk_eos|>`."""
        return Output((self.control.speak, *self._checked("speech", ids, self._names)), self.control.chunk_eos)

    def delegate(self, ids: Sequence[int]) -> Output:
        """Hands a request over: `<|speak|> <delegate> ids </delegate> <|chunk_eos|>`."""
        c, ids = self.control, self._checked("delegate", ids, self._names, least=1)
        return Output((c.speak, c.delegate_start, *ids, c.delegate_end), c.chunk_eos)

    def turn_end(self) -> Output:
        """Ends the turn in a unit of its own: `<|speak|> <|turn_eos|> <|chunk_eos|>`."""
        return Output((self.control.speak, self.control.turn_eos), self.control.chunk_eos)

    def interrupted(self) -> Output:
        """Yields the floor with the turn unfinished: `<|turn_eos|> <|listen|>`."""
        return Output((self.control.turn_eos,), self.control.listen)

    @functools.cached_property
    def _names(self) -> dict[int, str]:
        return {i: CONTROL_TEXT[name] for name, i in dataclasses.asdict(self.control).items()}

    @functools.cached_property
    def _reserved(self) -> frozenset[int]:
        return frozenset(i for i, text in self._names.items() if text in RESERVED_TEXT)

    def _name(self, i: int) -> str:
        return self._names.get(i, f"token {i}")

    def _checked(self, what: str, ids: Sequence[int], barred, least: int = 0) -> Sequence[int]:
        if len(ids) < least:
            raise GrammarError(f"{what}: no tokens; expected at least {least}")
        for n, i in enumerate(ids):
            if not 0 <= i < 1 << 31 or i in barred:
                raise GrammarError(f"{what}: {self._name(i)} at place {n}; expected ids of other tokens")
        return ids

    def _describe(self, layout: Layout, p: int) -> str:
        if p >= len(layout.ids):
            return "the end"
        what = (self._name(int(layout.ids[p])), "embedding of a picture", "embedding of sound")[layout.kind[p]]
        return what + " as output" * bool(layout.target[p])


def _layout(ids, kind, target) -> Layout:
    """Arrays of the right types, embeddings numbered."""
    kind = np.asarray(kind, np.int32)
    index = np.full(len(kind), -1, np.int32)
    for media in (PICTURE, SOUND):
        index[kind == media] = np.arange(np.count_nonzero(kind == media))
    return Layout(np.asarray(ids, np.int32), kind, index, np.asarray(target, bool))


def _given(*parts: tuple[int, Sequence[int]]) -> Layout:
    """Lays out (kind, ids) after one another, none of it target."""
    ids = [i for _, part in parts for i in part]
    return _layout(ids, [kind for kind, part in parts for _ in part], np.zeros(len(ids)))

"""A file played into a session as if it were live, and what is kept of it: words, trace, picture.

    steps = play_file("checkpoints/omni", "talk.wav", "out")
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from venus_jax import api, timeline
from venus_jax.checkpoints.files import new_directory
from venus_jax.config import SAMPLE_RATE
from venus_jax.errors import ConfigError
from venus_jax.media.decode import read_audio, video_frames
from venus_jax.stream.inputs import Bucket

LONGEST_TAIL = 600.0  # seconds


@dataclasses.dataclass(frozen=True)
class Recording:
    """A file that can be played.

    Attributes:
      path: the file.
      sound: float32 [N] in [-1, 1], 16 kHz mono; silence where the file has none.
      first_frame: the whole second that has the first picture, None without a video track.
      has_sound: whether the file has sound.
    """

    path: Path
    sound: np.ndarray
    first_frame: int | None = None
    has_sound: bool = True

    @property
    def seconds(self) -> float:
        return len(self.sound) / SAMPLE_RATE


@dataclasses.dataclass(frozen=True)
class Cue:
    """Words that arrive at a moment, in seconds of the recording."""

    second: float
    words: str


@dataclasses.dataclass(frozen=True)
class Step:
    """One unit of a played file: what went in and what came out.

    Attributes:
      seconds: where the unit begins.
      unit: what the session did.
      typed, background: words of the user and of the harness that arrived in it, "" if none.
      thumbnails: the pictures shown, uint8 [h, w, 3], small.
    """

    seconds: float
    unit: api.Unit
    typed: str = ""
    background: str = ""
    thumbnails: tuple[np.ndarray, ...] = ()

    def line(self) -> str:
        """For a terminal."""
        unit, quoted = self.unit, lambda words: json.dumps(words, ensure_ascii=False)
        parts = [quoted(unit.text)] if unit.text else []
        for name, words in (("typed", self.typed), ("background", self.background), ("delegate", unit.delegate)):
            parts += [f"{name} {quoted(words)}"] if words else []
        parts += ["flush"] * unit.flush + ["end of turn"] * unit.end_of_turn
        parts += [f"{len(unit.codes)} codes"] if len(unit.codes) else []
        return "   ".join([f"{self.seconds:6.1f} s  {unit.state:<6}", *parts, f"{1000 * unit.seconds:.0f} ms"])

    def transcript(self) -> dict[str, Any]:
        """An entry of `transcript.json`; `delegate` and `background` only where there are any."""
        entry = dict(unit=self.unit.unit, state=self.unit.state, text=self.unit.text)
        optional = dict(delegate=self.unit.delegate, background=self.background)
        return entry | {name: words for name, words in optional.items() if words}

    def trace(self) -> dict[str, Any]:
        """A line of `trace.jsonl`: all fields of the unit and its input."""
        fields = dataclasses.asdict(self.unit)
        step_seconds = fields.pop("seconds")
        return fields | dict(seconds=self.seconds, codes=self.unit.codes.tolist(), typed=self.typed,
                             background=self.background, frames=len(self.thumbnails), step_seconds=step_seconds)


def play_file(checkpoint: str | os.PathLike, source: str | os.PathLike, output: str | os.PathLike, *,
              text: Sequence[str] = (), background: Sequence[str] = (), tail: float = 3.0,
              voice: str | os.PathLike | None = None, emit: Callable[[str], None] = print, **options) -> list[Step]:
    """Plays a file and writes `transcript.json`, `trace.jsonl` and `timeline.png` into a new directory.

    Args:
      checkpoint: directory of the model.
      source: sound or clip; see `read_recording`.
      output: must not exist yet or be empty; it appears whole or not at all.
      text, background: cues as `parse_cue` takes them.
      tail: seconds of silence after the end in which a reply may be finished; see `play`.
      voice: file with the reference voice.
      emit: gets a line for every unit and a last one with figures.
      options: of `api.Venus.duplex`.

    Raises:
      MediaError, CheckpointError, TokenizerError, ConfigError, CapacityError: what cannot be used, named.
    """
    typed = [parse_cue("text", value) for value in text]
    replies = [parse_cue("background", value) for value in background]
    if not 0 <= tail <= LONGEST_TAIL:
        raise ConfigError(f"tail is {tail}; expected 0 to {LONGEST_TAIL:.0f} seconds")
    with new_directory(output) as folder:
        recording = read_recording(source)
        check_cues(typed + replies, recording)
        if voice is not None:
            options["voice"] = _read_sound(voice)
        venus = api.load(checkpoint)
        if venus.config.audio is None:
            raise ConfigError(f"{checkpoint}: this model has no audio tower, it cannot listen")
        if not recording.has_sound:
            emit(f"{source}: has no sound; played with silence")
        if recording.first_frame is not None and venus.config.vision is None:
            emit(f"{source}: its pictures are left out, {checkpoint} has no vision tower")
            recording = dataclasses.replace(recording, first_frame=None)
        session = venus.duplex(buckets=(), precompile=False, **options)
        steps = []
        for step in play(session, recording, typed, replies, tail):
            emit(step.line())
            steps.append(step)
        (folder / "transcript.json").write_text(_json([step.transcript() for step in steps], indent=1) + "\n", "utf-8")
        (folder / "trace.jsonl").write_text("".join(_json(step.trace()) + "\n" for step in steps), "utf-8")
        timeline.draw(folder / "timeline.png", f"{Path(source).name} heard by {Path(checkpoint).resolve().name}",
                      recording.sound, steps, session.config.unit_seconds)
    emit(summary(steps, session.config.unit_seconds))
    return steps


def play(session: api.Session, recording: Recording, typed: Sequence[Cue] = (), replies: Sequence[Cue] = (),
         tail: float = 3.0) -> Iterator[Step]:
    """Steps a session of batch 1 through a recording, unit by unit; compiles the shapes it needs before the first.

    The last unit is filled up with silence. Then silence follows, at most `tail` seconds, until a unit is listened to.
    Pictures are shown one a second, each the one on display as its second begins; the last one stays.

    Args:
      typed, replies: words of the user and private replies of the harness; they arrive in the unit that holds their
        second, several in a unit as lines.
    """
    size, seconds = session.config.unit_samples, session.config.unit_seconds
    units = math.ceil(len(recording.sound) / size)
    last = units + math.ceil(tail / seconds - 1e-9)
    words = [_by_unit(cues, seconds) for cues in (typed, replies)]
    session.buckets = needed_buckets(session, recording, last, *words)
    session.precompile()
    pictures = _pictures(recording, size)
    for unit in range(last):
        samples = np.zeros(size, np.float32)
        part = recording.sound[unit * size:(unit + 1) * size]
        samples[:len(part)] = part
        frames = next(pictures)
        text, background = (by_unit.get(unit, "") for by_unit in words)
        result = session.step(samples, [(frame, 1) for frame in frames], text, background)  # not cut into slices
        yield Step(unit * size / SAMPLE_RATE, result, text, background, tuple(map(_thumbnail, frames)))
        if unit >= units and result.state == "listen":
            return


def needed_buckets(session: api.Session, recording: Recording, units: int, *words: dict[int, str]) -> list[Bucket]:
    """The input shapes of this recording and these words by unit; words share one, so that little is compiled."""
    encode = session.venus.tokenizer.encode
    longest = max((len(encode(text, special=False)) + 2 for by_unit in words for text in by_unit.values()), default=0)
    room = max(32, 1 << (longest - 1).bit_length())  # few sizes: the next run finds its program in the cache
    size = session.config.unit_samples
    return sorted({Bucket(len(_seconds_shown(recording, unit, size)), room * any(unit in w for w in words))
                   for unit in range(units)})


def summary(steps: Sequence[Step], unit_seconds: float) -> str:
    """One line of figures; the real-time factor is the time of all steps over the time they covered."""
    took = np.array([step.unit.seconds for step in steps])
    share = np.mean([step.unit.state == "speak" for step in steps])
    return (f"{len(steps)} unit{'s' * (len(steps) != 1)} of {unit_seconds:g} s, {share:.0%} speaking; "
            f"step median {1000 * np.median(took):.0f} ms, 90th percentile {1000 * np.percentile(took, 90):.0f} ms; "
            f"real-time factor {took.sum() / (len(steps) * unit_seconds):.3f}")


# --- input ------------------------------------------------------------------------------------------------------------
def read_recording(path: str | os.PathLike) -> Recording:
    """Reads the sound of a file and finds out about its pictures, which are read as they are played.

    Sound that exceeds [-1, 1] is made quieter as a whole. A clip without sound is silent, one whose pictures outlast
    its sound ends in silence.

    Raises:
      MediaError: missing, empty, damaged or truncated; no media file.
    """
    has_sound, has_video, length = _tracks(path)
    first = next(video_frames(path), None) if has_video else None
    sound = _read_sound(path) if has_sound or first is None else np.zeros(0, np.float32)
    if first is not None:
        length = length or max(moment for moment, _ in video_frames(path)) + 1
        sound = np.pad(sound, (0, max(0, math.ceil(length * SAMPLE_RATE) - len(sound))))
    return Recording(Path(path), sound, None if first is None else int(first[0]), has_sound)


def parse_cue(flag: str, value: str) -> Cue:
    """`"12:hello"`: words and the second at which they arrive.

    Raises:
      ConfigError: anything else, named as the value of this flag.
    """
    second, colon, words = value.partition(":")
    with contextlib.suppress(ValueError):
        if colon and words.strip() and 0 <= float(second) < math.inf:
            return Cue(float(second), words.strip())
    raise ConfigError(f"--{flag}={value}: expected SECOND:WORDS, for example --{flag}='12:hello'")


def check_cues(cues: Sequence[Cue], recording: Recording) -> None:
    """Raises ConfigError: a cue comes after the end of the recording."""
    for cue in cues:
        if cue.second >= recording.seconds:
            raise ConfigError(f"{cue.words!r} is to arrive at {cue.second:g} s, but {recording.path} ends at "
                              f"{recording.seconds:.1f} s")


def _read_sound(path: str | os.PathLike) -> np.ndarray:
    sound = read_audio(path)
    return sound / max(1.0, np.abs(sound).max())  # resampling alone may overshoot


def _tracks(path: str | os.PathLike) -> tuple[bool, bool, float]:
    """Whether a file has sound, whether it has video, and the seconds it states, 0 if none. Readers name its faults."""
    import av
    from av.stream import Disposition

    with contextlib.suppress(av.FFmpegError), av.open(str(path), metadata_errors="replace") as container:
        is_video = not all(s.disposition & Disposition.attached_pic for s in container.streams.video)  # covers
        return bool(container.streams.audio), is_video, (container.duration or 0) / 1e6
    return True, False, 0.0


def _by_unit(cues: Sequence[Cue], unit_seconds: float) -> dict[int, str]:
    units: dict[int, list[str]] = {}
    for cue in cues:
        units.setdefault(int(cue.second / unit_seconds), []).append(cue.words)
    return {unit: "\n".join(words) for unit, words in units.items()}


def _seconds_shown(recording: Recording, unit: int, size: int) -> range:
    """Whole seconds that begin within a unit of so many samples and have a picture."""
    if recording.first_frame is None:
        return range(0)
    begin, end = (-(-edge * size // SAMPLE_RATE) for edge in (unit, unit + 1))
    return range(max(begin, recording.first_frame), max(end, recording.first_frame))


def _pictures(recording: Recording, size: int) -> Iterator[list[np.ndarray]]:
    """Yields the pictures of unit after unit, without end: the last one stays on display."""
    frames = iter(()) if recording.first_frame is None else video_frames(recording.path)
    shown = None
    for unit in itertools.count():
        pictures = []
        for second in _seconds_shown(recording, unit, size):
            _, shown = next(frames, (second, shown))
            pictures.append(shown)
        yield pictures


def _thumbnail(frame: np.ndarray) -> np.ndarray:
    from PIL import Image

    image = Image.fromarray(frame)
    image.thumbnail((128, 72))
    return np.asarray(image)


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)

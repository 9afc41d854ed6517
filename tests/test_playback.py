"""Files played into a session: units, frames, typed words, what is written, and how bad input is refused."""

import dataclasses
import json
import warnings
from fractions import Fraction

import av
import numpy as np
import pytest
import soundfile
from matplotlib import font_manager
from PIL import Image

from venus_jax import api, playback, timeline
from venus_jax.errors import CheckpointError, ConfigError, MediaError
from venus_jax.playback import Cue, Recording, Step, check_cues, parse_cue, play, play_file, read_recording, summary
from venus_jax.stream.inputs import Bucket

# Small, and without the voice, of which a file knows nothing: little to compile.
OPTIONS = dict(slots=512, max_unit_tokens=8, speak=False, settings=dict(max_tokens=6, max_delegate=2, greedy=True))


@pytest.fixture(scope="module")
def speech(golden):
    """33 seconds of speech, float32, 16 kHz."""
    return np.load(golden / "audio" / "speech.npz")["wave_i16"].astype(np.float32) / 32768


@pytest.fixture(scope="module")
def venus(golden):
    return api.load(golden / "checkpoint")


@pytest.fixture(scope="module")
def shared(venus):
    return venus.duplex(buckets=(), precompile=False, **OPTIONS)


@pytest.fixture
def session(shared):
    """A fresh conversation; programs are shared by all tests."""
    shared.set(**OPTIONS["settings"])
    shared.join(0)
    return shared


def heard(samples) -> Recording:
    return Recording("some.wav", np.asarray(samples, np.float32))


def clip(path, seconds: int = 3, sound: bool = True, starts: float = 0.0):
    """A film whose brightness is 60 for each second gone, four frames a second; with or without sound."""
    with av.open(str(path), "w") as container:
        film = container.add_stream("libx264", rate=4)
        film.width, film.height, film.pix_fmt = 64, 48, "yuv420p"
        if sound:
            track = container.add_stream("aac", rate=16_000, layout="mono")
            frame = av.AudioFrame.from_ndarray(np.full((1, 16_000 * seconds), 0.1, np.float32), "fltp", "mono")
            frame.rate, frame.pts = 16_000, 0
        for i in range(round(starts * 4), 4 * seconds):
            picture = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 60 * (i // 4), np.uint8), format="rgb24")
            picture.pts, picture.time_base = i, Fraction(1, 4)
            container.mux(film.encode(picture))
        container.mux(film.encode(None))
        if sound:
            for part in [*av.AudioResampler("fltp", "mono", 16_000, 1024).resample(frame), None]:
                container.mux(track.encode(part))
    return path


def brightness(step) -> list[float]:
    return [picture.mean() for picture in step.thumbnails]


# --- playing ----------------------------------------------------------------------------------------------------------
def test_a_recording_is_played_as_a_client_would_step_it(session, speech):
    steps = list(play(session, heard(speech[:40_000]), tail=0))  # two and a half seconds
    session.join(0)
    padded = np.pad(speech[:40_000], (0, 8000)).reshape(3, 16_000)
    for step, samples in zip(steps, padded, strict=True):
        live = session.step(samples)
        assert step.unit.tokens == live.tokens and step.unit.terminator == live.terminator
        assert (step.unit.text, step.unit.kv_length) == (live.text, live.kv_length)
    assert [step.seconds for step in steps] == [0, 1, 2]


def test_only_the_shapes_of_the_input_are_compiled(session, speech):
    with warnings.catch_warnings():
        warnings.simplefilter("error", api.LateCompileWarning)
        list(play(session, heard(speech[:16_000]), tail=0))
        assert session.buckets == [Bucket(0, 0)]
        typed, replies = [Cue(1.0, "hi"), Cue(1.9, "there")], [Cue(2.5, "a reply")]
        steps = list(play(session, heard(speech[:48_000]), typed, replies, tail=0))
    assert session.buckets == [Bucket(0, 0), Bucket(0, 32)]
    assert [step.typed for step in steps] == ["", "hi\nthere", ""]
    assert [step.background for step in steps] == ["", "", "a reply"]
    tokenizer = session.venus.tokenizer
    took = np.diff([0, *(step.unit.kv_length for step in steps)]) - [len(step.unit.tokens) for step in steps]
    assert took[1] - took[2] == len(tokenizer.encode("hi\nthere")) - len(tokenizer.encode("a reply")) - 2


def test_the_tail_ends_with_the_first_unit_that_listens(session, speech, monkeypatch):
    said = []

    def step(*args):
        unit = dataclasses.replace(UNIT, unit=len(said), state="speak" if len(said) in (1, 2) else "listen")
        said.append(args)
        return unit

    monkeypatch.setattr(session, "step", step)
    steps = list(play(session, heard(speech[:32_000]), tail=3))  # still speaking in unit 2, the first of the tail
    assert [step.unit.state for step in steps] == ["listen", "speak", "speak", "listen"]
    assert not said[2][0].any() and said[1][0].any()
    said.clear()
    assert len(list(play(session, heard(speech[:8000]), tail=3))) == 4  # speaks on and on: 3 seconds, no more
    said.clear()
    assert len(list(play(session, heard(speech[:8000]), tail=0))) == 1


def test_a_film_shows_a_frame_a_second_and_the_last_one_stays(session, tmp_path):
    recording = read_recording(clip(tmp_path / "film.mp4"))
    steps = list(play(session, recording, tail=1.0))
    units = len(steps)
    assert 4 <= units <= 5  # the encoder's sound is a little longer than the film
    for step, wanted in zip(steps, [0, 60, 120, 120, 120]):
        assert brightness(step) == [pytest.approx(wanted, abs=4)]
    assert session.buckets == [Bucket(1, 0)]
    again = dataclasses.replace(recording, first_frame=None)
    session.join(0)
    blind = list(play(session, again, tail=0))
    assert steps[0].unit.kv_length - len(steps[0].unit.tokens) > blind[0].unit.kv_length - len(blind[0].unit.tokens)


def test_frames_of_half_second_units():
    size = 8000
    film = Recording("film.mp4", np.zeros(16_000 * 3, np.float32), first_frame=1)
    assert [list(playback._seconds_shown(film, unit, size)) for unit in range(6)] == [[], [], [1], [], [2], []]
    assert [list(playback._seconds_shown(film, unit, 32_000)) for unit in range(2)] == [[1], [2, 3]]


# --- reading ----------------------------------------------------------------------------------------------------------
def test_odd_sound_just_works(tmp_path, speech):
    soundfile.write(tmp_path / "odd.wav", np.stack([speech[:33_075]] * 2, 1), 11_025, subtype="PCM_U8")
    recording = read_recording(tmp_path / "odd.wav")
    assert recording.seconds == pytest.approx(3, abs=0.001) and recording.first_frame is None
    soundfile.write(tmp_path / "loud.wav", 5 * speech[:16_000] / np.abs(speech[:16_000]).max(), 16_000, subtype="FLOAT")
    loud = read_recording(tmp_path / "loud.wav").sound
    assert np.abs(loud).max() == pytest.approx(1)  # as a whole, not cut off
    np.testing.assert_allclose(loud, speech[:16_000] / np.abs(speech[:16_000]).max(), atol=1e-6)


def test_films_without_sound_or_with_late_pictures(tmp_path):
    silent = read_recording(clip(tmp_path / "silent.mp4", sound=False))
    assert not silent.has_sound and silent.seconds == 3 and silent.first_frame == 0 and not silent.sound.any()
    late = read_recording(clip(tmp_path / "late.mp4", starts=1.0))
    assert late.has_sound and late.first_frame == 1


@pytest.mark.parametrize("name, content, message", [
    ("missing.wav", None, r"missing\.wav: no such file"), ("empty.wav", b"", r"empty\.wav: is empty \(0 bytes\)"),
    ("folder", "folder", r"folder: is a directory"), ("junk.mp4", b"\1\2\3" * 99, r"junk\.mp4: not a media file"),
])
def test_unreadable_input_is_named(tmp_path, golden, name, content, message):
    if content == "folder":
        (tmp_path / name).mkdir()
    elif content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(MediaError, match=message):
        play_file(golden / "checkpoint", tmp_path / name, tmp_path / "new" / "out")
    assert not (tmp_path / "new").exists()


def test_a_film_cut_short_is_refused(tmp_path):
    whole = clip(tmp_path / "whole.mp4").read_bytes()
    (tmp_path / "cut.mp4").write_bytes(whole[:len(whole) // 2])
    with pytest.raises(MediaError, match=r"cut\.mp4: .*truncated"):
        read_recording(tmp_path / "cut.mp4")


def test_cues():
    assert parse_cue("text", "12:hello: you") == Cue(12.0, "hello: you") and parse_cue("text", "0.5: hi ").words == "hi"
    for wrong in ("hello", "12", "12:", "12: ", "x:hello", "-1:hello", "nan:hello", "inf:hello"):
        with pytest.raises(ConfigError, match=r"--text=.*expected SECOND:WORDS"):
            parse_cue("text", wrong)
    check_cues([Cue(1.99, "x")], heard(np.zeros(32_000)))
    with pytest.raises(ConfigError, match=r"'x' is to arrive at 2 s, but some\.wav ends at 2\.0 s"):
        check_cues([Cue(2.0, "x")], heard(np.zeros(32_000)))


# --- the whole command, without the command ---------------------------------------------------------------------------
def test_what_cannot_be_used_is_named_and_leaves_nothing(tmp_path, golden, venus, speech, monkeypatch):
    checkpoint, talk, out = golden / "checkpoint", tmp_path / "talk.wav", tmp_path / "out"
    soundfile.write(talk, speech[:16_000], 16_000)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept.txt").write_text("mine")
    monkeypatch.setattr(api, "load", lambda path: venus if path == checkpoint else pytest.fail(f"loaded {path}"))
    with pytest.raises(CheckpointError, match="full: already exists and is not empty"):
        play_file(checkpoint, talk, tmp_path / "full")
    for error, message, options in (
            (ConfigError, "unit_seconds is 0.33", dict(unit_seconds=0.33)), (ConfigError, "tail is -1", dict(tail=-1)),
            (ConfigError, "expected SECOND:WORDS", dict(text=["hello"])),
            (ConfigError, "ends at 1.0 s", dict(text=["3:hi"])),
            (MediaError, "voice.wav: no such file", dict(voice=tmp_path / "voice.wav")),
            (ConfigError, "window 'none'", dict(window="none"))):
        with pytest.raises(error, match=message):
            play_file(checkpoint, talk, out, **OPTIONS | options)
    deaf = dataclasses.replace(venus, config=venus.config.replace(audio=None))
    monkeypatch.setattr(api, "load", lambda path: deaf)
    with pytest.raises(ConfigError, match="checkpoint: this model has no audio tower"):
        play_file(checkpoint, talk, out)
    monkeypatch.setattr(api, "load", lambda path: venus)

    def interrupt(line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play_file(checkpoint, talk, out, emit=interrupt, **OPTIONS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "talk.wav"]
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["kept.txt"]


def test_a_missing_checkpoint_is_named(tmp_path, speech):
    soundfile.write(tmp_path / "talk.wav", speech[:16_000], 16_000)
    with pytest.raises(CheckpointError, match="^nano: expected a checkpoint directory"):
        play_file("nano", tmp_path / "talk.wav", tmp_path / "out")


def test_a_model_that_does_not_see_is_played_the_sound(tmp_path, golden, venus, session, monkeypatch):
    blind = dataclasses.replace(venus, config=venus.config.replace(vision=None, resampler=None))
    monkeypatch.setattr(api, "load", lambda path: blind)
    monkeypatch.setattr(api.Venus, "duplex", lambda self, **options: session)
    lines = []
    film = clip(tmp_path / "film.mp4", sound=False)
    steps = play_file(golden / "checkpoint", film, tmp_path / "out", tail=0, emit=lines.append)
    assert lines[0].endswith("film.mp4: has no sound; played with silence")
    assert "film.mp4: its pictures are left out" in lines[1]
    assert len(steps) == 3 and len(lines) == 6 and not any(step.thumbnails for step in steps)


# --- what is written --------------------------------------------------------------------------------------------------
UNIT = api.Unit(unit=0, state="speak", text="", delegate="", codes=np.arange(25, dtype=np.int32), tokens=(5, 6),
                terminator=7, end_of_turn=False, flush=False, kv_length=40, seconds=0.038)


def unit(number: int, **fields) -> Step:
    step = {name: fields.pop(name) for name in ("typed", "background", "thumbnails") if name in fields}
    return Step(float(number), dataclasses.replace(UNIT, unit=number, **fields), **step)


def test_lines():
    assert unit(12, text="so far").line() == '  12.0 s  speak    "so far"   25 codes   38 ms'
    line = unit(0, state="listen", codes=UNIT.codes[:0], typed='a "b"\n', background="r", delegate="d", flush=True,
                end_of_turn=True).line()
    assert line == ('   0.0 s  listen   typed "a \\"b\\"\\n"   background "r"   delegate "d"   flush   '
                    'end of turn   38 ms')
    last = summary([unit(0), unit(1, state="listen", seconds=0.05), unit(2, state="listen", seconds=0.05)], 0.5)
    assert last == ("3 units of 0.5 s, 33% speaking; step median 50 ms, 90th percentile 50 ms; real-time factor 0.092")


def test_records():
    picture = np.zeros((2, 2, 3), np.uint8)
    step = unit(3, text="天", delegate="look", background="found", typed="hi", thumbnails=(picture,))
    assert step.transcript() == dict(unit=3, state="speak", text="天", delegate="look", background="found")
    assert unit(4).transcript() == dict(unit=4, state="speak", text="")
    assert json.loads(json.dumps(step.trace())) == dict(
        unit=3, seconds=3.0, state="speak", text="天", delegate="look", tokens=[5, 6], terminator=7,
        codes=list(range(25)), end_of_turn=False, flush=False, kv_length=40, typed="hi", background="found", frames=1,
        step_seconds=0.038)


def pixels(path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB")).astype(int)


def area(picture: np.ndarray, color: str) -> int:
    """Pixels of one of the timeline's colours."""
    rgb = [int(timeline.COLORS[color][i:i + 2], 16) for i in (1, 3, 5)]
    return int((np.abs(picture - rgb).max(axis=-1) < 3).sum())


def test_the_picture_shows_who_spoke(tmp_path, speech):
    steps = [unit(i, state="listen") for i in range(10)]
    steps[2:6] = [unit(i, text="all $5 _words_ ") for i in range(2, 6)]
    timeline.draw(tmp_path / "a.png", "talk", speech[:16_000 * 8], steps, 1.0)
    plain = pixels(tmp_path / "a.png")
    assert area(plain, "speak") / area(plain, "listen") == pytest.approx(4 / 6, rel=0.05)
    assert area(plain, "heard") > 5000 and not area(plain, "flush") and not area(plain, "delegate")
    film = np.full((48, 64, 3), (0, 255, 0), np.uint8)
    marked = [dataclasses.replace(step, thumbnails=(film,), typed="hello" * (i == 1), background="r" * (i == 7), unit=
              dataclasses.replace(step.unit, flush=i == 4, delegate="ask" * (i == 3))) for i, step in enumerate(steps)]
    timeline.draw(tmp_path / "b.png", "talk", speech[:16_000 * 8], marked, 1.0)
    full = pixels(tmp_path / "b.png")
    assert full.shape[0] > plain.shape[0]  # lanes that are not needed are not there
    for name in ("typed", "background", "delegate", "flush"):
        assert area(full, name) > area(plain, name) + 20, name
    assert (np.abs(full - [0, 255, 0]).max(axis=-1) < 3).sum() > 10_000


def test_long_sessions_wrap_and_stay_drawable(tmp_path, speech):
    steps = [unit(i, state="listen") for i in range(600)]
    timeline.draw(tmp_path / "a.png", "ten minutes", speech, steps, 1.0)
    timeline.draw(tmp_path / "b.png", "a minute", speech, steps[:60], 1.0)
    long, short = pixels(tmp_path / "a.png"), pixels(tmp_path / "b.png")
    assert long.shape[1] == short.shape[1] and 7 < long.shape[0] / short.shape[0] < 10
    assert area(long, "listen") == pytest.approx(10 * area(short, "listen"), rel=0.03)


def test_words_of_any_script_become_no_boxes(tmp_path, speech):
    """matplotlib warns of every glyph that it would draw as a box."""
    words = ("你好，世界", "привет", "\0\t\n", "�", "🙂 ok", "ꦲꦏ", "\ue000")
    steps = [unit(i, text=text, typed=text, delegate=text) for i, text in enumerate(words)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        timeline.draw(tmp_path / "a.png", "对话.wav", speech[:16_000], steps, 1.0)


def test_characters_that_no_font_has_are_counted(monkeypatch):
    usual = [font for font in font_manager.fontManager.ttflist if font.name == "DejaVu Sans"]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", usual)
    printed = timeline._Print(set("say 你好"))
    assert printed.clean("say 你好你\n") == "say [3\u00a0characters]" and printed.families == ["DejaVu Sans"]

"""Reading files: what is odd but valid works, what is broken is named in one line."""

import io
import struct
from fractions import Fraction

import av
import numpy as np
import pytest
import soundfile
from PIL import Image

from venus_jax.errors import MediaError
from venus_jax.media.decode import read_audio, read_image, read_video, video_frames

SECONDS, FPS = 3, 10


def tone(rate: int, seconds: float = SECONDS, frequency: float = 440) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * frequency * np.arange(int(seconds * rate)) / rate)


def shade(moment: float) -> float:
    """Brightness of the test clip's frame on display at a moment."""
    return int(moment * FPS + 1e-6) * 255 / (SECONDS * FPS)


def make_clip(path, video="libx264", audio="aac", audio_at: float = 0.0, video_at: float = 0.0, **options):
    """A clip that brightens frame by frame and sounds 440 Hz on its left channel only."""
    with av.open(str(path), "w", options=options) as container:
        streams = []
        if video:
            stream = container.add_stream(video, rate=FPS)
            stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
            frames = []
            for i in range(SECONDS * FPS):
                pixels = np.full((48, 64, 3), round(shade(i / FPS)), np.uint8)
                frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
                frame.pts, frame.time_base = i + round(video_at * FPS), Fraction(1, FPS)
                frames.append(frame)
            streams.append((stream, frames))
        if audio:
            stream = container.add_stream(audio, rate=48_000, layout="stereo")
            left = tone(48_000).astype(np.float32)
            frame = av.AudioFrame.from_ndarray(np.stack([left, 0 * left]), format="fltp", layout="stereo")
            frame.rate, frame.pts = 48_000, round(audio_at * 48_000)
            resampler = av.AudioResampler(format=stream.format, layout="stereo", rate=48_000)
            streams.append((stream, resampler.resample(frame)))
        for stream, frames in streams:
            for frame in [*frames, None]:
                container.mux(stream.encode(frame))
    return path


def cut(path, share: float = 0.5):
    """The first part of a file, as another file."""
    data = path.read_bytes()
    short = path.with_name(f"cut_{path.name}")
    short.write_bytes(data[:int(len(data) * share)])
    return short


def is_tone(samples: np.ndarray, level: float, frequency: float = 440) -> bool:
    """Whether 16 kHz samples are a tone of this amplitude, away from their ends."""
    middle = samples[4000:-4000]
    phase = 2 * np.pi * frequency * np.arange(len(middle)) / 16_000
    found = 2 / len(middle) * np.abs(np.sum(middle * np.exp(-1j * phase)))
    return abs(found - level) < 0.02 and np.sqrt(2 * np.mean(middle**2)) == pytest.approx(level, abs=0.03)


# --- sound ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("suffix, rate, channels, subtype", [
    ("wav", 16_000, 1, "PCM_16"), ("wav", 11_025, 2, "PCM_U8"), ("wav", 48_000, 1, "DOUBLE"),
    ("wav", 44_100, 2, "FLOAT"), ("wav", 48_000, 6, "PCM_24"), ("wav", 8000, 1, "ULAW"),
    ("flac", 22_050, 2, "PCM_16"), ("ogg", 44_100, 2, "VORBIS"), ("mp3", 44_100, 2, "MPEG_LAYER_III"),
    ("aiff", 32_000, 1, "PCM_16"),
])
def test_sound_files_of_every_kind(tmp_path, suffix, rate, channels, subtype):
    path = tmp_path / f"tone.{suffix}"
    soundfile.write(path, np.stack([tone(rate)] * channels, 1), rate, subtype=subtype)
    samples = read_audio(path)
    assert samples.dtype == np.float32 and samples.shape == pytest.approx((SECONDS * 16_000,), abs=1)
    assert is_tone(samples, 0.5)


def test_channels_are_averaged_and_the_rate_is_as_asked(tmp_path):
    soundfile.write(tmp_path / "a.wav", np.stack([tone(48_000), -0.5 * tone(48_000)], 1), 48_000, subtype="FLOAT")
    samples = read_audio(tmp_path / "a.wav", sample_rate=48_000)
    np.testing.assert_allclose(samples, 0.25 * tone(48_000), atol=1e-6)


@pytest.mark.parametrize("name, video, audio", [
    ("a.mp4", "libx264", "aac"), ("a.m4a", None, "aac"), ("a.mkv", "libx264", "flac"), ("a.webm", "libvpx", "libopus"),
    ("a.avi", "mpeg4", "mp3"), ("a.mov", "libx264", "pcm_s16le"),
])
def test_sound_of_clips(tmp_path, name, video, audio):
    samples = read_audio(make_clip(tmp_path / name, video, audio))
    assert len(samples) == pytest.approx(SECONDS * 16_000, abs=1600)
    assert is_tone(samples, 0.25)  # the other channel is silent


def test_sound_that_starts_later_than_the_picture_stays_in_step(tmp_path):
    samples = read_audio(make_clip(tmp_path / "late.mp4", audio_at=1.5))
    assert np.argmax(np.abs(samples) > 0.05) / 16_000 == pytest.approx(1.5, abs=0.03)
    assert len(samples) == pytest.approx((1.5 + SECONDS) * 16_000, abs=1600)


def make_gap(path, seconds: float):
    """A second of sound, nothing for some seconds, another second of sound."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=16_000, layout="mono")
        for start in (0, 1 + seconds):
            pcm = np.round(tone(16_000, 1) * 32767).astype(np.int16)[None]
            frame = av.AudioFrame.from_ndarray(pcm, format="s16", layout="mono")
            frame.rate, frame.pts = 16_000, round(start * 16_000)
            container.mux(stream.encode(frame))
    return path


def test_a_pause_in_the_track_becomes_silence(tmp_path):
    samples = read_audio(make_gap(tmp_path / "a.mkv", 2))
    assert len(samples) == pytest.approx(4 * 16_000, abs=32)
    assert not samples[16_100:47_900].any()
    assert is_tone(samples[:16_000], 0.5) and is_tone(samples[48_000:], 0.5)
    with pytest.raises(MediaError, match="jumps by 700 s"):
        read_audio(make_gap(tmp_path / "b.mkv", 700))


def test_names_do_not_matter(tmp_path):
    path = make_clip(tmp_path / "a.mp4").rename(tmp_path / "a.raw")
    assert is_tone(read_audio(path), 0.25)


def test_labels_in_an_old_encoding_do_no_harm(tmp_path):
    path = make_clip(tmp_path / "a.mkv")
    data = path.read_bytes()
    assert b"ENCODER" in data
    path.write_bytes(data.replace(b"ENCODER", b"ENC\xd6DER"))
    assert is_tone(read_audio(path), 0.25)


@pytest.mark.parametrize("reader", [read_audio, read_video, read_image, lambda path: list(video_frames(path))])
def test_what_is_no_file_is_named(tmp_path, reader):
    (tmp_path / "empty.mp4").touch()
    with pytest.raises(MediaError, match=r"nowhere\.mp4: no such file"):
        reader(tmp_path / "nowhere.mp4")
    with pytest.raises(MediaError, match="xxx: cannot be read .*too long"):
        reader(tmp_path / ("x" * 300))
    with pytest.raises(MediaError, match="is a directory; expected a media file"):
        reader(tmp_path)
    with pytest.raises(MediaError, match=r"empty\.mp4: is empty \(0 bytes\)"):
        reader(tmp_path / "empty.mp4")


@pytest.mark.parametrize("reader", [read_audio, read_video])
def test_what_is_no_media_is_named(tmp_path, reader):
    (tmp_path / "notes.wav").write_text("nothing to hear\n" * 100)
    with pytest.raises(MediaError, match=r"notes\.wav: not a media file"):
        reader(tmp_path / "notes.wav")


@pytest.mark.parametrize("name, options", [
    ("index_last.mp4", {}), ("index_first.mp4", {"movflags": "faststart"}), ("a.mkv", {}), ("a.webm", {}),
])
@pytest.mark.parametrize("reader", [read_audio, read_video])
def test_truncated_clips_are_named(tmp_path, name, options, reader):
    codecs = ("libvpx", "libopus") if name.endswith("webm") else ("libx264", "aac")
    with pytest.raises(MediaError, match=f"{name}: .*truncated") as error:
        reader(cut(make_clip(tmp_path / name, *codecs, **options)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("suffix", ["flac", "mp3"])
def test_truncated_sound_is_named(tmp_path, suffix):
    soundfile.write(tmp_path / f"a.{suffix}", np.stack([tone(44_100)] * 2, 1), 44_100)
    with pytest.raises(MediaError, match=rf"cut_a\.{suffix}: damaged or truncated: \d+ of {SECONDS * 44_100} samples"):
        read_audio(cut(tmp_path / f"a.{suffix}"))


def test_mp3_without_a_length_header(tmp_path):
    """Many encoders write none; the length libsndfile then guesses is no reason to call the file damaged."""
    path, sound = tmp_path / "plain.mp3", np.random.default_rng(0).normal(size=44_100 * 3) * 3000
    with av.open(str(path), "w", options={"write_xing": "0"}) as container:
        stream = container.add_stream("mp3", rate=44_100, layout="mono")
        for start in range(0, len(sound), 1152):
            frame = av.AudioFrame.from_ndarray(sound[None, start:start + 1152].astype(np.int16), "s16p", "mono")
            frame.rate, frame.pts = 44_100, start
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    assert not any(mark in path.read_bytes() for mark in (b"Xing", b"Info"))
    assert 3 <= len(read_audio(path)) / 16_000 < 3.1


def test_a_wav_that_ends_early_is_read_as_far_as_it_goes(tmp_path):
    soundfile.write(tmp_path / "a.wav", tone(16_000), 16_000)
    samples = read_audio(cut(tmp_path / "a.wav"))
    assert len(samples) == pytest.approx(SECONDS * 8000, abs=50) and is_tone(samples, 0.5)


def test_sound_that_is_none_is_named(tmp_path):
    soundfile.write(tmp_path / "none.wav", np.zeros(0), 16_000)
    with pytest.raises(MediaError, match=r"none\.wav: empty or truncated: no sound"):
        read_audio(tmp_path / "none.wav")
    samples = tone(16_000)
    samples[100] = np.nan
    soundfile.write(tmp_path / "nan.wav", samples, 16_000, subtype="FLOAT")
    with pytest.raises(MediaError, match=r"nan\.wav: .* expected finite"):
        read_audio(tmp_path / "nan.wav")
    with pytest.raises(MediaError, match=r"mute\.mp4: has no audio track"):
        read_audio(make_clip(tmp_path / "mute.mp4", audio=None))


# --- video ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name, codecs, options", [
    ("a.mp4", ("libx264", "aac"), {}), ("a.mkv", ("libx264", None), {}), ("a.avi", ("mpeg4", None), {}),
    ("a.webm", ("libvpx", "libopus"), {}), ("no_length.webm", ("libvpx", None), {"live": "1"}),
])
def test_frames_are_those_on_display_at_each_moment(tmp_path, name, codecs, options):
    path = make_clip(tmp_path / name, *codecs, **options)
    for fps in (1.0, 4.0):
        frames, moments = read_video(path, fps)
        np.testing.assert_array_equal(moments[:int(SECONDS * fps)], np.arange(SECONDS * fps) / fps)
        assert len(frames) == len(moments) <= SECONDS * fps + 1  # avi states one frame too many
        for frame, moment in zip(frames[:int(SECONDS * fps)], moments):
            assert frame.shape == (48, 64, 3) and frame.dtype == np.uint8
            assert frame.mean() == pytest.approx(shade(moment), abs=9)  # a frame lasts 8.5 steps; codecs lag in AVI


def test_more_moments_than_frames_show_frames_again(tmp_path):
    frames, moments = read_video(make_clip(tmp_path / "a.mp4"), fps=20)
    assert len(moments) == 60
    for a, b in zip(frames[::2], frames[1::2]):
        np.testing.assert_array_equal(a, b)


def test_the_last_frame_stays_as_long_as_it_is_shown(tmp_path):
    """A screen recording: ten frames in the first second, the last of them for five more."""
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=FPS)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        packets = []
        for i in range(10):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 20 * i, np.uint8), format="rgb24")
            frame.pts, frame.time_base = i, Fraction(1, FPS)
            packets += stream.encode(frame)
        packets += stream.encode()
        packets[-1].duration = round(5.1 / packets[-1].time_base)
        container.mux(packets)
    frames, moments = read_video(path)
    np.testing.assert_array_equal(moments, np.arange(6))
    assert [round(f.mean()) for f in frames] == pytest.approx([0] + 5 * [180], abs=4)


def test_long_clips_are_thinned_out_evenly(tmp_path):
    path = make_clip(tmp_path / "a.mp4", audio=None)
    every, moments = read_video(path, FPS)
    few, chosen = read_video(path, FPS, max_frames=7)
    picks = np.linspace(0, SECONDS * FPS - 1, 7, dtype=int)
    np.testing.assert_array_equal(chosen, moments[picks])
    for frame, pick in zip(few, picks):
        np.testing.assert_array_equal(frame, every[pick])


def test_frames_come_while_decoding(tmp_path):
    """Bounded memory: the first frames of a broken clip arrive before the break is known."""
    path = cut(make_clip(tmp_path / "a.mp4", movflags="faststart"))
    frames = video_frames(path, FPS)
    moments = [next(frames)[0] for _ in range(5)]
    assert moments == [0, 0.1, 0.2, 0.3, 0.4]
    with pytest.raises(MediaError, match="truncated"):
        list(frames)


def test_a_video_that_starts_later_than_the_sound_leaves_moments_out(tmp_path):
    frames, moments = read_video(make_clip(tmp_path / "late.mp4", video_at=1.5))
    np.testing.assert_array_equal(moments, [1, 2, 3, 4])  # from 1.5 s on: second 1 has its first frame
    assert [round(f.mean()) for f in frames] == pytest.approx([shade(t) for t in (0, 0.5, 1.5, 2.5)], abs=6)


@pytest.mark.parametrize("matrix, quarter_turns", [((0, 1, -1, 0), -1), ((0, -1, 1, 0), 1), ((-1, 0, 0, -1), 2)])
def test_clips_filmed_sideways_stand_upright(tmp_path, matrix, quarter_turns):
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=FPS)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        picture = np.zeros((48, 64, 3), np.uint8)
        picture[:24, :32] = 255
        container.mux([*stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")), *stream.encode()])
    one = struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    a, b, c, d = (value << 16 for value in matrix)
    data = path.read_bytes()
    track = data.index(b"tkhd")
    at = data.index(one, track)
    path.write_bytes(data[:at] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + data[at + len(one):])
    (frame,), _ = read_video(path)
    np.testing.assert_allclose(frame, np.rot90(picture, quarter_turns), atol=40)


def test_a_header_with_an_absurd_rate_is_named(tmp_path):
    soundfile.write(tmp_path / "slow.wav", np.zeros(100), 1)
    with pytest.raises(MediaError, match=r"slow\.wav: cannot resample from 1 Hz to 16000 Hz; expected rates from 1000"):
        read_audio(tmp_path / "slow.wav")


@pytest.mark.parametrize("count", [0, -3])
def test_no_frames_at_all_are_refused(tmp_path, count):
    with pytest.raises(MediaError, match=f"max_frames is {count}; expected at least 1"):
        read_video(make_clip(tmp_path / "a.mp4", audio=None), max_frames=count)


def test_impossible_rates_are_refused(tmp_path):
    for fps in (0, -1.0, float("nan")):
        for reader in (read_video, video_frames):
            with pytest.raises(MediaError, match="expected a positive number"):
                reader(make_clip(tmp_path / "a.mp4", audio=None), fps)


def test_clips_without_film_are_named(tmp_path):
    with pytest.raises(MediaError, match=r"a\.m4a: has no video track"):
        read_video(make_clip(tmp_path / "a.m4a", video=None))


def test_a_cover_is_no_film(tmp_path):
    cover = io.BytesIO()
    Image.new("RGB", (32, 32), "red").save(cover, "PNG")
    picture = b"\0image/png\0\3\0" + cover.getvalue()
    frame = b"APIC" + struct.pack(">IH", len(picture), 0) + picture
    size = bytes(len(frame) >> shift & 127 for shift in (21, 14, 7, 0))
    soundfile.write(tmp_path / "a.mp3", tone(44_100), 44_100)
    path = tmp_path / "cover.mp3"
    path.write_bytes(b"ID3\3\0\0" + size + frame + (tmp_path / "a.mp3").read_bytes())
    with av.open(str(path)) as container:
        assert container.streams.video, "the cover is not where FFmpeg looks for it"
    with pytest.raises(MediaError, match="has no video track"):
        read_video(path)
    assert is_tone(read_audio(path), 0.5)


# --- pictures -------------------------------------------------------------------------------------------------------
def encoded(image: Image.Image, kind: str, **options) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def test_pictures_from_file_and_bytes(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
    data = encoded(Image.fromarray(pixels), "PNG")
    (tmp_path / "a.png").write_bytes(data)
    for source in (data, tmp_path / "a.png", str(tmp_path / "a.png")):
        image = read_image(source)
        assert image.mode == "RGB"
        np.testing.assert_array_equal(image, pixels)


def test_transparency_is_laid_on_white():
    rgba = np.zeros((1, 3, 4), np.uint8)
    rgba[0, :, 3] = [0, 128, 255]
    image = Image.fromarray(rgba)
    assert np.asarray(read_image(encoded(image, "PNG")))[0, :, 0].tolist() == [255, 127, 0]
    palette = Image.new("P", (1, 1))
    palette.putpalette([10, 20, 30])
    assert read_image(encoded(palette, "PNG", transparency=0)).getpixel((0, 0)) == (255, 255, 255)
    assert read_image(encoded(palette, "PNG")).getpixel((0, 0)) == (10, 20, 30)
    assert read_image(encoded(Image.new("LA", (1, 1), (50, 255)), "PNG")).getpixel((0, 0)) == (50, 50, 50)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_16_bit_greys_keep_their_upper_8_bits(kind):
    grey = Image.fromarray(np.array([[0, 255, 256, 0x80FF, 65_535]], np.uint16))
    assert np.asarray(read_image(encoded(grey, kind)))[0, :, 0].tolist() == [0, 0, 1, 128, 255]


def test_photographs_stand_upright():
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 90 degrees clockwise
    data = encoded(Image.fromarray(np.vstack([np.zeros((16, 16, 3)), np.full((16, 16, 3), 255)]).astype(np.uint8)),
                   "JPEG", exif=exif)
    image = np.asarray(read_image(data))
    assert image.shape == (16, 32, 3)
    assert image[:, 16:].mean() < 10 < 245 < image[:, :16].mean()


def test_bad_pictures_are_named(tmp_path, monkeypatch):
    data = encoded(Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)), "JPEG")
    (tmp_path / "half.jpg").write_bytes(data[:len(data) // 2])
    with pytest.raises(MediaError, match=r"half\.jpg: expected a PNG, JPEG.*truncated"):
        read_image(tmp_path / "half.jpg")
    for bad in (b"", b"no picture"):
        with pytest.raises(MediaError, match=r"^picture: expected a PNG, .* \(not recognised\)$"):
            read_image(bad)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(MediaError, match="exceeds limit"):
        read_image(data)

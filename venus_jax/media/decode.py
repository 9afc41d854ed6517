"""Files into arrays: sound, clips and pictures. Decoded as a stream: an hour costs no more memory than its result.

What cannot be read is a `MediaError` of one line that names the file and what was expected of it.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from venus_jax.config import SAMPLE_RATE
from venus_jax.errors import MediaError
from venus_jax.media.resample import Resampler

if TYPE_CHECKING:
    import av
    import soundfile
    from PIL import Image

MAX_FRAMES = 64  # of a clip, in the reference; longer ones are thinned out
BLOCK = 65_536  # samples decoded at a time
LONGEST_GAP = 600.0  # seconds; a larger jump of a track's clock is taken for damage
SHORTFALL = 1.0  # seconds a file may end before the length it states
FORMATS_STATING_LENGTH = ("mov", "matroska")  # elsewhere FFmpeg's length is an estimate


def read_audio(path: str | os.PathLike, sample_rate: int = SAMPLE_RATE) -> np.ndarray:
    """Reads the sound of a file: wav, flac, mp3, ogg, or the first audio track of mp4, m4a, mkv, webm, ...

    Channels are averaged. In a clip, time 0 is the clip's beginning, as in `read_video`: a track that starts later or
    pauses is filled with silence. Files that state no length, or cannot be held to it (wav, ogg, fragments of mp4), are
    read as far as they go.

    Args:
      path: the file.
      sample_rate: Hz wanted.

    Returns:
      float32 [N], mono; in [-1, 1] unless a floating-point file exceeds it.

    Raises:
      MediaError: missing, empty, damaged or truncated, or without (finite) sound.
    """
    path = _check_file(path)
    samples = np.concatenate([np.zeros(0, np.float32), *_sound_pieces(path, sample_rate)])
    if not len(samples):
        raise MediaError(f"{path}: empty or truncated: no sound could be read")
    if not np.isfinite(samples).all():
        raise MediaError(f"{path}: has samples that are infinite or not a number; expected finite sound")
    return samples


def read_video(path: str | os.PathLike, fps: float = 1.0,
               max_frames: int = MAX_FRAMES) -> tuple[list[np.ndarray], np.ndarray]:
    """Reads frames of a clip at regular moments.

    Args:
      path: the file; its first video track is read.
      fps: moments a second.
      max_frames: of more moments than this, so many are taken, evenly spread from the first to the last.

    Returns:
      Frames, uint8 RGB [H, W, 3] upright; and the moments they were shown at, float64 [N], seconds from the clip's
      beginning. See `video_frames`.

    Raises:
      MediaError: missing, empty, damaged or truncated, or without a video track; `fps` or `max_frames` not positive.
    """
    path = _check_file(path)
    _check_rate(fps)
    if max_frames < 1:
        raise MediaError(f"max_frames is {max_frames}; expected at least 1")
    count = max(1, math.ceil(_video_end(path) * fps - 1e-6))
    indices = range(count)
    if count > max_frames:
        indices = np.linspace(0, count - 1, max_frames, dtype=int)
    shown = list(_frames_at(path, indices, fps))
    if not shown:
        raise MediaError(f"{path}: no video frame could be decoded")
    return [frame for _, frame in shown], np.array([moment for moment, _ in shown])


def video_frames(path: str | os.PathLike, fps: float = 1.0) -> Iterator[tuple[float, np.ndarray]]:
    """Yields (moment, frame) for the moments 0, 1/fps, 2/fps, ... of a clip of any length, one frame in memory.

    A moment has the frame then on display, or else the first that appears before the next moment; moments with
    neither (the video track starts later) are left out. Frames are uint8 RGB [H, W, 3], upright.

    Raises:
      MediaError: as `read_video`, when the fault is reached.
    """
    path = _check_file(path)
    _check_rate(fps)
    return _frames_at(path, itertools.count(), fps)


def read_image(source: str | os.PathLike | bytes) -> Image.Image:
    """Reads a picture (PNG, JPEG, WebP, ...; the first of an animation) as an RGB `PIL.Image`.

    It is turned upright by its EXIF orientation, transparency is laid on white, and 16-bit greys keep their upper
    8 bits.

    Args:
      source: a file or the bytes of one.

    Raises:
      MediaError: missing, empty, damaged, truncated or oversized.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    if isinstance(source, bytes):
        name, file = "picture", io.BytesIO(source)
    else:
        name = file = _check_file(source)
    try:
        with Image.open(file) as image:
            image = ImageOps.exif_transpose(image)
            if image.mode.startswith("I"):
                image = Image.fromarray(np.clip(np.asarray(image) >> 8, 0, 255).astype(np.uint8))
            if image.has_transparency_data:
                image = image.convert("RGBA")
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as e:
        reason = "not recognised" if isinstance(e, UnidentifiedImageError) else _reason(e)
        raise MediaError(f"{name}: expected a PNG, JPEG, WebP or similar picture ({reason})") from e


# --- sound ----------------------------------------------------------------------------------------------------------
def _sound_pieces(path: Path, sample_rate: int) -> Iterator[np.ndarray]:
    import soundfile

    try:
        file = soundfile.SoundFile(path)
    except (soundfile.LibsndfileError, TypeError):  # TypeError: a name ending in .raw
        yield from _track_pieces(path, sample_rate)
        return
    with file:
        yield from _resampled(_file_blocks(file, path), file.samplerate, sample_rate, path)


def _file_blocks(file: soundfile.SoundFile, path: Path) -> Iterator[np.ndarray]:
    import soundfile

    read = 0
    with contextlib.suppress(soundfile.LibsndfileError):  # reported below
        while len(block := file.read(BLOCK, dtype="float32", always_2d=True)):
            read += len(block)
            yield block.mean(1)
    if read < file.frames and _length_is_stated(file.format, path):
        raise MediaError(f"{path}: damaged or truncated: {read} of {file.frames} samples could be read")


def _length_is_stated(kind: str, path: Path) -> bool:
    """Whether the header states the length; for an MP3 without such a header it is a guess from the first frame."""
    if kind != "MP3":
        return True
    with open(path, "rb") as file:
        head = file.read(1 << 20)
    return any(mark in head for mark in (b"Xing", b"Info", b"VBRI"))


def _resampled(blocks: Iterable[np.ndarray], in_rate: float, out_rate: float, path: Path) -> Iterator[np.ndarray]:
    try:
        resampler = Resampler(in_rate, out_rate)
    except MediaError as e:
        raise MediaError(f"{path}: {e}") from e
    for block in blocks:
        yield resampler.push(block)
    yield resampler.flush()


def _track_pieces(path: Path, sample_rate: int) -> Iterator[np.ndarray]:
    """The first audio track of a container, resampled."""
    with _open(path) as container:
        if not container.streams.audio:
            raise MediaError(f"{path}: has no audio track")
        frames = _decoded(container, container.streams.audio[0], path)
        first = next(frames, None)
        if first is not None:  # its rate is the one that counts: the header of an HE-AAC track states half of it
            frames = itertools.chain([first], frames)
            yield from _resampled(_track_blocks(frames, path), first[1].sample_rate, sample_rate, path)


def _track_blocks(frames: Iterable[tuple[float, av.AudioFrame]], path: Path) -> Iterator[np.ndarray]:
    import av

    to_float = av.AudioResampler(format="fltp")
    heard = 0  # samples
    for time, frame in frames:
        gap = round(time * frame.sample_rate) - heard
        if gap > LONGEST_GAP * frame.sample_rate:
            raise MediaError(f"{path}: damaged: the audio track jumps by {gap / frame.sample_rate:.0f} s")
        if gap > 0.05 * frame.sample_rate:
            yield np.zeros(gap, np.float32)
            heard += gap
        try:
            pieces = to_float.resample(frame)
        except ValueError as e:
            raise MediaError(f"{path}: its audio track changes format on the way ({_reason(e)})") from e
        for piece in pieces:
            yield piece.to_ndarray().mean(0)
            heard += piece.samples


# --- video ----------------------------------------------------------------------------------------------------------
def _check_rate(fps: float) -> None:
    if not 0 < fps < math.inf:
        raise MediaError(f"fps is {fps}; expected a positive number of frames a second")


def _frames_at(path: Path, indices: Iterable[int], fps: float) -> Iterator[tuple[float, np.ndarray]]:
    """Yields (moment, frame) for the moments index / fps, in order."""
    moments = (index / fps for index in indices)
    moment = next(moments, math.inf)
    with _open(path) as container:
        stream = _video_stream(container, path)
        shown, end = None, 0.0
        for time, frame in _decoded(container, stream, path):
            while moment < time:
                if shown is not None:
                    yield moment, _upright(shown)
                elif time < moment + 1 / fps:
                    yield moment, _upright(frame)
                moment = next(moments, math.inf)
            shown, end = frame, time + float(frame.duration * frame.time_base or 1 / (stream.average_rate or 1))
        while shown is not None and moment < end - 1e-6:
            yield moment, _upright(shown)
            moment = next(moments, math.inf)


def _upright(frame: av.VideoFrame) -> np.ndarray:
    return np.ascontiguousarray(np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90)))


def _video_stream(container: av.container.InputContainer, path: Path) -> av.VideoStream:
    from av.stream import Disposition

    for stream in container.streams.video:
        if not stream.disposition & Disposition.attached_pic:  # a cover, not a film
            return stream
    raise MediaError(f"{path}: has no video track")


def _video_end(path: Path) -> float:
    """Seconds from the clip's beginning to the end of its video track."""
    with _open(path) as container:
        stream = _video_stream(container, path)
        begin = _begin(container)
        if container.format.name.startswith(FORMATS_STATING_LENGTH):
            if stream.duration is not None:
                return float(((stream.start_time or 0) + stream.duration) * stream.time_base) - begin
            if container.duration is not None:
                return container.duration / 1e6
        return max((_packet_end(packet) for packet in container.demux(stream)), default=0.0) - begin


# --- containers -----------------------------------------------------------------------------------------------------
def _check_file(path: str | os.PathLike) -> Path:
    path = Path(path)
    try:
        if not path.exists():
            raise MediaError(f"{path}: no such file")
        if path.is_dir():
            raise MediaError(f"{path}: is a directory; expected a media file")
        if path.stat().st_size == 0:
            raise MediaError(f"{path}: is empty (0 bytes); expected a media file")
    except OSError as e:
        raise MediaError(f"{path}: cannot be read ({_reason(e)})") from e
    return path


@contextlib.contextmanager
def _open(path: Path) -> Iterator[av.container.InputContainer]:
    """A container; whatever FFmpeg finds wrong, now or while it is read, is a `MediaError`."""
    import av

    try:
        with av.open(str(path), metadata_errors="replace") as container:
            if container.format.name == "tty":  # FFmpeg would draw any text as pictures
                raise MediaError(f"{path}: is a text; expected a media file")
            yield container
    except av.FFmpegError as e:
        raise MediaError(f"{path}: not a media file, or damaged or truncated ({_reason(e)})") from e


def _decoded(container: av.container.InputContainer, stream: av.AudioStream | av.VideoStream,
             path: Path) -> Iterator[tuple[float, av.AudioFrame | av.VideoFrame]]:
    """Yields (seconds from the clip's beginning, frame) of one track; ending before the stated length is an error."""
    begin, reached = _begin(container), 0.0
    stream.thread_type = "AUTO"
    for packet in container.demux():
        reached = max(reached, _packet_end(packet) - begin)
        if packet.stream.index == stream.index:
            for frame in packet.decode():
                if frame.pts is not None:
                    yield frame.time - begin, frame
    length = (container.duration or 0) / 1e6
    if reached < length - SHORTFALL and container.format.name.startswith(FORMATS_STATING_LENGTH):
        raise MediaError(f"{path}: truncated: ends at {reached:.1f} s of {length:.1f} s")


def _begin(container: av.container.InputContainer) -> float:
    return (container.start_time or 0) / 1e6


def _packet_end(packet: av.Packet) -> float:
    return 0.0 if packet.pts is None else float((packet.pts + (packet.duration or 0)) * packet.time_base)


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error).splitlines()[0] if str(error) else type(error).__name__

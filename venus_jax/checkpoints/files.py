"""Directories that appear whole or not at all, and the files that travel with weights from one form to the other."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import secrets
import shutil
import time
import zlib
from pathlib import Path
from typing import Iterator

from absl import logging

from venus_jax.errors import CheckpointError

_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx"}
_OURS = {"config.json"}  # each form writes its own
_HOST = f"{zlib.crc32(platform.node().encode()):08x}"  # in hidden names: locks of other machines may not be seen here
_QUIET = 0.1  # seconds in which a removed directory has not come back


@contextlib.contextmanager
def new_directory(directory: str | os.PathLike, token: str | None = None, rename: bool = True) -> Iterator[Path]:
    """Gives a hidden directory beside `directory` to write into, and renames it when the body is through.

    After a failure or an interrupt nothing is left, not even the parents made for it. What a killed process left under
    a hidden name for the same `directory` is removed first; where its owner may still live, a warning names it.

    Args:
      directory: must not exist, or be an empty directory that can be renamed (a mount point cannot) or a link to one.
      token: makes the hidden name unique; given where several processes write together.
      rename: False in all but one of several processes.

    Raises:
      CheckpointError: `directory` holds something, or the file system refuses a write.
    """
    final = Path(os.path.abspath(directory))
    try:
        with _scratch(final, token, rename) as scratch:
            yield scratch
    except OSError as e:
        raise CheckpointError(f"{final}: cannot be written ({e})") from e


@contextlib.contextmanager
def _scratch(final: Path, token: str | None, rename: bool) -> Iterator[Path]:
    """`new_directory`, with the file system's own errors."""
    if final.is_symlink():
        if not final.exists():
            raise CheckpointError(f"{final}: is a link that leads nowhere; give a directory that does not exist yet")
        final = final.resolve()
    scratch = final.parent / f".{final.name}.{token or _HOST + secrets.token_hex(4)}.incomplete"
    if final.exists():
        if not final.is_dir():
            raise CheckpointError(f"{final}: is a file; expected a directory that does not exist yet")
        if any(final.iterdir()):
            raise CheckpointError(f"{final}: already exists and is not empty; give another directory or remove it")
        if rename:
            _check_renaming(final, scratch.with_suffix(".aside"))
    if rename:
        _remove_abandoned(final, scratch)
    made = [parent for parent in scratch.parents if not parent.exists()]  # innermost first
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        with _lock(scratch):
            yield scratch
            if rename:
                os.replace(scratch, final)
    except BaseException:
        _remove(scratch)
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise


def _check_renaming(final: Path, aside: Path) -> None:
    """Moves an empty directory aside and back, so that one which cannot be replaced is known before the work."""
    try:
        os.rename(final, aside)
    except OSError as e:
        raise CheckpointError(f"{final}: cannot be replaced, perhaps a mount point ({e.strerror}); give a directory "
                              "that does not exist yet") from e
    os.rename(aside, final)


def _remove_abandoned(final: Path, scratch: Path) -> None:
    """Removes what killed processes of this machine left of `final`; their locks went with them."""
    with contextlib.suppress(OSError):  # such as a parent that does not exist yet
        for left in list(final.parent.iterdir()):
            token = left.name.removeprefix(f".{final.name}.").removesuffix(".incomplete")
            if left.name != f".{final.name}.{token}.incomplete" or "." in token or left == scratch:
                continue
            if token.startswith(_HOST):
                with _lock(left) as abandoned:
                    if abandoned:
                        shutil.rmtree(left, ignore_errors=True)
            if left.exists():
                logging.warning("%s: being written by another process, or left by one that was killed; if so, "
                                "remove it", left)


@contextlib.contextmanager
def _lock(directory: Path) -> Iterator[bool]:
    """Locks a directory; gives whether it did: False where another process has, or the file system knows no locks."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        held = False
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
        yield held
    finally:
        os.close(handle)


def _remove(directory: Path) -> None:
    """Removes a directory for good: a writer that failed may have writes in flight, which would make it anew."""
    for _ in range(50):
        shutil.rmtree(directory, ignore_errors=True)
        time.sleep(_QUIET)
        if not os.path.lexists(directory):
            return


def travelling_files(directory: Path) -> list[Path]:
    """The files of a checkpoint that are neither weights nor its config: tokenizer, preprocessing, generation.

    Folders and hidden files stay behind.
    """
    try:
        return sorted(p for p in directory.iterdir() if p.is_file() and p.name not in _OURS
                      and not p.name.startswith(".") and p.suffix not in _WEIGHT_SUFFIXES
                      and not p.name.endswith(".index.json"))
    except OSError as e:
        raise CheckpointError(f"{directory}: cannot be read ({e})") from e


def copy_files(paths: list[Path], directory: Path) -> None:
    """Copies files under their own names; links are followed."""
    for path in paths:
        shutil.copyfile(path, directory / path.name)

"""Directories that appear whole or not at all, and the files that travel with weights from one form to the other."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from pathlib import Path
from typing import Iterator

from venus_jax.errors import CheckpointError

_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx"}
_OURS = {"config.json"}  # each form writes its own


@contextlib.contextmanager
def new_directory(directory: str | os.PathLike, token: str | None = None, rename: bool = True) -> Iterator[Path]:
    """Gives a hidden directory beside `directory` to write into, and renames it when the body is through.

    After a failure or an interrupt nothing is left, not even the parents made for it.

    Args:
      directory: must not exist, or be an empty directory.
      token: makes the hidden name unique; given where several processes write together.
      rename: False in all but one of several processes.

    Raises:
      CheckpointError: `directory` holds something, or the file system refuses a write.
    """
    final = Path(os.path.abspath(directory))
    if final.is_dir() and any(final.iterdir()):
        raise CheckpointError(f"{final}: already exists and is not empty; give another directory or remove it")
    if final.exists() and not final.is_dir():
        raise CheckpointError(f"{final}: is a file; expected a directory that does not exist yet")
    scratch = final.parent / f".{final.name}.{token or secrets.token_hex(4)}.incomplete"
    made = [parent for parent in scratch.parents if not parent.exists()]  # innermost first
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        yield scratch
        if rename:
            os.replace(scratch, final)
    except BaseException as e:
        shutil.rmtree(scratch, ignore_errors=True)
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()
        if isinstance(e, OSError):
            raise CheckpointError(f"{final}: cannot be written ({e})") from e
        raise


def travelling_files(directory: Path) -> list[Path]:
    """The files of a checkpoint that are neither weights nor its config: tokenizer, preprocessing, generation."""
    return sorted(p for p in directory.iterdir() if p.is_file() and p.name not in _OURS and not p.name.startswith(".")
                  and p.suffix not in _WEIGHT_SUFFIXES and not p.name.endswith(".index.json"))


def copy_files(paths: list[Path], directory: Path) -> None:
    """Copies files under their own names; links are followed."""
    for path in paths:
        shutil.copyfile(path, directory / path.name)

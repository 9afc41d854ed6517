"""Machine-readable results of commands: whether they can be written is known before the work, not after it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from venus_jax.errors import ConfigError


class JsonReport:
    """The file a command's `--json` names (None: nowhere).

    Raises:
      ConfigError: the file cannot be written; said at once.
    """

    def __init__(self, path: str | None):
        self.path = Path(path) if path else None
        if self.path is not None:
            folder = self.path.parent
            if self.path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
                raise ConfigError(f"--json={path}: expected a file in an existing, writable folder")

    def write(self, content: Any) -> None:
        """Writes the whole file or leaves what was there."""
        if self.path is None:
            return
        scratch = self.path.with_name(f".{self.path.name}.incomplete")
        try:
            scratch.write_text(json.dumps(content, indent=1) + "\n")
            scratch.replace(self.path)
        except OSError as e:
            scratch.unlink(missing_ok=True)
            raise ConfigError(f"--json={self.path}: could not be written ({e.strerror})") from e

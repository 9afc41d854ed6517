"""Recorded numbers of the reference implementation: reading a set, comparing, and the lines `verify` prints.

A set is a folder of fixtures with the layout of the public one; sizes and seeds differ between sets, so everything is
read from its `config.json` and its arrays.
"""

from __future__ import annotations

import dataclasses
import json
import zipfile
from pathlib import Path
from typing import Any, Callable

import numpy as np

from venus_jax.errors import GoldenError

FLOOR, LOGITS_FLOOR = 1e-4, 2e-4  # absolute bounds where ten times the recorded difference is smaller
TIMES = 10.0


@dataclasses.dataclass(frozen=True)
class Check:
    """One comparison: largest absolute error against its bound (0: must be identical)."""

    part: str
    name: str
    error: float
    bound: float

    @property
    def ok(self) -> bool:
        return bool(self.error <= self.bound < float("inf"))  # NaN is not

    def __str__(self) -> str:
        return f"{self.part:<9} {self.name:<44} max error {self.error:9.2e}  bound {self.bound:7.1e}  " + (
            "ok" if self.ok else "OFF")


class GoldenSet:
    """A folder of fixtures, opened lazily."""

    def __init__(self, root: str | Path):
        self.root = Path(root)
        if not self.root.is_dir():
            raise GoldenError(f"{root}: expected a folder of recorded fixtures (audio, checkpoint, llm, ...)")
        self.tolerances: dict[str, float] = {}
        for path in sorted(self.root.glob("**/tolerances_*.json")):
            self.tolerances |= self.json(path.relative_to(self.root))

    def json(self, name: str | Path) -> Any:
        """A JSON file of the set."""
        try:
            return json.loads(self.path(name).read_text(), object_pairs_hook=lambda pairs: _Named(str(name), pairs))
        except (ValueError, RecursionError) as e:
            raise GoldenError(f"{self.root / name}: not valid JSON ({e})") from e

    def arrays(self, name: str | Path) -> dict[str, np.ndarray]:
        """All arrays of an `.npz` file of the set."""
        try:
            with np.load(self.path(name)) as file:
                return _Named(str(name), ((key, file[key]) for key in file.files))
        except (ValueError, TypeError, AttributeError, OSError, EOFError, MemoryError, zipfile.BadZipFile) as e:
            raise GoldenError(f"{self.root / name}: not a readable .npz file ({e})") from e

    def path(self, name: str | Path) -> Path:
        """The path of a file that must exist."""
        path = self.root / name
        if not path.is_file():
            raise GoldenError(f"{path}: this fixture file is missing from the set")
        return path

    def bound(self, *keys: str, logits: bool = False) -> float:
        """Ten times the largest of the recorded differences named, or the floor, whichever is larger."""
        recorded = max([self.tolerances.get(key, 0.0) for key in keys], default=0.0)
        return max(TIMES * recorded, LOGITS_FLOOR if logits else FLOOR)


class _Named(dict):
    """A fixture's contents; what is absent is named together with its file."""

    def __init__(self, name: str, pairs: Any):
        super().__init__(pairs)
        self._name = name

    def __missing__(self, key):
        raise GoldenError(f"{self._name}: no entry {key!r}")


class Report:
    """Collects the checks of a part and hands each to `emit` as it is made."""

    def __init__(self, part: str, emit: Callable[[Check], None] = lambda check: None):
        self.part, self.emit, self.checks = part, emit, []

    def close(self, name: str, ours: Any, recorded: Any, bound: float) -> None:
        """Compares numbers; a difference of shape counts as infinite."""
        ours, recorded = np.asarray(ours), np.asarray(recorded)
        if ours.shape != recorded.shape:
            error = float("inf")
        else:
            # equal infinities (barred tokens) differ by NaN
            same = ours == recorded
            difference = np.abs(np.where(same, 0, ours.astype(np.float64)) - np.where(same, 0, recorded))
            error = float(difference.max(initial=0.0))
        self._add(Check(self.part, name, error, bound))

    def same(self, name: str, ours: Any, recorded: Any) -> None:
        """Compares ids, sizes and tables: the number of differing entries must be 0."""
        ours, recorded = np.asarray(ours), np.asarray(recorded)
        differing = float("inf") if ours.shape != recorded.shape else float((ours != recorded).sum())
        self._add(Check(self.part, name, differing, 0.0))

    def _add(self, check: Check) -> None:
        self.checks.append(check)
        self.emit(check)

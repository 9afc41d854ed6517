"""The four tokens Realtime-Venus adds to MiniCPM-o 4.5: whether a checkpoint has them, and the rows they begin with.

The rule: each new row of the embedding, and of the head, is the mean of all the rows before it, accumulated in float64
in blocks of 1024 rows, rounded to float32 and from there to the table's dtype. Mean rows sit inside the distribution
the backbone knows: the embedding surprises no layer, and the head gives a new token the average logit, so that it takes
a bounded share (about one row's worth) of the probability and is never spoken before it is trained. Equal rows part at
the first gradient. The rule depends on the other rows alone; export recomputes it to see whether rows were trained.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable

import numpy as np

from venus_jax.checkpoints.safetensors_io import read_json
from venus_jax.config import BASE_VOCAB_SIZE, NUM_ADDED_TOKENS
from venus_jax.errors import CheckpointError
from venus_jax.tokens import ADDED_TEXT, load_tokenizer

_BLOCK_ROWS = 1024  # part of the rule: it fixes the order of the additions


def initial_rows(rows: Callable[[int, int], np.ndarray], count: int) -> np.ndarray:
    """The rows the added tokens begin with, `[NUM_ADDED_TOKENS, width]`.

    Args:
      rows: `rows(start, stop)` gives `[stop - start, width]` of the table, in the dtype the result is to have.
      count: rows of the table before the added ones.
    """
    total, dtype = 0.0, None
    for start in range(0, count, _BLOCK_ROWS):
        block = rows(start, min(start + _BLOCK_ROWS, count))
        dtype = block.dtype
        total = total + np.ascontiguousarray(block, np.float64).sum(axis=0)
    return np.tile((total / count).astype(np.float32).astype(dtype), (NUM_ADDED_TOKENS, 1))


def are_missing(directory: Path, rows: int) -> bool:
    """Whether a table of `rows` rows beside the tokenizer files in `directory` lacks the rows of the added tokens.

    The tokens are looked up by their text; where no file names them, `load_tokenizer` gives them the next ids, and they
    have rows if the table reaches that far. A directory without any tokenizer has them if it has the published size.

    Raises:
      CheckpointError: some of the four but not all, or with ids that neither lie within the rows nor follow them; other
        ids beyond the rows; or tokenizer files that are not laid out as expected.
    """
    ids, last = _find(directory)
    if last is None:
        return rows != BASE_VOCAB_SIZE + NUM_ADDED_TOKENS
    if last >= rows:
        raise CheckpointError(f"{directory}: the tokenizer has ids up to {last}, but the embedding has {rows} rows")
    if not ids:
        return last + len(ADDED_TEXT) >= rows
    if len(ids) < len(ADDED_TEXT):
        absent = next(text for text in ADDED_TEXT if text not in ids)
        raise CheckpointError(f"{directory}: the tokenizer has {', '.join(ids)} but not {absent}; expected all or none")
    if max(ids.values()) < rows:
        return False
    if sorted(ids.values()) == list(range(rows, rows + len(ADDED_TEXT))):
        return True
    raise CheckpointError(f"{directory}: the tokenizer gives {', '.join(ADDED_TEXT)} the ids "
                          f"{[ids[text] for text in ADDED_TEXT]}, but the embedding has {rows} rows")


def list_in_tokenizer(directory: Path, first_id: int) -> None:
    """Names the added tokens, from `first_id` on, in the tokenizer files of `directory`, which it rewrites.

    Raises:
      CheckpointError: the files are not laid out as expected.
    """
    _find(directory)
    ids = dict(zip(ADDED_TEXT, range(first_id, first_id + len(ADDED_TEXT))))
    flags = dict(lstrip=False, normalized=False, rstrip=False, single_word=False, special=True)

    def grow(raw: dict[str, Any]) -> None:
        raw.update(ids)

    def grow_config(raw: dict[str, Any]) -> None:
        special = [token for token in raw.get("additional_special_tokens") or [] if _text(token) not in ids]
        raw["additional_special_tokens"] = [*special, *ids]
        decoder = {str(i): {"content": text, **flags} for text, i in ids.items()}
        raw["added_tokens_decoder"] = {**(raw.get("added_tokens_decoder") or {}), **decoder}

    def grow_tokenizer(raw: dict[str, Any]) -> None:
        known = [token for token in raw.get("added_tokens") or [] if token["content"] not in ids]
        raw["added_tokens"] = [*known, *({"id": i, "content": text, **flags} for text, i in ids.items())]

    _update(directory / "added_tokens.json", grow, create=True)
    _update(directory / "tokenizer_config.json", grow_config)
    _update(directory / "tokenizer.json", grow_tokenizer)


def _find(directory: Path) -> tuple[dict[str, int], int | None]:
    """Ids of those of the four that the tokenizer files name, and the highest id of any other token (None: no files)."""
    found: dict[str, int] = {}
    added, config, whole, vocab = (read_json(directory / name) if (directory / name).is_file() else {}
                                   for name in ("added_tokens.json", "tokenizer_config.json", "tokenizer.json",
                                                "vocab.json"))
    try:
        named = list(added.items())
        named += [(token["content"], int(i)) for i, token in (config.get("added_tokens_decoder") or {}).items()]
        named += [(token["content"], token["id"]) for token in whole.get("added_tokens") or []]
        named += [*vocab.items(), *((whole.get("model") or {}).get("vocab") or {}).items()]
        special = list(map(_text, list.copy(config.get("additional_special_tokens") or [])))
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        raise CheckpointError(f"{directory}: the tokenizer's added tokens are not laid out as expected ({e!r})") from e
    if (directory / "tokenizer.model").is_file():
        named += load_tokenizer(directory).symbols.items()
    owners: dict[int, str] = {}
    for text, i in [*named, *((text, 0) for text in special)]:
        if type(text) is not str or type(i) is not int or i < 0:
            raise CheckpointError(f"{directory}: the tokenizer has an added token {text!r:.60} with the id {i!r:.60}; "
                                  "expected a text and its id")
    for text, i in named:
        if owners.setdefault(i, text) != text:
            raise CheckpointError(f"{directory}: the tokenizer gives the id {i} to {owners[i]!r} and to {text!r}")
        if text in ADDED_TEXT and found.setdefault(text, i) != i:
            raise CheckpointError(f"{directory}: the tokenizer gives {text} the ids {found[text]} and {i}")
    return found, max((i for text, i in named if text not in ADDED_TEXT), default=-1 if found else None)


def _text(token: Any) -> str:
    """Of a special token, which is listed as its text or as an object."""
    return token["content"] if isinstance(token, dict) else token


def _update(path: Path, change: Callable[[dict[str, Any]], None], create: bool = False) -> None:
    if path.is_file() or create:
        raw = read_json(path) if path.is_file() else {}
        change(raw)
        path.write_text(json.dumps(raw, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

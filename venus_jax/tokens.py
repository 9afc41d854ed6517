"""Text and token ids: the control tokens of the stream, found by their text, and the two kinds of tokenizer.

Byte-level BPE runs the published 9B files by the `tokenizers` library; sentencepiece serves small vocabularies. Both
answer to `Tokenizer`. Ids are rows of the backbone's embedding and head, so a tokenizer always knows how many rows the
model must have (`vocab_size`) and gives each of them a text.
"""

from __future__ import annotations

import abc
import dataclasses
import io
import itertools
import json
import math
import os
import re
import tempfile
import unicodedata
from pathlib import Path
from typing import Any, Iterable, Mapping, Sequence

from venus_jax.config import FRAME_HOP, SAMPLE_RATE
from venus_jax.errors import TokenizerError


def _token(text: str, published_id: int) -> int:
    return dataclasses.field(metadata={"text": text, "published_id": published_id})


@dataclasses.dataclass(frozen=True)
class ControlTokens:
    """Ids of the tokens that structure a stream. Each line names the token's text and its id in the published 9B.

    Hashable, hence usable as a static argument of jitted functions.
    """

    unk: int = _token("<unk>", 128_244)  # stands where an embedding of sound or picture goes
    endoftext: int = _token("<|endoftext|>", 151_643)
    im_start: int = _token("<|im_start|>", 151_644)
    im_end: int = _token("<|im_end|>", 151_645)
    image_start: int = _token("<image>", 151_669)
    image_end: int = _token("</image>", 151_670)
    slice_start: int = _token("<slice>", 151_679)
    slice_end: int = _token("</slice>", 151_680)
    image_id_start: int = _token("<image_id>", 151_681)
    image_id_end: int = _token("</image_id>", 151_682)
    unit_start: int = _token("<unit>", 151_683)
    unit_end: int = _token("</unit>", 151_684)
    audio_start: int = _token("<|audio_start|>", 151_697)
    audio_end: int = _token("<|audio_end|>", 151_699)
    spk_bos: int = _token("<|spk_bos|>", 151_700)
    spk_eos: int = _token("<|spk_eos|>", 151_702)
    tts_bos: int = _token("<|tts_bos|>", 151_703)
    tts_eos: int = _token("<|tts_eos|>", 151_704)
    listen: int = _token("<|listen|>", 151_705)
    speak: int = _token("<|speak|>", 151_706)
    turn_eos: int = _token("<|turn_eos|>", 151_717)
    chunk_eos: int = _token("<|chunk_eos|>", 151_718)
    chunk_tts_eos: int = _token("<|chunk_tts_eos|>", 151_721)
    tts_pad: int = _token("<|tts_pad|>", 151_722)
    delegate_start: int = _token("<delegate>", 151_748)
    delegate_end: int = _token("</delegate>", 151_749)
    backend_start: int = _token("<backend>", 151_750)
    backend_end: int = _token("</backend>", 151_751)


CONTROL_TEXT: dict[str, str] = {f.name: f.metadata["text"] for f in dataclasses.fields(ControlTokens)}
PUBLISHED_CONTROL = ControlTokens(**{f.name: f.metadata["published_id"] for f in dataclasses.fields(ControlTokens)})

# Realtime-Venus adds these to MiniCPM-o 4.5; where a vocabulary lacks them they become its next ids, in this order.
ADDED_TEXT = tuple(CONTROL_TEXT[n] for n in ("delegate_start", "delegate_end", "backend_start", "backend_end"))

# The protocol's own twelve tokens: text that comes from outside the model must hold none of them.
RESERVED_TEXT = tuple(CONTROL_TEXT[n] for n in (
    "speak", "listen", "turn_eos", "chunk_eos", "unit_start", "unit_end", "image_start", "image_end")) + ADDED_TEXT

# Qwen2's pre-tokenizer: contractions, words with one leading mark, single digits, punctuation, line ends, blanks.
_QWEN2_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


class Tokenizer(abc.ABC):
    """Text <-> ids. Made by `load_tokenizer` or `train_sentencepiece`; never changes afterwards.

    Attributes:
      vocab_size: rows the model's embedding and head must have; every id is below it and has a text.
      base_size: ids below it are the tokenizer's own pieces, the others are added tokens.
      pieces: the bytes each id stands for, `vocab_size` of them.
      symbols: text -> id of the tokens matched as a whole before ordinary text is tokenized.
      control: ids of the control tokens.
      special_ids: what `decode(ids, skip_special=True)` leaves out.
      named_special_ids: ids that the tokenizer's configuration names one by one. This is the reference's
        `all_special_ids`, by which its context window filters; unlike `special_ids` it misses `<|turn_eos|>`.
      bad_token_ids: ids that speech may not contain: the list stored with the tokenizer, else `bad_token_ids(self)`.
    """

    bad_token_ids: tuple[int, ...]
    named_special_ids: frozenset[int]

    def __init__(self, base: Sequence[bytes], symbols: Mapping[str, int], plain: Iterable[str],
                 vocab_size: int | None, source: Path):
        """`symbols` that are not `plain` are special; `vocab_size` as in `load_tokenizer`."""
        symbols = dict(symbols)
        for text, i in symbols.items():
            if not text or not isinstance(i, int) or i < 0:
                raise TokenizerError(f"{source}: added token {text!r} with id {i!r}; expected a text and its id")
        for text in CONTROL_TEXT.values():
            if text not in symbols and text not in ADDED_TEXT:
                raise TokenizerError(f"{source}: no token {text!r}; a vocabulary needs every control token")
        self.base_size = len(base)
        self.vocab_size = _place_added_tokens(symbols, len(base), vocab_size, source)
        pieces: list[bytes | None] = [*base, *[None] * (self.vocab_size - len(base))]
        for text, i in symbols.items():
            if pieces[i] not in (None, text.encode()):
                raise TokenizerError(f"{source}: id {i} is both {pieces[i].decode(errors='replace')!r} and {text!r}")
            pieces[i] = text.encode()
        for i, piece in enumerate(pieces):  # rows of the model's table that no file names
            if piece is None:
                symbols[f"<|unused_{i}|>"] = i
                pieces[i] = f"<|unused_{i}|>".encode()
        self.symbols = symbols
        self.pieces = tuple(pieces)
        self.special_ids = frozenset(symbols.values()) - {symbols[text] for text in plain}
        self.control = ControlTokens(**{name: symbols[text] for name, text in CONTROL_TEXT.items()})
        self._symbol = re.compile(f"({'|'.join(map(re.escape, sorted(symbols, key=len, reverse=True)))})")

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Ids of `text`, nothing put before or after. `decode` gives its Unicode normal form C back.

        Args:
          text: any Unicode text.
          special: whether the text of a control or other added token becomes that token. False reads all of it as
            ordinary characters: for words that come from outside and must not steer the stream.

        Raises:
          TokenizerError: half of a surrogate pair, which no encoding of text can hold.
        """
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise TokenizerError(f"text is not valid Unicode: {e}") from e
        if not special:
            return self._encode_text(text)
        ids = []
        for n, part in enumerate(self._symbol.split(text)):
            ids += [self.symbols[part]] if n % 2 else self._encode_text(part)
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD. `skip_special` leaves `special_ids` out.

        Raises:
          TokenizerError: an id outside `range(vocab_size)`.
        """
        ids = [int(i) for i in ids]
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise TokenizerError(f"token id {i} is not in 0..{self.vocab_size - 1}")
        kept = (self.pieces[i] for i in ids if not (skip_special and i in self.special_ids))
        return b"".join(kept).decode(errors="replace")

    def save(self, directory: str | os.PathLike) -> None:
        """Writes the files from which `load_tokenizer(directory)` makes this tokenizer again."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as scratch:  # a failure leaves the old files as they were
            self._write(Path(scratch))
            for path in Path(scratch).iterdir():
                os.replace(path, directory / path.name)

    @abc.abstractmethod
    def _encode_text(self, text: str) -> list[int]:
        """Ids of text in which no symbol is recognised."""

    @abc.abstractmethod
    def _write(self, directory: Path) -> None:
        """Writes the files of this kind into an empty directory."""


def load_tokenizer(directory: str | os.PathLike, vocab_size: int | None = None) -> Tokenizer:
    """Loads the tokenizer stored in a checkpoint directory, published or ours.

    The four tokens `ADDED_TEXT` are found by their text. Where the files lack them they become special tokens: the next
    ids, if the model's table has rows for them, and otherwise the ids that follow its rows, so that row i of the grown
    table is token i. Rows no token belongs to are called `<|unused_i|>`. The published files have 151,748 ids, the four
    become 151748-151751, and `vocab_size` of the result, 151,752, is what a table of 151,748 rows has to grow to.

    Args:
      directory: holds `tokenizer_config.json` and either `tokenizer.json` or `vocab.json` with `merges.txt` (byte-level
        BPE), or `tokenizer.model` (sentencepiece).
      vocab_size: rows of the model's embedding table as stored; None: as many as the files have ids.

    Raises:
      TokenizerError: files missing, unreadable or contradicting each other; ids beyond the model's rows; some of the
        four tokens but not all, or at ids that neither lie within the rows nor follow them; no such control token.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise TokenizerError(f"{directory}: no such directory; expected one with tokenizer files")
    if (directory / "tokenizer.json").exists() or (directory / "vocab.json").exists():
        tokenizer = _BPETokenizer.load(directory, vocab_size)
    elif (directory / "tokenizer.model").exists():
        tokenizer = _SentencePieceTokenizer.load(directory, vocab_size)
    else:
        raise TokenizerError(f"{directory}: no tokenizer; expected tokenizer.json, vocab.json or tokenizer.model")
    text = "a  é\n"
    if (back := tokenizer.decode(tokenizer.encode(text))) != text:
        raise TokenizerError(f"{directory}: {text!r} comes back as {back!r}; expected a tokenizer that keeps text")
    return tokenizer


def _place_added_tokens(symbols: dict[str, int], base_size: int, vocab_size: int | None, source: Path) -> int:
    """Finds the four added tokens or appends them to `symbols`; returns the rows the model must have."""
    own = sorted(symbols[text] for text in ADDED_TEXT if text in symbols)
    last = max([base_size - 1, *(i for text, i in symbols.items() if text not in ADDED_TEXT)])
    if vocab_size is None:
        vocab_size = max([last, *own]) + 1
        if vocab_size > base_size + len(symbols):
            raise TokenizerError(f"{source}: ids up to {vocab_size - 1} for {base_size + len(symbols)} tokens")
    if last >= vocab_size:
        raise TokenizerError(f"{source}: the tokenizer has ids up to {last}, the model only {vocab_size} rows")
    following = list(range(vocab_size, vocab_size + len(ADDED_TEXT)))
    if not own and last + len(ADDED_TEXT) < vocab_size:  # the table has rows to spare: they take the first of them
        symbols.update(zip(ADDED_TEXT, range(last + 1, vocab_size)))
        return vocab_size
    if not own:
        symbols.update(zip(ADDED_TEXT, following))
        return vocab_size + len(ADDED_TEXT)
    if len(own) < len(ADDED_TEXT):
        raise TokenizerError(f"{source}: only {len(own)} of {', '.join(ADDED_TEXT)} are present; expected all or none")
    if own == following:
        return vocab_size + len(ADDED_TEXT)
    if own[-1] < vocab_size:
        return vocab_size
    raise TokenizerError(f"{source}: {', '.join(ADDED_TEXT)} have ids {own}; expected them below the model's "
                         f"{vocab_size} rows, or {following}")


# --- byte-level BPE -------------------------------------------------------------------------------------------------
class _BPETokenizer(Tokenizer):
    """The library tokenizes ordinary text; symbols are cut out of the raw text before, as in the reference."""

    def __init__(self, bpe, symbols: Mapping[str, int], plain: Iterable[str], config: dict[str, Any],
                 vocab_size: int | None, source: Path):
        if symbols.keys().isdisjoint(ADDED_TEXT):
            named = config.get("additional_special_tokens") or []
            config = {**config, "additional_special_tokens": [*named, *ADDED_TEXT]}
        super().__init__(_base_pieces(bpe, source), symbols, plain, vocab_size, source)
        self._bpe, self._config = bpe, config
        self.named_special_ids = frozenset(self.symbols[t] for t in _named_special(config) if t in self.symbols)
        bad = config.get("bad_token_ids")
        if bad is None:
            bad = bad_token_ids(self)
        elif not isinstance(bad, list) or not all(isinstance(i, int) and 0 <= i < self.vocab_size for i in bad):
            raise TokenizerError(f"{source / 'tokenizer_config.json'}: bad_token_ids is not a list of ids")
        self.bad_token_ids = tuple(bad)

    @classmethod
    def load(cls, directory: Path, vocab_size: int | None) -> _BPETokenizer:
        config = _read_json(directory / "tokenizer_config.json")
        has_whole = (directory / "tokenizer.json").exists()
        bpe = _bpe_of_tokenizer_json(directory) if has_whole else _bpe_of_vocab_and_merges(directory)
        whole = _read_json(directory / "tokenizer.json", optional=True)
        listed = _read_json(directory / "added_tokens.json", optional=True)
        symbols, plain = {}, set()
        try:
            named = _named_special(config)
            # The configuration comes last because it has the last word on what is special.
            declared = [("added_tokens.json", i, {"content": t, "special": t in named}) for t, i in listed.items()]
            declared += [("tokenizer.json", token["id"], token) for token in whole.get("added_tokens", [])]
            declared += [("tokenizer_config.json", int(i), token)
                         for i, token in config.get("added_tokens_decoder", {}).items()]
            for file, i, token in declared:
                text = token["content"]
                if any(token.get(flag) for flag in ("lstrip", "rstrip", "single_word")):
                    raise TokenizerError(f"{directory / file}: {text!r} takes its surroundings into account "
                                         "(lstrip, rstrip or single_word); that is not supported")
                base_id = bpe.token_to_id(text)
                if symbols.setdefault(text, i if base_id is None else base_id) != i:
                    raise TokenizerError(f"{directory / file}: {text!r} has id {i}, elsewhere {symbols[text]}")
                (plain.discard if token.get("special") else plain.add)(text)
        except (AttributeError, KeyError, TypeError, ValueError) as e:
            raise TokenizerError(f"{directory}: added tokens are not laid out as expected ({e!r})") from e
        return cls(bpe, symbols, plain, config, vocab_size, directory)

    def _encode_text(self, text: str) -> list[int]:
        return self._bpe.encode(text, add_special_tokens=False).ids

    def _write(self, directory: Path) -> None:
        import tokenizers

        def flags(text: str) -> dict[str, bool]:
            return dict(special=self.symbols[text] in self.special_ids, normalized=False, lstrip=False, rstrip=False,
                        single_word=False)

        texts = sorted(self.symbols, key=self.symbols.get)
        whole = _ordinary_text_only(self._bpe)
        whole.add_tokens([tokenizers.AddedToken(text, **flags(text)) for text in texts])
        whole.save(str(directory / "tokenizer.json"))
        whole.model.save(str(directory))  # vocab.json and merges.txt
        added = {text: self.symbols[text] for text in texts if self.symbols[text] >= self.base_size}
        _write_json(directory / "added_tokens.json", added)
        decoder = {self.symbols[text]: {"content": text, **flags(text)} for text in texts}
        _write_json(directory / "tokenizer_config.json", {**self._config, "added_tokens_decoder": decoder})


def _byte_characters() -> str:
    """The character that stands for each byte in byte-level BPE files: itself if printable, else 256, 257, ..."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = itertools.count(256)
    return "".join(chr(byte if byte in printable else next(spare)) for byte in range(256))


def _base_pieces(bpe, source: Path) -> list[bytes]:
    """The bytes of each id of the base vocabulary."""
    vocab = bpe.get_vocab(with_added_tokens=False)
    characters = _byte_characters()
    for byte, character in enumerate(characters):
        if character not in vocab:  # the library would drop that byte from texts without a word
            raise TokenizerError(f"{source}: not a byte-level vocabulary; it has no piece for byte {byte}")
    if sorted(vocab.values()) != list(range(len(vocab))):
        raise TokenizerError(f"{source}: the ids of the base vocabulary are not 0..{len(vocab) - 1} once each")
    to_byte = {ord(character): byte for byte, character in enumerate(characters)}
    try:
        return [piece.translate(to_byte).encode("latin-1") for piece in sorted(vocab, key=vocab.get)]
    except UnicodeEncodeError as e:
        raise TokenizerError(f"{source}: a piece is not written in byte-level characters ({e})") from e


def _named_special(config: Mapping[str, Any]) -> set[str]:
    tokens = [config.get(f"{role}_token") for role in ("bos", "eos", "pad", "unk")]
    tokens += config.get("additional_special_tokens") or []
    return {token["content"] if isinstance(token, Mapping) else token for token in tokens if token}


def _bpe_of_tokenizer_json(directory: Path):
    import tokenizers

    path = directory / "tokenizer.json"
    try:
        whole = tokenizers.Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises nothing more specific
        raise TokenizerError(f"{path}: {e}") from e
    if not isinstance(whole.model, tokenizers.models.BPE):
        raise TokenizerError(f"{path}: a {type(whole.model).__name__} tokenizer; expected byte-level BPE")
    return _ordinary_text_only(whole)


def _ordinary_text_only(whole):
    """A tokenizer that shares the model of `whole` but has no added tokens."""
    bpe = type(whole)(whole.model)
    bpe.normalizer, bpe.pre_tokenizer, bpe.decoder = whole.normalizer, whole.pre_tokenizer, whole.decoder
    return bpe


def _bpe_of_vocab_and_merges(directory: Path):
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    vocab = _read_json(directory / "vocab.json")
    for piece, i in vocab.items():
        if not isinstance(i, int) or not 0 <= i < len(vocab):
            raise TokenizerError(f"{directory / 'vocab.json'}: {piece!r} has id {i!r}; expected 0..{len(vocab) - 1}")
    path = directory / "merges.txt"
    lines = _read_text(path).rstrip("\n").split("\n")
    merges = []
    for number, line in enumerate(lines, 1):
        if number == 1 and line.startswith("#version"):
            continue
        pair = tuple(line.split(" "))
        if len(pair) != 2:
            raise TokenizerError(f"{path}: line {number} is {line!r}; expected two pieces")
        for piece in (*pair, "".join(pair)):
            if piece not in vocab:
                raise TokenizerError(f"{path}: line {number} needs {piece!r}, which vocab.json lacks")
        merges.append(pair)
    bpe = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(_QWEN2_SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    bpe.decoder = decoders.ByteLevel()
    return bpe


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise TokenizerError(f"{path}: cannot be read ({e})") from e


def _read_json(path: Path, optional: bool = False) -> dict[str, Any]:
    if optional and not path.exists():
        return {}
    try:
        raw = json.loads(_read_text(path))
    except json.JSONDecodeError as e:
        raise TokenizerError(f"{path}: not valid JSON ({e})") from e
    if not isinstance(raw, dict):
        raise TokenizerError(f"{path}: expected a JSON object, got {type(raw).__name__}")
    return raw


def _write_json(path: Path, value: Mapping) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


# --- sentencepiece --------------------------------------------------------------------------------------------------
_BLANK = "\u2581"  # how sentencepiece writes a space


class _SentencePieceTokenizer(Tokenizer):
    """A model with byte fallback. Control tokens are user-defined pieces of it, or listed in `added_tokens.json`."""

    def __init__(self, model, added: Mapping[str, int], vocab_size: int | None, source: Path):
        texts = [model.id_to_piece(i) for i in range(model.get_piece_size())]
        byte_ids = {int(text[1:-1], 16): i for i, text in enumerate(texts) if model.is_byte(i)}
        if len(byte_ids) != 256:
            raise TokenizerError(f"{source}: no byte fallback; expected a model made by train_sentencepiece")
        base = [text.replace(_BLANK, " ").encode() for text in texts]
        for byte, i in byte_ids.items():
            base[i] = bytes([byte])
        own = {text: i for i, text in enumerate(texts) if text in CONTROL_TEXT.values()}
        if twice := sorted(own.keys() & added.keys()):
            raise TokenizerError(f"{source}: {twice[0]!r} is a piece of the model and in added_tokens.json")
        super().__init__(base, {**own, **added}, (), vocab_size, source)
        self._model = model
        self._blank_ids = [byte_ids[byte] for byte in _BLANK.encode()]
        # The library would find user-defined pieces by itself and take a literal U+2581 for a space: cut them apart.
        self._cut = re.compile(f"({_BLANK})|(?<=<)(?={'|'.join(re.escape(text[1:]) for text in own)})")
        self.named_special_ids = self.special_ids
        self.bad_token_ids = bad_token_ids(self)

    @classmethod
    def load(cls, directory: Path, vocab_size: int | None) -> _SentencePieceTokenizer:
        import sentencepiece

        path = directory / "tokenizer.model"
        try:
            model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as e:
            raise TokenizerError(f"{path}: not a sentencepiece model ({e})") from e
        return cls(model, _read_json(directory / "added_tokens.json", optional=True), vocab_size, path)

    def _encode_text(self, text: str) -> list[int]:
        ids = []
        for part in filter(None, self._cut.split(unicodedata.normalize("NFC", text))):
            ids += self._blank_ids if part == _BLANK else self._model.encode(part)
        return ids

    def _write(self, directory: Path) -> None:
        (directory / "tokenizer.model").write_bytes(self._model.serialized_model_proto())
        added = {text: i for text, i in self.symbols.items() if i >= self.base_size}
        _write_json(directory / "added_tokens.json", added)


def train_sentencepiece(texts: Iterable[str], vocab_size: int, directory: str | os.PathLike, *,
                        character_coverage: float = 0.9995) -> Tokenizer:
    """Makes a small vocabulary from `texts`, writes it to `directory` and returns it.

    Ids: 0 `<unk>`, then the control tokens in the order of `ControlTokens`, the 256 bytes, then pieces by byte-pair
    merges. Digits stand alone and spaces are kept as they are. Equal texts give equal files.

    Args:
      texts: read once; line by line, each line in normal form C.
      vocab_size: ids in all.
      character_coverage: share of the characters in `texts` that get a piece; the others are spelt in bytes.

    Raises:
      TokenizerError: no text, or too little for so large a vocabulary, or a vocabulary too small for the characters.
    """
    import sentencepiece

    model = io.BytesIO()
    lines = (line for text in texts for line in unicodedata.normalize("NFC", text).splitlines() if line.strip())
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines, model_writer=model, vocab_size=vocab_size, model_type="bpe", byte_fallback=True,
            user_defined_symbols=[text for name, text in CONTROL_TEXT.items() if name != "unk"],
            unk_piece=CONTROL_TEXT["unk"], unk_id=0, bos_id=-1, eos_id=-1, pad_id=-1, split_digits=True,
            normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False,
            character_coverage=character_coverage, max_sentence_length=1 << 20, num_threads=1, minloglevel=2)
    except RuntimeError as e:
        reason = str(e).rpartition("] ")[2].strip() or "there is no text"
        raise TokenizerError(f"cannot make a vocabulary of {vocab_size}: {reason}") from e
    tokenizer = _SentencePieceTokenizer(
        sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()), {}, vocab_size, Path(directory))
    tokenizer.save(directory)
    return tokenizer


# --- rules ----------------------------------------------------------------------------------------------------------
# Beyond characters: tokens of the published vocabulary that its authors also bar, for every vocabulary by their text.
_BAD_CHARACTERS = "()\n\r\ufffd"
_BAD_TEXT = frozenset({"（", "）", " （", "）、", "）。", "），", "。（", "（笑", "，请", "，默认", "，并", "，则", "，在"})


def bad_token_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that speech may not contain, by the rule behind the published list (its 6,965 ids exactly).

    Pieces that are not whole UTF-8, or hold a parenthesis, a line end or U+FFFD, or are one of thirteen texts.
    """
    def bad(piece: bytes) -> bool:
        try:
            text = piece.decode()
        except UnicodeDecodeError:
            return True
        return text in _BAD_TEXT or any(character in text for character in _BAD_CHARACTERS)

    return tuple(i for i, piece in enumerate(tokenizer.pieces[:tokenizer.base_size]) if bad(piece))


def strip_reserved(text: str) -> str:
    """`text` without any of `RESERVED_TEXT`, those included that only form once others are taken out."""
    kept = ""
    for part in re.split("(?<=>)", text):  # a token is complete at its ">" and only there
        kept += part
        for token in RESERVED_TEXT:
            kept = kept.removesuffix(token)
    return kept


def audio_token_count(num_samples: int, pool_step: int = 5) -> int:
    """Embeddings that the audio path makes of `num_samples` at 16 kHz, about ten a second."""
    frames = math.ceil(num_samples / FRAME_HOP)
    return ((frames - 1) // 2 + 1 - pool_step) // pool_step + 1


def audio_placeholder(num_samples: int, stream_input: bool = True, pool_step: int = 5) -> str:
    """Text whose `<unk>` tokens the embeddings of a clip replace; `stream_input` brackets every second by itself."""
    count, second = audio_token_count(num_samples, pool_step), audio_token_count(SAMPLE_RATE, pool_step)
    sizes = [min(second, count - start) for start in range(0, count, second)] if stream_input else [count]
    start, unk, end = (CONTROL_TEXT[name] for name in ("audio_start", "unk", "audio_end"))
    return "".join(start + unk * size + end for size in sizes)


def image_placeholder(num_queries: int, grid: tuple[int, int] | None = None, image_id: int | None = None,
                      row_separator: str = "\n") -> str:
    """Text whose `<unk>` tokens the embeddings of a picture replace.

    Args:
      num_queries: embeddings a slice.
      grid: columns and rows the picture was cut into besides the whole of it; None where it was not cut.
      image_id: number written in front, in chat.
      row_separator: between rows of slices: a line end in chat, nothing in a duplex unit.
    """
    text = CONTROL_TEXT
    number = "" if image_id is None else f"{text['image_id_start']}{image_id}{text['image_id_end']}"
    whole = text["image_start"] + text["unk"] * num_queries + text["image_end"]
    columns, rows = grid or (0, 0)
    row = (text["slice_start"] + text["unk"] * num_queries + text["slice_end"]) * columns
    return number + whole + row_separator.join([row] * rows)

import dataclasses
import hashlib
import json
import pickle
import re
import shutil
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings, strategies as st

from venus_jax.errors import TokenizerError
from venus_jax.tokens import (ADDED_TEXT, CONTROL_TEXT, PUBLISHED_CONTROL, RESERVED_TEXT, Tokenizer, audio_placeholder,
                              audio_token_count, bad_token_ids, image_placeholder, load_tokenizer, strip_reserved,
                              train_sentencepiece)

BPE_FILES = Path(__file__).parent / "golden" / "checkpoint"
ROWS = json.loads((BPE_FILES / "config.json").read_text())["vocab_size"]
CASES = json.loads((BPE_FILES / "tokenizer_cases.json").read_text())
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json", "tokenizer_config.json")
CORPUS = [f"What is {n} plus {n + 1}?\nThe café on the corner opens at {n} o'clock, {n % 7} days a week.\n数字"
          for n in range(300)]


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return load_tokenizer(BPE_FILES, ROWS)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory) -> Tokenizer:
    return train_sentencepiece(CORPUS, 400, tmp_path_factory.mktemp("sentencepiece"))


@pytest.fixture(scope="module")
def official(official_tokenizer) -> Tokenizer:
    return load_tokenizer(official_tokenizer, 151_748)


@pytest.fixture
def files(tmp_path) -> Path:
    """A writable copy of the small BPE tokenizer."""
    for name in TOKENIZER_FILES:
        shutil.copy(BPE_FILES / name, tmp_path)
    return tmp_path


def edit_json(path: Path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def assert_same(a: Tokenizer, b: Tokenizer):
    for name in ("vocab_size", "base_size", "pieces", "symbols", "control", "special_ids", "named_special_ids",
                 "bad_token_ids"):
        assert getattr(a, name) == getattr(b, name), name
    text = "Hello  <unit>wörld<|listen|> 123 数字\n"
    assert a.encode(text) == b.encode(text)


# --- the recorded fixture -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("with_tokenizer_json", [True, False])
def test_recorded_cases(files, with_tokenizer_json):
    if not with_tokenizer_json:
        (files / "tokenizer.json").unlink()
    tokenizer = load_tokenizer(files, ROWS)
    for case in CASES["cases"]:
        assert tokenizer.encode(case["text"]) == case["ids"]
    for case in CASES["cases"] + CASES["decode_cases"]:
        assert tokenizer.decode(case["ids"]) == case["decoded"]
        assert tokenizer.decode(case["ids"], skip_special=True) == case["decoded_skip"]
    assert tokenizer.bad_token_ids == tuple(CASES["bad_token_ids"])
    for text, i in CASES["special_ids"].items():
        assert tokenizer.encode(text) == [i] and i in tokenizer.special_ids
    added = set(tokenizer.encode("".join(ADDED_TEXT)))
    assert tokenizer.named_special_ids == set(CASES["all_special_ids"]) | added
    assert tokenizer.encode("<|turn_eos|>")[0] in tokenizer.special_ids - tokenizer.named_special_ids


def test_control_tokens_are_found_by_their_text(bpe):
    for name, text in CONTROL_TEXT.items():
        assert bpe.encode(text) == [getattr(bpe.control, name)]
        assert bpe.decode([getattr(bpe.control, name)]) == text
    assert hash(bpe.control) == hash(dataclasses.replace(bpe.control)), "a jitted function takes it as static"


def test_thinking_tokens_are_matched_whole_but_not_special(bpe):
    ids = bpe.encode("<think>a</think>")
    assert len(ids) == 3 and bpe.decode(ids, skip_special=True) == "<think>a</think>"


mixed_text = st.lists(st.one_of(
    st.sampled_from([*CONTROL_TEXT.values(), "<think>", "<|timbre_7|>", "\u2581", "<", "|>", " ", "\n", "'s", " 12",
                     "e\u0301", "<0x0A>", "\0", "\u2585"]), st.text(max_size=8)), max_size=8).map("".join)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=mixed_text)
def test_text_comes_back_in_normal_form(bpe, pieces, text):
    for tokenizer in (bpe, pieces):
        outside = tokenizer.encode(text, special=False)
        assert tokenizer.decode(outside) == nfc(text)
        assert not tokenizer.special_ids.intersection(outside), "words from outside became a control token"
        assert nfc(tokenizer.decode(tokenizer.encode(text))) == nfc(text)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=mixed_text, ids=st.lists(st.integers(0, ROWS - 1), max_size=16))
def test_agrees_with_the_library_on_any_text_and_ids(bpe, text, ids):
    # The library itself, added tokens included, is what the reference runs.
    whole = tokenizers.Tokenizer.from_file(str(BPE_FILES / "tokenizer.json"))
    whole.add_special_tokens(list(ADDED_TEXT))
    assert bpe.encode(text) == whole.encode(text, add_special_tokens=False).ids
    for skip in (False, True):
        assert bpe.decode(ids, skip_special=skip) == whole.decode(ids, skip_special_tokens=skip)


def test_text_and_ids_that_are_none(bpe):
    with pytest.raises(TokenizerError, match="not valid Unicode"):
        bpe.encode("half \ud83d")
    for i in (-1, bpe.vocab_size):
        with pytest.raises(TokenizerError, match=f"{i} is not in 0..{bpe.vocab_size - 1}"):
            bpe.decode([0, i])


# --- the four added tokens and the model's rows ---------------------------------------------------------------------
def test_missing_added_tokens_follow_the_models_rows(bpe):
    assert bpe.vocab_size == ROWS + 4
    assert bpe.encode("".join(ADDED_TEXT)) == [ROWS, ROWS + 1, ROWS + 2, ROWS + 3]
    assert bpe.decode([ROWS, 0, ROWS + 3], skip_special=True) == bpe.decode([0])
    assert load_tokenizer(BPE_FILES).vocab_size == ROWS + 4


@pytest.mark.parametrize("kind", ["bpe", "pieces"])
def test_a_table_with_spare_rows(kind, pieces, tmp_path):
    if kind == "bpe":  # the four take the first spare rows
        rows = ROWS + 14
        grown = load_tokenizer(BPE_FILES, rows)
        assert grown.encode("".join(ADDED_TEXT)) == [ROWS, ROWS + 1, ROWS + 2, ROWS + 3]
        assert grown.vocab_size == rows
    else:  # the four are there already
        pieces.save(tmp_path)
        rows = pieces.vocab_size + 10
        grown = load_tokenizer(tmp_path, rows)
        assert grown.control == pieces.control and grown.vocab_size == rows
    spare = grown.decode(range(rows - 10, rows))
    assert spare.startswith(f"<|unused_{rows - 10}|>") and grown.encode(spare) == list(range(rows - 10, rows))
    grown.save(tmp_path)
    assert_same(load_tokenizer(tmp_path), grown)
    assert_same(load_tokenizer(tmp_path, grown.vocab_size), grown)


def test_a_table_with_too_few_spare_rows_grows():
    grown = load_tokenizer(BPE_FILES, ROWS + 3)
    assert grown.encode("".join(ADDED_TEXT)) == list(range(ROWS + 3, ROWS + 7)) and grown.vocab_size == ROWS + 7
    assert grown.decode([ROWS]) == f"<|unused_{ROWS}|>"


def test_a_grown_tokenizer_fits_the_table_before_and_after_it_grows(bpe, tmp_path):
    bpe.save(tmp_path)
    for rows in (ROWS, ROWS + 4, None):
        assert_same(load_tokenizer(tmp_path, rows), bpe)
    with pytest.raises(TokenizerError, match="<delegate>.*have ids"):
        load_tokenizer(tmp_path, ROWS + 1)
    with pytest.raises(TokenizerError, match=f"ids up to {ROWS - 1}, the model only {ROWS - 1} rows"):
        load_tokenizer(tmp_path, ROWS - 1)


def test_added_tokens_in_another_order_are_found_by_their_text(files):
    edit_json(files / "added_tokens.json", **{text: ROWS + i for i, text in enumerate(reversed(ADDED_TEXT))})
    edit_json(files / "tokenizer_config.json", additional_special_tokens=list(ADDED_TEXT))
    tokenizer = load_tokenizer(files, ROWS + 4)
    assert tokenizer.control.delegate_start == ROWS + 3 and tokenizer.control.backend_end == ROWS
    assert tokenizer.vocab_size == ROWS + 4 and tokenizer.control.delegate_start in tokenizer.special_ids


def test_some_of_the_four_are_refused(files):
    edit_json(files / "added_tokens.json", **{ADDED_TEXT[0]: ROWS})
    with pytest.raises(TokenizerError, match="only 1 of <delegate>"):
        load_tokenizer(files)


# --- saving ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["bpe", "pieces"])
def test_saved_files_make_the_same_tokenizer(kind, bpe, pieces, tmp_path):
    tokenizer = {"bpe": bpe, "pieces": pieces}[kind]
    tokenizer.save(tmp_path / "a")
    again = load_tokenizer(tmp_path / "a")
    assert_same(again, tokenizer)
    again.save(tmp_path / "b")
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "b").iterdir())
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in names)
    assert_same(pickle.loads(pickle.dumps(tokenizer)), tokenizer)  # data workers get copies


def test_saved_files_work_for_readers_that_know_only_hugging_face(bpe, tmp_path):
    bpe.save(tmp_path)
    whole = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "a <delegate>b</delegate><think>"
    assert whole.encode(text).ids == bpe.encode(text)
    (tmp_path / "tokenizer.json").unlink()  # vocabulary, merges and added tokens say the same
    assert_same(load_tokenizer(tmp_path), bpe)


def test_a_failed_save_leaves_the_old_files(bpe, tmp_path, monkeypatch):
    bpe.save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr("venus_jax.tokens._write_json", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        bpe.save(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


# --- bad files ------------------------------------------------------------------------------------------------------
def replace_line(path: Path, number: int, line: str):
    lines = path.read_text().split("\n")
    lines[number - 1] = line
    path.write_text("\n".join(lines))


def drop_byte(d: Path):
    vocab = json.loads((d / "vocab.json").read_text())
    (d / "merges.txt").write_text("#version: 0.2\n")
    (d / "vocab.json").write_text(json.dumps({{"!": "!!"}.get(text, text): i for text, i in vocab.items()}))


def drop_control(d: Path):
    (d / "added_tokens.json").unlink()
    config = json.loads((d / "tokenizer_config.json").read_text())
    del config["added_tokens_decoder"]["383"]
    (d / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("break_it, message", [
    (lambda d: shutil.rmtree(d), "no such directory"),
    (lambda d: [path.unlink() for path in d.iterdir()], "expected tokenizer.json, vocab.json or tokenizer.model"),
    (lambda d: (d / "vocab.json").unlink(), "expected tokenizer.json, vocab.json or tokenizer.model"),
    (lambda d: (d / "merges.txt").unlink(), r"merges\.txt: cannot be read"),
    (lambda d: (d / "tokenizer_config.json").unlink(), r"tokenizer_config\.json: cannot be read"),
    (lambda d: (d / "vocab.json").write_text('{"a": 0,'), r"vocab\.json: not valid JSON"),
    (lambda d: (d / "vocab.json").write_text("[1]"), r"vocab\.json: expected a JSON object, got list"),
    (lambda d: (d / "vocab.json").write_bytes(b'{"\xff": 0}'), r"vocab\.json: cannot be read"),
    (lambda d: edit_json(d / "vocab.json", a="zero"), r"vocab\.json: 'a' has id 'zero'; expected 0\.\.319"),
    (lambda d: edit_json(d / "vocab.json", zz=999), r"vocab\.json: 'zz' has id 999; expected 0\.\.320"),
    (lambda d: edit_json(d / "vocab.json", zz=0), r"not 0\.\.320 once each"),
    (lambda d: edit_json(d / "vocab.json", 字=320), "not written in byte-level characters"),
    (drop_byte, "no piece for byte 33"),
    (lambda d: replace_line(d / "merges.txt", 3, "q z"), r"merges\.txt: line 3 needs 'qz', which vocab\.json lacks"),
    (lambda d: replace_line(d / "merges.txt", 3, "語 i"), r"merges\.txt: line 3 needs '語', which vocab\.json lacks"),
    (lambda d: replace_line(d / "merges.txt", 3, "three words here"), "line 3 is 'three words here'; expected two"),
    (lambda d: edit_json(d / "added_tokens.json", **{"<unit>": 5}), "'<unit>' has id 361, elsewhere 5"),
    (lambda d: edit_json(d / "added_tokens.json", **{"<other>": 361}), "id 361 is both '<unit>' and '<other>'"),
    (lambda d: edit_json(d / "added_tokens.json", **{"<other>": 5}), "id 5 is both '&' and '<other>'"),
    (lambda d: edit_json(d / "added_tokens.json", **{"<other>": "5"}), "'<other>' with id '5'"),
    (lambda d: edit_json(d / "added_tokens.json", **{"<other>": 10**12}), "ids up to 1000000000000 for 427 tokens"),
    (lambda d: edit_json(d / "tokenizer_config.json", added_tokens_decoder={"x": 1}), "not laid out as expected"),
    (lambda d: edit_json(d / "tokenizer_config.json",
                         added_tokens_decoder={"361": {"content": "<unit>", "lstrip": True}}),
     "'<unit>' takes its surroundings into account"),
    (lambda d: edit_json(d / "tokenizer_config.json", bad_token_ids=[0, "1"]), "bad_token_ids is not a list of ids"),
    (lambda d: edit_json(d / "tokenizer_config.json", bad_token_ids=[ROWS + 4]), "bad_token_ids is not a list of ids"),
    (drop_control, re.escape("no token '<|listen|>'")),
    (lambda d: (d / "tokenizer.json").write_text("{}"), r"tokenizer\.json"),
    (lambda d: (d / "tokenizer.json").write_text('{"version": "1.0"}'), r"tokenizer\.json: "),
    (lambda d: edit_json(d / "tokenizer.json", model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}),
     r"tokenizer\.json: a WordLevel tokenizer; expected byte-level BPE"),
    (lambda d: edit_json(d / "tokenizer.json", pre_tokenizer=None), "expected a tokenizer that keeps text"),
])
def test_broken_files_are_named(files, break_it, message):
    """`tokenizer.json` is left out unless the case writes it: then the other files are what counts."""
    original = (files / "tokenizer.json").read_bytes()
    break_it(files)
    if (files / "tokenizer.json").is_file() and (files / "tokenizer.json").read_bytes() == original:
        (files / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=message) as error:
        load_tokenizer(files)
    assert str(files) in str(error.value) and "\n" not in str(error.value)


# --- the published vocabulary ---------------------------------------------------------------------------------------
def test_published_ids(official):
    assert official.vocab_size == 151_752 and official.control == PUBLISHED_CONTROL
    assert official.encode("你好") == [56568, 52801]  # the merges between Chinese characters were taken out
    assert official.encode("<|im_start|>system\nStreaming Omni Conversation.\n<|audio_start|>") == [
        151644, 8948, 198, 76509, 85225, 50830, 624, 151697]
    assert official.encode("<|audio_end|><|im_end|>") == [151699, 151645]
    assert official.encode("\n\nprevious: ") == [271, 19702, 25, 220]
    assert official.encode("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n<|tts_bos|>") == [
        151645, 198, 151644, 77091, 198, 151667, 271, 151668, 271, 151703]
    assert official.encode("<|im_start|>user\n") == [151644, 872, 198]
    assert official.encode("<unk>") == [128_244] and 128_244 not in official.encode("<unk>", special=False)


def test_published_bad_tokens_follow_the_rule(official, official_tokenizer):
    stored = json.loads((official_tokenizer / "tokenizer_config.json").read_text())["bad_token_ids"]
    assert list(official.bad_token_ids) == stored and len(stored) == 6965
    assert hashlib.sha256(json.dumps(list(bad_token_ids(official))).encode()).hexdigest() == (
        "74396990eeb9b7b7c27dcafa481add877ef7ac8c86fa4141090279e75d99f377")


def test_published_files_survive_saving(official, tmp_path):
    official.save(tmp_path)
    again = load_tokenizer(tmp_path, 151_752)
    assert_same(again, official)
    assert again.encode("你好，世界 for the 3rd time") == official.encode("你好，世界 for the 3rd time")


# --- sentencepiece --------------------------------------------------------------------------------------------------
def test_small_vocabulary(pieces):
    assert pieces.vocab_size == 400
    assert pieces.encode("".join(CONTROL_TEXT.values())) == list(range(len(CONTROL_TEXT)))
    assert len(pieces.encode("The café on the corner")) < 12, "frequent words are pieces of their own"
    assert pieces.decode(pieces.encode("<unit>hi<|listen|>"), skip_special=True) == "hi"
    assert set(pieces.encode("(\n)")) <= set(pieces.bad_token_ids)
    assert not set(pieces.encode("What is the plan, café?")) & set(pieces.bad_token_ids)


def test_equal_texts_give_equal_files(pieces, tmp_path):
    again = train_sentencepiece(iter(CORPUS), 400, tmp_path / "new" / "folder")
    assert_same(again, pieces)
    pieces.save(tmp_path)
    for name in ("tokenizer.model", "added_tokens.json"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "new" / "folder" / name).read_bytes()


@pytest.mark.parametrize("texts, size, message", [
    ([], 400, "there is no text"), (["", "\n \n"], 400, "there is no text"),
    (CORPUS, 100, "cannot make a vocabulary of 100: Vocabulary size is smaller"),
    (CORPUS[:2], 5000, "cannot make a vocabulary of 5000: Vocabulary size too high")])
def test_vocabularies_that_cannot_be_made(texts, size, message, tmp_path):
    with pytest.raises(TokenizerError, match=message):
        train_sentencepiece(texts, size, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_broken_sentencepiece_files(pieces, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    with pytest.raises(TokenizerError, match=r"tokenizer\.model: not a sentencepiece model"):
        load_tokenizer(tmp_path)
    pieces.save(tmp_path)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<unit>": 400}))
    with pytest.raises(TokenizerError, match="'<unit>' is a piece of the model and in added_tokens.json"):
        load_tokenizer(tmp_path)


def test_a_model_without_byte_fallback_is_refused(tmp_path):
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(CORPUS), model_prefix=str(tmp_path / "tokenizer"),
                                             vocab_size=80, minloglevel=2)
    with pytest.raises(TokenizerError, match="no byte fallback"):
        load_tokenizer(tmp_path)


# --- text from outside, placeholders --------------------------------------------------------------------------------
def test_twelve_reserved_tokens():
    assert set(RESERVED_TEXT) == {"<|speak|>", "<|listen|>", "<|turn_eos|>", "<|chunk_eos|>", "<unit>", "</unit>",
                                  "<image>", "</image>", "<delegate>", "</delegate>", "<backend>", "</backend>"}
    assert len(RESERVED_TEXT) == 12


def test_strip_reserved():
    assert strip_reserved("It is <b>12</b> < 13 > 5 <|im_end|>.") == "It is <b>12</b> < 13 > 5 <|im_end|>."
    assert strip_reserved("a<backend>b</backend>c<|turn_eos|>") == "abc"
    assert strip_reserved("<un<unit>it>x<|lis<|sp</unit>eak|>ten|>") == "x"
    depth = 2000
    assert strip_reserved("<delegate" * depth + ">" * depth) == ""


@settings(max_examples=200, deadline=None, derandomize=True)
@given(parts=st.lists(st.sampled_from([*RESERVED_TEXT, "<", "un", "it>", "<|", "|>", "speak|>", "</", "unit>", "x"])))
def test_strip_reserved_equals_stripping_until_none_remains(parts):
    text = "".join(parts)
    expected = text
    while any(token in expected for token in RESERVED_TEXT):
        for token in RESERVED_TEXT:
            expected = expected.replace(token, "")
    assert strip_reserved(text) == expected


def test_audio_placeholders_as_recorded(golden):
    for case in json.loads((golden / "audio" / "audio.json").read_text())["placeholder_counts"]:
        plain = audio_placeholder(case["samples"], stream_input=False)
        seconds = audio_placeholder(case["samples"])
        assert audio_token_count(case["samples"]) == plain.count("<unk>") == case["plain"]
        assert plain == f"<|audio_start|>{'<unk>' * case['plain']}<|audio_end|>"
        assert seconds.count("<unk>") == case["chunked"]
        assert seconds.count("<|audio_start|>") == seconds.count("<|audio_end|>") == case["chunks"]
        sizes = [second.count("<unk>") for second in seconds.split("<|audio_end|>")[:-1]]
        assert all(size == 10 for size in sizes[:-1]) and 1 <= sizes[-1] <= 10
    assert audio_token_count(0) == 0 and audio_placeholder(0) == ""


def test_image_placeholders():
    whole, cell = "<image><unk><unk></image>", "<slice><unk><unk></slice>"
    assert image_placeholder(2) == whole
    assert image_placeholder(2, image_id=3) == "<image_id>3</image_id>" + whole
    assert image_placeholder(2, grid=(3, 2)) == whole + cell * 3 + "\n" + cell * 3
    assert image_placeholder(2, grid=(3, 2), row_separator="") == whole + cell * 6


def test_placeholders_become_control_tokens(bpe):
    c = bpe.control
    assert bpe.encode(image_placeholder(2, grid=(1, 1))) == [
        c.image_start, c.unk, c.unk, c.image_end, c.slice_start, c.unk, c.unk, c.slice_end]
    assert bpe.encode(audio_placeholder(3200)) == [c.audio_start, c.unk, c.unk, c.audio_end]


def test_importing_loads_neither_library():
    code = "import sys, venus_jax.tokens; print({'tokenizers', 'sentencepiece', 'jax', 'numpy'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"

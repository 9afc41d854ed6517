"""Whole checkpoints there and back, what happens to the added tokens, and everything that must be refused."""

import dataclasses
import errno
import fcntl
import json
import logging
import os
import resource
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest

from venus_jax import sharding
from venus_jax.checkpoints import files, hf, store, table
from venus_jax.checkpoints.convert import convert, load_any
from venus_jax.config import VenusConfig
from venus_jax.errors import CheckpointError, ConfigError, VenusError
from venus_jax.tokens import ADDED_TEXT, load_tokenizer

BF16 = ml_dtypes.bfloat16
EMBED, HEAD = "llm.model.embed_tokens.weight", "llm.lm_head.weight"


def params_of(directory, **kwargs):
    return dict(sharding.paths(load_any(directory, **kwargs)[1]))


class TestThereAndBack:
    def test_recorded_model(self, lab, golden, tmp_path):
        report = convert(golden / "checkpoint", tmp_path / "ours")
        assert report.config.llm.vocab_size == 430 and report.config.talker.unused_vocab_size == 8
        assert report.parameters == sum(x.size for x in params_of(tmp_path / "ours").values())
        back = convert(tmp_path / "ours", tmp_path / "back")
        assert back.parameters == 1_355_320 and back.config.llm.vocab_size == 426
        lab.assert_same_model(golden / "checkpoint", tmp_path / "back")

    @pytest.mark.parametrize("parts, added_tokens", [
        ({}, False), ({}, True), ({"vision": False}, True), ({"talker": False}, False),
        ({"vision": False, "audio": False, "talker": False}, True)],
        ids=["MiniCPM-o", "Venus-Omni", "Venus-Audio", "no talker", "backbone alone"])
    def test_sharded_bfloat16(self, lab, tmp_path, parts, added_tokens):
        source = lab.make(lab.tiny(rows=430 if added_tokens else 426, **parts), BF16, 3, added_tokens)
        report = convert(source, tmp_path / "ours")
        assert report.config.llm.vocab_size == 430 and bool(report.added) != added_tokens
        config, params = store.load_checkpoint(tmp_path / "ours")
        assert config == report.config and config.dtype == "bfloat16"
        assert all(x.dtype == BF16 for x in jax.tree.leaves(params))
        convert(tmp_path / "ours", tmp_path / "back")
        lab.assert_same_model(source, tmp_path / "back")

    def test_ours_first(self, lab, tmp_path):
        config = lab.tiny(rows=430).replace(llm=dict(vocab_multiple=64))
        rng = np.random.default_rng(2)
        params = table.nest({path: rng.standard_normal(shape, np.float32)
                             for path, shape in table.param_shapes(config).items()})
        load_tokenizer(lab.tokenizer).save(tmp_path / "tokenizer")  # names the added tokens
        store.save_checkpoint(tmp_path / "ours", params, config, extra_files=tmp_path / "tokenizer")
        convert(tmp_path / "ours", tmp_path / "hf")
        convert(tmp_path / "hf", tmp_path / "again")
        found = params_of(tmp_path / "again")
        for path, shape in table.param_shapes(config, padded=False).items():
            cut = tuple(slice(0, n) for n in shape)
            assert found[path].tobytes() == dict(sharding.paths(params))[path][cut].tobytes(), path
        again = store.load_checkpoint(tmp_path / "again")[0]
        assert dataclasses.replace(again, name=config.name) == config.replace(llm=dict(vocab_multiple=1))

    @pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32])
    def test_cast(self, lab, tmp_path, dtype):
        source = lab.make(lab.text(), np.float32)
        convert(source, tmp_path / "ours", dtype=dtype)
        convert(tmp_path / "ours", tmp_path / "back")
        found, expected = lab.read(tmp_path / "back"), lab.read(source)
        assert found.keys() == expected.keys()
        assert all(found[name].tobytes() == expected[name].astype(dtype).tobytes() for name in expected)
        convert(tmp_path / "ours", tmp_path / "wide", dtype=np.float32)
        assert all(x.dtype == np.float32 for x in lab.read(tmp_path / "wide").values())

    def test_config_json_that_describes_absent_parts(self, lab, tmp_path, caplog):
        whole = lab.tiny()
        source = lab.make(lab.tiny(vision=False, talker=False), BF16, config_json={**whole.to_hf(), "extra": [1]})
        with caplog.at_level(logging.WARNING):
            report = convert(source, tmp_path / "ours")
        assert report.config.vision is report.config.resampler is report.config.talker is None
        assert "no tensor vpm.* or resampler.*: the model is read without vision" in caplog.text
        assert "no tensor tts.*" in caplog.text and "apm" not in caplog.text
        convert(tmp_path / "ours", tmp_path / "back")
        lab.assert_same_model(source, tmp_path / "back")

    def test_other_files_travel_and_other_weights_do_not(self, lab, tmp_path):
        source = lab.make(lab.text())
        (source / "generation_config.json").write_text("{}")
        (source / "modeling.py").write_text("pass")
        (source / "pytorch_model.bin").write_bytes(b"x")
        (source / "real").write_text("linked")
        (source / "link.txt").symlink_to("real")
        convert(source, tmp_path / "ours")
        convert(tmp_path / "ours", tmp_path / "back")
        names = {path.name for path in (tmp_path / "back").iterdir()}
        assert names == {path.name for path in source.iterdir()} - {"pytorch_model.bin"}
        assert (tmp_path / "back/link.txt").read_text() == "linked" and not (tmp_path / "back/link.txt").is_symlink()

    def test_changed_settings_reach_config_json_and_nothing_else_moves(self, lab, tmp_path):
        config = lab.text()
        source = lab.make(config, config_json={**config.to_hf(), "extra": {"kept": True}})
        convert(source, tmp_path / "ours")
        path = tmp_path / "ours/config.json"
        path.write_text(VenusConfig.from_json(path.read_text()).replace(image=dict(max_slice_nums=9)).to_json())
        convert(tmp_path / "ours", tmp_path / "back")
        before, after = (json.loads((d / "config.json").read_text()) for d in (source, tmp_path / "back"))
        assert after["slice_config"].pop("max_slice_nums") == 9 and before["slice_config"].pop("max_slice_nums") == 1
        assert after == before

    def test_progress_counts_every_byte(self, lab, tmp_path):
        source = lab.make(lab.tiny(), BF16)
        for target in ("ours", "back"):
            seen = []
            report = convert(source, tmp_path / target, progress=lambda *call, seen=seen: seen.append(call))
            assert sum(n for n, _ in seen) == report.nbytes and {total for _, total in seen} == {report.nbytes}
            source = tmp_path / target
        assert report.nbytes == sum(x.nbytes for x in lab.read(source).values())

    def test_into_memory_equals_through_the_disk(self, lab, tmp_path):
        source = lab.make(lab.tiny(), BF16, shards=2)
        convert(source, tmp_path / "ours")
        (config, params), (other_config, other) = load_any(source), load_any(tmp_path / "ours")
        assert config == other_config
        assert jax.tree.all(jax.tree.map(lambda a, b: a.tobytes() == b.tobytes(), params, other))
        store.save_checkpoint(tmp_path / "saved", params, config, extra_files=source)
        convert(tmp_path / "saved", tmp_path / "back")
        lab.assert_same_model(source, tmp_path / "back")


class TestAddedTokens:
    @pytest.mark.parametrize("dtype", [np.float32, BF16])
    def test_new_rows_are_the_mean_of_the_others(self, lab, dtype):
        source = lab.make(lab.text(), dtype)
        raw = lab.read(source)
        params = params_of(source)
        for rows, name in ((params["llm/embed/embedding"], EMBED), (params["llm/lm_head/kernel"].T, HEAD)):
            assert rows.shape == (430, 128)
            mean = raw[name].astype(np.float64).mean(axis=0)
            for row in rows[426:].astype(np.float64):
                np.testing.assert_allclose(row, mean, rtol=2 * float(ml_dtypes.finfo(dtype).eps), atol=1e-12)

    def test_tokenizer_and_rows_agree(self, lab, tmp_path):
        convert(lab.make(lab.text(), BF16), tmp_path / "ours")
        config, _ = load_any(tmp_path / "ours")
        tokenizer = load_tokenizer(tmp_path / "ours", config.llm.vocab_size)
        assert tokenizer.vocab_size == config.llm.vocab_size == 430
        assert [tokenizer.symbols[text] for text in ADDED_TEXT] == [426, 427, 428, 429]
        assert tokenizer.decode([426, 5, 427], skip_special=True) == tokenizer.decode([5])

    def test_special_tokens_listed_as_objects(self, lab, tmp_path):
        source = lab.make(lab.text())
        path = source / "tokenizer_config.json"
        special = [{"content": "<|im_end|>", "special": True}, {"content": "<delegate>"}]
        path.write_text(json.dumps({**json.loads(path.read_text()), "additional_special_tokens": special}))
        convert(source, tmp_path / "ours")
        listed = json.loads((tmp_path / "ours/tokenizer_config.json").read_text())["additional_special_tokens"]
        assert listed == [special[0], *ADDED_TEXT]

    @pytest.mark.parametrize("path", table.VOCAB_PATHS)
    def test_trained_rows_are_kept(self, lab, tmp_path, path):
        source = lab.make(lab.text(), BF16)
        convert(source, tmp_path / "ours")
        config, params = load_any(tmp_path / "ours")
        leaf = dict(sharding.paths(params))[path]
        leaf[(-1, 7) if path.startswith("llm/embed") else (7, -1)] += 1
        store.save_checkpoint(tmp_path / "trained", params, config, extra_files=tmp_path / "ours")
        report = convert(tmp_path / "trained", tmp_path / "back")
        assert "kept" in report.added and lab.read(tmp_path / "back")[HEAD].shape == (430, 128)
        assert json.loads((tmp_path / "back/config.json").read_text())["vocab_size"] == 430
        again = convert(tmp_path / "back", tmp_path / "again")  # finds the tokens by their text and adds no more
        assert again.added == "" and again.config == config
        found = params_of(tmp_path / "again")
        assert found[path].tobytes() == leaf.tobytes()
        dropped = convert(tmp_path / "trained", tmp_path / "dropped", added_tokens="drop")
        assert "cut back" in dropped.added
        lab.assert_same_model(source, tmp_path / "dropped")

    def test_kept_on_request(self, lab, tmp_path):
        source = lab.make(lab.text(), tokenizer=False)
        convert(source, tmp_path / "ours")
        convert(tmp_path / "ours", tmp_path / "kept", added_tokens="keep")
        assert lab.read(tmp_path / "kept")[EMBED].shape == (430, 128)
        assert convert(tmp_path / "kept", tmp_path / "again").added == ""

    def test_never_added_on_request(self, lab, tmp_path):
        source = lab.make(lab.text(), BF16)
        assert convert(source, tmp_path / "ours", added_tokens="drop").config.llm.vocab_size == 426
        with pytest.raises(CheckpointError, match="no rows to drop; its added tokens were not added by import"):
            convert(tmp_path / "ours", tmp_path / "back", added_tokens="drop")
        convert(tmp_path / "ours", tmp_path / "back")
        lab.assert_same_model(source, tmp_path / "back")
        with pytest.raises(CheckpointError, match="added_tokens is 'maybe'; expected one of auto, keep, drop"):
            convert(source, tmp_path / "x", added_tokens="maybe")

    @pytest.mark.parametrize("file", ["added_tokens.json", "tokenizer_config.json", "tokenizer.json"])
    def test_found_by_their_text_in_any_tokenizer_file(self, lab, file):
        source = lab.make(lab.text(430), tokenizer=False)
        ids = {text: 426 + i for i, text in enumerate(ADDED_TEXT)}
        (source / file).write_text(json.dumps({
            "added_tokens.json": ids,
            "tokenizer_config.json": {"added_tokens_decoder": {str(i): {"content": t} for t, i in ids.items()}},
            "tokenizer.json": {"added_tokens": [{"id": i, "content": t} for t, i in ids.items()]}}[file]))
        assert hf.import_hf(source)[0].llm.vocab_size == 430

    @pytest.mark.parametrize("ids, message", [
        ({"<delegate>": 5}, "has <delegate> but not </delegate>; expected all or none"),
        ({text: 500 + i for i, text in enumerate(ADDED_TEXT)},
         r"the ids \[500, 501, 502, 503\], but the embedding has 426 rows")])
    def test_tokenizer_that_disagrees_with_the_rows(self, lab, ids, message):
        source = lab.make(lab.text(), tokenizer=False)
        (source / "added_tokens.json").write_text(json.dumps(ids))
        with pytest.raises(CheckpointError, match=message):
            hf.import_hf(source)

    def test_tokenizer_that_names_rows_the_model_lacks(self, lab):
        source = lab.make(lab.text(), tokenizer=False)
        (source / "added_tokens.json").write_text(json.dumps({text: 426 + i for i, text in enumerate(ADDED_TEXT)}))
        assert hf.import_hf(source)[0].llm.vocab_size == 430


def drop_tensor(name):
    return lambda tensors: tensors.pop(name)


def reshape(name, shape):
    return lambda tensors: tensors.update({name: np.zeros(shape, np.float32)})


Q_PROJ = "llm.model.layers.1.self_attn.q_proj.weight"
WRONG_TENSORS = {
    "missing": (drop_tensor(Q_PROJ), f"model.safetensors: missing tensor {Q_PROJ}"),
    "some of vision missing": (
        lambda t: [t.pop(n) for n in list(t) if n.startswith("vpm.encoder.layers.1.mlp")],
        "missing tensor vpm.encoder.layers.1.mlp.fc1.weight, vpm.encoder.layers.1.mlp.fc1.bias, .*"),
    "resampler missing": (lambda t: [t.pop(n) for n in list(t) if n.startswith("resampler.")],
                          "missing tensor resampler.query, .* and 9 more"),
    "unused": (lambda t: t.update({"vpm.head.weight": np.zeros(2, np.float32)}),
               "model.safetensors: unused tensor vpm.head.weight"),
    "one layer too many": (lambda t: t.update({Q_PROJ.replace("1", "3"): t[Q_PROJ]}),
                           r"unused tensor llm.model.layers.3.self_attn.q_proj.weight"),
    "misshapen": (reshape(Q_PROJ, (33, 128)), rf"model.safetensors: tensor {Q_PROJ} has shape \[33, 128\], expected"),
    "transposed": (reshape(Q_PROJ, (128, 32)), r"has shape \[128, 32\], expected \[32, 128\]"),
    "other vocabulary": (reshape(EMBED, (500, 128)), rf"tensor {EMBED} has shape \[500, 128\], expected \[426, 128\]"),
    "scalar embedding": (reshape(EMBED, ()), rf"tensor {EMBED} has shape \[\], expected"),
    "no embedding": (drop_tensor(EMBED), f"missing tensor {EMBED}"),
    "dtypes within a stack": (
        lambda t: t.update({Q_PROJ: t[Q_PROJ].astype(np.float16)}), rf"tensor {Q_PROJ} has dtype float16, .*--dtype"),
}


class TestRefusals:
    @pytest.fixture
    def refuse(self, tmp_path):
        def check(source, message, target="new", error=CheckpointError, **kwargs):
            before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
            with pytest.raises(error, match=message) as e:
                convert(source, tmp_path / target, **kwargs)
            assert isinstance(e.value, VenusError) and "\n" not in str(e.value)
            assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
        return check

    @pytest.mark.parametrize("case", WRONG_TENSORS)
    def test_tensors_that_are_not_the_models(self, lab, refuse, case):
        change, message = WRONG_TENSORS[case]
        source = lab.make(lab.tiny())
        tensors = lab.read(source)
        change(tensors)
        lab.write(source, tensors)
        refuse(source, message)

    def test_file_cut_off(self, lab, refuse):
        source = lab.make(lab.tiny(), shards=3)
        path = source / "model-00002-of-00003.safetensors"
        with open(path, "r+b") as f:
            f.truncate(path.stat().st_size - 4)
        refuse(source, "model-00002-of-00003.safetensors: truncated: tensor '.*' ends at byte")

    def test_shard_missing(self, lab, refuse):
        source = lab.make(lab.tiny(), shards=3)
        (source / "model-00003-of-00003.safetensors").unlink()
        refuse(source, "model-00003-of-00003.safetensors: missing")

    @pytest.mark.parametrize("text, message, error", [
        (None, "config.json: not readable as JSON", CheckpointError),
        ("{", "config.json: not readable as JSON", CheckpointError),
        ("{}", "config.json: neither rope_theta", ConfigError)])
    def test_config_json(self, lab, refuse, text, message, error):
        source = lab.make(lab.text())
        (source / "config.json").unlink()
        if text is not None:
            (source / "config.json").write_text(text)
        refuse(source, message, error=error)

    def test_nothing_to_convert(self, refuse, tmp_path):
        (tmp_path / "empty").mkdir()
        refuse(tmp_path / "empty", "empty: no checkpoint; expected model.safetensors or model.safetensors.index.json "
               r"\(Hugging Face\), or config.json and params/ \(ours\)")
        refuse(tmp_path / "nowhere", "nowhere: no such directory")

    @pytest.mark.parametrize("key, message", [
        (None, r"config.json: num_hidden_layers stands for 1000000000 layers; \S+model.safetensors has \d+ tensors"),
        ("vision_config", "config.json: vision_config.num_hidden_layers stands for")])
    def test_more_layers_than_tensors(self, lab, refuse, key, message):
        raw = lab.tiny().to_hf()
        (raw if key is None else raw[key])["num_hidden_layers"] = 10**9
        refuse(lab.make(lab.tiny(), config_json=raw), message)

    @pytest.mark.parametrize("file, text, message", [
        ("added_tokens.json", '{"<delegate>": Infinity}', "added token '<delegate>' with the id inf"),
        ("added_tokens.json", json.dumps({text: -4 + i for i, text in enumerate(ADDED_TEXT)}), "with the id -4"),
        ("added_tokens.json", json.dumps(dict.fromkeys(ADDED_TEXT, 5)), "the id 5 to '<delegate>' and to '</d"),
        ("tokenizer_config.json", '{"additional_special_tokens": [7]}', "an added token 7"),
        ("tokenizer_config.json", '{"additional_special_tokens": "abc"}', "not laid out as expected"),
        ("tokenizer_config.json", '{"additional_special_tokens": [{"text": "a"}]}', "not laid out as expected"),
        ("tokenizer.json", '{"added_tokens": [{"id": 3, "content": ["a"]}]}', r"an added token \['a'\]"),
        ("tokenizer.json", "[" * 100_000, "tokenizer.json: not readable as JSON")])
    def test_tokenizer_files(self, lab, refuse, file, text, message):
        source = lab.make(lab.text(), tokenizer=False)
        (source / file).write_text(text)
        refuse(source, message)

    @pytest.mark.parametrize("dtype", ["foo", np.int8, "float64"])
    def test_dtypes_a_file_cannot_hold(self, lab, refuse, golden, dtype):
        refuse(lab.make(lab.text()), "dtype is .*; expected one of float32, bfloat16, float16", dtype=dtype)

    def test_line_breaks_in_names(self, lab, refuse):
        source = lab.make(lab.text())
        lab.write(source, {**lab.read(source), "a\nb": np.zeros(2, np.float32)})
        refuse(source, r"unused tensor 'a\\nb'")

    def test_names_that_are_too_long(self, lab, refuse, tmp_path):
        refuse(lab.make(lab.text()), "cannot be written .*too long", target="x" * 300)
        refuse(tmp_path / ("x" * 300), "xxx: no such directory")

    def test_target_that_is_a_link(self, lab, tmp_path):
        source = lab.make(lab.text())
        (tmp_path / "real").mkdir()
        for link, to in (("new", "real"), ("dangling", "nothing"), ("loop", "loop")):
            (tmp_path / link).symlink_to(to)
        convert(source, tmp_path / "new")
        assert store.is_checkpoint(tmp_path / "real") and (tmp_path / "new").is_symlink()
        for link in ("dangling", "loop"):
            with pytest.raises(CheckpointError, match=f"{link}: is a link that leads nowhere"):
                convert(source, tmp_path / link)

    def test_target_that_cannot_be_replaced(self, lab, refuse, tmp_path, monkeypatch):
        def rename(*_):  # as for a mount point
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

        (tmp_path / "new").mkdir()
        monkeypatch.setattr(os, "rename", rename)
        monkeypatch.setattr(hf.HFCheckpoint, "read", lambda *_: pytest.fail("the work has begun"))
        refuse(lab.make(lab.text()), "new: cannot be replaced, perhaps a mount point")

    def test_what_a_killed_process_left(self, lab, tmp_path, caplog):
        source = lab.make(lab.text())
        host = files._HOST
        dead, living, foreign, other = (tmp_path / f".{name}.incomplete" for name in (
            f"new.{host}00000000", f"new.{host}11111111", "new.22222222", f"new.er.{host}00000000"))
        for path in (dead, living, foreign, other):
            (path / "params").mkdir(parents=True)
        handle = os.open(living, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
        with caplog.at_level(logging.WARNING):
            convert(source, tmp_path / "new")
        os.close(handle)
        assert [path.exists() for path in (dead, living, foreign, other)] == [False, True, True, True]
        warned = [record.getMessage().split(":")[0] for record in caplog.records]
        assert sorted(warned) == sorted(map(str, (living, foreign)))

    def test_write_that_the_system_refuses(self, lab, tmp_path, capfd):
        """The limit on a file's size stands for a full disk: Orbax meets either in threads of its own."""
        source = lab.make(lab.text(), tokenizer=False)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # of the 218 kB of the embedding
        try:
            with pytest.raises(CheckpointError, match="new: cannot be written .*File too large"):
                convert(source, tmp_path / "new")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert capfd.readouterr().err == "" and [path.name for path in tmp_path.iterdir()] == ["hf"]

    def test_target_in_use(self, lab, refuse):
        source = lab.make(lab.text())
        refuse(source, "hf: already exists and is not empty; give another directory or remove it", target="hf")
        refuse(source, "config.json: is a file", target="hf/config.json")

    def test_empty_target_is_fine(self, lab, tmp_path):
        (tmp_path / "new").mkdir()
        convert(lab.make(lab.text()), tmp_path / "new")
        assert store.is_checkpoint(tmp_path / "new")

    @pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError("No space left on device")],
                             ids=["ctrl-c", "disk full"])
    @pytest.mark.parametrize("direction", ["import", "export"])
    def test_stopped_in_the_middle(self, lab, tmp_path, monkeypatch, stop, direction):
        source = lab.make(lab.text())
        if direction == "export":
            convert(source, tmp_path / "ours")
            source = tmp_path / "ours"
        before = set(tmp_path.iterdir())
        where, name = (hf.HFCheckpoint, "read") if direction == "import" else (hf.safetensors_io.Writer, "write")
        monkeypatch.setattr(store, "_BATCH_BYTES", 1)  # so that the import has written something by then
        original, calls = getattr(where, name), []

        def stopping(self, *args, **kwargs):
            calls.append(args)
            if len(calls) == 12:
                raise stop
            return original(self, *args, **kwargs)

        monkeypatch.setattr(where, name, stopping)
        expected = pytest.raises(KeyboardInterrupt) if stop is KeyboardInterrupt else pytest.raises(
            CheckpointError, match="new: cannot be written .*No space left")
        with expected:
            convert(source, tmp_path / "deep/new")
        assert len(calls) == 12 and set(tmp_path.iterdir()) == before

    def test_damaged_checkpoint_of_ours(self, lab, refuse, tmp_path):
        convert(lab.make(lab.text()), tmp_path / "ours")
        shutil.rmtree(tmp_path / "ours/params/state/llm.norm.scale")
        refuse(tmp_path / "ours", "params/state/llm.norm.scale/.*: missing")


def test_explicit_config_decides_about_rows_and_padding(lab):
    source = lab.make(lab.tiny(), BF16)
    for rows, multiple, live in ((426, 1, 426), (430, 1, 430), (430, 100, 500)):
        config = lab.tiny(rows=rows).replace(llm=dict(vocab_multiple=multiple))
        found, params = hf.import_hf(source, config)
        assert found == config and params["llm"]["embed"]["embedding"].shape == (live, 128)
    with pytest.raises(CheckpointError, match=rf"tensor {EMBED} has shape \[426, 128\], expected \[428, 128\]"):
        hf.import_hf(source, lab.tiny(rows=428))


def test_any_box_of_a_parameter_is_that_box_of_the_whole(lab):
    config = lab.tiny(rows=430).replace(llm=dict(vocab_multiple=8))
    source = hf.HFCheckpoint(lab.make(lab.tiny(), BF16), config)
    rng = np.random.default_rng(3)
    for rule in source.rules:
        whole = source.read(rule)
        boxes = [tuple(tuple(sorted(rng.choice(n + 1, 2, replace=False))) for n in whole.shape) for _ in range(4)]
        if rule.path in table.VOCAB_PATHS:  # added rows and padding, some and alone
            boxes += [rule.turn(((a, b), (3, 7))) for a, b in ((420, 428), (427, 432), (427, 429), (430, 432))]
        for box in boxes:
            expected = whole[tuple(slice(*bound) for bound in box)]
            assert source.read(rule, box).tobytes() == expected.tobytes(), (rule.path, box)


class TestRowsAndTokenizer:
    """The rows of the table and the ids of the tokenizer must not part."""

    def test_ids_beyond_the_rows_are_refused(self, lab):
        with pytest.raises(CheckpointError, match="the tokenizer has ids up to 425, but the embedding has 416 rows"):
            convert(lab.make(lab.text(416)), lab.scratch / "ours")

    def test_spare_rows_are_taken_before_the_table_grows(self, lab):
        source = lab.make(lab.text(426 + 6))
        report = convert(source, lab.scratch / "ours")
        assert report.config.llm.vocab_size == 432 and not report.added
        for directory in (source, lab.scratch / "ours"):
            assert load_tokenizer(directory, 432).control.delegate_start == 426

    def test_a_cast_is_said_in_config_json(self, lab):
        source = lab.make(lab.text(), BF16)
        convert(source, lab.scratch / "ours", dtype="float32")
        convert(lab.scratch / "ours", lab.scratch / "back")
        assert json.loads((lab.scratch / "back" / "config.json").read_text())["torch_dtype"] == "float32"

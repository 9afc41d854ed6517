"""Our checkpoint directory: saved from and restored onto any mesh, padded, readable by Orbax alone, and damaged."""

import json
import shutil

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint
import orbax.checkpoint.experimental.v1 as ocp
import pytest

from venus_jax import sharding
from venus_jax.checkpoints import hf, safetensors_io, store, table
from venus_jax.checkpoints.convert import convert
from venus_jax.errors import CheckpointError

MESHES = [(1, 1, 8), (1, 8, 1), (2, 2, 2)]


def on_mesh(shape, rules=sharding.TRAIN):
    mesh = sharding.make_mesh(shape)
    return lambda abstract: sharding.param_shardings(abstract, rules, mesh)


def one_device(abstract):
    return jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[3]), abstract)


def assert_same_params(a, b):
    a, b = dict(sharding.paths(a)), dict(sharding.paths(b))
    assert a.keys() == b.keys()
    for path in a:
        assert a[path].dtype == b[path].dtype and a[path].shape == b[path].shape, path
        assert np.asarray(a[path]).tobytes() == np.asarray(b[path]).tobytes(), path


def params_of(config, dtype=np.float32):
    rng = np.random.default_rng(1)
    return table.nest({path: rng.standard_normal(shape, np.float32).astype(dtype)
                       for path, shape in table.param_shapes(config).items()})


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory, tiny):
    directory = tmp_path_factory.mktemp("saved") / "ours"
    config = tiny(vision=False)
    params = params_of(config, ml_dtypes.bfloat16)
    store.save_checkpoint(directory, params, config)
    return directory, config, params


@pytest.fixture
def saved(saved_once, tmp_path):
    """(directory, config, params) of a small bfloat16 checkpoint, which a test may damage."""
    directory, config, params = saved_once
    shutil.copytree(directory, tmp_path / "ours")
    return tmp_path / "ours", config, jax.tree.map(lambda x: x, params)


def test_saved_and_loaded_on_the_host(saved):
    directory, config, params = saved
    loaded_config, loaded = store.load_checkpoint(directory)
    assert loaded_config == config
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(loaded))
    assert_same_params(loaded, params)


@pytest.mark.parametrize("shape", MESHES)
def test_loaded_straight_onto_a_mesh(saved, shape):
    directory, _, params = saved
    _, loaded = store.load_checkpoint(directory, on_mesh(shape))
    assert_same_params(loaded, params)
    jax.tree.map(lambda x, s: x.sharding == s or pytest.fail(f"{x.sharding} instead of {s}"), loaded,
                 on_mesh(shape)(jax.eval_shape(lambda: params)))


def test_saved_from_one_mesh_and_loaded_on_another(saved, tmp_path):
    directory, config, params = saved
    _, sharded = store.load_checkpoint(directory, on_mesh((2, 2, 2)))
    store.save_checkpoint(tmp_path / "again", sharded, config)
    assert_same_params(store.load_checkpoint(tmp_path / "again")[1], params)
    assert_same_params(store.load_checkpoint(tmp_path / "again", on_mesh((1, 1, 8), sharding.SERVE))[1], params)
    assert_same_params(store.load_checkpoint(tmp_path / "again", one_device)[1], params)


@pytest.mark.parametrize("shardings", [None, on_mesh((1, 8, 1))], ids=["host", "mesh"])
def test_cast_while_loading(saved, shardings):
    directory, _, params = saved
    _, loaded = store.load_checkpoint(directory, shardings, dtype=np.float32)
    assert_same_params(loaded, jax.tree.map(lambda x: x.astype(np.float32), params))


@pytest.mark.parametrize("shardings", [None, on_mesh((1, 1, 8)), on_mesh((2, 2, 2))], ids=["host", "1x1x8", "2x2x2"])
def test_padding_of_the_vocabulary_is_zero_and_never_stored(saved, tmp_path, shardings):
    directory, config, params = saved
    padded, loaded = store.load_checkpoint(directory, shardings, vocab_multiple=64)
    assert padded.llm.vocab_rows == 448
    embed, head = (np.asarray(x) for x in (loaded["llm"]["embed"]["embedding"], loaded["llm"]["lm_head"]["kernel"]))
    assert embed.shape == (448, 128) and head.shape == (128, 448)
    assert not embed[426:].any() and not head[:, 426:].any()
    np.testing.assert_array_equal(head[:, :426], params["llm"]["lm_head"]["kernel"])
    store.save_checkpoint(tmp_path / "again", loaded, padded)
    assert store.Checkpoint(tmp_path / "again").read("llm/embed/embedding").shape == (426, 128)
    assert_same_params(store.load_checkpoint(tmp_path / "again", vocab_multiple=1)[1], params)


@pytest.mark.parametrize("written_by", ["save_checkpoint", "convert"])
def test_orbax_restores_it_without_us(saved, tmp_path, written_by):
    directory, config, params = saved
    if written_by == "convert":
        convert(directory, tmp_path / "hf")
        directory = tmp_path / "converted"
        convert(tmp_path / "hf", directory, added_tokens="drop")
    assert_same_params(ocp.load(directory / "params"), params)
    target = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), params,
                          on_mesh((2, 2, 2))(jax.eval_shape(lambda: params)))
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(directory / "params" / "state", target)
    assert_same_params(restored, params)


@pytest.mark.parametrize("shape", MESHES)
def test_import_onto_a_mesh_equals_the_host_and_reads_no_more_than_its_shards(lab, shape, monkeypatch):
    source = lab.make(lab.tiny(), ml_dtypes.bfloat16, shards=3)
    config = lab.tiny(rows=430).replace(llm=dict(vocab_multiple=8))
    _, expected = hf.import_hf(source, config)
    rows = []
    read = safetensors_io.Reader.rows
    monkeypatch.setattr(safetensors_io.Reader, "rows", lambda self, name, start, stop: rows.append(
        (name, stop - start)) or read(self, name, start, stop))
    _, loaded = hf.import_hf(source, config, shardings=on_mesh(shape))
    assert_same_params(loaded, expected)
    assert loaded["llm"]["lm_head"]["kernel"].shape == (128, 432)
    if shape == (1, 1, 8):  # sharded over heads, the rows of their tensor: each row is read once, by its device alone
        q_proj = [count for name, count in rows if name == "llm.model.layers.1.self_attn.q_proj.weight"]
        assert q_proj == [4] * 8


def test_files_beside_the_weights_come_along(lab, tmp_path):
    convert(lab.make(lab.text()), tmp_path / "imported")
    imported, _ = store.load_checkpoint(tmp_path / "imported")
    store.save_checkpoint(tmp_path / "trained", params_of(imported), imported, extra_files=tmp_path / "imported")
    for folder in ("", "hf"):
        names = {p.name for p in (tmp_path / "imported" / folder).iterdir()}
        assert names == {p.name for p in (tmp_path / "trained" / folder).iterdir()} and "tokenizer.json" in names


def test_no_path_of_this_machine_is_stored(saved, tmp_path):
    directory, *_ = saved
    for path in directory.rglob("*"):
        if path.is_file():
            assert str(tmp_path).encode() not in path.read_bytes(), path


class TestDamage:
    @pytest.fixture
    def refuse(self, saved):
        directory, *_ = saved

        def check(message):
            for shardings in (None, one_device):
                with pytest.raises(CheckpointError, match=message) as e:
                    store.load_checkpoint(directory, shardings)
                assert "\n" not in str(e.value)
        return check

    def test_file_missing(self, saved, refuse):
        next((saved[0] / "params/state/llm.layers.mlp.up_proj.kernel/c").rglob("0/0/0")).unlink()
        refuse("params/state/llm.layers.mlp.up_proj.kernel/c/0/0/0: missing")

    def test_file_cut_off(self, saved, refuse):
        with open(saved[0] / "params/state/talker.norm.scale/c/0", "r+b") as f:
            f.truncate(3)
        refuse("params/state/talker.norm.scale/c/0: 3 bytes where .* were written; damaged")

    def test_parameter_missing(self, saved, refuse):
        shutil.rmtree(saved[0] / "params/state/audio.conv1.bias")
        refuse("params/state/audio.conv1.bias/.*: missing")

    def test_metadata_overwritten(self, saved, refuse):
        path = saved[0] / "params/state/_METADATA"
        path.write_bytes(b" " * path.stat().st_size)
        refuse("params: its metadata cannot be read")

    def test_no_parameters_at_all(self, saved, refuse):
        shutil.rmtree(saved[0] / "params")
        refuse("no checkpoint of ours; expected config.json and params/")

    def test_config_of_another_model(self, saved, refuse):
        path = saved[0] / "config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps({**config, "talker": None, "llm": {**config["llm"], "intermediate_size": 25}}))
        refuse(r"unexpected: talker/\S+, .* and \d+ more; misshapen: llm/layers/mlp/gate_proj/kernel \[3, 128, 24\] "
               r"\(expected \[3, 128, 25\]\)")

    def test_config_with_an_unknown_key(self, saved, refuse):
        (saved[0] / "config.json").write_text('{"speed": 1}')
        refuse("config.json: unknown key 'speed'")

    @pytest.mark.parametrize("part, change, message", [
        ("llm", {"num_layers": None}, "config.json: LLMConfig.num_layers is None"),
        ("audio", {"num_heads": 3}, "config.json: .*audio.hidden_size must divide by its heads")])
    def test_config_with_a_wrong_value(self, saved, refuse, part, change, message):
        path = saved[0] / "config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps({**config, part: {**config[part], **change}}))
        refuse(message)

    @pytest.mark.parametrize("text, message", [("{}", "config.json: .*missing 2 required .*'llm' and 'audio'"),
                                               ("[" * 100_000, "config.json: cannot be read")])
    def test_config_that_is_none(self, saved, refuse, text, message):
        (saved[0] / "config.json").write_text(text)
        refuse(message)


class TestSaving:
    def test_params_that_are_not_the_configs(self, saved, tmp_path):
        _, config, params = saved
        del params["llm"]["norm"]
        params["llm"]["extra"] = np.zeros(3)
        with pytest.raises(CheckpointError, match="missing: llm/norm/scale; unexpected: llm/extra"):
            store.save_checkpoint(tmp_path / "new", params, config)
        assert not (tmp_path / "new").exists()

    def test_directory_in_use(self, saved):
        directory, config, params = saved
        before = sorted(directory.rglob("*"))
        with pytest.raises(CheckpointError, match="already exists and is not empty"):
            store.save_checkpoint(directory, params, config)
        assert sorted(directory.rglob("*")) == before

    def test_interrupted(self, saved, tmp_path, monkeypatch):
        _, config, params = saved
        monkeypatch.setattr(store, "_list_files", lambda directory: (_ for _ in ()).throw(KeyboardInterrupt))
        before = set(tmp_path.iterdir())
        with pytest.raises(KeyboardInterrupt):
            store.save_checkpoint(tmp_path / "deep/er/new", params, config)
        assert set(tmp_path.iterdir()) == before

    def test_place_that_cannot_be_written(self, saved, tmp_path):
        _, config, params = saved
        (tmp_path / "file").write_text("")
        with pytest.raises(CheckpointError, match="file/new: cannot be written"):
            store.save_checkpoint(tmp_path / "file/new", params, config)
        with pytest.raises(CheckpointError, match="file: is a file"):
            store.save_checkpoint(tmp_path / "file", params, config)


def test_shardings_of_another_tree(saved):
    with pytest.raises(CheckpointError, match="the shardings do not form the tree of the parameters"):
        store.load_checkpoint(saved[0], {"llm": one_device({"x": 0})})

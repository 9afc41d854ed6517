"""Ahead-of-time compilation for TPUs that are not there: what fits, what does not, and the command."""

import subprocess
import sys
from pathlib import Path

import jax
import pytest

from venus_jax import aot
from venus_jax.config import AudioConfig, LLMConfig, TalkerConfig, VenusConfig
from venus_jax.errors import ConfigError, ShardingError

ROOT = Path(__file__).resolve().parents[1]
pytest.importorskip("libtpu", reason="compiling for a TPU needs jax[tpu]")

# The real head width, so that the TPU attention kernel is taken; everything else small.
TINY = VenusConfig(
    llm=LLMConfig(vocab_size=512, hidden_size=256, intermediate_size=512, num_layers=2, num_heads=8, num_kv_heads=8,
                  head_dim=128),
    audio=AudioConfig(hidden_size=64, intermediate_size=128, num_layers=2, num_heads=8),
    talker=TalkerConfig(hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=4,
                        num_audio_tokens=80, num_text_tokens=512, audio_bos_token_id=1, text_eos_token_id=2,
                        unused_vocab_size=16),
    dtype="bfloat16")


def settings(file: str, **changes):
    import importlib.util

    spec = importlib.util.spec_from_file_location(file, ROOT / "configs" / f"{file}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config()
    config.update(changes)
    return config


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(aot, "model_config", lambda settings: TINY)


def test_a_train_step_compiles_with_the_attention_kernel(tiny):
    config = settings("omni_9b_sft", batch_size=4, seq_len=256)
    mesh = aot.build_mesh(config.mesh, aot.topology_devices("v5e:2x2"))
    assert dict(mesh.shape) == {"data": 1, "fsdp": 4, "tensor": 1}
    with jax.default_matmul_precision("default"):  # the kernel has no float32 product for bf16 operands
        lowered = aot.lower_train(config, mesh)
    assert "tpu_custom_call" in lowered.as_text()  # splash attention, not the XLA form
    report = aot.compile_report(lowered, "v5e:2x2")
    assert report["fits"] and report["error"] is None and report["compile_seconds"] > 0
    parts = report["bytes_per_chip"]
    assert report["bytes_per_chip_peak"] >= parts["arguments"] + parts["temporaries"]
    assert parts["aliased"] > 0.9 * parts["outputs"]  # the state is donated
    assert report["collectives"]["all-gather"] > 0  # weights are sharded over fsdp


def test_a_forward_pass_compiles_with_heads_over_chips(tiny):
    config = settings("omni_9b", batch_size=2, append_len=16, cache_slots=64, mesh=(1, 1, 4))
    mesh = aot.build_mesh(config.mesh, aot.topology_devices("v5e:2x2"))
    report = aot.compile_report(aot.lower_forward(config, mesh), "v5e:2x2")
    assert report["fits"] and report["collectives"]["all-reduce"] > 0


def test_appending_to_the_cache_does_not_copy_it(tiny):
    """With one key/value head a chip the compiler is tempted to turn the whole cache over for the write."""
    config = settings("omni_9b", batch_size=2, append_len=16, cache_slots=2**17, mesh=(1, 1, 8))
    mesh = aot.build_mesh(config.mesh, aot.topology_devices("v5e:2x4"))
    parts = aot.compile_report(aot.lower_forward(config, mesh), "v5e:2x4")["bytes_per_chip"]
    cache = 2 * 2 * 2 * 2**17 * 128 * 2  # keys and values, layers, rows, slots, head width, bytes
    assert parts["aliased"] > cache  # donated
    assert parts["temporaries"] < 0.3 * cache


def test_a_duplex_unit_updates_its_caches_in_place(tiny, monkeypatch):
    """Decision loop, talker, setting positions back: none of them may hold the cache a second time."""
    model = TINY.replace(llm=dict(max_positions=2**18, num_layers=8))
    monkeypatch.setattr(aot, "model_config", lambda settings: model)
    config = settings("omni_9b", batch_size=2, cache_slots=2**15, talker_slots=320, slices=0, mesh=(1, 1, 8))
    mesh = aot.build_mesh(config.mesh, aot.topology_devices("v5e:2x4"))
    report = aot.compile_report(aot.lower_unit(config, mesh), "v5e:2x4")
    parts = report["bytes_per_chip"]
    cache = 2 * 8 * 2 * 2**15 * 128 * 2  # keys and values, layers, rows, slots, head width, bytes; one head a chip
    assert report["fits"] and parts["aliased"] > cache
    # one layer at a time is set back in float32, and one layer is read
    assert parts["temporaries"] < 0.5 * cache


def test_a_program_that_does_not_fit_is_reported(tiny):
    config = settings("omni_9b", batch_size=8, append_len=16, cache_slots=2**20, mesh=(1, 1, 4))
    mesh = aot.build_mesh(config.mesh, aot.topology_devices("v5e:2x2"))
    report = aot.compile_report(aot.lower_forward(config, mesh), "v5e:2x2")
    assert not report["fits"] and report["hbm_bytes"] == 15.75 * aot.GIB
    assert report["bytes_per_chip_peak"] is None or report["bytes_per_chip_peak"] > report["hbm_bytes"]


@pytest.mark.parametrize("name, message", [
    ("v5e", "expected CHIP:AxB"), ("v99:2x2", "chip one of v5e, v5p, v6e"), ("v5e:3x5", "topology 'v5e:3x5'"), ("v5e:0x4", "expected CHIP:AxB")])
def test_topologies_that_do_not_exist(name, message):
    with pytest.raises(ConfigError, match=message):
        aot.topology_devices(name)


def test_eight_way_tensor_axis_on_a_four_by_four_torus():
    assert dict(aot.build_mesh((-1, 1, 8), aot.topology_devices("v6e:4x4")).shape) == {"data": 2, "fsdp": 1, "tensor": 8}


def test_settings_that_cannot_be_used():
    with pytest.raises(ConfigError, match="model.variant 'omni_90b': expected one of omni_9b, audio_9b"):
        aot.model_config(settings("omni_9b", model=dict(variant="omni_90b")))
    with pytest.raises(ConfigError, match="has no 'seq_len', which --what=train needs"):
        aot.check_settings(settings("omni_9b"), "train")
    with pytest.raises(ConfigError, match="has no 'append_len', which --what=forward needs"):
        aot.check_settings(settings("omni_9b_sft"), "forward")
    with pytest.raises(ConfigError, match="has no 'cache_slots', which --what=unit needs"):
        aot.check_settings(settings("omni_9b_sft"), "unit")
    with pytest.raises(ConfigError, match="batch_size is 0"):
        aot.check_settings(settings("omni_9b", batch_size=0), "forward")
    with pytest.raises(ConfigError, match="attention is 'flash'"):
        aot.check_settings(settings("omni_9b_sft", attention="flash"), "train")
    for shape in ((3, -1, 1), (0, 1, 1), (-1, -1, 1), (2, 2)):
        with pytest.raises(ShardingError, match="product 4"):
            aot.build_mesh(shape, aot.topology_devices("v5e:2x2"))


def test_batches_hold_a_second_of_sound_and_a_picture_a_unit():
    from venus_jax.config import audio_9b, omni_9b

    batch = aot.abstract_batch(omni_9b(), 32, 2048)
    assert batch.images.patches.shape == (32, 25, 1089, 588) and batch.mel.shape == (32, 1, 2900, 80)
    assert aot.abstract_batch(audio_9b(), 32, 2048).mel.shape == (32, 6, 2900, 80)  # 157 units of 13 tokens


def test_command_line_errors(tmp_path):
    def run(*flags):
        return subprocess.run([sys.executable, ROOT / "launch" / "compile_tpu.py", *flags], capture_output=True, text=True)

    bad = run(f"--config={ROOT / 'configs/omni_9b.py'}", "--topology=v5e:banana")
    assert bad.returncode == 2 and bad.stderr.strip().count("\n") == 0 and "banana" in bad.stderr
    typo = run(f"--config={ROOT / 'configs/omni_9b.py'}", "--config.batch_sise=4")
    assert typo.returncode != 0 and "batch_size" in typo.stderr
    assert run(f"--config={ROOT / 'configs/omni_9b.py'}", "--what=speech").returncode == 1

"""The networks against recorded numbers of the reference, and `verify` itself when something is off."""

import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from venus_jax.checkpoints import golden as golden_lib
from venus_jax.checkpoints import verify
from venus_jax.errors import CheckpointError, GoldenError
from venus_jax.stream import sampling
from venus_jax.stream import verify as stream_verify

ROOT = Path(__file__).resolve().parents[2]
RUNNERS = verify.PARTS | stream_verify.PARTS


@pytest.fixture(scope="module")
def checks_of(golden):
    """Runs a part once, whoever asks."""
    return functools.cache(lambda part: verify.verify(golden_lib.GoldenSet(golden), [part], runners=RUNNERS))


@pytest.mark.parametrize("part, checks", [("llm", 14), ("vision", 20), ("audio", 130), ("tts", 100),
                                          ("decision", 120), ("duplex", 720)])
def test_every_fixture_is_met(checks_of, part, checks):
    assert not [str(check) for check in checks_of(part) if not check.ok]
    assert len(checks_of(part)) >= checks  # a fixture that is no longer compared would pass silently


def test_all_recorded_arrays_are_compared(checks_of, golden):
    """Each array of the audio fixtures, the most numerous, has a line of its own."""
    names = {check.name for check in checks_of("audio")}
    for file, prefix in (("streaming", "streaming."), ("streaming_mel_long", "streaming_mel_long."), ("clip", "clip.")):
        with np.load(golden / "audio" / f"{file}.npz") as arrays:
            inputs = {"wave_i16", "wave2_i16", "units"}
            assert not {prefix + key for key in arrays.files if key not in inputs} - names


def test_every_unit_of_every_session_is_compared(checks_of, golden):
    """Ids, lengths and states of each unit, and the whole cache behind the first eviction."""
    names = {check.name for check in checks_of("duplex")}
    for path in sorted((golden / "duplex").glob("session_*.json")):
        for unit in json.loads(path.read_text())["units"]:
            for what in ("generated ids", "decided", "kv before, after input, said, end", "prefill_embeds", "feed_hidden",
                         "kv_key_last", "window.units"):
                assert f"{path.stem}.u{unit['index']}.{what}" in names
    assert {"session_a_audio.u6.kv_key_all", "session_b_omni.u3.kv_key_all", "session_b_omni.u0.tts_first_probs"} <= names


def test_a_wrong_penalty_is_seen(golden, monkeypatch):
    """Mended penalties are not the recorded ones."""
    process = sampling.process
    monkeypatch.setattr(sampling, "process", lambda scores, history, c, tokens, quirks: process(
        scores, history, c, tokens, False))
    off = [check.name for check in verify.verify(golden_lib.GoldenSet(golden), ["decision"], runners=RUNNERS) if not check.ok]
    assert len([name for name in off if name.endswith(".processed")]) > 5


def test_a_wrong_weight_is_seen(golden, monkeypatch):
    def spoiled(*args, **kwargs):
        config, params = real(*args, **kwargs)
        params["llm"]["layers"]["attn"]["q_norm"]["scale"] *= 1.001
        return config, jax.tree.map(np.asarray, params)

    real = verify.import_hf
    monkeypatch.setattr(verify, "import_hf", spoiled)
    off = [check.name for check in verify.verify(golden_lib.GoldenSet(golden), ["llm"]) if not check.ok]
    assert "logits" in off and "hidden_states.embedding" not in off


def test_a_difference_of_shape_or_a_nan_is_off():
    report = golden_lib.Report("x")
    report.close("shape", np.zeros(3), np.zeros(4), 1.0)
    report.close("nan", np.array([np.nan]), np.array([0.0]), 1.0)
    report.close("infinities agree", np.array([-np.inf, 1]), np.array([-np.inf, 1]), 0.0)
    report.same("ids", [1, 2, 3], [1, 2, 4])
    assert [check.ok for check in report.checks] == [False, False, True, False]


def test_bounds_are_ten_times_the_recorded_difference_but_not_below_the_floor(golden):
    bounds = golden_lib.GoldenSet(golden)
    bounds.tolerances = {"a": 5e-5, "b": 1e-7}
    assert bounds.bound("a") == pytest.approx(5e-4) and bounds.bound("b") == 1e-4
    assert bounds.bound("b", logits=True) == 2e-4 and bounds.bound("unknown") == 1e-4


def test_broken_sets(golden, tmp_path):
    with pytest.raises(GoldenError, match="expected a folder of recorded fixtures"):
        golden_lib.GoldenSet(tmp_path / "absent")
    with pytest.raises(GoldenError, match="part 'voice' is unknown; parts are llm, vision, audio, tts"):
        verify.verify(golden_lib.GoldenSet(golden), ["voice"])
    with pytest.raises(GoldenError, match="config.json: this fixture file is missing"):
        verify.verify(golden_lib.GoldenSet(tmp_path), ["llm"])
    shutil.copytree(golden / "checkpoint", tmp_path / "checkpoint")
    (tmp_path / "llm").mkdir()
    (tmp_path / "llm" / "llm.npz").write_bytes((golden / "llm" / "llm.npz").read_bytes()[:5000])
    with pytest.raises(GoldenError, match="llm.npz: not a readable .npz file"):
        verify.verify(golden_lib.GoldenSet(tmp_path), ["llm"])
    arrays = dict(np.load(golden / "llm" / "llm.npz"))
    np.savez(tmp_path / "llm" / "llm.npz", **{key: value for key, value in arrays.items() if key != "logits"})
    with pytest.raises(GoldenError, match="llm/llm.npz: no entry 'logits'"):
        verify.verify(golden_lib.GoldenSet(tmp_path), ["llm"])
    np.savez(tmp_path / "llm" / "llm.npz", **{**arrays, "offset_embeds": arrays["offset_embeds"][:, :7]})
    with pytest.raises(GoldenError, match="part 'llm' is not of the expected layout after 'kv_values'"):
        verify.verify(golden_lib.GoldenSet(tmp_path), ["llm"])
    (tmp_path / "checkpoint" / "model.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="model.safetensors"):
        verify.verify(golden_lib.GoldenSet(tmp_path), ["llm"])


def test_command(golden, tmp_path):
    def run(*flags):
        return subprocess.run([sys.executable, ROOT / "launch" / "verify.py", *flags], capture_output=True, text=True,
                              env={"PYTHONPATH": str(ROOT), "PATH": "", "JAX_PLATFORMS": "cpu"})

    done = run(f"--golden={golden}", "--part=vision", f"--json={tmp_path / 'report.json'}")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "report.json").read_text())
    assert len(rows) >= 20 and all(row["ok"] for row in rows) and {"part", "name", "error", "bound"} <= set(rows[0])
    assert f"{len(rows)} of {len(rows)} comparisons ok" in done.stdout
    nowhere = run(f"--golden={golden}", f"--json={tmp_path / 'absent' / 'report.json'}")
    assert nowhere.returncode == 2 and "expected a file in an existing, writable folder" in nowhere.stderr
    assert nowhere.stdout == ""  # said before the work, not after it
    missing = run(f"--golden={tmp_path / 'nowhere'}")
    assert missing.returncode == 2 and missing.stderr.count("\n") == 1 and "nowhere" in missing.stderr

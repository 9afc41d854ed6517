"""The timings: what they run is what they say, and the command prints and writes it."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from venus_jax import benchmarks
from venus_jax.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
BENCH = ROOT / "launch" / "bench.py"


def small(**changes):
    """The default model, smaller still."""
    raw = json.loads(json.dumps(benchmarks.DEFAULT)) | dict(units=4, warmup_units=1, speak_tokens=3, vocab_size=512)
    raw["model"] |= dict(hidden=128, layers=1, heads=2, kv=1, inter=128)
    raw["model"]["aud"] |= dict(encoder_layers=1, encoder_ffn_dim=64, d_model=32, encoder_attention_heads=2)
    raw["model"]["tts"] |= dict(num_hidden_layers=1, hidden_size=32, intermediate_size=64, num_audio_tokens=80)
    return raw | changes


def bench_of(tmp_path, **changes):
    (tmp_path / "model.json").write_text(json.dumps(small(**changes)))
    return benchmarks.read_model_json(str(tmp_path / "model.json"))


def test_sizes_come_from_the_file(tmp_path):
    bench = bench_of(tmp_path)
    assert (bench.config.llm.hidden_size, bench.config.llm.num_layers, bench.config.talker.num_audio_tokens) == (128, 1, 80)
    assert (bench.speak_tokens, bench.units) == (3, 4)
    assert max(vars(bench.control).values()) < bench.config.llm.vocab_size


def test_files_that_cannot_be_used(tmp_path):
    for text, message in (("{", "cannot be read"), ("{}", "key 'seed' is missing"),
                          (json.dumps(small(base_vocab=500)), "vocab_size 512 has no room behind base_vocab 500"),
                          (json.dumps(small() | {"model": 3}), "not of the expected kind")):
        (tmp_path / "model.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            benchmarks.read_model_json(str(tmp_path / "model.json"))
    with pytest.raises(ConfigError, match="nowhere.json: cannot be read"):
        benchmarks.read_model_json(str(tmp_path / "nowhere.json"))


def test_units_follow_the_script(tmp_path):
    bench = bench_of(tmp_path)
    sessions = benchmarks.Sessions(bench, benchmarks._params(bench), 2, slots=128, speak=True)
    for speak in (False, True, True, False):
        assert sessions.unit(speak) > 0  # raises where the model did not say what the script wants
    held = np.asarray((sessions._state.llm.slot_position >= 0).sum(axis=1) + sessions._state.pending_count)
    closed = 1  # the last unit listens and closes the turn
    assert held.tolist() == [benchmarks.PROMPT_TOKENS + 1 + 4 * 13 + 2 * 3 + closed] * 2


def test_long_talk_and_its_report(tmp_path):
    seen = []
    result = benchmarks.bench_long(bench_of(tmp_path), hours=0.06, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (216, 216) and result["units"] == 216
    assert {"listen_aged_vs_fresh", "speak_aged_vs_fresh", "memory_growth"} == set(result["ratios"])
    assert all(0.2 < result["ratios"][f"{kind}_aged_vs_fresh"] < 5 for kind in ("listen", "speak"))
    assert {row["name"] for row in result["rows"]} == {"listen aged", "listen fresh", "speak aged", "speak fresh"}
    assert all(0 < row["p10_s"] <= row["median_s"] <= row["p90_s"] and row["n"] == 120 for row in result["rows"])


def test_command_without_torch(tmp_path):
    """The comparison is skipped with a message, our own rows stand."""
    (tmp_path / "model.json").write_text(json.dumps(small()))
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    flags = [f"--model_json={tmp_path / 'model.json'}", f"--json={tmp_path / 'out.json'}", "--what=unit"]
    done = subprocess.run([sys.executable, BENCH, *flags], capture_output=True, text=True,
                          env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": ""})
    assert done.returncode == 0, done.stderr
    assert "skipping the comparison" in done.stdout and "torch" in done.stdout
    report = json.loads((tmp_path / "out.json").read_text())
    assert [row["name"] for row in report["rows"]] == ["listen", "speak"] and report["ratios"] == {}
    assert all(row["n"] == 30 for row in report["rows"])

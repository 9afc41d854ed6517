"""`launch/convert.py` as a person meets it."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from venus_jax.checkpoints import safetensors_io, table
from venus_jax.errors import CheckpointError

CONVERT = Path(__file__).resolve().parents[2] / "launch" / "convert.py"


def run(*flags, **kwargs):
    return subprocess.run([sys.executable, CONVERT, *flags], capture_output=True, text=True, **kwargs)


def test_both_directions(lab, golden, tmp_path):
    there = run(f"--from={golden / 'checkpoint'}", f"--to={tmp_path / 'ours'}")
    assert there.returncode == 0 and there.stderr == ""
    assert re.search(r"ours: checkpoint form, 1,357,368 parameters, 0.01 GiB in [\d.]+ s, peak memory [\d.]+ GiB\n"
                     "4 rows for the added tokens appended", there.stdout)
    back = run(f"--from={tmp_path / 'ours'}", f"--to={tmp_path / 'back'}")
    assert back.returncode == 0 and back.stderr == ""
    assert "Hugging Face form" in back.stdout and "cut back" in back.stdout
    lab.assert_same_model(golden / "checkpoint", tmp_path / "back")


def test_bad_input_is_one_line_and_exit_2(lab, tmp_path):
    source = lab.make(lab.text())
    with open(source / "model.safetensors", "r+b") as f:
        f.truncate(9000)
    result = run(f"--from={source}", f"--to={tmp_path / 'new'}")
    assert result.returncode == 2 and result.stdout == ""
    assert re.fullmatch(r"convert\.py: \S*model\.safetensors: truncated: tensor '\S+' ends at byte .*\n", result.stderr)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("flags, message", [
    (["--to=x"], "--from"), (["--from=x", "--to=y", "--speed=9"], "speed"),
    (["--from=x", "--to=y", "z"], "unexpected argument 'z'"),
    (["--from=x", "--to=y", "--added_tokens=perhaps"], "auto|keep|drop")])
def test_wrong_flags_exit_1(flags, message, tmp_path):
    result = run(*flags, cwd=tmp_path)
    assert result.returncode == 1 and message in result.stdout + result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_interrupt_is_one_line_and_leaves_nothing(lab, tmp_path, number):
    config = lab.text(1_600_000)  # 800 MB each of embedding and head, in a file that is one hole: seconds to interrupt
    source = tmp_path / "hf"
    source.mkdir()
    with contextlib.suppress(CheckpointError), safetensors_io.Writer(
            source, {name: (shape, np.float32) for name, shape in table.hf_shapes(config).items()}):
        pass
    (source / "config.json").write_text(json.dumps(config.to_hf()))
    process = subprocess.Popen([sys.executable, CONVERT, f"--from={source}", f"--to={tmp_path / 'new'}"],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not list(tmp_path.glob(".new.*/params*")):
        time.sleep(0.01)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "convert.py: interrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]

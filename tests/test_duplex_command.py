"""launch/duplex.py as a user types it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import soundfile
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent


def test_the_command_writes_what_it_says(golden, tmp_path):
    speech = np.load(golden / "audio" / "speech.npz")["wave_i16"][:15_000]
    soundfile.write(tmp_path / "talk.wav", np.stack([speech] * 2, 1), 16_000)
    run = subprocess.run(
        [sys.executable, "launch/duplex.py", f"--checkpoint={golden / 'checkpoint'}",
         f"--input={tmp_path / 'talk.wav'}", f"--output={tmp_path / 'new' / 'out'}",
         "--slots=512", "--greedy", "--max_tokens=6", "--tail=0", "--text=0.5:hi"],
        cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache" / "jax")})
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) == 2 and lines[0].startswith("   0.0 s  ") and 'typed "hi"' in lines[0]
    assert lines[1].startswith("1 unit of 1 s, ") and "real-time factor" in lines[1]

    out = tmp_path / "new" / "out"
    assert sorted(path.name for path in out.iterdir()) == ["timeline.png", "trace.jsonl", "transcript.json"]
    transcript = json.loads((out / "transcript.json").read_text("utf-8"))
    trace = [json.loads(line) for line in (out / "trace.jsonl").read_text("utf-8").splitlines()]
    assert [entry["unit"] for entry in transcript] == [0]
    for entry, step in zip(transcript, trace, strict=True):
        assert entry.items() <= step.items() and entry["state"] in ("listen", "speak")
        assert set(step) == {"unit", "seconds", "state", "text", "delegate", "tokens", "terminator", "codes",
                             "end_of_turn", "flush", "kv_length", "typed", "background", "frames", "step_seconds"}
    with Image.open(out / "timeline.png") as picture:
        assert picture.width > 1000

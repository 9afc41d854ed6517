"""The PyTorch yardstick: it does the reference's work, no less, and says plainly when it cannot.

Torch lives in a process of its own, perhaps in an environment of its own: `TORCH_PYTHON=.../python pytest ...`.
"""

import contextlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.conftest import ROOT

PROGRAM = ROOT / "venus_jax" / "torch_yardstick.py"
PYTHON = os.environ.get("TORCH_PYTHON", sys.executable)
SPEC = {
    "seed": 3, "threads": 1, "speak_tokens": 4, "vocab_size": 64,
    "model": {"hidden": 32, "layers": 2, "heads": 4, "kv": 2, "head_dim": 8, "inter": 48,
              "aud": {"d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64,
                      "max_source_positions": 152, "num_mel_bins": 80}}}

# Enough of a torch to be imported.
STUB = "import sys, types; sys.modules['torch.nn'] = nn = types.SimpleNamespace(functional=None)"

# Runs the reference's recorded sound through the yardstick's audio part with the reference's weights.
REPLAY = """
import json, sys
import numpy as np, torch
from safetensors.torch import load_file
from venus_jax import torch_yardstick as yardstick

golden, result = sys.argv[1:]
config = json.load(open(f"{golden}/checkpoint/config.json"))
weights = load_file(f"{golden}/checkpoint/model.safetensors")
part = lambda prefix: {name.removeprefix(prefix): x for name, x in weights.items() if name.startswith(prefix)}
encoder = yardstick.StreamingWhisper(config["audio_config"])
projector = yardstick.Projector(config["audio_config"]["d_model"], config["hidden_size"])
encoder.load_state_dict(part("apm."))
projector.load_state_dict(part("audio_projection_layer."))
sound = torch.from_numpy(np.load(f"{golden}/audio/speech.npz")["wave_i16"].astype(np.float32) / 32768)
mel, out = yardstick.StreamingMel(80), {}
with torch.inference_mode():
    for i, second in enumerate(sound.unfold(0, 16000, 16000)):
        out[f"mel{i}"] = frames = mel(second)
        out[f"embeds{i}"] = projector(encoder(frames))[0]
np.savez(result, **out)
"""


@pytest.fixture(scope="session")
def torch_python():
    """A Python that has torch and transformers."""
    probe = "from torch import nn; from transformers import Qwen3ForCausalLM"
    run = subprocess.run([PYTHON, "-c", probe], cwd=ROOT, capture_output=True, text=True)
    if run.returncode:
        pytest.skip(f"needs torch and transformers ({run.stderr.strip().splitlines()[-1]}); TORCH_PYTHON may name a "
                    "Python that has them")
    return PYTHON


@contextlib.contextmanager
def child(python, **environment):
    """Yields ask(line) -> answer of a running yardstick."""
    with subprocess.Popen([python, "-P", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
                          env=os.environ | environment) as process:
        def ask(line, answered=True):
            print(line, file=process.stdin)
            return json.loads(process.stdout.readline()) if answered else None
        try:
            yield ask
        finally:
            process.stdin.close()
            rest = process.stdout.read()
    assert (process.returncode, rest) == (0, "")


@pytest.mark.parametrize("absent", ["torch", "transformers"])
def test_without_torch_one_line_says_so(tmp_path, absent):
    """Before it reads anything; here a module of that name that fails as an absent one does."""
    modules = {"torch": STUB, "transformers": "", absent: f"raise ModuleNotFoundError(\"No module named '{absent}'\")"}
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
    run = subprocess.run([sys.executable, "-P", PROGRAM], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                         env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert (run.returncode, run.stderr) == (1, "")
    answer, = map(json.loads, run.stdout.splitlines())
    assert list(answer) == ["error"] and f"'{absent}'" in answer["error"]


def test_units_are_fed_as_the_reference_feeds_them(torch_python):
    with child(torch_python) as ask:
        ready = ask(json.dumps(SPEC))
        assert ready["ready"] and ready["parameters"] > 2 * 64 * 32
        lengths = []
        for word in ("listen", "speak", "speak", "listen"):
            unit = ask(word)
            assert 0 < sum(unit["parts"].values()) == pytest.approx(unit["seconds"])
            assert set(unit["parts"]) == {"audio", "backbone"}
            lengths.append((unit["kv_length"], unit["audio_kv_length"]))
        # <unit>, 10 of sound, 4 tokens if it speaks, terminator, </unit>; a third unit's 52 states would fill 152
        assert lengths == [(13, 50), (30, 100), (47, 50), (60, 100)]

        assert ask("hello")["error"] == "unknown command 'hello'; expected listen, speak, reset or quit"
        ask("reset", answered=False)
        unit = ask("listen")
        assert (unit["kv_length"], unit["audio_kv_length"]) == (13, 50)


@pytest.mark.parametrize("spec, wanted", [
    ({"seed": 3, "threads": 1, "speak_tokens": 4, "model": SPEC["model"]}, "the model's JSON has no 'vocab_size'"),
    (SPEC | {"threads": 0}, "no model can be built from the first line: set_num_threads")])
def test_a_wrong_model_is_one_line(torch_python, spec, wanted):
    run = subprocess.run([torch_python, "-m", "venus_jax.torch_yardstick"], cwd=ROOT, input=json.dumps(spec),
                         capture_output=True, text=True)
    assert run.returncode == 1 and "Traceback" not in run.stderr
    answer, = map(json.loads, run.stdout.splitlines())
    assert wanted in answer["error"]


def test_it_hears_what_the_reference_heard(torch_python, golden, tmp_path):
    """33 seconds of speech: the sound remembered slides at second 29, the encoder's cache begins anew at second 5."""
    subprocess.run([torch_python, "-c", REPLAY, golden, tmp_path / "replay.npz"], cwd=ROOT, check=True)
    replay = np.load(tmp_path / "replay.npz")
    short, long = (np.load(golden / "audio" / name) for name in ("streaming.npz", "streaming_mel_long.npz"))
    wanted = {name: x for file in (short, long) for name, x in file.items() if name in replay}
    assert {"embeds0", "embeds5", "embeds8", "mel0", "mel4", "mel29"} <= set(wanted)
    for name, x in wanted.items():
        np.testing.assert_allclose(replay[name], x, rtol=0, atol=2e-5, err_msg=name)

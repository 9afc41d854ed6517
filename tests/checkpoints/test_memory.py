"""A checkpoint that would not fit in the memory we allow ourselves goes through the command in both directions."""

import json
import math
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from venus_jax.checkpoints import safetensors_io, table
from venus_jax.config import omni_9b

CONVERT = Path(__file__).resolve().parents[2] / "launch" / "convert.py"
GIB = 2**30
LAYERS = 12  # of the published 36: 8.8 GiB, and three times that on the disk
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def write_checkpoint(directory: Path, config) -> int:
    """A Hugging Face directory of these sizes, every tensor with other numbers; returns its bytes."""
    directory.mkdir()
    noise = np.random.default_rng(0).standard_normal(2**24, np.float32).astype(BFLOAT16)
    shapes = table.hf_shapes(config)
    with safetensors_io.Writer(directory, {name: (shape, BFLOAT16) for name, shape in shapes.items()}) as writer:
        for name, shape in shapes.items():
            width = math.prod(shape[1:])
            block = len(noise) // 2 // width
            begin = zlib.crc32(name.encode()) % (len(noise) // 2)
            for row in range(0, shape[0], block):
                count = min(block, shape[0] - row)
                writer.write(name, row, noise[begin:begin + count * width].reshape(count, *shape[1:]))
    (directory / "config.json").write_text(json.dumps(config.to_hf()))
    return sum(map(math.prod, shapes.values())) * BFLOAT16.itemsize


def convert(source: Path, target: Path) -> float:
    """Runs the command; returns the most memory it had, in GiB."""
    command = [sys.executable, CONVERT, f"--from={source}", f"--to={target}"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    print(run.stdout, end="")
    return float(re.search(r"peak memory ([\d.]+) GiB", run.stdout)[1])


def assert_same_bytes(a: Path, b: Path) -> None:
    with open(a, "rb") as f, open(b, "rb") as g:
        while (block := f.read(2**26)) == g.read(2**26):
            if not block:
                return
        pytest.fail(f"{a.name} differs somewhere in the 64 MiB before byte {f.tell()}", pytrace=False)


@pytest.fixture
def scratch(tmp_path):
    yield tmp_path
    shutil.rmtree(tmp_path)  # pytest would keep it for the next three runs


@pytest.mark.slow
def test_memory_stays_below_the_largest_stack_and_2_gib(scratch):
    config = omni_9b(added_tokens=False, llm=dict(num_layers=LAYERS))
    nbytes = write_checkpoint(scratch / "hf", config)
    largest = max(math.prod(rule.param_shape) for rule in table.rules(config) if rule.layers) * BFLOAT16.itemsize / GIB
    print(f"\n{nbytes / GIB:.2f} GiB, largest stack of layers {largest:.2f} GiB, allowed {largest + 2:.2f} GiB")
    assert nbytes >= 8 * GIB
    for source, target in (("hf", "ours"), ("ours", "back")):
        assert convert(scratch / source, scratch / target) <= largest + 2
    names = sorted(path.name for path in (scratch / "hf").iterdir())
    assert names == sorted(path.name for path in (scratch / "back").iterdir())
    for name in names:
        assert_same_bytes(scratch / "hf" / name, scratch / "back" / name)

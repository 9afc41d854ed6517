"""One checkpoint written and read by two processes, each with half of the devices."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from venus_jax.checkpoints import store
from venus_jax.checkpoints.convert import convert

ROOT = Path(__file__).resolve().parents[2]

PROCESS = """
import sys, jax
port, index, source, target = sys.argv[1:]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(index))
from venus_jax import sharding
from venus_jax.checkpoints import store
mesh = sharding.make_mesh((1, 8, 1))
config, params = store.load_checkpoint(
    source, lambda shapes: sharding.param_shardings(shapes, sharding.TRAIN, mesh), vocab_multiple=64)
store.save_checkpoint(target, params, config, extra_files=source)
"""


@pytest.mark.slow
def test_two_processes_write_one_checkpoint(lab, tmp_path):
    convert(lab.make(lab.tiny()), tmp_path / "ours")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-c", PROCESS, str(port)]
    processes = [subprocess.Popen([*command, str(index), tmp_path / "ours", tmp_path / "new"], cwd=ROOT,
                                  env={**os.environ, "JAX_NUM_CPU_DEVICES": "4"}) for index in range(2)]
    assert [process.wait(timeout=300) for process in processes] == [0, 0]
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "ours", "new"}
    (_, expected), (_, found) = (store.load_checkpoint(tmp_path / name, vocab_multiple=1) for name in ("ours", "new"))
    assert jax.tree.all(jax.tree.map(np.array_equal, expected, found))

"""Honest timings of the duplex step: one unit against a plain PyTorch loop, many sessions against one, hours of talk.

Models have random weights and the sizes of a `model_json` file; what they say is scripted. Every figure is wall time
around everything a unit needs, packing and the transfer of the outputs included. Machines are shared and noisy: whatever is
compared runs alternately, and only ratios of medians within one run mean anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from venus_jax.config import (
    SAMPLE_RATE, AudioConfig, ImageConfig, LLMConfig, ResamplerConfig, TalkerConfig, VenusConfig, VisionConfig)
from venus_jax.errors import ConfigError
from venus_jax.models import frontend
from venus_jax.nn.layers import separate_layers
from venus_jax.stream import sampling
from venus_jax.stream.inputs import Bucket, Row, pack
from venus_jax.stream.prompt import make_prompt
from venus_jax.stream.state import StreamConfig, init_state
from venus_jax.stream.transition import prefill, transition
from venus_jax.stream.vocabulary import Vocabulary
from venus_jax.tokens import ControlTokens

PROMPT_TOKENS = 32
SLOTS = 1280  # of each session where sessions are compared with sessions
PAUSE = 0.02  # seconds before each timed unit, in which the other side's idle threads stop spinning

# A quarter of the benchmark model of the golden set: what `--what=long` and `batch` run when no file is named.
DEFAULT = dict(name="llm2x256", seed=7, threads=2, units=30, warmup_units=2, listen_units=10, speak_tokens=10,
               base_vocab=384, vocab_size=8192, model=dict(
                   hidden=256, layers=2, heads=4, kv=2, head_dim=64, inter=768,
                   vis=dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256,
                            image_size=980, patch_size=14), drop_vision_last_layer=False, query_num=64,
                   aud=dict(d_model=128, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=512,
                            max_source_positions=1500, num_mel_bins=80),
                   tts=dict(hidden_size=128, intermediate_size=512, num_attention_heads=2, num_key_value_heads=2,
                            num_hidden_layers=2, num_audio_tokens=6562)))


@dataclasses.dataclass(frozen=True)
class Bench:
    """A benchmark model and its script."""

    name: str
    config: VenusConfig
    control: ControlTokens
    seed: int
    units: int
    warmup: int
    speak_tokens: int
    raw: dict[str, Any]


def read_model_json(path: str | None) -> Bench:
    """Reads a `model_json` file (None: a small default).

    Raises:
      ConfigError: not readable, or a key is missing or unusable; the message names it.
    """
    raw = DEFAULT
    if path is not None:
        try:
            raw = json.loads(Path(path).read_text())
        except (OSError, ValueError, RecursionError) as e:
            raise ConfigError(f"--model_json={path}: cannot be read ({e})") from e
    where = path or "the default model"
    try:
        for key, least in (("seed", 0), ("units", 1), ("warmup_units", 0), ("speak_tokens", 1), ("base_vocab", 1),
                           ("vocab_size", 64)):
            if type(raw[key]) is not int or not least <= raw[key] < 2**31:
                raise ConfigError(f"{where}: {key} is {raw[key]!r}; expected a whole number from {least}")
        m, base = raw["model"], raw["base_vocab"]
        a, t, v = m["aud"], m["tts"], m["vis"]
        config = VenusConfig(
            name=raw["name"],
            llm=LLMConfig(vocab_size=raw["vocab_size"], hidden_size=m["hidden"], intermediate_size=m["inter"],
                          num_layers=m["layers"], num_heads=m["heads"], num_kv_heads=m["kv"], head_dim=m["head_dim"]),
            vision=VisionConfig(hidden_size=v["hidden_size"], intermediate_size=v["intermediate_size"],
                                num_layers=v["num_hidden_layers"], num_heads=v["num_attention_heads"],
                                image_size=v["image_size"], patch_size=v["patch_size"],
                                drop_last_layer=m["drop_vision_last_layer"]),
            resampler=ResamplerConfig(num_queries=m["query_num"], hidden_size=m["hidden"], kv_dim=v["hidden_size"]),
            image=ImageConfig(),
            audio=AudioConfig(hidden_size=a["d_model"], intermediate_size=a["encoder_ffn_dim"],
                              num_layers=a["encoder_layers"], num_heads=a["encoder_attention_heads"],
                              num_mel_bins=a["num_mel_bins"], max_positions=a["max_source_positions"]),
            talker=TalkerConfig(hidden_size=t["hidden_size"], intermediate_size=t["intermediate_size"],
                                num_layers=t["num_hidden_layers"], num_heads=t["num_attention_heads"],
                                num_kv_heads=t["num_key_value_heads"], num_audio_tokens=t["num_audio_tokens"],
                                num_text_tokens=raw["vocab_size"], audio_bos_token_id=base, text_eos_token_id=base + 1,
                                unused_vocab_size=8))
        names = [f.name for f in dataclasses.fields(ControlTokens)]
        control = ControlTokens(**{name: base + i for i, name in enumerate(names)})
        if base + len(names) > raw["vocab_size"]:
            raise ConfigError(f"{where}: vocab_size {raw['vocab_size']} has no room behind base_vocab {base}")
        return Bench(raw["name"], config, control, raw["seed"], raw["units"], raw["warmup_units"], raw["speak_tokens"], raw)
    except KeyError as e:
        raise ConfigError(f"{where}: key {e.args[0]!r} is missing") from e
    except TypeError as e:
        raise ConfigError(f"{where}: a value is not of the expected kind ({e})") from e
    except ConfigError as e:
        raise e if where in str(e) else ConfigError(f"{where}: {e}") from e


class Sessions:
    """`batch` scripted sessions over the raw transition: a unit is `unit(speak)`, its return value the seconds it took."""

    def __init__(self, bench: Bench, params, batch: int, slots: int, speak: bool):
        self.bench, self.params, self.batch = bench, params, batch
        self.config = StreamConfig(bench.config, bench.control, slots=slots, speak=speak,
                                   max_unit_tokens=max(32, bench.speak_tokens + 2))
        self.controls = sampling.controls(batch, _tables(bench), greedy=True, voice_greedy=True, follow_clock=False,
                                          max_delegate=0, max_tokens=bench.speak_tokens + 1)
        self._noise = np.random.default_rng(bench.seed).standard_normal((64, SAMPLE_RATE)).astype(np.float32) * 0.05
        self._count, self._state, self.bucket = 0, init_state(self.config, batch), Bucket()
        self._program = jax.jit(transition, static_argnames="config", donate_argnames="state").lower(
            params, self.config, self._state, *pack(self.config, self.bucket, [None] * batch), self.controls).compile()
        prompt = make_prompt(self.config, [True] * self.batch, [3] * PROMPT_TOKENS, None, [4], range(self.batch))
        self._state = jax.jit(prefill, static_argnames="config", donate_argnames="state")(
            self.params, self.config, self._state, prompt)
        jax.block_until_ready(self._state)

    def unit(self, speak: bool) -> float:
        """Runs one unit; raises RuntimeError where it did not follow the script."""
        samples = [np.clip(self._noise[(self._count + i) % len(self._noise)], -1, 1) for i in range(self.batch)]
        start = time.perf_counter()
        packed = pack(self.config, self.bucket, [Row(x, force_listen=not speak) for x in samples])
        self._state, out = self._program(self.params, self._state, *packed, self.controls)
        out = jax.device_get(out)
        seconds = time.perf_counter() - start
        self._count += 1
        if (out.token_count != (self.bench.speak_tokens if speak else 0)).any() or out.full.any():
            raise RuntimeError(f"the scripted model said {out.token_count} tokens")
        return seconds


def _tables(bench: Bench) -> Vocabulary:
    """Every control token is barred: the model says plain tokens until its budget ends the unit."""
    rows = bench.config.llm.vocab_rows
    barred = np.isin(np.arange(rows), dataclasses.astuple(bench.control))
    no = np.zeros(rows, bool)
    return Vocabulary(jnp.asarray(barred), jnp.asarray(no), jnp.zeros(rows), jnp.zeros((8, rows), jnp.int8),
                      jnp.zeros((8, rows), jnp.int16))


def _params(bench: Bench):
    """Random weights; the unit's end never has the highest score, for all scores but its own can be positive."""
    params = frontend.init_params(bench.config, jax.random.key(bench.seed))
    head = params["llm"]["lm_head"]["kernel"]
    params["llm"]["lm_head"]["kernel"] = head.at[:, bench.control.chunk_eos].set(0)
    return separate_layers(params) if jax.default_backend() == "cpu" else params  # as `api.load` does


def bench_unit(bench: Bench, torch_python: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Listening and speaking units, backbone and audio part, against the PyTorch loop, alternately."""
    if shutil.which(torch_python) is None:
        raise ConfigError(f"--torch_python={torch_python}: no such program")
    count = max(30, bench.units)
    # room for all of the script, as the other side has: nothing is forgotten on either
    slots = PROMPT_TOKENS + (bench.warmup + count + 1) * (2 * 13 + bench.speak_tokens) + 64
    ours = Sessions(bench, _params(bench), 1, slots=slots, speak=False)
    rows, ratios = [], {}
    with _yardstick(bench, torch_python, say) as theirs:
        for kind in ("listen", "speak"):
            sides = {f"{kind}": lambda: ours.unit(kind == "speak")}
            if theirs is not None:
                sides[f"{kind} torch"] = lambda: theirs(kind)
            times = _alternate(sides, count, bench.warmup)
            rows += [_row(name, values) for name, values in times.items()]
            if theirs is not None:
                ratios[f"{kind}_vs_torch"] = _ratio(times[kind], times[f"{kind} torch"])
    return {"rows": rows, "ratios": ratios}


def bench_batch(bench: Bench, batch: int = 16) -> dict[str, Any]:
    """Units per second of `batch` sessions over those of one: listening, speaking, and speaking with the talker."""
    params = _params(bench)
    rows, ratios = [], {}
    for name, speak, voice in (("listen", False, False), ("speak", True, False), ("speak with voice", True, True)):
        one, many = (Sessions(bench, params, n, slots=SLOTS, speak=voice) for n in (1, batch))
        times = _alternate({name: lambda: one.unit(speak), f"{name} x{batch}": lambda: many.unit(speak)},
                           max(30, bench.units), bench.warmup)
        rows += [_row(key, values) for key, values in times.items()]
        ratios[f"{name.replace(' ', '_')}_throughput_x{batch}"] = batch * _ratio(times[name], times[f"{name} x{batch}"])
    script = sum(count * _median(rows, name) for name, count in (("listen", 1), ("speak with voice", 2)))
    script_many = sum(count * _median(rows, f"{name} x{batch}") for name, count in (("listen", 1), ("speak with voice", 2)))
    ratios[f"script_throughput_x{batch}"] = batch * script / script_many
    return {"rows": rows, "ratios": ratios}


def bench_long(bench: Bench, hours: float, progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Hours of talk under `prefix_ring`, then the aged session and a fresh one alternately; memory along the way.

    Of ten units three speak, with voice. Memory is the process's resident set, first read after 200 units and then
    twenty times more: growth with the hours and a step of the allocator look different.
    """
    params, units = _params(bench), round(hours * 3600)
    aged = Sessions(bench, params, 1, slots=1024, speak=True)
    resident: dict[int, int] = {}
    for k in range(1, units + 1):
        aged.unit(speak=(k - 1) % 10 >= 7)
        if k == 200 or k == units or k % max(1, units // 20) == 0:
            resident[k] = resident_memory()
        progress(k, units)
    fresh = Sessions(bench, params, 1, slots=1024, speak=True)
    rows, ratios = [], {}
    for name, speak in (("listen", False), ("speak", True)):
        times = _alternate({f"{name} aged": lambda: aged.unit(speak), f"{name} fresh": lambda: fresh.unit(speak)},
                           4 * max(30, bench.units), bench.warmup)
        rows += [_row(key, values) for key, values in times.items()]
        ratios[f"{name}_aged_vs_fresh"] = _ratio(times[f"{name} aged"], times[f"{name} fresh"])
    if units > 200:
        ratios["memory_growth"] = resident[units] / resident[200] - 1
    return {"rows": rows, "ratios": ratios, "units": units, "resident_bytes": resident}


def resident_memory() -> int:
    """Bytes of this process in memory now (Linux), or the most it ever had."""
    with contextlib.suppress(OSError):
        with open("/proc/self/statm", encoding="ascii") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@contextlib.contextmanager
def _yardstick(bench: Bench, python: str, say: Callable[[str], None]) -> Iterator[Callable[[str], float] | None]:
    """A child process with the PyTorch loop, in our process group; gives `unit(kind) -> seconds`, or None without torch."""
    program = Path(__file__).with_name("torch_yardstick.py")
    try:
        child = subprocess.Popen([python, "-P", str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    except OSError as e:
        raise ConfigError(f"--torch_python={python}: cannot be run ({e.strerror})") from e

    def ask(line: str) -> dict[str, Any]:
        try:
            child.stdin.write(line + "\n")
            child.stdin.flush()
        except BrokenPipeError:
            pass  # its last words say why
        answer = child.stdout.readline()
        return json.loads(answer) if answer.strip() else {"error": "the PyTorch yardstick ended without a word"}

    with child:
        try:
            ready = ask(json.dumps(bench.raw))
            if "error" in ready:
                say(f"skipping the comparison: {ready['error']}")
                yield None
                return

            def unit(kind: str) -> float:
                answer = ask(kind)
                if "error" in answer:
                    raise ConfigError(f"the PyTorch yardstick failed: {answer['error']}")
                return answer["seconds"]

            yield unit
        finally:
            with contextlib.suppress(BrokenPipeError, OSError):
                child.stdin.close()
            child.terminate()


def _alternate(sides: dict[str, Callable[[], float]], count: int, warmup: int) -> dict[str, list[float]]:
    """Times every side `count` times in turn, after `warmup` rounds."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for k in range(warmup + count):
        for name, run in sides.items():
            time.sleep(PAUSE)
            seconds = run()
            if k >= warmup:
                times[name].append(seconds)
    return times


def _row(name: str, times: list[float]) -> dict[str, Any]:
    p10, median, p90 = np.percentile(times, [10, 50, 90]).tolist()
    return {"name": name, "median_s": median, "p10_s": p10, "p90_s": p90, "n": len(times)}


def _median(rows: list[dict[str, Any]], name: str) -> float:
    return next(row["median_s"] for row in rows if row["name"] == name)


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return float(np.median(ours) / np.median(theirs))

"""Ahead-of-time compilation for a TPU topology on a machine that has none, and what it says about memory.

XLA's TPU compiler (`jax[tpu]`) needs no chip. A program that does not fit is refused by it, and reported as such.
"""

from __future__ import annotations

import math
import os
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from venus_jax import config as presets
from venus_jax import sharding
from venus_jax.config import VenusConfig
from venus_jax.errors import ConfigError
from venus_jax.media import images as pictures
from venus_jax.media.images import VisionInputs
from venus_jax.models import frontend, whisper
from venus_jax.nn import kv_cache
from venus_jax.stream import sampling
from venus_jax.stream.inputs import Bucket, pack
from venus_jax.stream.state import StreamConfig, init_state, state_specs
from venus_jax.stream.transition import transition
from venus_jax.stream.vocabulary import Vocabulary
from venus_jax.tokens import PUBLISHED_CONTROL
from venus_jax.training import step as training

GIB = 1 << 30
# Usable memory of a chip in bytes, as the compiler budgets it.
HBM = {"v5e": 15.75 * GIB, "v5p": 95.74 * GIB, "v6e": 31.25 * GIB}
# The compiler's plugin expects a TPU machine: there is no metadata server to ask, no host to name, and no chip that two
# processes could fight for.
_NO_CHIP = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


def topology_devices(name: str) -> list[Any]:
    """Devices of a topology such as `v5e:4x8`.

    Raises:
      ConfigError: not of the form CHIP:AxB[xC], an unknown chip, or no TPU compiler installed.
    """
    match = re.fullmatch(r"(\w+):([1-9]\d*(?:x[1-9]\d*){1,2})", name)
    if not match or match[1] not in HBM:
        raise ConfigError(f"topology {name!r}: expected CHIP:AxB or CHIP:AxBxC, chip one of {', '.join(HBM)}")
    for key, value in _NO_CHIP.items():
        os.environ.setdefault(key, value)
    from jax.experimental import topologies

    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
    except Exception as e:  # the plugin raises several kinds
        raise ConfigError(f"topology {name!r}: {str(e).splitlines()[0]} (is `jax[tpu]` installed?)") from e


def model_config(settings: Any) -> VenusConfig:
    """The `VenusConfig` a run configuration's `model` section names.

    Raises:
      ConfigError: an unknown `model.variant`.
    """
    variants = {"omni_9b": presets.omni_9b, "audio_9b": presets.audio_9b}
    if settings.model.variant not in variants:
        raise ConfigError(f"model.variant {settings.model.variant!r}: expected one of {', '.join(variants)}")
    config = variants[settings.model.variant](dtype=settings.model.dtype)
    return config.replace(llm=dict(vocab_multiple=settings.model.vocab_multiple))


def check_settings(settings: Any, what: str) -> None:
    """Refuses a run configuration before anything slow happens.

    Raises:
      ConfigError: `what` ("forward", "unit" or "train") needs keys it does not have, or a value is unusable.
    """
    needed = {"forward": ("batch_size", "append_len", "cache_slots"),
              "unit": ("batch_size", "cache_slots", "talker_slots"),
              "train": ("batch_size", "seq_len", "trainable", "optimizer", "ce_chunk", "q_chunk", "attention")}[what]
    for key in ("model", "mesh", *needed):
        if key not in settings:
            raise ConfigError(f"the configuration has no {key!r}, which --what={what} needs")
    for key in needed:
        if isinstance(settings[key], int) and settings[key] < 1:
            raise ConfigError(f"{key} is {settings[key]}; expected a positive whole number")
    if what == "train" and settings.attention not in ("auto", "xla", "splash"):
        raise ConfigError(f"attention is {settings.attention!r}; expected auto, xla or splash")
    model_config(settings)


def build_mesh(shape, devices):
    """A mesh of `devices`; one size of `shape` may be -1: whatever is left. (1, 1, 1) takes the first device alone."""
    if tuple(shape) == (1, 1, 1):
        devices = devices[:1]
    known = math.prod(size for size in shape if size != -1)
    if known > 0 and len(devices) % known == 0 and list(shape).count(-1) <= 1:
        shape = [len(devices) // known if size == -1 else size for size in shape]
    return sharding.make_mesh(shape, devices)


def lower_train(settings: Any, mesh) -> jax.stages.Lowered:
    """The train step of a training configuration, on abstract arrays laid out on `mesh`."""
    config, rules = model_config(settings), sharding.TRAIN
    optimizer = optax.adamw(settings.optimizer.learning_rate, b2=settings.optimizer.b2,
                            weight_decay=settings.optimizer.weight_decay)
    state = jax.eval_shape(lambda: training.init_state(
        frontend.init_params(config, jax.random.key(0)), settings.trainable, optimizer, jnp.dtype(config.dtype)))
    state = _place_state(state, rules, mesh)
    batch = _place(abstract_batch(config, settings.batch_size, settings.seq_len), rules, mesh)
    step = training.make_train_step(config, optimizer, rules, ce_chunk=settings.ce_chunk, q_chunk=settings.q_chunk,
                                    implementation=settings.attention)
    with jax.set_mesh(mesh):
        return jax.jit(step, donate_argnums=0).lower(state, batch)


def lower_forward(settings: Any, mesh) -> jax.stages.Lowered:
    """One unit's input through the served model: a second of sound, a picture, the backbone over its cache, logits.

    The whole parameter tree is an argument, the talker too, as it is when serving.
    """
    config, rules = model_config(settings), sharding.SERVE
    dtype = jnp.dtype(config.dtype)
    model = frontend.Frontend(config, rules)
    b, t = settings.batch_size, settings.append_len

    def forward(params, ids, media_index, mel, first, images, cache, audio_cache):
        apply = lambda *args, method: model.apply({"params": params}, *args, method=method)
        media, audio_cache = apply(mel, first, jnp.ones_like(first), audio_cache, method="encode_stream")
        if images is not None:
            pictures = apply(images, method="encode_images")
            media = jnp.concatenate([pictures.reshape(b, -1, pictures.shape[-1]), media], axis=1)
        x = apply(ids, media, media_index, method="embed")
        positions = kv_cache.next_positions(cache, jnp.ones_like(ids, bool))
        hidden, cache = apply(x, positions, None, cache, method="backbone")
        return apply(hidden[:, -1:], method="logits"), cache, audio_cache

    shape = jax.ShapeDtypeStruct
    params = frontend.abstract_params(config, dtype)
    params = _with_sharding(params, sharding.param_shardings(params, rules, mesh))
    images = None
    if (v := config.vision) is not None:
        patches = pictures.max_patches(config.image.scale_resolution, v.patch_size)
        images = VisionInputs(shape((b, patches, v.patch_dim), dtype), shape((b, 2), jnp.int32),
                              shape((b, patches), jnp.int32))
    llm, audio = config.llm, config.audio
    frames = 100 + 2 * whisper.CONTEXT_FRAMES
    inputs = _place((shape((b, t), jnp.int32), shape((b, t), jnp.int32), shape((b, frames, audio.num_mel_bins), dtype),
                     shape((b,), bool), images), rules, mesh)
    cache = jax.eval_shape(lambda: kv_cache.empty(llm.num_layers, b, settings.cache_slots, llm.num_kv_heads,
                                                  llm.head_dim, dtype))
    audio_cache = jax.eval_shape(lambda: whisper.empty_cache(audio, b, dtype))
    caches = [_with_specs(c, kv_cache.specs(rules, heads), mesh) for c, heads in ((cache, "kv_heads"), (audio_cache, "heads"))]
    with jax.set_mesh(mesh):
        return jax.jit(forward, donate_argnums=(6, 7), keep_unused=True).lower(params, *inputs, *caches)


def lower_unit(settings: Any, mesh) -> jax.stages.Lowered:
    """One unit of many duplex sessions: the whole transition, with its decision loop and its talker."""
    rules = sharding.SERVE
    config = StreamConfig(model_config(settings), PUBLISHED_CONTROL, slots=settings.cache_slots,
                          talker_slots=settings.talker_slots, rules=rules)
    batch, bucket = settings.batch_size, Bucket(settings.slices, settings.text)
    dtype = jnp.dtype(config.model.dtype)
    params = frontend.abstract_params(config.model, dtype)
    params = _with_sharding(params, sharding.param_shardings(params, rules, mesh))
    state = _with_specs(jax.eval_shape(lambda: init_state(config, batch)), state_specs(config, rules, batch, mesh), mesh)
    packed = _place(pack(config, bucket, [None] * batch), rules, mesh)
    rows = config.model.llm.vocab_rows
    shape = jax.ShapeDtypeStruct
    tables = Vocabulary(shape((rows,), bool), shape((rows,), bool), shape((rows,), jnp.float32),
                        shape((8, rows), jnp.int8), shape((8, rows), jnp.int16))
    controls = jax.eval_shape(lambda: sampling.controls(batch, None))
    controls = _place(controls, rules, mesh)._replace(
        vocabulary=_with_sharding(tables, jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), tables)))
    with jax.set_mesh(mesh):
        return jax.jit(transition, static_argnames="config", donate_argnames="state", keep_unused=True).lower(
            params, config, state, *packed, controls)


def abstract_batch(config: VenusConfig, batch_size: int, seq_len: int) -> training.Batch:
    """Shapes of a training batch filled with units: one second of sound each, and one picture where there is vision.

    A listening unit takes 13 tokens, 79 with a picture; a clip holds 29 s, after which the encoder starts anew.
    """
    shape, dtype = jax.ShapeDtypeStruct, jnp.dtype(config.dtype)
    tokens = shape((batch_size, seq_len), jnp.int32)
    images, unit_tokens = None, 13
    if (v := config.vision) is not None:
        unit_tokens += 2 + config.resampler.num_queries
        frames = seq_len // unit_tokens
        patches = pictures.max_patches(config.image.scale_resolution, v.patch_size)
        images = VisionInputs(shape((batch_size, frames, patches, v.patch_dim), dtype),
                              shape((batch_size, frames, 2), jnp.int32),
                              shape((batch_size, frames, patches), jnp.int32))
    clips = max(1, math.ceil(seq_len / unit_tokens / 29))
    return training.Batch(tokens, tokens, shape(tokens.shape, jnp.float32), tokens, tokens, tokens, images,
                          shape((batch_size, clips, 2900, config.audio.num_mel_bins), dtype),
                          shape((batch_size, clips), jnp.int32))


def compile_report(lowered: jax.stages.Lowered, topology: str) -> dict[str, Any]:
    """Compiles and measures.

    Returns:
      `bytes_per_chip_peak` (None where the compiler refused before it could say), its parts, `hbm_bytes`, `fits`,
      `compile_seconds`, `collectives` (count by kind in the program), `error` (None when compiled).
    """
    hbm = HBM[topology.split(":")[0]]
    report = {"topology": topology, "hbm_bytes": int(hbm), "error": None}
    start = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        used = re.search(r"Used ([\d.]+)([KMGT]) of", str(e))
        peak = int(float(used[1]) * 1024 ** ("KMGT".index(used[2]) + 1)) if used else None
        return report | {"bytes_per_chip_peak": peak, "fits": False, "compile_seconds": time.perf_counter() - start,
                         "error": re.sub(r"\s+", " ", str(e))[:500]}
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    parts = {"arguments": memory.argument_size_in_bytes, "outputs": memory.output_size_in_bytes,
             "aliased": memory.alias_size_in_bytes, "temporaries": memory.temp_size_in_bytes,
             "program": memory.generated_code_size_in_bytes}
    peak = parts["arguments"] + parts["outputs"] - parts["aliased"] + parts["temporaries"] + parts["program"]
    text = compiled.as_text()
    counts = {kind: len(re.findall(rf"\s{kind}(?:-start)?\(", text)) for kind in COLLECTIVES}
    return report | {"bytes_per_chip_peak": peak, "bytes_per_chip": parts, "fits": peak <= hbm,
                     "compile_seconds": seconds, "collectives": counts}


def _with_sharding(tree, shardings):
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def _with_specs(tree, specs, mesh):
    return jax.tree.map(lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)), tree, specs)


def _place(tree, rules, mesh):
    """Rows over the batch axes, everything else whole."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype,
                                                       sharding=NamedSharding(mesh, rules.spec("batch"))), tree)


def _place_state(state: training.TrainState, rules, mesh) -> training.TrainState:
    """The optimiser's moments lie as the parameters they belong to."""
    def like(tree):
        return _with_sharding(tree, sharding.param_shardings(tree, rules, mesh))

    whole = NamedSharding(mesh, PartitionSpec())
    moments = jax.tree.map(lambda part: like(part) if isinstance(part, dict) else
                           jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=whole),
                           state.opt_state, is_leaf=lambda part: isinstance(part, dict))
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
    return training.TrainState(step, like(state.params), like(state.frozen), moments)

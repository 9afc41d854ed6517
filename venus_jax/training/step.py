"""One optimiser step of the whole model as a pure function of (state, batch).

Only the subtrees named by `trainable` get gradients and optimiser state; the rest is kept in the compute dtype. The
published recipe trains the backbone alone: `("llm",)`.
"""

from typing import Any, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import optax

from venus_jax.config import VenusConfig
from venus_jax.errors import ConfigError
from venus_jax.media.images import VisionInputs
from venus_jax.models.frontend import Frontend
from venus_jax.sharding import Rules
from venus_jax.training.losses import chunked_cross_entropy
from venus_jax.typing import Array, Float, Int, Params


class Batch(NamedTuple):
    """Packed sequences with their media. Frames F and clips A are per row; unused ones are zero-sized.

    `media_index` counts rows of a sequence's own table: all frames' queries in order, then all clips' embeddings.
    """

    ids: Int[Array, "b t"]
    targets: Int[Array, "b t"]
    weights: Float[Array, "b t"]
    positions: Int[Array, "b t"]
    segment_ids: Int[Array, "b t"]
    media_index: Int[Array, "b t"]
    images: VisionInputs | None  # a slice a frame: every array with leading axes [B, F]
    mel: Float[Array, "b a f c"] | None  # clips of whole seconds, at most 29 s: the encoder's streaming memory
    mel_frames: Int[Array, "b a"] | None


class TrainState(NamedTuple):
    """`params` are learned (float32), `frozen` are not; both are subtrees of the one parameter tree."""

    step: Array
    params: Params
    frozen: Params
    opt_state: Any


def split_params(params: Params, trainable: Sequence[str]) -> tuple[Params, Params]:
    """(learned, frozen) by top-level name.

    Raises:
      ConfigError: a name that is not in the tree.
    """
    trainable = (trainable,) if isinstance(trainable, str) else trainable
    if missing := [name for name in trainable if name not in params]:
        raise ConfigError(f"trainable part {missing[0]!r} is not in this model; it has {', '.join(params)}")
    learned = {name: part for name, part in params.items() if name in trainable}
    return learned, {name: part for name, part in params.items() if name not in trainable}


def init_state(params: Params, trainable: Sequence[str], optimizer: optax.GradientTransformation,
               frozen_dtype: Any) -> TrainState:
    """The state before the first step: learned parameters in float32, frozen ones in `frozen_dtype`; all are copies,
    so that a step that is given the state to consume does not consume `params`.
    """
    learned, frozen = split_params(params, trainable)
    learned = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), learned)
    frozen = jax.tree.map(lambda x: jnp.array(x, frozen_dtype, copy=True), frozen)
    return TrainState(jnp.zeros((), jnp.int32), learned, frozen, optimizer.init(learned))


def make_loss(config: VenusConfig, rules: Rules | None = None, remat: bool = True, ce_chunk: int = 256,
              **attention: Any):
    """`loss(params, batch) -> mean cross entropy` over weighted positions; `attention` goes to `Frontend`."""
    model = Frontend(config, rules, remat, **attention)

    def media_table(params, batch):
        tables = []

        def each(encode, tree):
            """One frame or clip of every row at a time: bounds the memory of the towers' attention."""
            parts = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tree)
            return jnp.moveaxis(jax.lax.map(jax.checkpoint(encode), parts), 0, 1)

        if batch.images is not None:
            tables.append(each(lambda x: model.apply({"params": params}, x, method="encode_images"), batch.images))
        if batch.mel is not None:
            tables.append(each(lambda x: model.apply({"params": params}, *x, method="encode_clips"),
                               (batch.mel, batch.mel_frames)))
        tables = [table.reshape(table.shape[0], -1, table.shape[-1]) for table in tables]
        return jnp.concatenate(tables, axis=1) if tables else None

    def loss(params, batch):
        x = model.apply({"params": params}, batch.ids, media_table(params, batch), batch.media_index, method="embed")
        hidden, _ = model.apply({"params": params}, x, batch.positions, batch.segment_ids, method="backbone")
        total, weight = chunked_cross_entropy(hidden, params["llm"]["lm_head"]["kernel"], batch.targets, batch.weights,
                                              config.llm.vocab_size, ce_chunk, rules)
        return jnp.where(weight > 0, total / jnp.where(weight > 0, weight, 1), 0)

    return loss


def make_train_step(config: VenusConfig, optimizer: optax.GradientTransformation, rules: Rules | None = None,
                    **options: Any):
    """`step(state, batch) -> (state, metrics)`; jit it with the state donated. `options` go to `make_loss`."""
    loss_fn = make_loss(config, rules, **options)

    def step(state: TrainState, batch: Batch):
        loss, grads = jax.value_and_grad(lambda learned: loss_fn({**learned, **state.frozen}, batch))(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
        return TrainState(state.step + 1, optax.apply_updates(state.params, updates), state.frozen, opt_state), metrics

    return step

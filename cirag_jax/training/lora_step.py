"""The training step of a decoder: of a LoRA adapter on a frozen base, or of all parameters.

A frozen base is an argument of every compiled function and is never donated. The trained parameters
and their optimizer state are donated. Losses and gradients are summed over all micro-batches and
divided by the total number of tokens, so the result does not depend on the division into
micro-batches.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from cirag_jax import sharding
from cirag_jax.models import decoder, decoder_params, lora, precision
from cirag_jax.models.decoder_config import DecoderConfig
from cirag_jax.models.decoder_layer import DEFAULT_LORA, LoraOptions
from cirag_jax.models.decoder_params import Params
from cirag_jax.models.lora import LoraConfig
from cirag_jax.training import cross_entropy
from cirag_jax.training.state import TrainState, apply_gradient

Metrics = dict[str, jax.Array]


class Batch(NamedTuple):
    """One micro-batch, padded on the right.

    Attributes:
      tokens_BT: int32 ids.
      targets_BT: int32 id of the token that should follow each token.
      mask_BT: boolean mask or fp32 weights of the targets.
      lengths_B: int32 number of real tokens of each row; None if there is no padding.
      positions_BT, segments_BT, shared_B: int32 arrays for packed rows; see `decoder.forward`.
    """

    tokens_BT: Any
    targets_BT: Any
    mask_BT: Any
    lengths_B: Any = None
    positions_BT: Any = None
    segments_BT: Any = None
    shared_B: Any = None


def hidden(
    config: DecoderConfig,
    params: Params,
    adapter: nnx.State | None,
    batch: Batch,
    options: LoraOptions | None,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """Returns the hidden states of a micro-batch, ``hidden_BTD`` in the compute dtype.

    Without an adapter, ``options`` is None.
    """
    return decoder.forward(
        config,
        params,
        batch.tokens_BT,
        lengths_B=batch.lengths_B,
        positions_BT=batch.positions_BT,
        segments_BT=batch.segments_BT,
        shared_B=batch.shared_B,
        adapter=None if adapter is None else lora.to_adapter(adapter),
        lora=options or DEFAULT_LORA,
        dropout_key=dropout_key,
    )


def loss(
    config: DecoderConfig,
    params: Params,
    adapter: nnx.State | None,
    batch: Batch,
    options: LoraOptions | None,
    dropout_key: jax.Array | None = None,
    chunk: int = cross_entropy.CHUNK,
) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted sum of cross-entropies and the sum of weights, fp32 scalars.

    It is differentiable with respect to ``adapter``, or without an adapter to ``params``. Dropout
    needs ``options.dropout`` and a key.
    """
    hidden_BTD = hidden(config, params, adapter, batch, options, dropout_key)
    return cross_entropy.cross_entropy(
        config,
        params,
        hidden_BTD,
        batch.targets_BT,
        batch.mask_BT,
        chunk=chunk,
        train_head=adapter is None,
    )


class TrainStep:
    """The compiled training step, for states with the shapes and shardings of ``state``.

    Without ``lora_config``, all parameters of the decoder are trained. Call it under
    ``jax.set_mesh(mesh)``. ``loss`` has the arguments and results of `loss`, to which it passes
    ``chunk``; its batches may have another type, and its second result may be a dictionary of sums
    with the key ``tokens``. ``traces`` counts compilations: one for each shape of a micro-batch
    (``gradient``), and one each for adding and applying gradients (``add``, ``apply``).
    """

    def __init__(
        self,
        config: DecoderConfig,
        lora_config: LoraConfig | None,
        tx: optax.GradientTransformation,
        state: TrainState,
        mesh: jax.sharding.Mesh,
        *,
        chunk: int = cross_entropy.CHUNK,
        loss: Callable[..., tuple[jax.Array, Any]] = loss,
    ):
        self.config = config
        self.loss = loss
        self.options = lora.lora_options(lora_config, train=True) if lora_config else None
        self.tx = tx
        self.chunk = chunk
        self.traces = {"gradient": 0, "add": 0, "apply": 0}
        self._gradient = jax.jit(self._gradient_of)
        self._add = jax.jit(self._sum, donate_argnums=0)
        # With different output shardings, the second step would compile again.
        placed = sharding.state_sharding(state, mesh)
        replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        self._apply = jax.jit(self._update, donate_argnums=0, out_shardings=(placed, replicated))

    def __call__(
        self,
        state: TrainState,
        params: Params,
        batches: Sequence[Batch],
        run: Callable[..., Any] = operator.call,
    ) -> tuple[TrainState, Metrics]:
        """Runs one optimizer step on all micro-batches; donates ``state``.

        ``params`` are the frozen base weights, ``{}`` if all are trained. ``batches`` are
        micro-batches of any shapes, placed on the mesh with `place_rows`. Without supervised
        tokens the gradient is zero. ``run`` calls the compiled functions, see `rehearsal`.

        Returns:
          The new state, and metrics as device scalars: mean loss, sum of token weights, and norms
          of gradient, update and trained parameters.
        """
        total, trained = None, precision.round_weights(state.params, self.config.dtype, run)
        if self.options is None:
            trained = sharding.gather_fsdp(trained, run)
        for index, batch in enumerate(batches):
            piece = run(self._gradient, trained, params, batch, state.key, state.step, index)
            total = piece if total is None else run(self._add, total, piece)
            del piece  # Frees the gradient before the next one is computed.
        if total is None:
            raise ValueError("a step needs at least one micro-batch")
        return run(self._apply, state, total)

    def _gradient_of(self, trained, params, batch, key, step, index):
        """Returns gradient, summed loss and other sums of a micro-batch, kept per shard."""
        self.traces["gradient"] += 1
        if self.options is not None and self.options.dropout > 0.0:
            key = jax.random.fold_in(jax.random.fold_in(key, step), index)
        else:
            key = None

        def shard_gradient(whole, batch, key):
            trained, params = whole

            def loss_of_adapter(buffers):
                adapter = precision.redirect_gradients(trained, buffers)
                return self.loss(self.config, params, adapter, batch, self.options, key, self.chunk)

            def loss_of_all(trained):
                params = decoder_params.to_params(trained)
                return self.loss(self.config, params, None, batch, None, None, self.chunk)

            if self.options is None:
                total, at = loss_of_all, trained
            else:
                total, at = loss_of_adapter, precision.gradient_buffers(trained)
            (value, sums), gradient = jax.value_and_grad(total, has_aux=True)(at)
            # Layers in bfloat16 have gradients in bfloat16 within a micro-batch.
            gradient = jax.tree.map(lambda x: x.astype(jnp.float32), gradient)
            return jax.tree.map(lambda x: x[None], (gradient, value, sums))

        whole = jax.sharding.PartitionSpec()
        specs = (whole, decoder_params.fsdp_specs(self.config) if params else whole)
        gradient, *sums = sharding.map_shards(shard_gradient, specs)((trained, params), batch, key)
        return sharding.constrain_per_shard(gradient), *sums

    def _sum(self, total, piece):
        self.traces["add"] += 1
        gradient, *sums = jax.tree.map(jnp.add, total, piece)
        return sharding.constrain_per_shard(gradient), *sums

    def _update(self, state, sums):
        self.traces["apply"] += 1
        gradient, value, others = sums
        others = jax.tree.map(jnp.sum, others if isinstance(others, dict) else {"tokens": others})
        count = others.pop("tokens")
        share = 1.0 / jnp.maximum(count, 1.0)
        gradient = jax.tree.map(lambda g: g * share, gradient)
        loss = value.sum() * share
        state, norms = apply_gradient(self.tx, state, gradient, loss)
        means = {name: value * share for name, value in others.items()}
        return state, {"loss": loss, "tokens": count, **means, **norms}

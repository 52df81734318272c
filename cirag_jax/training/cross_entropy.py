"""Token cross-entropy over a large vocabulary, computed in chunks of tokens.

This avoids storing the fp32 logits ``[B, T, V]`` of complete sequences. For 4096 tokens and a
vocabulary of 150,000 they would take 2.5 GB, and their gradient another 2.5 GB.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cirag_jax import sharding
from cirag_jax.models import decoder, decoder_params
from cirag_jax.models.decoder_config import DecoderConfig
from cirag_jax.models.decoder_params import Params

CHUNK = 512  # Tokens per chunk and device.


def cross_entropy(
    config: DecoderConfig,
    params: Params,
    hidden_BTD: jax.Array,
    targets_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    chunk: int = CHUNK,
    train_head: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted sum of ``-log p(target)`` and the sum of the weights, fp32 scalars.

    The gradient with respect to ``hidden_BTD`` is computed and stored together with the loss; the
    backward pass only scales it. Tokens without weight are sorted to the end, and chunks of such
    tokens are skipped. The cost thus depends on the row with the most targets.

    Args:
      config: hyper-parameters, including ``final_softcap``.
      params: parameters of the decoder, of which only the output layer is used.
      hidden_BTD: normed hidden states, compute dtype.
      targets_BT: int32 id of the next token of each token; ignored where the mask is 0.
      mask_BT: boolean mask or fp32 weights of the tokens.
      chunk: number of tokens per device whose logits are in memory at a time.
      train_head: whether the output layer, in fp32, has a gradient, too; otherwise it is frozen.
    """
    weights_BT = mask_BT.astype(jnp.float32)
    head, targets_BT = _head_and_targets(config, params, targets_BT)
    sizes = (chunk, train_head)
    total: Any = _cross_entropy(config, sizes, head, hidden_BTD, targets_BT, weights_BT)
    return total, weights_BT.sum()


def token_losses(
    config: DecoderConfig,
    params: Params,
    hidden_BTD: jax.Array,
    targets_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    chunk: int = CHUNK,
    train_head: bool = False,
) -> jax.Array:
    """Returns ``-log p(target)`` of each token where the mask is not 0, and 0 elsewhere, fp32.

    Unlike in `cross_entropy`, the caller may compute any function of the losses. The backward pass
    therefore computes the logits again. The arguments are those of `cross_entropy`.
    """
    weights_BT = (mask_BT != 0).astype(jnp.float32)
    head, targets_BT = _head_and_targets(config, params, targets_BT)
    losses: Any = _token_losses(
        config, (chunk, train_head), head, hidden_BTD, targets_BT, weights_BT
    )
    return losses


def _head_and_targets(
    config: DecoderConfig, params: Params, targets_BT: jax.Array
) -> tuple[Params, jax.Array]:
    """Returns the output layer by its name in ``params``, and targets within the vocabulary."""
    name = "embedding" if config.tie_embeddings else "lm_head"
    return {name: params[name]}, jnp.clip(targets_BT, 0, config.vocab_size - 1)


def _losses(
    config: DecoderConfig, head: Params, hidden_BCD: jax.Array, targets_BC: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    """Returns the losses of tokens, and (logits, log-sum-exp, mask of targets) for gradients."""
    logits_BCV = decoder.logits(config, head, hidden_BCD)
    logits_BCV = sharding.constrain(logits_BCV, "batch", None, "vocab")
    # On a sharded vocabulary, a comparison needs no communication; a lookup does.
    words_V = jnp.arange(config.vocab_size, dtype=targets_BC.dtype)
    is_target_BCV = targets_BC[..., None] == words_V
    top_BC = jax.lax.stop_gradient(logits_BCV.max(-1))
    log_sum_BC = top_BC + jnp.log(jnp.exp(logits_BCV - top_BC[..., None]).sum(-1))
    target_BC = jnp.where(is_target_BCV, logits_BCV, 0.0).sum(-1)
    return log_sum_BC - target_BC, (logits_BCV, log_sum_BC, is_target_BCV)


def _logits_gradient(config, scores, weights_BC):
    """Returns the gradient of the weighted losses with respect to the logits, fp32."""
    logits_BCV, log_sum_BC, is_target_BCV = scores
    probs_BCV = jnp.exp(logits_BCV - log_sum_BC[..., None])
    weights_BC1 = weights_BC[..., None]
    dlogits_BCV = (probs_BCV - is_target_BCV.astype(jnp.float32)) * weights_BC1
    dlogits_BCV = jnp.where(weights_BC1 != 0, dlogits_BCV, 0.0)  # Padding may be NaN.
    if config.final_softcap is not None:
        slope_BCV = 1.0 - jnp.square(logits_BCV / config.final_softcap)
        dlogits_BCV *= jnp.where(weights_BC1 != 0, slope_BCV, 0.0)
    return dlogits_BCV


def _hidden_gradient(head, dlogits_BCV, dtype):
    """Returns the gradient with respect to ``hidden_BCD``, in its dtype."""
    (name, weight), *_ = head.items()
    return jax.lax.dot_general(
        dlogits_BCV.astype(dtype),
        weight.astype(dtype),
        (((2,), (0 if name == "embedding" else 1,)), ((), ())),
        preferred_element_type=jnp.float32,
    ).astype(dtype)


def _head_gradient(name, dlogits_BCV, hidden_BCD, weights_BC):
    """Returns the gradient with respect to the output layer ``name``, fp32."""
    hidden_BCD = jnp.where(weights_BC[..., None] != 0, hidden_BCD, 0)  # Padding may be NaN.
    pair = dlogits_BCV.astype(hidden_BCD.dtype), hidden_BCD
    tokens = (((0, 1), (0, 1)), ((), ()))
    left, right = pair if name == "embedding" else pair[::-1]
    return jax.lax.dot_general(left, right, tokens, preferred_element_type=jnp.float32)


def _over_chunks(config, sizes, head, hidden_BTD, targets_BT, weights_BT, *, with_gradient):
    """Returns the sum of the losses, the losses, and the gradients, each of which may be None.

    They are the gradients of the sum with respect to ``head`` and ``hidden_BTD``. ``head`` has the
    output layer by its name. ``sizes`` are ``chunk`` and ``train_head`` of `cross_entropy`.
    """
    chunk, train_head = sizes
    batch, length = targets_BT.shape
    width = min(max(chunk // sharding.rows_per_device(batch), 1), length)
    # Gathers the weight over fsdp once, instead of in every chunk and again for the gradient.
    (name, weight), *_ = head.items()
    shape, axes = decoder_params.outer_parameters(config)[name]
    weight = sharding.gather_parameter(weight, shape, axes)
    axes = ["act_embed" if axis == "embed" else axis for axis in axes]
    head = {name: sharding.constrain(weight, *axes)}
    # Tokens with weight come first. The row with most such tokens determines the number of chunks.
    has_weight_BT = weights_BT != 0
    order_BT = jnp.argsort(~has_weight_BT, axis=1, stable=True)
    pad = ((0, 0), (0, -length % width))

    def sort(x_BT):
        return jnp.pad(jnp.take_along_axis(x_BT, order_BT, 1), pad)

    targets_BT, weights_BT = sort(targets_BT), sort(weights_BT)
    hidden_BTD = sharding.constrain(hidden_BTD, "batch", "length", "act_embed")
    sorted_BTD = jnp.take_along_axis(hidden_BTD, order_BT[..., None], 1)
    sorted_BTD = jnp.pad(sorted_BTD, (*pad, (0, 0)))
    sorted_BTD = sharding.constrain(sorted_BTD, "batch", "length", "act_embed")
    num_chunks = -(-has_weight_BT.sum(1, dtype=jnp.int32).max() // width)

    def step(index, carry):
        total, losses_BT, gradient_BTD, head_gradient = carry
        start = index * width

        def cut(x):
            return jax.lax.dynamic_slice_in_dim(x, start, width, axis=1)

        hidden_BCD, weights_BC = cut(sorted_BTD), cut(weights_BT)
        losses_BC, scores = _losses(config, head, hidden_BCD, cut(targets_BT))
        losses_BC = jnp.where(weights_BC != 0, losses_BC * weights_BC, 0.0)
        total += losses_BC.sum()
        losses_BT = jax.lax.dynamic_update_slice_in_dim(losses_BT, losses_BC, start, axis=1)
        if with_gradient:
            dlogits_BCV = _logits_gradient(config, scores, weights_BC)
            piece_BCD = _hidden_gradient(head, dlogits_BCV, hidden_BCD.dtype)
            gradient_BTD = jax.lax.dynamic_update_slice_in_dim(
                gradient_BTD, piece_BCD, start, axis=1
            )
            if train_head:
                piece = _head_gradient(name, dlogits_BCV, hidden_BCD, weights_BC)
                head_gradient = sharding.constrain(head_gradient + piece, *axes)
        return total, losses_BT, gradient_BTD, head_gradient

    zeros = jnp.zeros_like(sorted_BTD) if with_gradient else None
    head_zeros = jnp.zeros(shape, jnp.float32) if with_gradient and train_head else None
    start = (jnp.zeros((), jnp.float32), jnp.zeros_like(weights_BT), zeros, head_zeros)
    total, losses_BT, gradient_BTD, head_gradient = jax.lax.fori_loop(
        np.int32(0), num_chunks, step, start
    )
    inverse_BT = jnp.argsort(order_BT, axis=1)
    losses_BT = jnp.take_along_axis(losses_BT, inverse_BT, 1)
    if gradient_BTD is not None:
        gradient_BTD = jnp.take_along_axis(gradient_BTD, inverse_BT[..., None], 1)
        gradient_BTD = sharding.constrain(gradient_BTD, "batch", "length", "act_embed")
    dhead = None if head_gradient is None else {name: head_gradient}
    return total, losses_BT, (dhead, gradient_BTD)


# The following functions have the arguments of `_over_chunks`. Gradients that are None are zero:
# targets and weights are data, and the output layer may be frozen.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _cross_entropy(config, sizes, *inputs) -> Any:
    return _over_chunks(config, sizes, *inputs, with_gradient=False)[0]


def _cross_entropy_forward(*inputs) -> Any:
    total, _, gradients = _over_chunks(*inputs, with_gradient=True)
    return total, gradients


def _cross_entropy_backward(config, sizes, gradients, dtotal) -> Any:
    del config, sizes
    return *jax.tree.map(lambda x: x * dtotal.astype(x.dtype), gradients), None, None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _token_losses(config, sizes, *inputs) -> Any:
    return _over_chunks(config, sizes, *inputs, with_gradient=False)[1]


def _token_losses_forward(config, sizes, *inputs) -> Any:
    return _token_losses(config, sizes, *inputs), inputs


def _token_losses_backward(config, sizes, inputs, dlosses_BT) -> Any:
    head, hidden_BTD, targets_BT, weights_BT = inputs
    # A weighted sum of the losses has the same gradient.
    weights_BT = weights_BT * dlosses_BT
    *_, gradients = _over_chunks(
        config, sizes, head, hidden_BTD, targets_BT, weights_BT, with_gradient=True
    )
    return *gradients, None, None


_token_losses.defvjp(_token_losses_forward, _token_losses_backward)

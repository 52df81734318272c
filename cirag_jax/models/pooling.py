"""Embeddings from hidden states: pooling, dense layers and unit length."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from cirag_jax import sharding
from cirag_jax.models.dense import apply_dense

Pooling = Literal["mean", "cls", "lasttoken"]

# Entry of a mask for tokens of a prompt that other tokens attend to, but that are not pooled.
UNPOOLED = 2


def pool_tokens(hidden_BTD: jax.Array, mask_BT: jax.Array, kind: Pooling) -> jax.Array:
    """Returns ``pooled_BD`` in fp32: the mean over pooled tokens, or the first or last of them.

    ``mask_BT`` is 1 or True at pooled tokens, which may be anywhere in a row. A row without pooled
    tokens gives zeros, with a finite (zero) gradient.
    """
    chosen_BT = mask_BT.astype(jnp.int32) == 1
    rank_BT = jnp.cumsum(chosen_BT, axis=1, dtype=jnp.int32)
    if kind == "cls":
        chosen_BT &= rank_BT == 1
    elif kind == "lasttoken":
        chosen_BT &= rank_BT == rank_BT[:, -1:]
    elif kind != "mean":
        raise ValueError(f"unknown pooling {kind!r}")
    weight_BT = chosen_BT.astype(jnp.float32)
    # A product instead of a masked sum needs no B T D temporary in fp32.
    total_BD = jnp.einsum("btd,bt->bd", hidden_BTD, weight_BT, preferred_element_type=jnp.float32)
    return total_BD / jnp.maximum(weight_BT.sum(-1, keepdims=True), 1.0)


def unit_length(x_BD: jax.Array) -> jax.Array:
    """Divides each vector by its length; zeros stay zeros, with a finite gradient."""
    square_B1 = jnp.square(x_BD).sum(-1, keepdims=True)
    return x_BD * jax.lax.rsqrt(jnp.maximum(square_B1, 1e-24))


def embed(
    graphdef: nnx.GraphDef,
    state: Any,
    tokens_BT: jax.Array,
    mask_BT: jax.Array,
    dropout_key: jax.Array | None = None,
    passage_B: jax.Array | None = None,
) -> jax.Array:
    """Returns the embeddings of a padded batch, unit-length ``emb_BD`` in fp32.

    ``passage_B`` (whether each text is a passage) matters only with task adapters.
    ``graphdef, state = nnx.split(model)``, where the model is an `encoder.Encoder` or a
    `models.embedder.Embedder`; ``graphdef`` is static under `jax.jit`. ``mask_BT`` is 1 or True at
    real tokens, or `UNPOOLED` at real tokens that are not pooled.
    """
    model = nnx.merge(graphdef, state)
    config = model.config
    hidden_BTD = model(tokens_BT, mask_BT, passage_B=passage_B, dropout_key=dropout_key)
    emb_BD = pool_tokens(hidden_BTD, mask_BT, config.pooling)
    if config.dense:
        emb_BD = apply_dense(config.dense, model.dense, emb_BD)
    return sharding.constrain(unit_length(emb_BD[:, : config.embedding_size]), "batch", "act_embed")


def embedding_size(graphdef: nnx.GraphDef, *states: Any) -> int:
    """Returns the dimension of the embeddings of `embed`."""
    return nnx.merge(graphdef, *states).config.embedding_size

"""Vectors of the tokens of texts, for BERTScore."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cirag_jax.models.io.pretrained import TextEncoder
from cirag_jax.models.pooling import unit_length
from cirag_jax.retrieval.buckets import bucket_length
from cirag_jax.retrieval.encode import pad

_ROWS = 32  # texts per batch


@functools.partial(jax.jit, static_argnums=0)
def _apply(graphdef: Any, state: Any, tokens_BT: jax.Array, lengths_B: jax.Array) -> jax.Array:
    """Returns the hidden states of the last layer, unit-length ``hidden_BTD`` in fp32."""
    mask_BT = jnp.arange(tokens_BT.shape[1]) < lengths_B[:, None]
    hidden_BTD = nnx.merge(graphdef, state)(tokens_BT, mask_BT)
    return unit_length(hidden_BTD.astype(jnp.float32))


def token_vectors(encoder: TextEncoder, texts: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns unit-length vectors [T, D] of the tokens of each text, without special tokens.

    Texts are cut to the encoder's limit and have no prefix.
    """
    unique = sorted(set(texts), key=len)
    encodings = encoder.tokenize(unique)
    vectors: dict[str, np.ndarray] = {}
    for start in range(0, len(unique), _ROWS):
        batch = encodings[start : start + _ROWS]
        rows = [np.asarray(row.ids, np.int32) for row in batch]
        length = bucket_length(max(map(len, rows)), encoder.config.max_length)
        padded = pad(rows, _ROWS, length, encoder.config.pad_id)
        hidden_BTD = np.asarray(_apply(encoder.graphdef, encoder.state, *padded))
        for text, row, hidden_TD in zip(unique[start:], batch, hidden_BTD, strict=False):
            is_word_T = np.array(row.special_tokens_mask) == 0
            vectors[text] = hidden_TD[: len(is_word_T)][is_word_T]
    return vectors

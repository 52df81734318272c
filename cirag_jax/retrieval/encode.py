"""Embeds texts in length buckets, with one compiled function per bucket."""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from cirag_jax.models.io.pretrained import TextEncoder
from cirag_jax.models.pooling import UNPOOLED, embed
from cirag_jax.retrieval.buckets import everywhere, map_texts
from cirag_jax.types import Role

Progress = Callable[[int], Any]  # called with the number of texts just embedded

# (rows, length) -> number of traces; a test checks that each shape compiles once.
TRACES: collections.Counter[tuple[int, int]] = collections.Counter()


def tokenize(
    encoder: TextEncoder,
    texts: Sequence[str],
    max_length: int | None = None,
    truncated: Callable[[int], Any] | None = None,
) -> list[np.ndarray]:
    """Returns the int32 token ids of each text, with special tokens, cut to ``max_length``.

    ``truncated`` is called with the number of texts that were cut.
    """
    rows = encoder.tokenize(texts, max_length)
    if truncated is not None:
        truncated(sum(bool(row.overflowing) for row in rows))
    return [np.asarray(row.ids, np.int32) for row in rows]


def pad(
    rows: Sequence[np.ndarray], num_rows: int, length: int, pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns ``tokens_BT`` and ``lengths_B``, int32, of ``num_rows`` rows.

    Rows added as padding have length 1, so that no row is empty.
    """
    tokens_BT = np.full((num_rows, length), pad_id, np.int32)
    lengths_B = np.ones((num_rows,), np.int32)
    for index, row in enumerate(rows):
        tokens_BT[index, : len(row)] = row
        lengths_B[index] = len(row)
    return tokens_BT, lengths_B


@functools.partial(jax.jit, static_argnums=(0, 1))
def _apply(
    graphdef: Any,
    passage: bool,
    state: Any,
    unpooled: int,
    tokens_BT: jax.Array,
    lengths_B: jax.Array,
) -> jax.Array:
    """Returns ``emb_BD`` in fp32, replicated on all devices of the mesh if there is one.

    ``passage`` selects the task adapter, if there are any. The first ``unpooled`` tokens of each
    row are not pooled.
    """
    TRACES[tuple(tokens_BT.shape)] += 1  # type: ignore[index]
    index_T = jnp.arange(tokens_BT.shape[1])
    kinds_T = jnp.where(index_T < unpooled, UNPOOLED, 1)
    mask_BT = jnp.where(index_T < lengths_B[:, None], kinds_T, 0)
    passage_B = jnp.full(tokens_BT.shape[0], passage)
    return everywhere(embed(graphdef, state, tokens_BT, mask_BT, None, passage_B))


def encode(
    encoder: TextEncoder,
    params: Any,
    texts: Sequence[str],
    *,
    kind: Role = "passage",
    max_length: int | None = None,
    mesh: Mesh | None = None,
    tokens_per_batch: int | None = None,
    progress: Progress | None = None,
    truncated: collections.Counter[Role] | None = None,
) -> np.ndarray:
    """Returns unit-length embeddings of ``texts``, float32 of shape (N, D), in input order.

    Duplicate texts are encoded once. If ``params`` is not None, it replaces ``encoder.state``.
    ``kind`` selects the prefix and the task adapter, if any. Texts are cut to ``max_length``
    tokens, by default the encoder's limit; ``truncated[kind]`` is increased by the number of
    distinct texts that were cut. `map_texts` explains the other arguments.
    """
    params = encoder.state if params is None else params
    prefix = encoder.prefix(kind)
    passage = len({*encoder.tasks}) > 1 and kind != "query"

    def count(cut: int) -> None:
        if truncated is not None:
            truncated[kind] += cut

    def tokens_of(texts: Sequence[str]) -> list[np.ndarray]:
        return tokenize(encoder, [prefix + text for text in texts], max_length, count)

    return map_texts(
        texts,
        tokens_of,
        len,
        functools.partial(pad, pad_id=encoder.config.pad_id),
        functools.partial(_apply, encoder.graphdef, passage, params, encoder.unpooled(prefix)),
        width=(encoder.dim,),
        max_length=encoder.config.max_length,
        mesh=mesh,
        tokens_per_batch=tokens_per_batch,
        progress=progress,
    )

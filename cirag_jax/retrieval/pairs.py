"""Computes the logits of text pairs in length buckets, with one compilation per bucket."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from cirag_jax.models import cross_encoder
from cirag_jax.models.cross_encoder import PairEncoder
from cirag_jax.retrieval.buckets import everywhere, map_texts
from cirag_jax.retrieval.encode import pad


class PairTokens(NamedTuple):
    """Token ids (with special tokens) and token types of a pair, both int32 [T]."""

    tokens_T: np.ndarray
    types_T: np.ndarray


def tokenize_pairs(
    model: PairEncoder, pairs: Sequence[str | tuple[str, str]], max_length: int | None = None
) -> list[PairTokens]:
    """Tokenizes each pair or text; if a pair is too long, the longer text is cut."""
    has_types = cross_encoder.has_pair_types(model.model_type)
    tokenized = []
    for row in model.tokenize(pairs, max_length):
        tokens_T = np.asarray(row.ids, np.int32)
        types_T = np.asarray(row.type_ids, np.int32) if has_types else np.zeros_like(tokens_T)
        tokenized.append(PairTokens(tokens_T, types_T))
    return tokenized


def pad_pairs(
    rows: Sequence[PairTokens], num_rows: int, length: int, pad_id: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns ``tokens_BT``, ``types_BT`` and ``lengths_B``, int32, of ``num_rows`` rows.

    Rows added as padding have length 1, so that no row is empty.
    """
    tokens_BT, lengths_B = pad([row.tokens_T for row in rows], num_rows, length, pad_id)
    types_BT, _ = pad([row.types_T for row in rows], num_rows, length, 0)
    return tokens_BT, types_BT, lengths_B


def score_pairs(
    model: PairEncoder,
    params: Any,
    pairs: Sequence[str | tuple[str, str]],
    *,
    max_length: int | None = None,
    mesh: Mesh | None = None,
    tokens_per_batch: int | None = None,
    progress: Callable[[int], Any] | None = None,
) -> np.ndarray:
    """Returns the logits of (query, text) pairs or texts, float32 of shape (N,), in input order.

    Duplicate pairs are scored once. If ``params`` is not None, it replaces ``model.state``. Pairs
    are cut to ``max_length`` tokens, by default the model's limit. `map_texts` explains the other
    arguments.
    """
    params = model.state if params is None else params
    return map_texts(
        pairs,
        functools.partial(tokenize_pairs, model, max_length=max_length),
        lambda row: len(row.tokens_T),
        functools.partial(pad_pairs, pad_id=model.config.pad_id),
        functools.partial(_apply, model.graphdef, params),
        width=(),
        max_length=model.config.max_length,
        mesh=mesh,
        tokens_per_batch=tokens_per_batch,
        progress=progress,
    )


def score_groups(
    model: PairEncoder,
    params: Any,
    queries: Sequence[str],
    texts: Sequence[Sequence[str]],
    **options: Any,
) -> list[np.ndarray]:
    """Scores each query's own texts, in their order; ``options`` as in `score_pairs`."""
    pairs = [(query, text) for query, group in zip(queries, texts, strict=True) for text in group]
    ends = np.cumsum([len(group) for group in texts], dtype=np.int64)
    return np.split(score_pairs(model, params, pairs, **options), ends)[: len(texts)]


@functools.partial(jax.jit, static_argnums=0)
def _apply(graphdef: Any, state: Any, tokens_BT: Any, types_BT: Any, lengths_B: Any) -> jax.Array:
    """Returns ``logit_B`` in fp32, replicated on all devices of the mesh if there is one."""
    mask_BT = jnp.arange(tokens_BT.shape[1]) < lengths_B[:, None]
    return everywhere(cross_encoder.apply(graphdef, state, tokens_BT, mask_BT, types_BT))

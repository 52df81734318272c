"""The engine's compiled programs: extend a row's pages, decode all rows, score continuations.

Shapes are those of the engine and the chunk alone, so that every program compiles once and what a
row computes does not depend on its neighbours.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cirag_jax.llm.engine import sampling
from cirag_jax.llm.engine.sampling import Details, Sampling
from cirag_jax.models import attention, decoder, paged_cache
from cirag_jax.models.decoder import Adapter, DecoderConfig, LoraOptions, Params
from cirag_jax.models.paged_cache import Cache

Array = jax.Array | np.ndarray  # host arrays are uploaded with the call
_LOGITS = 64  # tokens whose logits are held at once


class Weights(NamedTuple):
    """What every program reads and none donates: unstacked weights and adapter."""

    params: Params
    adapter: Adapter | None


class Rows(NamedTuple):
    """The rows of a batch as the host uploads them before every chunk.

    Attributes:
      token_B: int32, the last token of each row, not in the cache yet.
      position_B: int32, its position.
      left_B: int32, tokens that may still be generated; 0 is an idle row.
      step_B: int32, tokens generated so far.
      sampling: temperature, top-p and seed.
      tables_BN: int32, the pages of each row in order, then one that does not exist.
      history_BS: int32, the tokens generated so far, where none of their n-grams may come again.
    """

    token_B: Array
    position_B: Array
    left_B: Array
    step_B: Array
    sampling: Sampling
    tables_BN: Array
    history_BS: Array | None = None


def lays_out(config: DecoderConfig) -> bool:
    """Whether `decode` copies the pages of its rows into one piece each, once for several steps.

    Off the CPU attention reads all keys of a row at once.
    """
    return config.attention != "transposed"


@functools.partial(jax.jit, donate_argnames="cache")
def copy_page(cache: Cache, source: Array | np.integer, target: Array | np.integer) -> Cache:
    """The cache with the content of page ``source`` in ``target`` as well."""

    def copy(x: jax.Array) -> jax.Array:
        page = jax.lax.dynamic_slice_in_dim(x, source, 1, 0)
        return jax.lax.dynamic_update_slice_in_dim(x, page, target, 0)

    return jax.tree.map(copy, cache)


def _extend(config, weights, cache, table_N, tokens_T, start, lora, branch=0):
    hidden_BTD, cache, _ = decoder.forward_cached(
        config,
        weights.params,
        tokens_T[None],
        start[None],
        cache,
        table_N[None],
        branch=branch,
        adapter=weights.adapter,
        lora=lora,
    )
    return hidden_BTD[0], cache


@functools.partial(jax.jit, static_argnames=("config", "lora"), donate_argnames="cache")
def prefill(
    config: DecoderConfig,
    weights: Weights,
    cache: Cache,
    table_N: Array,
    tokens_T: Array,
    start: Array | np.integer,
    *,
    lora: LoraOptions,
) -> Cache:
    """Writes the keys and values of ``tokens_T`` at ``start`` of the row with pages ``table_N``."""
    return _extend(config, weights, cache, table_N, tokens_T, start, lora)[1]


@functools.partial(jax.jit, static_argnames=("config", "lora"), donate_argnames="cache")
def score(
    config: DecoderConfig,
    weights: Weights,
    cache: Cache,
    table_N: Array,
    tokens_NT: Array,
    targets_NT: Array,
    start: Array | np.integer,
    *,
    lora: LoraOptions,
) -> tuple[Cache, jax.Array]:
    """Log-probabilities (fp32 ``[N, T]``) of targets, each after its token.

    Every row of ``tokens_NT`` goes on by itself from the ``start`` positions in the pages of
    ``table_N``, in which they are written one after another.
    """
    n, t = tokens_NT.shape
    tokens = jnp.reshape(tokens_NT, -1)
    hidden, cache = _extend(config, weights, cache, table_N, tokens, start, lora, branch=t)

    def describe(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        logits = decoder.logits(config, weights.params, part[0])
        return sampling.describe(logits, part[1], Details(logprobs=True))["logprob"]

    size = math.gcd(n * t, _LOGITS)
    parts = hidden.reshape(-1, size, hidden.shape[-1]), jnp.reshape(targets_NT, (-1, size))
    return cache, jax.lax.map(describe, parts).reshape(n, t)


@functools.partial(
    jax.jit,
    static_argnames=("config", "lora", "details", "greedy", "eos_ids", "steps", "ngram"),
    donate_argnames="cache",
)
def decode(
    config: DecoderConfig,
    weights: Weights,
    cache: Cache,
    rows: Rows,
    mask_BW: Array | None,
    *,
    lora: LoraOptions,
    details: Details,
    greedy: bool,
    eos_ids: tuple[int, ...],
    steps: int,
    ngram: int = 0,
) -> tuple[Cache, dict[str, jax.Array]]:
    """Decodes until every row has ended, at most ``steps`` tokens a row.

    Args:
      config: hyper-parameters.
      weights: unstacked weights and adapter.
      cache: the pages of all rows (donated).
      rows: where each row stands.
      mask_BW: packed bits of allowed tokens, for constrained rows with ``steps`` 1; else None.
      lora: the adapter's scale.
      details: what to report beside the tokens.
      greedy: every row is; else rows of temperature 0 are greedy among sampled ones.
      eos_ids: tokens that end a row; the end token itself is returned.
      steps: length of the chunk.
      ngram: so many tokens in a row are generated once only (needs ``rows.history_BS``); 0: any.

    Returns:
      The cache, and arrays that start with ``[steps, B]``: ``token`` (int32, -1 where the row had
      ended) and what ``details`` asks for: ``attended`` and ``weights`` are the positions that
      each step looked at most (``[steps, B, n]``); ``received`` (fp32 ``[B, S]``) is the largest
      weight that any step of the chunk gave to each position before its own.
    """
    pages, tables_BN, start_B = cache, jnp.asarray(rows.tables_BN), rows.position_B
    at_once = steps > 1 and lays_out(config)  # For one step, copies would not pay.
    if at_once:
        cache = paged_cache.laid_out(pages, tables_BN)

    def step(rows, cache):
        hidden_BTD, cache, (q_BTNH, mask_BTS) = decoder.forward_cached(
            config,
            weights.params,
            rows.token_B[:, None],
            rows.position_B,
            cache,
            None if at_once else tables_BN,
            adapter=weights.adapter,
            lora=lora,
        )
        logits_BV = decoder.logits(config, weights.params, hidden_BTD[:, 0])
        allowed_BV = logits_BV
        if ngram:
            history = rows.history_BS, rows.step_B, ngram
            allowed_BV = sampling.forbid_repeats(allowed_BV, *history)
        if mask_BW is not None:
            allowed_BV = sampling.apply_mask(allowed_BV, mask_BW)
        next_B = sampling.choose(allowed_BV, rows.sampling, rows.step_B, greedy=greedy)
        found = sampling.describe(logits_BV, next_B, details)
        if details.attention:
            k_BKHS, v_BKSH = cache["k"][-1], cache["v"][-1]
            if not at_once:
                k_BKHS, _ = paged_cache.read_pages(k_BKHS, v_BKSH, tables_BN)
            k_BKHS = paged_cache.unpacked(k_BKHS)
            probs_BTNS = attention.probabilities(config.scoring, q_BTNH, k_BKHS, mask_BTS)
            weight_BS = probs_BTNS[:, 0].mean(1)
            found["weights"], found["attended"] = jax.lax.top_k(weight_BS, details.attention)
            own_BS = jnp.arange(weight_BS.shape[1]) == rows.position_B[:, None]
            idle_BS = own_BS | (rows.left_B == 0)[:, None]
            found["received"] = jnp.where(idle_BS, 0.0, weight_BS)
        return cache, next_B, found

    def advance(rows, next_B):
        active_B = rows.left_B > 0
        ended_B = jnp.isin(next_B, jnp.asarray(eos_ids, jnp.int32))
        left_B = jnp.where(active_B & ~ended_B, rows.left_B - 1, 0)
        # A row that has ended computes its last token again and again: the same numbers into the
        # same place.
        goes_on_B = left_B > 0
        history_BS = rows.history_BS
        if history_BS is not None:
            place_B = jnp.where(goes_on_B, rows.step_B, history_BS.shape[1])
            row_B = jnp.arange(len(place_B))
            history_BS = history_BS.at[row_B, place_B].set(next_B, mode="drop")
        return Rows(
            token_B=jnp.where(goes_on_B, next_B, rows.token_B),
            position_B=rows.position_B + goes_on_B.astype(jnp.int32),
            left_B=left_B,
            step_B=rows.step_B + goes_on_B.astype(jnp.int32),
            sampling=rows.sampling,
            tables_BN=rows.tables_BN,
            history_BS=history_BS,
        )

    def body(state: Any) -> Any:
        i, rows, cache, out = state
        cache, next_B, found = step(rows, cache)
        found["token"] = jnp.where(rows.left_B > 0, next_B, -1)
        out = {
            name: jnp.maximum(values, found[name])
            if name == "received"
            else values.at[i].set(found[name])
            for name, values in out.items()
        }
        return i + 1, advance(rows, next_B), cache, out

    shapes = jax.eval_shape(lambda: step(rows, cache)[2])
    out = {name: jnp.zeros((steps, *s.shape), s.dtype) for name, s in shapes.items()}
    if details.attention:
        out["received"] = out["received"][0]
    out["token"] = jnp.full((steps, rows.token_B.shape[0]), -1, jnp.int32)
    state = (jnp.int32(0), rows, cache, out)
    _, _, cache, out = jax.lax.while_loop(
        lambda state: (state[0] < steps) & jnp.any(state[1].left_B > 0), body, state
    )
    if at_once:
        cache = paged_cache.written_back(pages, cache, tables_BN, jnp.asarray(start_B), steps)
    return cache, out

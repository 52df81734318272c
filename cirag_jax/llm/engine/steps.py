"""The engine's compiled programs: prefill, decoding and scoring.

Shapes depend only on the engine and the chunk, so every program is compiled once, and a row's
result does not depend on other rows.
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
NOT_FINITE = -2  # ends a row in place of a token
_LOGITS = 64  # maximum number of tokens whose logits are in memory at the same time


class Weights(NamedTuple):
    """The unstacked weights and adapter, which no program donates."""

    params: Params
    adapter: Adapter | None


class Rows(NamedTuple):
    """The rows of a batch, uploaded before every chunk.

    Attributes:
      token_B: int32, the last token of each row, which is not cached yet.
      position_B: int32, the position of this last token.
      remaining_B: int32, number of tokens that may still be generated; 0 for an idle row.
      step_B: int32, number of tokens generated so far.
      sampling: temperature, top-p and seed.
      tables_BN: int32, the pages of each row, padded with the index of a nonexistent page.
      history_BS: int32, the tokens generated so far, if their n-grams must not be repeated.
    """

    token_B: Array
    position_B: Array
    remaining_B: Array
    step_B: Array
    sampling: Sampling
    tables_BN: Array
    history_BS: Array | None = None


def uses_contiguous_cache(config: DecoderConfig) -> bool:
    """Returns whether `decode` copies each row's pages to contiguous memory first.

    Copying pays off for several steps, except on a CPU, where attention reads page by page.
    """
    return config.attention != "transposed"


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
    """Caches keys and values of ``tokens_T``, from position ``start`` on, in pages ``table_N``."""
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
    """Returns the cache, and the log-probability of each target after its token, fp32 ``[N, T]``.

    Every row of ``tokens_NT`` independently continues the text in the first ``start`` positions of
    ``table_N``. The rows are cached one after another in the table's pages.
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
    """Decodes until every row has ended, at most ``steps`` tokens per row.

    Args:
      config: hyper-parameters.
      weights: unstacked weights and adapter.
      cache: the pages of all rows (donated).
      rows: the state of each row.
      mask_BW: packed bits of allowed tokens, for constrained rows and ``steps=1``.
      lora: the adapter's scale.
      details: the details to report about the tokens.
      greedy: whether every row is greedy; if not, only rows with temperature 0 are.
      eos_ids: tokens that end a row; they are returned.
      steps: length of the chunk.
      ngram: size of n-grams that must not be repeated (needs ``rows.history_BS``); 0 disables it.

    Returns:
      The cache, and a dictionary of arrays, most with leading axes ``[steps, B]``. ``token`` is
      int32, -1 after the row has ended, and `NOT_FINITE` where the hidden state has a number that
      is not finite, which also ends the row. Further arrays depend on ``details``. ``attended`` and
      ``weights`` (``[steps, B, n]``) are the positions that each step attended to most, and their
      weights. ``received`` (fp32 ``[B, S]``) is the largest weight that a step of the chunk gave to
      each earlier position.
    """
    pages, tables_BN, start_B = cache, jnp.asarray(rows.tables_BN), rows.position_B
    contiguous = steps > 1 and uses_contiguous_cache(config)
    if contiguous:
        cache = paged_cache.gather_rows(pages, tables_BN)

    def step(rows, cache):
        hidden_BTD, cache, (q_BTNH, mask_BTS) = decoder.forward_cached(
            config,
            weights.params,
            rows.token_B[:, None],
            rows.position_B,
            cache,
            None if contiguous else tables_BN,
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
        values = sampling.describe(logits_BV, next_B, details)
        next_B = jnp.where(jnp.isfinite(hidden_BTD[:, 0]).all(-1), next_B, NOT_FINITE)
        if details.attention:
            k_BKHS, v_BKSH = cache["k"][-1], cache["v"][-1]
            if not contiguous:
                k_BKHS, _ = paged_cache.read_pages(k_BKHS, v_BKSH, tables_BN)
            k_BKHS = paged_cache.unpack(k_BKHS)
            probs_BTNS = attention.probabilities(config.scoring, q_BTNH, k_BKHS, mask_BTS)
            weight_BS = probs_BTNS[:, 0].mean(1)
            values["weights"], values["attended"] = jax.lax.top_k(weight_BS, details.attention)
            itself_BS = jnp.arange(weight_BS.shape[1]) == rows.position_B[:, None]
            ignored_BS = itself_BS | (rows.remaining_B == 0)[:, None]
            values["received"] = jnp.where(ignored_BS, 0.0, weight_BS)
        return cache, next_B, values

    def advance(rows, next_B):
        active_B = rows.remaining_B > 0
        ended_B = jnp.isin(next_B, jnp.asarray((NOT_FINITE, *eos_ids), jnp.int32))
        remaining_B = jnp.where(active_B & ~ended_B, rows.remaining_B - 1, 0)
        # A row that has ended repeats its last computation, which writes the same values again.
        continues_B = remaining_B > 0
        history_BS = rows.history_BS
        if history_BS is not None:
            index_B = jnp.where(continues_B, rows.step_B, history_BS.shape[1])
            row_B = jnp.arange(len(index_B))
            history_BS = history_BS.at[row_B, index_B].set(next_B, mode="drop")
        return Rows(
            token_B=jnp.where(continues_B, next_B, rows.token_B),
            position_B=rows.position_B + continues_B.astype(jnp.int32),
            remaining_B=remaining_B,
            step_B=rows.step_B + continues_B.astype(jnp.int32),
            sampling=rows.sampling,
            tables_BN=rows.tables_BN,
            history_BS=history_BS,
        )

    def body(state: Any) -> Any:
        i, rows, cache, out = state
        cache, next_B, values = step(rows, cache)
        values["token"] = jnp.where(rows.remaining_B > 0, next_B, -1)
        out = {
            name: jnp.maximum(array, values[name])
            if name == "received"
            else array.at[i].set(values[name])
            for name, array in out.items()
        }
        return i + 1, advance(rows, next_B), cache, out

    shapes = jax.eval_shape(lambda: step(rows, cache)[2])
    out = {name: jnp.zeros((steps, *s.shape), s.dtype) for name, s in shapes.items()}
    if details.attention:
        out["received"] = out["received"][0]
    out["token"] = jnp.full((steps, rows.token_B.shape[0]), -1, jnp.int32)
    state = (jnp.int32(0), rows, cache, out)
    _, _, cache, out = jax.lax.while_loop(
        lambda state: (state[0] < steps) & jnp.any(state[1].remaining_B > 0), body, state
    )
    if contiguous:
        cache = paged_cache.scatter_rows(pages, cache, tables_BN, jnp.asarray(start_B), steps)
    return cache, out

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
from cirag_jax.models.decoder_config import DecoderConfig
from cirag_jax.models.decoder_layer import Adapter, LoraOptions
from cirag_jax.models.decoder_params import Params
from cirag_jax.models.paged_cache import Cache

Array = jax.Array | np.ndarray  # host arrays are uploaded with the call
NO_TOKEN = -1  # in place of a token that a row does not have
NOT_FINITE = -2  # ends a row in place of a token
_LOGPROBS = Details(logprobs=True)
_LOGITS = 64  # maximum number of tokens whose logits are in memory at the same time


class Weights(NamedTuple):
    """The unstacked weights and adapter, which no program donates."""

    params: Params
    adapter: Adapter | None


class Rows(NamedTuple):
    """The rows of a batch, uploaded before every chunk; in `decode`, also the slots of a step.

    Attributes:
      token_B: int32, the last token of each row, which is not cached yet.
      position_B: int32, the position of this last token.
      remaining_B: int32, number of tokens that may still be generated; 0 for an idle row.
      step_B: int32, number of tokens generated so far.
      sampling: temperature, top-p and seed.
      tables_BN: int32, the pages of each row, padded with the index of a nonexistent page.
      text_BS: int32, the tokens of prompt and answer, for drafts and for n-grams that must not be
        repeated.
    """

    token_B: Array
    position_B: Array
    remaining_B: Array
    step_B: Array
    sampling: Sampling
    tables_BN: Array
    text_BS: Array | None = None


def _assign_slots(rows: Rows, lookup: int) -> tuple[Rows, jax.Array, jax.Array]:
    """Assigns a slot to each active row, and further slots to guesses of the tokens that follow.

    A slot is computed exactly like a row: one token at one position, with the pages of its row.
    Each row gets at most ``lookup`` drafts, at most as many as it may still generate, and an equal
    share of the idle slots.

    Returns:
      the slots in the form of rows, the row of each slot, and the number of tokens before the slot
        in its row in this step, both int32 ``[B]``. The slots of a row are next to each other.
        Idle slots have ``remaining_B`` 0.
    """
    text_BS, count_B = jnp.asarray(rows.text_BS), jnp.asarray(rows.position_B) + 1
    drafts_BK, found_B = sampling.find_drafts(text_BS, count_B, lookup)
    active_B = (rows.remaining_B > 0).astype(jnp.int32)
    found_B = jnp.minimum(found_B, rows.remaining_B - 1) * active_B
    size = len(active_B)
    shares_L = jnp.minimum(found_B, jnp.arange(lookup + 1, dtype=jnp.int32)[:, None]).sum(1)
    share = (shares_L <= size - active_B.sum()).sum() - 1
    ends_B = jnp.cumsum(active_B + jnp.minimum(found_B, share))
    slot_B = jnp.arange(size, dtype=jnp.int32)
    row_B = jnp.minimum((ends_B <= slot_B[:, None]).sum(1, dtype=jnp.int32), size - 1)
    is_used_B = slot_B < ends_B[-1]
    starts_B = jnp.concatenate([jnp.zeros(1, jnp.int32), ends_B[:-1]])
    offset_B = jnp.where(is_used_B, slot_B - starts_B[row_B], 0)
    draft_B = drafts_BK[row_B, jnp.maximum(offset_B - 1, 0)]
    token_B = jnp.where(offset_B > 0, draft_B, rows.token_B[row_B])
    position_B = jnp.where(is_used_B, rows.position_B[row_B] + offset_B, 0)
    at_B = jnp.where((offset_B > 0) & is_used_B, position_B, text_BS.shape[1])
    text_BS = text_BS.at[row_B, at_B].set(token_B, mode="drop")
    slots = Rows(
        token_B=jnp.where(is_used_B, token_B, 0),
        position_B=position_B,
        remaining_B=jnp.where(is_used_B, rows.remaining_B[row_B] - offset_B, 0),
        step_B=rows.step_B[row_B] + offset_B,
        sampling=Sampling(*(jnp.asarray(each)[row_B] for each in rows.sampling)),
        # No page exists for an idle slot, so it writes nothing.
        tables_BN=jnp.where(is_used_B[:, None], rows.tables_BN[row_B], jnp.iinfo(jnp.int32).max),
        text_BS=text_BS[row_B],
    )
    return slots, row_B, offset_B


def uses_contiguous_cache(config: DecoderConfig) -> bool:
    """Returns whether `decode` copies each row's pages to contiguous memory first.

    Copying pays off for several steps, except on a CPU, where attention reads page by page.
    """
    return config.attention != "transposed"


def _extend(
    config, weights, cache, table_N, tokens_T, start, total, lora, branch=0, is_start=False
):
    hidden_BTD, cache, _ = decoder.forward_cached(
        config,
        weights.params,
        tokens_T[None],
        start[None],
        cache,
        table_N[None],
        branch=branch,
        is_start=is_start,
        totals_B=jnp.asarray(total)[None],
        adapter=weights.adapter,
        lora=lora,
    )
    return hidden_BTD[0], cache


@functools.partial(jax.jit, static_argnames=("config", "lora", "is_start"), donate_argnames="cache")
def prefill(
    config: DecoderConfig,
    weights: Weights,
    cache: Cache,
    table_N: Array,
    tokens_T: Array,
    start: Array | np.integer,
    total: Array | np.integer,
    *,
    lora: LoraOptions,
    is_start: bool = False,
) -> Cache:
    """Caches keys and values of ``tokens_T``, from position ``start`` on, in pages ``table_N``.

    ``total`` is the length of the whole text, and ``is_start`` allows a faster program if ``start``
    is 0; see `decoder.forward_cached`.
    """
    return _extend(
        config, weights, cache, table_N, tokens_T, start, total, lora, is_start=is_start
    )[1]


@functools.partial(jax.jit, static_argnames=("config", "lora", "details"), donate_argnames="cache")
def score(
    config: DecoderConfig,
    weights: Weights,
    cache: Cache,
    table_N: Array,
    tokens_NT: Array,
    targets_NT: Array,
    start: Array | np.integer,
    total: Array | np.integer,
    *,
    lora: LoraOptions,
    details: Details = _LOGPROBS,
) -> tuple[Cache, dict[str, jax.Array]]:
    """Returns the cache, and the values of `sampling.describe` for each target after its token.

    The values have leading axes ``[N, T]``. Every row of ``tokens_NT`` independently continues the
    text in the first ``start`` positions of ``table_N``. The rows are cached one after another in
    the table's pages. ``total`` is the length of the whole texts; see `decoder.forward_cached`.
    """
    n, t = tokens_NT.shape
    tokens = jnp.reshape(tokens_NT, -1)
    hidden, cache = _extend(config, weights, cache, table_N, tokens, start, total, lora, branch=t)

    def describe(part: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
        logits = decoder.logits(config, weights.params, part[0])
        return sampling.describe(logits, part[1], details)

    size = math.gcd(n * t, _LOGITS)
    parts = hidden.reshape(-1, size, hidden.shape[-1]), jnp.reshape(targets_NT, (-1, size))
    values = jax.lax.map(describe, parts)
    return cache, {name: v.reshape(n, t, *v.shape[2:]) for name, v in values.items()}


@functools.partial(
    jax.jit,
    static_argnames=("config", "lora", "details", "greedy", "eos_ids", "steps", "ngram", "lookup"),
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
    lookup: int = 0,
    least: Array | np.integer | int = 1,
) -> tuple[Cache, dict[str, jax.Array]]:
    """Decodes until fewer than ``least`` rows are left, at most ``steps`` steps.

    A step computes as many tokens as there are rows. With ``lookup``, the slots of idle rows
    compute guessed tokens of the active rows at the same time. Guesses are kept up to the first
    wrong one, so texts and numbers do not change.

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
      ngram: size of n-grams that must not be repeated (needs ``rows.text_BS``); 0 disables it.
      lookup: maximum number of guessed tokens per row and step (needs ``rows.text_BS``); 0 disables
        them. Not for ``details.attention`` or ``mask_BW``.
      least: int32, the smallest number of active rows for a step, at least 1.

    Returns:
      The cache, and a dictionary of arrays, most with leading axes ``[steps, B]``. ``token`` is
      int32 in the order of each row's text, `NO_TOKEN` where nothing is added to it, and
      `NOT_FINITE` where the hidden state has a number that is not finite, which also ends the row.
      ``row`` is the row of each token. Further arrays depend on ``details``. ``attended`` and
      ``weights`` (``[steps, B, n]``) are the positions that each step attended to most, and their
      weights. ``received`` (fp32 ``[B, S]``) is the largest weight that a step of the chunk gave to
      each earlier position.
    """
    pages, tables_BN, start_B = cache, jnp.asarray(rows.tables_BN), rows.position_B
    contiguous = steps > 1 and not lookup and uses_contiguous_cache(config)
    if contiguous:
        cache = paged_cache.gather_rows(pages, tables_BN)

    def step(slots, cache):
        hidden_BTD, cache, (q_BTNH, mask_BTS) = decoder.forward_cached(
            config,
            weights.params,
            slots.token_B[:, None],
            slots.position_B,
            cache,
            None if contiguous else slots.tables_BN,
            adapter=weights.adapter,
            lora=lora,
        )
        logits_BV = decoder.logits(config, weights.params, hidden_BTD[:, 0])
        allowed_BV = logits_BV
        if ngram:
            count_B = slots.position_B + 1
            allowed_BV = sampling.forbid_repeats(
                allowed_BV, slots.text_BS, count_B, ngram, count_B - slots.step_B
            )
        if mask_BW is not None:
            allowed_BV = sampling.apply_mask(allowed_BV, mask_BW)
        next_B = sampling.choose(allowed_BV, slots.sampling, slots.step_B, greedy=greedy)
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
            itself_BS = jnp.arange(weight_BS.shape[1]) == slots.position_B[:, None]
            ignored_BS = itself_BS | (slots.remaining_B == 0)[:, None]
            values["received"] = jnp.where(ignored_BS, 0.0, weight_BS)
        return cache, next_B, values

    def advance(rows, slots, row_B, offset_B, next_B):
        """Returns the rows after a step, and which slots' next tokens were added to their texts."""
        ended_B = jnp.isin(next_B, jnp.asarray((NOT_FINITE, *eos_ids), jnp.int32))
        # A draft is wrong if the slot before it has another next token, or ends the row.
        wrong_B = (offset_B > 0) & ((jnp.roll(next_B, 1) != slots.token_B) | jnp.roll(ended_B, 1))
        wrong_B, slot_B = (
            jnp.cumsum(wrong_B, dtype=jnp.int32),
            jnp.arange(len(row_B), dtype=jnp.int32),
        )
        kept_B = (slots.remaining_B > 0) & (wrong_B == wrong_B[slot_B - offset_B])
        last_B = jnp.full_like(slot_B, -1).at[row_B].max(jnp.where(kept_B, slot_B, -1))
        count_B = offset_B[last_B] + 1
        continues_B = (last_B >= 0) & ~ended_B[last_B] & (rows.remaining_B > count_B)
        # A row that has ended repeats its last computation, which writes the same values again.
        count_B = jnp.where(continues_B, count_B, 0)
        text_BS = rows.text_BS
        if text_BS is not None:
            at_B = jnp.where(kept_B, slots.position_B + 1, text_BS.shape[1])
            text_BS = text_BS.at[row_B, at_B].set(next_B, mode="drop")
        rows = Rows(
            token_B=jnp.where(continues_B, next_B[last_B], rows.token_B),
            position_B=rows.position_B + count_B,
            remaining_B=jnp.where(continues_B, rows.remaining_B - count_B, 0),
            step_B=rows.step_B + count_B,
            sampling=rows.sampling,
            tables_BN=rows.tables_BN,
            text_BS=text_BS,
        )
        return rows, kept_B

    def assign(rows):
        if lookup:
            return _assign_slots(rows, lookup)
        return rows, jnp.arange(len(start_B), dtype=jnp.int32), jnp.zeros_like(rows.step_B)

    def body(state: Any) -> Any:
        i, rows, cache, out = state
        slots, row_B, offset_B = assign(rows)
        cache, next_B, values = step(slots, cache)
        rows, kept_B = advance(rows, slots, row_B, offset_B, next_B)
        values["token"], values["row"] = jnp.where(kept_B, next_B, NO_TOKEN), row_B
        out = {
            name: jnp.maximum(array, values[name])
            if name == "received"
            else array.at[i].set(values[name])
            for name, array in out.items()
        }
        return i + 1, rows, cache, out

    shapes = jax.eval_shape(lambda: step(rows, cache)[2])
    out = {name: jnp.zeros((steps, *s.shape), s.dtype) for name, s in shapes.items()}
    if details.attention:
        out["received"] = out["received"][0]
    out["row"] = jnp.zeros((steps, len(start_B)), jnp.int32)
    out["token"] = jnp.full_like(out["row"], NO_TOKEN)
    state = (jnp.int32(0), rows, cache, out)
    _, _, cache, out = jax.lax.while_loop(
        lambda state: (state[0] < steps) & ((state[1].remaining_B > 0).sum() >= least), body, state
    )
    if contiguous:
        cache = paged_cache.scatter_rows(pages, cache, tables_BN, jnp.asarray(start_B), steps)
    return cache, out

"""Log-probabilities of given texts: continuations of a prompt, and the tokens of a prompt."""

import time
from collections.abc import Sequence

import jax
import numpy as np

from cirag_jax.errors import UserError
from cirag_jax.llm import types as llm
from cirag_jax.llm.chat import ChatTokenizer, PromptError
from cirag_jax.llm.engine import steps
from cirag_jax.llm.engine.model import PagedDecoder
from cirag_jax.llm.engine.pages import Allocation
from cirag_jax.llm.engine.rows import NUMBERS_NOT_FINITE, Row
from cirag_jax.llm.engine.sampling import Details
from cirag_jax.llm.engine.shapes import chunks, next_power_of_two, padded_slice


def score_continuations(
    model: PagedDecoder,
    tokenizer: ChatTokenizer,
    texts: Sequence[str],
    prompt: np.ndarray,
    truncated: int,
) -> llm.Scored:
    """Returns the log-probabilities of each text after the tokens ``prompt``.

    ``truncated`` is the number of observations that were shortened to fit.

    Raises:
      UserError: the texts do not fit, or their numbers are not finite.
    """
    started = time.perf_counter()
    continuations = [tuple(tokenizer.encode(text).tolist()) for text in texts]
    length = len(prompt) + max(map(len, continuations))
    if length > model.context:
        raise PromptError(
            f"prompt and continuation have {length} tokens but only {model.context} fit"
        )
    logprobs, reused = {}, 0
    switch = (model.config.rope_switch or length) - len(prompt)
    for is_long in (False, True):
        distinct = [ids for ids in dict.fromkeys(continuations) if is_long == (len(ids) > switch)]
        if distinct:
            found, reused = _score_distinct(model, prompt, distinct)
            logprobs |= found
    if any(np.isnan(values).any() for values in logprobs.values()):
        raise UserError(NUMBERS_NOT_FINITE)
    tokens = tuple(
        tuple(
            llm.Token(tokenizer.piece(token), token, float(logprob))
            for token, logprob in zip(ids, logprobs[ids], strict=True)
        )
        for ids in continuations
    )
    usage = llm.Usage(len(prompt), reused, 0, time.perf_counter() - started, int(truncated > 0))
    return llm.Scored(tokens, usage)


def _score_distinct(
    model: PagedDecoder, prompt: np.ndarray, continuations: Sequence[tuple[int, ...]]
) -> tuple[dict[tuple[int, ...], np.ndarray], int]:
    """Returns each continuation's log-probabilities, and the number of reused prompt tokens.

    The prompt is computed once. Each further call scores the continuations that fit into a
    prefill chunk; their number depends only on this request.
    """
    store, context = model.store, model.context
    first, longest = len(prompt) - 1, max(map(len, continuations))
    chunk_size = model.options.prefill_chunks[0]
    width = min(next_power_of_two(longest), chunk_size)
    rows = min(next_power_of_two(len(continuations)), chunk_size // width)
    rows = max(1, min(rows, (context - first) // width))
    length = min(first + max(longest + 1, rows * width), context)
    count = -(-len(continuations) // rows) * rows
    tokens_NS = np.zeros((count, len(prompt) + longest + width), np.int32)
    tokens_NS[:, : len(prompt)] = prompt
    for row, ids in zip(tokens_NS, continuations, strict=False):
        row[len(prompt) : len(prompt) + len(ids)] = ids
    logprob_NS = np.zeros(tokens_NS.shape, np.float32)  # each token, given the tokens before it
    allocations: list[Allocation] = []
    with model.freeing(allocations):
        total = len(prompt) + longest
        allocation = model.prefill(prompt[:-1], length, total, allocations)
        assert allocation is not None  # a full context has room, because no row is busy
        for batch in (slice(i, i + rows) for i in range(0, count, rows)):
            end = first + max(map(len, continuations[batch]))
            # There are several chunks only if the batch is a single long continuation.
            for start, size in chunks(first, end, (width,)):
                after = slice(start + 1, start + 1 + size)
                with model.on_mesh():
                    store.cache, values = steps.score(
                        model.config,
                        model.weights,
                        store.cache,
                        store.table(allocation, start + size * rows),
                        tokens_NS[batch, start : start + size],
                        tokens_NS[batch, after],
                        np.int32(start),
                        np.int32(total),
                        lora=model.lora,
                    )
                logprob_NS[batch, after] = values["logprob"]
    pairs = zip(continuations, logprob_NS[:, len(prompt) :], strict=False)
    return {ids: logprob_T[: len(ids)] for ids, logprob_T in pairs}, allocation.reused


def describe_prompt(
    model: PagedDecoder, row: Row, details: Details, allocations: list[Allocation]
) -> Allocation | None:
    """Prefills all but the last token of a prompt, and describes all but its first token.

    Cached prefixes are neither used nor added, because they come from another program. Returns
    None if there is no room.
    """
    store, tokens = model.store, row.prompt
    allocation = store.allocator.allocate((), row.length, ())
    if allocation is None:
        return None
    allocations.append(allocation)
    count, parts = len(tokens) - 1, []
    for start, size in chunks(0, count, model.options.prefill_chunks):
        with model.on_mesh():
            store.cache, part = steps.score(
                model.config,
                model.weights,
                store.cache,
                store.table(allocation, start + size),
                padded_slice(tokens[:-1], start, size)[None],
                padded_slice(tokens[1:], start, size)[None],
                np.int32(start),
                np.int32(len(tokens)),
                lora=model.lora,
                details=details,
            )
        parts.append(jax.device_get(part))
    row.prompt_details = {
        name: np.concatenate([part[name][0] for part in parts])[:count]
        for name in (parts[0] if parts else ())
    }
    row.finite = not any(np.isnan(values).any() for values in row.prompt_details.values())
    return allocation

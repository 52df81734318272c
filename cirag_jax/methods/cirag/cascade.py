"""Adaptive cascaded generation (section 3.4): answers from triples, sentences, then passages.

The reader may refuse at each granularity; the first answer that is not a refusal is used. Any
method that collects `Evidence` can use the cascade.
"""

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence

from cirag_jax.methods.cirag import routing
from cirag_jax.methods.common import reading_prompts
from cirag_jax.methods.common.evidence import (
    Evidence,
    passage_line,
    rank_facts,
    rank_passages,
    rank_sentences,
    triple_line,
)
from cirag_jax.methods.common.reading import ask_reader
from cirag_jax.runtime.requests import Program
from cirag_jax.triples.normalization import Normalization, normalize
from cirag_jax.types import Attempt, Granularity, Passage, Prediction, Step, Triple


class CascadeConfig:
    """Base class of settings for methods that use the cascade; `CiragConfig` describes the fields.

    ``pools`` lists the granularities that the cascade reads, in order.
    """

    pools: tuple[Granularity, ...]
    normalization: Normalization
    force_answer: bool
    wide_refusal: bool
    grounded_answers: bool
    reader_format: str
    answer_tokens: int
    answer_logprobs: bool = False
    router: str | None = None
    router_skip: float = 0.0


def cascade(
    question: str,
    evidence: Evidence,
    first: Sequence[Passage],
    config: CascadeConfig,
    parse_errors: collections.Counter[str],
    steps: Sequence[Step] = (),
) -> Program[list[Attempt]]:
    """Reads one granularity after another until the reader answers (Eq. 5 and 6).

    With ``config.router``, a granularity before the last is skipped, as if its pool were empty, if
    the router's probability is below ``config.router_skip`` (ours). The router reads the scores of
    ``steps`` and the first refusal.

    If the pool of passages is empty, the reader gets the passages ``first`` (in CIRAG, D_1 of the
    first round). Any other empty pool is treated as a refusal, without a model call.
    """
    attempts: list[Attempt] = []
    for granularity in config.pools:
        pool = _pool(granularity, evidence, first)
        if pool and config.router and granularity != config.pools[-1]:
            refusal = next((attempt for attempt in attempts if attempt.evidence), None)
            worth = yield from routing.probability(question, granularity, steps, refusal)
            pool = pool if worth >= config.router_skip else ()
        if not pool:
            attempts.append(Attempt(granularity, (), "", "", False))
            continue
        attempts.append((yield from _read(question, granularity, pool, config, parse_errors)))
        if attempts[-1].sufficient or attempts[-1].error is not None:
            return attempts
    if config.force_answer:
        granularity, pool = attempts[-1].granularity, attempts[-1].evidence
        if not pool:
            granularity, pool = "passage", _pool("passage", evidence, first)
        attempt = yield from _read(question, granularity, pool, config, parse_errors, False)
        attempts.append(attempt)
    return attempts


def _pool(
    granularity: Granularity, evidence: Evidence, first: Sequence[Passage]
) -> tuple[str, ...]:
    """Returns the pool of a granularity (C, S or D) as lines of the reader's prompt."""
    if granularity == "triple":
        return tuple(triple_line(t, evidence.normalization) for t in evidence.triples)
    if granularity == "sentence":
        return tuple(map(evidence.sentence, evidence.sentences))
    return tuple(passage_line(p) for p in evidence.passages or first)


def _read(
    question: str,
    granularity: Granularity,
    pool: tuple[str, ...],
    config: CascadeConfig,
    parse_errors: collections.Counter[str],
    may_refuse: bool = True,
) -> Program[Attempt]:
    """Returns the answer a^(g) and whether it is sufficient (Eq. 5)."""
    messages = reading_prompts.answer_messages(
        question, granularity, pool, may_refuse=may_refuse, reader_format=config.reader_format
    )
    attempt = yield from ask_reader(
        messages,
        granularity,
        pool,
        parse_errors,
        parse=functools.partial(reading_prompts.parse_answer, wide=config.wide_refusal),
        max_tokens=config.answer_tokens,
        prompt=reading_prompts.PROMPTS[granularity],
        logprobs=config.answer_logprobs or config.router is not None,
    )
    if config.grounded_answers and not contains_answer(pool, attempt.answer):
        return dataclasses.replace(attempt, sufficient=False)
    return attempt


def contains_answer(pool: Sequence[str], answer: str) -> bool:
    """Returns whether the answer is yes or no, or occurs word for word in the evidence.

    Texts are compared in both normal forms, ascii and unicode, because triples may be in ascii.
    """
    for form in ("ascii", "unicode"):
        words = normalize(answer, form)
        if words in ("yes", "no"):
            return True
        if words and f" {words} " in f" {normalize(' '.join(pool), form)} ":
            return True
    return False


def prediction(
    steps: Sequence[Step],
    attempts: Sequence[Attempt],
    config: CascadeConfig,
    parse_errors: Mapping[str, int],
    passages: tuple[str, ...] | None = None,
) -> Prediction:
    """Returns the cascade's answer a^(g*), its granularity g* (Eq. 6) and the ranked evidence.

    The granularity is ``default`` if the reader refused every attempt, the answer was forced, or
    there were no attempts. The answer is empty if the reader refused every attempt. By default,
    passages are ranked by their facts; ``passages`` overrides this ranking.
    """
    facts = rank_facts(steps, config.normalization)
    last = attempts[-1] if attempts else Attempt("default", (), "", "", False)
    is_forced = len(attempts) > len(config.pools)
    return Prediction(
        answer=last.answer if last.sufficient or is_forced else "",
        granularity=last.granularity if last.sufficient and not is_forced else "default",
        passages=rank_passages(facts, steps) if passages is None else passages,
        sentences=rank_sentences(facts),
        triples=tuple(fact for fact in facts if isinstance(fact, Triple)),
        steps=tuple(steps),
        attempts=tuple(attempts),
        parse_errors={kind: n for kind, n in sorted(parse_errors.items()) if n},
    )

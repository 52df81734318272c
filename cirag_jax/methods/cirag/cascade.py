"""The cascade: an answer from triples, else from sentences, else from passages (CIRAG, 3.4).

CIRAG reads by it, and so may another method that collects `Evidence`.
"""

import collections
from collections.abc import Sequence
from typing import Protocol

from cirag_jax.methods.common import reading_prompts
from cirag_jax.methods.common.evidence import Evidence, passage_line, triple_line
from cirag_jax.runtime.requests import Generate, Generated, Program
from cirag_jax.triples.normalization import normalise
from cirag_jax.types import Attempt, Granularity, Passage


class CascadeConfig(Protocol):
    """What the cascade reads of a method's settings; `CiragConfig` describes the fields."""

    @property
    def pools(self) -> tuple[Granularity, ...]:
        """Granularities that can hold something, in the order of the cascade."""
        ...

    @property
    def force_answer(self) -> bool:
        """See above."""
        ...

    @property
    def wide_refusal(self) -> bool:
        """See above."""
        ...

    @property
    def grounded_answers(self) -> bool:
        """See above."""
        ...

    @property
    def reader_format(self) -> str:
        """See above."""
        ...

    @property
    def answer_tokens(self) -> int:
        """See above."""
        ...


def cascade(
    question: str,
    evidence: Evidence,
    first: Sequence[Passage],
    config: CascadeConfig,
    parse_errors: collections.Counter[str],
) -> Program[list[Attempt]]:
    """Triples, then sentences, then passages: the first granularity whose answer is no refusal.

    An empty pool is refused without a call, except that of the passages, which the first round's
    documents D_1 then fill.
    """
    attempts: list[Attempt] = []
    for granularity in config.pools:
        pool = _pool(granularity, evidence, first)
        if not pool:
            attempts.append(Attempt(granularity, (), "", "", False))
            continue
        attempts.append((yield from _read(question, granularity, pool, config, parse_errors)))
        if attempts[-1].sufficient:
            return attempts
    if config.force_answer:
        granularity, pool = attempts[-1].granularity, attempts[-1].evidence
        if not pool:
            granularity, pool = "passage", _pool("passage", evidence, first)
        attempts.append(
            (yield from _read(question, granularity, pool, config, parse_errors, False))
        )
    return attempts


def _pool(
    granularity: Granularity, evidence: Evidence, first: Sequence[Passage]
) -> tuple[str, ...]:
    """C, S or D as the reader sees it."""
    if granularity == "triple":
        return tuple(triple_line(t, evidence.normalization) for t in evidence.triples)
    if granularity == "sentence":
        return tuple(evidence.sentence(place) for place in evidence.sentences)
    return tuple(passage_line(p) for p in evidence.passages or first)


def _read(
    question: str,
    granularity: Granularity,
    pool: tuple[str, ...],
    config: CascadeConfig,
    parse_errors: collections.Counter[str],
    may_refuse: bool = True,
) -> Program[Attempt]:
    """M_R reads one pool; Suf is 0 where its answer is the refusal."""
    response: Generated = yield Generate(
        reading_prompts.answer_messages(
            question,
            granularity,
            pool,
            may_refuse=may_refuse,
            reader_format=config.reader_format,
        ),
        "reader",
        max_tokens=config.answer_tokens,
    )
    answer, sufficient, problem = reading_prompts.parse_answer(
        response.text,
        wide=config.wide_refusal,
        truncated=response.finish_reason == "length",
    )
    if problem is not None:
        parse_errors[f"answer_{problem}"] += 1
    if config.grounded_answers and not holds(pool, answer):
        sufficient = False
    return Attempt(granularity, pool, response.text, answer, sufficient)


def holds(pool: Sequence[str], answer: str) -> bool:
    """Whether the evidence has the answer's words in a row; it need not have a yes or a no.

    In ascii or in unicode: triples may be shown as ascii ("sk ne"), which other scripts lack.
    """
    for form in ("ascii", "unicode"):
        words = normalise(answer, form)
        if words in ("yes", "no"):
            return True
        if words and f" {words} " in f" {normalise(' '.join(pool), form)} ":
            return True
    return False


def outcome(attempts: Sequence[Attempt], config: CascadeConfig) -> tuple[str, Granularity]:
    """The answer of the last attempt, and the granularity that gave it.

    Where all refuse, that output stands, in the default bucket. So do an answer that was forced
    and, where nobody read, the empty one.
    """
    if not attempts:
        return "", "default"
    last = attempts[-1]
    by_itself = last.sufficient and len(attempts) <= len(config.pools)
    return last.answer, last.granularity if by_itself else "default"

"""Adaptive cascaded generation (section 3.4): answers from triples, sentences, then passages.

The reader may refuse at each granularity; the first answer that is not a refusal counts. Any method
that collects `Evidence` can use the cascade.
"""

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Protocol

from cirag_jax.methods.common import reading_prompts
from cirag_jax.methods.common.evidence import Evidence, passage_line, triple_line
from cirag_jax.methods.common.reading import ask_reader
from cirag_jax.runtime.requests import Program
from cirag_jax.triples.normalization import normalise
from cirag_jax.types import Attempt, Granularity, Passage


class CascadeConfig(Protocol):
    """The settings that the cascade reads; `CiragConfig` describes them."""

    @property
    def pools(self) -> tuple[Granularity, ...]:
        """Granularities whose pools can hold evidence, in the order of the cascade."""
        ...

    @property
    def force_answer(self) -> bool:
        """Whether the reader must answer if it refused at every granularity."""
        ...

    @property
    def wide_refusal(self) -> bool:
        """Whether paraphrases of "Unanswerable" are refusals."""
        ...

    @property
    def grounded_answers(self) -> bool:
        """Whether answers that do not occur in the evidence are refusals."""
        ...

    @property
    def reader_format(self) -> str:
        """Format of the prompt and the answer."""
        ...

    @property
    def answer_tokens(self) -> int:
        """Most new tokens of an answer."""
        ...


def cascade(
    question: str,
    evidence: Evidence,
    first: Sequence[Passage],
    config: CascadeConfig,
    parse_errors: collections.Counter[str],
) -> Program[list[Attempt]]:
    """Reads one granularity after the other until the reader answers (Eq. 5 and 6).

    An empty pool counts as a refusal, without a call. An empty pool of passages is filled with the
    passages ``first`` of the first round (D_1).
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
        attempt = yield from _read(question, granularity, pool, config, parse_errors, False)
        attempts.append(attempt)
    return attempts


def _pool(
    granularity: Granularity, evidence: Evidence, first: Sequence[Passage]
) -> tuple[str, ...]:
    """The lines of the pool C, S or D that the reader reads."""
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
    """a^(g) = M_R(x, C^(g), I^(g)) of Eq. 5, with its sufficiency Suf."""
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
    )
    if config.grounded_answers and not contains_answer(pool, attempt.answer):
        return dataclasses.replace(attempt, sufficient=False)
    return attempt


def contains_answer(pool: Sequence[str], answer: str) -> bool:
    """Returns whether the words of the answer occur in a row in the evidence, or it is yes or no.

    Words are compared in the forms ascii and unicode, because triples may be shown in ascii.
    """
    for form in ("ascii", "unicode"):
        words = normalise(answer, form)
        if words in ("yes", "no"):
            return True
        if words and f" {words} " in f" {normalise(' '.join(pool), form)} ":
            return True
    return False


def final_answer(attempts: Sequence[Attempt], config: CascadeConfig) -> tuple[str, Granularity]:
    """Returns the last answer a^(g*) and its granularity g* (Eq. 6).

    The granularity is ``default`` if every attempt was refused, the answer was forced, or there
    were no attempts.
    """
    if not attempts:
        return "", "default"
    last = attempts[-1]
    is_forced = len(attempts) > len(config.pools)
    return last.answer, last.granularity if last.sufficient and not is_forced else "default"

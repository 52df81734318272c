"""What the text baselines share: a search that may be reranked, and one reading of it."""

import collections
from collections.abc import Sequence
from typing import Literal

from cirag_jax.methods.common import reading_prompts, short_answers
from cirag_jax.methods.common.evidence import passage_line
from cirag_jax.runtime.requests import (
    Generate,
    Generated,
    Program,
    Rank,
    Ranked,
    Retrieve,
    Retrieved,
)
from cirag_jax.types import Attempt, Granularity, Passage

# FlashRAG's prompt, or a format of CIRAG's reader.
ReaderFormat = Literal["documents", reading_prompts.ReaderFormat]

# What an answer of each format takes: four facts or a thought come first in some.
ANSWER_TOKENS = {
    "documents": 32,
    "brief": 32,
    "chain": 160,
    "thought": 192,
    "pairs": 64,  # GenGround
    "blocks": 64,  # C2RAG
    "outline": 256,  # DualRAG
}


def search(query: str, k: int, rerank_from: int = 0, min_score: float = 0.0) -> Program[Retrieved]:
    """The ``k`` nearest passages, or those of a longer list that a ranker puts first.

    Args:
      query: what is searched.
      k: passages at most.
      rerank_from: so many are retrieved for the ranker ``passages``; 0: none is asked.
      min_score: what it must score a passage above (DualRAG's baselines: 50 passages, 10 kept whose
        logit is above 0).
    """
    found: Retrieved = yield Retrieve(query, max(k, rerank_from))
    if not rerank_from or not found.passages:
        return found
    best: Ranked[Passage] = yield Rank(query, found.passages, k, "passages")
    good = [(p, s) for p, s in zip(best.texts, best.scores, strict=True) if s > min_score]
    return Retrieved(tuple(p for p, _ in good), tuple(s for _, s in good))


def read(
    question: str,
    granularity: Granularity,
    evidence: Sequence[Passage] | Sequence[str],
    reader_format: str,
    parse_errors: collections.Counter[str],
) -> Program[Attempt]:
    """The reader answers from evidence, and may not refuse.

    Args:
      question: what is asked.
      granularity: of the evidence.
      evidence: passages, or lines of sentences or triples; documents are passages.
      reader_format: documents (FlashRAG's prompt), or as for CIRAG's reader: thought, chain, brief.
      parse_errors: where a malformed answer is counted.
    """
    lines = tuple(passage_line(one) if isinstance(one, Passage) else one for one in evidence)
    if reader_format == "documents":
        passages = [one for one in evidence if isinstance(one, Passage)]
        messages = short_answers.reading_messages(question, passages)
    else:
        messages = reading_prompts.answer_messages(
            question, granularity, lines, may_refuse=False, reader_format=reader_format
        )
    response: Generated = yield Generate(messages, "reader")
    answer, sufficient, problem = parse_response(response, reader_format)
    if problem is not None:
        parse_errors[f"answer_{problem}"] += 1
    return Attempt(granularity, lines, response.text, answer, sufficient)


def parse_response(response: Generated, reader_format: str) -> tuple[str, bool, str | None]:
    """Returns what `reading_prompts.parse_answer` does: answer, whether it is one, problem or None.

    The first line of a format that has no others is the answer, however it ended.
    """
    truncated = response.finish_reason == "length"
    if reader_format in reading_prompts.FORMATS:
        return reading_prompts.parse_answer(response.text, truncated=truncated)
    answer = short_answers.parse_short_answer(response.text)
    cut = truncated and len(response.text.strip().splitlines()) == 1
    return answer, bool(answer), "empty" if not answer else "truncated" if cut else None

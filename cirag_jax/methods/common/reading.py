"""Steps that most methods share: searching with an optional reranker, and reading."""

import collections
from collections.abc import Callable, Sequence
from typing import Literal

from cirag_jax.llm.types import Message
from cirag_jax.methods.common import reading_prompts, short_answers
from cirag_jax.methods.common.evidence import passage_line
from cirag_jax.methods.common.own_prompts import Prompt
from cirag_jax.runtime.requests import (
    Generate,
    Generated,
    Program,
    Rank,
    Ranked,
    RequestError,
    Retrieve,
    Retrieved,
)
from cirag_jax.types import Attempt, Granularity, Passage
from cirag_jax.validation import check_fields

# FlashRAG's prompt, or a format of CIRAG's reader.
ReaderFormat = Literal["documents", reading_prompts.ReaderFormat]

# Maximum number of new tokens per reader format; some have facts or a thought before the answer.
ANSWER_TOKENS = {
    "documents": 32,
    "brief": 32,
    "chain": 160,
    "thought": 192,
    "pairs": 64,  # GenGround
    "blocks": 64,  # C2RAG
    "outline": 256,  # DualRAG
}


NO_MINIMUM = -1e9  # Below every score.


class SearchConfig:
    """Base class of settings for methods that search with an optional reranker."""

    num_passages: int
    rerank_from: int
    min_score: float = NO_MINIMUM

    def __post_init__(self):
        check_fields(self)


def search(query: str, config: SearchConfig, *, rank_by: str | None = None) -> Program[Retrieved]:
    """Returns the ``num_passages`` nearest passages, or the best of ``rerank_from`` passages.

    The ranker ``passages`` selects the best passages for ``rank_by``, by default the query, without
    passages that score ``min_score`` or less. In DualRAG's code, NativeRAG keeps up to 10 of 50
    passages, with a logit above 0, and GenGround keeps 10 with any logit.
    """
    retrieved: Retrieved = yield Retrieve(query, max(config.num_passages, config.rerank_from))
    if not config.rerank_from or not retrieved.passages:
        return retrieved
    ranked: Ranked[Passage] = yield Rank(
        rank_by or query, retrieved.passages, config.num_passages, "passages"
    )
    pairs = zip(ranked.texts, ranked.scores, strict=True)
    good = [(passage, score) for passage, score in pairs if score > config.min_score]
    return Retrieved(tuple(p for p, _ in good), tuple(s for _, s in good))


def read(
    question: str,
    granularity: Granularity,
    evidence: Sequence[Passage] | Sequence[str],
    reader_format: str,
    parse_errors: collections.Counter[str],
    *,
    max_tokens: int = 0,
) -> Program[Attempt]:
    """Returns the reader's answer from evidence; the prompt does not allow refusals.

    The evidence consists of passages, or of lines with sentences or triples. ``reader_format`` is
    documents (FlashRAG's prompt, only for passages), or a format of CIRAG's reader: thought, chain,
    brief. Malformed answers are counted in ``parse_errors``.
    """
    lines = tuple(passage_line(e) if isinstance(e, Passage) else e for e in evidence)
    parse, prompt = reading_prompts.parse_answer, reading_prompts.PROMPTS[granularity]
    if reader_format == "documents":
        passages = [e for e in evidence if isinstance(e, Passage)]
        messages, parse = short_answers.reading_messages(question, passages), parse_line
        prompt = short_answers.PROMPT if passages else short_answers.CLOSED_BOOK
    else:
        messages = reading_prompts.answer_messages(
            question, granularity, lines, may_refuse=False, reader_format=reader_format
        )
    return (
        yield from ask_reader(
            messages,
            granularity,
            lines,
            parse_errors,
            parse=parse,
            max_tokens=max_tokens,
            prompt=prompt,
        )
    )


def render_reader(reader_format: str, *granularities: Granularity) -> None:
    """Builds the conversations of `read`, for `registry.Method.render`."""
    if reader_format == "documents":
        short_answers.reading_messages("", [Passage("", "", "")])
        short_answers.reading_messages("", ())
        return
    for granularity in granularities:
        reading_prompts.answer_messages("", granularity, (), reader_format=reader_format)


def ask_reader(
    messages: tuple[Message, ...],
    granularity: Granularity,
    evidence: tuple[str, ...],
    parse_errors: collections.Counter[str],
    *,
    parse: Callable[..., tuple[str, bool, str | None]] = reading_prompts.parse_answer,
    max_tokens: int = 0,
    prompt: Prompt,
    logprobs: bool = False,
) -> Program[Attempt]:
    """Returns the reader's answer to ``messages``, which contain the lines of ``evidence``.

    ``parse`` has the signature of `reading_prompts.parse_answer`. ``prompt`` is the prompt of the
    messages. ``logprobs`` adds the log-probabilities of the response to the attempt. If the reader
    fails, the attempt has an ``error``; the method then ends without further requests, so that the
    question fails but its retrieved passages count.
    """
    try:
        response: Generated = yield Generate(
            messages, "reader", max_tokens=max_tokens, logprobs=logprobs
        )
    except RequestError as error:
        return Attempt(granularity, evidence, "", "", False, str(error))
    truncated = response.finish_reason == "length"
    answer, sufficient, problem = parse(prompt.read(response.text), truncated=truncated)
    if problem is not None:
        parse_errors[f"answer_{problem}"] += 1
    tokens = tuple(t.logprob for t in response.tokens or () if t.logprob is not None)
    return Attempt(granularity, evidence, response.text, answer, sufficient, None, tokens or None)


def parse_line(text: str, *, truncated: bool = False) -> tuple[str, bool, str | None]:
    """Parses a one-line answer; returns the same values as `reading_prompts.parse_answer`."""
    answer = short_answers.parse_short_answer(text)
    is_cut = truncated and len(text.strip().splitlines()) == 1  # A line before another is complete.
    return answer, bool(answer), "empty" if not answer else "truncated" if is_cut else None

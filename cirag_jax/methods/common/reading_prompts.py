"""The prompts of CIRAG's reader (Figure 12 of the paper, in our words) and the answer parser."""

import re
from collections.abc import Sequence
from typing import Literal, get_args

from cirag_jax.io import one_line
from cirag_jax.llm.types import Message
from cirag_jax.methods.common.own_prompts import Prompt
from cirag_jax.methods.common.prompt_parts import conversation_hash
from cirag_jax.methods.common.refusals import refuses

UNANSWERABLE = "Unanswerable"
ReaderFormat = Literal["thought", "chain", "brief"]
FORMATS: tuple[ReaderFormat, ...] = get_args(ReaderFormat)
_ANSWER_MARK = re.compile(r"answer[\s*]*:", re.IGNORECASE)

_READING = """\
You are an experienced reader. Study the {noun} you are given and work out the answer to the query \
from them. Begin with "Thought: " and reason in a few sentences. End with "Answer: " followed by \
the answer alone: a name, a date, a number or a short phrase, without further words."""
_BRIEF = 'Answer the query from the {noun} below. Write "Answer: " and the answer alone.'
_CHAIN = (
    "Answer the query from the {noun} below. First write the facts that lead to the answer, each "
    'on a line of its own: head; relation; tail. Then write "Answer: " and the answer alone.'
)
_INSTRUCTIONS = {"thought": _READING, "chain": _CHAIN, "brief": _BRIEF}
_REFUSAL = ' If the {noun} do not hold the answer, write "Answer: Unanswerable".'

_NOUNS = {"triple": "triples", "sentence": "sentences", "passage": "passages"}

PROMPTS = {
    granularity: Prompt(
        f"reader.{granularity}",
        labels={"evidence": f"{noun.capitalize()}:", "query": "Query:"},
        written={"answer": "Answer:"},
        marks={"unanswerable": UNANSWERABLE},
        texts={"refusal": _REFUSAL.format(noun=noun)},
    )
    for granularity, noun in _NOUNS.items()
}

EXAMPLE_QUERY = "In which country is the town where Mira Solheim was born?"
_EXAMPLE_EVIDENCE = {
    "triple": (
        "('mira solheim', 'born in', 'lindvik')",
        "('mira solheim', 'profession', 'cellist')",
        "('lindvik', 'town in', 'norway')",
    ),
    "sentence": (
        "Mira Solheim: Mira Solheim (born in Lindvik) is a cellist.",
        "Lindvik: Lindvik is a small town on the coast of Norway.",
    ),
    "passage": (
        "Mira Solheim\nMira Solheim (born in Lindvik) is a cellist. She has recorded six albums.",
        "Lindvik\nLindvik is a small town on the coast of Norway. It lives from fishing.",
    ),
}
_EXAMPLE_ANSWER = (
    "Thought: Mira Solheim was born in Lindvik, and Lindvik is a town in Norway. So the town of "
    "her birth is in Norway.\nAnswer: Norway"
)


def answer_messages(
    question: str,
    granularity: str,
    evidence: Sequence[str],
    *,
    may_refuse: bool = True,
    reader_format: str = "thought",
) -> tuple[Message, ...]:
    """Returns the reader's conversation about evidence of one granularity.

    ``may_refuse`` adds the sufficiency instruction I^(g), which allows refusals. The format
    ``thought`` shows a worked example and requests reasoning before the answer. Trained readers
    use ``chain`` (the facts that lead to the answer, then the answer) or ``brief`` (the answer).
    """
    noun, prompt = _NOUNS[granularity], PROMPTS[granularity]
    instruction = _INSTRUCTIONS[reader_format].format(noun=noun)
    example = (
        Message("user", *_reading_turn(EXAMPLE_QUERY, noun, _EXAMPLE_EVIDENCE[granularity])),
        Message("assistant", _EXAMPLE_ANSWER),
    )
    return prompt.conversation(
        instruction,
        example if reader_format == "thought" else (),
        Message("user", *_reading_turn(question, noun, evidence)),
        appended=prompt.text("refusal") if may_refuse else "",
    )


def render_answer(answer: str | None, chain: Sequence[tuple[str, str, str]] = ()) -> str:
    """Returns the response that a reader is trained to write: the facts of ``chain``, an answer.

    ``answer`` is None if the evidence does not suffice.
    """
    facts = ["; ".join(map(one_line, fact)) for fact in chain]
    last = UNANSWERABLE if answer is None else one_line(answer)
    return "\n".join([*facts, f"Answer: {last}"])


def prompt_digest(reader_format: str) -> str:
    """Returns a hash of the rendered prompts, which must be the same as in a reader's training."""
    return conversation_hash(
        message
        for granularity in _NOUNS
        for may_refuse in (True, False)
        for message in answer_messages(
            EXAMPLE_QUERY,
            granularity,
            _EXAMPLE_EVIDENCE[granularity],
            may_refuse=may_refuse,
            reader_format=reader_format,
        )
    )


def _reading_turn(question: str, noun: str, evidence: Sequence[str]) -> tuple[str, str, str]:
    """Returns a user turn of heading, evidence (which truncation may drop) and query."""
    return f"{noun.capitalize()}:\n", "\n".join(evidence), f"\n\nQuery: {question}"


def answer_start(text: str) -> int:
    """Returns the position after the last ``Answer:`` of a response; 0 if there is none."""
    return max((mark.end() for mark in _ANSWER_MARK.finditer(text)), default=0)


def parse_answer(
    text: str, *, wide: bool = False, truncated: bool = False
) -> tuple[str, bool, str | None]:
    """Parses a reader's response; never fails.

    Returns:
      The answer, whether it is sufficient, and the kind of problem (``empty``, ``truncated``,
      ``no_answer_mark``) or None. The answer is the line after the last ``Answer:``, or the full
      response if it has no such mark. It is insufficient, and returned as an empty text, if it is
      a refusal (with ``wide``, in any words) or a thought that was cut off before its answer.
    """
    if not text.strip():
        return "", False, "empty"
    start = answer_start(text)
    marked = start > 0
    lines = [line.strip(" \t*") for line in text[start:].splitlines() if line.strip(" \t*")]
    answer = (lines[0] if lines else "") if marked else one_line(text)
    problem = None if marked else "no_answer_mark"
    if truncated and not (marked and len(lines) > 1):  # A line before another is complete.
        problem = "truncated"
    if not answer:
        return "", False, problem or "empty"
    lower = answer.lower()
    # The shipped reader writes half of "Unanswerable" if its prompt does not allow refusals.
    is_half = lower.strip(" .'\"") == "unanswer"
    is_refusal = is_half or "unanswerable" in lower or (wide and refuses(answer))
    is_sufficient = not is_refusal and (marked or not truncated)
    return answer if is_sufficient else "", is_sufficient, problem
